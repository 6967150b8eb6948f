/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_sm90.cuh - the persistent kernel for sm_90a: one warpgroup feeds (TMA, tile
 * scheduler, gather), two multiply (wgmma) and store.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_SM90_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_SM90_CUH

#include "gg_feed.cuh"
#include "gg_kernels.h"
#include "gg_math.cuh"

namespace gg {

template <class C>
__device__ __forceinline__ void barriers_init(const gg_params &p, const shared<C> &s) {
    bool more = gathers(p);
    for (int i = 0; i < C::kStages; i++) {
        mbar_init(s.full(i), 1 + more);
        mbar_init(s.empty(i), 8 * p.cluster);
        mbar_init(s.copied(i), 64);
    }
    for (int i = 0; i < kSlots; i++) {
        mbar_init(s.known(i), 1);
        mbar_init(s.used(i), (9 + 2 * more) * p.cluster);
    }
    mbar_init_fence();
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    sm90_kernel(const __grid_constant__ gg_params p, const __grid_constant__ gg_maps m) {
    extern __shared__ __align__(1024) uint8_t raw[];
    shared<C> s = {(smem_addr(raw) + 1023) & ~1023u};
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (threadIdx.x == 0) {
        tma_prefetch_map(&m.a);
        tma_prefetch_map(&m.b);
        tma_prefetch_map(&m.c);
        barriers_init(p, s);
    }
    cluster_sync();
    grid_wait();
    if (warp < 4) {
        regs_less<C::kLater ? kLaterFeedRegs : kFeedRegs>();
        if (warp == 0) {
            if ((threadIdx.x & 31) == 0) {
                feed_tma(p, s, m);
            }
        } else if (warp == 1) {
            if (cluster_rank() == 0) {
                feed_tiles(p, s, [&](tile &t, int &hint, uint64_t &spin) {
                    return tile_next(p, t, hint, spin);
                });
            }
        } else if (gathers(p)) {
            feed_gather(p, s);
        }
    } else {
        regs_more<C::kLater ? kLaterMathRegs : kMathRegs>();
        math(p, s, m, (warp >> 2) - 1);
    }
    __syncwarp();
    cluster_sync(); /* the other block may still write to this one */
}

template <class C> gg_kernel sm90_entry() {
    gg_kernel k = {(const void *)sm90_kernel<C>, kThreads, C::kSmem};
    return k;
}
template <int kKind, int kFuse, class T> gg_kernel sm90_width(int tile_n) {
    if (tile_n == 192) {
        return sm90_entry<config<kKind, kFuse, T, 192>>();
    }
    if (tile_n == 128) {
        return sm90_entry<config<kKind, kFuse, T, 128>>();
    }
    if constexpr (kKind == EPO_GG_DGRAD && kFuse == EPO_GG_SWIGLU) {
        return gg_kernel{};
    } else {
        return sm90_entry<config<kKind, kFuse, T, 256>>();
    }
}
template <class T> gg_kernel sm90_find(int kind, int fuse, int tile_n) {
    if (kind == EPO_GG_WGRAD) {
        return fuse == GG_FRESH ? sm90_width<EPO_GG_WGRAD, GG_FRESH, T>(tile_n)
                                : sm90_width<EPO_GG_WGRAD, EPO_GG_PLAIN, T>(tile_n);
    }
    if (kind == EPO_GG_DGRAD) {
        return fuse == EPO_GG_PLAIN ? sm90_width<EPO_GG_DGRAD, EPO_GG_PLAIN, T>(tile_n)
                                    : sm90_width<EPO_GG_DGRAD, EPO_GG_SWIGLU, T>(tile_n);
    }
    return fuse == EPO_GG_PLAIN ? sm90_width<EPO_GG_FORWARD, EPO_GG_PLAIN, T>(tile_n)
                                : sm90_width<EPO_GG_FORWARD, EPO_GG_SWIGLU, T>(tile_n);
}

} /* namespace gg */
#endif
