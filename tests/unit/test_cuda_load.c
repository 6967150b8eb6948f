/* SPDX-License-Identifier: Apache-2.0
 *
 * Before a library's kernel is launched for the first time (backend/cuda/load.c), over the runtime
 * in ordinary memory (tests/fake/cuda_runtime.c): ranks that are threads wait for what they have
 * issued, once a kernel and device; who has no need to does not.
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

enum { MOST = 2, QUEUES = 2 };

static pthread_barrier_t together;

static const epo_engine *engine;

typedef struct member {
    epo_world *world;
    int rank, ranks;
    bool made;
    const char *kernel; /* its first bytes */
    long first, again, other;
    epo_status hanging, rested;
    long after; /* what hung is asked for anew */
} member;

static long asked(epo_queue *q, const char *kernel, epo_status *status) {
    fake_cuda_count();
    *status = gpu_library_first(q, kernel, strlen(kernel), "a test");
    return fake_cuda_counted("cudaStreamQuery");
}

/* The GPU's work does not end; then it has. */
static void hang(member *m, epo_backend *be, epo_queue *q) {
    char late[64];
    snprintf(late, sizeof late, "%s, late", m->kernel);
    pthread_barrier_wait(&together);
    if (m->rank == 0)
        fake_cuda_busy(FAKE_ALL);
    pthread_barrier_wait(&together);
    atomic_store(&be->hangs, 1); /* it is not waited for any more */
    (void)asked(q, late, &m->hanging);
    pthread_barrier_wait(&together);
    if (m->rank == 0)
        fake_cuda_busy(FAKE_IDLE);
    pthread_barrier_wait(&together);
    m->after = asked(q, late, &m->rested);
}

static void *member_main(void *arg) {
    member *m = arg;
    const epo_backend_ops *ops = epo_backend_get();
    const epo_backend_config config = {
        .rank = m->rank, .ranks = m->ranks, .threads = m->world, .timeout_s = 50, .warn_s = 50};
    epo_backend *be = NULL;
    epo_queue *q[QUEUES] = {NULL};
    epo_status status;
    char other[64];
    cudaSetDevice(m->rank);
    m->made = ops->open(&config, &be) == EPO_OK;
    for (int i = 0; i < QUEUES && m->made; i++)
        m->made =
            ops->queue_create(be, i == 0 ? EPO_QUEUE_COMPUTE : EPO_QUEUE_COMM, &q[i]) == EPO_OK;
    if (m->made) {
        snprintf(other, sizeof other, "%s, other", m->kernel);
        m->first = asked(q[0], m->kernel, &status);
        m->made = status == EPO_OK;
        m->again = asked(q[1], m->kernel, &status);
        m->made = m->made && status == EPO_OK;
        m->other = asked(q[1], other, &status);
        m->made = m->made && status == EPO_OK;
    }
    if (m->made)
        hang(m, be, q[0]);
    for (int i = 0; i < QUEUES; i++)
        ops->queue_destroy(be, q[i]);
    ops->close(be, false);
    return NULL;
}

/* Each asks after `asks` streams the first time. */
static void play(int ranks, const char *kernel, long asks) {
    member m[MOST];
    pthread_barrier_init(&together, NULL, (unsigned)ranks);
    epo_world *world = cuda_ranks_world(engine, ranks, true, false);
    for (int r = 0; r < ranks; r++)
        m[r] = (member){.world = world, .rank = r, .ranks = ranks, .kernel = kernel};
    cuda_ranks_run(engine, world, ranks, member_main, m, sizeof *m);
    for (int r = 0; r < ranks; r++) {
        CU_ASSERT_FATAL(m[r].made);
        CU_ASSERT_EQUAL(m[r].first, asks);
        CU_ASSERT_EQUAL(m[r].again, 0);
        CU_ASSERT_EQUAL(m[r].other, asks);
        CU_ASSERT_EQUAL(m[r].hanging, asks > 0 ? EPO_E_TIMEOUT : EPO_OK);
        CU_ASSERT_EQUAL(m[r].rested, EPO_OK);
        CU_ASSERT_EQUAL(m[r].after, asks);
    }
    pthread_barrier_destroy(&together);
}

/* Each rank has a device: what one loaded, the other has not. */
static void streams_that_wait(void) {
    fake_cuda_stream_ops(true);
    play(2, "streams", QUEUES);
}

static void who_waits_on_the_cpu(void) {
    fake_cuda_stream_ops(false);
    play(2, "the CPU", 0);
}

static void one_rank_alone(void) {
    fake_cuda_stream_ops(true);
    play(1, "alone", 0);
}

int main(void) {
    static const CU_TestInfo tests[] = {
        {"waits for all queues, once a kernel and device", streams_that_wait},
        {"not where the CPU waits for flags", who_waits_on_the_cpu},
        {"not where nobody else is", one_rank_alone},
        CU_TEST_INFO_NULL};
    engine = epo_engine_entry(EPO_ENGINE_ABI);
    alarm(100); /* what hangs, ends */
    return engine != NULL ? unit_run("cuda load", tests) : 1;
}
