/* SPDX-License-Identifier: Apache-2.0
 *
 * Capacity: what is dropped, against a plain reference that takes one slot after the
 * other out of the routing; padding; and what is refused.
 *
 *   EPO_SEED=N    repeat the property test from this seed
 *   EPO_ROUNDS=N  random layers to try (150)
 */
#include "core/names.h"
#include "moe_ranks.h"
#include "unit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the reference --------------------------------------------------------- */

/* Megatron's: ceil(tokens * top_k / experts * factor), of one rank. */
static int capacity_of(const moe_case *c, const epo_buffer_config *l, int tokens) {
    return l->capacity >= 0
               ? l->capacity
               : (int)ceil((double)tokens * c->top_k / c->experts * l->capacity_factor);
}

/* The slot that goes first: the lightest, or any, and of these the last. */
static int loser(const case_batch *b, int slots, int expert, bool by_weight) {
    int worst = -1;
    for (int i = 0; i < slots; i++) {
        if (b->experts[i] != expert)
            continue;
        if (worst < 0 || !by_weight || b->weights == NULL || b->weights[i] <= b->weights[worst])
            worst = i;
    }
    return worst;
}

/* *out is `c` without the slots that capacity takes; dropped[rank] counts them. */
static void drop_slots(const moe_case *c, const epo_buffer_config *l, moe_case *out,
                       uint64_t *dropped) {
    *out = *c;
    memset(dropped, 0, CASE_RANKS * sizeof *dropped);
    for (int m = 0; m < c->batches; m++)
        for (int r = 0; r < c->ranks; r++) {
            case_batch *b = &out->batch[m][r];
            int slots = b->tokens * c->top_k, room = capacity_of(c, l, b->tokens);
            b->experts = moe_calloc((size_t)slots, sizeof *b->experts);
            memcpy(b->experts, c->batch[m][r].experts, (size_t)slots * sizeof *b->experts);
            for (int e = 0; e < c->experts; e++) {
                int have = 0;
                for (int i = 0; i < slots; i++)
                    have += b->experts[i] == e;
                for (; have > room; have--, dropped[r]++)
                    b->experts[loser(b, slots, e, l->overflow == EPO_OVERFLOW_DROP_WEIGHT)] = -1;
            }
        }
}

static void free_dropped(moe_case *c) {
    for (int m = 0; m < c->batches; m++)
        for (int r = 0; r < c->ranks; r++)
            free(c->batch[m][r].experts);
}

/* ---- layers ---------------------------------------------------------------- */

static bool right(const moe_case *c, const moe_how *how, const moe_answer *answer,
                  const uint64_t *dropped, moe_result *result) {
    int failures = moe_run(c, how, result);
    double error = moe_error(c, how, result, answer, true);
    bool counted = true;
    for (int r = 0; r < c->ranks; r++)
        counted = counted && result->stats[r].dropped_slots == dropped[r];
    if (failures == 0 && error < (c->type == EPO_F32 ? 1e-5 : 2.5e-2) && counted)
        return true;
    moe_case_print(c);
    fprintf(stderr,
            "dispatcher %d overlap %d chunks %d, factor %g capacity %d overflow %d pad %d: %d "
            "failures, error %g, dropped %s\n",
            (int)how->dispatcher, how->overlap, how->chunks, how->limits->capacity_factor,
            how->limits->capacity, (int)how->limits->overflow, how->limits->pad_to_capacity,
            failures, error, counted ? "as many as expected" : "another number");
    return false;
}

/* Serial and overlapped with delay: right, the same bits, and what was dropped. */
static bool both_ways(const moe_case *c, const epo_buffer_config *limits, epo_dispatcher d,
                      int chunks, int align) {
    moe_how serial = {.dispatcher = d, .align = align, .limits = limits}, how = serial;
    moe_case kept;
    moe_answer answer;
    moe_result a, b;
    uint64_t dropped[CASE_RANKS];
    how.overlap = how.delay = 1;
    how.chunks = chunks;
    drop_slots(c, limits, &kept, dropped);
    moe_reference(&kept, &answer);
    bool good = right(c, &serial, &answer, dropped, &a);
    if (good) {
        good = right(c, &how, &answer, dropped, &b) && moe_same(c, &how, &a, &b);
        moe_result_free(&b);
    }
    moe_result_free(&a);
    moe_answer_free(&answer);
    free_dropped(&kept);
    return good;
}

