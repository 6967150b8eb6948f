/* SPDX-License-Identifier: Apache-2.0
 *
 * Which plugin Slurm loads here, for which Slurm it was built, and which Slurm is here.
 */
#define _GNU_SOURCE /* pipe2 */
#include "check.h"

#include "core/child.h"
#include "probe/elf.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define COMMAND_MS 5000
#define NESTING 4        /* of include lines */
#define LINES_MAX 100000 /* of a file; no Slurm has that many */

extern char **environ;

bool check_own_file(const char *relative, const char *compiled, char path[CHECK_PATH]) {
    char own[CHECK_PATH];
    ssize_t length = readlink("/proc/self/exe", own, sizeof own - 1);
    own[length > 0 ? length : 0] = '\0';
    probe_up(own); /* bin */
    probe_up(own); /* the prefix */
    if (length > 0 && probe_join(path, own, relative) && access(path, R_OK) == 0)
        return true;
    return snprintf(path, CHECK_PATH, "%s", compiled) < CHECK_PATH && access(path, R_OK) == 0;
}

/* A configuration file of Slurm's, as a pipe or a device never is. */
static FILE *open_lines(const char *path) {
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    FILE *file = fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode) ? fdopen(fd, "r") : NULL;
    if (file == NULL && fd >= 0)
        close(fd);
    return file;
}

/* "optional /path/ep_overlap.so conf=/path": when the line is about us, it counts more than one
 * before. */
static void read_line(char *line, const char *path, check_versions *v) {
    char *rest = NULL;
    strtok_r(line, " \t\r\n", &rest); /* optional or required */
    const char *plugin = strtok_r(NULL, " \t\r\n", &rest);
    if (plugin == NULL || strcmp(probe_base(plugin), "ep_overlap.so") != 0)
        return;
    v->listed++;
    v->config[0] = v->argument[0] = '\0';
    snprintf(v->plugstack, sizeof v->plugstack, "%s", path);
    snprintf(v->plugin, sizeof v->plugin, "%s", plugin[0] == '/' ? plugin : "");
    for (char *word; (word = strtok_r(NULL, " \t\r\n", &rest)) != NULL;)
        if (strncmp(word, "conf=", 5) == 0)
            snprintf(v->config, sizeof v->config, "%s", word + 5);
        else if (v->argument[0] == '\0')
            snprintf(v->argument, sizeof v->argument, "%s", word);
}

static void read_plugstack(const char *path, int depth, check_versions *v);

static void read_included(const char *folder, const char *pattern, int depth, check_versions *v) {
    char full[CHECK_PATH];
    glob_t found;
    if (depth == NESTING)
        return;
    if (pattern[0] == '/')
        snprintf(full, sizeof full, "%s", pattern);
    else if (!probe_join(full, folder, pattern))
        return;
    if (glob(full, 0, NULL, &found) != 0)
        return;
    for (size_t i = 0; i < found.gl_pathc; i++)
        read_plugstack(found.gl_pathv[i], depth + 1, v);
    globfree(&found);
}

static void read_plugstack(const char *path, int depth, check_versions *v) {
    char line[CHECK_PATH], folder[CHECK_PATH];
    FILE *file = open_lines(path);
    if (file == NULL)
        return;
    snprintf(folder, sizeof folder, "%s", path);
    probe_up(folder);
    for (int read = 0; read < LINES_MAX && fgets(line, sizeof line, file) != NULL; read++) {
        line[strcspn(line, "#")] = '\0'; /* a comment, behind words too */
        char *at = line + strspn(line, " \t");
        if (strncmp(at, "include", 7) == 0 && (at[7] == ' ' || at[7] == '\t')) {
            at += 8 + strspn(at + 8, " \t");
            at[strcspn(at, " \t\r\n")] = '\0';
            read_included(folder, at, depth, v);
        } else {
            read_line(at, path, v);
        }
    }
    fclose(file);
}

/* slurm.conf's own word for it: PlugStackConfig=/path. */
static bool read_slurm_conf(const char *path, char plugstack[CHECK_PATH]) {
    static const char key[] = "PlugStackConfig";
    char line[CHECK_PATH];
    FILE *file = open_lines(path);
    bool found = false;
    for (int read = 0; file != NULL && read < LINES_MAX && fgets(line, sizeof line, file) != NULL;
         read++) {
        const char *at = line + strspn(line, " \t");
        if (strncasecmp(at, key, sizeof key - 1) != 0)
            continue;
        at += sizeof key - 1 + strspn(at + sizeof key - 1, " \t=");
        found = at[0] == '/';
        snprintf(plugstack, CHECK_PATH, "%.*s", (int)strcspn(at, " \t\r\n"), at);
    }
    if (file != NULL)
        fclose(file);
    return found;
}

