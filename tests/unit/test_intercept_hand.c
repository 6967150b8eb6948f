/* SPDX-License-Identifier: Apache-2.0
 *
 * Descriptors from one end to the other: what is handed over arrives, once and in its order; what
 * is not ours, or is not whole, is dropped with its descriptors, and nothing waits.
 */
#include "config.h"

#include "unit.h"

#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "preload/intercept/hand.h"

static char handles[HAND_PIECES * 64];
static hand_stretch got;

static int count_open(void) {
    int n = 0;
    for (int fd = 0; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

static hand_stretch stretch(uint64_t id, uint32_t kind, uint32_t count) {
    hand_stretch s = {.room = {id + 1, id + 2}, .id = id, .kind = kind, .count = count};
    for (uint32_t i = 0; i < count && i < HAND_PIECES; i++)
        s.bytes[i] = id * 1000 + i;
    return s;
}

static bool is_same(const hand_stretch *a, const hand_stretch *b) {
    return a->id == b->id && a->kind == b->kind && a->count == b->count &&
           memcmp(a->room, b->room, sizeof a->room) == 0 &&
           memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

static ino_t file_of(int fd) {
    struct stat st;
    return fstat(fd, &st) == 0 ? st.st_ino : 0;
}

static void descriptors_arrive(void) {
    char to_name[AGREE_SOCKET];
    const int to = hand_open(to_name), before = count_open();
    int files[HAND_PIECES];
    CU_ASSERT_TRUE_FATAL(to >= 0);
    for (int i = 0; i < HAND_PIECES; i++)
        files[i] = memfd_create("piece", MFD_CLOEXEC);
    for (uint32_t count = 1; count <= HAND_PIECES; count += 239) {
        const hand_stretch s = stretch(count, CU_HANDLE_DESCRIPTOR, count);
        CU_ASSERT_TRUE(hand_give(to_name, &s, files));
        CU_ASSERT_TRUE(hand_take(to, &got, handles));
        CU_ASSERT_TRUE(is_same(&s, &got));
        for (uint32_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, handles + i * sizeof fd, sizeof fd);
            CU_ASSERT_TRUE(file_of(fd) == file_of(files[i]));
            CU_ASSERT_TRUE((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
            close(fd);
        }
    }
    CU_ASSERT_FALSE(hand_take(to, &got, handles));
    for (int i = 0; i < HAND_PIECES; i++)
        close(files[i]);
    CU_ASSERT_EQUAL(count_open(), before);
    close(to);
}

static void fabric_handles_arrive(void) {
    char name[AGREE_SOCKET], given[HAND_PIECES * 64];
    const int end = hand_open(name);
    const hand_stretch s = stretch(9, CU_HANDLE_FABRIC, HAND_PIECES);
    for (size_t i = 0; i < sizeof given; i++)
        given[i] = (char)(i * 7);
    CU_ASSERT_TRUE(hand_give(name, &s, given));
    CU_ASSERT_TRUE(hand_take(end, &got, handles) && is_same(&s, &got));
    CU_ASSERT_EQUAL(memcmp(given, handles, sizeof given), 0);
    close(end);
}

static void what_does_not_go(void) {
    char name[AGREE_SOCKET], none[AGREE_SOCKET] = {0};
    const int end = hand_open(name), other = hand_open(none);
    hand_stretch s = stretch(1, CU_HANDLE_DESCRIPTOR, 1);
    close(other); /* nobody has that name any more */
    CU_ASSERT_FALSE(hand_give(none, &s, &end));
    memset(none, 0, sizeof none);
    CU_ASSERT_FALSE(hand_give(none, &s, &end));
    s.count = 0;
    CU_ASSERT_FALSE(hand_give(name, &s, &end));
    s.count = HAND_PIECES + 1;
    CU_ASSERT_FALSE(hand_give(name, &s, &end));
    CU_ASSERT_FALSE(hand_take(end, &got, handles));
    close(end);
}

/* Nobody takes: the queue is full at some time, and then it does not go. */
static void a_full_queue(void) {
    char name[AGREE_SOCKET];
    const int end = hand_open(name), before = count_open();
    const hand_stretch s = stretch(3, CU_HANDLE_DESCRIPTOR, 1);
    int given = 0, taken = 0;
    while (given < 100000 && hand_give(name, &s, &end))
        given++;
    CU_ASSERT_TRUE(given > 0 && given < 100000);
    while (hand_take(end, &got, handles)) {
        int fd;
        memcpy(&fd, handles, sizeof fd);
        close(fd);
        taken++;
    }
    CU_ASSERT_EQUAL(taken, given);
    CU_ASSERT_EQUAL(count_open(), before);
    close(end);
}

static int connect_raw(const char *name) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    const socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)name[0]);
    const int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    memcpy(to.sun_path, name + 1, (size_t)name[0]);
    return connect(s, (struct sockaddr *)&to, size) == 0 ? s : -1;
}

static bool send_raw(const char *name, const void *bytes, size_t count, const int *fds,
                     size_t descriptors) {
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(4 * sizeof(int))];
    } c = {.bytes = {0}};
    struct iovec part = {(void *)(uintptr_t)bytes, count};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    const int from = connect_raw(name);
    if (descriptors > 0) {
        m.msg_control = &c;
        m.msg_controllen = CMSG_SPACE(descriptors * sizeof(int));
        struct cmsghdr *h = CMSG_FIRSTHDR(&m);
        *h = (struct cmsghdr){.cmsg_level = SOL_SOCKET,
                              .cmsg_type = SCM_RIGHTS,
                              .cmsg_len = CMSG_LEN(descriptors * sizeof(int))};
        memcpy(CMSG_DATA(h), fds, descriptors * sizeof(int));
    }
    const bool sent = sendmsg(from, &m, 0) == (ssize_t)count;
    close(from);
    return sent;
}

