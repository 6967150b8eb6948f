/* SPDX-License-Identifier: Apache-2.0
 *
 * products.c - every way in which the CUDA backend makes the experts' products
 * (EP_OVERLAP_CUDA_GEMM) against cuBLASLt's on the same inputs: the sm_90 kernels,
 * the portable ones, cuBLAS; all kinds and types, random shapes and those of models; and
 * the errors of all of them against fp64, of elements drawn at random.
 *
 *   products check [SHAPES [SEED]]    random shapes [300]
 *   products time                     workload Q, each way: GPU and CPU time of a call
 */
#include "gpu_test.h"

#include "backend/backend.h"
#include "core/status.h"

#include <time.h>

enum { EXPERTS = 64, ROUNDS = 5, POOL = 1 << 24, SAMPLES = 40 };
static const char *const kind_name[] = {"forward", "dgrad", "wgrad"};

/* The first is what the others are held against. */
static const char *const way_name[] = {"cublaslt", "auto", "portable", "cublas"};
enum { WAYS = sizeof way_name / sizeof *way_name };
typedef struct way {
    epo_backend *be;
    epo_queue *queue;
    epo_event *done;
    void *c, *a; /* its outputs: c (or h), the activation */
    double worst, differ, elements;
    double off2, sum2; /* against fp64: squares of differences and of the values */
    int wrong;
} way;

static const epo_backend_ops *ops;
static way ways[WAYS];
static void *pool[3]; /* of random elements, by type */
static uint64_t seed;

static int draw(uint64_t *at, int n) { return (int)(test_random(seed, (*at)++) % (uint64_t)n); }
/* 1..n, small ones as likely as large ones. */
static int draw_spread(uint64_t *at, int n) {
    const int v = (int)exp(draw(at, 100000) / 100000.0 * log(n + 0.999));
    return v < 1 ? 1 : v;
}

/* ---- one shape ---- */

typedef struct shape {
    epo_gemm_kind kind;
    epo_dtype type, c_type;
    int n, k, experts, first, count;
    bool act;
    uint64_t row_first[EXPERTS], row_count[EXPERTS], rows;
} shape;

static uint64_t weights_of(const shape *s) {
    return (uint64_t)s->experts * (uint64_t)s->n * (uint64_t)s->k;
}
static epo_dtype out_type(const shape *s) {
    return s->kind == EPO_GEMM_WGRAD ? s->c_type : s->type;
}
static uint64_t out_width(const shape *s) {
    return (uint64_t)(s->kind == EPO_GEMM_FORWARD ? s->n : s->k);
}
static uint64_t out_elements(const shape *s) {
    return s->kind == EPO_GEMM_WGRAD ? weights_of(s) : s->rows * out_width(s);
}

static void shape_rows(shape *s, uint64_t *at, int most, bool even) {
    const uint64_t unit = draw(at, 2) ? 16 : 1;
    uint64_t row = even ? 0 : (uint64_t)draw(at, 3) * unit;
    for (int e = 0; e < s->experts; e++) {
        s->row_first[e] = row;
        s->row_count[e] = even ? (uint64_t)most : (uint64_t)(draw(at, 4) ? draw(at, most + 1) : 0);
        row += (s->row_count[e] + unit - 1) / unit * unit;
    }
    s->rows = row + 1;
}

static shape shape_random(uint64_t *at) {
    static const epo_dtype types[] = {EPO_BF16, EPO_BF16, EPO_F16, EPO_F32};
    shape s = {.kind = (epo_gemm_kind)draw(at, 3), .type = types[draw(at, 4)]};
    const int unit = draw(at, 4) ? 8 : 1; /* odd ones are not for the sm_90 kernels */
    s.c_type = draw(at, 2) ? EPO_F32 : s.type;
    s.act = s.kind == EPO_GEMM_FORWARD && draw(at, 2);
    s.n = 2 * unit * draw_spread(at, 320 / unit);
    s.k = unit * draw_spread(at, 640 / unit);
    s.experts = draw_spread(at, 12);
    s.first = draw(at, s.experts);
    s.count = 1 + draw(at, s.experts - s.first);
    shape_rows(&s, at, draw_spread(at, 300), false);
    return s;
}

