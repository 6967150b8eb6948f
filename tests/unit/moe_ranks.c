/* SPDX-License-Identifier: Apache-2.0 */
#include "moe_ranks.h"
#include "core/names.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- threads as ranks ---------------------------------------------------- */

typedef struct rank_start {
    moe_rank rank;
    void (*fn)(moe_rank *c);
} rank_start;

static void *rank_main(void *arg) {
    rank_start *s = arg;
    s->fn(&s->rank);
    return NULL;
}

int moe_ranks(int ranks, double timeout_s, void (*fn)(moe_rank *c), void *arg) {
    const epo_engine *engine = epo_engine_entry(EPO_ENGINE_ABI);
    rank_start start[CASE_RANKS];
    pthread_t thread[CASE_RANKS];
    epo_world *world = NULL;
    int failures = 0;
    if (engine == NULL || engine->world_create(ranks, &world) != EPO_OK)
        return 1000;
    for (int r = 0; r < ranks; r++) {
        start[r] = (rank_start){{engine, world, r, ranks, NULL, ranks, timeout_s, arg, 0}, fn};
        if (pthread_create(&thread[r], NULL, rank_main, &start[r]) != 0)
            abort();
    }
    for (int r = 0; r < ranks; r++) {
        pthread_join(thread[r], NULL);
        failures += start[r].rank.failures;
    }
    engine->world_destroy(world);
    return failures;
}

epo_group *moe_rank_group(moe_rank *c, const moe_how *how) {
    epo_group_config config = EPO_GROUP_CONFIG_INIT;
    config.engine = EPO_ENGINE_HOST;
    config.rank = c->members != NULL ? c->members[c->rank] : c->rank;
    config.ranks = c->all;
    config.members = c->members;
    config.nmembers = c->members != NULL ? c->ranks : 0;
    config.threads = c->world;
    config.overlap = how->overlap ? EPO_ON : EPO_OFF;
    config.dispatcher = how->dispatcher;
    config.delay_wgrad = how->delay ? EPO_ON : EPO_OFF;
    config.chunks = how->chunks;
    config.timeout_s = c->timeout_s;
    config.wgrad_limit_bytes = how->wgrad_limit;
    config.tensor_parallel = how->tp;
    if (how->memory != NULL) {
        config.alloc = how->memory->alloc;
        config.free = how->memory->free;
        config.alloc_ctx = (void **)how->memory->alloc_ctx + c->rank;
    }
    epo_engine_group group = {sizeof group, config, "a test"};
    epo_group *out = NULL;
    EXPECT(c, c->engine->group_create(&group, &out) == EPO_OK);
    return out;
}

/* ---- values -------------------------------------------------------------- */

void *moe_pack(const float *v, size_t count, epo_dtype type) {
    if (type == EPO_F32) {
        float *out = moe_calloc(count, sizeof *out);
        if (count > 0)
            memcpy(out, v, count * sizeof *out);
        return out;
    }
    uint16_t *out = moe_calloc(count, sizeof *out);
    for (size_t i = 0; i < count; i++)
        out[i] = moe_to_half(v[i], type);
    return out;
}

float moe_unpack(const void *v, size_t i, epo_dtype type) {
    return type == EPO_F32 ? ((const float *)v)[i] : moe_from_half(((const uint16_t *)v)[i], type);
}

static size_t type_size(epo_dtype type) { return type == EPO_F32 ? 4 : 2; }

/* NaN in every element of either type. */
static void *poisoned(size_t count, epo_dtype type) {
    void *out = moe_calloc(count, type_size(type));
    memset(out, 0xff, count * type_size(type));
    return out;
}

/* ---- a rank's run -------------------------------------------------------- */

typedef struct run_args {
    const moe_case *c;
    const moe_how *how;
    moe_result *out;
} run_args;

typedef struct rank_run {
    moe_rank *rank;
    const run_args *args;
    epo_group *group;
    epo_buffer *buffer;
    epo_layer *layer;
    epo_plan *plan[CASE_BATCHES];
    epo_saved *saved[CASE_BATCHES];
    void *w1, *w2, *x[CASE_BATCHES];
    uint64_t back, wgrads; /* the backward under way; gradients of the test's experts */
} rank_run;

static void count_ready(void *ctx, epo_layer *layer, uint64_t microbatch) {
    int *ready = ctx;
    (void)layer;
    *ready = microbatch == (uint64_t)*ready ? *ready + 1 : -1000;
}

/* ---- experts of the test's ------------------------------------------------ */

