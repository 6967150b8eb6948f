/* SPDX-License-Identifier: Apache-2.0
 *
 * auto.h - what `auto` means for the nodes of a step.
 */
#ifndef EPO_CORE_AUTO_H
#define EPO_CORE_AUTO_H

#include "core/policy.h"

/* Turns the wish `auto` into on or off by the classes of the step's nodes, and
 * takes over the class's dispatcher and wgrad where nobody asked for one. */
void epo_auto_decide(const struct epo_policy_input *input, struct epo_decision *decision);

/* The class that lists the node, else the one whose gres the node has; NULL when
 * there is none. */
const struct epo_class *epo_auto_class(const struct epo_policy_input *input, const char *node);

#endif
