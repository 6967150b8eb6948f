/* SPDX-License-Identifier: Apache-2.0 */
#include "task.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SCANCEL_TIMEOUT_MS 10000

/* Ends the own step, so that no rank waits for one that never starts.  A step
 * of one task needs no help to end. */
static void end_step(struct ep_plugin *plugin, spank_t spank) {
    const struct wrap_spank *api = plugin->api;
    uint32_t tasks = 0;
    char step[64], conf[4096 + 16];
    char *arguments[] = {(char *)(uintptr_t)EP_SCANCEL, (char *)(uintptr_t) "--quiet", step, NULL};
    char *environment[] = {NULL, NULL};
    if (api->get_number(spank, S_JOB_TOTAL_TASK_COUNT, &tasks) == 0 && tasks == 1)
        return;
    snprintf(step, sizeof step, "%lu.%lu", (unsigned long)plugin->job, (unsigned long)plugin->step);
    char *own = api->task_getenv(spank, "SLURM_CONF");
    const char *path = api->own_getenv("SLURM_CONF");
    path = path != NULL ? path : own;
    if (path != NULL && snprintf(conf, sizeof conf, "SLURM_CONF=%s", path) < (int)sizeof conf)
        environment[0] = conf;
    if (api->run(arguments, environment, SCANCEL_TIMEOUT_MS, NULL, 0) != 0)
        wrap_format(
            api->task_say,
            "ep-overlap: %s: \"%s %s\" failed; other tasks may wait for this one until srun "
            "--kill-on-bad-exit or you end the step",
            ep_node_name(plugin), EP_SCANCEL, step);
    free(own);
}

/* True for the first task of this node that gets here. */
static bool is_first(struct ep_plugin *plugin) {
    struct ep_shared *shared = plugin->shared;
    if (shared == NULL || !ep_shared_lock(shared))
        return true;
    bool first = !shared->refused;
    shared->refused = true;
    ep_shared_unlock(shared);
    return first;
}

static void say_lines(const struct ep_plugin *plugin, const char *lines) {
    while (*lines != '\0') {
        size_t length = strcspn(lines, "\n");
        wrap_format(plugin->api->task_say, "ep-overlap: %s: %.*s", ep_node_name(plugin),
                    (int)length, lines);
        lines += length;
        lines += *lines == '\n';
    }
}

void ep_task_refuse(struct ep_plugin *plugin, spank_t spank, const char *why) {
    if (is_first(plugin)) {
        say_lines(plugin, why);
        end_step(plugin, spank);
    }
    plugin->api->exit_task(1);
}
