/* SPDX-License-Identifier: Apache-2.0
 *
 * sum.c - allreduce in rank order: pieces go to every rank's window, each rank adds
 * them up itself, so the bits are the same everywhere and in every run.
 */
#include "backend/cuda/gpu.h"

#include <stdlib.h>

#define SUM_FLOATS (UINT64_C(256) << 10)

static epo_status sum_open(epo_backend *be) {
    epo_status status = EPO_OK;
    if (be->sum_queue == NULL)
        status = gpu_queue_create(be, EPO_QUEUE_COMM, &be->sum_queue);
    if (status == EPO_OK && be->sum_done == NULL)
        status = gpu_event_create(be, &be->sum_done);
    if (status == EPO_OK && be->sum == NULL)
        status = gpu_window_create(be, 4096 + 2 * (uint64_t)be->ranks * SUM_FLOATS * sizeof(float),
                                   &be->sum);
    return status;
}

/* One piece to every rank's slot, then the slots' sum in rank order.  Two sets of
 * slots: a rank writes a set again only after all ranks' next words came, which
 * they send when they have read it. */
static epo_status sum_piece(epo_backend *be, float *data, uint64_t count, epo_segment *send,
                            epo_arrival *recv) {
    const uint64_t epoch = ++be->sum_epoch;
    const uint64_t set = 4096 + (epoch % 2) * (uint64_t)be->ranks * SUM_FLOATS * sizeof(float);
    const uint64_t slot = SUM_FLOATS * sizeof(float);
    for (int i = 0; i < be->ranks; i++) {
        const int peer = (be->rank + 1 + i) % be->ranks;
        send[i] = (epo_segment){.peer = peer,
                                .src = data,
                                .dst_offset = set + (uint64_t)be->rank * slot,
                                .rows = count,
                                .row_bytes = sizeof(float)};
        recv[i] = (epo_arrival){peer, set + (uint64_t)peer * slot, count * sizeof(float)};
    }
    epo_exchange x = {.window = be->sum,
                      .send = send,
                      .nsend = be->ranks,
                      .recv = recv,
                      .nrecv = be->ranks,
                      .epoch = epoch};
    epo_deps deps = {.name = "allreduce", .kind = EPO_INTERVAL_COMM, .chunk = -1};
    epo_status status = gpu_exchange(be->sum_queue, &x, &deps);
    deps.wait[0] = (epo_ready){NULL,  (const volatile uint64_t *)(const void *)be->sum->base,
                               epoch, be->ranks,
                               -1,    "allreduce",
                               -1,    0,
                               0,     NULL};
    deps.nwait = 1;
    deps.signal = be->sum_done;
    deps.result = true;
    if (status != EPO_OK || !gpu_op_begin(be->sum_queue, &deps, &status))
        return status;
    GPU_TRY(be, "allreduce",
            gpu_kernel_sum(be->sum_queue->stream, data,
                           (const float *)(const void *)(be->sum->base + set), SUM_FLOATS,
                           be->ranks, count, be->late_word));
    return gpu_op_end(be->sum_queue, &deps);
}

epo_status gpu_allreduce(epo_backend *be, float *data, uint64_t count, epo_stream stream) {
    epo_segment *send = calloc((size_t)be->ranks, sizeof *send);
    epo_arrival *recv = calloc((size_t)be->ranks, sizeof *recv);
    epo_status status =
        send == NULL || recv == NULL
            ? epo_fail(EPO_E_NOMEM, "rank %d: no memory for %d ranks", be->rank, be->ranks)
            : sum_open(be);
    const bool entered =
        status == EPO_OK && (status = gpu_stream_enter(be, &be->sum_queue, 1, stream)) == EPO_OK;
    for (uint64_t done = 0; done < count && status == EPO_OK; done += SUM_FLOATS) {
        const uint64_t left = count - done;
        status = sum_piece(be, data + done, left < SUM_FLOATS ? left : SUM_FLOATS, send, recv);
    }
    if (status == EPO_OK && count > 0)
        status = gpu_stream_leave(be, be->sum_done, stream);
    free(recv);
    free(send);
    /* The peers wait for this rank's part, unless an exchange is what none of them can do. */
    if (status != EPO_OK && (!entered || status != EPO_E_UNSUPPORTED))
        gpu_break(be, status, epo_fail_text());
    return status;
}
