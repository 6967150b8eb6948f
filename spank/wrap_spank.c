/* SPDX-License-Identifier: Apache-2.0
 *
 * wrap_spank.c - the seam's real side.  Slurm's symbols come from the process
 * that loads us.
 */
#define _GNU_SOURCE /* pipe2, program_invocation_short_name */
#include "wrap_spank.h"

#include "core/child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/slurm.h>

#define ENV_MAX ((size_t)4 << 20)
#define AFTER_KILL_MS 200 /* what is stuck in a file system does not end at once */

static int real_get_number(spank_t spank, spank_item_t item, uint32_t *value) {
    return spank_get_item(spank, item, value) == ESPANK_SUCCESS ? 0 : -1;
}

static int real_get_groups(spank_t spank, int room, gid_t *groups) {
    gid_t *list = NULL, primary;
    int got = 0, used = 0;
    if (room > 0 && spank_get_item(spank, S_JOB_GID, &primary) == ESPANK_SUCCESS)
        groups[used++] = primary;
    if (spank_get_item(spank, S_JOB_SUPPLEMENTARY_GIDS, &list, &got) != ESPANK_SUCCESS)
        got = 0;
    for (int i = 0; list != NULL && i < got && used < room; i++)
        groups[used++] = list[i];
    return used;
}

static int real_get_arguments(spank_t spank, int *count, char ***arguments) {
    int told = 0, got = 0;
    if (spank_get_item(spank, S_JOB_ARGV, &told, arguments) != ESPANK_SUCCESS || *arguments == NULL)
        return -1;
    /* For a step with --container Slurm 22.05 puts its own, shorter vector there and leaves
     * the count as it was. */
    while (got < told && (*arguments)[got] != NULL)
        got++;
    *count = got;
    return 0;
}

static char *real_task_getenv(spank_t spank, const char *name) {
    for (size_t room = 1024; room <= ENV_MAX; room *= 4) {
        char *value = malloc(room);
        if (value == NULL)
            return NULL;
        spank_err_t got = spank_getenv(spank, name, value, (int)room);
        if (got == ESPANK_SUCCESS)
            return value;
        free(value);
        if (got != ESPANK_NOSPACE)
            return NULL;
    }
    return NULL;
}

static int real_task_setenv(spank_t spank, const char *name, const char *value) {
    return spank_setenv(spank, name, value, 1) == ESPANK_SUCCESS ? 0 : -1;
}

static int real_task_unsetenv(spank_t spank, const char *name) {
    return spank_unsetenv(spank, name) == ESPANK_SUCCESS ? 0 : -1;
}

static void real_control_unsetenv(spank_t spank, const char *name) {
    (void)spank_job_control_unsetenv(spank, name);
}

static const char *real_own_getenv(const char *name) { return getenv(name); }
static int real_own_setenv(const char *name, const char *value) { return setenv(name, value, 1); }
static int real_own_unsetenv(const char *name) { return unsetenv(name); }

static const char *real_own_program(void) { return program_invocation_short_name; }

static int real_own_groups(int room, gid_t *groups) {
    int got = room > 1 ? getgroups(room - 1, groups) : 0;
    got = got > 0 ? got : 0;
    if (got < room)
        groups[got++] = getegid();
    return got;
}

/* slurmstepd may lack it; srun has it. */
#pragma weak slurm_load_node
#pragma weak slurm_free_node_info_msg

static int real_each_node(void (*visit)(void *context, const char *node, const char *gres),
                          void *context) {
    node_info_msg_t *nodes = NULL;
    if (slurm_load_node == NULL || slurm_load_node(0, &nodes, SHOW_ALL) != SLURM_SUCCESS)
        return -1;
    for (uint32_t i = 0; i < nodes->record_count; i++)
        if (nodes->node_array[i].name != NULL)
            visit(context, nodes->node_array[i].name, nodes->node_array[i].gres);
    slurm_free_node_info_msg(nodes);
    return 0;
}

static void real_log_info(const char *line) { slurm_info("%s", line); }
static void real_log_error(const char *line) { slurm_error("%s", line); }

static void real_task_say(const char *line) {
    char text[2 * EPO_ERROR_MAX + 1];
    size_t length = strnlen(line, sizeof text - 1);
    memcpy(text, line, length);
    text[length++] = '\n';
    for (size_t done = 0; done < length;) {
        ssize_t wrote = write(STDERR_FILENO, text + done, length - done);
        if (wrote < 0 && errno != EINTR)
            return;
        done += wrote > 0 ? (size_t)wrote : 0;
    }
}

/* Waits for a child, at most `timeout_ms`, then kills it.  One that is stuck in a file system
 * does not end by that, and is left behind. */
static int wait_child(pid_t child, int timeout_ms) {
    int status = 0;
    if (epo_child_ended(child, epo_child_clock() + timeout_ms, &status))
        return status != -1 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    kill(child, SIGKILL);
    (void)epo_child_ended(child, epo_child_clock() + AFTER_KILL_MS, &status);
    return -1;
}

/* Starts a program with nothing to read, and its output into `errors` or nowhere. */
static int spawn(char *const arguments[], char *const environment[], int errors, pid_t *child) {
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_t actions;
    sigset_t none;
    if (posix_spawnattr_init(&attributes) != 0)
        return -1;
    if (posix_spawn_file_actions_init(&actions) != 0) {
        posix_spawnattr_destroy(&attributes);
        return -1;
    }
    sigemptyset(&none);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    int failed =
        posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0) != 0 ||
        posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0) != 0 ||
        (errors >= 0
             ? posix_spawn_file_actions_adddup2(&actions, errors, 2)
             : posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0)) != 0 ||
        posix_spawn(child, arguments[0], &actions, &attributes, arguments, environment) != 0;
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    return failed ? -1 : 0;
}

static int real_run(char *const arguments[], char *const environment[], int timeout_ms, char *said,
                    size_t room) {
    int pipes[2] = {-1, -1};
    pid_t child;
    if (said != NULL && pipe2(pipes, O_CLOEXEC | O_NONBLOCK) != 0)
        return -1;
    int status =
        spawn(arguments, environment, pipes[1], &child) != 0 ? -1 : wait_child(child, timeout_ms);
    if (said != NULL) {
        ssize_t got = read(pipes[0], said, room - 1);
        said[got > 0 ? got : 0] = '\0';
        close(pipes[0]);
        close(pipes[1]);
    }
    return status;
}

static void real_pause(int ms) {
    struct timespec left = {ms / 1000, ms % 1000 * 1000000L};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

static void real_exit_submission(int status) { exit(status); }
static void real_exit_task(int status) { _exit(status); }

const struct wrap_spank wrap_spank_real = {
    .context = spank_context,
    .option_register = spank_option_register,
    .get_number = real_get_number,
    .get_groups = real_get_groups,
    .get_arguments = real_get_arguments,
    .task_getenv = real_task_getenv,
    .task_setenv = real_task_setenv,
    .task_unsetenv = real_task_unsetenv,
    .control_unsetenv = real_control_unsetenv,
    .own_getenv = real_own_getenv,
    .own_setenv = real_own_setenv,
    .own_unsetenv = real_own_unsetenv,
    .own_program = real_own_program,
    .own_user = geteuid,
    .own_groups = real_own_groups,
    .each_node = real_each_node,
    .log_info = real_log_info,
    .log_error = real_log_error,
    .task_say = real_task_say,
    .run = real_run,
    .pause = real_pause,
    .probe = epo_probe_run,
    .exit_submission = real_exit_submission,
    .exit_task = real_exit_task,
};
