/* SPDX-License-Identifier: Apache-2.0
 *
 * test_grouped_gemm.cu - the grouped GEMM against fp64 on random shapes, with
 * poisoned outputs and padding, and bit for bit against itself under other SM
 * budgets, expert ranges, launches and arrival orders.
 *
 *   test_grouped_gemm [--cases N] [--seed S] [--only I]
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gg_reference.cuh"

constexpr int kMaxExperts = 24;
constexpr int kMaxRows = 2304;
constexpr int kMaxDim = 640;
constexpr int kBlocks = 528;

/* ---- one case ---- */
static uint64_t type_size(int type) { return type == EPO_F32 ? 4 : 2; }
struct buffers {
    void *a, *b, *c, *old, *again, *h, *act, *act_again, *kept;
    float *weight, *dweight, *dweight_again;
    int32_t *a_index, *b_index;
    uint64_t *first, *count, *flags;
    int64_t *ref_first, *ref_count;
    int *owner, *touched, *unit;
    double *dot, *size;
    ref::verdict *verdict;
    unsigned *differ;
    uint32_t *error;
    uint64_t *spin;
    void *ws;
    uint64_t ws_bytes;
};

template <class T> static void get_memory(T **p, uint64_t bytes) {
    CHECK(cudaMalloc((void **)p, bytes));
}
static void buffers_make(buffers *d) {
    const uint64_t rows = (uint64_t)kMaxRows * kMaxDim * 4 * 2,
                   weights = (uint64_t)kMaxExperts * kMaxDim * kMaxDim * 4;
    get_memory(&d->a, rows);
    get_memory(&d->b, weights);
    get_memory(&d->c, weights);
    get_memory(&d->old, weights);
    get_memory(&d->again, weights);
    get_memory(&d->h, rows);
    get_memory(&d->act, rows);
    get_memory(&d->act_again, rows);
    get_memory(&d->kept, rows);
    get_memory(&d->weight, kMaxRows * 4);
    get_memory(&d->dweight, kMaxRows * 4);
    get_memory(&d->dweight_again, kMaxRows * 4);
    get_memory(&d->a_index, kMaxRows * 4);
    get_memory(&d->b_index, kMaxRows * 4);
    get_memory(&d->first, kMaxExperts * 8);
    get_memory(&d->count, kMaxExperts * 8);
    get_memory(&d->flags, kMaxRows * 8 * 4);
    get_memory(&d->ref_first, kMaxExperts * 8);
    get_memory(&d->ref_count, kMaxExperts * 8);
    get_memory(&d->owner, kMaxRows * 4);
    get_memory(&d->touched, kMaxExperts * 4);
    get_memory(&d->unit, kMaxRows * 4);
    get_memory(&d->dot, (uint64_t)kMaxExperts * kMaxDim * kMaxDim * 8);
    get_memory(&d->size, (uint64_t)kMaxExperts * kMaxDim * kMaxDim * 8);
    get_memory(&d->verdict, sizeof(ref::verdict));
    get_memory(&d->differ, 4);
    get_memory(&d->error, 4);
    get_memory(&d->spin, 8);
    d->ws_bytes = 8 << 20;
    get_memory(&d->ws, d->ws_bytes);
}

struct test_case {
    epo_gg g;
    int seed;
    uint64_t first[kMaxExperts], count[kMaxExperts];
    int owner[kMaxRows]; /* -1: padding or an expert outside the call */
    int32_t a_index[kMaxRows], b_index[kMaxRows];
    int touched[kMaxExperts];
    int a_width, b_width, c_width;
};

static int draw_count(dice *r, int style, int e, int experts) {
    static const int primes[] = {2, 3, 17, 61, 67, 127, 131, 191, 257};
    switch (style) {
    case 0: return r->upto(160);
    case 1: return r->chance(50) ? 0 : r->upto(90);
    case 2: return 1;
    case 3: return primes[r->upto(8)];
    case 4: return (int)(1200 / (e + 1.0) / (1.0 + log((double)experts))); /* Zipf 1.0 */
    case 5: return e == experts / 2 ? 700 + r->upto(700) : 0;
    default: return 128 * r->upto(2);
    }
}

