/* SPDX-License-Identifier: Apache-2.0
 *
 * far_meet.c - ranks of several machines connect to rank 0.
 *
 * The caller's bootstrap tells where rank 0 listens, and a random key, which is never sent
 * here.  A rank says who it is with a nonce; rank 0 answers with one of its own and a proof,
 * HMAC-SHA256 over both; the rank checks it and proves the same with another word in front;
 * rank 0 welcomes it, and lets it in when it says that it has heard so: a welcome that comes too
 * late leaves nobody behind a closed door.  Whoever connects is a guest until then: guests are
 * served side by side, each has a limit, and where there are too many the oldest one goes.
 */
#include "config.h"

#include "backend/host/far_meet.h"
#include "core/hmac.h"
#include "core/status.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define FAR_MAGIC UINT64_C(0x65706f2d66617233)
#define FAR_WELCOME UINT64_C(0x65706f2d636f6d65)
#define FAR_THANKS UINT64_C(0x65706f2d74686b73)
#define FAR_CONNECT_S 3.0 /* for one address, which may lead nowhere; for a guest */
#define FAR_STEP_S 0.25   /* until the next address is called beside those before */
#define FAR_POLL_S 1000.0 /* at a time: milliseconds are an int */
#define FAR_PAUSE_NS 50000000
#define FAR_GUESTS 320 /* all ranks at once */
#define FAR_NONCE 16

typedef struct far_hello {
    uint64_t magic;
    int32_t rank, ranks;
    uint8_t nonce[FAR_NONCE];
} far_hello;

typedef struct far_answer {
    uint8_t nonce[FAR_NONCE];
    uint8_t proof[EPO_HMAC_BYTES];
} far_answer;

/* Each side proves that it has seen the other's nonce; the word keeps one's proof from being
 * the other's. */
static void far_prove(const far_card *card, char word, const far_hello *hello, const uint8_t *nonce,
                      uint8_t proof[EPO_HMAC_BYTES]) {
    struct {
        far_hello hello;
        uint8_t nonce[FAR_NONCE];
        char word[8];
    } said;
    memset(&said, 0, sizeof said);
    said.hello = *hello;
    memcpy(said.nonce, nonce, sizeof said.nonce);
    said.word[0] = word;
    epo_hmac_sha256(card->key, sizeof card->key, &said, sizeof said, proof);
}

double far_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- bytes, within a limit ------------------------------------------------- */

static int far_poll(struct pollfd *p, nfds_t count, double until) {
    int n;
    do {
        const double left = until - far_now();
        n = poll(p, count,
                 left <= 0           ? 0
                 : left > FAR_POLL_S ? (int)(FAR_POLL_S * 1e3)
                                     : (int)(left * 1e3) + 1);
    } while ((n < 0 && errno == EINTR) || (n == 0 && far_now() < until));
    return n;
}

/* Is the descriptor ready by then?  A signal of the program's is no time-out. */
static bool far_ready(int fd, short what, double until) {
    struct pollfd p = {fd, what, 0};
    return far_poll(&p, 1, until) > 0;
}

int far_move(int fd, void *data, size_t bytes, bool out, double until) {
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

int far_send(int fd, const void *data, size_t bytes, double until) {
    return far_move(fd, (void *)(uintptr_t)data, bytes, true, until);
}

static void far_options(int fd) {
    const int one = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static bool far_random(void *out, size_t bytes) {
    return getrandom(out, bytes, 0) == (ssize_t)bytes;
}

/* ---- rank 0 ----------------------------------------------------------------- */

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
        if ((a->ifa_flags & IFF_UP) != 0 && (ntohl(in->sin_addr.s_addr) >> 24) != 127)
            card->address[card->count++] = in->sin_addr.s_addr;
    }
    freeifaddrs(all);
    if (card->count == 0)
        card->address[card->count++] = htonl(INADDR_LOOPBACK);
}

epo_status far_listen(far_card *card, int *listener) {
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t size = sizeof here;
    *listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (*listener < 0 || bind(*listener, (struct sockaddr *)&here, sizeof here) != 0 ||
        listen(*listener, SOMAXCONN) != 0 ||
        getsockname(*listener, (struct sockaddr *)&here, &size) != 0 ||
        !far_random(card->key, sizeof card->key))
        return epo_fail(EPO_E_SYSTEM, "rank 0: listening for ranks of other machines: %s",
                        strerror(errno));
    card->port = ntohs(here.sin_port);
    far_addresses(card);
    return EPO_OK;
}

