/* SPDX-License-Identifier: Apache-2.0
 *
 * A group on several nodes, all of them in this machine: right values, the same bits however
 * the layer is scheduled, no byte between nodes beyond one row a token and node, and what is
 * refused.
 *
 *   EPO_SEED=N    repeat the property test from this seed
 *   EPO_ROUNDS=N  random layers to try (120)
 */
#include "backend/route.h"
#include "core/names.h"
#include "moe_ranks.h"
#include "unit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The environment says that node n has the ranks [n * each, (n + 1) * each). */
static void play(int nodes, int each) {
    char text[128] = "";
    for (int r = 0; r < nodes * each; r++) {
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%s%d", r > 0 ? "," : "", r / each);
    }
    setenv(EPO_ENV_NODES, text, 1);
}

static bool right(const moe_case *c, const moe_how *how, const moe_answer *answer,
                  moe_result *result) {
    return moe_right(c, how, answer, c->type == EPO_F32 ? 1e-5 : 2.5e-2, true, result);
}

/* Rows that cross to other nodes in one direction: one a (token, node), or one a slot. */
static uint64_t rows_across(const moe_case *c, int each, int rank, bool slots) {
    const int local = c->experts / c->ranks;
    uint64_t rows = 0;
    for (int b = 0; b < c->batches; b++) {
        const case_batch *batch = &c->batch[b][rank];
        for (int t = 0; t < batch->tokens; t++) {
            bool seen[CASE_RANKS] = {false};
            for (int k = 0; k < c->top_k; k++) {
                const int64_t e = batch->experts[t * c->top_k + k];
                const int node = e < 0 ? -1 : (int)e / local / each;
                if (node < 0 || node == rank / each || (!slots && seen[node]))
                    continue;
                seen[node] = true;
                rows++;
            }
        }
    }
    return rows;
}

/* Rows that come from other nodes to this rank's place: they go home from here. */
static uint64_t rows_home(const moe_case *c, int each, int rank) {
    const int local = c->experts / c->ranks;
    uint64_t rows = 0;
    for (int r = rank % each; r < c->ranks; r += each)
        for (int b = 0; b < c->batches && r != rank; b++)
            for (int t = 0; t < c->batch[b][r].tokens; t++) {
                bool named = false;
                for (int k = 0; k < c->top_k; k++) {
                    const int64_t e = c->batch[b][r].experts[t * c->top_k + k];
                    named = named || (e >= 0 && (int)e / local / each == rank / each);
                }
                rows += named;
            }
    return rows;
}

/* Forward and backward send each way once. */
static bool bytes_right(const moe_case *c, const moe_how *how, int each, const moe_result *result) {
    const uint64_t row = (uint64_t)c->hidden * (c->type == EPO_F32 ? 4 : 2);
    for (int r = 0; r < c->ranks; r++) {
        const epo_stats *s = &result->stats[r];
        const uint64_t out = 2 * row * rows_across(c, each, r, false);
        const uint64_t home = 2 * row * rows_home(c, each, r);
        if (how->dispatcher == EPO_DISPATCH_ALLTOALL) {
            if (s->node_dispatch_bytes == 2 * row * rows_across(c, each, r, true))
                continue;
        } else if (s->node_dispatch_bytes == out && s->node_combine_bytes == home) {
            continue;
        }
        fprintf(stderr, "rank %d: %llu and %llu bytes to other nodes, expected %llu and %llu\n", r,
                (unsigned long long)s->node_dispatch_bytes,
                (unsigned long long)s->node_combine_bytes, (unsigned long long)out,
                (unsigned long long)home);
        return false;
    }
    return true;
}

/* Serial, overlapped in chunks, delayed, with rows made again: right, the same, no more. */
static bool all_ways(const moe_case *c, epo_dispatcher dispatcher, int each, const int *chunks,
                     int nchunks) {
    const epo_dtype wgrad = c->type == EPO_F32 || c->seed % 2 == 0 ? EPO_F32 : c->type;
    const moe_how serial = {.dispatcher = dispatcher, .wgrad_type = wgrad};
    moe_answer answer;
    moe_result first, other;
    moe_reference(c, &answer);
    bool good = right(c, &serial, &answer, &first) && bytes_right(c, &serial, each, &first);
    for (int i = 0; i < 3 * nchunks && good; i++) {
        moe_how how = serial;
        how.overlap = 1;
        how.delay = i % 3 == 1;
        how.chunks = chunks[i / 3];
        how.saved = i % 3 < 2                                            ? EPO_SAVE_ROWS
                    : dispatcher == EPO_DISPATCH_ALLTOALL || c->seed % 2 ? EPO_SAVE_NOTHING
                                                                         : EPO_SAVE_TOKENS;
        good = right(c, &how, &answer, &other) && moe_agrees(c, &how, &first, &other);
        if (good && how.saved != EPO_SAVE_NOTHING)
            good = bytes_right(c, &how, each, &other);
        moe_result_free(&other);
    }
    moe_result_free(&first);
    moe_answer_free(&answer);
    return good;
}

