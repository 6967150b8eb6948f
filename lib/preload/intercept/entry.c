/* SPDX-License-Identifier: Apache-2.0
 *
 * entry.c - the functions that stand in front of NCCL's.  Each finds the NCCL that its
 * caller means and, unless there is something to count or to carry, is that function.
 */
#include "config.h"

#include "preload/intercept/intercept.h"

#include <limits.h>
#include <stdio.h>

static ncclResult_t missing(const char *name) {
    fprintf(stderr, "ep-overlap: %s was called, but no NCCL that has it is loaded\n", name);
    return ncclInvalidUsage;
}

/* Declares `real`, with the function in it. */
#define REAL(name)                                                                                 \
    const real_nccl *real = real_of(__builtin_return_address(0));                                  \
    if (real == NULL || real->name == NULL)                                                        \
    return missing("nccl" #name)

/* The state of this thread if the call is the program's own and anybody wants to know. */
static thread_state *watched(void) {
    thread_state *t = mode_now() == MODE_OFF ? NULL : thread_here();
    return t != NULL && t->inside == 0 ? t : NULL;
}

/* ---- groups and messages ---- */

ncclResult_t ncclGroupStart(void) {
    REAL(GroupStart);
    thread_state *t = watched();
    return t != NULL ? group_start(real, t) : real->GroupStart();
}

ncclResult_t ncclGroupEnd(void) {
    REAL(GroupEnd);
    thread_state *t = watched();
    return t != NULL ? group_end(real, t) : real->GroupEnd();
}

ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *info) {
    REAL(GroupSimulateEnd);
    thread_state *t = watched();
    return t != NULL ? group_simulate(real, t, info) : real->GroupSimulateEnd(info);
}

ncclResult_t ncclSend(const void *buffer, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm_, cudaStream_t stream) {
    REAL(Send);
    thread_state *t = watched();
    comm *c = t != NULL ? comm_find(comm_) : NULL;
    if (c == NULL)
        return real->Send(buffer, count, type, peer, comm_, stream);
    const message m = {.comm = c,
                       .handle = comm_,
                       .send = true,
                       .peer = peer,
                       .bytes = count * epo_nccl_type_bytes(type),
                       .source = buffer,
                       .count = count,
                       .type = type,
                       .stream = stream};
    return group_message(real, t, &m);
}

ncclResult_t ncclRecv(void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm_,
                      cudaStream_t stream) {
    REAL(Recv);
    thread_state *t = watched();
    comm *c = t != NULL ? comm_find(comm_) : NULL;
    if (c == NULL)
        return real->Recv(buffer, count, type, peer, comm_, stream);
    const message m = {.comm = c,
                       .handle = comm_,
                       .peer = peer,
                       .bytes = count * epo_nccl_type_bytes(type),
                       .target = buffer,
                       .count = count,
                       .type = type,
                       .stream = stream};
    return group_message(real, t, &m);
}

/* The same as a group of messages: NCCL's own meaning of it. */
static ncclResult_t all_to_all(const real_nccl *real, thread_state *t, message m, const char *send,
                               char *recv) {
    ncclResult_t r = group_start(real, t);
    if (r != ncclSuccess)
        return r;
    for (int p = 0; p < m.comm->ranks && r == ncclSuccess; p++) {
        m.peer = p;
        m.send = true;
        m.source = send + (size_t)p * m.bytes;
        r = group_message(real, t, &m);
        m.send = false;
        m.target = recv + (size_t)p * m.bytes;
        if (r == ncclSuccess)
            r = group_message(real, t, &m);
    }
    const ncclResult_t ended = group_end(real, t);
    return r != ncclSuccess ? r : ended;
}

ncclResult_t ncclAlltoAll(const void *send, void *recv, size_t count, ncclDataType_t type,
                          ncclComm_t comm_, cudaStream_t stream) {
    const real_nccl *real = real_of(__builtin_return_address(0));
    if (real == NULL)
        return missing(__func__);
    thread_state *t = watched();
    comm *c = t != NULL ? comm_find(comm_) : NULL;
    if (c == NULL)
        return real->AlltoAll != NULL ? real->AlltoAll(send, recv, count, type, comm_, stream)
                                      : missing(__func__);
    const message m = {.comm = c,
                       .handle = comm_,
                       .bytes = count * epo_nccl_type_bytes(type),
                       .count = count,
                       .type = type,
                       .stream = stream};
    const uint64_t bytes = m.bytes * (uint64_t)c->ranks;
    tally_add(&c->whole[COLLECTIVE_ALLTOALL], bytes);
    note_call(c, COLLECTIVE_ALLTOALL, bytes, true);
    channel *ch = comm_channel(c);
    const fallback why = ch != NULL ? channel_whole(ch, m.bytes) : comm_why(c);
    channel_put(ch);
    if (real->AlltoAll == NULL || why == FALLBACK_NONE)
        return all_to_all(real, t, m, send, recv); /* also where NCCL is older than it */
    tally_add(&c->fell[why], bytes);
    tally_add(&c->whole_passed, bytes);
    t->inside++;
    const ncclResult_t r = real->AlltoAll(send, recv, count, type, comm_, stream);
    t->inside--;
    if (r != ncclSuccess && t->depth > 0)
        t->failed = true;
    return r;
}

