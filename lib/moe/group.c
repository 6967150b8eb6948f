/* SPDX-License-Identifier: Apache-2.0 */
#include "core/group_card.h"
#include "moe/moe.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_TIMEOUT_S = 600, DEFAULT_WARN_S = 30, MAX_CHUNKS = 1024 };
#define DEFAULT_WGRAD_LIMIT (UINT64_C(1) << 30)

epo_status moe_world_create(int ranks, epo_world **out) {
    const epo_backend_ops *ops = epo_backend_get();
    if (out == NULL)
        return epo_fail(EPO_E_ARG, "world_create: out is NULL");
    epo_status status = moe_check_range("ranks", ranks, 1, 1024);
    if (status != EPO_OK)
        return status;
    if (ops->world_create == NULL)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "the %s engine cannot have threads as ranks; make each a process",
                        ops->name);
    epo_world *world;
    status = ops->world_create(ranks, &world);
    if (status != EPO_OK)
        return status;
    ((epo_object *)world)->engine = &moe_engine;
    *out = world;
    return EPO_OK;
}

void moe_world_destroy(epo_world *world) {
    if (world != NULL)
        epo_backend_get()->world_destroy(world);
}

epo_status moe_group_ok(epo_group *group) { return group->ops->status(group->be); }

epo_status moe_group_outside(const epo_group *group, const char *call) {
    static const char *const names[] = {
        [MOE_IN_NODE] = "node",     [MOE_IN_ISSUED] = "issued", [MOE_IN_READY] = "wgrad_ready",
        [MOE_IN_EXPERT] = "expert", [MOE_IN_ALLOC] = "alloc",   [MOE_IN_FREE] = "free"};
    return group->within == MOE_OUTSIDE
               ? EPO_OK
               : epo_fail(EPO_E_STATE,
                          "%s was called inside the caller's `%s`, whose own call has not ended; "
                          "call it after that",
                          call, names[group->within]);
}

static epo_status drain(epo_group *group, epo_queue *queue, const epo_ready *wait,
                        const char *name) {
    epo_deps deps = moe_deps(name, EPO_INTERVAL_COMM, -1);
    if (wait != NULL)
        moe_deps_wait(&deps, *wait);
    deps.signal = group->done;
    epo_status status = group->ops->zero(queue, NULL, 0, &deps);
    return status == EPO_OK ? group->ops->sync(group->be, group->done) : status;
}

epo_status moe_group_wait(epo_group *group, epo_ready wait, const char *name) {
    return drain(group, group->compute, &wait, name);
}

epo_status moe_group_drain(epo_group *group) {
    epo_status status = drain(group, group->comm, NULL, "drain");
    if (status == EPO_OK && group->link != NULL)
        status = drain(group, group->link, NULL, "drain");
    if (status == EPO_OK && group->keep != NULL) /* credits */
        status = drain(group, group->keep, NULL, "drain");
    return status == EPO_OK ? drain(group, group->compute, NULL, "drain") : status;
}

epo_status moe_group_break(epo_group *group, epo_status status) {
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    group->ops->abort(group->be, status, text);
    /* The queues pass over what they hold; then nothing reads the caller's memory. */
    epo_queue *queues[] = {group->link, group->comm,    group->keep,
                           group->odd,  group->compute, group->fill};
    for (size_t i = 0; i < sizeof queues / sizeof *queues; i++)
        if (queues[i] != NULL)
            (void)drain(group, queues[i], NULL, "drain");
    return epo_fail(status, "%s", text);
}

epo_status moe_group_replayed(epo_group *group, epo_stream stream, epo_status status) {
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    const epo_status left = group->ops->replay_leave(group->be, stream);
    group->replay.capture = 0;
    return status != EPO_OK ? epo_fail(status, "%s", text) : left;
}

epo_status moe_gone(epo_status status) {
    char text[EPO_ERROR_MAX];
    if (status != EPO_E_STATE)
        return status;
    snprintf(text, sizeof text, "%s", epo_fail_text());
    return epo_fail(EPO_E_PEER, "%s", text);
}

/* One rank's call on a buffer for graphs. */
typedef struct captured_call {
    epo_turn turn;
    bool refused;
} captured_call;

