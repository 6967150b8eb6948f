/* SPDX-License-Identifier: Apache-2.0
 *
 * bulk.c - very many random small layers against the fp64 reference, ranks as threads.
 * What costs time is kept: a group serves a block of layers, a buffer ten of them, device
 * memory all; while the GPUs work, each rank's thread makes the reference.
 *
 *   bulk LAYERS [SEED [RANKS [SECONDS [PROCESSES [GROUPS]]]]]
 *
 * RANKS 0: 1, 2 and 4 in turns.  Block b of BLOCK layers follows from SEED + b alone, and is
 * run again by itself with `bulk BLOCK (SEED + b) RANKS`.  Blocks are shared out to as many
 * GROUPS in each process; no buffer begins after SECONDS.
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

enum {
    BLOCK = 100,
    PER_BUFFER = 10,
    MAX_RANKS = 4,
    MAX_GROUPS = 32,
    MAX_LOCAL = 5,
    MAX_HIDDEN = 96,
    MAX_FFN = 64,
    MAX_TOKENS = 40,
    MAX_TOP_K = 6,
    MAX_ROWS = MAX_TOKENS * MAX_HIDDEN,
    MAX_SLOTS = MAX_TOKENS * MAX_TOP_K,
    MAX_WEIGHTS = MAX_LOCAL * MAX_HIDDEN * MAX_FFN
};

typedef struct board {
    _Atomic int layers, failed, blocks, broken;
    _Atomic int by_ranks[MAX_RANKS + 1];
    double until;
    _Atomic int64_t ns_group, ns_buffer, ns_layer, ns_reference, ns_wait; /* of all ranks */
} board;

typedef struct block {
    const epo_engine *engine;
    board *b;
    uint64_t seed;
    int ranks, devices, layers;
    epo_world *world;
    epo_switch overlap, delay;
    epo_dispatcher dispatcher;
    int chunks;
    int done;                           /* layers; rank 0's */
    _Atomic int go[BLOCK / PER_BUFFER]; /* 1: yes, 2: it is late; whoever comes first says */
} block;

typedef struct rank_state {
    block *k;
    int rank;
    cudaStream_t stream;
    epo_group *group;
    epo_buffer *buffer;
    char *stage;                  /* pinned; inputs */
    char *w1, *w2, *dw1, *dw2;    /* device */
    char *x, *dy, *y, *dx, *back; /* back: pinned; results */
    float *weights, *dweights;
    int64_t *experts;
} rank_state;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static void spent(_Atomic int64_t *sum, double since) {
    atomic_fetch_add(sum, (int64_t)(1e9 * (now() - since)));
}

/* ---- what follows from the seed ---- */

/* The buffer's part of layer i. */
static ref_case buffer_case(const block *k, int i) {
    static const epo_dtype types[] = {EPO_F32, EPO_BF16, EPO_F16};
    const uint64_t r = test_random(k->seed, 1000 + (uint64_t)(i / PER_BUFFER));
    ref_case c = {.ranks = k->ranks, .microbatches = 1, .capacity = -1};
    c.type = types[r % 3];
    /* Two at least: some routings name two. */
    c.experts = k->ranks * (1 + (int)((r >> 8) % MAX_LOCAL));
    c.experts += c.experts == 1;
    c.hidden = (r >> 16) % 4 == 3 ? 20 + (int)((r >> 20) % 30) : 16 * (1 + (int)((r >> 20) % 6));
    c.top_k = 1 + (int)((r >> 32) % (uint64_t)(c.experts < MAX_TOP_K ? c.experts : MAX_TOP_K));
    c.tokens = 1 + (int)((r >> 40) % MAX_TOKENS);
    if ((r >> 50) % 3 == 0) {
        c.capacity = (int)((r >> 52) % (uint64_t)(2 * c.tokens * c.top_k / c.experts + 2));
        c.overflow = (r >> 60) % 2 ? EPO_OVERFLOW_DROP_WEIGHT : EPO_OVERFLOW_DROP_POSITION;
        c.pad = (r >> 61) % 2 != 0;
    }
    return c;
}

