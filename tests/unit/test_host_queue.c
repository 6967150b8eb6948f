/* SPDX-License-Identifier: Apache-2.0
 *
 * Queues, events, limits, the end of a group in error, recordings, the emulated
 * link; ranks are threads.
 */
#include "config.h"

#include "host_ranks.h"
#include "unit.h"

#include "backend/host/host.h"

#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static void nap_ms(int ms) {
    struct timespec t = {ms / 1000, (ms % 1000) * 1000000L};
    nanosleep(&t, NULL);
}

static int text_has(const char *part) { return strstr(epo_fail_text(), part) != NULL; }

/* ---- order -------------------------------------------------------------------------- */

#define OPS 300

typedef struct order {
    _Atomic int clock;
    int began[OPS], ended[OPS];
} order;

typedef struct order_op {
    order *o;
    int i;
} order_op;

static void order_run(void *arg) {
    order_op *op = arg;
    op->o->began[op->i] = ++op->o->clock;
    if (op->i % 7 == 0)
        nap_ms(1);
    op->o->ended[op->i] = ++op->o->clock;
}

/* Operations on five queues that wait for random earlier ones. */
static void random_graph(rank_ctx *c) {
    static const epo_queue_kind kinds[] = {EPO_QUEUE_COMPUTE, EPO_QUEUE_COMPUTE, EPO_QUEUE_COMM,
                                           EPO_QUEUE_COMM, EPO_QUEUE_FILL};
    epo_queue *q[5];
    epo_event *done[OPS];
    order o = {0};
    order_op ops[OPS];
    int on[OPS], waits[OPS][EPO_MAX_WAITS], nwait[OPS], last[5] = {-1, -1, -1, -1, -1};
    uint64_t seed = 3;
    for (int i = 0; i < 5; i++)
        EXPECT(c, c->ops->queue_create(c->be, kinds[i], &q[i]) == EPO_OK);
    for (int i = 0; i < OPS; i++) {
        epo_deps deps = {.name = "op", .chunk = -1};
        EXPECT(c, c->ops->event_create(c->be, &done[i]) == EPO_OK);
        on[i] = (int)rng_below(&seed, 5);
        nwait[i] = i == 0 ? 0 : (int)rng_below(&seed, EPO_MAX_WAITS + 1);
        for (int k = 0; k < nwait[i]; k++) {
            waits[i][k] = (int)rng_below(&seed, (uint32_t)i);
            deps.wait[k] = epo_ready_event(done[waits[i][k]]);
        }
        deps.nwait = nwait[i];
        deps.signal = done[i];
        ops[i] = (order_op){&o, i};
        EXPECT(c, c->ops->call(q[on[i]], order_run, &ops[i], &deps) == EPO_OK);
    }
    for (int i = 0; i < OPS; i++)
        EXPECT(c, c->ops->sync(c->be, done[i]) == EPO_OK);
    for (int i = 0; i < OPS; i++) {
        for (int k = 0; k < nwait[i]; k++)
            EXPECT(c, o.ended[waits[i][k]] < o.began[i]);
        if (last[on[i]] >= 0)
            EXPECT(c, o.ended[last[on[i]]] < o.began[i]);
        last[on[i]] = i;
    }
    for (int i = 0; i < OPS; i++)
        c->ops->event_destroy(c->be, done[i]);
    for (int i = 0; i < 5; i++)
        c->ops->queue_destroy(c->be, q[i]);
}

static void order_of_queues_and_events(void) {
    CU_ASSERT_EQUAL(ranks_run(1, random_graph, NULL), 0);
}

/* ---- a group of ranks with one flag each ------------------------------------------------ */

typedef struct kit {
    epo_queue *comm, *compute, *fill;
    epo_event *done;
    epo_window *w;
    uint64_t bytes; /* of rows, before the flags */
} kit;

static kit kit_new(rank_ctx *c, uint64_t bytes) {
    kit k = {.bytes = bytes};
    EXPECT(c, c->ops->queue_create(c->be, EPO_QUEUE_COMM, &k.comm) == EPO_OK);
    EXPECT(c, c->ops->queue_create(c->be, EPO_QUEUE_COMPUTE, &k.compute) == EPO_OK);
    EXPECT(c, c->ops->queue_create(c->be, EPO_QUEUE_FILL, &k.fill) == EPO_OK);
    EXPECT(c, c->ops->event_create(c->be, &k.done) == EPO_OK);
    EXPECT(c, c->ops->window_create(c->be, bytes + 8 * (uint64_t)c->ranks, &k.w) == EPO_OK);
    return k;
}

