/* SPDX-License-Identifier: Apache-2.0
 *
 * test_probe_run.c - starting the probe: its limits, what it gets, how it fails, and what
 * it finds with a stand-in for NVML.
 */
#include "probe_box.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef EPO_PROBE_PROGRAM
#error "the Makefile says where the probe was built"
#endif

static epo_status ask_gpus(const char *table, const char *visible, const char *held) {
    const char *all[] = {"PATH", "/nonexistent", "", "", "", "", NULL, NULL};
    int n = 2;
    if (visible != NULL) {
        all[n++] = "CUDA_VISIBLE_DEVICES";
        all[n++] = visible;
    }
    if (held != NULL) {
        all[n++] = "SLURM_STEP_GPUS";
        all[n++] = held;
    }
    all[n] = NULL;
    variables = all;
    put("nvml.table", table, 0644);
    epo_status status = start(EPO_PROBE_PROGRAM, true, 20000, NULL, 0);
    variables = NULL;
    return status;
}

static void every_gpu_is_told(void) {
    static const struct {
        const char *table, *name, *major, *capability, *p2p, *nvlink;
    } cases[] = {
        {"* a100 4", "NVIDIA A100-SXM4-80GB", "8", "8.0", "True", "True"},
        {"* h100 8", "NVIDIA H100 80GB HBM3", "9", "9.0", "True", "True"},
        {"* h200 8", "NVIDIA H200", "9", "9.0", "True", "True"},
        {"* b200 8", "NVIDIA B200", "10", "10.0", "True", "True"},
        {"* b300 8", "NVIDIA B300", "10", "10.3", "True", "True"},
        {"* gb200 4", "NVIDIA GB200", "10", "10.0", "True", "True"},
        {"* l40s 4", "NVIDIA L40S", "8", "8.9", "True", "False"},
        {"* l40s 4 nop2p", "NVIDIA L40S", "8", "8.9", "False", "False"},
        {"* v100 4", "Tesla V100-SXM2-32GB", "7", "7.0", "True", "True"},
        {"* rtx5090 2", "NVIDIA GeForce RTX 5090", "12", "12.0", "True", "False"},
        {"* h100 8 nonvlink", "NVIDIA H100 80GB HBM3", "9", "9.0", "True", "False"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CU_ASSERT_EQUAL(ask_gpus(cases[i].table, NULL, NULL), EPO_OK);
        IS("gpu_name", cases[i].name);
        IS("gpu_major", cases[i].major);
        IS("node.compute_capability", cases[i].capability);
        IS("node.all_gpus_p2p", cases[i].p2p);
        IS("node.all_gpus_nvlink", cases[i].nvlink);
        IS("node.driver_version", "570.86.15");
        IS("node.cuda_version", "12.8");
        IS("node.mig", "False");
        IS(EPO_PROBE_STOPPED, "(absent)");
    }
}

static void nodes_are_told_apart(void) {
    CU_ASSERT_EQUAL(ask_gpus("n2 l40s 4\nn1 gb200 4 fabric\n* v100 1\n", NULL, NULL), EPO_OK);
    IS("gpu_name", "NVIDIA GB200");
    IS("node.ranks_per_nvlink_domain", "(unknown)");
    IS("node.nvlink_clique", "0");
}

static void visible_devices_are_read_as_cuda_does(void) {
    static const struct {
        const char *visible, *count, *gpus;
    } cases[] = {
        {"0,1", "2", "0: NVIDIA H100 80GB HBM3; 1: NVIDIA H100 80GB HBM3"},
        {"3", "1", "3: NVIDIA H100 80GB HBM3"},
        {" 2 , 0 ", "2", "2: NVIDIA H100 80GB HBM3; 0: NVIDIA H100 80GB HBM3"},
        {"GPU-000000a1", "1", "1: NVIDIA H100 80GB HBM3"},
        {"GPU-000000a1-0000-0000-0000-000000000000,0", "2",
         "1: NVIDIA H100 80GB HBM3; 0: NVIDIA H100 80GB HBM3"},
        {"1,9,0", "1", "1: NVIDIA H100 80GB HBM3"}, /* 9 hides what follows */
        {"1,,0", "1", "1: NVIDIA H100 80GB HBM3"},
        {"GPU-0", "0", "(absent)"}, /* names several */
        {"", "0", "(absent)"},
        {"-1", "0", "(absent)"},
        {"NoDevFiles", "0", "(absent)"},
        {"99999999999999999999", "0", "(absent)"},
        {"0x1", "0", "(absent)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CU_ASSERT_EQUAL(ask_gpus("* h100 4", cases[i].visible, NULL), EPO_OK);
        IS("node.gpu_count", cases[i].count);
        IS("node.gpus", cases[i].gpus);
    }
    CU_ASSERT_EQUAL(ask_gpus("* h100 4", "0,0", NULL), EPO_OK);
    HAS(why("task.visible_gpus"), "named twice");
}

static void mig_devices_are_found(void) {
    CU_ASSERT_EQUAL(ask_gpus("* a100 2 mig", "MIG-000000a1-0000-0000-0000-000000000001", NULL),
                    EPO_OK);
    IS("node.mig", "True");
    IS("node.gpu_count", "1");
    IS("node.gpus", "1: NVIDIA A100-SXM4-80GB MIG-000000a1-0000-0000-0000-000000000001");
    IS("node.gpu_memory_mib", "40960");
    CU_ASSERT_EQUAL(ask_gpus("* a100 2 mig", "0,1", NULL), EPO_OK);
    IS("node.all_gpus_p2p", "False");
    HAS(why("node.all_gpus_p2p"), "MIG");
}

static void a_task_bound_to_one_gpu_is_seen(void) {
    CU_ASSERT_EQUAL(ask_gpus("* h100 4 nop2p", "2", "0-3"), EPO_OK);
    IS("task.sees_all_gpus", "False");
    IS("task.visible_gpus", "1");
    IS("node.gpu_count", "4");
    IS("node.all_gpus_p2p", "False");
    CU_ASSERT_EQUAL(ask_gpus("* h100 4", "0,1", "2,3"), EPO_OK); /* renumbered by a cgroup */
    IS("task.sees_all_gpus", "True");
}

/* Slurm 22.05 names to a bound task its own part only. */
static void a_bound_task_among_others_is_seen(void) {
    static const struct {
        const char *bind, *visible, *tasks, *sees;
    } cases[] = {
        {"gpu:per_task:1", "2", "4", "False"},        {"gpu:single:1", "0", "1,4", "False"},
        {"gpu:per_task:1", "2", "1(x2)", "(absent)"}, {"gpu:none", "2", "4", "(absent)"},
        {"gpu:closest", "0,1,2,3", "4", "True"},      {"mem:x", "0", "4", "(absent)"},
        {"gres/gpu:per_task:1", "2", "4", "False"},   {"gres/gpu:none", "2", "4", "(absent)"}};
    put("nvml.table", "* h100 4", 0644);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *vars[] = {"SLURMD_TRES_BIND",
                              cases[i].bind,
                              "SLURM_GPUS_ON_NODE",
                              "4",
                              "SLURM_STEP_TASKS_PER_NODE",
                              cases[i].tasks,
                              "CUDA_VISIBLE_DEVICES",
                              cases[i].visible,
                              NULL};
        variables = vars;
        CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 20000, NULL, 0), EPO_OK);
        IS("task.sees_all_gpus", cases[i].sees);
    }
    variables = NULL;
}

