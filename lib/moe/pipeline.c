/* SPDX-License-Identifier: Apache-2.0
 *
 * pipeline.c - rows to the experts and back.
 *
 * Two slots of the window are used in turns by all passes over a buffer: dispatch
 * and combine.  Use u of a slot: the sender waits until every peer has given
 * credit u-1 (it reads use u-1 no more), writes, and raises the peer's arrival
 * flag of the chunk to u; the receiver waits for that flag, reads, and gives
 * credit u.  Every rank issues every exchange, also those without bytes, so the
 * order is the same everywhere.
 *
 * Serial: one chunk, so dispatch, experts and combine depend on each other, and
 * the combine waits for the weight gradients too: nothing overlaps.
 *
 * No cycle: within a queue an exchange stands behind the local operations it waits
 * for, and what those wait for stands earlier in the peers' queues.
 */
#include "moe/link.h"

#include <stdlib.h>

epo_deps moe_deps(const char *name, epo_interval_kind kind, int chunk) {
    return (epo_deps){.nwait = 0, .signal = NULL, .name = name, .kind = (int)kind, .chunk = chunk};
}

void moe_deps_wait(epo_deps *deps, epo_ready ready) { deps->wait[deps->nwait++] = ready; }

static epo_status other_capture(const epo_plan *plan) {
    return plan->capture == 0
               ? epo_fail(EPO_E_STATE, "the stream is being captured in a CUDA graph, but the plan "
                                       "was made before; make it in the capture, too")
               : epo_fail(EPO_E_STATE, "the plan was captured in a CUDA graph: it serves calls of "
                                       "that capture alone; make one for this call");
}

void moe_pass_begin(moe_pass *p, epo_plan *plan, int chunks, int uses, epo_stream stream) {
    epo_group *g = plan->buffer->group;
    *p = (moe_pass){.group = g,
                    .plan = plan,
                    .buffer = plan->buffer,
                    .stream = stream,
                    .chunks = chunks,
                    .done = g->done,
                    .dispatch = plan->dispatch,
                    .combine = plan->combine,
                    .tail = true};
    if (plan->link != NULL) {
        p->link_dispatch = plan->link->dispatch;
        p->link_combine = plan->link->combine;
    }
    epo_queue *queues[5] = {g->compute, g->comm};
    int count = 2;
    if (plan->link != NULL)
        queues[count++] = g->link;
    if (g->keep != NULL)
        queues[count++] = g->keep;
    if (g->odd != NULL && chunks > 1)
        queues[count++] = g->odd;
    if (!plan->buffer->replays) {
        p->status = g->ops->stream_enter(g->be, queues, count, stream);
        return;
    }
    uint64_t *counters[2];
    int ncounters = 0;
    if (uses & MOE_USES_DISPATCH)
        counters[ncounters++] = moe_buffer_counter(plan->buffer, plan->buffer->dispatch.arrive);
    if (uses & MOE_USES_COMBINE)
        counters[ncounters++] = moe_buffer_counter(plan->buffer, plan->buffer->combine.arrive);
    p->status =
        g->ops->replay_enter(g->be, queues, count, counters, ncounters, stream, &g->replay.capture);
    if (p->status == EPO_OK && g->replay.capture != plan->capture)
        p->status = other_capture(plan);
}

void moe_pass_apart(moe_pass *p) {
    const int n = p->plan->chunks;
    moe_lane *lanes[] = {&p->dispatch, &p->combine, &p->link_dispatch, &p->link_combine};
    const int count = p->plan->link != NULL ? 4 : 2;
    moe_carver c = {NULL, 0, false};
    for (int pass = 0; pass < 2 && p->status == EPO_OK; pass++) {
        for (int i = 0; i < count; i++) {
            const uint64_t sent = 2 * (uint64_t)lanes[i]->send_first[n];
            const uint64_t received = 2 * (uint64_t)lanes[i]->recv_first[n];
            epo_segment *segments = moe_carve(&c, sent, sizeof *segments);
            epo_arrival *arrivals = moe_carve(&c, received, sizeof *arrivals);
            lanes[i]->segments = pass > 0 ? segments : lanes[i]->segments;
            lanes[i]->arrivals = pass > 0 ? arrivals : lanes[i]->arrivals;
        }
        if (pass > 0)
            return;
        p->apart = c.failed ? NULL : calloc(1, c.used + 16);
        if (p->apart == NULL)
            p->status = epo_fail(EPO_E_NOMEM, "memory: need %llu bytes for a pass's lists",
                                 (unsigned long long)c.used);
        c = (moe_carver){p->apart, 0, false};
    }
}

