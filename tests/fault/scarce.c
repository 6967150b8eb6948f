/* SPDX-License-Identifier: Apache-2.0
 *
 * scarce.c - a system that gives nothing: each call of one kind that the engine makes fails
 * in turn, once, on one rank.
 *
 *   scarce [-e EVERY] [-f FIRST] [KIND]     memory, descriptors, sockets, files, threads; all
 *
 * Whatever call it is: no rank hangs or crashes; either the job runs all the same, or the
 * rank says what it lacks and the others name that rank, all with status 1.  The linker
 * puts the functions below in front of those that the engine calls (--wrap).
 */
#include "config.h"

#include "fault.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

typedef enum scarcity { MEMORY, DESCRIPTORS, SOCKETS, FILES, THREADS, SCARCITIES } scarcity;
static const char *const names[] = {"memory", "descriptors", "sockets", "files", "threads"};

/* Shared with the rank that it is about. */
typedef struct plot {
    _Atomic int armed;
    _Atomic long calls, fails_at; /* -1: none */
    scarcity kind;
    int rank, error;
    char what[24];
} plot;
static plot *the_plot;

/* Is it this call's turn to fail? */
static bool fails(scarcity kind, const char *what, int error) {
    plot *p = the_plot;
    if (p == NULL || atomic_load(&p->armed) != (int)getpid() || p->kind != kind)
        return false;
    if (atomic_fetch_add(&p->calls, 1) != atomic_load(&p->fails_at))
        return false;
    snprintf(p->what, sizeof p->what, "%s", what);
    errno = error;
    return true;
}

#define WRAP(kind, error, none, type, name, parameters, arguments)                                 \
    type __real_##name parameters;                                                                 \
    type __wrap_##name parameters;                                                                 \
    type __wrap_##name parameters {                                                                \
        return fails(kind, #name, error) ? (none) : __real_##name arguments;                       \
    }

WRAP(MEMORY, ENOMEM, NULL, void *, malloc, (size_t n), (n))
WRAP(MEMORY, ENOMEM, NULL, void *, calloc, (size_t n, size_t m), (n, m))
WRAP(MEMORY, ENOMEM, NULL, void *, realloc, (void *p, size_t n), (p, n))
WRAP(MEMORY, ENOMEM, ENOMEM, int, posix_memalign, (void **p, size_t a, size_t n), (p, a, n))
WRAP(MEMORY, ENOMEM, MAP_FAILED, void *, mmap, (void *p, size_t n, int a, int f, int d, off_t o),
     (p, n, a, f, d, o))
WRAP(DESCRIPTORS, EMFILE, -1, int, memfd_create, (const char *t, unsigned f), (t, f))
WRAP(DESCRIPTORS, EMFILE, -1, int, shm_open, (const char *t, int f, mode_t m), (t, f, m))
WRAP(DESCRIPTORS, EMFILE, -1, int, socket, (int d, int t, int p), (d, t, p))
WRAP(DESCRIPTORS, EMFILE, -1, int, accept4, (int d, struct sockaddr *a, socklen_t *n, int f),
     (d, a, n, f))
WRAP(DESCRIPTORS, EMFILE, NULL, FILE *, fopen, (const char *t, const char *m), (t, m))
WRAP(SOCKETS, EADDRNOTAVAIL, -1, int, bind, (int d, const struct sockaddr *a, socklen_t n),
     (d, a, n))
WRAP(SOCKETS, ENOBUFS, -1, int, listen, (int d, int n), (d, n))
WRAP(SOCKETS, ECONNREFUSED, -1, int, connect, (int d, const struct sockaddr *a, socklen_t n),
     (d, a, n))
WRAP(SOCKETS, EPIPE, -1, ssize_t, sendmsg, (int d, const struct msghdr *m, int f), (d, m, f))
WRAP(SOCKETS, ECONNRESET, -1, ssize_t, recvmsg, (int d, struct msghdr *m, int f), (d, m, f))
WRAP(SOCKETS, EINVAL, -1, int, getsockopt, (int d, int l, int o, void *v, socklen_t *n),
     (d, l, o, v, n))
WRAP(FILES, ENOSPC, -1, int, ftruncate, (int d, off_t n), (d, n))
WRAP(FILES, EPERM, -1, int, fchmod, (int d, mode_t m), (d, m))
WRAP(FILES, EIO, -1, int, fstat, (int d, struct stat *s), (d, s))
WRAP(FILES, ENOSYS, -1, ssize_t, getrandom, (void *p, size_t n, unsigned f), (p, n, f))
WRAP(THREADS, EAGAIN, EAGAIN, int, pthread_create,
     (pthread_t * t, const pthread_attr_t *a, void *(*fn)(void *), void *c), (t, a, fn, c))

