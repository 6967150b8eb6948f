/* SPDX-License-Identifier: Apache-2.0
 *
 * What programs do with the engine beside one plain layer: experts of their own,
 * shared buffers, plans used again, inference, gradients later, figures.
 */
#include "moe_ranks.h"
#include "unit.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { R = 3, E = 12, H = 10, F = 6, K = 3, T = 17 };

/* A case, a way to run it, and room for what a test wants to keep. */
typedef struct setting {
    moe_case c;
    moe_how how;
    pthread_barrier_t meet; /* of delayed_rank */
    bool waits[R];
} setting;

static void fill_setting(setting *s, epo_dispatcher dispatcher, int overlap, int delay) {
    memset(s, 0, sizeof *s);
    s->c = (moe_case){.seed = 11,
                      .ranks = R,
                      .experts = E,
                      .hidden = H,
                      .ffn = F,
                      .top_k = K,
                      .batches = 2,
                      .max_tokens = T,
                      .type = EPO_F32,
                      .style = CASE_UNIFORM};
    moe_case_fill(&s->c);
    s->how = (moe_how){.dispatcher = dispatcher, .overlap = overlap, .delay = delay, .chunks = 2};
}

/* Runs fn on all ranks for both dispatchers, serial, overlapped and delayed. */
static void in_every_setting(void (*fn)(moe_rank *c)) {
    for (int d = EPO_DISPATCH_ALLTOALL; d <= EPO_DISPATCH_FLEX; d++)
        for (int mode = 0; mode < 3; mode++) {
            setting s;
            fill_setting(&s, (epo_dispatcher)d, mode > 0, mode > 1);
            CU_ASSERT_EQUAL(moe_ranks(R, 30.0, fn, &s), 0);
            moe_case_free(&s.c);
        }
}

/* ---- a rank's objects ------------------------------------------------------ */

typedef struct tools {
    moe_rank *rank;
    const setting *s;
    const epo_engine *e;
    epo_group *group;
    epo_buffer *buffer;
    epo_plan *plan[2];
    float *w1, *w2;
} tools;

static epo_plan *make_plan(tools *t, epo_buffer *buffer, int b) {
    const case_batch *in = &t->s->c.batch[b][t->rank->rank];
    const epo_routing routing = config_routing(in->tokens, K, in->experts, in->weights);
    epo_plan *plan = NULL;
    EXPECT(t->rank, t->e->plan_create(buffer, &routing, NULL, &plan) == EPO_OK);
    return plan;
}

static void tools_open(tools *t, moe_rank *rank) {
    const setting *s = rank->arg;
    *t = (tools){.rank = rank, .s = s, .e = rank->engine};
    t->group = moe_rank_group(rank, &s->how);
    const epo_buffer_config config = config_buffer(E, H, K, T);
    EXPECT(rank, t->e->buffer_create(t->group, &config, &t->buffer) == EPO_OK);
    for (int b = 0; b < 2; b++)
        t->plan[b] = make_plan(t, t->buffer, b);
    size_t stack = (size_t)E / R * F * H, at = stack * (size_t)rank->rank;
    t->w1 = moe_pack(s->c.w1 + 2 * at, 2 * stack, EPO_F32);
    t->w2 = moe_pack(s->c.w2 + at, stack, EPO_F32);
}

static void tools_close(tools *t) {
    for (int b = 0; b < 2; b++)
        t->e->plan_release(t->plan[b]);
    EXPECT(t->rank, t->e->buffer_destroy(t->buffer) == EPO_OK);
    EXPECT(t->rank, t->e->group_destroy(t->group) == EPO_OK);
    free(t->w1);
    free(t->w2);
}

/* Gradients of one layer, zero before. */
typedef struct layer_tools {
    epo_layer *layer;
    float *dw1, *dw2;
    int ready;
    uint64_t last;
} layer_tools;

static void note_ready(void *ctx, epo_layer *layer, uint64_t microbatch) {
    layer_tools *l = ctx;
    (void)layer;
    l->ready++;
    l->last = microbatch;
}

