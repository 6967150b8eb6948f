/* SPDX-License-Identifier: Apache-2.0
 *
 * check.c - a failed call becomes one line; the first late error is kept.
 */
#include "backend/cuda/gpu.h"

#include <stdio.h>
#include <string.h>

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

void gpu_break(epo_backend *be, epo_status status, const char *text) {
    pthread_mutex_lock(&be->lock);
    if (atomic_load(&be->late) == EPO_OK) {
        snprintf(be->late_text, sizeof be->late_text, "%s", text);
        atomic_store(&be->late, (int)status);
    }
    pthread_mutex_unlock(&be->lock);
    gpu_watch_release(be);
    gpu_pairs_abort(be);
    gpu_meet_abort(be->meet, status, text);
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
