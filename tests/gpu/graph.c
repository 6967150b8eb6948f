/* SPDX-License-Identifier: Apache-2.0
 *
 * graph.c - a layer's plan, forward and backward in a CUDA graph, replayed with other
 * inputs in the same arrays, against the same calls without a graph, bit for bit; what is
 * wrong in a replay, and a peer that does not come; the CPU's time of a replay.
 *
 *   graph threads|processes RANKS [REPLAYS [NAME...]]      bits errors time
 */
#include "gpu_test.h"
#include "reference.h"

#include "backend/engine.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* PERIOD: of large arrays' numbers; no dimension divides it. */
enum { RANKS = 8, ARRAYS = 5, PERIOD = 65521 };

/* What goes wrong in the last replay. */
typedef enum fault { FAULT_NONE, FAULT_INDEX, FAULT_OVERFLOW, FAULT_LATE } fault;

typedef struct setup {
    ref_case c; /* capacity, overflow and pad as the buffer's */
    epo_switch overlap;
    int chunks, replays;
    fault fault;
    bool timed;
} setup;

typedef struct board {
    _Atomic int arrived, round;
    char slot[RANKS][8192];
    struct {
        int status, differ; /* replays whose bits differ */
        int where[ARRAYS];
        char text[256];
        double launch_us, eager_us, replay_ms, eager_ms; /* medians: CPU, and all of it */
        uint64_t dropped[2];
        float nan; /* of y after a fault: the part that is NaN */
    } rank[RANKS];
} board;

typedef struct job {
    const epo_engine *engine;
    setup s;
    int rank, devices;
    epo_world *world;
    board *b;
    /* while it runs */
    cudaStream_t stream;
    epo_group *group;
    epo_buffer *plain, *graphs;
    epo_layer *layer[2]; /* of each way, with gradients of its own */
    void *x, *dy, *y, *dx, *dw1[2], *dw2[2], *w1, *w2;
    float *weights, *dweights;
    int64_t *experts;
    char *stage;
    cudaGraphExec_t exec;
    epo_plan *plan; /* captured */
} job;

/* ---- a bootstrap for processes: the board ---- */

static int board_barrier(void *ctx) {
    job *j = ctx;
    const int round = atomic_load(&j->b->round);
    if (atomic_fetch_add(&j->b->arrived, 1) == j->s.c.ranks - 1) {
        atomic_store(&j->b->arrived, 0);
        atomic_store(&j->b->round, round + 1);
        return 0;
    }
    for (int i = 0; atomic_load(&j->b->round) == round; i++) {
        if (i > 200000)
            return -1; /* 20 s */
        usleep(100);
    }
    return 0;
}

static int board_allgather(void *ctx, const void *mine, size_t bytes, void *all) {
    job *j = ctx;
    if (bytes > sizeof j->b->slot[0])
        return -1;
    memcpy(j->b->slot[j->rank], mine, bytes);
    if (board_barrier(j) != 0)
        return -1;
    for (int r = 0; r < j->s.c.ranks; r++)
        memcpy((char *)all + (size_t)r * bytes, j->b->slot[r], bytes);
    return board_barrier(j);
}

/* ---- one rank's objects ---- */

static uint64_t rows_bytes(const job *j) {
    return (uint64_t)ref_tokens(&j->s.c, j->rank) * (uint64_t)j->s.c.hidden *
           test_size(j->s.c.type);
}
static uint64_t slots_of(const job *j) {
    return (uint64_t)ref_tokens(&j->s.c, j->rank) * (uint64_t)j->s.c.top_k;
}
static uint64_t stage_bytes(const job *j) { return 2 * rows_bytes(j) + 12 * slots_of(j) + 64; }

static void *random_weights(const job *j, uint64_t seed, uint64_t n, int fan) {
    const epo_dtype type = j->s.c.type;
    char *host = malloc(n * test_size(type));
    const float scale = (float)(1.7 / sqrt((double)fan));
    uint64_t made = n < PERIOD ? n : PERIOD;
    for (uint64_t i = 0; i < made; i++)
        test_store(host, i, type, test_uniform(seed, i) * scale);
    for (uint64_t more; made < n; made += more) {
        more = made < n - made ? made : n - made;
        memcpy(host + made * test_size(type), host, more * test_size(type));
    }
    void *p = test_upload(host, n * test_size(type));
    free(host);
    return p;
}

