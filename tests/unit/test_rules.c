/* SPDX-License-Identifier: Apache-2.0
 *
 * Every rule: facts that violate it, facts that pass it, and nothing known.
 */
#include "core/facts.h"
#include "core/status.h"
#include "rules/condition.h"
#include "rules/rules.h"
#include "unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct rule_case {
    const char *id, *violating, *passing;
} rule_case;

#define CASE(id, violating, passing) {id, violating, passing},
static const rule_case cases[] = {
#include "rule_cases.def"
};
#define CASES (sizeof cases / sizeof *cases)

static void set_fact(epo_facts *facts, char *key, char *value) {
    bool is_env = strncmp(key, "env.", 4) == 0;
    if (strcmp(key, "gpu_name") == 0)
        for (char *c = strchr(value, '_'); c != NULL; c = strchr(c, '_'))
            *c = ' ';
    if (is_env)
        epo_facts_set_text(facts, key, strcmp(value, "-") == 0 ? NULL : value, "test");
    else
        epo_facts_set(facts, key, value, "test");
}

static epo_facts *facts_of(const char *text) {
    epo_facts *facts = epo_facts_create();
    char *copy = strdup(text), *rest = copy;
    for (char *word; (word = strsep(&rest, " ")) != NULL;) {
        char *equals = strchr(word, '=');
        if (equals == NULL)
            continue;
        *equals = '\0';
        set_fact(facts, word, equals + 1);
    }
    free(copy);
    return facts;
}

static epo_rule_verdict judge(const char *id, const char *text) {
    epo_rule_verdict verdict = {.outcome = EPO_RULE_UNDECIDED};
    epo_facts *facts = facts_of(text);
    CU_ASSERT_EQUAL(epo_rules_evaluate(epo_rules_find(id), facts, &verdict), EPO_OK);
    epo_facts_destroy(facts);
    return verdict;
}

static void check(const char *id, const char *text, epo_rule_outcome wanted) {
    epo_rule_verdict verdict = judge(id, text);
    if (verdict.outcome != wanted)
        fprintf(stderr, "%s with \"%s\": %s, wanted %s; missing %s\n", id, text,
                epo_rule_outcome_name(verdict.outcome), epo_rule_outcome_name(wanted),
                verdict.missing);
    CU_ASSERT_EQUAL(verdict.outcome, wanted);
}

static void each_rule_is_violated_and_passes(void) {
    for (size_t i = 0; i < CASES; i++) {
        check(cases[i].id, cases[i].violating, EPO_RULE_VIOLATED);
        check(cases[i].id, cases[i].passing, EPO_RULE_PASSED);
    }
}

static void each_rule_has_its_case(void) {
    CU_ASSERT_EQUAL(CASES, epo_rules_count());
    for (size_t i = 0; i < epo_rules_count(); i++) {
        size_t found = 0;
        for (size_t j = 0; j < CASES; j++)
            found += strcmp(cases[j].id, epo_rules_at(i)->id) == 0;
        if (found != 1)
            fprintf(stderr, "%s has %zu cases\n", epo_rules_at(i)->id, found);
        CU_ASSERT_EQUAL(found, 1);
    }
}

/* Without facts no rule is decided, and each says what it would need. */
static void nothing_known_is_undecided(void) {
    for (size_t i = 0; i < epo_rules_count(); i++) {
        epo_rule_verdict verdict = judge(epo_rules_at(i)->id, "");
        CU_ASSERT_EQUAL(verdict.outcome, EPO_RULE_UNDECIDED);
        CU_ASSERT(verdict.missing[0] != '\0');
    }
}

static void check_name(const char *name, size_t length, void *context) {
    bool known = epo_keys_find(name, length) != NULL || strncmp(name, "env.", 4) == 0;
    if (!known)
        fprintf(stderr, "%s reads %.*s, which keys.def does not have\n", (const char *)context,
                (int)length, name);
    CU_ASSERT(known);
}

static void conditions_read_known_names(void) {
    for (size_t i = 0; i < epo_rules_count(); i++) {
        const epo_rule *rule = epo_rules_at(i);
        epo_condition_names(rule->condition, check_name, (void *)rule->id);
        if (rule->softer_when != NULL)
            epo_condition_names(rule->softer_when, check_name, (void *)rule->id);
    }
}

