/* SPDX-License-Identifier: Apache-2.0
 *
 * job.c - one rank's small training job.  Its experts copy, so that y is top_k times x and
 * dx top_k times dy, to the bit; the first call that fails is noted, the rest is given back.
 */
#include "config.h"

#include "fault.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { TOKENS = 12, TOP_K = 2, HIDDEN = 32, FFN = 16, STEPS = 2, CHUNKS = 2, ALIGN = 4 };
enum { HOLD_MS = 200, HELD_MS = 60, LINK_HELD_MS = 40, COMES_LATE_MS = 250 };

typedef struct job {
    board *b;
    const epo_engine *engine;
    int number;      /* among all ranks of the job */
    int rank, ranks; /* of the group */
    int experts, step;
    bool failed, memory_ends;
    epo_stream stream;
    seat seat;
    epo_bootstrap bootstrap;
    int members[FAULT_RANKS];
    void *comm;
    epo_group *group;
    epo_buffer *buffer;
    epo_layer *layer;
    epo_plan *plan;
    epo_saved *saved;
    float *x, *y, *dy, *dx, *rows, *dweights;
    float *weights[4]; /* plain: w1, w2, dw1, dw2 */
    int64_t *routing;
} job;

static void nap(int ms) {
    const struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&t, NULL);
}

/* Notes the first failure; true as long as there is none. */
static bool went(job *j, const char *call, epo_status status) {
    if (status != EPO_OK && !j->failed) {
        j->failed = true;
        j->b->rank[j->number].status = (int)status;
        snprintf(j->b->rank[j->number].call, sizeof j->b->rank[0].call, "%s", call);
        snprintf(j->b->rank[j->number].text, TEXT, "%s", j->engine->error());
    }
    return !j->failed;
}

static bool twisted(job *j, twist t) {
    return j->step == STEPS - 1 && is_twisted(j->b, j->number, t);
}

/* Everything has run once before. */
static void moment(const job *j, phase p, int after_ms) {
    if (j->step == STEPS - 1)
        strike_at(j->b, j->number, p, after_ms);
}

/* Rows are under way for a while: on the host by the slow link, on a GPU because the
 * stream stands still. */
static void hold(void *ctx) {
    (void)ctx;
    nap(HOLD_MS);
}

static void moment_held(job *j, phase p, epo_stream stream) {
    if (j->step != STEPS - 1 || j->b->c.phase != p || j->number != VICTIM)
        return;
    if (!device_is_host())
        device_call(stream, hold, NULL);
    moment(j, p, device_is_host() ? LINK_HELD_MS : HELD_MS);
}

/* ---- the experts ---- */

static void at_forward(void *ctx) { moment(ctx, PHASE_FORWARD_EXPERTS, 0); }
static void at_backward(void *ctx) { moment(ctx, PHASE_BACKWARD_EXPERTS, 0); }
static void at_wgrad(void *ctx) { moment(ctx, PHASE_WGRAD, 0); }

static epo_status copy_rows(job *j, const epo_expert_call *c, void *to, const void *from) {
    const bool back = c->phase == EPO_EXPERT_DGRAD;
    const uint64_t at = c->row * HIDDEN * sizeof(float), bytes = c->rows * HIDDEN * sizeof(float);
    device_call(c->stream, back ? at_backward : at_forward, j);
    device_copy(c->stream, (char *)to + at, (const char *)from + at, bytes);
    if (c->first_expert + c->experts == j->experts / j->ranks)
        moment_held(j, back ? PHASE_BACKWARD_COMBINE : PHASE_FORWARD_COMBINE, c->stream);
    return twisted(j, back ? TWIST_DGRAD : TWIST_EXPERTS) ? EPO_E_SYSTEM : EPO_OK;
}

static epo_status run_experts(void *ctx, const epo_expert_call *c) {
    job *j = ctx;
    switch (c->phase) {
    case EPO_EXPERT_FORWARD: return copy_rows(j, c, c->y, c->x);
    case EPO_EXPERT_DGRAD:
        device_zero(c->stream, c->dweights + c->row, c->rows * sizeof(float));
        return copy_rows(j, c, c->dx, c->dy);
    default:
        device_call(c->stream, at_wgrad, j);
        return twisted(j, TWIST_WGRAD) ? EPO_E_SYSTEM : EPO_OK;
    }
}

