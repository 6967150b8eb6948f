/* SPDX-License-Identifier: Apache-2.0
 *
 * Descriptors from one end to the other: what is handed over arrives, once and in its order; what
 * is not ours, or is not whole, is dropped with its descriptors, and nothing waits.
 */
#include "config.h"

#include "unit.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "preload/intercept/hand.h"

static char handles[HAND_PIECES * 64];
static hand_stretch got;
static kept came;

static bool take(int end) { return hand_take(end, &got, handles, &came) == HAND_TAKEN; }

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
        CU_ASSERT_EQUAL(hand_give(to_name, &s, files), FALLBACK_NONE);
        CU_ASSERT_TRUE(take(to));
        CU_ASSERT_TRUE(is_same(&s, &got));
        for (uint32_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, handles + i * sizeof fd, sizeof fd);
            CU_ASSERT_TRUE(file_of(fd) == file_of(files[i]));
            CU_ASSERT_TRUE((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
        }
        kept_close(&came);
    }
    CU_ASSERT_FALSE(take(to));
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
    CU_ASSERT_EQUAL(hand_give(name, &s, given), FALLBACK_NONE);
    CU_ASSERT_TRUE(take(end) && is_same(&s, &got));
    CU_ASSERT_EQUAL(memcmp(given, handles, sizeof given), 0);
    close(end);
}

static void what_does_not_go(void) {
    char name[AGREE_SOCKET], none[AGREE_SOCKET] = {0};
    const int end = hand_open(name), other = hand_open(none);
    hand_stretch s = stretch(1, CU_HANDLE_DESCRIPTOR, 1);
    close(other); /* nobody has that name any more */
    CU_ASSERT_EQUAL(hand_give(none, &s, &end), FALLBACK_UNTAKEN);
    memset(none, 0, sizeof none);
    CU_ASSERT_EQUAL(hand_give(none, &s, &end), FALLBACK_UNTAKEN);
    s.count = 0;
    CU_ASSERT_EQUAL(hand_give(name, &s, &end), FALLBACK_MEMORY);
    s.count = HAND_PIECES + 1;
    CU_ASSERT_EQUAL(hand_give(name, &s, &end), FALLBACK_MEMORY);
    CU_ASSERT_FALSE(take(end));
    close(end);
}

/* Nobody takes: the queue is full at some time, and then it does not go. */
static void a_full_queue(void) {
    char name[AGREE_SOCKET];
    const int end = hand_open(name), before = count_open();
    const hand_stretch s = stretch(3, CU_HANDLE_DESCRIPTOR, 1);
    int given = 0, taken = 0;
    fallback why = FALLBACK_NONE;
    while (given < 100000 && (why = hand_give(name, &s, &end)) == FALLBACK_NONE)
        given++;
    CU_ASSERT_EQUAL(why, FALLBACK_UNTAKEN);
    CU_ASSERT_TRUE(given > 0 && given < 100000);
    while (take(end)) {
        kept_close(&came);
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
    CU_ASSERT_FALSE(take(end));
    memcpy(big, s, sizeof s[0]);
    CU_ASSERT_TRUE(send_raw(name, big, 60000, fds, 2));
    CU_ASSERT_EQUAL(hand_give(name, &s[0], fds), FALLBACK_NONE); /* behind it */
    CU_ASSERT_TRUE(take(end) && is_same(&s[0], &got));
    kept_close(&came);
    CU_ASSERT_EQUAL(count_open(), before);
    free(big);
    close(end);
}

/* One of ours that connects and says nothing holds nobody up. */
static void a_silent_one(void) {
    char name[AGREE_SOCKET];
    const int end = hand_open(name), before = count_open(), silent = connect_raw(name);
    const hand_stretch s = stretch(6, CU_HANDLE_FABRIC, 1);
    CU_ASSERT_TRUE(silent >= 0 && hand_give(name, &s, handles) == FALLBACK_NONE);
    CU_ASSERT_TRUE(take(end) && is_same(&s, &got));
    CU_ASSERT_FALSE(take(end));
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
    CU_ASSERT_FALSE(take(end));
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
        const int guest = accept(end, NULL, NULL);
        _exit(!told || !waited || (guest >= 0 && recv(guest, &got, sizeof got, MSG_DONTWAIT) > 0));
    }
    CU_ASSERT_TRUE(read(ready[0], name, sizeof name) == sizeof name);
    CU_ASSERT_EQUAL(hand_give(name, &s, ready), FALLBACK_UNTAKEN);
    close(gone[1]);
    CU_ASSERT_TRUE(waitpid(other, &status, 0) == other && status == 0);
    close(gone[0]);
    close(ready[0]);
    close(ready[1]);
    CU_ASSERT_EQUAL(count_open(), before);
}