/* Experts one behind the other, with gaps; owner and index follow. */
static void draw_rows(dice *r, test_case *t) {
    epo_gg *g = &t->g;
    int style = r->upto(6);
    static const int aligns[] = {1, 1, 16, 128};
    int align = aligns[r->upto(3)];
    uint64_t at = r->chance(50) ? 0 : (uint64_t)r->upto(40);
    for (int e = 0; e < g->experts; e++) {
        at = (at + (uint64_t)align - 1) / (uint64_t)align * (uint64_t)align;
        uint64_t count = (uint64_t)draw_count(r, style, e, g->experts);
        count = at + count > 1800 ? 0 : count; /* leaves room for gaps */
        t->first[e] = at;
        t->count[e] = count;
        at += count + (count > 0 && r->chance(30) ? (uint64_t)r->upto(9) : 0);
    }
    g->rows = at + (r->chance(50) ? 0 : (uint64_t)r->upto(20));
    for (uint64_t i = 0; i < g->rows; i++) {
        t->owner[i] = -1;
        t->a_index[i] = t->b_index[i] = 0x7ffffff0; /* nothing may follow it */
    }
    for (int e = g->first; e < g->first + g->count; e++) {
        t->touched[e] = 1;
        for (uint64_t i = 0; i < t->count[e]; i++) {
            t->owner[t->first[e] + i] = e;
            t->a_index[t->first[e] + i] = r->chance(3) ? -1 : r->upto((int)g->a_rows - 1);
            t->b_index[t->first[e] + i] = r->chance(3) ? -1 : r->upto((int)g->b_rows - 1);
        }
    }
}

static void draw_case(dice *r, test_case *t, int seed, bool sm90) {
    static const epo_dtype types[] = {EPO_BF16, EPO_BF16, EPO_BF16, EPO_F16, EPO_F32};
    epo_gg *g = &t->g;
    memset(t, 0, sizeof(*t));
    t->seed = seed;
    *g = (epo_gg)EPO_GG_INIT;
    g->kind = (epo_gg_kind)r->upto(2);
    g->fuse = g->kind != EPO_GG_WGRAD && r->chance(50) ? EPO_GG_SWIGLU : EPO_GG_PLAIN;
    g->path = sm90 && !r->chance(20) ? EPO_GG_SM90 : EPO_GG_PORTABLE;
    g->type = types[r->upto(g->path == EPO_GG_SM90 ? 3 : 4)];
    g->c_type = r->chance(50) ? EPO_F32 : g->type;
    g->accumulate = r->chance(50);
    bool gated = g->kind == EPO_GG_FORWARD && g->fuse == EPO_GG_SWIGLU;
    int unit_n = g->path == EPO_GG_SM90 ? (gated ? 16 : 8) : (gated ? 2 : 1);
    int unit_k = g->path == EPO_GG_SM90 ? 8 : 1;
    g->n = unit_n * r->spread(kMaxDim / unit_n);
    g->k = unit_k * r->spread(kMaxDim / unit_k);
    g->experts = r->spread(kMaxExperts);
    g->first = r->chance(50) ? 0 : r->upto(g->experts - 1);
    g->count = r->chance(50) ? g->experts - g->first : r->upto(g->experts - g->first);
    g->a_rows = (uint64_t)r->spread(kMaxRows);
    g->b_rows = (uint64_t)r->spread(kMaxRows);
    g->sms = r->chance(50) ? 0 : 1 + r->upto(40);
    bool back = g->kind == EPO_GG_DGRAD && g->fuse == EPO_GG_SWIGLU;
    g->tile_n = r->chance(40) ? 0 : 128 + 64 * r->upto(back ? 1 : 2);
    g->group_m = r->upto(9);
    g->cluster = r->upto(2);
    draw_rows(r, t);
    t->a_width = g->kind == EPO_GG_FORWARD ? g->k : g->n;
    t->b_width = g->k;
    t->c_width = g->kind == EPO_GG_FORWARD ? (gated ? g->n / 2 : g->n)
                                           : (g->fuse == EPO_GG_SWIGLU ? 2 * g->k : g->k);
}

