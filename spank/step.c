/* SPDX-License-Identifier: Apache-2.0
 *
 * step.c - what happens in slurmstepd before the tasks are forked: it reads and
 * decides, and leaves every failure to task_init, because a failure here would
 * drain the node.
 */
#include "context.h"
#include "record.h"

#include "core/auto.h"
#include "core/names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *ep_node_name(const struct ep_plugin *plugin) {
    const char *name = plugin->api->own_getenv("SLURMD_NODENAME");
    return name != NULL ? name : "this node";
}

/* The strings that task_getenv gave, to be freed together. */
struct variables {
    struct ep_plugin *plugin;
    spank_t spank;
    char *got[8];
    int count;
    gid_t groups[EP_GROUPS_MAX];
};

static const char *task_variable(void *from, const char *name) {
    struct variables *variables = from;
    if (variables->count == (int)(sizeof variables->got / sizeof variables->got[0]))
        return NULL;
    char *value = variables->plugin->api->task_getenv(variables->spank, name);
    if (value != NULL)
        variables->got[variables->count++] = value;
    return value;
}

/* Without a record (srun had no plugin) the nodes decide, all by the same: the
 * options, the user's environment and the list of the step's nodes. */
static epo_status decide(struct ep_plugin *plugin, struct epo_policy_input *input,
                         struct variables *variables) {
    epo_status status = ep_settings_environment(task_variable, variables, input->environment);
    if (status != EPO_OK) {
        wrap_format(plugin->api->log_info, "ep-overlap: step %lu.%lu: %s; it is ignored",
                    (unsigned long)plugin->job, (unsigned long)plugin->step, epo_fail_text());
        for (int id = 0; id < EPO_OPT_COUNT; id++)
            input->environment[id] = EPO_UNSET;
    }
    memcpy(input->command, plugin->command, sizeof input->command);
    return epo_policy_decide(input, &plugin->decision);
}

/* `auto` that waited for the nodes: all of them know the list of the step's. */
static epo_status decide_pending(struct ep_plugin *plugin, struct epo_policy_input *input) {
    bool any_option = plugin->decision.any_option;
    for (int id = 0; id < EPO_OPT_COUNT; id++) {
        const struct epo_choice *choice = &plugin->decision.choice[id];
        if (choice->source == EPO_FROM_COMMAND)
            input->command[id] = choice->value;
        else if (choice->source == EPO_FROM_INHERITED)
            input->inherited[id] = choice->value;
        else if (choice->source == EPO_FROM_ENVIRONMENT)
            input->environment[id] = choice->value;
    }
    epo_status status = epo_policy_decide(input, &plugin->decision);
    plugin->decision.any_option = any_option;
    return status;
}

/* What was decided on for the step is held against this node's own policy.  A
 * node of another opinion refuses: the nodes of a step never differ. */
static epo_status verify(struct ep_plugin *plugin, struct epo_policy_input *input) {
    struct epo_decision here;
    struct epo_decision *decision = &plugin->decision;
    if (plugin->config == NULL && !decision->explicit_on) {
        decision->on = false;
        snprintf(decision->reason, sizeof decision->reason,
                 "the site's configuration is broken: %.400s", plugin->config_error);
        return EPO_OK;
    }
    for (int id = 0; id < EPO_OPT_COUNT; id++) {
        input->environment[id] = EPO_UNSET;
        input->command[id] = decision->choice[id].value;
    }
    input->command[EPO_OPT_OVERLAP] = EPO_OVERLAP_ON;
    input->lenient = false;
    input->nodes = ep_node_name(plugin);
    const struct epo_class *class =
        decision->automatic && plugin->config != NULL ? epo_auto_class(input, input->nodes) : NULL;
    if (class != NULL && class->overlap == EPO_OVERLAP_OFF)
        return epo_fail(EPO_E_STATE,
                        "overlap was decided on (%s), but this node's class %s is off (%s:%d); "
                        "make the nodes' configurations equal",
                        decision->reason, class->name, input->config->path, class->line);
    return epo_policy_decide(input, &here);
}

static void fill_input(struct ep_plugin *plugin, spank_t spank, struct epo_policy_input *input,
                       struct variables *variables) {
    uint32_t user = (uint32_t)-1;
    memset(input, 0, sizeof *input);
    plugin->api->get_number(spank, S_JOB_UID, &user);
    int count = plugin->api->get_groups(spank, EP_GROUPS_MAX, variables->groups);
    for (int id = 0; id < EPO_OPT_COUNT; id++)
        input->command[id] = input->inherited[id] = input->environment[id] = EPO_UNSET;
    input->config = plugin->config;
    input->config_error = plugin->config_error;
    input->user = user;
    input->groups = variables->groups;
    input->group_count = count > 0 ? count : 0;
    input->partition = task_variable(variables, "SLURM_JOB_PARTITION");
    input->account = task_variable(variables, "SLURM_JOB_ACCOUNT");
    const char *nodes = task_variable(variables, "SLURM_STEP_NODELIST");
    input->nodes = nodes != NULL ? nodes : ep_node_name(plugin);
    input->lenient = true;
}

