/* SPDX-License-Identifier: Apache-2.0
 *
 * task.c - task_init: as the user, with the task's own stderr, just before exec.
 * The one place where a step may be refused on a node.
 */
#include "task.h"

#include "core/names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A step that asked for it fails; one that did not runs as off.  True when the
 * task goes on. */
static bool cannot_serve(struct ep_plugin *plugin, spank_t spank, const char *why) {
    bool warn = plugin->config != NULL && plugin->config->on_failed_request == EPO_FAILED_WARN;
    if (plugin->decision.explicit_on && !warn) {
        ep_task_refuse(plugin, spank, why);
        return false;
    }
    if (plugin->decision.explicit_on)
        wrap_format(plugin->api->task_say, "ep-overlap: %s: off instead of on: %.*s",
                    ep_node_name(plugin), (int)strcspn(why, "\n"), why);
    plugin->decision.on = false;
    snprintf(plugin->decision.reason, sizeof plugin->decision.reason, "%.*s",
             (int)strcspn(why, "\n"), why);
    return true;
}

static void add_reason(struct ep_plugin *plugin, const char *more) {
    char *reason = plugin->decision.reason;
    size_t used = strlen(reason);
    snprintf(reason + used, sizeof plugin->decision.reason - used, "; %s", more);
}

/* The nodes of a step never differ: what may hold here and not elsewhere ends a step
 * of several nodes, whoever asked for overlap. */
static bool check(struct ep_plugin *plugin, spank_t spank, bool gpus, const char **warnings) {
    const struct ep_verdict *verdict = ep_check_node(plugin, spank, gpus);
    uint32_t nodes = 1;
    *warnings = verdict->warnings;
    if (plugin->decision.automatic && !plugin->decision.explicit_on && verdict->lacks) {
        const char *why = strstr(verdict->errors, "ARG-OVERLAP");
        plugin->decision.on = false; /* on every node alike */
        why = why != NULL ? why : "the program's arguments do not enable overlap";
        snprintf(plugin->decision.reason, sizeof plugin->decision.reason, "auto: %.*s",
                 (int)strcspn(why, "\n"), why);
        return true;
    }
    if (verdict->errors[0] == '\0') {
        char more[sizeof verdict->undecided + 32];
        snprintf(more, sizeof more, "arguments undecided: %s", verdict->undecided);
        if (verdict->undecided[0] != '\0')
            add_reason(plugin, more);
        return true;
    }
    bool many = plugin->api->get_number(spank, S_JOB_NNODES, &nodes) == 0 && nodes > 1;
    if (!plugin->decision.explicit_on && many && verdict->here) {
        ep_task_refuse(plugin, spank, verdict->errors);
        return false;
    }
    return cannot_serve(plugin, spank, verdict->errors);
}

/* Turns the decision into what this node and program can do; `preload` becomes
 * the library to load or "".  False: the task ends. */
static bool prepare(struct ep_plugin *plugin, spank_t spank, const char **preload,
                    const char **warnings) {
    char why[EPO_ERROR_MAX + 64];
    *preload = *warnings = "";
    if (!plugin->decision.on)
        return true;
    bool gpus = ep_task_has_gpus(plugin, spank);
    if (!gpus && plugin->config != NULL && plugin->config->checks.require_gpu)
        return cannot_serve(plugin, spank,
                            "the step holds no GPU, and the site requires one "
                            "(checks.require_gpu); ask for one with --gpus or --gres");
    if (!check(plugin, spank, gpus, warnings))
        return false;
    if (!plugin->decision.on)
        return true;
    if (plugin->preload_error[0] == '\0' && ep_preload_check_visible(&plugin->preload) != EPO_OK)
        snprintf(plugin->preload_error, sizeof plugin->preload_error, "%s", epo_fail_text());
    if (plugin->preload_error[0] != '\0') {
        snprintf(why, sizeof why, "the library cannot be preloaded: %s", plugin->preload_error);
        return cannot_serve(plugin, spank, why);
    }
    if (!gpus)
        add_reason(plugin, "no GPUs: host engine");
    ep_preload_judge_container(plugin, spank, why, sizeof why);
    if (why[0] == '\0')
        ep_preload_judge(plugin, spank, &plugin->preload, why, sizeof why);
    if (why[0] == '\0')
        ep_preload_try(plugin, spank, why, sizeof why);
    if (why[0] == '\0') {
        *preload = plugin->preload.path;
    } else {
        char more[sizeof why + 32];
        snprintf(more, sizeof more, "not preloaded: %s", why);
        add_reason(plugin, more);
    }
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

/* What the user who gave an option is told, once per step. */
static void tell(struct ep_plugin *plugin, spank_t spank, const char *set, const char *warnings) {
    char text[EPO_DECISION_REASON_MAX + 128];
    if (!plugin->decision.any_option || !is_task_zero(plugin, spank))
        return;
    epo_decision_text(&plugin->decision, text, sizeof text);
    wrap_format(plugin->api->task_say, "ep-overlap: %s", text);
    if (set != NULL && set[0] != '\0')
        wrap_format(plugin->api->task_say, "ep-overlap: set%s", set);
    if (plugin->decision.on && ep_task_has_gpus(plugin, spank))
        ep_task_warn(plugin, spank);
    while (plugin->decision.on && *warnings != '\0') {
        size_t length = strcspn(warnings, "\n");
        wrap_format(plugin->api->task_say, "ep-overlap: warning %.*s", (int)length, warnings);
        warnings += length;
        warnings += *warnings == '\n';
    }
}

/* A plain off leaves no trace; an off that `auto` or a failed wish came to says
 * why. */
static bool is_visible(const struct epo_decision *decision) {
    return decision->on || decision->automatic ||
           decision->choice[EPO_OPT_OVERLAP].value == EPO_OVERLAP_ON;
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
    const char *preload, *warnings;
    char *set = NULL;
    if (!prepare(plugin, spank, &preload, &warnings))
        return -1;
    if (is_visible(&plugin->decision) && ep_task_set(plugin, spank, preload, &set) != EPO_OK &&
        !cannot_serve(plugin, spank, epo_fail_text()))
        return -1;
    tell(plugin, spank, set, warnings);
    free(set);
    return 0;
}