static void ids_are_unique_and_texts_are_there(void) {
    for (size_t i = 0; i < epo_rules_count(); i++) {
        const epo_rule *rule = epo_rules_at(i);
        CU_ASSERT_PTR_EQUAL(epo_rules_find(rule->id), rule);
        CU_ASSERT(rule->needed[0] != '\0' && rule->remedy[0] != '\0' && rule->source[0] != '\0');
    }
    CU_ASSERT_PTR_NULL(epo_rules_find("OVL-999"));
    CU_ASSERT_PTR_NULL(epo_rules_at(epo_rules_count()));
    CU_ASSERT_STRING_EQUAL(epo_rules_find("ovl-001")->id, "OVL-001");
}

static void derived_rules_warn_at_most(void) {
    for (size_t i = 0; i < CASES; i++) {
        epo_rule_verdict verdict = judge(cases[i].id, cases[i].violating);
        if (verdict.rule->kind == EPO_RULE_DERIVED)
            CU_ASSERT(verdict.severity != EPO_SEVERITY_ERROR);
    }
    CU_ASSERT_EQUAL(judge("OVL-028", cases[27].violating).severity, EPO_SEVERITY_WARN);
    CU_ASSERT_EQUAL(judge("OVL-001", cases[0].violating).severity, EPO_SEVERITY_ERROR);
}

static void severity_follows_the_request(void) {
    static const char explicit_flex[] = "flex_backend=hybridep gpu_major=7";
    static const char wish[] = "flex_backend=hybridep gpu_major=7 dispatcher_request=auto";
    CU_ASSERT_EQUAL(judge("DSP-003", explicit_flex).severity, EPO_SEVERITY_ERROR);
    CU_ASSERT_EQUAL(judge("DSP-003", wish).severity, EPO_SEVERITY_AUTOFIX);
}

static void undecided_names_only_what_matters(void) {
    epo_rule_verdict verdict =
        judge("DWG-003", "delay_wgrad_compute=true overlap_grad_reduce=true");
    CU_ASSERT_EQUAL(verdict.outcome, EPO_RULE_UNDECIDED);
    CU_ASSERT_STRING_EQUAL(verdict.missing, "te_version");
    verdict = judge("OVL-002", "overlap_moe_expert_parallel_comm=true");
    CU_ASSERT_STRING_EQUAL(verdict.missing, "num_moe_experts");
    verdict = judge("DWG-003", "delay_wgrad_compute=false");
    CU_ASSERT_EQUAL(verdict.outcome, EPO_RULE_PASSED);
    CU_ASSERT_STRING_EQUAL(verdict.missing, "");
}

static void a_value_that_cannot_be_read_is_undecided(void) {
    CU_ASSERT_EQUAL(
        judge("OVL-005", "overlap_moe_expert_parallel_comm=true torch_version=new").outcome,
        EPO_RULE_UNDECIDED);
    CU_ASSERT_EQUAL(judge("OVL-001", "overlap_moe_expert_parallel_comm=true "
                                     "expert_model_parallel_size=many")
                        .outcome,
                    EPO_RULE_UNDECIDED);
}

