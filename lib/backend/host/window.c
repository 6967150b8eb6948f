/* SPDX-License-Identifier: Apache-2.0
 *
 * window.c - windows: memory that all ranks map.
 */
#include "config.h"

#include "backend/host/join.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- windows ------------------------------------------------------------------ */

/* A mapping that threads share; the last one returns it. */
typedef struct host_block {
    _Atomic int users;
    uint64_t bytes;
    void *base;
} host_block;

static void block_drop(host_block *block) {
    if (block == NULL || atomic_fetch_sub(&block->users, 1) != 1)
        return;
    munmap(block->base, block->bytes);
    free(block);
}

static epo_status block_create(uint64_t bytes, int users, host_block **out) {
    host_block *block = calloc(1, sizeof *block);
    if (block == NULL)
        return epo_fail(EPO_E_NOMEM, "a window: need %zu bytes, have none", sizeof *block);
    epo_status status = host_map_private(bytes, "windows of all ranks", &block->base);
    if (status != EPO_OK) {
        free(block);
        return status;
    }
    atomic_store(&block->users, users);
    block->bytes = bytes;
    *out = block;
    return EPO_OK;
}

/* Rank 0 makes it, all take part. */
static epo_status window_share_threads(epo_backend *be, epo_window *w) {
    host_block *block = NULL, *all[HOST_RANKS_MAX];
    epo_status status = be->rank == 0 ? block_create(w->mapped, be->ranks, &block) : EPO_OK;
    epo_status agreed = host_agree(be, status);
    if (agreed == EPO_OK)
        agreed = host_allgather(be, &block, sizeof block, all);
    if (agreed != EPO_OK) {
        if (block != NULL) { /* nobody else has it, or the group is broken: then it is left */
            if (!host_broken(be))
                atomic_store(&block->users, 1);
            block_drop(block);
        }
        return agreed;
    }
    w->block = all[0];
    w->base = all[0]->base;
    return EPO_OK;
}

static epo_status window_share_processes(epo_backend *be, epo_window *w) {
    void *base;
    epo_status status = host_memfile_share(be, w->mapped, &base);
    if (status == EPO_OK)
        w->base = base;
    return status;
}

epo_status host_window_create(epo_backend *be, uint64_t bytes, epo_window **out) {
    uint64_t sizes[HOST_RANKS_MAX];
    epo_status status = host_allgather(be, &bytes, sizeof bytes, sizes);
    if (status != EPO_OK)
        return status;
    for (int r = 1; r < be->ranks; r++)
        if (sizes[r] != sizes[0])
            return epo_fail(EPO_E_PEER,
                            "a window is symmetric: rank 0 asks for %llu bytes, rank %d for %llu",
                            (unsigned long long)sizes[0], r, (unsigned long long)sizes[r]);
    if (bytes == 0 || bytes > INT64_MAX / (uint64_t)be->ranks - HOST_PAGE)
        return epo_fail(EPO_E_NOMEM,
                        "windows of all ranks: need %d times %llu bytes, have at most %lld",
                        be->ranks, (unsigned long long)bytes, (long long)INT64_MAX);
    epo_window *w = calloc(1, sizeof *w);
    status = host_agree(
        be, w != NULL ? EPO_OK
                      : epo_fail(EPO_E_NOMEM, "a window: need %zu bytes, have none", sizeof *w));
    if (status == EPO_OK) {
        w->rank = be->rank;
        w->bytes = bytes;
        w->stride = (bytes + HOST_PAGE - 1) / HOST_PAGE * HOST_PAGE;
        w->mapped = w->stride * (uint64_t)be->ranks;
        status = be->join != NULL ? window_share_processes(be, w) : window_share_threads(be, w);
    }
    if (status != EPO_OK) {
        free(w);
        return status;
    }
    host_memory_count(be, (int64_t)w->stride);
    *out = w;
    return EPO_OK;
}

void host_window_destroy(epo_backend *be, epo_window *window) {
    if (window == NULL)
        return;
    host_workers_settle(be); /* after an error nobody has waited for what writes it */
    if (window->block != NULL)
        block_drop(window->block);
    else
        munmap(window->base, window->mapped);
    host_memory_count(be, -(int64_t)window->stride);
    free(window);
}

void *host_window_local(epo_window *window) {
    return window->base + (uint64_t)window->rank * window->stride;
}
