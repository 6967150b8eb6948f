/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_pieces.c - the stand-in for libcuda: cuMemCreate's memory, which is mapped in pieces and has
 * no handle of the older kind.  A piece is a memory file; its handle for others a descriptor.
 */
#define _GNU_SOURCE
#include "cuda_pieces.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define PIECES 16384
#define RANGES 256

typedef struct piece {
    int file; /* 0: no such piece */
    int holders;
    size_t size;
    uint64_t number; /* never used twice */
    int imported;
} piece;

static struct {
    pthread_mutex_t lock;
    piece piece[PIECES];
    struct {
        uintptr_t at;
        size_t size;
        piece *of;
    } mapped[PIECES];
    struct {
        uintptr_t at;
        size_t size;
    } range[RANGES]; /* reserved */
    uint64_t numbers;
} context = {.lock = PTHREAD_MUTEX_INITIALIZER, .numbers = UINT64_C(1) << 32};

static int is_rank(const char *variable) {
    const char *rank = getenv("RANK"), *given = getenv(variable);
    return rank != NULL && given != NULL && strcmp(rank, given) == 0;
}

size_t pieces_wanted(void) {
    const char *given = getenv("FAKE_CUDA_PIECES");
    return given != NULL ? strtoul(given, NULL, 10) : 0;
}

/* ---- pieces; lock held ---- */

static piece *piece_new(int file, size_t size, int imported) {
    for (int i = 0; i < PIECES && file > 0; i++) {
        piece *p = &context.piece[i];
        if (p->file == 0) {
            *p = (piece){file, 1, size, ++context.numbers, imported};
            return p;
        }
    }
    return NULL;
}

static void piece_put(piece *p) {
    if (--p->holders == 0) {
        close(p->file);
        p->file = 0;
    }
}

static int map_one(uintptr_t at, piece *p) {
    for (int i = 0; i < PIECES; i++)
        if (context.mapped[i].of == NULL) {
            if (mmap((void *)at, p->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, p->file,
                     0) == MAP_FAILED)
                return 2;
            context.mapped[i].at = at;
            context.mapped[i].size = p->size;
            context.mapped[i].of = p;
            p->holders++;
            return 0;
        }
    return 2;
}

/* All that lies within. */
static int unmap(uintptr_t at, size_t size) {
    int count = 0;
    for (int i = 0; i < PIECES; i++)
        if (context.mapped[i].of != NULL && context.mapped[i].at - at < size) {
            piece_put(context.mapped[i].of);
            context.mapped[i].of = NULL;
            count++;
        }
    if (mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
        MAP_FAILED)
        return 2;
    return count == 0;
}

static int mapped_at(uintptr_t p) {
    for (int i = 0; i < PIECES; i++)
        if (context.mapped[i].of != NULL && p - context.mapped[i].at < context.mapped[i].size)
            return i;
    return -1;
}

/* A driver has no descriptors: out of the way of a test that counts them. */
static int keep(int file) { return fcntl(file, F_DUPFD_CLOEXEC, 300); }

/* ---- the program's allocations ---- */

static int fill(uintptr_t at, size_t size, size_t each) {
    for (size_t done = 0; done < size; done += each) {
        const int made = memfd_create("ep-fake-piece", MFD_CLOEXEC), file = keep(made);
        if (made >= 0)
            close(made);
        if (file < 0 || ftruncate(file, (off_t)each) != 0)
            return 2;
        piece *p = piece_new(file, each, 0);
        if (p == NULL || map_one(at + done, p) != 0)
            return 2;
        piece_put(p);
    }
    return 0;
}

int pieces_alloc(uintptr_t *out, size_t size) {
    const size_t each = pieces_wanted(), whole = (size + each - 1) / each * each;
    void *p = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int r = 2;
    if (p == MAP_FAILED)
        return 2;
    pthread_mutex_lock(&context.lock);
    for (int i = 0; i < RANGES && r != 0; i++)
        if (context.range[i].at == 0) {
            context.range[i].at = *out = (uintptr_t)p;
            context.range[i].size = whole;
            r = fill(*out, whole, each);
            break;
        }
    pthread_mutex_unlock(&context.lock);
    return r;
}

int pieces_free(uintptr_t p) {
    int r = 1;
    pthread_mutex_lock(&context.lock);
    for (int i = 0; i < RANGES && r != 0; i++)
        if (context.range[i].at == p && p != 0) {
            r = unmap(p, context.range[i].size);
            munmap((void *)p, context.range[i].size);
            context.range[i].at = 0;
        }
    pthread_mutex_unlock(&context.lock);
    return r;
}

/* Every third piece of an allocation, from `first` on, is unmapped and a new one is in its place,
 * as expandable segments do with what is free between what is not. */
EXPORT int fake_cuda_renew(uintptr_t p, int first) {
    const size_t each = pieces_wanted();
    int r = 1;
    pthread_mutex_lock(&context.lock);
    for (int i = 0; i < RANGES && each > 0 && r != 0; i++)
        if (context.range[i].at == p && p != 0) {
            r = 0;
            for (size_t at = (size_t)first * each; at < context.range[i].size; at += 3 * each)
                r = r != 0 || unmap(p + at, each) != 0 || fill(p + at, each, each) != 0;
        }
    pthread_mutex_unlock(&context.lock);
    return r;
}

/* The range that was reserved, as libcuda has it; of imported ones nobody asks. */
static int range_of(uintptr_t p) {
    for (int i = 0; i < RANGES; i++)
        if (context.range[i].at != 0 && p - context.range[i].at < context.range[i].size)
            return i;
    return -1;
}

