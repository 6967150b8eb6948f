/* SPDX-License-Identifier: Apache-2.0
 *
 * rng.h - random numbers by counter: number i of a stream is a function of (seed,
 * stream, i) alone, so every rank can compute any rank's numbers and nothing
 * depends on the order of calls.
 */
#ifndef EPO_MEASURE_RNG_H
#define EPO_MEASURE_RNG_H

#include <stdint.h>

/* The finaliser of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
 * number generators", 2014). */
static inline uint64_t rng_mix(uint64_t x) {
    x ^= x >> 30;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 27;
    x *= UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static inline uint64_t rng_at(uint64_t seed, uint64_t stream, uint64_t index) {
    uint64_t key = rng_mix(seed + UINT64_C(0x9e3779b97f4a7c15) * (stream + 1));
    return rng_mix(key + UINT64_C(0x9e3779b97f4a7c15) * (index + 1));
}

/* Uniform in [-1, 1), 53 bits. */
static inline double rng_symmetric(uint64_t seed, uint64_t stream, uint64_t index) {
    return (double)(rng_at(seed, stream, index) >> 11) * 0x1p-52 - 1.0;
}

#endif
