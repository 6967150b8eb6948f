/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_nccl.c - NCCL beside the CUDA runtime of cuda_runtime.c: ranks are threads that meet in a
 * collective call; messages move nothing.  The functions at its end stand, by the linker's
 * --wrap, where the engine looks for libraries.
 */
#include "config.h"

#include "cuda_runtime.h"

#include "backend/cuda/gpu.h"

#ifdef HAVE_NCCL
#include <nccl.h>
#endif
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { RANKS = 4 };

#ifdef HAVE_NCCL

/* Ranks of one communicator meet in the call, some seconds at most. */
typedef struct hall {
    pthread_mutex_t lock;
    int arrived, round;
    char board[RANKS][8192];
} hall;
static hall halls[2] = {{.lock = PTHREAD_MUTEX_INITIALIZER}, {.lock = PTHREAD_MUTEX_INITIALIZER}};

typedef struct fake_comm {
    int rank, ranks;
    hall *hall;
} fake_comm;

static bool hall_meet(hall *h, int ranks) {
    pthread_mutex_lock(&h->lock);
    const int round = h->round;
    if (++h->arrived == ranks) {
        h->arrived = 0;
        h->round++;
    }
    for (int i = 0; h->round == round && i < 1500; i++) {
        pthread_mutex_unlock(&h->lock);
        nanosleep(&(struct timespec){0, 1000000}, NULL);
        pthread_mutex_lock(&h->lock);
    }
    const bool met = h->round != round;
    if (!met)
        h->arrived--;
    pthread_mutex_unlock(&h->lock);
    return met;
}

#define NCCL_MAY_FAIL                                                                              \
    do {                                                                                           \
        if (fake_cuda_turn(__func__))                                                              \
            return ncclSystemError;                                                                \
    } while (0)

static ncclResult_t fake_version(int *version) {
    *version = 22809;
    return ncclSuccess;
}
static ncclResult_t fake_unique(ncclUniqueId *id) {
    NCCL_MAY_FAIL;
    memset(id, 1, sizeof *id);
    return ncclSuccess;
}
static ncclResult_t fake_init(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                              ncclConfig_t *config) {
    void *p = NULL;
    (void)id;
    (void)config;
    const bool mine = !fake_cuda_turn(__func__);
    if (!hall_meet(&halls[1], ranks) || !mine || (p = fake_cuda_make(sizeof(fake_comm))) == NULL)
        return ncclSystemError;
    *(fake_comm *)p = (fake_comm){rank, ranks, &halls[1]};
    *out = p;
    return ncclSuccess;
}
static ncclResult_t fake_end(ncclComm_t comm) {
    fake_cuda_hold();
    return fake_cuda_unmake(comm) ? ncclSuccess : ncclInvalidArgument;
}
static ncclResult_t fake_group(void) {
    NCCL_MAY_FAIL;
    return ncclSuccess;
}
static ncclResult_t fake_send(const void *at, size_t n, ncclDataType_t t, int peer, ncclComm_t comm,
                              cudaStream_t stream) {
    (void)at;
    (void)n;
    (void)t;
    (void)peer;
    (void)comm;
    (void)stream;
    NCCL_MAY_FAIL;
    return ncclSuccess;
}
static ncclResult_t fake_rank(const ncclComm_t comm, int *rank) {
    *rank = ((const fake_comm *)(const void *)comm)->rank;
    return ncclSuccess;
}
static ncclResult_t fake_count(const ncclComm_t comm, int *count) {
    *count = ((const fake_comm *)(const void *)comm)->ranks;
    return ncclSuccess;
}
static ncclResult_t fake_gather(const void *mine, void *all, size_t n, ncclDataType_t t,
                                ncclComm_t comm, cudaStream_t stream) {
    const fake_comm *c = (const void *)comm;
    (void)t;
    (void)stream;
    NCCL_MAY_FAIL;
    memcpy(c->hall->board[c->rank], mine, n);
    if (!hall_meet(c->hall, c->ranks))
        return ncclRemoteError;
    for (int r = 0; r < c->ranks; r++)
        memcpy((char *)all + (size_t)r * n, c->hall->board[r], n);
    return hall_meet(c->hall, c->ranks) ? ncclSuccess : ncclRemoteError;
}
static ncclResult_t fake_state(ncclComm_t comm, ncclResult_t *state) {
    (void)comm;
    *state = ncclSuccess;
    return ncclSuccess;
}
static const char *fake_text(ncclResult_t r) { return r == ncclSuccess ? "no error" : "as told"; }

void fake_comm_open(int rank, int ranks, void **out) {
    *out = fake_cuda_make(sizeof(fake_comm));
    if (*out != NULL)
        *(fake_comm *)*out = (fake_comm){rank, ranks, &halls[0]};
}
void fake_comm_close(void *comm) {
    if (comm != NULL)
        (void)fake_cuda_unmake(comm);
}

#else /* the engine knows no NCCL then */

void fake_comm_open(int rank, int ranks, void **out) {
    (void)rank;
    (void)ranks;
    *out = NULL;
}
void fake_comm_close(void *comm) { (void)comm; }

#endif

void *__wrap_gpu_library_find(const char *stem, const char *const *sonames, char *path, size_t n);
void *__wrap_gpu_library_find(const char *stem, const char *const *sonames, char *path, size_t n) {
    if (strcmp(stem, "libnccl") != 0)
        return NULL;
    snprintf(path, n, "%s", sonames[0]);
    return path;
}

void *__wrap_gpu_library_symbol(void *library, const char *name, const char **missing);
void *__wrap_gpu_library_symbol(void *library, const char *name, const char **missing) {
    static const struct {
        const char *name;
        void (*fn)(void);
    } all[] = {
#ifdef HAVE_NCCL
        {"ncclGetVersion", (void (*)(void))fake_version},
        {"ncclGetUniqueId", (void (*)(void))fake_unique},
        {"ncclCommInitRankConfig", (void (*)(void))fake_init},
        {"ncclCommDestroy", (void (*)(void))fake_end},
        {"ncclCommAbort", (void (*)(void))fake_end},
        {"ncclGroupStart", (void (*)(void))fake_group},
        {"ncclGroupEnd", (void (*)(void))fake_group},
        {"ncclSend", (void (*)(void))fake_send},
        {"ncclRecv", (void (*)(void))fake_send},
        {"ncclCommUserRank", (void (*)(void))fake_rank},
        {"ncclCommCount", (void (*)(void))fake_count},
        {"ncclAllGather", (void (*)(void))fake_gather},
        {"ncclCommGetAsyncError", (void (*)(void))fake_state},
        {"ncclGetErrorString", (void (*)(void))fake_text},
#endif
        {"", NULL}};
    void *p = NULL;
    (void)library;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(all[i].name, name) == 0)
            memcpy(&p, &all[i].fn, sizeof p);
    if (p == NULL && *missing == NULL)
        *missing = name;
    return p;
}
