/* SPDX-License-Identifier: Apache-2.0
 *
 * features.h - one rank of features.c: its objects and inputs, a plain run and one by
 * schedule, and a hash of each array that it made.
 */
#ifndef EPO_TESTS_FEATURES_H
#define EPO_TESTS_FEATURES_H

#include "gpu_test.h"
#include "reference.h"

#include "backend/engine.h"

#include <pthread.h>

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
    int f, held, ready, calls[3];
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
    const ref_case *c = &j->c;
    char *host = malloc(row_count(j) * test_size(c->type) + 1);
    for (int t = 0; t < ref_tokens(c, j->rank); t++)
        for (int h = 0; h < c->hidden; h++)
            test_store(host, (uint64_t)(t * c->hidden + h), c->type,
                       ref_row(c, kind, j->rank, mb, t, h));
    void *p = hold(j, test_upload(host, row_count(j) * test_size(c->type)));
    free(host);
    return p;
}

static void routing_of(rank_job *j, int mb) {
    const ref_case *c = &j->c;
    const int slots = ref_tokens(c, j->rank) * c->top_k;
    int64_t *experts = calloc((size_t)slots + 1, sizeof *experts);
    float *weights = calloc((size_t)slots + 1, sizeof *weights);
    for (int i = 0; i < slots; i++) {
        experts[i] = j->masked && i / c->top_k % 2 != j->rank % 2
                         ? -1
                         : ref_expert(c, j->rank, mb, i / c->top_k, i % c->top_k);
        weights[i] = ref_weight(c, j->rank, mb, i / c->top_k, i % c->top_k);
    }
    j->experts[mb] = hold(j, test_upload(experts, (uint64_t)slots * 8));
    j->weights[mb] = hold(j, test_upload(weights, (uint64_t)slots * 4));
    free(experts);
    free(weights);
}

static void *weights_of(rank_job *j, int second) {
    const ref_case *c = &j->c;
    const int local = c->experts / c->ranks;
    const uint64_t n = (uint64_t)(c->ffn * c->hidden) * (second ? 1 : 2);
    char *host = malloc((uint64_t)local * n * test_size(c->type));
    for (int e = 0; e < local; e++)
        for (uint64_t i = 0; i < n; i++)
            test_store(host, (uint64_t)e * n + i, c->type,
                       second ? ref_w2(c, j->rank * local + e, i)
                              : ref_w1(c, j->rank * local + e, i));
    void *p = hold(j, test_upload(host, (uint64_t)local * n * test_size(c->type)));
    free(host);
    return p;
}

static void note_ready(void *ctx, epo_layer *layer, uint64_t microbatch) {
    rank_job *j = ctx;
    (void)layer;
    j->ready += microbatch < BATCHES ? 1 : 1000;
}

static epo_status open_layers(rank_job *j) {
    const ref_case *c = &j->c;
    const uint64_t n = (uint64_t)(c->experts / c->ranks) * (uint64_t)(c->ffn * c->hidden);
    epo_layer_config lc = EPO_LAYER_CONFIG_INIT;
    epo_status status = EPO_OK;
    lc.experts = c->experts;
    lc.hidden = c->hidden;
    lc.ffn = c->ffn;
    lc.type = c->type;
    lc.wgrad_type = c->wgrad_type;
    lc.saved = j->saved;
    lc.wgrad_ready = note_ready;
    lc.ctx = j;
    lc.w1 = weights_of(j, 0);
    lc.w2 = weights_of(j, 1);
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
    epo_buffer_config bc = EPO_BUFFER_CONFIG_INIT;
    bc.experts = c->experts;
    bc.hidden = c->hidden;
    bc.top_k = c->top_k;
    bc.max_tokens = c->tokens;
    bc.type = c->type;
    bc.wire = c->wire;
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

static uint64_t hash_device(uint64_t hash, const void *device, uint64_t bytes) {
    unsigned char *host = malloc(bytes + 1);
    TEST_CUDA(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
    for (uint64_t i = 0; i < bytes; i++)
        hash = (hash ^ host[i]) * UINT64_C(0x100000001b3);
    free(host);
    return hash;
}

/* One hash for each array: y, dx, dweights by batch and layer, then dw1 and dw2. */
static void hash_rank(rank_job *j) {
    const ref_case *c = &j->c;
    const uint64_t seed = UINT64_C(0xcbf29ce484222325);
    const uint64_t rows = row_count(j) * test_size(c->type);
    const uint64_t slots = (uint64_t)ref_tokens(c, j->rank) * (uint64_t)c->top_k * 4;
    int n = 0;
    for (int b = 0; b < BATCHES; b++)
        for (int l = 0; l < LAYERS; l++) {
            const epo_step *s = &j->step[b][l];
            j->part[n++] = hash_device(seed, s->y, rows);
            j->part[n++] = hash_device(seed, s->dx, rows);
            j->part[n++] = hash_device(seed, s->dweights, slots);
        }
    const uint64_t w = (uint64_t)(c->experts / c->ranks) * (uint64_t)(c->ffn * c->hidden);
    for (int l = 0; l < LAYERS; l++) /* dw1, dw2 follow w1 and w2 */
        for (int i = 0; i < 2; i++)
            j->part[n++] = hash_device(seed, j->memory[2 + 2 * l + i],
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
    epo_routing r = EPO_ROUTING_INIT;
    epo_step *s = &j->step[mb][l];
    r.tokens = ref_tokens(&j->c, j->rank);
    r.top_k = j->c.top_k;
    r.experts = j->experts[mb];
    r.weights = j->weights[mb];
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
    j.config = (epo_group_config)EPO_GROUP_CONFIG_INIT;
    j.config.engine = EPO_ENGINE_CUDA;
    j.config.overlap = i / 2 > 0 ? EPO_ON : EPO_OFF;
    j.config.delay_wgrad = i / 2 > 1 ? EPO_ON : EPO_OFF;
    j.config.dispatcher = is_flex(i) ? EPO_DISPATCH_FLEX : EPO_DISPATCH_ALLTOALL;
    j.config.chunks = i / 2 > 0 ? 2 : 1;
    j.config.timeout_s = 20;
    j.config.warn_s = 10;
    return j;
}

/* Threads of one world; false, with a text, if one of them failed. */
static bool run_world(rank_job *j, int n, char *text, size_t size) {
    pthread_t thread[RANKS];
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
        pthread_create(&thread[r], NULL, j[r].main != NULL ? j[r].main : rank_main, &j[r]);
    }
    for (int r = 0; r < n; r++) {
        pthread_join(thread[r], NULL);
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