/* As another user, whom limits bind, with `files` descriptors at most. */
static bool be_bound(rlim_t files) {
    const struct rlimit limit = {files, files};
    return setrlimit(RLIMIT_NOFILE, &limit) == 0 && (geteuid() != 0 || setuid(65534) == 0);
}

static bool ends_well(pid_t child) {
    int status = -1;
    return waitpid(child, &status, 0) == child && status == 0;
}

/* What is on its way counts, until it is taken; then there is none left for a socket. */
static void too_many_sent(void) {
    const pid_t child = fork();
    if (child == 0) {
        char name[AGREE_SOCKET];
        const hand_stretch s = stretch(3, CU_HANDLE_DESCRIPTOR, 20);
        int files[20], given = 0;
        const bool bound = be_bound(32);
        const int end = hand_open(name);
        for (int i = 0; i < 20; i++)
            files[i] = end;
        while (given < 50 && hand_give(name, &s, files) == FALLBACK_NONE)
            given++;
        const bool sent = given > 0 && given < 50 && hand_give(name, &s, files) == FALLBACK_FILES;
        const bool some = !hand_is_full();
        while (dup(end) >= 0)
            ;
        _exit(!bound || !sent || !some || hand_give(name, &s, files) != FALLBACK_FILES ||
              !hand_is_full());
    }
    CU_ASSERT_TRUE(ends_well(child));
}

/* Whoever may have no more of them gets none of a stretch, which he is told, then none at all. */
static void too_many_to_take(void) {
    char name[AGREE_SOCKET];
    const int end = hand_open(name), before = count_open();
    const hand_stretch s = stretch(4, CU_HANDLE_DESCRIPTOR, 20);
    int files[20];
    for (int i = 0; i < 20; i++)
        files[i] = end;
    for (int i = 0; i < 3; i++)
        CU_ASSERT_EQUAL(hand_give(name, &s, files), FALLBACK_NONE);
    const pid_t child = fork();
    if (child == 0) {
        const struct rlimit few = {(rlim_t)before + 10, (rlim_t)before + 10};
        bool good = setrlimit(RLIMIT_NOFILE, &few) == 0;
        good = good && hand_take(end, &got, handles, &came) == HAND_FILES && is_same(&got, &s);
        kept_close(&came);
        good = good && count_open() == before;
        while (dup(end) >= 0)
            ;
        good = good && hand_take(end, &got, handles, &came) == HAND_FILES && got.count == 0;
        _exit(!good);
    }
    CU_ASSERT_TRUE(ends_well(child));
    CU_ASSERT_TRUE(take(end) && is_same(&got, &s)); /* (one of three: the child had one of them) */
    kept_close(&came);
    CU_ASSERT_EQUAL(count_open(), before);
    close(end);
}

