/* SPDX-License-Identifier: Apache-2.0 */
#include "moe/pass.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { SPARE_SAVED = 64, MAX_WIDTH = 1 << 24 };

/* ---- layer --------------------------------------------------------------- */

static epo_status check_pointers(const epo_layer_config *c) {
    if (c->expert != NULL && (c->w1 != NULL || c->w2 != NULL || c->dw1 != NULL || c->dw2 != NULL))
        return epo_fail(EPO_E_ARG, "layer: expert and weights are given; experts of the caller's "
                                   "have their own, leave w1, w2, dw1 and dw2 NULL");
    if (c->expert != NULL)
        return EPO_OK;
    if (c->w1 == NULL || c->w2 == NULL)
        return epo_fail(EPO_E_ARG, "layer: w1 is %s, w2 is %s; give both weights",
                        c->w1 == NULL ? "NULL" : "given", c->w2 == NULL ? "NULL" : "given");
    if ((c->dw1 == NULL) != (c->dw2 == NULL))
        return epo_fail(EPO_E_ARG, "layer: dw1 is %s, dw2 is %s; give both gradients or none",
                        c->dw1 == NULL ? "NULL" : "given", c->dw2 == NULL ? "NULL" : "given");
    return EPO_OK;
}

static epo_status check_layer(const epo_group *g, const epo_layer_config *c) {
    const epo_backend_info *info = g->ops->info(g->be);
    epo_status status = moe_check_experts(c->experts, g->ranks);
    if (status == EPO_OK)
        status = moe_check_range("hidden", c->hidden, 1, MAX_WIDTH);
    if (status == EPO_OK && c->expert == NULL)
        status = moe_check_range("ffn", c->ffn, 1, MAX_WIDTH);
    if (status == EPO_OK)
        status = moe_check_type(info, "type", c->type);
    if (status == EPO_OK && c->dw1 != NULL)
        status = moe_check_type(info, "wgrad_type", c->wgrad_type);
    if (status == EPO_OK && c->dw1 != NULL && c->wgrad_type != EPO_F32 && c->wgrad_type != c->type)
        status = epo_fail(EPO_E_ARG, "wgrad_type: found %d, allowed EPO_F32 or the layer's type %d",
                          (int)c->wgrad_type, (int)c->type);
    if (status == EPO_OK)
        status = moe_check_range("saved", c->saved, EPO_SAVE_ROWS, EPO_SAVE_NOTHING);
    if (status == EPO_OK && c->expert != NULL && c->saved != EPO_SAVE_ROWS)
        status = epo_fail(EPO_E_ARG,
                          "saved: found %d, experts of the caller's are given "
                          "EPO_SAVE_ROWS alone",
                          (int)c->saved);
    return status == EPO_OK ? check_pointers(c) : status;
}

epo_status moe_layer_create(epo_group *group, const epo_layer_config *config, epo_layer **out) {
    if (group == NULL || out == NULL)
        return epo_fail(EPO_E_ARG, "layer_create: group or out is NULL");
    epo_layer_config c = EPO_LAYER_CONFIG_INIT;
    epo_status status = moe_group_ok(group);
    if (status == EPO_OK)
        status =
            moe_input(&c, sizeof c, config, offsetof(epo_layer_config, dw1), "epo_layer_config");
    if (status == EPO_OK)
        status = check_layer(group, &c);
    if (status != EPO_OK)
        return status;
    epo_layer *layer = calloc(1, sizeof *layer);
    if (layer == NULL)
        return epo_fail(EPO_E_NOMEM, "memory: need %zu bytes for a layer", sizeof *layer);
    layer->object.engine = &moe_engine;
    layer->group = group;
    layer->config = c;
    layer->local = c.experts / group->ranks;
    group->layers++;
    *out = layer;
    return EPO_OK;
}

epo_status moe_layer_destroy(epo_layer *layer) {
    if (layer == NULL)
        return EPO_OK;
    epo_group *g = layer->group;
    const epo_status outside = moe_group_outside(g, "layer_destroy");
    if (outside != EPO_OK)
        return outside;
    if (layer->saved > 0)
        return epo_fail(EPO_E_STATE,
                        "layer_destroy: %d saved passes of the layer still exist; call "
                        "epo_backward or epo_saved_release on each first",
                        layer->saved);
    epo_status status = layer->wgrads > 0 ? moe_wgrad_settle(g, layer) : EPO_OK;
    g->layers--;
    free(layer);
    return moe_gone(status);
}

