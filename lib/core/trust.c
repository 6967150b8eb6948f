/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* O_PATH */
#include "core/trust.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool owner_is_trusted(uid_t owner, const struct epo_trust *trust) {
    if (owner == 0)
        return true;
    for (int i = 0; i < trust->count; i++)
        if (trust->owners[i] == owner)
            return true;
    return false;
}

#define TRIES 8 /* to open a file that is being replaced */

enum node { THE_FILE, ITS_FOLDER, UPPER_FOLDER };

/* Why a path was not opened, where that is no fault of it. */
struct obstacle {
    bool absent, replaced;
};

/* An upper folder may be sticky, as /tmp is: nobody else can rename or remove
 * what a trusted owner has in it, and that owner is checked next. */
static bool others_may_write(const struct stat *info, enum node kind) {
    if (kind == UPPER_FOLDER && (info->st_mode & S_ISVTX) != 0)
        return false;
    return (info->st_mode & (S_IWGRP | S_IWOTH)) != 0;
}

/* `length` bytes of `path` name what `fd` stands for. */
static epo_status check_node(int fd, const char *path, size_t length, enum node kind,
                             const struct epo_trust *trust, struct stat *info) {
    int shown = (int)length;
    if (fstat(fd, info) != 0)
        return epo_fail(EPO_E_SYSTEM, "%.*s: %s", shown, path, strerror(errno));
    if (S_ISLNK(info->st_mode))
        return epo_fail(EPO_E_STATE,
                        "%.*s is a symbolic link, which is not trusted; name the real path", shown,
                        path);
    if (kind != THE_FILE && !S_ISDIR(info->st_mode))
        return epo_fail(EPO_E_STATE, "%.*s is not a folder", shown, path);
    if (kind == THE_FILE && !S_ISREG(info->st_mode))
        return epo_fail(EPO_E_STATE, "%.*s is not a regular file", shown, path);
    if (!owner_is_trusted(info->st_uid, trust))
        return epo_fail(EPO_E_STATE,
                        "%.*s belongs to user id %lu, trusted are root and the user slurmd runs "
                        "as; chown it",
                        shown, path, (unsigned long)info->st_uid);
    if (others_may_write(info, kind))
        return epo_fail(EPO_E_STATE,
                        "%.*s is writable by group or others (mode %04o), which is not trusted; "
                        "chmod go-w it",
                        shown, path, (unsigned)(info->st_mode & 07777));
    return EPO_OK;
}

