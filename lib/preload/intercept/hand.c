/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "preload/intercept/hand.h"

#include <errno.h>
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

/* Nothing more can be had: of this process, of the node, on their way to others. */
static fallback why_not(int error) {
    return error == EMFILE || error == ENFILE || error == ETOOMANYREFS ? FALLBACK_FILES
                                                                       : FALLBACK_UNTAKEN;
}

/* One end, in `k`.  0, or the error. */
static int socket_make(int *s, kept *k) {
    sigset_t before;
    kept_lock(&before);
    *s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const int error = *s < 0 ? errno : 0;
    kept_add(k, s, 1);
    kept_unlock(&before);
    return error;
}

bool hand_is_full(void) {
    kept k;
    int one;
    const int error = socket_make(&one, &k);
    kept_close(&k);
    return error != 0 && why_not(error) == FALLBACK_FILES;
}

/* To whoever has that name now, if it is this user: the rank that had it may be gone. */
static bool reach(int s, const char name[AGREE_SOCKET]) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    const size_t length = (unsigned char)name[0];
    if (length == 0 || length >= AGREE_SOCKET)
        return false;
    memcpy(to.sun_path, name + 1, length);
    return connect(s, (struct sockaddr *)&to, (socklen_t)(NAME_AT + length)) == 0 && is_ours(s);
}

fallback hand_give(const char name[AGREE_SOCKET], const hand_stretch *s, const void *handles) {
    control c = {.bytes = {0}};
    const size_t carried = s->count * sizeof(int);
    const bool fabric = s->kind == CU_HANDLE_FABRIC;
    struct iovec parts[2] = {
        {(void *)(uintptr_t)s, sizeof *s},
        {(void *)(uintptr_t)handles, fabric ? s->count * HAND_FABRIC_BYTES : 0}};
    struct msghdr m = {.msg_iov = parts, .msg_iovlen = 2};
    kept k;
    int to;
    if (s->count == 0 || s->count > HAND_PIECES)
        return FALLBACK_MEMORY;
    if (!fabric) {
        m.msg_control = &c;
        m.msg_controllen = CMSG_SPACE(carried);
        struct cmsghdr *h = CMSG_FIRSTHDR(&m);
        *h = (struct cmsghdr){
            .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(carried)};
        memcpy(CMSG_DATA(h), handles, carried);
    }
    const int error = socket_make(&to, &k);
    fallback why = error != 0 ? why_not(error) : FALLBACK_UNTAKEN;
    if (error == 0 && reach(to, name))
        why = sendmsg(to, &m, MSG_DONTWAIT | MSG_NOSIGNAL) > 0 ? FALLBACK_NONE : why_not(errno);
    kept_close(&k);
    return why;
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

/* Whether there is room here for so few descriptors only. */
static bool is_short(const hand_stretch *s, const struct msghdr *m, size_t bytes,
                     uint32_t carried) {
    return (m->msg_flags & (MSG_CTRUNC | MSG_TRUNC)) == MSG_CTRUNC && carried < s->count &&
           is_whole(s, bytes, s->count);
}

/* What one of this user's has sent.  Locked, from which on they may be here. */
static hand_result take_from(int connection, hand_stretch *s, void *handles, kept *k) {
    int got[sizeof(control) / sizeof(int)];
    control c = {.bytes = {0}};
    struct iovec parts[2] = {{s, sizeof *s}, {handles, (size_t)HAND_PIECES * HAND_FABRIC_BYTES}};
    struct msghdr m = {
        .msg_iov = parts, .msg_iovlen = 2, .msg_control = &c, .msg_controllen = sizeof c};
    const ssize_t n = recvmsg(connection, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0)
        return HAND_NONE;
    const uint32_t carried = descriptors(&m, got);
    if ((m.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) == 0 && is_whole(s, (size_t)n, carried)) {
        if (carried > 0) {
            memcpy(handles, got, carried * sizeof(int));
            kept_add(k, handles, carried);
        }
        return HAND_TAKEN;
    }
    for (uint32_t i = 0; i < carried; i++)
        close(got[i]);
    return is_short(s, &m, (size_t)n, carried) ? HAND_FILES : HAND_NONE;
}

/* What it sends, or is about to. */
static hand_result hear(int connection, hand_stretch *s, void *handles, kept *k) {
    struct pollfd there = {.fd = connection, .events = POLLIN};
    sigset_t before;
    if (!is_ours(connection) || poll(&there, 1, SEND_LIMIT_MS) != 1)
        return HAND_NONE;
    kept_lock(&before);
    const hand_result r = take_from(connection, s, handles, k);
    kept_unlock(&before);
    return r;
}

/* The next connection, in `k`. */
static int accept_one(int socket_, int *connection, kept *k) {
    sigset_t before;
    kept_lock(&before);
    *connection = accept4(socket_, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    const int error = *connection < 0 ? errno : 0;
    kept_add(k, connection, 1);
    kept_unlock(&before);
    return error;
}

hand_result hand_take(int socket_, hand_stretch *s, void *handles, kept *k) {
    hand_result r = HAND_NONE;
    for (int i = 0; i <= QUEUE && r == HAND_NONE; i++) { /* (a stranger may come again and again) */
        kept connection;
        int from;
        const int error = accept_one(socket_, &from, &connection);
        *k = (kept){.count = 0};
        s->count = 0;
        if (error == 0)
            r = hear(from, s, handles, k);
        kept_close(&connection);
        if (error != 0)
            return why_not(error) == FALLBACK_FILES ? HAND_FILES : HAND_NONE;
    }
    return r;
}
