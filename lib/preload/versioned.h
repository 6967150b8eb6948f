/* SPDX-License-Identifier: Apache-2.0
 *
 * versioned.h - public structs that begin with `size`.  An engine always gets the
 * whole struct of its own header: what an older program's struct lacks keeps its
 * default, what a newer program's struct has beyond ours must be unused (zero).
 */
#ifndef EPO_PRELOAD_VERSIONED_H
#define EPO_PRELOAD_VERSIONED_H

#include <stddef.h>

#include "ep_overlap.h"

/* Copies the caller's struct over `full`, which holds the defaults and its own
 * size.  `least`: bytes that every version of the struct had.  NULL, a size below
 * `least` (no initialiser macro) and used fields that we do not know are errors
 * that call the struct `name`. */
epo_status epo_versioned_read(void *full, const void *caller, size_t least, const char *name);
/* Checks an output struct before the call that fills it. */
epo_status epo_versioned_check(const void *caller, size_t least, const char *name);
/* Copies what fits into the caller's struct, whose size stays; the rest of a
 * newer struct is zeroed. */
void epo_versioned_write(void *caller, const void *full);

#define EPO_LEAST(type, last) (offsetof(type, last) + sizeof(((type *)0)->last))

#endif
