/* SPDX-License-Identifier: Apache-2.0 */
#include "gres.h"

#include "core/hostlist.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

bool ep_gres_needed(const struct epo_config *config) {
    for (int i = 0; config != NULL && i < config->class_count; i++)
        if (config->classes[i].gres != NULL)
            return true;
    return false;
}

static bool grow(struct ep_gres *table) {
    if (table->count < table->room)
        return true;
    size_t room = table->room == 0 ? 16 : 2 * table->room;
    if (room > SIZE_MAX / sizeof(char *))
        return false;
    char **names = realloc(table->names, room * sizeof *names);
    if (names != NULL)
        table->names = names;
    char **gres = names != NULL ? realloc(table->gres, room * sizeof *gres) : NULL;
    if (gres == NULL)
        return false;
    table->gres = gres;
    table->room = room;
    return true;
}

static void add(void *context, const char *node, const char *gres) {
    struct ep_gres *table = context;
    if (table->failed || gres == NULL || !epo_hostlist_has(table->wanted, node))
        return;
    char *name = grow(table) ? strdup(node) : NULL;
    char *copy = name != NULL ? strdup(gres) : NULL;
    if (copy == NULL) {
        free(name);
        table->failed = true;
        return;
    }
    table->names[table->count] = name;
    table->gres[table->count++] = copy;
}

void ep_gres_load(struct ep_plugin *plugin, const char *nodes, struct ep_gres *table) {
    *table = (struct ep_gres){.wanted = nodes};
    if (plugin->api->each_node(add, table) != 0)
        table->failed = true;
}

const char *ep_gres_of(void *context, const char *node) {
    const struct ep_gres *table = context;
    for (size_t i = 0; i < table->count; i++)
        if (strcmp(table->names[i], node) == 0)
            return table->gres[i];
    return NULL;
}

void ep_gres_free(struct ep_gres *table) {
    for (size_t i = 0; i < table->count; i++) {
        free(table->names[i]);
        free(table->gres[i]);
    }
    free(table->names);
    free(table->gres);
    *table = (struct ep_gres){.wanted = NULL};
}