static ref_case layer_case(const block *k, int i) {
    ref_case c = buffer_case(k, i);
    const uint64_t r = test_random(k->seed, 5000 + (uint64_t)i);
    c.seed = r;
    c.ffn = r % 4 == 3 ? 10 + (int)((r >> 4) % 30) : 16 * (1 + (int)((r >> 4) % 4));
    c.wgrad_type = (r >> 12) % 2 ? c.type : EPO_F32;
    c.routing = (ref_routing)((r >> 16) % REF_ROUTINGS);
    c.tokens = 1 + (int)((r >> 20) % (uint64_t)c.tokens);
    c.top_k = 1 + (int)((r >> 32) % (uint64_t)c.top_k);
    return c;
}

/* ---- one rank ---- */

static void memory_open(rank_state *s) {
    s->w1 = test_device((uint64_t)2 * MAX_WEIGHTS * 4, 0);
    s->w2 = test_device((uint64_t)MAX_WEIGHTS * 4, 0);
    s->dw1 = test_device((uint64_t)2 * MAX_WEIGHTS * 4, 0);
    s->dw2 = test_device((uint64_t)MAX_WEIGHTS * 4, 0);
    s->x = test_device((uint64_t)MAX_ROWS * 4, 0xff);
    s->dy = test_device((uint64_t)MAX_ROWS * 4, 0xff);
    s->y = test_device((uint64_t)MAX_ROWS * 4, 0xff);
    s->dx = test_device((uint64_t)MAX_ROWS * 4, 0xff);
    s->weights = test_device((uint64_t)MAX_SLOTS * 4, 0xff);
    s->dweights = test_device((uint64_t)MAX_SLOTS * 4, 0xff);
    s->experts = test_device((uint64_t)MAX_SLOTS * 8, 0xff);
    const uint64_t bytes = (uint64_t)3 * MAX_WEIGHTS * 4 + 2 * MAX_ROWS * 4 + MAX_SLOTS * 12 + 64;
    TEST_CUDA(cudaHostAlloc((void **)&s->stage, bytes, 0));
    TEST_CUDA(cudaHostAlloc((void **)&s->back, bytes, 0));
}

static void memory_close(rank_state *s) {
    void *all[] = {s->w1, s->w2, s->dw1,     s->dw2,      s->x,      s->dy,
                   s->y,  s->dx, s->weights, s->dweights, s->experts};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        cudaFree(all[i]);
    cudaFreeHost(s->stage);
    cudaFreeHost(s->back);
    cudaStreamDestroy(s->stream);
}

static void send(rank_state *s, void *device, const char *host, uint64_t bytes) {
    TEST_CUDA(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, s->stream));
}

/* Weights and rows by the stream's order; outputs poisoned. */
static void inputs_send(rank_state *s, const ref_case *c) {
    const uint64_t local = (uint64_t)(c->experts / c->ranks), n = (uint64_t)(c->ffn * c->hidden);
    const uint64_t size = test_size(c->type), wsize = test_size(c->wgrad_type);
    const int tokens = ref_tokens(c, s->rank);
    const uint64_t rows = (uint64_t)tokens * (uint64_t)c->hidden,
                   slots = (uint64_t)(tokens * c->top_k);
    char *w1 = s->stage, *w2 = w1 + 2 * local * n * 4, *x = w2 + local * n * 4, *dy = x + rows * 4;
    int64_t *e = (int64_t *)(void *)(dy + (rows * 4 + 7) / 8 * 8);
    float *w = (float *)(void *)(e + slots);
    for (uint64_t i = 0; i < local; i++) {
        for (uint64_t k = 0; k < 2 * n; k++)
            test_store(w1, i * 2 * n + k, c->type, ref_w1(c, s->rank * (int)local + (int)i, k));
        for (uint64_t k = 0; k < n; k++)
            test_store(w2, i * n + k, c->type, ref_w2(c, s->rank * (int)local + (int)i, k));
    }
    for (int t = 0; t < tokens; t++) {
        for (int h = 0; h < c->hidden; h++) {
            test_store(x, (uint64_t)(t * c->hidden + h), c->type, ref_row(c, 0, s->rank, 0, t, h));
            test_store(dy, (uint64_t)(t * c->hidden + h), c->type, ref_row(c, 1, s->rank, 0, t, h));
        }
        for (int k = 0; k < c->top_k; k++) {
            e[t * c->top_k + k] = ref_expert(c, s->rank, 0, t, k);
            w[t * c->top_k + k] = ref_weight(c, s->rank, 0, t, k);
        }
    }
    send(s, s->w1, w1, 2 * local * n * size);
    send(s, s->w2, w2, local * n * size);
    send(s, s->x, x, rows * size);
    send(s, s->dy, dy, rows * size);
    send(s, s->experts, (char *)e, slots * 8);
    send(s, s->weights, (char *)w, slots * 4);
    TEST_CUDA(cudaMemsetAsync(s->y, 0xff, rows * size, s->stream));
    TEST_CUDA(cudaMemsetAsync(s->dx, 0xff, rows * size, s->stream));
    TEST_CUDA(cudaMemsetAsync(s->dweights, 0xff, slots * 4, s->stream));
    TEST_CUDA(cudaMemsetAsync(s->dw1, 0, 2 * local * n * wsize, s->stream));
    TEST_CUDA(cudaMemsetAsync(s->dw2, 0, local * n * wsize, s->stream));
}

