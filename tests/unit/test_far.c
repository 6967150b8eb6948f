/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks of several machines over TCP, here threads of one: what everybody gets, and how an
 * error, a rank that is late or one that is gone reach the others.
 */
#include "backend/far.h"
#include "core/status.h"
#include "unit.h"

#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
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

static bool stranger_calls; /* before the ranks do */
static int stranger_port;

/* Rank 0's card begins with two tokens of 16 bytes and 8 addresses; then comes its port. */
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

static void call_as_stranger(void) {
    uint16_t port;
    char words[64];
    memcpy(&port, board[0] + 2 * 16 + 8 * 4, sizeof port);
    stranger_port = port;
    memset(words, 'x', sizeof words);
    stranger = call_port(port);
    if (stranger >= 0 && send(stranger, words, 32, MSG_NOSIGNAL) != 32)
        stranger_port = -1;
}

static int board_allgather(void *ctx, const void *mine, size_t bytes, void *all) {
    const int rank = *(const int *)ctx;
    if (bytes > sizeof board[0])
        return -1;
    memcpy(board[rank], mine, bytes);
    pthread_barrier_wait(&together);
    if (stranger_calls && rank == 1)
        call_as_stranger();
    for (int r = 0; r < RANKS; r++)
        memcpy((char *)all + (size_t)r * bytes, board[r], bytes);
    pthread_barrier_wait(&together);
    return 0;
}

typedef struct member {
    int rank, wrong;
    void (*fn)(struct member *m, epo_far *far);
    char text[300];
} member;

#define EXPECT(cond)                                                                               \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            m->wrong++;                                                                            \
            fprintf(stderr, "%s:%d: rank %d: %s [%s]\n", __FILE__, __LINE__, m->rank, #cond,       \
                    epo_fail_text());                                                              \
        }                                                                                          \
    } while (0)

static void *member_main(void *arg) {
    member *m = arg;
    const epo_bootstrap boot = {.size = sizeof boot, .ctx = &m->rank, .allgather = board_allgather};
    epo_far *far = NULL;
    EXPECT(epo_far_open(&boot, m->rank, RANKS, 2.0, &far) == EPO_OK);
    if (far != NULL)
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
    stranger_calls = true;
    CU_ASSERT_EQUAL(run(without_stranger), 0);
    stranger_calls = false;
}

int main(void) {
    static const CU_TestInfo tests[] = {
        {"everybody gets everything", everybody_gets_everything},
        {"a failure reaches everybody", a_failure_reaches_everybody},
        {"different exchanges are an error", different_exchanges_are_an_error},
        {"a late rank is named", a_late_rank_is_named},
        {"a signal is no time-out", a_signal_is_no_time_out},
        {"a stranger is not admitted", a_stranger_is_not_admitted},
        CU_TEST_INFO_NULL,
    };
    return unit_run("far", tests);
}
