/* SPDX-License-Identifier: Apache-2.0
 *
 * release.c - giving back what CUDA takes back only when the GPU is at rest.
 *
 * cudaFree, cudaFreeHost, cudaHostUnregister, cudaIpcCloseMemHandle and the ends of NCCL's and
 * cuBLAS's objects wait for whatever runs on the GPU, another group's work and the caller's too,
 * and know no limit.  So they have a thread of their own: whoever gives back waits for it a
 * while and then leaves it to itself; it ends when the GPU's work does.
 *
 * Waits for one stream or event are questions here, again and again, for the same reason.
 */
#include "backend/cuda/gpu.h"

#include "backend/limited.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Of a group that is broken, whose waits are released, or that waited before: what still runs is
 * others' work. */
#define RELEASE_SOON_S 5.0
#define RELEASE_KEPT 64

typedef struct release_job {
    int device;
    void (*fn)(void *ctx);
    void *ctx;
} release_job;

/* Another thread may be capturing a graph, which such calls would end. */
static void release_run(void *arg) {
    const release_job *job = arg;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaSetDevice(job->device);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    job->fn(job->ctx);
}

static epo_status release_look(void *asks) {
    return gpu_now() < *(const double *)asks ? EPO_OK : EPO_E_TIMEOUT;
}

/* What found no thread: the next one that gives something back tries again.  Of the process, as
 * a group may be gone by then; a fixed number, as there may be no memory either. */
static struct {
    pthread_mutex_t lock;
    int count;
    release_job job[RELEASE_KEPT];
} kept = {.lock = PTHREAD_MUTEX_INITIALIZER};

static bool release_keep(int device, void (*fn)(void *ctx), void *ctx) {
    pthread_mutex_lock(&kept.lock);
    const bool room = kept.count < RELEASE_KEPT;
    if (room)
        kept.job[kept.count++] = (release_job){device, fn, ctx};
    pthread_mutex_unlock(&kept.lock);
    return room;
}

/* EPO_OK: done; EPO_E_TIMEOUT: a thread is left with it; else there is none. */
static epo_status release_start(const release_job *what, double until) {
    release_job *job = malloc(sizeof *job);
    if (job == NULL)
        return EPO_E_NOMEM;
    *job = *what;
    const epo_status status = epo_limited_call(release_run, free, job, release_look, &until);
    if (status == EPO_OK)
        free(job);
    return status;
}

/* Nobody waits for these. */
static void release_again(void) {
    epo_status status = EPO_OK;
    while (status == EPO_OK || status == EPO_E_TIMEOUT) {
        pthread_mutex_lock(&kept.lock);
        const bool some = kept.count > 0;
        const release_job job = some ? kept.job[--kept.count] : (release_job){0, NULL, NULL};
        pthread_mutex_unlock(&kept.lock);
        if (!some)
            return;
        status = release_start(&job, 0);
        if (status != EPO_OK && status != EPO_E_TIMEOUT)
            (void)release_keep(job.device, job.fn, job.ctx);
    }
}

/* The caller's error, if there is one, stays what it was. */
bool gpu_release_within(double limit_s, int device, int rank, const char *what, bool say,
                        void (*fn)(void *ctx), void *ctx) {
    const release_job job = {device, fn, ctx};
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    release_again();
    const epo_status status = release_start(&job, gpu_now() + limit_s);
    const bool none = status != EPO_OK && status != EPO_E_TIMEOUT;
    const bool later = none && release_keep(device, fn, ctx);
    epo_fail(status, "%s", text);
    if (status == EPO_OK)
        return true;
    if (say && status == EPO_E_TIMEOUT)
        fprintf(stderr,
                "ep-overlap: rank %d: %s: not given back within %.1f s, as the GPU has other work "
                "that does not end; left to a thread that waits for it\n",
                rank, what, limit_s);
    else if (say)
        fprintf(stderr,
                "ep-overlap: rank %d: %s: not given back: no thread, or no memory for it%s\n", rank,
                what, later ? "; tried again with what is given back next" : "");
    return false;
}

