/* SPDX-License-Identifier: Apache-2.0
 *
 * symptoms.h - recognises known troubles in the lines of a log.
 */
#ifndef EPO_TRACE_SYMPTOMS_H
#define EPO_TRACE_SYMPTOMS_H

#include "ep_overlap.h"

#include <stddef.h>
#include <stdint.h>

typedef enum epo_symptom_severity { EPO_SYMPTOM_NOTE, EPO_SYMPTOM_PROBLEM } epo_symptom_severity;

typedef struct epo_symptom {
    const char *id;
    epo_symptom_severity severity;
    const char *rule; /* "": none */
    const char *title;
    const char *pattern[3]; /* "": none */
    const char *example;
    const char *cause, *confirm, *mend;
} epo_symptom;

size_t epo_symptoms_count(void);
const epo_symptom *epo_symptoms_at(size_t index);

typedef struct epo_symptom_seen {
    uint64_t count, line; /* the first line */
    char text[200];
} epo_symptom_seen;

typedef struct epo_symptom_scan epo_symptom_scan;

epo_status epo_symptom_scan_create(epo_symptom_scan **out);
void epo_symptom_scan_destroy(epo_symptom_scan *scan);
/* How many symptoms this line shows. */
size_t epo_symptom_scan_line(epo_symptom_scan *scan, const char *line, size_t length,
                             uint64_t number);
const epo_symptom_seen *epo_symptom_scan_seen(const epo_symptom_scan *scan, size_t symptom);
/* A refusal of a framework that the table does not know; count 0: none. */
const epo_symptom_seen *epo_symptom_scan_unknown(const epo_symptom_scan *scan);

#endif
