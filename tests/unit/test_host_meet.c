/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that processes share, strangers at rank 0's name, and meet.h, by which other backends'
 * processes meet.
 */
#include "config.h"

#include "host_processes.h"
#include "unit.h"

#include "backend/host/join.h"
#include "backend/meet.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

static int text_has(const char *text, const char *part) { return strstr(text, part) != NULL; }

static int text_has_pid(const char *text, pid_t pid) {
    char part[32];
    snprintf(part, sizeof part, "pid %d", (int)pid);
    return text_has(text, part);
}

static void nap_ms(int ms) {
    struct timespec t = {ms / 1000, (ms % 1000) * 1000000L};
    nanosleep(&t, NULL);
}

typedef struct meet_block {
    _Atomic int come[5];
    epo_turns turns[3];
} meet_block;

static void meet_all(meet_block *b, int ranks, int step) {
    atomic_fetch_add(&b->come[step], 1);
    while (atomic_load(&b->come[step]) < ranks)
        nap_ms(1);
}

/* 20 calls alike, one that rank 1 refuses, one in which rank 2 is elsewhere. */
static void make_turns(proc *me, epo_meeting *m, meet_block *b, int ranks) {
    const int rank = epo_meeting_rank(m);
    epo_turns *mine = &b->turns[rank];
    epo_turn turn = {.kind = EPO_TURN_FORWARD, .plan = 1, .with = {.ffn = 1 << 24, .saved = 2}};
    uint64_t count = 0;
    char text[200] = "";
    for (int i = 0; i < 20; i++, turn.plan++)
        epo_turns_note(mine, ++count, &turn, false);
    meet_all(b, ranks, 3);
    for (int r = 0; r < ranks; r++)
        EXPECT(me, !epo_turns_differ(mine, &b->turns[r], rank, r, count, text, sizeof text));
    turn.kind = EPO_TURN_BACKWARD;
    epo_turns_note(mine, ++count, &turn, rank == 1);
    turn.kind = rank == 2 ? EPO_TURN_BARRIER : EPO_TURN_COMBINE;
    epo_turns_note(mine, ++count, &turn, false);
    turn.kind = rank == 2 ? EPO_TURN_PLAN : EPO_TURN_BARRIER; /* follows from it: not told */
    epo_turns_note(mine, ++count, &turn, false);
    meet_all(b, ranks, 4);
    if (rank != 0)
        return;
    EXPECT(me, epo_turns_differ(mine, &b->turns[2], 0, 2, count, text, sizeof text) &&
                   text_has(text, "rank 0 is in combine of plan 21, rank 2 in barrier"));
    EXPECT(me, epo_turns_differ(mine, &b->turns[1], 0, 1, count, text, sizeof text) &&
                   text_has(text, "rank 1 refused its arguments of backward"));
    EXPECT(me, !epo_turn_differs(mine, &b->turns[1], 0, 1, count, text, sizeof text));
}

