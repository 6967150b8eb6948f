/* SPDX-License-Identifier: Apache-2.0
 *
 * limited.c - a call of others on a thread that can be left behind.
 *
 * A thread that was left is inside a library (NCCL, CUDA) whose data the process's end takes
 * apart: it would crash there, and the program's status would be the signal's.  So where one is
 * left still, the end is cut short before that: what was printed is flushed, and the status is
 * the program's own.
 */
#define _GNU_SOURCE
#include "config.h"

#include "backend/limited.h"
#include "core/status.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LIMITED_LOOK_NS 20000000
/* What the process's end waits for those that were left, in naps. */
#define LIMITED_END_NAPS 10

/* Threads that are in a call of others still, left behind. */
static atomic_int left_behind;
static atomic_int left_by; /* the process that has them: a child has no such threads */

/* Whoever comes second frees it. */
typedef struct limited {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool returned, left;
    void (*fn)(void *ctx);
    void (*late)(void *ctx);
    void *ctx;
} limited;

static void limited_free(limited *l) {
    pthread_cond_destroy(&l->ended);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

static limited *limited_make(void (*fn)(void *ctx), void (*late)(void *ctx), void *ctx) {
    limited *l = calloc(1, sizeof *l);
    pthread_condattr_t attr;
    if (l == NULL)
        return NULL;
    *l = (limited){.fn = fn, .late = late, .ctx = ctx};
    pthread_mutex_init(&l->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC); /* a clock may be set back */
    pthread_cond_init(&l->ended, &attr);
    pthread_condattr_destroy(&attr);
    return l;
}

static void *limited_main(void *arg) {
    limited *l = arg;
    l->fn(l->ctx);
    pthread_mutex_lock(&l->lock);
    l->returned = true;
    const bool left = l->left;
    pthread_cond_signal(&l->ended);
    pthread_mutex_unlock(&l->lock);
    if (left) {
        l->late(l->ctx);
        limited_free(l);
        atomic_fetch_sub(&left_behind, 1);
    }
    return NULL;
}

/* The latest handler is the first to be called: before those of what is used by then. */
static void end_short(int status, void *ctx) {
    const struct timespec nap = {0, LIMITED_LOOK_NS};
    (void)ctx;
    if (atomic_load(&left_by) != (int)getpid())
        return;
    for (int i = 0; i < LIMITED_END_NAPS && atomic_load(&left_behind) > 0; i++)
        nanosleep(&nap, NULL);
    if (atomic_load(&left_behind) == 0)
        return;
    (void)fflush(NULL);
    _exit(status);
}

void epo_limited_nap(pthread_cond_t *wake, pthread_mutex_t *lock, long ns) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += ns;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    (void)pthread_cond_timedwait(wake, lock, &until);
}

epo_status epo_limited_call(void (*fn)(void *ctx), void (*late)(void *ctx), void *ctx,
                            epo_status (*look)(void *asks), void *asks) {
    limited *l = limited_make(fn, late, ctx);
    pthread_t thread;
    const int error = l != NULL ? pthread_create(&thread, NULL, limited_main, l) : 0;
    epo_status status = EPO_OK;
    if (l == NULL || error != 0) {
        if (l != NULL)
            limited_free(l);
        late(ctx);
        return l == NULL ? epo_fail(EPO_E_NOMEM, "no memory for a thread")
                         : epo_fail(EPO_E_SYSTEM, "pthread_create: %s", strerror(error));
    }
    pthread_mutex_lock(&l->lock);
    while (!l->returned && status == EPO_OK) {
        epo_limited_nap(&l->ended, &l->lock, LIMITED_LOOK_NS);
        if (l->returned)
            break;
        pthread_mutex_unlock(&l->lock);
        status = look(asks);
        pthread_mutex_lock(&l->lock);
    }
    const bool returned = l->returned;
    l->left = !returned;
    if (!returned) {
        atomic_store(&left_by, (int)getpid());
        atomic_fetch_add(&left_behind, 1);
    }
    pthread_mutex_unlock(&l->lock);
    if (!returned) {
        (void)on_exit(end_short, NULL);
        (void)pthread_detach(thread);
        return status;
    }
    (void)pthread_join(thread, NULL);
    limited_free(l);
    return EPO_OK;
}
