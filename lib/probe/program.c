/* SPDX-License-Identifier: Apache-2.0
 *
 * What kind of program a task's words start, by exact base names.
 */
#include "probe/files.h"
#include "probe/packages.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool is_one_of(const char *base, const char *const *names) {
    for (; *names != NULL; names++)
        if (strcmp(base, *names) == 0)
            return true;
    return false;
}

static const char *const containers[] = {
    "apptainer", "singularity", "docker",  "podman", "enroot",       "shifter", "ch-run",
    "udocker",   "sarus",       "nerdctl", "bwrap",  "charliecloud", NULL};
static const char *const shells[] = {"sh",   "bash", "dash", "zsh",     "ksh",  "csh",
                                     "tcsh", "fish", "ash",  "busybox", "srun", NULL};
static const char *const launchers[] = {"torchrun", "accelerate", "deepspeed",
                                        "uv",       "ipython",    NULL};
/* They start the program behind their own options. */
static const char *const wrappers[] = {
    "env",    "numactl",  "nsys",       "ncu",    "nice",    "time",   "taskset",
    "stdbuf", "timeout",  "setsid",     "ionice", "nohup",   "strace", "ltrace",
    "perf",   "valgrind", "ep-overlap", "mpirun", "mpiexec", "prun",   NULL};

bool probe_is_python(const char *base) {
    if (strncmp(base, "python", 6) != 0)
        return false;
    for (base += 6; *base != '\0'; base++)
        if (!isdigit((unsigned char)*base) && *base != '.')
            return false;
    return true;
}

bool probe_find_in_path(const epo_probe_task *task, const char *name, char path[PROBE_PATH]) {
    const char *search = epo_probe_variable(task, "PATH");
    if (strchr(name, '/') != NULL)
        return snprintf(path, PROBE_PATH, "%s", name) < PROBE_PATH && access(path, X_OK) == 0;
    while (search != NULL && *search != '\0') {
        char folder[PROBE_PATH];
        size_t length = strcspn(search, ":");
        if (length > 0 && length < sizeof folder) {
            memcpy(folder, search, length);
            folder[length] = '\0';
            if (probe_join(path, folder, name) && access(path, X_OK) == 0 && probe_is_file(path))
                return true;
        }
        search += length;
        search += *search == ':';
    }
    return false;
}

bool probe_read_shebang(epo_probe_task *task, const char *path, char *interpreter, size_t room) {
    char *head = probe_read(task, path, 256);
    bool is_script = head != NULL && strncmp(head, "#!", 2) == 0;
    if (is_script) {
        char *rest = NULL;
        head[strcspn(head, "\n")] = '\0';
        char *word = strtok_r(head + 2, " \t", &rest);
        if (word != NULL && strcmp(probe_base(word), "env") == 0)
            do
                word = strtok_r(NULL, " \t", &rest);
            while (word != NULL && (word[0] == '-' || strchr(word, '=') != NULL));
        snprintf(interpreter, room, "%s", word != NULL ? word : "");
    }
    free(head);
    return is_script;
}

static epo_probe_program kind_of_file(epo_probe_task *task, const char *word) {
    char path[PROBE_PATH], interpreter[256];
    if (!probe_find_in_path(task, word, path))
        return EPO_TASK_SHELL; /* cannot be told: as good as anything */
    if (!probe_read_shebang(task, path, interpreter, sizeof interpreter))
        return EPO_TASK_COMPILED;
    return probe_is_python(probe_base(interpreter)) ? EPO_TASK_PYTHON : EPO_TASK_SHELL;
}

epo_probe_program epo_probe_program_find(epo_probe_task *task, int *word) {
    bool wrapped = false;
    *word = 0;
    if (task->argument_count == 0)
        return EPO_TASK_NOT_TOLD;
    for (int i = 0; i < task->argument_count; i++) {
        const char *base = probe_base(task->arguments[i]);
        *word = i;
        if (is_one_of(base, containers))
            return EPO_TASK_CONTAINER;
        if (probe_is_python(base) || is_one_of(base, launchers))
            return EPO_TASK_PYTHON;
        if (is_one_of(base, shells))
            return EPO_TASK_SHELL;
        if (is_one_of(base, wrappers))
            wrapped = true;
        else if (!wrapped)
            return kind_of_file(task, task->arguments[i]);
    }
    *word = 0;
    return EPO_TASK_SHELL; /* behind a wrapper stands something that has no known name */
}
