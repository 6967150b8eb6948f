/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange.c - rows to peers' windows.
 *
 * On COMM the bytes go by copy engines, which GEMMs do not starve: rows that are
 * gathered are first packed into staging memory by a kernel.  Small pieces, and
 * everything of a serial group (whose exchange runs on COMPUTE, with the whole GPU
 * to itself), are written by one kernel straight to the peers.  Either way this
 * rank's own rows are moved by the kernel, and the flags follow the bytes.
 */
#include "backend/cuda/gpu.h"
#include "backend/cuda/kernels.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Pieces smaller than this on average cost a copy engine more to start than to move. */
#define SMALL_PIECE (UINT64_C(64) << 10)
#define SUM_FLOATS (UINT64_C(256) << 10)

static uint64_t segment_bytes(const epo_segment *s) { return s->rows * s->row_bytes; }

static epo_status exchange_check(const epo_queue *q, const epo_exchange *x, const char *phase) {
    for (int i = 0; i < x->nsend; i++) {
        const epo_segment *s = &x->send[i];
        uint64_t bytes = 0;
        if (s->peer < 0 || s->peer >= q->be->ranks)
            return epo_fail(EPO_E_ARG, "rank %d: %s: a segment's peer: found %d, allowed 0..%d",
                            q->be->rank, phase, s->peer, q->be->ranks - 1);
        if (__builtin_mul_overflow(s->rows, (uint64_t)s->row_bytes, &bytes) ||
            s->dst_offset > x->window->bytes || x->window->bytes - s->dst_offset < bytes)
            return epo_fail(EPO_E_ARG,
                            "rank %d: %s: segment for rank %d: %" PRIu64
                            " rows of %u bytes at %" PRIu64 " pass the window's end at %" PRIu64,
                            q->be->rank, phase, s->peer, s->rows, s->row_bytes, s->dst_offset,
                            x->window->bytes);
    }
    return EPO_OK;
}

void gpu_staging_free(epo_queue *q) {
    gpu_free(q->be, q->staging, q->staging_bytes);
    q->staging = NULL;
    q->staging_bytes = 0;
}

/* Grows in steps, so that a size is met once. */
static epo_status staging_hold(epo_queue *q, uint64_t bytes) {
    if (bytes <= q->staging_bytes)
        return EPO_OK;
    void *ptr = NULL;
    const uint64_t step = UINT64_C(4) << 20;
    const uint64_t size = (bytes + bytes / 8 + step - 1) / step * step;
    gpu_staging_free(q);
    epo_status status = gpu_alloc(q->be, size, &ptr);
    if (status == EPO_OK) {
        q->staging = ptr;
        q->staging_bytes = size;
    }
    return status;
}

/* Pieces for the kernel, launched in tables of one row size. */
typedef struct table {
    epo_queue *q;
    const char *phase;
    gpu_segment piece[GPU_SEGMENTS];
    int count;
    uint32_t row_bytes;
} table;

static epo_status table_flush(table *t) {
    if (t->count > 0)
        GPU_TRY(t->q->be, t->phase,
                gpu_kernel_segments(t->q->stream, t->q->be->sms, t->piece, t->count, t->row_bytes));
    t->count = 0;
    return EPO_OK;
}

static epo_status table_add(table *t, char *dst, const epo_segment *s) {
    epo_status status = EPO_OK;
    if (t->count == GPU_SEGMENTS || (t->count > 0 && t->row_bytes != s->row_bytes))
        status = table_flush(t);
    t->row_bytes = s->row_bytes;
    t->piece[t->count++] = (gpu_segment){dst, s->src, s->index, s->rows};
    return status;
}

/* Copies of neighbouring bytes are one copy. */
typedef struct run {
    epo_queue *q;
    const char *phase, *src;
    char *dst;
    uint64_t bytes;
} run;

static epo_status run_flush(run *r) {
    if (r->bytes > 0)
        GPU_TRY(r->q->be, r->phase,
                cudaMemcpyAsync(r->dst, r->src, r->bytes, cudaMemcpyDeviceToDevice, r->q->stream));
    r->bytes = 0;
    return EPO_OK;
}

static epo_status run_add(run *r, char *dst, const char *src, uint64_t bytes) {
    if (r->bytes > 0 && r->dst + r->bytes == dst && r->src + r->bytes == src) {
        r->bytes += bytes;
        return EPO_OK;
    }
    epo_status status = run_flush(r);
    r->dst = dst;
    r->src = src;
    r->bytes = bytes;
    return status;
}

static bool by_kernel(const epo_queue *q, const epo_exchange *x) {
    uint64_t bytes = 0, pieces = 0;
    for (int i = 0; i < x->nsend; i++)
        if (x->send[i].peer != q->be->rank) {
            bytes += segment_bytes(&x->send[i]);
            pieces++;
        }
    return q->kind != EPO_QUEUE_COMM || bytes < pieces * SMALL_PIECE;
}

/* Everything straight to its place, by stores. */
static epo_status push(epo_queue *q, const epo_exchange *x, const char *phase) {
    table t = {.q = q, .phase = phase};
    epo_status status = EPO_OK;
    for (int i = 0; i < x->nsend && status == EPO_OK; i++) {
        const epo_segment *s = &x->send[i];
        if (s->rows > 0)
            status = table_add(&t, x->window->peer[s->peer] + s->dst_offset, s);
    }
    return status == EPO_OK ? table_flush(&t) : status;
}

