/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_epilogue.cuh - from the accumulators to memory.  Every warp works on its own
 * 16 rows through its own 4 KB of shared memory; no warp waits for another.
 *
 * Accumulators of m64nN: lane l holds, of its warp's rows l/4 and l/4+8, columns
 * 8j + 2(l%4) and the next in acc[4j..4j+1] and acc[4j+2..4j+3].
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_EPILOGUE_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_EPILOGUE_CUH

#include "gg_config.cuh"
#include "gg_swiglu.cuh"

namespace gg {

/* Where a warp's 16 rows of the tile go. */
struct place {
    int64_t row;   /* first, in the output's rows */
    int rows;      /* of the 16, how many exist; <= 0: none */
    int col, cols; /* first column, columns from there to the output's end */
};
template <class C>
__device__ __forceinline__ place place_of(const gg_params &p, const tile &t, int warp) {
    place w;
    w.row = (C::kWgrad ? (int64_t)t.expert * p.m + t.m * kTileM : t.row) + warp * 16;
    w.rows = min(16, tile_height<C>(p, t) - warp * 16);
    w.col = t.n * p.tile_n;
    w.cols = (C::kGated ? p.n / 2 : p.n) - w.col;
    return w;
}

/* Columns kFrom .. kFrom+kCols (at most 128) of the accumulators, rounded, through
 * 16 rows of 16 pieces of 16 bytes, swizzled against bank conflicts, to rows of `dst`
 * (at the place's first row and column kFrom), so that a warp stores whole 256-byte
 * stretches. */
template <class T, int kFrom, int kCols, int kAcc>
__device__ __forceinline__ void put16(uint32_t base, const float (&acc)[kAcc], T *dst, int64_t ld,
                                      int rows, int cols) {
    int lane = threadIdx.x & 31;
    int row = (lane & 7) + ((lane >> 3) & 1) * 8;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kCols / 16; j++) {
        const float *v = acc + kFrom / 2 + 8 * j;
        int piece = 2 * j + (lane >> 4);
        stmatrix4(base + row * 256 + ((piece ^ (row & 7)) << 4), pack<T>(v[0], v[1]),
                  pack<T>(v[2], v[3]), pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
    }
    __syncwarp();
    int piece = lane & 15;
    if (piece * 8 < min(kCols, cols)) {
        uint4 v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int r = 2 * i + (lane >> 4);
            v[i] = lds16(base + r * 256 + ((piece ^ (r & 7)) << 4));
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int r = 2 * i + (lane >> 4);
            if (r < rows) {
                *(uint4 *)(dst + r * ld + piece * 8) = v[i];
            }
        }
    }
}

template <class C, int kFrom>
__device__ __forceinline__ void put_plain(const gg_params &p, uint32_t base, const place &w,
                                          const float (&acc)[C::kAcc]) {
    using T = typename C::T;
    if constexpr (kFrom < C::kTileN) {
        constexpr int kCols = C::kTileN - kFrom < 128 ? C::kTileN - kFrom : 128;
        put16<T, kFrom, kCols>(base, acc, (T *)p.c + w.row * p.n + w.col + kFrom, p.n, w.rows,
                               w.cols - kFrom);
        put_plain<C, kFrom + 128>(p, base, w, acc);
    }
}

/* 64 columns as fp32 for lanes that take eight columns of a row each: 16 rows of 256
 * bytes.  Pieces of 16 bytes are swizzled in pairs, so that a pair stays one piece of
 * eight columns. */
template <int kFrom, int kAcc>
__device__ __forceinline__ void stage32(uint32_t base, const float (&acc)[kAcc]) {
    int lane = threadIdx.x & 31;
    int row = lane >> 2;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float *v = acc + kFrom / 2 + 4 * j;
        int piece = (2 * j + ((lane & 3) >> 1)) ^ (2 * (row & 3));
        uint32_t to = base + row * 256 + (piece << 4) + (lane & 1) * 8;
        sts8(to, v[0], v[1]);
        sts8(to + 8 * 256, v[2], v[3]);
    }
    __syncwarp();
}
__device__ __forceinline__ float4 take4(uint32_t base, int row, int piece) {
    uint4 v = lds16(base + row * 256 + ((piece ^ (2 * (row & 3))) << 4));
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                       __uint_as_float(v.w));
}
/* Eight columns; lanes above four in their row read the pair in the other order,
 * which keeps the banks apart. */
