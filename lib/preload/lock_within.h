/* SPDX-License-Identifier: Apache-2.0
 *
 * lock_within.h - a lock with a limit that no step of the clock moves, as pthread_mutex_timedlock's
 * is moved.
 */
#ifndef EPO_PRELOAD_LOCK_WITHIN_H
#define EPO_PRELOAD_LOCK_WITHIN_H

#include <pthread.h>
#include <stdbool.h>
#include <time.h>

static inline bool lock_within(pthread_mutex_t *lock, int seconds) {
    const struct timespec nap = {0, 500000};
    struct timespec began, now;
    clock_gettime(CLOCK_MONOTONIC, &began);
    while (pthread_mutex_trylock(lock) != 0) {
        nanosleep(&nap, NULL);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - began.tv_sec > seconds ||
            (now.tv_sec - began.tv_sec == seconds && now.tv_nsec >= began.tv_nsec))
            return false;
    }
    return true;
}

#endif
