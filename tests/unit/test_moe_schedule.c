/* SPDX-License-Identifier: Apache-2.0
 *
 * Two micro-batches, node by node: the bits of one after the other, the order that the
 * header promises, and an error in a node that ends all.
 *
 * The model: L layers, the one in the middle dense.  "Attention" scales and shifts, a
 * dense MLP doubles.
 */
#include "moe_ranks.h"
#include "unit.h"

#include <stdlib.h>
#include <string.h>

enum { R = 3, E = 6, H = 9, F = 5, K = 2, T = 13, L = 3, M = 4, DENSE = 1, NODES = 64 };
#define N ((size_t)T * H)

typedef struct setting {
    moe_case c; /* batch m of rank r: routing and x */
    moe_how how;
    int fail_rank, fail_layer; /* -1: none */
    epo_node fail_node;
    bool pries;   /* the caller's functions call what only fits outside */
    int *bits[R]; /* of each rank: what it made */
} setting;

typedef struct model {
    moe_rank *rank;
    const setting *s;
    const epo_engine *e;
    epo_group *group;
    epo_buffer *buffer;
    epo_layer *layer[L];
    float *w1, *w2;
    bool scheduled;
    int f, b; /* micro-batches under way; -1: none */
    epo_step step[M][L];
    epo_plan *plan[M][L];
    float x[M][L][N], y[M][L][N], dy[M][L][N], dx[M][L][N], dweights[M][L][T * K];
    float *dw1[L], *dw2[L];
    int order[NODES], nodes; /* (node * L + layer) * 2 + forward */
} model;

static size_t stack(void) { return (size_t)E / R * F * H; }

static size_t elements(const model *m, int batch) {
    return (size_t)m->s->c.batch[batch][m->rank->rank].tokens * H;
}

/* ---- what no function of the caller's may call ------------------------------- */

static void pry(model *m) {
    const epo_engine *e = m->e;
    epo_schedule again = EPO_SCHEDULE_INIT;
    float row[H] = {0};
    if (!m->s->pries || m->group == NULL)
        return;
    EXPECT(m->rank, e->group_barrier(m->group) == EPO_E_STATE);
    EXPECT(m->rank, strstr(e->error(), "inside the caller's `") != NULL);
    EXPECT(m->rank, e->group_allreduce(m->group, row, H, NULL) == EPO_E_STATE);
    EXPECT(m->rank, e->schedule_run(m->group, &again, NULL) == EPO_E_STATE);
    EXPECT(m->rank, e->group_destroy(m->group) == EPO_E_STATE);
    if (m->layer[0] != NULL) {
        EXPECT(m->rank, e->layer_destroy(m->layer[0]) == EPO_E_STATE);
        EXPECT(m->rank,
               e->forward(m->layer[0], m->plan[0][0], row, row, NULL, NULL) == EPO_E_STATE);
    }
    if (m->buffer != NULL)
        EXPECT(m->rank, e->buffer_destroy(m->buffer) == EPO_E_STATE);
    EXPECT(m->rank, e->group_async_error(m->group) == EPO_OK);
}

static void pry_ready(void *ctx, epo_layer *layer, uint64_t microbatch) {
    model *m = ctx;
    (void)layer;
    (void)microbatch;
    pry(m);
    EXPECT(m->rank, m->e->group_wgrad_flush(m->group, NULL) == EPO_OK); /* waits for nobody */
}

static void *pry_alloc(void *ctx, uint64_t bytes) {
    model *m = *(model **)ctx;
    pry(m);
    return aligned_alloc(256, (bytes + 255) / 256 * 256);
}

static void pry_free(void *ctx, void *ptr, uint64_t bytes) {
    (void)bytes;
    pry(*(model **)ctx);
    free(ptr);
}

/* ---- the caller's nodes ------------------------------------------------------ */

