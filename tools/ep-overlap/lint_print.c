/* SPDX-License-Identifier: Apache-2.0 */
#include "lint_print.h"

#include "json.h"

#include <stdio.h>
#include <string.h>

void epo_lint_count(epo_lint_result *r) {
    for (int i = 0; i < r->input_count; i++)
        r->errors += r->inputs[i].step_lacks;
    for (size_t i = 0; i < epo_rules_count(); i++) {
        const epo_rule_verdict *v = &r->verdicts[i];
        r->passed += v->outcome == EPO_RULE_PASSED;
        r->undecided += v->outcome == EPO_RULE_UNDECIDED;
        if (v->outcome != EPO_RULE_VIOLATED)
            continue;
        r->errors += v->severity == EPO_SEVERITY_ERROR;
        r->warnings += v->severity == EPO_SEVERITY_WARN;
        r->notes += v->severity < EPO_SEVERITY_WARN;
    }
}

typedef struct names_seen {
    const epo_facts *facts;
    epo_json *json;
    const char *names[32];
    size_t lengths[32];
    int count;
} names_seen;

static bool is_new(names_seen *seen, const char *name, size_t length) {
    for (int i = 0; i < seen->count; i++)
        if (seen->lengths[i] == length && memcmp(seen->names[i], name, length) == 0)
            return false;
    if (seen->count < 32) {
        seen->names[seen->count] = name;
        seen->lengths[seen->count++] = length;
    }
    return true;
}

static const epo_fact *fact_of(const names_seen *seen, const char *name, size_t length) {
    char key[256];
    snprintf(key, sizeof key, "%.*s", (int)length, name);
    return epo_facts_find(seen->facts, key);
}

static const char *value_of(const epo_fact *fact) {
    if (fact == NULL || fact->kind == EPO_FACT_UNKNOWN)
        return "not told";
    if (fact->kind == EPO_FACT_NULL)
        return "unset";
    return fact->text[0] == '\0' ? "empty" : fact->text;
}

static void print_found(const char *name, size_t length, void *context) {
    names_seen *seen = context;
    const epo_fact *fact = fact_of(seen, name, length);
    if (!is_new(seen, name, length) || fact == NULL)
        return;
    printf("%s%.*s = %s (%s)\n", seen->count > 1 ? "             " : "", (int)length, name,
           value_of(fact), fact->source);
}

static void print_violated(const epo_lint_result *r, const epo_rule_verdict *v) {
    names_seen seen = {.facts = r->facts};
    printf("\n%-8s %s  %s\n", epo_severity_name(v->severity), v->rule->id, v->rule->remedy);
    printf("    found    ");
    epo_condition_names(v->rule->condition, print_found, &seen);
    if (strcmp(v->rule->needed, "-") != 0)
        printf("    needed   %s\n", v->rule->needed);
    printf("    source   %s: %s\n", epo_rule_kind_name(v->rule->kind), v->rule->source);
}

static void print_severity(const epo_lint_result *r, epo_severity severity) {
    for (size_t i = 0; i < epo_rules_count(); i++)
        if (r->verdicts[i].outcome == EPO_RULE_VIOLATED && r->verdicts[i].severity == severity)
            print_violated(r, &r->verdicts[i]);
}

/* What only a run shows is decided by report, profile and doctor. */
static bool is_about_runs(const epo_rule_verdict *v) {
    return v->rule->scope == EPO_SCOPE_AB || v->rule->scope == EPO_SCOPE_PROFILE ||
           strncmp(v->missing, "ab.", 3) == 0 || strstr(v->missing, "run.") != NULL;
}

#define UNDECIDED_LINES 12 /* a configuration that says little leaves most rules undecided */

