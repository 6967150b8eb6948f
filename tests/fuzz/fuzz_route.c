/* SPDX-License-Identifier: Apache-2.0
 *
 * Routing tables, and what peers claim to send: six bytes of shape, then the tables of
 * all ranks, one byte a slot, then bytes that damage what one rank receives.
 */
#include "fuzz.h"

#include "backend/route.h"

#include <stdbool.h>

enum { RANKS = 4, LOCAL = 5, SLOTS = 6, TOKENS = 12 };

typedef struct input {
    const uint8_t *at;
    size_t left;
} input;

static uint8_t next(input *in) {
    if (in->left == 0)
        return 0;
    in->left--;
    return *in->at++;
}

/* Of exact size, so that a sanitizer sees one entry too far. */
static void *room(uint64_t count, size_t size) {
    void *p = calloc(count > 0 ? count : 1, size);
    if (p == NULL)
        abort();
    return p;
}

typedef struct world {
    epo_route_shape s;
    int tokens[RANKS];
    int32_t *experts[RANKS];
    uint32_t *counts, *rank_rows; /* [R][E], [R][R] */
} world;

/* False: a table names an expert that does not exist, and the right slot was told. */
static bool read_tables(world *w, input *in) {
    bool fine = true;
    for (int r = 0; r < w->s.ranks; r++) {
        w->tokens[r] = next(in) % (TOKENS + 1);
        uint64_t slots = (uint64_t)w->tokens[r] * (uint64_t)w->s.top_k, wrong = slots;
        int64_t *given = room(slots, sizeof *given);
        for (uint64_t i = 0; i < slots; i++) {
            uint8_t byte = next(in);
            given[i] = byte == 255   ? -1
                       : byte == 254 ? INT64_MIN
                       : byte == 253 ? (INT64_C(1) << 32)
                                     : byte % (w->s.experts + (byte > 250));
            if (wrong == slots && (given[i] < -1 || given[i] >= w->s.experts))
                wrong = i;
        }
        w->experts[r] = room(slots, sizeof *w->experts[r]);
        if (epo_route_check(&w->s, given, w->tokens[r], w->experts[r]) != wrong)
            abort();
        fine = fine && wrong == slots;
        free(given);
    }
    return fine;
}

static void count(world *w) {
    for (int r = 0; r < w->s.ranks; r++)
        epo_route_count(&w->s, w->experts[r], w->tokens[r], w->counts + r * w->s.experts,
                        w->rank_rows + r * w->s.ranks);
}

static void send_alltoall(const world *w, int r) {
    size_t experts = (size_t)w->s.experts, slots = (size_t)w->tokens[r] * (size_t)w->s.top_k;
    const uint32_t *counts = w->counts + (size_t)r * experts;
    uint64_t rows = 0, *first = room(experts, 8), *cursor = room(experts, 8);
    for (size_t e = 0; e < experts; e++)
        rows += counts[e];
    int32_t *token = room(rows, 4), *slot = room(rows, 4), *row = room(slots, 4);
    epo_route_send_first(&w->s, counts, first);
    epo_route_send(&w->s, w->experts[r], w->tokens[r], first, cursor, token, slot, row);
    for (uint64_t i = 0; i < rows; i++)
        if (row[slot[i]] != (int32_t)i || token[i] != slot[i] / w->s.top_k)
            abort(); /* a row goes out for each slot, once */
    free(first), free(cursor), free(token), free(slot), free(row);
}

/* What rank r sends to rank 0 by flex: its meta rows, appended. */
static uint64_t send_flex(const world *w, int r, int32_t *meta, uint64_t at) {
    size_t ranks = (size_t)w->s.ranks, n = (size_t)w->s.chunks, k = (size_t)w->s.top_k;
    uint64_t block[RANKS], rows = 0;
    for (size_t d = 0; d < ranks; d++) {
        block[d] = rows;
        rows += w->rank_rows[(size_t)r * ranks + d];
    }
    int width = w->s.ranks < w->s.top_k ? w->s.ranks : w->s.top_k;
    uint64_t slots = (uint64_t)w->tokens[r] * k;
    uint32_t *cursor = room(3 * ranks * n, 4);
    epo_route_flex_send out = {block,
                               room(ranks * (n + 1), 4),
                               room(ranks * (n + 1), 4),
                               room(rows, 4),
                               room(rows * k, 4),
                               room(rows * k, 4),
                               room((uint64_t)w->tokens[r] * (uint64_t)width, 4),
                               width,
                               room(slots, 4)};
    epo_route_flex_make_send(&w->s, w->experts[r], w->tokens[r], cursor, &out);
    uint64_t mine = w->rank_rows[(size_t)r * ranks];
    memcpy(meta + at * k, out.meta_expert, mine * k * 4);
    free(cursor), free(out.first_of), free(out.last_of), free(out.token), free(out.meta_expert);
    free(out.meta_slot), free(out.sum), free(out.weight);
    return at + mine;
}

