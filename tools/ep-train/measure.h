/* SPDX-License-Identifier: Apache-2.0
 *
 * measure.h - what overlap brought: serial and overlapped passes of the expert
 * layers, interleaved, on this run's shapes, weights and routing.
 *
 *   T_serial, T_on  one step's forward and backward of all expert layers
 *   FFN_alone       the experts' work of T_serial without its communication
 *   FFN*            the same at the best rate seen for each kind of GEMM
 *   D*, C*          least bytes of dispatch and combine (one row per token and
 *                   destination rank) at the link's or the memory copy's rate
 *   T_floor         max(FFN*, D* + C*); FFN* times ranks / cores where ranks share cores
 */
#ifndef EP_TRAIN_MEASURE_H
#define EP_TRAIN_MEASURE_H

#include <stdbool.h>

#include "ep_overlap.h"
#include "measure/spread.h"
#include "train.h"
#include "trace/intervals.h"

typedef struct measured {
    int pairs;
    bool have_on;      /* false: overlap is off, only the serial side exists */
    spread serial, on; /* ms; each sample is its slowest rank */
    spread speedup;    /* of each pair */
    double ffn_alone_ms, ffn_best_ms, ffn_gflops;
    double dispatch_least_ms, combine_least_ms, rate_gbs;
    const char *rate_of; /* "emulated link" or "memory copy" */
    double share;        /* ranks for each core, at least 1 */
    double floor_ms, exposed_ms, efficiency;
    epo_overlap_times unions; /* this rank, of one overlapped (else serial) pass */
    uint64_t dropped;         /* intervals that did not fit */
    int chunks;               /* that the pass was made of */
    epo_stats pass;           /* of that pass, on this rank */
} measured;

/* [collective] */
epo_status measure_run(train *t, int pairs, measured *out);

#endif
