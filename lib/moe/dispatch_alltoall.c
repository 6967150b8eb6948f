/* SPDX-License-Identifier: Apache-2.0
 *
 * dispatch_alltoall.c - one row per (token, slot), written straight to its place
 * in the owner's expert-major layout; back into the sender's own order.
 */
#include "moe/moe.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

typedef struct alltoall_maps {
    uint64_t first, count;     /* layout, for operations */
    uint64_t returns[2];       /* rows that go back */
    uint64_t token, slot, row; /* of each send row; of each slot */
    uint64_t pad, weight;
    uint64_t send_first, own, ones, scratch; /* of a plan that graphs replay */
} alltoall_maps;

static void reserve(moe_arena *arena, const moe_making *m, uint64_t sent, alltoall_maps *at) {
    const epo_plan *p = m->plan;
    uint64_t local = (uint64_t)p->buffer->local;
    at->first = moe_arena_add(arena, local, sizeof(uint64_t));
    at->count = moe_arena_add(arena, local, sizeof(uint64_t));
    for (int i = 0; i < 2; i++)
        at->returns[i] = moe_arena_add(arena, local * (uint64_t)m->shape.ranks, sizeof(int32_t));
    if (p->buffer->replays) {
        uint64_t experts = (uint64_t)m->shape.experts;
        uint64_t slots = (uint64_t)p->tokens * (uint64_t)p->top_k;
        epo_routes routes = moe_plan_routes(p->buffer, m->routing);
        at->send_first = moe_arena_add(arena, experts, sizeof(uint64_t));
        at->own = moe_arena_add(arena, experts, sizeof(uint64_t));
        at->ones = moe_arena_add(arena, m->weights == NULL ? slots : 0, sizeof(float));
        at->scratch = moe_arena_add(arena, p->buffer->group->ops->replay_scratch(&routes), 1);
    }
    at->token = moe_arena_add(arena, sent, sizeof(int32_t));
    at->slot = moe_arena_add(arena, sent, sizeof(int32_t));
    at->row = moe_arena_add(arena, (uint64_t)p->tokens * (uint64_t)p->top_k, sizeof(int32_t));
    at->pad = moe_arena_add(arena, p->rows, sizeof(int32_t));
    at->weight = moe_arena_add(arena, p->rows, sizeof(float));
}

/* Prefix sums over experts and sources, per rank where that matters. */
typedef struct alltoall_places {
    uint64_t *send_first; /* [E]: first send row of each expert on this rank */
    uint64_t *cursor;     /* [E] */
    uint64_t *target;     /* [E]: where this rank's rows begin at the owner */
    uint64_t *own;        /* [E]: the same for this rank's experts, UINT64_MAX elsewhere */
    uint64_t *source;     /* [R][El]: first send row, on each rank, of my experts */
    void *memory;
} alltoall_places;

static void carve_places(moe_carver *c, const moe_making *m, alltoall_places *at) {
    uint64_t experts = (uint64_t)m->shape.experts;
    at->send_first = moe_carve(c, experts, sizeof(uint64_t));
    at->cursor = moe_carve(c, experts, sizeof(uint64_t));
    at->target = moe_carve(c, experts, sizeof(uint64_t));
    at->own = moe_carve(c, experts, sizeof(uint64_t));
    at->source = moe_carve(c, experts, sizeof(uint64_t));
}

static void find_places(const moe_making *m, alltoall_places *at) {
    const epo_route_shape *s = &m->shape;
    size_t experts = (size_t)s->experts, local = (size_t)epo_route_local(s);
    int rank = m->plan->buffer->group->rank;
    for (size_t r = 0; r < (size_t)s->ranks; r++) {
        epo_route_send_first(s, m->counts + r * experts, at->cursor);
        for (size_t e = 0; e < local; e++)
            at->source[r * local + e] = at->cursor[(size_t)rank * local + e];
    }
    epo_route_targets(s, m->counts, rank, at->target);
    for (size_t e = 0; e < experts; e++)
        at->own[e] = e / local == (size_t)rank ? at->target[e] : UINT64_MAX;
    epo_route_send_first(s, m->counts + (size_t)rank * experts, at->send_first);
}