/* A graph's replays make no calls, so nobody compares them: all ranks meet here, where one is
 * captured, also who refuses it.  The verdict is the same on all, and nobody has begun. */
static epo_status compare_now(epo_group *group, const epo_turn *turn, epo_status wrong) {
    char text[EPO_ERROR_MAX], what[400];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    captured_call mine, *all = calloc((size_t)group->ranks, sizeof *all);
    memset(&mine, 0, sizeof mine);
    mine.turn = *turn;
    mine.refused = wrong != EPO_OK;
    if (all == NULL)
        return moe_group_break(group, epo_fail(EPO_E_NOMEM, "memory: need %zu bytes for %d ranks",
                                               (size_t)group->ranks * sizeof *all, group->ranks));
    epo_status status = group->ops->allgather(group->be, &mine, sizeof mine, all);
    for (int r = 0; status == EPO_OK && r < group->ranks; r++)
        if (all[r].refused)
            status = epo_fail(EPO_E_PEER,
                              "rank %d refused its arguments of a call that graphs may capture, as "
                              "its own error tells",
                              r);
    for (int r = 1; status == EPO_OK && r < group->ranks; r++)
        if (epo_turn_other(&all[0].turn, &all[r].turn, 0, r, what, sizeof what))
            status = epo_fail(EPO_E_PEER, "%s", what);
    free(all);
    return wrong != EPO_OK ? epo_fail(wrong, "%s", text) : status;
}

/* Of the calls that were made; for the next plan's record. */
static void note_pass(moe_passes *all, const epo_turn *turn) {
    const epo_turn_with *w = &turn->with;
    const uint64_t bit = UINT64_C(1) << all->count % 64;
    const uint32_t parts[] = {(uint32_t)turn->kind, (uint32_t)turn->plan, (uint32_t)w->buffer,
                              (uint32_t)w->ffn,     (uint32_t)w->saved,   (uint32_t)w->own,
                              (uint32_t)w->again};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        all->hash = (all->hash ^ parts[i]) * 16777619 + 1;
    all->without = (all->without & ~bit) | (w->extra == 1 ? bit : 0);
    all->with = (all->with & ~bit) | (w->extra == 2 ? bit : 0);
    all->count++;
    all->last = *turn;
}

static bool is_pass(epo_turn_kind kind) {
    return kind == EPO_TURN_DISPATCH || kind == EPO_TURN_COMBINE || kind == EPO_TURN_FORWARD ||
           kind == EPO_TURN_BACKWARD;
}

/* Inside a function of the caller's nothing is begun, so there is no turn: the ranks are in the
 * call outside still.  But a router's answer comes in a node. */
static epo_status take_turn(epo_group *group, const epo_turn *turn, bool meets, epo_status wrong) {
    const epo_backend_ops *ops = group->ops;
    if (group->within != MOE_OUTSIDE &&
        (group->within != MOE_IN_NODE || turn->kind != EPO_TURN_PLAN))
        return moe_group_outside(group, "a collective call");
    const epo_status other =
        ops->turn != NULL ? ops->turn(group->be, turn, wrong != EPO_OK) : EPO_OK;
    epo_status status = EPO_OK;
    if (meets && other == EPO_OK)
        status = compare_now(group, turn, wrong);
    else if (wrong != EPO_OK)
        status = wrong;
    else if (other != EPO_OK)
        status = moe_group_break(group, other);
    if (status == EPO_OK && is_pass(turn->kind))
        note_pass(&group->passes, turn);
    return status;
}

/* Does the group's plan belong to a buffer for graphs? */
static bool replays(const epo_group *group, const epo_plan *plan) {
    return plan != NULL && plan->buffer->group == group && plan->buffer->replays;
}

static epo_turn turn_of(epo_turn_kind kind, const epo_plan *plan) {
    epo_turn turn = {.kind = kind};
    if (plan != NULL) {
        turn.plan = plan->number;
        turn.with.buffer = plan->buffer->number;
    }
    return turn;
}

