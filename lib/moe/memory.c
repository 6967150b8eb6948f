/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.c - what a layer's passes take, told before it is taken, and the ways to have
 * the forward's rows again in the backward pass: kept expert-major, kept one a token and
 * rank (flex), or sent once more.
 */
#include "moe/link.h"

#include <inttypes.h>

/* 2^64-1 where the product has no room: the pool refuses it. */
static uint64_t bytes_of(uint64_t count, uint64_t size) {
    uint64_t bytes;
    return epo_size_mul(count, size, &bytes) ? bytes : UINT64_MAX;
}

/* Weight gradients that come at once read dy where it arrived, unless the slot is wanted
 * before them. */
static bool dy_stays(const epo_layer *l, bool in_place) {
    return in_place && moe_layer_trains(l) && !l->group->delay_wgrad && !moe_saved_again(l);
}

/* flex: what goes back. */
static moe_sizes return_sizes(const epo_plan *plan) {
    const uint64_t k = (uint64_t)plan->top_k;
    moe_sizes s = {0};
    if (plan->back == NULL)
        return s;
    s.back = moe_plan_sums(plan) ? 0 : bytes_of(plan->back_rows, plan->buffer->row_bytes);
    /* Never nothing: that there is an array tells that weights' gradients travel, and a rank that
     * filled its experts up, but got no rows, has to receive what the others send. */
    s.back_weight = bytes_of(plan->back_rows > 0 ? plan->back_rows : 1, k * sizeof(float));
    if (plan->link != NULL) {
        s.home = bytes_of(plan->link->in, plan->buffer->row_bytes);
        s.home_weight = bytes_of(plan->link->in, k * sizeof(float));
    }
    return s;
}

/* What fc1 makes before the activation: for the backward, or where it has to be somewhere. */
static bool wants_h(const epo_layer *l, const epo_plan *plan, bool keep) {
    const epo_layer_config *c = &l->config;
    const epo_group *g = l->group;
    const epo_swiglu act = {.ffn = c->ffn, .type = c->type};
    const epo_gemm fc1 = {.kind = EPO_GEMM_FORWARD,
                          .b = c->w1,
                          .type = c->type,
                          .c_type = c->type,
                          .n = 2 * c->ffn,
                          .k = c->hidden,
                          .row_first = plan->op_first,
                          .row_count = plan->op_count,
                          .count = l->local,
                          .cpu_first = plan->first,
                          .cpu_count = plan->count,
                          .act = &act};
    return keep || g->ops->gemm_drops_h == NULL || !g->ops->gemm_drops_h(g->be, &fc1);
}

static moe_sizes layer_sizes(const epo_layer *l, const epo_plan *plan, bool keep) {
    const epo_layer_config *c = &l->config;
    uint64_t size = moe_type_size(c->type), rows = plan->rows;
    uint64_t wide = (uint64_t)c->hidden * size, high = (uint64_t)c->ffn * size;
    bool custom = c->expert != NULL;
    bool in_place = moe_plan_in_place(plan) && !custom;
    bool wanted = keep && moe_layer_trains(l);
    moe_sizes s = return_sizes(plan);
    if (wanted || !in_place)
        s.x = bytes_of(rows, wide);
    /* A caller's experts read x for their own dgrad, too. */
    s.x_stays = (wanted && c->saved == EPO_SAVE_ROWS) || (keep && custom);
    if (wanted && !s.x_stays && in_place)
        s.x = 0;
    if (wanted && !s.x_stays && c->saved == EPO_SAVE_TOKENS)
        s.tokens = bytes_of(plan->back_rows, plan->buffer->wire_bytes);
    s.h = custom || !wants_h(l, plan, keep) ? 0 : bytes_of(rows, 2 * high);
    s.a = custom ? 0 : bytes_of(rows, high);
    s.out = bytes_of(rows, wide);
    s.wire = moe_buffer_wire(plan->buffer) > 0
                 ? bytes_of((uint64_t)plan->tokens, plan->buffer->wire_bytes)
                 : 0;
    s.dy = (moe_layer_trains(l) || !in_place) && !dy_stays(l, in_place) ? bytes_of(rows, wide) : 0;
    s.x_again = wanted && !s.x_stays ? bytes_of(rows, wide) : 0;
    s.dweight = bytes_of(rows, sizeof(float));
    return s;
}

