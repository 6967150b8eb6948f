/* SPDX-License-Identifier: Apache-2.0
 *
 * submit.c - what happens in srun, sbatch and salloc: options that cannot work
 * are refused before anything is allocated, and srun writes the decision down
 * for the nodes.
 */
#include "context.h"
#include "gres.h"
#include "record.h"

#include "core/names.h"

#include <stdio.h>

static const char *own_variable(void *from, const char *name) {
    return ((const struct ep_plugin *)from)->api->own_getenv(name);
}

static const char *first_of(const struct ep_plugin *plugin, const char *name, const char *other) {
    const char *value = plugin->api->own_getenv(name);
    return value != NULL ? value : plugin->api->own_getenv(other);
}

/* The components of a heterogeneous job share one srun, which is told about the
 * last of them only: what depends on nodes is left to the nodes, which all see
 * the list of the whole step. */
static bool is_heterogeneous(const struct ep_plugin *plugin) {
    return plugin->api->own_getenv("SLURM_HET_SIZE") != NULL;
}

static epo_status decide_by_gres(struct ep_plugin *plugin, struct epo_policy_input *input) {
    struct ep_gres table;
    ep_gres_load(plugin, input->nodes, &table);
    input->gres_of = ep_gres_of;
    input->gres_context = &table;
    epo_status status = epo_policy_decide(input, &plugin->decision);
    if (status == EPO_OK && table.failed && !plugin->decision.on)
        snprintf(plugin->decision.reason, sizeof plugin->decision.reason,
                 "auto: the controller did not tell the nodes' gres");
    input->gres_of = NULL; /* the table ends here */
    input->gres_context = NULL;
    ep_gres_free(&table);
    return status;
}

/* Decides with what is known by now. */
static epo_status decide(struct ep_plugin *plugin, bool allocated) {
    gid_t groups[EP_GROUPS_MAX];
    int count = plugin->api->own_groups(EP_GROUPS_MAX, groups);
    struct epo_policy_input input = {.config = plugin->config,
                                     .config_error = plugin->config_error,
                                     .user = plugin->api->own_user(),
                                     .groups = groups,
                                     .group_count = count > 0 ? count : 0};
    epo_status status = ep_settings_environment(own_variable, plugin, input.environment);
    if (status != EPO_OK)
        return status;
    for (int id = 0; id < EPO_OPT_COUNT; id++) {
        input.command[id] = plugin->command[id];
        input.inherited[id] = plugin->inherited[id];
    }
    input.partition = plugin->api->own_getenv("SLURM_JOB_PARTITION");
    input.account = plugin->api->own_getenv("SLURM_JOB_ACCOUNT");
    if (allocated && !is_heterogeneous(plugin))
        input.nodes = first_of(plugin, "SLURM_STEP_NODELIST", "SLURM_NODELIST");
    status = epo_policy_decide(&input, &plugin->decision);
    if (status == EPO_OK && plugin->decision.automatic && !plugin->decision.on &&
        input.nodes != NULL && ep_gres_needed(plugin->config))
        status = decide_by_gres(plugin, &input);
    return status;
}

static void write_record(struct ep_plugin *plugin) {
    char text[EP_RECORD_MAX];
    ep_record_write(plugin, text, sizeof text);
    if (plugin->api->own_setenv(EPO_STEP_RECORD, text) != 0)
        wrap_format(plugin->api->log_error, "ep-overlap: no memory for " EPO_STEP_RECORD);
}

/* Slurm ignores what an `optional` plugin returns at submission. */
static int end_submission(const struct ep_plugin *plugin) {
    plugin->api->exit_submission(1);
    return -1;
}

int ep_submit_check(struct ep_plugin *plugin, spank_t spank) {
    ep_options_hand_on(plugin, spank);
    if (ep_options_end_round(plugin) != 0)
        return end_submission(plugin);
    ep_settings_load(plugin);
    if (decide(plugin, false) != EPO_OK) {
        wrap_format(plugin->api->log_error, "ep-overlap: %s", epo_fail_text());
        return end_submission(plugin);
    }
    /* All that the first components of a heterogeneous job ever get. */
    if (plugin->where == S_CTX_LOCAL)
        write_record(plugin);
    return 0;
}

int ep_submit_record(struct ep_plugin *plugin, spank_t spank) {
    const struct wrap_spank *api = plugin->api;
    if (api->get_number(spank, S_JOB_ID, &plugin->job) != 0 ||
        api->get_number(spank, S_JOB_STEPID, &plugin->step) != 0 ||
        plugin->step >= WRAP_STEP_SPECIAL) {
        api->own_unsetenv(EPO_STEP_RECORD);
        return 0;
    }
    if (is_heterogeneous(plugin))
        return 0;
    /* The nodes are known only now; srun does not look at what we return, so a
     * refusal travels with the record. */
    if (decide(plugin, true) != EPO_OK)
        snprintf(plugin->refusal, sizeof plugin->refusal, "%s", epo_fail_text());
    write_record(plugin);
    return 0;
}