epo_status moe_group_turn(epo_group *group, epo_turn_kind kind, const epo_plan *plan,
                          epo_status wrong) {
    const epo_turn turn = turn_of(kind, plan);
    return take_turn(group, &turn, replays(group, plan), wrong);
}

epo_status moe_buffer_turn(epo_buffer *buffer, epo_turn_kind kind, epo_status wrong) {
    const epo_turn turn = {.kind = kind, .with = {.buffer = buffer->number}};
    return take_turn(buffer->group, &turn, false, wrong);
}

epo_status moe_layer_turn(epo_group *group, epo_turn_kind kind, const epo_layer *layer,
                          const epo_plan *plan, epo_status wrong) {
    epo_turn turn = turn_of(kind, plan);
    if (layer != NULL) {
        turn.with.own = layer->config.expert != NULL;
        turn.with.ffn = turn.with.own ? 0 : layer->config.ffn;
        turn.with.saved = (int)layer->config.saved;
        turn.with.again = layer->config.saved == EPO_SAVE_NOTHING && moe_saved_again(layer);
    }
    return take_turn(group, &turn, replays(group, plan), wrong);
}

epo_status moe_passes_agree(const moe_passes *first, const moe_passes *other, int rank) {
    char what[EPO_ERROR_MAX];
    const bool extra = ((first->with & other->without) | (first->without & other->with)) != 0;
    if (first->hash == other->hash && first->count == other->count && !extra)
        return EPO_OK;
    if (first->count > 0 && other->count > 0 &&
        epo_turn_other(&first->last, &other->last, 0, rank, what, sizeof what))
        return epo_fail(EPO_E_PEER, "in the passes before this plan %s", what);
    return epo_fail(EPO_E_PEER,
                    "in the passes before this plan the ranks disagree: rank 0 made %u, rank %d "
                    "%u, or of another plan, layer or with other arrays; all ranks make the same "
                    "calls in the same order",
                    first->count, rank, other->count);
}

epo_status moe_combine_turn(epo_group *group, const epo_plan *plan, int extra, epo_status wrong) {
    epo_turn turn = turn_of(EPO_TURN_COMBINE, plan);
    turn.with.extra = extra;
    return take_turn(group, &turn, replays(group, plan), wrong);
}

epo_status moe_group_turn_end(epo_group *group) {
    return group->ops->turn_end != NULL ? group->ops->turn_end(group->be) : EPO_OK;
}

bool moe_group_reaches(const epo_group *group, epo_scope scope) {
    const epo_backend_info *info = group->ops->info(group->be);
    return info->one_sided && (info->nodes == 1 || scope == EPO_SCOPE_NODE);
}

epo_status moe_group_read(epo_group *group, void *dst, const void *src, uint64_t bytes) {
    if (group->ops->read != NULL)
        return group->ops->read(group->be, dst, src, bytes);
    memcpy(dst, src, bytes);
    return EPO_OK;
}

static epo_status check_config(const epo_group_config *c) {
    epo_status status = moe_check_range("overlap", c->overlap, EPO_OFF, EPO_ON);
    if (status == EPO_OK)
        status =
            moe_check_range("dispatcher", c->dispatcher, EPO_DISPATCH_ALLTOALL, EPO_DISPATCH_FLEX);
    if (status == EPO_OK)
        status = moe_check_range("delay_wgrad", c->delay_wgrad, EPO_OFF, EPO_ON);
    if (status == EPO_OK)
        status = moe_check_range("chunks", c->chunks, 0, MAX_CHUNKS);
    if (status == EPO_OK && c->delay_wgrad == EPO_ON && c->overlap == EPO_OFF)
        status = epo_fail(EPO_E_ARG, "delay_wgrad is on and overlap is off: delayed weight "
                                     "gradients need overlap; turn overlap on or delay_wgrad off");
    if (status == EPO_OK)
        status = moe_check_range("tensor_parallel", c->tensor_parallel, 0, MAX_CHUNKS);
    if (status == EPO_OK && (c->alloc == NULL) != (c->free == NULL))
        status = epo_fail(EPO_E_ARG, "alloc is %s, free is %s; give both or none",
                          c->alloc == NULL ? "NULL" : "given", c->free == NULL ? "NULL" : "given");
    if (status == EPO_OK && !(c->timeout_s >= 0 && c->warn_s >= 0))
        status = epo_fail(EPO_E_ARG, "timeout_s, warn_s: found %g, %g, allowed 0 or more",
                          c->timeout_s, c->warn_s);
    return status;
}