/* Opens one part of the path without following or touching what it is. */
static epo_status open_part(int parent, const char *name, const char *path, size_t length,
                            int *part, struct obstacle *obstacle) {
    *part = openat(parent, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (*part >= 0)
        return EPO_OK;
    obstacle->absent = errno == ENOENT;
    return epo_fail(EPO_E_SYSTEM, "%.*s: %s", (int)length, path, strerror(errno));
}

/* Reopens for reading what was checked; in its folder nobody else may write, but who may
 * can have put another file in its place, which is to be checked, too. */
static epo_status open_checked(int parent, const char *name, const char *path,
                               const struct stat *checked, int *fd, struct obstacle *obstacle) {
    int got = openat(parent, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat now;
    if (got < 0 || fstat(got, &now) != 0) {
        int error = errno;
        if (got >= 0)
            close(got);
        return epo_fail(EPO_E_SYSTEM, "%s: %s%s", path, strerror(error),
                        error == EACCES ? "; every user has to read it: chmod a+r it" : "");
    }
    if (now.st_dev != checked->st_dev || now.st_ino != checked->st_ino) {
        close(got);
        obstacle->replaced = true;
        return epo_fail(EPO_E_STATE, "%s changed while it was opened; try again", path);
    }
    *fd = got;
    return EPO_OK;
}

static epo_status walk(const char *path, char *parts, const struct epo_trust *trust, int *fd,
                       struct obstacle *obstacle) {
    struct stat info;
    int folder = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    epo_status status = folder < 0 ? epo_fail(EPO_E_SYSTEM, "/: %s", strerror(errno))
                                   : check_node(folder, "/", 1, ITS_FOLDER, trust, &info);
    char *rest = NULL;
    char *name = strtok_r(parts, "/", &rest);
    while (status == EPO_OK && name != NULL) {
        char *next = strtok_r(NULL, "/", &rest);
        size_t length = (size_t)(name - parts) + strlen(name);
        enum node kind = next == NULL ? THE_FILE : *rest == '\0' ? ITS_FOLDER : UPPER_FOLDER;
        int part = -1;
        status = open_part(folder, name, path, length, &part, obstacle);
        if (status == EPO_OK)
            status = check_node(part, path, length, kind, trust, &info);
        if (status == EPO_OK && next == NULL)
            status = open_checked(folder, name, path, &info, fd, obstacle);
        if (part >= 0) {
            close(folder);
            folder = part;
        }
        name = next;
    }
    if (folder >= 0)
        close(folder);
    return status;
}

static bool path_is_plain(const char *path) {
    if (path[0] != '/' || path[strlen(path) - 1] == '/')
        return false;
    for (const char *part = path; part != NULL; part = strchr(part + 1, '/')) {
        const char *name = part + 1;
        size_t length = strcspn(name, "/");
        if ((length == 1 && name[0] == '.') || (length == 2 && strncmp(name, "..", 2) == 0))
            return false;
    }
    return true;
}

epo_status epo_trust_open(const char *path, const struct epo_trust *trust, int *fd, bool *absent) {
    struct obstacle obstacle = {.replaced = true};
    epo_status status = EPO_OK;
    int got = -1;
    *absent = false;
    if (!path_is_plain(path))
        return epo_fail(
            EPO_E_ARG, "path \"%s\": allowed is an absolute path of a file without . and ..", path);
    for (int tries = 0; tries < TRIES && obstacle.replaced; tries++) {
        char *parts = strdup(path);
        if (parts == NULL)
            return epo_fail(EPO_E_NOMEM, "%s: no memory to open it", path);
        obstacle = (struct obstacle){false, false};
        status = walk(path, parts, trust, &got, &obstacle);
        free(parts);
    }
    *absent = obstacle.absent;
    if (status == EPO_OK)
        *fd = got;
    return status;
}

static epo_status read_all(int fd, const char *path, size_t limit, char **content) {
    struct stat info;
    if (fstat(fd, &info) != 0)
        return epo_fail(EPO_E_SYSTEM, "%s: %s", path, strerror(errno));
    if (info.st_size < 0 || (uint64_t)info.st_size > limit)
        return epo_fail(EPO_E_ARG, "%s: %lld bytes, allowed at most %zu", path,
                        (long long)info.st_size, limit);
    char *text = malloc((size_t)info.st_size + 1);
    if (text == NULL)
        return epo_fail(EPO_E_NOMEM, "%s: no memory for %lld bytes", path, (long long)info.st_size);
    size_t have = 0;
    ssize_t got = 1;
    while (have < (size_t)info.st_size && got > 0) {
        got = read(fd, text + have, (size_t)info.st_size - have);
        if (got < 0 && errno == EINTR)
            got = 1;
        else if (got > 0)
            have += (size_t)got;
    }
    text[have] = '\0';
    epo_status status = EPO_OK;
    if (got < 0)
        status = epo_fail(EPO_E_SYSTEM, "%s: %s", path, strerror(errno));
    else if (strlen(text) != have)
        status = epo_fail(EPO_E_ARG, "%s: a NUL byte at offset %zu; it must be text", path,
                          strlen(text));
    if (status == EPO_OK)
        *content = text;
    else
        free(text);
    return status;
}

epo_status epo_trust_read(const char *path, const struct epo_trust *trust, size_t limit,
                          char **content, bool *absent) {
    int fd = -1;
    epo_status status = epo_trust_open(path, trust, &fd, absent);
    if (status != EPO_OK)
        return status;
    status = read_all(fd, path, limit, content);
    close(fd);
    return status;
}
