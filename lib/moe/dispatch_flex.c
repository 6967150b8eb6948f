/* SPDX-License-Identifier: Apache-2.0
 *
 * dispatch_flex.c - one row per (token, destination rank).  Beside the rows go,
 * once a plan, each row's local experts and router weights; from these the
 * receiver makes its expert-major layout and the order in which rows return.
 *
 * Where the backend makes the maps, ranks have told each other their rows by chunk, so
 * the CPU knows every piece without reading a map.
 */
#include "backend/route_flex_step.h"
#include "moe/moe.h"

#include <inttypes.h>
#include <stdlib.h>

/* CPU arrays that only the making needs. */
typedef struct flex_scratch {
    uint64_t *send_block, *recv_block; /* [R]: first row of each rank's block */
    uint64_t *there, *home;            /* [R]: of this rank's block in each rank's window, and in
                                        * what goes back to it */
    uint32_t *send_first, *send_last;  /* [R][n+1] */
    uint32_t *recv_first, *recv_last;
    uint32_t *source_rows;              /* [R] */
    uint32_t *send_cursor;              /* [3*R*n] */
    uint64_t *recv_cursor, *back_first; /* [El + 2*R*n], [n][R] */
    int32_t *base, *target, *returns;   /* on the device: see epo_flex_receive */
    int32_t *meta;                      /* [received][K] */
    epo_segment *segments;              /* [2*R] */
    epo_arrival *arrivals;
} flex_scratch;

static void carve(moe_carver *c, const moe_making *m, uint64_t received, flex_scratch *f) {
    uint64_t ranks = (uint64_t)m->shape.ranks, n = (uint64_t)m->shape.chunks;
    f->send_block = moe_carve(c, ranks, sizeof *f->send_block);
    f->recv_block = moe_carve(c, ranks, sizeof *f->recv_block);
    f->there = moe_carve(c, ranks, sizeof *f->there);
    f->home = moe_carve(c, ranks, sizeof *f->home);
    f->send_first = moe_carve(c, ranks * (n + 1), sizeof *f->send_first);
    f->send_last = moe_carve(c, ranks * (n + 1), sizeof *f->send_last);
    f->recv_first = moe_carve(c, ranks * (n + 1), sizeof *f->recv_first);
    f->recv_last = moe_carve(c, ranks * (n + 1), sizeof *f->recv_last);
    f->source_rows = moe_carve(c, ranks, sizeof *f->source_rows);
    f->send_cursor = moe_carve(c, 3 * ranks * n, sizeof *f->send_cursor);
    f->recv_cursor =
        moe_carve(c, (uint64_t)epo_route_local(&m->shape) + 2 * ranks * n, sizeof *f->recv_cursor);
    f->back_first = moe_carve(c, n * ranks, sizeof *f->back_first);
    f->base = moe_carve(c, ranks, sizeof *f->base);
    f->target = moe_carve(c, (uint64_t)m->shape.experts, sizeof *f->target);
    f->returns = moe_carve(c, ranks * n, sizeof *f->returns);
    f->meta = moe_carve(c, received * (uint64_t)m->shape.top_k, sizeof *f->meta);
    f->segments = moe_carve(c, 2 * ranks, sizeof *f->segments);
    f->arrivals = moe_carve(c, 2 * ranks, sizeof *f->arrivals);
}

/* The peer's number in the group. */
static int rank_of(const epo_buffer *b, int peer) { return b->peers.first + peer * b->peers.step; }

static inline uint32_t rows_between(const moe_making *m, int source, int destination) {
    return m->rank_rows[(size_t)source * (size_t)m->shape.ranks + (size_t)destination];
}

/* First row of source's block in destination's window. */
static uint64_t window_block(const moe_making *m, int source, int destination) {
    uint64_t row = 0;
    for (int s = 0; s < source; s++)
        row += rows_between(m, s, destination);
    return row;
}

/* First row of destination's block in what comes back to source. */
static uint64_t back_block(const moe_making *m, int source, int destination) {
    uint64_t row = 0;
    for (int d = 0; d < destination; d++)
        row += rows_between(m, source, d);
    return row;
}

