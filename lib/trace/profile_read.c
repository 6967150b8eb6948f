/* SPDX-License-Identifier: Apache-2.0
 *
 * Which reader a file is for, told from its first bytes.
 */
#include "trace/profile.h"

#include "core/status.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What can be read once alone: a pipe, by a name (/dev/fd/63 of a shell's <(...), mkfifo) too. */
static bool is_stream(const char *path) {
    struct stat s;
    return strcmp(path, "-") == 0 ||
           (stat(path, &s) == 0 && !S_ISREG(s.st_mode) && !S_ISDIR(s.st_mode));
}

epo_status epo_profile_read(const char *path, const epo_profile_options *options,
                            epo_profile **out) {
    char head[16] = "";
    if (is_stream(path))
        return epo_lines_fail(epo_profile_read_chrome(path, options, out), path);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, head, sizeof head);
    int error = errno;
    if (fd >= 0)
        close(fd);
    if (n < 0 && error == EISDIR)
        return epo_fail(EPO_E_ARG, "%s: is a folder; name a file", path);
    if (n < 0)
        return epo_fail(EPO_E_SYSTEM, "%s: cannot be read: %s", path, strerror(error));
    if (n == 0)
        return epo_fail(EPO_E_ARG, "%s: is empty", path);
    if (n >= 15 && memcmp(head, "SQLite format 3", 15) == 0)
        return epo_lines_fail(epo_profile_read_nsight(path, options, out), path);
    const char *dot = strrchr(path, '.');
    if (dot != NULL && (strcmp(dot, ".nsys-rep") == 0 || strcmp(dot, ".qdrep") == 0))
        return epo_fail(EPO_E_ARG, "%s: first export it: nsys export --type sqlite %s", path, path);
    epo_status status = epo_lines_refuse(path, head, (size_t)n);
    for (ssize_t i = 0; i < n && status == EPO_OK; i++) {
        if (head[i] == '{' || head[i] == '[')
            return epo_lines_fail(epo_profile_read_chrome(path, options, out), path);
        if (strchr(" \t\r\n\xEF\xBB\xBF", head[i]) == NULL || head[i] == '\0')
            break;
    }
    if (status != EPO_OK)
        return status;
    return epo_fail(EPO_E_ARG,
                    "%s: neither an SQLite export of Nsight Systems nor a Chrome trace (byte 1)",
                    path);
}
