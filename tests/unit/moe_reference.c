/* SPDX-License-Identifier: Apache-2.0 */
#include "moe_reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *moe_calloc(size_t count, size_t size) {
    void *p = calloc(count > 0 ? count : 1, size);
    if (p == NULL)
        abort();
    return p;
}

uint32_t moe_random(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)((z ^ z >> 31) >> 32);
}

static int below(uint64_t *state, int n) { return (int)(moe_random(state) % (uint32_t)n); }

uint16_t moe_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float moe_from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint16_t to_f16(float x) {
    const double size = fabs((double)x);
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    int exponent = 0;
    if (isnan(x))
        return 0x7e00;
    if (size >= 65520)
        return sign | 0x7c00;
    if (size < ldexp(1, -14))
        return (uint16_t)(sign | (int)nearbyint(ldexp(size, 24)));
    (void)frexp(size, &exponent); /* a mantissa that rounds up carries into the exponent */
    return (uint16_t)(sign |
                      (((exponent + 13) << 10) + (int)nearbyint(ldexp(size, 11 - exponent))));
}

static float from_f16(uint16_t x) {
    const int exponent = x >> 10 & 31, mantissa = x & 0x3ff;
    const double size = exponent == 31  ? (mantissa != 0 ? (double)NAN : (double)INFINITY)
                        : exponent == 0 ? ldexp(mantissa, -24)
                                        : ldexp(mantissa + 0x400, exponent - 25);
    return (float)(x & 0x8000 ? -size : size);
}

uint16_t moe_to_half(float x, epo_dtype type) {
    return type == EPO_F16 ? to_f16(x) : moe_to_bf16(x);
}

float moe_from_half(uint16_t x, epo_dtype type) {
    return type == EPO_F16 ? from_f16(x) : moe_from_bf16(x);
}

/* -1..1 */
static float value(const moe_case *c, uint64_t *state) {
    float f = (float)moe_random(state) / 2147483648.0F - 1.0F;
    return c->type == EPO_F32 ? f : moe_from_half(moe_to_half(f, c->type), c->type);
}

static float *values(const moe_case *c, uint64_t *state, size_t count, float scale) {
    float *v = moe_calloc(count, sizeof *v);
    for (size_t i = 0; i < count; i++) {
        v[i] = scale * value(c, state);
        if (c->type != EPO_F32)
            v[i] = moe_from_half(moe_to_half(v[i], c->type), c->type);
    }
    return v;
}

/* ---- cases --------------------------------------------------------------- */

static void route_token(const moe_case *c, uint64_t *state, int64_t *experts) {
    int e = c->experts, k = c->top_k;
    for (int j = 0; j < k; j++) {
        switch (c->style) {
        case CASE_ONE: experts[j] = j == 0 ? e / 2 : -1; break;
        case CASE_FEW: experts[j] = below(state, e < 2 ? e : 2); break;
        case CASE_NONE: experts[j] = -1; break;
        case CASE_DISTINCT: {
            bool twice = true;
            for (int tries = 0; twice && tries < 100; tries++) {
                experts[j] = below(state, e);
                twice = false;
                for (int i = 0; i < j; i++)
                    twice = twice || experts[i] == experts[j];
            }
            break;
        }
        default: experts[j] = below(state, 5) == 0 ? -1 : below(state, e);
        }
    }
}

static void fill_batch(const moe_case *c, uint64_t *state, case_batch *b) {
    size_t slots = (size_t)b->tokens * (size_t)c->top_k;
    b->experts = moe_calloc(slots, sizeof *b->experts);
    for (int t = 0; t < b->tokens; t++)
        route_token(c, state, b->experts + (size_t)t * (size_t)c->top_k);
    if (below(state, 4) > 0) {
        b->weights = moe_calloc(slots, sizeof *b->weights);
        for (size_t i = 0; i < slots; i++) /* 0 now and then: its gradient is not 0 */
            b->weights[i] = below(state, 8) == 0 ? 0.0F : value(c, state);
    }
    b->x = values(c, state, (size_t)b->tokens * (size_t)c->hidden, 1.0F);
    b->dy = values(c, state, (size_t)b->tokens * (size_t)c->hidden, 1.0F);
}

