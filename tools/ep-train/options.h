/* SPDX-License-Identifier: Apache-2.0
 *
 * options.h - the command line.
 */
#ifndef EP_TRAIN_OPTIONS_H
#define EP_TRAIN_OPTIONS_H

#include <stdint.h>
#include <stdio.h>

#include "ep_overlap.h"

typedef struct options {
    int steps, micro_batches, batch, seq;
    int layers, hidden, ffn, experts, top_k;
    int optimizer; /* optim_kind */
    int dtype;     /* epo_dtype */
    double lr;
    uint64_t seed;
    int engine;                                   /* epo_engine_kind */
    int overlap, dispatcher, delay_wgrad, chunks; /* -1, -1, -1, 0: the job's */
    int log_interval;
    int measure; /* A/B after the training */
    int bench;   /* pairs of the A/B alone; 0: train */
    int launch;  /* start this many ranks here; 0: the job's ranks */
    const char *file, *json, *save_weights;
} options;

typedef enum options_result { OPTIONS_RUN, OPTIONS_DONE, OPTIONS_WRONG } options_result;

/* Reads argv.  DONE: --help or --version was asked for and is printed to `out`.
 * WRONG: the reason is epo_fail_text(). */
options_result options_read(int argc, char **argv, options *out, FILE *print);

#endif
