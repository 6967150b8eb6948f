/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_tuning.h - tile widths that were measured to be the fastest.  Written by
 * tests/gpu/gemm/tune.py; shapes that are not listed take the width that wastes
 * the fewest columns.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_TUNING_H
#define EPO_BACKEND_CUDA_GEMM_GG_TUNING_H

typedef struct gg_tuned {
    int kind, fuse, n, k;
    int tile_n, group_m, cluster;
} gg_tuned;

/* kind, fuse, n, k, tile_n, group_m, cluster */
static const gg_tuned gg_tuning[] = {
    {0, 0, 1536, 2048, 256, 8, 2},
};

#endif
