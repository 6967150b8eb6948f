/* SPDX-License-Identifier: Apache-2.0
 *
 * The word by which results become NaN (backend/cuda/check.c), over the runtime in ordinary memory
 * (tests/fake/cuda_runtime.c): when it is fetched from the CPU's, and that a failure sets that one.
 */
#include "config.h"

#include "backend/backend.h"
#include "backend/cuda/gpu.h"
#include "cuda_ranks.h"
#include "unit.h"

#include "../fake/cuda_runtime.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 2, CALLS = 2 * GPU_LATE_FETCHES };

static const epo_engine *engine;

typedef struct member member;
struct member {
    void (*play)(member *m, epo_backend *be, epo_queue *q);
    epo_world *world;
    int rank, ranks;
    bool made, polls_cpu;
    long captured, fetched; /* of CALLS */
    uint32_t before, after;
    epo_status told;
    int calls; /* of gpu_late_fetch, before a failure that the GPU does not hear of; 0: it does */
    pthread_barrier_t *both; /* ranks that fail at the same time */
    bool unsure;             /* the error says that results may not be NaN */
};

static long fetches(epo_queue *q, int calls, bool *ok) {
    fake_cuda_count();
    for (int i = 0; i < calls; i++)
        *ok = gpu_late_fetch(q, "a test") == EPO_OK && *ok;
    return fake_cuda_counted("a kernel");
}

static void fetch_and_fail(member *m, epo_backend *be, epo_queue *q) {
    q->capture = 1;
    m->captured = fetches(q, CALLS, &m->made);
    q->capture = 0;
    m->fetched = fetches(q, CALLS, &m->made);
    m->polls_cpu = gpu_late_poll(be) == be->late_seen;
    m->before = *be->late_cpu;
    gpu_break(be, EPO_E_SYSTEM, "as told");
    m->after = *be->late_cpu;
    m->told = gpu_late(be);
}

static void fail_unheard(member *m, epo_backend *be, epo_queue *q) {
    (void)fetches(q, m->calls, &m->made);
    pthread_barrier_wait(m->both);
    fake_cuda_busy(FAKE_ALL);
    gpu_break(be, EPO_E_TIMEOUT, "as told");
    pthread_barrier_wait(m->both);
    fake_cuda_busy(FAKE_IDLE);
    m->told = gpu_late(be);
    m->unsure = strstr(engine->error(), "as told; the results behind it may hold rows") != NULL;
}

/* A rank's group and a queue of it, for what it plays. */
static void *member_main(void *arg) {
    member *m = arg;
    const epo_backend_ops *ops = epo_backend_get();
    const epo_backend_config config = {
        .rank = m->rank, .ranks = m->ranks, .threads = m->world, .timeout_s = 50, .warn_s = 50};
    epo_backend *be = NULL;
    epo_queue *q = NULL;
    cudaSetDevice(m->rank);
    m->made =
        ops->open(&config, &be) == EPO_OK && ops->queue_create(be, EPO_QUEUE_COMPUTE, &q) == EPO_OK;
    if (m->made)
        m->play(m, be, q);
    ops->queue_destroy(be, q);
    ops->close(be, true);
    return NULL;
}

static void play(int ranks, const char *connections, long captured, long fetched) {
    member m[MOST];
    if (connections != NULL)
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections, 1);
    else
        unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    epo_world *world = cuda_ranks_world(engine, ranks, true, false);
    for (int r = 0; r < ranks; r++)
        m[r] = (member){fetch_and_fail, .world = world, .rank = r, .ranks = ranks};
    cuda_ranks_run(engine, world, ranks, member_main, m, sizeof *m);
    for (int r = 0; r < ranks; r++) {
        CU_ASSERT_FATAL(m[r].made);
        CU_ASSERT_EQUAL(m[r].captured, captured);
        CU_ASSERT_EQUAL(m[r].fetched, fetched);
        CU_ASSERT_EQUAL(m[r].polls_cpu, connections != NULL && strcmp(connections, "1") == 0);
        CU_ASSERT_EQUAL(m[r].before, 0);
        CU_ASSERT_EQUAL(m[r].after, 1);
        CU_ASSERT_EQUAL(m[r].told, EPO_E_SYSTEM);
    }
    fake_cuda_forget(false);
}

/* A graph would keep what a program's first passes alone need. */
static void first_results_fetch_it(void) {
    play(2, NULL, 0, GPU_LATE_FETCHES);
    play(2, "32", 0, GPU_LATE_FETCHES);
}

/* One rank, too: a replay's own kernels set the CPU's word there. */
static void one_hardware_queue_always_does(void) {
    play(2, "1", CALLS, CALLS);
    play(1, "1", CALLS, CALLS);
}

static void play_deaf(int calls, const char *connections, bool unsure) {
    if (connections != NULL)
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections, 1);
    else
        unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    epo_world *world = cuda_ranks_world(engine, 2, true, false);
    pthread_barrier_t both;
    member m[2];
    pthread_barrier_init(&both, NULL, 2);
    for (int r = 0; r < 2; r++)
        m[r] = (member){fail_unheard, .world = world, .rank = r,
                        .ranks = 2,   .calls = calls, .both = &both};
    cuda_ranks_run(engine, world, 2, member_main, m, sizeof *m);
    for (int r = 0; r < 2; r++) {
        CU_ASSERT_FATAL(m[r].made);
        CU_ASSERT_EQUAL(m[r].told, EPO_E_TIMEOUT);
        CU_ASSERT_EQUAL(m[r].unsure, unsure);
    }
    pthread_barrier_destroy(&both);
    fake_cuda_forget(false);
}

/* The GPU does nothing for as long as the word may take, as while a kernel is loaded. */
static void a_gpu_that_hears_nothing_is_told(void) {
    play_deaf(GPU_LATE_FETCHES, NULL, true);
    play_deaf(GPU_LATE_FETCHES - 1, NULL, false); /* the next result fetches the CPU's word */
    play_deaf(CALLS, "1", false);
}

static void one_rank_waits_for_nobody(void) { play(1, NULL, 0, 0); }

int main(void) {
    static const CU_TestInfo tests[] = {
        {"the first results fetch it", first_results_fetch_it},
        {"with one hardware queue all do", one_hardware_queue_always_does},
        {"a GPU that hears nothing is told", a_gpu_that_hears_nothing_is_told},
        {"one rank waits for nobody", one_rank_waits_for_nobody},
        CU_TEST_INFO_NULL};
    engine = epo_engine_entry(EPO_ENGINE_ABI);
    alarm(100); /* what hangs, ends */
    fake_cuda_stream_ops(true);
    return engine != NULL ? unit_run("cuda late", tests) : 1;
}
