/* SPDX-License-Identifier: Apache-2.0
 *
 * channel.h - what one communicator has for carrying messages itself: a window of its
 * own that peers write to, the peers' windows, streams ("lanes") for each direction of
 * each peer, and one word per slot of a window, 0 empty or 1 full.
 *
 * A sender waits for the slot's 0, copies, writes 1; the receiver waits for the 1,
 * copies out, writes 0.  Every message begins at slot 0, so the operations on a stream
 * depend on the message alone: they can stand in a CUDA graph and be replayed while the
 * peer does the same eagerly.
 */
#ifndef EPO_INTERCEPT_CHANNEL_H
#define EPO_INTERCEPT_CHANNEL_H

#include "preload/intercept/agree.h"

/* Streams side by side for one direction of one peer: slot s goes by number s % width, so
 * that one piece is under way while the next one's word is written or waited for. */
#define CHANNEL_WIDTH 2

typedef struct lanes {
    struct lanes *next; /* further sets: captures that overlap */
    cu_stream send[AGREE_RANKS][CHANNEL_WIDTH], recv[AGREE_RANKS][CHANNEL_WIDTH], self;
    uint64_t capture; /* id of the capture that uses them; 0: none yet */
    cu_stream probe;  /* one that took part in it */
} lanes;

typedef struct channel_peer {
    int rank; /* in the communicator */
    epo_terms terms;
    cu_pointer window; /* theirs, here */
} channel_peer;

struct channel {
    struct channel *next; /* of those that wait for their peers to close */
    comm *owner;
    const cuda_driver *cu;
    cu_context context;
    agree agree;
    pthread_mutex_t lock;
    int count; /* ranks in the room */
    uint32_t slots;
    uint64_t slot_bytes, least, most_least, bytes; /* most_least: of all ranks */
    cu_pointer window, words;                      /* words: the room's, as streams see them */
    bool registered, whole, wants_whole, captured;
    channel_peer peer[AGREE_RANKS];
    lanes eager, *capturing;
    cu_event reached, join, copied;
    cu_event sent[AGREE_RANKS][CHANNEL_WIDTH], received[AGREE_RANKS][CHANNEL_WIDTH];
    atomic_bool aborted, stop;
    bool releasing;
    pthread_t releaser;
};

/* Streams of a set for the peers in use; false: no memory. */
bool channel_lanes(channel *ch, lanes *l);
void channel_lanes_free(channel *ch, lanes *l);
/* One line on standard error, and the result for NCCL's caller. */
ncclResult_t channel_fail(const channel *ch, const char *call, cu_result r);

static inline bool channel_has(const channel *ch, int i) {
    return i != ch->agree.me && ch->peer[i].terms.usable;
}

#endif