/* Each of what a call is made with, at its largest; and what fits everything. */
static void calls_made_otherwise_are_told(void) {
    static const struct {
        epo_turn_with one, other;
        const char *text;
    } cases[] = {
        {{.buffer = 4095}, {.buffer = 1}, "number among the group's is 4095 on rank 3 and 1 on"},
        {{.ffn = 1 << 24}, {.ffn = 7}, "ffn of the layer is 16777216 on rank 3 and 7 on rank 5"},
        {{.saved = 2}, {.saved = 0}, "saved of the layer is 2 on rank 3 and 0 on rank 5"},
        {{.own = 0}, {.own = 1}, "expert of the layer (1: given) is 0 on rank 3 and 1 on rank 5"},
        {{.again = 1}, {.again = 0}, "saves nothing (1: given) is 1 on rank 3 and 0 on rank 5"},
        {{.extra = 2}, {.extra = 1}, "(1: NULL, 2: given) is 2 on rank 3 and 1 on rank 5"},
        {{.extra = 2}, {.extra = 0}, NULL},
        {{.ffn = 8, .saved = 1, .extra = 1}, {.ffn = 8, .saved = 1}, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        epo_turns mine = {0}, other = {0};
        const epo_turn a = {EPO_TURN_FORWARD, 9, cases[i].one};
        const epo_turn b = {EPO_TURN_FORWARD, 9, cases[i].other};
        char text[256] = "";
        epo_turns_note(&mine, 6, &a, false);
        CU_ASSERT_FALSE(epo_turn_differs(&mine, &other, 3, 5, 6, text, sizeof text));
        epo_turns_note(&other, 6, &b, false);
        CU_ASSERT_EQUAL(epo_turn_differs(&mine, &other, 3, 5, 6, text, sizeof text),
                        cases[i].text != NULL);
        CU_ASSERT(cases[i].text == NULL || (text_has(text, "disagree in forward of plan 9: ") &&
                                            text_has(text, cases[i].text)));
        epo_turns_note(&mine, 6, &a, true); /* refused by both: each has its own error */
        epo_turns_note(&other, 6, &b, true);
        CU_ASSERT_FALSE(epo_turn_differs(&mine, &other, 3, 5, 6, text, sizeof text));
        epo_turns_note(&other, 6 + EPO_TURNS, &b, false); /* far ahead */
        CU_ASSERT_FALSE(epo_turns_differ(&mine, &other, 3, 5, 6, text, sizeof text));
    }
}

static void meet_and_share(procs *all, proc *me) {
    epo_meeting *m = NULL;
    void *block = NULL, *more = NULL;
    char text[200];
    EXPECT(me, epo_meet(&me->config, 4096, &m, &block) == EPO_OK);
    if (m == NULL)
        return;
    int rank = epo_meeting_rank(m);
    EXPECT(me, epo_meeting_ranks(m) == all->n);
    epo_meeting_enter(m);
    if (rank == 0)
        EXPECT(me, epo_meeting_give(m, 20480, 7, &more) == EPO_OK);
    meet_all(block, all->n, 0);
    if (rank != 0)
        EXPECT(me, epo_meeting_take(m, 20480, 7, &more) == EPO_OK);
    if (more != NULL)
        ((_Atomic int *)more)[rank] = rank + 1;
    meet_all(block, all->n, 1);
    for (int r = 0; r < all->n && more != NULL; r++) {
        EXPECT(me, ((_Atomic int *)more)[r] == r + 1);
        EXPECT(me, !epo_meeting_lost(m, r, text, sizeof text));
    }
    meet_all(block, all->n, 2);
    make_turns(me, m, block, all->n);
    if (rank == 1)
        raise(SIGKILL);
    if (rank == 2)
        epo_meeting_leave(m);
    while (rank == 0 && !epo_meeting_lost(m, 1, text, sizeof text))
        nap_ms(1);
    EXPECT(me, rank != 0 || (text_has(text, "rank 1") && text_has_pid(text, all->p[1].pid) &&
                             text_has(text, "ended without closing the group")));
    while (rank == 0 && !epo_meeting_lost(m, 2, text, sizeof text))
        nap_ms(1);
    EXPECT(me, rank != 0 || (text_has(text, "rank 2") && text_has(text, "left the group")));
    if (rank == 0)
        epo_meeting_leave(m);
    epo_meeting_end(m);
}

static void a_meeting_shares_and_tells_who_is_lost(void) {
    procs *all = procs_new(3, 10.0, meet_and_share);
    CU_ASSERT_FALSE(procs_run(all)); /* rank 1 was killed */
    CU_ASSERT_EQUAL(procs_failures(all), 0);
    procs_free(all);
}

/* A rank that has no memory for a group, whichever it is, comes to say so: nobody waits for the
 * limit, and all know why.  Then they make the next one. */
static void meet_without(procs *all, proc *me) {
    const epo_backend_ops *ops = epo_backend_get();
    epo_backend *be = NULL;
    if (me->mark)
        me->config.wrong = epo_fail(EPO_E_NOMEM, "need 648 bytes");
    const epo_status status = ops->open(&me->config, &be);
    EXPECT(me, status == EPO_E_NOMEM && be == NULL);
    EXPECT(me, text_has(epo_fail_text(), "need 648 bytes"));
    for (int r = 0; r < all->n; r++) {
        char name[16];
        snprintf(name, sizeof name, "rank %d", r);
        EXPECT(me, me->mark || !all->p[r].mark || text_has(epo_fail_text(), name));
    }
    me->config.wrong = EPO_OK;
    EXPECT(me, ops->open(&me->config, &be) == EPO_OK);
    ops->close(be, false);
}

static void a_rank_without_memory_tells_the_others(void) {
    for (int r = 0; r < 3; r++) {
        procs *all = procs_new(3, 30.0, meet_without);
        all->p[r].mark = 1;
        CU_ASSERT_TRUE(procs_run(all));
        CU_ASSERT_EQUAL(procs_failures(all), 0);
        procs_free(all);
    }
}

typedef struct member {
    epo_world *world;
    proc p;
    procs *all;
} member;

static void *member_main(void *arg) {
    member *m = arg;
    m->p.config.threads = m->world;
    meet_without(m->all, &m->p);
    return NULL;
}

/* The one that refuses comes first, in between, or last. */
static void a_thread_without_memory_tells_the_others(void) {
    for (int wrong = 0; wrong < 3; wrong++) {
        procs *all = procs_new(3, 30.0, meet_without);
        pthread_t thread[3];
        member m[3];
        epo_world *world = NULL;
        CU_ASSERT_EQUAL_FATAL(epo_backend_get()->world_create(3, &world), EPO_OK);
        all->p[wrong].mark = 1;
        for (int r = 0; r < 3; r++) {
            m[r] = (member){world, all->p[r], all};
            CU_ASSERT_EQUAL_FATAL(pthread_create(&thread[r], NULL, member_main, &m[r]), 0);
            nap_ms(5);
        }
        for (int r = 0; r < 3; r++) {
            pthread_join(thread[r], NULL);
            CU_ASSERT_EQUAL(m[r].p.failures, 0);
        }
        epo_backend_get()->world_destroy(world);
        procs_free(all);
    }
}

/* Told when it is made, not by a signal when it is written to. */
static void a_small_dev_shm(procs *all, proc *me) {
    (void)all;
    int fd = -1;
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("small", "/dev/shm", "tmpfs", 0, "size=1m") != 0) {
        me->mark = -1;
        return;
    }
    EXPECT(me, host_memfile_create(65536, true, &fd) == EPO_OK);
    close(fd);
    proc_note(me, host_memfile_create(4 << 20, true, &fd));
    EXPECT(me, host_memfile_create(65536, true, &fd) == EPO_OK); /* nothing was left */
}

