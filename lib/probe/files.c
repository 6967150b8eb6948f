/* SPDX-License-Identifier: Apache-2.0 */
#include "probe/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool probe_join(char path[PROBE_PATH], const char *folder, const char *name) {
    size_t length = strlen(folder);
    while (length > 1 && folder[length - 1] == '/')
        length--;
    const char *between = length == 1 && folder[0] == '/' ? "" : "/";
    int need = snprintf(path, PROBE_PATH, "%.*s%s%s", (int)length, folder, between, name);
    return need > 0 && need < PROBE_PATH;
}

bool probe_is_file(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode);
}

bool probe_is_folder(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

char *probe_read(epo_probe_task *task, const char *path, size_t limit) {
    struct stat info;
    /* Neither a pipe nor a device may keep us or take note of us. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return NULL;
    if (limit > task->bytes_left)
        limit = (size_t)task->bytes_left;
    char *text =
        fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && limit > 0 ? malloc(limit + 1) : NULL;
    size_t have = 0;
    for (ssize_t got = 1; text != NULL && have < limit && got > 0;) {
        got = read(fd, text + have, limit - have);
        if (got < 0 && errno == EINTR)
            got = 1;
        else if (got > 0)
            have += (size_t)got;
    }
    close(fd);
    if (text != NULL)
        text[have] = '\0';
    task->bytes_left -= have;
    return text;
}

probe_scan_end probe_scan(epo_probe_task *task, const char *folder,
                          bool (*visit)(void *context, const char *name), void *context) {
    DIR *open_folder = opendir(folder);
    probe_scan_end end = PROBE_SCANNED;
    if (open_folder == NULL)
        return errno == ENOENT || errno == ENOTDIR ? PROBE_NO_FOLDER : PROBE_SCAN_CUT;
    for (const struct dirent *entry; (entry = readdir(open_folder)) != NULL;) {
        if (task->entries_left == 0) {
            end = PROBE_SCAN_CUT;
            break;
        }
        task->entries_left--;
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
            !visit(context, entry->d_name))
            break;
    }
    closedir(open_folder);
    return end;
}

const char *probe_base(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

void probe_up(char *path) {
    char *slash = strrchr(path, '/');
    if (slash != NULL)
        slash[slash == path] = '\0';
}

const char *epo_probe_variable(const epo_probe_task *task, const char *name) {
    const char *value = task->variable != NULL ? task->variable(task->context, name) : NULL;
    return value != NULL && value[0] != '\0' ? value : NULL;
}

void probe_put(epo_facts *facts, const char *key, const char *source, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    (void)epo_facts_set(facts, key, text, source);
}

void probe_put_text(epo_facts *facts, const char *key, const char *source, const char *text) {
    (void)epo_facts_set_text(facts, key, text, source);
}

void probe_put_unknown(epo_facts *facts, const char *key, const char *source, const char *format,
                       ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    (void)epo_facts_set_unknown(facts, key, text, source);
}

void probe_put_unset(epo_facts *facts, const char *key, const char *source) {
    (void)epo_facts_set(facts, key, NULL, source);
}