__device__ __forceinline__ void take8(uint32_t base, int row, int pair, float (&v)[8]) {
    int odd = pair >> 2;
    float4 x = take4(base, row, 2 * pair + odd), y = take4(base, row, 2 * pair + 1 - odd);
    float4 lo = odd ? y : x, hi = odd ? x : y;
    v[0] = lo.x, v[1] = lo.y, v[2] = lo.z, v[3] = lo.w;
    v[4] = hi.x, v[5] = hi.y, v[6] = hi.z, v[7] = hi.w;
}

/* fp32 gradients in steps of four columns of four rows per lane: step s has 64
 * columns from 64*(s/2) on and the rows 8*(s%2) + 2i + l/16. */
struct step32 {
    float4 v[4];
    __device__ __forceinline__ void load(const gg_params &p, const place &w, int step) {
        int lane = threadIdx.x & 31;
        int offset = step / 2 * 64 + (lane & 15) * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = 8 * (step % 2) + 2 * i + (lane >> 4);
            v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (p.accumulate && offset < w.cols && row < w.rows) {
                v[i] = *(const float4 *)((const float *)p.c + (w.row + row) * p.n + w.col + offset);
            }
        }
    }
    __device__ __forceinline__ void store(const gg_params &p, uint32_t base, const place &w,
                                          int step) {
        int lane = threadIdx.x & 31;
        int offset = step / 2 * 64 + (lane & 15) * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = 8 * (step % 2) + 2 * i + (lane >> 4);
            float4 x = take4(base, row, lane & 15);
            x.x += v[i].x, x.y += v[i].y, x.z += v[i].z, x.w += v[i].w;
            if (offset < w.cols && row < w.rows) {
                *(float4 *)((float *)p.c + (w.row + row) * p.n + w.col + offset) = x;
            }
        }
    }
};
template <class C, int kStep>
__device__ __forceinline__ void put32(const gg_params &p, uint32_t base, const place &w,
                                      const float (&acc)[C::kAcc], step32 &step) {
    if constexpr (kStep * 32 < C::kTileN) {
        step32 next;
        if constexpr ((kStep + 1) * 32 < C::kTileN) {
            next.load(p, w, kStep + 1);
        }
        if constexpr (kStep % 2 == 0) {
            stage32<kStep * 32>(base, acc);
        }
        step.store(p, base, w, kStep);
        put32<C, kStep + 1>(p, base, w, acc, next);
    }
}

/* Gradients of the operands' type, added to in fp32 and rounded once: eight columns
 * of four rows per lane and chunk, rows 4i + l/8. */
template <class T> struct old_rows {
    uint4 v[4];
    __device__ __forceinline__ void load(const T *from, int64_t ld, int rows, bool in) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = 4 * i + ((threadIdx.x & 31) >> 3);
            v[i] = in && row < rows ? *(const uint4 *)(from + row * ld) : make_uint4(0, 0, 0, 0);
        }
    }
};
template <class C, int kFrom>
__device__ __forceinline__ void add16(const gg_params &p, uint32_t base, const place &w,
                                      const float (&acc)[C::kAcc],
                                      const old_rows<typename C::T> &old) {
    using T = typename C::T;
    if constexpr (kFrom < C::kTileN) {
        int lane = threadIdx.x & 31;
        int col = kFrom + (lane & 7) * 8;
        T *dst = (T *)p.c + w.row * p.n + w.col + col;
        old_rows<T> next;
        if constexpr (kFrom + 64 < C::kTileN) {
            next.load(dst + 64, p.n, w.rows, col + 64 < w.cols);
        }
        stage32<kFrom>(base, acc);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = 4 * i + (lane >> 3);
            float v[8], o[8];
            take8(base, row, lane & 7, v);
            unpack8<T>(old.v[i], o);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                v[j] += o[j];
            }
            if (col < w.cols && row < w.rows) {
                *(uint4 *)(dst + (int64_t)row * p.n) = pack8<T>(v);
            }
        }
        add16<C, kFrom + 64>(p, base, w, acc, next);
    }
}
template <class C>
__device__ __forceinline__ void put_added(const gg_params &p, uint32_t base, const place &w,
                                          const float (&acc)[C::kAcc]) {
    using T = typename C::T;
    int col = (threadIdx.x & 7) * 8;
    old_rows<T> old;
    old.load((const T *)p.c + w.row * p.n + w.col + col, p.n, w.rows, col < w.cols);
    add16<C, 0>(p, base, w, acc, old);
}

