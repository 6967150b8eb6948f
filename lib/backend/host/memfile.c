/* SPDX-License-Identifier: Apache-2.0
 *
 * memfile.c - memory that processes share.  It never has a name that outlives a
 * call, so nothing is left behind however the processes end.
 */
#include "config.h"

#include "backend/host/join.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

static int memfile_named(void) {
    char name[48];
    uint64_t r[2];
    if (getrandom(r, sizeof r, 0) != (ssize_t)sizeof r)
        return -1;
    snprintf(name, sizeof name, "/ep-overlap.%016llx%016llx", (unsigned long long)r[0],
             (unsigned long long)r[1]);
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd >= 0)
        shm_unlink(name);
    return fd;
}

epo_status host_memfile_create(uint64_t bytes, bool named, int *out) {
    int fd = -1;
    if (!named)
        fd = memfd_create("ep-overlap", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bool sealed = fd >= 0;
    if (fd < 0)
        fd = memfile_named();
    if (fd < 0)
        return epo_fail(EPO_E_SYSTEM, "shared memory: %s", strerror(errno));
    int why = fchmod(fd, 0600) != 0 || ftruncate(fd, (off_t)bytes) != 0 ? errno : 0;
    if (why == 0 && !sealed) /* /dev/shm may be small: told here, not by SIGBUS at a write */
        why = posix_fallocate(fd, 0, (off_t)bytes);
    if (why != 0) {
        close(fd);
        return epo_fail(EPO_E_NOMEM, "shared memory: need %llu bytes, have less (%s)",
                        (unsigned long long)bytes, strerror(why));
    }
    if (sealed)
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    *out = fd;
    return EPO_OK;
}

static epo_status descriptor_lost(void) {
    return epo_fail(EPO_E_SYSTEM, "shared memory that came from rank 0: its descriptor was lost; "
                                  "this process may have too many open (ulimit -n)");
}

epo_status host_memfile_map(int fd, uint64_t bytes, void **out) {
    struct stat st;
    if (fd < 0)
        return descriptor_lost();
    if (fstat(fd, &st) != 0 || (uint64_t)st.st_size != bytes)
        return epo_fail(EPO_E_SYSTEM,
                        "shared memory that came from rank 0: not a file of %llu bytes",
                        (unsigned long long)bytes);
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        return epo_fail(EPO_E_NOMEM, "shared memory: need %llu bytes, have less (%s)",
                        (unsigned long long)bytes, strerror(errno));
    *out = at;
    return EPO_OK;
}

epo_status host_memfile_give(const struct host_join *join, uint64_t bytes, uint64_t number,
                             int *fd) {
    epo_status status = host_memory_check(bytes, "windows of all ranks");
    if (status == EPO_OK)
        status = host_memfile_create(bytes, false, fd);
    for (int r = 1; r < join->ranks && status == EPO_OK; r++)
        if (!host_socket_send(join->fd[r], &number, sizeof number, *fd))
            status = epo_fail(EPO_E_PEER, "rank %d does not take the window's memory: %s", r,
                              strerror(errno));
    return status;
}

epo_status host_memfile_take(const struct host_join *join, uint64_t number, int *fd) {
    for (;;) { /* what an earlier, failed call has left is passed over */
        uint64_t got = 0;
        int rc = host_socket_receive(join->fd[0], &got, sizeof got, fd);
        if (rc <= 0)
            return epo_fail(EPO_E_PEER, "rank %d: rank 0 sent no memory for the window",
                            join->rank);
        if (got == number)
            return *fd >= 0 ? EPO_OK : descriptor_lost();
        if (*fd >= 0)
            close(*fd);
        *fd = -1;
    }
}

epo_status host_memfile_share(epo_backend *be, uint64_t bytes, void **out) {
    int fd = -1;
    void *at = NULL;
    uint64_t number = be->barriers;
    epo_status status =
        host_agree(be, be->rank == 0 ? host_memfile_give(be->join, bytes, number, &fd) : EPO_OK);
    if (status == EPO_OK) {
        if (be->rank != 0)
            status = host_memfile_take(be->join, number, &fd);
        if (status == EPO_OK)
            status = host_memfile_map(fd, bytes, &at);
        status = host_agree(be, status);
    }
    if (fd >= 0)
        close(fd);
    if (status != EPO_OK) {
        if (at != NULL)
            munmap(at, bytes);
        return status;
    }
    *out = at;
    return EPO_OK;
}
