/* SPDX-License-Identifier: Apache-2.0
 *
 * recorded.h - what recordings of the same work, made several times, tell: the time of
 * each kind of computation, what it takes at its best, how much of the communication
 * ran beside it.
 */
#ifndef EPO_MEASURE_RECORDED_H
#define EPO_MEASURE_RECORDED_H

#include "core/status.h"
#include "trace/intervals.h"

#define MEASURE_PASSES 8
#define MEASURE_NAMES 32

typedef struct measure_recorded {
    int passes;
    double ffn_ms[MEASURE_PASSES]; /* union of the experts' work */
    char name[MEASURE_NAMES][sizeof((epo_interval *)0)->name];
    double best_ms[MEASURE_NAMES], now_ms[MEASURE_NAMES]; /* by kind of work, summed */
    int names;
    epo_overlap_times unions; /* of the last pass */
    uint64_t dropped;         /* intervals that did not fit, of all passes */
    int chunks;
} measure_recorded;

/* Adds one pass; zero-initialise before the first. */
epo_status measure_recorded_add(measure_recorded *r, const epo_interval *interval, uint64_t count,
                                uint64_t dropped);
/* The sum of every kind's best. */
double measure_recorded_best(const measure_recorded *r);

#endif
