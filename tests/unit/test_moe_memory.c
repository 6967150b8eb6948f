/* SPDX-License-Identifier: Apache-2.0
 *
 * What a forward keeps for its backward: whatever the way, the same bits; and the bytes
 * that are told beforehand are those that are taken.
 */
#include "moe_ranks.h"
#include "unit.h"

#include <stdlib.h>
#include <string.h>

/* All modes of saving, serial, overlapped and delayed, against serial with kept rows. */
static bool every_mode(const moe_case *c, epo_dispatcher d, int chunks, int align) {
    moe_how plain = {.dispatcher = d, .align = align};
    moe_result first, other;
    bool good = moe_run(c, &plain, &first) == 0;
    for (int i = 0; i < 9 && good; i++) {
        moe_how how = plain;
        how.saved = (epo_saved_mode)(i % 3);
        how.overlap = i / 3 > 0;
        how.delay = i / 3 > 1;
        how.chunks = chunks;
        if (how.saved == EPO_SAVE_TOKENS && d == EPO_DISPATCH_ALLTOALL)
            continue;
        good = moe_run(c, &how, &other) == 0 && moe_same(c, &how, &first, &other);
        if (!good) {
            moe_case_print(c);
            fprintf(stderr, "dispatcher %d saved %d overlap %d delay %d chunks %d\n", (int)d,
                    (int)how.saved, how.overlap, how.delay, how.chunks);
        }
        moe_result_free(&other);
    }
    moe_result_free(&first);
    return good;
}

static void every_mode_has_the_same_bits(void) {
    bool good = true;
    for (uint64_t i = 0; i < 80 && good; i++) {
        moe_case c;
        moe_case_random(&c, 4000 + i, 4, i % 4 == 0 ? EPO_BF16 : EPO_F32);
        good = every_mode(&c, (epo_dispatcher)(i % 2), 1 + (int)(i % 5), 1 << i % 5);
        moe_case_free(&c);
    }
    CU_ASSERT(good);
}

/* Rows of rank `to` that a batch makes, and tokens that come there with flex. */
static void count_rows(const moe_case *c, int b, int to, uint64_t *rows, uint64_t *tokens) {
    const int local = c->experts / c->ranks;
    for (int r = 0; r < c->ranks; r++)
        for (int t = 0; t < c->batch[b][r].tokens; t++) {
            uint64_t here = 0;
            for (int k = 0; k < c->top_k; k++) {
                const int64_t e = c->batch[b][r].experts[t * c->top_k + k];
                here += e >= 0 && e / local == to;
            }
            *rows += here;
            *tokens += here > 0;
        }
}

/* What is moved in a rank's memory to have the rows again: tokens are copied, and expanded in
 * the backward pass; with nothing kept, what comes once more is. */
static void keeping_is_counted(void) {
    for (uint64_t seed = 70; seed < 90; seed++) {
        moe_case c;
        moe_result kept[3];
        moe_case_random(&c, seed, 4, EPO_F32);
        moe_how how = {.dispatcher = EPO_DISPATCH_FLEX, .align = 1};
        for (int i = 0; i < 3; i++) {
            how.saved = (epo_saved_mode)i;
            CU_ASSERT_EQUAL(moe_run(&c, &how, &kept[i]), 0);
        }
        for (int r = 0; r < c.ranks; r++) {
            const uint64_t row = (uint64_t)c.hidden * sizeof(float);
            uint64_t rows = 0, tokens = 0;
            for (int b = 0; b < c.batches; b++)
                count_rows(&c, b, r, &rows, &tokens);
            const uint64_t plain = kept[EPO_SAVE_ROWS].stats[r].local_bytes;
            CU_ASSERT_EQUAL(kept[EPO_SAVE_TOKENS].stats[r].local_bytes,
                            plain + 2 * (tokens + rows) * row);
            CU_ASSERT_EQUAL(kept[EPO_SAVE_NOTHING].stats[r].local_bytes, plain + 2 * rows * row);
        }
        for (int i = 0; i < 3; i++)
            moe_result_free(&kept[i]);
        moe_case_free(&c);
    }
}

/* ---- bytes ------------------------------------------------------------------- */

enum { R = 2, E = 8, H = 640, F = 320, K = 3, T = 200 };

typedef struct setting {
    moe_how how;
    bool trains;
    uint64_t saved; /* told, of rank 0 */
} setting;

static uint64_t held(moe_rank *c, epo_group *g) {
    epo_stats stats = {.size = sizeof stats};
    EXPECT(c, c->engine->group_stats(g, &stats, 0) == EPO_OK);
    return stats.memory_bytes;
}

