/* SPDX-License-Identifier: Apache-2.0
 *
 * units.c - the CUDA backend's operations against fp64: fresh random inputs, outputs
 * poisoned with NaN, odd and aligned widths, all row types.
 */
#include "gpu_test.h"

#include "backend/backend.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/replay.h"
#include "core/status.h"

#include <pthread.h>
#include <unistd.h>

static const epo_backend_ops *ops;
static epo_backend *be;
static epo_queue *queue;
static epo_event *done;
static uint64_t seed;

static epo_deps deps_of(const char *name) {
    return (epo_deps){.name = name, .kind = EPO_INTERVAL_LOCAL, .chunk = -1, .signal = done};
}

static bool finish(epo_status status) {
    if (status == EPO_OK)
        status = ops->sync(be, done);
    if (status != EPO_OK)
        printf("# %s\n", epo_fail_text());
    return status == EPO_OK;
}

/* Host copy of random elements, kept rounded to the type. */
static void *random_rows(uint64_t n, epo_dtype type) {
    void *p = malloc(n * test_size(type) + 16);
    for (uint64_t i = 0; i < n; i++)
        test_store(p, i, type, test_uniform(seed, i));
    seed++;
    return p;
}

static void *fetch(const void *device, uint64_t bytes) {
    void *p = malloc(bytes + 16);
    TEST_CUDA(cudaMemcpy(p, device, bytes, cudaMemcpyDeviceToHost));
    return p;
}

/* Rows from `own` on are named as the own ones are. */
static void *upload_index(const int32_t *index, int count, int own) {
    int32_t *named = malloc((size_t)count * sizeof *named);
    for (int i = 0; i < count; i++)
        named[i] = index[i] >= own ? -2 - (index[i] - own) : index[i];
    void *p = test_upload(named, (uint64_t)count * sizeof *named);
    free(named);
    return p;
}

/* Every place once; what is nobody's place becomes zeros. */
static void test_spread(int row_bytes, int width) {
    enum { ROWS = 700, TO = 3000 };
    static int32_t place[ROWS * 32], pad[TO], from[TO], free_rows[TO];
    char name[64], *src = malloc((size_t)ROWS * (size_t)row_bytes);
    int left = TO;
    for (int i = 0; i < ROWS * row_bytes; i++)
        src[i] = (char)test_random(seed + 3, (uint64_t)i);
    for (int i = 0; i < TO; i++) {
        free_rows[i] = i;
        pad[i] = from[i] = -1;
    }
    for (int i = 0; i < ROWS * width; i++) {
        place[i] = -1;
        if (left == 0 || test_random(seed + 4, (uint64_t)i) % 3 == 0)
            continue;
        const int at = (int)(test_random(seed + 5, (uint64_t)i) % (uint64_t)left);
        place[i] = free_rows[at];
        free_rows[at] = free_rows[--left];
        pad[place[i]] = place[i];
        from[place[i]] = i / width;
    }
    int32_t index[ROWS / 7];
    for (int i = 0; i < ROWS / 7; i++)
        index[i] = ROWS / 2 + i;
    char *rows = test_upload(src, (uint64_t)ROWS * (uint64_t)row_bytes);
    epo_rows_spread s = {.dst = test_device((uint64_t)TO * (uint64_t)row_bytes, 0xff),
                         .run = {{rows, NULL, 0, ROWS / 2},
                                 {NULL, NULL, 0, 0},
                                 {rows, test_upload(index, sizeof index), ROWS / 2, ROWS / 7},
                                 {rows + (uint64_t)(ROWS / 2 + ROWS / 7) * (uint64_t)row_bytes,
                                  NULL, ROWS / 2 + ROWS / 7, ROWS - ROWS / 2 - ROWS / 7}},
                         .runs = 4,
                         .place = test_upload(place, sizeof(int32_t) * (uint64_t)(ROWS * width)),
                         .width = width,
                         .pad = test_upload(pad, sizeof pad),
                         .dst_rows = TO,
                         .row_bytes = (uint32_t)row_bytes};
    epo_deps deps = deps_of("spread");
    bool ok = finish(ops->spread(queue, &s, &deps));
    char *dst = fetch(s.dst, (uint64_t)TO * (uint64_t)row_bytes);
    char *zero = calloc(1, (size_t)row_bytes);
    for (int i = 0; i < TO && ok; i++)
        ok = memcmp(dst + (size_t)i * (size_t)row_bytes,
                    from[i] < 0 ? zero : src + (size_t)from[i] * (size_t)row_bytes,
                    (size_t)row_bytes) == 0;
    snprintf(name, sizeof name, "spread %d bytes to %d places", row_bytes, width);
    test_result(name, ok, "");
    free(zero);
    free(dst);
    free(src);
    cudaFree(s.dst);
    cudaFree(rows);
    cudaFree((void *)(uintptr_t)s.run[2].index);
    cudaFree((void *)(uintptr_t)s.place);
    cudaFree((void *)(uintptr_t)s.pad);
}

