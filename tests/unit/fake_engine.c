/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_engine.c - linked into test_api, and built as modules that are wrong in one
 * thing each (FAKE_ABI, FAKE_VERSION, FAKE_SIZE, FAKE_NAME, FAKE_NULL) for
 * test_api_open.
 */
#include "config.h"

#include "fake_engine.h"

#include <stdio.h>
#include <string.h>

#ifndef FAKE_ABI
#define FAKE_ABI EPO_ENGINE_ABI
#endif
#ifndef FAKE_VERSION
#define FAKE_VERSION PACKAGE_VERSION
#endif
#ifndef FAKE_SIZE
#define FAKE_SIZE sizeof(epo_engine)
#endif
#ifndef FAKE_NAME
#define FAKE_NAME "host"
#endif

fake_state fake;
static const epo_engine table;

struct epo_world {
    epo_object object;
};
struct epo_group {
    epo_object object;
};
struct epo_buffer {
    epo_object object;
};
struct epo_plan {
    epo_object object;
};
struct epo_layer {
    epo_object object;
};
struct epo_saved {
    epo_object object;
};
#define FAKE_OBJECT(kind)                                                                          \
    epo_##kind *fake_##kind(void) {                                                                \
        static epo_##kind it;                                                                      \
        it.object.engine = &table;                                                                 \
        return &it;                                                                                \
    }
FAKE_OBJECT(world)
FAKE_OBJECT(group)
FAKE_OBJECT(buffer)
FAKE_OBJECT(plan)
FAKE_OBJECT(layer)
FAKE_OBJECT(saved)

static epo_status note(const char *name) {
    fake.last = name;
    fake.calls++;
    return fake.fail;
}
#define NOTE() note(__func__)
/* Hands an object out, on success only. */
#define GIVE(object)                                                                               \
    do {                                                                                           \
        epo_status status_ = NOTE();                                                               \
        if (status_ == EPO_OK && out != NULL)                                                      \
            *out = (object);                                                                       \
        return status_;                                                                            \
    } while (0)

static const char *fake_error(void) { return "the engine's own words"; }