static void memory_open(job *j) {
    const ref_case *c = &j->s.c;
    const uint64_t n = (uint64_t)(c->experts / c->ranks) * (uint64_t)c->ffn * (uint64_t)c->hidden;
    const uint64_t wsize = test_size(c->wgrad_type), rows = rows_bytes(j), slots = slots_of(j);
    j->w1 = random_weights(j, c->seed + (uint64_t)j->rank, 2 * n, c->hidden);
    j->w2 = random_weights(j, c->seed + 100 + (uint64_t)j->rank, n, c->ffn);
    for (int i = 0; i < 2; i++) {
        j->dw1[i] = test_device(2 * n * wsize, 0);
        j->dw2[i] = test_device(n * wsize, 0);
    }
    j->x = test_device(rows, 0xff);
    j->dy = test_device(rows, 0xff);
    j->y = test_device(rows, 0xff);
    j->dx = test_device(rows, 0xff);
    j->weights = test_device(slots * 4, 0xff);
    j->dweights = test_device(slots * 4, 0xff);
    j->experts = test_device(slots * 8, 0xff);
    TEST_CUDA(cudaHostAlloc((void **)&j->stage, 4 * stage_bytes(j), 0));
}

static epo_status objects_open(job *j) {
    const ref_case *c = &j->s.c;
    epo_bootstrap boot = {sizeof boot, j, board_allgather, board_barrier};
    epo_engine_group eg = {sizeof eg, EPO_GROUP_CONFIG_INIT, "test"};
    eg.config.engine = EPO_ENGINE_CUDA;
    eg.config.rank = j->rank;
    eg.config.ranks = c->ranks;
    eg.config.threads = j->world;
    eg.config.bootstrap = j->world == NULL ? &boot : NULL;
    eg.config.overlap = j->s.overlap;
    eg.config.delay_wgrad = EPO_OFF;
    eg.config.dispatcher = EPO_DISPATCH_ALLTOALL;
    eg.config.timeout_s = j->s.fault == FAULT_LATE ? 2 : 20;
    eg.config.warn_s = eg.config.timeout_s / 2;
    epo_buffer_config bc = EPO_BUFFER_CONFIG_INIT;
    bc.experts = c->experts;
    bc.hidden = c->hidden;
    bc.top_k = c->top_k;
    bc.max_tokens = c->tokens;
    bc.type = c->type;
    bc.capacity = c->capacity;
    bc.overflow = c->overflow;
    bc.pad_to_capacity = 1;
    bc.chunks = j->s.chunks;
    epo_layer_config lc = EPO_LAYER_CONFIG_INIT;
    lc.experts = c->experts;
    lc.hidden = c->hidden;
    lc.ffn = c->ffn;
    lc.type = c->type;
    lc.wgrad_type = c->wgrad_type;
    lc.w1 = j->w1;
    lc.w2 = j->w2;
    epo_status status = j->engine->group_create(&eg, &j->group);
    if (status == EPO_OK)
        status = j->engine->buffer_create(j->group, &bc, &j->plain);
    bc.graphs = 1;
    if (status == EPO_OK)
        status = j->engine->buffer_create(j->group, &bc, &j->graphs);
    for (int i = 0; i < 2 && status == EPO_OK; i++) {
        lc.dw1 = j->dw1[i];
        lc.dw2 = j->dw2[i];
        status = j->engine->layer_create(j->group, &lc, &j->layer[i]);
    }
    return status;
}

static void all_close(job *j) {
    if (j->exec != NULL)
        cudaGraphExecDestroy(j->exec);
    j->engine->plan_release(j->plan);
    for (int i = 0; i < 2; i++)
        (void)j->engine->layer_destroy(j->layer[i]);
    (void)j->engine->buffer_destroy(j->graphs);
    (void)j->engine->buffer_destroy(j->plain);
    (void)j->engine->group_destroy(j->group);
    void *all[] = {j->w1, j->w2, j->dw1[0], j->dw1[1],  j->dw2[0],   j->dw2[1], j->x,
                   j->dy, j->y,  j->dx,     j->weights, j->dweights, j->experts};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        cudaFree(all[i]);
    cudaFreeHost(j->stage);
    cudaStreamDestroy(j->stream);
}

/* ---- inputs, calls, results ---- */

