/* SPDX-License-Identifier: Apache-2.0 */
#include "moe/moe.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { MIN_BLOCK = 4096, ARENA_ALIGN = 64, CALLER_ALIGN = 256 };

/* Eight sizes per doubling: a routing that changes a little finds its block. */
static bool round_up(uint64_t bytes, uint64_t *out) {
    uint64_t step = MIN_BLOCK;
    while (bytes / 16 > step)
        step *= 2;
    return epo_size_align(bytes > MIN_BLOCK ? bytes : MIN_BLOCK, step, out);
}

uint64_t moe_pool_block(uint64_t bytes) {
    uint64_t size;
    return round_up(bytes, &size) ? size : UINT64_MAX;
}

/* A block of this very size: then equal passes take equal blocks, whatever came
 * between, and the second never allocates. */
static int find_idle(const moe_pool *pool, uint64_t size) {
    for (int i = pool->nidle - 1; i >= 0; i--)
        if (pool->idle[i].bytes == size)
            return i;
    return -1;
}

/* Sizes that came and went must not pile up: what lies idle stays below twice the
 * most that was ever in use at once. */
static void trim(epo_group *group) {
    moe_pool *pool = &group->pool;
    if (pool->idle_bytes / 2 > pool->busy_peak)
        moe_pool_drain(group);
}

static void count_busy(moe_pool *pool, uint64_t size) {
    pool->busy_bytes += size;
    if (pool->busy_bytes > pool->busy_peak)
        pool->busy_peak = pool->busy_bytes;
}

static void call_free(epo_group *group, void *ptr, uint64_t size) {
    const moe_within was = moe_group_out(group, MOE_IN_FREE);
    group->release(group->alloc_ctx, ptr, size);
    moe_group_back(group, was);
}

static epo_status take(epo_group *group, uint64_t size, void **out) {
    if (group->alloc == NULL)
        return group->ops->alloc(group->be, size, out);
    const moe_within was = moe_group_out(group, MOE_IN_ALLOC);
    void *ptr = group->alloc(group->alloc_ctx, size);
    moe_group_back(group, was);
    if (ptr == NULL)
        return epo_fail(EPO_E_NOMEM,
                        "rank %d: memory: need %" PRIu64 " bytes, the caller's alloc gave none",
                        group->rank, size);
    if ((uintptr_t)ptr % CALLER_ALIGN != 0) {
        call_free(group, ptr, size);
        return epo_fail(EPO_E_ARG,
                        "rank %d: the caller's alloc gave %p, allowed are multiples of %d",
                        group->rank, ptr, CALLER_ALIGN);
    }
    group->stats.caller_bytes += size;
    *out = ptr;
    return EPO_OK;
}

/* Not in use by any pass that was issued, but perhaps still by its operations: the
 * backend's free waits for them, the caller's does not. */
static void give(epo_group *group, void *ptr, uint64_t size) {
    if (group->alloc == NULL) {
        group->ops->free(group->be, ptr, size);
        return;
    }
    group->stats.caller_bytes -= size;
    call_free(group, ptr, size);
}

/* A block of the capture under way: one that an earlier call of it gave back, or a new one. */
static epo_status replay_get(epo_group *group, uint64_t size, moe_block *out) {
    moe_replay *r = &group->replay;
    void *ptr;
    for (int i = 0; i < r->count; i++)
        if (!r->list[i].busy && r->list[i].capture == r->capture &&
            r->list[i].block.bytes == size) {
            r->list[i].busy = true;
            *out = r->list[i].block;
            return EPO_OK;
        }
    if (r->count == r->room) {
        int room = r->room > 0 ? 2 * r->room : 32;
        struct moe_replay_block *more = realloc(r->list, (size_t)room * sizeof *more);
        if (more == NULL)
            return epo_fail(EPO_E_NOMEM, "memory: need room for %d blocks of a graph", room);
        r->list = more;
        r->room = room;
    }
    epo_status status = take(group, size, &ptr);
    if (status != EPO_OK)
        return status;
    *out = (moe_block){ptr, size};
    r->list[r->count++] = (struct moe_replay_block){*out, r->capture, true};
    return EPO_OK;
}

static bool replay_put(epo_group *group, const moe_block *block) {
    moe_replay *r = &group->replay;
    for (int i = 0; i < r->count; i++)
        if (r->list[i].block.ptr == block->ptr) {
            r->list[i].busy = false;
            return true;
        }
    return false;
}

static void replay_drain(epo_group *group) {
    moe_replay *r = &group->replay;
    for (int i = 0; i < r->count; i++)
        give(group, r->list[i].block.ptr, r->list[i].block.bytes);
    free(r->list);
    r->list = NULL;
    r->count = r->room = 0;
}

