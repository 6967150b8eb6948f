/* SPDX-License-Identifier: Apache-2.0
 *
 * ep_overlap.h - expert-parallel dispatch, expert compute and combine for
 * mixture-of-experts layers, overlapped.
 *
 * Objects, in the order a program makes them:
 *
 *   epo_group   the ranks that share the experts, their transport and queues
 *   epo_buffer  the windows through which token rows travel, for one shape
 *   epo_plan    one routing: which row goes where; used by forward and backward
 *   epo_layer   the experts: weights, gradients, activation
 *
 * Words: a *rank* is one process (or thread, see epo_world) of the group.  T is
 * the number of tokens of this rank, H the hidden size, F the expert's
 * intermediate size, K the top_k, E the number of experts of the whole group,
 * R the number of ranks; every rank holds the El = E/R consecutive experts
 * rank*El .. rank*El+El-1.  *Rows* are token vectors of H elements.
 * *Expert-major* rows are ordered by (local expert, source rank, token, slot),
 * each expert's part starting at an aligned row; the rows in between are zero.
 *
 * Calls marked [collective] are made by every rank of the group, in the same
 * order; ranks that are in different calls get EPO_E_PEER (CUDA: late, where ranks are
 * processes of one machine and no graphs; passes on a buffer for graphs at once).  No other
 * call waits for a peer.
 *
 * Streams: with the host engine `stream` must be NULL and a call returns when
 * its outputs are complete.  With the CUDA engine it is a cudaStream_t, the
 * outputs are complete in stream order, and every array that a call names (rows,
 * routing, weights, gradients) is memory of the GPU that was current when the
 * group was made; epo_plan_create waits until it knows the routing's counts, unless
 * its buffer is for graphs.  Calls on such a buffer can be captured in a CUDA graph (see
 * "CUDA graphs" below); any other call on a stream that is being captured is refused
 * (EPO_E_UNSUPPORTED), which breaks the group.
 *
 * Errors: every function that can fail returns epo_status; epo_error() then
 * tells in one line what was found, what is allowed and what to do.  Outputs are
 * written on success only.  A group, buffer, plan, layer or world that was destroyed
 * before, or never made, is refused (EPO_E_ARG).  After EPO_E_TIMEOUT or EPO_E_PEER the group is
 * broken: every later call on it returns that status; destroy it.  A collective
 * call that one rank refuses (EPO_E_ARG, EPO_E_STATE) is an error on all of them.
 * Where the others were told in time, as by epo_plan_create, the group lives on;
 * else theirs is EPO_E_PEER, naming that rank.
 *
 * On GPUs a peer may fail after a call has returned: then the outputs of the calls
 * concerned become NaN in stream order, weight gradients included, and the error is
 * that of the next call and of epo_group_async_error.  (Only where CUDA loads a kernel for
 * its first launch behind the wait that fails, after a group's first passes, or the GPU hangs,
 * they may hold rows that never came: the error then says so.)
 *
 * Threads: one group and all that was made from it belong to one thread at a
 * time.  Different groups may be used from different threads.  A process forked
 * after a group was made cannot use it (EPO_E_STATE) and makes its own.
 *
 * Functions of the caller's that a call runs (alloc, free, expert, wgrad_ready, node, issued) may
 * not call for the same group what is collective or destroys: EPO_E_STATE, and the call outside
 * goes on.  A node may call epo_plan_create.
 *
 * Structs that begin with `size` are initialised by the macro beside them, so
 * that a program built with an older header keeps working.
 */
#ifndef EP_OVERLAP_H
#define EP_OVERLAP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define EPO_API __attribute__((visibility("default")))
#else
#define EPO_API
#endif

typedef enum epo_status {
    EPO_OK = 0,
    EPO_E_ARG = 1,         /* an argument is wrong; nothing was changed */
    EPO_E_STATE = 2,       /* the call does not fit the object's state */
    EPO_E_NOMEM = 3,       /* memory: the text gives need and have */
    EPO_E_SYSTEM = 4,      /* a system, CUDA, cuBLAS or NCCL call failed */
    EPO_E_TIMEOUT = 5,     /* a peer did not arrive within the limit */
    EPO_E_PEER = 6,        /* a peer ended, failed or disagrees */
    EPO_E_OVERFLOW = 7,    /* more rows than the buffer was made for */
    EPO_E_INDEX = 8,       /* a routing index is out of range */
    EPO_E_UNSUPPORTED = 9, /* this build or machine cannot do it */
    EPO_E_VERSION = 10     /* parts of different versions met */
} epo_status;

