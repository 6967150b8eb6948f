/* SPDX-License-Identifier: Apache-2.0
 *
 * schedule.c - two micro-batches, node by node: one's communication under the other's
 * compute.
 *
 * Each direction has one pass under way, in one piece (the other micro-batch is what
 * hides its exchanges).  A pass ends where the caller needs its result: forward before
 * the next layer's attention, backward before its own attention'.  Between its last
 * exchange and that end its rows are summed: late enough that the other pass's experts
 * do not stand behind rows that are still on their way, and before the other pass wants
 * the same slot of the window.
 */
#include "moe/pass.h"

#include <inttypes.h>
#include <string.h>

/* One direction's pass. */
typedef struct lane {
    epo_step *step;
    bool open, summed;
    moe_pass pass;
    epo_saved *saved;
    moe_forward_blocks forward;
    moe_block out, dweight;
    moe_wgrad *wgrad;
    double start;
} lane;

typedef struct run {
    epo_group *group;
    const epo_schedule *s;
    epo_stream stream;
    lane f, b;
    epo_status status;
} run;

/* ---- ends of passes ------------------------------------------------------- */

/* The rows that came back, summed. */
static void sum_forward(run *r) {
    lane *f = &r->f;
    if (!f->open || f->summed)
        return;
    f->summed = true;
    moe_pass_finish(&f->pass, f->step->y, NULL);
}

static void sum_backward(run *r) {
    lane *b = &r->b;
    if (!b->open || b->summed)
        return;
    b->summed = true;
    moe_pass_finish(&b->pass, b->step->dx, b->step->dweights);
}

static void note(run *r, epo_status status) {
    if (r->status == EPO_OK)
        r->status = status;
}

/* A pass that the run gives up before its end has nothing to wait for. */
static epo_status end_pass(run *r, lane *l) {
    if (l->pass.status == EPO_OK)
        l->pass.status = r->status;
    epo_status status = moe_pass_end(&l->pass);
    moe_forward_blocks_put(r->group, &l->forward);
    moe_pool_put(r->group, &l->out);
    moe_pool_put(r->group, &l->dweight);
    l->open = false;
    if (status == EPO_OK)
        r->group->stats.call_s += moe_stats_now() - l->start;
    return status;
}

static void end_forward(run *r) {
    lane *f = &r->f;
    if (!f->open)
        return;
    if (r->status == EPO_OK)
        sum_forward(r);
    epo_status status = end_pass(r, f);
    note(r, status);
    if (status != EPO_OK) {
        moe_saved_drop(f->saved);
        return;
    }
    f->step->saved = f->saved;
    r->group->stats.forward_calls++;
    moe_wgrad_retire(r->group, true);
}

static void end_backward(run *r) {
    lane *b = &r->b;
    if (!b->open)
        return;
    if (r->status == EPO_OK)
        sum_backward(r);
    epo_layer *layer = b->step->layer;
    epo_status status = end_pass(r, b);
    if (b->wgrad != NULL)
        status = moe_backward_settle(&b->pass, layer, b->wgrad, status);
    layer->microbatch++;
    moe_saved_drop(b->saved);
    note(r, status);
    if (status == EPO_OK)
        r->group->stats.backward_calls++;
}

/* ---- nodes ---------------------------------------------------------------- */

static void own_node(run *r, epo_node node, int layer, epo_step *step) {
    const moe_within was = moe_group_out(r->group, MOE_IN_NODE);
    epo_status status = r->s->node(r->s->ctx, node, layer, step, r->stream);
    moe_group_back(r->group, was);
    if (status == EPO_OK || r->status != EPO_OK)
        return;
    char text[EPO_ERROR_MAX];
    memcpy(text, epo_fail_text(), sizeof text);
    r->status = epo_fail(status, "node %d of layer %d returned %s%s%s", (int)node, layer,
                         epo_fail_name(status), text[0] != '\0' ? ": " : "", text);
}

