/* SPDX-License-Identifier: Apache-2.0
 *
 * recorder.c - one thread that waits for the window, holds CUPTI while it is open, and
 * writes down what it saw when it is over.  The program's own threads only leave a note of
 * each call of NCCL.
 */
#include "config.h"

#include "preload/record/recorder.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/names.h"
#include "core/status.h"
#include "preload/environment.h"
#include "preload/intercept/intercept.h"
#include "preload/lock_within.h"
#include "preload/record/file.h"
#include "preload/record/report.h"
#include "preload/record/rhythm.h"

#define TICK_MS 50
#define CALLS_MAX ((size_t)1 << 17) /* remembered; then the older half goes */
#define SECOND INT64_C(1000000000)
#define END_SECONDS 5     /* that the end of the process waits for us */
#define LISTEN_SECONDS 60 /* for a rhythm; then SPARE_SECONDS are recorded */
#define SPARE_SECONDS 10
#define SETTLED_NS (2 * SECOND) /* a rhythm that held so long is one */
#define WINDOW_STEPS_FROM 10
#define WINDOW_STEPS_TO 14

typedef enum stage { STAGE_OFF, STAGE_WAITING, STAGE_OPEN, STAGE_LEAVING, STAGE_DONE } stage;

/* The thread's own. */
typedef struct session {
    record_window window;
    size_t given; /* calls of a step, by the user's word; 0: not told */
    rhythm_found rhythm;
    uint64_t heard;        /* calls when the rhythm was found first */
    int64_t since;         /* when */
    uint64_t steps_before; /* then */
    uint64_t looked;       /* calls when it was last looked for */
    int64_t opened;        /* our clock */
    uint64_t calls_opened;
    events *seen;
    report report;
    rhythm_call *calls; /* a copy */
    size_t *room;
    uint64_t *words;
    bool ordered; /* stop_before_cupti() was */
    bool by_kind; /* the last rhythm that was looked for is one of kinds without bytes */
} session;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* CLOCK_MONOTONIC */
    atomic_int stage;
    bool stop, finished;
    atomic_bool gave_up; /* at the end of the process, waiting for the lock */
    bool marks;          /* set before the thread is started */
    pid_t pid;
    int64_t born;
    rhythm_call *calls;
    size_t count;
    uint64_t made; /* all calls, forgotten ones too */
    int rank;
    char line[REPORT_LINE];
} context = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * SECOND + t.tv_nsec;
}

bool recorder_wanted(void) { return mode_record() != NULL; }

void recorder_call(uint64_t what, uint64_t kind) {
    if (atomic_load_explicit(&context.stage, memory_order_relaxed) == STAGE_OFF)
        return;
    pthread_mutex_lock(&context.lock);
    if (context.calls != NULL) {
        if (context.count == CALLS_MAX) {
            context.count = CALLS_MAX / 2;
            memmove(context.calls, context.calls + CALLS_MAX / 2,
                    CALLS_MAX / 2 * sizeof *context.calls);
        }
        context.calls[context.count++] = (rhythm_call){what, kind, now_ns()};
        context.made++;
    }
    pthread_mutex_unlock(&context.lock);
}

bool recorder_wants_marks(void) {
    return atomic_load_explicit(&context.stage, memory_order_relaxed) == STAGE_OPEN &&
           context.marks;
}

/* ---- the rhythm ---- */

static uint64_t calls_made(void) {
    pthread_mutex_lock(&context.lock);
    const uint64_t made = context.made;
    pthread_mutex_unlock(&context.lock);
    return made;
}

/* The calls so far. */
static size_t copy_calls(session *s) {
    pthread_mutex_lock(&context.lock);
    const size_t count = context.count;
    memcpy(s->calls, context.calls, count * sizeof *s->calls);
    pthread_mutex_unlock(&context.lock);
    return count;
}

/* A step of one call is none: all calls are alike, and nobody can say where a step ends.
 * What is left in s->calls is what the rhythm is made of. */
