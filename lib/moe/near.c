/* SPDX-License-Identifier: Apache-2.0
 *
 * near.c - flex in one chunk: while peers' rows cross the link, this rank's own ones are
 * expanded from where the caller has them, and never travel.
 */
#include "moe/moe.h"

/* This rank's piece of what is sent or received; NULL: it has none. */
static const moe_piece *own_piece(const moe_pass *p, const moe_piece *list, int count) {
    for (int i = 0; i < count; i++)
        if (list[i].peer == p->group->rank)
            return &list[i];
    return NULL;
}

static uint64_t bytes_to_peers(const moe_pass *p) {
    const moe_lane *lane = &p->dispatch;
    uint64_t rows = 0;
    for (int i = 0; i < lane->send_first[1]; i++)
        rows += lane->send[i].peer != p->group->rank ? lane->send[i].rows : 0;
    return rows * p->buffer->row_bytes;
}

epo_queue *moe_near_choose(moe_pass *p, const void *src) {
    const epo_group *g = p->group;
    const epo_plan *plan = p->plan;
    const uint64_t least = g->ops->info(g->be)->near_bytes;
    if (!g->overlap || least == 0 || g->ops->spread == NULL || plan->back == NULL ||
        plan->chunks != 1 || plan->link != NULL || p->buffer->replays ||
        p->buffer->wire != EPO_WIRE_ROWS || plan->way != EPO_WAY_STORES || plan->top_k > 32)
        return g->comm;
    const uint64_t bytes = bytes_to_peers(p), most = g->ops->info(g->be)->near_most;
    if (bytes >= least && bytes <= most)
        p->near = p->tokens == NULL ? src : NULL;
    else if (!p->beside && moe_plan_sums(plan)) /* a queue of its own costs more than it can win */
        return g->compute;
    return g->comm;
}

void moe_near_leave(const moe_pass *p, epo_exchange *x) {
    epo_segment *send = p->dispatch.segments;
    int n = 0;
    for (int i = 0; i < x->nsend; i++)
        if (send[i].peer != p->group->rank)
            send[n++] = send[i];
    x->nsend = n;
}

static void spread(moe_pass *p, void *dst, epo_rows_spread *s, epo_deps *deps) {
    const epo_plan *plan = p->plan;
    s->dst = dst;
    s->place = plan->back;
    s->width = plan->top_k;
    s->dst_rows = plan->rows;
    s->row_bytes = (uint32_t)p->buffer->row_bytes;
    deps->result = true;
    if (p->status == EPO_OK)
        p->status = p->group->ops->spread(p->group->compute, s, deps);
}

/* Sources lie one behind the other in the slot, this rank between two. */
void moe_near_expand(moe_pass *p, void *dst) {
    epo_group *g = p->group;
    const epo_plan *plan = p->plan;
    const epo_buffer *b = p->buffer;
    const moe_slot *slot = &b->dispatch;
    const char *arrived = moe_buffer_at(b, slot->rows);
    const moe_piece *from = own_piece(p, p->dispatch.send, p->dispatch.send_first[1]);
    const moe_piece *to = own_piece(p, p->dispatch.recv, p->dispatch.recv_first[1]);
    const uint64_t first = to != NULL ? to->dst_row : 0, own = to != NULL ? to->rows : 0;
    epo_deps near = moe_deps("expand own", EPO_INTERVAL_LOCAL, 0);
    epo_deps far = moe_deps("expand", EPO_INTERVAL_LOCAL, 0);
    epo_rows_spread mine = {.pad = plan->expand}; /* -1 also for what fills to a capacity */
    epo_rows_spread others = {.run = {{arrived, NULL, 0, first},
                                      {arrived + (first + own) * b->row_bytes, NULL, first + own,
                                       plan->back_rows - first - own}},
                              .runs = 2};
    if (from != NULL)
        mine.run[mine.runs++] = (epo_spread_run){p->near, from->index, first, own};
    g->stats.local_bytes += (plan->back_rows + plan->rows) * b->row_bytes;
    spread(p, dst, &mine, &near);
    moe_deps_wait(&far,
                  moe_buffer_flag(b, moe_pass_arrive(p, slot, 0), slot->use, "dispatch chunk", 0));
    far.signal = g->read;
    spread(p, dst, &others, &far);
    moe_pass_credit(p, slot, b->scope, g->read, NULL, NULL);
}
