/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_side.h - one rank of the programs around flex's kernels: its memory, its plan, and
 * the calls that are checked and timed.
 */
#ifndef EPO_TESTS_FLEX_SIDE_H
#define EPO_TESTS_FLEX_SIDE_H

#include "gpu_test.h"

#include "backend/cuda/flex.h"
#include "backend/cuda/kernels.h"
#include "backend/route.h"
#include "backend/route_flex_step.h"

#include <pthread.h>

enum { RANKS = 8, COPY = 64 << 20 };

typedef struct shape {
    int ranks, tokens[RANKS], most, hidden, experts, top_k, align, blocks;
    epo_dtype type;
    uint64_t seed;
} shape;

typedef struct side {
    int rank, device;
    const shape *sh;
    cudaStream_t stream;
    cudaEvent_t start, end;
    gpu_flex f;
    gpu_flex_plan plan;
    char *window;
    void *x, *rows, *z, *y;
    int64_t *experts;
    float *weights;
    unsigned *late; /* mapped */
    char *far;      /* COPY bytes, of the peer */
    int64_t *routing;
    float *router;
    int32_t arrived[RANKS]; /* rows of each source, once prepared */
} side;

extern pthread_barrier_t together;
extern side sides[RANKS];
extern int devices;

typedef enum step {
    PLAN_PUSH, /* plan, counts, push of all rows, arrival */
    PUSH,      /* push and arrival, the own rows stay */
    PUSH_ALL,  /* with own rows */
    PUSH_EXPAND,
    FP8,    /* push, expand */
    EXPAND, /* alone, no waiting */
    DISPATCH,
    COMBINE,
    FP8_PUSH,
    COPY_STORES,
    COPY_ENGINE,
    STORES_ROWS, /* the same rows by 16-byte stores */
    COPY_BULK,   /* as COPY_STORES, by bulk copies */
    SUMS,        /* peers' rows of the combine alone, as the layer's exchange sends them */
    STEPS
} step;
uint64_t most_rows(const shape *sh);
void side_make(side *s, int rank, const shape *sh);
/* When all have been made. */
void side_meet(side *s);
void side_free(side *s);
void issue(side *s, step what);
/* [collective]  Flags begin again. */
void flags_zero(side *s);
/* [collective]  A plan and its maps, one whole way, for what comes after. */
void prepare(side *s);
void *fetch(const void *device, uint64_t bytes);

/* ---- flex_check.c, each on all ranks ---- */

void case_run(side *s, int number);
void repeat_run(side *s);
void late_run(side *s);

#endif