/* Four ranks on two nodes: what a rank drops is dropped before anything goes there. */
static void across_nodes(void) {
    setenv(EPO_ENV_NODES, "0,0,1,1", 1);
    for (int i = 0; i < 2 * 3 * CASE_STYLES; i++) {
        epo_buffer_config limits = EPO_BUFFER_CONFIG_INIT;
        limits.overflow = i % 2 ? EPO_OVERFLOW_DROP_WEIGHT : EPO_OVERFLOW_DROP_POSITION;
        limits.capacity = i / 2 % 3 < 2 ? i / 2 % 3 : -1;
        limits.capacity_factor = 1.0;
        moe_case c = {.seed = (uint64_t)(940 + i),
                      .ranks = 4,
                      .experts = 8,
                      .hidden = 20,
                      .ffn = 6,
                      .top_k = 3,
                      .batches = 2,
                      .max_tokens = 12,
                      .type = i % 4 < 2 ? EPO_F32 : EPO_BF16,
                      .style = (case_style)(i / 6)};
        moe_case_fill(&c);
        CU_ASSERT(both_ways(&c, &limits, EPO_DISPATCH_FLEX, 2, 0));
        moe_case_free(&c);
    }
    unsetenv(EPO_ENV_NODES);
}

static void every_policy_at_its_edges(void) {
    const epo_buffer_config none = EPO_BUFFER_CONFIG_INIT;
    for (int i = 0; i < 2 * 2 * 2 * 3 * CASE_STYLES; i++) {
        int style = i / 24, room = i / 8 % 3; /* capacity 0, 1, and by the factor */
        epo_buffer_config limits = none;
        limits.overflow = i % 2 ? EPO_OVERFLOW_DROP_WEIGHT : EPO_OVERFLOW_DROP_POSITION;
        limits.pad_to_capacity = i / 2 % 2;
        limits.capacity = room < 2 ? room : -1;
        limits.capacity_factor = 1.0;
        moe_case c = {.seed = (uint64_t)(40 + i),
                      .ranks = 3,
                      .experts = 6,
                      .hidden = 8,
                      .ffn = 5,
                      .top_k = 2,
                      .batches = 2,
                      .max_tokens = 11,
                      .type = EPO_F32,
                      .style = (case_style)style};
        moe_case_fill(&c);
        CU_ASSERT(both_ways(&c, &limits, (epo_dispatcher)(i / 4 % 2), 2, 4));
        moe_case_free(&c);
    }
}

/* Few values: many slots of an expert weigh the same. */
static void coarsen(moe_case *c) {
    for (int m = 0; m < c->batches; m++)
        for (int r = 0; r < c->ranks; r++)
            for (int i = 0; c->batch[m][r].weights && i < c->batch[m][r].tokens * c->top_k; i++)
                c->batch[m][r].weights[i] = roundf(c->batch[m][r].weights[i] * 2) / 2;
}

static bool random_layer(uint64_t seed) {
    moe_case c;
    uint64_t state = seed;
    epo_buffer_config limits = EPO_BUFFER_CONFIG_INIT;
    moe_case_random(&c, seed, 4, moe_random(&state) % 4 == 0 ? EPO_BF16 : EPO_F32);
    if (moe_random(&state) % 2 == 0)
        coarsen(&c);
    limits.overflow = (epo_overflow)(1 + moe_random(&state) % 2);
    limits.pad_to_capacity = (int)(moe_random(&state) % 2);
    limits.capacity_factor = 0.1 + (double)(moe_random(&state) % 20) / 10;
    if (moe_random(&state) % 3 == 0)
        limits.capacity = (int)(moe_random(&state) % 6);
    const int chunks = 1 + (int)(moe_random(&state) % 6), align = 1 << moe_random(&state) % 5;
    const bool good =
        both_ways(&c, &limits, (epo_dispatcher)(moe_random(&state) % 2), chunks, align);
    moe_case_free(&c);
    return good;
}

