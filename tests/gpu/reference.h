/* SPDX-License-Identifier: Apache-2.0
 *
 * reference.h - a plain fp64 MoE layer over all ranks' tokens, and the inputs that
 * both it and the engine get: a pure function of seed, rank and micro-batch.
 */
#ifndef EPO_TESTS_GPU_REFERENCE_H
#define EPO_TESTS_GPU_REFERENCE_H

#include "gpu_test.h"

#define REF_RANKS 8

typedef enum ref_routing {
    REF_RANDOM = 0,
    REF_UNEVEN, /* few experts get most */
    REF_ONE,    /* all tokens to expert 0 */
    REF_HOLES,  /* -1 slots, experts without tokens */
    REF_TWICE,  /* an expert named twice by one token */
    REF_EMPTY,  /* rank 0 has no tokens */
    REF_ROUTINGS
} ref_routing;
static const char *const ref_routing_name[] = {"random", "uneven", "one expert",
                                               "holes",  "twice",  "rank 0 empty"};

typedef struct ref_case {
    uint64_t seed;
    int ranks, experts, hidden, ffn, top_k, tokens;
    epo_dtype type, wgrad_type;
    ref_routing routing;
    int microbatches;
    int capacity; /* -1: none */
    epo_wire wire;
    epo_overflow overflow;
    bool pad;
} ref_case;

static inline int ref_tokens(const ref_case *c, int rank) {
    if (c->routing == REF_EMPTY && rank == 0)
        return 0;
    return c->routing == REF_RANDOM   ? c->tokens
           : c->tokens - 3 * rank > 0 ? c->tokens - 3 * rank
                                      : 1;
}

static inline int64_t ref_expert(const ref_case *c, int rank, int mb, int t, int k) {
    const uint64_t at = ((uint64_t)mb * 1000003 + (uint64_t)rank) * 1000003 + (uint64_t)t;
    const uint64_t r = test_random(c->seed ^ 0x1111, at * 64 + (uint64_t)k);
    const int64_t spread = (int64_t)(test_random(c->seed ^ 0x2222, at) % (uint64_t)c->experts);
    switch (c->routing) {
    case REF_UNEVEN: return (int64_t)(r % 4 ? r / 7 % 2 : r / 7 % (uint64_t)c->experts);
    case REF_ONE: return 0;
    case REF_HOLES: return r % 3 == 0 ? -1 : (int64_t)(r / 7 % (uint64_t)((c->experts + 1) / 2));
    case REF_TWICE: return k < 2 ? spread : (spread + k) % c->experts;
    default: return (spread + (int64_t)k * (1 + (int64_t)(at % 3))) % c->experts;
    }
}

/* With a capacity, few values: many slots weigh the same.  None below 0: an expert that is
 * named twice must not cancel itself. */
static inline float ref_weight(const ref_case *c, int rank, int mb, int t, int k) {
    const float w = test_uniform(
        c->seed ^ 0x3333,
        (((uint64_t)mb * 31 + (uint64_t)rank) * 100003 + (uint64_t)t) * 64 + (uint64_t)k);
    return c->capacity >= 0 ? (float)(int)(fabsf(w) * 4 + 1) / 4 : w;
}
/* Does the slot stay within its expert's capacity? */
static inline bool ref_kept(const ref_case *c, int rank, int mb, int t, int k) {
    const int64_t e = ref_expert(c, rank, mb, t, k);
    const float w = ref_weight(c, rank, mb, t, k);
    int better = 0;
    for (int i = 0; c->capacity >= 0 && i < ref_tokens(c, rank) * c->top_k; i++) {
        const int t2 = i / c->top_k, k2 = i % c->top_k;
        const bool earlier = i < t * c->top_k + k;
        if (ref_expert(c, rank, mb, t2, k2) != e || i == t * c->top_k + k)
            continue;
        const float w2 = ref_weight(c, rank, mb, t2, k2);
        better +=
            c->overflow == EPO_OVERFLOW_DROP_WEIGHT ? w2 > w || (w2 == w && earlier) : earlier;
    }
    return c->capacity < 0 || better < c->capacity;
}
/* kind: 0 x, 1 dy. */
static inline float ref_row(const ref_case *c, int kind, int rank, int mb, int t, int h) {
    return test_uniform(c->seed ^ (0x4444 + (uint64_t)kind),
                        (((uint64_t)mb * 31 + (uint64_t)rank) * 100003 + (uint64_t)t) *
                                (uint64_t)c->hidden +
                            (uint64_t)h);
}
/* Weights of global expert e; scaled so that values stay of order one. */
static inline float ref_w1(const ref_case *c, int e, uint64_t i) {
    return test_uniform(c->seed ^ 0x5555, (uint64_t)e * 2 * (uint64_t)(c->ffn * c->hidden) + i) *
           (float)(1.7 / sqrt((double)c->hidden));
}
static inline float ref_w2(const ref_case *c, int e, uint64_t i) {
    return test_uniform(c->seed ^ 0x6666, (uint64_t)e * (uint64_t)(c->ffn * c->hidden) + i) *
           (float)(1.7 / sqrt((double)c->ffn));
}

/* Of one rank: outputs of the last micro-batch, gradients over all of them. */
typedef struct ref_result {
    double *y, *dx, *dweights, *dw1, *dw2;
    /* Of each array, all terms of its sums squared and added up: the square of its length,
     * had the terms random signs.  What cancels is shorter, its error is not. */
    double square[5];
} ref_result;

