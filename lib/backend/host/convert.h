/* SPDX-License-Identifier: Apache-2.0
 *
 * convert.h - storage types to fp32 and back, rounding to nearest even.  A NaN
 * stays a NaN of the same sign.  Bit operations only, so that compilers vectorise.
 */
#ifndef EPO_BACKEND_HOST_CONVERT_H
#define EPO_BACKEND_HOST_CONVERT_H

#include <stdint.h>
#include <string.h>

#include "ep_overlap.h"

/* A pass is written once, inlined, and compiled twice where that pays: for any CPU
 * of the architecture, and HOST_WIDE for those that have wide vectors
 * (epo_backend.wide).  All ranks are on one machine, so all take the same. */
#define HOST_INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__)
#define HOST_WIDE __attribute__((target("avx2,fma")))
#define HOST_HAS_WIDE (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#else
#define HOST_WIDE
#define HOST_HAS_WIDE 0
#endif

HOST_INLINE uint32_t host_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

HOST_INLINE float host_float(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

HOST_INLINE float host_from_bf16(uint16_t h) { return host_float((uint32_t)h << 16); }

HOST_INLINE uint16_t host_to_bf16(float f) {
    uint32_t u = host_bits(f);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    uint32_t nan = (u >> 16) | 0x40u; /* quiet: the payload's upper part may be 0 */
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

/* e4m3, at most 448 in size. */
HOST_INLINE float host_from_e4m3(uint8_t c) {
    uint32_t exponent = (uint32_t)c >> 3 & 15, mantissa = c & 7u;
    float size = exponent == 0 ? (float)mantissa / 512.0F
                               : host_float((exponent + 120) << 23 | mantissa << 20);
    size = (c & 0x7f) == 0x7f ? host_float(0x7fc00000u) : size;
    return (c & 0x80) != 0 ? -size : size;
}

HOST_INLINE uint8_t host_to_e4m3(float f) {
    uint32_t u = host_bits(f), sign = u >> 24 & 0x80u, rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u)
        return (uint8_t)(sign | 0x7fu);
    if (rest > 0x43e00000u) /* 448 */
        rest = 0x43e00000u;
    /* Below 2^-6 the addition of 2^14 aligns to steps of 2^-9 and rounds. */
    uint32_t small = host_bits(host_float(rest) + 16384.0F) - 0x46800000u;
    uint32_t normal = ((rest + 0x7ffffu + (rest >> 20 & 1u)) >> 20) - (120u << 3);
    return (uint8_t)(sign | (rest < 0x3c800000u ? small : normal));
}

HOST_INLINE float host_from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = (uint32_t)(h & 0x7fffu) << 13;
    uint32_t exponent = rest & 0x0f800000u;
    float small = host_float(rest + 0x38800000u) - host_float(0x38800000u);
    uint32_t normal = rest + 0x38000000u;
    uint32_t special = rest + 0x70000000u;
    uint32_t u = exponent == 0 ? host_bits(small) : exponent == 0x0f800000u ? special : normal;
    return host_float(u | sign);
}

HOST_INLINE uint16_t host_to_f16(float f) {
    uint32_t u = host_bits(f), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
    /* Below 2^-14 the addition of 0.5 aligns and rounds the mantissa. */
    uint32_t small = host_bits(host_float(rest) + 0.5f) - 0x3f000000u;
    uint32_t normal = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    uint32_t nan = 0x7e00u | ((rest >> 13) & 0x3ffu);
    uint32_t h = rest > 0x7f800000u    ? nan
                 : rest >= 0x477ff000u ? 0x7c00u /* rounds past 65504 */
                 : rest < 0x38800000u  ? small
                                       : normal;
    return (uint16_t)(h | sign);
}

HOST_INLINE size_t host_type_size(epo_dtype type) { return type == EPO_F32 ? 4 : 2; }

/* n elements, from element `at` of an array of `type`. */
HOST_INLINE void host_load(float *dst, const void *src, uint64_t at, uint64_t n, epo_dtype type) {
    if (type == EPO_F32) {
        memcpy(dst, (const float *)src + at, n * sizeof(float));
        return;
    }
    const uint16_t *from = (const uint16_t *)src + at;
    if (type == EPO_BF16)
        for (uint64_t i = 0; i < n; i++)
            dst[i] = host_from_bf16(from[i]);
    else
        for (uint64_t i = 0; i < n; i++)
            dst[i] = host_from_f16(from[i]);
}

HOST_INLINE void host_store(void *dst, uint64_t at, const float *src, uint64_t n, epo_dtype type) {
    if (type == EPO_F32) {
        memcpy((float *)dst + at, src, n * sizeof(float));
        return;
    }
    uint16_t *to = (uint16_t *)dst + at;
    if (type == EPO_BF16)
        for (uint64_t i = 0; i < n; i++)
            to[i] = host_to_bf16(src[i]);
    else
        for (uint64_t i = 0; i < n; i++)
            to[i] = host_to_f16(src[i]);
}

HOST_INLINE int host_type_known(epo_dtype type) {
    return type == EPO_F32 || type == EPO_BF16 || type == EPO_F16;
}

#endif