epo_status moe_layer_wgrad_flush(epo_layer *layer, epo_stream stream) {
    if (layer == NULL)
        return epo_fail(EPO_E_ARG, "layer_wgrad_flush: layer is NULL");
    return moe_wgrad_flush(layer->group, layer, stream);
}

epo_status moe_layer_wgrad_begin(epo_layer *layer) {
    if (layer == NULL)
        return epo_fail(EPO_E_ARG, "layer_wgrad_begin: layer is NULL");
    if (layer->config.dw1 == NULL)
        return epo_fail(EPO_E_STATE,
                        "layer_wgrad_begin: the layer has no dw1 and dw2, which "
                        "would be written; %s",
                        layer->config.expert != NULL ? "its gradients are its experts' own"
                                                     : "give them to epo_layer_create");
    layer->wgrad_fresh = true;
    return EPO_OK;
}

epo_status moe_group_wgrad_flush(epo_group *group, epo_stream stream) {
    if (group == NULL)
        return epo_fail(EPO_E_ARG, "group_wgrad_flush: group is NULL");
    return moe_wgrad_flush(group, NULL, stream);
}

/* ---- saved --------------------------------------------------------------- */

/* Handles are used again oldest first and only when many are spare, so that a
 * handle used twice is found instead of standing for another pass. */
static epo_saved *take_saved(epo_group *g) {
    epo_saved *saved = NULL;
    if (g->nspare >= SPARE_SAVED) {
        saved = g->spare;
        g->spare = saved->next;
        g->spare_tail = g->spare != NULL ? g->spare_tail : NULL;
        g->nspare--;
        memset(saved, 0, sizeof *saved);
    } else {
        saved = calloc(1, sizeof *saved);
    }
    return saved;
}

static epo_status make_saved(epo_layer *layer, epo_plan *plan, epo_saved **out) {
    epo_saved *saved = take_saved(layer->group);
    if (saved == NULL)
        return epo_fail(EPO_E_NOMEM, "memory: need %zu bytes for a saved pass", sizeof *saved);
    saved->object.engine = &moe_engine;
    saved->live = true;
    saved->layer = layer;
    saved->plan = plan;
    moe_plan_retain(plan);
    layer->saved++;
    layer->group->saved++;
    *out = saved;
    return EPO_OK;
}

void moe_saved_drop(epo_saved *saved) {
    epo_group *g = saved->layer->group;
    moe_pool_put(g, &saved->x);
    moe_pool_put(g, &saved->h);
    moe_pool_put(g, &saved->tokens);
    free(saved->own);
    saved->own = NULL;
    moe_plan_release(saved->plan);
    saved->plan = NULL;
    saved->live = false;
    saved->next = NULL;
    saved->layer->saved--;
    g->saved--;
    if (g->spare_tail != NULL)
        g->spare_tail->next = saved;
    else
        g->spare = saved;
    g->spare_tail = saved;
    g->nspare++;
}

void moe_saved_release(epo_saved *saved) {
    if (saved != NULL && saved->live)
        moe_saved_drop(saved);
}

/* ---- forward, backward --------------------------------------------------- */

epo_status moe_layer_fits(const epo_layer *l, const epo_plan *plan) {
    const epo_buffer *b = plan->buffer;
    if (b->group != l->group)
        return epo_fail(EPO_E_ARG, "layer and plan belong to different groups");
    if (l->config.experts != b->all_experts || l->config.hidden != b->hidden ||
        l->config.type != b->type)
        return epo_fail(EPO_E_ARG,
                        "the layer has %d experts, hidden %d, type %d; the plan's buffer has %d, "
                        "%d, %d; make a buffer for this layer",
                        l->config.experts, l->config.hidden, (int)l->config.type, b->all_experts,
                        b->hidden, (int)b->type);
    if (b->replays && l->config.saved == EPO_SAVE_NOTHING)
        return epo_fail(EPO_E_UNSUPPORTED, "the layer saves EPO_SAVE_NOTHING and the plan's buffer "
                                           "is for graphs: rows sent again in the same call are "
                                           "not captured; use EPO_SAVE_ROWS");
    if (l->config.saved == EPO_SAVE_TOKENS && plan->back == NULL)
        return epo_fail(EPO_E_ARG, "the layer saves EPO_SAVE_TOKENS, but alltoall's rows come one "
                                   "an expert; use flex, EPO_SAVE_ROWS or EPO_SAVE_NOTHING");
    return EPO_OK;
}