static void add(moe_piece *list, int *at, moe_piece piece) {
    if (piece.rows > 0)
        list[(*at)++] = piece;
}

/* The experts of one chunk between this rank and `peer`, in expert order: out to
 * the peer's experts, in to mine, and both ways back. */
static void add_chunk(const moe_making *m, const alltoall_places *at, int peer, int c,
                      const int32_t *token, uint64_t *mine, int *n) {
    const epo_route_shape *s = &m->shape;
    epo_plan *p = m->plan;
    size_t local = (size_t)epo_route_local(s), me = (size_t)p->buffer->group->rank;
    for (int e = epo_route_chunk_first(s, c); e < epo_route_chunk_first(s, c + 1); e++) {
        size_t theirs = (size_t)peer * local + (size_t)e, ours = me * local + (size_t)e;
        uint64_t out = m->counts[me * (size_t)s->experts + theirs];
        uint64_t in = m->counts[(size_t)peer * (size_t)s->experts + ours];
        uint64_t from = at->source[(size_t)peer * local + (size_t)e];
        uint64_t row = mine[(size_t)peer * local + (size_t)e];
        add(p->dispatch.send, &n[0],
            (moe_piece){peer, token + at->send_first[theirs], 0, at->target[theirs], out});
        add(p->dispatch.recv, &n[1], (moe_piece){peer, NULL, 0, row, in});
        if (p->own_stays && (size_t)peer == me)
            continue;
        add(p->combine.send, &n[2], (moe_piece){peer, NULL, row, from, in});
        add(p->combine.recv, &n[3], (moe_piece){peer, NULL, 0, at->send_first[theirs], out});
    }
}

/* mine[R][El]: where each source's rows begin in this rank's layout. */
static void make_lanes(const moe_making *m, const alltoall_places *at, const int32_t *token,
                       uint64_t *mine) {
    const epo_route_shape *s = &m->shape;
    epo_plan *p = m->plan;
    size_t local = (size_t)epo_route_local(s), me = (size_t)p->buffer->group->rank;
    int n[4] = {0, 0, 0, 0};
    for (size_t e = 0; e < local; e++) {
        uint64_t row = p->first[e];
        for (size_t r = 0; r < (size_t)s->ranks; r++) {
            mine[r * local + e] = row;
            row += m->counts[r * (size_t)s->experts + me * local + e];
        }
    }
    for (int c = 0; c < s->chunks; c++) {
        p->dispatch.send_first[c] = n[0];
        p->dispatch.recv_first[c] = n[1];
        p->combine.send_first[c] = n[2];
        p->combine.recv_first[c] = n[3];
        for (int i = 0; i < s->ranks; i++)
            add_chunk(m, at, ((int)me + 1 + i) % s->ranks, c, token, mine, n);
    }
    p->dispatch.send_first[s->chunks] = n[0];
    p->dispatch.recv_first[s->chunks] = n[1];
    p->combine.send_first[s->chunks] = n[2];
    p->combine.recv_first[s->chunks] = n[3];
}

