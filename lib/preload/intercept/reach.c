/* SPDX-License-Identifier: Apache-2.0
 *
 * reach.c - memory of the program that its peers write to: what of ours was offered and what
 * of theirs was opened.  Every allocation has a number of the driver's that is never used
 * again, so an address that was freed and given out anew is not mistaken for the old one.
 *
 * What a program has freed stays in use while a peer has it open.  Therefore peers are told,
 * and the bytes open at once are limited.
 */
#include "config.h"

#include "preload/intercept/channel.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define REACH_MOST (UINT64_C(64) << 30) /* of one peer's memory, open at once */

#define LEAVE_LIMIT_S 1.0

/* NULL: not there. */
static reach_entry *entry_of(reach_table *t, uint64_t id) {
    for (int i = 0; i < CHANNEL_REACH; i++)
        if (t->entry[i].id == id) {
            t->entry[i].used = ++t->now;
            return &t->entry[i];
        }
    return NULL;
}

/* A free one, else the one that was wanted longest ago. */
static reach_entry *entry_spare(reach_table *t) {
    reach_entry *oldest = &t->entry[0];
    for (int i = 0; i < CHANNEL_REACH; i++) {
        if (t->entry[i].id == 0)
            return &t->entry[i];
        if (t->now - t->entry[i].used > t->now - oldest->used)
            oldest = &t->entry[i];
    }
    return oldest;
}

/* ---- ours ---- */

static void look_at(const channel *ch, cu_pointer target, reach_entry *e) {
    const cuda_driver *cu = ch->cu;
    unsigned capable = 0;
    size_t size = 0;
    e->base = target;
    e->usable = cu->attribute(&capable, CU_ATTRIBUTE_IPC_CAPABLE, target) == 0 && capable != 0 &&
                cu->attribute(&e->base, CU_ATTRIBUTE_RANGE_START, target) == 0 &&
                cu->attribute(&size, CU_ATTRIBUTE_RANGE_SIZE, target) == 0 &&
                cu->ipc_get(&e->handle, e->base) == 0;
    e->size = size;
}

/* Peers that have it open are told that nothing comes of it any more. */
static void entry_drop(channel *ch, reach_entry *e) {
    agree_gone *gone = &ch->agree.room->gone[ch->agree.me];
    if (e->usable) {
        const unsigned n = atomic_load(&gone->count);
        atomic_store(&gone->id[n % AGREE_GONE], e->id);
        atomic_store(&gone->count, n + 1);
    }
    free(e->piece);
    memset(e, 0, sizeof *e);
}

/* A new one: an allocation, or a stretch of pieces. */
static reach_entry *entry_new(channel *ch, cu_pointer target, uint64_t bytes, uint64_t id) {
    reach_entry *e = entry_spare(&ch->offered);
    entry_drop(ch, e);
    look_at(ch, target, e);
    e->id = id;
    if (!e->usable)
        (void)pieces_look(ch, target, bytes, e);
    e->used = ++ch->offered.now;
    return e;
}

fallback reach_offer(channel *ch, int peer, cu_pointer target, uint64_t bytes, agree_offer *offer) {
    uint64_t id = 0;
    if (ch->cu->attribute(&id, CU_ATTRIBUTE_BUFFER_ID, target) != 0 || id == 0)
        return FALLBACK_MEMORY;
    reach_entry *e = entry_of(&ch->offered, id);
    if (e == NULL)
        e = pieces_known(ch, target, bytes);
    if (e == NULL)
        e = entry_new(ch, target, bytes, id);
    if (!e->usable || target < e->base || bytes > e->size || target - e->base > e->size - bytes)
        return FALLBACK_MEMORY;
    *offer = (agree_offer){e->id, target - e->base, bytes, e->size, e->handle, 0};
    return e->piece != NULL ? pieces_offer(ch, peer, e) : FALLBACK_NONE;
}

static bool is_gone(const channel *ch, const reach_entry *e) {
    uint64_t id = 0;
    if (e->piece != NULL)
        return pieces_gone(ch, e);
    return ch->cu->attribute(&id, CU_ATTRIBUTE_BUFFER_ID, e->base) != 0 || id != e->id;
}

/* What was freed since: another number at its place, or none. */
static void tell_gone(channel *ch) {
    for (int i = 0; i < CHANNEL_REACH; i++) {
        reach_entry *e = &ch->offered.entry[i];
        if (e->id != 0 && is_gone(ch, e))
            entry_drop(ch, e);
    }
}

/* ---- theirs ---- */

static void forget(channel *ch, reach_table *t, reach_entry *e) {
    if (e->usable) {
        if (e->mapped)
            pieces_forget(ch, e);
        else
            (void)ch->cu->ipc_close(e->base);
        t->bytes -= e->size;
    }
    memset(e, 0, sizeof *e);
}

/* One for something new.  NULL: all are in use, and to give one back the driver may wait for what
 * waits for peers, which may wait for this thread. */
static reach_entry *entry_room(channel *ch, reach_table *t) {
    reach_entry *e = entry_spare(t);
    if (e->usable && (e->round == ch->round || !channel_is_quiet(ch)))
        return NULL;
    forget(ch, t, e);
    return e;
}

bool reach_has_room(const channel *ch, int peer) {
    return ch->peer[peer].opened->bytes <= REACH_MOST;
}

