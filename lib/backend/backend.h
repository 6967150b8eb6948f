/* SPDX-License-Identifier: Apache-2.0
 *
 * backend.h - what lib/moe asks of an engine's backend (host threads, CUDA).
 *
 * lib/moe plans and schedules; a backend owns memory, queues, windows and the
 * passes over rows.  Nothing here knows what a layer is, nothing in lib/moe knows
 * what a stream or a socket is.
 *
 * Order.  Operations are issued by one thread to queues.  A queue runs its
 * operations in issue order.  Across queues only `epo_ready` orders.
 *
 * Ready.  Each operation may wait for any number of epo_ready and signal any
 * number after its results are visible:
 *   event  an object of this rank; a wait means "the last signal issued before
 *          this wait was issued"
 *   flag   `count` consecutive 64-bit words in this rank's memory, each of which
 *          must reach `epoch` (>=); peers write them.  A wait names the phase, so
 *          that a time-out can say who is late.
 * Flags only grow.  A wait on a flag is never enqueued before the local producer
 * of the peer's matching wait (no cycle through CUDA_DEVICE_MAX_CONNECTIONS=1).
 *
 * Errors.  A call that returns a status failed before anything was enqueued.  An
 * operation that fails later (a time-out, a dead peer) breaks the backend: the
 * remaining operations are passed over, their signals still happen locally so
 * that nothing hangs, and sync() and status() return the first error with its
 * text.  Every wait is bounded by epo_backend_config.timeout_s.
 */
#ifndef EPO_BACKEND_BACKEND_H
#define EPO_BACKEND_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ep_overlap.h"

#define EPO_MAX_WAITS 4 /* per operation */

typedef struct epo_backend epo_backend; /* one per group, made by ops->open */
typedef struct epo_queue epo_queue;
typedef struct epo_event epo_event;
typedef struct epo_window epo_window; /* symmetric: the same size on every rank */

typedef enum epo_queue_kind {
    EPO_QUEUE_COMPUTE = 0, /* GEMMs and passes over rows */
    EPO_QUEUE_COMM = 1,    /* exchanges; high priority */
    EPO_QUEUE_FILL = 2     /* runs on the compute unit where COMPUTE waits; low priority.
                            * Host: only while the caller waits in sync(). */
} epo_queue_kind;

typedef struct epo_ready {
    epo_event *event;              /* not NULL: an event, else a flag */
    const volatile uint64_t *flag; /* first of `count` words in local memory */
    uint64_t epoch;
    int count;        /* words; word i is written by rank i when count == ranks */
    int peer;         /* who writes it when count == 1; -1: word i, rank i */
    const char *what; /* static: "dispatch chunk", for messages */
    int chunk;        /* -1: none */
    int first, step;  /* step > 0: word i is written by rank first + i * step */
    /* Not NULL: a replayable call's flag, and `epoch` is added to this word when the
     * operation runs (modulo 2^64). */
    const uint64_t *counter;
} epo_ready;

/* Who writes word i. */
static inline int epo_ready_writer(const epo_ready *r, int i) {
    return r->step > 0 ? r->first + i * r->step : r->count == 1 && r->peer >= 0 ? r->peer : i;
}

static inline epo_ready epo_ready_event(epo_event *e) {
    epo_ready r = {e, NULL, 0, 0, -1, "event", -1, 0, 0, NULL};
    return r;
}

/* A group's ranks may be on several nodes, as many on each: node n has the ranks
 * [n * each, (n + 1) * each). */
typedef enum epo_scope {
    EPO_SCOPE_GROUP = 0, /* all ranks */
    EPO_SCOPE_NODE = 1,  /* those of this rank's node */
    EPO_SCOPE_LINK = 2   /* those that have this rank's place in their nodes */
} epo_scope;
/* The i-th of them is rank first + i * step; this rank is the me-th. */
typedef struct epo_peers {
    int first, step, count, me;
} epo_peers;
static inline epo_peers epo_peers_of(epo_scope scope, int rank, int ranks, int nodes) {
    const int each = ranks / nodes;
    switch (scope) {
    case EPO_SCOPE_NODE: return (epo_peers){rank / each * each, 1, each, rank % each};
    case EPO_SCOPE_LINK: return (epo_peers){rank % each, each, nodes, rank / each};
    default: return (epo_peers){0, 1, ranks, rank};
    }
}