static void layer_open(tools *t, layer_tools *l, bool gradients) {
    size_t stack = (size_t)E / R * F * H;
    *l = (layer_tools){NULL, moe_calloc(2 * stack, sizeof(float)), moe_calloc(stack, sizeof(float)),
                       0, 99};
    epo_layer_config config = config_layer(E, H, F, t->w1, t->w2);
    config.dw1 = gradients ? l->dw1 : NULL;
    config.dw2 = gradients ? l->dw2 : NULL;
    config.wgrad_ready = note_ready;
    config.ctx = l;
    EXPECT(t->rank, t->e->layer_create(t->group, &config, &l->layer) == EPO_OK);
}

static void layer_close(tools *t, layer_tools *l) {
    EXPECT(t->rank, t->e->layer_destroy(l->layer) == EPO_OK);
    free(l->dw1);
    free(l->dw2);
}

static bool same_gradients(const layer_tools *a, const layer_tools *b) {
    size_t stack = (size_t)E / R * F * H;
    return memcmp(a->dw1, b->dw1, 2 * stack * sizeof(float)) == 0 &&
           memcmp(a->dw2, b->dw2, stack * sizeof(float)) == 0;
}

/* Outputs of one forward and backward. */
typedef struct outputs {
    float y[T * H], dx[T * H], dweights[T * K];
} outputs;

static epo_saved *forward(tools *t, layer_tools *l, int b, outputs *o) {
    const case_batch *in = &t->s->c.batch[b][t->rank->rank];
    epo_saved *saved = NULL;
    memset(o, 0xff, sizeof *o);
    EXPECT(t->rank, t->e->forward(l->layer, t->plan[b], in->x, o->y, &saved, NULL) == EPO_OK);
    return saved;
}

static void backward(tools *t, layer_tools *l, int b, epo_saved *saved, outputs *o) {
    const case_batch *in = &t->s->c.batch[b][t->rank->rank];
    EXPECT(t->rank, t->e->backward(l->layer, saved, in->dy, o->dx, o->dweights, NULL) == EPO_OK);
}

/* ---- experts of the caller -------------------------------------------------- */

static void own_experts_rank(moe_rank *rank) {
    tools t;
    tools_open(&t, rank);
    const case_batch *in = &t.s->c.batch[0][rank->rank];
    uint64_t rows = 0, first[E / R], count[E / R], real = 0;
    EXPECT(rank, t.e->plan_rows(t.plan[0], &rows) == EPO_OK);
    EXPECT(rank, t.e->plan_experts(t.plan[0], first, count) == EPO_OK);
    float *x = moe_calloc(rows * H, sizeof *x), *w = moe_calloc(rows, sizeof *w);
    float y[T * H], dweights[T * K];
    memset(x, 0xff, rows * H * sizeof *x);
    memset(w, 0xff, rows * sizeof *w);
    memset(y, 0xff, sizeof y);
    memset(dweights, 0xff, sizeof dweights);
    EXPECT(rank, t.e->dispatch(t.plan[0], in->x, x, w, NULL) == EPO_OK);
    for (int e = 0; e < E / R; e++) {
        uint64_t end = e + 1 < E / R ? first[e + 1] : rows;
        EXPECT(rank, first[e] % 16 == 0);
        for (uint64_t i = first[e] + count[e]; i < end; i++) {
            EXPECT(rank, w[i] == 0);
            for (int j = 0; j < H; j++)
                EXPECT(rank, x[i * H + (uint64_t)j] == 0);
        }
        real += count[e];
    }
    EXPECT(rank, real <= rows);
    /* Identity experts: every used slot gives the token once, and its weight back. */
    EXPECT(rank, t.e->combine(t.plan[0], x, y, w, dweights, NULL) == EPO_OK);
    for (int i = 0; i < in->tokens; i++) {
        int used = 0;
        for (int k = 0; k < K; k++) {
            bool on = in->experts[i * K + k] >= 0;
            float want = !on ? 0.0F : in->weights != NULL ? in->weights[i * K + k] : 1.0F;
            EXPECT(rank, dweights[i * K + k] == want);
            used += on;
        }
        for (int j = 0; j < H; j++)
            EXPECT(rank, fabsf(y[i * H + j] - (float)used * in->x[i * H + j]) < 1e-5F);
    }
    EXPECT(rank, t.e->dispatch(t.plan[0], in->x, x, NULL, NULL) == EPO_OK);
    EXPECT(rank, t.e->combine(t.plan[0], x, y, NULL, NULL, NULL) == EPO_OK);
    free(x);
    free(w);
    tools_close(&t);
}

