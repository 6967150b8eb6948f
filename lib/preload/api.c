/* SPDX-License-Identifier: Apache-2.0
 *
 * api.c - the public entry points: check pointers, find the engine by the object,
 * call it, carry its error text over (each module has its own).
 */
#include "config.h"

#include "ep_overlap.h"

#include <stdio.h>
#include <string.h>

#include "backend/engine.h"
#include "core/group_card.h"
#include "core/status.h"
#include "preload/alive.h"
#include "preload/engine.h"
#include "preload/environment.h"
#include "preload/versioned.h"

static const epo_engine *engine_of(const void *object) {
    return ((const epo_object *)object)->engine;
}

static epo_status done(const epo_engine *engine, epo_status status) {
    return status == EPO_OK ? EPO_OK : epo_fail(status, "%s", engine->error());
}

/* The pointer without which there is no engine to ask.  What else is wrong with a
 * collective call the engine refuses, so that it can tell the peers. */
static epo_status null_arg(const char *function, const char *name) {
    return epo_fail(EPO_E_ARG, "%s: %s is NULL", function, name);
}
#define NEED(pointer)                                                                              \
    do {                                                                                           \
        if ((pointer) == NULL)                                                                     \
            return null_arg(__func__, #pointer);                                                   \
    } while (0)
/* Likewise, and it exists. */
#define NEED_A(kind, object)                                                                       \
    do {                                                                                           \
        NEED(object);                                                                              \
        const epo_status alive_ = epo_alive_check(EPO_KIND_##kind, object, __func__);              \
        if (alive_ != EPO_OK)                                                                      \
            return alive_;                                                                         \
    } while (0)
#define CALL(object, op, ...) done(engine_of(object), engine_of(object)->op(__VA_ARGS__))

/* Notes what an engine has made; without that it would be refused later. */
static epo_status made(epo_kind kind, epo_status status, void *const *out) {
    if (status == EPO_OK && out != NULL && !epo_alive_add(kind, *out))
        return epo_fail(EPO_E_NOMEM, "no memory to note an object of the program's; it is lost");
    return status;
}

/* The end of an object: of two calls one finds it.  An engine keeps it where the call did
 * not fit its state. */
static epo_status take(epo_kind kind, const void *object, const char *function) {
    epo_status status = epo_alive_check(kind, object, function);
    if (status == EPO_OK && !epo_alive_drop(kind, object))
        status = epo_alive_check(kind, object, function);
    return status;
}

static epo_status taken(epo_kind kind, epo_status status, const void *object) {
    if (status == EPO_E_STATE)
        (void)epo_alive_add(kind, object);
    return status;
}
#define DESTROY(kind, object, op)                                                                  \
    do {                                                                                           \
        if ((object) == NULL)                                                                      \
            return EPO_OK;                                                                         \
        const epo_status alive_ = take(EPO_KIND_##kind, object, __func__);                         \
        if (alive_ != EPO_OK)                                                                      \
            return alive_;                                                                         \
        const epo_engine *engine_ = engine_of(object); /* the object is gone afterwards */         \
        return taken(EPO_KIND_##kind, done(engine_, engine_->op(object)), object);                 \
    } while (0)

/* ---- library ---------------------------------------------------------- */

const char *epo_version(void) { return PACKAGE_VERSION; }

const char *epo_status_name(epo_status status) { return epo_fail_name(status); }

const char *epo_error(void) { return epo_fail_text(); }

size_t epo_dtype_size(epo_dtype type) {
    switch (type) {
    case EPO_F32: return 4;
    case EPO_BF16:
    case EPO_F16: return 2;
    }
    return 0;
}

/* ---- group ------------------------------------------------------------ */

epo_status epo_world_create(int ranks, epo_world **out) {
    return epo_world_create_on(EPO_ENGINE_AUTO, ranks, out);
}

epo_status epo_world_create_on(epo_engine_kind kind, int ranks, epo_world **out) {
    const epo_engine *engine;
    char why[EPO_ENGINE_WHY_MAX];
    NEED(out);
    if (ranks < 1)
        return epo_fail(EPO_E_ARG, "ranks: found %d, allowed is a number from 1", ranks);
    epo_status status = epo_engine_open(kind, &engine, why);
    if (status == EPO_OK)
        status = done(engine, engine->world_create(ranks, out));
    return made(EPO_KIND_WORLD, status, (void **)out);
}

void epo_world_destroy(epo_world *world) {
    if (world != NULL && take(EPO_KIND_WORLD, world, __func__) == EPO_OK)
        engine_of(world)->world_destroy(world);
}

/* Threads live in their world's engine; everything else goes by the config. */
static epo_status group_engine(const epo_group_config *c, const epo_engine **engine, char *why) {
    if (c->threads == NULL) /* a communicator is CUDA's, whatever else there is */
        return epo_engine_open(c->nccl_comm != NULL ? EPO_ENGINE_CUDA : c->engine, engine, why);
    epo_status alive = epo_alive_check(EPO_KIND_WORLD, c->threads, "epo_group_create: threads");
    if (alive != EPO_OK)
        return alive;
    const epo_engine *of_world = engine_of(c->threads);
    if (c->engine != EPO_ENGINE_AUTO) {
        epo_status status = epo_engine_open(c->engine, engine, why);
        if (status != EPO_OK)
            return status;
        if (*engine != of_world)
            return epo_fail(EPO_E_ARG,
                            "engine: found the %s engine, but the world of `threads` was made by "
                            "the %s engine; leave EPO_ENGINE_AUTO",
                            (*engine)->name, of_world->name);
    }
    *engine = of_world;
    why[0] = '\0';
    return EPO_OK;
}

static epo_status read_bootstrap(const epo_bootstrap *caller, epo_bootstrap *full) {
    epo_status status = epo_versioned_read(full, caller, sizeof *full, "bootstrap");
    if (status == EPO_OK && (full->allgather == NULL || full->barrier == NULL))
        return epo_fail(EPO_E_ARG, "bootstrap: %s is NULL, both functions are needed",
                        full->allgather == NULL ? "allgather" : "barrier");
    return status;
}

/* Where this rank stands among those that the bootstrap joins; -1: not to be told. */
static int bootstrap_rank(const epo_group_config *c, int *ranks) {
    *ranks = c->members != NULL ? c->nmembers : c->ranks;
    for (int i = 0; c->members != NULL && i < c->nmembers; i++)
        if (c->members[i] == c->rank)
            return i;
    return c->members == NULL && c->rank < c->ranks ? c->rank : -1;
}

static epo_status refuse_over_bootstrap(const epo_group_config *c, epo_status status,
                                        const char *text) {
    epo_group_config known = *c;
    const char *source;
    if (c->rank == -1 && c->ranks == -1)
        (void)epo_ranks_find(&known.rank, &known.ranks, &source);
    (void)epo_fail(status, "%s", text);
    int ranks, rank = bootstrap_rank(&known, &ranks);
    return rank >= 0 ? epo_group_card(c->bootstrap, rank, ranks, status) : status;
}

/* This rank makes no group: the others are told, if its arguments say how.  Without a bootstrap the
 * engine knows the way to them. */
static epo_status refuse_group(const epo_group_config *c, epo_status status) {
    char text[EPO_ERROR_MAX], why[EPO_ENGINE_WHY_MAX];
    epo_engine_group g = {sizeof g, *c, text};
    const epo_engine *engine;
    snprintf(text, sizeof text, "%s", epo_fail_text());
    if (c->bootstrap != NULL)
        return refuse_over_bootstrap(c, status, text);
    if (status == EPO_E_ARG && epo_environment_place(&g.config) &&
        (g.config.ranks != 1 || g.config.nccl_comm != NULL) &&
        group_engine(&g.config, &engine, why) == EPO_OK)
        (void)engine->group_refuse(&g, status);
    return epo_fail(status, "%s", text);
}

epo_status epo_group_create(const epo_group_config *config, epo_group **out) {
    epo_engine_group g = {sizeof g, EPO_GROUP_CONFIG_INIT, NULL};
    epo_bootstrap bootstrap = {sizeof bootstrap, NULL, NULL, NULL};
    const epo_engine *engine;
    char reason[EPO_REASON_MAX + EPO_ENGINE_WHY_MAX + 32], why[EPO_ENGINE_WHY_MAX];
    epo_status status = epo_versioned_read(&g.config, config, EPO_LEAST(epo_group_config, ranks),
                                           "epo_group_config");
    if (status == EPO_OK && g.config.bootstrap != NULL) {
        status = read_bootstrap(g.config.bootstrap, &bootstrap);
        g.config.bootstrap = &bootstrap;
    }
    if (status != EPO_OK)
        return status;
    if (out == NULL)
        status = null_arg(__func__, "out");
    if (status == EPO_OK)
        status = epo_environment_resolve(&g.config, reason);
    if (status == EPO_OK)
        status = group_engine(&g.config, &engine, why);
    if (status != EPO_OK)
        return refuse_group(&g.config, status);
    if (why[0] != '\0') {
        size_t used = strlen(reason);
        snprintf(reason + used, sizeof reason - used, "; %s engine: %s", engine->name, why);
    }
    g.config.engine = strcmp(engine->name, "cuda") == 0 ? EPO_ENGINE_CUDA : EPO_ENGINE_HOST;
    g.reason = reason;
    return made(EPO_KIND_GROUP, done(engine, engine->group_create(&g, out)), (void **)out);
}

epo_status epo_group_destroy(epo_group *group) { DESTROY(GROUP, group, group_destroy); }

epo_status epo_group_query(const epo_group *group, epo_group_info *info) {
    epo_group_info full = {.size = sizeof full};
    NEED_A(GROUP, group);
    epo_status status =
        epo_versioned_check(info, EPO_LEAST(epo_group_info, ranks), "epo_group_info");
    if (status == EPO_OK)
        status = CALL(group, group_query, group, &full);
    if (status == EPO_OK)
        epo_versioned_write(info, &full);
    return status;
}

epo_status epo_group_async_error(epo_group *group) {
    NEED_A(GROUP, group);
    return CALL(group, group_async_error, group);
}

epo_status epo_group_barrier(epo_group *group) {
    NEED_A(GROUP, group);
    return CALL(group, group_barrier, group);
}

epo_status epo_group_allreduce(epo_group *group, float *data, uint64_t count, epo_stream stream) {
    NEED_A(GROUP, group);
    return CALL(group, group_allreduce, group, data, count, stream);
}

epo_status epo_group_wgrad_flush(epo_group *group, epo_stream stream) {
    NEED_A(GROUP, group);
    return CALL(group, group_wgrad_flush, group, stream);
}

/* ---- buffer ----------------------------------------------------------- */

static epo_status read_buffer(const epo_buffer_config *caller, epo_buffer_config *full) {
    return epo_versioned_read(full, caller, EPO_LEAST(epo_buffer_config, type),
                              "epo_buffer_config");
}

epo_status epo_buffer_bytes(const epo_group *group, const epo_buffer_config *config,
                            uint64_t *bytes) {
    epo_buffer_config full = EPO_BUFFER_CONFIG_INIT;
    NEED_A(GROUP, group);
    NEED(bytes);
    epo_status status = read_buffer(config, &full);
    return status != EPO_OK ? status : CALL(group, buffer_bytes, group, &full, bytes);
}

epo_status epo_buffer_create(epo_group *group, const epo_buffer_config *config, epo_buffer **out) {
    epo_buffer_config full = EPO_BUFFER_CONFIG_INIT;
    NEED_A(GROUP, group);
    epo_status status = read_buffer(config, &full);
    status = CALL(group, buffer_create, group, status == EPO_OK ? &full : config, out);
    return made(EPO_KIND_BUFFER, status, (void **)out);
}

epo_status epo_buffer_destroy(epo_buffer *buffer) { DESTROY(BUFFER, buffer, buffer_destroy); }

/* ---- plan ------------------------------------------------------------- */

epo_status epo_plan_create(epo_buffer *buffer, const epo_routing *routing, epo_stream stream,
                           epo_plan **out) {
    epo_routing full = EPO_ROUTING_INIT;
    NEED_A(BUFFER, buffer);
    epo_status status =
        epo_versioned_read(&full, routing, EPO_LEAST(epo_routing, weights), "epo_routing");
    status = CALL(buffer, plan_create, buffer, status == EPO_OK ? &full : routing, stream, out);
    return made(EPO_KIND_PLAN, status, (void **)out);
}

void epo_plan_retain(epo_plan *plan) {
    if (plan != NULL && epo_alive_retain(EPO_KIND_PLAN, plan))
        engine_of(plan)->plan_retain(plan);
}

void epo_plan_release(epo_plan *plan) {
    if (plan != NULL && epo_alive_drop(EPO_KIND_PLAN, plan))
        engine_of(plan)->plan_release(plan);
}

epo_status epo_plan_rows(const epo_plan *plan, uint64_t *rows) {
    NEED_A(PLAN, plan);
    NEED(rows);
    return CALL(plan, plan_rows, plan, rows);
}

epo_status epo_plan_experts(const epo_plan *plan, uint64_t *first, uint64_t *count) {
    NEED_A(PLAN, plan);
    return CALL(plan, plan_experts, plan, first, count);
}

epo_status epo_plan_query(const epo_plan *plan, epo_plan_info *info) {
    epo_plan_info full = {.size = sizeof full};
    NEED_A(PLAN, plan);
    epo_status status = epo_versioned_check(info, EPO_LEAST(epo_plan_info, rows), "epo_plan_info");
    if (status == EPO_OK)
        status = CALL(plan, plan_query, plan, &full);
    if (status == EPO_OK)
        epo_versioned_write(info, &full);
    return status;
}

/* Row arrays may be NULL where there are no rows; the engine knows how many. */
epo_status epo_dispatch(epo_plan *plan, const void *x, void *rows, float *row_weights,
                        epo_stream stream) {
    NEED_A(PLAN, plan);
    return CALL(plan, dispatch, plan, x, rows, row_weights, stream);
}

epo_status epo_combine(epo_plan *plan, const void *rows, void *y, const float *row_dweights,
                       float *dweights, epo_stream stream) {
    NEED_A(PLAN, plan);
    return CALL(plan, combine, plan, rows, y, row_dweights, dweights, stream);
}

/* ---- layer ------------------------------------------------------------ */

epo_status epo_layer_create(epo_group *group, const epo_layer_config *config, epo_layer **out) {
    epo_layer_config full = EPO_LAYER_CONFIG_INIT;
    NEED_A(GROUP, group);
    NEED(out);
    epo_status status =
        epo_versioned_read(&full, config, EPO_LEAST(epo_layer_config, dw2), "epo_layer_config");
    if (status == EPO_OK)
        status = CALL(group, layer_create, group, &full, out);
    return made(EPO_KIND_LAYER, status, (void **)out);
}

epo_status epo_layer_destroy(epo_layer *layer) { DESTROY(LAYER, layer, layer_destroy); }

epo_status epo_layer_bytes(const epo_layer *layer, const epo_plan *plan, epo_layer_memory *out) {
    epo_layer_memory full = {.size = sizeof full};
    NEED_A(LAYER, layer);
    NEED_A(PLAN, plan);
    epo_status status =
        epo_versioned_check(out, EPO_LEAST(epo_layer_memory, backward), "epo_layer_memory");
    if (status == EPO_OK)
        status = CALL(layer, layer_bytes, layer, plan, &full);
    if (status == EPO_OK)
        epo_versioned_write(out, &full);
    return status;
}

/* A dead object is as none to the engine, which tells the peers; this rank is told which. */
static epo_status refused(epo_status alive, epo_status engine, const char *text) {
    return alive == EPO_OK ? engine : epo_fail(alive, "%s", text);
}

epo_status epo_forward(epo_layer *layer, epo_plan *plan, const void *x, void *y, epo_saved **saved,
                       epo_stream stream) {
    epo_status alive = EPO_OK;
    char text[EPO_ERROR_MAX] = "";
    if (layer != NULL && epo_alive_check(EPO_KIND_LAYER, layer, __func__) != EPO_OK) {
        alive = EPO_E_ARG;
        layer = NULL;
    }
    if (plan != NULL && epo_alive_check(EPO_KIND_PLAN, plan, __func__) != EPO_OK) {
        alive = EPO_E_ARG;
        plan = NULL;
    }
    if (alive != EPO_OK)
        snprintf(text, sizeof text, "%s", epo_fail_text());
    const void *known = layer != NULL ? (const void *)layer : (const void *)plan;
    if (known == NULL)
        return alive != EPO_OK ? alive : null_arg(__func__, "layer");
    if (layer != NULL && plan != NULL && engine_of(layer) != engine_of(plan))
        return epo_fail(EPO_E_ARG, "epo_forward: layer and plan belong to different engines");
    const epo_status status = CALL(known, forward, layer, plan, x, y, saved, stream);
    return refused(alive, made(EPO_KIND_SAVED, status, (void **)saved), text);
}

/* A saved pass is used up by the call, whatever that comes to; one that is no more is not read: the
 * engine refuses without it. */
static epo_status take_saved(epo_saved **saved) {
    if (*saved == NULL || epo_alive_drop(EPO_KIND_SAVED, *saved))
        return EPO_OK;
    *saved = NULL;
    return epo_fail(EPO_E_STATE, "backward: saved was used before, by epo_backward or "
                                 "epo_saved_release, or never made; a forward's saved serves once");
}

epo_status epo_backward(epo_layer *layer, epo_saved *saved, const void *dy, void *dx,
                        float *dweights, epo_stream stream) {
    epo_status alive = layer != NULL ? epo_alive_check(EPO_KIND_LAYER, layer, __func__) : EPO_OK;
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    if (alive != EPO_OK)
        layer = NULL;
    const epo_status used = take_saved(&saved);
    if (alive == EPO_OK && used != EPO_OK) {
        alive = used;
        snprintf(text, sizeof text, "%s", epo_fail_text());
    }
    const void *known = layer != NULL ? (const void *)layer : (const void *)saved;
    if (known == NULL)
        return alive != EPO_OK ? alive : null_arg(__func__, "saved");
    return refused(alive, CALL(known, backward, layer, saved, dy, dx, dweights, stream), text);
}

void epo_saved_release(epo_saved *saved) {
    if (saved != NULL && epo_alive_drop(EPO_KIND_SAVED, saved))
        engine_of(saved)->saved_release(saved);
}

epo_status epo_layer_wgrad_flush(epo_layer *layer, epo_stream stream) {
    NEED_A(LAYER, layer);
    return CALL(layer, layer_wgrad_flush, layer, stream);
}

epo_status epo_layer_wgrad_begin(epo_layer *layer) {
    NEED_A(LAYER, layer);
    return CALL(layer, layer_wgrad_begin, layer);
}

/* Layers of its steps; plans and saved passes may come later, in a node. */
static epo_status schedule_alive(const epo_schedule *s, const char *function) {
    epo_status status = EPO_OK;
    for (int i = 0; i < s->layers && status == EPO_OK; i++) {
        const void *of[] = {s->forward != NULL ? s->forward[i].layer : NULL,
                            s->backward != NULL ? s->backward[i].layer : NULL};
        for (int k = 0; k < 2 && status == EPO_OK; k++)
            if (of[k] != NULL)
                status = epo_alive_check(EPO_KIND_LAYER, of[k], function);
    }
    return status;
}

/* Before a run: what it takes over, and where it puts what its forward saves.  What the program
 * gives it later, in a node, stays noted: the engine knows that it was used. */
static void schedule_begin(const epo_schedule *s) {
    for (int i = 0; i < s->layers; i++) {
        if (s->forward != NULL && s->forward[i].layer != NULL)
            s->forward[i].saved = NULL;
        if (s->backward != NULL)
            (void)take_saved(&s->backward[i].saved);
    }
}

/* After it, also where it failed: passes of layers before that have their saved ones. */
static epo_status schedule_end(const epo_schedule *s, epo_status status) {
    epo_status noted = EPO_OK;
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    for (int i = 0; s->forward != NULL && i < s->layers; i++)
        if (s->forward[i].layer != NULL && s->forward[i].saved != NULL && noted == EPO_OK)
            noted = made(EPO_KIND_SAVED, EPO_OK, (void **)&s->forward[i].saved);
    return status != EPO_OK ? epo_fail(status, "%s", text) : noted;
}

epo_status epo_schedule_run(epo_group *group, const epo_schedule *schedule, epo_stream stream) {
    epo_schedule full = EPO_SCHEDULE_INIT;
    NEED_A(GROUP, group);
    epo_status status =
        epo_versioned_read(&full, schedule, EPO_LEAST(epo_schedule, ctx), "epo_schedule");
    if (status != EPO_OK)
        return CALL(group, schedule_run, group, schedule, stream);
    char text[EPO_ERROR_MAX];
    const epo_status alive = schedule_alive(&full, __func__);
    snprintf(text, sizeof text, "%s", epo_fail_text());
    if (alive != EPO_OK) /* without nodes the engine refuses, and reads no step but what is saved */
        full.node = NULL;
    schedule_begin(&full);
    status = CALL(group, schedule_run, group, &full, stream);
    return schedule_end(&full, refused(alive, status, text));
}

/* ---- figures ---------------------------------------------------------- */

epo_status epo_group_stats(epo_group *group, epo_stats *stats, int reset) {
    epo_stats full = {.size = sizeof full};
    NEED_A(GROUP, group);
    epo_status status =
        epo_versioned_check(stats, EPO_LEAST(epo_stats, backward_calls), "epo_stats");
    if (status == EPO_OK)
        status = CALL(group, group_stats, group, &full, reset);
    if (status == EPO_OK)
        epo_versioned_write(stats, &full);
    return status;
}

epo_status epo_record_start(epo_group *group, uint64_t capacity) {
    NEED_A(GROUP, group);
    return CALL(group, record_start, group, capacity);
}

epo_status epo_record_stop(epo_group *group, const epo_interval **intervals, uint64_t *count,
                           uint64_t *dropped) {
    NEED_A(GROUP, group);
    NEED(intervals);
    NEED(count);
    return CALL(group, record_stop, group, intervals, count, dropped);
}
