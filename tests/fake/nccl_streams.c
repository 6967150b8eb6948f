/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "nccl_streams.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = FAKE_NCCL_RANKS, SLOTS = 512, IDS = 64, CHUNK = 32768, ENTRIES = 256, SPLITS = 32 };

/* One chunk of a message from one rank to another. */
typedef struct box {
    _Alignas(64) atomic_int full;
    uint64_t total, bytes;
    unsigned char data[CHUNK];
} box;

typedef struct split {
    atomic_int there[RANKS], color[RANKS], key[RANKS], slot[RANKS]; /* slot: by colour, plus one */
} split;

typedef struct slot { /* a communicator, as its ranks see it */
    atomic_int arrived;
    split split[SPLITS];
    box box[RANKS][RANKS];
} slot;

static struct {
    atomic_int next;
    slot slots[SLOTS];
} * shared;

struct ncclComm {
    ncclComm_t next; /* of all that there ever were: whoever still has the handle is refused */
    int slot, rank, ranks, splits;
    pthread_mutex_t lock;
    atomic_int aborted, dead, running;
    struct CUevent_st *last;
};

typedef struct entry {
    int send, peer;
    unsigned char *at;
    uint64_t bytes, done;
    bool begun, ended;
    ncclComm_t comm;
    cudaStream_t stream;
} entry;

typedef struct kernel {
    ncclComm_t comm;
    int count;
    entry entries[];
} kernel;

static _Atomic(ncclComm_t) every;

static _Thread_local struct {
    int depth, count, error;
    entry entries[ENTRIES];
} group;

/* Of cuda_streams.c. */
typedef struct CUevent_st event;
extern int cuEventCreate(event **, unsigned), cuEventDestroy_v2(event *);
extern int cuEventRecord(event *, cudaStream_t), cuStreamWaitEvent(cudaStream_t, event *, unsigned);
extern int cuLaunchHostFunc(cudaStream_t, void (*)(void *), void *);

static void nap(void) {
    const struct timespec t = {0, 20000};
    nanosleep(&t, NULL);
}

bool fake_nccl_open(void) {
    void *p = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return false;
    if (shared != NULL)
        munmap(shared, sizeof *shared);
    shared = p;
    atomic_store(&shared->next, IDS);
    return true;
}

void fake_nccl_id(int number, ncclUniqueId *out) {
    memset(out, 0, sizeof *out);
    memcpy(out->internal, &number, sizeof number);
}

/* ---- communicators ---- */

/* Returns to nobody before all have come. */
static ncclResult_t join(ncclComm_t *out, int number, int ranks, int rank) {
    ncclComm_t c = calloc(1, sizeof *c);
    if (c == NULL || number < 0 || number >= SLOTS || rank >= RANKS) {
        free(c);
        return ncclInvalidArgument;
    }
    c->slot = number;
    c->rank = rank;
    c->ranks = ranks;
    pthread_mutex_init(&c->lock, NULL);
    (void)cuEventCreate(&c->last, 0);
    c->next = atomic_load(&every);
    while (!atomic_compare_exchange_weak(&every, &c->next, c))
        ;
    atomic_fetch_add(&shared->slots[number].arrived, 1);
    while (atomic_load(&shared->slots[number].arrived) < ranks)
        nap();
    *out = c;
    return ncclSuccess;
}

static ncclResult_t f_init(ncclComm_t *out, int ranks, ncclUniqueId id, int rank) {
    int number;
    memcpy(&number, id.internal, sizeof number);
    return join(out, number, ranks, rank);
}

static ncclResult_t f_init_config(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                                  ncclConfig_t *config) {
    (void)config;
    return f_init(out, ranks, id, rank);
}

static int slot_of(split *s, int color) {
    int zero = 0;
    if (atomic_load(&s->slot[color]) == 0) {
        const int mine = atomic_fetch_add(&shared->next, 1) + 1;
        (void)atomic_compare_exchange_strong(&s->slot[color], &zero, mine);
    }
    return atomic_load(&s->slot[color]) - 1;
}

static ncclResult_t f_split(ncclComm_t c, int color, int key, ncclComm_t *out,
                            ncclConfig_t *config) {
    (void)config;
    if (atomic_load(&c->dead) || c->splits == SPLITS || color >= RANKS)
        return ncclInvalidArgument;
    split *s = &shared->slots[c->slot].split[c->splits++];
    int rank = 0, ranks = 0;
    atomic_store(&s->color[c->rank], color);
    atomic_store(&s->key[c->rank], key);
    atomic_store(&s->there[c->rank], 1);
    for (int r = 0; r < c->ranks; r++) {
        while (!atomic_load(&s->there[r]))
            nap();
        if (atomic_load(&s->color[r]) != color)
            continue;
        ranks++;
        rank += s->key[r] < key || (s->key[r] == key && r < c->rank);
    }
    *out = NULL;
    return color < 0 ? ncclSuccess : join(out, slot_of(s, color), ranks, rank);
}