static void reserve(moe_arena *arena, const moe_making *m, uint64_t sent, uint64_t received,
                    moe_flex_maps *at) {
    const epo_plan *p = m->plan;
    uint64_t local = (uint64_t)p->buffer->local, k = (uint64_t)p->top_k;
    uint64_t tokens = (uint64_t)m->routing->tokens;
    at->first = moe_arena_add(arena, local, sizeof(uint64_t));
    at->count = moe_arena_add(arena, local, sizeof(uint64_t));
    const uint64_t home = p->singly ? 1 : 0;
    for (int i = 0; i < 2; i++)
        at->returns[i] =
            moe_arena_add(arena, home * local * (uint64_t)m->shape.ranks, sizeof(int32_t));
    at->token = moe_arena_add(arena, sent, sizeof(int32_t));
    at->sum = moe_arena_add(arena, tokens * (uint64_t)p->sum_width, sizeof(int32_t));
    at->slot_weight = moe_arena_add(arena, tokens * k, sizeof(int32_t));
    at->expand = moe_arena_add(arena, p->rows, sizeof(int32_t));
    at->pad = moe_arena_add(arena, p->rows, sizeof(int32_t));
    at->back = moe_arena_add(arena, received * k, sizeof(int32_t));
    at->weight = moe_arena_add(arena, p->rows, sizeof(float));
    at->meta = moe_arena_add(arena, moe_plan_on_device(p->buffer) ? sent : 0,
                             4 * (uint64_t)epo_flex_meta_words(p->top_k));
    at->home = moe_arena_add(arena, home * tokens * k, sizeof(int32_t));
    at->home_token = moe_arena_add(arena, home * tokens * k, sizeof(int32_t));
    at->home_slot = moe_arena_add(arena, home * tokens * k, sizeof(int32_t));
}

/* ---- meta ---------------------------------------------------------------- */

/* Offsets of what is sent beside the rows, and of what came, in one short-lived
 * arena. */
typedef struct meta_maps {
    uint64_t expert, slot, weight;
} meta_maps;

/* Per peer the experts, then the weights, of all rows of the plan. */
static epo_status send_meta(const moe_making *m, const flex_scratch *f, const int32_t *expert,
                            const int32_t *slot) {
    const epo_buffer *b = m->plan->buffer;
    uint64_t k = (uint64_t)m->shape.top_k;
    int rank = b->peers.me, ranks = m->shape.ranks, n = 0;
    for (int i = 0; i < ranks; i++) {
        int peer = (rank + 1 + i) % ranks, to_rank = rank_of(b, peer);
        uint64_t out = rows_between(m, rank, peer) * k, in = rows_between(m, peer, rank) * k;
        uint64_t from = f->send_block[peer] * k, to = f->there[peer] * k;
        uint64_t at = f->recv_block[peer] * k;
        f->segments[n] = (epo_segment){.peer = to_rank,
                                       .src = expert + from,
                                       .dst_offset = b->meta_expert + to * 4,
                                       .rows = out,
                                       .row_bytes = 4};
        f->segments[n + 1] = (epo_segment){.peer = to_rank,
                                           .src = m->weights,
                                           .index = slot + from,
                                           .dst_offset = b->meta_weight + to * 4,
                                           .rows = out,
                                           .row_bytes = 4};
        f->arrivals[n] = (epo_arrival){to_rank, b->meta_expert + at * 4, in * 4};
        f->arrivals[n + 1] = (epo_arrival){to_rank, b->meta_weight + at * 4, in * 4};
        n += 2;
    }
    return moe_plan_exchange_meta(m->plan, f->segments, n, f->arrivals, n, NULL);
}

