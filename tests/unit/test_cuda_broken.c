/* SPDX-License-Identifier: Apache-2.0
 *
 * A communicator that fails on one rank, in the middle of a pass, on the CUDA engine over a runtime
 * in ordinary memory (tests/fake/cuda_runtime.c): nobody waits for the limit, all hear whose it
 * was.
 */
#include "config.h"

#include "backend/cuda/gpu.h"
#include "configs.h"
#include "cuda_ranks.h"

#include "../fake/cuda_runtime.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 2, E = 4, H = 16, K = 2, T = 4 };

static const epo_engine *engine;
static pthread_barrier_t together;

typedef struct member {
    epo_world *world;
    int rank;
    bool made, fails;
    epo_status status;
    double waited;
    char text[300];
} member;

/* Both ranks' rows are on their way and do not come, when rank 1's communicator fails. */
static void meanwhile(member *m, epo_group *group, epo_layer *layer, epo_plan *plan, float *x) {
    m->made = m->made && engine->forward(layer, plan, x, x, NULL, NULL) == EPO_OK; /* its memory */
    pthread_barrier_wait(&together);
    if (m->rank == 0)
        fake_cuda_busy(FAKE_ALL);
    pthread_barrier_wait(&together);
    if (m->made)
        m->status = engine->forward(layer, plan, x, x, NULL, NULL);
    pthread_barrier_wait(&together); /* both have sent theirs */
    if (m->rank == 1 && m->fails)
        fake_nccl_failed(1);
    const double start = gpu_now();
    while (m->status == EPO_OK && gpu_now() - start < (m->fails ? 30 : 0.5)) {
        nanosleep(&(struct timespec){0, 10000000}, NULL);
        m->status = engine->group_async_error(group);
    }
    m->waited = gpu_now() - start;
    snprintf(m->text, sizeof m->text, "%s", m->status != EPO_OK ? engine->error() : "");
    pthread_barrier_wait(&together);
    if (m->rank == 0) {
        fake_nccl_failed(-1);
        fake_cuda_busy(FAKE_IDLE);
    }
    pthread_barrier_wait(&together);
}

static void *member_main(void *arg) {
    member *m = arg;
    epo_engine_group g = cuda_ranks_group(m->world, m->rank, RANKS);
    float *w = cuda_ranks_room((size_t)E * 2 * H * H * 4);
    float *x = cuda_ranks_room((size_t)T * H * 4);
    int64_t experts[T * K];
    epo_buffer_config b = config_buffer(E, H, K, T);
    const epo_layer_config l = config_layer(E, H, H, w, w);
    epo_group *group = NULL;
    epo_buffer *buffer = NULL;
    epo_layer *layer = NULL;
    epo_plan *plan = NULL;
    cudaSetDevice(m->rank);
    g.config.timeout_s = 60;
    g.config.overlap = EPO_ON;
    g.config.delay_wgrad = EPO_OFF;
    g.config.dispatcher = EPO_DISPATCH_ALLTOALL;
    g.config.chunks = 1;
    for (int i = 0; i < T * K; i++)
        experts[i] = i % E;
    const epo_routing r = config_routing(T, K, experts, NULL);
    m->made = engine->group_create(&g, &group) == EPO_OK &&
              engine->buffer_create(group, &b, &buffer) == EPO_OK &&
              engine->layer_create(group, &l, &layer) == EPO_OK &&
              engine->plan_create(buffer, &r, NULL, &plan) == EPO_OK;
    meanwhile(m, group, layer, plan, x);
    engine->plan_release(plan);
    (void)engine->layer_destroy(layer);
    (void)engine->buffer_destroy(buffer);
    (void)engine->group_destroy(group);
    free(x);
    free(w);
    return NULL;
}

static void play(bool fails) {
    member m[RANKS];
    pthread_barrier_init(&together, NULL, RANKS);
    epo_world *world = cuda_ranks_world(engine, RANKS, false, true);
    for (int r = 0; r < RANKS; r++)
        m[r] = (member){.world = world, .rank = r, .fails = fails};
    cuda_ranks_run(engine, world, RANKS, member_main, m, sizeof *m);
    pthread_barrier_destroy(&together);
    for (int r = 0; r < RANKS; r++) {
        const bool told = m[r].status == EPO_E_SYSTEM &&
                          strstr(m[r].text, "rank 1: NCCL's communicator has failed here: as told");
        if (told != fails || m[r].status != (fails ? EPO_E_SYSTEM : EPO_OK))
            printf("rank %d: %d after %.1f s: %s\n", r, (int)m[r].status, m[r].waited, m[r].text);
        CU_ASSERT(m[r].made);
        CU_ASSERT_EQUAL(told, fails);
        CU_ASSERT_EQUAL(m[r].status, fails ? EPO_E_SYSTEM : EPO_OK);
        CU_ASSERT(m[r].waited < 30); /* the limit is 60 */
    }
    fake_cuda_forget(false);
}

/* And one that is only slow is waited for. */
static void a_failed_communicator_is_told(void) {
    play(false);
    play(true);
}

/* ---- a communicator that one rank takes for another ------------------------------- */

