/* SPDX-License-Identifier: Apache-2.0
 *
 * Index maps against brute force: a row carries (source, token, slot) as its value,
 * is moved as the maps say, and must be where the definition of expert-major rows
 * puts it, and come back to where it came from.
 */
#include "backend/route.h"
#include "backend/route_flex_step.h"
#include "moe_reference.h"
#include "unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 5, TOKENS = 12, SLOTS = 6, EXPERTS = 40, ROWS = 4096 };

/* Routings of all ranks and what counting gave. */
typedef struct world {
    epo_route_shape s;
    int tokens[RANKS];
    int64_t given[RANKS][TOKENS * SLOTS];
    int32_t experts[RANKS][TOKENS * SLOTS];
    uint32_t counts[RANKS * EXPERTS], rank_rows[RANKS][RANKS];
    uint64_t first[RANKS][EXPERTS], count[RANKS][EXPERTS], rows[RANKS];
    int want[RANKS][ROWS]; /* expert-major rows by definition: label or -1 */
} world;

static int label(int source, int flat) { return source * TOKENS * SLOTS + flat; }

static void random_world(world *w, uint64_t *state) {
    memset(w, 0, sizeof *w);
    w->s.ranks = 1 + (int)(moe_random(state) % RANKS);
    int local = 1 + (int)(moe_random(state) % (EXPERTS / RANKS));
    w->s.experts = w->s.ranks * local;
    w->s.top_k = 1 + (int)(moe_random(state) % SLOTS);
    w->s.chunks = 1 + (int)(moe_random(state) % (uint32_t)local);
    w->s.align = 1 + (int)(moe_random(state) % 9);
    uint32_t few = 1 + moe_random(state) % (uint32_t)w->s.experts;
    for (int r = 0; r < w->s.ranks; r++) {
        w->tokens[r] = (int)(moe_random(state) % (TOKENS + 1));
        for (int i = 0; i < w->tokens[r] * w->s.top_k; i++)
            w->given[r][i] = (int64_t)(moe_random(state) % (few + 1)) - 1;
    }
}

/* (local expert, source, token, slot), each expert aligned. */
static void define_rows(world *w) {
    int local = epo_route_local(&w->s);
    for (int d = 0; d < w->s.ranks; d++) {
        int row = 0;
        for (int e = 0; e < local; e++) {
            for (int r = 0; r < w->s.ranks; r++)
                for (int i = 0; i < w->tokens[r] * w->s.top_k; i++)
                    if (w->given[r][i] == d * local + e)
                        w->want[d][row++] = label(r, i);
            while (row % w->s.align != 0)
                w->want[d][row++] = -1;
        }
        w->rows[d] = (uint64_t)row;
    }
}

static void count_world(world *w) {
    for (int r = 0; r < w->s.ranks; r++) {
        uint64_t slots = (uint64_t)w->tokens[r] * (uint64_t)w->s.top_k;
        CU_ASSERT_EQUAL(epo_route_check(&w->s, w->given[r], w->tokens[r], w->experts[r]), slots);
        epo_route_count(&w->s, w->experts[r], w->tokens[r], w->counts + r * w->s.experts,
                        w->rank_rows[r]);
    }
    for (int d = 0; d < w->s.ranks; d++) {
        uint64_t rows = epo_route_layout(&w->s, w->counts, d, w->first[d], w->count[d]);
        CU_ASSERT_EQUAL(rows, w->rows[d]);
    }
}

static void chunks_cut_the_experts(const epo_route_shape *s) {
    int local = epo_route_local(s);
    CU_ASSERT_EQUAL(epo_route_chunk_first(s, 0), 0);
    CU_ASSERT_EQUAL(epo_route_chunk_first(s, s->chunks), local);
    for (int c = 0; c < s->chunks; c++) {
        CU_ASSERT(epo_route_chunk_first(s, c) < epo_route_chunk_first(s, c + 1));
        for (int e = epo_route_chunk_first(s, c); e < epo_route_chunk_first(s, c + 1); e++)
            CU_ASSERT_EQUAL(epo_route_chunk_of(s, e), c);
    }
}

