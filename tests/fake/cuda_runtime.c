/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_runtime.c - the CUDA runtime in ordinary memory (NCCL: cuda_nccl.c; the driver:
 * cuda_driver.c), for tests of the CUDA engine where there is no GPU: linked in place of libcudart.
 * Ranks are threads, each on a device of its own.  Streams do their work at once, kernels do
 * nothing, an exchange moves nothing.  All that is made is counted until it is given back, each
 * call can fail, and what waits for the device can be kept waiting (cuda_runtime.h).
 */
#include "config.h"

#include "cuda_runtime.h"

#include "backend/cuda/gpu.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { DEVICES = 4, OBJECTS = 1 << 14, PROBE = 4096 };

typedef enum kind {
    NONE,
    MEMORY,
    WINDOW, /* memory that peers were shown: in whole pages, or the one that is tried first */
    POOLED,
    PINNED,
    REGISTERED,
    STREAM,
    EVENT,
    POOL,
    COMM,
    KINDS
} kind;
static const char *const kinds[KINDS] = {"",
                                         "memory",
                                         "memory of windows",
                                         "memory of a pool",
                                         "pinned memory",
                                         "registered memory",
                                         "stream",
                                         "event",
                                         "pool",
                                         "communicator"};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t rests;
    struct {
        void *at;
        kind kind;
    } object[OBJECTS];
    int wrong, waiting;
    fake_busy busy;
    fake_kind fail_kind;
    int fail_device;
    long fail_at, calls;
    bool go;
    char failed[64];
} fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .rests = PTHREAD_COND_INITIALIZER, .fail_at = -1};

static _Thread_local int current = -1;

/* What the linker puts in front of the engine's own (--wrap). */
void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *at, size_t bytes);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *),
                          void *ctx);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *at, size_t bytes);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *),
                          void *ctx);

/* ---- what the test says ----------------------------------------------------- */

void fake_cuda_fail(fake_kind what, int device, long at) {
    pthread_mutex_lock(&fake.lock);
    fake.fail_kind = what;
    fake.fail_device = device;
    fake.fail_at = at;
    fake.calls = 0;
    fake.go = false;
    fake.failed[0] = '\0';
    pthread_mutex_unlock(&fake.lock);
}

void fake_cuda_go(void) {
    pthread_mutex_lock(&fake.lock);
    fake.go = true;
    pthread_cond_broadcast(&fake.rests);
    pthread_mutex_unlock(&fake.lock);
}

long fake_cuda_calls(void) { return fake.calls; }
const char *fake_cuda_failed(void) { return fake.failed; }
int fake_cuda_wrong(void) {
    const int wrong = fake.wrong;
    fake.wrong = 0;
    return wrong;
}

void fake_cuda_busy(fake_busy busy) {
    pthread_mutex_lock(&fake.lock);
    fake.busy = busy;
    pthread_cond_broadcast(&fake.rests);
    pthread_mutex_unlock(&fake.lock);
}

int fake_cuda_waiting(void) {
    pthread_mutex_lock(&fake.lock);
    const int n = fake.waiting;
    pthread_mutex_unlock(&fake.lock);
    return n;
}

void fake_cuda_forget(bool windows) {
    pthread_mutex_lock(&fake.lock);
    for (int i = 0; i < OBJECTS; i++)
        if (!windows || fake.object[i].kind == REGISTERED || fake.object[i].kind == WINDOW)
            fake.object[i].at = NULL;
    pthread_mutex_unlock(&fake.lock);
}

int fake_cuda_left(char *text, size_t size) {
    int left = 0, of[KINDS] = {0};
    size_t used = 0;
    pthread_mutex_lock(&fake.lock);
    for (int i = 0; i < OBJECTS; i++)
        of[fake.object[i].kind] += fake.object[i].at != NULL;
    pthread_mutex_unlock(&fake.lock);
    text[0] = '\0';
    for (int k = 1; k < KINDS; k++) {
        if (of[k] > 0 && used + 40 < size)
            used += (size_t)snprintf(text + used, size - used, "%s%d x %s", used > 0 ? ", " : "",
                                     of[k], kinds[k]);
        left += of[k];
    }
    return left;
}

/* ---- what it does ------------------------------------------------------------ */

#define COUNTED fake_cuda_note(__func__)