/* Of the plan's chunks, the first of the pass's chunk `c`. */
int moe_pass_plan_chunk(const moe_pass *p, int c) {
    return p->chunks == p->plan->chunks ? c : c == 0 ? 0 : p->plan->chunks;
}

int moe_pass_first_expert(const moe_pass *p, int chunk) {
    epo_route_shape s = moe_plan_shape(p->plan);
    return epo_route_chunk_first(&s, moe_pass_plan_chunk(p, chunk));
}

uint64_t moe_pass_first_row(const moe_pass *p, int chunk) {
    const epo_buffer *b = p->buffer;
    int e = moe_pass_first_expert(p, chunk);
    return e < b->local ? p->plan->first[e] : p->plan->rows;
}

void moe_pass_get(moe_pass *p, uint64_t count, uint64_t size, moe_block *out) {
    uint64_t bytes;
    if (p->status != EPO_OK)
        return;
    if (!epo_size_mul(count, size, &bytes))
        p->status = epo_fail(EPO_E_NOMEM, "memory: a pass needs more than 2^64 bytes");
    else
        p->status = moe_pool_get(p->group, bytes, out);
}

uint64_t moe_pass_arrive(const moe_pass *p, const moe_slot *slot, int chunk) {
    return slot->arrive + (uint64_t)chunk * (uint64_t)p->group->ranks * sizeof(uint64_t);
}

static void load(epo_segment *out, const moe_piece *piece, const void *src, uint64_t bytes,
                 uint64_t to) {
    *out = (epo_segment){
        .peer = piece->peer,
        .src = (const char *)src + (piece->index == NULL ? piece->src_row * bytes : 0),
        .index = piece->index,
        .dst_offset = to + piece->dst_row * bytes,
        .rows = piece->rows,
        .row_bytes = (uint32_t)bytes,
    };
}

/* Each row from the experts' rows that it sums. */
static void load_sums(const moe_pass *p, epo_segment *out, const moe_piece *piece,
                      const moe_cargo *c) {
    out->src = c->rows;
    out->index = c->back + piece->src_row * (uint64_t)p->plan->top_k;
    out->sum = p->plan->top_k;
    out->type = p->buffer->type;
}

epo_exchange moe_pass_load(const moe_pass *p, moe_lane *lane, int chunk, int end,
                           const moe_cargo *c) {
    int from = moe_pass_plan_chunk(p, chunk), to = moe_pass_plan_chunk(p, end);
    int s0 = lane->send_first[from], s1 = lane->send_first[to];
    int r0 = lane->recv_first[from], r1 = lane->recv_first[to];
    epo_segment *send = lane->segments + 2 * (size_t)s0;
    epo_arrival *recv = lane->arrivals + 2 * (size_t)r0;
    int nsend = 0, nrecv = 0;
    for (int i = s0; i < s1; i++) {
        load(&send[nsend], &lane->send[i], c->rows, c->row_bytes, c->to);
        if (c->back != NULL)
            load_sums(p, &send[nsend], &lane->send[i], c);
        nsend++;
    }
    for (int i = s0; i < s1 && c->extra != NULL; i++)
        load(&send[nsend++], &lane->send[i], c->extra, c->extra_bytes, c->extra_to);
    for (int i = r0; i < r1; i++) {
        const moe_piece *piece = &lane->recv[i];
        recv[nrecv++] = (epo_arrival){piece->peer, c->to + piece->dst_row * c->row_bytes,
                                      piece->rows * c->row_bytes};
    }
    for (int i = r0; i < r1 && c->extra != NULL; i++) {
        const moe_piece *piece = &lane->recv[i];
        recv[nrecv++] = (epo_arrival){piece->peer, c->extra_to + piece->dst_row * c->extra_bytes,
                                      piece->rows * c->extra_bytes};
    }
    return (epo_exchange){.window = p->buffer->window,
                          .send = send,
                          .nsend = nsend,
                          .recv = recv,
                          .nrecv = nrecv,
                          .scope = p->buffer->scope};
}

