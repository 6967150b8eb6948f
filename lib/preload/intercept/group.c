/* SPDX-License-Identifier: Apache-2.0
 *
 * group.c - ncclGroupStart to ncclGroupEnd of one thread.  What NCCL carries is handed
 * on at once, what we carry is kept until the group ends, as NCCL itself does.
 */
#include "config.h"

#include "preload/intercept/intercept.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_key_t key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;

static void forget(thread_state *t) {
    for (size_t i = 0; i < t->count; i++)
        channel_put(t->messages[i].channel);
    t->count = 0;
    t->failed = false;
}

static void thread_gone(void *state) {
    thread_state *t = state;
    forget(t); /* a group that was never ended */
    channel_close_all(&t->ending);
    free(t->messages);
    free(t);
}

static void key_make(void) { (void)pthread_key_create(&key, thread_gone); }

thread_state *thread_here(void) {
    pthread_once(&key_once, key_make);
    thread_state *t = pthread_getspecific(key);
    if (t != NULL)
        return t;
    t = calloc(1, sizeof *t);
    if (t != NULL && pthread_setspecific(key, t) != 0) {
        free(t);
        t = NULL;
    }
    return t;
}

static message *keep(thread_state *t, const message *m) {
    if (t->count == t->capacity) {
        const size_t more = t->capacity > 0 ? 2 * t->capacity : 64;
        message *grown =
            more < SIZE_MAX / sizeof *grown ? realloc(t->messages, more * sizeof *grown) : NULL;
        if (grown == NULL)
            return NULL;
        t->messages = grown;
        t->capacity = more;
    }
    t->messages[t->count] = *m;
    return &t->messages[t->count++];
}

static ncclResult_t pass(const real_nccl *real, thread_state *t, const message *m) {
    t->inside++;
    ncclResult_t r = m->send
                         ? real->Send(m->source, m->count, m->type, m->peer, m->handle, m->stream)
                         : real->Recv(m->target, m->count, m->type, m->peer, m->handle, m->stream);
    t->inside--;
    return r;
}

/* ---- what a group was, for the figures ---- */

/* All messages of one communicator, from messages[first] on.  An exchange: something
 * each way, and with every other rank. */
static void count_exchange(const thread_state *t, size_t first) {
    comm *c = t->messages[first].comm;
    uint64_t bytes = 0, met[16] = {0};
    int peers = 0;
    bool sent = false, received = false, large = c->ranks > (int)(64 * sizeof met / sizeof met[0]);
    for (size_t i = first; i < t->count; i++) {
        const message *m = &t->messages[i];
        if (m->comm != c || m->peer < 0 || m->peer >= c->ranks)
            continue;
        sent = sent || m->send;
        received = received || !m->send;
        bytes += m->send ? m->bytes : 0;
        if (m->peer == c->rank || large)
            continue;
        const uint64_t bit = UINT64_C(1) << (m->peer % 64);
        peers += (met[m->peer / 64] & bit) == 0;
        met[m->peer / 64] |= bit;
    }
    if (!sent || !received || (!large && peers < c->ranks - 1) || c->ranks < 2)
        return;
    tally_add(&c->exchange, bytes);
    uint64_t largest = atomic_load(&c->largest);
    while (bytes > largest && !atomic_compare_exchange_weak(&c->largest, &largest, bytes))
        ;
}

/* The messages of one communicator in one group: one call to the recorder. */
static void note_messages(const thread_state *t, size_t first) {
    const comm *c = t->messages[first].comm;
    uint64_t bytes = 0;
    for (size_t i = first; i < t->count; i++)
        if (t->messages[i].comm == c)
            bytes += t->messages[i].bytes;
    note_call(c, COLLECTIVES, bytes, true);
}

static bool seen_before(const thread_state *t, size_t i) {
    for (size_t k = 0; k < i; k++)
        if (t->messages[k].comm == t->messages[i].comm)
            return true;
    return false;
}

/* ---- the end of a group ---- */

static fallback way_of(const message *m) {
    if (m->channel == NULL)
        return comm_why(m->comm);
    if (m->carried)
        return FALLBACK_NONE;
    if (!channel_knows(m->channel, m->peer))
        return FALLBACK_PEER;
    if (!channel_takes(m->channel, m->peer, m->bytes))
        return FALLBACK_SMALL;
    return m->why != FALLBACK_NONE ? m->why : FALLBACK_ONE_WAY;
}

static void count_message(const message *m) {
    const fallback way = way_of(m);
    tally_add(m->send ? &m->comm->send : &m->comm->recv, m->bytes);
    if (m->send && way == FALLBACK_NONE)
        tally_add(&m->comm->carried, m->bytes);
    else if (m->send)
        tally_add(&m->comm->fell[way], m->bytes);
}

/* NCCL would look into what it has given back, or into another communicator that has the handle
 * now; of one whose memory is gone it says the same. */
static ncclResult_t ended_meanwhile(const comm *c) {
    fprintf(stderr,
            "ep-overlap: rank %d of %d: a communicator was ended while a group had messages of it, "
            "which are not sent; end it after ncclGroupEnd\n",
            c->rank, c->ranks);
    return ncclInvalidArgument;
}