/* Gate columns in the first half of the tile, up columns in the second. */
template <class C>
__device__ __forceinline__ void put_swiglu(const gg_params &p, uint32_t base, const place &w,
                                           float (&acc)[C::kAcc]) {
    using T = typename C::T;
    constexpr int kHalf = C::kTileN / 2;
    int lane = threadIdx.x & 31;
    int64_t f = p.n / 2;
    if (p.h != nullptr) {
        T *h = (T *)p.h + w.row * p.n + w.col;
        put16<T, 0, kHalf>(base, acc, h, p.n, w.rows, w.cols);
        put16<T, kHalf, kHalf>(base, acc, h + f, p.n, w.rows, w.cols);
    }
    float weight[2] = {1.0f, 1.0f};
    for (int i = 0; i < 2; i++) {
        int row = (lane >> 2) + 8 * i;
        if (p.row_weight != nullptr && row < w.rows) {
            weight[i] = p.row_weight[w.row + row];
        }
    }
#pragma unroll
    for (int j = 0; j < kHalf / 2; j++) {
        acc[j] = swiglu<T>(acc[j], acc[kHalf / 2 + j], weight[(j >> 1) & 1]);
    }
    put16<T, 0, kHalf>(base, acc, (T *)p.c + w.row * f + w.col, f, w.rows, w.cols);
}

/* SwiGLU's backward in steps of eight columns of two rows per lane: step s has 64
 * columns from 64*(s/2) on and the rows 8*(s%2) + 4i + l/8. */
template <class C> struct back_step {
    using T = typename C::T;
    uint4 gate[2], up[2];
    __device__ __forceinline__ void load(const gg_params &p, const place &w, int step) {
        int lane = threadIdx.x & 31;
        int offset = step / 2 * 64 + (lane & 7) * 8;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = 8 * (step % 2) + 4 * i + (lane >> 3);
            gate[i] = up[i] = make_uint4(0, 0, 0, 0);
            if (offset < w.cols && row < w.rows) {
                const T *h = (const T *)p.h + (w.row + row) * 2 * p.n + w.col + offset;
                gate[i] = *(const uint4 *)h;
                up[i] = *(const uint4 *)(h + p.n);
            }
        }
    }
    /* sum[i] takes this lane's share of row_dweight of row 4i + l/8. */
    __device__ __forceinline__ void store(const gg_params &p, uint32_t base, const place &w,
                                          int step, const float (&weight)[4], float (&sum)[4]) {
        int lane = threadIdx.x & 31;
        int offset = step / 2 * 64 + (lane & 7) * 8;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = 8 * (step % 2) + 4 * i + (lane >> 3);
            int j4 = 2 * (step % 2) + i;
            float da[8], g[8], u[8], a[8];
            take8(base, row, lane & 7, da);
            unpack8<T>(gate[i], g);
            unpack8<T>(up[i], u);
            if (offset < w.cols && row < w.rows) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    sum[j4] += swiglu_back(da[j], weight[j4], g[j], u[j], a[j]);
                }
                T *dh = (T *)p.c + (w.row + row) * 2 * p.n + w.col + offset;
                *(uint4 *)dh = pack8<T>(g);
                *(uint4 *)(dh + p.n) = pack8<T>(u);
                if (p.act != nullptr) {
                    *(uint4 *)((T *)p.act + (w.row + row) * p.n + w.col + offset) = pack8<T>(a);
                }
            }
        }
    }
};
template <class C, int kStep>
__device__ __forceinline__ void back_swiglu(const gg_params &p, uint32_t base, const place &w,
                                            const float (&acc)[C::kAcc], const float (&weight)[4],
                                            float (&sum)[4], back_step<C> &step) {
    if constexpr (kStep * 32 < C::kTileN) {
        back_step<C> next;
        if constexpr ((kStep + 1) * 32 < C::kTileN) {
            next.load(p, w, kStep + 1);
        }
        if constexpr (kStep % 2 == 0) {
            stage32<kStep * 32>(base, acc);
        }
        step.store(p, base, w, kStep, weight, sum);
        back_swiglu<C, kStep + 1>(p, base, w, acc, weight, sum, next);
    }
}

