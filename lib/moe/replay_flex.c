/* SPDX-License-Identifier: Apache-2.0
 *
 * replay_flex.c - flex's plan in a buffer for graphs: what the CPU lays out does not depend
 * on the routing.  Each rank has a row for each of its tokens in every rank's window, in
 * token order; the device's maps say which of them a chunk sends (the others stay as they
 * are) and where each expert reads.  The sums of all of them come back, with the last chunk.
 */
#include "moe/moe.h"

/* Offsets in the plan's arena: what every plan of flex has, and what its routing needs here. */
typedef struct replay_maps {
    moe_flex_maps flex;
    uint64_t send_first, target, chunk;      /* the CPU's */
    uint64_t scratch, row, slot, send_token; /* of the routing */
} replay_maps;

static uint64_t tokens_of(const moe_making *m, int rank) {
    return m->rank_rows[(size_t)rank * (size_t)m->shape.ranks];
}

/* Rows of the ranks before `rank`, in any window. */
static uint64_t block_of(const moe_making *m, int rank) {
    uint64_t row = 0;
    for (int r = 0; r < rank; r++)
        row += tokens_of(m, r);
    return row;
}

static void reserve(const moe_making *m, const epo_routes *routes, replay_maps *at) {
    epo_plan *p = m->plan;
    moe_arena *arena = &p->arena;
    const uint64_t local = (uint64_t)p->buffer->local, experts = (uint64_t)m->shape.experts;
    const uint64_t k = (uint64_t)p->top_k, tokens = (uint64_t)p->tokens;
    const uint64_t all = (uint64_t)m->shape.ranks * tokens;
    at->flex.first = moe_arena_add(arena, local, sizeof(uint64_t));
    at->flex.count = moe_arena_add(arena, local, sizeof(uint64_t));
    at->send_first = moe_arena_add(arena, experts, sizeof(uint64_t));
    at->target = moe_arena_add(arena, experts, sizeof(uint64_t));
    at->chunk = moe_arena_add(arena, local, sizeof(int32_t));
    at->flex.pad = moe_arena_add(arena, p->rows, sizeof(int32_t));
    at->scratch = moe_arena_add(arena, p->buffer->group->ops->replay_scratch(routes), 1);
    at->row = moe_arena_add(arena, tokens * k, sizeof(int32_t));
    at->slot = moe_arena_add(arena, routes->fill, sizeof(int32_t));
    at->send_token = moe_arena_add(arena, routes->fill, sizeof(int32_t));
    at->flex.meta = moe_arena_add(arena, all * k, 2 * sizeof(int32_t));
    at->flex.token = moe_arena_add(arena, all * (uint64_t)p->chunks, sizeof(int32_t));
    at->flex.sum = moe_arena_add(arena, tokens * (uint64_t)p->sum_width, sizeof(int32_t));
    at->flex.slot_weight = moe_arena_add(arena, tokens * k, sizeof(int32_t));
    at->flex.expand = moe_arena_add(arena, p->rows, sizeof(int32_t));
    at->flex.back = moe_arena_add(arena, p->back_rows * k, sizeof(int32_t));
    at->flex.weight = moe_arena_add(arena, p->rows, sizeof(float));
}

/* The CPU's part. */
static epo_status write_layout(const moe_making *m, const replay_maps *at) {
    epo_plan *p = m->plan;
    const epo_route_shape *s = &m->shape;
    const int rank = p->buffer->group->rank;
    moe_flex_layout(p, &at->flex);
    epo_route_send_first(s, m->counts + (size_t)rank * (size_t)s->experts,
                         moe_arena_cpu(&p->arena, at->send_first));
    epo_route_targets(s, m->counts, rank, moe_arena_cpu(&p->arena, at->target));
    int32_t *chunk = moe_arena_cpu(&p->arena, at->chunk);
    for (int c = 0; c < p->chunks; c++)
        for (int e = epo_route_chunk_first(s, c); e < epo_route_chunk_first(s, c + 1); e++)
            chunk[e] = c;
    epo_route_pad(s, p->first, p->count, p->rows, moe_arena_cpu(&p->arena, at->flex.pad));
    return moe_arena_publish(p->buffer->group, &p->arena, 0, at->scratch);
}

static void add(moe_piece *list, int *at, moe_piece piece) {
    if (piece.rows > 0)
        list[(*at)++] = piece;
}

/* Chunk c between this rank and `peer`; all goes back with the last one. */
static void add_chunk(const moe_making *m, int peer, int c, int *n) {
    epo_plan *p = m->plan;
    const int rank = p->buffer->group->rank, ranks = m->shape.ranks;
    const uint64_t mine = (uint64_t)p->tokens, theirs = tokens_of(m, peer);
    const uint64_t there = block_of(m, rank), here = block_of(m, peer);
    const uint64_t map = ((uint64_t)c * (uint64_t)ranks + (uint64_t)peer) * mine;
    add(p->dispatch.send, &n[0], (moe_piece){peer, p->token + map, 0, there, mine});
    add(p->dispatch.recv, &n[1], (moe_piece){peer, NULL, 0, here, theirs});
    if (c < p->chunks - 1)
        return;
    add(p->combine.send, &n[2], (moe_piece){peer, NULL, here, (uint64_t)rank * theirs, theirs});
    add(p->combine.recv, &n[3], (moe_piece){peer, NULL, 0, (uint64_t)peer * mine, mine});
}