/* The sender's maps, and the exchange of meta. */
static epo_status make_send(const moe_making *m, const flex_scratch *f, uint64_t sent,
                            const moe_flex_maps *at) {
    epo_plan *p = m->plan;
    epo_group *g = p->buffer->group;
    uint64_t k = (uint64_t)p->top_k;
    moe_arena arena = {0, false, {NULL, 0}, NULL};
    uint64_t expert = moe_arena_add(&arena, sent * k, sizeof(int32_t));
    uint64_t slot = moe_arena_add(&arena, sent * k, sizeof(int32_t));
    epo_status status = moe_arena_open(g, &arena);
    if (status != EPO_OK)
        return status;
    epo_route_flex_send out = {
        .rank_first = f->send_block,
        .first_of = f->send_first,
        .last_of = f->send_last,
        .token = moe_arena_cpu(&p->arena, at->token),
        .meta_expert = moe_arena_cpu(&arena, expert),
        .meta_slot = moe_arena_cpu(&arena, slot),
        .sum = moe_arena_cpu(&p->arena, at->sum),
        .width = p->sum_width,
        .weight = moe_arena_cpu(&p->arena, at->slot_weight),
    };
    epo_route_flex_make_send(&m->shape, m->experts, m->routing->tokens, f->send_cursor, &out);
    /* Gathered weights: a slot that is another rank's sends any weight, here the
     * first; its expert is -1, so nobody reads it. */
    for (uint64_t i = 0; i < sent * k; i++)
        out.meta_slot[i] = out.meta_slot[i] < 0 ? 0 : out.meta_slot[i];
    status = moe_arena_publish(g, &arena, 0, arena.bytes);
    if (status == EPO_OK)
        status = send_meta(m, f, moe_arena_op(&arena, expert), moe_arena_op(&arena, slot));
    moe_arena_close(g, &arena);
    return status;
}

/* The receiver's maps from the meta that came. */
static epo_status make_recv(const moe_making *m, const flex_scratch *f, const moe_flex_maps *at,
                            int32_t *weight) {
    epo_plan *p = m->plan;
    epo_buffer *b = p->buffer;
    epo_status status = moe_group_read(b->group, f->meta, moe_buffer_at(b, b->meta_expert),
                                       p->back_rows * (uint64_t)p->top_k * sizeof *f->meta);
    if (status != EPO_OK)
        return status;
    epo_route_flex_recv in = {
        .first = p->first,
        .count = p->count,
        .block = m->capacity,
        .rows = p->rows,
        .first_of = f->recv_first,
        .last_of = f->recv_last,
        .expand = moe_arena_cpu(&p->arena, at->expand),
        .weight = weight,
        .back = moe_arena_cpu(&p->arena, at->back),
        .back_first = f->back_first,
    };
    uint64_t bad =
        epo_route_flex_make_recv(&m->shape, f->meta, f->source_rows, f->recv_cursor, &in);
    if (bad != 0)
        return epo_fail(EPO_E_PEER,
                        "plan: row %" PRIu64 " of the received routing does not fit "
                        "the counts that came before it",
                        bad - 1);
    return EPO_OK;
}

/* ---- lanes --------------------------------------------------------------- */

static void add(moe_piece *list, int *at, moe_piece piece) {
    if (piece.rows > 0)
        list[(*at)++] = piece;
}

static void add_chunk(const moe_making *m, const flex_scratch *f, int peer, int c,
                      const int32_t *token, int *n) {
    epo_plan *p = m->plan;
    const int rank = rank_of(p->buffer, peer);
    size_t at = (size_t)peer * ((size_t)p->chunks + 1) + (size_t)c;
    uint64_t out = f->send_first[at], in = f->recv_first[at];
    uint64_t home = f->recv_last[at], back = f->send_last[at];
    add(p->dispatch.send, &n[0],
        (moe_piece){rank, token + f->send_block[peer] + out, 0, f->there[peer] + out,
                    f->send_first[at + 1] - out});
    add(p->dispatch.recv, &n[1],
        (moe_piece){rank, NULL, 0, f->recv_block[peer] + in, f->recv_first[at + 1] - in});
    add(p->combine.send, &n[2],
        (moe_piece){rank, NULL, f->back_first[(size_t)c * (size_t)m->shape.ranks + (size_t)peer],
                    f->home[peer] + home, f->recv_last[at + 1] - home});
    add(p->combine.recv, &n[3],
        (moe_piece){rank, NULL, 0, f->send_block[peer] + back, f->send_last[at + 1] - back});
}

