/* SPDX-License-Identifier: Apache-2.0
 *
 * link_maps.c - flex across nodes: where rows lie on the link and in its slots, once the
 * node's own maps are there.
 */
#include "moe/link.h"

#include <inttypes.h>
#include <stdlib.h>

/* Offsets in link->maps; the last three are made from the plan's maps, in operation memory. */
typedef struct link_maps {
    uint64_t index;       /* [out]: token of each row in sending order */
    uint64_t place;       /* [all]: row of the relay slot of each token of the plan */
    uint64_t back_of;     /* [in]: token of the plan of each row that goes home */
    uint64_t sum, weight; /* [tokens][N], [tokens][K] */
    uint64_t token, back_sum, back_weight;
} link_maps;

static void reserve(epo_plan *p, link_maps *at) {
    moe_link *l = p->link;
    const uint64_t k = (uint64_t)p->top_k, tokens = (uint64_t)l->tokens;
    at->index = moe_arena_add(&l->maps, l->out, sizeof(int32_t));
    at->place = moe_arena_add(&l->maps, (uint64_t)l->all, sizeof(int32_t));
    at->back_of = moe_arena_add(&l->maps, l->in, sizeof(int32_t));
    at->sum = moe_arena_add(&l->maps, tokens * (uint64_t)l->nodes, sizeof(int32_t));
    at->weight = moe_arena_add(&l->maps, tokens * k, sizeof(int32_t));
    at->token = moe_arena_add(&l->maps, p->sent, sizeof(int32_t));
    at->back_sum = moe_arena_add(&l->maps, l->in * (uint64_t)p->sum_width, sizeof(int32_t));
    at->back_weight = moe_arena_add(&l->maps, l->in * k, sizeof(int32_t));
}

/* What depends on the plan's chunks. */
static void carve(moe_carver *c, moe_link *l, int chunks) {
    const uint64_t n = (uint64_t)l->nodes, row = (uint64_t)chunks + 1;
    uint32_t **prefix[] = {&l->out_first, &l->out_last, &l->in_first, &l->in_last};
    for (size_t i = 0; i < sizeof prefix / sizeof *prefix; i++)
        *prefix[i] = moe_carve(c, n * row, sizeof(uint32_t));
    l->back_first = moe_carve(c, row, sizeof *l->back_first);
    moe_lane_carve(c, &l->dispatch, n * (uint64_t)chunks + 1, chunks);
    moe_lane_carve(c, &l->combine, n * (uint64_t)chunks + 1, chunks);
}

static void order_rows(const epo_plan *p) {
    const moe_link *l = p->link;
    const epo_route_shape s = moe_plan_shape(p);
    const uint64_t k = (uint64_t)p->top_k;
    for (int m = 0; m < l->nodes; m++) {
        const size_t at = (size_t)m * ((size_t)p->chunks + 1);
        const uint64_t out = l->out_block[m], in = l->in_block[m];
        epo_route_node_order(&s, l->out_expert + out * k, l->out_rows[m], l->out_first + at,
                             l->out_last + at, l->out_sent + out, l->out_returned + out);
        epo_route_node_order(&s, l->in_expert + in * k, l->in_rows[m], l->in_first + at,
                             l->in_last + at, l->in_sent + in, l->in_returned + in);
    }
}

/* The owner's side: what to send, and what to add up. */
static void map_own(epo_plan *p, const link_maps *at) {
    const moe_link *l = p->link;
    const int32_t k = p->top_k, n = l->nodes, most = p->buffer->max_tokens;
    int32_t *index = moe_arena_cpu(&l->maps, at->index), *sum = moe_arena_cpu(&l->maps, at->sum);
    int32_t *weight = moe_arena_cpu(&l->maps, at->weight);
    for (int32_t t = 0; t < l->tokens; t++) {
        bool here = false;
        for (int32_t i = t * k; i < (t + 1) * k; i++) {
            weight[i] = l->experts[i] >= 0 ? i : -1;
            here = here || l->experts[i] >= 0;
        }
        for (int32_t m = 0; m < n; m++)
            sum[t * n + m] = m == l->node && here ? t : -1;
    }
    for (int32_t m = 0; m < n; m++)
        for (uint64_t j = l->out_block[m]; j < l->out_block[m] + l->out_rows[m]; j++) {
            const int32_t t = l->out_token[j];
            const int32_t row = most + (int32_t)l->out_block[m] + l->out_returned[j];
            index[l->out_block[m] + (uint64_t)l->out_sent[j]] = t;
            sum[t * n + m] = row;
            for (int32_t i = 0; i < k; i++)
                if (l->out_expert[j * (uint64_t)k + (uint64_t)i] >= 0)
                    weight[t * k + i] = row * k + i;
        }
}

/* The relay's side: rows that go home are in the order (last chunk, node, token). */
static void map_relayed(epo_plan *p, const link_maps *at) {
    moe_link *l = p->link;
    int32_t *place = moe_arena_cpu(&l->maps, at->place);
    int32_t *back_of = moe_arena_cpu(&l->maps, at->back_of);
    uint64_t base = 0;
    for (int32_t t = 0; t < l->tokens; t++)
        place[t] = t;
    for (int c = 0; c < p->chunks; c++) {
        l->back_first[c] = base;
        for (int m = 0; m < l->nodes; m++) {
            const uint32_t *last = l->in_last + (size_t)m * ((size_t)p->chunks + 1) + c;
            for (uint64_t j = l->in_block[m]; j < l->in_block[m] + l->in_rows[m]; j++) {
                const uint32_t r = (uint32_t)l->in_returned[j];
                const int32_t token = l->tokens + (int32_t)j;
                place[token] = l->tokens + (int32_t)l->in_block[m] + l->in_sent[j];
                if (r >= last[0] && r < last[1])
                    back_of[base + r - last[0]] = token;
            }
            base += last[1] - last[0];
        }
    }
    l->back_first[p->chunks] = base;
}