/* Connected, and nothing proved yet. */
typedef struct far_guest {
    int fd;
    double until;
    enum { GUEST_HELLO, GUEST_PROOF, GUEST_THANKS } awaited;
    size_t have; /* bytes of what is awaited */
    far_hello hello;
    far_answer answer;
    uint8_t proof[EPO_HMAC_BYTES];
    uint64_t thanks;
} far_guest;

typedef struct far_guests {
    int listener, ranks, count;
    const far_card *card;
    int *fd; /* of the ranks */
    far_guest guest[FAR_GUESTS];
} far_guests;

/* All of it at once, or not at all: so little fits a new connection's buffer. */
static bool far_say(int fd, const void *data, size_t bytes) {
    return send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)bytes;
}

static void guest_leave(far_guests *g, int i, bool close_it) {
    if (close_it)
        close(g->guest[i].fd);
    g->count--; /* in the order of their coming */
    memmove(&g->guest[i], &g->guest[i + 1], (size_t)(g->count - i) * sizeof *g->guest);
}

static void guests_accept(far_guests *g, double until) {
    const int fd = accept4(g->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) { /* none, or no descriptor is left for it: whoever goes gives one back */
        nanosleep(&(struct timespec){0, FAR_PAUSE_NS / 50}, NULL);
        return;
    }
    if (g->count == FAR_GUESTS)
        guest_leave(g, 0, true);
    const double soon = far_now() + FAR_CONNECT_S;
    far_options(fd);
    g->guest[g->count++] = (far_guest){.fd = fd, .until = soon < until ? soon : until};
}

/* Answers a whole hello; false: it is none. */
static bool guest_answer(const far_guests *g, far_guest *guest) {
    const far_hello *h = &guest->hello;
    if (h->magic != FAR_MAGIC || h->ranks != g->ranks || h->rank < 1 || h->rank >= g->ranks ||
        !far_random(guest->answer.nonce, sizeof guest->answer.nonce))
        return false;
    far_prove(g->card, '0', h, guest->answer.nonce, guest->answer.proof);
    return far_say(guest->fd, &guest->answer, sizeof guest->answer);
}

static bool guest_welcome(const far_guests *g, const far_guest *guest) {
    const uint64_t welcome = FAR_WELCOME;
    uint8_t proof[EPO_HMAC_BYTES];
    far_prove(g->card, 'r', &guest->hello, guest->answer.nonce, proof);
    return epo_hmac_same(proof, guest->proof) && far_say(guest->fd, &welcome, sizeof welcome);
}

/* A rank that comes again has lost what it had. */
static bool guest_admit(const far_guests *g, const far_guest *guest) {
    if (guest->thanks != FAR_THANKS)
        return false;
    int *fd = &g->fd[guest->hello.rank];
    if (*fd >= 0)
        close(*fd);
    *fd = guest->fd;
    return true;
}

