/* SPDX-License-Identifier: Apache-2.0
 *
 * doctor.h - what is wrong with a run, from everything that tells about it.
 */
#ifndef EPO_TOOLS_DOCTOR_H
#define EPO_TOOLS_DOCTOR_H

#include "core/facts.h"
#include "trace/log_stats.h"
#include "trace/profile.h"
#include "trace/symptoms.h"

#define DOCTOR_FINDINGS_MAX 256
#define DOCTOR_FILES_MAX 32

typedef struct doctor_finding {
    char id[24];
    epo_symptom_severity severity;
    char title[128];
    char where[288]; /* file:line */
    char seen[400];
    uint64_t count;
    char cause[300], confirm[300], mend[300];
    char rule[16];
} doctor_finding;

typedef struct doctor_file {
    const char *path;
    bool is_profile, has_configuration;
    uint64_t lines;
    epo_log *log; /* of a text */
    epo_facts *facts;
    epo_profile *profile;
} doctor_file;

typedef struct doctor {
    doctor_file file[DOCTOR_FILES_MAX];
    size_t files;
    doctor_finding *finding; /* DOCTOR_FINDINGS_MAX of them */
    size_t findings;
} doctor;

/* NULL when the list is full. */
doctor_finding *doctor_add(doctor *d, const char *id, epo_symptom_severity severity);

epo_status doctor_read(doctor *d, const char *path);
/* What only several things together tell: rules, hangs, no speed-up, fallbacks. */
epo_status doctor_conclude(doctor *d);

#endif