/* ---- what the job is made of ---- */

static void *job_alloc(void *ctx, uint64_t bytes) {
    job *j = ctx;
    return j->memory_ends ? NULL : device_new(bytes);
}

static void job_free(void *ctx, void *p, uint64_t bytes) {
    (void)ctx;
    (void)bytes;
    device_free(p);
}

/* Those that are open stay. */
static void no_more_files(void) {
    const struct rlimit none = {0, 0};
    setrlimit(RLIMIT_NOFILE, &none);
}

/* Who is in the group, and how its ranks find each other. */
static void meet_by(job *j, epo_group_config *config) {
    const fault_case *c = &j->b->c;
    config->rank = j->rank;
    config->ranks = is_twisted(j->b, j->number, TWIST_RANKS) ? j->ranks + 1 : j->ranks;
    switch (c->way) {
    case WAY_BOOTSTRAP:
        j->bootstrap = seat_bootstrap(&j->seat);
        config->bootstrap = &j->bootstrap;
        break;
    case WAY_COMM:
        config->nccl_comm = j->comm = device_comm_open(&j->seat);
        config->rank = config->ranks = -1;
        break;
    default:
        if (c->groups == 1)
            break;
        for (int i = 0; i < j->ranks; i++)
            j->members[i] = j->number - j->rank + i;
        config->members = j->members;
        config->nmembers = j->ranks;
        config->rank = j->number;
        config->ranks = c->ranks;
    }
}

static bool open_group(job *j) {
    const fault_case *c = &j->b->c;
    epo_engine_group g = {sizeof g, EPO_GROUP_CONFIG_INIT, "a test"};
    g.config.engine = device_is_host() ? EPO_ENGINE_HOST : EPO_ENGINE_CUDA;
    meet_by(j, &g.config);
    g.config.overlap = g.config.delay_wgrad = EPO_ON;
    g.config.dispatcher =
        is_twisted(j->b, j->number, TWIST_DISPATCHER) ? EPO_DISPATCH_ALLTOALL : EPO_DISPATCH_FLEX;
    g.config.chunks = is_twisted(j->b, j->number, TWIST_CHUNKS) ? 1 : CHUNKS;
    g.config.timeout_s = c->limit_s;
    g.config.warn_s = c->kind == SLOW ? c->limit_s / 10 : 1000;
    if (c->twist == TWIST_ALLOC) {
        g.config.alloc = job_alloc;
        g.config.free = job_free;
        g.config.alloc_ctx = j;
    }
    if (c->phase == PHASE_MEETING && j->number == (j->ranks == 2 ? 0 : j->ranks - 1))
        nap(COMES_LATE_MS);
    strike_at(j->b, j->number, PHASE_GROUP, 0);
    if (is_twisted(j->b, j->number, TWIST_FILES))
        no_more_files();
    strike_at(j->b, j->number, PHASE_MEETING, HELD_MS);
    return went(j, "group_create", j->engine->group_create(&g, &j->group));
}

static bool open_buffer(job *j) {
    epo_buffer_config c = EPO_BUFFER_CONFIG_INIT;
    c.experts = j->experts;
    c.hidden = is_twisted(j->b, j->number, TWIST_HIDDEN) ? 2 * HIDDEN : HIDDEN;
    c.top_k = TOP_K;
    c.max_tokens = TOKENS;
    c.type = is_twisted(j->b, j->number, TWIST_TYPE) ? EPO_BF16 : EPO_F32;
    c.dispatcher = j->b->c.plain ? EPO_DISPATCH_ALLTOALL : EPO_DISPATCH_DEFAULT;
    c.align_rows = ALIGN;
    if (j->b->c.twist == TWIST_MAX_TOKENS) { /* terabytes */
        c.hidden = 1 << 14;
        c.max_tokens = 1 << 25;
        (void)is_twisted(j->b, j->number, TWIST_MAX_TOKENS);
    }
    strike_at(j->b, j->number, PHASE_BUFFER, 0);
    if (is_twisted(j->b, j->number, TWIST_FULL))
        device_fill();
    return went(j, "buffer_create", j->engine->buffer_create(j->group, &c, &j->buffer));
}