/* What has come from a guest, who may become a rank or go. */
static void guest_serve(far_guests *g, int i) {
    far_guest *guest = &g->guest[i];
    void *const to[] = {&guest->hello, guest->proof, &guest->thanks};
    const size_t whole[] = {sizeof guest->hello, sizeof guest->proof, sizeof guest->thanks};
    const size_t all = whole[guest->awaited];
    const ssize_t n =
        recv(guest->fd, (char *)to[guest->awaited] + guest->have, all - guest->have, MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    guest->have += n > 0 ? (size_t)n : 0;
    if (n > 0 && guest->have < all)
        return;
    const bool stays = n > 0 && (guest->awaited == GUEST_HELLO   ? guest_answer(g, guest)
                                 : guest->awaited == GUEST_PROOF ? guest_welcome(g, guest)
                                                                 : guest_admit(g, guest));
    if (!stays || guest->awaited == GUEST_THANKS) {
        guest_leave(g, i, !stays);
        return;
    }
    guest->awaited++;
    guest->have = 0;
}

static bool guests_complete(const far_guests *g) {
    for (int r = 1; r < g->ranks; r++)
        if (g->fd[r] < 0)
            return false;
    return true;
}

/* One look at the door and at all guests; from the last, as they may go. */
static void guests_turn(far_guests *g, double until) {
    struct pollfd p[FAR_GUESTS + 1] = {{g->listener, POLLIN, 0}};
    const int count = g->count;
    double soonest = until;
    for (int i = 0; i < count; i++) {
        p[i + 1] = (struct pollfd){g->guest[i].fd, POLLIN, 0};
        soonest = g->guest[i].until < soonest ? g->guest[i].until : soonest;
    }
    if (far_poll(p, (nfds_t)count + 1, soonest) < 0)
        return;
    for (int i = count - 1; i >= 0; i--) {
        if (p[i + 1].revents != 0)
            guest_serve(g, i);
        else if (far_now() >= g->guest[i].until)
            guest_leave(g, i, true);
    }
    if (p[0].revents != 0)
        guests_accept(g, until);
}

bool far_gather(int listener, const far_card *card, int ranks, int *fd, double until) {
    far_guests g = {.listener = listener, .ranks = ranks, .card = card, .fd = fd};
    while (!guests_complete(&g) && far_now() < until)
        guests_turn(&g, until);
    while (g.count > 0)
        guest_leave(&g, 0, true);
    return guests_complete(&g);
}

/* ---- the others ------------------------------------------------------------- */

/* -1: it cannot even be tried. */
static int far_connect(const far_card *card, uint32_t address) {
    struct sockaddr_in there = {
        .sin_family = AF_INET, .sin_port = htons(card->port), .sin_addr.s_addr = address};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    far_options(fd);
    if (connect(fd, (struct sockaddr *)&there, sizeof there) == 0 || errno == EINPROGRESS)
        return fd;
    close(fd);
    return -1;
}

static bool far_connected(int fd) {
    int error = 0;
    socklen_t size = sizeof error;
    return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
}

/* Both sides prove that they hold the key. */
static bool far_greet(int fd, const far_card *card, int rank, int ranks, double until,
                      far_stage *stage) {
    far_hello hello = {.magic = FAR_MAGIC, .rank = rank, .ranks = ranks};
    far_answer answer;
    uint8_t proof[EPO_HMAC_BYTES];
    uint64_t welcome = 0;
    const uint64_t thanks = FAR_THANKS;
    *stage = *stage < FAR_REACHED ? FAR_REACHED : *stage;
    if (!far_random(hello.nonce, sizeof hello.nonce) ||
        far_send(fd, &hello, sizeof hello, until) != 0 ||
        far_move(fd, &answer, sizeof answer, false, until) != 0)
        return false;
    far_prove(card, '0', &hello, answer.nonce, proof);
    if (!epo_hmac_same(proof, answer.proof))
        return false;
    *stage = FAR_PROVED;
    far_prove(card, 'r', &hello, answer.nonce, proof);
    return far_send(fd, proof, sizeof proof, until) == 0 &&
           far_move(fd, &welcome, sizeof welcome, false, until) == 0 && welcome == FAR_WELCOME &&
           far_send(fd, &thanks, sizeof thanks, until) == 0;
}

static double far_sooner(double a, double b) { return a < b ? a : b; }

/* By one of rank 0's addresses, which are called one after the other, but none waits for the one
 * before for long: it may lead nowhere.  -1: all lead to somebody else, or nowhere. */
static int far_call(const far_card *card, int rank, int ranks, double until, far_stage *stage) {
    struct pollfd p[FAR_ADDRESSES] = {{0}};
    const int count = card->count < FAR_ADDRESSES ? card->count : FAR_ADDRESSES;
    const double step = far_sooner(FAR_STEP_S, (until - far_now()) / (2.0 * count));
    const double end = far_sooner(until, far_now() + count * step + FAR_CONNECT_S);
    double next = far_now();
    int called = 0, open = 0, found = -1;
    while ((called < count || open > 0) && found < 0 && far_now() < end) {
        if (called < count && (open == 0 || far_now() >= next)) {
            p[called] = (struct pollfd){far_connect(card, card->address[called]), POLLOUT, 0};
            open += p[called++].fd >= 0;
            next = far_now() + step;
        }
        if (open > 0 &&
            far_poll(p, (nfds_t)called, called < count ? far_sooner(next, end) : end) <= 0)
            continue;
        for (int i = 0; i < called && found < 0; i++) {
            if (p[i].fd < 0 || p[i].revents == 0)
                continue;
            const double soon = far_sooner(until, far_now() + FAR_CONNECT_S);
            if (far_connected(p[i].fd) && far_greet(p[i].fd, card, rank, ranks, soon, stage))
                found = p[i].fd;
            else
                close(p[i].fd);
            p[i].fd = -1;
            open--;
        }
    }
    for (int i = 0; i < called; i++)
        if (p[i].fd >= 0)
            close(p[i].fd);
    return found;
}

int far_reach(const far_card *card, int rank, int ranks, double until, far_stage *stage) {
    int fd = -1;
    *stage = FAR_NOWHERE;
    do {
        fd = far_call(card, rank, ranks, until, stage);
        if (fd < 0)
            nanosleep(&(struct timespec){0, FAR_PAUSE_NS}, NULL);
    } while (fd < 0 && far_now() < until);
    return fd;
}
