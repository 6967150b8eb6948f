/* SPDX-License-Identifier: Apache-2.0
 *
 * The layer on a backend that can what a GPU's can (moe_device.h): rows read in place, both
 * products in one operation, sums on the way, own rows that stay, maps made where the routing
 * is, calls that graphs can hold.  Whatever it can: the plain host's bits.
 *
 *   EPO_SEED=N    repeat the property test from this seed
 *   EPO_ROUNDS=N  random layers to try
 */
#include "core/names.h"
#include "moe_device.h"
#include "moe_ranks.h"
#include "unit.h"

#include <stdlib.h>
#include <string.h>

static const moe_device plain;

typedef struct device_case {
    const char *name;
    moe_device can;
} device_case;

/* As they come: first what the parts are for themselves, then all of a GPU's. */
static const device_case devices[] = {
    {"nothing", {0}},
    {"memory apart", {.apart = true}},
    {"copies", {.copies = true}},
    {"copies, memory apart", {.apart = true, .copies = true}},
    {"maps", {.apart = true, .maps = true}},
    {"own rows stay", {.apart = true, .maps = true, .own_rows = true}},
    {"spread", {.spread = true}},
    {"near", {.spread = true, .near = true}},
    {"near, two-sided", {.spread = true, .near = true, .two_sided = true}},
    {"sums", {.copies = true, .sums = true, .parts = true}},
    {"sums by engines", {.copies = true, .sums = true, .way = EPO_WAY_ENGINES}},
    {"a chain", {.copies = true, .chain = true}},
    {"a chain, sums", {.copies = true, .chain = true, .sums = true, .few = true}},
    {"a chain, two-sided", {.copies = true, .chain = true, .two_sided = true}},
    {"a chain that stores",
     {.apart = true, .copies = true, .maps = true, .own_rows = true, .chain = true}},
    {"a GPU's, two-sided",
     {.apart = true,
      .copies = true,
      .maps = true,
      .own_rows = true,
      .spread = true,
      .chain = true,
      .fused = true,
      .keeps = true,
      .two_sided = true}},
    {"a GPU's",
     {.apart = true,
      .copies = true,
      .maps = true,
      .own_rows = true,
      .sums = true,
      .few = true,
      .parts = true,
      .spread = true,
      .near = true,
      .chain = true,
      .fused = true,
      .keeps = true}},
};
enum { DEVICES = sizeof devices / sizeof *devices };

/* alltoall's rows come one an expert: there are no tokens to keep. */
static epo_saved_mode kept(int flex, int i) {
    return flex ? (epo_saved_mode)(i % 3) : i % 2 != 0 ? EPO_SAVE_NOTHING : EPO_SAVE_ROWS;
}

static double bound(const moe_case *c) { return c->type == EPO_F32 ? 1e-5 : 2.5e-2; }

/* The same bits as `first`, which is right. */
static bool same(const moe_case *c, const moe_how *how, const moe_result *first,
                 const moe_answer *answer, const char *name) {
    moe_result other;
    const bool right = answer != NULL ? moe_right(c, how, answer, bound(c), true, &other)
                                      : moe_run(c, how, &other) == 0;
    const bool good = right && moe_agrees(c, how, first, &other) && moe_device_unmatched() == 0;
    if (!good)
        fprintf(stderr, "^ with %s\n", name);
    moe_result_free(&other);
    return good;
}

/* Serial on the plain host, then every device, serial, overlapped and delayed. */
static bool every_device(const moe_case *c, const moe_how *serial, int chunks, int from, int past) {
    moe_result first;
    moe_answer answer;
    moe_device_be(&plain);
    moe_reference(c, &answer);
    bool good = moe_right(c, serial, &answer, bound(c), true, &first);
    for (int i = 3 * from; i < 3 * past && good; i++) {
        moe_how how = *serial;
        how.overlap = i % 3 > 0;
        how.delay = i % 3 > 1;
        how.chunks = how.overlap ? chunks : 0;
        moe_device_be(&devices[i / 3].can);
        good = same(c, &how, &first, &answer, devices[i / 3].name);
    }
    moe_device_be(&plain);
    moe_answer_free(&answer);
    moe_result_free(&first);
    return good;
}