/* What an operation waits for, signals, and is called in recordings. */
typedef struct epo_deps {
    epo_ready wait[EPO_MAX_WAITS];
    int nwait;
    epo_event *signal; /* may be NULL; remote flags belong to exchange */
    const char *name;  /* static, <= 23 characters: "fc1" */
    int kind;          /* epo_interval_kind */
    int chunk;
    /* gather, reduce: they write what the caller gets.  If the backend has broken when
     * they run, late, they write NaN (all bits set): rows that never came must not look
     * like results. */
    bool result;
} epo_deps;

typedef struct epo_backend_config {
    int rank, ranks;
    const int *members; /* as epo_group_config */
    int nmembers;
    const epo_bootstrap *bootstrap;
    epo_world *threads;
    double timeout_s, warn_s;
    void *nccl_comm; /* not NULL: rank, ranks and bootstrap are the communicator's */
    bool overlap;    /* exchanges run beside GEMMs */
    /* Not EPO_OK: this rank makes no group, as epo_fail_text() says.  `open` returns it, too, when
     * it has told those who wait for this rank. */
    epo_status wrong;
} epo_backend_config;

typedef struct epo_backend_info {
    const char *engine;
    const char *versions; /* owned by the backend */
    int rank, ranks;      /* of the group */
    int nodes;            /* that its ranks are on; more than one: exchange knows scopes */
    double link_gbs, link_us;
    int default_chunks;
    int flex_chunks;      /* of flex, which measures none; 0: default_chunks */
    uint64_t chunk_bytes; /* of rows: smaller chunks do not pay; 0: any do */
    /* Where `spread` is: own rows are expanded beside an exchange that sends so many bytes; with
     * less, or more than near_most, an exchange that has the device to itself had better be on
     * COMPUTE.  0: neither. */
    uint64_t near_bytes, near_most;
    bool one_sided;       /* exchange writes peers' windows; else two-sided */
    bool fused;           /* gemm takes an activation */
    bool parts;           /* exchange takes several parts */
    bool own_rows;        /* gather and reduce read `own`, and route_send numbers own rows */
    bool sums;            /* exchange sums rows on their way, where rows are 16-byte units */
    bool few;             /* ... by a few SMs, where exchange.few says so */
    uint32_t home;        /* flex's rows of a multiple of so many bytes can go home one by one in a
                           * forward, see epo_rows_reduce.home; 0: none can */
    bool home_asked;      /* ... and do, whatever would be measured */
    uint32_t ways;        /* bit 1 << epo_way for each that exchange has; 0: it has one */
    uint64_t window_page; /* a window's bytes are rounded up to it; 0: they are not */
    int window_flags;     /* that exchanges with one window may name; 0: any number */
    uint32_t types;       /* bit 1 << epo_dtype for each type served; 0: fp32 and bf16 */
} epo_backend_info;

/* How an exchange's rows get to peers while GEMMs run beside. */
typedef enum epo_way {
    EPO_WAY_STORES = 0, /* gathered and summed rows are stored by as many SMs as it takes */
    EPO_WAY_ENGINES = 1 /* a few SMs pack them, copy engines move them */
} epo_way;

/* One contiguous or gathered piece of an exchange between this rank and `peer`
 * (which may be this rank).  Gathered: row i comes from src + index[i]*row_bytes;
 * contiguous: index == NULL.  The destination is contiguous. */
typedef struct epo_segment {
    int peer;
    const void *src;      /* local */
    const int32_t *index; /* NULL or `rows` source rows; -1: zeros; -2: the row there stays as
                           * it is (on GPUs where `counter` is in use) */
    uint64_t dst_offset;  /* bytes into the peer's window */
    uint64_t rows;
    uint32_t row_bytes;
    /* > 0, where info->sums: row i is the fp32 sum over j ascending of the rows
     * index[i*sum + j], -1 passed over, rounded once to `type`. */
    int sum;
    epo_dtype type;
} epo_segment;
/* What a two-sided backend must post: where `peer`'s bytes arrive, in the same
 * order per peer as the peer's segments for this rank. */
