/* SPDX-License-Identifier: Apache-2.0
 *
 * What follows from settings that somebody gave.  Nothing here replaces a value
 * that was given itself, but for Bridge's comm_overlap object, which does so in
 * the framework.
 */
#include "core/status.h"
#include "rules/settings.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const epo_fact *known(const epo_facts *facts, const char *key) {
    const epo_fact *fact = epo_facts_find(facts, key);
    return fact == NULL || fact->kind == EPO_FACT_UNKNOWN ? NULL : fact;
}

static bool number(const epo_facts *facts, const char *key, double *value) {
    const epo_fact *fact = known(facts, key);
    if (fact == NULL || fact->kind != EPO_FACT_NUMBER)
        return false;
    *value = fact->number;
    return true;
}

static epo_status set_number(epo_facts *facts, const char *key, double value, const char *source) {
    char text[32];
    snprintf(text, sizeof text, "%.10g", value);
    return epo_facts_set(facts, key, text, source);
}

/* Bridge: the object's field replaces the model's, an unset field makes it false. */
static epo_status apply_comm_overlap(epo_facts *facts, const char *leaf) {
    char path[96];
    snprintf(path, sizeof path, "comm_overlap.%s", leaf);
    const epo_fact *present = known(facts, "comm_overlap_present");
    const epo_fact *field = epo_facts_find(facts, path);
    if (!epo_fact_is_true(present) || field == NULL || field->is_default)
        return EPO_OK;
    if (field->kind == EPO_FACT_UNKNOWN)
        return epo_facts_set_unknown(facts, leaf, "?", path);
    return epo_facts_set(facts, leaf, field->kind == EPO_FACT_NULL ? "False" : field->text, path);
}

/* --moe_a2a_overlap true sets both fields, unless they are given themselves. */
static epo_status apply_harness(epo_facts *facts) {
    static const char *const leaves[] = {"overlap_moe_expert_parallel_comm", "delay_wgrad_compute"};
    epo_status status = EPO_OK;
    const epo_fact *given = known(facts, "harness.moe_a2a_overlap");
    bool is_given = given != NULL && given->kind != EPO_FACT_NULL;
    bool on = epo_fact_is_true(given);
    for (int i = 0; i < 2 && is_given && status == EPO_OK; i++) {
        char path[96];
        snprintf(path, sizeof path, "comm_overlap.%s", leaves[i]);
        status = epo_facts_set_default(facts, path, NULL, "not given");
        if (on && status == EPO_OK && known(facts, path) != NULL &&
            known(facts, path)->kind == EPO_FACT_NULL)
            status = epo_facts_set(facts, leaves[i], "True", "--moe_a2a_overlap true");
    }
    return status;
}

static epo_status derive_parallel(epo_facts *facts) {
    double world, tp, pp, cp, dp, gbs, mbs;
    epo_status status = EPO_OK;
    if (number(facts, "world_size", &world) && number(facts, "tensor_model_parallel_size", &tp) &&
        number(facts, "pipeline_model_parallel_size", &pp) &&
        number(facts, "context_parallel_size", &cp) && tp * pp * cp > 0 &&
        known(facts, "data_parallel_size") == NULL)
        status = set_number(facts, "data_parallel_size", world / (tp * pp * cp),
                            "world_size / (TP x PP x CP)");
    if (status == EPO_OK && known(facts, "num_microbatches") == NULL &&
        number(facts, "global_batch_size", &gbs) && number(facts, "micro_batch_size", &mbs) &&
        number(facts, "data_parallel_size", &dp) && mbs * dp > 0)
        status = set_number(facts, "num_microbatches", gbs / (mbs * dp),
                            "global_batch_size / (micro_batch_size x DP)");
    return status;
}

/* Megatron-LM takes one virtual stage for none, so that the schedule is not interleaved. */
static epo_status set_virtual_stages(epo_facts *facts, double stages, const char *source) {
    if (stages == 1)
        return epo_facts_set(facts, "virtual_pipeline_model_parallel_size", NULL, source);
    return set_number(facts, "virtual_pipeline_model_parallel_size", stages, source);
}

#define STAGES_MAX 4096

/* Stages of a layout: "Et*3|(tt|)*29m|L" has 32. 0: cannot be told. */
static size_t count_stages(const char *layout) {
    size_t bars = 0, before_group = 0, group = 0;
    for (const char *at = layout; *at != '\0'; at++) {
        if (*at == '|')
            bars++;
        else if (*at == '(')
            before_group = bars;
        else if (*at == ')')
            group = bars - before_group;
        else if (*at == '*' && isdigit((unsigned char)at[1]) && at > layout && at[-1] == ')') {
            unsigned long times = strtoul(at + 1, NULL, 10);
            if (times == 0 || times > STAGES_MAX)
                return 0;
            bars += group * (times - 1);
        } else if (strchr("[{$'\"", *at) != NULL)
            return 0; /* a Python list, a variable */
        if (bars >= STAGES_MAX)
            return 0;
    }
    return bars + 1;
}

