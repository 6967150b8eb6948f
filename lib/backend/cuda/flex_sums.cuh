/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_sums.cuh - sums of rows: one warp of a block brings all summands of a piece of a row
 * into a ring of stages in shared memory by bulk copies, groups of warps sum them, so that
 * many are in flight whatever these do.  In fp32 in a fixed order, rounded between ranks.
 */
#ifndef EPO_BACKEND_CUDA_FLEX_SUMS_CUH
#define EPO_BACKEND_CUDA_FLEX_SUMS_CUH

#include "backend/cuda/flex_device.cuh"

namespace flex {
namespace sums {

constexpr int kGroupWarps = 8; /* that sum a piece of a row together */
constexpr int kMostStages = 12;
constexpr int kStageBytes = 36 << 10;
constexpr int kRingBytes = 217 << 10;
/* Threads of a block: more registers for those that sum out of the ring. */
template <bool Loads> constexpr int kThreads = Loads ? 1024 : 2 * kGroupWarps * 32 + 32;

struct Cut {
    int slots; /* summands of a token at most */
    int tile;  /* bytes of a row at a time */
    int tiles, stages;
    int groups; /* of warps */
    bool loads; /* by plain loads: no ring */
};

/* `slots` summands of a row of row_bytes; stage: bytes, 0: as measured best, < 0: plain
 * loads. */
inline Cut cut_sums(int slots, uint32_t row_bytes, int stage) {
    Cut c;
    c.slots = slots;
    c.loads = stage < 0;
    c.tile = (stage > 0 ? stage : kStageBytes) / c.slots / 16 * 16;
    c.tile = c.tile >= 512 ? c.tile / 512 * 512 : c.tile < 16 ? 16 : c.tile;
    c.tile = c.tile < (int)row_bytes && !c.loads ? c.tile : (int)row_bytes;
    c.tiles = (int)(row_bytes + c.tile - 1) / c.tile;
    c.stages = c.loads ? 0 : kRingBytes / (c.slots * c.tile + 24);
    c.stages = c.stages < kMostStages ? c.stages : kMostStages;
    c.groups = c.loads ? 4 : 2;
    return c;
}

inline size_t sum_bytes(const Cut &c) {
    return (size_t)c.stages * ((size_t)(c.slots * c.tile) + 24);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

struct Piece {
    int64_t row;
    uint32_t at, bytes;
};
__device__ __forceinline__ Piece piece_of(const Cut &cut, uint32_t row_bytes, int64_t i) {
    Piece p;
    p.row = cut.tiles == 1 ? i : i / cut.tiles;
    p.at = (uint32_t)(i - p.row * cut.tiles) * (uint32_t)cut.tile;
    p.bytes = row_bytes - p.at < (uint32_t)cut.tile ? row_bytes - p.at : (uint32_t)cut.tile;
    return p;
}

/* What a lane knows of a piece: its own summand and its arrived row (NULL: none); `low`: the
 * arrived one is of a lower rank. */
struct Summand {
    const char *own, *arrived;
    bool low;
};

/* A block's ring. */
struct Sums {
    char *stage;
    uint64_t *full, *empty;
    uint32_t *held; /* own summands, rows of lower ranks, of higher ones; a byte each */
    Cut cut;
    uint32_t n; /* pieces so far */
};

/* All threads of the block. */
__device__ __forceinline__ Sums sums_open(char *shared, const Cut &cut) {
    Sums s;
    s.cut = cut;
    s.n = 0;
    s.stage = shared;
    s.full = reinterpret_cast<uint64_t *>(shared + (int64_t)cut.stages * cut.slots * cut.tile);
    s.empty = s.full + cut.stages;
    s.held = reinterpret_cast<uint32_t *>(s.empty + cut.stages);
    if (threadIdx.x == 0)
        for (int i = 0; i < cut.stages; i++) {
            bar_init(&s.full[i], 1);
            bar_init(&s.empty[i], kGroupWarps);
        }
    __syncthreads();
    return s;
}

template <typename T> __device__ __forceinline__ void add_unit(float (&acc)[Unit<T>::n], uint4 v) {
    float terms[Unit<T>::n];
    unpack<T>(terms, v);
#pragma unroll
    for (int j = 0; j < Unit<T>::n; j++)
        acc[j] += terms[j];
}

/* acc += a unit of `count` summands, in order. */
template <typename T>
__device__ __forceinline__ void add_all(float (&acc)[Unit<T>::n], const char *from, int tile,
                                        int count) {
#pragma unroll 4
    for (int i = 0; i < count; i++)
        add_unit<T>(acc, *reinterpret_cast<const uint4 *>(from + i * tile));
}

/* The feeding warp. */
template <typename Fetch, typename Places>
__device__ __forceinline__ void sums_feed(Sums &s, int64_t past, uint32_t row_bytes, Fetch fetch,
                                          Places places) {
    const int lane = threadIdx.x % 32;
    const unsigned below = (1u << lane) - 1;
    int64_t i = blockIdx.x;
    if (i >= past)
        return;
    auto next = fetch(i);
    for (; i < past; i += gridDim.x, s.n++) {
        const auto now = next;
        if (i + gridDim.x < past)
            next = fetch(i + gridDim.x);
        const Summand p = places(i, now);
        const uint32_t bytes = piece_of(s.cut, row_bytes, i).bytes;
        const unsigned a = __ballot_sync(kAll, p.own != nullptr);
        const unsigned b = __ballot_sync(kAll, p.arrived != nullptr);
        const unsigned l = __ballot_sync(kAll, p.arrived != nullptr && p.low);
        const uint32_t at = s.n % s.cut.stages;
        bar_wait(&s.empty[at], (s.n / s.cut.stages & 1) ^ 1);
        if (lane == 0) {
            s.held[at] = (uint32_t)(__popc(a) | __popc(l) << 8 | __popc(b & ~l) << 16);
            bar_expect(&s.full[at], (uint32_t)(__popc(a) + __popc(b)) * bytes);
        }
        __syncwarp();
        char *to = s.stage + (int64_t)at * s.cut.slots * s.cut.tile;
        if (p.own != nullptr)
            bulk_load(to + __popc(a & below) * s.cut.tile, p.own, bytes, &s.full[at]);
        if (p.arrived != nullptr)
            bulk_load(to + (__popc(a) + __popc(b & below)) * s.cut.tile, p.arrived, bytes,
                      &s.full[at]);
    }
}

/* The summing warps: groups take pieces in turns. */
template <typename T, typename Dest>
__device__ __forceinline__ void sums_eat(Sums &s, int64_t past, uint32_t row_bytes, Dest dest) {
    constexpr int n = Unit<T>::n;
    const int group = threadIdx.x / 32 / kGroupWarps, thread = threadIdx.x % (kGroupWarps * 32);
    for (int64_t i = blockIdx.x; i < past; i += gridDim.x, s.n++) {
        if ((int)(s.n % s.cut.groups) != group)
            continue;
        const uint32_t at = s.n % s.cut.stages, bytes = piece_of(s.cut, row_bytes, i).bytes;
        char *to = dest(i);
        bar_wait(&s.full[at], s.n / s.cut.stages & 1);
        const uint32_t held = s.held[at];
        const int own = held & 0xff, low = held >> 8 & 0xff, high = held >> 16;
        const char *from = s.stage + (int64_t)at * s.cut.slots * s.cut.tile;
        for (uint32_t u = thread * 16; u < bytes; u += kGroupWarps * 32 * 16) {
            float acc[n] = {0.0f};
            add_all<T>(acc, from + u, s.cut.tile, own);
            uint4 out = pack<T>(acc);
            if (low + high > 0) {
                float sum[n] = {0.0f};
                add_all<T>(sum, from + own * s.cut.tile + u, s.cut.tile, low);
                if (own > 0)
                    add_unit<T>(sum, out);
                add_all<T>(sum, from + (own + low) * s.cut.tile + u, s.cut.tile, high);
                out = pack<T>(sum);
            }
            *reinterpret_cast<uint4 *>(to + u) = out;
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            bar_arrive(&s.empty[at]);
    }
}

/* acc += the unit at u of the lanes' rows in `mask`, in order, four loads at a time. */
template <typename T>
__device__ __forceinline__ void add_loaded(float (&acc)[Unit<T>::n], const char *mine,
                                           unsigned mask, uint32_t u, bool live) {
    while (mask != 0) {
        uint4 v[4];
        int count = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (mask == 0)
                continue;
            const int k = __ffs(mask) - 1;
            const char *row = reinterpret_cast<const char *>(
                __shfl_sync(kAll, reinterpret_cast<unsigned long long>(mine), k));
            mask &= mask - 1;
            count = j + 1;
            if (live)
                v[j] = *reinterpret_cast<const uint4 *>(row + u);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (live && j < count)
                add_unit<T>(acc, v[j]);
    }
}

/* The same by plain loads: whole rows, a group of warps each. */
template <typename T, typename Fetch, typename Places, typename Dest>
__device__ __forceinline__ void sums_load(Sums &s, int64_t past, uint32_t row_bytes, Fetch fetch,
                                          Places places, Dest dest) {
    constexpr int n = Unit<T>::n;
    const int group = threadIdx.x / 32 / kGroupWarps, thread = threadIdx.x % (kGroupWarps * 32);
    const int64_t step = (int64_t)gridDim.x * s.cut.groups;
    int64_t i = (int64_t)group * gridDim.x + blockIdx.x;
    if (i >= past)
        return;
    auto next = fetch(i);
    for (; i < past; i += step) {
        const auto now = next;
        if (i + step < past)
            next = fetch(i + step);
        const Summand p = places(i, now);
        const unsigned a = __ballot_sync(kAll, p.own != nullptr);
        const unsigned b = __ballot_sync(kAll, p.arrived != nullptr);
        const unsigned l = __ballot_sync(kAll, p.arrived != nullptr && p.low);
        char *to = dest(i);
        for (uint32_t base = 0; base < row_bytes; base += kGroupWarps * 32 * 16) {
            const uint32_t u = base + thread * 16;
            const bool live = u < row_bytes;
            float acc[n] = {0.0f};
            add_loaded<T>(acc, p.own, a, u, live);
            uint4 out = pack<T>(acc);
            if (b != 0) {
                float sum[n] = {0.0f};
                add_loaded<T>(sum, p.arrived, l, u, live);
                if (a != 0)
                    add_unit<T>(sum, out);
                add_loaded<T>(sum, p.arrived, b & ~l, u, live);
                out = pack<T>(sum);
            }
            if (live)
                *reinterpret_cast<uint4 *>(to + u) = out;
        }
    }
}

/* Pieces [0, past) of rows, shared by all blocks: fetch(i) reads what places(i, fetched) needs
 * to name a lane's summands, one piece ahead; dest(i): where the sum goes.  All threads. */
template <typename T, bool Loads, typename Fetch, typename Places, typename Dest>
__device__ __forceinline__ void sums_run(Sums &s, int64_t past, uint32_t row_bytes, Fetch fetch,
                                         Places places, Dest dest) {
    if (Loads)
        sums_load<T>(s, past, row_bytes, fetch, places, dest);
    else if ((int)threadIdx.x / 32 == s.cut.groups * kGroupWarps)
        sums_feed(s, past, row_bytes, fetch, places);
    else
        sums_eat<T>(s, past, row_bytes, dest);
}
#endif

} // namespace sums
} // namespace flex

#endif