static void test_gather(epo_dtype type, int width) {
    const int rows = 1000, from = 333;
    const uint64_t size = test_size(type);
    int32_t *index = malloc((size_t)rows * sizeof *index);
    char name[64];
    for (int i = 0; i < rows; i++)
        index[i] = (int32_t)(test_random(seed, (uint64_t)i) % (uint64_t)(from + 1)) - 1;
    char *src = random_rows((uint64_t)from * (uint64_t)width, type);
    void *d_src = test_upload(src, (uint64_t)from * (uint64_t)width * size);
    void *d_index = upload_index(index, rows, from / 2);
    void *d_dst = test_device((uint64_t)rows * (uint64_t)width * size, 0xff);
    epo_rows_gather g = {.dst = d_dst,
                         .src = d_src,
                         .index = d_index,
                         .rows = (uint64_t)rows,
                         .row_bytes = (uint32_t)((uint64_t)width * size),
                         .own = (char *)d_src + (uint64_t)(from / 2 * width) * size};
    epo_deps deps = deps_of("gather");
    bool ok = finish(ops->gather(queue, &g, &deps));
    char *dst = fetch(d_dst, (uint64_t)rows * (uint64_t)width * size);
    char *zero = calloc((size_t)width, size);
    for (int i = 0; i < rows && ok; i++)
        ok = memcmp(dst + (uint64_t)i * (uint64_t)width * size,
                    index[i] < 0 ? zero : src + (uint64_t)index[i] * (uint64_t)width * size,
                    (size_t)width * size) == 0;
    snprintf(name, sizeof name, "gather %s width %d", test_type(type), width);
    test_result(name, ok, "");
    free(zero);
    free(dst);
    free(src);
    free(index);
    cudaFree(d_dst);
    cudaFree(d_index);
    cudaFree(d_src);
}

/* The same sums on their way into a window, in two segments and a plain one behind them:
 * bit for bit what reduce made. */
static void test_sums(const epo_rows_reduce *r) {
    const uint64_t row = (uint64_t)r->elements * test_size(r->type), half = r->rows / 3;
    epo_window *w = NULL;
    char name[64];
    if (!ops->info(be)->sums || row % 16 != 0 || r->width > 32)
        return;
    bool ok = ops->window_create(be, 2 * r->rows * row + 4096, &w) == EPO_OK;
    char *local = ops->window_local(w);
    TEST_CUDA(cudaMemset(local, 0xff, 2 * r->rows * row));
    epo_segment s[] = {
        {.src = r->src,
         .index = r->index,
         .dst_offset = 4096,
         .rows = half,
         .row_bytes = (uint32_t)row,
         .sum = r->width,
         .type = r->type},
        {.src = r->src,
         .index = r->index + half * (uint64_t)r->width,
         .dst_offset = 4096 + half * row,
         .rows = r->rows - half,
         .row_bytes = (uint32_t)row,
         .sum = r->width,
         .type = r->type},
        {.src = r->src, .dst_offset = 4096 + r->rows * row, .rows = 7, .row_bytes = (uint32_t)row},
    };
    epo_exchange x = {.window = w, .send = s, .nsend = 3, .flag_offset = 0, .epoch = 1};
    epo_deps deps = deps_of("combine");
    ok = ok && finish(ops->exchange(queue, &x, &deps));
    void *want = fetch(r->dst, r->rows * row), *got = fetch(local + 4096, (r->rows + 7) * row);
    void *rows = fetch(r->src, 7 * row);
    ok = ok && memcmp(want, got, r->rows * row) == 0 &&
         memcmp(rows, (char *)got + r->rows * row, 7 * row) == 0;
    snprintf(name, sizeof name, "sums on the way %s %d x %d", test_type(r->type), r->elements,
             r->width);
    test_result(name, ok, "bit for bit as reduce");
    free(rows);
    free(got);
    free(want);
    ops->window_destroy(be, w);
}