typedef struct operands {
    void *a, *b, *old, *first, *count;
    float *w;
} operands;

static void *upload_random(uint64_t *at, uint64_t n, epo_dtype type) {
    const uint64_t size = test_size(type);
    void *p = test_device(n * size, 0);
    for (uint64_t done = 0; done < n;) {
        const uint64_t from = (uint64_t)draw(at, POOL / 2) & ~UINT64_C(7);
        const uint64_t part = n - done < POOL / 2 ? n - done : POOL / 2;
        TEST_CUDA(cudaMemcpy((char *)p + done * size, (char *)pool[type] + from * size, part * size,
                             cudaMemcpyHostToDevice));
        done += part;
    }
    return p;
}

static operands operands_make(const shape *s, uint64_t *at) {
    const bool wgrad = s->kind == EPO_GEMM_WGRAD;
    const uint64_t a = s->rows * (uint64_t)(s->kind == EPO_GEMM_FORWARD ? s->k : s->n);
    operands o = {.a = upload_random(at, a, s->type)};
    o.b = upload_random(at, wgrad ? s->rows * (uint64_t)s->k : weights_of(s), s->type);
    o.old = wgrad ? upload_random(at, weights_of(s), s->c_type) : NULL;
    o.w = upload_random(at, s->rows, EPO_F32);
    o.first = test_upload(s->row_first, sizeof s->row_first);
    o.count = test_upload(s->row_count, sizeof s->row_count);
    return o;
}

static void operands_free(operands *o) {
    cudaFree(o->a);
    cudaFree(o->b);
    cudaFree(o->old);
    cudaFree(o->w);
    cudaFree(o->first);
    cudaFree(o->count);
}

static epo_gemm gemm_of(const shape *s, const operands *o, void *c) {
    return (epo_gemm){.kind = s->kind,
                      .a = o->a,
                      .b = o->b,
                      .c = c,
                      .type = s->type,
                      .c_type = s->c_type,
                      .n = s->n,
                      .k = s->k,
                      .row_first = o->first,
                      .row_count = o->count,
                      .first = s->first,
                      .count = s->count,
                      .cpu_first = s->row_first,
                      .cpu_count = s->row_count};
}

/* The way's outputs, on the CPU. */
static bool way_run(way *w, const shape *s, const operands *o) {
    const uint64_t bytes = out_elements(s) * test_size(out_type(s));
    const uint64_t act = s->rows * (uint64_t)s->n / 2 * test_size(s->type);
    void *c = test_device(bytes, 0xff), *a = test_device(s->act ? act : 16, 0xff);
    if (o->old != NULL)
        TEST_CUDA(cudaMemcpy(c, o->old, bytes, cudaMemcpyDeviceToDevice));
    TEST_CUDA(cudaDeviceSynchronize());
    epo_gemm g = gemm_of(s, o, c);
    const epo_swiglu swiglu = {.h = c, .w = o->w, .a = a, .ffn = s->n / 2, .type = s->type};
    epo_deps deps = {.name = "product", .chunk = -1, .signal = w->done};
    g.act = s->act ? &swiglu : NULL;
    epo_status status = ops->gemm(w->queue, &g, &deps);
    if (status == EPO_OK)
        status = ops->sync(w->be, w->done);
    if (status != EPO_OK)
        printf("# %s\n", epo_fail_text());
    w->c = malloc(bytes);
    w->a = s->act ? malloc(act) : NULL;
    TEST_CUDA(cudaMemcpy(w->c, c, bytes, cudaMemcpyDeviceToHost));
    if (s->act)
        TEST_CUDA(cudaMemcpy(w->a, a, act, cudaMemcpyDeviceToHost));
    cudaFree(c);
    cudaFree(a);
    return status == EPO_OK;
}

/* ---- comparing ---- */

static double ulp_of(epo_dtype type) {
    return type == EPO_F32 ? 1.2e-7 : type == EPO_BF16 ? 1.0 / 128 : 1.0 / 1024;
}

