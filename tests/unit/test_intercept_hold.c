/* SPDX-License-Identifier: Apache-2.0
 *
 * A communicator that one thread ends while others are in the middle of their groups on it, with a
 * driver that counts what it gave out: nothing is used after its release (which the thread and
 * address sanitizers see), all of it is released once, and no end of a communicator waits for ever.
 */
#include "config.h"

#include "unit.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/names.h"
#include "preload/intercept/channel.h"
#include "preload/record/recorder.h"

/* ---- a driver whose streams do everything at once ---- */

struct CUstream_st {
    atomic_int used;
};
struct CUevent_st {
    atomic_int used;
    int at; /* what had been put on streams when it was recorded */
};

static struct {
    atomic_int streams, events, opened, registered, copies; /* now; copies: ever */
    atomic_bool capturing;  /* somewhere, in the mode that forbids all threads to wait */
    atomic_int broken;      /* calls that broke a capture */
    atomic_bool held;       /* giving memory back waits */
    atomic_int closing;     /* who does */
    atomic_int pushed;      /* contexts, ever */
    _Atomic(cu_event) busy; /* not reached yet */
    atomic_int put;         /* on streams, ever */
    atomic_int refused;     /* copies that are refused from now on */
    atomic_bool records_fail;
    agree_gone *tells; /* where the peer tells of much more while memory is given back */
} gpu;
static _Thread_local int capture_mode; /* 0: global */

static void unsafe(void) {
    if (atomic_load(&gpu.capturing) && capture_mode != CU_CAPTURE_RELAXED)
        atomic_fetch_add(&gpu.broken, 1);
}

