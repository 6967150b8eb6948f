/* SPDX-License-Identifier: Apache-2.0
 *
 * experts.c - the expert FFN of a pass, chunk by chunk.
 *
 * Order of issue: all of the dispatch first, then what fills the time until its
 * first chunk is here, then each chunk's experts and at once its way back.
 */
#include "moe/pass.h"

/* One product of the chunk's experts after `deps`' waits, and, if `act` is not NULL,
 * the activation behind it; `signal` comes at the end. */
static void product(moe_pass *p, const epo_layer *l, int chunk, const epo_gemm *shape,
                    const epo_swiglu *act, epo_deps *deps, epo_event *signal) {
    const epo_backend_ops *ops = p->group->ops;
    const epo_plan *plan = p->plan;
    epo_gemm g = *shape;
    epo_swiglu a = {0};
    bool fused = act != NULL && ops->info(p->group->be)->fused;
    g.type = g.c_type = l->config.type;
    g.row_first = plan->op_first;
    g.row_count = plan->op_count;
    g.cpu_first = plan->first;
    g.cpu_count = plan->count;
    g.first = moe_pass_first_expert(p, chunk);
    g.count = moe_pass_first_expert(p, chunk + 1) - g.first;
    if (act != NULL) {
        a = *act;
        a.w = plan->weight;
        a.row = moe_pass_first_row(p, chunk);
        a.rows = moe_pass_first_row(p, chunk + 1) - a.row;
        a.ffn = l->config.ffn;
        a.type = l->config.type;
    }
    g.beside = p->chunks > 1 || p->beside;
    g.act = fused ? &a : NULL;
    deps->signal = act == NULL || fused ? signal : NULL;
    if (g.keep != NULL)
        p->group->stats.local_bytes +=
            (moe_pass_first_row(p, chunk + 1) - moe_pass_first_row(p, chunk)) *
            p->buffer->row_bytes;
    if (p->status == EPO_OK)
        p->status = ops->gemm(moe_pass_lane(p, chunk), &g, deps);
    if (act == NULL || fused || p->status != EPO_OK)
        return;
    epo_deps behind = moe_deps("swiglu", EPO_INTERVAL_COMPUTE, chunk);
    behind.signal = signal;
    p->status = ops->swiglu(moe_pass_lane(p, chunk), &a, &behind);
}

void *moe_product_keeps(const moe_pass *p, const epo_layer *l, epo_gemm *shape, void *dst) {
    const epo_group *g = p->group;
    const epo_plan *plan = p->plan;
    const epo_swiglu act = {.ffn = l->config.ffn, .type = l->config.type};
    epo_gemm all = *shape;
    all.act = &act; /* FORWARD: with it the product may be another kernel's */
    all.type = all.c_type = l->config.type;
    all.row_first = plan->op_first;
    all.row_count = plan->op_count;
    all.cpu_first = plan->first;
    all.cpu_count = plan->count;
    all.count = l->local;
    all.keep = dst;
    if (dst == NULL || !moe_pass_in_place(p) || g->ops->gemm_keeps == NULL ||
        !g->ops->gemm_keeps(g->be, &all))
        return dst;
    shape->keep = dst;
    return NULL;
}

moe_products moe_products_forward(const epo_layer *l, const epo_saved *saved, void *a, void *out) {
    const int hidden = l->config.hidden, ffn = l->config.ffn;
    return (moe_products){
        .first = {.kind = EPO_GEMM_FORWARD,
                  .b = l->config.w1,
                  .c = saved->h.ptr,
                  .n = 2 * ffn,
                  .k = hidden},
        .second =
            {.kind = EPO_GEMM_FORWARD, .a = a, .b = l->config.w2, .c = out, .n = hidden, .k = ffn},
        .act = {.h = saved->h.ptr, .a = a},
    };
}

moe_products moe_products_backward(const epo_layer *l, const moe_wgrad *w, void *dx,
                                   float *dweight) {
    const int hidden = l->config.hidden, ffn = l->config.ffn;
    return (moe_products){
        .first = {.kind = EPO_GEMM_DGRAD, .b = l->config.w2, .c = w->a.ptr, .n = hidden, .k = ffn},
        .second = {.kind = EPO_GEMM_DGRAD,
                   .a = w->dh.ptr,
                   .b = l->config.w1,
                   .c = dx,
                   .n = 2 * ffn,
                   .k = hidden},
        .act = {.h = w->dh.ptr, .a = w->a.ptr, .da = w->a.ptr, .dh = w->dh.ptr, .dw = dweight},
    };
}