typedef struct arrays {
    float *w1, *w2, *dw1, *dw2, *x, *y, *x2;
    int64_t *experts;
} arrays;

static arrays make_arrays(const moe_rank *c) {
    arrays a = {moe_calloc((size_t)E / R * 2 * F * H, 4),
                moe_calloc((size_t)E / R * F * H, 4),
                moe_calloc((size_t)E / R * 2 * F * H, 4),
                moe_calloc((size_t)E / R * F * H, 4),
                moe_calloc((size_t)T * H, 4),
                moe_calloc((size_t)T * H, 4),
                moe_calloc((size_t)T * H, 4),
                moe_calloc((size_t)T * K, 8)};
    uint64_t state = 77 + (uint64_t)c->rank;
    for (int i = 0; i < T * K; i++)
        a.experts[i] = (int64_t)(moe_random(&state) % E);
    return a;
}

static void free_arrays(arrays *a) {
    free(a->w1);
    free(a->w2);
    free(a->dw1);
    free(a->dw2);
    free(a->x);
    free(a->y);
    free(a->x2);
    free(a->experts);
}

/* The first calls of a size take what was told, the second ones nothing more. */
static void bytes_rank(moe_rank *c) {
    setting *s = c->arg;
    const epo_engine *e = c->engine;
    arrays a = make_arrays(c);
    epo_group *g = moe_rank_group(c, &s->how);
    const epo_buffer_config bc = config_buffer(E, H, K, T);
    epo_layer_config lc = config_layer(E, H, F, a.w1, a.w2);
    const epo_routing routing = config_routing(T, K, a.experts, NULL);
    epo_layer_memory m = {.size = sizeof m};
    epo_buffer *b = NULL;
    epo_layer *layer = NULL;
    epo_plan *plan = NULL;
    epo_saved *saved = NULL;
    lc.dw1 = s->trains ? a.dw1 : NULL;
    lc.dw2 = s->trains ? a.dw2 : NULL;
    lc.saved = s->how.saved;
    EXPECT(c, e->buffer_create(g, &bc, &b) == EPO_OK);
    EXPECT(c, e->layer_create(g, &lc, &layer) == EPO_OK);
    EXPECT(c, e->plan_create(b, &routing, NULL, &plan) == EPO_OK);
    uint64_t before = held(c, g);
    EXPECT(c, e->layer_bytes(layer, plan, &m) == EPO_OK);
    EXPECT(c, held(c, g) == before); /* only told */
    EXPECT(c, e->forward(layer, plan, a.x, a.y, &saved, NULL) == EPO_OK);
    uint64_t after = held(c, g);
    EXPECT(c, after == before + m.saved + m.forward);
    EXPECT(c, e->backward(layer, saved, a.y, a.y, NULL, NULL) == EPO_OK);
    EXPECT(c, e->group_wgrad_flush(g, NULL) == EPO_OK);
    EXPECT(c, held(c, g) <= after + m.backward);
    uint64_t all = held(c, g);
    EXPECT(c, e->forward(layer, plan, a.x, a.y, &saved, NULL) == EPO_OK);
    EXPECT(c, e->backward(layer, saved, a.y, a.y, NULL, NULL) == EPO_OK);
    EXPECT(c, e->group_wgrad_flush(g, NULL) == EPO_OK);
    EXPECT(c, held(c, g) == all);
    if (c->rank == 0)
        s->saved = m.saved;
    e->plan_release(plan);
    EXPECT(c, e->layer_destroy(layer) == EPO_OK);
    EXPECT(c, e->buffer_destroy(b) == EPO_OK);
    EXPECT(c, e->group_destroy(g) == EPO_OK);
    free_arrays(&a);
}

static uint64_t saved_bytes(epo_dispatcher d, epo_saved_mode mode, bool trains, int overlap) {
    setting s = {.how = {.dispatcher = d, .saved = mode, .overlap = overlap, .chunks = overlap * 2},
                 .trains = trains};
    CU_ASSERT_EQUAL(moe_ranks(R, 30.0, bytes_rank, &s), 0);
    return s.saved;
}

