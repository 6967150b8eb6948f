/* SPDX-License-Identifier: Apache-2.0
 *
 * train.h - one training run on one rank.
 */
#ifndef EP_TRAIN_TRAIN_H
#define EP_TRAIN_TRAIN_H

#include <stdio.h>

#include "data.h"
#include "model.h"
#include "moe_block.h"
#include "optim.h"
#include "options.h"
#include "measure/spread.h"

typedef struct train {
    const options *opt;
    moe_world *world;
    moe_block **block; /* [layers] */
    model *model;
    data_text text;
    optim *dense, **experts; /* [2 * layers]: w1, w2 of each layer */
    uint8_t *input, *target; /* of a micro-batch on this rank */
    int first, count;        /* this rank's sequences of each micro-batch */
    int cores;               /* that all ranks may use together; 0: not known */
    int step;
    double first_loss, last_loss;
    int skipped, nans;           /* steps without an update, without a loss */
    int line_skipped, line_nans; /* the same since the last iteration line */
    samples step_ms;             /* every step but the first tenth */
} train;

/* Who says why a run failed: every rank its own line, or one for all. */
typedef enum train_voice { VOICE_EACH, VOICE_FIRST_RANK, VOICE_ME, VOICE_OTHER } train_voice;

/* [collective]  Meets the ranks, reads the text, makes the model.  On failure
 * *voice tells who prints; on VOICE_EACH the ranks no longer agree and the run
 * must be abandoned instead of closed; out->world tells the rank, or is NULL. */
epo_status train_open(const options *opt, train *out, train_voice *voice);
/* [collective]  All steps; the last rank prints the iteration lines to `log`. */
epo_status train_run(train *t, FILE *log);
/* [collective]  One forward of the first micro-batch, so that routing and rows are
 * those of the text: for --bench. */
epo_status train_prime(train *t);
/* [collective]  Rank 0 writes the final weights: "EPOW1\n", the dense vector, then
 * each layer's experts in order, w1 and w2; fp32 of this machine's byte order. */
epo_status train_save(train *t, const char *path);
/* [collective]  A status that every rank has afterwards: the first failing rank
 * keeps its text and speaks. */
epo_status train_agree(moe_world *world, epo_status mine, train_voice *voice);
/* [collective] */
epo_status train_close(train *t);

#endif