typedef struct epo_arrival {
    int peer;
    uint64_t offset, bytes; /* in this rank's window */
} epo_arrival;

typedef struct epo_exchange {
    epo_window *window;
    const epo_segment *send;
    int nsend;
    const epo_arrival *recv;
    int nrecv;
    epo_scope scope; /* who takes part; segments name ranks of the group */
    /* After all of this call's bytes for peer p are visible there, word
     * flag_offset/8 + me (of the scope) of p's window becomes `epoch`; every peer is told,
     * also those that get no bytes, this rank included. */
    uint64_t flag_offset;
    uint64_t epoch;
    const uint64_t *counter; /* as epo_ready.counter */
    bool alone;              /* a hint: the device has nothing else to do meanwhile */
    bool near;               /* ... it has all but a pass over this rank's own rows */
    bool few;                /* where info->few: a GEMM that lends runs meanwhile */
    bool untold;             /* a hint: nobody waits for this flag, but for a later one */
    epo_way way;             /* a hint, where it is not alone; one of info->ways */
    /* A hint: so many bytes for peers are gathered by this and by the exchanges that follow
     * at once, so that no memory is asked for between them; 0: nothing is said. */
    uint64_t gathered;
    /* Where info->parts: several exchanges in one, in this order.  Part i sends the
     * segments from part_first[i] - part_first[0] on and tells of it at flag_offset +
     * i * flag_step.  0 and 1: all is one part. */
    int parts;
    const int *part_first; /* [parts + 1] */
    uint64_t flag_step;
} epo_exchange;

typedef enum epo_gemm_kind {
    EPO_GEMM_FORWARD = 0, /* c[m][n]  = a[m][k] b[n][k]^T         */
    EPO_GEMM_DGRAD = 1,   /* c[m][k]  = a[m][n] b[n][k]           */
    EPO_GEMM_WGRAD = 2    /* c[n][k] += a[m][n]^T b[m][k], sum over m; fresh: c = */
} epo_gemm_kind;
/* One GEMM per expert of [first, first+count).  m is that expert's rows.  Operand
 * bases are those of expert-major arrays (rows at row_first[e]) or of weight
 * stacks (expert e at e*n*k); arrays of El, host memory for the host engine.
 * fp32 accumulation; results do not depend on `first` and `count`. */
typedef struct epo_gemm {
    epo_gemm_kind kind;
    const void *a, *b;
    void *c;
    epo_dtype type;   /* of a, b and (not WGRAD) c */
    epo_dtype c_type; /* WGRAD: of c */
    int n, k;
    const uint64_t *row_first, *row_count;
    int first, count;
    bool fresh; /* WGRAD: c is written, and not read; zeros where an expert has no rows */
    /* The same numbers in ordinary memory, for a backend whose operation memory the
     * CPU cannot read; NULL: row_first and row_count are ordinary memory. */
    const uint64_t *cpu_first, *cpu_count;
    void *keep;  /* where gemm_keeps: rows of a are stored here, too, each at its place; or NULL */
    bool beside; /* exchanges that may need room on the device run meanwhile */
    bool lends;  /* ... one that is `few` does */
    epo_event *lent; /* what was issued before needs room until this; or NULL */
    /* Only where info->fused: the activation beside the product, NULL without.
     * FORWARD: `c` is h (NULL: see gemm_drops_h); act->a is made from it.  DGRAD: the product is
     * da, which is not kept; act->a, act->dh and act->dw are made from act->h, dh in h's place; `c`
     * is act->a.  The act's rows are those of the experts. */
    const struct epo_swiglu *act;
} epo_gemm;

/* The experts' two products of a pass in one operation, part by part of the experts:
 * `first` with its activation, then `second`, which reads what those made.  A part's
 * second product may run before another part's first, and its rows may go back while
 * other parts are computed.  first.first, first.count (and second's) say nothing here:
 * the parts do, which lie one behind the other.  The results are those of the same
 * products one by one, to the bit, whatever the parts. */
#define EPO_CHAIN_PARTS 16
/* Rows of second.c that other ranks get go straight to their windows, and not to second.c:
 * of expert e, rank r's rows begin at row first[e * ranks + r] and end where the next rank's
 * do, or the expert; they go to the rows from to[e * ranks + r] on. */
