/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks as processes: meeting, sharing memory, and every way in which one of them
 * can be wrong, missing or dead.
 */
#include "config.h"

#include "host_processes.h"
#include "unit.h"

#include "backend/host/join.h"

#include <sched.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>

static const epo_backend_ops *ops;

static int text_has(const char *text, const char *part) { return strstr(text, part) != NULL; }

static int text_has_pid(const char *text, pid_t pid) {
    char part[32];
    snprintf(part, sizeof part, "pid %d", (int)pid);
    return text_has(text, part);
}

static void slurm_says_nothing(void) {
    static const char *const names[] = {"SLURM_STEP_NODELIST",
                                        "SLURM_STEP_TASKS_PER_NODE",
                                        "SLURM_STEP_NUM_TASKS",
                                        "SLURMD_NODENAME",
                                        "SLURM_DISTRIBUTION",
                                        "SLURM_JOB_ID",
                                        "SLURM_STEP_ID",
                                        "MASTER_PORT",
                                        "TORCHELASTIC_RUN_ID",
                                        "PMIX_NAMESPACE",
                                        "PMI_JOBID",
                                        "EP_OVERLAP_HOST_LINK",
                                        "WORLD_SIZE",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "PMI_SIZE"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unsetenv(names[i]);
}

static void nap_ms(int ms) {
    struct timespec t = {ms / 1000, (ms % 1000) * 1000000L};
    nanosleep(&t, NULL);
}

static epo_status sync_flag(proc *me, epo_backend *be, const void *flags, uint64_t epoch) {
    epo_queue *q;
    epo_event *e;
    EXPECT(me, ops->queue_create(be, EPO_QUEUE_COMPUTE, &q) == EPO_OK);
    EXPECT(me, ops->event_create(be, &e) == EPO_OK);
    epo_deps deps = {.name = "wait", .chunk = -1, .nwait = 1, .signal = e};
    deps.wait[0] = (epo_ready){NULL, flags, epoch, me->config.ranks, -1, "dispatch", 2, 0, 0, NULL};
    EXPECT(me, ops->zero(q, NULL, 0, &deps) == EPO_OK);
    epo_status status = ops->sync(be, e);
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    ops->event_destroy(be, e);
    ops->queue_destroy(be, q);
    if (status != EPO_OK)
        epo_fail(status, "%s", text);
    return status;
}

/* ---- all is well -------------------------------------------------------------- */

/* Every rank writes its number into everybody's window. */
static void use_window(proc *me, epo_backend *be, int rank, int ranks) {
    epo_window *w = NULL;
    epo_queue *q;
    int32_t value[4] = {rank + 1, rank + 2, rank + 3, rank + 4};
    uint64_t flags = 16 * (uint64_t)ranks;
    EXPECT(me, ops->window_create(be, flags + 8 * (uint64_t)ranks, &w) == EPO_OK);
    EXPECT(me, ops->queue_create(be, EPO_QUEUE_COMM, &q) == EPO_OK);
    if (w == NULL)
        return;
    epo_segment seg[PROC_MAX];
    for (int r = 0; r < ranks; r++)
        seg[r] = (epo_segment){
            .peer = r, .src = value, .dst_offset = 16 * (uint64_t)rank, .rows = 1, .row_bytes = 16};
    epo_exchange x = {.window = w, .send = seg, .nsend = ranks, .flag_offset = flags, .epoch = 1};
    EXPECT(me, ops->exchange(q, &x, NULL) == EPO_OK);
    const unsigned char *mine = ops->window_local(w);
    me->config.ranks = ranks;
    EXPECT(me, sync_flag(me, be, mine + flags, 1) == EPO_OK);
    for (int r = 0; r < ranks; r++)
        EXPECT(me, ((const int32_t *)(const void *)mine)[4 * r] == r + 1);
    EXPECT(me, ops->barrier(be) == EPO_OK);
    ops->queue_destroy(be, q);
    ops->window_destroy(be, w);
}

static void meet_often(procs *all, proc *me) {
    int before = folder_count("/proc/self/fd", ""), rank = me->config.rank;
    static const int even[] = {0, 2}, odd[] = {3, 1};
    for (int turn = 0; turn < 3; turn++) {
        epo_backend_config config = me->config, sub = me->config;
        config.ranks = sub.ranks = all->n;
        sub.members = rank % 2 == 0 ? even : odd;
        sub.nmembers = 2;
        epo_backend *be = NULL, *two = NULL;
        EXPECT(me, ops->open(&config, &be) == EPO_OK);
        EXPECT(me, ops->open(&sub, &two) == EPO_OK);
        if (be == NULL || two == NULL)
            return;
        EXPECT(me, ops->info(two)->rank == (rank == 2 || rank == 1) && ops->info(two)->ranks == 2);
        use_window(me, be, rank, all->n);
        use_window(me, two, ops->info(two)->rank, 2);
        float sum = (float)(rank + 1);
        EXPECT(me, ops->allreduce(two, &sum, 1, NULL) == EPO_OK);
        EXPECT(me, sum == (rank % 2 == 0 ? 4.0f : 6.0f));
        ops->close(two, false);
        ops->close(be, false);
    }
    EXPECT(me, folder_count("/proc/self/fd", "") == before);
}

static void processes_meet_and_leave_nothing(void) {
    int before = folder_count("/dev/shm", "ep-overlap");
    procs *all = procs_new(4, 30.0, meet_often);
    CU_ASSERT_TRUE(procs_run(all));
    CU_ASSERT_EQUAL(procs_failures(all), 0);
    CU_ASSERT_EQUAL(folder_count("/dev/shm", "ep-overlap"), before);
    procs_free(all);
}

/* ---- wrong company ------------------------------------------------------------- */

static void just_open(procs *all, proc *me) {
    (void)all;
    epo_backend *be = NULL;
    if (me->mark > 0)
        nap_ms(me->mark);
    proc_note(me, ops->open(&me->config, &be));
    if (be != NULL)
        ops->close(be, false);
}

static void one_rank_twice(void) {
    for (int twice = 0; twice < 2; twice++) {
        procs *all = procs_new(3, 20.0, just_open);
        all->p[2].config.rank = twice; /* 0 1 0; 0 1 1 */
        all->p[2].mark = 100;
        CU_ASSERT_TRUE(procs_run(all));
        for (int i = 0; i < 3; i++) {
            CU_ASSERT_EQUAL(all->p[i].status, EPO_E_PEER);
            CU_ASSERT(text_has(all->p[i].text, twice ? "rank 1" : "rank 0"));
            CU_ASSERT(text_has_pid(all->p[i].text, all->p[twice].pid));
            CU_ASSERT(text_has_pid(all->p[i].text, all->p[2].pid));
        }
        procs_free(all);
    }
}

/* Which launch this is decides who meets, and no more than that. */
static uint64_t key_with(int ranks, const char *name, const char *value) {
    int fd[2];
    uint64_t key = 0;
    if (pipe(fd) != 0)
        abort();
    pid_t pid = fork(); /* the counters stay as they are here */
    if (pid == 0) {
        host_place place = {.rank = 0, .ranks = ranks, .world_ranks = ranks};
        if (name != NULL)
            setenv(name, value, 1);
        key = host_hello_key(&place);
        _exit(write(fd[1], &key, sizeof key) == (ssize_t)sizeof key ? 0 : 1);
    }
    if (read(fd[0], &key, sizeof key) != (ssize_t)sizeof key)
        key = 0;
    close(fd[0]);
    close(fd[1]);
    waitpid(pid, NULL, 0);
    return key;
}

static void who_meets(void) {
    uint64_t key = key_with(2, NULL, NULL);
    CU_ASSERT(key != 0 && key == key_with(2, NULL, NULL));
    CU_ASSERT_EQUAL(key, key_with(3, NULL, NULL)); /* so that counts can be compared */
    CU_ASSERT_NOT_EQUAL(key, key_with(2, "MASTER_PORT", "29500"));
    CU_ASSERT_NOT_EQUAL(key, key_with(2, "SLURM_STEP_ID", "4"));
    setenv("SLURM_JOB_ID", "9", 1);
    setenv("SLURM_STEP_ID", "1", 1);
    setenv("SLURM_STEP_NUM_TASKS", "2", 1);
    uint64_t step = key_with(2, NULL, NULL);
    CU_ASSERT_NOT_EQUAL(step, key_with(2, "SLURM_STEP_ID", "2"));
    CU_ASSERT_NOT_EQUAL(step, key_with(2, "SLURM_JOB_ID", "8"));
    /* Tasks have different parents; ranks that a task made have that task. */
    CU_ASSERT_EQUAL(step, key_with(4, "WORLD_SIZE", "2"));
    CU_ASSERT_NOT_EQUAL(step, key_with(4, "WORLD_SIZE", "4"));
    slurm_says_nothing();
}

static void counts_that_differ(void) {
    procs *all = procs_new(3, 20.0, just_open);
    all->p[1].config.ranks = 4;
    CU_ASSERT_TRUE(procs_run(all));
    for (int i = 0; i < 2; i++) {
        CU_ASSERT_EQUAL(all->p[i].status, EPO_E_PEER);
        CU_ASSERT(text_has(all->p[i].text, "group of 3 ranks") &&
                  text_has(all->p[i].text, "one of 4"));
    }
    CU_ASSERT_EQUAL(all->p[2].status, EPO_E_PEER);
    procs_free(all);
}

static void open_with_link(procs *all, proc *me) {
    setenv(EPO_ENV_HOST_LINK, me->config.rank == 1 ? "2,10" : "", 1);
    just_open(all, me);
}

static void links_that_differ(void) {
    procs *all = procs_new(2, 20.0, open_with_link);
    CU_ASSERT_TRUE(procs_run(all));
    for (int i = 0; i < 2; i++) {
        CU_ASSERT_EQUAL(all->p[i].status, EPO_E_PEER);
        CU_ASSERT(text_has(all->p[i].text, EPO_ENV_HOST_LINK) &&
                  text_has(all->p[i].text, "2 GB/s"));
    }
    procs_free(all);
}

static void hello_of(int rank, host_hello *out) {
    host_place place = {.rank = rank, .ranks = 2};
    host_hello_make(&place, out);
}

static void other_machines_versions_namespaces(void) {
    host_hello a, b;
    hello_of(0, &a);
    hello_of(1, &b);
    CU_ASSERT_EQUAL(host_hello_check(&a, &b), EPO_OK);
    snprintf(b.node, sizeof b.node, "n7");
    b.ipc++;
    CU_ASSERT_EQUAL(host_hello_check(&a, &b), EPO_E_UNSUPPORTED);
    CU_ASSERT(text_has(epo_fail_text(), "n7") && text_has(epo_fail_text(), "IPC namespaces"));
    b.has_boot = a.has_boot = 1;
    snprintf(b.boot, sizeof b.boot, "another");
    CU_ASSERT_EQUAL(host_hello_check(&a, &b), EPO_E_UNSUPPORTED);
    CU_ASSERT(text_has(epo_fail_text(), "different machines"));
    snprintf(b.version, sizeof b.version, "99.0");
    CU_ASSERT_EQUAL(host_hello_check(&a, &b), EPO_E_VERSION);
    CU_ASSERT(text_has(epo_fail_text(), "99.0") && text_has(epo_fail_text(), PACKAGE_VERSION));
}

/* A process of another version: its hello is shorter, its answer is the same. */
static void open_or_old_hello(procs *all, proc *me) {
    if (me == &all->p[0]) {
        just_open(all, me);
        return;
    }
    host_hello h;
    host_welcome w = {0};
    host_name name = {0, 0};
    host_place place = {.rank = 1, .ranks = 2};
    int pid, fd, rc = 0;
    host_hello_make(&place, &h);
    snprintf(h.version, sizeof h.version, "0.0.7");
    name.key = host_hello_key(&place);
    while ((fd = host_socket_connect(&name, &pid)) < 0)
        nap_ms(5);
    EXPECT(me, host_socket_send(fd, &h, 40, -1));
    while ((rc = host_socket_receive(fd, &w, sizeof w, NULL)) == 0)
        nap_ms(5);
    EXPECT(me, rc == 1 && w.status == EPO_E_VERSION && text_has(w.text, "0.0.7"));
}

static void a_rank_of_another_version(void) {
    procs *all = procs_new(2, 20.0, open_or_old_hello);
    CU_ASSERT_TRUE(procs_run(all));
    CU_ASSERT_EQUAL(procs_failures(all), 0);
    CU_ASSERT_EQUAL(all->p[0].status, EPO_E_VERSION);
    CU_ASSERT(text_has(all->p[0].text, "0.0.7") && text_has(all->p[0].text, PACKAGE_VERSION));
    procs_free(all);
}

static void unshared_open(procs *all, proc *me) {
    if (me->config.rank == 1 && unshare(CLONE_NEWIPC) != 0)
        me->mark = -1;
    just_open(all, me);
}

static void an_ipc_namespace_of_its_own(void) {
    if (geteuid() != 0) {
        puts("(left out: needs root) ");
        return;
    }
    procs *all = procs_new(2, 20.0, unshared_open);
    CU_ASSERT_TRUE(procs_run(all));
    if (all->p[1].mark == -1)
        puts("(left out: unshare is not allowed here) ");
    else
        for (int i = 0; i < 2; i++)
            CU_ASSERT(all->p[i].status == EPO_E_UNSUPPORTED &&
                      text_has_pid(all->p[i].text, all->p[0].pid) &&
                      text_has_pid(all->p[i].text, all->p[1].pid));
    procs_free(all);
}

/* ---- missing company ------------------------------------------------------------- */

static void missing_ranks_are_named(void) {
    for (int zero_missing = 0; zero_missing < 2; zero_missing++) {
        procs *all = procs_new(2, 0.4, just_open);
        for (int i = 0; i < 2; i++) {
            all->p[i].config.rank = i + zero_missing;
            all->p[i].config.ranks = 3;
        }
        CU_ASSERT_TRUE(procs_run(all));
        for (int i = 0; i < 2; i++) {
            CU_ASSERT_EQUAL(all->p[i].status, EPO_E_TIMEOUT);
            CU_ASSERT(text_has(all->p[i].text, zero_missing ? "for rank 0" : "for rank 2"));
        }
        procs_free(all);
    }
}

static void slurm_says_where(const char *nodes) {
    setenv("SLURM_STEP_NODELIST", nodes, 1);
    setenv("SLURM_STEP_TASKS_PER_NODE", "1(x2)", 1);
    setenv("SLURM_STEP_NUM_TASKS", "2", 1);
    setenv("SLURMD_NODENAME", "here", 1);
}

static void nodes_of_missing_ranks(void) {
    /* 192.0.2.0/24 is nobody's; refused long before the limit. */
    slurm_says_where("here,192.0.2.1");
    procs *all = procs_new(1, 30.0, just_open);
    all->p[0].config.ranks = 2;
    CU_ASSERT_TRUE(procs_run(all));
    CU_ASSERT_EQUAL(all->p[0].status, EPO_E_UNSUPPORTED);
    CU_ASSERT(text_has(all->p[0].text, "192.0.2.1") && text_has(all->p[0].text, "one machine"));
    procs_free(all);
    slurm_says_where("here,localhost"); /* this machine under another name: waited for */
    all = procs_new(1, 1.3, just_open);
    all->p[0].config.ranks = 2;
    CU_ASSERT_TRUE(procs_run(all));
    CU_ASSERT_EQUAL(all->p[0].status, EPO_E_TIMEOUT);
    CU_ASSERT(text_has(all->p[0].text, "rank 1 (on localhost)"));
    procs_free(all);
    slurm_says_nothing();
}

/* ---- squatters ---------------------------------------------------------------------- */

static uint64_t next_key(int ranks) { /* in a child: the counter is not moved here */
    host_place place = {.rank = 0, .ranks = ranks, .world_ranks = ranks};
    return host_hello_key(&place);
}

/* The key of step 7.0 in a launch told apart by one more variable. */
static uint64_t step_key(procs *all, int i, const char *name, const char *value) {
    pid_t pid = fork();
    if (pid == 0) {
        setenv("SLURM_JOB_ID", "7", 1);
        setenv("SLURM_STEP_ID", "0", 1);
        unsetenv("SLURM_HET_SIZE");
        setenv("SLURM_STEP_LAUNCHER_PORT", "4000", 1);
        if (name != NULL)
            setenv(name, value, 1);
        if (i == 4) /* the other component of a heterogeneous step */
            setenv("SLURM_STEP_LAUNCHER_PORT", "4001", 1);
        ((volatile uint64_t *)(void *)all->shared)[i] = next_key(2);
        _exit(0);
    }
    int status = 1;
    CU_ASSERT_TRUE(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
    return ((volatile uint64_t *)(void *)all->shared)[i];
}

static void steps_of_two_clusters_do_not_meet(void) {
    procs *all = procs_new(1, 20.0, just_open);
    uint64_t key = step_key(all, 0, NULL, NULL);
    CU_ASSERT_EQUAL(step_key(all, 1, "SLURM_PROCID", "1"), key);
    CU_ASSERT_NOT_EQUAL(step_key(all, 2, "SLURM_CLUSTER_NAME", "other"), key);
    CU_ASSERT_NOT_EQUAL(step_key(all, 2, "SLURM_CONF", "/other/slurm.conf"), key);
    CU_ASSERT_NOT_EQUAL(step_key(all, 2, "SLURM_STEP_LAUNCHER_PORT", "4002"), key);
    CU_ASSERT_EQUAL(step_key(all, 3, "SLURM_HET_SIZE", "2"),
                    step_key(all, 4, "SLURM_HET_SIZE", "2"));
    CU_ASSERT_TRUE(procs_run(all));
    procs_free(all);
}

static void squat_or_open(procs *all, proc *me) {
    volatile int *ready = (volatile int *)(void *)all->shared;
    if (me != &all->p[2]) {
        while (*ready == 0)
            nap_ms(5);
        just_open(all, me);
        return;
    }
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "ep-overlap.0.%016llx.0",
                     (unsigned long long)next_key(2));
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    EXPECT(me, setuid(65534) == 0);
    EXPECT(me,
           bind(fd, (struct sockaddr *)&a, (socklen_t)(sizeof a.sun_family + 1 + (size_t)n)) == 0);
    EXPECT(me, listen(fd, 8) == 0);
    *ready = 1;
    nap_ms(1500);
}

static void a_stranger_on_the_name(void) {
    if (geteuid() != 0) {
        puts("(left out: needs root) ");
        return;
    }
    procs *all = procs_new(3, 20.0, squat_or_open);
    all->p[0].config.ranks = all->p[1].config.ranks = 2;
    CU_ASSERT_TRUE(procs_run(all));
    CU_ASSERT_EQUAL(procs_failures(all), 0);
    CU_ASSERT_EQUAL(all->p[0].status, EPO_OK);
    procs_free(all);
}

/* Rank `shared[0]` is welcomed and ends before it is one of the group. */
static void open_or_end(procs *all, proc *me) {
    if (me->config.rank != all->shared[0]) {
        just_open(all, me);
        return;
    }
    host_place place = {.rank = me->config.rank,
                        .ranks = all->n,
                        .world_rank = me->config.rank,
                        .world_ranks = all->n,
                        .timeout_ns = 20000000000,
                        .warn_ns = 20000000000};
    static struct host_join *join; /* nobody ends it: that is the case */
    host_shared *shared;
    EXPECT(me, host_join_ranks(&place, &join, &shared) == EPO_OK);
}

static void one_that_ends_while_the_group_is_made(void) {
    for (int who = 0; who < 3; who++) {
        procs *all = procs_new(3, 20.0, open_or_end);
        all->shared[0] = (unsigned char)who;
        CU_ASSERT_TRUE(procs_run(all));
        CU_ASSERT_EQUAL(procs_failures(all), 0);
        for (int r = 0; r < 3; r++) {
            if (r == who)
                continue;
            CU_ASSERT_EQUAL(all->p[r].status, EPO_E_PEER); /* found, not waited out */
            CU_ASSERT(text_has(all->p[r].text, "ended while the group was made"));
            CU_ASSERT(text_has_pid(all->p[r].text, all->p[who].pid));
        }
        procs_free(all);
    }
}

/* ---- dying company ---------------------------------------------------------------------- */

static void wait_for_all(procs *all, proc *me) {
    epo_backend *be = NULL;
    epo_window *w = NULL;
    EXPECT(me, ops->open(&me->config, &be) == EPO_OK);
    if (be == NULL)
        return;
    EXPECT(me, ops->window_create(be, 4096, &w) == EPO_OK);
    EXPECT(me, ops->barrier(be) == EPO_OK);
    me->mark = 1;
    if (me->config.rank == 1) {
        if (all->shared[0] == 'x')
            exit(0); /* without closing the group */
        for (;;)
            pause();
    }
    proc_note(me, sync_flag(me, be, ops->window_local(w), 1));
    EXPECT(me, ops->status(be) == me->status);
    EXPECT(me, ops->barrier(be) == me->status);
    ops->window_destroy(be, w);
    ops->close(be, true);
}

static void marks_wait(procs *all) {
    for (int i = 0; i < all->n; i++)
        while (all->p[i].mark == 0)
            nap_ms(2);
    nap_ms(50);
}

static void kill_one(procs *all) {
    marks_wait(all);
    kill(all->p[1].pid, SIGKILL);
}

static void stop_one(procs *all) {
    marks_wait(all);
    kill(all->p[1].pid, SIGSTOP);
    for (int i = 0; i < all->n; i++) { /* the others end by themselves */
        siginfo_t info;
        if (i != 1)
            waitid(P_PID, (id_t)all->p[i].pid, &info, WEXITED | WNOWAIT);
    }
    kill(all->p[1].pid, SIGKILL);
}

static void a_rank_that_dies(void) {
    static void (*const how[])(procs * all) = {kill_one, NULL};
    for (int i = 0; i < 2; i++) {
        procs *all = procs_new(4, 30.0, wait_for_all);
        all->parent = how[i];
        all->shared[0] = how[i] == NULL ? 'x' : 0;
        procs_run(all);
        CU_ASSERT_EQUAL(procs_failures(all), 0);
        for (int r = 0; r < 4; r++) {
            if (r == 1)
                continue;
            CU_ASSERT_EQUAL(all->p[r].status, EPO_E_PEER); /* found, not waited out */
            CU_ASSERT(text_has(all->p[r].text, "rank 1 (pid") &&
                      text_has_pid(all->p[r].text, all->p[1].pid));
        }
        procs_free(all);
    }
}

static void a_rank_that_stops(void) {
    procs *all = procs_new(3, 0.5, wait_for_all);
    all->parent = stop_one;
    procs_run(all);
    CU_ASSERT_EQUAL(procs_failures(all), 0);
    for (int r = 0; r < 3; r += 2) {
        CU_ASSERT_EQUAL(all->p[r].status, EPO_E_TIMEOUT);
        CU_ASSERT(text_has(all->p[r].text, "rank 1 (pid") &&
                  text_has(all->p[r].text, "in dispatch chunk 2 (epoch 1, has 0)"));
    }
    procs_free(all);
}

/* ---- the caller's bootstrap ------------------------------------------------------------------ */

typedef struct board {
    _Atomic int come[4];
    unsigned char data[4][512];
} board;

typedef struct board_ctx {
    board *b;
    int rank, ranks, fail;
} board_ctx;

static int board_allgather(void *arg, const void *mine, size_t bytes, void *all) {
    board_ctx *c = arg;
    if (c->fail || bytes > sizeof c->b->data[0])
        return 7;
    memcpy(c->b->data[c->rank], mine, bytes);
    c->b->come[c->rank] = 1;
    for (int r = 0; r < c->ranks; r++) {
        while (c->b->come[r] == 0)
            nap_ms(1);
        memcpy((unsigned char *)all + (size_t)r * bytes, c->b->data[r], bytes);
    }
    return 0;
}

static void open_by_bootstrap(procs *all, proc *me) {
    board_ctx ctx = {(board *)(void *)all->shared, me->config.rank, all->n, all->shared[4095]};
    epo_bootstrap b = {sizeof b, &ctx, board_allgather, NULL};
    me->config.bootstrap = &b;
    char own[16]; /* nothing else tells that they belong together */
    snprintf(own, sizeof own, "%d", (int)getpid());
    setenv("MASTER_PORT", own, 1);
    just_open(all, me);
}

static void a_bootstrap_of_the_callers(void) {
    procs *all = procs_new(3, 20.0, open_by_bootstrap);
    CU_ASSERT_TRUE(procs_run(all));
    for (int i = 0; i < 3; i++) {
        CU_ASSERT_EQUAL(all->p[i].status, EPO_OK);
        if (all->p[i].status != EPO_OK)
            fprintf(stderr, "rank %d: %s\n", i, all->p[i].text);
    }
    procs_free(all);
    all = procs_new(2, 20.0, open_by_bootstrap);
    all->shared[4095] = 1;
    CU_ASSERT_TRUE(procs_run(all));
    CU_ASSERT_EQUAL(all->p[0].status, EPO_E_PEER);
    CU_ASSERT(text_has(all->p[0].text, "bootstrap") && text_has(all->p[0].text, "7"));
    procs_free(all);
}

/* ---- memory ------------------------------------------------------------------------------------
 */

static void memory_has_no_name(void) {
    int before = folder_count("/dev/shm", "ep-overlap");
    for (int named = 0; named < 2; named++) {
        int fd = -1;
        struct stat st;
        void *at = NULL;
        CU_ASSERT_EQUAL(host_memfile_create(12288, named, &fd), EPO_OK);
        CU_ASSERT_EQUAL(fstat(fd, &st), 0);
        CU_ASSERT_EQUAL(st.st_mode & 07777, 0600);
        CU_ASSERT_EQUAL(folder_count("/dev/shm", "ep-overlap"), before);
        CU_ASSERT_EQUAL(host_memfile_map(fd, 8192, &at), EPO_E_SYSTEM);
        CU_ASSERT_EQUAL(host_memfile_map(fd, 12288, &at), EPO_OK);
        if (!named)
            CU_ASSERT_NOT_EQUAL(ftruncate(fd, 0), 0); /* no peer can take it away */
        munmap(at, 12288);
        close(fd);
    }
}

static void memory_that_is_not_there(void) {
    CU_ASSERT_EQUAL(host_memory_check(UINT64_C(1) << 60, "windows"), EPO_E_NOMEM);
    unsigned long long need = 0, have = 0;
    CU_ASSERT_EQUAL(sscanf(epo_fail_text(), "windows: need %llu bytes, have %llu", &need, &have),
                    2);
    CU_ASSERT(need == 1ULL << 60 && have > 0 && have < need);
    CU_ASSERT_EQUAL(host_memory_check(4096, "windows"), EPO_OK);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"processes meet, often and in sub-groups, and leave nothing",
         processes_meet_and_leave_nothing},
        {"one rank twice: both are named", one_rank_twice},
        {"who meets", who_meets},
        {"counts that differ: both are named", counts_that_differ},
        {"links that differ", links_that_differ},
        {"other machines, versions, namespaces", other_machines_versions_namespaces},
        {"a rank of another version", a_rank_of_another_version},
        {"an IPC namespace of its own", an_ipc_namespace_of_its_own},
        {"missing ranks are named", missing_ranks_are_named},
        {"nodes of missing ranks", nodes_of_missing_ranks},
        {"a stranger on the name", a_stranger_on_the_name},
        {"steps of two clusters do not meet", steps_of_two_clusters_do_not_meet},
        {"one that ends while the group is made", one_that_ends_while_the_group_is_made},
        {"a rank that dies", a_rank_that_dies},
        {"a rank that stops", a_rank_that_stops},
        {"a bootstrap of the caller's", a_bootstrap_of_the_callers},
        {"memory has no name", memory_has_no_name},
        {"memory that is not there", memory_that_is_not_there},
        CU_TEST_INFO_NULL,
    };
    slurm_says_nothing();
    ops = epo_backend_get();
    return unit_run("host_processes", tests);
}