/* Whatever the peers claim, nothing is written beside the maps and nothing points beside
 * the window. */
static void receive(const world *w, const int32_t *meta, uint64_t got, bool damaged) {
    size_t ranks = (size_t)w->s.ranks, n = (size_t)w->s.chunks, k = (size_t)w->s.top_k;
    size_t local = (size_t)epo_route_local(&w->s);
    uint64_t *first = room(local, 8), *count = room(local, 8);
    uint64_t rows = epo_route_layout(&w->s, w->counts, 0, first, count);
    uint64_t *cursor = room(local + 2 * ranks * n, 8);
    uint32_t source_rows[RANKS];
    for (size_t r = 0; r < ranks; r++)
        source_rows[r] = w->rank_rows[r * ranks];
    epo_route_flex_recv in = {.first = first,
                              .count = count,
                              .rows = rows,
                              .first_of = room(ranks * (n + 1), 4),
                              .last_of = room(ranks * (n + 1), 4),
                              .expand = room(rows, 4),
                              .weight = room(rows, 4),
                              .back = room(got * k, 4),
                              .back_first = room(n * ranks, 8)};
    uint64_t wrong = epo_route_flex_make_recv(&w->s, meta, source_rows, cursor, &in);
    if (wrong != 0 && !damaged)
        abort();
    for (uint64_t i = 0; wrong == 0 && i < rows; i++)
        if (in.expand[i] < -1 || in.expand[i] >= (int64_t)got || in.weight[i] < -1 ||
            in.weight[i] >= (int64_t)(got * k))
            abort();
    for (uint64_t i = 0; wrong == 0 && i < got * k; i++)
        if (in.back[i] < -1 || in.back[i] >= (int64_t)rows)
            abort();
    free(first), free(count), free(cursor), free(in.first_of), free(in.last_of), free(in.expand);
    free(in.weight), free(in.back), free(in.back_first);
}

static void exchange(const world *w, input *in) {
    size_t k = (size_t)w->s.top_k;
    uint64_t got = 0, at = 0;
    for (int r = 0; r < w->s.ranks; r++)
        got += w->rank_rows[(size_t)r * (size_t)w->s.ranks];
    int32_t *meta = room(got * k, 4);
    for (int r = 0; r < w->s.ranks; r++) {
        send_alltoall(w, r);
        at = send_flex(w, r, meta, at);
    }
    receive(w, meta, got, false);
    while (got > 0 && in->left > 1) {
        uint64_t where = next(in) % (got * k);
        int8_t what = (int8_t)next(in);
        meta[where] = what == 127 ? INT32_MAX : what == -128 ? INT32_MIN : what;
    }
    receive(w, meta, got, true);
    free(meta);
}

static void drop(world *w, int r, input *in) {
    uint64_t slots = (uint64_t)w->tokens[r] * (uint64_t)w->s.top_k, capacity = next(in) % 5;
    bool by_weight = next(in) % 2 == 1;
    float *weights = room(slots, sizeof *weights);
    uint32_t *rows = room((uint64_t)w->s.experts, 4), *left = room((uint64_t)w->s.experts, 4);
    uint32_t ranks[RANKS];
    epo_route_rival *rivals = room(slots, sizeof *rivals);
    for (uint64_t i = 0; i < slots; i++) {
        uint32_t bits = (uint32_t)next(in) << 24;
        memcpy(&weights[i], &bits, sizeof bits);
    }
    epo_route_drop(&w->s, w->experts[r], weights, w->tokens[r], capacity, by_weight, rows, rivals);
    epo_route_count(&w->s, w->experts[r], w->tokens[r], left, ranks);
    for (int e = 0; e < w->s.experts; e++)
        if (left[e] > capacity)
            abort();
    free(weights), free(rows), free(left), free(rivals);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, size};
    world w = {.s.ranks = 1 + next(&in) % RANKS};
    int local = 1 + next(&in) % LOCAL;
    w.s.experts = w.s.ranks * local;
    w.s.top_k = 1 + next(&in) % SLOTS;
    w.s.chunks = 1 + next(&in) % local;
    w.s.align = 1 + next(&in) % 8;
    bool dropping = next(&in) % 2 == 1;
    w.counts = room((uint64_t)w.s.ranks * (uint64_t)w.s.experts, 4);
    w.rank_rows = room((uint64_t)w.s.ranks * (uint64_t)w.s.ranks, 4);
    if (read_tables(&w, &in)) {
        for (int r = 0; dropping && r < w.s.ranks; r++)
            drop(&w, r, &in);
        count(&w);
        exchange(&w, &in);
    }
    for (int r = 0; r < w.s.ranks; r++)
        free(w.experts[r]);
    free(w.counts);
    free(w.rank_rows);
    return 0;
}