static void kit_end(rank_ctx *c, kit *k) {
    /* Queues first: they end when their operations have, which use the others. */
    c->ops->queue_destroy(c->be, k->fill);
    c->ops->queue_destroy(c->be, k->compute);
    c->ops->queue_destroy(c->be, k->comm);
    c->ops->event_destroy(c->be, k->done);
    c->ops->window_destroy(c->be, k->w);
}

static void kit_send(rank_ctx *c, kit *k, const epo_segment *seg, int nseg, uint64_t epoch,
                     epo_event *signal) {
    epo_exchange x = {
        .window = k->w, .send = seg, .nsend = nseg, .flag_offset = k->bytes, .epoch = epoch};
    epo_deps deps = {.name = "dispatch", .kind = EPO_INTERVAL_COMM, .chunk = 1, .signal = signal};
    EXPECT(c, c->ops->exchange(k->comm, &x, &deps) == EPO_OK);
}

/* An operation that needs everybody's flag and then signals k->done. */
static void kit_expect(rank_ctx *c, kit *k, uint64_t epoch) {
    epo_deps deps = {
        .name = "fc1", .kind = EPO_INTERVAL_COMPUTE, .chunk = 1, .nwait = 1, .signal = k->done};
    const unsigned char *mine = c->ops->window_local(k->w);
    deps.wait[0] = (epo_ready){NULL,  (const uint64_t *)(const void *)(mine + k->bytes),
                               epoch, c->ranks,
                               -1,    "dispatch",
                               1,     0,
                               0,     NULL};
    EXPECT(c, c->ops->zero(k->compute, NULL, 0, &deps) == EPO_OK);
}

/* ---- FILL --------------------------------------------------------------------------------- */

static void count_one(void *arg) { ++*(_Atomic int *)arg; }

static void fill_rank(rank_ctx *c) {
    kit k = kit_new(c, 64);
    _Atomic int ran = 0, compute = 0;
    epo_event *filled;
    EXPECT(c, c->ops->event_create(c->be, &filled) == EPO_OK);
    if (c->rank == 1) {
        epo_deps fill = {.name = "wgrad", .chunk = -1, .signal = filled};
        EXPECT(c, c->ops->call(k.fill, count_one, &ran, &fill) == EPO_OK);
        EXPECT(c, c->ops->call(k.fill, count_one, &ran, &fill) == EPO_OK);
        EXPECT(c, c->ops->call(k.compute, count_one, &compute, NULL) == EPO_OK);
        while (compute == 0) /* the thread that serves both has been at work */
            nap_ms(1);
        nap_ms(30);
        EXPECT(c, ran == 0);
        kit_expect(c, &k, 1);
        nap_ms(30);
        EXPECT(c, ran == 0); /* COMPUTE waits, but the caller does not */
    }
    EXPECT(c, c->ops->barrier(c->be) == EPO_OK);
    if (c->rank == 0) {
        nap_ms(100);
        kit_send(c, &k, NULL, 0, 1, NULL);
    } else {
        kit_send(c, &k, NULL, 0, 1, NULL);
        EXPECT(c, c->ops->sync(c->be, k.done) == EPO_OK);
        EXPECT(c, ran == 2); /* under the wait for rank 0 */
        EXPECT(c, c->ops->sync(c->be, filled) == EPO_OK);
    }
    EXPECT(c, c->ops->barrier(c->be) == EPO_OK);
    c->ops->event_destroy(c->be, filled);
    kit_end(c, &k);
}

static void fill_runs_only_where_the_caller_waits(void) {
    CU_ASSERT_EQUAL(ranks_run(2, fill_rank, NULL), 0);
}

/* ---- limits and the end in error ------------------------------------------------------------ */

static void late_rank(rank_ctx *c) {
    kit k = kit_new(c, 64);
    if (c->rank != 2)
        kit_send(c, &k, NULL, 0, 1, NULL);
    kit_expect(c, &k, 1);
    kit_expect(c, &k, 9); /* passed over, its signal happens */
    EXPECT(c, c->ops->sync(c->be, k.done) == EPO_E_TIMEOUT);
    EXPECT(c, text_has("waited 0.") && text_has("for rank 2 in dispatch chunk 1 (epoch 1, has 0)"));
    EXPECT(c, c->ops->status(c->be) == EPO_E_TIMEOUT);
    EXPECT(c, c->ops->barrier(c->be) == EPO_E_TIMEOUT);
    kit_expect(c, &k, 10); /* still accepted, still passed over */
    EXPECT(c, c->ops->sync(c->be, k.done) == EPO_E_TIMEOUT);
    kit_end(c, &k);
    c->broken = true;
}

