/* SPDX-License-Identifier: Apache-2.0
 *
 * far.c - ranks of several machines: small allgathers over TCP, by way of rank 0.
 *
 * The caller's bootstrap tells where rank 0 listens and a random token; each other rank
 * connects, is shown one half of the token and shows the other before anything else is said.  A
 * frame is a head and bytes; a rank that fails sends its error instead, which everybody gets.
 */
#include "config.h"

#include "backend/far.h"
#include "core/status.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define FAR_ADDRESSES 8
#define FAR_MAGIC UINT64_C(0x65706f2d66617231)
#define FAR_CONNECT_S 3.0 /* for one address: it may lead nowhere */
#define FAR_POLL_S 1000.0 /* at a time: milliseconds are an int */
#define FAR_PAUSE_NS 50000000
#define FAR_TEXT 256
enum { FAR_DATA = 1, FAR_FAIL = 2 };

/* Rank 0's, told over the bootstrap. */
typedef struct far_card {
    uint8_t token[2][16];            /* that rank 0 shows, and the others */
    uint32_t address[FAR_ADDRESSES]; /* IPv4, network order */
    uint16_t port;
    uint16_t count;
    int32_t status;
} far_card;

typedef struct far_hello {
    uint64_t magic;
    int32_t rank, ranks;
    uint8_t token[16];
} far_hello;

static far_hello far_hello_of(int rank, int ranks, const uint8_t *token) {
    far_hello h = {.magic = FAR_MAGIC, .rank = rank, .ranks = ranks};
    memcpy(h.token, token, sizeof h.token);
    return h;
}

static bool far_hello_fits(const far_hello *h, int ranks, const uint8_t *token) {
    return h->magic == FAR_MAGIC && h->ranks == ranks &&
           memcmp(h->token, token, sizeof h->token) == 0;
}

typedef struct far_head {
    uint64_t turn;
    uint32_t kind, bytes;
} far_head;

typedef struct far_failure {
    int32_t status;
    char text[FAR_TEXT];
} far_failure;

struct epo_far {
    int rank, ranks;
    double timeout_s;
    uint64_t turn;
    int *fd; /* [ranks]; -1: none.  Rank 0 has one to each, the others to rank 0 */
    int listener;
    pthread_mutex_t sending; /* a failure may be told while another thread exchanges */
};

static double far_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- bytes, within a limit ------------------------------------------------- */

/* A signal of the program's is no time-out. */
static bool far_ready(int fd, short what, double until) {
    struct pollfd p = {fd, what, 0};
    int n;
    do {
        const double left = until - far_now();
        n = poll(&p, 1,
                 left <= 0           ? 0
                 : left > FAR_POLL_S ? (int)(FAR_POLL_S * 1e3)
                                     : (int)(left * 1e3) + 1);
    } while ((n < 0 && errno == EINTR) || (n == 0 && far_now() < until));
    return n > 0;
}

/* 0, ETIMEDOUT, or what ended the connection. */
static int far_move(int fd, void *data, size_t bytes, bool out, double until) {
    for (size_t done = 0; done < bytes;) {
        if (!far_ready(fd, out ? POLLOUT : POLLIN, until))
            return ETIMEDOUT;
        const ssize_t n = out ? send(fd, (char *)data + done, bytes - done, MSG_NOSIGNAL)
                              : recv(fd, (char *)data + done, bytes - done, 0);
        if (n == 0)
            return ECONNRESET;
        if (n < 0 && errno != EINTR && errno != EAGAIN)
            return errno;
        done += n > 0 ? (size_t)n : 0;
    }
    return 0;
}

static int far_send(int fd, const void *data, size_t bytes, double until) {
    return far_move(fd, (void *)(uintptr_t)data, bytes, true, until);
}

static epo_status far_lost(const epo_far *f, int rank, const char *what, int error) {
    return epo_fail(error == ETIMEDOUT ? EPO_E_TIMEOUT : EPO_E_PEER,
                    error == ETIMEDOUT ? "rank %d: %s: rank %d did not come within %.0f s"
                                       : "rank %d: %s: the connection to rank %d has ended (%.0f s "
                                         "were allowed); it ended, or another rank did",
                    f->rank, what, rank, f->timeout_s);
}

/* ---- connecting ------------------------------------------------------------- */

static void far_options(int fd) {
    const int one = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

/* This machine's addresses; loopback leads elsewhere on every machine, so only where there is no
 * other. */
static void far_addresses(far_card *card) {
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) != 0)
        all = NULL;
    for (struct ifaddrs *a = all; a != NULL && card->count < FAR_ADDRESSES; a = a->ifa_next) {
        if (a->ifa_addr == NULL || a->ifa_addr->sa_family != AF_INET)
            continue;
        const struct sockaddr_in *in = (const void *)a->ifa_addr;
        if ((ntohl(in->sin_addr.s_addr) >> 24) != 127)
            card->address[card->count++] = in->sin_addr.s_addr;
    }
    freeifaddrs(all);
    if (card->count == 0)
        card->address[card->count++] = htonl(INADDR_LOOPBACK);
}

