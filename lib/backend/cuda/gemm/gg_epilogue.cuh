/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_epilogue.cuh - from the accumulators to memory.  Every warp works on its own
 * 16 rows through its own 4 KB of shared memory; no warp waits for another (but see
 * gg_later.cuh).
 *
 * Accumulators of m64nN: lane l holds, of its warp's rows l/4 and l/4+8, columns
 * 8j + 2(l%4) and the next in acc[4j..4j+1] and acc[4j+2..4j+3].
 *
 * Rows leave in chunks of 16 lines of 128 bytes, swizzled as TMA has it, through two
 * buffers in turn: the copy engine drains one while the next is filled, and the last
 * ones while the next tile is multiplied.
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
    int y, z;      /* the first row in the output's tensor map */
};
template <class C>
__device__ __forceinline__ place place_of(const gg_params &p, const tile &t, int warp) {
    place w;
    w.y = (C::kWgrad ? t.m * kTileM : t.row) + warp * 16;
    w.z = C::kWgrad ? t.expert : 0;
    w.row = (C::kWgrad ? (int64_t)t.expert * p.m : 0) + w.y;
    w.rows = min(16, tile_height<C>(p, t) - warp * 16);
    w.col = t.n * p.tile_n;
    w.cols = (C::kGated ? p.n / 2 : p.n) - w.col;
    return w;
}

constexpr int kBuffers = 2;
constexpr int kBuffer = 16 * 128;

/* Chunk number kSeq of a tile gets its buffer once what it held has been read: of
 * the chunks sent before, kBuffers - 1 may be on their way.  The first of a tile
 * waits for all of the tile before; they had a tile's time. */
template <int kSeq> __device__ __forceinline__ uint32_t chunk_begin(uint32_t base) {
    if ((threadIdx.x & 31) == 0) {
        if (kSeq == 0) {
            tma_store_wait<0>();
        } else if (kSeq >= kBuffers) {
            tma_store_wait<kBuffers - 1>();
        }
    }
    __syncwarp();
    return base + kSeq % kBuffers * kBuffer;
}
/* All lanes have written; one sends. */
template <bool kAdd>
__device__ __forceinline__ void chunk_send(const CUtensorMap *map, uint32_t buffer, int x, int y,
                                           int z) {
    fence_async();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        tma_store<kAdd>(map, buffer, x, y, z);
    }
}
/* A chunk that the lanes store themselves, or that has no columns, is not sent: then
 * none may be left, for the count of chunk_begin to hold. */
__device__ __forceinline__ void chunk_unsent() {
    if ((threadIdx.x & 31) == 0) {
        tma_store_wait<0>();
    }
}

/* Columns kFrom .. kFrom+kCols of the accumulators, rounded, to a buffer. */
template <class T, int kFrom, int kCols, int kAcc>
__device__ __forceinline__ void stage16(uint32_t buffer, const float (&acc)[kAcc]) {
    int lane = threadIdx.x & 31;
    int row = (lane & 7) + ((lane >> 3) & 1) * 8;
#pragma unroll
    for (int j = 0; j < kCols / 16; j++) {
        const float *v = acc + kFrom / 2 + 8 * j;
        int piece = 2 * j + (lane >> 4);
        stmatrix4(buffer + row * 128 + ((piece ^ (row & 7)) << 4), pack<T>(v[0], v[1]),
                  pack<T>(v[2], v[3]), pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
    }
}
/* From a buffer to `rows` rows of `dst` (at the chunk's first row and column). */
template <class T>
__device__ __forceinline__ void store16(uint32_t buffer, T *dst, int64_t ld, int rows, int cols) {
    int lane = threadIdx.x & 31;
    int piece = lane & 7;
    __syncwarp();
    if (piece * 8 < cols) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = 4 * i + (lane >> 3);
            if (row < rows) {
                *(uint4 *)(dst + row * ld + piece * 8) =
                    lds16(buffer + row * 128 + ((piece ^ (row & 7)) << 4));
            }
        }
    }
}

/* One 16-bit output.  `to`: its element (w.row, w.col), ld elements between rows; in
 * its map the same element is (x, w.y, w.z); `clips`: the map's columns end where the
 * output's do. */
struct output {
    const CUtensorMap *map;
    void *to;
    int64_t ld;
    int x;
    bool clips;
};
/* Columns kFrom..kTo of the accumulators to columns offset.. of the output, as chunks
 * kSeq and following. */
