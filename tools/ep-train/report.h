/* SPDX-License-Identifier: Apache-2.0
 *
 * report.h - what a run says about itself, for people and for programs.
 */
#ifndef EP_TRAIN_REPORT_H
#define EP_TRAIN_REPORT_H

#include <stdio.h>

#include "measure.h"
#include "train.h"

/* How long the bar of a figure's name is known before the numbers are. */
typedef struct report {
    const train *t;
    const measured *m;  /* NULL: not measured */
    spread step_ms;     /* count 0 with --bench */
    epo_stats training; /* sums over the training, this rank */
    double rss_mb;      /* peak of the process */
    double gpu_used_mb; /* of this rank's GPU, by whomever; 0 without */
} report;

/* Before the first step: what was decided and why. */
void report_opening(const train *t, FILE *out);
/* The closing table. */
void report_closing(const report *r, FILE *out);
/* The same as one JSON object in `path`. */
epo_status report_json(const report *r, const char *path);

#endif
