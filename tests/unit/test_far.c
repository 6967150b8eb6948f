/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks of several machines over TCP, here threads of one: what everybody gets, how an error, a
 * rank that is late or one that is gone reach the others, and what strangers can do.
 */
#include "backend/far.h"
#include "core/status.h"
#include "member.h"
#include "unit.h"

#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 5, ROUNDS = 200, MOST = 9000 };

/* A bootstrap by memory. */
static pthread_barrier_t together;
static unsigned char board[RANKS][512];

static void (*strangers_call)(uint16_t port); /* before the ranks do */
static uint16_t other_port;                   /* that is told in place of rank 0's; 0: none */
static uint32_t dead_ends;                    /* addresses told in front of its own */
static int stranger_port;
static double limit_s = 2.0;
static bool unreachable; /* nobody meets */

/* Rank 0's card begins with a key of 32 bytes and 8 addresses; then comes its port. */
enum { KEY_BYTES = 32, PORT_AT = KEY_BYTES + 8 * 4 };

static int call_port(int port) {
    struct sockaddr_in there = {.sin_family = AF_INET,
                                .sin_port = htons((uint16_t)port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&there, sizeof there) == 0)
        return fd;
    close(fd);
    return -1;
}

static int stranger = -1;

static void call_as_stranger(uint16_t port) {
    char words[64];
    stranger_port = port;
    memset(words, 'x', sizeof words);
    stranger = call_port(port);
    if (stranger >= 0 && send(stranger, words, 32, MSG_NOSIGNAL) != 32)
        stranger_port = -1;
}

/* 127.0.0.2 and so on; the last of eight, if it is not one, leads to whoever has the port. */
static void tell_dead_ends(char *card) {
    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t address = htonl(INADDR_LOOPBACK + (i < dead_ends ? 1 + i : 0));
        memcpy(card + KEY_BYTES + i * sizeof address, &address, sizeof address);
    }
    const uint16_t count = 8;
    memcpy(card + PORT_AT + sizeof(uint16_t), &count, sizeof count);
}

static int board_allgather(void *ctx, const void *mine, size_t bytes, void *all) {
    const int rank = *(const int *)ctx;
    if (bytes > sizeof board[0])
        return -1;
    memcpy(board[rank], mine, bytes);
    pthread_barrier_wait(&together);
    if (strangers_call != NULL && rank == 1) {
        uint16_t port;
        memcpy(&port, board[0] + PORT_AT, sizeof port);
        strangers_call(port);
    }
    pthread_barrier_wait(&together);
    for (int r = 0; r < RANKS; r++)
        memcpy((char *)all + (size_t)r * bytes, board[r], bytes);
    if (other_port != 0)
        memcpy((char *)all + PORT_AT, &other_port, sizeof other_port);
    if (dead_ends != 0)
        tell_dead_ends(all);
    pthread_barrier_wait(&together);
    return 0;
}

typedef struct member {
    int rank, wrong;
    void (*fn)(struct member *m, epo_far *far);
    char text[300];
} member;

static void *member_main(void *arg) {
    member *m = arg;
    const epo_bootstrap boot = {.size = sizeof boot, .ctx = &m->rank, .allgather = board_allgather};
    epo_far *far = NULL;
    const epo_status status = epo_far_open(&boot, m->rank, RANKS, limit_s, &far);
    EXPECT(unreachable ? status != EPO_OK : status == EPO_OK);
    snprintf(m->text, sizeof m->text, "%s", epo_fail_text());
    if (far != NULL || unreachable)
        m->fn(m, far);
    pthread_barrier_wait(&together); /* nobody's end is another's error */
    epo_far_close(far);
    return NULL;
}

static int run(void (*fn)(member *m, epo_far *far)) {
    pthread_t thread[RANKS];
    member m[RANKS];
    int wrong = 0;
    pthread_barrier_init(&together, NULL, RANKS);
    for (int r = 0; r < RANKS; r++) {
        m[r] = (member){.rank = r, .fn = fn};
        pthread_create(&thread[r], NULL, member_main, &m[r]);
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(thread[r], NULL);
        wrong += m[r].wrong;
    }
    pthread_barrier_destroy(&together);
    return wrong;
}

