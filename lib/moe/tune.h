/* SPDX-License-Identifier: Apache-2.0
 *
 * tune.h - what tune.c knows of a buffer's sizes.
 */
#ifndef EPO_MOE_TUNE_H
#define EPO_MOE_TUNE_H

#include <stdbool.h>

#include "backend/backend.h"

enum { MOE_TUNE_CLASSES = 32, MOE_TUNE_CHOICES = 4, MOE_TUNE_SAMPLES = 24 };
typedef enum moe_tune_stage {
    MOE_TUNE_NUMBER,
    MOE_TUNE_WAY,
    MOE_TUNE_HOME,
    MOE_TUNE_TAIL,
    MOE_TUNE_DONE
} moe_tune_stage;
typedef enum moe_tune_pass { MOE_TUNE_FORWARD, MOE_TUNE_BACKWARD, MOE_TUNE_PASSES } moe_tune_pass;
typedef struct moe_tune_samples {
    float seconds[MOE_TUNE_SAMPLES]; /* of this rank's passes, in order of length */
    int count;
} moe_tune_samples;
typedef struct moe_tune_class {
    moe_tune_stage stage; /* what is being measured */
    int round;            /* each longer than the one before, among fewer answers */
    int trials;           /* plans made in this round */
    unsigned out;         /* a bit for each answer that lost in a round before */
    int chosen;           /* chunks; 0: not yet */
    epo_way way;          /* when all is done */
    bool home;            /* as epo_plan.singly and plain, then */
    bool plain;
    moe_tune_samples took[MOE_TUNE_PASSES][MOE_TUNE_CHOICES];
} moe_tune_class;
/* The last pass of its direction that was timed. */
typedef struct moe_tune_timer {
    int running; /* the class of the pass between the marks; -1: none */
    int choice;
    moe_tune_stage stage; /* of the pass between the marks */
    bool stopped;
    epo_event *mark[2];
} moe_tune_timer;
typedef struct moe_tune {
    bool free;  /* the number of chunks is chosen */
    bool ways;  /* the way of rows is */
    bool homes; /* flex: whether a forward's rows go home one by one */
    bool tails; /* flex: whether a backward's last sums run beside the weight gradients */
    bool backs; /* there was a backward pass since the last plan */
    int due;    /* the class whose times the next plan tells; -1: none */
    moe_tune_timer timer[MOE_TUNE_PASSES];
    moe_tune_class of[MOE_TUNE_CLASSES]; /* by log2 of tokens */
} moe_tune;

#endif
