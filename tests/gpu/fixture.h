/* SPDX-License-Identifier: Apache-2.0
 *
 * fixture.h - what the programs that run layers share: a rank's arrays on its GPU and what
 * is sent to them, the configurations that follow from a case, a pass, hashes of results,
 * and how ranks meet that are processes.
 */
#ifndef EPO_TESTS_GPU_FIXTURE_H
#define EPO_TESTS_GPU_FIXTURE_H

#include "gpu_test.h"
#include "../unit/configs.h"
#include "reference.h"

#include "backend/engine.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static inline double test_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* GPUs here, asked of a child: this process has not touched CUDA yet, so it may fork. */
static inline int test_devices(void) {
    int n = 0, pipes[2];
    if (pipe(pipes) != 0)
        return 0;
    const pid_t pid = fork();
    if (pid == 0) {
        (void)cudaGetDeviceCount(&n);
        _exit(write(pipes[1], &n, sizeof n) == (ssize_t)sizeof n ? 0 : 1);
    }
    close(pipes[1]);
    if (read(pipes[0], &n, sizeof n) != (ssize_t)sizeof n)
        n = 0;
    close(pipes[0]);
    waitpid(pid, NULL, 0);
    return n;
}

/* For a rank that is a process, before NCCL is there, which refuses two ranks of one node on
 * one GPU: where they share GPUs each says that it is a node of its own, and NCCL goes over the
 * loopback's sockets. */
static inline void test_apart(int rank, int ranks, int devices) {
    char name[32];
    snprintf(name, sizeof name, "epo-test-rank-%d", rank);
    if (ranks <= devices)
        return;
    setenv("NCCL_HOSTID", name, 0);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    setenv("NCCL_IB_DISABLE", "1", 0);
}

/* ---- ranks that are processes meet ---- */

/* In memory that they share. */
typedef struct test_table {
    _Atomic int arrived, round;
    char slot[REF_RANKS][8192];
} test_table;
typedef struct test_seat {
    test_table *table;
    int rank, ranks;
} test_seat;

static inline int test_barrier(void *ctx) {
    const test_seat *s = ctx;
    const int round = atomic_load(&s->table->round);
    if (atomic_fetch_add(&s->table->arrived, 1) == s->ranks - 1) {
        atomic_store(&s->table->arrived, 0);
        atomic_store(&s->table->round, round + 1);
        return 0;
    }
    for (int i = 0; atomic_load(&s->table->round) == round; i++) {
        if (i > 200000)
            return -1; /* 20 s */
        usleep(100);
    }
    return 0;
}

static inline int test_allgather(void *ctx, const void *mine, size_t bytes, void *all) {
    const test_seat *s = ctx;
    if (bytes > sizeof s->table->slot[0])
        return -1;
    memcpy(s->table->slot[s->rank], mine, bytes);
    if (test_barrier(ctx) != 0)
        return -1;
    for (int r = 0; r < s->ranks; r++)
        memcpy((char *)all + (size_t)r * bytes, s->table->slot[r], bytes);
    return test_barrier(ctx);
}

/* ---- a rank's arrays ---- */

typedef struct test_arrays {
    void *w1, *w2, *dw1, *dw2, *x, *dy, *y, *dx;
    float *weights, *dweights;
    int64_t *experts;
} test_arrays;

/* w2's elements on a rank; w1's are twice as many. */
static inline uint64_t test_weights(const ref_case *c) {
    return (uint64_t)(c->experts / c->ranks) * (uint64_t)c->ffn * (uint64_t)c->hidden;
}
static inline uint64_t test_rows_bytes(const ref_case *c, int rank) {
    return (uint64_t)ref_tokens(c, rank) * (uint64_t)c->hidden * test_size(c->type);
}
static inline uint64_t test_slots(const ref_case *c, int rank) {
    return (uint64_t)ref_tokens(c, rank) * (uint64_t)c->top_k;
}
/* Of pinned memory for one set of inputs. */
static inline uint64_t test_stage_bytes(const ref_case *c) {
    return (uint64_t)c->tokens * ((uint64_t)c->hidden * 8 + (uint64_t)c->top_k * 12) + 64;
}

/* For as many tokens as any rank has; gradients are 0, all else is poisoned.  The experts'
 * weights are the caller's to make. */
static inline void test_arrays_open(test_arrays *a, const ref_case *c) {
    const uint64_t n = test_weights(c), wsize = test_size(c->wgrad_type);
    const uint64_t rows = (uint64_t)c->tokens * (uint64_t)c->hidden * test_size(c->type);
    const uint64_t slots = (uint64_t)c->tokens * (uint64_t)c->top_k;
    a->dw1 = test_device(2 * n * wsize, 0);
    a->dw2 = test_device(n * wsize, 0);
    a->x = test_device(rows, 0xff);
    a->dy = test_device(rows, 0xff);
    a->y = test_device(rows, 0xff);
    a->dx = test_device(rows, 0xff);
    a->weights = test_device(slots * 4, 0xff);
    a->dweights = test_device(slots * 4, 0xff);
    a->experts = test_device(slots * 8, 0xff);
}