static epo_status check_forward(const epo_layer *layer, const epo_plan *plan, const void *x,
                                const void *y) {
    if (layer == NULL || plan == NULL)
        return epo_fail(EPO_E_ARG, "forward: %s is NULL", layer == NULL ? "layer" : "plan");
    if (plan->tokens > 0 && (x == NULL || y == NULL))
        return epo_fail(EPO_E_ARG, "forward: x is %s, y is %s; the plan has %d tokens",
                        x == NULL ? "NULL" : "given", y == NULL ? "NULL" : "given", plan->tokens);
    return moe_layer_fits(layer, plan);
}

epo_status moe_forward_open(epo_layer *layer, epo_plan *plan, const void *x, const void *y,
                            epo_saved **saved) {
    if (layer == NULL && plan == NULL)
        return epo_fail(EPO_E_ARG, "forward: layer and plan are NULL");
    epo_group *g = layer != NULL ? layer->group : plan->buffer->group;
    epo_status status = check_forward(layer, plan, x, y);
    if (status == EPO_OK)
        status = moe_group_ok(g);
    status = moe_layer_turn(g, EPO_TURN_FORWARD, layer, plan, status);
    if (status == EPO_OK && (status = make_saved(layer, plan, saved)) != EPO_OK)
        status = moe_group_break(g, status); /* no wrong argument: the others learn why */
    return status;
}

epo_status moe_forward(epo_layer *layer, epo_plan *plan, const void *x, void *y, epo_saved **saved,
                       epo_stream stream) {
    double start = moe_stats_now();
    epo_saved *s = NULL;
    epo_status status = moe_forward_open(layer, plan, x, y, &s);
    if (status != EPO_OK)
        return status;
    epo_group *g = layer->group;
    status = moe_layer_forward(layer, plan, x, y, s, saved != NULL, stream);
    if (status != EPO_OK || saved == NULL)
        moe_saved_drop(s);
    if (status != EPO_OK)
        return status;
    if (saved != NULL)
        *saved = s;
    g->stats.forward_calls++;
    g->stats.call_s += moe_stats_now() - start;
    moe_wgrad_retire(g, true);
    return EPO_OK;
}

static epo_status check_backward(const epo_layer *layer, const epo_saved *saved, const void *dy,
                                 const void *dx) {
    if (saved == NULL)
        return epo_fail(EPO_E_ARG, "backward: saved is NULL; give what epo_forward returned");
    if (!saved->live)
        return epo_fail(EPO_E_STATE, "backward: saved was used before, by epo_backward or "
                                     "epo_saved_release; a forward's saved serves once");
    if (layer == NULL)
        return epo_fail(EPO_E_ARG, "backward: layer is NULL");
    if (layer != saved->layer)
        return epo_fail(EPO_E_ARG, "backward: saved comes from another layer's forward");
    int tokens = saved->plan->tokens;
    if (tokens > 0 && (dy == NULL || dx == NULL))
        return epo_fail(EPO_E_ARG, "backward: dy is %s, dx is %s; the plan has %d tokens",
                        dy == NULL ? "NULL" : "given", dx == NULL ? "NULL" : "given", tokens);
    return EPO_OK;
}

epo_status moe_backward_open(epo_layer *layer, epo_saved *saved, const void *dy, const void *dx) {
    bool live = saved != NULL && saved->live;
    epo_group *g = layer != NULL ? layer->group : live ? saved->layer->group : NULL;
    epo_status status = check_backward(layer, saved, dy, dx);
    if (status == EPO_OK)
        status = moe_group_ok(g);
    if (g != NULL)
        status = moe_layer_turn(g, EPO_TURN_BACKWARD, layer, live ? saved->plan : NULL, status);
    return status;
}

epo_status moe_backward(epo_layer *layer, epo_saved *saved, const void *dy, void *dx,
                        float *dweights, epo_stream stream) {
    double start = moe_stats_now();
    bool live = saved != NULL && saved->live;
    epo_status status = moe_backward_open(layer, saved, dy, dx);
    if (status == EPO_OK) {
        status = moe_layer_backward(layer, saved, dy, dx, dweights, stream);
        layer->microbatch++;
    }
    if (live)
        moe_saved_drop(saved);
    if (status == EPO_OK) {
        layer->group->stats.backward_calls++;
        layer->group->stats.call_s += moe_stats_now() - start;
    }
    return status;
}