typedef enum epo_dtype { EPO_F32 = 0, EPO_BF16 = 1, EPO_F16 = 2 } epo_dtype;

/* EPO_DEFAULT: as the job's options say (srun --ep-overlap ..., which reach the
 * program as EP_OVERLAP_DECISION, EP_OVERLAP_DISPATCHER and
 * EP_OVERLAP_DELAY_WGRAD); without them: off, alltoall, not delayed. */
typedef enum epo_switch { EPO_DEFAULT = -1, EPO_OFF = 0, EPO_ON = 1 } epo_switch;
typedef enum epo_dispatcher {
    EPO_DISPATCH_DEFAULT = -1,
    EPO_DISPATCH_ALLTOALL = 0, /* one copy per token and expert */
    EPO_DISPATCH_FLEX = 1      /* one copy per token and destination rank */
} epo_dispatcher;
/* What happens to the rows of an expert beyond its capacity (epo_buffer_config). */
typedef enum epo_overflow {
    EPO_OVERFLOW_ERROR = 0,        /* EPO_E_OVERFLOW on every rank, naming rank and expert */
    EPO_OVERFLOW_DROP_WEIGHT = 1,  /* the largest router weights stay; equal ones in order */
    EPO_OVERFLOW_DROP_POSITION = 2 /* the first in the order (token, slot) stay */
} epo_overflow;
typedef enum epo_engine_kind {
    EPO_ENGINE_AUTO = 0, /* CUDA if the process has a GPU and the engine, else host */
    EPO_ENGINE_HOST = 1,
    EPO_ENGINE_CUDA = 2
} epo_engine_kind;

typedef void *epo_stream; /* cudaStream_t; NULL with the host engine */

typedef struct epo_world epo_world;
typedef struct epo_group epo_group;
typedef struct epo_buffer epo_buffer;
typedef struct epo_plan epo_plan;
typedef struct epo_layer epo_layer;
typedef struct epo_saved epo_saved;

/* ---- library ---------------------------------------------------------- */

/* "0.1.0".  Never NULL; static. */
EPO_API const char *epo_version(void);
/* "EPO_E_TIMEOUT" and so on.  Never NULL; static. */
EPO_API const char *epo_status_name(epo_status status);
/* One line about the calling thread's last failed call; "" if none failed.
 * Valid until the thread's next call of this library. */
EPO_API const char *epo_error(void);
/* Bytes of one element; 0 for an unknown type. */
EPO_API size_t epo_dtype_size(epo_dtype type);

/* ---- group ------------------------------------------------------------ */

/* A caller's own way to reach the other ranks of the group, used while it is made.
 * Both return 0 on success.  allgather: every rank gives `bytes` bytes, `all`
 * receives ranks * bytes, in the group's order.  A rank whose arguments are wrong
 * calls it once, too, so that all ranks return that error at once. */
typedef struct epo_bootstrap {
    size_t size;
    void *ctx;
    int (*allgather)(void *ctx, const void *mine, size_t bytes, void *all);
    int (*barrier)(void *ctx);
} epo_bootstrap;