static epo_status group_open(rank_state *s) {
    const block *k = s->k;
    epo_engine_group eg = {sizeof eg, EPO_GROUP_CONFIG_INIT, "test"};
    eg.config.engine = EPO_ENGINE_CUDA;
    eg.config.rank = s->rank;
    eg.config.ranks = k->ranks;
    eg.config.threads = k->world;
    eg.config.overlap = k->overlap;
    eg.config.delay_wgrad = k->delay;
    eg.config.dispatcher = k->dispatcher;
    eg.config.chunks = k->chunks;
    eg.config.timeout_s = 10;
    eg.config.warn_s = 5;
    return k->engine->group_create(&eg, &s->group);
}

static epo_status buffer_open(rank_state *s, int i) {
    const ref_case c = buffer_case(s->k, i);
    epo_buffer_config bc = EPO_BUFFER_CONFIG_INIT;
    bc.experts = c.experts;
    bc.hidden = c.hidden;
    bc.top_k = c.top_k;
    bc.max_tokens = c.tokens;
    bc.type = c.type;
    bc.capacity = c.capacity;
    bc.overflow = c.overflow;
    bc.pad_to_capacity = c.pad;
    epo_buffer *before = s->buffer;
    s->buffer = NULL;
    epo_status status = s->k->engine->buffer_destroy(before);
    return status == EPO_OK ? s->k->engine->buffer_create(s->group, &bc, &s->buffer) : status;
}

/* Everything of one layer is enqueued when this returns. */
static epo_status layer_issue(rank_state *s, const ref_case *c, epo_layer **layer) {
    const epo_engine *e = s->k->engine;
    epo_layer_config lc = EPO_LAYER_CONFIG_INIT;
    epo_routing r = EPO_ROUTING_INIT;
    epo_plan *plan = NULL;
    epo_saved *saved = NULL;
    lc.experts = c->experts;
    lc.hidden = c->hidden;
    lc.ffn = c->ffn;
    lc.type = c->type;
    lc.wgrad_type = c->wgrad_type;
    lc.w1 = s->w1;
    lc.w2 = s->w2;
    lc.dw1 = s->dw1;
    lc.dw2 = s->dw2;
    r.tokens = ref_tokens(c, s->rank);
    r.top_k = c->top_k;
    r.experts = s->experts;
    r.weights = s->weights;
    epo_status status = e->layer_create(s->group, &lc, layer);
    if (status == EPO_OK)
        status = e->plan_create(s->buffer, &r, s->stream, &plan);
    if (status == EPO_OK)
        status = e->forward(*layer, plan, s->x, s->y, &saved, s->stream);
    if (status == EPO_OK)
        status = e->backward(*layer, saved, s->dy, s->dx, s->dweights, s->stream);
    if (status == EPO_OK)
        status = e->group_wgrad_flush(s->group, s->stream);
    e->plan_release(plan);
    return status;
}