/* Rows to the wire and back, some of them `own`, some zeros. */
static void test_wire(epo_dtype type, int elements) {
    enum { ROWS = 50, OUT = 90 };
    const uint64_t n = (uint64_t)elements, row = n * test_size(type), wire = epo_wire_bytes(n);
    char name[64], text[64];
    int32_t index[OUT];
    int wrong = 0;
    double worst = 0;
    for (int i = 0; i < OUT; i++)
        index[i] = i % 9 == 0 ? -1
                   : i % 2    ? (int32_t)(test_random(seed, (uint64_t)i) % ROWS)
                              : -2 - (int32_t)(test_random(seed, (uint64_t)i) % ROWS);
    void *x = random_rows(ROWS * n, type);
    for (uint64_t i = 0; i < 8 * n; i++) /* tiny, every other one zero: what underflowed */
        test_store(x, i, type, i % 2 ? 0 : ldexpf(test_uniform(seed, i), -104 - 3 * (int)(i / n)));
    void *d_x = test_upload(x, ROWS * row), *d_wire = test_device(ROWS * wire, 0xff);
    void *d_index = test_upload(index, sizeof index), *d_out = test_device(OUT * row, 0xff);
    epo_wire_pack pack = {d_wire, d_x, ROWS, elements, type};
    epo_rows_gather g = {.dst = d_out,
                         .src = d_wire,
                         .own = d_wire,
                         .index = d_index,
                         .rows = OUT,
                         .row_bytes = (uint32_t)row,
                         .wire = elements,
                         .type = type};
    epo_deps deps = deps_of("wire");
    bool ok = finish(ops->wire_pack(queue, &pack, &deps)) && finish(ops->gather(queue, &g, &deps));
    void *out = fetch(d_out, OUT * row);
    for (int i = 0; i < OUT; i++)
        for (uint64_t c = 0; c < n; c++) {
            const uint64_t from = (uint64_t)(index[i] >= 0 ? index[i] : -2 - index[i]) * n;
            const double got = test_load(out, (uint64_t)i * n + c, type);
            double most = 0;
            for (uint64_t j = c / 128 * 128; j < c / 128 * 128 + 128 && index[i] != -1; j++)
                most = fmax(most, fabs(test_load(x, from + j, type)));
            const double want = index[i] == -1 ? 0 : test_load(x, from + c, type);
            const double off = fabs(got - want);
            most = index[i] == -1 ? 0 : fmax(most, EPO_WIRE_LEAST);
            worst = fmax(worst, most > 0 ? off / most : off);
            wrong += !(off <= fmax(fabs(want) * (1.0 / 16 + 1.0 / 128), most / 1024));
        }
    snprintf(name, sizeof name, "e4m3 %s x %d", test_type(type), elements);
    snprintf(text, sizeof text, "%d wrong, error %.2e of the largest", wrong, worst);
    test_result(name, ok && wrong == 0, text);
    free(out);
    free(x);
    cudaFree(d_out);
    cudaFree(d_index);
    cudaFree(d_wire);
    cudaFree(d_x);
}

