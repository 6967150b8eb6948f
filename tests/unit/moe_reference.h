/* SPDX-License-Identifier: Apache-2.0
 *
 * moe_reference.h - an MoE layer over all ranks' tokens in plain loops, fp64, one
 * process: what the engine's results are compared with.  And random cases for it.
 */
#ifndef EPO_TESTS_MOE_REFERENCE_H
#define EPO_TESTS_MOE_REFERENCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ep_overlap.h"

#define CASE_RANKS 8
#define CASE_BATCHES 4

/* One rank's share of one micro-batch. */
typedef struct case_batch {
    int tokens;
    int64_t *experts; /* [T][K] */
    float *weights;   /* [T][K]; NULL: 1.0 */
    float *x, *dy;    /* [T][H] */
} case_batch;

typedef enum case_style {
    CASE_UNIFORM,  /* with replacement: experts named twice, some slots -1 */
    CASE_DISTINCT, /* as routers do */
    CASE_ONE,      /* all tokens to one expert */
    CASE_FEW,      /* most experts without tokens */
    CASE_NONE,     /* every slot -1 */
    CASE_STYLES
} case_style;

typedef struct moe_case {
    uint64_t seed;
    int ranks, experts, hidden, ffn, top_k, batches, max_tokens;
    epo_dtype type;
    case_style style;
    float *w1, *w2;   /* [E][2F][H], [E][H][F] */
    float *dw1, *dw2; /* what the gradients hold before */
    case_batch batch[CASE_BATCHES][CASE_RANKS];
} moe_case;

/* A value, and the sum of its terms' magnitudes: where terms cancel, rounding is
 * judged by them. */
typedef struct moe_sum {
    double value, terms;
} moe_sum;

/* Results of all ranks, fp64. */
typedef struct moe_answer {
    moe_sum *y[CASE_BATCHES][CASE_RANKS], *dx[CASE_BATCHES][CASE_RANKS];
    moe_sum *dweights[CASE_BATCHES][CASE_RANKS];
    moe_sum *dw1, *dw2;
} moe_answer;

/* ranks, experts, hidden, ffn, top_k, batches, max_tokens, type and style are set;
 * the rest is made from seed.  Values are representable in `type`. */
void moe_case_fill(moe_case *c);
/* A small random case with up to `ranks` ranks. */
void moe_case_random(moe_case *c, uint64_t seed, int ranks, epo_dtype type);
void moe_case_free(moe_case *c);
void moe_case_print(const moe_case *c);

void moe_reference(const moe_case *c, moe_answer *out);
void moe_answer_free(moe_answer *a);

uint32_t moe_random(uint64_t *state);
/* Rounded to nearest even, as the engine does. */
uint16_t moe_to_bf16(float x);
float moe_from_bf16(uint16_t x);
/* The same for either 16-bit type. */
uint16_t moe_to_half(float x, epo_dtype type);
float moe_from_half(uint16_t x, epo_dtype type);
void *moe_calloc(size_t count, size_t size);

#endif