static void own_experts(void) { in_every_setting(own_experts_rank); }

/* Dispatches in a row, and combines in a row: a fast rank must not write into a
 * slot that a slow one still reads. Each use carries its number. */
enum { USES = 40 };

static void late(moe_rank *rank, int use) {
    if ((use + rank->rank) % R == 0)
        nanosleep(&(struct timespec){0, 300000}, NULL);
}

static void dispatch_often(tools *t, float *rows, uint64_t n) {
    float x[T * H];
    for (int use = 0; use < USES; use++) {
        for (int i = 0; i < T * H; i++)
            x[i] = (float)(use + 1);
        EXPECT(t->rank, t->e->dispatch(t->plan[0], x, rows, NULL, NULL) == EPO_OK);
        for (uint64_t i = 0; i < n * H; i++)
            EXPECT(t->rank, rows[i] == 0 || rows[i] == (float)(use + 1));
        late(t->rank, use);
    }
}

static void combine_often(tools *t, float *rows, uint64_t n) {
    const case_batch *in = &t->s->c.batch[0][t->rank->rank];
    float y[T * H];
    for (int use = 0; use < USES; use++) {
        for (uint64_t i = 0; i < n * H; i++)
            rows[i] = (float)(use + 1);
        EXPECT(t->rank, t->e->combine(t->plan[0], rows, y, NULL, NULL, NULL) == EPO_OK);
        for (int i = 0; i < in->tokens; i++) {
            int used = 0;
            for (int k = 0; k < K; k++)
                used += in->experts[i * K + k] >= 0;
            EXPECT(t->rank, y[i * H] == (float)(used * (use + 1)));
        }
        late(t->rank, use);
    }
}

static void slots_rank(moe_rank *rank) {
    tools t;
    uint64_t n = 0;
    tools_open(&t, rank);
    EXPECT(rank, t.e->plan_rows(t.plan[0], &n) == EPO_OK);
    float *rows = moe_calloc(n * H, sizeof *rows);
    dispatch_often(&t, rows, n);
    combine_often(&t, rows, n);
    free(rows);
    tools_close(&t);
}

static void slots_are_not_overrun(void) { in_every_setting(slots_rank); }

/* ---- shared and used again ---------------------------------------------------- */

static void shared_buffer_rank(moe_rank *rank) {
    tools t;
    layer_tools a, b, alone;
    outputs oa, ob, want;
    tools_open(&t, rank);
    layer_open(&t, &a, true);
    layer_open(&t, &b, true);
    layer_open(&t, &alone, true);
    backward(&t, &alone, 0, forward(&t, &alone, 0, &want), &want);
    /* fa fb bb ba: slots of the one buffer are used in turns. */
    epo_saved *sa = forward(&t, &a, 0, &oa), *sb = forward(&t, &b, 1, &ob);
    backward(&t, &b, 1, sb, &ob);
    backward(&t, &a, 0, sa, &oa);
    EXPECT(rank, t.e->group_wgrad_flush(t.group, NULL) == EPO_OK);
    EXPECT(rank, memcmp(&oa, &want, sizeof oa) == 0);
    EXPECT(rank, same_gradients(&a, &alone));
    layer_close(&t, &a);
    layer_close(&t, &b);
    layer_close(&t, &alone);
    tools_close(&t);
}

static void shared_buffer(void) { in_every_setting(shared_buffer_rank); }