static uint64_t c_elements(const test_case *t) {
    const epo_gg *g = &t->g;
    return g->kind == EPO_GG_WGRAD ? (uint64_t)g->experts * g->n * g->k : g->rows * t->c_width;
}
static int c_type(const test_case *t) {
    return t->g.kind == EPO_GG_WGRAD ? t->g.c_type : t->g.type;
}

template <class T> static void upload(T *to, const void *from, uint64_t count) {
    CHECK(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyHostToDevice));
}
static void fill(void *p, int type, uint64_t blocks, uint64_t width, const int *owner,
                 uint32_t seed) {
    if (blocks * width > 0) {
        ref::fill<<<kBlocks, 256>>>(p, type, blocks, width, owner, seed);
    }
}

static void set_inputs(test_case *t, buffers *d, dice *r) {
    epo_gg *g = &t->g;
    int s = t->seed * 16;
    upload(d->first, t->first, g->experts);
    upload(d->count, t->count, g->experts);
    upload(d->owner, t->owner, g->rows);
    upload(d->touched, t->touched, g->experts);
    int64_t first[kMaxExperts], count[kMaxExperts];
    for (int e = 0; e < g->experts; e++) {
        first[e] = (int64_t)t->first[e];
        count[e] = t->touched[e] ? (int64_t)t->count[e] : 0;
    }
    upload(d->ref_first, first, g->experts);
    upload(d->ref_count, count, g->experts);
    bool gather_a = r->chance(30), gather_b = g->kind == EPO_GG_WGRAD && r->chance(30);
    if (gather_a) {
        upload(d->a_index, t->a_index, g->rows);
        g->a_index = d->a_index;
    }
    if (gather_b) {
        upload(d->b_index, t->b_index, g->rows);
        g->b_index = d->b_index;
    }
    fill(d->a, g->type, gather_a ? g->a_rows : g->rows, t->a_width, gather_a ? NULL : d->owner, s);
    if (g->kind == EPO_GG_WGRAD) {
        fill(d->b, g->type, gather_b ? g->b_rows : g->rows, t->b_width, gather_b ? NULL : d->owner,
             s + 1);
    } else { /* weights outside the call are poison too */
        int keep[kMaxExperts];
        for (int e = 0; e < g->experts; e++) {
            keep[e] = t->touched[e] - 1;
        }
        upload(d->unit, keep, g->experts);
        fill(d->b, g->type, g->experts, (uint64_t)g->n * g->k, d->unit, s + 1);
    }
    fill(d->weight, EPO_F32, g->rows, 1, d->owner, s + 2);
    if (g->kind == EPO_GG_DGRAD) {
        fill(d->h, g->type, g->rows, 2 * (uint64_t)g->k, d->owner, s + 3);
    }
    fill(d->old, c_type(t), c_elements(t), 1, NULL, s + 4);
    g->a = d->a;
    g->b = d->b;
    g->row_first = d->first;
    g->row_count = d->count;
    g->row_weight = r->chance(70) ? d->weight : NULL;
    g->workspace = d->ws;
    g->workspace_bytes = d->ws_bytes;
    g->error = d->error;
    g->spin_ns = d->spin;
    if (g->fuse == EPO_GG_SWIGLU) {
        bool forward = g->kind == EPO_GG_FORWARD;
        g->h = !forward || r->chance(50) ? d->h : NULL;
        g->act = forward ? NULL : d->act;
        g->row_dweight = forward ? NULL : d->dweight;
    }
    bool may_keep = g->kind != EPO_GG_WGRAD && g->path == EPO_GG_SM90 && !gather_a;
    g->keep = may_keep && r->chance(40) ? d->kept : NULL;
}

/* Outputs: what accumulates gets its old values, the rest is poison. */
static void set_outputs(const test_case *t, buffers *d, void *c, void *act, float *dweight) {
    const epo_gg *g = &t->g;
    uint64_t bytes = c_elements(t) * type_size(c_type(t));
    if (g->kind == EPO_GG_WGRAD && g->accumulate) {
        CHECK(cudaMemcpyAsync(c, d->old, bytes, cudaMemcpyDeviceToDevice));
    } else {
        CHECK(cudaMemsetAsync(c, 0xff, bytes));
    }
    if (g->fuse == EPO_GG_SWIGLU && g->kind == EPO_GG_FORWARD) {
        CHECK(cudaMemsetAsync(d->h, 0xff, g->rows * g->n * type_size(g->type)));
    }
    CHECK(cudaMemsetAsync(act, 0xff, g->rows * kMaxDim * 4));
    CHECK(cudaMemsetAsync(dweight, 0xff, g->rows * 4));
    CHECK(cudaMemsetAsync(d->kept, 0xff, g->rows * t->a_width * type_size(g->type)));
    CHECK(cudaMemsetAsync(d->ws, 0xff, d->ws_bytes / 64));
    CHECK(cudaMemsetAsync(d->error, 0, 4));
}