static void test_reduce(epo_dtype type, int elements, int width) {
    const int rows = 500, from = 700;
    const uint64_t n = (uint64_t)rows * (uint64_t)elements, size = test_size(type);
    int32_t *index = malloc((size_t)rows * (size_t)width * sizeof *index);
    char name[64], text[64];
    for (int i = 0; i < rows * width; i++)
        index[i] = (int32_t)(test_random(seed, (uint64_t)i) % (uint64_t)(from + 40)) - 40;
    for (int i = 0; i < rows * width; i++)
        index[i] = index[i] < 0 ? -1 : index[i];
    void *src = random_rows((uint64_t)from * (uint64_t)elements, type);
    void *d_src = test_upload(src, (uint64_t)from * (uint64_t)elements * size);
    void *d_index = upload_index(index, rows * width, from / 2);
    void *d_dst = test_device(n * size, 0xff);
    epo_rows_reduce r = {.dst = d_dst,
                         .src = d_src,
                         .index = d_index,
                         .rows = (uint64_t)rows,
                         .width = width,
                         .elements = elements,
                         .type = type,
                         .own = (char *)d_src + (uint64_t)(from / 2 * elements) * size};
    epo_deps deps = deps_of("reduce");
    bool ok = finish(ops->reduce(queue, &r, &deps));
    epo_rows_reduce plain = r; /* rows of `own` by their number in src */
    plain.index = test_upload(index, (uint64_t)rows * (uint64_t)width * sizeof *index);
    test_sums(&plain);
    cudaFree((void *)(uintptr_t)plain.index);
    double *want = calloc(n, sizeof *want);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j++)
            for (int c = 0; index[i * width + j] >= 0 && c < elements; c++)
                want[i * elements + c] += test_load(
                    src, (uint64_t)index[i * width + j] * (uint64_t)elements + (uint64_t)c, type);
    void *dst = fetch(d_dst, n * size);
    const double error = test_error(dst, want, n, type);
    snprintf(name, sizeof name, "reduce %s %d x %d", test_type(type), elements, width);
    snprintf(text, sizeof text, "error %.2e", error);
    test_result(name, ok && error < test_limit(type), text);
    free(dst);
    free(want);
    free(src);
    free(index);
    cudaFree(d_dst);
    cudaFree(d_index);
    cudaFree(d_src);
}

typedef struct swiglu_want {
    double *a, *dh, *dw;
} swiglu_want;

static void swiglu_reference(const void *h, const void *da, const float *w, int rows, int ffn,
                             epo_dtype type, swiglu_want *out) {
    for (int r = 0; r < rows; r++)
        for (int f = 0; f < ffn; f++) {
            const uint64_t at = (uint64_t)r * (uint64_t)ffn + (uint64_t)f;
            const uint64_t gate = (uint64_t)r * 2 * (uint64_t)ffn + (uint64_t)f;
            const double g = test_load(h, gate, type), u = test_load(h, gate + (uint64_t)ffn, type);
            const double d = test_load(da, at, type), s = 1 / (1 + exp(-g));
            out->a[at] = w[r] * g * s * u;
            out->dh[gate] = w[r] != 0 ? d * w[r] * u * s * (1 + g * (1 - s)) : 0;
            out->dh[gate + (uint64_t)ffn] = w[r] != 0 ? d * w[r] * g * s : 0;
            out->dw[r] += d * g * s * u;
        }
}

/* Row 3 has weight 0 and holds NaN: an alignment row. */
static void test_swiglu(epo_dtype type, int ffn, bool in_place) {
    enum { ROWS = 77, BAD = 3 };
    const uint64_t n = (uint64_t)ROWS * (uint64_t)ffn, size = test_size(type);
    void *h = random_rows(2 * n, type), *da = random_rows(n, type);
    float w[ROWS];
    char name[80], text[96];
    for (int r = 0; r < ROWS; r++)
        w[r] = r == BAD ? 0 : test_uniform(seed, (uint64_t)r);
    swiglu_want want = {calloc(n, sizeof(double)), calloc(2 * n, sizeof(double)),
                        calloc(ROWS, sizeof(double))};
    swiglu_reference(h, da, w, ROWS, ffn, type, &want);
    memset(want.a + (size_t)BAD * (size_t)ffn, 0, (size_t)ffn * sizeof(double));
    void *d_h = test_upload(h, 2 * n * size), *d_da = test_upload(da, n * size);
    TEST_CUDA(cudaMemset((char *)d_h + (uint64_t)BAD * 2 * (uint64_t)ffn * size, 0xff,
                         2 * (uint64_t)ffn * size));
    float *d_w = test_upload(w, sizeof w), *d_dw = test_device(sizeof w, 0xff);
    void *d_a = test_device(n * size, 0xff);
    void *d_dh = in_place ? d_h : test_device(2 * n * size, 0xff);
    void *d_a2 = in_place ? d_da : test_device(n * size, 0xff);
    epo_swiglu forward = {.h = d_h, .w = d_w, .a = d_a, .rows = ROWS, .ffn = ffn, .type = type};
    epo_swiglu backward = {d_h, d_w, d_a2, d_da, d_dh, d_dw, 0, ROWS, ffn, type};
    epo_deps deps = deps_of("swiglu");
    bool ok =
        finish(ops->swiglu(queue, &forward, &deps)) && finish(ops->swiglu(queue, &backward, &deps));
    void *a = fetch(d_a, n * size), *a2 = fetch(d_a2, n * size), *dh = fetch(d_dh, 2 * n * size);
    float *dw = fetch(d_dw, sizeof w);
    dw[BAD] = 0;
    want.dw[BAD] = 0;
    const double ea = test_error(a, want.a, n, type), eh = test_error(dh, want.dh, 2 * n, type);
    const double ew = test_error(dw, want.dw, ROWS, EPO_F32);
    snprintf(name, sizeof name, "swiglu %s ffn %d%s", test_type(type), ffn,
             in_place ? " in place" : "");
    snprintf(text, sizeof text, "a %.1e dh %.1e dw %.1e", ea, eh, ew);
    test_result(name,
                ok && ea < test_limit(type) && eh < test_limit(type) && ew < 1e-5 &&
                    memcmp(a, a2, n * size) == 0,
                text);
    free(dw);
    free(dh);
    free(a2);
    free(a);
    free(want.a);
    free(want.dh);
    free(want.dw);
    free(da);
    free(h);
    cudaFree(d_a);
    cudaFree(d_w);
    cudaFree(d_dw);
    cudaFree(d_h);
    cudaFree(d_da);
    if (!in_place) {
        cudaFree(d_dh);
        cudaFree(d_a2);
    }
}

