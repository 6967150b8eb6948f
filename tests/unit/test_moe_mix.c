/* SPDX-License-Identifier: Apache-2.0
 *
 * What a group, a buffer and a layer can be told, all at once and at random: the bits of the
 * plain way (serial, one chunk, rows kept, one pass after the other), and, where nothing is
 * dropped or rounded on the wire, the values of the reference.
 *
 *   EPO_SEED=N    repeat from this seed
 *   EPO_ROUNDS=N  random layers to try (150)
 */
#include "moe_ranks.h"
#include "unit.h"

#include <stdlib.h>
#include <string.h>

static int below(uint64_t *state, int n) { return (int)(moe_random(state) % (uint32_t)n); }

/* Ranks that hold the same tokens. */
static void share_tokens(moe_case *c, int tp) {
    for (int b = 0; b < c->batches; b++)
        for (int r = 0; r < c->ranks; r++) {
            const case_batch *first = &c->batch[b][r / tp * tp];
            case_batch *in = &c->batch[b][r];
            if (r % tp == 0)
                continue;
            const size_t slots = (size_t)first->tokens * (size_t)c->top_k;
            const size_t n = (size_t)first->tokens * (size_t)c->hidden;
            free(in->experts);
            free(in->weights);
            free(in->x);
            free(in->dy);
            in->tokens = first->tokens;
            in->experts = moe_calloc(slots, sizeof *in->experts);
            memcpy(in->experts, first->experts, slots * sizeof *in->experts);
            in->weights = NULL;
            if (first->weights != NULL) {
                in->weights = moe_calloc(slots, sizeof *in->weights);
                memcpy(in->weights, first->weights, slots * sizeof *in->weights);
            }
            in->x = moe_pack(first->x, n, EPO_F32);
            in->dy = moe_pack(first->dy, n, EPO_F32);
        }
}

static void random_case(moe_case *c, uint64_t seed, uint64_t *state, bool wire, int tp) {
    static const int ranks[] = {1, 2, 3, 4, 6, 8};
    memset(c, 0, sizeof *c);
    c->seed = seed;
    c->ranks = ranks[below(state, 6)];
    c->ranks = c->ranks % tp == 0 ? c->ranks : 4;
    c->experts = c->ranks * (1 + below(state, 5));
    c->hidden = wire ? 128 * (1 + below(state, 2)) : 1 + below(state, 35);
    c->ffn = 1 + below(state, 19);
    c->top_k = 1 + below(state, below(state, 3) == 0 ? 12 : 4);
    if (below(state, 4) == 0) /* all of them */
        c->top_k = c->experts < 32 ? c->experts : 32;
    c->batches = 1 + below(state, CASE_BATCHES);
    c->max_tokens = 1 + below(state, 20);
    c->type = (epo_dtype)below(state, 3);
    c->style = (case_style)below(state, CASE_STYLES);
    moe_case_fill(c);
    if (tp > 1)
        share_tokens(c, tp);
}

static bool random_limits(uint64_t *state, bool wire, epo_buffer_config *limits) {
    *limits = (epo_buffer_config)EPO_BUFFER_CONFIG_INIT;
    limits->wire = wire ? EPO_WIRE_E4M3 : EPO_WIRE_ROWS;
    if (below(state, 2) == 0)
        return false;
    if (below(state, 2) == 0)
        limits->capacity = below(state, 8);
    else
        limits->capacity_factor = 0.25 * (1 + below(state, 8));
    limits->overflow = below(state, 2) == 0 ? EPO_OVERFLOW_DROP_WEIGHT : EPO_OVERFLOW_DROP_POSITION;
    limits->pad_to_capacity = below(state, 2);
    return true;
}

static moe_how random_how(uint64_t *state, const moe_how *plain) {
    moe_how how = *plain;
    how.overlap = below(state, 4) > 0;
    how.delay = how.overlap && below(state, 2) > 0;
    how.chunks = below(state, 6);
    how.wgrad_limit = below(state, 3) == 0 ? 1 + (uint64_t)below(state, 40000) : 0;
    how.in_place = below(state, 2) > 0;
    how.paired = below(state, 2) > 0;
    how.saved = how.own ? EPO_SAVE_ROWS : (epo_saved_mode)below(state, 3);
    if (how.saved == EPO_SAVE_TOKENS && how.dispatcher == EPO_DISPATCH_ALLTOALL)
        how.saved = EPO_SAVE_NOTHING;
    return how;
}

static bool one(uint64_t seed) {
    uint64_t state = seed * 7919 + 17;
    moe_case c;
    moe_answer answer;
    moe_result first, other;
    epo_buffer_config limits;
    const bool wire = below(&state, 4) == 0;
    const int tp = below(&state, 3) == 0 ? 2 : 1;
    random_case(&c, seed, &state, wire, tp);
    moe_how plain = {.dispatcher = wire ? EPO_DISPATCH_FLEX : (epo_dispatcher)below(&state, 2)};
    plain.tp = tp;
    plain.align = below(&state, 3) == 0 ? 1 + below(&state, 40) : 0;
    plain.wgrad_type = below(&state, 2) == 0 ? EPO_F32 : c.type;
    plain.own = c.type == EPO_F32 && plain.wgrad_type == EPO_F32 && below(&state, 3) == 0;
    plain.fresh = !plain.own && below(&state, 4) == 0;
    const bool limited = random_limits(&state, wire, &limits);
    plain.limits = &limits;
    if (plain.fresh) {
        const size_t stack = (size_t)c.experts * (size_t)c.ffn * (size_t)c.hidden;
        memset(c.dw1, 0, 2 * stack * sizeof *c.dw1);
        memset(c.dw2, 0, stack * sizeof *c.dw2);
    }
    bool good;
    if (wire || limited || tp > 1) {
        good = moe_run(&c, &plain, &first) == 0;
    } else {
        const bool exact = c.type == EPO_F32 && plain.wgrad_type == EPO_F32;
        moe_reference(&c, &answer);
        good = moe_right(&c, &plain, &answer, exact ? 1e-5 : 2.5e-2, true, &first);
        moe_answer_free(&answer);
    }
    for (int i = 0; i < 3 && good; i++) {
        const moe_how how = random_how(&state, &plain);
        good = moe_run(&c, &how, &other) == 0 && moe_agrees(&c, &how, &first, &other);
        if (!good)
            fprintf(stderr,
                    "paired %d, own %d, in place %d, fresh %d, tp %d, align %d, wire %d, capacity "
                    "%d, factor %g, overflow %d, pad %d, limit %llu\n",
                    how.paired, how.own, how.in_place, how.fresh, how.tp, how.align,
                    (int)limits.wire, limits.capacity, limits.capacity_factor, (int)limits.overflow,
                    limits.pad_to_capacity, (unsigned long long)how.wgrad_limit);
        moe_result_free(&other);
    }
    moe_result_free(&first);
    moe_case_free(&c);
    return good;
}

static void any_mixture_has_the_same_bits(void) { CU_ASSERT(moe_rounds(150, one)); }

int main(void) {
    const CU_TestInfo tests[] = {
        {"any mixture has the same bits", any_mixture_has_the_same_bits},
        CU_TEST_INFO_NULL,
    };
    return unit_run("moe mix", tests);
}