/* Router weights take the rows' way, four bytes each. */
static epo_status exchange_weights(const moe_making *m, const int32_t *slot, const int32_t *token,
                                   const float *ones) {
    epo_plan *p = m->plan;
    const moe_lane *lane = &p->dispatch;
    int chunks = p->chunks;
    uint64_t base = p->buffer->meta_weight;
    const float *weights = m->weights != NULL ? m->weights : ones;
    for (int i = 0; i < lane->send_first[chunks]; i++) {
        const moe_piece *s = &lane->send[i];
        lane->segments[i] = (epo_segment){.peer = s->peer,
                                          .src = weights,
                                          .index = slot + (s->index - token),
                                          .dst_offset = base + s->dst_row * sizeof(float),
                                          .rows = s->rows,
                                          .row_bytes = sizeof(float)};
    }
    for (int i = 0; i < lane->recv_first[chunks]; i++) {
        const moe_piece *s = &lane->recv[i];
        lane->arrivals[i] =
            (epo_arrival){s->peer, base + s->dst_row * sizeof(float), s->rows * sizeof(float)};
    }
    epo_status status = moe_plan_exchange_meta(
        p, lane->segments, lane->send_first[chunks], lane->arrivals, lane->recv_first[chunks],
        moe_plan_on_device(p->buffer) ? p->buffer->group->rows : NULL);
    return status == EPO_OK ? moe_plan_gather_weights(p, moe_buffer_at(p->buffer, base), p->pad)
                            : status;
}

static void name_maps(epo_plan *p, const alltoall_maps *at) {
    p->op_first = moe_arena_op(&p->arena, at->first);
    p->op_count = moe_arena_op(&p->arena, at->count);
    p->returns_first = moe_arena_op(&p->arena, at->returns[0]);
    p->returns_to = moe_arena_op(&p->arena, at->returns[1]);
    p->expand = p->pad = moe_arena_op(&p->arena, at->pad);
    p->weight = moe_arena_op(&p->arena, at->weight);
    p->sum = p->slot_weight = moe_arena_op(&p->arena, at->row);
    p->sum_width = p->top_k;
}

/* Maps by the device; the CPU writes the layout alone. */
static epo_status map_on_device(const moe_making *m, const alltoall_places *places,
                                const alltoall_maps *at) {
    epo_plan *p = m->plan;
    epo_group *g = p->buffer->group;
    const epo_routing *r = m->routing;
    epo_routes routes = moe_plan_routes(p->buffer, r);
    epo_deps send = moe_deps("route send", EPO_INTERVAL_LOCAL, -1);
    epo_deps pad = moe_deps("route pad", EPO_INTERVAL_LOCAL, -1);
    epo_status status = moe_arena_publish(g, &p->arena, 0, at->token);
    pad.signal = g->rows;
    if (status == EPO_OK)
        status = g->ops->route_send(
            g->compute, &routes, places->send_first, p->own_stays ? places->own : NULL,
            moe_arena_op(&p->arena, at->token), moe_arena_op(&p->arena, at->slot),
            moe_arena_op(&p->arena, at->row), &send);
    if (status == EPO_OK)
        status = g->ops->route_pad(g->compute, p->first, p->count, p->buffer->local, p->rows,
                                   moe_arena_op(&p->arena, at->pad), &pad);
    return status;
}

/* What does not depend on the routing by the CPU, once; the rest whenever it runs. */
static epo_status map_in_replays(const moe_making *m, const alltoall_places *places,
                                 const alltoall_maps *at) {
    epo_plan *p = m->plan;
    epo_group *g = p->buffer->group;
    size_t experts = (size_t)m->shape.experts;
    epo_routes routes = moe_plan_routes(p->buffer, m->routing);
    routes.capacity = moe_capacity_of(p->buffer, p->tokens, p->top_k);
    epo_replay_route r = {
        .scratch = moe_arena_op(&p->arena, at->scratch),
        .expert_first = moe_arena_op(&p->arena, at->send_first),
        .own_row = p->own_stays ? moe_arena_op(&p->arena, at->own) : NULL,
        .token = moe_arena_op(&p->arena, at->token),
        .slot = moe_arena_op(&p->arena, at->slot),
        .row = moe_arena_op(&p->arena, at->row),
        .overflow_is_error = p->buffer->overflow == EPO_OVERFLOW_ERROR,
    };
    epo_deps deps = moe_deps("route", EPO_INTERVAL_LOCAL, -1);
    memcpy(moe_arena_cpu(&p->arena, at->send_first), places->send_first, experts * 8);
    memcpy(moe_arena_cpu(&p->arena, at->own), places->own, experts * 8);
    for (uint64_t i = 0; m->weights == NULL && i < (uint64_t)p->tokens * (uint64_t)p->top_k; i++)
        ((float *)moe_arena_cpu(&p->arena, at->ones))[i] = 1.0F;
    epo_route_pad(&m->shape, p->first, p->count, p->rows, moe_arena_cpu(&p->arena, at->pad));
    deps.signal = g->rows;
    epo_status status = moe_arena_publish(g, &p->arena, 0, at->scratch);
    if (status == EPO_OK)
        status = moe_arena_publish(g, &p->arena, at->pad, at->weight);
    return status == EPO_OK ? g->ops->replay_route(g->compute, &routes, &r, &deps) : status;
}