/* What was kept and is not ours, in the program's order. */
static ncclResult_t pass_rest(const real_nccl *real, thread_state *t) {
    const comm *ended = NULL;
    ncclResult_t r = ncclSuccess;
    for (size_t i = 0; i < t->count && r == ncclSuccess; i++) {
        const message *m = &t->messages[i];
        if (m->carried || m->passed)
            continue;
        if (!comm_stay(m->comm, m->handle)) {
            ended = m->comm;
            continue;
        }
        r = pass(real, t, m);
        comm_leave();
    }
    return r == ncclSuccess && ended != NULL ? ended_meanwhile(ended) : r;
}

/* The channel of the communicator that the i-th message is of, which one of them holds. */
static channel *channel_from(const thread_state *t, size_t i) {
    for (size_t k = i; k < t->count; k++)
        if (t->messages[k].comm == t->messages[i].comm && t->messages[k].channel != NULL)
            return t->messages[k].channel;
    return NULL;
}

/* Before NCCL's own part: what both ends agree on goes onto the streams, the rest to NCCL. */
static ncclResult_t group_prepare(const real_nccl *real, thread_state *t) {
    ncclResult_t r = ncclSuccess;
    for (size_t i = 0; i < t->count; i++) {
        if (seen_before(t, i))
            continue;
        count_exchange(t, i);
        note_messages(t, i);
        channel *ch = channel_from(t, i);
        if (ch == NULL)
            continue;
        const ncclResult_t ours =
            channel_exchange(ch, t->messages, t->count, &t->messages[i].beside);
        r = r == ncclSuccess ? ours : r;
    }
    for (size_t i = 0; i < t->count; i++)
        count_message(&t->messages[i]);
    return r == ncclSuccess ? pass_rest(real, t) : r;
}

static ncclResult_t group_join(const thread_state *t) {
    ncclResult_t r = ncclSuccess;
    for (size_t i = 0; i < t->count && r == ncclSuccess; i++) {
        if (t->messages[i].beside)
            r = channel_join(channel_from(t, i), t->messages[i].stream);
    }
    return r;
}

/* A group that NCCL has refused already: its messages count all the same. */
static void group_void(thread_state *t) {
    for (size_t i = 0; i < t->count; i++)
        if (t->messages[i].channel != NULL)
            channel_alone(t->messages[i].channel, &t->messages[i]);
}

ncclResult_t group_end(const real_nccl *real, thread_state *t) {
    ncclResult_t prepared = ncclSuccess;
    if (t->depth == 1 && t->count > 0 && !t->failed)
        prepared = group_prepare(real, t);
    else if (t->depth == 1 && t->failed)
        group_void(t);
    t->inside++;
    ncclResult_t r = real->GroupEnd();
    t->inside--;
    if (t->depth > 0)
        t->depth--;
    if (t->depth > 0)
        return r;
    channel_close_all(&t->ending);
    if (r == ncclSuccess || r == ncclInProgress) {
        const ncclResult_t joined = group_join(t);
        r = prepared != ncclSuccess ? prepared : joined != ncclSuccess ? joined : r;
    }
    forget(t);
    return r;
}

ncclResult_t group_start(const real_nccl *real, thread_state *t) {
    t->inside++;
    ncclResult_t r = real->GroupStart();
    t->inside--;
    if (r == ncclSuccess)
        t->depth++;
    return r;
}

/* Nothing is sent, so nothing is agreed on and nothing counts. */
ncclResult_t group_simulate(const real_nccl *real, thread_state *t, ncclSimInfo_t *info) {
    const ncclResult_t passed = t->depth == 1 ? pass_rest(real, t) : ncclSuccess;
    t->inside++;
    ncclResult_t r = real->GroupSimulateEnd(info);
    r = r == ncclSuccess ? passed : r;
    t->inside--;
    if (t->depth > 0 && --t->depth == 0) {
        forget(t);
        channel_close_all(&t->ending);
    }
    return r;
}

/* ---- one message ---- */

/* A communicator in error or aborted: NCCL refuses with the exact result. */
static bool in_error(const message *m) {
    const real_nccl *real = m->comm->real;
    ncclResult_t state = ncclSuccess;
    return real->CommGetAsyncError == NULL ||
           real->CommGetAsyncError(m->handle, &state) != ncclSuccess || state != ncclSuccess;
}

/* The channel of a message that a peer may agree on, held; NULL: it is NCCL's.  All of them are
 * kept until the group ends, because NCCL matches messages by their order, and the peer may think
 * otherwise of an earlier one. */
static channel *channel_for(const message *m) {
    const bool may = m->peer >= 0 && m->peer < m->comm->ranks;
    channel *ch = may ? comm_channel(m->comm) : NULL;
    if (ch == NULL || !in_error(m))
        return ch;
    channel_put(ch);
    return NULL;
}

ncclResult_t group_message(const real_nccl *real, thread_state *t, const message *given) {
    message m = *given;
    m.channel = channel_for(&m);
    m.passed = t->depth == 0 || m.channel == NULL;
    const bool kept = t->depth > 0 && keep(t, &m) != NULL;
    if (kept && !m.passed)
        return ncclSuccess;
    if (m.channel != NULL)
        channel_alone(m.channel, &m); /* outside a group, or no memory */
    if (!kept)
        count_message(&m);
    const ncclResult_t r = pass(real, t, &m);
    if (r != ncclSuccess && t->depth > 0)
        t->failed = true;
    channel_put(m.channel);
    return r;
}
