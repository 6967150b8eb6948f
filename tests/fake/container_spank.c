/* SPDX-License-Identifier: Apache-2.0
 *
 * container_spank.c - a stand-in for pyxis, for tests: as pyxis does, it enters the
 * container in its task_init, in a user and a mount namespace, so that a plugin after it
 * in plugstack.conf runs inside and one before it does not.  Unlike pyxis it makes these
 * for each task by itself, from a folder, and imports no images.
 *
 *   srun --container-image=DIR [--container-mounts=PATH[,PATH...]]
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(container_spank, 1)

static char image[4096], mounts[4096];

static int take(int value, const char *argument, int remote) {
    (void)remote;
    snprintf(value == 0 ? image : mounts, sizeof image, "%s", argument);
    return 0;
}

int slurm_spank_init(spank_t spank, int count, char **arguments) {
    static struct spank_option options[] = {
        {(char *)"container-image", (char *)"DIR", (char *)"the container's root", 1, 0, take},
        {(char *)"container-mounts", (char *)"PATHS", (char *)"seen inside", 1, 1, take}};
    (void)count;
    (void)arguments;
    for (int i = 0; i < 2; i++)
        if (spank_option_register(spank, &options[i]) != ESPANK_SUCCESS)
            return -1;
    return 0;
}

static int write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    ssize_t wrote = fd >= 0 ? write(fd, text, strlen(text)) : -1;
    if (fd >= 0)
        close(fd);
    return wrote == (ssize_t)strlen(text) ? 0 : -1;
}

static int enter_namespaces(void) {
    char map[64];
    unsigned long user = getuid(), group = getgid();
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0)
        return -1;
    snprintf(map, sizeof map, "%lu %lu 1", user, user);
    if (write_file("/proc/self/uid_map", map) != 0 ||
        write_file("/proc/self/setgroups", "deny") != 0)
        return -1;
    snprintf(map, sizeof map, "%lu %lu 1", group, group);
    return write_file("/proc/self/gid_map", map);
}

/* The path with all its folders, inside. */
static int bind_inside(const char *path) {
    char at[sizeof image + sizeof mounts];
    int root = snprintf(at, sizeof at, "%s", image);
    snprintf(at + root, sizeof at - (size_t)root, "%s", path);
    for (char *slash = at + root + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = '\0';
        if (mkdir(at, 0755) != 0 && errno != EEXIST)
            return -1;
        *slash = '/';
    }
    if (mkdir(at, 0755) != 0 && errno != EEXIST)
        return -1;
    return mount(path, at, NULL, MS_BIND | MS_REC, NULL);
}

static int change_root(void) {
    char old[sizeof image + 8];
    char list[sizeof mounts], *at = NULL;
    snprintf(list, sizeof list, "%s", mounts);
    if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) != 0 ||
        mount(image, image, NULL, MS_BIND | MS_REC, NULL) != 0 || bind_inside("/usr") != 0 ||
        bind_inside("/dev") != 0 || bind_inside("/proc") != 0)
        return -1;
    for (char *path = strtok_r(list, ",", &at); path != NULL; path = strtok_r(NULL, ",", &at))
        if (bind_inside(path) != 0)
            return -1;
    snprintf(old, sizeof old, "%s/tmp", image);
    if (syscall(SYS_pivot_root, image, old) != 0 || chdir("/") != 0)
        return -1;
    return umount2("/tmp", MNT_DETACH);
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments) {
    (void)spank;
    (void)count;
    (void)arguments;
    if (image[0] == '\0' || (enter_namespaces() == 0 && change_root() == 0))
        return 0;
    slurm_error("container_spank: %s: %s", image, strerror(errno));
    return -1;
}