static rhythm_found find_rhythm(session *s, size_t *count) {
    *count = rhythm_without_rare(s->calls, *count, s->words);
    rhythm_found found = rhythm_find(s->calls, *count, s->room);
    s->by_kind = found.period <= 1;
    if (s->by_kind) {
        rhythm_forget_bytes(s->calls, *count);
        *count = rhythm_without_rare(s->calls, *count, s->words);
        found = rhythm_find(s->calls, *count, s->room);
    }
    return found.period > 1 ? found : (rhythm_found){0, 0};
}

/* Whether the last steps still have the period that was found before, but for a call now and
 * then: a loop that logs every ten steps has a period of ten steps as well.  s->calls is then
 * those last calls. */
static bool still_holds(session *s, size_t period, size_t *count) {
    const size_t recent = 16 * period < *count ? 16 * period : *count;
    memmove(s->calls, s->calls + *count - recent, recent * sizeof *s->calls);
    *count = recent;
    return period > 0 && find_rhythm(s, count).period == period;
}

/* What is remembered may hold fewer steps than were counted since the rhythm is known. */
static void take_rhythm(session *s, rhythm_found found, uint64_t made) {
    const bool same = s->rhythm.period == found.period;
    const uint64_t since = same ? made - s->heard : 0;
    const uint64_t counted = same ? s->steps_before + since / found.period : 0;
    const uint64_t remembered = found.stretch / found.period;
    if (!same)
        s->since = now_ns();
    s->rhythm = found;
    s->steps_before = counted > remembered ? counted : remembered;
    s->heard = counted > remembered ? made - since % found.period : made;
}

/* Looks again when a tenth more calls were made. */
static void listen(session *s) {
    const uint64_t made = calls_made();
    if (s->given > 0) {
        s->rhythm = (rhythm_found){s->given, (size_t)made};
        s->heard = made;
        s->steps_before = made / s->given;
        return;
    }
    if (made < s->looked + s->looked / 10 + 1)
        return;
    s->looked = made;
    size_t count = copy_calls(s);
    const rhythm_found found = find_rhythm(s, &count);
    if (found.period == 0)
        return; /* what was found before may still be so */
    if (s->rhythm.period > 0 && found.period > s->rhythm.period) {
        count = copy_calls(s);
        if (still_holds(s, s->rhythm.period, &count))
            return;
    }
    take_rhythm(s, found, made);
}

/* Whole steps so far; 0 while nothing is known. */
static uint64_t steps_now(const session *s) {
    if (s->rhythm.period == 0 || (s->given == 0 && now_ns() - s->since < SETTLED_NS))
        return 0;
    return s->steps_before + (calls_made() - s->heard) / s->rhythm.period;
}

/* The calls since a while before the window. */
static size_t copy_window(session *s, int64_t closed) {
    size_t count = copy_calls(s), first = 0;
    const int64_t margin = 3 * (closed - s->opened);
    while (first < count && s->calls[first].when < s->opened - margin)
        first++;
    memmove(s->calls, s->calls + first, (count - first) * sizeof *s->calls);
    return count - first;
}

/* The rhythm at the window's end, and the calls that make it alone: all others cost time but
 * are no part of a step. */
static size_t settle_period(session *s, int64_t closed, size_t *count) {
    *count = copy_window(s, closed);
    size_t recents = *count, period = s->rhythm.period;
    if (!still_holds(s, period, &recents)) {
        recents = copy_window(s, closed);
        const rhythm_found found = find_rhythm(s, &recents);
        period = found.period > 0 ? found.period : period;
    }
    rhythm_call *recent = malloc((period + 1) * sizeof *recent);
    const size_t last = period < recents ? period : recents;
    if (recent != NULL)
        memcpy(recent, s->calls + recents - last, last * sizeof *recent);
    *count = copy_window(s, closed);
    if (s->by_kind)
        rhythm_forget_bytes(s->calls, *count);
    if (recent != NULL)
        *count = rhythm_only(s->calls, *count, recent, last, last, s->words);
    free(recent);
    return period;
}