static void judge(way *w, double x, double y, double allowed) {
    const double off = fabs(x - y);
    w->elements++;
    w->differ += off != 0;
    w->wrong += !(off <= allowed);
    w->worst = fmax(w->worst, off / allowed);
}

/* Two sums of `length` products of numbers in (-1, 1), each rounded to the type. */
static double allowed_of(epo_dtype type, double x, double y, double length) {
    return 1.01 * ulp_of(type) * fmax(fabs(x), fabs(y)) + 5e-6 * length + 6e-8;
}

static void compare_row(way *w, const shape *s, const float *weight, uint64_t row) {
    const uint64_t width = out_width(s), half = (uint64_t)s->n / 2;
    const double length = s->kind == EPO_GEMM_FORWARD ? s->k : s->n;
    for (uint64_t i = row * width; i < (row + 1) * width; i++) {
        const double x = test_load(w->c, i, s->type), y = test_load(ways[0].c, i, s->type);
        judge(w, x, y, allowed_of(s->type, x, y, length));
    }
    for (uint64_t f = 0; s->act && f < half; f++) {
        const uint64_t i = row * half + f, g = row * 2 * half + f, u = g + half;
        const double x = test_load(w->a, i, s->type), y = test_load(ways[0].a, i, s->type);
        const double gate = test_load(w->c, g, s->type), up = test_load(w->c, u, s->type);
        const double dg = fabs(gate - test_load(ways[0].c, g, s->type));
        const double du = fabs(up - test_load(ways[0].c, u, s->type));
        judge(w, x, y,
              1.01 * ulp_of(s->type) * fmax(fabs(x), fabs(y)) + 6e-8 +
                  fabs((double)weight[row]) *
                      (1.2 * dg * fabs(up) + (fabs(gate) + dg) * du + 8e-6 * fabs(gate * up)));
    }
}

/* cuBLAS's and cuBLASLt's += in a 16-bit type rounds the product before it adds it. */
static void compare_sum(way *w, const shape *s, const void *old, uint64_t i, double length) {
    const double x = test_load(w->c, i, s->c_type), y = test_load(ways[0].c, i, s->c_type);
    const double product = fabs(x - test_load(old, i, s->c_type));
    judge(w, x, y, allowed_of(s->c_type, x, y, length) + 0.51 * ulp_of(s->c_type) * product);
}

static void compare(way *w, const shape *s, const float *weight, const void *old) {
    const uint64_t matrix = (uint64_t)s->n * (uint64_t)s->k;
    for (int e = s->first; e < s->first + s->count; e++) {
        for (uint64_t r = 0; r < s->row_count[e] && s->kind != EPO_GEMM_WGRAD; r++)
            compare_row(w, s, weight, s->row_first[e] + r);
        for (uint64_t i = (uint64_t)e * matrix;
             i < (uint64_t)(e + 1) * matrix && s->kind == EPO_GEMM_WGRAD; i++)
            compare_sum(w, s, old, i, (double)s->row_count[e]);
    }
}

/* `count` elements, `step` elements apart, from element `at` of a device array. */
static void fetch_line(double *out, const void *p, uint64_t at, uint64_t step, uint64_t count,
                       epo_dtype type) {
    const uint64_t size = test_size(type);
    char *line = malloc(count * size + 16);
    TEST_CUDA(cudaMemcpy2D(line, size, (const char *)p + at * size, step * size, size, count,
                           cudaMemcpyDeviceToHost));
    for (uint64_t i = 0; i < count; i++)
        out[i] = test_load(line, i, type);
    free(line);
}