static void a_limit_names_who_is_late(void) {
    CU_ASSERT_EQUAL(ranks_run_limited(4, 0.3, late_rank, NULL), 0);
}

static void late_at_barrier(rank_ctx *c) {
    if (c->rank == 1) {
        while (c->ops->status(c->be) == EPO_OK)
            nap_ms(5);
    } else {
        EXPECT(c, c->ops->barrier(c->be) == EPO_E_TIMEOUT);
    }
    EXPECT(c, text_has("for rank 1 in barrier"));
    c->broken = true;
}

static void a_barrier_has_a_limit(void) {
    CU_ASSERT_EQUAL(ranks_run_limited(3, 0.3, late_at_barrier, NULL), 0);
}

static void aborted(rank_ctx *c) {
    kit k = kit_new(c, 64);
    kit_expect(c, &k, 1);
    if (c->rank == 1) {
        nap_ms(50);
        c->ops->abort(c->be, EPO_E_INDEX, "token 7: expert 99, allowed 0..7");
        EXPECT(c, c->ops->sync(c->be, k.done) == EPO_E_INDEX);
        EXPECT(c, text_has("token 7"));
    } else {
        EXPECT(c, c->ops->sync(c->be, k.done) == EPO_E_PEER);
        EXPECT(c, text_has("rank 1 ended the group: token 7: expert 99"));
    }
    kit_end(c, &k);
    c->broken = true;
}

static void an_abort_releases_everybody(void) { CU_ASSERT_EQUAL(ranks_run(4, aborted, NULL), 0); }

static void leaver(rank_ctx *c) {
    if (c->rank == 0)
        return; /* closes at once */
    epo_status status = c->ops->barrier(c->be);
    EXPECT(c, status == EPO_E_PEER && text_has("rank 0 left the group"));
    c->broken = true;
}

static void a_rank_that_leaves_is_named(void) { CU_ASSERT_EQUAL(ranks_run(3, leaver, NULL), 0); }

static void *open_alone(void *arg) {
    rank_ctx *c = arg;
    epo_backend_config config = rank_config(c);
    if (c->rank == 0)
        nap_ms(20);
    epo_status status = c->ops->open(&config, &c->be);
    EXPECT(c, status == EPO_E_TIMEOUT && text_has("for rank 2 of 3"));
    return NULL;
}

static void a_world_that_is_not_complete(void) {
    const epo_backend_ops *ops = epo_backend_get();
    epo_world *world = NULL;
    CU_ASSERT_EQUAL(ops->world_create(3, &world), EPO_OK);
    rank_ctx c[2];
    pthread_t t[2];
    for (int r = 0; r < 2; r++) {
        c[r] = (rank_ctx){ops, world, NULL, r, 3, 0.3, NULL, NULL, false, 0};
        CU_ASSERT_EQUAL(pthread_create(&t[r], NULL, open_alone, &c[r]), 0);
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(t[r], NULL);
        CU_ASSERT_EQUAL(c[r].failures, 0);
    }
    ops->world_destroy(world);
    CU_ASSERT_EQUAL(ops->world_create(0, &world), EPO_E_ARG);
    CU_ASSERT_EQUAL(ops->world_create(HOST_RANKS_MAX + 1, &world), EPO_E_ARG);
    ops->world_destroy(NULL);
}

static void *open_twin(void *arg) {
    rank_ctx *c = arg;
    epo_backend_config config = rank_config(c);
    epo_status status = c->ops->open(&config, &c->be);
    EXPECT(c, status == EPO_E_TIMEOUT || (status == EPO_E_PEER && text_has("two threads")));
    c->broken = status == EPO_E_PEER;
    return NULL;
}

