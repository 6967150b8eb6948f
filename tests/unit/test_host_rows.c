/* SPDX-License-Identifier: Apache-2.0
 *
 * Conversions, passes over rows, SwiGLU and GEMM against plain loops in double.
 */
#include "config.h"

#include "host_ranks.h"
#include "unit.h"

#include "backend/host/convert.h"
#include "backend/host/host.h"

#include <math.h>
#include <string.h>

static const epo_dtype types[] = {EPO_F32, EPO_BF16, EPO_F16};
static const double ulp[] = {6e-8, 4e-3, 5e-4}; /* half a unit, relative */

/* ---- conversions ----------------------------------------------------------------- */

typedef float (*widen_fn)(uint16_t);
typedef uint16_t (*narrow_fn)(float);

/* Nearest of the type's non-negative values, ties to even, by search: they are in
 * the order of their bits.  `inf` is the bits of infinity. */
static uint16_t nearest(widen_fn widen, uint16_t inf, float x) {
    uint16_t sign = signbit(x) ? 0x8000 : 0, lo = 0, hi = inf;
    double v = fabs((double)x);
    while (hi - lo > 1) {
        uint16_t mid = (uint16_t)((lo + hi) / 2);
        if ((double)widen(mid) <= v)
            lo = mid;
        else
            hi = mid;
    }
    if (isinf(x))
        return sign | inf;
    /* Infinity stands for the value that would follow the largest. */
    double below = widen(lo), step = below - widen((uint16_t)(lo - (lo > 0)));
    double above = hi == inf ? below + step : widen(hi);
    uint16_t h = v - below < above - v ? lo : v - below > above - v ? hi : lo % 2 == 0 ? lo : hi;
    return sign | h;
}

static int narrow_wrong(widen_fn widen, narrow_fn narrow, uint16_t inf) {
    int wrong = 0;
    for (uint32_t h = 0; h < 65536; h++) {
        float f = widen((uint16_t)h);
        if (isnan(f))
            wrong += !isnan(widen(narrow(f))) || signbit(f) != signbit(widen(narrow(f)));
        else
            wrong += narrow(f) != h;
        /* Around each value, and between it and the next. */
        float next = widen((uint16_t)(h + 1)), mid = (float)(((double)f + (double)next) / 2);
        const float near[] = {nextafterf(f, INFINITY), nextafterf(f, -INFINITY), mid,
                              nextafterf(mid, INFINITY), nextafterf(mid, -INFINITY)};
        for (int i = 0; i < 5; i++)
            if (!isnan(near[i]))
                wrong += narrow(near[i]) != nearest(widen, inf, near[i]);
    }
    uint64_t seed = 5;
    for (int i = 0; i < 200000; i++) {
        uint32_t u = rng_next(&seed);
        float f = host_float(u);
        if (!isnan(f))
            wrong += narrow(f) != nearest(widen, inf, f);
        else
            wrong += !isnan(widen(narrow(f)));
    }
    return wrong;
}

static void narrow_types_round_to_nearest_even(void) {
    CU_ASSERT_EQUAL(narrow_wrong(host_from_bf16, host_to_bf16, 0x7f80), 0);
    CU_ASSERT_EQUAL(narrow_wrong(host_from_f16, host_to_f16, 0x7c00), 0);
    CU_ASSERT_EQUAL(host_from_f16(0x0001), 0x1p-24f);
    CU_ASSERT_EQUAL(host_from_f16(0x3c00), 1.0f);
    CU_ASSERT_EQUAL(host_from_bf16(0x3f80), 1.0f);
    CU_ASSERT_EQUAL(host_to_f16(65519.0f), 0x7bff);
    CU_ASSERT_EQUAL(host_to_f16(65520.0f), 0x7c00);
    CU_ASSERT_EQUAL(host_to_bf16(host_float(0x7f800001)), 0x7fc0); /* NaN of the lowest bits */
}

/* ---- arrays of a type ---------------------------------------------------------------- */

