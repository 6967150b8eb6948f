/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_nccl.c - NCCL beside the CUDA runtime of cuda_runtime.c: ranks are threads that meet in a
 * collective call; messages move nothing, but that each finds its other end, in the order in
 * which the ranks' groups of messages come, is looked at.  The functions at its end stand, by the
 * linker's --wrap, where the engine looks for libraries.
 */
#include "config.h"

#include "cuda_runtime.h"

#include "backend/cuda/gpu.h"

#ifdef HAVE_NCCL
#include <nccl.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RANKS = 4, GROUP = 512 };

void *__real_calloc(size_t count, size_t size);

#ifdef HAVE_NCCL

/* One end of a message: the how-manieth between these two. */
typedef struct message {
    int from, to;
    long number;
    size_t bytes;
} message;
/* What is between ncclGroupStart and ncclGroupEnd: all of it is over together. */
typedef struct group {
    struct group *next;
    int count;
    message message[GROUP];
} group;

/* Ranks of one communicator meet in the call, some seconds at most. */
typedef struct hall {
    pthread_mutex_t lock;
    int arrived, round;
    char board[RANKS][8192];
    group *first[RANKS], *last[RANKS]; /* of each rank, those that are not over */
    long sent[RANKS][RANKS], taken[RANKS][RANKS];
    char wrong[200];
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

/* ---- the two ends of messages ---------------------------------------------------------- */

static _Thread_local group *open_group; /* between its start and its end */
static _Thread_local hall *open_hall;
static _Thread_local int open_rank;

/* The rank's own, when it has a communicator there and no message yet. */
static void messages_forget(hall *h, int rank) {
    pthread_mutex_lock(&h->lock);
    for (group *g = h->first[rank], *next; g != NULL; g = next) {
        next = g->next;
        free(g);
    }
    h->first[rank] = h->last[rank] = NULL;
    memset(h->sent[rank], 0, sizeof h->sent[rank]);
    memset(h->taken[rank], 0, sizeof h->taken[rank]);
    h->wrong[0] = '\0';
    pthread_mutex_unlock(&h->lock);
}

static const message *other_end(const group *g, const message *m) {
    for (int i = 0; g != NULL && i < g->count; i++)
        if (g->message[i].from == m->from && g->message[i].to == m->to &&
            g->message[i].number == m->number)
            return &g->message[i];
    return NULL;
}

/* Whose first group takes part in the rank's first, and theirs in turn; false: somebody's does
 * not yet. */
static bool messages_part(hall *h, int rank, bool *part) {
    const group *g = h->first[rank];
    if (part[rank])
        return true;
    part[rank] = true;
    for (int i = 0; g != NULL && i < g->count; i++) {
        const message *m = &g->message[i];
        const int peer = m->from == rank ? m->to : m->from;
        const message *end = other_end(h->first[peer], m);
        if (end == NULL || !messages_part(h, peer, part))
            return false;
        if (end->bytes != m->bytes && h->wrong[0] == '\0')
            snprintf(h->wrong, sizeof h->wrong,
                     "message %ld from rank %d to rank %d: one end has %zu bytes, the other %zu",
                     m->number, m->from, m->to, m->bytes, end->bytes);
    }
    return g != NULL;
}

/* Groups of messages that have all their ends are over. */
static void messages_go(hall *h) {
    for (int r = 0; r < RANKS; r++) {
        bool part[RANKS] = {false};
        if (!messages_part(h, r, part))
            continue;
        for (int p = 0; p < RANKS; p++) {
            group *g = h->first[p];
            if (!part[p])
                continue;
            h->first[p] = g->next;
            h->last[p] = g->next != NULL ? h->last[p] : NULL;
            free(g);
        }
        r = -1; /* what is behind them */
    }
}

bool fake_nccl_matched(char *text, size_t size) {
    bool ok = true;
    snprintf(text, size, "%s", halls[1].wrong);
    ok = text[0] == '\0';
    for (int r = 0; r < RANKS && ok; r++) {
        const group *g = halls[1].first[r];
        if (g == NULL)
            continue;
        snprintf(text, size,
                 "rank %d stands at a group of %d messages, the first is %ld from rank %d to rank "
                 "%d (%zu bytes)",
                 r, g->count, g->message[0].number, g->message[0].from, g->message[0].to,
                 g->message[0].bytes);
        ok = false;
    }
    return ok;
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
    messages_forget(&halls[1], rank);
    *out = p;
    return ncclSuccess;
}
static ncclResult_t fake_end(ncclComm_t comm) {
    fake_cuda_hold();
    return fake_cuda_unmake(comm) ? ncclSuccess : ncclInvalidArgument;
}
static ncclResult_t fake_start(void) {
    NCCL_MAY_FAIL;
    open_group = __real_calloc(1, sizeof *open_group); /* not one of the engine's */
    open_hall = NULL;
    return open_group != NULL ? ncclSuccess : ncclSystemError;
}
static ncclResult_t fake_group_end(void) {
    group *g = open_group;
    hall *h = open_hall;
    open_group = NULL;
    if (g == NULL || h == NULL) {
        free(g);
        NCCL_MAY_FAIL;
        return ncclSuccess;
    }
    pthread_mutex_lock(&h->lock);
    if (h->last[open_rank] != NULL)
        h->last[open_rank]->next = g;
    else
        h->first[open_rank] = g;
    h->last[open_rank] = g;
    messages_go(h);
    pthread_mutex_unlock(&h->lock);
    NCCL_MAY_FAIL;
    return ncclSuccess;
}
static ncclResult_t post(const fake_comm *c, bool send, size_t n, int peer) {
    hall *h = c->hall;
    if (open_group == NULL || open_group->count == GROUP)
        return ncclInvalidUsage;
    long *number = send ? &h->sent[c->rank][peer] : &h->taken[c->rank][peer];
    open_group->message[open_group->count++] =
        (message){send ? c->rank : peer, send ? peer : c->rank, (*number)++, n};
    open_hall = h;
    open_rank = c->rank;
    return ncclSuccess;
}
static ncclResult_t fake_send(const void *at, size_t n, ncclDataType_t t, int peer, ncclComm_t comm,
                              cudaStream_t stream) {
    (void)at;
    (void)t;
    (void)stream;
    NCCL_MAY_FAIL;
    return post((const void *)comm, true, n, peer);
}
static ncclResult_t fake_recv(void *at, size_t n, ncclDataType_t t, int peer, ncclComm_t comm,
                              cudaStream_t stream) {
    (void)at;
    (void)t;
    (void)stream;
    NCCL_MAY_FAIL;
    return post((const void *)comm, false, n, peer);
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
static _Atomic int failed_rank = -1;
void fake_nccl_failed(int rank) { failed_rank = rank; }
static ncclResult_t fake_state(ncclComm_t comm, ncclResult_t *state) {
    *state = ((const fake_comm *)(const void *)comm)->rank == failed_rank ? ncclRemoteError
                                                                          : ncclSuccess;
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

bool fake_nccl_matched(char *text, size_t size) {
    snprintf(text, size, "%s", "");
    return true;
}

void fake_nccl_failed(int rank) { (void)rank; }

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
        {"ncclGroupStart", (void (*)(void))fake_start},
        {"ncclGroupEnd", (void (*)(void))fake_group_end},
        {"ncclSend", (void (*)(void))fake_send},
        {"ncclRecv", (void (*)(void))fake_recv},
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
