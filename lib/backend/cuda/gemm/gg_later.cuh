/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_later.cuh - 16-bit gradients of weights that leave while the next tile is multiplied.
 * An SM writes 32 bytes a clock: a tile of 128 x 256 needs 2,048 clocks on its way out, and
 * the buffers hold half of it.  Rounded, it fits into registers beside the next one's
 * accumulators.
 *
 * A warpgroup sends its 64 rows together: the copy engine takes one box of 64 lines in less
 * time than four of 16.  The tensor map ends where the expert's rows and columns do.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_LATER_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_LATER_CUH

#include "gg_epilogue.cuh"

namespace gg {

/* A warpgroup's rows of the tile before, in chunks of 64 columns. */
template <class C> struct later {
    static constexpr int kChunks = C::kTileN / 64;
    static constexpr int kNothing = 1 << 30; /* as a column: beyond any output's end */
    uint32_t v[C::kAcc / 2];                 /* accumulators 2i and 2i + 1, rounded */
    int col = kNothing, y = 0, z = 0;        /* as in place */
    const gg_params &p;
    const CUtensorMap *map;
    uint32_t base; /* two buffers of 64 lines */
    int group;

    __device__ __forceinline__ later(const gg_params &p_, const gg_maps &m, const shared<C> &s,
                                     int group_)
        : p(p_), map(&m.c), base(s.staging(group_ * 4)), group(group_) {}

    /* Nothing may be left to send. */
    __device__ __forceinline__ void take(const tile &t, const float (&acc)[C::kAcc]) {
        place w = place_of<C>(p, t, group * 4);
#pragma unroll
        for (int i = 0; i < C::kAcc / 2; i++) {
            v[i] = pack<typename C::T>(acc[2 * i], acc[2 * i + 1]);
        }
        col = w.col, y = w.y, z = w.z;
    }
    template <int kSeq> __device__ __forceinline__ void stage(uint32_t buffer) const {
        int lane = threadIdx.x & 31;
        int row = (lane & 7) + ((lane >> 3) & 1) * 8;
        uint32_t line = buffer + ((threadIdx.x >> 5) & 3) * kBuffer + row * 128;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t *from = v + kSeq * 16 + 4 * j;
            int piece = 2 * j + (lane >> 4);
            stmatrix4(line + ((piece ^ (row & 7)) << 4), from[0], from[1], from[2], from[3]);
        }
    }
    template <int kSeq> __device__ __forceinline__ void send() const {
        if constexpr (kSeq < kChunks) {
            bool one = (threadIdx.x & 127) == 0;
            int x = col + kSeq * 64;
            if (x >= p.n) {
                return;
            }
            uint32_t buffer = base + kSeq % kBuffers * 4 * kBuffer;
            if (kSeq != 1) { /* the first wait is for both buffers */
                if (one) {
                    tma_store_wait<kSeq == 0 ? 0 : kBuffers - 1>();
                }
                bar_sync(kBarGroup + group, 128);
            }
            stage<kSeq>(buffer);
            fence_async();
            bar_sync(kBarGroup + group, 128);
            if (one) {
                tma_store<false>(map, buffer, x, y, z);
            }
        }
    }
    __device__ __forceinline__ void chunk(int seq) const {
        if (seq == 0) {
            send<0>();
        } else if (seq == 1) {
            send<1>();
        } else if (seq == 2) {
            send<2>();
        } else if (seq == 3) {
            send<3>();
        }
    }
    /* Block `block` of the next tile's `blocks` is being multiplied: chunks leave as far
     * apart as these allow, the warpgroups' in turn. */
    __device__ __forceinline__ void step(int block, int blocks) const {
        int shift = max(29 - __clz(blocks), 0), turn = group << shift >> 1;
        if ((block & ((1 << shift) - 1)) == turn) {
            chunk(block >> shift);
        }
    }
    /* What the steps of `blocks` have left. */
    __device__ __forceinline__ void rest(int blocks) {
#pragma unroll 1
        for (int i = blocks; i < kChunks; i++) {
            chunk(i);
        }
        col = kNothing;
    }
};

} /* namespace gg */
#endif