static unsigned char byte_of(int round, int rank, size_t i) {
    return (unsigned char)(round * 31 + rank * 7 + (int)(i % 251));
}

static void rounds(member *m, epo_far *far) {
    static unsigned char all[RANKS][RANKS * MOST], mine[RANKS][MOST];
    for (int n = 0; n < ROUNDS; n++) {
        const size_t bytes = n % 5 == 0 ? 0 : (size_t)(n * 7919 % MOST);
        for (size_t i = 0; i < bytes; i++)
            mine[m->rank][i] = byte_of(n, m->rank, i);
        EXPECT(epo_far_allgather(far, mine[m->rank], bytes, all[m->rank]) == EPO_OK);
        bool same = true;
        for (int r = 0; r < RANKS; r++)
            for (size_t i = 0; i < bytes; i++)
                same = same && all[m->rank][(size_t)r * bytes + i] == byte_of(n, r, i);
        EXPECT(same);
    }
}

static void everybody_gets_everything(void) { CU_ASSERT_EQUAL(run(rounds), 0); }

static void fails(member *m, epo_far *far) {
    char all[RANKS * 8], mine[8] = "";
    EXPECT(epo_far_allgather(far, mine, 8, all) == EPO_OK);
    if (m->rank == 3) {
        epo_far_fail(far, EPO_E_NOMEM, "rank 3 has no memory");
        return;
    }
    EXPECT(epo_far_allgather(far, mine, 8, all) == EPO_E_NOMEM);
    EXPECT(strcmp(epo_fail_text(), "rank 3 has no memory") == 0);
}

static void a_failure_reaches_everybody(void) { CU_ASSERT_EQUAL(run(fails), 0); }

static void differs(member *m, epo_far *far) {
    char all[RANKS * 16], mine[16] = "";
    EXPECT(epo_far_allgather(far, mine, m->rank == 2 ? 16 : 8, all) == EPO_E_PEER);
    EXPECT(strstr(epo_fail_text(), "the ranks disagree: rank 2") != NULL);
}

static void different_exchanges_are_an_error(void) { CU_ASSERT_EQUAL(run(differs), 0); }

static void stays_away(member *m, epo_far *far) {
    char all[RANKS * 8], mine[8] = "";
    if (m->rank == 4)
        return;
    EXPECT(epo_far_allgather(far, mine, 8, all) == EPO_E_TIMEOUT);
    EXPECT(strstr(epo_fail_text(), "rank 4 did not come") != NULL);
}

static void a_late_rank_is_named(void) { CU_ASSERT_EQUAL(run(stays_away), 0); }

static pthread_t self_of[RANKS];

static void on_signal(int number) { (void)number; }

/* Rank 4 is awaited while signals arrive. */
static void is_interrupted(member *m, epo_far *far) {
    char all[RANKS * 8], mine[8] = "";
    self_of[m->rank] = pthread_self();
    pthread_barrier_wait(&together);
    for (int i = 0; m->rank == 4 && i < 20; i++) {
        nanosleep(&(struct timespec){0, 10000000}, NULL);
        for (int r = 0; r < 4; r++)
            EXPECT(pthread_kill(self_of[r], SIGUSR1) == 0);
    }
    EXPECT(epo_far_allgather(far, mine, 8, all) == EPO_OK);
}

static void a_signal_is_no_time_out(void) {
    struct sigaction act = {.sa_handler = on_signal}, before;
    sigaction(SIGUSR1, &act, &before);
    CU_ASSERT_EQUAL(run(is_interrupted), 0);
    sigaction(SIGUSR1, &before, NULL);
}

/* Its connection ends, the ranks meet, and then nobody listens any more. */
static void without_stranger(member *m, epo_far *far) {
    char all[RANKS * 8], mine[8] = "", byte[256];
    EXPECT(epo_far_allgather(far, mine, 8, all) == EPO_OK);
    if (m->rank != 1)
        return;
    ssize_t n = 1;
    for (int i = 0; i < 4 && n > 0; i++) /* its greeting, then the end */
        n = recv(stranger, byte, sizeof byte, 0);
    EXPECT(stranger >= 0 && n <= 0);
    EXPECT(stranger_port > 0 && call_port(stranger_port) < 0);
    close(stranger);
}

