/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_ffn.c - the experts' GEMMs and activation alone, on the rows that a layer's
 * plan has: what no overlap can go below.
 */
#include "bench.h"

bool bench_ffn_open(bench_rank *b, bench_ffn *f) {
    const int local = bench.shape.experts / bench.shape.ranks;
    f->ops = epo_backend_get();
    epo_backend_config c = {.rank = 0, .ranks = 1, .timeout_s = 20, .warn_s = 10};
    if (f->ops->open(&c, &f->be) != EPO_OK ||
        f->ops->queue_create(f->be, EPO_QUEUE_COMPUTE, &f->q) != EPO_OK ||
        f->ops->event_create(f->be, &f->done) != EPO_OK ||
        bench.engine->plan_rows(b->arm[0].plan, &f->rows) != EPO_OK ||
        bench.engine->plan_experts(b->arm[0].plan, f->first, f->count) != EPO_OK)
        return false;
    const uint64_t r = f->rows + 1;
    f->x = bench_random_bf16(r * (uint64_t)bench.shape.hidden, 5, 1.0F);
    f->y = bench_random_bf16(r * (uint64_t)bench.shape.hidden, 6, 1.0F);
    f->h = test_device(r * 4 * (uint64_t)bench.shape.ffn, 0);
    f->a = test_device(r * 2 * (uint64_t)bench.shape.ffn, 0);
    f->dw = test_device(r * 4, 0);
    float *w = malloc(r * 4);
    for (uint64_t i = 0; i < r; i++)
        w[i] = 0.125F;
    f->w = test_upload(w, r * 4);
    free(w);
    f->op_first = test_upload(f->first, (uint64_t)local * 8);
    f->op_count = test_upload(f->count, (uint64_t)local * 8);
    return true;
}

static epo_status ffn_gemm(const bench_ffn *f, epo_gemm_kind kind, const void *a, const void *w,
                           void *c, int n, int k, const epo_swiglu *act, int piece, int pieces) {
    const int local = bench.shape.experts / bench.shape.ranks;
    epo_gemm g = {.kind = kind,
                  .a = a,
                  .b = w,
                  .c = c,
                  .type = EPO_BF16,
                  .c_type = kind == EPO_GEMM_WGRAD ? bench.wgrad_type : EPO_BF16,
                  .n = n,
                  .k = k,
                  .row_first = f->op_first,
                  .row_count = f->op_count,
                  .fresh = bench.fresh,
                  .first = piece * local / pieces,
                  .cpu_first = f->first,
                  .cpu_count = f->count,
                  .act = act};
    epo_deps deps = {.name = "gemm", .chunk = -1};
    g.count = (piece + 1) * local / pieces - g.first;
    return f->ops->gemm(f->q, &g, &deps);
}

/* In `pieces` of equal numbers of experts. */
static epo_status ffn_forward(const bench_rank *b, const bench_ffn *f, int pieces) {
    const int h = bench.shape.hidden, n = bench.shape.ffn;
    epo_swiglu act = {.h = f->h, .w = f->w, .a = f->a, .rows = f->rows, .ffn = n, .type = EPO_BF16};
    epo_status st = EPO_OK;
    for (int i = 0; i < pieces && st == EPO_OK; i++) {
        st = ffn_gemm(f, EPO_GEMM_FORWARD, f->x, b->w1, f->h, 2 * n, h, &act, i, pieces);
        if (st == EPO_OK)
            st = ffn_gemm(f, EPO_GEMM_FORWARD, f->a, b->w2, f->y, h, n, NULL, i, pieces);
    }
    return st;
}

