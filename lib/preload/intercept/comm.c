/* SPDX-License-Identifier: Apache-2.0
 *
 * comm.c - the communicators of this process: found by handle, never forgotten, so
 * that what a retired one did is still in the figures.
 */
#include "config.h"

#include "preload/intercept/intercept.h"
#include "preload/record/recorder.h"

#include <stdlib.h>
#include <string.h>

static struct {
    pthread_rwlock_t lock;
    comm *first;   /* in use */
    comm *retired; /* so that a search does not grow with what is gone */
} context = {PTHREAD_RWLOCK_INITIALIZER, NULL, NULL};

static const char *const fallback_names[FALLBACKS] = {
    [FALLBACK_NONE] = "carried",
    [FALLBACK_MODE] = "observing only",
    [FALLBACK_ALONE] = "one rank",
    [FALLBACK_NONBLOCKING] = "non-blocking communicator",
    [FALLBACK_GROUPED] = "made in a group of communicators",
    [FALLBACK_NO_PEER] = "no other rank of the node takes part",
    [FALLBACK_DRIVER] = "driver without waits in streams",
    [FALLBACK_CONNECTIONS] = "CUDA_DEVICE_MAX_CONNECTIONS=1",
    [FALLBACK_SYSTEM] = "no shared memory between the ranks",
    [FALLBACK_PEER] = "peer on another node or without P2P",
    [FALLBACK_SMALL] = "small message",
    [FALLBACK_ERROR] = "communicator in error",
    [FALLBACK_FIRST] = "first message between two ranks",
    [FALLBACK_MEMORY] = "memory that cannot be exported",
    [FALLBACK_UNREACHED] = "peer's memory cannot be mapped",
    [FALLBACK_GRAPH] = "CUDA graph",
    [FALLBACK_ONE_WAY] = "nothing as large the other way",
    [FALLBACK_MANY] = "several streams or messages to a peer in one group",
    [FALLBACK_LATE] = "late peer",
    [FALLBACK_WHOLE] = "ncclAlltoAll",
    [FALLBACK_FILES] = "limit of open files",
    [FALLBACK_UNTAKEN] = "peer that does not take descriptors",
};

static const char *const advices[FALLBACKS] = {
    [FALLBACK_CONNECTIONS] = "unset it, or set it to 8 or more",
    [FALLBACK_SMALL] = "EP_OVERLAP_INTERPOSE_LEAST has the least size",
    [FALLBACK_MEMORY] = "PyTorch's expandable segments need 2.6, cudaMallocAsync's pools cannot be",
    [FALLBACK_UNREACHED] = "it takes P2P; expandable segments: GPUs visible to each rank",
    [FALLBACK_WHOLE] = "EP_OVERLAP_INTERPOSE_ALLTOALL=1 on all ranks carries it",
    [FALLBACK_FILES] = "raise it (ulimit -n): memory in pieces has up to 240 open for a moment",
    [FALLBACK_LATE] = "EP_OVERLAP_INTERPOSE_WAIT has the microseconds that a rank waits for a peer",
};

const char *fallback_name(fallback f) { return fallback_names[f]; }

const char *fallback_advice(fallback f) { return advices[f]; }

comm *comm_find(ncclComm_t handle) {
    comm *c = NULL;
    if (handle == NULL)
        return NULL;
    pthread_rwlock_rdlock(&context.lock);
    for (c = context.first; c != NULL && c->handle != handle; c = c->next)
        ;
    pthread_rwlock_unlock(&context.lock);
    return c;
}

comm *comm_create(const real_nccl *real, int rank, int ranks, const comm_key *key) {
    comm *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    c->real = real;
    c->rank = rank;
    c->ranks = ranks;
    if (key != NULL)
        c->key = *key;
    return c;
}

fallback comm_why(const comm *c) { return c->why != FALLBACK_NONE ? c->why : FALLBACK_ERROR; }

/* Two threads may end the same one. */
static bool unlink_from(comm **at, const comm *c) {
    while (*at != NULL && *at != c)
        at = &(*at)->next;
    if (*at == NULL)
        return false;
    *at = c->next;
    return true;
}

void comm_publish(comm *c, ncclComm_t handle) {
    pthread_rwlock_wrlock(&context.lock);
    for (comm *old = context.first; old != NULL; old = old->next)
        if (old->handle == handle) /* its end was not seen */
            old->handle = NULL;
    c->handle = handle;
    c->next = context.first;
    context.first = c;
    pthread_rwlock_unlock(&context.lock);
}

/* The lock stands between a look at it and the last holder's leaving. */
channel *comm_channel(comm *c) {
    if (atomic_load_explicit(&c->channel, memory_order_relaxed) == NULL)
        return NULL;
    pthread_rwlock_rdlock(&context.lock);
    channel *ch = atomic_load(&c->channel);
    if (ch != NULL)
        channel_hold(ch);
    pthread_rwlock_unlock(&context.lock);
    return ch;
}

bool comm_stay(const comm *c, ncclComm_t handle) {
    pthread_rwlock_rdlock(&context.lock);
    const bool stays = c->handle == handle;
    if (!stays)
        pthread_rwlock_unlock(&context.lock);
    return stays;
}

void comm_leave(void) { pthread_rwlock_unlock(&context.lock); }

channel *comm_retire(comm *c) {
    pthread_rwlock_wrlock(&context.lock);
    if (unlink_from(&context.first, c)) {
        c->handle = NULL;
        c->next = context.retired;
        context.retired = c;
    }
    channel *ch = atomic_exchange(&c->channel, NULL);
    pthread_rwlock_unlock(&context.lock);
    return ch;
}

void comm_free(comm *c) { free(c); }

void comm_each(void (*see)(const comm *c, void *argument), void *argument) {
    pthread_rwlock_rdlock(&context.lock);
    const comm *const lists[] = {context.first, context.retired};
    for (int i = 0; i < 2; i++)
        for (const comm *c = lists[i]; c != NULL; c = c->next)
            see(c, argument);
    pthread_rwlock_unlock(&context.lock);
}

void note_call(const comm *c, int kind, uint64_t bytes, bool routed) {
    const uint64_t what = c->key.word[0] + (uint64_t)kind * UINT64_C(0x9e3779b97f4a7c15);
    const uint64_t with = (what ^ bytes) * UINT64_C(0xff51afd7ed558ccd);
    recorder_call(with, routed ? what : with);
}

static uint64_t mix(uint64_t hash, const unsigned char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    hash ^= hash >> 31;
    return hash * UINT64_C(0x9e3779b97f4a7c15);
}

/* Not a secret and not a signature: two communicators of one user must not meet under
 * one name by accident (FNV-1a over two seeds). */
comm_key comm_key_of(const void *bytes, size_t count, const comm_key *parent) {
    comm_key key = {{UINT64_C(0xcbf29ce484222325), UINT64_C(0x84222325cbf29ce4)}};
    if (parent != NULL)
        key = *parent;
    for (int i = 0; i < 2; i++)
        key.word[i] = mix(key.word[i] + (uint64_t)i, bytes, count);
    return key;
}