static void every_way_gives_the_same_bits(void) {
    static const int shapes[][2] = {{2, 1}, {2, 2}, {3, 1}, {2, 3}, {4, 1}, {4, 2}};
    const int chunks[] = {1, 2, 4};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int style = 0; style < CASE_STYLES; style++) {
            const int nodes = shapes[i][0], each = shapes[i][1];
            moe_case c = {.seed = (uint64_t)(100 * (int)i + style),
                          .ranks = nodes * each,
                          .experts = 4 * nodes * each,
                          .hidden = 20,
                          .ffn = 12,
                          .top_k = 4,
                          .batches = 2,
                          .max_tokens = 18,
                          .type = style % 2 == 0 ? EPO_F32 : EPO_BF16,
                          .style = (case_style)style};
            play(nodes, each);
            moe_case_fill(&c);
            CU_ASSERT(all_ways(&c, EPO_DISPATCH_FLEX, each, chunks, 3));
            moe_case_free(&c);
        }
}

static void alltoall_goes_by_slots(void) {
    const int chunks[] = {2};
    moe_case c = {.seed = 5,
                  .ranks = 4,
                  .experts = 16,
                  .hidden = 20,
                  .ffn = 12,
                  .top_k = 4,
                  .batches = 2,
                  .max_tokens = 18,
                  .type = EPO_F32,
                  .style = CASE_DISTINCT};
    play(2, 2);
    moe_case_fill(&c);
    CU_ASSERT(all_ways(&c, EPO_DISPATCH_ALLTOALL, 2, chunks, 1));
    moe_case_free(&c);
}

static bool random_layer(uint64_t seed) {
    uint64_t state = seed;
    const int nodes = 2 + (int)(moe_random(&state) % 3);
    const int each = 1 + (int)(moe_random(&state) % 2);
    moe_case small;
    moe_case_random(&small, seed, 1, moe_random(&state) % 4 == 0 ? EPO_BF16 : EPO_F32);
    moe_case c = {.seed = seed, /* the same numbers on more ranks */
                  .ranks = nodes * each,
                  .experts = small.experts * nodes * each,
                  .hidden = small.hidden + 16, /* wider than weights, which count apart */
                  .ffn = small.ffn,
                  .top_k = small.top_k,
                  .batches = small.batches,
                  .max_tokens = small.max_tokens,
                  .type = small.type,
                  .style = small.style};
    moe_case_free(&small);
    const int chunks = 1 + (int)(moe_random(&state) % 5);
    play(nodes, each);
    moe_case_fill(&c);
    const bool good = all_ways(&c, EPO_DISPATCH_FLEX, each, &chunks, 1);
    moe_case_free(&c);
    return good;
}

static void random_layers_agree_with_the_reference(void) {
    CU_ASSERT(moe_rounds(120, random_layer));
}

static void e4m3_crosses_too(void) {
    epo_buffer_config wire = EPO_BUFFER_CONFIG_INIT;
    wire.wire = EPO_WIRE_E4M3;
    moe_case c = {.seed = 9,
                  .ranks = 4,
                  .experts = 16,
                  .hidden = 256,
                  .ffn = 12,
                  .top_k = 4,
                  .batches = 2,
                  .max_tokens = 18,
                  .type = EPO_F32,
                  .style = CASE_DISTINCT};
    moe_how how = {.dispatcher = EPO_DISPATCH_FLEX, .wgrad_type = EPO_F32, .limits = &wire};
    moe_answer answer;
    moe_result one, two, chunked;
    moe_case_fill(&c);
    moe_reference(&c, &answer);
    play(1, 4);
    CU_ASSERT_EQUAL(moe_run(&c, &how, &one), 0);
    play(2, 2);
    CU_ASSERT_EQUAL(moe_run(&c, &how, &two), 0);
    how.overlap = 1;
    how.chunks = 3;
    CU_ASSERT_EQUAL(moe_run(&c, &how, &chunked), 0);
    CU_ASSERT(moe_same(&c, &how, &two, &chunked));
    /* Rows are rounded once, wherever they go. */
    double error = moe_error(&c, &how, &two, &answer, true);
    CU_ASSERT(error > 1e-3 && error < 0.08);
    CU_ASSERT(fabs(error - moe_error(&c, &how, &one, &answer, true)) < 1e-4);
    CU_ASSERT_EQUAL(two.stats[0].node_dispatch_bytes,
                    2 * (256 + 256 / 128 * 4 + 8) / 16 * 16 * rows_across(&c, 2, 0, false));
    moe_result_free(&chunked);
    moe_result_free(&two);
    moe_result_free(&one);
    moe_answer_free(&answer);
    moe_case_free(&c);
}

