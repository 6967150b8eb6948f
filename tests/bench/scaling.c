/* SPDX-License-Identifier: Apache-2.0
 *
 * scaling.c - what a plan, a pass, a barrier and making the group cost the host engine
 * against ranks, experts and tokens.  Experts are the caller's and do nothing, so a pass is its
 * pipeline and its rows.  scaling.sh runs, judges and draws it.
 *
 *   scaling RANKS EXPERTS TOKENS flex|alltoall [ROUNDS]
 *
 * Ranks are threads.  One line: the arguments; microseconds of a plan, of a pass and
 * of a barrier (the slowest rank, the median of the rounds), CPU time that each took a
 * rank, that of its workers included, and microseconds of making group, buffer and layer.
 */
#include "config.h"

#include "backend/engine.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RANKS = 256, ROUNDS = 99, HIDDEN = 64, TOP_K = 8, CHUNKS = 4, BURST = 4 };
enum { PLAN, PASS, BARRIER, KINDS };

typedef struct bench {
    const epo_engine *engine;
    epo_world *world;
    int ranks, experts, tokens, rounds;
    epo_dispatcher dispatcher;
    double wall[KINDS][ROUNDS][RANKS], cpu[KINDS][ROUNDS], made[RANKS]; /* us */
} bench;

typedef struct rank_args {
    bench *b;
    int rank;
} rank_args;

static double now_us(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, by_value);
    return x[n / 2];
}

static void must(const bench *b, epo_status status, const char *what) {
    if (status == EPO_OK)
        return;
    fprintf(stderr, "scaling: %s: %s\n", what, b->engine->error());
    exit(1);
}

