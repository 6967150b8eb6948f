/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_portable.cu - the grouped GEMM for every architecture from sm_80, every
 * shape and alignment, and fp32: 64 x 64 tiles, mma.sync for the 16-bit types.
 * Same tiles table, same rules as the sm_90 kernels; made to be right, not fast.
 */
#include "gg_kernels.h"
#include "gg_portable.cuh"

namespace gg {

/* One block of K of both operands, from memory to registers to shared memory. */
template <class C> struct operands {
    lines<C, C::kTransA> a;
    lines<C, C::kTransB> b;
    __device__ void load(const gg_params &p, const tile &t, int block) {
        int row = C::kWgrad ? t.row : 0;
        if (C::kWgrad) {
            a.load(p.a, p.lda, p.a_index, p.a_rows, t.row + block * kSmallK,
                   t.rows - block * kSmallK, t.m * kSmall, p.m);
            b.load(p.b, p.ldb, p.b_index, p.b_rows, row + block * kSmallK, t.rows - block * kSmallK,
                   t.n * kSmall, p.n);
            return;
        }
        a.load(p.a, p.lda, p.a_index, p.a_rows, t.row, t.rows, block * kSmallK, p.k);
        const typename C::T *w =
            (const typename C::T *)p.b + (int64_t)t.expert * (C::kTransB ? p.k : p.n) * p.ldb;
        if (C::kTransB) {
            b.load(w, p.ldb, nullptr, 0x7fffffff, block * kSmallK, p.k - block * kSmallK,
                   t.n * kSmall, p.n);
        } else {
            b.load_weights(w, p.ldb, C::kGated ? p.n / 2 : p.n, C::kGated, t.n * p.tile_n,
                           block * kSmallK, p.k);
        }
    }
};

template <class C>
__device__ void multiply(const gg_params &p, const tile &t, small_shared<C> &s,
                         product<typename C::T, C::kTransA, C::kTransB> &sum) {
    int length = C::kWgrad ? t.rows : p.k;
    int blocks = (length + kSmallK - 1) / kSmallK;
    operands<C> next;
    if (blocks > 0) {
        next.load(p, t, 0);
    }
    for (int i = 0; i < blocks; i++) {
        __syncthreads();
        next.a.store(s.a);
        next.b.store(s.b);
        __syncthreads();
        if (i + 1 < blocks) {
            next.load(p, t, i + 1);
        }
        sum.add(s.a, s.b);
    }
    __syncthreads();
    sum.store(s.out);
    __syncthreads();
}

/* Warps store row by row, lanes take columns: every row's sums have one order. */
template <class C>
__device__ void store_row(const gg_params &p, const tile &t, const float *out, int r) {
    using T = typename C::T;
    int lane = threadIdx.x & 31;
    int64_t row = C::kWgrad ? (int64_t)t.expert * p.m + t.m * kSmall + r : t.row + r;
    for (int x = lane; x < kSmall; x += 32) {
        int64_t col = (int64_t)t.n * kSmall + x;
        if (col >= p.n) {
            continue;
        }
        if (C::kWgrad && p.c_type == EPO_F32) {
            float *c = (float *)p.c + row * p.n + col;
            *c = p.accumulate ? *c + out[x] : out[x];
        } else {
            T *c = (T *)p.c + row * p.n + col;
            *c = from_float<T>(p.accumulate ? to_float(*c) + out[x] : out[x]);
        }
    }
}

template <class C>
__device__ void store_row_swiglu(const gg_params &p, const tile &t, const float *out, int r) {
    using T = typename C::T;
    int lane = threadIdx.x & 31;
    int64_t row = t.row + r, f = p.n / 2, col = (int64_t)t.n * p.tile_n + lane;
    if (col >= f) {
        return;
    }
    float weight = p.row_weight != nullptr ? p.row_weight[row] : 1.0f;
    float gate = out[lane], up = out[lane + 32];
    if (p.h != nullptr) {
        ((T *)p.h)[row * p.n + col] = from_float<T>(gate);
        ((T *)p.h)[row * p.n + f + col] = from_float<T>(up);
    }
    ((T *)p.c)[row * f + col] = from_float<T>(swiglu<T>(gate, up, weight));
}

template <class C>
__device__ void store_row_back(const gg_params &p, const tile &t, const float *out, int r) {
    using T = typename C::T;
    int lane = threadIdx.x & 31;
    int64_t row = t.row + r;
    float weight = p.row_weight != nullptr ? p.row_weight[row] : 1.0f;
    float sum = 0.0f;
    for (int x = lane; x < kSmall; x += 32) {
        int64_t col = (int64_t)t.n * kSmall + x;
        if (col < p.n) {
            const T *h = (const T *)p.h + row * 2 * p.n;
            float gate = to_float(h[col]), up = to_float(h[p.n + col]), act;
            sum += swiglu_back(out[x], weight, gate, up, act);
            T *dh = (T *)p.c + row * 2 * p.n;
            dh[col] = from_float<T>(gate);
            dh[p.n + col] = from_float<T>(up);
            if (p.act != nullptr) {
                ((T *)p.act)[row * p.n + col] = from_float<T>(act);
            }
        }
    }
    for (int d = 1; d < 32; d *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, d);
    }
    if (lane == 0 && p.row_dweight != nullptr) {
        __stcg(&p.partial[(int64_t)t.n * p.rows + row], sum);
    }
}

