/* SPDX-License-Identifier: Apache-2.0
 *
 * release.c - what carried a communicator's messages is given back when nobody looks at it any more
 * and the GPU has nothing of ours on its way.
 *
 * To give a peer's memory back the driver waits for all that the GPU does, and meanwhile takes no
 * other call of this process.  A wait of ours for a peer that is gone would so stop the program,
 * and the abort that ends that wait may come from the same thread.
 */
#include "config.h"

#include "preload/intercept/channel.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#ifndef RELEASE_LIMIT_S
#define RELEASE_LIMIT_S 5.0
#endif

static struct {
    pthread_mutex_t lock;
    channel *all;                 /* that may have something on its way */
    channel *waiting, *wait_last; /* for the GPU to have nothing of ours */
    channel *closing;             /* a peer may still use our words */
    atomic_bool abandoned;        /* something of ours will not end */
} context = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* A thread of ours takes no signal of the program's. */
bool channel_thread(pthread_t *thread, void *(*run)(void *), void *argument) {
    sigset_t all, before;
    sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &before) != 0)
        return false;
    const bool started = pthread_create(thread, NULL, run, argument) == 0;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

/* ---- what is on its way ---- */

void channel_enlist(channel *ch) {
    pthread_mutex_lock(&context.lock);
    ch->all_next = context.all;
    context.all = ch;
    pthread_mutex_unlock(&context.lock);
}

static void strike(const channel *ch) {
    pthread_mutex_lock(&context.lock);
    for (channel **at = &context.all; *at != NULL; at = &(*at)->all_next)
        if (*at == ch) {
            *at = ch->all_next;
            break;
        }
    pthread_mutex_unlock(&context.lock);
}

/* (a driver in error runs nothing any more) */
bool channel_is_busy(const channel *ch) {
    const cu_result r = ch->cu->event_query(ch->last);
    return r == CU_NOT_READY || (r == 0 && atomic_load(&ch->lost));
}

bool channel_is_quiet(const channel *ch) {
    int mode = CU_CAPTURE_RELAXED; /* another thread may be capturing */
    cu_context popped;
    bool quiet = true;
    if (ch->cu->context_push(ch->context) != 0)
        return true; /* it is gone, and all that was on its way */
    const bool relaxed = ch->cu->capture_mode(&mode) == 0;
    pthread_mutex_lock(&context.lock);
    for (const channel *c = context.all; c != NULL && quiet; c = c->all_next)
        quiet = c->context != ch->context || !channel_is_busy(c);
    pthread_mutex_unlock(&context.lock);
    if (relaxed)
        (void)ch->cu->capture_mode(&mode);
    (void)ch->cu->context_pop(&popped);
    return quiet;
}

bool channel_may_give_back(const channel *ch) {
    return channel_is_quiet(ch) ||
           (agree_now() - ch->given_back >= CHANNEL_FORCE_S && !atomic_load(&context.abandoned));
}

void channel_abandon(void) { atomic_store(&context.abandoned, true); }

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
static void sweep_rooms(void) {
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
    pieces_close(ch);
    pthread_mutex_lock(&context.lock);
    sweep_rooms();
    if (!agree_closed(&ch->agree)) {
        ch->next = context.closing;
        context.closing = ch;
    } else {
        channel_free(ch);
    }
    pthread_mutex_unlock(&context.lock);
}

/* ---- with a limit ---- */

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

static void wait_for(const leaving *l, int rank, int ranks) {
    const struct timespec nap = {0, 500000};
    const double until = agree_now() + RELEASE_LIMIT_S;
    while (!atomic_load(&l->done) && agree_now() < until)
        nanosleep(&nap, NULL);
    if (!atomic_load(&l->done))
        fprintf(
            stderr,
            "ep-overlap: rank %d of %d: peers' memory of a communicator that has gone away stays "
            "open until the GPU's other work ends\n",
            rank, ranks);
}

/* The GPU may have work that is not ours and waits for a peer, of NCCL's other communicators: a
 * thread goes on with it where it takes longer than the limit. */
static void release_limited(channel *ch, bool wait) {
    const int rank = ch->owner->rank, ranks = ch->owner->ranks;
    leaving *l = ch->registered ? calloc(1, sizeof *l) : NULL;
    pthread_t thread;
    if (l != NULL) {
        l->ch = ch;
        atomic_init(&l->holders, 2);
    }
    if (l == NULL || !channel_thread(&thread, leave, l)) {
        free(l);
        release(ch);
        return;
    }
    pthread_detach(thread);
    if (wait)
        wait_for(l, rank, ranks);
    leaving_put(l);
}

/* ---- whoever waits for the GPU ---- */

static void wait_push(channel *ch, bool first) {
    pthread_mutex_lock(&context.lock);
    ch->next = first ? context.waiting : NULL;
    if (context.waiting == NULL)
        context.wait_last = ch;
    if (first || context.waiting == NULL)
        context.waiting = ch;
    else
        context.wait_last = context.wait_last->next = ch;
    pthread_mutex_unlock(&context.lock);
}

static channel *wait_pop(void) {
    pthread_mutex_lock(&context.lock);
    channel *ch = context.waiting;
    if (ch != NULL)
        context.waiting = ch->next;
    pthread_mutex_unlock(&context.lock);
    return ch;
}

void channel_sweep(bool wait) {
    for (channel *ch; (ch = wait_pop()) != NULL;) {
        if (!channel_may_give_back(ch)) {
            wait_push(ch, true);
            return;
        }
        release_limited(ch, wait);
    }
}

/* ---- who holds it ---- */

void channel_hold(channel *ch) { atomic_fetch_add_explicit(&ch->holders, 1, memory_order_relaxed); }

void channel_put(channel *ch) {
    if (ch == NULL || atomic_fetch_sub(&ch->holders, 1) != 1)
        return;
    strike(ch);
    ch->given_back = agree_now();
    if (ch->registered)
        wait_push(ch, false);
    else
        release_limited(ch, true);
    channel_sweep(true);
}
