/* SPDX-License-Identifier: Apache-2.0
 *
 * rhythm.h - where the steps of a training loop are, told from its own calls.
 *
 * Nobody tells a library where a step begins.  But every step makes the same calls on the
 * same communicators in the same order, so a step is the period of their sequence.  A
 * single layer repeats, too, but only until the forward pass is over: what counts is the
 * longest stretch up to now that repeats at all, and the period of that.
 */
#ifndef EPO_RECORD_RHYTHM_H
#define EPO_RECORD_RHYTHM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RHYTHM_REPEATS 3 /* fewer are no rhythm */

typedef struct rhythm_call {
    uint64_t what; /* communicator, kind of call, bytes */
    uint64_t kind; /* the same without the bytes of an exchange, which follow the routing */
    int64_t when;  /* ns, of a clock that never goes back */
} rhythm_call;

typedef struct rhythm_found {
    size_t period;  /* calls of a step; 0: none was found */
    size_t stretch; /* the last calls for which it holds */
} rhythm_found;

/* Takes the calls by their kind from now on. */
void rhythm_forget_bytes(rhythm_call *call, size_t count);

/* Leaves out, in place, what occurs less than RHYTHM_REPEATS times: what was made once at the
 * start, the call of a log line in between.  `room` holds `count` numbers.  The new count. */
size_t rhythm_without_rare(rhythm_call *call, size_t count, uint64_t *room);

/* Leaves out, in place, what is not among the last `period` of `recent` calls, which may be
 * the same calls: the new count. */
size_t rhythm_only(rhythm_call *call, size_t count, const rhythm_call *recent, size_t recents,
                   size_t period, uint64_t *room);

/* The longest stretch at the end of `call` in which something repeats RHYTHM_REPEATS times
 * or more, if it is at least half of all; its shortest period.  `room` (count numbers) is
 * scratch.  Linear in `count`. */
rhythm_found rhythm_find(const rhythm_call *call, size_t count, size_t *room);

/* Mean length in ns of the whole steps that ended last at or before `to` and began at or
 * after `from`; *steps: how many.  0: not one. */
int64_t rhythm_step(const rhythm_call *call, size_t count, size_t period, int64_t from, int64_t to,
                    size_t *steps);

#endif
