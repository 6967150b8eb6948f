/* SPDX-License-Identifier: Apache-2.0
 *
 * cupti.c - a stand-in for libcupti, for tests of the recorder: one set of callbacks, one
 * clock, one subscriber, as the real one has; records of the sizes of the release that
 * FAKE_CUPTI_VERSION names.  What "runs" is what the program tells by fake_cupti_ran().
 * FAKE_CUPTI_LOG names a file for every call; FAKE_CUPTI_FAIL="cuptiActivityEnable:15"
 * makes a function return 15; FAKE_CUPTI_SLOW=ms makes each flush and enable take so long.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "preload/record/cupti_abi.h"

#define EXPORT __attribute__((visibility("default")))

static struct {
    pthread_mutex_t lock;
    atomic_int enabled[CUPTI_KINDS];
    cupti_buffer_requested *requested;
    cupti_buffer_completed *completed;
    cupti_clock *_Atomic clock;
    struct CUpti_Subscriber_st *_Atomic subscriber; /* its callback */
    atomic_int domains;                             /* switched on */
    uint8_t *buffer;
    size_t size, used;
    int unfinished; /* in the buffer */
    size_t dropped;
} state = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void log_call(const char *format, ...) {
    const char *path = getenv("FAKE_CUPTI_LOG");
    FILE *f = path != NULL ? fopen(path, "ae") : NULL;
    va_list list;
    if (f == NULL)
        return;
    va_start(list, format);
    vfprintf(f, format, list);
    va_end(list);
    fclose(f);
}

static int failing(const char *name) {
    const char *fail = getenv("FAKE_CUPTI_FAIL"), *colon = fail ? strchr(fail, ':') : NULL;
    if (colon == NULL || strncmp(fail, name, (size_t)(colon - fail)) != 0 ||
        name[colon - fail] != '\0')
        return 0;
    return (int)strtol(colon + 1, NULL, 10);
}

static void be_slow(void) {
    const char *text = getenv("FAKE_CUPTI_SLOW");
    const long ms = text != NULL ? strtol(text, NULL, 10) : 0;
    const struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

static uint32_t version(void) {
    const char *text = getenv("FAKE_CUPTI_VERSION");
    return text != NULL ? (uint32_t)strtoul(text, NULL, 10) : 130001;
}

/* Bytes of a record, by release: Kernel5 .. Kernel10, Memcpy4 .. 6, and so on. */
static size_t record_size(cupti_kind kind) {
    const uint32_t v = version();
    const int age = v >= 26 ? 3 : v >= 19 ? 2 : v >= 16 ? 1 : 0;
    static const size_t kernel[] = {168, 176, 208, 216}, copy[] = {80, 88, 88, 96},
                        peer[] = {80, 88, 96, 96}, set[] = {72, 80, 88, 88};
    switch (kind) {
    case CUPTI_KIND_MEMCPY: return copy[age];
    case CUPTI_KIND_MEMCPY_PEER: return peer[age];
    case CUPTI_KIND_MEMSET: return set[age];
    case CUPTI_KIND_CONCURRENT_KERNEL: return kernel[age];
    default: return 64;
    }
}

static uint64_t system_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t now_ns(void) { return state.clock != NULL ? state.clock() : system_ns(); }

EXPORT cupti_result cuptiGetVersion(uint32_t *out);
EXPORT cupti_result cuptiGetResultString(cupti_result r, const char **out);
EXPORT cupti_result cuptiGetTimestamp(uint64_t *out);
EXPORT cupti_result cuptiSubscribe(cupti_subscriber *out, cupti_callback *callback, void *user);
EXPORT cupti_result cuptiUnsubscribe(cupti_subscriber s);
EXPORT cupti_result cuptiActivityRegisterCallbacks(cupti_buffer_requested *requested,
                                                   cupti_buffer_completed *completed);
EXPORT cupti_result cuptiActivityEnable(cupti_kind kind);
EXPORT cupti_result cuptiActivityDisable(cupti_kind kind);
EXPORT cupti_result cuptiActivityEnableContext(void *cuda, cupti_kind kind);
EXPORT cupti_result cuptiActivityDisableContext(void *cuda, cupti_kind kind);
EXPORT cupti_result cuptiActivityFlushAll(uint32_t flag);
EXPORT cupti_result cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, cupti_record **r);
EXPORT cupti_result cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *out);
EXPORT cupti_result cuptiActivityRegisterTimestampCallback(cupti_clock *clock);
EXPORT cupti_result cuptiEnableDomain(uint32_t on, cupti_subscriber s, int domain);
EXPORT cupti_result cuptiFinalize(void);
EXPORT int fake_cupti_ran(cupti_kind kind, const char *name, uint32_t device, uint32_t stream,
                          uint64_t ago, uint64_t length, int copy);
