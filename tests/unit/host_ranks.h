/* SPDX-License-Identifier: Apache-2.0
 *
 * host_ranks.h - runs a function as several ranks of the host backend: threads of
 * this process.  CUnit's assertions belong to the main thread, so ranks count
 * failures with EXPECT and the caller asserts the sum.
 */
#ifndef EPO_TESTS_HOST_RANKS_H
#define EPO_TESTS_HOST_RANKS_H

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/backend.h"
#include "core/status.h"

typedef struct rank_ctx {
    const epo_backend_ops *ops;
    epo_world *world;
    epo_backend *be; /* open while the function runs, unless `open` is false */
    int rank, ranks;
    double timeout_s;
    void *arg;
    void (*fn)(struct rank_ctx *c);
    bool broken; /* close as broken */
    int failures;
} rank_ctx;

#define EXPECT(c, cond)                                                                            \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            (c)->failures++;                                                                       \
            fprintf(stderr, "%s:%d: rank %d of %d: %s [%s]\n", __FILE__, __LINE__, (c)->rank,      \
                    (c)->ranks, #cond, epo_fail_text());                                           \
        }                                                                                          \
    } while (0)

static inline epo_backend_config rank_config(const rank_ctx *c) {
    epo_backend_config config = {.rank = c->rank,
                                 .ranks = c->ranks,
                                 .threads = c->world,
                                 .timeout_s = c->timeout_s,
                                 .warn_s = 1000.0};
    return config;
}

static inline void *rank_main(void *arg) {
    rank_ctx *c = arg;
    epo_backend_config config = rank_config(c);
    epo_status status = c->ops->open(&config, &c->be);
    EXPECT(c, status == EPO_OK);
    if (status != EPO_OK)
        return NULL;
    c->fn(c);
    c->ops->close(c->be, c->broken);
    return NULL;
}

/* The sum of the ranks' failures; 0 is good. */
static inline int ranks_run_limited(int ranks, double timeout_s, void (*fn)(rank_ctx *c),
                                    void *arg) {
    const epo_backend_ops *ops = epo_backend_get();
    rank_ctx ctx[16];
    pthread_t thread[16];
    epo_world *world = NULL;
    if (ranks > 16 || ops->world_create(ranks, &world) != EPO_OK)
        return 1000;
    int failures = 0;
    for (int r = 0; r < ranks; r++) {
        ctx[r] = (rank_ctx){ops, world, NULL, r, ranks, timeout_s, arg, fn, false, 0};
        if (pthread_create(&thread[r], NULL, rank_main, &ctx[r]) != 0)
            abort();
    }
    for (int r = 0; r < ranks; r++) {
        pthread_join(thread[r], NULL);
        failures += ctx[r].failures;
    }
    ops->world_destroy(world);
    return failures;
}

static inline int ranks_run(int ranks, void (*fn)(rank_ctx *c), void *arg) {
    return ranks_run_limited(ranks, 60.0, fn, arg);
}

/* A small generator with a state of its own: the same numbers everywhere. */
static inline uint32_t rng_next(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    uint32_t x = (uint32_t)(((*state >> 18) ^ *state) >> 27), r = (uint32_t)(*state >> 59);
    return x >> r | x << (-r & 31);
}
static inline uint32_t rng_below(uint64_t *state, uint32_t n) { return rng_next(state) % n; }
static inline float rng_float(uint64_t *state) {
    return (float)((double)rng_next(state) / 2147483648.0 - 1.0);
}

#endif
