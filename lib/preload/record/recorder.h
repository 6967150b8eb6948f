/* SPDX-License-Identifier: Apache-2.0
 *
 * recorder.h - what ran beside what on this process's GPUs, for a while in the middle of a
 * job: how much of the communication was hidden.  Asked for by EP_OVERLAP_RECORD.
 */
#ifndef EPO_RECORD_RECORDER_H
#define EPO_RECORD_RECORDER_H

#include <stdbool.h>
#include <stdint.h>

/* When to record: EP_OVERLAP_RECORD_WINDOW. */
typedef struct record_window {
    bool seconds;      /* else steps, counted from 1, both included */
    uint32_t from, to; /* seconds since the first communicator, in milliseconds */
} record_window;

#define RECORD_STEPS_MAX 1000000
#define RECORD_SECONDS_MAX 60 /* of a window, whatever it is counted in */

/* "10-14": steps; "60s-70s", "2.5-3s": seconds. */
bool record_window_parse(const char *text, record_window *out);

/* Whether EP_OVERLAP_RECORD asks for it in this process. */
bool recorder_wanted(void);
/* At the first communicator; does nothing afterwards.  Starts the thread that does all.  rank
 * of ranks: what the line and the file are named by. */
void recorder_begin(int rank, int ranks);
/* The program has made a call of NCCL: what it was, with the bytes and without. */
void recorder_call(uint64_t what, uint64_t kind);
/* Whether the window is open and EP_OVERLAP_RECORD_MARK asks for marks.  Exchanges without
 * kernels, which wait and copy, then set a word on their stream to these values where they begin
 * and end. */
bool recorder_wants_marks(void);
#define RECORDER_MARK_BEGIN UINT32_C(0xe9a57e10)
#define RECORDER_MARK_END UINT32_C(0xe9a57e11)
/* At the end of the process: ends a window that is open, prints rank 0's line.  Waits a few
 * seconds at most, and calls neither CUPTI nor CUDA itself. */
void recorder_end(void);

#endif
