/* SPDX-License-Identifier: Apache-2.0
 *
 * moe.h - the engine's objects and who calls whom inside lib/moe.
 *
 *   engine.c    the table of epo_engine over epo_backend_get()
 *   input.c     structs of other header versions, numbers and their limits
 *   group.c     ranks, queues, events; broken or not
 *   pool.c      memory that is kept between passes
 *   buffer.c    one window and what lies where in it
 *   capacity.c  what an expert can take of each rank, and what is dropped
 *   tune.c      how many chunks, by measuring
 *   plan.c      counts exchanged, errors agreed; dispatch_*.c make the maps
 *   link.c      flex across nodes: one row a token and node; link_maps.c, link_pass.c, link.h
 *   near.c      flex in one chunk: own rows are expanded beside the others' way
 *   pass.h      what the parts of a pass are to each other; the parts:
 *   pipeline.c  the pass: dispatch, expand; returns.c: the way back; rows.c: both as calls
 *   experts.c   the GEMMs of a pass, forward and backward; chain.c: in one operation
 *   memory.c    what passes take, and the forward's rows in the backward pass
 *   layer.c     layer and saved objects; own.c: experts that are the caller's function
 *   schedule.c  two micro-batches, node by node
 *   wgrad.c     weight gradients, at once or delayed
 *   stats.c     figures
 */
#ifndef EPO_MOE_MOE_H
#define EPO_MOE_MOE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"
#include "backend/engine.h"
#include "backend/route.h"
#include "core/size.h"
#include "core/status.h"
#include "moe/pool.h"
#include "moe/tune.h"

/* ---- input.c ---------------------------------------------------------- */

/* Copies a caller's struct of another header version over *dst, which holds the
 * defaults: what the caller's lacks stays; bytes that this build does not know
 * must be zero.  `need` bytes at least must be there. */
epo_status moe_input(void *dst, size_t size, const void *src, size_t need, const char *name);
/* The reverse: writes what the caller's struct has room for, `size` stays his. */
epo_status moe_output(void *dst, const void *src, size_t size, const char *name);
epo_status moe_check_range(const char *name, int64_t found, int64_t low, int64_t high);
epo_status moe_check_type(const epo_backend_info *info, const char *name, epo_dtype type);
epo_status moe_check_experts(int experts, int ranks);
size_t moe_type_size(epo_dtype type);

/* ---- group.c ---------------------------------------------------------- */

typedef struct moe_wgrad moe_wgrad;
enum { MOE_WGRAD_ENDS = 8 };

/* Weight gradients that are not yet in dw1 and dw2, oldest first. */
typedef struct moe_wgrad_queue {
    moe_wgrad *head, *tail;
    uint64_t bytes, limit;
    epo_event *spare[MOE_WGRAD_ENDS]; /* ends of entries that are gone, for new ones */
    int nspare;
} moe_wgrad_queue;

/* Dispatches, combines, forwards and backwards: all of them in a hash, and the last one.  Plans'
 * records tell it, too: ranks on several machines have nothing else that compares them. */
typedef struct moe_passes {
    uint32_t hash, count;
    uint64_t without, with; /* a bit for each of the last 64: row_dweights are NULL, or given */
    epo_turn last;
} moe_passes;

/* A function of the caller's that runs inside a call. */
typedef enum moe_within {
    MOE_OUTSIDE,
    MOE_IN_NODE,
    MOE_IN_ISSUED,
    MOE_IN_READY,
    MOE_IN_EXPERT,
    MOE_IN_ALLOC,
    MOE_IN_FREE
} moe_within;