static epo_status derive_layout(epo_facts *facts, double pp) {
    const epo_fact *layout = known(facts, "pipeline_model_parallel_layout");
    size_t stages = layout == NULL ? 0 : count_stages(layout->text);
    if (stages == 0 || !(pp >= 1 && pp <= STAGES_MAX) || stages % (size_t)pp != 0)
        return EPO_OK;
    return set_virtual_stages(facts, (double)stages / pp, "--pipeline-model-parallel-layout");
}

static epo_status derive_virtual_stages(epo_facts *facts) {
    double per_stage, layers, pp = 0;
    const epo_fact *given = epo_facts_find(facts, "virtual_pipeline_model_parallel_size");
    (void)number(facts, "pipeline_model_parallel_size", &pp);
    if (known(facts, "pipeline_model_parallel_layout") != NULL)
        return derive_layout(facts, pp);
    if (known(facts, "num_layers_per_virtual_pipeline_stage") == NULL ||
        (given != NULL && !given->is_default))
        return EPO_OK;
    static const char source[] = "--num-layers-per-virtual-pipeline-stage";
    if (number(facts, "num_layers_per_virtual_pipeline_stage", &per_stage) && per_stage > 0 &&
        number(facts, "num_layers", &layers) && pp > 0) {
        layers += epo_fact_is_true(known(facts, "account_for_embedding_in_pipeline_split"));
        layers += epo_fact_is_true(known(facts, "account_for_loss_in_pipeline_split"));
        return set_virtual_stages(facts, layers / pp / per_stage, source);
    }
    return epo_facts_set_text(facts, "virtual_pipeline_model_parallel_size", "set", source);
}

/* The backend in use, and the one that somebody named. */
static epo_status derive_backend(epo_facts *facts) {
    const epo_fact *backend = known(facts, "moe_flex_dispatcher_backend");
    epo_status status = EPO_OK;
    if (known(facts, "flex_backend_request") == NULL && backend != NULL)
        status = epo_facts_set(
            facts, "flex_backend_request",
            backend->is_default || backend->kind == EPO_FACT_NULL ? NULL : backend->text,
            backend->source);
    const epo_fact *type = known(facts, "moe_token_dispatcher_type");
    /* the table may have moved */
    backend = known(facts, "moe_flex_dispatcher_backend");
    if (status != EPO_OK || known(facts, "flex_backend") != NULL || type == NULL)
        return status;
    if (strcmp(type->text, "flex") != 0)
        return epo_facts_set(facts, "flex_backend", NULL, type->source);
    if (backend == NULL)
        return EPO_OK;
    return epo_facts_set(facts, "flex_backend",
                         backend->kind == EPO_FACT_NULL ? NULL : backend->text, backend->source);
}

/* As Megatron-LM computes it: captured attention, or a captured router beside
 * shared experts that run on their own. */
static epo_status derive_graph_scope(epo_facts *facts) {
    const epo_fact *modules = known(facts, "cuda_graph_modules");
    const epo_fact *size = known(facts, "moe_shared_expert_intermediate_size");
    const epo_fact *overlap = known(facts, "moe_shared_expert_overlap");
    if (modules == NULL || known(facts, "wgrad_in_graph_scope") != NULL)
        return EPO_OK;
    if (epo_fact_has_word(modules, "attn", 4))
        return epo_facts_set(facts, "wgrad_in_graph_scope", "True", modules->source);
    if (!epo_fact_has_word(modules, "moe_router", 10))
        return epo_facts_set(facts, "wgrad_in_graph_scope", "False", modules->source);
    if (size == NULL || overlap == NULL)
        return EPO_OK;
    bool holds = size->kind != EPO_FACT_NULL && !epo_fact_is_true(overlap);
    return epo_facts_set(facts, "wgrad_in_graph_scope", holds ? "True" : "False", modules->source);
}

/* A 0 by itself: that of [1]*10 is none. */
static bool has_zero(const char *text) {
    for (const char *at = text; (at = strchr(at, '0')) != NULL; at++)
        if ((at == text || !isdigit((unsigned char)at[-1])) && !isdigit((unsigned char)at[1]))
            return true;
    return false;
}

