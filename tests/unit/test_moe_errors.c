/* SPDX-License-Identifier: Apache-2.0
 *
 * What is refused, in which words, and that nobody waits: an error of one rank in
 * a collective call reaches all of them, and the group lives on where it can.
 */
#include "layers_differ.h"
#include "moe_ranks.h"
#include "unit.h"

#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { R = 3, E = 6, H = 4, F = 4, K = 2, T = 5 };

static const moe_how overlapped = {.dispatcher = EPO_DISPATCH_FLEX, .overlap = 1, .chunks = 2};

#define REFUSED(c, call, status, text)                                                             \
    do {                                                                                           \
        EXPECT(c, (call) == (status));                                                             \
        EXPECT(c, strstr((c)->engine->error(), text) != NULL);                                     \
    } while (0)

static epo_buffer_config buffer_config(void) {
    epo_buffer_config config = config_buffer(E, H, K, T);
    config.align_rows = 1;
    return config;
}

static epo_buffer *make_buffer(moe_rank *c, epo_group *group, const epo_buffer_config *config) {
    epo_buffer *buffer = NULL;
    EXPECT(c, c->engine->buffer_create(group, config, &buffer) == EPO_OK);
    return buffer;
}

static float weights[E * 2 * F * H];

static epo_layer_config layer_config(void) { return config_layer(E, H, F, weights, weights); }

/* T tokens, each to experts 0 and 1. */
typedef struct routing {
    int64_t experts[T * K];
    epo_routing r;
} routing;

static void fill_routing(routing *r) {
    r->r = config_routing(T, K, r->experts, NULL);
    for (int i = 0; i < T * K; i++)
        r->experts[i] = i % K;
}

static void over(moe_rank *c, epo_group *group, epo_buffer *buffer) {
    EXPECT(c, c->engine->buffer_destroy(buffer) == EPO_OK);
    EXPECT(c, c->engine->group_destroy(group) == EPO_OK);
}

/* ---- one rank's arguments ---------------------------------------------------- */

