/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA engine over a runtime in ordinary memory (tests/fake/cuda_runtime.c): each call of
 * CUDA and NCCL that makes a group, a buffer or an exchange fails in turn, and everything has been
 * given back afterwards; and a GPU that never comes to rest, as another group's work hangs on
 * it, keeps nobody waiting beyond the limit.
 *
 *   test_cuda_scarce [EVERY [FIRST [TEST]]]    every so many-th call fails (31), from the first on
 *                                      (1); the tests whose names begin so
 */
#include "config.h"

#include "backend/engine.h"
#include "member.h"
#include "unit.h"

#include "../fake/cuda_runtime.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PATIENT_S 30 /* where nobody is waited for: a busy machine takes its time */
enum { RANKS = 2, FLOATS = 100, HIDDEN = 64, FFN = 32 };

/* How ranks meet and reach each other. */
typedef enum meeting { PEERS, NCCL, COMM, WAYS } meeting;
static const char *const ways[WAYS] = {"peers' memory", "NCCL", "a communicator"};

#ifdef HAVE_NCCL
enum { WAYS_HERE = WAYS };
#else
enum { WAYS_HERE = PEERS + 1 }; /* the engine was built without NCCL's header */
#endif

static long every = 31, first = 1;
static const epo_engine *engine;

typedef struct member {
    int rank, wrong;
    meeting way;
    epo_world *world;
    epo_status status; /* of the first call that failed */
    fake_busy then;    /* before the end */
    bool brief;        /* no passes */
    bool passes;       /* it came to them */
    bool apart;        /* the ranks end each by itself */
    double limit_s;
    char text[EPO_ERROR_MAX];
} member;

static pthread_barrier_t together;

static bool went(member *m, epo_status status) {
    if (status != EPO_OK && m->status == EPO_OK) {
        m->status = status;
        snprintf(m->text, sizeof m->text, "%s", engine->error());
    }
    return m->status == EPO_OK;
}

static epo_engine_group group_of(member *m, void *comm) {
    epo_engine_group g = {sizeof g, EPO_GROUP_CONFIG_INIT, "a test"};
    g.config.engine = EPO_ENGINE_CUDA;
    g.config.overlap = EPO_ON;
    g.config.delay_wgrad = EPO_ON;
    g.config.dispatcher = EPO_DISPATCH_ALLTOALL;
    g.config.chunks = 2;
    g.config.timeout_s = m->limit_s;
    g.config.nccl_comm = comm;
    if (comm == NULL) {
        g.config.rank = m->rank;
        g.config.ranks = RANKS;
        g.config.threads = m->world;
    }
    return g;
}

/* There and back through the experts; the weight gradients are delayed. */
static void layer_pass(member *m, epo_group *group, epo_plan *plan) {
    static float w1[2 * 2 * FFN * HIDDEN], w2[2 * HIDDEN * FFN];
    static float dw1[RANKS][2 * 2 * FFN * HIDDEN], dw2[RANKS][2 * HIDDEN * FFN];
    epo_layer_config c = EPO_LAYER_CONFIG_INIT;
    epo_layer *layer = NULL;
    epo_saved *saved = NULL;
    float x[HIDDEN] = {0}, y[HIDDEN];
    c.experts = 2 * RANKS;
    c.hidden = HIDDEN;
    c.ffn = FFN;
    c.w1 = w1;
    c.w2 = w2;
    c.dw1 = dw1[m->rank];
    c.dw2 = dw2[m->rank];
    if (engine->layer_create(group, &c, &layer) != EPO_OK) /* nobody else's matter */
        (void)engine->layer_create(group, &c, &layer);
    if (went(m, layer != NULL ? EPO_OK : EPO_E_NOMEM) &&
        went(m, engine->forward(layer, plan, x, y, &saved, NULL)) &&
        went(m, engine->backward(layer, saved, x, y, NULL, NULL)))
        (void)went(m, engine->layer_wgrad_flush(layer, NULL));
    (void)went(m, engine->layer_destroy(layer));
}

/* Without tokens, as kernels do nothing here: rows move, but there are none.  A plan that could not
 * be made is asked for once more. */
