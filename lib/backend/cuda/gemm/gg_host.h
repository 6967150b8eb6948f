/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_host.h - what the host side of single products (gg_host.c) and of chains
 * (gg_chain.c) share.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_HOST_H
#define EPO_BACKEND_CUDA_GEMM_GG_HOST_H

#include <cuda_runtime_api.h>
#include <stdbool.h>

#include "core/status.h"
#include "gg_kernels.h"

/* Checks everything that a call needs and fills in what the kernels take. */
epo_status gg_make_params(const epo_gg *g, int *path, gg_params *p);
epo_status gg_make_maps(const epo_gg *g, const gg_params *p, gg_maps *maps);
/* As the output's, of other rows. */
epo_status gg_make_rows_map(const epo_gg *g, const gg_params *p, const void *base, uint64_t rows,
                            CUtensorMap *map);
/* Blocks: the SM budget, but no more than there can be tiles. */
epo_status gg_count_blocks(const epo_gg *g, const gg_params *p, int *blocks);
/* `early`: begin while the kernel before in the stream (prepare) still runs. */
epo_status gg_launch(const void *fn, int blocks, int threads, int smem, int cluster, void **args,
                     bool early, void *stream);
epo_status gg_cuda_status(cudaError_t err, const char *what);

#endif