static void describe(const test_case *t) {
    const epo_gg *g = &t->g;
    printf("case %d: kind %d fuse %d type %d c_type %d acc %d n %d k %d experts %d first %d count "
           "%d rows %llu path %d tile_n %d sms %d gather %d%d weight %d h %d keep %d\n",
           t->seed, g->kind, g->fuse, g->type, g->c_type, g->accumulate, g->n, g->k, g->experts,
           g->first, g->count, (unsigned long long)g->rows, g->path, g->tile_n, g->sms,
           g->a_index != NULL, g->b_index != NULL, g->row_weight != NULL, g->h != NULL,
           g->keep != NULL);
    for (int e = 0; e < g->experts; e++) {
        printf(" %llu+%llu", (unsigned long long)t->first[e], (unsigned long long)t->count[e]);
    }
    printf("\n");
}

static bool launch(const test_case *t, const epo_gg *g) {
    if (epo_gg_launch(g, NULL) == EPO_OK) {
        return true;
    }
    printf("launch: %s\n", epo_fail_text());
    describe(t);
    return false;
}

/* Rows that are kept: those of the call's experts as they are in a, others untouched. */
__global__ void kept_check(const uint16_t *a, const uint16_t *kept, const int *owner, uint64_t rows,
                           int width, unsigned *wrong) {
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < rows * width;
         i += step) {
        uint16_t want = owner[i / width] >= 0 ? a[i] : 0xffff;
        if (kept[i] != want) {
            atomicAdd(wrong, 1u);
        }
    }
}
static bool check_kept(const test_case *t, buffers *d) {
    unsigned wrong = 0;
    if (t->g.keep == NULL) {
        return true;
    }
    CHECK(cudaMemset(d->differ, 0, 4));
    kept_check<<<kBlocks, 256>>>((const uint16_t *)d->a, (const uint16_t *)d->kept, d->owner,
                                 t->g.rows, t->a_width, d->differ);
    CHECK(cudaMemcpy(&wrong, d->differ, 4, cudaMemcpyDeviceToHost));
    if (wrong != 0) {
        printf("WRONG: %u elements of the kept rows\n", wrong);
        describe(t);
    }
    return wrong == 0;
}

/* Compares the outputs of d->c.. with fp64; true if right. */
static bool check_reference(const test_case *t, buffers *d, double *rel) {
    const epo_gg *g = &t->g;
    ref::shape s = {g->kind,      g->type,      g->n, g->k, g->experts, g->rows,   d->owner,
                    d->ref_first, d->ref_count, d->a, d->b, g->a_index, g->b_index};
    CHECK(cudaMemsetAsync(d->verdict, 0, sizeof(ref::verdict)));
    ref::dots<<<kBlocks, 256>>>(s, d->dot, d->size);
    const void *old = g->kind == EPO_GG_WGRAD && g->accumulate ? d->old : NULL;
    if (g->fuse == EPO_GG_PLAIN) {
        ref::check_plain<<<kBlocks, 256>>>(s, d->c, c_type(t), old, d->dot, d->size, d->touched,
                                           d->verdict);
    } else if (g->kind == EPO_GG_FORWARD) {
        if (g->h != NULL) {
            ref::check_plain<<<kBlocks, 256>>>(s, g->h, g->type, NULL, d->dot, d->size, d->touched,
                                               d->verdict);
        }
        ref::check_swiglu<<<kBlocks, 256>>>(s, d->c, g->h, g->row_weight, d->dot, d->size,
                                            d->verdict);
    } else if (g->rows > 0) {
        ref::check_back<<<(unsigned)g->rows, 128>>>(s, d->c, g->act, g->h, g->row_weight,
                                                    g->row_dweight, d->dot, d->size, d->verdict);
    }
    ref::verdict v;
    uint32_t error = 0;
    CHECK(cudaMemcpy(&v, d->verdict, sizeof(v), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&error, d->error, 4, cudaMemcpyDeviceToHost));
    *rel = v.ref2 > 0.0 ? sqrt(v.err2 / v.ref2) : 0.0;
    double limit = g->type == EPO_F32 ? 2e-5 : (g->type == EPO_BF16 ? 6e-3 : 1e-3);
    if (c_elements(t) < 4096) { /* too few to average */
        *rel = 0.0;
    }
    if (v.bad == 0 && error == 0 && *rel < limit) {
        return check_kept(t, d);
    }
    printf("WRONG: %u elements, first at %llu: found %g, wanted %g; rel %g; error word %u\n", v.bad,
           v.bad_at, v.bad_found, v.bad_wanted, *rel, error);
    describe(t);
    return false;
}

