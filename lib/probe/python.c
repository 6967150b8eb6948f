/* SPDX-License-Identifier: Apache-2.0
 *
 * Which Python a task runs, and where it looks for packages: by its files, as
 * CPython's own start does it (pyvenv.cfg, prefix, user's folder, PYTHONPATH).
 */
#include "probe/packages.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct python {
    char path[PROBE_PATH];   /* as it was found, links not followed */
    char prefix[PROBE_PATH]; /* of the environment */
    char base[PROBE_PATH];   /* of the installation behind it */
    char version[16];        /* "3.12" */
    bool is_venv, with_system;
};

/* The value of `key = value` in pyvenv.cfg. */
static bool read_setting(const char *text, const char *key, char *value, size_t room) {
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        line += strspn(line, " \t");
        size_t length = strlen(key);
        if (strncmp(line, key, length) != 0)
            continue;
        const char *at = line + length + strspn(line + length, " \t");
        if (*at != '=')
            continue;
        at += 1 + strspn(at + 1, " \t");
        size_t n = strcspn(at, "\r\n");
        return n > 0 && snprintf(value, room, "%.*s", (int)n, at) < (int)room;
    }
    return false;
}

static void cut_version(const char *text, char version[16]) {
    unsigned major, minor;
    version[0] = '\0';
    if (sscanf(text, "%3u.%3u", &major, &minor) == 2)
        snprintf(version, 16, "%u.%u", major, minor);
}

static bool read_venv(epo_probe_task *task, struct python *python) {
    char folder[PROBE_PATH], file[PROBE_PATH], value[PROBE_PATH];
    snprintf(folder, sizeof folder, "%s", python->path);
    for (int up = 0; up < 2; up++) {
        probe_up(folder);
        char *text = probe_join(file, folder, "pyvenv.cfg") ? probe_read(task, file, 65536) : NULL;
        if (text == NULL)
            continue;
        python->is_venv = true;
        snprintf(python->prefix, sizeof python->prefix, "%s", folder);
        if (read_setting(text, "version", value, sizeof value) ||
            read_setting(text, "version_info", value, sizeof value))
            cut_version(value, python->version);
        python->with_system =
            read_setting(text, "include-system-site-packages", value, sizeof value) &&
            strncmp(value, "true", 4) == 0;
        if (read_setting(text, "home", value, sizeof value)) {
            snprintf(python->base, sizeof python->base, "%s", value);
            probe_up(python->base);
        }
        free(text);
        return true;
    }
    return false;
}

struct only {
    char version[16];
    int count;
};

static bool note_version(void *context, const char *name) {
    struct only *only = context;
    char version[16];
    if (strncmp(name, "python3.", 8) != 0)
        return true;
    cut_version(name + 6, version);
    if (version[0] != '\0' && name[6 + strlen(version)] == '\0') {
        memcpy(only->version, version, sizeof version);
        only->count++;
    }
    return true;
}

/* By the program's own name, else by the one lib/python3.N of its prefix. */
static void find_version(epo_probe_task *task, struct python *python, const char *real) {
    char lib[PROBE_PATH];
    struct only only = {"", 0};
    const char *base = probe_base(real);
    if (strncmp(base, "python", 6) == 0)
        cut_version(base + 6, python->version);
    if (python->version[0] == '\0' && probe_join(lib, python->prefix, "lib") &&
        probe_scan(task, lib, note_version, &only) == PROBE_SCANNED && only.count == 1)
        memcpy(python->version, only.version, sizeof only.version);
}

static const char *read_layout(epo_probe_task *task, struct python *python) {
    char real[PROBE_PATH], interpreter[256];
    if (realpath(python->path, real) == NULL)
        return "it cannot be resolved";
    if (probe_read_shebang(task, real, interpreter, sizeof interpreter))
        return "it is a script that starts another";
    if (!read_venv(task, python)) {
        snprintf(python->prefix, sizeof python->prefix, "%s", real);
        probe_up(python->prefix);
        probe_up(python->prefix);
        snprintf(python->base, sizeof python->base, "%s", python->prefix);
    }
    if (python->version[0] == '\0')
        find_version(task, python, real);
    return python->version[0] == '\0' ? "its version cannot be told from its files" : NULL;
}

static void add_prefix(probe_sites *sites, const char *prefix, const char *version) {
    static const struct {
        const char *before, *after;
    } forms[] = {{"/local/lib/python", "/dist-packages"},
                 {"/lib/python", "/site-packages"},
                 {"/lib64/python", "/site-packages"},
                 {"/lib/python", "/dist-packages"}};
    char folder[PROBE_PATH + 64];
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        snprintf(folder, sizeof folder, "%s%s%s%s", prefix, forms[i].before, version,
                 forms[i].after);
        probe_sites_add(sites, folder);
    }
    snprintf(folder, sizeof folder, "%s/lib/python3/dist-packages", prefix);
    probe_sites_add(sites, folder);
}