struct epo_group {
    epo_object object;
    const epo_backend_ops *ops;
    epo_backend *be;
    int rank, ranks;
    int tp; /* ranks that hold the same tokens; 1: none do */
    bool overlap, delay_wgrad;
    epo_dispatcher dispatcher;
    int chunks;
    char *reason;
    epo_queue *compute, *comm, *fill; /* serial: fill is the compute queue */
    epo_event *rows;                  /* compute: rows to send are ready */
    epo_event *read;                  /* compute: a slot was read for the last time */
    epo_event *sent;                  /* comm: what this rank sends has left its memory */
    epo_event *done;                  /* compute: the outputs are complete */
    epo_event *grad;                  /* compute: operands of weight gradients are ready */
    epo_event *fill_done;
    /* Where the backend copies beside other work: rows that are kept for later go
     * this way while GEMMs read them in the window. */
    epo_queue *keep; /* NULL: no such way */
    epo_event *kept, *used;
    /* Rows read in place, more than one chunk: odd chunks take this way, so that the
     * end of one chunk's GEMM and the beginning of the next one's share the device. */
    epo_queue *odd;
    epo_event *odd_grad, *odd_used;
    epo_event *pair_done[2];          /* of a schedule's forward and backward */
    epo_event *part[EPO_CHAIN_PARTS]; /* of a chain: the chunk's rows are ready */
    epo_event *returned;              /* a chunk's sums are on their way */
    epo_queue *link;                  /* to other nodes; NULL: there are none */
    epo_event *linked;                /* link: what this rank sends there has left its memory */
    moe_pool pool;
    moe_replay replay;
    void *(*alloc)(void *ctx, uint64_t bytes); /* the caller's memory; NULL: the backend's */
    void (*release)(void *ctx, void *ptr, uint64_t bytes);
    void *alloc_ctx;
    moe_wgrad_queue wgrads;
    epo_stats stats;
    epo_saved *spare, *spare_tail; /* handles, kept so that a second use is found */
    int nspare;
    int buffers, layers, saved; /* made and not yet gone */
    const char *home_said[16];  /* of moe_home_in_vain */
    int buffers_asked;          /* calls of buffer_create: numbers, the same on all ranks */
    moe_passes passes;          /* since the last plan */
    moe_within within;          /* on the calling thread */
};

/* EPO_OK, or the error that broke the group. */
epo_status moe_group_ok(epo_group *group);
/* A function of the caller's begins; what is returned goes to moe_group_back at its end. */
static inline moe_within moe_group_out(epo_group *group, moe_within where) {
    const moe_within was = group->within;
    group->within = where;
    return was;
}
static inline void moe_group_back(epo_group *group, moe_within was) { group->within = was; }
/* EPO_E_STATE inside one, whose call goes on with what this one would change or wait for. */
epo_status moe_group_outside(const epo_group *group, const char *call);
/* A collective call failed on this rank after peers may have begun it: ends the
 * group's work, so that no one waits here; returns `status`. */
epo_status moe_group_break(epo_group *group, epo_status status);
/* The end of a call that graphs may capture, whatever it came to: the first failure and its text
 * stay. */
epo_status moe_group_replayed(epo_group *group, epo_stream stream, epo_status status);
/* Of a destroy whose object is gone: EPO_E_STATE would say that it was kept. */
epo_status moe_gone(epo_status status);
/* A collective call begins; `wrong`, which is returned: this rank refuses it, so that
 * its peers do not wait for it.  A call that another rank makes otherwise is one that fails. */
epo_status moe_group_turn(epo_group *group, epo_turn_kind kind, const epo_plan *plan,
                          epo_status wrong);
/* The same of what is done with a buffer. */
epo_status moe_buffer_turn(epo_buffer *buffer, epo_turn_kind kind, epo_status wrong);
/* The same of a pass over a layer (either may be NULL where `wrong`). */
epo_status moe_layer_turn(epo_group *group, epo_turn_kind kind, const epo_layer *layer,
                          const epo_plan *plan, epo_status wrong);
/* Of rank 0 and of `rank`: EPO_E_PEER, naming the last where it is another. */
epo_status moe_passes_agree(const moe_passes *first, const moe_passes *other, int rank);
/* The same of a combine; extra: as epo_turn_with. */
epo_status moe_combine_turn(epo_group *group, const epo_plan *plan, int extra, epo_status wrong);
/* Rows went through: was it the same call on all ranks? */
epo_status moe_group_turn_end(epo_group *group);
/* The calling thread waits for `wait` (a flag or an event). */
epo_status moe_group_wait(epo_group *group, epo_ready wait, const char *name);
/* Until this rank's queues hold nothing more; FILL excepted. */
epo_status moe_group_drain(epo_group *group);
epo_status moe_group_read(epo_group *group, void *dst, const void *src, uint64_t bytes);

/* ---- buffer.c --------------------------------------------------------- */

/* One way through the window: the slot, the flags that say it was filled, the
 * flags that say it was read, and how often it was used. */
typedef struct moe_slot {
    uint64_t rows, extra; /* offsets: token rows, and what travels beside them */
    uint64_t arrive;      /* [chunks][ranks] words */
    uint64_t credit;      /* [ranks] words */
    uint64_t expanded;    /* [chunks][ranks] words: flex, this rank's word tells this rank */
    uint64_t use;
} moe_slot;