static void arm(int rank) {
    if (rank == the_plot->rank)
        atomic_store(&the_plot->armed, (int)getpid());
    else if (rank < 0 && atomic_load(&the_plot->armed) == (int)getpid())
        atomic_store(&the_plot->armed, 0);
}

static const char *judge(const watch *w, bool *all_well) {
    *all_well = true;
    for (int r = 0; r < w->b->c.ranks; r++)
        *all_well = *all_well && w->exit[r] == 0;
    for (int r = 0; r < w->b->c.ranks && !*all_well; r++) {
        char line[TEXT], name[16];
        snprintf(name, sizeof name, "rank %d", the_plot->rank);
        judge_line_of(w, r, line, sizeof line);
        if (w->exit[r] != 1)
            return "a rank's status is not 1";
        if (line[0] == '\0')
            return "a rank has no line";
        /* A broken connection has two ends, and either may be the one that tells. */
        if (r != the_plot->rank && the_plot->kind != SOCKETS && strstr(line, name) == NULL)
            return "a line does not name the rank";
    }
    return NULL;
}

typedef struct tally {
    long calls, tried, survived, failed;
    int worst_ms;
} tally;

static void report(const watch *w, const char *wrong) {
    printf("# rank %d, %s, call %ld (%s): %s\n", the_plot->rank, names[the_plot->kind],
           atomic_load(&the_plot->fails_at), the_plot->what, wrong);
    for (int r = 0; r < w->b->c.ranks; r++) {
        char line[TEXT];
        judge_line_of(w, r, line, sizeof line);
        printf("#   status %d: %s\n", w->exit[r], line);
    }
}

static void run_one(const fault_case *c, long at, tally *t) {
    watch w;
    bool well = false;
    atomic_store(&the_plot->armed, 0);
    atomic_store(&the_plot->calls, 0);
    atomic_store(&the_plot->fails_at, at);
    const int64_t start = now_ns();
    const bool ended = watch_run(&w, c, arm);
    const int ms = (int)((now_ns() - start) / 1000000);
    const char *wrong = ended ? judge(&w, &well) : "did not end by itself";
    t->calls = atomic_load(&the_plot->calls);
    t->tried += at >= 0;
    t->survived += at >= 0 && well;
    t->failed += wrong != NULL;
    t->worst_ms = ms > t->worst_ms ? ms : t->worst_ms;
    if (wrong != NULL)
        report(&w, wrong);
    watch_end(&w);
}

/* Calls of the kind from the `first` on, or every `every`th of them. */
static long run_kind(const fault_case *c, scarcity kind, int rank, long first, long every) {
    tally t = {0, 0, 0, 0, 0};
    char left[80];
    the_plot->kind = kind;
    the_plot->rank = rank;
    run_one(c, -1, &t);
    const long calls = t.calls;
    for (long i = first; i < calls; i += every)
        run_one(c, i, &t);
    watch none = {.b = &(board){.c = *c}};
    const bool nothing = judge_left(&none, left, sizeof left);
    printf(
        "%s\tscarce\t%s, rank %d%s\t%s\t%d\t%s\t%ld of %ld calls failed in turn: %ld jobs ran all "
        "the same, %ld ended with the reason\n",
        device_name, names[kind], rank, c->plain ? ", plain" : "",
        t.failed == 0 && nothing ? "ok" : "FAIL", t.worst_ms, left, t.tried, calls, t.survived,
        t.tried - t.survived - t.failed);
    fflush(stdout);
    return t.failed + !nothing;
}

int main(int argc, char **argv) {
    fault_case c = {.ranks = 3, .groups = 1, .limit_s = 2};
    long every = 1, first = 0, failed = 0;
    int option;
    while ((option = getopt(argc, argv, "e:f:")) != -1) {
        if (option == 'f')
            first = strtol(optarg, NULL, 10);
        else
            every = option == 'e' ? strtol(optarg, NULL, 10) : 0;
    }
    if (every < 1 || first < 0) {
        fputs("usage: scarce [-e EVERY] [-f FIRST] [memory | descriptors | sockets | files | "
              "threads]\n",
              stderr);
        return 2;
    }
    plot *p = mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return 2;
    the_plot = p;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    c.apart = stand_apart();
    for (int k = 0; k < SCARCITIES; k++)
        if (optind == argc || strcmp(argv[optind], names[k]) == 0)
            for (int i = 0; i < (k == MEMORY ? 4 : 2); i++) {
                c.plain = i >= 2;
                failed += run_kind(&c, (scarcity)k, i % 2, first, every);
            }
    return failed > 0;
}
