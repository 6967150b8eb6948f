/* SPDX-License-Identifier: Apache-2.0
 *
 * Facts, commands and what follows from settings.
 */
#include "core/facts.h"
#include "core/status.h"
#include "rules/command.h"
#include "rules/launch.h"
#include "rules/settings.h"
#include "rules/words.h"
#include "unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check_fact(const epo_facts *facts, const char *key, const char *text) {
    const epo_fact *fact = epo_facts_find(facts, key);
    const char *found = fact == NULL                     ? "(nobody told)"
                        : fact->kind == EPO_FACT_UNKNOWN ? "(unknown)"
                        : fact->kind == EPO_FACT_NULL    ? "(unset)"
                                                         : fact->text;
    if (strcmp(found, text) != 0)
        fprintf(stderr, "%s is %s, wanted %s\n", key, found, text);
    CU_ASSERT_STRING_EQUAL(found, text);
}

/* Longer than any number that is meant as one. */
#define LONG_NUMBER "1234567890123456789012345678901234567890123456789012345678901234567890"

static void values_are_read_as_frameworks_write_them(void) {
    static const struct {
        const char *text;
        epo_fact_kind kind;
        const char *value;
    } cases[] = {{"None", EPO_FACT_NULL, ""},
                 {"null", EPO_FACT_NULL, ""},
                 {"", EPO_FACT_NULL, ""},
                 {"none", EPO_FACT_TEXT, "none"},
                 {"True", EPO_FACT_BOOL, "True"},
                 {"false", EPO_FACT_BOOL, "false"},
                 {" 8 ", EPO_FACT_NUMBER, "8"},
                 {"-1.5e3", EPO_FACT_NUMBER, "-1.5e3"},
                 {"2.10", EPO_FACT_NUMBER, "2.10"},
                 {"0x10", EPO_FACT_TEXT, "0x10"},
                 {"nan", EPO_FACT_TEXT, "nan"},
                 {"1e999", EPO_FACT_TEXT, "1e999"},
                 {LONG_NUMBER, EPO_FACT_TEXT, LONG_NUMBER},
                 {"'flex'", EPO_FACT_TEXT, "flex"},
                 {"'None'", EPO_FACT_TEXT, "None"},
                 {"[moe_act, layernorm]", EPO_FACT_LIST, "moe_act,layernorm"},
                 {"['a,b', \"c\"]", EPO_FACT_LIST, "a,b,c"},
                 {"('a',)", EPO_FACT_LIST, "a"},
                 {"[]", EPO_FACT_LIST, ""},
                 {"[<CudaGraphScope.moe_router: 1>, <CudaGraphScope.attn: 2>]", EPO_FACT_LIST,
                  "moe_router,attn"},
                 {"AttnBackend.flash", EPO_FACT_TEXT, "flash"},
                 {"torch.float32", EPO_FACT_TEXT, "torch.float32"},
                 {"[", EPO_FACT_TEXT, "["}};
    epo_facts *facts = epo_facts_create();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CU_ASSERT_EQUAL(epo_facts_set(facts, "key", cases[i].text, "test"), EPO_OK);
        check_fact(facts, "key", cases[i].kind == EPO_FACT_NULL ? "(unset)" : cases[i].value);
        CU_ASSERT_EQUAL(epo_facts_find(facts, "key")->kind, cases[i].kind);
    }
    epo_facts_destroy(facts);
    epo_facts_destroy(NULL);
}

static void facts_replace_and_default(void) {
    epo_facts *facts = epo_facts_create();
    char key[32];
    for (int i = 0; i < 1000; i++) {
        snprintf(key, sizeof key, "key%d", i);
        CU_ASSERT_EQUAL(epo_facts_set(facts, key, key, "a"), EPO_OK);
    }
    CU_ASSERT_EQUAL(epo_facts_count(facts), 1000);
    epo_facts_set(facts, "key7", "new", "b");
    epo_facts_set_default(facts, "key7", "default", "c");
    epo_facts_set_default(facts, "other", "default", "c");
    CU_ASSERT_EQUAL(epo_facts_count(facts), 1001);
    check_fact(facts, "key7", "new");
    CU_ASSERT_STRING_EQUAL(epo_facts_find(facts, "key7")->source, "b");
    CU_ASSERT_TRUE(epo_facts_find(facts, "other")->is_default);
    CU_ASSERT_PTR_NULL(epo_facts_find(facts, "key1000"));
    CU_ASSERT_STRING_EQUAL(epo_facts_at(facts, 999)->key, "key999");
    CU_ASSERT_PTR_NULL(epo_facts_at(facts, 1001));
    epo_facts_destroy(facts);
}

