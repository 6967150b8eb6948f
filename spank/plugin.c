/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin.c - what Slurm calls.  Each hook looks at the context and hands over.
 * On a node nothing fails before task_init: a failure there drains the node.
 * Each is called once for each line of plugstack.conf that lists the plugin.
 */
#include "context.h"
#include "listed.h"

/* Everything else is hidden; plugin.map holds the list once more. */
#pragma GCC visibility push(default)
SPANK_PLUGIN(ep_overlap, 1)
#pragma GCC visibility pop

static struct ep_plugin plugin;
static struct ep_listed listed;

static int take_option(int value, const char *argument, int remote) {
    (void)remote;
    return ep_option_take(&plugin, value, argument);
}

#pragma GCC visibility push(default)
int slurm_spank_init(spank_t spank, int count, char **arguments) {
    if (!ep_listed_line(&listed))
        return 0;
    ep_plugin_begin(&plugin, &wrap_spank_real, EP_CONFIG);
    ep_settings_arguments(&plugin, count, arguments);
    ep_options_forget(&plugin);
    if (listed.lines == 1 && (plugin.where == S_CTX_LOCAL || plugin.where == S_CTX_ALLOCATOR ||
                              plugin.where == S_CTX_REMOTE))
        ep_options_register(&plugin, spank, take_option);
    return 0;
}

int slurm_spank_init_post_opt(spank_t spank, int count, char **arguments) {
    (void)count;
    (void)arguments;
    if (!ep_listed_turn(&listed, EP_HOOK_POST_OPT))
        return 0;
    switch (plugin.where) {
    case S_CTX_LOCAL:
    case S_CTX_ALLOCATOR: return ep_submit_check(&plugin, spank);
    case S_CTX_REMOTE:
        ep_listed_tell(&listed, plugin.api);
        ep_step_decide(&plugin, spank);
        return 0;
    default: return 0;
    }
}

int slurm_spank_local_user_init(spank_t spank, int count, char **arguments) {
    (void)count;
    (void)arguments;
    return ep_listed_turn(&listed, EP_HOOK_USER) ? ep_submit_record(&plugin, spank) : 0;
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments) {
    (void)count;
    (void)arguments;
    return ep_listed_turn(&listed, EP_HOOK_TASK) ? ep_task_start(&plugin, spank) : 0;
}

int slurm_spank_exit(spank_t spank, int count, char **arguments) {
    (void)spank;
    (void)count;
    (void)arguments;
    if (!ep_listed_turn(&listed, EP_HOOK_EXIT))
        return 0;
    ep_serve_log(&plugin);
    ep_plugin_end(&plugin);
    return 0;
}
#pragma GCC visibility pop
