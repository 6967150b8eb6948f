/* SPDX-License-Identifier: Apache-2.0
 *
 * test_spank_refuse.c - what cannot be served: how a step ends, or goes on as off, what is
 * said of it, once, and what slurmd's log holds.
 */
#include "spank_box.h"

#include "core/names.h"
#include "core/policy.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void a_missing_library_ends_the_step_once(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    unlink(library);
    fake_put(&fake.own, "SLURM_CONF", "/etc/slurm/other.conf");
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    CU_ASSERT_EQUAL(lines(fake.said), 1);
    HAS(fake.said, "ep-overlap: n1: the library cannot be preloaded: ");
    HAS(fake.ran, "\n7.0\n");
    HAS(fake.ran, "SLURM_CONF=/etc/slurm/other.conf");
    CU_ASSERT_PTR_NULL(fake_get(&fake.task, EPO_OUT_DECISION));
    /* the next task of the node */
    fake_next(S_CTX_REMOTE);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    CU_ASSERT_STRING_EQUAL(fake.said, "");
    CU_ASSERT_STRING_EQUAL(fake.ran, "");
    make_library();
    fake_end();
}

static void a_step_of_one_task_needs_no_scancel(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    unlink(library);
    fake.tasks = 1;
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    CU_ASSERT_STRING_EQUAL(fake.ran, "");
    make_library();
    fake_end();
}

static void a_failing_scancel_is_told(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    unlink(library);
    fake.run_status = 1;
    srun_to_task(give_on);
    ep_task_start(&plugin, NULL);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    HAS(fake.said, "failed; other tasks may wait");
    make_library();
    fake_end();
}

static void a_missing_library_leaves_a_default_off(void) {
    fake_begin(S_CTX_LOCAL);
    configure("defaults = { overlap = \"on\"; };");
    unlink(library);
    srun_to_task(NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.exit_task, -1);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "off");
    HAS(fake_get(&fake.task, EPO_OUT_REASON), "cannot be preloaded");
    CU_ASSERT_PTR_NULL(fake_get(&fake.task, "LD_PRELOAD"));
    make_library();
    fake_end();
}

static void on_failed_request_warn_goes_on_as_off(void) {
    fake_begin(S_CTX_LOCAL);
    configure("on_failed_request = \"warn\";");
    unlink(library);
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.exit_task, -1);
    HAS(fake.said, "off instead of on");
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "off");
    make_library();
    fake_end();
}

static void an_environment_that_cannot_be_set_fails_a_request(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    srun_to_task(give_on);
    fake.fail_setenv = true;
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    HAS(fake.said, "cannot be set");
    fake_end();
}

static void require_gpu_refuses_a_step_without(void) {
    fake_begin(S_CTX_LOCAL);
    configure("checks = { require_gpu = true; };");
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    HAS(fake.said, "holds no GPU");
    fake_put(&fake.task, "SLURM_STEP_GPUS", "3");
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    fake_end();
}

static void a_library_that_the_task_does_not_see(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    srun_to_task(give_on);
    unlink(library); /* as in a container without the mount */
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "has to be mounted (--container-mounts=");
    make_library();
    srun_to_task(give_on);
    char other[400];
    snprintf(other, sizeof other, "%s.old", library);
    CU_ASSERT_EQUAL(rename(library, other), 0);
    make_library(); /* another file of that name */
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "is another file for the task");
    unlink(other);
    fake_end();
}

#define SITE_ON "defaults = { overlap = \"on\"; };"

/* The library is missing on this node, and another one may have it. */
static void a_default_of_several_nodes_ends_where_the_library_is_missing(void) {
    fake_begin(S_CTX_LOCAL);
    configure(SITE_ON);
    unlink(library);
    fake.step_nodes = 2;
    srun_to_task(NULL);
    HAS(fake.log, "step 7.0: refused: the library cannot be preloaded: ");
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    HAS(fake.said, "ep-overlap: n1: the library cannot be preloaded: ");
    HAS(fake.said, "n1: overlap is on by the site's default, and the nodes of a step must not "
                   "differ; srun --ep-overlap=off runs it without\n");
    HAS(fake.ran, "\n7.0\n");
    fake_end();
    /* components of a heterogeneous job are nodes, too */
    fake_begin(S_CTX_LOCAL);
    configure(SITE_ON);
    fake_put(&fake.task, "SLURM_HET_SIZE", "2");
    fake_put(&fake.task, "SLURM_JOB_ID", "6"); /* the first one's */
    fake.tasks = 1;
    srun_to_task(NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.ran, "\n6.0\n");
    fake_put(&fake.task, "SLURM_JOB_ID", "6 --all");
    srun_to_task(NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.ran, "\n7.0\n");
    fake_end();
    /* unless the site prefers steps that go on */
    fake_begin(S_CTX_LOCAL);
    configure(SITE_ON "on_failed_request = \"warn\";");
    fake.step_nodes = 2;
    srun_to_task(NULL);
    HAS(fake.log, "step 7.0: off (the library cannot be preloaded: ");
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    make_library();
    fake_end();
}

static void the_steps_line_says_what_is_known_of_the_library(void) {
    fake_begin(S_CTX_LOCAL);
    configure("on_failed_request = \"warn\";");
    unlink(library);
    srun_to_task(give_on);
    HAS(fake.log, "step 7.0: off instead of on (the library cannot be preloaded: ");
    HAS_NOT(fake.log, ": on");
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(lines(fake.said), 1);
    HAS(fake.said, "ep-overlap: n1: off instead of on: the library cannot be preloaded: ");
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "off");
    /* the next task of the node, and the end of the step, have no more to say */
    fake_next(S_CTX_REMOTE);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    ep_serve_log(&plugin);
    CU_ASSERT_STRING_EQUAL(fake.said, "");
    CU_ASSERT_STRING_EQUAL(fake.log, "");
    make_library();
    fake_end();
}

