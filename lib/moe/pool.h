/* SPDX-License-Identifier: Apache-2.0
 *
 * pool.h - memory that is kept between passes, and that of captured ones.
 */
#ifndef EPO_MOE_POOL_H
#define EPO_MOE_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "ep_overlap.h"

typedef struct moe_block {
    void *ptr; /* NULL: nothing held */
    uint64_t bytes;
} moe_block;

typedef struct moe_pool {
    moe_block *idle;
    int nidle, room;
    uint64_t idle_bytes, busy_bytes, busy_peak;
} moe_pool;

/* Memory of at least `bytes` from the pool, else from the backend. */
epo_status moe_pool_get(epo_group *group, uint64_t bytes, moe_block *out);
/* Back into the pool; an empty block is accepted. */
void moe_pool_put(epo_group *group, moe_block *block);
void moe_pool_drain(epo_group *group);
/* What an array of so many bytes takes; UINT64_MAX: more than there can be. */
uint64_t moe_pool_block(uint64_t bytes);

/* Memory of captured passes: a graph's own, so that nothing else writes it between two
 * replays.  Kept until the last captured plan is gone. */
typedef struct moe_replay {
    uint64_t capture; /* of the call under way; 0: it is not being captured */
    int plans;
    struct moe_replay_block {
        moe_block block;
        uint64_t capture;
        bool busy;
    } * list;
    int count, room;
    uint64_t dropped; /* replay_dropped when the figures were reset */
} moe_replay;
/* A captured plan is gone. */
void moe_replay_release(epo_group *group);

/* Many arrays in one block, written by the CPU, then published to operations. */
typedef struct moe_arena {
    uint64_t bytes;
    bool failed; /* sizes overflowed */
    moe_block block;
    char *cpu; /* the block itself where operation memory is ordinary memory */
} moe_arena;
/* Reserves count * size bytes; the result is an offset for the two below. */
uint64_t moe_arena_add(moe_arena *arena, uint64_t count, uint64_t size);
epo_status moe_arena_open(epo_group *group, moe_arena *arena);
static inline void *moe_arena_cpu(const moe_arena *arena, uint64_t offset) {
    return arena->cpu + offset;
}
static inline void *moe_arena_op(const moe_arena *arena, uint64_t offset) {
    return (char *)arena->block.ptr + offset;
}
/* What the CPU wrote in [from, to) becomes visible to operations. */
epo_status moe_arena_publish(epo_group *group, moe_arena *arena, uint64_t from, uint64_t to);
void moe_arena_close(epo_group *group, moe_arena *arena);

#endif