static void a_stranger_is_not_admitted(void) {
    strangers_call = call_as_stranger;
    CU_ASSERT_EQUAL(run(without_stranger), 0);
    strangers_call = NULL;
}

/* More than rank 0 keeps as guests; some say the beginning of what a rank would. */
enum { IDLERS = 340 };
static int idler[IDLERS];

static void call_and_idle(uint16_t port) {
    for (int i = 0; i < IDLERS; i++) {
        idler[i] = call_port(port);
        if (i % 3 == 0 && idler[i] >= 0)
            (void)!send(idler[i], "2raf", 4, MSG_NOSIGNAL);
    }
}

static void meets(member *m, epo_far *far) {
    char all[RANKS * 8], mine[8] = "";
    EXPECT(epo_far_allgather(far, mine, 8, all) == EPO_OK);
}

/* Each of them could stay as long as the ranks may take. */
static void idle_strangers_hold_up_nobody(void) {
    int came = 0;
    strangers_call = call_and_idle;
    CU_ASSERT_EQUAL(run(meets), 0);
    strangers_call = NULL;
    for (int i = 0; i < IDLERS; i++) {
        char byte;
        came += idler[i] >= 0;
        CU_ASSERT(idler[i] < 0 || recv(idler[i], &byte, 1, 0) <= 0); /* nobody is there any more */
        close(idler[i]);
    }
    CU_ASSERT_EQUAL(came, IDLERS);
}

/* ---- somebody between rank 0 and the others -------------------------------- */

enum { HELLO = 32, ANSWER = 48, PROOF = 32, WELCOME = 8, THANKS = 8, HEARD = 1 << 16 };

typedef struct listener_between {
    int door;
    uint16_t rank0;
    pthread_t thread;
    void *(*passes)(void *arg); /* NULL: between_main */
    int end[RANKS][2];          /* each rank's connection, and the one to rank 0 for it */
    unsigned char heard[HEARD], first[HELLO + PROOF];
    size_t count;
    bool plain; /* it passes on, no more */
    bool false_rank0_believed, replay_believed, relayed;
} listener_between;

static listener_between between;

static bool take(int fd, void *data, size_t bytes) {
    return recv(fd, data, bytes, MSG_WAITALL) == (ssize_t)bytes;
}

/* Passes a message on, and keeps it. */
static bool pass(int from, int to, unsigned char *data, size_t bytes) {
    if (!take(from, data, bytes) || between.count + bytes > HEARD)
        return false;
    memcpy(between.heard + between.count, data, bytes);
    between.count += bytes;
    return send(to, data, bytes, MSG_NOSIGNAL) == (ssize_t)bytes;
}

/* Plays rank 0 without the key: the rank says no more. */
static void play_rank0(void) {
    unsigned char words[ANSWER];
    const int fd = accept(between.door, NULL, NULL);
    memset(words, 7, sizeof words);
    between.false_rank0_believed = !take(fd, words, HELLO) ||
                                   send(fd, words, ANSWER, MSG_NOSIGNAL) != ANSWER ||
                                   recv(fd, words, 1, 0) > 0;
    close(fd);
}

/* Says again what a rank said. */
static void play_rank(void) {
    unsigned char words[ANSWER];
    const int fd = call_port(between.rank0);
    between.replay_believed = fd < 0 || send(fd, between.first, HELLO, MSG_NOSIGNAL) != HELLO ||
                              !take(fd, words, ANSWER) ||
                              send(fd, between.first + HELLO, PROOF, MSG_NOSIGNAL) != PROOF ||
                              recv(fd, words, 1, 0) > 0;
    close(fd);
}

static void *between_main(void *arg) {
    unsigned char said[HELLO + PROOF], words[ANSWER];
    (void)arg;
    if (!between.plain)
        play_rank0();
    between.relayed = true;
    for (int i = 0; i < RANKS - 1 && between.relayed; i++) {
        const int a = between.end[i][0] = accept(between.door, NULL, NULL);
        const int b = between.end[i][1] = call_port(between.rank0);
        between.relayed = pass(a, b, said, HELLO) && pass(b, a, words, ANSWER) &&
                          pass(a, b, said + HELLO, PROOF) && pass(b, a, words, WELCOME) &&
                          pass(a, b, words, THANKS);
        if (i > 0 || between.plain)
            continue;
        memcpy(between.first, said, sizeof said);
        play_rank();
    }
    return NULL;
}