/* The warp that comes last of all column tiles adds their sums in column order. */
__device__ __forceinline__ void sum_dweight(const gg_params &p, const tile &t, const place &w,
                                            int warp, float (&sum)[4]) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        for (int d = 1; d < 8; d *= 2) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], d);
        }
        int row = 4 * i + (lane >> 3);
        if ((lane & 7) == 0 && row < w.rows) {
            __stcg(&p.partial[(int64_t)t.n * p.rows + w.row + row], sum[i]);
        }
    }
    __threadfence();
    __syncwarp();
    unsigned before = 0;
    if (lane == 0) {
        before = atomicAdd(&p.arrived[t.row_tile * 8 + warp], 1u);
    }
    if (__shfl_sync(0xffffffffu, before, 0) != (unsigned)p.tiles_n - 1) {
        return;
    }
    __threadfence();
    if (lane < w.rows) {
        float all = 0.0f;
        for (int n = 0; n < p.tiles_n; n++) {
            all += __ldcg(&p.partial[(int64_t)n * p.rows + w.row + lane]);
        }
        p.row_dweight[w.row + lane] = all;
    }
}

template <class C>
__device__ __forceinline__ void put_back(const gg_params &p, uint32_t base, const tile &t,
                                         const place &w, int warp, const float (&acc)[C::kAcc]) {
    int lane = threadIdx.x & 31;
    float weight[4], sum[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = 4 * i + (lane >> 3);
        sum[i] = 0.0f;
        weight[i] = p.row_weight != nullptr && row < w.rows ? p.row_weight[w.row + row] : 1.0f;
    }
    back_step<C> first;
    first.load(p, w, 0);
    back_swiglu<C, 0>(p, base, w, acc, weight, sum, first);
    if (p.row_dweight != nullptr) {
        sum_dweight(p, t, w, warp, sum);
    }
}

template <class C>
__device__ __forceinline__ void epilogue(const gg_params &p, const shared<C> &s, const tile &t,
                                         int group, float (&acc)[C::kAcc]) {
    int warp = group * 4 + ((threadIdx.x >> 5) & 3);
    uint32_t base = s.staging(warp);
    place w = place_of<C>(p, t, warp);
    if (w.rows <= 0) {
        return;
    }
    if constexpr (C::kGated) {
        put_swiglu<C>(p, base, w, acc);
    } else if constexpr (C::kKind == EPO_GG_DGRAD && C::kFuse == EPO_GG_SWIGLU) {
        put_back<C>(p, base, t, w, warp, acc);
    } else if (C::kWgrad && p.c_type == EPO_F32) {
        step32 first;
        first.load(p, w, 0);
        put32<C, 0>(p, base, w, acc, first);
    } else if (C::kWgrad && p.accumulate) {
        put_added<C>(p, base, w, acc);
    } else {
        put_plain<C, 0>(p, base, w, acc);
    }
}

} /* namespace gg */
#endif
