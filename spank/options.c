/* SPDX-License-Identifier: Apache-2.0 */
#include "context.h"

#include <stdio.h>
#include <string.h>

/* sbatch and salloc hand an option on to the job's srun under this name. */
#define HANDED_ON "_SLURM_SPANK_OPTION_ep_overlap_"
#define INHERITED "SLURM_SPANK_" HANDED_ON

struct flag {
    epo_option_id id;
    const char *name;  /* NULL: the option's own */
    const char *usage; /* NULL: the option's own */
    int value;         /* of a flag without argument */
};

static const struct flag flags[EP_FLAG_COUNT] = {
    [EP_FLAG_OVERLAP] = {EPO_OPT_OVERLAP, NULL, NULL, EPO_UNSET},
    [EP_FLAG_DISPATCHER] = {EPO_OPT_DISPATCHER, NULL, NULL, EPO_UNSET},
    [EP_FLAG_DELAY] = {EPO_OPT_DELAY_WGRAD, NULL, NULL, EPO_WGRAD_DELAYED},
    [EP_FLAG_NO_DELAY] = {EPO_OPT_DELAY_WGRAD, "no-delay-wgrad",
                          "[ep] do not delay expert weight gradients", EPO_WGRAD_INLINE},
};

static const char *name_of(int flag) {
    return flags[flag].name != NULL ? flags[flag].name : epo_options[flags[flag].id].name;
}

int ep_options_register(struct ep_plugin *plugin, spank_t spank, spank_opt_cb_f callback) {
    for (int flag = 0; flag < EP_FLAG_COUNT; flag++) {
        const struct epo_option *option = &epo_options[flags[flag].id];
        const char *usage = flags[flag].usage != NULL ? flags[flag].usage : option->doc;
        struct spank_option offered = {.name = (char *)(uintptr_t)name_of(flag),
                                       .arginfo = (char *)(uintptr_t)option->argument,
                                       .usage = (char *)(uintptr_t)usage,
                                       .has_arg = option->argument != NULL,
                                       .val = flag,
                                       .cb = callback};
        if (plugin->api->option_register(spank, &offered) != ESPANK_SUCCESS) {
            wrap_format(plugin->api->log_error, "ep-overlap: --%s cannot be offered",
                        name_of(flag));
            return -1;
        }
    }
    return 0;
}

/* "<prefix>ep_overlap_<option>", with '_' for '-'. */
static void variable_of(const char *prefix, int flag, char *name, size_t room) {
    snprintf(name, room, "%s%s", prefix, name_of(flag));
    for (char *c = name; *c != '\0'; c++)
        if (*c == '-')
            *c = '_';
}

void ep_options_forget(struct ep_plugin *plugin) {
    char name[128];
    for (int flag = 0; flag < EP_FLAG_COUNT && plugin->where == S_CTX_ALLOCATOR; flag++) {
        variable_of(INHERITED, flag, name, sizeof name);
        plugin->api->own_unsetenv(name);
    }
}

/* Slurm calls back for what was inherited first, and then for the command line:
 * the first call for an option that stands in the job's environment is the
 * inherited one. */
static bool is_inherited(struct ep_plugin *plugin, int flag) {
    char name[128];
    variable_of(INHERITED, flag, name, sizeof name);
    return plugin->where == S_CTX_LOCAL && !plugin->flag_seen[flag] &&
           plugin->api->own_getenv(name) != NULL;
}

/* sbatch calls back with the first component's options once more in each later one's round. */
static void take_behind_first(struct ep_plugin *plugin, int flag, int value) {
    int first = plugin->command[flags[flag].id];
    if (first == EPO_UNSET)
        plugin->came_late[flag] = true;
    else if (first != value)
        plugin->components_differ = true;
}

int ep_option_take(struct ep_plugin *plugin, int flag, const char *argument) {
    if (flag < 0 || flag >= EP_FLAG_COUNT)
        return -1;
    epo_option_id id = flags[flag].id;
    int value = flags[flag].value; /* a flag's argument is NULL, "" or "(null)" */
    char where[64];
    snprintf(where, sizeof where, "--%s", name_of(flag));
    if (epo_options[id].argument != NULL &&
        epo_option_parse(id, argument != NULL ? argument : "", where, &value) != EPO_OK) {
        /* On a node nothing may fail before the task. */
        if (plugin->where == S_CTX_REMOTE) {
            snprintf(plugin->refusal, sizeof plugin->refusal, "%s", epo_fail_text());
            return 0;
        }
        wrap_format(plugin->api->log_error, "ep-overlap: %s", epo_fail_text());
        return -1;
    }
    if (plugin->rounds > 0 && plugin->first_counts) {
        take_behind_first(plugin, flag, value);
        return 0;
    }
    int *values = is_inherited(plugin, flag) ? plugin->inherited : plugin->command;
    if (plugin->rounds > 0 && values == plugin->command && values[id] != EPO_UNSET &&
        values[id] != value)
        plugin->components_differ = true;
    plugin->flag_seen[flag] = true;
    values[id] = value;
    return 0;
}

static int refuse_late(const struct ep_plugin *plugin) {
    int status = 0;
    for (int flag = 0; flag < EP_FLAG_COUNT; flag++) {
        if (!plugin->came_late[flag])
            continue;
        wrap_format(plugin->api->log_error,
                    "ep-overlap: --%s stands behind the first component of this heterogeneous job, "
                    "and sbatch hands on the first one's options alone: give it to the first, too",
                    name_of(flag));
        status = -1;
    }
    return status;
}

int ep_options_end_round(struct ep_plugin *plugin) {
    plugin->rounds++;
    memset(plugin->flag_seen, 0, sizeof plugin->flag_seen);
    if (plugin->components_differ)
        wrap_format(plugin->api->log_info,
                    "ep-overlap: the components of this heterogeneous job differ in their "
                    "options; they run as one step, and %s counts",
                    plugin->first_counts ? "what the first one gives" : "the last value of each");
    plugin->components_differ = false;
    return refuse_late(plugin);
}

void ep_options_hand_on(struct ep_plugin *plugin, spank_t spank) {
    int wins = plugin->command[EPO_OPT_DELAY_WGRAD];
    if (wins == EPO_UNSET || !plugin->flag_seen[EP_FLAG_DELAY] ||
        !plugin->flag_seen[EP_FLAG_NO_DELAY])
        return;
    char name[128];
    variable_of(HANDED_ON, wins == EPO_WGRAD_DELAYED ? EP_FLAG_NO_DELAY : EP_FLAG_DELAY, name,
                sizeof name);
    plugin->api->control_unsetenv(spank, name);
}