/* The forward is made again before its backward, on the plan of the first. */
static void plan_again_rank(moe_rank *rank) {
    tools t;
    layer_tools a, b;
    outputs first, second, inference;
    tools_open(&t, rank);
    layer_open(&t, &a, true);
    layer_open(&t, &b, true);
    epo_saved *dropped = forward(&t, &a, 0, &first);
    t.e->saved_release(dropped);
    backward(&t, &a, 0, forward(&t, &a, 0, &second), &second);
    EXPECT(rank, memcmp(first.y, second.y, sizeof first.y) == 0);
    const case_batch *in = &t.s->c.batch[0][rank->rank];
    memset(&inference, 0xff, sizeof inference);
    EXPECT(rank, t.e->forward(b.layer, t.plan[0], in->x, inference.y, NULL, NULL) == EPO_OK);
    EXPECT(rank, memcmp(first.y, inference.y, sizeof first.y) == 0);
    /* The plan outlives the caller's reference while a pass is saved. */
    epo_plan *plan = make_plan(&t, t.buffer, 0);
    epo_saved *saved = NULL;
    EXPECT(rank, t.e->forward(b.layer, plan, in->x, inference.y, &saved, NULL) == EPO_OK);
    t.e->plan_release(plan);
    EXPECT(rank, t.e->backward(b.layer, saved, in->dy, inference.dx, NULL, NULL) == EPO_OK);
    EXPECT(rank, memcmp(second.dx, inference.dx, sizeof second.dx) == 0);
    EXPECT(rank, t.e->group_wgrad_flush(t.group, NULL) == EPO_OK);
    EXPECT(rank, same_gradients(&a, &b));
    layer_close(&t, &a);
    layer_close(&t, &b);
    tools_close(&t);
}

static void plan_again(void) { in_every_setting(plan_again_rank); }

static void without_gradients_rank(moe_rank *rank) {
    tools t;
    layer_tools with, without;
    outputs a, b;
    tools_open(&t, rank);
    layer_open(&t, &with, true);
    layer_open(&t, &without, false);
    EXPECT(rank, t.e->layer_wgrad_begin(without.layer) == EPO_E_STATE);
    EXPECT(rank, strstr(t.e->error(), "has no dw1 and dw2") != NULL);
    backward(&t, &with, 0, forward(&t, &with, 0, &a), &a);
    backward(&t, &without, 0, forward(&t, &without, 0, &b), &b);
    EXPECT(rank, memcmp(&a, &b, sizeof a) == 0);
    EXPECT(rank, t.e->group_wgrad_flush(t.group, NULL) == EPO_OK);
    EXPECT(rank, with.ready == 1 && with.last == 0 && without.ready == 0);
    layer_close(&t, &with);
    layer_close(&t, &without);
    tools_close(&t);
}

static void without_gradients(void) { in_every_setting(without_gradients_rank); }

/* Two groups of the same ranks: calls on them take turns. */
static void two_groups_rank(moe_rank *rank) {
    tools t[2];
    layer_tools l[2];
    outputs o[2];
    epo_saved *saved[2];
    for (int i = 0; i < 2; i++) {
        tools_open(&t[i], rank);
        layer_open(&t[i], &l[i], true);
    }
    for (int i = 0; i < 2; i++)
        saved[i] = forward(&t[i], &l[i], 0, &o[i]);
    for (int i = 1; i >= 0; i--)
        backward(&t[i], &l[i], 0, saved[i], &o[i]);
    EXPECT(rank, memcmp(&o[0], &o[1], sizeof o[0]) == 0);
    for (int i = 0; i < 2; i++)
        EXPECT(rank, t[i].e->group_wgrad_flush(t[i].group, NULL) == EPO_OK);
    EXPECT(rank, same_gradients(&l[0], &l[1]));
    for (int i = 0; i < 2; i++) {
        layer_close(&t[i], &l[i]);
        tools_close(&t[i]);
    }
}

static void two_groups(void) { in_every_setting(two_groups_rank); }

/* ---- delayed weight gradients -------------------------------------------------- */

/* True on every rank while one of them waits: passes are collective, so that all
 * ranks must make the same number of them. */
static bool somebody_waits(moe_rank *rank, bool waits) {
    setting *s = rank->arg;
    bool any = false;
    s->waits[rank->rank] = waits;
    pthread_barrier_wait(&s->meet);
    for (int r = 0; r < R; r++)
        any |= s->waits[r];
    pthread_barrier_wait(&s->meet);
    return any;
}

