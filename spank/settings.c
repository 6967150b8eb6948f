/* SPDX-License-Identifier: Apache-2.0 */
#include "context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int ep_settings_arguments(struct ep_plugin *plugin, int count, char **arguments) {
    for (int i = 0; i < count; i++) {
        if (strncmp(arguments[i], "conf=", 5) != 0) {
            snprintf(plugin->config_error, sizeof plugin->config_error,
                     "plugstack.conf: found \"%.128s\", allowed is conf=FILE", arguments[i]);
            return -1;
        }
        plugin->config_path = arguments[i] + 5;
        plugin->config_required = true;
    }
    return 0;
}

void ep_settings_load(struct ep_plugin *plugin) {
    if (plugin->config != NULL || plugin->config_error[0] != '\0')
        return;
    if (epo_config_load(plugin->config_path, plugin->config_required, &plugin->trust,
                        &plugin->config) != EPO_OK)
        snprintf(plugin->config_error, sizeof plugin->config_error, "%s", epo_fail_text());
}

epo_status ep_settings_environment(const char *(*get)(void *from, const char *name), void *from,
                                   int values[EPO_OPT_COUNT]) {
    for (int id = 0; id < EPO_OPT_COUNT; id++) {
        const char *text = get(from, epo_options[id].input);
        values[id] = EPO_UNSET;
        if (text == NULL || text[0] == '\0')
            continue;
        epo_status status =
            epo_option_parse((epo_option_id)id, text, epo_options[id].input, &values[id]);
        if (status != EPO_OK)
            return status;
    }
    return EPO_OK;
}

void ep_plugin_begin(struct ep_plugin *plugin, const struct wrap_spank *api,
                     const char *config_path) {
    memset(plugin, 0, sizeof *plugin);
    plugin->api = api;
    plugin->probe = -1;
    plugin->where = api->context();
    plugin->first_counts =
        plugin->where == S_CTX_ALLOCATOR && strncmp(api->own_program(), "sbatch", 6) == 0;
    plugin->config_path = config_path;
    for (int id = 0; id < EPO_OPT_COUNT; id++)
        plugin->command[id] = plugin->inherited[id] = EPO_UNSET;
    plugin->trust.owners[plugin->trust.count++] = api->own_user();
}
