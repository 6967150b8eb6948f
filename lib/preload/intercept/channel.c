/* SPDX-License-Identifier: Apache-2.0
 *
 * channel.c - making and releasing what carries a communicator's messages.
 */
#include "config.h"

#include "preload/intercept/channel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/names.h"

#define STAGING_MOST (UINT64_C(256) << 20) /* of this process */
#define STAGING_EACH (UINT64_C(64) << 20)  /* of one communicator, unless told otherwise */
#define LEAST_DEFAULT (UINT64_C(2) << 20)  /* below, NCCL's kernel is there first */
#define AGREE_LIMIT_S 10.0
#define DRAIN_LIMIT_S 600.0
#define ABORT_LIMIT_S 20.0

static struct {
    pthread_mutex_t lock;
    uint64_t staging;
    channel *closing; /* their peers have not all let go of our window */
} context = {PTHREAD_MUTEX_INITIALIZER, 0, NULL};

ncclResult_t channel_fail(const channel *ch, const char *call, cu_result r) {
    fprintf(stderr, "ep-overlap: rank %d of %d: %s: %s\n", ch->owner->rank, ch->owner->ranks, call,
            driver_error(ch->cu, r));
    return ncclUnhandledCudaError;
}

uint64_t channel_staging(void) {
    pthread_mutex_lock(&context.lock);
    const uint64_t bytes = context.staging;
    pthread_mutex_unlock(&context.lock);
    return bytes;
}

/* ---- lanes ---- */

bool channel_lanes(channel *ch, lanes *l) {
    const cuda_driver *cu = ch->cu;
    int least = 0, most = 0;
    (void)cu->priorities(&least, &most);
    bool ok = cu->stream_create(&l->self, CU_STREAM_NON_BLOCKING_, most) == 0;
    for (int i = 0; i < ch->count && ok; i++)
        if (channel_has(ch, i))
            for (int w = 0; w < CHANNEL_WIDTH && ok; w++)
                ok = cu->stream_create(&l->send[i][w], CU_STREAM_NON_BLOCKING_, most) == 0 &&
                     cu->stream_create(&l->recv[i][w], CU_STREAM_NON_BLOCKING_, most) == 0;
    if (!ok)
        channel_lanes_free(ch, l);
    return ok;
}

void channel_lanes_free(channel *ch, lanes *l) {
    if (l->self != NULL)
        (void)ch->cu->stream_destroy(l->self);
    for (int i = 0; i < AGREE_RANKS; i++)
        for (int w = 0; w < CHANNEL_WIDTH; w++) {
            if (l->send[i][w] != NULL)
                (void)ch->cu->stream_destroy(l->send[i][w]);
            if (l->recv[i][w] != NULL)
                (void)ch->cu->stream_destroy(l->recv[i][w]);
        }
    struct lanes *next = l->next;
    memset(l, 0, sizeof *l);
    l->next = next;
}

static bool events_make(channel *ch) {
    const cuda_driver *cu = ch->cu;
    bool ok = cu->event_create(&ch->reached, CU_EVENT_NO_TIMING) == 0 &&
              cu->event_create(&ch->join, CU_EVENT_NO_TIMING) == 0 &&
              cu->event_create(&ch->copied, CU_EVENT_NO_TIMING) == 0;
    for (int i = 0; i < ch->count && ok; i++)
        if (channel_has(ch, i))
            for (int w = 0; w < CHANNEL_WIDTH && ok; w++)
                ok = cu->event_create(&ch->sent[i][w], CU_EVENT_NO_TIMING) == 0 &&
                     cu->event_create(&ch->received[i][w], CU_EVENT_NO_TIMING) == 0;
    return ok;
}

static void events_free(channel *ch) {
    cu_event *const single[] = {&ch->reached, &ch->join, &ch->copied};
    for (int i = 0; i < 3; i++)
        if (*single[i] != NULL)
            (void)ch->cu->event_destroy(*single[i]);
    for (int i = 0; i < AGREE_RANKS; i++)
        for (int w = 0; w < CHANNEL_WIDTH; w++) {
            if (ch->sent[i][w] != NULL)
                (void)ch->cu->event_destroy(ch->sent[i][w]);
            if (ch->received[i][w] != NULL)
                (void)ch->cu->event_destroy(ch->received[i][w]);
        }
}

/* ---- release ---- */