int pieces_attribute(void *out, int what, uintptr_t p) {
    pthread_mutex_lock(&context.lock);
    const int i = mapped_at(p), r = range_of(p);
    if (i >= 0 && what == 7)
        *(uint64_t *)out = context.mapped[i].of->number;
    else if (i >= 0 && what == 10)
        *(unsigned *)out = 0;
    else if (i >= 0 && r >= 0 && what == 11)
        *(uintptr_t *)out = context.range[r].at;
    else if (i >= 0 && r >= 0 && what == 12)
        *(size_t *)out = context.range[r].size;
    pthread_mutex_unlock(&context.lock);
    return i < 0 || (what != 7 && what != 10 && (r < 0 || (what != 11 && what != 12)));
}

int pieces_opened(void) {
    int count = 0;
    pthread_mutex_lock(&context.lock);
    for (int i = 0; i < PIECES; i++)
        count += context.mapped[i].of != NULL && context.mapped[i].of->imported;
    pthread_mutex_unlock(&context.lock);
    return count;
}

/* ---- libcuda's ---- */

#define FAILS                                                                                      \
    if (fake_fails(__func__))                                                                      \
    return 2

typedef unsigned long long memory; /* a piece's address */

EXPORT int cuMemRetainAllocationHandle(memory *out, void *at) {
    FAILS;
    pthread_mutex_lock(&context.lock);
    const int i = mapped_at((uintptr_t)at);
    if (i >= 0) {
        context.mapped[i].of->holders++;
        *out = (memory)(uintptr_t)context.mapped[i].of;
    }
    pthread_mutex_unlock(&context.lock);
    return i < 0;
}

/* The piece itself. */
EXPORT int cuMemGetAddressRange_v2(uintptr_t *base, size_t *size, uintptr_t at) {
    FAILS;
    pthread_mutex_lock(&context.lock);
    const int i = mapped_at(at);
    if (i >= 0) {
        *base = context.mapped[i].at;
        *size = context.mapped[i].size;
    }
    pthread_mutex_unlock(&context.lock);
    return i < 0 ? 500 : 0;
}

EXPORT int cuMemRelease(memory m) {
    pthread_mutex_lock(&context.lock);
    piece_put((piece *)(uintptr_t)m);
    pthread_mutex_unlock(&context.lock);
    return 0;
}

typedef struct kind {
    int type, handles, location_type, location;
    void *rest[2];
} kind;

/* FAKE_CUDA_NO_IPC=N: process number N has asked for no handles.  FAKE_CUDA_UNSEEN=N: it does not
 * see others' GPUs. */
EXPORT int cuMemGetAllocationPropertiesFromHandle(kind *out, memory m) {
    FAILS;
    const int unseen = ((piece *)(uintptr_t)m)->imported && is_rank("FAKE_CUDA_UNSEEN");
    *out = (kind){1, !is_rank("FAKE_CUDA_NO_IPC"), 1, unseen ? -2 : 0, {NULL, NULL}};
    return 0;
}

EXPORT int cuMemExportToShareableHandle(void *out, memory m, int type, unsigned long long flags) {
    FAILS;
    if (type != 1 || flags != 0 || is_rank("FAKE_CUDA_NO_IPC"))
        return 801;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", ((piece *)(uintptr_t)m)->file);
    *(int *)out = open(path, O_RDWR | O_APPEND); /* (by which it is known) */
    if (is_rank("FAKE_CUDA_SLOW"))
        usleep(200);
    return *(int *)out < 0;
}

/* FAKE_CUDA_NO_P2P=N: process number N cannot open anybody's memory.  FAKE_CUDA_SLOW=N: it takes
 * long. */
EXPORT int cuMemImportFromShareableHandle(memory *out, void *file, int type) {
    FAILS;
    struct stat st;
    const int copy = keep((int)(intptr_t)file);
    if (is_rank("FAKE_CUDA_SLOW"))
        usleep(2000);
    if (type != 1 || is_rank("FAKE_CUDA_NO_P2P") || copy < 0 || fstat(copy, &st) != 0) {
        if (copy >= 0)
            close(copy);
        return 217;
    }
    pthread_mutex_lock(&context.lock);
    piece *p = piece_new(copy, (size_t)st.st_size, 1);
    pthread_mutex_unlock(&context.lock);
    *out = (memory)(uintptr_t)p;
    return p == NULL;
}

EXPORT int cuMemAddressReserve(uintptr_t *out, size_t size, size_t align, uintptr_t at,
                               unsigned long long flags) {
    FAILS;
    (void)align, (void)at, (void)flags;
    void *p = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *out = (uintptr_t)p;
    return p == MAP_FAILED ? 2 : 0;
}

EXPORT int cuMemAddressFree(uintptr_t at, size_t size) {
    FAILS;
    return munmap((void *)at, size) != 0;
}

EXPORT int cuMemMap(uintptr_t at, size_t size, size_t offset, memory m, unsigned long long flags) {
    FAILS;
    piece *p = (piece *)(uintptr_t)m;
    if (size != p->size || offset != 0 || flags != 0)
        return 1;
    pthread_mutex_lock(&context.lock);
    const int r = map_one(at, p);
    pthread_mutex_unlock(&context.lock);
    return r;
}

EXPORT int cuMemUnmap(uintptr_t at, size_t size) {
    FAILS;
    pthread_mutex_lock(&context.lock);
    const int r = unmap(at, size);
    pthread_mutex_unlock(&context.lock);
    return r;
}

EXPORT int cuMemSetAccess(uintptr_t at, size_t size, const void *access, size_t count) {
    FAILS;
    const int *words = access; /* the kind of location, its number, read and write */
    (void)at, (void)size;
    return count != 1 || words[0] != 1 || words[1] != 0 || words[2] != 3;
}
