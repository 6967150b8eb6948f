/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "measure/device.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "measure/gpu.h"
#include "measure/spread.h"

#define SM_COUNT 16            /* CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT */
#define STREAM_NON_BLOCKING 1u /* CU_STREAM_NON_BLOCKING */
#define OUT_OF_MEMORY 2        /* CUDA_ERROR_OUT_OF_MEMORY */
#define ALIGNMENT 64

#define TRY(call)                                                                                  \
    do {                                                                                           \
        epo_status try_status = measure_driver_check((call), #call);                               \
        if (try_status != EPO_OK)                                                                  \
            return try_status;                                                                     \
    } while (0)

static unsigned long long at(const void *p) { return (unsigned long long)(uintptr_t)p; }

/* ---- opening ---------------------------------------------------------- */

static void become_host(measure_device *d) {
    memset(d, 0, sizeof *d);
    snprintf(d->name, sizeof d->name, "host");
}

static epo_status open_gpu(const measure_driver *cu, int index, measure_device *d) {
    int device, count;
    unsigned char uuid[16];
    TRY(cu->DeviceGetCount(&count));
    memset(d, 0, sizeof *d);
    d->visible = count;
    d->number = index % count;
    TRY(cu->DeviceGet(&device, d->number));
    TRY(cu->DeviceGetName(d->name, (int)sizeof d->name, device));
    TRY(cu->DeviceGetAttribute(&d->sms, SM_COUNT, device));
    TRY(cu->DeviceGetUuid(uuid, device));
    for (size_t i = 0; i < sizeof uuid; i++)
        d->tag = d->tag * 31 + uuid[i];
    d->tag = 1 + d->tag % ((1u << 24) - 1); /* a float holds it */
    TRY(cu->DevicePrimaryCtxRetain(&d->context, device));
    d->gpu = true;
    TRY(cu->CtxSetCurrent(d->context));
    TRY(cu->StreamCreate(&d->stream, STREAM_NON_BLOCKING));
    return measure_device_alloc(d, MEASURE_STAGING, &d->staging);
}

epo_status measure_device_open(epo_engine_kind engine, int index, measure_device *out) {
    measure_device d;
    become_host(&d);
    const measure_driver *cu = engine == EPO_ENGINE_HOST ? NULL : measure_driver_get();
    if (cu == NULL && engine == EPO_ENGINE_CUDA)
        return EPO_E_UNSUPPORTED;
    if (cu != NULL) {
        epo_status status = open_gpu(cu, index < 0 ? 0 : index, &d);
        if (status != EPO_OK) {
            measure_device_close(&d);
            return status;
        }
    }
    *out = d;
    return EPO_OK;
}

void measure_device_settle(measure_device *d, const char *engine) {
    if (d->gpu && strcmp(engine, "cuda") != 0) {
        measure_device_close(d);
        become_host(d);
    }
}

void measure_device_close(measure_device *d) {
    const measure_driver *cu = d->gpu ? measure_driver_get() : NULL;
    int device;
    if (cu == NULL)
        return;
    measure_device_free(d, d->staging);
    if (d->stream != NULL)
        (void)cu->StreamDestroy(d->stream);
    (void)cu->CtxSetCurrent(NULL);
    if (cu->DeviceGet(&device, d->number) == 0)
        (void)cu->DevicePrimaryCtxRelease(device);
    d->gpu = false;
    d->stream = d->context = d->staging = NULL;
}

static bool is_set(const char *name) {
    const char *value = getenv(name);
    return value != NULL && *value != '\0' && strcmp(value, "NoDevFiles") != 0;
}

const char *measure_engine(epo_engine_kind *engine) {
    static const char *const held[] = {"CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS",
                                       "SLURM_GPUS_ON_NODE"};
    if (*engine != EPO_ENGINE_AUTO || !is_set("SLURM_STEP_ID"))
        return NULL;
    for (size_t i = 0; i < sizeof held / sizeof held[0]; i++)
        if (is_set(held[i]))
            return NULL;
    *engine = EPO_ENGINE_HOST;
    return "host engine: the step holds no GPU (srun --gpus-per-task=1; or --engine cuda)";
}

int measure_device_trials(const measure_device *d) { return d->gpu ? 150 : 16; }

int measure_local_rank(void) {
    static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "MPI_LOCALRANKID", "SLURM_LOCALID"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *text = getenv(names[i]);
        char *end;
        if (text == NULL || *text == '\0')
            continue;
        long value = strtol(text, &end, 10);
        if (*end == '\0' && value >= 0 && value < 1 << 20)
            return (int)value;
    }
    return -1;
}

/* ---- memory ----------------------------------------------------------- */

