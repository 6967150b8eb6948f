/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that enter, vote, withdraw or never answer: whatever happens, both ends of a pair
 * hear the same verdict, and "all agree" is the same everywhere.
 */
#include "config.h"

#include "unit.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "preload/intercept/agree.h"

#define RANKS 5
#define LIMIT_S 0.05

typedef struct outcome {
    int entered, whole, index;
    signed char verdict[AGREE_RANKS]; /* by index; -1: no answer */
} outcome;

static comm_key key_of(unsigned n) {
    return (comm_key){{0x7e57000000000000u + (unsigned)getpid(), n}};
}

static void wait_a_little(unsigned *seed) {
    const struct timespec t = {0, (long)(rand_r(seed) % 4) * 3000000};
    if (rand_r(seed) % 2 == 0)
        nanosleep(&t, NULL);
}

/* One rank; `deaf` never votes, as one that was killed. */
static void run_rank(outcome *out, comm_key key, atomic_int *gate, unsigned seed, bool deaf) {
    agree a;
    out->entered = agree_enter(&a, &key);
    atomic_fetch_add(gate, 1); /* NCCL's initialisation: nobody leaves before all are there */
    while (atomic_load(gate) < RANKS)
        ;
    if (!out->entered || deaf)
        return;
    out->index = a.me;
    const int count = agree_count(&a);
    epo_terms_card card = {.abi = EPO_TERMS_ABI, .usable = rand_r(&seed) % 6 != 0};
    wait_a_little(&seed);
    agree_show(&a, &card);
    agree_unlink(&a);
    for (int i = 0; i < count; i++)
        if (i != a.me) {
            const bool yes = agree_wait_card(&a, i, LIMIT_S) && card.usable;
            wait_a_little(&seed);
            agree_vote(&a, i, yes && rand_r(&seed) % 8 != 0);
        }
    for (int i = 0; i < count; i++)
        if (i != a.me)
            out->verdict[i] = agree_verdict(&a, i, LIMIT_S);
    out->whole = agree_whole(&a, RANKS, LIMIT_S);
    agree_leave(&a);
}

static bool one_round(outcome *all, atomic_int *gate, unsigned round, bool with_deaf) {
    pid_t child[RANKS];
    memset(all, 0, RANKS * sizeof *all);
    for (int r = 0; r < RANKS; r++)
        memset(all[r].verdict, -1, sizeof all[r].verdict);
    atomic_store(gate, 0);
    const comm_key key = key_of(round);
    for (int r = 0; r < RANKS; r++) {
        all[r].index = -1;
        child[r] = fork();
        if (child[r] == 0) {
            run_rank(&all[r], key, gate, round * 31 + (unsigned)r, with_deaf && r == 2);
            _exit(0);
        }
    }
    bool well = true;
    for (int r = 0; r < RANKS; r++) {
        int status = 0;
        well = waitpid(child[r], &status, 0) == child[r] && status == 0 && well;
    }
    return well;
}

static void test_verdicts(void) {
    outcome *all = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    atomic_int *gate = (atomic_int *)((char *)all + 32768);
    int agreed = 0, refused = 0, whole = 0;
    CU_ASSERT_PTR_NOT_EQUAL_FATAL(all, MAP_FAILED);
    for (unsigned round = 0; round < 60; round++) {
        CU_ASSERT_TRUE_FATAL(one_round(all, gate, round, round % 5 == 4));
        bool every = true;
        for (int a = 0; a < RANKS; a++)
            for (int b = 0; b < RANKS; b++) {
                if (a == b || all[a].index < 0 || all[b].index < 0)
                    continue;
                const int here = all[a].verdict[all[b].index], there = all[b].verdict[all[a].index];
                CU_ASSERT_EQUAL(here, there);
                agreed += here == 1;
                refused += here == 0;
                every = every && here == 1;
            }
        for (int r = 0; r < RANKS; r++) {
            every = every && all[r].index >= 0;
            if (all[r].index >= 0 && all[(r + 1) % RANKS].index >= 0)
                CU_ASSERT_EQUAL(all[r].whole, all[(r + 1) % RANKS].whole);
        }
        CU_ASSERT_TRUE(!all[0].whole || every);
        whole += all[0].whole;
    }
    CU_ASSERT_TRUE(agreed > 50 && refused > 50);
    munmap(all, 65536);
    (void)whole;
}

/* A file of that name that others could have made. */
static void test_strangers(void) {
    agree a;
    const comm_key key = key_of(1000);
    CU_ASSERT_TRUE(agree_enter(&a, &key));
    char path[sizeof a.path];
    memcpy(path, a.path, sizeof path);
    agree_unlink(&a);
    agree_leave(&a);
    CU_ASSERT_EQUAL(access(path, F_OK), -1);
    const int fd = open(path, O_RDWR | O_CREAT, 0666);
    CU_ASSERT_TRUE_FATAL(fd >= 0 && fchmod(fd, 0666) == 0);
    close(fd);
    CU_ASSERT_FALSE(agree_enter(&a, &key));
    unlink(path);
    CU_ASSERT_EQUAL(symlink("/dev/null", path), 0);
    CU_ASSERT_FALSE(agree_enter(&a, &key));
    unlink(path);
}

