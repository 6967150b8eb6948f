/* SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "measure/rng.h"

/* Offsets into the flat vector. */
static size_t layer_size(const model_shape *s) {
    size_t h = (size_t)s->hidden;
    return h + MODEL_TAPS * h * h + h + h * (size_t)s->experts;
}
static size_t at_layer(const model_shape *s, int layer) {
    return (size_t)MODEL_VOCAB * (size_t)s->hidden + (size_t)layer * layer_size(s);
}
static size_t at_norm1(const model_shape *s, int layer) { return at_layer(s, layer); }
static size_t at_tap(const model_shape *s, int layer, int tap) {
    size_t h = (size_t)s->hidden;
    return at_layer(s, layer) + h + (size_t)tap * h * h;
}
static size_t at_norm2(const model_shape *s, int layer) { return at_tap(s, layer, MODEL_TAPS); }
static size_t at_router(const model_shape *s, int layer) {
    return at_norm2(s, layer) + (size_t)s->hidden;
}
static size_t at_norm(const model_shape *s) { return at_layer(s, s->layers); }
static size_t at_output(const model_shape *s) { return at_norm(s) + (size_t)s->hidden; }
static size_t dense_size(const model_shape *s) {
    return at_output(s) + (size_t)s->hidden * MODEL_VOCAB;
}

/* How far back tap j of a layer looks: j, 4j, 16j, ... while it stays within a
 * sequence. */
static int tap_shift(const model_shape *s, int layer, int tap) {
    int reach = 1;
    for (int i = 0; i < layer; i++)
        reach = reach * MODEL_TAPS * (MODEL_TAPS - 1) < s->seq ? reach * MODEL_TAPS : 1;
    return tap * reach;
}

static void fill(real *w, size_t from, size_t count, double width, uint64_t seed) {
    for (size_t i = from; i < from + count; i++)
        w[i] = (real)(width * rng_symmetric(seed, 0, i));
}

static void set_weights(model *m, uint64_t seed) {
    const model_shape *s = &m->shape;
    const size_t h = (size_t)s->hidden;
    const double width = sqrt(3.0 / s->hidden); /* variance 1 / inputs */
    fill(m->w, 0, MODEL_VOCAB * h, 1.0, seed);
    for (int l = 0; l < s->layers; l++) {
        fill(m->w, at_tap(s, l, 0), MODEL_TAPS * h * h, width / 2, seed);
        fill(m->w, at_router(s, l), h * (size_t)s->experts, width, seed);
        for (size_t i = 0; i < h; i++)
            m->w[at_norm1(s, l) + i] = m->w[at_norm2(s, l) + i] = 1;
    }
    for (size_t i = 0; i < h; i++)
        m->w[at_norm(s) + i] = 1;
    fill(m->w, at_output(s), h * MODEL_VOCAB, width / 4, seed);
}

/* One allocation for all arrays: first called with base NULL to add them up. */
static void *take(char *base, size_t *used, size_t count, size_t each) {
    void *at = base == NULL ? NULL : base + *used;
    *used += (count * each + 63) / 64 * 64;
    return at;
}

