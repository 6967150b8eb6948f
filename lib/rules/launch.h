/* SPDX-License-Identifier: Apache-2.0
 *
 * launch.h - the variables and arguments of a run, with or without overlap.
 */
#ifndef EPO_RULES_LAUNCH_H
#define EPO_RULES_LAUNCH_H

#include "core/facts.h"
#include "rules/command.h"

#define EPO_LAUNCH_VARIABLES_MAX 32

typedef struct epo_launch_variable {
    const char *name;
    char value[64];
    const char *why;
} epo_launch_variable;

/* Writes the variables that `facts` call for (overlap_moe_expert_parallel_comm,
 * moe_token_dispatcher_type, flex_backend, gpu, expert_model_parallel_size, ...).
 * A variable whose value hangs on something unknown is left out.  Fails only on a
 * mistake in the table. */
epo_status epo_launch_environment(const epo_facts *facts, epo_launch_variable *out, size_t *count);

/* The framework's arguments, separated by blanks.  Cuts at `size`. */
void epo_launch_arguments(const epo_facts *facts, epo_framework framework, char *text, size_t size);

#endif
