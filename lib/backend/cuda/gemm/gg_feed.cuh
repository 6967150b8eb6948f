/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_feed.cuh - the feeding warpgroup: warp 0 issues TMA loads, warp 1 takes
 * tiles from the scheduler, warps 2 and 3 copy gathered rows.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_FEED_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_FEED_CUH

#include "gg_config.cuh"

namespace gg {

/* What the epilogue will read of this tile, fetched into L2 while earlier tiles
 * are computed: gradients to add to, or the stored h. */
template <class C>
__device__ __forceinline__ void prefetch_tile(const gg_params &p, const tile &t) {
    if constexpr (C::kWgrad || (C::kKind == EPO_GG_DGRAD && C::kFuse == EPO_GG_SWIGLU)) {
        if (C::kWgrad && !p.accumulate) {
            return;
        }
        int lane = threadIdx.x & 31;
        int col = t.n * C::kTileN;
        int size = C::kWgrad && p.c_type == EPO_F32 ? 4 : 2;
        uint32_t bytes = (uint32_t)(min(C::kTileN, p.n - col) * size);
        for (int r = lane; r < tile_height<C>(p, t); r += 32) {
            if (C::kWgrad) {
                int64_t row = (int64_t)t.expert * p.m + t.m * kTileM + r;
                l2_prefetch((const char *)p.c + (row * p.n + col) * size, bytes);
            } else {
                const char *h = (const char *)p.h + ((int64_t)(t.row + r) * 2 * p.n + col) * size;
                l2_prefetch(h, bytes);
                l2_prefetch(h + (int64_t)p.n * size, bytes);
            }
        }
    }
}

/* Warp 1: takes tiles, one ahead of the one computed, and tells the others. */
template <class C> __device__ void feed_tiles(const gg_params &p, const shared<C> &s) {
    ring<kSlots> at;
    int hint = 0;
    uint64_t spin = 0;
    bool more = true;
    int lane = threadIdx.x & 31;
    if (lane == 0) {
        atomicAdd(&p.ws[GG_WS_ACTIVE], 1);
    }
    while (more) {
        tile t;
        mbar_wait(s.used(at.index), at.parity ^ 1);
        more = tile_next(p, t, hint, spin);
        if (more) {
            prefetch_tile<C>(p, t);
        } else {
            t.expert = -1;
        }
        if (lane == 0) {
            slot_write(s, at, t);
            mbar_arrive(s.known(at.index));
        }
        at.next();
    }
    if (lane == 0 && spin != 0 && p.spin_ns != nullptr) {
        atomicAdd(p.spin_ns, (unsigned long long)spin);
    }
}

template <class C>
__device__ __forceinline__ void load_a(const gg_params &p, const shared<C> &s, int stage,
                                       const CUtensorMap *map, const tile &t, int block,
                                       int boxes) {
    for (int i = 0; i < boxes; i++) {
        int x = C::kWgrad ? t.m * kTileM + i * 64 : block * kTileK;
        int y = C::kWgrad ? t.row + block * kTileK : t.row + i * 64;
        tma_load(s.a(stage) + i * kBox, map, s.full(stage), x, y, 0);
    }
}
template <class C>
__device__ __forceinline__ void load_b(const gg_params &p, const shared<C> &s, int stage,
                                       const CUtensorMap *map, const tile &t, int block) {
#pragma unroll
    for (int i = 0; i < C::kPartsB; i++) {
        uint32_t dst = s.b(stage) + i * (C::kBytesB / C::kPartsB);
        int col = t.n * p.tile_n;
        if (C::kTransB) {
            int y = C::kWgrad ? t.row + block * kTileK : block * kTileK;
            tma_load(dst, map, s.full(stage), col + i * 64, y, C::kWgrad ? 0 : t.expert);
        } else { /* gate rows, then up rows */
            tma_load(dst, map, s.full(stage), block * kTileK, i * (p.n / 2) + col, t.expert);
        }
    }
}

/* Warp 0, one thread. */
template <class C>
__device__ void feed_tma(const gg_params &p, const shared<C> &s, const CUtensorMap *map_a,
                         const CUtensorMap *map_b) {
    ring<kSlots> at;
    ring<C::kStages> to;
    while (true) {
        mbar_wait(s.known(at.index), at.parity);
        tile t = slot_read(s, at);
        mbar_arrive(s.used(at.index));
        at.next();
        if (t.expert < 0) {
            return;
        }
        if (p.ready.flag != nullptr) {
            fence_async(); /* the rows were written by others' ordinary stores */
        }
        int boxes = p.a_index != nullptr ? 0 : (tile_height<C>(p, t) > 64 ? 2 : 1);
        bool with_b = p.b_index == nullptr;
        uint32_t bytes = boxes * kBox + (with_b ? C::kBytesB : 0);
        int blocks = tile_blocks<C>(p, t);
        for (int i = 0; i < blocks; i++) {
            mbar_wait(s.empty(to.index), to.parity ^ 1);
            mbar_expect(s.full(to.index), bytes);
            load_a(p, s, to.index, map_a, t, i, boxes);
            if (with_b) {
                load_b(p, s, to.index, map_b, t, i);
            }
            to.next();
        }
    }
}

/* 16 bytes of a gathered row into line `line` of a box, at the swizzled place. */
__device__ __forceinline__ uint32_t line_at(uint32_t box, int line, int part) {
    return box + line * 128 + ((part ^ (line & 7)) << 4);
}
__device__ __forceinline__ int gathered_row(const int32_t *index, int row, bool valid, int limit) {
    int from = valid ? index[row] : -1;
    return from < limit ? from : -1;
}

/* Eight threads copy a line.  One block of K for the row kinds: A's lines are the
 * gathered rows from[0..15]. */
template <class C>
__device__ __forceinline__ void gather_lines(const gg_params &p, uint32_t dst,
                                             const int (&from)[16], int lines, int block) {
    using T = typename C::T;
    int part = threadIdx.x & 7, line = (threadIdx.x & 63) >> 3;
    int col = block * kTileK + part * 8;
    const T *src = (const T *)p.a + col;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (line + 8 * i < lines) {
            bool valid = from[i] >= 0 && col < p.k;
            cp_async16(line_at(dst, line + 8 * i, part), src + max(from[i], 0) * p.lda, valid);
        }
    }
}

