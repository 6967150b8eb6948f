/* SPDX-License-Identifier: Apache-2.0
 *
 * rules.h - the table of rules and what facts say about each.
 */
#ifndef EPO_RULES_RULES_H
#define EPO_RULES_RULES_H

#include "core/facts.h"
#include "rules/condition.h"

typedef enum epo_rule_scope {
    EPO_SCOPE_OVERLAP,
    EPO_SCOPE_DELAY_WGRAD,
    EPO_SCOPE_DISPATCHER,
    EPO_SCOPE_CUDA_GRAPH,
    EPO_SCOPE_PRECISION,
    EPO_SCOPE_OFFLOAD,
    EPO_SCOPE_ENVIRONMENT,
    EPO_SCOPE_AB,
    EPO_SCOPE_PROFILE
} epo_rule_scope;

typedef enum epo_rule_kind {
    EPO_RULE_UPSTREAM,
    EPO_RULE_DOCUMENTED,
    EPO_RULE_DERIVED
} epo_rule_kind;

/* AUTOFIX: the framework changes the setting by itself. */
typedef enum epo_severity {
    EPO_SEVERITY_INFO,
    EPO_SEVERITY_AUTOFIX,
    EPO_SEVERITY_WARN,
    EPO_SEVERITY_ERROR
} epo_severity;

typedef struct epo_rule {
    const char *id;
    epo_rule_scope scope;
    epo_rule_kind kind;
    epo_severity severity;
    epo_severity softer;     /* holds where softer_when does */
    const char *softer_when; /* NULL: nowhere */
    const char *condition;   /* under which the rule is violated */
    const char *needed;      /* "-": nothing is needed, the rule informs */
    const char *remedy;
    const char *source;
} epo_rule;

typedef enum epo_rule_outcome {
    EPO_RULE_PASSED,
    EPO_RULE_VIOLATED,
    EPO_RULE_UNDECIDED
} epo_rule_outcome;

typedef struct epo_rule_verdict {
    const epo_rule *rule;
    epo_rule_outcome outcome;
    epo_severity severity;         /* of this violation: a derived rule warns at most */
    char missing[EPO_MISSING_MAX]; /* what an undecided rule hangs on */
} epo_rule_verdict;

size_t epo_rules_count(void);
const epo_rule *epo_rules_at(size_t index);
/* By id, in any case of letters; NULL: there is none. */
const epo_rule *epo_rules_find(const char *id);

/* Fails only on a mistake in the table. */
epo_status epo_rules_evaluate(const epo_rule *rule, const epo_facts *facts,
                              epo_rule_verdict *verdict);

const char *epo_rule_scope_name(epo_rule_scope scope);
const char *epo_rule_kind_name(epo_rule_kind kind);
const char *epo_severity_name(epo_severity severity);
const char *epo_rule_outcome_name(epo_rule_outcome outcome);

typedef enum epo_key_type {
    EPO_KEY_SWITCH,
    EPO_KEY_NUMBER,
    EPO_KEY_WORD,
    EPO_KEY_LIST,
    EPO_KEY_VERSION
} epo_key_type;

typedef struct epo_key {
    const char *name;
    epo_key_type type;
    const char *core_default, *lm_default; /* NULL: not known */
    const char *doc;
} epo_key;

size_t epo_keys_count(void);
const epo_key *epo_keys_at(size_t index);
/* NULL: no rule reads it.  `length` bytes of `name`. */
const epo_key *epo_keys_find(const char *name, size_t length);
/* What `value` must be, "a version (2.9.0)", if it is none; NULL: it fits, or no rule reads the
 * key. */
const char *epo_keys_misfit(const char *key, const char *value);

#endif
