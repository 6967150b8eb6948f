/* SPDX-License-Identifier: Apache-2.0
 *
 * replay.c - calls that a CUDA graph may capture.
 *
 * A replay makes the same launches with the same arguments, so what differs from one to
 * the next lies in device memory: how often a slot of a window was used.  The first
 * launch of a call counts that up; all that waits for a flag or raises one adds to it.
 * All ranks make the same calls and replays, so the counts stay alike.
 *
 * Between enter and leave the queues are part of the caller's capture, and all of them
 * have joined his stream again at the end: the order between replays, and between them
 * and other calls, is that of the streams that launch them.  So what was recorded in an
 * event before the capture need not be waited for.
 */
#include "backend/cuda/replay.h"
#include "backend/cuda/gpu.h"
#include "backend/cuda/routes.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* In one piece: the claim, and in lines of their own what chains count and tell. */
#define LINE 64
#define CLAIM_BYTES (2 * LINE + GPU_CHAIN_WORDS * sizeof(uint64_t))

epo_status gpu_replay_open(epo_backend *be) {
    void *host = NULL, *device = NULL, *claim = NULL;
    if (be->board != NULL)
        return EPO_OK;
    if (!be->one_sided || be->info.nodes > 1)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "rank %d: graphs: the ranks do not reach each other's memory, and "
                        "exchanges through NCCL are not captured",
                        be->rank);
    if (be->shared_device && gpu_meet_threads(be->meet))
        return epo_fail(EPO_E_UNSUPPORTED,
                        "rank %d: graphs: threads of one process that share a GPU would wait for "
                        "each other in its few hardware queues; give each a GPU or a process",
                        be->rank);
    GPU_TRY(be, "graphs", cudaSetDevice(be->device));
    GPU_TRY(be, "graphs", gpu_kernel_replay_load());
    epo_status status = gpu_alloc(be, CLAIM_BYTES, &claim);
    if (status == EPO_OK)
        status = gpu_zero_now(be, claim, CLAIM_BYTES);
    if (status == EPO_OK)
        status = gpu_host_map(be, sizeof *be->board, "graphs", &host, &device);
    if (status != EPO_OK) {
        gpu_free(be, claim, CLAIM_BYTES);
        return status;
    }
    be->claim = claim;
    be->chain_uses = (uint64_t *)(void *)((char *)claim + LINE);
    be->chain_words = (uint64_t *)(void *)((char *)claim + 2 * LINE);
    be->board_dev = device;
    __atomic_store_n(&be->board, host, __ATOMIC_RELEASE);
    return EPO_OK;
}

void gpu_replay_close(epo_backend *be) {
    if (be->board == NULL)
        return;
    gpu_free(be, be->claim, CLAIM_BYTES);
    (void)cudaFreeHost(be->board); /* on a thread that may wait, as all of the end */
    be->board = NULL;
}

static cudaError_t capture_of(cudaStream_t stream, uint64_t *capture) {
    enum cudaStreamCaptureStatus how = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
#if CUDART_VERSION >= 13000
    cudaError_t e = cudaStreamGetCaptureInfo(stream, &how, &id, NULL, NULL, NULL, NULL);
#else
    cudaError_t e = cudaStreamGetCaptureInfo(stream, &how, &id, NULL, NULL, NULL);
#endif
    *capture = how == cudaStreamCaptureStatusActive ? id : 0;
    return e;
}

epo_status gpu_replay_enter(epo_backend *be, epo_queue *const *queues, int count,
                            uint64_t *const *counters, int ncounters, epo_stream stream,
                            uint64_t *capture) {
    cudaStream_t caller = (cudaStream_t)stream;
    cudaEvent_t enter = queues[0]->enter;
    uint64_t *uses[GPU_COUNTERS] = {be->chain_uses};
    uint64_t id = 0;
    *capture = 0;
    if (ncounters > GPU_COUNTERS - 1)
        return epo_fail(EPO_E_STATE, "rank %d: graphs: %d counters, room for %d", be->rank,
                        ncounters, GPU_COUNTERS - 1);
    for (int i = 0; i < ncounters; i++)
        uses[1 + i] = counters[i];
    /* What is allocated meanwhile touches no captured stream. */
    be->outer = cudaStreamCaptureModeRelaxed;
    GPU_TRY(be, "graphs", cudaThreadExchangeStreamCaptureMode(&be->outer));
    GPU_TRY(be, "graphs", cudaSetDevice(be->device));
    if (caller != NULL)
        GPU_TRY(be, "graphs", capture_of(caller, &id));
    GPU_TRY(be, "graphs", gpu_kernel_count(caller, uses, 1 + ncounters));
    GPU_TRY(be, "graphs", cudaEventRecord(enter, caller));
    for (int i = 0; i < GPU_QUEUES; i++)
        if (be->queues[i] != NULL)
            be->queues[i]->capture = 0;
    for (int i = 0; i < count; i++) {
        GPU_TRY(be, "graphs", cudaStreamWaitEvent(queues[i]->stream, enter, 0));
        queues[i]->capture = id;
        queues[i]->entered = queues[i]->stale = true;
    }
    *capture = id;
    return EPO_OK;
}