static epo_status alloc_gpu(const measure_driver *cu, uint64_t bytes, void **out) {
    unsigned long long memory = 0;
    size_t have = 0, total = 0;
    int result = cu->MemAlloc(&memory, bytes);
    if (result == OUT_OF_MEMORY && cu->MemGetInfo(&have, &total) == 0)
        return epo_fail(EPO_E_NOMEM,
                        "the GPU's memory: need %" PRIu64 " bytes more, have %zu of %zu; ask for "
                        "fewer tokens, experts or a smaller layer",
                        bytes, have, total);
    TRY(result);
    *out = (void *)(uintptr_t)memory;
    return EPO_OK;
}

epo_status measure_device_alloc(measure_device *d, uint64_t bytes, void **out) {
    void *memory = NULL;
    bytes = bytes < 1 ? 1 : bytes;
    if (d->gpu) {
        epo_status status = alloc_gpu(measure_driver_get(), bytes, &memory);
        if (status == EPO_OK && (status = measure_device_zero(d, memory, bytes)) != EPO_OK)
            measure_device_free(d, memory);
        if (status == EPO_OK)
            *out = memory;
        return status;
    }
    if (bytes > SIZE_MAX - ALIGNMENT ||
        (memory = aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT)) ==
            NULL)
        return epo_fail(EPO_E_NOMEM,
                        "memory: need %" PRIu64 " bytes more; ask for fewer tokens, experts or a "
                        "smaller layer",
                        bytes);
    memset(memory, 0, bytes);
    *out = memory;
    return EPO_OK;
}

void measure_device_free(measure_device *d, void *memory) {
    if (memory == NULL)
        return;
    if (d->gpu)
        (void)measure_driver_get()->MemFree(at(memory));
    else
        free(memory);
}

static epo_status copy(measure_device *d, void *to, const void *from, size_t bytes) {
    if (bytes == 0)
        return EPO_OK;
    if (!d->gpu) {
        memcpy(to, from, bytes);
        return EPO_OK;
    }
    const measure_driver *cu = measure_driver_get();
    /* Ordinary memory is copied inside the call, under a lock of the driver: with work of
     * the stream still ahead that waits for a thread of this process, that thread would
     * not get the lock. */
    TRY(cu->StreamSynchronize(d->stream));
    TRY(cu->MemcpyAsync(at(to), at(from), bytes, d->stream));
    TRY(cu->StreamSynchronize(d->stream));
    return EPO_OK;
}

epo_status measure_device_put(measure_device *d, void *to, const void *from, size_t bytes) {
    return copy(d, to, from, bytes);
}

epo_status measure_device_get(measure_device *d, void *to, const void *from, size_t bytes) {
    return copy(d, to, from, bytes);
}

epo_status measure_device_zero(measure_device *d, void *memory, size_t bytes) {
    if (!d->gpu) {
        memset(memory, 0, bytes);
        return EPO_OK;
    }
    const measure_driver *cu = measure_driver_get();
    if (bytes > 0)
        TRY(cu->MemsetD8Async(at(memory), 0, bytes, d->stream));
    TRY(cu->StreamSynchronize(d->stream));
    return EPO_OK;
}

double measure_device_used_mb(measure_device *d) {
    size_t have, total;
    if (!d->gpu || measure_driver_get()->MemGetInfo(&have, &total) != 0)
        return 0;
    return (double)(total - have) * 1e-6;
}

epo_status measure_device_sync(measure_device *d) {
    if (d->gpu)
        TRY(measure_driver_get()->StreamSynchronize(d->stream));
    return EPO_OK;
}

/* ---- marks ------------------------------------------------------------ */

epo_status measure_mark_create(measure_device *d, measure_mark *mark) {
    measure_mark m = {NULL, 0};
    if (d->gpu)
        TRY(measure_driver_get()->EventCreate(&m.event, 0));
    *mark = m;
    return EPO_OK;
}

void measure_mark_destroy(measure_device *d, measure_mark *mark) {
    if (d->gpu && mark->event != NULL)
        (void)measure_driver_get()->EventDestroy(mark->event);
    mark->event = NULL;
}

epo_status measure_mark_set(measure_device *d, measure_mark *mark) {
    mark->ms = now_ms();
    if (d->gpu)
        TRY(measure_driver_get()->EventRecord(mark->event, d->stream));
    return EPO_OK;
}

epo_status measure_mark_elapsed(measure_device *d, const measure_mark *from, const measure_mark *to,
                                double *ms) {
    float elapsed;
    if (!d->gpu) {
        *ms = to->ms - from->ms;
        return EPO_OK;
    }
    const measure_driver *cu = measure_driver_get();
    TRY(cu->EventSynchronize(from->event));
    TRY(cu->EventSynchronize(to->event));
    TRY(cu->EventElapsedTime(&elapsed, from->event, to->event));
    *ms = (double)elapsed;
    return EPO_OK;
}