static void add(moe_piece *list, int *at, moe_piece piece) {
    if (piece.rows > 0)
        list[(*at)++] = piece;
}

static void add_node(const epo_plan *p, int m, int c, const int32_t *index, uint64_t *base,
                     int *n) {
    const moe_link *l = p->link;
    const epo_buffer *b = p->buffer;
    const int rank = b->peers.me + m * b->peers.count;
    const size_t at = (size_t)m * ((size_t)p->chunks + 1) + (size_t)c;
    const uint64_t out = l->out_first[at], in = l->in_first[at];
    const uint64_t home = l->in_last[at], back = l->out_last[at];
    const uint64_t returned = l->in_last[at + 1] - home, own = (uint64_t)b->max_tokens;
    add(l->dispatch.send, &n[0],
        (moe_piece){rank, index + l->out_block[m] + out, 0, l->there_tokens[m] + l->there[m] + out,
                    l->out_first[at + 1] - out});
    add(l->dispatch.recv, &n[1],
        (moe_piece){rank, NULL, 0, (uint64_t)l->tokens + l->in_block[m] + in,
                    l->in_first[at + 1] - in});
    add(l->combine.send, &n[2], (moe_piece){rank, NULL, *base, l->home[m] + home, returned});
    add(l->combine.recv, &n[3],
        (moe_piece){rank, NULL, 0, own + l->out_block[m] + back, l->out_last[at + 1] - back});
    *base += returned;
}

static void make_lanes(epo_plan *p, const int32_t *index) {
    moe_link *l = p->link;
    int n[4] = {0, 0, 0, 0};
    uint64_t base = 0;
    for (int c = 0; c <= p->chunks; c++) {
        l->dispatch.send_first[c] = n[0];
        l->dispatch.recv_first[c] = n[1];
        l->combine.send_first[c] = n[2];
        l->combine.recv_first[c] = n[3];
        if (c == p->chunks)
            break;
        if (c == 0) /* this rank's own, with the first */
            add(l->dispatch.send, &n[0],
                (moe_piece){p->buffer->group->rank, NULL, 0, 0, (uint64_t)l->tokens});
        for (int m = 0; m < l->nodes; m++)
            add_node(p, m, c, index, &base, n);
    }
}

/* ---- from the plan's maps ------------------------------------------------- */

static epo_status gather_rows(epo_plan *p, const epo_rows_gather *gather, epo_event *signal) {
    epo_group *g = p->buffer->group;
    epo_deps deps = moe_deps("maps of nodes", EPO_INTERVAL_LOCAL, -1);
    deps.signal = signal;
    return g->ops->gather(g->compute, gather, &deps);
}

/* The rows of the node's dispatch lie where the relay slot has them; rows that go home
 * take the sums of their tokens. */
static epo_status derive(epo_plan *p, const link_maps *at) {
    moe_link *l = p->link;
    int32_t *token = moe_arena_op(&l->maps, at->token);
    int32_t *back_sum = moe_arena_op(&l->maps, at->back_sum);
    int32_t *back_weight = moe_arena_op(&l->maps, at->back_weight);
    const int32_t *back_of = moe_arena_op(&l->maps, at->back_of);
    const epo_rows_gather tokens = {.dst = token,
                                    .src = moe_arena_op(&l->maps, at->place),
                                    .index = p->token,
                                    .rows = p->sent,
                                    .row_bytes = sizeof(int32_t)};
    const epo_rows_gather sums = {.dst = back_sum,
                                  .src = p->sum,
                                  .index = back_of,
                                  .rows = l->in,
                                  .row_bytes = (uint32_t)p->sum_width * 4};
    const epo_rows_gather weights = {.dst = back_weight,
                                     .src = p->slot_weight,
                                     .index = back_of,
                                     .rows = l->in,
                                     .row_bytes = (uint32_t)p->top_k * 4};
    for (int i = 0; i < p->dispatch.send_first[p->chunks]; i++)
        p->dispatch.send[i].index = token + (p->dispatch.send[i].index - p->token);
    l->back_sum = back_sum;
    l->back_weight = back_weight;
    epo_status status = gather_rows(p, &tokens, NULL);
    if (status == EPO_OK)
        status = gather_rows(p, &sums, NULL);
    return status == EPO_OK ? gather_rows(p, &weights, p->buffer->group->done) : status;
}

epo_status moe_link_finish(epo_plan *p) {
    moe_link *l = p->link;
    epo_group *g = p->buffer->group;
    link_maps at;
    moe_carver count = {NULL, 0, false};
    carve(&count, l, p->chunks);
    l->chunks_memory = count.failed ? NULL : calloc(1, count.used);
    if (l->chunks_memory == NULL)
        return epo_fail(EPO_E_NOMEM, "memory: need %" PRIu64 " bytes for chunks between nodes",
                        count.used);
    moe_carver real = {l->chunks_memory, 0, false};
    carve(&real, l, p->chunks);
    reserve(p, &at);
    epo_status status = moe_arena_open(g, &l->maps);
    if (status != EPO_OK)
        return status;
    order_rows(p);
    map_own(p, &at);
    map_relayed(p, &at);
    l->sum = moe_arena_op(&l->maps, at.sum);
    l->weight = moe_arena_op(&l->maps, at.weight);
    make_lanes(p, moe_arena_op(&l->maps, at.index));
    status = moe_arena_publish(g, &l->maps, 0, at.token);
    p->tokens = l->tokens;
    return status == EPO_OK ? derive(p, &at) : status;
}
