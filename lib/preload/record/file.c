/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "preload/record/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

/* Bytes of the UTF-8 character at `c`, of `most`; 0: there is none (RFC 3629). */
static size_t character(const unsigned char *c, size_t most) {
    const size_t length = *c < 0x80 ? 1 : *c < 0xc2 ? 0 : *c < 0xe0 ? 2 : *c < 0xf0 ? 3 : 4;
    const unsigned char least = *c == 0xe0 ? 0xa0 : *c == 0xf0 ? 0x90 : 0x80;
    const unsigned char last = *c == 0xed ? 0x9f : *c == 0xf4 ? 0x8f : 0xbf;
    if (length > most || *c > 0xf4 || (length > 1 && (c[1] < least || c[1] > last)))
        return 0;
    for (size_t i = 2; i < length; i++)
        if (c[i] < 0x80 || c[i] > 0xbf)
            return 0;
    return length;
}

void record_text_put(FILE *f, const char *text, size_t most) {
    const unsigned char *c = (const unsigned char *)text, *end = c + strnlen(text, most);
    fputc('"', f);
    while (c < end) {
        const size_t length = character(c, (size_t)(end - c));
        if (*c == '"' || *c == '\\')
            fputc('\\', f);
        if (length == 0 || *c < 0x20)
            fputc(length == 0 ? '?' : ' ', f);
        else
            fwrite(c, 1, length, f);
        c += length > 0 ? length : 1;
    }
    fputc('"', f);
}

void record_file_name(char path[RECORD_PATH], const char *folder, const char *what, int rank) {
    (void)snprintf(path, RECORD_PATH, "%s/ep-overlap-%s-%d.json", folder, what, rank);
}

/* 0, or what went wrong, as errno has it: also where only a part could be written. */
static int put_file(const char *path, record_put *put, const void *what) {
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    FILE *f = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (f == NULL) {
        const int error = errno;
        if (fd >= 0)
            close(fd);
        return error;
    }
    put(f, what);
    const bool whole = fflush(f) == 0 && ferror(f) == 0;
    const int error = errno;
    if (fclose(f) != 0)
        return errno;
    return whole ? 0 : error != 0 ? error : EIO;
}

/* Under its own name only when it is whole: the process may end before. */
epo_status record_file_write(const char *path, record_put *put, const void *what) {
    char part[RECORD_PATH + 16];
    const int n = snprintf(part, sizeof part, "%s.%d", path, (int)getpid());
    if (n < 0 || (size_t)n >= sizeof part)
        return epo_fail(EPO_E_SYSTEM, "%.900s: %s", path, strerror(ENAMETOOLONG));
    int error = put_file(part, put, what);
    if (error == 0 && rename(part, path) != 0)
        error = errno;
    if (error == 0)
        return EPO_OK;
    (void)unlink(part);
    return epo_fail(EPO_E_SYSTEM, "%.900s: %s", path, strerror(error)); /* (the reason, too) */
}
