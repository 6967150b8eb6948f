/* SPDX-License-Identifier: Apache-2.0
 *
 * report.h - the arms of an A/B, their figures and the verdict on each.
 */
#ifndef EPO_TOOLS_REPORT_H
#define EPO_TOOLS_REPORT_H

#include "core/facts.h"
#include "rules/rules.h"
#include "trace/log_stats.h"

#define REPORT_ARMS_MAX 16
#define REPORT_DIFFERENCES_MAX 64

typedef enum report_answer { REPORT_YES, REPORT_NO, REPORT_UNDECIDED } report_answer;

typedef enum report_criterion {
    REPORT_VALID,    /* configuration: no rule is violated */
    REPORT_COMPLETE, /* the run reached its end */
    REPORT_FASTER,   /* throughput is not lower than the baseline's */
    REPORT_LOSS,     /* the training stayed the same */
    REPORT_MEMORY,   /* peak memory under the gate */
    REPORT_SOUND,    /* the comparison itself: window, skipped iterations, profiler */
    REPORT_CRITERIA
} report_criterion;

typedef struct report_finding {
    report_answer answer;
    char why[512];
} report_finding;

typedef struct report_arm {
    char name[64];
    bool is_named; /* by NAME=LOG */
    const char *path;
    epo_log *log;
    epo_facts *printed; /* settings as printed, by their own names */
    epo_facts *facts;   /* the same under the rules' names */
    bool has_window;    /* its own */
    epo_window_stats stats;
    /* against the baseline */
    double speedup;                        /* its mean time over this one's */
    double time_change, throughput_change; /* shares: -0.15 is 15 % less; NAN: not told */
    double noise;                          /* twice the standard error of time_change */
    epo_loss_comparison loss;
    report_finding finding[REPORT_CRITERIA];
    report_answer verdict;
    epo_rule_verdict violated[16]; /* rules about A/B runs */
    size_t violations;
} report_arm;

typedef struct report_difference {
    const char *arm;
    char name[96];
    char value[2][96]; /* baseline, other */
    bool permitted;    /* an overlap setting, or --allow */
} report_difference;

typedef struct report_options {
    bool json, strict, identical, has_window;
    epo_window window;
    double gate; /* bytes; NAN: none */
    const char *allow[32];
    size_t allowed;
    const char *set[64];
    size_t sets;
} report_options;

typedef struct report {
    report_options options;
    report_arm arm[REPORT_ARMS_MAX];
    size_t arms;
    report_difference difference[REPORT_DIFFERENCES_MAX];
    size_t differences; /* of any arm against the baseline; the first ones are kept */
    size_t forbidden;   /* of them */
    char differing[48]; /* the first arm with a forbidden one */
} report;

/* Reads "[NAME=]FILE[@A-B]". */
epo_status report_arm_load(report_arm *arm, const char *text, const report_options *options);
void report_arm_free(report_arm *arm);

/* Logs of one name in several folders are called by their paths; NULL, or a name that was given
 * twice. */
const char *report_arms_tell_apart(report *r);
/* Fills differences from the settings that both logs print. */
void report_compare_settings(report *r);
/* Figures against the baseline, findings, verdicts. */
epo_status report_judge(report *r);

void report_print_text(const report *r);
void report_print_json(const report *r);
void report_print_refusal(const report *r);

const char *report_criterion_name(report_criterion criterion);
const char *report_answer_name(report_answer answer);

#endif
