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
#define AGREE_SLOTS 8

typedef enum agree_state { AGREE_ABSENT, AGREE_ENTERED, AGREE_READY, AGREE_WITHDRAWN } agree_state;

typedef struct agree_card {
    atomic_uint state, closed;
    epo_terms_card terms;
    cu_ipc_handle window;
} agree_card;

/* 0: empty, 1: full; a line of its own. */
typedef struct agree_word {
    _Alignas(64) atomic_uint value;
} agree_word;

typedef struct agree_room {
    atomic_uint entered, whole;
    agree_card card[AGREE_RANKS];
    atomic_uint pair[AGREE_RANKS][AGREE_RANKS]; /* [lower][higher] */
    /* [sender][receiver]: streams write and wait for these */
    _Alignas(4096) agree_word word[AGREE_RANKS][AGREE_RANKS][AGREE_SLOTS];
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
void agree_show(agree *a, const epo_terms_card *terms, const cu_ipc_handle *window);
/* Waits until the rank at index i has shown its card; false: withdrawn, or too late. */
bool agree_wait_card(agree *a, int i, double limit_s);
/* This rank's word about the pair with index i, and then the pair's. */
void agree_vote(agree *a, int i, bool yes);
bool agree_verdict(agree *a, int i, double limit_s);
/* True if every pair of `ranks` ranks agreed; the same answer at all of them. */
bool agree_whole(agree *a, int ranks, double limit_s);
/* Takes the name away; the memory stays. */
void agree_unlink(agree *a);
/* Tells the others that this rank no longer uses their memory.  True: nobody uses ours. */
bool agree_closed(agree *a);
void agree_leave(agree *a);
double agree_now(void);

#endif
