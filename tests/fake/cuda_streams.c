/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_streams.c - a stand-in for libcuda, for tests on machines without a GPU: streams are
 * threads that work off a list, memory is shared memory, captured operations are called
 * again when their graph is launched.  It is no model of a GPU's speed or concurrency.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "cuda_pieces.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct mark { /* of one record of an event: held by the event and by what looks at it */
    atomic_int reached, holders;
} mark;

typedef struct event {
    mark *last;                 /* of the latest record; NULL: never recorded; under `lock` */
    struct stream *captured_on; /* recorded there while it was captured */
    int captured;               /* ever */
} event;

typedef enum kind { COPY, WAIT, WAIT_AT_LEAST, WRITE, RECORD, AFTER, HOST } kind;

typedef struct operation {
    struct operation *next;
    kind kind;
    void *to;
    const void *from;
    size_t count;
    uint32_t value;
    event *event;
    mark *mark; /* held */
    void (*host)(void *);
    struct stream *stream;
} operation;

typedef struct graph {
    operation *first, **last;
} graph;

typedef struct stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    operation *first, **last;
    int busy, stop;
    graph *capture;
    unsigned long long id; /* never used twice */
} stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static stream *default_stream;
static int context_object;

static void nap(void) {
    const struct timespec t = {0, 20000};
    nanosleep(&t, NULL);
}

static void mark_put(mark *m) {
    if (m != NULL && atomic_fetch_sub(&m->holders, 1) == 1)
        free(m);
}

/* The event's mark, held. */
static mark *mark_of(event *e) {
    pthread_mutex_lock(&lock);
    mark *m = e->last;
    if (m != NULL)
        atomic_fetch_add(&m->holders, 1);
    pthread_mutex_unlock(&lock);
    return m;
}

/* The event's mark from now on. */
static void mark_new(event *e) {
    mark *m = calloc(1, sizeof *m);
    atomic_init(&m->holders, 1);
    pthread_mutex_lock(&lock);
    mark_put(e->last);
    e->last = m;
    pthread_mutex_unlock(&lock);
}

static void run(operation *o) {
    switch (o->kind) {
    case COPY: memmove(o->to, o->from, o->count); break;
    case WRITE: atomic_store((atomic_uint *)o->to, o->value); break;
    case WAIT:
        while (atomic_load((atomic_uint *)o->to) != o->value)
            nap();
        break;
    case WAIT_AT_LEAST:
        while ((int32_t)(atomic_load((atomic_uint *)o->to) - o->value) < 0)
            nap();
        break;
    case RECORD: atomic_store(&o->mark->reached, 1); break;
    case AFTER:
        while (o->mark != NULL && !atomic_load(&o->mark->reached))
            nap();
        break;
    case HOST: o->host(o->to); break;
    }
    mark_put(o->mark);
}

