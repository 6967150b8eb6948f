/* SPDX-License-Identifier: Apache-2.0
 *
 * features.h - one rank of features.c: its objects and inputs, a plain run and one by
 * schedule, and a hash of each array that it made.
 */
#ifndef EPO_TESTS_FEATURES_H
#define EPO_TESTS_FEATURES_H

#include "fixture.h"

enum { LAYERS = 2, BATCHES = 3, RANKS = 4, PARTS = 3 * LAYERS * BATCHES + 2 * LAYERS };

/* One rank: where it stands, what it works on, what it made. */
typedef struct rank_job {
    const epo_engine *engine;
    ref_case c;
    epo_group_config config;
    int device, rank; /* in its group */
    bool scheduled;
    bool masked; /* every other token only */
    epo_saved_mode saved;
    epo_status status;
    uint64_t hash, part[PARTS];
    char text[256];
    /* while it runs */
    cudaStream_t stream;
    epo_group *group;
    epo_buffer *buffer;
    epo_layer *layer[LAYERS];
    epo_plan *plan[BATCHES][LAYERS];
    epo_step step[BATCHES][LAYERS];
    int64_t *experts[BATCHES];
    float *weights[BATCHES];
    void *x[BATCHES], *memory[64];
    int f, held, ready;
    test_copying copying;
    void *(*main)(void *); /* NULL: rank_main */
} rank_job;

/* ---- one rank ---- */

static void *hold(rank_job *j, void *p) {
    if (j->held == (int)(sizeof j->memory / sizeof *j->memory))
        exit(3);
    return j->memory[j->held++] = p;
}

static void *device_array(rank_job *j, uint64_t count, epo_dtype type, int poison) {
    return hold(j, test_device(count * test_size(type), poison));
}

static uint64_t row_count(const rank_job *j) {
    return (uint64_t)ref_tokens(&j->c, j->rank) * (uint64_t)j->c.hidden;
}

static void *rows_of(rank_job *j, int kind, int mb) {
    const uint64_t bytes = test_rows_bytes(&j->c, j->rank);
    char *host = malloc(bytes + 1);
    test_rows_fill(&j->c, kind, j->rank, mb, host);
    void *p = hold(j, test_upload(host, bytes));
    free(host);
    return p;
}

static void routing_of(rank_job *j, int mb) {
    const uint64_t slots = test_slots(&j->c, j->rank);
    int64_t *experts = calloc(slots + 1, sizeof *experts);
    float *weights = calloc(slots + 1, sizeof *weights);
    test_routing_fill(&j->c, j->rank, mb, experts, weights);
    for (uint64_t i = 0; j->masked && i < slots; i++)
        if ((int)i / j->c.top_k % 2 != j->rank % 2)
            experts[i] = -1;
    j->experts[mb] = hold(j, test_upload(experts, slots * 8));
    j->weights[mb] = hold(j, test_upload(weights, slots * 4));
    free(experts);
    free(weights);
}

static void note_ready(void *ctx, epo_layer *layer, uint64_t microbatch) {
    rank_job *j = ctx;
    (void)layer;
    j->ready += microbatch < BATCHES ? 1 : 1000;
}

static epo_status open_layers(rank_job *j) {
    const ref_case *c = &j->c;
    const uint64_t n = test_weights(c);
    test_arrays weights = {NULL};
    weights.w1 = hold(j, test_weights_upload(c, j->rank, false));
    weights.w2 = hold(j, test_weights_upload(c, j->rank, true));
    epo_layer_config lc = test_layer(c, &weights);
    epo_status status = EPO_OK;
    lc.saved = j->saved;
    lc.wgrad_ready = note_ready;
    lc.ctx = j;
    for (int l = 0; l < LAYERS && status == EPO_OK; l++) {
        lc.dw1 = device_array(j, 2 * n, c->wgrad_type, 0);
        lc.dw2 = device_array(j, n, c->wgrad_type, 0);
        status = j->engine->layer_create(j->group, &lc, &j->layer[l]);
    }
    return status;
}

static epo_status open_rank(rank_job *j) {
    const ref_case *c = &j->c;
    epo_engine_group eg = {sizeof eg, j->config, "test"};
    const epo_buffer_config bc = test_buffer(c);
    TEST_CUDA(cudaSetDevice(j->device));
    TEST_CUDA(cudaStreamCreateWithFlags(&j->stream, cudaStreamNonBlocking));
    epo_status status = j->engine->group_create(&eg, &j->group);
    if (status == EPO_OK)
        status = j->engine->buffer_create(j->group, &bc, &j->buffer);
    if (status == EPO_OK)
        status = open_layers(j);
    for (int b = 0; b < BATCHES; b++) {
        routing_of(j, b);
        j->x[b] = rows_of(j, 0, b);
        void *dy = rows_of(j, 1, b);
        for (int l = LAYERS - 1; l >= 0; l--) {
            epo_step *s = &j->step[b][l];
            *s = (epo_step){.layer = j->layer[l], .dy = dy};
            s->y = device_array(j, row_count(j), c->type, 0xff);
            dy = s->dx = device_array(j, row_count(j), c->type, 0xff);
            s->dweights = device_array(j, (uint64_t)ref_tokens(c, j->rank) * (uint64_t)c->top_k,
                                       EPO_F32, 0xff);
        }
    }
    return status;
}