/* Every number of experts and chunks: none empty, half ones at the ends. */
static void chunks_taper(void) {
    for (int local = 1; local <= 130; local++)
        for (int n = 1; n <= local; n++) {
            epo_route_shape s = {.ranks = 1, .experts = local, .chunks = n, .tapered = true};
            chunks_cut_the_experts(&s);
            if (n > 2 && local % (2 * (n - 1)) == 0) {
                CU_ASSERT_EQUAL(epo_route_chunk_first(&s, 1), local / (2 * (n - 1)));
                CU_ASSERT_EQUAL(epo_route_chunk_first(&s, 2), 3 * local / (2 * (n - 1)));
                CU_ASSERT_EQUAL(epo_route_chunk_first(&s, n - 1), local - local / (2 * (n - 1)));
            }
        }
}

/* ---- alltoall ------------------------------------------------------------- */

static void alltoall_places_rows(world *w) {
    static int got[RANKS][ROWS];
    uint64_t first[EXPERTS], cursor[EXPERTS], target[EXPERTS];
    int32_t token[TOKENS * SLOTS], slot[TOKENS * SLOTS], row[TOKENS * SLOTS];
    int local = epo_route_local(&w->s), k = w->s.top_k;
    memset(got, 0xff, sizeof got);
    for (int r = 0; r < w->s.ranks; r++) {
        const uint32_t *counts = w->counts + r * w->s.experts;
        epo_route_send_first(&w->s, counts, first);
        epo_route_send(&w->s, w->experts[r], w->tokens[r], first, cursor, token, slot, row);
        epo_route_targets(&w->s, w->counts, r, target);
        for (int e = 0; e < w->s.experts; e++)
            for (uint32_t i = 0; i < counts[e]; i++) {
                uint64_t at = first[e] + i;
                got[e / local][target[e] + i] = label(r, slot[at]);
                CU_ASSERT_EQUAL(token[at], slot[at] / k);
                CU_ASSERT_EQUAL(row[slot[at]], (int32_t)at);
            }
        for (int i = 0; i < w->tokens[r] * k; i++)
            CU_ASSERT_EQUAL(row[i] < 0, w->given[r][i] < 0);
    }
    for (int d = 0; d < w->s.ranks; d++) {
        int32_t pad[ROWS];
        CU_ASSERT_EQUAL(memcmp(got[d], w->want[d], w->rows[d] * sizeof(int)), 0);
        epo_route_pad(&w->s, w->first[d], w->count[d], w->rows[d], pad);
        for (uint64_t i = 0; i < w->rows[d]; i++)
            CU_ASSERT_EQUAL(pad[i], w->want[d][i] < 0 ? -1 : (int32_t)i);
    }
}

/* Each of a rank's rows, sent where the map says, is the slot that the source put there. */
static void alltoall_returns_rows(world *w) {
    int32_t first[EXPERTS * RANKS], to[EXPERTS * RANKS];
    int32_t token[TOKENS * SLOTS], slot[RANKS][TOKENS * SLOTS], row[TOKENS * SLOTS];
    uint64_t begin[EXPERTS], cursor[EXPERTS], returned[RANKS] = {0};
    int local = epo_route_local(&w->s), ranks = w->s.ranks;
    for (int r = 0; r < ranks; r++) {
        epo_route_send_first(&w->s, w->counts + r * w->s.experts, begin);
        epo_route_send(&w->s, w->experts[r], w->tokens[r], begin, cursor, token, slot[r], row);
    }
    for (int d = 0; d < ranks; d++) {
        epo_route_returns(&w->s, w->counts, d, w->first[d], first, to);
        for (int e = 0; e < local; e++)
            for (int r = 0; r < ranks; r++) {
                int at = e * ranks + r;
                int end = r < ranks - 1 ? first[at + 1] : (int)(w->first[d][e] + w->count[d][e]);
                for (int i = first[at]; i < end; i++, returned[r]++)
                    CU_ASSERT_EQUAL(w->want[d][i], label(r, slot[r][to[at] + i - first[at]]));
            }
    }
    for (int r = 0; r < ranks; r++) { /* and all of them come back */
        uint64_t sent = 0;
        for (int e = 0; e < w->s.experts; e++)
            sent += w->counts[r * w->s.experts + e];
        CU_ASSERT_EQUAL(returned[r], sent);
    }
}

