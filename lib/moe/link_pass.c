/* SPDX-License-Identifier: Apache-2.0
 *
 * link_pass.c - flex across nodes, on its way.
 *
 * Out: a token's row to its relay on each other node, by the chunk that first uses it there;
 * the node's exchange of a chunk waits for what has come for that chunk, and sends it on from
 * the relay slot, where this rank's own rows lie in front.  Home: what the node's exchange of
 * a chunk completes is summed at the relay and sent to the owner, who sums his own node's part
 * and adds up one row of each node, in the order of nodes.
 *
 * All that goes to other nodes, credits too, goes by one queue in the same order everywhere.
 */
#include "moe/link.h"

static void issue(moe_pass *p, const epo_exchange *x, const moe_cargo *c, moe_bytes kind,
                  epo_deps *deps) {
    epo_group *g = p->group;
    moe_stats_exchange(g, kind, x->send, moe_cargo_rows(x, c), x->nsend);
    if (p->status == EPO_OK)
        p->status = g->ops->exchange(g->link, x, deps);
}

const void *moe_link_dispatch(moe_pass *p, const void *src) {
    epo_buffer *b = p->buffer;
    moe_slot *slot = &b->relay;
    const moe_cargo c = {.rows = src, .row_bytes = b->wire_bytes, .to = slot->rows};
    slot->use++;
    for (int i = 0; i < p->chunks && p->status == EPO_OK; i++) {
        epo_exchange x = moe_pass_load(p, &p->link_dispatch, i, i + 1, &c);
        epo_deps deps = moe_deps("to nodes", EPO_INTERVAL_COMM, i);
        x.scope = EPO_SCOPE_LINK;
        x.flag_offset = moe_pass_arrive(p, slot, i);
        x.epoch = slot->use;
        if (i == 0 && b->wire != EPO_WIRE_ROWS)
            moe_deps_wait(&deps, epo_ready_event(p->group->rows));
        if (i == 0)
            moe_deps_wait(&deps,
                          moe_buffer_link_flag(b, slot->credit, slot->use - 1, "node slot", -1));
        issue(p, &x, &c, MOE_BYTES_DISPATCH, &deps);
    }
    return moe_buffer_at(b, slot->rows);
}

epo_ready moe_link_arrived(const moe_pass *p, int chunk) {
    const moe_slot *slot = &p->buffer->relay;
    return moe_buffer_link_flag(p->buffer, moe_pass_arrive(p, slot, chunk), slot->use,
                                "chunk of nodes", chunk);
}

void moe_link_sent_on(moe_pass *p) {
    moe_pass_credit(p, &p->buffer->relay, EPO_SCOPE_LINK, p->group->sent, NULL, NULL);
}

/* Sums of the tokens that chunk `c` completes, and their slots' weights. */
static void sum_relayed(moe_pass *p, int chunk, bool weights) {
    epo_group *g = p->group;
    const epo_buffer *b = p->buffer;
    const moe_link *l = p->plan->link;
    const uint64_t k = (uint64_t)p->plan->top_k;
    const uint64_t first = l->back_first[moe_pass_plan_chunk(p, chunk)];
    const uint64_t rows = l->back_first[moe_pass_plan_chunk(p, chunk + 1)] - first;
    const epo_rows_reduce reduce = {.dst = (char *)p->home.ptr + first * b->row_bytes,
                                    .src = moe_buffer_at(b, b->combine.rows),
                                    .index = l->back_sum + first * (uint64_t)p->plan->sum_width,
                                    .rows = rows,
                                    .width = p->plan->sum_width,
                                    .elements = b->hidden,
                                    .type = b->type};
    const epo_rows_gather gather = {.dst = (float *)p->home_weight.ptr + first * k,
                                    .src = moe_buffer_at(b, b->combine.extra),
                                    .index = l->back_weight + first * k,
                                    .rows = weights ? rows * k : 0,
                                    .row_bytes = sizeof(float)};
    epo_deps deps = moe_deps("sum for nodes", EPO_INTERVAL_LOCAL, chunk);
    epo_deps gather_deps = moe_deps("dweights", EPO_INTERVAL_LOCAL, chunk);
    moe_deps_wait(&deps, moe_buffer_flag(b, moe_pass_arrive(p, &b->combine, chunk), b->combine.use,
                                         "combine chunk", chunk));
    g->stats.local_bytes += ((uint64_t)p->plan->sum_width + 1) * rows * b->row_bytes;
    if (p->status == EPO_OK)
        p->status = g->ops->reduce(g->link, &reduce, &deps);
    if (p->status == EPO_OK)
        p->status = g->ops->gather(g->link, &gather, &gather_deps);
}

