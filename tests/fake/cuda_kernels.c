/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_kernels.c - beside the CUDA runtime of cuda_runtime.c, where kernels do nothing: what the
 * CPU reads of a routing, and the flags of rows that kernels store, are made here in their place,
 * by the linker's --wrap.
 */
#include "config.h"

#include "backend/cuda/flex_plan.h"
#include "backend/cuda/gpu.h"
#include "backend/cuda/routes.h"
#include "backend/route.h"

#include <stdlib.h>
#include <string.h>

cudaError_t __real_gpu_kernel_route_count(cudaStream_t stream, const epo_routes *r,
                                          const gpu_route_scratch *s, uint32_t *expert_rows,
                                          uint32_t *rank_rows, unsigned long long *bad);
cudaError_t __wrap_gpu_kernel_route_count(cudaStream_t stream, const epo_routes *r,
                                          const gpu_route_scratch *s, uint32_t *expert_rows,
                                          uint32_t *rank_rows, unsigned long long *bad);
cudaError_t __wrap_gpu_kernel_route_count(cudaStream_t stream, const epo_routes *r,
                                          const gpu_route_scratch *s, uint32_t *expert_rows,
                                          uint32_t *rank_rows, unsigned long long *bad) {
    const epo_route_shape shape = {
        .ranks = r->ranks, .experts = r->experts_all, .top_k = r->top_k, .chunks = 1, .align = 1};
    const size_t slots = (size_t)r->tokens * (size_t)r->top_k + 1;
    epo_route_rival *rivals = calloc(slots, sizeof *rivals);
    bad[0] = epo_route_check(&shape, r->experts, r->tokens, s->copy);
    bad[1] = 0;
    if (rivals != NULL && bad[0] + 1 == slots && r->capacity != EPO_ROUTE_UNLIMITED)
        bad[1] = epo_route_drop(&shape, s->copy, r->weights, r->tokens, r->capacity, r->by_weight,
                                expert_rows, rivals);
    free(rivals);
    epo_route_count(&shape, s->copy, r->tokens, expert_rows, rank_rows);
    return __real_gpu_kernel_route_count(stream, r, s, expert_rows, rank_rows, bad);
}

cudaError_t __real_gpu_flex_totals(cudaStream_t stream, const gpu_flex_plan *p, int first,
                                   uint32_t *out);
cudaError_t __wrap_gpu_flex_totals(cudaStream_t stream, const gpu_flex_plan *p, int first,
                                   uint32_t *out);
cudaError_t __wrap_gpu_flex_totals(cudaStream_t stream, const gpu_flex_plan *p, int first,
                                   uint32_t *out) {
    const epo_routes *r = &p->routes;
    const int n = p->chunks, local = r->experts_all / r->ranks;
    const epo_route_shape shape = {
        .ranks = r->ranks, .experts = r->experts_all, .top_k = r->top_k, .chunks = n, .align = 1};
    memset(out, 0, 2 * (size_t)r->ranks * (size_t)n * sizeof *out);
    for (int t = 0; t < r->tokens; t++)
        for (int d = 0; d < r->ranks; d++) {
            int least = n, most = -1;
            for (int k = 0; k < r->top_k; k++) {
                const int e = p->copy[t * r->top_k + k];
                if (e < 0 || e / local != d)
                    continue;
                const int c = epo_route_chunk_of(&shape, e % local);
                least = c < least ? c : least;
                most = c > most ? c : most;
            }
            if (most >= 0) {
                out[d * n + least]++;
                out[(r->ranks + d) * n + most]++;
            }
        }
    return __real_gpu_flex_totals(stream, p, first, out);
}

/* The last warp's words. */
cudaError_t __real_gpu_kernel_segments(cudaStream_t stream, int blocks, const gpu_segment *segments,
                                       int count, uint32_t row_bytes, const gpu_raise *raise);
cudaError_t __wrap_gpu_kernel_segments(cudaStream_t stream, int blocks, const gpu_segment *segments,
                                       int count, uint32_t row_bytes, const gpu_raise *raise);
cudaError_t __wrap_gpu_kernel_segments(cudaStream_t stream, int blocks, const gpu_segment *segments,
                                       int count, uint32_t row_bytes, const gpu_raise *raise) {
    for (int i = 0; raise != NULL && i < raise->parts; i++)
        for (int r = 0; r < raise->ranks; r++)
            __atomic_store_n(raise->words + (uint64_t)r * raise->rank_step + raise->part[i].word,
                             raise->epoch, __ATOMIC_RELEASE);
    return __real_gpu_kernel_segments(stream, blocks, segments, count, row_bytes, raise);
}