/* The tasks run in copies of the context; slurmstepd's own still says on. */
static void log_the_end(void) {
    plugin.decision.on = true;
    fake.log[0] = '\0';
    ep_serve_log(&plugin);
}

static void what_a_task_finds_stands_in_the_log_at_the_end(void) {
    static const struct {
        const char *site, *want;
        void (*options)(void);
        int result;
    } cases[] = {
        {"checks = { require_gpu = true; };", "step 7.0: was refused by a task: the step holds",
         give_on, -1},
        {"checks = { require_gpu = true; }; on_failed_request = \"warn\";",
         "step 7.0: was off instead of on, and does not count as on: the step holds", give_on, 0},
        {"checks = { require_gpu = true; };" SITE_ON, "step 7.0: was off: the step holds", NULL, 0},
        {"", NULL, give_on, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fake_begin(S_CTX_LOCAL);
        configure(cases[i].site);
        srun_to_task(cases[i].options);
        HAS(fake.log, "step 7.0: on");
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), cases[i].result);
        log_the_end();
        CU_ASSERT_EQUAL(lines(fake.log), cases[i].want != NULL);
        if (cases[i].want != NULL)
            HAS(fake.log, cases[i].want);
        fake_end();
    }
}

static void take_framework(void) {
    static const char *const words[] = {"python", "pretrain_gpt.py", "--num-experts", "8"};
    for (int i = 0; i < 4; i++)
        fake.arguments[i] = (char *)(uintptr_t)words[i];
    fake.argument_count = 4;
    fake.step_nodes = 2;
}

static epo_status no_p2p(const struct epo_probe_request *request, epo_facts *facts) {
    (void)request;
    epo_facts_set_text(facts, "gpu_name", "NVIDIA L40S", "NVML");
    return epo_facts_set(facts, "node.all_gpus_p2p", "False", "NVML");
}

static void what_all_nodes_find_is_said_by_the_first_node(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    take_framework();
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "n1: ARG-OVERLAP: ");
    HAS(fake.said, "n1: OVL-001: ");
    CU_ASSERT_EQUAL(fake.paused_ms, 0);
    HAS(fake.ran, "\n7.0\n");
    /* its other tasks leave at once and say nothing */
    fake_next(S_CTX_REMOTE);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_STRING_EQUAL(fake.said, "");
    CU_ASSERT_EQUAL(fake.paused_ms, 0);
    fake_end();
}

static void another_node_leaves_that_to_the_first(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    take_framework();
    fake_put(&fake.task, "SLURM_NODEID", "1");
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_STRING_EQUAL(fake.said, "");
    CU_ASSERT_EQUAL(fake.paused_ms, 1000); /* time for the first node to speak */
    HAS(fake.ran, "\n7.0\n");
    log_the_end();
    HAS(fake.log, "was refused by a task: ARG-OVERLAP");
    fake_next(S_CTX_REMOTE); /* another task of this node waits, too */
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.paused_ms, 2000);
    CU_ASSERT_STRING_EQUAL(fake.said, "");
    fake_end();
    /* what is this node's own is not held back */
    fake_begin(S_CTX_LOCAL);
    configure("");
    fake.node = 1;
    fake.step_nodes = 2;
    fake_put(&fake.task, "SLURM_STEP_GPUS", "0,1");
    fake.probe = no_p2p;
    srun_to_task(give_all);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "n1: ");
    CU_ASSERT_EQUAL(fake.paused_ms, 0);
    fake_end();
}

/* srun has refused, by the nodes it was given: every node knows it. */
static void a_refusal_of_srun_is_said_once(void) {
    fake_begin(S_CTX_LOCAL);
    configure("policy = ( { match = { node = \"n2\"; }; action = \"deny\"; } );");
    fake_put(&fake.own, "SLURM_NODELIST", "n[1-2]");
    fake_put(&fake.task, "SLURM_NODEID", "1");
    fake.step_nodes = 2;
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.paused_ms, 1000);
    CU_ASSERT_STRING_EQUAL(fake.said, "");
    fake_put(&fake.task, "SLURM_NODEID", "0");
    fake.paused_ms = 0;
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.paused_ms, 0);
    HAS(fake.said, "n1: --ep-overlap=on is denied");
    fake_end();
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(a_missing_library_ends_the_step_once),
                                 TEST(a_step_of_one_task_needs_no_scancel),
                                 TEST(a_failing_scancel_is_told),
                                 TEST(a_missing_library_leaves_a_default_off),
                                 TEST(on_failed_request_warn_goes_on_as_off),
                                 TEST(an_environment_that_cannot_be_set_fails_a_request),
                                 TEST(require_gpu_refuses_a_step_without),
                                 TEST(a_library_that_the_task_does_not_see),
                                 TEST(a_default_of_several_nodes_ends_where_the_library_is_missing),
                                 TEST(the_steps_line_says_what_is_known_of_the_library),
                                 TEST(what_a_task_finds_stands_in_the_log_at_the_end),
                                 TEST(what_all_nodes_find_is_said_by_the_first_node),
                                 TEST(another_node_leaves_that_to_the_first),
                                 TEST(a_refusal_of_srun_is_said_once),
                                 CU_TEST_INFO_NULL};
    return box_run("spank refuses", tests);
}
