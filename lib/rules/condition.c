/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/condition.h"

#include "core/status.h"
#include "core/version.h"
#include "rules/condition_lex.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NESTING_MAX 32
#define WORD_MAX 256

typedef struct operand {
    epo_fact_kind kind;
    double number;
    const char *text;
    size_t length;
    bool is_version; /* or compares with one */
} operand;

typedef struct parser {
    const char *next;
    epo_token token;
    const epo_facts *facts;
    char *missing;
    size_t missing_length;
    epo_condition_visit *visit;
    void *visit_context;
    int nesting;
    bool failed;
    const char *failed_at;
} parser;

static epo_truth parse_or(parser *p);

static void advance(parser *p) { p->token = epo_token_take(p->next, &p->next); }

static bool accept(parser *p, const char *text) {
    if (!epo_token_is(&p->token, text))
        return false;
    advance(p);
    return true;
}

static void fail(parser *p) {
    if (!p->failed)
        p->failed_at = p->token.at;
    p->failed = true;
}

static void expect(parser *p, const char *text) {
    if (!accept(p, text))
        fail(p);
}

static epo_truth truth_of(bool b) { return b ? EPO_TRUE : EPO_FALSE; }

static void note_missing(parser *p, const char *name) {
    size_t length = strlen(name), room = EPO_MISSING_MAX - p->missing_length;
    for (const char *found = p->missing; (found = strstr(found, name)) != NULL; found += length)
        if ((found == p->missing || found[-1] == ' ') && strchr(",", found[length]) != NULL)
            return;
    const char *join = p->missing_length > 0 ? ", " : "";
    if (length + strlen(join) + 1 > room)
        return;
    p->missing_length += (size_t)snprintf(p->missing + p->missing_length, room, "%s%s", join, name);
}

/* What the rest decided does not hang on names read since `mark`. */
static epo_truth settle(parser *p, epo_truth truth, size_t mark) {
    if (truth != EPO_UNKNOWN) {
        p->missing_length = mark;
        p->missing[mark] = '\0';
    }
    return truth;
}

static bool ends_in(const char *text, size_t length, const char *tail) {
    size_t n = strlen(tail);
    return length > n && memcmp(text + length - n, tail, n) == 0;
}

static operand read_name(parser *p) {
    operand o = {.kind = EPO_FACT_UNKNOWN, .text = ""};
    char name[WORD_MAX];
    size_t length = p->token.length < WORD_MAX ? p->token.length : WORD_MAX - 1;
    memcpy(name, p->token.at, length);
    name[length] = '\0';
    o.is_version = ends_in(name, length, "_version");
    if (p->visit != NULL)
        p->visit(p->token.at, length, p->visit_context);
    advance(p);
    const epo_fact *fact = p->facts == NULL ? NULL : epo_facts_find(p->facts, name);
    if (fact == NULL || fact->kind == EPO_FACT_UNKNOWN) {
        note_missing(p, name);
        return o;
    }
    o.kind = fact->kind;
    o.number = fact->number;
    o.text = fact->text;
    o.length = strlen(fact->text);
    return o;
}

static operand parse_factor(parser *p) {
    operand o = {.kind = EPO_FACT_UNKNOWN, .text = p->token.at, .length = p->token.length};
    if (p->token.kind == EPO_TOKEN_NUMBER) {
        o.kind = EPO_FACT_NUMBER;
        o.number = strtod(p->token.at, NULL);
    } else if (p->token.kind == EPO_TOKEN_TEXT) {
        o.kind = EPO_FACT_TEXT;
    } else if (epo_token_is(&p->token, "true") || epo_token_is(&p->token, "false")) {
        o.kind = EPO_FACT_BOOL;
        o.number = epo_token_is(&p->token, "true");
    } else if (p->token.kind == EPO_TOKEN_NAME) {
        return read_name(p);
    } else {
        fail(p);
        return o;
    }
    advance(p);
    return o;
}

static operand number_operand(double number) {
    return (operand){.kind = isfinite(number) ? EPO_FACT_NUMBER : EPO_FACT_UNKNOWN,
                     .number = number,
                     .text = "",
                     .length = 0};
}

/* Environment variables are text: where a number is wanted, "8" is one. */
static bool as_number(operand *o) {
    char buffer[32];
    if (o->kind != EPO_FACT_TEXT || o->length == 0 || o->length >= sizeof buffer)
        return o->kind == EPO_FACT_NUMBER;
    memcpy(buffer, o->text, o->length);
    buffer[o->length] = '\0';
    char *end;
    double number = strtod(buffer, &end);
    if (*end != '\0' || !isfinite(number))
        return false;
    o->kind = EPO_FACT_NUMBER;
    o->number = number;
    return true;
}

static bool both_numbers(operand *a, operand *b) { return as_number(a) && as_number(b); }

static const operand unknown_operand = {.kind = EPO_FACT_UNKNOWN, .text = ""};

static operand parse_min(parser *p) {
    expect(p, "(");
    operand a = parse_factor(p);
    expect(p, ",");
    operand b = parse_factor(p);
    expect(p, ")");
    return both_numbers(&a, &b) ? number_operand(fmin(a.number, b.number)) : unknown_operand;
}