/* Other ones for each i; `wrong`: with a fault. */
static void inputs_send(const job *j, int i, bool wrong) {
    const ref_case *c = &j->s.c;
    const int tokens = ref_tokens(c, j->rank);
    const uint64_t n = (uint64_t)tokens * (uint64_t)c->hidden, slots = slots_of(j);
    char *x = j->stage, *dy = x + rows_bytes(j);
    int64_t *e = (int64_t *)(void *)(dy + (rows_bytes(j) + 7) / 8 * 8);
    float *w = (float *)(void *)(e + slots);
    const uint64_t seed = c->seed ^ ((uint64_t)i * 1000 + (uint64_t)j->rank);
    for (uint64_t k = 0; k < n; k++) {
        test_store(x, k, c->type, test_uniform(seed, k % PERIOD));
        test_store(dy, k, c->type, test_uniform(seed + 7, k % PERIOD));
    }
    for (int t = 0; t < tokens; t++)
        for (int k = 0; k < c->top_k; k++) {
            e[t * c->top_k + k] = ref_expert(c, j->rank, i, t, k);
            w[t * c->top_k + k] = ref_weight(c, j->rank, i, t, k);
        }
    if (wrong && j->s.fault == FAULT_INDEX && j->rank == 0)
        e[slots / 2] = c->experts + 3;
    for (uint64_t k = 0; wrong && j->s.fault == FAULT_OVERFLOW && j->rank == 0 && k < slots; k++)
        e[k] = 1;
    TEST_CUDA(cudaMemcpyAsync(j->x, x, rows_bytes(j), cudaMemcpyHostToDevice, j->stream));
    TEST_CUDA(cudaMemcpyAsync(j->dy, dy, rows_bytes(j), cudaMemcpyHostToDevice, j->stream));
    TEST_CUDA(cudaMemcpyAsync(j->experts, e, slots * 8, cudaMemcpyHostToDevice, j->stream));
    TEST_CUDA(cudaMemcpyAsync(j->weights, w, slots * 4, cudaMemcpyHostToDevice, j->stream));
    TEST_CUDA(cudaMemsetAsync(j->y, 0x5a, rows_bytes(j), j->stream));
    TEST_CUDA(cudaMemsetAsync(j->dx, 0x5a, rows_bytes(j), j->stream));
    TEST_CUDA(cudaMemsetAsync(j->dweights, 0x5a, slots * 4, j->stream));
    TEST_CUDA(cudaStreamSynchronize(j->stream));
}

static epo_status calls(job *j, epo_buffer *buffer, epo_layer *layer, epo_plan **plan) {
    epo_saved *saved = NULL;
    epo_routing r = EPO_ROUTING_INIT;
    r.tokens = ref_tokens(&j->s.c, j->rank);
    r.top_k = j->s.c.top_k;
    r.experts = j->experts;
    r.weights = j->weights;
    epo_status status = j->engine->plan_create(buffer, &r, j->stream, plan);
    if (status == EPO_OK)
        status = j->engine->forward(layer, *plan, j->x, j->y, &saved, j->stream);
    if (status == EPO_OK)
        status = j->engine->backward(layer, saved, j->dy, j->dx, j->dweights, j->stream);
    return status;
}