/* Where nothing but flags goes to peers for that, on a queue of its own: the next pass's rows
 * need not wait until it is told. */
void moe_pass_credit(moe_pass *p, const moe_slot *slot, epo_scope scope, epo_event *first,
                     epo_event *second, epo_event *third) {
    epo_group *g = p->group;
    epo_exchange x = {.window = p->buffer->window,
                      .scope = scope,
                      .flag_offset = slot->credit,
                      .epoch = slot->use,
                      .counter = moe_buffer_counter(p->buffer, slot->credit)};
    epo_deps deps = moe_deps("credit", EPO_INTERVAL_COMM, -1);
    epo_event *events[] = {first, second, third};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        if (events[i] != NULL)
            moe_deps_wait(&deps, epo_ready_event(events[i]));
    bool apart = g->keep != NULL && moe_group_reaches(g, scope);
    if (p->status == EPO_OK)
        p->status = g->ops->exchange(scope == EPO_SCOPE_LINK ? g->link
                                     : apart                 ? g->keep
                                                             : g->comm,
                                     &x, &deps);
}

static void give_credit(moe_pass *p, const moe_slot *slot, epo_event *first, epo_event *second,
                        epo_event *third) {
    moe_pass_credit(p, slot, p->buffer->scope, first, second, third);
}

/* Of the whole dispatch, for peers. */
static uint64_t gathered_bytes(const moe_pass *p) {
    const moe_lane *lane = &p->dispatch;
    uint64_t rows = 0;
    for (int i = 0; i < lane->send_first[p->plan->chunks]; i++)
        if (lane->send[i].index != NULL && lane->send[i].peer != p->group->rank)
            rows += lane->send[i].rows;
    return rows * p->buffer->wire_bytes;
}

/* Chunks [i, end) in one exchange. */
static void dispatch_chunks(moe_pass *p, epo_queue *queue, const moe_cargo *c, int i, int end) {
    epo_group *g = p->group;
    moe_slot *slot = &p->buffer->dispatch;
    epo_exchange x = moe_pass_load(p, &p->dispatch, i, end, c);
    epo_deps deps = moe_deps("dispatch", EPO_INTERVAL_COMM, i);
    x.flag_offset = moe_pass_arrive(p, slot, i);
    x.epoch = slot->use;
    x.counter = moe_buffer_counter(p->buffer, x.flag_offset);
    if (p->near != NULL)
        moe_near_leave(p, &x);
    x.alone = i == 0 && !p->beside && p->near == NULL;
    x.near = p->near != NULL && !p->beside;
    x.way = p->plan->way;
    x.gathered = i == 0 ? gathered_bytes(p) : 0;
    x.parts = end - i;
    x.part_first = p->plan->dispatch.send_first + moe_pass_plan_chunk(p, i);
    x.flag_step = moe_pass_arrive(p, slot, 1) - moe_pass_arrive(p, slot, 0);
    if (p->plan->link != NULL)
        moe_deps_wait(&deps, moe_link_arrived(p, i));
    else if (i == 0 && p->buffer->wire != EPO_WIRE_ROWS)
        moe_deps_wait(&deps, epo_ready_event(g->rows));
    if (i == 0)
        moe_deps_wait(&deps,
                      moe_buffer_flag(p->buffer, slot->credit, slot->use - 1, "dispatch slot", -1));
    deps.signal = end == p->chunks ? g->sent : NULL;
    moe_stats_exchange(g, MOE_BYTES_DISPATCH, x.send, x.nsend, x.nsend);
    p->status = g->ops->exchange(queue, &x, &deps);
}

