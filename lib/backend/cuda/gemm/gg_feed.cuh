/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_feed.cuh - the feeding warpgroup: warp 0 issues TMA loads and hands gathered
 * rows over, warp 1 takes tiles from the scheduler, warps 2 and 3 gather.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_FEED_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_FEED_CUH

#include "gg_config.cuh"

namespace gg {

/* Warp 1 of the cluster's first block: takes tiles, one ahead of the one computed, and
 * tells all.  next_tile(tile, hint, spin): as tile_next. */
template <class C, class N>
__device__ void feed_tiles(const gg_params &p, const shared<C> &s, N next_tile) {
    ring<kSlots> at;
    int hint = 0;
    uint64_t spin = 0;
    bool more = true;
    int lane = threadIdx.x & 31;
    shared<C> there = shared_of(s, min(lane, p.cluster - 1));
    if (lane == 0) {
        atomicAdd(&p.ws[GG_WS_ACTIVE], p.cluster);
    }
    while (more) {
        tile t;
        cluster_wait(s.used(at.index), at.parity ^ 1);
        more = next_tile(t, hint, spin);
        if (!more) {
            t.expert = -1;
        }
        if (lane < p.cluster) {
            slot_write(there, at, t);
        }
        __syncwarp();
        at.next();
    }
    if (lane == 0 && spin != 0 && p.spin_ns != nullptr) {
        atomicAdd(p.spin_ns, (unsigned long long)spin);
    }
}

/* A reader's next tile; read and given back by one lane or by a whole warp. */
template <class C>
__device__ __forceinline__ tile tile_wait(const shared<C> &s, const ring<kSlots> &at) {
    cluster_wait(s.known(at.index), at.parity);
    return slot_read(s, at);
}

/* A warp's look at the tile behind the one at `at`, while products run; false: not known. */
template <class C>
__device__ __forceinline__ bool slot_peek(const shared<C> &s, ring<kSlots> at, tile &next) {
    at.next();
    if (!__all_sync(0xffffffffu, cluster_test(s.known(at.index), at.parity))) {
        return false;
    }
    next = slot_read(s, at);
    return true;
}

template <class C>
__device__ __forceinline__ void load_a(const gg_params &p, const shared<C> &s, int stage,
                                       const CUtensorMap *map, const tile &t, int block, int boxes,
                                       int rank) {
    for (int i = 0; i < boxes; i++) {
        uint32_t dst = s.a(stage) + i * kBox;
        int x = C::kWgrad ? t.m * kTileM + i * 64 : block * kTileK;
        int y = C::kWgrad ? t.row + block * kTileK : t.row + i * 64;
        if (t.share != kShareA) {
            tma_load(dst, map, s.full(stage), x, y, 0);
        } else if (i == rank) {
            tma_load_both(dst, map, s.full(stage), x, y, 0);
        }
    }
}
template <class C>
__device__ __forceinline__ void load_b(const gg_params &p, const shared<C> &s, int stage,
                                       const CUtensorMap *map, const tile &t, int block, int rank) {
    int col = t.n * p.tile_n;
#pragma unroll
    for (int i = 0; i < C::kPartsB; i++) {
        uint32_t dst = s.b(stage) + i * (C::kBytesB / C::kPartsB);
        int x = col + i * 64;
        int y = C::kWgrad ? t.row + block * kTileK : block * kTileK;
        if (!C::kTransB) { /* two halves; SwiGLU: gate rows, up rows */
            x = block * kTileK;
            y = col + i * (C::kGated ? p.n / 2 : C::kTileN / 2);
        }
        int z = C::kWgrad ? 0 : t.expert;
        if (t.share != kShareB) {
            tma_load(dst, map, s.full(stage), x, y, z);
        } else if (i % 2 == rank) {
            tma_load_both(dst, map, s.full(stage), x, y, z);
        }
    }
}

/* Gathered stages on their way to the consumers.  The copies are ordinary writes, the
 * products read through the async proxy: a fence must come between.  In the gathering
 * warps it would wait for all copies in flight, in the consumers for their products;
 * the thread that has this has nothing of either in flight. */
constexpr int kRelayLag = 2; /* stages whose copies may take their time */
template <class C> struct relay {
    static_assert(C::kStages >= kRelayLag + 2, "the stages would wait for each other");
    ring<C::kStages> at;
    int open = 0;
    __device__ __forceinline__ void keep(const shared<C> &s, int most) {
        while (open > most) {
            mbar_wait(s.copied(at.index), at.parity);
            fence_async();
            mbar_arrive(s.full(at.index));
            at.next();
            open--;
        }
    }
};

/* The loads of one tile, block by block of K; behind() after each. */
template <class C, class B>
__device__ __forceinline__ void feed_tile(const gg_params &p, const shared<C> &s, const gg_maps &m,
                                          const tile &t, ring<C::kStages> &to, int rank, B behind) {
    int boxes = p.a_index != nullptr ? 0 : (tile_height<C>(p, t) > 64 ? 2 : 1);
    bool with_b = p.b_index == nullptr && t.live;
    uint32_t bytes = boxes * kBox + (with_b ? C::kBytesB : 0);
    int blocks = tile_blocks<C>(p, t);
    for (int i = 0; i < blocks; i++) {
        mbar_wait(s.empty(to.index), to.parity ^ 1);
        mbar_expect(s.full(to.index), bytes);
        load_a(p, s, to.index, &m.a, t, i, boxes, rank);
        if (with_b) {
            load_b(p, s, to.index, &m.b, t, i, rank);
        }
        to.next();
        behind();
    }
}

/* Warp 0, one thread. */
template <class C>
__device__ void feed_tma(const gg_params &p, const shared<C> &s, const gg_maps &m) {
    ring<kSlots> at;
    ring<C::kStages> to;
    relay<C> gathered;
    shared<C> first = shared_of(s, 0);
    int rank = (int)cluster_rank();
    while (true) {
        if (!mbar_try(s.known(at.index), at.parity)) {
            gathered.keep(s, 0); /* no tile may wait for the next, which may be long */
        }
        tile t = tile_wait(s, at);
        slot_back(first, at);
        at.next();
        if (t.expert < 0) {
            gathered.keep(s, 0);
            return;
        }
        if (p.ready.flag != nullptr) {
            fence_async_global(); /* the rows were written by others' ordinary stores */
        }
        feed_tile(p, s, m, t, to, rank, [&] {
            if (gathers(p)) {
                gathered.open++;
                gathered.keep(s, kRelayLag);
            }
        });
    }
}

/* Where the lines of a gathered box come from.  Two warps share its 64 * kWords lines:
 * this one has the lines 64*i + 32*half .. and 31 more; lane l keeps the row number of
 * line 64*i + 32*half + l.  Eight lanes copy the 128 bytes of a line, so this lane has
 * a part of every fourth; bit 8*i + j of `valid` says whether line 64*i + 32*half +
 * 4*j + l/8 has a row; else it gets zeros. */
template <int kWords> struct gather_index {
    int from[kWords];
    uint32_t valid;
    __device__ __forceinline__ void load(const int32_t *index, int row, int rows, int limit) {
        int lane = threadIdx.x & 31, half = (threadIdx.x >> 5) & 1;
        valid = 0;
#pragma unroll
        for (int i = 0; i < kWords; i++) {
            int line = 64 * i + 32 * half + lane;
            int r = line < rows ? index[row + line] : -1;
            bool there = r >= 0 && r < limit;
            uint32_t all = __ballot_sync(0xffffffffu, there) >> (lane >> 3);
            from[i] = there ? r : 0;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                valid |= (all >> (4 * j) & 1u) << (8 * i + j);
            }
        }
    }
};

