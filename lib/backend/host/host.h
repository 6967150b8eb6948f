/* SPDX-License-Identifier: Apache-2.0
 *
 * host.h - inside the host backend: ranks are processes of one machine or threads
 * of one process, queues are worker threads, windows are shared memory.
 *
 * What ranks share lies in one block, struct host_shared, whatever they are: a
 * memfd for processes, ordinary memory for threads.  Every wait of a rank (for a
 * flag, an event, a barrier, an operation to do) is a wait for this rank's bell, a
 * futex word in that block: whoever changes something that the rank may wait for
 * changes it first and rings then.
 */
#ifndef EPO_BACKEND_HOST_HOST_H
#define EPO_BACKEND_HOST_HOST_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "backend/backend.h"
#include "backend/engine.h"
#include "backend/meet.h"
#include "core/names.h"
#include "core/status.h"

#define HOST_RANKS_MAX 256
#define HOST_TEXT_MAX 512
#define HOST_NODE_MAX 64
#define HOST_WHY_MAX 128
#define HOST_SLICE_NS INT64_C(50000000)  /* peers' lives and limits are looked at this often */
#define HOST_SCRATCH (UINT64_C(1) << 20) /* collectives, per rank and half */
#define HOST_PAGE UINT64_C(4096)         /* of a window */

/* ---- shared by the ranks ---------------------------------------------- */

typedef enum host_peer_state {
    HOST_PEER_COMING = 0,
    HOST_PEER_HERE = 1,
    HOST_PEER_LEFT = 2, /* closed its group */
    HOST_PEER_DEAD = 3
} host_peer_state;

typedef struct host_peer {
    _Alignas(64) _Atomic uint32_t bell;
    _Atomic uint32_t sleepers; /* threads in the kernel for this bell: a byte per host_ear */
    _Atomic uint32_t state;    /* host_peer_state */
    _Atomic uint64_t refused;  /* the last collective call that it refused; 0: none */
    epo_turns turns;           /* its last collective calls */
    _Atomic int32_t waits_for; /* the rank that it waited for at waits_at */
    _Atomic int64_t waits_at;
    int32_t pid;
    char node[HOST_NODE_MAX];
    /* Processes: robust, held by a worker for the group's life.  The kernel lets
     * go of it when the process ends, however it ends. */
    pthread_mutex_t alive;
} host_peer;

/* What a rank is about when it reaches a barrier: all have to be about the same. */
typedef struct host_turn {
    char what[16];
    uint64_t count;
    uint64_t turn;    /* collective calls so far */
    uint64_t refused; /* the last of them that this rank refused; may differ */
} host_turn;

typedef struct host_shared {
    int32_t ranks;
    int32_t threads; /* ranks are threads of one process */
    /* The first error of any rank: 0 none, 1 being written, 2 written. */
    _Atomic uint32_t broken;
    int32_t broken_rank, broken_status;
    char broken_text[HOST_TEXT_MAX];
    uint64_t arrived[HOST_RANKS_MAX];  /* barriers each rank has reached */
    host_turn turn[2][HOST_RANKS_MAX]; /* used in turn, as the halves of scratch */
    host_peer peer[HOST_RANKS_MAX];
    _Alignas(4096) unsigned char scratch[]; /* [2][ranks][HOST_SCRATCH] */
} host_shared;

/* ---- of one rank ------------------------------------------------------ */

struct host_worker;
typedef struct host_op host_op;
struct host_op {
    host_op *next;
    epo_backend *be;
    epo_deps deps;
    uint64_t target[EPO_MAX_WAITS]; /* events: the signal that is waited for */
    uint64_t signal_number;
    uint64_t issued;      /* number in issue order */
    int64_t wait_from_ns; /* 0: not waiting for flags alone yet */
    int64_t look_ns;      /* when peers and limit are looked at next */
    bool warned;
    /* Does the work on the queue's thread; breaks the backend if it cannot. */
    void (*run)(struct host_worker *worker, host_op *op);
    union {
        epo_exchange exchange;
        epo_rows_gather gather;
        epo_wire_pack pack;
        epo_rows_reduce reduce;
        epo_gemm gemm;
        epo_swiglu swiglu;
        struct {
            void *ptr;
            uint64_t bytes;
        } zero;
        struct {
            void (*fn)(void *ctx);
            void *ctx;
        } call;
    } u;
};

struct epo_event {
    uint64_t issued;       /* signals issued; the caller's thread */
    _Atomic uint64_t done; /* the highest that happened */
};

struct epo_queue {
    epo_backend *be;
    epo_queue_kind kind;
    host_op *head, *tail;
    epo_queue *next;
};

struct epo_window {
    unsigned char *base; /* rank 0's part; rank r's lies r * stride further */
    uint64_t bytes, stride;
    int rank;
    struct host_block *block; /* threads: the mapping they share, else NULL */
    uint64_t mapped;          /* bytes of all ranks' parts */
};