/* ---- flex ------------------------------------------------------------------ */

typedef struct flex_side {
    uint64_t block[RANKS];
    uint32_t first_of[RANKS * (EXPERTS + 1)], last_of[RANKS * (EXPERTS + 1)];
    int32_t token[TOKENS * RANKS], meta[TOKENS * RANKS * SLOTS], slot[TOKENS * RANKS * SLOTS];
    int32_t sum[TOKENS * SLOTS], weight[TOKENS * SLOTS];
    int width;
} flex_side;

static void flex_send(const world *w, int r, flex_side *f) {
    uint32_t cursor[3 * RANKS * EXPERTS];
    uint64_t at = 0;
    for (int d = 0; d < w->s.ranks; d++) {
        f->block[d] = at;
        at += w->rank_rows[r][d];
    }
    f->width = w->s.ranks < w->s.top_k ? w->s.ranks : w->s.top_k;
    epo_route_flex_send out = {f->block, f->first_of, f->last_of, f->token, f->meta,
                               f->slot,  f->sum,      f->width,   f->weight};
    epo_route_flex_make_send(&w->s, w->experts[r], w->tokens[r], cursor, &out);
}

typedef struct flex_received {
    uint32_t source_rows[RANKS], first_of[RANKS * (EXPERTS + 1)], last_of[RANKS * (EXPERTS + 1)];
    int32_t meta[RANKS * TOKENS * SLOTS];
    int slot[RANKS * TOKENS * SLOTS]; /* label of each meta slot, or -1 */
    int32_t expand[ROWS], weight[ROWS], back[RANKS * TOKENS * SLOTS];
    uint64_t back_first[EXPERTS * RANKS];
    int window[RANKS * TOKENS]; /* (source, token) of each window row */
} flex_received;

/* What rank d receives from all, and its maps. */
static uint64_t flex_recv(const world *w, int d, const flex_side *side, flex_received *f) {
    uint64_t cursor[EXPERTS + 2 * RANKS * EXPERTS], m = 0;
    size_t k = (size_t)w->s.top_k;
    for (int r = 0; r < w->s.ranks; r++) {
        f->source_rows[r] = w->rank_rows[r][d];
        for (uint32_t i = 0; i < f->source_rows[r]; i++, m++) {
            uint64_t from = side[r].block[d] + i;
            f->window[m] = r * TOKENS + side[r].token[from];
            for (size_t j = 0; j < k; j++) {
                int32_t flat = side[r].slot[from * k + j];
                f->meta[m * k + j] = side[r].meta[from * k + j];
                f->slot[m * k + j] = flat < 0 ? -1 : label(r, flat);
            }
        }
    }
    epo_route_flex_recv in = {.first = w->first[d],
                              .count = w->count[d],
                              .rows = w->rows[d],
                              .first_of = f->first_of,
                              .last_of = f->last_of,
                              .expand = f->expand,
                              .weight = f->weight,
                              .back = f->back,
                              .back_first = f->back_first};
    return epo_route_flex_make_recv(&w->s, f->meta, f->source_rows, cursor, &in);
}

static void flex_expands(const world *w, int d, const flex_received *f) {
    size_t k = (size_t)w->s.top_k;
    for (uint64_t i = 0; i < w->rows[d]; i++) {
        int want = w->want[d][i];
        CU_ASSERT_EQUAL(want < 0, f->expand[i] < 0);
        CU_ASSERT_EQUAL(want < 0, f->weight[i] < 0);
        if (want < 0 || f->expand[i] < 0 || f->weight[i] < 0)
            continue;
        int source = want / (TOKENS * SLOTS), token = want % (TOKENS * SLOTS) / (int)k;
        CU_ASSERT_EQUAL(f->window[f->expand[i]], source * TOKENS + token);
        CU_ASSERT_EQUAL(f->slot[f->weight[i]], want);
    }
}

