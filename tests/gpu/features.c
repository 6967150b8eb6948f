/* SPDX-License-Identifier: Apache-2.0
 *
 * features.c - what layer.c does not cover, each against a plain run of the same
 * layers, bit for bit: groups from a communicator, several groups in one step, two
 * micro-batches node by node.  And what a peer that never comes leaves: NaN.
 *
 *   features [e4m3] [NAME...]     late comm groups beside saved capture memory tp own overflow
 *                                 schedule control differ
 *
 * e4m3: everything by flex, with e4m3 on the wire.
 */
#include "features.h"

#include <dlfcn.h>
#include <sys/mman.h>

/* The plain run twice: what the others are compared with must not vary. */
static void test_control(void) {
    for (int i = 0; i < 6; i++) {
        char name[96], text[256] = "";
        rank_job first[2], second[2];
        ref_case c = some_case(0x51 + (uint64_t)i, 2, i % 3 ? EPO_BF16 : EPO_F32);
        for (int r = 0; r < 2; r++)
            first[r] = second[r] = some_job(&c, r, i);
        snprintf(name, sizeof name, "the plain run twice, %s %s", dispatcher_name(i),
                 i / 2 == 0   ? "serial"
                 : i / 2 == 1 ? "overlapped"
                              : "delayed");
        bool ok = run_world(first, 2, text, sizeof text) && run_world(second, 2, text, sizeof text);
        same_bits(name, ok, first, second, 2, text, sizeof text);
    }
}

static void test_schedule(void) {
    for (int i = 0; i < 6; i++) {
        char name[96], text[256] = "";
        rank_job plain[2], side[2];
        ref_case c = some_case(0x51 + (uint64_t)i, 2, i % 3 ? EPO_BF16 : EPO_F32);
        for (int r = 0; r < 2; r++) {
            plain[r] = side[r] = some_job(&c, r, i);
            side[r].scheduled = true;
        }
        snprintf(name, sizeof name, "schedule %s %s", dispatcher_name(i),
                 i / 2 == 0   ? "serial"
                 : i / 2 == 1 ? "overlapped"
                              : "delayed");
        bool ok = run_world(plain, 2, text, sizeof text) && run_world(side, 2, text, sizeof text);
        same_bits(name, ok, plain, side, 2, text, sizeof text);
    }
}

/* Rows kept, kept one a token, or sent again; the last in a schedule, too. */
static void test_saved(void) {
    for (int i = 0; i < 8; i++) {
        char name[96], text[256] = "";
        rank_job plain[2], other[2];
        ref_case c = some_case(0xb1 + (uint64_t)i, 2, EPO_BF16);
        const epo_saved_mode mode = is_flex(i) && i / 4 == 0 ? EPO_SAVE_TOKENS : EPO_SAVE_NOTHING;
        for (int r = 0; r < 2; r++) {
            plain[r] = other[r] = some_job(&c, r, i % 4 + 2 * (i / 4));
            other[r].saved = mode;
            other[r].scheduled = i / 4 > 0;
        }
        snprintf(name, sizeof name, "%s, %s%s",
                 mode == EPO_SAVE_TOKENS ? "tokens kept" : "sent again", dispatcher_name(i),
                 other[0].scheduled ? ", scheduled" : "");
        bool ok = run_world(plain, 2, text, sizeof text) && run_world(other, 2, text, sizeof text);
        same_bits(name, ok, plain, other, 2, text, sizeof text);
    }
}

/* tensor_parallel is a routing without the tokens that the other rank carries. */
static void test_tp(void) {
    for (int i = 2; i < 4; i++) {
        char text[256] = "";
        rank_job masked[2], tp[2];
        ref_case c = some_case(0xc1 + (uint64_t)i, 2, EPO_BF16);
        for (int r = 0; r < 2; r++) {
            masked[r] = tp[r] = some_job(&c, r, i);
            masked[r].masked = true;
            tp[r].config.tensor_parallel = 2;
        }
        bool ok = run_world(masked, 2, text, sizeof text) && run_world(tp, 2, text, sizeof text);
        same_bits(is_flex(i) ? "tensor_parallel, flex" : "tensor_parallel, alltoall", ok, masked,
                  tp, 2, text, sizeof text);
    }
}