typedef struct host_worker {
    epo_backend *be;
    bool comm; /* serves COMM; else COMPUTE and FILL */
    pthread_t thread;
    bool started;
    /* With the backend's mutex: */
    bool running;     /* an operation */
    bool wants_event; /* some queue's head waits for an event */
    float *scratch;   /* conversions of the GEMM; its own thread's */
    uint64_t scratch_bytes;
} host_worker;

typedef struct host_link {
    double gbs, us; /* 0: none */
} host_link;

/* Where this rank stands in its group, and how long it may wait for others. */
typedef struct host_place {
    int rank, ranks;             /* of the group */
    int world_rank, world_ranks; /* of the job */
    const int *members;          /* world ranks in group order; NULL: all */
    const epo_bootstrap *bootstrap;
    host_link link;
    int64_t timeout_ns, warn_ns;
    epo_status wrong; /* as in the configuration, and why */
    char why[HOST_WHY_MAX];
} host_place;

typedef struct host_record host_record;

struct epo_backend {
    int rank, ranks;
    bool wide; /* passes over rows use wide vectors (convert.h) */
    pid_t pid; /* of the process that opened it */
    int64_t timeout_ns, warn_ns;
    _Atomic int64_t spin_ns; /* before a wait sleeps */
    host_shared *shared;
    struct host_meeting *meeting; /* threads, else NULL */
    struct host_join *join;       /* processes, else NULL */
    epo_backend_info info;
    char versions[160];

    pthread_mutex_t mutex; /* queues, workers' fields below */
    epo_queue *queues;
    uint64_t issued;
    uint64_t outstanding;  /* operations not finished */
    int syncing;           /* callers inside sync: FILL may run */
    epo_event *sync_event; /* what it waits for; NULL: any operation's end */
    bool stop;
    host_worker worker[2];  /* compute, comm */
    _Atomic int comm_ready; /* the comm worker holds `alive`, or could not (-1) */

    _Atomic int broken; /* epo_status; text is written before */
    pthread_mutex_t broken_mutex;
    char broken_text[HOST_TEXT_MAX];

    host_link link;
    int64_t link_free_ns[HOST_RANKS_MAX]; /* the comm worker's */
    uint64_t barriers;                    /* reached by this rank */
    _Atomic uint64_t turns;               /* collective calls begun or refused */
    _Atomic uint64_t memory, memory_peak;
    host_record *record;
    _Atomic int recording;
};

/* ---- wait.c: bells, limits, the group's end ---------------------------- */

int64_t host_now_ns(void);
/* What a thread listens for, and what a ring is about: threads that listen for
 * something else sleep on. */
typedef enum host_ear {
    HOST_EAR_COMPUTE = 1, /* the compute worker: operations, events */
    HOST_EAR_COMM = 2,    /* the comm worker: likewise */
    HOST_EAR_FLAGS = 4,   /* flags that other ranks write */
    HOST_EAR_SYNC = 8,    /* the caller: an event, or an operation's end */
    HOST_EAR_ALL = 15
} host_ear;

uint32_t host_bell_read(epo_backend *be);
/* Until the bell is rung for one of `ears` after `seen` was read, or CLOCK_MONOTONIC
 * until_ns (INT64_MAX: no limit).  May return early. */
void host_bell_wait(epo_backend *be, int ears, uint32_t seen, int64_t until_ns);
void host_bell_ring(host_shared *shared, int rank, int ears);

epo_status host_turn_take(epo_backend *be, const epo_turn *turn, bool refused);
epo_status host_turn_end(epo_backend *be);
/* Breaks the backend if `rank` is at the same count of calls in another call, or in one that is
 * made otherwise. */
bool host_turn_differs(epo_backend *be, int rank);
bool host_ready_reached(const epo_ready *ready);
/* Looks who is late for a flag: breaks the backend when that rank is dead or has
 * left, or when the limit has passed since `from`; says so once after warn_s. */
void host_ready_check(epo_backend *be, const epo_ready *ready, int64_t from, bool *warned);
/* Waits on the caller's thread; epo_fail()ed status of the backend if broken. */
epo_status host_ready_wait(epo_backend *be, const epo_ready *ready);

/* Ends the group with this error, for all ranks; the first error stays. */
void host_break(epo_backend *be, epo_status status, const char *format, ...) EPO_PRINTF(3, 4);
bool host_broken(epo_backend *be);
/* In a process forked after the group was made: its threads are the parent's, its
 * locks may be held for ever, its shared memory is not this process's to change. */
bool host_forked(const epo_backend *be);
/* host_broken's status with its text as this thread's error; EPO_E_STATE in a forked
 * process. */
