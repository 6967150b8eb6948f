/* SPDX-License-Identifier: Apache-2.0
 *
 * close.c - the end of what carries a communicator's messages: its waits are ended, what is on its
 * way is waited for, and whoever held it last releases it.
 */
#include "config.h"

#include "preload/intercept/channel.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define DRAIN_LIMIT_S 600.0
#define ABORT_LIMIT_S 20.0
#ifndef RELEASE_LIMIT_S
#define RELEASE_LIMIT_S 5.0
#endif

static struct {
    pthread_mutex_t lock;
    channel *closing; /* a peer may still use our words */
} context = {PTHREAD_MUTEX_INITIALIZER, NULL};

static void nap(void) {
    const struct timespec t = {0, 500000};
    nanosleep(&t, NULL);
}

/* A thread of ours takes no signal of the program's. */
static bool thread_start(pthread_t *thread, void *(*run)(void *), void *argument) {
    sigset_t all, before;
    sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &before) != 0)
        return false;
    const bool started = pthread_create(thread, NULL, run, argument) == 0;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

/* ---- release ---- */

/* What is this rank's alone. */
static void release_own(channel *ch) {
    cu_event *const events[] = {&ch->fork, &ch->join, &ch->last};
    cu_stream *const streams[] = {&ch->self, &ch->side};
    reach_close(ch);
    copy_close(ch);
    for (int i = 0; i < 2; i++)
        if (*streams[i] != NULL)
            (void)ch->cu->stream_destroy(*streams[i]);
    for (int i = 0; i < 3; i++)
        if (*events[i] != NULL)
            (void)ch->cu->event_destroy(*events[i]);
    if (ch->registered)
        (void)ch->cu->host_unregister(ch->agree.room);
    ch->registered = false;
}

void channel_free(channel *ch) {
    agree_leave(&ch->agree);
    pthread_mutex_destroy(&ch->abort_lock);
    pthread_mutex_destroy(&ch->lock);
    free(ch);
}

/* Rooms that the peers have left meanwhile.  Lock held. */
static void sweep(void) {
    for (channel **at = &context.closing; *at != NULL;) {
        channel *ch = *at;
        if (!agree_closed(&ch->agree)) {
            at = &ch->next;
            continue;
        }
        *at = ch->next;
        channel_free(ch);
    }
}

static void release(channel *ch) {
    cu_context popped;
    int mode = CU_CAPTURE_RELAXED; /* another thread may be capturing */
    agree_unlink(&ch->agree);
    if (ch->cu != NULL && ch->context != NULL && ch->cu->context_push(ch->context) == 0) {
        const bool relaxed = ch->cu->capture_mode(&mode) == 0;
        release_own(ch);
        if (relaxed)
            (void)ch->cu->capture_mode(&mode);
        (void)ch->cu->context_pop(&popped);
    }
    pthread_mutex_lock(&context.lock);
    sweep();
    if (!agree_closed(&ch->agree)) {
        ch->next = context.closing;
        context.closing = ch;
    } else {
        channel_free(ch);
    }
    pthread_mutex_unlock(&context.lock);
}

typedef struct leaving { /* of the thread that releases and the one that waits for it */
    channel *ch;
    atomic_bool done;
    atomic_int holders;
} leaving;

static void leaving_put(leaving *l) {
    if (atomic_fetch_sub(&l->holders, 1) == 1)
        free(l);
}

static void *leave(void *argument) {
    leaving *l = argument;
    release(l->ch);
    atomic_store(&l->done, true);
    leaving_put(l);
    return NULL;
}

/* To give back a peer's memory the driver may wait for all that the GPU does, another
 * communicator's messages too, and their peers may be gone.  So a thread does it, and goes on with
 * it where it takes longer than the limit. */
static void release_limited(channel *ch) {
    const double until = agree_now() + RELEASE_LIMIT_S;
    const int rank = ch->owner->rank, ranks = ch->owner->ranks;
    leaving *l = ch->registered ? calloc(1, sizeof *l) : NULL;
    pthread_t thread;
    if (l != NULL) {
        l->ch = ch;
        atomic_init(&l->holders, 2);
    }
    if (l == NULL || !thread_start(&thread, leave, l)) {
        free(l);
        release(ch);
        return;
    }
    pthread_detach(thread);
    while (!atomic_load(&l->done) && agree_now() < until)
        nap();
    if (!atomic_load(&l->done))
        fprintf(
            stderr,
            "ep-overlap: rank %d of %d: peers' memory of a communicator that has gone away stays "
            "open until the GPU's other work ends\n",
            rank, ranks);
    leaving_put(l);
}