/* g, u, and what SwiGLU makes of them, of one row. */
static void own_row(const rank_run *r, int e, const float *x, double *g, double *u) {
    size_t h = (size_t)r->args->c->hidden, f = (size_t)r->args->c->ffn;
    const float *w1 = (const float *)r->w1 + (size_t)e * 2 * f * h;
    for (size_t i = 0; i < f; i++) {
        g[i] = u[i] = 0;
        for (size_t j = 0; j < h; j++) {
            g[i] += (double)w1[i * h + j] * (double)x[j];
            u[i] += (double)w1[(f + i) * h + j] * (double)x[j];
        }
    }
}

static void own_forward(const rank_run *r, int e, const float *x, double w, float *y, double *g) {
    size_t h = (size_t)r->args->c->hidden, f = (size_t)r->args->c->ffn;
    const float *w2 = (const float *)r->w2 + (size_t)e * h * f;
    double *u = g + f;
    own_row(r, e, x, g, u);
    for (size_t j = 0; j < h; j++) {
        double sum = 0;
        for (size_t i = 0; i < f; i++)
            sum += (double)w2[j * f + i] * w * g[i] / (1 + exp(-g[i])) * u[i];
        y[j] = (float)sum;
    }
}

/* dx and *dweight, or (dx NULL) the weight gradients. */
static void own_backward(const rank_run *r, int e, const float *x, const float *dy, double w,
                         float *dx, float *dweight, double *g) {
    size_t h = (size_t)r->args->c->hidden, f = (size_t)r->args->c->ffn;
    size_t at =
        (size_t)r->rank->rank * (size_t)(r->args->c->experts / r->args->c->ranks) + (size_t)e;
    const float *w1 = (const float *)r->w1 + (size_t)e * 2 * f * h;
    const float *w2 = (const float *)r->w2 + (size_t)e * h * f;
    float *dw1 = (float *)r->args->out->dw1 + at * 2 * f * h;
    float *dw2 = (float *)r->args->out->dw2 + at * h * f;
    double *u = g + f, sum = 0;
    own_row(r, e, x, g, u);
    for (size_t j = 0; j < h && dx != NULL; j++)
        dx[j] = 0;
    for (size_t i = 0; i < f; i++) {
        double s = 1 / (1 + exp(-g[i])), silu = g[i] * s, da = 0;
        for (size_t j = 0; j < h; j++)
            da += (double)w2[j * f + i] * (double)dy[j];
        double dg = w * da * u[i] * (s + silu * (1 - s)), du = w * da * silu;
        sum += da * silu * u[i];
        for (size_t j = 0; j < h && dx != NULL; j++)
            dx[j] += (float)(dg * (double)w1[i * h + j] + du * (double)w1[(f + i) * h + j]);
        for (size_t j = 0; j < h && dx == NULL; j++) {
            dw1[i * h + j] += (float)(dg * (double)x[j]);
            dw1[(f + i) * h + j] += (float)(du * (double)x[j]);
            dw2[j * f + i] += (float)((double)dy[j] * w * silu * u[i]);
        }
    }
    if (dweight != NULL)
        *dweight = (float)sum;
}

/* Rows in between are zero, in what comes in and so in what goes out. */
static bool between_is_zero(const rank_run *r, const epo_expert_call *call) {
    size_t h = (size_t)r->args->c->hidden;
    int e = call->first_expert, past = e + call->experts;
    for (uint64_t row = call->row; row < call->row + call->rows; row++) {
        while (e < past && row >= call->first[e] + call->count[e])
            e++;
        if (e < past && row >= call->first[e])
            continue;
        for (size_t j = 0; j < h; j++)
            if (((const float *)call->x)[row * h + j] != 0 ||
                (call->dy != NULL && ((const float *)call->dy)[row * h + j] != 0))
                return false;
    }
    return true;
}

