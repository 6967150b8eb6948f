/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* O_TMPFILE, mkostemp */
#include "core/scratch.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

/* O_TMPFILE where the file system has it; a name for an instant where not. */
static int open_in(const char *folder) {
    char path[PATH_MAX];
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR))
        return fd;
    int n = snprintf(path, sizeof path, "%s/ep-overlap.XXXXXX", folder);
    if (n < 0 || (size_t)n >= sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    fd = mkostemp(path, O_CLOEXEC);
    if (fd >= 0)
        unlink(path);
    return fd;
}

FILE *epo_scratch_open(void) {
    static const char *const folders[] = {"/tmp", "/var/tmp", "."};
    const char *named = getenv("TMPDIR");
    bool is_named = named != NULL && named[0] != '\0';
    int fd = open_in(is_named ? named : folders[0]);
    int first = errno;
    for (size_t i = 1; fd < 0 && !is_named && i < sizeof folders / sizeof *folders; i++)
        fd = open_in(folders[i]);
    if (fd < 0) {
        errno = first;
        return NULL;
    }
    FILE *file = fdopen(fd, "w+");
    if (file == NULL)
        close(fd);
    return file;
}