static cu_result d_zero_int(int *out) { return *out = 0; }
static cu_result d_name(cu_result r, const char **out) {
    (void)r;
    *out = "CUDA_ERROR_TEST";
    return 0;
}
static cu_result d_context_get(cu_context *out) {
    *out = (cu_context)(uintptr_t)&gpu;
    return 0;
}
static cu_result d_push(cu_context c) {
    atomic_fetch_add(&gpu.pushed, 1);
    return c == NULL;
}
static cu_result d_priorities(int *a, int *b) { return *a = *b = 0; }
static cu_result d_ipc_get(cu_ipc_handle *h, cu_pointer p) {
    memset(h, 0, sizeof *h);
    return p == 0;
}
static cu_result d_ipc_open(cu_pointer *out, cu_ipc_handle h, unsigned flags) {
    (void)h, (void)flags;
    atomic_fetch_add(&gpu.opened, 1);
    *out = (cu_pointer)malloc(64);
    return 0;
}
static void tell(agree_gone *gone, uint64_t id) {
    atomic_store(&gone->id[atomic_load(&gone->count) % AGREE_GONE], id);
    atomic_fetch_add(&gone->count, 1);
}
static cu_result d_ipc_close(cu_pointer p) {
    unsafe();
    for (uint64_t i = 0; i < AGREE_GONE && gpu.tells != NULL; i++)
        tell(gpu.tells, 5000 + i);
    gpu.tells = NULL;
    atomic_fetch_add(&gpu.closing, 1);
    while (atomic_load(&gpu.held))
        usleep(1000);
    free((void *)p);
    atomic_fetch_sub(&gpu.opened, 1);
    return 0;
}
static cu_result d_attribute(void *out, int what, cu_pointer p) {
    if (what == CU_ATTRIBUTE_IPC_CAPABLE)
        *(unsigned *)out = 1;
    else
        *(uint64_t *)out = what == CU_ATTRIBUTE_RANGE_SIZE ? 1 << 20 : p;
    return 0;
}
static cu_result d_register(void *p, size_t n, unsigned flags) {
    (void)p, (void)n, (void)flags;
    atomic_fetch_add(&gpu.registered, 1);
    return 0;
}
static cu_result d_unregister(void *p) {
    (void)p;
    unsafe();
    atomic_fetch_sub(&gpu.registered, 1);
    return 0;
}
static cu_result d_pointer(cu_pointer *out, void *p, unsigned flags) {
    (void)flags;
    *out = (cu_pointer)p;
    return 0;
}
static cu_result d_stream(cu_stream *out, unsigned flags, int priority) {
    (void)flags, (void)priority;
    *out = calloc(1, sizeof **out);
    atomic_fetch_add(&gpu.streams, 1);
    return 0;
}
static cu_result d_stream_destroy(cu_stream s) {
    unsafe();
    atomic_fetch_sub(&gpu.streams, 1);
    free(s);
    return 0;
}
static cu_result use(cu_stream s) {
    atomic_fetch_add(&gpu.put, 1);
    if (s != NULL)
        atomic_fetch_add(&s->used, 1);
    return 0;
}
static cu_result d_stream_wait(cu_stream s, cu_event e, unsigned flags) {
    (void)flags;
    atomic_fetch_add(&e->used, 1);
    return use(s);
}
static cu_result d_wait(cu_stream s, cu_pointer word, uint32_t value, unsigned flags) {
    (void)word, (void)value, (void)flags;
    return use(s);
}
static cu_result d_write(cu_stream s, cu_pointer word, uint32_t value, unsigned flags) {
    (void)flags;
    atomic_store((atomic_uint *)word, value);
    return use(s);
}
static cu_result d_copy(cu_pointer to, cu_pointer from, size_t n, cu_stream s) {
    (void)to, (void)from, (void)n;
    if (atomic_load(&gpu.refused) > 0) {
        atomic_fetch_sub(&gpu.refused, 1);
        return 2;
    }
    atomic_fetch_add(&gpu.copies, 1);
    return use(s);
}
static cu_result d_event(cu_event *out, unsigned flags) {
    (void)flags;
    *out = calloc(1, sizeof **out);
    atomic_fetch_add(&gpu.events, 1);
    return 0;
}
static cu_result d_event_destroy(cu_event e) {
    atomic_fetch_sub(&gpu.events, 1);
    free(e);
    return 0;
}
static cu_result d_event_query(cu_event e) {
    unsafe();
    atomic_fetch_add(&e->used, 1);
    return e == atomic_load(&gpu.busy) ? CU_NOT_READY : 0;
}
static cu_result d_event_record(cu_event e, cu_stream s) {
    if (atomic_load(&gpu.records_fail))
        return 2;
    atomic_fetch_add(&e->used, 1);
    (void)use(s);
    e->at = atomic_load(&gpu.put);
    return 0;
}
static cu_result d_capturing(cu_stream s, int *out) {
    *out = 0;
    return use(s);
}
static cu_result d_capture_mode(int *mode) {
    const int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return 0;
}

static const cuda_driver table = {
    .version = d_zero_int,
    .error_name = d_name,
    .context_get = d_context_get,
    .context_push = d_push,
    .context_pop = d_context_get,
    .priorities = d_priorities,
    .ipc_get = d_ipc_get,
    .ipc_open = d_ipc_open,
    .ipc_close = d_ipc_close,
    .attribute = d_attribute,
    .host_register = d_register,
    .host_unregister = d_unregister,
    .host_pointer = d_pointer,
    .stream_create = d_stream,
    .stream_destroy = d_stream_destroy,
    .stream_wait = d_stream_wait,
    .wait_value = d_wait,
    .write_value = d_write,
    .copy = d_copy,
    .event_create = d_event,
    .event_destroy = d_event_destroy,
    .event_query = d_event_query,
    .event_record = d_event_record,
    .capturing = d_capturing,
    .capture_mode = d_capture_mode,
};

const cuda_driver *driver_find(const char **missing) {
    if (missing != NULL)
        *missing = NULL;
    return &table;
}
const char *driver_error(const cuda_driver *cu, cu_result r) {
    (void)cu, (void)r;
    return "CUDA_ERROR_TEST";
}
uint64_t mode_bytes(const char *name, uint64_t otherwise) {
    return strcmp(name, EPO_ENV_INTERPOSE_LEAST) == 0  ? 1
           : strcmp(name, EPO_ENV_INTERPOSE_WAIT) == 0 ? 50000
                                                       : otherwise;
}
void recorder_call(uint64_t what, uint64_t kind) { (void)what, (void)kind; }
bool recorder_wants_marks(void) { return false; }

