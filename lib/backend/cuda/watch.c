/* SPDX-License-Identifier: Apache-2.0
 *
 * watch.c - every wait has a limit.  Pending waits are listed here; a thread looks
 * at their flags, warns once, and on expiry, or when a rank that is waited for has ended,
 * names the missing ranks, breaks the backend and releases all waits by a poison epoch.
 */
#include "backend/cuda/gpu.h"
#include "backend/limited.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define WATCH_TICK_NS 5000000
#define WATCH_RANKS 256
#define WATCH_EVENTS 64    /* kept for the next */
#define WATCH_SILENT_S 1.0 /* a machine with little time for its processes is no silence */

typedef struct watch_entry {
    volatile uint64_t *words; /* NULL: an event */
    epo_ready ready;          /* what is waited for; its epoch and count */
    cudaEvent_t event;
    bool over; /* the event */
    double since;
    bool warned;
} watch_entry;

struct gpu_watch {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool stop, poisoned;
    _Atomic int polled;                    /* the rank that the calling thread waits for, plus 1 */
    bool stuck;                            /* a wait is old, and this was the time to look why */
    double looked;                         /* at the peers' lives */
    uint64_t sign[WATCH_RANKS];            /* of the ranks' lives, as seen last, */
    _Atomic int64_t heard_ms[WATCH_RANKS]; /* and since when */
    watch_entry *entry;
    size_t count, capacity;
    cudaEvent_t spare[WATCH_EVENTS]; /* of entries that are gone */
    int nspare;
};

