/* SPDX-License-Identifier: Apache-2.0
 *
 * bulk.c - very many random small layers against the fp64 reference, ranks as threads.
 * What costs time is kept: a group serves a block of layers, a buffer ten of them, a rank's arrays
 * all; while the GPUs work, each rank's thread makes the reference.
 *
 *   bulk LAYERS [SEED [RANKS [SECONDS [PROCESSES [GROUPS [edges]]]]]]
 *
 * RANKS 0: 1, 2 and 4 in turns.  Block b of BLOCK layers follows from SEED + b alone, and is
 * run again by itself with `bulk BLOCK (SEED + b) RANKS`.  Blocks are shared out to as many
 * GROUPS in each process (1); no buffer begins after SECONDS.  Several groups in one process may
 * wait for each other until the limit: their streams share hardware queues, and who frees a window
 * waits for its GPU with the driver's lock held, which all ranks want that are threads.
 * edges: widths of 1 and others that nothing divides, 32 experts a token, capacities of 0 and 1.
 */
#include "fixture.h"

#include <sys/mman.h>

enum {
    BLOCK = 100,
    PER_BUFFER = 10,
    MAX_RANKS = 4,
    MAX_GROUPS = 32,
    MAX_LOCAL = 5,
    MAX_HIDDEN = 96,
    MAX_FFN = 64,
    MAX_TOKENS = 40,
    MAX_TOP_K = 32,
    USUAL_TOP_K = 6,
    MAX_WEIGHTS = MAX_LOCAL * MAX_HIDDEN * MAX_FFN
};
/* What every layer's arrays fit into. */
static const ref_case largest = {.ranks = 1,
                                 .experts = MAX_LOCAL,
                                 .hidden = MAX_HIDDEN,
                                 .ffn = MAX_FFN,
                                 .top_k = MAX_TOP_K,
                                 .tokens = MAX_TOKENS,
                                 .type = EPO_F32,
                                 .wgrad_type = EPO_F32};

typedef struct board {
    _Atomic int layers, failed, blocks, broken;
    _Atomic int by_ranks[MAX_RANKS + 1];
    double until;
    bool edges;
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
    char *stage; /* pinned; inputs: w1, w2, then a test_stage */
    char *back;  /* pinned; results */
    test_arrays a;
} rank_state;

static void spent(_Atomic int64_t *sum, double since) {
    atomic_fetch_add(sum, (int64_t)(1e9 * (test_now() - since)));
}

/* ---- what follows from the seed ---- */

static int one_of(const int *values, size_t bytes, uint64_t r) {
    return values[r % (bytes / sizeof *values)];
}

static void buffer_edges(ref_case *c, uint64_t r) {
    static const int hidden[] = {1, 2, 3, 4, 7, 8, 9, 12, 20, 33, 65, 95};
    static const int top_k[] = {1, 2, 8, 31, 32}, tokens[] = {1, 2, 3, 5, 17, 33};
    c->hidden = one_of(hidden, sizeof hidden, r >> 20);
    c->top_k = one_of(top_k, sizeof top_k, r >> 32);
    c->tokens = one_of(tokens, sizeof tokens, r >> 40);
    if (c->capacity >= 0)
        c->capacity = (int)((r >> 52) % 3);
}

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
    c.top_k = 1 + (int)((r >> 32) % (uint64_t)(c.experts < USUAL_TOP_K ? c.experts : USUAL_TOP_K));
    c.tokens = 1 + (int)((r >> 40) % MAX_TOKENS);
    if ((r >> 50) % 3 == 0) {
        c.capacity = (int)((r >> 52) % (uint64_t)(2 * c.tokens * c.top_k / c.experts + 2));
        c.overflow = (r >> 60) % 2 ? EPO_OVERFLOW_DROP_WEIGHT : EPO_OVERFLOW_DROP_POSITION;
        c.pad = (r >> 61) % 2 != 0;
    }
    if (k->b->edges)
        buffer_edges(&c, r);
    return c;
}