static void delayed_rank(moe_rank *rank) {
    tools t;
    layer_tools a, b;
    outputs o;
    epo_stats stats = {.size = sizeof stats};
    tools_open(&t, rank);
    layer_open(&t, &a, true);
    layer_open(&t, &b, true);
    backward(&t, &a, 0, forward(&t, &a, 0, &o), &o);
    EXPECT(rank, a.ready == 0);
    EXPECT(rank, t.e->layer_wgrad_flush(b.layer, NULL) == EPO_OK);
    EXPECT(rank, a.ready == 0); /* another layer's flush is none of its business */
    EXPECT(rank, t.e->layer_wgrad_flush(a.layer, NULL) == EPO_OK);
    EXPECT(rank, a.ready == 1 && a.last == 0);
    EXPECT(rank, t.e->group_stats(t.group, &stats, 0) == EPO_OK);
    EXPECT(rank, stats.wgrad_hidden == 0);
    /* Another layer's passes run what waits: some pass sees it done. */
    backward(&t, &a, 0, forward(&t, &a, 0, &o), &o);
    for (int i = 0; i < 1000 && somebody_waits(rank, a.ready == 1); i++)
        t.e->saved_release(forward(&t, &b, 1, &o));
    EXPECT(rank, a.ready == 2 && a.last == 1);
    EXPECT(rank, t.e->group_stats(t.group, &stats, 0) == EPO_OK);
    uint64_t real = 0, count[E / R];
    EXPECT(rank, t.e->plan_experts(t.plan[0], NULL, count) == EPO_OK);
    for (int e = 0; e < E / R; e++)
        real += count[e] > 0 ? 2 : 0;
    EXPECT(rank, stats.wgrad_delayed == 2 * real && stats.wgrad_hidden == real);
    /* Destroying a layer runs what it still owes. */
    backward(&t, &a, 0, forward(&t, &a, 0, &o), &o);
    EXPECT(rank, t.e->layer_destroy(a.layer) == EPO_OK);
    EXPECT(rank, a.ready == 3 && a.last == 2);
    free(a.dw1);
    free(a.dw2);
    layer_close(&t, &b);
    tools_close(&t);
}

/* A limit of one byte: nothing waits longer than its own call. */
static void limit_rank(moe_rank *rank) {
    tools t;
    layer_tools a;
    outputs o;
    tools_open(&t, rank);
    layer_open(&t, &a, true);
    for (int i = 1; i <= 3; i++) {
        backward(&t, &a, 0, forward(&t, &a, 0, &o), &o);
        EXPECT(rank, a.ready == i);
    }
    layer_close(&t, &a);
    tools_close(&t);
}

/* A buffer may go before the weight gradients whose plans came from it. */
static void buffer_first_rank(moe_rank *rank) {
    tools t;
    layer_tools a;
    outputs o;
    tools_open(&t, rank);
    layer_open(&t, &a, true);
    backward(&t, &a, 0, forward(&t, &a, 0, &o), &o);
    EXPECT(rank, a.ready == 0);
    for (int b = 0; b < 2; b++)
        t.e->plan_release(t.plan[b]);
    EXPECT(rank, t.e->buffer_destroy(t.buffer) == EPO_OK);
    EXPECT(rank, a.ready == 1);
    layer_close(&t, &a);
    EXPECT(rank, t.e->group_destroy(t.group) == EPO_OK);
    free(t.w1);
    free(t.w2);
}

static void delayed_runs_later_once(void) {
    for (int d = EPO_DISPATCH_ALLTOALL; d <= EPO_DISPATCH_FLEX; d++) {
        setting s;
        fill_setting(&s, (epo_dispatcher)d, 1, 1);
        pthread_barrier_init(&s.meet, NULL, R);
        CU_ASSERT_EQUAL(moe_ranks(R, 30.0, delayed_rank, &s), 0);
        pthread_barrier_destroy(&s.meet);
        CU_ASSERT_EQUAL(moe_ranks(R, 30.0, buffer_first_rank, &s), 0);
        s.how.wgrad_limit = 1;
        CU_ASSERT_EQUAL(moe_ranks(R, 30.0, limit_rank, &s), 0);
        moe_case_free(&s.c);
    }
}