/* Layers that are others on rank 1: each rank is told which, and no rows are taken for others. */
static void test_differ(void) {
    for (int i = 0; i < 8; i++) {
        char name[96], text[256] = "";
        const bool saved = i / 4 > 0;
        rank_job j[2];
        ref_case c = some_case(0xe1 + (uint64_t)i, 2, EPO_BF16);
        for (int r = 0; r < 2; r++)
            j[r] = some_job(&c, r, i % 4);
        if (saved)
            j[1].saved = EPO_SAVE_NOTHING;
        else
            j[1].c.ffn /= 2;
        snprintf(name, sizeof name, "layers differ in %s, %s %s", saved ? "saved" : "ffn",
                 dispatcher_name(i), i % 4 / 2 == 0 ? "serial" : "overlapped");
        bool ok = !run_world(j, 2, text, sizeof text);
        for (int r = 0; r < 2; r++)
            ok = ok && j[r].status == EPO_E_PEER &&
                 strstr(j[r].text, saved ? "saved of the layer" : "ffn of the layer") != NULL;
        test_result(name, ok, text);
    }
}

/* A capture is refused by name, not found out by what it breaks. */
static void *capture_main(void *ctx) {
    rank_job *j = ctx;
    epo_step *s = &j->step[0][0];
    cudaGraph_t graph = NULL;
    j->status = open_rank(j);
    if (j->status == EPO_OK)
        j->status = attention(j, 0, 0);
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    epo_status status = j->status;
    if (status == EPO_OK) {
        TEST_CUDA(cudaStreamBeginCapture(j->stream, cudaStreamCaptureModeThreadLocal));
        status = j->engine->forward(s->layer, s->plan, s->x, s->y, &s->saved, j->stream);
        snprintf(j->text, sizeof j->text, "%s", j->engine->error());
        (void)cudaStreamEndCapture(j->stream, &graph);
        (void)cudaGetLastError();
    }
    /* One rank's refusal may reach the other before its own. */
    j->hash = status != EPO_OK && strstr(j->text, "captured in a CUDA graph") != NULL;
    if (graph != NULL)
        cudaGraphDestroy(graph);
    close_rank(j);
    return NULL;
}

static void test_capture(void) {
    char text[256] = "";
    rank_job j[2];
    ref_case c = some_case(0xd1, 2, EPO_BF16);
    for (int r = 0; r < 2; r++) {
        j[r] = some_job(&c, r, 2);
        j[r].main = capture_main;
    }
    bool ok = run_world(j, 2, text, sizeof text) && j[0].hash && j[1].hash;
    test_result("a stream under capture is refused", ok, j[0].text);
}

/* ---- memory ---- */

static uint64_t held(rank_job *j) {
    epo_stats stats = {.size = sizeof stats};
    (void)j->engine->group_stats(j->group, &stats, 0);
    return stats.memory_bytes;
}

/* A buffer takes what was told; a forward without backward takes no room for what only
 * that wants; one with it takes as much more as was told. */
static void *memory_main(void *ctx) {
    rank_job *j = ctx;
    const epo_engine *e = j->engine;
    epo_layer_memory m = {.size = sizeof m};
    epo_saved *saved = NULL;
    epo_buffer *other = NULL;
    uint64_t told = 0, before = 0;
    epo_buffer_config bc = test_buffer(&j->c);
    bc.max_tokens = 3000;
    j->status = open_rank(j);
    if (j->status == EPO_OK)
        j->status = e->buffer_bytes(j->group, &bc, &told);
    before = held(j);
    if (j->status == EPO_OK)
        j->status = e->buffer_create(j->group, &bc, &other);
    const uint64_t took = held(j) - before;
    (void)e->buffer_destroy(other);
    if (j->status == EPO_OK)
        j->status = attention(j, 0, 0);
    epo_step *s = &j->step[0][0];
    if (j->status == EPO_OK)
        j->status = e->forward(s->layer, s->plan, s->x, s->y, NULL, j->stream);
    if (j->status == EPO_OK)
        j->status = e->layer_bytes(s->layer, s->plan, &m);
    before = held(j);
    if (j->status == EPO_OK)
        j->status = e->forward(s->layer, s->plan, s->x, s->y, &saved, j->stream);
    const uint64_t more = held(j) - before;
    e->saved_release(saved);
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    j->hash = took == told && more == m.saved;
    snprintf(j->text, sizeof j->text,
             "buffer: %llu bytes told, %llu taken; forward with a backward: %llu told, %llu more",
             (unsigned long long)told, (unsigned long long)took, (unsigned long long)m.saved,
             (unsigned long long)more);
    if (j->status != EPO_OK)
        snprintf(j->text, sizeof j->text, "%s", e->error());
    close_rank(j);
    return NULL;
}