static ref_case layer_case(const block *k, int i) {
    ref_case c = buffer_case(k, i);
    const uint64_t r = test_random(k->seed, 5000 + (uint64_t)i);
    c.seed = r;
    static const int ffn[] = {1, 2, 3, 4, 5, 7, 8, 9, 12, 20, 28, 33, 60, 63};
    c.ffn = k->b->edges  ? one_of(ffn, sizeof ffn, r >> 4)
            : r % 4 == 3 ? 10 + (int)((r >> 4) % 30)
                         : 16 * (1 + (int)((r >> 4) % 4));
    c.wgrad_type = (r >> 12) % 2 ? c.type : EPO_F32;
    c.routing = (ref_routing)((r >> 16) % REF_ROUTINGS);
    c.tokens = 1 + (int)((r >> 20) % (uint64_t)c.tokens);
    c.top_k = 1 + (int)((r >> 32) % (uint64_t)c.top_k);
    return c;
}

/* ---- one rank ---- */

static void memory_open(rank_state *s) {
    const uint64_t bytes = (uint64_t)3 * MAX_WEIGHTS * 4 + test_stage_bytes(&largest);
    test_arrays_open(&s->a, &largest);
    s->a.w1 = test_device((uint64_t)2 * MAX_WEIGHTS * 4, 0);
    s->a.w2 = test_device((uint64_t)MAX_WEIGHTS * 4, 0);
    TEST_CUDA(cudaHostAlloc((void **)&s->stage, bytes, 0));
    TEST_CUDA(cudaHostAlloc((void **)&s->back, bytes, 0));
}

static void memory_close(rank_state *s) {
    test_arrays_close(&s->a);
    cudaFreeHost(s->stage);
    cudaFreeHost(s->back);
}

/* Weights and rows by the stream's order; outputs poisoned. */
/* Every third layer's gradients are written in the place of NaN; the others' are added. */
static bool fresh(const ref_case *c) { return c->seed % 3 == 0; }

static void inputs_send(rank_state *s, const ref_case *c) {
    const uint64_t n = test_weights(c), size = test_size(c->type), wsize = test_size(c->wgrad_type);
    char *w1 = s->stage, *w2 = w1 + 2 * n * 4;
    const test_stage stage = test_stage_at(c, s->rank, w2 + (n * 4 + 7) / 8 * 8);
    test_weights_fill(c, s->rank, false, w1);
    test_weights_fill(c, s->rank, true, w2);
    test_stage_fill(c, s->rank, 0, &stage);
    test_send(s->a.w1, w1, 2 * n * size, s->stream);
    test_send(s->a.w2, w2, n * size, s->stream);
    test_stage_send(c, s->rank, &stage, &s->a, s->stream);
    test_outputs_poison(c, s->rank, 0xff, &s->a, s->stream);
    const int before = fresh(c) ? 0xff : 0;
    TEST_CUDA(cudaMemsetAsync(s->a.dw1, before, 2 * n * wsize, s->stream));
    TEST_CUDA(cudaMemsetAsync(s->a.dw2, before, n * wsize, s->stream));
}

static epo_status group_open(rank_state *s) {
    const block *k = s->k;
    epo_engine_group eg = test_group(s->rank, k->ranks, 10);
    eg.config.threads = k->world;
    eg.config.overlap = k->overlap;
    eg.config.delay_wgrad = k->delay;
    eg.config.dispatcher = k->dispatcher;
    eg.config.chunks = k->chunks;
    return k->engine->group_create(&eg, &s->group);
}

static epo_status buffer_open(rank_state *s, int i) {
    const ref_case c = buffer_case(s->k, i);
    const epo_buffer_config bc = test_buffer(&c);
    epo_buffer *before = s->buffer;
    s->buffer = NULL;
    epo_status status = s->k->engine->buffer_destroy(before);
    return status == EPO_OK ? s->k->engine->buffer_create(s->group, &bc, &s->buffer) : status;
}

/* Everything of one layer is enqueued when this returns. */
static epo_status layer_issue(rank_state *s, const ref_case *c, epo_layer **layer) {
    const epo_engine *e = s->k->engine;
    const epo_layer_config lc = test_layer(c, &s->a);
    const epo_routing r = test_routing(c, s->rank, s->a.experts, s->a.weights);
    epo_plan *plan = NULL;
    epo_status status = e->layer_create(s->group, &lc, layer);
    if (status == EPO_OK && fresh(c))
        status = e->layer_wgrad_begin(*layer);
    if (status == EPO_OK)
        status = test_pass(e, s->buffer, *layer, &r, &s->a, s->stream, &plan);
    if (status == EPO_OK)
        status = e->group_wgrad_flush(s->group, s->stream);
    e->plan_release(plan);
    return status;
}