/* What waits for a kernel that has not begun is not waited for: its stream may be held. */
static ncclResult_t f_abort(ncclComm_t c) {
    pthread_mutex_lock(&c->lock);
    const int dead = atomic_exchange(&c->dead, 1);
    atomic_store(&c->aborted, 1);
    pthread_mutex_unlock(&c->lock);
    return dead ? ncclInvalidArgument : ncclSuccess;
}

static ncclResult_t f_revoke(ncclComm_t c, int flags) {
    (void)flags;
    atomic_store(&c->aborted, 1);
    return atomic_load(&c->dead) ? ncclInvalidArgument : ncclSuccess;
}

static ncclResult_t f_destroy(ncclComm_t c) {
    if (atomic_exchange(&c->dead, 1))
        return ncclInvalidArgument;
    while (atomic_load(&c->running) > 0)
        nap();
    return ncclSuccess;
}

static ncclResult_t f_count(ncclComm_t c, int *n) {
    *n = c->ranks;
    return ncclSuccess;
}
static ncclResult_t f_rank(ncclComm_t c, int *n) {
    *n = c->rank;
    return ncclSuccess;
}
static ncclResult_t f_error(ncclComm_t c, ncclResult_t *out) {
    *out = atomic_load(&c->aborted) ? 6 : ncclSuccess;
    return ncclSuccess;
}

/* ---- a kernel ---- */

static bool send_some(box *b, entry *e) {
    if (atomic_load(&b->full))
        return false;
    b->total = e->bytes;
    b->bytes = e->bytes - e->done < CHUNK ? e->bytes - e->done : CHUNK;
    if (b->bytes > 0)
        memcpy(b->data, e->at + e->done, b->bytes);
    e->done += b->bytes;
    e->ended = e->done == e->bytes;
    atomic_store(&b->full, 1);
    return true;
}

/* What does not fit is taken and left. */
static bool receive_some(box *b, entry *e) {
    if (!atomic_load(&b->full))
        return false;
    const uint64_t room = e->done < e->bytes ? e->bytes - e->done : 0;
    const uint64_t fits = b->bytes < room ? b->bytes : room;
    if (fits > 0)
        memcpy(e->at + e->done, b->data, fits);
    e->done += b->bytes;
    e->ended = e->done == b->total;
    atomic_store(&b->full, 0);
    return true;
}

/* The first of each direction of a pair that has not ended goes on.  True: something did. */
static bool go_on(kernel *k, int *left) {
    bool any = false, busy[2][RANKS] = {{false}};
    ncclComm_t c = k->comm;
    *left = 0;
    for (int i = 0; i < k->count; i++) {
        entry *e = &k->entries[i];
        if (e->ended || busy[e->send][e->peer]) {
            *left += !e->ended;
            continue;
        }
        box *b = e->send ? &shared->slots[c->slot].box[c->rank][e->peer]
                         : &shared->slots[c->slot].box[e->peer][c->rank];
        any = (e->send ? send_some(b, e) : receive_some(b, e)) || any;
        busy[e->send][e->peer] = !e->ended;
        *left += !e->ended;
    }
    return any;
}

static void run(void *argument) {
    kernel *k = argument;
    for (int left = 1; left > 0 && !atomic_load(&k->comm->aborted);)
        if (!go_on(k, &left) && left > 0)
            nap();
    atomic_fetch_sub(&k->comm->running, 1);
    free(k);
}

/* Behind all streams of the group and the communicator's last kernel; and all streams behind it. */
static ncclResult_t launch(kernel *k) {
    ncclComm_t c = k->comm;
    cudaStream_t on = k->entries[0].stream;
    event *e;
    pthread_mutex_lock(&c->lock);
    if (atomic_load(&c->dead)) {
        pthread_mutex_unlock(&c->lock);
        free(k);
        return ncclInvalidArgument;
    }
    atomic_fetch_add(&c->running, 1);
    (void)cuEventCreate(&e, 0);
    for (int i = 1; i < k->count; i++)
        if (k->entries[i].stream != on) {
            (void)cuEventRecord(e, k->entries[i].stream);
            (void)cuStreamWaitEvent(on, e, 0);
        }
    (void)cuStreamWaitEvent(on, c->last, 0);
    const int count = k->count;
    cudaStream_t *others = calloc((size_t)count, sizeof *others);
    for (int i = 0; i < count && others != NULL; i++)
        others[i] = k->entries[i].stream;
    (void)cuLaunchHostFunc(on, run, k); /* which frees it */
    (void)cuEventRecord(c->last, on);
    for (int i = 1; i < count && others != NULL; i++)
        if (others[i] != on)
            (void)cuStreamWaitEvent(others[i], c->last, 0);
    free(others);
    (void)cuEventDestroy_v2(e);
    pthread_mutex_unlock(&c->lock);
    return ncclSuccess;
}