static epo_status own_expert(void *ctx, const epo_expert_call *call) {
    rank_run *r = ctx;
    size_t h = (size_t)r->args->c->hidden;
    double *work = moe_calloc(2 * (size_t)r->args->c->ffn, sizeof *work);
    int calls = __atomic_add_fetch(&r->args->out->calls[r->rank->rank], 1, __ATOMIC_RELAXED);
    bool good = call->size == sizeof *call && between_is_zero(r, call) && call->stream == NULL &&
                call->first_expert >= 0 && call->experts >= 0 &&
                (call->phase != EPO_EXPERT_DGRAD || call->microbatch == r->back) &&
                (call->phase != EPO_EXPERT_WGRAD || call->microbatch == r->wgrads++);
    for (int e = call->first_expert; e < call->first_expert + call->experts; e++)
        for (uint64_t row = call->first[e]; row < call->first[e] + call->count[e]; row++) {
            const float *x = (const float *)call->x + row * h;
            const float *dy = call->dy != NULL ? (const float *)call->dy + row * h : NULL;
            double w = (double)call->weights[row];
            good = good && row >= call->row && row < call->row + call->rows &&
                   call->first[e] == call->cpu_first[e] && call->count[e] == call->cpu_count[e];
            if (call->phase == EPO_EXPERT_FORWARD)
                own_forward(r, e, x, w, (float *)call->y + row * h, work);
            else if (call->phase == EPO_EXPERT_DGRAD)
                own_backward(r, e, x, dy, w, (float *)call->dx + row * h, &call->dweights[row],
                             work);
            else
                own_backward(r, e, x, dy, w, NULL, NULL, work);
        }
    free(work);
    bool fail = r->rank->rank == 0 && calls == r->args->how->fail_call;
    return !good ? EPO_E_STATE : fail ? EPO_E_NOMEM : EPO_OK;
}

static size_t stack_of(const moe_case *c) {
    return (size_t)(c->experts / c->ranks) * (size_t)c->ffn * (size_t)c->hidden;
}

static void own_ready(void *ctx, epo_layer *layer, uint64_t microbatch) {
    rank_run *r = ctx;
    count_ready(&r->args->out->ready[r->rank->rank], layer, microbatch);
}

static void make_layer(rank_run *r) {
    const moe_case *c = r->args->c;
    const moe_how *how = r->args->how;
    moe_result *out = r->args->out;
    size_t stack = stack_of(c), at = stack * (size_t)r->rank->rank;
    r->w1 = moe_pack(c->w1 + 2 * at, 2 * stack, c->type);
    r->w2 = moe_pack(c->w2 + at, stack, c->type);
    epo_layer_config config = config_layer(c->experts, c->hidden, c->ffn, r->w1, r->w2);
    config.type = c->type;
    config.wgrad_type = how->wgrad_type;
    config.dw1 = (char *)out->dw1 + 2 * at * type_size(how->wgrad_type);
    config.dw2 = (char *)out->dw2 + at * type_size(how->wgrad_type);
    config.wgrad_ready = count_ready;
    config.ctx = &out->ready[r->rank->rank];
    config.saved = how->saved;
    if (how->own) {
        config.w1 = config.w2 = NULL;
        config.dw1 = config.dw2 = NULL;
        config.ffn = 0;
        config.expert = own_expert;
        config.expert_wgrad = 1;
        config.wgrad_ready = own_ready;
        config.ctx = r;
    }
    if (how->fresh) { /* what is there is not read */
        memset(config.dw1, 0xff, 2 * stack * type_size(how->wgrad_type));
        memset(config.dw2, 0xff, stack * type_size(how->wgrad_type));
    }
    EXPECT(r->rank, r->rank->engine->layer_create(r->group, &config, &r->layer) == EPO_OK);
    if (how->fresh && r->layer != NULL)
        EXPECT(r->rank, r->rank->engine->layer_wgrad_begin(r->layer) == EPO_OK);
}

static bool make_buffer(rank_run *r) {
    const moe_case *c = r->args->c;
    epo_buffer_config config = config_buffer(c->experts, c->hidden, c->top_k, c->max_tokens);
    config.type = c->type;
    config.align_rows = r->args->how->align;
    const epo_buffer_config *limits = r->args->how->limits;
    if (limits != NULL) {
        config.capacity_factor = limits->capacity_factor;
        config.capacity = limits->capacity;
        config.overflow = limits->overflow;
        config.pad_to_capacity = limits->pad_to_capacity;
        config.wire = limits->wire;
        config.graphs = limits->graphs;
    }
    EXPECT(r->rank, r->rank->engine->buffer_create(r->group, &config, &r->buffer) == EPO_OK);
    return r->buffer != NULL;
}

