/* SPDX-License-Identifier: Apache-2.0
 *
 * record.c - intervals of what the queues do, from pairs of timing events.  Times
 * are those of the GPU, placed on CLOCK_MONOTONIC by one event whose end was seen.
 */
#include "backend/cuda/gpu.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct record_slot {
    cudaEvent_t start, end;
    epo_interval interval;
} record_slot;

struct gpu_record {
    bool on;
    record_slot *slot;
    epo_interval *out;
    uint64_t capacity, count, dropped;
    cudaEvent_t base;
    int64_t base_ns;
};

static void record_clear(gpu_record *r) {
    for (uint64_t i = 0; r->slot != NULL && i < r->count; i++) {
        (void)cudaEventDestroy(r->slot[i].start);
        (void)cudaEventDestroy(r->slot[i].end);
    }
    if (r->base != NULL)
        (void)cudaEventDestroy(r->base);
    free(r->slot);
    free(r->out);
    memset(r, 0, sizeof *r);
}

epo_status gpu_record_start(epo_backend *be, uint64_t capacity) {
    if (be->record == NULL)
        be->record = calloc(1, sizeof *be->record);
    gpu_record *r = be->record;
    if (r == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for a recording", be->rank);
    record_clear(r);
    if (capacity > SIZE_MAX / sizeof *r->slot ||
        (r->slot = calloc(capacity ? capacity : 1, sizeof *r->slot)) == NULL ||
        (r->out = calloc(capacity ? capacity : 1, sizeof *r->out)) == NULL) {
        record_clear(r);
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory to record %" PRIu64 " intervals", be->rank,
                        capacity);
    }
    GPU_TRY(be, "record", cudaSetDevice(be->device));
    GPU_TRY(be, "record", cudaEventCreate(&r->base));
    GPU_TRY(be, "record", cudaEventRecord(r->base, be->queues[0] ? be->queues[0]->stream : NULL));
    epo_status status = gpu_rest_event(be, r->base, "record");
    if (status != EPO_OK)
        return status;
    r->base_ns = (int64_t)(gpu_now() * 1e9);
    r->capacity = capacity;
    r->on = true;
    return EPO_OK;
}

void gpu_record_begin(epo_queue *q, const epo_deps *deps) {
    gpu_record *r = q->be->record;
    q->record_at = UINT64_MAX;
    if (r == NULL || !r->on || q->capture != 0)
        return;
    if (r->count == r->capacity) {
        r->dropped++;
        return;
    }
    record_slot *s = &r->slot[r->count];
    if (cudaEventCreate(&s->start) != cudaSuccess)
        return;
    if (cudaEventCreate(&s->end) != cudaSuccess) {
        (void)cudaEventDestroy(s->start);
        return;
    }
    (void)cudaEventRecord(s->start, q->stream);
    s->interval.kind = deps->kind;
    s->interval.chunk = deps->chunk;
    snprintf(s->interval.name, sizeof s->interval.name, "%s", deps->name);
    q->record_at = r->count++;
}

void gpu_record_end(epo_queue *q) {
    if (q->record_at != UINT64_MAX)
        (void)cudaEventRecord(q->be->record->slot[q->record_at].end, q->stream);
    q->record_at = UINT64_MAX;
}

epo_status gpu_record_stop(epo_backend *be, const epo_interval **out, uint64_t *count,
                           uint64_t *dropped) {
    gpu_record *r = be->record;
    if (r == NULL || !r->on)
        return epo_fail(EPO_E_STATE, "rank %d: no recording was started", be->rank);
    r->on = false;
    uint64_t kept = 0;
    for (uint64_t i = 0; i < r->count; i++) {
        float from = 0.0F, to = 0.0F;
        record_slot *s = &r->slot[i];
        cudaError_t e =
            gpu_rest_event(be, s->end, "record") == EPO_OK ? cudaSuccess : cudaErrorNotReady;
        if (e == cudaSuccess)
            e = cudaEventElapsedTime(&from, r->base, s->start);
        if (e == cudaSuccess)
            e = cudaEventElapsedTime(&to, r->base, s->end);
        if (e != cudaSuccess) {
            (void)cudaGetLastError();
            r->dropped++;
            continue;
        }
        s->interval.start_ns = r->base_ns + (int64_t)(1e6 * (double)from);
        s->interval.end_ns = r->base_ns + (int64_t)(1e6 * (double)to);
        r->out[kept++] = s->interval;
    }
    *out = r->out;
    *count = kept;
    *dropped = r->dropped;
    return EPO_OK;
}

void gpu_record_destroy(epo_backend *be) {
    if (be->record == NULL)
        return;
    record_clear(be->record);
    free(be->record);
    be->record = NULL;
}
