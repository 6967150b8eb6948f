/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels.h - launchers of kernels.cu.  Each enqueues on `stream` and returns the
 * launch's own error.  Pointers are device memory.
 */
#ifndef EPO_BACKEND_CUDA_KERNELS_H
#define EPO_BACKEND_CUDA_KERNELS_H

#include <cuda_runtime_api.h>

#include "backend/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Per launch; the few with their rows stay below 4 KiB of arguments, the many below the
 * 32 KiB that a launch can have.  What a launch carries costs the CPU time. */
#define GPU_SEGMENTS_FEW 96
#define GPU_SEGMENTS_SOME 192
#define GPU_SEGMENTS 640

/* Rows of one piece: dst[i] = src[index ? index[i] : i]; index -1: zeros, -2: nothing. */
typedef struct gpu_segment {
    char *dst;
    const char *src;
    const int32_t *index;
    uint64_t rows;
} gpu_segment;

/* What the kernel tells when a part's rows are stored: the last warp sets this rank's
 * word at every rank.  Word of rank d: words[d * rank_step + part[i].word]. */
#define GPU_PARTS 16
typedef struct gpu_raise {
    uint64_t *words;
    uint64_t rank_step, epoch;
    const uint64_t *counter; /* not NULL: epoch is added to it */
    const uint32_t *late;    /* not NULL: where it is set no row is stored and nobody told */
    uint32_t *stored;        /* [GPU_PARTS] warps that are through, 0 before and after */
    int ranks, parts;
    struct {
        uint32_t end; /* the row of the table behind the part's last */
        uint32_t word;
    } part[GPU_PARTS];
} gpu_raise;

/* late: a word of device memory, not 0 when the backend is broken: NaN is written; NULL:
 * not looked at. */
cudaError_t gpu_kernel_gather(cudaStream_t stream, int sms, const epo_rows_gather *g,
                              const uint32_t *late);
cudaError_t gpu_kernel_spread(cudaStream_t stream, int sms, const epo_rows_spread *s,
                              const uint32_t *late);
/* By `blocks` blocks of 1024 threads at most.  raise: NULL, or what to tell (no parts:
 * nothing, but its `late` is looked at); parts need one launch, so at most GPU_SEGMENTS. */
cudaError_t gpu_kernel_segments(cudaStream_t stream, int blocks, const gpu_segment *segments,
                                int count, uint32_t row_bytes, const gpu_raise *raise);
/* flex_fp8.cu; 16-byte aligned rows on the wire. */
cudaError_t gpu_kernel_wire_pack(cudaStream_t stream, int sms, const epo_wire_pack *p);
cudaError_t gpu_kernel_wire_gather(cudaStream_t stream, int sms, const epo_rows_gather *g);
cudaError_t gpu_kernel_reduce(cudaStream_t stream, int sms, const epo_rows_reduce *r,
                              const uint32_t *late);
/* flex_home.cu: where r->home is given. */
cudaError_t gpu_kernel_home(cudaStream_t stream, int sms, const epo_rows_reduce *r,
                            const uint32_t *late);
cudaError_t gpu_kernel_poison(cudaStream_t stream, const uint32_t *late, void *ptr, uint64_t bytes,
                              void *ptr2, uint64_t bytes2);
cudaError_t gpu_kernel_swiglu(cudaStream_t stream, const epo_swiglu *s);
/* *word = 1 if *cpu is not 0: one thread looks. */
cudaError_t gpu_kernel_late_fetch(cudaStream_t stream, const uint32_t *cpu, uint32_t *word);
/* dst[i] = slot 0 [i] + slot 1 [i] + ..., slots `stride` floats apart; NaN if *late is set. */
cudaError_t gpu_kernel_sum(cudaStream_t stream, float *dst, const float *slots, uint64_t stride,
                           int count, uint64_t n, const uint32_t *late);

#ifdef __cplusplus
}
#endif
#endif