static void test_too_many(void) {
    agree a[AGREE_RANKS + 1];
    const comm_key key = key_of(2000);
    for (int i = 0; i < AGREE_RANKS; i++)
        CU_ASSERT_TRUE(agree_enter(&a[i], &key));
    CU_ASSERT_FALSE(agree_enter(&a[AGREE_RANKS], &key));
    CU_ASSERT_EQUAL(agree_count(&a[0]), AGREE_RANKS);
    agree_unlink(&a[0]);
    for (int i = 0; i < AGREE_RANKS; i++)
        agree_leave(&a[i]);
}

static int make_file(const char *folder, const char *name) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CU_ASSERT_TRUE_FATAL(fd >= 0);
    return fd;
}

static bool is_there(const char *folder, const char *name) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

/* What jobs left that were killed while they made a communicator goes; what somebody is in, what is
 * young and what is no room of ours stays. */
static void test_sweep(void) {
    static const char *const left = "ep-overlap-00000000000000010000000000000002-3",
                             *const in_use = "ep-overlap-00000000000000010000000000000003-3",
                             *const other = "ep-overlap-00000000000000010000000000000003-2.bak";
    char folder[] = "/tmp/ep-agree-XXXXXX";
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(folder));
    close(make_file(folder, left));
    close(make_file(folder, other));
    const int fd = make_file(folder, in_use);
    CU_ASSERT_EQUAL(flock(fd, LOCK_SH), 0);
    CU_ASSERT_EQUAL(agree_sweep(folder, 1000), 0);
    CU_ASSERT_TRUE(is_there(folder, left));
    CU_ASSERT_EQUAL(agree_sweep(folder, 0), 1);
    CU_ASSERT_FALSE(is_there(folder, left));
    CU_ASSERT_TRUE(is_there(folder, in_use) && is_there(folder, other));
    close(fd);
    CU_ASSERT_EQUAL(agree_sweep(folder, 0), 1);
    CU_ASSERT_EQUAL(agree_sweep("/no/such/folder", 0), 0);
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, other);
    unlink(path);
    CU_ASSERT_EQUAL(rmdir(folder), 0);
}

/* A rank is in its room until it leaves. */
static void test_in_use(void) {
    agree a;
    const comm_key key = key_of(3000);
    CU_ASSERT_TRUE_FATAL(agree_enter(&a, &key));
    const int fd = open(a.path, O_RDWR | O_CLOEXEC);
    CU_ASSERT_TRUE_FATAL(fd >= 0);
    CU_ASSERT_EQUAL(flock(fd, LOCK_EX | LOCK_NB), -1);
    agree_unlink(&a);
    agree_leave(&a);
    CU_ASSERT_EQUAL(flock(fd, LOCK_EX | LOCK_NB), 0);
    close(fd);
}

/* No memory for a room: none is left behind. */
static void test_no_room(void) {
    agree a;
    const comm_key key = key_of(4000);
    struct rlimit before, none;
    CU_ASSERT_EQUAL_FATAL(getrlimit(RLIMIT_FSIZE, &before), 0);
    none = before;
    none.rlim_cur = 4096;
    signal(SIGXFSZ, SIG_IGN);
    CU_ASSERT_EQUAL_FATAL(setrlimit(RLIMIT_FSIZE, &none), 0);
    CU_ASSERT_FALSE(agree_enter(&a, &key));
    CU_ASSERT_EQUAL_FATAL(setrlimit(RLIMIT_FSIZE, &before), 0);
    CU_ASSERT_EQUAL(access(a.path, F_OK), -1);
}

/* ---- messages ---- */

#define MESSAGES 20000

typedef struct end {
    agree_pair *pair;
    unsigned seed;
    bool sends;
    signed char agreed[MESSAGES + 1];
    int torn;
} end;

static void stall(unsigned *seed) {
    const struct timespec t = {0, 30000};
    if (rand_r(seed) % 50 == 0)
        nanosleep(&t, NULL);
}

static bool one_message(end *e, uint32_t n) {
    const agree_limit limit = {.until = agree_now() + 20e-6};
    agree_offer offer = {.id = n, .offset = 3 * (uint64_t)n, .bytes = 7 * (uint64_t)n};
    if (rand_r(&e->seed) % 4 == 0) {
        agree_refuse(e->pair, n, e->sends ? 3 : 5);
        return false;
    }
    if (!e->sends)
        return agree_give(e->pair, n, &offer) && agree_taken(e->pair, n, &limit);
    if (!agree_get(e->pair, n, &limit, &offer))
        return false;
    stall(&e->seed);
    if (rand_r(&e->seed) % 8 == 0)
        agree_refuse(e->pair, n, 3);
    const bool agreed = agree_take(e->pair, n);
    if (agreed &&
        (offer.id != n || offer.offset != 3 * (uint64_t)n || offer.bytes != 7 * (uint64_t)n))
        e->torn++;
    return agreed;
}

