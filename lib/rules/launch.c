/* SPDX-License-Identifier: Apache-2.0
 *
 * Sources: the perf_recipes and perf_plugins of Megatron-Bridge, its
 * scripts/performance/utils/utils.py, Megatron-LM's moe/README.md.
 */
#include "rules/launch.h"

#include "core/status.h"
#include "rules/condition.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define OVERLAP "overlap_moe_expert_parallel_comm"

typedef struct variable {
    const char *name, *value; /* "@ep": EP; "@ep8": the smaller of EP and 8 */
    const char *when, *why;
} variable;

static const variable variables[] = {
    {"CUDA_DEVICE_MAX_CONNECTIONS", "32", OVERLAP, "streams need queues of their own"},
    {"CUDA_DEVICE_MAX_CONNECTIONS", "1",
     OVERLAP " == false && gpu_major < 10 && (tensor_model_parallel_size > 1 || "
             "context_parallel_size > 1)",
     "Megatron-LM asks for it without overlap, before Blackwell, with TP or CP"},
    {"TORCH_NCCL_HIGH_PRIORITY", "1", "true == true", "communication kernels start first"},
    {"TORCH_NCCL_AVOID_RECORD_STREAMS", "0", "cuda_graph_impl == 'full_iteration'",
     "graphs of the whole iteration"},
    {"TORCH_NCCL_AVOID_RECORD_STREAMS", "1", OVERLAP " && cuda_graph_impl != 'full_iteration'",
     "memory is given back earlier"},
    {"PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "!nccl_ub", "less fragmentation"},
    {"NCCL_GRAPH_REGISTER", "0", "!nccl_ub", "goes with expandable segments"},
    {"NVTE_FWD_LAYERNORM_SM_MARGIN", "20", OVERLAP " && moe_token_dispatcher_type == 'flex'",
     "SMs left to the dispatch"},
    {"NVTE_BWD_LAYERNORM_SM_MARGIN", "20", OVERLAP " && moe_token_dispatcher_type == 'flex'",
     "SMs left to the dispatch"},
    {"NVTE_FWD_LAYERNORM_SM_MARGIN", "16", OVERLAP " && moe_token_dispatcher_type == 'alltoall'",
     "SMs left to NCCL"},
    {"NVTE_BWD_LAYERNORM_SM_MARGIN", "16", OVERLAP " && moe_token_dispatcher_type == 'alltoall'",
     "SMs left to NCCL"},
    {"NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "@ep8", "flex_backend == 'hybridep' && !nvl72",
     "GPUs that NVLink joins, of the EP group"},
    {"NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "@ep", "flex_backend == 'hybridep' && nvl72",
     "GPUs that NVLink joins, of the EP group"},
    {"NVLINK_DOMAIN_SIZE", "8", "flex_backend == 'hybridep' && !nvl72", "GPUs that NVLink joins"},
    {"NVLINK_DOMAIN_SIZE", "72", "flex_backend == 'hybridep' && nvl72", "GPUs that NVLink joins"},
    {"USE_MNNVL", "0", "flex_backend == 'hybridep' && !nvl72", "NVLink ends at the node"},
    {"USE_MNNVL", "1", "flex_backend == 'hybridep' && nvl72", "NVLink reaches over nodes"},
    {"NUM_OF_TOKENS_PER_CHUNK_COMBINE_API", "64", "flex_backend == 'hybridep'",
     "chunk of HybridEP's combine"},
};

static bool value_of(const variable *v, const epo_facts *facts, char *text, size_t size) {
    if (v->value[0] != '@') {
        snprintf(text, size, "%s", v->value);
        return true;
    }
    const epo_fact *ep = epo_facts_find(facts, "expert_model_parallel_size");
    if (ep == NULL || ep->kind != EPO_FACT_NUMBER)
        return false;
    double ranks = strcmp(v->value, "@ep8") == 0 && ep->number > 8 ? 8 : ep->number;
    snprintf(text, size, "%.0f", ranks);
    return true;
}

epo_status epo_launch_environment(const epo_facts *facts, epo_launch_variable *out, size_t *count) {
    size_t used = 0;
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        const variable *v = &variables[i];
        epo_condition_result when;
        epo_status status = epo_condition_evaluate(v->when, facts, &when);
        if (status != EPO_OK)
            return status;
        epo_launch_variable *to = &out[used];
        if (when.truth != EPO_TRUE || used == EPO_LAUNCH_VARIABLES_MAX ||
            !value_of(v, facts, to->value, sizeof to->value))
            continue;
        to->name = v->name;
        to->why = v->why;
        used++;
    }
    *count = used;
    return EPO_OK;
}

static void append(char *text, size_t size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void append(char *text, size_t size, const char *format, ...) {
    size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, size - used, format, args);
    va_end(args);
}

/* A framework's default need not be said. */
static const char *text_of(const epo_facts *facts, const char *key) {
    const epo_fact *fact = epo_facts_find(facts, key);
    return fact == NULL || fact->is_default || fact->kind == EPO_FACT_UNKNOWN ||
                   fact->kind == EPO_FACT_NULL
               ? NULL
               : fact->text;
}

static bool is_on(const epo_facts *facts, const char *key) {
    return epo_fact_is_true(epo_facts_find(facts, key));
}

static void megatron_lm(const epo_facts *facts, char *text, size_t size) {
    const char *dispatcher = text_of(facts, "moe_token_dispatcher_type");
    const char *backend = text_of(facts, "flex_backend");
    const char *ep = text_of(facts, "expert_model_parallel_size");
    if (is_on(facts, "overlap_moe_expert_parallel_comm"))
        append(text, size, "--overlap-moe-expert-parallel-comm ");
    if (dispatcher != NULL)
        append(text, size, "--moe-token-dispatcher-type %s ", dispatcher);
    if (backend != NULL)
        append(text, size, "--moe-flex-dispatcher-backend %s --moe-router-dtype fp32 ", backend);
    if (ep != NULL)
        append(text, size, "--expert-model-parallel-size %s ", ep);
    if (is_on(facts, "delay_wgrad_compute"))
        append(text, size, "--delay-wgrad-compute ");
}

/* The baseline names both fields too: a recipe may have turned them on. */
static void bridge(const epo_facts *facts, char *text, size_t size) {
    const char *dispatcher = text_of(facts, "moe_token_dispatcher_type");
    const char *backend = text_of(facts, "flex_backend");
    const char *ep = text_of(facts, "expert_model_parallel_size");
    append(text, size,
           "comm_overlap.overlap_moe_expert_parallel_comm=%s comm_overlap.delay_wgrad_compute=%s "
           "model.moe_shared_expert_overlap=false ",
           is_on(facts, "overlap_moe_expert_parallel_comm") ? "true" : "false",
           is_on(facts, "delay_wgrad_compute") ? "true" : "false");
    if (dispatcher != NULL)
        append(text, size, "model.moe_token_dispatcher_type=%s ", dispatcher);
    if (backend != NULL)
        append(text, size, "model.moe_flex_dispatcher_backend=%s model.moe_router_dtype=fp32 ",
               backend);
    if (ep != NULL)
        append(text, size, "model.expert_model_parallel_size=%s ", ep);
}

void epo_launch_arguments(const epo_facts *facts, epo_framework framework, char *text,
                          size_t size) {
    text[0] = '\0';
    if (framework == EPO_FRAMEWORK_BRIDGE)
        bridge(facts, text, size);
    else
        megatron_lm(facts, text, size);
    size_t length = strlen(text);
    if (length > 0 && text[length - 1] == ' ')
        text[length - 1] = '\0';
}