static void every_device_gives_the_same_bits(void) {
    for (int i = 0; i < 2 * 3 * CASE_STYLES; i++) {
        moe_case c = {.seed = (uint64_t)(40 + i),
                      .ranks = 1 + i % 3,
                      .experts = 6 * (1 + i % 3),
                      .hidden = 16,
                      .ffn = 12,
                      .top_k = 3,
                      .batches = 2,
                      .max_tokens = 15,
                      .type = (epo_dtype)(i % 3),
                      .style = (case_style)(i / 6)};
        const moe_how serial = {.dispatcher = (epo_dispatcher)(i / 3 % 2),
                                .align = i % 2 ? 1 : 4,
                                .saved = kept(i / 3 % 2, i)};
        moe_case_fill(&c);
        CU_ASSERT(every_device(&c, &serial, 1 + i % 4, 0, DEVICES));
        moe_case_free(&c);
    }
}

static bool random_layer(uint64_t seed) {
    uint64_t state = seed;
    const uint32_t type = moe_random(&state) % 4;
    const int chunks = 1 + (int)(moe_random(&state) % 6);
    const int flex = (int)(moe_random(&state) % 2);
    const moe_how serial = {.dispatcher = (epo_dispatcher)flex,
                            .align = 1 << moe_random(&state) % 4,
                            .saved = kept(flex, (int)(moe_random(&state) % 6))};
    const int device = 1 + (int)(moe_random(&state) % (DEVICES - 1));
    moe_case c;
    moe_case_random(&c, seed, 4, type == 0 ? EPO_BF16 : type == 1 ? EPO_F16 : EPO_F32);
    const bool good = every_device(&c, &serial, chunks, device, device + 1);
    moe_case_free(&c);
    return good;
}
static void random_layers_agree_with_the_reference(void) {
    CU_ASSERT(moe_rounds(60, random_layer));
}

/* Two-sided, each message has two ends, also where experts are filled up to a capacity and nothing
 * comes for them. */
static void messages_have_two_ends(void) {
    const device_case *gpu = &devices[DEVICES - 2];
    for (int i = 0; i < 8 * CASE_STYLES; i++) {
        epo_buffer_config limits = EPO_BUFFER_CONFIG_INIT;
        moe_case c = {.seed = (uint64_t)(90 + i),
                      .ranks = 2 + i % 2,
                      .experts = 4 * (2 + i % 2),
                      .hidden = 16,
                      .ffn = 12,
                      .top_k = 2,
                      .batches = 2,
                      .max_tokens = 12,
                      .type = EPO_F32,
                      .style = (case_style)(i / 8)};
        moe_how how = {.dispatcher = (epo_dispatcher)(i / 2 % 2), .limits = &limits};
        moe_result first;
        limits.capacity = 1 + i % 3;
        limits.overflow = EPO_OVERFLOW_DROP_POSITION;
        limits.pad_to_capacity = i / 4 % 2;
        moe_case_fill(&c);
        moe_device_be(&plain);
        CU_ASSERT_EQUAL(moe_run(&c, &how, &first), 0);
        how.overlap = 1;
        how.chunks = 1 + i % 3;
        moe_device_be(&gpu->can);
        CU_ASSERT(same(&c, &how, &first, NULL, gpu->name));
        moe_result_free(&first);
        moe_case_free(&c);
    }
    moe_device_be(&plain);
}

/* Between nodes, too: rows of tokens, sums of a node, the weights' gradients beside them. */
static void nodes_messages_have_two_ends(void) {
    const moe_device two = {.apart = true, .two_sided = true};
    for (int i = 0; i < 8 * CASE_STYLES; i++) {
        static const char *const nodes[] = {"0,1", "0,0,1,1", "0,1,2", "0,0,0,1,1,1"};
        static const int ranks[] = {2, 4, 3, 6};
        moe_case c = {.seed = (uint64_t)(300 + i),
                      .ranks = ranks[i % 4],
                      .experts = 4 * ranks[i % 4],
                      .hidden = 20,
                      .ffn = 12,
                      .top_k = 3,
                      .batches = 2,
                      .max_tokens = 12,
                      .type = EPO_F32,
                      .style = (case_style)(i / 8)};
        moe_how how = {.dispatcher = EPO_DISPATCH_FLEX, .overlap = i / 4 % 2, .chunks = i / 4 % 2};
        moe_result r;
        setenv(EPO_ENV_NODES, nodes[i % 4], 1);
        how.chunks *= 2;
        moe_case_fill(&c);
        moe_device_be(&two);
        CU_ASSERT_EQUAL(moe_run(&c, &how, &r), 0);
        CU_ASSERT_EQUAL(moe_device_unmatched(), 0);
        moe_result_free(&r);
        moe_case_free(&c);
    }
    unsetenv(EPO_ENV_NODES);
    moe_device_be(&plain);
}