/* Chunk c of a source holds the rows whose first use is c; what returns after
 * chunk c needs no later chunk, and something of c. */
static void flex_orders_by_chunk(const world *w, int d, const flex_side *side,
                                 const flex_received *f) {
    size_t n = (size_t)w->s.chunks, k = (size_t)w->s.top_k;
    uint64_t base = 0;
    for (int r = 0; r < w->s.ranks; r++) {
        const uint32_t *mine = f->first_of + (size_t)r * (n + 1);
        CU_ASSERT_EQUAL(memcmp(mine, side[r].first_of + (size_t)d * (n + 1), (n + 1) * 4), 0);
        CU_ASSERT_EQUAL(memcmp(f->last_of + (size_t)r * (n + 1),
                               side[r].last_of + (size_t)d * (n + 1), (n + 1) * 4),
                        0);
        CU_ASSERT_EQUAL(mine[n], f->source_rows[r]);
        for (uint64_t i = 0; i < w->rows[d]; i++) {
            int at = f->expand[i];
            if (at < 0 || f->window[at] / TOKENS != r)
                continue;
            int e = epo_route_local(&w->s) - 1;
            while (w->first[d][e] > i || w->count[d][e] == 0)
                e--;
            /* Arrived with a chunk that is not later than the expert's. */
            CU_ASSERT((uint64_t)at < base + mine[epo_route_chunk_of(&w->s, e) + 1]);
        }
        base += f->source_rows[r];
    }
    for (size_t c = 0; c < n; c++)
        for (int r = 0; r < w->s.ranks; r++) {
            const uint32_t *last = f->last_of + (size_t)r * (n + 1);
            uint64_t from = f->back_first[c * (size_t)w->s.ranks + (size_t)r];
            for (uint64_t row = from; row < from + last[c + 1] - last[c]; row++) {
                int latest = -1;
                for (size_t j = 0; j < k; j++) {
                    int32_t at = f->back[row * k + j];
                    for (int e = 0; at >= 0 && e < epo_route_local(&w->s); e++)
                        if ((uint64_t)at >= w->first[d][e] &&
                            (uint64_t)at < w->first[d][e] + w->count[d][e] &&
                            epo_route_chunk_of(&w->s, e) > latest)
                            latest = epo_route_chunk_of(&w->s, e);
                }
                CU_ASSERT_EQUAL(latest, (int)c);
            }
        }
}

/* Rows return into labels[source][returned row][slot]. */
static void flex_returns(const world *w, int d, const flex_side *side, const flex_received *f,
                         int (*labels)[TOKENS * RANKS * SLOTS]) {
    size_t n = (size_t)w->s.chunks, k = (size_t)w->s.top_k;
    for (int r = 0; r < w->s.ranks; r++)
        for (size_t c = 0; c < n; c++) {
            const uint32_t *last = side[r].last_of + (size_t)d * (n + 1);
            for (uint32_t i = last[c]; i < last[c + 1]; i++) {
                uint64_t to = side[r].block[d] + i;
                uint64_t from = f->back_first[c * (size_t)w->s.ranks + (size_t)r] + i - last[c];
                for (size_t j = 0; j < k; j++) {
                    int32_t row = f->back[from * k + j];
                    labels[r][to * k + j] = row < 0 ? -1 : w->want[d][row];
                }
            }
        }
}