static void start_lane(run *r, lane *l, epo_step *step, epo_saved *saved, epo_event *done) {
    *l = (lane){.step = step, .open = true, .saved = saved, .start = moe_stats_now()};
    moe_pass_begin(&l->pass, saved->plan, 1, MOE_USES_DISPATCH | MOE_USES_COMBINE, r->stream);
    if (l->pass.status == EPO_OK && saved->plan->buffer->replays)
        l->pass.status = epo_fail(EPO_E_UNSUPPORTED, "schedule: the plan's buffer is for graphs, "
                                                     "which hold one pass after the other");
    l->pass.beside = true;
    l->pass.done = done;
    moe_pass_apart(&l->pass); /* both directions may be of one plan */
}

static void dispatch(run *r, epo_step *step) {
    epo_saved *saved = NULL;
    note(r, moe_forward_open(step->layer, step->plan, step->x, step->y, &saved));
    if (r->status != EPO_OK)
        return;
    lane *f = &r->f;
    start_lane(r, f, step, saved, r->group->pair_done[0]);
    moe_forward_memory(&f->pass, step->layer, saved, true, &f->forward);
    saved->source = step->x;
    moe_pass_dispatch(&f->pass, step->x);
    if (f->pass.status == EPO_OK)
        f->pass.status = moe_wgrad_issue_delayed(r->group);
}

static void combine_back(run *r, epo_step *step) {
    bool live = step->saved != NULL && step->saved->live;
    epo_saved *saved = step->saved;
    note(r, moe_backward_open(step->layer, saved, step->dy, step->dx));
    step->saved = NULL;
    if (r->status != EPO_OK) {
        if (live)
            moe_saved_drop(saved);
        return;
    }
    lane *b = &r->b;
    start_lane(r, b, step, saved, r->group->pair_done[1]);
    b->wgrad = moe_backward_memory(&b->pass, step->layer, saved, &b->out, &b->dweight);
    moe_pass_dispatch(&b->pass, step->dy);
    if (b->pass.status == EPO_OK)
        b->pass.status = moe_wgrad_issue_delayed(r->group);
}

/* A node of an MoE layer. */
static void engine_node(run *r, epo_node node, epo_step *step) {
    lane *f = &r->f, *b = &r->b;
    switch (node) {
    case EPO_NODE_DISPATCH: dispatch(r, step); return;
    case EPO_NODE_COMBINE_BACK: combine_back(r, step); return;
    case EPO_NODE_MLP:
        moe_experts_forward(&f->pass, step->layer, 0, f->saved,
                            f->saved->x.ptr != NULL ? f->saved->x.ptr : f->forward.x.ptr,
                            f->forward.a.ptr, f->forward.out.ptr);
        sum_backward(r); /* before the forward's rows want its slot */
        note(r, b->open ? b->pass.status : EPO_OK);
        break;
    case EPO_NODE_COMBINE: moe_pass_return(&f->pass, 0, f->forward.out.ptr, NULL); break;
    case EPO_NODE_MLP_BACK:
        sum_forward(r); /* of the layer before, if its attention did not ask for it */
        moe_experts_backward(&b->pass, step->layer, 0, b->wgrad, b->out.ptr, b->dweight.ptr);
        /* Before the forward's dispatch takes the slot until its own experts. */
        moe_saved_restore(&b->pass, step->layer, b->saved, b->wgrad);
        break;
    case EPO_NODE_MLP_WGRAD: moe_backward_wgrad(&b->pass, step->layer, b->wgrad); break;
    case EPO_NODE_DISPATCH_BACK: moe_pass_return(&b->pass, 0, b->out.ptr, b->dweight.ptr); break;
    default: return;
    }
    note(r, node == EPO_NODE_MLP || node == EPO_NODE_COMBINE ? f->pass.status : b->pass.status);
}

static bool is_own(epo_node node, const epo_step *step) {
    bool mlp = node == EPO_NODE_MLP || node == EPO_NODE_MLP_BACK || node == EPO_NODE_MLP_WGRAD;
    return node == EPO_NODE_ATTENTION || node == EPO_NODE_ATTENTION_BACK ||
           node == EPO_NODE_ATTENTION_WGRAD || (mlp && step->layer == NULL);
}

