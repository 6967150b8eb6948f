/* SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include <math.h>
#include <stdbool.h>
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
    m->there = take(base, &used, m->dense, sizeof(real));
    m->sum = take(base, &used, m->dense, sizeof(real));
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
    m->input = take(base, &used, t, 1);
    m->target = take(base, &used, t, 1);
    m->loss = take(base, &used, t, sizeof(double));
    return used;
}

size_t model_bytes(const model_shape *shape, size_t *dense) {
    model m = {.shape = *shape, .dense = dense_size(shape)};
    *dense = m.dense;
    return lay_out(&m, NULL);
}

static epo_status checked(const model *m) {
    const char *wrong = m->on->wrong(m->at);
    return wrong == NULL ? EPO_OK : epo_fail(EPO_E_SYSTEM, "the model's dense parts: %s", wrong);
}

/* What stays in ordinary memory where the passes are elsewhere. */
static bool create_here(model *m) {
    m->layer = calloc((size_t)m->shape.layers + 1, sizeof *m->layer);
    m->losses = calloc((size_t)m->shape.max_tokens + 1, sizeof *m->losses);
    if (m->at != NULL) {
        m->w = calloc(m->dense, sizeof *m->w);
        m->g = calloc(m->dense, sizeof *m->g);
    }
    return m->layer != NULL && m->losses != NULL && (m->at == NULL || (m->w && m->g));
}