/* Exact for whole numbers below 2^53.  Not fmod(), which glibc 2.38 gave a new
 * version that older systems lack. */
static double rest(double a, double b) { return a - b * trunc(a / b); }

static operand parse_operand(parser *p) {
    if (accept(p, "min"))
        return parse_min(p);
    operand left = parse_factor(p);
    while (epo_token_is(&p->token, "*") || epo_token_is(&p->token, "%")) {
        bool times = accept(p, "*");
        if (!times)
            advance(p);
        operand right = parse_factor(p);
        if (left.kind == EPO_FACT_NULL || right.kind == EPO_FACT_NULL)
            left = (operand){.kind = EPO_FACT_NULL, .text = ""};
        else if (!both_numbers(&left, &right) || (!times && right.number == 0))
            left = unknown_operand;
        else
            left = number_operand(times ? left.number * right.number
                                        : rest(left.number, right.number));
    }
    return left;
}

static epo_truth operand_truth(const operand *o) {
    switch (o->kind) {
    case EPO_FACT_UNKNOWN: return EPO_UNKNOWN;
    case EPO_FACT_NULL: return EPO_FALSE;
    case EPO_FACT_BOOL:
    case EPO_FACT_NUMBER: return truth_of(o->number != 0);
    case EPO_FACT_TEXT:
    case EPO_FACT_LIST: return truth_of(o->length > 0);
    }
    return EPO_UNKNOWN;
}

static bool same_text(const operand *a, const char *text, size_t length) {
    return a->length == length && memcmp(a->text, text, length) == 0;
}

static bool copy_text(const operand *o, char *buffer) {
    if (o->length >= WORD_MAX)
        return false;
    memcpy(buffer, o->text, o->length);
    buffer[o->length] = '\0';
    return true;
}

/* -1, 0 or 1 in *order; false if the two cannot be put in order. */
static bool order_versions(const operand *a, const operand *b, int *order) {
    char left[WORD_MAX], right[WORD_MAX];
    epo_pep440 x, y;
    if (!copy_text(a, left) || !copy_text(b, right) || epo_pep440_parse(left, &x) != EPO_OK ||
        epo_pep440_parse(right, &y) != EPO_OK)
        return false;
    int difference = epo_pep440_compare(&x, &y);
    *order = (difference > 0) - (difference < 0);
    return true;
}

static bool order_operands(const operand *a, const operand *b, int *order) {
    if (a->is_version || b->is_version)
        return order_versions(a, b, order);
    operand left = *a, right = *b;
    if (!both_numbers(&left, &right))
        return false;
    *order = (left.number > right.number) - (left.number < right.number);
    return true;
}

static epo_truth equal(const operand *a, const operand *b) {
    int order;
    if (a->is_version || b->is_version)
        return order_versions(a, b, &order) ? truth_of(order == 0) : EPO_UNKNOWN;
    operand left = *a, right = *b;
    if ((a->kind == EPO_FACT_NUMBER || b->kind == EPO_FACT_NUMBER) && both_numbers(&left, &right))
        return truth_of(left.number == right.number);
    if (a->kind == EPO_FACT_BOOL && b->kind == EPO_FACT_BOOL)
        return truth_of(a->number == b->number);
    return truth_of(same_text(a, b->text, b->length));
}

static epo_truth compare(const operand *a, const epo_token *op, const operand *b) {
    bool is_equal = epo_token_is(op, "=="), is_unequal = epo_token_is(op, "!=");
    if (a->kind == EPO_FACT_UNKNOWN || b->kind == EPO_FACT_UNKNOWN)
        return EPO_UNKNOWN;
    if (a->kind == EPO_FACT_NULL || b->kind == EPO_FACT_NULL)
        return truth_of(is_unequal != (a->kind == b->kind && (is_equal || is_unequal)));
    if (is_equal || is_unequal) {
        epo_truth same = equal(a, b);
        return same == EPO_UNKNOWN ? same : truth_of((same == EPO_TRUE) == is_equal);
    }
    int order;
    if (!order_operands(a, b, &order))
        return EPO_UNKNOWN;
    if (op->at[0] == '<')
        return truth_of(order < 0 || (op->length == 2 && order == 0));
    return truth_of(order > 0 || (op->length == 2 && order == 0));
}

/* {a, b, null} behind `in`. */
static epo_truth parse_set(parser *p, const operand *value) {
    bool found = false;
    expect(p, "{");
    do {
        bool is_null = epo_token_is(&p->token, "null");
        if (p->token.kind != EPO_TOKEN_NAME && p->token.kind != EPO_TOKEN_NUMBER &&
            p->token.kind != EPO_TOKEN_TEXT)
            fail(p);
        else if (value->kind == EPO_FACT_NULL)
            found = found || is_null;
        else if (value->kind == EPO_FACT_NUMBER && p->token.kind == EPO_TOKEN_NUMBER)
            found = found || strtod(p->token.at, NULL) == value->number;
        else
            found = found || same_text(value, p->token.at, p->token.length);
        advance(p);
    } while (!p->failed && accept(p, ","));
    expect(p, "}");
    return value->kind == EPO_FACT_UNKNOWN ? EPO_UNKNOWN : truth_of(found);
}