/* ---- an NCCL that takes everything ---- */

static struct {
    _Atomic(ncclComm_t) gone; /* its memory has been given back */
    atomic_int looked_into;   /* calls with it */
    atomic_int sends;
} given;

static ncclResult_t n_group(void) { return ncclSuccess; }
static ncclResult_t n_simulate(ncclSimInfo_t *info) {
    (void)info;
    return ncclSuccess;
}
static ncclResult_t n_send(const void *b, size_t n, ncclDataType_t t, int p, ncclComm_t c,
                           cudaStream_t s) {
    (void)b, (void)n, (void)t, (void)p, (void)s;
    atomic_fetch_add(&given.sends, 1);
    atomic_fetch_add(&given.looked_into, c == atomic_load(&given.gone));
    return c == NULL ? ncclInvalidUsage : ncclSuccess;
}
static ncclResult_t n_recv(void *b, size_t n, ncclDataType_t t, int p, ncclComm_t c,
                           cudaStream_t s) {
    return n_send(b, n, t, p, c, s);
}
static ncclResult_t n_error(ncclComm_t c, ncclResult_t *out) {
    (void)c;
    return *out = ncclSuccess;
}
static const real_nccl nccl = {.GroupStart = n_group,
                               .GroupEnd = n_group,
                               .GroupSimulateEnd = n_simulate,
                               .Send = n_send,
                               .Recv = n_recv,
                               .CommGetAsyncError = n_error};

/* ---- two ranks of which one is a thread that only agrees ---- */

typedef struct pair {
    comm *comm;
    ncclComm_t handle;
    agree other;
    pthread_t thread;
    atomic_bool stop;
    agree_pair *out, *in; /* as it sees them */
} pair;

static void *agree_always(void *argument) {
    pair *p = argument;
    const agree_offer mine = {.id = 77, .bytes = 4096, .size = 4096, .ticket = 1};
    agree_vote(&p->other, 1 - p->other.me, true);
    (void)agree_verdict(&p->other, 1 - p->other.me, 5);
    (void)agree_whole(&p->other, 2, 5);
    for (uint32_t n = 1; !atomic_load(&p->stop); n++) {
        agree_offer theirs;
        const bool offered = agree_give(p->in, n, &mine);
        if (agree_get(p->out, n, &(agree_limit){.until = agree_now() + 0.01}, &theirs))
            (void)agree_take(p->out, n);
        if (offered)
            (void)agree_taken(p->in, n, &(agree_limit){.until = agree_now() + 0.01});
    }
    return NULL;
}

static void pair_open(pair *p, unsigned number) {
    const comm_key key = {{0x401d000000000000u + (unsigned)getpid(), number}};
    const epo_terms_card card = {.abi = EPO_TERMS_ABI,
                                 .least = 1,
                                 .rank = 1,
                                 .ranks = 2,
                                 .pid = -1,
                                 .usable = 1,
                                 .whole = 1};
    channel *pending = NULL;
    memset(p, 0, sizeof *p);
    p->handle = (ncclComm_t)(uintptr_t)(0x1000 + number * 16);
    p->comm = comm_create(&nccl, 0, 2, &key);
    channel_announce(p->comm, &pending);
    CU_ASSERT_TRUE_FATAL(pending != NULL && agree_enter(&p->other, &key));
    const int it = p->other.me, us = 1 - it;
    p->out = &p->other.room->pair[it][us];
    p->in = &p->other.room->pair[us][it];
    agree_show(&p->other, &card);
    CU_ASSERT_FATAL(pthread_create(&p->thread, NULL, agree_always, p) == 0);
    channel_settle(p->comm, pending, true);
    CU_ASSERT_EQUAL_FATAL(p->comm->why, FALLBACK_NONE);
    comm_publish(p->comm, p->handle);
}

