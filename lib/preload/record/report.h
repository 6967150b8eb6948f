/* SPDX-License-Identifier: Apache-2.0
 *
 * report.h - what a window tells: unions of intervals, by lib/trace's measure, so that
 * ep-overlap profile finds the same in the file.
 */
#ifndef EPO_RECORD_REPORT_H
#define EPO_RECORD_REPORT_H

#include "preload/record/events.h"
#include "preload/record/hold.h"

#define REPORT_DEVICES 64
#define REPORT_LINE 1024
#define REPORT_EXCHANGE "exchange by copy engines"

typedef struct report_device {
    int64_t device;
    uint64_t kernels, copies;
    epo_profile_times times;
} report_device;

typedef struct report {
    int rank, ranks;
    char why[CUPTI_TEXT]; /* nothing was recorded: the reason */
    char by[CUPTI_TEXT];  /* a profiler ended the window: by which call */
    char cupti[CUPTI_TEXT];
    uint32_t cupti_version;
    size_t most;          /* steps to measure; 0: all that fit */
    size_t steps;         /* whole ones that were measured; 0: the loop's rhythm is not known */
    int64_t step;         /* ns of one, by the program's own calls */
    size_t calls;         /* NCCL's, of one step */
    int64_t from, to;     /* what was measured */
    uint64_t interrupted; /* windows that a profiler cut too short to be of use */
    uint64_t dropped, refused;
    events_lost lost;
    bool full; /* memory ended the window */
    int devices;
    report_device device[REPORT_DEVICES];
} report;

/* The part of [first, last) that is whole steps of `step` ns, the last ones, without the
 * first of all (what was launched before the window opened is not in it) and at most `most`
 * (0: any number); one step or none fits: as much as there is.  *steps: how many. */
void report_cut(int64_t first, int64_t last, int64_t step, size_t most, int64_t *from, int64_t *to,
                size_t *steps);
/* Fills from, to, steps and the devices. */
epo_status report_measure(report *r, const events *e, int64_t opened, int64_t closed);
/* Without a line's end. */
void report_line(const report *r, char line[REPORT_LINE]);
/* A Chrome trace with the report beside it, at `path`. */
epo_status report_write(const report *r, const events *e, const char *path);

#endif
