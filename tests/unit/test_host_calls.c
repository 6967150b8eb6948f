/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls that a group must not take: from a process forked after it was made, and
 * collective calls that do not belong together.
 */
#include "config.h"

#include <sys/resource.h>

#include "host_processes.h"
#include "unit.h"

#include "backend/host/host.h"

static const epo_backend_ops *ops;

static int text_has(const char *text, const char *part) { return strstr(text, part) != NULL; }

/* ---- a forked process ------------------------------------------------------------ */

/* Every call that could wait for the threads, or change what the ranks share. */
static void use_as_child(proc *me, epo_backend *be, epo_queue *q, epo_event *e) {
    int number = 1, all[2];
    float data = 1;
    epo_window *w;
    const epo_deps deps = {.name = "work", .chunk = -1, .signal = e};
    EXPECT(me, ops->status(be) == EPO_E_STATE && text_has(epo_fail_text(), "forked"));
    EXPECT(me, ops->barrier(be) == EPO_E_STATE);
    EXPECT(me, ops->allgather(be, &number, sizeof number, all) == EPO_E_STATE);
    EXPECT(me, ops->allreduce(be, &data, 1, NULL) == EPO_E_STATE);
    EXPECT(me, ops->window_create(be, 4096, &w) == EPO_E_STATE);
    EXPECT(me, ops->zero(q, NULL, 0, &deps) == EPO_E_STATE);
    e->issued++; /* as if the parent had forked with work under way */
    EXPECT(me, ops->sync(be, e) == EPO_E_STATE);
    ops->abort(be, EPO_E_PEER, "a child has no say");
    ops->event_destroy(be, e);
    ops->queue_destroy(be, q);
    ops->close(be, true);
}

static void fork_and_go_on(procs *all, proc *me) {
    epo_backend *be = NULL;
    epo_queue *q = NULL;
    epo_event *e = NULL;
    (void)all;
    EXPECT(me, ops->open(&me->config, &be) == EPO_OK);
    if (be == NULL)
        return;
    EXPECT(me, ops->queue_create(be, EPO_QUEUE_COMPUTE, &q) == EPO_OK);
    EXPECT(me, ops->event_create(be, &e) == EPO_OK);
    pid_t child = fork();
    if (child == 0) {
        alarm(20); /* a hang is a failure */
        use_as_child(me, be, q, e);
        _exit(0);
    }
    int status = -1;
    EXPECT(me, waitpid(child, &status, 0) == child && status == 0);
    EXPECT(me, ops->barrier(be) == EPO_OK); /* the parents' group is as it was */
    ops->event_destroy(be, e);
    ops->queue_destroy(be, q);
    ops->close(be, false);
}

static void a_forked_process(void) {
    procs *all = procs_new(2, 20.0, fork_and_go_on);
    CU_ASSERT_TRUE(procs_run(all));
    CU_ASSERT_EQUAL(procs_failures(all), 0);
    procs_free(all);
}

/* ---- ranks that are not in the same call -------------------------------------------- */

/* Rank 1's call is another one, told by its number; [0]: what the others do. */
static epo_status collective(epo_backend *be, int kind) {
    static float data[600000]; /* more than one piece of the scratch */
    char all[2 * 64];
    switch (kind) {
    case 0: return ops->barrier(be);
    case 1: return ops->allreduce(be, data, 4, NULL);
    case 2: return ops->allreduce(be, data, 5, NULL);
    case 3: return ops->allreduce(be, data, sizeof data / sizeof *data, NULL);
    case 4: return ops->allgather(be, data, 64, all);
    default: return ops->allgather(be, data, 16, all);
    }
}

static void call_differently(procs *all, proc *me) {
    epo_backend *be = NULL;
    EXPECT(me, ops->open(&me->config, &be) == EPO_OK);
    if (be == NULL)
        return;
    EXPECT(me, ops->barrier(be) == EPO_OK);
    proc_note(me, collective(be, all->shared[me->config.rank]));
    EXPECT(me, ops->status(be) == me->status);
    ops->close(be, me->status != EPO_OK);
}

static void calls_that_differ(void) {
    for (int first = 0; first < 6; first++)
        for (int other = 0; other < 6; other++) {
            procs *all = procs_new(2, 20.0, call_differently);
            all->shared[0] = (unsigned char)first;
            all->shared[1] = (unsigned char)other;
            CU_ASSERT_TRUE(procs_run(all));
            CU_ASSERT_EQUAL(procs_failures(all), 0);
            for (int r = 0; r < 2; r++) {
                CU_ASSERT_EQUAL(all->p[r].status, first == other ? EPO_OK : EPO_E_PEER);
                CU_ASSERT(first == other || text_has(all->p[r].text, "the ranks disagree"));
            }
            procs_free(all);
        }
}

/* ---- OpenBLAS without room ------------------------------------------------------------ */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1 /* they need an address space without a limit */
#else
#define SANITIZED 0
#endif

static void open_in_little_room(procs *all, proc *me) {
    epo_backend *be = NULL;
    (void)all;
    if (me->config.rank == 1) {
        unsigned long pages = 0;
        FILE *f = fopen("/proc/self/statm", "r");
        EXPECT(me, f != NULL && fscanf(f, "%lu", &pages) == 1);
        fclose(f);
        struct rlimit room = {pages * 4096 + (100ul << 20), RLIM_INFINITY};
        EXPECT(me, setrlimit(RLIMIT_AS, &room) == 0);
    }
    proc_note(me, ops->open(&me->config, &be));
    if (be != NULL)
        ops->close(be, false);
}

/* It used to try for ever, at the first GEMM, with the processor all its own. */
static void no_room_for_blas(void) {
    if (SANITIZED) {
        puts("(left out: sanitizer) ");
        return;
    }
    procs *all = procs_new(2, 20.0, open_in_little_room);
    CU_ASSERT_TRUE(procs_run(all));
    CU_ASSERT_EQUAL(procs_failures(all), 0);
    for (int r = 0; r < 2; r++) {
        CU_ASSERT_EQUAL(all->p[r].status, EPO_E_NOMEM);
        CU_ASSERT(text_has(all->p[r].text, "rank 1: OpenBLAS needs"));
    }
    procs_free(all);
}

int main(void) {
    ops = epo_backend_get();
    const CU_TestInfo tests[] = {
        {"a forked process is told, and changes nothing", a_forked_process},
        {"ranks in different calls are told, all of them", calls_that_differ},
        {"no room for OpenBLAS: refused when the group is made", no_room_for_blas},
        CU_TEST_INFO_NULL,
    };
    return unit_run("host calls", tests);
}