static void pair_leave(pair *p) {
    atomic_store(&p->stop, true);
    pthread_join(p->thread, NULL);
    (void)agree_closed(&p->other);
    agree_leave(&p->other);
}

/* One group of the program's, as entry.c makes it.  False: the communicator is gone. */
static bool exchange_of(const pair *p, thread_state *t, bool end, uint64_t bytes) {
    static char memory[2][4096];
    comm *c = comm_find(p->handle);
    if (c == NULL)
        return false;
    message m = {.comm = c, .handle = p->handle, .peer = 1, .bytes = bytes, .count = bytes};
    m.source = memory[0];
    m.target = memory[1];
    CU_ASSERT_EQUAL(group_start(&nccl, t), ncclSuccess);
    m.send = true;
    CU_ASSERT_EQUAL(group_message(&nccl, t, &m), ncclSuccess);
    m.send = false;
    CU_ASSERT_EQUAL(group_message(&nccl, t, &m), ncclSuccess);
    const ncclResult_t r = end ? group_end(&nccl, t) : ncclSuccess;
    CU_ASSERT_TRUE(r == ncclSuccess || (r == ncclInvalidArgument && comm_find(p->handle) == NULL));
    return true;
}

static bool exchange(const pair *p, thread_state *t, bool end) {
    return exchange_of(p, t, end, 4096);
}

static void *exchange_always(void *p) {
    while (exchange(p, thread_here(), true))
        ;
    return NULL;
}

static void abort_of(const pair *p) {
    comm *c = comm_find(p->handle);
    channel *ch = c != NULL ? comm_retire(c) : NULL;
    CU_ASSERT_PTR_NOT_NULL_FATAL(ch);
    CU_ASSERT_PTR_NULL(comm_retire(c)); /* another thread that has found it, too */
    channel_abort(ch);
    channel_close(ch);
}

static void expect_released(void) {
    CU_ASSERT_EQUAL(atomic_load(&gpu.streams), 0);
    CU_ASSERT_EQUAL(atomic_load(&gpu.events), 0);
    CU_ASSERT_EQUAL(atomic_load(&gpu.opened), 0);
    CU_ASSERT_EQUAL(atomic_load(&gpu.registered), 0);
}

static void test_abort_beside_groups(void) {
    unsigned seed = 5;
    for (unsigned round = 0; round < 60; round++) {
        pair p;
        pthread_t user[2];
        pair_open(&p, round);
        for (int i = 0; i < 2; i++)
            CU_ASSERT_FATAL(pthread_create(&user[i], NULL, exchange_always, &p) == 0);
        usleep((useconds_t)(rand_r(&seed) % 3000));
        abort_of(&p);
        for (int i = 0; i < 2; i++)
            pthread_join(user[i], NULL);
        pair_leave(&p);
        expect_released();
    }
    CU_ASSERT_TRUE(atomic_load(&gpu.copies) > 0); /* some of it was carried */
}

/* A thread has its messages collected; the communicator is aborted, and another gets its handle;
 * the group ends.  NCCL gets what is another communicator's alone. */
static void test_abort_inside_a_group(void) {
    for (unsigned renewed = 0; renewed < 2; renewed++) {
        pair p, other, next;
        pair_open(&p, 100 + renewed);
        pair_open(&other, 102 + renewed);
        thread_state *t = thread_here();
        CU_ASSERT_TRUE(exchange(&p, t, false));
        CU_ASSERT_TRUE(exchange_of(&other, t, false, 0));
        abort_of(&p);
        CU_ASSERT_TRUE(atomic_load(&gpu.streams) > 0); /* the group holds it */
        atomic_store(&given.gone, p.handle);
        atomic_store(&given.looked_into, 0);
        atomic_store(&given.sends, 0);
        if (renewed) {
            pair_open(&next, 104);
            next.comm->handle = p.handle;
        }
        CU_ASSERT_EQUAL(group_end(&nccl, t), ncclSuccess); /* (the inner one) */
        CU_ASSERT_EQUAL(group_end(&nccl, t), ncclInvalidArgument);
        CU_ASSERT_EQUAL(atomic_load(&given.looked_into), 0);
        CU_ASSERT_EQUAL(atomic_load(&given.sends), 2);
        atomic_store(&given.gone, NULL);
        abort_of(&other);
        pair_leave(&other);
        if (renewed) {
            next.handle = p.handle;
            abort_of(&next);
            pair_leave(&next);
        }
        expect_released();
        pair_leave(&p);
    }
}