static uint64_t hash_of(const void *device, uint64_t bytes) {
    unsigned char *host = malloc(bytes + 8);
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    TEST_CUDA(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
    memset(host + bytes, 0, 8);
    for (uint64_t i = 0; i < bytes; i += 8) {
        uint64_t word;
        memcpy(&word, host + i, 8);
        hash = (hash ^ word) * UINT64_C(0x100000001b3);
        hash ^= hash >> 29;
    }
    free(host);
    return hash;
}

static void hash_all(const job *j, int way, uint64_t hash[ARRAYS]) {
    const ref_case *c = &j->s.c;
    const uint64_t n = (uint64_t)(c->experts / c->ranks) * (uint64_t)c->ffn * (uint64_t)c->hidden;
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    hash[0] = hash_of(j->y, rows_bytes(j));
    hash[1] = hash_of(j->dx, rows_bytes(j));
    hash[2] = hash_of(j->dweights, slots_of(j) * 4);
    hash[3] = hash[4] = 0;
    if (j->s.timed) /* large ones, of layers whose bits are seen elsewhere */
        return;
    hash[3] = hash_of(j->dw1[way], 2 * n * test_size(c->wgrad_type));
    hash[4] = hash_of(j->dw2[way], n * test_size(c->wgrad_type));
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* ---- capture, replay, compare ---- */

static epo_status capture(job *j) {
    cudaGraph_t graph = NULL;
    /* Once without, as programs do: what is made at first use is made then. */
    epo_plan *plan = NULL;
    inputs_send(j, 0, false);
    epo_status status = calls(j, j->graphs, j->layer[1], &plan);
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    j->engine->plan_release(plan);
    if (status != EPO_OK)
        return status;
    TEST_CUDA(cudaStreamBeginCapture(j->stream, j->world != NULL ? cudaStreamCaptureModeThreadLocal
                                                                 : cudaStreamCaptureModeGlobal));
    status = calls(j, j->graphs, j->layer[1], &j->plan);
    cudaError_t e = cudaStreamEndCapture(j->stream, &graph);
    if (status == EPO_OK && e != cudaSuccess) {
        fprintf(stderr, "rank %d: cudaStreamEndCapture: %s\n", j->rank, cudaGetErrorString(e));
        return EPO_E_SYSTEM;
    }
    if (status == EPO_OK)
        TEST_CUDA(cudaGraphInstantiate(&j->exec, graph, 0));
    if (graph != NULL)
        cudaGraphDestroy(graph);
    /* A thread that allocates may wait for the others' GPUs. */
    return status == EPO_OK ? j->engine->group_barrier(j->group) : status;
}

/* After the warm-up's gradients both start from zero. */
static void clear_gradients(job *j) {
    const ref_case *c = &j->s.c;
    const uint64_t n = (uint64_t)(c->experts / c->ranks) * (uint64_t)c->ffn * (uint64_t)c->hidden;
    for (int i = 0; i < 2; i++) {
        TEST_CUDA(cudaMemsetAsync(j->dw1[i], 0, 2 * n * test_size(c->wgrad_type), j->stream));
        TEST_CUDA(cudaMemsetAsync(j->dw2[i], 0, n * test_size(c->wgrad_type), j->stream));
    }
    TEST_CUDA(cudaStreamSynchronize(j->stream));
}

static epo_status compare(job *j) {
    epo_status status = EPO_OK;
    for (int i = 0; i < j->s.replays && status == EPO_OK; i++) {
        uint64_t want[ARRAYS], got[ARRAYS];
        epo_plan *plan = NULL;
        bool differs = false;
        inputs_send(j, i, false);
        status = calls(j, j->plain, j->layer[0], &plan);
        j->engine->plan_release(plan);
        hash_all(j, 0, want);
        inputs_send(j, i, false);
        TEST_CUDA(cudaGraphLaunch(j->exec, j->stream));
        if (i % 10 == 3) { /* and a call without between two replays, on the graph's buffer */
            hash_all(j, 1, got);
            plan = NULL;
            if (status == EPO_OK)
                status = calls(j, j->graphs, j->layer[0], &plan);
            j->engine->plan_release(plan);
            TEST_CUDA(cudaStreamSynchronize(j->stream));
            if (memcmp(got, want, sizeof got) != 0)
                differs = true;
            for (int a = 0; a < ARRAYS; a++)
                j->b->rank[j->rank].where[a] += got[a] != want[a];
            if (hash_of(j->y, rows_bytes(j)) != want[0])
                differs = true;
            TEST_CUDA(cudaGraphLaunch(j->exec, j->stream)); /* both added the same twice */
            TEST_CUDA(cudaStreamSynchronize(j->stream));
            j->b->rank[j->rank].differ += differs;
            continue;
        }
        hash_all(j, 1, got);
        for (int a = 0; a < ARRAYS; a++) {
            j->b->rank[j->rank].where[a] += got[a] != want[a];
            differs = differs || got[a] != want[a];
        }
        j->b->rank[j->rank].differ += differs;
        if (status == EPO_OK)
            status = j->engine->group_async_error(j->group);
    }
    return status;
}

/* The replay that goes wrong, and what is told of it. */
static epo_status run_fault(job *j) {
    inputs_send(j, 1, true);
    if (j->s.fault != FAULT_LATE || j->rank == 0)
        TEST_CUDA(cudaGraphLaunch(j->exec, j->stream));
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    epo_status status = EPO_OK;
    for (int i = 0; i < 5000 && status == EPO_OK; i++) { /* 5 s */
        status = j->engine->group_async_error(j->group);
        usleep(1000);
    }
    const uint64_t n = rows_bytes(j) / test_size(j->s.c.type);
    char *host = malloc(rows_bytes(j) + 1);
    uint64_t nan = 0;
    TEST_CUDA(cudaMemcpy(host, j->y, rows_bytes(j), cudaMemcpyDeviceToHost));
    for (uint64_t i = 0; i < n; i++)
        nan += isnan(test_load(host, i, j->s.c.type)) ? 1 : 0;
    free(host);
    j->b->rank[j->rank].nan = n > 0 ? (float)nan / (float)n : 1;
    return status;
}

static void run_timed(job *j) {
    enum { ROUNDS = 9, CALLS = 8 };
    double cpu[2][ROUNDS], all[2][ROUNDS];
    inputs_send(j, 0, false);
    for (int i = 0; i < 2 * ROUNDS; i++) {
        const int way = i % 2;
        epo_plan *plan[CALLS] = {NULL};
        if (j->world != NULL)
            (void)j->engine->group_barrier(j->group);
        TEST_CUDA(cudaStreamSynchronize(j->stream));
        const double start = now();
        for (int k = 0; k < CALLS; k++)
            if (way == 0)
                (void)calls(j, j->plain, j->layer[0], &plan[k]);
            else
                TEST_CUDA(cudaGraphLaunch(j->exec, j->stream));
        cpu[way][i / 2] = (now() - start) * 1e6 / CALLS;
        TEST_CUDA(cudaStreamSynchronize(j->stream));
        all[way][i / 2] = (now() - start) * 1e3 / CALLS;
        for (int k = 0; k < CALLS; k++)
            j->engine->plan_release(plan[k]);
    }
    for (int way = 0; way < 2; way++) {
        qsort(cpu[way], ROUNDS, sizeof(double), by_size);
        qsort(all[way], ROUNDS, sizeof(double), by_size);
    }
    j->b->rank[j->rank].eager_us = cpu[0][ROUNDS / 2];
    j->b->rank[j->rank].launch_us = cpu[1][ROUNDS / 2];
    j->b->rank[j->rank].eager_ms = all[0][ROUNDS / 2];
    j->b->rank[j->rank].replay_ms = all[1][ROUNDS / 2];
}

static void *rank_main(void *ctx) {
    job *j = ctx;
    epo_stats stats = {.size = sizeof stats};
    TEST_CUDA(cudaSetDevice(j->rank % j->devices));
    TEST_CUDA(cudaStreamCreateWithFlags(&j->stream, cudaStreamNonBlocking));
    memory_open(j);
    epo_status status = objects_open(j);
    if (status == EPO_OK)
        status = capture(j);
    clear_gradients(j);
    if (status == EPO_OK)
        status = compare(j);
    if (status == EPO_OK && j->s.timed)
        run_timed(j);
    if (status == EPO_OK)
        (void)j->engine->group_stats(j->group, &stats, 0);
    j->b->rank[j->rank].dropped[0] = stats.dropped_slots;
    if (status == EPO_OK && j->s.fault != FAULT_NONE)
        status = run_fault(j);
    j->b->rank[j->rank].status = (int)status;
    if (status != EPO_OK)
        snprintf(j->b->rank[j->rank].text, sizeof j->b->rank[j->rank].text, "%s",
                 j->engine->error());
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    all_close(j);
    return NULL;
}

/* ---- all ranks of one case ---- */

static bool run_threads(job *j) {
    pthread_t thread[RANKS];
    job each[RANKS];
    if (j->engine->world_create(j->s.c.ranks, &j->world) != EPO_OK)
        return false;
    for (int r = 0; r < j->s.c.ranks; r++) {
        each[r] = *j;
        each[r].rank = r;
        pthread_create(&thread[r], NULL, rank_main, &each[r]);
    }
    for (int r = 0; r < j->s.c.ranks; r++)
        pthread_join(thread[r], NULL);
    j->engine->world_destroy(j->world);
    j->world = NULL;
    return true;
}

static bool run_processes(const job *j) {
    pid_t pid[RANKS];
    bool ok = true;
    for (int r = 0; r < j->s.c.ranks; r++)
        if ((pid[r] = fork()) == 0) {
            job mine = *j;
            mine.rank = r;
            rank_main(&mine);
            _exit(0);
        }
    for (int r = 0; r < j->s.c.ranks; r++) {
        int status = 0;
        ok = pid[r] > 0 && waitpid(pid[r], &status, 0) >= 0 && status == 0 && ok;
    }
    return ok;
}

/* Every rank fails, the first with the fault's own error, and its y is NaN. */
static bool judge_fault(const job *j, char *text, size_t size) {
    static const int want[] = {0, EPO_E_INDEX, EPO_E_OVERFLOW, EPO_E_TIMEOUT};
    static const char *const words[] = {"", "allowed -1..", "its capacity is",
                                        "nothing from rank 1"};
    bool ok = true;
    snprintf(text, size, "%s", j->b->rank[0].text);
    ok = j->b->rank[0].status == want[j->s.fault] &&
         strstr(j->b->rank[0].text, words[j->s.fault]) != NULL && j->b->rank[0].nan == 1;
    for (int r = 1; r < j->s.c.ranks; r++)
        ok = ok && j->b->rank[r].status != EPO_OK;
    return ok;
}

static bool judge_bits(const job *j, char *text, size_t size) {
    bool ok = true;
    size_t used = (size_t)snprintf(text, size, "%d replays", j->s.replays);
    for (int r = 0; r < j->s.c.ranks; r++) {
        if (j->b->rank[r].status != EPO_OK) {
            snprintf(text, size, "%s", j->b->rank[r].text);
            return false;
        }
        const int *w = j->b->rank[r].where;
        if (j->b->rank[r].differ > 0 && used < size)
            used += (size_t)snprintf(
                text + used, size - used,
                "; rank %d: %d differ in bits (y %d dx %d dweights %d dw1 %d dw2 %d)", r,
                j->b->rank[r].differ, w[0], w[1], w[2], w[3], w[4]);
        ok = ok && j->b->rank[r].differ == 0;
    }
    if (used < size && j->s.timed)
        used +=
            (size_t)snprintf(text + used, size - used,
                             "; CPU %.1f us a replay, %.0f without graph; %.3f ms, %.3f without",
                             j->b->rank[0].launch_us, j->b->rank[0].eager_us,
                             j->b->rank[0].replay_ms, j->b->rank[0].eager_ms);
    if (used < size)
        snprintf(text + used, size - used, ", %llu slots dropped",
                 (unsigned long long)j->b->rank[0].dropped[0]);
    return ok;
}

static void run_case(job *j, bool threads, const char *what) {
    char name[224], text[640] = "";
    const ref_case *c = &j->s.c;
    memset(j->b, 0, sizeof *j->b);
    for (int r = 0; r < c->ranks; r++) /* a rank that ends early must not look well */
        j->b->rank[r].status = EPO_E_SYSTEM;
    const bool ran = threads ? run_threads(j) : run_processes(j);
    const bool ok = (j->s.fault != FAULT_NONE ? judge_fault(j, text, sizeof text)
                                              : judge_bits(j, text, sizeof text)) &&
                    ran;
    snprintf(name, sizeof name, "graph %s %s x%d %s %s, %d chunks, T%d E%d H%d F%d K%d capacity %d",
             what, threads ? "threads" : "processes", c->ranks, test_type(c->type),
             j->s.overlap == EPO_ON ? "overlapped" : "serial", j->s.chunks, c->tokens, c->experts,
             c->hidden, c->ffn, c->top_k, c->capacity);
    test_result(name, ok, text);
}

static setup some_setup(int ranks, int i, int replays) {
    static const epo_dtype types[] = {EPO_BF16, EPO_F32, EPO_F16};
    setup s = {.overlap = i % 2 ? EPO_ON : EPO_OFF, .chunks = i % 2 ? 1 + i / 2 : 1};
    s.c = (ref_case){.seed = 0x77 + (uint64_t)i,
                     .ranks = ranks,
                     .experts = 8 * ranks,
                     .hidden = 64 + 16 * (i % 3),
                     .ffn = 48,
                     .top_k = 3,
                     .tokens = 90,
                     .type = types[i % 3],
                     .wgrad_type = EPO_F32,
                     .routing = i % 4 == 3   ? REF_HOLES
                                : i % 4 == 2 ? REF_UNEVEN
                                             : REF_RANDOM,
                     .microbatches = 1};
    s.c.capacity = i % 4 == 0 ? 90 : 12;
    s.c.overflow = i % 4 == 0   ? EPO_OVERFLOW_ERROR
                   : i % 4 == 1 ? EPO_OVERFLOW_DROP_POSITION
                                : EPO_OVERFLOW_DROP_WEIGHT;
    s.replays = replays;
    return s;
}

static void run_bits(job *j, bool threads, int ranks, int replays) {
    for (int i = 0; i < 8; i++) {
        j->s = some_setup(ranks, i, i < 4 ? replays : replays / 4 + 1);
        run_case(j, threads, "bits");
    }
}

static void run_errors(job *j, bool threads, int ranks) {
    static const char *const names[] = {"", "bad index", "overflow", "late peer"};
    for (int f = FAULT_INDEX; f <= FAULT_LATE; f++) {
        j->s = some_setup(ranks, f == FAULT_OVERFLOW ? 0 : f, 2);
        if (f == FAULT_OVERFLOW)
            j->s.c.capacity = 60;
        j->s.fault = (fault)f;
        if (f == FAULT_LATE && ranks < 2)
            continue;
        run_case(j, threads, names[f]);
    }
}

/* Workload Q, and few tokens, with room for 1.5 times the average. */
static void run_times(job *j, bool threads, int ranks) {
    static const int tokens[] = {64, 512, 4096};
    for (int i = 0; i < 6; i++) {
        const int t = tokens[i / 2];
        j->s = some_setup(ranks, i % 2, 2);
        j->s.c.tokens = t;
        j->s.c.routing = REF_RANDOM;
        j->s.c.type = j->s.c.wgrad_type = EPO_BF16;
        j->s.c.experts = 128;
        j->s.c.hidden = 2048;
        j->s.c.ffn = 768;
        j->s.c.top_k = 8;
        j->s.c.capacity = t * 8 * 3 / 2 / 128;
        j->s.c.overflow = EPO_OVERFLOW_DROP_POSITION;
        j->s.chunks = i % 2 && t > 1000 ? 4 : 1;
        j->s.timed = true;
        run_case(j, threads, "time");
    }
}

static int devices_count(bool threads) {
    int n = 0, pipes[2]; /* processes: asked of a child, so that this one has not touched CUDA */
    if (threads) {
        TEST_CUDA(cudaGetDeviceCount(&n));
        return n;
    }
    if (pipe(pipes) != 0)
        return 0;
    if (fork() == 0) {
        (void)cudaGetDeviceCount(&n);
        _exit(write(pipes[1], &n, sizeof n) == (ssize_t)sizeof n ? 0 : 1);
    }
    if (read(pipes[0], &n, sizeof n) != (ssize_t)sizeof n)
        n = 0;
    wait(NULL);
    return n;
}

static bool asked(int argc, char **argv, const char *name) {
    bool any = argc < 5;
    for (int i = 4; i < argc; i++)
        any = any || strcmp(argv[i], name) == 0;
    return any;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: graph threads|processes RANKS [REPLAYS [NAME...]]\n");
        return 2;
    }
    const bool threads = strcmp(argv[1], "threads") == 0;
    const int ranks = (int)strtol(argv[2], NULL, 10);
    const int replays = argc > 3 ? (int)strtol(argv[3], NULL, 10) : 100;
    job j = {.engine = epo_engine_entry(EPO_ENGINE_ABI), .devices = devices_count(threads)};
    if (j.devices == 0 || ranks < 1 || ranks > RANKS || replays < 1) {
        fprintf(stderr, "graph: %d GPUs, %d ranks (1..%d), %d replays\n", j.devices, ranks, RANKS,
                replays);
        return 2;
    }
    if (threads && ranks > j.devices) {
        test_skip("graph threads", "threads that share a GPU are refused: needs a GPU for each");
        return 0;
    }
    j.b = mmap(NULL, sizeof *j.b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (j.b == MAP_FAILED)
        return 2;
    if (asked(argc, argv, "bits"))
        run_bits(&j, threads, ranks, replays);
    if (asked(argc, argv, "errors"))
        run_errors(&j, threads, ranks);
    if (asked(argc, argv, "time"))
        run_times(&j, threads, ranks);
    return test_failed;
}
