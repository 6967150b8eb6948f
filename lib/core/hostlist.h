/* SPDX-License-Identifier: Apache-2.0
 *
 * hostlist.h - Slurm's way to name many nodes: "gpu[001-128,200],rack[1-4]n[0-7]".
 */
#ifndef EPO_CORE_HOSTLIST_H
#define EPO_CORE_HOSTLIST_H

#include <stdbool.h>

#define EPO_HOST_NAME_MAX 256

/* Names of letters, digits, '-', '_' and '.', with any number of [ranges]. */
bool epo_hostlist_valid(const char *list);
/* True when the valid list names `node`. */
bool epo_hostlist_has(const char *list, const char *node);
/* Calls `visit` for every name of the list, in order, until it returns false.
 * False when the list is not valid, or goes on behind more nodes than any cluster has:
 * who wrote it must not keep the reader busy. */
bool epo_hostlist_each(const char *list, bool (*visit)(const char *node, void *context),
                       void *context);

#endif