static void settle_step(session *s, int64_t closed) {
    size_t count, steps = 0, period = s->given;
    if (period > 0)
        count = copy_window(s, closed);
    else
        period = settle_period(s, closed, &count);
    report *r = &s->report;
    r->step = rhythm_step(s->calls, count, period, s->opened, closed, &steps);
    r->calls = steps > 0 ? period : 0;
    r->most = s->window.seconds ? 0 : s->window.to - s->window.from + 1;
    if (r->most == 0 || steps <= r->most)
        return;
    /* The mean of the steps that are measured: a slow one before them is none of theirs. */
    const int64_t from = closed - (int64_t)(r->most + 1) * r->step;
    const int64_t step =
        rhythm_step(s->calls, count, period, from > s->opened ? from : s->opened, closed, &steps);
    r->step = steps > 0 ? step : r->step;
}

/* ---- the end of the process ---- */

/* Waits for the thread, END_SECONDS at most.  A second time there is nothing to wait for.  A
 * handler of a signal may have called exit() while its thread was in recorder_call(): the lock is
 * not had then.  Whether the thread has ended. */
static bool stop_and_wait(void) {
    struct timespec limit;
    if (context.pid != getpid() || context.gave_up)
        return false;
    clock_gettime(CLOCK_MONOTONIC, &limit);
    limit.tv_sec += END_SECONDS;
    context.gave_up = !lock_within(&context.lock, END_SECONDS);
    if (context.gave_up)
        return false;
    const bool first = !context.stop;
    context.stop = true;
    pthread_cond_broadcast(&context.changed);
    while (first && !context.finished && atomic_load(&context.stage) != STAGE_OFF &&
           pthread_cond_timedwait(&context.changed, &context.lock, &limit) == 0)
        ;
    const bool ended = context.finished || atomic_load(&context.stage) == STAGE_OFF;
    pthread_mutex_unlock(&context.lock);
    return ended;
}

static void stop_at_exit(void) { (void)stop_and_wait(); }

/* Handlers run last one first: a libcupti that was opened just now registered its own, and ours
 * has to run while it is whole. */
static void stop_before_cupti(session *s) {
    if (!s->ordered)
        (void)atexit(stop_at_exit);
    s->ordered = true;
}

/* ---- the window ---- */

static bool is_due(const session *s) {
    const int64_t age = now_ns() - context.born;
    if (s->window.seconds)
        return age >= (int64_t)s->window.from * (SECOND / 1000);
    return steps_now(s) + 1 >= s->window.from && steps_now(s) > 0;
}

/* Nothing repeats: some seconds, whatever they hold. */
static void listened_long_enough(session *s) {
    if (s->window.seconds || steps_now(s) > 0 || now_ns() - context.born < LISTEN_SECONDS * SECOND)
        return;
    s->window =
        (record_window){true, 1000 * LISTEN_SECONDS, 1000 * (LISTEN_SECONDS + SPARE_SECONDS)};
}

static bool is_over(const session *s) {
    const int64_t age = now_ns() - s->opened;
    if (events_full(s->seen) || age >= RECORD_SECONDS_MAX * SECOND)
        return true;
    if (s->window.seconds)
        return age >= (int64_t)(s->window.to - s->window.from) * (SECOND / 1000);
    /* neither the first is measured nor the piece that is not over at the end */
    const uint64_t wanted = s->window.to - s->window.from + 3;
    return s->rhythm.period > 0 && (calls_made() - s->calls_opened) / s->rhythm.period >= wanted;
}

static void drain(session *s) {
    uint8_t *buffer;
    size_t valid;
    const cupti *c = hold_tell().cupti;
    while (c != NULL && (buffer = hold_next(&valid)) != NULL) {
        (void)events_take(s->seen, c->next, buffer, valid);
        hold_reuse(buffer);
    }
}

static void fill_report(session *s) {
    const hold_facts facts = hold_tell();
    report *r = &s->report;
    if (facts.cupti != NULL) {
        snprintf(r->cupti, sizeof r->cupti, "%s", facts.cupti->path);
        r->cupti_version = facts.cupti->number;
    }
    r->dropped = facts.dropped;
    r->refused = facts.refused;
    r->lost = events_lost_of(s->seen);
    r->full = events_full(s->seen);
    if (facts.skewed)
        snprintf(r->why, sizeof r->why, "CUPTI's clock does not count nanoseconds");
    else if (events_pair_marks(s->seen) != EPO_OK ||
             report_measure(r, s->seen, facts.opened, facts.closed) != EPO_OK)
        snprintf(r->why, sizeof r->why, "%.500s", epo_fail_text());
}