/* As blocks of the pool; an array of no bytes takes a block too, one not wanted (0 here
 * and no rows at all look alike) is counted by `wanted`. */
static uint64_t blocks(const uint64_t *bytes, int count, uint64_t rows) {
    uint64_t sum = 0;
    for (int i = 0; i < count; i++) {
        uint64_t block = bytes[i] > 0 || rows == 0 ? moe_pool_block(bytes[i]) : 0;
        sum = sum + block < sum ? UINT64_MAX : sum + block;
    }
    return sum;
}

epo_status moe_layer_bytes(const epo_layer *layer, const epo_plan *plan, epo_layer_memory *out) {
    if (layer == NULL || plan == NULL)
        return epo_fail(EPO_E_ARG, "layer_bytes: %s is NULL", layer == NULL ? "layer" : "plan");
    epo_status status = moe_layer_fits(layer, plan);
    if (status != EPO_OK)
        return status;
    moe_sizes s = layer_sizes(layer, plan, true);
    const uint64_t held[] = {s.x_stays ? s.x : s.tokens, s.h};
    const uint64_t forward[] = {s.a, s.out, s.back, s.back_weight, s.x_stays ? 0 : s.x, s.wire};
    const uint64_t backward[] = {s.a,  s.out,     s.back,    s.back_weight,
                                 s.dy, s.dweight, s.x_again, s.wire};
    const uint64_t home =
        plan->link != NULL ? moe_pool_block(s.home) + moe_pool_block(s.home_weight) : 0;
    epo_layer_memory all = {.size = sizeof all,
                            .saved = blocks(held, 2, plan->rows),
                            .forward = blocks(forward, 6, plan->rows) + home,
                            .backward = blocks(backward, 8, plan->rows) + home};
    return moe_output(out, &all, sizeof all, "epo_layer_memory");
}

static void get(moe_pass *p, uint64_t bytes, moe_block *out) {
    if (p->status == EPO_OK && (bytes > 0 || p->plan->rows == 0))
        p->status = moe_pool_get(p->group, bytes, out);
}

/* Before anything of the pass is under way, as all its memory: on a GPU, memory that is asked
 * for while a peer waits for this rank's rows may itself have to wait for the peer. */
static void return_blocks(moe_pass *p, const moe_sizes *s) {
    if (p->plan->back == NULL)
        return;
    get(p, s->back, &p->back);
    get(p, s->back_weight, &p->back_weight);
    if (p->plan->link != NULL && p->status == EPO_OK)
        p->status = moe_pool_get(p->group, s->home, &p->home);
    if (p->plan->link != NULL && p->status == EPO_OK)
        p->status = moe_pool_get(p->group, s->home_weight, &p->home_weight);
}

void moe_return_memory(moe_pass *p) {
    const epo_plan *plan = p->plan;
    const moe_sizes s = return_sizes(plan);
    return_blocks(p, &s);
}

void moe_forward_memory(moe_pass *p, const epo_layer *layer, epo_saved *saved, bool keep,
                        moe_forward_blocks *b) {
    p->custom = layer->config.expert != NULL;
    moe_sizes s = layer_sizes(layer, p->plan, keep);
    *b = (moe_forward_blocks){0};
    get(p, s.x, s.x_stays ? &saved->x : &b->x);
    if (s.tokens > 0)
        get(p, s.tokens, &saved->tokens);
    get(p, s.h, &saved->h);
    get(p, s.a, &b->a);
    get(p, s.out, &b->out);
    return_blocks(p, &s);
    p->tokens = saved->tokens.ptr;
}

void moe_forward_blocks_put(epo_group *g, moe_forward_blocks *b) {
    moe_pool_put(g, &b->x);
    moe_pool_put(g, &b->a);
    moe_pool_put(g, &b->out);
}