/* ---- other collectives: counted ---- */

#define COUNTED(name, kind, elements, ...)                                                         \
    REAL(name);                                                                                    \
    thread_state *t = watched();                                                                   \
    comm *c = t != NULL ? comm_find(comm_) : NULL;                                                 \
    if (c == NULL)                                                                                 \
        return real->name(__VA_ARGS__);                                                            \
    tally_add(&c->whole[kind], (uint64_t)(elements)*epo_nccl_type_bytes(type));                    \
    note_call(c, kind, (uint64_t)(elements)*epo_nccl_type_bytes(type), false);                     \
    t->inside++;                                                                                   \
    const ncclResult_t r = real->name(__VA_ARGS__);                                                \
    t->inside--;                                                                                   \
    if (r != ncclSuccess && t->depth > 0)                                                          \
        t->failed = true;                                                                          \
    return r

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm_, cudaStream_t stream) {
    COUNTED(AllReduce, COLLECTIVE_ALLREDUCE, count, send, recv, count, type, op, comm_, stream);
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm_, cudaStream_t stream) {
    COUNTED(AllGather, COLLECTIVE_ALLGATHER, count * (size_t)c->ranks, send, recv, count, type,
            comm_, stream);
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm_, cudaStream_t stream) {
    COUNTED(ReduceScatter, COLLECTIVE_REDUCESCATTER, count * (size_t)c->ranks, send, recv, count,
            type, op, comm_, stream);
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm_, cudaStream_t stream) {
    COUNTED(Broadcast, COLLECTIVE_BROADCAST, count, send, recv, count, type, root, comm_, stream);
}

ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm_, cudaStream_t stream) {
    COUNTED(Reduce, COLLECTIVE_REDUCE, count, send, recv, count, type, op, root, comm_, stream);
}

/* ---- communicators: made ---- */

typedef struct making {
    comm *comm; /* NULL: we know nothing of it */
    channel *pending;
} making;

/* Before NCCL's call.  Inside a group the handle may come later than we can see. */
static making make_begin(const real_nccl *real, thread_state *t, int rank, int ranks,
                         const comm_key *key, bool blocking) {
    making m = {NULL, NULL};
    mode_tell();
    if (t == NULL || t->depth > 0)
        return m;
    m.comm = comm_create(real, rank, ranks, key);
    if (m.comm == NULL)
        return m;
    mode_off_in_children();
    m.comm->blocking = blocking;
    if (mode_now() != MODE_ACCELERATE)
        m.comm->why = FALLBACK_MODE;
    else if (ranks == 1)
        m.comm->why = FALLBACK_ALONE;
    else if (!blocking)
        m.comm->why = FALLBACK_NONBLOCKING;
    else
        channel_announce(m.comm, &m.pending);
    t->inside++;
    return m;
}

/* After it.  A communicator that is not ready yet is not blocking, whatever its
 * configuration says (NCCL_COMM_BLOCKING). */
static ncclResult_t make_end(thread_state *t, making m, ncclResult_t r, const ncclComm_t *out) {
    comm *c = m.comm;
    if (c == NULL)
        return r;
    const bool exists = (r == ncclSuccess || r == ncclInProgress) && out != NULL && *out != NULL;
    bool ready = exists && r == ncclSuccess;
    if (ready && c->ranks == 0) /* of a split: NCCL alone knows */
        ready = c->real->CommUserRank != NULL && c->real->CommCount != NULL &&
                c->real->CommUserRank(*out, &c->rank) == ncclSuccess &&
                c->real->CommCount(*out, &c->ranks) == ncclSuccess;
    channel_settle(c, m.pending, ready);
    if (r == ncclInProgress)
        c->why = FALLBACK_NONBLOCKING;
    else if (c->ranks == 1 && c->why != FALLBACK_MODE)
        c->why = FALLBACK_ALONE;
    t->inside--;
    if (!exists) {
        comm_free(c);
        return r;
    }
    comm_publish(c, *out);
    mapped_look(c->rank, c->ranks);
    return r;
}

static bool is_blocking(const ncclConfig_t *config) {
    return config == NULL || config->blocking != 0; /* unset is INT_MIN */
}