struct epo_buffer {
    epo_object object;
    epo_group *group;
    int number; /* among the group's */
    int experts, local, hidden, top_k, max_tokens, chunks, align;
    /* Across nodes flex exchanges rows within the node (`peers`), for its own tokens and for
     * those that came from other nodes: `experts` are the node's then, and a rank sends for
     * up to most_tokens.  Else all ranks, all experts, and max_tokens. */
    bool links;
    epo_scope scope;
    epo_peers peers;
    int all_experts, most_tokens;
    epo_dtype type;
    epo_dispatcher dispatcher;
    double capacity_factor;
    int capacity; /* -1: by the factor */
    epo_overflow overflow;
    bool pad; /* to the capacity */
    uint64_t row_bytes;
    epo_wire wire;
    uint64_t wire_bytes; /* of a row in dispatch's slot */
    uint64_t *max_rows;  /* [ranks] */
    epo_window *window;
    uint64_t window_bytes, window_flags;
    moe_slot dispatch, combine;
    /* links: own rows and those of other nodes' tokens, as they are sent on; and what comes
     * home, a node's sum for each token: own ones first, then max_tokens for each other. */
    moe_slot relay, home;
    uint64_t link_arrive, link_expert, link_weight; /* once a plan: experts and weights */
    uint64_t links_made;
    /* Plans: counts of every rank, twice (a rank may be one plan ahead); meta. */
    uint64_t counts, counts_arrive, counts_bytes;
    uint64_t meta_arrive, meta_credit, meta_expert, meta_weight;
    uint64_t meta_rows; /* flex on the device: in place of the two before */
    uint64_t plans_made;
    int plans;
    bool replays;      /* calls may be captured in CUDA graphs */
    uint64_t counters; /* then: uses of meta, dispatch, combine */
    moe_tune tune;
};

/* As many as asked for, or as the group or the backend says. */
int moe_buffer_chunks(const epo_group *g, int asked, const epo_buffer *b);
/* Nobody named a number: the buffer's becomes the most that may be chosen. */
void moe_tune_open(epo_buffer *b, bool free_choice);
void moe_tune_close(epo_buffer *b);
/* What a file gave; must be the same on all ranks. */
uint32_t moe_tune_digest(const epo_buffer *b);
/* Before a plan's records: this rank's times of the class that is due. */
void moe_tune_report(epo_buffer *b, float seconds[MOE_TUNE_CHOICES]);
/* After them: the slowest rank's, 0 where a rank has none. */
void moe_tune_learn(epo_buffer *b, const float *slowest);
/* Chunks and way of a plan with at most `tokens` on a rank; tune_choice < 0: it is not a
 * measurement. */
void moe_tune_choose(epo_plan *p, int tokens);
/* Around a pass over a layer. */
void moe_tune_start(epo_plan *plan, moe_tune_pass pass);
void moe_tune_stop(epo_plan *plan, moe_tune_pass pass);

static inline void *moe_buffer_at(const epo_buffer *buffer, uint64_t offset) {
    return (char *)buffer->group->ops->window_local(buffer->window) + offset;
}
/* Where the device counts the uses of what the flag belongs to; NULL: the CPU does. */
static inline uint64_t *moe_buffer_counter(const epo_buffer *b, uint64_t flag) {
    if (!b->replays)
        return NULL;
    uint64_t *counters = moe_buffer_at(b, b->counters);
    return counters + (flag >= b->combine.arrive ? 2 : flag >= b->dispatch.arrive ? 1 : 0);
}
static inline void moe_slot_next(const epo_buffer *b, moe_slot *slot) {
    slot->use += b->replays ? 0 : 1;
}
/* Elements of a row where rows travel in e4m3, else 0. */
static inline int moe_buffer_wire(const epo_buffer *b) {
    return b->wire != EPO_WIRE_ROWS ? b->hidden : 0;
}
static inline epo_route_shape moe_buffer_shape(const epo_buffer *b, int top_k) {
    /* alltoall: what comes first and what goes back last is hidden by nothing.  With flex
     * the first chunk has most of the bytes whatever its size. */
    return (epo_route_shape){.ranks = b->peers.count,
                             .experts = b->experts,
                             .top_k = top_k,
                             .chunks = b->chunks,
                             .align = b->align,
                             .tapered = b->dispatcher == EPO_DISPATCH_ALLTOALL};
}
/* Wait until the words of the buffer's peers at `offset` of the own window reach `epoch`. */
epo_ready moe_buffer_flag(const epo_buffer *buffer, uint64_t offset, uint64_t epoch,
                          const char *what, int chunk);
