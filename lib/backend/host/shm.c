/* SPDX-License-Identifier: Apache-2.0
 *
 * shm.c - memory: what is free, private pages.
 */
#include "config.h"

#include "backend/host/join.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define HOST_CHECK_FROM (UINT64_C(1) << 20) /* smaller needs are not worth the look */

/* ---- how much there is ---------------------------------------------------- */

/* The number after `key` in a file of "key value" lines (NULL: the first word). */
static bool file_number(const char *path, const char *key, uint64_t *out) {
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return false;
    char line[256];
    bool found = false;
    while (!found && fgets(line, sizeof line, f) != NULL) {
        const char *at = line;
        if (key != NULL) {
            size_t n = strlen(key);
            if (strncmp(line, key, n) != 0 || (line[n] != ' ' && line[n] != ':'))
                continue;
            at = line + n + 1;
        }
        char *end;
        errno = 0;
        unsigned long long v = strtoull(at, &end, 10);
        if (end == at || errno != 0)
            break; /* "max" */
        *out = v;
        found = true;
    }
    fclose(f);
    return found;
}

/* Lowers *have to what one control group leaves; page cache counts as free. */
static void cgroup_level(const char *folder, bool v2, uint64_t *have) {
    char path[600];
    uint64_t limit, used, cache = 0;
    snprintf(path, sizeof path, "%s/%s", folder, v2 ? "memory.max" : "memory.limit_in_bytes");
    if (!file_number(path, NULL, &limit))
        return;
    snprintf(path, sizeof path, "%s/%s", folder, v2 ? "memory.current" : "memory.usage_in_bytes");
    if (!file_number(path, NULL, &used))
        return;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    file_number(path, v2 ? "inactive_file" : "total_inactive_file", &cache);
    used -= cache < used ? cache : used;
    uint64_t left = limit > used ? limit - used : 0;
    if (left < *have)
        *have = left;
}

/* All levels from this process's control group up to the root. */
static void cgroup_limits(uint64_t *have) {
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (f == NULL)
        return;
    char line[400], folder[500];
    while (fgets(line, sizeof line, f) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        bool v2 = strncmp(line, "0::/", 4) == 0;
        char *v1 = strstr(line, ":memory:/");
        if (!v2 && v1 == NULL)
            continue;
        snprintf(folder, sizeof folder, "%s%s", v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory",
                 v2 ? line + 3 : v1 + 8);
        size_t root = strlen(v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
        for (char *cut = folder + strlen(folder); cut != NULL; cut = strrchr(folder, '/')) {
            *cut = '\0';
            if (strlen(folder) < root)
                break;
            cgroup_level(folder, v2, have);
        }
    }
    fclose(f);
}

epo_status host_memory_check(uint64_t need, const char *what) {
    uint64_t have = UINT64_MAX, kib;
    if (need < HOST_CHECK_FROM)
        return EPO_OK;
    if (file_number("/proc/meminfo", "MemAvailable", &kib))
        have = kib * 1024;
    cgroup_limits(&have);
    if (need > have)
        return epo_fail(EPO_E_NOMEM, "%s: need %llu bytes, have %llu", what,
                        (unsigned long long)need, (unsigned long long)have);
    return EPO_OK;
}

/* ---- memory of operations -------------------------------------------------- */

void host_memory_count(epo_backend *be, int64_t bytes) {
    uint64_t now = atomic_fetch_add(&be->memory, (uint64_t)bytes) + (uint64_t)bytes;
    uint64_t peak = atomic_load(&be->memory_peak);
    while (bytes > 0 && now > peak && !atomic_compare_exchange_weak(&be->memory_peak, &peak, now))
        ;
}

epo_status host_alloc(epo_backend *be, uint64_t bytes, void **out) {
    if (bytes > SIZE_MAX - 64)
        return epo_fail(EPO_E_NOMEM, "memory: need %llu bytes, have an address space of %zu",
                        (unsigned long long)bytes, (size_t)SIZE_MAX);
    epo_status status = host_memory_check(bytes, "memory");
    if (status != EPO_OK)
        return status;
    void *ptr = NULL;
    if (posix_memalign(&ptr, 64, bytes > 0 ? (size_t)bytes : 64) != 0)
        return epo_fail(EPO_E_NOMEM, "memory: need %llu bytes, have less",
                        (unsigned long long)bytes);
    host_memory_count(be, (int64_t)bytes);
    *out = ptr;
    return EPO_OK;
}

void host_free(epo_backend *be, void *ptr, uint64_t bytes) {
    if (ptr == NULL)
        return;
    free(ptr);
    host_memory_count(be, -(int64_t)bytes);
}

epo_status host_map_private(uint64_t bytes, const char *what, void **out) {
    epo_status status = host_memory_check(bytes, what);
    if (status != EPO_OK)
        return status;
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return epo_fail(EPO_E_NOMEM, "%s: need %llu bytes, have less (%s)", what,
                        (unsigned long long)bytes, strerror(errno));
    *out = at;
    return EPO_OK;
}

/* ---- the shared block ------------------------------------------------------- */

uint64_t host_shared_bytes(int ranks) {
    return sizeof(host_shared) + 2 * (uint64_t)ranks * HOST_SCRATCH;
}

void host_shared_init(host_shared *shared, int ranks, bool threads) {
    shared->ranks = ranks;
    shared->threads = threads;
    if (threads)
        return;
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    for (int r = 0; r < ranks; r++)
        pthread_mutex_init(&shared->peer[r].alive, &attr);
    pthread_mutexattr_destroy(&attr);
}
