/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows in e4m3 on the wire: the nearest values, the error that the header states, the
 * same bits however the layer is scheduled, and what is refused.
 */
#include "backend/backend.h"
#include "backend/host/convert.h"
#include "moe_ranks.h"
#include "unit.h"

#include <math.h>
#include <string.h>

static float random_float(uint64_t *state) {
    float size =
        ldexpf((float)moe_random(state) / 4294967296.0F, (int)(moe_random(state) % 24) - 14);
    return moe_random(state) % 2 == 0 ? size : -size;
}

static void every_code_comes_back(void) {
    for (int c = 0; c < 256; c++) {
        float v = host_from_e4m3((uint8_t)c);
        bool nan = (c & 0x7f) == 0x7f;
        CU_ASSERT_EQUAL(nan, isnan(v) != 0);
        CU_ASSERT_EQUAL(host_to_e4m3(v) & 0x7f, c & 0x7f);
        CU_ASSERT(nan || host_to_e4m3(v) == c);
    }
    CU_ASSERT_EQUAL(host_from_e4m3(0x7e), 448.0F);
    CU_ASSERT_EQUAL(host_from_e4m3(0x01), 1.0F / 512);
    CU_ASSERT_EQUAL(host_to_e4m3(1e30F), 0x7e);
    CU_ASSERT_EQUAL(host_to_e4m3(-INFINITY), 0xfe);
}

/* No other value is nearer, and of two as near the even one is taken. */
static void values_round_to_the_nearest(void) {
    uint64_t state = 5;
    for (int i = 0; i < 20000; i++) {
        float v = random_float(&state);
        uint8_t got = host_to_e4m3(v);
        float off = fabsf(host_from_e4m3(got) - v);
        for (int c = 0; c < 256 && fabsf(v) <= 448; c++) {
            float other = fabsf(host_from_e4m3((uint8_t)c) - v);
            CU_ASSERT((c & 0x7f) == 0x7f || other >= off);
            if (other == off && c != got && (c & 0x7f) != 0)
                CU_ASSERT(got % 2 == 0 && c % 2 == 1);
        }
    }
}

static epo_buffer_config e4m3(void) {
    epo_buffer_config c = EPO_BUFFER_CONFIG_INIT;
    c.wire = EPO_WIRE_E4M3;
    return c;
}

static void layers_are_near_and_the_same_in_chunks(void) {
    const epo_buffer_config wire = e4m3();
    for (int i = 0; i < 6; i++) {
        moe_case c = {.seed = (uint64_t)(40 + i),
                      .ranks = 1 + i % 3,
                      .experts = 8 * (1 + i % 3),
                      .hidden = i % 2 == 0 ? 256 : 128,
                      .ffn = 12,
                      .top_k = 3,
                      .batches = 2,
                      .max_tokens = 20,
                      .type = (epo_dtype)(i / 3),
                      .style = i % 2 == 0 ? CASE_UNIFORM : CASE_DISTINCT};
        moe_how how = {.dispatcher = EPO_DISPATCH_FLEX, .wgrad_type = EPO_F32, .limits = &wire};
        moe_answer answer;
        moe_result first, other;
        moe_case_fill(&c);
        moe_reference(&c, &answer);
        CU_ASSERT_EQUAL(moe_run(&c, &how, &first), 0);
        double error = moe_error(&c, &how, &first, &answer, true);
        CU_ASSERT(error > 1e-3 && error < 0.08); /* off, as rows would not be */
        how.overlap = 1;
        how.delay = i % 2;
        how.chunks = 4;
        CU_ASSERT_EQUAL(moe_run(&c, &how, &other), 0);
        CU_ASSERT(moe_same(&c, &how, &first, &other));
        moe_result_free(&other);
        how.saved = i % 2 == 0 ? EPO_SAVE_TOKENS : EPO_SAVE_NOTHING; /* made again */
        CU_ASSERT_EQUAL(moe_run(&c, &how, &other), 0);
        CU_ASSERT(moe_same(&c, &how, &first, &other));
        moe_result_free(&other);
        moe_result_free(&first);
        moe_answer_free(&answer);
        moe_case_free(&c);
    }
}

enum { H = 256, T = 6 };

