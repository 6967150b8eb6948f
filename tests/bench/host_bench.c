/* SPDX-License-Identifier: Apache-2.0
 *
 * host_bench - what the host backend's operations cost on this machine.
 *     make tests/bench/host_bench && tests/bench/host_bench [RANKS]
 * Ranks are threads.  The best of 15 rounds of rank 0: what it can do, also on
 * a machine that others use.  Not a test.
 */
#include "config.h"

#include "../unit/host_ranks.h"

#include "backend/host/convert.h"
#include "backend/host/host.h"

#include <string.h>

#define ROUNDS 15
#define ROWS 4096
#define HIDDEN 1024

typedef struct kit {
    rank_ctx *c;
    epo_queue *compute, *comm;
    epo_event *done;
    epo_deps deps;
    epo_window *w;
    int32_t *index; /* [ROWS][2] */
    void *src, *dst;
    uint64_t epoch;
} kit;

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds of the best call. */
static double measure(kit *k, void (*fn)(kit *k)) {
    double t[ROUNDS];
    fn(k);
    for (int i = 0; i < ROUNDS; i++) {
        k->c->ops->barrier(k->c->be);
        int64_t start = host_now_ns();
        fn(k);
        t[i] = (double)(host_now_ns() - start) * 1e-9;
    }
    qsort(t, ROUNDS, sizeof *t, by_value);
    return t[0];
}

static void say(const kit *k, const char *what, double value, const char *unit) {
    if (k->c->rank == 0)
        printf("%-34s %9.2f %s\n", what, value, unit);
}

static void run_sync(kit *k) { EXPECT(k->c, k->c->ops->sync(k->c->be, k->done) == EPO_OK); }

/* ---- waiting ------------------------------------------------------------------- */

static void run_op(kit *k) {
    k->c->ops->zero(k->compute, NULL, 0, &k->deps);
    run_sync(k);
}

static void run_barriers(kit *k) {
    for (int i = 0; i < 20; i++)
        k->c->ops->barrier(k->c->be);
}

/* An exchange of nothing and a wait for everybody's: the cost of a chunk. */
static void run_flags(kit *k) {
    uint64_t at = (uint64_t)ROWS * HIDDEN * 4;
    epo_exchange x = {.window = k->w, .flag_offset = at, .epoch = ++k->epoch};
    k->c->ops->exchange(k->comm, &x, NULL);
    epo_deps deps = k->deps;
    const unsigned char *mine = k->c->ops->window_local(k->w);
    deps.nwait = 1;
    deps.wait[0] = (epo_ready){NULL,     (const uint64_t *)(const void *)(mine + at),
                               k->epoch, k->c->ranks,
                               -1,       "flags",
                               -1,       0,
                               0,        NULL};
    k->c->ops->zero(k->compute, NULL, 0, &deps);
    run_sync(k);
}

static void run_allreduce(kit *k) { k->c->ops->allreduce(k->c->be, k->dst, 1 << 20, NULL); }

static void bench_waiting(kit *k) {
    say(k, "operation, issue to sync", measure(k, run_op) * 1e6, "us");
    say(k, "barrier", measure(k, run_barriers) / 20 * 1e6, "us");
    say(k, "empty exchange and its flags", measure(k, run_flags) * 1e6, "us");
    say(k, "allreduce of 4 MiB", measure(k, run_allreduce) * 1e3, "ms");
}

/* ---- bytes ----------------------------------------------------------------------- */

static void run_exchange(kit *k, const int32_t *index) {
    int to = (k->c->rank + 1) % k->c->ranks;
    epo_segment seg = {
        .peer = to, .src = k->src, .index = index, .rows = ROWS, .row_bytes = HIDDEN * 4};
    epo_exchange x = {.window = k->w,
                      .send = &seg,
                      .nsend = 1,
                      .flag_offset = (uint64_t)ROWS * HIDDEN * 4,
                      .epoch = ++k->epoch};
    k->c->ops->exchange(k->comm, &x, &k->deps);
    run_sync(k);
}
static void run_contiguous(kit *k) { run_exchange(k, NULL); }
static void run_gathered(kit *k) { run_exchange(k, k->index); }

static void run_gather(kit *k) {
    epo_rows_gather g = {
        .dst = k->dst, .src = k->src, .index = k->index, .rows = ROWS, .row_bytes = HIDDEN * 4};
    k->c->ops->gather(k->compute, &g, &k->deps);
    run_sync(k);
}

static epo_dtype type;
static void run_reduce(kit *k) {
    epo_rows_reduce r = {.dst = k->dst,
                         .src = k->src,
                         .index = k->index,
                         .rows = ROWS,
                         .width = 2,
                         .elements = HIDDEN,
                         .type = type};
    k->c->ops->reduce(k->compute, &r, &k->deps);
    run_sync(k);
}

static void run_swiglu(kit *k, bool back) {
    static float w[ROWS], dw[ROWS];
    for (int i = 0; i < ROWS; i++)
        w[i] = 0.5f;
    unsigned char *h = k->src, *a = k->dst;
    uint64_t half = (uint64_t)ROWS * HIDDEN / 2 * host_type_size(type);
    epo_swiglu s = {h,
                    w,
                    a,
                    back ? a + half : NULL,
                    back ? (void *)(a + 2 * half) : NULL,
                    back ? dw : NULL,
                    0,
                    ROWS,
                    HIDDEN / 2,
                    type};
    k->c->ops->swiglu(k->compute, &s, &k->deps);
    run_sync(k);
}
static void run_forward(kit *k) { run_swiglu(k, false); }
static void run_backward(kit *k) { run_swiglu(k, true); }

