/* SPDX-License-Identifier: Apache-2.0
 *
 * moe_block.h - all of this program's use of libep_overlap: the ranks, and one
 * mixture-of-experts layer.  Read moe_block.c to see how the library is called.
 */
#ifndef EP_TRAIN_MOE_BLOCK_H
#define EP_TRAIN_MOE_BLOCK_H

#include <stddef.h>
#include <stdint.h>

#include "dense.h"
#include "ep_overlap.h"
#include "measure/device.h"

/* What the user chose; EPO_DEFAULT and 0: as the job's options say. */
typedef struct moe_switches {
    epo_engine_kind engine;
    epo_switch overlap;
    epo_dispatcher dispatcher;
    epo_switch delay_wgrad;
    int chunks;
} moe_switches;

typedef struct moe_shape {
    int experts, hidden, ffn, top_k;
    int max_tokens; /* of any rank, in one call */
    epo_dtype type; /* of rows and expert weights */
} moe_shape;

/* Where a call's arrays lie, if not where the program has them: on a GPU, or as bf16.
 * One set for all layers: a call is complete when it returns.  The program's own rows lie
 * where its dense parts run. */
typedef struct moe_staging {
    void *pack;      /* bf16 in ordinary memory; NULL with fp32 */
    void *in, *out;  /* rows where the engine reads and writes them; NULL: the caller's */
    int64_t *chosen; /* these on a GPU; NULL: the caller's */
    float *weights, *dweights;
} moe_staging;

/* The ranks, and the windows that all layers share. */
typedef struct moe_world {
    epo_group *group;
    epo_group_info info;
    epo_buffer *buffer;
    moe_shape shape;
    int local_experts;
    measure_device device;
    const char *why; /* the engine was not left to the library; NULL: it was */
    moe_staging staging;
    const dense_ops *dense; /* where the program's rows lie */
    void *dense_at;         /* NULL: in ordinary memory */
} moe_world;

/* One layer's experts on this rank.  Master weights and gradients are fp32 in ordinary
 * memory; with a GPU the layer has its own, brought up to date by moe_block_store and
 * moe_block_fetch. */
typedef struct moe_block {
    moe_world *world;
    epo_layer *layer;
    epo_plan *plan;   /* of the last route */
    epo_saved *saved; /* of the last forward */
    size_t count1, count2;
    float *w1, *w2;        /* [El][2F][H], [El][H][F] */
    float *dw1, *dw2;      /* likewise */
    void *store1, *store2; /* what the layer reads: w1, w2, or copies */
    float *grad1, *grad2;  /* what it adds to: dw1, dw2, or a GPU's */
    int tokens;
    int shared; /* the weights belong to another block */
} moe_block;

/* [collective]  Meets the ranks. */
epo_status moe_world_open(const moe_switches *switches, moe_world **out);
/* [collective]  Makes the windows; once. */
epo_status moe_world_fit(moe_world *world, const moe_shape *shape);
/* [collective]  Destroys its blocks first.  NULL is accepted. */
epo_status moe_world_close(moe_world *world);
/* [collective]  data[i] = sum over the ranks, in rank order. */
epo_status moe_world_sum(moe_world *world, float *data, size_t count);
/* [collective]  all[ranks]: every rank's value. */
epo_status moe_world_gather(moe_world *world, float mine, float *all);
epo_status moe_world_barrier(moe_world *world);
/* [collective, of the group]  Delayed weight gradients are complete afterwards. */
epo_status moe_world_flush(moe_world *world);
/* All work that was enqueued is done. */
epo_status moe_world_sync(moe_world *world);
/* Figures since the last reset. */
epo_status moe_world_stats(moe_world *world, epo_stats *stats, int reset);
/* What the engine did between the two calls; *intervals is the library's. */
epo_status moe_world_record(moe_world *world, uint64_t capacity);
epo_status moe_world_recorded(moe_world *world, const epo_interval **intervals, uint64_t *count,
                              uint64_t *dropped);

/* [collective]  Weights by seed and stream; expert e has the same weights however
 * many ranks there are. */
epo_status moe_block_create(moe_world *world, uint64_t seed, uint64_t stream, moe_block **out);
/* [collective]  The weights of `of`, gradients of its own, perhaps another world:
 * for measurements. */
epo_status moe_block_share(moe_world *world, const moe_block *of, moe_block **out);
epo_status moe_block_destroy(moe_block *block); /* NULL is accepted */
/* Rows of the last route that this rank's experts compute. */
epo_status moe_block_rows(const moe_block *block, uint64_t *rows);
/* After the master weights have changed. */
epo_status moe_block_store(moe_block *block);
/* The gradients become 0; they are in dw1 and dw2 (after a flush). */
epo_status moe_block_clear(moe_block *block);
epo_status moe_block_fetch(moe_block *block);

/* [collective]  chosen[tokens][top_k], weights likewise. */
epo_status moe_block_route(moe_block *block, int tokens, const int64_t *chosen,
                           const real *weights);
/* [collective]  y[tokens][hidden] = experts(x). */
epo_status moe_block_forward(moe_block *block, const real *x, real *y);
/* [collective]  dx is overwritten, dweights[tokens][top_k] too; dw1, dw2 are added
 * to, at once or, if delayed, by the next flush at the latest. */
epo_status moe_block_backward(moe_block *block, const real *dy, real *dx, real *dweights);
/* [collective]  The same without this program's copies, for times: rows are those of
 * the last call where the engine has them elsewhere.  May return before the end. */
epo_status moe_block_time_forward(moe_block *block, const real *x, real *y);
epo_status moe_block_time_backward(moe_block *block, const real *dy, real *dx, real *dweights);
/* As measure_trial, with the same rows there and back. */
epo_status moe_block_trial(moe_block *block, const real *rows, real *out, real *dweights);

#endif