static void arguments_rank(moe_rank *c) {
    const epo_engine *e = c->engine;
    epo_group *group = moe_rank_group(c, &overlapped);
    epo_buffer_config b = buffer_config();
    epo_buffer *buffer = NULL;
    uint64_t bytes = 0;
    b.experts = 7;
    REFUSED(c, e->buffer_bytes(group, &b, &bytes), EPO_E_ARG,
            "found 7, which 3 ranks cannot share");
    REFUSED(c, e->buffer_create(group, &b, &buffer), EPO_E_ARG,
            "found 7, which 3 ranks cannot share");
    b.experts = 3 << 29; /* a rank's counts of so many have more than 2^32 bytes */
    REFUSED(c, e->buffer_bytes(group, &b, &bytes), EPO_E_ARG, "experts: found 1610612736, allowed");
    b = buffer_config();
    b.top_k = 33;
    REFUSED(c, e->buffer_bytes(group, &b, &bytes), EPO_E_ARG, "top_k: found 33, allowed 1..32");
    b = buffer_config();
    b.max_tokens = INT32_MAX;
    REFUSED(c, e->buffer_bytes(group, &b, &bytes), EPO_E_ARG, "lower max_tokens");
    b.capacity = 1; /* few rows, but their slots are numbered all the same */
    REFUSED(c, e->buffer_bytes(group, &b, &bytes), EPO_E_ARG, "lower max_tokens");
    b.pad_to_capacity = 1;
    REFUSED(c, e->buffer_bytes(group, &b, &bytes), EPO_E_ARG, "lower max_tokens");
    b.dispatcher = EPO_DISPATCH_ALLTOALL; /* of which a rank numbers its own slots alone */
    REFUSED(c, e->buffer_bytes(group, &b, &bytes), EPO_E_ARG, "lower max_tokens");
    b.max_tokens = INT32_MAX / K;
    EXPECT(c, e->buffer_bytes(group, &b, &bytes) == EPO_OK);
    b.dispatcher = EPO_DISPATCH_FLEX;
    REFUSED(c, e->buffer_bytes(group, &b, &bytes), EPO_E_ARG, "lower max_tokens");
    bytes = 0;
    b = buffer_config();
    b.type = (epo_dtype)9;
    REFUSED(c, e->buffer_bytes(group, &b, &bytes), EPO_E_ARG, "type: found 9");
    REFUSED(c, e->buffer_bytes(group, NULL, &bytes), EPO_E_ARG, "epo_buffer_config is NULL");
    REFUSED(c, e->buffer_bytes(NULL, &b, &bytes), EPO_E_ARG, "NULL");
    EXPECT(c, bytes == 0 && buffer == NULL);

    epo_layer_config l = layer_config();
    epo_layer *layer = NULL;
    l.experts = 8;
    REFUSED(c, e->layer_create(group, &l, &layer), EPO_E_ARG,
            "found 8, which 3 ranks cannot share");
    l = layer_config();
    l.w2 = NULL;
    REFUSED(c, e->layer_create(group, &l, &layer), EPO_E_ARG, "w1 is given, w2 is NULL");
    l = layer_config();
    l.dw1 = weights;
    REFUSED(c, e->layer_create(group, &l, &layer), EPO_E_ARG, "dw1 is given, dw2 is NULL");
    l.dw2 = weights;
    l.wgrad_type = EPO_BF16;
    REFUSED(c, e->layer_create(group, &l, &layer), EPO_E_ARG, "wgrad_type: found 1");
    l.wgrad_type = EPO_F32;
    l.hidden = 0;
    REFUSED(c, e->layer_create(group, &l, &layer), EPO_E_ARG, "hidden: found 0");
    l = layer_config();
    l.ffn = 0;
    REFUSED(c, e->layer_create(group, &l, &layer), EPO_E_ARG, "ffn: found 0, allowed 1..");
    EXPECT(c, layer == NULL);

    REFUSED(c, e->group_allreduce(group, NULL, 1, NULL), EPO_E_ARG, "NULL");
    REFUSED(c, e->plan_create(NULL, NULL, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(c, e->forward(NULL, NULL, NULL, NULL, NULL, NULL), EPO_E_ARG, "NULL");
    REFUSED(c, e->backward(NULL, NULL, NULL, NULL, NULL, NULL), EPO_E_ARG, "saved is NULL");
    REFUSED(c, e->dispatch(NULL, NULL, NULL, NULL, NULL), EPO_E_ARG, "plan is NULL");
    REFUSED(c, e->combine(NULL, NULL, NULL, NULL, NULL, NULL), EPO_E_ARG, "plan is NULL");
    EXPECT(c, e->buffer_destroy(NULL) == EPO_OK && e->layer_destroy(NULL) == EPO_OK);
    EXPECT(c, e->group_destroy(NULL) == EPO_OK);
    e->plan_release(NULL);
    e->plan_retain(NULL);
    e->saved_release(NULL);
    EXPECT(c, e->group_destroy(group) == EPO_OK);
}

static void arguments(void) { CU_ASSERT_EQUAL(moe_ranks(R, 20.0, arguments_rank, NULL), 0); }

static void versions_rank(moe_rank *c) {
    const epo_engine *e = c->engine;
    epo_group *group = moe_rank_group(c, &overlapped);
    uint64_t bytes = 0, again = 0;
    struct {
        epo_buffer_config config;
        uint64_t unknown;
    } newer = {buffer_config(), 0};
    newer.config.align_rows = 0;
    EXPECT(c, e->buffer_bytes(group, &newer.config, &bytes) == EPO_OK);
    newer.config.size = sizeof newer;
    EXPECT(c, e->buffer_bytes(group, &newer.config, &again) == EPO_OK);
    EXPECT(c, bytes == again);
    newer.unknown = 1;
    REFUSED(c, e->buffer_bytes(group, &newer.config, &again), EPO_E_VERSION, "newer header");
    /* An older header knew nothing behind `type`. */
    newer.config.size = offsetof(epo_buffer_config, dispatcher);
    newer.config.align_rows = 77;
    EXPECT(c, e->buffer_bytes(group, &newer.config, &again) == EPO_OK);
    EXPECT(c, bytes == again);
    newer.config.size = 0;
    REFUSED(c, e->buffer_bytes(group, &newer.config, &again), EPO_E_VERSION, "found 0");
    epo_stats stats;
    memset(&stats, 0x55, sizeof stats);
    stats.size = offsetof(epo_stats, combine_bytes);
    EXPECT(c, e->group_stats(group, &stats, 0) == EPO_OK);
    EXPECT(c, stats.dispatch_bytes == 0 && stats.combine_bytes == UINT64_C(0x5555555555555555));
    EXPECT(c, stats.size == offsetof(epo_stats, combine_bytes));
    stats.size = 0;
    REFUSED(c, e->group_stats(group, &stats, 0), EPO_E_VERSION, "sizeof(epo_stats)");
    EXPECT(c, e->group_destroy(group) == EPO_OK);
}

static void versions(void) {
    CU_ASSERT_EQUAL(moe_ranks(1, 20.0, versions_rank, NULL), 0);
    CU_ASSERT_PTR_NULL(epo_engine_entry(EPO_ENGINE_ABI + 1));
}

static void group_config_rank(moe_rank *c) {
    epo_group *group = NULL;
    epo_group_config config = EPO_GROUP_CONFIG_INIT;
    config.rank = c->rank;
    config.ranks = c->ranks;
    config.threads = c->world;
    config.overlap = EPO_OFF;
    config.dispatcher = EPO_DISPATCH_ALLTOALL;
    config.delay_wgrad = EPO_ON;
    epo_engine_group g = {sizeof g, config, NULL};
    REFUSED(c, c->engine->group_create(&g, &group), EPO_E_ARG,
            "delayed weight gradients need overlap");
    g.config.delay_wgrad = EPO_OFF;
    g.config.timeout_s = NAN;
    REFUSED(c, c->engine->group_create(&g, &group), EPO_E_ARG, "timeout_s");
    g.config.timeout_s = 20;
    g.config.dispatcher = (epo_dispatcher)5;
    REFUSED(c, c->engine->group_create(&g, &group), EPO_E_ARG, "dispatcher: found 5, allowed 0..1");
    g.config.dispatcher = EPO_DISPATCH_ALLTOALL;
    g.size--;
    REFUSED(c, c->engine->group_create(&g, &group), EPO_E_VERSION, "matching parts");
    g.size++;
    g.config.chunks = c->rank == 1 ? 2 : 3;
    EXPECT(c, c->engine->group_create(&g, &group) == EPO_E_PEER);
    EXPECT(c, group == NULL);
}

static void group_config(void) { CU_ASSERT_EQUAL(moe_ranks(2, 20.0, group_config_rank, NULL), 0); }

/* What the API library has refused on one rank is told by the engine. */
static void group_refused_rank(moe_rank *c) {
    epo_group *group = NULL;
    epo_engine_group g = {sizeof g, EPO_GROUP_CONFIG_INIT, "chunks: as told"};
    g.config.rank = c->rank;
    g.config.ranks = c->ranks;
    g.config.threads = c->world;
    g.config.overlap = EPO_OFF;
    g.config.delay_wgrad = EPO_OFF;
    g.config.dispatcher = EPO_DISPATCH_ALLTOALL;
    g.config.timeout_s = 100;
    if (c->rank == 1)
        g.config.chunks = -7;
    REFUSED(c,
            c->rank == 1 ? c->engine->group_refuse(&g, EPO_E_ARG)
                         : c->engine->group_create(&g, &group),
            EPO_E_ARG, "chunks: as told");
    EXPECT(c, group == NULL);
}

static void group_refused(void) {
    CU_ASSERT_EQUAL(moe_ranks(3, 20.0, group_refused_rank, NULL), 0);
}

/* ---- one rank's error is all ranks' error ------------------------------------- */

/* What one rank does wrong in epo_plan_create, and what all of them are told. */
typedef struct plan_case {
    int rank;
    void (*spoil)(routing *r);
    epo_status status;
    const char *text;
    uint64_t max_rows;
} plan_case;

static void spoil_index(routing *r) { r->experts[3 * K + 1] = 6; }
static void spoil_negative(routing *r) { r->experts[0] = -2; }
static void spoil_tokens(routing *r) { r->r.tokens = T + 1; }
static void spoil_null(routing *r) { r->r.experts = NULL; }
static void spoil_top_k(routing *r) { r->r.top_k = K + 1; }
static void spoil_less_k(routing *r) { r->r.top_k = K - 1; }
static void spoil_size(routing *r) { r->r.size = 1; }
static void spoil_nothing(routing *r) { (void)r; }

static void plan_error_rank(moe_rank *c) {
    const plan_case *p = c->arg;
    const epo_engine *e = c->engine;
    for (int d = EPO_DISPATCH_ALLTOALL; d <= EPO_DISPATCH_FLEX; d++) {
        moe_how how = overlapped;
        how.dispatcher = (epo_dispatcher)d;
        epo_group *group = moe_rank_group(c, &how);
        epo_buffer_config config = buffer_config();
        config.max_rows = p->max_rows;
        epo_buffer *buffer = make_buffer(c, group, &config);
        epo_plan *plan = NULL;
        routing r;
        for (int i = 0; i < 3; i++) {
            fill_routing(&r);
            if (c->rank == p->rank)
                p->spoil(&r);
            REFUSED(c, e->plan_create(buffer, &r.r, NULL, &plan), p->status, p->text);
            EXPECT(c, plan == NULL);
        }
        /* The group lives on. */
        fill_routing(&r);
        r.r.tokens = 1;
        float x[T * H] = {1}, y[T * H];
        EXPECT(c, e->plan_create(buffer, &r.r, NULL, &plan) == EPO_OK);
        epo_layer_config l = layer_config();
        epo_layer *layer = NULL;
        EXPECT(c, e->layer_create(group, &l, &layer) == EPO_OK);
        EXPECT(c, e->forward(layer, plan, x, y, NULL, NULL) == EPO_OK);
        e->plan_release(plan);
        EXPECT(c, e->layer_destroy(layer) == EPO_OK);
        over(c, group, buffer);
    }
}

static void plan_errors_reach_all(void) {
    const plan_case cases[] = {
        {2, spoil_index, EPO_E_INDEX, "rank 2: experts[3][1] = 6, allowed -1..5", 0},
        {0, spoil_negative, EPO_E_INDEX, "rank 0: experts[0][0] = -2, allowed -1..5", 0},
        {1, spoil_tokens, EPO_E_ARG, "rank 1: tokens: found 6, allowed 0..5", 0},
        {1, spoil_null, EPO_E_ARG, "rank 1: experts is NULL and tokens is 5", 0},
        {0, spoil_top_k, EPO_E_ARG, "rank 0: top_k: found 3, allowed 1..2", 0},
        {1, spoil_less_k, EPO_E_PEER, "top_k is 2 on rank 0 and 1 on rank 1", 0},
        {2, spoil_size, EPO_E_VERSION, "rank 2: epo_routing.size: found 1", 0},
        {0, spoil_nothing, EPO_E_OVERFLOW, "rank 0 needs 30 rows, the buffer has 7", 7},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        plan_case p = cases[i];
        CU_ASSERT_EQUAL(moe_ranks(R, 20.0, plan_error_rank, &p), 0);
    }
}

static void buffer_error_rank(moe_rank *c) {
    epo_group *group = moe_rank_group(c, &overlapped);
    epo_buffer_config config = buffer_config();
    epo_buffer *buffer = NULL;
    if (c->rank == 1)
        config.hidden = 0;
    REFUSED(c, c->engine->buffer_create(group, &config, &buffer), EPO_E_ARG,
            c->rank == 1 ? "hidden: found 0" : "rank 1 refused its arguments");
    config = buffer_config();
    if (c->rank == 2)
        config.hidden = 2 * H;
    REFUSED(c, c->engine->buffer_create(group, &config, &buffer), EPO_E_PEER,
            "hidden is 4 on rank 0 and 8 on rank 2");
    EXPECT(c, buffer == NULL);
    config = buffer_config();
    over(c, group, make_buffer(c, group, &config));
}

/* Whatever a rank has other than the others is named. */
static void buffer_differs_rank(moe_rank *c) {
    const char *const text[] = {"experts is 6 on rank 0 and 12 on rank 2",
                                "top_k is 2 on rank 0 and 1 on rank 2",
                                "max_tokens is 5 on rank 0 and 6 on rank 2",
                                "chunks is 2 on rank 0 and 1 on rank 2",
                                "align_rows is 1 on rank 0 and 4 on rank 2",
                                "type is 0 on rank 0 and 1 on rank 2",
                                "dispatcher is 1 on rank 0 and 0 on rank 2",
                                "pad_to_capacity is 0 on rank 0 and 1 on rank 2",
                                "wire is 0 on rank 0 and 1 on rank 2"};
    epo_group *group = moe_rank_group(c, &overlapped);
    epo_buffer *buffer = NULL;
    for (int i = 0; i < 9; i++) {
        const bool other = c->rank == 2;
        epo_buffer_config config = config_buffer(i == 0 && other ? 2 * E : E, 128,
                                                 i == 1 && other ? 1 : K, i == 2 && other ? 6 : T);
        config.chunks = i == 3 && other ? 1 : 2;
        config.align_rows = i == 4 && other ? 4 : 1;
        config.type = i == 5 && other ? EPO_BF16 : EPO_F32;
        config.dispatcher = i == 6 && other ? EPO_DISPATCH_ALLTOALL : EPO_DISPATCH_FLEX;
        config.capacity = i == 7 ? 4 : -1;
        config.pad_to_capacity = i == 7 && other;
        config.wire = i == 8 && other ? EPO_WIRE_E4M3 : EPO_WIRE_ROWS;
        REFUSED(c, c->engine->buffer_create(group, &config, &buffer), EPO_E_PEER, text[i]);
        EXPECT(c, buffer == NULL);
    }
    EXPECT(c, c->engine->group_destroy(group) == EPO_OK);
}

static void buffers_that_differ(void) {
    CU_ASSERT_EQUAL(moe_ranks(R, 20.0, buffer_differs_rank, NULL), 0);
}

static void buffer_errors_reach_all(void) {
    CU_ASSERT_EQUAL(moe_ranks(R, 20.0, buffer_error_rank, NULL), 0);
}

/* ---- states --------------------------------------------------------------------- */

static void states_rank(moe_rank *c) {
    const epo_engine *e = c->engine;
    epo_group *group = moe_rank_group(c, &overlapped);
    epo_buffer_config config = buffer_config(), wide = buffer_config();
    wide.hidden = 2 * H;
    epo_buffer *buffer = make_buffer(c, group, &config), *other = make_buffer(c, group, &wide);
    epo_layer_config l = layer_config();
    epo_layer *layer = NULL, *second = NULL;
    EXPECT(c, e->layer_create(group, &l, &layer) == EPO_OK);
    EXPECT(c, e->layer_create(group, &l, &second) == EPO_OK);
    routing r;
    fill_routing(&r);
    epo_plan *plan = NULL, *unfit = NULL;
    epo_saved *saved = NULL;
    float x[T * H] = {1}, y[T * H], dx[T * H];
    EXPECT(c, e->plan_create(buffer, &r.r, NULL, &plan) == EPO_OK);
    EXPECT(c, e->plan_create(other, &r.r, NULL, &unfit) == EPO_OK);
    REFUSED(c, e->forward(layer, unfit, x, y, &saved, NULL), EPO_E_ARG,
            "the layer has 6 experts, hidden 4, type 0; the plan's buffer has 6, 8, 0");
    REFUSED(c, e->forward(layer, plan, NULL, y, &saved, NULL), EPO_E_ARG, "x is NULL");
    REFUSED(c, e->dispatch(plan, NULL, y, NULL, NULL), EPO_E_ARG, "x is NULL");
    EXPECT(c, saved == NULL);
    EXPECT(c, e->forward(layer, plan, x, y, &saved, NULL) == EPO_OK);
    REFUSED(c, e->group_destroy(group), EPO_E_STATE, "2 buffers, 2 layers and 1 saved");
    REFUSED(c, e->layer_destroy(layer), EPO_E_STATE, "1 saved passes");
    REFUSED(c, e->buffer_destroy(buffer), EPO_E_STATE, "1 plans");
    EXPECT(c, e->backward(layer, saved, x, dx, NULL, NULL) == EPO_OK);
    REFUSED(c, e->backward(layer, saved, x, dx, NULL, NULL), EPO_E_STATE, "saved was used before");
    e->saved_release(saved);
    EXPECT(c, e->forward(layer, plan, x, y, &saved, NULL) == EPO_OK);
    REFUSED(c, e->backward(second, saved, x, dx, NULL, NULL), EPO_E_ARG, "another layer's forward");
    REFUSED(c, e->backward(layer, saved, x, dx, NULL, NULL), EPO_E_STATE, "saved was used before");
    e->plan_release(plan);
    e->plan_release(unfit);
    EXPECT(c, e->layer_destroy(layer) == EPO_OK && e->layer_destroy(second) == EPO_OK);
    EXPECT(c, e->buffer_destroy(other) == EPO_OK);
    over(c, group, buffer);
}

static void states(void) { CU_ASSERT_EQUAL(moe_ranks(R, 20.0, states_rank, NULL), 0); }

/* ---- one rank refuses what the others have begun ---------------------------------------- */

typedef enum refusal {
    FORWARD_X,
    FORWARD_PLAN,
    FORWARD_UNFIT,
    BACKWARD_DY,
    BACKWARD_SAVED,
    BACKWARD_LAYER,
    DISPATCH_X,
    COMBINE_Y,
    ALLREDUCE_DATA,
    DESTROY_PLANS,
    REFUSALS
} refusal;

/* What the refusing rank (`wrong`) and the others call. */
static epo_status refusal_call(moe_rank *c, refusal kind, bool wrong, epo_group *group,
                               epo_layer *layer, epo_plan *plan, epo_plan *unfit,
                               epo_saved *saved) {
    static const float x[T * H] = {1};
    float y[T * H], rows[R * T * K * H] = {0};
    const epo_engine *e = c->engine;
    switch (kind) {
    case FORWARD_X: return e->forward(layer, plan, wrong ? NULL : x, y, NULL, NULL);
    case FORWARD_PLAN: return e->forward(layer, wrong ? NULL : plan, x, y, NULL, NULL);
    case FORWARD_UNFIT: return e->forward(layer, wrong ? unfit : plan, x, y, NULL, NULL);
    case BACKWARD_DY: return e->backward(layer, saved, wrong ? NULL : x, y, NULL, NULL);
    case BACKWARD_SAVED: return e->backward(layer, wrong ? NULL : saved, x, y, NULL, NULL);
    case BACKWARD_LAYER: return e->backward(wrong ? NULL : layer, saved, x, y, NULL, NULL);
    case DISPATCH_X: return e->dispatch(plan, wrong ? NULL : x, rows, NULL, NULL);
    case COMBINE_Y: return e->combine(plan, rows, wrong ? NULL : y, NULL, NULL, NULL);
    case ALLREDUCE_DATA: return e->group_allreduce(group, wrong ? NULL : y, 3, NULL);
    default: return wrong ? e->buffer_destroy(*(epo_buffer **)c->arg) : e->group_barrier(group);
    }
}

static void refusal_rank(moe_rank *c) {
    const epo_engine *e = c->engine;
    refusal kind = *(const refusal *)c->arg;
    epo_group *group = moe_rank_group(c, &overlapped);
    epo_buffer_config config = buffer_config(), wide = buffer_config();
    wide.hidden = 2 * H;
    epo_buffer *buffer = make_buffer(c, group, &config), *other = make_buffer(c, group, &wide);
    epo_layer_config l = layer_config();
    epo_layer *layer = NULL;
    EXPECT(c, e->layer_create(group, &l, &layer) == EPO_OK);
    routing r;
    fill_routing(&r);
    epo_plan *plan = NULL, *unfit = NULL;
    epo_saved *saved = NULL;
    const float x[T * H] = {1};
    float y[T * H];
    EXPECT(c, e->plan_create(buffer, &r.r, NULL, &plan) == EPO_OK);
    EXPECT(c, e->plan_create(other, &r.r, NULL, &unfit) == EPO_OK);
    EXPECT(c, e->forward(layer, plan, x, y, &saved, NULL) == EPO_OK);
    EXPECT(c, e->group_barrier(group) == EPO_OK); /* nobody is in forward any more */
    bool wrong = c->rank == 1;
    c->arg = &buffer;
    epo_status status = refusal_call(c, kind, wrong, group, layer, plan, unfit, saved);
    /* Not EPO_E_TIMEOUT: nobody has waited for the limit. */
    EXPECT(c, status == (!wrong ? EPO_E_PEER : kind == DESTROY_PLANS ? EPO_E_STATE : EPO_E_ARG));
    /* A slow rank may hear no more of the refusal, but of the destroy that comes next. */
    EXPECT(c,
           wrong || strstr(e->error(), "rank 1 refused") != NULL ||
               (kind == DESTROY_PLANS && strstr(e->error(), "rank 1 in buffer_destroy") != NULL));
    if (kind != BACKWARD_DY && kind != BACKWARD_LAYER && (kind != BACKWARD_SAVED || wrong))
        e->saved_release(saved);
    e->plan_release(plan);
    e->plan_release(unfit);
    EXPECT(c, e->layer_destroy(layer) == EPO_OK);
    e->buffer_destroy(buffer);
    e->buffer_destroy(other);
    EXPECT(c, e->group_destroy(group) == EPO_OK);
}

static void refusals_reach_all(void) {
    for (int kind = 0; kind < REFUSALS; kind++) {
        refusal one = (refusal)kind;
        CU_ASSERT_EQUAL(moe_ranks(R, 5.0, refusal_rank, &one), 0);
    }
}

/* ---- ranks in different calls -------------------------------------------------------------- */

typedef enum order { FORWARD, FORWARD_OTHER, BACKWARD, DISPATCH, COMBINE, PLAN, SUM, ORDERS } order;

typedef struct order_case {
    order first, other; /* of rank 1, of the others */
} order_case;

static epo_status order_call(moe_rank *c, order what, epo_group *group, epo_buffer *buffer,
                             epo_layer *layer, epo_plan *const plan[2], epo_saved **saved) {
    static const float x[T * H] = {1};
    float y[T * H], rows[R * T * K * H] = {0};
    const epo_engine *e = c->engine;
    epo_saved *used = *saved;
    epo_plan *made = NULL;
    routing r;
    epo_status status;
    switch (what) {
    case FORWARD: return e->forward(layer, plan[0], x, y, NULL, NULL);
    case FORWARD_OTHER: return e->forward(layer, plan[1], x, y, NULL, NULL);
    case BACKWARD: *saved = NULL; return e->backward(layer, used, x, y, NULL, NULL);
    case DISPATCH: return e->dispatch(plan[0], x, rows, NULL, NULL);
    case COMBINE: return e->combine(plan[0], rows, y, NULL, NULL, NULL);
    case PLAN:
        fill_routing(&r);
        status = e->plan_create(buffer, &r.r, NULL, &made);
        e->plan_release(made);
        return status;
    default: return e->group_allreduce(group, y, 3, NULL);
    }
}

static void order_rank(moe_rank *c) {
    const epo_engine *e = c->engine;
    const order_case *o = c->arg;
    epo_group *group = moe_rank_group(c, &overlapped);
    epo_buffer_config config = buffer_config();
    epo_buffer *buffer = make_buffer(c, group, &config);
    epo_layer_config l = layer_config();
    epo_layer *layer = NULL;
    EXPECT(c, e->layer_create(group, &l, &layer) == EPO_OK);
    routing r;
    fill_routing(&r);
    epo_plan *plan[2] = {NULL, NULL};
    epo_saved *saved = NULL;
    const float x[T * H] = {1};
    float y[T * H];
    EXPECT(c, e->plan_create(buffer, &r.r, NULL, &plan[0]) == EPO_OK);
    EXPECT(c, e->plan_create(buffer, &r.r, NULL, &plan[1]) == EPO_OK);
    EXPECT(c, e->forward(layer, plan[0], x, y, &saved, NULL) == EPO_OK);
    EXPECT(c, e->group_barrier(group) == EPO_OK);
    epo_status status =
        order_call(c, c->rank == 1 ? o->first : o->other, group, buffer, layer, plan, &saved);
    EXPECT(c, status == (o->first == o->other ? EPO_OK : EPO_E_PEER));
    EXPECT(c, status == EPO_OK || strstr(e->error(), "the ranks disagree") != NULL);
    e->saved_release(saved);
    e->plan_release(plan[0]);
    e->plan_release(plan[1]);
    EXPECT(c, e->layer_destroy(layer) == EPO_OK);
    e->buffer_destroy(buffer);
    EXPECT(c, e->group_destroy(group) == EPO_OK);
}

/* Also where the rows would go through: forward beside backward gives numbers. */
static void other_calls_are_told(void) {
    for (int first = 0; first < ORDERS; first++)
        for (int other = 0; other < ORDERS; other++) {
            order_case o = {(order)first, (order)other};
            CU_ASSERT_EQUAL(moe_ranks(R, 5.0, order_rank, &o), 0);
        }
}

/* ---- passes that differ -------------------------------------------------------------------- */

typedef struct differ_case {
    differ_kind kind;
    moe_how how;
} differ_case;

static void differ_here(moe_rank *c) {
    const differ_case *d = c->arg;
    epo_group *group = moe_rank_group(c, &d->how);
    EXPECT(c, differ_rank(c->engine, group, c->rank, d->kind, false) == 0);
}

/* Some of them would give wrong rows, some would wait for rows that nobody sends. */
static void other_layers_are_told(void) {
    for (int kind = 0; kind < DIFFER_KINDS; kind++)
        for (int d = EPO_DISPATCH_ALLTOALL; d <= EPO_DISPATCH_FLEX; d++)
            for (int overlap = 0; overlap < 2; overlap++) {
                differ_case one = {(differ_kind)kind, overlapped};
                one.how.dispatcher = (epo_dispatcher)d;
                one.how.overlap = overlap;
                one.how.chunks = overlap + 1;
                if (kind == DIFFER_TOKENS && d == EPO_DISPATCH_ALLTOALL)
                    continue; /* rank 1's own mistake */
                CU_ASSERT_EQUAL(moe_ranks(2, 60.0, differ_here, &one), 0);
            }
}

/* ---- a rank that does not come ----------------------------------------------------- */

/* Rank 1 leaves after the plan; the others are told, at once or within the limit,
 * and every later call says the same. */
static void absent_rank(moe_rank *c) {
    const epo_engine *e = c->engine;
    const moe_how *how = c->arg;
    epo_group *group = moe_rank_group(c, how);
    epo_buffer_config config = buffer_config();
    epo_buffer *buffer = make_buffer(c, group, &config);
    epo_layer_config l = layer_config();
    epo_layer *layer = NULL;
    EXPECT(c, e->layer_create(group, &l, &layer) == EPO_OK);
    routing r;
    fill_routing(&r);
    epo_plan *plan = NULL;
    float x[T * H] = {1}, y[T * H];
    EXPECT(c, e->plan_create(buffer, &r.r, NULL, &plan) == EPO_OK);
    if (c->rank != 1) {
        epo_status status = e->forward(layer, plan, x, y, NULL, NULL);
        EXPECT(c, status == EPO_E_TIMEOUT || status == EPO_E_PEER);
        EXPECT(c, strstr(e->error(), "rank 1") != NULL);
        EXPECT(c, e->forward(layer, plan, x, y, NULL, NULL) == status);
        EXPECT(c, e->group_async_error(group) == status);
        EXPECT(c, e->group_barrier(group) == status);
        epo_plan *none = NULL;
        EXPECT(c, e->plan_create(buffer, &r.r, NULL, &none) == status && none == NULL);
    } else {
        /* Learns of it, too. */
        while (e->group_async_error(group) == EPO_OK)
            sched_yield();
        EXPECT(c, e->group_barrier(group) != EPO_OK);
    }
    e->plan_release(plan);
    EXPECT(c, e->layer_destroy(layer) == EPO_OK);
    e->buffer_destroy(buffer);
    EXPECT(c, e->group_destroy(group) == EPO_OK);
}

static void absent_rank_is_named(void) {
    for (int d = EPO_DISPATCH_ALLTOALL; d <= EPO_DISPATCH_FLEX; d++)
        for (int overlap = 0; overlap < 2; overlap++) {
            moe_how how = overlapped;
            how.dispatcher = (epo_dispatcher)d;
            how.overlap = overlap;
            how.delay = overlap;
            CU_ASSERT_EQUAL(moe_ranks(R, 0.5, absent_rank, &how), 0);
        }
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"arguments out of range", arguments},
        {"structs of other headers", versions},
        {"a group's configuration", group_config},
        {"what the API library refuses is told", group_refused},
        {"one rank's wrong routing is refused on all", plan_errors_reach_all},
        {"one rank's wrong buffer is refused on all", buffer_errors_reach_all},
        {"a buffer of another rank's is another", buffers_that_differ},
        {"calls that do not fit the state", states},
        {"what one rank refuses ends the others at once", refusals_reach_all},
        {"ranks in different calls are told", other_calls_are_told},
        {"ranks whose layers differ are told", other_layers_are_told},
        {"a rank that does not come is named", absent_rank_is_named},
        CU_TEST_INFO_NULL,
    };
    return unit_run("moe errors", tests);
}