static bool same(buffers *d, const void *x, const void *y, uint64_t bytes) {
    unsigned count = 0;
    CHECK(cudaMemset(d->differ, 0, 4));
    ref::differ<<<kBlocks, 256>>>((const uint32_t *)x, (const uint32_t *)y, bytes / 4, d->differ);
    CHECK(cudaMemcpy(&count, d->differ, 4, cudaMemcpyDeviceToHost));
    return count == 0;
}

/* The same call in pieces of experts or by several launches, with other SM budgets
 * and tiles: every bit must be the same.  Only SwiGLU's backward keeps its tile
 * width, which orders the sum of row_dweight. */
static bool check_bits(const test_case *t, buffers *d, dice *r, cudaStream_t other) {
    epo_gg g = t->g;
    g.c = d->again;
    g.act = g.act != NULL ? d->act_again : NULL;
    g.row_dweight = g.row_dweight != NULL ? d->dweight_again : NULL;
    set_outputs(t, d, d->again, d->act_again, d->dweight_again);
    if (g.row_dweight == NULL) {
        g.tile_n = 128 + 64 * r->upto(g.kind == EPO_GG_DGRAD && g.fuse == EPO_GG_SWIGLU ? 1 : 2);
    }
    g.group_m = 1 + r->upto(9);
    g.cluster = 1 + r->upto(1);
    bool ok = true;
    if (r->chance(50)) {
        int cut = r->upto(g.count);
        epo_gg x = g, y = g;
        x.count = cut;
        y.first += cut;
        y.count -= cut;
        x.sms = 1 + r->upto(20);
        y.sms = 1 + r->upto(20);
        ok = launch(t, &y) && launch(t, &x);
    } else {
        g.sms = 1 + r->upto(7);
        ok = epo_gg_prepare(&g, NULL) == EPO_OK;
        CHECK(cudaDeviceSynchronize());
        ok = ok && epo_gg_run(&g, NULL) == EPO_OK && epo_gg_run(&g, other) == EPO_OK;
    }
    CHECK(cudaDeviceSynchronize());
    uint64_t bytes = c_elements(t) * type_size(c_type(t));
    ok = ok && same(d, d->c, d->again, bytes / 4 * 4);
    ok = ok &&
         (g.act == NULL || same(d, d->act, d->act_again, g.rows * g.k * type_size(g.type) / 4 * 4));
    ok = ok && (g.row_dweight == NULL || same(d, d->dweight, d->dweight_again, g.rows * 4));
    if (!ok) {
        printf("BITS DIFFER\n");
        describe(t);
    }
    return ok;
}

static int test_random(buffers *d, int cases, int seed, int only, bool sm90) {
    int failed = 0;
    double worst = 0.0;
    cudaStream_t other;
    static test_case t;
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (int i = 0; i < cases && failed < 10; i++) {
        if (only >= 0 && i != only) {
            continue;
        }
        dice r = {0x9e3779b97f4a7c15ull * (uint64_t)(seed * 1000003 + i + 1)};
        for (int j = 0; j < 8; j++) {
            r.next();
        }
        double rel = 0.0;
        draw_case(&r, &t, i, sm90);
        set_inputs(&t, d, &r);
        t.g.c = d->c;
        set_outputs(&t, d, d->c, d->act, d->dweight);
        bool ok = launch(&t, &t.g) && check_reference(&t, d, &rel);
        ok = ok && (i % 4 != 0 || check_bits(&t, d, &r, other));
        CHECK(cudaGetLastError());
        failed += !ok;
        worst = rel > worst ? rel : worst;
    }
    CHECK(cudaStreamDestroy(other));
    printf("random shapes: %d, failed %d, largest relative error %.2e\n", cases, failed, worst);
    return failed;
}