static void one_case(moe_case *c, case_style style, int hidden) {
    *c = (moe_case){.seed = 11,
                    .ranks = 3,
                    .experts = 12,
                    .hidden = hidden,
                    .ffn = 8,
                    .top_k = 2,
                    .batches = 2,
                    .max_tokens = 20,
                    .type = EPO_F32,
                    .style = style};
    moe_case_fill(c);
}

/* Passes of a direction in which a rank sends rows to others. */
static uint64_t sends(const moe_case *c) {
    uint64_t n = 0;
    for (int b = 0; b < c->batches; b++)
        for (int r = 0; r < c->ranks; r++) {
            const case_batch *in = &c->batch[b][r];
            bool away = false;
            for (int i = 0; i < in->tokens * c->top_k; i++)
                away =
                    away || (in->experts[i] >= 0 && in->experts[i] / (c->experts / c->ranks) != r);
            n += away;
        }
    return n;
}

/* What is meant to run does: a test of a chain that never chains is none. */
static void each_way_is_taken(void) {
    const device_case *gpu = &devices[DEVICES - 1];
    moe_case c;
    moe_result r;
    one_case(&c, CASE_DISTINCT, 16);
    for (int d = 0; d < 2; d++) {
        moe_how how = {.dispatcher = (epo_dispatcher)d, .overlap = 1, .chunks = 2};
        moe_device_be(&gpu->can);
        CU_ASSERT_EQUAL(moe_run(&c, &how, &r), 0);
        CU_ASSERT_EQUAL(moe_device_chains(), 2 * 2 * 3); /* there and back, batches, ranks */
        CU_ASSERT_EQUAL(moe_device_direct(), d == EPO_DISPATCH_ALLTOALL ? 12 : 0);
        moe_result_free(&r);
        how.chunks = 1; /* nothing to chain; flex's is spread, own rows apart where others come */
        moe_device_be(&gpu->can);
        CU_ASSERT_EQUAL(moe_run(&c, &how, &r), 0);
        CU_ASSERT_EQUAL(moe_device_chains(), 0);
        CU_ASSERT_EQUAL(moe_device_spreads(), d == EPO_DISPATCH_FLEX ? 12 + 2 * sends(&c) : 0);
        moe_result_free(&r);
        how.overlap = 0;
        moe_device_be(&gpu->can);
        CU_ASSERT_EQUAL(moe_run(&c, &how, &r), 0);
        CU_ASSERT_EQUAL(moe_device_chains(), 0);
        CU_ASSERT_EQUAL(moe_device_spreads(), d == EPO_DISPATCH_FLEX ? 12 : 0);
        moe_result_free(&r);
    }
    moe_case_free(&c);
    CU_ASSERT_EQUAL(moe_device_bytes(), 0);
}

/* Rows of e4m3, and experts of the caller's: as on the plain host. */
static void wire_and_own_experts(void) {
    epo_buffer_config e4m3 = EPO_BUFFER_CONFIG_INIT;
    e4m3.wire = EPO_WIRE_E4M3;
    for (int i = 0; i < 2 * DEVICES; i++) {
        const bool own = i % 2;
        moe_case c;
        moe_result first;
        one_case(&c, CASE_UNIFORM, own ? 12 : 128);
        moe_how how = {.dispatcher = own && i / 2 % 2 ? EPO_DISPATCH_ALLTOALL : EPO_DISPATCH_FLEX,
                       .own = own,
                       .saved = own ? EPO_SAVE_ROWS : (epo_saved_mode)(i / 2 % 3),
                       .limits = own ? NULL : &e4m3};
        moe_device_be(&plain);
        CU_ASSERT_EQUAL(moe_run(&c, &how, &first), 0);
        moe_device_be(&devices[i / 2].can);
        how.overlap = 1;
        how.chunks = 3;
        CU_ASSERT(same(&c, &how, &first, NULL, devices[i / 2].name));
        moe_result_free(&first);
        moe_case_free(&c);
    }
}

