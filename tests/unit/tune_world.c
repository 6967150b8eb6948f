/* SPDX-License-Identifier: Apache-2.0 */
#include "tune_world.h"

#include <string.h>

double clock_s;
struct epo_event {
    double at;
};
static epo_event marks[2 * MOE_TUNE_PASSES * RANKS];
int marks_used;
bool blind;

static bool fake_mark(epo_queue *queue, epo_event **mark) {
    (void)queue;
    if (blind)
        return false;
    if (*mark == NULL)
        *mark = &marks[marks_used++];
    (*mark)->at = clock_s;
    return true;
}

static bool fake_between(epo_backend *be, epo_event *from, epo_event *to, double *seconds) {
    (void)be;
    *seconds = to->at - from->at;
    return true;
}

epo_backend_info info;
double engines_take = 1;
double home_takes = 1;
static const epo_backend_info *fake_info(const epo_backend *be) {
    (void)be;
    return &info;
}

epo_dispatcher dispatcher;
double (*backward)(int rank, int chunks);
epo_way way;
bool singly;
bool plain;
double plain_takes = 1;
int late_backward;
int given = 4;

static epo_status no_chain(epo_queue *queue, const epo_chain *chain, const epo_deps *deps) {
    (void)queue, (void)chain, (void)deps;
    return EPO_OK;
}

void world_open(world *w, int local, bool free_choice) {
    memset(w, 0, sizeof *w);
    marks_used = 0;
    blind = false;
    w->ops.info = fake_info;
    w->ops.mark = fake_mark;
    w->ops.chain = no_chain;
    w->ops.between = fake_between;
    for (int r = 0; r < RANKS; r++) {
        epo_buffer *b = &w->buffer[r];
        w->group[r] = (epo_group){
            .object = {&moe_engine}, .ops = &w->ops, .rank = r, .ranks = RANKS, .overlap = true};
        b->group = &w->group[r];
        b->experts = local * RANKS;
        b->local = local;
        b->peers.count = RANKS;
        b->hidden = 2048;
        b->top_k = 8;
        b->row_bytes = 4096;
        b->chunks = given;
        b->dispatcher = dispatcher;
        moe_tune_open(b, free_choice);
    }
}

int plan_and_pass(world *w, int tokens, double (*seconds)(int rank, int chunks)) {
    float slowest[MOE_TUNE_CHOICES] = {0};
    int chunks[RANKS];
    for (int r = 0; r < RANKS; r++) {
        float mine[MOE_TUNE_CHOICES] = {0};
        moe_tune_report(&w->buffer[r], mine);
        for (int i = 0; i < MOE_TUNE_CHOICES; i++)
            slowest[i] = mine[i] <= 0 || (r > 0 && slowest[i] <= 0) ? 0
                         : mine[i] > slowest[i]                     ? mine[i]
                                                                    : slowest[i];
    }
    for (int r = 0; r < RANKS; r++) {
        epo_plan plan = {.buffer = &w->buffer[r]};
        moe_tune_learn(&w->buffer[r], slowest);
        moe_tune_choose(&plan, tokens);
        moe_tune_start(&plan, MOE_TUNE_FORWARD);
        clock_s += seconds(r, plan.chunks) * (plan.way == EPO_WAY_ENGINES ? engines_take : 1) *
                   (plan.singly ? home_takes : 1);
        moe_tune_stop(&plan, MOE_TUNE_FORWARD);
        if (backward != NULL && late_backward <= 0) {
            moe_tune_start(&plan, MOE_TUNE_BACKWARD);
            clock_s += backward(r, plan.chunks) * (plan.plain ? plain_takes : 1);
            moe_tune_stop(&plan, MOE_TUNE_BACKWARD);
        }
        chunks[r] = plan.chunks;
        CU_ASSERT_EQUAL(chunks[r], chunks[0]);
        CU_ASSERT(r == 0 || (plan.way == way && plan.singly == singly && plan.plain == plain));
        way = plan.way;
        singly = plan.singly;
        plain = plan.plain;
    }
    late_backward--;
    return chunks[0];
}

int settle(world *w, int tokens, double (*seconds)(int, int)) {
    int chunks = 0;
    for (int i = 0; i < PLANS; i++)
        chunks = plan_and_pass(w, tokens, seconds);
    return chunks;
}