static void forward(rank_run *r, int b) {
    const moe_case *c = r->args->c;
    const case_batch *in = &c->batch[b][r->rank->rank];
    const epo_engine *e = r->rank->engine;
    const epo_routing routing = config_routing(in->tokens, c->top_k, in->experts, in->weights);
    EXPECT(r->rank, e->plan_create(r->buffer, &routing, NULL, &r->plan[b]) == EPO_OK);
    if (r->plan[b] == NULL)
        return;
    void *x = moe_pack(in->x, (size_t)in->tokens * (size_t)c->hidden, c->type);
    EXPECT(r->rank, e->forward(r->layer, r->plan[b], x, r->args->out->y[b][r->rank->rank],
                               &r->saved[b], NULL) == EPO_OK);
    r->x[b] = x; /* who was not told to leave it alone must not read it any more */
    if (r->args->how->saved != EPO_SAVE_NOTHING)
        memset(x, 0xff, (size_t)in->tokens * (size_t)c->hidden * type_size(c->type));
}

static void backward(rank_run *r, int b) {
    const moe_case *c = r->args->c;
    const case_batch *in = &c->batch[b][r->rank->rank];
    const epo_engine *e = r->rank->engine;
    moe_result *out = r->args->out;
    if (r->saved[b] == NULL) {
        e->plan_release(r->plan[b]);
        return;
    }
    size_t n = (size_t)in->tokens * (size_t)c->hidden;
    void *dy = moe_pack(in->dy, n, c->type), *dx = out->dx[b][r->rank->rank];
    void *target = r->args->how->in_place ? dy : dx;
    r->back = (uint64_t)b;
    EXPECT(r->rank, e->backward(r->layer, r->saved[b], dy, target, out->dweights[b][r->rank->rank],
                                NULL) == EPO_OK);
    if (r->args->how->in_place)
        memcpy(dx, dy, n * type_size(c->type));
    free(dy);
    e->plan_release(r->plan[b]);
}

/* ---- a batch's forward beside the backward of the one before ---------------- */

typedef struct pair {
    rank_run *r;
    int batch; /* of the forward */
} pair;

/* The router's answer is known in the node before the experts. */
static epo_status pair_node(void *ctx, epo_node node, int layer, epo_step *step,
                            epo_stream stream) {
    pair *p = ctx;
    rank_run *r = p->r;
    const moe_case *c = r->args->c;
    (void)layer;
    (void)stream;
    if (node != EPO_NODE_ATTENTION)
        return EPO_OK;
    const case_batch *in = &c->batch[p->batch][r->rank->rank];
    const epo_routing routing = config_routing(in->tokens, c->top_k, in->experts, in->weights);
    epo_status status = r->rank->engine->plan_create(r->buffer, &routing, NULL, &r->plan[p->batch]);
    step->plan = r->plan[p->batch];
    step->x = r->x[p->batch];
    step->y = r->args->out->y[p->batch][r->rank->rank];
    return status;
}

/* Forward of batch b, if there is one, and backward of b - 1, likewise. */
static void run_pair(rank_run *r, int b) {
    const moe_case *c = r->args->c;
    const int me = r->rank->rank, back = b - 1;
    moe_result *out = r->args->out;
    pair p = {r, b};
    epo_step f = {.layer = r->layer}, w = {.layer = r->layer};
    epo_schedule s = EPO_SCHEDULE_INIT;
    void *dy = NULL;
    s.layers = 1;
    s.node = pair_node;
    s.ctx = &p;
    if (b < c->batches) {
        const case_batch *in = &c->batch[b][me];
        r->x[b] = moe_pack(in->x, (size_t)in->tokens * (size_t)c->hidden, c->type);
        s.forward = &f;
    }
    if (back >= 0) {
        const case_batch *in = &c->batch[back][me];
        dy = moe_pack(in->dy, (size_t)in->tokens * (size_t)c->hidden, c->type);
        w.saved = r->saved[back];
        w.dy = dy;
        w.dx = r->args->how->in_place ? dy : out->dx[back][me];
        w.dweights = out->dweights[back][me];
        r->back = (uint64_t)back;
        s.backward = &w;
    }
    EXPECT(r->rank, r->rank->engine->schedule_run(r->group, &s, NULL) == EPO_OK);
    if (b < c->batches)
        r->saved[b] = f.saved;
    if (back >= 0) {
        const size_t n = (size_t)c->batch[back][me].tokens * (size_t)c->hidden;
        if (r->args->how->in_place)
            memcpy(out->dx[back][me], dy, n * type_size(c->type));
        r->rank->engine->plan_release(r->plan[back]);
    }
    free(dy);
}