static void add_python_path(const epo_probe_task *task, probe_sites *sites) {
    const char *list = epo_probe_variable(task, "PYTHONPATH");
    char folder[PROBE_PATH];
    while (list != NULL && *list != '\0') {
        size_t length = strcspn(list, ":");
        if (length > 0 && length < sizeof folder) {
            snprintf(folder, sizeof folder, "%.*s", (int)length, list);
            if (folder[0] == '/')
                probe_sites_add(sites, folder);
        }
        list += length;
        list += *list == ':';
    }
    if (task->left_out != NULL && strstr(task->left_out, "PYTHONPATH") != NULL) {
        sites->open = true;
        snprintf(sites->why_open, sizeof sites->why_open, "PYTHONPATH is too long to be read");
    }
}

static void find_sites(const epo_probe_task *task, const struct python *python,
                       probe_sites *sites) {
    char folder[PROBE_PATH + 64];
    const char *home = epo_probe_variable(task, "HOME");
    const char *own_home = epo_probe_variable(task, "PYTHONHOME");
    add_python_path(task, sites);
    bool user = (!python->is_venv || python->with_system) && home != NULL && home[0] == '/' &&
                epo_probe_variable(task, "PYTHONNOUSERSITE") == NULL;
    if (python->is_venv)
        add_prefix(sites, python->prefix, python->version);
    if (user && strlen(home) < PROBE_PATH) {
        snprintf(folder, sizeof folder, "%s/.local/lib/python%s/site-packages", home,
                 python->version);
        probe_sites_add(sites, folder);
    }
    if (python->is_venv && !python->with_system)
        return;
    if (own_home != NULL && own_home[0] == '/')
        add_prefix(sites, own_home, python->version);
    else
        add_prefix(sites, python->base[0] != '\0' ? python->base : python->prefix, python->version);
}

/* The interpreter behind the program's word: itself, or that of its #! line. */
static bool find_interpreter(epo_probe_task *task, const char *word, char path[PROBE_PATH]) {
    char interpreter[256];
    if (strcmp(probe_base(word), "uv") == 0) {
        char folder[PROBE_PATH];
        return getcwd(folder, sizeof folder) != NULL &&
               probe_join(path, folder, ".venv/bin/python") && access(path, X_OK) == 0;
    }
    if (!probe_find_in_path(task, word, path))
        return false;
    if (probe_is_python(probe_base(word)))
        return true;
    return probe_read_shebang(task, path, interpreter, sizeof interpreter) &&
           probe_is_python(probe_base(interpreter)) && probe_find_in_path(task, interpreter, path);
}

static void put_interpreter(epo_probe_task *task, const char *path, epo_facts *facts) {
    struct python python;
    memset(&python, 0, sizeof python);
    char folder[PROBE_PATH];
    /* "./venv/bin/python" belongs to the task's folder, which is ours */
    if (path[0] != '/') {
        if (getcwd(folder, sizeof folder) == NULL || !probe_join(python.path, folder, path))
            return;
    } else {
        snprintf(python.path, sizeof python.path, "%s", path);
    }
    probe_put_text(facts, "python.path", "the task's words and PATH", python.path);
    const char *why = read_layout(task, &python);
    if (why != NULL) {
        probe_packages_unknown(facts, python.path, why);
        return;
    }
    probe_put_text(facts, "python.version", python.path, python.version);
    probe_put_text(facts, "python.environment", python.is_venv ? "pyvenv.cfg" : "its prefix",
                   python.prefix);
    probe_sites sites = {.count = 0};
    find_sites(task, &python, &sites);
    probe_packages(task, &sites, facts);
    probe_sites_free(&sites);
}

void epo_probe_python(epo_probe_task *task, epo_facts *facts) {
    char path[PROBE_PATH];
    int word = 0;
    bool found = false;
    epo_probe_program kind = epo_probe_program_find(task, &word);
    static const char *const names[] = {"not told", "python", "shell", "container", "compiled"};
    probe_put_text(facts, "task.program", "its words", names[kind]);
    switch (kind) {
    case EPO_TASK_CONTAINER:
        probe_packages_unknown(facts, "the task's words",
                               "the program runs in a container, whose folders are not seen here");
        return;
    case EPO_TASK_SHELL:
        probe_packages_unknown(facts, "the task's words",
                               "the program is a shell script or not known; it may start any "
                               "Python");
        return;
    case EPO_TASK_COMPILED: probe_packages_unset(facts, "a program that is not Python"); return;
    case EPO_TASK_PYTHON: found = find_interpreter(task, task->arguments[word], path); break;
    case EPO_TASK_NOT_TOLD:
        found =
            probe_find_in_path(task, "python3", path) || probe_find_in_path(task, "python", path);
        break;
    }
    if (found)
        put_interpreter(task, path, facts);
    else if (kind == EPO_TASK_NOT_TOLD)
        probe_packages_unknown(facts, "PATH", "there is no python3 on the PATH");
    else
        probe_packages_unknown(facts, "the task's words", "its Python is not found");
}
