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
    int32_t pad[3];
} gg_expert;

/* Scalars of one call.  M, N, K are the GEMM's own dimensions: FORWARD rows x n x
 * k, DGRAD rows x k x n, WGRAD n x k x rows. */
typedef struct gg_params {
    const void *a, *b;
    void *c;
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

/* Tensors of the sm_90 kernels: operands, output, SwiGLU's stored h. */
typedef struct gg_maps {
    CUtensorMap a, b, c, h;
} gg_maps;

#endif
