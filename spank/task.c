/* SPDX-License-Identifier: Apache-2.0
 *
 * task.c - task_init: as the user, with the task's own stderr, just before exec.
 * The one place where a step may be refused on a node.
 */
#include "task.h"

#include "preload.h"

#include "core/names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *library_path(const struct ep_plugin *plugin) {
    return plugin->config != NULL && plugin->config->preload_path != NULL
               ? plugin->config->preload_path
               : EP_LIBRARY;
}

/* A step that asked for it fails; one that did not runs as off.  True when the
 * task goes on. */
static bool cannot_serve(struct ep_plugin *plugin, spank_t spank, const char *why) {
    bool warn = plugin->config != NULL && plugin->config->on_failed_request == EPO_FAILED_WARN;
    if (plugin->decision.explicit_on && !warn) {
        ep_task_refuse(plugin, spank, why);
        return false;
    }
    if (plugin->decision.explicit_on)
        wrap_format(plugin->api->task_say, "ep-overlap: %s: off instead of on: %s",
                    ep_node_name(plugin), why);
    plugin->decision.on = false;
    snprintf(plugin->decision.reason, sizeof plugin->decision.reason, "%.500s", why);
    return true;
}

/* Turns the decision into what this node and program can do. */
static bool prepare(struct ep_plugin *plugin, spank_t spank, struct ep_preload *preload) {
    preload->path[0] = '\0';
    if (!plugin->decision.on)
        return true;
    if (ep_preload_find(library_path(plugin), &plugin->trust, preload) != EPO_OK) {
        char why[EPO_ERROR_MAX + 64];
        snprintf(why, sizeof why, "the library cannot be preloaded: %s", epo_fail_text());
        return cannot_serve(plugin, spank, why);
    }
    char why[512];
    ep_preload_judge(plugin, spank, preload, why, sizeof why);
    if (why[0] == '\0')
        return true;
    preload->path[0] = '\0';
    size_t used = strlen(plugin->decision.reason);
    snprintf(plugin->decision.reason + used, sizeof plugin->decision.reason - used,
             "; not preloaded: %s", why);
    return true;
}

/* Task 0 of the step; each component of a heterogeneous job has a task 0 of its
 * own, but only one with SLURM_PROCID 0. */
static bool is_task_zero(struct ep_plugin *plugin, spank_t spank) {
    uint32_t task = 1;
    char *rank = plugin->api->task_getenv(spank, "SLURM_PROCID");
    bool zero = rank == NULL || strcmp(rank, "0") == 0;
    free(rank);
    return zero && plugin->api->get_number(spank, S_TASK_GLOBAL_ID, &task) == 0 && task == 0;
}

/* One line per step for the user who gave an option. */
static void tell(struct ep_plugin *plugin, spank_t spank) {
    char text[EPO_DECISION_REASON_MAX + 128];
    if (!plugin->decision.any_option || !is_task_zero(plugin, spank))
        return;
    epo_decision_text(&plugin->decision, text, sizeof text);
    wrap_format(plugin->api->task_say, "ep-overlap: %s", text);
}

int ep_task_start(struct ep_plugin *plugin, spank_t spank) {
    plugin->api->task_unsetenv(spank, EPO_STEP_RECORD);
    if (!plugin->srun_step) {
        ep_task_batch_note(plugin, spank);
        return 0;
    }
    ep_task_restore(plugin, spank);
    if (plugin->refusal[0] != '\0') {
        ep_task_refuse(plugin, spank, plugin->refusal);
        return -1;
    }
    struct ep_preload preload;
    if (!prepare(plugin, spank, &preload))
        return -1;
    /* A plain off leaves no trace; an off that `auto` or a failed wish came to
     * says why. */
    bool visible = plugin->decision.on || plugin->decision.automatic ||
                   plugin->decision.choice[EPO_OPT_OVERLAP].value == EPO_OVERLAP_ON;
    if (visible && ep_task_set(plugin, spank, preload.path) != EPO_OK &&
        !cannot_serve(plugin, spank, epo_fail_text()))
        return -1;
    tell(plugin, spank);
    return 0;
}
