/* SPDX-License-Identifier: Apache-2.0
 *
 * link.c - flex across nodes: what a plan needs beside the node's own maps.
 *
 * Before the plan the ranks tell each other their tokens and rows by node, then each sends,
 * once for every (token, other node), experts and weights to its relay there.  Behind the
 * rank's own tokens these make the routing of an ordinary plan among the node's ranks.  After
 * it the places of rows on the link follow from the same numbers on both ends.
 */
#include "moe/link.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A rank's record: this head, then rows[N] by node. */
typedef struct link_head {
    int32_t status, tokens, top_k, unused;
    char text[160];
} link_head;

/* What only the opening needs. */
typedef struct opening {
    epo_buffer *b;
    epo_routing *r;
    int32_t *experts; /* [T][K], of all nodes; -1: dropped, carried by others, unused */
    char *records;    /* [R] */
    uint64_t record_bytes, dropped;
    float *out_weight, *in_weight;
} opening;

static int link_rank(const epo_buffer *b, int node) { return b->peers.me + node * b->peers.count; }

static link_head head_of(const opening *o, int rank) {
    link_head head;
    memcpy(&head, o->records + (uint64_t)rank * o->record_bytes, sizeof head);
    head.text[sizeof head.text - 1] = '\0';
    return head;
}

static uint32_t rows_to(const opening *o, int rank, int node) {
    uint32_t rows;
    memcpy(&rows,
           o->records + (uint64_t)rank * o->record_bytes + sizeof(link_head) +
               (size_t)node * sizeof rows,
           sizeof rows);
    return rows;
}

/* ---- who sends how much --------------------------------------------------- */

/* What the capacity leaves of this rank's slots. */
static epo_status limit_slots(opening *o, const epo_route_shape *all) {
    const epo_buffer *b = o->b;
    uint32_t *rows = calloc((size_t)all->experts + (size_t)all->ranks, sizeof *rows);
    epo_status status =
        rows == NULL
            ? moe_plan_say(b, EPO_E_NOMEM, "memory: need room to count %d experts", all->experts)
            : EPO_OK;
    if (status == EPO_OK && moe_capacity_drops(b))
        status = moe_capacity_drop(b, o->r, o->experts, &o->dropped);
    if (status == EPO_OK) {
        epo_route_count(all, o->experts, o->r->tokens, rows, rows + all->experts);
        status = moe_capacity_check(b, o->r, rows);
    }
    free(rows);
    return status == EPO_OK ? EPO_OK : moe_plan_say_again(b, status);
}

/* This rank's routing on the CPU, and its record, complete whatever is wrong. */
static void write_record(opening *o, epo_status status, int nodes, char *record) {
    const epo_buffer *b = o->b;
    const epo_route_shape all = {
        .ranks = b->group->ranks, .experts = b->all_experts, .top_k = o->r->top_k};
    uint32_t *rows = (uint32_t *)(void *)(record + sizeof(link_head));
    if (status == EPO_OK) {
        o->experts = calloc((size_t)o->r->tokens * (size_t)o->r->top_k + 1, sizeof *o->experts);
        status = o->experts == NULL
                     ? moe_plan_say(b, EPO_E_NOMEM, "memory: need room for %d tokens", o->r->tokens)
                     : moe_plan_copy_experts(b, &all, o->r, o->experts);
    }
    if (status == EPO_OK) {
        moe_plan_drop_others(b->group, o->r, o->experts);
        status = limit_slots(o, &all);
    }
    if (status == EPO_OK)
        epo_route_node_count(o->experts, o->r->tokens, o->r->top_k, b->experts, nodes, rows);
    link_head head = {.status = (int32_t)status, .tokens = o->r->tokens, .top_k = o->r->top_k};
    if (status != EPO_OK)
        snprintf(head.text, sizeof head.text, "%s", epo_fail_text());
    memcpy(record, &head, sizeof head);
}

/* The same verdict on every rank. */
static epo_status judge(const opening *o) {
    const link_head first = head_of(o, 0);
    for (int r = 0; r < o->b->group->ranks; r++) {
        const link_head head = head_of(o, r);
        if (head.status != EPO_OK)
            return epo_fail((epo_status)head.status, "%s", head.text);
    }
    for (int r = 1; r < o->b->group->ranks; r++)
        if (head_of(o, r).top_k != first.top_k)
            return epo_fail(EPO_E_PEER,
                            "plan: top_k is %d on rank 0 and %d on rank %d; give all ranks the "
                            "same",
                            first.top_k, head_of(o, r).top_k, r);
    return EPO_OK;
}

