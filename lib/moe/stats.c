/* SPDX-License-Identifier: Apache-2.0 */
#include "moe/moe.h"

#include <string.h>
#include <time.h>

double moe_stats_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* What goes to other ranks. */
void moe_stats_exchange(epo_group *group, moe_bytes kind, const epo_segment *send, int rows,
                        int nsend) {
    const int each = group->ranks / group->ops->info(group->be)->nodes;
    for (int i = 0; i < nsend; i++) {
        uint64_t bytes = send[i].rows * send[i].row_bytes;
        const bool far = send[i].peer / each != group->rank / each;
        if (send[i].peer == group->rank)
            continue;
        if (kind == MOE_BYTES_DISPATCH && i < rows) {
            group->stats.dispatch_bytes += bytes;
            group->stats.node_dispatch_bytes += far ? bytes : 0;
        } else if (kind == MOE_BYTES_COMBINE && i < rows) {
            group->stats.combine_bytes += bytes;
            group->stats.node_combine_bytes += far ? bytes : 0;
        } else {
            group->stats.control_bytes += bytes;
        }
    }
}

epo_status moe_group_stats(epo_group *group, epo_stats *stats, int reset) {
    if (group == NULL)
        return epo_fail(EPO_E_ARG, "group_stats: group is NULL");
    epo_stats all = group->stats;
    all.size = sizeof all;
    group->ops->memory(group->be, &all.memory_bytes, &all.memory_peak);
    uint64_t replayed =
        group->ops->replay_dropped != NULL ? group->ops->replay_dropped(group->be) : 0;
    all.dropped_slots += replayed - group->replay.dropped;
    epo_status status = moe_output(stats, &all, sizeof all, "epo_stats");
    if (status == EPO_OK && reset != 0) {
        group->stats = (epo_stats){.caller_bytes = all.caller_bytes};
        group->replay.dropped = replayed;
    }
    return status;
}

epo_status moe_record_start(epo_group *group, uint64_t capacity) {
    if (group == NULL || capacity == 0)
        return epo_fail(EPO_E_ARG, "record_start: group is NULL or capacity is 0");
    return group->ops->record_start(group->be, capacity);
}

epo_status moe_record_stop(epo_group *group, const epo_interval **intervals, uint64_t *count,
                           uint64_t *dropped) {
    if (group == NULL || intervals == NULL || count == NULL)
        return epo_fail(EPO_E_ARG, "record_stop: group, intervals or count is NULL");
    uint64_t lost;
    return group->ops->record_stop(group->be, intervals, count, dropped != NULL ? dropped : &lost);
}
