/* SPDX-License-Identifier: Apache-2.0
 *
 * fault.h - what a fault test is made of: a small training job of a few ranks (job.c),
 * the moments of it at which one rank, the victim, is struck, what strikes it
 * (strike.c), and the judge that watches from outside (fault.c).
 *
 * The engine is the one that is linked in, unchanged.  A moment is reached by the job's own
 * code: before a call, in the experts (a function of the job's), or between two of these
 * while rows are on a link that is made slow (host: EP_OVERLAP_HOST_LINK, CUDA: a host
 * function in the stream).
 */
#ifndef EPO_TESTS_FAULT_H
#define EPO_TESTS_FAULT_H

#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "backend/engine.h"

enum { FAULT_RANKS = 4, VICTIM = 1, TEXT = 512, SLOT = 8192 };

/* Where the victim is when it is struck. */
typedef enum phase {
    PHASE_GROUP,   /* it never comes to make the group */
    PHASE_TOLD,    /* it has said something over the bootstrap, and is to say more */
    PHASE_MEETING, /* it has come, another has not yet */
    PHASE_NCCL,    /* the ranks make a communicator, inside NCCL's call */
    PHASE_BUFFER,
    PHASE_PLAN,
    PHASE_DISPATCH,
    PHASE_COMBINE,
    PHASE_FORWARD_DISPATCH,
    PHASE_FORWARD_EXPERTS,
    PHASE_FORWARD_COMBINE,
    PHASE_BACKWARD_DISPATCH,
    PHASE_BACKWARD_EXPERTS,
    PHASE_BACKWARD_COMBINE,
    PHASE_WGRAD, /* in a delayed weight gradient, inside the flush */
    PHASE_FLUSH,
    PHASE_BARRIER,
    PHASE_SUM,
    PHASE_DESTROY,
    PHASES
} phase;

typedef enum strike_kind {
    NOTHING,
    KILLED,  /* SIGKILL */
    STOPPED, /* SIGSTOP, for good */
    SLOW,    /* SIGSTOP, goes on within the limit: nothing may fail */
    LATE,    /* SIGSTOP, goes on after the limit */
    TWISTED  /* does something else than the others */
} strike_kind;

/* How the ranks of a group find each other, and reach each other's memory. */
typedef enum way {
    WAY_ENVIRONMENT,
    WAY_BOOTSTRAP,
    WAY_COMM, /* from an ncclComm_t */
    WAY_NCCL, /* by the environment; rows go through NCCL */
    WAYS
} way;

/* What a TWISTED victim does. */
typedef enum twist {
    TWIST_NONE,
    TWIST_RANKS,      /* a group of another size */
    TWIST_DISPATCHER, /* another dispatcher */
    TWIST_CHUNKS,
    TWIST_HIDDEN, /* a buffer of other shapes */
    TWIST_TYPE,
    TWIST_MAX_TOKENS, /* more rows than memory holds: all ranks do that */
    TWIST_TOP_K,      /* a plan of another top_k */
    TWIST_TOKENS,     /* of more tokens than the buffer has room for */
    TWIST_INDEX,      /* of an expert that does not exist */
    TWIST_NULL,       /* forward without rows */
    TWIST_ORDER,      /* combine where the others dispatch */
    TWIST_SKIP,       /* no forward: it goes on to the backward call */
    TWIST_BARRIER,    /* a barrier where the others are in forward */
    TWIST_EXPERTS,    /* its experts fail in forward */
    TWIST_DGRAD,
    TWIST_WGRAD,
    TWIST_LEAVE, /* gives everything back after the forward call */
    TWIST_ALLOC, /* its memory (the caller's) ends during the forward call */
    TWIST_FULL,  /* its device's memory is full before the buffer is made */
    TWIST_FILES, /* it may open no more files */
    TWIST_CLOCK, /* its clocks are hours ahead (a time namespace): nothing may fail */
    TWISTS
} twist;

typedef struct fault_case {
    strike_kind kind;
    phase phase;
    twist twist;
    way way;
    int ranks, groups; /* of so many each, one behind the other; the victim is in the first */
    double limit_s;    /* of the group */
    bool plain;        /* alltoall and experts of the engine's, else flex and the job's own */
    bool apart;        /* this process has namespaces of its own, so that names can be counted */
} fault_case;