/* The product's element: of row `row` of expert e and column j, or of its weight [i][j]. */
static double exact(const shape *s, const operands *o, int e, uint64_t row, uint64_t i,
                    uint64_t j) {
    const uint64_t n = (uint64_t)s->n, k = (uint64_t)s->k, first = s->row_first[e];
    const uint64_t weights = (uint64_t)e * n * k, length = s->kind == EPO_GEMM_FORWARD ? k
                                                           : s->kind == EPO_GEMM_DGRAD
                                                               ? n
                                                               : s->row_count[e];
    double *x = malloc(length * sizeof *x), *y = malloc(length * sizeof *y), sum = 0;
    if (s->kind == EPO_GEMM_FORWARD) {
        fetch_line(x, o->a, row * k, 1, k, s->type);
        fetch_line(y, o->b, weights + j * k, 1, k, s->type);
    } else if (s->kind == EPO_GEMM_DGRAD) {
        fetch_line(x, o->a, row * n, 1, n, s->type);
        fetch_line(y, o->b, weights + j, k, n, s->type);
    } else {
        fetch_line(x, o->a, first * n + i, n, length, s->type);
        fetch_line(y, o->b, first * k + j, k, length, s->type);
    }
    for (uint64_t l = 0; l < length; l++)
        sum += x[l] * y[l];
    free(y);
    free(x);
    return sum;
}

/* Elements drawn at random, of all ways, against fp64. */
static void sample(const shape *s, const operands *o, const void *old, uint64_t *at) {
    for (int l = 0; l < SAMPLES; l++) {
        const int e = s->first + draw(at, s->count);
        const uint64_t i = (uint64_t)draw(at, s->n), width = out_width(s);
        const uint64_t j = (uint64_t)draw(at, (int)width);
        if (s->row_count[e] == 0)
            continue;
        const uint64_t row = s->row_first[e] + (uint64_t)draw(at, (int)s->row_count[e]);
        const bool wgrad = s->kind == EPO_GEMM_WGRAD;
        const uint64_t element =
            wgrad ? ((uint64_t)e * (uint64_t)s->n + i) * (uint64_t)s->k + j : row * width + j;
        const double want =
            exact(s, o, e, row, i, j) + (wgrad ? test_load(old, element, s->c_type) : 0);
        for (int w = 0; w < WAYS; w++) {
            const double off = test_load(ways[w].c, element, out_type(s)) - want;
            ways[w].off2 += off * off;
            ways[w].sum2 += want * want;
        }
    }
}

/* False: a product could not be made. */
static bool shape_check(const shape *s, uint64_t *at) {
    operands o = operands_make(s, at);
    const uint64_t old_bytes = out_elements(s) * test_size(out_type(s));
    float *weight = malloc(s->rows * sizeof *weight);
    void *old = o.old != NULL ? malloc(old_bytes) : NULL;
    bool ok = true;
    TEST_CUDA(cudaMemcpy(weight, o.w, s->rows * sizeof *weight, cudaMemcpyDeviceToHost));
    if (old != NULL)
        TEST_CUDA(cudaMemcpy(old, o.old, old_bytes, cudaMemcpyDeviceToHost));
    for (int i = 0; i < WAYS; i++) {
        const int before = ways[i].wrong;
        ok = way_run(&ways[i], s, &o) && ok;
        compare(&ways[i], s, weight, old);
        if (ways[i].wrong != before)
            printf("# %s: %s%s %s->%s n %d k %d experts %d+%d of %d rows %llu: %d wrong\n",
                   way_name[i], kind_name[s->kind], s->act ? " SwiGLU" : "", test_type(s->type),
                   test_type(out_type(s)), s->n, s->k, s->first, s->count, s->experts,
                   (unsigned long long)s->rows, ways[i].wrong - before);
    }
    sample(s, &o, old, at);
    for (int i = 0; i < WAYS; i++) {
        free(ways[i].c);
        free(ways[i].a);
    }
    free(old);
    free(weight);
    operands_free(&o);
    return ok;
}

static double way_error(const way *w) { return sqrt(w->off2 / fmax(w->sum2, 1e-30)); }

