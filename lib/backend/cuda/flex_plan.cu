/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_plan.cu - flex's maps on the device: every block of tokens counts, then adds
 * what the blocks before it counted and places its rows in order.  Atomics only count
 * within a block; no place depends on who comes first, so the maps equal the CPU's.
 */
#include <stdint.h>

#include "backend/cuda/flex_plan.h"
#include "backend/cuda/load.h"
#include "backend/route_flex_step.h"

namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kPlaceThreads = 512;
constexpr int kMostBlocks = 128;

__global__ void __launch_bounds__(512) flex_count(const __grid_constant__ gpu_flex_plan p) {
    extern __shared__ uint32_t counts[];
    const epo_routes &r = p.routes;
    const int local = r.experts_all / r.ranks, n = p.chunks, k = r.top_k;
    const int columns = r.experts_all + 2 * r.ranks * n;
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        counts[i] = 0;
    const int64_t from = (int64_t)blockIdx.x * p.block_tokens;
    const int64_t past = from + p.block_tokens < r.tokens ? from + p.block_tokens : r.tokens;
    __syncthreads();
    for (int64_t flat = from * k + threadIdx.x; flat < past * k; flat += blockDim.x) {
        const int64_t e = r.experts != nullptr ? r.experts[flat] : p.copy[flat];
        const bool bad = e < -1 || e >= r.experts_all;
        if (bad)
            atomicMin(p.bad, (unsigned long long)flat);
        p.copy[flat] = bad ? -1 : (int32_t)e;
        if (!bad && e >= 0)
            atomicAdd(&counts[e], 1u);
    }
    __syncthreads();
    const int64_t pairs = (past - from) * r.ranks;
    for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
        const int64_t t = from + i / r.ranks;
        const int d = (int)(i % r.ranks);
        int first, last;
        if (!epo_flex_token_chunks(p.copy + t * k, k, local, n, d, &first, &last))
            continue;
        atomicAdd(&counts[r.experts_all + d * n + first], 1u);
        atomicAdd(&counts[r.experts_all + (r.ranks + d) * n + last], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        p.base[(int64_t)blockIdx.x * columns + i] = counts[i];
}

constexpr int kTotalColumns = 32, kTotalRows = 16; /* of a thread block */

/* Totals of columns [first, columns). */
__global__ void __launch_bounds__(kTotalColumns *kTotalRows)
    flex_totals(const __grid_constant__ gpu_flex_plan p, int blocks, int first, int columns,
                uint32_t *out) {
    __shared__ uint32_t part[kTotalRows][kTotalColumns];
    const int i = first + blockIdx.x * kTotalColumns + threadIdx.x;
    uint32_t sum = 0;
#pragma unroll 8
    for (int b = threadIdx.y; i < columns && b < blocks; b += kTotalRows)
        sum += __ldg(p.base + (int64_t)b * columns + i);
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || i >= columns)
        return;
    for (int r = 1; r < kTotalRows; r++)
        sum += part[r][threadIdx.x];
    out[i - first] = sum;
}

/* next[] = the columns' counts before this block, total[] = over all blocks.  Threads
 * share a column's blocks; sums of integers come out the same in any order. */
__device__ void prefix_columns(const gpu_flex_plan &p, int columns, uint32_t *next,
                               uint32_t *total) {
    const int wide = columns < (int)blockDim.x ? (columns + 31) / 32 * 32 : (int)blockDim.x;
    const int groups = (int)blockDim.x / wide, group = threadIdx.x / wide;
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        next[i] = total[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x % wide; group < groups && i < columns; i += wide) {
        uint32_t before = 0, all = 0;
#pragma unroll 16
        for (int b = group; b < (int)gridDim.x; b += groups) {
            const uint32_t c = __ldg(p.base + (int64_t)b * columns + i);
            all += c;
            before += b < (int)blockIdx.x ? c : 0;
        }
        atomicAdd(&next[i], before);
        atomicAdd(&total[i], all);
    }
}