static inline void test_arrays_close(test_arrays *a) {
    void *all[] = {a->w1, a->w2, a->dw1,     a->dw2,      a->x,      a->dy,
                   a->y,  a->dx, a->weights, a->dweights, a->experts};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        cudaFree(all[i]);
}

/* The rank's w1, or w2, to memory of the CPU. */
static inline void test_weights_fill(const ref_case *c, int rank, bool second, void *host) {
    const int local = c->experts / c->ranks;
    const uint64_t n = (uint64_t)c->ffn * (uint64_t)c->hidden * (second ? 1 : 2);
    for (int e = 0; e < local; e++)
        for (uint64_t i = 0; i < n; i++)
            test_store(host, (uint64_t)e * n + i, c->type,
                       second ? ref_w2(c, rank * local + e, i) : ref_w1(c, rank * local + e, i));
}

static inline void *test_weights_upload(const ref_case *c, int rank, bool second) {
    const uint64_t bytes = test_weights(c) * (second ? 1 : 2) * test_size(c->type);
    char *host = malloc(bytes);
    test_weights_fill(c, rank, second, host);
    void *p = test_upload(host, bytes);
    free(host);
    return p;
}

/* kind: 0 x, 1 dy. */
static inline void test_rows_fill(const ref_case *c, int kind, int rank, int mb, void *host) {
    for (int t = 0; t < ref_tokens(c, rank); t++)
        for (int h = 0; h < c->hidden; h++)
            test_store(host, (uint64_t)(t * c->hidden + h), c->type,
                       ref_row(c, kind, rank, mb, t, h));
}

static inline void test_routing_fill(const ref_case *c, int rank, int mb, int64_t *experts,
                                     float *weights) {
    for (uint64_t i = 0; i < test_slots(c, rank); i++) {
        const int t = (int)i / c->top_k, k = (int)i % c->top_k;
        experts[i] = ref_expert(c, rank, mb, t, k);
        weights[i] = ref_weight(c, rank, mb, t, k);
    }
}

/* Where each array lies in a stage of pinned memory. */
typedef struct test_stage {
    char *x, *dy;
    float *weights;
    int64_t *experts;
} test_stage;

static inline test_stage test_stage_at(const ref_case *c, int rank, char *memory) {
    const uint64_t n = (uint64_t)ref_tokens(c, rank) * (uint64_t)c->hidden;
    test_stage s = {.x = memory, .dy = memory + n * 4};
    s.weights = (float *)(void *)(s.dy + n * 4);
    s.experts = (int64_t *)(void *)((char *)s.weights + (test_slots(c, rank) * 4 + 7) / 8 * 8);
    return s;
}

static inline void test_stage_fill(const ref_case *c, int rank, int mb, const test_stage *s) {
    test_rows_fill(c, 0, rank, mb, s->x);
    test_rows_fill(c, 1, rank, mb, s->dy);
    test_routing_fill(c, rank, mb, s->experts, s->weights);
}

/* By stream order only: what a training step does. */
static inline void test_send(void *device, const void *host, uint64_t bytes, cudaStream_t stream) {
    TEST_CUDA(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream));
}
static inline void test_stage_send(const ref_case *c, int rank, const test_stage *s,
                                   const test_arrays *a, cudaStream_t stream) {
    test_send(a->x, s->x, test_rows_bytes(c, rank), stream);
    test_send(a->dy, s->dy, test_rows_bytes(c, rank), stream);
    test_send(a->weights, s->weights, test_slots(c, rank) * 4, stream);
    test_send(a->experts, s->experts, test_slots(c, rank) * 8, stream);
}

/* What a pass is to overwrite. */
static inline void test_outputs_poison(const ref_case *c, int rank, int byte, const test_arrays *a,
                                       cudaStream_t stream) {
    TEST_CUDA(cudaMemsetAsync(a->y, byte, test_rows_bytes(c, rank), stream));
    TEST_CUDA(cudaMemsetAsync(a->dx, byte, test_rows_bytes(c, rank), stream));
    TEST_CUDA(cudaMemsetAsync(a->dweights, byte, test_slots(c, rank) * 4, stream));
}

/* ---- objects ---- */

static inline epo_engine_group test_group(int rank, int ranks, double timeout_s) {
    epo_engine_group g = {sizeof g, EPO_GROUP_CONFIG_INIT, "test"};
    g.config.engine = EPO_ENGINE_CUDA;
    g.config.rank = rank;
    g.config.ranks = ranks;
    g.config.timeout_s = timeout_s;
    g.config.warn_s = timeout_s / 2;
    return g;
}

static inline epo_buffer_config test_buffer(const ref_case *c) {
    epo_buffer_config b = config_buffer(c->experts, c->hidden, c->top_k, c->tokens);
    b.type = c->type;
    b.capacity = c->capacity;
    b.overflow = c->overflow;
    b.pad_to_capacity = c->pad;
    b.wire = c->wire;
    return b;
}

