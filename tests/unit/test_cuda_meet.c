/* SPDX-License-Identifier: Apache-2.0
 *
 * How ranks of the CUDA engine meet over a caller's bootstrap, two on each of two machines,
 * here threads of one process: what the ranks of a machine share, and that memory of another
 * size than the others' is nobody's.  No GPU is used.
 */
#include "backend/cuda/gpu.h"
#include "core/names.h"
#include "member.h"
#include "unit.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RANKS = 4, BYTES = 4096, MOST = 8192 };

/* A bootstrap by memory. */
static pthread_barrier_t together;
static unsigned char board[RANKS][MOST];

static int board_allgather(void *ctx, const void *mine, size_t bytes, void *all) {
    if (bytes > sizeof board[0])
        return -1;
    memcpy(board[*(const int *)ctx], mine, bytes);
    pthread_barrier_wait(&together);
    for (int r = 0; r < RANKS; r++)
        memcpy((char *)all + (size_t)r * bytes, board[r], bytes);
    pthread_barrier_wait(&together);
    return 0;
}
static int board_barrier(void *ctx) {
    (void)ctx;
    pthread_barrier_wait(&together);
    return 0;
}

typedef struct member {
    int rank, wrong;
} member;

/* The ranks of a machine see what the first of them writes. */
static void share(member *m, gpu_meet *meet) {
    void *p = NULL;
    EXPECT(gpu_meet_shared(meet, BYTES, &p) == EPO_OK);
    if (p == NULL)
        return;
    volatile int *words = p;
    EXPECT(words[0] == 0 && words[1] == 0);
    EXPECT(gpu_meet_barrier(meet) == EPO_OK);
    if (m->rank % 2 == 0)
        words[0] = 1 + m->rank;
    EXPECT(gpu_meet_barrier(meet) == EPO_OK);
    EXPECT(words[0] == 1 + m->rank / 2 * 2);
    EXPECT(gpu_meet_barrier(meet) == EPO_OK);
    gpu_meet_unshare(meet, p, BYTES);
}

/* Rank 3 wants another size than the rank that makes it. */
static void share_unequal(member *m, gpu_meet *meet) {
    void *p = NULL;
    epo_status status = gpu_meet_shared(meet, m->rank == 3 ? 2 * BYTES : BYTES, &p);
    EXPECT(p == NULL);
    EXPECT(status == (m->rank == 3 ? EPO_E_SYSTEM : EPO_E_PEER));
    EXPECT(strstr(epo_fail_text(), m->rank == 3 ? "is not 8192 bytes" : "rank 3") != NULL);
}

static void *member_main(void *arg) {
    member *m = arg;
    const epo_bootstrap boot = {sizeof boot, &m->rank, board_allgather, board_barrier};
    const epo_backend_config config = {
        .rank = m->rank, .ranks = RANKS, .bootstrap = &boot, .timeout_s = 10, .warn_s = 5};
    gpu_meet *meet = NULL;
    EXPECT(gpu_meet_open(&config, &meet) == EPO_OK);
    if (meet == NULL)
        return NULL;
    EXPECT(gpu_meet_nodes(meet) == 2);
    share(m, meet);
    share_unequal(m, meet);
    share(m, meet); /* nobody is the worse for it */
    gpu_meet_close(meet, false);
    return NULL;
}

static void ranks_of_two_machines_share(void) {
    pthread_t thread[RANKS];
    member members[RANKS];
    pthread_barrier_init(&together, NULL, RANKS);
    for (int r = 0; r < RANKS; r++) {
        members[r] = (member){.rank = r};
        CU_ASSERT_EQUAL_FATAL(pthread_create(&thread[r], NULL, member_main, &members[r]), 0);
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(thread[r], NULL);
        CU_ASSERT_EQUAL(members[r].wrong, 0);
    }
    pthread_barrier_destroy(&together);
}

/* ---- who does not come, and whether its watchdog still runs ---- */