void moe_link_return(moe_pass *p, int chunk, bool weights) {
    epo_buffer *b = p->buffer;
    moe_slot *slot = &b->home;
    const bool last = chunk == p->chunks - 1;
    if (p->status == EPO_OK)
        sum_relayed(p, chunk, weights);
    const moe_cargo c = {.rows = p->home.ptr,
                         .row_bytes = b->row_bytes,
                         .to = slot->rows,
                         .extra = weights ? p->home_weight.ptr : NULL,
                         .extra_bytes = (uint64_t)p->plan->top_k * sizeof(float),
                         .extra_to = slot->extra};
    epo_exchange x = moe_pass_load(p, &p->link_combine, chunk, chunk + 1, &c);
    epo_deps deps = moe_deps("from nodes", EPO_INTERVAL_COMM, chunk);
    if (chunk == 0) {
        slot->use++;
        moe_deps_wait(&deps, moe_buffer_link_flag(b, slot->credit, slot->use - 1, "home slot", -1));
    }
    x.scope = EPO_SCOPE_LINK;
    x.flag_offset = moe_pass_arrive(p, slot, chunk);
    x.epoch = slot->use;
    deps.signal = last ? p->group->linked : NULL;
    issue(p, &x, &c, MOE_BYTES_COMBINE, &deps);
}

/* This node's part of each own token, beside what came from the others. */
static void sum_own(moe_pass *p, bool weights) {
    epo_group *g = p->group;
    const epo_buffer *b = p->buffer;
    const epo_plan *plan = p->plan;
    const uint64_t tokens = (uint64_t)plan->tokens;
    const epo_rows_reduce reduce = {.dst = moe_buffer_at(b, b->home.rows),
                                    .src = moe_buffer_at(b, b->combine.rows),
                                    .index = plan->sum,
                                    .rows = tokens,
                                    .width = plan->sum_width,
                                    .elements = b->hidden,
                                    .type = b->type};
    const epo_rows_gather gather = {.dst = moe_buffer_at(b, b->home.extra),
                                    .src = moe_buffer_at(b, b->combine.extra),
                                    .index = plan->slot_weight,
                                    .rows = weights ? tokens * (uint64_t)plan->top_k : 0,
                                    .row_bytes = sizeof(float)};
    epo_deps deps = moe_deps("sum of node", EPO_INTERVAL_LOCAL, -1);
    epo_deps gather_deps = moe_deps("dweights", EPO_INTERVAL_LOCAL, -1);
    moe_deps_wait(&deps, moe_buffer_flag(b, moe_pass_arrive(p, &b->combine, p->chunks - 1),
                                         b->combine.use, "combine chunk", p->chunks - 1));
    moe_deps_wait(&deps, epo_ready_event(g->sent));
    g->stats.local_bytes += ((uint64_t)plan->sum_width + 1) * tokens * b->row_bytes;
    p->status = g->ops->reduce(g->compute, &reduce, &deps);
    if (p->status == EPO_OK)
        p->status = g->ops->gather(g->compute, &gather, &gather_deps);
}

void moe_link_sum(moe_pass *p, void *y, float *slot_weight) {
    epo_group *g = p->group;
    const epo_buffer *b = p->buffer;
    const moe_link *l = p->plan->link;
    const moe_slot *slot = &b->home;
    const uint64_t tokens = (uint64_t)l->tokens;
    const int last = p->chunks - 1;
    const epo_rows_reduce reduce = {.dst = y,
                                    .src = moe_buffer_at(b, slot->rows),
                                    .index = l->sum,
                                    .rows = tokens,
                                    .width = l->nodes,
                                    .elements = b->hidden,
                                    .type = b->type};
    epo_deps deps = moe_deps("unpermute", EPO_INTERVAL_LOCAL, -1);
    moe_deps_wait(&deps, moe_buffer_link_flag(b, moe_pass_arrive(p, slot, last), slot->use,
                                              "chunk of nodes", last));
    moe_deps_wait(&deps, epo_ready_event(g->linked));
    if (p->keeps)
        moe_deps_wait(&deps, epo_ready_event(g->kept));
    deps.signal = p->done;
    deps.result = true;
    if (p->status == EPO_OK)
        sum_own(p, slot_weight != NULL);
    g->stats.local_bytes += ((uint64_t)l->nodes + 1) * tokens * b->row_bytes;
    if (p->status == EPO_OK)
        p->status = g->ops->reduce(g->compute, &reduce, &deps);
    if (slot_weight != NULL && p->status == EPO_OK) {
        const epo_rows_gather gather = {.dst = slot_weight,
                                        .src = moe_buffer_at(b, slot->extra),
                                        .index = l->weight,
                                        .rows = tokens * (uint64_t)p->plan->top_k,
                                        .row_bytes = sizeof(float)};
        epo_deps gather_deps = moe_deps("dweights", EPO_INTERVAL_LOCAL, -1);
        gather_deps.signal = p->done;
        gather_deps.result = true;
        p->status = g->ops->gather(g->compute, &gather, &gather_deps);
    }
    moe_pass_credit(p, slot, EPO_SCOPE_LINK, p->done, NULL, NULL);
}
