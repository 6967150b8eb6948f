/* SPDX-License-Identifier: Apache-2.0
 *
 * engine.h - the ABI between libep_overlap.so and an engine module
 * (engine_host.so, engine_cuda.so), which it opens at first use.
 *
 * A module exports one function, epo_engine_entry.  The table it returns is
 * checked by size, ABI number and version before any call: a library never runs
 * an engine of another build.  Every object that crosses this line begins with a
 * pointer to its engine (struct epo_object), which is how an entry point of the
 * API finds the function to call.
 */
#ifndef EPO_BACKEND_ENGINE_H
#define EPO_BACKEND_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#include "ep_overlap.h"

#define EPO_ENGINE_ABI 1u
#define EPO_ENGINE_ENTRY "epo_engine_entry"

struct epo_engine;
typedef struct epo_object {
    const struct epo_engine *engine;
} epo_object;

/* What the API library decided before it opened the engine: no field is
 * "default" any more.  `reason` is copied. */
typedef struct epo_engine_group {
    size_t size;
    epo_group_config config;
    const char *reason;
} epo_engine_group;

typedef struct epo_engine {
    size_t size;
    uint32_t abi;
    const char *version; /* PACKAGE_VERSION of the build */
    const char *name;    /* "host", "cuda" */
    const char *(*error)(void);

    epo_status (*world_create)(int ranks, epo_world **out);
    void (*world_destroy)(epo_world *world);

    epo_status (*group_create)(const epo_engine_group *config, epo_group **out);
    /* The API library has refused it, as `reason` says: where the config's place is right, those
     * who wait for this rank are told.  Returns `wrong`. */
    epo_status (*group_refuse)(const epo_engine_group *config, epo_status wrong);
    epo_status (*group_destroy)(epo_group *group);
    epo_status (*group_query)(const epo_group *group, epo_group_info *info);
    epo_status (*group_async_error)(epo_group *group);
    epo_status (*group_barrier)(epo_group *group);
    epo_status (*group_allreduce)(epo_group *group, float *data, uint64_t count, epo_stream stream);
    epo_status (*group_wgrad_flush)(epo_group *group, epo_stream stream);
    epo_status (*group_stats)(epo_group *group, epo_stats *stats, int reset);
    epo_status (*record_start)(epo_group *group, uint64_t capacity);
    epo_status (*record_stop)(epo_group *group, const epo_interval **intervals, uint64_t *count,
                              uint64_t *dropped);

    epo_status (*buffer_bytes)(const epo_group *group, const epo_buffer_config *config,
                               uint64_t *bytes);
    epo_status (*buffer_create)(epo_group *group, const epo_buffer_config *config,
                                epo_buffer **out);
    epo_status (*buffer_destroy)(epo_buffer *buffer);

    epo_status (*plan_create)(epo_buffer *buffer, const epo_routing *routing, epo_stream stream,
                              epo_plan **out);
    void (*plan_retain)(epo_plan *plan);
    void (*plan_release)(epo_plan *plan);
    epo_status (*plan_rows)(const epo_plan *plan, uint64_t *rows);
    epo_status (*plan_experts)(const epo_plan *plan, uint64_t *first, uint64_t *count);
    epo_status (*plan_query)(const epo_plan *plan, epo_plan_info *info);
    epo_status (*dispatch)(epo_plan *plan, const void *x, void *rows, float *row_weights,
                           epo_stream stream);
    epo_status (*combine)(epo_plan *plan, const void *rows, void *y, const float *row_dweights,
                          float *dweights, epo_stream stream);

    epo_status (*layer_create)(epo_group *group, const epo_layer_config *config, epo_layer **out);
    epo_status (*layer_destroy)(epo_layer *layer);
    epo_status (*layer_bytes)(const epo_layer *layer, const epo_plan *plan, epo_layer_memory *out);
    epo_status (*layer_wgrad_flush)(epo_layer *layer, epo_stream stream);
    epo_status (*layer_wgrad_begin)(epo_layer *layer);
    epo_status (*forward)(epo_layer *layer, epo_plan *plan, const void *x, void *y,
                          epo_saved **saved, epo_stream stream);
    epo_status (*backward)(epo_layer *layer, epo_saved *saved, const void *dy, void *dx,
                           float *dweights, epo_stream stream);
    void (*saved_release)(epo_saved *saved);
    epo_status (*schedule_run)(epo_group *group, const epo_schedule *schedule, epo_stream stream);
} epo_engine;

/* Exported by every engine module.  `abi` is what the caller was built with; NULL
 * if the module cannot serve it. */
EPO_API const epo_engine *epo_engine_entry(uint32_t abi);

#endif
