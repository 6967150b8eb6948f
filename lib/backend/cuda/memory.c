/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.c - device memory, and copies between it and the CPU.
 *
 * A write takes its place among the queues' operations: after all that COMPUTE and
 * COMM hold now, before all that any queue gets later.  So lib/moe may fill a
 * block that it had used before while the GPU still works on the earlier use.
 */
#include "backend/cuda/gpu.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define STAGE_BYTES (UINT64_C(1) << 20)
#define STAGES 4

struct gpu_memory_state {
    pthread_mutex_t lock;
    uint64_t now, peak;
    cudaStream_t copy;
    cudaEvent_t order;
    char *stage[STAGES]; /* pinned */
    cudaEvent_t free[STAGES];
    int next;
    struct {
        void *ptr;
        uint64_t bytes;
    } * retired;
    size_t retired_count;
};

epo_status gpu_memory_open(epo_backend *be) {
    gpu_memory_state *m = calloc(1, sizeof *m);
    if (m == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for the backend", be->rank);
    pthread_mutex_init(&m->lock, NULL);
    be->memory = m;
    GPU_TRY(be, "memory", cudaStreamCreateWithFlags(&m->copy, cudaStreamNonBlocking));
    GPU_TRY(be, "memory", cudaEventCreateWithFlags(&m->order, cudaEventDisableTiming));
    for (int i = 0; i < STAGES; i++) {
        GPU_TRY(be, "memory", cudaHostAlloc((void **)&m->stage[i], STAGE_BYTES, 0));
        GPU_TRY(be, "memory", cudaEventCreateWithFlags(&m->free[i], cudaEventDisableTiming));
    }
    return EPO_OK;
}

void gpu_memory_close(epo_backend *be) {
    gpu_memory_state *m = be->memory;
    if (m == NULL)
        return;
    for (size_t i = 0; i < m->retired_count; i++)
        gpu_free(be, m->retired[i].ptr, m->retired[i].bytes);
    free(m->retired);
    for (int i = 0; i < STAGES; i++) {
        if (m->free[i] != NULL)
            (void)cudaEventDestroy(m->free[i]);
        (void)cudaFreeHost(m->stage[i]);
    }
    if (m->order != NULL)
        (void)cudaEventDestroy(m->order);
    if (m->copy != NULL)
        (void)cudaStreamDestroy(m->copy);
    pthread_mutex_destroy(&m->lock);
    free(m);
    be->memory = NULL;
}

void gpu_memory_count(epo_backend *be, int64_t bytes) {
    gpu_memory_state *m = be->memory;
    pthread_mutex_lock(&m->lock);
    m->now += (uint64_t)bytes;
    m->peak = m->now > m->peak ? m->now : m->peak;
    pthread_mutex_unlock(&m->lock);
}

void gpu_memory(epo_backend *be, uint64_t *now, uint64_t *peak) {
    gpu_memory_state *m = be->memory;
    pthread_mutex_lock(&m->lock);
    *now = m->now;
    *peak = m->peak;
    pthread_mutex_unlock(&m->lock);
}

epo_status gpu_alloc(epo_backend *be, uint64_t bytes, void **out) {
    void *ptr = NULL;
    GPU_TRY(be, "alloc", cudaSetDevice(be->device));
    cudaError_t e = cudaMalloc(&ptr, bytes > 0 ? bytes : 1);
    if (e == cudaErrorMemoryAllocation) {
        size_t have = 0, total = 0;
        (void)cudaGetLastError();
        (void)cudaMemGetInfo(&have, &total);
        return epo_fail(EPO_E_NOMEM,
                        "rank %d: device memory: need %" PRIu64 " bytes, have %zu of %zu", be->rank,
                        bytes, have, total);
    }
    if (e != cudaSuccess)
        return gpu_fail(be, "cudaMalloc", "alloc", e);
    gpu_memory_count(be, (int64_t)bytes);
    *out = ptr;
    return EPO_OK;
}

/* cudaFree waits for the device, so nothing still uses the block. */
void gpu_free(epo_backend *be, void *ptr, uint64_t bytes) {
    if (ptr == NULL)
        return;
    (void)cudaSetDevice(be->device);
    (void)cudaFree(ptr);
    gpu_memory_count(be, -(int64_t)bytes);
}

/* Without room to note it, it stays the process's. */
void gpu_retire(epo_backend *be, void *ptr, uint64_t bytes) {
    gpu_memory_state *m = be->memory;
    void *more =
        ptr != NULL ? realloc(m->retired, (m->retired_count + 1) * sizeof *m->retired) : NULL;
    if (more == NULL)
        return;
    m->retired = more;
    m->retired[m->retired_count].ptr = ptr;
    m->retired[m->retired_count++].bytes = bytes;
}

epo_status gpu_write_now(epo_backend *be, void *dst, const void *src, uint64_t bytes) {
    GPU_TRY(be, "write", cudaSetDevice(be->device));
    GPU_TRY(be, "write",
            cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, be->memory->copy));
    GPU_TRY(be, "write", cudaStreamSynchronize(be->memory->copy));
    return EPO_OK;
}

