/* SPDX-License-Identifier: Apache-2.0
 *
 * The whole layer, ranks as threads: right values for any routing, and the same
 * bits however it is scheduled.
 *
 *   EPO_SEED=N    repeat the property test from this seed
 *   EPO_ROUNDS=N  random layers to try (300)
 */
#include "moe_ranks.h"
#include "unit.h"

/* bf16 rounds by up to 2^-8, and a dx is five roundings from dy: in a tensor of a
 * few values they may all go the same way. */
static double bound(const moe_case *c, const moe_how *how, bool tiny) {
    if (c->type == EPO_F32 && how->wgrad_type == EPO_F32)
        return 1e-5;
    return tiny ? 2.5e-2 : 1e-2;
}

/* tiny: a tensor may be one value whose terms cancel, so errors are judged by the terms. */
static bool right(const moe_case *c, const moe_how *how, const moe_answer *answer, bool tiny,
                  moe_result *result) {
    return moe_right(c, how, answer, bound(c, how, tiny), tiny || c->type != EPO_F32, result);
}

/* Serial, then every chunk count overlapped and delayed: right, and the same. */
static bool all_ways(const moe_case *c, epo_dispatcher dispatcher, const int *chunks, int nchunks,
                     int align, bool in_place, bool tiny) {
    epo_dtype wgrad = c->type == EPO_F32 || c->seed % 2 == 0 ? EPO_F32 : c->type;
    const moe_how serial = {.dispatcher = dispatcher,
                            .wgrad_type = wgrad,
                            .align = align,
                            .in_place = in_place,
                            .saved = EPO_SAVE_ROWS};
    moe_answer answer;
    moe_result first, other;
    moe_reference(c, &answer);
    bool good = right(c, &serial, &answer, tiny, &first);
    for (int i = 0; i < 2 * nchunks && good; i++) {
        moe_how how = serial;
        how.overlap = 1;
        how.delay = i % 2;
        how.chunks = chunks[i / 2];
        good = right(c, &how, &answer, tiny, &other) && moe_agrees(c, &how, &first, &other);
        moe_result_free(&other);
    }
    moe_result_free(&first);
    moe_answer_free(&answer);
    return good;
}

static void every_way_gives_the_same_bits(void) {
    const int chunks[] = {1, 2, 4, 8};
    for (int d = EPO_DISPATCH_ALLTOALL; d <= EPO_DISPATCH_FLEX; d++)
        for (int ranks = 1; ranks <= 4; ranks++)
            for (int style = 0; style < CASE_STYLES; style++) {
                moe_case c = {.seed = (uint64_t)(100 * ranks + style),
                              .ranks = ranks,
                              .experts = 8 * ranks,
                              .hidden = 20,
                              .ffn = 12,
                              .top_k = 3,
                              .batches = 3,
                              .max_tokens = 24,
                              .type = (epo_dtype)((style + ranks) % 3),
                              .style = (case_style)style};
                moe_case_fill(&c);
                CU_ASSERT(all_ways(&c, (epo_dispatcher)d, chunks, 4, 0, false, false));
                moe_case_free(&c);
            }
}

/* Also where all tokens are some ranks', and others get none. */
static void what_is_saved_does_not_matter(void) {
    for (int i = 0; i < 4 * CASE_STYLES; i++) {
        moe_case c = {.seed = (uint64_t)(700 + i),
                      .ranks = 2 + i % 2,
                      .experts = 4 * (2 + i % 2),
                      .hidden = 20,
                      .ffn = 12,
                      .top_k = 3,
                      .batches = 2,
                      .max_tokens = 12,
                      .type = i / 2 % 2 ? EPO_BF16 : EPO_F32,
                      .style = (case_style)(i / 4)};
        moe_answer answer;
        moe_result rows, other;
        moe_how how = {
            .dispatcher = EPO_DISPATCH_FLEX, .overlap = 1, .chunks = 1, .wgrad_type = EPO_F32};
        moe_case_fill(&c);
        moe_reference(&c, &answer);
        CU_ASSERT(right(&c, &how, &answer, true, &rows));
        for (int saved = EPO_SAVE_TOKENS; saved <= EPO_SAVE_NOTHING; saved++) {
            how.saved = (epo_saved_mode)saved;
            CU_ASSERT(right(&c, &how, &answer, true, &other) &&
                      moe_agrees(&c, &how, &rows, &other));
            moe_result_free(&other);
        }
        moe_result_free(&rows);
        moe_answer_free(&answer);
        moe_case_free(&c);
    }
}

/* What lies in dw1 and dw2 before, NaN, is not read, the batches behind the first are added, and
 * experts without rows have zeros. */
