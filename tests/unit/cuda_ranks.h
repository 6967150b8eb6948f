/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_ranks.h - the CUDA engine's ranks as threads over the runtime in ordinary memory
 * (tests/fake/cuda_runtime.c): what every such test needs to have them meet.
 */
#ifndef EPO_TESTS_CUDA_RANKS_H
#define EPO_TESTS_CUDA_RANKS_H

#include "backend/engine.h"
#include "unit.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { CUDA_RANKS_MAX = 8 };

/* Zeroes, as aligned as the GPU's memory; the caller frees it. */
static inline void *cuda_ranks_room(size_t bytes) {
    const size_t size = (bytes / 256 + 1) * 256;
    void *p = aligned_alloc(256, size);
    if (p == NULL)
        abort();
    memset(p, 0, size);
    return p;
}

/* A world in which they meet; with chains or without, pairs: over NCCL. */
static inline epo_world *cuda_ranks_world(const epo_engine *engine, int ranks, bool chain,
                                          bool pairs) {
    epo_world *world = NULL;
    setenv("EP_OVERLAP_CUDA_PEER", pairs ? "0" : "1", 1);
    setenv("EP_OVERLAP_CUDA_CHAIN", chain ? "1" : "0", 1);
    CU_ASSERT_EQUAL_FATAL(engine->world_create(ranks, &world), EPO_OK);
    return world;
}

/* One rank's part in it: dispatcher, overlap, delay_wgrad and chunks are the caller's to set. */
static inline epo_engine_group cuda_ranks_group(epo_world *world, int rank, int ranks) {
    epo_engine_group g = {sizeof g, EPO_GROUP_CONFIG_INIT, "a test"};
    g.config.engine = EPO_ENGINE_CUDA;
    g.config.timeout_s = 100;
    g.config.rank = rank;
    g.config.ranks = ranks;
    g.config.threads = world;
    return g;
}

/* Runs them to their ends, member r of `size` bytes each, and ends the world. */
static inline void cuda_ranks_run(const epo_engine *engine, epo_world *world, int ranks,
                                  void *(*rank_main)(void *), void *members, size_t size) {
    pthread_t thread[CUDA_RANKS_MAX];
    CU_ASSERT_FATAL(ranks <= CUDA_RANKS_MAX);
    for (int r = 0; r < ranks; r++)
        CU_ASSERT_EQUAL_FATAL(
            pthread_create(&thread[r], NULL, rank_main, (char *)members + (size_t)r * size), 0);
    for (int r = 0; r < ranks; r++)
        pthread_join(thread[r], NULL);
    engine->world_destroy(world);
}

#endif