/* Is it this call's turn to fail? */
static bool turn(fake_kind what, const char *call) {
    if (what != FAKE_HANGS) /* which is asked of the same calls before FAKE_CALLS */
        fake_cuda_note(call);
    pthread_mutex_lock(&fake.lock);
    const bool now =
        fake.fail_kind == what && fake.fail_device == current && fake.calls++ == fake.fail_at;
    if (now)
        snprintf(fake.failed, sizeof fake.failed, "%s", call);
    pthread_mutex_unlock(&fake.lock);
    return now;
}
static _Thread_local cudaError_t last; /* of the thread's calls, until it asks */
static bool fails(const char *call) {
    if (turn(FAKE_HANGS, call)) {
        pthread_mutex_lock(&fake.lock);
        while (!fake.go)
            pthread_cond_wait(&fake.rests, &fake.lock);
        pthread_mutex_unlock(&fake.lock);
    }
    const bool now = turn(FAKE_CALLS, call);
    last = now ? cudaErrorUnknown : last;
    return now;
}
#define MAY_FAIL                                                                                   \
    do {                                                                                           \
        if (fails(__func__))                                                                       \
            return cudaErrorUnknown;                                                               \
    } while (0)

/* Until the device rests. */
static void wait_for(fake_busy least) {
    pthread_mutex_lock(&fake.lock);
    fake.waiting++;
    while (fake.busy >= least)
        pthread_cond_wait(&fake.rests, &fake.lock);
    fake.waiting--;
    pthread_mutex_unlock(&fake.lock);
}

static void note(void *at, kind k) {
    pthread_mutex_lock(&fake.lock);
    for (int i = 0; i < OBJECTS; i++)
        if (fake.object[i].at == NULL) {
            fake.object[i].at = at;
            fake.object[i].kind = k;
            pthread_mutex_unlock(&fake.lock);
            return;
        }
    abort();
}

/* Gives it back; false: it is none. */
static bool drop(void *at, kind k) {
    bool found = false;
    pthread_mutex_lock(&fake.lock);
    for (int i = 0; i < OBJECTS && !found; i++)
        if (fake.object[i].at == at &&
            (fake.object[i].kind == k || (fake.object[i].kind == WINDOW && k == MEMORY))) {
            fake.object[i].at = NULL;
            found = true;
        }
    fake.wrong += !found;
    pthread_mutex_unlock(&fake.lock);
    return found;
}

static cudaError_t make(void **out, size_t bytes, kind k) {
    const size_t room = (bytes / 256 + 1) * 256; /* addresses are aligned as CUDA's */
    void *p = aligned_alloc(256, room);
    if (p == NULL)
        return cudaErrorMemoryAllocation;
    memset(p, 0, room);
    note(p, k);
    *out = p;
    return cudaSuccess;
}

static cudaError_t unmake(void *at, kind k) {
    if (!drop(at, k))
        return cudaErrorInvalidValue;
    free(at);
    return cudaSuccess;
}

/* ---- devices ------------------------------------------------------------------ */

cudaError_t cudaGetDeviceCount(int *count) {
    MAY_FAIL;
    *count = DEVICES;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
    MAY_FAIL;
    *device = current;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    COUNTED;
    current = device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device) {
    MAY_FAIL;
    memset(prop, 0, sizeof *prop);
    snprintf(prop->name, sizeof prop->name, "a device in memory");
    prop->major = 9;
    prop->multiProcessorCount = 132;
    memset(prop->uuid.bytes, 0x40 + device, sizeof prop->uuid.bytes);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    (void)device;
    MAY_FAIL;
    *value = attribute == cudaDevAttrMultiProcessorCount            ? 132
             : attribute == cudaDevAttrComputeCapabilityMajor       ? 9
             : attribute == cudaDevAttrComputeCapabilityMinor       ? 0
             : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 232448
                                                                    : 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    MAY_FAIL;
    *can = device != peer;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    (void)peer;
    (void)flags;
    MAY_FAIL;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
    COUNTED;
    wait_for(FAKE_OTHERS);
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetLastError(void) {
    const cudaError_t e = last;
    last = cudaSuccess;
    return e;
}
const char *cudaGetErrorName(cudaError_t e) { return e == cudaSuccess ? "cudaSuccess" : "failed"; }
const char *cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "ok" : "as told"; }

