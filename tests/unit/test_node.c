/* SPDX-License-Identifier: Apache-2.0
 *
 * test_node.c - what speaks against a request on a node: GPU gates of the flex
 * backends, least versions, arguments; all of it together.
 */
#include "rules/node.h"
#include "unit.h"

#include <stdio.h>
#include <string.h>

static epo_facts *facts;
static epo_findings findings;

static void begin(void) {
    epo_facts_destroy(facts);
    facts = epo_facts_create();
    CU_ASSERT_PTR_NOT_NULL_FATAL(facts);
}

static bool has(const char *id) {
    for (size_t i = 0; i < findings.count; i++)
        if (strcmp(findings.item[i].id, id) == 0)
            return true;
    return false;
}

static const epo_finding *get(const char *id) {
    static const epo_finding none;
    for (size_t i = 0; i < findings.count; i++)
        if (strcmp(findings.item[i].id, id) == 0)
            return &findings.item[i];
    return &none;
}

#define HAS(text, part) CU_ASSERT_PTR_NOT_NULL(strstr(text, part))

static void put_gpus(const char *name, const char *major, bool p2p) {
    epo_facts_set_text(facts, "gpu_name", name, "NVML");
    epo_facts_set(facts, "gpu_major", major, "NVML");
    epo_facts_set(facts, "node.gpu_count", "4", "NVML");
    epo_facts_set(facts, "node.all_gpus_p2p", p2p ? "True" : "False", "NVML: GPUs 0 and 1");
    epo_facts_set(facts, "deep_ep.imports", "True", "site-packages");
    epo_facts_set(facts, "deep_ep.has_event_overlap", "True", "site-packages");
    epo_facts_set(facts, "deep_ep.has_hybrid_buffer", "True", "site-packages");
    epo_facts_set(facts, "node.cuda_home_has_nvcc", "True", "/usr/local/cuda");
}

static bool passes(int dispatcher) {
    const epo_node_question question = {.dispatcher = dispatcher, .holds_gpus = true};
    CU_ASSERT_EQUAL(epo_node_judge(&question, facts, &findings), EPO_OK);
    return findings.errors == 0;
}

/* The table of the frameworks' gates, GPU by GPU. */
static void the_gates_are_the_frameworks(void) {
    static const struct {
        const char *name, *major;
        bool deepep, hybridep;
    } gates[] = {{"NVIDIA A100-SXM4-80GB", "8", true, true},
                 {"NVIDIA A30", "8", true, true},
                 {"NVIDIA L40S", "8", true, true},
                 {"NVIDIA H100 80GB HBM3", "9", true, true},
                 {"NVIDIA H200", "9", true, true},
                 {"NVIDIA GH200 480GB", "9", true, true},
                 {"NVIDIA B200", "10", true, true},
                 {"NVIDIA B300 SXM6 AC", "10", true, true},
                 {"NVIDIA GB200", "10", false, true},
                 {"NVIDIA GB300", "10", false, true},
                 {"NVIDIA GeForce RTX 5090", "12", false, false},
                 {"Tesla V100-SXM2-32GB", "7", false, false},
                 {"Tesla T4", "7", false, false}};
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++) {
        for (int p2p = 0; p2p < 2; p2p++) {
            begin();
            put_gpus(gates[i].name, gates[i].major, p2p != 0);
            CU_ASSERT_EQUAL(passes(EPO_CHOICE_DEEPEP), gates[i].deepep && p2p != 0);
            begin();
            put_gpus(gates[i].name, gates[i].major, p2p != 0);
            CU_ASSERT_EQUAL(passes(EPO_CHOICE_HYBRIDEP), gates[i].hybridep && p2p != 0);
            begin();
            put_gpus(gates[i].name, gates[i].major, p2p != 0);
            CU_ASSERT_TRUE(passes(EPO_CHOICE_ALLTOALL));
            begin();
            put_gpus(gates[i].name, gates[i].major, p2p != 0);
            CU_ASSERT_EQUAL(passes(EPO_CHOICE_FLEX), p2p != 0);
        }
    }
}

static void a_step_without_gpus_has_no_gates(void) {
    begin();
    const epo_node_question question = {.dispatcher = EPO_CHOICE_FLEX, .holds_gpus = false};
    CU_ASSERT_EQUAL(epo_node_judge(&question, facts, &findings), EPO_OK);
    CU_ASSERT_EQUAL(findings.errors, 0);
}

static void deep_ep_must_be_found(void) {
    begin();
    put_gpus("NVIDIA H100", "9", true);
    epo_facts_set(facts, "deep_ep.imports", "False", "the packages");
    CU_ASSERT_FALSE(passes(EPO_CHOICE_DEEPEP));
    HAS(get("DSP-016")->found, "deep_ep.imports = False");
    begin();
    put_gpus("NVIDIA H100", "9", true);
    epo_facts_set_unknown(facts, "deep_ep.imports", "a container", "words");
    CU_ASSERT_TRUE(passes(EPO_CHOICE_DEEPEP)); /* unknown never refuses */
}