static void log_step(const struct ep_plugin *plugin) {
    char text[EPO_DECISION_REASON_MAX + 256];
    epo_decision_text(&plugin->decision, text, sizeof text);
    unsigned long job = plugin->job, step = plugin->step;
    if (plugin->refusal[0] != '\0')
        wrap_format(plugin->api->log_error, "ep-overlap: step %lu.%lu: refused: %s", job, step,
                    plugin->refusal);
    else if (plugin->config == NULL)
        wrap_format(plugin->api->log_error, "ep-overlap: step %lu.%lu: off: %s", job, step,
                    plugin->config_error);
    else if (plugin->config->step_line)
        wrap_format(plugin->api->log_info, "ep-overlap: step %lu.%lu: %s", job, step, text);
}

/* As the library looks for it (lib/preload/engine.c). */
static void find_engine(struct ep_plugin *plugin) {
    static const char *const below[] = {"ep-overlap/engine_cuda.so", "engine_cuda.so"};
    const char *slash = strrchr(plugin->preload.path, '/');
    for (size_t i = 0; i < sizeof below / sizeof *below && slash != NULL; i++) {
        char path[EP_PATH_MAX + 32];
        snprintf(path, sizeof path, "%.*s/%s", (int)(slash - plugin->preload.path),
                 plugin->preload.path, below[i]);
        plugin->cuda_engine = plugin->cuda_engine || access(path, F_OK) == 0;
    }
}

/* The node's own view, before a container hides owners and folders. */
static void find_library(struct ep_plugin *plugin, const struct epo_policy_input *input) {
    const char *path = plugin->config != NULL && plugin->config->preload_path != NULL
                           ? plugin->config->preload_path
                           : EP_LIBRARY;
    if (ep_preload_find(path, &plugin->trust, &plugin->preload) != EPO_OK)
        snprintf(plugin->preload_error, sizeof plugin->preload_error, "%s", epo_fail_text());
    ep_intercept_find(plugin, path);
    find_engine(plugin);
    const struct epo_class *class =
        plugin->config != NULL ? epo_auto_class(input, ep_node_name(plugin)) : NULL;
    plugin->gpu_class = class != NULL ? class->name : NULL;
}

/* A missing library is known before any task is. */
static void settle_library(struct ep_plugin *plugin, spank_t spank) {
    char why[EPO_ERROR_MAX];
    if (plugin->preload_error[0] == '\0')
        return;
    snprintf(why, sizeof why, "the library cannot be preloaded: %.900s", plugin->preload_error);
    if (ep_serve_must_refuse(plugin, spank, true))
        snprintf(plugin->refusal, sizeof plugin->refusal, "%s", why);
    else
        ep_serve_as_off(plugin, why);
}

/* Which step it is.  Without that nobody can be served, and who asked is told. */
static bool identify(struct ep_plugin *plugin, spank_t spank) {
    const struct wrap_spank *api = plugin->api;
    if (api->get_number(spank, S_JOB_ID, &plugin->job) != 0 ||
        api->get_number(spank, S_JOB_STEPID, &plugin->step) != 0) {
        if (plugin->command[EPO_OPT_OVERLAP] == EPO_OVERLAP_ON)
            snprintf(plugin->refusal, sizeof plugin->refusal,
                     "Slurm does not tell which step this is; --ep-overlap cannot be served");
        return false;
    }
    return plugin->step < WRAP_STEP_SPECIAL;
}

void ep_step_decide(struct ep_plugin *plugin, spank_t spank) {
    if (!identify(plugin, spank))
        return;
    plugin->srun_step = true;
    ep_settings_load(plugin);
    struct variables variables = {.plugin = plugin, .spank = spank};
    struct epo_policy_input input;
    fill_input(plugin, spank, &input, &variables);
    const char *record = task_variable(&variables, EPO_STEP_RECORD);
    bool shared = task_variable(&variables, "SLURM_HET_SIZE") != NULL;
    epo_status status = EPO_OK;
    if (record == NULL || !ep_record_read(record, shared, plugin))
        status = decide(plugin, &input, &variables);
    else if (plugin->decision.pending)
        status = decide_pending(plugin, &input);
    if (status == EPO_OK && plugin->refusal[0] == '\0' && plugin->decision.on)
        status = verify(plugin, &input);
    if (status != EPO_OK && plugin->refusal[0] == '\0')
        snprintf(plugin->refusal, sizeof plugin->refusal, "%s", epo_fail_text());
    for (int i = 0; i < variables.count; i++)
        free(variables.got[i]);
    if (plugin->decision.on && plugin->refusal[0] == '\0') {
        find_library(plugin, &input);
        ep_check_open(plugin);
        settle_library(plugin, spank);
    }
    if (plugin->decision.on || plugin->decision.explicit_on || plugin->refusal[0] != '\0')
        plugin->shared = ep_shared_create();
    log_step(plugin);
}

void ep_plugin_end(struct ep_plugin *plugin) {
    epo_config_destroy(plugin->config);
    plugin->config = NULL;
    ep_check_close(plugin);
    ep_shared_destroy(plugin->shared);
    plugin->shared = NULL;
}