static void a_rank_of_two_threads(void) {
    const epo_backend_ops *ops = epo_backend_get();
    epo_world *world = NULL;
    CU_ASSERT_EQUAL(ops->world_create(2, &world), EPO_OK);
    rank_ctx c[2];
    pthread_t t[2];
    for (int r = 0; r < 2; r++) {
        c[r] = (rank_ctx){ops, world, NULL, 0, 2, 0.3, NULL, NULL, false, 0};
        CU_ASSERT_EQUAL(pthread_create(&t[r], NULL, open_twin, &c[r]), 0);
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(t[r], NULL);
        CU_ASSERT_EQUAL(c[r].failures, 0);
    }
    CU_ASSERT_EQUAL(c[0].broken + c[1].broken, 1);
    ops->world_destroy(world);
}

/* The world outlives its groups, and holds several at a time. */
static void groups_in_turn(rank_ctx *c) {
    const int even[] = {2, 0}, odd[] = {1, 3};
    for (int turn = 0; turn < 20; turn++) {
        epo_backend_config config = rank_config(c);
        epo_backend *all = NULL, *half = NULL;
        EXPECT(c, c->ops->open(&config, &all) == EPO_OK);
        config.members = c->rank % 2 == 0 ? even : odd;
        config.nmembers = 2;
        EXPECT(c, c->ops->open(&config, &half) == EPO_OK);
        float sum = (float)c->rank;
        EXPECT(c, c->ops->allreduce(half, &sum, 1, NULL) == EPO_OK);
        EXPECT(c, sum == (c->rank % 2 == 0 ? 2.0f : 4.0f));
        EXPECT(c, c->ops->info(half)->rank == (c->rank == 0 || c->rank == 3));
        EXPECT(c, c->ops->barrier(all) == EPO_OK);
        c->ops->close(half, false);
        c->ops->close(all, false);
    }
}

static void worlds_hold_groups(void) { CU_ASSERT_EQUAL(ranks_run(4, groups_in_turn, NULL), 0); }

static void bad_places(void) {
    const epo_backend_ops *ops = epo_backend_get();
    epo_backend *be = NULL;
    const int members[] = {0, 2, 0};
    epo_backend_config config = {.rank = 1, .ranks = 3, .timeout_s = 1.0};
    config.members = members;
    config.nmembers = 2;
    CU_ASSERT_EQUAL(ops->open(&config, &be), EPO_E_ARG);
    CU_ASSERT(text_has("rank 1 is not in"));
    config.rank = 0;
    config.nmembers = 3;
    CU_ASSERT_EQUAL(ops->open(&config, &be), EPO_E_ARG);
    CU_ASSERT(text_has("twice"));
    config.members = NULL;
    config.rank = 3;
    CU_ASSERT_EQUAL(ops->open(&config, &be), EPO_E_ARG);
    config = (epo_backend_config){.rank = 0, .ranks = 1, .timeout_s = -1.0};
    CU_ASSERT_EQUAL(ops->open(&config, &be), EPO_E_ARG);
    config.timeout_s = 0.0;
    setenv(EPO_ENV_BLAS_THREADS, "many", 1);
    CU_ASSERT_EQUAL(ops->open(&config, &be), EPO_E_ARG);
    CU_ASSERT(text_has("\"many\""));
    unsetenv(EPO_ENV_BLAS_THREADS);
    CU_ASSERT_PTR_NULL(be);
}

/* ---- the warning -------------------------------------------------------------------------------
 */

static void warned_rank(rank_ctx *c) {
    epo_backend_config config = rank_config(c);
    epo_backend *be = NULL;
    config.warn_s = 0.1;
    EXPECT(c, c->ops->open(&config, &be) == EPO_OK);
    if (c->rank == 1)
        nap_ms(400);
    EXPECT(c, c->ops->barrier(be) == EPO_OK);
    c->ops->close(be, false);
}

static void a_late_rank_is_said_once(void) {
    FILE *f = tmpfile();
    int keep = dup(2);
    char line[300] = "", more[300] = "";
    fflush(stderr);
    CU_ASSERT_FATAL(f != NULL && keep >= 0 && dup2(fileno(f), 2) == 2);
    int failures = ranks_run(2, warned_rank, NULL);
    fflush(stderr);
    dup2(keep, 2);
    close(keep);
    rewind(f);
    CU_ASSERT_EQUAL(failures, 0);
    CU_ASSERT(fgets(line, sizeof line, f) != NULL && fgets(more, sizeof more, f) == NULL);
    CU_ASSERT(strstr(line, "ep-overlap: rank 0: waiting for rank 1 in barrier") == line);
    fclose(f);
}

/* ---- recordings ---------------------------------------------------------------------------------
 */

