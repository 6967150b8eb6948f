/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_runtime.h - what a test tells the CUDA runtime of cuda_runtime.c, and asks it.
 */
#ifndef EPO_TESTS_FAKE_CUDA_RUNTIME_H
#define EPO_TESTS_FAKE_CUDA_RUNTIME_H

#include <stdbool.h>
#include <stddef.h>

typedef enum fake_kind {
    FAKE_CALLS,  /* of CUDA and NCCL */
    FAKE_HANGS,  /* the same, which do not fail, but return when the test says so */
    FAKE_MEMORY, /* malloc, calloc and realloc by the engine itself (the linker's --wrap) */
    FAKE_THREADS /* pthread_create */
} fake_kind;
/* Of the calls of one kind on one device's threads, the one with this number fails (from 0; -1:
 * none). */
void fake_cuda_fail(fake_kind what, int device, long at);
void fake_cuda_go(void); /* what hangs, returns */
/* Such calls of that device since; the one that failed, "": none did. */
long fake_cuda_calls(void);
const char *fake_cuda_failed(void);

/* Counts this thread's calls of any kind from here on; how many of one there were (NULL: of all; "a
 * kernel": of those that nvcc's code launches); "NAME 3, ..." of all, by the order of their first.
 */
void fake_cuda_count(void);
long fake_cuda_counted(const char *call);
void fake_cuda_counts(char *text, size_t size);
/* Groups made from here on have a device with stream memory operations (else the CPU does them)
 * and one that makes maps for TMA.  A wait is answered at once, as if the peers had been there. */
void fake_cuda_stream_ops(bool on);

typedef enum fake_busy {
    FAKE_IDLE,
    FAKE_OTHERS, /* somebody else's kernel never ends: what waits for the device waits */
    FAKE_ALL     /* and the streams' own work does not end */
} fake_busy;
void fake_cuda_busy(fake_busy busy);
/* Calls that wait now. */
int fake_cuda_waiting(void);

/* This stream of the caller's is being captured from here on, and what comes to wait for it; NULL:
 * no stream is any more.  An event that was recorded there is one nobody can ask for. */
void fake_cuda_capture(void *stream);

/* What was made and not given back, in `text` by kind; 0: nothing.  Communicators are in it. */
int fake_cuda_left(char *text, size_t size);
/* Counts no more what is left: all, or windows and memory that stays registered, as a broken
 * group's rows and flags do where ranks are threads. */
void fake_cuda_forget(bool windows);
/* How often something was given back twice, or was never made, since this was asked last. */
int fake_cuda_wrong(void);

/* An ncclComm_t of the caller's, of ranks that are threads. */
void fake_comm_open(int rank, int ranks, void **out);
void fake_comm_close(void *comm);

/* A rank's communicators say that they have failed, meanwhile; -1: nobody's. */
void fake_nccl_failed(int rank);

/* Of the communicators that the engine made last: did each message find its other end, as long,
 * when each rank's groups of messages come one after the other?  Else `text` says which did not. */
bool fake_nccl_matched(char *text, size_t size);

/* One more of this call, for the counts. */
void fake_cuda_note(const char *call);
/* For cuda_nccl.c: is it this call's turn to fail; until the device rests; a communicator. */
bool fake_cuda_turn(const char *call);
void fake_cuda_hold(void);
void *fake_cuda_make(size_t bytes);
bool fake_cuda_unmake(void *p);

#endif