static void pass(member *m, epo_group *group, epo_dispatcher dispatcher) {
    epo_buffer_config b = EPO_BUFFER_CONFIG_INIT;
    epo_routing r = EPO_ROUTING_INIT;
    epo_buffer *buffer = NULL;
    epo_plan *plan = NULL;
    float x[HIDDEN] = {0}, y[HIDDEN], rows[4096];
    int64_t experts[1] = {0};
    b.experts = 2 * RANKS;
    b.hidden = HIDDEN;
    b.top_k = 1;
    b.max_tokens = 8;
    b.type = EPO_F32;
    b.dispatcher = dispatcher;
    r.tokens = 0;
    r.top_k = 1;
    r.experts = experts;
    if (!went(m, engine->buffer_create(group, &b, &buffer)))
        return;
    m->passes = true;
    if (!went(m, engine->plan_create(buffer, &r, NULL, &plan)))
        (void)engine->plan_create(buffer, &r, NULL, &plan);
    else if (went(m, engine->dispatch(plan, x, rows, NULL, NULL)))
        (void)went(m, engine->combine(plan, rows, y, NULL, NULL, NULL));
    if (m->status == EPO_OK)
        layer_pass(m, group, plan);
    engine->plan_release(plan);
    (void)went(m, engine->buffer_destroy(buffer));
}

/* All that a rank does here. */
static void *member_main(void *arg) {
    member *m = arg;
    float data[FLOATS] = {0};
    epo_buffer_config b = EPO_BUFFER_CONFIG_INIT;
    epo_group *group = NULL;
    epo_buffer *buffer = NULL;
    void *comm = NULL;
    b.experts = 2 * RANKS;
    b.hidden = HIDDEN;
    b.top_k = 1;
    b.max_tokens = 8;
    b.type = EPO_F32;
    cudaSetDevice(m->rank);
    if (m->way == COMM)
        fake_comm_open(m->rank, RANKS, &comm);
    const epo_engine_group g = group_of(m, comm);
    if (went(m, engine->group_create(&g, &group)) &&
        went(m, engine->buffer_create(group, &b, &buffer)) &&
        went(m, engine->group_barrier(group)) &&
        went(m, engine->group_allreduce(group, data, FLOATS, NULL))) {
        if (!m->brief)
            pass(m, group, EPO_DISPATCH_ALLTOALL);
        if (!m->brief && m->status == EPO_OK)
            pass(m, group, EPO_DISPATCH_FLEX);
        (void)went(m, engine->group_async_error(group));
    }
    if (!m->apart) {
        pthread_barrier_wait(&together);
        if (m->rank == 0)
            fake_cuda_busy(m->then);
        pthread_barrier_wait(&together);
    }
    (void)went(m, engine->buffer_destroy(buffer));
    (void)went(m, engine->group_destroy(group));
    fake_comm_close(comm);
    return NULL;
}

static void run(member *m, meeting way) {
    pthread_t thread[RANKS];
    epo_world *world = NULL;
    if (way == NCCL)
        setenv("EP_OVERLAP_CUDA_PEER", "0", 1);
    else
        unsetenv("EP_OVERLAP_CUDA_PEER");
    CU_ASSERT_EQUAL_FATAL(engine->world_create(RANKS, &world), EPO_OK);
    pthread_barrier_init(&together, NULL, RANKS);
    for (int r = 0; r < RANKS; r++) {
        m[r].rank = r;
        m[r].way = way;
        m[r].world = world;
        CU_ASSERT_EQUAL_FATAL(pthread_create(&thread[r], NULL, member_main, &m[r]), 0);
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(thread[r], NULL);
        fake_cuda_go(); /* rank 0 has not waited for it */
    }
    pthread_barrier_destroy(&together);
    engine->world_destroy(world);
}