/* The same for those of other nodes. */
epo_ready moe_buffer_link_flag(const epo_buffer *buffer, uint64_t offset, uint64_t epoch,
                               const char *what, int chunk);
/* Do ranks of the scope write each other's memory? */
bool moe_group_reaches(const epo_group *group, epo_scope scope);

/* ---- capacity.c -------------------------------------------------------- */

/* Takes the caller's capacity over, checked. */
epo_status moe_capacity_set(epo_buffer *b, const epo_buffer_config *c);
/* Rows that a rank with such a routing may send to one expert, or EPO_ROUTE_UNLIMITED. */
uint64_t moe_capacity_of(const epo_buffer *b, int tokens, int top_k);
/* Are slots beyond the capacity dropped? */
static inline bool moe_capacity_drops(const epo_buffer *b) {
    return b->overflow != EPO_OVERFLOW_ERROR && moe_capacity_of(b, 0, 1) != EPO_ROUTE_UNLIMITED;
}
/* On the CPU: experts[T][K] after it hold -1 where a slot was dropped. */
epo_status moe_capacity_drop(const epo_buffer *b, const epo_routing *r, int32_t *experts,
                             uint64_t *dropped);
/* EPO_E_OVERFLOW, naming the first expert with more than this rank may send. */
epo_status moe_capacity_check(const epo_buffer *b, const epo_routing *r, const uint32_t *rows);

/* Rows that fill up to the capacity: among this rank's own, and what it sends to other
 * ranks, out and back. */
typedef struct moe_padding {
    uint64_t rows, out, back;
} moe_padding;
/* counts[R][E] become the capacities of each rank; tells what that adds. */
moe_padding moe_capacity_pad(const epo_buffer *b, const uint64_t *capacity, uint32_t *counts);

/* ---- plan.c, dispatch_*.c --------------------------------------------- */

/* One contiguous run of rows at its destination. */
typedef struct moe_piece {
    int peer;
    const int32_t *index; /* NULL: contiguous at the source too */
    uint64_t src_row, dst_row, rows;
} moe_piece;

/* What goes out and what comes in, chunk after chunk. */
typedef struct moe_lane {
    moe_piece *send, *recv;
    int *send_first, *recv_first; /* [chunks + 1] */
    epo_segment *segments;        /* filled when a pass issues it; 2 per piece */
    epo_arrival *arrivals;
} moe_lane;

typedef struct moe_link moe_link;

struct epo_plan {
    epo_object object;
    epo_buffer *buffer;
    int refs;
    int tokens, top_k, chunks;
    epo_way way;                 /* of rows that travel beside GEMMs */
    int tune_class, tune_choice; /* < 0: its passes are not timed */
    moe_tune_stage tune_stage;   /* what they are timed for */
    uint64_t number;             /* among the buffer's plans: the same on all ranks */
    uint64_t rows, dropped;
    moe_padding padding;
    uint64_t *first, *count;             /* [El], for the CPU */
    const uint64_t *op_first, *op_count; /* the same, for operations */
    moe_lane dispatch, combine;
    const int32_t *token; /* flex: [sent], whose row each is */
    uint64_t sent;
    const int32_t *expand;                     /* [rows]: row of the dispatch slot, or -1 */
    const int32_t *pad;                        /* [rows]: i or -1 */
    float *weight;                             /* [rows] */
    const int32_t *returns_first, *returns_to; /* on the device: epo_route_returns */
    bool plain;          /* flex in one chunk: a backward's weight gradients, then the way back */
    bool singly;         /* flex in one chunk: a forward's rows go home one by one */
    const int32_t *home; /* then: [T][K], rows of the combine slot, -2 - row for own ones, -1 */
    int32_t *home_first; /* where each rank's begin there */
    moe_lane homeward;   /* the pieces that peers get */
    /* Rows that go back: flex sums a token's rows here first. */
    uint64_t back_rows;
    const int32_t *back;  /* [back_rows][K], NULL: expert-major rows go back */
    uint64_t *back_first; /* [chunks + 1] */
    /* Own rows stay where the experts left them; the maps below number those apart. */
    bool own_stays;
    /* At the owner, over rows of the combine slot. */
    const int32_t *sum; /* [T][sum_width] */
    int sum_width;
    const int32_t *slot_weight; /* [T*K] floats beside the rows, or -1 */
    moe_link *link;             /* flex across nodes; else NULL */
    moe_arena arena;
    uint64_t capture; /* it was captured there; 0: it was not */
    void *memory;     /* one allocation for all CPU arrays */
};