/* The plugstack.conf of a folder with Slurm's configuration; false: it has none. */
static bool read_folder(const char *folder, check_versions *v) {
    char conf[CHECK_PATH], path[CHECK_PATH];
    if (!(probe_join(conf, folder, "slurm.conf") && read_slurm_conf(conf, path)) &&
        !probe_join(path, folder, "plugstack.conf"))
        return false;
    read_plugstack(path, 0, v);
    return access(path, R_OK) == 0;
}

static void find_plugstack(check_versions *v) {
    static const char *const folders[] = {"/etc/slurm",
                                          "/etc/slurm-llnl",
                                          "/usr/local/etc",
                                          "/run/slurm/conf",
                                          "/var/spool/slurmd/conf-cache",
                                          NULL};
    char folder[CHECK_PATH];
    const char *conf = getenv("SLURM_CONF");
    if (conf != NULL && conf[0] == '/') {
        snprintf(folder, sizeof folder, "%s", conf);
        probe_up(folder);
        if (read_folder(folder, v))
            return;
    }
    for (const char *const *f = folders; *f != NULL && v->listed == 0; f++)
        (void)read_folder(*f, v);
}

/* The first line that the command prints; false when it fails or takes too long. */
static bool ask(const char *program, char *text, size_t room) {
    char *arguments[] = {(char *)(uintptr_t)program, (char *)(uintptr_t) "-V", NULL};
    posix_spawn_file_actions_t actions;
    int ends[2], status = -1;
    pid_t child;
    if (pipe2(ends, O_CLOEXEC) != 0)
        return false;
    if (posix_spawn_file_actions_init(&actions) != 0) {
        close(ends[0]);
        close(ends[1]);
        return false;
    }
    int failed = posix_spawn_file_actions_adddup2(&actions, ends[1], 1) != 0 ||
                 posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0) != 0 ||
                 posix_spawnp(&child, program, &actions, NULL, arguments, environ) != 0;
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    struct pollfd wait = {.fd = ends[0], .events = POLLIN};
    ssize_t got = 0;
    if (!failed && poll(&wait, 1, COMMAND_MS) == 1)
        got = read(ends[0], text, room - 1);
    close(ends[0]);
    text[got > 0 ? got : 0] = '\0';
    text[strcspn(text, "\n")] = '\0';
    if (failed)
        return false;
    if (got <= 0)
        kill(child, SIGKILL);
    bool ended = epo_child_ended(child, epo_child_clock() + COMMAND_MS, &status);
    if (!ended)
        kill(child, SIGKILL);
    return got > 0 && ended && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void check_versions_find(check_versions *v) {
    static const char *const commands[] = {"slurmd", "/usr/sbin/slurmd", "scontrol", "srun", NULL};
    char answer[128];
    uint32_t number = 0;
    find_plugstack(v);
    if (v->plugin[0] == '\0' && !check_own_file("lib/slurm/ep_overlap.so", EP_PLUGIN, v->plugin))
        v->plugin[0] = '\0';
    if (v->plugin[0] != '\0' && probe_elf_number(v->plugin, "plugin_version", &number))
        snprintf(v->built_for, sizeof v->built_for, "%u.%02u.%u", number >> 16 & 0xff,
                 number >> 8 & 0xff, number & 0xff);
    for (const char *const *c = commands; *c != NULL && v->slurm[0] == '\0'; c++) {
        const char *digits = ask(*c, answer, sizeof answer) ? strpbrk(answer, "0123456789") : NULL;
        if (digits != NULL)
            snprintf(v->slurm, sizeof v->slurm, "%.60s", digits);
    }
    unsigned here[2], built[2];
    v->mismatch = sscanf(v->slurm, "%3u.%3u", &here[0], &here[1]) == 2 &&
                  sscanf(v->built_for, "%3u.%3u", &built[0], &built[1]) == 2 &&
                  (here[0] != built[0] || here[1] != built[1]);
}

static bool has_engine(const char *folder, const char *name) {
    char path[CHECK_PATH];
    return probe_join(path, folder, name) && access(path, R_OK) == 0;
}

void check_engines_find(check_versions *v, const char *library) {
    char folder[CHECK_PATH];
    if (library != NULL) {
        snprintf(folder, sizeof folder, "%s", library);
        probe_up(folder);
        if (!probe_join(v->engines, folder, "ep-overlap"))
            return;
    } else if (!check_own_file("lib/ep-overlap", EP_ENGINES, v->engines))
        snprintf(v->engines, sizeof v->engines, "%s", EP_ENGINES);
    v->host = has_engine(v->engines, "engine_host.so");
    v->cuda = has_engine(v->engines, "engine_cuda.so");
}