static inline epo_layer_config test_layer(const ref_case *c, const test_arrays *a) {
    epo_layer_config l = config_layer(c->experts, c->hidden, c->ffn, a->w1, a->w2);
    l.type = c->type;
    l.wgrad_type = c->wgrad_type;
    l.dw1 = a->dw1;
    l.dw2 = a->dw2;
    return l;
}

static inline epo_routing test_routing(const ref_case *c, int rank, const int64_t *experts,
                                       const float *weights) {
    return config_routing(ref_tokens(c, rank), c->top_k, experts, weights);
}

/* The simplest experts, y = x and dx = dy; calls are counted by phase. */
typedef struct test_copying {
    uint64_t row_bytes;
    int calls[3];
} test_copying;

static inline epo_status test_copy(void *ctx, const epo_expert_call *call) {
    test_copying *t = ctx;
    const bool forward = call->phase == EPO_EXPERT_FORWARD;
    const uint64_t at = call->row * t->row_bytes;
    cudaStream_t stream = (cudaStream_t)call->stream;
    t->calls[call->phase]++;
    if (call->phase == EPO_EXPERT_WGRAD)
        return EPO_OK;
    TEST_CUDA(cudaMemcpyAsync((char *)(forward ? call->y : call->dx) + at,
                              (const char *)(forward ? call->x : call->dy) + at,
                              call->rows * t->row_bytes, cudaMemcpyDeviceToDevice, stream));
    if (!forward)
        TEST_CUDA(cudaMemsetAsync(call->dweights + call->row, 0, call->rows * 4, stream));
    return EPO_OK;
}

static inline epo_layer_config test_copying_layer(const ref_case *c, test_copying *t) {
    epo_layer_config l = EPO_LAYER_CONFIG_INIT;
    *t = (test_copying){.row_bytes = (uint64_t)c->hidden * test_size(c->type)};
    l.experts = c->experts;
    l.hidden = c->hidden;
    l.type = c->type;
    l.expert = test_copy;
    l.expert_wgrad = 1;
    l.ctx = t;
    return l;
}

/* Plan, forward, backward; *plan is the caller's to release. */
static inline epo_status test_pass(const epo_engine *e, epo_buffer *buffer, epo_layer *layer,
                                   const epo_routing *r, const test_arrays *a, cudaStream_t stream,
                                   epo_plan **plan) {
    epo_saved *saved = NULL;
    epo_status status = e->plan_create(buffer, r, stream, plan);
    if (status == EPO_OK)
        status = e->forward(layer, *plan, a->x, a->y, &saved, stream);
    if (status == EPO_OK)
        status = e->backward(layer, saved, a->dy, a->dx, a->dweights, stream);
    return status;
}

/* ---- results ---- */

/* y, dx, dweights, dw1, dw2. */
enum { TEST_OUTPUTS = 5 };
typedef struct test_output {
    const char *name;
    const void *device;
    uint64_t count;
    epo_dtype type;
    const double *want;
} test_output;

/* want: NULL, or the reference's. */
static inline void test_outputs(const ref_case *c, int rank, const test_arrays *a,
                                const ref_result *want, test_output out[TEST_OUTPUTS]) {
    const uint64_t rows = (uint64_t)ref_tokens(c, rank) * (uint64_t)c->hidden;
    const uint64_t n = test_weights(c);
    const ref_result none = {0}, *w = want != NULL ? want : &none;
    out[0] = (test_output){"y", a->y, rows, c->type, w->y};
    out[1] = (test_output){"dx", a->dx, rows, c->type, w->dx};
    out[2] = (test_output){"dweights", a->dweights, test_slots(c, rank), EPO_F32, w->dweights};
    out[3] = (test_output){"dw1", a->dw1, 2 * n, c->wgrad_type, w->dw1};
    out[4] = (test_output){"dw2", a->dw2, n, c->wgrad_type, w->dw2};
}

#define TEST_HASH UINT64_C(0xcbf29ce484222325)

/* A hash of every bit; `bytes` of memory of the CPU. */
static inline uint64_t test_hash(uint64_t hash, const void *data, uint64_t bytes) {
    const unsigned char *at = data;
    for (uint64_t i = 0; i < bytes; i += 8) {
        uint64_t word = 0;
        memcpy(&word, at + i, bytes - i < 8 ? bytes - i : 8);
        hash = (hash ^ word) * UINT64_C(0x100000001b3);
        hash ^= hash >> 29;
    }
    return hash;
}

/* ... of memory of the device. */
static inline uint64_t test_hash_device(uint64_t hash, const void *device, uint64_t bytes) {
    unsigned char *host = malloc(bytes + 1);
    TEST_CUDA(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
    hash = test_hash(hash, host, bytes);
    free(host);
    return hash;
}

/* ---- ranks that are threads ---- */

/* Each has its job: jobs[r], of `size` bytes. */
static inline void test_threads(int ranks, void *(*main)(void *), void *jobs, size_t size) {
    pthread_t thread[REF_RANKS];
    for (int r = 0; r < ranks; r++)
        pthread_create(&thread[r], NULL, main, (char *)jobs + (size_t)r * size);
    for (int r = 0; r < ranks; r++)
        pthread_join(thread[r], NULL);
}

#endif