/* One queue's end before what the stream gets from here on. */
static epo_status join(epo_queue *q, cudaStream_t stream) {
    GPU_TRY(q->be, "graphs", cudaEventRecord(q->enter, q->stream));
    GPU_TRY(q->be, "graphs", cudaStreamWaitEvent(stream, q->enter, 0));
    return EPO_OK;
}

epo_status gpu_replay_leave(epo_backend *be, epo_stream stream) {
    epo_status status = EPO_OK;
    for (int i = 0; i < GPU_QUEUES; i++) {
        epo_queue *q = be->queues[i];
        if (q == NULL || !q->entered)
            continue;
        if (status == EPO_OK)
            status = join(q, (cudaStream_t)stream);
        q->entered = false;
        q->capture = 0;
    }
    (void)cudaThreadExchangeStreamCaptureMode(&be->outer);
    return status == EPO_OK ? gpu_late(be) : status;
}

static gpu_told told_to(const epo_backend *be) {
    return (gpu_told){gpu_late_poll(be), be->claim, be->board_dev};
}

epo_status gpu_replay_wait(epo_queue *q, cudaStream_t stream, const uint64_t *words,
                           const epo_ready *r) {
    epo_backend *be = q->be;
    /* What this rank tells itself waits for the others', who are named first. */
    const double patience = r->count == 1 && epo_ready_writer(r, 0) == be->rank ? 2 : 1;
    const gpu_wait w = {.words = words,
                        .count = r->count,
                        .rank = epo_ready_writer(r, 0),
                        .counter = r->counter,
                        .epoch = r->epoch,
                        .limit_ns = (uint64_t)(1e9 * patience * be->timeout_s),
                        .warn_ns = (uint64_t)(1e9 * patience * be->warn_s),
                        .told = told_to(be),
                        .what = r->what,
                        .chunk = r->chunk};
    GPU_TRY(be, r->what, gpu_kernel_wait(stream, &w));
    return EPO_OK;
}

/* ---- a routing that only the device counts ---- */

static uint64_t scratch_lay(const epo_routes *r, char *base, gpu_route_scratch *s,
                            uint32_t **counts) {
    const uint64_t blocks = ((uint64_t)r->tokens + GPU_ROUTE_TOKENS - 1) / GPU_ROUTE_TOKENS + 1;
    const uint64_t slots = ((uint64_t)r->tokens * (uint64_t)r->top_k + 63) / 64 * 64;
    const uint64_t experts = (uint64_t)r->experts_all, ranks = (uint64_t)r->ranks;
    uint32_t *at = (uint32_t *)(void *)(base + 64);
    s->bad = (unsigned long long *)(void *)base;
    s->copy = (int32_t *)at;
    s->list = (int32_t *)(at += slots);
    s->base = at += slots;
    s->rank_rows = at += blocks * experts;
    s->total = at += blocks * ranks;
    s->start = at += experts;
    *counts = at += experts; /* [E + R], told to nobody */
    return 64 + 4 * (uint64_t)(at + experts + ranks - (uint32_t *)(void *)(base + 64));
}

uint64_t gpu_replay_scratch(const epo_routes *routes) {
    _Alignas(64) char base[64];
    gpu_route_scratch s;
    uint32_t *counts = NULL;
    return scratch_lay(routes, base, &s, &counts);
}