void reach_keep(channel *ch, int peer, const reach_entry *given) {
    reach_table *t = ch->peer[peer].opened;
    reach_entry *known = entry_of(t, given->id);
    reach_entry *e = known == NULL ? entry_room(ch, t) : known->usable ? NULL : known;
    if (e == NULL) {
        if (given->usable)
            pieces_forget(ch, given);
        return;
    }
    *e = *given;
    e->used = ++t->now;
    t->bytes += e->usable ? e->size : 0;
}

/* The peer's allocation, opened now where it is not yet; NULL: it cannot be. */
static reach_entry *open_one(channel *ch, int peer, const agree_offer *offer) {
    reach_table *t = ch->peer[peer].opened;
    reach_entry *e = reach_has_room(ch, peer) ? entry_room(ch, t) : NULL;
    if (e == NULL)
        return NULL;
    e->id = offer->id;
    e->used = ++t->now;
    e->size = offer->size;
    e->usable = ch->cu->ipc_open(&e->base, offer->handle, CU_IPC_LAZY_PEER) == 0;
    t->bytes += e->usable ? e->size : 0;
    return e;
}

/* The peer's stretch, which it has handed over before; else why it is not here. */
static reach_entry *open_stretch(channel *ch, int peer, const agree_offer *offer, fallback *why) {
    const fallback lost = pieces_hear(ch);
    reach_entry *e = entry_of(ch->peer[peer].opened, offer->id);
    if (e != NULL && !e->usable)
        *why = e->why;
    else if (e == NULL && lost != FALLBACK_NONE)
        *why = lost;
    return e != NULL && offer->size == e->size ? e : NULL;
}

cu_pointer reach_open(channel *ch, int peer, const agree_offer *offer, fallback *why) {
    const bool stretch = (offer->id & PIECES_ID) != 0;
    reach_entry *e = entry_of(ch->peer[peer].opened, offer->id);
    *why = FALLBACK_UNREACHED;
    if (e == NULL || (stretch && !e->usable))
        e = stretch ? open_stretch(ch, peer, offer, why) : open_one(ch, peer, offer);
    if (e == NULL || !e->usable)
        return 0;
    e->round = ch->round;
    return e->base + (cu_pointer)offer->offset;
}

/* ---- giving back ---- */

/* The driver does not wait for copies that use a stretch, as it does for what CUDA IPC has opened.
 */
static void leave(channel *ch, reach_table *t, reach_entry *e) {
    if (e->usable && e->mapped)
        e->leaving = true;
    else
        forget(ch, t, e);
}

static unsigned count_gone(const channel *ch, int peer) {
    return atomic_load(&ch->agree.room->gone[peer].count);
}

/* Up to `count`. */
static void take_gone(channel *ch, int peer, unsigned count) {
    channel_peer *p = &ch->peer[peer];
    const agree_gone *gone = &ch->agree.room->gone[peer];
    const unsigned begun = p->gone;
    for (; p->gone != count && count - p->gone <= AGREE_GONE; p->gone++) {
        reach_entry *e = entry_of(p->opened, atomic_load(&gone->id[p->gone % AGREE_GONE]));
        if (e != NULL && e->id != 0)
            leave(ch, p->opened, e);
    }
    p->gone = count;
    /* The peer has written over some, perhaps under our eyes: all go. */
    const bool missed = count_gone(ch, peer) - begun >= AGREE_GONE;
    for (int i = 0; i < CHANNEL_REACH && missed; i++)
        leave(ch, p->opened, &p->opened->entry[i]);
}

static bool any_leaving(const channel *ch) {
    for (int i = 0; i < ch->count; i++)
        for (int k = 0; channel_has(ch, i) && k < CHANNEL_REACH; k++)
            if (ch->peer[i].opened->entry[k].leaving)
                return true;
    return false;
}

/* Whether the last exchange has ended.  `force`: in a program whose GPU is always behind, it is
 * waited for: not for long, as it may wait for what this thread is to do. */
static bool has_ended(const channel *ch, bool force) {
    const struct timespec nap = {0, 100000};
    const double until = agree_now() + (force ? LEAVE_LIMIT_S : 0);
    while (channel_is_busy(ch)) {
        if (agree_now() >= until)
            return false;
        nanosleep(&nap, NULL);
    }
    return true;
}

void reach_tidy(channel *ch, bool may) {
    unsigned gone[AGREE_RANKS] = {0}; /* before what is heard, which may be among it */
    tell_gone(ch);
    for (int i = 0; i < ch->count; i++)
        gone[i] = count_gone(ch, i);
    if (may)
        (void)pieces_hear(ch); /* (what nobody takes stays in use, too) */
    for (int i = 0; may && i < ch->count; i++)
        if (channel_has(ch, i))
            take_gone(ch, i, gone[i]);
    if (!any_leaving(ch) || !has_ended(ch, may))
        return;
    for (int i = 0; i < ch->count; i++)
        for (int k = 0; channel_has(ch, i) && k < CHANNEL_REACH; k++)
            if (ch->peer[i].opened->entry[k].leaving)
                forget(ch, ch->peer[i].opened, &ch->peer[i].opened->entry[k]);
}

void reach_close(channel *ch) {
    for (int i = 0; i < ch->count; i++) {
        reach_table *t = ch->peer[i].opened;
        for (int k = 0; k < CHANNEL_REACH && t != NULL; k++)
            forget(ch, t, &t->entry[k]);
        free(t);
        ch->peer[i].opened = NULL;
    }
}