static epo_truth parse_is(parser *p, const operand *value) {
    bool negate = accept(p, "not"), holds = false;
    if (accept(p, "null"))
        holds = value->kind == EPO_FACT_NULL;
    else if (accept(p, "set"))
        holds = value->kind != EPO_FACT_NULL;
    else if (accept(p, "empty"))
        holds = value->kind == EPO_FACT_NULL || value->length == 0;
    else
        fail(p);
    return value->kind == EPO_FACT_UNKNOWN ? EPO_UNKNOWN : truth_of(holds != negate);
}

static epo_truth parse_has(parser *p, const operand *value) {
    epo_token word = p->token;
    if (word.kind != EPO_TOKEN_NAME && word.kind != EPO_TOKEN_TEXT)
        fail(p);
    advance(p);
    if (value->kind == EPO_FACT_UNKNOWN)
        return EPO_UNKNOWN;
    char *copy = strndup(value->text, value->length);
    epo_fact fact = {.text = copy};
    bool found = value->kind != EPO_FACT_NULL && copy != NULL &&
                 epo_fact_has_word(&fact, word.at, word.length);
    free(copy);
    return truth_of(found);
}

static epo_truth parse_starts(parser *p, const operand *value) {
    epo_token head = p->token;
    if (head.kind != EPO_TOKEN_TEXT)
        fail(p);
    advance(p);
    if (value->kind == EPO_FACT_UNKNOWN)
        return EPO_UNKNOWN;
    return truth_of(value->length >= head.length && memcmp(value->text, head.at, head.length) == 0);
}

static bool is_comparison(const epo_token *token) {
    return token->kind == EPO_TOKEN_MARK &&
           (token->at[0] == '<' || token->at[0] == '>' || epo_token_is(token, "==") ||
            epo_token_is(token, "!="));
}

static epo_truth parse_test(parser *p) {
    operand value = parse_operand(p);
    if (is_comparison(&p->token)) {
        epo_token op = p->token;
        advance(p);
        operand right = parse_operand(p);
        return compare(&value, &op, &right);
    }
    if (accept(p, "is"))
        return parse_is(p, &value);
    if (accept(p, "has"))
        return parse_has(p, &value);
    if (accept(p, "starts"))
        return parse_starts(p, &value);
    if (accept(p, "in"))
        return parse_set(p, &value);
    if (accept(p, "not")) {
        expect(p, "in");
        epo_truth found = parse_set(p, &value);
        return found == EPO_UNKNOWN ? found : truth_of(found == EPO_FALSE);
    }
    return operand_truth(&value);
}

static epo_truth parse_not(parser *p) {
    if (accept(p, "!")) {
        epo_truth inner = parse_not(p);
        return inner == EPO_UNKNOWN ? inner : truth_of(inner == EPO_FALSE);
    }
    if (!accept(p, "("))
        return parse_test(p);
    epo_truth inner = EPO_UNKNOWN;
    if (++p->nesting > NESTING_MAX)
        fail(p);
    else
        inner = parse_or(p);
    p->nesting--;
    expect(p, ")");
    return inner;
}

static epo_truth parse_and(parser *p) {
    size_t mark = p->missing_length;
    epo_truth truth = parse_not(p);
    while (!p->failed && accept(p, "&&")) {
        epo_truth right = parse_not(p);
        if (truth == EPO_FALSE || right == EPO_FALSE)
            truth = EPO_FALSE;
        else if (truth == EPO_UNKNOWN || right == EPO_UNKNOWN)
            truth = EPO_UNKNOWN;
    }
    return settle(p, truth, mark);
}

static epo_truth parse_or(parser *p) {
    size_t mark = p->missing_length;
    epo_truth truth = parse_and(p);
    while (!p->failed && accept(p, "||")) {
        epo_truth right = parse_and(p);
        if (truth == EPO_TRUE || right == EPO_TRUE)
            truth = EPO_TRUE;
        else if (truth == EPO_UNKNOWN || right == EPO_UNKNOWN)
            truth = EPO_UNKNOWN;
    }
    return settle(p, truth, mark);
}

epo_status epo_condition_evaluate(const char *condition, const epo_facts *facts,
                                  epo_condition_result *result) {
    epo_condition_result made = {.truth = EPO_UNKNOWN};
    parser p = {.next = condition, .facts = facts, .missing = made.missing};
    advance(&p);
    made.truth = parse_or(&p);
    if (!p.failed && p.token.kind != EPO_TOKEN_END)
        fail(&p);
    if (p.failed)
        return epo_fail(EPO_E_ARG, "rule: mistake at byte %zu of \"%s\"",
                        (size_t)(p.failed_at - condition) + 1, condition);
    *result = made;
    return EPO_OK;
}

void epo_condition_names(const char *condition, epo_condition_visit *visit, void *context) {
    char missing[EPO_MISSING_MAX] = "";
    parser p = {.next = condition, .missing = missing, .visit = visit, .visit_context = context};
    advance(&p);
    parse_or(&p);
}