static size_t lay_out(model *m, char *base) {
    const model_shape *s = &m->shape;
    const size_t t = (size_t)s->max_tokens, h = (size_t)s->hidden, k = (size_t)s->top_k;
    size_t used = 0;
    m->w = take(base, &used, m->dense, sizeof(real));
    m->g = take(base, &used, m->dense, sizeof(real));
    m->layer = take(base, &used, (size_t)s->layers, sizeof *m->layer);
    for (int l = 0; l < s->layers; l++) {
        model_layer_state at;
        at.in = take(base, &used, t * h, sizeof(real));
        at.norm1 = take(base, &used, t * h, sizeof(real));
        at.mid = take(base, &used, t * h, sizeof(real));
        at.norm2 = take(base, &used, t * h, sizeof(real));
        at.scale1 = take(base, &used, t, sizeof(real));
        at.scale2 = take(base, &used, t, sizeof(real));
        at.logits = take(base, &used, t * (size_t)s->experts, sizeof(real));
        at.chosen = take(base, &used, t * k, sizeof(int64_t));
        at.weights = take(base, &used, t * k, sizeof(real));
        at.dweights = take(base, &used, t * k, sizeof(real));
        if (base != NULL)
            m->layer[l] = at;
    }
    m->out = take(base, &used, t * h, sizeof(real));
    m->norm = take(base, &used, t * h, sizeof(real));
    m->scale = take(base, &used, t, sizeof(real));
    m->logits = take(base, &used, t * MODEL_VOCAB, sizeof(real));
    m->dx = take(base, &used, t * h, sizeof(real));
    m->dn = take(base, &used, t * h, sizeof(real));
    return used;
}

size_t model_bytes(const model_shape *shape, size_t *dense) {
    model m = {.shape = *shape, .dense = dense_size(shape)};
    *dense = m.dense;
    return lay_out(&m, NULL);
}