/* ---- memory ------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **out, size_t bytes) {
    MAY_FAIL;
    const bool shown = bytes == PROBE || (bytes > 0 && bytes % GPU_WINDOW_PAGE == 0);
    return make(out, bytes, shown ? WINDOW : MEMORY);
}
cudaError_t cudaFree(void *at) {
    COUNTED;
    if (at == NULL)
        return cudaSuccess;
    wait_for(FAKE_OTHERS);
    return unmake(at, MEMORY);
}
cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    (void)flags;
    MAY_FAIL;
    return make(out, bytes, PINNED);
}
cudaError_t cudaFreeHost(void *at) {
    COUNTED;
    if (at == NULL)
        return cudaSuccess;
    wait_for(FAKE_OTHERS);
    return unmake(at, PINNED);
}
cudaError_t cudaHostRegister(void *at, size_t bytes, unsigned flags) {
    (void)bytes;
    (void)flags;
    MAY_FAIL;
    note(at, REGISTERED);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *at) {
    COUNTED;
    wait_for(FAKE_OTHERS);
    return drop(at, REGISTERED) ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaHostGetDevicePointer(void **out, void *host, unsigned flags) {
    (void)flags;
    MAY_FAIL;
    *out = host;
    return cudaSuccess;
}
cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *props) {
    (void)props;
    MAY_FAIL;
    return make((void **)pool, 1, POOL);
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) { return unmake(pool, POOL); }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr a, void *value) {
    (void)pool;
    (void)a;
    (void)value;
    MAY_FAIL;
    return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep) {
    (void)pool;
    (void)keep;
    return cudaSuccess;
}
cudaError_t cudaMallocFromPoolAsync(void **out, size_t bytes, cudaMemPool_t pool,
                                    cudaStream_t stream) {
    (void)pool;
    (void)stream;
    MAY_FAIL;
    return make(out, bytes, POOLED);
}
cudaError_t cudaFreeAsync(void *at, cudaStream_t stream) {
    COUNTED;
    (void)stream;
    return unmake(at, POOLED);
}
cudaError_t cudaMemGetInfo(size_t *have, size_t *all) {
    MAY_FAIL;
    *have = *all = (size_t)1 << 34;
    return cudaSuccess;
}
cudaError_t cudaMemset(void *at, int value, size_t bytes) {
    MAY_FAIL;
    wait_for(FAKE_OTHERS);
    memset(at, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
    (void)stream;
    MAY_FAIL;
    memset(at, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind k,
                            cudaStream_t stream) {
    (void)k;
    (void)stream;
    MAY_FAIL;
    memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind k,
                              cudaStream_t stream) {
    (void)k;
    (void)stream;
    MAY_FAIL;
    for (size_t i = 0; i < height; i++)
        memcpy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    return cudaSuccess;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *bytes,
                                 size_t count, struct cudaMemcpyAttributes *attributes,
                                 size_t *indices, size_t attribute_count, cudaStream_t stream) {
    (void)attributes;
    (void)indices;
    (void)attribute_count;
    (void)stream;
    MAY_FAIL;
    for (size_t i = 0; i < count; i++)
        memcpy(to[i], from[i], bytes[i]);
    return cudaSuccess;
}
#endif
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *at) {
    (void)handle;
    (void)at;
    return cudaErrorNotSupported;
}
cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags) {
    (void)out;
    (void)handle;
    (void)flags;
    return cudaErrorNotSupported;
}
cudaError_t cudaIpcCloseMemHandle(void *at) {
    (void)at;
    return cudaErrorNotSupported;
}

/* ---- streams and events --------------------------------------------------------- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
    (void)flags;
    MAY_FAIL;
    return make((void **)out, 1, STREAM);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    (void)flags;
    (void)priority;
    MAY_FAIL;
    return make((void **)out, 1, STREAM);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    COUNTED;
    return unmake(stream, STREAM);
}
/* The number of the capture that a stream is in, or an event was recorded in, is their first word.
 */
static _Atomic unsigned long long capturing, captures;

static unsigned long long *capture_word(const void *object) {
    return (unsigned long long *)(uintptr_t)object;
}
static unsigned long long capture_of(const void *stream) {
    const unsigned long long now = capturing;
    return stream != NULL && now != 0 && *capture_word(stream) == now ? now : 0;
}
void fake_cuda_capture(void *stream) {
    if (stream == NULL) {
        capturing = 0;
        return;
    }
    *capture_word(stream) = capturing = ++captures;
}