static void recorder(rank_ctx *c) {
    const epo_interval *v = NULL;
    uint64_t n = 99, dropped = 99;
    kit k = kit_new(c, 64);
    EXPECT(c, c->ops->record_stop(c->be, &v, &n, &dropped) == EPO_E_STATE);
    EXPECT(c, c->ops->record_start(c->be, UINT64_MAX / 8) == EPO_E_ARG);
    for (uint64_t turn = 1; turn <= 2; turn++) {
        EXPECT(c, c->ops->record_start(c->be, turn == 1 ? 100 : 3) == EPO_OK);
        for (uint64_t i = 0; i < 4; i++) {
            kit_send(c, &k, NULL, 0, turn * 10 + i, NULL);
            kit_expect(c, &k, turn * 10 + i);
        }
        EXPECT(c, c->ops->sync(c->be, k.done) == EPO_OK);
        EXPECT(c, c->ops->barrier(c->be) == EPO_OK);
        EXPECT(c, c->ops->record_stop(c->be, &v, &n, &dropped) == EPO_OK);
        EXPECT(c, turn == 1 ? n == 8 && dropped == 0 : n == 3 && n + dropped == 8);
        int comm = 0;
        for (uint64_t i = 0; i < n; i++) {
            EXPECT(c, v[i].start_ns <= v[i].end_ns && v[i].chunk == 1);
            EXPECT(c, i == 0 || v[i - 1].start_ns <= v[i].start_ns);
            comm += v[i].kind == EPO_INTERVAL_COMM && strcmp(v[i].name, "dispatch") == 0;
        }
        EXPECT(c, turn == 2 || comm == 4);
    }
    kit_send(c, &k, NULL, 0, 90, NULL); /* off: not recorded, and no harm */
    kit_expect(c, &k, 90);
    EXPECT(c, c->ops->sync(c->be, k.done) == EPO_OK);
    kit_end(c, &k);
}

static void recordings(void) { CU_ASSERT_EQUAL(ranks_run(2, recorder, NULL), 0); }

/* ---- the emulated link, and what waiting costs
 * ------------------------------------------------------ */

