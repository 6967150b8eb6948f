/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_plan.h - launchers of flex_plan.cu: flex's maps on the device.
 */
#ifndef EPO_BACKEND_CUDA_FLEX_PLAN_H
#define EPO_BACKEND_CUDA_FLEX_PLAN_H

#include <cuda_runtime_api.h>

#include "backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GPU_FLEX_RANKS EPO_FLEX_RANKS
#define GPU_FLEX_COLUMNS EPO_FLEX_COLUMNS

/* Rows of a rank's blocks of destinations: at a fixed stride, where windows have room for
 * the most that can come, or compact, where the caller knows everybody's counts. */
typedef struct gpu_flex_plan {
    epo_routes routes;    /* experts NULL: they are in `copy` */
    const float *weights; /* [T][K] or NULL: 1 */
    int rank, chunks;
    int stride;       /* rows of a block of destinations; 0: compact */
    int block_tokens; /* by gpu_flex_block_tokens */
    /* Scratch. */
    int32_t *copy, *place; /* [T*K] */
    uint32_t *base;        /* [blocks][columns] */
    int32_t *to, *send;    /* [T][width] */
    unsigned long long *bad;
    /* Maps. */
    int32_t *token;       /* [N]: in the order of sending */
    int32_t *sum;         /* [T][width] */
    int32_t *slot_weight; /* [T*K] or NULL */
    int width;
    /* Meta rows: to each peer's window, or, all NULL, compact to `meta`. */
    char *peer_meta[GPU_FLEX_RANKS];
    char *peer_counts[GPU_FLEX_RANKS];
    int32_t *meta;
} gpu_flex_plan;

int gpu_flex_block_tokens(int tokens);
int gpu_flex_columns(const gpu_flex_plan *p);
cudaError_t gpu_flex_count(cudaStream_t stream, const gpu_flex_plan *p);
/* Totals of the columns from `first` on, to mapped host memory. */
cudaError_t gpu_flex_totals(cudaStream_t stream, const gpu_flex_plan *p, int first, uint32_t *out);
cudaError_t gpu_flex_place(cudaStream_t stream, const gpu_flex_plan *p);
/* base, target and returns: here device memory.  *late, the device's, is set before a wait for
 * what does not come is released. */
cudaError_t gpu_flex_receive(cudaStream_t stream, const epo_flex_receive *in, const uint32_t *late);

#ifdef __cplusplus
}
#endif
#endif
