/* SPDX-License-Identifier: Apache-2.0
 *
 * env_list.h - lists in environment variables, as ld.so reads LD_PRELOAD: parts
 * separated by colons or blanks.
 */
#ifndef EPO_CORE_ENV_LIST_H
#define EPO_CORE_ENV_LIST_H

#include "core/status.h"

#include <stdbool.h>

/* `list` (NULL counts as empty) with `item` behind the others, parts joined by
 * ':'.  Each part stands once, where it stood first; empty parts vanish.  The
 * user's parts keep their order, and ours comes last: a sanitizer's or an
 * allocator's library has to be the first.  For the caller to free. */
epo_status epo_env_list_append(const char *list, const char *item, char **result);
/* `list` without `item`; "" when nothing is left. */
epo_status epo_env_list_remove(const char *list, const char *item, char **result);
bool epo_env_list_has(const char *list, const char *item);
/* False for a word that a list cannot hold: empty, or with a separator. */
bool epo_env_list_can_hold(const char *item);

#endif