epo_status host_status(epo_backend *be);
/* "left the group": why that rank does nothing more; NULL: it may. */
const char *host_peer_why_lost(host_shared *shared, const struct host_join *join, int rank);
/* "rank 3 (pid 71 on n2)", "rank 3" for threads; of the group. */
const char *host_peer_name(const host_shared *shared, int rank, char *text, size_t size);

/* ---- place.c: where this rank stands */

epo_status host_place_find(const epo_backend_config *config, host_place *place);
/* This rank makes no group, for the reason in epo_fail_text(): whoever joins tells the others. */
void host_place_refuse(host_place *place, epo_status wrong);

/* ---- world.c, rendezvous.c: how ranks meet ----------------------------- */

epo_status host_world_create(int ranks, epo_world **out);
void host_world_destroy(epo_world *world);
epo_status host_world_join(epo_world *world, const host_place *place, struct host_meeting **meeting,
                           host_shared **shared);
void host_world_leave(struct host_meeting *meeting);

/* ---- shm.c: memory ------------------------------------------------------ */

/* Refuses what cannot be had now: EPO_E_NOMEM with need and have. */
epo_status host_memory_check(uint64_t need, const char *what);
/* Zeroed pages, shared with nobody; munmap() returns them. */
epo_status host_map_private(uint64_t bytes, const char *what, void **out);
uint64_t host_shared_bytes(int ranks);
void host_shared_init(host_shared *shared, int ranks, bool threads);
void host_memory_count(epo_backend *be, int64_t bytes);
epo_status host_alloc(epo_backend *be, uint64_t bytes, void **out);
void host_free(epo_backend *be, void *ptr, uint64_t bytes);
epo_status host_window_create(epo_backend *be, uint64_t bytes, epo_window **out);
void host_window_destroy(epo_backend *be, epo_window *window);
void *host_window_local(epo_window *window);

/* ---- collective.c ------------------------------------------------------- */

epo_status host_barrier(epo_backend *be);
epo_status host_allgather(epo_backend *be, const void *mine, size_t bytes, void *all);
epo_status host_allreduce(epo_backend *be, float *data, uint64_t count, epo_stream stream);
/* One verdict for all: the first failed rank's status and text on every rank. */
epo_status host_agree(epo_backend *be, epo_status mine);

/* ---- queue.c ------------------------------------------------------------ */

epo_status host_workers_start(epo_backend *be);
/* Runs what is queued (passes over it when broken), then ends the threads. */
void host_workers_stop(epo_backend *be);
epo_status host_queue_create(epo_backend *be, epo_queue_kind kind, epo_queue **out);
void host_queue_destroy(epo_backend *be, epo_queue *queue);
epo_status host_event_create(epo_backend *be, epo_event **out);
void host_event_destroy(epo_backend *be, epo_event *event);
epo_status host_sync(epo_backend *be, epo_event *event);
/* Until the operations that run now have ended: one that has told its peers, and
 * so let a sync() end, may be on its last steps still. */
void host_workers_settle(epo_backend *be);
/* A new operation with checked deps, to be filled and given to host_op_issue. */
epo_status host_op_create(epo_queue *q, const epo_deps *deps,
                          void (*run)(host_worker *worker, host_op *op), host_op **out);
epo_status host_op_issue(epo_queue *q, host_op *op);

/* ---- operations --------------------------------------------------------- */

epo_status host_link_parse(const char *text, host_link *out);
epo_status host_exchange(epo_queue *q, const epo_exchange *x, const epo_deps *deps);
epo_status host_gather(epo_queue *q, const epo_rows_gather *g, const epo_deps *deps);
epo_status host_wire_pack(epo_queue *q, const epo_wire_pack *p, const epo_deps *deps);
epo_status host_reduce(epo_queue *q, const epo_rows_reduce *r, const epo_deps *deps);
epo_status host_gemm(epo_queue *q, const epo_gemm *g, const epo_deps *deps);
epo_status host_swiglu(epo_queue *q, const epo_swiglu *s, const epo_deps *deps);
epo_status host_zero(epo_queue *q, void *ptr, uint64_t bytes, const epo_deps *deps);
epo_status host_call(epo_queue *q, void (*fn)(void *ctx), void *ctx, const epo_deps *deps);
/* Threads for one GEMM: this rank's share of the cores it may use. */
epo_status host_blas_setup(epo_backend *be);

/* ---- record.c ------------------------------------------------------------ */

void host_record_add(epo_backend *be, const epo_deps *deps, int64_t start_ns, int64_t end_ns);
epo_status host_record_start(epo_backend *be, uint64_t capacity);
epo_status host_record_stop(epo_backend *be, const epo_interval **out, uint64_t *count,
                            uint64_t *dropped);
void host_record_destroy(epo_backend *be);

#endif
