/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_keep.cuh - rows of A that are kept: the tiles of the first column store what they
 * multiply, from the shared memory that it was loaded to, so nobody reads them again for
 * that.  A warp stores its own 16 rows; the copy engine has a block's products to do so.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_KEEP_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_KEEP_CUH

#include "gg_epilogue.cuh"

namespace gg {

template <class C> struct keeper {
    const gg_params &p;
    const gg_maps &m;
    int row, rows; /* of the 16; <= 0: the tile keeps none */

    __device__ __forceinline__ keeper(const gg_params &p_, const gg_maps &m_, const tile &t,
                                      int group)
        : p(p_), m(m_), row(0), rows(0) {
        if (!C::kWgrad) {
            row = t.row + line(group);
            rows =
                p.keep != nullptr && t.n == 0 && t.stage == 0 ? min(16, t.rows - line(group)) : 0;
        }
    }
    /* Of the warp's first row in the stage. */
    __device__ __forceinline__ int line(int group) const {
        return group * 64 + ((threadIdx.x >> 5) & 3) * 16;
    }
    /* The stage's lines are there. */
    __device__ __forceinline__ void store(const shared<C> &s, int stage, int group, int block) {
        using T = typename C::T;
        if (C::kWgrad || rows <= 0) {
            return;
        }
        uint32_t from = s.a(stage) + line(group) * 128;
        if (rows < 16) { /* the others are the next expert's, which stores them itself */
            T *dst = (T *)p.keep + (int64_t)row * p.k + block * kTileK;
            store16<T>(from, dst, p.k, rows, p.k - block * kTileK);
        } else if ((threadIdx.x & 31) == 0) {
            tma_store<false>(&m.keep, from, block * kTileK, row, 0);
        }
    }
    /* Until all but the last kLeft stages were read. */
    template <int kLeft> __device__ __forceinline__ void wait() {
        if (!C::kWgrad && rows > 0) {
            if ((threadIdx.x & 31) == 0) {
                tma_store_wait<kLeft>();
            }
            __syncwarp();
        }
    }
};

} /* namespace gg */
#endif