static void random_layers_drop_what_the_reference_drops(void) {
    CU_ASSERT(moe_rounds(150, random_layer));
}

/* ---- places, and what is refused -------------------------------------------- */

enum { R = 2, E = 4, H = 3, K = 2, T = 5, C = 3, ROWS = 8 };

static const moe_how in_chunks[] = {
    {.dispatcher = EPO_DISPATCH_ALLTOALL, .overlap = 1, .chunks = 2},
    {.dispatcher = EPO_DISPATCH_FLEX, .overlap = 1, .chunks = 2},
};

static epo_buffer *open_buffer(moe_rank *c, epo_group *g, const epo_buffer_config *limits,
                               epo_status want) {
    epo_buffer_config config = *limits;
    epo_buffer *b = NULL;
    config.experts = E;
    config.hidden = H;
    config.top_k = K;
    config.max_tokens = T;
    config.align_rows = ROWS;
    EXPECT(c, c->engine->buffer_create(g, &config, &b) == want);
    return b;
}

/* Slot (t, 0) goes to expert t % 2, which rank 0 holds, (t, 1) nowhere. */
static epo_plan *open_plan(moe_rank *c, epo_buffer *b, int tokens, epo_status want) {
    int64_t experts[T][K];
    epo_plan *plan = NULL;
    for (int t = 0; t < T; t++) {
        experts[t][0] = t % 2;
        experts[t][1] = -1;
    }
    epo_routing routing = EPO_ROUTING_INIT;
    routing.tokens = tokens;
    routing.top_k = K;
    routing.experts = experts[0];
    EXPECT(c, c->engine->plan_create(b, &routing, NULL, &plan) == want);
    return plan;
}

static float element(int rank, int t, int h) { return (float)(100 * rank + 10 * t + h + 1); }

/* Sent so far, in rows: by alltoall each rank's two blocks of three to the other one. */
static void expect_sent(moe_rank *c, epo_group *g, uint64_t dispatched, uint64_t combined,
                        uint64_t filled) {
    const uint64_t row = H * sizeof(float);
    epo_stats s = {.size = sizeof s};
    EXPECT(c, c->engine->group_stats(g, &s, 0) == EPO_OK);
    EXPECT(c, s.dispatch_bytes == dispatched * row && s.combine_bytes == combined * row);
    EXPECT(c, s.padding_bytes == filled * row);
}