static epo_status attention(model *m, int layer, epo_step *step) {
    int mb = m->f;
    const case_batch *in = &m->s->c.batch[mb][m->rank->rank];
    const float *from = layer == 0 ? in->x : m->y[mb][layer - 1];
    for (size_t i = 0; i < elements(m, mb); i++)
        m->x[mb][layer][i] = 0.5F * from[i] + 0.125F * (float)(layer + 1);
    step->x = m->x[mb][layer];
    step->y = m->y[mb][layer];
    if (layer == DENSE)
        return EPO_OK;
    epo_routing routing = EPO_ROUTING_INIT; /* what the router says is known here only */
    routing.tokens = in->tokens;
    routing.top_k = K;
    routing.experts = in->experts;
    routing.weights = in->weights;
    epo_status status = m->e->plan_create(m->buffer, &routing, NULL, &m->plan[mb][layer]);
    step->plan = m->plan[mb][layer];
    return status;
}

static void attention_back(model *m, int layer) {
    int mb = m->b;
    for (size_t i = 0; layer > 0 && i < elements(m, mb); i++)
        m->dy[mb][layer - 1][i] = 0.5F * m->dx[mb][layer][i];
}

static epo_status node(void *ctx, epo_node node, int layer, epo_step *step, epo_stream stream) {
    model *m = ctx;
    const setting *s = m->s;
    (void)stream;
    if (m->scheduled)
        pry(m);
    if (m->rank->rank == s->fail_rank && layer == s->fail_layer && node == s->fail_node)
        return EPO_E_NOMEM;
    if (node == EPO_NODE_ATTENTION)
        return attention(m, layer, step);
    if (node == EPO_NODE_ATTENTION_BACK)
        attention_back(m, layer);
    for (size_t i = 0; node == EPO_NODE_MLP && i < elements(m, m->f); i++)
        m->y[m->f][layer][i] = 2 * m->x[m->f][layer][i];
    for (size_t i = 0; node == EPO_NODE_MLP_BACK && i < elements(m, m->b); i++)
        m->dx[m->b][layer][i] = 2 * m->dy[m->b][layer][i];
    return EPO_OK;
}

static void issued(void *ctx, epo_node n, int layer) {
    model *m = ctx;
    pry(m);
    if (m->nodes < NODES)
        m->order[m->nodes++] = (int)n * L + layer;
}

/* ---- a rank's model ---------------------------------------------------------- */

static void open_layers(model *m) {
    size_t at = stack() * (size_t)m->rank->rank;
    m->w1 = moe_pack(m->s->c.w1 + 2 * at, 2 * stack(), EPO_F32);
    m->w2 = moe_pack(m->s->c.w2 + at, stack(), EPO_F32);
    epo_layer_config config = config_layer(E, H, F, m->w1, m->w2);
    config.wgrad_ready = m->s->pries ? pry_ready : NULL;
    config.ctx = m;
    for (int l = 0; l < L; l++) {
        m->dw1[l] = moe_calloc(2 * stack(), sizeof(float));
        m->dw2[l] = moe_calloc(stack(), sizeof(float));
        config.dw1 = m->dw1[l];
        config.dw2 = m->dw2[l];
        if (l != DENSE)
            EXPECT(m->rank, m->e->layer_create(m->group, &config, &m->layer[l]) == EPO_OK);
    }
}

static model *models[R];

static model *open_model(moe_rank *rank) {
    const setting *s = rank->arg;
    model *m = moe_calloc(1, sizeof *m);
    *m = (model){.rank = rank, .s = s, .e = rank->engine, .f = -1, .b = -1};
    epo_group_config memory = {.alloc = pry_alloc, .free = pry_free, .alloc_ctx = models};
    moe_how how = s->how;
    how.memory = s->pries ? &memory : NULL;
    models[rank->rank] = m;
    m->group = moe_rank_group(rank, &how);
    const epo_buffer_config config = config_buffer(E, H, K, T);
    EXPECT(rank, m->e->buffer_create(m->group, &config, &m->buffer) == EPO_OK);
    open_layers(m);
    EXPECT(rank, m->e->group_barrier(m->group) == EPO_OK); /* before a node may fail */
    for (int b = 0; b < M; b++)
        for (int l = 0; l < L; l++)
            m->step[b][l] = (epo_step){.layer = m->layer[l],
                                       .dy = m->dy[b][l],
                                       .dx = m->dx[b][l],
                                       .dweights = m->dweights[b][l]};
    for (int b = 0; b < M; b++)
        memcpy(m->dy[b][L - 1], s->c.batch[b][rank->rank].dy, elements(m, b) * sizeof(float));
    return m;
}