typedef struct epo_chain_direct {
    epo_window *window;
    uint64_t rows;               /* row 0, bytes into each rank's window */
    uint64_t dweights;           /* likewise, where act->dw goes */
    const int32_t *first, *to;   /* memory of operations */
    uint64_t flag_offset, epoch; /* as an exchange of the group tells, behind all parts */
    const uint64_t *counter;     /* as epo_exchange.counter */
} epo_chain_direct;
typedef struct epo_chain_part {
    int first, count;       /* experts */
    const epo_ready *ready; /* the part's rows of first.a are there; NULL: they are */
    epo_event *done;        /* the part's rows of second.c, and act->dw, are */
} epo_chain_part;
typedef struct epo_chain {
    epo_gemm first, second;
    const epo_chain_part *part;
    int parts;
    const epo_chain_direct *direct; /* NULL: all rows stay */
    epo_event *lent; /* exchanges issued before need room on the device until this; or NULL */
    bool hurry;      /* a hint: nothing runs beside the last parts' way back */
} epo_chain;

/* Wire rows: `elements`, a multiple of the group, in e4m3, then an fp32 scale for each
 * group; an element is its e4m3 times the scale. */
#define EPO_WIRE_GROUP 128
/* The least scale, 2^-126: a smaller one's inverse may be infinite, and zeros times that NaN. */
#define EPO_WIRE_LEAST 0x1p-126F
static inline uint64_t epo_wire_bytes(uint64_t elements) {
    return (elements + elements / EPO_WIRE_GROUP * sizeof(float) + 15) / 16 * 16;
}
typedef struct epo_wire_pack {
    void *dst;       /* [rows] wire rows */
    const void *src; /* [rows][elements] of `type` */
    uint64_t rows;
    int elements;
    epo_dtype type;
} epo_wire_pack;

/* Where info->own_rows: an index i below -1 is row -2 - i of `own`. */
typedef struct epo_rows_gather {
    void *dst;
    const void *src;
    const int32_t *index; /* [rows]; -1: write zeros; NULL: row i for row i */
    uint64_t rows;
    uint32_t row_bytes; /* of dst */
    const void *own;
    bool beside; /* a hint: GEMMs run meanwhile, a few SMs will do */
    int wire;    /* > 0: src and own are wire rows of so many elements, dst of `type` */
    epo_dtype type;
} epo_rows_gather;

/* Rows of a spread from one place: the i-th, row i (or index[i]) of src, has the places of
 * row first + i. */
#define EPO_SPREAD_RUNS 4
typedef struct epo_spread_run {
    const void *src;
    const int32_t *index; /* NULL: row i */
    uint64_t first, rows;
} epo_spread_run;
/* Each row to its places among dst's rows, read once; rows of dst with pad[i] < 0 become
 * zeros. */
typedef struct epo_rows_spread {
    void *dst;
    epo_spread_run run[EPO_SPREAD_RUNS];
    int runs;
    const int32_t *place; /* [rows][width], -1: none */
    int width;            /* at most 32 */
    const int32_t *pad;   /* [dst_rows]; NULL: nothing becomes zeros */
    uint64_t dst_rows;
    uint32_t row_bytes;
} epo_rows_spread;

/* Rows that came home one by one: rank r's lie in src from first[r] on.  Each rank's are summed
 * by themselves, in ascending j, and rounded to the type; then these sums in rank order: the
 * bits are those of ranks that send their sums. */
typedef struct epo_rows_home {
    const int32_t *first; /* [ranks], ordinary memory, read before the call returns */
    int ranks, rank;      /* `own` has rank's */
} epo_rows_home;

/* dst[i] = sum over j ascending, in fp32, of src[index[i*width + j]], -1 passed
 * over, rounded once to `type`. */
typedef struct epo_rows_reduce {
    void *dst;
    const void *src;
    const int32_t *index; /* [rows][width] */
    uint64_t rows;
    int width;
    int elements; /* per row */
    epo_dtype type;
    const void *own;           /* as in a gather */
    const epo_rows_home *home; /* NULL: one sum of all */
} epo_rows_reduce;