static void what_is_told_is_what_is_taken(void) {
    for (int overlap = 0; overlap < 2; overlap++) {
        uint64_t rows = saved_bytes(EPO_DISPATCH_FLEX, EPO_SAVE_ROWS, true, overlap);
        uint64_t tokens = saved_bytes(EPO_DISPATCH_FLEX, EPO_SAVE_TOKENS, true, overlap);
        uint64_t nothing = saved_bytes(EPO_DISPATCH_FLEX, EPO_SAVE_NOTHING, true, overlap);
        CU_ASSERT(rows > tokens && tokens > nothing && nothing > 0);
        CU_ASSERT(saved_bytes(EPO_DISPATCH_FLEX, EPO_SAVE_ROWS, false, overlap) == nothing);
        rows = saved_bytes(EPO_DISPATCH_ALLTOALL, EPO_SAVE_ROWS, true, overlap);
        nothing = saved_bytes(EPO_DISPATCH_ALLTOALL, EPO_SAVE_NOTHING, true, overlap);
        CU_ASSERT(rows > nothing && nothing > 0);
    }
}

/* ---- the caller's memory --------------------------------------------------------- */

/* Of one rank: what it holds; `most`: no more than that; `skew`: how crooked it is. */
typedef struct store {
    uint64_t held, most;
    size_t skew;
    int calls, fail_call; /* not 0: from the n-th call on there is no more */
} store;

static void *store_alloc(void *ctx, uint64_t bytes) {
    store *s = *(store **)ctx;
    char *p = NULL;
    s->calls++;
    if (s->held + bytes > s->most || (s->fail_call > 0 && s->calls >= s->fail_call))
        return NULL;
    p = aligned_alloc(256, (bytes + 511) / 256 * 256);
    if (p == NULL)
        abort();
    memset(p, 0xff, bytes);
    s->held += bytes;
    return p + s->skew;
}

static void store_free(void *ctx, void *ptr, uint64_t bytes) {
    store *s = *(store **)ctx;
    s->held -= bytes;
    free((char *)ptr - s->skew);
}

static void layers_live_in_the_callers_memory(void) {
    bool good = true;
    for (uint64_t i = 0; i < 12 && good; i++) {
        moe_case c;
        moe_result mine, theirs;
        store each[CASE_RANKS];
        store *contexts[CASE_RANKS];
        epo_group_config memory = EPO_GROUP_CONFIG_INIT;
        memory.alloc = store_alloc;
        memory.free = store_free;
        memory.alloc_ctx = contexts;
        for (int r = 0; r < CASE_RANKS; r++) {
            each[r] = (store){.most = UINT64_MAX};
            contexts[r] = &each[r];
        }
        moe_case_random(&c, 4200 + i, 4, EPO_F32);
        moe_how how = {.dispatcher = (epo_dispatcher)(i % 2),
                       .overlap = i / 2 % 2 == 0,
                       .delay = i / 2 % 2 == 0,
                       .chunks = 2};
        good = moe_run(&c, &how, &mine) == 0;
        how.memory = &memory;
        good = good && moe_run(&c, &how, &theirs) == 0 && moe_same(&c, &how, &mine, &theirs);
        for (int r = 0; r < c.ranks && good; r++) {
            CU_ASSERT(each[r].calls > 0 && each[r].held == 0); /* all came back */
            CU_ASSERT(theirs.stats[r].caller_bytes > 0 &&
                      theirs.stats[r].memory_bytes < mine.stats[r].memory_bytes);
            CU_ASSERT(mine.stats[r].caller_bytes == 0);
        }
        moe_result_free(&mine);
        moe_result_free(&theirs);
        moe_case_free(&c);
    }
    CU_ASSERT(good);
}

/* A rank whose memory ends, or is crooked, ends the call on all of them. */
static void short_rank(moe_rank *c) {
    store *s = c->arg, own = {.most = UINT64_MAX}, *context = c->rank == 0 ? s : &own;
    store *contexts[CASE_RANKS] = {context, context};
    epo_group_config memory = EPO_GROUP_CONFIG_INIT;
    moe_how how = {.dispatcher = EPO_DISPATCH_FLEX, .memory = &memory};
    arrays a = make_arrays(c);
    memory.alloc = store_alloc;
    memory.free = store_free;
    memory.alloc_ctx = contexts;
    epo_group *g = moe_rank_group(c, &how);
    const epo_buffer_config bc = config_buffer(E, H, K, T);
    const epo_routing routing = config_routing(T, K, a.experts, NULL);
    epo_buffer *b = NULL;
    epo_plan *plan = NULL;
    EXPECT(c, c->engine->buffer_create(g, &bc, &b) == EPO_OK);
    epo_status status = c->engine->plan_create(b, &routing, NULL, &plan);
    EXPECT(c, c->rank != 0 || (status == (s->skew > 0 ? EPO_E_ARG : EPO_E_NOMEM) &&
                               strstr(c->engine->error(), "the caller's alloc") != NULL));
    EXPECT(c, status != EPO_OK);
    (void)c->engine->buffer_destroy(b);
    EXPECT(c, c->engine->group_destroy(g) == EPO_OK);
    EXPECT(c, context->held == 0);
    free_arrays(&a);
}

