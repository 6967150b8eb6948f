/* SPDX-License-Identifier: Apache-2.0 */
#include "data.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/status.h"
#include "measure/rng.h"

#define DATA_MOST ((size_t)256 << 20) /* of a larger file the beginning is used */
#define DATA_STREAM 1000003           /* apart from the streams of the weights */

static epo_status check_file(const char *path, const struct stat *st, size_t need) {
    if (S_ISDIR(st->st_mode))
        return epo_fail(EPO_E_SYSTEM, "%s is a folder; give a text file", path);
    if (!S_ISREG(st->st_mode))
        return epo_fail(EPO_E_SYSTEM, "%s is not a regular file; give a text file", path);
    if (st->st_size == 0)
        return epo_fail(EPO_E_SYSTEM, "%s is empty; give a file with text", path);
    if ((uint64_t)st->st_size < need)
        return epo_fail(EPO_E_SYSTEM,
                        "%s has %lld bytes, this batch needs at least %zu; give a longer text or "
                        "lower --seq or --batch",
                        path, (long long)st->st_size, need);
    return EPO_OK;
}

static epo_status read_all(int fd, const char *path, size_t count, data_text *out) {
    uint8_t *byte = malloc(count);
    size_t have = 0;
    if (byte == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for the %zu bytes of %s", count, path);
    while (have < count) {
        ssize_t n = read(fd, byte + have, count - have);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            free(byte);
            return epo_fail(EPO_E_SYSTEM, "%s: reading ended after %zu of %zu bytes: %s", path,
                            have, count, n < 0 ? strerror(errno) : "the file became shorter");
        }
        have += (size_t)n;
    }
    out->byte = byte;
    out->count = count;
    return EPO_OK;
}

epo_status data_read(const char *path, int seq, int batch, data_text *out) {
    const char *name = path != NULL ? path : DATA_DEFAULT;
    struct stat st;
    /* without waiting for the writer of a fifo */
    int fd = open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && path == NULL)
        return epo_fail(EPO_E_SYSTEM,
                        "the default text %s cannot be read (%s); give a text file as FILE", name,
                        strerror(errno));
    if (fd < 0)
        return epo_fail(EPO_E_SYSTEM, "%s cannot be read: %s; give a text file", name,
                        strerror(errno));
    epo_status status = EPO_OK;
    if (fstat(fd, &st) != 0)
        status = epo_fail(EPO_E_SYSTEM, "%s cannot be read: %s", name, strerror(errno));
    if (status == EPO_OK)
        status = check_file(name, &st, (size_t)seq + (size_t)batch);
    if (status == EPO_OK)
        status = read_all(fd, name,
                          (uint64_t)st.st_size > DATA_MOST ? DATA_MOST : (size_t)st.st_size, out);
    close(fd);
    return status;
}

void data_free(data_text *text) {
    free(text->byte);
    *text = (data_text){NULL, 0};
}

void data_slice(int batch, int rank, int ranks, int *first, int *count) {
    int64_t from = (int64_t)batch * rank / ranks, to = (int64_t)batch * (rank + 1) / ranks;
    *first = (int)from;
    *count = (int)(to - from);
}

void data_batch(const data_text *text, uint64_t seed, uint64_t number, int batch, int first,
                int count, int seq, uint8_t *input, uint8_t *target) {
    const uint64_t places = text->count - (size_t)seq;
    for (int i = 0; i < count; i++) {
        uint64_t which = number * (uint64_t)batch + (uint64_t)(first + i);
        const uint8_t *from = text->byte + rng_at(seed, DATA_STREAM, which) % places;
        memcpy(input + (size_t)i * (size_t)seq, from, (size_t)seq);
        memcpy(target + (size_t)i * (size_t)seq, from + 1, (size_t)seq);
    }
}