static void carve(moe_carver *c, moe_link *l, opening *o) {
    const uint64_t n = (uint64_t)l->nodes, k = (uint64_t)o->r->top_k;
    uint64_t **counts[] = {&l->out_block, &l->in_block, &l->out_rows,    &l->in_rows,
                           &l->there,     &l->home,     &l->there_tokens};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        *counts[i] = moe_carve(c, n, sizeof(uint64_t));
    l->out_token = moe_carve(c, l->out, sizeof *l->out_token);
    l->out_sent = moe_carve(c, l->out, sizeof *l->out_sent);
    l->out_returned = moe_carve(c, l->out, sizeof *l->out_returned);
    l->in_sent = moe_carve(c, l->in, sizeof *l->in_sent);
    l->in_returned = moe_carve(c, l->in, sizeof *l->in_returned);
    l->out_expert = moe_carve(c, l->out * k, sizeof *l->out_expert);
    l->in_expert = moe_carve(c, l->in * k, sizeof *l->in_expert);
    o->out_weight = moe_carve(c, l->out * k, sizeof *o->out_weight);
    o->in_weight = moe_carve(c, l->in * k, sizeof *o->in_weight);
}

/* Rows of rank's blocks for nodes before `node`, its own node's not among them. */
static uint64_t rows_before(const opening *o, int rank, int node) {
    uint64_t rows = 0;
    for (int m = 0; m < node; m++)
        rows += m == rank / o->b->peers.count ? 0 : rows_to(o, rank, m);
    return rows;
}

/* The same for what comes to the rank's node from nodes before `node`. */
static uint64_t rows_from(const opening *o, int place, int to, int node) {
    uint64_t rows = 0;
    for (int m = 0; m < node; m++)
        rows += m == to ? 0 : rows_to(o, place + m * o->b->peers.count, to);
    return rows;
}

static epo_status count_links(opening *o, moe_link *l) {
    const int me = o->b->group->rank, place = o->b->peers.me;
    l->out = rows_before(o, me, l->nodes);
    l->in = rows_from(o, place, l->node, l->nodes);
    l->tokens = o->r->tokens;
    l->dropped = o->dropped;
    l->all = l->tokens + (int)l->in;
    moe_carver count = {NULL, 0, false};
    carve(&count, l, o);
    l->memory = count.failed ? NULL : calloc(1, count.used + 1);
    if (l->memory == NULL)
        return epo_fail(EPO_E_NOMEM, "memory: need %" PRIu64 " bytes for rows between nodes",
                        count.used);
    moe_carver real = {l->memory, 0, false};
    carve(&real, l, o);
    for (int m = 0; m < l->nodes; m++) {
        const int peer = link_rank(o->b, m);
        l->out_rows[m] = m == l->node ? 0 : rows_to(o, me, m);
        l->in_rows[m] = m == l->node ? 0 : rows_to(o, peer, l->node);
        l->out_block[m] = rows_before(o, me, m);
        l->in_block[m] = rows_from(o, place, l->node, m);
        l->there[m] = rows_from(o, place, m, l->node);
        l->home[m] = (uint64_t)o->b->max_tokens + rows_before(o, peer, l->node);
        l->there_tokens[m] = (uint64_t)head_of(o, peer).tokens;
    }
    return EPO_OK;
}

/* ---- experts and weights to the relays ------------------------------------ */

static epo_status read_weights(const opening *o, float *weights) {
    const uint64_t slots = (uint64_t)o->r->tokens * (uint64_t)o->r->top_k;
    if (o->r->weights != NULL && slots > 0)
        return moe_group_read(o->b->group, weights, o->r->weights, slots * sizeof *weights);
    for (uint64_t i = 0; i < slots; i++)
        weights[i] = 1.0F;
    return EPO_OK;
}

/* The rows of each node, from this rank's own slots. */
static void take_rows(const opening *o, const moe_link *l, const float *weights) {
    const uint64_t k = (uint64_t)o->r->top_k;
    for (int m = 0; m < l->nodes; m++) {
        const uint64_t at = l->out_block[m];
        if (m == l->node)
            continue;
        (void)epo_route_node_take(o->experts, l->tokens, o->r->top_k, o->b->experts, m,
                                  l->out_token + at, l->out_expert + at * k);
        for (uint64_t i = at * k; i < (at + l->out_rows[m]) * k; i++)
            o->out_weight[i] = weights[(uint64_t)l->out_token[i / k] * k + i % k];
    }
}