static void *work(void *argument) {
    stream *s = argument;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (s->first == NULL && !s->stop)
            pthread_cond_wait(&s->wake, &s->lock);
        operation *o = s->first;
        if (o == NULL)
            break;
        s->first = o->next;
        if (s->first == NULL)
            s->last = &s->first;
        s->busy = 1;
        pthread_mutex_unlock(&s->lock);
        run(o);
        free(o);
        pthread_mutex_lock(&s->lock);
        s->busy = 0;
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static stream *stream_new(void) {
    static atomic_int number;
    stream *s = calloc(1, sizeof *s);
    s->id = (unsigned long long)atomic_fetch_add(&number, 1);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    s->last = &s->first;
    pthread_create(&s->thread, NULL, work, s);
    return s;
}

static stream *stream_of(stream *s) {
    pthread_mutex_lock(&lock);
    if (s == NULL && default_stream == NULL)
        default_stream = stream_new();
    s = s == NULL ? default_stream : s;
    pthread_mutex_unlock(&lock);
    return s;
}

static int put(stream *s, operation o) {
    operation *copy = malloc(sizeof *copy);
    s = stream_of(s);
    *copy = o;
    copy->next = NULL;
    copy->stream = s;
    if (s->capture != NULL) {
        *s->capture->last = copy;
        s->capture->last = &copy->next;
        return 0;
    }
    pthread_mutex_lock(&s->lock);
    *s->last = copy;
    s->last = &copy->next;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

/* FAKE_CUDA_FAIL=NAME:N: in process number FAKE_CUDA_FAIL_RANK (0) the calls of NAME fail from the
 * N-th on. */
int fake_fails(const char *name) {
    static atomic_int calls;
    const char *given = getenv("FAKE_CUDA_FAIL"), *rank = getenv("RANK"),
               *who = getenv("FAKE_CUDA_FAIL_RANK");
    const size_t n = strlen(name);
    if (given == NULL || strncmp(given, name, n) != 0 || given[n] != ':' || rank == NULL ||
        strcmp(rank, who != NULL ? who : "0") != 0)
        return 0;
    return atomic_fetch_add(&calls, 1) + 1 >= strtol(given + n + 1, NULL, 10);
}
#define FAILS                                                                                      \
    if (fake_fails(__func__))                                                                      \
    return 2

/* ---- memory ---- */

typedef struct handle {
    char name[48];
    uint64_t size;
} handle;

#define BLOCKS 256
static struct {
    void *at;
    uint64_t number; /* never used twice */
    handle handle;
} blocks[BLOCKS];
static struct {
    void *at;
    size_t size;
} opened[BLOCKS];

EXPORT int cuMemAlloc_v2(uintptr_t *out, size_t size) {
    if (pieces_wanted() > 0)
        return pieces_alloc(out, size);
    static atomic_int number;
    handle h = {.size = size};
    const char *unique = getenv("UNIQUE");
    const int mine = atomic_fetch_add(&number, 1);
    snprintf(h.name, sizeof h.name, "/dev/shm/ep-fake-%.16s-%d-%d", unique != NULL ? unique : "",
             (int)getpid(), mine);
    int fd = open(h.name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    void *p = MAP_FAILED;
    if (fd >= 0 && posix_fallocate(fd, 0, (off_t)size) == 0)
        p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    if (p == MAP_FAILED)
        return 2;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].at == NULL) {
            blocks[i].at = p;
            blocks[i].handle = h;
            blocks[i].number = (uint64_t)mine + 1;
            break;
        }
    pthread_mutex_unlock(&lock);
    *out = (uintptr_t)p;
    return 0;
}

static int block_of(uintptr_t p) {
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].at == (void *)p)
            return i;
    return -1;
}

EXPORT int cuMemFree_v2(uintptr_t p) {
    pthread_mutex_lock(&lock);
    const int i = block_of(p);
    if (i >= 0) {
        unlink(blocks[i].handle.name);
        munmap(blocks[i].at, blocks[i].handle.size);
        blocks[i].at = NULL;
    }
    pthread_mutex_unlock(&lock);
    return i < 0 ? pieces_free(p) : 0;
}

typedef struct {
    unsigned char byte[64];
} ipc;

EXPORT int cuIpcGetMemHandle(ipc *out, uintptr_t p) {
    FAILS;
    pthread_mutex_lock(&lock);
    const int i = block_of(p);
    if (i >= 0)
        memcpy(out, &blocks[i].handle, sizeof(handle));
    pthread_mutex_unlock(&lock);
    return i < 0;
}

/* FAKE_CUDA_NO_P2P=N: process number N cannot open anybody's memory.  FAKE_CUDA_SLOW=N: process
 * number N takes long to open some. */
EXPORT int cuIpcOpenMemHandle_v2(uintptr_t *out, ipc in, unsigned flags) {
    FAILS;
    handle h;
    const char *rank = getenv("RANK"), *without = getenv("FAKE_CUDA_NO_P2P"),
               *slow = getenv("FAKE_CUDA_SLOW");
    (void)flags;
    if (rank != NULL && slow != NULL && strcmp(rank, slow) == 0)
        usleep(200000);
    if (rank != NULL && without != NULL && strcmp(rank, without) == 0)
        return 217;
    memcpy(&h, &in, sizeof h);
    int fd = open(h.name, O_RDWR | O_CLOEXEC);
    void *p = fd >= 0 ? mmap(NULL, h.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (fd >= 0)
        close(fd);
    *out = (uintptr_t)p;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BLOCKS && p != MAP_FAILED; i++)
        if (opened[i].at == NULL) {
            opened[i].at = p;
            opened[i].size = h.size;
            break;
        }
    pthread_mutex_unlock(&lock);
    return p == MAP_FAILED ? 1 : 0;
}

