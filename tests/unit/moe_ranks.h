/* SPDX-License-Identifier: Apache-2.0
 *
 * moe_ranks.h - runs a case through the engine's table with ranks as threads.
 * CUnit's assertions belong to the main thread: ranks count failures.
 */
#ifndef EPO_TESTS_MOE_RANKS_H
#define EPO_TESTS_MOE_RANKS_H

#include <stdio.h>

#include "backend/engine.h"
#include "configs.h"
#include "moe_reference.h"

typedef struct moe_rank moe_rank;
struct moe_rank {
    const epo_engine *engine;
    epo_world *world;
    int rank, ranks;    /* in the group */
    const int *members; /* [ranks] of a world of `all`; NULL: all of it */
    int all;
    double timeout_s;
    void *arg;
    int failures;
};

#define EXPECT(c, cond)                                                                            \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            (c)->failures++;                                                                       \
            fprintf(stderr, "%s:%d: rank %d of %d: %s [%s]\n", __FILE__, __LINE__, (c)->rank,      \
                    (c)->ranks, #cond, (c)->engine->error());                                      \
        }                                                                                          \
    } while (0)

/* fn on `ranks` threads; the sum of their failures. */
int moe_ranks(int ranks, double timeout_s, void (*fn)(moe_rank *c), void *arg);

typedef struct moe_how {
    epo_dispatcher dispatcher;
    int overlap, delay, chunks;
    epo_dtype wgrad_type;
    int align;
    uint64_t wgrad_limit; /* 0: the default */
    bool in_place;        /* dx is dy */
    bool own;             /* experts are a function of the test's; fp32 */
    epo_saved_mode saved;
    int tp;                          /* tensor_parallel */
    const epo_group_config *memory;  /* alloc and free of these; alloc_ctx: [rank] */
    int fail_call;                   /* not 0: its n-th call fails, on rank 0 */
    const epo_buffer_config *limits; /* capacity, overflow, padding, wire; NULL: none */
    bool fresh;  /* the first backward's weight gradients take the place of NaN */
    bool paired; /* a batch's forward beside the backward of the one before, by schedule_run */
} moe_how;

/* A group for `how`; NULL after a failure, which is counted. */
epo_group *moe_rank_group(moe_rank *c, const moe_how *how);

/* What the engine gave, in the types it gave it. */
typedef struct moe_result {
    void *y[CASE_BATCHES][CASE_RANKS], *dx[CASE_BATCHES][CASE_RANKS];
    float *dweights[CASE_BATCHES][CASE_RANKS];
    void *dw1, *dw2; /* of all experts */
    epo_stats stats[CASE_RANKS];
    int ready[CASE_RANKS]; /* callbacks in order */
    int calls[CASE_RANKS]; /* of experts of the test's */
} moe_result;

/* Forward and backward of all batches (f0 f1 b0 f2 b1 ...), then flush.  Outputs
 * hold NaN before.  Returns the ranks' failures. */
int moe_run(const moe_case *c, const moe_how *how, moe_result *out);
/* Several groups at once in one world: case g on the ranks members[g], in that order. */
int moe_run_groups(int groups, const moe_case *c, const moe_how *how,
                   const int (*members)[CASE_RANKS], moe_result *out);
void moe_result_free(moe_result *r);

/* The largest error of any element relative to the tensor's largest value (or to
 * its largest sum of magnitudes), over all tensors; infinite if a value is not
 * finite. */
double moe_error(const moe_case *c, const moe_how *how, const moe_result *r, const moe_answer *a,
                 bool by_terms);
/* Are all outputs the same, bit for bit? */
bool moe_same(const moe_case *c, const moe_how *how, const moe_result *a, const moe_result *b);

/* Runs the case; true: no failure, and an error below `bound`.  Else it says what was run. */
bool moe_right(const moe_case *c, const moe_how *how, const moe_answer *answer, double bound,
               bool by_terms, moe_result *out);
/* As moe_same; says where they differ. */
bool moe_agrees(const moe_case *c, const moe_how *how, const moe_result *serial,
                const moe_result *out);
/* Property tests: `one` for each of so many seeds, from the environment's EPO_ROUNDS and
 * EPO_SEED if they are there; what was tried is printed. */
bool moe_rounds(uint64_t rounds, bool (*one)(uint64_t seed));

/* floats to a new array of `type` and back. */
void *moe_pack(const float *v, size_t count, epo_dtype type);
float moe_unpack(const void *v, size_t i, epo_dtype type);

#endif
