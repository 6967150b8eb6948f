/* SPDX-License-Identifier: Apache-2.0
 *
 * chain.c - the expert FFN of a pass, all chunks in one operation of the backend.
 */
#include "moe/pass.h"

/* flex: rows are expanded and summed beside the chain. */
static bool spreads(const moe_pass *p) {
    return p->plan->back != NULL && p->plan->link == NULL && moe_plan_sums(p->plan) && !p->custom &&
           p->tokens == NULL;
}

/* Both products of all chunks in one operation, where the backend has that for them.
 * With one chunk there is nothing to win but what the end of the first product leaves
 * idle, and serial passes keep to the plain products. */
static bool chain_fits(const moe_pass *p, const epo_chain *c) {
    epo_group *g = p->group;
    return g->ops->chain != NULL && g->overlap && p->chunks > 1 && p->chunks <= EPO_CHAIN_PARTS &&
           (moe_pass_in_place(p) || spreads(p)) && g->ops->chain_covers(g->be, c);
}

typedef struct chain_parts {
    epo_ready arrival[EPO_CHAIN_PARTS];
    epo_chain_part part[EPO_CHAIN_PARTS];
    epo_swiglu act;
} chain_parts;

/* The chain of a pass; its arrivals are not known yet. */
static epo_chain chain_make(const moe_pass *p, const epo_layer *l, const moe_products *x,
                            chain_parts *parts) {
    const epo_plan *plan = p->plan;
    epo_chain c = {.first = x->first, .second = x->second, .part = parts->part, .parts = p->chunks};
    epo_gemm *both[] = {&c.first, &c.second};
    for (int i = 0; i < 2; i++) {
        both[i]->type = both[i]->c_type = l->config.type;
        both[i]->row_first = plan->op_first;
        both[i]->row_count = plan->op_count;
        both[i]->cpu_first = plan->first;
        both[i]->cpu_count = plan->count;
    }
    parts->act = x->act;
    parts->act.w = plan->weight;
    parts->act.rows = plan->rows;
    parts->act.ffn = l->config.ffn;
    parts->act.type = l->config.type;
    c.first.act = &parts->act;
    for (int i = 0; i < p->chunks && i < EPO_CHAIN_PARTS; i++) {
        int e = moe_pass_first_expert(p, i);
        parts->part[i] = (epo_chain_part){.first = e,
                                          .count = moe_pass_first_expert(p, i + 1) - e,
                                          .ready = &parts->arrival[i],
                                          .done = p->group->part[i]};
    }
    return c;
}

/* What goes back, stored at its peers' by the chain itself. */
static epo_chain_direct direct_to(const moe_pass *p) {
    const epo_plan *plan = p->plan;
    const moe_slot *slot = &p->buffer->combine;
    return (epo_chain_direct){.window = p->buffer->window,
                              .rows = slot->rows,
                              .dweights = slot->extra,
                              .first = plan->returns_first,
                              .to = plan->returns_to,
                              .flag_offset = moe_pass_arrive(p, slot, p->chunks - 1),
                              .epoch = p->buffer->replays ? 0 : slot->use + 1,
                              .counter = moe_buffer_counter(p->buffer, slot->arrive)};
}

/* alltoall: could it be? */
static bool returns_direct(const moe_pass *p, epo_chain_direct *d) {
    const epo_plan *plan = p->plan;
    if (!plan->own_stays || plan->returns_first == NULL ||
        !moe_group_reaches(p->group, p->buffer->scope))
        return false;
    *d = direct_to(p);
    return true;
}

/* Nothing goes back chunk by chunk, and the chain begins when the peers' slots are free. */
static void issue_direct(moe_pass *p, epo_chain *c, epo_deps *deps) {
    moe_slot *slot = &p->buffer->combine;
    p->direct = true;
    c->hurry = false;
    moe_slot_next(p->buffer, slot);
    moe_deps_wait(deps,
                  moe_buffer_flag(p->buffer, slot->credit, slot->use - 1, "combine slot", -1));
}

void moe_chain_returned(moe_pass *p, const void *rows, const float *row_weight) {
    moe_cargo c = {.rows = rows,
                   .row_bytes = p->buffer->row_bytes,
                   .extra = row_weight,
                   .extra_bytes = sizeof(float)};
    epo_exchange x = moe_pass_load(p, moe_pass_homeward(p), 0, p->chunks, &c);
    moe_stats_exchange(p->group, MOE_BYTES_COMBINE, x.send, moe_cargo_rows(&x, &c), x.nsend);
}