/* The w1, w2 of one expert, rounded to the type. */
static inline void ref_weights(const ref_case *c, int e, double *w1, double *w2) {
    const uint64_t n = (uint64_t)c->ffn * (uint64_t)c->hidden;
    for (uint64_t i = 0; i < 2 * n; i++)
        w1[i] = test_round(c->type, ref_w1(c, e, i));
    for (uint64_t i = 0; i < n; i++)
        w2[i] = test_round(c->type, ref_w2(c, e, i));
}

typedef struct ref_scratch {
    double *w1, *w2, *x, *dy, *h, *da, *y, *dx;
    double *square; /* [5] */
} ref_scratch;

static inline void ref_add(double *sum, double *square, double term) {
    *sum += term;
    *square += term * term;
}

/* One slot of one token through expert e; adds to the token's and expert's sums. */
static inline void ref_slot(const ref_case *c, ref_scratch *s, double w, double *y, double *dx,
                            double *dweight, double *dw1, double *dw2) {
    const int hidden = c->hidden, ffn = c->ffn;
    for (int j = 0; j < 2 * ffn; j++) {
        s->h[j] = 0;
        for (int i = 0; i < hidden; i++)
            s->h[j] += s->w1[j * hidden + i] * s->x[i];
    }
    double sum = 0, none = 0;
    for (int f = 0; f < ffn; f++) {
        const double g = s->h[f], u = s->h[ffn + f], sg = 1 / (1 + exp(-g));
        double da = 0;
        for (int i = 0; i < hidden; i++) {
            if (y != NULL)
                ref_add(&y[i], &s->square[0], s->w2[i * ffn + f] * w * g * sg * u);
            da += s->w2[i * ffn + f] * s->dy[i];
            if (dw2 != NULL)
                ref_add(&dw2[i * ffn + f], &s->square[4], s->dy[i] * w * g * sg * u);
        }
        ref_add(&sum, dweight != NULL ? &s->square[2] : &none, da * g * sg * u);
        const double dg = da * w * u * sg * (1 + g * (1 - sg)), du = da * w * g * sg;
        for (int i = 0; i < hidden; i++) {
            if (dx != NULL) {
                ref_add(&dx[i], &s->square[1], s->w1[f * hidden + i] * dg);
                ref_add(&dx[i], &s->square[1], s->w1[(ffn + f) * hidden + i] * du);
            }
            if (dw1 != NULL) {
                ref_add(&dw1[f * hidden + i], &s->square[3], dg * s->x[i]);
                ref_add(&dw1[(ffn + f) * hidden + i], &s->square[3], du * s->x[i]);
            }
        }
    }
    if (dweight != NULL)
        *dweight += sum;
}

static inline ref_result ref_make(const ref_case *c, int me) {
    const int local = c->experts / c->ranks, hidden = c->hidden;
    const uint64_t n = (uint64_t)c->ffn * (uint64_t)hidden;
    const uint64_t mine = (uint64_t)ref_tokens(c, me);
    ref_result r = {
        calloc(mine * (uint64_t)hidden + 1, 8),   calloc(mine * (uint64_t)hidden + 1, 8),
        calloc(mine * (uint64_t)c->top_k + 1, 8), calloc(2 * n * (uint64_t)local, 8),
        calloc(n * (uint64_t)local, 8),           {0}};
    double *work = calloc(3 * n + 2 * (uint64_t)hidden + 2 * (uint64_t)c->ffn, 8);
    ref_scratch s = {.w1 = work, .w2 = work + 2 * n, .x = work + 3 * n};
    s.square = r.square;
    s.dy = s.x + hidden;
    s.h = s.dy + hidden;
    for (int e = 0; e < c->experts; e++) {
        ref_weights(c, e, s.w1, s.w2);
        const bool own = e / local == me;
        for (int mb = 0; mb < c->microbatches; mb++)
            for (int rank = 0; rank < c->ranks; rank++)
                for (int t = 0; t < ref_tokens(c, rank); t++) {
                    const bool last = rank == me && mb == c->microbatches - 1;
                    for (int k = 0; k < c->top_k; k++) {
                        if (ref_expert(c, rank, mb, t, k) != e || (!own && !last) ||
                            !ref_kept(c, rank, mb, t, k))
                            continue;
                        for (int i = 0; i < hidden; i++) {
                            s.x[i] = test_round(c->type, ref_row(c, 0, rank, mb, t, i));
                            s.dy[i] = test_round(c->type, ref_row(c, 1, rank, mb, t, i));
                        }
                        const int le = e % local;
                        ref_slot(c, &s, ref_weight(c, rank, mb, t, k),
                                 last ? r.y + t * hidden : NULL, last ? r.dx + t * hidden : NULL,
                                 last ? r.dweights + t * c->top_k + k : NULL,
                                 own ? r.dw1 + (uint64_t)le * 2 * n : NULL,
                                 own ? r.dw2 + (uint64_t)le * n : NULL);
                    }
                }
    }
    free(work);
    return r;
}

static inline void ref_free(ref_result *r) {
    free(r->y);
    free(r->dx);
    free(r->dweights);
    free(r->dw1);
    free(r->dw2);
}

#endif