/* One line per set of missing names, with the rules that hang on it. */
static void print_undecided(const epo_lint_result *r, bool all) {
    size_t lines = 0;
    for (size_t i = 0; i < epo_rules_count(); i++) {
        const epo_rule_verdict *v = &r->verdicts[i];
        bool first = v->outcome == EPO_RULE_UNDECIDED && !is_about_runs(v);
        for (size_t k = 0; k < i && first; k++)
            first = r->verdicts[k].outcome != EPO_RULE_UNDECIDED ||
                    is_about_runs(&r->verdicts[k]) ||
                    strcmp(r->verdicts[k].missing, v->missing) != 0;
        if (!first || (++lines > UNDECIDED_LINES && !all))
            continue;
        printf("    %s:", v->missing[0] != '\0' ? v->missing : "a value that cannot be compared");
        for (size_t k = i; k < epo_rules_count(); k++)
            if (r->verdicts[k].outcome == EPO_RULE_UNDECIDED && !is_about_runs(&r->verdicts[k]) &&
                strcmp(r->verdicts[k].missing, v->missing) == 0)
                printf(" %s", r->verdicts[k].rule->id);
        putchar('\n');
    }
    if (lines > UNDECIDED_LINES && !all)
        printf("    and %zu more (--all)\n", lines - UNDECIDED_LINES);
}

static void print_passed(const epo_lint_result *r) {
    size_t column = 0;
    for (size_t i = 0; i < epo_rules_count(); i++)
        if (r->verdicts[i].outcome == EPO_RULE_PASSED)
            printf("%s%s", column++ % 10 == 0 ? "\n    " : " ", r->verdicts[i].rule->id);
    putchar('\n');
}

static size_t undecided_about_runs(const epo_lint_result *r) {
    size_t count = 0;
    for (size_t i = 0; i < epo_rules_count(); i++)
        count += r->verdicts[i].outcome == EPO_RULE_UNDECIDED && is_about_runs(&r->verdicts[i]);
    return count;
}

static void print_inputs_notes(const epo_lint_result *r) {
    for (int i = 0; i < r->input_count; i++) {
        const epo_input *input = &r->inputs[i];
        if (input->open_line > 0)
            printf("%s:%u: more arguments come from the shell: what is not told stays undecided\n",
                   input->name, input->open_line);
        if (input->source_line > 0)
            printf("%s:%u: sources a file that is not read: what it sets does not count\n",
                   input->name, input->source_line);
        if (input->cut_line > 0)
            printf("%s:%u: cut off from the command above (a blank behind \\, a comment): it does "
                   "not count\n",
                   input->name, input->cut_line);
        if (input->uncalled_line > 0)
            printf("%s:%u: nothing here calls %s(): what it says does not count\n", input->name,
                   input->uncalled_line, input->uncalled);
        if (input->step_lacks)
            printf("\nerror    ARG-OVERLAP  start the program by ep-overlap exec --, or add the "
                   "arguments (ep-overlap env)\n"
                   "    found    %s: --ep-overlap=on, and arguments that do not enable overlap\n"
                   "    needed   arguments that enable expert-parallel overlap, or srun refuses "
                   "the step\n",
                   input->name);
    }
}

void epo_lint_print_text(const epo_lint_result *r, bool all) {
    for (int i = 0; i < r->input_count; i++)
        printf("%s: %s, %zu settings\n", r->inputs[i].name, epo_input_kind_name(r->inputs[i].kind),
               r->inputs[i].settings);
    print_inputs_notes(r);
    print_severity(r, EPO_SEVERITY_ERROR);
    print_severity(r, EPO_SEVERITY_WARN);
    print_severity(r, EPO_SEVERITY_AUTOFIX);
    print_severity(r, EPO_SEVERITY_INFO);
    size_t runs = undecided_about_runs(r);
    if (r->undecided > runs) {
        printf("\nundecided: tell with --set NAME=VALUE\n");
        print_undecided(r, all);
    }
    if (all) {
        printf("\npassed:");
        print_passed(r);
    }
    printf("\n%zu error%s, %zu warning%s, %zu note%s; %zu rules passed, %zu undecided", r->errors,
           r->errors == 1 ? "" : "s", r->warnings, r->warnings == 1 ? "" : "s", r->notes,
           r->notes == 1 ? "" : "s", r->passed, r->undecided);
    if (runs > 0)
        printf(" (%zu of them about runs: report and profile decide them)", runs);
    bool failed = r->errors > 0 || (r->strict && r->warnings > 0);
    printf("\n%s\n", failed ? "NOT allowed as it stands" : "allowed, as far as the input tells");
}