/* ---- graphs ------------------------------------------------------------------------------ */

/* Nothing too much, and some dropped either way. */
static epo_buffer_config padded(int capacity, epo_overflow overflow) {
    epo_buffer_config b = EPO_BUFFER_CONFIG_INIT;
    b.capacity = capacity;
    b.overflow = overflow;
    b.pad_to_capacity = 1;
    return b;
}

/* Padded on the plain host without graphs; then with, captured and not. */
static bool graphs_agree(uint64_t seed, const moe_device *device, const epo_buffer_config *limits) {
    const int chunks = 1 + (int)(seed % 4);
    epo_buffer_config with = *limits;
    moe_device can = *device;
    moe_case c;
    moe_result first;
    moe_case_random(&c, seed, 3, (epo_dtype)(seed % 3));
    moe_how how = {.dispatcher = (epo_dispatcher)(seed / 2 % 2), .limits = limits};
    moe_device_be(&plain);
    bool good = moe_run(&c, &how, &first) == 0;
    with.graphs = 1;
    how.limits = &with;
    can.apart = can.maps = can.replays = true;
    for (int i = 0; i < 4 && good; i++) {
        how.overlap = i / 2;
        how.chunks = how.overlap ? chunks : 0;
        can.capture = i % 2 ? 77 : 0;
        moe_device_be(&can);
        good = same(&c, &how, &first, NULL, "graphs");
        good = good && moe_device_bytes() == 0;
    }
    moe_result_free(&first);
    moe_case_free(&c);
    return good;
}

static void graphs_hold_what_plain_calls_do(void) {
    const epo_buffer_config all = padded(100, EPO_OVERFLOW_ERROR);
    const epo_buffer_config by_weight = padded(3, EPO_OVERFLOW_DROP_WEIGHT);
    const epo_buffer_config by_place = padded(2, EPO_OVERFLOW_DROP_POSITION);
    for (int i = 0; i < 3 * DEVICES; i++)
        CU_ASSERT(graphs_agree((uint64_t)(600 + i), &devices[i / 3].can,
                               i % 3 == 0   ? &all
                               : i % 3 == 1 ? &by_weight
                                            : &by_place));
}

/* An entry of a layer may be through just behind the question that found it was not. */
static void gradients_are_told_in_the_order_of_their_calls(void) {
    const moe_device can = {.copies = true, .hesitates = true};
    for (int i = 0; i < 8; i++) {
        moe_case c = {.seed = (uint64_t)(800 + i),
                      .ranks = 1 + i / 2 % 2,
                      .experts = 4,
                      .hidden = 8,
                      .ffn = 8,
                      .top_k = 2,
                      .batches = 2 + i % 2,
                      .max_tokens = 9,
                      .type = EPO_F32,
                      .style = CASE_UNIFORM};
        const moe_how how = {.dispatcher = (epo_dispatcher)(i / 4), .overlap = 1, .delay = 1};
        moe_result out;
        moe_case_fill(&c);
        moe_device_be(&can);
        CU_ASSERT_EQUAL(moe_run(&c, &how, &out), 0);
        moe_result_free(&out);
        moe_case_free(&c);
    }
    moe_device_be(&plain);
}

