/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_reference.cuh - the plain reference of the grouped GEMM tests: one thread per
 * output element, fp64, from the same inputs; the comparison with it; random
 * numbers; and CHECK, for CUDA's own calls.
 */
#ifndef EPO_TESTS_GPU_GEMM_GG_REFERENCE_CUH
#define EPO_TESTS_GPU_GEMM_GG_REFERENCE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/cuda/gemm/grouped_gemm.h"

extern "C" const char *epo_fail_text(void); /* core/status.h */

#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t check_err = (call);                                                            \
        if (check_err != cudaSuccess) {                                                            \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call,                          \
                    cudaGetErrorString(check_err));                                                \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* The host's random numbers. */
struct dice {
    uint64_t state;
    uint32_t next() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return (uint32_t)(state >> 32);
    }
    int upto(int n) { return n <= 0 ? 0 : (int)(next() % (uint32_t)(n + 1)); }
    bool chance(int percent) { return (int)(next() % 100) < percent; }
    /* 1..n, small ones as likely as large ones. */
    int spread(int n) {
        int v = (int)exp((next() % 100000) / 100000.0 * log(n + 0.999));
        return v < 1 ? 1 : v;
    }
};

namespace ref {

struct verdict {
    double err2, ref2;
    float worst; /* error over its tolerance */
    unsigned bad;
    unsigned long long bad_at;
    double bad_found, bad_wanted;
};

__device__ __forceinline__ uint32_t mix(uint32_t x) {
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
    return x;
}
/* Uniform in -1..1, the same for every type. */
__device__ __forceinline__ float draw(uint32_t seed, uint64_t i) {
    return (float)(int)mix(seed ^ mix((uint32_t)i)) * (1.0f / 2147483648.0f);
}
__device__ __forceinline__ void put(void *p, int type, uint64_t i, float v) {
    if (type == EPO_F32) {
        ((float *)p)[i] = v;
    } else if (type == EPO_BF16) {
        ((__nv_bfloat16 *)p)[i] = __float2bfloat16_rn(v);
    } else {
        ((__half *)p)[i] = __float2half_rn(v);
    }
}
__device__ __forceinline__ double get(const void *p, int type, uint64_t i) {
    if (type == EPO_F32) {
        return ((const float *)p)[i];
    }
    return type == EPO_BF16 ? (double)__bfloat162float(((const __nv_bfloat16 *)p)[i])
                            : (double)__half2float(((const __half *)p)[i]);
}

/* Blocks of `width` elements: random where owner[block] >= 0 (or no owner), else
 * NaN. */
__global__ void fill(void *p, int type, uint64_t blocks, uint64_t width, const int *owner,
                     uint32_t seed) {
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < blocks * width;
         i += step) {
        bool real = owner == nullptr || owner[i / width] >= 0;
        put(p, type, i, real ? draw(seed, i) : __int_as_float(0x7fc00000));
    }
}

struct shape {
    int kind, type, n, k, experts;
    uint64_t rows;
    const int *owner;             /* [rows] */
    const int64_t *first, *count; /* [experts], of this call; count 0 outside it */
    const void *a, *b;
    const int32_t *a_index, *b_index;
};

__device__ __forceinline__ int64_t source(const int32_t *index, int64_t row) {
    return index == nullptr ? row : index[row];
}
__device__ __forceinline__ double take(const void *p, int type, int64_t row, int64_t ld,
                                       int64_t col) {
    return row < 0 ? 0.0 : get(p, type, row * ld + col);
}

/* dot[i], size[i] = sum of products, sum of their absolute values; i over the
 * output [rows][N] or [experts][n][k]. */