void moe_experts_forward(moe_pass *p, epo_layer *l, int c, epo_saved *saved, void *rows, void *a,
                         void *out) {
    if (p->custom) {
        moe_own_forward(p, l, c, saved, rows, out);
        return;
    }
    epo_group *g = p->group;
    bool last = c == p->chunks - 1;
    epo_deps up = moe_deps("fc1", EPO_INTERVAL_COMPUTE, c);
    epo_deps down = moe_deps("fc2", EPO_INTERVAL_COMPUTE, c);
    moe_products x = moe_products_forward(l, saved, a, out);
    bool odd = moe_pass_lane(p, c) == g->odd && g->odd != NULL;
    rows = moe_product_keeps(p, l, &x.first, rows);
    x.first.a = moe_pass_take(p, c, rows, &up);
    product(p, l, c, &x.first, &x.act, &up, odd ? g->odd_used : g->used);
    if (last)
        moe_pass_taken(p, g->used, c > 0 ? g->odd_used : NULL);
    product(p, l, c, &x.second, NULL, &down, g->rows);
}

epo_status moe_layer_forward(epo_layer *layer, epo_plan *plan, const void *x, void *y,
                             epo_saved *saved, bool keep, epo_stream stream) {
    epo_group *g = layer->group;
    moe_forward_blocks b;
    moe_pass p;
    moe_pass_begin(&p, plan, plan->chunks, MOE_USES_DISPATCH | MOE_USES_COMBINE, stream);
    moe_tune_start(plan, MOE_TUNE_FORWARD);
    moe_forward_memory(&p, layer, saved, keep, &b);
    void *rows = saved->x.ptr != NULL ? saved->x.ptr : b.x.ptr;
    /* By what is the same on all ranks: one that got no rows has none to save. */
    p.singly = plan->singly && !p.custom && layer->config.saved != EPO_SAVE_TOKENS &&
               plan->way == EPO_WAY_STORES;
    if (plan->singly && !p.singly)
        moe_home_in_vain(g, p.custom                      ? "the experts are the caller's"
                            : plan->way == EPO_WAY_STORES ? "the layer saves tokens"
                                                          : "rows go by copy engines");
    moe_pass_dispatch(&p, x);
    if (p.status == EPO_OK)
        p.status = moe_wgrad_issue_delayed(g);
    bool chained = moe_chain_forward(&p, layer, saved, rows, b.a.ptr, b.out.ptr);
    for (int c = 0; c < p.chunks && p.status == EPO_OK; c++) {
        if (!chained)
            moe_experts_forward(&p, layer, c, saved, rows, b.a.ptr, b.out.ptr);
        moe_pass_return(&p, c, b.out.ptr, NULL);
    }
    if (chained) /* behind the ways back, which begin before the chain's end */
        moe_pass_taken(&p, g->used, NULL);
    moe_pass_finish(&p, y, NULL);
    moe_tune_stop(plan, MOE_TUNE_FORWARD);
    epo_status status = moe_pass_end(&p);
    saved->source = x;
    moe_forward_blocks_put(g, &b);
    return status;
}

void moe_experts_backward(moe_pass *p, epo_layer *l, int c, moe_wgrad *w, void *dx,
                          float *dweight) {
    if (p->custom) {
        moe_own_backward(p, l, c, w, dx, dweight);
        return;
    }
    epo_deps down = moe_deps("dgrad2", EPO_INTERVAL_COMPUTE, c);
    epo_deps up = moe_deps("dgrad1", EPO_INTERVAL_COMPUTE, c);
    moe_products x = moe_products_backward(l, w, dx, dweight);
    bool odd = moe_pass_lane(p, c) == p->group->odd && p->group->odd != NULL;
    void *dy = moe_product_keeps(p, l, &x.first, w->dy.ptr);
    x.first.a = moe_pass_take(p, c, dy, &down);
    product(p, l, c, &x.first, &x.act, &down, odd ? p->group->odd_grad : p->group->grad);
    if (c == p->chunks - 1)
        moe_pass_taken(p, p->group->grad, c > 0 ? p->group->odd_grad : NULL);
    product(p, l, c, &x.second, NULL, &up, p->group->rows);
}

/* The chunk's weight gradients, unless they are delayed or not wanted.  A backend
 * that works beside the CPU gets them in one piece behind the last chunk's way back,
 * which they hide. */
