/* SPDX-License-Identifier: Apache-2.0
 *
 * test_api_environment - ranks and switches from the environment: each source,
 * their order, and every value that must be refused.
 */
#include "core/status.h"
#include "preload/environment.h"
#include "unit.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* An environment that holds "NAME=value" ... NULL of what this library reads. */
static void only(const char *first, ...) {
    va_list args;
    CU_ASSERT_EQUAL_FATAL(clearenv(), 0);
    va_start(args, first);
    for (const char *s = first; s != NULL; s = va_arg(args, const char *)) {
        char name[64];
        const char *equal = strchr(s, '=');
        CU_ASSERT_FATAL(equal != NULL && (size_t)(equal - s) < sizeof name);
        memcpy(name, s, (size_t)(equal - s));
        name[equal - s] = '\0';
        setenv(name, equal + 1, 1);
    }
    va_end(args);
}

static void found(int want_rank, int want_ranks, const char *want_source) {
    int rank = -9, ranks = -9;
    const char *source = "";
    epo_status status = epo_ranks_find(&rank, &ranks, &source);
    if (status != EPO_OK)
        fprintf(stderr, "%s\n", epo_fail_text());
    CU_ASSERT_EQUAL(status, EPO_OK);
    CU_ASSERT_EQUAL(rank, want_rank);
    CU_ASSERT_EQUAL(ranks, want_ranks);
    CU_ASSERT_STRING_EQUAL(source, want_source);
}

/* Refused, the text holds `a` and `b`, the outputs stay. */
static void refused(const char *a, const char *b) {
    int rank = -9, ranks = -9;
    const char *source = "untouched";
    CU_ASSERT_EQUAL(epo_ranks_find(&rank, &ranks, &source), EPO_E_ARG);
    if (strstr(epo_fail_text(), a) == NULL || strstr(epo_fail_text(), b) == NULL)
        fprintf(stderr, "not in the text: %s / %s: %s\n", a, b, epo_fail_text());
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), a));
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), b));
    CU_ASSERT(rank == -9 && ranks == -9 && strcmp(source, "untouched") == 0);
}

static void each_source(void) {
    only(NULL);
    found(0, 1, "default");
    only("RANK=2", "WORLD_SIZE=4", "LOCAL_RANK=2", NULL);
    found(2, 4, "RANK");
    only("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=3", NULL);
    found(1, 3, "OMPI_COMM_WORLD_RANK");
    only("PMIX_RANK=1", "SLURM_STEP_NUM_TASKS=2", NULL);
    found(1, 2, "PMIX_RANK");
    only("PMI_RANK=0", "PMI_SIZE=2", NULL);
    found(0, 2, "PMI_RANK");
    only("SLURM_PROCID=3", "SLURM_NTASKS=8", "SLURM_STEP_NUM_TASKS=4", "SLURM_JOB_ID=1", NULL);
    found(3, 4, "SLURM_PROCID");
    only("RANK=", "WORLD_SIZE=", NULL); /* empty is unset */
    found(0, 1, "default");
}

static void their_order(void) {
    only("RANK=1", "WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=3", "PMI_RANK=3",
         "PMI_SIZE=4", "SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=5", NULL);
    found(1, 2, "RANK");
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    found(2, 3, "OMPI_COMM_WORLD_RANK");
    unsetenv("OMPI_COMM_WORLD_RANK");
    unsetenv("OMPI_COMM_WORLD_SIZE");
    found(3, 4, "PMI_RANK");
    setenv("PMIX_RANK", "2", 1);
    found(2, 4, "PMIX_RANK");
    unsetenv("PMIX_RANK");
    unsetenv("PMI_RANK");
    found(4, 5, "SLURM_PROCID");
}

/* The batch script has SLURM_PROCID=0 and the job's SLURM_NTASKS: a program that
 * it starts without srun is alone and must not wait for three others. */
static void batch_script_is_no_task(void) {
    only("SLURM_JOB_ID=7", "SLURM_PROCID=0", "SLURM_NTASKS=4", NULL);
    found(0, 1, "default");
    setenv("SLURM_STEP_ID", "0", 1);
    found(0, 4, "SLURM_PROCID");
}

static void malformed(void) {
    only("RANK=two", "WORLD_SIZE=4", NULL);
    refused("RANK: found \"two\"", "0..3");
    only("RANK=4", "WORLD_SIZE=4", NULL);
    refused("RANK: found \"4\"", "0..3");
    only("RANK=-1", "WORLD_SIZE=4", NULL);
    refused("RANK: found \"-1\"", "0..3");
    only("RANK=0", "WORLD_SIZE=0", NULL);
    refused("WORLD_SIZE: found \"0\"", "from 1");
    only("RANK=0", "WORLD_SIZE=99999999999999999999", NULL);
    refused("WORLD_SIZE", "from 1");
    only("RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=2", NULL);
    refused("LOCAL_RANK: found \"2\"", "0..1");
    only("SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=4x", NULL);
    refused("SLURM_STEP_NUM_TASKS", "4x");
}