EXPORT int fake_cupti_call(void);

cupti_result cuptiGetVersion(uint32_t *out) {
    *out = version();
    return CUPTI_OK;
}

cupti_result cuptiGetResultString(cupti_result r, const char **out) {
    *out = r == CUPTI_BUSY ? "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED" : "CUPTI_ERROR_FAKE";
    return CUPTI_OK;
}

cupti_result cuptiGetTimestamp(uint64_t *out) {
    *out = now_ns();
    return CUPTI_OK;
}

cupti_result cuptiSubscribe(cupti_subscriber *out, cupti_callback *callback, void *user) {
    (void)user;
    const int r = failing(__func__);
    if (r != 0)
        return r;
    pthread_mutex_lock(&state.lock);
    const int busy = state.subscriber != NULL;
    cupti_subscriber made;
    if (!busy) {
        memcpy(&made, &callback, sizeof made);
        state.subscriber = made;
        *out = state.subscriber;
    }
    pthread_mutex_unlock(&state.lock);
    log_call("subscribe %s\n", busy ? "busy" : "ok");
    return busy ? CUPTI_BUSY : CUPTI_OK;
}

cupti_result cuptiUnsubscribe(cupti_subscriber s) {
    const int ours = s == state.subscriber && s != NULL;
    log_call("unsubscribe\n");
    if (ours)
        state.subscriber = NULL;
    return ours ? CUPTI_OK : 1;
}

/* ---- buffers; with the lock, which callbacks may not need ---- */

static void hand_over(void) {
    uint8_t *buffer = state.buffer;
    const size_t size = state.size, used = state.used;
    if (buffer == NULL)
        return;
    state.buffer = NULL;
    state.unfinished = 0;
    state.completed(NULL, 0, buffer, size, used);
}

cupti_result cuptiActivityRegisterCallbacks(cupti_buffer_requested *requested,
                                            cupti_buffer_completed *completed) {
    log_call("register\n");
    if (requested == NULL || completed == NULL)
        return 1;
    pthread_mutex_lock(&state.lock);
    state.requested = requested;
    state.completed = completed;
    pthread_mutex_unlock(&state.lock);
    return CUPTI_OK;
}

cupti_result cuptiActivityEnable(cupti_kind kind) {
    const int r = failing(__func__);
    log_call("enable %u\n", kind);
    be_slow();
    if (r == 0 && kind < CUPTI_KINDS)
        state.enabled[kind] = 1;
    return r;
}

cupti_result cuptiActivityDisable(cupti_kind kind) {
    log_call("disable %u\n", kind);
    if (kind < CUPTI_KINDS)
        state.enabled[kind] = 0;
    return CUPTI_OK;
}

/* Nothing runs in such a context here. */
cupti_result cuptiActivityEnableContext(void *cuda, cupti_kind kind) {
    (void)cuda;
    return kind < CUPTI_KINDS ? CUPTI_OK : 1;
}

cupti_result cuptiActivityDisableContext(void *cuda, cupti_kind kind) {
    return cuptiActivityEnableContext(cuda, kind);
}

cupti_result cuptiActivityFlushAll(uint32_t flag) {
    log_call("flush %u\n", flag);
    be_slow();
    pthread_mutex_lock(&state.lock);
    if (state.unfinished == 0 || (flag & CUPTI_FLUSH_FORCED) != 0)
        hand_over();
    pthread_mutex_unlock(&state.lock);
    return CUPTI_OK;
}

