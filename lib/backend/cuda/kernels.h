/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels.h - launchers of kernels.cu.  Each enqueues on `stream` and returns the
 * launch's own error.  Pointers are device memory.
 */
#ifndef EPO_BACKEND_CUDA_KERNELS_H
#define EPO_BACKEND_CUDA_KERNELS_H

#include <cuda_runtime_api.h>

#include "backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GPU_SEGMENTS 96 /* per launch; with their rows below 4 KiB of arguments */

/* Rows of one piece: dst[i] = src[index ? index[i] : i]. */
typedef struct gpu_segment {
    char *dst;
    const char *src;
    const int32_t *index;
    uint64_t rows;
} gpu_segment;

cudaError_t gpu_kernel_gather(cudaStream_t stream, int sms, const epo_rows_gather *g);
/* By `blocks` blocks of 1024 threads at most. */
cudaError_t gpu_kernel_segments(cudaStream_t stream, int blocks, const gpu_segment *segments,
                                int count, uint32_t row_bytes);
cudaError_t gpu_kernel_reduce(cudaStream_t stream, int sms, const epo_rows_reduce *r);
cudaError_t gpu_kernel_swiglu(cudaStream_t stream, const epo_swiglu *s);
/* dst[i] = slot 0 [i] + slot 1 [i] + ..., slots `stride` floats apart. */
cudaError_t gpu_kernel_sum(cudaStream_t stream, float *dst, const float *slots, uint64_t stride,
                           int count, uint64_t n);

#ifdef __cplusplus
}
#endif
#endif