static void half_set(void) {
    only("RANK=1", NULL);
    refused("RANK is \"1\"", "WORLD_SIZE is not set");
    only("WORLD_SIZE=2", NULL);
    refused("WORLD_SIZE is \"2\"", "RANK is not set");
    only("OMPI_COMM_WORLD_SIZE=2", NULL);
    refused("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK is not set");
    only("PMIX_RANK=1", NULL);
    refused("PMIX_RANK", "PMI_SIZE is not set");
    only("SLURM_PROCID=1", NULL);
    refused("SLURM_PROCID", "SLURM_STEP_NUM_TASKS is not set");
    /* scripts export WORLD_SIZE for every task; fine where Slurm agrees */
    only("WORLD_SIZE=2", "SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=2", NULL);
    found(1, 2, "SLURM_PROCID");
    only("WORLD_SIZE=3", "SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=2", NULL);
    refused("WORLD_SIZE is \"3\"", "contradicts SLURM_PROCID");
}

static epo_group_config resolved;
static char reason[EPO_REASON_MAX];

static epo_status resolve(int overlap, int dispatcher, int delay) {
    epo_group_config c = EPO_GROUP_CONFIG_INIT;
    c.overlap = (epo_switch)overlap;
    c.dispatcher = (epo_dispatcher)dispatcher;
    c.delay_wgrad = (epo_switch)delay;
    epo_status status = epo_environment_resolve(&c, reason);
    if (status == EPO_OK)
        resolved = c;
    return status;
}

static void switches(void) {
    only(NULL);
    CU_ASSERT_EQUAL(resolve(-1, -1, -1), EPO_OK);
    CU_ASSERT(resolved.overlap == EPO_OFF && resolved.dispatcher == EPO_DISPATCH_ALLTOALL &&
              resolved.delay_wgrad == EPO_OFF && resolved.chunks == 1);
    CU_ASSERT_PTR_NOT_NULL(strstr(reason, "off: nothing asked for it"));
    CU_ASSERT(resolved.timeout_s == 600 && resolved.warn_s == 30 &&
              resolved.wgrad_limit_bytes == UINT64_C(1) << 30);
    only("EP_OVERLAP_DECISION=on", "EP_OVERLAP_REASON=srun --ep-overlap=on",
         "EP_OVERLAP_DISPATCHER=flex", "EP_OVERLAP_DELAY_WGRAD=1", "EP_OVERLAP_CHUNKS=4",
         "EP_OVERLAP_TIMEOUT=2.5", NULL);
    CU_ASSERT_EQUAL(resolve(-1, -1, -1), EPO_OK);
    CU_ASSERT(resolved.overlap == EPO_ON && resolved.dispatcher == EPO_DISPATCH_FLEX &&
              resolved.delay_wgrad == EPO_ON && resolved.chunks == 4 && resolved.timeout_s == 2.5);
    CU_ASSERT_STRING_EQUAL(reason, "on: by the job, srun --ep-overlap=on");
    CU_ASSERT_EQUAL(resolve(EPO_OFF, EPO_DISPATCH_ALLTOALL, -1), EPO_OK); /* drops the companion */
    CU_ASSERT(resolved.overlap == EPO_OFF && resolved.dispatcher == EPO_DISPATCH_ALLTOALL &&
              resolved.delay_wgrad == EPO_OFF && resolved.chunks == 1);
    CU_ASSERT_STRING_EQUAL(reason, "off: the program asked for it");
    CU_ASSERT_EQUAL(resolve(EPO_ON, EPO_DISPATCH_FLEX, EPO_OFF), EPO_OK);
    CU_ASSERT(resolved.overlap == EPO_ON && resolved.dispatcher == EPO_DISPATCH_FLEX &&
              resolved.delay_wgrad == EPO_OFF);
}