static epo_backend_config backend_config(const epo_group_config *c) {
    return (epo_backend_config){
        .rank = c->rank,
        .ranks = c->ranks,
        .members = c->members,
        .nmembers = c->nmembers,
        .bootstrap = c->bootstrap,
        .threads = c->threads,
        .timeout_s = c->timeout_s > 0 ? c->timeout_s : DEFAULT_TIMEOUT_S,
        .warn_s = c->warn_s > 0 ? c->warn_s : DEFAULT_WARN_S,
        .nccl_comm = c->nccl_comm,
        .overlap = c->overlap == EPO_ON,
    };
}

/* Without a group, for want of memory or by a wrong argument, there is still the way to tell the
 * others, where the arguments lead to them. */
static epo_status refuse(const epo_group_config *c, epo_status wrong) {
    epo_backend_config config = backend_config(c);
    epo_backend *none = NULL;
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    config.wrong = wrong;
    (void)epo_backend_get()->open(&config, &none);
    return epo_fail(wrong, "%s", text);
}

epo_status moe_group_refuse(const epo_engine_group *given, epo_status wrong) {
    epo_group_config c = EPO_GROUP_CONFIG_INIT;
    if (given != NULL && given->size == sizeof *given &&
        moe_input(&c, sizeof c, &given->config, sizeof c, "epo_group_config") == EPO_OK)
        return refuse(&c, epo_fail(wrong, "%s", given->reason));
    return wrong;
}

static epo_status open_backend(epo_group *g, const epo_group_config *c) {
    const epo_backend_config config = backend_config(c);
    epo_status status = g->ops->open(&config, &g->be);
    if (status != EPO_OK)
        return status;
    const epo_backend_info *info = g->ops->info(g->be);
    g->rank = info->rank;
    g->ranks = info->ranks;
    return EPO_OK;
}

static epo_status make_queues(epo_group *g) {
    epo_status status = g->ops->queue_create(g->be, EPO_QUEUE_COMPUTE, &g->compute);
    if (status != EPO_OK)
        return status;
    status = g->ops->queue_create(g->be, EPO_QUEUE_COMM, &g->comm);
    if (!g->overlap)
        g->fill = g->compute;
    else if (status == EPO_OK)
        status = g->ops->queue_create(g->be, EPO_QUEUE_FILL, &g->fill);
    if (status == EPO_OK && g->ops->copy != NULL)
        status = g->ops->queue_create(g->be, EPO_QUEUE_COMM, &g->keep);
    if (status == EPO_OK && g->keep != NULL && g->overlap)
        status = g->ops->queue_create(g->be, EPO_QUEUE_COMPUTE, &g->odd);
    if (status == EPO_OK && g->ops->info(g->be)->nodes > 1)
        status = g->ops->queue_create(g->be, EPO_QUEUE_COMM, &g->link);
    epo_event **events[] = {&g->rows,     &g->read,      &g->sent,         &g->done,
                            &g->grad,     &g->fill_done, &g->kept,         &g->used,
                            &g->odd_grad, &g->odd_used,  &g->pair_done[0], &g->pair_done[1],
                            &g->returned, &g->linked};
    for (size_t i = 0; status == EPO_OK && i < sizeof events / sizeof *events; i++)
        status = g->ops->event_create(g->be, events[i]);
    for (int i = 0; status == EPO_OK && g->ops->chain != NULL && i < EPO_CHAIN_PARTS; i++)
        status = g->ops->event_create(g->be, &g->part[i]);
    return status;
}

/* What all ranks must have decided alike, or they would wait for each other. */
typedef struct group_digest {
    int32_t overlap, dispatcher, chunks, tp, nodes;
} group_digest;