/* ---- what is refused, and how a rank's error reaches the other node --------- */

static void refused_rank(moe_rank *c) {
    const char *want = c->arg;
    epo_group_config config = EPO_GROUP_CONFIG_INIT;
    config.rank = c->rank;
    config.ranks = c->ranks;
    config.threads = c->world;
    config.timeout_s = c->timeout_s;
    config.overlap = EPO_OFF;
    config.dispatcher = EPO_DISPATCH_FLEX;
    config.delay_wgrad = EPO_OFF;
    config.engine = EPO_ENGINE_HOST;
    epo_engine_group group = {sizeof group, config, "a test"};
    epo_group *g = NULL;
    EXPECT(c, c->engine->group_create(&group, &g) != EPO_OK);
    EXPECT(c, strstr(c->engine->error(), want) != NULL);
}

static void uneven_nodes_are_refused_by_name(void) {
    static const char *const lists[][2] = {
        {"0,0,1", "must have the same number of ranks"},
        {"0,1,0", "must have the same number of ranks"},
        {"0,0", "allowed the node's number of each of 3 ranks"},
        {"0,0,0,0", "allowed the node's number of each of 3 ranks"},
        {"a,b,c", "allowed the node's number"},
        {"0,0,-1", "allowed the node's number"},
    };
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        setenv(EPO_ENV_NODES, lists[i][0], 1);
        CU_ASSERT_EQUAL(moe_ranks(3, 5, refused_rank, (void *)(uintptr_t)lists[i][1]), 0);
    }
}

static void wrong_rank(moe_rank *c) {
    const moe_how how = {.dispatcher = EPO_DISPATCH_FLEX, .overlap = 1, .chunks = 2};
    epo_buffer_config config = config_buffer(8, 4, 2, 2);
    int64_t experts[4] = {0, 3, 5, c->rank == 3 ? 8 : 7};
    epo_buffer *b = NULL;
    epo_plan *plan = NULL;
    epo_group *g = moe_rank_group(c, &how);
    config.capacity = 3;
    config.pad_to_capacity = 1;
    EXPECT(c, c->engine->buffer_create(g, &config, &b) == EPO_E_UNSUPPORTED);
    EXPECT(c, strstr(c->engine->error(), "flex across 2 nodes does not pad") != NULL);
    config.capacity = 0;
    config.pad_to_capacity = 0;
    EXPECT(c, c->engine->buffer_create(g, &config, &b) == EPO_OK);
    epo_routing routing = config_routing(2, 2, experts, NULL);
    experts[3] = 7;
    EXPECT(c, c->engine->plan_create(b, &routing, NULL, &plan) == EPO_E_OVERFLOW);
    EXPECT(c,
           strstr(c->engine->error(), "rank 0: expert 0 needs 1 rows, its capacity is 0") != NULL);
    EXPECT(c, c->engine->buffer_destroy(b) == EPO_OK);
    experts[3] = c->rank == 3 ? 8 : 7;
    config.capacity = -1;
    EXPECT(c, c->engine->buffer_create(g, &config, &b) == EPO_OK);
    EXPECT(c, c->engine->plan_create(b, &routing, NULL, &plan) == EPO_E_INDEX);
    EXPECT(c, strstr(c->engine->error(), "rank 3: experts[1][1] = 8, allowed -1..7") != NULL);
    routing.top_k = 1 + c->rank / 2; /* the nodes differ */
    experts[3] = 7;
    EXPECT(c, c->engine->plan_create(b, &routing, NULL, &plan) == EPO_E_PEER);
    EXPECT(c, strstr(c->engine->error(), "top_k is 1 on rank 0 and 2 on rank 2") != NULL);
    routing.top_k = 2; /* nobody's error has broken the group */
    EXPECT(c, c->engine->plan_create(b, &routing, NULL, &plan) == EPO_OK);
    c->engine->plan_release(plan);
    EXPECT(c, c->engine->buffer_destroy(b) == EPO_OK);
    EXPECT(c, c->engine->group_destroy(g) == EPO_OK);
}

static void an_error_reaches_every_node(void) {
    play(2, 2);
    CU_ASSERT_EQUAL(moe_ranks(4, 5, wrong_rank, NULL), 0);
}

