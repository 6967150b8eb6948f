/* SPDX-License-Identifier: Apache-2.0
 *
 * channel.h - what one communicator has for carrying messages itself.
 *
 * While a group ends, the two ends of each message agree on the CPU (agree.h): the receiver
 * offers where its memory lies, the sender opens it and takes the offer; whoever cannot, or is
 * alone for too long, refuses, and the message is NCCL's at both ends.  What was agreed stands
 * on the program's own stream: this rank's memory is ready; the peer's is; a copy by an engine;
 * it is written; theirs is.  No stream waits but the program's, and it waits for nothing that
 * stands behind a wait of ours somewhere else: so nothing can close a circle, whatever queues
 * streams share.
 */
#ifndef EPO_INTERCEPT_CHANNEL_H
#define EPO_INTERCEPT_CHANNEL_H

#include "preload/intercept/agree.h"
#include "preload/intercept/kept.h"

/* Allocations of one peer's, or of ours, that are remembered. */
#ifndef CHANNEL_REACH
#define CHANNEL_REACH 256
#endif
/* A peer's memory is given back when nothing of ours is on its way; in a program whose GPU always
 * has something, whose ranks then come to what it waits for, after this many seconds. */
#ifndef CHANNEL_FORCE_S
#define CHANNEL_FORCE_S 5.0
#endif

typedef struct reach_piece reach_piece;

/* An allocation, or a stretch of pieces: of ours that was offered, or of a peer's that was opened.
 */
typedef struct reach_entry {
    uint64_t id; /* 0: none */
    cu_pointer base;
    uint64_t size;
    cu_ipc_handle handle;
    bool usable;
    unsigned used;      /* when it was wanted last */
    bool mapped;        /* a peer's stretch */
    bool leaving;       /* given back when the last exchange has ended */
    unsigned round;     /* of the exchange that it was used in last */
    reach_piece *piece; /* of our stretch; NULL: an allocation */
    uint32_t count;
    int kind;        /* of its handles */
    uint32_t handed; /* a bit for each peer that was given them */
    uint8_t tries[AGREE_RANKS];
    fallback lost[AGREE_RANKS]; /* why the last of them was in vain */
    fallback why;               /* of a peer's stretch that is not usable */
} reach_entry;

typedef struct reach_table {
    reach_entry entry[CHANNEL_REACH];
    unsigned now; /* counts what is wanted */
    uint64_t bytes;
} reach_table;

typedef struct channel_peer {
    int rank; /* in the communicator */
    epo_terms terms;
    uint32_t sent, received; /* messages so far, whoever carried them */
    uint32_t ticket;         /* of ours for it, the last */
    atomic_uint wanted;      /* number of its message that a stream of ours waits for, the last */
    atomic_uint theirs;      /* its ticket that a stream of ours waits for, the last */
    reach_table *opened;
    unsigned gone; /* of theirs that were seen */
} channel_peer;

/* Words to write and to wait for in a row: no more of either than a message has with each peer. */
typedef struct channel_words {
    cu_word_operation op[2 * AGREE_RANKS];
    unsigned count;
} channel_words;

struct channel {
    struct channel *next; /* of those that wait for their peers, the GPU or their group's end */
    struct channel *all_next;
    comm *owner;
    const cuda_driver *cu;
    cu_context context;
    agree agree;
    pthread_mutex_t lock;
    int count;                  /* ranks in the room */
    uint64_t least, most_least; /* most_least: of all ranks */
    cu_pointer base;            /* the room, as streams see it */
    bool registered, whole, wants_whole;
    bool batch; /* the driver takes words in a row */
    channel_peer peer[AGREE_RANKS];
    cu_stream self, side;      /* copies inside this GPU; all of ours, where NCCL has a part, too */
    cu_event fork, join, last; /* last: the end of what stands on the program's streams */
    uint64_t last_stream;      /* that it was recorded on: the driver's number */
    atomic_uint holders;       /* the communicator, and who looks at it now */
    bool ended;                /* nothing more comes onto the streams; under `lock` */
    atomic_bool lost;          /* something stands there of which no event tells the end */
    atomic_bool aborted, stop;
    pthread_mutex_t abort_lock; /* of the releaser */
    bool releasing;
    pthread_t releaser;
    double tidied, given_back;
    double wait_s, idle_s, patience; /* at most; at most with an idle stream; now */
    struct {
        cu_module module;
        cu_function kernel; /* NULL: the driver's copies */
        int blocks;
    } copy;
    reach_table offered;
    int hand;           /* socket for pieces of memory; -1: none */
    kept hand_kept;     /* it */
    uint64_t stretches; /* of ours so far */
    unsigned round;     /* exchanges so far */
};