static void a_step_begins_with_fresh_gradients(void) {
    for (int i = 0; i < 3 * 2 * 2 * CASE_STYLES; i++) {
        moe_case c = {.seed = (uint64_t)(500 + i),
                      .ranks = 1 + i % 3,
                      .experts = 8 * (1 + i % 3),
                      .hidden = 20,
                      .ffn = 12,
                      .top_k = 2,
                      .batches = 1 + i % 2,
                      .max_tokens = 9,
                      .type = (epo_dtype)(i % 3),
                      .style = (case_style)(i / 12)};
        moe_case_fill(&c);
        const size_t stack = (size_t)c.experts * (size_t)c.ffn * (size_t)c.hidden;
        memset(c.dw1, 0, 2 * stack * sizeof *c.dw1);
        memset(c.dw2, 0, stack * sizeof *c.dw2);
        moe_answer answer;
        moe_reference(&c, &answer);
        for (int way = 0; way < 6;
             way++) { /* serial, overlapped, delayed; in fp32 and the rows' type */
            moe_how how = {.dispatcher = i / 6 % 2 ? EPO_DISPATCH_FLEX : EPO_DISPATCH_ALLTOALL,
                           .overlap = way / 2 > 0,
                           .delay = way / 2 > 1,
                           .chunks = way / 2 > 0 ? 3 : 0,
                           .wgrad_type = way % 2 ? c.type : EPO_F32,
                           .fresh = true};
            moe_result fresh, cleared;
            CU_ASSERT(right(&c, &how, &answer, true, &fresh));
            how.fresh = false;
            CU_ASSERT(right(&c, &how, &answer, true, &cleared));
            CU_ASSERT(moe_agrees(&c, &how, &cleared, &fresh));
            moe_result_free(&fresh);
            moe_result_free(&cleared);
        }
        moe_answer_free(&answer);
        moe_case_free(&c);
    }
}

static void wider_rows_agree_too(void) {
    const int chunks[] = {3};
    for (int type = EPO_F32; type <= EPO_F16; type++)
        for (int d = EPO_DISPATCH_ALLTOALL; d <= EPO_DISPATCH_FLEX; d++) {
            moe_case c = {.seed = 7,
                          .ranks = 4,
                          .experts = 16,
                          .hidden = 160,
                          .ffn = 96,
                          .top_k = 4,
                          .batches = 2,
                          .max_tokens = 64,
                          .type = (epo_dtype)type,
                          .style = CASE_DISTINCT};
            moe_case_fill(&c);
            CU_ASSERT(all_ways(&c, (epo_dispatcher)d, chunks, 1, 0, true, false));
            moe_case_free(&c);
        }
}

/* Ranks, experts, hidden, ffn, top_k, tokens: one of each, the most of each, primes. */
static void shapes_at_the_edges(void) {
    static const int shapes[][6] = {
        {1, 1, 1, 1, 1, 1},     {1, 1, 1, 1, 32, 3},   {8, 8, 1, 1, 8, 1},   {8, 8, 13, 1, 32, 5},
        {2, 128, 3, 2, 32, 40}, {3, 3, 257, 1, 2, 9},  {4, 4, 1, 259, 3, 7}, {5, 35, 17, 19, 7, 23},
        {7, 7, 31, 37, 1, 90},  {2, 2, 64, 64, 1, 200}};
    const int chunks[] = {3, 1000};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int way = 0; way < 6; way++) {
            const int *s = shapes[i];
            moe_case c = {.seed = 1000 + i,
                          .ranks = s[0],
                          .experts = s[1],
                          .hidden = s[2],
                          .ffn = s[3],
                          .top_k = s[4],
                          .batches = 2,
                          .max_tokens = s[5],
                          .type = (epo_dtype)(way % 3),
                          .style = i % 3 == 2 ? CASE_ONE : CASE_UNIFORM};
            moe_case_fill(&c);
            CU_ASSERT(all_ways(&c, (epo_dispatcher)(way / 3), chunks, 2, 1 << way, false, true));
            moe_case_free(&c);
        }
}

static bool random_layer(uint64_t seed) {
    moe_case c;
    uint64_t state = seed;
    const uint32_t type = moe_random(&state) % 4;
    moe_case_random(&c, seed, 4, type == 0 ? EPO_BF16 : type == 1 ? EPO_F16 : EPO_F32);
    const int chunks = 1 + (int)(moe_random(&state) % 6), align = 1 << moe_random(&state) % 5;
    const epo_dispatcher d = (epo_dispatcher)(moe_random(&state) % 2);
    const bool good = all_ways(&c, d, &chunks, 1, align, moe_random(&state) % 2 == 0, true);
    moe_case_free(&c);
    return good;
}

static void random_layers_agree_with_the_reference(void) {
    CU_ASSERT(moe_rounds(300, random_layer));
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"serial, overlapped, delayed: the same bits", every_way_gives_the_same_bits},
        {"rows, tokens or nothing saved: the same bits", what_is_saved_does_not_matter},
        {"wider rows agree too", wider_rows_agree_too},
        {"a step begins with fresh gradients", a_step_begins_with_fresh_gradients},
        {"shapes at the edges", shapes_at_the_edges},
        {"random layers agree with the reference", random_layers_agree_with_the_reference},
        CU_TEST_INFO_NULL,
    };
    return unit_run("moe layer", tests);
}