static void facts_have_a_bound(void) {
    epo_facts *facts = epo_facts_create();
    char key[32];
    epo_status status = EPO_OK;
    for (int i = 0; i <= EPO_FACTS_MAX && status == EPO_OK; i++) {
        snprintf(key, sizeof key, "k%d", i);
        status = epo_facts_set(facts, key, "1", "hostile.log");
    }
    CU_ASSERT_EQUAL(status, EPO_E_OVERFLOW);
    CU_ASSERT_EQUAL(epo_facts_count(facts), EPO_FACTS_MAX);
    char *big = malloc(EPO_FACT_TEXT_MAX + 2);
    memset(big, 'x', EPO_FACT_TEXT_MAX + 1);
    big[EPO_FACT_TEXT_MAX + 1] = '\0';
    CU_ASSERT_EQUAL(epo_facts_set(facts, "k1", big, "hostile.log"), EPO_E_OVERFLOW);
    check_fact(facts, "k1", "1");
    free(big);
    epo_facts_destroy(facts);
}

static epo_command read_script(const char *text, epo_facts *facts) {
    epo_words words = {0};
    epo_command command = {0};
    CU_ASSERT_EQUAL(epo_words_split(&words, text, strlen(text)), EPO_OK);
    CU_ASSERT_EQUAL(epo_command_read(&words, "run.sh", true, facts, &command), EPO_OK);
    epo_words_free(&words);
    return command;
}

static void a_megatron_command_is_read(void) {
    epo_facts *facts = epo_facts_create();
    epo_command c = read_script(
        "export CUDA_DEVICE_MAX_CONNECTIONS=1\nUNUSED=7\nEP=8\n"
        "NCCL_DEBUG=INFO torchrun --nnodes=2 --nproc-per-node 8 pretrain_gpt.py \\\n"
        " --num-experts 64 --expert-model-parallel-size $EP --bf16 --seq-length 4096 \\\n"
        " --recompute-modules moe_act layernorm --cuda-graph-scope attn moe_router "
        "--disable-bias-linear \\\n"
        " --tensor-model-parallel-size $TP --no-gradient-accumulation-fusion\n",
        facts);
    CU_ASSERT_EQUAL(c.framework, EPO_FRAMEWORK_MEGATRON_LM);
    check_fact(facts, "num_moe_experts", "64");
    check_fact(facts, "expert_model_parallel_size", "8");
    check_fact(facts, "bf16", "true");
    check_fact(facts, "recompute_modules", "moe_act,layernorm");
    check_fact(facts, "cuda_graph_modules", "attn,moe_router");
    check_fact(facts, "add_bias_linear", "False");
    check_fact(facts, "gradient_accumulation_fusion", "False");
    check_fact(facts, "tensor_model_parallel_size", "(unknown)");
    check_fact(facts, "world_size", "16");
    check_fact(facts, "env.CUDA_DEVICE_MAX_CONNECTIONS", "1");
    check_fact(facts, "script.env.CUDA_DEVICE_MAX_CONNECTIONS", "1");
    check_fact(facts, "env.NCCL_DEBUG", "INFO");
    check_fact(facts, "env.UNUSED", "(nobody told)");
    CU_ASSERT_STRING_EQUAL(epo_facts_find(facts, "num_moe_experts")->source,
                           "run.sh:5 --num-experts");
    epo_facts_destroy(facts);
}

static void bridge_overrides_are_read(void) {
    epo_facts *facts = epo_facts_create();
    epo_command c = read_script(
        "python run.py comm_overlap.overlap_moe_expert_parallel_comm=true "
        "+model.recompute_modules=[moe_act,'layernorm'] optimizer.bf16=true "
        "--cuda_graph_impl none --moe_flex_dispatcher_backend None --moe_a2a_overlap false\n",
        facts);
    CU_ASSERT_EQUAL(c.framework, EPO_FRAMEWORK_BRIDGE);
    check_fact(facts, "comm_overlap.overlap_moe_expert_parallel_comm", "true");
    check_fact(facts, "comm_overlap_present", "true");
    check_fact(facts, "recompute_modules", "moe_act,layernorm");
    check_fact(facts, "bf16", "(nobody told)"); /* the optimizer's, not the model's */
    check_fact(facts, "cuda_graph_impl", "none");
    check_fact(facts, "moe_flex_dispatcher_backend", "(unset)");
    check_fact(facts, "harness.moe_a2a_overlap", "false");
    CU_ASSERT_EQUAL(epo_settings_derive(facts), EPO_OK);
    check_fact(facts, "overlap_moe_expert_parallel_comm", "true");
    epo_facts_destroy(facts);
}