/* start[d]: first row of d's block; the chunks of a block follow each other. */
__device__ void start_blocks(const gpu_flex_plan &p, uint32_t *next, const uint32_t *total,
                             int32_t *start) {
    const int ranks = p.routes.ranks, n = p.chunks;
    uint32_t *first = next + p.routes.experts_all;
    const uint32_t *first_all = total + p.routes.experts_all;
    for (int i = threadIdx.x; i < 2 * ranks; i += blockDim.x) {
        uint32_t sum = 0;
        for (int c = 0; c < n; c++) {
            first[i * n + c] += sum;
            sum += first_all[i * n + c];
        }
        if (i < ranks)
            start[i + 1] = p.stride > 0 ? (i + 1) * p.stride : (int32_t)sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        start[0] = 0;
        for (int d = 0; d < ranks && p.stride == 0; d++)
            start[d + 1] += start[d];
    }
}

/* One warp: each slot's place among this rank's rows of its expert. */
__device__ void place_slots(const gpu_flex_plan &p, uint32_t *next, int64_t from, int64_t past) {
    const int lane = threadIdx.x % 32, k = p.routes.top_k;
    int64_t flat = from * k + lane;
    int32_t e = flat < past * k ? p.copy[flat] : -1;
    for (int64_t at = from * k; at < past * k; at += 32, flat += 32) {
        const int32_t following = flat + 32 < past * k ? p.copy[flat + 32] : -1;
        const unsigned same = __match_any_sync(kAll, e);
        const unsigned before = same & ((1u << lane) - 1);
        const uint32_t base = e >= 0 ? next[e] : 0;
        __syncwarp();
        if (e >= 0 && before == 0)
            next[e] = base + __popc(same);
        __syncwarp();
        if (flat < past * k)
            p.place[flat] = e >= 0 ? (int32_t)(base + __popc(before)) : -1;
        e = following;
    }
}

/* One warp, a lane a token: the token's rows, in rank order. */
__device__ void place_tokens(const gpu_flex_plan &p, uint32_t *next, const int32_t *start,
                             int64_t from, int64_t past) {
    const epo_routes &r = p.routes;
    const int lane = threadIdx.x % 32, n = p.chunks, local = r.experts_all / r.ranks;
    const unsigned below = (1u << lane) - 1;
    uint32_t *first_next = next + r.experts_all, *last_next = first_next + r.ranks * n;
    for (int64_t at = from; at < past; at += 32) {
        const int64_t t = at + lane;
        int used = 0;
        for (int d = 0; d < r.ranks; d++) {
            int first = -1, last = -1;
            const bool has = t < past && epo_flex_token_chunks(p.copy + t * r.top_k, r.top_k, local,
                                                               n, d, &first, &last);
            const unsigned with_first = __match_any_sync(kAll, has ? first : -1);
            const unsigned with_last = __match_any_sync(kAll, has ? last : -1);
            uint32_t sent = 0, returned = 0;
            if (has) {
                sent = first_next[d * n + first] + __popc(with_first & below);
                returned = last_next[d * n + last] + __popc(with_last & below);
            }
            __syncwarp();
            if (has && (with_first & below) == 0)
                first_next[d * n + first] += __popc(with_first);
            if (has && (with_last & below) == 0)
                last_next[d * n + last] += __popc(with_last);
            __syncwarp();
            if (!has)
                continue;
            p.token[start[d] + (int32_t)sent] = (int32_t)t;
            p.to[t * p.width + used] = d;
            p.send[t * p.width + used] = (int32_t)sent;
            p.sum[t * p.width + used] = start[d] + (int32_t)returned;
            used++;
        }
        for (; t < past && used < p.width; used++) {
            p.sum[t * p.width + used] = -1;
            p.to[t * p.width + used] = -1;
        }
    }
}

