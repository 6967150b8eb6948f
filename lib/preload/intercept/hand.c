/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "preload/intercept/hand.h"

#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define FABRIC_BYTES 64
#define NAME_AT offsetof(struct sockaddr_un, sun_path)

typedef union control { /* of one message: descriptors and who sends them */
    struct cmsghdr header;
    char bytes[CMSG_SPACE(HAND_PIECES * sizeof(int)) + CMSG_SPACE(sizeof(struct ucred))];
} control;

/* The kernel gives it a name that nobody has (an abstract one: a zero and five digits). */
int hand_open(char name[AGREE_SOCKET]) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    socklen_t size = sizeof at;
    const int one = 1, s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    memset(name, 0, AGREE_SOCKET);
    if (s < 0)
        return -1;
    if (setsockopt(s, SOL_SOCKET, SO_PASSCRED, &one, sizeof one) != 0 ||
        bind(s, (struct sockaddr *)&at, sizeof at.sun_family) != 0 ||
        getsockname(s, (struct sockaddr *)&at, &size) != 0 || size <= NAME_AT + 1 ||
        size - NAME_AT >= AGREE_SOCKET) {
        close(s);
        return -1;
    }
    name[0] = (char)(size - NAME_AT);
    memcpy(name + 1, at.sun_path, size - NAME_AT);
    return s;
}

bool hand_give(int socket_, const char name[AGREE_SOCKET], const hand_stretch *s,
               const void *handles) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    control c = {.bytes = {0}};
    const size_t length = (unsigned char)name[0], carried = s->count * sizeof(int);
    const bool fabric = s->kind == CU_HANDLE_FABRIC;
    struct iovec parts[2] = {{(void *)(uintptr_t)s, sizeof *s},
                             {(void *)(uintptr_t)handles, fabric ? s->count * FABRIC_BYTES : 0}};
    struct msghdr m = {.msg_name = &to, .msg_iov = parts, .msg_iovlen = 2};
    if (length == 0 || length >= AGREE_SOCKET || s->count == 0 || s->count > HAND_PIECES)
        return false;
    memcpy(to.sun_path, name + 1, length);
    m.msg_namelen = (socklen_t)(NAME_AT + length);
    if (!fabric) {
        m.msg_control = &c;
        m.msg_controllen = CMSG_SPACE(carried);
        struct cmsghdr *h = CMSG_FIRSTHDR(&m);
        *h = (struct cmsghdr){
            .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(carried)};
        memcpy(CMSG_DATA(h), handles, carried);
    }
    return sendmsg(socket_, &m, MSG_DONTWAIT | MSG_NOSIGNAL) > 0;
}

/* The descriptors that came, and whether this user sent them. */
static uint32_t descriptors(struct msghdr *m, int *to, bool *ours) {
    uint32_t count = 0;
    *ours = false;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h != NULL; h = CMSG_NXTHDR(m, h)) {
        if (h->cmsg_level != SOL_SOCKET)
            continue;
        if (h->cmsg_type == SCM_CREDENTIALS && h->cmsg_len >= CMSG_LEN(sizeof(struct ucred))) {
            struct ucred who;
            memcpy(&who, CMSG_DATA(h), sizeof who);
            *ours = who.uid == geteuid();
        } else if (h->cmsg_type == SCM_RIGHTS) {
            count = (uint32_t)((h->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            memcpy(to, CMSG_DATA(h), count * sizeof(int));
        }
    }
    return count;
}

/* Whether what came is what it says. */
static bool is_whole(const hand_stretch *s, size_t bytes, uint32_t carried) {
    const uint32_t n = s->count;
    return bytes >= sizeof *s && n > 0 && n <= HAND_PIECES &&
           (s->kind == CU_HANDLE_FABRIC
                ? carried == 0 && bytes == sizeof *s + (size_t)n * FABRIC_BYTES
                : s->kind == CU_HANDLE_DESCRIPTOR && carried == n && bytes == sizeof *s);
}

bool hand_take(int socket_, hand_stretch *s, void *handles) {
    for (;;) {
        int got[sizeof(control) / sizeof(int)];
        control c = {.bytes = {0}};
        struct iovec parts[2] = {{s, sizeof *s}, {handles, (size_t)HAND_PIECES * FABRIC_BYTES}};
        struct msghdr m = {
            .msg_iov = parts, .msg_iovlen = 2, .msg_control = &c, .msg_controllen = sizeof c};
        bool ours;
        const ssize_t n = recvmsg(socket_, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (n < 0)
            return false;
        const uint32_t carried = descriptors(&m, got, &ours);
        if (ours && (m.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) == 0 &&
            is_whole(s, (size_t)n, carried)) {
            if (carried > 0)
                memcpy(handles, got, carried * sizeof(int));
            return true;
        }
        for (uint32_t i = 0; i < carried; i++)
            close(got[i]);
    }
}
