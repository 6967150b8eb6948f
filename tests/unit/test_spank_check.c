/* SPDX-License-Identifier: Apache-2.0
 *
 * test_spank_check.c - what a node's facts and a program's arguments do to a step.
 */
#include "spank_box.h"

#include "core/names.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void take_arguments(const char *const *words) {
    fake.argument_count = 0;
    while (words[fake.argument_count] != NULL) {
        fake.arguments[fake.argument_count] = (char *)(uintptr_t)words[fake.argument_count];
        fake.argument_count++;
    }
}

static void put_gpus(epo_facts *facts, const char *name, const char *major, const char *p2p) {
    epo_facts_set_text(facts, "gpu_name", name, "NVML");
    epo_facts_set(facts, "gpu_major", major, "NVML");
    epo_facts_set(facts, "node.gpu_count", "4", "NVML");
    epo_facts_set(facts, "node.all_gpus_p2p", p2p, "NVML: GPUs 0 and 1");
    epo_facts_set_text(facts, "node.driver_version", "550.54", "NVML");
}

static epo_status h100(const struct epo_probe_request *request, epo_facts *facts) {
    CU_ASSERT_EQUAL(request->timeout_ms, 5000);
    CU_ASSERT_STRING_EQUAL(request->node, "n1");
    CU_ASSERT_TRUE(request->program >= 0);
    const char *held = request->variable(request->context, "SLURM_STEP_GPUS");
    CU_ASSERT_TRUE(held != NULL && strcmp(held, "0,1") == 0);
    put_gpus(facts, "NVIDIA H100 80GB HBM3", "9", "True");
    return EPO_OK;
}

static epo_status l40s(const struct epo_probe_request *request, epo_facts *facts) {
    (void)request;
    put_gpus(facts, "NVIDIA L40S", "8", "False");
    return EPO_OK;
}

static epo_status v100(const struct epo_probe_request *request, epo_facts *facts) {
    (void)request;
    put_gpus(facts, "Tesla V100-SXM2-32GB", "7", "True");
    epo_facts_set(facts, "deep_ep.imports", "False", "the packages of python");
    return EPO_OK;
}

static epo_status hangs(const struct epo_probe_request *request, epo_facts *facts) {
    (void)request;
    (void)facts;
    return epo_fail(EPO_E_TIMEOUT, "the probe did not end within 5000 ms\nand was killed");
}

static void begin_gpus(const char *configuration,
                       epo_status (*probe)(const struct epo_probe_request *, epo_facts *)) {
    fake_begin(S_CTX_LOCAL);
    configure(configuration);
    fake_put(&fake.task, "SLURM_STEP_GPUS", "0,1");
    fake.probe = probe;
}

static void give_flex(void) {
    give_on();
    CU_ASSERT_EQUAL(give("ep-dispatcher", "flex"), 0);
}

static void give_deepep(void) {
    give_on();
    CU_ASSERT_EQUAL(give("ep-dispatcher", "flex:deepep"), 0);
}

static void a_node_that_can_goes_on(void) {
    begin_gpus("", h100);
    srun_to_task(give_deepep);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.probes, 1);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "on");
    HAS_NOT(fake.said, "found");
    fake_end();
}

static void a_node_that_cannot_ends_the_step(void) {
    begin_gpus("", l40s);
    srun_to_task(give_flex);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(fake.exit_task, 1);
    CU_ASSERT_EQUAL(lines(fake.said), 1);
    HAS(fake.said, "ep-overlap: n1: NODE-P2P: found node.all_gpus_p2p = False (NVML: GPUs 0 and "
                   "1); needed GPUs that reach each other directly; use --ep-dispatcher=alltoall");
    HAS(fake.ran, "7.0");
    /* the second task reads the first one's answer */
    fake_next(S_CTX_REMOTE);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_STRING_EQUAL(fake.said, "");
    CU_ASSERT_EQUAL(fake.probes, 1);
    fake_end();
}

static void all_violations_are_told_line_by_line(void) {
    begin_gpus("checks = { minimum = { driver = \"570\"; }; };", v100);
    srun_to_task(give_deepep);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    CU_ASSERT_EQUAL(lines(fake.said), 3);
    HAS(fake.said, "ep-overlap: n1: MIN-DRIVER: found node.driver_version = 550.54");
    HAS(fake.said, "\nep-overlap: n1: DSP-002: ");
    HAS(fake.said, "\nep-overlap: n1: DSP-016: ");
    fake_end();
}

static void alltoall_needs_none_of_it(void) {
    begin_gpus("", l40s);
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "on");
    fake_end();
}

static void without_gpus_nobody_is_asked(void) {
    fake_begin(S_CTX_LOCAL);
    configure("checks = { minimum = { driver = \"570\"; }; };");
    fake.probe = l40s;
    srun_to_task(give_flex);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.probes, 0);
    HAS(fake.said, "no GPUs: host engine");
    /* nor with overlap off */
    fake_put(&fake.task, "SLURM_STEP_GPUS", "0,1");
    srun_to_task(give_off);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.probes, 0);
    fake_end();
}

