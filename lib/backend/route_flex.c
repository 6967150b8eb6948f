/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/route.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

/* Ranks word*64 .. word*64+63 that own an expert of the token, one bit each, so that what
 * a token costs depends on its slots, not on how many ranks there are. */
static uint64_t token_ranks(const epo_route_shape *s, const int32_t *e, int word) {
    const uint32_t local = (uint32_t)epo_route_local(s), from = (uint32_t)word * 64;
    uint64_t ranks = 0;
    for (int k = 0; k < s->top_k; k++) {
        const uint32_t rank = (uint32_t)e[k] / local - from; /* e == -1: far beyond */
        ranks |= e[k] >= 0 && rank < 64 ? UINT64_C(1) << rank : 0;
    }
    return ranks;
}
static int rank_words(const epo_route_shape *s) { return (s->ranks + 63) / 64; }
/* Takes the lowest rank out of the word's. */
static int ranks_next(uint64_t *ranks, int word) {
    const int rank = word * 64 + __builtin_ctzll(*ranks);
    *ranks &= *ranks - 1;
    return rank;
}

/* First and last chunk of rank d, which owns one of the token's experts, that use it.
 * Chunks grow with experts, so two divisions do for all slots. */
static void token_chunks(const epo_route_shape *s, const int32_t *e, int d, int *first, int *last) {
    int32_t local = epo_route_local(s), from = d * local, low = local, high = -1;
    for (int k = 0; k < s->top_k; k++) {
        /* Without branches: which slots are here is anybody's guess. */
        int32_t at = e[k] - from, in = (uint32_t)at < (uint32_t)local;
        int32_t up = in ? at : local, down = in ? at : -1;
        low = up < low ? up : low;
        high = down > high ? down : high;
    }
    *first = epo_route_chunk_of(s, low);
    *last = epo_route_chunk_of(s, high);
}

/* of[R][n+1] holds counts at [r][c+1]; makes prefix sums and copies them, shifted
 * by base[r] (NULL: 0), into cursor[R][n]. */
static void prefix(const epo_route_shape *s, uint32_t *of, const uint64_t *base, uint32_t *cursor) {
    int n = s->chunks;
    for (int r = 0; r < s->ranks; r++) {
        uint32_t *p = of + (size_t)r * (size_t)(n + 1);
        uint32_t from = base != NULL ? (uint32_t)base[r] : 0;
        for (int c = 0; c < n; c++) {
            cursor[(size_t)r * (size_t)n + (size_t)c] = from + p[c];
            p[c + 1] += p[c];
        }
    }
}

static void count_chunks(const epo_route_shape *s, const int32_t *experts, int tokens,
                         uint32_t *first_of, uint32_t *last_of) {
    size_t row = (size_t)s->chunks + 1;
    memset(first_of, 0, (size_t)s->ranks * row * sizeof *first_of);
    memset(last_of, 0, (size_t)s->ranks * row * sizeof *last_of);
    for (int t = 0; t < tokens; t++) {
        const int32_t *e = experts + (size_t)t * (size_t)s->top_k;
        for (int word = 0; word < rank_words(s); word++)
            for (uint64_t ranks = token_ranks(s, e, word); ranks != 0;) {
                const int d = ranks_next(&ranks, word);
                int f, l;
                token_chunks(s, e, d, &f, &l);
                first_of[(size_t)d * row + (size_t)f + 1]++;
                last_of[(size_t)d * row + (size_t)l + 1]++;
            }
    }
}

/* One row: token t goes to rank d as meta row m and comes back as row `back`. */
static void place_meta(const epo_route_shape *s, const int32_t *e, int t, int d, uint32_t m,
                       uint32_t back, const epo_route_flex_send *out) {
    int32_t local = epo_route_local(s), from = d * local, width = s->top_k;
    int32_t flat = t * width, at = (int32_t)back * width;
    int32_t *expert = out->meta_expert + (size_t)m * (size_t)width;
    int32_t *slot = out->meta_slot + (size_t)m * (size_t)width;
    int32_t *weight = out->weight + flat;
    for (int32_t k = 0; k < width; k++) {
        int32_t here = e[k] - from, in = -((uint32_t)here < (uint32_t)local); /* all bits */
        expert[k] = (here & in) | ~in;
        slot[k] = ((flat + k) & in) | ~in;
        weight[k] = ((at + k) & in) | (weight[k] & ~in);
    }
}

/* Next rows, [R][n] to each chunk and back from it, and meta rows, [R]. */
typedef struct send_cursor {
    uint32_t *send, *back, *meta;
} send_cursor;

/* Token t to the word's ranks; how many of `sum` are used then. */
static int place_token(const epo_route_shape *s, const int32_t *e, int t, int word, int used,
                       const send_cursor *at, const epo_route_flex_send *out) {
    int32_t *sum = out->sum + (size_t)t * (size_t)out->width;
    const size_t n = (size_t)s->chunks;
    for (uint64_t ranks = token_ranks(s, e, word); ranks != 0;) {
        const int d = ranks_next(&ranks, word);
        int first, last;
        token_chunks(s, e, d, &first, &last);
        const uint32_t returned = at->back[(size_t)d * n + (size_t)last]++;
        out->token[at->send[(size_t)d * n + (size_t)first]++] = t;
        sum[used++] = (int32_t)returned;
        place_meta(s, e, t, d, at->meta[d]++, returned, out);
    }
    return used;
}

