/* SPDX-License-Identifier: Apache-2.0
 *
 * test_train_gradient - the model's backward against finite differences, in
 * double.  The model's sources are built with EP_TRAIN_REAL=double; the experts
 * are a plain loop here, so that every derivative that the model passes through
 * them (rows, router weights) is checked as well.
 */
#include "core/status.h"
#include "model.h"
#include "unit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define HIDDEN 6
#define EXPERTS 3
#define TOP_K 2
#define LAYERS 3
#define SEQ 7
#define TOKENS (3 * SEQ)

/* ---- experts: y = sum over k of w_k * tanh(a_e * x), per element ------- */

struct fake_experts {
    double a[EXPERTS];
    double x[TOKENS][HIDDEN], w[TOKENS][TOP_K];
    int64_t chosen[TOKENS][TOP_K];
    int tokens;
} experts[LAYERS];
static moe_block blocks[LAYERS];
static moe_block *block_list[LAYERS];

static struct fake_experts *of(const moe_block *b) { return &experts[b - blocks]; }

epo_status moe_block_route(moe_block *b, int tokens, const int64_t *chosen, const real *weights) {
    struct fake_experts *e = of(b);
    e->tokens = tokens;
    memcpy(e->chosen, chosen, sizeof(int64_t) * TOP_K * (size_t)tokens);
    memcpy(e->w, weights, sizeof(real) * TOP_K * (size_t)tokens);
    return EPO_OK;
}

epo_status moe_block_forward(moe_block *b, const real *x, real *y) {
    struct fake_experts *e = of(b);
    memcpy(e->x, x, sizeof(real) * HIDDEN * (size_t)e->tokens);
    for (int t = 0; t < e->tokens; t++)
        for (int h = 0; h < HIDDEN; h++) {
            y[t * HIDDEN + h] = 0;
            for (int k = 0; k < TOP_K; k++)
                y[t * HIDDEN + h] += e->w[t][k] * tanh(e->a[e->chosen[t][k]] * e->x[t][h]);
        }
    return EPO_OK;
}

epo_status moe_block_backward(moe_block *b, const real *dy, real *dx, real *dweights) {
    struct fake_experts *e = of(b);
    for (int t = 0; t < e->tokens; t++)
        for (int k = 0; k < TOP_K; k++) {
            dweights[t * TOP_K + k] = 0;
            for (int h = 0; h < HIDDEN; h++)
                dweights[t * TOP_K + k] +=
                    dy[t * HIDDEN + h] * tanh(e->a[e->chosen[t][k]] * e->x[t][h]);
        }
    for (int t = 0; t < e->tokens; t++)
        for (int h = 0; h < HIDDEN; h++) {
            double sum = 0;
            for (int k = 0; k < TOP_K; k++) {
                double a = e->a[e->chosen[t][k]], y = tanh(a * e->x[t][h]);
                sum += e->w[t][k] * a * (1 - y * y);
            }
            dx[t * HIDDEN + h] = sum * dy[t * HIDDEN + h];
        }
    return EPO_OK;
}

/* ---- the check -------------------------------------------------------- */

static uint8_t input[TOKENS], target[TOKENS];

static model *new_model(void) {
    const model_shape shape = {HIDDEN, LAYERS, EXPERTS, TOP_K, SEQ, TOKENS};
    model *m = NULL;
    for (int l = 0; l < LAYERS; l++) {
        block_list[l] = &blocks[l];
        for (int e = 0; e < EXPERTS; e++)
            experts[l].a[e] = 0.5 + 0.4 * e - 0.3 * l;
    }
    for (int t = 0; t < TOKENS; t++) {
        input[t] = (uint8_t)(t * 37 % 5 + 'a');
        target[t] = (uint8_t)(t * 53 % 7 + 'a');
    }
    CU_ASSERT_EQUAL_FATAL(model_create(&shape, block_list, &dense_host, NULL, 11, &m), EPO_OK);
    return m;
}