/* True: the pass's products were issued, part[chunk] tells of each chunk's rows; `end`
 * is signalled when all is done.  `keep`: as dst of moe_pass_take; `spread`: where rows are
 * expanded, if they do not arrive at their place. */
static bool chain_issue(moe_pass *p, const epo_layer *l, moe_products *x, void *keep, void *spread,
                        const char *name, epo_event *end) {
    epo_group *g = p->group;
    epo_chain_direct direct;
    chain_parts parts;
    if (p->status != EPO_OK || p->chunks > EPO_CHAIN_PARTS)
        return false;
    keep = moe_product_keeps(p, l, &x->first, keep);
    epo_chain c = chain_make(p, l, x, &parts);
    c.first.a = moe_pass_in_place(p) ? moe_pass_take_all(p, parts.arrival) : spread;
    c.direct = returns_direct(p, &direct) ? &direct : NULL;
    bool fits = chain_fits(p, &c);
    if (!fits && c.direct != NULL) {
        c.direct = NULL;
        fits = chain_fits(p, &c);
    }
    if (!fits)
        return false;
    p->spread = !moe_pass_in_place(p);
    /* A copy inside the GPU takes the SMs that are left to exchanges, which do not go on
     * without where they go by SMs alone: behind the experts only the last one's way back is
     * in its way. */
    const bool beside = moe_group_reaches(g, p->buffer->scope);
    if (p->spread)
        moe_pass_spread(p, spread, parts.arrival);
    else if (beside)
        moe_pass_keep(p, keep, NULL);
    g->stats.local_bytes += x->first.keep != NULL ? p->plan->rows * p->buffer->row_bytes : 0;
    epo_deps deps = moe_deps(name, EPO_INTERVAL_COMPUTE, -1);
    deps.signal = end;
    c.lent = p->spread ? g->odd_used : g->sent; /* the last of the dispatch */
    c.hurry = p->tail && !p->spread;
    p->chained = true;
    for (int i = 0; c.direct != NULL && i < p->chunks; i++)
        parts.part[i].done = NULL;
    if (c.direct != NULL)
        issue_direct(p, &c, &deps);
    if (p->status == EPO_OK)
        p->status = g->ops->chain(g->compute, &c, &deps);
    if (!p->spread && !beside)
        moe_pass_keep(p, keep, end);
    return true;
}

/* flex in one chunk: each row goes home by itself from the second product, and its owner sums:
 * more bytes cross the link than with sums, but beside the product, and nothing is read again
 * before they do.  False: the products one by one, and an exchange behind them. */
static bool chain_home(moe_pass *p, const epo_layer *l, moe_products *x, void *rows) {
    epo_group *g = p->group;
    chain_parts parts;
    epo_chain_direct direct = direct_to(p);
    epo_chain c = chain_make(p, l, x, &parts);
    c.first.a = rows;
    c.direct = &direct;
    if (!g->ops->chain_covers(g->be, &c))
        return false;
    parts.part[0].done = NULL;
    if (p->near != NULL) {
        moe_near_expand_early(p, rows, &parts.arrival[0]);
    } else {
        moe_pass_expand(p, 0, rows);
        parts.part[0].ready = NULL;
    }
    p->chained = true;
    epo_deps deps = moe_deps("experts", EPO_INTERVAL_COMPUTE, -1);
    deps.signal = g->used;
    issue_direct(p, &c, &deps);
    if (p->status == EPO_OK)
        p->status = g->ops->chain(g->compute, &c, &deps);
    return true;
}

bool moe_chain_forward(moe_pass *p, const epo_layer *l, epo_saved *saved, void *rows, void *a,
                       void *out) {
    moe_products x = moe_products_forward(l, saved, a, out);
    if (p->singly)
        return p->status == EPO_OK && chain_home(p, l, &x, rows);
    return chain_issue(p, l, &x, saved->x.ptr, rows, "experts", p->group->used);
}

bool moe_chain_backward(moe_pass *p, const epo_layer *l, moe_wgrad *w, void *dx, float *dweight) {
    moe_products x = moe_products_backward(l, w, dx, dweight);
    return chain_issue(p, l, &x, w->dy.ptr, w->dy.ptr, "experts back", p->group->grad);
}