static double cpu_s(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

#define LINK_BYTES UINT64_C(200000) /* at 0.002 GB/s: 100 ms */

static _Atomic int64_t link_sent; /* when rank 0 began */

/* Least seconds, of three exchanges of n * LINK_BYTES from rank 0 to rank `to`, until the
 * caller saw it: a busy machine makes some late, none early. */
static double link_time(rank_ctx *c, kit *k, const void *rows, int to, uint64_t n, uint64_t epoch) {
    epo_segment seg = {.peer = to, .src = rows, .rows = n, .row_bytes = (uint32_t)LINK_BYTES};
    double least = INFINITY;
    for (uint64_t try = 0; try < 3; try++) {
        if (c->rank == 0)
            link_sent = host_now_ns();
        kit_send(c, k, &seg, c->rank == 0 ? 1 : 0, 3 * epoch + try, NULL);
        kit_expect(c, k, 3 * epoch + try);
        EXPECT(c, c->ops->sync(c->be, k->done) == EPO_OK);
        least = fmin(least, (double)(host_now_ns() - link_sent) * 1e-9);
        EXPECT(c, c->ops->barrier(c->be) == EPO_OK);
    }
    return least;
}

static void link_rank(rank_ctx *c) {
    kit k = kit_new(c, 2 * LINK_BYTES);
    unsigned char *rows = calloc(2, LINK_BYTES);
    EXPECT(c, c->ops->info(c->be)->link_gbs == 0.002 && c->ops->info(c->be)->link_us == 500.0);
    double self = link_time(c, &k, rows, 0, 2, 1);
    double cpu = cpu_s(), one = link_time(c, &k, rows, 1, 1, 2);
    double two = link_time(c, &k, rows, 1, 2, 3), used = cpu_s() - cpu;
    if (c->rank == 1) {                      /* what the receiver sees */
        EXPECT(c, one >= 0.1 && two >= 0.2); /* never faster than the link */
        EXPECT(c, two > 1.5 * one && two < 3.0 * one);
        EXPECT(c, self < 0.5 * one); /* only the latency */
        EXPECT(c, used < 0.9 * (one + two));
    }
    free(rows);
    kit_end(c, &k);
}

static void a_link_takes_time_and_no_cpu(void) {
    setenv(EPO_ENV_HOST_LINK, "0.002,500", 1);
    CU_ASSERT_EQUAL(ranks_run(2, link_rank, NULL), 0);
    unsetenv(EPO_ENV_HOST_LINK);
}

static void link_values(void) {
    host_link l = {7, 7};
    CU_ASSERT_EQUAL(host_link_parse(NULL, &l), EPO_OK);
    CU_ASSERT(l.gbs == 0.0 && l.us == 0.0);
    CU_ASSERT_EQUAL(host_link_parse("12.5,3", &l), EPO_OK);
    CU_ASSERT(l.gbs == 12.5 && l.us == 3.0);
    static const char *const bad[] = {"1",   "0,5", "-1,5",  "1,-5",  "1;5",  "1,5,",
                                      "x,5", "1,",  "nan,1", "inf,1", " 1,5", "1e3,5"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CU_ASSERT_EQUAL(host_link_parse(bad[i], &l), EPO_E_ARG);
        CU_ASSERT(text_has(EPO_ENV_HOST_LINK) && text_has(bad[i]));
    }
    CU_ASSERT(l.gbs == 12.5);
}

static void idle_rank(rank_ctx *c) {
    kit k = kit_new(c, 64);
    EXPECT(c, c->ops->barrier(c->be) == EPO_OK);
    double cpu = cpu_s();
    int64_t start = host_now_ns();
    if (c->rank == 0)
        nap_ms(400);
    kit_send(c, &k, NULL, 0, 1, NULL);
    kit_expect(c, &k, 1);
    EXPECT(c, c->ops->sync(c->be, k.done) == EPO_OK);
    double wall = (double)(host_now_ns() - start) * 1e-9;
    EXPECT(c, cpu_s() - cpu < 0.25 * wall);
    kit_end(c, &k);
}

static void waiting_costs_no_cpu(void) { CU_ASSERT_EQUAL(ranks_run(4, idle_rank, NULL), 0); }

/* ---- memory
 * -------------------------------------------------------------------------------------------- */

static void allocator(rank_ctx *c) {
    uint64_t before, now, peak;
    void *p = NULL, *q = NULL;
    c->ops->memory(c->be, &before, &peak);
    EXPECT(c, c->ops->alloc(c->be, 1000, &p) == EPO_OK && (uintptr_t)p % 64 == 0);
    EXPECT(c, c->ops->alloc(c->be, 0, &q) == EPO_OK && q != NULL);
    c->ops->memory(c->be, &now, &peak);
    EXPECT(c, now == before + 1000 && peak >= now);
    c->ops->free(c->be, q, 0);
    c->ops->free(c->be, p, 1000);
    c->ops->free(c->be, NULL, 0);
    c->ops->memory(c->be, &now, &peak);
    EXPECT(c, now == before && peak >= before + 1000);
    void *none = NULL;
    EXPECT(c, c->ops->alloc(c->be, UINT64_C(1) << 60, &none) == EPO_E_NOMEM && none == NULL);
    EXPECT(c, text_has("need 1152921504606846976 bytes, have "));
    EXPECT(c, c->ops->alloc(c->be, UINT64_MAX, &none) == EPO_E_NOMEM && none == NULL);
}

static void memory_is_counted(void) { CU_ASSERT_EQUAL(ranks_run(1, allocator, NULL), 0); }

int main(void) {
    const CU_TestInfo tests[] = {
        {"order of queues and events", order_of_queues_and_events},
        {"FILL runs only where the caller waits", fill_runs_only_where_the_caller_waits},
        {"a limit names who is late", a_limit_names_who_is_late},
        {"a barrier has a limit", a_barrier_has_a_limit},
        {"an abort releases everybody", an_abort_releases_everybody},
        {"a rank that leaves is named", a_rank_that_leaves_is_named},
        {"a world that is not complete", a_world_that_is_not_complete},
        {"a rank of two threads", a_rank_of_two_threads},
        {"worlds hold groups", worlds_hold_groups},
        {"bad places", bad_places},
        {"a late rank is said once", a_late_rank_is_said_once},
        {"recordings", recordings},
        {"a link takes time and no CPU", a_link_takes_time_and_no_cpu},
        {"link values", link_values},
        {"waiting costs no CPU", waiting_costs_no_cpu},
        {"memory is counted", memory_is_counted},
        CU_TEST_INFO_NULL,
    };
    unsetenv(EPO_ENV_HOST_LINK);
    return unit_run("host_queue", tests);
}
