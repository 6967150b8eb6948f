/* SPDX-License-Identifier: Apache-2.0
 *
 * unserved.h - a task on a node without the plugin, in a step that asks for overlap.
 */
#ifndef EPO_CORE_UNSERVED_H
#define EPO_CORE_UNSERVED_H

#include <stdbool.h>
#include <stddef.h>

/* The plugin of srun sends its decision along, and the plugin of each node takes it
 * out of the task's environment.  A task that still has it, for its own step, and
 * whose decision is on because somebody asked for it, runs where nobody could act on
 * it.  Writes the node's name.  A site's default breaks nobody on such a node. */
bool epo_step_is_unserved(char *node, size_t room);

#endif
