/* SPDX-License-Identifier: Apache-2.0
 *
 * dense.h - the parts of the model that are not experts: plain loops, and the same on a
 * GPU (dense_gpu.cu), where the arrays of a model lie then.
 *
 * Matrices are row-major; a weight w is [in][out].  Every backward adds to its
 * gradients (+=).  `real` is float; the gradient check builds with double.
 */
#ifndef EP_TRAIN_DENSE_H
#define EP_TRAIN_DENSE_H

#include <stddef.h>
#include <stdint.h>

#include "ep_overlap.h"

#ifndef EP_TRAIN_REAL
#define EP_TRAIN_REAL float
#endif
typedef EP_TRAIN_REAL real;

/* Functions over arrays of one place.  `at` is the place's: NULL, or a GPU's stream, where
 * they return before the end and in its order.  Sums run in an order that depends on the
 * shape alone. */
typedef struct dense_ops {
    /* Zeroed, NULL: there is no more.  put and get: from and to ordinary memory, complete on
     * return. */
    void *(*alloc)(void *at, size_t bytes);
    void (*release)(void *at, void *memory);
    void (*put)(void *at, void *to, const void *from, size_t bytes);
    void (*get)(void *at, void *to, const void *from, size_t bytes);
    /* What went wrong since the start, or NULL. */
    const char *(*wrong)(void *at);

    void (*zero)(void *at, real *x, size_t count);
    void (*copy)(void *at, real *y, const real *x, size_t count);
    void (*add)(void *at, real *y, const real *x, size_t count);
    /* x[t] = w[input[t]]; g[input[t]] += dx[t] in the order of t. */
    void (*embed)(void *at, real *x, const real *w, const uint8_t *input, int rows, int width);
    void (*embed_backward)(void *at, real *g, const real *dx, const uint8_t *input, int rows,
                           int width);
    /* y[rows][out] += x[rows][in] w */
    void (*linear_forward)(void *at, real *y, const real *x, const real *w, int rows, int in,
                           int out);
    /* dx += dy w^T (NULL: not wanted), dw += x^T dy */
    void (*linear_backward)(void *at, real *dx, real *dw, const real *x, const real *w,
                            const real *dy, int rows, int in, int out);
    /* n = gain * x / sqrt(mean(x^2) + 1e-5); scale[rows] keeps 1/sqrt(...). */
    void (*norm_forward)(void *at, real *n, real *scale, const real *x, const real *gain, int rows,
                         int width);
    void (*norm_backward)(void *at, real *dx, real *dgain, const real *dn, const real *x,
                          const real *scale, const real *gain, int rows, int width);
    /* Router: the top_k largest of each row of logits[rows][experts], ties to the
     * lower index, with a softmax over the chosen ones. */
    void (*router_forward)(void *at, int64_t *chosen, real *weights, const real *logits, int rows,
                           int experts, int top_k);
    /* dlogits[rows][experts] is overwritten; experts that were not chosen get 0. */
    void (*router_backward)(void *at, real *dlogits, const real *dweights, const int64_t *chosen,
                            const real *weights, int rows, int experts, int top_k);
    /* loss[rows] = -log softmax(logits)[target]; logits become the gradient of `share`
     * times their sum. */
    void (*softmax_loss)(void *at, double *loss, real *logits, const uint8_t *target, int rows,
                         int vocab, double share);
    /* To the type of an engine's rows, and bf16 back. */
    void (*narrow)(void *at, void *to, const real *from, size_t count, epo_dtype type);
    void (*widen)(void *at, real *to, const void *from, size_t count);
} dense_ops;

extern const dense_ops dense_host;
/* NULL: built without CUDA. */
const dense_ops *dense_gpu(void);

#endif