static void write_down(session *s) {
    char path[RECORD_PATH];
    const char *folder = mode_record();
    report_line(&s->report, context.line);
    if (folder == NULL || folder[0] == '\0')
        return;
    record_file_name(path, folder, "trace", s->report.rank);
    if (report_write(&s->report, s->seen, path) != EPO_OK)
        fprintf(stderr, "ep-overlap: %s; no trace written\n", epo_fail_text());
}

/* CUPTI leaves while we measure, but not before: buffers' records and names are its own. */
static stage finish(session *s, int64_t closed, bool leaves) {
    drain(s);
    hold_free();
    const bool left = leaves && hold_leave();
    settle_step(s, closed);
    fill_report(s);
    write_down(s);
    return left ? STAGE_LEAVING : STAGE_DONE;
}

static stage give_up(session *s, const char *why) {
    snprintf(s->report.why, sizeof s->report.why, "%s", why);
    write_down(s);
    return STAGE_DONE;
}

static stage wait_on(session *s, bool stop) {
    char why[CUPTI_TEXT] = "";
    if (stop)
        return give_up(s, s->report.interrupted > 0 ? "a profiler was at work each time"
                          : s->window.seconds
                              ? "the program ended before its window"
                              : "the program ended before its window, or no step was recognised");
    listen(s);
    listened_long_enough(s);
    if (!is_due(s))
        return STAGE_WAITING;
    switch (hold_open(why)) {
    case HOLD_LATER: return STAGE_WAITING;
    case HOLD_NEVER: return give_up(s, why);
    default: break;
    }
    stop_before_cupti(s);
    s->opened = now_ns();
    s->calls_opened = calls_made();
    return STAGE_OPEN;
}

/* A window that a profiler cut off counts if it holds two steps (or, by seconds, half), and
 * something ran in it.  It was over when the profiler came, not when that was seen here. */
static bool is_enough(session *s, int64_t closed) {
    const hold_facts facts = hold_tell();
    drain(s);
    if (events_count(s->seen) == 0)
        return false;
    const int64_t length = facts.closed - facts.opened;
    settle_step(s, closed);
    if (s->report.step > 0)
        return length / s->report.step >= 3;
    return s->window.seconds &&
           length >= (int64_t)(s->window.to - s->window.from) * (SECOND / 2000);
}

static stage record_on(session *s, bool stop) {
    drain(s);
    const bool taken = hold_taken(s->report.by);
    if (!taken && !stop && !is_over(s)) {
        listen(s);
        return STAGE_OPEN;
    }
    const int64_t closed = now_ns();
    hold_close();
    if (!taken || is_enough(s, closed))
        return finish(s, closed, !taken && !stop);
    events_clear(s->seen);
    s->report.by[0] = '\0';
    s->report.interrupted++;
    return STAGE_WAITING;
}

static stage leave_on(bool stop) {
    if (stop)
        hold_stay();
    return stop || hold_has_left() ? STAGE_DONE : STAGE_LEAVING;
}

/* ---- the thread ---- */

static bool wait_a_tick(void) {
    struct timespec limit;
    clock_gettime(CLOCK_MONOTONIC, &limit);
    limit.tv_nsec += TICK_MS * 1000000L;
    limit.tv_sec += limit.tv_nsec / SECOND;
    limit.tv_nsec %= SECOND;
    pthread_mutex_lock(&context.lock);
    if (!context.stop)
        (void)pthread_cond_timedwait(&context.changed, &context.lock, &limit);
    const bool stop = context.stop;
    pthread_mutex_unlock(&context.lock);
    return stop;
}

static void session_free(session *s) {
    if (s == NULL)
        return;
    events_destroy(s->seen);
    free(s->calls);
    free(s->room);
    free(s->words);
    free(s);
}