__device__ void write_meta(const gpu_flex_plan &p, const int32_t *start, int64_t from,
                           int64_t past) {
    const epo_routes &r = p.routes;
    const int k = r.top_k, words = epo_flex_meta_words(k), local = r.experts_all / r.ranks;
    const int64_t items = (past - from) * p.width * words;
    for (int64_t i = threadIdx.x; i < items; i += blockDim.x) {
        const int w = (int)(i % words);
        const int64_t at = from * p.width + i / words, t = at / p.width;
        const int d = p.to[at];
        if (d < 0)
            continue;
        const int32_t *experts = p.copy + t * k, returned = p.sum[at];
        int first = 0, last = 0;
        if (w == 1 && p.chunks > 1)
            epo_flex_token_chunks(experts, k, local, p.chunks, d, &first, &last);
        const uint32_t v =
            epo_flex_meta_word(w, experts, p.place + t * k, p.weights ? p.weights + t * k : nullptr,
                               k, local, d, returned - start[d], last);
        int32_t *row =
            p.peer_meta[d] != nullptr
                ? reinterpret_cast<int32_t *>(p.peer_meta[d]) + (int64_t)p.send[at] * words
                : p.meta + (int64_t)(start[d] + p.send[at]) * words;
        row[w] = (int32_t)v;
        const int slot = w - EPO_FLEX_META_HEAD;
        if (p.slot_weight != nullptr && slot >= 0 && slot < k && v != UINT32_MAX)
            p.slot_weight[t * k + slot] = returned * k + slot;
    }
    for (int64_t i = from * k + threadIdx.x; p.slot_weight != nullptr && i < past * k;
         i += blockDim.x)
        if (p.copy[i] < 0)
            p.slot_weight[i] = -1;
}

/* Each peer's local experts' counts, then rows by first and by last chunk. */
__device__ void tell_counts(const gpu_flex_plan &p, const uint32_t *total) {
    const epo_routes &r = p.routes;
    const int local = r.experts_all / r.ranks, n = p.chunks, words = local + 2 * n;
    for (int i = threadIdx.x; i < r.ranks * words; i += blockDim.x) {
        const int d = i / words, w = i % words;
        const uint32_t *chunk = total + r.experts_all + d * n + (w - local);
        uint32_t *to = reinterpret_cast<uint32_t *>(p.peer_counts[d]);
        if (to != nullptr)
            to[w] = w < local ? total[d * local + w]
                              : *(w - local < n ? chunk : chunk - n + r.ranks * n);
    }
}

__global__ void __launch_bounds__(kPlaceThreads)
    flex_place(const __grid_constant__ gpu_flex_plan p) {
    extern __shared__ uint32_t shared[];
    __shared__ int32_t start[GPU_FLEX_RANKS + 1];
    const epo_routes &r = p.routes;
    const int columns = r.experts_all + 2 * r.ranks * p.chunks;
    uint32_t *next = shared, *total = shared + columns;
    const int64_t from = (int64_t)blockIdx.x * p.block_tokens;
    const int64_t past = from + p.block_tokens < r.tokens ? from + p.block_tokens : r.tokens;
    prefix_columns(p, columns, next, total);
    __syncthreads();
    if (blockIdx.x == 0)
        tell_counts(p, total);
    start_blocks(p, next, total, start);
    __syncthreads();
    if (threadIdx.x < 32)
        place_slots(p, next, from, past);
    else if (threadIdx.x < 64)
        place_tokens(p, next, start, from, past);
    __syncthreads();
    write_meta(p, start, from, past);
}

/* A thread per (received row, slot).  Of a group that broke the meta rows may never have come:
 * then no row goes anywhere, as what is queued already must not follow an earlier plan's. */