static void make_lanes(const moe_making *m, const flex_scratch *f, const int32_t *token) {
    epo_plan *p = m->plan;
    int n[4] = {0, 0, 0, 0}, ranks = m->shape.ranks, rank = p->buffer->peers.me;
    for (int c = 0; c <= p->chunks; c++) {
        p->dispatch.send_first[c] = n[0];
        p->dispatch.recv_first[c] = n[1];
        p->combine.send_first[c] = n[2];
        p->combine.recv_first[c] = n[3];
        p->back_first[c] = p->back_rows;
        if (c == p->chunks)
            break;
        p->back_first[c] = f->back_first[(size_t)c * (size_t)ranks];
        for (int i = 0; i < ranks; i++)
            add_chunk(m, f, (rank + 1 + i) % ranks, c, token, n);
    }
}

/* ---- the plan ------------------------------------------------------------ */

void moe_flex_name(epo_plan *p, const moe_flex_maps *at) {
    p->op_first = moe_arena_op(&p->arena, at->first);
    p->op_count = moe_arena_op(&p->arena, at->count);
    p->expand = moe_arena_op(&p->arena, at->expand);
    p->pad = moe_arena_op(&p->arena, at->pad);
    p->back = moe_arena_op(&p->arena, at->back);
    p->token = moe_arena_op(&p->arena, at->token);
    p->sum = moe_arena_op(&p->arena, at->sum);
    p->slot_weight = moe_arena_op(&p->arena, at->slot_weight);
    p->weight = moe_arena_op(&p->arena, at->weight);
}

void moe_flex_layout(epo_plan *p, const moe_flex_maps *at) {
    uint64_t *first = moe_arena_cpu(&p->arena, at->first);
    uint64_t *count = moe_arena_cpu(&p->arena, at->count);
    for (int e = 0; e < p->buffer->local; e++) {
        first[e] = p->first[e];
        count[e] = p->count[e];
    }
}

/* ---- the maps home -------------------------------------------------------- */

/* What peers get of this rank's experts, and what comes from theirs, where it lands. */
static void home_lane(const moe_making *m, const int32_t *first, const int32_t *to) {
    epo_plan *p = m->plan;
    const epo_buffer *b = p->buffer;
    const int ranks = b->peers.count, me = b->peers.me;
    const size_t experts = (size_t)m->shape.experts, local = (size_t)b->local;
    int n[2] = {0, 0};
    for (int i = 1; i < ranks; i++) {
        const int peer = (me + i) % ranks;
        for (size_t e = 0; e < local; e++) {
            const size_t at = e * (size_t)ranks + (size_t)peer;
            add(p->homeward.send, &n[0],
                (moe_piece){peer, NULL, (uint64_t)first[at], (uint64_t)to[at],
                            m->counts[(size_t)peer * experts + (size_t)me * local + e]});
        }
    }
    uint64_t row = 0;
    for (size_t e = 0; e < experts; e++) {
        const int peer = (int)(e / local);
        const uint32_t rows = m->counts[(size_t)me * experts + e];
        if (e % local == 0)
            p->home_first[peer] = (int32_t)row;
        if (peer != me)
            add(p->homeward.recv, &n[1], (moe_piece){peer, NULL, 0, row, rows});
        row += rows;
    }
    p->homeward.send_first[1] = n[0];
    p->homeward.recv_first[1] = n[1];
}

/* The CPU's part of the maps home. */
static void home_layout(const moe_making *m, const moe_flex_maps *at) {
    epo_plan *p = m->plan;
    const epo_buffer *b = p->buffer;
    epo_route_returns(&m->shape, m->counts, b->peers.me, p->first,
                      moe_arena_cpu(&p->arena, at->returns[0]),
                      moe_arena_cpu(&p->arena, at->returns[1]));
    p->returns_first = moe_arena_op(&p->arena, at->returns[0]);
    p->returns_to = moe_arena_op(&p->arena, at->returns[1]);
    p->home = moe_arena_op(&p->arena, at->home);
    home_lane(m, moe_arena_cpu(&p->arena, at->returns[0]),
              moe_arena_cpu(&p->arena, at->returns[1]));
}

