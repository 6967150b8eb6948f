/* SPDX-License-Identifier: Apache-2.0
 *
 * tune.h - what tune.c knows of a buffer's sizes.
 */
#ifndef EPO_MOE_TUNE_H
#define EPO_MOE_TUNE_H

#include <stdbool.h>

#include "backend/backend.h"

enum { MOE_TUNE_CLASSES = 32, MOE_TUNE_CHOICES = 4 };
typedef enum moe_tune_stage { MOE_TUNE_NUMBER, MOE_TUNE_WAY, MOE_TUNE_DONE } moe_tune_stage;
typedef struct moe_tune_class {
    moe_tune_stage stage;         /* what is being measured */
    int trials;                   /* plans made to measure it */
    int chosen;                   /* chunks; 0: not yet */
    epo_way way;                  /* when all is done */
    float best[MOE_TUNE_CHOICES]; /* seconds of this rank's fastest pass; 0: none */
} moe_tune_class;
typedef struct moe_tune {
    bool free;   /* the number of chunks is chosen */
    bool ways;   /* the way of rows is */
    int due;     /* the class whose times the next plan tells; -1: none */
    int running; /* the class of the pass between the marks; -1: none */
    int choice;
    moe_tune_stage stage; /* of the pass between the marks */
    bool stopped;
    epo_event *mark[2];
    moe_tune_class of[MOE_TUNE_CLASSES]; /* by log2 of tokens */
} moe_tune;

#endif
