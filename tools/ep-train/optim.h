/* SPDX-License-Identifier: Apache-2.0
 *
 * optim.h - SGD and AdamW over one flat array of weights.
 */
#ifndef EP_TRAIN_OPTIM_H
#define EP_TRAIN_OPTIM_H

#include <stddef.h>

#include "ep_overlap.h"

typedef enum optim_kind { OPTIM_SGD = 0, OPTIM_ADAMW = 1 } optim_kind;

typedef struct optim {
    optim_kind kind;
    size_t count;
    float *mean, *square; /* AdamW's moments; NULL with SGD */
} optim;

epo_status optim_create(optim_kind kind, size_t count, optim **out);
void optim_destroy(optim *o); /* NULL is accepted */
/* One update; step counts from 1. */
void optim_step(optim *o, float *w, const float *g, double lr, int step);

#endif