/* Whoever compares no calls hears of a layer that differs with the next plan. */
static void other_layers_rank(moe_rank *c) {
    const epo_engine *e = c->engine;
    moe_how how = {.overlap = 1};
    enum { E = 2, H = 4, F = 4, T = 3 };
    static float w[E * 2 * F * H];
    const int64_t experts[T] = {0, 1, 1};
    const float x[T * H] = {1};
    float y[T * H];
    epo_group *group = moe_rank_group(c, &how);
    epo_buffer_config b = config_buffer(E, H, 1, T);
    epo_routing r = config_routing(T, 1, experts, NULL);
    epo_layer_config l = config_layer(E, H, c->rank == 1 ? F / 2 : F, w, w);
    epo_buffer *buffer = NULL;
    epo_layer *layer = NULL;
    epo_plan *plan[3] = {NULL, NULL, NULL};
    EXPECT(c, e->buffer_create(group, &b, &buffer) == EPO_OK);
    EXPECT(c, e->layer_create(group, &l, &layer) == EPO_OK);
    EXPECT(c, e->plan_create(buffer, &r, NULL, &plan[0]) == EPO_OK);
    EXPECT(c, e->forward(layer, plan[0], x, y, NULL, NULL) == EPO_OK);
    EXPECT(c, e->plan_create(buffer, &r, NULL, &plan[1]) == EPO_E_PEER);
    EXPECT(c,
           strstr(e->error(), "in the passes before this plan the ranks disagree in forward of "
                              "plan 1: ffn of the layer is 4 on rank 0 and 2 on rank 1") != NULL);
    EXPECT(c, e->plan_create(buffer, &r, NULL, &plan[2]) == EPO_OK); /* nobody was in a pass */
    for (int i = 0; i < 3; i++)
        e->plan_release(plan[i]);
    EXPECT(c, e->layer_destroy(layer) == EPO_OK);
    EXPECT(c, e->buffer_destroy(buffer) == EPO_OK);
    EXPECT(c, e->group_destroy(group) == EPO_OK);
}

static void other_layers_are_told_with_the_next_plan(void) {
    moe_device can = {.deaf = true};
    moe_device_be(&can);
    CU_ASSERT_EQUAL(moe_ranks(2, 20.0, other_layers_rank, NULL), 0);
}

/* Passes by plan, 0 or 1, and what row_dweights are; calls that get each other's rows. */
typedef struct other_calls {
    const char *calls[2]; /* of each rank: dispatch (a, b), combine (A, B), with weights (X, Y) */
    const char *said;     /* NULL: they fit */
} other_calls;

static void other_calls_rank(moe_rank *c) {
    const other_calls *o = c->arg;
    const epo_engine *e = c->engine;
    moe_how how = {.overlap = 1};
    enum { E = 2, H = 4, T = 3, ROWS = 64 };
    const int64_t experts[T] = {0, 1, 1};
    float x[T * H] = {1}, rows[ROWS * H] = {1}, weights[ROWS] = {0}, dweights[T];
    epo_group *group = moe_rank_group(c, &how);
    epo_buffer_config b = config_buffer(E, H, 1, T);
    epo_routing r = config_routing(T, 1, experts, NULL);
    epo_buffer *buffer = NULL;
    epo_plan *plan[4] = {NULL, NULL, NULL, NULL};
    EXPECT(c, e->buffer_create(group, &b, &buffer) == EPO_OK);
    for (int i = 0; i < 2; i++)
        EXPECT(c, e->plan_create(buffer, &r, NULL, &plan[i]) == EPO_OK);
    for (const char *at = o->calls[c->rank]; *at != '\0'; at++) {
        epo_plan *p = plan[strchr("bBY", *at) != NULL];
        const bool with = *at == 'X' || *at == 'Y';
        epo_status status = *at == 'a' || *at == 'b' ? e->dispatch(p, x, rows, NULL, NULL)
                                                     : e->combine(p, rows, x, with ? weights : NULL,
                                                                  with ? dweights : NULL, NULL);
        EXPECT(c, status == EPO_OK);
    }
    epo_status status = e->plan_create(buffer, &r, NULL, &plan[2]);
    EXPECT(c, status == (o->said != NULL ? EPO_E_PEER : EPO_OK));
    EXPECT(c, o->said == NULL || strstr(e->error(), o->said) != NULL);
    EXPECT(c, e->plan_create(buffer, &r, NULL, &plan[3]) == EPO_OK); /* nobody was in a pass */
    for (int i = 0; i < 4; i++)
        e->plan_release(plan[i]);
    EXPECT(c, e->buffer_destroy(buffer) == EPO_OK);
    EXPECT(c, e->group_destroy(group) == EPO_OK);
}

