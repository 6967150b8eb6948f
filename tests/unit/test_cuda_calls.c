/* SPDX-License-Identifier: Apache-2.0
 *
 * How many calls of CUDA and NCCL a layer's pass takes: on the CPU each of them costs 0.1 to 5 us,
 * and together they are a call's time there.  The CUDA engine over a runtime in ordinary memory
 * (tests/fake/cuda_runtime.c).
 *
 *   test_cuda_calls [-v]    -v: what was called, pass by pass
 */
#include "config.h"

#include "backend/cuda/gpu.h"
#include "backend/engine.h"
#include "cuda_ranks.h"
#include "unit.h"

#include "../fake/cuda_runtime.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    RANKS = 2,
    TOKENS = 64,
    HIDDEN = 256,
    FFN = 128,
    EXPERTS = 32,
    TOP_K = 4,
    WARM = GPU_LATE_FETCHES, /* passes, each of which has a result */
    MOST = WARM + 40
};

static const epo_engine *engine;
static bool verbose;
static pthread_barrier_t together;

/* ---- ranks ------------------------------------------------------------------------ */

/* Of the last pass, after as many others: then nothing is made any more. */
enum { KERNELS, EVENTS, EVENT_WAITS, WORDS, COPIES, QUERIES, NCCL, MADE, BLOCKS, KINDS };
static const char *const kinds[KINDS] = {"kernels",
                                         "events recorded",
                                         "waits for events",
                                         "calls for words in memory",
                                         "copies",
                                         "questions about the device and its kernels",
                                         "of NCCL",
                                         "made, given back or waited for",
                                         "blocks of the CPU's memory"};
typedef struct tally {
    long of[KINDS], other;
    char text[700];
} tally;

typedef struct setting {
    const char *name;
    epo_dispatcher dispatcher;
    epo_switch overlap, delay;
    int chunks;
    bool chain, pairs;                    /* pairs: over NCCL */
    bool home;                            /* flex's forward rows go home one by one */
    long forward[KINDS], backward[KINDS]; /* at most */
} setting;

typedef struct member {
    int rank;
    const setting *s;
    epo_world *world;
    bool ok;
    tally forward, backward;
    char error[EPO_ERROR_MAX];
} member;

static const struct {
    const char *call;
    int kind;
} calls[] = {
    {"a kernel", KERNELS},
    {"cudaLaunchKernelExC", KERNELS},
    {"cudaLaunchHostFunc", KERNELS},
    {"cudaEventRecord", EVENTS},
    {"cudaStreamWaitEvent", EVENT_WAITS},
    {"cuStreamBatchMemOp", WORDS},
    {"cuStreamWaitValue64 or cuStreamWriteValue64", WORDS},
    {"cudaMemcpyAsync", COPIES},
    {"cudaMemcpy2DAsync", COPIES},
    {"cudaMemcpyBatchAsync", COPIES},
    {"cudaMemsetAsync", COPIES},
    {"cudaGetDevice", QUERIES},
    {"cudaSetDevice", QUERIES},
    {"cudaDeviceGetAttribute", QUERIES},
    {"cudaFuncSetAttribute", QUERIES},
    {"cudaEventQuery", QUERIES},
    {"cudaStreamIsCapturing", QUERIES},
    {"cudaThreadExchangeStreamCaptureMode", QUERIES},
    {"cuTensorMapEncodeTiled", QUERIES},
    {"fake_start", NCCL},
    {"fake_group_end", NCCL},
    {"fake_send", NCCL},
    {"fake_recv", NCCL},
    {"cudaMalloc", MADE},
    {"cudaMallocFromPoolAsync", MADE},
    {"cudaFreeAsync", MADE},
    {"cudaEventCreateWithFlags", MADE},
    {"cudaEventDestroy", MADE},
    {"cudaStreamSynchronize", MADE},
    {"malloc", BLOCKS},
    {"calloc", BLOCKS},
    {"realloc", BLOCKS},
};

static void count(tally *t) {
    *t = (tally){.other = fake_cuda_counted(NULL)};
    fake_cuda_counts(t->text, sizeof t->text);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        const long n = fake_cuda_counted(calls[i].call);
        t->of[calls[i].kind] += n;
        t->other -= n;
    }
}

typedef struct arrays {
    void *w1, *w2, *dw1, *dw2, *x, *y, *dy, *dx;
    float *weights, *dweights;
    int64_t experts[TOKENS * TOP_K];
} arrays;