/* SwiGLU over expert-major rows [row, row+rows): h[.][2F] (gate, up), w[.] fp32.
 * forward:  a = w * silu(g) * u
 * backward: from da: dh, dw (fp32, sum in a fixed order), and `a` again (for
 *           wgrad; may be NULL).  In place is allowed: dh == h, a == da.
 * Where w == 0, a and dh are zero whatever h and da hold (alignment rows hold
 * anything, NaN too); dw is computed all the same. */
typedef struct epo_swiglu {
    const void *h;
    const float *w;
    void *a;
    const void *da; /* NULL: forward */
    void *dh;
    float *dw;
    uint64_t row, rows;
    int ffn;
    epo_dtype type;
} epo_swiglu;

/* A caller's routing where operations can read it. */
typedef struct epo_routes {
    const int64_t *experts; /* [tokens][top_k] */
    int tokens, top_k;
    int experts_all, ranks; /* E, R */
    int shares, share;      /* tokens t with t % shares == share count, others are as if not
                             * routed; shares 0 or 1: all */
    /* As epo_route_drop; EPO_ROUTE_UNLIMITED: nothing is dropped. */
    uint64_t capacity;
    bool by_weight;
    const float *weights; /* [tokens][top_k]; NULL: all 1.0 */
    uint64_t fill;        /* send rows, where some are padding (no slot's); else 0 */
    int chunks;           /* > 0: chunk_rows is counted too, and flex_send may follow */
} epo_routes;
/* What route_count tells the CPU, as epo_route_check, _drop and _count do. */
typedef struct epo_route_counts {
    uint32_t *expert_rows, *rank_rows; /* [E], [R]; of what was not dropped */
    uint32_t *chunk_rows; /* [2][R][n]: rows to each rank by first, then by last chunk */
    uint64_t dropped;
    uint64_t bad; /* first slot out of range; tokens * top_k: none */
    int64_t bad_value;
} epo_route_counts;

/* flex's maps by the device, as epo_route_flex_make_send and _recv make them; meta rows
 * as in route_flex_step.h. */
#define EPO_FLEX_RANKS 64
#define EPO_FLEX_COLUMNS 5000 /* E + 2 * R * chunks, at most */
typedef struct epo_flex_send {
    int width;
    int32_t *token, *sum, *slot_weight;
    int32_t *meta; /* [rows][words], blocks of destinations in rank order */
} epo_flex_send;
typedef struct epo_flex_receive {
    int ranks, local, top_k, chunks;
    const int32_t *meta; /* [received][words], sources in rank order */
    /* Ordinary memory, read before the call returns. */
    const int32_t *base;    /* [R]: first row of each source */
    const int32_t *target;  /* [R][El]: where each source's rows of an expert begin */
    const int32_t *returns; /* [R][n]: added to a row's place in the source's block, its row
                             * in the returning order */
    uint64_t received, rows;
    int32_t *expand, *back; /* [rows], [received][K] */
    float *weight;          /* [rows]: 0 for alignment */
} epo_flex_receive;

/* A routing whose counts the CPU never learns: every rank's part of each expert is full,
 * so send rows have their places beforehand.  All in memory of ops->alloc. */
typedef struct epo_replay_route {
    void *scratch;                /* replay_scratch bytes, for this alone */
    const uint64_t *expert_first; /* [E] */
    const uint64_t *own_row;      /* [E] or NULL; both as in route_send */
    int32_t *token, *slot, *row;
    bool overflow_is_error; /* else what is beyond the capacity is dropped */
} epo_replay_route;

/* flex's maps of such a routing, behind replay_route: a rank has a row for each of its tokens
 * at every rank, in token order, whether it is sent or not.  All in memory of ops->alloc. */
typedef struct epo_replay_flex {
    const int32_t *row;           /* [T][K], replay_route's */
    const uint64_t *expert_first; /* [E], replay_route's */
    const uint64_t *target;       /* [E]: where this rank's rows begin at the owner */
    const int32_t *chunk;         /* [El]: of each local expert, on every rank */
    int chunks, width;
    int32_t *meta;        /* [R][T][2K], to send: place at that rank or -1; router weight */
    int32_t *token;       /* [n][R][T]: t where chunk n is the first of that rank's, else -2 */
    int32_t *sum;         /* [T][width]: what comes back, blocks of T rows in rank order */
    int32_t *slot_weight; /* [T][K] */
} epo_replay_flex;
typedef struct epo_replay_arrived {
    const int32_t *meta; /* [received][2K] */
    uint64_t received, rows;
    int top_k;
    int32_t *expand, *back; /* [rows], [received][K] */
    float *weight;          /* [rows] */
} epo_replay_arrived;

