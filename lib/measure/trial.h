/* SPDX-License-Identifier: Apache-2.0
 *
 * trial.h - passes by which an engine that measures chooses: behind each plan of
 * measure_device_trials one.
 */
#ifndef EPO_MEASURE_TRIAL_H
#define EPO_MEASURE_TRIAL_H

#include "measure/device.h"

/* A layer's pass over a plan, as epo_forward and epo_backward take it. */
typedef struct measure_pass {
    epo_group *group;
    epo_layer *layer;
    epo_plan *plan;
    const void *x, *dy;
    void *y, *dx;
    float *dweights;
} measure_pass;
/* [collective]  Forward; on GPUs a backward, too, and what it delays: it counts, and has a question
 * of its own. */
epo_status measure_trial(const measure_device *d, const measure_pass *p);

#endif
