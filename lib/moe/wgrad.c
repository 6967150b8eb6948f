/* SPDX-License-Identifier: Apache-2.0
 *
 * wgrad.c - weight gradients, at once or delayed.
 *
 * An entry is one backward call's weight gradients.  The group's list keeps them
 * in the order of the calls; each is issued to the one fill queue in that order,
 * so an expert's gradient is added to in the same order, and has the same bits,
 * whether it was delayed or not.
 */
#include "moe/pass.h"

#include <stdlib.h>

/* Where the backend can be asked whether an event has come. */
static epo_status end_take(epo_group *g, epo_event **out) {
    moe_wgrad_queue *q = &g->wgrads;
    if (g->ops->event_query == NULL)
        return EPO_OK;
    if (q->nspare == 0)
        return g->ops->event_create(g->be, out);
    *out = q->spare[--q->nspare];
    return EPO_OK;
}

static void end_give(epo_group *g, epo_event *end) {
    moe_wgrad_queue *q = &g->wgrads;
    if (end != NULL && q->nspare < MOE_WGRAD_ENDS)
        q->spare[q->nspare++] = end;
    else if (end != NULL)
        g->ops->event_destroy(g->be, end);
}

void moe_wgrad_close(epo_group *group) {
    moe_wgrad_queue *q = &group->wgrads;
    while (q->nspare > 0)
        group->ops->event_destroy(group->be, q->spare[--q->nspare]);
}

epo_status moe_wgrad_make(epo_layer *layer, epo_plan *plan, moe_wgrad **out) {
    moe_wgrad *w = calloc(1, sizeof *w);
    if (w == NULL)
        return epo_fail(EPO_E_NOMEM, "memory: need %zu bytes for weight gradients", sizeof *w);
    w->layer = layer;
    w->microbatch = layer->microbatch;
    w->plan = plan;
    epo_group *g = layer->group;
    w->queue = g->keep != NULL && !g->delay_wgrad ? g->compute : g->fill;
    epo_status status = end_take(g, &w->end);
    if (status != EPO_OK) {
        free(w);
        return status;
    }
    w->fresh = layer->wgrad_fresh;
    layer->wgrad_fresh = false;
    moe_plan_retain(plan);
    *out = w;
    return EPO_OK;
}

void moe_wgrad_free(moe_wgrad *w) {
    if (w == NULL)
        return;
    epo_group *g = w->layer->group;
    moe_pool_put(g, &w->dy);
    moe_pool_put(g, &w->a);
    moe_pool_put(g, &w->dh);
    moe_pool_put(g, &w->x);
    moe_plan_release(w->plan);
    free(w->own);
    end_give(g, w->end);
    free(w);
}

/* dW2 += dy^T a, dW1 += dh^T x, of local experts [first, first+count). */
static epo_status issue_gemms(moe_wgrad *w, int first, int count, const epo_ready *wait,
                              int chunk) {
    const epo_layer_config *c = &w->layer->config;
    epo_group *g = w->layer->group;
    epo_gemm gemm = {.kind = EPO_GEMM_WGRAD,
                     .a = w->dy_rows,
                     .b = w->a.ptr,
                     .c = c->dw2,
                     .type = c->type,
                     .c_type = c->wgrad_type,
                     .n = c->hidden,
                     .k = c->ffn,
                     .row_first = w->plan->op_first,
                     .row_count = w->plan->op_count,
                     .fresh = w->fresh,
                     .beside = g->overlap,
                     .lends = w->lends,
                     .lent = w->lent,
                     .first = first,
                     .count = count,
                     .cpu_first = w->plan->first,
                     .cpu_count = w->plan->count};
    epo_deps deps = moe_deps("wgrad2", EPO_INTERVAL_COMPUTE, chunk);
    if (wait != NULL)
        moe_deps_wait(&deps, *wait);
    if (g->keep != NULL) { /* copies of x and dy, and what odd chunks made */
        moe_deps_wait(&deps, epo_ready_event(g->kept));
        moe_deps_wait(&deps, epo_ready_event(g->odd_grad));
    }
    if (w->own != NULL) {
        deps.name = "experts wgrad";
        return moe_own_wgrad(w, &deps);
    }
    epo_status status = g->ops->gemm(w->queue, &gemm, &deps);
    if (status != EPO_OK)
        return status;
    gemm.lends = false; /* the sums are through by then */
    gemm.lent = NULL;
    gemm.a = w->dh.ptr;
    gemm.b = w->x.ptr;
    gemm.c = c->dw1;
    gemm.n = 2 * c->ffn;
    gemm.k = c->hidden;
    deps.name = "wgrad1";
    return g->ops->gemm(w->queue, &gemm, &deps);
}

static void count_finished(void *ctx) { __atomic_add_fetch((int *)ctx, 2, __ATOMIC_RELAXED); }