void epo_route_flex_make_send(const epo_route_shape *s, const int32_t *experts, int tokens,
                              uint32_t *cursor, epo_route_flex_send *out) {
    size_t n = (size_t)s->chunks, blocks = (size_t)s->ranks * n;
    const send_cursor at = {cursor, cursor + blocks, cursor + 2 * blocks};
    count_chunks(s, experts, tokens, out->first_of, out->last_of);
    prefix(s, out->first_of, out->rank_first, at.send);
    prefix(s, out->last_of, out->rank_first, at.back);
    for (int d = 0; d < s->ranks; d++)
        at.meta[d] = (uint32_t)out->rank_first[d];
    for (int t = 0; t < tokens; t++) {
        const int32_t *e = experts + (size_t)t * (size_t)s->top_k;
        int32_t *sum = out->sum + (size_t)t * (size_t)out->width;
        int used = 0;
        for (int k = 0; k < s->top_k; k++)
            out->weight[(size_t)t * (size_t)s->top_k + (size_t)k] = -1;
        for (int word = 0; word < rank_words(s); word++)
            used = place_token(s, e, t, word, used, &at, out);
        while (used < out->width)
            sum[used++] = -1;
    }
}

/* As token_chunks, over local experts; false: a value is impossible. */
static bool meta_chunks(const epo_route_shape *s, const int32_t *e, int *first, int *last) {
    int32_t local = epo_route_local(s), low = local, high = -1;
    bool bad = false;
    for (int k = 0; k < s->top_k; k++) {
        bad |= e[k] < -1 || e[k] >= local;
        low = e[k] >= 0 && e[k] < low ? e[k] : low;
        high = e[k] > high ? e[k] : high;
    }
    if (bad || high < 0)
        return false;
    *first = epo_route_chunk_of(s, low);
    *last = epo_route_chunk_of(s, high);
    return true;
}

static uint64_t count_meta(const epo_route_shape *s, const int32_t *meta_expert,
                           const uint32_t *source_rows, epo_route_flex_recv *out) {
    size_t row = (size_t)s->chunks + 1;
    uint64_t m = 0;
    memset(out->first_of, 0, (size_t)s->ranks * row * sizeof *out->first_of);
    memset(out->last_of, 0, (size_t)s->ranks * row * sizeof *out->last_of);
    for (int r = 0, f, l; r < s->ranks; r++)
        for (uint32_t i = 0; i < source_rows[r]; i++, m++) {
            if (!meta_chunks(s, meta_expert + m * (uint64_t)s->top_k, &f, &l))
                return m + 1;
            out->first_of[(size_t)r * row + (size_t)f + 1]++;
            out->last_of[(size_t)r * row + (size_t)l + 1]++;
        }
    return 0;
}

/* Prefix sums in place; start[R][n] of the window and of the returning order. */
static void recv_starts(const epo_route_shape *s, const uint32_t *source_rows, uint64_t *window,
                        uint64_t *back, epo_route_flex_recv *out) {
    size_t n = (size_t)s->chunks;
    uint64_t base = 0, returned = 0;
    for (size_t c = 0; c < n; c++)
        for (size_t r = 0; r < (size_t)s->ranks; r++) {
            out->back_first[c * (size_t)s->ranks + r] = back[r * n + c] = returned;
            returned += out->last_of[r * (n + 1) + c + 1];
        }
    for (size_t r = 0; r < (size_t)s->ranks; r++) {
        uint32_t *first = out->first_of + r * (n + 1), *last = out->last_of + r * (n + 1);
        for (size_t c = 0; c < n; c++) {
            window[r * n + c] = base + first[c];
            first[c + 1] += first[c];
            last[c + 1] += last[c];
        }
        base += source_rows[r];
    }
}

uint64_t epo_route_flex_make_recv(const epo_route_shape *s, const int32_t *meta_expert,
                                  const uint32_t *source_rows, uint64_t *cursor,
                                  epo_route_flex_recv *out) {
    size_t n = (size_t)s->chunks, local = (size_t)epo_route_local(s), width = (size_t)s->top_k;
    uint64_t *next = cursor, *window = cursor + local, *back = window + (size_t)s->ranks * n;
    uint64_t m = 0, end = 0, bad = count_meta(s, meta_expert, source_rows, out);
    if (bad != 0)
        return bad;
    recv_starts(s, source_rows, window, back, out);
    memcpy(next, out->first, local * sizeof *next);
    for (uint64_t i = 0; i < out->rows; i++)
        out->expand[i] = out->weight[i] = -1;
    for (size_t r = 0; r < (size_t)s->ranks; r++) {
        end += out->block != NULL ? out->block[r] : 0;
        for (uint32_t i = 0; i < source_rows[r]; i++, m++) {
            int first, last;
            const int32_t *e = meta_expert + m * width;
            meta_chunks(s, e, &first, &last);
            uint64_t from = window[r * n + (size_t)first]++, to = back[r * n + (size_t)last]++;
            for (size_t k = 0; k < width; k++) {
                out->back[to * width + k] = -1;
                if (e[k] < 0)
                    continue;
                uint64_t row = next[e[k]]++;
                uint64_t limit = out->block != NULL ? end : out->count[e[k]];
                if (row >= out->first[e[k]] + limit)
                    return m + 1;
                out->expand[row] = (int32_t)from;
                out->weight[row] = (int32_t)(m * width + k);
                out->back[to * width + k] = (int32_t)row;
            }
        }
        for (size_t e = 0; e < local && out->block != NULL; e++)
            next[e] = out->first[e] + end;
    }
    for (size_t e = 0; e < local; e++)
        if (next[e] != out->first[e] + out->count[e])
            return m + 1;
    return 0;
}