static void test_memory(void) {
    struct cudaDeviceProp prop;
    TEST_CUDA(cudaGetDeviceProperties(&prop, 0));
    if (prop.major != 9) {
        test_skip("memory as told", "what an inference leaves out is sm_90's affair");
        return;
    }
    for (int i = 0; i < 4; i += 2) { /* flex keeps its rows in any case */
        char name[96], text[256] = "";
        rank_job j[2];
        ref_case c = some_case(0xe1, 2, EPO_BF16);
        for (int r = 0; r < 2; r++) {
            j[r] = some_job(&c, r, i);
            j[r].main = memory_main;
        }
        snprintf(name, sizeof name, "memory as told, %s", i > 0 ? "overlapped" : "serial");
        const bool ok = run_world(j, 2, text, sizeof text) && j[0].hash && j[1].hash;
        test_result(name, ok, text[0] != '\0' ? text : j[0].hash ? j[1].text : j[0].text);
    }
}

static void test_groups(void) {
    static const int members[2][2] = {{0, 2}, {3, 1}};
    for (int i = 2; i < 4; i++) {
        char name[96], text[256] = "";
        rank_job alone[4], both[4];
        bool ok = true;
        for (int g = 0; g < 2; g++) {
            ref_case c = some_case(0x61 + (uint64_t)g, 2, EPO_BF16);
            for (int r = 0; r < 2; r++) {
                rank_job *j = &both[2 * g + r];
                alone[2 * g + r] = *j = some_job(&c, r, i);
                j->config.members = members[g];
                j->config.nmembers = 2;
                j->config.rank = members[g][r];
            }
            ok = ok && run_world(&alone[2 * (size_t)g], 2, text, sizeof text);
        }
        snprintf(name, sizeof name, "two groups of two in a step of four, %s", dispatcher_name(i));
        ok = ok && run_world(both, 4, text, sizeof text);
        same_bits(name, ok, alone, both, 4, text, sizeof text);
    }
}

/* Two groups, each over the same two GPUs, at once, with experts that want every SM: what
 * one holds the other's rows may be waiting for. */
static void test_beside(void) {
    static const int members[2][2] = {{0, 1}, {2, 3}};
    int devices = 0;
    TEST_CUDA(cudaGetDeviceCount(&devices));
    if (devices < 2) {
        printf("# beside: left out, needs 2 GPUs, %d here\n", devices);
        return;
    }
    for (int i = 0; i < 3; i++) {
        char name[96], text[256] = "";
        rank_job alone[4], both[4];
        bool ok = true;
        for (int g = 0; g < 2; g++) {
            ref_case c = some_case(0xe1 + (uint64_t)(2 * i + g), 2, EPO_BF16);
            c.experts = 16;
            c.hidden = 1024;
            c.ffn = 512;
            c.tokens = 900 + 100 * g;
            c.routing = i % 2 ? REF_UNEVEN : REF_RANDOM;
            for (int r = 0; r < 2; r++) {
                rank_job *j = &both[2 * g + r];
                *j = some_job(&c, r, 2 * (1 + i % 2));
                j->config.chunks = 4;
                alone[2 * g + r] = *j;
                j->config.members = members[g];
                j->config.nmembers = 2;
                j->config.rank = members[g][r];
            }
            ok = ok && run_world(&alone[2 * (size_t)g], 2, text, sizeof text);
        }
        snprintf(name, sizeof name, "two groups over the same two GPUs at once, %s",
                 i % 2 ? "delayed, uneven" : "overlapped");
        ok = ok && run_world(both, 4, text, sizeof text);
        same_bits(name, ok, alone, both, 4, text, sizeof text);
    }
}