static epo_world *world;

static void *silent_main(void *arg) {
    member *m = arg;
    const epo_backend_config config = {
        .rank = m->rank, .ranks = 3, .threads = world, .timeout_s = 1.6, .warn_s = 5};
    gpu_meet *meet = NULL;
    EXPECT(gpu_meet_open(&config, &meet) == EPO_OK);
    if (meet == NULL)
        return NULL;
    gpu_meet_waits(meet, -1);
    pthread_barrier_wait(&together);
    if (m->rank == 0) {
        EXPECT(gpu_meet_barrier(meet) == EPO_E_TIMEOUT);
        EXPECT(strstr(epo_fail_text(), "rank 1, 2 did not come") != NULL);
        EXPECT(strstr(epo_fail_text(), "no sign of life from rank 1") != NULL);
        EXPECT(strstr(epo_fail_text(), "no sign of life from rank 2") == NULL);
    }
    for (int i = 0; i < 180 && m->rank == 2; i++) { /* late, and alive */
        gpu_meet_waits(meet, -1);
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
    pthread_barrier_wait(&together);
    gpu_meet_close(meet, true);
    return NULL;
}

static void a_process_that_stands_still_is_told(void) {
    pthread_t thread[3];
    member members[3];
    CU_ASSERT_EQUAL_FATAL(gpu_world_create(3, &world), EPO_OK);
    pthread_barrier_init(&together, NULL, 3);
    for (int r = 0; r < 3; r++) {
        members[r] = (member){.rank = r};
        CU_ASSERT_EQUAL_FATAL(pthread_create(&thread[r], NULL, silent_main, &members[r]), 0);
    }
    for (int r = 0; r < 3; r++) {
        pthread_join(thread[r], NULL);
        CU_ASSERT_EQUAL(members[r].wrong, 0);
    }
    pthread_barrier_destroy(&together);
    gpu_world_destroy(world);
}

/* ---- who never came: the next group is everybody's again ---- */

static void *again_main(void *arg) {
    member *m = arg;
    epo_backend_config config = {
        .rank = m->rank, .ranks = 2, .threads = world, .timeout_s = 0.3, .warn_s = 5};
    gpu_meet *meet = NULL;
    if (m->rank == 0) {
        EXPECT(gpu_meet_open(&config, &meet) == EPO_OK);
        EXPECT(gpu_meet_barrier(meet) == EPO_E_TIMEOUT);
        gpu_meet_close(meet, true);
    }
    pthread_barrier_wait(&together);
    config.timeout_s = 20;
    EXPECT(gpu_meet_open(&config, &meet) == EPO_OK);
    EXPECT(gpu_meet_barrier(meet) == EPO_OK);
    gpu_meet_close(meet, false);
    return NULL;
}

static void who_never_came_makes_the_next(void) {
    pthread_t thread[2];
    member members[2];
    CU_ASSERT_EQUAL_FATAL(gpu_world_create(2, &world), EPO_OK);
    pthread_barrier_init(&together, NULL, 2);
    for (int r = 0; r < 2; r++) {
        members[r] = (member){.rank = r};
        CU_ASSERT_EQUAL_FATAL(pthread_create(&thread[r], NULL, again_main, &members[r]), 0);
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(thread[r], NULL);
        CU_ASSERT_EQUAL(members[r].wrong, 0);
    }
    pthread_barrier_destroy(&together);
    gpu_world_destroy(world);
}

int main(void) {
    static const CU_TestInfo tests[] = {
        {"ranks of two machines share", ranks_of_two_machines_share},
        {"a process that stands still is told", a_process_that_stands_still_is_told},
        {"who never came makes the next", who_never_came_makes_the_next},
        CU_TEST_INFO_NULL};
    setenv(EPO_ENV_NODES, "0,0,1,1", 1);
    setenv(EPO_ENV_NODES_APART, "1", 1);
    return unit_run("cuda meet", tests);
}
