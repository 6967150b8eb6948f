/* SPDX-License-Identifier: Apache-2.0 */
#include "task.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SCANCEL_TIMEOUT_MS 10000
#define GRACE_MS 1000

/* The components of a heterogeneous step are ended by the first one's job. */
static bool is_component(struct ep_plugin *plugin, spank_t spank, unsigned long *job) {
    char *size = plugin->api->task_getenv(spank, "SLURM_HET_SIZE");
    char *leader = size != NULL ? plugin->api->task_getenv(spank, "SLURM_JOB_ID") : NULL;
    bool component = size != NULL;
    if (leader != NULL && leader[0] != '\0' && leader[strspn(leader, "0123456789")] == '\0')
        *job = strtoul(leader, NULL, 10);
    free(leader);
    free(size);
    return component;
}

/* Ends the own step, so that no rank waits for one that never starts.  A step
 * of one task needs no help to end. */
static void end_step(struct ep_plugin *plugin, spank_t spank) {
    const struct wrap_spank *api = plugin->api;
    uint32_t tasks = 0;
    unsigned long job = plugin->job;
    char step[64], conf[4096 + 16];
    char *arguments[] = {(char *)(uintptr_t)EP_SCANCEL, (char *)(uintptr_t) "--quiet", step, NULL};
    char *environment[] = {NULL, NULL};
    if (!is_component(plugin, spank, &job) &&
        api->get_number(spank, S_JOB_TOTAL_TASK_COUNT, &tasks) == 0 && tasks == 1)
        return;
    snprintf(step, sizeof step, "%lu.%lu", job, (unsigned long)plugin->step);
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

/* The node of the step's first task says what all nodes find. */
static bool speaks_for_all(struct ep_plugin *plugin, spank_t spank) {
    uint32_t node = 0;
    char *name = plugin->api->task_getenv(spank, "SLURM_NODEID");
    bool speaks = name != NULL
                      ? strcmp(name, "0") == 0
                      : plugin->api->get_number(spank, S_JOB_NODEID, &node) != 0 || node == 0;
    free(name);
    return speaks;
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

/* Whoever did not ask for it learns how to do without. */
static void say_way_out(const struct ep_plugin *plugin) {
    if (plugin->decision.on && !plugin->decision.explicit_on)
        wrap_format(plugin->api->task_say,
                    "ep-overlap: %s: overlap is on by %s, and the nodes of a step must not differ; "
                    "srun --ep-overlap=off runs it without",
                    ep_node_name(plugin), plugin->decision.reason);
}

void ep_task_refuse(struct ep_plugin *plugin, spank_t spank, const char *why, const char *shared) {
    bool first = ep_serve_note(plugin, true, why[0] != '\0' ? why : shared);
    bool speaks = shared[0] == '\0' || speaks_for_all(plugin, spank);
    if (first)
        say_lines(plugin, why);
    if (first && speaks)
        say_lines(plugin, shared);
    if (first)
        say_way_out(plugin);
    if (!speaks) /* time for the first node to say it, before anything ends the step */
        plugin->api->pause(GRACE_MS);
    if (first)
        end_step(plugin, spank);
    plugin->api->exit_task(1);
}