typedef struct epo_group_config {
    size_t size;
    epo_engine_kind engine;
    /* Where this rank stands.  -1: found in the environment, in this order:
     * RANK/WORLD_SIZE, OMPI_COMM_WORLD_*, PMIX_RANK/PMI_RANK/PMI_SIZE,
     * SLURM_PROCID/SLURM_NTASKS; none of them: 0 of 1. */
    int rank, ranks;
    /* Sub-groups: ranks of the world that form this group, in group order;
     * NULL: all.  A rank that is not listed must not make the call.  The ranks of a group
     * are on one machine, others are refused by name; but with the CUDA engine and a bootstrap or
     * nccl_comm they may be on several, as many ranks on each, one machine behind the other. */
    const int *members;
    int nmembers;
    const epo_bootstrap *bootstrap; /* NULL: by the step's or launcher's environment */
    epo_world *threads;             /* not NULL: ranks are threads of this process */
    epo_switch overlap;             /* off: serial, one chunk, the fastest serial path */
    epo_dispatcher dispatcher;
    epo_switch delay_wgrad;     /* on needs overlap on */
    int chunks;                 /* expert groups per layer pass; 0: chosen by the engine */
    double timeout_s;           /* a peer is waited for this long; 0: 600 */
    double warn_s;              /* then a line on stderr says who is late; 0: 30 */
    uint64_t wgrad_limit_bytes; /* what delayed weight gradients may hold; 0: 1 GiB */
    /* An ncclComm_t of this process's GPU: its ranks form the group, in its order (rank
     * and ranks may be -1; no members, bootstrap or threads beside it).  It is used
     * while the group is made and never later; no other work may be on it meanwhile. */
    void *nccl_comm;
    /* The caller's memory, both or none, for what this rank's calls take (rows,
     * activations, maps; not the windows, which peers write): `bytes` at a multiple of
     * 256, on CUDA of this GPU and usable from every stream; NULL: there is no more.
     * Blocks are kept for later calls; free is called when nothing uses them. */
    void *(*alloc)(void *ctx, uint64_t bytes);
    void (*free)(void *ctx, void *ptr, uint64_t bytes);
    void *alloc_ctx;
    /* Ranks that hold the same tokens: group ranks i*tp .. i*tp+tp-1 give the same
     * routing, x and dy (tensor parallelism without sequence parallelism).  Each carries
     * the tokens t with t % tp == rank % tp and skips the others as if their slots were
     * not used, so that no expert computes a row twice: y, dx and dweights are 0 there,
     * and their sum over the tp ranks is whole.  A capacity counts ceil(T/tp) tokens.
     * 0 or 1: every rank has tokens of its own. */
    int tensor_parallel;
} epo_group_config;
#define EPO_GROUP_CONFIG_INIT                                                                      \
    {                                                                                              \
        sizeof(epo_group_config), EPO_ENGINE_AUTO, -1, -1, NULL, 0, NULL, NULL, EPO_DEFAULT,       \
            EPO_DISPATCH_DEFAULT, EPO_DEFAULT, 0, 0.0, 0.0, 0, NULL, NULL, NULL, NULL, 0           \
    }

/* What was decided when the group was made. */
typedef struct epo_group_info {
    size_t size;
    const char *engine; /* "host" or "cuda" */
    int rank, ranks;
    int overlap;
    epo_dispatcher dispatcher;
    int delay_wgrad;
    int chunks;           /* 0: each buffer chooses */
    double link_gbs;      /* emulated link, GB/s per rank pair and direction; 0: none */
    double link_us;       /* its latency */
    const char *reason;   /* why overlap is what it is; static for the group's life */
    const char *versions; /* libraries used, "OpenBLAS 0.3.21"; likewise */
} epo_group_info;

/* A place where `ranks` threads of one process meet; for tests and sanitizers.
 * Destroy it after the last group made with it.  It belongs to one engine: AUTO's,
 * or the one named.  On GPUs, CUDA loads a kernel at its first launch under a lock of the
 * process, waiting for the GPU, which may wait for rows that another thread cannot send for
 * that lock: kernels of the caller's own (an expert function's, say) are to be launched once
 * before the first pass.  The engine sees to its own and its libraries'. */
EPO_API epo_status epo_world_create(int ranks, epo_world **out);
EPO_API epo_status epo_world_create_on(epo_engine_kind engine, int ranks, epo_world **out);
EPO_API void epo_world_destroy(epo_world *world);

/* [collective] */
EPO_API epo_status epo_group_create(const epo_group_config *config, epo_group **out);
/* [collective, unless the group is broken]  Flushes delayed weight gradients.
 * NULL is accepted. */
EPO_API epo_status epo_group_destroy(epo_group *group);
EPO_API epo_status epo_group_query(const epo_group *group, epo_group_info *info);
/* EPO_OK, or the error that broke the group or that a device reported late. */
EPO_API epo_status epo_group_async_error(epo_group *group);
/* [collective] */
EPO_API epo_status epo_group_barrier(epo_group *group);
/* [collective]  data[i] = sum over the ranks, added in rank order, so that the
 * result is the same on every rank and in every run.  fp32, any count. */