/* As moe_buffer_shape, in the plan's chunks. */
static inline epo_route_shape moe_plan_shape(const epo_plan *p) {
    epo_route_shape s = moe_buffer_shape(p->buffer, p->top_k);
    s.chunks = p->chunks;
    return s;
}
/* Bytes of what a rank tells the others about its routing; chunks: 0 where nobody asks
 * for rows by chunk. */
uint64_t moe_plan_record_bytes(int experts, int ranks, int chunks);

/* What plan.c knows when a dispatcher makes its maps. */
typedef struct moe_making {
    epo_plan *plan;
    epo_route_shape shape;
    const int32_t *experts;    /* [T][K] */
    const uint32_t *counts;    /* [R][E] */
    const uint32_t *rank_rows; /* [R][R]: rows of source s for destination d at [s][d] */
    /* flex on the device: [R][2][R][n], each source's rows by first and by last chunk. */
    const uint32_t *chunk_rows;
    const uint64_t *capacity; /* [R], where plans are padded to it; else NULL */
    const float *weights;     /* [T*K], operation memory; flex on the device: or NULL */
    const epo_routing *routing;
} moe_making;
/* Counted and mapped by the backend: `experts` is not there for the CPU, and the CPU
 * waits for the count alone. */
bool moe_plan_on_device(const epo_buffer *b);
epo_routes moe_plan_routes(const epo_buffer *b, const epo_routing *r);
/* EPO_E_* of this rank, its number in front; again: of the line that is there. */
epo_status moe_plan_say(const epo_buffer *b, epo_status status, const char *format, ...)
    EPO_PRINTF(3, 4);
epo_status moe_plan_say_again(const epo_buffer *b, epo_status status);
/* Copies the caller's indices, checked against s->experts. */
epo_status moe_plan_copy_experts(const epo_buffer *b, const epo_route_shape *s,
                                 const epo_routing *r, int32_t *copy);
/* Tokens that another rank with the same ones carries. */
void moe_plan_drop_others(const epo_group *g, const epo_routing *r, int32_t *experts);
epo_status moe_alltoall_make(moe_making *m);
epo_status moe_flex_make(moe_making *m);
epo_status moe_flex_make_replay(moe_making *m);

/* Offsets of flex's maps in the plan's arena. */
typedef struct moe_flex_maps {
    uint64_t first, count, token, sum, slot_weight; /* known from the counts */
    uint64_t expand, pad, back;                     /* known from the received meta */
    uint64_t weight, meta;                          /* meta: on the device alone */
    uint64_t returns[2], home, home_token, home_slot;
} moe_flex_maps;
/* The plan's names for them; and first and count, by the CPU. */
void moe_flex_name(epo_plan *p, const moe_flex_maps *at);
void moe_flex_layout(epo_plan *p, const moe_flex_maps *at);

/* CPU arrays: one calloc, carved.  Every carve is repeated by `count` first. */
typedef struct moe_carver {
    char *base; /* NULL: only count */
    uint64_t used;
    bool failed;
} moe_carver;
void *moe_carve(moe_carver *c, uint64_t count, uint64_t size);
void moe_lane_carve(moe_carver *c, moe_lane *lane, uint64_t pieces, int chunks);
/* Sends meta segments to their place, and waits for the others'.  With `after` it is
 * sent after that event and waits for nobody: moe_plan_gather_weights does. */
epo_status moe_plan_exchange_meta(epo_plan *plan, const epo_segment *send, int nsend,
                                  const epo_arrival *recv, int nrecv, epo_event *after);
/* weight[row] = src[index[row]], 0 for -1; complete on return, or, with the plan on
 * the device, when `done` is. */
epo_status moe_plan_gather_weights(epo_plan *plan, const float *src, const int32_t *index);
/* In a buffer for graphs, behind what read the meta: peers may send the next plan's. */
epo_status moe_plan_meta_credit(epo_buffer *b);

/* ---- of operations and plans, for passes ------------------------------ */

