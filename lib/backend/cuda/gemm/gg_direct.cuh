/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_direct.cuh - the epilogue of a chain's second product where other ranks' rows are
 * stored to those ranks' memory.
 *
 * An expert's rows lie rank by rank, so most warps' 16 rows are one rank's: these leave
 * by TMA as all rows do, through that rank's tensor map.  Where two ranks' rows meet, and
 * at an expert's end, lanes store them.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_DIRECT_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_DIRECT_CUH

#include "gg_epilogue.cuh"

namespace gg {

/* The rank whose row of the expert it is; a whole warp asks.  Ranks without rows begin where
 * the next one does. */
__device__ __forceinline__ int direct_rank(const gg_direct &d, int expert, int64_t row) {
    int lane = threadIdx.x & 31;
    int first = lane < d.ranks ? __ldg(d.first + expert * d.ranks + lane) : 0x7fffffff;
    return 31 - __clz(__ballot_sync(0xffffffffu, first <= row) | 1);
}
/* How far rank r's row lies from here. */
__device__ __forceinline__ int direct_shift(const gg_direct &d, int expert, int rank) {
    int at = expert * d.ranks + rank;
    return __ldg(d.to + at) - __ldg(d.first + at);
}

/* In a graph: a wait before expired, and the peers' slots are not free. */
__device__ __forceinline__ bool direct_late(const gg_direct &d) {
    return d.late != nullptr && *(const volatile uint32_t *)d.late != 0;
}

/* One row's, looked for by one thread. */
__device__ __forceinline__ int direct_rank_of(const gg_direct &d, int expert, int64_t row) {
    int rank = 0;
    for (int r = 1; r < d.ranks; r++) {
        rank = __ldg(d.first + expert * d.ranks + r) <= row ? r : rank;
    }
    return rank;
}
/* Where the gradient of a row's weight goes. */
__device__ __forceinline__ float *direct_dweight(const gg_direct &d, float *own, const tile &t,
                                                 int64_t row) {
    if (d.ranks == 0) {
        return own + row;
    }
    int rank = direct_rank_of(d, t.expert, row);
    float *base = rank == d.own || direct_late(d) ? nullptr : d.dweight[rank];
    return base == nullptr ? own + row : base + row + direct_shift(d, t.expert, rank);
}

/* Rows of several ranks: where one of them goes. */
template <class T>
__device__ __forceinline__ T *direct_place(const gg_params &p, const gg_direct &d, const place &w,
                                           int expert, int row) {
    int64_t to = w.row + row;
    int rank = direct_rank_of(d, expert, to);
    T *base = (T *)p.c;
    if (rank != d.own) {
        base = (T *)d.base[rank];
        to += direct_shift(d, expert, rank);
    }
    return base + to * p.n + w.col;
}
template <class C, int kSeq>
__device__ __forceinline__ void send_rows(const gg_params &p, const gg_direct &d, uint32_t base,
                                          const place &w, int expert, const float (&acc)[C::kAcc]) {
    using T = typename C::T;
    if constexpr (kSeq * 64 < C::kTileN) {
        int lane = threadIdx.x & 31, piece = lane & 7;
        uint32_t buffer = chunk_begin<kSeq>(base);
        stage16<T, kSeq * 64, 64>(buffer, acc);
        __syncwarp();
        if (kSeq * 64 + piece * 8 < w.cols) {
#pragma unroll 1
            for (int row = lane >> 3; row < w.rows; row += 4) {
                T *to = direct_place<T>(p, d, w, expert, row) + kSeq * 64 + piece * 8;
                *(uint4 *)to = lds16(buffer + row * 128 + ((piece ^ (row & 7)) << 4));
            }
        }
        chunk_unsent();
        send_rows<C, kSeq + 1>(p, d, base, w, expert, acc);
    }
}

template <class C>
__device__ __forceinline__ void epilogue_direct(const gg_params &p, const gg_direct &d,
                                                const shared<C> &s, const gg_chain_maps &maps,
                                                const tile &t, int group, float (&acc)[C::kAcc]) {
    using T = typename C::T;
    int warp = group * 4 + ((threadIdx.x >> 5) & 3);
    uint32_t base = s.staging(warp);
    place w = place_of<C>(p, t, warp);
    if (w.rows <= 0) {
        return;
    }
    output o = {&maps.map[1].c, (T *)p.c + w.row * p.n + w.col, p.n, w.col, true};
    if (d.ranks > 0) {
        int rank = direct_rank(d, t.expert, w.row);
        bool mixed = rank != direct_rank(d, t.expert, w.row + w.rows - 1);
        if ((mixed || rank != d.own) && direct_late(d)) {
            return;
        }
        if (mixed) {
            send_rows<C, 0>(p, d, base, w, t.expert, acc);
            return;
        }
        if (rank != d.own) {
            w.y += direct_shift(d, t.expert, rank);
            o.map = &maps.direct[rank];
            o.to = (T *)d.base[rank] + (int64_t)w.y * p.n + w.col;
        }
    }
    send16<C, 0, 0, C::kTileN>(base, w, o, acc);
}

} /* namespace gg */
#endif