epo_status gpu_zero_now(epo_backend *be, void *dst, uint64_t bytes) {
    GPU_TRY(be, "write", cudaSetDevice(be->device));
    GPU_TRY(be, "write", cudaMemsetAsync(dst, 0, bytes, be->memory->copy));
    GPU_TRY(be, "write", cudaStreamSynchronize(be->memory->copy));
    return EPO_OK;
}

epo_status gpu_read(epo_backend *be, void *dst, const void *src, uint64_t bytes) {
    if (bytes == 0)
        return EPO_OK;
    GPU_TRY(be, "read", cudaSetDevice(be->device));
    GPU_TRY(be, "read", cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, be->memory->copy));
    GPU_TRY(be, "read", cudaStreamSynchronize(be->memory->copy));
    return EPO_OK;
}

/* The copy stream after what the queues hold; FILL's operands stay held by their
 * entries until it has run, so it is not waited for. */
static epo_status write_enter(epo_backend *be) {
    gpu_memory_state *m = be->memory;
    for (int i = 0; i < GPU_QUEUES; i++) {
        if (be->queues[i] == NULL || be->queues[i]->kind == EPO_QUEUE_FILL)
            continue;
        GPU_TRY(be, "write", cudaEventRecord(m->order, be->queues[i]->stream));
        GPU_TRY(be, "write", cudaStreamWaitEvent(m->copy, m->order, 0));
    }
    return EPO_OK;
}

static epo_status write_leave(epo_backend *be) {
    gpu_memory_state *m = be->memory;
    GPU_TRY(be, "write", cudaEventRecord(m->order, m->copy));
    for (int i = 0; i < GPU_QUEUES; i++) {
        if (be->queues[i] == NULL)
            continue;
        GPU_TRY(be, "write", cudaStreamWaitEvent(be->queues[i]->stream, m->order, 0));
        be->queues[i]->stale = true;
    }
    return EPO_OK;
}

epo_status gpu_write(epo_backend *be, void *dst, const void *src, uint64_t bytes) {
    gpu_memory_state *m = be->memory;
    GPU_TRY(be, "write", cudaSetDevice(be->device));
    epo_status status = write_enter(be);
    for (uint64_t done = 0; done < bytes && status == EPO_OK;) {
        const int s = m->next;
        const uint64_t some = bytes - done < STAGE_BYTES ? bytes - done : STAGE_BYTES;
        m->next = (s + 1) % STAGES;
        GPU_TRY(be, "write", cudaEventSynchronize(m->free[s]));
        memcpy(m->stage[s], (const char *)src + done, some);
        GPU_TRY(be, "write",
                cudaMemcpyAsync((char *)dst + done, m->stage[s], some, cudaMemcpyHostToDevice,
                                m->copy));
        GPU_TRY(be, "write", cudaEventRecord(m->free[s], m->copy));
        done += some;
    }
    return status == EPO_OK ? write_leave(be) : status;
}
