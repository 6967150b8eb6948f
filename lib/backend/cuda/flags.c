/* SPDX-License-Identifier: Apache-2.0
 *
 * flags.c - epoch flags.  lib/moe names a flag by its place in the window; the
 * words themselves are in host memory that all ranks map (see gpu.h), found by a
 * table that all ranks share, so that the order in which ranks first name their
 * flags does not matter.
 */
#include "backend/cuda/gpu.h"

#include <stdlib.h>
#include <string.h>

#define FLAG_BATCH 32 /* words per driver call */

/* The number of the flag at `offset` of the window; the first rank that names it
 * takes a free place.  GPU_FLAGS: none left. */
static unsigned flag_find(epo_window *w, uint64_t offset) {
    const uint64_t key = offset + 1;
    unsigned at = (unsigned)((offset / sizeof(uint64_t)) * UINT64_C(0x9E3779B97F4A7C15) >> 40);
    for (unsigned i = 0; i < GPU_FLAGS; i++) {
        const unsigned slot = (at + i) % GPU_FLAGS;
        uint64_t found = atomic_load(&w->key[slot]);
        if (found == 0 && atomic_compare_exchange_strong(&w->key[slot], &found, key))
            return slot;
        if (found == key)
            return slot;
    }
    return GPU_FLAGS;
}

/* Where rank `sender`'s word of the flag lies for rank `rank`. */
static uint64_t flag_word(const epo_window *w, unsigned flag, int rank, int sender) {
    const uint64_t ranks = (uint64_t)w->be->ranks;
    return ((uint64_t)rank * GPU_FLAGS + flag) * ranks + (uint64_t)sender;
}

static CUdeviceptr flag_device(const epo_window *w, unsigned flag, int rank, int sender) {
    return (CUdeviceptr)(uintptr_t)(w->words_dev +
                                    flag_word(w, flag, rank, sender) * sizeof(uint64_t));
}

static epo_status flag_full(const epo_backend *be, const char *what) {
    return epo_fail(EPO_E_STATE, "rank %d: %s: a window has at most %d flags; use fewer chunks",
                    be->rank, what, GPU_FLAGS);
}

static epo_status flag_batch(epo_queue *q, cudaStream_t stream, CUstreamBatchMemOpParams *ops,
                             unsigned count, const char *phase) {
    const gpu_driver *d = gpu_driver_get(NULL);
    CUresult r = d->batch((CUstream)stream, count, ops, 0);
    if (r != CUDA_SUCCESS)
        return gpu_fail_driver(q->be, "cuStreamBatchMemOp", phase, r);
    return EPO_OK;
}

static bool flag_named(const epo_backend *be, gpu_flag_to to, int rank) {
    return to == GPU_FLAG_PEERS ? rank != be->rank : to == GPU_FLAG_SELF ? rank == be->rank : true;
}

/* Where the device has no stream memory operations: a host function stores. */
typedef struct host_write {
    epo_window *w;
    unsigned flag;
    gpu_flag_to to;
    epo_peers peers;
    uint64_t epoch;
} host_write;

static void host_write_run(void *ctx) {
    host_write *h = ctx;
    const epo_backend *be = h->w->be;
    for (int i = 0; i < h->peers.count; i++) {
        const int rank = h->peers.first + i * h->peers.step;
        volatile uint64_t *word =
            h->w->words + (h->to == GPU_FLAG_ARRIVED ? flag_word(h->w, h->flag, be->rank, i)
                                                     : flag_word(h->w, h->flag, rank, h->peers.me));
        if (flag_named(be, h->to, rank) && __atomic_load_n(word, __ATOMIC_RELAXED) < h->epoch)
            __atomic_store_n(word, h->epoch, __ATOMIC_RELEASE);
    }
    free(h);
}

