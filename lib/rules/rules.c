/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/rules.h"

#include "core/fact_value.h"
#include "core/version.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define EPO_RULE(id, scope, kind, severity, condition, needed, remedy, source)                     \
    {id,                                                                                           \
     EPO_SCOPE_##scope,                                                                            \
     EPO_RULE_##kind,                                                                              \
     EPO_SEVERITY_##severity,                                                                      \
     EPO_SEVERITY_##severity,                                                                      \
     NULL,                                                                                         \
     condition,                                                                                    \
     needed,                                                                                       \
     remedy,                                                                                       \
     source},
#define EPO_RULE_IF(id, scope, kind, severity, softer, when, condition, needed, remedy, source)    \
    {id,                                                                                           \
     EPO_SCOPE_##scope,                                                                            \
     EPO_RULE_##kind,                                                                              \
     EPO_SEVERITY_##severity,                                                                      \
     EPO_SEVERITY_##softer,                                                                        \
     when,                                                                                         \
     condition,                                                                                    \
     needed,                                                                                       \
     remedy,                                                                                       \
     source},
static const epo_rule rules[] = {
#include "rules/rules.def"
};

#define EPO_KEY(name, type, core, lm, doc) {name, EPO_KEY_##type, core, lm, doc},
static const epo_key keys[] = {
#include "rules/keys.def"
};

#define COUNT(array) (sizeof(array) / sizeof *(array))

size_t epo_rules_count(void) { return COUNT(rules); }

const epo_rule *epo_rules_at(size_t index) { return index < COUNT(rules) ? &rules[index] : NULL; }

const epo_rule *epo_rules_find(const char *id) {
    for (size_t i = 0; i < COUNT(rules); i++)
        if (strcasecmp(rules[i].id, id) == 0)
            return &rules[i];
    return NULL;
}

size_t epo_keys_count(void) { return COUNT(keys); }

const epo_key *epo_keys_at(size_t index) { return index < COUNT(keys) ? &keys[index] : NULL; }

const epo_key *epo_keys_find(const char *name, size_t length) {
    for (size_t i = 0; i < COUNT(keys); i++)
        if (strlen(keys[i].name) == length && memcmp(keys[i].name, name, length) == 0)
            return &keys[i];
    return NULL;
}

/* A rule that we derived ourselves never fails a run: it warns. */
static epo_status severity_of(const epo_rule *rule, const epo_facts *facts,
                              epo_severity *severity) {
    epo_severity found = rule->severity;
    if (rule->softer_when != NULL) {
        epo_condition_result when;
        epo_status status = epo_condition_evaluate(rule->softer_when, facts, &when);
        if (status != EPO_OK)
            return status;
        if (when.truth == EPO_TRUE)
            found = rule->softer;
    }
    if (rule->kind == EPO_RULE_DERIVED && found == EPO_SEVERITY_ERROR)
        found = EPO_SEVERITY_WARN;
    *severity = found;
    return EPO_OK;
}

epo_status epo_rules_evaluate(const epo_rule *rule, const epo_facts *facts,
                              epo_rule_verdict *verdict) {
    epo_condition_result result;
    epo_rule_verdict made = {.rule = rule};
    epo_status status = epo_condition_evaluate(rule->condition, facts, &result);
    if (status == EPO_OK)
        status = severity_of(rule, facts, &made.severity);
    if (status != EPO_OK)
        return status;
    made.outcome = result.truth == EPO_TRUE    ? EPO_RULE_VIOLATED
                   : result.truth == EPO_FALSE ? EPO_RULE_PASSED
                                               : EPO_RULE_UNDECIDED;
    memcpy(made.missing, result.missing, sizeof made.missing);
    *verdict = made;
    return EPO_OK;
}

const char *epo_rule_scope_name(epo_rule_scope scope) {
    static const char *const names[] = {"overlap",    "delay_wgrad", "dispatcher",
                                        "cuda_graph", "precision",   "offload",
                                        "env",        "ab",          "profile"};
    return (size_t)scope < COUNT(names) ? names[scope] : "?";
}

const char *epo_rule_kind_name(epo_rule_kind kind) {
    static const char *const names[] = {"upstream", "documented", "derived"};
    return (size_t)kind < COUNT(names) ? names[kind] : "?";
}

const char *epo_severity_name(epo_severity severity) {
    static const char *const names[] = {"info", "autofix", "warning", "error"};
    return (size_t)severity < COUNT(names) ? names[severity] : "?";
}

const char *epo_rule_outcome_name(epo_rule_outcome outcome) {
    static const char *const names[] = {"passed", "violated", "undecided"};
    return (size_t)outcome < COUNT(names) ? names[outcome] : "?";
}

const char *epo_keys_misfit(const char *key, const char *value) {
    const epo_key *known = epo_keys_find(key, strlen(key));
    epo_fact_value read;
    epo_pep440 version;
    if (known == NULL || !epo_fact_value_read(value, &read))
        return NULL;
    bool is_number = read.kind == EPO_FACT_NUMBER;
    bool is_pattern = strcmp(key, "moe_layer_freq") == 0; /* [1]*48 */
    const char *wanted = NULL;
    if (known->type == EPO_KEY_SWITCH && read.kind != EPO_FACT_BOOL &&
        !(is_number && (read.number == 0 || read.number == 1)))
        wanted = "true or false";
    else if (known->type == EPO_KEY_NUMBER && !is_number && !is_pattern)
        wanted = "a number";
    else if (known->type == EPO_KEY_VERSION && epo_pep440_parse(read.text, &version) != EPO_OK)
        wanted = "a version (2.9.0)";
    free(read.text);
    return read.kind == EPO_FACT_NULL ? NULL : wanted;
}
