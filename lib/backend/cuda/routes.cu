/* SPDX-License-Identifier: Apache-2.0
 *
 * routes.cu - counting sort of a routing by expert, stable in (token, slot): counts
 * per block of tokens, prefix over blocks, then every block places its slots in
 * order.  Atomics only count; places never depend on who comes first.
 */
#include <stdint.h>

#include "backend/cuda/routes.h"

namespace {

constexpr unsigned kAll = 0xffffffffu;

__global__ void __launch_bounds__(GPU_ROUTE_TOKENS) count_block(epo_routes r, gpu_route_scratch s) {
    extern __shared__ uint32_t shared[];
    uint32_t *rows = shared, *ranks = shared + r.experts_all;
    for (int i = threadIdx.x; i < r.experts_all + r.ranks; i += blockDim.x)
        shared[i] = 0;
    __syncthreads();
    const int t = blockIdx.x * GPU_ROUTE_TOKENS + threadIdx.x;
    const int local = r.experts_all / r.ranks;
    for (int k = 0; t < r.tokens && k < r.top_k; k++) {
        const int64_t flat = (int64_t)t * r.top_k + k, e = r.experts[flat];
        const bool bad = e < -1 || e >= r.experts_all;
        if (bad)
            atomicMin(s.bad, (unsigned long long)flat);
        s.copy[flat] = bad ? -1 : (int32_t)e;
        if (bad || e < 0)
            continue;
        atomicAdd(&rows[e], 1u);
        bool seen = false;
        for (int j = 0; j < k && !seen; j++) {
            const int32_t other = s.copy[flat - k + j];
            seen = other >= 0 && other / local == (int32_t)e / local;
        }
        if (!seen)
            atomicAdd(&ranks[e / local], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < r.experts_all; i += blockDim.x)
        s.base[(size_t)blockIdx.x * r.experts_all + i] = rows[i];
    for (int i = threadIdx.x; i < r.ranks; i += blockDim.x)
        s.rank_rows[(size_t)blockIdx.x * r.ranks + i] = ranks[i];
}

/* One thread per expert, then per rank: prefix over blocks, totals to the host. */
__global__ void prefix_blocks(epo_routes r, gpu_route_scratch s, int blocks, uint32_t *expert_rows,
                              uint32_t *rank_rows, unsigned long long *bad) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t sum = 0;
    if (i == 0)
        *bad = *s.bad;
    if (i < r.experts_all) {
        for (int b = 0; b < blocks; b++) {
            uint32_t *at = &s.base[(size_t)b * r.experts_all + i];
            const uint32_t here = *at;
            *at = sum;
            sum += here;
        }
        expert_rows[i] = sum;
    } else if (i - r.experts_all < r.ranks) {
        for (int b = 0; b < blocks; b++)
            sum += s.rank_rows[(size_t)b * r.ranks + (i - r.experts_all)];
        rank_rows[i - r.experts_all] = sum;
    }
}

/* One warp per block of tokens, 32 slots a step. */
__global__ void __launch_bounds__(32)
    place_block(epo_routes r, gpu_route_scratch s, const uint64_t *expert_first, int32_t *token,
                int32_t *slot, int32_t *row) {
    extern __shared__ uint32_t next[];
    for (int i = threadIdx.x; i < r.experts_all; i += 32)
        next[i] = (uint32_t)expert_first[i] + s.base[(size_t)blockIdx.x * r.experts_all + i];
    __syncwarp();
    const int64_t begin = (int64_t)blockIdx.x * GPU_ROUTE_TOKENS * r.top_k;
    const int64_t all = (int64_t)r.tokens * r.top_k;
    const int64_t limit = begin + (int64_t)GPU_ROUTE_TOKENS * r.top_k;
    const int64_t end = limit < all ? limit : all;
    for (int64_t at = begin; at < end; at += 32) {
        const int64_t flat = at + threadIdx.x;
        const int32_t e = flat < end ? s.copy[flat] : -1;
        const unsigned same = __match_any_sync(kAll, e);
        const unsigned before = same & ((1u << threadIdx.x) - 1);
        const uint32_t place = e >= 0 ? next[e] + __popc(before) : 0;
        __syncwarp();
        if (e >= 0 && before == 0)
            next[e] += __popc(same);
        __syncwarp();
        if (e >= 0) {
            token[place] = (int32_t)(flat / r.top_k);
            slot[place] = (int32_t)flat;
        }
        if (flat < end)
            row[flat] = e >= 0 ? (int32_t)place : -1;
    }
}

__global__ void pad_rows(const uint64_t *first, const uint64_t *count, int experts, uint64_t rows,
                         int32_t *index) {
    const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows)
        return;
    int low = 0, high = experts - 1; /* the last expert that begins at or before i */
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first[middle] <= i)
            low = middle;
        else
            high = middle - 1;
    }
    index[i] = i < first[low] + count[low] ? (int32_t)i : -1;
}

int blocks_of(const epo_routes *r) { return (r->tokens + GPU_ROUTE_TOKENS - 1) / GPU_ROUTE_TOKENS; }

} // namespace

extern "C" cudaError_t gpu_kernel_route_count(cudaStream_t stream, const epo_routes *r,
                                              const gpu_route_scratch *s, uint32_t *expert_rows,
                                              uint32_t *rank_rows, unsigned long long *bad) {
    const int blocks = blocks_of(r), all = r->experts_all + r->ranks;
    cudaError_t e = cudaMemsetAsync(s->bad, 0xff, sizeof *s->bad, stream);
    if (e != cudaSuccess)
        return e;
    if (blocks > 0)
        count_block<<<blocks, GPU_ROUTE_TOKENS, (size_t)all * 4, stream>>>(*r, *s);
    prefix_blocks<<<(all + 127) / 128, 128, 0, stream>>>(*r, *s, blocks, expert_rows, rank_rows,
                                                         bad);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_route_send(cudaStream_t stream, const epo_routes *r,
                                             const gpu_route_scratch *s,
                                             const uint64_t *expert_first, int32_t *token,
                                             int32_t *slot, int32_t *row) {
    const int blocks = blocks_of(r);
    if (blocks > 0)
        place_block<<<blocks, 32, (size_t)r->experts_all * 4, stream>>>(*r, *s, expert_first, token,
                                                                        slot, row);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_route_pad(cudaStream_t stream, const uint64_t *first,
                                            const uint64_t *count, int experts, uint64_t rows,
                                            int32_t *index) {
    if (rows > 0)
        pad_rows<<<(unsigned)((rows + 255) / 256), 256, 0, stream>>>(first, count, experts, rows,
                                                                     index);
    return cudaGetLastError();
}
