/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_math.cuh - a consumer warpgroup: 64 rows of each tile through wgmma.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_MATH_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_MATH_CUH

#include "gg_epilogue.cuh"
#include "gg_feed.cuh"
#include "gg_keep.cuh"
#include "gg_later.cuh"

namespace gg {

/* WGRAD: lines of the last block that lie behind the expert's rows become zeros in
 * both operands (0 times NaN is NaN).  Each warpgroup clears its own box of A and
 * all of B: both write the same zeros to B, so they need not meet. */
template <class C>
__device__ __forceinline__ void clear_tail(const shared<C> &s, int stage, int group, int lines) {
    int thread = threadIdx.x & 127;
    for (int i = lines * 8 + thread; i < 64 * 8; i += 128) {
        sts16(s.a(stage) + group * kBox + i * 16, make_uint4(0, 0, 0, 0));
#pragma unroll
        for (int box = 0; box < C::kTileN / 64; box++) {
            sts16(s.b(stage) + box * kBox + i * 16, make_uint4(0, 0, 0, 0));
        }
    }
    fence_async();
    bar_sync(kBarGroup + group, 128);
}

/* What the warp's epilogue will read, fetched into L2 a few blocks ahead: not
 * earlier, the operands that stream through would push it out again. */
constexpr int kPrefetchBlocks = 6;

template <class C>
__device__ __forceinline__ void prefetch_old(const gg_params &p, const tile &t, int warp) {
    constexpr bool kBack = C::kKind == EPO_GG_DGRAD && C::kFuse == EPO_GG_SWIGLU;
    if ((C::kWgrad && p.accumulate) || kBack) {
        place w = place_of<C>(p, t, warp);
        int lane = threadIdx.x & 31;
        int size = C::kWgrad && p.c_type == EPO_F32 ? 4 : 2;
        uint32_t bytes = (uint32_t)(min(C::kTileN, w.cols) * size);
        if ((lane & 15) < w.rows) {
            int64_t row = w.row + (lane & 15);
            if (kBack) { /* gate by the lower lanes, up by the upper */
                l2_prefetch((const char *)p.h + ((2 * row + (lane >> 4)) * p.n + w.col) * size,
                            bytes);
            } else if (lane < 16) {
                l2_prefetch((const char *)p.c + (row * p.n + w.col) * size, bytes);
            }
        }
    }
}

template <class C>
__device__ __forceinline__ void multiply_block(const shared<C> &s, int stage, int group,
                                               float (&acc)[C::kAcc], bool more) {
    uint64_t a = smem_desc(s.a(stage) + group * kBox, kBox, 1024);
    uint64_t b = smem_desc(s.b(stage), kBox, 1024);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; k++) {
        wgmma<typename C::T, C::kTileN, C::kTransA, C::kTransB>::mma(
            acc, a + k * C::kStepA, b + k * C::kStepB, k > 0 || more);
    }
    wgmma_commit();
}

/* A stage goes back to the copies of both blocks: each writes to both. */
template <class C>
__device__ __forceinline__ void stage_back(const gg_params &p, const shared<C> &there, int stage) {
    if ((threadIdx.x & 31) < p.cluster) {
        cluster_arrive(there.empty(stage));
    }
}

/* All blocks of K of one tile; before_block(i), and behind_block(i) while its products run, do
 * what else is to do.  A stage is given back when the products of the block behind it have
 * been issued and its own are done. */
template <class C, class B, class E>
__device__ __forceinline__ void
multiply_tile(const gg_params &p, const shared<C> &s, const shared<C> &there,
              ring<C::kStages> &from, const tile &t, int blocks, int group, float (&acc)[C::kAcc],
              keeper<C> keep, B before_block, E behind_block) {
    int before = -1;
    int tail = C::kWgrad ? t.rows % kTileK : 0;
    pin(acc);
    for (int i = 0; i < blocks; i++) {
        before_block(i);
        mbar_wait(s.full(from.index), from.parity);
        if (C::kWgrad && i == blocks - 1 && tail != 0) {
            clear_tail(s, from.index, group, tail);
        }
        keep.store(s, from.index, group, i);
        multiply_block(s, from.index, group, acc, i > 0);
        wgmma_wait<1>();
        if (before >= 0) {
            keep.template wait<1>();
            stage_back(p, there, before);
        }
        behind_block(i);
        before = from.index;
        from.next();
    }
    wgmma_wait<0>();
    pin(acc);
    if (before >= 0) {
        keep.template wait<0>();
        stage_back(p, there, before);
    }
}

/* A warpgroup without rows in this tile only gives the stages back. */
template <class C>
__device__ __forceinline__ void pass_tile(const gg_params &p, const shared<C> &s,
                                          const shared<C> &there, ring<C::kStages> &from,
                                          int blocks) {
    for (int i = 0; i < blocks; i++) {
        mbar_wait(s.full(from.index), from.parity);
        __syncwarp();
        stage_back(p, there, from.index);
        from.next();
    }
}

template <class C>
__device__ void math(const gg_params &p, const shared<C> &s, const gg_maps &m, int group) {
    ring<kSlots> at;
    ring<C::kStages> from;
    tile next;
    bool peeked = false;
    int lane = threadIdx.x & 31, warp = group * 4 + ((threadIdx.x >> 5) & 3);
    later<C> old(p, m, s, group);
    shared<C> first = shared_of(s, 0), there = shared_of(s, min(lane, p.cluster - 1));
    while (true) {
        tile t = peeked ? next : tile_wait(s, at);
        peeked = false;
        if (t.expert < 0) {
            break;
        }
        int blocks = tile_blocks<C>(p, t);
        bool mine = t.live && tile_height<C>(p, t) > group * 64;
        float acc[C::kAcc];
        if (mine) {
            if (blocks == 0) { /* nothing will write them */
#pragma unroll
                for (int i = 0; i < C::kAcc; i++) {
                    acc[i] = 0.0f;
                }
            }
            keeper<C> keep(p, m, t, group);
            auto before_block = [&](int i) {
                if (i == max(blocks - kPrefetchBlocks, 0)) {
                    prefetch_old<C>(p, t, warp);
                }
                if (i == blocks - 1) {
                    peeked = slot_peek(s, at, next);
                }
            };
            multiply_tile(p, s, there, from, t, blocks, group, acc, keep, before_block, [&](int i) {
                if constexpr (C::kLater) {
                    old.step(i, blocks);
                }
            });
        } else {
            pass_tile(p, s, there, from, blocks);
        }
        __syncwarp();
        if (lane == 0) {
            slot_back(first, at);
        }
        at.next();
        if constexpr (C::kLater) {
            old.rest(mine ? blocks : 0);
            if (mine) {
                old.take(t, acc);
            }
        } else if (mine) {
            epilogue<C>(p, s, m, t, group, acc);
        }
    }
    if constexpr (C::kLater) {
        old.rest(0);
    }
    if (lane == 0) {
        tma_store_wait<0>();
    }
}

} /* namespace gg */
#endif