/* This warp's lines to the places that TMA would take, columns from `col` on, zeros
 * behind `width`.  Two warps do all of a block, so every instruction counts. */
template <class T, int kWords>
__device__ __forceinline__ void gather_box(const gather_index<kWords> &index, uint32_t box,
                                           const void *base, int64_t ld, int col, int width) {
    int lane = threadIdx.x & 31, half = (threadIdx.x >> 5) & 1;
    int part = lane & 7, line = lane >> 3;
    const T *src = (const T *)base + col + part * 8;
    uint32_t pitch = (uint32_t)ld * (uint32_t)sizeof(T);
    uint32_t valid = col + part * 8 < width ? index.valid : 0;
    uint32_t even = box + (32 * half + line) * 128 + ((part ^ line) << 4);
    uint32_t odd = box + (32 * half + line) * 128 + ((part ^ (line + 4)) << 4);
#pragma unroll
    for (int i = 0; i < kWords; i++) {
        uint32_t from[8]; /* all first: a shuffle's result takes its time */
#pragma unroll
        for (int j = 0; j < 8; j++) {
            from[j] = __shfl_sync(0xffffffffu, (uint32_t)index.from[i], j * 4 + line);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            cp_async16((j % 2 ? odd : even) + (64 * i + 4 * j) * 128,
                       (const char *)src + (uint64_t)from[j] * pitch, valid >> (8 * i + j) & 1u);
        }
    }
}

/* One block of K of a tile. */
template <class C>
__device__ __forceinline__ void gather_block(const gg_params &p, const shared<C> &s, int stage,
                                             const tile &t, int block,
                                             const gather_index<2> &rows) {
    using T = typename C::T;
    if (!C::kWgrad) { /* lines are rows of the tile */
        gather_box<T>(rows, s.a(stage), p.a, p.lda, block * kTileK, p.k);
        return;
    }
    gather_index<1> index; /* lines are K: rows of the block */
    int row = t.row + block * kTileK, left = t.rows - block * kTileK;
    if (p.a_index != nullptr) {
        index.load(p.a_index, row, left, p.a_rows);
        for (int i = 0; i < (tile_height<C>(p, t) > 64 ? 2 : 1); i++) {
            gather_box<T>(index, s.a(stage) + i * kBox, p.a, p.lda, t.m * kTileM + i * 64, p.m);
        }
    }
    if (p.b_index != nullptr) {
        index.load(p.b_index, row, left, p.b_rows);
        for (int i = 0; i < C::kTileN / 64; i++) {
            gather_box<T>(index, s.b(stage) + i * kBox, p.b, p.ldb, t.n * C::kTileN + i * 64, p.n);
        }
    }
}

/* Warps 2 and 3, when a or b is gathered. */
template <class C> __device__ void feed_gather(const gg_params &p, const shared<C> &s) {
    ring<kSlots> at;
    ring<C::kStages> to;
    shared<C> first = shared_of(s, 0);
    while (true) {
        tile t = tile_wait(s, at);
        __syncwarp();
        if ((threadIdx.x & 31) == 0) {
            slot_back(first, at);
        }
        at.next();
        if (t.expert < 0) {
            break;
        }
        gather_index<2> rows;
        if (!C::kWgrad) {
            rows.load(p.a_index, t.row, t.rows, p.a_rows);
        }
        int blocks = tile_blocks<C>(p, t);
        for (int i = 0; i < blocks; i++) {
            mbar_wait(s.empty(to.index), to.parity ^ 1);
            if (t.live) {
                gather_block(p, s, to.index, t, i, rows);
            }
            cp_arrive(s.copied(to.index));
            to.next();
        }
    }
    cp_wait_all();
}

} /* namespace gg */
#endif