/* ||got - want|| over ||want||, or over what that would be if nothing cancelled: of the few
 * numbers of a small layer (router weights that add up to nearly 0) all may. */
static double error_of(const void *got, const double *want, uint64_t n, epo_dtype type,
                       double square) {
    double d = 0, w = 0;
    for (uint64_t i = 0; i < n; i++) {
        const double e = test_load(got, i, type) - want[i];
        d += e * e;
        w += want[i] * want[i];
    }
    w = w > square ? w : square;
    return n == 0 ? 0 : w > 0 ? sqrt(d / w) : sqrt(d);
}

/* The largest of the errors over their limits; text names what is beyond. */
static double judge(rank_state *s, const ref_case *c, const ref_result *want, char *text,
                    size_t size) {
    const uint64_t tokens = (uint64_t)ref_tokens(c, s->rank), n = (uint64_t)(c->ffn * c->hidden);
    const uint64_t local = (uint64_t)(c->experts / c->ranks), rows = tokens * (uint64_t)c->hidden;
    const struct {
        const char *name;
        const void *device;
        uint64_t count;
        epo_dtype type;
        const double *want;
        epo_dtype limit;
    } out[5] = {
        {"y", s->y, rows, c->type, want->y, c->type},
        {"dx", s->dx, rows, c->type, want->dx, c->type},
        {"dweights", s->dweights, tokens * (uint64_t)c->top_k, EPO_F32, want->dweights, c->type},
        {"dw1", s->dw1, 2 * n * local, c->wgrad_type, want->dw1, c->type},
        {"dw2", s->dw2, n * local, c->wgrad_type, want->dw2, c->type},
    };
    uint64_t at = 0;
    double worst = 0;
    size_t used = 0;
    for (int i = 0; i < 5; i++) {
        TEST_CUDA(cudaMemcpyAsync(s->back + at, out[i].device,
                                  out[i].count * test_size(out[i].type), cudaMemcpyDeviceToHost,
                                  s->stream));
        at += (out[i].count * 4 + 7) / 8 * 8;
    }
    const double start = now();
    TEST_CUDA(cudaStreamSynchronize(s->stream));
    spent(&s->k->b->ns_wait, start);
    at = 0;
    for (int i = 0; i < 5; i++) {
        /* The mean of n errors scatters by 1 / sqrt(n): a few numbers may all be far off. */
        const double limit = test_limit(out[i].limit) * (1 + 1 / sqrt((double)out[i].count + 1e-9));
        const double e =
            error_of(s->back + at, out[i].want, out[i].count, out[i].type, want->square[i]) / limit;
        at += (out[i].count * 4 + 7) / 8 * 8;
        worst = !(e <= worst) ? e : worst;
        if (!(e < 1) && used < size)
            used += (size_t)snprintf(text + used, size - used, " %s %.2e", out[i].name, e * limit);
    }
    return worst;
}

static epo_status layer_run(rank_state *s, int i) {
    const block *k = s->k;
    const ref_case c = layer_case(k, i);
    epo_layer *layer = NULL;
    char text[256] = "";
    double start = now();
    inputs_send(s, &c);
    epo_status status = layer_issue(s, &c, &layer);
    spent(&k->b->ns_layer, start);
    if (status == EPO_OK) {
        start = now();
        ref_result want = ref_make(&c, s->rank);
        spent(&k->b->ns_reference, start);
        const double worst = judge(s, &c, &want, text, sizeof text);
        status = k->engine->group_async_error(s->group);
        if (!(worst < 1)) {
            atomic_fetch_add(&k->b->failed, 1);
            printf("case\tbulk seed 0x%llx ranks %d layer %d rank %d\tFAIL\t%s %s E%d H%d F%d K%d "
                   "T%d capacity %d:%s\n",
                   (unsigned long long)k->seed, k->ranks, i, s->rank, test_type(c.type),
                   ref_routing_name[c.routing], c.experts, c.hidden, c.ffn, c.top_k, c.tokens,
                   c.capacity, text);
            fflush(stdout);
        }
        ref_free(&want);
    }
    if (status != EPO_OK)
        snprintf(text, sizeof text, "%s", k->engine->error());
    (void)k->engine->layer_destroy(layer);
    if (status != EPO_OK) {
        atomic_fetch_add(&k->b->broken, 1);
        printf("case\tbulk seed 0x%llx ranks %d layer %d rank %d\tFAIL\t%s\n",
               (unsigned long long)k->seed, k->ranks, i, s->rank, text);
        fflush(stdout);
    } else if (s->rank == 0) {
        s->k->done++;
        atomic_fetch_add(&k->b->layers, 1);
        atomic_fetch_add(&k->b->by_ranks[k->ranks], 1);
    }
    return status;
}