/* ---- GEMM ---- */

enum { EXPERTS = 5 };
static const uint64_t gemm_count[EXPERTS] = {33, 0, 1, 128, 57};

static void gemm_reference(const epo_gemm *g, const void *a, const void *b, double *c) {
    const uint64_t n = (uint64_t)g->n, k = (uint64_t)g->k;
    for (int e = 0; e < EXPERTS; e++)
        for (uint64_t r = g->row_first[e]; r < g->row_first[e] + g->row_count[e]; r++)
            for (uint64_t i = 0; i < n; i++)
                for (uint64_t j = 0; j < k; j++) {
                    const uint64_t weight = ((uint64_t)e * n + i) * k + j;
                    if (g->kind == EPO_GEMM_FORWARD)
                        c[r * n + i] +=
                            test_load(a, r * k + j, g->type) * test_load(b, weight, g->type);
                    else if (g->kind == EPO_GEMM_DGRAD)
                        c[r * k + j] +=
                            test_load(a, r * n + i, g->type) * test_load(b, weight, g->type);
                    else
                        c[weight] +=
                            test_load(a, r * n + i, g->type) * test_load(b, r * k + j, g->type);
                }
}

static void test_gemm(epo_gemm_kind kind, epo_dtype type, epo_dtype c_type, int n, int k) {
    static const char *const kinds[] = {"forward", "dgrad", "wgrad"};
    uint64_t first[EXPERTS], rows = 0;
    char name[80], text[64];
    for (int e = 0; e < EXPERTS; e++) {
        first[e] = rows;
        rows += (gemm_count[e] + 15) / 16 * 16;
    }
    const uint64_t weights = (uint64_t)EXPERTS * (uint64_t)n * (uint64_t)k;
    const uint64_t na = rows * (uint64_t)(kind == EPO_GEMM_FORWARD ? k : n);
    const uint64_t nb = kind == EPO_GEMM_WGRAD ? rows * (uint64_t)k : weights;
    const uint64_t nc =
        kind == EPO_GEMM_WGRAD ? weights : rows * (uint64_t)(kind == EPO_GEMM_FORWARD ? n : k);
    const epo_dtype out = kind == EPO_GEMM_WGRAD ? c_type : type;
    void *a = random_rows(na, type), *b = random_rows(nb, type), *c = random_rows(nc, out);
    double *want = calloc(nc, sizeof *want);
    void *d_a = test_upload(a, na * test_size(type)), *d_b = test_upload(b, nb * test_size(type));
    void *d_c = kind == EPO_GEMM_WGRAD ? test_upload(c, nc * test_size(out))
                                       : test_device(nc * test_size(out), 0xff);
    void *d_first = test_upload(first, sizeof first);
    void *d_count = test_upload(gemm_count, sizeof gemm_count);
    epo_gemm g = {.kind = kind, .type = type, .c_type = c_type, .n = n, .k = k};
    g.row_first = first;
    g.row_count = gemm_count;
    gemm_reference(&g, a, b, want);
    for (uint64_t i = 0; kind == EPO_GEMM_WGRAD && i < nc; i++)
        want[i] += test_load(c, i, out); /* += */
    g.a = d_a;
    g.b = d_b;
    g.c = d_c;
    g.row_first = d_first;
    g.row_count = d_count;
    g.cpu_first = first;
    g.cpu_count = gemm_count;
    g.count = EXPERTS;
    epo_deps deps = deps_of("gemm");
    bool ok = finish(ops->gemm(queue, &g, &deps));
    void *got = fetch(d_c, nc * test_size(out));
    /* Alignment rows are nobody's. */
    for (int e = 0; e < EXPERTS && kind != EPO_GEMM_WGRAD; e++) {
        const uint64_t w = nc / rows, end = e + 1 < EXPERTS ? first[e + 1] : rows;
        for (uint64_t i = (first[e] + gemm_count[e]) * w; i < end * w; i++)
            test_store(got, i, out, 0);
    }
    const double error = test_error(got, want, nc, out);
    snprintf(name, sizeof name, "gemm %s %s->%s %dx%d", kinds[kind], test_type(type),
             test_type(out), n, k);
    snprintf(text, sizeof text, "error %.2e", error);
    test_result(name, ok && error < (type == EPO_F32 ? 1e-5 : 1e-2), text);
    free(got);
    free(want);
    free(c);
    free(b);
    free(a);
    cudaFree(d_a);
    cudaFree(d_b);
    cudaFree(d_c);
    cudaFree(d_first);
    cudaFree(d_count);
}

