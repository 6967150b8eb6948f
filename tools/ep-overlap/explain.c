/* SPDX-License-Identifier: Apache-2.0 */
#include "tool.h"

#include "json.h"
#include "rules/rules.h"

#include <string.h>
#include <strings.h>

static const char help[] =
    "usage: ep-overlap explain [--json] [RULE | SCOPE]...\n\n"
    "Tells what a rule forbids, when, why and what to do.  Without a rule: lists all\n"
    "of them; with a scope (overlap, delay_wgrad, dispatcher, cuda_graph, precision,\n"
    "offload, env, ab, profile): lists its rules.\n\n"
    "examples:\n"
    "  ep-overlap explain OVL-006\n"
    "  ep-overlap explain delay_wgrad\n"
    "  ep-overlap explain --json | jq -r '.[].id'\n";

static void print_name(const char *name, size_t length, void *context) {
    (void)context;
    const epo_key *key = epo_keys_find(name, length);
    printf("    %-10s %.*s%s%s\n", "", (int)length, name, key != NULL ? ": " : "",
           key != NULL ? key->doc : "");
}

static void print_rule(const epo_rule *rule) {
    printf("%s  %s, %s, %s\n", rule->id, epo_rule_scope_name(rule->scope),
           epo_rule_kind_name(rule->kind), epo_severity_name(rule->severity));
    printf("    %-10s %s\n", "violated", rule->condition);
    if (rule->softer_when != NULL)
        printf("    %-10s only %s where %s\n", "", epo_severity_name(rule->softer),
               rule->softer_when);
    if (rule->kind == EPO_RULE_DERIVED)
        printf("    %-10s our reading of the source: it warns, it never fails a run\n", "");
    if (strcmp(rule->needed, "-") != 0)
        printf("    %-10s %s\n", "needed", rule->needed);
    printf("    %-10s %s\n", "remedy", rule->remedy);
    printf("    %-10s %s\n", "source", rule->source);
    printf("    reads\n");
    epo_condition_names(rule->condition, print_name, NULL);
}

static void print_line(const epo_rule *rule) {
    printf("%-8s %-12s %-8s %s\n", rule->id, epo_rule_scope_name(rule->scope),
           epo_severity_name(rule->severity), rule->remedy);
}

static void json_rule(epo_json *json, const epo_rule *rule) {
    epo_json_object(json, NULL);
    epo_json_text(json, "id", rule->id);
    epo_json_text(json, "scope", epo_rule_scope_name(rule->scope));
    epo_json_text(json, "kind", epo_rule_kind_name(rule->kind));
    epo_json_text(json, "severity", epo_severity_name(rule->severity));
    epo_json_text(json, "violated_when", rule->condition);
    epo_json_text(json, "needed", strcmp(rule->needed, "-") == 0 ? NULL : rule->needed);
    epo_json_text(json, "remedy", rule->remedy);
    epo_json_text(json, "source", rule->source);
    epo_json_end(json, '}');
}

static bool is_known(const char *what) {
    bool known = epo_rules_find(what) != NULL;
    for (size_t i = 0; i < epo_rules_count() && !known; i++)
        known = strcasecmp(what, epo_rule_scope_name(epo_rules_at(i)->scope)) == 0;
    return known;
}

/* Every rule that `what` names (NULL: all). */
static void show(const char *what, epo_json *json) {
    const epo_rule *one = what == NULL ? NULL : epo_rules_find(what);
    for (size_t i = 0; i < epo_rules_count(); i++) {
        const epo_rule *rule = epo_rules_at(i);
        if (what != NULL && rule != one && strcasecmp(what, epo_rule_scope_name(rule->scope)) != 0)
            continue;
        if (json != NULL)
            json_rule(json, rule);
        else if (one != NULL)
            print_rule(rule);
        else
            print_line(rule);
    }
}

static int explain_run(int argc, char **argv) {
    epo_json json = {.out = stdout}, *use = NULL;
    int named = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            fputs(help, stdout);
            return EPO_EXIT_FINE;
        }
        if (strcmp(argv[i], "--json") == 0)
            use = &json;
        else if (argv[i][0] == '-')
            return epo_tool_usage("explain", "unknown option %s", argv[i]);
        else
            named++;
    }
    for (int i = 1; i < argc; i++)
        if (argv[i][0] != '-' && !is_known(argv[i]))
            return epo_tool_usage("explain", "there is no rule or scope \"%s\"", argv[i]);
    if (use != NULL)
        epo_json_array(use, NULL);
    if (named == 0)
        show(NULL, use);
    for (int i = 1; i < argc; i++)
        if (argv[i][0] != '-')
            show(argv[i], use);
    if (use != NULL)
        epo_json_end(use, ']');
    return EPO_EXIT_FINE;
}

EPO_TOOL(21, explain, "what a rule forbids, why, and what to do", explain_run)