/* ---- the rate of a copy ------------------------------------------------ */

#define HOST_BYTES ((size_t)16 << 20)
#define GPU_BYTES ((size_t)128 << 20)
#define ROUNDS 5
#define COPIES 4

static epo_status host_rate(double *gbs) {
    char *from = malloc(HOST_BYTES), *to = malloc(HOST_BYTES);
    double best = 1e300;
    if (from == NULL || to == NULL) {
        free(from);
        free(to);
        return epo_fail(EPO_E_NOMEM, "memory: need %zu bytes for a copy", 2 * HOST_BYTES);
    }
    memset(from, 1, HOST_BYTES);
    memset(to, 2, HOST_BYTES);
    for (int i = 0; i < ROUNDS; i++) {
        double start = now_ms();
        from[i] = (char)i;
        memcpy(to, from, HOST_BYTES);
        __asm__ volatile("" ::"r"(to) : "memory");
        double took = now_ms() - start;
        best = took < best ? took : best;
    }
    free(from);
    free(to);
    *gbs = (double)HOST_BYTES * 1e-6 / best;
    return EPO_OK;
}

/* Both ends of a copy: two buffers and a stream on each GPU. */
typedef struct copy_end {
    void *context, *stream;
    unsigned long long from, to;
} copy_end;

static epo_status end_open(const measure_driver *cu, void *context, void *other, copy_end *end) {
    end->context = context;
    TRY(cu->CtxSetCurrent(context));
    (void)cu->CtxEnablePeerAccess(other, 0); /* the group may have done it */
    TRY(cu->StreamCreate(&end->stream, STREAM_NON_BLOCKING));
    TRY(cu->MemAlloc(&end->from, GPU_BYTES));
    TRY(cu->MemAlloc(&end->to, GPU_BYTES));
    return EPO_OK;
}

static void end_close(const measure_driver *cu, copy_end *end) {
    if (end->context == NULL || cu->CtxSetCurrent(end->context) != 0)
        return;
    if (end->from != 0)
        (void)cu->MemFree(end->from);
    if (end->to != 0)
        (void)cu->MemFree(end->to);
    if (end->stream != NULL)
        (void)cu->StreamDestroy(end->stream);
}

static epo_status both_ways(const measure_driver *cu, const copy_end *end, double *ms) {
    TRY(cu->CtxSetCurrent(end[0].context));
    double start = now_ms();
    for (int i = 0; i < COPIES; i++)
        for (int e = 0; e < 2; e++) {
            TRY(cu->CtxSetCurrent(end[e].context));
            TRY(cu->MemcpyAsync(end[1 - e].to, end[e].from, GPU_BYTES, end[e].stream));
        }
    for (int e = 0; e < 2; e++)
        TRY(cu->StreamSynchronize(end[e].stream));
    *ms = now_ms() - start;
    return EPO_OK;
}

static epo_status peer_rate(const measure_driver *cu, const copy_end *end, double *gbs) {
    double best = 1e300, ms = 0;
    for (int i = 0; i < ROUNDS; i++) {
        epo_status status = both_ways(cu, end, &ms);
        if (status != EPO_OK)
            return status;
        best = ms < best ? ms : best;
    }
    *gbs = COPIES * (double)GPU_BYTES * 1e-6 / best;
    return EPO_OK;
}

epo_status measure_copy_rate(measure_device *d, int peer, double *gbs) {
    if (!d->gpu)
        return host_rate(gbs);
    const measure_driver *cu = measure_driver_get();
    copy_end end[2] = {{0}, {0}};
    void *other = NULL;
    int device;
    *gbs = 0;
    if (d->visible < 2)
        return EPO_OK;
    peer %= d->visible;
    if (peer == d->number)
        peer = (peer + 1) % d->visible;
    TRY(cu->DeviceGet(&device, peer));
    TRY(cu->DevicePrimaryCtxRetain(&other, device));
    epo_status status = end_open(cu, d->context, other, &end[0]);
    if (status == EPO_OK)
        status = end_open(cu, other, d->context, &end[1]);
    if (status == EPO_OK)
        status = peer_rate(cu, end, gbs);
    end_close(cu, &end[1]);
    end_close(cu, &end[0]);
    (void)cu->DevicePrimaryCtxRelease(device);
    epo_status back = measure_driver_check(cu->CtxSetCurrent(d->context), "cuCtxSetCurrent");
    return status != EPO_OK ? status : back;
}