/* ---- figures -------------------------------------------------------------------- */

/* Rows that cross from a rank to another one (-1: any), counted from the routing. */
static uint64_t remote_rows(const setting *s, int b, int rank, int peer) {
    const case_batch *in = &s->c.batch[b][rank];
    uint64_t slots = 0, tokens = 0;
    for (int t = 0; t < in->tokens; t++) {
        bool to[R] = {false};
        for (int k = 0; k < K; k++) {
            int64_t e = in->experts[t * K + k];
            if (e < 0 || e / (E / R) == rank || (peer >= 0 && e / (E / R) != peer))
                continue;
            slots++;
            tokens += !to[e / (E / R)];
            to[e / (E / R)] = true;
        }
    }
    return s->how.dispatcher == EPO_DISPATCH_FLEX ? tokens : slots;
}

/* Tokens of all ranks that have an expert on this one. */
static uint64_t tokens_here(const setting *s, int b, int rank) {
    uint64_t n = 0;
    for (int r = 0; r < R; r++)
        for (int t = 0; t < s->c.batch[b][r].tokens; t++) {
            bool here = false;
            for (int k = 0; k < K; k++) {
                const int64_t e = s->c.batch[b][r].experts[t * K + k];
                here = here || (e >= 0 && e / (E / R) == rank);
            }
            n += here;
        }
    return n;
}

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void figures_rank(moe_rank *rank) {
    tools t;
    layer_tools a;
    outputs o;
    epo_stats stats = {.size = sizeof stats}, later = {.size = sizeof later};
    tools_open(&t, rank);
    layer_open(&t, &a, true);
    const double start = seconds_now();
    backward(&t, &a, 0, forward(&t, &a, 0, &o), &o);
    const double took = seconds_now() - start;
    EXPECT(rank, t.e->group_wgrad_flush(t.group, NULL) == EPO_OK);
    EXPECT(rank, t.e->group_stats(t.group, &stats, 1) == EPO_OK);
    EXPECT(rank, stats.forward_calls == 1 && stats.backward_calls == 1);
    EXPECT(rank, stats.call_s > 0 && stats.call_s <= took);
    const uint64_t row = H * sizeof(float);
    uint64_t returned = 0;
    for (int r = 0; r < R; r++)
        returned += r == rank->rank ? 0 : remote_rows(t.s, 0, r, rank->rank);
    EXPECT(rank, stats.dispatch_bytes == 2 * remote_rows(t.s, 0, rank->rank, -1) * row);
    EXPECT(rank, stats.combine_bytes == 2 * returned * row);
    /* Each pass: expert-major rows are written from those that came, K are summed into a
     * token's own row; flex sums a token's rows on their way, too (R = K, so K come back). */
    uint64_t rows = 0;
    EXPECT(rank, t.e->plan_rows(t.plan[0], &rows) == EPO_OK);
    const uint64_t sums =
        (uint64_t)t.s->c.batch[0][rank->rank].tokens +
        (t.s->how.dispatcher == EPO_DISPATCH_FLEX ? tokens_here(t.s, 0, rank->rank) : 0);
    EXPECT(rank, stats.local_bytes == 2 * (2 * rows + (K + 1) * sums) * row);
    EXPECT(rank, stats.control_bytes > 0);
    /* The same sizes again: not a byte more. */
    for (int i = 0; i < 5; i++) {
        backward(&t, &a, 0, forward(&t, &a, 0, &o), &o);
        EXPECT(rank, t.e->group_wgrad_flush(t.group, NULL) == EPO_OK);
    }
    EXPECT(rank, t.e->group_stats(t.group, &later, 0) == EPO_OK);
    EXPECT(rank, later.forward_calls == 5);
    EXPECT(rank, later.memory_peak == stats.memory_peak);
    layer_close(&t, &a);
    tools_close(&t);
}

static void figures(void) { in_every_setting(figures_rank); }