static void json_found(const char *name, size_t length, void *context) {
    names_seen *seen = context;
    const epo_fact *fact = fact_of(seen, name, length);
    if (!is_new(seen, name, length))
        return;
    char key[256];
    snprintf(key, sizeof key, "%.*s", (int)length, name);
    bool known = fact != NULL && fact->kind != EPO_FACT_UNKNOWN;
    epo_json_object(seen->json, NULL);
    epo_json_text(seen->json, "name", key);
    epo_json_bool(seen->json, "known", known);
    epo_json_text(seen->json, "value", known && fact->kind != EPO_FACT_NULL ? fact->text : NULL);
    epo_json_text(seen->json, "from", fact == NULL ? NULL : fact->source);
    epo_json_end(seen->json, '}');
}

static void json_verdict(const epo_lint_result *r, epo_json *json, const epo_rule_verdict *v) {
    names_seen seen = {.facts = r->facts, .json = json};
    epo_json_object(json, NULL);
    epo_json_text(json, "id", v->rule->id);
    epo_json_text(json, "scope", epo_rule_scope_name(v->rule->scope));
    epo_json_text(json, "outcome", epo_rule_outcome_name(v->outcome));
    epo_json_text(json, "severity", epo_severity_name(v->severity));
    epo_json_text(json, "kind", epo_rule_kind_name(v->rule->kind));
    epo_json_text(json, "violated_when", v->rule->condition);
    epo_json_array(json, "found");
    epo_condition_names(v->rule->condition, json_found, &seen);
    epo_json_end(json, ']');
    epo_json_text(json, "needed", strcmp(v->rule->needed, "-") == 0 ? NULL : v->rule->needed);
    epo_json_text(json, "missing", v->outcome == EPO_RULE_UNDECIDED ? v->missing : NULL);
    epo_json_text(json, "remedy", v->rule->remedy);
    epo_json_text(json, "source", v->rule->source);
    epo_json_end(json, '}');
}

void epo_lint_print_json(const epo_lint_result *r) {
    epo_json json = {.out = stdout};
    bool failed = r->errors > 0 || (r->strict && r->warnings > 0);
    epo_json_object(&json, NULL);
    epo_json_array(&json, "inputs");
    for (int i = 0; i < r->input_count; i++) {
        epo_json_object(&json, NULL);
        epo_json_text(&json, "name", r->inputs[i].name);
        epo_json_text(&json, "kind", epo_input_kind_name(r->inputs[i].kind));
        epo_json_integer(&json, "settings", (int64_t)r->inputs[i].settings);
        epo_json_bool(&json, "more_arguments_from_the_shell", r->inputs[i].open_line > 0);
        epo_json_bool(&json, "sources_another_file", r->inputs[i].source_line > 0);
        epo_json_text(&json, "function_never_called",
                      r->inputs[i].uncalled_line > 0 ? r->inputs[i].uncalled : NULL);
        if (r->inputs[i].cut_line > 0)
            epo_json_integer(&json, "cut_off_at_line", r->inputs[i].cut_line);
        else
            epo_json_text(&json, "cut_off_at_line", NULL);
        epo_json_bool(&json, "step_will_be_refused", r->inputs[i].step_lacks);
        epo_json_end(&json, '}');
    }
    epo_json_end(&json, ']');
    epo_json_bool(&json, "allowed", !failed);
    epo_json_integer(&json, "errors", (int64_t)r->errors);
    epo_json_integer(&json, "warnings", (int64_t)r->warnings);
    epo_json_integer(&json, "notes", (int64_t)r->notes);
    epo_json_integer(&json, "passed", (int64_t)r->passed);
    epo_json_integer(&json, "undecided", (int64_t)r->undecided);
    epo_json_array(&json, "rules");
    for (size_t i = 0; i < epo_rules_count(); i++)
        json_verdict(r, &json, &r->verdicts[i]);
    epo_json_end(&json, ']');
    epo_json_end(&json, '}');
}