/* The rows as they travel; `rows` tells when they are there. */
static const void *pack_rows(moe_pass *p, const void *src) {
    epo_group *g = p->group;
    const epo_buffer *b = p->buffer;
    moe_pass_get(p, (uint64_t)p->plan->tokens, b->wire_bytes, &p->wire);
    epo_wire_pack pack = {.dst = p->wire.ptr,
                          .src = src,
                          .rows = (uint64_t)p->plan->tokens,
                          .elements = b->hidden,
                          .type = b->type};
    epo_deps deps = moe_deps("to wire", EPO_INTERVAL_LOCAL, -1);
    deps.signal = g->rows;
    g->stats.local_bytes += pack.rows * (b->row_bytes + b->wire_bytes);
    if (p->status == EPO_OK)
        p->status = g->ops->wire_pack(g->compute, &pack, &deps);
    return p->wire.ptr;
}

void moe_pass_dispatch(moe_pass *p, const void *src) {
    epo_group *g = p->group;
    const bool parts = g->ops->info(g->be)->parts && p->plan->link == NULL &&
                       moe_group_reaches(g, p->buffer->scope);
    moe_slot *slot = &p->buffer->dispatch;
    moe_cargo c = {.row_bytes = p->buffer->wire_bytes, .to = slot->rows};
    if (p->status == EPO_OK && p->buffer->wire != EPO_WIRE_ROWS)
        src = pack_rows(p, src);
    if (p->status != EPO_OK)
        return;
    if (p->plan->link != NULL)
        src = moe_link_dispatch(p, src);
    c.rows = src;
    epo_queue *queue = moe_near_choose(p, src);
    moe_slot_next(p->buffer, slot);
    if (p->plan->back == NULL) /* flex sends no padding */
        g->stats.padding_bytes += p->plan->padding.out * p->buffer->row_bytes;
    /* The first chunk by itself: nothing else can run before it is there. */
    for (int i = 0; i < p->chunks && p->status == EPO_OK;) {
        int end = i == 0 || !parts ? i + 1 : p->chunks;
        dispatch_chunks(p, queue, &c, i, end);
        i = end;
    }
    if (p->plan->link != NULL)
        moe_link_sent_on(p);
}

/* The chunk's rows to their expert-major place in dst. */
static epo_rows_gather expand_rows(const moe_pass *p, int chunk, void *dst) {
    const epo_buffer *b = p->buffer;
    uint64_t first = moe_pass_first_row(p, chunk), rows = moe_pass_first_row(p, chunk + 1) - first;
    p->group->stats.local_bytes += 2 * rows * b->row_bytes;
    return (epo_rows_gather){.dst = (char *)dst + first * b->row_bytes,
                             .src = moe_buffer_at(b, b->dispatch.rows),
                             .index = p->plan->expand + first,
                             .rows = rows,
                             .row_bytes = (uint32_t)b->row_bytes,
                             .wire = moe_buffer_wire(b),
                             .type = b->type};
}

/* All rows in one piece, where they return in the order in which they came: then each is
 * read once. */
epo_rows_spread moe_pass_expand_all(const moe_pass *p, void *dst) {
    const epo_plan *plan = p->plan;
    const epo_buffer *b = p->buffer;
    p->group->stats.local_bytes += (plan->back_rows + plan->rows) * b->row_bytes;
    return (epo_rows_spread){
        .dst = dst,
        .run = {{.src = moe_buffer_at(b, b->dispatch.rows), .rows = plan->back_rows}},
        .runs = 1,
        .place = plan->back,
        .width = plan->top_k,
        .pad = plan->expand, /* -1 also for what fills to a capacity */
        .dst_rows = plan->rows,
        .row_bytes = (uint32_t)b->row_bytes};
}

bool moe_pass_expands_all(const moe_pass *p) {
    return p->group->ops->spread != NULL && p->plan->back != NULL && p->plan->link == NULL &&
           p->plan->chunks == 1 && p->plan->top_k <= 32 && p->buffer->wire == EPO_WIRE_ROWS;
}

