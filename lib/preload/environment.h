/* SPDX-License-Identifier: Apache-2.0
 *
 * environment.h - what a group's defaults mean in this process: the caller's
 * word, then the job's options (EP_OVERLAP_*), then the built-in value.
 */
#ifndef EPO_PRELOAD_ENVIRONMENT_H
#define EPO_PRELOAD_ENVIRONMENT_H

#include <stdbool.h>
#include <stddef.h>

#include "ep_overlap.h"

#define EPO_REASON_MAX 768

/* Where this process stands, from the variables of its launcher, in the order of
 * the table in ranks.c; none set: 0 of 1.  A value that is malformed, out of
 * range or without its partner is an error that names the variable.  *source is
 * static: the variable that told, or "default". */
epo_status epo_ranks_find(int *rank, int *ranks, const char **source);

/* Replaces every default of `config` and checks every value that does not need
 * the engine.  `reason` (EPO_REASON_MAX bytes) receives why overlap is what it
 * is.  config->engine stays as it is.  On failure both are untouched. */
epo_status epo_environment_resolve(epo_group_config *config, char *reason);

/* Of a config that was refused: where this rank stands, and how long it waits, if that is right;
 * false: it is not, and nobody can be told. */
bool epo_environment_place(epo_group_config *config);

/* Decimal text to int: digits alone, no sign, at most INT_MAX.  Our own, because
 * newer headers turn strtol into a symbol that older C libraries lack. */
bool epo_text_int(const char *text, int *out);
/* Digits with at most one point: "5", "0.25".  Any locale. */
bool epo_text_seconds(const char *text, double *out);

#endif