/* Cut off, too long, with other descriptors than it says, of a kind that there is not. */
static void what_is_not_whole(void) {
    char name[AGREE_SOCKET];
    const int end = hand_open(name), before = count_open();
    const int fds[4] = {end, 0, end, 0};
    hand_stretch s[4] = {stretch(1, CU_HANDLE_DESCRIPTOR, 2), stretch(2, CU_HANDLE_FABRIC, 1),
                         stretch(3, 2, 1), stretch(4, CU_HANDLE_DESCRIPTOR, UINT32_MAX)};
    char *big = calloc(1, 60000);
    CU_ASSERT_TRUE(send_raw(name, s, 5, fds, 2));
    CU_ASSERT_TRUE(send_raw(name, s, sizeof s[0] - 1, fds, 2));
    CU_ASSERT_TRUE(send_raw(name, s, sizeof s[0], fds, 1));
    CU_ASSERT_TRUE(send_raw(name, s, sizeof s[0], fds, 4));
    CU_ASSERT_TRUE(send_raw(name, s, sizeof s[0], fds, 0));
    CU_ASSERT_TRUE(send_raw(name, &s[1], sizeof s[0], fds, 0));
    CU_ASSERT_TRUE(send_raw(name, &s[1], sizeof s[0] + 64, fds, 1));
    CU_ASSERT_TRUE(send_raw(name, &s[2], sizeof s[0], fds, 1));
    CU_ASSERT_TRUE(send_raw(name, &s[3], sizeof s[0], fds, 1));
    CU_ASSERT_FALSE(hand_take(end, &got, handles));
    memcpy(big, s, sizeof s[0]);
    CU_ASSERT_TRUE(send_raw(name, big, 60000, fds, 2));
    CU_ASSERT_TRUE(hand_give(name, &s[0], fds)); /* behind it */
    CU_ASSERT_TRUE(hand_take(end, &got, handles) && is_same(&s[0], &got));
    for (int i = 0; i < 2; i++) {
        int fd;
        memcpy(&fd, handles + (size_t)i * sizeof fd, sizeof fd);
        close(fd);
    }
    CU_ASSERT_EQUAL(count_open(), before);
    free(big);
    close(end);
}

/* One of ours that connects and says nothing holds nobody up. */
static void a_silent_one(void) {
    char name[AGREE_SOCKET];
    const int end = hand_open(name), before = count_open(), silent = connect_raw(name);
    const hand_stretch s = stretch(6, CU_HANDLE_FABRIC, 1);
    CU_ASSERT_TRUE(silent >= 0 && hand_give(name, &s, handles));
    CU_ASSERT_TRUE(hand_take(end, &got, handles) && is_same(&s, &got));
    CU_ASSERT_FALSE(hand_take(end, &got, handles));
    close(silent);
    CU_ASSERT_EQUAL(count_open(), before);
    close(end);
}

/* Another user's process, which is kept from nothing but being heard. */
static void a_stranger(void) {
    char name[AGREE_SOCKET];
    const int end = hand_open(name), before = count_open();
    const hand_stretch s = stretch(5, CU_HANDLE_DESCRIPTOR, 1);
    int status = -1;
    if (geteuid() != 0) {
        printf("(left out: needs root to be somebody else) ");
        close(end);
        return;
    }
    const pid_t other = fork();
    if (other == 0)
        _exit(setuid(65534) != 0 || !send_raw(name, &s, sizeof s, &end, 1));
    CU_ASSERT_TRUE(waitpid(other, &status, 0) == other && status == 0);
    CU_ASSERT_FALSE(hand_take(end, &got, handles));
    CU_ASSERT_EQUAL(count_open(), before);
    close(end);
}

/* Another user has the name that a rank has left: he gets nothing. */
static void a_stranger_has_the_name(void) {
    char name[AGREE_SOCKET];
    int ready[2], gone[2], status = -1;
    const int before = count_open();
    const hand_stretch s = stretch(7, CU_HANDLE_DESCRIPTOR, 1);
    if (geteuid() != 0) {
        printf("(left out: needs root to be somebody else) ");
        return;
    }
    CU_ASSERT_FATAL(pipe(ready) == 0 && pipe(gone) == 0);
    const pid_t other = fork();
    if (other == 0) {
        const int end = setuid(65534) == 0 ? hand_open(name) : -1;
        close(gone[1]);
        const bool told = end >= 0 && write(ready[1], name, sizeof name) == sizeof name;
        const bool waited = read(gone[0], name, 1) == 0;
        const int came = accept(end, NULL, NULL);
        _exit(!told || !waited || (came >= 0 && recv(came, &got, sizeof got, MSG_DONTWAIT) > 0));
    }
    CU_ASSERT_TRUE(read(ready[0], name, sizeof name) == sizeof name);
    CU_ASSERT_FALSE(hand_give(name, &s, ready));
    close(gone[1]);
    CU_ASSERT_TRUE(waitpid(other, &status, 0) == other && status == 0);
    close(gone[0]);
    close(ready[0]);
    close(ready[1]);
    CU_ASSERT_EQUAL(count_open(), before);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"descriptors", descriptors_arrive},
        {"fabric handles", fabric_handles_arrive},
        {"what does not go", what_does_not_go},
        {"a full queue", a_full_queue},
        {"a silent one", a_silent_one},
        {"a stranger", a_stranger},
        {"a stranger has the name", a_stranger_has_the_name},
        {"what is not whole", what_is_not_whole},
        CU_TEST_INFO_NULL,
    };
    return unit_run("interposer: handing over", tests);
}