/* Own rows to the window; peers' gathered rows to staging.  from[i]: where segment i
 * lies contiguously then. */
static epo_status pack(epo_queue *q, const epo_exchange *x, const char *phase, const char **from) {
    table t = {.q = q, .phase = phase};
    uint64_t need = 0;
    for (int i = 0; i < x->nsend; i++)
        if (x->send[i].peer != q->be->rank && x->send[i].index != NULL)
            need += (segment_bytes(&x->send[i]) + 15) / 16 * 16;
    epo_status status = staging_hold(q, need);
    uint64_t at = 0;
    for (int i = 0; i < x->nsend && status == EPO_OK; i++) {
        const epo_segment *s = &x->send[i];
        from[i] = s->src;
        if (s->rows == 0)
            continue;
        if (s->peer == q->be->rank) {
            status = table_add(&t, x->window->base + s->dst_offset, s);
        } else if (s->index != NULL) {
            from[i] = q->staging + at;
            status = table_add(&t, q->staging + at, s);
            at += (segment_bytes(s) + 15) / 16 * 16;
        }
    }
    return status == EPO_OK ? table_flush(&t) : status;
}

static epo_status copy(epo_queue *q, const epo_exchange *x, const char *phase,
                       const char *const *from) {
    run r = {.q = q, .phase = phase};
    epo_status status = EPO_OK;
    for (int i = 0; i < x->nsend && status == EPO_OK; i++) {
        const epo_segment *s = &x->send[i];
        if (s->peer != q->be->rank && s->rows > 0)
            status =
                run_add(&r, x->window->peer[s->peer] + s->dst_offset, from[i], segment_bytes(s));
    }
    return status == EPO_OK ? run_flush(&r) : status;
}

epo_status gpu_exchange(epo_queue *q, const epo_exchange *x, const epo_deps *deps) {
    const char *phase = deps->name;
    epo_status status = exchange_check(q, x, phase);
    if (status != EPO_OK || !gpu_op_begin(q, deps, &status))
        return status;
    if (q->be->one_sided && by_kernel(q, x)) {
        status = push(q, x, phase);
    } else {
        const char **from = calloc((size_t)x->nsend + 1, sizeof *from);
        if (from == NULL)
            return epo_fail(EPO_E_NOMEM, "rank %d: no memory for %d segments", q->be->rank,
                            x->nsend);
        status = pack(q, x, phase, from);
        if (status == EPO_OK)
            status =
                q->be->one_sided ? copy(q, x, phase, from) : gpu_pairs_exchange(q, x, from, deps);
        free(from);
    }
    if (status == EPO_OK)
        status = q->be->one_sided
                     ? gpu_flag_write(q, x->window, x->flag_offset, x->epoch, phase)
                     : gpu_flag_write_own(q, x->window, x->flag_offset, x->epoch, phase);
    return status == EPO_OK ? gpu_op_end(q, deps) : status;
}

/* ---- allreduce ---- */

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
        send[i] =
            (epo_segment){peer, data, NULL, set + (uint64_t)be->rank * slot, count, sizeof(float)};
        recv[i] = (epo_arrival){peer, set + (uint64_t)peer * slot, count * sizeof(float)};
    }
    epo_exchange x = {be->sum, send, be->ranks, recv, be->ranks, 0, epoch};
    epo_deps deps = {.name = "allreduce", .kind = EPO_INTERVAL_COMM, .chunk = -1};
    epo_status status = gpu_exchange(be->sum_queue, &x, &deps);
    deps.wait[0] = (epo_ready){NULL,  (const volatile uint64_t *)(const void *)be->sum->base,
                               epoch, be->ranks,
                               -1,    "allreduce",
                               -1};
    deps.nwait = 1;
    deps.signal = be->sum_done;
    if (status != EPO_OK || !gpu_op_begin(be->sum_queue, &deps, &status))
        return status;
    GPU_TRY(be, "allreduce",
            gpu_kernel_sum(be->sum_queue->stream, data,
                           (const float *)(const void *)(be->sum->base + set), SUM_FLOATS,
                           be->ranks, count));
    return gpu_op_end(be->sum_queue, &deps);
}

epo_status gpu_allreduce(epo_backend *be, float *data, uint64_t count, epo_stream stream) {
    epo_segment *send = calloc((size_t)be->ranks, sizeof *send);
    epo_arrival *recv = calloc((size_t)be->ranks, sizeof *recv);
    epo_status status =
        send == NULL || recv == NULL
            ? epo_fail(EPO_E_NOMEM, "rank %d: no memory for %d ranks", be->rank, be->ranks)
            : sum_open(be);
    if (status == EPO_OK)
        status = gpu_stream_enter(be, be->sum_queue, stream);
    for (uint64_t done = 0; done < count && status == EPO_OK; done += SUM_FLOATS) {
        const uint64_t left = count - done;
        status = sum_piece(be, data + done, left < SUM_FLOATS ? left : SUM_FLOATS, send, recv);
    }
    if (status == EPO_OK && count > 0)
        status = gpu_stream_leave(be, be->sum_done, stream);
    free(recv);
    free(send);
    return status;
}
