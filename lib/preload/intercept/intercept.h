/* SPDX-License-Identifier: Apache-2.0
 *
 * intercept.h - what the parts of the interposer share.
 */
#ifndef EPO_INTERCEPT_INTERCEPT_H
#define EPO_INTERCEPT_INTERCEPT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "preload/intercept/nccl_abi.h"

/* ---- real.c: the job's own NCCL ---- */

typedef struct real_nccl {
#define REAL_MEMBER(name, parameters) ncclResult_t(*name) parameters;
    EPO_NCCL_FUNCTIONS(REAL_MEMBER)
    EPO_NCCL_HELPERS(REAL_MEMBER)
#undef REAL_MEMBER
    const void *base; /* where it is mapped: its identity */
    const char *path; /* the dynamic linker's */
    int version;      /* 22809; 0: it does not tell */
} real_nccl;

/* The NCCL that the code at `caller` would have called without us: the one its own
 * object depends on, else the next in the global order, else one that is mapped at all.
 * NULL: there is none. */
const real_nccl *real_of(const void *caller);
/* How many different ones were called so far. */
int real_count(void);

/* ---- mode.c: what the user and the job's options ask for ---- */

typedef enum intercept_mode { MODE_OFF, MODE_OBSERVE, MODE_ACCELERATE } intercept_mode;

intercept_mode mode_now(void);
/* Warns, once, of a word that is no mode: at a communicator, as it concerns no other program. */
void mode_tell(void);
/* Communicators are their process's: from the first on, a child of a fork is off.  It shares their
 * rooms, where the end of its copy would release its parent's waits. */
void mode_off_in_children(void);
const char *mode_name(intercept_mode mode);
/* Where the figures go: NULL nowhere, "" standard error, else a folder. */
const char *mode_record(void);
/* From the variable `name`, digits with k, m or g; `otherwise` if unset or, with a warning, no
 * number.  `name` is a constant. */
uint64_t mode_bytes(const char *name, uint64_t otherwise);

/* ---- comm.c: communicators, as far as we know them ---- */

typedef struct comm_key {
    uint64_t word[2];
} comm_key;

typedef enum collective {
    COLLECTIVE_ALLTOALL,
    COLLECTIVE_ALLREDUCE,
    COLLECTIVE_ALLGATHER,
    COLLECTIVE_REDUCESCATTER,
    COLLECTIVE_BROADCAST,
    COLLECTIVE_REDUCE,
    COLLECTIVES
} collective;

/* Why a message, or all of a communicator's, went NCCL's way. */
typedef enum fallback {
    FALLBACK_NONE,
    FALLBACK_MODE,        /* observing */
    FALLBACK_ALONE,       /* one rank */
    FALLBACK_NONBLOCKING, /* readiness is known to one end only */
    FALLBACK_GROUPED,     /* made inside a group, or for several GPUs of one process */
    FALLBACK_NO_PEER,     /* no other rank of this node offers it */
    FALLBACK_DRIVER,      /* libcuda lacks a function, or cannot wait in a stream */
    FALLBACK_CONNECTIONS, /* CUDA_DEVICE_MAX_CONNECTIONS=1 */
    FALLBACK_SYSTEM,      /* shared memory, threads */
    FALLBACK_PEER,        /* the peer is on another node or did not agree */
    FALLBACK_SMALL,       /* below the agreed size */
    FALLBACK_ERROR,       /* the communicator is in error: NCCL says which */
    FALLBACK_FIRST,       /* the first of a pair: NCCL connects with it */
    FALLBACK_MEMORY,      /* the receiver's, that no other process can map */
    FALLBACK_UNREACHED,   /* the sender could not map it */
    FALLBACK_GRAPH,       /* one was captured with the communicator */
    FALLBACK_ONE_WAY,     /* nothing as large goes the other way in the same group */
    FALLBACK_MANY,        /* streams in one group, or messages to one peer */
    FALLBACK_LATE,        /* the peer did not come in time */
    FALLBACK_WHOLE,       /* ncclAlltoAll: not asked for, or not by all ranks */
    FALLBACK_FILES,       /* no descriptor more for memory in pieces, at either end */
    FALLBACK_UNTAKEN,     /* the peer does not take such descriptors */
    FALLBACKS
} fallback;

typedef struct tally {
    atomic_uint_fast64_t calls, bytes;
} tally;

typedef struct channel channel;

typedef struct comm {
    struct comm *next;
    ncclComm_t handle;
    const real_nccl *real;
    int rank, ranks;
    comm_key key;
    atomic_uint children;       /* splits and shrinks so far: part of their keys */
    _Atomic(channel *) channel; /* comm_channel() reads it; NULL: every message is NCCL's */
    fallback why;               /* then: the reason */
    bool blocking;
    tally send, recv, exchange, carried, whole[COLLECTIVES];
    tally direct;       /* of what was carried: written straight to the receiver's memory */
    tally whole_passed; /* ncclAlltoAll that NCCL carried */
    atomic_uint_fast64_t largest; /* bytes of one exchange */
    tally fell[FALLBACKS];
} comm;

