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

static void spread(moe_pass *p, epo_queue *queue, const epo_rows_spread *s, epo_deps *deps) {
    deps->result = true;
    if (p->status == EPO_OK)
        p->status = p->group->ops->spread(queue, s, deps);
}

/* Own rows, and those of sources before and behind this rank in the slot. */
static void both(const moe_pass *p, void *dst, epo_rows_spread *mine, epo_rows_spread *others) {
    const epo_plan *plan = p->plan;
    const epo_buffer *b = p->buffer;
    const char *arrived = moe_buffer_at(b, b->dispatch.rows);
    const moe_piece *from = own_piece(p, p->dispatch.send, p->dispatch.send_first[1]);
    const moe_piece *to = own_piece(p, p->dispatch.recv, p->dispatch.recv_first[1]);
    const uint64_t first = to != NULL ? to->dst_row : 0, own = to != NULL ? to->rows : 0;
    const uint64_t last = first + own;
    *mine = *others = moe_pass_expand_all(p, dst);
    mine->runs = 0;
    others->pad = NULL;
    others->run[0] = (epo_spread_run){arrived, NULL, 0, first};
    others->run[1] =
        (epo_spread_run){arrived + last * b->row_bytes, NULL, last, plan->back_rows - last};
    others->runs = 2;
    if (from != NULL)
        mine->run[mine->runs++] = (epo_spread_run){p->near, from->index, first, own};
}

/* Peers' rows, when they are there, and the slot is given back. */
static void spread_far(moe_pass *p, epo_queue *queue, const epo_rows_spread *others) {
    epo_group *g = p->group;
    const epo_buffer *b = p->buffer;
    const moe_slot *slot = &b->dispatch;
    epo_deps far = moe_deps("expand", EPO_INTERVAL_LOCAL, 0);
    moe_deps_wait(&far,
                  moe_buffer_flag(b, moe_pass_arrive(p, slot, 0), slot->use, "dispatch chunk", 0));
    far.signal = g->read;
    spread(p, queue, others, &far);
    moe_pass_credit(p, slot, b->scope, g->read, NULL, NULL);
}

static void expand(moe_pass *p, epo_queue *far, void *dst) {
    epo_rows_spread mine, others;
    epo_deps near = moe_deps("expand own", EPO_INTERVAL_LOCAL, 0);
    both(p, dst, &mine, &others);
    spread(p, p->group->compute, &mine, &near);
    spread_far(p, far, &others);
}

void moe_near_expand(moe_pass *p, void *dst) { expand(p, p->group->compute, dst); }

void moe_near_expand_early(moe_pass *p, void *dst, epo_ready *ready) {
    expand(p, p->group->comm, dst);
    *ready = epo_ready_event(p->group->read);
}
