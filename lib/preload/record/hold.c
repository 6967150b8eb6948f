/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "preload/record/hold.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "preload/lock_within.h"
#include "preload/record/buffers.h"

#define QUIET_NS (INT64_C(3) * 1000000000) /* after another's last call: its flush is over */
#define ONES 64
#define WAIT_SECONDS 2 /* of a profiler for our lock, then it goes on */

static const cupti_kind kinds[] = {CUPTI_KIND_CONCURRENT_KERNEL, CUPTI_KIND_MEMCPY,
                                   CUPTI_KIND_MEMCPY_PEER, CUPTI_KIND_MEMSET};
#define KINDS (sizeof kinds / sizeof *kinds)

typedef enum leave_state { LEAVE_NOT, LEAVE_WANTED, LEAVE_NOW, LEAVE_DONE } leave_state;

static struct {
    pthread_mutex_t lock;
    bool open;
    char taken[CUPTI_TEXT]; /* the call by which another took over; "": none */
    int64_t system_opened;
    cupti_subscriber subscriber; /* ours */
    atomic_int leaving;          /* a leave_state */
    bool leaves;                 /* when it is over */
    bool used_by_others;         /* ever */
    hold_facts facts;
    /* others */
    int subscribers;
    uint64_t enabled[CUPTI_KINDS / 64];
    struct {
        void *cuda;
        cupti_kind kind;
    } one[ONES];       /* switched on for one CUDA context */
    size_t ones;       /* more than ONES: nobody knows which */
    int64_t last_call; /* of any of theirs; 0: none */
    int inside;        /* of theirs that have not come back: one that starts CUPTI takes seconds */
    cupti_buffer_requested *requested;
    cupti_buffer_completed *completed;
    cupti_clock *clock;
} context = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int64_t system_now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint64_t own_clock(void) { return (uint64_t)system_now(CLOCK_REALTIME); }

static int64_t cupti_now(const cupti *c) {
    uint64_t now = 0;
    return c->now(&now) == CUPTI_OK ? (int64_t)now : 0;
}

/* At the end of a call of the run-time library, which is where CUPTI may be taken away: a
 * driver's call may be inside one, whose end CUPTI would still have to see. */
static void on_call(void *user, int domain, uint32_t id, const void *data) {
    const cupti *c = context.facts.cupti;
    const cupti_call *call = data;
    int wanted = LEAVE_WANTED;
    (void)user;
    (void)id;
    if (domain != CUPTI_DOMAIN_RUNTIME || call == NULL || call->site != CUPTI_SITE_EXIT ||
        !atomic_compare_exchange_strong(&context.leaving, &wanted, LEAVE_NOW))
        return;
    (void)c->unsubscribe(context.subscriber);
    (void)c->finalize();
    atomic_store(&context.leaving, LEAVE_DONE);
}

static bool others_record(void) {
    for (size_t i = 0; i < sizeof context.enabled / sizeof *context.enabled; i++)
        if (context.enabled[i] != 0)
            return true;
    return context.ones > 0;
}

/* Of one CUDA context, or of all (`cuda` NULL). */
static void forget_ones(const void *cuda, cupti_kind kind) {
    for (size_t i = context.ones <= ONES ? context.ones : 0; i-- > 0;)
        if (context.one[i].kind == kind && (cuda == NULL || context.one[i].cuda == cuda))
            context.one[i] = context.one[--context.ones];
}

/* While we record we are the subscriber, unless a profiler that is idle now is: one that
 * nobody sees coming (it looks functions up with dlsym) is told so by CUPTI, instead of
 * getting our buffers. */
static cupti_result subscribe(const cupti *c) {
    context.subscriber = NULL;
    return context.subscribers > 0 ? CUPTI_OK : c->subscribe(&context.subscriber, on_call, NULL);
}

static void unsubscribe(const cupti *c) {
    if (context.subscriber != NULL)
        (void)c->unsubscribe(context.subscriber);
    context.subscriber = NULL;
}

/* ---- on and off; with the lock ---- */

static void disable_first(const cupti *c, size_t count) {
    for (size_t i = count; i-- > 0;)
        (void)c->disable(kinds[i]);
}

/* *touched: something is to be put back, whatever the result. */
static cupti_result enable_all(const cupti *c, bool *touched) {
    cupti_result r = subscribe(c);
    *touched = r == CUPTI_OK;
    if (r != CUPTI_OK)
        return r;
    r = c->callbacks(buffers_requested, buffers_completed);
    if (r == CUPTI_OK && context.clock != NULL && c->clock != NULL)
        r = c->clock(own_clock);
    for (size_t i = 0; i < KINDS && r == CUPTI_OK; i++) {
        r = c->enable(kinds[i]);
        if (r != CUPTI_OK)
            disable_first(c, i);
    }
    return r;
}

