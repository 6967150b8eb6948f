/* SPDX-License-Identifier: Apache-2.0
 *
 * routes.cu - counting sort of a routing by expert, stable in (token, slot): counts
 * per block of tokens, prefix over blocks, then every block places its slots in
 * order.  Atomics only count; places never depend on who comes first.  With a capacity
 * the slots are counted, the losers' experts become -1, and the rest is counted again.
 */
#include <stdint.h>

#include "backend/cuda/routes.h"
#include "backend/cuda/load.h"

namespace {

constexpr unsigned kAll = 0xffffffffu;

/* kAgain: what s.copy holds, else the caller's experts, which are checked and copied. */
template <bool kAgain>
__global__ void __launch_bounds__(GPU_ROUTE_TOKENS) count_block(epo_routes r, gpu_route_scratch s) {
    extern __shared__ uint32_t shared[];
    uint32_t *rows = shared, *ranks = shared + r.experts_all;
    for (int i = threadIdx.x; i < r.experts_all + r.ranks; i += blockDim.x)
        shared[i] = 0;
    __syncthreads();
    const int t = blockIdx.x * GPU_ROUTE_TOKENS + threadIdx.x;
    const int local = r.experts_all / r.ranks;
    for (int k = 0; t < r.tokens && k < r.top_k; k++) {
        const int64_t flat = (int64_t)t * r.top_k + k;
        const int64_t e = kAgain ? (int64_t)s.copy[flat] : r.experts[flat];
        const bool bad = e < -1 || e >= r.experts_all;
        if (bad)
            atomicMin(s.bad, (unsigned long long)flat);
        const bool other = r.shares > 1 && t % r.shares != r.share;
        if (!kAgain)
            s.copy[flat] = bad || other ? -1 : (int32_t)e;
        if (bad || other || e < 0)
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
    if (i == 0) {
        bad[0] = s.bad[0];
        bad[1] = s.bad[1];
    }
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

/* One warp per block of tokens, 32 slots a step: use(flat, expert, place), where the
 * expert's slots have consecutive places from next[expert]. */
template <typename Use>
__device__ __forceinline__ void place_slots(const epo_routes &r, const gpu_route_scratch &s,
                                            uint32_t *next, Use use) {
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
        if (flat < end)
            use(flat, e, place);
    }
}

__global__ void __launch_bounds__(32)
    place_block(epo_routes r, gpu_route_scratch s, const uint64_t *expert_first,
                const uint64_t *own_row, int32_t *token, int32_t *slot, int32_t *row) {
    extern __shared__ uint32_t next[];
    for (int i = threadIdx.x; i < r.experts_all; i += 32)
        next[i] = (uint32_t)expert_first[i] + s.base[(size_t)blockIdx.x * r.experts_all + i];
    place_slots(r, s, next, [&](int64_t flat, int32_t e, uint32_t place) {
        const bool own = e >= 0 && own_row != nullptr && own_row[e] != UINT64_MAX;
        row[flat] = own      ? -2 - (int32_t)(own_row[e] + (place - expert_first[e]))
                    : e >= 0 ? (int32_t)place
                             : -1;
        if (e >= 0) {
            token[place] = (int32_t)(flat / r.top_k);
            slot[place] = (int32_t)flat;
        }
    });
}

/* ---- capacity ---- */

/* One block: prefix over the blocks of each expert, then over experts. */
__global__ void __launch_bounds__(1024)
    prefix_experts(epo_routes r, gpu_route_scratch s, int blocks) {
    __shared__ uint32_t sums[1024];
    const int per = (r.experts_all + 1023) / 1024, from = threadIdx.x * per;
    uint32_t mine = 0;
    for (int e = from; e < from + per && e < r.experts_all; e++) {
        uint32_t sum = 0;
        for (int b = 0; b < blocks; b++) {
            uint32_t *at = &s.base[(size_t)b * r.experts_all + e];
            const uint32_t here = *at;
            *at = sum;
            sum += here;
        }
        s.total[e] = sum;
        mine += sum;
    }
    sums[threadIdx.x] = mine;
    for (int step = 1; step < 1024; step *= 2) {
        __syncthreads();
        const uint32_t before = (int)threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += before;
    }
    uint32_t start = sums[threadIdx.x] - mine;
    for (int e = from; e < from + per && e < r.experts_all; e++) {
        s.start[e] = start;
        start += s.total[e];
    }
}

__global__ void __launch_bounds__(32) drop_later(epo_routes r, gpu_route_scratch s) {
    extern __shared__ uint32_t next[];
    for (int i = threadIdx.x; i < r.experts_all; i += 32)
        next[i] = s.base[(size_t)blockIdx.x * r.experts_all + i];
    place_slots(r, s, next, [&](int64_t flat, int32_t e, uint32_t place) {
        if (e < 0 || place < r.capacity)
            return;
        s.copy[flat] = -1;
        atomicAdd(&s.bad[1], 1ull);
    });
}

__global__ void __launch_bounds__(32) list_block(epo_routes r, gpu_route_scratch s) {
    extern __shared__ uint32_t next[];
    for (int i = threadIdx.x; i < r.experts_all; i += 32)
        next[i] = s.start[i] + s.base[(size_t)blockIdx.x * r.experts_all + i];
    place_slots(r, s, next, [&](int64_t flat, int32_t e, uint32_t place) {
        if (e >= 0)
            s.list[place] = (int32_t)flat;
    });
}

/* As epo_route_weight_key. */
__device__ __forceinline__ uint32_t weight_key(const epo_routes &r, int32_t flat) {
    const uint32_t bits = __float_as_uint((r.weights != nullptr ? r.weights[flat] : 1.0f) + 0.0f);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

constexpr int kDropThreads = 256;

/* How many of the expert's keys are >= least; all threads, the same answer. */
__device__ uint32_t count_keys(const epo_routes &r, const int32_t *list, uint32_t n, uint32_t least,
                               uint32_t *shared) {
    uint32_t mine = 0;
    for (uint32_t i = threadIdx.x; i < n; i += kDropThreads)
        mine += weight_key(r, list[i]) >= least;
    __syncthreads();
    if (threadIdx.x == 0)
        *shared = 0;
    __syncthreads();
    if (mine > 0)
        atomicAdd(shared, mine);
    __syncthreads();
    return *shared;
}

/* One block per expert: the capacity-th largest key, bit by bit; then one warp drops
 * what is smaller, and of what equals it the later ones. */
__global__ void __launch_bounds__(kDropThreads) drop_lighter(epo_routes r, gpu_route_scratch s) {
    __shared__ uint32_t counted;
    const uint32_t n = s.total[blockIdx.x];
    const int32_t *list = s.list + s.start[blockIdx.x];
    if (n <= r.capacity)
        return;
    const uint32_t capacity = (uint32_t)r.capacity;
    uint32_t least = 0;
    for (int bit = 31; bit >= 0; bit--) {
        const uint32_t higher = least | 1u << bit;
        if (count_keys(r, list, n, higher, &counted) >= capacity)
            least = higher;
    }
    const uint32_t above = least == kAll ? 0 : count_keys(r, list, n, least + 1, &counted);
    if (threadIdx.x >= 32)
        return;
    uint32_t equal = 0; /* before this step */
    for (uint32_t first = 0; first < n; first += 32) {
        const uint32_t i = first + threadIdx.x;
        const uint32_t key = i < n ? weight_key(r, list[i]) : 0;
        const unsigned same = __ballot_sync(kAll, i < n && key == least);
        const uint32_t mine = equal + __popc(same & ((1u << threadIdx.x) - 1));
        if (i < n && (key < least || (key == least && mine >= capacity - above)))
            s.copy[list[i]] = -1;
        equal += __popc(same);
    }
    if (threadIdx.x == 0)
        atomicAdd(&s.bad[1], (unsigned long long)(n - capacity));
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

/* s->copy loses what is beyond the capacity. */
void drop(cudaStream_t stream, const epo_routes *r, const gpu_route_scratch *s, int blocks) {
    const size_t next = (size_t)r->experts_all * 4;
    prefix_experts<<<1, 1024, 0, stream>>>(*r, *s, blocks);
    if (!r->by_weight) {
        drop_later<<<blocks, 32, next, stream>>>(*r, *s);
    } else {
        list_block<<<blocks, 32, next, stream>>>(*r, *s);
        drop_lighter<<<r->experts_all, kDropThreads, 0, stream>>>(*r, *s);
    }
}

} // namespace

extern "C" cudaError_t gpu_kernel_route_count(cudaStream_t stream, const epo_routes *r,
                                              const gpu_route_scratch *s, uint32_t *expert_rows,
                                              uint32_t *rank_rows, unsigned long long *bad) {
    const int blocks = blocks_of(r), all = r->experts_all + r->ranks;
    cudaError_t e = cudaMemsetAsync(s->bad, 0xff, sizeof *s->bad, stream);
    if (e == cudaSuccess)
        e = cudaMemsetAsync(s->bad + 1, 0, sizeof *s->bad, stream);
    if (e != cudaSuccess)
        return e;
    if (blocks > 0)
        count_block<false><<<blocks, GPU_ROUTE_TOKENS, (size_t)all * 4, stream>>>(*r, *s);
    if (blocks > 0 && r->capacity < (uint64_t)r->tokens * r->top_k) {
        drop(stream, r, s, blocks);
        count_block<true><<<blocks, GPU_ROUTE_TOKENS, (size_t)all * 4, stream>>>(*r, *s);
    }
    prefix_blocks<<<(all + 127) / 128, 128, 0, stream>>>(*r, *s, blocks, expert_rows, rank_rows,
                                                         bad);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_route_send(cudaStream_t stream, const epo_routes *r,
                                             const gpu_route_scratch *s,
                                             const uint64_t *expert_first, const uint64_t *own_row,
                                             int32_t *token, int32_t *slot, int32_t *row) {
    const int blocks = blocks_of(r);
    if (r->fill > 0) {
        cudaError_t e = cudaMemsetAsync(token, 0xff, r->fill * sizeof *token, stream);
        if (e == cudaSuccess)
            e = cudaMemsetAsync(slot, 0xff, r->fill * sizeof *slot, stream);
        if (e != cudaSuccess)
            return e;
    }
    if (blocks > 0)
        place_block<<<blocks, 32, (size_t)r->experts_all * 4, stream>>>(*r, *s, expert_first,
                                                                        own_row, token, slot, row);
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

extern "C" const void *gpu_any_routes(void) { return (const void *)prefix_blocks; }