/* Capacity 3 and two ranks: expert e begins at row 8e, rank r's block at 3r in it. */
static void padded_rank(moe_rank *c) {
    const moe_how *how = c->arg;
    epo_buffer_config limits = EPO_BUFFER_CONFIG_INIT;
    limits.capacity = C;
    limits.pad_to_capacity = 1;
    epo_group *g = moe_rank_group(c, how);
    epo_buffer *b = open_buffer(c, g, &limits, EPO_OK);
    epo_plan *plan = open_plan(c, b, T - c->rank, EPO_OK);
    epo_plan_info info = {.size = sizeof info};
    uint64_t first[E / R], count[E / R];
    float x[T][H], rows[2 * ROWS][H], weight[2 * ROWS], y[T][H];
    EXPECT(c, c->engine->plan_query(plan, &info) == EPO_OK);
    EXPECT(c, info.rows == 2 * ROWS && info.capacity == C && info.dropped == 0);
    EXPECT(c, info.pad_rows == (c->rank == 0 ? 12 - 9 : 12));
    EXPECT(c, c->engine->plan_experts(plan, first, count) == EPO_OK);
    EXPECT(c, first[0] == 0 && first[1] == ROWS && count[0] == 2 * C && count[1] == 2 * C);
    for (int i = 0; i < T * H; i++)
        x[i / H][i % H] = element(c->rank, i / H, i % H);
    memset(rows, 0xff, sizeof rows);
    memset(weight, 0xff, sizeof weight);
    const bool flex = how->dispatcher == EPO_DISPATCH_FLEX;
    const uint64_t there = c->rank ? T - 1 : 0, back = c->rank ? 0 : T - 1; /* real rows */
    EXPECT(c, c->engine->dispatch(plan, x, rows, weight, NULL) == EPO_OK);
    expect_sent(c, g, flex ? there : 2 * C, 0, flex ? 0 : 2 * C - there);
    for (int i = 0; i < 2 * ROWS; i++) {
        int e = i / ROWS, source = i % ROWS / C, t = 2 * (i % ROWS % C) + e;
        bool real = c->rank == 0 && source < R && t < T - source;
        EXPECT(c, weight[i] == (real ? 1.0F : 0.0F));
        for (int h = 0; h < H; h++)
            EXPECT(c, rows[i][h] == (real ? element(source, t, h) : 0.0F));
    }
    EXPECT(c, c->engine->combine(plan, rows, y, NULL, NULL, NULL) == EPO_OK);
    EXPECT(c, memcmp(y, x, (size_t)(T - c->rank) * sizeof y[0]) == 0);
    expect_sent(c, g, flex ? there : 2 * C, flex ? back : 2 * C, flex ? 0 : 4 * C - there - back);
    c->engine->plan_release(plan);
    EXPECT(c, c->engine->buffer_destroy(b) == EPO_OK);
    EXPECT(c, c->engine->group_destroy(g) == EPO_OK);
}

static void padding_has_its_place(void) {
    for (int i = 0; i < 2; i++)
        CU_ASSERT_EQUAL(moe_ranks(R, 30.0, padded_rank, (void *)(uintptr_t)&in_chunks[i]), 0);
}

/* Expert 0 gets three rows of rank 0, two of rank 1; room for two. */
static void overflow_rank(moe_rank *c) {
    epo_buffer_config limits = EPO_BUFFER_CONFIG_INIT;
    limits.capacity = 2;
    epo_group *g = moe_rank_group(c, c->arg);
    epo_buffer *b = open_buffer(c, g, &limits, EPO_OK);
    EXPECT(c, open_plan(c, b, T - c->rank, EPO_E_OVERFLOW) == NULL);
    const char *text = c->engine->error();
    EXPECT(c, strstr(text, "rank 0") && strstr(text, "expert 0") && strstr(text, "3 rows") &&
                  strstr(text, "capacity is 2"));
    epo_plan *plan = open_plan(c, b, T - 1, EPO_OK); /* the group lives on */
    c->engine->plan_release(plan);
    EXPECT(c, c->engine->buffer_destroy(b) == EPO_OK);
    EXPECT(c, c->engine->group_destroy(g) == EPO_OK);
}

static void overflow_is_an_error_everywhere(void) {
    for (int i = 0; i < 2; i++)
        CU_ASSERT_EQUAL(moe_ranks(R, 30.0, overflow_rank, (void *)(uintptr_t)&in_chunks[i]), 0);
}