typedef struct array {
    epo_dtype type;
    uint64_t n;
    void *data;
} array;

static array array_random(uint64_t n, epo_dtype type, uint64_t *seed, float scale) {
    array a = {type, n, calloc(n + 1, host_type_size(type))};
    for (uint64_t i = 0; i < n; i++) {
        float v = rng_float(seed) * scale;
        host_store(a.data, i, &v, 1, type);
    }
    return a;
}

static double at(const array *a, uint64_t i) {
    float v;
    host_load(&v, a->data, i, 1, a->type);
    return (double)v;
}

static int near(double got, double want, double scale, double tolerance) {
    return isnan(want) ? isnan(got) : fabs(got - want) <= tolerance * (scale + fabs(want));
}

static void run_one(rank_ctx *c, epo_status status, epo_event *done) {
    EXPECT(c, status == EPO_OK);
    EXPECT(c, c->ops->sync(c->be, done) == EPO_OK);
}

typedef struct bench {
    epo_queue *q;
    epo_event *done;
    epo_deps deps;
} bench;

static bench bench_new(rank_ctx *c) {
    bench b = {0};
    EXPECT(c, c->ops->queue_create(c->be, EPO_QUEUE_COMPUTE, &b.q) == EPO_OK);
    EXPECT(c, c->ops->event_create(c->be, &b.done) == EPO_OK);
    b.deps.signal = b.done;
    b.deps.chunk = -1;
    return b;
}

static void bench_end(rank_ctx *c, bench *b) {
    c->ops->event_destroy(c->be, b->done);
    c->ops->queue_destroy(c->be, b->q);
}

/* ---- gather and reduce ---------------------------------------------------------------- */

static void gather_case(rank_ctx *c, bench *b, uint64_t *seed) {
    uint32_t bytes = 1 + rng_below(seed, 300), rows = rng_below(seed, 40), from = 20;
    unsigned char *src = malloc(from * bytes), *dst = malloc((size_t)rows * bytes + 1);
    int32_t *index = malloc((rows + 1) * sizeof *index);
    for (uint32_t i = 0; i < from * bytes; i++)
        src[i] = (unsigned char)rng_next(seed);
    for (uint32_t i = 0; i < rows; i++)
        index[i] = (int32_t)rng_below(seed, from + 1) - 1;
    memset(dst, 0xee, (size_t)rows * bytes + 1);
    epo_rows_gather g = {.dst = dst, .src = src, .index = index, .rows = rows, .row_bytes = bytes};
    run_one(c, c->ops->gather(b->q, &g, &b->deps), b->done);
    int wrong = dst[(size_t)rows * bytes] != 0xee;
    for (uint32_t i = 0; i < rows; i++)
        for (uint32_t k = 0; k < bytes; k++)
            wrong += dst[i * bytes + k] != (index[i] < 0 ? 0 : src[(uint32_t)index[i] * bytes + k]);
    EXPECT(c, wrong == 0);
    free(src), free(dst), free(index);
}