/* The largest of the errors over their limits; text names what is beyond. */
static double judge(rank_state *s, const ref_case *c, const ref_result *want, char *text,
                    size_t size) {
    test_output out[TEST_OUTPUTS];
    test_outputs(c, s->rank, &s->a, want, out);
    uint64_t at = 0;
    double worst = 0;
    size_t used = 0;
    for (int i = 0; i < TEST_OUTPUTS; i++) {
        TEST_CUDA(cudaMemcpyAsync(s->back + at, out[i].device,
                                  out[i].count * test_size(out[i].type), cudaMemcpyDeviceToHost,
                                  s->stream));
        at += (out[i].count * 4 + 7) / 8 * 8;
    }
    const double start = test_now();
    TEST_CUDA(cudaStreamSynchronize(s->stream));
    spent(&s->k->b->ns_wait, start);
    at = 0;
    for (int i = 0; i < TEST_OUTPUTS; i++) {
        /* The mean of n errors scatters by 1 / sqrt(n): a few numbers may all be far off. */
        const double limit = test_limit(c->type) * (1 + 1 / sqrt((double)out[i].count + 1e-9));
        const double e =
            test_error_of(s->back + at, out[i].want, out[i].count, out[i].type, want->square[i]) /
            limit;
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
    double start = test_now();
    inputs_send(s, &c);
    epo_status status = layer_issue(s, &c, &layer);
    spent(&k->b->ns_layer, start);
    if (status == EPO_OK) {
        start = test_now();
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
    atomic_compare_exchange_strong(&k->go[i / PER_BUFFER], &none, test_now() < k->b->until ? 1 : 2);
    return atomic_load(&k->go[i / PER_BUFFER]) == 1;
}

static void *rank_main(void *ctx) {
    rank_state *s = ctx;
    block *k = s->k;
    TEST_CUDA(cudaSetDevice(s->rank % k->devices));
    TEST_CUDA(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking));
    double start = test_now();
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
            start = test_now();
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
    start = test_now();
    (void)k->engine->buffer_destroy(s->buffer);
    (void)k->engine->group_destroy(s->group);
    spent(&k->b->ns_group, start);
    cudaStreamDestroy(s->stream);
    return NULL;
}

/* ---- blocks and workers ---- */

static void block_run(const epo_engine *engine, board *b, uint64_t seed, int ranks, int devices,
                      int layers, rank_state *state) {
    const uint64_t r = test_random(seed, 0);
    block k = {.engine = engine,
               .b = b,
               .seed = seed,
               .ranks = ranks,
               .devices = devices,
               .layers = layers};
    const double start = test_now();
    if (ranks == 0)
        k.ranks = r % 4 == 0 ? 1 : r % 4 == 1 ? 4 : 2;
    k.overlap = (r >> 8) % 4 ? EPO_ON : EPO_OFF;
    k.delay = (r >> 8) % 4 == 3 ? EPO_ON : EPO_OFF;
    k.dispatcher = (r >> 16) % 2 ? EPO_DISPATCH_FLEX : EPO_DISPATCH_ALLTOALL;
    k.chunks = k.overlap == EPO_ON ? 1 << (r >> 24) % 4 : 1;
    if (engine->world_create(k.ranks, &k.world) != EPO_OK)
        return;
    for (int i = 0; i < k.ranks; i++) {
        state[i].k = &k;
        state[i].group = NULL;
        state[i].buffer = NULL;
    }
    test_threads(k.ranks, rank_main, state, sizeof *state);
    engine->world_destroy(k.world);
    printf("# block 0x%llx, %d ranks, %s %s%s, %d chunks: %d layers in %.2f s\n",
           (unsigned long long)seed, k.ranks,
           k.dispatcher == EPO_DISPATCH_FLEX ? "flex" : "alltoall",
           k.overlap == EPO_ON ? "overlapped" : "serial", k.delay == EPO_ON ? ", delayed" : "",
           k.chunks, k.done, test_now() - start);
    fflush(stdout);
}

typedef struct worker {
    board *b;
    uint64_t seed;
    int ranks, layers;
    rank_state state[MAX_RANKS];
} worker;

static void *worker_main(void *ctx) {
    worker *w = ctx;
    const epo_engine *engine = epo_engine_entry(EPO_ENGINE_ABI);
    int devices = 0;
    TEST_CUDA(cudaGetDeviceCount(&devices));
    for (;;) {
        const int mine = atomic_fetch_add(&w->b->blocks, 1);
        const int left = w->layers - mine * BLOCK;
        if (left <= 0 || test_now() > w->b->until)
            return NULL;
        block_run(engine, w->b, w->seed + (uint64_t)mine, w->ranks, devices,
                  left < BLOCK ? left : BLOCK, w->state);
    }
}

/* Device memory is taken before, and given back behind, all groups. */
static int process_main(const worker *w, int groups) {
    pthread_t thread[MAX_GROUPS];
    worker *each = calloc((size_t)groups, sizeof *each);
    int devices = 0;
    TEST_CUDA(cudaGetDeviceCount(&devices));
    for (int i = 0; i < groups && each != NULL; i++) {
        each[i] = *w;
        for (int r = 0; r < MAX_RANKS; r++) {
            TEST_CUDA(cudaSetDevice(r % devices));
            each[i].state[r].rank = r;
            memory_open(&each[i].state[r]);
        }
    }
    for (int i = 0; i < groups && each != NULL; i++)
        pthread_create(&thread[i], NULL, worker_main, &each[i]);
    for (int i = 0; i < groups && each != NULL; i++)
        pthread_join(thread[i], NULL);
    for (int i = 0; i < groups * MAX_RANKS && each != NULL; i++)
        memory_close(&each[i / MAX_RANKS].state[i % MAX_RANKS]);
    free(each);
    return each == NULL;
}

static double each(int64_t ns, int layers) { return layers > 0 ? 1e-6 * (double)ns / layers : 0; }

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr,
                "usage: bulk LAYERS [SEED [RANKS [SECONDS [PROCESSES [GROUPS [edges]]]]]]\n");
        return 2;
    }
    const int layers = (int)strtol(argv[1], NULL, 10);
    const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : (uint64_t)time(NULL) << 20;
    const int ranks = argc > 3 ? (int)strtol(argv[3], NULL, 10) : 0;
    const double limit = argc > 4 ? strtod(argv[4], NULL) : 1e9, start = test_now();
    const int workers = argc > 5 ? (int)strtol(argv[5], NULL, 10) : 1;
    const int groups = argc > 6 ? (int)strtol(argv[6], NULL, 10) : 1;
    if (layers < 1 || ranks < 0 || ranks > MAX_RANKS || workers < 1 || workers > 64 || groups < 1 ||
        groups > MAX_GROUPS) {
        fprintf(stderr,
                "bulk: %d layers, %d ranks (0..%d), %d processes (1..64), %d groups (1..%d)\n",
                layers, ranks, MAX_RANKS, workers, groups, MAX_GROUPS);
        return 2;
    }
    /* Many streams: where they share hardware queues, one rank's wait holds up another's rows. */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    board *b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b == MAP_FAILED)
        return 2;
    printf("# seed 0x%llx\n", (unsigned long long)seed);
    fflush(stdout);
    bool ended = true;
    b->until = start + limit;
    b->edges = argc > 7 && strcmp(argv[7], "edges") == 0;
    for (int i = 0; i < workers; i++)
        if (fork() == 0) {
            if (i % 2) /* all rows by copy engines */
                setenv("EP_OVERLAP_CUDA_SMALL", "0", 1);
            const worker w = {.b = b, .seed = seed, .ranks = ranks, .layers = layers};
            _exit(process_main(&w, groups));
        }
    for (int i = 0, status = 0; i < workers; i++, status = 0)
        ended = wait(&status) > 0 && status == 0 && ended;
    const int done = atomic_load(&b->layers), failed = atomic_load(&b->failed);
    const int broken = atomic_load(&b->broken);
    char name[64], text[400];
    snprintf(name, sizeof name, "bulk, %d random layers%s", done, b->edges ? ", edges" : "");
    snprintf(
        text, sizeof text,
        "%d of %d layers in %.1f s (1 rank %d, 2 ranks %d, 4 ranks %d); %d wrong, %d broken; ms "
        "of all ranks a layer: group %.2f, buffer %.2f, calls %.2f, reference %.2f, wait %.2f",
        done, layers, test_now() - start, atomic_load(&b->by_ranks[1]),
        atomic_load(&b->by_ranks[2]), atomic_load(&b->by_ranks[4]), failed, broken,
        each(atomic_load(&b->ns_group), done), each(atomic_load(&b->ns_buffer), done),
        each(atomic_load(&b->ns_layer), done), each(atomic_load(&b->ns_reference), done),
        each(atomic_load(&b->ns_wait), done));
    test_result(name, ended && done > 0 && failed == 0 && broken == 0, text);
    return test_failed;
}