static void recording_rank(moe_rank *rank) {
    tools t;
    layer_tools a;
    outputs o;
    const epo_interval *intervals = NULL;
    uint64_t count = 0, dropped = 9;
    tools_open(&t, rank);
    layer_open(&t, &a, true);
    EXPECT(rank, t.e->record_start(t.group, 10000) == EPO_OK);
    for (int i = 0; i < 5; i++)
        backward(&t, &a, 0, forward(&t, &a, 0, &o), &o);
    EXPECT(rank, t.e->group_wgrad_flush(t.group, NULL) == EPO_OK);
    EXPECT(rank, t.e->record_stop(t.group, &intervals, &count, &dropped) == EPO_OK);
    int dispatches = 0, combines = 0, wgrads = 0;
    for (uint64_t i = 0; i < count; i++) {
        EXPECT(rank, intervals[i].start_ns <= intervals[i].end_ns);
        dispatches += strcmp(intervals[i].name, "dispatch") == 0;
        combines += strcmp(intervals[i].name, "combine") == 0;
        wgrads += strncmp(intervals[i].name, "wgrad", 5) == 0;
    }
    int chunks = t.s->how.overlap ? t.s->how.chunks : 1;
    EXPECT(rank, dropped == 0 && dispatches == 10 * chunks && combines == 10 * chunks);
    EXPECT(rank, wgrads > 0);
    layer_close(&t, &a);
    tools_close(&t);
}

static void recording(void) { in_every_setting(recording_rank); }

static void query_rank(moe_rank *rank) {
    tools t;
    tools_open(&t, rank);
    epo_group_info info = {.size = sizeof info};
    EXPECT(rank, t.e->group_query(t.group, &info) == EPO_OK);
    EXPECT(rank, info.rank == rank->rank && info.ranks == R && info.chunks == 2);
    EXPECT(rank, info.overlap == t.s->how.overlap && info.delay_wgrad == t.s->how.delay);
    EXPECT(rank, info.dispatcher == t.s->how.dispatcher);
    EXPECT(rank, strcmp(info.reason, "a test") == 0 && strcmp(info.engine, "host") == 0);
    uint64_t bytes = 0;
    epo_stats before = {.size = sizeof before}, after = {.size = sizeof after};
    const epo_buffer_config config = config_buffer(E, 512, K, 100);
    epo_buffer *buffer = NULL;
    EXPECT(rank, t.e->buffer_bytes(t.group, &config, &bytes) == EPO_OK);
    EXPECT(rank, t.e->group_stats(t.group, &before, 0) == EPO_OK);
    EXPECT(rank, t.e->buffer_create(t.group, &config, &buffer) == EPO_OK);
    EXPECT(rank, t.e->group_stats(t.group, &after, 0) == EPO_OK);
    uint64_t took = after.memory_bytes - before.memory_bytes;
    EXPECT(rank, took == bytes);
    EXPECT(rank, t.e->buffer_destroy(buffer) == EPO_OK);
    float sum[2] = {(float)rank->rank, 1.0F};
    EXPECT(rank, t.e->group_barrier(t.group) == EPO_OK);
    EXPECT(rank, t.e->group_allreduce(t.group, sum, 2, NULL) == EPO_OK);
    EXPECT(rank, sum[0] == 3.0F && sum[1] == 3.0F);
    EXPECT(rank, t.e->group_async_error(t.group) == EPO_OK);
    tools_close(&t);
}

static void query(void) { in_every_setting(query_rank); }

int main(void) {
    const CU_TestInfo tests[] = {
        {"dispatch and combine for a caller's own experts", own_experts},
        {"a slot is not written while it is read", slots_are_not_overrun},
        {"two layers share a buffer", shared_buffer},
        {"a plan is used again; inference; a plan outlives its reference", plan_again},
        {"no weight gradients, no callback", without_gradients},
        {"two groups at once", two_groups},
        {"delayed weight gradients run later, once", delayed_runs_later_once},
        {"figures", figures},
        {"a recording holds every chunk", recording},
        {"what a group tells", query},
        CU_TEST_INFO_NULL,
    };
    return unit_run("moe api", tests);
}