static void *leave_open(void *argument) {
    CU_ASSERT_TRUE(exchange(argument, thread_here(), false));
    return NULL;
}

/* Ends of groups that are no ncclGroupEnd: a simulated one, and the thread's own. */
static void test_other_ends(void) {
    for (unsigned simulated = 0; simulated < 2; simulated++) {
        pair p;
        pthread_t user;
        pair_open(&p, 110 + simulated);
        thread_state *t = thread_here();
        if (simulated) {
            CU_ASSERT_TRUE(exchange(&p, t, false));
        } else {
            CU_ASSERT_FATAL(pthread_create(&user, NULL, leave_open, &p) == 0);
            pthread_join(user, NULL);
        }
        comm *c = comm_find(p.handle);
        channel *ch = c != NULL ? comm_retire(c) : NULL;
        CU_ASSERT_PTR_NOT_NULL_FATAL(ch);
        channel_abort(ch);
        if (simulated) {
            channel_close_later(ch, &t->ending);
            CU_ASSERT_EQUAL(group_simulate(&nccl, t, NULL), ncclInvalidArgument);
            CU_ASSERT_PTR_NULL(t->ending);
        } else {
            channel_close(ch);
        }
        expect_released();
        pair_leave(&p);
    }
}

static void *end_later(void *argument) {
    channel_close_later(argument, &thread_here()->ending);
    return NULL;
}

static void test_thread_that_ends(void) {
    pair p;
    pthread_t user;
    pair_open(&p, 120);
    channel *ch = comm_retire(comm_find(p.handle));
    channel_abort(ch);
    CU_ASSERT_FATAL(pthread_create(&user, NULL, end_later, ch) == 0);
    pthread_join(user, NULL);
    expect_released();
    pair_leave(&p);
}

/* The driver gives a peer's memory back only when something else ends: an abort does not wait. */
static void test_release_has_a_limit(void) {
    pair p;
    pair_open(&p, 130);
    for (int i = 0; i < 1000 && atomic_load(&gpu.opened) == 0; i++)
        CU_ASSERT_TRUE(exchange(&p, thread_here(), true));
    CU_ASSERT_TRUE_FATAL(atomic_load(&gpu.opened) > 0);
    atomic_store(&gpu.held, true);
    atomic_store(&gpu.closing, 0);
    abort_of(&p);
    /* back before the driver is, which waits for what comes below */
    CU_ASSERT_TRUE(atomic_load(&gpu.closing) > 0 && atomic_load(&gpu.opened) > 0);
    atomic_store(&gpu.held, false);
    for (int i = 0; i < 5000 && atomic_load(&gpu.registered) > 0; i++)
        usleep(1000);
    expect_released();
    pair_leave(&p);
}

static void exchange_until_opened(const pair *p, int more) {
    const int want = atomic_load(&gpu.opened) + more;
    for (int i = 0; i < 1000 && atomic_load(&gpu.opened) < want; i++)
        CU_ASSERT_TRUE(exchange(p, thread_here(), true));
    CU_ASSERT_TRUE_FATAL(atomic_load(&gpu.opened) >= want);
}

/* One communicator waits for a peer; another is aborted.  Nothing is given back, which would wait
 * for the first; when that is ended, or has gone on for long, it is. */