void moe_pass_expand(moe_pass *p, int chunk, void *dst) {
    epo_group *g = p->group;
    const epo_buffer *b = p->buffer;
    const moe_slot *slot = &b->dispatch;
    if (p->status != EPO_OK)
        return;
    if (p->near != NULL) {
        moe_near_expand(p, dst);
        return;
    }
    epo_deps deps = moe_deps("expand", EPO_INTERVAL_LOCAL, chunk);
    moe_deps_wait(&deps, moe_buffer_flag(b, moe_pass_arrive(p, slot, chunk), slot->use,
                                         "dispatch chunk", chunk));
    epo_queue *lane = moe_pass_lane(p, chunk);
    deps.result = true;
    deps.signal = lane != g->compute ? g->odd_used : g->read;
    if (chunk == p->chunks - 1) /* before the slot is given back */
        moe_pass_keep_tokens(p, lane, &deps.wait[0]);
    if (p->status != EPO_OK)
        return;
    if (moe_pass_expands_all(p)) {
        epo_rows_spread spread = moe_pass_expand_all(p, dst);
        p->status = g->ops->spread(lane, &spread, &deps);
    } else {
        epo_rows_gather gather = expand_rows(p, chunk, dst);
        p->status = g->ops->gather(lane, &gather, &deps);
    }
    if (chunk == p->chunks - 1)
        give_credit(p, slot, g->read, chunk > 0 && g->odd != NULL ? g->odd_used : NULL, NULL);
}

/* A chunk beside the chain, and its word, which this rank alone looks at. */
static void spread_beside(moe_pass *p, int chunk, void *dst, epo_ready *arrival) {
    epo_group *g = p->group;
    const epo_buffer *b = p->buffer;
    const moe_slot *slot = &b->dispatch;
    const uint64_t word = sizeof(uint64_t), ranks = (uint64_t)g->ranks;
    const uint64_t flag = slot->expanded + (uint64_t)chunk * ranks * word;
    epo_rows_gather gather = expand_rows(p, chunk, dst);
    epo_exchange tell = {.window = b->window,
                         .scope = b->scope,
                         .flag_offset = flag,
                         .epoch = slot->use,
                         .counter = moe_buffer_counter(b, flag)};
    epo_deps deps = moe_deps("expand", EPO_INTERVAL_LOCAL, chunk);
    epo_deps then = moe_deps("expanded", EPO_INTERVAL_COMM, chunk);
    moe_deps_wait(&deps, moe_buffer_flag(b, moe_pass_arrive(p, slot, chunk), slot->use,
                                         "dispatch chunk", chunk));
    gather.beside = true;
    deps.signal = chunk == p->chunks - 1 ? g->odd_used : NULL;
    *arrival = (epo_ready){.flag = moe_buffer_at(b, flag + (uint64_t)g->rank * word),
                           .epoch = slot->use,
                           .count = 1,
                           .peer = g->rank,
                           .what = "expanded chunk",
                           .chunk = chunk,
                           .counter = tell.counter};
    p->status = g->ops->gather(g->comm, &gather, &deps);
    if (p->status == EPO_OK)
        p->status = g->ops->exchange(g->comm, &tell, &then);
}

void moe_pass_spread(moe_pass *p, void *dst, epo_ready *arrival) {
    epo_group *g = p->group;
    const epo_buffer *b = p->buffer;
    const moe_slot *slot = &b->dispatch;
    if (p->status != EPO_OK)
        return;
    epo_rows_gather gather = expand_rows(p, 0, dst);
    epo_deps deps = moe_deps("expand", EPO_INTERVAL_LOCAL, 0);
    moe_deps_wait(&deps,
                  moe_buffer_flag(b, moe_pass_arrive(p, slot, 0), slot->use, "dispatch chunk", 0));
    deps.result = true;
    deps.signal = g->read;
    arrival[0] = epo_ready_event(g->read);
    p->status = g->ops->gather(g->compute, &gather, &deps);
    for (int i = 1; i < p->chunks && p->status == EPO_OK; i++)
        spread_beside(p, i, dst, &arrival[i]);
    give_credit(p, slot, g->read, g->odd_used, NULL);
}

/* ---- rows read where they arrive ------------------------------------------ */

bool moe_pass_in_place(const moe_pass *p) { return moe_plan_in_place(p->plan) && !p->custom; }

bool moe_plan_in_place(const epo_plan *plan) {
    return plan->buffer->group->keep != NULL && plan->expand == plan->pad;
}

/* All rows at once, when the last chunk's are there, and behind `after` if that is given:
 * nothing waits for the copy before the pass's end. */