/* ---- waits ---- */

typedef struct late_rank {
    epo_world *world;
    int rank;
    epo_status status;
    char text[512];
} late_rank;

/* Rank 0 waits for rank 1, which does nothing: both end, in time, by name. */
static void *late_main(void *ctx) {
    late_rank *r = ctx;
    epo_backend *mine = NULL;
    epo_queue *q = NULL;
    epo_event *e = NULL;
    epo_window *w = NULL;
    epo_backend_config c = {
        .rank = r->rank, .ranks = 2, .threads = r->world, .timeout_s = 1.0, .warn_s = 30.0};
    TEST_CUDA(cudaSetDevice(0));
    r->status = ops->open(&c, &mine);
    if (r->status == EPO_OK)
        r->status = ops->queue_create(mine, EPO_QUEUE_COMM, &q);
    if (r->status == EPO_OK)
        r->status = ops->event_create(mine, &e);
    if (r->status == EPO_OK)
        r->status = ops->window_create(mine, 1 << 20, &w);
    if (r->status == EPO_OK && r->rank == 0) {
        epo_deps deps = {.name = "dispatch", .chunk = 3, .signal = e, .nwait = 1};
        deps.wait[0] = (epo_ready){NULL, ops->window_local(w), 1, 2, -1, "dispatch", 3, 0, 0, NULL};
        r->status = ops->zero(q, (char *)ops->window_local(w) + 4096, 4096, &deps);
        if (r->status == EPO_OK)
            r->status = ops->sync(mine, e);
    } else if (r->status == EPO_OK) {
        for (int i = 0; i < 400 && r->status == EPO_OK; i++) {
            usleep(10000);
            r->status = ops->status(mine);
        }
    }
    snprintf(r->text, sizeof r->text, "%s", epo_fail_text());
    ops->window_destroy(mine, w);
    ops->queue_destroy(mine, q);
    ops->event_destroy(mine, e);
    ops->close(mine, true);
    return NULL;
}

static void test_late(const char *mode) {
    late_rank r[2];
    pthread_t t[2];
    char name[64];
    epo_world *world = NULL;
    setenv("EP_OVERLAP_CUDA_WAIT", mode, 1);
    if (ops->world_create(2, &world) != EPO_OK) {
        test_result("late", false, epo_fail_text());
        return;
    }
    for (int i = 0; i < 2; i++) {
        r[i] = (late_rank){.world = world, .rank = i};
        pthread_create(&t[i], NULL, late_main, &r[i]);
    }
    for (int i = 0; i < 2; i++)
        pthread_join(t[i], NULL);
    ops->world_destroy(world);
    unsetenv("EP_OVERLAP_CUDA_WAIT");
    snprintf(name, sizeof name, "a peer that is late, %s waits", mode);
    test_result(name,
                r[0].status == EPO_E_TIMEOUT && r[1].status == EPO_E_TIMEOUT &&
                    strstr(r[0].text, "dispatch chunk 3") != NULL &&
                    strstr(r[0].text, "rank 0, 1") != NULL && strcmp(r[0].text, r[1].text) == 0,
                r[0].text);
}

