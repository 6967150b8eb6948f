/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl.c - a stand-in for NCCL, for tests of the interposer: communicators between the
 * processes of one user on one machine, messages through files, carried out by the CPU
 * when a group ends (all sends, then all receives).  Every call is written to the file
 * that FAKE_NCCL_LOG names.  FAKE_NCCL_FAIL="ncclSend:4" makes a function return 4.
 * Of a message that is longer than its receiver takes the pieces come mixed up, as NCCL's do.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "preload/intercept/nccl_abi.h"

#define RANKS 16
#define ROOM 192 /* bytes of a communicator's files' names */

typedef struct hall { /* shared by all ranks */
    atomic_int arrived, color[RANKS], key[RANKS], there[RANKS];
} hall;

struct ncclComm {
    char name[ROOM];
    int rank, ranks, children;
    hall *hall;
    pid_t maker; /* a child of a fork has nothing to give back */
    long sent[RANKS], received[RANKS];
    atomic_int aborted;
    int member[RANKS];
};

typedef struct entry {
    int send, peer;
    void *at;
    size_t bytes;
    ncclComm_t comm;
    cudaStream_t stream;
} entry;

static __thread struct {
    int depth;
    entry entries[4096];
    int count, error;
} group;

static int (*cuda_sync)(cudaStream_t);
static int (*cuda_copy)(uintptr_t, uintptr_t, size_t);

static void nap(void) {
    const struct timespec t = {0, 50000};
    nanosleep(&t, NULL);
}

/* A text that every real one has; what tells that a program holds one inside. */
const char fake_nccl_mark[] = "NCCL_DEBUG_SUBSYS";

static void log_call(const char *format, ...) {
    const char *path = getenv("FAKE_NCCL_LOG");
    char line[512];
    va_list list;
    va_start(list, format);
    const int n = vsnprintf(line, sizeof line, format, list);
    va_end(list);
    int fd = path != NULL ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    if (fd < 0)
        return;
    if (write(fd, line, (size_t)n) != n)
        abort();
    close(fd);
}

static int failing(const char *name) {
    const char *fail = getenv("FAKE_NCCL_FAIL"), *colon = fail ? strchr(fail, ':') : NULL;
    if (colon == NULL || strncmp(fail, name, (size_t)(colon - fail)) != 0 ||
        name[colon - fail] != '\0')
        return 0;
    return (int)strtol(colon + 1, NULL, 10);
}
#define MAY_FAIL()                                                                                 \
    do {                                                                                           \
        const int r_ = failing(__func__);                                                          \
        if (r_ != 0)                                                                               \
            return r_;                                                                             \
    } while (0)

static void need_cuda(void) {
    if (cuda_sync != NULL)
        return;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *f;
    if (cuda == NULL) {
        fprintf(stderr, "fake NCCL: %s\n", dlerror());
        abort();
    }
    f = dlsym(cuda, "cuMemcpy");
    memcpy(&cuda_copy, &f, sizeof f);
    f = dlsym(cuda, "cuStreamSynchronize");
    memcpy(&cuda_sync, &f, sizeof f);
}

/* ---- communicators ---- */

static hall *hall_open(const char *name) {
    int fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)sizeof(hall)) != 0)
        return NULL;
    void *p = mmap(NULL, sizeof(hall), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return p == MAP_FAILED ? NULL : p;
}

/* Returns to nobody before all have come. */
static ncclResult_t join(ncclComm_t *out, const char *name, int ranks, int rank) {
    ncclComm_t c = calloc(1, sizeof *c);
    snprintf(c->name, sizeof c->name, "%s", name);
    c->rank = rank;
    c->ranks = ranks;
    c->maker = getpid();
    c->hall = hall_open(name);
    if (c->hall == NULL) {
        free(c);
        return ncclSystemError;
    }
    atomic_fetch_add(&c->hall->arrived, 1);
    while (atomic_load(&c->hall->arrived) < ranks)
        nap();
    *out = c;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) __attribute__((visibility("default")));
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%d-%ld", (int)getpid(), (long)time(NULL));
    return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *v) __attribute__((visibility("default")));
ncclResult_t ncclGetVersion(int *v) {
#ifndef FAKE_VERSION
#define FAKE_VERSION 22809
#endif
    *v = FAKE_VERSION;
    return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t c, int *n) __attribute__((visibility("default")));
ncclResult_t ncclCommCount(ncclComm_t c, int *n) {
    *n = c->ranks;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t c, int *n) __attribute__((visibility("default")));