/* What can go at once.  The window can not, while a peer has it open. */
static void release_own(channel *ch) {
    for (int i = 0; i < ch->count; i++)
        if (ch->peer[i].window != 0) {
            (void)ch->cu->ipc_close(ch->peer[i].window);
            ch->peer[i].window = 0;
        }
    channel_lanes_free(ch, &ch->eager);
    while (ch->capturing != NULL) {
        lanes *l = ch->capturing;
        ch->capturing = l->next;
        channel_lanes_free(ch, l);
        free(l);
    }
    events_free(ch);
    if (ch->registered)
        (void)ch->cu->host_unregister(ch->agree.room);
    ch->registered = false;
}

static void release_window(channel *ch) {
    if (ch->window != 0 && ch->cu->context_push(ch->context) == 0) {
        cu_context popped;
        (void)ch->cu->release(ch->window);
        (void)ch->cu->context_pop(&popped);
    }
    context.staging -= ch->bytes;
    agree_leave(&ch->agree);
    pthread_mutex_destroy(&ch->lock);
    free(ch);
}

/* Memory whose peers have let go of it meanwhile.  Lock held. */
static void sweep(void) {
    for (channel **at = &context.closing; *at != NULL;) {
        channel *ch = *at;
        if (!agree_closed(&ch->agree)) {
            at = &ch->next;
            continue;
        }
        *at = ch->next;
        release_window(ch);
    }
}

static void release(channel *ch) {
    cu_context popped;
    agree_unlink(&ch->agree);
    if (ch->cu != NULL && ch->context != NULL && ch->cu->context_push(ch->context) == 0) {
        release_own(ch);
        (void)ch->cu->context_pop(&popped);
    }
    pthread_mutex_lock(&context.lock);
    if (ch->agree.room != NULL && ch->window != 0 && !agree_closed(&ch->agree)) {
        ch->next = context.closing;
        context.closing = ch;
    } else {
        release_window(ch);
    }
    pthread_mutex_unlock(&context.lock);
}

/* ---- making ---- */

static uint64_t window_bytes(channel *ch) {
    const uint64_t each = mode_bytes(EPO_ENV_INTERPOSE_STAGING, STAGING_EACH);
    epo_terms_slots((unsigned)(ch->count - 1), each < STAGING_MOST ? each : STAGING_MOST,
                    &ch->slots, &ch->slot_bytes);
    ch->slot_bytes = mode_bytes(EPO_ENV_INTERPOSE_SLOT, ch->slot_bytes);
    return (uint64_t)(ch->count - 1) * ch->slots * ch->slot_bytes;
}

static fallback window_make(channel *ch, cu_ipc_handle *handle) {
    const uint64_t bytes = window_bytes(ch);
    pthread_mutex_lock(&context.lock);
    sweep();
    const bool room = bytes > 0 && bytes <= STAGING_MOST - context.staging;
    if (room) {
        context.staging += bytes;
        ch->bytes = bytes;
    }
    pthread_mutex_unlock(&context.lock);
    if (!room || ch->cu->alloc(&ch->window, bytes) != 0)
        return FALLBACK_STAGING;
    return ch->cu->ipc_get(handle, ch->window) == 0 ? FALLBACK_NONE : FALLBACK_DRIVER;
}

/* Whether this driver captures the operations that we put on streams: whether a rank
 * will ever capture is known to nobody else, so it must not matter. */
static bool waits_work(channel *ch) {
    const cuda_driver *cu = ch->cu;
    cu_stream s = NULL;
    cu_graph graph = NULL;
    /* a word that nobody else uses: from this rank to itself */
    const cu_pointer word = ch->words + (cu_pointer)((ch->agree.me * AGREE_RANKS + ch->agree.me) *
                                                     AGREE_SLOTS * (int)sizeof(agree_word));
    if (cu->stream_create(&s, CU_STREAM_NON_BLOCKING_, 0) != 0)
        return false;
    bool ok = cu->write_value(s, word, 1, 0) == 0 &&
              cu->wait_value(s, word, 1, CU_WAIT_EQUAL) == 0 &&
              cu->capture_begin(s, CU_CAPTURE_RELAXED) == 0;
    if (ok) {
        ok = cu->wait_value(s, word, 1, CU_WAIT_EQUAL) == 0 && cu->write_value(s, word, 1, 0) == 0;
        ok = cu->capture_end(s, &graph) == 0 && ok;
    }
    if (graph != NULL)
        (void)cu->graph_destroy(graph);
    (void)cu->stream_destroy(s);
    return ok;
}