/* What others had registered serves them again; who wants to subscribe may. */
static void put_back(const cupti *c) {
    if (context.requested != NULL && context.completed != NULL)
        (void)c->callbacks(context.requested, context.completed);
    if (context.clock != NULL && c->clock != NULL)
        (void)c->clock(context.clock);
    unsubscribe(c);
}

static void note_end(const cupti *c) {
    const int64_t now = cupti_now(c), length = now - context.facts.opened;
    const int64_t system = system_now(CLOCK_MONOTONIC) - context.system_opened;
    const int64_t apart = length > system ? length - system : system - length;
    context.facts.closed = now;
    context.facts.skewed = apart > system / 100 + 20000000;
}

static void close_now(bool flush) {
    const cupti *c = context.facts.cupti;
    context.open = false;
    note_end(c);
    disable_first(c, KINDS);
    if (flush) {
        (void)c->flush(0);
        if (buffers_away() > 0)
            (void)c->flush(CUPTI_FLUSH_FORCED);
    }
    size_t dropped = 0;
    if (c->dropped(NULL, 0, &dropped) == CUPTI_OK)
        context.facts.dropped += dropped;
    context.facts.refused = buffers_refused();
    put_back(c);
}

/* ---- leaving; with the lock ---- */

static void stay(const cupti *c) {
    const struct timespec nap = {0, 1000000};
    int wanted = LEAVE_WANTED;
    if (atomic_compare_exchange_strong(&context.leaving, &wanted, LEAVE_NOT)) {
        (void)c->domain(0, context.subscriber, CUPTI_DOMAIN_RUNTIME);
        unsubscribe(c);
        return;
    }
    for (int i = 0; i < 1000 * WAIT_SECONDS && atomic_load(&context.leaving) == LEAVE_NOW; i++)
        nanosleep(&nap, NULL);
}

static bool may_leave(const cupti *c) {
    return context.leaves && c != NULL && !context.open && !context.used_by_others &&
           c->domain != NULL && c->finalize != NULL && c->number >= CUPTI_VERSION_LEAVES &&
           c->subscribe(&context.subscriber, on_call, NULL) == CUPTI_OK;
}

/* ---- the recorder's side ---- */

void hold_prepare(bool leaves) {
    context.leaves = leaves;
    cupti_read_environment();
}

bool hold_leave(void) {
    pthread_mutex_lock(&context.lock);
    const cupti *c = context.facts.cupti;
    const bool leaves = may_leave(c);
    if (leaves) {
        (void)c->domain(1, context.subscriber, CUPTI_DOMAIN_RUNTIME);
        atomic_store(&context.leaving, LEAVE_WANTED); /* not while we are inside CUPTI */
    }
    pthread_mutex_unlock(&context.lock);
    return leaves;
}

bool hold_has_left(void) {
    const int state = atomic_load(&context.leaving);
    return state == LEAVE_DONE || state == LEAVE_NOT;
}

void hold_stay(void) {
    pthread_mutex_lock(&context.lock);
    if (context.facts.cupti != NULL)
        stay(context.facts.cupti);
    pthread_mutex_unlock(&context.lock);
}

static hold_answer may_open(char *why) {
    if (context.inside > 0) {
        snprintf(why, CUPTI_TEXT, "a profiler of the program's is at work");
        return HOLD_LATER;
    }
    if (others_record()) {
        snprintf(why, CUPTI_TEXT, "a profiler of the program's is recording");
        return HOLD_LATER;
    }
    if (context.last_call != 0 && system_now(CLOCK_MONOTONIC) - context.last_call < QUIET_NS) {
        snprintf(why, CUPTI_TEXT, "a profiler of the program's has just been at work");
        return HOLD_LATER;
    }
    char tool[CUPTI_TEXT];
    if (cupti_tool_attached(tool)) {
        snprintf(why, CUPTI_TEXT, "another tool is attached: %.440s", tool);
        return HOLD_NEVER;
    }
    context.facts.cupti = cupti_find(why);
    return context.facts.cupti != NULL ? HOLD_OPEN : HOLD_NEVER;
}