/* ---- experts of the caller's, and overflow ---- */

/* Is got[t] the input row as often as the token has slots? */
static bool copied(rank_job *j, const void *device, int kind) {
    const ref_case *c = &j->c;
    char *host = malloc(row_count(j) * test_size(c->type) + 1);
    bool same = true;
    TEST_CUDA(cudaMemcpy(host, device, row_count(j) * test_size(c->type), cudaMemcpyDeviceToHost));
    for (int t = 0; t < ref_tokens(c, j->rank); t++)
        for (int h = 0; h < c->hidden; h++) {
            const uint64_t at = (uint64_t)(t * c->hidden + h);
            const double x = test_round(c->type, ref_row(c, kind, j->rank, 0, t, h));
            same =
                same && test_load(host, at, c->type) == test_round(c->type, (float)(c->top_k * x));
        }
    free(host);
    return same;
}

static void *own_main(void *ctx) {
    rank_job *j = ctx;
    const ref_case *c = &j->c;
    const epo_layer_config lc = test_copying_layer(c, &j->copying);
    epo_step *s = &j->step[0][LAYERS - 1]; /* the one whose dy is given */
    epo_layer *layer = NULL;
    j->status = open_rank(j);
    if (j->status == EPO_OK)
        j->status = attention(j, 0, LAYERS - 1);
    s->x = j->x[0];
    if (j->status == EPO_OK)
        j->status = j->engine->layer_create(j->group, &lc, &layer);
    if (j->status == EPO_OK)
        j->status = j->engine->forward(layer, s->plan, s->x, s->y, &s->saved, j->stream);
    if (j->status == EPO_OK)
        j->status = j->engine->backward(layer, s->saved, s->dy, s->dx, s->dweights, j->stream);
    s->saved = NULL;
    if (j->status == EPO_OK)
        j->status = j->engine->group_wgrad_flush(j->group, j->stream);
    if (j->status != EPO_OK)
        snprintf(j->text, sizeof j->text, "%s", j->engine->error());
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    j->hash = j->status == EPO_OK && copied(j, s->y, 0) && copied(j, s->dx, 1) &&
              j->copying.calls[0] > 0 && j->copying.calls[1] == j->copying.calls[0] &&
              j->copying.calls[2] == 1;
    (void)j->engine->layer_destroy(layer);
    close_rank(j);
    return NULL;
}

static void test_own(void) {
    for (int i = 0; i < 6; i++) {
        char name[96], text[256] = "other rows than went in, or calls are missing";
        rank_job j[2];
        ref_case c = some_case(0x91 + (uint64_t)i, 2, EPO_BF16);
        for (int r = 0; r < 2; r++) {
            j[r] = some_job(&c, r, i);
            j[r].main = own_main;
        }
        snprintf(name, sizeof name, "experts of the caller's, %s %s", dispatcher_name(i),
                 i / 2 == 0   ? "serial"
                 : i / 2 == 1 ? "overlapped"
                              : "delayed");
        bool ok = run_world(j, 2, text, sizeof text) && j[0].hash && j[1].hash;
        test_result(name, ok, ok ? "rows came back" : text);
    }
}

/* ---- rows of the caller's that lie anywhere ---- */

/* Room for the rows, `shift` elements behind where such memory begins; `from`: what is there. */
static char *shifted(rank_job *j, uint64_t rows, const void *from, int shift) {
    const uint64_t size = test_size(j->c.type), bytes = rows * (uint64_t)j->c.hidden * size;
    char *p = (char *)hold(j, test_device(bytes + 32, 0xff)) + (uint64_t)shift * size;
    if (from != NULL)
        TEST_CUDA(cudaMemcpyAsync(p, from, bytes, cudaMemcpyDeviceToDevice, j->stream));
    return p;
}

static uint64_t hash_rows(const rank_job *j, uint64_t hash, const char *rows, uint64_t count) {
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    return test_hash_device(hash, rows, count * (uint64_t)j->c.hidden * test_size(j->c.type));
}