/* FAKE_CUDA_NO_IPC=N: nobody can open what process number N allocated for itself (not the
 * interposer's windows, which are asked for without looking). */
static int attribute_of(void *out, int what, uintptr_t p) {
    const char *rank = getenv("RANK"), *without = getenv("FAKE_CUDA_NO_IPC");
    for (int i = 0; i < BLOCKS; i++) {
        const uintptr_t at = (uintptr_t)blocks[i].at;
        if (at == 0 || p < at || p - at >= blocks[i].handle.size)
            continue;
        if (what == 7)
            *(uint64_t *)out = blocks[i].number;
        else if (what == 10)
            *(unsigned *)out = rank == NULL || without == NULL || strcmp(rank, without) != 0;
        else if (what == 11)
            *(uintptr_t *)out = at;
        else if (what == 12)
            *(size_t *)out = blocks[i].handle.size;
        else
            return 1;
        return 0;
    }
    return pieces_attribute(out, what, p);
}
EXPORT int cuPointerGetAttribute(void *out, int what, uintptr_t p) {
    FAILS;
    pthread_mutex_lock(&lock);
    const int r = attribute_of(out, what, p);
    pthread_mutex_unlock(&lock);
    return r;
}

EXPORT int cuIpcCloseMemHandle(uintptr_t p) {
    FAILS;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BLOCKS; i++)
        if (opened[i].at == (void *)p) {
            munmap(opened[i].at, opened[i].size);
            opened[i].at = NULL;
            break;
        }
    pthread_mutex_unlock(&lock);
    return 0;
}
/* How much of others' memory is open. */
EXPORT int fake_cuda_opened(int *out) {
    *out = pieces_opened();
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BLOCKS; i++)
        *out += opened[i].at != NULL;
    pthread_mutex_unlock(&lock);
    return 0;
}
EXPORT int cuMemHostRegister_v2(void *p, size_t size, unsigned flags) {
    FAILS;
    (void)p, (void)size, (void)flags;
    return 0;
}
EXPORT int cuMemHostUnregister(void *p) {
    FAILS;
    (void)p;
    return 0;
}
EXPORT int cuMemHostGetDevicePointer_v2(uintptr_t *out, void *p, unsigned flags) {
    FAILS;
    (void)flags;
    *out = (uintptr_t)p;
    return 0;
}

/* ---- context ---- */

EXPORT int cuDriverGetVersion(int *version) {
    *version = 12040;
    return 0;
}
EXPORT int cuGetErrorName(int r, const char **name) {
    (void)r;
    *name = "CUDA_ERROR_FAKE";
    return 0;
}
EXPORT int cuCtxGetCurrent(void **out) {
    FAILS;
    *out = &context_object;
    return 0;
}
EXPORT int cuCtxPushCurrent_v2(void *c) {
    FAILS;
    return c == &context_object ? 0 : 201;
}
EXPORT int cuCtxPopCurrent_v2(void **c) {
    FAILS;
    return cuCtxGetCurrent(c);
}
EXPORT int cuCtxGetStreamPriorityRange(int *least, int *most) {
    FAILS;
    *least = 0;
    *most = -5;
    return 0;
}

/* ---- streams and events ---- */