/* First send row of each expert, then where its rows begin at its owner, then the same for this
 * rank's experts alone, UINT64_MAX elsewhere. */
static uint64_t *home_places(const moe_making *m) {
    const epo_buffer *b = m->plan->buffer;
    const size_t experts = (size_t)m->shape.experts, local = (size_t)b->local;
    uint64_t *send = calloc(3 * experts, sizeof *send);
    if (send == NULL) {
        (void)epo_fail(EPO_E_NOMEM, "memory: need %zu bytes for the plan",
                       3 * experts * sizeof *send);
        return NULL;
    }
    epo_route_send_first(&m->shape, m->counts + (size_t)b->peers.me * experts, send);
    uint64_t *target = send + experts;
    epo_route_targets(&m->shape, m->counts, b->peers.me, target);
    for (size_t e = 0; e < experts; e++)
        target[experts + e] = e / local == (size_t)b->peers.me ? target[e] : UINT64_MAX;
    return send;
}

/* Each slot's row, as alltoall's: in the order of experts, those of this rank's apart. */
static epo_status home_on_device(const moe_making *m, const moe_flex_maps *at) {
    epo_plan *p = m->plan;
    epo_group *g = p->buffer->group;
    epo_routes routes = moe_plan_routes(p->buffer, m->routing);
    epo_deps deps = moe_deps("route home", EPO_INTERVAL_LOCAL, -1);
    uint64_t *send = home_places(m);
    if (send == NULL)
        return EPO_E_NOMEM;
    epo_status status = g->ops->route_send(g->compute, &routes, send, send + 2 * m->shape.experts,
                                           moe_arena_op(&p->arena, at->home_token),
                                           moe_arena_op(&p->arena, at->home_slot),
                                           moe_arena_op(&p->arena, at->home), &deps);
    free(send);
    return status;
}

/* The same by the CPU. */
static epo_status home_on_cpu(const moe_making *m, const moe_flex_maps *at) {
    epo_plan *p = m->plan;
    int32_t *row = moe_arena_cpu(&p->arena, at->home);
    const uint64_t experts = (uint64_t)m->shape.experts;
    uint64_t *send = home_places(m);
    if (send == NULL)
        return EPO_E_NOMEM;
    const uint64_t *own = send + 2 * experts;
    uint64_t *cursor = send + experts; /* the targets are not wanted any more */
    epo_route_send(&m->shape, m->experts, p->tokens, send, cursor,
                   moe_arena_cpu(&p->arena, at->home_token),
                   moe_arena_cpu(&p->arena, at->home_slot), row);
    for (uint64_t i = 0; i < (uint64_t)p->tokens * (uint64_t)p->top_k; i++) {
        const int32_t e = m->experts[i];
        if (e >= 0 && own[e] != UINT64_MAX)
            row[i] = -2 - (int32_t)(own[e] + ((uint64_t)row[i] - send[e]));
    }
    free(send);
    return EPO_OK;
}

/* By the CPU. */
static epo_status fill(const moe_making *m, const flex_scratch *f, uint64_t sent,
                       const moe_flex_maps *at) {
    epo_plan *p = m->plan;
    epo_group *g = p->buffer->group;
    moe_flex_layout(p, at);
    epo_route_pad(&m->shape, p->first, p->count, p->rows, moe_arena_cpu(&p->arena, at->pad));
    moe_arena weight = {0, false, {NULL, 0}, NULL};
    moe_arena_add(&weight, p->rows, sizeof(int32_t));
    epo_status status = moe_arena_open(g, &weight);
    if (status == EPO_OK)
        status = make_send(m, f, sent, at);
    if (status == EPO_OK)
        status = make_recv(m, f, at, moe_arena_cpu(&weight, 0));
    if (status == EPO_OK)
        status = moe_arena_publish(g, &p->arena, 0, at->weight);
    if (status == EPO_OK)
        status = moe_arena_publish(g, &weight, 0, weight.bytes);
    if (status == EPO_OK) {
        moe_flex_name(p, at);
        make_lanes(m, f, moe_arena_op(&p->arena, at->token));
        status = moe_plan_gather_weights(p, moe_buffer_at(p->buffer, p->buffer->meta_weight),
                                         moe_arena_op(&weight, 0));
    }
    moe_arena_close(g, &weight);
    if (status != EPO_OK || !p->singly)
        return status;
    home_layout(m, at);
    return home_on_cpu(m, at);
}