epo_deps moe_deps(const char *name, epo_interval_kind kind, int chunk);
void moe_deps_wait(epo_deps *deps, epo_ready ready);
/* flex: does the exchange itself sum a token's rows on their way back? */
bool moe_plan_sums(const epo_plan *plan);
/* flex: may a forward's rows go home one by one? */
bool moe_buffer_home(const epo_buffer *b);
/* They were asked to, and do not, as `why` (static) says; NULL: they do.  Told once a group. */
void moe_home_in_vain(epo_group *group, const char *why);
/* Do rows arrive at their expert-major place, and are read there? */
bool moe_plan_in_place(const epo_plan *plan);

/* ---- layer.c ---------------------------------------------------------- */

struct epo_layer {
    epo_object object;
    epo_group *group;
    epo_layer_config config;
    int local;
    uint64_t microbatch; /* of the next backward */
    bool wgrad_fresh;    /* ... whose weight gradients replace what is in dw1 and dw2 */
    int wgrads;          /* entries in the group's queue */
    int saved;
};

/* Are there weight gradients? */
static inline bool moe_layer_trains(const epo_layer *l) {
    return l->config.dw1 != NULL || (l->config.expert != NULL && l->config.expert_wgrad != 0);
}

typedef struct moe_own moe_own; /* own.c */

struct epo_saved {
    epo_object object;
    bool live;
    epo_layer *layer;
    epo_plan *plan;
    moe_block x, h;     /* expert-major rows and fc1's output */
    moe_block tokens;   /* EPO_SAVE_TOKENS: rows as they came */
    const void *source; /* EPO_SAVE_NOTHING: the caller's x */
    moe_own *own;       /* calls of the caller's experts */
    epo_saved *next;
};

epo_status moe_layer_forward(epo_layer *layer, epo_plan *plan, const void *x, void *y,
                             epo_saved *saved, bool keep, epo_stream stream);
epo_status moe_layer_backward(epo_layer *layer, epo_saved *saved, const void *dy, void *dx,
                              float *dweights, epo_stream stream);
/* The parts of these, for a schedule.  open: arguments checked, the turn taken. */
epo_status moe_forward_open(epo_layer *layer, epo_plan *plan, const void *x, const void *y,
                            epo_saved **saved);
epo_status moe_backward_open(epo_layer *layer, epo_saved *saved, const void *dy, const void *dx);
/* Must the weight gradients' x be made again? */
bool moe_saved_again(const epo_layer *l);
epo_status moe_layer_fits(const epo_layer *l, const epo_plan *plan);
/* Gives up blocks and plan; the handle goes to the group's spares. */
void moe_saved_drop(epo_saved *saved);

/* ---- wgrad.c ---------------------------------------------------------- */

/* One backward call's weight gradients; owns its operands until they are done. */
struct moe_wgrad {
    moe_wgrad *next;
    epo_layer *layer;
    epo_plan *plan; /* a reference, for the layout */
    uint64_t microbatch, bytes;
    moe_block dy, a, dh, x;
    const void *dy_rows; /* dy's, or where the rows arrived */
    bool lends;          /* the first product leaves SMs to a way back */
    epo_event *lent;     /* ... until this, or NULL: to its end */
    moe_own *own;        /* calls of the caller's experts; own_last: the one for this */
    int own_last;
    int gemms, counted; /* all, and those that the figures hold */
    bool issued, told;  /* told: wgrad_ready was called */
    bool fresh;         /* c =, not c += */
    epo_queue *queue;   /* where its GEMMs run */
    epo_event *end;     /* NULL: `done` tells the end */
    int finished, done; /* atomic; set by the queue: GEMMs, all of them */
};

epo_status moe_wgrad_make(epo_layer *layer, epo_plan *plan, moe_wgrad **out);
/* GEMMs of local experts [first, last) on the fill queue, after `wait` (or NULL). */
epo_status moe_wgrad_issue(moe_wgrad *w, int first, int last, const epo_ready *wait, int chunk);
/* All GEMMs were issued: one more operation notes their end. */
epo_status moe_wgrad_issue_end(moe_wgrad *w);
/* All of it, after the operands. */
epo_status moe_wgrad_issue_whole(moe_wgrad *w);
void moe_wgrad_append(epo_group *group, moe_wgrad *w);
/* Issues every waiting entry to the fill queue: communication is exposed now. */
epo_status moe_wgrad_issue_delayed(epo_group *group);
/* Retires what is done, in order, with callbacks; `hidden`: it ran inside a pass. */
void moe_wgrad_retire(epo_group *group, bool hidden);
/* The caller's stream now waits for what was issued: calls wgrad_ready for the layer's
 * entries (NULL: all) that are not done yet. */
