/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_kernels.h - the kernels, by address, for cudaLaunchKernelExC.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_KERNELS_H
#define EPO_BACKEND_CUDA_GEMM_GG_KERNELS_H

#include "gg_params.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gg_kernel {
    const void *function;
    int threads;
    int smem_bytes; /* dynamic */
} gg_kernel;

/* Arguments: gg_params. */
const void *gg_prepare_kernel(void);
/* Arguments: gg_chain. */
const void *gg_chain_prepare_kernel(void);
/* Arguments: gg_chain, gg_chain_maps; tile_n 192 or 256. */
gg_kernel gg_sm90_chain_bf16(int back, int tile_n);
gg_kernel gg_sm90_chain_f16(int back, int tile_n);
/* A WGRAD's fuse whose results are 16 bits wide and not added to. */
#define GG_FRESH EPO_GG_SWIGLU
/* Arguments: gg_params, gg_maps.  function == NULL: no such
 * kernel. */
gg_kernel gg_sm90_kernel_bf16(int kind, int fuse, int tile_n);
gg_kernel gg_sm90_kernel_f16(int kind, int fuse, int tile_n);
/* Arguments: gg_params. */
gg_kernel gg_portable_kernel(int kind, int fuse, int type);

#ifdef __cplusplus
}
#endif
#endif
