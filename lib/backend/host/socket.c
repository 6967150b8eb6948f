/* SPDX-License-Identifier: Apache-2.0
 *
 * socket.c - abstract Unix sockets of one user: no file, nothing to clean up.
 */
#include "config.h"

#include "backend/host/join.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* Of other users, turned away at a time: who keeps coming must not keep rank 0 from its limit. */
#define SOCKET_STRANGERS 64

static socklen_t address_make(const host_name *name, int suffix, struct sockaddr_un *out) {
    memset(out, 0, sizeof *out);
    out->sun_family = AF_UNIX;
    int n = snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "ep-overlap.%u.%016llx.%d",
                     (unsigned)geteuid(), (unsigned long long)name->key, suffix);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static int socket_new(void) {
    return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

/* The process at the other end is of this user. */
static bool socket_ours(int fd, int *pid) {
    struct ucred cred;
    socklen_t size = sizeof cred;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &size) != 0 || cred.uid != geteuid())
        return false;
    if (pid != NULL)
        *pid = (int)cred.pid;
    return true;
}

static int connect_one(const host_name *name, int suffix, int *pid) {
    struct sockaddr_un address;
    socklen_t length = address_make(name, suffix, &address);
    int fd = socket_new();
    if (fd < 0)
        return -1;
    if (connect(fd, (struct sockaddr *)&address, length) == 0 && socket_ours(fd, pid))
        return fd;
    close(fd);
    errno = ECONNREFUSED;
    return -1;
}

bool host_socket_starved(void) {
    return errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
}

epo_status host_socket_listen(host_name *name, int *fd, int *holder) {
    struct sockaddr_un address;
    for (name->suffix = 0; name->suffix < HOST_SUFFIXES; name->suffix++) {
        socklen_t length = address_make(name, name->suffix, &address);
        int s = socket_new();
        if (s < 0)
            return epo_fail(EPO_E_SYSTEM, "a Unix socket: %s", strerror(errno));
        if (bind(s, (struct sockaddr *)&address, length) == 0 && listen(s, 128) == 0) {
            *fd = s;
            return EPO_OK;
        }
        int why = errno;
        close(s);
        if (why != EADDRINUSE)
            return epo_fail(EPO_E_SYSTEM, "a Unix socket to meet the other ranks: %s",
                            strerror(why));
        int held = connect_one(name, name->suffix, holder);
        if (held >= 0) {
            close(held);
            return EPO_E_STATE;
        }
    }
    return epo_fail(EPO_E_SYSTEM,
                    "all %d names under which the ranks could meet are taken by other users",
                    HOST_SUFFIXES);
}

int host_socket_connect(const host_name *name, int *pid) {
    int fd = -1;
    for (int suffix = 0; suffix < HOST_SUFFIXES && fd < 0; suffix++)
        fd = connect_one(name, suffix, pid); /* errno: the last one's */
    return fd;
}

int host_socket_accept(int listener) {
    for (int strangers = 0; strangers < SOCKET_STRANGERS; strangers++) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
            continue;
        if (fd < 0 || socket_ours(fd, NULL))
            return fd;
        close(fd);
    }
    errno = EAGAIN;
    return -1;
}

bool host_socket_send(int fd, const void *data, size_t size, int descriptor) {
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    memset(&control, 0, sizeof control);
    struct iovec part = {(void *)(uintptr_t)data, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (descriptor >= 0) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &descriptor, sizeof descriptor);
    }
    ssize_t n;
    do
        n = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)size;
}

/* The one descriptor that came; of several, which nobody of ours sends, none. */
static int descriptor_take(struct msghdr *message) {
    int fd = -1, count = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c != NULL; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t at = 0; CMSG_LEN(at + sizeof fd) <= c->cmsg_len; at += sizeof fd) {
            if (count++ > 0)
                close(fd);
            memcpy(&fd, CMSG_DATA(c) + at, sizeof fd);
        }
    }
    if (count < 2)
        return fd;
    close(fd);
    return -1;
}

/* A longer message is cut; -2: nothing there, else the bytes, 0 at the end. */
static ssize_t receive_some(int fd, void *data, size_t size, int *descriptor) {
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {data, size};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    ssize_t n;
    do
        n = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    *descriptor = n >= 0 ? descriptor_take(&message) : -1; /* one may come with no bytes */
    if (n < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? -2 : -1;
    return n;
}

int host_socket_receive(int fd, void *data, size_t size, int *descriptor) {
    int taken = -1;
    ssize_t n = receive_some(fd, data, size, &taken);
    bool good = n == (ssize_t)size;
    if (taken >= 0 && (!good || descriptor == NULL)) {
        close(taken);
        taken = -1;
    }
    if (descriptor != NULL)
        *descriptor = taken;
    return good ? 1 : n == -2 ? 0 : -1;
}

int host_socket_hello(int fd, host_hello *out) {
    int taken = -1;
    memset(out, 0, sizeof *out);
    ssize_t n = receive_some(fd, out, sizeof *out, &taken);
    if (taken >= 0)
        close(taken);
    if (n == -2)
        return 0;
    if (n < (ssize_t)offsetof(host_hello, rank) || out->magic != HOST_MAGIC)
        return -1;
    out->version[sizeof out->version - 1] = '\0';
    out->boot[sizeof out->boot - 1] = '\0';
    out->node[sizeof out->node - 1] = '\0';
    out->why[sizeof out->why - 1] = '\0';
    return 1;
}
