/* SPDX-License-Identifier: Apache-2.0
 *
 * routes.h - launchers of routes.cu: counting a routing, and its maps, on the device.
 */
#ifndef EPO_BACKEND_CUDA_ROUTES_H
#define EPO_BACKEND_CUDA_ROUTES_H

#include <cuda_runtime_api.h>

#include "backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GPU_ROUTE_TOKENS 64 /* per block */
#define GPU_ROUTE_EXPERTS 4096
#define GPU_ROUTE_RANKS 256

/* Device memory of one counting; blocks = tokens over GPU_ROUTE_TOKENS, rounded up. */
typedef struct gpu_route_scratch {
    int32_t *copy;           /* [tokens * top_k] experts */
    uint32_t *base;          /* [blocks][E]: before each block, rows of the expert */
    uint32_t *rank_rows;     /* [blocks][R] */
    unsigned long long *bad; /* first bad slot; then the number of slots dropped */
    /* With a capacity only: */
    uint32_t *total, *start; /* [E]: slots that name the expert, and its place in list */
    int32_t *list;           /* [tokens * top_k]: slots by expert, in order */
} gpu_route_scratch;

/* Results go to mapped host memory: expert_rows[E], rank_rows[R], bad[2]. */
cudaError_t gpu_kernel_route_count(cudaStream_t stream, const epo_routes *r,
                                   const gpu_route_scratch *s, uint32_t *expert_rows,
                                   uint32_t *rank_rows, unsigned long long *bad);
/* expert_first, own_row (or NULL): device memory, [E].  With r->fill, token and slot hold
 * that many. */
cudaError_t gpu_kernel_route_send(cudaStream_t stream, const epo_routes *r,
                                  const gpu_route_scratch *s, const uint64_t *expert_first,
                                  const uint64_t *own_row, int32_t *token, int32_t *slot,
                                  int32_t *row);
/* first, count: device memory, [experts]. */
cudaError_t gpu_kernel_route_pad(cudaStream_t stream, const uint64_t *first, const uint64_t *count,
                                 int experts, uint64_t rows, int32_t *index);

#ifdef __cplusplus
}
#endif
#endif