/* Dispatch, combine, forward, backward; a hash of what came out. */
static epo_status run_shifted(rank_job *j, int shift, uint64_t *hash) {
    const epo_engine *e = j->engine;
    const epo_step *s = &j->step[0][LAYERS - 1];
    const uint64_t tokens = (uint64_t)ref_tokens(&j->c, j->rank);
    uint64_t rows = 0;
    epo_saved *saved = NULL;
    epo_status status = e->plan_rows(s->plan, &rows);
    char *x = shifted(j, tokens, j->x[0], shift), *dy = shifted(j, tokens, s->dy, shift);
    char *y = shifted(j, tokens, NULL, shift), *dx = shifted(j, tokens, NULL, shift);
    char *there = shifted(j, rows, NULL, shift);
    if (status == EPO_OK)
        status = e->dispatch(s->plan, x, there, NULL, j->stream);
    if (status == EPO_OK)
        status = e->combine(s->plan, there, y, NULL, NULL, j->stream);
    *hash = hash_rows(j, TEST_HASH, there, rows);
    *hash = hash_rows(j, *hash, y, tokens);
    if (status == EPO_OK)
        status = e->forward(s->layer, s->plan, x, y, &saved, j->stream);
    if (status == EPO_OK)
        status = e->backward(s->layer, saved, dy, dx, s->dweights, j->stream);
    *hash = hash_rows(j, *hash, y, tokens);
    *hash = hash_rows(j, *hash, dx, tokens);
    return status;
}

static void *shifted_main(void *ctx) {
    rank_job *j = ctx;
    uint64_t hash[2] = {0};
    j->status = open_rank(j);
    if (j->status == EPO_OK)
        j->status = attention(j, 0, LAYERS - 1);
    for (int i = 0; i < 2 && j->status == EPO_OK; i++)
        j->status = run_shifted(j, i, &hash[i]);
    if (j->status == EPO_OK)
        j->status = j->engine->group_wgrad_flush(j->group, j->stream);
    if (j->status != EPO_OK)
        snprintf(j->text, sizeof j->text, "%s", j->engine->error());
    j->hash = hash[0] == hash[1];
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    close_rank(j);
    return NULL;
}

static void test_shifted(void) {
    for (int i = 0; i < 6; i++) {
        char name[96], text[256] = "other bits";
        rank_job j[2];
        ref_case c = some_case(0xb1 + (uint64_t)i, 2, i / 2 == 0 ? EPO_F32 : EPO_BF16);
        for (int r = 0; r < 2; r++) {
            j[r] = some_job(&c, r, i);
            j[r].main = shifted_main;
        }
        snprintf(name, sizeof name, "rows that lie between units of 16 bytes, %s %s",
                 dispatcher_name(i), i / 2 == 0 ? "serial" : "overlapped");
        bool ok = run_world(j, 2, text, sizeof text) && j[0].hash && j[1].hash;
        test_result(name, ok, ok ? "the same bits" : text);
    }
}

/* ---- a caller's memory that ends ---- */

typedef struct store {
    int calls, fail_call, blocks; /* from the n-th call on there is no more; blocks given out */
} store;

static void *store_alloc(void *ctx, uint64_t bytes) {
    store *s = ctx;
    void *p = NULL;
    if (s->fail_call > 0 && ++s->calls >= s->fail_call)
        return NULL;
    TEST_CUDA(cudaMalloc(&p, bytes));
    s->blocks++;
    return p;
}

static void store_free(void *ctx, void *ptr, uint64_t bytes) {
    (void)bytes;
    ((store *)ctx)->blocks--;
    TEST_CUDA(cudaFree(ptr));
}

/* The rank's passes; 1: as they should, 2: the memory ended, and all is as it should be. */
static void *scarce_main(void *ctx) {
    rank_job *j = ctx;
    store own = {.fail_call = j->rank == 0 ? j->f : 0};
    j->config.alloc = store_alloc;
    j->config.free = store_free;
    j->config.alloc_ctx = &own;
    epo_status status = open_rank(j);
    if (status == EPO_OK)
        status = run_plain(j);
    if (status == EPO_OK)
        status = j->engine->group_wgrad_flush(j->group, j->stream);
    if (status == EPO_OK)
        status = j->engine->group_barrier(j->group);
    if (status != EPO_OK)
        snprintf(j->text, sizeof j->text, "%s", j->engine->error());
    const bool told = j->rank != 0 ? status == EPO_E_PEER || status == EPO_E_NOMEM
                                   : status == EPO_E_NOMEM && strstr(j->text, "gave none") != NULL;
    j->hash = status == EPO_OK ? 1 : told ? 2 : 0;
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    close_rank(j);
    j->hash = own.blocks == 0 ? j->hash : 0;
    return NULL;
}

