/* SPDX-License-Identifier: Apache-2.0
 *
 * host_processes.h - forks ranks of the host backend and collects what each saw.
 */
#ifndef EPO_TESTS_HOST_PROCESSES_H
#define EPO_TESTS_HOST_PROCESSES_H

#include <dirent.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/backend.h"
#include "core/status.h"

#define PROC_MAX 8

/* One process's part, in memory that all share. */
typedef struct proc {
    epo_backend_config config;
    int failures; /* of EXPECT */
    epo_status status;
    char text[EPO_ERROR_MAX];
    pid_t pid;
    volatile int mark; /* for tests that act at a moment */
} proc;

typedef struct procs {
    int n;
    proc p[PROC_MAX];
    void (*fn)(struct procs *all, proc *me);
    void (*parent)(struct procs *all); /* runs after the forks; may be NULL */
    _Alignas(64) unsigned char shared[4096];
} procs;

#define EXPECT(p, cond)                                                                            \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            (p)->failures++;                                                                       \
            fprintf(stderr, "%s:%d: rank %d: %s [%s]\n", __FILE__, __LINE__, (p)->config.rank,     \
                    #cond, epo_fail_text());                                                       \
        }                                                                                          \
    } while (0)

/* Ranks 0..n-1 of n; a test changes what it wants before procs_run. */
static inline procs *procs_new(int n, double timeout_s, void (*fn)(procs *all, proc *me)) {
    procs *all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED)
        abort();
    all->n = n;
    all->fn = fn;
    for (int i = 0; i < n; i++)
        all->p[i].config =
            (epo_backend_config){.rank = i, .ranks = n, .timeout_s = timeout_s, .warn_s = 1000.0};
    return all;
}

static inline void proc_note(proc *me, epo_status status) {
    me->status = status;
    snprintf(me->text, sizeof me->text, "%s", epo_fail_text());
}

/* Forks, waits for all; true if every process returned from its function. */
static inline int procs_run(procs *all) {
    int good = 1;
    fflush(NULL);
    for (int i = 0; i < all->n; i++) {
        pid_t pid = fork();
        if (pid < 0)
            abort();
        if (pid == 0) {
            alarm(60); /* a hang is a failure, not a hang of the tests */
            all->p[i].pid = getpid();
            all->fn(all, &all->p[i]);
            exit(0); /* not _exit: counts of lines that ran are written */
        }
        all->p[i].pid = pid;
    }
    if (all->parent != NULL)
        all->parent(all);
    for (int i = 0; i < all->n; i++) {
        int status;
        if (waitpid(all->p[i].pid, &status, 0) != all->p[i].pid || !WIFEXITED(status) ||
            WEXITSTATUS(status) != 0)
            good = 0;
    }
    return good;
}

static inline int procs_failures(const procs *all) {
    int sum = 0;
    for (int i = 0; i < all->n; i++)
        sum += all->p[i].failures;
    return sum;
}

static inline void procs_free(procs *all) { munmap(all, sizeof *all); }

/* Entries of a folder that begin so; for "" with "." and "..", and the listing's own descriptor. */
static inline int folder_count(const char *path, const char *head) {
    DIR *d = opendir(path);
    int n = 0;
    for (const struct dirent *e; d != NULL && (e = readdir(d)) != NULL;)
        n += strncmp(e->d_name, head, strlen(head)) == 0;
    if (d != NULL)
        closedir(d);
    return n;
}

#endif