EXPORT int cuStreamCreateWithPriority(stream **out, unsigned flags, int priority) {
    FAILS;
    (void)flags, (void)priority;
    *out = stream_new();
    return 0;
}
EXPORT int cuStreamDestroy_v2(stream *s) {
    pthread_mutex_lock(&s->lock);
    s->stop = 1;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->wake);
    free(s);
    return 0;
}
/* FAKE_CUDA_STREAM_ID=no: a driver that does not tell. */
EXPORT int cuStreamGetId(stream *s, unsigned long long *id) {
    const char *given = getenv("FAKE_CUDA_STREAM_ID");
    if (given != NULL && strcmp(given, "no") == 0)
        return 801;
    *id = stream_of(s)->id;
    return 0;
}
EXPORT int cuStreamQuery(stream *s) {
    s = stream_of(s);
    pthread_mutex_lock(&s->lock);
    const int busy = s->busy || s->first != NULL;
    pthread_mutex_unlock(&s->lock);
    return busy ? 600 : 0;
}
EXPORT int cuStreamSynchronize(stream *s) {
    while (cuStreamQuery(s) == 600)
        nap();
    return 0;
}
EXPORT int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t count, stream *s) {
    FAILS;
    return put(
        s, (operation){.kind = COPY, .to = (void *)to, .from = (const void *)from, .count = count});
}
typedef struct attributes {
    int order, hints[4];
    unsigned flags;
} attributes;
EXPORT int cuMemcpyBatchAsync_v2(uintptr_t *to, uintptr_t *from, size_t *bytes, size_t count,
                                 attributes *a, size_t *first, size_t kinds, stream *s) {
    if (s == NULL || count != 1 || kinds != 1 || *first != 0 || a->order != 1 || a->flags != 1 ||
        s->capture != NULL)
        return 1; /* as libcuda: not on the default stream, not in a graph */
    return cuMemcpyAsync(*to, *from, *bytes, s);
}
EXPORT int cuMemcpy(uintptr_t to, uintptr_t from, size_t count) {
    memcpy((void *)to, (const void *)from, count);
    return 0;
}
/* FAKE_CUDA_BATCH: "no": this driver takes words one by one alone; "only": in a row alone. */
static int batch_is(const char *word) {
    const char *given = getenv("FAKE_CUDA_BATCH");
    return given != NULL && strcmp(given, word) == 0;
}
static int put_wait(stream *s, uintptr_t at, uint32_t value, unsigned flags) {
    if (flags > 1)
        return 1;
    return put(s, (operation){
                      .kind = flags == 1 ? WAIT : WAIT_AT_LEAST, .to = (void *)at, .value = value});
}
static int put_write(stream *s, uintptr_t at, uint32_t value) {
    return put(s, (operation){.kind = WRITE, .to = (void *)at, .value = value});
}
EXPORT int cuStreamWaitValue32_v2(stream *s, uintptr_t at, uint32_t value, unsigned flags) {
    FAILS;
    return batch_is("only") ? 801 : put_wait(s, at, value, flags);
}
EXPORT int cuStreamWriteValue32_v2(stream *s, uintptr_t at, uint32_t value, unsigned flags) {
    FAILS;
    (void)flags;
    return batch_is("only") ? 801 : put_write(s, at, value);
}
typedef union word_operation {
    struct {
        int what; /* 1: waits, 2: writes */
        uintptr_t at;
        uint32_t value, value_high;
        unsigned flags;
    } word;
    uint64_t pad[6];
} word_operation;
EXPORT int cuStreamBatchMemOp_v2(stream *s, unsigned count, const word_operation *o,
                                 unsigned flags) {
    FAILS;
    int r = batch_is("no") ? 801 : flags != 0 || count > 256 ? 1 : 0;
    for (unsigned i = 0; i < count && r == 0; i++)
        r = o[i].word.what == 1   ? put_wait(s, o[i].word.at, o[i].word.value, o[i].word.flags)
            : o[i].word.what == 2 ? put_write(s, o[i].word.at, o[i].word.value)
                                  : 1;
    return r;
}
EXPORT int cuLaunchHostFunc(stream *s, void (*host)(void *), void *argument) {
    return put(s, (operation){.kind = HOST, .host = host, .to = argument});
}
EXPORT int cuEventCreate(event **out, unsigned flags) {
    FAILS;
    (void)flags;
    *out = calloc(1, sizeof **out);
    return 0;
}
EXPORT int cuEventQuery(event *e) {
    FAILS;
    mark *m = mark_of(e);
    const int reached = m == NULL || atomic_load(&m->reached);
    mark_put(m);
    return reached ? 0 : 600;
}
EXPORT int cuEventDestroy_v2(event *e) {
    if (!e->captured) /* (else a graph may hold it) */
        mark_put(e->last), free(e);
    return 0;
}
EXPORT int cuEventRecordWithFlags(event *e, stream *s, unsigned flags) {
    s = stream_of(s);
    if (flags == 0)
        e->captured_on = s->capture != NULL ? s : NULL;
    if (s->capture == NULL)
        mark_new(e);
    else
        e->captured = 1;
    return put(s, (operation){.kind = RECORD, .event = e, .mark = mark_of(e)});
}
EXPORT int cuEventRecord(event *e, stream *s) {
    FAILS;
    return cuEventRecordWithFlags(e, s, 0);
}
EXPORT int cuStreamWaitEvent(stream *s, event *e, unsigned flags) {
    FAILS;
    s = stream_of(s);
    if (flags == 0 && e->captured_on != NULL && e->captured_on->capture != NULL)
        s->capture = e->captured_on->capture; /* joins */
    return put(s, (operation){.kind = AFTER, .event = e, .mark = mark_of(e)});
}