/* Of a group that is well, as long as a peer is waited for. */
double gpu_release_limit(const epo_backend *be) {
    if (atomic_load(&be->hangs) > 0)
        return 0;
    const bool well = atomic_load(&be->late) == EPO_OK && !be->broken;
    const bool waited = atomic_load(&be->busy) > 0;
    if (!well && waited)
        return 0;
    if (well && !waited)
        return be->timeout_s;
    return be->timeout_s < RELEASE_SOON_S ? be->timeout_s : RELEASE_SOON_S;
}

bool gpu_release(epo_backend *be, const char *what, void (*fn)(void *ctx), void *ctx) {
    const bool first = atomic_load(&be->busy) == 0;
    if (gpu_release_within(gpu_release_limit(be), be->device, be->rank, what, first, fn, ctx))
        return true;
    atomic_fetch_add(&be->busy, 1);
    return false;
}

static void host_free(void *ctx) { (void)cudaFreeHost(ctx); }

epo_status gpu_host_map(epo_backend *be, uint64_t bytes, const char *phase, void **host,
                        void **device) {
    void *mine = NULL;
    GPU_TRY(be, phase, cudaHostAlloc(&mine, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
    const cudaError_t e = cudaHostGetDevicePointer(device, mine, 0);
    if (e != cudaSuccess) {
        gpu_free_host(be, mine);
        return gpu_fail(be, "cudaHostGetDevicePointer", phase, e);
    }
    memset(mine, 0, bytes);
    *host = mine;
    return EPO_OK;
}

void gpu_free_host(epo_backend *be, void *host) {
    if (host != NULL)
        (void)gpu_release(be, "memory of the CPU's", host_free, host);
}

/* ---- waits that are questions ---------------------------------------------- */

static cudaError_t stream_ask(void *stream) { return cudaStreamQuery(stream); }
static cudaError_t event_ask(void *event) { return cudaEventQuery(event); }

/* What this group waits for itself is released by the watchdog before that. */
static double rest_limit(const epo_backend *be) { return 2.0 * be->timeout_s + 5.0; }

/* cudaErrorNotReady: not within the limit. */
static cudaError_t rest_within(double limit_s, cudaError_t (*ask)(void *what), void *what) {
    const double until = gpu_now() + limit_s;
    for (unsigned spins = 0;; spins++) {
        const cudaError_t e = ask(what);
        if (e != cudaErrorNotReady || gpu_now() > until)
            return e;
        if (spins > 2000) {
            const struct timespec nap = {0, 20000};
            nanosleep(&nap, NULL);
        }
    }
}

static epo_status rest(epo_backend *be, cudaError_t (*ask)(void *what), void *what,
                       const char *call, const char *phase) {
    const double limit = atomic_load(&be->hangs) > 0 ? 0 : rest_limit(be);
    const cudaError_t e = rest_within(limit, ask, what);
    if (e == cudaSuccess)
        return EPO_OK;
    if (e != cudaErrorNotReady)
        return gpu_fail(be, call, phase, e);
    (void)cudaGetLastError();
    atomic_fetch_add(&be->hangs, 1);
    return epo_fail(EPO_E_TIMEOUT,
                    "rank %d: %s: the GPU's work did not end within %.0f s; it waits for no peer, "
                    "so a kernel or copy hangs",
                    be->rank, phase, rest_limit(be));
}

epo_status gpu_rest_stream(epo_backend *be, cudaStream_t stream, const char *phase) {
    return rest(be, stream_ask, stream, "cudaStreamQuery", phase);
}

epo_status gpu_rest_event(epo_backend *be, cudaEvent_t event, const char *phase) {
    return rest(be, event_ask, event, "cudaEventQuery", phase);
}

bool gpu_rests_within(cudaStream_t stream, double limit_s) {
    if (rest_within(limit_s, stream_ask, stream) != cudaErrorNotReady)
        return true;
    (void)cudaGetLastError();
    return false;
}

bool gpu_rests(epo_backend *be, cudaStream_t stream) {
    if (stream == NULL)
        return true;
    const cudaError_t e = rest_within(gpu_release_limit(be), stream_ask, stream);
    if (e != cudaErrorNotReady)
        return true; /* or it failed: nothing runs there any more */
    (void)cudaGetLastError();
    if (atomic_fetch_add(&be->hangs, 1) == 0)
        fprintf(stderr,
                "ep-overlap: rank %d: the GPU's work does not end; what it uses is not given "
                "back\n",
                be->rank);
    return false;
}
