/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda.c - a libcuda.so.1 in ordinary memory, for lib/measure: "GPUs" are numbers, a
 * stream does its work at once, an event is a reading of the clock.
 *   FAKE_CUDA_GPUS   how many (2)
 *   FAKE_CUDA_BYTES  of memory on each, then allocations fail (no limit)
 *   FAKE_CUDA_FAIL   the name of a call that fails, as in cuStreamCreate
 * What is not done in the right order (no context, a foreign pointer freed) aborts.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The prototypes are cuda.h's, which is not needed here. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#define EXPORT __attribute__((visibility("default")))
#define OUT_OF_MEMORY 2
#define UNKNOWN 999

typedef struct event {
    double ms;
    int recorded;
} event;

static _Thread_local int *current; /* the context: its GPU's number */
static int gpu[8] = {0, 1, 2, 3, 4, 5, 6, 7};
static size_t used;
static int streams, blocks, events, retained;

static int fails(const char *call) {
    const char *name = getenv("FAKE_CUDA_FAIL");
    return name != NULL && strcmp(name, call) == 0;
}
#define BEGIN                                                                                      \
    do {                                                                                           \
        if (fails(__func__))                                                                       \
            return UNKNOWN;                                                                        \
    } while (0)
static void need_context(const char *call) {
    if (current == NULL) {
        fprintf(stderr, "fake libcuda: %s without a context\n", call);
        abort();
    }
}

EXPORT int cuInit(unsigned flags) {
    (void)flags;
    BEGIN;
    return 0;
}
EXPORT int cuGetErrorName(int error, const char **name) {
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
    return 0;
}
EXPORT int cuDeviceGetCount(int *count) {
    const char *text = getenv("FAKE_CUDA_GPUS");
    *count = text != NULL ? (int)strtol(text, NULL, 10) : 2;
    return 0;
}
EXPORT int cuDeviceGet(int *device, int number) {
    *device = number;
    return 0;
}
EXPORT int cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, (size_t)size, "FAKE GPU %d", device);
    return 0;
}
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 16 ? 7 : -1;
    return 0;
}
EXPORT int cuDeviceGetUuid(unsigned char *uuid, int device) {
    memset(uuid, 0x40 + device, 16);
    return 0;
}
EXPORT int cuDeviceCanAccessPeer(int *can, int a, int b) {
    (void)a;
    (void)b;
    *can = 1;
    return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    BEGIN;
    *context = &gpu[device];
    retained++;
    return 0;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    retained--;
    return 0;
}
EXPORT int cuCtxSetCurrent(void *context) {
    current = context;
    return 0;
}
EXPORT int cuCtxEnablePeerAccess(void *context, unsigned flags) {
    (void)flags;
    need_context(__func__);
    return context == current ? UNKNOWN : 0;
}
EXPORT int cuMemAlloc_v2(unsigned long long *memory, size_t bytes) {
    const char *limit = getenv("FAKE_CUDA_BYTES");
    need_context(__func__);
    BEGIN;
    if (limit != NULL && used + bytes > strtoull(limit, NULL, 10))
        return OUT_OF_MEMORY;
    size_t *block = malloc(64 + bytes);
    if (block == NULL)
        return OUT_OF_MEMORY;
    memset(block, 0xa5, 64 + bytes); /* nothing is zero by itself */
    *block = bytes;
    used += bytes;
    blocks++;
    *memory = (unsigned long long)(size_t)((char *)block + 64);
    return 0;
}
EXPORT int cuMemFree_v2(unsigned long long memory) {
    size_t *block = (size_t *)(void *)((char *)(size_t)memory - 64);
    used -= *block;
    blocks--;
    free(block);
    return 0;
}
EXPORT int cuMemGetInfo_v2(size_t *have, size_t *total) {
    const char *limit = getenv("FAKE_CUDA_BYTES");
    *total = limit != NULL ? strtoull(limit, NULL, 10) : (size_t)1 << 40;
    *have = *total - used;
    return 0;
}
EXPORT int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes,
                         void *stream) {
    need_context(__func__);
    BEGIN;
    if (stream == NULL)
        abort();
    memcpy((void *)(size_t)to, (const void *)(size_t)from, bytes);
    return 0;
}
EXPORT int cuMemsetD8Async(unsigned long long to, unsigned char byte, size_t bytes, void *stream) {
    need_context(__func__);
    if (stream == NULL)
        abort();
    memset((void *)(size_t)to, byte, bytes);
    return 0;
}
EXPORT int cuStreamCreate(void **stream, unsigned flags) {
    need_context(__func__);
    BEGIN;
    if (flags != 1)
        return UNKNOWN;
    streams++;
    *stream = malloc(1);
    return 0;
}
EXPORT int cuStreamDestroy_v2(void *stream) {
    streams--;
    free(stream);
    return 0;
}
EXPORT int cuStreamSynchronize(void *stream) {
    (void)stream;
    BEGIN;
    return 0;
}
EXPORT int cuEventCreate(void **made, unsigned flags) {
    (void)flags;
    BEGIN;
    events++;
    *made = calloc(1, sizeof(event));
    return 0;
}
EXPORT int cuEventDestroy_v2(void *made) {
    events--;
    free(made);
    return 0;
}
EXPORT int cuEventRecord(void *made, void *stream) {
    struct timespec t;
    event *e = made;
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, &t);
    e->ms = (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
    e->recorded = 1;
    return 0;
}
EXPORT int cuEventSynchronize(void *made) { return ((event *)made)->recorded ? 0 : UNKNOWN; }
EXPORT int cuEventElapsedTime(float *ms, void *from, void *to) {
    *ms = (float)(((event *)to)->ms - ((event *)from)->ms);
    return 0;
}
/* What is left: streams, blocks, events, contexts. */
EXPORT int fake_cuda_left(void) { return streams + blocks + events + retained; }
