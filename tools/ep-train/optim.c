/* SPDX-License-Identifier: Apache-2.0 */
#include "optim.h"

#include <math.h>
#include <stdlib.h>

#include "core/status.h"

/* Loshchilov, Hutter: "Decoupled weight decay regularization", 2019. */
#define BETA1 0.9
#define BETA2 0.95
#define EPSILON 1e-8
#define DECAY 0.01

epo_status optim_create(optim_kind kind, size_t count, optim **out) {
    optim *o = calloc(1, sizeof *o);
    if (o == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for the optimizer");
    o->kind = kind;
    o->count = count;
    if (kind == OPTIM_ADAMW) {
        o->mean = calloc(count, sizeof(float));
        o->square = calloc(count, sizeof(float));
        if (o->mean == NULL || o->square == NULL) {
            optim_destroy(o);
            return epo_fail(EPO_E_NOMEM, "no memory for the optimizer: %zu MB are needed",
                            2 * count * sizeof(float) >> 20);
        }
    }
    *out = o;
    return EPO_OK;
}

void optim_destroy(optim *o) {
    if (o == NULL)
        return;
    free(o->mean);
    free(o->square);
    free(o);
}

static void step_sgd(const optim *o, float *w, const float *g, float lr) {
    for (size_t i = 0; i < o->count; i++)
        w[i] -= lr * g[i];
}

static void step_adamw(optim *o, float *w, const float *g, float lr, int step) {
    const float b1 = (float)BETA1, b2 = (float)BETA2;
    const float fix1 = (float)(1 / (1 - pow(BETA1, step)));
    const float fix2 = (float)(1 / (1 - pow(BETA2, step)));
    const float keep = 1 - lr * (float)DECAY;
    for (size_t i = 0; i < o->count; i++) {
        o->mean[i] = b1 * o->mean[i] + (1 - b1) * g[i];
        o->square[i] = b2 * o->square[i] + (1 - b2) * g[i] * g[i];
        w[i] =
            keep * w[i] - lr * (o->mean[i] * fix1) / (sqrtf(o->square[i] * fix2) + (float)EPSILON);
    }
}

void optim_step(optim *o, float *w, const float *g, double lr, int step) {
    if (o->kind == OPTIM_SGD)
        step_sgd(o, w, g, (float)lr);
    else
        step_adamw(o, w, g, (float)lr, step);
}
