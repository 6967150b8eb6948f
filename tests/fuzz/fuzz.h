/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz.h - every target is LLVMFuzzerTestOneInput in one file, built by
 * tests/fuzz/run.sh with libFuzzer, and by make check with replay.c, which gives it
 * the files named on its command line.
 */
#ifndef EPO_TESTS_FUZZ_H
#define EPO_TESTS_FUZZ_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The bytes as a file without a name; its path goes to `path`.  -1: no more files. */
static inline int fuzz_file(const uint8_t *data, size_t size, char *path, size_t room) {
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0)
        return -1;
    for (size_t done = 0; done < size;) {
        ssize_t n = write(fd, data + done, size - done);
        if (n <= 0) {
            close(fd);
            return -1;
        }
        done += (size_t)n;
    }
    snprintf(path, room, "/proc/self/fd/%d", fd);
    return fd;
}

#endif