static void stand_between(uint16_t port) {
    struct sockaddr_in here = {.sin_family = AF_INET,
                               .sin_addr.s_addr =
                                   htonl(between.plain ? INADDR_LOOPBACK : INADDR_ANY)};
    socklen_t size = sizeof here;
    between.rank0 = port;
    between.door = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(between.door, (struct sockaddr *)&here, sizeof here) != 0 ||
        listen(between.door, RANKS) != 0 ||
        getsockname(between.door, (struct sockaddr *)&here, &size) != 0)
        return;
    other_port = ntohs(here.sin_port);
    pthread_create(&between.thread, NULL, between.passes != NULL ? between.passes : between_main,
                   NULL);
}

/* The ranks have met when they are here; what follows is of no interest. */
static void has_met(member *m, epo_far *far) { EXPECT(far != NULL); }

static void what_is_heard_is_of_no_use(void) {
    memset(&between, 0, sizeof between);
    strangers_call = stand_between;
    CU_ASSERT_EQUAL(run(has_met), 0);
    strangers_call = NULL;
    CU_ASSERT_NOT_EQUAL_FATAL(other_port, 0);
    other_port = 0;
    pthread_join(between.thread, NULL);
    CU_ASSERT(between.relayed);
    CU_ASSERT_FALSE(between.false_rank0_believed);
    CU_ASSERT_FALSE(between.replay_believed);
    CU_ASSERT_EQUAL(between.count, (RANKS - 1) * (HELLO + ANSWER + PROOF + WELCOME + THANKS));
    for (size_t i = 0; i + 8 <= between.count; i++)
        for (size_t k = 0; k + 8 <= KEY_BYTES; k++)
            CU_ASSERT(memcmp(between.heard + i, board[0] + k, 8) != 0);
    for (int i = 0; i < RANKS - 1; i++)
        for (int k = 0; k < 2; k++)
            close(between.end[i][k]);
    close(between.door);
}

/* ---- addresses that lead nowhere --------------------------------------------- */

/* A listener whose queue is full: whoever connects hears nothing more. */
typedef struct dead_end {
    int door, filler[4];
} dead_end;
static dead_end dead[8];