/* In one operation of as many parts; false: there is none for these products. */
static bool ffn_chain(const bench_rank *b, const bench_ffn *f, int parts, epo_status *st) {
    const int local = bench.shape.experts / bench.shape.ranks;
    epo_swiglu act = {
        .h = f->h, .w = f->w, .a = f->a, .rows = f->rows, .ffn = bench.shape.ffn, .type = EPO_BF16};
    epo_chain_part part[EPO_CHAIN_PARTS] = {{0}};
    epo_chain c = {.first = {.kind = EPO_GEMM_FORWARD, .a = f->x, .b = b->w1, .c = f->h},
                   .second = {.kind = EPO_GEMM_FORWARD, .a = f->a, .b = b->w2, .c = f->y},
                   .part = part,
                   .parts = parts};
    epo_gemm *both[] = {&c.first, &c.second};
    for (int i = 0; i < 2; i++) {
        both[i]->type = both[i]->c_type = EPO_BF16;
        both[i]->n = i == 0 ? 2 * bench.shape.ffn : bench.shape.hidden;
        both[i]->k = i == 0 ? bench.shape.hidden : bench.shape.ffn;
        both[i]->row_first = f->op_first;
        both[i]->row_count = f->op_count;
        both[i]->cpu_first = f->first;
        both[i]->cpu_count = f->count;
    }
    c.first.act = &act;
    for (int i = 0; i < parts; i++) {
        part[i].first = i * local / parts;
        part[i].count = (i + 1) * local / parts - part[i].first;
    }
    if (f->ops->chain == NULL || !f->ops->chain_covers(f->be, &c))
        return false;
    epo_deps deps = {.name = "chain", .chunk = -1};
    *st = f->ops->chain(f->q, &c, &deps);
    return true;
}

static epo_status ffn_backward(const bench_rank *b, const bench_ffn *f) {
    const int h = bench.shape.hidden, n = bench.shape.ffn;
    epo_swiglu d = {f->h, f->w, f->a, f->a, f->h, f->dw, 0, f->rows, n, EPO_BF16};
    epo_status st = ffn_gemm(f, EPO_GEMM_DGRAD, f->y, b->w2, f->a, h, n, &d, 0, 1);
    if (st == EPO_OK)
        st = ffn_gemm(f, EPO_GEMM_DGRAD, f->h, b->w1, f->x, 2 * n, h, NULL, 0, 1);
    if (st == EPO_OK)
        st = ffn_gemm(f, EPO_GEMM_WGRAD, f->y, f->a, b->dw2, h, n, NULL, 0, 1);
    if (st == EPO_OK)
        st = ffn_gemm(f, EPO_GEMM_WGRAD, f->h, f->x, b->dw1, 2 * n, h, NULL, 0, 1);
    return st;
}

/* Milliseconds of one of so many calls in a row; pieces < 0: a chain of as many parts, 0 if
 * there is none. */
static float ffn_time(bench_rank *b, bench_ffn *f, int pieces, bool backward) {
    epo_deps deps = {.name = "end", .signal = f->done, .chunk = -1};
    float ms = 0;
    bool there = true;
    pthread_barrier_wait(&bench.together);
    TEST_CUDA(cudaEventRecord(b->start, b->stream));
    epo_status st = f->ops->stream_enter(f->be, &f->q, 1, b->stream);
    for (int i = 0; i < bench.calls && st == EPO_OK; i++) {
        if (pieces > 0)
            st = ffn_forward(b, f, pieces);
        else
            there = ffn_chain(b, f, -pieces, &st);
        if (st == EPO_OK && backward)
            st = ffn_backward(b, f);
    }
    if (st == EPO_OK)
        st = f->ops->zero(f->q, NULL, 0, &deps);
    if (st == EPO_OK)
        st = f->ops->stream_leave(f->be, f->done, b->stream);
    bench_must(st, "FFN alone");
    TEST_CUDA(cudaEventRecord(b->end, b->stream));
    TEST_CUDA(cudaStreamSynchronize(b->stream));
    TEST_CUDA(cudaEventElapsedTime(&ms, b->start, b->end));
    return there ? ms / (float)bench.calls : 0.0F;
}

void bench_ffn_run(bench_rank *b, bench_ffn *f, int rep) {
    const float pieces = ffn_time(b, f, 4, false), whole = ffn_time(b, f, 1, false),
                chain = ffn_time(b, f, -4, false), both = ffn_time(b, f, 1, true);
    if (rep < 0)
        return;
    bench.ffn_pieces[b->rank][rep] = pieces;
    bench.ffn_chain[b->rank][rep] = chain;
    bench.ffn_forward[b->rank][rep] = whole;
    bench.ffn_both[b->rank][rep] = both;
}

void bench_ffn_close(bench_ffn *f) {
    void *all[] = {f->x, f->y, f->h, f->a, f->dw, f->w, f->op_first, f->op_count};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        cudaFree(all[i]);
    f->ops->event_destroy(f->be, f->done);
    f->ops->queue_destroy(f->be, f->q);
    f->ops->close(f->be, false);
}