static inline void tally_add(tally *t, uint64_t bytes) {
    atomic_fetch_add_explicit(&t->calls, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&t->bytes, bytes, memory_order_relaxed);
}

const char *fallback_name(fallback f);
/* What a user can do about it; NULL: nothing. */
const char *fallback_advice(fallback f);
/* NULL: not one that we saw being made. */
comm *comm_find(ncclComm_t handle);
/* Tells the recorder of a call of the program's; `routed`: its bytes follow a routing. */
void note_call(const comm *c, int kind, uint64_t bytes, bool routed);
/* Before NCCL makes it.  NULL: no memory; everything passes. */
comm *comm_create(const real_nccl *real, int rank, int ranks, const comm_key *key);
/* From now on comm_find() knows it. */
void comm_publish(comm *c, ncclComm_t handle);
/* Its channel, which stays until channel_put() whoever ends the communicator; NULL: none. */
channel *comm_channel(comm *c);
/* Why a message that had no channel is NCCL's: the reason, or that the communicator is in error or
 * at its end. */
fallback comm_why(const comm *c);
/* True: it has not been ended since it had this handle, and is not before comm_leave(), so NCCL may
 * be called with it; nothing that waits, as whoever ends any communicator waits for it. */
bool comm_stay(const comm *c, ncclComm_t handle);
void comm_leave(void);
/* NCCL releases it; its figures stay.  Its channel, which is the caller's now to close. */
channel *comm_retire(comm *c);
void comm_free(comm *c);
comm_key comm_key_of(const void *bytes, size_t count, const comm_key *parent);
/* Calls `see` for every communicator of this process, retired ones too. */
void comm_each(void (*see)(const comm *c, void *context), void *context);

/* ---- group.c: what this thread has collected since ncclGroupStart ---- */

typedef struct message {
    comm *comm;
    ncclComm_t handle;          /* as the program gave it */
    channel *channel;           /* of a message that may be ours, held until the group has ended */
    bool send, carried, passed; /* carried: by us; passed: NCCL has it already */
    int peer;
    uint64_t bytes;
    const void *source;
    void *target;
    size_t count;
    ncclDataType_t type;
    cudaStream_t stream;
    bool beside;     /* NCCL has a part of the same group: see channel_exchange() */
    uint32_t number; /* of those between the two ranks, in its direction */
    fallback why;    /* not carried although both take this size: the reason */
} message;

typedef struct thread_state {
    int depth;  /* of ncclGroupStart */
    int inside; /* in NCCL: its own calls are not the program's */
    bool failed;
    message *messages;
    size_t count, capacity;
    channel *ending; /* of communicators that were ended inside the group */
} thread_state;

/* NULL: no memory. */
thread_state *thread_here(void);
ncclResult_t group_start(const real_nccl *real, thread_state *t);
ncclResult_t group_end(const real_nccl *real, thread_state *t);
ncclResult_t group_simulate(const real_nccl *real, thread_state *t, ncclSimInfo_t *info);
ncclResult_t group_message(const real_nccl *real, thread_state *t, const message *m);

/* ---- channel.c, carry.c: messages by copy engines ---- */

/* Before NCCL's own call: lets the other ranks of the node see that this one is coming. */
void channel_announce(comm *c, channel **pending);
/* After it: `made` tells whether NCCL has the communicator.  Sets c->channel or c->why. */
void channel_settle(comm *c, channel *pending, bool made);
void channel_hold(channel *ch);
/* Of who held it and looks at it no more; NULL: nothing.  The last one releases it. */
void channel_put(channel *ch);
/* Waits for what is on its way (with a limit) and puts what the communicator held. */
void channel_close(channel *ch);
/* Keeps it in `list`, and closes all of such a list. */
void channel_close_later(channel *ch, channel **list);
void channel_close_all(channel **list);
/* Ends all waits of this rank, again and again until channel_close(). */
void channel_abort(channel *ch);
/* Why an ncclAlltoAll with this many bytes for each rank is NCCL's, FALLBACK_NONE: every pair of
 * ranks takes such messages, and all ranks want it to be carried.  All ranks say the same. */
fallback channel_whole(const channel *ch, uint64_t bytes);
/* Whether this rank has a peer at all, and of this size. */
bool channel_knows(const channel *ch, int peer);
bool channel_takes(const channel *ch, int peer, uint64_t bytes);
/* At the end of a group, before NCCL's: agrees with the peers on the messages of this
 * communicator, sets `carried` of those that are ours, and puts them on the program's stream.
 * `beside`: NCCL has a part, too; channel_join() when that is launched. */
ncclResult_t channel_exchange(channel *ch, message *messages, size_t count, bool *beside);
ncclResult_t channel_join(channel *ch, cudaStream_t stream);
/* A message outside a group is NCCL's; it counts. */
void channel_alone(channel *ch, message *m);

/* ---- mapped.c, figures.c ---- */

/* Once, at the first communicator, in which this is `rank` of `ranks`. */
void mapped_look(int rank, int ranks);
/* This process's rank in its job: by the launcher's variables, unless the first communicator has
 * more ranks than they tell of (processes that a program starts itself have their parent's). */
int mapped_rank(int *ranks);
/* Writes them when the process ends. */
void figures_at_exit(void);

#endif