typedef enum condition { BROKEN, SOUND, EITHER } condition;

/* What it made, in one array. */
static int *close_model(model *m, condition group) {
    size_t made = sizeof m->y + sizeof m->dx + sizeof m->dweights, s = stack() * sizeof(float);
    char *bits = moe_calloc(1, made + 3 * L * s), *at = bits;
    const bool flushed = m->e->group_wgrad_flush(m->group, NULL) == EPO_OK;
    EXPECT(m->rank, group == EITHER || flushed == (group == SOUND));
    memcpy(at, m->y, sizeof m->y);
    memcpy(at += sizeof m->y, m->dx, sizeof m->dx);
    memcpy(at += sizeof m->dx, m->dweights, sizeof m->dweights);
    at += sizeof m->dweights;
    for (int l = 0; l < L; l++, at += 3 * s) {
        memcpy(at, m->dw1[l], 2 * s);
        memcpy(at + 2 * s, m->dw2[l], s);
        EXPECT(m->rank, (m->e->layer_destroy(m->layer[l]) == EPO_OK) || group != SOUND);
        m->layer[l] = NULL;
        free(m->dw1[l]);
        free(m->dw2[l]);
    }
    for (int b = 0; b < M; b++)
        for (int l = 0; l < L; l++)
            m->e->plan_release(m->plan[b][l]);
    const bool destroyed = m->e->buffer_destroy(m->buffer) == EPO_OK;
    EXPECT(m->rank, group == EITHER || destroyed == (group == SOUND));
    m->buffer = NULL;
    EXPECT(m->rank, m->e->group_destroy(m->group) == EPO_OK);
    free(m->w1);
    free(m->w2);
    free(m);
    return (int *)(void *)bits;
}

static size_t bits_size(void) {
    return sizeof(float) * (2 * (size_t)M * L * N + (size_t)M * L * T * K + 3 * L * stack());
}

/* ---- one after the other, and side by side ------------------------------------ */

static void plain_forward(model *m, int mb) {
    m->f = mb;
    for (int l = 0; l < L; l++) {
        epo_step *s = &m->step[mb][l];
        EXPECT(m->rank, node(m, EPO_NODE_ATTENTION, l, s, NULL) == EPO_OK);
        if (l == DENSE)
            node(m, EPO_NODE_MLP, l, s, NULL);
        else
            EXPECT(m->rank,
                   m->e->forward(s->layer, s->plan, s->x, s->y, &s->saved, NULL) == EPO_OK);
    }
}

static void plain_backward(model *m, int mb) {
    m->b = mb;
    for (int l = L - 1; l >= 0; l--) {
        epo_step *s = &m->step[mb][l];
        if (l == DENSE)
            node(m, EPO_NODE_MLP_BACK, l, s, NULL);
        else
            EXPECT(m->rank,
                   m->e->backward(s->layer, s->saved, s->dy, s->dx, s->dweights, NULL) == EPO_OK);
        attention_back(m, l);
    }
}

static void plain_rank(moe_rank *c) {
    setting *s = c->arg;
    model *m = open_model(c);
    for (int b = 0; b <= M; b++) {
        if (b < M)
            plain_forward(m, b);
        if (b > 0)
            plain_backward(m, b - 1);
    }
    s->bits[c->rank] = close_model(m, SOUND);
}