static session *session_create(int rank, int ranks) {
    session *s = calloc(1, sizeof *s);
    const char *window = getenv(EPO_ENV_RECORD_WINDOW), *calls = getenv(EPO_ENV_RECORD_CALLS);
    int given = 0;
    if (s == NULL)
        return NULL;
    s->calls = malloc(CALLS_MAX * sizeof *s->calls);
    s->room = malloc(CALLS_MAX * sizeof *s->room);
    s->words = malloc(CALLS_MAX * sizeof *s->words);
    if (s->calls == NULL || s->room == NULL || s->words == NULL ||
        events_create(0, &s->seen) != EPO_OK) {
        session_free(s);
        return NULL;
    }
    s->window = (record_window){false, WINDOW_STEPS_FROM, WINDOW_STEPS_TO};
    (void)record_window_parse(getenv(EPO_OUT_RECORD), &s->window);
    if (window != NULL && *window != '\0' && !record_window_parse(window, &s->window))
        fprintf(stderr,
                "ep-overlap: warning: " EPO_ENV_RECORD_WINDOW
                "=%.100s is no window; steps as in 10-14, seconds as in 60s-70s (at most %d s); "
                "%d-%d is taken\n",
                window, RECORD_SECONDS_MAX, WINDOW_STEPS_FROM, WINDOW_STEPS_TO);
    if (calls != NULL && *calls != '\0' && (!epo_text_int(calls, &given) || given == 0))
        fprintf(stderr,
                "ep-overlap: warning: " EPO_ENV_RECORD_CALLS
                "=%.100s is no number of calls; they are found by what repeats\n",
                calls);
    s->given = given > 0 ? (size_t)given : 0;
    s->report.rank = rank;
    s->report.ranks = ranks;
    return s;
}

static void *run(void *argument) {
    session *s = argument;
    stage at = STAGE_WAITING;
    (void)pthread_setname_np(pthread_self(), "ep-overlap");
    while (at != STAGE_DONE) {
        const bool stop = wait_a_tick();
        at = at == STAGE_WAITING ? wait_on(s, stop)
             : at == STAGE_OPEN  ? record_on(s, stop)
                                 : leave_on(stop);
        atomic_store(&context.stage, at);
    }
    pthread_mutex_lock(&context.lock);
    atomic_store(&context.stage, STAGE_OFF); /* no notes any more */
    free(context.calls);
    context.calls = NULL;
    context.finished = true;
    pthread_cond_broadcast(&context.changed);
    pthread_mutex_unlock(&context.lock);
    session_free(s);
    return NULL;
}

/* Another thread may have held the lock, which the child does not have. */
static void after_fork(void) {
    const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&context.lock, &fresh, sizeof fresh);
    hold_forget();
    atomic_store(&context.stage, STAGE_OFF);
}

static bool start(session *s) {
    pthread_condattr_t clock;
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&context.changed, &clock);
    pthread_condattr_destroy(&clock);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the program's */
    const bool started = pthread_create(&thread, &attributes, run, s) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return started;
}

static bool is_one(const char *variable) {
    const char *word = getenv(variable);
    return word != NULL && strcmp(word, "1") == 0;
}

/* All of the environment is read here: later the program may be changing it. */
void recorder_begin(int rank, int ranks) {
    pthread_mutex_lock(&context.lock);
    const bool first = context.pid == 0 && recorder_wanted();
    if (first)
        context.pid = getpid();
    pthread_mutex_unlock(&context.lock);
    if (!first)
        return;
    context.rank = rank;
    snprintf(context.line, sizeof context.line,
             "communication was not recorded: neither memory nor a thread for the recorder");
    session *s = session_create(rank, ranks);
    context.calls = s != NULL ? malloc(CALLS_MAX * sizeof *context.calls) : NULL;
    if (context.calls == NULL) {
        session_free(s);
        return;
    }
    context.marks = is_one(EPO_ENV_RECORD_MARK);
    hold_prepare(is_one(EPO_ENV_RECORD_LEAVE));
    context.born = now_ns();
    (void)pthread_atfork(NULL, NULL, after_fork);
    atomic_store(&context.stage, STAGE_WAITING);
    if (!start(s)) {
        atomic_store(&context.stage, STAGE_OFF);
        session_free(s);
    }
}

void recorder_end(void) {
    if (context.pid == 0 || context.pid != getpid())
        return;
    const bool ended = stop_and_wait();
    if (context.rank == 0)
        fprintf(stderr, "ep-overlap: %s\n",
                ended ? context.line : "the recorder did not end in time; nothing is told");
}