/* A pass forward and back; every rank's store is empty in the end. */
typedef struct scarce {
    moe_how how;
    int fail_call;
    bool failed; /* rank 0 */
} scarce;

static epo_status scarce_node(void *ctx, epo_node node, int layer, epo_step *step,
                              epo_stream stream) {
    (void)ctx;
    (void)node;
    (void)layer;
    (void)step;
    (void)stream;
    return EPO_OK;
}

/* Two micro-batches of the plan by schedule_run, the first's backward beside the second's
 * forward. */
static epo_status scarce_pairs(const epo_engine *e, epo_group *g, epo_layer *layer, epo_plan *plan,
                               const arrays *a) {
    epo_step f = {.layer = layer, .plan = plan, .x = a->x, .y = a->y}, b = {.layer = layer};
    epo_status status = EPO_OK;
    for (int i = 0; i < 3 && status == EPO_OK; i++) {
        epo_schedule s = EPO_SCHEDULE_INIT;
        s.layers = 1;
        s.node = scarce_node;
        s.forward = i < 2 ? &f : NULL;
        s.backward = i > 0 ? &b : NULL;
        b.saved = f.saved;
        b.dy = b.dx = a->x2;
        f.saved = NULL;
        status = e->schedule_run(g, &s, NULL);
    }
    return status;
}

static epo_status scarce_experts(void *ctx, const epo_expert_call *call) {
    (void)ctx;
    (void)call;
    return EPO_OK;
}

static void scarce_rank(moe_rank *c) {
    scarce *s = c->arg;
    store own = {.most = UINT64_MAX, .fail_call = c->rank == 0 ? s->fail_call : 0};
    store *contexts[CASE_RANKS] = {&own, &own, &own};
    epo_group_config memory = {.alloc = store_alloc, .free = store_free, .alloc_ctx = contexts};
    moe_how how = s->how;
    const epo_engine *e = c->engine;
    arrays a = make_arrays(c);
    how.memory = &memory;
    epo_group *g = moe_rank_group(c, &how);
    epo_buffer_config bc = config_buffer(E, H, K, T);
    epo_layer_config lc = config_layer(E, H, F, a.w1, a.w2);
    const epo_routing routing = config_routing(T, K, a.experts, NULL);
    epo_buffer *b = NULL;
    epo_layer *layer = NULL;
    epo_plan *plan = NULL;
    epo_saved *saved = NULL;
    lc.dw1 = a.dw1;
    lc.dw2 = a.dw2;
    lc.saved = how.saved;
    if (how.own) {
        lc.w1 = lc.w2 = NULL;
        lc.dw1 = lc.dw2 = NULL;
        lc.expert = scarce_experts;
        lc.expert_wgrad = 1;
    }
    if (how.limits != NULL) {
        bc.capacity = how.limits->capacity;
        bc.overflow = how.limits->overflow;
        bc.pad_to_capacity = how.limits->pad_to_capacity;
    }
    epo_status status = e->buffer_create(g, &bc, &b);
    if (status == EPO_OK)
        status = e->layer_create(g, &lc, &layer);
    if (status == EPO_OK)
        status = e->plan_create(b, &routing, NULL, &plan);
    if (status == EPO_OK && how.paired)
        status = scarce_pairs(e, g, layer, plan, &a);
    else if (status == EPO_OK)
        status = e->forward(layer, plan, a.x, a.y, &saved, NULL);
    if (status == EPO_OK && !how.paired) {
        status = e->backward(layer, saved, a.y, a.y, NULL, NULL);
        saved = NULL;
    }
    if (status == EPO_OK)
        status = e->group_wgrad_flush(g, NULL);
    if (status == EPO_OK)
        status = e->group_barrier(g);
    const bool failed = status != EPO_OK;
    EXPECT(c, !failed || c->rank != 0 ||
                  (status == EPO_E_NOMEM && strstr(e->error(), "the caller's alloc gave none")));
    EXPECT(c, !failed || c->rank == 0 || status == EPO_E_PEER || status == EPO_E_NOMEM);
    if (c->rank == 0)
        s->failed = failed;
    e->saved_release(saved);
    e->plan_release(plan);
    (void)e->layer_destroy(layer);
    (void)e->buffer_destroy(b);
    EXPECT(c, e->group_destroy(g) == EPO_OK || failed);
    EXPECT(c, own.held == 0);
    free_arrays(&a);
}