static void reduce_case(rank_ctx *c, bench *b, uint64_t *seed, int t) {
    int width = (int)rng_below(seed, 9), elements = 1 + (int)rng_below(seed, 1300);
    uint32_t rows = rng_below(seed, 12), from = 15;
    array src = array_random(from * (uint64_t)elements, types[t], seed, 3.0f);
    array dst = array_random(rows * (uint64_t)elements, types[t], seed, 1.0f);
    int32_t *index = malloc((rows * (uint32_t)width + 1) * sizeof *index);
    for (uint32_t i = 0; i < rows * (uint32_t)width; i++)
        index[i] = (int32_t)rng_below(seed, from + 3) - 3;
    float nan = NAN;
    host_store(src.data, 0, &nan, 1, types[t]);
    epo_rows_reduce r = {.dst = dst.data,
                         .src = src.data,
                         .index = index,
                         .rows = rows,
                         .width = width,
                         .elements = elements,
                         .type = types[t]};
    for (uint32_t i = 0; i < rows * (uint32_t)width; i++)
        if (index[i] < -1)
            index[i] = -1;
    run_one(c, c->ops->reduce(b->q, &r, &b->deps), b->done);
    int wrong = 0;
    for (uint32_t i = 0; i < rows; i++) {
        for (int e = 0; e < elements; e++) {
            float exact = 0.0f; /* the order and the type of the sum are given: same bits */
            for (int j = 0; j < width; j++) {
                int32_t k = index[i * (uint32_t)width + (uint32_t)j];
                if (k >= 0)
                    exact += (float)at(&src, (uint64_t)k * (uint64_t)elements + (uint64_t)e);
            }
            array one = {types[t], 1, calloc(1, 4)};
            host_store(one.data, 0, &exact, 1, types[t]);
            double got = at(&dst, i * (uint64_t)elements + (uint64_t)e), want = at(&one, 0);
            wrong += !(got == want || (isnan(got) && isnan(want)));
            free(one.data);
        }
    }
    EXPECT(c, wrong == 0);
    free(src.data), free(dst.data), free(index);
}

/* ---- SwiGLU ------------------------------------------------------------------------------- */

typedef struct gate {
    double g, u, w, da, sig;
} gate;

static gate gate_at(const array *h, const array *da, const float *w, uint64_t row, int f, int ffn) {
    gate x;
    x.g = at(h, row * 2 * (uint64_t)ffn + (uint64_t)f);
    x.u = at(h, row * 2 * (uint64_t)ffn + (uint64_t)(ffn + f));
    x.da = da == NULL ? 0.0 : at(da, row * (uint64_t)ffn + (uint64_t)f);
    x.w = w[row];
    x.sig = 1.0 / (1.0 + exp(-x.g));
    return x;
}

static int swiglu_row_wrong(const array *h, const array *da, const array *a, const array *dh,
                            const float *w, const float *dw, uint64_t row, int ffn, double tol) {
    int wrong = 0;
    double sum = 0.0, scale = 0.0;
    for (int f = 0; f < ffn; f++) {
        gate x = gate_at(h, da, w, row, f, ffn);
        uint64_t i = row * (uint64_t)ffn + (uint64_t)f, g = row * 2 * (uint64_t)ffn + (uint64_t)f;
        wrong += !near(at(a, i), x.w * x.g * x.sig * x.u, 1.0, tol);
        if (dh == NULL)
            continue;
        double slope = x.sig * (1.0 + x.g * (1.0 - x.sig));
        wrong += !near(at(dh, g), x.w * x.da * x.u * slope, 1.0, tol);
        wrong += !near(at(dh, g + (uint64_t)ffn), x.w * x.da * x.g * x.sig, 1.0, tol);
        sum += x.da * x.g * x.sig * x.u;
        scale += fabs(x.da * x.g * x.sig * x.u);
    }
    if (dh != NULL)
        wrong += !near(dw[row], sum, scale + 1e-3, 1e-5);
    return wrong;
}

