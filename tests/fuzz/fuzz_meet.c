/* SPDX-License-Identifier: Apache-2.0
 *
 * What strangers say where ranks meet: messages of any length on the Unix socket, with
 * descriptors that nobody asked for, and bytes in any pieces on rank 0's TCP port.  No descriptor
 * is kept, what was taken ends, and nobody becomes a rank without the key.
 *
 * The first byte chooses: 0 a hello, 1 a welcome, 2 a guest over TCP, 3 one that proves what it
 * has to (its further words are the input's), 4 lists of nodes.
 */
#include "config.h"

#include "fuzz.h"

#include "backend/host/join.h"

/* Its guests are served one look at a time. */
#include "backend/host/far_meet.c"

#define RANKS 4

int64_t host_now_ns(void) { return 1; } /* wait.c's, for a nonce where there is no random */

static int lowest_free(void) {
    const int fd = dup(STDERR_FILENO);
    close(fd);
    return fd;
}

/* ---- the Unix socket ----------------------------------------------------------- */

static void say(int fd, const uint8_t *data, size_t size, int descriptors) {
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(4 * sizeof(int))];
    } control;
    struct iovec part = {(void *)(uintptr_t)data, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    memset(&control, 0, sizeof control);
    if (descriptors > 0) {
        const int some[4] = {0, 1, 2, 0};
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE((size_t)descriptors * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN((size_t)descriptors * sizeof(int));
        memcpy(CMSG_DATA(c), some, (size_t)descriptors * sizeof(int));
    }
    (void)!sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void take_hello(int fd) {
    static host_hello zero;
    host_hello h;
    char name[HOST_NODE_MAX + 48];
    host_place place = {.rank = 0, .ranks = RANKS};
    if (zero.magic == 0)
        host_hello_make(&place, &zero);
    if (host_socket_hello(fd, &h) != 1)
        return;
    (void)host_hello_name(&h, name, sizeof name);
    for (int forged = 0; forged < 2; forged++) {
        if (host_hello_check(&zero, &h) == EPO_OK && (h.rank < 0 || h.rank >= RANKS))
            abort();
        h.abi = zero.abi; /* everything that a forger would set right */
        memcpy(h.version, zero.version, sizeof h.version);
        h.has_boot = 0;
        h.ipc = zero.ipc;
        h.ranks = RANKS;
        h.link_gbs = zero.link_gbs;
        h.link_us = zero.link_us;
    }
}

static void take_welcome(int fd) {
    host_welcome w;
    int descriptor = -1;
    if (host_socket_receive(fd, &w, sizeof w, &descriptor) != 1 && descriptor >= 0)
        abort();
    if (descriptor >= 0)
        close(descriptor);
}

static void unix_socket(const uint8_t *data, size_t size, void (*take)(int fd)) {
    int pair[2];
    if (size < 1 ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0)
        return;
    const int before = lowest_free();
    say(pair[0], data + 1, size - 1, data[0] % 5);
    take(pair[1]);
    if (lowest_free() != before)
        abort();
    close(pair[0]);
    close(pair[1]);
}

/* ---- TCP ---------------------------------------------------------------------------- */

/* What rank 0 has said so far. */
static size_t hear(int fd, void *data, size_t size) {
    const ssize_t n = recv(fd, data, size, MSG_DONTWAIT);
    return n > 0 ? (size_t)n : 0;
}

/* A piece, and a look at the guest; the first byte of what is left is the piece's length. */
static void pieces(far_guests *g, int fd, const uint8_t *data, size_t size) {
    while (size > 1 && g->count > 0) {
        const size_t want = data[0] + (size_t)1, some = want < size - 1 ? want : size - 1;
        (void)!send(fd, data + 1, some, MSG_NOSIGNAL | MSG_DONTWAIT);
        guest_serve(g, 0);
        data += 1 + some;
        size -= 1 + some;
    }
}

static void guest(const uint8_t *data, size_t size, bool holds_the_key) {
    static far_card card;
    int pair[2], fd[RANKS] = {-1, -1, -1, -1};
    far_guests *g = calloc(1, sizeof *g);
    if (g == NULL ||
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
        free(g);
        return;
    }
    memset(card.key, 0x5a, sizeof card.key);
    *g = (far_guests){.ranks = RANKS, .card = &card, .fd = fd, .count = 1};
    g->guest[0] = (far_guest){.fd = pair[1]};
    if (holds_the_key) {
        const far_hello hello = {.magic = FAR_MAGIC, .rank = 1, .ranks = RANKS};
        far_answer answer;
        uint8_t proof[EPO_HMAC_BYTES];
        (void)!send(pair[0], &hello, sizeof hello, MSG_NOSIGNAL);
        guest_serve(g, 0);
        if (hear(pair[0], &answer, sizeof answer) != sizeof answer)
            abort();
        far_prove(&card, 'r', &hello, answer.nonce, proof);
        if (size > 0 && data[0] % 2 == 1) /* one bit is wrong */
            proof[data[0] / 8] ^= (uint8_t)(1 << data[0] % 8);
        (void)!send(pair[0], proof, sizeof proof, MSG_NOSIGNAL);
        guest_serve(g, 0);
    }
    pieces(g, pair[0], data, size);
    const bool proved = holds_the_key && !(size > 0 && data[0] % 2 == 1);
    for (int r = 0; r < RANKS; r++) {
        if (fd[r] >= 0 && (!proved || r != 1))
            abort();
        if (fd[r] >= 0)
            close(fd[r]);
    }
    while (g->count > 0)
        guest_leave(g, 0, true);
    close(pair[0]);
    free(g);
}

/* ---- the launcher's lists ---------------------------------------------------------------- */

static void lists(const uint8_t *data, size_t size) {
    char text[256], node[HOST_NODE_MAX];
    const size_t n = size < sizeof text - 1 ? size : sizeof text - 1;
    memcpy(text, data, n);
    text[n] = '\0';
    for (int i = 0; i < 70; i += 1 + i / 4) {
        if (host_node_nth(text, i, node, sizeof node) && memchr(node, '\0', sizeof node) == NULL)
            abort();
        (void)host_tasks_nth(text, i);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0)
        return 0;
    switch (data[0] % 5) {
    case 0: unix_socket(data + 1, size - 1, take_hello); break;
    case 1: unix_socket(data + 1, size - 1, take_welcome); break;
    case 2: guest(data + 1, size - 1, false); break;
    case 3: guest(data + 1, size - 1, true); break;
    default: lists(data + 1, size - 1); break;
    }
    return 0;
}
