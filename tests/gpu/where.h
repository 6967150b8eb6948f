/* SPDX-License-Identifier: Apache-2.0
 *
 * where.h - of ranks that stand: where each of their threads is.
 *
 * A rank tells its steps in memory that all see.  When none has told one for as long as
 * EPO_TEST_WHERE says (seconds; without it nothing of this is done), whoever waits for the
 * ranks, the program that made them or a thread beside them, sends a signal to each thread,
 * which prints its own stack.
 */
#ifndef EPO_TESTS_GPU_WHERE_H
#define EPO_TESTS_GPU_WHERE_H

#include <dirent.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
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

/* Each thread of the process but the one that asks. */
static inline void where_threads(pid_t pid) {
    char path[40];
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *dir = opendir(path);
    for (struct dirent *d; dir != NULL && (d = readdir(dir)) != NULL;) {
        const long thread = strtol(d->d_name, NULL, 10);
        if (thread > 0 && thread != syscall(SYS_gettid) &&
            syscall(SYS_tgkill, pid, thread, SIGUSR2) == 0)
            where_nap(20); /* one after the other */
    }
    if (dir != NULL)
        closedir(dir);
}

/* How long nobody has told a step. */
typedef struct where_quiet {
    int seen, dumps;
    double s;
} where_quiet;

/* 20 ms later, with the steps' sum: true if the stacks are to be printed now. */
static inline bool where_now(where_quiet *q, int sum) {
    where_nap(20);
    q->s = sum == q->seen ? q->s + 0.02 : 0;
    q->dumps = sum == q->seen ? q->dumps : 0;
    q->seen = sum;
    if (q->s < where_limit() * (q->dumps + 1) || q->dumps == WHERE_DUMPS)
        return false;
    q->dumps++;
    return true;
}

/* Waits for all ranks; false: one did not end well.  step[r * stride]: of rank r. */
static inline bool where_wait(const pid_t *pid, int ranks, _Atomic int *step, size_t stride) {
    const double limit = where_limit();
    bool over[256] = {false}, ok = true;
    where_quiet quiet = {.seen = -1};
    int left = ranks;
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
        if (left == 0 || limit <= 0 || !where_now(&quiet, sum))
            continue;
        for (int r = 0; r < ranks; r++) {
            fprintf(stderr, "-- rank %d stands at step %d, %.0f s without one by any rank\n", r,
                    atomic_load(&step[(size_t)r * stride]), quiet.s);
            if (!over[r])
                where_threads(pid[r]);
        }
    }
    return ok;
}

/* ---- ranks that are threads of this process ---- */

typedef struct where_watch {
    pthread_t thread;
    _Atomic int *step; /* [ranks], `stride` apart */
    size_t stride;
    int ranks;
    bool runs;
    atomic_bool end;
} where_watch;

static inline void *where_watching(void *ctx) {
    where_watch *w = ctx;
    where_quiet quiet = {.seen = -1};
    while (!atomic_load(&w->end)) {
        int sum = 0;
        for (int r = 0; r < w->ranks; r++)
            sum += atomic_load(&w->step[(size_t)r * w->stride]);
        if (!where_now(&quiet, sum))
            continue;
        for (int r = 0; r < w->ranks; r++)
            fprintf(stderr, "-- rank %d stands at step %d, %.0f s without one by any rank\n", r,
                    atomic_load(&w->step[(size_t)r * w->stride]), quiet.s);
        where_threads(getpid());
    }
    return NULL;
}

/* Around the ranks' threads. */
static inline void where_watch_begin(where_watch *w, int ranks, _Atomic int *step, size_t stride) {
    *w = (where_watch){.ranks = ranks, .step = step, .stride = stride};
    where_begin();
    w->runs = where_limit() > 0 && pthread_create(&w->thread, NULL, where_watching, w) == 0;
}

static inline void where_watch_end(where_watch *w) {
    atomic_store(&w->end, true);
    if (w->runs)
        pthread_join(w->thread, NULL);
}

#endif
