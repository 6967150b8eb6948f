/* SPDX-License-Identifier: Apache-2.0
 *
 * staging.c - what a COMM queue does beside its copies.
 *
 * Rows that are gathered on their way to peers are packed by a kernel on a stream of
 * its own, ahead of the copies: with all chunks of a pass packed at once, no pack
 * waits behind a GEMM that holds every SM while copies before it still run.  The
 * packed rows lie in a ring whose regions are taken again once they were copied.
 */
#include "backend/cuda/gpu.h"

#include <stdlib.h>
#include <string.h>

#define STAGE_REGIONS 64
#define STAGE_STEP (UINT64_C(4) << 20)

typedef struct stage_region {
    uint64_t at, bytes; /* bytes == 0: not in use */
    uint64_t turn;
    cudaEvent_t copied;
} stage_region;

struct gpu_staging {
    cudaStream_t stream;
    cudaEvent_t joined, packed, own;
    uint64_t turn; /* counts joins: a pass's exchanges share one */
    char *base;
    uint64_t size, cursor;
    stage_region region[STAGE_REGIONS];
    int next;
    bool ahead; /* own rows are on their way here that the queue has not waited for */
};

epo_status gpu_staging_open(epo_queue *q) {
    if (q->staging != NULL)
        return EPO_OK;
    gpu_staging *s = calloc(1, sizeof *s);
    if (s == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for staging", q->be->rank);
    q->staging = s;
    GPU_TRY(q->be, "staging",
            cudaStreamCreateWithPriority(&s->stream, cudaStreamNonBlocking, q->priority));
    cudaEvent_t *events[] = {&s->joined, &s->packed, &s->own};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        GPU_TRY(q->be, "staging", cudaEventCreateWithFlags(events[i], cudaEventDisableTiming));
    for (int i = 0; i < STAGE_REGIONS; i++)
        GPU_TRY(q->be, "staging",
                cudaEventCreateWithFlags(&s->region[i].copied, cudaEventDisableTiming));
    return EPO_OK;
}

cudaStream_t gpu_staging_stream(const epo_queue *q) {
    return q->staging != NULL ? q->staging->stream : NULL;
}

void gpu_staging_free(epo_queue *q) {
    gpu_staging *s = q->staging;
    if (s == NULL)
        return;
    gpu_free(q->be, s->base, s->size);
    for (int i = 0; i < STAGE_REGIONS; i++)
        if (s->region[i].copied != NULL)
            (void)cudaEventDestroy(s->region[i].copied);
    cudaEvent_t events[] = {s->joined, s->packed, s->own};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        if (events[i] != NULL)
            (void)cudaEventDestroy(events[i]);
    if (s->stream != NULL)
        (void)cudaStreamDestroy(s->stream);
    free(s);
    q->staging = NULL;
}

epo_status gpu_staging_join(epo_queue *q, bool stale, cudaStream_t *out) {
    epo_status status = gpu_staging_open(q);
    if (status != EPO_OK)
        return status;
    gpu_staging *s = q->staging;
    if (stale || s->turn == 0) {
        s->turn++;
        GPU_TRY(q->be, "staging", cudaEventRecord(s->joined, q->stream));
        GPU_TRY(q->be, "staging", cudaStreamWaitEvent(s->stream, s->joined, 0));
    }
    *out = s->stream;
    return EPO_OK;
}

static epo_status staging_grow(epo_queue *q, uint64_t bytes) {
    gpu_staging *s = q->staging;
    void *ptr = NULL;
    uint64_t size = 2 * (s->size > bytes ? s->size : bytes);
    size = (size + STAGE_STEP - 1) / STAGE_STEP * STAGE_STEP;
    epo_status status = gpu_rest_stream(q->be, s->stream, "staging");
    if (status == EPO_OK)
        status = gpu_rest_stream(q->be, q->stream, "staging");
    if (status != EPO_OK)
        return status;
    gpu_free(q->be, s->base, s->size);
    s->base = NULL;
    s->size = s->cursor = 0;
    for (int i = 0; i < STAGE_REGIONS; i++)
        s->region[i].bytes = 0;
    status = gpu_alloc(q->be, size, &ptr);
    if (status != EPO_OK)
        return status;
    s->base = ptr;
    s->size = size;
    return EPO_OK;
}

epo_status gpu_staging_reserve(epo_queue *q, uint64_t bytes) {
    epo_status status = gpu_staging_open(q);
    return status == EPO_OK && 2 * bytes > q->staging->size ? staging_grow(q, bytes) : status;
}

/* Is [at, at + bytes) still being copied from by an exchange of this pass? */
static bool staging_busy(const gpu_staging *s, uint64_t at, uint64_t bytes) {
    for (int i = 0; i < STAGE_REGIONS; i++) {
        const stage_region *r = &s->region[i];
        if (r->bytes > 0 && r->turn == s->turn && at < r->at + r->bytes && r->at < at + bytes)
            return true;
    }
    return false;
}

epo_status gpu_staging_take(epo_queue *q, uint64_t bytes, char **out) {
    gpu_staging *s = q->staging;
    if (s->cursor + bytes > s->size)
        s->cursor = 0;
    if (bytes > s->size || staging_busy(s, s->cursor, bytes)) {
        epo_status status = staging_grow(q, bytes);
        if (status != EPO_OK)
            return status;
    }
    stage_region *mine = &s->region[s->next];
    for (int i = 0; i < STAGE_REGIONS; i++) {
        stage_region *r = &s->region[i];
        if (r->bytes == 0 ||
            (r != mine && (s->cursor >= r->at + r->bytes || r->at >= s->cursor + bytes)))
            continue;
        GPU_TRY(q->be, "staging", cudaStreamWaitEvent(s->stream, r->copied, 0));
        r->bytes = 0;
    }
    mine->at = s->cursor;
    mine->bytes = bytes;
    mine->turn = s->turn;
    *out = s->base + s->cursor;
    s->cursor += bytes;
    return EPO_OK;
}

epo_status gpu_staging_packed(epo_queue *q, const char *phase) {
    gpu_staging *s = q->staging;
    GPU_TRY(q->be, phase, cudaEventRecord(s->packed, s->stream));
    GPU_TRY(q->be, phase, cudaStreamWaitEvent(q->stream, s->packed, 0));
    s->ahead = false;
    return EPO_OK;
}

epo_status gpu_staging_copied(epo_queue *q, const char *phase) {
    gpu_staging *s = q->staging;
    GPU_TRY(q->be, phase, cudaEventRecord(s->region[s->next].copied, q->stream));
    s->next = (s->next + 1) % STAGE_REGIONS;
    return EPO_OK;
}

void gpu_staging_ahead(epo_queue *q) { q->staging->ahead = true; }

epo_status gpu_staging_settle(epo_queue *q, const char *phase) {
    gpu_staging *s = q->staging;
    if (s == NULL || !s->ahead || q->capture != 0)
        return EPO_OK;
    GPU_TRY(q->be, phase, cudaEventRecord(s->own, s->stream));
    GPU_TRY(q->be, phase, cudaStreamWaitEvent(q->stream, s->own, 0));
    s->ahead = false;
    return EPO_OK;
}