static void *run_end(void *argument) {
    end *e = argument;
    for (uint32_t n = 1; n <= MESSAGES; n++) {
        stall(&e->seed);
        e->agreed[n] = one_message(e, n);
    }
    return NULL;
}

/* Two ends that come early, late or far ahead, refuse or agree: the same answer at both, and
 * what was offered is what the sender got. */
static void test_messages(void) {
    static agree_pair pair;
    static end ends[2];
    pthread_t other;
    int agreed = 0, differ = 0;
    ends[0] = (end){.pair = &pair, .seed = 5, .sends = true};
    ends[1] = (end){.pair = &pair, .seed = 9};
    CU_ASSERT_EQUAL_FATAL(pthread_create(&other, NULL, run_end, &ends[0]), 0);
    run_end(&ends[1]);
    pthread_join(other, NULL);
    for (int n = 1; n <= MESSAGES; n++) {
        differ += ends[0].agreed[n] != ends[1].agreed[n];
        agreed += ends[0].agreed[n];
    }
    CU_ASSERT_EQUAL(differ, 0);
    CU_ASSERT_EQUAL(ends[0].torn, 0);
    CU_ASSERT_TRUE(agreed > 100 && agreed < MESSAGES);
}

typedef struct work { /* what stands before an exchange on its stream */
    agree_pair *pair;
    int left;  /* questions that find it there */
    int offer; /* at this question the peer comes; -1: it does not */
} work;

static bool work_left(void *argument) {
    work *w = argument;
    const agree_offer late = {.id = 1};
    if (w->left == w->offer)
        (void)agree_give(w->pair, 1, &late);
    return w->left-- > 0;
}

static bool waits(work w, double seconds, double *took) {
    static agree_pair pair;
    agree_offer offer;
    memset(&pair, 0, sizeof pair);
    w.pair = &pair;
    const double now = agree_now();
    const agree_limit limit = {now + seconds, now, work_left, &w};
    const bool got = agree_get(&pair, 1, &limit, &offer) && agree_take(&pair, 1);
    *took = agree_now() - now;
    CU_ASSERT_EQUAL(got, w.offer >= 0 && w.left < w.offer);
    if (!got) { /* who comes now is refused */
        const agree_offer late = {.id = 1};
        CU_ASSERT_FALSE(agree_give(&pair, 1, &late));
    }
    return got;
}

/* A peer is waited for while there is work before the exchange, and not beyond the limit. */
static void test_busy(void) {
    double took;
    CU_ASSERT_FALSE(waits((work){.left = 3, .offer = -1}, 1e3, &took));
    CU_ASSERT_TRUE(took < 1e2);
    CU_ASSERT_FALSE(waits((work){.left = 0, .offer = -1}, 1e3, &took));
    CU_ASSERT_TRUE(waits((work){.left = 30, .offer = 10}, 1e3, &took));
    CU_ASSERT_FALSE(waits((work){.left = INT_MAX, .offer = -1}, 5e-3, &took));
    CU_ASSERT_TRUE(took >= 5e-3);
}

/* Halves with each that is late and comes back, and never leaves its bounds. */
static void test_patience(void) {
    double now = 10e-3;
    for (int i = 0; i < 3; i++)
        now = agree_patience(now, 10e-3, true);
    CU_ASSERT_EQUAL(now, 1.25e-3);
    for (int i = 0; i < 9; i++)
        now = agree_patience(now, 10e-3, true);
    CU_ASSERT_EQUAL(now, 1e-3);
    now = agree_patience(now, 10e-3, false);
    CU_ASSERT_EQUAL(now, 2e-3);
    for (int i = 0; i < 9; i++)
        now = agree_patience(now, 10e-3, false);
    CU_ASSERT_EQUAL(now, 10e-3);
    for (int i = 0; i < 9; i++)
        now = agree_patience(1e-3, 1e-3, i % 2 == 0);
    CU_ASSERT_EQUAL(now, 1e-3);
    CU_ASSERT_EQUAL(agree_patience(5e-4, 5e-4, true), 5e-4);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"both ends hear one verdict", test_verdicts},
        {"strangers' files are refused", test_strangers},
        {"more ranks than there is room for", test_too_many},
        {"rooms that were left", test_sweep},
        {"a room in use", test_in_use},
        {"no room", test_no_room},
        {"both ends of a message say the same", test_messages},
        {"a peer is waited for while there is work", test_busy},
        {"patience", test_patience},
        CU_TEST_INFO_NULL,
    };
    return unit_run("interposer: agreeing", tests);
}