static epo_status agree(epo_group *g) {
    group_digest mine = {g->overlap, (int32_t)g->dispatcher, g->chunks, g->tp,
                         g->ops->info(g->be)->nodes};
    if (g->ranks % g->tp != 0)
        return epo_fail(EPO_E_ARG, "tensor_parallel: found %d, allowed are divisors of %d ranks",
                        g->tp, g->ranks);
    group_digest *all = calloc((size_t)g->ranks, sizeof *all);
    if (all == NULL)
        return epo_fail(EPO_E_NOMEM, "memory: need %zu bytes for %d ranks",
                        (size_t)g->ranks * sizeof *all, g->ranks);
    epo_status status = g->ops->allgather(g->be, &mine, sizeof mine, all);
    for (int r = 1; status == EPO_OK && r < g->ranks; r++)
        if (memcmp(&all[r], &all[0], sizeof *all) != 0)
            status = epo_fail(EPO_E_PEER,
                              "the ranks disagree: rank 0 has overlap %d, dispatcher %d, chunks "
                              "%d, tensor_parallel %d, nodes %d, rank %d has %d, %d, %d, %d, %d; "
                              "give all ranks the same",
                              all[0].overlap, all[0].dispatcher, all[0].chunks, all[0].tp,
                              all[0].nodes, r, all[r].overlap, all[r].dispatcher, all[r].chunks,
                              all[r].tp, all[r].nodes);
    free(all);
    return status;
}

static void group_free(epo_group *g, bool broken) {
    if (g == NULL)
        return;
    if (g->be != NULL) {
        const epo_backend_ops *ops = g->ops;
        epo_event *events[] = {g->rows,     g->read,      g->sent,         g->done,
                               g->grad,     g->fill_done, g->kept,         g->used,
                               g->odd_grad, g->odd_used,  g->pair_done[0], g->pair_done[1],
                               g->returned, g->linked};
        if (g->link != NULL)
            ops->queue_destroy(g->be, g->link);
        if (g->odd != NULL)
            ops->queue_destroy(g->be, g->odd);
        if (g->keep != NULL)
            ops->queue_destroy(g->be, g->keep);
        if (g->fill != NULL && g->fill != g->compute)
            ops->queue_destroy(g->be, g->fill);
        if (g->comm != NULL)
            ops->queue_destroy(g->be, g->comm);
        if (g->compute != NULL)
            ops->queue_destroy(g->be, g->compute);
        g->compute = NULL;
        for (size_t i = 0; i < sizeof events / sizeof *events; i++)
            if (events[i] != NULL)
                ops->event_destroy(g->be, events[i]);
        for (int i = 0; i < EPO_CHAIN_PARTS; i++)
            if (g->part[i] != NULL)
                ops->event_destroy(g->be, g->part[i]);
        moe_wgrad_close(g);
        moe_pool_drain(g);
        ops->close(g->be, broken);
    }
    while (g->spare != NULL) {
        epo_saved *next = g->spare->next;
        free(g->spare);
        g->spare = next;
    }
    free(g->reason);
    free(g);
}

/* The others wait for this rank, or will: they end at once, with its reason. */
static void tell_failure(epo_group *g, epo_status status) {
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    g->ops->abort(g->be, status, text);
    epo_fail(status, "%s", text);
}

/* The caller's bootstrap joins the ranks of the group, which are the members. */
static epo_status tell_arguments(const epo_group_config *c, epo_status status) {
    int rank = c->members == NULL ? c->rank : 0;
    while (c->members != NULL && rank < c->nmembers && c->members[rank] != c->rank)
        rank++;
    return epo_group_card(c->bootstrap, rank, c->members == NULL ? c->ranks : c->nmembers, status);
}

