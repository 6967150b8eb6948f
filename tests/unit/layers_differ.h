/* SPDX-License-Identifier: Apache-2.0
 *
 * layers_differ.h - what of a pass is another on rank 1, for each thing that has to be the same on
 * all ranks: every rank hears which it is, whatever the engine, and nobody waits.
 */
#ifndef EPO_TESTS_LAYERS_DIFFER_H
#define EPO_TESTS_LAYERS_DIFFER_H

#include "backend/engine.h"
#include "configs.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum differ_kind {
    DIFFER_FFN,
    DIFFER_SAVED,
    DIFFER_TOKENS,
    DIFFER_OWN,
    DIFFER_AGAIN,
    DIFFER_BUFFER,
    DIFFER_EXTRA,
    DIFFER_NOT, /* in what each rank has for itself */
    DIFFER_KINDS
} differ_kind;
enum { DIFFER_E = 4, DIFFER_H = 16, DIFFER_F = 16, DIFFER_T = 6, DIFFER_K = 2 };

static const char *const differ_said[] = {"ffn of the layer is",
                                          "saved of the layer is",
                                          "saved of the layer is",
                                          "expert of the layer",
                                          "weight gradients of the layer",
                                          "the buffer's number among the group's",
                                          "row_dweights and",
                                          ""};

static inline epo_status differ_experts(void *ctx, const epo_expert_call *call) {
    (void)ctx;
    (void)call;
    return EPO_OK;
}

static inline epo_layer_config differ_layer(differ_kind kind, bool other, float *weights,
                                            float *grads) {
    epo_layer_config l = config_layer(DIFFER_E, DIFFER_H, DIFFER_F, weights, weights);
    l.dw1 = l.dw2 = grads;
    if (kind == DIFFER_AGAIN)
        l.saved = EPO_SAVE_NOTHING;
    if (!other)
        return l;
    if (kind == DIFFER_FFN)
        l.ffn = DIFFER_F / 2;
    if (kind == DIFFER_SAVED)
        l.saved = EPO_SAVE_NOTHING;
    if (kind == DIFFER_TOKENS)
        l.saved = EPO_SAVE_TOKENS;
    if (kind == DIFFER_AGAIN || kind == DIFFER_NOT)
        l.dw1 = l.dw2 = NULL;
    if (kind == DIFFER_OWN) {
        l.w1 = l.w2 = l.dw1 = l.dw2 = NULL;
        l.expert = differ_experts;
    }
    return l;
}

/* The pass; a barrier comes after it, by which all have begun it. */
static inline epo_status differ_pass(const epo_engine *e, differ_kind kind, bool other,
                                     epo_group *group, epo_layer *layer, epo_plan *const plan[2],
                                     float *rows, epo_saved **saved) {
    float *x = rows, *y = rows + DIFFER_T * DIFFER_H, *all = y + DIFFER_T * DIFFER_H;
    epo_plan *mine = plan[kind == DIFFER_BUFFER && other];
    const bool given = kind == DIFFER_EXTRA && other;
    float dweights[DIFFER_T * DIFFER_K];
    epo_status status = kind == DIFFER_EXTRA ? e->combine(mine, all, y, given ? all : NULL,
                                                          given ? dweights : NULL, NULL)
                                             : e->forward(layer, mine, x, y, saved, NULL);
    return status == EPO_OK ? e->group_barrier(group) : status;
}

/* One rank's part, in a group that it ends; what went wrong is counted and said. */
static inline int differ_rank(const epo_engine *e, epo_group *group, int rank, differ_kind kind,
                              bool graphs) {
    const size_t room = (size_t)8 * DIFFER_E * DIFFER_F * DIFFER_H * sizeof(float);
    float *memory[3];
    epo_buffer_config b = config_buffer(DIFFER_E, DIFFER_H, DIFFER_K, DIFFER_T);
    if (graphs) {
        b.capacity = DIFFER_T;
        b.pad_to_capacity = b.graphs = 1;
    }
    epo_buffer *buffer[2] = {NULL, NULL};
    epo_plan *plan[2] = {NULL, NULL};
    epo_layer *layer = NULL;
    epo_saved *saved = NULL;
    int64_t experts[DIFFER_T * DIFFER_K];
    int wrong = 0;
    for (int i = 0; i < 3; i++) {
        memory[i] = aligned_alloc(256, room);
        if (memory[i] == NULL)
            abort();
        memset(memory[i], 0, room);
    }
    for (int i = 0; i < DIFFER_T * DIFFER_K; i++)
        experts[i] = (i + rank) % DIFFER_E;
    const epo_routing r = config_routing(DIFFER_T, DIFFER_K, experts, NULL);
    const epo_layer_config l = differ_layer(kind, rank == 1, memory[0], memory[1]);
    bool made = e->layer_create(group, &l, &layer) == EPO_OK;
    for (int i = 0; i < 2 && made; i++)
        made = e->buffer_create(group, &b, &buffer[i]) == EPO_OK &&
               e->plan_create(buffer[i], &r, NULL, &plan[i]) == EPO_OK;
    const epo_status status =
        made ? differ_pass(e, kind, rank == 1, group, layer, plan, memory[2], &saved) : EPO_E_STATE;
    const bool told =
        status == (kind == DIFFER_NOT ? EPO_OK : EPO_E_PEER) &&
        (kind == DIFFER_NOT ||
         (strstr(e->error(), "the ranks disagree in ") != NULL &&
          strstr(e->error(), differ_said[kind]) != NULL &&
          strstr(e->error(), "on rank 0") != NULL && strstr(e->error(), "on rank 1") != NULL));
    if (!told && ++wrong > 0)
        fprintf(stderr, "rank %d, kind %d: status %d [%s]\n", rank, (int)kind, (int)status,
                e->error());
    e->saved_release(saved);
    for (int i = 0; i < 2; i++)
        e->plan_release(plan[i]);
    wrong += e->layer_destroy(layer) == EPO_OK ? 0 : 1;
    for (int i = 0; i < 2; i++)
        (void)e->buffer_destroy(buffer[i]);
    wrong += e->group_destroy(group) == EPO_OK ? 0 : 1;
    for (int i = 0; i < 3; i++)
        free(memory[i]);
    return wrong;
}

#endif
