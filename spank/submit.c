/* SPDX-License-Identifier: Apache-2.0
 *
 * submit.c - what happens in srun, sbatch and salloc: options that cannot work
 * are refused before anything is allocated, and srun writes the decision down
 * for the nodes.
 */
#include "context.h"
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
    if (allocated)
        input.nodes = first_of(plugin, "SLURM_STEP_NODELIST", "SLURM_NODELIST");
    return epo_policy_decide(&input, &plugin->decision);
}

int ep_submit_check(struct ep_plugin *plugin, spank_t spank) {
    ep_options_hand_on(plugin, spank);
    ep_settings_load(plugin);
    if (decide(plugin, false) == EPO_OK)
        return 0;
    wrap_format(plugin->api->log_error, "ep-overlap: %s", epo_fail_text());
    /* Slurm ignores what an `optional` plugin returns here. */
    plugin->api->exit_submission(1);
    return -1;
}

int ep_submit_record(struct ep_plugin *plugin, spank_t spank) {
    const struct wrap_spank *api = plugin->api;
    if (api->get_number(spank, S_JOB_ID, &plugin->job) != 0 ||
        api->get_number(spank, S_JOB_STEPID, &plugin->step) != 0 ||
        plugin->step >= WRAP_STEP_SPECIAL) {
        api->own_unsetenv(EPO_STEP_RECORD);
        return 0;
    }
    /* The nodes are known only now; srun does not look at what we return, so a
     * refusal travels with the record. */
    if (decide(plugin, true) != EPO_OK)
        snprintf(plugin->refusal, sizeof plugin->refusal, "%s", epo_fail_text());
    char text[EP_RECORD_MAX];
    ep_record_write(plugin, text, sizeof text);
    if (api->own_setenv(EPO_STEP_RECORD, text) != 0)
        wrap_format(api->log_error, "ep-overlap: no memory for " EPO_STEP_RECORD);
    return 0;
}