static bool open_layer(job *j) {
    epo_layer_config c = EPO_LAYER_CONFIG_INIT;
    c.experts = j->experts;
    c.hidden = HIDDEN;
    if (j->b->c.plain) {
        c.ffn = FFN;
        c.w1 = j->weights[0];
        c.w2 = j->weights[1];
        c.dw1 = j->weights[2];
        c.dw2 = j->weights[3];
    } else {
        c.expert = run_experts;
        c.ctx = j;
        c.expert_wgrad = 1;
    }
    return went(j, "layer_create", j->engine->layer_create(j->group, &c, &j->layer));
}

static float x_of(const job *j, int i) { return (float)(j->rank * 1000 + i); }

static void open_arrays(job *j) {
    const uint64_t bytes = sizeof(float) * TOKENS * HIDDEN;
    const uint64_t most = (uint64_t)(j->ranks * TOKENS * TOP_K + j->experts * ALIGN);
    float x[TOKENS * HIDDEN];
    int64_t routing[TOKENS * TOP_K];
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        x[i] = x_of(j, i);
    for (int i = 0; i < TOKENS * TOP_K; i++)
        routing[i] = (i / TOP_K * 3 + j->rank + i % TOP_K * j->experts / TOP_K) % j->experts;
    if (is_twisted(j->b, j->number, TWIST_INDEX))
        routing[5] = j->experts;
    j->x = device_new(bytes);
    j->dy = device_new(bytes);
    j->y = device_new(bytes);
    j->dx = device_new(bytes);
    j->rows = device_new(most * HIDDEN * sizeof(float));
    j->dweights = device_new(sizeof(float) * TOKENS * TOP_K);
    j->routing = device_new(sizeof routing);
    for (int i = 0; i < 4 && j->b->c.plain; i++)
        j->weights[i] = device_new((uint64_t)(2 - i % 2) * 2 * FFN * HIDDEN * sizeof(float));
    device_put(j->x, x, bytes);
    device_put(j->dy, x, bytes);
    device_put(j->routing, routing, sizeof routing);
}

/* ---- a step ---- */

static bool make_plan(job *j) {
    epo_routing r = EPO_ROUTING_INIT;
    r.tokens = twisted(j, TWIST_TOKENS) ? TOKENS + 1 : TOKENS;
    r.top_k = twisted(j, TWIST_TOP_K) ? TOP_K - 1 : TOP_K;
    r.experts = j->routing;
    moment(j, PHASE_PLAN, 0);
    return went(j, "plan_create", j->engine->plan_create(j->buffer, &r, j->stream, &j->plan));
}

static bool there_and_back(job *j) {
    const epo_engine *e = j->engine;
    moment_held(j, PHASE_DISPATCH, j->stream);
    if (!twisted(j, TWIST_ORDER) &&
        !went(j, "dispatch", e->dispatch(j->plan, j->x, j->rows, NULL, j->stream)))
        return false;
    moment_held(j, PHASE_COMBINE, j->stream);
    return went(j, "combine", e->combine(j->plan, j->rows, j->y, NULL, NULL, j->stream));
}

static bool forward(job *j) {
    const epo_engine *e = j->engine;
    if (twisted(j, TWIST_BARRIER))
        return went(j, "barrier", e->group_barrier(j->group));
    moment_held(j, PHASE_FORWARD_DISPATCH, j->stream);
    j->memory_ends = is_twisted(j->b, j->number, TWIST_ALLOC);
    return went(j, "forward",
                e->forward(j->layer, j->plan, twisted(j, TWIST_NULL) ? NULL : j->x, j->y, &j->saved,
                           j->stream));
}