static void what_is_no_gpu_is_told(void) {
    CU_ASSERT_EQUAL(ask_gpus("* none 0", NULL, NULL), EPO_OK);
    IS("node.gpu_count", "0");
    IS("gpu_name", "(unset)");
    CU_ASSERT_EQUAL(ask_gpus("* h100 4 closed", NULL, NULL), EPO_OK);
    IS("node.gpu_count", "3");
    IS("node.gpus_total", "4");
    CU_ASSERT_EQUAL(ask_gpus("* h100 4 mixed", NULL, NULL), EPO_OK);
    IS("gpu_name", "(unknown)");
    HAS(why("gpu_name"), "NVIDIA L40S");
    CU_ASSERT_EQUAL(ask_gpus("* broken 0", NULL, NULL), EPO_OK);
    IS("node.gpu_count", "(unknown)");
    HAS(why("gpu_name"), "Driver/library version mismatch");
    CU_ASSERT_EQUAL(ask_gpus("* hostile 1", NULL, NULL), EPO_OK);
    IS("gpu_name", "NVIDIA??[2J\"$(id)\\H100");
}

/* The limit is generous, the machine may be busy; a hang would take for ever. */
static void a_hang_and_a_crash_end_with_the_reason(void) {
    static const char *const vars[] = {"PATH", "/nonexistent", NULL};
    variables = vars;
    put("nvml.table", "* hang 0", 0644);
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 1500, NULL, 0), EPO_OK);
    IS(EPO_PROBE_STOPPED, "(unknown)");
    HAS(why(EPO_PROBE_STOPPED), "NVML");
    IS("gpu_name", "(unknown)");
    IS("in_container", text_of("in_container")); /* what was found before is there */
    CU_ASSERT_NOT_EQUAL(strcmp(text_of("in_container"), "(absent)"), 0);
    put("nvml.table", "* stuck 0", 0644);
    double begin = seconds();
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 1500, NULL, 0), EPO_E_TIMEOUT);
    CU_ASSERT_TRUE(seconds() - begin < 60);
    HAS(epo_fail_text(), "1500 ms");
    CU_ASSERT_EQUAL(epo_facts_count(facts), 0);
    put("nvml.table", "* crash 0", 0644);
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 20000, NULL, 0), EPO_OK);
    HAS(why(EPO_PROBE_STOPPED), "NVML");
    variables = NULL;
}