epo_status moe_wgrad_issue(moe_wgrad *w, int first, int last, const epo_ready *wait, int chunk) {
    epo_group *g = w->layer->group;
    /* Where the CPU does the work, an operation of the fill queue stands in the
     * compute queue's way for all its length: there each expert is one. */
    bool apart = g->fill != g->compute && g->ops->write == NULL && w->own == NULL;
    epo_status status = EPO_OK;
    if (!apart)
        return issue_gemms(w, first, last - first, wait, chunk);
    for (int e = first; e < last && status == EPO_OK; e++)
        if (w->plan->count[e] > 0 || w->fresh) {
            epo_deps deps = moe_deps("wgrad count", EPO_INTERVAL_COMPUTE, chunk);
            status = issue_gemms(w, e, 1, wait, chunk);
            if (status == EPO_OK && w->plan->count[e] > 0)
                status = g->ops->call(w->queue, count_finished, &w->finished, &deps);
        }
    return status;
}

static void note_done(void *ctx) { __atomic_store_n((int *)ctx, 1, __ATOMIC_RELEASE); }

epo_status moe_wgrad_issue_end(moe_wgrad *w) {
    epo_group *g = w->layer->group;
    epo_deps deps = moe_deps("wgrad done", EPO_INTERVAL_COMPUTE, -1);
    w->issued = true;
    if (w->end == NULL) {
        deps.signal = g->fill_done;
        return g->ops->call(w->queue, note_done, &w->done, &deps);
    }
    /* `end` first: who has seen fill_done finds the entry done. */
    deps.signal = w->end;
    const epo_layer_config *c = &w->layer->config;
    uint64_t n = (uint64_t)w->layer->local * (uint64_t)c->hidden * (uint64_t)c->ffn *
                 moe_type_size(c->wgrad_type);
    epo_status status = g->ops->poison != NULL && c->dw1 != NULL
                            ? g->ops->poison(w->queue, c->dw1, 2 * n, c->dw2, n, &deps)
                            : g->ops->zero(w->queue, NULL, 0, &deps);
    deps.signal = g->fill_done;
    return status == EPO_OK ? g->ops->zero(w->queue, NULL, 0, &deps) : status;
}

/* `grad` was signalled last by a pass at or after the entry's own: its operands are
 * written by then. */
epo_status moe_wgrad_issue_whole(moe_wgrad *w) {
    epo_ready ready = epo_ready_event(w->layer->group->grad);
    epo_status status = moe_wgrad_issue(w, 0, w->layer->local, &ready, -1);
    return status == EPO_OK ? moe_wgrad_issue_end(w) : status;
}

void moe_wgrad_append(epo_group *group, moe_wgrad *w) {
    moe_wgrad_queue *q = &group->wgrads;
    w->bytes = w->dy.bytes + w->a.bytes + w->dh.bytes + w->x.bytes;
    w->gemms = w->own != NULL; /* one call of the caller's */
    for (int e = 0; e < w->layer->local && w->own == NULL; e++)
        w->gemms += w->plan->count[e] > 0 ? 2 : 0;
    if (q->tail != NULL)
        q->tail->next = w;
    else
        q->head = w;
    q->tail = w;
    q->bytes += w->bytes;
    w->layer->wgrads++;
    if (group->delay_wgrad)
        group->stats.wgrad_delayed += (uint64_t)w->gemms;
}

epo_status moe_wgrad_issue_delayed(epo_group *group) {
    epo_status status = EPO_OK;
    for (moe_wgrad *w = group->wgrads.head; w != NULL && status == EPO_OK; w = w->next)
        if (!w->issued)
            status = moe_wgrad_issue_whole(w);
    return status;
}

/* Takes the entry out of the list; `before` is its predecessor or NULL. */
static void unlink_entry(epo_group *group, moe_wgrad *before, moe_wgrad *w) {
    moe_wgrad_queue *q = &group->wgrads;
    if (before != NULL)
        before->next = w->next;
    else
        q->head = w->next;
    if (q->tail == w)
        q->tail = before;
    q->bytes -= w->bytes;
    w->layer->wgrads--;
}

static bool is_done(epo_group *group, moe_wgrad *w) {
    if (w->end != NULL)
        return w->issued && group->ops->event_query(group->be, w->end);
    return __atomic_load_n(&w->done, __ATOMIC_ACQUIRE) != 0;
}

/* Of its layer.  One that was not done when it was asked, and whose successor is when that is
 * asked, ended in between: a layer's entries go in their order all the same. */
static bool is_oldest(const epo_group *group, const moe_wgrad *w) {
    const moe_wgrad *oldest = group->wgrads.head;
    while (oldest->layer != w->layer)
        oldest = oldest->next;
    return oldest == w;
}

