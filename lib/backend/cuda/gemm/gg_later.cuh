/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_later.cuh - 16-bit results that leave while the next tile is multiplied.  An SM writes
 * 32 bytes a clock: a tile of 128 x 256 needs 2,048 clocks on its way out, and the buffers
 * hold half of it.  Rounded, it fits into registers beside the next one's accumulators.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_LATER_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_LATER_CUH

#include "gg_epilogue.cuh"

namespace gg {

/* A warp's 16 rows of the tile before, in chunks of 64 columns. */
template <class C> struct later {
    using T = typename C::T;
    static constexpr int kChunks = C::kTileN / 64;
    static constexpr int kNothing = 1 << 30; /* as a column: beyond any output's end */
    uint32_t v[C::kAcc / 2];                 /* accumulators 2i and 2i + 1, rounded */
    int col = kNothing, y = 0;               /* as in place */
    int z = 0;                               /* WGRAD: as in place; else the rows that exist */

    __device__ __forceinline__ void take(const place &w, const float (&acc)[C::kAcc]) {
#pragma unroll
        for (int i = 0; i < C::kAcc / 2; i++) {
            v[i] = pack<T>(acc[2 * i], acc[2 * i + 1]);
        }
        col = w.rows > 0 ? w.col : kNothing;
        y = w.y;
        z = C::kWgrad ? w.z : w.rows;
    }
    template <int kSeq>
    __device__ __forceinline__ void send(const gg_params &p, uint32_t base,
                                         const CUtensorMap *map) {
        if constexpr (kSeq < kChunks) {
            int x = col + kSeq * 64, lane = threadIdx.x & 31;
            int row = (lane & 7) + ((lane >> 3) & 1) * 8;
            if (x >= p.n) {
                return;
            }
            uint32_t buffer = chunk_begin<kSeq>(base);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t *from = v + kSeq * 16 + 4 * j;
                int piece = 2 * j + (lane >> 4);
                stmatrix4(buffer + row * 128 + ((piece ^ (row & 7)) << 4), from[0], from[1],
                          from[2], from[3]);
            }
            if (C::kWgrad || z == 16) {
                chunk_send<false>(map, buffer, x, y, C::kWgrad ? z : 0);
            } else { /* one row at a time: registers are scarce */
                store16<T, 1>(buffer, (T *)p.c + (int64_t)y * p.n + x, p.n, z, p.n - x);
                chunk_unsent();
            }
        }
    }
    __device__ __forceinline__ void chunk(const gg_params &p, uint32_t base, const CUtensorMap *map,
                                          int seq) {
        if (seq == 0) {
            send<0>(p, base, map);
        } else if (seq == 1) {
            send<1>(p, base, map);
        } else if (seq == 2) {
            send<2>(p, base, map);
        } else if (seq == 3) {
            send<3>(p, base, map);
        }
    }
    /* Block `block` of the next tile's `blocks` is being multiplied: chunks leave as far
     * apart as these allow. */
    __device__ __forceinline__ void step(const gg_params &p, uint32_t base, const CUtensorMap *map,
                                         int block, int blocks) {
        int shift = max(29 - __clz(blocks), 0);
        if ((block & ((1 << shift) - 1)) == 0) {
            chunk(p, base, map, block >> shift);
        }
    }
    /* What a tile of `blocks` has left. */
    __device__ __forceinline__ void rest(const gg_params &p, uint32_t base, const CUtensorMap *map,
                                         int blocks) {
#pragma unroll 1
        for (int i = blocks; i < kChunks; i++) {
            chunk(p, base, map, i);
        }
        col = kNothing;
    }
};

} /* namespace gg */
#endif
