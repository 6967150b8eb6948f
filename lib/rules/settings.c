/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/settings.h"

#include "core/status.h"
#include "rules/rules.h"

#include <stdio.h>
#include <string.h>

/* How a spelling becomes the rules' name. */
typedef enum alias_kind {
    ALIAS_SAME,   /* the same value */
    ALIAS_NOT,    /* the opposite of a switch */
    ALIAS_IF_TRUE /* `value`, if the switch is on */
} alias_kind;

typedef struct alias {
    const char *spelling, *key;
    alias_kind kind;
    const char *value;
} alias;

static const alias aliases[] = {
    {"num_experts", "num_moe_experts", ALIAS_SAME, NULL},
    {"fp8_format", "fp8", ALIAS_SAME, NULL},
    {"fp4_format", "fp4", ALIAS_SAME, NULL},
    {"cuda_graph_scope", "cuda_graph_modules", ALIAS_SAME, NULL},
    {"num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size", ALIAS_SAME,
     NULL},
    {"use_custom_fsdp", "use_megatron_fsdp", ALIAS_SAME, NULL},
    {"use_nccl_ub", "nccl_ub", ALIAS_SAME, NULL},
    {"distributed_backend_pipeline", "pipeline_backend", ALIAS_SAME, NULL},
    {"pipeline_model_parallel_comm_backend", "pipeline_backend", ALIAS_SAME, NULL},
    {"moe_a2a_overlap", "harness.moe_a2a_overlap", ALIAS_SAME, NULL},
    {"nvtx_ranges", "profiling.nvtx_ranges", ALIAS_SAME, NULL},
    {"double_buffer", "fsdp_double_buffer", ALIAS_SAME, NULL},
    {"disable_bias_linear", "add_bias_linear", ALIAS_NOT, NULL},
    {"no_gradient_accumulation_fusion", "gradient_accumulation_fusion", ALIAS_NOT, NULL},
    {"recompute_activations", "recompute_granularity", ALIAS_IF_TRUE, "selective"},
    {"enable_cuda_graph", "cuda_graph_impl", ALIAS_IF_TRUE, "local"},
    {"external_cuda_graph", "cuda_graph_impl", ALIAS_IF_TRUE, "transformer_engine"},
    {"sft", "dataset_is_finetune", ALIAS_SAME, NULL},
    {"fake_process_group", "fake_process_group", ALIAS_SAME, NULL},
};

static bool is_true(const char *value) {
    return strcmp(value, "true") == 0 || strcmp(value, "True") == 0 || strcmp(value, "1") == 0;
}

static epo_status put(epo_facts *facts, const char *key, const char *value, const char *source) {
    return value == NULL ? epo_facts_set_unknown(facts, key, "?", source)
                         : epo_facts_set(facts, key, value, source);
}

static epo_status put_alias(epo_facts *facts, const alias *a, const char *value,
                            const char *source) {
    if (a->kind == ALIAS_SAME || value == NULL)
        return put(facts, a->key, value, source);
    if (a->kind == ALIAS_NOT)
        return put(facts, a->key, is_true(value) ? "False" : "True", source);
    return is_true(value) ? put(facts, a->key, a->value, source) : EPO_OK;
}

static bool starts(const char *text, const char *head) {
    return strncmp(text, head, strlen(head)) == 0;
}

static bool is_null(const char *value) {
    return value != NULL && (strcmp(value, "null") == 0 || strcmp(value, "None") == 0);
}

static epo_status put_data_set(epo_facts *facts, const char *value, const char *source) {
    bool energon = strstr(value, "Energon") != NULL;
    epo_status status =
        epo_facts_set(facts, "dataset_is_energon", energon ? "true" : "false", source);
    bool finetune = strstr(value, "Finetun") != NULL || strstr(value, "HFDataset") != NULL;
    if (status == EPO_OK)
        status = epo_facts_set(facts, "dataset_is_finetune", finetune ? "true" : "false", source);
    return status;
}

/* mixed_precision=bf16_with_fp8_current_scaling_mixed and the like. */
static epo_status put_mixed_precision(epo_facts *facts, const char *value, const char *source) {
    epo_status status = EPO_OK;
    if (is_null(value))
        return EPO_OK;
    status = epo_facts_set(facts, "bf16", strstr(value, "bf16") ? "true" : "false", source);
    if (status == EPO_OK)
        status = epo_facts_set(facts, "fp16", strstr(value, "fp16") ? "true" : "false", source);
    if (status == EPO_OK && strstr(value, "fp8") != NULL)
        status = epo_facts_set(facts, "fp8", "hybrid", source);
    return status;
}

static epo_status put_fsdp_units(epo_facts *facts, const char *value, const char *source) {
    static const char *const supported[] = {"TransformerLayer", "MoETransformerLayer",
                                            "MambaLayer"};
    epo_facts *scratch = epo_facts_create();
    if (scratch == NULL)
        return epo_fail(EPO_E_NOMEM, "settings: no memory");
    epo_status status = epo_facts_set(scratch, "units", value, source);
    const epo_fact *units = epo_facts_find(scratch, "units");
    bool all = units != NULL && units->text[0] != '\0';
    for (const char *at = all ? units->text : ""; *at != '\0';) {
        size_t length = strcspn(at, ",");
        bool found = false;
        for (size_t i = 0; i < sizeof supported / sizeof *supported; i++) {
            size_t n = strlen(supported[i]); /* megatron.core...TransformerLayer too */
            found = found || (length >= n && memcmp(at + length - n, supported[i], n) == 0 &&
                              (length == n || at[length - n - 1] == '.'));
        }
        all = all && found;
        at += length + (at[length] == ',');
    }
    if (status == EPO_OK)
        status = epo_facts_set(facts, "fsdp_units_are_default", all ? "true" : "false", source);
    epo_facts_destroy(scratch);
    return status;
}