static void make_lanes(const moe_making *m) {
    epo_plan *p = m->plan;
    const int rank = p->buffer->group->rank, ranks = m->shape.ranks;
    int n[4] = {0, 0, 0, 0};
    for (int c = 0; c <= p->chunks; c++) {
        p->dispatch.send_first[c] = n[0];
        p->dispatch.recv_first[c] = n[1];
        p->combine.send_first[c] = n[2];
        p->combine.recv_first[c] = n[3];
        p->back_first[c] = c == p->chunks ? p->back_rows : 0;
        for (int i = 0; c < p->chunks && i < ranks; i++)
            add_chunk(m, (rank + 1 + i) % ranks, c, n);
    }
}

/* In stream order from here on. */
static epo_status map_routing(const moe_making *m, const epo_routes *routes,
                              const replay_maps *at) {
    epo_plan *p = m->plan;
    epo_group *g = p->buffer->group;
    const epo_replay_route route = {
        .scratch = moe_arena_op(&p->arena, at->scratch),
        .expert_first = moe_arena_op(&p->arena, at->send_first),
        .token = moe_arena_op(&p->arena, at->send_token),
        .slot = moe_arena_op(&p->arena, at->slot),
        .row = moe_arena_op(&p->arena, at->row),
        .overflow_is_error = p->buffer->overflow == EPO_OVERFLOW_ERROR,
    };
    const epo_replay_flex maps = {
        .row = route.row,
        .expert_first = route.expert_first,
        .target = moe_arena_op(&p->arena, at->target),
        .chunk = moe_arena_op(&p->arena, at->chunk),
        .chunks = p->chunks,
        .width = p->sum_width,
        .meta = moe_arena_op(&p->arena, at->flex.meta),
        .token = moe_arena_op(&p->arena, at->flex.token),
        .sum = moe_arena_op(&p->arena, at->flex.sum),
        .slot_weight = moe_arena_op(&p->arena, at->flex.slot_weight),
    };
    epo_deps judge = moe_deps("route", EPO_INTERVAL_LOCAL, -1);
    epo_deps send = moe_deps("route send", EPO_INTERVAL_LOCAL, -1);
    send.signal = g->rows;
    epo_status status = g->ops->replay_route(g->compute, routes, &route, &judge);
    return status == EPO_OK ? g->ops->replay_flex_send(g->compute, routes, &maps, &send) : status;
}

static epo_status exchange_meta(const moe_making *m, const replay_maps *at) {
    epo_plan *p = m->plan;
    const epo_buffer *b = p->buffer;
    const int rank = b->group->rank, ranks = m->shape.ranks;
    const uint64_t bytes = 2 * sizeof(int32_t) * (uint64_t)p->top_k;
    const char *meta = moe_arena_op(&p->arena, at->flex.meta);
    moe_lane *lane = &p->dispatch;
    for (int i = 0; i < ranks; i++) {
        const int peer = (rank + 1 + i) % ranks;
        const uint64_t mine = (uint64_t)p->tokens, theirs = tokens_of(m, peer);
        lane->segments[i] = (epo_segment){.peer = peer,
                                          .src = meta + (uint64_t)peer * mine * bytes,
                                          .dst_offset = b->meta_rows + block_of(m, rank) * bytes,
                                          .rows = mine,
                                          .row_bytes = (uint32_t)bytes};
        lane->arrivals[i] =
            (epo_arrival){peer, b->meta_rows + block_of(m, peer) * bytes, theirs * bytes};
    }
    return moe_plan_exchange_meta(p, lane->segments, ranks, lane->arrivals, ranks, b->group->rows);
}

static epo_status map_arrived(const moe_making *m, const replay_maps *at) {
    epo_plan *p = m->plan;
    epo_buffer *b = p->buffer;
    epo_group *g = b->group;
    const epo_replay_arrived in = {.meta = moe_buffer_at(b, b->meta_rows),
                                   .received = p->back_rows,
                                   .rows = p->rows,
                                   .top_k = p->top_k,
                                   .expand = moe_arena_op(&p->arena, at->flex.expand),
                                   .back = moe_arena_op(&p->arena, at->flex.back),
                                   .weight = p->weight};
    epo_deps deps = moe_deps("route receive", EPO_INTERVAL_LOCAL, -1);
    moe_deps_wait(&deps, moe_buffer_flag(b, b->meta_arrive, 0, "routing", -1));
    moe_deps_wait(&deps, epo_ready_event(g->sent));
    deps.signal = g->done;
    epo_status status = g->ops->replay_flex_arrived(g->compute, &in, &deps);
    return status == EPO_OK ? moe_plan_meta_credit(b) : status;
}

epo_status moe_flex_make_replay(moe_making *m) {
    epo_plan *p = m->plan;
    epo_group *g = p->buffer->group;
    const int ranks = m->shape.ranks;
    epo_routes routes = moe_plan_routes(p->buffer, m->routing);
    replay_maps at;
    routes.capacity = moe_capacity_of(p->buffer, p->tokens, p->top_k);
    routes.chunks = 0; /* nobody counts them */
    p->back_rows = block_of(m, ranks);
    p->sent = (uint64_t)ranks * (uint64_t)p->tokens;
    p->sum_width = ranks < p->top_k ? ranks : p->top_k;
    reserve(m, &routes, &at);
    epo_status status = moe_arena_open(g, &p->arena);
    if (status == EPO_OK) {
        moe_flex_name(p, &at.flex);
        make_lanes(m);
        status = write_layout(m, &at);
    }
    if (status == EPO_OK)
        status = map_routing(m, &routes, &at);
    if (status == EPO_OK)
        status = exchange_meta(m, &at);
    return status == EPO_OK ? map_arrived(m, &at) : status;
}