static void run_rank(moe_rank *rank) {
    const run_args *args = rank->arg;
    const moe_case *c = args->c;
    const epo_engine *e = rank->engine;
    rank_run r = {.rank = rank, .args = args};
    r.group = moe_rank_group(rank, args->how);
    if (r.group == NULL)
        return;
    if (make_buffer(&r)) {
        make_layer(&r);
        for (int b = 0; r.layer != NULL && b <= c->batches; b++) {
            if (args->how->paired) {
                run_pair(&r, b);
                continue;
            }
            if (b < c->batches)
                forward(&r, b);
            if (b > 0)
                backward(&r, b - 1);
        }
        for (int b = 0; b < c->batches; b++)
            free(r.x[b]);
        EXPECT(rank, e->group_wgrad_flush(r.group, NULL) == EPO_OK);
        args->out->stats[rank->rank].size = sizeof(epo_stats);
        EXPECT(rank, e->group_stats(r.group, &args->out->stats[rank->rank], 0) == EPO_OK);
        EXPECT(rank, e->layer_destroy(r.layer) == EPO_OK);
        EXPECT(rank, e->buffer_destroy(r.buffer) == EPO_OK);
    }
    EXPECT(rank, e->group_destroy(r.group) == EPO_OK);
    free(r.w1);
    free(r.w2);
}

static void result_open(const moe_case *c, const moe_how *how, moe_result *out) {
    size_t stack = (size_t)c->experts * (size_t)c->ffn * (size_t)c->hidden;
    memset(out, 0, sizeof *out);
    out->dw1 = moe_pack(c->dw1, 2 * stack, how->wgrad_type);
    out->dw2 = moe_pack(c->dw2, stack, how->wgrad_type);
    for (int b = 0; b < c->batches; b++)
        for (int r = 0; r < c->ranks; r++) {
            size_t tokens = (size_t)c->batch[b][r].tokens;
            out->y[b][r] = poisoned(tokens * (size_t)c->hidden, c->type);
            out->dx[b][r] = poisoned(tokens * (size_t)c->hidden, c->type);
            out->dweights[b][r] = poisoned(tokens * (size_t)c->top_k, EPO_F32);
        }
}

static int result_check(const moe_case *c, const moe_result *out) {
    int failures = 0;
    for (int r = 0; r < c->ranks; r++)
        if (out->ready[r] != c->batches) {
            fprintf(stderr, "rank %d: wgrad_ready %d times in order, expected %d\n", r,
                    out->ready[r], c->batches);
            failures++;
        }
    return failures;
}

int moe_run(const moe_case *c, const moe_how *how, moe_result *out) {
    run_args args = {c, how, out};
    result_open(c, how, out);
    int failures = moe_ranks(c->ranks, 60.0, run_rank, &args);
    return failures + result_check(c, out);
}

int moe_run_groups(int groups, const moe_case *c, const moe_how *how,
                   const int (*members)[CASE_RANKS], moe_result *out) {
    const epo_engine *engine = epo_engine_entry(EPO_ENGINE_ABI);
    rank_start start[CASE_RANKS];
    run_args args[CASE_RANKS];
    pthread_t thread[CASE_RANKS];
    epo_world *world = NULL;
    int all = 0, n = 0, failures = 0;
    for (int g = 0; g < groups; g++)
        all += c[g].ranks;
    if (engine == NULL || all > CASE_RANKS || engine->world_create(all, &world) != EPO_OK)
        return 1000;
    for (int g = 0; g < groups; g++) {
        args[g] = (run_args){&c[g], how, &out[g]};
        result_open(&c[g], how, &out[g]);
        for (int r = 0; r < c[g].ranks; r++, n++)
            start[n] = (rank_start){
                {engine, world, r, c[g].ranks, members[g], all, 60.0, &args[g], 0}, run_rank};
    }
    for (int i = 0; i < n; i++)
        if (pthread_create(&thread[i], NULL, rank_main, &start[i]) != 0)
            abort();
    for (int i = 0; i < n; i++) {
        pthread_join(thread[i], NULL);
        failures += start[i].rank.failures;
    }
    engine->world_destroy(world);
    for (int g = 0; g < groups; g++)
        failures += result_check(&c[g], &out[g]);
    return failures;
}

static void tell(const moe_case *c, const moe_how *how) {
    const char *nodes = getenv(EPO_ENV_NODES);
    moe_case_print(c);
    fprintf(stderr, "%s%s dispatcher %d overlap %d delay %d chunks %d saved %d: ",
            nodes != NULL ? EPO_ENV_NODES "=" : "", nodes != NULL ? nodes : "",
            (int)how->dispatcher, how->overlap, how->delay, how->chunks, (int)how->saved);
}

