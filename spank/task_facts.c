/* SPDX-License-Identifier: Apache-2.0
 *
 * task_facts.c - the run as rules see it: the task's own arguments, and over them
 * what was decided.
 */
#include "task.h"

#include "rules/command.h"
#include "rules/node.h"
#include "rules/program.h"
#include "rules/settings.h"

#define SOURCE "srun"

/* The settings of a framework's program; another program's arguments are its own. */
static epo_status read_arguments(const struct ep_vector *vector, epo_facts *facts) {
    epo_words words = {0};
    epo_program program;
    epo_command command;
    epo_status status = epo_program_read(vector->arguments, vector->count, &program);
    bool reads = status == EPO_OK && program.kind == EPO_PROGRAM_FRAMEWORK;
    epo_program_free(&program);
    for (int i = 0; reads && i < vector->count && status == EPO_OK; i++)
        status = epo_words_add(&words, vector->arguments[i], 0, false, i == 0);
    if (reads && status == EPO_OK)
        status = epo_command_read(&words, NULL, false, facts, &command);
    epo_words_free(&words);
    return status;
}

static epo_status read_programs(struct ep_plugin *plugin, spank_t spank, epo_facts *facts) {
    struct ep_programs programs;
    epo_status status = ep_task_programs(plugin, spank, &programs);
    for (size_t i = 0; i < programs.count && status == EPO_OK; i++)
        status = read_arguments(&programs.vectors[i], facts);
    ep_task_programs_free(&programs);
    return status;
}

bool ep_choice_given(const struct ep_plugin *plugin, epo_option_id id) {
    return plugin->decision.choice[id].source >= EPO_FROM_ENVIRONMENT;
}

bool ep_delay_wanted(const struct ep_plugin *plugin) {
    return plugin->decision.choice[EPO_OPT_DELAY_WGRAD].value == EPO_WGRAD_DELAYED &&
           (!plugin->decision.automatic || ep_choice_given(plugin, EPO_OPT_DELAY_WGRAD));
}

static const char *backend_of(const struct ep_plugin *plugin) {
    int dispatcher = plugin->decision.choice[EPO_OPT_DISPATCHER].value;
    const char *backend = epo_dispatcher_backend(dispatcher);
    if (backend != NULL || dispatcher == EPO_CHOICE_ALLTOALL)
        return backend;
    return epo_node_flex_backend(plugin->gpu_class);
}

static epo_status put_decision(const struct ep_plugin *plugin, epo_facts *facts) {
    const struct epo_choice *choice = plugin->decision.choice;
    bool delayed = ep_delay_wanted(plugin);
    char name[32]; /* the site may say "GB200" or "NVIDIA GB200" */
    const bool known =
        plugin->gpu_class != NULL && epo_node_gpu(plugin->gpu_class, name, sizeof name);
    enum { AT_TYPE = 2, AT_BACKEND = 3 };
    const char *const values[][2] = {
        {"overlap_moe_expert_parallel_comm", "true"},
        {"delay_wgrad_compute", delayed ? "true" : "false"},
        {"moe_token_dispatcher_type", epo_dispatcher_kind(choice[EPO_OPT_DISPATCHER].value)},
        {"moe_flex_dispatcher_backend", backend_of(plugin)},
        {"gpu", known ? name : plugin->gpu_class}};
    epo_status status = EPO_OK;
    /* a default gives way to the program's own dispatcher */
    bool own = !ep_choice_given(plugin, EPO_OPT_DISPATCHER) &&
               epo_facts_find(facts, "moe_token_dispatcher_type") != NULL;
    for (size_t i = 0; i < sizeof values / sizeof values[0] && status == EPO_OK; i++)
        if (values[i][1] != NULL && !(own && (i == AT_TYPE || i == AT_BACKEND)))
            status = epo_facts_set(facts, values[i][0], values[i][1], SOURCE);
    return status;
}

epo_facts *ep_task_facts(struct ep_plugin *plugin, spank_t spank) {
    epo_facts *facts = epo_facts_create();
    if (facts == NULL)
        return NULL;
    epo_status status = read_programs(plugin, spank, facts);
    if (status == EPO_OK)
        status = put_decision(plugin, facts);
    if (status == EPO_OK)
        status = epo_facts_set_default(facts, "cuda_graph_impl", "none", "not given");
    if (status == EPO_OK)
        status = epo_facts_set_default(facts, "nccl_ub", "false", "not given");
    if (status == EPO_OK)
        status = epo_settings_derive(facts);
    if (status != EPO_OK) {
        epo_facts_destroy(facts);
        return NULL;
    }
    return facts;
}