/* The same answer for all ranks. */
static bool goes_on(block *k, int i) {
    int none = 0;
    atomic_compare_exchange_strong(&k->go[i / PER_BUFFER], &none, now() < k->b->until ? 1 : 2);
    return atomic_load(&k->go[i / PER_BUFFER]) == 1;
}

static void *rank_main(void *ctx) {
    rank_state *s = ctx;
    block *k = s->k;
    TEST_CUDA(cudaSetDevice(s->rank % k->devices));
    TEST_CUDA(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking));
    memory_open(s);
    double start = now();
    epo_status status = group_open(s);
    spent(&k->b->ns_group, start);
    if (status != EPO_OK) {
        printf("case\tbulk seed 0x%llx\tFAIL\t%s\n", (unsigned long long)k->seed,
               k->engine->error());
        atomic_fetch_add(&k->b->broken, 1);
    }
    for (int i = 0; i < k->layers && status == EPO_OK; i++) {
        if (i % PER_BUFFER == 0 && !goes_on(k, i))
            break;
        if (i % PER_BUFFER == 0) {
            start = now();
            status = buffer_open(s, i);
            spent(&k->b->ns_buffer, start);
            if (status != EPO_OK) {
                printf("case\tbulk seed 0x%llx layer %d rank %d\tFAIL\t%s\n",
                       (unsigned long long)k->seed, i, s->rank, k->engine->error());
                atomic_fetch_add(&k->b->broken, 1);
            }
        }
        if (status == EPO_OK)
            status = layer_run(s, i);
    }
    start = now();
    (void)k->engine->buffer_destroy(s->buffer);
    (void)k->engine->group_destroy(s->group);
    spent(&k->b->ns_group, start);
    memory_close(s);
    return NULL;
}

/* ---- blocks and workers ---- */

static void block_run(const epo_engine *engine, board *b, uint64_t seed, int ranks, int devices,
                      int layers) {
    const uint64_t r = test_random(seed, 0);
    block k = {.engine = engine,
               .b = b,
               .seed = seed,
               .ranks = ranks,
               .devices = devices,
               .layers = layers};
    const double start = now();
    pthread_t thread[MAX_RANKS];
    rank_state state[MAX_RANKS];
    if (ranks == 0)
        k.ranks = r % 4 == 0 ? 1 : r % 4 == 1 ? 4 : 2;
    k.overlap = (r >> 8) % 4 ? EPO_ON : EPO_OFF;
    k.delay = (r >> 8) % 4 == 3 ? EPO_ON : EPO_OFF;
    k.dispatcher = (r >> 16) % 2 ? EPO_DISPATCH_FLEX : EPO_DISPATCH_ALLTOALL;
    k.chunks = k.overlap == EPO_ON ? 1 << (r >> 24) % 4 : 1;
    if (engine->world_create(k.ranks, &k.world) != EPO_OK)
        return;
    for (int i = 0; i < k.ranks; i++) {
        state[i] = (rank_state){.k = &k, .rank = i};
        pthread_create(&thread[i], NULL, rank_main, &state[i]);
    }
    for (int i = 0; i < k.ranks; i++)
        pthread_join(thread[i], NULL);
    engine->world_destroy(k.world);
    printf("# block 0x%llx, %d ranks, %s %s%s, %d chunks: %d layers in %.2f s\n",
           (unsigned long long)seed, k.ranks,
           k.dispatcher == EPO_DISPATCH_FLEX ? "flex" : "alltoall",
           k.overlap == EPO_ON ? "overlapped" : "serial", k.delay == EPO_ON ? ", delayed" : "",
           k.chunks, k.done, now() - start);
    fflush(stdout);
}