static epo_status exchange_rows(opening *o, const moe_link *l, const void *expert,
                                const void *weight) {
    epo_buffer *b = o->b;
    epo_group *g = b->group;
    const uint64_t k = (uint64_t)o->r->top_k;
    epo_segment *send = calloc(2 * (size_t)l->nodes, sizeof *send);
    epo_arrival *recv = calloc(2 * (size_t)l->nodes, sizeof *recv);
    epo_status status = send == NULL || recv == NULL
                            ? epo_fail(EPO_E_NOMEM, "memory: need room for %d nodes", l->nodes)
                            : EPO_OK;
    for (int i = 0; i < 2 * l->nodes && status == EPO_OK; i++) {
        const int m = i / 2, peer = link_rank(b, m);
        const uint64_t size = i % 2 == 0 ? sizeof(int64_t) : sizeof(float);
        const uint64_t to = i % 2 == 0 ? b->link_expert : b->link_weight;
        const char *src = i % 2 == 0 ? expert : weight;
        send[i] = (epo_segment){.peer = peer,
                                .src = src + l->out_block[m] * k * size,
                                .dst_offset = to + l->there[m] * k * size,
                                .rows = l->out_rows[m] * k,
                                .row_bytes = (uint32_t)size};
        recv[i] = (epo_arrival){peer, to + l->in_block[m] * k * size, l->in_rows[m] * k * size};
    }
    /* No credit: a peer's record of this plan came, so it has read the last one's. */
    epo_exchange x = {.window = b->window,
                      .send = send,
                      .nsend = 2 * l->nodes,
                      .recv = recv,
                      .nrecv = 2 * l->nodes,
                      .scope = EPO_SCOPE_LINK,
                      .flag_offset = b->link_arrive,
                      .epoch = ++b->links_made};
    const epo_deps deps = moe_deps("routing of nodes", EPO_INTERVAL_COMM, -1);
    if (status == EPO_OK) {
        moe_stats_exchange(g, MOE_BYTES_CONTROL, send, 0, x.nsend);
        status = g->ops->exchange(g->link, &x, &deps);
    }
    if (status == EPO_OK)
        status = moe_group_wait(
            g, moe_buffer_link_flag(b, x.flag_offset, x.epoch, "routing of nodes", -1),
            "routing of nodes");
    epo_status drained = moe_group_drain(g);
    free(recv);
    free(send);
    return status != EPO_OK ? status : drained;
}

/* Sends and receives them. */
static epo_status meet_relays(opening *o, const moe_link *l) {
    const epo_buffer *b = o->b;
    epo_group *g = b->group;
    const uint64_t k = (uint64_t)o->r->top_k;
    moe_arena arena = {0, false, {NULL, 0}, NULL};
    uint64_t expert = moe_arena_add(&arena, l->out * k, sizeof(int64_t));
    uint64_t weight = moe_arena_add(&arena, l->out * k, sizeof(float));
    epo_status status = moe_arena_open(g, &arena);
    if (status != EPO_OK)
        return status;
    memcpy(moe_arena_cpu(&arena, expert), l->out_expert, l->out * k * sizeof(int64_t));
    memcpy(moe_arena_cpu(&arena, weight), o->out_weight, l->out * k * sizeof(float));
    status = moe_arena_publish(g, &arena, 0, arena.bytes);
    if (status == EPO_OK)
        status = exchange_rows(o, l, moe_arena_op(&arena, expert), moe_arena_op(&arena, weight));
    if (status == EPO_OK)
        status = moe_group_read(g, l->in_expert, moe_buffer_at(b, b->link_expert),
                                l->in * k * sizeof(int64_t));
    if (status == EPO_OK)
        status = moe_group_read(g, o->in_weight, moe_buffer_at(b, b->link_weight),
                                l->in * k * sizeof(float));
    moe_arena_close(g, &arena);
    return status;
}