/* Every slot of a token is in exactly one of the returned rows that it sums. */
static void flex_sums(const world *w, int r, const flex_side *f, const int *labels) {
    size_t k = (size_t)w->s.top_k;
    for (int t = 0; t < w->tokens[r]; t++)
        for (size_t j = 0; j < k; j++) {
            int flat = t * (int)k + (int)j, found = 0;
            for (int i = 0; i < f->width; i++) {
                int32_t row = f->sum[t * f->width + i];
                for (size_t s = 0; row >= 0 && s < k; s++)
                    found += labels[(size_t)row * k + s] == label(r, flat);
                CU_ASSERT(i == 0 || row < 0 || row > f->sum[t * f->width + i - 1]);
            }
            CU_ASSERT_EQUAL(found, w->given[r][flat] < 0 ? 0 : 1);
            CU_ASSERT_EQUAL(f->weight[flat] < 0, w->given[r][flat] < 0);
            if (f->weight[flat] >= 0)
                CU_ASSERT_EQUAL(labels[f->weight[flat]], label(r, flat));
        }
}

/* ---- flex by blocks of tokens, as a device does it ------------------------- */

enum { META = EPO_FLEX_META_HEAD + 3 * SLOTS + 3 };

typedef struct step_side {
    int32_t token[TOKENS * RANKS], sum[TOKENS * SLOTS], weight[TOKENS * SLOTS];
    int32_t place[TOKENS * SLOTS];
    int32_t meta[TOKENS * RANKS * META];
    uint32_t next[EXPERTS + 2 * RANKS * EXPERTS]; /* columns: experts, first, last */
} step_side;

/* What a thread block adds to its columns: tokens [from, past), or all its rows placed. */
static void step_block(const world *w, int r, int from, int past, bool place, const uint64_t *block,
                       step_side *f) {
    const epo_route_shape *s = &w->s;
    int k = s->top_k, local = epo_route_local(s), n = s->chunks;
    int width = s->ranks < k ? s->ranks : k, words = epo_flex_meta_words(k);
    uint32_t *firsts = f->next + s->experts, *lasts = firsts + s->ranks * n;
    for (int i = from * k; i < past * k; i++)
        if (w->experts[r][i] >= 0)
            f->place[i] = (int32_t)f->next[w->experts[r][i]]++;
    for (int t = from; t < past; t++) {
        const int32_t *e = w->experts[r] + t * k;
        int used = 0, first, last;
        for (int d = 0; d < s->ranks; d++) {
            if (!epo_flex_token_chunks(e, k, local, n, d, &first, &last))
                continue;
            int32_t sent = (int32_t)firsts[d * n + first]++, back = (int32_t)lasts[d * n + last]++;
            if (!place)
                continue;
            f->token[(int32_t)block[d] + sent] = t;
            f->sum[t * width + used++] = (int32_t)block[d] + back;
            int32_t *row = f->meta + ((int32_t)block[d] + sent) * words;
            for (int at = 0; at < words; at++)
                row[at] = (int32_t)epo_flex_meta_word(at, e, f->place + t * k, NULL, k, local, d,
                                                      back, last);
            for (int j = 0; j < k; j++)
                if (e[j] >= d * local && e[j] < (d + 1) * local)
                    f->weight[t * k + j] = ((int32_t)block[d] + back) * k + j;
        }
        while (place && used < width)
            f->sum[t * width + used++] = -1;
    }
}

/* Counts of all tokens, then every block's places from the sums before it. */
static void step_send(const world *w, int r, int tokens, const uint64_t *block, step_side *f) {
    const epo_route_shape *s = &w->s;
    int n = s->chunks;
    static step_side counted;
    memset(f, 0xff, sizeof *f);
    memset(counted.next, 0, sizeof counted.next);
    step_block(w, r, 0, w->tokens[r], false, block, &counted);
    for (int from = 0; from < w->tokens[r]; from += tokens) {
        int past = from + tokens < w->tokens[r] ? from + tokens : w->tokens[r];
        memset(f->next, 0, sizeof f->next);
        step_block(w, r, 0, from, false, block, f);
        for (int i = 0; i < 2 * s->ranks; i++) { /* chunks of a block follow each other */
            uint32_t sum = 0;
            for (int c = 0; c < n; c++) {
                f->next[s->experts + i * n + c] += sum;
                sum += counted.next[s->experts + i * n + c];
            }
        }
        step_block(w, r, from, past, true, block, f);
    }
}