static void arrays_make(arrays *a, int rank) {
    const size_t local = EXPERTS / RANKS, w = local * FFN * HIDDEN * 2;
    const size_t rows = (size_t)TOKENS * HIDDEN * 2;
    a->w1 = cuda_ranks_room(2 * w);
    a->w2 = cuda_ranks_room(w);
    a->dw1 = cuda_ranks_room(2 * w);
    a->dw2 = cuda_ranks_room(w);
    a->x = cuda_ranks_room(rows);
    a->y = cuda_ranks_room(rows);
    a->dy = cuda_ranks_room(rows);
    a->dx = cuda_ranks_room(rows);
    a->weights = cuda_ranks_room(sizeof(float) * TOKENS * TOP_K);
    a->dweights = cuda_ranks_room(sizeof(float) * TOKENS * TOP_K);
    for (int t = 0; t < TOKENS; t++)
        for (int k = 0; k < TOP_K; k++)
            a->experts[t * TOP_K + k] = (t * 7 + k * 9 + rank) % EXPERTS;
}

static void arrays_free(arrays *a) {
    void *all[] = {a->w1, a->w2, a->dw1, a->dw2, a->x, a->y, a->dy, a->dx, a->weights, a->dweights};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static bool went(member *m, epo_status status) {
    if (status != EPO_OK && m->ok)
        snprintf(m->error, sizeof m->error, "%s", engine->error());
    m->ok = m->ok && status == EPO_OK;
    return m->ok;
}

/* The watchdog keeps events that have come for the next; it may have little time.  The same
 * answer on all ranks. */
static bool still_made(const member *m) {
    static bool made[RANKS];
    made[m->rank] = m->forward.of[MADE] + m->backward.of[MADE] > 0;
    pthread_barrier_wait(&together);
    const bool any = made[0] || made[1];
    pthread_barrier_wait(&together);
    return any;
}

static bool passes(member *m, epo_group *group, epo_layer *layer, epo_plan *plan, arrays *a) {
    for (int i = 0; i <= WARM || (i < MOST && still_made(m)); i++) {
        epo_saved *saved = NULL;
        if (i + 3 >= WARM)
            nanosleep(&(struct timespec){0, 30000000}, NULL);
        fake_cuda_count();
        if (!went(m, engine->forward(layer, plan, a->x, a->y, &saved, NULL)))
            return false;
        count(&m->forward);
        fake_cuda_count();
        if (!went(m, engine->backward(layer, saved, a->dy, a->dx, a->dweights, NULL)))
            return false;
        count(&m->backward);
        if (!went(m, engine->group_wgrad_flush(group, NULL)))
            return false;
    }
    return true;
}

static epo_engine_group group_of(const member *m) {
    epo_engine_group g = cuda_ranks_group(m->world, m->rank, RANKS);
    g.config.overlap = m->s->overlap;
    g.config.delay_wgrad = m->s->delay;
    g.config.dispatcher = m->s->dispatcher;
    g.config.chunks = m->s->chunks;
    return g;
}

static void *member_main(void *arg) {
    member *m = arg;
    epo_buffer_config b = EPO_BUFFER_CONFIG_INIT;
    epo_layer_config l = EPO_LAYER_CONFIG_INIT;
    epo_routing r = EPO_ROUTING_INIT;
    epo_group *group = NULL;
    epo_buffer *buffer = NULL;
    epo_layer *layer = NULL;
    epo_plan *plan = NULL;
    arrays a;
    cudaSetDevice(m->rank);
    arrays_make(&a, m->rank);
    b.experts = l.experts = EXPERTS;
    b.hidden = l.hidden = HIDDEN;
    b.top_k = r.top_k = TOP_K;
    b.max_tokens = r.tokens = TOKENS;
    b.type = l.type = l.wgrad_type = EPO_BF16;
    l.ffn = FFN;
    l.w1 = a.w1;
    l.w2 = a.w2;
    l.dw1 = a.dw1;
    l.dw2 = a.dw2;
    r.experts = a.experts;
    r.weights = a.weights;
    m->ok = true;
    const epo_engine_group g = group_of(m);
    if (went(m, engine->group_create(&g, &group)) &&
        went(m, engine->buffer_create(group, &b, &buffer)) &&
        went(m, engine->layer_create(group, &l, &layer)) &&
        went(m, engine->plan_create(buffer, &r, NULL, &plan)))
        (void)passes(m, group, layer, plan, &a);
    engine->plan_release(plan);
    (void)went(m, engine->layer_destroy(layer));
    (void)went(m, engine->buffer_destroy(buffer));
    (void)went(m, engine->group_destroy(group));
    arrays_free(&a);
    return NULL;
}

static void run(const setting *s, member *m) {
    epo_world *world = cuda_ranks_world(engine, RANKS, s->chain, s->pairs);
    for (int r = 0; r < RANKS; r++)
        m[r] = (member){.rank = r, .s = s, .world = world};
    setenv("EP_OVERLAP_CUDA_FLEX_HOME", s->home ? "1" : "0", 1); /* else measured: more calls */
    cuda_ranks_run(engine, world, RANKS, member_main, m, sizeof *m);
    for (int r = 0; r < RANKS; r++) {
        if (!m[r].ok)
            printf("%s, rank %d: %s\n", s->name, r, m[r].error);
        CU_ASSERT(m[r].ok);
    }
}

/* ---- how many --------------------------------------------------------------------- */

/* As many as there were when each of them was known to be needed: who needs more raises them,
 * knowing what it costs.  In the order of `kinds`. */
static const setting settings[] = {
    {"alltoall, serial",
     EPO_DISPATCH_ALLTOALL,
     EPO_OFF,
     EPO_OFF,
     1,
     true,
     false,
     false,
     {7, 6, 8, 6, 0, 26, 0, 0, 1},
     {15, 8, 10, 6, 0, 44, 0, 0, 1}},
    {"alltoall, 8 chunks",
     EPO_DISPATCH_ALLTOALL,
     EPO_ON,
     EPO_OFF,
     8,
     true,
     false,
     false,
     {6, 6, 10, 6, 0, 29, 0, 0, 1},
     {13, 11, 14, 6, 0, 56, 0, 0, 1}},
    {"alltoall, 8 chunks, delayed",
     EPO_DISPATCH_ALLTOALL,
     EPO_ON,
     EPO_ON,
     8,
     true,
     false,
     false,
     {6, 6, 10, 6, 0, 29, 0, 0, 1},
     {7, 6, 10, 6, 0, 29, 0, 0, 1}},
    {"alltoall, 8 chunks, no chain",
     EPO_DISPATCH_ALLTOALL,
     EPO_ON,
     EPO_OFF,
     8,
     false,
     false,
     false,
     {43, 20, 17, 13, 0, 167, 0, 0, 1},
     {65, 22, 18, 13, 0, 164, 0, 0, 1}},
    {"flex, serial",
     EPO_DISPATCH_FLEX,
     EPO_OFF,
     EPO_OFF,
     1,
     true,
     false,
     false,
     {8, 7, 7, 7, 0, 25, 0, 0, 1},
     {17, 9, 8, 7, 0, 47, 0, 0, 1}},
    {"flex, 1 chunk",
     EPO_DISPATCH_FLEX,
     EPO_ON,
     EPO_OFF,
     1,
     true,
     false,
     false,
     {8, 7, 6, 7, 0, 25, 0, 0, 1},
     {17, 10, 10, 7, 0, 48, 0, 0, 1}},
    {"flex, 1 chunk, rows go home one by one",
     EPO_DISPATCH_FLEX,
     EPO_ON,
     EPO_OFF,
     1,
     true,
     false,
     true,
     {5, 5, 6, 6, 0, 21, 0, 0, 1},
     {17, 10, 10, 7, 0, 48, 0, 0, 1}},
    {"flex, 4 chunks",
     EPO_DISPATCH_FLEX,
     EPO_ON,
     EPO_OFF,
     4,
     true,
     false,
     false,
     {11, 13, 12, 14, 0, 38, 0, 0, 1},
     {19, 16, 14, 14, 0, 61, 0, 0, 1}},
#ifdef HAVE_NCCL
    {"alltoall over NCCL, 8 chunks",
     EPO_DISPATCH_ALLTOALL,
     EPO_ON,
     EPO_OFF,
     8,
     true,
     true,
     false,
     {12, 47, 25, 24, 0, 42, 96, 0, 17},
     {18, 50, 25, 24, 0, 62, 128, 0, 17}},
#endif
};

static void expect_most(const char *name, const char *pass, const tally *t, const long *most) {
    printf("%s, %s:", name, pass);
    for (int k = 0; k < KINDS; k++)
        printf(" %ld", t->of[k]);
    printf("\n");
    for (int k = 0; k < KINDS; k++)
        if (t->of[k] > most[k])
            printf("    %s: %ld, at most %ld are needed\n", kinds[k], t->of[k], most[k]);
    for (int k = 0; k < KINDS; k++)
        CU_ASSERT(t->of[k] <= most[k]);
    CU_ASSERT_EQUAL(t->other, 0); /* a call that has no kind here */
    CU_ASSERT(t->of[KERNELS] > 0 && t->of[EVENTS] > 0 && t->of[EVENT_WAITS] > 0);
    if (verbose || t->other != 0)
        printf("    %s\n", t->text);
}

static void count_all(void) {
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        const setting *s = &settings[i];
        member m[RANKS];
        run(s, m);
        for (int r = 0; r < RANKS; r++) {
            expect_most(s->name, "forward", &m[r].forward, s->forward);
            expect_most(s->name, "backward", &m[r].backward, s->backward);
        }
        fake_cuda_forget(false);
    }
}

int main(int argc, char **argv) {
    static const CU_TestInfo tests[] = {
        {"calls of a pass", count_all},
        CU_TEST_INFO_NULL,
    };
    verbose = argc > 1 && strcmp(argv[1], "-v") == 0;
    pthread_barrier_init(&together, NULL, RANKS);
    fake_cuda_stream_ops(true);
    engine = epo_engine_entry(EPO_ENGINE_ABI);
    alarm(120); /* what hangs, ends */
    return engine == NULL ? 2 : unit_run("cuda calls", tests);
}