/* One hash for each array: y, dx, dweights by batch and layer, then dw1 and dw2. */
static void hash_rank(rank_job *j) {
    const ref_case *c = &j->c;
    const uint64_t seed = TEST_HASH, rows = test_rows_bytes(c, j->rank);
    const uint64_t slots = test_slots(c, j->rank) * 4;
    int n = 0;
    for (int b = 0; b < BATCHES; b++)
        for (int l = 0; l < LAYERS; l++) {
            const epo_step *s = &j->step[b][l];
            j->part[n++] = test_hash_device(seed, s->y, rows);
            j->part[n++] = test_hash_device(seed, s->dx, rows);
            j->part[n++] = test_hash_device(seed, s->dweights, slots);
        }
    const uint64_t w = test_weights(c);
    for (int l = 0; l < LAYERS; l++) /* dw1, dw2 follow w1 and w2 */
        for (int i = 0; i < 2; i++)
            j->part[n++] = test_hash_device(seed, j->memory[2 + 2 * l + i],
                                            (uint64_t)(2 - i) * w * test_size(c->wgrad_type));
    j->hash = seed;
    for (int i = 0; i < n; i++)
        j->hash = (j->hash ^ j->part[i]) * UINT64_C(0x100000001b3);
}

/* "y0.1 dx0.1 dw1.0": which arrays differ. */
static inline void name_parts(const rank_job *a, const rank_job *b, char *text, size_t size) {
    static const char *const names[] = {"y", "dx", "dweights"};
    size_t used = strlen(text);
    for (int i = 0; i < PARTS && used + 24 < size; i++) {
        const int w = i - 3 * LAYERS * BATCHES;
        if (a->part[i] == b->part[i])
            continue;
        used += (size_t)(w < 0 ? snprintf(text + used, size - used, " %s%d.%d", names[i % 3],
                                          i / 3 / LAYERS, i / 3 % LAYERS)
                               : snprintf(text + used, size - used, " dw%d.%d", 1 + w % 2, w / 2));
    }
}

static void close_rank(rank_job *j) {
    const epo_engine *e = j->engine;
    for (int b = 0; b < BATCHES; b++)
        for (int l = 0; l < LAYERS; l++) {
            e->saved_release(j->step[b][l].saved);
            e->plan_release(j->plan[b][l]);
        }
    for (int l = 0; l < LAYERS; l++)
        (void)e->layer_destroy(j->layer[l]);
    (void)e->buffer_destroy(j->buffer);
    (void)e->group_destroy(j->group);
    for (int i = 0; i < j->held; i++)
        cudaFree(j->memory[i]);
    cudaStreamDestroy(j->stream);
}

/* "Attention": the router of the layer, over what the layer below made. */
static epo_status attention(rank_job *j, int mb, int l) {
    const epo_routing r = test_routing(&j->c, j->rank, j->experts[mb], j->weights[mb]);
    epo_step *s = &j->step[mb][l];
    s->x = l == 0 ? j->x[mb] : j->step[mb][l - 1].y;
    epo_status status = j->engine->plan_create(j->buffer, &r, j->stream, &j->plan[mb][l]);
    s->plan = j->plan[mb][l];
    return status;
}

static epo_status node(void *ctx, epo_node node, int layer, epo_step *step, epo_stream stream) {
    rank_job *j = ctx;
    (void)step, (void)stream;
    return node == EPO_NODE_ATTENTION ? attention(j, j->f, layer) : EPO_OK;
}

static epo_status run_scheduled(rank_job *j) {
    epo_status status = EPO_OK;
    for (int b = 0; b <= BATCHES && status == EPO_OK; b++) {
        epo_schedule s = EPO_SCHEDULE_INIT;
        s.layers = LAYERS;
        s.forward = b < BATCHES ? j->step[b] : NULL;
        s.backward = b > 0 ? j->step[b - 1] : NULL;
        s.node = node;
        s.ctx = j;
        j->f = b;
        status = j->engine->schedule_run(j->group, &s, j->stream);
    }
    return status;
}

