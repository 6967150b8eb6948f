/* SPDX-License-Identifier: Apache-2.0
 *
 * hand.h - descriptors of memory that is mapped in pieces, from one rank to another of its node:
 * one connection and message for each stretch, sent before it is offered, so whoever sees the offer
 * finds it.  Each end looks whether the other is this user's, also where a name has a new owner.
 */
#ifndef EPO_INTERCEPT_HAND_H
#define EPO_INTERCEPT_HAND_H

#include <stdbool.h>
#include <stdint.h>

#include "preload/intercept/agree.h"
#include "preload/intercept/kept.h"

#define HAND_PIECES 240 /* of a stretch; the kernel takes 253 descriptors at once */
#define HAND_FABRIC_BYTES 64

typedef struct hand_stretch {
    uint64_t room[2]; /* the communicator's name */
    uint64_t id;
    uint32_t from; /* index in the room */
    uint32_t kind; /* CU_HANDLE_DESCRIPTOR or CU_HANDLE_FABRIC */
    uint32_t count, zero;
    uint64_t bytes[HAND_PIECES];
} hand_stretch;

/* One end, and the name that others send to.  -1: there is none. */
int hand_open(char name[AGREE_SOCKET]);
/* FALLBACK_NONE: it has gone; else why it has not.  handles: `count` descriptors, or fabric
 * handles. */
fallback hand_give(const char name[AGREE_SOCKET], const hand_stretch *s, const void *handles);

typedef enum hand_result {
    HAND_NONE,
    HAND_TAKEN,
    HAND_FILES, /* this process may have no more descriptors: lost; s->count 0: not even known */
} hand_result;

/* The next that has come, of this user's processes alone.  Descriptors are in `handles` (of
 * HAND_PIECES * HAND_FABRIC_BYTES bytes) and `k` until the caller closes them: kept_close(). */
hand_result hand_take(int socket, hand_stretch *s, void *handles, kept *k);
/* Whether this process has no descriptor left. */
bool hand_is_full(void);

#endif
