/* SPDX-License-Identifier: Apache-2.0
 *
 * check.c - a failed call becomes one line; the first late error is kept.
 */
#include "backend/cuda/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MARK_LIMIT_S 2.0
/* Longer than the others' watchdogs take to hear of a failure. */
#define HEARD_NS 20000000

/* "cudaMalloc(&p, n)" -> 10 */
static int call_name(const char *call) {
    const char *paren = strchr(call, '(');
    return (int)(paren != NULL ? (size_t)(paren - call) : strlen(call));
}

epo_status gpu_fail(const epo_backend *be, const char *call, const char *phase, cudaError_t error) {
    (void)cudaGetLastError(); /* not for the next check to find */
    return epo_fail(error == cudaErrorMemoryAllocation ? EPO_E_NOMEM : EPO_E_SYSTEM,
                    "rank %d: %.*s (%s): %s (%s)", be != NULL ? be->rank : -1, call_name(call),
                    call, phase, cudaGetErrorString(error), cudaGetErrorName(error));
}

epo_status gpu_fail_driver(const epo_backend *be, const char *call, const char *phase,
                           CUresult error) {
    const gpu_driver *d = gpu_driver_get(NULL);
    const char *name = NULL;
    if (d == NULL || d->name(error, &name) != CUDA_SUCCESS || name == NULL)
        name = "unknown error";
    return epo_fail(EPO_E_SYSTEM, "rank %d: %.*s (%s): %s (%d)", be->rank, call_name(call), call,
                    phase, name, (int)error);
}

/* Whoever got the error before does not hear of it; who gets it from here on does. */
static void tell_unmarked(epo_backend *be) {
    pthread_mutex_lock(&be->lock);
    const size_t used = strlen(be->late_text);
    snprintf(be->late_text + used, sizeof be->late_text - used,
             "; the results behind it may hold rows that never came instead of NaN: the GPU took "
             "no word of it for %.0f s (a kernel was loaded at its first launch, or it hangs)",
             MARK_LIMIT_S);
    pthread_mutex_unlock(&be->lock);
}

void gpu_break(epo_backend *be, epo_status status, const char *text) {
    const struct timespec heard = {0, HEARD_NS};
    pthread_mutex_lock(&be->lock);
    const bool first = atomic_load(&be->late) == EPO_OK;
    if (first) {
        snprintf(be->late_text, sizeof be->late_text, "%s", text);
        atomic_store(&be->late, (int)status);
    }
    pthread_mutex_unlock(&be->lock);
    gpu_meet_abort(be->meet, status, text); /* nobody waits for what the device makes of it here */
    gpu_late_mark(be);
    if (first && atomic_load(&be->unmarked))
        tell_unmarked(be);
    if (first && be->ranks > 1)
        nanosleep(&heard, NULL);
    gpu_watch_release(be);
    gpu_meet_abort(be->meet, status, text); /* first: the peers wait for nothing of ours */
    gpu_pairs_abort(be);
}

epo_status gpu_late(epo_backend *be) {
    epo_status status = (epo_status)atomic_load(&be->late);
    if (status == EPO_OK)
        return EPO_OK;
    pthread_mutex_lock(&be->lock);
    epo_fail(status, "%s", be->late_text);
    pthread_mutex_unlock(&be->lock);
    return status;
}

/* With one hardware queue the copy that sets the device's word would stand behind the very wait
 * that it is to come before: then the CPU's word is the only one that is set. */
static bool late_on_host(void) {
    const char *queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    return queues != NULL && strcmp(queues, "1") == 0;
}

epo_status gpu_late_open(epo_backend *be) {
    void *cpu = NULL, *seen = NULL;
    epo_status status = gpu_host_map(be, sizeof *be->late_cpu, "device", &cpu, &seen);
    if (status != EPO_OK)
        return status;
    be->late_cpu = cpu;
    be->late_seen = seen;
    be->late_host = late_on_host();
    GPU_TRY(be, "device", cudaMalloc((void **)&be->late_word, sizeof *be->late_word));
    gpu_memory_count(be, sizeof *be->late_word);
    status = gpu_zero_now(be, be->late_word, sizeof *be->late_word);
    if (status == EPO_OK && !be->late_host)
        GPU_TRY(be, "device", cudaStreamCreateWithFlags(&be->late_stream, cudaStreamNonBlocking));
    return status;
}

void gpu_late_close(epo_backend *be) {
    if (be->late_stream != NULL)
        (void)cudaStreamDestroy(be->late_stream);
    if (be->late_word != NULL)
        (void)cudaFree(be->late_word);
    if (be->late_cpu != NULL)
        (void)cudaFreeHost(be->late_cpu);
}

uint32_t *gpu_late_poll(const epo_backend *be) {
    return be->late_host ? be->late_seen : be->late_word;
}

/* A kernel that is loaded at its first launch holds up whatever is issued later, the copy to the
 * device's word too, until all before it is through: also the wait that the copy is to come
 * before.  That is so in a program's first passes.  All blocks of a kernel reading the CPU's word
 * would take a millisecond. */
epo_status gpu_late_fetch(epo_queue *q, const char *phase) {
    epo_backend *be = q->be;
    const bool first = q->capture == 0 && atomic_load(&be->late_fetches) < GPU_LATE_FETCHES;
    if (!be->late_host && (!first || be->ranks == 1)) /* one rank waits for nobody */
        return EPO_OK;
    atomic_fetch_add(&be->late_fetches, first);
    GPU_TRY(be, phase, gpu_kernel_late_fetch(q->stream, be->late_seen, be->late_word));
    return EPO_OK;
}

/* Until the copy under way, this thread's or another's, is done.  If it is not in time, a group's
 * first results are NaN all the same: they have fetched the CPU's word. */
static void mark_wait(epo_backend *be, bool mine) {
    const double until = gpu_now() + MARK_LIMIT_S;
    const struct timespec nap = {0, 20000};
    bool under_way = true;
    while ((under_way = mine ? cudaStreamQuery(be->late_stream) == cudaErrorNotReady
                             : !atomic_load(&be->marked)) &&
           gpu_now() < until)
        nanosleep(&nap, NULL);
    if (under_way && atomic_load(&be->late_fetches) >= GPU_LATE_FETCHES)
        atomic_store(&be->unmarked, true);
    atomic_store(&be->marked, true);
}

/* Bounded: a device that hangs runs nothing that would read the word.  Whoever returns may
 * release waits: the word is set, whichever thread was the first. */
void gpu_late_mark(epo_backend *be) {
    if (be->late_cpu != NULL)
        __atomic_store_n(be->late_cpu, 1, __ATOMIC_RELEASE);
    if (be->late_stream == NULL || atomic_load(&be->marked))
        return;
    if (atomic_exchange(&be->marking, true)) {
        mark_wait(be, false);
        return;
    }
    (void)cudaSetDevice(be->device);
    (void)cudaMemcpyAsync(be->late_word, be->late_cpu, sizeof *be->late_word,
                          cudaMemcpyHostToDevice, be->late_stream);
    mark_wait(be, true);
}
