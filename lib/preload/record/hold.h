/* SPDX-License-Identifier: Apache-2.0
 *
 * hold.h - the recorder's hold on CUPTI.
 *
 * A process has one set of buffer callbacks, one clock and one switch per kind of activity,
 * whoever sets them.  So the recorder takes them only while nobody else has anything
 * switched on, gives them up before a profiler's own call goes through (entry.c stands in
 * front of those), and puts back what stood there before.
 */
#ifndef EPO_RECORD_HOLD_H
#define EPO_RECORD_HOLD_H

#include <stdbool.h>

#include "preload/record/cupti.h"

#define HOLD_BUFFER ((size_t)1 << 20)
#define HOLD_BUFFERS 48 /* in the process at any time */

typedef enum hold_answer {
    HOLD_OPEN,
    HOLD_LATER, /* somebody else is recording */
    HOLD_NEVER  /* there is no CUPTI that would do it */
} hold_answer;

/* Before the recorder's thread is started; `leaves`: CUPTI is taken out when it is over. */
void hold_prepare(bool leaves);
/* Switches recording on.  `why` (CUPTI_TEXT bytes): unless HOLD_OPEN. */
hold_answer hold_open(char *why);
/* Switches it off and fetches what is complete.  Nothing, unless it is open. */
void hold_close(void);
/* Begins to take CUPTI out of the process again: what it has put in front of every call of
 * CUDA costs a launch 1.7 us for ever.  Done at the end of one of the program's calls.  False:
 * it stays, as nobody asked, others have used it or this release may not leave. */
bool hold_leave(void);
/* After hold_leave(): false: not yet. */
bool hold_has_left(void);
/* Gives hold_leave() up, if it is not over. */
void hold_stay(void);
/* Whether a profiler has taken over since hold_open(); `by` (CUPTI_TEXT bytes): which call
 * told. */
bool hold_taken(char *by);

/* A buffer that came back; NULL: none is left.  Give it to hold_reuse() after reading. */
uint8_t *hold_next(size_t *valid);
void hold_reuse(uint8_t *buffer);
/* When nothing is recorded any more: the memory of all buffers that CUPTI does not have. */
void hold_free(void);

typedef struct hold_facts {
    const cupti *cupti;     /* NULL: not found yet */
    int64_t opened, closed; /* CUPTI's clock, ns: all was on, all was still on */
    uint64_t dropped;       /* records that CUPTI had no place for */
    uint64_t refused;       /* buffers that it wanted beyond HOLD_BUFFERS */
    bool skewed;            /* CUPTI's clock did not run as the system's does */
} hold_facts;
hold_facts hold_tell(void);

/* ---- what others do with CUPTI; called from entry.c, before their call goes on ---- */

typedef enum hold_other {
    OTHER_SUBSCRIBES,
    OTHER_UNSUBSCRIBES,
    OTHER_ENABLES,
    OTHER_DISABLES,
    OTHER_REGISTERS, /* buffers or a clock */
    OTHER_FLUSHES,   /* its buffers come back meanwhile, which takes as long as there are many */
    OTHER_FINALIZES
} hold_other;
void hold_other_calls(hold_other what, const char *function);
/* After it, whatever it said. */
void hold_other_returned(void);
/* After that, if it succeeded. */
void hold_other_called(hold_other what, cupti_kind kind);
/* The same for a kind that was switched for one CUDA context. */
void hold_other_switched(void *cuda, cupti_kind kind, bool on);
void hold_other_registered(cupti_buffer_requested *requested, cupti_buffer_completed *completed);
void hold_other_clock(cupti_clock *clock);

/* In a child after fork(): nobody holds anything. */
void hold_forget(void);

#endif