static epo_status far_listen(epo_far *f, far_card *card) {
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t size = sizeof here;
    f->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (f->listener < 0 || bind(f->listener, (struct sockaddr *)&here, sizeof here) != 0 ||
        listen(f->listener, f->ranks) != 0 ||
        getsockname(f->listener, (struct sockaddr *)&here, &size) != 0 ||
        getrandom(card->token, sizeof card->token, 0) != (ssize_t)sizeof card->token)
        return epo_fail(EPO_E_SYSTEM, "rank 0: listening for ranks of other machines: %s",
                        strerror(errno));
    card->port = ntohs(here.sin_port);
    far_addresses(card);
    return EPO_OK;
}

/* Who does not show the token is not a rank: false. */
static bool far_admit(epo_far *f, const far_card *card, double until) {
    const far_hello mine = far_hello_of(0, f->ranks, card->token[0]);
    far_hello peer;
    const int fd = accept4(f->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return false;
    const double soon = far_now() + FAR_CONNECT_S, end = soon < until ? soon : until;
    far_options(fd);
    if (far_send(fd, &mine, sizeof mine, end) != 0 ||
        far_move(fd, &peer, sizeof peer, false, end) != 0 ||
        !far_hello_fits(&peer, f->ranks, card->token[1]) || peer.rank < 1 ||
        peer.rank >= f->ranks || f->fd[peer.rank] >= 0) {
        close(fd);
        return false;
    }
    f->fd[peer.rank] = fd;
    return true;
}

static epo_status far_gather_ranks(epo_far *f, const far_card *card) {
    const double until = far_now() + f->timeout_s;
    for (int come = 1; come < f->ranks && far_ready(f->listener, POLLIN, until);)
        come += far_admit(f, card, until);
    close(f->listener); /* nobody else is to come */
    f->listener = -1;
    for (int r = 1; r < f->ranks; r++)
        if (f->fd[r] < 0)
            return far_lost(f, r, "meeting", ETIMEDOUT);
    return EPO_OK;
}

/* A connection to rank 0 by one of its addresses; -1: that leads to somebody else, or
 * nowhere. */
static int far_call(const epo_far *f, const far_card *card, uint32_t address) {
    const double until = far_now() + FAR_CONNECT_S;
    const far_hello mine = far_hello_of(f->rank, f->ranks, card->token[1]);
    struct sockaddr_in there = {
        .sin_family = AF_INET, .sin_port = htons(card->port), .sin_addr.s_addr = address};
    far_hello peer;
    int error = 0;
    socklen_t size = sizeof error;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    far_options(fd);
    if ((connect(fd, (struct sockaddr *)&there, sizeof there) != 0 && errno != EINPROGRESS) ||
        !far_ready(fd, POLLOUT, until) ||
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0 ||
        far_move(fd, &peer, sizeof peer, false, until) != 0 ||
        !far_hello_fits(&peer, f->ranks, card->token[0]) ||
        far_send(fd, &mine, sizeof mine, until) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static epo_status far_join(epo_far *f, const far_card *card) {
    const double until = far_now() + f->timeout_s;
    do {
        for (int i = 0; i < card->count && i < FAR_ADDRESSES && f->fd[0] < 0; i++)
            f->fd[0] = far_call(f, card, card->address[i]);
        if (f->fd[0] < 0)
            nanosleep(&(struct timespec){0, FAR_PAUSE_NS}, NULL);
    } while (f->fd[0] < 0 && far_now() < until);
    return f->fd[0] >= 0 ? EPO_OK
                         : epo_fail(EPO_E_PEER,
                                    "rank %d: none of rank 0's %d addresses leads to it (port %d); "
                                    "the machines must reach each other by TCP",
                                    f->rank, card->count, card->port);
}

epo_status epo_far_open(const epo_bootstrap *bootstrap, int rank, int ranks, double timeout_s,
                        epo_far **out) {
    epo_far *f = calloc(1, sizeof *f);
    far_card card = {.count = 0}, *all = calloc((size_t)ranks, sizeof *all);
    if (f == NULL || all == NULL || (f->fd = malloc((size_t)ranks * sizeof *f->fd)) == NULL) {
        free(f);
        free(all);
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for %d ranks", rank, ranks);
    }
    f->rank = rank;
    f->ranks = ranks;
    f->timeout_s = timeout_s;
    f->listener = -1;
    pthread_mutex_init(&f->sending, NULL);
    for (int r = 0; r < ranks; r++)
        f->fd[r] = -1;
    epo_status status = rank == 0 ? far_listen(f, &card) : EPO_OK;
    card.status = (int32_t)status;
    if (bootstrap->allgather(bootstrap->ctx, &card, sizeof card, all) != 0)
        status = epo_fail(EPO_E_PEER, "rank %d: the caller's bootstrap failed", rank);
    else if (all[0].status != EPO_OK && rank != 0)
        status = epo_fail(EPO_E_PEER, "rank 0 cannot listen for ranks of other machines");
    if (status == EPO_OK)
        status = rank == 0 ? far_gather_ranks(f, &card) : far_join(f, &all[0]);
    free(all);
    if (status != EPO_OK) {
        epo_far_close(f);
        return status;
    }
    *out = f;
    return EPO_OK;
}

void epo_far_close(epo_far *f) {
    if (f == NULL)
        return;
    for (int r = 0; r < f->ranks; r++)
        if (f->fd[r] >= 0)
            close(f->fd[r]);
    if (f->listener >= 0)
        close(f->listener);
    pthread_mutex_destroy(&f->sending);
    free(f->fd);
    free(f);
}

/* ---- together ---------------------------------------------------------------- */

/* `rank`'s frame of this turn. */
static epo_status far_take(epo_far *f, int rank, void *data, size_t bytes, double until) {
    far_head head = {0};
    far_failure failure;
    int error = far_move(f->fd[rank], &head, sizeof head, false, until);
    if (error == 0 && head.kind == FAR_FAIL && head.bytes == sizeof failure) {
        error = far_move(f->fd[rank], &failure, sizeof failure, false, until);
        failure.text[FAR_TEXT - 1] = '\0';
        if (error == 0)
            return epo_fail(failure.status > EPO_OK && failure.status <= EPO_E_VERSION
                                ? (epo_status)failure.status
                                : EPO_E_PEER,
                            "%s", failure.text);
    }
    if (error == 0 && (head.kind != FAR_DATA || head.turn != f->turn || head.bytes != bytes))
        return epo_fail(EPO_E_PEER,
                        "the ranks disagree: rank %d is in exchange %llu of %u bytes, rank %d in "
                        "%llu of %zu",
                        rank, (unsigned long long)head.turn, head.bytes, f->rank,
                        (unsigned long long)f->turn, bytes);
    if (error == 0 && bytes > 0)
        error = far_move(f->fd[rank], data, bytes, false, until);
    return error == 0 ? EPO_OK : far_lost(f, rank, "allgather", error);
}

static epo_status far_give(epo_far *f, int rank, uint32_t kind, const void *data, size_t bytes,
                           double until) {
    /* a failure may be told by another thread, and is of no turn */
    const far_head head = {kind == FAR_DATA ? f->turn : 0, kind, (uint32_t)bytes};
    pthread_mutex_lock(&f->sending);
    int error = far_send(f->fd[rank], &head, sizeof head, until);
    if (error == 0 && bytes > 0)
        error = far_send(f->fd[rank], data, bytes, until);
    pthread_mutex_unlock(&f->sending);
    return error == 0 ? EPO_OK : far_lost(f, rank, "allgather", error);
}

void epo_far_fail(epo_far *f, epo_status status, const char *text) {
    far_failure failure = {.status = (int32_t)status};
    snprintf(failure.text, sizeof failure.text, "%s", text);
    for (int r = 0; r < f->ranks; r++)
        if (f->fd[r] >= 0)
            (void)far_give(f, r, FAR_FAIL, &failure, sizeof failure, far_now() + 1);
}

epo_status epo_far_allgather(epo_far *f, const void *mine, size_t bytes, void *all) {
    const double until = far_now() + f->timeout_s;
    const size_t whole = bytes * (size_t)f->ranks;
    char text[FAR_TEXT];
    epo_status status =
        whole > UINT32_MAX
            ? epo_fail(EPO_E_ARG, "rank %d: an exchange of %zu bytes", f->rank, whole)
            : EPO_OK;
    f->turn++;
    if (f->rank != 0) {
        if (status == EPO_OK)
            status = far_give(f, 0, FAR_DATA, mine, bytes, until);
        /* Rank 0 knows who is late, and says so when its own time is over. */
        return status == EPO_OK ? far_take(f, 0, all, whole, until + 1 + f->timeout_s / 4) : status;
    }
    if (bytes > 0)
        memcpy(all, mine, bytes);
    for (int r = 1; r < f->ranks && status == EPO_OK; r++)
        status = far_take(f, r, (char *)all + (size_t)r * bytes, bytes, until);
    for (int r = 1; r < f->ranks && status == EPO_OK; r++)
        status = far_give(f, r, FAR_DATA, all, whole, until);
    if (status != EPO_OK) { /* rank 0 tells all: they wait for it */
        snprintf(text, sizeof text, "%s", epo_fail_text());
        epo_far_fail(f, status, text);
        epo_fail(status, "%s", text);
    }
    return status;
}