epo_status model_create(const model_shape *shape, moe_block **moe, const dense_ops *on, void *at,
                        uint64_t seed, model **out) {
    model *m = calloc(1, sizeof *m);
    if (m == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for the model");
    m->shape = *shape;
    m->moe = moe;
    m->on = on;
    m->at = at;
    m->dense = dense_size(shape);
    size_t bytes = lay_out(m, NULL);
    bool room = create_here(m);
    m->arena = room ? on->alloc(at, bytes) : NULL;
    if (m->arena == NULL) {
        model_destroy(m);
        return epo_fail(EPO_E_NOMEM,
                        "no memory for the model: its dense parts and activations need %zu MB%s; "
                        "lower --hidden, --layers, --batch or --seq",
                        bytes >> 20, at != NULL ? " of the GPU" : "");
    }
    lay_out(m, m->arena);
    if (at == NULL) {
        m->w = m->there;
        m->g = m->sum;
    }
    set_weights(m, seed);
    epo_status status = model_store(m);
    if (status != EPO_OK) {
        model_destroy(m);
        return status;
    }
    *out = m;
    return EPO_OK;
}

void model_destroy(model *m) {
    if (m == NULL)
        return;
    if (m->at != NULL) {
        free(m->w);
        free(m->g);
    }
    m->on->release(m->at, m->arena);
    free(m->losses);
    free(m->layer);
    free(m);
}

epo_status model_store(model *m) {
    if (m->there != m->w)
        m->on->put(m->at, m->there, m->w, m->dense * sizeof(real));
    return checked(m);
}

epo_status model_clear(model *m) {
    m->on->zero(m->at, m->sum, m->dense);
    return checked(m);
}

epo_status model_fetch(model *m) {
    if (m->sum != m->g)
        m->on->get(m->at, m->g, m->sum, m->dense * sizeof(real));
    return checked(m);
}

/* x[t] += sum over the taps of w_tap n[t - shift], within each sequence. */
static void mix_forward(const model *m, int layer, real *x, const real *n, int tokens) {
    const model_shape *s = &m->shape;
    const int h = s->hidden;
    for (int first = 0; first < tokens; first += s->seq)
        for (int tap = 0; tap < MODEL_TAPS; tap++) {
            int shift = tap_shift(s, layer, tap);
            if (shift < s->seq)
                m->on->linear_forward(m->at, x + (size_t)(first + shift) * h, n + (size_t)first * h,
                                      m->there + at_tap(s, layer, tap), s->seq - shift, h, h);
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
                m->on->linear_backward(m->at, dn + (size_t)first * h, m->sum + at,
                                       n + (size_t)first * h, m->there + at,
                                       dx + (size_t)(first + shift) * h, s->seq - shift, h, h);
        }
}

static epo_status layer_forward(model *m, int l, real *out, int tokens) {
    const model_shape *s = &m->shape;
    const model_layer_state *a = &m->layer[l];
    const size_t count = (size_t)tokens * (size_t)s->hidden;
    m->on->norm_forward(m->at, a->norm1, a->scale1, a->in, m->there + at_norm1(s, l), tokens,
                        s->hidden);
    m->on->copy(m->at, a->mid, a->in, count);
    mix_forward(m, l, a->mid, a->norm1, tokens);
    m->on->norm_forward(m->at, a->norm2, a->scale2, a->mid, m->there + at_norm2(s, l), tokens,
                        s->hidden);
    m->on->zero(m->at, a->logits, (size_t)tokens * (size_t)s->experts);
    m->on->linear_forward(m->at, a->logits, a->norm2, m->there + at_router(s, l), tokens, s->hidden,
                          s->experts);
    m->on->router_forward(m->at, a->chosen, a->weights, a->logits, tokens, s->experts, s->top_k);
    epo_status status = moe_block_route(m->moe[l], tokens, a->chosen, a->weights);
    if (status == EPO_OK)
        status = moe_block_forward(m->moe[l], a->norm2, out);
    if (status == EPO_OK)
        m->on->add(m->at, out, a->mid, count);
    return status;
}

epo_status model_forward(model *m, const uint8_t *input, const uint8_t *target, int tokens,
                         double share, double *loss) {
    const model_shape *s = &m->shape;
    m->on->put(m->at, m->input, input, (size_t)tokens);
    m->on->put(m->at, m->target, target, (size_t)tokens);
    m->on->embed(m->at, s->layers > 0 ? m->layer[0].in : m->out, m->there, m->input, tokens,
                 s->hidden);
    for (int l = 0; l < s->layers; l++) {
        real *out = l + 1 < s->layers ? m->layer[l + 1].in : m->out;
        epo_status status = layer_forward(m, l, out, tokens);
        if (status != EPO_OK)
            return status;
    }
    m->on->norm_forward(m->at, m->norm, m->scale, m->out, m->there + at_norm(s), tokens, s->hidden);
    m->on->zero(m->at, m->logits, (size_t)tokens * MODEL_VOCAB);
    m->on->linear_forward(m->at, m->logits, m->norm, m->there + at_output(s), tokens, s->hidden,
                          MODEL_VOCAB);
    m->on->softmax_loss(m->at, m->loss, m->logits, m->target, tokens, MODEL_VOCAB, share);
    m->on->get(m->at, m->losses, m->loss, (size_t)tokens * sizeof *m->losses);
    *loss = 0;
    for (int t = 0; t < tokens; t++)
        *loss += m->losses[t];
    return checked(m);
}

/* dx: gradient of the layer's output on entry, of its input on return. */
static epo_status layer_backward(model *m, int l, real *dx, int tokens) {
    const model_shape *s = &m->shape;
    const model_layer_state *a = &m->layer[l];
    const size_t count = (size_t)tokens * (size_t)s->hidden;
    epo_status status = moe_block_backward(m->moe[l], dx, m->dn, a->dweights);
    if (status != EPO_OK)
        return status;
    m->on->router_backward(m->at, a->logits, a->dweights, a->chosen, a->weights, tokens, s->experts,
                           s->top_k);
    m->on->linear_backward(m->at, m->dn, m->sum + at_router(s, l), a->norm2,
                           m->there + at_router(s, l), a->logits, tokens, s->hidden, s->experts);
    m->on->norm_backward(m->at, dx, m->sum + at_norm2(s, l), m->dn, a->mid, a->scale2,
                         m->there + at_norm2(s, l), tokens, s->hidden);
    m->on->zero(m->at, m->dn, count);
    mix_backward(m, l, m->dn, a->norm1, dx, tokens);
    m->on->norm_backward(m->at, dx, m->sum + at_norm1(s, l), m->dn, a->in, a->scale1,
                         m->there + at_norm1(s, l), tokens, s->hidden);
    return EPO_OK;
}

epo_status model_backward(model *m, int tokens) {
    const model_shape *s = &m->shape;
    const size_t count = (size_t)tokens * (size_t)s->hidden;
    m->on->zero(m->at, m->dn, count);
    m->on->linear_backward(m->at, m->dn, m->sum + at_output(s), m->norm, m->there + at_output(s),
                           m->logits, tokens, s->hidden, MODEL_VOCAB);
    m->on->zero(m->at, m->dx, count);
    m->on->norm_backward(m->at, m->dx, m->sum + at_norm(s), m->dn, m->out, m->scale,
                         m->there + at_norm(s), tokens, s->hidden);
    for (int l = s->layers - 1; l >= 0; l--) {
        epo_status status = layer_backward(m, l, m->dx, tokens);
        if (status != EPO_OK)
            return status;
    }
    m->on->embed_backward(m->at, m->sum, m->dx, m->input, tokens, s->hidden);
    return checked(m);
}
