/* SPDX-License-Identifier: Apache-2.0
 *
 * swiglu.c - a = w * silu(g) * u and its gradients, fp32 inside.
 */
#include "config.h"

#include "backend/host/host.h"
#include "backend/host/convert.h"

#include <string.h>

#define SWIGLU_BLOCK 256 /* elements of a row at a time */
#define SWIGLU_LANES 8   /* partial sums of dw */

/* Within 2 units of the last place, NaN kept; without calls or branches, so that
 * compilers vectorise.  Beyond +-88 the argument is cut: what follows is 0 or 1 to
 * within 1e-38 there.  Reduction and polynomial as in Cephes' expf. */
HOST_INLINE float exp_plain(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float t = x * 1.44269504f + magic, n = t - magic;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t exponent = (host_bits(t) - host_bits(magic) + 127u) << 23;
    return p * host_float(exponent);
}

HOST_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp_plain(-x)); }

HOST_INLINE void forward_row(const epo_swiglu *s, uint64_t row) {
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

/* A block's values; dg, du and a are written over g, u and da. */
typedef struct swiglu_block {
    float g[SWIGLU_BLOCK], u[SWIGLU_BLOCK], da[SWIGLU_BLOCK], term[SWIGLU_BLOCK];
} swiglu_block;

HOST_INLINE void backward_block(swiglu_block *restrict b, uint64_t n, float w) {
    for (uint64_t i = 0; i < n; i++) {
        float g = b->g[i], u = b->u[i], da = b->da[i];
        float sig = sigmoid(g), silu = g * sig;
        float slope = sig * (1.0f + g * (1.0f - sig));
        b->term[i] = da * silu * u;
        b->g[i] = w * da * u * slope;
        b->u[i] = w * da * silu;
        b->da[i] = w * silu * u;
    }
    if (w == 0.0f) { /* zero, whatever was there */
        memset(b->g, 0, sizeof b->g);
        memset(b->u, 0, sizeof b->u);
        memset(b->da, 0, sizeof b->da);
    }
}

HOST_INLINE void sum_block(const float *term, uint64_t n, float sum[SWIGLU_LANES]) {
    uint64_t i = 0;
    for (; i + SWIGLU_LANES <= n; i += SWIGLU_LANES)
        for (uint64_t lane = 0; lane < SWIGLU_LANES; lane++)
            sum[lane] += term[i + lane];
    for (; i < n; i++)
        sum[i % SWIGLU_LANES] += term[i];
}

/* Blocks are multiples of the lanes, so the order of dw's sum is the row's own. */
HOST_INLINE void backward_row(const epo_swiglu *s, uint64_t row) {
    swiglu_block b;
    uint64_t f = (uint64_t)s->ffn;
    float w = s->w[row], sum[SWIGLU_LANES] = {0};
    for (uint64_t at = 0; at < f; at += SWIGLU_BLOCK) {
        uint64_t n = f - at < SWIGLU_BLOCK ? f - at : SWIGLU_BLOCK;
        host_load(b.g, s->h, row * 2 * f + at, n, s->type);
        host_load(b.u, s->h, row * 2 * f + f + at, n, s->type);
        host_load(b.da, s->da, row * f + at, n, s->type);
        backward_block(&b, n, w);
        sum_block(b.term, n, sum);
        host_store(s->dh, row * 2 * f + at, b.g, n, s->type);
        host_store(s->dh, row * 2 * f + f + at, b.u, n, s->type);
        if (s->a != NULL)
            host_store(s->a, row * f + at, b.da, n, s->type);
    }
    for (int step = SWIGLU_LANES / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++)
            sum[i] += sum[i + step];
    if (s->dw != NULL)
        s->dw[row] = sum[0];
}

HOST_INLINE void swiglu_rows(const epo_swiglu *s) {
    for (uint64_t row = s->row; row < s->row + s->rows; row++) {
        if (s->da == NULL)
            forward_row(s, row);
        else
            backward_row(s, row);
    }
}

HOST_WIDE static void swiglu_wide(const epo_swiglu *s) { swiglu_rows(s); }
static void swiglu_any(const epo_swiglu *s) { swiglu_rows(s); }

static void swiglu_run(host_worker *w, host_op *op) {
    if (w->be->wide)
        swiglu_wide(&op->u.swiglu);
    else
        swiglu_any(&op->u.swiglu);
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
