/* SPDX-License-Identifier: Apache-2.0
 *
 * condition.h - the little language of rules.def.
 *
 *     overlap_moe_expert_parallel_comm && expert_model_parallel_size <= 1
 *     moe_token_dispatcher_type not in {alltoall, flex}
 *     recompute_modules has moe || mtp_num_layers is not null
 *     te_version < 2.3.0            names that end in _version compare as PEP 440 says
 *     min(expert_model_parallel_size, 8) != env.X
 *
 * Operators, loosest first: || ; && ; ! ; == != < <= > >= in has starts is ; * %.
 * `is` takes null, empty, set and their `not`.  Sets {a, b} and the word behind
 * `has` are literal words (null in a set: no value); text is 'quoted'.
 *
 * Truth has three values (Kleene's logic): what nobody told is unknown, and
 * stays so unless the rest decides.  A fact known to be unset is false, equals
 * nothing, and is not smaller or greater than anything; reckoning with it gives
 * another unset value.
 */
#ifndef EPO_RULES_CONDITION_H
#define EPO_RULES_CONDITION_H

#include "core/facts.h"

typedef enum epo_truth { EPO_FALSE, EPO_TRUE, EPO_UNKNOWN } epo_truth;

#define EPO_MISSING_MAX 512

typedef struct epo_condition_result {
    epo_truth truth;
    char missing[EPO_MISSING_MAX]; /* of an unknown one: the names it hangs on, "a, b" */
} epo_condition_result;

/* EPO_E_ARG: the condition has a mistake; the error line names the byte. */
epo_status epo_condition_evaluate(const char *condition, const epo_facts *facts,
                                  epo_condition_result *result);

/* Calls `visit` with every name that `condition` reads, in order, repeats included. */
typedef void epo_condition_visit(const char *name, size_t length, void *context);
void epo_condition_names(const char *condition, epo_condition_visit *visit, void *context);

#endif