double gpu_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t word_load(volatile uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static bool entry_done(const watch_entry *e) {
    if (e->words == NULL)
        return e->over;
    for (int i = 0; i < e->ready.count; i++)
        if (word_load(e->words + i) < e->ready.epoch)
            return false;
    return true;
}

/* By this process's clock alone: others' may be hours ahead. */
static void watch_listen(epo_backend *be) {
    gpu_watch *w = be->watch;
    const int64_t now = (int64_t)(gpu_now() * 1e3);
    for (int r = 0; r < be->ranks && r < WATCH_RANKS; r++) {
        const uint64_t sign = gpu_meet_sign(be->meet, r);
        if (sign == w->sign[r])
            continue;
        w->sign[r] = sign;
        atomic_store(&w->heard_ms[r], now);
    }
}

double gpu_watch_silence(const epo_backend *be, int rank) {
    const int64_t heard = rank < WATCH_RANKS ? atomic_load(&be->watch->heard_ms[rank]) : 0;
    const double silence = gpu_now() - 1e-3 * (double)heard;
    return heard != 0 && silence > WATCH_SILENT_S ? silence : 0;
}

/* "dispatch chunk 1" */
static void entry_what(const watch_entry *e, char *text, size_t size) {
    if (e->ready.chunk < 0)
        snprintf(text, size, "%s", e->ready.what);
    else
        snprintf(text, size, "%s%s %d", e->ready.what,
                 strstr(e->ready.what, "chunk") == NULL ? " chunk" : "", e->ready.chunk);
}

/* "rank 2: dispatch chunk 1: nothing from rank 0, 3 (2 of 4 missing) after 5 s" */
static void entry_describe(const epo_backend *be, const watch_entry *e, double age, char *text,
                           size_t size) {
    char what[64], who[256] = "";
    size_t used = 0;
    int missing = 0, late = -1;
    entry_what(e, what, sizeof what);
    for (int i = 0; i < e->ready.count; i++) {
        const int rank = epo_ready_writer(&e->ready, i);
        if (e->words != NULL ? word_load(e->words + i) >= e->ready.epoch : rank == be->rank)
            continue;
        if (used + 16 < sizeof who)
            used +=
                (size_t)snprintf(who + used, sizeof who - used, "%s%d", missing ? ", " : "", rank);
        late = late < 0 ? rank : late;
        missing++;
    }
    const int end = late >= 0 ? gpu_meet_waits_end(be->meet, late) : -1;
    char behind[112] = "";
    const double silence = end >= 0 && end != be->rank ? gpu_watch_silence(be, end) : 0;
    if (end != late)
        snprintf(behind, sizeof behind, ", behind whom all wait for rank %d", end);
    if (silence > 0)
        snprintf(behind + strlen(behind), sizeof behind - strlen(behind),
                 "; no sign of life from rank %d for %.0f s", end, silence);
    if (e->words == NULL)
        snprintf(text, size, "rank %d: %s: not complete after %.0f s; its %s rank %s%s", be->rank,
                 what, age, missing > 1 ? "peers are" : "peer is", who, behind);
    else
        snprintf(text, size, "rank %d: %s: nothing from rank %s (%d of %d missing) after %.0f s%s",
                 be->rank, what, who, missing, e->ready.count, age, behind);
}

/* Is a rank gone that is waited for? */
static bool entry_lost(const epo_backend *be, const watch_entry *e, char *text, size_t size) {
    char who[200], what[64];
    for (int i = 0; i < e->ready.count; i++) {
        if (e->words != NULL && word_load(e->words + i) >= e->ready.epoch)
            continue;
        if (!gpu_meet_lost(be->meet, epo_ready_writer(&e->ready, i), who, sizeof who) ||
            entry_done(e) || (e->words != NULL && word_load(e->words + i) >= e->ready.epoch))
            continue;
        entry_what(e, what, sizeof what);
        snprintf(text, size, "%s; rank %d waited for it in %s", who, be->rank, what);
        return true;
    }
    return false;
}

static void watch_poison(epo_backend *be) {
    gpu_watch *w = be->watch;
    gpu_late_mark(be);
    w->poisoned = true;
    for (size_t i = 0; i < w->count; i++)
        for (int k = 0; w->entry[i].words != NULL && k < w->entry[i].ready.count; k++)
            if (word_load(w->entry[i].words + k) < w->entry[i].ready.epoch)
                __atomic_store_n(w->entry[i].words + k, GPU_POISON, __ATOMIC_RELEASE);
}

static void entry_drop(gpu_watch *w, size_t i) {
    if (w->entry[i].event != NULL && w->nspare < WATCH_EVENTS)
        w->spare[w->nspare++] = w->entry[i].event;
    else if (w->entry[i].event != NULL)
        (void)cudaEventDestroy(w->entry[i].event);
    w->entry[i] = w->entry[--w->count];
}

/* The first rank that has not written; -1: all have, or it is this one. */
static int entry_whom(const epo_backend *be, const watch_entry *e) {
    for (int i = 0; e->words != NULL && i < e->ready.count; i++)
        if (word_load(e->words + i) < e->ready.epoch) {
            const int whom = epo_ready_writer(&e->ready, i);
            return whom == be->rank ? -1 : whom;
        }
    return -1;
}

/* Tells the others whom the oldest wait is for, or else the calling thread's; if for this rank,
 * another wait's turn comes. */
static void watch_tell(epo_backend *be, const watch_entry *oldest) {
    const int whom = oldest != NULL ? entry_whom(be, oldest) : -1;
    gpu_meet_waits(be->meet, whom >= 0 ? whom : atomic_load(&be->watch->polled) - 1);
}

static void entry_warn(const epo_backend *be, watch_entry *e, double age) {
    char text[512];
    if (e->warned || age <= be->warn_s)
        return;
    e->warned = true;
    entry_describe(be, e, age, text, sizeof text);
    fprintf(stderr, "ep-overlap: %s, still waiting\n", text);
}

/* Not under the lock, which whoever issues work wants: the question may have to wait for a
 * caller's call that waits for the device.  Meanwhile entries move. */
static void events_ask(gpu_watch *w) {
    for (size_t i = 0; i < w->count; i++) {
        if (w->entry[i].words != NULL || w->entry[i].over)
            continue;
        const cudaEvent_t event = w->entry[i].event; /* this thread alone ends it */
        pthread_mutex_unlock(&w->lock);
        const bool over = cudaEventQuery(event) != cudaErrorNotReady;
        pthread_mutex_lock(&w->lock);
        for (size_t k = 0; k < w->count && over; k++)
            if (w->entry[k].words == NULL && w->entry[k].event == event)
                w->entry[k].over = true;
    }
}

/* Removes what is done; an error if a wait has expired, is for a rank that is gone, or a
 * peer is in another call; its line in `text`. */
static epo_status watch_scan(epo_backend *be, char *text, size_t size) {
    gpu_watch *w = be->watch;
    const double now = gpu_now();
    const bool look = !w->poisoned && now - w->looked > GPU_LOOK_S;
    const watch_entry *oldest = NULL; /* of those that expired: the others wait because of it */
    const watch_entry *first = NULL;  /* of all */
    const watch_entry *lost = NULL;
    bool waits = false;
    if (look)
        w->looked = now;
    for (size_t i = 0; i < w->count;) {
        watch_entry *e = &w->entry[i];
        if (entry_done(e)) {
            entry_drop(w, i);
            continue;
        }
        const double age = now - e->since;
        if (first == NULL || e->since < first->since)
            first = e;
        if (look && age > GPU_LOOK_S && (lost == NULL || e->since < lost->since) &&
            entry_lost(be, e, text, size))
            lost = e; /* the earliest wait tells the phase */
        waits = waits || age > GPU_LOOK_S;
        if (!w->poisoned && age > be->timeout_s && (oldest == NULL || e->since < oldest->since))
            oldest = e;
        entry_warn(be, e, age);
        i++;
    }
    watch_tell(be, first);
    watch_listen(be);
    w->stuck = look && waits;
    if (lost != NULL || (look && waits && gpu_meet_differs(be->meet, text, size)))
        return EPO_E_PEER;
    if (oldest != NULL)
        entry_describe(be, oldest, now - oldest->since, text, size);
    return oldest != NULL ? EPO_E_TIMEOUT : EPO_OK;
}

static void watch_break(epo_backend *be, epo_status status, const char *text) {
    gpu_watch *w = be->watch;
    pthread_mutex_unlock(&w->lock);
    gpu_break(be, status, text);
    pthread_mutex_lock(&w->lock);
}

/* What NCCL knows of its own communicator on this rank the others wait for, too.  Not under the
 * lock, as events. */
static epo_status watch_pairs(epo_backend *be, char *text, size_t size) {
    gpu_watch *w = be->watch;
    if (!w->stuck)
        return EPO_OK;
    pthread_mutex_unlock(&w->lock);
    const bool failed = gpu_pairs_failed(be, text, size);
    pthread_mutex_lock(&w->lock);
    return failed ? EPO_E_SYSTEM : EPO_OK;
}

static void *watch_main(void *ctx) {
    epo_backend *be = ctx;
    gpu_watch *w = be->watch;
    char text[512];
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaSetDevice(be->device);
    (void)cudaThreadExchangeStreamCaptureMode(&mode); /* the program may be capturing */
    gpu_meet_watch(be->meet, true);
    pthread_mutex_lock(&w->lock);
    while (!w->stop) {
        epo_limited_nap(&w->wake, &w->lock, WATCH_TICK_NS);
        events_ask(w);
        epo_status status = watch_scan(be, text, sizeof text);
        if (status == EPO_OK && !w->poisoned)
            status = gpu_replay_scan(be, text, sizeof text);
        if (status == EPO_OK && !w->poisoned)
            status = gpu_meet_failed(be->meet, text, sizeof text);
        if (status == EPO_OK && !w->poisoned)
            status = watch_pairs(be, text, sizeof text);
        if (status != EPO_OK && !w->poisoned)
            watch_break(be, status, text);
    }
    pthread_mutex_unlock(&w->lock);
    gpu_meet_watch(be->meet, false);
    return NULL;
}

/* Waits by CLOCK_MONOTONIC: a clock that is set back must not stop the watchdog. */
static void wake_open(gpu_watch *w) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&w->wake, &attr);
    pthread_condattr_destroy(&attr);
}