static void keep(moe_pass *p, void *dst, epo_event *after) {
    epo_group *g = p->group;
    const epo_buffer *b = p->buffer;
    const moe_slot *slot = &b->dispatch;
    const int last = p->chunks - 1;
    uint64_t bytes = p->plan->rows * b->row_bytes;
    epo_deps deps = moe_deps("keep", EPO_INTERVAL_LOCAL, -1);
    moe_deps_wait(&deps, moe_buffer_flag(b, moe_pass_arrive(p, slot, last), slot->use,
                                         "dispatch chunk", last));
    if (after != NULL)
        moe_deps_wait(&deps, epo_ready_event(after));
    deps.signal = g->kept;
    g->stats.local_bytes += 2 * bytes;
    p->keeps = true;
    p->status = g->ops->copy(g->keep, dst, moe_buffer_at(b, slot->rows), bytes, &deps);
}

const void *moe_pass_take(moe_pass *p, int chunk, void *dst, epo_deps *deps) {
    const epo_buffer *b = p->buffer;
    const moe_slot *slot = &b->dispatch;
    if (!moe_pass_in_place(p)) {
        moe_pass_expand(p, chunk, dst);
        return dst;
    }
    if (dst != NULL && p->status == EPO_OK && chunk == p->chunks - 1)
        keep(p, dst, NULL);
    moe_deps_wait(deps, moe_buffer_flag(b, moe_pass_arrive(p, slot, chunk), slot->use,
                                        "dispatch chunk", chunk));
    return moe_buffer_at(b, slot->rows);
}

const void *moe_pass_take_all(moe_pass *p, epo_ready *arrival) {
    const epo_buffer *b = p->buffer;
    const moe_slot *slot = &b->dispatch;
    for (int i = 0; i < p->chunks; i++)
        arrival[i] =
            moe_buffer_flag(b, moe_pass_arrive(p, slot, i), slot->use, "dispatch chunk", i);
    return moe_buffer_at(b, slot->rows);
}

void moe_pass_keep(moe_pass *p, void *dst, epo_event *after) {
    if (dst != NULL && p->status == EPO_OK)
        keep(p, dst, after);
}

void moe_pass_taken(moe_pass *p, epo_event *used, epo_event *odd) {
    if (moe_pass_in_place(p) && !p->holds)
        give_credit(p, &p->buffer->dispatch, used, odd, p->keeps ? p->group->kept : NULL);
}

void moe_pass_let_go(moe_pass *p, epo_event *read) {
    if (p->holds)
        give_credit(p, &p->buffer->dispatch, read, NULL, NULL);
}

epo_queue *moe_pass_lane(const moe_pass *p, int chunk) {
    epo_group *g = p->group;
    /* Sums in memory read rows of all chunks before: one lane orders them. */
    const bool one =
        p->plan->back != NULL &&
        (!moe_plan_sums(p->plan) || p->plan->way == EPO_WAY_ENGINES || p->buffer->replays);
    return g->odd != NULL && chunk % 2 == 1 && !one ? g->odd : g->compute;
}

bool moe_plan_sums(const epo_plan *plan) {
    const epo_group *g = plan->buffer->group;
    return plan->back != NULL && g->ops->info(g->be)->sums && plan->buffer->row_bytes % 16 == 0;
}

epo_status moe_pass_end(moe_pass *p) {
    epo_group *g = p->group;
    if (p->buffer->replays)
        p->status = moe_group_replayed(g, p->stream, p->status);
    else if (p->status == EPO_OK)
        p->status = g->ops->stream_leave(g->be, p->done, p->stream);
    if (p->status == EPO_OK)
        p->status = moe_group_turn_end(g);
    if (p->status != EPO_OK)
        p->status = moe_group_break(g, p->status);
    moe_pool_put(g, &p->back);
    moe_pool_put(g, &p->back_weight);
    moe_pool_put(g, &p->home);
    moe_pool_put(g, &p->home_weight);
    free(p->apart);
    free(p->apart_again);
    p->apart = p->apart_again = NULL;
    moe_pool_put(g, &p->wire);
    moe_pool_put(g, &p->wire_again);
    return p->status;
}
