/* SPDX-License-Identifier: Apache-2.0
 *
 * narrow.h - fp32 to the types of token rows, and bf16 back.
 */
#ifndef EPO_MEASURE_NARROW_H
#define EPO_MEASURE_NARROW_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "ep_overlap.h"

/* Round to nearest, ties to even; NaN stays NaN. */
static inline uint16_t narrow_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

/* For numbers of this program's own making: what lies below fp16's normal range
 * becomes 0, nothing may lie above it. */
static inline uint16_t narrow_f16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size < 0x38800000u)
        return (uint16_t)sign;
    return (uint16_t)(sign | (((size + 0xfffu + (size >> 13 & 1)) >> 13) - 0x1c000u));
}

static inline void narrow(void *to, const float *from, size_t count, epo_dtype type) {
    uint16_t *out = to;
    if (type == EPO_F32)
        memcpy(to, from, count * sizeof *from);
    for (size_t i = 0; type != EPO_F32 && i < count; i++)
        out[i] = type == EPO_BF16 ? narrow_bf16(from[i]) : narrow_f16(from[i]);
}

static inline void widen_bf16(float *to, const void *from, size_t count) {
    const uint16_t *in = from;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)in[i] << 16;
        memcpy(&to[i], &bits, sizeof bits);
    }
}

#endif
