/* SPDX-License-Identifier: Apache-2.0
 *
 * swiglu.c - a = w * silu(g) * u and its gradients, fp32 inside.
 */
#include "config.h"

#include "backend/host/host.h"
#include "backend/host/convert.h"

#include <math.h>
#include <string.h>

#define SWIGLU_BLOCK 256 /* elements of a row at a time */
#define SWIGLU_LANES 8   /* partial sums of dw */

static inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static void forward_row(const epo_swiglu *s, uint64_t row) {
    uint64_t f = (uint64_t)s->ffn;
    float w = s->w[row], g[SWIGLU_BLOCK], u[SWIGLU_BLOCK];
    if (w == 0.0f) {
        size_t size = host_type_size(s->type);
        memset((unsigned char *)s->a + row * f * size, 0, f * size);
        return;
    }
    for (uint64_t at = 0; at < f; at += SWIGLU_BLOCK) {
        uint64_t n = f - at < SWIGLU_BLOCK ? f - at : SWIGLU_BLOCK;
        host_load(g, s->h, row * 2 * f + at, n, s->type);
        host_load(u, s->h, row * 2 * f + f + at, n, s->type);
        for (uint64_t i = 0; i < n; i++)
            g[i] = w * (g[i] * sigmoid(g[i])) * u[i];
        host_store(s->a, row * f + at, g, n, s->type);
    }
}

/* A block's values; each of dg, du, a may be given back over what was read. */
typedef struct swiglu_block {
    float g[SWIGLU_BLOCK], u[SWIGLU_BLOCK], da[SWIGLU_BLOCK], a[SWIGLU_BLOCK];
} swiglu_block;

static void backward_block(swiglu_block *b, uint64_t n, float w, float sum[SWIGLU_LANES]) {
    for (uint64_t i = 0; i < n; i++) {
        float sig = sigmoid(b->g[i]), silu = b->g[i] * sig;
        float slope = sig * (1.0f + b->g[i] * (1.0f - sig));
        float u = b->u[i], da = b->da[i];
        sum[i % SWIGLU_LANES] += da * silu * u;
        b->g[i] = w == 0.0f ? 0.0f : w * da * u * slope;
        b->u[i] = w == 0.0f ? 0.0f : w * da * silu;
        b->a[i] = w == 0.0f ? 0.0f : w * silu * u;
    }
}

/* Blocks are multiples of the lanes, so the order of dw's sum is the row's own. */
static void backward_row(const epo_swiglu *s, uint64_t row) {
    swiglu_block b;
    uint64_t f = (uint64_t)s->ffn;
    float w = s->w[row], sum[SWIGLU_LANES] = {0};
    for (uint64_t at = 0; at < f; at += SWIGLU_BLOCK) {
        uint64_t n = f - at < SWIGLU_BLOCK ? f - at : SWIGLU_BLOCK;
        host_load(b.g, s->h, row * 2 * f + at, n, s->type);
        host_load(b.u, s->h, row * 2 * f + f + at, n, s->type);
        host_load(b.da, s->da, row * f + at, n, s->type);
        backward_block(&b, n, w, sum);
        host_store(s->dh, row * 2 * f + at, b.g, n, s->type);
        host_store(s->dh, row * 2 * f + f + at, b.u, n, s->type);
        if (s->a != NULL)
            host_store(s->a, row * f + at, b.a, n, s->type);
    }
    for (int step = SWIGLU_LANES / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++)
            sum[i] += sum[i + step];
    if (s->dw != NULL)
        s->dw[row] = sum[0];
}

static void swiglu_run(host_worker *w, host_op *op) {
    (void)w;
    const epo_swiglu *s = &op->u.swiglu;
    for (uint64_t row = s->row; row < s->row + s->rows; row++) {
        if (s->da == NULL)
            forward_row(s, row);
        else
            backward_row(s, row);
    }
}

epo_status host_swiglu(epo_queue *q, const epo_swiglu *s, const epo_deps *deps) {
    if (!host_type_known(s->type) || s->ffn < 1 || (s->da == NULL ? s->a == NULL : s->dh == NULL))
        return epo_fail(EPO_E_ARG, "SwiGLU: found type %d, ffn %d%s; allowed 0..2, 1.., an output",
                        (int)s->type, s->ffn,
                        (s->da == NULL ? s->a == NULL : s->dh == NULL) ? ", no output" : "");
    host_op *op;
    epo_status status = host_op_create(q, deps, swiglu_run, &op);
    if (status != EPO_OK)
        return status;
    op->u.swiglu = *s;
    return host_op_issue(q, op);
}
