/* SPDX-License-Identifier: Apache-2.0
 *
 * close.c - the end of what carries a communicator's messages: its waits are ended, and what is on
 * its way is waited for.
 */
#include "config.h"

#include "preload/intercept/channel.h"

#include <stdio.h>
#include <time.h>

#define DRAIN_LIMIT_S 600.0
#define ABORT_LIMIT_S 20.0

static void nap(void) {
    const struct timespec t = {0, 500000};
    nanosleep(&t, NULL);
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
        ch->releasing = channel_thread(&ch->releaser, release_waits, ch);
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
    while ((busy = channel_is_busy(ch)) && !atomic_load(&ch->lost) && agree_now() < until)
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
    if (!done) {
        channel_abandon();
        return;
    }
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