static void tasks_bound_to_one_gpu_are_explained(void) {
    begin();
    put_gpus("NVIDIA H100", "9", false);
    epo_facts_set(facts, "task.sees_all_gpus", "False", "SLURM_STEP_GPUS");
    epo_facts_set(facts, "task.visible_gpus", "1", "CUDA_VISIBLE_DEVICES");
    CU_ASSERT_FALSE(passes(EPO_CHOICE_FLEX));
    HAS(get("NODE-BIND")->remedy, "--gpu-bind=none");
    HAS(get("NODE-BIND")->found, "1 of 4 GPUs (SLURM_STEP_GPUS)");
    CU_ASSERT_FALSE(has("NODE-P2P"));
    CU_ASSERT_TRUE(passes(EPO_CHOICE_ALLTOALL));
}

static void least_versions_are_pep_440(void) {
    static const struct {
        const char *have, *least;
        int errors;
    } cases[] = {{"2.10.0", "2.9", 0},          {"2.9.0", "2.10", 1},
                 {"2.16.0rc1", "2.16", 1},      {"2.16.0+cu124", "2.16", 0},
                 {"2.16.0.dev2025", "2.16", 1}, {"2.8.0a0+34c637.nv25.08", "2.7", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct epo_checks checks = {.torch = (char *)(uintptr_t)cases[i].least};
        const epo_node_question question = {.checks = &checks};
        begin();
        epo_facts_set_text(facts, "torch_version", cases[i].have, "METADATA");
        CU_ASSERT_EQUAL(epo_node_judge(&question, facts, &findings), EPO_OK);
        CU_ASSERT_EQUAL(findings.errors, (size_t)cases[i].errors);
        CU_ASSERT_EQUAL(has("MIN-TORCH"), cases[i].errors == 1);
    }
}

static void unknown_versions_follow_on_unknown(void) {
    static const struct {
        int on_unknown;
        size_t errors, warnings;
    } cases[] = {{EPO_UNKNOWN_WARN, 0, 2}, {EPO_UNKNOWN_FAIL, 2, 0}, {EPO_UNKNOWN_IGNORE, 0, 0}};
    for (size_t i = 0; i < 3; i++) {
        struct epo_checks checks = {.torch = (char *)"2.6",
                                    .te = (char *)"2.3",
                                    .nccl = (char *)"2.20",
                                    .on_unknown = cases[i].on_unknown};
        const epo_node_question question = {.checks = &checks, .holds_gpus = true};
        begin();
        epo_facts_set_unknown(facts, "torch_version", "a container", "words");
        epo_facts_set_text(facts, "te_version", "no version at all", "METADATA");
        epo_facts_set(facts, "nccl_version", NULL, "no libnccl"); /* none: not too old */
        CU_ASSERT_EQUAL(epo_node_judge(&question, facts, &findings), EPO_OK);
        CU_ASSERT_EQUAL(findings.errors, cases[i].errors);
        CU_ASSERT_EQUAL(findings.warnings, cases[i].warnings);
    }
}

static void a_node_that_contradicts_its_class_is_told(void) {
    static const struct {
        const char *class, *name;
        bool wrong;
    } cases[] = {{"h100", "NVIDIA H100 80GB HBM3", false}, {"h100", "NVIDIA L40S", true},
                 {"H100-80GB", "NVIDIA H100 PCIe", false}, {"b200", "NVIDIA GB200", true},
                 {"fast", "NVIDIA L40S", false},           {NULL, "NVIDIA L40S", false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const epo_node_question question = {.gpu_class = cases[i].class, .holds_gpus = true};
        begin();
        epo_facts_set_text(facts, "gpu_name", cases[i].name, "NVML");
        CU_ASSERT_EQUAL(epo_node_judge(&question, facts, &findings), EPO_OK);
        CU_ASSERT_EQUAL(has("NODE-CLASS"), cases[i].wrong);
    }
}

/* Megatron's backend of flex follows from the GPUs that a task sees, else from the site's word;
 * what the arguments say themselves stays. */
static void flex_has_the_gpus_backend(void) {
    static const struct {
        const char *seen, *site, *given;
        int dispatcher;
        epo_framework framework;
        const char *backend;
    } cases[] = {
        {"NVIDIA GB200", NULL, NULL, EPO_CHOICE_FLEX, EPO_FRAMEWORK_MEGATRON_LM, "hybridep"},
        {"NVIDIA GB200", "h100", NULL, EPO_CHOICE_FLEX, EPO_FRAMEWORK_BRIDGE, "hybridep"},
        {"NVIDIA H100", "gb200", NULL, EPO_CHOICE_FLEX, EPO_FRAMEWORK_MEGATRON_LM, "deepep"},
        {NULL, "gb300", NULL, EPO_CHOICE_FLEX, EPO_FRAMEWORK_MEGATRON_LM, "hybridep"},
        {NULL, "b200", NULL, EPO_CHOICE_FLEX, EPO_FRAMEWORK_MEGATRON_LM, "deepep"},
        {NULL, NULL, NULL, EPO_CHOICE_FLEX, EPO_FRAMEWORK_MEGATRON_LM, "deepep"},
        {"NVIDIA GB200", NULL, NULL, EPO_CHOICE_DEEPEP, EPO_FRAMEWORK_MEGATRON_LM, "deepep"},
        {"NVIDIA H100", NULL, NULL, EPO_CHOICE_HYBRIDEP, EPO_FRAMEWORK_UNKNOWN, "hybridep"},
        {"NVIDIA GB200", NULL, NULL, EPO_CHOICE_FLEX, EPO_FRAMEWORK_UNKNOWN, NULL},
        {"NVIDIA GB200", NULL, NULL, EPO_CHOICE_ALLTOALL, EPO_FRAMEWORK_MEGATRON_LM, NULL},
        {"NVIDIA GB200", NULL, "alltoall", EPO_CHOICE_FLEX, EPO_FRAMEWORK_MEGATRON_LM, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const epo_node_question question = {.dispatcher = cases[i].dispatcher,
                                            .site_gpu = cases[i].site,
                                            .framework = cases[i].framework};
        begin();
        if (cases[i].seen != NULL)
            epo_facts_set_text(facts, "gpu_name", cases[i].seen, "NVML");
        if (cases[i].given != NULL)
            epo_facts_set(facts, "moe_token_dispatcher_type", cases[i].given, "arguments");
        CU_ASSERT_EQUAL(epo_node_judge(&question, facts, &findings), EPO_OK);
        const epo_fact *backend = epo_facts_find(facts, "moe_flex_dispatcher_backend");
        const bool set = backend != NULL && backend->kind == EPO_FACT_TEXT && !backend->is_default;
        CU_ASSERT_EQUAL(set, cases[i].backend != NULL);
        if (set && cases[i].backend != NULL)
            CU_ASSERT_STRING_EQUAL(backend->text, cases[i].backend);
    }
}

static void judge_arguments(const char *const *words, int dispatcher, bool given, bool delayed) {
    int count = 0;
    while (words[count] != NULL)
        count++;
    epo_node_question question = {.dispatcher = dispatcher,
                                  .dispatcher_given = given,
                                  .delayed = delayed,
                                  .arguments_fixed = true};
    begin();
    CU_ASSERT_EQUAL(
        epo_node_arguments((char *const *)(uintptr_t)words, count, facts, &question.framework),
        EPO_OK);
    CU_ASSERT_EQUAL(epo_node_judge(&question, facts, &findings), EPO_OK);
}

#define GOOD                                                                                       \
    "python", "pretrain_gpt.py", "--num-experts", "64", "--expert-model-parallel-size", "8",       \
        "--bf16", "--moe-token-dispatcher-type", "alltoall"

static void good_arguments_pass(void) {
    static const char *const words[] = {GOOD, "--overlap-moe-expert-parallel-comm", NULL};
    judge_arguments(words, EPO_CHOICE_ALLTOALL, false, false);
    CU_ASSERT_EQUAL(findings.errors, 0);
}

static void all_violations_come_together(void) {
    static const char *const words[] = {"torchrun",
                                        "pretrain_gpt.py",
                                        "--num-experts",
                                        "8",
                                        "--moe-token-dispatcher-type",
                                        "alltoall",
                                        "--pipeline-model-parallel-size",
                                        "2",
                                        "--recompute-granularity",
                                        "full",
                                        "--recompute-method",
                                        "uniform",
                                        "--recompute-num-layers",
                                        "1",
                                        "--moe-shared-expert-overlap",
                                        "--mtp-num-layers",
                                        "2",
                                        "--overlap-moe-expert-parallel-comm",
                                        NULL};
    static const char *const want[] = {"OVL-001", "OVL-004", "OVL-006", "OVL-007",
                                       "OVL-008", "OVL-009", "OVL-011", "OVL-012"};
    judge_arguments(words, EPO_CHOICE_ALLTOALL, false, false);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        CU_ASSERT_TRUE(has(want[i]));
    CU_ASSERT_TRUE(findings.errors >= sizeof want / sizeof *want);
    HAS(get("OVL-001")->found, "expert_model_parallel_size = 1");
}

static void arguments_without_overlap_are_completed(void) {
    static const char *const without[] = {GOOD, NULL};
    static const char *const with[] = {GOOD, "--overlap-moe-expert-parallel-comm", NULL};
    static const char *const other[] = {"python", "train.py", "--x", NULL};
    judge_arguments(without, EPO_CHOICE_ALLTOALL, false, true);
    CU_ASSERT_TRUE(has("ARG-OVERLAP"));
    HAS(get("ARG-OVERLAP")->remedy, "--overlap-moe-expert-parallel-comm");
    HAS(get("ARG-OVERLAP")->remedy, "--delay-wgrad-compute");
    judge_arguments(with, EPO_CHOICE_ALLTOALL, false, true);
    CU_ASSERT_TRUE(has("ARG-WGRAD"));
    judge_arguments(with, EPO_CHOICE_FLEX, true, false);
    CU_ASSERT_TRUE(has("ARG-DISPATCHER"));
    judge_arguments(with, EPO_CHOICE_FLEX, false, false);
    CU_ASSERT_FALSE(has("ARG-DISPATCHER"));
    static const char *const none[] = {"python", "pretrain_gpt.py", "--bf16",
                                       "--overlap-moe-expert-parallel-comm", NULL};
    judge_arguments(none, EPO_CHOICE_FLEX, true, false); /* a framework's default gives way */
    CU_ASSERT_FALSE(has("ARG-DISPATCHER"));
    judge_arguments(other, EPO_CHOICE_ALLTOALL, false, true);
    CU_ASSERT_EQUAL(findings.errors, 0);
}

/* Flags that other programs have too do not make a program Megatron-LM. */
static void common_flags_are_nobody_s(void) {
    static const char *const words[] = {"python", "run_clm.py", "--bf16", "--num-layers",
                                        "24",     "--fp16",     "false",  NULL};
    epo_framework framework = EPO_FRAMEWORK_BRIDGE;
    begin();
    CU_ASSERT_EQUAL(epo_node_arguments((char *const *)(uintptr_t)words, 7, facts, &framework),
                    EPO_OK);
    CU_ASSERT_EQUAL(framework, EPO_FRAMEWORK_UNKNOWN);
    judge_arguments(words, EPO_CHOICE_FLEX, true, true);
    CU_ASSERT_EQUAL(findings.errors, 0);
}

static void bridge_overrides_are_read(void) {
    static const char *const off[] = {"python", "run.py",
                                      "comm_overlap.overlap_moe_expert_parallel_comm=false", NULL};
    static const char *const on[] = {"python", "run.py",
                                     "comm_overlap.overlap_moe_expert_parallel_comm=true",
                                     "model.expert_model_parallel_size=8", NULL};
    judge_arguments(off, EPO_CHOICE_ALLTOALL, false, false);
    CU_ASSERT_TRUE(has("ARG-OVERLAP"));
    HAS(get("ARG-OVERLAP")->remedy, "comm_overlap.overlap_moe_expert_parallel_comm=true");
    judge_arguments(on, EPO_CHOICE_ALLTOALL, false, false);
    CU_ASSERT_FALSE(has("ARG-OVERLAP"));
}

static const char *variable(void *context, const char *name) {
    (void)context;
    return strcmp(name, "CUDA_LAUNCH_BLOCKING") == 0 ? "1" : NULL;
}

static void a_harmful_variable_is_a_warning(void) {
    begin();
    CU_ASSERT_EQUAL(epo_node_environment(facts, variable, NULL), EPO_OK);
    const epo_node_question question = {.holds_gpus = true};
    CU_ASSERT_EQUAL(epo_node_judge(&question, facts, &findings), EPO_OK);
    CU_ASSERT_EQUAL(findings.errors, 0);
    CU_ASSERT_EQUAL(get("ENV-001")->severity, EPO_SEVERITY_WARN);
    char text[1024];
    epo_finding_text(get("ENV-001"), text, sizeof text);
    HAS(text, "ENV-001: found env.CUDA_LAUNCH_BLOCKING = 1 (the environment); needed ");
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(the_gates_are_the_frameworks),
                                 TEST(a_step_without_gpus_has_no_gates),
                                 TEST(deep_ep_must_be_found),
                                 TEST(tasks_bound_to_one_gpu_are_explained),
                                 TEST(least_versions_are_pep_440),
                                 TEST(unknown_versions_follow_on_unknown),
                                 TEST(a_node_that_contradicts_its_class_is_told),
                                 TEST(flex_has_the_gpus_backend),
                                 TEST(good_arguments_pass),
                                 TEST(all_violations_come_together),
                                 TEST(arguments_without_overlap_are_completed),
                                 TEST(common_flags_are_nobody_s),
                                 TEST(bridge_overrides_are_read),
                                 TEST(a_harmful_variable_is_a_warning),
                                 CU_TEST_INFO_NULL};
    int status = unit_run("node", tests);
    epo_facts_destroy(facts);
    return status;
}
