/* SPDX-License-Identifier: Apache-2.0
 *
 * strike.c - how the victim is struck.  It strikes itself, by the signals that others
 * would send; what is to go on is continued by the judge.
 */
#include "config.h"

#include "fault.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef struct moment {
    board *b;
    int after_ms;
} moment;

static void strike(board *b) {
    int64_t none = 0;
    if (!atomic_compare_exchange_strong(&b->struck_ns, &none, now_ns()))
        return;
    kill(getpid(), b->c.kind == KILLED ? SIGKILL : SIGSTOP);
    /* Another thread may be the one that takes it: this one goes no further meanwhile. */
    const struct timespec nap = {0, 50000000};
    nanosleep(&nap, NULL);
}

static void *strike_later(void *ctx) {
    moment m = *(moment *)ctx;
    const struct timespec nap = {m.after_ms / 1000, m.after_ms % 1000 * 1000000L};
    free(ctx);
    nanosleep(&nap, NULL);
    strike(m.b);
    return NULL;
}

void strike_at(board *b, int rank, phase p, int after_ms) {
    if (rank != VICTIM || p != b->c.phase || b->c.kind == NOTHING || b->c.kind == TWISTED)
        return;
    if (after_ms == 0) {
        strike(b);
        return;
    }
    pthread_t thread;
    moment *m = malloc(sizeof *m);
    if (m == NULL)
        abort();
    *m = (moment){b, after_ms};
    if (pthread_create(&thread, NULL, strike_later, m) != 0)
        abort();
    pthread_detach(thread);
}

bool is_twisted(board *b, int rank, twist t) {
    int64_t none = 0;
    if (b->c.kind != TWISTED || b->c.twist != t || rank != VICTIM)
        return false;
    atomic_compare_exchange_strong(&b->struck_ns, &none, now_ns());
    return true;
}
