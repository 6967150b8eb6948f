/* SPDX-License-Identifier: Apache-2.0
 *
 * replay.h - launchers of replay.cu: flags waited for and raised by kernels that take
 * their epochs from device memory, so that a graph can replay them.
 */
#ifndef EPO_BACKEND_CUDA_REPLAY_H
#define EPO_BACKEND_CUDA_REPLAY_H

#include <cuda_runtime_api.h>

#include "backend/backend.h"
#include "backend/cuda/routes.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gpu_board_kind {
    GPU_BOARD_NONE = 0,
    GPU_BOARD_LATE,    /* a wait expired: what, chunk, rank, missing, of */
    GPU_BOARD_INDEX,   /* a routing index: slot, value */
    GPU_BOARD_OVERFLOW /* an expert beyond its capacity: slot: the expert, value: rows */
} gpu_board_kind;
/* What kernels tell the CPU, in mapped host memory.  The one that sets the claim from 0
 * writes the error, its kind last, and then the late word. */
typedef struct gpu_note {
    uint64_t kind;
    const char *what;
    int64_t chunk, rank, missing, of;
    uint64_t slot, limit;
    int64_t value;
} gpu_note;
struct gpu_board {
    gpu_note error, warning;
    uint64_t dropped, told; /* told: warnings that the CPU has printed */
};
typedef struct gpu_board gpu_board;

typedef struct gpu_told {
    uint32_t *late, *claim; /* claim: device memory */
    gpu_board *board;
} gpu_told;

typedef struct gpu_wait {
    const uint64_t *words;
    int count, rank; /* rank: who writes the first word */
    const uint64_t *counter;
    uint64_t epoch;
    uint64_t limit_ns, warn_ns;
    gpu_told told;
    const char *what;
    int chunk;
} gpu_wait;

cudaError_t gpu_kernel_wait(cudaStream_t stream, const gpu_wait *w);
/* words[d * rank_step] of every rank d becomes *counter + epoch, unless *late is set: what was
 * waited for did not come, so what the words would tell is not so. */
cudaError_t gpu_kernel_tell(cudaStream_t stream, uint64_t *words, uint64_t rank_step, int ranks,
                            const uint64_t *counter, uint64_t epoch, const uint32_t *late);
/* Adds 1 to each of at most GPU_COUNTERS. */
#define GPU_COUNTERS 3
cudaError_t gpu_kernel_count(cudaStream_t stream, uint64_t *const *counters, int count);
/* After gpu_kernel_route_count, whose counts lie in `s`. */
cudaError_t gpu_kernel_route_judge(cudaStream_t stream, const epo_routes *r,
                                   const gpu_route_scratch *s, bool overflow_is_error,
                                   const gpu_told *told);
cudaError_t gpu_kernel_replay_flex(cudaStream_t stream, const epo_routes *r,
                                   const epo_replay_flex *f);
cudaError_t gpu_kernel_replay_arrived(cudaStream_t stream, const epo_replay_arrived *a);
/* Before a wait may spin: loading a kernel may have to wait for those that run. */
cudaError_t gpu_kernel_replay_load(void);

#ifdef __cplusplus
}
#endif
#endif