template <class C, int kSeq, int kFrom, int kTo>
__device__ __forceinline__ void send16(uint32_t base, const place &w, const output &o,
                                       const float (&acc)[C::kAcc], int offset = 0) {
    using T = typename C::T;
    if constexpr (kFrom < kTo) {
        constexpr int kCols = kTo - kFrom < 64 ? kTo - kFrom : 64;
        int cols = w.cols - offset;
        uint32_t buffer = chunk_begin<kSeq>(base);
        if (cols <= 0) {
            chunk_unsent();
        } else {
            stage16<T, kFrom, kCols>(buffer, acc);
            if (kCols == 64 && (C::kWgrad || w.rows == 16) && (o.clips || cols >= 64)) {
                chunk_send<false>(o.map, buffer, o.x + offset, w.y, w.z);
            } else {
                store16<T>(buffer, (T *)o.to + offset, o.ld, w.rows, min(cols, kCols));
                chunk_unsent();
            }
        }
        send16<C, kSeq + 1, kFrom + kCols, kTo>(base, w, o, acc, offset + kCols);
    }
}

template <class C>
__device__ __forceinline__ void send_plain(const gg_params &p, uint32_t base, const gg_maps &m,
                                           const place &w, const float (&acc)[C::kAcc]) {
    output c = {&m.c, (typename C::T *)p.c + w.row * p.n + w.col, p.n, w.col, true};
    send16<C, 0, 0, C::kTileN>(base, w, c, acc);
}

/* fp32 gradients: chunks of 32 columns, stored or added by the copy engine; every
 * element is added to once in a call, so there is no order to keep. */
template <class C, bool kAdd, int kSeq>
__device__ __forceinline__ void send32(uint32_t base, const CUtensorMap *map, const place &w,
                                       const float (&acc)[C::kAcc]) {
    if constexpr (kSeq * 32 < C::kTileN) {
        int lane = threadIdx.x & 31;
        int row = lane >> 2;
        if (kSeq * 32 < w.cols) {
            uint32_t buffer = chunk_begin<kSeq>(base);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float *v = acc + kSeq * 16 + 4 * j;
                int piece = (2 * j + ((lane & 3) >> 1)) ^ row;
                uint32_t to = buffer + row * 128 + (piece << 4) + (lane & 1) * 8;
                sts8(to, v[0], v[1]);
                sts8(to + 8 * 128, v[2], v[3]);
            }
            chunk_send<kAdd>(map, buffer, w.col + kSeq * 32, w.y, w.z);
        }
        send32<C, kAdd, kSeq + 1>(base, map, w, acc);
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
__device__ __forceinline__ void send_swiglu(const gg_params &p, uint32_t base, const gg_maps &m,
                                            const place &w, float (&acc)[C::kAcc]) {
    using T = typename C::T;
    constexpr int kHalf = C::kTileN / 2;
    constexpr int kChunks = (kHalf + 63) / 64;
    int lane = threadIdx.x & 31;
    int f = p.n / 2;
    if (p.h != nullptr) {
        T *h = (T *)p.h + w.row * p.n + w.col;
        send16<C, 0, 0, kHalf>(base, w, output{&m.h, h, p.n, w.col, false}, acc);
        send16<C, kChunks, kHalf, C::kTileN>(base, w, output{&m.h, h + f, p.n, f + w.col, true},
                                             acc);
    } else {
        chunk_begin<0>(base);
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
    output c = {&m.c, (T *)p.c + w.row * f + w.col, f, w.col, true};
    send16<C, 2 * kChunks, 0, kHalf>(base, w, c, acc);
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
__device__ __forceinline__ void epilogue(const gg_params &p, const shared<C> &s, const gg_maps &m,
                                         const tile &t, int group, float (&acc)[C::kAcc]) {
    int warp = group * 4 + ((threadIdx.x >> 5) & 3);
    uint32_t base = s.staging(warp);
    place w = place_of<C>(p, t, warp);
    if (w.rows <= 0) {
        return;
    }
    if constexpr (C::kGated) {
        send_swiglu<C>(p, base, m, w, acc);
    } else if constexpr (C::kKind == EPO_GG_DGRAD && C::kFuse == EPO_GG_SWIGLU) {
        put_back<C>(p, base, t, w, warp, acc);
    } else if (C::kWgrad && p.c_type == EPO_F32) {
        if (p.accumulate) {
            send32<C, true, 0>(base, &m.c, w, acc);
        } else {
            send32<C, false, 0>(base, &m.c, w, acc);
        }
    } else if (C::kWgrad && p.accumulate) {
        put_added<C>(p, base, w, acc);
    } else {
        send_plain<C>(p, base, m, w, acc);
    }
}

} /* namespace gg */
#endif
