/* SPDX-License-Identifier: Apache-2.0 */
#include "preload.h"

#include "context.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LINKS_MAX 4

/* Replaces the last part of `path` by what the link there names, when that is a
 * file of the same folder. */
static bool follow_beside(char *path, size_t room) {
    char target[256];
    ssize_t length = readlink(path, target, sizeof target - 1);
    if (length <= 0)
        return false;
    target[length] = '\0';
    char *slash = strrchr(path, '/');
    size_t folder = slash != NULL ? (size_t)(slash - path) + 1 : 0;
    if (folder == 0 || strchr(target, '/') != NULL || folder + (size_t)length >= room)
        return false;
    memcpy(path + folder, target, (size_t)length + 1);
    return true;
}

epo_status ep_preload_find(const char *path, const struct epo_trust *trust,
                           struct ep_preload *preload) {
    struct ep_preload found;
    int fd = -1;
    bool absent = false;
    if (strlen(path) >= sizeof found.path)
        return epo_fail(EPO_E_ARG, "preload.path: more than %d bytes", EP_PATH_MAX - 1);
    snprintf(found.path, sizeof found.path, "%s", path);
    for (int links = 0; links < LINKS_MAX && follow_beside(found.path, sizeof found.path);)
        links++;
    epo_status status = epo_trust_open(found.path, trust, &fd, &absent);
    if (status != EPO_OK)
        return status;
    struct stat info;
    if (fstat(fd, &info) != 0)
        status = epo_fail(EPO_E_SYSTEM, "%s: %s", found.path, strerror(errno));
    ep_elf_read(fd, &found.elf);
    close(fd);
    if (status != EPO_OK)
        return status;
    found.device = info.st_dev;
    found.inode = info.st_ino;
    if (found.elf.kind != EP_ELF_LIBRARY)
        return epo_fail(EPO_E_STATE, "%s is no shared library; install it again", found.path);
    *preload = found;
    return EPO_OK;
}

epo_status ep_preload_check_visible(const struct ep_preload *preload) {
    struct stat info;
    int folder = (int)(strrchr(preload->path, '/') - preload->path);
    if (stat(preload->path, &info) != 0)
        return epo_fail(EPO_E_STATE,
                        "%s: %s for the task; in a container its folder has to be mounted "
                        "(--container-mounts=%.*s)",
                        preload->path, strerror(errno), folder, preload->path);
    if (info.st_dev != preload->device || info.st_ino != preload->inode)
        return epo_fail(EPO_E_STATE,
                        "%s is another file for the task than on the node; in a container mount "
                        "the node's folder (--container-mounts=%.*s)",
                        preload->path, folder, preload->path);
    return EPO_OK;
}

static int open_regular(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat info;
    if (fd >= 0 && (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* The program as execvp() would find it. */
static int open_program(const char *name, const char *search) {
    if (strchr(name, '/') != NULL)
        return open_regular(name);
    while (search != NULL && *search != '\0') {
        char path[EP_PATH_MAX];
        int length = (int)strcspn(search, ":");
        int need = snprintf(path, sizeof path, "%.*s/%s", length, search, name);
        if (length > 0 && need > 0 && (size_t)need < sizeof path && access(path, X_OK) == 0) {
            int fd = open_regular(path);
            if (fd >= 0)
                return fd;
        }
        search += length;
        search += *search == ':';
    }
    return -1;
}

/* Follows "#!" lines to the program that will be loaded.  "env" is the end of
 * what can be told, and it is a program like others. */
static bool read_program(const char *name, const char *search, struct ep_elf *elf,
                         bool *privileged) {
    for (int depth = 0; depth < LINKS_MAX; depth++) {
        struct stat info;
        int fd = open_program(depth == 0 ? name : elf->interpreter, search);
        if (fd < 0)
            return false;
        struct ep_elf got;
        ep_elf_read(fd, &got);
        *privileged = fstat(fd, &info) == 0 && (info.st_mode & (S_ISUID | S_ISGID)) != 0;
        close(fd);
        *elf = got;
        if (elf->kind != EP_ELF_SCRIPT)
            return elf->kind != EP_ELF_NOT;
    }
    return false;
}

void ep_preload_judge(struct ep_plugin *plugin, spank_t spank, const struct ep_preload *preload,
                      char *why, size_t room) {
    char **arguments = NULL;
    int count = 0;
    bool privileged = false;
    struct ep_elf program;
    why[0] = '\0';
    if (plugin->api->get_arguments(spank, &count, &arguments) != 0 || count < 1)
        return;
    char *search = plugin->api->task_getenv(spank, "PATH");
    bool known = read_program(arguments[0], search, &program, &privileged);
    free(search);
    if (!known)
        return;
    const char *loader = strrchr(program.interpreter, '/');
    if (!ep_elf_fits(&program, &preload->elf))
        snprintf(why, room,
                 "the program is built for another kind of machine (%u-bit, ELF machine "
                 "%u) than the library (%u-bit, %u)",
                 program.bits * 32u, program.machine, preload->elf.bits * 32u,
                 preload->elf.machine);
    else if (program.kind != EP_ELF_DYNAMIC)
        snprintf(why, room, "the program is linked statically and loads no libraries");
    else if (loader != NULL && strncmp(loader, "/ld-musl", 8) == 0)
        snprintf(why, room, "the program uses musl's loader (%.200s), the library needs glibc",
                 program.interpreter);
    else if (privileged)
        snprintf(why, room,
                 "the program is set-user-id or set-group-id, its loader ignores preloads");
}
