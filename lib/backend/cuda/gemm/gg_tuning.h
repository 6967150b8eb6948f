/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_tuning.h - tile width, row tiles that pass over the columns together and
 * cluster, as measured.  Written by tests/gpu/gemm/tune.py; shapes that are not listed take the
 * width that wastes the fewest columns.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_TUNING_H
#define EPO_BACKEND_CUDA_GEMM_GG_TUNING_H

typedef struct gg_tuned {
    int kind, fuse, n, k;
    int tile_n, group_m, cluster;
} gg_tuned;

/* kind, fuse, n, k, tile_n, group_m, cluster */
static const gg_tuned gg_tuning[] = {
    /* Qwen3-30B-A3B */
    {0, 0, 1536, 2048, 256, 8, 2},
    {0, 1, 1536, 2048, 256, 4, 2},
    {0, 0, 2048, 768, 256, 8, 2},
    {1, 0, 2048, 768, 256, 4, 2},
    {1, 1, 2048, 768, 192, 16, 2},
    {1, 0, 1536, 2048, 256, 8, 2},
    {2, 0, 1536, 2048, 256, 2, 2},
    {2, 0, 2048, 768, 256, 16, 2},
    /* DeepSeek-V3 */
    {0, 0, 4096, 7168, 256, 4, 2},
    {0, 1, 4096, 7168, 256, 4, 1},
    {0, 0, 7168, 2048, 256, 4, 2},
    {1, 0, 7168, 2048, 256, 8, 2},
    {1, 1, 7168, 2048, 192, 8, 2},
    {1, 0, 4096, 7168, 256, 16, 2},
    {2, 0, 4096, 7168, 256, 2, 2},
    {2, 0, 7168, 2048, 256, 4, 2},
    /* Mixtral-8x7B */
    {0, 0, 28672, 4096, 192, 16, 2},
    {0, 1, 28672, 4096, 256, 16, 2},
    {0, 0, 4096, 14336, 256, 16, 2},
    {1, 0, 4096, 14336, 256, 4, 1},
    {1, 1, 4096, 14336, 192, 8, 2},
    {1, 0, 28672, 4096, 256, 16, 1},
    {2, 0, 28672, 4096, 256, 2, 2},
    {2, 0, 4096, 14336, 256, 8, 2},
    /* gpt-oss */
    {0, 0, 5760, 2880, 192, 8, 1},
    {0, 1, 5760, 2880, 192, 4, 1},
    {0, 0, 2880, 2880, 192, 16, 2},
    {1, 0, 2880, 2880, 192, 2, 2},
    {1, 1, 2880, 2880, 192, 4, 2},
    {1, 0, 5760, 2880, 192, 2, 2},
    {2, 0, 5760, 2880, 192, 4, 1},
    {2, 0, 2880, 2880, 192, 2, 2},
};

#endif
