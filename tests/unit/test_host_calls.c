/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls that a group must not take: from a process forked after it was made.
 */
#include "config.h"

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

int main(void) {
    ops = epo_backend_get();
    const CU_TestInfo tests[] = {
        {"a forked process is told, and changes nothing", a_forked_process},
        CU_TEST_INFO_NULL,
    };
    return unit_run("host calls", tests);
}