static void ways_report(const char *what, bool ok) {
    const double theirs = way_error(&ways[0]);
    for (int i = 1; i < WAYS; i++) {
        way *w = &ways[i];
        char name[96], text[192];
        snprintf(name, sizeof name, "%s: %s against cuBLASLt", what, way_name[i]);
        snprintf(text, sizeof text,
                 "%.0f elements, %d wrong, %.2g differ, worst %.2f of allowed; error against fp64 "
                 "%.2e, cuBLASLt's %.2e",
                 w->elements, w->wrong, w->differ / fmax(w->elements, 1), w->worst, way_error(w),
                 theirs);
        test_result(name,
                    ok && w->wrong == 0 && w->elements > 0 && w->sum2 > 0 &&
                        way_error(w) < 1.3 * theirs,
                    text);
    }
    for (int i = 0; i < WAYS; i++) {
        ways[i].wrong = 0;
        ways[i].worst = ways[i].differ = ways[i].elements = ways[i].off2 = ways[i].sum2 = 0;
    }
}

/* The products of a model's layer: hidden, ffn, local experts, rows of each. */
static void model_check(const char *name, int hidden, int ffn, int experts, int rows) {
    uint64_t at = 0;
    bool ok = true;
    for (int i = 0; i < 6; i++) {
        shape s = {.kind = (epo_gemm_kind)(i / 2),
                   .type = EPO_BF16,
                   .c_type = i == 5 ? EPO_F32 : EPO_BF16,
                   .n = i % 2 ? hidden : 2 * ffn,
                   .k = i % 2 ? ffn : hidden,
                   .experts = experts,
                   .count = experts,
                   .act = i == 0};
        shape_rows(&s, &at, rows, i % 2);
        ok = shape_check(&s, &at) && ok;
    }
    ways_report(name, ok);
}

static void check(int shapes) {
    bool ok = true;
    char name[64];
    for (int i = 0; i < shapes; i++) {
        uint64_t at = (uint64_t)i << 24;
        const shape s = shape_random(&at);
        ok = shape_check(&s, &at) && ok;
    }
    snprintf(name, sizeof name, "%d random shapes", shapes);
    ways_report(name, ok);
    model_check("Qwen3-30B-A3B", 2048, 768, 4, 512);
    model_check("DeepSeek-V3", 7168, 2048, 1, 256);
    model_check("Mixtral-8x7B", 4096, 14336, 1, 100);
    model_check("gpt-oss", 2880, 2880, 2, 256);
}

/* ---- times ---- */

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}
static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Medians of a call: GPU time with the same rows again and again, and the CPU's with
 * the same and with fresh ones. */
static void way_time(way *w, shape *s, const operands *o, void *c, double us[3]) {
    double t[3][ROUNDS];
    uint64_t at = 1;
    const shape given = *s;
    for (int r = -1; r < ROUNDS; r++) {
        epo_event *from = NULL, *to = NULL;
        epo_deps deps = {.name = "product", .chunk = -1, .signal = w->done};
        epo_gemm g = gemm_of(s, o, c);
        double seconds = 0, begin = now_us();
        bool ok = ops->mark(w->queue, &from);
        for (int i = 0; i < 3; i++)
            ok = ops->gemm(w->queue, &g, &deps) == EPO_OK && ok;
        const double same = (now_us() - begin) / 3;
        ok = ops->mark(w->queue, &to) && ops->sync(w->be, w->done) == EPO_OK && ok;
        TEST_CUDA(cudaDeviceSynchronize());
        ok = ok && ops->between(w->be, from, to, &seconds);
        /* The CPU's numbers alone: fewer rows than the arrays hold. */
        for (int e = 0; e < s->experts; e++)
            s->row_count[e] -= (uint64_t)draw(&at, (int)given.row_count[e] / 4 + 1);
        begin = now_us();
        ok = ops->gemm(w->queue, &g, &deps) == EPO_OK && ok;
        const double fresh = now_us() - begin;
        ok = ops->sync(w->be, w->done) == EPO_OK && ok;
        memcpy(s->row_count, given.row_count, sizeof s->row_count);
        ops->event_destroy(w->be, from);
        ops->event_destroy(w->be, to);
        if (!ok)
            test_result("a timed product", false, epo_fail_text());
        if (r < 0)
            continue;
        t[0][r] = seconds * 1e6 / 3;
        t[1][r] = same;
        t[2][r] = fresh;
    }
    for (int i = 0; i < 3; i++) {
        qsort(t[i], ROUNDS, sizeof t[i][0], by_value);
        us[i] = t[i][ROUNDS / 2];
    }
}