static void swiglu_case(rank_ctx *c, bench *b, uint64_t *seed, int t, bool in_place) {
    int ffn = 1 + (int)rng_below(seed, 700);
    uint64_t rows = 9, first = 2, n = 6, f = (uint64_t)ffn;
    array h = array_random(rows * 2 * f, types[t], seed, 4.0f);
    array h2 = {types[t], h.n, malloc(h.n * 4)};
    array da = array_random(rows * f, types[t], seed, 2.0f),
          da2 = {types[t], da.n, malloc(da.n * 4)};
    array a = array_random(rows * f, types[t], seed, 1.0f);
    array dh = array_random(rows * 2 * f, types[t], seed, 1.0f);
    float w[9], dw[9] = {7, 7, 7, 7, 7, 7, 7, 7, 7};
    for (int i = 0; i < 9; i++)
        w[i] = rng_float(seed);
    w[4] = 0.0f;
    memcpy(h2.data, h.data, h.n * host_type_size(types[t]));
    memcpy(da2.data, da.data, da.n * host_type_size(types[t]));
    double before = at(&a, f), tol = 2 * ulp[t] + 2e-6;
    epo_swiglu s = {h.data, w, a.data, NULL, NULL, NULL, first, n, ffn, types[t]};
    run_one(c, c->ops->swiglu(b->q, &s, &b->deps), b->done);
    for (uint64_t r = first; r < first + n; r++)
        EXPECT(c, swiglu_row_wrong(&h2, NULL, &a, NULL, w, dw, r, ffn, tol) == 0);
    EXPECT(c, at(&a, f) == before);
    array *out_a = in_place ? &da : &a, *out_h = in_place ? &h : &dh;
    epo_swiglu back = {h.data, w, out_a->data, da.data, out_h->data, dw, first, n, ffn, types[t]};
    run_one(c, c->ops->swiglu(b->q, &back, &b->deps), b->done);
    for (uint64_t r = first; r < first + n; r++)
        EXPECT(c, swiglu_row_wrong(&h2, &da2, out_a, out_h, w, dw, r, ffn, tol) == 0);
    EXPECT(c, dw[1] == 7.0f && dw[8] == 7.0f); /* rows outside */
    free(h.data), free(h2.data), free(da.data), free(da2.data), free(a.data), free(dh.data);
}

/* Alignment rows hold anything. */
static void swiglu_weight_zero(rank_ctx *c, bench *b) {
    float h[8] = {NAN, INFINITY, NAN, 1, 2, -INFINITY, 3, NAN}, da[4] = {NAN, 1, INFINITY, NAN};
    float w[1] = {0.0f}, a[4] = {1, 1, 1, 1}, dh[8] = {1, 1, 1, 1, 1, 1, 1, 1}, dw[1],
          zero[8] = {0};
    epo_swiglu s = {h, w, a, NULL, NULL, NULL, 0, 1, 4, EPO_F32};
    run_one(c, c->ops->swiglu(b->q, &s, &b->deps), b->done);
    EXPECT(c, memcmp(a, zero, sizeof a) == 0);
    epo_swiglu back = {h, w, a, da, dh, dw, 0, 1, 4, EPO_F32};
    memset(a, 1, sizeof a);
    run_one(c, c->ops->swiglu(b->q, &back, &b->deps), b->done);
    EXPECT(c, memcmp(a, zero, sizeof a) == 0 && memcmp(dh, zero, sizeof dh) == 0);
}

/* ---- GEMM ------------------------------------------------------------------------------------ */

#define EXPERTS 5

typedef struct gemm_case {
    epo_gemm g;
    array a, b, c, before;
    uint64_t first[EXPERTS], count[EXPERTS], rows;
} gemm_case;

static gemm_case gemm_make(uint64_t *seed, epo_gemm_kind kind, int t, epo_dtype c_type) {
    gemm_case x;
    memset(&x, 0, sizeof x);
    int n = 1 + (int)rng_below(seed, 40), k = 1 + (int)rng_below(seed, 40);
    for (int e = 0; e < EXPERTS; e++) {
        x.first[e] = x.rows;
        x.count[e] = rng_below(seed, 4) == 0 ? 0 : rng_below(seed, 30);
        x.rows += (x.count[e] + 7) / 8 * 8;
    }
    uint64_t nk = (uint64_t)n * (uint64_t)k, m = x.rows;
    uint64_t sizes[3][3] = {{m * (uint64_t)k, EXPERTS * nk, m * (uint64_t)n},
                            {m * (uint64_t)n, EXPERTS * nk, m * (uint64_t)k},
                            {m * (uint64_t)n, m * (uint64_t)k, EXPERTS * nk}};
    x.a = array_random(sizes[kind][0], types[t], seed, 1.0f);
    x.b = array_random(sizes[kind][1], types[t], seed, 1.0f);
    x.c = array_random(sizes[kind][2], c_type, seed, 1.0f);
    x.before = (array){c_type, x.c.n, malloc((x.c.n + 1) * 4)};
    memcpy(x.before.data, x.c.data, x.c.n * host_type_size(c_type));
    x.g = (epo_gemm){.kind = kind,
                     .a = x.a.data,
                     .b = x.b.data,
                     .c = x.c.data,
                     .type = types[t],
                     .c_type = c_type,
                     .n = n,
                     .k = k,
                     .first = 0,
                     .count = EXPERTS};
    return x;
}