/* WGRAD: lines are rows (K), `boxes` boxes of 64 columns from `col` on. */
template <class C>
__device__ __forceinline__ void gather_boxes(const void *base, int64_t ld, int limit, int width,
                                             const int32_t *index, uint32_t dst, const tile &t,
                                             int block, int col, int boxes) {
    using T = typename C::T;
    int part = threadIdx.x & 7, line = (threadIdx.x & 63) >> 3;
    int from[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int r = block * kTileK + line + 8 * i;
        from[i] = gathered_row(index, t.row + r, r < t.rows, limit);
    }
    for (int box = 0; box < boxes; box++) {
        int x = col + box * 64 + part * 8;
        const T *src = (const T *)base + x;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            cp_async16(line_at(dst + box * kBox, line + 8 * i, part), src + max(from[i], 0) * ld,
                       from[i] >= 0 && x < width);
        }
    }
}

/* Copies of a thread that were issued but not yet announced to the consumers. */
template <class C> struct gather_lag {
    ring<C::kStages> done;
    int open = 0;
    __device__ __forceinline__ void announce(const shared<C> &s) {
        fence_async();
        mbar_arrive(s.full(done.index));
        done.next();
        open--;
    }
    __device__ __forceinline__ void issued(const shared<C> &s) {
        cp_commit();
        if (++open > kGatherLag) {
            cp_wait<kGatherLag>();
            announce(s);
        }
    }
    __device__ __forceinline__ void drain(const shared<C> &s) {
        cp_wait<0>();
        while (open > 0) {
            announce(s);
        }
    }
};

/* Warps 2 and 3, when a or b is gathered. */
template <class C> __device__ void feed_gather(const gg_params &p, const shared<C> &s) {
    ring<kSlots> at;
    ring<C::kStages> to;
    gather_lag<C> lag;
    int line = (threadIdx.x & 63) >> 3;
    while (true) {
        if (!mbar_try(s.known(at.index), at.parity)) {
            lag.drain(s); /* nothing computed may wait for a tile that is not there yet */
            mbar_wait(s.known(at.index), at.parity);
        }
        tile t = slot_read(s, at);
        __syncwarp();
        if ((threadIdx.x & 31) == 0) {
            mbar_arrive(s.used(at.index));
        }
        at.next();
        if (t.expert < 0) {
            lag.drain(s);
            return;
        }
        int height = tile_height<C>(p, t);
        int from[16];
        if (!C::kWgrad) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                int r = line + 8 * i;
                from[i] = gathered_row(p.a_index, t.row + r, r < t.rows, p.a_rows);
            }
        }
        int blocks = tile_blocks<C>(p, t);
        for (int i = 0; i < blocks; i++) {
            mbar_wait(s.empty(to.index), to.parity ^ 1);
            if (!C::kWgrad) {
                gather_lines<C>(p, s.a(to.index), from, height > 64 ? 128 : 64, i);
            } else {
                if (p.a_index != nullptr) {
                    gather_boxes<C>(p.a, p.lda, p.a_rows, p.m, p.a_index, s.a(to.index), t, i,
                                    t.m * kTileM, height > 64 ? 2 : 1);
                }
                if (p.b_index != nullptr) {
                    gather_boxes<C>(p.b, p.ldb, p.b_rows, p.n, p.b_index, s.b(to.index), t, i,
                                    t.n * C::kTileN, C::kTileN / 64);
                }
            }
            lag.issued(s);
            to.next();
        }
    }
}

} /* namespace gg */
#endif