static void other_calls_are_told_with_the_next_plan(void) {
    other_calls o[] = {
        {{"abABXY", "abABXY"}, NULL},
        {{"ab", "ba"}, "rank 0 is in dispatch of plan 2, rank 1 in dispatch of plan 1"},
        {{"aAbB", "aBbA"}, "rank 0 is in combine of plan 2, rank 1 in combine of plan 1"},
        {{"ababa", "baaba"}, "rank 0 made 5, rank 1 5, or of another plan"},
        {{"aX", "aA"}, "row_dweights and dweights (1: NULL, 2: given) is 2 on rank 0 and 1 on"},
        {{"aXaA", "aAaA"}, "with other arrays"},
    };
    moe_device can = {.deaf = true};
    moe_device_be(&can);
    for (size_t i = 0; i < sizeof o / sizeof *o; i++)
        CU_ASSERT_EQUAL(moe_ranks(2, 20.0, other_calls_rank, &o[i]), 0);
    moe_device_be(&plain);
}

/* A plan serves calls of the capture it was made in alone. */
static void other_captures_rank(moe_rank *c) {
    const epo_engine *e = c->engine;
    moe_how how = {.overlap = 1};
    moe_device can = *(const moe_device *)c->arg;
    epo_group *group = moe_rank_group(c, &how);
    epo_buffer_config config = config_buffer(2, 4, 1, 3);
    epo_buffer *buffer = NULL;
    epo_plan *plan = NULL;
    const int64_t experts[3] = {0, 1, 0};
    float x[12] = {0}, rows[64] = {0};
    config.capacity = 3;
    config.align_rows = 1;
    config.pad_to_capacity = config.graphs = 1;
    const epo_routing routing = config_routing(3, 1, experts, NULL);
    EXPECT(c, e->buffer_create(group, &config, &buffer) == EPO_OK);
    EXPECT(c, e->plan_create(buffer, &routing, NULL, &plan) == EPO_OK);
    EXPECT(c, e->dispatch(plan, x, rows, NULL, NULL) == EPO_OK);
    const bool captured = can.capture != 0;
    can.capture = captured ? 0 : 5;
    can.unleavable = true; /* and what came first is told */
    moe_device_be(&can);
    EXPECT(c, e->dispatch(plan, x, rows, NULL, NULL) == EPO_E_STATE);
    EXPECT(c, strstr(e->error(), captured ? "it serves calls of that capture alone"
                                          : "make it in the capture, too") != NULL);
    e->plan_release(plan);
    (void)e->buffer_destroy(buffer);
    EXPECT(c, e->group_destroy(group) == EPO_OK);
}

static void a_plan_serves_its_capture_alone(void) {
    for (uint64_t capture = 0; capture < 2; capture++) {
        const moe_device can = {.apart = true, .maps = true, .replays = true, .capture = capture};
        moe_device_be(&can);
        CU_ASSERT_EQUAL(moe_ranks(1, 10.0, other_captures_rank, (void *)(uintptr_t)&can), 0);
    }
}

/* A graph's memory is its own: a second pass of a capture takes the first one's again, another
 * capture's takes none of it; all of it is given back with the last plan. */
static void own_memory_rank(moe_rank *c) {
    const epo_engine *e = c->engine;
    moe_device can = {.apart = true, .maps = true, .replays = true};
    moe_how how = {.dispatcher = EPO_DISPATCH_FLEX, .overlap = 1};
    epo_group *group = moe_rank_group(c, &how);
    epo_buffer_config config = config_buffer(2, 4, 1, 3);
    epo_buffer *buffer = NULL;
    epo_plan *plan[2] = {NULL, NULL};
    const int64_t experts[3] = {0, 1, 0};
    float x[12] = {0}, rows[64] = {0};
    uint64_t held[4];
    config.capacity = 3;
    config.align_rows = 1;
    config.pad_to_capacity = config.graphs = 1;
    const epo_routing routing = config_routing(3, 1, experts, NULL);
    EXPECT(c, e->buffer_create(group, &config, &buffer) == EPO_OK);
    const uint64_t before = moe_device_bytes();
    for (int i = 0; i < 4; i++) {
        can.capture = i < 2 ? 1 : 2;
        moe_device_be(&can);
        if (i % 2 == 0)
            EXPECT(c, e->plan_create(buffer, &routing, NULL, &plan[i / 2]) == EPO_OK);
        EXPECT(c, e->combine(plan[i / 2], rows, x, NULL, NULL, NULL) == EPO_OK);
        held[i] = moe_device_bytes() - before;
    }
    EXPECT(c, held[0] > 0 && held[1] == held[0]);
    EXPECT(c, held[2] == 2 * held[0] && held[3] == held[2]);
    e->plan_release(plan[0]);
    EXPECT(c, moe_device_bytes() - before == held[3]);
    e->plan_release(plan[1]);
    EXPECT(c, moe_device_bytes() == before);
    EXPECT(c, e->buffer_destroy(buffer) == EPO_OK);
    EXPECT(c, e->group_destroy(group) == EPO_OK);
}