/* --gpu-bind=none: Slurm names no GPU to the task, and it sees all of them. */
static void unbound_gpus_are_held(void) {
    static const char *const words[] = {"gpu:none", "gres/gpu:none"}; /* 22.05, 24.11 */
    for (int i = 0; i < 2; i++) {
        fake_begin(S_CTX_LOCAL);
        configure("");
        fake_put(&fake.task, "SLURMD_TRES_BIND", words[i]);
        fake_put(&fake.task, "SLURM_GPUS_ON_NODE", "4");
        fake.probe = l40s;
        srun_to_task(give_flex);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
        HAS(fake.said, "NODE-P2P");
        fake_end();
    }
}

static void a_probe_that_hangs_is_a_warning(void) {
    begin_gpus("", hangs);
    srun_to_task(give_flex);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    HAS(fake.said, "ep-overlap: warning NODE-PROBE: found the probe was stopped the probe did");
    HAS(fake.said, "5000 ms?and was killed");
    fake_end();
    begin_gpus("checks = { on_unknown = \"fail\"; };", hangs);
    srun_to_task(give_flex);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "NODE-PROBE");
    fake_end();
}

static void a_probe_that_is_not_trusted_is_not_run(void) {
    begin_gpus("", h100);
    chmod(probe_program, 0757);
    srun_to_task(give_flex);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.probes, 0);
    HAS(fake.said, "writable by group or others");
    chmod(probe_program, 0755);
    fake_end();
}

static void arguments_are_judged_with_the_node(void) {
    static const char *const words[] = {"python",
                                        "pretrain_gpt.py",
                                        "--num-experts",
                                        "8",
                                        "--recompute-granularity",
                                        "full",
                                        "--overlap-moe-expert-parallel-comm",
                                        NULL};
    begin_gpus("", l40s);
    take_arguments(words);
    srun_to_task(give_deepep);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "\nep-overlap: n1: OVL-001: found ");
    HAS(fake.said, "\nep-overlap: n1: OVL-004: found ");
    HAS(fake.said, "\nep-overlap: n1: OVL-007: found ");
    HAS(fake.said, "NODE-P2P");
    fake_end();
}

static const char *const plain[] = {"python",
                                    "pretrain_gpt.py",
                                    "--num-experts",
                                    "8",
                                    "--expert-model-parallel-size",
                                    "2",
                                    "--bf16",
                                    NULL};

static void arguments_without_overlap_are_completed(void) {
    begin_gpus("", h100);
    take_arguments(plain);
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "ARG-OVERLAP: found overlap_moe_expert_parallel_comm = False");
    HAS(fake.said, "add --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall");
    fake_end();
}

static void auto_is_off_where_arguments_leave_it_off(void) {
    begin_gpus("node_classes = ( { class = \"h100\"; nodes = \"n1\"; overlap = \"on\"; } );", h100);
    fake_put(&fake.own, "SLURM_NODELIST", "n1");
    fake.step_nodes = 8; /* the same on all of them */
    take_arguments(plain);
    srun_to_task(give_auto);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "off");
    HAS(fake_get(&fake.task, EPO_OUT_REASON), "ARG-OVERLAP");
    HAS_NOT(fake_get(&fake.task, EPO_OUT_REASON), "\n");
    fake_end();
}

static void a_node_that_contradicts_its_class_fails_the_step(void) {
    begin_gpus("node_classes = ( { class = \"h100\"; nodes = \"n1\"; overlap = \"on\"; } );", l40s);
    fake_put(&fake.own, "SLURM_NODELIST", "n1");
    fake.step_nodes = 2;
    srun_to_task(give_auto);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "NODE-CLASS: found gpu_name = NVIDIA L40S");
    fake_end();
}

static void a_default_goes_off_on_one_node_and_ends_many(void) {
    static const char site[] = "defaults = { overlap = \"on\"; dispatcher = \"flex\"; };";
    begin_gpus(site, l40s);
    fake.step_nodes = 1;
    srun_to_task(NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "off");
    HAS(fake_get(&fake.task, EPO_OUT_REASON), "NODE-P2P");
    fake_end();
    begin_gpus(site, l40s);
    fake.step_nodes = 2;
    srun_to_task(NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), -1);
    HAS(fake.said, "NODE-P2P");
    fake_end();
}

static void warn_goes_on_as_off(void) {
    begin_gpus("on_failed_request = \"warn\";", l40s);
    srun_to_task(give_flex);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    HAS(fake.said, "ep-overlap: n1: off instead of on: NODE-P2P");
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "off");
    fake_end();
}

static void start(int result, const char *const *words) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    take_arguments(words);
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), result);
}

#define START(result, ...) start(result, (const char *const[]){__VA_ARGS__, NULL})