static void test_scarce(void) {
    static const int variants[] = {0, 3, 4};
    for (int v = 0; v < 3; v++) {
        const int i = variants[v];
        char name[96], text[256] = "";
        uint64_t came = 2;
        int fail_call = 0;
        while (came == 2 && ++fail_call < 60) {
            rank_job j[2];
            ref_case c = some_case(0xc1 + (uint64_t)i, 2, EPO_BF16);
            for (int r = 0; r < 2; r++) {
                j[r] = some_job(&c, r, i);
                j[r].main = scarce_main;
                j[r].f = fail_call;
            }
            (void)run_world(j, 2, text, sizeof text);
            came = j[0].hash == j[1].hash ? j[0].hash : 0;
            snprintf(text, sizeof text, "%.120s; %.120s", j[0].text, j[1].text);
        }
        const bool ok = came == 1 && fail_call > 4;
        snprintf(name, sizeof name, "memory that ends at any of %d calls, %s %s", fail_call - 1,
                 dispatcher_name(i),
                 i / 2 == 0   ? "serial"
                 : i / 2 == 1 ? "overlapped"
                              : "delayed");
        test_result(name, ok, ok ? "both ranks are told, nothing is left" : text);
    }
}

static void *overflow_main(void *ctx) {
    rank_job *j = ctx;
    epo_status status = open_rank(j);
    epo_plan *plan = NULL;
    epo_buffer *buffer = NULL;
    epo_buffer_config bc = test_buffer(&j->c);
    bc.capacity = 5;
    const epo_routing r = test_routing(&j->c, j->rank, j->experts[0], j->weights[0]);
    if (status == EPO_OK)
        status = j->engine->buffer_create(j->group, &bc, &buffer);
    if (status == EPO_OK)
        status = j->engine->plan_create(buffer, &r, j->stream, &plan);
    snprintf(j->text, sizeof j->text, "%s", j->engine->error());
    j->hash = status == EPO_E_OVERFLOW && strstr(j->text, "rank 0") != NULL &&
              strstr(j->text, "expert ") != NULL && strstr(j->text, "capacity is 5") != NULL;
    j->engine->plan_release(plan);
    (void)j->engine->buffer_destroy(buffer);
    close_rank(j);
    return NULL;
}

static void test_overflow(void) {
    for (int i = 2; i < 4; i++) {
        char text[256] = "";
        rank_job j[2];
        ref_case c = some_case(0xa1, 2, EPO_BF16);
        for (int r = 0; r < 2; r++) {
            j[r] = some_job(&c, r, i);
            j[r].main = overflow_main;
        }
        bool ok = run_world(j, 2, text, sizeof text) && j[0].hash && j[1].hash;
        test_result(i % 2 ? "overflow is everybody's error, flex"
                          : "overflow is everybody's error, alltoall",
                    ok, j[1].text);
    }
}

/* ---- a communicator: processes ---- */

typedef struct nccl_id {
    char bytes[128];
} nccl_id;
typedef struct comm_board {
    nccl_id id;
    _Atomic int made, done;
    uint64_t hash[RANKS];
    int status[RANKS];
    char text[RANKS][256];
} comm_board;

static void *nccl_symbol(const char *name) {
    void *lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    return lib != NULL ? dlsym(lib, name) : NULL;
}

/* The rank's GPU. */
static int comm_device(int rank, int ranks) {
    int devices = 0;
    TEST_CUDA(cudaGetDeviceCount(&devices));
    test_apart(rank, ranks, devices);
    TEST_CUDA(cudaSetDevice(rank % devices));
    return rank % devices;
}

