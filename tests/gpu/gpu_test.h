/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_test.h - what the GPU test programs share: results as lines that run.sh
 * gathers, element types, random numbers, device memory.
 *
 * A line "case<TAB>NAME<TAB>ok|FAIL|skip<TAB>text" is one result; run.sh counts them.
 */
#ifndef EPO_TESTS_GPU_TEST_H
#define EPO_TESTS_GPU_TEST_H

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_overlap.h"

static int test_failed; /* of this program */

#define TEST_CUDA(call)                                                                            \
    do {                                                                                           \
        cudaError_t e_ = (call);                                                                   \
        if (e_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
            exit(3);                                                                               \
        }                                                                                          \
    } while (0)

static inline void test_result(const char *name, bool ok, const char *text) {
    printf("case\t%s\t%s\t%s\n", name, ok ? "ok" : "FAIL", text);
    fflush(stdout);
    if (!ok)
        test_failed = 1;
}

static inline void test_skip(const char *name, const char *why) {
    printf("case\t%s\tskip\t%s\n", name, why);
}

/* splitmix64: the same numbers everywhere from a seed and a position. */
static inline uint64_t test_random(uint64_t seed, uint64_t i) {
    uint64_t z = seed * UINT64_C(0x9E3779B97F4A7C15) + (i + 1) * UINT64_C(0xD1B54A32D192ED03);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}
/* In (-1, 1). */
static inline float test_uniform(uint64_t seed, uint64_t i) {
    return (float)((double)(test_random(seed, i) >> 11) / 4503599627370496.0 - 1.0);
}

static inline size_t test_size(epo_dtype type) { return type == EPO_F32 ? 4 : 2; }
static inline const char *test_type(epo_dtype type) {
    return type == EPO_F32 ? "fp32" : type == EPO_BF16 ? "bf16" : "fp16";
}

static inline void test_store(void *array, uint64_t i, epo_dtype type, float v) {
    if (type == EPO_F32) {
        ((float *)array)[i] = v;
    } else if (type == EPO_F16) {
        ((_Float16 *)array)[i] = (_Float16)v;
    } else {
        uint32_t u;
        memcpy(&u, &v, sizeof u);
        u += 0x7fff + ((u >> 16) & 1);
        ((uint16_t *)array)[i] = (uint16_t)(u >> 16);
    }
}
static inline double test_load(const void *array, uint64_t i, epo_dtype type) {
    if (type == EPO_F32)
        return (double)((const float *)array)[i];
    if (type == EPO_F16)
        return (double)((const _Float16 *)array)[i];
    uint32_t u = (uint32_t)((const uint16_t *)array)[i] << 16;
    float v;
    memcpy(&v, &u, sizeof v);
    return (double)v;
}
/* The value as the type holds it. */
static inline double test_round(epo_dtype type, float v) {
    uint64_t cell = 0;
    test_store(&cell, 0, type, v);
    return test_load(&cell, 0, type);
}

/* ||got - want|| over ||want||, or over `square`'s root, what that would be if nothing cancelled:
 * of the few numbers of a small layer (router weights that add up to nearly 0) all may.  NaN where
 * anything is NaN. */
static inline double test_error_of(const void *got, const double *want, uint64_t n, epo_dtype type,
                                   double square) {
    double d = 0, w = 0;
    for (uint64_t i = 0; i < n; i++) {
        const double e = test_load(got, i, type) - want[i];
        d += e * e;
        w += want[i] * want[i];
    }
    w = w > square ? w : square;
    return n == 0 ? 0 : w > 0 ? sqrt(d / w) : sqrt(d);
}
static inline double test_error(const void *got, const double *want, uint64_t n, epo_dtype type) {
    return test_error_of(got, want, n, type, 0);
}
static inline double test_limit(epo_dtype type) { return type == EPO_F32 ? 1e-5 : 1e-2; }

static inline void *test_device(uint64_t bytes, int poison) {
    void *p = NULL;
    TEST_CUDA(cudaMalloc(&p, bytes > 0 ? bytes : 16));
    TEST_CUDA(cudaMemset(p, poison, bytes > 0 ? bytes : 16));
    TEST_CUDA(cudaStreamSynchronize(0)); /* the queues' streams do not wait for it */
    return p;
}
static inline void *test_upload(const void *host, uint64_t bytes) {
    void *p = test_device(bytes, 0);
    TEST_CUDA(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice));
    return p;
}

#endif
