/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* pipe2 */
#include "core/probe_run.h"

#include "core/child.h"
#include "core/probe_record.h"
#include "core/sanitized.h"
#include "core/text.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PIPE_END 3        /* where the probe writes */
#define PROGRAM_END 4     /* its own file */
#define AFTER_KILL_MS 200 /* what is stuck in a file system does not end at once */

/* A sanitizer's shadow memory needs all of the address space. */
#if EPO_SANITIZED
#define DATA_MAX RLIM_INFINITY
#else
#define DATA_MAX ((rlim_t)1 << 31)
#endif

const char *const epo_probe_variables[] = {"PATH",
                                           "LD_LIBRARY_PATH",
                                           "LD_PRELOAD",
                                           "HOME",
                                           "PYTHONPATH",
                                           "PYTHONHOME",
                                           "PYTHONNOUSERSITE",
                                           "CUDA_HOME",
                                           "CUDA_VISIBLE_DEVICES",
                                           "CUDA_DEVICE_ORDER",
                                           "SLURM_STEP_GPUS",
                                           "SLURM_JOB_GPUS",
                                           "SLURM_STEP_ID",
                                           "SLURM_STEP_TASKS_PER_NODE",
                                           "SLURM_GPUS_ON_NODE",
                                           "SLURMD_TRES_BIND",
                                           "APPTAINER_CONTAINER",
                                           "SINGULARITY_CONTAINER",
                                           NULL};

/* What the probe is started with, all made before the fork. */
struct start {
    char *environment[32], *arguments[EPO_PROBE_ARGUMENTS_MAX + 12];
    int variables, words;
    bool failed;
};

static void add(struct start *start, bool variable, const char *format, ...) EPO_PRINTF(3, 4);
static void add(struct start *start, bool variable, const char *format, ...) {
    char **list = variable ? start->environment : start->arguments;
    int *count = variable ? &start->variables : &start->words;
    size_t room = variable ? sizeof start->environment : sizeof start->arguments;
    va_list args;
    va_start(args, format);
    if (start->failed || (size_t)*count + 2 > room / sizeof *list ||
        vasprintf(&list[*count], format, args) < 0)
        start->failed = true;
    else
        list[++*count] = NULL;
    va_end(args);
}

static void add_variables(struct start *start, const struct epo_probe_request *request) {
    char left_out[512] = "";
    for (const char *const *name = epo_probe_variables; *name != NULL; name++) {
        const char *value = request->variable(request->context, *name);
        size_t used = strlen(left_out);
        if (value != NULL && strnlen(value, EPO_PROBE_TEXT_MAX) < EPO_PROBE_TEXT_MAX)
            add(start, true, EPO_PROBE_PREFIX "%s=%s", *name, value);
        else if (value != NULL)
            snprintf(left_out + used, sizeof left_out - used, "%s%s", used > 0 ? ":" : "", *name);
    }
    add(start, true, EPO_PROBE_LEFT_OUT "=%s", left_out);
    add(start, true, "LC_ALL=C");
    if (request->node != NULL && strnlen(request->node, 256) < 256)
        add(start, true, "SLURMD_NODENAME=%s", request->node);
}

static void add_arguments(struct start *start, const struct epo_probe_request *request) {
    add(start, false, "ep-overlap-probe");
    add(start, false, "--timeout-ms=%d", request->timeout_ms);
    if (request->nvml_path != NULL)
        add(start, false, "--nvml=%s", request->nvml_path);
    if (request->whole_node)
        add(start, false, "--whole-node");
    add(start, false, "--");
    for (int i = 0; i < request->argument_count && i < EPO_PROBE_ARGUMENTS_MAX; i++) {
        const char *word = request->arguments[i];
        bool fits = strnlen(word, EPO_PROBE_TEXT_MAX) < EPO_PROBE_TEXT_MAX;
        add(start, false, "%s", fits ? word : "?");
    }
}

static void free_start(struct start *start) {
    for (int i = 0; i < start->variables; i++)
        free(start->environment[i]);
    for (int i = 0; i < start->words; i++)
        free(start->arguments[i]);
}

static void limit(int what, rlim_t value) {
    struct rlimit now;
    if (getrlimit(what, &now) == 0) {
        now.rlim_cur = now.rlim_max = now.rlim_max < value ? now.rlim_max : value;
        setrlimit(what, &now);
    }
}

static void close_from(unsigned lowest) {
    struct rlimit files;
#ifdef SYS_close_range
    if (syscall(SYS_close_range, lowest, ~0u, 0u) == 0)
        return;
#endif
    unsigned end = getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < 65536
                       ? (unsigned)files.rlim_cur
                       : 65536;
    for (unsigned fd = lowest; fd < end; fd++)
        close((int)fd);
}