bool moe_right(const moe_case *c, const moe_how *how, const moe_answer *answer, double bound,
               bool by_terms, moe_result *out) {
    const int failures = moe_run(c, how, out);
    const double error = moe_error(c, how, out, answer, by_terms);
    if (failures == 0 && error < bound)
        return true;
    tell(c, how);
    fprintf(stderr, "%d failures, error %g\n", failures, error);
    return false;
}

bool moe_agrees(const moe_case *c, const moe_how *how, const moe_result *serial,
                const moe_result *out) {
    if (moe_same(c, how, serial, out))
        return true;
    tell(c, how);
    fprintf(stderr, "other bits than serial\n");
    return false;
}

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? strtoull(text, NULL, 0) : otherwise;
}

bool moe_rounds(uint64_t rounds, bool (*one)(uint64_t seed)) {
    const uint64_t seed = number("EPO_SEED", (uint64_t)time(NULL));
    bool good = true;
    rounds = number("EPO_ROUNDS", rounds);
    printf("EPO_SEED=%llu EPO_ROUNDS=%llu ", (unsigned long long)seed, (unsigned long long)rounds);
    fflush(stdout);
    for (uint64_t i = 0; i < rounds && good; i++) {
        good = one(seed + i);
        if (!good)
            fprintf(stderr, "EPO_SEED=%llu EPO_ROUNDS=1 repeats it\n",
                    (unsigned long long)(seed + i));
    }
    return good;
}

void moe_result_free(moe_result *r) {
    for (int b = 0; b < CASE_BATCHES; b++)
        for (int i = 0; i < CASE_RANKS; i++) {
            free(r->y[b][i]);
            free(r->dx[b][i]);
            free(r->dweights[b][i]);
        }
    free(r->dw1);
    free(r->dw2);
}

/* ---- comparison ---------------------------------------------------------- */

static double tensor_error(const void *got, const moe_sum *want, size_t count, epo_dtype type,
                           bool by_terms) {
    double worst = 0, largest = 0;
    for (size_t i = 0; i < count; i++) {
        double v = moe_unpack(got, i, type);
        if (!isfinite(v))
            return INFINITY;
        worst = fmax(worst, fabs(v - want[i].value));
        largest = fmax(largest, by_terms ? want[i].terms : fabs(want[i].value));
    }
    return worst == 0 ? 0 : worst / fmax(largest, 1e-3);
}

double moe_error(const moe_case *c, const moe_how *how, const moe_result *r, const moe_answer *a,
                 bool by_terms) {
    size_t stack = (size_t)c->experts * (size_t)c->ffn * (size_t)c->hidden;
    double worst = fmax(tensor_error(r->dw1, a->dw1, 2 * stack, how->wgrad_type, by_terms),
                        tensor_error(r->dw2, a->dw2, stack, how->wgrad_type, by_terms));
    for (int b = 0; b < c->batches; b++)
        for (int i = 0; i < c->ranks; i++) {
            size_t tokens = (size_t)c->batch[b][i].tokens, n = tokens * (size_t)c->hidden;
            worst = fmax(worst, tensor_error(r->y[b][i], a->y[b][i], n, c->type, by_terms));
            worst = fmax(worst, tensor_error(r->dx[b][i], a->dx[b][i], n, c->type, by_terms));
            worst = fmax(worst, tensor_error(r->dweights[b][i], a->dweights[b][i],
                                             tokens * (size_t)c->top_k, EPO_F32, by_terms));
        }
    return worst;
}

bool moe_same(const moe_case *c, const moe_how *how, const moe_result *a, const moe_result *b) {
    size_t stack = (size_t)c->experts * (size_t)c->ffn * (size_t)c->hidden;
    size_t wide = type_size(how->wgrad_type), row = (size_t)c->hidden * type_size(c->type);
    bool same =
        memcmp(a->dw1, b->dw1, 2 * stack * wide) == 0 && memcmp(a->dw2, b->dw2, stack * wide) == 0;
    for (int m = 0; m < c->batches; m++)
        for (int i = 0; i < c->ranks; i++) {
            size_t tokens = (size_t)c->batch[m][i].tokens;
            same = same && memcmp(a->y[m][i], b->y[m][i], tokens * row) == 0 &&
                   memcmp(a->dx[m][i], b->dx[m][i], tokens * row) == 0 &&
                   memcmp(a->dweights[m][i], b->dweights[m][i],
                          tokens * (size_t)c->top_k * sizeof(float)) == 0;
        }
    return same;
}
