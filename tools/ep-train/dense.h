/* SPDX-License-Identifier: Apache-2.0
 *
 * dense.h - the parts of the model that are not experts, as plain loops.
 *
 * Matrices are row-major; a weight w is [in][out].  Every backward adds to its
 * gradients (+=).  `real` is float; the gradient check builds with double.
 */
#ifndef EP_TRAIN_DENSE_H
#define EP_TRAIN_DENSE_H

#include <stdint.h>

#ifndef EP_TRAIN_REAL
#define EP_TRAIN_REAL float
#endif
typedef EP_TRAIN_REAL real;

/* y[rows][out] += x[rows][in] w */
void linear_forward(real *y, const real *x, const real *w, int rows, int in, int out);
/* dx += dy w^T (NULL: not wanted), dw += x^T dy */
void linear_backward(real *dx, real *dw, const real *x, const real *w, const real *dy, int rows,
                     int in, int out);

/* n = gain * x / sqrt(mean(x^2) + 1e-5); scale[rows] keeps 1/sqrt(...). */
void norm_forward(real *n, real *scale, const real *x, const real *gain, int rows, int width);
void norm_backward(real *dx, real *dgain, const real *dn, const real *x, const real *scale,
                   const real *gain, int rows, int width);

/* Router: the top_k largest of each row of logits[rows][experts], ties to the
 * lower index, with a softmax over the chosen ones. */
void router_forward(int64_t *chosen, real *weights, const real *logits, int rows, int experts,
                    int top_k);
/* dlogits[rows][experts] is overwritten; experts that were not chosen get 0. */
void router_backward(real *dlogits, const real *dweights, const int64_t *chosen,
                     const real *weights, int rows, int experts, int top_k);

/* Sum over the rows of -log softmax(logits)[target]; logits become the gradient
 * of `share` times that sum. */
double softmax_loss(real *logits, const uint8_t *target, int rows, int vocab, double share);

#endif
