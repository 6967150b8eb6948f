/* SPDX-License-Identifier: Apache-2.0
 *
 * flex.h - flex on the device without the CPU: plan, push, expand, sum.
 *
 * One window per rank, the same layout everywhere, with a block of max_tokens rows for
 * every source, so that a sender needs nobody's counts to know where its rows go.
 * Kernels take peers' addresses as a plain array.
 *
 *   plan      counts by block of tokens, prefix, places (flex_plan.cu); counts and
 *             meta rows go to the peers' windows
 *   push      every token row once to each rank that has an expert for it
 *   expand    arrived rows to aligned expert-major rows, and the maps for later
 *   dispatch  both with a plan that is known already, reading every row once
 *   combine   sum of a row's experts, back to its owner, final sum there
 *
 * Flags are words in the window, one for each block of the sender's grid: [R]
 * [GPU_FLEX_BLOCKS], epochs that only grow.  A wait that lasts longer than limit_ns ends
 * the kernel and leaves 1 + the late rank and the phase in *late.
 */
#ifndef EPO_BACKEND_CUDA_FLEX_H
#define EPO_BACKEND_CUDA_FLEX_H

#include <cuda_runtime_api.h>

#include "backend/backend.h"
#include "backend/cuda/flex_plan.h"
#include "backend/cuda/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GPU_FLEX_BLOCKS 64 /* thread blocks of a kernel that raises flags */

/* Offsets of the parts of every rank's window. */
typedef struct gpu_flex_window {
    uint64_t arrive, credit, back_arrive, back_credit; /* flags */
    uint64_t counts;                                   /* [R][El + 2n] u32 */
    uint64_t meta;                                     /* [R][max_tokens][words] */
    uint64_t rows, back;                               /* [R][max_tokens][row_bytes] */
    uint64_t bytes;
} gpu_flex_window;

typedef struct gpu_flex {
    char *peer[GPU_FLEX_RANKS]; /* windows as this rank sees them */
    gpu_flex_window at;
    int rank, ranks, local, top_k, width, tokens, max_tokens, align;
    uint32_t row_bytes;
    uint32_t wire_bytes; /* of a row in the window: row_bytes, or gpu_flex_wire8's */
    epo_dtype type;
    uint64_t epoch;  /* of this use: 1, 2, ... */
    int blocks;      /* of every rank's grids */
    int tile, shape; /* bytes of a row at a time; combine's blocks; 0: as measured best */
    uint64_t limit_ns;
    unsigned *late;             /* mapped host memory: [2] */
    const int32_t *sum, *token; /* of the plan */
    /* The receiver's maps, made by expand. */
    int32_t *fan;           /* [R*max_tokens][K] */
    int32_t *rows_of;       /* [R] arrived rows of each source */
    int32_t *first, *count; /* [El], first[El] = all rows */
    float *weight;          /* [rows] */
    int32_t capacity;       /* expert-major rows that fit */
} gpu_flex;

gpu_flex_window gpu_flex_lay_out(int ranks, int local, int top_k, int max_tokens,
                                 uint32_t row_bytes);
/* This device, rows of a multiple of 16 bytes, sizes within the limits above. */
bool gpu_flex_served(const gpu_flex *f);

/* What a wait was for: late[1]. */
enum { GPU_FLEX_LATE_SLOT = 1, GPU_FLEX_LATE_ROWS, GPU_FLEX_LATE_BACK_SLOT, GPU_FLEX_LATE_BACK };

/* Each needs what `served` says and maps of one chunk, else cudaErrorNotSupported.
 *
 *   push      x[T]; `own`: this rank's own rows to its own window too, else expand reads
 *             them from x
 *   arrived   for a reader of rank-major rows, in expand's place
 *   expand    makes the receiver's maps too; x: NULL where push wrote the own rows
 *   dispatch  with maps that a call of expand made before
 *   combine   with the same maps
 */
cudaError_t gpu_flex_push(cudaStream_t stream, const gpu_flex *f, const void *x, bool own);
/* One block: all rows of a push have come; the layout (first, count, rows_of) is made, and
 * the slot given back. */
cudaError_t gpu_flex_arrived(cudaStream_t stream, const gpu_flex *f);
cudaError_t gpu_flex_expand(cudaStream_t stream, const gpu_flex *f, const void *x, void *rows);
cudaError_t gpu_flex_dispatch(cudaStream_t stream, const gpu_flex *f, const void *x, void *rows);
/* Rows in e4m3 with a scale for each 128 elements: bytes of a wire row of a multiple of
 * 128 elements; push (own rows too), and expand with x NULL. */
uint32_t gpu_flex_wire8(uint32_t hidden);
cudaError_t gpu_flex_push8(cudaStream_t stream, const gpu_flex *f, const void *x);
cudaError_t gpu_flex_expand8(cudaStream_t stream, const gpu_flex *f, void *rows);
cudaError_t gpu_flex_combine(cudaStream_t stream, const gpu_flex *f, const void *rows, void *y);

/* Does this device copy in bulk (sm_90), and was this code built for that? */
bool gpu_flex_bulk(void);
/* Segments of whole 16-byte units by bulk copies (sm_90): as gpu_kernel_segments, but zeros for
 * any index below 0; and rows that are the fp32 sum, in order, of the `width` rows that index
 * names (below 0: none), which are not stored where *late tells of an error (NULL: nothing tells).
 */
cudaError_t gpu_flex_copy_segments(cudaStream_t stream, int blocks, const gpu_segment *segments,
                                   int count, uint32_t row_bytes);
cudaError_t gpu_flex_sum_segments(cudaStream_t stream, int blocks, const gpu_segment *segments,
                                  int count, int width, uint32_t row_bytes, epo_dtype type,
                                  const uint32_t *late);

#ifdef __cplusplus
}
#endif
#endif