__global__ void dots(shape s, double *dot, double *size) {
    bool wgrad = s.kind == EPO_GG_WGRAD;
    int64_t width = s.kind == EPO_GG_FORWARD ? s.n : s.k;
    int64_t total = wgrad ? (int64_t)s.experts * s.n * s.k : (int64_t)s.rows * width;
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < total; i += step) {
        int64_t row = i / width, col = i % width, e = wgrad ? row / s.n : s.owner[row];
        double sum = 0.0, abs = 0.0;
        int64_t length = wgrad ? s.count[e] : (s.kind == EPO_GG_FORWARD ? s.k : s.n);
        if (e < 0) {
            continue;
        }
        for (int64_t j = 0; j < length; j++) {
            double x, y;
            if (wgrad) {
                int64_t r = s.first[e] + j;
                x = take(s.a, s.type, source(s.a_index, r), s.n, row % s.n);
                y = take(s.b, s.type, source(s.b_index, r), s.k, col);
            } else {
                x = take(s.a, s.type, source(s.a_index, row), length, j);
                int64_t w = e * s.n * s.k;
                y = get(s.b, s.type,
                        w + (s.kind == EPO_GG_FORWARD ? col * s.k + j : j * s.k + col));
            }
            sum += x * y;
            abs += fabs(x * y);
        }
        dot[i] = sum;
        size[i] = abs;
    }
}

/* Half a unit in the last place, relative; and the smallest step. */
__device__ __forceinline__ double half_ulp(int type) {
    return type == EPO_F32 ? 6e-8 : (type == EPO_BF16 ? 0.003907 : 0.0004884);
}
__device__ __forceinline__ double tiny(int type) { return type == EPO_F16 ? 6e-8 : 1e-30; }

/* One thread's findings; flush() adds them up, all lanes of the warp together. */
struct findings {
    double err2 = 0.0, ref2 = 0.0;
    float worst = 0.0f;
    __device__ void judge(verdict *v, uint64_t i, double found, double wanted, double allowed) {
        double err = fabs(found - wanted);
        ref2 += wanted * wanted;
        if (!(err <= allowed)) {
            bad(v, i, found, wanted);
            return;
        }
        err2 += err * err;
        worst = fmaxf(worst, (float)(err / allowed));
    }
    static __device__ void bad(verdict *v, uint64_t i, double found, double wanted) {
        if (atomicAdd(&v->bad, 1u) == 0) {
            v->bad_at = i;
            v->bad_found = found;
            v->bad_wanted = wanted;
        }
    }
    __device__ void flush(verdict *v) {
        for (int d = 16; d > 0; d /= 2) {
            err2 += __shfl_xor_sync(0xffffffffu, err2, d);
            ref2 += __shfl_xor_sync(0xffffffffu, ref2, d);
            worst = fmaxf(worst, __shfl_xor_sync(0xffffffffu, worst, d));
        }
        if ((threadIdx.x & 31) == 0 && ref2 > 0.0) {
            atomicAdd(&v->err2, err2);
            atomicAdd(&v->ref2, ref2);
            atomicMax((int *)&v->worst, __float_as_int(worst));
        }
    }
};

/* c against dot (+ old). */
__global__ void check_plain(shape s, const void *c, int c_type, const void *old, const double *dot,
                            const double *size, const int *touched, verdict *v) {
    bool wgrad = s.kind == EPO_GG_WGRAD;
    int64_t width = s.kind == EPO_GG_FORWARD ? s.n : s.k;
    int64_t total = wgrad ? (int64_t)s.experts * s.n * s.k : (int64_t)s.rows * width;
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    findings seen;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < total; i += step) {
        bool ours = wgrad ? touched[i / width / s.n] != 0 : s.owner[i / width] >= 0;
        double was = old != nullptr ? get(old, c_type, i) : 0.0;
        double found = get(c, c_type, i);
        if (ours) {
            double wanted = dot[i] + was;
            seen.judge(v, i, found, wanted,
                       half_ulp(c_type) * 1.01 * fabs(wanted) + 2e-5 * size[i] + tiny(c_type));
        } else if (old != nullptr ? found != was : found == found) {
            seen.bad(v, i, found, nan("")); /* written where nothing may be */
        }
    }
    seen.flush(v);
}