static void refused_switches(void) {
    only("EP_OVERLAP_DECISION=off", "EP_OVERLAP_DELAY_WGRAD=1", "EP_OVERLAP_REASON=site lock",
         NULL);
    CU_ASSERT_EQUAL(resolve(-1, -1, -1), EPO_E_ARG);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "site lock"));
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "EP_OVERLAP_DELAY_WGRAD=1"));
    only(NULL);
    CU_ASSERT_EQUAL(resolve(EPO_OFF, -1, EPO_ON), EPO_E_ARG);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "off: the program asked for it"));
    CU_ASSERT_EQUAL(resolve(-1, -1, EPO_ON), EPO_E_ARG);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "nothing asked for it"));
    CU_ASSERT_EQUAL(resolve(5, -1, -1), EPO_E_ARG);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "overlap: found 5"));
    CU_ASSERT_EQUAL(resolve(-1, 2, -1), EPO_E_ARG);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "dispatcher: found 2"));
    CU_ASSERT_EQUAL(resolve(-1, -1, 7), EPO_E_ARG);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "delay_wgrad: found 7"));
    static const char *const bad[][2] = {
        {"EP_OVERLAP_DECISION=maybe", "on"},      {"EP_OVERLAP_DISPATCHER=fast", "flex"},
        {"EP_OVERLAP_DELAY_WGRAD=yes", "0 or 1"}, {"EP_OVERLAP_CHUNKS=many", "1024"},
        {"EP_OVERLAP_CHUNKS=1025", "1024"},       {"EP_OVERLAP_TIMEOUT=0", "more than 0"},
        {"EP_OVERLAP_TIMEOUT=-3", "more than 0"}, {"EP_OVERLAP_TIMEOUT=1e9", "more than 0"},
        {"EP_OVERLAP_TIMEOUT=.", "more than 0"}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        only(bad[i][0], NULL);
        CU_ASSERT_EQUAL(resolve(-1, -1, -1), EPO_E_ARG);
        CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), bad[i][1]));
        CU_ASSERT_NSTRING_EQUAL(epo_fail_text(), bad[i][0], 15);
    }
}

static void callers_ranks_and_members(void) {
    static const int pair[2] = {3, 1}, twice[2] = {1, 1}, far[2] = {1, 4}, others[2] = {0, 2};
    epo_group_config c = EPO_GROUP_CONFIG_INIT;
    only("RANK=0", "WORLD_SIZE=2", NULL);
    c.rank = 1;
    c.ranks = 4;
    CU_ASSERT_EQUAL(epo_environment_resolve(&c, reason), EPO_OK);
    CU_ASSERT(c.rank == 1 && c.ranks == 4);
    c.members = pair;
    c.nmembers = 2;
    CU_ASSERT_EQUAL(epo_environment_resolve(&c, reason), EPO_OK);
    c.members = twice;
    CU_ASSERT_EQUAL(epo_environment_resolve(&c, reason), EPO_E_ARG);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "once"));
    c.members = far;
    CU_ASSERT_EQUAL(epo_environment_resolve(&c, reason), EPO_E_ARG);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "members[1]: found 4"));
    c.members = others;
    CU_ASSERT_EQUAL(epo_environment_resolve(&c, reason), EPO_E_ARG);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "does not list this rank (1)"));
    c.nmembers = 5;
    CU_ASSERT_EQUAL(epo_environment_resolve(&c, reason), EPO_E_ARG);
    c.members = NULL;
    CU_ASSERT_EQUAL(epo_environment_resolve(&c, reason), EPO_E_ARG);
    c.nmembers = 0;
    c.rank = 4;
    CU_ASSERT_EQUAL(epo_environment_resolve(&c, reason), EPO_E_ARG);
    c.rank = 0;
    c.ranks = -1;
    CU_ASSERT_EQUAL(epo_environment_resolve(&c, reason), EPO_E_ARG);
    c.ranks = 1;
    c.timeout_s = -1;
    CU_ASSERT_EQUAL(epo_environment_resolve(&c, reason), EPO_E_ARG);
    c.timeout_s = 0;
    c.warn_s = -1;
    CU_ASSERT_EQUAL(epo_environment_resolve(&c, reason), EPO_E_ARG);
    c.warn_s = 0;
    c.chunks = -1;
    CU_ASSERT_EQUAL(epo_environment_resolve(&c, reason), EPO_E_ARG);
    c.chunks = 1024;
    CU_ASSERT_EQUAL(epo_environment_resolve(&c, reason), EPO_OK);
    c.chunks = 1025;
    CU_ASSERT_EQUAL(epo_environment_resolve(&c, reason), EPO_E_ARG);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"each source of ranks", each_source},
        {"the order of the sources", their_order},
        {"a batch script is no task", batch_script_is_no_task},
        {"malformed ranks", malformed},
        {"half-set ranks", half_set},
        {"switches and numbers", switches},
        {"refused switches and numbers", refused_switches},
        {"the caller's ranks and members", callers_ranks_and_members},
        CU_TEST_INFO_NULL,
    };
    return unit_run("api environment", tests);
}