/* The receiver's maps from meta rows, in any order of threads. */
static bool step_recv(const world *w, int d, const flex_side *side, const step_side *step,
                      const flex_received *f, const epo_flex_arrived *out) {
    int n = w->s.chunks, local = epo_route_local(&w->s);
    size_t words = (size_t)epo_flex_meta_words(w->s.top_k);
    uint64_t target[EXPERTS], base = 0, all = 0;
    bool good = true;
    for (int r = 0; r < w->s.ranks; r++)
        all += f->source_rows[r];
    for (int r = 0; r < w->s.ranks; r++) {
        int32_t mine[EXPERTS], returns[EXPERTS];
        epo_route_targets(&w->s, w->counts, r, target);
        for (int e = 0; e < local; e++)
            mine[e] = (int32_t)target[d * local + e];
        for (int c = 0; c < n; c++)
            returns[c] = (int32_t)(f->back_first[c * w->s.ranks + r] - f->last_of[r * (n + 1) + c]);
        epo_flex_source from = {step[r].meta + side[r].block[d] * words,
                                mine,
                                returns,
                                (int32_t)base,
                                (int32_t)w->rows[d],
                                (int32_t)all};
        for (int k = w->s.top_k - 1; k >= 0; k--)
            for (uint32_t i = f->source_rows[r]; i-- > 0;)
                good = epo_flex_arrive(&from, out, (int32_t)i, k, w->s.top_k, local, n) && good;
        base += f->source_rows[r];
    }
    return good;
}

static void steps_agree(const world *w, const flex_side *side, const step_side *step, int d,
                        const flex_received *f) {
    static int32_t expand[ROWS], back[RANKS * TOKENS * SLOTS];
    static float weight[ROWS];
    memset(expand, 0xff, sizeof expand);
    memset(weight, 0, sizeof weight);
    memset(back, 0xee, sizeof back);
    epo_flex_arrived out = {expand, weight, back, NULL};
    CU_ASSERT(step_recv(w, d, side, step, f, &out));
    CU_ASSERT_EQUAL(memcmp(expand, f->expand, w->rows[d] * 4), 0);
    uint64_t returned = 0;
    for (int r = 0; r < w->s.ranks; r++)
        returned += f->source_rows[r];
    CU_ASSERT_EQUAL(memcmp(back, f->back, returned * (uint64_t)w->s.top_k * 4), 0);
    for (uint64_t i = 0; i < w->rows[d]; i++)
        CU_ASSERT_EQUAL(weight[i] == 1.0F, f->weight[i] >= 0);
}

static void steps_send_the_same(const world *w, int r, const flex_side *side, step_side *step) {
    size_t k = (size_t)w->s.top_k, tokens = (size_t)w->tokens[r];
    uint64_t rows = 0;
    for (int d = 0; d < w->s.ranks; d++)
        rows += w->rank_rows[r][d];
    step_send(w, r, 1 + r % 5, side->block, step);
    CU_ASSERT_EQUAL(memcmp(step->token, side->token, rows * 4), 0);
    CU_ASSERT_EQUAL(memcmp(step->sum, side->sum, tokens * (size_t)side->width * 4), 0);
    CU_ASSERT_EQUAL(memcmp(step->weight, side->weight, tokens * k * 4), 0);
}