cupti_result cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, cupti_record **r) {
    uint8_t *at = *r == NULL ? buffer : (uint8_t *)*r + record_size((*r)->kind);
    if (at >= buffer + valid) {
        *r = NULL;
        return 12; /* CUPTI_ERROR_MAX_LIMIT_REACHED */
    }
    *r = (cupti_record *)(void *)at;
    return CUPTI_OK;
}

cupti_result cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *out) {
    (void)context;
    (void)stream;
    *out = state.dropped;
    state.dropped = 0;
    return CUPTI_OK;
}

cupti_result cuptiActivityRegisterTimestampCallback(cupti_clock *clock) {
    log_call("clock\n");
    state.clock = clock;
    return clock != NULL ? CUPTI_OK : 1;
}

cupti_result cuptiEnableDomain(uint32_t on, cupti_subscriber s, int domain) {
    log_call("domain %d %u\n", domain, on);
    if (s != state.subscriber || s == NULL)
        return 1;
    state.domains = on ? state.domains | 1 << domain : state.domains & ~(1 << domain);
    return CUPTI_OK;
}

cupti_result cuptiFinalize(void) {
    log_call("finalize\n");
    state.domains = 0;
    for (int i = 0; i < CUPTI_KINDS; i++)
        state.enabled[i] = 0;
    state.subscriber = NULL;
    return CUPTI_OK;
}

/* ---- what the GPU does ---- */

static void put(uint8_t *record, size_t offset, const void *value, size_t size) {
    memcpy(record + offset, value, size);
}

static void fill(uint8_t *record, cupti_kind kind, const char *name, uint32_t device,
                 uint32_t stream, uint64_t start, uint64_t end, int copy) {
    const int kernel = kind == CUPTI_KIND_CONCURRENT_KERNEL;
    const uint8_t copy_kind = (uint8_t)copy;
    memset(record, 0xa5, record_size(kind));
    put(record, 0, &kind, sizeof kind);
    put(record, kernel ? CUPTI_KERNEL_START : CUPTI_COPY_START, &start, sizeof start);
    put(record, kernel ? CUPTI_KERNEL_END : CUPTI_COPY_END, &end, sizeof end);
    put(record, kernel ? CUPTI_KERNEL_DEVICE : CUPTI_COPY_DEVICE, &device, sizeof device);
    put(record, kernel ? CUPTI_KERNEL_STREAM : CUPTI_COPY_STREAM, &stream, sizeof stream);
    if (kernel)
        put(record, CUPTI_KERNEL_NAME, &name, sizeof name);
    else
        put(record, CUPTI_COPY_KIND, &copy_kind, sizeof copy_kind);
}

/* It began `ago` ns before now and took `length` (0: it has not ended).  1: written down. */
int fake_cupti_ran(cupti_kind kind, const char *name, uint32_t device, uint32_t stream,
                   uint64_t ago, uint64_t length, int copy) {
    size_t most = 0;
    if (kind >= CUPTI_KINDS || !state.enabled[kind])
        return 0;
    pthread_mutex_lock(&state.lock);
    const size_t size = record_size(kind);
    if (state.buffer != NULL && state.used + size > state.size)
        hand_over();
    if (state.buffer == NULL && state.requested != NULL) {
        state.size = state.used = 0;
        state.requested(&state.buffer, &state.size, &most);
    }
    const int fits = state.buffer != NULL && size <= state.size;
    const uint64_t start = now_ns() - ago;
    if (fits) {
        fill(state.buffer + state.used, kind, name, device, stream, start,
             length == 0 ? 0 : start + length, copy);
        state.used += size;
        state.unfinished += length == 0;
    } else {
        state.dropped++;
    }
    pthread_mutex_unlock(&state.lock);
    return fits;
}

/* A call of CUDA's, which subscribers see begin and end. */
int fake_cupti_call(void) {
    cupti_callback *callback;
    for (int site = 0; site < 2; site++) {
        const cupti_call call = {site};
        const cupti_subscriber subscriber = state.subscriber;
        memcpy(&callback, &subscriber, sizeof callback);
        if (callback != NULL && (state.domains & 1 << CUPTI_DOMAIN_RUNTIME) != 0)
            callback(NULL, CUPTI_DOMAIN_RUNTIME, 1, &call);
    }
    return 0;
}
