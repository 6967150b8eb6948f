/* SPDX-License-Identifier: Apache-2.0
 *
 * own.c - layers whose experts are a function of the caller's.  Its rows are always
 * expanded (zero between the experts), forward's are kept for the backward pass, and
 * each call is one operation: on CUDA it enqueues, on the host it runs on the queue's
 * thread.
 */
#include "moe/pass.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* A call, kept until it has run. */
struct moe_own {
    epo_layer *layer;
    epo_expert_call call;
};

static epo_status run_own(void *ctx, epo_stream stream) {
    moe_own *own = ctx;
    const epo_layer_config *c = &own->layer->config;
    own->call.stream = stream;
    epo_status status = c->expert(c->ctx, &own->call);
    if (status == EPO_OK)
        return EPO_OK;
    /* On a queue's thread nobody takes a status, and no peer waits in a flush: the group
     * ends here. */
    epo_group *g = own->layer->group;
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "rank %d: the caller's experts returned %s", g->rank,
             epo_fail_name(status));
    g->ops->abort(g->be, status, text);
    return epo_fail(status, "%s", text);
}

static void call_own(void *ctx) { (void)run_own(ctx, NULL); }

/* On the calling thread. */
static epo_status run_here(void *ctx, epo_stream stream) {
    epo_group *g = ((moe_own *)ctx)->layer->group;
    const moe_within was = moe_group_out(g, MOE_IN_EXPERT);
    const epo_status status = run_own(ctx, stream);
    moe_group_back(g, was);
    return status;
}

static epo_status issue(epo_queue *queue, moe_own *own, const epo_deps *deps) {
    const epo_backend_ops *ops = own->layer->group->ops;
    return ops->run != NULL ? ops->run(queue, run_here, own, deps)
                            : ops->call(queue, call_own, own, deps);
}

/* Those of a pass, by chunk, and one for the weight gradients. */
static moe_own *make_calls(moe_pass *p, epo_layer *layer) {
    moe_own *own = calloc((size_t)p->chunks + 1, sizeof *own);
    if (own == NULL && p->status == EPO_OK)
        p->status = epo_fail(EPO_E_NOMEM, "memory: need %zu bytes for %d calls of experts",
                             ((size_t)p->chunks + 1) * sizeof *own, p->chunks);
    for (int c = 0; own != NULL && c <= p->chunks; c++)
        own[c].layer = layer;
    return own;
}

static void fill_call(const moe_pass *p, moe_own *own, int c, epo_expert_phase phase) {
    const epo_plan *plan = p->plan;
    own[c].call = (epo_expert_call){
        .size = sizeof(epo_expert_call),
        .phase = phase,
        .first_expert = moe_pass_first_expert(p, c),
        .experts = moe_pass_first_expert(p, c + 1) - moe_pass_first_expert(p, c),
        .row = moe_pass_first_row(p, c),
        .rows = moe_pass_first_row(p, c + 1) - moe_pass_first_row(p, c),
        .first = plan->op_first,
        .count = plan->op_count,
        .cpu_first = plan->first,
        .cpu_count = plan->count,
        .weights = plan->weight,
        .microbatch = own[c].layer->microbatch,
    };
}

void moe_own_forward(moe_pass *p, epo_layer *l, int c, epo_saved *saved, void *rows, void *out) {
    epo_deps deps = moe_deps("experts", EPO_INTERVAL_COMPUTE, c);
    if (c == 0 && saved->own == NULL)
        saved->own = make_calls(p, l);
    moe_pass_expand(p, c, rows);
    if (p->status != EPO_OK)
        return;
    fill_call(p, saved->own, c, EPO_EXPERT_FORWARD);
    saved->own[c].call.x = rows;
    saved->own[c].call.y = out;
    deps.signal = p->group->rows;
    p->status = issue(moe_pass_lane(p, c), &saved->own[c], &deps);
}

void moe_own_backward(moe_pass *p, epo_layer *l, int c, moe_wgrad *w, void *dx, float *dweight) {
    epo_group *g = p->group;
    epo_queue *lane = moe_pass_lane(p, c);
    epo_deps deps = moe_deps("experts'", EPO_INTERVAL_COMPUTE, c);
    epo_deps ready = moe_deps("experts'", EPO_INTERVAL_COMPUTE, c);
    if (c == 0 && w->own == NULL)
        w->own = make_calls(p, l);
    moe_pass_expand(p, c, w->dy.ptr);
    if (p->status != EPO_OK)
        return;
    fill_call(p, w->own, c, EPO_EXPERT_DGRAD);
    epo_expert_call *call = &w->own[c].call;
    call->x = w->x.ptr;
    call->dy = w->dy.ptr;
    call->dx = dx;
    call->dweights = dweight;
    deps.signal = g->rows;
    p->status = issue(lane, &w->own[c], &deps);
    ready.signal = lane == g->odd && g->odd != NULL ? g->odd_grad : g->grad;
    if (p->status == EPO_OK)
        p->status = g->ops->zero(lane, NULL, 0, &ready);
    w->own_last = p->chunks;
}

epo_status moe_own_wgrad(moe_wgrad *w, const epo_deps *deps) {
    const epo_plan *plan = w->plan;
    moe_own *own = &w->own[w->own_last];
    own->call = (epo_expert_call){
        .size = sizeof(epo_expert_call),
        .phase = EPO_EXPERT_WGRAD,
        .experts = w->layer->local,
        .rows = plan->rows,
        .first = plan->op_first,
        .count = plan->op_count,
        .cpu_first = plan->first,
        .cpu_count = plan->count,
        .x = w->x.ptr,
        .weights = plan->weight,
        .dy = w->dy.ptr,
        .microbatch = w->microbatch,
    };
    return issue(w->queue, own, deps);
}
