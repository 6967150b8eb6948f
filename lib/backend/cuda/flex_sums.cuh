/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_sums.cuh - sums of rows: a warp takes a piece of a row and has `cols` units of
 * `batch` summands under way in each lane, so that a few SMs have as much in flight as
 * their way to the memory takes.  Pieces go to a block's warps as these come free.  In
 * fp32 in a fixed order, rounded between ranks.
 */
#ifndef EPO_BACKEND_CUDA_FLEX_SUMS_CUH
#define EPO_BACKEND_CUDA_FLEX_SUMS_CUH

#include "backend/cuda/flex_device.cuh"

namespace flex {
namespace sums {

template <int Warps, int Cols, int Batch> struct Shape {
    static constexpr int kWarps = Warps, kCols = Cols, kBatch = Batch;
    static constexpr int kThreads = 32 * Warps, kSpan = Cols * 512; /* bytes of a warp's turn */
};

/* How rows are cut into pieces. */
struct Cut {
    uint32_t tile; /* bytes of a row at a time */
    uint32_t tiles;
};

constexpr int kPieces = 8; /* for a warp, so that all end together */

/* As many pieces as make work for all warps, whole rows where there are many. */
inline Cut cut_sums(uint64_t rows, int blocks, int warps, int span, uint32_t row_bytes) {
    const uint64_t want = (uint64_t)blocks * (uint64_t)warps * kPieces;
    const uint64_t most = (row_bytes + span - 1) / span;
    uint64_t tiles = rows > 0 ? (want + rows - 1) / rows : 1;
    tiles = tiles < most ? tiles : most;
    const uint64_t spans = (most + tiles - 1) / tiles;
    Cut c;
    c.tile = (uint32_t)(spans * span < row_bytes ? spans * span : row_bytes);
    c.tiles = (row_bytes + c.tile - 1) / c.tile;
    return c;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

struct Piece {
    uint32_t row, at, bytes;
};
__device__ __forceinline__ Piece piece_of(const Cut &cut, uint32_t row_bytes, uint32_t i) {
    Piece p;
    p.row = cut.tiles == 1 ? i : i / cut.tiles;
    p.at = (i - p.row * cut.tiles) * cut.tile;
    p.bytes = row_bytes - p.at < cut.tile ? row_bytes - p.at : cut.tile;
    return p;
}

/* What a lane knows of a piece: its own summand and its arrived row (NULL: none); `low`: the
 * arrived one is of a lower rank. */
struct Summand {
    const char *own, *arrived;
    bool low;
};

/* Read once; peers may have written it while this kernel ran. */
__device__ __forceinline__ uint4 load_unit(const char *p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

template <typename T> __device__ __forceinline__ void add_unit(float (&acc)[Unit<T>::n], uint4 v) {
    float terms[Unit<T>::n];
    unpack<T>(terms, v);
#pragma unroll
    for (int j = 0; j < Unit<T>::n; j++)
        acc[j] += terms[j];
}

__device__ __forceinline__ const char *row_of(const char *mine, int lane) {
    return reinterpret_cast<const char *>(
        __shfl_sync(kAll, reinterpret_cast<unsigned long long>(mine), lane));
}

/* A lane's units at u, u + 512, ... of the piece. */
template <typename S> struct Units {
    uint4 v[S::kCols];
    __device__ __forceinline__ void load(const char *row, uint32_t u, uint32_t bytes) {
#pragma unroll
        for (int c = 0; c < S::kCols; c++)
            if (u + c * 512 < bytes)
                v[c] = load_unit(row + u + c * 512);
    }
};
template <typename T, typename S> struct Sum {
    float acc[S::kCols][Unit<T>::n];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int c = 0; c < S::kCols; c++)
#pragma unroll
            for (int j = 0; j < Unit<T>::n; j++)
                acc[c][j] = 0.0f;
    }
    __device__ __forceinline__ void add(const Units<S> &units) {
#pragma unroll
        for (int c = 0; c < S::kCols; c++)
            add_unit<T>(acc[c], units.v[c]);
    }
    /* The lanes' rows in `mask`, in order. */
    __device__ __forceinline__ void add_rows(const char *mine, unsigned mask, uint32_t u,
                                             uint32_t bytes) {
        while (mask != 0) {
            Units<S> units[S::kBatch];
            int count = 0;
#pragma unroll
            for (int j = 0; j < S::kBatch; j++) {
                if (mask == 0)
                    continue;
                units[j].load(row_of(mine, __ffs(mask) - 1), u, bytes);
                mask &= mask - 1;
                count = j + 1;
            }
#pragma unroll
            for (int j = 0; j < S::kBatch; j++)
                if (j < count)
                    add(units[j]);
        }
    }
    __device__ __forceinline__ void round(Units<S> *out) const {
#pragma unroll
        for (int c = 0; c < S::kCols; c++)
            out->v[c] = pack<T>(acc[c]);
    }
};

/* One piece: this rank's summands in order, rounded, then all ranks' in order. */
template <typename T, typename S>
__device__ __forceinline__ void sum_piece(const Summand &p, char *to, uint32_t bytes) {
    const unsigned a = __ballot_sync(kAll, p.own != nullptr);
    const unsigned b = __ballot_sync(kAll, p.arrived != nullptr);
    const unsigned l = __ballot_sync(kAll, p.arrived != nullptr && p.low);
    const unsigned rest = b & (b - 1); /* behind the first, which is under way from the start */
    for (uint32_t base = 0; base < bytes; base += S::kSpan) {
        const uint32_t u = base + threadIdx.x % 32 * 16;
        Units<S> first, out;
        Sum<T, S> sum;
        if (b != 0)
            first.load(row_of(p.arrived, __ffs(b) - 1), u, bytes);
        sum.clear();
        sum.add_rows(p.own, a, u, bytes);
        sum.round(&out);
        if (b != 0) {
            sum.clear();
            if (l != 0) {
                sum.add(first);
                sum.add_rows(p.arrived, rest & l, u, bytes);
            }
            if (a != 0)
                sum.add(out);
            if (l == 0)
                sum.add(first);
            sum.add_rows(p.arrived, rest & ~l, u, bytes);
            sum.round(&out);
        }
#pragma unroll
        for (int c = 0; c < S::kCols; c++)
            if (u + c * 512 < bytes)
                *reinterpret_cast<uint4 *>(to + u + c * 512) = out.v[c];
    }
}

/* Pieces [0, past) of rows, shared by `blocks` blocks, of which this is number `block`, all
 * warps of each.  list(i) reads what fetch(i, listed) needs, two pieces ahead; fetch reads what
 * places(i, fetched) needs to name a lane's summands, one ahead; dest(i): where the sum goes.
 * *taken: a shared word of the block, 0 before. */
template <typename T, typename S, typename List, typename Fetch, typename Places, typename Dest>
__device__ __forceinline__ void sums_run(uint32_t *taken, uint32_t block, uint32_t blocks,
                                         const Cut &cut, uint32_t past, uint32_t row_bytes,
                                         List list, Fetch fetch, Places places, Dest dest) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto at = [&](uint32_t turn) { return block + turn * blocks; };
    uint32_t now = at(warp), next = at(warp + S::kWarps), after = at(warp + 2 * S::kWarps);
    if (now >= past)
        return;
    auto fetched = fetch(now, list(now));
    auto listed = list(next < past ? next : now);
    while (now < past) {
        auto ahead = fetch(next < past ? next : now, listed);
        listed = list(after < past ? after : now);
        const Piece p = piece_of(cut, row_bytes, now);
        sum_piece<T, S>(places(now, p, fetched), dest(now, p), p.bytes);
        uint32_t turn = 0;
        if (lane == 0)
            turn = atomicAdd(taken, 1u);
        turn = __shfl_sync(kAll, turn, 0) + 3 * S::kWarps;
        now = next;
        next = after;
        after = at(turn);
        fetched = ahead;
    }
}
#endif

} // namespace sums
} // namespace flex

#endif