static void chunk_wgrad(moe_pass *p, epo_layer *l, int c, moe_wgrad *w) {
    epo_route_shape s = moe_plan_shape(p->plan);
    epo_ready ready = epo_ready_event(p->group->grad);
    if (p->status != EPO_OK || !moe_layer_trains(l) || p->custom || moe_saved_again(l) ||
        p->group->delay_wgrad || w->queue == p->group->compute)
        return;
    p->status = moe_wgrad_issue(w, epo_route_chunk_first(&s, c), epo_route_chunk_first(&s, c + 1),
                                &ready, c);
    if (p->status == EPO_OK && c == p->chunks - 1)
        p->status = moe_wgrad_issue_end(w);
}

void moe_backward_wgrad(moe_pass *p, epo_layer *l, moe_wgrad *w) {
    if (p->status == EPO_OK && moe_layer_trains(l) && !w->issued && !p->group->delay_wgrad)
        p->status = moe_wgrad_issue_whole(w);
}

/* After a pass: the entry runs later, has run, or is dropped. */
epo_status moe_backward_settle(moe_pass *p, epo_layer *l, moe_wgrad *w, epo_status status) {
    epo_group *g = p->group;
    if (status != EPO_OK || !moe_layer_trains(l)) {
        moe_wgrad_free(w);
        return status;
    }
    moe_wgrad_append(g, w);
    if (g->delay_wgrad) {
        moe_wgrad_retire(g, true);
        return moe_wgrad_limit(g);
    }
    if (!p->buffer->replays) /* else the pass's end was behind them */
        status = g->ops->stream_leave(g->be, g->fill_done, p->stream);
    if (status != EPO_OK)
        return moe_group_break(g, status);
    moe_wgrad_retire(g, false);
    moe_wgrad_tell(g, l);
    return EPO_OK;
}

epo_status moe_layer_backward(epo_layer *layer, epo_saved *saved, const void *dy, void *dx,
                              float *dweights, epo_stream stream) {
    epo_group *g = layer->group;
    epo_plan *plan = saved->plan;
    moe_block out = {NULL, 0}, dweight = {NULL, 0};
    moe_pass p;
    moe_pass_begin(&p, plan, plan->chunks, MOE_USES_DISPATCH | MOE_USES_COMBINE, stream);
    moe_tune_start(plan, MOE_TUNE_BACKWARD);
    moe_wgrad *w = moe_backward_memory(&p, layer, saved, &out, &dweight);
    if (w == NULL)
        return moe_pass_end(&p);
    p.tail = !g->overlap || g->delay_wgrad || !moe_layer_trains(layer) || plan->plain;
    p.lends = w->lends = !p.tail && !plan->buffer->replays && g->ops->info(g->be)->few &&
                         moe_plan_sums(plan) && plan->link == NULL && plan->way == EPO_WAY_STORES &&
                         !p.custom && !moe_saved_again(layer);
    p.sums_beside = p.lends || (!p.tail && !plan->buffer->replays && plan->link == NULL &&
                                !moe_group_reaches(g, plan->buffer->scope)); /* it has SMs anyway */
    moe_pass_dispatch(&p, dy);
    if (p.status == EPO_OK)
        p.status = moe_wgrad_issue_delayed(g);
    bool chained = moe_chain_backward(&p, layer, w, out.ptr, dweight.ptr);
    for (int c = 0; c < p.chunks && p.status == EPO_OK; c++) {
        if (!chained)
            moe_experts_backward(&p, layer, c, w, out.ptr, dweight.ptr);
        chunk_wgrad(&p, layer, c, w);
        if ((!g->overlap || plan->plain) && c == p.chunks - 1 && !moe_saved_again(layer))
            moe_backward_wgrad(&p, layer, w); /* serial: nothing is hidden */
        moe_pass_return(&p, c, out.ptr, dweight.ptr);
    }
    if (chained)
        moe_pass_taken(&p, g->grad, NULL);
    /* What came back is summed beside the weight gradients, which lend it SMs. */
    const bool beside = p.chained && moe_pass_in_place(&p) && !p.tail && !plan->buffer->replays &&
                        !moe_saved_again(layer) && moe_group_reaches(g, plan->buffer->scope);
    if (beside) {
        p.sums_beside = w->lends = true;
        w->lent = g->returned;
        moe_pass_sum(&p, dx, dweights);
    }
    moe_saved_restore(&p, layer, saved, w);
    moe_backward_wgrad(&p, layer, w);
    if (!beside)
        moe_pass_sum(&p, dx, dweights);
    moe_pass_summed(&p);
    moe_pass_let_go(&p, g->fill_done);
    moe_tune_stop(plan, MOE_TUNE_BACKWARD);
    epo_status status = moe_pass_end(&p);
    moe_pool_put(g, &out);
    moe_pool_put(g, &dweight);
    return moe_backward_settle(&p, layer, w, status);
}