/* Rank 2 never makes its pass: those of the other node, too, end and name it. */
static void late_rank(moe_rank *c) {
    const moe_how how = {.dispatcher = EPO_DISPATCH_FLEX, .overlap = 1, .chunks = 2};
    epo_buffer_config config = config_buffer(8, 4, 2, 2);
    int64_t experts[4] = {0, 3, 5, 7};
    float x[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}}, rows[64][4];
    epo_buffer *b = NULL;
    epo_plan *plan = NULL;
    epo_group *g = moe_rank_group(c, &how);
    config.align_rows = 1;
    EXPECT(c, c->engine->buffer_create(g, &config, &b) == EPO_OK);
    const epo_routing routing = config_routing(2, 2, experts, NULL);
    EXPECT(c, c->engine->plan_create(b, &routing, NULL, &plan) == EPO_OK);
    if (c->rank != 2) {
        EXPECT(c, c->engine->dispatch(plan, x, rows, NULL, NULL) == EPO_E_TIMEOUT);
        EXPECT(c, strstr(c->engine->error(), "rank 2") != NULL);
    } else { /* until the others have given up */
        struct timespec nap = {0, 10000000};
        while (c->engine->group_async_error(g) == EPO_OK)
            nanosleep(&nap, NULL);
    }
    c->engine->plan_release(plan);
    (void)c->engine->buffer_destroy(b);
    (void)c->engine->group_destroy(g);
}

static void a_late_rank_is_named(void) {
    play(2, 2);
    CU_ASSERT_EQUAL(moe_ranks(4, 1, late_rank, NULL), 0);
}

/* ---- maps -------------------------------------------------------------------- */

/* Both ends of a link number the rows alike, by chunk, each place once. */
static void rows_of_a_node_are_in_order(void) {
    uint64_t state = 11;
    for (int round = 0; round < 300; round++) {
        const int each = 1 + (int)(moe_random(&state) % 3),
                  local = 1 + (int)(moe_random(&state) % 6);
        const int k = 1 + (int)(moe_random(&state) % 4), tokens = (int)(moe_random(&state) % 12);
        const int nodes = 1 + (int)(moe_random(&state) % 3),
                  node = (int)(moe_random(&state) % (uint32_t)nodes);
        const epo_route_shape s = {.ranks = each,
                                   .experts = each * local,
                                   .top_k = k,
                                   .chunks = 1 + (int)(moe_random(&state) % (uint32_t)local)};
        int32_t experts[12 * 4], token[12], sent[12], returned[12];
        int64_t expert[12 * 4];
        uint32_t rows[3], first_of[8], last_of[8];
        for (int i = 0; i < tokens * k; i++)
            experts[i] = (int32_t)(moe_random(&state) % (uint32_t)(nodes * each * local + 1)) - 1;
        epo_route_node_count(experts, tokens, k, each * local, nodes, rows);
        const uint64_t n =
            epo_route_node_take(experts, tokens, k, each * local, node, token, expert);
        CU_ASSERT_EQUAL(n, rows[node]);
        epo_route_node_order(&s, expert, n, first_of, last_of, sent, returned);
        CU_ASSERT_EQUAL(first_of[s.chunks], n);
        CU_ASSERT_EQUAL(last_of[s.chunks], n);
        uint64_t seen = 0, back = 0;
        for (uint64_t i = 0; i < n; i++) {
            int first = s.chunks, last = -1;
            seen |= UINT64_C(1) << sent[i];
            back |= UINT64_C(1) << returned[i];
            for (int j = 0; j < k; j++) {
                const int64_t e = expert[i * (uint64_t)k + (uint64_t)j];
                const int32_t want = experts[token[i] * k + j] - node * each * local;
                CU_ASSERT_EQUAL(
                    e,
                    want >= 0 && want < each * local && experts[token[i] * k + j] >= 0 ? want : -1);
                if (e < 0)
                    continue;
                const int c = epo_route_chunk_of(&s, (int)(e % local));
                first = c < first ? c : first;
                last = c > last ? c : last;
            }
            CU_ASSERT((uint32_t)sent[i] >= first_of[first] &&
                      (uint32_t)sent[i] < first_of[first + 1]);
            CU_ASSERT((uint32_t)returned[i] >= last_of[last] &&
                      (uint32_t)returned[i] < last_of[last + 1]);
            CU_ASSERT(i == 0 || token[i] > token[i - 1]);
        }
        CU_ASSERT_EQUAL(seen, (UINT64_C(1) << n) - 1);
        CU_ASSERT_EQUAL(back, (UINT64_C(1) << n) - 1);
    }
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"rows of a node are in order", rows_of_a_node_are_in_order},
        {"serial, overlapped, delayed: the same bits", every_way_gives_the_same_bits},
        {"alltoall goes by slots", alltoall_goes_by_slots},
        {"random layers agree with the reference", random_layers_agree_with_the_reference},
        {"e4m3 crosses, too", e4m3_crosses_too},
        {"uneven nodes are refused by name", uneven_nodes_are_refused_by_name},
        {"an error reaches every node", an_error_reaches_every_node},
        {"a late rank is named", a_late_rank_is_named},
        CU_TEST_INFO_NULL,
    };
    return unit_run("moe nodes", tests);
}