/* The first entry that is done, and its predecessor. */
static moe_wgrad *find_done(epo_group *group, moe_wgrad **before) {
    *before = NULL;
    for (moe_wgrad *w = group->wgrads.head; w != NULL; *before = w, w = w->next)
        if (is_oldest(group, w) && is_done(group, w))
            return w;
    return NULL;
}

/* GEMMs that ended since the last look, also of entries that are not done. */
static void count_hidden(epo_group *group, bool hidden) {
    for (moe_wgrad *w = group->wgrads.head; w != NULL; w = w->next) {
        int finished =
            is_done(group, w) ? w->gemms : __atomic_load_n(&w->finished, __ATOMIC_RELAXED);
        if (hidden)
            group->stats.wgrad_hidden += (uint64_t)(finished - w->counted);
        w->counted = finished;
    }
}

static void call_ready(epo_layer *layer, uint64_t microbatch) {
    epo_group *g = layer->group;
    if (layer->config.wgrad_ready == NULL)
        return;
    const moe_within was = moe_group_out(g, MOE_IN_READY);
    layer->config.wgrad_ready(layer->config.ctx, layer, microbatch);
    moe_group_back(g, was);
}

void moe_wgrad_retire(epo_group *group, bool hidden) {
    moe_wgrad *before;
    /* From the head each time: a callback may call the API. */
    if (group->delay_wgrad)
        count_hidden(group, hidden);
    for (moe_wgrad *w = find_done(group, &before); w != NULL; w = find_done(group, &before)) {
        epo_layer *layer = w->layer;
        uint64_t microbatch = w->microbatch;
        bool told = w->told;
        if (hidden && group->delay_wgrad) /* what ended since it was counted */
            group->stats.wgrad_hidden += (uint64_t)(w->gemms - w->counted);
        unlink_entry(group, before, w);
        moe_wgrad_free(w);
        if (!told)
            call_ready(layer, microbatch);
    }
}

void moe_wgrad_tell(epo_group *group, const epo_layer *layer) {
    moe_wgrad *w;
    do { /* from the head each time: a callback may call the API */
        w = group->wgrads.head;
        while (w != NULL && (!w->issued || w->told || (layer != NULL && w->layer != layer)))
            w = w->next;
        if (w == NULL)
            return;
        w->told = true;
        call_ready(w->layer, w->microbatch);
    } while (true);
}

epo_status moe_wgrad_limit(epo_group *group) {
    uint64_t bytes = group->wgrads.bytes;
    if (bytes <= group->wgrads.limit)
        return EPO_OK;
    epo_status status = EPO_OK;
    for (moe_wgrad *w = group->wgrads.head;
         w != NULL && bytes > group->wgrads.limit && status == EPO_OK; w = w->next) {
        bytes -= w->bytes;
        if (!w->issued)
            status = moe_wgrad_issue_whole(w);
    }
    if (status == EPO_OK)
        status = group->ops->sync(group->be, group->fill_done);
    if (status != EPO_OK)
        return moe_group_break(group, status);
    moe_wgrad_retire(group, false);
    return EPO_OK;
}

epo_status moe_wgrad_flush(epo_group *group, epo_layer *layer, epo_stream stream) {
    epo_status status = moe_group_ok(group);
    bool any = false;
    if (status != EPO_OK)
        return status;
    for (moe_wgrad *w = group->wgrads.head; w != NULL && status == EPO_OK; w = w->next) {
        if (layer != NULL && w->layer != layer)
            continue;
        any = true;
        if (!w->issued)
            status = moe_wgrad_issue_whole(w);
    }
    if (status == EPO_OK && any)
        status = group->ops->stream_leave(group->be, group->fill_done, stream);
    if (status != EPO_OK) /* of this rank alone: the others would go on with other gradients */
        return moe_group_break(group, status);
    if (!any)
        return EPO_OK;
    moe_wgrad_retire(group, false);
    moe_wgrad_tell(group, layer);
    return EPO_OK;
}

static void discard(epo_group *group, const epo_layer *layer) {
    moe_wgrad *before = NULL, *next;
    for (moe_wgrad *w = group->wgrads.head; w != NULL; w = next) {
        next = w->next;
        if (layer == NULL || w->layer == layer) {
            unlink_entry(group, before, w);
            moe_wgrad_free(w);
        } else {
            before = w;
        }
    }
}

epo_status moe_wgrad_settle(epo_group *group, epo_layer *layer) {
    epo_status status = moe_wgrad_flush(group, layer, NULL);
    /* Broken: the queue passes over what it holds, then the entries can go. */
    epo_status late = group->ops->sync(group->be, group->fill_done);
    moe_wgrad_retire(group, false);
    status = status != EPO_OK ? status : late;
    if (status != EPO_OK)
        discard(group, layer);
    return status;
}
