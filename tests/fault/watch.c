/* SPDX-License-Identifier: Apache-2.0
 *
 * watch.c - starts the ranks of a job, waits for them, lets a slow victim go on, and ends
 * what does not end by itself.
 */
#include "config.h"

#include "fault.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif

enum { GRACE_MS = 4000, REACH_MS = 30000 };

int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static bool is_linked(const fault_case *c) {
    switch (c->phase) {
    case PHASE_DISPATCH:
    case PHASE_COMBINE:
    case PHASE_FORWARD_DISPATCH:
    case PHASE_FORWARD_COMBINE:
    case PHASE_BACKWARD_DISPATCH:
    case PHASE_BACKWARD_COMBINE: return c->kind != TWISTED && c->kind != NOTHING;
    default: return false;
    }
}

static void start_rank(watch *w, int rank, void (*ready)(int rank)) {
    w->err[rank] = memfd_create("stderr", MFD_CLOEXEC);
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0)
        abort();
    if (pid == 0) {
        dup2(w->err[rank], STDERR_FILENO);
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a judge that is ended leaves nobody */
        alarm(120);
        if (ready != NULL)
            ready(rank);
        const int status = job_run(w->b, rank);
        if (ready != NULL)
            ready(-1);
        exit(status);
    }
    w->b->rank[rank].pid = pid;
}

/* The next children's clocks, not this process's: "monotonic 36000 0" */
static void children_ahead(void) {
    FILE *f = unshare(CLONE_NEWTIME) == 0 ? fopen("/proc/self/timens_offsets", "we") : NULL;
    if (f == NULL || fputs("monotonic 36000 0\nboottime 36000 0\n", f) < 0 || fclose(f) != 0)
        puts("# left out: a time namespace is not allowed here");
}

static void reap(watch *w) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (int r = 0; r < w->b->c.ranks; r++)
            if (w->b->rank[r].pid == pid) {
                w->ended[r] = true;
                w->end_ns[r] = now_ns();
                w->exit[r] = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
            }
}

static bool all_ended(const watch *w, bool victim_too) {
    for (int r = 0; r < w->b->c.ranks; r++)
        if (!w->ended[r] && (victim_too || r != VICTIM))
            return false;
    return true;
}

static void end_all(const watch *w) {
    for (int r = 0; r < w->b->c.ranks; r++)
        if (!w->ended[r])
            kill(w->b->rank[r].pid, SIGKILL);
}

/* The victim goes on, or is not waited for. */
static void release_victim(watch *w, int64_t since_ns, bool *released) {
    const fault_case *c = &w->b->c;
    const double share = c->kind == SLOW ? 0.4 : 1.5;
    if (*released)
        return;
    if (c->kind == STOPPED && all_ended(w, false))
        kill(w->b->rank[VICTIM].pid, SIGKILL);
    else if ((c->kind == SLOW || c->kind == LATE) && (double)since_ns > share * c->limit_s * 1e9)
        kill(w->b->rank[VICTIM].pid, SIGCONT);
    else
        return;
    *released = true;
}

/* False: somebody had to be ended. */
static bool wait_all(watch *w) {
    const int64_t start = now_ns();
    const fault_case *c = &w->b->c;
    const int64_t grace = (int64_t)(3 * c->limit_s * 1e9) + INT64_C(1000000) * GRACE_MS;
    bool released = false, good = true;
    for (;;) {
        reap(w);
        if (all_ended(w, true))
            return good;
        const int64_t struck = atomic_load(&w->b->struck_ns), now = now_ns();
        if (struck != 0)
            release_victim(w, now - struck, &released);
        if (struck != 0 ? now - struck > grace : now - start > INT64_C(1000000) * REACH_MS) {
            good = false;
            end_all(w);
        }
        const struct timespec nap = {0, 1000000};
        nanosleep(&nap, NULL);
    }
}

static board *board_new(const fault_case *c) {
    board *b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b == MAP_FAILED)
        abort();
    b->c = *c;
    return b;
}

bool watch_run(watch *w, const fault_case *c, void (*ready)(int rank)) {
    char port[16];
    static int jobs;
    memset(w, 0, sizeof *w);
    w->b = board_new(c);
    snprintf(port, sizeof port, "%d", 1024 + (int)((getpid() * 16 + jobs++) % 60000));
    setenv("MASTER_PORT", port, 1); /* which launch this is */
    if (is_linked(c) && device_is_host())
        setenv("EP_OVERLAP_HOST_LINK", "1000,80000", 1);
    else
        unsetenv("EP_OVERLAP_HOST_LINK");
    w->start_ns = now_ns();
    for (int r = 0; r < c->ranks; r++)
        if (r != VICTIM)
            start_rank(w, r, ready);
    if (c->kind == TWISTED && c->twist == TWIST_CLOCK)
        children_ahead();
    start_rank(w, VICTIM, ready);
    return wait_all(w);
}

void watch_end(watch *w) {
    for (int r = 0; r < w->b->c.ranks; r++)
        close(w->err[r]);
    munmap(w->b, sizeof *w->b);
    w->b = NULL;
}