static void dev_shm_is_too_small(void) {
    procs *all = procs_new(1, 5.0, a_small_dev_shm);
    CU_ASSERT_TRUE(procs_run(all));
    if (all->p[0].mark == -1) {
        puts("(left out: a mount of its own is not allowed here) ");
    } else {
        CU_ASSERT_EQUAL(procs_failures(all), 0);
        CU_ASSERT_EQUAL(all->p[0].status, EPO_E_NOMEM);
        CU_ASSERT(text_has(all->p[0].text, "need 4194304 bytes"));
    }
    procs_free(all);
}

/* As another user, connects as often as fits; then waits until the pipe ends. */
static void come_as_stranger(const struct sockaddr_un *a, socklen_t length, int told) {
    char byte;
    if (setuid(65534) != 0)
        _exit(1);
    for (int i = 0; i < 100; i++) {
        const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0);
        if (connect(fd, (const struct sockaddr *)a, length) != 0)
            _exit(1);
    }
    _exit(read(told, &byte, 1) == 0 ? 0 : 1);
}

/* Rank 0 turns some away and looks at its limit again, however many come. */
static void strangers_who_keep_coming(void) {
    if (geteuid() != 0) {
        puts("(left out: needs root) ");
        return;
    }
    host_name name = {UINT64_C(0x5712a46e) ^ (uint64_t)getpid() << 32, 0};
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int listener = -1, holder = 0, pipes[2], status = -1, turns = 0;
    CU_ASSERT_EQUAL_FATAL(host_socket_listen(&name, &listener, &holder), EPO_OK);
    socklen_t length = sizeof a;
    CU_ASSERT_EQUAL_FATAL(getsockname(listener, (struct sockaddr *)&a, &length), 0);
    CU_ASSERT_EQUAL_FATAL(pipe(pipes), 0);
    const pid_t pid = fork();
    if (pid == 0) {
        close(pipes[1]);
        come_as_stranger(&a, length, pipes[0]);
    }
    for (struct pollfd p = {listener, POLLIN, 0}; poll(&p, 1, turns > 0 ? 0 : 5000) > 0; turns++) {
        nap_ms(turns > 0 ? 0 : 200); /* until all are there */
        CU_ASSERT_EQUAL(host_socket_accept(listener), -1);
        CU_ASSERT_FALSE(host_socket_starved());
    }
    CU_ASSERT(turns > 1);
    close(pipes[0]);
    close(pipes[1]);
    CU_ASSERT(waitpid(pid, &status, 0) == pid && status == 0);
    close(listener);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"a meeting shares memory and tells who is lost", a_meeting_shares_and_tells_who_is_lost},
        {"calls that ranks make otherwise", calls_made_otherwise_are_told},
        {"a rank without memory tells the others", a_rank_without_memory_tells_the_others},
        {"a thread without memory tells the others", a_thread_without_memory_tells_the_others},
        {"a /dev/shm that is too small", dev_shm_is_too_small},
        {"strangers who keep coming", strangers_who_keep_coming},
        CU_TEST_INFO_NULL,
    };
    setenv("MASTER_PORT", "17", 1);
    return unit_run("host_meet", tests);
}
