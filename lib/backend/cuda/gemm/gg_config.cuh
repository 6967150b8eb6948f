/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_config.cuh - compile-time shape of one sm_90 kernel and its shared memory.
 *
 * A tile is 128 rows by kTileN columns, K in blocks of 64.  Operands lie in shared
 * memory as TMA writes them with 128-byte swizzle, in boxes of 128-byte lines:
 *   K-major   one line per row (M or N), 64 K values in a line
 *   MN-major  boxes of 64 M or N values: one line per K value
 * A's tile is two boxes of 64 lines, one per consumer warpgroup, either way.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_CONFIG_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_CONFIG_CUH

#include "gg_kernels.h"
#include "gg_ptx.cuh"
#include "gg_tiles.cuh"
#include "gg_wgmma.cuh"

namespace gg {

constexpr int kTileM = 128;
constexpr int kTileK = 64;
constexpr int kBox = 64 * 128;    /* bytes of a box of 64 lines */
constexpr int kThreads = 3 * 128; /* one warpgroup feeds two */
constexpr int kBarGroup = 1;      /* + warpgroup: its barrier */
constexpr int kSlots = 2;         /* tiles known ahead */
constexpr int kFeedRegs = 56;
constexpr int kMathRegs = 224;
constexpr int kLaterFeedRegs = 40;
constexpr int kLaterMathRegs = 232;
constexpr int kSmemLimit = 227 * 1024;

template <int kKind_, int kFuse_, class T_, int kTileN_> struct config {
    using T = T_;
    static constexpr int kKind = kKind_;
    static constexpr int kFuse = kFuse_;
    static constexpr int kTileN = kTileN_;
    static constexpr bool kWgrad = kKind == EPO_GG_WGRAD;
    static constexpr bool kGated = kKind == EPO_GG_FORWARD && kFuse == EPO_GG_SWIGLU;
    /* Results are stored while the next tile is multiplied. */
    static constexpr bool kLater = kWgrad && kFuse == GG_FRESH;
    static constexpr int kTransA = kWgrad ? 1 : 0;
    static constexpr int kTransB = kKind == EPO_GG_FORWARD ? 0 : 1;
    static constexpr int kAcc = kTileN / 2;
    static constexpr int kStages = kTileN == 128 ? 6 : 4;
    static constexpr int kBytesA = 2 * kBox;
    static constexpr int kBytesB = kTileN * 128;
    static constexpr int kPartsB = kTransB ? kTileN / 64 : 2;
    /* Advance of one wgmma's 16 K values, in descriptor units of 16 bytes. */
    static constexpr int kStepA = kTransA ? 16 * 128 / 16 : 2;
    static constexpr int kStepB = kTransB ? 16 * 128 / 16 : 2;
    static constexpr int kOffB = kStages * kBytesA;
    static constexpr int kOffStaging = kOffB + kStages * kBytesB;
    static constexpr int kOffBars = kOffStaging + 8 * 4096;
    static constexpr int kSmem = kOffBars + 512 + 1024; /* and room to align the begin */
    static_assert(kSmem <= kSmemLimit, "shared memory");
};

__device__ __forceinline__ bool gathers(const gg_params &p) {
    return p.a_index != nullptr || p.b_index != nullptr;
}

/* Shared-memory addresses of a block. */
template <class C> struct shared {
    uint32_t base;
    __device__ __forceinline__ uint32_t a(int stage) const { return base + stage * C::kBytesA; }
    __device__ __forceinline__ uint32_t b(int stage) const {
        return base + C::kOffB + stage * C::kBytesB;
    }
    __device__ __forceinline__ uint32_t staging(int warp) const {
        return base + C::kOffStaging + warp * 4096;
    }
    __device__ __forceinline__ uint32_t full(int stage) const {
        return base + C::kOffBars + stage * 8;
    }
    __device__ __forceinline__ uint32_t empty(int stage) const { return full(C::kStages + stage); }
    __device__ __forceinline__ uint32_t known(int slot) const {
        return full(2 * C::kStages + slot);
    }
    __device__ __forceinline__ uint32_t used(int slot) const {
        return full(2 * C::kStages + kSlots + slot);
    }
    __device__ __forceinline__ uint32_t copied(int stage) const {
        return full(2 * C::kStages + 2 * kSlots + stage);
    }
    __device__ __forceinline__ uint32_t slot(int slot) const {
        return base + C::kOffBars + 256 + slot * 32;
    }
    __device__ __forceinline__ uint32_t stored(int slot) const {
        return base + C::kOffBars + 384 + slot * 8;
    }
};

/* A place in a ring of kCount and the parity of its current round. */
template <int kCount> struct ring {
    int index = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++index == kCount) {
            index = 0;
            parity ^= 1;
        }
    }
};

/* Rows of the tile that exist: of the output for the row kinds, of dW for WGRAD. */
template <class C> __device__ __forceinline__ int tile_height(const gg_params &p, const tile &t) {
    return C::kWgrad ? min(kTileM, p.m - t.m * kTileM) : t.rows;
}
template <class C> __device__ __forceinline__ int tile_blocks(const gg_params &p, const tile &t) {
    return ((C::kWgrad ? t.rows : p.k) + kTileK - 1) / kTileK;
}

/* The tile that the scheduler left in the slot; expert -1: there is none. */
template <class C>
__device__ __forceinline__ tile slot_read(const shared<C> &s, const ring<kSlots> &at) {
    uint4 lo = lds16(s.slot(at.index)), hi = lds16(s.slot(at.index) + 16);
    tile t;
    t.expert = (int)lo.x, t.row = (int)lo.y, t.rows = (int)lo.z, t.m = (int)lo.w;
    t.n = (int)hi.x, t.row_tile = (int)hi.y, t.part = (int)hi.w;
    t.share = (int)(hi.z & 3), t.live = (int)(hi.z >> 2 & 1), t.stage = (int)(hi.z >> 3);
    return t;
}
/* `there`: the shared memory of the block that it is for.
 * compute-sanitizer's racecheck names this and slot_read as a race.  It does not follow
 * the barriers between them, which are addressed across the cluster: it says the same
 * of a cluster of one block, where each arrival is the block's own, and of arrivals with
 * release and waits with acquire at cluster scope, as they are here. */
template <class C>
__device__ __forceinline__ void slot_write(const shared<C> &there, const ring<kSlots> &at,
                                           const tile &t) {
    cluster_store16(there.slot(at.index), make_uint4(t.expert, t.row, t.rows, t.m));
    uint32_t bits = (uint32_t)(t.share | t.live << 2 | t.stage << 3);
    cluster_store16(there.slot(at.index) + 16, make_uint4(t.n, t.row_tile, bits, t.part));
    cluster_announce(there.known(at.index));
}
/* A reader is done with the slot.  No release: it has used what it read. */
template <class C>
__device__ __forceinline__ void slot_back(const shared<C> &first, const ring<kSlots> &at) {
    cluster_arrive(first.used(at.index));
}
/* The same shared memory in block `rank` of the cluster. */
template <class C> __device__ __forceinline__ shared<C> shared_of(const shared<C> &s, int rank) {
    shared<C> there = {cluster_addr(s.base, (uint32_t)rank)};
    return there;
}

} /* namespace gg */
#endif