/* Rank 1 says that it is rank 0 of it. */
static void *mistaken_main(void *arg) {
    member *m = arg;
    epo_engine_group g = {sizeof g, EPO_GROUP_CONFIG_INIT, "a test"};
    epo_group *group = NULL;
    cudaSetDevice(m->rank);
    fake_comm_open(m->rank, RANKS, &g.config.nccl_comm);
    g.config.engine = EPO_ENGINE_CUDA;
    g.config.rank = m->rank == 1 ? 0 : -1;
    g.config.ranks = m->rank == 1 ? RANKS : -1;
    g.config.overlap = EPO_ON;
    g.config.delay_wgrad = EPO_OFF;
    g.config.dispatcher = EPO_DISPATCH_ALLTOALL;
    g.config.timeout_s = 60;
    const double start = gpu_now();
    m->status = engine->group_create(&g, &group);
    m->waited = gpu_now() - start;
    m->made = group != NULL;
    snprintf(m->text, sizeof m->text, "%s", engine->error());
    fake_comm_close(g.config.nccl_comm);
    return NULL;
}

static void a_mistaken_rank_is_told_to_all(void) {
    member m[RANKS] = {{.rank = 0}, {.rank = 1}};
    epo_world *none = cuda_ranks_world(engine, RANKS, false, false);
    cuda_ranks_run(engine, none, RANKS, mistaken_main, m, sizeof *m);
    for (int r = 0; r < RANKS; r++) {
        CU_ASSERT_FALSE(m[r].made);
        CU_ASSERT_EQUAL(m[r].status, r == 1 ? EPO_E_ARG : EPO_E_PEER);
        CU_ASSERT(m[r].waited < 30); /* the limit is 60 */
        CU_ASSERT_PTR_NOT_NULL(strstr(m[r].text, "this is its rank 1 of 2, but rank and ranks say "
                                                 "0 of 2"));
        if (m[r].status == EPO_OK || m[r].waited >= 30)
            printf("rank %d: %d after %.1f s: %s\n", r, (int)m[r].status, m[r].waited, m[r].text);
    }
    CU_ASSERT_PTR_NOT_NULL(strstr(m[0].text, "rank 1: "));
    fake_cuda_forget(false);
}

/* ---- whom all wait for ------------------------------------------------------- */

enum { LINE = 3 };

typedef struct waiter {
    epo_world *world;
    int rank;
    bool made;
    epo_status status;
    char text[300];
} waiter;

/* The calling thread of each rank but the last waits for the next one, which says so. */
static void *waiter_main(void *arg) {
    waiter *m = arg;
    const epo_backend_ops *ops = epo_backend_get();
    const epo_backend_config config = {.rank = m->rank,
                                       .ranks = LINE,
                                       .threads = m->world,
                                       .timeout_s = m->rank == 0 ? 1 : 60,
                                       .warn_s = 60};
    const epo_ready next = {
        .epoch = 1, .count = 1, .peer = m->rank + 1, .what = "a test", .chunk = -1};
    volatile uint64_t never = 0;
    epo_backend *be = NULL;
    cudaSetDevice(m->rank);
    m->made = ops->open(&config, &be) == EPO_OK;
    pthread_barrier_wait(&together);
    if (m->made && m->rank < LINE - 1)
        m->made = gpu_watch_poll(be, &never, &next) == EPO_OK;
    pthread_barrier_wait(&together);
    m->status = m->made ? gpu_late(be) : EPO_OK;
    snprintf(m->text, sizeof m->text, "%s", engine->error());
    ops->close(be, true);
    return NULL;
}

static void a_thread_that_polls_tells_whom_it_waits_for(void) {
    waiter m[LINE];
    pthread_barrier_init(&together, NULL, LINE);
    epo_world *world = cuda_ranks_world(engine, LINE, false, false);
    for (int r = 0; r < LINE; r++)
        m[r] = (waiter){.world = world, .rank = r};
    cuda_ranks_run(engine, world, LINE, waiter_main, m, sizeof *m);
    pthread_barrier_destroy(&together);
    for (int r = 0; r < LINE; r++) {
        CU_ASSERT(m[r].made);
        CU_ASSERT_EQUAL(m[r].status, EPO_E_TIMEOUT);
        CU_ASSERT(strstr(m[r].text, "rank 0: a test: nothing from rank 1 (1 of 1 missing)") !=
                  NULL);
        CU_ASSERT(strstr(m[r].text, "behind whom all wait for rank 2") != NULL);
    }
    fake_cuda_forget(false);
}

int main(void) {
    static const CU_TestInfo tests[] = {
        {"a communicator that fails is told to all", a_failed_communicator_is_told},
        {"a rank that is mistaken is told to all", a_mistaken_rank_is_told_to_all},
        {"a thread that polls tells whom it waits for",
         a_thread_that_polls_tells_whom_it_waits_for},
        CU_TEST_INFO_NULL};
#ifndef HAVE_NCCL
    return 77;
#endif
    fake_cuda_stream_ops(true); /* a forward is issued, and not waited for */
    engine = epo_engine_entry(EPO_ENGINE_ABI);
    alarm(160); /* what hangs, ends */
    return engine != NULL ? unit_run("cuda broken", tests) : 1;
}