/* One line on standard error, and the result for NCCL's caller. */
ncclResult_t channel_fail(const channel *ch, const char *call, cu_result r);
/* The index in the room of a rank of the communicator; -1: none that takes part. */
int channel_index(const channel *ch, int rank);

/* ---- release.c ---- */

/* From now on, until it is released, it may have something on its way. */
void channel_enlist(channel *ch);
/* Whether something of its own is on its way.  In the channel's context. */
bool channel_is_busy(const channel *ch);
/* Whether nothing of ours is on its way in the channel's context. */
bool channel_is_quiet(const channel *ch);
/* The same, or nothing was given back for
 * CHANNEL_FORCE_S. */
bool channel_may_give_back(const channel *ch);
/* Something of ours will not end: the latter does not count any more. */
void channel_abandon(void);
/* Releases what has waited for that.  `wait`: until it is done, with a limit; else a thread does
 * it, as the driver may take long. */
void channel_sweep(bool wait);
/* Of one that has no part in the driver (any more). */
void channel_free(channel *ch);
bool channel_thread(pthread_t *thread, void *(*run)(void *), void *argument);

/* ---- reach.c ---- */

/* Where the peer finds `bytes` at `target`; else why it cannot. */
fallback reach_offer(channel *ch, int peer, cu_pointer target, uint64_t bytes, agree_offer *offer);
/* The same memory here, 0: not to be had, and why. */
cu_pointer reach_open(channel *ch, int peer, const agree_offer *offer, fallback *why);
/* Tells peers what of ours was freed and, if it may, gives back what they told us. */
void reach_tidy(channel *ch, bool may);
void reach_close(channel *ch);
/* Takes a stretch into what of the peer is open here, or gives it back at once. */
void reach_keep(channel *ch, int peer, const reach_entry *e);
bool reach_has_room(const channel *ch, int peer);

/* ---- pieces.c ---- */

#define PIECES_ID (UINT64_C(1) << 63) /* in the number of a stretch */

void pieces_open(channel *ch);
void pieces_close(channel *ch);
/* The stretch of ours that has these bytes, all of them what they were; NULL: none. */
reach_entry *pieces_known(channel *ch, cu_pointer target, uint64_t bytes);
/* Makes one; false: it is no such memory, or cannot be handed over. */
bool pieces_look(channel *ch, cu_pointer target, uint64_t bytes, reach_entry *e);
/* The peer has got its handles; else why not. */
fallback pieces_offer(channel *ch, int peer, reach_entry *e);
/* It wrote there (FALLBACK_NONE), or has lost or could not use them. */
void pieces_heard(channel *ch, int peer, uint64_t id, fallback why);
bool pieces_gone(const channel *ch, const reach_entry *e);
/* Maps what peers have handed over.  FALLBACK_NONE: all that has come; else why it may not be. */
fallback pieces_hear(channel *ch);
void pieces_forget(const channel *ch, const reach_entry *e);

/* ---- words.c ---- */

void words_write(channel_words *w, cu_pointer word, uint32_t value);
void words_wait(channel_words *w, cu_pointer word, uint32_t value);
/* Puts them on the stream, in their order. */
cu_result words_flush(const channel *ch, channel_words *w, cu_stream stream);

/* ---- copy.c: inside this GPU ---- */

void copy_open(channel *ch);
void copy_close(channel *ch);
cu_result copy_here(const channel *ch, cu_pointer to, cu_pointer from, uint64_t bytes,
                    cu_stream stream);

/* The address of a word of the room, for streams. */
static inline cu_pointer channel_word(const channel *ch, const void *word) {
    return ch->base + (cu_pointer)((const char *)word - (const char *)ch->agree.room);
}

static inline bool channel_has(const channel *ch, int i) {
    return i != ch->agree.me && ch->peer[i].terms.usable;
}

static inline agree_pair *channel_out(const channel *ch, int i) {
    return &ch->agree.room->pair[ch->agree.me][i];
}

static inline agree_pair *channel_in(const channel *ch, int i) {
    return &ch->agree.room->pair[i][ch->agree.me];
}

#endif