static void a_graph_has_its_own_memory(void) {
    const moe_device can = {.apart = true, .maps = true, .replays = true};
    moe_device_be(&can);
    CU_ASSERT_EQUAL(moe_ranks(1, 10.0, own_memory_rank, NULL), 0);
}

/* Calls that graphs may capture are compared as they are made, whatever they are. */
static void compared_rank(moe_rank *c) {
    const epo_engine *e = c->engine;
    moe_how how = {.dispatcher = EPO_DISPATCH_FLEX, .overlap = 1};
    epo_group *group = moe_rank_group(c, &how);
    epo_buffer_config config = config_buffer(2, 4, 1, 3);
    static float w[2 * 2 * 4 * 4];
    epo_layer_config l = config_layer(2, 4, 4, w, w);
    epo_buffer *buffer = NULL;
    epo_layer *layer = NULL;
    epo_plan *plan = NULL;
    epo_saved *saved = NULL;
    const int64_t experts[3] = {0, 1, 0};
    float x[12] = {0}, y[12] = {0}, rows[64] = {0};
    const bool first = c->rank == 0;
    config.capacity = 3;
    config.align_rows = 1;
    config.pad_to_capacity = config.graphs = 1;
    const epo_routing routing = config_routing(3, 1, experts, NULL);
    EXPECT(c, e->buffer_create(group, &config, &buffer) == EPO_OK);
    EXPECT(c, e->layer_create(group, &l, &layer) == EPO_OK);
    EXPECT(c, e->plan_create(buffer, &routing, NULL, &plan) == EPO_OK);
    EXPECT(c, e->forward(layer, plan, x, first ? y : NULL, NULL, NULL) ==
                  (first ? EPO_E_PEER : EPO_E_ARG));
    EXPECT(c, strstr(e->error(), first ? "rank 1 refused its arguments" : "y is NULL") != NULL);
    EXPECT(c, e->dispatch(plan, first ? NULL : x, rows, NULL, NULL) ==
                  (first ? EPO_E_ARG : EPO_E_PEER));
    EXPECT(c, e->forward(layer, plan, x, y, &saved, NULL) == EPO_OK); /* the group lives on */
    const epo_status status = first ? e->backward(layer, saved, x, y, NULL, NULL)
                                    : e->dispatch(plan, x, rows, NULL, NULL);
    EXPECT(c, status == EPO_E_PEER);
    EXPECT(c, strstr(e->error(), "rank 0 is in backward of plan 1, rank 1 in dispatch of plan 1") !=
                  NULL);
    if (!first)
        e->saved_release(saved);
    e->plan_release(plan);
    EXPECT(c, e->layer_destroy(layer) == EPO_OK);
    EXPECT(c, e->buffer_destroy(buffer) == EPO_OK);
    EXPECT(c, e->group_destroy(group) == EPO_OK);
}

static void calls_of_graphs_are_compared(void) {
    const moe_device can = {.apart = true, .maps = true, .replays = true, .deaf = true};
    moe_device_be(&can);
    CU_ASSERT_EQUAL(moe_ranks(2, 5.0, compared_rank, NULL), 0);
}

static void refused_rank(moe_rank *c) {
    const epo_engine *e = c->engine;
    const char *const text[] = {"must not depend on the routing; pad to a capacity",
                                "make the group with delay_wgrad off", "engine has none"};
    epo_buffer *buffer = NULL;
    for (int i = 0; i < 3; i++) {
        moe_how how = {.overlap = 1, .delay = i == 1};
        epo_group *group = moe_rank_group(c, &how);
        epo_buffer_config config = config_buffer(4, 4, 1, 3);
        config.graphs = 1;
        config.capacity = 3;
        config.pad_to_capacity = i != 0;
        EXPECT(c, e->buffer_create(group, &config, &buffer) == EPO_E_UNSUPPORTED);
        EXPECT(c, strstr(e->error(), text[i]) != NULL || c->rank > 0);
        EXPECT(c, e->group_destroy(group) == EPO_OK);
    }
}