moe_wgrad *moe_backward_memory(moe_pass *p, epo_layer *layer, epo_saved *saved, moe_block *out,
                               moe_block *dweight) {
    moe_sizes s = layer_sizes(layer, p->plan, true);
    moe_wgrad *w = NULL;
    if (p->status == EPO_OK)
        p->status = moe_wgrad_make(layer, p->plan, &w);
    if (p->status != EPO_OK)
        return NULL;
    w->x = saved->x;
    w->dh = saved->h;
    saved->x = saved->h = (moe_block){NULL, 0};
    p->custom = layer->config.expert != NULL;
    const bool stays = dy_stays(layer, moe_pass_in_place(p));
    p->holds = stays && !p->beside; /* beside another pass, that one wants the slot */
    get(p, stays && p->beside ? bytes_of(p->plan->rows, p->buffer->row_bytes) : s.dy, &w->dy);
    w->dy_rows = p->holds ? moe_buffer_at(p->buffer, p->buffer->dispatch.rows) : w->dy.ptr;
    get(p, s.a, &w->a);
    get(p, s.out, out);
    get(p, s.dweight, dweight);
    if (s.x_again > 0)
        get(p, s.x_again, &w->x);
    return_blocks(p, &s);
    return w;
}

/* ---- the forward's rows again -------------------------------------------- */

bool moe_saved_again(const epo_layer *l) {
    return moe_layer_trains(l) && l->config.expert == NULL && l->config.saved != EPO_SAVE_ROWS;
}

/* Kept one a token and rank: expanded as they were when they came. */
static void expand_tokens(moe_pass *p, const epo_saved *saved, const moe_wgrad *w) {
    epo_group *g = p->group;
    epo_rows_gather gather = {.dst = w->x.ptr,
                              .src = saved->tokens.ptr,
                              .index = p->plan->expand,
                              .rows = p->plan->rows,
                              .row_bytes = (uint32_t)p->buffer->row_bytes,
                              .wire = moe_buffer_wire(p->buffer),
                              .type = p->buffer->type};
    epo_deps deps = moe_deps("expand again", EPO_INTERVAL_LOCAL, -1);
    deps.signal = g->grad;
    g->stats.local_bytes += 2 * p->plan->rows * p->buffer->row_bytes;
    p->status = g->ops->gather(g->compute, &gather, &deps);
}

/* Sent once more, in one piece. */
static void send_again(moe_pass *p, const epo_saved *saved, const moe_wgrad *w) {
    epo_group *g = p->group;
    epo_deps deps = moe_deps("dispatch again", EPO_INTERVAL_LOCAL, -1);
    moe_pass again;
    deps.signal = g->grad;
    moe_pass_begin(&again, p->plan, 1, MOE_USES_DISPATCH, p->stream);
    again.custom = true; /* expanded in any case */
    again.beside = p->beside;
    moe_pass_apart(&again);
    moe_pass_dispatch(&again, saved->source);
    moe_pass_expand(&again, 0, w->x.ptr);
    p->apart_again = again.apart;
    p->wire_again = again.wire;
    p->status = again.status;
    if (p->status == EPO_OK)
        p->status = g->ops->zero(g->compute, NULL, 0, &deps);
}

void moe_saved_restore(moe_pass *p, const epo_layer *l, const epo_saved *saved, moe_wgrad *w) {
    if (p->status != EPO_OK || !moe_saved_again(l))
        return;
    if (l->config.saved == EPO_SAVE_TOKENS)
        expand_tokens(p, saved, w);
    else
        send_again(p, saved, w);
}

void moe_pass_keep_tokens(moe_pass *p, epo_queue *lane, const epo_ready *arrived) {
    epo_group *g = p->group;
    const epo_buffer *b = p->buffer;
    epo_rows_gather gather = {.dst = p->tokens,
                              .src = moe_buffer_at(b, b->dispatch.rows),
                              .rows = p->plan->back_rows,
                              .row_bytes = (uint32_t)b->wire_bytes};
    epo_deps deps = moe_deps("keep tokens", EPO_INTERVAL_LOCAL, -1);
    if (p->status != EPO_OK || p->tokens == NULL)
        return;
    moe_deps_wait(&deps, *arrived);
    if (g->odd != NULL && p->chunks > 1) /* the chunks of the other lane */
        moe_deps_wait(&deps, epo_ready_event(lane == g->odd ? g->read : g->odd_used));
    g->stats.local_bytes += 2 * p->plan->back_rows * b->wire_bytes;
    p->status = g->ops->gather(lane, &gather, &deps);
}