/* A collective call, as all ranks make it. */
typedef enum epo_turn_kind {
    EPO_TURN_BUFFER,     /* buffer_create */
    EPO_TURN_BUFFER_END, /* buffer_destroy */
    EPO_TURN_PLAN,       /* plan_create */
    EPO_TURN_DISPATCH,
    EPO_TURN_COMBINE,
    EPO_TURN_FORWARD,
    EPO_TURN_BACKWARD,
    EPO_TURN_ALLREDUCE,
    EPO_TURN_BARRIER
} epo_turn_kind;
/* What it is made with, which has to be the same on all ranks, or their rows do not fit. */
typedef struct epo_turn_with {
    int buffer; /* among those of the group */
    int ffn;    /* of the layer; 0 where the experts are the caller's */
    int saved;  /* epo_saved_mode */
    int own;    /* the experts are the caller's */
    int again;  /* rows are sent once more for the weight gradients */
    int extra;  /* weights' gradients travel: 1 no, 2 yes; 0: this rank has none, or the call */
} epo_turn_with;
typedef struct epo_turn {
    epo_turn_kind kind;
    uint64_t plan; /* its number among the plans of its buffer; 0: none */
    epo_turn_with with;
} epo_turn;
/* "saved of the layer is 0 on rank 0 and 2 on rank 1", the first that differs; false: none. */
bool epo_turn_with_differs(const epo_turn_with *mine, const epo_turn_with *other, int rank,
                           int peer, char *text, size_t size);

/* What two ranks say of one call: "the ranks disagree: rank 0 is in forward of plan 1, rank 1 in
 * backward of plan 1; ...", or what they make it with; false: the same. */
bool epo_turn_other(const epo_turn *mine, const epo_turn *other, int rank, int peer, char *text,
                    size_t size);

/* Arrays that an operation names (segments, arrivals, indices, row_first) stay
 * valid until it has run.  Indices, row_first and row_count lie in memory of
 * ops->alloc; segments, arrivals and the structs themselves in ordinary memory,
 * the structs read before the call returns, by a backend that has route_count
 * segments and arrivals, too. */