ncclResult_t ncclCommUserRank(ncclComm_t c, int *n) {
    *n = c->rank;
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *e)
    __attribute__((visibility("default")));
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *e) {
    *e = atomic_load(&c->aborted) ? 6 : 0;
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    char name[ROOM];
    log_call("%s %d %d blocking=%d\n", __func__, ranks, rank, config ? config->blocking : -1);
    MAY_FAIL();
    snprintf(name, sizeof name, "/dev/shm/ep-fake-comm-%.100s", id.internal);
    return join(out, name, ranks, rank);
}
ncclResult_t ncclCommInitRank(ncclComm_t *out, int ranks, ncclUniqueId id, int rank) {
    log_call("%s\n", __func__);
    MAY_FAIL();
    return ncclCommInitRankConfig(out, ranks, id, rank, NULL);
}
#ifndef FAKE_OLD
ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int ranks, int rank, int ids,
                                      ncclUniqueId *id, ncclConfig_t *config) {
    return ids < 1 ? 4 : ncclCommInitRankConfig(out, ranks, id[0], rank, config);
}
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *info) {
    (void)info;
    log_call("%s\n", __func__);
    if (--group.depth == 0)
        group.count = 0;
    return ncclSuccess;
}
ncclResult_t ncclCommShrink(ncclComm_t c, int *excluded, int count, ncclComm_t *out,
                            ncclConfig_t *config, int flags) {
    char name[ROOM + 16];
    int rank = c->rank, n = c->children++;
    (void)config, (void)flags;
    for (int i = 0; i < count; i++)
        rank -= excluded[i] < c->rank;
    snprintf(name, sizeof name, "%.*s-r%d", ROOM - 8, c->name, n);
    return join(out, name, c->ranks - count, rank);
}
ncclResult_t ncclCommRevoke(ncclComm_t c, int flags) {
    (void)flags;
    atomic_store(&c->aborted, 1);
    return ncclSuccess;
}
#endif
ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices) {
    char name[ROOM];
    (void)devices;
    log_call("%s %d\n", __func__, count);
    if (count != 1)
        return 4;
    snprintf(name, sizeof name, "/dev/shm/ep-fake-comm-all-%d", (int)getpid());
    return join(comms, name, 1, 0);
}

ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *out,
                           ncclConfig_t *config) {
    char name[ROOM + 32];
    const int n = c->children++;
    (void)config;
    log_call("%s color=%d\n", __func__, color);
    MAY_FAIL();
    snprintf(name, sizeof name, "%.*s-s%d", ROOM - 16, c->name, n);
    hall *h = hall_open(name);
    atomic_store(&h->color[c->rank], color);
    atomic_store(&h->key[c->rank], key);
    atomic_store(&h->there[c->rank], 1);
    int ranks = 0, rank = 0;
    for (int r = 0; r < c->ranks; r++) {
        while (!atomic_load(&h->there[r]))
            nap();
        if (atomic_load(&h->color[r]) != color)
            continue;
        ranks++;
        rank += h->key[r] < key || (h->key[r] == key && r < c->rank);
    }
    munmap(h, sizeof *h);
    *out = NULL;
    if (color < 0)
        return ncclSuccess;
    snprintf(name, sizeof name, "%.*s-s%d-c%d", ROOM - 16, c->name, n, color);
    return join(out, name, ranks, rank);
}

static ncclResult_t end(ncclComm_t c) {
    if (c->maker != getpid())
        return ncclUnhandledCudaError;
    if (atomic_fetch_sub(&c->hall->arrived, 1) == 1)
        unlink(c->name);
    munmap(c->hall, sizeof *c->hall);
    free(c);
    return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t c) {
    log_call("%s\n", __func__);
    MAY_FAIL();
    return end(c);
}
ncclResult_t ncclCommAbort(ncclComm_t c) {
    log_call("%s\n", __func__);
    atomic_store(&c->aborted, 1);
    return end(c);
}

/* ---- messages ---- */

static void mailbox(char *path, size_t room, ncclComm_t c, int from, int to, long n) {
    snprintf(path, room, "%.*s-m%d-%d-%ld", ROOM, c->name, from, to, n);
}