epo_status gpu_watch_start(epo_backend *be) {
    gpu_watch *w = calloc(1, sizeof *w);
    if (w == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for the watchdog", be->rank);
    pthread_mutex_init(&w->lock, NULL);
    wake_open(w);
    be->watch = w;
    int e = pthread_create(&w->thread, NULL, watch_main, be);
    if (e != 0) {
        be->watch = NULL;
        free(w);
        return epo_fail(EPO_E_SYSTEM, "rank %d: pthread_create (watchdog): %s", be->rank,
                        strerror(e));
    }
    return EPO_OK;
}

void gpu_watch_stop(epo_backend *be) {
    gpu_watch *w = be->watch;
    if (w == NULL)
        return;
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    while (w->count > 0)
        entry_drop(w, 0);
    while (w->nspare > 0)
        (void)cudaEventDestroy(w->spare[--w->nspare]);
    free(w->entry);
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->lock);
    free(w);
    be->watch = NULL;
}

static epo_status watch_push(epo_backend *be, watch_entry entry) {
    gpu_watch *w = be->watch;
    epo_status status = EPO_OK;
    entry.since = gpu_now();
    pthread_mutex_lock(&w->lock);
    if (w->count == w->capacity) {
        size_t more = w->capacity ? 2 * w->capacity : 256;
        watch_entry *grown = realloc(w->entry, more * sizeof *grown);
        if (grown != NULL) {
            w->entry = grown;
            w->capacity = more;
        } else {
            status = epo_fail(EPO_E_NOMEM, "rank %d: no memory to watch %zu waits", be->rank, more);
        }
    }
    if (status == EPO_OK) {
        w->entry[w->count++] = entry;
        if (w->poisoned) /* broken meanwhile: this wait must not hold either */
            watch_poison(be);
    }
    pthread_mutex_unlock(&w->lock);
    return status;
}