typedef struct worker {
    board *b;
    uint64_t seed;
    int ranks, layers;
} worker;

static void *worker_main(void *ctx) {
    const worker *w = ctx;
    const epo_engine *engine = epo_engine_entry(EPO_ENGINE_ABI);
    int devices = 0;
    TEST_CUDA(cudaGetDeviceCount(&devices));
    for (;;) {
        const int mine = atomic_fetch_add(&w->b->blocks, 1);
        const int left = w->layers - mine * BLOCK;
        if (left <= 0 || now() > w->b->until)
            return NULL;
        block_run(engine, w->b, w->seed + (uint64_t)mine, w->ranks, devices,
                  left < BLOCK ? left : BLOCK);
    }
}

static int process_main(worker *w, int groups) {
    pthread_t thread[MAX_GROUPS];
    for (int i = 0; i < groups; i++)
        pthread_create(&thread[i], NULL, worker_main, w);
    for (int i = 0; i < groups; i++)
        pthread_join(thread[i], NULL);
    return 0;
}

static double each(int64_t ns, int layers) { return layers > 0 ? 1e-6 * (double)ns / layers : 0; }

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: bulk LAYERS [SEED [RANKS [SECONDS [PROCESSES [GROUPS]]]]]\n");
        return 2;
    }
    const int layers = (int)strtol(argv[1], NULL, 10);
    const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : (uint64_t)time(NULL) << 20;
    const int ranks = argc > 3 ? (int)strtol(argv[3], NULL, 10) : 0;
    const double limit = argc > 4 ? strtod(argv[4], NULL) : 1e9, start = now();
    const int workers = argc > 5 ? (int)strtol(argv[5], NULL, 10) : 1;
    const int groups = argc > 6 ? (int)strtol(argv[6], NULL, 10) : 3;
    if (layers < 1 || ranks < 0 || ranks > MAX_RANKS || workers < 1 || workers > 64 || groups < 1 ||
        groups > MAX_GROUPS) {
        fprintf(stderr,
                "bulk: %d layers, %d ranks (0..%d), %d processes (1..64), %d groups (1..%d)\n",
                layers, ranks, MAX_RANKS, workers, groups, MAX_GROUPS);
        return 2;
    }
    board *b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b == MAP_FAILED)
        return 2;
    printf("# seed 0x%llx\n", (unsigned long long)seed);
    fflush(stdout);
    bool ended = true;
    b->until = start + limit;
    for (int i = 0; i < workers; i++)
        if (fork() == 0) {
            if (i % 2) /* all rows by copy engines */
                setenv("EP_OVERLAP_CUDA_SMALL", "0", 1);
            worker w = {b, seed, ranks, layers};
            _exit(process_main(&w, groups));
        }
    for (int i = 0, status = 0; i < workers; i++, status = 0)
        ended = wait(&status) > 0 && status == 0 && ended;
    const int done = atomic_load(&b->layers), failed = atomic_load(&b->failed);
    const int broken = atomic_load(&b->broken);
    char name[64], text[400];
    snprintf(name, sizeof name, "bulk, %d random layers", done);
    snprintf(
        text, sizeof text,
        "%d of %d layers in %.1f s (1 rank %d, 2 ranks %d, 4 ranks %d); %d wrong, %d broken; ms "
        "of all ranks a layer: group %.2f, buffer %.2f, calls %.2f, reference %.2f, wait %.2f",
        done, layers, now() - start, atomic_load(&b->by_ranks[1]), atomic_load(&b->by_ranks[2]),
        atomic_load(&b->by_ranks[4]), failed, broken, each(atomic_load(&b->ns_group), done),
        each(atomic_load(&b->ns_buffer), done), each(atomic_load(&b->ns_layer), done),
        each(atomic_load(&b->ns_reference), done), each(atomic_load(&b->ns_wait), done));
    test_result(name, ended && done > 0 && failed == 0 && broken == 0, text);
    return test_failed;
}