/* ---- arrival ---- */

/* Releases the units in the order of `unit`, their rows (width elements) with
 * them: before that the rows are poison. */
__global__ void arrive(void *a, int type, const int *owner, uint64_t rows, int width,
                       int block_rows, uint64_t *flags, uint64_t epoch, int words, const int *unit,
                       int units, uint32_t seed) {
    for (int i = 0; i < units; i++) {
        for (uint64_t x = threadIdx.x; x < rows * width; x += blockDim.x) {
            uint64_t row = x / width;
            int of = block_rows > 0 ? (int)(row / block_rows) : owner[row];
            if (owner[row] >= 0 && of == unit[i]) {
                ref::put(a, type, x, ref::draw(seed, x));
            }
        }
        __threadfence_system();
        __syncthreads();
        if ((int)threadIdx.x < words) {
            *(volatile uint64_t *)&flags[unit[i] * words + threadIdx.x] = epoch;
        }
        __syncthreads();
    }
}

/* Rows that arrive while the GEMM runs, unit by unit in any order. */
static int test_arrival(buffers *d, int cases, bool sm90) {
    int failed = 0;
    static test_case t;
    cudaStream_t comm;
    uint64_t spun = 0;
    /* Loading a kernel waits for those that run: not while one waits for it. */
    cudaFuncAttributes loaded;
    CHECK(cudaFuncGetAttributes(&loaded, arrive));
    CHECK(cudaStreamCreateWithPriority(&comm, cudaStreamNonBlocking, -5));
    for (int i = 0; i < cases && failed < 5; i++) {
        dice r = {0x2545f4914f6cdd1dull * (uint64_t)(i + 77)};
        double rel;
        do {
            draw_case(&r, &t, i, sm90);
        } while (t.g.kind == EPO_GG_WGRAD || t.g.rows == 0);
        set_inputs(&t, d, &r);
        t.g.a_index = NULL;
        t.g.sms = 1 + r.upto(90);
        t.g.c = d->c;
        t.g.ready.flag = d->flags;
        t.g.ready.epoch = 1 + r.upto(1000);
        t.g.ready.words = 1 + r.upto(3);
        t.g.ready.block_rows = r.chance(50) ? 0 : 16 * (1 + r.upto(12));
        t.g.ready.timeout_ns = 5000000000ull;
        int units =
            t.g.ready.block_rows > 0 ? (int)(t.g.rows - 1) / t.g.ready.block_rows + 1 : t.g.experts;
        int order[kMaxRows];
        for (int u = 0; u < units; u++) {
            int swap = r.upto(u);
            order[u] = order[swap];
            order[swap] = u;
        }
        set_outputs(&t, d, d->c, d->act, d->dweight);
        upload(d->unit, order, units);
        CHECK(cudaMemset(d->flags, 0, (uint64_t)units * 8 * t.g.ready.words));
        CHECK(cudaMemset(d->spin, 0, 8));
        CHECK(cudaMemset(d->a, 0xff, t.g.rows * t.a_width * type_size(t.g.type)));
        CHECK(cudaDeviceSynchronize());
        bool ok = launch(&t, &t.g);
        arrive<<<1, 1024, 0, comm>>>(d->a, t.g.type, d->owner, t.g.rows, t.a_width,
                                     t.g.ready.block_rows, d->flags, t.g.ready.epoch,
                                     t.g.ready.words, d->unit, units, t.seed * 16);
        CHECK(cudaDeviceSynchronize());
        uint64_t spin = 0;
        CHECK(cudaMemcpy(&spin, d->spin, 8, cudaMemcpyDeviceToHost));
        spun += spin;
        ok = ok && check_reference(&t, d, &rel);
        failed += !ok;
    }
    CHECK(cudaStreamDestroy(comm));
    printf("rows that arrive late: %d cases, failed %d, waited %.1f ms in all\n", cases, failed,
           spun * 1e-6);
    return failed + (spun == 0);
}