typedef struct epo_backend_ops {
    size_t size;
    const char *name;

    /* epo_world_create; both NULL: ranks cannot be threads.  The first member of
     * struct epo_world is an epo_object (engine.h), filled by the engine. */
    epo_status (*world_create)(int ranks, epo_world **out);
    void (*world_destroy)(epo_world *world);

    /* [collective]  Meets the ranks.  On failure *out stays untouched. */
    epo_status (*open)(const epo_backend_config *config, epo_backend **out);
    /* Ends the queues.  `broken`: do not wait for peers. */
    void (*close)(epo_backend *be, bool broken);
    const epo_backend_info *(*info)(const epo_backend *be);
    /* The first late error, EPO_OK if none; its text becomes epo_error(). */
    epo_status (*status)(epo_backend *be);

    /* [collective], host side, bounded: for creation and small sums. */
    epo_status (*barrier)(epo_backend *be);
    epo_status (*allgather)(epo_backend *be, const void *mine, size_t bytes, void *all);
    epo_status (*allreduce)(epo_backend *be, float *data, uint64_t count, epo_stream stream);

    /* Memory that operations use, 64-byte aligned; counted in epo_stats.  The
     * text of EPO_E_NOMEM has need and have. */
    epo_status (*alloc)(epo_backend *be, uint64_t bytes, void **out);
    void (*free)(epo_backend *be, void *ptr, uint64_t bytes);
    /* Copies from and to memory of operations (alloc, windows), complete on
     * return; the caller has synchronised.  NULL: it is ordinary memory. */
    epo_status (*read)(epo_backend *be, void *dst, const void *src, uint64_t bytes);
    epo_status (*write)(epo_backend *be, void *dst, const void *src, uint64_t bytes);
    /* [collective]  Zeroed. */
    epo_status (*window_create)(epo_backend *be, uint64_t bytes, epo_window **out);
    void (*window_destroy)(epo_backend *be, epo_window *window);
    void *(*window_local)(epo_window *window);

    epo_status (*queue_create)(epo_backend *be, epo_queue_kind kind, epo_queue **out);
    void (*queue_destroy)(epo_backend *be, epo_queue *queue);
    epo_status (*event_create)(epo_backend *be, epo_event **out);
    void (*event_destroy)(epo_backend *be, epo_event *event);
    /* Has the last signal issued for it happened?  NULL: use `call`. */
    bool (*event_query)(epo_backend *be, epo_event *event);
    /* A mark in queue order, made if *mark is NULL, and the time between two of them once
     * both have happened.  For measurements only: false, and nothing is lost, where a mark
     * cannot be had (the queue is being captured).  Both or none (NULL). */
    bool (*mark)(epo_queue *queue, epo_event **mark);
    bool (*between)(epo_backend *be, epo_event *from, epo_event *to, double *seconds);
    /* Later operations of the queues come after what the caller's stream holds now,
     * and the caller's stream continues after `event`.  Host: the first does
     * nothing, the second is sync(). */
    epo_status (*stream_enter)(epo_backend *be, epo_queue *const *queues, int count,
                               epo_stream stream);
    epo_status (*stream_leave)(epo_backend *be, epo_event *event, epo_stream stream);
    /* The caller's thread waits, bounded, until `event` is signalled; the host's
     * FILL queues run meanwhile.  Returns status(). */
    epo_status (*sync)(epo_backend *be, epo_event *event);

    epo_status (*exchange)(epo_queue *q, const epo_exchange *x, const epo_deps *deps);
    epo_status (*gather)(epo_queue *q, const epo_rows_gather *g, const epo_deps *deps);
    /* NULL: gather serves. */
    epo_status (*spread)(epo_queue *q, const epo_rows_spread *s, const epo_deps *deps);
    /* NULL: rows travel as they are, and gather knows no wire rows. */
    epo_status (*wire_pack)(epo_queue *q, const epo_wire_pack *p, const epo_deps *deps);
    epo_status (*reduce)(epo_queue *q, const epo_rows_reduce *r, const epo_deps *deps);
    epo_status (*gemm)(epo_queue *q, const epo_gemm *g, const epo_deps *deps);
    /* NULL: no.  Can this FORWARD product with an activation do without `c`, where h is not
     * wanted? */
    bool (*gemm_drops_h)(epo_backend *be, const epo_gemm *g);
    /* NULL: no.  Can this product of rows (FORWARD, DGRAD) keep them on its way? */
    bool (*gemm_keeps)(epo_backend *be, const epo_gemm *g);
    epo_status (*swiglu)(epo_queue *q, const epo_swiglu *s, const epo_deps *deps);
    /* Both or none (NULL).  chain_covers: can these products, in as many parts, be one
     * operation?  The same answer on every rank for the same shapes. */
    bool (*chain_covers)(epo_backend *be, const epo_chain *chain);
    epo_status (*chain)(epo_queue *q, const epo_chain *chain, const epo_deps *deps);
    epo_status (*zero)(epo_queue *q, void *ptr, uint64_t bytes, const epo_deps *deps);
    /* If the backend has broken when it runs, the bytes of ptr and ptr2 become NaN, as
     * with deps->result.  NULL: a broken backend's operations do not run at all. */
    epo_status (*poison)(epo_queue *q, void *ptr, uint64_t bytes, void *ptr2, uint64_t bytes2,
                         const epo_deps *deps);
    /* Contiguous bytes beside other queues' work (a copy engine); NULL: there is no
     * such way, gather serves. */
    epo_status (*copy)(epo_queue *q, void *dst, const void *src, uint64_t bytes,
                       const epo_deps *deps);
    /* Routing without the CPU; all three or none (NULL).  route_count: complete on
     * return, after what the queue holds.  route_send: the maps of epo_route_send for
     * the routing counted last, -1 in token and slot where `fill` says so; expert_first
     * is ordinary memory, read before the call returns, as own_row[E] is: NULL, or the
     * expert-major row on this rank where its own rows for the expert begin, UINT64_MAX for
     * experts elsewhere; then row[] holds -2 - that row for its own.  route_pad: as epo_route_pad,
     * first and count for the CPU. */
    epo_status (*route_count)(epo_queue *q, const epo_routes *routes, epo_route_counts *out);
    epo_status (*route_send)(epo_queue *q, const epo_routes *routes, const uint64_t *expert_first,
                             const uint64_t *own_row, int32_t *token, int32_t *slot, int32_t *row,
                             const epo_deps *deps);
    epo_status (*route_pad)(epo_queue *q, const uint64_t *first, const uint64_t *count, int experts,
                            uint64_t rows, int32_t *index, const epo_deps *deps);
    /* flex's maps; both or none (NULL).  flex_send: of the routing counted last. */
    epo_status (*flex_send)(epo_queue *q, const epo_routes *routes, const epo_flex_send *out,
                            const epo_deps *deps);
    epo_status (*flex_receive)(epo_queue *q, const epo_flex_receive *in, const epo_deps *deps);
    /* `fn` in queue order.  Host: on the queue's thread; it must not call the API. */
    epo_status (*call)(epo_queue *q, void (*fn)(void *ctx), void *ctx, const epo_deps *deps);

    /* `fn`, which enqueues on `stream`, the queue's, in queue order, at once.  NULL: there
     * are no streams, `call` serves. */
    epo_status (*run)(epo_queue *q, epo_status (*fn)(void *ctx, epo_stream stream), void *ctx,
                      const epo_deps *deps);

    /* Calls that a CUDA graph may capture and replay; all or none (NULL).  replay_open: can
     * this backend?  replay_enter: as stream_enter, after adding 1 to each counter in the
     * order of `stream`; *capture: of the capture under way, 0: none.  replay_leave: the
     * stream goes on after all that the queues hold; always call it.  replay_write: complete
     * on return, to memory that no operation uses.  replay_route: the routing is judged where
     * it is counted; what is wrong breaks the backend late.  replay_dropped: slots, of all
     * that have run. */
    epo_status (*replay_open)(epo_backend *be);
    epo_status (*replay_enter)(epo_backend *be, epo_queue *const *queues, int count,
                               uint64_t *const *counters, int ncounters, epo_stream stream,
                               uint64_t *capture);
    epo_status (*replay_leave)(epo_backend *be, epo_stream stream);
    epo_status (*replay_write)(epo_backend *be, void *dst, const void *src, uint64_t bytes);
    uint64_t (*replay_scratch)(const epo_routes *routes);
    epo_status (*replay_route)(epo_queue *q, const epo_routes *routes, const epo_replay_route *r,
                               const epo_deps *deps);
    uint64_t (*replay_dropped)(const epo_backend *be);
    /* flex in such calls; both or none (NULL). */
    epo_status (*replay_flex_send)(epo_queue *q, const epo_routes *routes, const epo_replay_flex *f,
                                   const epo_deps *deps);
    epo_status (*replay_flex_arrived)(epo_queue *q, const epo_replay_arrived *a,
                                      const epo_deps *deps);

    /* Recording: as epo_record_start and _stop. */
    epo_status (*record_start)(epo_backend *be, uint64_t capacity);
    epo_status (*record_stop)(epo_backend *be, const epo_interval **out, uint64_t *count,
                              uint64_t *dropped);
    /* Bytes held now and at most, by alloc and windows. */
    void (*memory)(epo_backend *be, uint64_t *now, uint64_t *peak);
    /* Ends all queued work at once, in error: waits are released. */
    void (*abort)(epo_backend *be, epo_status status, const char *text);
    /* A collective call begins, or, `refused`, this rank returned from it with an error
     * before it told anybody: peers that wait for it in the same call, or for its part in
     * another call, end at once, in error.  Every rank counts every collective call.
     * EPO_E_PEER: another rank is known to have made this call otherwise; nobody waits for it.
     * NULL: they wait for the limit. */
    epo_status (*turn)(epo_backend *be, const epo_turn *turn, bool refused);
    /* The call is done here, so all have begun it.  EPO_E_PEER: not all the same. */
    epo_status (*turn_end)(epo_backend *be);
} epo_backend_ops;

/* The one backend linked into an engine module. */
const epo_backend_ops *epo_backend_get(void);

#endif
