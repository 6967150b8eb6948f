/* SPDX-License-Identifier: Apache-2.0
 *
 * Experts of the caller's: SwiGLU once more, as a function of the test's, gives what the
 * reference gives; an error of it ends all.
 */
#include "moe_ranks.h"
#include "unit.h"

#include <stdlib.h>
#include <string.h>

static bool right(const moe_case *c, const moe_how *how, const moe_answer *answer,
                  moe_result *result) {
    int failures = moe_run(c, how, result);
    double error = moe_error(c, how, result, answer, true);
    bool called = true;
    for (int r = 0; r < c->ranks; r++)
        called = called && result->calls[r] > 0;
    if (failures == 0 && error < 1e-5 && called)
        return true;
    moe_case_print(c);
    fprintf(stderr, "dispatcher %d overlap %d delay %d chunks %d: %d failures, error %g\n",
            (int)how->dispatcher, how->overlap, how->delay, how->chunks, failures, error);
    return false;
}

/* Serial, overlapped, delayed: right, and the same bits. */
static bool every_way(const moe_case *c, epo_dispatcher d, int chunks, int align,
                      const epo_buffer_config *limits) {
    moe_how serial = {.dispatcher = d, .align = align, .own = true, .limits = limits};
    moe_result first, other;
    moe_answer answer;
    moe_reference(c, &answer);
    bool good = right(c, &serial, &answer, &first);
    for (int delay = 0; delay < 2 && good; delay++) {
        moe_how how = serial;
        how.overlap = 1;
        how.delay = delay;
        how.chunks = chunks;
        good = right(c, &how, &answer, &other) && moe_same(c, &how, &first, &other);
        moe_result_free(&other);
    }
    moe_result_free(&first);
    moe_answer_free(&answer);
    return good;
}

static void own_experts_agree_with_the_reference(void) {
    bool good = true;
    for (uint64_t i = 0; i < 60 && good; i++) {
        moe_case c;
        epo_buffer_config padded = EPO_BUFFER_CONFIG_INIT;
        padded.capacity = 100; /* nothing is dropped, much is filled up */
        padded.pad_to_capacity = 1;
        moe_case_random(&c, 900 + i, 4, EPO_F32);
        good = every_way(&c, (epo_dispatcher)(i % 2), 1 + (int)(i % 5), 1 << i % 5,
                         i % 3 == 0 ? &padded : NULL);
        moe_case_free(&c);
    }
    CU_ASSERT(good);
}

static void one_case(moe_case *c) {
    *c = (moe_case){.seed = 5,
                    .ranks = 2,
                    .experts = 6,
                    .hidden = 7,
                    .ffn = 4,
                    .top_k = 2,
                    .batches = 2,
                    .max_tokens = 12,
                    .type = EPO_F32,
                    .style = CASE_UNIFORM};
    moe_case_fill(c);
}

/* moe_run counts what did not go as it should: every rank's call that failed. */
static void an_error_ends_all(void) {
    for (int call = 1; call <= 4; call++)
        for (int d = 0; d < 2; d++) {
            moe_case c;
            moe_result result;
            one_case(&c);
            moe_how how = {.dispatcher = (epo_dispatcher)d,
                           .overlap = 1,
                           .chunks = 2,
                           .own = true,
                           .fail_call = call};
            CU_ASSERT(moe_run(&c, &how, &result) >= 2);
            CU_ASSERT(result.calls[0] >= call && result.calls[0] <= call + 2);
            moe_result_free(&result);
            moe_case_free(&c);
        }
}

static epo_status nothing(void *ctx, const epo_expert_call *call) {
    return (void)ctx, (void)call, EPO_OK;
}

static void refused_rank(moe_rank *c) {
    moe_how how = {.overlap = 0};
    epo_group *g = moe_rank_group(c, &how);
    epo_layer_config config = EPO_LAYER_CONFIG_INIT;
    epo_layer *layer = NULL;
    float w[4] = {0};
    config.experts = c->ranks;
    config.hidden = 2;
    config.expert = nothing;
    config.w1 = w;
    EXPECT(c, c->engine->layer_create(g, &config, &layer) == EPO_E_ARG);
    EXPECT(c, strstr(c->engine->error(), "weights") != NULL);
    config.w1 = NULL;
    config.dw2 = w;
    EXPECT(c, c->engine->layer_create(g, &config, &layer) == EPO_E_ARG);
    config.dw2 = NULL;
    EXPECT(c, c->engine->layer_create(g, &config, &layer) == EPO_OK);
    EXPECT(c, c->engine->layer_destroy(layer) == EPO_OK);
    EXPECT(c, c->engine->group_destroy(g) == EPO_OK);
}

static void weights_beside_it_are_refused(void) {
    CU_ASSERT_EQUAL(moe_ranks(2, 10.0, refused_rank, NULL), 0);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"own experts agree with the reference", own_experts_agree_with_the_reference},
        {"an error of theirs ends all", an_error_ends_all},
        {"weights beside them are refused", weights_beside_it_are_refused},
        CU_TEST_INFO_NULL,
    };
    return unit_run("moe own experts", tests);
}