EPO_API epo_status epo_group_allreduce(epo_group *group, float *data, uint64_t count,
                                       epo_stream stream);

/* ---- buffer ----------------------------------------------------------- */

/* EPO_WIRE_E4M3: half the bytes of bf16.  Dispatch, of gradients too, sends each element as
 * e4m3 times an fp32 scale of its 128 (hidden must be a multiple), and experts get
 * the buffer's type back: each element is off by at most 1/16 of itself or by 2^-10 of the
 * largest of its 128 (or of 2^-126), about 2.6 % of a row of random numbers.  A rank's own rows
 * too, so that results do not depend on where an expert is.  Combine sends rows. */
typedef enum epo_wire { EPO_WIRE_ROWS = 0, EPO_WIRE_E4M3 = 1 } epo_wire;

typedef struct epo_buffer_config {
    size_t size;
    int experts;    /* E, a multiple of the group's ranks */
    int hidden;     /* H */
    int top_k;      /* K at most, 1..32 */
    int max_tokens; /* T of any rank at most */
    epo_dtype type; /* of the token rows, also on the wire */
    epo_dispatcher dispatcher;
    int chunks;        /* 0: the group's */
    int align_rows;    /* each expert starts at a multiple of this; 0: 16 */
    uint64_t max_rows; /* expert-major rows that this rank can hold;
                        * 0: the worst case, so nothing can overflow */
    /* Capacity: how many rows one rank may send to one expert.  Each rank judges its
     * own tokens, so what is dropped depends on its routing alone, as in Megatron:
     * capacity = ceil(T*K/E * capacity_factor), with T and K of the routing.  The same
     * on every rank. */
    double capacity_factor; /* 0: no capacity; every plan has its exact size */
    int capacity;           /* 0 or more: this many rows, whatever T; -1: by the factor */
    epo_overflow overflow;  /* used with a capacity only */
    int pad_to_capacity;    /* not 0: each expert has exactly `capacity` rows from every
                             * rank, the missing ones zero with router weight 0, so that
                             * sizes and places do not depend on the routing */
    epo_wire wire;          /* how dispatch sends rows; flex only.  The same on every rank */
    int graphs;             /* not 0: calls on it may be captured in CUDA graphs, see there.
                             * The same on every rank */
} epo_buffer_config;
#define EPO_BUFFER_CONFIG_INIT                                                                     \
    {                                                                                              \
        sizeof(epo_buffer_config), 0, 0, 0, 0, EPO_F32, EPO_DISPATCH_DEFAULT, 0, 0, 0, 0.0, -1,    \
            EPO_OVERFLOW_ERROR, 0, EPO_WIRE_ROWS, 0                                                \
    }

/* Bytes that epo_buffer_create will take on this rank; allocates nothing.  On several
 * ranks with different max_rows the largest of them counts, which this rank does not know:
 * then it may take more. */
EPO_API epo_status epo_buffer_bytes(const epo_group *group, const epo_buffer_config *config,
                                    uint64_t *bytes);
/* [collective] */
EPO_API epo_status epo_buffer_create(epo_group *group, const epo_buffer_config *config,
                                     epo_buffer **out);
/* [collective]  After the last plan made from it.  NULL is accepted. */
EPO_API epo_status epo_buffer_destroy(epo_buffer *buffer);

/* ---- plan ------------------------------------------------------------- */

typedef struct epo_routing {
    size_t size;
    int tokens;             /* T, 0 allowed, may differ between ranks */
    int top_k;              /* K, the same on every rank */
    const int64_t *experts; /* [T][K], 0..E-1, or -1: slot not used.  An expert
                             * named twice contributes twice. */
    const float *weights;   /* [T][K] router weights; NULL: 1.0 */
} epo_routing;
#define EPO_ROUTING_INIT                                                                           \
    { sizeof(epo_routing), 0, 0, NULL, NULL }

/* [collective]  The routing is copied.  The plan is reference counted and begins
 * with one reference. */