/* Each row is off by no more than the header says, own rows like others'. */
static void rows_rank(moe_rank *c) {
    epo_buffer_config config = e4m3();
    float x[T][H], rows[T][H];
    int64_t experts[T];
    uint64_t state = 77;
    epo_buffer *b = NULL;
    epo_plan *plan = NULL;
    epo_group *g = moe_rank_group(c, c->arg);
    config.experts = config.max_tokens = T;
    config.hidden = H;
    config.top_k = 1;
    config.align_rows = 1;
    config.type = EPO_F32;
    for (int i = 0; i < T * H; i++) /* the same on both ranks */
        x[i / H][i % H] = i / H == 0 && i % H < 128 ? 0 : random_float(&state);
    for (int i = 0; i < T * 128; i++) /* tiny, every other one zero: what underflowed */
        if (i / 128 > 0)
            x[i / 128][i % 128] *= i % 2 == 0 ? 0 : ldexpf(1, -104 - 10 * (i / 128 - 1));
    for (int t = 0; t < T; t++) /* rank r's tokens 0..2 go to rank r, the others away */
        experts[t] = t < T / 2 ? c->rank * 3 + t : (1 - c->rank) * 3 + t - 3;
    EXPECT(c, c->engine->buffer_create(g, &config, &b) == EPO_OK);
    epo_routing routing = EPO_ROUTING_INIT;
    routing.tokens = T;
    routing.top_k = 1;
    routing.experts = experts;
    EXPECT(c, c->engine->plan_create(b, &routing, NULL, &plan) == EPO_OK);
    memset(rows, 0xff, sizeof rows);
    EXPECT(c, c->engine->dispatch(plan, x, rows, NULL, NULL) == EPO_OK);
    for (int i = 0; i < T; i++) { /* expert e: its own rank's token e, the other's 3 + e */
        bool own = i % 2 == c->rank;
        const float *want = x[own ? i / 2 : 3 + i / 2];
        for (int h = 0; h < H; h++) {
            float most = 0;
            for (int j = h / 128 * 128; j < h / 128 * 128 + 128; j++)
                most = fmaxf(most, fabsf(want[j]));
            float off = fabsf(rows[i][h] - want[h]);
            most = fmaxf(most, EPO_WIRE_LEAST);
            EXPECT(c, off <= fmaxf(fabsf(want[h]) / 16, most / 1024) * 1.0001F);
        }
    }
    epo_stats stats = {.size = sizeof stats};
    EXPECT(c, c->engine->group_stats(g, &stats, 0) == EPO_OK);
    EXPECT(c, stats.dispatch_bytes == T / 2 * (H + H / 128 * 4 + 8)); /* to 16 bytes */
    c->engine->plan_release(plan);
    EXPECT(c, c->engine->buffer_destroy(b) == EPO_OK);
    EXPECT(c, c->engine->group_destroy(g) == EPO_OK);
}

static const moe_how plain = {.dispatcher = EPO_DISPATCH_FLEX};

static void rows_are_as_near_as_stated(void) {
    CU_ASSERT_EQUAL(moe_ranks(2, 30.0, rows_rank, (void *)(uintptr_t)&plain), 0);
}

static void refused_rank(moe_rank *c) {
    epo_group *g = moe_rank_group(c, c->arg);
    const struct {
        epo_dispatcher dispatcher;
        int hidden, wire;
        epo_status want;
        const char *text;
    } cases[] = {
        {EPO_DISPATCH_ALLTOALL, 256, EPO_WIRE_E4M3, EPO_E_ARG, "alltoall"},
        {EPO_DISPATCH_FLEX, 192, EPO_WIRE_E4M3, EPO_E_ARG, "hidden is 192"},
        {EPO_DISPATCH_FLEX, 256, 7, EPO_E_ARG, "wire: found 7"},
        {EPO_DISPATCH_FLEX, 256, c->rank, EPO_E_PEER, "wire is"},
        {EPO_DISPATCH_FLEX, 256, EPO_WIRE_E4M3, EPO_OK, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        epo_buffer_config config = EPO_BUFFER_CONFIG_INIT;
        epo_buffer *b = NULL;
        config.experts = config.max_tokens = 4;
        config.top_k = 1;
        config.hidden = cases[i].hidden;
        config.type = EPO_BF16;
        config.dispatcher = cases[i].dispatcher;
        config.wire = (epo_wire)cases[i].wire;
        EXPECT(c, c->engine->buffer_create(g, &config, &b) == cases[i].want);
        EXPECT(c, cases[i].text == NULL || strstr(c->engine->error(), cases[i].text) != NULL);
        if (b != NULL)
            EXPECT(c, c->engine->buffer_destroy(b) == EPO_OK);
    }
    EXPECT(c, c->engine->group_destroy(g) == EPO_OK);
}

static void what_cannot_be_sent_is_refused(void) {
    CU_ASSERT_EQUAL(moe_ranks(2, 30.0, refused_rank, (void *)(uintptr_t)&plain), 0);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"every e4m3 code comes back", every_code_comes_back},
        {"values round to the nearest", values_round_to_the_nearest},
        {"rows are as near as stated", rows_are_as_near_as_stated},
        {"layers are near, and the same in chunks", layers_are_near_and_the_same_in_chunks},
        {"what cannot be sent is refused", what_cannot_be_sent_is_refused},
        CU_TEST_INFO_NULL,
    };
    return unit_run("wire", tests);
}