/* The language itself, by its own truth: what is known, what is unset, what nobody told. */
static void conditions_mean_what_they_say(void) {
    enum { F = EPO_FALSE, T = EPO_TRUE, U = EPO_UNKNOWN };
    static const struct {
        const char *text;
        int truth;
    } is[] = {
        /* one operand */
        {"yes", T},
        {"no", F},
        {"eight", T},
        {"zero", F},
        {"word", T},
        {"unset", F},
        {"x", U},
        {"!yes", F},
        {"!unset", T},
        {"!x", U},
        {"!!yes", T},
        {"true", T},
        {"false", F},
        /* Kleene's logic, && before || */
        {"yes && yes", T},
        {"yes && no", F},
        {"no && x", F},
        {"x && no", F},
        {"yes && x", U},
        {"no || yes", T},
        {"x || yes", T},
        {"no || no", F},
        {"no || x", U},
        {"x || no", U},
        {"yes || no && no", T},
        {"(yes || no) && no", F},
        {"!(yes && no)", T},
        {"x || yes && x", U},
        /* numbers */
        {"eight == 8", T},
        {"eight != 8", F},
        {"eight == 8.0", T},
        {"eight < 8", F},
        {"eight <= 8", T},
        {"eight > 8", F},
        {"eight >= 8", T},
        {"eight < 9", T},
        {"eight > 7", T},
        {"eight <= 7", F},
        {"eight >= 9", F},
        {"x < 8", U},
        {"8 == x", U},
        {"word < 8", U},
        {"eight * 2 == 16", T},
        {"eight % 3 == 2", T},
        {"eight % 8 == 0", T},
        {"eight % zero == 0", U},
        {"eight * x == 8", U},
        {"min(eight, 3) == 3", T},
        {"min(eight, 9) == 8", T},
        {"min(eight, x) == 8", U},
        {"env.N == 8", T},
        {"env.N > 7", T},
        /* what is unset equals nothing but itself, and has no place in an order */
        {"unset == 8", F},
        {"unset != 8", T},
        {"unset == unset", T},
        {"unset != unset", F},
        {"unset < 8", F},
        {"unset >= 8", F},
        {"8 > unset", F},
        {"unset * 2 == 16", F},
        {"unset % 2 != 0", T},
        {"unset == x", U},
        /* text and switches */
        {"word == 'flex'", T},
        {"word != 'flex'", F},
        {"word == 'fle'", F},
        {"word == 'flexx'", F},
        {"yes == true", T},
        {"yes == false", F},
        {"yes != no", T},
        {"word starts 'fl'", T},
        {"word starts 'flex'", T},
        {"word starts 'flexx'", F},
        {"word starts 'x'", F},
        {"x starts 'x'", U},
        /* sets and lists */
        {"word in {alltoall, flex}", T},
        {"word in {alltoall, fle}", F},
        {"word not in {alltoall, flex}", F},
        {"word not in {a}", T},
        {"eight in {1, 8.0}", T},
        {"eight in {1, 2}", F},
        {"unset in {null, 1}", T},
        {"unset in {0, 1}", F},
        {"word in {null}", F},
        {"x in {1}", U},
        {"x not in {1}", U},
        {"list has b", T},
        {"list has c", F},
        {"list has 'b'", T},
        {"unset has b", F},
        {"x has b", U},
        /* being there */
        {"unset is null", T},
        {"eight is null", F},
        {"unset is not null", F},
        {"eight is not null", T},
        {"eight is set", T},
        {"unset is set", F},
        {"empty is empty", T},
        {"unset is empty", T},
        {"list is empty", F},
        {"list is not empty", T},
        {"x is null", U},
        {"x is not empty", U},
        /* versions are no numbers */
        {"te_version < 2.10", T},
        {"te_version < 2.9.0", F},
        {"te_version == 2.9", T},
        {"te_version >= 2.9.0", T},
        {"te_version != 2.9.1", T},
        {"2.10 > te_version", T},
        {"odd_version < 1", U},
        {"odd_version == 1", U},
    };
    static const char *const wrong[] = {
        "",         "yes &&",           "(yes",         "yes)",       "yes yes",
        "== 8",     "eight <",          "word in {",    "word in {}", "word is x",
        "min(1 2)", "word starts flex", "list has 8 8", "yes & no"};
    epo_facts *facts =
        facts_of("yes=true no=false eight=8 zero=0 word=flex unset=null list=[a,b] empty=[] "
                 "te_version=2.9.0 odd_version=new env.N=8");
    epo_condition_result r;
    for (size_t i = 0; i < sizeof is / sizeof *is; i++) {
        CU_ASSERT_EQUAL(epo_condition_evaluate(is[i].text, facts, &r), EPO_OK);
        if ((int)r.truth != is[i].truth)
            fprintf(stderr, "%s: is %d, wanted %d\n", is[i].text, (int)r.truth, is[i].truth);
        CU_ASSERT_EQUAL((int)r.truth, is[i].truth);
        CU_ASSERT_EQUAL(strstr(r.missing, "x") != NULL, is[i].truth == U &&
                                                            strchr(is[i].text, 'x') != NULL &&
                                                            strstr(is[i].text, "word") == NULL);
    }
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CU_ASSERT_EQUAL(epo_condition_evaluate(wrong[i], facts, &r), EPO_E_ARG);
    CU_ASSERT_EQUAL(epo_condition_evaluate("yes && eight < ,", facts, &r), EPO_E_ARG);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "at byte 16 of"));
    epo_facts_destroy(facts);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"each rule is violated, and passes", each_rule_is_violated_and_passes},
        {"each rule has one case", each_rule_has_its_case},
        {"nothing known: undecided", nothing_known_is_undecided},
        {"conditions read known names", conditions_read_known_names},
        {"ids are unique, texts are there", ids_are_unique_and_texts_are_there},
        {"derived rules warn at most", derived_rules_warn_at_most},
        {"severity follows the request", severity_follows_the_request},
        {"undecided names only what matters", undecided_names_only_what_matters},
        {"an unreadable value: undecided", a_value_that_cannot_be_read_is_undecided},
        {"conditions mean what they say", conditions_mean_what_they_say},
        CU_TEST_INFO_NULL,
    };
    return unit_run("rules", tests);
}
