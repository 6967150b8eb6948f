/* SPDX-License-Identifier: Apache-2.0
 *
 * test_spank_faults.c - every call of the seam fails in turn, in every hook: nothing fails
 * before task_init, and there a request is served, or refused with the reason.
 */
#include "spank_box.h"

#include "core/names.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static struct wrap_spank broken; /* the fake with one call that fails */

static int no_number(spank_t spank, spank_item_t item, uint32_t *value) {
    (void)spank;
    (void)item;
    (void)value;
    return -1;
}
static int no_groups(spank_t spank, int room, gid_t *groups) {
    (void)spank;
    (void)room;
    (void)groups;
    return -1;
}
static int no_arguments(spank_t spank, int *count, char ***arguments) {
    (void)spank;
    (void)count;
    (void)arguments;
    return -1;
}
static char *no_variable(spank_t spank, const char *name) {
    (void)spank;
    (void)name;
    return NULL;
}
static int no_change(spank_t spank, const char *name, const char *value) {
    (void)spank;
    (void)name;
    (void)value;
    return -1;
}
static int no_removal(spank_t spank, const char *name) {
    (void)spank;
    (void)name;
    return -1;
}
static const char *no_own(const char *name) {
    (void)name;
    return NULL;
}
static int no_run(char *const arguments[], char *const environment[], int ms, char *said,
                  size_t room) {
    (void)arguments;
    (void)environment;
    (void)ms;
    if (said != NULL && room > 0)
        said[0] = '\0';
    return -1;
}
static epo_status no_probe(const struct epo_probe_request *request, epo_facts *facts) {
    (void)request;
    (void)facts;
    return epo_fail(EPO_E_TIMEOUT, "the probe was killed");
}

static void break_numbers(void) { broken.get_number = no_number; }
static void break_groups(void) { broken.get_groups = no_groups; }
static void break_arguments(void) { broken.get_arguments = no_arguments; }
static void break_getenv(void) { broken.task_getenv = no_variable; }
static void break_setenv(void) { broken.task_setenv = no_change; }
static void break_unsetenv(void) { broken.task_unsetenv = no_removal; }
static void break_own(void) { broken.own_getenv = no_own; }
static void break_run(void) { broken.run = no_run; }
static void break_probe(void) { broken.probe = no_probe; }
static void break_nothing(void) {}

static const struct {
    void (*fault)(void);
    bool served;      /* with an explicit on */
    const char *told; /* on the task's stderr */
} faults[] = {
    {break_nothing, true, "ep-overlap: on, "},
    {break_numbers, false, "Slurm does not tell which step this is"},
    {break_groups, true, "ep-overlap: on, "}, /* a rule on groups matches nobody then */
    {break_arguments, true, "ep-overlap: on, "},
    {break_getenv, true, "ep-overlap: on, "},
    {break_setenv, false, "cannot be set in the task's environment"},
    {break_unsetenv, true, "ep-overlap: on, "},
    {break_own, true, "ep-overlap: on, "},
    {break_run, true, "not preloaded: the loader does not take the library"},
    {break_probe, true, "warning NODE-PROBE: found the probe was stopped the probe was killed"},
};
#define FAULTS (sizeof faults / sizeof faults[0])

/* The step's hooks on a node, the fault from the first of them on. */
static int serve(size_t fault, void (*options)(void)) {
    broken = wrap_spank_fake;
    faults[fault].fault();
    fake_put(&fake.task, "SLURM_STEP_GPUS", "0,1");
    fake_put(&fake.own, "SLURMD_NODENAME", "n1");
    begin(S_CTX_REMOTE);
    plugin.api = &broken;
    if (options != NULL)
        options(); /* every callback is held to 0 */
    ep_step_decide(&plugin, NULL);
    CU_ASSERT_STRING_EQUAL(fake.said, ""); /* nothing is said before a task's stderr exists */
    CU_ASSERT_EQUAL(fake.exit_task, -1);
    return ep_task_start(&plugin, NULL);
}

static void a_request_is_served_or_refused_with_the_reason(void) {
    for (size_t i = 0; i < FAULTS; i++) {
        fake_begin(S_CTX_REMOTE);
        configure("");
        int result = serve(i, give_on);
        CU_ASSERT_EQUAL(result, faults[i].served ? 0 : -1);
        CU_ASSERT_EQUAL(fake.exit_task, faults[i].served ? -1 : 1);
        HAS(fake.said, faults[i].told);
        fake_end();
    }
}

static void nobody_who_did_not_ask_is_touched(void) {
    for (size_t i = 0; i < FAULTS; i++) {
        fake_begin(S_CTX_REMOTE);
        configure("");
        CU_ASSERT_EQUAL(serve(i, NULL), 0);
        CU_ASSERT_EQUAL(fake.exit_task, -1);
        CU_ASSERT_STRING_EQUAL(fake.said, "");
        CU_ASSERT_EQUAL(fake.task.count, 1); /* what was there before */
        fake_end();
    }
}

/* Without the mapping every task stands for itself. */
static void without_shared_memory_every_task_looks_itself(void) {
    struct rlimit before, none;
    fake_begin(S_CTX_REMOTE);
    configure("");
    fake_put(&fake.task, "SLURM_STEP_GPUS", "0,1");
    fake_put(&fake.own, "SLURMD_NODENAME", "n1");
    begin(S_CTX_REMOTE);
    give_on();
    CU_ASSERT_EQUAL(getrlimit(RLIMIT_AS, &before), 0);
    none = before;
    none.rlim_cur = 0;
    CU_ASSERT_EQUAL(setrlimit(RLIMIT_AS, &none), 0);
    struct ep_shared *shared = ep_shared_create();
    CU_ASSERT_EQUAL(setrlimit(RLIMIT_AS, &before), 0);
    CU_ASSERT_PTR_NULL(shared);
    ep_step_decide(&plugin, NULL);
    ep_shared_destroy(plugin.shared);
    plugin.shared = NULL;
    for (int task = 1; task <= 2; task++) {
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
        CU_ASSERT_EQUAL(fake.probes, 1); /* kept in the context, which a fork copies */
        CU_ASSERT_EQUAL(fake.tries, task);
    }
    ep_serve_log(&plugin);
    fake_end();
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(a_request_is_served_or_refused_with_the_reason),
                                 TEST(nobody_who_did_not_ask_is_touched),
                                 TEST(without_shared_memory_every_task_looks_itself),
                                 CU_TEST_INFO_NULL};
    return box_run("spank faults", tests);
}