/* All that was asked for is that the job runs. */
bool must_run(const fault_case *c);

/* In memory that the judge and the ranks share. */
typedef struct board {
    fault_case c;
    _Atomic int64_t struck_ns; /* 0: not yet */
    struct {
        _Atomic int arrived, round, identified;
        char identity[128]; /* NCCL's */
        char slot[FAULT_RANKS][SLOT];
    } table[FAULT_RANKS]; /* of each group: the bootstrap's */
    struct {
        pid_t pid;
        int status;    /* epo_status */
        char call[24]; /* that failed */
        char text[TEXT];
    } rank[FAULT_RANKS];
} board;

int64_t now_ns(void);
/* "dispatch"; NULL: no such one. */
const char *phase_name(int phase);
const char *twist_name(int twist);
const char *kind_name(int kind);
const char *way_name(int way);
/* Has the case's way such a moment? */
bool way_has(way w, int phase);

/* What the judge knows of the ranks. */
typedef struct watch {
    board *b;
    int err[FAULT_RANKS]; /* what each writes to stderr */
    int exit[FAULT_RANKS];
    int64_t start_ns, end_ns[FAULT_RANKS];
    bool ended[FAULT_RANKS];
} watch;

/* ---- watch.c ---- */

/* Runs the job; false: somebody had to be ended.  `ready`, if not NULL, runs in each rank's
 * process first, and with -1 when its job is over. */
bool watch_run(watch *w, const fault_case *c, void (*ready)(int rank));
void watch_end(watch *w);
/* Namespaces of its own for this process, so that names of sockets and of shared memory are
 * nobody else's; false where that is not allowed. */
bool stand_apart(void);

/* ---- judge.c ---- */

/* NULL: all ended as they had to; else what is wrong, and whose it is. */
const char *judge_ranks(const watch *w, int *rank);
/* A line of a survivor's, or of the victim's where nobody else has one. */
void judge_line(const watch *w, char *text, size_t size);
/* One rank's, "|" between lines. */
void judge_line_of(const watch *w, int rank, char *text, size_t size);
/* From the strike to the last survivor's end. */
int judge_ms(const watch *w);
/* Processes, and where names are nobody else's: sockets and files.  True: nothing. */
bool judge_left(const watch *w, char *text, size_t size);

/* ---- strike.c ---- */

/* The victim is at `p`: if this is the moment, it is struck, now or in `after_ms`. */
void strike_at(board *b, int rank, phase p, int after_ms);
/* Notes when that was. */
bool is_twisted(board *b, int rank, twist t);

/* ---- job.c ---- */

/* What a rank's process does; its exit status: 0, 1 an error was reported, 2 wrong
 * numbers. */
int job_run(board *b, int rank);

/* ---- bootstrap.c ---- */

/* A place in the table of its group. */
typedef struct seat {
    board *b;
    int number, group, rank, ranks, calls; /* its own of the job; of the group */
} seat;
epo_bootstrap seat_bootstrap(seat *s);

/* ---- device_host.c, device_cuda.c ---- */

extern const char device_name[];
bool device_is_host(void);
/* The rank's stream, NULL with the host engine. */
epo_stream device_open(board *b, int rank);
/* An ncclComm_t of the seat's group; NULL: there is none.  Ended by `close`, aborted if broken. */
void *device_comm_open(seat *s);
void device_comm_close(void *comm, bool broken);
void device_close(epo_stream stream);
void *device_new(uint64_t bytes);
void device_free(void *p);
void device_put(void *to, const void *from, uint64_t bytes);
void device_take(void *to, const void *from, uint64_t bytes);
/* In stream order. */
void device_copy(epo_stream stream, void *to, const void *from, uint64_t bytes);
void device_zero(epo_stream stream, void *to, uint64_t bytes);
void device_call(epo_stream stream, void (*fn)(void *ctx), void *ctx);
bool device_wait(epo_stream stream);
/* Takes all of the device's memory but a little. */
void device_fill(void);

#endif
