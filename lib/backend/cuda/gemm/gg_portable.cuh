/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_portable.cuh - loads and products of the portable grouped GEMM.  An operand's
 * tile lies in shared memory as it lies in memory, in lines:
 *   K-major   64 lines (M or N) of 32 K values
 *   MN-major  32 lines (K) of 64 M or N values
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_PORTABLE_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_PORTABLE_CUH

#include "gg_ptx.cuh"
#include "gg_swiglu.cuh"
#include "gg_tiles.cuh"

namespace gg {

constexpr int kSmall = 64;
constexpr int kSmallK = 32;
constexpr int kSmallThreads = 128;

template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <int kKind_, int kFuse_, class T_> struct small_config {
    using T = T_;
    static constexpr bool kWgrad = kKind_ == EPO_GG_WGRAD;
    static constexpr bool kGated = kKind_ == EPO_GG_FORWARD && kFuse_ == EPO_GG_SWIGLU;
    static constexpr bool kBack = kKind_ == EPO_GG_DGRAD && kFuse_ == EPO_GG_SWIGLU;
    static constexpr bool kTransA = kWgrad;
    static constexpr bool kTransB = kKind_ != EPO_GG_FORWARD;
};

/* Elements of a line with its padding: 16 bytes more keep banks apart. */
template <class T, bool kTrans>
constexpr int kPitch = (kTrans ? kSmall : kSmallK) + 16 / (int)sizeof(T);
template <class T, bool kTrans>
constexpr int kTileElements = kPitch<T, kTrans> *(kTrans ? kSmallK : kSmall);

template <class C> struct small_shared {
    alignas(16) typename C::T a[kTileElements<typename C::T, C::kTransA>];
    alignas(16) typename C::T b[kTileElements<typename C::T, C::kTransB>];
    float out[kSmall][kSmall + 4];
    tile at;
    uint32_t before;
};

/* One operand's block of K, in this thread's registers. */
template <class C, bool kTrans> struct lines {
    using T = typename C::T;
    static constexpr int kVec = 16 / (int)sizeof(T);
    static constexpr int kWidth = kTrans ? kSmall : kSmallK;
    static constexpr int kLines = kTrans ? kSmallK : kSmall;
    static constexpr int kParts = kWidth / kVec; /* of a line */
    static constexpr int kMine = kLines * kParts / kSmallThreads;
    uint4 v[kMine];

    /* Elements col.. of a row, zeros behind `end`. */
    static __device__ uint4 part(const T *row, int col, int end) {
        if (col + kVec <= end && ((uintptr_t)(row + col) & 15) == 0) {
            return *(const uint4 *)(row + col);
        }
        alignas(16) T x[kVec];
#pragma unroll
        for (int i = 0; i < kVec; i++) {
            x[i] = col + i < end ? row[col + i] : from_float<T>(0.0f);
        }
        return *(const uint4 *)x;
    }
    /* Lines are memory rows first.. (of which `count` exist), through `index` if
     * there is one; columns col.., zeros behind `end`. */
    __device__ void load(const void *base, int64_t ld, const int32_t *index, int limit, int first,
                         int count, int col, int end) {
#pragma unroll
        for (int i = 0; i < kMine; i++) {
            int at = threadIdx.x + i * kSmallThreads;
            int line = at / kParts;
            int row = -1;
            if (line < count) {
                row = index != nullptr ? index[first + line] : first + line;
            }
            v[i] = row < 0 || row >= limit
                       ? make_uint4(0, 0, 0, 0)
                       : part((const T *)base + row * ld, col + at % kParts * kVec, end);
        }
    }
    /* Lines are weight rows first..; with two halves of `rows` rows (gate, up) the
     * lower 32 lines come from the first half, the others from the second. */
    __device__ void load_weights(const void *base, int64_t ld, int rows, bool halves, int first,
                                 int col, int end) {
#pragma unroll
        for (int i = 0; i < kMine; i++) {
            int at = threadIdx.x + i * kSmallThreads;
            int line = at / kParts;
            int half = halves && line >= 32 ? 1 : 0;
            int row = first + line - 32 * half;
            v[i] = row >= rows ? make_uint4(0, 0, 0, 0)
                               : part((const T *)base + (row + (int64_t)half * rows) * ld,
                                      col + at % kParts * kVec, end);
        }
    }
    __device__ void store(T *to) const {
#pragma unroll
        for (int i = 0; i < kMine; i++) {
            int at = threadIdx.x + i * kSmallThreads;
            *(uint4 *)(to + at / kParts * kPitch<T, kTrans> + at % kParts * kVec) = v[i];
        }
    }
};

/* The 64 x 64 product of a block; 16-bit types: four warps of 32 x 32. */
template <class T, bool kTransA, bool kTransB> struct product {
    float acc[2][4][4] = {};

    static __device__ void load4(uint32_t (&r)[4], const T *at, bool trans) {
        uint32_t addr = smem_addr(at);
        if (trans) {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                         : "r"(addr)
                         : "memory");
        } else {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                         : "r"(addr)
                         : "memory");
        }
    }
    static __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        if (sizeof(T) == 2 && is_bf16((T *)nullptr)) {
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                         "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                         : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
        } else {
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                         "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                         : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
        }
    }
    static __device__ constexpr bool is_bf16(const __nv_bfloat16 *) { return true; }
    static __device__ constexpr bool is_bf16(const __half *) { return false; }

    /* Matrices in the order of the fragment: (m, k), (m+8, k), (m, k+8), (m+8, k+8). */
    static __device__ const T *at_a(const T *a, int m, int k) {
        int lane = threadIdx.x & 31;
        int r = lane & 7, mm = m + ((lane >> 3) & 1) * 8, kk = k + (lane >> 4) * 8;
        return kTransA ? a + (kk + r) * kPitch<T, true> + mm : a + (mm + r) * kPitch<T, false> + kk;
    }
    /* (n, k), (n, k+8), (n+8, k), (n+8, k+8). */
    static __device__ const T *at_b(const T *b, int n, int k) {
        int lane = threadIdx.x & 31;
        int r = lane & 7, kk = k + ((lane >> 3) & 1) * 8, nn = n + (lane >> 4) * 8;
        return kTransB ? b + (kk + r) * kPitch<T, true> + nn : b + (nn + r) * kPitch<T, false> + kk;
    }
    __device__ void add(const T *a, const T *b) {
        int warp = threadIdx.x / 32;
        int m = warp / 2 * 32, n = warp % 2 * 32;
#pragma unroll
        for (int k = 0; k < kSmallK; k += 16) {
            uint32_t fa[2][4], fb[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                load4(fa[i], at_a(a, m + 16 * i, k), kTransA);
                load4(fb[i], at_b(b, n + 16 * i, k), kTransB);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    mma(acc[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }
    __device__ void store(float (*out)[kSmall + 4]) const {
        int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
        int m = warp / 2 * 32 + lane / 4, n = warp % 2 * 32 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float *v = acc[i][j];
                out[m + 16 * i][n + 8 * j] = v[0];
                out[m + 16 * i][n + 8 * j + 1] = v[1];
                out[m + 16 * i + 8][n + 8 * j] = v[2];
                out[m + 16 * i + 8][n + 8 * j + 1] = v[3];
            }
        }
    }
};

/* fp32: a thread has rows y, y+8, .. and columns x, x+16, .. */
template <bool kTransA, bool kTransB> struct product<float, kTransA, kTransB> {
    float acc[8][4] = {};
    __device__ void add(const float *a, const float *b) {
        int y = threadIdx.x / 16, x = threadIdx.x % 16;
        for (int k = 0; k < kSmallK; k++) {
            float va[8], vb[4];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                int m = y + 8 * i;
                va[i] = a[kTransA ? k * kPitch<float, true> + m : m * kPitch<float, false> + k];
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int n = x + 16 * j;
                vb[j] = b[kTransB ? k * kPitch<float, true> + n : n * kPitch<float, false> + k];
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    acc[i][j] = fmaf(va[i], vb[j], acc[i][j]);
                }
            }
        }
    }
    __device__ void store(float (*out)[kSmall + 4]) const {
        int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < 8; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                out[y + 8 * i][x + 16 * j] = acc[i][j];
            }
        }
    }
};

} /* namespace gg */
#endif