/* The stages are counted once everything given is in. */
static epo_status put_layout(epo_facts *facts, const char *value, const char *source) {
    epo_status status = epo_facts_set_unknown(facts, "virtual_pipeline_model_parallel_size",
                                              "from pipeline_model_parallel_layout", source);
    return status == EPO_OK
               ? epo_facts_set_text(facts, "pipeline_model_parallel_layout", value, source)
               : status;
}

/* Settings that need more than a new name; *done tells whether this was one. */
static epo_status put_special(epo_facts *facts, const char *path, const char *value,
                              const char *source, bool *done) {
    static const char stages[] = "virtual_pipeline_model_parallel_size";
    *done = true;
    if (value == NULL) {
        *done = strcmp(path, "num_layers_per_virtual_pipeline_stage") == 0 ||
                strcmp(path, "pipeline_model_parallel_layout") == 0;
        return *done ? epo_facts_set_unknown(facts, stages, "?", source) : EPO_OK;
    }
    if (strcmp(path, "dataset._target_") == 0 || strcmp(path, "dataset_target") == 0)
        return put_data_set(facts, value, source);
    if (strcmp(path, "mixed_precision") == 0)
        return put_mixed_precision(facts, value, source);
    if (strcmp(path, "comm_overlap") == 0)
        return epo_facts_set(facts, "comm_overlap_present", is_null(value) ? "false" : "true",
                             source);
    if (strcmp(path, "dataset.packed_sequence_specs") == 0)
        return epo_facts_set(facts, "packed_sequence", is_null(value) ? "false" : "true", source);
    if (strcmp(path, "num_layers_per_virtual_pipeline_stage") == 0 ||
        strncmp(path, "account_for_", 12) == 0)
        return is_null(value) ? EPO_OK : epo_facts_set(facts, path, value, source);
    if (strcmp(path, "num_virtual_stages_per_pipeline_rank") == 0 && strcmp(value, "1") == 0)
        return epo_facts_set(facts, stages, NULL, source);
    if (strcmp(path, "pipeline_model_parallel_layout") == 0)
        return is_null(value) ? EPO_OK : put_layout(facts, value, source);
    const char *leaf = strrchr(path, '.');
    if (strcmp(leaf == NULL ? path : leaf + 1, "fsdp_unit_modules") == 0)
        return put_fsdp_units(facts, value, source);
    *done = false;
    return EPO_OK;
}

/* comm_overlap.* wins over the model's own field (see epo_settings_derive). */
static epo_status put_comm_overlap(epo_facts *facts, const char *path, const char *value,
                                   const char *source, bool *known) {
    const char *leaf = path + strlen("comm_overlap.");
    epo_status status = epo_facts_set(facts, "comm_overlap_present", "true", source);
    *known = epo_keys_find(path, strlen(path)) != NULL;
    if (status == EPO_OK && *known)
        return put(facts, path, value, source);
    *known = epo_keys_find(leaf, strlen(leaf)) != NULL;
    return status == EPO_OK && *known && !is_null(value) ? put(facts, leaf, value, source) : status;
}

/* The leaf of a path whose object holds settings that rules read; NULL: another object's. */
static const char *leaf_of(const char *path) {
    static const char *const objects[] = {"model.transformer.",
                                          "model.",
                                          "ddp.",
                                          "dist.",
                                          "train.",
                                          "dataset.",
                                          "profiling.",
                                          "logger.",
                                          "mixed_precision.",
                                          "comm_overlap.",
                                          "harness."};
    for (size_t i = 0; i < sizeof objects / sizeof *objects; i++)
        if (starts(path, objects[i])) {
            const char *leaf = path + strlen(objects[i]);
            return strchr(leaf, '.') == NULL ? leaf : NULL;
        }
    if (strcmp(path, "optimizer.use_distributed_optimizer") == 0)
        return path + strlen("optimizer.");
    return strchr(path, '.') == NULL ? path : NULL;
}

epo_status epo_setting_put(epo_facts *facts, const char *path, const char *value,
                           const char *source, bool *known) {
    bool scratch, done;
    known = known == NULL ? &scratch : known;
    *known = false;
    epo_status status = put_special(facts, path, value, source, &done);
    if (status != EPO_OK || done) {
        *known = true;
        return status;
    }
    const char *dot = strchr(path, '.');
    if (starts(path, "comm_overlap.") && dot == strrchr(path, '.'))
        return put_comm_overlap(facts, path, value, source, known);
    if (strcmp(path, "model.overlap_moe_expert_parallel_comm") == 0)
        status = put(facts, path, value, source);
    if (strcmp(path, "harness.recompute_num_layers") == 0)
        status = put(facts, path, value, source);
    const char *leaf = leaf_of(path);
    if (status != EPO_OK || leaf == NULL)
        return status;
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++)
        if (strcmp(aliases[i].spelling, leaf) == 0) {
            *known = true;
            return put_alias(facts, &aliases[i], value, source);
        }
    *known = epo_keys_find(leaf, strlen(leaf)) != NULL;
    return *known ? put(facts, leaf, value, source) : EPO_OK;
}

epo_status epo_settings_default(epo_facts *facts, epo_defaults from) {
    bool lm = from == EPO_DEFAULTS_MEGATRON_LM;
    const char *source = lm ? "Megatron-LM's default" : "Megatron-Core's default";
    for (size_t i = 0; i < epo_keys_count(); i++) {
        const epo_key *key = epo_keys_at(i);
        const char *value = lm ? key->lm_default : key->core_default;
        epo_status status =
            value == NULL ? EPO_OK : epo_facts_set_default(facts, key->name, value, source);
        if (status != EPO_OK)
            return status;
    }
    return EPO_OK;
}
