/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_engine.h - an engine that computes nothing: it notes each call and what it
 * was given, and fails on demand.
 */
#ifndef EPO_TESTS_FAKE_ENGINE_H
#define EPO_TESTS_FAKE_ENGINE_H

#include "backend/engine.h"

typedef struct fake_state {
    const char *last; /* the operation called last */
    int calls;
    epo_status fail; /* what the next operations return */
    epo_engine_group group;
    epo_status refused; /* of group_refuse, which is no call of the program's */
    int refusals;
    char reason[1100];
    epo_bootstrap bootstrap;
    epo_buffer_config buffer;
    epo_routing routing;
    epo_layer_config layer;
} fake_state;

extern fake_state fake;

/* One object of every kind. */
epo_world *fake_world(void);
epo_group *fake_group(void);
epo_buffer *fake_buffer(void);
epo_plan *fake_plan(void);
epo_layer *fake_layer(void);
epo_saved *fake_saved(void);

#endif