static void impossible_meta_writes_nothing(void) {
    int32_t meta[16] = {0}, target[] = {0, 4}, returns[] = {0}, expand[8], back[4];
    float weight[8];
    const epo_flex_arrived out = {expand, weight, back, NULL};
    const epo_flex_source from = {meta, target, returns, 0, 8, 1};
    const struct {
        int32_t returned, last, expert, place;
        bool good;
    } cases[] = {
        {0, 0, 1, 3, true},  {0, 0, -1, 9, true},  {0, 0, 2, 0, false}, {0, 0, -2, 0, false},
        {0, 0, 1, 4, false}, {0, 0, 0, -1, false}, {1, 0, 0, 0, false}, {-1, 0, 0, 0, false},
        {0, 1, 0, 0, false}, {0, -1, 0, 0, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memset(expand, 0xee, sizeof expand);
        memset(back, 0xee, sizeof back);
        meta[0] = cases[i].returned;
        meta[1] = cases[i].last;
        meta[EPO_FLEX_META_HEAD] = cases[i].expert;
        meta[EPO_FLEX_META_HEAD + 1] = cases[i].place;
        CU_ASSERT_EQUAL(epo_flex_arrive(&from, &out, 0, 0, 1, 2, 1), cases[i].good);
        int written = 0;
        for (int j = 0; j < 8; j++)
            written += expand[j] != (int32_t)0xeeeeeeee;
        CU_ASSERT_EQUAL(written, cases[i].good && cases[i].expert >= 0);
        CU_ASSERT_EQUAL(back[0] != (int32_t)0xeeeeeeee, cases[i].good);
    }
}

static void flex_places_rows(const world *w) {
    static flex_side side[RANKS];
    static step_side step[RANKS];
    static flex_received in;
    static int labels[RANKS][TOKENS * RANKS * SLOTS];
    memset(labels, 0xff, sizeof labels);
    for (int r = 0; r < w->s.ranks; r++) {
        flex_send(w, r, &side[r]);
        steps_send_the_same(w, r, &side[r], &step[r]);
    }
    for (int d = 0; d < w->s.ranks; d++) {
        CU_ASSERT_EQUAL(flex_recv(w, d, side, &in), 0);
        flex_expands(w, d, &in);
        flex_orders_by_chunk(w, d, side, &in);
        flex_returns(w, d, side, &in, labels);
        steps_agree(w, side, step, d, &in);
    }
    for (int r = 0; r < w->s.ranks; r++)
        flex_sums(w, r, &side[r], labels[r]);
}

/* ---- tests ----------------------------------------------------------------- */

static uint64_t seed_of(void) {
    const char *text = getenv("EPO_SEED");
    uint64_t seed = text != NULL && *text != '\0' ? strtoull(text, NULL, 0) : 20261129;
    printf("EPO_SEED=%llu ", (unsigned long long)seed);
    return seed;
}

static void random_routings(void) {
    static world w;
    uint64_t state = seed_of();
    for (int i = 0; i < 400 && CU_get_number_of_failures() == 0; i++) {
        random_world(&w, &state);
        define_rows(&w);
        count_world(&w);
        chunks_cut_the_experts(&w.s);
        alltoall_places_rows(&w);
        alltoall_returns_rows(&w);
        flex_places_rows(&w);
    }
}

/* A token's first or last chunk on rank d; -1: none. */
static int chunk_by_definition(const epo_route_shape *s, const int32_t *e, int d, bool last) {
    int found = -1;
    for (int k = 0; k < s->top_k; k++)
        if (e[k] >= 0 && e[k] / 2 == d) { /* two experts, two chunks */
            const int c = e[k] % 2;
            found = found < 0 ? c : (last ? c > found : c < found) ? c : found;
        }
    return found;
}

/* Sending maps where a token's ranks need more than one word. */
static void sends_to_many_ranks(int ranks, uint64_t *state) {
    enum { MANY = 200, T = 30, K = 6 };
    static int32_t experts[T * K], token[T * K], sum[T * K], weight[T * K], meta[2][T * K * K];
    static uint32_t first_of[MANY * 3], last_of[MANY * 3], cursor[3 * MANY * 2];
    static uint64_t rank_first[MANY];
    const epo_route_shape s = {
        .ranks = ranks, .experts = 2 * ranks, .top_k = K, .chunks = 2, .align = 1};
    int32_t want_token[T * K], want_sum[T * K], used[T] = {0};
    uint64_t rows = 0;
    for (int i = 0; i < T * K; i++)
        experts[i] = (int32_t)(moe_random(state) % (uint32_t)(2 * ranks + 1)) - 1;
    memset(want_sum, 0xff, sizeof want_sum);
    for (int d = 0; d < ranks; d++) {
        uint64_t back = rank_first[d] = rows;
        for (int c = 0; c < 2; c++)
            for (int t = 0; t < T; t++) {
                if (chunk_by_definition(&s, experts + t * K, d, false) == c)
                    want_token[rows++] = t;
                if (chunk_by_definition(&s, experts + t * K, d, true) == c)
                    want_sum[t * K + used[t]++] = (int32_t)back++;
            }
    }
    epo_route_flex_send out = {.rank_first = rank_first,
                               .first_of = first_of,
                               .last_of = last_of,
                               .token = token,
                               .meta_expert = meta[0],
                               .meta_slot = meta[1],
                               .sum = sum,
                               .width = K,
                               .weight = weight};
    epo_route_flex_make_send(&s, experts, T, cursor, &out);
    CU_ASSERT_EQUAL(memcmp(token, want_token, rows * sizeof *token), 0);
    CU_ASSERT_EQUAL(memcmp(sum, want_sum, sizeof sum), 0);
}

static void many_ranks(void) {
    static const int ranks[] = {1, 63, 64, 65, 128, 129, 200};
    uint64_t state = seed_of();
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++)
        for (int again = 0; again < 20; again++)
            sends_to_many_ranks(ranks[i], &state);
}

