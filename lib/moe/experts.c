/* SPDX-License-Identifier: Apache-2.0
 *
 * experts.c - the expert FFN of a pass, chunk by chunk.
 *
 * Order of issue: all of the dispatch first, then what fills the time until its
 * first chunk is here, then each chunk's experts and at once its way back.
 */
#include "moe/moe.h"

static void gemm(moe_pass *p, const epo_layer *l, int chunk, const epo_gemm *shape,
                 epo_event *signal, const char *name) {
    const epo_plan *plan = p->plan;
    epo_route_shape s = moe_buffer_shape(p->buffer, plan->top_k);
    epo_deps deps = moe_deps(name, EPO_INTERVAL_COMPUTE, chunk);
    deps.signal = signal;
    epo_gemm g = *shape;
    g.type = g.c_type = l->config.type;
    g.row_first = plan->op_first;
    g.row_count = plan->op_count;
    g.cpu_first = plan->first;
    g.cpu_count = plan->count;
    g.first = epo_route_chunk_first(&s, chunk);
    g.count = epo_route_chunk_first(&s, chunk + 1) - g.first;
    if (p->status == EPO_OK)
        p->status = p->group->ops->gemm(p->group->compute, &g, &deps);
}

static void swiglu(moe_pass *p, const epo_layer *l, int chunk, const epo_swiglu *arrays,
                   epo_event *signal) {
    epo_deps deps = moe_deps("swiglu", EPO_INTERVAL_COMPUTE, chunk);
    deps.signal = signal;
    epo_swiglu s = *arrays;
    s.w = p->plan->weight;
    s.row = moe_pass_first_row(p, chunk);
    s.rows = moe_pass_first_row(p, chunk + 1) - s.row;
    s.ffn = l->config.ffn;
    s.type = l->config.type;
    if (p->status == EPO_OK)
        p->status = p->group->ops->swiglu(p->group->compute, &s, &deps);
}

epo_status moe_layer_forward(epo_layer *layer, epo_plan *plan, const void *x, void *y,
                             epo_saved *saved, epo_stream stream) {
    epo_group *g = layer->group;
    int hidden = layer->config.hidden, ffn = layer->config.ffn;
    uint64_t size = moe_type_size(layer->config.type), rows = plan->rows;
    moe_block a = {NULL, 0}, out = {NULL, 0};
    moe_pass p;
    moe_pass_begin(&p, plan, plan->chunks, stream);
    moe_pass_get(&p, rows, (uint64_t)hidden * size, &saved->x);
    moe_pass_get(&p, rows, 2 * (uint64_t)ffn * size, &saved->h);
    moe_pass_get(&p, rows, (uint64_t)ffn * size, &a);
    moe_pass_get(&p, rows, (uint64_t)hidden * size, &out);
    moe_pass_dispatch(&p, x);
    if (p.status == EPO_OK)
        p.status = moe_wgrad_issue_delayed(g);
    epo_gemm fc1 = {.kind = EPO_GEMM_FORWARD,
                    .a = saved->x.ptr,
                    .b = layer->config.w1,
                    .c = saved->h.ptr,
                    .n = 2 * ffn,
                    .k = hidden};
    epo_gemm fc2 = {.kind = EPO_GEMM_FORWARD,
                    .a = a.ptr,
                    .b = layer->config.w2,
                    .c = out.ptr,
                    .n = hidden,
                    .k = ffn};
    epo_swiglu act = {.h = saved->h.ptr, .a = a.ptr};
    for (int c = 0; c < p.chunks && p.status == EPO_OK; c++) {
        moe_pass_expand(&p, c, saved->x.ptr);
        gemm(&p, layer, c, &fc1, NULL, "fc1");
        swiglu(&p, layer, c, &act, NULL);
        gemm(&p, layer, c, &fc2, g->rows, "fc2");
        moe_pass_return(&p, c, out.ptr, NULL);
    }
    moe_pass_finish(&p, y, NULL);
    epo_status status = moe_pass_end(&p);
    moe_pool_put(g, &a);
    moe_pool_put(g, &out);
    return status;
}

