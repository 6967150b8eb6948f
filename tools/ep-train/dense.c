/* SPDX-License-Identifier: Apache-2.0 */
#include "dense.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define NORM_EPSILON 1e-5

/* y += a0 x0 + a1 x1 + a2 x2 + a3 x3, the inner loop of both products; four at a
 * time because y's traffic is what limits it. */
static void add_four(real *restrict y, const real *a, size_t a_step, const real *restrict x,
                     size_t x_step, int terms, int n) {
    int j = 0;
    for (; j + 4 <= terms; j += 4) {
        const real a0 = a[0], a1 = a[a_step], a2 = a[2 * a_step], a3 = a[3 * a_step];
        const real *x0 = x, *x1 = x + x_step, *x2 = x + 2 * x_step, *x3 = x + 3 * x_step;
        for (int i = 0; i < n; i++)
            y[i] += (a0 * x0[i] + a1 * x1[i]) + (a2 * x2[i] + a3 * x3[i]);
        a += 4 * a_step;
        x += 4 * x_step;
    }
    for (; j < terms; j++, a += a_step, x += x_step)
        for (int i = 0; i < n; i++)
            y[i] += a[0] * x[i];
}

/* In eight lanes, so that the compiler may use vectors without reordering sums. */
static real dot(const real *restrict a, const real *restrict b, int n) {
    real lane[8] = {0};
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++)
            lane[l] += a[i + l] * b[i + l];
    real sum =
        ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
    for (; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static void linear_forward(void *at, real *y, const real *x, const real *w, int rows, int in,
                           int out) {
    (void)at;
    for (int t = 0; t < rows; t++)
        add_four(y + (size_t)t * out, x + (size_t)t * in, 1, w, (size_t)out, in, out);
}

static void linear_backward(void *at, real *dx, real *dw, const real *x, const real *w,
                            const real *dy, int rows, int in, int out) {
    (void)at;
    for (int t = 0; dx != NULL && t < rows; t++)
        for (int k = 0; k < in; k++)
            dx[(size_t)t * in + k] += dot(dy + (size_t)t * out, w + (size_t)k * out, out);
    for (int k = 0; k < in; k++)
        add_four(dw + (size_t)k * out, x + k, (size_t)in, dy, (size_t)out, rows, out);
}

static void norm_forward(void *at, real *n, real *scale, const real *x, const real *gain, int rows,
                         int width) {
    (void)at;
    for (int t = 0; t < rows; t++, x += width, n += width) {
        real s = (real)(1.0 / sqrt((double)dot(x, x, width) / width + NORM_EPSILON));
        scale[t] = s;
        for (int i = 0; i < width; i++)
            n[i] = x[i] * s * gain[i];
    }
}

static void norm_backward(void *at, real *dx, real *dgain, const real *dn, const real *x,
                          const real *scale, const real *gain, int rows, int width) {
    (void)at;
    for (int t = 0; t < rows; t++, x += width, dn += width, dx += width) {
        const real s = scale[t];
        real along = 0; /* of the gradient, along x */
        for (int i = 0; i < width; i++)
            along += dn[i] * gain[i] * x[i];
        along *= s * s * s / (real)width;
        for (int i = 0; i < width; i++) {
            dx[i] += dn[i] * gain[i] * s - x[i] * along;
            dgain[i] += dn[i] * x[i] * s;
        }
    }
}

static void router_forward(void *at, int64_t *chosen, real *weights, const real *logits, int rows,
                           int experts, int top_k) {
    (void)at;
    for (int t = 0; t < rows; t++, chosen += top_k, weights += top_k, logits += experts) {
        real sum = 0;
        for (int k = 0; k < top_k; k++) {
            int best = -1;
            for (int e = 0; e < experts; e++) {
                int taken = 0;
                for (int j = 0; j < k; j++)
                    taken |= chosen[j] == e;
                if (!taken && (best < 0 || logits[e] > logits[best]))
                    best = e;
            }
            chosen[k] = best;
        }
        for (int k = 0; k < top_k; k++) {
            weights[k] = (real)exp((double)(logits[chosen[k]] - logits[chosen[0]]));
            sum += weights[k];
        }
        for (int k = 0; k < top_k; k++)
            weights[k] /= sum;
    }
}

static void router_backward(void *at, real *dlogits, const real *dweights, const int64_t *chosen,
                            const real *weights, int rows, int experts, int top_k) {
    (void)at;
    memset(dlogits, 0, sizeof *dlogits * (size_t)rows * (size_t)experts);
    for (int t = 0; t < rows; t++) {
        real mean = 0;
        for (int k = 0; k < top_k; k++)
            mean += weights[k] * dweights[k];
        for (int k = 0; k < top_k; k++)
            dlogits[chosen[k]] = weights[k] * (dweights[k] - mean);
        dlogits += experts;
        dweights += top_k;
        chosen += top_k;
        weights += top_k;
    }
}

static void softmax_loss(void *at, double *loss, real *logits, const uint8_t *target, int rows,
                         int vocab, double share) {
    (void)at;
    for (int t = 0; t < rows; t++, logits += vocab) {
        real top = logits[0], of_target = logits[target[t]];
        double sum = 0;
        for (int v = 1; v < vocab; v++)
            top = logits[v] > top ? logits[v] : top;
        for (int v = 0; v < vocab; v++) {
            logits[v] = (real)exp((double)(logits[v] - top));
            sum += (double)logits[v];
        }
        loss[t] = log(sum) - (double)(of_target - top);
        for (int v = 0; v < vocab; v++)
            logits[v] = (real)((double)logits[v] / sum * share);
        logits[target[t]] -= (real)share;
    }
}

/* ---- the place ---------------------------------------------------------- */

static void *host_alloc(void *at, size_t bytes) {
    (void)at;
    return calloc(1, bytes);
}
static void host_release(void *at, void *memory) {
    (void)at;
    free(memory);
}
static void host_move(void *at, void *to, const void *from, size_t bytes) {
    (void)at;
    memcpy(to, from, bytes);
}
static const char *host_wrong(void *at) {
    (void)at;
    return NULL;
}
static void host_zero(void *at, real *x, size_t count) {
    (void)at;
    memset(x, 0, count * sizeof *x);
}
static void host_copy(void *at, real *y, const real *x, size_t count) {
    (void)at;
    memcpy(y, x, count * sizeof *y);
}
static void host_add(void *at, real *y, const real *x, size_t count) {
    (void)at;
    for (size_t i = 0; i < count; i++)
        y[i] += x[i];
}
static void embed(void *at, real *x, const real *w, const uint8_t *input, int rows, int width) {
    for (int t = 0; t < rows; t++)
        host_copy(at, x + (size_t)t * width, w + (size_t)input[t] * width, (size_t)width);
}
static void embed_backward(void *at, real *g, const real *dx, const uint8_t *input, int rows,
                           int width) {
    for (int t = 0; t < rows; t++)
        host_add(at, g + (size_t)input[t] * width, dx + (size_t)t * width, (size_t)width);
}

/* narrow and widen: the host's rows are the caller's, see moe_block.c. */
const dense_ops dense_host = {
    .alloc = host_alloc,
    .release = host_release,
    .put = host_move,
    .get = host_move,
    .wrong = host_wrong,
    .zero = host_zero,
    .copy = host_copy,
    .add = host_add,
    .embed = embed,
    .embed_backward = embed_backward,
    .linear_forward = linear_forward,
    .linear_backward = linear_backward,
    .norm_forward = norm_forward,
    .norm_backward = norm_backward,
    .router_forward = router_forward,
    .router_backward = router_backward,
    .softmax_loss = softmax_loss,
};

#ifndef EP_TRAIN_CUDA
const dense_ops *dense_gpu(void) { return NULL; }
#endif