/* Rows by the kernel that raises flags: an index of -1 makes zeros, one of -2 leaves the row as
 * it is; where the backend is late nothing is stored and nobody told. */
static void test_segments(uint32_t row_bytes, bool late) {
    enum { ROWS = 300, FROM = 97, RANKS = 2 };
    int32_t index[ROWS];
    char name[80];
    const uint64_t bytes = (uint64_t)ROWS * row_bytes, counter = 5;
    const uint32_t is_late[1] = {late};
    char *src = malloc((size_t)FROM * row_bytes), *want = malloc(bytes);
    for (uint64_t i = 0; i < (uint64_t)FROM * row_bytes; i++)
        src[i] = (char)test_random(seed + 7, i);
    memset(want, 0x5a, bytes);
    for (int i = 0; i < ROWS; i++) {
        index[i] = (int32_t)(test_random(seed + 8, (uint64_t)i) % (FROM + 40)) - 40;
        index[i] = index[i] < 0 ? index[i] < -20 ? -2 : -1 : index[i];
        char *row = want + (uint64_t)i * row_bytes;
        if (index[i] >= 0 && !late)
            memcpy(row, src + (size_t)index[i] * row_bytes, row_bytes);
        else if (index[i] == -1 && !late)
            memset(row, 0, row_bytes);
    }
    char *d_src = test_upload(src, (uint64_t)FROM * row_bytes), *d_dst = test_device(bytes, 0x5a);
    uint64_t *d_words = test_device(RANKS * 3 * 8, 0);
    const gpu_segment segment = {d_dst, d_src, test_upload(index, sizeof index), ROWS};
    gpu_raise raise = {.words = d_words,
                       .rank_step = 3,
                       .epoch = 3,
                       .counter = test_upload(&counter, sizeof counter),
                       .late = test_upload(is_late, sizeof is_late),
                       .stored = test_device(GPU_PARTS * 4, 0),
                       .ranks = RANKS,
                       .parts = 2};
    raise.part[0].end = ROWS / 3;
    raise.part[1].end = ROWS;
    raise.part[1].word = 1;
    bool ok =
        gpu_kernel_segments(0, 4, &segment, 1, row_bytes, &raise) == cudaSuccess &&
        gpu_kernel_tell(0, d_words + 2, 3, RANKS, raise.counter, 7, raise.late) == cudaSuccess;
    char *dst = fetch(d_dst, bytes);
    uint64_t *words = fetch(d_words, RANKS * 3 * 8);
    ok = ok && memcmp(dst, want, bytes) == 0;
    for (int i = 0; i < RANKS * 3; i++)
        ok = ok && words[i] == (late ? 0 : i % 3 == 2 ? 12u : 8u);
    snprintf(name, sizeof name, "rows of %u bytes and flags%s", row_bytes,
             late ? ", late: nothing, nobody told" : "");
    test_result(name, ok, "");
    void *device[] = {d_src,
                      d_dst,
                      d_words,
                      (void *)segment.index,
                      (void *)raise.counter,
                      (void *)raise.late,
                      raise.stored};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        cudaFree(device[i]);
    free(src);
    free(want);
    free(dst);
    free(words);
}

static void test_refused(void) {
    epo_window *w = NULL;
    bool ok = ops->window_create(be, 4096, &w) == EPO_OK;
    epo_segment s = {
        .src = ops->window_local(w), .dst_offset = UINT64_C(1) << 40, .rows = 4, .row_bytes = 16};
    epo_exchange x = {.window = w, .send = &s, .nsend = 1, .flag_offset = 0, .epoch = 1};
    epo_deps deps = deps_of("dispatch");
    ok = ok && ops->exchange(queue, &x, &deps) == EPO_E_ARG;
    test_result("a segment past the window is refused", ok, epo_fail_text());
    void *p = NULL;
    ok = ops->alloc(be, UINT64_C(1) << 50, &p) == EPO_E_NOMEM && p == NULL &&
         strstr(epo_fail_text(), "need 1125899906842624") != NULL;
    test_result("too much memory: need and have", ok, epo_fail_text());
    ops->window_destroy(be, w);
}

