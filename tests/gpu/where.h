/* SPDX-License-Identifier: Apache-2.0
 *
 * where.h - of ranks that are processes and stand: where each of their threads is.
 *
 * A rank tells its steps in shared memory.  When it has told none for as long as
 * EPO_TEST_WHERE says (seconds; without it nothing of this is done), the program that waits
 * for the ranks sends a signal to each thread of each, which prints its own stack.
 */
#ifndef EPO_TESTS_GPU_WHERE_H
#define EPO_TESTS_GPU_WHERE_H

#include <dirent.h>
#include <execinfo.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WHERE_FRAMES = 40, WHERE_DUMPS = 3 };

static inline double where_limit(void) {
    const char *text = getenv("EPO_TEST_WHERE");
    return text != NULL ? strtod(text, NULL) : 0;
}

/* Not strictly safe in a handler; good enough for a thread that waits. */
static void where_say(int signal) {
    void *frame[WHERE_FRAMES];
    char line[64];
    (void)signal;
    const int n = backtrace(frame, WHERE_FRAMES);
    const int size = snprintf(line, sizeof line, "-- process %d thread %ld\n", (int)getpid(),
                              syscall(SYS_gettid));
    if (size > 0 && write(2, line, (size_t)size) == size)
        backtrace_symbols_fd(frame, n, 2);
}

/* In each rank, first. */
static inline void where_begin(void) {
    void *frame[4];
    if (where_limit() <= 0)
        return;
    (void)backtrace(frame, 4); /* it loads a library the first time */
    struct sigaction act = {.sa_handler = where_say, .sa_flags = SA_RESTART};
    sigaction(SIGUSR2, &act, NULL);
}

static inline void where_nap(long ms) {
    const struct timespec nap = {0, ms * 1000000};
    nanosleep(&nap, NULL);
}

static inline void where_threads(pid_t pid) {
    char path[40];
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *dir = opendir(path);
    for (struct dirent *d; dir != NULL && (d = readdir(dir)) != NULL;) {
        const long thread = strtol(d->d_name, NULL, 10);
        if (thread > 0 && syscall(SYS_tgkill, pid, thread, SIGUSR2) == 0)
            where_nap(20); /* one after the other */
    }
    if (dir != NULL)
        closedir(dir);
}

/* Waits for all ranks; false: one did not end well.  step[r * stride]: of rank r. */
static inline bool where_wait(const pid_t *pid, int ranks, _Atomic int *step, size_t stride) {
    const double limit = where_limit();
    bool over[256] = {false}, ok = true;
    int seen = -1, dumps = 0, left = ranks;
    double quiet = 0;
    while (left > 0) {
        int sum = 0;
        for (int r = 0; r < ranks; r++) {
            int status = 0;
            sum += atomic_load(&step[(size_t)r * stride]);
            const pid_t got = over[r]      ? 0
                              : pid[r] < 0 ? -1
                                           : waitpid(pid[r], &status, limit > 0 ? WNOHANG : 0);
            if (over[r] || got == 0)
                continue;
            over[r] = true;
            left--;
            ok = ok && got > 0 && status == 0;
        }
        if (left == 0 || limit <= 0)
            continue;
        where_nap(20);
        quiet = sum == seen ? quiet + 0.02 : 0;
        dumps = sum == seen ? dumps : 0;
        seen = sum;
        if (quiet < limit * (dumps + 1) || dumps == WHERE_DUMPS)
            continue;
        dumps++;
        for (int r = 0; r < ranks; r++) {
            fprintf(stderr, "-- rank %d stands at step %d, %.0f s without one by any rank\n", r,
                    atomic_load(&step[(size_t)r * stride]), quiet);
            if (!over[r])
                where_threads(pid[r]);
        }
    }
    return ok;
}

#endif
