/* SPDX-License-Identifier: Apache-2.0
 *
 * near.c - flex in one chunk: while peers' rows cross the link, this rank's own ones are
 * expanded from where the caller has them, and never travel.
 */
#include "moe/pass.h"

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
    const epo_backend_info *info = g->ops->info(g->be);
    if (!g->overlap || info->near_bytes == 0 || p->buffer->replays || plan->way != EPO_WAY_STORES ||
        !moe_pass_expands_all(p))
        return g->comm;
    const uint64_t bytes = bytes_to_peers(p);
    if (bytes >= info->near_bytes && bytes <= info->near_most)
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

static void spread(moe_pass *p, const epo_rows_spread *s, epo_deps *deps) {
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
    const uint64_t last = first + own;
    epo_rows_spread mine = moe_pass_expand_all(p, dst), others = mine;
    mine.runs = 0;
    others.pad = NULL;
    others.run[0] = (epo_spread_run){arrived, NULL, 0, first};
    others.run[1] =
        (epo_spread_run){arrived + last * b->row_bytes, NULL, last, plan->back_rows - last};
    others.runs = 2;
    if (from != NULL)
        mine.run[mine.runs++] = (epo_spread_run){p->near, from->index, first, own};
    spread(p, &mine, &near);
    moe_deps_wait(&far,
                  moe_buffer_flag(b, moe_pass_arrive(p, slot, 0), slot->use, "dispatch chunk", 0));
    far.signal = g->read;
    spread(p, &others, &far);
    moe_pass_credit(p, slot, b->scope, g->read, NULL, NULL);
}