/* ---- on the device -------------------------------------------------------- */

/* of[n+1] = prefix sums of rows[n]. */
static void add_up(const uint32_t *rows, size_t n, uint32_t *of) {
    of[0] = 0;
    for (size_t c = 0; c < n; c++)
        of[c + 1] = of[c] + rows[c];
}

/* What the CPU's maps would tell of chunks, and the receiver's tables. */
static void add_up_chunks(const moe_making *m, const flex_scratch *f) {
    size_t ranks = (size_t)m->shape.ranks, n = (size_t)m->shape.chunks, each = ranks * n;
    size_t me = (size_t)m->plan->buffer->peers.me;
    const uint32_t *mine = m->chunk_rows + me * 2 * each;
    uint64_t returned = 0;
    for (size_t r = 0; r < ranks; r++) {
        const uint32_t *theirs = m->chunk_rows + r * 2 * each;
        add_up(mine + r * n, n, f->send_first + r * (n + 1));
        add_up(mine + each + r * n, n, f->send_last + r * (n + 1));
        add_up(theirs + me * n, n, f->recv_first + r * (n + 1));
        add_up(theirs + each + me * n, n, f->recv_last + r * (n + 1));
        f->base[r] = (int32_t)f->recv_block[r];
    }
    for (size_t c = 0; c < n; c++)
        for (size_t r = 0; r < ranks; r++) {
            const uint32_t *last = f->recv_last + r * (n + 1);
            f->back_first[c * ranks + r] = returned;
            f->returns[r * n + c] = (int32_t)(returned - last[c]);
            returned += last[c + 1] - last[c];
        }
    size_t local = (size_t)m->plan->buffer->local;
    for (size_t e = 0; e < local; e++) {
        uint64_t row = m->plan->first[e];
        for (size_t r = 0; r < ranks; r++) {
            f->target[r * local + e] = (int32_t)row;
            row += m->counts[r * (size_t)m->shape.experts + me * local + e];
        }
    }
}

/* The sender's maps, and meta rows on their way. */
static epo_status send_on_device(const moe_making *m, const flex_scratch *f,
                                 const moe_flex_maps *at) {
    epo_plan *p = m->plan;
    epo_buffer *b = p->buffer;
    epo_group *g = b->group;
    epo_routes routes = moe_plan_routes(b, m->routing);
    uint32_t bytes = 4 * (uint32_t)epo_flex_meta_words(p->top_k);
    const char *meta = moe_arena_op(&p->arena, at->meta);
    epo_flex_send out = {.width = p->sum_width,
                         .token = moe_arena_op(&p->arena, at->token),
                         .sum = moe_arena_op(&p->arena, at->sum),
                         .slot_weight = moe_arena_op(&p->arena, at->slot_weight),
                         .meta = moe_arena_op(&p->arena, at->meta)};
    epo_deps deps = moe_deps("route send", EPO_INTERVAL_LOCAL, -1);
    deps.signal = g->rows;
    epo_status status = g->ops->flex_send(g->compute, &routes, &out, &deps);
    if (status != EPO_OK)
        return status;
    int rank = b->peers.me, ranks = b->peers.count;
    for (int i = 0; i < ranks; i++) {
        int peer = (rank + 1 + i) % ranks, to_rank = rank_of(b, peer);
        uint64_t rows = rows_between(m, rank, peer), in = rows_between(m, peer, rank);
        f->segments[i] = (epo_segment){.peer = to_rank,
                                       .src = meta + f->send_block[peer] * bytes,
                                       .dst_offset = b->meta_rows + f->there[peer] * bytes,
                                       .rows = rows,
                                       .row_bytes = bytes};
        f->arrivals[i] =
            (epo_arrival){to_rank, b->meta_rows + f->recv_block[peer] * bytes, in * bytes};
    }
    return moe_plan_exchange_meta(p, f->segments, ranks, f->arrivals, ranks, g->rows);
}