static void refused_rank(moe_rank *c) {
    const epo_buffer_config none = EPO_BUFFER_CONFIG_INIT;
    epo_group *g = moe_rank_group(c, c->arg);
    for (int i = 0; i < 7; i++) {
        epo_buffer_config l = none;
        l.capacity = i == 0 ? -2 : -1;
        l.capacity_factor = i == 1 ? -0.5 : i == 2 ? NAN : i == 3 ? INFINITY : 0;
        l.overflow = i == 4 ? EPO_OVERFLOW_DROP_WEIGHT : i == 5 ? (epo_overflow)3 : none.overflow;
        l.pad_to_capacity = i == 6;
        EXPECT(c, open_buffer(c, g, &l, EPO_E_ARG) == NULL);
    }
    for (int i = 0; i < 4; i++) { /* rank 1 wants something else */
        epo_buffer_config l = none;
        l.capacity = 2;
        l.capacity_factor = i == 0 ? 1 + c->rank : 0;
        l.capacity += i == 1 ? c->rank : 0;
        l.overflow = i == 2 && c->rank ? EPO_OVERFLOW_DROP_POSITION : EPO_OVERFLOW_ERROR;
        l.pad_to_capacity = i == 3 && c->rank;
        EXPECT(c, open_buffer(c, g, &l, EPO_E_PEER) == NULL);
    }
    EXPECT(c, c->engine->group_destroy(g) == EPO_OK);
}

/* What a graph could not hold, by name; what is padded is the engine's affair. */
static void graphs_rank(moe_rank *c) {
    static const char *const words[] = {"pad_to_capacity 0", "host engine", "host engine"};
    epo_group *g = moe_rank_group(c, c->arg);
    for (int i = 0; i < 3; i++) {
        epo_buffer_config l = EPO_BUFFER_CONFIG_INIT;
        l.capacity = 2;
        l.dispatcher = i == 1 ? EPO_DISPATCH_FLEX : EPO_DISPATCH_ALLTOALL;
        l.pad_to_capacity = i > 0;
        l.graphs = 1;
        EXPECT(c, open_buffer(c, g, &l, EPO_E_UNSUPPORTED) == NULL);
        EXPECT(c, strstr(c->engine->error(), words[i]) != NULL);
    }
    epo_buffer_config l = EPO_BUFFER_CONFIG_INIT; /* and a group lives on */
    epo_buffer *b = open_buffer(c, g, &l, EPO_OK);
    EXPECT(c, c->engine->buffer_destroy(b) == EPO_OK);
    EXPECT(c, c->engine->group_destroy(g) == EPO_OK);
}

static void what_graphs_cannot_hold_is_refused(void) {
    CU_ASSERT_EQUAL(moe_ranks(R, 30.0, graphs_rank, (void *)(uintptr_t)&in_chunks[0]), 0);
}

static void what_makes_no_sense_is_refused(void) {
    CU_ASSERT_EQUAL(moe_ranks(R, 30.0, refused_rank, (void *)(uintptr_t)&in_chunks[0]), 0);
}

/* Less can arrive, so the window is smaller. */
static void bytes_rank(moe_rank *c) {
    epo_buffer_config l = EPO_BUFFER_CONFIG_INIT;
    uint64_t all = 0, some = 0;
    epo_group *g = moe_rank_group(c, c->arg);
    l.experts = 8;
    l.hidden = 64;
    l.top_k = 4;
    l.max_tokens = 512;
    EXPECT(c, c->engine->buffer_bytes(g, &l, &all) == EPO_OK);
    l.capacity_factor = 1.0;
    EXPECT(c, c->engine->buffer_bytes(g, &l, &some) == EPO_OK);
    EXPECT(c, some < all && some > all / 4);
    EXPECT(c, c->engine->group_destroy(g) == EPO_OK);
}

static void capacity_saves_memory(void) {
    CU_ASSERT_EQUAL(moe_ranks(R, 30.0, bytes_rank, (void *)(uintptr_t)&in_chunks[0]), 0);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"every policy, capacity 0, 1 and by the factor", every_policy_at_its_edges},
        {"across nodes", across_nodes},
        {"random layers drop what the reference drops",
         random_layers_drop_what_the_reference_drops},
        {"padding has its place", padding_has_its_place},
        {"overflow is an error on every rank", overflow_is_an_error_everywhere},
        {"what makes no sense is refused", what_makes_no_sense_is_refused},
        {"what graphs cannot hold is refused", what_graphs_cannot_hold_is_refused},
        {"capacity saves memory", capacity_saves_memory},
        CU_TEST_INFO_NULL,
    };
    return unit_run("moe capacity", tests);
}