epo_status gpu_replay_route(epo_queue *q, const epo_routes *routes, const epo_replay_route *r,
                            const epo_deps *deps) {
    epo_backend *be = q->be;
    gpu_route_scratch s = {0};
    uint32_t *counts = NULL;
    epo_status status;
    if (routes->experts_all > GPU_ROUTE_EXPERTS || routes->ranks > GPU_ROUTE_RANKS)
        return epo_fail(EPO_E_ARG, "rank %d: %d experts, %d ranks: allowed at most %d and %d",
                        be->rank, routes->experts_all, routes->ranks, GPU_ROUTE_EXPERTS,
                        GPU_ROUTE_RANKS);
    if (!gpu_op_begin(q, deps, &status))
        return status;
    (void)scratch_lay(routes, r->scratch, &s, &counts);
    GPU_TRY(be, deps->name,
            gpu_kernel_route_count(q->stream, routes, &s, counts, counts + routes->experts_all,
                                   s.bad + 2));
    const gpu_told told = told_to(be);
    GPU_TRY(be, deps->name,
            gpu_kernel_route_judge(q->stream, routes, &s, r->overflow_is_error, &told));
    GPU_TRY(be, deps->name,
            gpu_kernel_route_send(q->stream, routes, &s, r->expert_first, r->own_row, r->token,
                                  r->slot, r->row));
    return gpu_op_end(q, deps);
}

epo_status gpu_replay_flex_send(epo_queue *q, const epo_routes *routes, const epo_replay_flex *f,
                                const epo_deps *deps) {
    epo_status status;
    if (!gpu_op_begin(q, deps, &status))
        return status;
    GPU_TRY(q->be, deps->name, gpu_kernel_replay_flex(q->stream, routes, f));
    return gpu_op_end(q, deps);
}

epo_status gpu_replay_flex_arrived(epo_queue *q, const epo_replay_arrived *a,
                                   const epo_deps *deps) {
    epo_status status;
    if (!gpu_op_begin(q, deps, &status))
        return status;
    GPU_TRY(q->be, deps->name, gpu_kernel_replay_arrived(q->stream, a));
    return gpu_op_end(q, deps);
}

uint64_t gpu_replay_dropped(const epo_backend *be) {
    return be->board != NULL ? __atomic_load_n(&be->board->dropped, __ATOMIC_RELAXED) : 0;
}

/* ---- what kernels told ---- */

static void describe_late(const epo_backend *be, const gpu_note *n, char *text, size_t size) {
    char chunk[24] = "";
    if (n->chunk >= 0)
        snprintf(chunk, sizeof chunk, " %d", (int)n->chunk);
    snprintf(text, size, "rank %d: %s%s: nothing from rank %d (%d of %d missing) after %.0f s",
             be->rank, n->what, chunk, (int)n->rank, (int)n->missing, (int)n->of,
             1e-9 * (double)n->limit);
}

epo_status gpu_replay_scan(epo_backend *be, char *text, size_t size) {
    gpu_board *b = __atomic_load_n(&be->board, __ATOMIC_ACQUIRE);
    if (b == NULL)
        return EPO_OK;
    if (b->told == 0 && __atomic_load_n(&b->warning.kind, __ATOMIC_ACQUIRE) != GPU_BOARD_NONE) {
        const gpu_note note = b->warning;
        describe_late(be, &note, text, size);
        fprintf(stderr, "ep-overlap: %s, still waiting\n", text);
        b->told = 1;
    }
    const uint64_t kind = __atomic_load_n(&b->error.kind, __ATOMIC_ACQUIRE);
    const gpu_note n = b->error;
    switch ((gpu_board_kind)kind) {
    case GPU_BOARD_LATE: describe_late(be, &n, text, size); return EPO_E_TIMEOUT;
    case GPU_BOARD_INDEX:
        snprintf(text, size,
                 "rank %d: experts[%" PRIu64 "][%" PRIu64 "] = %" PRId64 ", allowed -1..%d",
                 be->rank, n.slot / n.limit, n.slot % n.limit, n.value, (int)n.of - 1);
        return EPO_E_INDEX;
    case GPU_BOARD_OVERFLOW:
        snprintf(text, size,
                 "rank %d: expert %" PRIu64 " needs %" PRId64 " rows, its capacity is %" PRIu64
                 "; raise it, or let overflow drop",
                 be->rank, n.slot, n.value, n.limit);
        return EPO_E_OVERFLOW;
    default: return EPO_OK;
    }
}