/* A value that is none is refused by name, whatever else would have come of it. */
static void test_switches(void) {
    static const char *const wrong[][2] = {
        {"WAIT", "gpu"},    {"GEMM", "cutlass"}, {"SMS", "1"},    {"SMS", "12x"},
        {"CHAIN", "no"},    {"DIRECT", "2"},     {"KEEP", "yes"}, {"SUMS", "-1"},
        {"NEAR", "3MB"},    {"SMALL", "-1"},     {"WAY", "ways"}, {"PACK_SMS", "0"},
        {"LEND", "100000"}, {"PEER", "off"},     {"NEAR", "1e6"}, {"SMALL", "99999999999999"},
    };
    const epo_backend_config c = {.rank = 0, .ranks = 1, .timeout_s = 5, .warn_s = 30};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char name[64], title[96], found[64];
        epo_backend *none = NULL;
        snprintf(name, sizeof name, "EP_OVERLAP_CUDA_%s", wrong[i][0]);
        snprintf(title, sizeof title, "%s=%s is refused", name, wrong[i][1]);
        snprintf(found, sizeof found, "found '%s', allowed", wrong[i][1]);
        setenv(name, wrong[i][1], 1);
        const epo_status status = ops->open(&c, &none);
        test_result(title,
                    status == EPO_E_ARG && none == NULL && strstr(epo_fail_text(), name) != NULL &&
                        strstr(epo_fail_text(), found) != NULL,
                    status == EPO_OK ? "it is not" : epo_fail_text());
        if (status == EPO_OK)
            ops->close(none, false);
        unsetenv(name);
    }
}

int main(void) {
    static const epo_dtype types[] = {EPO_F32, EPO_BF16, EPO_F16};
    ops = epo_backend_get();
    FILE *random = fopen("/dev/urandom", "r");
    if (random == NULL || fread(&seed, sizeof seed, 1, random) != 1)
        seed = 1;
    if (random != NULL)
        fclose(random);
    printf("# seed %llu\n", (unsigned long long)seed);
    epo_backend_config c = {.rank = 0, .ranks = 1, .timeout_s = 5, .warn_s = 30};
    if (ops->open(&c, &be) != EPO_OK ||
        ops->queue_create(be, EPO_QUEUE_COMPUTE, &queue) != EPO_OK ||
        ops->event_create(be, &done) != EPO_OK) {
        test_result("open", false, epo_fail_text());
        return 1;
    }
    printf("# %s\n", ops->info(be)->versions);
    for (int t = 0; t < 3; t++) {
        test_spread(t == 0 ? 4096 : t == 1 ? 1236 : 6 * 13, t == 0 ? 8 : t == 1 ? 32 : 1);
        test_gather(types[t], 7);
        test_gather(types[t], 2048);
        test_reduce(types[t], 2048, 8);
        test_reduce(types[t], 33, 3);
        test_reduce(types[t], 64, 40);
        test_reduce(types[t], 7168, 32);
        test_reduce(types[t], 136, 1);
        test_wire(types[t], 128);
        test_wire(types[t], 2048);
        test_wire(types[t], 7168);
        test_swiglu(types[t], 768, false);
        test_swiglu(types[t], 33, true);
        for (int kind = EPO_GEMM_FORWARD; kind <= EPO_GEMM_WGRAD; kind++) {
            test_gemm((epo_gemm_kind)kind, types[t], types[t], 96, 64);
            test_gemm((epo_gemm_kind)kind, types[t], EPO_F32, 31, 17);
        }
    }
    for (int i = 0; i < 6; i++)
        test_segments(i % 3 == 0 ? 4096 : i % 3 == 1 ? 36 : 13, i / 3 > 0);
    test_refused();
    test_switches();
    test_late("host");
    test_late("stream");
    ops->event_destroy(be, done);
    ops->queue_destroy(be, queue);
    ops->close(be, false);
    return test_failed;
}
