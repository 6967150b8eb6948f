/* SPDX-License-Identifier: Apache-2.0
 *
 * load.c - all kernels on the device before any work waits there, where ranks are threads.
 *
 * By default CUDA loads a kernel when it is launched first.  That takes a lock of the
 * whole process and waits for the device; with ranks as threads, one rank's GPU waited for
 * rows that another rank could not send for the lock.  The kernels of a file are found by
 * any of them, so that none is forgotten.  Drivers before 12.5 cannot tell them: there
 * CUDA_MODULE_LOADING=EAGER does it.
 *
 * A library's kernels (cuBLASLt's, cuBLAS's) cannot be named before they are launched.  Before
 * each one's first launch the rank waits until what it has issued is through, which takes no lock:
 * ranks issue in the same order, so whatever one of them waits for, its peer has issued, or comes
 * to issue without waiting for more than that.
 */
#include "backend/cuda/load.h"
#include "backend/cuda/gemm/gg_kernels.h"
#include "backend/cuda/gpu.h"

#include <stdatomic.h>
#include <stdlib.h>

/* A kernel that this device has no code for stays out: nothing launches it here. */
static epo_status file_load(epo_backend *be, const gpu_driver *d, const void *any) {
    cudaKernel_t kernel;
    CUlibrary file;
    CUfunction loaded;
    unsigned count = 0;
    if (any == NULL || cudaGetKernel(&kernel, any) != cudaSuccess) {
        (void)cudaGetLastError();
        return EPO_OK;
    }
    CUresult r = d->kernel_library(&file, (CUkernel)kernel);
    if (r == CUDA_SUCCESS)
        r = d->library_count(&count, file);
    if (r != CUDA_SUCCESS)
        return gpu_fail_driver(be, "cuKernelGetLibrary or cuLibraryGetKernelCount", "load", r);
    CUkernel *all = calloc((size_t)count + 1, sizeof *all);
    if (all == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for %u kernels", be->rank, count);
    r = d->library_kernels(all, count, file);
    for (unsigned i = 0; r == CUDA_SUCCESS && i < count; i++)
        (void)d->kernel_function(&loaded, all[i]);
    free(all);
    return r == CUDA_SUCCESS ? EPO_OK : gpu_fail_driver(be, "cuLibraryEnumerateKernels", "load", r);
}

epo_status gpu_kernels_load(epo_backend *be) {
    const gpu_driver *d = gpu_driver_get(NULL);
    const void *any[] = {
        gpu_any_kernels(),
        gpu_any_routes(),
        gpu_any_flex_plan(),
        gpu_any_flex_segments(),
        gpu_any_flex_fp8(),
        gpu_any_flex_home(),
        gg_prepare_kernel(),
        gg_sm90_kernel_bf16(EPO_GG_WGRAD, EPO_GG_PLAIN, 256).function,
        gg_sm90_kernel_f16(EPO_GG_WGRAD, EPO_GG_PLAIN, 256).function,
        gg_sm90_chain_bf16(0, 256).function,
        gg_sm90_chain_f16(0, 256).function,
        gg_portable_kernel(EPO_GG_WGRAD, EPO_GG_PLAIN, EPO_BF16).function,
    };
    epo_status status = EPO_OK;
    if (!gpu_meet_threads(be->meet) || d->kernel_library == NULL || d->library_count == NULL ||
        d->library_kernels == NULL || d->kernel_function == NULL)
        return EPO_OK;
    for (size_t i = 0; i < sizeof any / sizeof *any && status == EPO_OK; i++)
        status = file_load(be, d, any[i]);
    return status;
}

/* ---- libraries' kernels ---- */

/* Of each kernel launched in this process, by device: its key.  One may push out another, which is
 * waited for once more then. */
enum { LAUNCHED = 1 << 12 };
static _Atomic uint64_t launched[LAUNCHED];

static uint64_t key_of(int device, const void *kernel, size_t bytes) {
    uint64_t key = (UINT64_C(14695981039346656037) ^ (uint64_t)device) * UINT64_C(1099511628211);
    for (size_t i = 0; i < bytes; i++) /* FNV-1a */
        key = (key ^ ((const unsigned char *)kernel)[i]) * UINT64_C(1099511628211);
    return key | 1; /* 0: none */
}

/* Does anything that waits for a peer stand on this device while another thread needs the lock? */
static bool loads_wait(const epo_backend *be) {
    return gpu_meet_threads(be->meet) && be->ranks > 1 &&
           (be->wait_mode != GPU_WAIT_HOST || be->pairs != NULL);
}

epo_status gpu_library_first(epo_queue *q, const void *kernel, size_t bytes, const char *phase) {
    epo_backend *be = q->be;
    if (!loads_wait(be) || q->capture != 0) /* a captured stream cannot be waited for */
        return EPO_OK;
    const uint64_t key = key_of(be->device, kernel, bytes);
    _Atomic uint64_t *place = &launched[(key >> 1) % LAUNCHED];
    epo_status status = EPO_OK;
    if (atomic_load(place) == key)
        return EPO_OK;
    for (int i = 0; i < GPU_QUEUES && status == EPO_OK; i++)
        if (be->queues[i] != NULL)
            status = gpu_rest_stream(be, be->queues[i]->stream, phase);
    if (status == EPO_OK)
        atomic_store(place, key);
    return status;
}