static epo_status derive_layers(epo_facts *facts) {
    const epo_fact *freq = known(facts, "moe_layer_freq");
    const epo_fact *experts = known(facts, "num_moe_experts");
    if (known(facts, "every_layer_is_moe") != NULL || freq == NULL || experts == NULL)
        return EPO_OK;
    bool all = experts->kind != EPO_FACT_NULL && freq->kind == EPO_FACT_NUMBER && freq->number == 1;
    if (freq->kind != EPO_FACT_NUMBER) /* [1]*48, [1, 1, 1]: a pattern with no 0 */
        all = experts->kind != EPO_FACT_NULL && !has_zero(freq->text);
    return epo_facts_set(facts, "every_layer_is_moe", all ? "True" : "False", freq->source);
}

typedef struct gpu_class {
    const char *word; /* in the driver's name */
    const char *gpu;
    int major;
    bool nvl72;
} gpu_class;

/* GB200 before B200: the longer word first. */
static const gpu_class gpu_classes[] = {
    {"gb300", "gb300", 10, true},
    {"gb200", "gb200", 10, true},
    {"b300", "b300", 10, false},
    {"b200", "b200", 10, false},
    {"gh200", "gh200", 9, false},
    {"h200", "h200", 9, false},
    {"h100", "h100", 9, false},
    {"h800", "h100", 9, false},
    {"h20", "h20", 9, false},
    {"a100", "a100", 8, false},
    {"a800", "a100", 8, false},
    {"a30", "a30", 8, false},
    {"a10", "a10", 8, false},
    {"l40", "l40", 8, false},
    {"l4", "l4", 8, false},
    {"v100", "v100", 7, false},
    {"t4", "t4", 7, false},
    {"rtx 50", "rtx50", 12, false},
    {"rtx pro 6000", "rtx6000", 12, false},
};

static bool contains(const char *text, const char *word) {
    size_t n = strlen(word);
    for (; *text != '\0'; text++)
        if (strncasecmp(text, word, n) == 0 && !isdigit((unsigned char)text[n]))
            return true;
    return false;
}

static epo_status derive_gpu(epo_facts *facts) {
    const epo_fact *gpu = known(facts, "gpu");
    const epo_fact *name = known(facts, "gpu_name");
    const char *text = gpu != NULL ? gpu->text : name != NULL ? name->text : NULL;
    for (size_t i = 0; text != NULL && i < sizeof gpu_classes / sizeof *gpu_classes; i++) {
        const gpu_class *c = &gpu_classes[i];
        if (!contains(text, c->word))
            continue;
        char full[64];
        snprintf(full, sizeof full, "NVIDIA %s", c->gpu);
        for (char *f = full + 7; *f != '\0'; f++)
            *f = (char)toupper((unsigned char)*f);
        epo_status status = EPO_OK;
        if (known(facts, "gpu_major") == NULL)
            status = set_number(facts, "gpu_major", c->major, "gpu");
        if (status == EPO_OK && known(facts, "nvl72") == NULL)
            status = epo_facts_set(facts, "nvl72", c->nvl72 ? "True" : "False", "gpu");
        if (status == EPO_OK && known(facts, "gpu") == NULL)
            status = epo_facts_set(facts, "gpu", c->gpu, "gpu_name");
        if (status == EPO_OK && known(facts, "gpu_name") == NULL)
            status = epo_facts_set(facts, "gpu_name", full, "gpu");
        return status;
    }
    return EPO_OK;
}

/* An unset implementation is the word "none". */
static epo_status normalise_graphs(epo_facts *facts) {
    const epo_fact *impl = known(facts, "cuda_graph_impl");
    if (impl == NULL || impl->kind != EPO_FACT_NULL)
        return EPO_OK;
    char source[256];
    snprintf(source, sizeof source, "%s", impl->source);
    return epo_facts_set(facts, "cuda_graph_impl", "none", source);
}

epo_status epo_settings_derive(epo_facts *facts) {
    epo_status status = apply_harness(facts);
    if (status == EPO_OK)
        status = apply_comm_overlap(facts, "overlap_moe_expert_parallel_comm");
    if (status == EPO_OK)
        status = apply_comm_overlap(facts, "delay_wgrad_compute");
    epo_status (*const steps[])(epo_facts *) = {
        normalise_graphs,   derive_virtual_stages, derive_parallel, derive_backend,
        derive_graph_scope, derive_layers,         derive_gpu};
    for (size_t i = 0; i < sizeof steps / sizeof *steps && status == EPO_OK; i++)
        status = steps[i](facts);
    return status;
}