static void index_out_of_range_is_found(void) {
    epo_route_shape s = {.ranks = 2, .experts = 64, .top_k = 4, .chunks = 1, .align = 16};
    int64_t experts[] = {0, 63, -1, 5, 1, 2, 3, 64, -2, 0, 0, 0};
    int32_t copy[12];
    CU_ASSERT_EQUAL(epo_route_check(&s, experts, 3, copy), 7);
    experts[7] = 1;
    CU_ASSERT_EQUAL(epo_route_check(&s, experts, 3, copy), 8);
    experts[8] = INT64_C(1) << 32; /* 0 if it were cut to 32 bits */
    CU_ASSERT_EQUAL(epo_route_check(&s, experts, 3, copy), 8);
    experts[8] = -1;
    CU_ASSERT_EQUAL(epo_route_check(&s, experts, 3, copy), 12);
    CU_ASSERT_EQUAL(epo_route_check(&s, NULL, 0, NULL), 0);
}

/* What a peer sent is not trusted: it must fit the counts. */
static void meta_that_does_not_fit_is_found(void) {
    epo_route_shape s = {.ranks = 1, .experts = 2, .top_k = 2, .chunks = 2, .align = 4};
    uint64_t first[] = {0, 4}, count[] = {1, 1}, cursor[6], back_first[2];
    uint32_t source_rows[] = {1}, first_of[3], last_of[3];
    int32_t expand[8], weight[8], back[2];
    epo_route_flex_recv out = {.first = first,
                               .count = count,
                               .rows = 8,
                               .first_of = first_of,
                               .last_of = last_of,
                               .expand = expand,
                               .weight = weight,
                               .back = back,
                               .back_first = back_first};
    const struct {
        int32_t meta[2];
        bool bad;
    } cases[] = {
        {{0, 1}, false}, {{0, 0}, true},  {{0, -1}, true},
        {{0, 2}, true},  {{0, -2}, true}, {{-1, -1}, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CU_ASSERT_EQUAL(epo_route_flex_make_recv(&s, cases[i].meta, source_rows, cursor, &out) != 0,
                        cases[i].bad);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"half chunks at the ends", chunks_taper},
        {"random routings go where they should, and back", random_routings},
        {"a token among more than 64 ranks", many_ranks},
        {"an index out of range is found", index_out_of_range_is_found},
        {"meta that does not fit the counts is found", meta_that_does_not_fit_is_found},
        {"impossible meta writes nothing", impossible_meta_writes_nothing},
        CU_TEST_INFO_NULL,
    };
    return unit_run("route", tests);
}
