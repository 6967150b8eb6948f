/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_wgmma.cuh - wgmma.mma_async m64nNk16 with fp32 accumulators, both operands in
 * shared memory.  The instruction names each accumulator: 64, 96 or 128 of them.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_WGMMA_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_WGMMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace gg {

/* d[64][N] += A[64][16] B[16][N], or = unless `more`; kTransA/B: 0 the operand is K-major, 1
 * M/N-major. */
template <class T, int kN, int kTransA, int kTransB> struct wgmma;

/* Ten operands from %t0 on, and the accumulators that they are; t is empty for 0. */
#define GG_OP4(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3"
#define GG_OP6(t) GG_OP4(t) ", %" #t "4, %" #t "5"
#define GG_OP8(t) GG_OP6(t) ", %" #t "6, %" #t "7"
#define GG_OP10(t) GG_OP8(t) ", %" #t "8, %" #t "9, "
#define GG_ACC4(t) "+f"(d[t##0]), "+f"(d[t##1]), "+f"(d[t##2]), "+f"(d[t##3])
#define GG_ACC6(t) GG_ACC4(t), "+f"(d[t##4]), "+f"(d[t##5])
#define GG_ACC8(t) GG_ACC6(t), "+f"(d[t##6]), "+f"(d[t##7])
#define GG_ACC10(t) GG_ACC8(t), "+f"(d[t##8]), "+f"(d[t##9])
#define GG_OP60 GG_OP10() GG_OP10(1) GG_OP10(2) GG_OP10(3) GG_OP10(4) GG_OP10(5)
#define GG_OP90 GG_OP60 GG_OP10(6) GG_OP10(7) GG_OP10(8)
#define GG_OP120 GG_OP90 GG_OP10(9) GG_OP10(10) GG_OP10(11)
#define GG_ACC60 GG_ACC10(), GG_ACC10(1), GG_ACC10(2), GG_ACC10(3), GG_ACC10(4), GG_ACC10(5)
#define GG_ACC90 GG_ACC60, GG_ACC10(6), GG_ACC10(7), GG_ACC10(8)
#define GG_ACC120 GG_ACC90, GG_ACC10(9), GG_ACC10(10), GG_ACC10(11)

/* ops, acc: the accumulators; a, b, ta, tb: the operands behind them. */
#define GG_WGMMA(ctype, ptx, n, ops, acc, a_, b_, ta, tb, more_)                                   \
    template <int kTransA, int kTransB> struct wgmma<ctype, n, kTransA, kTransB> {                 \
        static __device__ __forceinline__ void mma(float (&d)[n / 2], uint64_t a, uint64_t b,      \
                                                   bool more) {                                    \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #more_ ", 0;\n"                      \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." ptx "." ptx " {" ops    \
                         "}, %" #a_ ", %" #b_ ", p, 1, 1, %" #ta ", %" #tb ";\n}"                  \
                         : acc                                                                     \
                         : "l"(a), "l"(b), "n"(kTransA), "n"(kTransB), "r"((int)more));            \
        }                                                                                          \
    };
#define GG_WGMMA_WIDTHS(ctype, ptx)                                                                \
    GG_WGMMA(ctype, ptx, 128, GG_OP60 GG_OP4(6), GG_ACC60 GG_COMMA GG_ACC4(6), 64, 65, 66, 67, 68) \
    GG_WGMMA(ctype, ptx, 192, GG_OP90 GG_OP6(9), GG_ACC90 GG_COMMA GG_ACC6(9), 96, 97, 98, 99,     \
             100)                                                                                  \
    GG_WGMMA(ctype, ptx, 256, GG_OP120 GG_OP8(12), GG_ACC120 GG_COMMA GG_ACC8(12), 128, 129, 130,  \
             131, 132)
#define GG_COMMA ,

GG_WGMMA_WIDTHS(__nv_bfloat16, "bf16")
GG_WGMMA_WIDTHS(__half, "f16")

} /* namespace gg */
#endif