static void test_release_waits(void) {
    for (unsigned forced = 0; forced < 2; forced++) {
        pair a, b;
        pair_open(&a, 160 + forced);
        pair_open(&b, 170 + forced);
        exchange_until_opened(&a, 1);
        exchange_until_opened(&b, 1);
        channel *ch = comm_channel(b.comm);
        atomic_store(&gpu.busy, ch->last);
        channel_put(ch);
        atomic_store(&gpu.closing, 0);
        abort_of(&a);
        CU_ASSERT_EQUAL(atomic_load(&gpu.closing), 0);
        CU_ASSERT_EQUAL(atomic_load(&gpu.opened), 2);
        for (const double start = agree_now();
             forced && atomic_load(&gpu.opened) == 2 && agree_now() - start < 60;)
            CU_ASSERT_TRUE(exchange(&b, thread_here(), true));
        CU_ASSERT_EQUAL(atomic_load(&gpu.opened), forced ? 1 : 2);
        atomic_store(&gpu.busy, NULL);
        abort_of(&b);
        expect_released();
        pair_leave(&a);
        pair_leave(&b);
    }
}

/* What waited is given back by the exchange of another communicator, which does not wait for it:
 * the driver takes its time, and the message that a limit is over does not come. */
static void test_exchange_goes_on(void) {
    char said[256] = "";
    pair a, b;
    pair_open(&a, 180);
    pair_open(&b, 181);
    exchange_until_opened(&a, 1);
    exchange_until_opened(&b, 1);
    channel *ch = comm_channel(b.comm);
    atomic_store(&gpu.busy, ch->last);
    abort_of(&a);
    CU_ASSERT_EQUAL(atomic_load(&gpu.opened), 2);
    atomic_store(&gpu.held, true);
    atomic_store(&gpu.closing, 0);
    atomic_store(&gpu.busy, NULL);
    FILE *log = tmpfile();
    const int before = dup(2);
    CU_ASSERT_TRUE_FATAL(log != NULL && before >= 0 && dup2(fileno(log), 2) == 2);
    for (const double start = agree_now();
         atomic_load(&gpu.closing) == 0 && agree_now() - start < 20;)
        CU_ASSERT_TRUE(exchange(&b, thread_here(), true));
    CU_ASSERT_EQUAL(dup2(before, 2), 2);
    close(before);
    rewind(log);
    CU_ASSERT_PTR_NULL(fgets(said, sizeof said, log));
    fclose(log);
    CU_ASSERT_TRUE(atomic_load(&gpu.closing) == 1 && atomic_load(&gpu.opened) == 2);
    CU_ASSERT_TRUE(exchange(&b, thread_here(), true));
    atomic_store(&gpu.held, false);
    channel_put(ch);
    abort_of(&b);
    for (int i = 0; i < 5000 && atomic_load(&gpu.registered) > 0; i++)
        usleep(1000);
    expect_released();
    pair_leave(&a);
    pair_leave(&b);
}

/* The driver refuses a copy when a part of the exchange stands on the stream already: its end is
 * known all the same, or, where no event can be had, nothing is given back that it may use. */
static void test_part_of_an_exchange(void) {
    for (unsigned lost = 0; lost < 2; lost++) {
        pair p;
        pair_open(&p, 190 + lost);
        exchange_until_opened(&p, 1);
        channel *ch = comm_channel(p.comm);
        ncclResult_t r = ncclSuccess;
        atomic_store(&gpu.refused, 1);
        atomic_store(&gpu.records_fail, lost != 0);
        for (int i = 0; i < 1000 && r == ncclSuccess; i++) {
            CU_ASSERT_TRUE(exchange(&p, thread_here(), false));
            r = group_end(&nccl, thread_here());
        }
        CU_ASSERT_EQUAL(r, ncclUnhandledCudaError);
        CU_ASSERT_EQUAL(ch->last->at == atomic_load(&gpu.put), lost == 0);
        atomic_store(&gpu.records_fail, false);
        channel_put(ch);
        abort_of(&p);
        CU_ASSERT_EQUAL(atomic_load(&gpu.opened), (int)lost);
        if (lost == 0)
            expect_released();
        pair_leave(&p);
    }
}