static fallback words_make(channel *ch) {
    agree_room *room = ch->agree.room;
    cu_pointer base = 0;
    if (ch->cu->host_register(room, sizeof *room, CU_REGISTER_PORTABLE_MAPPED) != 0)
        return FALLBACK_SYSTEM;
    ch->registered = true;
    if (ch->cu->host_pointer(&base, room, 0) != 0)
        return FALLBACK_DRIVER;
    ch->words = base + offsetof(agree_room, word);
    return waits_work(ch) ? FALLBACK_NONE : FALLBACK_DRIVER;
}

/* This rank's own part: everything that can fail here, before it says "usable". */
static fallback prepare(channel *ch, epo_terms_card *card, cu_ipc_handle *window) {
    ch->cu = driver_find(NULL);
    if (ch->cu == NULL || ch->cu->context_get(&ch->context) != 0 || ch->context == NULL)
        return FALLBACK_DRIVER;
    fallback why = words_make(ch);
    if (why == FALLBACK_NONE)
        why = window_make(ch, window);
    card->slots = ch->slots;
    card->slot_bytes = ch->slot_bytes;
    return why;
}

static void meet_peer(channel *ch, int i, const epo_terms_card *mine) {
    channel_peer *p = &ch->peer[i];
    const agree_card *theirs = &ch->agree.room->card[i];
    if (!agree_wait_card(&ch->agree, i, AGREE_LIMIT_S) || !mine->usable)
        return;
    p->rank = theirs->terms.rank;
    p->terms = epo_terms_of(mine, &theirs->terms);
    if (p->terms.usable)
        p->terms.usable = ch->cu->ipc_open(&p->window, theirs->window, CU_IPC_LAZY_PEER) == 0;
    ch->wants_whole = ch->wants_whole && theirs->terms.whole;
    if (theirs->terms.least > ch->most_least)
        ch->most_least = theirs->terms.least;
}

/* All peers' cards and windows, then all pairs' words.  How many agreed. */
static int meet_all(channel *ch, const epo_terms_card *mine) {
    const int me = ch->agree.me;
    int usable = 0;
    for (int i = 0; i < ch->count; i++)
        if (i != me)
            meet_peer(ch, i, mine);
    const bool able = mine->usable && channel_lanes(ch, &ch->eager) && events_make(ch);
    for (int i = 0; i < ch->count; i++)
        if (i != me)
            agree_vote(&ch->agree, i, able && ch->peer[i].terms.usable);
    for (int i = 0; i < ch->count; i++)
        if (i != me)
            usable += ch->peer[i].terms.usable = agree_verdict(&ch->agree, i, AGREE_LIMIT_S);
    ch->whole = agree_whole(&ch->agree, ch->owner->ranks, AGREE_LIMIT_S);
    return usable;
}

static fallback settle(channel *ch) {
    epo_terms_card card = {.abi = EPO_TERMS_ABI,
                           .rank = ch->owner->rank,
                           .ranks = ch->owner->ranks,
                           .pid = (int32_t)getpid()};
    cu_ipc_handle window;
    memset(&window, 0, sizeof window);
    ch->count = agree_count(&ch->agree);
    agree_unlink(&ch->agree); /* everybody who comes has come */
    ch->least = ch->most_least = card.least = mode_bytes(EPO_ENV_INTERPOSE_LEAST, LEAST_DEFAULT);
    card.whole = mode_bytes(EPO_ENV_INTERPOSE_ALLTOALL, 0) != 0;
    ch->wants_whole = card.whole;
    fallback why = ch->count < 2 ? FALLBACK_NO_PEER : prepare(ch, &card, &window);
    card.usable = why == FALLBACK_NONE;
    agree_show(&ch->agree, &card, &window);
    if (ch->count < 2)
        return why;
    const int usable = meet_all(ch, &card);
    if (why != FALLBACK_NONE)
        return why;
    return usable > 0 ? FALLBACK_NONE : FALLBACK_PEER;
}

void channel_announce(comm *c, channel **pending) {
    const char *connections = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    *pending = NULL;
    if (connections != NULL && strcmp(connections, "1") == 0) {
        c->why = FALLBACK_CONNECTIONS; /* a wait would hold up every other stream */
        return;
    }
    channel *ch = calloc(1, sizeof *ch);
    c->why = FALLBACK_SYSTEM;
    if (ch == NULL)
        return;
    pthread_mutex_init(&ch->lock, NULL);
    ch->owner = c;
    if (!agree_enter(&ch->agree, &c->key)) {
        pthread_mutex_destroy(&ch->lock);
        free(ch);
        return;
    }
    *pending = ch;
}