static epo_status make_maps(const moe_making *m, const alltoall_places *places, uint64_t sent,
                            const alltoall_maps *at) {
    const epo_route_shape *s = &m->shape;
    epo_plan *p = m->plan;
    uint64_t *first = moe_arena_cpu(&p->arena, at->first),
             *count = moe_arena_cpu(&p->arena, at->count);
    for (int e = 0; e < epo_route_local(s); e++) {
        first[e] = p->first[e];
        count[e] = p->count[e];
    }
    epo_route_returns(s, m->counts, p->buffer->group->rank, p->first,
                      moe_arena_cpu(&p->arena, at->returns[0]),
                      moe_arena_cpu(&p->arena, at->returns[1]));
    if (p->buffer->replays)
        return map_in_replays(m, places, at);
    if (moe_plan_on_device(p->buffer))
        return map_on_device(m, places, at);
    for (uint64_t i = 0; i < sent && m->capacity != NULL; i++) { /* padding: no slot's */
        ((int32_t *)moe_arena_cpu(&p->arena, at->token))[i] = -1;
        ((int32_t *)moe_arena_cpu(&p->arena, at->slot))[i] = -1;
    }
    epo_route_send(s, m->experts, p->tokens, places->send_first, places->cursor,
                   moe_arena_cpu(&p->arena, at->token), moe_arena_cpu(&p->arena, at->slot),
                   moe_arena_cpu(&p->arena, at->row));
    epo_route_pad(s, p->first, p->count, p->rows, moe_arena_cpu(&p->arena, at->pad));
    return moe_arena_publish(p->buffer->group, &p->arena, 0, at->weight);
}

epo_status moe_alltoall_make(moe_making *m) {
    epo_plan *p = m->plan;
    epo_group *g = p->buffer->group;
    const epo_route_shape *s = &m->shape;
    alltoall_maps at = {0};
    alltoall_places places;
    uint64_t sent = 0;
    for (int e = 0; e < s->experts; e++)
        sent += m->counts[(size_t)g->rank * (size_t)s->experts + (size_t)e];
    moe_carver count = {NULL, 0, false};
    carve_places(&count, m, &places);
    uint64_t *mine = moe_carve(&count, (uint64_t)s->experts, sizeof *mine);
    moe_carver real = {calloc(1, count.used), 0, false};
    if (real.base == NULL)
        return epo_fail(EPO_E_NOMEM, "memory: need %" PRIu64 " bytes for the plan", count.used);
    carve_places(&real, m, &places);
    mine = moe_carve(&real, (uint64_t)s->experts, sizeof *mine);
    find_places(m, &places);
    p->own_stays = moe_plan_on_device(p->buffer) && g->ops->info(g->be)->own_rows;
    reserve(&p->arena, m, sent, &at);
    epo_status status = moe_arena_open(g, &p->arena);
    if (status == EPO_OK) {
        const int32_t *token = moe_arena_op(&p->arena, at.token);
        name_maps(p, &at);
        make_lanes(m, &places, token, mine);
        status = make_maps(m, &places, sent, &at);
        if (status == EPO_OK)
            status = exchange_weights(m, moe_arena_op(&p->arena, at.slot), token,
                                      moe_arena_op(&p->arena, at.ones));
    }
    free(real.base);
    return status;
}
