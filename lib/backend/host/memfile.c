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
    if (fchmod(fd, 0600) != 0 || ftruncate(fd, (off_t)bytes) != 0) {
        int why = errno;
        close(fd);
        return epo_fail(EPO_E_NOMEM, "shared memory: need %llu bytes, have less (%s)",
                        (unsigned long long)bytes, strerror(why));
    }
    if (sealed)
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    *out = fd;
    return EPO_OK;
}

epo_status host_memfile_map(int fd, uint64_t bytes, void **out) {
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0 || (uint64_t)st.st_size != bytes)
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

/* Rank 0 has sent before it agrees, so what others look for is there already. */
static epo_status memfile_hand_out(epo_backend *be, uint64_t bytes, uint64_t number, int *fd) {
    epo_status status = host_memory_check(bytes, "windows of all ranks");
    if (status == EPO_OK)
        status = host_memfile_create(bytes, false, fd);
    for (int r = 1; r < be->ranks && status == EPO_OK; r++)
        if (!host_socket_send(be->join->fd[r], &number, sizeof number, *fd))
            status = epo_fail(EPO_E_PEER, "rank %d does not take the window's memory: %s", r,
                              strerror(errno));
    return status;
}

static epo_status memfile_take(epo_backend *be, uint64_t number, int *fd) {
    for (;;) { /* what an earlier, failed call has left is passed over */
        uint64_t got = 0;
        int rc = host_socket_receive(be->join->fd[0], &got, sizeof got, fd);
        if (rc <= 0)
            return epo_fail(EPO_E_PEER, "rank %d: rank 0 sent no memory for the window", be->rank);
        if (got == number && *fd >= 0)
            return EPO_OK;
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
        host_agree(be, be->rank == 0 ? memfile_hand_out(be, bytes, number, &fd) : EPO_OK);
    if (status == EPO_OK) {
        if (be->rank != 0)
            status = memfile_take(be, number, &fd);
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