/* In the child, between fork and exec: nothing that takes a lock or memory. */
static void become_probe(const struct epo_probe_request *request, const struct start *start,
                         int pipe_end) {
    sigset_t none;
    struct sigaction usual = {.sa_handler = SIG_DFL};
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    for (int number = 1; number < 32; number++)
        sigaction(number, &usual, NULL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    /* Both out of the way first: they may stand where the others belong. */
    int out = fcntl(pipe_end, F_DUPFD, 16), program = fcntl(request->program, F_DUPFD, 16);
    int null = open("/dev/null", O_RDWR);
    if (out < 0 || program < 0 || null < 0)
        _exit(125);
    for (int fd = 0; fd < PIPE_END; fd++)
        if (dup2(null, fd) < 0)
            _exit(125);
    if (dup2(out, PIPE_END) < 0 || dup2(program, PROGRAM_END) < 0)
        _exit(125);
    close_from(PROGRAM_END + 1);
    fcntl(PROGRAM_END, F_SETFD, FD_CLOEXEC);
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_FSIZE, 0);
    limit(RLIMIT_NOFILE, 256);
    limit(RLIMIT_DATA, DATA_MAX);
    limit(RLIMIT_CPU, (rlim_t)request->timeout_ms / 1000 + 2);
    syscall(SYS_execveat, PROGRAM_END, "", start->arguments, start->environment, AT_EMPTY_PATH);
    if (errno == ENOSYS) /* a kernel before 3.19 */
        execve("/proc/self/fd/4", start->arguments, start->environment);
    _exit(126);
}

/* Bytes read until the end of the pipe; SIZE_MAX when the limit came before a record. */
static size_t read_record(int fd, struct epo_probe_record *record, int64_t limit_ms) {
    char *into = (char *)record, spare;
    size_t have = 0;
    for (;;) {
        int64_t left = limit_ms - epo_child_clock();
        struct pollfd wait = {.fd = fd, .events = POLLIN};
        if (left <= 0)
            return have == sizeof *record ? have : SIZE_MAX;
        int ready = poll(&wait, 1, left > 1000000 ? 1000000 : (int)left);
        if (ready <= 0)
            continue;
        bool full = have == sizeof *record;
        ssize_t got = full ? read(fd, &spare, 1) : read(fd, into + have, sizeof *record - have);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return have;
        have += (size_t)got;
        if (have > sizeof *record)
            return have;
    }
}

static epo_status judge(const struct epo_probe_request *request, size_t bytes, bool ended,
                        int status) {
    if (bytes == SIZE_MAX || !ended)
        return epo_fail(EPO_E_TIMEOUT,
                        "the probe did not end within %d ms (checks.timeout_ms) and was killed%s",
                        request->timeout_ms,
                        ended ? "" : "; it waits for a file system or driver and lives on");
    if (bytes == sizeof(struct epo_probe_record))
        return EPO_OK;
    if (status != -1 && WIFSIGNALED(status))
        return epo_fail(EPO_E_SYSTEM, "the probe was ended by signal %d (%s)", WTERMSIG(status),
                        strsignal(WTERMSIG(status)));
    if (status != -1 && WIFEXITED(status) && WEXITSTATUS(status) == 126)
        return epo_fail(EPO_E_SYSTEM, "the probe cannot be executed here; its file or the loader "
                                      "it needs is missing for the task");
    if (status != -1 && WIFEXITED(status) && WEXITSTATUS(status) != 0)
        return epo_fail(EPO_E_SYSTEM, "the probe ended with status %d", WEXITSTATUS(status));
    return epo_fail(EPO_E_ARG, "the probe answered %zu bytes, a record has %zu", bytes,
                    sizeof(struct epo_probe_record));
}

static epo_status run(const struct epo_probe_request *request, const struct start *start,
                      struct epo_probe_record *record) {
    int ends[2], status = -1;
    if (pipe2(ends, O_CLOEXEC) != 0)
        return epo_fail(EPO_E_SYSTEM, "no pipe for the probe: %s", strerror(errno));
    int64_t limit_ms = epo_child_clock() + request->timeout_ms;
    pid_t child = fork();
    if (child == 0)
        become_probe(request, start, ends[1]);
    int error = errno;
    close(ends[1]);
    if (child < 0) {
        close(ends[0]);
        return epo_fail(EPO_E_SYSTEM, "the probe cannot be started: %s", strerror(error));
    }
    setpgid(child, child); /* whoever of both is first */
    size_t bytes = read_record(ends[0], record, limit_ms);
    close(ends[0]);
    bool ended = bytes != SIZE_MAX && epo_child_ended(child, limit_ms, &status);
    /* Also what it left behind in its group. */
    kill(-child, SIGKILL);
    if (!ended) {
        ended = epo_child_ended(child, epo_child_clock() + AFTER_KILL_MS, &status);
        bytes = SIZE_MAX;
    }
    return judge(request, bytes, ended, status);
}

epo_status epo_probe_run(const struct epo_probe_request *request, epo_facts *facts) {
    struct start start = {.failed = false};
    struct epo_probe_record *record = calloc(1, sizeof *record);
    epo_status status = EPO_OK;
    add_variables(&start, request);
    add_arguments(&start, request);
    if (record == NULL || start.failed)
        status = epo_fail(EPO_E_NOMEM, "no memory to start the probe");
    if (status == EPO_OK)
        status = run(request, &start, record);
    if (status == EPO_OK)
        status = epo_probe_record_read(record, facts);
    free_start(&start);
    free(record);
    return status;
}