void channel_settle(comm *c, channel *ch, bool made) {
    if (ch == NULL)
        return;
    if (!made) {
        const epo_terms_card none = {.usable = 0};
        ch->count = agree_count(&ch->agree);
        agree_show(&ch->agree, &none, NULL);
        release(ch);
        return;
    }
    const cuda_driver *cu = driver_find(NULL);
    int mode = CU_CAPTURE_RELAXED; /* another thread may be capturing */
    const bool relaxed = cu != NULL && cu->capture_mode(&mode) == 0;
    c->why = settle(ch);
    if (c->why == FALLBACK_NONE)
        c->channel = ch;
    else
        release(ch);
    if (relaxed)
        (void)cu->capture_mode(&mode);
}

/* ---- closing ---- */

static bool stream_busy(const channel *ch, cu_stream s) {
    return s != NULL && ch->cu->stream_query(s) == CU_NOT_READY;
}

static bool lanes_busy(const channel *ch, const lanes *l) {
    bool busy = stream_busy(ch, l->self);
    for (int i = 0; i < ch->count; i++)
        for (int w = 0; w < CHANNEL_WIDTH && !busy; w++)
            busy = stream_busy(ch, l->send[i][w]) || stream_busy(ch, l->recv[i][w]);
    return busy;
}

static void nap(void) {
    const struct timespec t = {0, 500000};
    nanosleep(&t, NULL);
}

/* Every wait of this rank finds what it waits for; nobody else's does. */
static void open_gates(channel *ch) {
    const int me = ch->agree.me;
    for (int i = 0; i < ch->count; i++)
        for (unsigned s = 0; s < ch->slots && channel_has(ch, i); s++) {
            atomic_store(&ch->agree.room->word[me][i][s].value, 0);
            atomic_store(&ch->agree.room->word[i][me][s].value, 1);
        }
}

static void *release_waits(void *argument) {
    channel *ch = argument;
    while (!atomic_load(&ch->stop)) {
        open_gates(ch);
        nap();
    }
    return NULL;
}

void channel_abort(channel *ch) {
    if (atomic_exchange(&ch->aborted, true))
        return;
    ch->releasing = pthread_create(&ch->releaser, NULL, release_waits, ch) == 0;
    if (!ch->releasing)
        open_gates(ch);
}

/* As ncclCommDestroy, this waits for what the streams still hold. */
static bool drain(channel *ch, double limit_s) {
    const double until = agree_now() + limit_s;
    cu_context popped;
    bool busy;
    if (ch->cu->context_push(ch->context) != 0)
        return true; /* the context is gone, and its streams with it */
    while ((busy = lanes_busy(ch, &ch->eager)) && agree_now() < until)
        nap();
    (void)ch->cu->context_pop(&popped);
    return !busy;
}

/* What streams may still use when both limits are over stays where it is. */
void channel_close(channel *ch) {
    bool done = drain(ch, atomic_load(&ch->aborted) ? ABORT_LIMIT_S : DRAIN_LIMIT_S);
    if (!done) {
        fprintf(stderr,
                "ep-overlap: rank %d of %d: messages of a communicator that goes away are still "
                "under way; its waits are released\n",
                ch->owner->rank, ch->owner->ranks);
        channel_abort(ch);
        done = drain(ch, ABORT_LIMIT_S);
    }
    if (!done)
        return;
    pthread_mutex_lock(&ch->lock); /* a thread that was held up in here has left */
    pthread_mutex_unlock(&ch->lock);
    atomic_store(&ch->stop, true);
    if (ch->releasing)
        pthread_join(ch->releaser, NULL);
    release(ch);
}

/* ---- answers ---- */

static const channel_peer *peer_of(const channel *ch, int rank) {
    for (int i = 0; i < ch->count; i++)
        if (channel_has(ch, i) && ch->peer[i].rank == rank)
            return &ch->peer[i];
    return NULL;
}

bool channel_knows(const channel *ch, int peer) {
    return peer == ch->owner->rank || peer_of(ch, peer) != NULL;
}

bool channel_takes(const channel *ch, int peer, uint64_t bytes) {
    if (peer == ch->owner->rank)
        return bytes > 0 && bytes >= ch->least;
    const channel_peer *p = peer_of(ch, peer);
    return p != NULL && epo_terms_carry(&p->terms, bytes);
}

bool channel_takes_all(const channel *ch, uint64_t bytes) {
    return ch->whole && ch->wants_whole && bytes > 0 && bytes >= ch->most_least;
}