/* One rank in a process of its own: its group comes from a communicator. */
static int comm_process(comm_board *b, int rank, int ranks, bool late) {
    int (*unique)(nccl_id *), (*init)(void **, int, nccl_id, int);
    *(void **)&unique = nccl_symbol("ncclGetUniqueId");
    *(void **)&init = nccl_symbol("ncclCommInitRank");
    void *comm = NULL;
    ref_case c = some_case(0x71, ranks, EPO_BF16);
    rank_job j = some_job(&c, rank, 2);
    if (unique == NULL || init == NULL)
        return 4;
    j.device = comm_device(rank, ranks);
    if (rank == 0 && unique(&b->id) != 0)
        return 5;
    atomic_fetch_add(&b->made, rank == 0);
    for (int i = 0; i < 20000 && atomic_load(&b->made) == 0; i++)
        usleep(1000);
    if (init(&comm, ranks, b->id, rank) != 0)
        return 6;
    j.config.nccl_comm = comm;
    if (late)
        j.config.timeout_s = 2;
    if (late && rank == 1) /* it has a communicator, and makes no group of it */
        sleep(4);
    else
        rank_main(&j);
    b->hash[rank] = j.hash;
    b->status[rank] = (int)j.status;
    snprintf(b->text[rank], sizeof b->text[rank], "%s", j.text);
    return 0;
}

/* A process for each rank; the worst of their ends. */
static int comm_processes(comm_board *b, int ranks, bool late) {
    int worst = 0;
    for (int r = 0; r < ranks; r++)
        if (fork() == 0)
            _exit(comm_process(b, r, ranks, late));
    for (int r = 0; r < ranks; r++) {
        int status = 0;
        wait(&status);
        worst = status != 0 ? status : worst;
    }
    return worst;
}

static comm_board *comm_board_make(void) {
    comm_board *b =
        mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b == MAP_FAILED)
        exit(3);
    return b;
}

/* The other rank is told within its limit, though it waits inside NCCL. */
static void test_comm_late(void) {
    comm_board *b = comm_board_make();
    const int worst = comm_processes(b, 2, true);
    test_result("group from an ncclComm_t, one rank makes none",
                worst == 0 && b->status[0] == EPO_E_TIMEOUT &&
                    strstr(b->text[0], "all its ranks must make the group") != NULL,
                b->text[0]);
    munmap(b, sizeof *b);
}

/* Before this process has touched CUDA. */
static void test_comm(int ranks) {
    comm_board *b = comm_board_make();
    char name[64], text[288] = "";
    const int worst = comm_processes(b, ranks, false);
    snprintf(name, sizeof name, "group from an ncclComm_t, %d ranks", ranks);
    if (worst != 0) {
        snprintf(text, sizeof text, "a process ended with status 0x%x", (unsigned)worst);
        test_result(name, false, text);
    }
    rank_job plain[RANKS], comm[RANKS];
    ref_case c = some_case(0x71, ranks, EPO_BF16);
    bool ok = worst == 0;
    for (int r = 0; r < ranks; r++) {
        plain[r] = comm[r] = some_job(&c, r, 2);
        comm[r].hash = b->hash[r];
        if (b->status[r] != EPO_OK)
            snprintf(text, sizeof text, "%s", b->text[r]);
        ok = ok && b->status[r] == EPO_OK;
    }
    ok = ok && run_world(plain, ranks, text, sizeof text);
    same_bits(name, ok, plain, comm, ranks, text, sizeof text);
    munmap(b, sizeof *b);
}

static void test_comms(void) {
    test_comm_late(); /* before test_comm, behind which CUDA is this process's too */
    test_comm(2);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } all[] = {{"comm", test_comms}, /* it forks: first */
               {"differ", test_differ},  {"groups", test_groups},     {"beside", test_beside},
               {"saved", test_saved},    {"capture", test_capture},   {"memory", test_memory},
               {"tp", test_tp},          {"own", test_own},           {"shifted", test_shifted},
               {"scarce", test_scarce},  {"overflow", test_overflow}, {"schedule", test_schedule},
               {"control", test_control}};
    int first = 1;
    if (argc > 1 && strcmp(argv[1], "e4m3") == 0) {
        wire = EPO_WIRE_E4M3;
        first++;
    }
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        bool asked = argc <= first;
        for (int a = first; a < argc; a++)
            asked = asked || strcmp(argv[a], all[i].name) == 0;
        if (asked)
            all[i].run();
    }
    return test_failed;
}