void moe_replay_release(epo_group *group) {
    moe_replay *r = &group->replay;
    bool busy = false;
    for (int i = 0; i < r->count; i++)
        busy = busy || r->list[i].busy;
    if (--r->plans == 0 && !busy)
        replay_drain(group);
}

epo_status moe_pool_get(epo_group *group, uint64_t bytes, moe_block *out) {
    uint64_t size;
    if (!round_up(bytes, &size))
        return epo_fail(EPO_E_NOMEM, "memory: need %" PRIu64 " bytes, which no machine has", bytes);
    if (group->replay.capture != 0)
        return replay_get(group, size, out);
    int at = find_idle(&group->pool, size);
    moe_pool *pool = &group->pool;
    if (at >= 0) {
        *out = pool->idle[at];
        pool->idle[at] = pool->idle[--pool->nidle];
        pool->idle_bytes -= size;
        count_busy(pool, size);
        return EPO_OK;
    }
    trim(group);
    void *ptr;
    epo_status status = take(group, size, &ptr);
    if (status == EPO_E_NOMEM && pool->nidle > 0) {
        moe_pool_drain(group);
        status = take(group, size, &ptr);
    }
    if (status != EPO_OK)
        return status;
    *out = (moe_block){ptr, size};
    count_busy(pool, size);
    return EPO_OK;
}

void moe_pool_put(epo_group *group, moe_block *block) {
    moe_pool *pool = &group->pool;
    if (block->ptr == NULL)
        return;
    if (replay_put(group, block)) {
        *block = (moe_block){NULL, 0};
        return;
    }
    pool->busy_bytes -= block->bytes;
    if (pool->nidle == pool->room) {
        int room = pool->room > 0 ? 2 * pool->room : 32;
        moe_block *more = realloc(pool->idle, (size_t)room * sizeof *more);
        if (more == NULL) {
            give(group, block->ptr, block->bytes);
            *block = (moe_block){NULL, 0};
            return;
        }
        pool->idle = more;
        pool->room = room;
    }
    pool->idle[pool->nidle++] = *block;
    pool->idle_bytes += block->bytes;
    *block = (moe_block){NULL, 0};
}

void moe_pool_drain(epo_group *group) {
    moe_pool *pool = &group->pool;
    if (group->compute == NULL) /* the group's end */
        replay_drain(group);
    if (group->alloc != NULL && group->compute != NULL && pool->nidle > 0)
        (void)moe_group_drain(group);
    for (int i = 0; i < pool->nidle; i++)
        give(group, pool->idle[i].ptr, pool->idle[i].bytes);
    free(pool->idle);
    pool->idle = NULL;
    pool->nidle = pool->room = 0;
    pool->idle_bytes = 0;
}

uint64_t moe_arena_add(moe_arena *arena, uint64_t count, uint64_t size) {
    uint64_t at, bytes, end = 0;
    if (!epo_size_align(arena->bytes, ARENA_ALIGN, &at) || !epo_size_mul(count, size, &bytes) ||
        !epo_size_add(at, bytes, &end)) {
        arena->failed = true;
        return 0;
    }
    arena->bytes = end;
    return at;
}

epo_status moe_arena_open(epo_group *group, moe_arena *arena) {
    if (arena->failed)
        return epo_fail(EPO_E_NOMEM, "memory: the plan's index maps need more than 64 bits count");
    epo_status status = moe_pool_get(group, arena->bytes, &arena->block);
    if (status != EPO_OK)
        return status;
    arena->cpu = arena->block.ptr;
    if (group->ops->write == NULL)
        return EPO_OK;
    arena->cpu = malloc(arena->bytes > 0 ? arena->bytes : 1);
    if (arena->cpu == NULL) {
        moe_pool_put(group, &arena->block);
        return epo_fail(EPO_E_NOMEM, "memory: need %" PRIu64 " bytes for the plan's index maps",
                        arena->bytes);
    }
    return EPO_OK;
}

epo_status moe_arena_publish(epo_group *group, moe_arena *arena, uint64_t from, uint64_t to) {
    if (group->ops->write == NULL || from >= to)
        return EPO_OK;
    if (group->replay.capture != 0)
        return group->ops->replay_write(group->be, moe_arena_op(arena, from),
                                        moe_arena_cpu(arena, from), to - from);
    return group->ops->write(group->be, moe_arena_op(arena, from), moe_arena_cpu(arena, from),
                             to - from);
}

void moe_arena_close(epo_group *group, moe_arena *arena) {
    if (arena->block.ptr != NULL && group->ops->write != NULL)
        free(arena->cpu);
    moe_pool_put(group, &arena->block);
    *arena = (moe_arena){0, false, {NULL, 0}, NULL};
}
