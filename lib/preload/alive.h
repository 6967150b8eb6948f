/* SPDX-License-Identifier: Apache-2.0
 *
 * alive.h - which objects a program holds.  What was destroyed before, or never made, is
 * refused by name instead of being read.
 */
#ifndef EPO_PRELOAD_ALIVE_H
#define EPO_PRELOAD_ALIVE_H

#include <stdbool.h>

#include "ep_overlap.h"

typedef enum epo_kind {
    EPO_KIND_WORLD = 1,
    EPO_KIND_GROUP,
    EPO_KIND_BUFFER,
    EPO_KIND_PLAN,
    EPO_KIND_LAYER,
    EPO_KIND_SAVED
} epo_kind;

/* An object that was made, with one reference; false: no memory to note it. */
bool epo_alive_add(epo_kind kind, const void *object);
/* One reference more; false: it does not exist. */
bool epo_alive_retain(epo_kind kind, const void *object);
/* One reference less; false: there was none. */
bool epo_alive_drop(epo_kind kind, const void *object);
/* EPO_OK, or EPO_E_ARG naming `function` and what is wrong with the object. */
epo_status epo_alive_check(epo_kind kind, const void *object, const char *function);

#endif