EPO_API epo_status epo_plan_create(epo_buffer *buffer, const epo_routing *routing,
                                   epo_stream stream, epo_plan **out);
EPO_API void epo_plan_retain(epo_plan *plan);
EPO_API void epo_plan_release(epo_plan *plan); /* NULL is accepted */
/* Expert-major rows on this rank, alignment included. */
EPO_API epo_status epo_plan_rows(const epo_plan *plan, uint64_t *rows);
/* For each local expert its first row and its number of rows (without the
 * alignment, with what pads it to its capacity); arrays of El, either may be NULL. */
EPO_API epo_status epo_plan_experts(const epo_plan *plan, uint64_t *first, uint64_t *count);

typedef struct epo_plan_info {
    size_t size;
    int tokens, top_k;
    uint64_t rows;     /* as epo_plan_rows */
    uint64_t capacity; /* rows that this rank may send to one expert; UINT64_MAX: any */
    uint64_t dropped;  /* slots of this rank that were dropped: they add nothing to y, and
                        * their dweights are 0 */
    uint64_t pad_rows; /* of this rank's expert-major rows, those that only fill up to the
                        * capacity */
    int chunks;        /* groups of experts whose rows travel and are worked on in turns */
    int engines;       /* 1: rows that travel beside GEMMs are packed by a few SMs and moved by
                        * copy engines; 0: they are stored by SMs, or there is no choice */
} epo_plan_info;
EPO_API epo_status epo_plan_query(const epo_plan *plan, epo_plan_info *info);

/* [collective]  Token rows to expert-major rows.
 * x [T][H] -> rows [plan rows][H]; row_weights [plan rows] fp32 receives the
 * router weight of each row (0 in the alignment), may be NULL.
 * Also the gradient of epo_combine: dispatch dy. */
EPO_API epo_status epo_dispatch(epo_plan *plan, const void *x, void *rows, float *row_weights,
                                epo_stream stream);
/* [collective]  Expert-major rows back to tokens, unweighted sum in fp32:
 * y[t] = sum of the rows of token t; tokens without experts give 0.
 * Also the gradient of epo_dispatch.  row_dweights [plan rows] and dweights
 * [T][K] carry router-weight gradients back; both NULL or both given. */
EPO_API epo_status epo_combine(epo_plan *plan, const void *rows, void *y, const float *row_dweights,
                               float *dweights, epo_stream stream);

/* ---- layer ------------------------------------------------------------ */

/* How the weight gradients get the forward's rows. */
typedef enum epo_saved_mode {
    EPO_SAVE_ROWS = 0,   /* kept, one an expert */
    EPO_SAVE_TOKENS = 1, /* kept, one a token and rank, and expanded again; flex only */
    EPO_SAVE_NOTHING = 2 /* sent once more in the backward call: the forward's x must still
                          * hold the same rows then */
} epo_saved_mode;

/* Experts of the caller's own.  A layer with `expert` set calls it for consecutive local
 * experts (one call per chunk), which read and write expert-major rows of the type: for
 * local expert e those from first[e], count[e] of them.  Rows in between are zero and so
 * may be computed like the others; what they give is not used. */
typedef enum epo_expert_phase {
    EPO_EXPERT_FORWARD = 0, /* y from x, router weight applied */
    EPO_EXPERT_DGRAD = 1,   /* dx and dweights from dy and x (the forward's, kept) */
    EPO_EXPERT_WGRAD = 2    /* weight gradients from dy and x, for all local experts, in the
                             * place of dw1 and dw2: at once or delayed */
} epo_expert_phase;
typedef struct epo_expert_call {
    size_t size;
    epo_expert_phase phase;
    int first_expert, experts;             /* local experts of this call */
    uint64_t row, rows;                    /* their rows, those in between included */
    const uint64_t *first, *count;         /* [El]; CUDA: device memory */
    const uint64_t *cpu_first, *cpu_count; /* the same for the CPU */
    const void *x;                         /* [plan rows][H], as all that follows */
    const float *weights;                  /* [plan rows] router weights */
    void *y;
    const void *dy;
    void *dx;
    float *dweights;     /* [plan rows] */
    uint64_t microbatch; /* DGRAD, WGRAD: as wgrad_ready's */
    epo_stream stream;   /* CUDA: enqueue here; the host engine calls on a thread of its
                          * own, where the API must not be called */
} epo_expert_call;