static double loss_of(model *m, int64_t *chosen) {
    double loss = NAN;
    CU_ASSERT_EQUAL(model_forward(m, input, target, TOKENS, 0.25, &loss), EPO_OK);
    for (int l = 0; l < LAYERS; l++)
        memcpy(chosen + l * TOKENS * TOP_K, m->layer[l].chosen, sizeof(int64_t) * TOKENS * TOP_K);
    return 0.25 * loss;
}

/* Every dense weight that this batch can reach.  A step over which some token
 * changes its experts has no derivative and is passed over; hardly any may be. */
static void dense_gradients(void) {
    static int64_t here[LAYERS * TOKENS * TOP_K], there[LAYERS * TOKENS * TOP_K];
    const double step = 1e-5;
    int checked = 0, changed = 0;
    double worst = 0;
    model *m = new_model();
    loss_of(m, here);
    CU_ASSERT_EQUAL(model_backward(m, TOKENS), EPO_OK);
    for (size_t i = 0; i < m->dense; i++) {
        double keep = m->w[i], up, down;
        int same;
        m->w[i] = keep + step;
        up = loss_of(m, there);
        same = memcmp(here, there, sizeof here) == 0;
        m->w[i] = keep - step;
        down = loss_of(m, there);
        same = same && memcmp(here, there, sizeof here) == 0;
        m->w[i] = keep;
        if (!same) {
            changed++;
            continue;
        }
        double want = (up - down) / (2 * step);
        double error = fabs(m->g[i] - want) / (fabs(want) + 1e-3);
        worst = error > worst ? error : worst;
        checked++;
    }
    printf(" (%d weights, worst relative error %.1e) ", checked, worst);
    CU_ASSERT(worst < 1e-5);
    CU_ASSERT(checked > 2000 && changed < checked / 50);
    model_destroy(m);
}

/* Two backward calls add up; a rank without tokens adds nothing. */
static void gradients_add_up(void) {
    static int64_t chosen[LAYERS * TOKENS * TOP_K];
    double nothing = NAN;
    model *m = new_model();
    double *once = malloc(m->dense * sizeof *once);
    CU_ASSERT_PTR_NOT_NULL_FATAL(once);
    loss_of(m, chosen);
    CU_ASSERT_EQUAL(model_backward(m, TOKENS), EPO_OK);
    memcpy(once, m->g, m->dense * sizeof *once);
    loss_of(m, chosen);
    CU_ASSERT_EQUAL(model_backward(m, TOKENS), EPO_OK);
    for (size_t i = 0; i < m->dense; i++)
        CU_ASSERT(fabs(m->g[i] - 2 * once[i]) <= 1e-12 * (1 + fabs(once[i])));
    memcpy(once, m->g, m->dense * sizeof *once);
    CU_ASSERT_EQUAL(model_forward(m, input, target, 0, 0.25, &nothing), EPO_OK);
    CU_ASSERT_EQUAL(nothing, 0);
    CU_ASSERT_EQUAL(model_backward(m, 0), EPO_OK);
    CU_ASSERT_EQUAL(memcmp(once, m->g, m->dense * sizeof *once), 0);
    free(once);
    model_destroy(m);
}

/* No position sees a later byte, nor another sequence's. */
static void causal_within_a_sequence(void) {
    static int64_t chosen[LAYERS * TOKENS * TOP_K];
    static double before[TOKENS * HIDDEN];
    model *m = new_model();
    loss_of(m, chosen);
    memcpy(before, m->out, sizeof before);
    input[SEQ + 4] ^= 1; /* position 4 of the second sequence */
    loss_of(m, chosen);
    for (int t = 0; t < TOKENS; t++) {
        int same = memcmp(before + t * HIDDEN, m->out + t * HIDDEN, HIDDEN * sizeof(double)) == 0;
        if (t < SEQ + 4 || t >= 2 * SEQ)
            CU_ASSERT(same);
        if (t == SEQ + 4)
            CU_ASSERT(!same);
    }
    model_destroy(m);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"dense gradients against finite differences", dense_gradients},
        {"gradients of calls add up, no tokens add nothing", gradients_add_up},
        {"causal within a sequence", causal_within_a_sequence},
        CU_TEST_INFO_NULL,
    };
    return unit_run("train gradient", tests);
}