static void programs_of_a_list_count_together(void) {
    START(0, "/x/conf", "0 ./server --bf16\n1-3 python train.py --num-layers 3\n");
    HAS_NOT(fake.said, "undecided");
    fake_end();
    START(-1, "/x/conf",
          "# a comment\n0 ./server\n* env A=1 \\\n python pretrain_gpt.py --fp16 --num-experts 8\n"
          "3 python pretrain_gpt.py --bf16 --num-experts 8\n");
    HAS(fake.said, "ARG-OVERLAP");
    CU_ASSERT_EQUAL(lines(fake.said), 2); /* one more: EP 1, once for both programs */
    HAS(fake.said, "OVL-001");
    fake_end();
    START(0, "/x/conf", "0 ./a it's\n1 ./b\n");
    HAS(fake.said, "undecided: the file of --multi-prog");
    fake_end();
    START(0, "/x/conf", "0 python pretrain_gpt.py\nlike a list\n");
    fake_end();
}

static void exec_completes_what_it_starts(void) {
    START(0, "env", "ep-overlap", "exec", "python", "pretrain_gpt.py", "--bf16", "--num-experts=8",
          "--expert-model-parallel-size=8");
    fake_end();
    START(0, "ep-overlap2", "exec", "python", "pretrain_gpt.py"); /* whatever that is */
    fake_end();
    START(-1, "bash", "-c", "cd x; python pretrain_gpt.py >log");
    HAS(fake.said, "ARG-OVERLAP");
    HAS(fake.said, "OVL-001");
    HAS(fake.said, "OVL-004");
    fake_end();
}

static void what_cannot_be_read_is_undecided_in_one_line(void) {
    START(0, "bash", "/x/run.sh", "--bf16");
    CU_ASSERT_EQUAL(lines(fake.said), 1);
    HAS(fake.said, "; arguments undecided: a shell's script is not read: \"/x/run.sh\"");
    fake_end();
    START(0, "torchrun", "run_recipe.py", "model.num_layers=4");
    HAS(fake.said, "arguments undecided: \"run_recipe.py\" gets no arguments that say");
    fake_end();
    START(0, "/home/bashir/train", "-c", "pretrain_gpt.py --bf16");
    HAS_NOT(fake.said, "undecided");
    fake_end();
}

static void what_is_given_is_told_from_defaults(void) {
    START(0, "bash", "/x/run.sh");
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_GIVEN), "overlap");
    fake_end();
    fake_begin(S_CTX_LOCAL);
    configure("");
    srun_to_task(give_all);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_GIVEN), "overlap dispatcher delay_wgrad");
    fake_end();
    /* a default gives way to the program's own dispatcher */
    START(0, "python", "pretrain_gpt.py", "--bf16", "--num-experts=8",
          "--expert-model-parallel-size=8", "--overlap-moe-expert-parallel-comm",
          "--moe-token-dispatcher-type=flex", "--moe-router-dtype=fp32");
    HAS(fake_get(&fake.task, EPO_OUT_MEGATRON_ARGS), "--moe-token-dispatcher-type flex");
    fake_end();
}

static void auto_never_adds_delayed_wgrad(void) {
    fake_begin(S_CTX_LOCAL);
    configure("node_classes = ( { class = \"h100\"; nodes = \"n1\"; overlap = \"on\"; "
              "delay_wgrad = true; } );");
    fake_put(&fake.own, "SLURM_NODELIST", "n1");
    srun_to_task(give_auto);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "on");
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_GIVEN), "overlap auto");
    HAS_NOT(fake_get(&fake.task, EPO_OUT_MEGATRON_ARGS), "--delay-wgrad-compute");
    fake_end();
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(a_node_that_can_goes_on),
                                 TEST(a_node_that_cannot_ends_the_step),
                                 TEST(all_violations_are_told_line_by_line),
                                 TEST(alltoall_needs_none_of_it),
                                 TEST(without_gpus_nobody_is_asked),
                                 TEST(unbound_gpus_are_held),
                                 TEST(a_probe_that_hangs_is_a_warning),
                                 TEST(a_probe_that_is_not_trusted_is_not_run),
                                 TEST(arguments_are_judged_with_the_node),
                                 TEST(arguments_without_overlap_are_completed),
                                 TEST(auto_is_off_where_arguments_leave_it_off),
                                 TEST(a_node_that_contradicts_its_class_fails_the_step),
                                 TEST(a_default_goes_off_on_one_node_and_ends_many),
                                 TEST(warn_goes_on_as_off),
                                 TEST(programs_of_a_list_count_together),
                                 TEST(exec_completes_what_it_starts),
                                 TEST(what_cannot_be_read_is_undecided_in_one_line),
                                 TEST(what_is_given_is_told_from_defaults),
                                 TEST(auto_never_adds_delayed_wgrad),
                                 CU_TEST_INFO_NULL};
    return box_run("spank check", tests);
}