static void post(const entry *e) {
    char path[ROOM + 96], hidden[ROOM + 104];
    ncclComm_t c = e->comm;
    mailbox(path, sizeof path, c, c->rank, e->peer, c->sent[e->peer]++);
    snprintf(hidden, sizeof hidden, "%s.part", path);
    int fd = open(hidden, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    char *copy = malloc(e->bytes + 1);
    if (cuda_copy((uintptr_t)copy, (uintptr_t)e->at, e->bytes) != 0 ||
        write(fd, copy, e->bytes) != (ssize_t)e->bytes)
        abort();
    free(copy);
    close(fd);
    if (rename(hidden, path) != 0)
        abort();
}

/* Messages that were received here, so were NCCL's. */
static atomic_int fetched;
int fake_nccl_fetched(void) __attribute__((visibility("default")));
int fake_nccl_fetched(void) { return atomic_load(&fetched); }

static void mix_up(char *bytes, size_t count) {
    for (size_t i = 0; i < count / 2; i++) {
        const char first = bytes[i];
        bytes[i] = bytes[count / 2 + i];
        bytes[count / 2 + i] = first;
    }
}

static void fetch(const entry *e) {
    char path[ROOM + 96];
    ncclComm_t c = e->comm;
    int fd;
    mailbox(path, sizeof path, c, e->peer, c->rank, c->received[e->peer]++);
    while ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
        nap();
    char *copy = malloc(e->bytes + 1);
    const ssize_t n = read(fd, copy, e->bytes);
    if (lseek(fd, 0, SEEK_END) > (off_t)e->bytes)
        mix_up(copy, e->bytes);
    atomic_fetch_add(&fetched, 1);
    if (n > 0 && cuda_copy((uintptr_t)e->at, (uintptr_t)copy, (size_t)n) != 0)
        abort();
    cuda_sync(NULL); /* a copy from the host returns before it has arrived */
    free(copy);
    close(fd);
    unlink(path);
}

static ncclResult_t launch(void) {
    int r = group.error;
    for (int i = 0; i < group.count && r == 0; i++)
        need_cuda(), cuda_sync(group.entries[i].stream);
    for (int i = 0; i < group.count && r == 0; i++)
        if (group.entries[i].send)
            post(&group.entries[i]);
    for (int i = 0; i < group.count && r == 0; i++)
        if (!group.entries[i].send)
            fetch(&group.entries[i]);
    group.count = group.error = 0;
    return r;
}

ncclResult_t ncclGroupStart(void) {
    log_call("%s\n", __func__);
    MAY_FAIL();
    group.depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void) {
    log_call("%s\n", __func__);
    if (group.depth == 0)
        return ncclInvalidUsage;
    if (--group.depth > 0)
        return ncclSuccess;
    const int r = failing(__func__);
    if (r != 0)
        group.error = r;
    return launch();
}

static ncclResult_t add(int send, void *at, size_t bytes, int peer, ncclComm_t c,
                        cudaStream_t stream) {
    if (c == NULL || peer < 0 || peer >= c->ranks) {
        group.error = group.depth > 0 ? 4 : 0;
        return 4;
    }
    group.entries[group.count++] = (entry){send, peer, at, bytes, c, stream};
    return group.depth == 0 ? launch() : ncclSuccess;
}

ncclResult_t ncclSend(const void *b, size_t count, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t s) {
    log_call("%s %zu %d %d\n", __func__, count, type, peer);
    MAY_FAIL();
    return add(1, (void *)(uintptr_t)b, count * epo_nccl_type_bytes(type), peer, c, s);
}
ncclResult_t ncclRecv(void *b, size_t count, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t s) {
    log_call("%s %zu %d %d\n", __func__, count, type, peer);
    MAY_FAIL();
    return add(0, b, count * epo_nccl_type_bytes(type), peer, c, s);
}

#ifndef FAKE_OLD
/* Through our own public functions, as some releases do. */
ncclResult_t ncclAlltoAll(const void *send, void *recv, size_t count, ncclDataType_t type,
                          ncclComm_t c, cudaStream_t s) {
    const size_t bytes = count * epo_nccl_type_bytes(type);
    log_call("%s %zu %d\n", __func__, count, type);
    ncclResult_t r = ncclGroupStart();
    for (int p = 0; p < c->ranks && r == 0; p++) {
        r = ncclSend((const char *)send + (size_t)p * bytes, count, type, p, c, s);
        if (r == 0)
            r = ncclRecv((char *)recv + (size_t)p * bytes, count, type, p, c, s);
    }
    const ncclResult_t ended = ncclGroupEnd();
    return r != 0 ? r : ended;
}
#endif

/* The others only answer. */
ncclResult_t ncclAllReduce(const void *a, void *b, size_t n, ncclDataType_t t, ncclRedOp_t op,
                           ncclComm_t c, cudaStream_t s) {
    (void)a, (void)b, (void)c, (void)s;
    log_call("%s %zu %d %d\n", __func__, n, t, op);
    MAY_FAIL();
    return ncclSuccess;
}
ncclResult_t ncclAllGather(const void *a, void *b, size_t n, ncclDataType_t t, ncclComm_t c,
                           cudaStream_t s) {
    (void)a, (void)b, (void)c, (void)s;
    log_call("%s %zu %d\n", __func__, n, t);
    return ncclSuccess;
}
ncclResult_t ncclReduceScatter(const void *a, void *b, size_t n, ncclDataType_t t, ncclRedOp_t op,
                               ncclComm_t c, cudaStream_t s) {
    (void)a, (void)b, (void)c, (void)s;
    log_call("%s %zu %d %d\n", __func__, n, t, op);
    return ncclSuccess;
}
ncclResult_t ncclBroadcast(const void *a, void *b, size_t n, ncclDataType_t t, int root,
                           ncclComm_t c, cudaStream_t s) {
    (void)a, (void)b, (void)c, (void)s;
    log_call("%s %zu %d %d\n", __func__, n, t, root);
    return ncclSuccess;
}
ncclResult_t ncclReduce(const void *a, void *b, size_t n, ncclDataType_t t, ncclRedOp_t op,
                        int root, ncclComm_t c, cudaStream_t s) {
    (void)a, (void)b, (void)c, (void)s;
    log_call("%s %zu %d %d %d\n", __func__, n, t, op, root);
    return ncclSuccess;
}