/* da overwrites nothing: `a` is made again in its place, dh in h's. */
static void chunk_backward(moe_pass *p, epo_layer *l, int c, moe_wgrad *w, void *dx,
                           float *dweight) {
    int hidden = l->config.hidden, ffn = l->config.ffn;
    epo_gemm dgrad2 = {.kind = EPO_GEMM_DGRAD,
                       .a = w->dy.ptr,
                       .b = l->config.w2,
                       .c = w->a.ptr,
                       .n = hidden,
                       .k = ffn};
    epo_gemm dgrad1 = {.kind = EPO_GEMM_DGRAD,
                       .a = w->dh.ptr,
                       .b = l->config.w1,
                       .c = dx,
                       .n = 2 * ffn,
                       .k = hidden};
    epo_swiglu act = {
        .h = w->dh.ptr, .a = w->a.ptr, .da = w->a.ptr, .dh = w->dh.ptr, .dw = dweight};
    moe_pass_expand(p, c, w->dy.ptr);
    gemm(p, l, c, &dgrad2, NULL, "dgrad2");
    swiglu(p, l, c, &act, p->group->grad);
    gemm(p, l, c, &dgrad1, p->group->rows, "dgrad1");
}

/* The chunk's weight gradients, unless they are delayed or not wanted. */
static void chunk_wgrad(moe_pass *p, epo_layer *l, int c, moe_wgrad *w) {
    epo_route_shape s = moe_buffer_shape(p->buffer, p->plan->top_k);
    epo_ready ready = epo_ready_event(p->group->grad);
    if (p->status != EPO_OK || l->config.dw1 == NULL || p->group->delay_wgrad)
        return;
    p->status = moe_wgrad_issue(w, epo_route_chunk_first(&s, c), epo_route_chunk_first(&s, c + 1),
                                &ready, c);
    if (p->status == EPO_OK && c == p->chunks - 1)
        p->status = moe_wgrad_issue_end(w);
}

/* After a pass: the entry runs later, has run, or is dropped. */
static epo_status settle_wgrad(moe_pass *p, epo_layer *l, moe_wgrad *w, epo_status status) {
    epo_group *g = p->group;
    if (status != EPO_OK || l->config.dw1 == NULL) {
        moe_wgrad_free(w);
        return status;
    }
    moe_wgrad_append(g, w);
    if (g->delay_wgrad) {
        moe_wgrad_retire(g, true);
        return moe_wgrad_limit(g);
    }
    status = g->ops->stream_leave(g->be, g->fill_done, p->stream);
    if (status != EPO_OK)
        return moe_group_break(g, status);
    moe_wgrad_retire(g, false);
    return EPO_OK;
}

epo_status moe_layer_backward(epo_layer *layer, epo_saved *saved, const void *dy, void *dx,
                              float *dweights, epo_stream stream) {
    epo_group *g = layer->group;
    epo_plan *plan = saved->plan;
    uint64_t size = moe_type_size(layer->config.type), rows = plan->rows;
    moe_block out = {NULL, 0}, dweight = {NULL, 0};
    moe_wgrad *w = NULL;
    moe_pass p;
    moe_pass_begin(&p, plan, plan->chunks, stream);
    if (p.status == EPO_OK)
        p.status = moe_wgrad_make(layer, plan, &w);
    if (p.status != EPO_OK)
        return moe_pass_end(&p);
    w->x = saved->x;
    w->dh = saved->h;
    saved->x = saved->h = (moe_block){NULL, 0};
    moe_pass_get(&p, rows, (uint64_t)layer->config.hidden * size, &w->dy);
    moe_pass_get(&p, rows, (uint64_t)layer->config.ffn * size, &w->a);
    moe_pass_get(&p, rows, (uint64_t)layer->config.hidden * size, &out);
    moe_pass_get(&p, rows, sizeof(float), &dweight);
    moe_pass_dispatch(&p, dy);
    if (p.status == EPO_OK)
        p.status = moe_wgrad_issue_delayed(g);
    for (int c = 0; c < p.chunks && p.status == EPO_OK; c++) {
        chunk_backward(&p, layer, c, w, out.ptr, dweight.ptr);
        chunk_wgrad(&p, layer, c, w);
        moe_pass_return(&p, c, out.ptr, dweight.ptr);
    }
    moe_pass_finish(&p, dx, dweights);
    epo_status status = moe_pass_end(&p);
    moe_pool_put(g, &out);
    moe_pool_put(g, &dweight);
    return settle_wgrad(&p, layer, w, status);
}
