/* SPDX-License-Identifier: Apache-2.0
 *
 * child.h - the wait for a child, with a limit that no step of the clock moves.
 */
#ifndef EPO_CHILD_H
#define EPO_CHILD_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>

/* Milliseconds of CLOCK_MONOTONIC. */
static inline int64_t epo_child_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* True when the child has ended before the clock shows limit_ms; `*status` is as of waitpid(), or
 * -1 where somebody else has taken it.  False: it runs on. */
static inline bool epo_child_ended(pid_t child, int64_t limit_ms, int *status) {
    const struct timespec pause = {0, 1000000};
    for (;;) {
        pid_t got = waitpid(child, status, WNOHANG);
        if (got == child)
            return true;
        if (got < 0 && errno != EINTR) {
            *status = -1;
            return true;
        }
        if (epo_child_clock() >= limit_ms)
            return false;
        nanosleep(&pause, NULL);
    }
}

#endif
