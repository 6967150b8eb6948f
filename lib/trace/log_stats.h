/* SPDX-License-Identifier: Apache-2.0
 *
 * log_stats.h - what a window of iterations tells, and two logs against each other.
 */
#ifndef EPO_TRACE_LOG_STATS_H
#define EPO_TRACE_LOG_STATS_H

#include "trace/log.h"

typedef struct epo_window {
    int64_t first, last; /* iterations, both included */
} epo_window;

/* Of the values that are there. */
typedef struct epo_summary {
    size_t count;
    double mean, median, least, most;
    double deviation; /* of the sample; 0 for a single value */
} epo_summary;

typedef struct epo_window_stats {
    epo_window window;
    epo_summary time_ms, tflops, tokens;
    size_t iterations;    /* lines inside the window */
    double skipped, nans; /* sums inside the window */
    size_t restarts;      /* behind which an iteration starts up: its time counts not */
    size_t lossless;      /* lines with a NaN loss, in a log that has losses */
    bool has_warmup;      /* an iteration of the first tenth, and much slower */
    bool has_save, has_evaluation, has_profiler;
} epo_window_stats;

/* Without the first tenth of the iterations, at least one of them. */
epo_window epo_log_steady_window(const epo_log *log);
/* EPO_E_ARG: the log has no iteration, or none with a time, inside the window. */
epo_status epo_log_stats(const epo_log *log, epo_window window, epo_window_stats *stats);

typedef struct epo_loss_comparison {
    size_t common;      /* iterations that both logs have with a loss */
    size_t identical;   /* of them, as printed: loss and gradient norm */
    size_t lost;        /* iterations where one of them has a NaN loss */
    double correlation; /* NAN: under two points, or a constant curve */
    double largest;     /* relative difference of one iteration */
    int64_t largest_at;
    double final_a, final_b; /* of the last common iteration */
} epo_loss_comparison;

/* Over all iterations that both logs have. */
void epo_log_compare_losses(const epo_log *a, const epo_log *b, epo_loss_comparison *out);

#endif