static epo_status world_create(int ranks, epo_world **out) {
    (void)ranks;
    GIVE(fake_world());
}
static void world_destroy(epo_world *w) { (void)w, (void)NOTE(); }
static epo_status group_create(const epo_engine_group *c, epo_group **out) {
    fake.group = *c;
    snprintf(fake.reason, sizeof fake.reason, "%s", c->reason);
    if (c->config.bootstrap != NULL)
        fake.bootstrap = *c->config.bootstrap;
    GIVE(fake_group());
}
static epo_status group_refuse(const epo_engine_group *c, epo_status wrong) {
    fake.group = *c;
    snprintf(fake.reason, sizeof fake.reason, "%s", c->reason);
    fake.refusals++;
    return fake.refused = wrong;
}
static epo_status group_destroy(epo_group *g) { return (void)g, NOTE(); }
static epo_status group_query(const epo_group *g, epo_group_info *info) {
    (void)g;
    info->engine = "host";
    info->rank = 3;
    info->ranks = 7;
    info->versions = "fake";
    return NOTE();
}
static epo_status group_async_error(epo_group *g) { return (void)g, NOTE(); }
static epo_status group_barrier(epo_group *g) { return (void)g, NOTE(); }
static epo_status group_allreduce(epo_group *g, float *d, uint64_t n, epo_stream s) {
    return (void)g, (void)d, (void)n, (void)s, NOTE();
}
static epo_status group_wgrad_flush(epo_group *g, epo_stream s) { return (void)g, (void)s, NOTE(); }
static epo_status group_stats(epo_group *g, epo_stats *stats, int reset) {
    (void)g, (void)reset;
    stats->forward_calls = 11;
    stats->backward_calls = 12;
    stats->call_s = 1.5;
    return NOTE();
}
static epo_status record_start(epo_group *g, uint64_t n) { return (void)g, (void)n, NOTE(); }
static epo_status record_stop(epo_group *g, const epo_interval **i, uint64_t *n, uint64_t *d) {
    return (void)g, (void)i, (void)n, (void)d, NOTE();
}
static epo_status buffer_bytes(const epo_group *g, const epo_buffer_config *c, uint64_t *bytes) {
    (void)g;
    fake.buffer = *c;
    *bytes = 4096;
    return NOTE();
}
static epo_status buffer_create(epo_group *g, const epo_buffer_config *c, epo_buffer **out) {
    (void)g;
    if (c != NULL)
        fake.buffer = *c;
    GIVE(fake_buffer());
}
static epo_status buffer_destroy(epo_buffer *b) { return (void)b, NOTE(); }
static epo_status plan_create(epo_buffer *b, const epo_routing *r, epo_stream s, epo_plan **out) {
    (void)b, (void)s;
    if (r != NULL)
        fake.routing = *r;
    GIVE(fake_plan());
}
static void plan_retain(epo_plan *p) { (void)p, (void)NOTE(); }
static void plan_release(epo_plan *p) { (void)p, (void)NOTE(); }
static epo_status plan_rows(const epo_plan *p, uint64_t *rows) {
    return (void)p, (void)rows, NOTE();
}
static epo_status plan_experts(const epo_plan *p, uint64_t *first, uint64_t *count) {
    return (void)p, (void)first, (void)count, NOTE();
}
static epo_status plan_query(const epo_plan *p, epo_plan_info *info) {
    info->rows = 13;
    info->pad_rows = 14;
    return (void)p, NOTE();
}
static epo_status dispatch(epo_plan *p, const void *x, void *rows, float *w, epo_stream s) {
    return (void)p, (void)x, (void)rows, (void)w, (void)s, NOTE();
}
static epo_status combine(epo_plan *p, const void *rows, void *y, const float *rd, float *d,
                          epo_stream s) {
    return (void)p, (void)rows, (void)y, (void)rd, (void)d, (void)s, NOTE();
}
static epo_status layer_create(epo_group *g, const epo_layer_config *c, epo_layer **out) {
    (void)g;
    fake.layer = *c;
    GIVE(fake_layer());
}
static epo_status layer_destroy(epo_layer *l) { return (void)l, NOTE(); }
static epo_status layer_bytes(const epo_layer *l, const epo_plan *p, epo_layer_memory *out) {
    out->saved = 21;
    return (void)l, (void)p, NOTE();
}
static epo_status layer_wgrad_flush(epo_layer *l, epo_stream s) { return (void)l, (void)s, NOTE(); }
static epo_status layer_wgrad_begin(epo_layer *l) { return (void)l, NOTE(); }
static epo_status forward(epo_layer *l, epo_plan *p, const void *x, void *y, epo_saved **saved,
                          epo_stream s) {
    (void)l, (void)p, (void)x, (void)y, (void)s;
    const epo_status status = NOTE();
    if (status == EPO_OK && saved != NULL)
        *saved = fake_saved();
    return status;
}
static epo_status backward(epo_layer *l, epo_saved *saved, const void *dy, void *dx, float *dw,
                           epo_stream s) {
    return (void)l, (void)saved, (void)dy, (void)dx, (void)dw, (void)s, NOTE();
}
static void saved_release(epo_saved *saved) { (void)saved, (void)NOTE(); }
static epo_status schedule_run(epo_group *g, const epo_schedule *s, epo_stream stream) {
    return (void)g, (void)s, (void)stream, NOTE();
}

static const epo_engine table = {
    .size = FAKE_SIZE,
    .abi = FAKE_ABI,
    .version = FAKE_VERSION,
    .name = FAKE_NAME,
    .error = fake_error,
    .world_create = world_create,
    .world_destroy = world_destroy,
    .group_create = group_create,
    .group_refuse = group_refuse,
    .group_destroy = group_destroy,
    .group_query = group_query,
    .group_async_error = group_async_error,
    .group_barrier = group_barrier,
    .group_allreduce = group_allreduce,
    .group_wgrad_flush = group_wgrad_flush,
    .group_stats = group_stats,
    .record_start = record_start,
    .record_stop = record_stop,
    .buffer_bytes = buffer_bytes,
    .buffer_create = buffer_create,
    .buffer_destroy = buffer_destroy,
    .plan_create = plan_create,
    .plan_retain = plan_retain,
    .plan_release = plan_release,
    .plan_rows = plan_rows,
    .plan_experts = plan_experts,
    .plan_query = plan_query,
    .dispatch = dispatch,
    .combine = combine,
    .layer_create = layer_create,
    .layer_destroy = layer_destroy,
    .layer_bytes = layer_bytes,
    .layer_wgrad_flush = layer_wgrad_flush,
    .layer_wgrad_begin = layer_wgrad_begin,
    .forward = forward,
    .backward = backward,
    .saved_release = saved_release,
    .schedule_run = schedule_run,
};

const epo_engine *epo_engine_entry(uint32_t abi) {
#ifdef FAKE_NULL
    return (void)abi, NULL;
#else
    return (void)abi, &table;
#endif
}