/* splitmix64 */
static uint64_t mix(uint64_t x) {
    x += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

static epo_status no_expert(void *ctx, const epo_expert_call *call) {
    (void)ctx, (void)call;
    return EPO_OK;
}

typedef struct objects {
    epo_group *group;
    epo_buffer *buffer;
    epo_layer *layer;
    int64_t *experts;
    float *x, *y;
} objects;

static void objects_make(const bench *b, int rank, objects *o) {
    epo_engine_group eg = {sizeof eg, EPO_GROUP_CONFIG_INIT, "scaling"};
    eg.config.engine = EPO_ENGINE_HOST;
    eg.config.rank = rank;
    eg.config.ranks = b->ranks;
    eg.config.threads = b->world;
    eg.config.overlap = EPO_ON;
    eg.config.dispatcher = b->dispatcher;
    eg.config.delay_wgrad = EPO_OFF;
    eg.config.chunks = CHUNKS;
    eg.config.timeout_s = 60;
    eg.config.warn_s = 30;
    must(b, b->engine->group_create(&eg, &o->group), "group");
    epo_buffer_config bc = EPO_BUFFER_CONFIG_INIT;
    bc.experts = b->experts;
    bc.hidden = HIDDEN;
    bc.top_k = TOP_K;
    bc.max_tokens = b->tokens;
    bc.dispatcher = b->dispatcher;
    /* Twice the even share: the worst case of 32 ranks does not fit. */
    bc.max_rows = 2 * (uint64_t)b->tokens * TOP_K + 32 * (uint64_t)(b->experts / b->ranks) + 4096;
    must(b, b->engine->buffer_create(o->group, &bc, &o->buffer), "buffer");
    epo_layer_config lc = EPO_LAYER_CONFIG_INIT;
    lc.experts = b->experts;
    lc.hidden = HIDDEN;
    lc.expert = no_expert;
    must(b, b->engine->layer_create(o->group, &lc, &o->layer), "layer");
    const uint64_t slots = (uint64_t)b->tokens * TOP_K, rows = (uint64_t)b->tokens * HIDDEN;
    o->experts = malloc(slots * sizeof *o->experts);
    o->x = calloc(rows, sizeof *o->x);
    o->y = calloc(rows, sizeof *o->y);
    if (o->experts == NULL || o->x == NULL || o->y == NULL)
        exit(1);
    for (uint64_t i = 0; i < slots; i++)
        o->experts[i] = (int64_t)(mix((uint64_t)rank << 40 | i) % (uint64_t)b->experts);
}

static void objects_free(const bench *b, objects *o) {
    must(b, b->engine->layer_destroy(o->layer), "layer");
    must(b, b->engine->buffer_destroy(o->buffer), "buffer");
    must(b, b->engine->group_destroy(o->group), "group");
    free(o->experts);
    free(o->x);
    free(o->y);
}

/* Calls of one kind, all ranks at once; rank 0 sees the CPU time of all. */
static void round_run(bench *b, int rank, objects *o, int kind, int round, epo_plan *plan) {
    epo_routing r = EPO_ROUTING_INIT;
    r.tokens = b->tokens;
    r.top_k = TOP_K;
    r.experts = o->experts;
    must(b, b->engine->group_barrier(o->group), "barrier");
    const double cpu = now_us(CLOCK_PROCESS_CPUTIME_ID), wall = now_us(CLOCK_MONOTONIC);
    for (int i = 0; i < BURST; i++) {
        epo_plan *made = NULL;
        if (kind == PASS) {
            must(b, b->engine->forward(o->layer, plan, o->x, o->y, NULL, NULL), "forward");
            continue;
        }
        if (kind == BARRIER) {
            must(b, b->engine->group_barrier(o->group), "barrier");
            continue;
        }
        must(b, b->engine->plan_create(o->buffer, &r, NULL, &made), "plan");
        b->engine->plan_release(made);
    }
    const double spent = now_us(CLOCK_MONOTONIC) - wall;
    must(b, b->engine->group_barrier(o->group), "barrier");
    if (round < 0)
        return;
    b->wall[kind][round][rank] = spent / BURST;
    if (rank == 0)
        b->cpu[kind][round] = (now_us(CLOCK_PROCESS_CPUTIME_ID) - cpu) / BURST / b->ranks;
}

static void *rank_main(void *arg) {
    const rank_args *a = arg;
    bench *b = a->b;
    objects o;
    epo_plan *plan = NULL;
    epo_routing r = EPO_ROUTING_INIT;
    const double begin = now_us(CLOCK_MONOTONIC);
    objects_make(b, a->rank, &o);
    b->made[a->rank] = now_us(CLOCK_MONOTONIC) - begin;
    r.tokens = b->tokens;
    r.top_k = TOP_K;
    r.experts = o.experts;
    must(b, b->engine->plan_create(o.buffer, &r, NULL, &plan), "plan");
    for (int round = -1; round < b->rounds; round++)
        for (int kind = 0; kind < KINDS; kind++)
            round_run(b, a->rank, &o, kind, round, plan);
    b->engine->plan_release(plan);
    objects_free(b, &o);
    return NULL;
}

static void report(bench *b, const char *dispatcher) {
    double us[KINDS], cpu[KINDS], slowest[ROUNDS], made = 0;
    for (int kind = 0; kind < KINDS; kind++) {
        for (int i = 0; i < b->rounds; i++) {
            slowest[i] = 0;
            for (int r = 0; r < b->ranks; r++)
                slowest[i] = b->wall[kind][i][r] > slowest[i] ? b->wall[kind][i][r] : slowest[i];
        }
        us[kind] = median(slowest, b->rounds);
        cpu[kind] = median(b->cpu[kind], b->rounds);
    }
    printf("%s\t%d\t%d\t%d", dispatcher, b->ranks, b->experts, b->tokens);
    for (int kind = 0; kind < KINDS; kind++)
        printf("\t%.1f", us[kind]);
    for (int kind = 0; kind < KINDS; kind++)
        printf("\t%.1f", cpu[kind]);
    for (int r = 0; r < b->ranks; r++)
        made = b->made[r] > made ? b->made[r] : made;
    printf("\t%.1f\n", made);
}

int main(int argc, char **argv) {
    static bench b;
    pthread_t thread[RANKS];
    rank_args args[RANKS];
    if (argc < 5) {
        fprintf(stderr, "usage: scaling RANKS EXPERTS TOKENS flex|alltoall [ROUNDS]\n");
        return 2;
    }
    b.ranks = (int)strtol(argv[1], NULL, 10);
    b.experts = (int)strtol(argv[2], NULL, 10);
    b.tokens = (int)strtol(argv[3], NULL, 10);
    b.dispatcher = strcmp(argv[4], "flex") == 0 ? EPO_DISPATCH_FLEX : EPO_DISPATCH_ALLTOALL;
    b.rounds = argc > 5 ? (int)strtol(argv[5], NULL, 10) : 9;
    if (b.ranks < 1 || b.ranks > RANKS || b.rounds < 1 || b.rounds > ROUNDS || b.tokens < 1 ||
        b.experts < 1 || b.experts % b.ranks != 0) {
        fprintf(stderr, "scaling: 1..%d ranks, a multiple of them experts, 1..%d rounds\n", RANKS,
                ROUNDS);
        return 2;
    }
    b.engine = epo_engine_entry(EPO_ENGINE_ABI);
    must(&b, b.engine->world_create(b.ranks, &b.world), "world");
    for (int r = 0; r < b.ranks; r++) {
        args[r] = (rank_args){&b, r};
        if (pthread_create(&thread[r], NULL, rank_main, &args[r]) != 0)
            return 1;
    }
    for (int r = 0; r < b.ranks; r++)
        pthread_join(thread[r], NULL);
    b.engine->world_destroy(b.world);
    report(&b, argv[4]);
    return 0;
}