void moe_case_fill(moe_case *c) {
    uint64_t state = c->seed;
    size_t stack = (size_t)c->experts * (size_t)c->ffn * (size_t)c->hidden;
    float scale = 1.5F / sqrtf((float)c->hidden);
    c->w1 = values(c, &state, 2 * stack, scale);
    c->w2 = values(c, &state, stack, scale);
    c->dw1 = values(c, &state, 2 * stack, 1.0F);
    c->dw2 = values(c, &state, stack, 1.0F);
    for (int b = 0; b < c->batches; b++)
        for (int r = 0; r < c->ranks; r++) {
            int kind = below(&state, 4);
            c->batch[b][r].tokens = kind == 0   ? c->max_tokens
                                    : kind == 1 ? 0
                                                : below(&state, c->max_tokens + 1);
            fill_batch(c, &state, &c->batch[b][r]);
        }
}

void moe_case_random(moe_case *c, uint64_t seed, int ranks, epo_dtype type) {
    uint64_t state = seed ^ UINT64_C(0x5eed);
    memset(c, 0, sizeof *c);
    c->seed = seed;
    c->ranks = 1 + below(&state, ranks);
    c->experts = c->ranks * (1 + below(&state, 5));
    c->hidden = 1 + below(&state, 24);
    c->ffn = 1 + below(&state, 24);
    c->top_k = 1 + below(&state, 5);
    c->batches = 1 + below(&state, CASE_BATCHES);
    c->max_tokens = 1 + below(&state, 20);
    c->type = type;
    c->style = (case_style)below(&state, CASE_STYLES);
    moe_case_fill(c);
}

void moe_case_free(moe_case *c) {
    for (int b = 0; b < CASE_BATCHES; b++)
        for (int r = 0; r < CASE_RANKS; r++) {
            free(c->batch[b][r].experts);
            free(c->batch[b][r].weights);
            free(c->batch[b][r].x);
            free(c->batch[b][r].dy);
        }
    free(c->w1);
    free(c->w2);
    free(c->dw1);
    free(c->dw2);
    memset(c, 0, sizeof *c);
}

void moe_case_print(const moe_case *c) {
    fprintf(stderr,
            "case: seed %llu, %d ranks, %d experts, H %d, F %d, K %d, %d batches, at most %d "
            "tokens, type %d, style %d\n",
            (unsigned long long)c->seed, c->ranks, c->experts, c->hidden, c->ffn, c->top_k,
            c->batches, c->max_tokens, (int)c->type, (int)c->style);
}

/* ---- the layer ----------------------------------------------------------- */

static void add(moe_sum *s, double term) {
    s->value += term;
    s->terms += fabs(term);
}

/* One row x through expert e with router weight w; gradients from dy. */
typedef struct row_work {
    double *g, *u, *a;
} row_work;

static void row_forward(const moe_case *c, int e, const float *x, double w, row_work *s,
                        moe_sum *y) {
    size_t h = (size_t)c->hidden, f = (size_t)c->ffn;
    const float *w1 = c->w1 + (size_t)e * 2 * f * h, *w2 = c->w2 + (size_t)e * h * f;
    for (size_t i = 0; i < f; i++) {
        s->g[i] = s->u[i] = 0;
        for (size_t j = 0; j < h; j++) {
            s->g[i] += (double)w1[i * h + j] * x[j];
            s->u[i] += (double)w1[(f + i) * h + j] * x[j];
        }
        s->a[i] = w * s->g[i] / (1 + exp(-s->g[i])) * s->u[i];
    }
    for (size_t j = 0; j < h; j++)
        for (size_t i = 0; i < f; i++)
            add(&y[j], (double)w2[j * f + i] * s->a[i]);
}

