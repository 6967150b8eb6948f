/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin.c - what Slurm calls.  Each hook looks at the context and hands over.
 * On a node nothing fails before task_init: a failure there drains the node.
 */
#include "context.h"

/* Everything else is hidden; plugin.map holds the list once more. */
#pragma GCC visibility push(default)
SPANK_PLUGIN(ep_overlap, 1)
#pragma GCC visibility pop

static struct ep_plugin plugin;

static int take_option(int value, const char *argument, int remote) {
    (void)remote;
    return ep_option_take(&plugin, value, argument);
}

#pragma GCC visibility push(default)
int slurm_spank_init(spank_t spank, int count, char **arguments) {
    ep_plugin_begin(&plugin, &wrap_spank_real, EP_CONFIG);
    ep_settings_arguments(&plugin, count, arguments);
    ep_options_forget(&plugin);
    if (plugin.where == S_CTX_LOCAL || plugin.where == S_CTX_ALLOCATOR ||
        plugin.where == S_CTX_REMOTE)
        ep_options_register(&plugin, spank, take_option);
    return 0;
}

int slurm_spank_init_post_opt(spank_t spank, int count, char **arguments) {
    (void)count;
    (void)arguments;
    switch (plugin.where) {
    case S_CTX_LOCAL:
    case S_CTX_ALLOCATOR: return ep_submit_check(&plugin, spank);
    case S_CTX_REMOTE: ep_step_decide(&plugin, spank); return 0;
    default: return 0;
    }
}

int slurm_spank_local_user_init(spank_t spank, int count, char **arguments) {
    (void)count;
    (void)arguments;
    return ep_submit_record(&plugin, spank);
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments) {
    (void)count;
    (void)arguments;
    return ep_task_start(&plugin, spank);
}

int slurm_spank_exit(spank_t spank, int count, char **arguments) {
    (void)spank;
    (void)count;
    (void)arguments;
    ep_serve_log(&plugin);
    ep_plugin_end(&plugin);
    return 0;
}
#pragma GCC visibility pop