/* Expert e computes, for a row x with router weight w:
 *   g = W1[e][0..F) x, u = W1[e][F..2F) x, a = w * silu(g) * u, y = W2[e] a
 * with fp32 accumulation and `a` rounded to the row type. */
typedef struct epo_layer_config {
    size_t size;
    int experts;          /* E */
    int hidden;           /* H */
    int ffn;              /* F */
    epo_dtype type;       /* of rows and weights */
    epo_dtype wgrad_type; /* of dw1 and dw2: the row type, or EPO_F32 */
    const void *w1;       /* [El][2F][H], the caller's */
    const void *w2;       /* [El][H][F] */
    void *dw1;            /* gradients, added to (+=, but see epo_layer_wgrad_begin); NULL: none */
    void *dw2;
    /* Called on the caller's thread, inside a call of this library, when the weight
     * gradients of one backward call are in dw1 and dw2, or, on CUDA, will be in the
     * order of that call's stream: what it enqueues there comes behind them.  For each
     * layer in the order of its backward calls, which microbatch counts from 0.  May be
     * NULL. */
    void (*wgrad_ready)(void *ctx, epo_layer *layer, uint64_t microbatch);
    void *ctx;
    /* Not NULL: the experts (w1, w2, dw1, dw2 are NULL then, ffn is not used).  Arrays of
     * a call hold until it returns (host) or what it enqueued has run (CUDA).  A status
     * other than EPO_OK ends the group's work on all ranks. */
    epo_status (*expert)(void *ctx, const epo_expert_call *call);
    int expert_wgrad; /* not 0: it is called for EPO_EXPERT_WGRAD, too */
    /* The same on all ranks, as ffn and whether there is an `expert`: a forward of ranks whose
     * layers differ in these ends with EPO_E_PEER, naming the field. */
    epo_saved_mode saved;
} epo_layer_config;
#define EPO_LAYER_CONFIG_INIT                                                                      \
    {                                                                                              \
        sizeof(epo_layer_config), 0, 0, 0, EPO_F32, EPO_F32, NULL, NULL, NULL, NULL, NULL, NULL,   \
            NULL, 0, EPO_SAVE_ROWS                                                                 \
    }

EPO_API epo_status epo_layer_create(epo_group *group, const epo_layer_config *config,
                                    epo_layer **out);
/* Flushes its delayed weight gradients.  NULL is accepted. */
EPO_API epo_status epo_layer_destroy(epo_layer *layer);

/* What the layer's calls take of this rank's memory for the plan, with alignment: `saved`
 * from forward to backward, and beside it each call while it runs.  Allocates nothing;
 * nothing is allocated either where earlier calls left blocks of the same sizes. */
typedef struct epo_layer_memory {
    size_t size;
    uint64_t saved, forward, backward;
} epo_layer_memory;
EPO_API epo_status epo_layer_bytes(const epo_layer *layer, const epo_plan *plan,
                                   epo_layer_memory *out);

/* [collective]  y[T][H] = MoE(x[T][H]).  saved: NULL for inference, else what
 * epo_backward needs (it holds a reference to the plan). */
EPO_API epo_status epo_forward(epo_layer *layer, epo_plan *plan, const void *x, void *y,
                               epo_saved **saved, epo_stream stream);
/* [collective]  dy[T][H] -> dx[T][H] (may be dy itself), dweights[T][K] fp32
 * (NULL: not wanted), and += into dw1, dw2, at once or delayed.  Takes `saved`
 * over: it is released whatever the status, and refused a second time (EPO_E_STATE). */
EPO_API epo_status epo_backward(epo_layer *layer, epo_saved *saved, const void *dy, void *dx,
                                float *dweights, epo_stream stream);
/* Drop what a forward saved when no backward follows.  NULL is accepted, and one that was used or
 * dropped before is passed over, until its address is that of another forward's. */