static void dead_end_open(dead_end *d, uint32_t address) {
    struct sockaddr_in here = {
        .sin_family = AF_INET, .sin_port = htons(other_port), .sin_addr.s_addr = htonl(address)};
    d->door = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CU_ASSERT_EQUAL(bind(d->door, (struct sockaddr *)&here, sizeof here), 0);
    CU_ASSERT_EQUAL(listen(d->door, 0), 0);
    socklen_t size = sizeof here;
    (void)getsockname(d->door, (struct sockaddr *)&here, &size);
    other_port = ntohs(here.sin_port);
    for (int i = 0; i < 4; i++) {
        d->filler[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        (void)connect(d->filler[i], (struct sockaddr *)&here, sizeof here);
    }
    nanosleep(&(struct timespec){0, 20000000}, NULL);
}

static void dead_ends_close(void) {
    for (uint32_t i = 0; i < dead_ends; i++) {
        for (int k = 0; k < 4; k++)
            close(dead[i].filler[k]);
        close(dead[i].door);
    }
    dead_ends = 0;
}

static void dead_ends_then_relay(uint16_t port) {
    stand_between(port);
    for (uint32_t i = 0; i < dead_ends; i++)
        dead_end_open(&dead[i], INADDR_LOOPBACK + 1 + i);
}

/* Seven of eight: each would be waited for longer than the group may take. */
static void dead_ends_hold_up_nobody(void) {
    memset(&between, 0, sizeof between);
    between.plain = true;
    dead_ends = 7;
    strangers_call = dead_ends_then_relay;
    CU_ASSERT_EQUAL(run(has_met), 0);
    strangers_call = NULL;
    pthread_join(between.thread, NULL);
    CU_ASSERT(between.relayed);
    dead_ends_close();
    other_port = 0;
    for (int i = 0; i < RANKS - 1; i++)
        for (int k = 0; k < 2; k++)
            close(between.end[i][k]);
    close(between.door);
}

static void nobody_there(uint16_t port) {
    (void)port;
    other_port = 0; /* the first one's */
    for (uint32_t i = 0; i < dead_ends; i++)
        dead_end_open(&dead[i], INADDR_LOOPBACK + 1 + i);
}

static void says_so(member *m, epo_far *far) {
    EXPECT(far == NULL);
    EXPECT(strstr(m->text, m->rank == 0 ? "did not come within 1 s" : "leads to it") != NULL);
}

/* Counts naps of 10 ms: seconds that a busy machine does not shorten. */
typedef struct naps {
    pthread_t thread;
    atomic_bool stop;
    atomic_int count;
} naps;

static void *naps_main(void *arg) {
    naps *n = arg;
    while (!atomic_load(&n->stop)) {
        nanosleep(&(struct timespec){0, 10000000}, NULL);
        atomic_fetch_add(&n->count, 1);
    }
    return NULL;
}

/* All of them: the ranks end when the group's limit does, not after each address's. */
static void dead_ends_alone_end_at_the_limit(void) {
    naps n = {.count = 0};
    dead_ends = 8;
    limit_s = 1;
    unreachable = true;
    strangers_call = nobody_there;
    CU_ASSERT_EQUAL_FATAL(pthread_create(&n.thread, NULL, naps_main, &n), 0);
    CU_ASSERT_EQUAL(run(says_so), 0);
    CU_ASSERT(atomic_load(&n.count) < 300); /* one more address would take as long */
    atomic_store(&n.stop, true);
    pthread_join(n.thread, NULL);
    strangers_call = NULL;
    dead_ends_close();
    unreachable = false;
    limit_s = 2;
    other_port = 0;
}

/* Somebody answers at rank 0's address as rank 0 would, up to its welcome. */
static void *unwelcoming_main(void *arg) {
    unsigned char said[PROOF], words[ANSWER];
    (void)arg;
    for (int i = 0; i < RANKS - 1; i++) {
        const int a = between.end[i][0] = accept(between.door, NULL, NULL);
        const int b = between.end[i][1] = call_port(between.rank0);
        between.relayed =
            pass(a, b, words, HELLO) && pass(b, a, words, ANSWER) && pass(a, b, said, PROOF);
    }
    return NULL;
}

static void loses_the_welcome(uint16_t port) {
    stand_between(port);
    CU_ASSERT_NOT_EQUAL_FATAL(other_port, 0);
}

static void hears_no_welcome(member *m, epo_far *far) {
    EXPECT(far == NULL);
    EXPECT(strstr(m->text, m->rank == 0 ? "did not come within 1 s" : "no welcome") != NULL);
}

/* Rank 0 does not take a rank for there that was not told so. */
static void a_lost_welcome_is_named(void) {
    memset(&between, 0, sizeof between);
    between.passes = unwelcoming_main;
    limit_s = 1;
    unreachable = true;
    strangers_call = loses_the_welcome;
    CU_ASSERT_EQUAL(run(hears_no_welcome), 0);
    strangers_call = NULL;
    pthread_join(between.thread, NULL);
    CU_ASSERT(between.relayed);
    for (int i = 0; i < RANKS - 1; i++)
        for (int k = 0; k < 2; k++)
            close(between.end[i][k]);
    close(between.door);
    unreachable = false;
    limit_s = 2;
    other_port = 0;
}

int main(void) {
    static const CU_TestInfo tests[] = {
        {"everybody gets everything", everybody_gets_everything},
        {"a failure reaches everybody", a_failure_reaches_everybody},
        {"different exchanges are an error", different_exchanges_are_an_error},
        {"a late rank is named", a_late_rank_is_named},
        {"a signal is no time-out", a_signal_is_no_time_out},
        {"a stranger is not admitted", a_stranger_is_not_admitted},
        {"idle strangers hold up nobody", idle_strangers_hold_up_nobody},
        {"what is heard is of no use", what_is_heard_is_of_no_use},
        {"addresses that lead nowhere hold up nobody", dead_ends_hold_up_nobody},
        {"where all lead nowhere, the limit ends it", dead_ends_alone_end_at_the_limit},
        {"a lost welcome is named", a_lost_welcome_is_named},
        CU_TEST_INFO_NULL,
    };
    return unit_run("far", tests);
}