/* A peer's numbers lead to places in this rank's maps. */
static epo_status check_relayed(const opening *o, const moe_link *l) {
    const uint64_t slots = l->in * (uint64_t)o->r->top_k;
    for (uint64_t i = 0; i < slots; i++)
        if (l->in_expert[i] < -1 || l->in_expert[i] >= o->b->experts)
            return epo_fail(EPO_E_PEER,
                            "plan: another node names expert %" PRId64 " of %d of this node",
                            l->in_expert[i], o->b->experts);
    return EPO_OK;
}

/* ---- the routing of the node's plan ---------------------------------------- */

static epo_status make_routing(opening *o, moe_link *l, const float *weights) {
    epo_group *g = o->b->group;
    const uint64_t k = (uint64_t)o->r->top_k, own = (uint64_t)l->tokens * k;
    const int32_t first = l->node * o->b->experts;
    uint64_t expert = moe_arena_add(&l->routing, (uint64_t)l->all * k, sizeof(int64_t));
    uint64_t weight = moe_arena_add(&l->routing, (uint64_t)l->all * k, sizeof(float));
    epo_status status = moe_arena_open(g, &l->routing);
    if (status != EPO_OK)
        return status;
    l->experts = moe_arena_cpu(&l->routing, expert);
    l->weights = moe_arena_cpu(&l->routing, weight);
    for (uint64_t i = 0; i < own; i++) {
        const int32_t e = o->experts[i] - first;
        l->experts[i] = o->experts[i] >= 0 && e >= 0 && e < o->b->experts ? e : -1;
        l->weights[i] = weights[i];
    }
    memcpy(l->experts + own, l->in_expert, l->in * k * sizeof *l->experts);
    memcpy(l->weights + own, o->in_weight, l->in * k * sizeof *l->weights);
    status = moe_arena_publish(g, &l->routing, 0, l->routing.bytes);
    o->r->tokens = l->all;
    o->r->experts = moe_arena_op(&l->routing, expert);
    o->r->weights = moe_arena_op(&l->routing, weight);
    return status;
}

/* Behind the verdict that all ranks share. */
static epo_status open_links(opening *o, moe_link *l) {
    epo_status status = count_links(o, l);
    float *weights = calloc((size_t)o->r->tokens * (size_t)o->r->top_k + 1, sizeof *weights);
    if (status == EPO_OK && weights == NULL)
        status = epo_fail(EPO_E_NOMEM, "memory: need room for the weights of %d tokens", l->tokens);
    if (status == EPO_OK)
        status = read_weights(o, weights);
    if (status == EPO_OK) {
        take_rows(o, l, weights);
        status = meet_relays(o, l);
    }
    if (status == EPO_OK)
        status = check_relayed(o, l);
    if (status == EPO_OK)
        status = make_routing(o, l, weights);
    free(weights);
    return status;
}

epo_status moe_link_open(epo_buffer *b, epo_routing *routing, epo_status wrong, moe_link **out) {
    epo_group *g = b->group;
    const int nodes = g->ranks / b->peers.count;
    opening o = {.b = b, .r = routing};
    o.record_bytes = (sizeof(link_head) + (uint64_t)nodes * sizeof(uint32_t) + 7) / 8 * 8;
    char *mine = calloc(1, o.record_bytes);
    moe_link *l = calloc(1, sizeof *l);
    o.records = calloc((size_t)g->ranks, o.record_bytes);
    epo_status status = mine == NULL || l == NULL || o.records == NULL
                            ? epo_fail(EPO_E_NOMEM, "memory: need room for %d nodes", nodes)
                            : EPO_OK;
    if (status == EPO_OK) {
        l->nodes = nodes;
        l->node = g->rank / b->peers.count;
        write_record(&o, wrong, nodes, mine);
        status = g->ops->allgather(g->be, mine, o.record_bytes, o.records);
    }
    const bool met = status == EPO_OK;
    if (met)
        status = judge(&o);
    const bool agreed = met && status != EPO_OK;
    if (status == EPO_OK)
        status = open_links(&o, l);
    if (status != EPO_OK && !agreed)
        status = moe_group_break(g, status);
    free(o.experts);
    free(o.records);
    free(mine);
    if (status == EPO_OK)
        *out = l;
    else
        moe_link_free(g, l);
    return status;
}

void moe_link_free(epo_group *group, moe_link *link) {
    if (link == NULL)
        return;
    moe_arena_close(group, &link->maps);
    moe_arena_close(group, &link->routing);
    free(link->chunks_memory);
    free(link->memory);
    free(link);
}
