/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "preload/intercept/kept.h"

#include <pthread.h>
#include <stdbool.h>
#include <unistd.h>

#include "preload/lock_within.h"

#define FORK_LIMIT_S 1 /* if a driver's call does not come back, a fork goes on as it is */

static struct {
    pthread_mutex_t lock;
    pthread_once_t watched;
    kept *first;
} context = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_ONCE_INIT, NULL};

static _Thread_local bool forks; /* this thread, and it has the lock */

static void before_fork(void) { forks = lock_within(&context.lock, FORK_LIMIT_S); }

static void after_fork(void) {
    if (forks)
        pthread_mutex_unlock(&context.lock);
    forks = false;
}

static void in_child(void) {
    for (const kept *k = context.first; forks && k != NULL; k = k->next)
        for (uint32_t i = 0; i < k->count; i++) {
            if (k->fd[i] >= 0)
                close(k->fd[i]);
            k->fd[i] = -1;
        }
    if (!forks) { /* whoever has it is not here */
        pthread_mutex_init(&context.lock, NULL);
        context.first = NULL;
    }
    after_fork();
}

static void watch_forks(void) { (void)pthread_atfork(before_fork, after_fork, in_child); }

void kept_lock(sigset_t *before) {
    sigset_t all;
    pthread_once(&context.watched, watch_forks);
    sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, before);
    pthread_mutex_lock(&context.lock);
}

void kept_unlock(const sigset_t *before) {
    pthread_mutex_unlock(&context.lock);
    (void)pthread_sigmask(SIG_SETMASK, before, NULL);
}

void kept_add(kept *k, int *fd, uint32_t count) {
    *k = (kept){context.first, fd, count};
    context.first = k;
}

void kept_begin(kept *k, int *fd) {
    sigset_t before;
    kept_lock(&before);
    kept_add(k, fd, 0);
    kept_unlock(&before);
}

void kept_close(kept *k) {
    sigset_t before;
    kept_lock(&before);
    for (uint32_t i = 0; i < k->count; i++)
        if (k->fd[i] >= 0)
            close(k->fd[i]);
    for (kept **at = &context.first; *at != NULL; at = &(*at)->next)
        if (*at == k) {
            *at = k->next;
            break;
        }
    k->count = 0;
    kept_unlock(&before);
}