/* What a node of the caller's reads must be complete: y of the layer below, dx. */
static void issue(run *r, epo_node node, int layer, epo_step *step) {
    if (r->status != EPO_OK)
        return;
    if (node == EPO_NODE_ATTENTION)
        end_forward(r);
    if (node == EPO_NODE_ATTENTION_BACK)
        end_backward(r);
    if (r->status == EPO_OK && is_own(node, step))
        own_node(r, node, layer, step);
    else if (r->status == EPO_OK && step->layer != NULL)
        engine_node(r, node, step);
    else
        return; /* a dense layer sends nothing */
    if (r->status != EPO_OK || r->s->issued == NULL)
        return;
    const moe_within was = moe_group_out(r->group, MOE_IN_ISSUED);
    r->s->issued(r->s->ctx, node, layer);
    moe_group_back(r->group, was);
}

/* ---- the run -------------------------------------------------------------- */

static void issue_step(run *r, int i) {
    static const struct {
        epo_node node;
        bool forward;
    } order[] = {
        {EPO_NODE_COMBINE_BACK, false},
        {EPO_NODE_ATTENTION, true},
        {EPO_NODE_MLP_BACK, false},
        {EPO_NODE_DISPATCH, true},
        {EPO_NODE_MLP_WGRAD, false},
        {EPO_NODE_DISPATCH_BACK, false},
        {EPO_NODE_MLP, true},
        {EPO_NODE_COMBINE, true},
        {EPO_NODE_ATTENTION_BACK, false},
        {EPO_NODE_ATTENTION_WGRAD, false},
    };
    int back = r->s->layers - 1 - i;
    for (size_t n = 0; n < sizeof order / sizeof *order; n++) {
        if (order[n].forward && r->s->forward != NULL)
            issue(r, order[n].node, i, &r->s->forward[i]);
        else if (!order[n].forward && r->s->backward != NULL)
            issue(r, order[n].node, back, &r->s->backward[back]);
    }
}

static epo_status check_schedule(const epo_group *group, const epo_schedule *s) {
    if (s->layers < 1 || (s->forward == NULL && s->backward == NULL) || s->node == NULL)
        return epo_fail(EPO_E_ARG,
                        "schedule: %d layers, forward %s, backward %s, node %s; give one layer or "
                        "more, one direction or both, and the caller's nodes",
                        s->layers, s->forward != NULL ? "given" : "NULL",
                        s->backward != NULL ? "given" : "NULL", s->node != NULL ? "given" : "NULL");
    for (int i = 0; i < s->layers; i++) {
        const epo_layer *f = s->forward != NULL ? s->forward[i].layer : NULL;
        const epo_layer *b = s->backward != NULL ? s->backward[i].layer : NULL;
        if ((f != NULL && f->group != group) || (b != NULL && b->group != group))
            return epo_fail(EPO_E_ARG, "schedule: layer %d belongs to another group", i);
    }
    return EPO_OK;
}

/* The backward takes each saved pass over, also those it did not come to, or was refused for. */
static void drop_rest(const epo_schedule *s) {
    for (int i = 0; s->backward != NULL && i < s->layers; i++) {
        moe_saved_release(s->backward[i].saved);
        s->backward[i].saved = NULL;
    }
}

epo_status moe_schedule_run(epo_group *group, const epo_schedule *given, epo_stream stream) {
    if (group == NULL)
        return epo_fail(EPO_E_ARG, "schedule_run: group is NULL");
    epo_schedule s = EPO_SCHEDULE_INIT;
    run r = {.group = group, .s = &s, .stream = stream};
    r.status = moe_input(&s, sizeof s, given, offsetof(epo_schedule, issued), "epo_schedule");
    if (r.status == EPO_OK)
        r.status = check_schedule(group, &s);
    if (r.status == EPO_OK)
        r.status = moe_group_outside(group, "schedule_run");
    if (r.status == EPO_OK)
        r.status = moe_group_ok(group);
    if (r.status != EPO_OK) { /* peers may be in it */
        r.status = moe_group_turn(group, s.backward != NULL ? EPO_TURN_BACKWARD : EPO_TURN_FORWARD,
                                  NULL, r.status);
        drop_rest(&s);
        return r.status;
    }
    for (int i = 0; i < s.layers && r.status == EPO_OK; i++)
        issue_step(&r, i);
    if (r.status != EPO_OK)
        r.status = moe_group_break(group, r.status);
    end_backward(&r);
    end_forward(&r);
    if (r.status != EPO_OK)
        drop_rest(&s);
    return r.status;
}