void moe_wgrad_tell(epo_group *group, const epo_layer *layer);
/* Runs the oldest until the byte limit holds. */
epo_status moe_wgrad_limit(epo_group *group);
/* Runs and retires the layer's entries (NULL: all). */
epo_status moe_wgrad_flush(epo_group *group, epo_layer *layer, epo_stream stream);
/* Flushes, waits, and leaves no entry behind: those of a broken group are dropped. */
epo_status moe_wgrad_settle(epo_group *group, epo_layer *layer);
void moe_wgrad_free(moe_wgrad *w);
/* At the group's end. */
void moe_wgrad_close(epo_group *group);

/* ---- stats.c ---------------------------------------------------------- */

typedef enum moe_bytes { MOE_BYTES_DISPATCH, MOE_BYTES_COMBINE, MOE_BYTES_CONTROL } moe_bytes;
/* The first `rows` of the segments are rows; others, beside them, count as control. */
void moe_stats_exchange(epo_group *group, moe_bytes kind, const epo_segment *send, int rows,
                        int nsend);
double moe_stats_now(void);

/* ---- the table's functions, by object --------------------------------- */

epo_status moe_world_create(int ranks, epo_world **out);
void moe_world_destroy(epo_world *world);
epo_status moe_group_create(const epo_engine_group *config, epo_group **out);
epo_status moe_group_refuse(const epo_engine_group *config, epo_status wrong);
epo_status moe_group_destroy(epo_group *group);
epo_status moe_group_query(const epo_group *group, epo_group_info *info);
epo_status moe_group_async_error(epo_group *group);
epo_status moe_group_barrier(epo_group *group);
epo_status moe_group_allreduce(epo_group *group, float *data, uint64_t count, epo_stream stream);
epo_status moe_group_wgrad_flush(epo_group *group, epo_stream stream);
epo_status moe_group_stats(epo_group *group, epo_stats *stats, int reset);
epo_status moe_record_start(epo_group *group, uint64_t capacity);
epo_status moe_record_stop(epo_group *group, const epo_interval **intervals, uint64_t *count,
                           uint64_t *dropped);
epo_status moe_buffer_bytes(const epo_group *group, const epo_buffer_config *config,
                            uint64_t *bytes);
epo_status moe_buffer_create(epo_group *group, const epo_buffer_config *config, epo_buffer **out);
epo_status moe_buffer_destroy(epo_buffer *buffer);
epo_status moe_plan_create(epo_buffer *buffer, const epo_routing *routing, epo_stream stream,
                           epo_plan **out);
void moe_plan_retain(epo_plan *plan);
void moe_plan_release(epo_plan *plan);
epo_status moe_plan_rows(const epo_plan *plan, uint64_t *rows);
epo_status moe_plan_experts(const epo_plan *plan, uint64_t *first, uint64_t *count);
epo_status moe_plan_query(const epo_plan *plan, epo_plan_info *info);
epo_status moe_dispatch(epo_plan *plan, const void *x, void *rows, float *row_weights,
                        epo_stream stream);
epo_status moe_combine(epo_plan *plan, const void *rows, void *y, const float *row_dweights,
                       float *dweights, epo_stream stream);
epo_status moe_layer_create(epo_group *group, const epo_layer_config *config, epo_layer **out);
epo_status moe_layer_destroy(epo_layer *layer);
epo_status moe_layer_bytes(const epo_layer *layer, const epo_plan *plan, epo_layer_memory *out);
epo_status moe_layer_wgrad_flush(epo_layer *layer, epo_stream stream);
epo_status moe_layer_wgrad_begin(epo_layer *layer);
epo_status moe_forward(epo_layer *layer, epo_plan *plan, const void *x, void *y, epo_saved **saved,
                       epo_stream stream);
epo_status moe_backward(epo_layer *layer, epo_saved *saved, const void *dy, void *dx,
                        float *dweights, epo_stream stream);
void moe_saved_release(epo_saved *saved);
epo_status moe_schedule_run(epo_group *group, const epo_schedule *schedule, epo_stream stream);

extern const epo_engine moe_engine;

#endif