epo_status model_create(const model_shape *shape, moe_block **moe, uint64_t seed, model **out) {
    model *m = calloc(1, sizeof *m);
    if (m == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for the model");
    m->shape = *shape;
    m->moe = moe;
    m->dense = dense_size(shape);
    size_t bytes = lay_out(m, NULL);
    m->arena = calloc(1, bytes);
    if (m->arena == NULL) {
        free(m);
        return epo_fail(EPO_E_NOMEM,
                        "no memory for the model: its dense parts and activations need %zu MB; "
                        "lower --hidden, --layers, --batch or --seq",
                        bytes >> 20);
    }
    lay_out(m, m->arena);
    set_weights(m, seed);
    *out = m;
    return EPO_OK;
}

void model_destroy(model *m) {
    if (m == NULL)
        return;
    free(m->arena);
    free(m);
}

/* x[t] += sum over the taps of w_tap n[t - shift], within each sequence. */
static void mix_forward(const model *m, int layer, real *x, const real *n, int tokens) {
    const model_shape *s = &m->shape;
    const int h = s->hidden;
    for (int first = 0; first < tokens; first += s->seq)
        for (int tap = 0; tap < MODEL_TAPS; tap++) {
            int shift = tap_shift(s, layer, tap);
            if (shift < s->seq)
                linear_forward(x + (size_t)(first + shift) * h, n + (size_t)first * h,
                               m->w + at_tap(s, layer, tap), s->seq - shift, h, h);
        }
}

static void mix_backward(model *m, int layer, real *dn, const real *n, const real *dx, int tokens) {
    const model_shape *s = &m->shape;
    const int h = s->hidden;
    for (int first = 0; first < tokens; first += s->seq)
        for (int tap = 0; tap < MODEL_TAPS; tap++) {
            int shift = tap_shift(s, layer, tap);
            size_t at = at_tap(s, layer, tap);
            if (shift < s->seq)
                linear_backward(dn + (size_t)first * h, m->g + at, n + (size_t)first * h, m->w + at,
                                dx + (size_t)(first + shift) * h, s->seq - shift, h, h);
        }
}

static void add(real *x, const real *y, size_t count) {
    for (size_t i = 0; i < count; i++)
        x[i] += y[i];
}

static epo_status layer_forward(model *m, int l, real *out, int tokens) {
    const model_shape *s = &m->shape;
    const model_layer_state *a = &m->layer[l];
    const size_t count = (size_t)tokens * (size_t)s->hidden;
    norm_forward(a->norm1, a->scale1, a->in, m->w + at_norm1(s, l), tokens, s->hidden);
    memcpy(a->mid, a->in, count * sizeof(real));
    mix_forward(m, l, a->mid, a->norm1, tokens);
    norm_forward(a->norm2, a->scale2, a->mid, m->w + at_norm2(s, l), tokens, s->hidden);
    memset(a->logits, 0, sizeof(real) * (size_t)tokens * (size_t)s->experts);
    linear_forward(a->logits, a->norm2, m->w + at_router(s, l), tokens, s->hidden, s->experts);
    router_forward(a->chosen, a->weights, a->logits, tokens, s->experts, s->top_k);
    epo_status status = moe_block_route(m->moe[l], tokens, a->chosen, a->weights);
    if (status == EPO_OK)
        status = moe_block_forward(m->moe[l], a->norm2, out);
    if (status == EPO_OK)
        add(out, a->mid, count);
    return status;
}

epo_status model_forward(model *m, const uint8_t *input, const uint8_t *target, int tokens,
                         double share, double *loss) {
    const model_shape *s = &m->shape;
    const size_t h = (size_t)s->hidden;
    for (int t = 0; t < tokens; t++)
        memcpy((s->layers > 0 ? m->layer[0].in : m->out) + (size_t)t * h, m->w + input[t] * h,
               h * sizeof(real));
    for (int l = 0; l < s->layers; l++) {
        real *out = l + 1 < s->layers ? m->layer[l + 1].in : m->out;
        epo_status status = layer_forward(m, l, out, tokens);
        if (status != EPO_OK)
            return status;
    }
    norm_forward(m->norm, m->scale, m->out, m->w + at_norm(s), tokens, s->hidden);
    memset(m->logits, 0, sizeof(real) * (size_t)tokens * MODEL_VOCAB);
    linear_forward(m->logits, m->norm, m->w + at_output(s), tokens, s->hidden, MODEL_VOCAB);
    *loss = softmax_loss(m->logits, target, tokens, MODEL_VOCAB, share);
    return EPO_OK;
}

/* dx: gradient of the layer's output on entry, of its input on return. */
static epo_status layer_backward(model *m, int l, real *dx, int tokens) {
    const model_shape *s = &m->shape;
    const model_layer_state *a = &m->layer[l];
    const size_t count = (size_t)tokens * (size_t)s->hidden;
    epo_status status = moe_block_backward(m->moe[l], dx, m->dn, a->dweights);
    if (status != EPO_OK)
        return status;
    router_backward(a->logits, a->dweights, a->chosen, a->weights, tokens, s->experts, s->top_k);
    linear_backward(m->dn, m->g + at_router(s, l), a->norm2, m->w + at_router(s, l), a->logits,
                    tokens, s->hidden, s->experts);
    norm_backward(dx, m->g + at_norm2(s, l), m->dn, a->mid, a->scale2, m->w + at_norm2(s, l),
                  tokens, s->hidden);
    memset(m->dn, 0, count * sizeof(real));
    mix_backward(m, l, m->dn, a->norm1, dx, tokens);
    norm_backward(dx, m->g + at_norm1(s, l), m->dn, a->in, a->scale1, m->w + at_norm1(s, l), tokens,
                  s->hidden);
    return EPO_OK;
}

epo_status model_backward(model *m, const uint8_t *input, int tokens) {
    const model_shape *s = &m->shape;
    const size_t h = (size_t)s->hidden, count = (size_t)tokens * h;
    memset(m->dn, 0, count * sizeof(real));
    linear_backward(m->dn, m->g + at_output(s), m->norm, m->w + at_output(s), m->logits, tokens,
                    s->hidden, MODEL_VOCAB);
    memset(m->dx, 0, count * sizeof(real));
    norm_backward(m->dx, m->g + at_norm(s), m->dn, m->out, m->scale, m->w + at_norm(s), tokens,
                  s->hidden);
    for (int l = s->layers - 1; l >= 0; l--) {
        epo_status status = layer_backward(m, l, m->dx, tokens);
        if (status != EPO_OK)
            return status;
    }
    for (int t = 0; t < tokens; t++)
        add(m->g + input[t] * h, m->dx + (size_t)t * h, h);
    return EPO_OK;
}