__global__ void __launch_bounds__(256)
    flex_receive(const __grid_constant__ epo_flex_receive in, const uint32_t *late) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t)in.received * in.top_k)
        return;
    if (*reinterpret_cast<const volatile uint32_t *>(late) != 0) {
        in.back[i] = -1;
        return;
    }
    const int32_t m = (int32_t)(i / in.top_k);
    int s = 0;
    while (s + 1 < in.ranks && in.base[s + 1] <= m)
        s++;
    const epo_flex_source source = {in.meta + (int64_t)in.base[s] * epo_flex_meta_words(in.top_k),
                                    in.target + (int64_t)s * in.local,
                                    in.returns + (int64_t)s * in.chunks,
                                    in.base[s],
                                    (int32_t)in.rows,
                                    (int32_t)in.received};
    const epo_flex_arrived out = {in.expand, in.weight, in.back, nullptr};
    epo_flex_arrive(&source, &out, m - in.base[s], (int)(i % in.top_k), in.top_k, in.local,
                    in.chunks);
}

int blocks_of(const gpu_flex_plan *p) {
    return (p->routes.tokens + p->block_tokens - 1) / p->block_tokens;
}

} // namespace

extern "C" int gpu_flex_block_tokens(int tokens) {
    int each = (tokens + kMostBlocks - 1) / kMostBlocks;
    each = (each + 31) / 32 * 32;
    return each > 32 ? each : 32;
}

extern "C" int gpu_flex_columns(const gpu_flex_plan *p) {
    return p->routes.experts_all + 2 * p->routes.ranks * p->chunks;
}

extern "C" cudaError_t gpu_flex_count(cudaStream_t stream, const gpu_flex_plan *p) {
    const int blocks = blocks_of(p);
    cudaError_t e = cudaMemsetAsync(p->bad, 0xff, sizeof *p->bad, stream);
    if (e != cudaSuccess || blocks == 0)
        return e;
    const int slots = p->block_tokens * p->routes.top_k;
    const int threads = slots < 512 ? slots : 512; /* a multiple of 32 */
    const size_t shared = (size_t)gpu_flex_columns(p) * sizeof(uint32_t);
    flex_count<<<blocks, threads, shared, stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_flex_totals(cudaStream_t stream, const gpu_flex_plan *p, int first,
                                       uint32_t *out) {
    const int columns = gpu_flex_columns(p);
    const dim3 threads(kTotalColumns, kTotalRows);
    const unsigned grid = (unsigned)((columns - first + kTotalColumns - 1) / kTotalColumns);
    flex_totals<<<grid, threads, 0, stream>>>(*p, blocks_of(p), first, columns, out);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_flex_place(cudaStream_t stream, const gpu_flex_plan *p) {
    /* Without tokens one block still tells the peers so. */
    const int blocks = blocks_of(p) > 0 ? blocks_of(p) : p->peer_counts[0] != nullptr ? 1 : 0;
    if (blocks_of(p) == 0 && blocks == 1) {
        cudaError_t e = cudaMemsetAsync(p->base, 0, (size_t)gpu_flex_columns(p) * 4, stream);
        if (e != cudaSuccess)
            return e;
    }
    if (blocks > 0)
        flex_place<<<blocks, kPlaceThreads, 2 * (size_t)gpu_flex_columns(p) * sizeof(uint32_t),
                     stream>>>(*p);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_flex_receive(cudaStream_t stream, const epo_flex_receive *in,
                                        const uint32_t *late) {
    const uint64_t items = in->received * (uint64_t)in->top_k;
    cudaError_t e = cudaSuccess;
    if (in->rows > 0)
        e = cudaMemsetAsync(in->expand, 0xff, in->rows * sizeof *in->expand, stream);
    if (e == cudaSuccess && in->rows > 0)
        e = cudaMemsetAsync(in->weight, 0, in->rows * sizeof *in->weight, stream);
    if (e != cudaSuccess || items == 0)
        return e;
    flex_receive<<<(unsigned)((items + 255) / 256), 256, 0, stream>>>(*in, late);
    return cudaGetLastError();
}

extern "C" const void *gpu_any_flex_plan(void) { return (const void *)flex_count; }