static void gemm_free(gemm_case *x) {
    free(x->a.data), free(x->b.data), free(x->c.data), free(x->before.data);
}

/* One output element of expert e: what it should be; row `i`, column `j`. */
static double gemm_want(const gemm_case *x, int e, uint64_t i, uint64_t j) {
    uint64_t n = (uint64_t)x->g.n, k = (uint64_t)x->g.k, r0 = x->first[e], w = (uint64_t)e * n * k;
    double sum = 0.0;
    switch (x->g.kind) {
    case EPO_GEMM_FORWARD:
        for (uint64_t q = 0; q < k; q++)
            sum += at(&x->a, (r0 + i) * k + q) * at(&x->b, w + j * k + q);
        return sum;
    case EPO_GEMM_DGRAD:
        for (uint64_t q = 0; q < n; q++)
            sum += at(&x->a, (r0 + i) * n + q) * at(&x->b, w + q * k + j);
        return sum;
    case EPO_GEMM_WGRAD: break;
    }
    sum = at(&x->before, w + i * k + j);
    for (uint64_t m = 0; m < x->count[e]; m++)
        sum += at(&x->a, (r0 + m) * n + i) * at(&x->b, (r0 + m) * k + j);
    return sum;
}

/* Also: what no expert owns (alignment rows, experts without rows) is untouched. */
static int gemm_wrong(const gemm_case *x, double tol) {
    const epo_gemm *g = &x->g;
    uint64_t n = (uint64_t)g->n, k = (uint64_t)g->k;
    unsigned char *owned = calloc(x->c.n + 1, 1);
    int wrong = 0;
    for (int e = 0; e < EXPERTS; e++) {
        uint64_t rows = g->kind == EPO_GEMM_WGRAD ? n : x->count[e];
        uint64_t columns = g->kind == EPO_GEMM_FORWARD ? n : k;
        uint64_t base = g->kind == EPO_GEMM_WGRAD ? (uint64_t)e * n * k : x->first[e] * columns;
        for (uint64_t i = 0; i < rows; i++) {
            for (uint64_t j = 0; j < columns; j++) {
                owned[base + i * columns + j] = 1;
                wrong += !near(at(&x->c, base + i * columns + j), gemm_want(x, e, i, j), 4.0, tol);
            }
        }
    }
    for (uint64_t i = 0; i < x->c.n; i++)
        wrong += !owned[i] && at(&x->c, i) != at(&x->before, i);
    free(owned);
    return wrong;
}

static void gemm_check(rank_ctx *c, bench *b, uint64_t *seed, epo_gemm_kind kind, int t,
                       epo_dtype c_type) {
    gemm_case x = gemm_make(seed, kind, t, c_type);
    x.g.row_first = x.first;
    x.g.row_count = x.count;
    run_one(c, c->ops->gemm(b->q, &x.g, &b->deps), b->done);
    double tol = ulp[c_type == EPO_F32 && kind == EPO_GEMM_WGRAD ? 0 : t] * 2 + 1e-6;
    EXPECT(c, gemm_wrong(&x, tol) == 0);
    /* The same experts in operations of one or two: the same bits. */
    void *once = malloc((x.c.n + 1) * 4);
    uint64_t size = x.c.n * host_type_size(c_type);
    memcpy(once, x.c.data, size);
    memcpy(x.c.data, x.before.data, size);
    for (int e = 0; e < EXPERTS; e += x.g.count) {
        x.g.first = e;
        x.g.count = e + 2 <= EXPERTS ? 1 + (int)rng_below(seed, 2) : 1;
        run_one(c, c->ops->gemm(b->q, &x.g, &b->deps), b->done);
    }
    EXPECT(c, memcmp(once, x.c.data, size) == 0);
    free(once);
    gemm_free(&x);
}