EPO_API void epo_saved_release(epo_saved *saved);
/* The layer's next backward call puts its weight gradients into dw1 and dw2 in place of what
 * is there, which is not read: the first micro-batch of a step needs no cleared arrays, and its
 * gradients pass through memory once, not three times.  Experts without rows get zeros.  For
 * that call alone (a captured one: at each replay); again before it is as once.  EPO_E_STATE
 * for a layer without dw1 and dw2. */
EPO_API epo_status epo_layer_wgrad_begin(epo_layer *layer);
/* All delayed weight gradients of the layer (or of the group) are in dw1 and dw2
 * when this returns (host) or in stream order (CUDA). */
EPO_API epo_status epo_layer_wgrad_flush(epo_layer *layer, epo_stream stream);
EPO_API epo_status epo_group_wgrad_flush(epo_group *group, epo_stream stream);

/* ---- two micro-batches ------------------------------------------------- */

/* Forward of one micro-batch beside backward of another, node by node, so that each
 * one's communication runs under the other's compute.  For step i of L layers, F =
 * layer i forward, B = layer L-1-i backward, nodes are issued in this order:
 *
 *   B combine', F attention, B mlp', F dispatch, B mlp wgrad, B dispatch', F mlp,
 *   F combine, B attention', B attention wgrad
 *
 * ' marks a gradient: combine' sends dy to the experts, dispatch' brings dx back. */
typedef enum epo_node {
    EPO_NODE_ATTENTION = 0, /* the caller's: everything before the experts */
    EPO_NODE_DISPATCH = 1,
    EPO_NODE_MLP = 2,
    EPO_NODE_COMBINE = 3,
    EPO_NODE_COMBINE_BACK = 4,
    EPO_NODE_MLP_BACK = 5,
    EPO_NODE_MLP_WGRAD = 6,
    EPO_NODE_DISPATCH_BACK = 7,
    EPO_NODE_ATTENTION_BACK = 8, /* the caller's */
    EPO_NODE_ATTENTION_WGRAD = 9 /* the caller's */
} epo_node;

/* One layer in one direction.  What a node reads must be set when it is issued: forward
 * plan, x and y by the layer's ATTENTION at the latest (which may call epo_plan_create);
 * backward saved, dy and dx by the ATTENTION_BACK of the layer above.  Arrays live until
 * the run's outputs are complete. */
typedef struct epo_step {
    epo_layer *layer; /* NULL: a dense layer; its MLP, MLP_BACK and MLP_WGRAD are the
                       * caller's, and it has no dispatch and no combine */
    epo_plan *plan;   /* forward: as epo_forward */
    const void *x;
    void *y;
    epo_saved *saved; /* forward: written; backward: taken over, whatever the status */
    const void *dy;   /* backward: as epo_backward */
    void *dx;
    float *dweights;
} epo_step;

typedef struct epo_schedule {
    size_t size;
    int layers;         /* L */
    epo_step *forward;  /* [L], by layer; NULL: no forward (the last micro-batch) */
    epo_step *backward; /* [L], by layer; NULL: no backward (the first micro-batch) */
    /* A node of the caller's, on `stream` (CUDA: enqueued; what the engine made for it
     * is complete in stream order).  It may call epo_plan_create, and nothing else that
     * is collective.  An error ends the run, and the group's work on all ranks. */
    epo_status (*node)(void *ctx, epo_node node, int layer, epo_step *step, epo_stream stream);
    void *ctx;
    /* Tells each node when it has been issued, the caller's too; may be NULL. */
    void (*issued)(void *ctx, epo_node node, int layer);
} epo_schedule;
#define EPO_SCHEDULE_INIT                                                                          \
    { sizeof(epo_schedule), 0, NULL, NULL, NULL, NULL, NULL }

/* [collective]  Runs it; every rank gives the same layers in the same order.  Results
 * have the bits of the same epo_forward and epo_backward calls one after the other. */
EPO_API epo_status epo_schedule_run(epo_group *group, const epo_schedule *schedule,
                                    epo_stream stream);

/* ---- CUDA graphs ------------------------------------------------------- */

