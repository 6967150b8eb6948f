/* SPDX-License-Identifier: Apache-2.0
 *
 * group.c - ncclGroupStart to ncclGroupEnd of one thread.  What NCCL carries is handed
 * on at once, what we carry is kept until the group ends, as NCCL itself does.
 */
#include "config.h"

#include "preload/intercept/intercept.h"

#include <stdlib.h>
#include <string.h>

static pthread_key_t key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;

static void thread_gone(void *state) {
    thread_state *t = state;
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
    ncclResult_t r =
        m->send ? real->Send(m->source, m->count, m->type, m->peer, m->comm->handle, m->stream)
                : real->Recv(m->target, m->count, m->type, m->peer, m->comm->handle, m->stream);
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

/* ---- own messages ---- */

/* Messages to oneself match within their group: the k-th sent with the k-th received.
 * Where they do not, NCCL says so. */
static void settle_self(thread_state *t, size_t first) {
    comm *c = t->messages[first].comm;
    size_t s = first, r = first;
    for (;;) {
        while (s < t->count && !(t->messages[s].comm == c && t->messages[s].carried &&
                                 t->messages[s].peer == c->rank && t->messages[s].send))
            s++;
        while (r < t->count && !(t->messages[r].comm == c && t->messages[r].carried &&
                                 t->messages[r].peer == c->rank && !t->messages[r].send))
            r++;
        if (s == t->count && r == t->count)
            return;
        if (s == t->count || r == t->count || t->messages[s].bytes != t->messages[r].bytes)
            break;
        s++;
        r++;
    }
    for (size_t i = first; i < t->count; i++)
        if (t->messages[i].comm == c && t->messages[i].peer == c->rank)
            t->messages[i].carried = false;
}

/* Before NCCL's own part of the group: what must be marked on the streams, and what
 * turned out to be NCCL's. */
static ncclResult_t group_prepare(const real_nccl *real, thread_state *t, bool *ours) {
    ncclResult_t r = ncclSuccess;
    *ours = false;
    for (size_t i = 0; i < t->count && r == ncclSuccess; i++) {
        comm *c = t->messages[i].comm;
        if (seen_before(t, i))
            continue;
        count_exchange(t, i);
        note_messages(t, i);
        if (c->channel == NULL)
            continue;
        bool held[2] = {false, false};
        for (size_t k = i; k < t->count; k++)
            if (t->messages[k].comm == c && t->messages[k].carried)
                held[t->messages[k].peer == c->rank] = true;
        if (held[1])
            settle_self(t, i);
        for (size_t k = i; held[1] && k < t->count && r == ncclSuccess; k++)
            if (t->messages[k].comm == c && t->messages[k].peer == c->rank &&
                !t->messages[k].carried && !t->messages[k].passed)
                r = pass(real, t, &t->messages[k]);
        if (r == ncclSuccess && (held[0] || held[1])) {
            r = channel_fork(c->channel, t->messages, t->count);
            *ours = true;
        }
    }
    return r;
}

/* NCCL has launched its part; ours runs beside it, from the same point of the streams. */
static ncclResult_t group_carry(thread_state *t) {
    ncclResult_t r = ncclSuccess;
    for (size_t i = 0; i < t->count && r == ncclSuccess; i++)
        if (t->messages[i].comm->channel != NULL && !seen_before(t, i))
            r = channel_carry(t->messages[i].comm->channel, t->messages, t->count);
    return r;
}

/* A member of the group that NCCL refused: the whole group is void, ours too. */
ncclResult_t group_end(const real_nccl *real, thread_state *t) {
    bool ours = false;
    ncclResult_t prepared = ncclSuccess;
    if (t->depth == 1 && t->count > 0 && !t->failed)
        prepared = group_prepare(real, t, &ours);
    t->inside++;
    ncclResult_t r = real->GroupEnd();
    t->inside--;
    if (t->depth > 0)
        t->depth--;
    if (t->depth > 0)
        return r;
    if (prepared != ncclSuccess)
        r = r == ncclSuccess ? prepared : r;
    else if ((r == ncclSuccess || r == ncclInProgress) && ours) {
        const ncclResult_t carried = group_carry(t);
        r = carried != ncclSuccess ? carried : r;
    }
    t->count = 0;
    t->failed = false;
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

ncclResult_t group_simulate(const real_nccl *real, thread_state *t, ncclSimInfo_t *info) {
    t->inside++;
    ncclResult_t r = real->GroupSimulateEnd(info);
    t->inside--;
    if (t->depth > 0 && --t->depth == 0) {
        t->count = 0;
        t->failed = false;
    }
    return r;
}

/* ---- one message ---- */

/* A communicator in error or aborted: NCCL refuses with the exact result. */
static bool in_error(const comm *c) {
    ncclResult_t state = ncclSuccess;
    return c->real->CommGetAsyncError == NULL ||
           c->real->CommGetAsyncError(c->handle, &state) != ncclSuccess || state != ncclSuccess;
}

static fallback way_of(const message *m) {
    const comm *c = m->comm;
    if (c->channel == NULL)
        return c->why;
    if (!channel_takes(c->channel, m->peer, m->bytes))
        return channel_knows(c->channel, m->peer) ? FALLBACK_SMALL : FALLBACK_PEER;
    return in_error(c) ? FALLBACK_ERROR : FALLBACK_NONE;
}

static void count_message(const message *m, fallback way) {
    tally_add(m->send ? &m->comm->send : &m->comm->recv, m->bytes);
    if (m->send && way == FALLBACK_NONE)
        tally_add(&m->comm->carried, m->bytes);
    else if (m->send)
        tally_add(&m->comm->fell[way], m->bytes);
}

ncclResult_t group_message(const real_nccl *real, thread_state *t, const message *given) {
    message m = *given;
    const fallback way = way_of(&m);
    m.carried = way == FALLBACK_NONE;
    m.passed = !m.carried;
    message *kept = keep(t, &m);
    if (kept == NULL && m.carried)
        return ncclSystemError; /* no memory; its peer counts on us, so NCCL cannot help */
    count_message(&m, way);
    if (!m.carried) {
        ncclResult_t r = pass(real, t, &m);
        if (r != ncclSuccess && t->depth > 0)
            t->failed = true;
        if (t->depth == 0)
            t->count = 0;
        return r;
    }
    if (t->depth > 0)
        return ncclSuccess;
    ncclResult_t r = group_start(real, t); /* a group of its own */
    return r == ncclSuccess ? group_end(real, t) : r;
}
