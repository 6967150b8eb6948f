/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.c - device memory, and copies between it and the CPU.
 *
 * A write takes its place among the queues' operations: after all that COMPUTE and
 * COMM hold now, before all that any queue gets later.  So lib/moe may fill a
 * block that it had used before while the GPU still works on the earlier use.
 *
 * Blocks come from a pool of the driver's that keeps what it has.  Memory by cudaMalloc
 * is mapped on every peer that this process has opened, and cudaFree waits for the GPU,
 * both under a lock of the driver's: with ranks as threads, one that asked for memory
 * while another's GPU waited for its rows held up itself.  Nobody but this GPU reads
 * blocks; windows, which peers write, are made by cudaMalloc once.
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
    cudaMemPool_t pool; /* NULL: the device has none */
    cudaStream_t get, give;
    char *stage[STAGES]; /* pinned */
    cudaEvent_t free[STAGES];
    int next;
    struct {
        void *ptr;
        uint64_t bytes;
    } * retired;
    size_t retired_count;
};

static epo_status pool_open(epo_backend *be) {
    gpu_memory_state *m = be->memory;
    int can = 0, zero = 0;
    uint64_t all = UINT64_MAX;
    GPU_TRY(be, "memory",
            cudaDeviceGetAttribute(&can, cudaDevAttrMemoryPoolsSupported, be->device));
    if (!can)
        return EPO_OK;
    struct cudaMemPoolProps props;
    memset(&props, 0, sizeof props);
    props.allocType = cudaMemAllocationTypePinned;
    props.location.type = cudaMemLocationTypeDevice;
    props.location.id = be->device;
    GPU_TRY(be, "memory", cudaStreamCreateWithFlags(&m->get, cudaStreamNonBlocking));
    GPU_TRY(be, "memory", cudaStreamCreateWithFlags(&m->give, cudaStreamNonBlocking));
    GPU_TRY(be, "memory", cudaMemPoolCreate(&m->pool, &props));
    GPU_TRY(be, "memory", cudaMemPoolSetAttribute(m->pool, cudaMemPoolAttrReleaseThreshold, &all));
    /* What is given is what nothing uses any more: `get` never waits. */
    GPU_TRY(be, "memory",
            cudaMemPoolSetAttribute(m->pool, cudaMemPoolReuseAllowInternalDependencies, &zero));
    return EPO_OK;
}

static void pool_close(gpu_memory_state *m) {
    if (m->give != NULL) {
        (void)cudaStreamSynchronize(m->give);
        (void)cudaStreamDestroy(m->give);
    }
    if (m->get != NULL)
        (void)cudaStreamDestroy(m->get);
    if (m->pool != NULL)
        (void)cudaMemPoolDestroy(m->pool);
}

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
    return pool_open(be);
}