static epo_status flag_write_host(epo_queue *q, cudaStream_t stream, const host_write *write,
                                  const char *phase) {
    host_write *h = malloc(sizeof *h);
    if (h == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory (%s)", q->be->rank, phase);
    *h = *write;
    cudaError_t e = cudaLaunchHostFunc(stream, host_write_run, h);
    if (e != cudaSuccess) {
        free(h);
        return gpu_fail(q->be, "cudaLaunchHostFunc", phase, e);
    }
    return EPO_OK;
}

/* The flag that `ready` names, and the first rank whose word it wants. */
static epo_status flag_of(epo_queue *q, const epo_ready *ready, epo_window **window, unsigned *flag,
                          int *first) {
    epo_backend *be = q->be;
    epo_window *w = gpu_window_of(be, ready->flag);
    if (w == NULL)
        return epo_fail(EPO_E_ARG, "rank %d: a wait for %s names memory outside every window",
                        be->rank, ready->what);
    *window = w;
    *first = ready->step == 0 && ready->count == 1 && ready->peer >= 0 ? ready->peer : 0;
    *flag = flag_find(w, (uint64_t)((const volatile char *)ready->flag - w->base) -
                             (uint64_t)*first * sizeof(uint64_t));
    return *flag == GPU_FLAGS ? flag_full(be, ready->what) : EPO_OK;
}

epo_status gpu_flag_watch(epo_queue *q, const epo_ready *ready, const uint64_t **words) {
    epo_window *w = NULL;
    unsigned flag = 0;
    int first = 0;
    epo_status status = flag_of(q, ready, &w, &flag, &first);
    if (status != EPO_OK)
        return status;
    *words = (const uint64_t *)(uintptr_t)flag_device(w, flag, q->be->rank, first);
    return ready->counter != NULL
               ? EPO_OK
               : gpu_watch_add(q->be, w->words + flag_word(w, flag, q->be->rank, first), ready);
}

static CUstreamBatchMemOpParams wait_op(CUdeviceptr word, uint64_t epoch) {
    CUstreamBatchMemOpParams op;
    memset(&op, 0, sizeof op);
    op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    op.waitValue.address = word;
    op.waitValue.value64 = epoch;
    op.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    return op;
}

/* The stream waits. */
static epo_status hold(epo_queue *q, cudaStream_t stream, const epo_window *w, unsigned flag,
                       int first, const epo_ready *ready) {
    CUstreamBatchMemOpParams ops[FLAG_BATCH];
    epo_status status = EPO_OK;
    if (ready->counter != NULL) { /* its epoch is known when the device gets there */
        const CUdeviceptr words = flag_device(w, flag, q->be->rank, first);
        return gpu_replay_wait(q, stream, (const uint64_t *)(uintptr_t)words, ready);
    }
    for (int i = 0; i < ready->count && status == EPO_OK;) {
        unsigned n = 0;
        for (; i < ready->count && n < FLAG_BATCH; i++, n++)
            ops[n] = wait_op(flag_device(w, flag, q->be->rank, first + i), ready->epoch);
        status = flag_batch(q, stream, ops, n, ready->what);
    }
    return status;
}

epo_status gpu_flag_wait(epo_queue *q, const epo_ready *ready) {
    epo_backend *be = q->be;
    epo_window *w = NULL;
    unsigned flag = 0;
    int first = 0;
    epo_status status = flag_of(q, ready, &w, &flag, &first);
    if (status != EPO_OK)
        return status;
    volatile uint64_t *words = w->words + flag_word(w, flag, be->rank, first);
    if (ready->counter != NULL)
        return hold(q, q->stream, w, flag, first, ready);
    if (be->wait_mode == GPU_WAIT_HOST) {
        /* What is queued so far must be under way before this thread waits: a launch
         * may sit in a command buffer, and a peer may wait for it. */
        (void)cudaStreamQuery(q->stream);
        return gpu_watch_poll(be, words, ready);
    }
    status = gpu_watch_add(be, words, ready);
    return status == EPO_OK ? hold(q, q->stream, w, flag, first, ready) : status;
}

/* Can one call of the driver wait for all? */
static bool one_batch(const epo_queue *q, const epo_ready *const *ready, int count) {
    int words = 0;
    for (int i = 0; i < count; i++)
        words = ready[i]->counter == NULL ? words + ready[i]->count : FLAG_BATCH + 1;
    return count > 1 && words <= FLAG_BATCH && q->be->wait_mode != GPU_WAIT_HOST;
}

epo_status gpu_flags_wait(epo_queue *q, const epo_ready *const *ready, int count) {
    CUstreamBatchMemOpParams ops[FLAG_BATCH];
    const bool one = one_batch(q, ready, count);
    epo_status status = EPO_OK;
    unsigned n = 0;
    for (int i = 0; i < count && status == EPO_OK; i++) {
        const uint64_t *words = NULL;
        if (!one) {
            status = gpu_flag_wait(q, ready[i]);
            continue;
        }
        status = gpu_flag_watch(q, ready[i], &words);
        for (int k = 0; status == EPO_OK && k < ready[i]->count; k++)
            ops[n++] = wait_op((CUdeviceptr)(uintptr_t)(words + k), ready[i]->epoch);
    }
    return status == EPO_OK && one ? flag_batch(q, q->stream, ops, n, ready[0]->what) : status;
}

epo_status gpu_flag_hold(epo_queue *q, cudaStream_t stream, const epo_ready *ready) {
    epo_window *w = NULL;
    unsigned flag = 0;
    int first = 0;
    epo_status status = flag_of(q, ready, &w, &flag, &first);
    return status == EPO_OK ? hold(q, stream, w, flag, first, ready) : status;
}

epo_status gpu_flag_write(epo_queue *q, cudaStream_t stream, const epo_exchange *x, gpu_flag_to to,
                          const char *phase) {
    epo_backend *be = q->be;
    epo_window *w = x->window;
    const unsigned flag = flag_find(w, x->flag_offset);
    const epo_peers peers = epo_peers_of(x->scope, be->rank, be->ranks, be->info.nodes);
    const host_write write = {w, flag, to, peers, x->epoch};
    if (flag == GPU_FLAGS)
        return flag_full(be, phase);
    if (x->counter != NULL) {
        GPU_TRY(be, phase,
                gpu_kernel_tell(stream,
                                (uint64_t *)(uintptr_t)flag_device(w, flag, peers.first, peers.me),
                                (uint64_t)peers.step * flag_word(w, 0, 1, 0), peers.count,
                                x->counter, x->epoch, gpu_late_poll(be)));
        return EPO_OK;
    }
    if (!be->stream_ops)
        return flag_write_host(q, stream, &write, phase);
    CUstreamBatchMemOpParams ops[FLAG_BATCH];
    epo_status status = EPO_OK;
    for (int i = 0; i < peers.count && status == EPO_OK;) {
        unsigned n = 0;
        for (; i < peers.count && n < FLAG_BATCH; i++) {
            const int rank = peers.first + i * peers.step;
            if (!flag_named(be, to, rank))
                continue;
            memset(&ops[n], 0, sizeof ops[n]);
            ops[n].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
            ops[n].writeValue.address = to == GPU_FLAG_ARRIVED
                                            ? flag_device(w, flag, be->rank, i)
                                            : flag_device(w, flag, rank, peers.me);
            ops[n].writeValue.value64 = x->epoch;
            ops[n++].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT; /* fenced: bytes first */
        }
        if (n > 0)
            status = flag_batch(q, stream, ops, n, phase);
    }
    return status;
}

epo_status gpu_flag_raise(epo_queue *q, const epo_exchange *x, const char *phase, gpu_raise *out) {
    epo_backend *be = q->be;
    epo_window *w = x->window;
    const epo_peers peers = epo_peers_of(x->scope, be->rank, be->ranks, be->info.nodes);
    *out = (gpu_raise){.words = (uint64_t *)(void *)w->words_dev + flag_word(w, 0, peers.first, 0),
                       .rank_step = flag_word(w, 0, 1, 0),
                       .epoch = x->epoch,
                       .counter = x->counter,
                       .late = x->counter != NULL ? gpu_late_poll(be) : NULL,
                       .stored = q->stored,
                       .ranks = peers.count,
                       .parts = x->parts > 1 ? x->parts : 1};
    for (int i = 0; i < out->parts; i++) {
        const unsigned flag = flag_find(w, x->flag_offset + (uint64_t)i * x->flag_step);
        if (flag == GPU_FLAGS)
            return flag_full(be, phase);
        out->part[i].word = (uint32_t)flag_word(w, flag, 0, peers.me);
    }
    return EPO_OK;
}

typedef struct host_word {
    uint64_t *word, value;
} host_word;

static void host_word_run(void *ctx) {
    host_word *h = ctx;
    __atomic_store_n(h->word, h->value, __ATOMIC_RELEASE);
    free(h);
}

epo_status gpu_word_write(epo_queue *q, uint64_t device, uint64_t *host, uint64_t value,
                          const char *phase) {
    if (q->be->stream_ops) {
        CUresult r = gpu_driver_get(NULL)->write64((CUstream)q->stream, (CUdeviceptr)device, value,
                                                   CU_STREAM_WRITE_VALUE_DEFAULT);
        return r == CUDA_SUCCESS ? EPO_OK
                                 : gpu_fail_driver(q->be, "cuStreamWriteValue64", phase, r);
    }
    host_word *h = malloc(sizeof *h);
    if (h == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory (%s)", q->be->rank, phase);
    *h = (host_word){host, value};
    cudaError_t e = cudaLaunchHostFunc(q->stream, host_word_run, h);
    if (e != cudaSuccess) {
        free(h);
        return gpu_fail(q->be, "cudaLaunchHostFunc", phase, e);
    }
    return EPO_OK;
}