ncclResult_t ncclCommInitRank(ncclComm_t *out, int ranks, ncclUniqueId id, int rank) {
    REAL(CommInitRank);
    thread_state *t = watched();
    const comm_key key = comm_key_of(&id, sizeof id, NULL);
    const making m = make_begin(real, t, rank, ranks, &key, true);
    return make_end(t, m, real->CommInitRank(out, ranks, id, rank), out);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    REAL(CommInitRankConfig);
    thread_state *t = watched();
    const comm_key key = comm_key_of(&id, sizeof id, NULL);
    const making m = make_begin(real, t, rank, ranks, &key, is_blocking(config));
    return make_end(t, m, real->CommInitRankConfig(out, ranks, id, rank, config), out);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int ranks, int rank, int ids,
                                      ncclUniqueId *id, ncclConfig_t *config) {
    REAL(CommInitRankScalable);
    thread_state *t = id != NULL && ids > 0 ? watched() : NULL;
    const comm_key key = t != NULL ? comm_key_of(id, sizeof *id, NULL) : (comm_key){{0, 0}};
    const making m = make_begin(real, t, rank, ranks, &key, is_blocking(config));
    return make_end(t, m, real->CommInitRankScalable(out, ranks, rank, ids, id, config), out);
}

/* All ranks in one process: their memory needs no way of ours. */
ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices) {
    REAL(CommInitAll);
    thread_state *t = watched();
    if (t == NULL || t->depth > 0)
        return real->CommInitAll(comms, count, devices);
    mode_off_in_children();
    t->inside++;
    const ncclResult_t r = real->CommInitAll(comms, count, devices);
    t->inside--;
    for (int i = 0; r == ncclSuccess && i < count; i++) {
        comm *c = comm_create(real, i, count, NULL);
        if (c == NULL)
            continue;
        c->why = mode_now() == MODE_ACCELERATE ? FALLBACK_GROUPED : FALLBACK_MODE;
        comm_publish(c, comms[i]);
    }
    if (r == ncclSuccess)
        mapped_look(0, 1);
    return r;
}

/* Ends the waits of a communicator that stays. */
static void end_waits(comm *c) {
    channel *ch = c != NULL ? comm_channel(c) : NULL;
    if (ch != NULL)
        channel_abort(ch);
    channel_put(ch);
}

/* A child's name: its parent's, which of the parent's children, and what tells it from
 * its siblings. */
static comm_key child_key(comm *parent, const void *bytes, size_t count) {
    const unsigned ordinal = atomic_fetch_add(&parent->children, 1);
    const comm_key family = comm_key_of(&ordinal, sizeof ordinal, &parent->key);
    return comm_key_of(bytes, count, &family);
}

ncclResult_t ncclCommSplit(ncclComm_t comm_, int color, int key, ncclComm_t *out,
                           ncclConfig_t *config) {
    REAL(CommSplit);
    thread_state *t = watched();
    comm *parent = t != NULL ? comm_find(comm_) : NULL;
    making m = {NULL, NULL};
    if (parent != NULL) {
        const comm_key name = child_key(parent, &color, sizeof color);
        if (color >= 0)
            m = make_begin(real, t, -1, 0, &name,
                           config == NULL ? parent->blocking : is_blocking(config));
    }
    return make_end(t, m, real->CommSplit(comm_, color, key, out, config), out);
}

ncclResult_t ncclCommShrink(ncclComm_t comm_, int *excluded, int count, ncclComm_t *out,
                            ncclConfig_t *config, int flags) {
    REAL(CommShrink);
    thread_state *t = watched();
    comm *parent = t != NULL ? comm_find(comm_) : NULL;
    making m = {NULL, NULL};
    if (parent != NULL && excluded != NULL && count > 0) {
        const comm_key name = child_key(parent, excluded, (size_t)count * sizeof *excluded);
        if (flags != 0) /* NCCL_SHRINK_ABORT */
            end_waits(parent);
        m = make_begin(real, t, -1, 0, &name,
                       config == NULL ? parent->blocking : is_blocking(config));
    }
    return make_end(t, m, real->CommShrink(comm_, excluded, count, out, config, flags), out);
}

/* ---- communicators: ended ---- */

/* Nobody may find it by its handle any more: NCCL may give the next one the same. */
static channel *part(ncclComm_t handle, bool abort) {
    comm *c = watched() != NULL ? comm_find(handle) : NULL;
    channel *ch = c != NULL ? comm_retire(c) : NULL;
    if (ch != NULL && abort)
        channel_abort(ch);
    return ch;
}

/* Inside a group NCCL's kernels run until the group ends, and closing waits for the GPU. */
static void close_after(channel *ch) {
    thread_state *t = ch != NULL ? thread_here() : NULL;
    if (t != NULL && t->depth > 0)
        channel_close_later(ch, &t->ending);
    else if (ch != NULL)
        channel_close(ch);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm_) {
    REAL(CommDestroy);
    close_after(part(comm_, false));
    return real->CommDestroy(comm_);
}

/* Our waits first: NCCL's kernels may stand behind them. */
ncclResult_t ncclCommAbort(ncclComm_t comm_) {
    REAL(CommAbort);
    channel *ch = part(comm_, true);
    const ncclResult_t r = real->CommAbort(comm_);
    close_after(ch);
    return r;
}

ncclResult_t ncclCommRevoke(ncclComm_t comm_, int flags) {
    REAL(CommRevoke);
    comm *c = watched() != NULL ? comm_find(comm_) : NULL;
    end_waits(c);
    return real->CommRevoke(comm_, flags);
}
