/* SPDX-License-Identifier: Apache-2.0
 *
 * channel.c - making what carries a communicator's messages, and what it takes.
 */
#include "config.h"

#include "preload/intercept/channel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/names.h"

#define LEAST_DEFAULT (UINT64_C(4) << 20) /* below, NCCL's kernel is there first */
#define WAIT_IDLE_US 1000
#define WAIT_BUSY_US 20000
#define AGREE_LIMIT_S 10.0

ncclResult_t channel_fail(const channel *ch, const char *call, cu_result r) {
    fprintf(stderr, "ep-overlap: rank %d of %d: %s: %s\n", ch->owner->rank, ch->owner->ranks, call,
            driver_error(ch->cu, r));
    return ncclUnhandledCudaError;
}

/* ---- making ---- */

/* Whether this driver writes and waits for words in streams, in a row and one by one. */
static bool waits_work(channel *ch) {
    channel_words w = {.count = 0};
    /* a word that nobody else uses: from this rank to itself */
    const cu_pointer word =
        channel_word(ch, &ch->agree.room->pair[ch->agree.me][ch->agree.me].written);
    ch->batch = ch->cu->batch != NULL;
    for (int turn = 0; turn < 2; turn++) {
        words_write(&w, word, 1);
        words_wait(&w, word, 1);
        if (words_flush(ch, &w, ch->self) == 0)
            return true;
        ch->batch = false;
    }
    return false;
}

static bool streams_make(channel *ch) {
    const cuda_driver *cu = ch->cu;
    int least = 0, most = 0;
    (void)cu->priorities(&least, &most);
    return cu->stream_create(&ch->self, CU_STREAM_NON_BLOCKING_, most) == 0 &&
           cu->stream_create(&ch->side, CU_STREAM_NON_BLOCKING_, most) == 0 &&
           cu->event_create(&ch->fork, CU_EVENT_NO_TIMING) == 0 &&
           cu->event_create(&ch->join, CU_EVENT_NO_TIMING) == 0 &&
           cu->event_create(&ch->last, CU_EVENT_NO_TIMING) == 0;
}

/* This rank's own part: everything that can fail here, before it says "usable". */
static fallback prepare(channel *ch) {
    agree_room *room = ch->agree.room;
    ch->cu = driver_find(NULL);
    if (ch->cu == NULL || ch->cu->context_get(&ch->context) != 0 || ch->context == NULL ||
        !streams_make(ch))
        return FALLBACK_DRIVER;
    if (ch->cu->host_register(room, sizeof *room, CU_REGISTER_PORTABLE_MAPPED) != 0)
        return FALLBACK_SYSTEM;
    ch->registered = true;
    if (ch->cu->host_pointer(&ch->base, room, 0) != 0 || !waits_work(ch))
        return FALLBACK_DRIVER;
    copy_open(ch);
    pieces_open(ch);
    return FALLBACK_NONE;
}

static void meet_peer(channel *ch, int i, const epo_terms_card *mine) {
    channel_peer *p = &ch->peer[i];
    const agree_card *theirs = &ch->agree.room->card[i];
    if (!agree_wait_card(&ch->agree, i, AGREE_LIMIT_S) || !mine->usable)
        return;
    p->rank = theirs->terms.rank;
    p->terms = epo_terms_of(mine, &theirs->terms);
    p->opened = p->terms.usable ? calloc(1, sizeof *p->opened) : NULL;
    p->terms.usable = p->opened != NULL;
    ch->wants_whole = ch->wants_whole && theirs->terms.whole;
    if (theirs->terms.least > ch->most_least)
        ch->most_least = theirs->terms.least;
}

/* All peers' cards, then all pairs' words.  How many agreed. */
static int meet_all(channel *ch, const epo_terms_card *mine) {
    const int me = ch->agree.me;
    int usable = 0;
    for (int i = 0; i < ch->count; i++)
        if (i != me)
            meet_peer(ch, i, mine);
    for (int i = 0; i < ch->count; i++)
        if (i != me)
            agree_vote(&ch->agree, i, mine->usable && ch->peer[i].terms.usable);
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
    ch->count = agree_count(&ch->agree);
    agree_unlink(&ch->agree); /* everybody who comes has come */
    ch->least = ch->most_least = card.least = mode_bytes(EPO_ENV_INTERPOSE_LEAST, LEAST_DEFAULT);
    card.whole = mode_bytes(EPO_ENV_INTERPOSE_ALLTOALL, 1) != 0;
    ch->wants_whole = card.whole;
    ch->idle_s = 1e-6 * (double)mode_bytes(EPO_ENV_INTERPOSE_WAIT, WAIT_IDLE_US);
    ch->wait_s = 1e-6 * (double)mode_bytes(EPO_ENV_INTERPOSE_WAIT, WAIT_BUSY_US);
    ch->patience = ch->wait_s;
    const fallback why = ch->count < 2 ? FALLBACK_NO_PEER : prepare(ch);
    card.usable = why == FALLBACK_NONE;
    agree_show(&ch->agree, &card);
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
    pthread_mutex_init(&ch->abort_lock, NULL);
    atomic_init(&ch->holders, 1);
    ch->owner = c;
    ch->hand = -1;
    if (!agree_enter(&ch->agree, &c->key)) {
        channel_free(ch);
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
        agree_show(&ch->agree, &none);
        channel_put(ch);
        return;
    }
    const cuda_driver *cu = driver_find(NULL);
    int mode = CU_CAPTURE_RELAXED; /* another thread may be capturing */
    const bool relaxed = cu != NULL && cu->capture_mode(&mode) == 0;
    c->why = settle(ch);
    if (c->why == FALLBACK_NONE) {
        channel_enlist(ch);
        c->channel = ch;
    } else {
        channel_put(ch);
    }
    if (relaxed)
        (void)cu->capture_mode(&mode);
}

/* ---- answers ---- */

int channel_index(const channel *ch, int rank) {
    for (int i = 0; i < ch->count; i++)
        if (channel_has(ch, i) && ch->peer[i].rank == rank)
            return i;
    return -1;
}

bool channel_knows(const channel *ch, int peer) {
    return peer == ch->owner->rank || channel_index(ch, peer) >= 0;
}

bool channel_takes(const channel *ch, int peer, uint64_t bytes) {
    if (peer == ch->owner->rank)
        return bytes > 0 && bytes >= ch->least;
    const int i = channel_index(ch, peer);
    return i >= 0 && epo_terms_carry(&ch->peer[i].terms, bytes);
}

fallback channel_whole(const channel *ch, uint64_t bytes) {
    if (!ch->whole)
        return FALLBACK_PEER;
    if (!ch->wants_whole)
        return FALLBACK_WHOLE;
    return bytes > 0 && bytes >= ch->most_least ? FALLBACK_NONE : FALLBACK_SMALL;
}
