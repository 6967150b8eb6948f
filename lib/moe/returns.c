/* SPDX-License-Identifier: Apache-2.0
 *
 * returns.c - the experts' rows on their way back, and the sum that makes a token of them.
 */
#include "moe/link.h"

/* Beside weight gradients that leave it SMs. */
static bool returns_apart(const moe_pass *p, int chunk) {
    return p->lends && chunk == p->chunks - 1;
}

static epo_queue *sums_lane(const moe_pass *p, int chunk) {
    return returns_apart(p, chunk) ? p->group->comm
           : p->spread             ? p->group->compute
                                   : moe_pass_lane(p, chunk);
}

/* flex: all rows go back with the last chunk's. */
static bool returns_whole(const moe_pass *p) {
    return p->spread || (p->plan->back != NULL && p->buffer->replays);
}

/* flex: finished rows of the chunk (returns_whole: of all up to it), summed over a token's
 * slots. */
static void sum_back(moe_pass *p, int chunk, const void *rows, const float *row_weight) {
    epo_group *g = p->group;
    const epo_plan *plan = p->plan;
    const epo_buffer *b = p->buffer;
    const int from = moe_pass_plan_chunk(p, returns_whole(p) ? 0 : chunk);
    uint64_t k = (uint64_t)plan->top_k, first = plan->back_first[from];
    uint64_t n = plan->back_first[moe_pass_plan_chunk(p, chunk + 1)] - first;
    epo_rows_reduce reduce = {.dst = (char *)p->back.ptr + first * b->row_bytes,
                              .src = rows,
                              .index = plan->back + first * k,
                              .rows = n,
                              .width = plan->top_k,
                              .elements = b->hidden,
                              .type = b->type};
    epo_deps deps = moe_deps("reduce", EPO_INTERVAL_LOCAL, chunk);
    deps.signal = g->rows;
    g->stats.local_bytes += (k + 1) * n * b->row_bytes;
    if (row_weight != NULL) {
        epo_rows_gather gather = {.dst = (float *)p->back_weight.ptr + first * k,
                                  .src = row_weight,
                                  .index = plan->back + first * k,
                                  .rows = n * k,
                                  .row_bytes = sizeof(float)};
        epo_deps gather_deps = moe_deps("dweights", EPO_INTERVAL_LOCAL, chunk);
        if (plan->way == EPO_WAY_ENGINES) /* what goes back is complete */
            gather_deps.signal = g->rows;
        else if (chunk > 0 && moe_plan_sums(p->plan) &&
                 !returns_whole(p)) /* of the other lane's chunks */
            moe_deps_wait(&gather_deps, epo_ready_event(g->returned));
        if (returns_apart(p, chunk))
            moe_deps_wait(&gather_deps, epo_ready_event(p->spread ? g->grad : g->rows));
        p->status = g->ops->gather(sums_lane(p, chunk), &gather, &gather_deps);
    }
    if (p->status == EPO_OK && !moe_plan_sums(p->plan))
        p->status = g->ops->reduce(moe_pass_lane(p, chunk), &reduce, &deps);
}

moe_lane *moe_pass_homeward(moe_pass *p) { return p->singly ? &p->plan->homeward : &p->combine; }

void moe_pass_return(moe_pass *p, int chunk, const void *rows, const float *row_weight) {
    epo_group *g = p->group;
    epo_buffer *b = p->buffer;
    moe_slot *slot = &b->combine;
    uint64_t k = (uint64_t)p->plan->top_k;
    const bool flex = p->plan->back != NULL && !p->singly, last = chunk == p->chunks - 1;
    const bool sums = flex && moe_plan_sums(p->plan);
    const bool whole = returns_whole(p);
    if (whole && !last) /* all in one piece: nothing is left to hide it */
        return;
    if (flex && p->status == EPO_OK)
        sum_back(p, chunk, rows, row_weight);
    p->own = rows;
    p->own_weight = row_weight;
    if (p->status == EPO_OK && (chunk == 0 || whole))
        g->stats.padding_bytes += flex ? 0 : p->plan->padding.back * b->row_bytes;
    if (p->status == EPO_OK && p->direct && last)
        moe_chain_returned(p, rows, row_weight);
    if (p->status != EPO_OK || p->direct)
        return;
    moe_cargo c = {.rows = flex && !sums ? p->back.ptr : rows,
                   .back = sums ? p->plan->back : NULL,
                   .row_bytes = b->row_bytes,
                   .to = slot->rows,
                   .extra = row_weight == NULL ? NULL
                            : flex             ? p->back_weight.ptr
                                               : (const void *)row_weight,
                   .extra_bytes = (flex ? k : 1) * sizeof(float),
                   .extra_to = slot->extra};
    epo_exchange x = moe_pass_load(p, moe_pass_homeward(p), whole ? 0 : chunk, chunk + 1, &c);
    epo_deps deps = moe_deps("combine", EPO_INTERVAL_COMM, chunk);
    x.alone = last && ((p->tail && !p->beside) || (p->spread && !p->lends));
    x.few = returns_apart(p, chunk);
    x.way = p->plan->way;
    x.untold = !last && p->plan->link == NULL; /* moe_pass_sum waits for the last */
    /* Sums by all SMs go on the chunk's own lane, one chunk behind the other; the last one
     * speaks for the dispatch too.  By few, beside the next chunk's experts. */
    const bool lane = sums && !x.few && (x.way != EPO_WAY_ENGINES || x.alone || p->spread);
    if (!lane)
        moe_deps_wait(&deps, epo_ready_event(p->spread    ? g->grad
                                             : p->chained ? g->part[chunk]
                                                          : g->rows));
    if (sums && chunk > 0 && !whole)
        moe_deps_wait(&deps, epo_ready_event(g->returned));
    if (sums && last)
        moe_deps_wait(&deps, epo_ready_event(g->sent));
    if (!g->overlap)
        moe_deps_wait(&deps, epo_ready_event(g->fill_done));
    if (chunk == 0 || whole) {
        moe_slot_next(b, slot);
        moe_deps_wait(&deps, moe_buffer_flag(b, slot->credit, slot->use - 1, "combine slot", -1));
    }
    x.flag_offset = moe_pass_arrive(p, slot, chunk);
    x.epoch = slot->use;
    x.counter = moe_buffer_counter(b, x.flag_offset);
    deps.signal = last ? g->sent : sums ? g->returned : NULL;
    moe_stats_exchange(g, MOE_BYTES_COMBINE, x.send, moe_cargo_rows(&x, &c), x.nsend);
    p->status = g->ops->exchange(lane ? sums_lane(p, chunk) : g->comm, &x, &deps);
    if (p->plan->link != NULL)
        moe_link_return(p, chunk, row_weight != NULL);
}

