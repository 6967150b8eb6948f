/* SPDX-License-Identifier: Apache-2.0
 *
 * clock.c - a stand-in, preloaded: the wall clock as a program sees it where somebody sets
 * it to and fro.  Every 50 ms it leaps by an hour, ahead or back.  CLOCK_MONOTONIC is left
 * alone: the kernel lets nobody set it.
 */
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long leap(void) {
    struct timespec t;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &t);
    return t.tv_nsec / 50000000 % 2 == 0 ? 3600 : -3600;
}

int clock_gettime(clockid_t clock, struct timespec *out) {
    const long status = syscall(SYS_clock_gettime, clock, out);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        out->tv_sec += leap();
    return (int)status;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec t;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &t);
    out->tv_sec = t.tv_sec;
    out->tv_usec = t.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out != NULL)
        *out = t.tv_sec;
    return t.tv_sec;
}