/* Of this process: those that were left are among them. */
static int threads_here(void) {
    char line[200];
    int n = 0;
    FILE *f = fopen("/proc/self/status", "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, "Threads:", 8) == 0)
            n = (int)strtol(line + 8, NULL, 10);
    if (f != NULL)
        fclose(f);
    return n;
}

/* A group that could not be ended has one still. */
static void threads_end(void) {
    for (int i = 0; i < 3000 && threads_here() > 1; i++)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
}

/* Threads that were left may still be at it. */
static int left_in_the_end(char *text, size_t size) {
    int left = 1;
    for (int i = 0; i < 500 && left > 0; i++) {
        left = fake_cuda_left(text, size);
        if (left > 0)
            nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
    return left;
}

static void expect_nothing_left(const char *what, const char *call) {
    char text[200];
    const int left = left_in_the_end(text, sizeof text), wrong = fake_cuda_wrong();
    if (left != 0 || wrong != 0)
        printf("%s, %s: left: %s; given back wrongly: %d\n", what, call, text, wrong);
    CU_ASSERT_EQUAL(left, 0);
    CU_ASSERT_EQUAL(wrong, 0);
    fake_cuda_forget(false);
}

static void all_is_well(meeting way) {
    member m[RANKS] = {{.limit_s = PATIENT_S}, {.limit_s = PATIENT_S}};
    threads_end();
    run(m, way);
    for (int r = 0; r < RANKS; r++) {
        if (m[r].status != EPO_OK)
            printf("%s, rank %d: %s\n", ways[way], r, m[r].text);
        CU_ASSERT_EQUAL(m[r].status, EPO_OK);
    }
    fake_cuda_forget(true);
    expect_nothing_left(ways[way], "nothing failed");
}

static void nothing_fails(void) {
    for (int w = 0; w < WAYS_HERE; w++)
        all_is_well((meeting)w);
}

/* On rank 1, which has device 1. */
static void each_call_fails(fake_kind kind, meeting way, long step) {
    long calls = 1, survived = 0;
    for (long at = 0; at < calls; at += at == 0 ? (first < step ? first : step) : step) {
        /* A failing communicator may leave nothing to tell the others by: they wait. */
        const member one = {.limit_s = way == COMM && at > 0 ? 2 : PATIENT_S};
        member m[RANKS] = {one, one};
        threads_end();
        fake_cuda_fail(kind, 1, at == 0 ? -1 : at - 1);
        run(m, way);
        if (at == 0)
            calls = fake_cuda_calls() + 1;
        const bool both = m[0].status != EPO_OK && m[1].status != EPO_OK;
        const bool none = m[0].status == EPO_OK && m[1].status == EPO_OK;
        survived += at > 0 && none;
        /* Where no row is on its way nobody waits for a rank that failed with its part done. */
        const bool alone = way != PEERS && m[0].status == EPO_OK && m[1].passes;
        if (!both && !none && !alone)
            printf("%s, %s (call %ld): rank 0: %d %s; rank 1: %d %s\n", ways[way],
                   fake_cuda_failed(), at, (int)m[0].status, m[0].text, (int)m[1].status,
                   m[1].text);
        CU_ASSERT(both || none || alone);
        /* The others do not wait for a rank that has failed, unless what it would tell them by
         * was what failed. */
        const bool waited = m[0].status == EPO_E_TIMEOUT &&
                            strstr(m[0].text, "nccl_comm") == NULL &&
                            strstr(m[1].text, "nccl_comm") == NULL;
        if (waited)
            printf("%s, %s (call %ld): rank 0 waited: %s; rank 1: %s\n", ways[way],
                   fake_cuda_failed(), at, m[0].text, m[1].text);
        CU_ASSERT_FALSE(waited);
        if (kind != FAKE_CALLS && at > 0) { /* what found no thread goes with the next group */
            fake_cuda_fail(kind, 1, -1);
            all_is_well(way);
        } else {
            threads_end();
            if (!none && way != COMM)
                fake_cuda_forget(true);
            expect_nothing_left(ways[way], fake_cuda_failed());
        }
    }
    fake_cuda_fail(kind, 1, -1);
    printf("%s: %ld calls, %ld of them not needed\n", ways[way], calls - 1, survived);
    CU_ASSERT(calls > 1);
}

static void peers_calls_fail(void) { each_call_fails(FAKE_CALLS, PEERS, every); }
static void nccl_calls_fail(void) {
    for (int w = NCCL; w < WAYS_HERE; w++)
        each_call_fails(FAKE_CALLS, (meeting)w, every);
}

/* One that does not return keeps its own rank; the other ends within the limits and says whom it
 * waited for.  When it returns after all, its rank ends, too, and everything is given back. */
static void each_call_hangs(void) {
    for (int w = 0; w < WAYS_HERE; w++) {
        long calls = 1, unnoticed = 0;
        for (long at = 0; at < calls; at += at == 0 ? first : 2 * every) {
            member m[RANKS] = {{.apart = true, .limit_s = 0.4}, {.apart = true, .limit_s = 0.4}};
            threads_end();
            fake_cuda_fail(FAKE_HANGS, 1, at == 0 ? -1 : at - 1);
            run(m, (meeting)w);
            if (at == 0)
                calls = fake_cuda_calls() + 1;
            unnoticed += at > 0 && m[0].status == EPO_OK;
            const bool told = m[0].status == EPO_OK || strstr(m[0].text, "rank 1") != NULL ||
                              strstr(m[0].text, "nccl_comm") != NULL ||
                              strstr(m[0].text, "NCCL's making") != NULL;
            if (!told || (at == 0 && m[0].status != EPO_OK))
                printf("%s, %s (call %ld): rank 0: %s; rank 1: %s\n", ways[w], fake_cuda_failed(),
                       at, m[0].text, m[1].text);
            CU_ASSERT(told && (at > 0 || m[0].status == EPO_OK));
            threads_end();
            if (at > 0) /* it may have been as late as the group's end */
                fake_cuda_forget(true);
            expect_nothing_left(ways[w], fake_cuda_failed());
        }
        printf("%s: %ld calls, %ld of them kept nobody waiting\n", ways[w], calls - 1, unnoticed);
    }
    fake_cuda_fail(FAKE_HANGS, 1, -1);
}

/* There are few of these. */
static long every_some(void) { return every < 5 ? 1 : every / 5; }
static void memory_fails(void) {
    for (int w = 0; w < WAYS_HERE; w++)
        each_call_fails(FAKE_MEMORY, (meeting)w, every_some());
}
static void threads_fail(void) {
    for (int w = 0; w < WAYS_HERE; w++)
        each_call_fails(FAKE_THREADS, (meeting)w, every_some());
}

/* The device is busy for good: the ranks end all the same.  What others' work holds up while a
 * group is made is given back when that ends; windows that could not be closed within the limit
 * stay. */
static void stays_busy(fake_busy begin, fake_busy then) {
    for (int w = 0; w < WAYS_HERE; w++) {
        const member one = {.then = then, .brief = begin != FAKE_IDLE, .limit_s = 2};
        member m[RANKS] = {one, one};
        threads_end();
        fake_cuda_busy(begin);
        run(m, (meeting)w);
        for (int r = 0; r < RANKS; r++) {
            const epo_status want = then == FAKE_ALL ? EPO_E_TIMEOUT : EPO_OK;
            if (m[r].status != want)
                printf("%s, rank %d: %s\n", ways[w], r, m[r].text);
            CU_ASSERT_EQUAL(m[r].status, want);
        }
        CU_ASSERT((then != FAKE_IDLE) == (fake_cuda_waiting() > 0));
        fake_cuda_busy(FAKE_IDLE);
        if (then == FAKE_IDLE)
            expect_nothing_left(ways[w], "others' work");
        threads_end();
        CU_ASSERT_EQUAL(fake_cuda_wrong(), 0);
        fake_cuda_forget(false);
    }
}

static void others_work_at_the_end(void) { stays_busy(FAKE_IDLE, FAKE_OTHERS); }
static void others_work_from_the_beginning(void) { stays_busy(FAKE_OTHERS, FAKE_IDLE); }
static void own_work_at_the_end(void) { stays_busy(FAKE_IDLE, FAKE_ALL); }

/* As CUDA's and NCCL's own end, which a thread inside them does not survive. */
static void library_end(void) { raise(SIGSEGV); }

/* The process ends while a thread waits for the device still: its status is the program's. */
static void the_end_meanwhile(void) {
    for (int w = 0; w < WAYS_HERE; w++) {
        int said = 0;
        fflush(NULL);
        const pid_t pid = fork();
        if (pid == 0) {
            member m[RANKS] = {{.then = FAKE_OTHERS, .limit_s = 2},
                               {.then = FAKE_OTHERS, .limit_s = 2}};
            atexit(library_end);
            run(m, (meeting)w);
            exit(fake_cuda_waiting() > 0 ? 7 : 99);
        }
        while (waitpid(pid, &said, 0) < 0)
            ;
        CU_ASSERT(WIFEXITED(said));
        CU_ASSERT_EQUAL(WEXITSTATUS(said), 7);
    }
}

int main(int argc, char **argv) {
    static const CU_TestInfo all[] = {
        {"nothing fails", nothing_fails},
        {"each call fails: peers", peers_calls_fail},
        {"each call fails: NCCL", nccl_calls_fail},
        {"hangs: each call", each_call_hangs},
        {"memory of the CPU's fails", memory_fails},
        {"threads fail", threads_fail},
        {"others' work hangs at the end", others_work_at_the_end},
        {"others' work hangs from the beginning", others_work_from_the_beginning},
        {"own work hangs at the end", own_work_at_the_end},
        {"the process ends meanwhile", the_end_meanwhile},
    };
    CU_TestInfo tests[sizeof all / sizeof *all + 1] = {CU_TEST_INFO_NULL};
    for (size_t i = 0, n = 0; i < sizeof all / sizeof *all; i++)
        if (argc <= 3 || strncmp(all[i].pName, argv[3], strlen(argv[3])) == 0)
            tests[n++] = all[i];
    setenv("EP_OVERLAP_CUDA_SMALL", "0", 1); /* rows by copies: kernels do nothing here */
    every = argc > 1 ? strtol(argv[1], NULL, 10) : every;
    first = argc > 2 ? strtol(argv[2], NULL, 10) : first;
    engine = epo_engine_entry(EPO_ENGINE_ABI);
    alarm(every < 10 ? 3000 : 300); /* what hangs, ends */
    return every < 1 || first < 1 || engine == NULL ? 2 : unit_run("cuda scarce", tests);
}