static epo_status run_pair(model *m, int f, int b) {
    epo_schedule s = EPO_SCHEDULE_INIT;
    m->f = f < M ? f : -1;
    m->b = b;
    s.layers = L;
    s.forward = f < M ? m->step[f] : NULL;
    s.backward = b >= 0 ? m->step[b] : NULL;
    s.node = node;
    s.ctx = m;
    s.issued = issued;
    m->nodes = 0;
    m->scheduled = true;
    return m->e->schedule_run(m->group, &s, NULL);
}

/* The table of the header. */
static void check_order(model *m, bool f, bool b) {
    static const struct {
        epo_node node;
        bool back, moe;
    } table[] = {
        {EPO_NODE_COMBINE_BACK, true, true},    {EPO_NODE_ATTENTION, false, false},
        {EPO_NODE_MLP_BACK, true, false},       {EPO_NODE_DISPATCH, false, true},
        {EPO_NODE_MLP_WGRAD, true, false},      {EPO_NODE_DISPATCH_BACK, true, true},
        {EPO_NODE_MLP, false, false},           {EPO_NODE_COMBINE, false, true},
        {EPO_NODE_ATTENTION_BACK, true, false}, {EPO_NODE_ATTENTION_WGRAD, true, false},
    };
    int n = 0;
    for (int i = 0; i < L; i++)
        for (int j = 0; j < 10; j++) {
            int layer = table[j].back ? L - 1 - i : i;
            if ((table[j].back ? b : f) && !(table[j].moe && layer == DENSE))
                EXPECT(m->rank, m->order[n++] == (int)table[j].node * L + layer);
        }
    EXPECT(m->rank, n == m->nodes);
}

static void scheduled_rank(moe_rank *c) {
    setting *s = c->arg;
    model *m = open_model(c);
    for (int b = 0; b <= M; b++) {
        EXPECT(c, run_pair(m, b, b - 1) == EPO_OK);
        check_order(m, b<M, b> 0);
    }
    epo_stats stats = {.size = sizeof stats};
    EXPECT(c, c->engine->group_stats(m->group, &stats, 0) == EPO_OK);
    EXPECT(c, stats.forward_calls == M * (L - 1) && stats.backward_calls == M * (L - 1));
    s->bits[c->rank] = close_model(m, SOUND);
}

static void fill_setting(setting *s, int i) {
    memset(s, 0, sizeof *s);
    s->c = (moe_case){.seed = (uint64_t)(31 + i),
                      .ranks = R,
                      .experts = E,
                      .hidden = H,
                      .ffn = F,
                      .top_k = K,
                      .batches = M,
                      .max_tokens = T,
                      .type = EPO_F32,
                      .style = CASE_UNIFORM};
    moe_case_fill(&s->c);
    s->how = (moe_how){.dispatcher = (epo_dispatcher)(i % 2),
                       .overlap = i / 2 > 0,
                       .delay = i / 2 > 1,
                       .chunks = i / 2};
    s->fail_rank = -1;
}

static void side_by_side_has_the_same_bits(void) {
    for (int i = 0; i < 6; i++) {
        setting a, b;
        fill_setting(&a, i);
        fill_setting(&b, i);
        b.pries = i % 2 == 0 || i == 5;
        CU_ASSERT_EQUAL(moe_ranks(R, 30.0, plain_rank, &a), 0);
        CU_ASSERT_EQUAL(moe_ranks(R, 30.0, scheduled_rank, &b), 0);
        for (int r = 0; r < R; r++) {
            CU_ASSERT(memcmp(a.bits[r], b.bits[r], bits_size()) == 0);
            free(a.bits[r]);
            free(b.bits[r]);
        }
        moe_case_free(&a.c);
        moe_case_free(&b.c);
    }
}

/* ---- errors -------------------------------------------------------------------- */