static epo_status run_plain(rank_job *j) {
    const epo_engine *e = j->engine;
    epo_status status = EPO_OK;
    for (int b = 0; b < BATCHES; b++) {
        for (int l = 0; l < LAYERS && status == EPO_OK; l++) {
            epo_step *s = &j->step[b][l];
            status = attention(j, b, l);
            if (status == EPO_OK)
                status = e->forward(s->layer, s->plan, s->x, s->y, &s->saved, j->stream);
        }
        for (int l = LAYERS - 1; l >= 0 && status == EPO_OK; l--) {
            epo_step *s = &j->step[b][l];
            status = e->backward(s->layer, s->saved, s->dy, s->dx, s->dweights, j->stream);
            s->saved = NULL;
        }
    }
    return status;
}

static void *rank_main(void *ctx) {
    rank_job *j = ctx;
    j->status = open_rank(j);
    if (j->status == EPO_OK)
        j->status = j->scheduled ? run_scheduled(j) : run_plain(j);
    if (j->status == EPO_OK)
        j->status = j->engine->group_wgrad_flush(j->group, j->stream);
    if (j->status != EPO_OK)
        snprintf(j->text, sizeof j->text, "%s", j->engine->error());
    if (j->status == EPO_OK && j->ready != LAYERS * BATCHES) {
        snprintf(j->text, sizeof j->text, "wgrad_ready %d times, expected %d", j->ready,
                 LAYERS * BATCHES);
        j->status = EPO_E_STATE;
    }
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    if (j->status == EPO_OK)
        hash_rank(j);
    close_rank(j);
    return NULL;
}

/* ---- cases ---- */

static epo_wire wire;

/* Of the i-th variant. */
static inline bool is_flex(int i) { return wire != EPO_WIRE_ROWS || i % 2 != 0; }
static inline const char *dispatcher_name(int i) {
    return wire != EPO_WIRE_ROWS ? "flex e4m3" : i % 2 ? "flex" : "alltoall";
}

static inline ref_case some_case(uint64_t seed, int ranks, epo_dtype type) {
    return (ref_case){.seed = seed,
                      .ranks = ranks,
                      .experts = 4 * ranks,
                      .hidden = wire != EPO_WIRE_ROWS ? 256 : 96,
                      .ffn = 48,
                      .top_k = 3,
                      .tokens = 70,
                      .type = type,
                      .wgrad_type = EPO_F32,
                      .routing = REF_UNEVEN,
                      .microbatches = 1,
                      .capacity = -1,
                      .wire = wire};
}

static inline rank_job some_job(const ref_case *c, int rank, int i) {
    rank_job j = {.engine = epo_engine_entry(EPO_ENGINE_ABI), .c = *c, .rank = rank};
    j.config = test_group(-1, -1, 20).config;
    j.config.overlap = i / 2 > 0 ? EPO_ON : EPO_OFF;
    j.config.delay_wgrad = i / 2 > 1 ? EPO_ON : EPO_OFF;
    j.config.dispatcher = is_flex(i) ? EPO_DISPATCH_FLEX : EPO_DISPATCH_ALLTOALL;
    j.config.chunks = i / 2 > 0 ? 2 : 1;
    return j;
}

static void *any_main(void *ctx) {
    rank_job *j = ctx;
    return j->main != NULL ? j->main(j) : rank_main(j);
}

/* Threads of one world; false, with a text, if one of them failed. */
static bool run_world(rank_job *j, int n, char *text, size_t size) {
    epo_world *world = NULL;
    int devices = 1;
    bool ok = true;
    TEST_CUDA(cudaGetDeviceCount(&devices));
    if (j->engine->world_create(n, &world) != EPO_OK)
        return false;
    for (int r = 0; r < n; r++) {
        j[r].config.threads = world;
        j[r].config.ranks = n;
        if (j[r].config.members == NULL)
            j[r].config.rank = j[r].rank;
        j[r].device = j[r].config.rank % devices;
    }
    test_threads(n, any_main, j, sizeof *j);
    for (int r = 0; r < n; r++) {
        if (ok && j[r].status != EPO_OK)
            snprintf(text, size, "%.255s", j[r].text);
        ok = ok && j[r].status == EPO_OK;
    }
    j->engine->world_destroy(world);
    return ok;
}

static inline void same_bits(const char *name, bool ok, const rank_job *a, const rank_job *b, int n,
                             char *text, size_t size) {
    for (int r = 0; r < n && ok; r++)
        if (a[r].hash != b[r].hash) {
            snprintf(text, size, "rank %d: other bits than the plain run:", r);
            name_parts(&a[r], &b[r], text, size);
            ok = false;
        }
    test_result(name, ok, ok ? "the same bits" : text);
}

#endif
