/* SPDX-License-Identifier: Apache-2.0
 *
 * model.h - a byte-level language model with mixture-of-experts layers:
 *
 *   x = embedding[byte]
 *   each layer:  x += mix(norm(x))     a dense matrix per tap: this position and
 *                                      three earlier ones, further back in deeper layers
 *                n  = norm(x);  x += experts(n, router(n))
 *   logits = norm(x) output
 *
 * The dense parts are replicated on every rank and live in one flat vector, so
 * that one all-reduce sums their gradients.  The experts are in moe_block.h.
 */
#ifndef EP_TRAIN_MODEL_H
#define EP_TRAIN_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "dense.h"
#include "ep_overlap.h"
#include "moe_block.h"

#define MODEL_VOCAB 256
#define MODEL_TAPS 4

typedef struct model_shape {
    int hidden, layers, experts, top_k;
    int seq;        /* tokens of a sequence */
    int max_tokens; /* of a micro-batch on this rank */
} model_shape;

/* What a forward keeps for its backward, per layer; [tokens][...]. */
typedef struct model_layer_state {
    real *in, *norm1, *mid, *norm2; /* [hidden] */
    real *scale1, *scale2;          /* [1] */
    real *logits;                   /* [experts] */
    int64_t *chosen;                /* [top_k] */
    real *weights, *dweights;       /* [top_k] */
} model_layer_state;

typedef struct model {
    model_shape shape;
    size_t dense; /* elements of w and g */
    real *w, *g;  /* dense weights and gradients, in ordinary memory */
    const dense_ops *on;
    void *at;          /* where the rest lies: see dense.h */
    real *there, *sum; /* what passes read and add to: w and g, or copies there */
    uint8_t *input, *target;
    double *loss, *losses; /* of each token, there and here */
    moe_block **moe;       /* [layers], the caller's */
    model_layer_state *layer;
    real *out, *norm, *scale, *logits; /* after the last layer */
    real *dx, *dn;                     /* of the backward pass */
    void *arena;
} model;

/* Bytes that model_create takes; *dense: elements of the dense weights.  The options'
 * limits keep every product below 2^62. */
size_t model_bytes(const model_shape *shape, size_t *dense);
/* Weights by `seed`, the same on every rank.  moe: one block per layer, which the
 * caller keeps and destroys.  on, at: where it works.  On failure *out is untouched. */
epo_status model_create(const model_shape *shape, moe_block **moe, const dense_ops *on, void *at,
                        uint64_t seed, model **out);
void model_destroy(model *m); /* NULL is accepted */

/* [collective]  One micro-batch of whole sequences: tokens is a multiple of seq,
 * 0 allowed.  *loss receives the sum over this rank's tokens; what backward
 * follows is the gradient of `share` times the sum over all ranks. */
epo_status model_forward(model *m, const uint8_t *input, const uint8_t *target, int tokens,
                         double share, double *loss);
/* [collective]  The last forward's: adds to what model_fetch brings to g, and to the
 * experts' gradients. */
epo_status model_backward(model *m, int tokens);
/* After w has changed; before the first backward of a step; before g is read. */
epo_status model_store(model *m);
epo_status model_clear(model *m);
epo_status model_fetch(model *m);

#endif