/* ---- a module: of bytes that begin with its mark, one kernel, which copies ---- */

EXPORT int cuCtxGetDevice(int *out) {
    FAILS;
    return *out = 0;
}
EXPORT int cuDeviceGetAttribute(int *out, int what, int device) {
    FAILS;
    *out = 7;
    return what != 16 || device != 0;
}
EXPORT int cuModuleLoadData(void **out, const void *bytes) {
    FAILS;
    *out = &context_object;
    return memcmp(bytes, "fake module", 11) == 0 ? 0 : 200;
}
EXPORT int cuModuleUnload(void *module) {
    FAILS;
    return module != &context_object;
}
EXPORT int cuModuleGetFunction(void **out, void *module, const char *name) {
    FAILS;
    *out = module;
    return strcmp(name, "epo_copy") == 0 ? 0 : 500;
}
/* As the kernel: by 16 bytes, of addresses that are multiples of that. */
EXPORT int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, stream *s, void **arguments, void **extra) {
    FAILS;
    (void)f, (void)shared, (void)extra;
    const uintptr_t to = *(uintptr_t *)arguments[0], from = *(uintptr_t *)arguments[1];
    const unsigned long long count = *(unsigned long long *)arguments[2];
    if (x != 7 || y * z * by * bz != 1 || bx != 32 || (to | from | count) % 16 != 0)
        return 1;
    return put(
        s, (operation){
               .kind = COPY, .to = (void *)to, .from = (const void *)from, .count = (size_t)count});
}

/* ---- capture ---- */

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) {
    FAILS;
    *mode = 0;
    return 0;
}
EXPORT int cuStreamIsCapturing(stream *s, int *status) {
    FAILS;
    *status = stream_of(s)->capture != NULL;
    return 0;
}
EXPORT int cuStreamGetCaptureInfo_v2(stream *s, int *status, uint64_t *id, void **g,
                                     const void ***deps, size_t *count) {
    (void)g, (void)deps, (void)count;
    s = stream_of(s);
    *status = s->capture != NULL;
    *id = (uint64_t)(uintptr_t)s->capture;
    return 0;
}
EXPORT int cuStreamBeginCapture_v2(stream *s, int mode) {
    (void)mode;
    graph *g = calloc(1, sizeof *g);
    g->last = &g->first;
    stream_of(s)->capture = g;
    return 0;
}
EXPORT int cuStreamEndCapture(stream *s, graph **out) {
    s = stream_of(s);
    *out = s->capture;
    for (operation *o = s->capture->first; o != NULL; o = o->next)
        o->stream->capture = NULL;
    s->capture = NULL;
    return 0;
}
EXPORT int cuGraphLaunch(graph *g, stream *s) {
    (void)s; /* the stream that was captured, in these tests */
    for (operation *o = g->first; o != NULL; o = o->next) {
        operation again = *o;
        if (o->kind == RECORD)
            mark_new(o->event);
        if (o->kind == RECORD || o->kind == AFTER)
            again.mark = mark_of(o->event);
        put(o->stream, again);
    }
    return 0;
}
EXPORT int cuGraphDestroy(graph *g) {
    for (operation *o = g->first, *next; o != NULL; o = next) {
        next = o->next;
        mark_put(o->mark);
        free(o);
    }
    free(g);
    return 0;
}
