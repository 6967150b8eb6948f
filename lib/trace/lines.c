/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/lines.h"

#include "core/status.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK 262144
#define SNIFF 4096 /* bytes that must not hold a zero */
#define PROGRESS_STEP (64u << 20)

struct epo_lines {
    int fd;
    char *path;
    char *block; /* read from the file */
    size_t block_at, block_length;
    char *line; /* handed out */
    uint64_t number, offset, consumed, total, told;
    epo_progress *progress;
    void *context;
    epo_status status;
};

static epo_status refill(epo_lines *l) {
    ssize_t n;
    do
        n = read(l->fd, l->block, BLOCK);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return epo_fail(EPO_E_SYSTEM, "%s: cannot be read at byte %llu: %s", l->path,
                        (unsigned long long)l->consumed, strerror(errno));
    l->block_at = 0;
    l->block_length = (size_t)n;
    return EPO_OK;
}

static epo_status open_file(const char *path, epo_lines *l) {
    struct stat s;
    l->fd = strcmp(path, "-") == 0 ? dup(STDIN_FILENO) : open(path, O_RDONLY | O_CLOEXEC);
    if (l->fd < 0 || fstat(l->fd, &s) != 0)
        return epo_fail(EPO_E_SYSTEM, "%s: cannot be opened: %s", l->path, strerror(errno));
    if (S_ISDIR(s.st_mode))
        return epo_fail(EPO_E_ARG, "%s: is a folder; name a file", l->path);
    l->total = S_ISREG(s.st_mode) ? (uint64_t)s.st_size : 0;
    return EPO_OK;
}

epo_status epo_lines_refuse(const char *name, const char *head, size_t length) {
    size_t seen = length < SNIFF ? length : SNIFF;
    static const char *const packed[] = {"\x1f\x8b", "\x28\xb5\x2f\xfd", "\xfd\x37zXZ", "BZh"};
    for (size_t i = 0; i < sizeof packed / sizeof *packed; i++)
        if (seen >= strlen(packed[i]) && memcmp(head, packed[i], strlen(packed[i])) == 0)
            return epo_fail(
                EPO_E_ARG, "%s: is compressed: give its text on standard input (zcat FILE | ... -)",
                name);
    if (seen >= 2 && (memcmp(head, "\xff\xfe", 2) == 0 || memcmp(head, "\xfe\xff", 2) == 0))
        return epo_fail(EPO_E_ARG,
                        "%s: is UTF-16, and UTF-8 is read: give its text on standard input "
                        "(iconv -f UTF-16 -t UTF-8 FILE | ... -)",
                        name);
    return EPO_OK;
}

/* Refuses what is no text, and passes over the mark of UTF-8 before it. */
static epo_status sniff(epo_lines *l) {
    epo_status status = refill(l);
    if (status == EPO_OK)
        status = epo_lines_refuse(l->path, l->block, l->block_length);
    size_t seen = l->block_length < SNIFF ? l->block_length : SNIFF;
    const char *zero = status == EPO_OK ? memchr(l->block, '\0', seen) : NULL;
    if (zero != NULL)
        return epo_fail(EPO_E_ARG, "%s: byte %zu is zero: this is not a text file", l->path,
                        (size_t)(zero - l->block) + 1);
    if (status == EPO_OK && l->block_length >= 3 && memcmp(l->block, "\xef\xbb\xbf", 3) == 0)
        l->consumed = l->block_at = 3;
    return status;
}

const char *epo_lines_name(const char *path) {
    return strcmp(path, "-") == 0 ? "standard input" : path;
}

epo_status epo_lines_fail(epo_status status, const char *path) {
    char text[EPO_ERROR_MAX];
    const char *name = epo_lines_name(path);
    if (status == EPO_OK || strncmp(epo_fail_text(), name, strlen(name)) == 0)
        return status;
    snprintf(text, sizeof text, "%s", epo_fail_text());
    return epo_fail(status, "%s: %s", name, text);
}

epo_status epo_lines_open(const char *path, const char *name, epo_progress *progress, void *context,
                          epo_lines **out) {
    epo_lines *l = calloc(1, sizeof *l);
    if (l == NULL)
        return epo_fail(EPO_E_NOMEM, "%s: no memory to read it", name);
    *l = (epo_lines){.fd = -1,
                     .path = strdup(name),
                     .block = malloc(BLOCK),
                     .line = malloc(EPO_LINE_MAX + 1),
                     .progress = progress,
                     .context = context};
    epo_status status = l->path == NULL || l->block == NULL || l->line == NULL
                            ? epo_fail(EPO_E_NOMEM, "%s: no memory to read it", name)
                            : open_file(path, l);
    if (status == EPO_OK)
        status = sniff(l);
    if (status != EPO_OK) {
        epo_lines_close(l);
        return status;
    }
    *out = l;
    return EPO_OK;
}

void epo_lines_close(epo_lines *l) {
    if (l == NULL)
        return;
    if (l->fd >= 0)
        close(l->fd);
    free(l->path);
    free(l->block);
    free(l->line);
    free(l);
}

static void tell(epo_lines *l) {
    if (l->progress == NULL || l->consumed - l->told < PROGRESS_STEP)
        return;
    l->told = l->consumed;
    l->progress(l->context, l->consumed, l->total);
}

/* Copies up to the end of the line; true when the line is complete. */
static bool take(epo_lines *l, size_t *length) {
    const char *from = l->block + l->block_at;
    size_t left = l->block_length - l->block_at;
    const char *end = memchr(from, '\n', left);
    size_t n = end == NULL ? left : (size_t)(end - from);
    size_t room = EPO_LINE_MAX - *length, kept = n < room ? n : room;
    memcpy(l->line + *length, from, kept);
    *length += kept;
    l->block_at += n + (end != NULL);
    l->consumed += n + (end != NULL);
    return end != NULL;
}

static void clean(char *line, size_t *length) {
    size_t kept = 0;
    while (*length > 0 && line[*length - 1] == '\r')
        --*length;
    for (size_t i = 0; i < *length; i++) {
        unsigned char c = (unsigned char)line[i];
        if (c == 0x1b && i + 1 < *length && line[i + 1] == '[') { /* a colour: ESC [ 38;2;1 m */
            for (i += 2; i < *length && (isdigit((unsigned char)line[i]) || line[i] == ';');)
                i++;
            continue;
        }
        line[kept++] = c < 0x20 && c != '\t' ? ' ' : line[i];
    }
    *length = kept;
    line[kept] = '\0';
}

const char *epo_lines_next(epo_lines *l, size_t *length) {
    size_t n = 0;
    uint64_t start = l->consumed;
    bool complete = false;
    while (l->status == EPO_OK && !complete) {
        if (l->block_at == l->block_length)
            l->status = refill(l);
        if (l->status == EPO_OK && l->block_length == 0)
            break;
        if (l->status == EPO_OK)
            complete = take(l, &n);
    }
    if (l->status != EPO_OK || (!complete && l->consumed == start))
        return NULL;
    l->number++;
    l->offset = start;
    tell(l);
    clean(l->line, &n);
    if (length != NULL)
        *length = n;
    return l->line;
}

uint64_t epo_lines_number(const epo_lines *l) { return l->number; }
uint64_t epo_lines_offset(const epo_lines *l) { return l->offset; }
epo_status epo_lines_status(const epo_lines *l) { return l->status; }
