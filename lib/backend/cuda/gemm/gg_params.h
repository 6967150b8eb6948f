/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_params.h - what the host side of the grouped GEMM hands to its kernels.
 * Plain C, shared by gg_host.c and the .cu files.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_PARAMS_H
#define EPO_BACKEND_CUDA_GEMM_GG_PARAMS_H

#include <cuda.h>
#include <stdint.h>

#include "grouped_gemm.h"

/* Workspace, in 32-bit words from its begin: a header, then per expert of the
 * call (in the order in which units are taken) the first unit, the expert and its
 * rows; then, for SwiGLU's backward, arrivals per half row tile and the partial
 * sums of row_dweight, [column tile][row]. */
#define GG_WS_NEXT 0   /* next unit to take */
#define GG_WS_TOTAL 1  /* units */
#define GG_WS_ACTIVE 2 /* blocks at work */
#define GG_WS_HEADER 64
#define GG_MAX_EXPERTS 4096

typedef struct gg_expert {
    int32_t unit;     /* its first unit: tile or pair of tiles */
    int32_t row_tile; /* its first row tile, counted over all experts */
    int32_t expert;
    int32_t row;
    int32_t rows;
    int32_t stage, part; /* of a chain */
    int32_t pad;
} gg_expert;

/* Scalars of one call.  M, N, K are the GEMM's own dimensions: FORWARD rows x n x
 * k, DGRAD rows x k x n, WGRAD n x k x rows. */
typedef struct gg_params {
    const void *a, *b;
    void *c, *keep;
    const int32_t *a_index, *b_index;
    const float *row_weight;
    void *h, *act;
    float *row_dweight;
    const uint64_t *row_first, *row_count;
    epo_gg_ready ready;
    const volatile int *sm_limit;
    unsigned long long *spin_ns;
    uint32_t *error;
    int32_t *ws;
    gg_expert *table;  /* in ws: count entries, then an end mark */
    uint32_t *arrived; /* in ws */
    float *partial;    /* in ws */
    int64_t lda, ldb;  /* elements between rows of a, b in memory */
    int32_t kind, fuse, type, c_type, accumulate;
    int32_t m, n, k; /* 0 where it is the rows */
    int32_t first, count, experts;
    int32_t rows, a_rows, b_rows;
    int32_t tile_m, tile_n; /* of the output as the scheduler counts it */
    int32_t group_m;        /* row tiles that share a pass over the columns */
    int32_t tiles_n;
    int32_t cluster; /* blocks in a cluster, 1 or 2 */
    int32_t arrived_words;
} gg_params;

/* A chain: what is computed in which order.  Experts come in steps, which parts are
 * made of.  Round r has two shares of the table: the first stage of step r, and behind it
 * the later stages of the steps before, each one step behind the one before.  Stages: the
 * first product, backward SwiGLU, the second product. */
#define GG_STAGES 3
#define GG_STEPS 32
#define GG_SHARES (2 * (GG_STEPS + GG_STAGES - 1))
typedef struct gg_act {
    const void *h;
    const float *weight;
    void *a; /* da, then the activation */
    void *dh;
    float *dweight; /* may be NULL */
    int32_t ffn;
} gg_act;
typedef struct gg_chain_part {
    const uint64_t *flag; /* `words` of them reach `epoch` when the rows are there */
    uint64_t epoch, done_value;
    uint64_t *done;
    int32_t words;
} gg_chain_part;
typedef struct gg_direct {
    const int32_t *first, *to; /* [experts][ranks] */
    void *base[EPO_GG_RANKS];
    float *dweight[EPO_GG_RANKS];
    uint64_t *words; /* NULL: nobody is told */
    uint64_t step, value;
    const uint64_t *counter; /* NULL: 0 */
    const uint32_t *late;    /* NULL: not set */
    int32_t ranks, own;
} gg_direct;
typedef struct gg_chain {
    gg_params stage[GG_STAGES];
    gg_act act;
    gg_chain_part part[EPO_GG_PARTS];
    gg_direct direct;
    int32_t stages, parts, steps;
    int32_t first, count; /* experts of all parts */
    int32_t row_tiles;    /* that the counters have room for, per stage */
    int32_t counter_words;
    uint32_t *counters;
    uint32_t *row_done;   /* in counters: [stage but the last][row tile], tiles stored */
    uint32_t *part_done;  /* in counters: [part], tiles of the last stage */
    uint32_t *part_total; /* in counters: [part] */
    uint32_t *all_done;   /* in counters: tiles of the last stage, and how many there are */
    uint32_t *seen;       /* in counters: [part], its rows were seen */
    uint32_t *taken;      /* in counters: [share], units taken of it */
    uint32_t *share;      /* in counters: [share and one more], its first unit */
    uint64_t timeout_ns, patience_ns;
    uint64_t *left, left_value;
    const uint64_t *counter, *done_counter; /* NULL: 0 */
    int32_t arrived, hurry;
    int16_t step_first[GG_STEPS + 1]; /* experts, from `first` on */
    int8_t step_part[GG_STEPS];
} gg_chain;

/* Tensors of the sm_90 kernels: operands, output, SwiGLU's stored h, A's rows that are kept. */
typedef struct gg_maps {
    CUtensorMap a, b, c, h, keep;
} gg_maps;
typedef struct gg_chain_maps {
    gg_maps map[2];
    CUtensorMap direct[EPO_GG_RANKS];
} gg_chain_maps;

#endif
