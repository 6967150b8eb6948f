/* SPDX-License-Identifier: Apache-2.0
 *
 * size.h - sizes in 64 bits, checked.  Each function stores its result and
 * returns true, or returns false and stores nothing.
 */
#ifndef EPO_CORE_SIZE_H
#define EPO_CORE_SIZE_H

#include <stdbool.h>
#include <stdint.h>

static inline bool epo_size_add(uint64_t a, uint64_t b, uint64_t *out) {
    uint64_t sum;
    if (__builtin_add_overflow(a, b, &sum))
        return false;
    *out = sum;
    return true;
}

static inline bool epo_size_mul(uint64_t a, uint64_t b, uint64_t *out) {
    uint64_t product;
    if (__builtin_mul_overflow(a, b, &product))
        return false;
    *out = product;
    return true;
}

/* The next multiple of `step` (not 0) that is not below `a`. */
static inline bool epo_size_align(uint64_t a, uint64_t step, uint64_t *out) {
    uint64_t up;
    if (!epo_size_add(a, step - 1, &up))
        return false;
    *out = up - up % step;
    return true;
}

#endif
