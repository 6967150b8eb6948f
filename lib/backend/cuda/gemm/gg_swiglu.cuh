/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_swiglu.cuh - SwiGLU forward and backward for one element, and conversions
 * between fp32 and the 16-bit types.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_SWIGLU_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_SWIGLU_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace gg {

template <class T> __device__ __forceinline__ float round_to(float x);
template <> __device__ __forceinline__ float round_to<__nv_bfloat16>(float x) {
    return __bfloat162float(__float2bfloat16_rn(x));
}
template <> __device__ __forceinline__ float round_to<__half>(float x) {
    return __half2float(__float2half_rn(x));
}
template <> __device__ __forceinline__ float round_to<float>(float x) { return x; }

template <class T> __device__ __forceinline__ uint32_t pack(float lo, float hi);
template <> __device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float lo, float hi) {
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return *(uint32_t *)&v;
}
template <> __device__ __forceinline__ uint32_t pack<__half>(float lo, float hi) {
    __half2 v = __floats2half2_rn(lo, hi);
    return *(uint32_t *)&v;
}
template <class T> __device__ __forceinline__ float2 unpack(uint32_t v);
template <> __device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t v) {
    return __bfloat1622float2(*(__nv_bfloat162 *)&v);
}
template <> __device__ __forceinline__ float2 unpack<__half>(uint32_t v) {
    return __half22float2(*(__half2 *)&v);
}
template <class T> __device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
    return make_uint4(pack<T>(v[0], v[1]), pack<T>(v[2], v[3]), pack<T>(v[4], v[5]),
                      pack<T>(v[6], v[7]));
}
template <class T> __device__ __forceinline__ void unpack8(uint4 x, float (&v)[8]) {
    float2 a = unpack<T>(x.x), b = unpack<T>(x.y), c = unpack<T>(x.z), d = unpack<T>(x.w);
    v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
    v[4] = c.x, v[5] = c.y, v[6] = d.x, v[7] = d.y;
}

/* 1 / (1 + e^-x); 0 and 1 at the ends, NaN stays. */
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

/* weight * silu(gate) * up of the rounded gate and up. */
template <class T> __device__ __forceinline__ float swiglu(float gate, float up, float weight) {
    gate = round_to<T>(gate);
    up = round_to<T>(up);
    return weight * (gate * sigmoid(gate)) * up;
}

/* gate and up become their gradients, act the activation; returns da's share of
 * the weight's gradient. */
__device__ __forceinline__ float swiglu_back(float da, float weight, float &gate, float &up,
                                             float &act) {
    float sig = sigmoid(gate);
    float silu = gate * sig;
    float slope = sig * (1.0f + gate * (1.0f - sig));
    float share = da * silu * up;
    act = weight * silu * up;
    gate = weight * da * up * slope;
    up = weight * da * silu;
    return share;
}

} /* namespace gg */
#endif
