/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "measure/gpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

/* The driver, once a process: what it said when it was opened, kept for every caller. */
static struct {
    pthread_once_t once;
    measure_driver table;
    char missing[160];
} context = {.once = PTHREAD_ONCE_INIT};

/* Name in the library, place in the table. */
static const struct entry {
    const char *name;
    size_t offset;
} entries[] = {
#define ENTRY(field, symbol)                                                                       \
    { symbol, offsetof(measure_driver, field) }
    ENTRY(Init, "cuInit"),
    ENTRY(GetErrorName, "cuGetErrorName"),
    ENTRY(DeviceGetCount, "cuDeviceGetCount"),
    ENTRY(DeviceGet, "cuDeviceGet"),
    ENTRY(DeviceGetName, "cuDeviceGetName"),
    ENTRY(DeviceGetAttribute, "cuDeviceGetAttribute"),
    ENTRY(DeviceGetUuid, "cuDeviceGetUuid"),
    ENTRY(DeviceCanAccessPeer, "cuDeviceCanAccessPeer"),
    ENTRY(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain"),
    ENTRY(DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2"),
    ENTRY(CtxSetCurrent, "cuCtxSetCurrent"),
    ENTRY(CtxEnablePeerAccess, "cuCtxEnablePeerAccess"),
    ENTRY(MemAlloc, "cuMemAlloc_v2"),
    ENTRY(MemFree, "cuMemFree_v2"),
    ENTRY(MemGetInfo, "cuMemGetInfo_v2"),
    ENTRY(MemcpyAsync, "cuMemcpyAsync"),
    ENTRY(MemsetD8Async, "cuMemsetD8Async"),
    ENTRY(StreamCreate, "cuStreamCreate"),
    ENTRY(StreamDestroy, "cuStreamDestroy_v2"),
    ENTRY(StreamSynchronize, "cuStreamSynchronize"),
    ENTRY(EventCreate, "cuEventCreate"),
    ENTRY(EventDestroy, "cuEventDestroy_v2"),
    ENTRY(EventRecord, "cuEventRecord"),
    ENTRY(EventSynchronize, "cuEventSynchronize"),
    ENTRY(EventElapsedTime, "cuEventElapsedTime"),
#undef ENTRY
};

static void driver_open(void) {
    int count = 0;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(context.missing, sizeof context.missing,
                 "no NVIDIA driver here: libcuda.so.1 does not open");
        return;
    }
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        void *symbol = dlsym(library, entries[i].name);
        if (symbol == NULL) {
            snprintf(context.missing, sizeof context.missing,
                     "libcuda.so.1 has no %s: the NVIDIA driver is too old", entries[i].name);
            return;
        }
        *(void **)(void *)((char *)&context.table + entries[i].offset) = symbol;
    }
    int result = context.table.Init(0);
    if (result == 0)
        result = context.table.DeviceGetCount(&count);
    if (result != 0 || count == 0)
        snprintf(context.missing, sizeof context.missing,
                 "no GPU to use: the driver says %d, %d GPUs (CUDA_VISIBLE_DEVICES hides them?)",
                 result, count);
}

const measure_driver *measure_driver_get(void) {
    pthread_once(&context.once, driver_open);
    if (context.missing[0] == '\0')
        return &context.table;
    epo_fail(EPO_E_UNSUPPORTED, "%s", context.missing);
    return NULL;
}

int measure_gpu_count(void) {
    int how = 0, count = 0;
    pid_t child = fork();
    if (child == 0) {
        const measure_driver *cu = measure_driver_get();
        _exit(cu != NULL && cu->DeviceGetCount(&count) == 0 && count < 255 ? count : 0);
    }
    if (child < 0 || waitpid(child, &how, 0) != child || !WIFEXITED(how))
        return 0;
    return WEXITSTATUS(how);
}

epo_status measure_driver_check(int result, const char *call) {
    const char *name = NULL;
    if (result == 0)
        return EPO_OK;
    if (context.table.GetErrorName == NULL || context.table.GetErrorName(result, &name) != 0 ||
        name == NULL)
        name = "an unknown error";
    return epo_fail(EPO_E_SYSTEM, "%s: %s (%d)", call, name, result);
}
