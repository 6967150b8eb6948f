/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "measure/launch.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/status.h"

#define GRACE_MS 2000 /* from the first failure to the end of the rest */

static const char *const rank_names[] = {"RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK",
                                         "SLURM_PROCID"};
static const char *const size_names[] = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE",
                                         "PMI_SIZE",   "SLURM_STEP_NUM_TASKS",
                                         "LOCAL_RANK", "SLURM_NTASKS"};
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

int launch_is_other(void) {
    for (size_t i = 0; i < COUNT(rank_names); i++) {
        const char *text = getenv(rank_names[i]);
        if (text != NULL && *text != '\0')
            return strspn(text, "0123456789") == strlen(text) && strspn(text, "0") != strlen(text);
    }
    return 0;
}

static bool begins_with(const char *text, const char *name) {
    size_t n = strlen(name);
    return strncmp(text, name, n) == 0 && (text[n] == ':' || text[n] == ' ');
}

int launch_names_rank(const char *text) {
    for (size_t i = 0; i < COUNT(rank_names); i++)
        if (begins_with(text, rank_names[i]))
            return 1;
    for (size_t i = 0; i < COUNT(size_names); i++)
        if (begins_with(text, size_names[i]))
            return 1;
    return 0;
}

/* A port that is free now; it only makes this launch's name unique. */
static int free_port(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int port = 0, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&at, size) == 0 &&
        getsockname(fd, (struct sockaddr *)&at, &size) == 0)
        port = ntohs(at.sin_port);
    if (fd >= 0)
        close(fd);
    return port != 0 ? port : 1024 + (int)(getpid() % 60000);
}

static void set_number(const char *name, int value) {
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

static void become(int rank, int ranks, pid_t parent, const sigset_t *before) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) /* it ended before we could ask */
        _exit(1);
    sigprocmask(SIG_SETMASK, before, NULL);
    set_number("RANK", rank);
    set_number("LOCAL_RANK", rank);
    set_number("WORLD_SIZE", ranks);
    set_number("LOCAL_WORLD_SIZE", ranks);
}

static void signal_all(const pid_t *pid, int ranks, int number) {
    for (int r = 0; r < ranks; r++)
        if (pid[r] > 0)
            kill(pid[r], number);
}

static int status_of(int how) { return WIFSIGNALED(how) ? 128 + WTERMSIG(how) : WEXITSTATUS(how); }

/* Takes what has ended off the list; the number still running.  *first becomes the
 * status of the first failure.  A signal that is not ours outranks an earlier exit:
 * ranks that miss a killed one end by themselves, and may be quicker than the
 * kernel is with the killed one's threads. */
static int reap(const char *who, pid_t *pid, int ranks, bool ours, int *first) {
    int running = 0;
    for (int r = 0; r < ranks; r++) {
        int how;
        if (pid[r] > 0 && waitpid(pid[r], &how, WNOHANG) == pid[r]) {
            pid[r] = 0;
            if (WIFSIGNALED(how) && !ours && *first < 128)
                fprintf(stderr, "%s: rank %d was ended by signal %d (%s)\n", who, r, WTERMSIG(how),
                        strsignal(WTERMSIG(how)));
            if (*first == 0 || (WIFSIGNALED(how) && !ours && *first < 128))
                *first = status_of(how);
        }
        running += pid[r] > 0;
    }
    return running;
}

/* Waits for all; after the first failure for GRACE_MS at most. */
static int supervise(const char *who, pid_t *pid, int ranks, const sigset_t *watched) {
    const struct timespec tick = {0, 50 * 1000 * 1000};
    int first = 0, left_ms = GRACE_MS;
    bool ours = false; /* we have sent a signal ourselves */
    while (reap(who, pid, ranks, ours, &first) > 0) {
        int number = sigtimedwait(watched, NULL, &tick);
        if (number == SIGINT || number == SIGTERM || number == SIGHUP) {
            signal_all(pid, ranks, number);
            ours = true;
            first = first != 0 ? first : 128 + number;
        }
        if (first != 0 && number != SIGCHLD && (left_ms -= 50) <= 0) {
            signal_all(pid, ranks, SIGKILL);
            ours = true;
        }
    }
    return first;
}

int launch_ranks(const char *who, int ranks, int (*body)(void *ctx), void *ctx) {
    sigset_t watched, before;
    pid_t parent = getpid(), *pid = calloc((size_t)ranks, sizeof *pid);
    int failed = 0;
    if (pid == NULL) {
        epo_fail(EPO_E_NOMEM, "no memory for %d ranks", ranks);
        return 1;
    }
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigaddset(&watched, SIGINT);
    sigaddset(&watched, SIGTERM);
    sigaddset(&watched, SIGHUP);
    sigprocmask(SIG_BLOCK, &watched, &before);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    set_number("MASTER_PORT", free_port());
    for (int r = 0; r < ranks && failed == 0; r++) {
        pid[r] = fork();
        if (pid[r] == 0) {
            become(r, ranks, parent, &before);
            free(pid);
            int status = body(ctx);
            fflush(NULL);
            exit(status);
        }
        if (pid[r] < 0)
            failed = errno;
    }
    if (failed != 0)
        signal_all(pid, ranks, SIGKILL);
    int status = supervise(who, pid, ranks, &watched);
    sigprocmask(SIG_SETMASK, &before, NULL);
    free(pid);
    if (failed == 0)
        return status;
    epo_fail(EPO_E_SYSTEM, "%d ranks cannot be started: %s", ranks, strerror(failed));
    return 1;
}