epo_status gpu_watch_add(epo_backend *be, volatile uint64_t *words, const epo_ready *r) {
    return watch_push(be, (watch_entry){.words = words, .ready = *r});
}

cudaError_t gpu_watch_take(epo_backend *be, cudaEvent_t *out) {
    gpu_watch *w = be->watch;
    bool kept = false;
    pthread_mutex_lock(&w->lock);
    if (w->nspare > 0) {
        *out = w->spare[--w->nspare];
        kept = true;
    }
    pthread_mutex_unlock(&w->lock);
    return kept ? cudaSuccess : cudaEventCreateWithFlags(out, cudaEventDisableTiming);
}

epo_status gpu_watch_event(epo_backend *be, cudaEvent_t event, const char *what, int chunk,
                           const epo_peers *peers) {
    const epo_ready ready = {.count = peers->count,
                             .peer = -1,
                             .what = what,
                             .chunk = chunk,
                             .first = peers->first,
                             .step = peers->step};
    return watch_push(be, (watch_entry){.ready = ready, .event = event});
}

void gpu_watch_forget(epo_backend *be, volatile uint64_t *words, uint64_t bytes) {
    gpu_watch *w = be->watch;
    if (w == NULL || words == NULL)
        return;
    pthread_mutex_lock(&w->lock);
    for (size_t i = 0; i < w->count;) {
        volatile uint64_t *at = w->entry[i].words;
        if (at >= words && at < words + bytes / sizeof *words)
            entry_drop(w, i);
        else
            i++;
    }
    pthread_mutex_unlock(&w->lock);
}

void gpu_watch_release(epo_backend *be) {
    gpu_watch *w = be->watch;
    if (w == NULL)
        return;
    pthread_mutex_lock(&w->lock);
    watch_poison(be);
    pthread_mutex_unlock(&w->lock);
}

/* On expiry, or when a rank that is waited for is gone or in another call, the backend breaks. */
static void poll_look(epo_backend *be, watch_entry *e, double age, double *looked) {
    epo_status status = EPO_OK;
    char text[512];
    if (age > be->timeout_s) {
        status = EPO_E_TIMEOUT;
        entry_describe(be, e, age, text, sizeof text);
    } else if (e->since + age - *looked > GPU_LOOK_S) {
        *looked = e->since + age;
        if (entry_lost(be, e, text, sizeof text) || gpu_meet_differs(be->meet, text, sizeof text))
            status = EPO_E_PEER;
    }
    if (status != EPO_OK)
        gpu_break(be, status, text);
    else
        entry_warn(be, e, age);
}

epo_status gpu_watch_poll(epo_backend *be, volatile uint64_t *words, const epo_ready *r) {
    watch_entry e = {.words = words, .ready = *r, .since = gpu_now()};
    double looked = e.since;
    for (unsigned spins = 0; !entry_done(&e); spins++) {
        if (atomic_load(&be->late) != EPO_OK)
            break; /* the operation will be passed over */
        if (spins <= 1000)
            continue;
        const struct timespec nap = {0, 10000};
        atomic_store(&be->watch->polled, entry_whom(be, &e) + 1);
        nanosleep(&nap, NULL);
        poll_look(be, &e, gpu_now() - e.since, &looked);
    }
    atomic_store(&be->watch->polled, 0);
    return EPO_OK;
}