void gpu_memory_close(epo_backend *be) {
    gpu_memory_state *m = be->memory;
    if (m == NULL)
        return;
    const size_t retired = m->retired_count; /* what cannot go now either is noted behind these */
    for (size_t i = 0; i < retired; i++)
        gpu_free(be, m->retired[i].ptr, m->retired[i].bytes);
    free(m->retired);
    for (int i = 0; i < STAGES; i++) {
        if (m->free[i] != NULL)
            (void)cudaEventDestroy(m->free[i]);
        if (m->stage[i] != NULL)
            (void)cudaFreeHost(m->stage[i]);
    }
    pool_close(m);
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

static epo_status alloc_done(epo_backend *be, cudaError_t e, uint64_t bytes, const char *call) {
    if (e == cudaErrorMemoryAllocation) {
        size_t have = 0, total = 0;
        (void)cudaGetLastError();
        (void)cudaMemGetInfo(&have, &total);
        return epo_fail(EPO_E_NOMEM,
                        "rank %d: device memory: need %" PRIu64 " bytes, have %zu of %zu", be->rank,
                        bytes, have, total);
    }
    if (e != cudaSuccess)
        return gpu_fail(be, call, "alloc", e);
    gpu_memory_count(be, (int64_t)bytes);
    return EPO_OK;
}

/* What lies idle in the pool, when there is no other memory. */
static void pool_trim(epo_backend *be) {
    gpu_memory_state *m = be->memory;
    (void)cudaGetLastError();
    if (m->pool != NULL && gpu_rests_within(m->give, gpu_release_limit(be)))
        (void)cudaMemPoolTrimTo(m->pool, 0);
}

static cudaError_t pool_get(gpu_memory_state *m, void **out, uint64_t bytes) {
    cudaError_t e = cudaMallocFromPoolAsync(out, bytes, m->pool, m->get);
    if (e != cudaSuccess)
        return e;
    e = cudaStreamSynchronize(m->get);
    if (e != cudaSuccess)
        (void)cudaFreeAsync(*out, m->get);
    return e;
}

epo_status gpu_alloc(epo_backend *be, uint64_t bytes, void **out) {
    gpu_memory_state *m = be->memory;
    void *ptr = NULL;
    GPU_TRY(be, "alloc", cudaSetDevice(be->device));
    if (m->pool == NULL)
        return gpu_alloc_shared(be, bytes, out);
    const uint64_t size = bytes > 0 ? bytes : 1;
    cudaError_t e = pool_get(m, &ptr, size);
    if (e == cudaErrorMemoryAllocation) {
        pool_trim(be);
        e = pool_get(m, &ptr, size);
    }
    epo_status status = alloc_done(be, e, bytes, "cudaMallocFromPoolAsync");
    if (status == EPO_OK)
        *out = ptr;
    return status;
}

epo_status gpu_alloc_shared(epo_backend *be, uint64_t bytes, void **out) {
    void *ptr = NULL;
    GPU_TRY(be, "alloc", cudaSetDevice(be->device));
    cudaError_t e = cudaMalloc(&ptr, bytes > 0 ? bytes : 1);
    if (e == cudaErrorMemoryAllocation) {
        pool_trim(be);
        e = cudaMalloc(&ptr, bytes > 0 ? bytes : 1);
    }
    epo_status status = alloc_done(be, e, bytes, "cudaMalloc");
    if (status == EPO_OK)
        *out = ptr;
    return status;
}

/* After all that the queues hold now, and the streams beside them that they join late. */
static cudaError_t give_enter(epo_backend *be) {
    gpu_memory_state *m = be->memory;
    cudaError_t e = cudaSuccess;
    for (int i = 0; i < GPU_QUEUES && e == cudaSuccess; i++) {
        if (be->queues[i] == NULL)
            continue;
        cudaStream_t all[] = {be->queues[i]->stream, gpu_staging_stream(be->queues[i])};
        for (int k = 0; k < 2 && e == cudaSuccess; k++)
            if (all[k] != NULL && (e = cudaEventRecord(m->order, all[k])) == cudaSuccess)
                e = cudaStreamWaitEvent(m->give, m->order, 0);
    }
    return e;
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

/* A graph being made may use the block, and its streams cannot be waited for. */
static bool captures(const epo_backend *be) {
    for (int i = 0; i < GPU_QUEUES; i++)
        if (be->queues[i] != NULL && be->queues[i]->capture != 0)
            return true;
    return false;
}

void gpu_free(epo_backend *be, void *ptr, uint64_t bytes) {
    gpu_memory_state *m = be->memory;
    if (ptr == NULL)
        return;
    if (m->pool == NULL) {
        gpu_free_shared(be, ptr, bytes);
        return;
    }
    if (captures(be)) {
        gpu_retire(be, ptr, bytes);
        return;
    }
    (void)cudaSetDevice(be->device);
    if (give_enter(be) != cudaSuccess) { /* nobody knows when it may go */
        (void)cudaGetLastError();
        gpu_retire(be, ptr, bytes);
        return;
    }
    (void)cudaFreeAsync(ptr, m->give);
    gpu_memory_count(be, -(int64_t)bytes);
}

static void shared_free(void *ptr) { (void)cudaFree(ptr); }

/* cudaFree waits for the device, so nothing still uses the block. */
void gpu_free_shared(epo_backend *be, void *ptr, uint64_t bytes) {
    if (ptr == NULL)
        return;
    if (gpu_release(be, "memory", shared_free, ptr))
        gpu_memory_count(be, -(int64_t)bytes);
}

epo_status gpu_write_now(epo_backend *be, void *dst, const void *src, uint64_t bytes) {
    GPU_TRY(be, "write", cudaSetDevice(be->device));
    GPU_TRY(be, "write",
            cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, be->memory->copy));
    return gpu_rest_stream(be, be->memory->copy, "write");
}

epo_status gpu_zero_now(epo_backend *be, void *dst, uint64_t bytes) {
    GPU_TRY(be, "write", cudaSetDevice(be->device));
    GPU_TRY(be, "write", cudaMemsetAsync(dst, 0, bytes, be->memory->copy));
    return gpu_rest_stream(be, be->memory->copy, "write");
}

epo_status gpu_read(epo_backend *be, void *dst, const void *src, uint64_t bytes) {
    if (bytes == 0)
        return EPO_OK;
    GPU_TRY(be, "read", cudaSetDevice(be->device));
    GPU_TRY(be, "read", cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, be->memory->copy));
    return gpu_rest_stream(be, be->memory->copy, "read");
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
        if ((status = gpu_rest_event(be, m->free[s], "write")) != EPO_OK)
            return status;
        memcpy(m->stage[s], (const char *)src + done, some);
        GPU_TRY(be, "write",
                cudaMemcpyAsync((char *)dst + done, m->stage[s], some, cudaMemcpyHostToDevice,
                                m->copy));
        GPU_TRY(be, "write", cudaEventRecord(m->free[s], m->copy));
        done += some;
    }
    return status == EPO_OK ? write_leave(be) : status;
}