/* ---- limits and errors ---- */

static int expect(const char *what, bool ok) {
    printf("%-60s %s\n", what, ok ? "ok" : "FAILED");
    return ok ? 0 : 1;
}

static uint32_t error_word(buffers *d) {
    uint32_t error = 0;
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&error, d->error, 4, cudaMemcpyDeviceToHost));
    return error;
}

static int test_limits(buffers *d, bool sm90) {
    static test_case t;
    dice r = {12345};
    double rel;
    int failed = 0, *limit = NULL;
    do {
        draw_case(&r, &t, 1, sm90);
    } while (t.g.kind != EPO_GG_FORWARD || t.g.rows < 500 || t.g.count < 2 || t.g.n < 300);
    set_inputs(&t, d, &r);
    t.g.c = d->c;
    CHECK(cudaHostAlloc((void **)&limit, sizeof(int), cudaHostAllocMapped));
    *limit = 2;
    t.g.sm_limit = limit;
    t.g.sms = 0;
    set_outputs(&t, d, d->c, d->act, d->dweight);
    failed += expect("sm_limit 2", launch(&t, &t.g) && check_reference(&t, d, &rel));
    *limit = 0;
    set_outputs(&t, d, d->c, d->act, d->dweight);
    failed += expect("sm_limit 0 counts as 1", launch(&t, &t.g) && check_reference(&t, d, &rel));
    t.g.sm_limit = NULL;

    t.g.ready.flag = d->flags;
    t.g.ready.epoch = 7;
    t.g.ready.words = 1;
    t.g.ready.timeout_ns = 3000000;
    CHECK(cudaMemset(d->flags, 0, kMaxExperts * 8));
    set_outputs(&t, d, d->c, d->act, d->dweight);
    failed += expect("rows that never arrive end in the time-out bit",
                     launch(&t, &t.g) && (error_word(d) & EPO_GG_ERROR_TIMEOUT) != 0);
    t.g.ready.flag = NULL;

    uint64_t beyond = t.g.rows + 1;
    CHECK(cudaMemcpy(d->count + t.g.first, &beyond, 8, cudaMemcpyHostToDevice));
    set_outputs(&t, d, d->c, d->act, d->dweight);
    failed += expect("an expert with rows beyond the array sets the rows bit",
                     launch(&t, &t.g) && (error_word(d) & EPO_GG_ERROR_ROWS) != 0);

    epo_gg bad = t.g;
    bad.workspace_bytes = 16;
    failed += expect("a small workspace is refused", epo_gg_launch(&bad, NULL) == EPO_E_ARG);
    bad = t.g;
    bad.k = 0;
    failed += expect("k of 0 is refused", epo_gg_launch(&bad, NULL) == EPO_E_ARG);
    bad = t.g;
    bad.path = EPO_GG_SM90;
    bad.k = 31;
    failed +=
        expect("the sm_90 path refuses an odd k", epo_gg_launch(&bad, NULL) == EPO_E_UNSUPPORTED);
    CHECK(cudaFreeHost(limit));
    return failed;
}

int main(int argc, char **argv) {
    int cases = 20000, seed = 1, only = -1, failed = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        int v = (int)strtol(argv[i + 1], NULL, 10);
        cases = strcmp(argv[i], "--cases") == 0 ? v : cases;
        seed = strcmp(argv[i], "--seed") == 0 ? v : seed;
        only = strcmp(argv[i], "--only") == 0 ? v : only;
    }
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    bool sm90 = prop.major == 9 && prop.minor == 0;
    printf("%s, sm_%d%d: %s\n", prop.name, prop.major, prop.minor,
           sm90 ? "both paths" : "portable path only");
    static buffers d;
    buffers_make(&d);
    failed += test_random(&d, cases, seed, only, sm90);
    if (only < 0) {
        failed += test_arrival(&d, cases < 200 ? 10 : 100, sm90);
        failed += test_limits(&d, sm90);
    }
    printf("%s\n", failed == 0 ? "PASS" : "FAIL");
    return failed == 0 ? 0 : 1;
}