/* Rank 0's memory ends at its first call, at its second, and so on, until it does not end. */
static void memory_may_end_anywhere(void) {
    epo_buffer_config limits = EPO_BUFFER_CONFIG_INIT;
    limits.capacity = 3;
    limits.overflow = EPO_OVERFLOW_DROP_WEIGHT;
    limits.pad_to_capacity = 1;
    for (int i = 0; i < 24; i++) {
        scarce s = {.how = {.dispatcher = (epo_dispatcher)(i % 2),
                            .overlap = i / 2 % 3 > 0,
                            .delay = i / 2 % 3 > 1,
                            .chunks = i / 2 % 3 > 0 ? 2 : 1,
                            .paired = i / 6 % 2 > 0,
                            .own = i % 4 == 0 && i >= 12,
                            .limits = i >= 12 ? &limits : NULL}};
        if (i % 2 > 0)
            s.how.saved = (epo_saved_mode)(i / 2 % 3);
        int bad = 0;
        do {
            s.fail_call++;
            bad = moe_ranks(R, 20.0, scarce_rank, &s);
        } while (s.failed && bad == 0 && s.fail_call < 60);
        CU_ASSERT_EQUAL(bad, 0);
        CU_ASSERT(s.fail_call > 4 && s.fail_call < 60);
        printf("%d ", s.fail_call - 1);
    }
}

static void memory_that_ends_is_told(void) {
    store crooked = {.most = UINT64_MAX, .skew = 64}, none = {.most = 100};
    CU_ASSERT_EQUAL(moe_ranks(R, 10.0, short_rank, &none), 0);
    CU_ASSERT_EQUAL(moe_ranks(R, 10.0, short_rank, &crooked), 0);
}

/* ---- what is refused ---------------------------------------------------------- */

static void refused_rank(moe_rank *c) {
    moe_how how = {.dispatcher = EPO_DISPATCH_ALLTOALL};
    const epo_engine *e = c->engine;
    arrays a = make_arrays(c);
    epo_group *g = moe_rank_group(c, &how);
    const epo_buffer_config bc = config_buffer(E, H, K, T);
    epo_layer_config lc = config_layer(E, H, F, a.w1, a.w2);
    const epo_routing routing = config_routing(T, K, a.experts, NULL);
    epo_layer_memory m = {.size = sizeof m};
    epo_buffer *b = NULL;
    epo_layer *layer = NULL;
    epo_plan *plan = NULL;
    lc.saved = (epo_saved_mode)3;
    EXPECT(c, e->layer_create(g, &lc, &layer) == EPO_E_ARG);
    lc.saved = EPO_SAVE_TOKENS;
    EXPECT(c, e->layer_create(g, &lc, &layer) == EPO_OK);
    EXPECT(c, e->buffer_create(g, &bc, &b) == EPO_OK);
    EXPECT(c, e->plan_create(b, &routing, NULL, &plan) == EPO_OK);
    EXPECT(c, e->layer_bytes(layer, plan, &m) == EPO_E_ARG);
    EXPECT(c, e->forward(layer, plan, a.x, a.y, NULL, NULL) == EPO_E_ARG);
    EXPECT(c, strstr(e->error(), "flex") != NULL);
    e->plan_release(plan);
    EXPECT(c, e->layer_destroy(layer) == EPO_OK);
    (void)e->buffer_destroy(b);
    EXPECT(c, e->group_destroy(g) == EPO_OK);
    free_arrays(&a);
}

static void tokens_need_flex(void) { CU_ASSERT_EQUAL(moe_ranks(R, 10.0, refused_rank, NULL), 0); }

int main(void) {
    const CU_TestInfo tests[] = {
        {"every mode of saving has the same bits", every_mode_has_the_same_bits},
        {"keeping is counted", keeping_is_counted},
        {"what is told is what is taken", what_is_told_is_what_is_taken},
        {"tokens need flex", tokens_need_flex},
        {"layers live in the caller's memory", layers_live_in_the_callers_memory},
        {"memory that ends is told", memory_that_ends_is_told},
        {"memory may end anywhere", memory_may_end_anywhere},
        CU_TEST_INFO_NULL,
    };
    return unit_run("moe memory", tests);
}
