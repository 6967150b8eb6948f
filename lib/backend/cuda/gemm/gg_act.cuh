/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_act.cuh - SwiGLU apart from a product: one element, and the sum of a row.  Three
 * kernels have it, a pass over all rows each way and the chain's stage; their bits must be
 * the same, so every rounding is written down and none is left to the compiler.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_ACT_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_ACT_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace gg {

constexpr int kActThreads = 128; /* of a row; which the order of its sum depends on */

/* 16-bit results are rounded more than the fast forms err. */
template <class T> __device__ __forceinline__ float act_sigmoid(float x) {
    return __fdividef(1.0f, __fadd_rn(1.0f, __expf(-x)));
}
template <> __device__ __forceinline__ float act_sigmoid<float>(float x) {
    return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x)));
}

/* weight * silu(gate) * up. */
template <class T> __device__ __forceinline__ float act(float weight, float gate, float up) {
    return __fmul_rn(__fmul_rn(weight, __fmul_rn(gate, act_sigmoid<T>(gate))), up);
}

/* From da: gate and up become their gradients, da becomes the activation again; zeros
 * where the weight is 0, whatever they held.  Returns da's share of the weight's
 * gradient. */
template <class T>
__device__ __forceinline__ float act_back(float weight, float &gate, float &up, float &da) {
    const bool live = weight != 0.0f;
    const float s = act_sigmoid<T>(gate);
    const float silu = __fmul_rn(gate, s);
    const float slope = __fmul_rn(s, __fmaf_rn(gate, __fsub_rn(1.0f, s), 1.0f));
    const float share = __fmul_rn(__fmul_rn(da, silu), up);
    const float dw = __fmul_rn(da, weight);
    const float again = __fmul_rn(__fmul_rn(weight, silu), up);
    gate = live ? __fmul_rn(__fmul_rn(dw, up), slope) : 0.0f;
    up = live ? __fmul_rn(dw, silu) : 0.0f;
    da = live ? again : 0.0f;
    return share;
}

/* The warp's part of a row's sum; the row's is that of its four warps, added in order. */
__device__ __forceinline__ float act_warp_sum(float v) {
    for (int d = 16; d > 0; d /= 2) {
        v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, d));
    }
    return v;
}
__device__ __forceinline__ float act_row_sum(const float *part) {
    float sum = part[0];
    for (int i = 1; i < kActThreads / 32; i++) {
        sum = __fadd_rn(sum, part[i]);
    }
    return sum;
}

} /* namespace gg */
#endif