/* What a condition adds is not known; what stands in a command holds if it runs. */
static void conditions_decide_nothing(void) {
    static const struct {
        const char *script, *key, *value;
    } cases[] = {
        {"if [ $X = full ]; then\n A+=(--recompute-granularity full)\nfi\npretrain_gpt.py ${A[@]}",
         "recompute_granularity", "(unknown)"},
        {"case $D in a) A=(--moe-token-dispatcher-type flex) ;; esac", "moe_token_dispatcher_type",
         "(unknown)"},
        {"[ -n \"$S\" ] && A+=(\n--moe-shared-expert-overlap\n)\nB=(--bf16)",
         "moe_shared_expert_overlap", "(unknown)"},
        {"[ -n \"$S\" ] && A+=(\n--moe-shared-expert-overlap\n)\nB=(--bf16)", "bf16", "true"},
        {"(( TP > 1 )) && A+=(--sequence-parallel)", "sequence_parallel", "(unknown)"},
        {"test $S || A+=(--sequence-parallel)", "sequence_parallel", "(unknown)"},
        {"cd x && A+=(--sequence-parallel)", "sequence_parallel", "true"},
        {"if a; then E=4; else E=8; fi; pretrain_gpt.py --expert-model-parallel-size $E",
         "expert_model_parallel_size", "(unknown)"},
        {"if a; then pretrain_gpt.py --expert-model-parallel-size 4; fi",
         "expert_model_parallel_size", "4"},
        {"if a; then export CUDA_DEVICE_MAX_CONNECTIONS=1; fi", "env.CUDA_DEVICE_MAX_CONNECTIONS",
         "(unknown)"},
        {"if a; then CUDA_DEVICE_MAX_CONNECTIONS=1 pretrain_gpt.py --bf16; fi", "bf16", "true"},
        {"if a; then if b; then c; fi; fi\nA=(--bf16)", "bf16", "true"},
        {"echo torchrun pretrain_gpt.py --bf16; [ t ] && printf %s --fp16; A=(--sequence-parallel)",
         "bf16", "(nobody told)"},
        {"if a; then A=1 echo --bf16; fi; pretrain_gpt.py --num-experts 8", "bf16",
         "(nobody told)"},
        {"echo CUDA_DEVICE_MAX_CONNECTIONS=1 a", "env.CUDA_DEVICE_MAX_CONNECTIONS",
         "(nobody told)"},
        {"cat <<EOF\n# don't panic\nEOF\nA=(--bf16)", "bf16", "true"},
        {"sbatch <<-'EOF'\npretrain_gpt.py --bf16\n\tEOF\n", "bf16", "true"},
        {"cat <<EOF\nit is \" --fp16\nEOF\nA=(--bf16)", "fp16", "(nobody told)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        epo_facts *facts = epo_facts_create();
        read_script(cases[i].script, facts);
        check_fact(facts, cases[i].key, cases[i].value);
        epo_facts_destroy(facts);
    }
}

/* What a program finds in its environment: what is exported, however. */
static void only_what_is_exported_reaches_a_program(void) {
    static const char *const cases[][2] = {
        {"A_B=1\nrun x", "(nobody told)"},
        {"A_B=1\nexport A_B\nrun x", "1"},
        {"export A_B\nA_B=1; A_B=2; run x", "2"},
        {"A_B=1; export C=2 A_B D; A_B=4", "4"},
        {"export A_B=1\nif t; then A_B=2; fi", "(unknown)"},
        {"if t; then A_B=1; fi; export A_B", "(unknown)"},
        {"A_B=$(x); export A_B", "(unknown)"},
        {"export A_B=1; unset C A_B", "(unset)"},
        {"export A_B=1; unset -v A_B; A_B=2; run x", "(unset)"},
        {"export A_B=1; unset -f A_B", "1"},
        {"export A_B=1; if t; then unset A_B; fi", "(unknown)"},
        {"export A_B=1; export -n A_B; A_B=2", "(unset)"},
        {"export -f A_B; A_B=2", "(nobody told)"},
        {"declare -x A_B=1", "1"},
        {"A_B=3; typeset -gx A_B", "3"},
        {"declare A_B=1 C; local A_B=2; readonly A_B=3 D", "(nobody told)"},
        {"A_B=1; set -a; C=2; run x", "(nobody told)"},
        {"set -ea; A_B=1; set +a; A_B=2; C=1", "2"},
        {"set -a; set +a; A_B=1", "(nobody told)"},
        {"set -o allexport; A_B=1", "1"},
        {"[ t ] && set -a\nA_B=1", "(nobody told)"},
        {"set -e -o pipefail; A_B=1", "(nobody told)"},
        {"srun --export=ALL,A_B=1,C=x=2 run x", "1"},
        {"#SBATCH --export=NONE,C,A_B=1\nrun", "1"},
        {"srun --export=ALL,A_B=$X run", "(unknown)"},
        {"srun --export=A_B --export ALL run", "(nobody told)"},
        {"srun env -u C A_B=1 run", "1"},
        {"A_B=1 C=2 run x", "1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        epo_facts *facts = epo_facts_create();
        read_script(cases[i][0], facts);
        check_fact(facts, "env.A_B", cases[i][1]);
        epo_facts_destroy(facts);
    }
}

static void the_harness_says_what_it_runs_on(void) {
    epo_facts *facts = epo_facts_create();
    read_script("uv run python scripts/performance/run_script.py -m qwen -mr qwen3_30b_a3b -g h100 "
                "-c bf16 -ng 16 -gn 8 --moe_a2a_overlap true; python other.py -g a100",
                facts);
    CU_ASSERT_EQUAL(epo_settings_derive(facts), EPO_OK);
    check_fact(facts, "gpu", "h100");
    check_fact(facts, "gpu_major", "9");
    check_fact(facts, "world_size", "16");
    check_fact(facts, "bf16", "true");
    check_fact(facts, "overlap_moe_expert_parallel_comm", "True");
    epo_facts_destroy(facts);
}

static void inner_shells_are_looked_into(void) {
    epo_facts *facts = epo_facts_create();
    read_script("srun bash -c \"python pretrain_gpt.py --bf16 --num-experts 8\" --ignored", facts);
    check_fact(facts, "bf16", "true");
    check_fact(facts, "num_moe_experts", "8");
    epo_facts_destroy(facts);
    facts = epo_facts_create();
    epo_command c =
        read_script("C=\"torchrun -H $(hostname) pretrain_gpt.py --bf16\"; [ t ] && C+=' --fp16'\n"
                    "eval \"$C\" '--num-experts 8'; eval --sequence-parallel",
                    facts);
    CU_ASSERT_EQUAL(c.framework, EPO_FRAMEWORK_MEGATRON_LM);
    check_fact(facts, "bf16", "true");
    check_fact(facts, "fp16", "(unknown)");
    check_fact(facts, "num_moe_experts", "8");
    check_fact(facts, "sequence_parallel", "true");
    epo_facts_destroy(facts);
}

static void what_follows_is_derived(void) {
    epo_facts *facts = epo_facts_create();
    read_script("pretrain_gpt.py --world-size 16 --tensor-model-parallel-size 2 --num-layers 48 "
                "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 6 "
                "--micro-batch-size 1 --global-batch-size 64 --num-experts 8 "
                "--moe-token-dispatcher-type flex --cuda-graph-scope moe_router "
                "--moe-shared-expert-intermediate-size 512",
                facts);
    epo_facts_set(facts, "world_size", "16", "test");
    epo_facts_set(facts, "gpu_name", "NVIDIA GB200", "test");
    CU_ASSERT_EQUAL(epo_settings_default(facts, EPO_DEFAULTS_MEGATRON_LM), EPO_OK);
    CU_ASSERT_EQUAL(epo_settings_derive(facts), EPO_OK);
    check_fact(facts, "data_parallel_size", "4");
    check_fact(facts, "num_microbatches", "16");
    check_fact(facts, "virtual_pipeline_model_parallel_size", "4");
    check_fact(facts, "flex_backend", "deepep");
    check_fact(facts, "flex_backend_request", "(unset)"); /* a default is no request */
    check_fact(facts, "wgrad_in_graph_scope", "True");
    check_fact(facts, "every_layer_is_moe", "True");
    check_fact(facts, "gpu", "gb200");
    check_fact(facts, "gpu_major", "10");
    check_fact(facts, "nvl72", "True");
    epo_facts_destroy(facts);
}

/* As Megatron-LM reckons: one stage a rank is no interleaving, and OVL-006 needs one. */
static void virtual_stages_are_reckoned(void) {
    static const struct {
        const char *arguments, *stages;
    } cases[] = {
        {"--num-virtual-stages-per-pipeline-rank 2", "2"},
        {"--num-virtual-stages-per-pipeline-rank 1", "(unset)"},
        {"--num-layers 96 --num-layers-per-virtual-pipeline-stage 3", "4"},
        {"--num-layers 94 --num-layers-per-virtual-pipeline-stage 3 "
         "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
         "4"},
        {"--num-layers 24 --num-layers-per-virtual-pipeline-stage 3", "(unset)"},
        {"--pipeline-model-parallel-layout 'Et*3|(tt|)*29m|L'", "4"},
        {"--pipeline-model-parallel-layout 'Ettt|(tt|)*6mL'", "(unset)"},
        {"--pipeline-model-parallel-layout 'Ettt|(tt|)*7mL'", "(unknown)"}, /* 9 stages: refused */
        {"--pipeline-model-parallel-layout $LAYOUT", "(unknown)"},
        {"--pipeline-model-parallel-size 0.5 --pipeline-model-parallel-layout 'Et|tL'",
         "(unknown)"},
        {"--pipeline-model-parallel-size 1e30 --pipeline-model-parallel-layout 'Et|tL'",
         "(unknown)"},
        {"--num-layers-per-virtual-pipeline-stage $STAGE", "(unknown)"},
        {"--num-virtual-stages-per-pipeline-rank $STAGES", "(unknown)"},
        {"", "(unset)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[256];
        epo_facts *facts = epo_facts_create();
        snprintf(line, sizeof line, "pretrain_gpt.py --pipeline-model-parallel-size 8 %s",
                 cases[i].arguments);
        read_script(line, facts);
        CU_ASSERT_EQUAL(epo_settings_default(facts, EPO_DEFAULTS_MEGATRON_LM), EPO_OK);
        CU_ASSERT_EQUAL(epo_settings_derive(facts), EPO_OK);
        check_fact(facts, "virtual_pipeline_model_parallel_size", cases[i].stages);
        epo_facts_destroy(facts);
    }
}

static void a_pattern_of_layers_is_read(void) {
    static const char *const patterns[][2] = {{"1", "True"},
                                              {"2", "False"},
                                              {"[1]*10", "True"},
                                              {"([0]*3+[1]*58)", "False"},
                                              {"([1]*10+[0])", "False"}};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        epo_facts *facts = epo_facts_create();
        epo_setting_put(facts, "num_experts", "8", "test", NULL);
        epo_setting_put(facts, "moe_layer_freq", patterns[i][0], "test", NULL);
        CU_ASSERT_EQUAL(epo_settings_derive(facts), EPO_OK);
        check_fact(facts, "every_layer_is_moe", patterns[i][1]);
        epo_facts_destroy(facts);
    }
}

static void given_values_are_kept(void) {
    epo_facts *facts = epo_facts_create();
    epo_facts_set(facts, "num_microbatches", "3", "test");
    epo_facts_set(facts, "moe_token_dispatcher_type", "alltoall", "test");
    epo_facts_set(facts, "moe_flex_dispatcher_backend", "hybridep", "test");
    epo_facts_set(facts, "gpu", "b200", "test");
    CU_ASSERT_EQUAL(epo_settings_derive(facts), EPO_OK);
    check_fact(facts, "num_microbatches", "3");
    check_fact(facts, "flex_backend", "(unset)"); /* not flex */
    check_fact(facts, "flex_backend_request", "hybridep");
    check_fact(facts, "gpu", "b200");
    check_fact(facts, "gpu_name", "NVIDIA B200");
    check_fact(facts, "nvl72", "False");
    epo_facts_destroy(facts);
}

static void a_comm_overlap_object_wins(void) {
    epo_facts *facts = epo_facts_create();
    epo_setting_put(facts, "model.overlap_moe_expert_parallel_comm", "true", "a.yaml:1", NULL);
    epo_setting_put(facts, "comm_overlap.overlap_moe_expert_parallel_comm", "null", "a.yaml:2",
                    NULL);
    CU_ASSERT_EQUAL(epo_settings_derive(facts), EPO_OK);
    check_fact(facts, "overlap_moe_expert_parallel_comm", "False");
    epo_facts_destroy(facts);
}

static void a_harness_sets_what_is_not_given(void) {
    epo_facts *facts = epo_facts_create();
    epo_setting_put(facts, "harness.moe_a2a_overlap", "true", "a.yaml:1", NULL);
    epo_setting_put(facts, "comm_overlap.delay_wgrad_compute", "false", "a.yaml:2", NULL);
    CU_ASSERT_EQUAL(epo_settings_derive(facts), EPO_OK);
    check_fact(facts, "overlap_moe_expert_parallel_comm", "True");
    check_fact(facts, "delay_wgrad_compute", "false");
    epo_facts_destroy(facts);
    facts = epo_facts_create();
    epo_setting_put(facts, "harness.moe_a2a_overlap", "false", "a.yaml:1", NULL);
    CU_ASSERT_EQUAL(epo_settings_derive(facts), EPO_OK);
    check_fact(facts, "overlap_moe_expert_parallel_comm", "(nobody told)");
    epo_facts_destroy(facts);
}

static void each_spelling_becomes_the_rules_own(void) {
    static const struct {
        const char *path, *value, *key, *text;
    } cases[] = {
        {"disable_bias_linear", "True", "add_bias_linear", "False"},
        {"disable_bias_linear", "1", "add_bias_linear", "False"},
        {"disable_bias_linear", "false", "add_bias_linear", "True"},
        {"model.recompute_activations", "true", "recompute_granularity", "selective"},
        {"model.recompute_activations", "False", "recompute_granularity", "(nobody told)"},
        {"num_experts", "8", "num_moe_experts", "8"},
        {"num_experts", NULL, "num_moe_experts", "(unknown)"},
        {"dataset._target_", "x.FinetuningDatasetConfig", "dataset_is_finetune", "true"},
        {"dataset._target_", "x.HFDatasetConfig", "dataset_is_finetune", "true"},
        {"dataset._target_", "x.GPTDatasetConfig", "dataset_is_finetune", "false"},
        {"dataset._target_", "x.EnergonProvider", "dataset_is_energon", "true"},
        {"dataset_target", "x.GPTDatasetConfig", "dataset_is_energon", "false"},
        {"mixed_precision", "bf16_with_fp8_current_scaling_mixed", "bf16", "true"},
        {"mixed_precision", "bf16_with_fp8_current_scaling_mixed", "fp16", "false"},
        {"mixed_precision", "bf16_with_fp8_current_scaling_mixed", "fp8", "hybrid"},
        {"mixed_precision", "fp16_mixed", "fp8", "(nobody told)"},
        {"mixed_precision", "null", "bf16", "(nobody told)"},
        {"comm_overlap", "None", "comm_overlap_present", "false"},
        {"comm_overlap", "{}", "comm_overlap_present", "true"},
        {"dataset.packed_sequence_specs", "null", "packed_sequence", "false"},
        {"dataset.packed_sequence_specs", "4096", "packed_sequence", "true"},
        {"pipeline_model_parallel_layout", "E|t*4|L", "virtual_pipeline_model_parallel_size",
         "(unknown)"},
        {"pipeline_model_parallel_layout", "None", "virtual_pipeline_model_parallel_size",
         "(nobody told)"},
        {"ddp.fsdp_unit_modules", "[TransformerLayer]", "fsdp_units_are_default", "true"},
        {"fsdp_unit_modules", "['megatron.core.MambaLayer', TransformerLayer]",
         "fsdp_units_are_default", "true"},
        {"fsdp_unit_modules", "[MyTransformerLayer]", "fsdp_units_are_default", "false"},
        {"fsdp_unit_modules", "[TransformerLayer, Mine]", "fsdp_units_are_default", "false"},
        {"fsdp_unit_modules", "[]", "fsdp_units_are_default", "false"},
        {"optimizer.use_distributed_optimizer", "true", "use_distributed_optimizer", "true"},
        {"optimizer.bf16", "true", "bf16", "(nobody told)"},
        {"model.vision.num_moe_experts", "4", "num_moe_experts", "(nobody told)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        epo_facts *facts = epo_facts_create();
        bool known = false;
        CU_ASSERT_EQUAL(epo_setting_put(facts, cases[i].path, cases[i].value, "a.yaml:1", &known),
                        EPO_OK);
        check_fact(facts, cases[i].key, cases[i].text);
        CU_ASSERT(known || strcmp(cases[i].text, "(nobody told)") == 0);
        epo_facts_destroy(facts);
    }
}

static void a_step_that_will_be_refused_is_seen(void) {
    static const struct {
        const char *text;
        epo_framework framework;
        bool lacks;
    } cases[] = {
        {"srun --ep-overlap=on python pretrain_gpt.py --bf16", EPO_FRAMEWORK_MEGATRON_LM, true},
        {"srun python pretrain_gpt.py --bf16", EPO_FRAMEWORK_MEGATRON_LM, false},
        {"srun --ep-overlap=on python pretrain_gpt.py --bf16 "
         "--overlap-moe-expert-parallel-comm",
         EPO_FRAMEWORK_MEGATRON_LM, false},
        {"srun --ep-overlap=on python pretrain_gpt.py --bf16 $MORE", EPO_FRAMEWORK_MEGATRON_LM,
         false},
        {"srun --ep-overlap=on ep-overlap exec -- python pretrain_gpt.py --bf16",
         EPO_FRAMEWORK_MEGATRON_LM, false},
        {"srun --ep-overlap=on python train.py --colour red", EPO_FRAMEWORK_UNKNOWN, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        epo_facts *facts = epo_facts_create();
        epo_command c = read_script(cases[i].text, facts);
        CU_ASSERT_EQUAL(c.framework, cases[i].framework);
        CU_ASSERT_EQUAL(c.step_lacks, cases[i].lacks);
        epo_facts_destroy(facts);
    }
}

static const char *value_of(const epo_launch_variable *v, size_t count, const char *name) {
    const char *found = NULL;
    for (size_t i = 0; i < count; i++)
        if (strcmp(v[i].name, name) == 0) {
            CU_ASSERT_PTR_NULL(found); /* once */
            found = v[i].value;
        }
    return found != NULL ? found : "-";
}

/* `facts`: "name=value;..." or "name:default;..." */
static epo_facts *facts_from(const char *text) {
    epo_facts *facts = epo_facts_create();
    char *copy = strdup(text), *rest = copy;
    for (char *word; (word = strsep(&rest, ";")) != NULL;) {
        char *mark = word + strcspn(word, "=:");
        bool given = *mark == '=';
        *mark = '\0';
        if (given)
            epo_facts_set(facts, word, mark + 1, "test");
        else
            epo_facts_set_default(facts, word, mark + 1, "test");
    }
    free(copy);
    return facts;
}

static void a_run_gets_what_its_facts_call_for(void) {
    static const struct {
        const char *facts, *variables[6]; /* connections, SM margin, NVLink domain, ranks, MNNVL,
                                             record streams */
        const char *lm, *bridge;
    } cases[] = {
        {"overlap_moe_expert_parallel_comm=true;moe_token_dispatcher_type=alltoall;nvl72=false",
         {"32", "16", "-", "-", "-", "-"},
         "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall",
         "comm_overlap.overlap_moe_expert_parallel_comm=true "
         "comm_overlap.delay_wgrad_compute=false model.moe_shared_expert_overlap=false "
         "model.moe_token_dispatcher_type=alltoall"},
        {"overlap_moe_expert_parallel_comm=true;moe_token_dispatcher_type=flex;"
         "flex_backend=hybridep;nvl72=false;expert_model_parallel_size=9;delay_wgrad_compute=true;"
         "cuda_graph_impl=none",
         {"32", "20", "8", "8", "0", "1"},
         "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type flex "
         "--moe-flex-dispatcher-backend hybridep --moe-router-dtype fp32 "
         "--expert-model-parallel-size 9 --delay-wgrad-compute",
         "comm_overlap.overlap_moe_expert_parallel_comm=true "
         "comm_overlap.delay_wgrad_compute=true model.moe_shared_expert_overlap=false "
         "model.moe_token_dispatcher_type=flex model.moe_flex_dispatcher_backend=hybridep "
         "model.moe_router_dtype=fp32 model.expert_model_parallel_size=9"},
        {"overlap_moe_expert_parallel_comm=false;moe_token_dispatcher_type:allgather;"
         "flex_backend=hybridep;nvl72=true;expert_model_parallel_size=64;"
         "cuda_graph_impl=full_iteration;gpu_major=9;tensor_model_parallel_size=2;"
         "context_parallel_size=1",
         {"1", "-", "72", "64", "1", "0"},
         "--moe-flex-dispatcher-backend hybridep --moe-router-dtype fp32 "
         "--expert-model-parallel-size 64",
         "comm_overlap.overlap_moe_expert_parallel_comm=false "
         "comm_overlap.delay_wgrad_compute=false model.moe_shared_expert_overlap=false "
         "model.moe_flex_dispatcher_backend=hybridep model.moe_router_dtype=fp32 "
         "model.expert_model_parallel_size=64"},
        {"flex_backend=hybridep;nvl72=false;expert_model_parallel_size=many",
         {"-", "-", "8", "-", "0", "-"},
         "--moe-flex-dispatcher-backend hybridep --moe-router-dtype fp32 "
         "--expert-model-parallel-size many",
         NULL},
        {"expert_model_parallel_size=null", {"-", "-", "-", "-", "-", "-"}, "", NULL},
    };
    static const char *const names[] = {"CUDA_DEVICE_MAX_CONNECTIONS",
                                        "NVTE_BWD_LAYERNORM_SM_MARGIN",
                                        "NVLINK_DOMAIN_SIZE",
                                        "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
                                        "USE_MNNVL",
                                        "TORCH_NCCL_AVOID_RECORD_STREAMS"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        epo_launch_variable v[EPO_LAUNCH_VARIABLES_MAX];
        char text[512];
        size_t count = 0;
        epo_facts *facts = facts_from(cases[i].facts);
        CU_ASSERT_EQUAL(epo_launch_environment(facts, v, &count), EPO_OK);
        for (int k = 0; k < 6; k++)
            CU_ASSERT_STRING_EQUAL(value_of(v, count, names[k]), cases[i].variables[k]);
        epo_launch_arguments(facts, EPO_FRAMEWORK_MEGATRON_LM, text, sizeof text);
        CU_ASSERT_STRING_EQUAL(text, cases[i].lm);
        if (cases[i].bridge != NULL) {
            epo_launch_arguments(facts, EPO_FRAMEWORK_BRIDGE, text, sizeof text);
            CU_ASSERT_STRING_EQUAL(text, cases[i].bridge);
        }
        epo_launch_arguments(facts, EPO_FRAMEWORK_MEGATRON_LM, text, 12); /* cut, and ended */
        CU_ASSERT(strlen(text) < 12 && strncmp(text, cases[i].lm, strlen(text)) == 0);
        epo_facts_destroy(facts);
    }
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"values are read as frameworks write them", values_are_read_as_frameworks_write_them},
        {"facts replace, and default", facts_replace_and_default},
        {"facts have a bound", facts_have_a_bound},
        {"a Megatron-LM command is read", a_megatron_command_is_read},
        {"Bridge's overrides are read", bridge_overrides_are_read},
        {"conditions decide nothing", conditions_decide_nothing},
        {"only what is exported reaches a program", only_what_is_exported_reaches_a_program},
        {"the harness says what it runs on", the_harness_says_what_it_runs_on},
        {"inner shells are looked into", inner_shells_are_looked_into},
        {"what follows is derived", what_follows_is_derived},
        {"virtual stages are reckoned", virtual_stages_are_reckoned},
        {"a pattern of layers is read", a_pattern_of_layers_is_read},
        {"given values are kept", given_values_are_kept},
        {"a comm_overlap object wins", a_comm_overlap_object_wins},
        {"a harness sets what is not given", a_harness_sets_what_is_not_given},
        {"each spelling becomes the rules' own", each_spelling_becomes_the_rules_own},
        {"a step that will be refused is seen", a_step_that_will_be_refused_is_seen},
        {"a run gets what its facts call for", a_run_gets_what_its_facts_call_for},
        CU_TEST_INFO_NULL,
    };
    return unit_run("rules_input", tests);
}