epo_status moe_group_create(const epo_engine_group *given, epo_group **out) {
    if (given == NULL || out == NULL)
        return epo_fail(EPO_E_ARG, "group_create: config or out is NULL");
    epo_group_config c = EPO_GROUP_CONFIG_INIT;
    epo_status status = given->size != sizeof *given
                            ? epo_fail(EPO_E_VERSION,
                                       "epo_engine_group: found %zu bytes, this "
                                       "engine has %zu; install matching parts",
                                       given->size, sizeof *given)
                            : moe_input(&c, sizeof c, &given->config, sizeof c, "epo_group_config");
    const bool known = status == EPO_OK; /* who the others are */
    if (known)
        status = check_config(&c);
    if (c.bootstrap != NULL)
        status = tell_arguments(&c, status);
    else if (known && status != EPO_OK)
        status = refuse(&c, status);
    if (status != EPO_OK)
        return status;
    epo_group *g = calloc(1, sizeof *g);
    if (g == NULL || (g->reason = strdup(given->reason != NULL ? given->reason : "")) == NULL) {
        group_free(g, true);
        return refuse(&c, epo_fail(EPO_E_NOMEM, "memory: need %zu bytes for a group", sizeof *g));
    }
    g->object.engine = &moe_engine;
    g->ops = epo_backend_get();
    g->overlap = c.overlap == EPO_ON;
    g->delay_wgrad = c.delay_wgrad == EPO_ON;
    g->dispatcher = c.dispatcher;
    g->chunks = c.chunks;
    g->tp = c.tensor_parallel > 1 ? c.tensor_parallel : 1;
    g->alloc = c.alloc;
    g->release = c.free;
    g->alloc_ctx = c.alloc_ctx;
    g->wgrads.limit = c.wgrad_limit_bytes > 0 ? c.wgrad_limit_bytes : DEFAULT_WGRAD_LIMIT;
    status = open_backend(g, &c);
    if (status == EPO_OK)
        status = make_queues(g);
    if (status == EPO_OK) /* last: who has no group then, has told the others */
        status = agree(g);
    if (status != EPO_OK) {
        if (g->be != NULL)
            tell_failure(g, status);
        group_free(g, true);
        return status;
    }
    *out = g;
    return EPO_OK;
}

epo_status moe_group_destroy(epo_group *group) {
    if (group == NULL)
        return EPO_OK;
    const epo_status outside = moe_group_outside(group, "group_destroy");
    if (outside != EPO_OK)
        return outside;
    if (group->buffers + group->layers + group->saved > 0)
        return epo_fail(EPO_E_STATE,
                        "group_destroy: %d buffers, %d layers and %d saved passes made from the "
                        "group still exist; destroy them first",
                        group->buffers, group->layers, group->saved);
    bool broken = moe_group_ok(group) != EPO_OK;
    group_free(group, broken);
    return EPO_OK;
}

epo_status moe_group_query(const epo_group *group, epo_group_info *info) {
    if (group == NULL)
        return epo_fail(EPO_E_ARG, "group_query: group is NULL");
    const epo_backend_info *be = group->ops->info(group->be);
    epo_group_info all = {
        .size = sizeof all,
        .engine = be->engine,
        .rank = group->rank,
        .ranks = group->ranks,
        .overlap = group->overlap,
        .dispatcher = group->dispatcher,
        .delay_wgrad = group->delay_wgrad,
        .chunks = group->chunks,
        .link_gbs = be->link_gbs,
        .link_us = be->link_us,
        .reason = group->reason,
        .versions = be->versions,
    };
    return moe_output(info, &all, sizeof all, "epo_group_info");
}

epo_status moe_group_async_error(epo_group *group) {
    return group == NULL ? epo_fail(EPO_E_ARG, "group_async_error: group is NULL")
                         : moe_group_ok(group);
}

epo_status moe_group_barrier(epo_group *group) {
    if (group == NULL)
        return epo_fail(EPO_E_ARG, "group_barrier: group is NULL");
    epo_status status = moe_group_turn(group, EPO_TURN_BARRIER, NULL, moe_group_ok(group));
    return status == EPO_OK ? group->ops->barrier(group->be) : status;
}

epo_status moe_group_allreduce(epo_group *group, float *data, uint64_t count, epo_stream stream) {
    if (group == NULL)
        return epo_fail(EPO_E_ARG, "group_allreduce: group is NULL");
    epo_status status = data == NULL && count > 0
                            ? epo_fail(EPO_E_ARG, "group_allreduce: data is NULL")
                            : moe_group_ok(group);
    status = moe_group_turn(group, EPO_TURN_ALLREDUCE, NULL, status);
    return status == EPO_OK ? group->ops->allreduce(group->be, data, count, stream) : status;
}
