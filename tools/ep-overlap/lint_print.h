/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPO_TOOLS_LINT_PRINT_H
#define EPO_TOOLS_LINT_PRINT_H

#include "input.h"
#include "rules/rules.h"

typedef struct epo_lint_result {
    const epo_input *inputs;
    int input_count;
    const epo_facts *facts;
    epo_rule_verdict *verdicts; /* one per rule */
    bool strict;
    size_t errors, warnings, notes, passed, undecided; /* epo_lint_count fills them */
} epo_lint_result;

void epo_lint_count(epo_lint_result *result);
void epo_lint_print_text(const epo_lint_result *result, bool all);
void epo_lint_print_json(const epo_lint_result *result);

#endif