/* A capture elsewhere, in the mode in which no thread may wait: ours tells the driver otherwise. */
static void test_end_beside_a_capture(void) {
    pair p;
    pair_open(&p, 140);
    for (int i = 0; i < 20; i++)
        CU_ASSERT_TRUE(exchange(&p, thread_here(), true));
    atomic_store(&gpu.capturing, true);
    channel_close(comm_retire(comm_find(p.handle)));
    atomic_store(&gpu.capturing, false);
    CU_ASSERT_EQUAL(atomic_load(&gpu.broken), 0);
    CU_ASSERT_EQUAL(capture_mode, 0);
    expect_released();
    pair_leave(&p);
}

/* What is too small for us costs a lock and a question, no more. */
static void test_small(void) {
    pair p;
    pair_open(&p, 150);
    CU_ASSERT_TRUE(exchange(&p, thread_here(), true));
    const int before = atomic_load(&gpu.pushed);
    const double start = agree_now();
    for (int i = 0; i < 200; i++)
        CU_ASSERT_TRUE(exchange_of(&p, thread_here(), true, 0));
    /* (what was freed is looked for every half second) */
    CU_ASSERT_TRUE(atomic_load(&gpu.pushed) - before <= 1 + (int)(2 * (agree_now() - start)));
    channel_close(comm_retire(comm_find(p.handle)));
    expect_released();
    pair_leave(&p);
}

/* A peer tells of what it has freed while this rank reads what it told before: none is missed. */
static void test_told_meanwhile(void) {
    for (uint64_t more = 0; more < 2; more++) {
        pair p;
        pair_open(&p, 160 + (unsigned)more);
        channel *ch = comm_channel(p.comm);
        const int peer = p.other.me;
        agree_gone *gone = &p.other.room->gone[peer];
        for (uint64_t id = 1; id <= 3; id++) {
            const agree_offer offer = {.id = id, .bytes = 64, .size = 64};
            fallback why;
            CU_ASSERT_TRUE(reach_open(ch, peer, &offer, &why) != 0);
        }
        CU_ASSERT_EQUAL(atomic_load(&gpu.opened), 3);
        tell(gone, 1);
        tell(gone, 2);
        gpu.tells = more ? gone : NULL;
        reach_tidy(ch, true);
        CU_ASSERT_EQUAL(atomic_load(&gpu.opened), more ? 0 : 1);
        channel_put(ch);
        channel_close(comm_retire(comm_find(p.handle)));
        expect_released();
        pair_leave(&p);
    }
}

static void count(const comm *c, void *n) {
    (void)c;
    ++*(int *)n;
}

/* What is gone is in the figures once, and no search passes it. */
static void test_gone(void) {
    int before = 0, after = 0;
    comm_each(count, &before);
    const ncclComm_t handle = (ncclComm_t)(uintptr_t)0x77;
    for (int i = 0; i < 3; i++) {
        comm *c = comm_create(&nccl, 0, 1, NULL);
        comm_publish(c, handle);
        CU_ASSERT_PTR_EQUAL(comm_find(handle), c);
        CU_ASSERT_PTR_NULL(comm_channel(c));
        CU_ASSERT_PTR_NULL(comm_retire(c));
        CU_ASSERT_PTR_NULL(comm_retire(c));
        CU_ASSERT_PTR_NULL(comm_find(handle));
    }
    comm_each(count, &after);
    CU_ASSERT_EQUAL(after, before + 3);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"an abort beside groups", test_abort_beside_groups},
        {"an abort inside a group", test_abort_inside_a_group},
        {"groups that end otherwise", test_other_ends},
        {"a thread that ends", test_thread_that_ends},
        {"a release that the driver holds up", test_release_has_a_limit},
        {"a release that waits for another communicator", test_release_waits},
        {"an end beside a capture", test_end_beside_a_capture},
        {"small messages", test_small},
        {"what is told meanwhile", test_told_meanwhile},
        {"communicators that are gone", test_gone},
        {"an exchange does not wait for a release", test_exchange_goes_on},
        {"a part of an exchange", test_part_of_an_exchange}, /* (leaves something open: the last) */
        CU_TEST_INFO_NULL,
    };
    return unit_run("intercept_hold", tests);
}