void moe_pass_finish(moe_pass *p, void *y, float *slot_weight) {
    moe_pass_sum(p, y, slot_weight);
    moe_pass_summed(p);
}

void moe_pass_sum(moe_pass *p, void *y, float *slot_weight) {
    epo_group *g = p->group;
    const epo_plan *plan = p->plan;
    const epo_buffer *b = p->buffer;
    const moe_slot *slot = &b->combine;
    if (p->status != EPO_OK)
        return;
    if (plan->link != NULL) {
        moe_link_sum(p, y, slot_weight);
        moe_pass_credit(p, slot, b->scope, p->done, NULL, NULL);
        return;
    }
    uint64_t tokens = (uint64_t)plan->tokens;
    epo_rows_reduce reduce = {.dst = y,
                              .src = moe_buffer_at(b, slot->rows),
                              .index = plan->sum,
                              .rows = tokens,
                              .width = plan->sum_width,
                              .elements = b->hidden,
                              .type = b->type,
                              .own = plan->own_stays || p->singly ? p->own : NULL};
    const epo_rows_home home = {plan->home_first, b->peers.count, b->peers.me};
    if (p->singly) {
        reduce.index = plan->home;
        reduce.width = plan->top_k;
        reduce.home = &home;
    }
    epo_deps deps = moe_deps("unpermute", EPO_INTERVAL_LOCAL, -1);
    /* A peer's exchanges run in order, so its last chunk tells of all.  `sent`:
     * when the outputs are complete, nothing reads this pass's memory any more. */
    moe_deps_wait(&deps, moe_buffer_flag(b, moe_pass_arrive(p, slot, p->chunks - 1), slot->use,
                                         "combine chunk", p->chunks - 1));
    moe_deps_wait(&deps, epo_ready_event(g->sent));
    if (p->keeps)
        moe_deps_wait(&deps, epo_ready_event(g->kept));
    epo_queue *queue = p->sums_beside ? g->comm : g->compute;
    epo_event *end = p->sums_beside ? g->returned : p->done;
    deps.signal = slot_weight == NULL ? end : NULL; /* else what comes behind signals it */
    deps.result = true;
    g->stats.local_bytes += ((uint64_t)reduce.width + 1) * tokens * b->row_bytes;
    p->status = g->ops->reduce(queue, &reduce, &deps);
    if (slot_weight != NULL && p->status == EPO_OK) {
        epo_rows_gather gather = {.dst = slot_weight,
                                  .src = moe_buffer_at(b, slot->extra),
                                  .index = plan->slot_weight,
                                  .rows = tokens * (uint64_t)plan->top_k,
                                  .row_bytes = sizeof(float),
                                  .own = plan->own_stays ? p->own_weight : NULL};
        epo_deps gather_deps = moe_deps("dweights", EPO_INTERVAL_LOCAL, -1);
        gather_deps.signal = end;
        gather_deps.result = true;
        p->status = g->ops->gather(queue, &gather, &gather_deps);
    }
    moe_pass_credit(p, slot, b->scope, end, NULL, NULL);
}

void moe_pass_summed(moe_pass *p) {
    epo_group *g = p->group;
    if (p->sums_beside && p->status == EPO_OK) { /* behind the weight gradients */
        epo_deps then = moe_deps("returned", EPO_INTERVAL_LOCAL, -1);
        moe_deps_wait(&then, epo_ready_event(g->returned));
        then.signal = p->done;
        p->status = g->ops->zero(g->compute, NULL, 0, &then);
    }
}
