/* SPDX-License-Identifier: Apache-2.0
 *
 * serve.c - overlap was decided on, and a node cannot serve it: the step ends, or it
 * runs as off.  What a task came to stands in slurmd's log when the step is over.
 */
#include "context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool has_several_nodes(const struct ep_plugin *plugin, spank_t spank) {
    uint32_t nodes = 1;
    char *components = plugin->api->task_getenv(spank, "SLURM_HET_SIZE");
    bool several = components != NULL ||
                   (plugin->api->get_number(spank, S_JOB_NNODES, &nodes) == 0 && nodes > 1);
    free(components);
    return several;
}

bool ep_serve_must_refuse(const struct ep_plugin *plugin, spank_t spank, bool here) {
    if (plugin->config != NULL && plugin->config->on_failed_request == EPO_FAILED_WARN)
        return false; /* the site prefers steps whose nodes differ to steps that fail */
    return plugin->decision.explicit_on || (here && has_several_nodes(plugin, spank));
}

void ep_serve_as_off(struct ep_plugin *plugin, const char *why) {
    plugin->decision.on = false;
    snprintf(plugin->decision.reason, sizeof plugin->decision.reason, "%.*s",
             (int)strcspn(why, "\n"), why);
}

bool ep_serve_note(struct ep_plugin *plugin, bool refused, const char *why) {
    struct ep_shared *shared = plugin->shared;
    if (shared == NULL || !ep_shared_lock(shared))
        return true;
    bool first = !shared->ended;
    if (first) {
        shared->ended = true;
        shared->refused = refused;
        snprintf(shared->ended_why, sizeof shared->ended_why, "%.*s", (int)strcspn(why, "\n"), why);
    }
    ep_shared_unlock(shared);
    return first;
}

void ep_serve_log(const struct ep_plugin *plugin) {
    const struct ep_shared *shared = plugin->shared;
    if (shared == NULL || !shared->ended || plugin->refusal[0] != '\0' || !plugin->decision.on)
        return; /* nothing happened, or the step's line has said it */
    bool asked = plugin->decision.explicit_on;
    wrap_format(asked || shared->refused ? plugin->api->log_error : plugin->api->log_info,
                "ep-overlap: step %lu.%lu: %s: %s", (unsigned long)plugin->job,
                (unsigned long)plugin->step,
                shared->refused ? "was refused by a task"
                : asked         ? "was off instead of on, and does not count as on"
                                : "was off",
                shared->ended_why);
}