/* One rank's buffer is for graphs, the other's not. */
static void differing_rank(moe_rank *c) {
    moe_how how = {.overlap = 1};
    epo_group *group = moe_rank_group(c, &how);
    epo_buffer_config config = config_buffer(4, 4, 1, 3);
    epo_buffer *buffer = NULL;
    config.capacity = 3;
    config.pad_to_capacity = 1;
    config.graphs = c->rank;
    EXPECT(c, c->engine->buffer_create(group, &config, &buffer) == EPO_E_PEER);
    EXPECT(c, strstr(c->engine->error(), "graphs is 0 on rank 0 and 1 on rank 1") != NULL);
    EXPECT(c, c->engine->group_destroy(group) == EPO_OK);
}

static void graphs_are_refused_in_words(void) {
    const moe_device can = {.apart = true, .maps = true, .replays = true};
    moe_device_be(&can);
    CU_ASSERT_EQUAL(moe_ranks(2, 10.0, differing_rank, NULL), 0);
    moe_device_be(&plain);
    CU_ASSERT_EQUAL(moe_ranks(2, 10.0, refused_rank, NULL), 0);
}

/* ---- a routing that is wrong --------------------------------------------------------------- */

static void wrong_routing_rank(moe_rank *c) {
    const epo_engine *e = c->engine;
    moe_how how = {.dispatcher = *(const epo_dispatcher *)c->arg, .overlap = 1};
    epo_group *group = moe_rank_group(c, &how);
    epo_buffer_config config = config_buffer(4, 4, 2, 3);
    epo_buffer *buffer = NULL;
    epo_plan *plan = NULL;
    int64_t experts[6] = {0, 1, 2, 3, 0, 1};
    EXPECT(c, e->buffer_create(group, &config, &buffer) == EPO_OK);
    experts[3] = c->rank == 1 ? 9 : 3;
    const epo_routing routing = config_routing(3, 2, experts, NULL);
    EXPECT(c, e->plan_create(buffer, &routing, NULL, &plan) == EPO_E_INDEX);
    EXPECT(c, strstr(e->error(), "rank 1: experts[1][1] = 9, allowed -1..3") != NULL);
    EXPECT(c, plan == NULL);
    experts[3] = 3; /* the group lives on */
    EXPECT(c, e->plan_create(buffer, &routing, NULL, &plan) == EPO_OK);
    e->plan_release(plan);
    EXPECT(c, e->buffer_destroy(buffer) == EPO_OK);
    EXPECT(c, e->group_destroy(group) == EPO_OK);
}

static void a_wrong_routing_is_told_to_all(void) {
    for (int i = 0; i < 2 * DEVICES; i++) {
        epo_dispatcher d = (epo_dispatcher)(i % 2);
        moe_device_be(&devices[i / 2].can);
        CU_ASSERT_EQUAL(moe_ranks(2, 10.0, wrong_routing_rank, &d), 0);
    }
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"whatever it can: the same bits", every_device_gives_the_same_bits},
        {"random layers agree with the reference", random_layers_agree_with_the_reference},
        {"messages have two ends", messages_have_two_ends},
        {"messages between nodes have two ends", nodes_messages_have_two_ends},
        {"each way is taken", each_way_is_taken},
        {"wire rows and own experts", wire_and_own_experts},
        {"graphs hold what plain calls do", graphs_hold_what_plain_calls_do},
        {"a plan serves its capture alone", a_plan_serves_its_capture_alone},
        {"a graph has its own memory", a_graph_has_its_own_memory},
        {"graphs are refused in words", graphs_are_refused_in_words},
        {"calls of graphs are compared", calls_of_graphs_are_compared},
        {"a wrong routing is told to all", a_wrong_routing_is_told_to_all},
        {"gradients are told in the order of their calls",
         gradients_are_told_in_the_order_of_their_calls},
        {"layers that differ are told with the next plan",
         other_layers_are_told_with_the_next_plan},
        {"other calls are told with the next plan", other_calls_are_told_with_the_next_plan},
        CU_TEST_INFO_NULL,
    };
    return unit_run("moe on a device", tests);
}