/* ---- groups ---- */

static ncclResult_t launch_of(ncclComm_t c) {
    kernel *k = calloc(1, sizeof *k + (size_t)group.count * sizeof *k->entries);
    if (k == NULL)
        return ncclSystemError;
    k->comm = c;
    for (int i = 0; i < group.count; i++)
        if (group.entries[i].comm == c) {
            k->entries[k->count++] = group.entries[i];
            group.entries[i].begun = true;
        }
    return launch(k);
}

static ncclResult_t launch_all(void) {
    ncclResult_t r = group.error;
    for (int i = 0; i < group.count && r == 0; i++)
        if (!group.entries[i].begun)
            r = launch_of(group.entries[i].comm);
    group.count = group.error = 0;
    return r;
}

static ncclResult_t f_group_start(void) {
    group.depth++;
    return ncclSuccess;
}

static ncclResult_t f_group_end(void) {
    if (group.depth == 0)
        return ncclInvalidUsage;
    return --group.depth > 0 ? ncclSuccess : launch_all();
}

static ncclResult_t add(int send, void *at, uint64_t bytes, int peer, ncclComm_t c,
                        cudaStream_t s) {
    if (c == NULL || atomic_load(&c->dead) || atomic_load(&c->aborted) || peer < 0 ||
        peer >= c->ranks || group.count == ENTRIES) {
        group.error = group.depth > 0 ? ncclInvalidArgument : 0;
        return ncclInvalidArgument;
    }
    group.entries[group.count++] =
        (entry){.send = send, .peer = peer, .at = at, .bytes = bytes, .comm = c, .stream = s};
    return group.depth == 0 ? launch_all() : ncclSuccess;
}

static ncclResult_t f_send(const void *b, size_t n, ncclDataType_t t, int peer, ncclComm_t c,
                           cudaStream_t s) {
    return add(1, (void *)(uintptr_t)b, n * epo_nccl_type_bytes(t), peer, c, s);
}

static ncclResult_t f_recv(void *b, size_t n, ncclDataType_t t, int peer, ncclComm_t c,
                           cudaStream_t s) {
    return add(0, b, n * epo_nccl_type_bytes(t), peer, c, s);
}

static ncclResult_t f_alltoall(const void *send, void *recv, size_t n, ncclDataType_t t,
                               ncclComm_t c, cudaStream_t s) {
    const size_t bytes = n * epo_nccl_type_bytes(t);
    ncclResult_t r = f_group_start();
    for (int p = 0; p < c->ranks && r == 0; p++) {
        r = f_send((const char *)send + (size_t)p * bytes, n, t, p, c, s);
        if (r == 0)
            r = f_recv((char *)recv + (size_t)p * bytes, n, t, p, c, s);
    }
    const ncclResult_t ended = f_group_end();
    return r != 0 ? r : ended;
}

/* (only answers) */
static ncclResult_t f_allreduce(const void *a, void *b, size_t n, ncclDataType_t t, ncclRedOp_t op,
                                ncclComm_t c, cudaStream_t s) {
    (void)a, (void)b, (void)n, (void)t, (void)op, (void)s;
    return atomic_load(&c->dead) ? ncclInvalidArgument : ncclSuccess;
}

const real_nccl fake_nccl = {.GroupStart = f_group_start,
                             .GroupEnd = f_group_end,
                             .Send = f_send,
                             .Recv = f_recv,
                             .AlltoAll = f_alltoall,
                             .AllReduce = f_allreduce,
                             .CommInitRank = f_init,
                             .CommInitRankConfig = f_init_config,
                             .CommSplit = f_split,
                             .CommDestroy = f_destroy,
                             .CommAbort = f_abort,
                             .CommRevoke = f_revoke,
                             .CommCount = f_count,
                             .CommUserRank = f_rank,
                             .CommGetAsyncError = f_error,
                             .version = 22809};