static cudaError_t ask(void) {
    pthread_mutex_lock(&fake.lock);
    const cudaError_t e = fake.busy == FAKE_ALL ? cudaErrorNotReady : cudaSuccess;
    pthread_mutex_unlock(&fake.lock);
    return e;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    COUNTED;
    return capture_of(stream) != 0 ? cudaErrorStreamCaptureUnsupported : ask();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    (void)stream;
    MAY_FAIL;
    wait_for(FAKE_ALL);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    (void)flags;
    MAY_FAIL;
    if (stream != NULL && capture_of(event) != 0)
        *capture_word(stream) = *capture_word(event); /* joins */
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    COUNTED;
    *status = capture_of(stream) != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    (void)edges;
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **nodes, size_t *count) {
#endif
    (void)graph;
    (void)nodes;
    (void)count;
    *id = capture_of(stream);
    *status = *id != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    COUNTED;
    (void)mode;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *out) {
    MAY_FAIL;
    return make((void **)out, 1, EVENT);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    (void)flags;
    MAY_FAIL;
    return make((void **)out, 1, EVENT);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    COUNTED;
    return unmake(event, EVENT);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    MAY_FAIL;
    *capture_word(event) = capture_of(stream);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    COUNTED;
    return *capture_word(event) != 0 ? cudaErrorCapturedEvent : ask();
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    (void)event;
    MAY_FAIL;
    wait_for(FAKE_ALL);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    COUNTED;
    (void)a;
    (void)b;
    *ms = 1.0F;
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *ctx) {
    (void)stream;
    MAY_FAIL;
    fn(ctx);
    return cudaSuccess;
}

/* ---- kernels ---------------------------------------------------------------------- */

#pragma GCC diagnostic ignored "-Wmissing-prototypes"

cudaError_t cudaFuncSetAttribute(const void *fn, enum cudaFuncAttribute a, int value) {
    (void)fn;
    (void)a;
    (void)value;
    MAY_FAIL;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *fn) {
    COUNTED;
    (void)fn;
    memset(out, 0, sizeof *out);
    out->ptxVersion = 90;
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *fn, void **args) {
    (void)config;
    (void)fn;
    (void)args;
    MAY_FAIL;
    return cudaSuccess;
}
cudaError_t cudaGetKernel(cudaKernel_t *kernel, const void *fn) {
    COUNTED;
    (void)kernel;
    (void)fn;
    return cudaErrorNotSupported;
}
/* What nvcc's code calls. */
void **__cudaRegisterFatBinary(void *binary) { return binary; }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
unsigned __cudaPushCallConfiguration(void) { return 0; }
cudaError_t __cudaPopCallConfiguration(void) { return cudaSuccess; }
cudaError_t __cudaGetKernel(void) { return cudaSuccess; }
cudaError_t __cudaLaunchKernel(void) { return fails("a kernel") ? cudaErrorUnknown : cudaSuccess; }

/* ---- memory and threads of the engine's own ------------------------------------------- */

void *__wrap_malloc(size_t bytes) {
    return turn(FAKE_MEMORY, "malloc") ? NULL : __real_malloc(bytes);
}
void *__wrap_calloc(size_t count, size_t bytes) {
    return turn(FAKE_MEMORY, "calloc") ? NULL : __real_calloc(count, bytes);
}
void *__wrap_realloc(void *at, size_t bytes) {
    return turn(FAKE_MEMORY, "realloc") ? NULL : __real_realloc(at, bytes);
}
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *),
                          void *ctx) {
    return turn(FAKE_THREADS, "pthread_create") ? EAGAIN
                                                : __real_pthread_create(thread, attr, fn, ctx);
}

/* ---- for the others ----------------------------------------------------------------- */

bool fake_cuda_turn(const char *call) { return fails(call); }
void fake_cuda_hold(void) { wait_for(FAKE_OTHERS); }
void *fake_cuda_make(size_t bytes) {
    void *p = NULL;
    return make(&p, bytes, COMM) == cudaSuccess ? p : NULL;
}
/* Not freed: a thread that was left in a call may still look at it. */
bool fake_cuda_unmake(void *p) { return drop(p, COMM); }
