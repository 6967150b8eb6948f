/* SPDX-License-Identifier: Apache-2.0
 *
 * device_host.c - the host engine's memory, and no streams.
 */
#include "config.h"

#include "fault.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

const char device_name[] = "host";

bool device_is_host(void) { return true; }

epo_stream device_open(board *b, int rank) {
    (void)b;
    (void)rank;
    return NULL;
}

void *device_comm_open(seat *s) {
    (void)s;
    return NULL;
}

void device_comm_close(void *comm, bool broken) {
    (void)comm;
    (void)broken;
}

void device_close(epo_stream stream) { (void)stream; }

void *device_new(uint64_t bytes) {
    const size_t whole = ((size_t)bytes + 256) / 256 * 256;
    void *p = aligned_alloc(256, whole);
    if (p == NULL)
        abort();
    return memset(p, 0, whole);
}

void device_free(void *p) { free(p); }

void device_put(void *to, const void *from, uint64_t bytes) { memcpy(to, from, (size_t)bytes); }
void device_take(void *to, const void *from, uint64_t bytes) { memcpy(to, from, (size_t)bytes); }

void device_copy(epo_stream stream, void *to, const void *from, uint64_t bytes) {
    (void)stream;
    memcpy(to, from, (size_t)bytes);
}

void device_zero(epo_stream stream, void *to, uint64_t bytes) {
    (void)stream;
    memset(to, 0, (size_t)bytes);
}

void device_call(epo_stream stream, void (*fn)(void *ctx), void *ctx) {
    (void)stream;
    fn(ctx);
}

bool device_wait(epo_stream stream) {
    (void)stream;
    return true;
}

/* Of the address space: the kernel refuses, whatever the machine has. */
void device_fill(void) {
    const struct rlimit little = {UINT64_C(1) << 20, UINT64_C(1) << 20};
    setrlimit(RLIMIT_AS, &little);
}