/* After row_forward of the same row. */
static void row_backward(const moe_case *c, int e, const float *x, const float *dy, double w,
                         row_work *s, moe_sum *dx, moe_sum *dweight, moe_answer *out) {
    size_t h = (size_t)c->hidden, f = (size_t)c->ffn;
    const float *w1 = c->w1 + (size_t)e * 2 * f * h, *w2 = c->w2 + (size_t)e * h * f;
    moe_sum *dw1 = out->dw1 + (size_t)e * 2 * f * h, *dw2 = out->dw2 + (size_t)e * h * f;
    for (size_t i = 0; i < f; i++) {
        double sig = 1 / (1 + exp(-s->g[i])), silu = s->g[i] * sig, da = 0;
        for (size_t j = 0; j < h; j++) {
            da += (double)w2[j * f + i] * dy[j];
            add(&dw2[j * f + i], (double)dy[j] * s->a[i]);
        }
        double dg = w * da * s->u[i] * (sig + silu * (1 - sig)), du = w * da * silu;
        add(dweight, da * silu * s->u[i]);
        for (size_t j = 0; j < h; j++) {
            add(&dw1[i * h + j], dg * x[j]);
            add(&dw1[(f + i) * h + j], du * x[j]);
            add(&dx[j], dg * w1[i * h + j]);
            add(&dx[j], du * w1[(f + i) * h + j]);
        }
    }
}

static void batch_answer(const moe_case *c, int b, int r, row_work *work, moe_answer *out) {
    const case_batch *in = &c->batch[b][r];
    size_t h = (size_t)c->hidden, k = (size_t)c->top_k;
    out->y[b][r] = moe_calloc((size_t)in->tokens * h, sizeof(moe_sum));
    out->dx[b][r] = moe_calloc((size_t)in->tokens * h, sizeof(moe_sum));
    out->dweights[b][r] = moe_calloc((size_t)in->tokens * k, sizeof(moe_sum));
    for (size_t t = 0; t < (size_t)in->tokens; t++)
        for (size_t j = 0; j < k; j++) {
            int e = (int)in->experts[t * k + j];
            if (e < 0)
                continue;
            double w = in->weights != NULL ? in->weights[t * k + j] : 1.0;
            row_forward(c, e, in->x + t * h, w, work, out->y[b][r] + t * h);
            row_backward(c, e, in->x + t * h, in->dy + t * h, w, work, out->dx[b][r] + t * h,
                         &out->dweights[b][r][t * k + j], out);
        }
}

void moe_reference(const moe_case *c, moe_answer *out) {
    size_t stack = (size_t)c->experts * (size_t)c->ffn * (size_t)c->hidden;
    row_work work = {moe_calloc((size_t)c->ffn, sizeof(double)),
                     moe_calloc((size_t)c->ffn, sizeof(double)),
                     moe_calloc((size_t)c->ffn, sizeof(double))};
    memset(out, 0, sizeof *out);
    out->dw1 = moe_calloc(2 * stack, sizeof(moe_sum));
    out->dw2 = moe_calloc(stack, sizeof(moe_sum));
    for (size_t i = 0; i < 2 * stack; i++)
        add(&out->dw1[i], c->dw1[i]);
    for (size_t i = 0; i < stack; i++)
        add(&out->dw2[i], c->dw2[i]);
    for (int b = 0; b < c->batches; b++)
        for (int r = 0; r < c->ranks; r++)
            batch_answer(c, b, r, &work, out);
    free(work.g);
    free(work.u);
    free(work.a);
}

void moe_answer_free(moe_answer *a) {
    for (int b = 0; b < CASE_BATCHES; b++)
        for (int r = 0; r < CASE_RANKS; r++) {
            free(a->y[b][r]);
            free(a->dx[b][r]);
            free(a->dweights[b][r]);
        }
    free(a->dw1);
    free(a->dw2);
}