/* A run that had the micro-batch's backward has taken over what its forward saved. */
static void expect_taken(const model *m, int mb) {
    for (int l = 0; l < L; l++)
        EXPECT(m->rank, m->step[mb][l].saved == NULL);
}

static void failing_rank(moe_rank *c) {
    setting *s = c->arg;
    model *m = open_model(c);
    epo_status status = run_pair(m, 0, -1);
    if (status == EPO_OK)
        status = run_pair(m, 1, 0);
    /* Behind the last exchange the others may be done before they hear of it. */
    const bool apart = c->rank != s->fail_rank && s->fail_node == EPO_NODE_ATTENTION_WGRAD;
    EXPECT(c, status == (c->rank == s->fail_rank ? EPO_E_NOMEM : EPO_E_PEER) ||
                  (c->rank != s->fail_rank && status == EPO_E_NOMEM) ||
                  (apart && status == EPO_OK));
    EXPECT(c, c->rank != s->fail_rank || strstr(c->engine->error(), "node ") != NULL);
    if (status != EPO_OK) { /* a group that is broken takes them over, too */
        EXPECT(c, run_pair(m, M, 0) != EPO_OK);
        expect_taken(m, 0);
    }
    /* Nothing is left that would keep the objects. */
    for (int b = 0; b < M; b++)
        for (int l = 0; l < L; l++)
            m->e->saved_release(m->step[b][l].saved);
    free(close_model(m, apart ? EITHER : BROKEN));
}

static void a_failing_node_ends_all(void) {
    static const struct {
        epo_node node;
        int layer;
    } at[] = {{EPO_NODE_ATTENTION, 0},      {EPO_NODE_ATTENTION, 2},
              {EPO_NODE_MLP, DENSE},        {EPO_NODE_MLP_BACK, DENSE},
              {EPO_NODE_ATTENTION_BACK, 2}, {EPO_NODE_ATTENTION_WGRAD, 0}};
    for (int i = 0; i < 12; i++) {
        setting s;
        fill_setting(&s, 2 + i % 2);
        s.fail_rank = i % R;
        s.fail_node = at[i / 2].node;
        s.fail_layer = at[i / 2].layer;
        CU_ASSERT_EQUAL(moe_ranks(R, 10.0, failing_rank, &s), 0);
        moe_case_free(&s.c);
    }
}

static void refused_rank(moe_rank *c) {
    model *m = open_model(c);
    epo_schedule s = EPO_SCHEDULE_INIT;
    EXPECT(c, c->engine->schedule_run(m->group, &s, NULL) == EPO_E_ARG);
    s.layers = L;
    s.forward = m->step[0];
    EXPECT(c, c->engine->schedule_run(m->group, &s, NULL) == EPO_E_ARG); /* no node */
    s.size = sizeof(size_t);
    EXPECT(c, c->engine->schedule_run(m->group, &s, NULL) == EPO_E_ARG ||
                  strstr(c->engine->error(), "epo_schedule") != NULL);
    EXPECT(c, run_pair(m, 0, -1) == EPO_OK); /* the group lives on */
    s = (epo_schedule)EPO_SCHEDULE_INIT;
    s.layers = L;
    s.backward = m->step[0];
    EXPECT(c, c->engine->schedule_run(m->group, &s, NULL) == EPO_E_ARG); /* no node */
    expect_taken(m, 0);                                                  /* whatever the status */
    free(close_model(m, SOUND));
}

static void half_a_schedule_is_refused(void) {
    setting s;
    fill_setting(&s, 3);
    CU_ASSERT_EQUAL(moe_ranks(R, 10.0, refused_rank, &s), 0);
    moe_case_free(&s.c);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"side by side: the bits of one after the other", side_by_side_has_the_same_bits},
        {"a failing node ends all", a_failing_node_ends_all},
        {"half a schedule is refused", half_a_schedule_is_refused},
        CU_TEST_INFO_NULL,
    };
    return unit_run("moe schedule", tests);
}
