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

/* `why` is this node's own, `shared` what every node of the step finds.  True when the
 * task goes on, as off. */
static bool cannot_serve(struct ep_plugin *plugin, spank_t spank, const char *why,
                         const char *shared) {
    const char *reason = why[0] != '\0' ? why : shared;
    if (ep_serve_must_refuse(plugin, spank, why[0] != '\0')) {
        ep_task_refuse(plugin, spank, why, shared);
        return false;
    }
    ep_serve_note(plugin, false, reason);
    ep_serve_as_off(plugin, reason);
    return true;
}

static void add_reason(struct ep_plugin *plugin, const char *more) {
    char *reason = plugin->decision.reason;
    size_t used = strlen(reason);
    snprintf(reason + used, sizeof plugin->decision.reason - used, "; %s", more);
}

/* What the task gets. */
struct prepared {
    const char *preload; /* the library to load, or "" */
    const char *warnings;
    bool other; /* a program may call NCCL itself */
    bool ours;  /* a program calls the library */
    struct ep_intercept intercept;
};

/* The nodes of a step never differ: what may hold here and not elsewhere ends a step
 * of several nodes, whoever asked for overlap. */
static bool check(struct ep_plugin *plugin, spank_t spank, bool gpus, struct prepared *task) {
    const struct ep_verdict *verdict = ep_check_node(plugin, spank, gpus);
    task->warnings = verdict->warnings;
    task->other = verdict->other;
    task->ours = verdict->ours;
    if (plugin->decision.automatic && !plugin->decision.explicit_on && verdict->lacks) {
        const char *why = strstr(verdict->shared, "ARG-OVERLAP");
        char text[EPO_DECISION_REASON_MAX];
        why = why != NULL ? why : "the program's arguments do not enable overlap";
        snprintf(text, sizeof text, "auto: %.*s", (int)strcspn(why, "\n"), why);
        ep_serve_note(plugin, false, text);
        ep_serve_as_off(plugin, text); /* on every node alike */
        return true;
    }
    if (verdict->errors[0] != '\0' || verdict->shared[0] != '\0')
        return cannot_serve(plugin, spank, verdict->errors, verdict->shared);
    if (verdict->undecided[0] != '\0') {
        char more[sizeof verdict->undecided + 32];
        snprintf(more, sizeof more, "arguments undecided: %s", verdict->undecided);
        add_reason(plugin, more);
    }
    return true;
}

/* A backend of GPUs that somebody named is not what runs here. */
static void add_host_engine(struct ep_plugin *plugin) {
    const char *backend = epo_dispatcher_backend(plugin->decision.choice[EPO_OPT_DISPATCHER].value);
    char more[128];
    snprintf(more, sizeof more, "no GPUs: host engine%s%s",
             backend != NULL ? ", with its own flex instead of " : "",
             backend != NULL ? backend : "");
    add_reason(plugin, more);
}

/* The program may call NCCL itself. */
static void add_interceptor(struct ep_plugin *plugin, spank_t spank, bool own_nccl,
                            struct ep_intercept *wanted) {
    char why[256];
    ep_intercept_judge(plugin, spank, own_nccl, wanted);
    if (wanted->library != NULL && !ep_preload_try_intercept(plugin, spank, why, sizeof why)) {
        wanted->library = NULL;
        snprintf(wanted->why, sizeof wanted->why, "NCCL is not intercepted: %s", why);
    }
    if (wanted->why[0] != '\0')
        add_reason(plugin, wanted->why);
    else if (wanted->library != NULL)
        add_reason(plugin, strcmp(wanted->mode, EPO_INTERPOSE_OBSERVE) == 0 ? "NCCL observed"
                                                                            : "NCCL accelerated");
}

