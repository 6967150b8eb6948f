/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SUFFIX ".XXXXXX"

static epo_status cannot(const char *path, int why) {
    if (why == ENXIO)
        return epo_fail(EPO_E_SYSTEM, "%s cannot be written: nobody reads this pipe", path);
    return epo_fail(EPO_E_SYSTEM, "%s cannot be written: %s", path, strerror(why));
}

/* As open() would have made it, or as the file was that is there: mkstemp() gives
 * the owner alone the right to read. */
static void usual_mode(int fd, const struct stat *there) {
    mode_t mask = umask(0);
    umask(mask);
    (void)fchmod(fd, there != NULL ? there->st_mode & 0777 : 0666 & ~mask);
}

/* -1 with errno; *temporary is NULL then. */
static int open_beside(const char *path, const struct stat *there, char **temporary) {
    size_t size = strlen(path) + sizeof SUFFIX;
    char *name = malloc(size);
    if (name == NULL)
        return -1;
    snprintf(name, size, "%s%s", path, SUFFIX);
    int fd = mkostemp(name, O_CLOEXEC);
    if (fd < 0) {
        int why = errno;
        free(name);
        errno = why;
        return -1;
    }
    usual_mode(fd, there);
    *temporary = name;
    return fd;
}

static int open_in_place(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0666);
    if (fd >= 0)
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    return fd;
}

epo_status output_open(const char *path, output *out) {
    output o = {NULL, path, NULL};
    struct stat st;
    bool there = lstat(path, &st) == 0;
    int fd = -1;
    if (there && S_ISREG(st.st_mode) && access(path, W_OK) != 0)
        return cannot(path, errno);
    if (!there || S_ISREG(st.st_mode))
        fd = open_beside(path, there ? &st : NULL, &o.temporary);
    if (fd < 0 && there) /* also an ordinary file in a folder that takes no new one */
        fd = open_in_place(path);
    if (fd >= 0)
        o.file = fdopen(fd, "w");
    if (o.file == NULL) {
        epo_status status = cannot(path, errno);
        if (fd >= 0)
            close(fd);
        if (o.temporary != NULL)
            unlink(o.temporary);
        free(o.temporary);
        return status;
    }
    *out = o;
    return EPO_OK;
}

epo_status output_close(output *out, epo_status status) {
    errno = EIO;
    bool good = fflush(out->file) == 0 && ferror(out->file) == 0;
    int why = errno;
    if (fclose(out->file) != 0 && good) {
        good = false;
        why = errno;
    }
    if (status == EPO_OK && !good)
        status = cannot(out->path, why);
    if (out->temporary != NULL) {
        if (status == EPO_OK && rename(out->temporary, out->path) != 0)
            status = cannot(out->path, errno);
        if (status != EPO_OK)
            unlink(out->temporary);
    }
    free(out->temporary);
    *out = (output){NULL, NULL, NULL};
    return status;
}

epo_status output_check(const char *path) {
    output o;
    struct stat st;
    if (lstat(path, &st) == 0 && !S_ISREG(st.st_mode)) /* opening it may change it */
        return stat(path, &st) != 0 && errno != ENOENT ? cannot(path, errno)
               : S_ISDIR(st.st_mode)                   ? cannot(path, EISDIR)
                                                       : EPO_OK;
    if (access(path, F_OK) == 0) /* written beside it or, else, over it */
        return access(path, W_OK) == 0 ? EPO_OK : cannot(path, errno);
    epo_status status = output_open(path, &o);
    if (status == EPO_OK) {
        epo_fail_clear();
        fclose(o.file);
        unlink(o.temporary);
        free(o.temporary);
    }
    return status;
}

void output_standard(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd)
            return; /* nothing better can be done */
}
