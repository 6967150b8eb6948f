/* SPDX-License-Identifier: Apache-2.0
 *
 * agree.h - how the ranks of one communicator on one node agree, through a file of
 * shared memory that only this user can open and that has no name any more when the
 * communicator exists.
 *
 * A rank enters before it calls NCCL's own initialisation, which returns to nobody
 * before all ranks have called it: afterwards the list of those who entered is complete
 * and the same for all.  What a rank finds out later (a window it cannot open) becomes
 * one word per pair that both can only agree on or refuse, whoever is first.
 */
#ifndef EPO_INTERCEPT_AGREE_H
#define EPO_INTERCEPT_AGREE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "preload/intercept/driver.h"
#include "preload/intercept/intercept.h"
#include "preload/intercept/terms.h"

#define AGREE_RANKS 16 /* of one node; more ranks than that are left to NCCL */
#define AGREE_RING 16  /* messages of a pair that may be spoken of */
#define AGREE_GONE 32
#define AGREE_SOCKET 16 /* bytes of a name */

typedef enum agree_state { AGREE_ABSENT, AGREE_ENTERED, AGREE_READY, AGREE_WITHDRAWN } agree_state;

typedef struct agree_card {
    atomic_uint state, closed;
    epo_terms_card terms;
    char socket[AGREE_SOCKET]; /* where it takes pieces of memory: hand.c; all zero: it does not */
} agree_card;

/* Where the receiver's memory lies, for a sender that can open it. */
typedef struct agree_offer {
    uint64_t id, offset, bytes, size; /* id, size: of the allocation; never used twice */
    cu_ipc_handle handle;
    uint32_t ticket; /* the receiver's stream writes it when the memory is ready */
} agree_offer;

/* One message: its number, and what became of it.  The receiver offers, the sender takes the
 * offer or refuses it; whoever cannot, or has waited too long, refuses.  What is decided is
 * decided for both. */
enum { AGREE_OFFERED = 1, AGREE_TAKEN = 2, AGREE_REFUSED = 3 };
#define AGREE_OFFER_WORDS ((sizeof(agree_offer) + 7) / 8)
typedef struct agree_message {
    atomic_uint word;                          /* 4 * number + one of these */
    atomic_uint why;                           /* 64 * number + the reason of a refusal */
    _Atomic uint64_t offer[AGREE_OFFER_WORDS]; /* an agree_offer */
} agree_message;

/* Of one sender and one receiver. */
typedef struct agree_pair {
    _Alignas(64) atomic_uint taken;   /* number of the offer that the sender took last */
    _Alignas(64) atomic_uint arrived; /* the receiver's ticket: its memory is ready */
    _Alignas(64) atomic_uint written; /* number of the message that the sender wrote last */
    agree_message message[AGREE_RING];
} agree_pair;

typedef struct agree_gone { /* allocations that were offered and are no more: a ring */
    atomic_uint count;
    _Atomic uint64_t id[AGREE_GONE];
} agree_gone;

typedef struct agree_room {
    atomic_uint entered, whole;
    atomic_uint closed; /* why from then on all is NCCL's: a rank captures a graph, or an error */
    agree_card card[AGREE_RANKS];
    atomic_uint vote[AGREE_RANKS][AGREE_RANKS]; /* [lower][higher] */
    agree_gone gone[AGREE_RANKS];
    _Alignas(4096) agree_pair pair[AGREE_RANKS][AGREE_RANKS]; /* [sender][receiver] */
} agree_room;

typedef struct agree {
    agree_room *room;
    int me; /* index of this rank in it */
    char path[64];
} agree;

/* False: no shared memory, or too many ranks; then the peers see nobody here. */
bool agree_enter(agree *a, const comm_key *key);
/* How many entered.  After NCCL's initialisation. */
int agree_count(const agree *a);
/* Shows this rank's card; `usable` false in it: withdrawn. */
void agree_show(agree *a, const epo_terms_card *terms);
/* Waits until the rank at index i has shown its card; false: withdrawn, or too late. */
bool agree_wait_card(agree *a, int i, double limit_s);
/* This rank's word about the pair with index i, and then the pair's. */
void agree_vote(agree *a, int i, bool yes);
bool agree_verdict(agree *a, int i, double limit_s);
/* True if every pair of `ranks` ranks agreed; the same answer at all of them. */
bool agree_whole(agree *a, int ranks, double limit_s);
/* ---- one message ---- */

/* How long an end waits for the other: to `until`; from `idle` on only while `busy(of)`, which is
 * asked some times a millisecond, says so.  busy NULL: to `until`. */
typedef struct agree_limit {
    double until, idle;
    bool (*busy)(void *of);
    void *of;
} agree_limit;

/* The receiver's offer of message `number`; false: it is refused already. */
bool agree_give(agree_pair *p, uint32_t number, const agree_offer *offer);
/* The sender: waits for an offer.  False: refused, by either. */
bool agree_get(agree_pair *p, uint32_t number, const agree_limit *limit, agree_offer *offer);
/* The sender's word.  True: both have agreed. */
bool agree_take(agree_pair *p, uint32_t number);
/* The receiver: waits for it, and refuses at the limit.  True: both have agreed. */
bool agree_taken(agree_pair *p, uint32_t number, const agree_limit *limit);
/* Either, from the start; why: below 64, for the other end. */
void agree_refuse(agree_pair *p, uint32_t number, unsigned why);
/* Why either refused, 0: nobody did, so it was too late. */
unsigned agree_why(agree_pair *p, uint32_t number);

/* How long the next exchange waits for its peers, if this one waited `now` at most: half of it
 * after one that did not come in time, else twice; between 1 ms, or `most` if that is less, and
 * `most`. */
double agree_patience(double now, double most, bool late);

/* Takes the name away; the memory stays. */
void agree_unlink(agree *a);
/* Removes this user's rooms of more than `age_s` seconds in which nobody is: of jobs that were
 * killed while they made a communicator.  How many. */
int agree_sweep(const char *folder, double age_s);
/* Tells the others that this rank no longer uses their memory.  True: nobody uses ours. */
bool agree_closed(agree *a);
void agree_leave(agree *a);
double agree_now(void);

#endif
