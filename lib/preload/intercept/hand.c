/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "preload/intercept/hand.h"

#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define QUEUE 64         /* that wait to be taken */
#define SEND_LIMIT_MS 10 /* from a connection to what it is made for */
#define NAME_AT offsetof(struct sockaddr_un, sun_path)

typedef union control { /* of one message: its descriptors */
    struct cmsghdr header;
    char bytes[CMSG_SPACE(HAND_PIECES * sizeof(int))];
} control;

/* The other end of a connection is a process of this user. */
static bool is_ours(int connection) {
    struct ucred who;
    socklen_t size = sizeof who;
    return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 &&
           size == sizeof who && who.uid == geteuid();
}

/* The kernel gives it a name that nobody has (an abstract one: a zero and five digits). */
int hand_open(char name[AGREE_SOCKET]) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    socklen_t size = sizeof at;
    const int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    memset(name, 0, AGREE_SOCKET);
    if (s < 0)
        return -1;
    if (bind(s, (struct sockaddr *)&at, sizeof at.sun_family) != 0 || listen(s, QUEUE) != 0 ||
        getsockname(s, (struct sockaddr *)&at, &size) != 0 || size <= NAME_AT + 1 ||
        size - NAME_AT >= AGREE_SOCKET) {
        close(s);
        return -1;
    }
    name[0] = (char)(size - NAME_AT);
    memcpy(name + 1, at.sun_path, size - NAME_AT);
    return s;
}

/* To whoever has that name now, if it is this user: the rank that had it may be gone.  -1: no. */
static int reach(const char name[AGREE_SOCKET]) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    const size_t length = (unsigned char)name[0];
    if (length == 0 || length >= AGREE_SOCKET)
        return -1;
    memcpy(to.sun_path, name + 1, length);
    const int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s >= 0 && connect(s, (struct sockaddr *)&to, (socklen_t)(NAME_AT + length)) == 0 &&
        is_ours(s))
        return s;
    if (s >= 0)
        close(s);
    return -1;
}

bool hand_give(const char name[AGREE_SOCKET], const hand_stretch *s, const void *handles) {
    control c = {.bytes = {0}};
    const size_t carried = s->count * sizeof(int);
    const bool fabric = s->kind == CU_HANDLE_FABRIC;
    struct iovec parts[2] = {
        {(void *)(uintptr_t)s, sizeof *s},
        {(void *)(uintptr_t)handles, fabric ? s->count * HAND_FABRIC_BYTES : 0}};
    struct msghdr m = {.msg_iov = parts, .msg_iovlen = 2};
    const int to = s->count > 0 && s->count <= HAND_PIECES ? reach(name) : -1;
    if (to < 0)
        return false;
    if (!fabric) {
        m.msg_control = &c;
        m.msg_controllen = CMSG_SPACE(carried);
        struct cmsghdr *h = CMSG_FIRSTHDR(&m);
        *h = (struct cmsghdr){
            .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(carried)};
        memcpy(CMSG_DATA(h), handles, carried);
    }
    const bool sent = sendmsg(to, &m, MSG_DONTWAIT | MSG_NOSIGNAL) > 0;
    close(to);
    return sent;
}

/* The descriptors that came. */
static uint32_t descriptors(struct msghdr *m, int *to) {
    uint32_t count = 0;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h != NULL; h = CMSG_NXTHDR(m, h))
        if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS) {
            count = (uint32_t)((h->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            memcpy(to, CMSG_DATA(h), count * sizeof(int));
        }
    return count;
}

/* Whether what came is what it says. */
static bool is_whole(const hand_stretch *s, size_t bytes, uint32_t carried) {
    const uint32_t n = s->count;
    return bytes >= sizeof *s && n > 0 && n <= HAND_PIECES &&
           (s->kind == CU_HANDLE_FABRIC
                ? carried == 0 && bytes == sizeof *s + (size_t)n * HAND_FABRIC_BYTES
                : s->kind == CU_HANDLE_DESCRIPTOR && carried == n && bytes == sizeof *s);
}

/* What one of this user's has sent, or is about to. */
static bool take_from(int connection, hand_stretch *s, void *handles) {
    int got[sizeof(control) / sizeof(int)];
    control c = {.bytes = {0}};
    struct iovec parts[2] = {{s, sizeof *s}, {handles, (size_t)HAND_PIECES * HAND_FABRIC_BYTES}};
    struct msghdr m = {
        .msg_iov = parts, .msg_iovlen = 2, .msg_control = &c, .msg_controllen = sizeof c};
    struct pollfd there = {.fd = connection, .events = POLLIN};
    const ssize_t n = poll(&there, 1, SEND_LIMIT_MS) == 1
                          ? recvmsg(connection, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC)
                          : -1;
    if (n < 0)
        return false;
    const uint32_t carried = descriptors(&m, got);
    if ((m.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) == 0 && is_whole(s, (size_t)n, carried)) {
        if (carried > 0)
            memcpy(handles, got, carried * sizeof(int));
        return true;
    }
    for (uint32_t i = 0; i < carried; i++)
        close(got[i]);
    return false;
}

bool hand_take(int socket_, hand_stretch *s, void *handles) {
    for (int i = 0; i <= QUEUE; i++) { /* (a stranger may come again and again) */
        const int from = accept4(socket_, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (from < 0)
            return false;
        const bool taken = is_ours(from) && take_from(from, s, handles);
        close(from);
        if (taken)
            return true;
    }
    return false;
}
