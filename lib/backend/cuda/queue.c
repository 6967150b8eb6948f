/* SPDX-License-Identifier: Apache-2.0
 *
 * queue.c - queues are streams with priorities; events are CUDA events; the frame
 * around each operation.
 */
#include "backend/cuda/gpu.h"

#include <stdlib.h>

/* Of the grouped GEMMs' tables and counters: few shapes need more (half is kept). */
#define WORKSPACE (UINT64_C(256) << 10)

static int queue_priority(epo_queue_kind kind) {
    int least = 0, greatest = 0; /* greatest is the smaller number */
    if (cudaDeviceGetStreamPriorityRange(&least, &greatest) != cudaSuccess)
        return 0;
    switch (kind) {
    case EPO_QUEUE_COMM: return greatest;
    case EPO_QUEUE_FILL: return least;
    default: return greatest < least - 1 ? least - 1 : least; /* between the two */
    }
}

/* What operations of the queue need beside their operands.  Made here and not by the first
 * that wants it: memory that is asked for while a peer's GPU waits for this one may have to
 * be mapped there, which waits for that GPU. */
static epo_status queue_supply(epo_queue *q) {
    epo_backend *be = q->be;
    epo_status status = EPO_OK;
    if (q->kind != EPO_QUEUE_FILL) {
        void *ptr = NULL;
        status = gpu_alloc(be, GPU_PARTS * sizeof *q->stored, &ptr);
        if (status != EPO_OK)
            return status;
        q->stored = ptr;
        status = gpu_zero_now(be, ptr, GPU_PARTS * sizeof *q->stored);
    }
    if (status == EPO_OK && q->kind != EPO_QUEUE_COMM)
        status = gpu_workspace_hold(q, WORKSPACE);
    if (status == EPO_OK && q->kind == EPO_QUEUE_COMPUTE)
        status = gpu_chain_open(q);
    if (status == EPO_OK && q->kind == EPO_QUEUE_COMM)
        status = gpu_staging_open(q);
    return status;
}

epo_status gpu_queue_create(epo_backend *be, epo_queue_kind kind, epo_queue **out) {
    int slot = 0;
    while (slot < GPU_QUEUES && be->queues[slot] != NULL)
        slot++;
    if (slot == GPU_QUEUES)
        return epo_fail(EPO_E_STATE, "rank %d: %d queues exist already, one backend has at most %d",
                        be->rank, slot, GPU_QUEUES);
    epo_queue *q = calloc(1, sizeof *q);
    if (q == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for a queue (%zu bytes)", be->rank,
                        sizeof *q);
    q->be = be;
    q->kind = kind;
    q->slot = slot;
    q->priority = queue_priority(kind);
    q->record_at = UINT64_MAX;
    cudaError_t e = cudaStreamCreateWithPriority(&q->stream, cudaStreamNonBlocking, q->priority);
    if (e == cudaSuccess)
        e = cudaEventCreateWithFlags(&q->enter, cudaEventDisableTiming);
    if (e != cudaSuccess) {
        if (q->stream != NULL)
            (void)cudaStreamDestroy(q->stream);
        free(q);
        return gpu_fail(be, "cudaStreamCreateWithPriority or cudaEventCreateWithFlags", "queue", e);
    }
    be->queues[slot] = q;
    epo_status status = queue_supply(q);
    if (status != EPO_OK) {
        gpu_queue_destroy(be, q);
        return status;
    }
    *out = q;
    return EPO_OK;
}

void gpu_queue_destroy(epo_backend *be, epo_queue *q) {
    if (q == NULL)
        return;
    /* A broken backend's waits are released.  What the GPU may still use stays, and the queue
     * stands for it: blocks that are given back wait for its streams. */
    if (!gpu_rests(be, q->stream) || !gpu_rests(be, gpu_staging_stream(q)))
        return;
    gpu_staging_free(q);
    gpu_blas_destroy(q->blas);
    gpu_workspace_free(q);
    gpu_free(be, q->stored, q->stored != NULL ? GPU_PARTS * sizeof *q->stored : 0);
    gpu_chain_free(q);
    (void)cudaEventDestroy(q->enter);
    (void)cudaStreamDestroy(q->stream);
    be->queues[q->slot] = NULL;
    free(q);
}

epo_status gpu_event_create(epo_backend *be, epo_event **out) {
    epo_event *event = calloc(1, sizeof *event);
    if (event == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for an event", be->rank);
    cudaError_t e = cudaEventCreateWithFlags(&event->cuda, cudaEventDisableTiming);
    if (e != cudaSuccess) {
        free(event);
        return gpu_fail(be, "cudaEventCreateWithFlags", "event", e);
    }
    event->behind = UINT32_MAX;
    *out = event;
    return EPO_OK;
}

/* As gpu_event_query, where the caller's thread may be capturing. */
void gpu_event_destroy(epo_backend *be, epo_event *event) {
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    if (event == NULL)
        return;
    gpu_word_give(be, event);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    (void)cudaEventDestroy(event->cuda);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    free(event);
}

/* The caller's thread may be capturing: a question would end that. */
bool gpu_event_query(epo_backend *be, epo_event *event) {
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)be;
    if (event->capture != 0)
        return true;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    const cudaError_t e = cudaEventQuery(event->cuda);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return e != cudaErrorNotReady;
}