static epo_status receive_on_device(const moe_making *m, const flex_scratch *f) {
    epo_plan *p = m->plan;
    epo_buffer *b = p->buffer;
    epo_group *g = b->group;
    epo_flex_receive in = {.ranks = b->peers.count,
                           .local = b->local,
                           .top_k = p->top_k,
                           .chunks = p->chunks,
                           .meta = moe_buffer_at(b, b->meta_rows),
                           .base = f->base,
                           .target = f->target,
                           .returns = f->returns,
                           .received = p->back_rows,
                           .rows = p->rows,
                           .expand = (int32_t *)(uintptr_t)p->expand,
                           .back = (int32_t *)(uintptr_t)p->back,
                           .weight = p->weight};
    epo_deps pad = moe_deps("route pad", EPO_INTERVAL_LOCAL, -1);
    epo_deps deps = moe_deps("route receive", EPO_INTERVAL_LOCAL, -1);
    epo_status status = g->ops->route_pad(g->compute, p->first, p->count, b->local, p->rows,
                                          (int32_t *)(uintptr_t)p->pad, &pad);
    moe_deps_wait(&deps, moe_buffer_flag(b, b->meta_arrive, b->plans_made, "routing", -1));
    moe_deps_wait(&deps, epo_ready_event(g->sent));
    deps.signal = g->done;
    return status == EPO_OK ? g->ops->flex_receive(g->compute, &in, &deps) : status;
}

static epo_status fill_on_device(const moe_making *m, const flex_scratch *f,
                                 const moe_flex_maps *at) {
    epo_plan *p = m->plan;
    const int32_t *token = moe_arena_op(&p->arena, at->token);
    moe_flex_layout(p, at);
    moe_flex_name(p, at);
    add_up_chunks(m, f);
    make_lanes(m, f, token);
    if (p->singly)
        home_layout(m, at);
    epo_status status = moe_arena_publish(p->buffer->group, &p->arena, 0, at->token);
    if (status == EPO_OK)
        status = send_on_device(m, f, at);
    if (status == EPO_OK && p->singly)
        status = home_on_device(m, at);
    return status == EPO_OK ? receive_on_device(m, f) : status;
}

epo_status moe_flex_make(moe_making *m) {
    epo_plan *p = m->plan;
    epo_group *g = p->buffer->group;
    int rank = p->buffer->peers.me, ranks = p->buffer->peers.count;
    uint64_t sent = back_block(m, rank, ranks), received = window_block(m, ranks, rank);
    p->back_rows = received;
    p->sent = sent;
    p->sum_width = ranks < p->top_k ? ranks : p->top_k;
    flex_scratch f;
    moe_flex_maps at;
    moe_carver count = {NULL, 0, false};
    carve(&count, m, received, &f);
    moe_carver real = {count.failed ? NULL : calloc(1, count.used), 0, false};
    if (real.base == NULL)
        return epo_fail(EPO_E_NOMEM, "memory: need %" PRIu64 " bytes for the plan", count.used);
    carve(&real, m, received, &f);
    for (int r = 0; r < ranks; r++) {
        f.send_block[r] = back_block(m, rank, r);
        f.recv_block[r] = window_block(m, r, rank);
        f.there[r] = window_block(m, rank, r);
        f.home[r] = back_block(m, r, rank);
        f.source_rows[r] = rows_between(m, r, rank);
    }
    reserve(&p->arena, m, sent, received, &at);
    epo_status status = moe_arena_open(g, &p->arena);
    if (status == EPO_OK)
        status =
            moe_plan_on_device(p->buffer) ? fill_on_device(m, &f, &at) : fill(m, &f, sent, &at);
    free(real.base);
    return status;
}