/* Turns the decision into what this node and program can do.  False: the task ends. */
static bool prepare(struct ep_plugin *plugin, spank_t spank, struct prepared *task) {
    char why[EPO_ERROR_MAX + 64];
    memset(task, 0, sizeof *task);
    task->preload = task->warnings = "";
    if (!plugin->decision.on)
        return true;
    bool gpus = ep_task_has_gpus(plugin, spank);
    if (!gpus && plugin->config != NULL && plugin->config->checks.require_gpu)
        return cannot_serve(plugin, spank,
                            "the step holds no GPU, and the site requires one "
                            "(checks.require_gpu); ask for one with --gpus or --gres",
                            "");
    if (!check(plugin, spank, gpus, task))
        return false;
    if (!plugin->decision.on)
        return true;
    if (plugin->preload_error[0] == '\0' && ep_preload_check_visible(&plugin->preload) != EPO_OK)
        snprintf(plugin->preload_error, sizeof plugin->preload_error, "%s", epo_fail_text());
    if (plugin->preload_error[0] != '\0') {
        snprintf(why, sizeof why, "the library cannot be preloaded: %s", plugin->preload_error);
        return cannot_serve(plugin, spank, why, "");
    }
    if (!gpus)
        add_host_engine(plugin);
    else if (!plugin->cuda_engine && (task->ours || task->other))
        add_reason(plugin, "no CUDA engine installed");
    ep_preload_judge_container(plugin, spank, why, sizeof why);
    if (why[0] == '\0')
        ep_preload_judge(plugin, spank, &plugin->preload, why, sizeof why);
    if (why[0] == '\0')
        ep_preload_try(plugin, spank, why, sizeof why);
    if (why[0] == '\0') {
        task->preload = plugin->preload.path;
        if (gpus)
            add_interceptor(plugin, spank, task->other, &task->intercept);
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

/* A request that is not served here, once for each node that does not. */
static void tell_failed(struct ep_plugin *plugin) {
    bool first = true;
    if (!plugin->decision.explicit_on || plugin->decision.on)
        return;
    if (plugin->shared != NULL && ep_shared_lock(plugin->shared)) {
        first = !plugin->shared->told_off;
        plugin->shared->told_off = true;
        ep_shared_unlock(plugin->shared);
    }
    if (first)
        wrap_format(plugin->api->task_say, "ep-overlap: %s: off instead of on: %s",
                    ep_node_name(plugin), plugin->decision.reason);
}

/* What the user who gave an option is told, once per step. */
static void tell(struct ep_plugin *plugin, spank_t spank, const char *set, const char *warnings) {
    char text[EPO_DECISION_REASON_MAX + 128];
    bool failed = plugin->decision.explicit_on && !plugin->decision.on; /* told by each node */
    if (!plugin->decision.any_option || failed || !is_task_zero(plugin, spank))
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

/* A decision that the user set by hand, for runs outside of Slurm: it would overlap where an
 * option of this step says off. */
static bool is_contradicted(struct ep_plugin *plugin, spank_t spank) {
    char *by_hand = plugin->api->task_getenv(spank, EPO_OUT_DECISION);
    bool contradicted =
        plugin->decision.any_option && by_hand != NULL && strcmp(by_hand, "on") == 0;
    free(by_hand);
    return contradicted;
}

int ep_task_start(struct ep_plugin *plugin, spank_t spank) {
    plugin->api->task_unsetenv(spank, EPO_STEP_RECORD);
    ep_task_restore(plugin, spank); /* of a step that this one, or its job, was started from */
    if (!plugin->srun_step && plugin->refusal[0] == '\0') {
        ep_task_batch_note(plugin, spank);
        return 0;
    }
    if (plugin->refusal[0] != '\0') {
        bool shared = plugin->refusal_shared;
        ep_task_refuse(plugin, spank, shared ? "" : plugin->refusal, shared ? plugin->refusal : "");
        return -1;
    }
    struct prepared task;
    char *set = NULL;
    if (!prepare(plugin, spank, &task))
        return -1;
    if ((is_visible(&plugin->decision) || is_contradicted(plugin, spank)) &&
        ep_task_set(plugin, spank, task.preload, &task.intercept, &set) != EPO_OK &&
        !cannot_serve(plugin, spank, epo_fail_text(), ""))
        return -1;
    tell_failed(plugin);
    tell(plugin, spank, set, task.warnings);
    free(set);
    return 0;
}
