/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/symptoms.h"

#include "core/status.h"
#include "trace/matcher.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EPO_SYMPTOM(id, severity, rule, title, p1, p2, p3, example, cause, confirm, mend)          \
    {id, EPO_SYMPTOM_##severity, rule, title, {p1, p2, p3}, example, cause, confirm, mend},
static const epo_symptom symptoms[] = {
#include "trace/symptoms.def"
};
#define COUNT (sizeof symptoms / sizeof *symptoms)

/* Beside the table's patterns: how a framework begins a refusal. */
static const char *const refusals[] = {"AssertionError: ", "ValueError: ", "RuntimeError: "};
#define REFUSALS (sizeof refusals / sizeof *refusals)

struct epo_symptom_scan {
    epo_matcher *matcher;
    char *head[COUNT * 3]; /* a pattern up to its first star */
    epo_symptom_seen seen[COUNT], unknown;
    /* the line being read */
    const char *line;
    uint64_t number;
    size_t found;
    bool refused, shown[COUNT];
};

size_t epo_symptoms_count(void) { return COUNT; }
const epo_symptom *epo_symptoms_at(size_t index) { return index < COUNT ? &symptoms[index] : NULL; }

void epo_symptom_scan_destroy(epo_symptom_scan *scan) {
    if (scan == NULL)
        return;
    for (size_t i = 0; i < COUNT * 3; i++)
        free(scan->head[i]);
    epo_matcher_destroy(scan->matcher);
    free(scan);
}

epo_status epo_symptom_scan_create(epo_symptom_scan **out) {
    const char *word[COUNT * 3 + REFUSALS];
    epo_symptom_scan *scan = calloc(1, sizeof *scan);
    epo_status status = scan == NULL ? epo_fail(EPO_E_NOMEM, "symptoms: no memory") : EPO_OK;
    for (size_t i = 0; i < COUNT * 3 && status == EPO_OK; i++) {
        const char *pattern = symptoms[i / 3].pattern[i % 3];
        word[i] = scan->head[i] = strndup(pattern, strcspn(pattern, "*"));
        if (word[i] == NULL)
            status = epo_fail(EPO_E_NOMEM, "symptoms: no memory");
    }
    for (size_t i = 0; i < REFUSALS; i++)
        word[COUNT * 3 + i] = refusals[i];
    if (status == EPO_OK)
        status = epo_matcher_create(word, COUNT * 3 + REFUSALS, &scan->matcher);
    if (status != EPO_OK) {
        epo_symptom_scan_destroy(scan);
        return status;
    }
    *out = scan;
    return EPO_OK;
}

/* The parts of `pattern` behind its first star follow one another in `text`. */
static bool rest_matches(const char *pattern, const char *text) {
    const char *star = strchr(pattern, '*');
    while (star != NULL) {
        char part[128];
        const char *from = star + 1;
        size_t length = strcspn(from, "*");
        if (length >= sizeof part)
            return false;
        memcpy(part, from, length);
        part[length] = '\0';
        text = strstr(text, part);
        if (text == NULL)
            return false;
        text += length;
        star = from[length] == '*' ? from + length : NULL;
    }
    return true;
}

static void note(epo_symptom_seen *seen, const char *line, uint64_t number) {
    if (seen->count++ > 0)
        return;
    while (*line == ' ' || *line == '\t')
        line++;
    seen->line = number;
    snprintf(seen->text, sizeof seen->text, "%.190s", line);
}

static void on_found(void *context, size_t word, size_t end) {
    epo_symptom_scan *scan = context;
    if (word >= COUNT * 3) {
        scan->refused = true;
        return;
    }
    size_t symptom = word / 3;
    if (scan->shown[symptom] ||
        !rest_matches(symptoms[symptom].pattern[word % 3], scan->line + end))
        return;
    scan->shown[symptom] = true;
    scan->found++;
    note(&scan->seen[symptom], scan->line, scan->number);
}

size_t epo_symptom_scan_line(epo_symptom_scan *scan, const char *line, size_t length,
                             uint64_t number) {
    scan->line = line;
    scan->number = number;
    if (scan->found > 0 || scan->refused)
        memset(scan->shown, 0, sizeof scan->shown);
    scan->found = 0;
    scan->refused = false;
    epo_matcher_scan(scan->matcher, line, length, on_found, scan);
    if (scan->refused && scan->found == 0)
        note(&scan->unknown, line, number);
    return scan->found;
}

const epo_symptom_seen *epo_symptom_scan_seen(const epo_symptom_scan *scan, size_t symptom) {
    return &scan->seen[symptom];
}

const epo_symptom_seen *epo_symptom_scan_unknown(const epo_symptom_scan *scan) {
    return &scan->unknown;
}