static void other_programs_are_no_probe(void) {
    char other[512];
    path_of(other, "other");
    copy("/bin/true", "other");
    CU_ASSERT_EQUAL(start(other, false, 20000, NULL, 0), EPO_E_ARG);
    HAS(epo_fail_text(), "0 bytes");
    copy("/bin/false", "other");
    CU_ASSERT_EQUAL(start(other, false, 20000, NULL, 0), EPO_E_SYSTEM);
    HAS(epo_fail_text(), "status 1");
    put("other", "not a program", 0755);
    CU_ASSERT_EQUAL(start(other, false, 20000, NULL, 0), EPO_E_SYSTEM);
    HAS(epo_fail_text(), "cannot be executed");
}

/* No descriptor, no zombie, no signal mask is left to the task. */
static void nothing_is_left_behind(void) {
    int before = dup(2);
    close(before);
    put("nvml.table", "* h100 2", 0644);
    for (int i = 0; i < 5; i++)
        CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 20000, NULL, 0), EPO_OK);
    int after = dup(2);
    close(after);
    CU_ASSERT_EQUAL(before, after);
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(every_gpu_is_told),
                                 TEST(nodes_are_told_apart),
                                 TEST(visible_devices_are_read_as_cuda_does),
                                 TEST(mig_devices_are_found),
                                 TEST(a_task_bound_to_one_gpu_is_seen),
                                 TEST(a_bound_task_among_others_is_seen),
                                 TEST(what_is_no_gpu_is_told),
                                 TEST(a_hang_and_a_crash_end_with_the_reason),
                                 TEST(other_programs_are_no_probe),
                                 TEST(nothing_is_left_behind),
                                 CU_TEST_INFO_NULL};
    return probe_box_run("probe", tests);
}