bool gpu_mark(epo_queue *q, epo_event **mark) {
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(q->stream, &capture) != cudaSuccess ||
        capture != cudaStreamCaptureStatusNone)
        return false;
    if (*mark == NULL) {
        epo_event *event = calloc(1, sizeof *event);
        if (event == NULL || cudaEventCreate(&event->cuda) != cudaSuccess) {
            free(event);
            return false;
        }
        *mark = event;
    }
    return cudaEventRecord((*mark)->cuda, q->stream) == cudaSuccess;
}

bool gpu_between(epo_backend *be, epo_event *from, epo_event *to, double *seconds) {
    float ms = 0;
    (void)be;
    if (cudaEventQuery(to->cuda) != cudaSuccess ||
        cudaEventElapsedTime(&ms, from->cuda, to->cuda) != cudaSuccess)
        return false;
    *seconds = 1e-3 * (double)ms;
    return true;
}

epo_status gpu_stream_enter(epo_backend *be, epo_queue *const *queues, int count,
                            epo_stream stream) {
    cudaEvent_t enter = queues[0]->enter;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    GPU_TRY(be, "stream_enter", cudaSetDevice(be->device));
    if (stream != NULL)
        GPU_TRY(be, "stream_enter", cudaStreamIsCapturing((cudaStream_t)stream, &capture));
    if (capture != cudaStreamCaptureStatusNone) /* each use of a flag has its own epoch */
        return epo_fail(EPO_E_UNSUPPORTED,
                        "rank %d: the stream is being captured in a CUDA graph, which calls on "
                        "this buffer cannot be; make it with `graphs` set, or end the capture "
                        "before them",
                        be->rank);
    for (int i = 0; i < GPU_QUEUES; i++)
        if (be->queues[i] != NULL)
            be->queues[i]->capture = 0;
    GPU_TRY(be, "stream_enter", cudaEventRecord(enter, (cudaStream_t)stream));
    for (int i = 0; i < count; i++) {
        GPU_TRY(be, "stream_enter", cudaStreamWaitEvent(queues[i]->stream, enter, 0));
        queues[i]->stale = true;
    }
    return EPO_OK;
}

epo_status gpu_stream_leave(epo_backend *be, epo_event *event, epo_stream stream) {
    if (event->capture != 0) /* replays come in the order of the streams that launch them */
        return gpu_late(be);
    GPU_TRY(be, "stream_leave", cudaStreamWaitEvent((cudaStream_t)stream, event->cuda, 0));
    return gpu_late(be);
}

/* Longer than any wait inside: those are released by the watchdog first.  What is recorded in a
 * graph is nothing that one could ask for, and nothing that runs. */
epo_status gpu_sync(epo_backend *be, epo_event *event) {
    if (event->capture != 0)
        return gpu_late(be);
    epo_status status = gpu_rest_event(be, event->cuda, "sync");
    if (status == EPO_OK)
        return gpu_late(be);
    gpu_break(be, status, epo_fail_text());
    return status;
}

bool gpu_op_begin(epo_queue *q, const epo_deps *deps, epo_status *status) {
    epo_backend *be = q->be;
    *status = EPO_OK;
    q->stale = true;
    cudaError_t e = cudaSetDevice(be->device);
    if (e != cudaSuccess) {
        *status = gpu_fail(be, "cudaSetDevice", deps->name, e);
        return false;
    }
    for (int i = 0; i < deps->nwait && *status == EPO_OK; i++) {
        const epo_ready *r = &deps->wait[i];
        if (r->event != NULL) {
            *status = gpu_event_wait(q, r->event, deps->name);
        } else if (atomic_load(&be->late) == EPO_OK) {
            *status = gpu_flag_wait(q, r);
        }
    }
    if (*status != EPO_OK)
        return false;
    if (atomic_load(&be->late) != EPO_OK) {
        *status = gpu_op_end(q, deps);
        return false;
    }
    if (deps->result && (*status = gpu_late_fetch(q, deps->name)) != EPO_OK)
        return false;
    gpu_record_begin(q, deps);
    return true;
}

epo_status gpu_op_end(epo_queue *q, const epo_deps *deps) {
    gpu_record_end(q);
    if (deps->signal == NULL)
        return EPO_OK;
    epo_status status = gpu_staging_settle(q, deps->name); /* the signal speaks for both streams */
    deps->signal->early = false;
    deps->signal->capture = q->capture;
    deps->signal->behind = gpu_queue_bit(q);
    if (status == EPO_OK)
        GPU_TRY(q->be, deps->name, cudaEventRecord(deps->signal->cuda, q->stream));
    return status;
}

epo_status gpu_run(epo_queue *q, epo_status (*fn)(void *, epo_stream), void *ctx,
                   const epo_deps *deps) {
    epo_status status;
    if (!gpu_op_begin(q, deps, &status))
        return status;
    status = fn(ctx, (epo_stream)q->stream);
    GPU_TRY(q->be, deps->name, cudaSetDevice(q->be->device)); /* wherever the caller went */
    return status == EPO_OK ? gpu_op_end(q, deps) : status;
}

epo_status gpu_call(epo_queue *q, void (*fn)(void *), void *ctx, const epo_deps *deps) {
    epo_status status;
    if (!gpu_op_begin(q, deps, &status))
        return status;
    GPU_TRY(q->be, deps->name, cudaLaunchHostFunc(q->stream, fn, ctx));
    return gpu_op_end(q, deps);
}