static void time_shape(epo_gemm_kind kind, int n, int k, int experts, int rows) {
    uint64_t at = 99;
    shape s = {.kind = kind,
               .type = EPO_BF16,
               .c_type = EPO_BF16,
               .n = n,
               .k = k,
               .experts = experts,
               .count = experts};
    shape_rows(&s, &at, rows, true);
    operands o = operands_make(&s, &at);
    void *c = test_device(out_elements(&s) * test_size(out_type(&s)), 0);
    const double flops = 2.0 * n * k * experts * rows;
    printf("%-8s n %5d k %5d, %d x %4d rows:", kind_name[kind], n, k, experts, rows);
    for (int i = 0; i < WAYS; i++) {
        double us[3];
        way_time(&ways[i], &s, &o, c, us);
        printf("  %s %.0f us (%.0f TFLOP/s; CPU %.0f, fresh %.0f)", way_name[i], us[0],
               flops / us[0] * 1e-6, us[1], us[2]);
    }
    printf("\n");
    fflush(stdout);
    cudaFree(c);
    operands_free(&o);
}

static void times(void) {
    static const int rows[] = {512, 128, 16};
    for (int r = 0; r < 3; r++)
        for (int kind = EPO_GEMM_FORWARD; kind <= EPO_GEMM_WGRAD; kind++) {
            time_shape((epo_gemm_kind)kind, 1536, 2048, EXPERTS, rows[r]);
            time_shape((epo_gemm_kind)kind, 2048, 768, EXPERTS, rows[r]);
        }
}

/* ---- */

static bool ways_open(void) {
    const epo_backend_config c = {.rank = 0, .ranks = 1, .timeout_s = 20, .warn_s = 30};
    for (int i = 0; i < WAYS; i++) {
        setenv("EP_OVERLAP_CUDA_GEMM", way_name[i], 1);
        if (ops->open(&c, &ways[i].be) != EPO_OK ||
            ops->queue_create(ways[i].be, EPO_QUEUE_COMPUTE, &ways[i].queue) != EPO_OK ||
            ops->event_create(ways[i].be, &ways[i].done) != EPO_OK) {
            test_result(way_name[i], false, epo_fail_text());
            return false;
        }
        printf("# %s: %s\n", way_name[i], ops->info(ways[i].be)->versions);
    }
    return true;
}

static void refused(void) {
    const epo_backend_config c = {.rank = 0, .ranks = 1, .timeout_s = 20, .warn_s = 30};
    epo_backend *be = NULL;
    setenv("EP_OVERLAP_CUDA_GEMM", "cublastl", 1);
    const bool ok = ops->open(&c, &be) == EPO_E_ARG && be == NULL &&
                    strstr(epo_fail_text(), "cublastl") != NULL &&
                    strstr(epo_fail_text(), "cublaslt") != NULL;
    test_result("an unknown way is refused by name", ok, epo_fail_text());
}

int main(int argc, char **argv) {
    const int shapes = argc > 2 ? (int)strtol(argv[2], NULL, 10) : 300;
    seed = argc > 3 ? strtoull(argv[3], NULL, 0) : (uint64_t)time(NULL);
    ops = epo_backend_get();
    printf("# seed %llu\n", (unsigned long long)seed);
    for (int type = 0; type < 3; type++) {
        pool[type] = malloc((uint64_t)POOL * test_size((epo_dtype)type));
        for (uint64_t i = 0; i < POOL; i++)
            test_store(pool[type], i, (epo_dtype)type, test_uniform(seed, i));
    }
    if (!ways_open())
        return 1;
    if (argc > 1 && strcmp(argv[1], "time") == 0) {
        times();
    } else {
        check(shapes);
        refused();
    }
    for (int i = 0; i < WAYS; i++) {
        ops->event_destroy(ways[i].be, ways[i].done);
        ops->queue_destroy(ways[i].be, ways[i].queue);
        ops->close(ways[i].be, false);
    }
    for (int type = 0; type < 3; type++)
        free(pool[type]);
    return test_failed;
}