/* What a graph holds must not depend on the routing.  So a buffer with `graphs` set needs
 * pad_to_capacity, and all ranks on one node with P2P between their GPUs (flex: a row of its
 * windows for each token and rank; sums come back for all of them); a group that delays weight
 * gradients, threads that share a GPU, a layer with EPO_SAVE_NOTHING, and epo_schedule_run are
 * refused by name (EPO_E_UNSUPPORTED).  Experts of the caller's are called when a pass is
 * captured, and what they enqueue then is replayed.
 *
 * On a stream that is being captured: epo_plan_create, epo_dispatch, epo_combine,
 * epo_forward, epo_backward, all ranks the same.  A plan belongs to the capture that made
 * it.  One graph may hold all of a pass, or a forward and its backward be two graphs.  Call
 * them once without a capture before: what is made at first use is made then.  A replay
 * reads the routing (T and K as captured) and the rows from the arrays of the captured
 * calls, and adds to dw1 and dw2 as they would; results have the same bits.  wgrad_ready is
 * called when a backward is captured, not when it is replayed.
 *
 * Every rank launches the same graphs, and makes the same calls between them, in the same
 * order, each of its own in the order of streams: calls on such a buffer, captured or not, must
 * not run beside each other.  Release the plans after the last replay,
 * and destroy the graphs before the group: their memory is then given back.
 *
 * epo_plan_query tells 0 for dropped and pad_rows, which nobody knows; epo_stats counts
 * what replays have dropped.  A bad index, an expert beyond its capacity
 * (EPO_OVERFLOW_ERROR) and a wait beyond timeout_s are found on the device: outputs become
 * NaN from there on, the error is that of epo_group_async_error and of the next call, and
 * later replays end at once, without waiting for anybody.  So do those of the other ranks. */

/* ---- figures ---------------------------------------------------------- */

typedef struct epo_stats {
    size_t size;
    uint64_t forward_calls, backward_calls;
    uint64_t dispatch_bytes; /* sent to other ranks, rows */
    uint64_t combine_bytes;  /* likewise */
    uint64_t control_bytes;  /* counts, indices, weights */
    uint64_t local_bytes;    /* read and written by permute, expand, reduce */
    uint64_t wgrad_delayed;  /* expert weight gradients that were delayed */
    uint64_t wgrad_hidden;   /* of those, done while communication was exposed */
    uint64_t memory_bytes;   /* held now by the group and what was made from it, without
                              * caller_bytes */
    uint64_t memory_peak;
    double call_s;                /* wall time inside forward and backward */
    uint64_t caller_bytes;        /* held now of epo_group_config.alloc's memory */
    uint64_t dropped_slots;       /* of all plans of this rank: see epo_overflow */
    uint64_t padding_bytes;       /* of dispatch_bytes and combine_bytes, what filled up to the
                                   * capacity */
    uint64_t node_dispatch_bytes; /* of dispatch_bytes, what went to other nodes */
    uint64_t node_combine_bytes;  /* of combine_bytes, likewise */
} epo_stats;
/* Sums since the group was made or last reset; `reset` != 0 starts anew. */
EPO_API epo_status epo_group_stats(epo_group *group, epo_stats *stats, int reset);

typedef enum epo_interval_kind {
    EPO_INTERVAL_COMM = 0,    /* exchange: dispatch, combine, counts */
    EPO_INTERVAL_COMPUTE = 1, /* expert GEMMs, activation, weight gradients */
    EPO_INTERVAL_LOCAL = 2    /* permute, expand, reduce */
} epo_interval_kind;
typedef struct epo_interval {
    int64_t start_ns, end_ns; /* CLOCK_MONOTONIC */
    int32_t kind;             /* epo_interval_kind */
    int32_t chunk;            /* -1: the whole */
    char name[24];            /* "dispatch", "fc1", "wgrad2", ... */
} epo_interval;
/* Record what this rank's queues do, up to `capacity` intervals; the rest is
 * counted.  Ends an earlier recording. */
EPO_API epo_status epo_record_start(epo_group *group, uint64_t capacity);
/* Stop and read: *intervals belongs to the group and is valid until the next
 * start or the group's end. */
EPO_API epo_status epo_record_stop(epo_group *group, const epo_interval **intervals,
                                   uint64_t *count, uint64_t *dropped);

#ifdef __cplusplus
}
#endif
#endif
