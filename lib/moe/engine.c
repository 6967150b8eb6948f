/* SPDX-License-Identifier: Apache-2.0
 *
 * engine.c - the table that an engine module hands to libep_overlap.so.
 */
#include "config.h"
#include "moe/moe.h"

const epo_engine moe_engine = {
    .size = sizeof(epo_engine),
    .abi = EPO_ENGINE_ABI,
    .version = PACKAGE_VERSION,
    .name = EPO_ENGINE_NAME,
    .error = epo_fail_text,
    .world_create = moe_world_create,
    .world_destroy = moe_world_destroy,
    .group_create = moe_group_create,
    .group_refuse = moe_group_refuse,
    .group_destroy = moe_group_destroy,
    .group_query = moe_group_query,
    .group_async_error = moe_group_async_error,
    .group_barrier = moe_group_barrier,
    .group_allreduce = moe_group_allreduce,
    .group_wgrad_flush = moe_group_wgrad_flush,
    .group_stats = moe_group_stats,
    .record_start = moe_record_start,
    .record_stop = moe_record_stop,
    .buffer_bytes = moe_buffer_bytes,
    .buffer_create = moe_buffer_create,
    .buffer_destroy = moe_buffer_destroy,
    .plan_create = moe_plan_create,
    .plan_retain = moe_plan_retain,
    .plan_release = moe_plan_release,
    .plan_rows = moe_plan_rows,
    .plan_experts = moe_plan_experts,
    .plan_query = moe_plan_query,
    .dispatch = moe_dispatch,
    .combine = moe_combine,
    .layer_create = moe_layer_create,
    .layer_destroy = moe_layer_destroy,
    .layer_bytes = moe_layer_bytes,
    .layer_wgrad_flush = moe_layer_wgrad_flush,
    .layer_wgrad_begin = moe_layer_wgrad_begin,
    .forward = moe_forward,
    .backward = moe_backward,
    .saved_release = moe_saved_release,
    .schedule_run = moe_schedule_run,
};

const epo_engine *epo_engine_entry(uint32_t abi) {
    return abi == EPO_ENGINE_ABI ? &moe_engine : NULL;
}