/* A child has none of what was taken, and whose who made it are as they were; it may go on. */
static void a_child(void) {
    char name[AGREE_SOCKET];
    const int end = hand_open(name), before = count_open();
    const hand_stretch s = stretch(8, CU_HANDLE_DESCRIPTOR, 3);
    const int files[3] = {end, 0, end};
    CU_ASSERT_EQUAL(hand_give(name, &s, files), FALLBACK_NONE);
    CU_ASSERT_EQUAL(hand_give(name, &s, files), FALLBACK_NONE);
    CU_ASSERT_TRUE(take(end));
    CU_ASSERT_EQUAL(count_open(), before + 3);
    const pid_t child = fork();
    if (child == 0) {
        bool good = count_open() == before;
        const int mine = dup(end); /* a number that was one of these */
        kept_close(&came);
        good = good && count_open() == before + 1 && close(mine) == 0;
        good = good && take(end) && count_open() == before + 3;
        kept_close(&came);
        _exit(!good || count_open() != before);
    }
    CU_ASSERT_TRUE(ends_well(child));
    CU_ASSERT_EQUAL(count_open(), before + 3);
    kept_close(&came);
    CU_ASSERT_EQUAL(count_open(), before);
    close(end);
}

static atomic_bool locked, over;

static void *stay_locked(void *argument) {
    sigset_t signals;
    (void)argument;
    kept_lock(&signals);
    atomic_store(&locked, true);
    while (!atomic_load(&over))
        usleep(1000);
    kept_unlock(&signals);
    return NULL;
}

/* A driver's call does not come back: a fork goes on, and its child is not held up. */
static void a_lock_that_is_held(void) {
    pthread_t thread;
    CU_ASSERT_FATAL(pthread_create(&thread, NULL, stay_locked, NULL) == 0);
    while (!atomic_load(&locked))
        usleep(1000);
    const pid_t child = fork();
    if (child == 0) {
        char name[AGREE_SOCKET];
        const hand_stretch s = stretch(8, CU_HANDLE_DESCRIPTOR, 1);
        const int end = hand_open(name), before = count_open();
        const bool good = hand_give(name, &s, &end) == FALLBACK_NONE && take(end);
        kept_close(&came);
        _exit(!good || count_open() != before);
    }
    CU_ASSERT_TRUE(ends_well(child));
    atomic_store(&over, true);
    pthread_join(thread, NULL);
}

static void fork_now(int number) {
    (void)number;
    const pid_t child = fork();
    if (child == 0)
        _exit(0);
    (void)waitpid(child, NULL, 0);
}

static void *signal_often(void *to) {
    while (!atomic_load(&over)) {
        pthread_kill(*(pthread_t *)to, SIGUSR1);
        usleep(100);
    }
    return NULL;
}

/* A signal's handler that forks, in the thread that hands over. */
static void forks_in_a_handler(void) {
    char name[AGREE_SOCKET];
    const int end = hand_open(name), before = count_open();
    const struct sigaction action = {.sa_handler = fork_now, .sa_flags = SA_RESTART};
    struct sigaction was;
    pthread_t thread, me = pthread_self();
    CU_ASSERT_FATAL(sigaction(SIGUSR1, &action, &was) == 0);
    atomic_store(&over, false);
    CU_ASSERT_FATAL(pthread_create(&thread, NULL, signal_often, &me) == 0);
    for (int i = 0; i < 200; i++) {
        const hand_stretch s = stretch(8, CU_HANDLE_DESCRIPTOR, 1);
        CU_ASSERT_EQUAL(hand_give(name, &s, &end), FALLBACK_NONE);
        CU_ASSERT_TRUE(take(end));
        kept_close(&came);
    }
    atomic_store(&over, true);
    pthread_join(thread, NULL);
    CU_ASSERT_EQUAL(count_open(), before);
    CU_ASSERT_EQUAL(sigaction(SIGUSR1, &was, NULL), 0);
    close(end);
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
        {"too many on their way", too_many_sent},
        {"too many to take", too_many_to_take},
        {"a child of a fork", a_child},
        {"a lock that is held", a_lock_that_is_held},
        {"forks in a signal's handler", forks_in_a_handler},
        CU_TEST_INFO_NULL,
    };
    return unit_run("interposer: handing over", tests);
}