static void bench_bytes(kit *k) {
    static const char *const name[] = {"fp32", "bf16", "fp16"};
    const double bytes = (double)ROWS * HIDDEN * 4, elements = (double)ROWS * HIDDEN / 2;
    char what[64];
    say(k, "exchange, contiguous", bytes / measure(k, run_contiguous) * 1e-9, "GB/s");
    say(k, "exchange, gathered rows", bytes / measure(k, run_gathered) * 1e-9, "GB/s");
    say(k, "gather", bytes / measure(k, run_gather) * 1e-9, "GB/s");
    for (int t = 0; t < 3; t++) {
        if (k->c->rank == 0)
            type = (epo_dtype)t;
        k->c->ops->barrier(k->c->be);
        snprintf(what, sizeof what, "reduce of 2, %s", name[t]);
        say(k, what, measure(k, run_reduce) / (ROWS * HIDDEN) * 1e9, "ns/element");
        snprintf(what, sizeof what, "SwiGLU forward, %s", name[t]);
        say(k, what, measure(k, run_forward) / elements * 1e9, "ns/element");
        snprintf(what, sizeof what, "SwiGLU backward, %s", name[t]);
        say(k, what, measure(k, run_backward) / elements * 1e9, "ns/element");
        k->c->ops->barrier(k->c->be);
    }
}

/* ---- GEMM --------------------------------------------------------------------------- */

static epo_gemm_kind gemm_kind;
static void run_gemm(kit *k) {
    enum { N = 512, K = 512, E = 4, M = 256 };
    static const uint64_t first[E] = {0, M, 2 * M, 3 * M}, count[E] = {M, M, M, M};
    epo_gemm g = {.kind = gemm_kind,
                  .a = k->src,
                  .b = (char *)k->src + 4 * M * N * 4,
                  .c = k->dst,
                  .type = type,
                  .c_type = EPO_F32,
                  .n = N,
                  .k = K,
                  .row_first = first,
                  .row_count = count,
                  .first = 0,
                  .count = E};
    k->c->ops->gemm(k->compute, &g, &k->deps);
    run_sync(k);
}

static void bench_gemm(kit *k) {
    static const char *const kinds[] = {"forward", "dgrad", "wgrad"}, *const name[] = {
                                                                          "fp32", "bf16", "fp16"};
    const double flops = 2.0 * 4 * 256 * 512 * 512;
    char what[64];
    for (int t = 0; t < 3; t++) {
        for (int i = 0; i < 3; i++) {
            if (k->c->rank == 0)
                type = (epo_dtype)t, gemm_kind = (epo_gemm_kind)i;
            k->c->ops->barrier(k->c->be);
            snprintf(what, sizeof what, "GEMM 4 x 256x512x512, %s %s", kinds[i], name[t]);
            say(k, what, flops / measure(k, run_gemm) * 1e-9, "GFLOP/s");
            k->c->ops->barrier(k->c->be);
        }
    }
}

static void bench(rank_ctx *c) {
    kit k = {.c = c, .deps = {.name = "bench", .chunk = -1}};
    uint64_t bytes = (uint64_t)ROWS * HIDDEN * 4, seed = 9;
    EXPECT(c, c->ops->queue_create(c->be, EPO_QUEUE_COMPUTE, &k.compute) == EPO_OK);
    EXPECT(c, c->ops->queue_create(c->be, EPO_QUEUE_COMM, &k.comm) == EPO_OK);
    EXPECT(c, c->ops->event_create(c->be, &k.done) == EPO_OK);
    EXPECT(c, c->ops->window_create(c->be, bytes + 8 * (uint64_t)c->ranks, &k.w) == EPO_OK);
    EXPECT(c, c->ops->alloc(c->be, 2 * bytes, &k.src) == EPO_OK);
    EXPECT(c, c->ops->alloc(c->be, 2 * bytes, &k.dst) == EPO_OK);
    k.deps.signal = k.done;
    k.index = calloc(ROWS, 2 * sizeof *k.index);
    memset(k.src, 0, 2 * bytes);
    memset(k.dst, 0, 2 * bytes);
    for (int i = 0; i < ROWS * 2; i++)
        k.index[i] = (int32_t)rng_below(&seed, ROWS);
    if (c->rank == 0)
        printf("%d ranks, %s\n", c->ranks, c->ops->info(c->be)->versions);
    bench_waiting(&k);
    bench_bytes(&k);
    bench_gemm(&k);
    c->ops->free(c->be, k.src, 2 * bytes);
    c->ops->free(c->be, k.dst, 2 * bytes);
    c->ops->window_destroy(c->be, k.w);
    c->ops->event_destroy(c->be, k.done);
    c->ops->queue_destroy(c->be, k.comm);
    c->ops->queue_destroy(c->be, k.compute);
    free(k.index);
}

int main(int argc, char **argv) {
    long ranks = argc > 1 ? strtol(argv[1], NULL, 10) : 2;
    if (ranks < 1 || ranks > 16) {
        fprintf(stderr, "host_bench: ranks: found %s, allowed 1..16\n", argv[1]);
        return 2;
    }
    return ranks_run((int)ranks, bench, NULL) == 0 ? 0 : 1;
}