/* The block that comes last of all column tiles adds their sums in column order. */
__device__ void sum_rows(const gg_params &p, const tile &t, uint32_t *before) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *before = atomicAdd(&p.arrived[t.row_tile], 1u);
    }
    __syncthreads();
    if (*before != (uint32_t)p.tiles_n - 1) {
        return;
    }
    __threadfence();
    for (int r = threadIdx.x; r < t.rows; r += blockDim.x) {
        float all = 0.0f;
        for (int n = 0; n < p.tiles_n; n++) {
            all += __ldcg(&p.partial[(int64_t)n * p.rows + t.row + r]);
        }
        p.row_dweight[t.row + r] = all;
    }
}

template <class C>
__device__ void store_tile(const gg_params &p, const tile &t, small_shared<C> &s) {
    int height = C::kWgrad ? min(kSmall, p.m - t.m * kSmall) : t.rows;
    for (int r = threadIdx.x / 32; r < height; r += kSmallThreads / 32) {
        if (C::kGated) {
            store_row_swiglu<C>(p, t, s.out[r], r);
        } else if (C::kBack) {
            store_row_back<C>(p, t, s.out[r], r);
        } else {
            store_row<C>(p, t, s.out[r], r);
        }
    }
    if (C::kBack && p.row_dweight != nullptr) {
        sum_rows(p, t, &s.before);
    }
}

template <class C>
__global__ void __launch_bounds__(kSmallThreads)
    portable_kernel(const __grid_constant__ gg_params p) {
    __shared__ small_shared<C> s;
    int hint = 0;
    uint64_t spin = 0;
    grid_wait();
    if (threadIdx.x == 0) {
        atomicAdd(&p.ws[GG_WS_ACTIVE], 1);
    }
    while (true) {
        if (threadIdx.x < 32) {
            tile t;
            bool more = tile_next(p, t, hint, spin);
            if (threadIdx.x == 0) {
                t.expert = more ? t.expert : -1;
                s.at = t;
            }
        }
        __syncthreads();
        tile t = s.at;
        if (t.expert < 0) {
            break;
        }
        product<typename C::T, C::kTransA, C::kTransB> sum;
        multiply(p, t, s, sum);
        store_tile(p, t, s);
        __syncthreads();
    }
    if (threadIdx.x == 0 && spin != 0 && p.spin_ns != nullptr) {
        atomicAdd(p.spin_ns, (unsigned long long)spin);
    }
}

template <int kKind, int kFuse> gg_kernel portable_entry(int type) {
    const void *fn = (const void *)portable_kernel<small_config<kKind, kFuse, float>>;
    if (type == EPO_BF16) {
        fn = (const void *)portable_kernel<small_config<kKind, kFuse, __nv_bfloat16>>;
    } else if (type == EPO_F16) {
        fn = (const void *)portable_kernel<small_config<kKind, kFuse, __half>>;
    }
    gg_kernel k = {fn, kSmallThreads, 0};
    return k;
}

} /* namespace gg */

extern "C" gg_kernel gg_portable_kernel(int kind, int fuse, int type) {
    if (kind == EPO_GG_WGRAD) {
        return gg::portable_entry<EPO_GG_WGRAD, EPO_GG_PLAIN>(type);
    }
    if (kind == EPO_GG_DGRAD) {
        return fuse == EPO_GG_PLAIN ? gg::portable_entry<EPO_GG_DGRAD, EPO_GG_PLAIN>(type)
                                    : gg::portable_entry<EPO_GG_DGRAD, EPO_GG_SWIGLU>(type);
    }
    return fuse == EPO_GG_PLAIN ? gg::portable_entry<EPO_GG_FORWARD, EPO_GG_PLAIN>(type)
                                : gg::portable_entry<EPO_GG_FORWARD, EPO_GG_SWIGLU>(type);
}
