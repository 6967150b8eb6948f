/* SPDX-License-Identifier: Apache-2.0
 *
 * gres.h - the generic resources of a step's nodes, asked of the controller once
 * and only when a class is told by them.
 */
#ifndef EPO_SPANK_GRES_H
#define EPO_SPANK_GRES_H

#include "context.h"

struct ep_gres {
    const char *wanted; /* the step's nodes */
    char **names, **gres;
    size_t count, room;
    bool failed;
};

bool ep_gres_needed(const struct epo_config *config);
void ep_gres_load(struct ep_plugin *plugin, const char *nodes, struct ep_gres *table);
/* As epo_policy_input.gres_of wants it. */
const char *ep_gres_of(void *table, const char *node);
void ep_gres_free(struct ep_gres *table);

#endif