hold_answer hold_open(char *why) {
    pthread_mutex_lock(&context.lock);
    hold_answer answer = may_open(why);
    const cupti *c = context.facts.cupti;
    if (answer == HOLD_OPEN) {
        const hold_facts fresh = {.cupti = c};
        context.facts = fresh;
        context.taken[0] = '\0';
        buffers_reset();
        bool touched;
        const cupti_result r = enable_all(c, &touched);
        if (r == CUPTI_OK) {
            context.open = true;
            context.facts.opened = cupti_now(c);
            context.system_opened = system_now(CLOCK_MONOTONIC);
        } else {
            if (touched)
                put_back(c);
            snprintf(why, CUPTI_TEXT, "%.300s: %s", c->path, cupti_error(c, r));
            answer = r == CUPTI_BUSY ? HOLD_LATER : HOLD_NEVER;
        }
    }
    pthread_mutex_unlock(&context.lock);
    return answer;
}

void hold_close(void) {
    pthread_mutex_lock(&context.lock);
    if (context.open)
        close_now(true);
    pthread_mutex_unlock(&context.lock);
}

bool hold_taken(char *by) {
    pthread_mutex_lock(&context.lock);
    const bool taken = context.taken[0] != '\0';
    if (taken)
        snprintf(by, CUPTI_TEXT, "%s", context.taken);
    pthread_mutex_unlock(&context.lock);
    return taken;
}

uint8_t *hold_next(size_t *valid) { return buffers_next(valid); }
void hold_reuse(uint8_t *buffer) { buffers_reuse(buffer); }
void hold_free(void) { buffers_free(); }

hold_facts hold_tell(void) {
    pthread_mutex_lock(&context.lock);
    const hold_facts facts = context.facts;
    pthread_mutex_unlock(&context.lock);
    return facts;
}

/* ---- the others' side ---- */

/* A profiler's call may come from inside CUPTI while our thread waits for CUPTI: it waits
 * for us a while, not for ever. */
static bool lock_a_while(void) { return lock_within(&context.lock, WAIT_SECONDS); }

void hold_other_calls(hold_other what, const char *function) {
    if (!lock_a_while())
        return;
    context.last_call = system_now(CLOCK_MONOTONIC);
    context.inside++;
    context.used_by_others = true;
    if (context.facts.cupti != NULL)
        stay(context.facts.cupti);
    const bool starts =
        what != OTHER_UNSUBSCRIBES && what != OTHER_DISABLES && what != OTHER_FLUSHES;
    if (starts && context.open) {
        snprintf(context.taken, sizeof context.taken, "%s", function);
        close_now(what != OTHER_FINALIZES);
    }
    pthread_mutex_unlock(&context.lock);
}

void hold_other_returned(void) {
    if (!lock_a_while())
        return;
    context.last_call = system_now(CLOCK_MONOTONIC);
    context.inside -= context.inside > 0;
    pthread_mutex_unlock(&context.lock);
}

void hold_other_called(hold_other what, cupti_kind kind) {
    if (!lock_a_while())
        return;
    const uint64_t bit = UINT64_C(1) << kind % 64;
    uint64_t *word = kind < CUPTI_KINDS ? &context.enabled[kind / 64] : NULL;
    if (what == OTHER_SUBSCRIBES)
        context.subscribers++;
    else if (what == OTHER_UNSUBSCRIBES && context.subscribers > 0)
        context.subscribers--;
    else if (what == OTHER_ENABLES && word != NULL)
        *word |= bit;
    else if (what == OTHER_DISABLES && word != NULL) {
        *word &= ~bit;
        forget_ones(NULL, kind);
    } else if (what == OTHER_FINALIZES) {
        memset(context.enabled, 0, sizeof context.enabled);
        context.ones = 0;
        context.subscribers = 0;
        context.requested = NULL;
        context.completed = NULL;
        context.clock = NULL;
    }
    pthread_mutex_unlock(&context.lock);
}

void hold_other_switched(void *cuda, cupti_kind kind, bool on) {
    if (!lock_a_while())
        return;
    forget_ones(cuda, kind);
    if (on && context.ones < ONES) {
        context.one[context.ones].cuda = cuda;
        context.one[context.ones].kind = kind;
    }
    context.ones += on && context.ones <= ONES;
    pthread_mutex_unlock(&context.lock);
}

void hold_other_registered(cupti_buffer_requested *requested, cupti_buffer_completed *completed) {
    if (!lock_a_while())
        return;
    context.requested = requested;
    context.completed = completed;
    pthread_mutex_unlock(&context.lock);
}

void hold_other_clock(cupti_clock *clock) {
    if (!lock_a_while())
        return;
    context.clock = clock;
    pthread_mutex_unlock(&context.lock);
}

void hold_forget(void) {
    const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&context.lock, &fresh, sizeof fresh);
    context.open = false;
    context.inside = 0;
}