static bool backward(job *j) {
    epo_saved *saved = j->saved;
    j->saved = NULL;
    moment_held(j, PHASE_BACKWARD_DISPATCH, j->stream);
    return went(j, "backward",
                j->engine->backward(j->layer, saved, j->dy, j->dx, j->dweights, j->stream));
}

static bool step_end(job *j) {
    const epo_engine *e = j->engine;
    float sum[3] = {(float)j->rank, 1, 2};
    float *data = device_is_host() ? sum : j->dweights;
    const phase at = j->b->c.phase;
    if (at >= PHASE_FLUSH && at <= PHASE_SUM && !device_wait(j->stream)) /* what was enqueued */
        return went(j, "the device", EPO_E_SYSTEM);
    moment(j, PHASE_FLUSH, 0);
    if (!went(j, "flush", e->group_wgrad_flush(j->group, j->stream)))
        return false;
    moment(j, PHASE_BARRIER, 0);
    if (!went(j, "barrier", e->group_barrier(j->group)))
        return false;
    moment(j, PHASE_SUM, 0);
    if (!went(j, "allreduce", e->group_allreduce(j->group, data, 3, j->stream)))
        return false;
    if (!device_wait(j->stream))
        return went(j, "the device", EPO_E_SYSTEM);
    return went(j, "async_error", e->group_async_error(j->group));
}

/* y and dx are top_k times what went in (of experts of the engine's other tests tell). */
static int count_wrong(const job *j) {
    float y[TOKENS * HIDDEN], dx[TOKENS * HIDDEN];
    int wrong = 0;
    device_take(y, j->y, sizeof y);
    device_take(dx, j->dx, sizeof dx);
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        wrong += y[i] != TOP_K * x_of(j, i) || dx[i] != TOP_K * x_of(j, i);
    return j->b->c.plain ? 0 : wrong;
}

static int steps(job *j) {
    int wrong = 0;
    for (j->step = 0; j->step < STEPS; j->step++) {
        j->engine->plan_release(j->plan);
        j->plan = NULL;
        if (!make_plan(j) || !there_and_back(j) || !(twisted(j, TWIST_SKIP) || forward(j)))
            return wrong;
        if (twisted(j, TWIST_LEAVE))
            return wrong;
        if (!backward(j) || !step_end(j))
            return wrong;
        wrong += count_wrong(j);
    }
    j->step = STEPS - 1;
    return wrong;
}

static void close_all(job *j) {
    const epo_engine *e = j->engine;
    e->saved_release(j->saved);
    e->plan_release(j->plan);
    (void)went(j, "layer_destroy", e->layer_destroy(j->layer));
    (void)went(j, "buffer_destroy", e->buffer_destroy(j->buffer));
    moment(j, PHASE_DESTROY, 0);
    (void)went(j, "group_destroy", e->group_destroy(j->group));
    device_comm_close(j->comm, j->failed); /* before what waits for its kernels */
    void *const arrays[] = {j->x,          j->y,          j->dy,        j->dx,
                            j->rows,       j->dweights,   j->routing,   j->weights[0],
                            j->weights[1], j->weights[2], j->weights[3]};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        device_free(arrays[i]);
    device_close(j->stream);
}

int job_run(board *b, int rank) {
    const int ranks = b->c.ranks / b->c.groups, group = rank / ranks;
    job j = {.b = b,
             .engine = epo_engine_entry(EPO_ENGINE_ABI),
             .number = rank,
             .rank = rank % ranks,
             .ranks = ranks,
             .experts = 2 * ranks,
             .seat = {b, rank, group, rank % ranks, ranks, 0}};
    int wrong = 0;
    j.stream = device_open(b, rank);
    open_arrays(&j);
    if (open_group(&j) && open_buffer(&j) && open_layer(&j))
        wrong = steps(&j);
    close_all(&j);
    if (j.failed)
        fprintf(stderr, "rank %d: %s: %s\n", rank, b->rank[rank].call, b->rank[rank].text);
    return j.failed ? 1 : wrong > 0 ? 2 : 0;
}