void channel_hold(channel *ch) { atomic_fetch_add_explicit(&ch->holders, 1, memory_order_relaxed); }

void channel_put(channel *ch) {
    if (ch != NULL && atomic_fetch_sub(&ch->holders, 1) == 1)
        release_limited(ch);
}

/* ---- waits ---- */

/* Every wait of this rank's streams finds what it waits for; nobody else reads these words. */
static void open_gates(channel *ch) {
    for (int i = 0; i < ch->count; i++)
        if (channel_has(ch, i)) {
            atomic_store(&channel_out(ch, i)->arrived, atomic_load(&ch->peer[i].theirs));
            atomic_store(&channel_in(ch, i)->written, atomic_load(&ch->peer[i].wanted));
        }
}

static void *release_waits(void *argument) {
    channel *ch = argument;
    while (!atomic_load(&ch->stop)) {
        open_gates(ch);
        nap();
    }
    return NULL;
}

void channel_abort(channel *ch) {
    if (atomic_exchange(&ch->aborted, true))
        return;
    pthread_mutex_lock(&ch->abort_lock);
    if (!atomic_load(&ch->stop)) { /* (else it has no waits any more) */
        ch->releasing = thread_start(&ch->releaser, release_waits, ch);
        if (!ch->releasing)
            open_gates(ch);
    }
    pthread_mutex_unlock(&ch->abort_lock);
}

static void stop_releaser(channel *ch) {
    pthread_mutex_lock(&ch->abort_lock);
    atomic_store(&ch->stop, true);
    if (ch->releasing)
        pthread_join(ch->releaser, NULL);
    ch->releasing = false;
    pthread_mutex_unlock(&ch->abort_lock);
}

/* ---- closing ---- */

/* From then on nothing of ours comes onto the streams.  False: a thread is held up in here. */
static bool end_exchanges(channel *ch, double limit_s) {
    const double until = agree_now() + limit_s;
    while (pthread_mutex_trylock(&ch->lock) != 0) {
        if (agree_now() > until)
            return false;
        nap();
    }
    ch->ended = true;
    pthread_mutex_unlock(&ch->lock);
    return true;
}

/* As ncclCommDestroy, this waits for what the streams still hold. */
static bool drain(channel *ch, double limit_s) {
    const double until = agree_now() + limit_s;
    int mode = CU_CAPTURE_RELAXED; /* a question to an event would break another thread's capture */
    cu_context popped;
    bool busy;
    if (!end_exchanges(ch, limit_s))
        return false;
    if (ch->cu->context_push(ch->context) != 0)
        return true; /* the context is gone, and its streams with it */
    const bool relaxed = ch->cu->capture_mode(&mode) == 0;
    while ((busy = ch->cu->event_query(ch->last) == CU_NOT_READY) && agree_now() < until)
        nap();
    if (relaxed)
        (void)ch->cu->capture_mode(&mode);
    (void)ch->cu->context_pop(&popped);
    return !busy;
}

/* What streams may still use when both limits are over stays where it is. */
void channel_close(channel *ch) {
    bool done = drain(ch, atomic_load(&ch->aborted) ? ABORT_LIMIT_S : DRAIN_LIMIT_S);
    if (!done) {
        fprintf(stderr,
                "ep-overlap: rank %d of %d: messages of a communicator that goes away are still "
                "under way; its waits are released\n",
                ch->owner->rank, ch->owner->ranks);
        channel_abort(ch);
        done = drain(ch, ABORT_LIMIT_S);
    }
    if (!done)
        return;
    stop_releaser(ch);
    channel_put(ch);
}

void channel_close_later(channel *ch, channel **list) {
    ch->next = *list;
    *list = ch;
}

void channel_close_all(channel **list) {
    while (*list != NULL) {
        channel *ch = *list;
        *list = ch->next;
        channel_close(ch);
    }
}