/* ---- the tests ------------------------------------------------------------------------------ */

static void rows_cases(rank_ctx *c) {
    bench b = bench_new(c);
    uint64_t seed = 11;
    for (int n = 0; n < 40; n++)
        gather_case(c, &b, &seed);
    for (int n = 0; n < 45; n++)
        reduce_case(c, &b, &seed, n % 3);
    float minus = -0.0f, out = 1.0f;
    int32_t first = 0;
    epo_rows_reduce one = {.dst = &out,
                           .src = &minus,
                           .index = &first,
                           .rows = 1,
                           .width = 1,
                           .elements = 1,
                           .type = EPO_F32};
    run_one(c, c->ops->reduce(b.q, &one, &b.deps), b.done);
    EXPECT(c, out == 0.0f && signbit(out));
    bench_end(c, &b);
}

static void swiglu_cases(rank_ctx *c) {
    bench b = bench_new(c);
    uint64_t seed = 12;
    for (int n = 0; n < 24; n++)
        swiglu_case(c, &b, &seed, n % 3, n % 2 == 1);
    swiglu_weight_zero(c, &b);
    epo_swiglu bad = {.ffn = 0, .type = EPO_F32};
    EXPECT(c, c->ops->swiglu(b.q, &bad, NULL) == EPO_E_ARG);
    bench_end(c, &b);
}

static void gemm_cases(rank_ctx *c) {
    bench b = bench_new(c);
    uint64_t seed = 13;
    for (int n = 0; n < 36; n++) {
        int t = n % 3;
        epo_gemm_kind kind = (epo_gemm_kind)(n / 3 % 3);
        gemm_check(c, &b, &seed, kind, t, kind == EPO_GEMM_WGRAD && n % 2 ? EPO_F32 : types[t]);
    }
    uint64_t zero = 0, many = UINT64_C(1) << 31;
    epo_gemm bad = {
        .type = EPO_F32, .n = 1, .k = 1, .row_first = &zero, .row_count = &many, .count = 1};
    EXPECT(c, c->ops->gemm(b.q, &bad, NULL) == EPO_E_ARG);
    bad.row_count = &zero;
    bad.n = 0;
    EXPECT(c, c->ops->gemm(b.q, &bad, NULL) == EPO_E_ARG);
    bench_end(c, &b);
}

/* Each pass as compiled for this CPU, and as for any. */
static void any_cpu(rank_ctx *c) {
    c->be->wide = false;
    rows_cases(c);
    swiglu_cases(c);
    gemm_cases(c);
}

static void gather_and_reduce(void) { CU_ASSERT_EQUAL(ranks_run(1, rows_cases, NULL), 0); }
static void swiglu_both_ways(void) { CU_ASSERT_EQUAL(ranks_run(1, swiglu_cases, NULL), 0); }
static void gemm_of_experts(void) { CU_ASSERT_EQUAL(ranks_run(1, gemm_cases, NULL), 0); }
static void all_without_wide(void) { CU_ASSERT_EQUAL(ranks_run(1, any_cpu, NULL), 0); }

int main(void) {
    const CU_TestInfo tests[] = {
        {"narrow types round to nearest even", narrow_types_round_to_nearest_even},
        {"gather and reduce", gather_and_reduce},
        {"SwiGLU both ways", swiglu_both_ways},
        {"GEMM of experts, same bits however grouped", gemm_of_experts},
        {"all of it without wide vectors", all_without_wide},
        CU_TEST_INFO_NULL,
    };
    return unit_run("host_rows", tests);
}