/* act (and h, if it was stored) of FORWARD with SwiGLU; dot is [rows][2F]. */
__global__ void check_swiglu(shape s, const void *act, const void *h, const float *weight,
                             const double *dot, const double *size, verdict *v) {
    int64_t f = s.n / 2, step = (int64_t)gridDim.x * blockDim.x;
    findings seen;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < (int64_t)s.rows * f;
         i += step) {
        int64_t row = i / f, col = i % f, at = row * s.n + col;
        double found = get(act, s.type, i);
        if (s.owner[row] < 0) {
            if (found == found) {
                seen.bad(v, i, found, nan(""));
            }
            continue;
        }
        double g = h != nullptr ? get(h, s.type, at) : dot[at];
        double u = h != nullptr ? get(h, s.type, at + f) : dot[at + f];
        double w = weight != nullptr ? (double)weight[row] : 1.0;
        double silu = g / (1.0 + exp(-g)), wanted = w * silu * u;
        double allowed = 1.01 * half_ulp(s.type) * fabs(wanted) + 4e-6 * fabs(w * g * u);
        if (h == nullptr) { /* gate and up were rounded on the way */
            double dg = half_ulp(s.type) * fabs(g) + 2e-5 * size[at] + tiny(s.type);
            double du = half_ulp(s.type) * fabs(u) + 2e-5 * size[at + f] + tiny(s.type);
            allowed += 1.2 * fabs(w) * (1.1 * dg * fabs(u) + fabs(silu) * du + 1.1 * dg * du);
        }
        seen.judge(v, i, found, wanted, allowed + tiny(s.type));
    }
    seen.flush(v);
}

/* dh [rows][2F], act [rows][F] of DGRAD with SwiGLU; dot is da [rows][F].  Also
 * the sums of row_dweight, one block per row. */
__global__ void check_back(shape s, const void *dh, const void *act, const void *h,
                           const float *weight, const float *dweight, const double *dot,
                           const double *size, verdict *v) {
    __shared__ double sums[2];
    int64_t f = s.k, row = blockIdx.x;
    bool ours = s.owner[row] >= 0;
    findings seen;
    if (threadIdx.x < 2) {
        sums[threadIdx.x] = 0.0;
    }
    __syncthreads();
    for (int64_t c = threadIdx.x; c < f; c += blockDim.x) {
        int64_t i = row * f + c, at = row * 2 * f + c;
        double fg = get(dh, s.type, at), fu = get(dh, s.type, at + f);
        double fa = act != nullptr ? get(act, s.type, i) : nan("");
        if (!ours) {
            if (fg == fg || fu == fu || fa == fa) {
                seen.bad(v, i, fg, nan(""));
            }
            continue;
        }
        double g = get(h, s.type, at), u = get(h, s.type, at + f), da = dot[i];
        double w = weight != nullptr ? (double)weight[row] : 1.0;
        double sig = 1.0 / (1.0 + exp(-g)), silu = g * sig, slope = sig * (1.0 + g * (1.0 - sig));
        double slack = 2e-5 * size[i] + 4e-6 * fabs(da), ulp = 1.01 * half_ulp(s.type);
        double wg = w * da * u * slope, wu = w * da * silu, wa = w * silu * u;
        seen.judge(v, at, fg, wg, ulp * fabs(wg) + 1.2 * slack * fabs(w * u) + tiny(s.type));
        seen.judge(v, at + f, fu, wu,
                   ulp * fabs(wu) + 1.2 * slack * fabs(w) * fabs(g) + tiny(s.type));
        if (act != nullptr) {
            seen.judge(v, i, fa, wa, ulp * fabs(wa) + 4e-6 * fabs(w * g * u) + tiny(s.type));
        }
        atomicAdd(&sums[0], da * silu * u);
        atomicAdd(&sums[1], (slack + 4e-6 * fabs(da)) * fabs(g * u));
    }
    __syncthreads();
    if (threadIdx.x == 0 && dweight != nullptr) {
        if (ours) {
            seen.judge(v, row, dweight[row], sums[0], sums[1] + 1e-6 * fabs(sums[0]) + 1e-30);
        } else if (dweight[row] == dweight[row]) {
            seen.bad(v, row, dweight[row], nan(""));
        }
    }
    seen.flush(v);
}

/* Counts 32-bit words that differ. */
__global__ void differ(const uint32_t *x, const uint32_t *y, uint64_t words, unsigned *count) {
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < words; i += step) {
        if (x[i] != y[i]) {
            atomicAdd(count, 1u);
        }
    }
}

} /* namespace ref */
#endif
