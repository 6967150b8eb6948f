/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu.h - what the files of the CUDA backend share.
 *
 *   driver.c    libcuda: stream memory operations, by name, at run time
 *   load.c      all kernels before the first is launched
 *   check.c     every failed call becomes a line with call, rank and phase
 *   queue.c     streams, events, waits, the frame around each operation
 *   flags.c     epoch flags in host memory that every rank maps
 *   watch.c     the thread that ends expired waits
 *   release.c   what is given back while the GPU may be busy with others' work
 *   memory.c    device memory; copies from and to the CPU, in queue order
 *   meet.c      the ranks on the host side: barrier, allgather, shared memory
 *   comm.c      a caller's communicator as the way to meet
 *   window.c    symmetric windows and the peers' addresses
 *   exchange.c  rows to peers, by copy engines or stores; staging.c: packed first
 *   pairs.c     the same over NCCL
 *   sum.c       allreduce
 *   gemm.c      the experts' GEMMs: our grouped kernels (gemm/), or blas.c: lt.c, cuBLAS
 *   chain.c     two products of all chunks in one launch
 *   kernels.cu  the passes over rows
 *   routing.c   counts of a routing, and its maps; routes.cu: their kernels
 *   flex.c      the same for flex; flex_plan.cu: its kernels
 *   record.c    intervals
 *   replay.c    calls that graphs capture; replay.cu: waits and flags by kernels
 *
 * Epoch flags live in host memory, not beside the rows: GPUs write and poll them
 * there (cuStreamWriteValue64, cuStreamWaitValue64), and a host thread can both
 * see which rank is late and release the wait with one store, whatever state the
 * GPU's queues are in.
 */
#ifndef EPO_BACKEND_CUDA_GPU_H
#define EPO_BACKEND_CUDA_GPU_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>

#include "backend/backend.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/replay.h"
#include "core/status.h"

/* Waits compare as signed differences, so the poison must stay 2^62 at most above
 * any epoch: it is above every epoch in use and below none. */
#define GPU_POISON (UINT64_C(1) << 62)
#define GPU_QUEUES 8                        /* per backend */
#define GPU_SIDE 3                          /* helper streams of a GEMM queue */
#define GPU_WINDOW_PAGE (UINT64_C(2) << 20) /* an IPC handle opens the whole allocation */
/* SMs that GEMMs leave to NCCL's kernels: one that holds every SM to its end would keep
 * them out.  On a slow fabric NCCL takes 2 a peer, and they fill it. */
#define GPU_PAIRS_SMS 16
#define GPU_PAIRS_SMS_SLOW 8
#define GPU_PAIRS_SLOW 32e9 /* bytes a second of a rank */

/* Who multiplies; what AUTO does where our sm_90 kernels do not fit: cuBLASLt if it is
 * found, else our portable kernels. */
typedef enum gpu_gemm_way {
    GPU_GEMM_AUTO = 0,
    GPU_GEMM_OWN,      /* our kernels, the portable ones where those for sm_90 do not fit */
    GPU_GEMM_PORTABLE, /* our portable kernels alone */
    GPU_GEMM_LT,       /* cuBLASLt, one call per expert */
    GPU_GEMM_CUBLAS    /* cuBLAS, likewise */
} gpu_gemm_way;

typedef struct gpu_blas gpu_blas;
typedef struct gpu_pairs gpu_pairs;
typedef struct gpu_meet gpu_meet;
typedef struct gpu_memory_state gpu_memory_state;
typedef struct gpu_watch gpu_watch;
typedef struct gpu_record gpu_record;
typedef struct gpu_routing gpu_routing;
typedef struct gpu_flex_maps gpu_flex_maps;
typedef struct epo_gg epo_gg;
typedef struct gpu_staging gpu_staging;
typedef struct gpu_chain gpu_chain;
typedef struct gpu_words gpu_words;

struct epo_event {
    cudaEvent_t cuda;
    uint64_t capture; /* recorded last in this capture; 0: in none */
    /* A bit for each queue that stands behind the last record: its own, and those that waited
     * for it.  Never recorded: all. */
    uint32_t behind;
    /* Signalled last as a part of a chain: when *word reaches `value`, before `cuda`. */
    bool early;
    uint64_t *word; /* NULL: it never was */
    char *word_dev;
    uint64_t value;
    /* Not NULL, in calls that graphs may capture: when *replay_word reaches this. */
    const uint64_t *counter;
    const uint64_t *replay_word;
};

struct epo_queue {
    epo_backend *be;
    epo_queue_kind kind;
    int slot;
    int priority;
    cudaStream_t stream;
    cudaEvent_t enter;  /* of stream_enter */
    uint64_t capture;   /* the stream is part of this one; 0: of none */
    bool entered;       /* by replay_enter, until replay_leave */
    gpu_blas *blas;     /* made by the first GEMM */
    uint64_t record_at; /* interval being recorded; UINT64_MAX: none */
    void *workspace;    /* of grouped GEMMs */
    uint64_t workspace_bytes;
    uint32_t *stored; /* of gpu_raise */
    gpu_staging *staging;
    gpu_chain *chain; /* NULL: none here */
    bool stale;       /* the staging stream must join the queue again */
};

/* Flag words of one window: key[i] names a place in the window (1 + its offset),
 * words follow as [ranks][GPU_FLAGS][ranks]: word s of flag i at rank d. */
#define GPU_FLAGS 512
struct epo_window {
    epo_backend *be;
    char *base; /* device memory */
    uint64_t bytes;
    char **peer;           /* [ranks] their bases as this rank sees them */
    bool *opened;          /* [ranks] by IPC, to be closed */
    _Atomic uint64_t *key; /* [GPU_FLAGS], host, shared by all ranks */
    volatile uint64_t *words;
    char *words_dev; /* the same for this device */
    uint64_t shared_bytes;
    bool registered; /* by this rank */
    struct epo_window *next;
};

/* In epo_event.behind. */
static inline uint32_t gpu_queue_bit(const epo_queue *q) { return UINT32_C(1) << q->slot; }

#define GPU_CHAIN_WORDS 64 /* of parts of chains, per backend */
#define GPU_BESIDE_SMS 16  /* for what moves rows beside GEMMs */

/* How ranks wait for flags. */
typedef enum gpu_wait_mode {
    GPU_WAIT_STREAM = 0, /* the stream waits */
    GPU_WAIT_HOST = 1    /* the issuing thread waits before it enqueues */
} gpu_wait_mode;

struct epo_backend {
    epo_backend_info info;
    char versions[256];
    int rank, ranks, device, sms;
    double timeout_s, warn_s;
    gpu_wait_mode wait_mode;
    bool stream_ops;   /* the device writes and waits for words by itself */
    bool one_sided;    /* ranks of a node write each other's memory */
    bool chains;       /* both products of the experts in one launch where it fits */
    bool chains_asked; /* whatever comes of it */
    bool keeps;        /* products keep rows that weight gradients read later */
    bool direct;       /* chains store peers' rows at the peers' */
    gpu_gemm_way gemm_way;
    bool grouped;         /* our sm_90 GEMM kernels where they fit */
    int lend_sms;         /* that GEMMs leave to exchanges beside them */
    int gemm_sms;         /* that those take; 0: all */
    uint64_t small_piece; /* bytes; smaller ones on average are stored, not copied */
    uint64_t near_bytes;  /* as epo_backend_info.near_bytes */
    bool pack;            /* gathered rows by copy engines too */
    int pack_sms;         /* SMs that pack rows for copy engines beside GEMMs */
    uint32_t ways;        /* for info */
    bool batch_copies;    /* many copies in one call */
    bool bulk;            /* the device copies in bulk: kernels of flex_*.cu (sm_90) */
    bool sums;            /* exchanges sum rows on their way */
    bool shared_device;   /* another rank uses this GPU too */
    bool any_shared;      /* some GPU has several ranks */
    gpu_words *words;     /* with the first queue that has chains */
    gpu_board *board;     /* by the first buffer for graphs: what its kernels tell */
    gpu_board *board_dev;
    uint32_t *claim;                  /* device: an error is on it */
    uint64_t *chain_uses;             /* device, behind the claim: calls that graphs may capture */
    uint64_t *chain_words;            /* device, [GPU_CHAIN_WORDS]: gpu_words' of those calls */
    enum cudaStreamCaptureMode outer; /* the thread's, between enter and leave */
    gpu_meet *meet;
    gpu_memory_state *memory;
    gpu_watch *watch;
    gpu_record *record;
    gpu_routing *routing; /* made by the first routing */
    gpu_flex_maps *flex;  /* by the first one for flex */
    gpu_pairs *pairs;     /* NULL with one_sided */
    double pairs_rate;    /* bytes a second of this rank's, as seen when it was made */
    epo_window *windows;
    epo_queue *queues[GPU_QUEUES];
    epo_window *sum; /* allreduce's window and progress */
    epo_queue *sum_queue;
    epo_event *sum_done;
    uint64_t sum_epoch;
    /* The first late error; late_word says on the device that there is one. */
    pthread_mutex_t lock;
    atomic_int late;
    atomic_int busy;  /* how much was left to a thread, as the GPU had other work */
    atomic_int hangs; /* waits for this group's own work that did not end */
    bool broken;      /* how it is closed */
    atomic_bool marking, marked;
    atomic_bool unmarked;           /* late_word was not set before waits were released */
    uint32_t *late_word;            /* the device's, which results look at */
    uint32_t *late_cpu, *late_seen; /* the CPU's, and as kernels see it */
    bool late_host;                 /* only that one can be set while a stream waits */
    atomic_int late_fetches;
    cudaStream_t late_stream;
    char late_text[EPO_ERROR_MAX];
};

/* ---- check.c ---- */
/* "rank 1: cudaMallocAsync (fc1): out of memory (cudaErrorMemoryAllocation)" */
epo_status gpu_fail(const epo_backend *be, const char *call, const char *phase, cudaError_t error);
epo_status gpu_fail_driver(const epo_backend *be, const char *call, const char *phase,
                           CUresult error);
#define GPU_TRY(be, phase, call)                                                                   \
    do {                                                                                           \
        cudaError_t try_ = (call);                                                                 \
        if (try_ != cudaSuccess)                                                                   \
            return gpu_fail((be), #call, (phase), try_);                                           \
    } while (0)
/* Keeps the first late error, tells the peers, and, when they know that what comes from here is
 * nothing, releases every pending wait here: what stands behind those raises flags. */
void gpu_break(epo_backend *be, epo_status status, const char *text);
/* EPO_OK, or the late error, its text made the caller's. */
epo_status gpu_late(epo_backend *be);
epo_status gpu_late_open(epo_backend *be);
void gpu_late_close(epo_backend *be);
/* Before a wait is released that nobody answered: results become NaN from here on. */
void gpu_late_mark(epo_backend *be);
/* In q's order, behind its waits and before what looks at late_word: that becomes what the CPU's
 * word says, where the CPU may not reach it otherwise: this often, or always with one hardware
 * queue. */
#define GPU_LATE_FETCHES 64
epo_status gpu_late_fetch(epo_queue *q, const char *phase);
/* The word that kernels look at which wait themselves. */
uint32_t *gpu_late_poll(const epo_backend *be);

/* ---- driver.c ---- */
typedef struct gpu_driver {
    CUresult (*wait64)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
    CUresult (*write64)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
    CUresult (*batch)(CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned);
    CUresult (*name)(CUresult, const char **);
    CUresult (*attribute)(int *, CUdevice_attribute, CUdevice);
    /* NULL before 12.5. */
    CUresult (*kernel_library)(CUlibrary *, CUkernel);
    CUresult (*library_count)(unsigned *, CUlibrary);
    CUresult (*library_kernels)(CUkernel *, unsigned, CUlibrary);
    CUresult (*kernel_function)(CUfunction *, CUkernel);
    int version;
} gpu_driver;
/* Once per process; NULL with a reason if libcuda.so.1 cannot serve. */
const gpu_driver *gpu_driver_get(const char **why);
/* A library that the process has mapped already (its path contains `stem`), else
 * by soname; NULL if none.  `path` receives where it came from. */
void *gpu_library_find(const char *stem, const char *const *sonames, char *path, size_t size);
/* A function of it; *missing, if still NULL, becomes the name of one that it lacks. */
void *gpu_library_symbol(void *library, const char *name, const char **missing);

/* ---- load.c ---- */
epo_status gpu_kernels_load(epo_backend *be);
/* Before a library launches a kernel that the device may not have yet, where ranks are threads:
 * the first time with these bytes, which tell it from others, everything issued so far is waited
 * for. */
epo_status gpu_library_first(epo_queue *q, const void *kernel, size_t bytes, const char *phase);

/* ---- meet.c: the ranks on the host side ---- */
epo_status gpu_world_create(int ranks, epo_world **out);
void gpu_world_destroy(epo_world *world);
epo_status gpu_meet_open(const epo_backend_config *config, gpu_meet **out);
void gpu_meet_close(gpu_meet *meet, bool broken);
int gpu_meet_rank(const gpu_meet *meet);
int gpu_meet_ranks(const gpu_meet *meet);
bool gpu_meet_threads(const gpu_meet *meet);
/* Machines that the ranks were found on; 0: one, or not known. */
int gpu_meet_nodes(const gpu_meet *meet);
#define GPU_LOOK_S 0.05 /* peers' lives are looked at this often */
/* From a thread that lives as long as the group: others see how this process ends. */
void gpu_meet_watch(gpu_meet *meet, bool begin);
/* Has that rank ended, or left?  "rank 1 (pid 71 on n2) ended without ..." in `text`. */
bool gpu_meet_lost(const gpu_meet *meet, int rank, char *text, size_t size);
/* This rank's next collective call; NULL: they are not compared any more.  False: a peer that
 * came before made another one in its place, or made it otherwise; of any of the last calls. */
bool gpu_meet_turn(gpu_meet *meet, const epo_turn *turn, bool refused, char *text, size_t size);
bool gpu_meet_differs(const gpu_meet *meet, char *text, size_t size);
epo_status gpu_meet_barrier(gpu_meet *meet);
epo_status gpu_meet_allgather(gpu_meet *meet, const void *mine, size_t bytes, void *all);
/* [collective]  How does everybody fare in a step that all take?  This rank's error, if it has
 * one, else the first of another's, with its reason. */
epo_status gpu_meet_agree(gpu_meet *meet, epo_status mine);
/* Zeroed memory that all ranks see. */
epo_status gpu_meet_shared(gpu_meet *meet, uint64_t bytes, void **out);
void gpu_meet_unshare(gpu_meet *meet, void *ptr, uint64_t bytes);
/* Whom this rank waits for now (-1: nobody); where waiting for `rank` leads, which may itself
 * wait for another. */
void gpu_meet_waits(gpu_meet *meet, int rank);
int gpu_meet_waits_end(gpu_meet *meet, int rank);
/* A word that changes as long as that rank's watchdog runs; 0: of another machine. */
uint64_t gpu_meet_sign(const gpu_meet *meet, int rank);
void gpu_meet_abort(gpu_meet *meet, epo_status status, const char *text);
/* EPO_OK, or the first failure a peer announced, with its text. */
epo_status gpu_meet_failed(gpu_meet *meet, char *text, size_t size);

/* ---- comm.c ---- */
typedef struct gpu_comm gpu_comm;
/* Sets rank, ranks and bootstrap from config->nccl_comm; close it when the group has
 * met. */
epo_status gpu_comm_open(epo_backend_config *config, gpu_comm **out);
/* What went wrong over it, if that is why the meeting failed; else `status`. */
epo_status gpu_comm_explain(const gpu_comm *comm, epo_status status);
void gpu_comm_close(gpu_comm *comm);

/* ---- queue.c ---- */
epo_status gpu_queue_create(epo_backend *be, epo_queue_kind kind, epo_queue **out);
void gpu_queue_destroy(epo_backend *be, epo_queue *queue);
epo_status gpu_event_create(epo_backend *be, epo_event **out);
void gpu_event_destroy(epo_backend *be, epo_event *event);
bool gpu_mark(epo_queue *q, epo_event **mark);
bool gpu_between(epo_backend *be, epo_event *from, epo_event *to, double *seconds);
bool gpu_event_query(epo_backend *be, epo_event *event);
epo_status gpu_stream_enter(epo_backend *be, epo_queue *const *queues, int count,
                            epo_stream stream);
epo_status gpu_stream_leave(epo_backend *be, epo_event *event, epo_stream stream);
epo_status gpu_sync(epo_backend *be, epo_event *event);
epo_status gpu_call(epo_queue *q, void (*fn)(void *), void *ctx, const epo_deps *deps);
epo_status gpu_run(epo_queue *q, epo_status (*fn)(void *, epo_stream), void *ctx,
                   const epo_deps *deps);
/* Around each operation: waits, then true to go on; false: pass over (the signal
 * has been given) or failed (*status). */
bool gpu_op_begin(epo_queue *q, const epo_deps *deps, epo_status *status);
epo_status gpu_op_end(epo_queue *q, const epo_deps *deps);

/* ---- flags.c ---- */
epo_status gpu_flag_wait(epo_queue *q, const epo_ready *ready);
/* For all of them, in one call of the driver where it can be one. */
epo_status gpu_flags_wait(epo_queue *q, const epo_ready *const *ready, int count);
/* For a kernel that waits itself: the words as the device sees them, watched as above, unless
 * a counter is added to their epoch. */
epo_status gpu_flag_watch(epo_queue *q, const epo_ready *ready, const uint64_t **words);
/* `stream` waits for flags that are watched already, or need not be. */
epo_status gpu_flag_hold(epo_queue *q, cudaStream_t stream, const epo_ready *ready);
/* Whose words become the exchange's epoch, in the order of `stream`; of its scope. */
typedef enum gpu_flag_to {
    GPU_FLAG_ALL,    /* this rank's word at every rank of the scope */
    GPU_FLAG_PEERS,  /* at every other rank */
    GPU_FLAG_SELF,   /* at this rank */
    GPU_FLAG_ARRIVED /* every sender's word at this rank: the two-sided exchange's end */
} gpu_flag_to;
epo_status gpu_flag_write(epo_queue *q, cudaStream_t stream, const epo_exchange *x, gpu_flag_to to,
                          const char *phase);

/* The same for a kernel of the queue that raises the exchange's flags to all itself. */
epo_status gpu_flag_raise(epo_queue *q, const epo_exchange *x, const char *phase, gpu_raise *out);

/* One word of mapped host memory, in queue order. */
epo_status gpu_word_write(epo_queue *q, uint64_t device, uint64_t *host, uint64_t value,
                          const char *phase);

/* ---- watch.c ---- */
epo_status gpu_watch_start(epo_backend *be);
void gpu_watch_stop(epo_backend *be);
epo_status gpu_watch_add(epo_backend *be, volatile uint64_t *words, const epo_ready *ready);
/* An event for the next. */
cudaError_t gpu_watch_take(epo_backend *be, cudaEvent_t *out);
/* For work of others that may hang (NCCL): `event` must complete in time; what is missing is
 * one of the peers. */
epo_status gpu_watch_event(epo_backend *be, cudaEvent_t event, const char *what, int chunk,
                           const epo_peers *peers);
/* Drops waits for words in this memory, which is about to go. */
void gpu_watch_forget(epo_backend *be, volatile uint64_t *words, uint64_t bytes);
void gpu_watch_release(epo_backend *be);
double gpu_now(void);
/* For how long has that rank's process shown no sign of life?  0: it does, or is not known. */
double gpu_watch_silence(const epo_backend *be, int rank);
/* The host side wait, bounded. */
epo_status gpu_watch_poll(epo_backend *be, volatile uint64_t *words, const epo_ready *ready);

/* ---- release.c ---- */
/* Runs `fn(ctx)`, which may wait for all of the GPU's work and gives back ctx too, on a thread of
 * its own.  False: it has not ended within the group's limit (a broken group's: 5 s at most), and
 * goes on by itself; a line on stderr says so the first time. */
bool gpu_release(epo_backend *be, const char *what, void (*fn)(void *ctx), void *ctx);
bool gpu_release_within(double limit_s, int device, int rank, const char *what, bool say,
                        void (*fn)(void *ctx), void *ctx);
#define GPU_BESIDE_S 1.0 /* for what is small: nobody misses it */
/* Zeroed memory of the CPU's that every device sees, here at *device. */
epo_status gpu_host_map(epo_backend *be, uint64_t bytes, const char *phase, void **host,
                        void **device);
void gpu_free_host(epo_backend *be, void *host); /* of cudaHostAlloc; NULL is accepted */
/* Waits with a limit: the group's twice, and 5 s. */
epo_status gpu_rest_stream(epo_backend *be, cudaStream_t stream, const char *phase);
epo_status gpu_rest_event(epo_backend *be, cudaEvent_t event, const char *phase);
/* Does the stream come to rest, so that what it uses may go?  NULL does. */
bool gpu_rests(epo_backend *be, cudaStream_t stream);
/* The same where it may stand for a peer that is late: nothing is said of it, nor counted. */
bool gpu_rests_within(cudaStream_t stream, double limit_s);
double gpu_release_limit(const epo_backend *be);

/* ---- memory.c ---- */
epo_status gpu_memory_open(epo_backend *be);
void gpu_memory_close(epo_backend *be);
/* For operations of this rank's queues alone; free: when they are through with it. */
epo_status gpu_alloc(epo_backend *be, uint64_t bytes, void **out);
void gpu_free(epo_backend *be, void *ptr, uint64_t bytes);
/* As free, but not before the backend ends: graphs may use it. */
void gpu_retire(epo_backend *be, void *ptr, uint64_t bytes);
/* Complete on return, beside all queues. */
epo_status gpu_write_now(epo_backend *be, void *dst, const void *src, uint64_t bytes);
epo_status gpu_zero_now(epo_backend *be, void *dst, uint64_t bytes);
/* That peers can open. */
epo_status gpu_alloc_shared(epo_backend *be, uint64_t bytes, void **out);
void gpu_free_shared(epo_backend *be, void *ptr, uint64_t bytes);
epo_status gpu_read(epo_backend *be, void *dst, const void *src, uint64_t bytes);
epo_status gpu_write(epo_backend *be, void *dst, const void *src, uint64_t bytes);
void gpu_memory_count(epo_backend *be, int64_t bytes);
void gpu_memory(epo_backend *be, uint64_t *now, uint64_t *peak);

/* ---- window.c ---- */
/* Can the ranks write each other's memory, and do all want it?  The same answer on every rank;
 * `why` says what is in the way. */
epo_status gpu_window_reach(epo_backend *be, bool wanted, bool *all, char *why, size_t size);
epo_status gpu_window_create(epo_backend *be, uint64_t bytes, epo_window **out);
void gpu_window_destroy(epo_backend *be, epo_window *w);
void *gpu_window_local(epo_window *w);
epo_window *gpu_window_of(epo_backend *be, const volatile void *address);

/* ---- exchange.c, pairs.c ---- */
epo_status gpu_exchange(epo_queue *q, const epo_exchange *x, const epo_deps *deps);
epo_status gpu_copy(epo_queue *q, void *dst, const void *src, uint64_t bytes, const epo_deps *deps);
epo_status gpu_pairs_create(epo_backend *be);
/* NCCL's version (22809); false: none, `why` says so. */
bool gpu_pairs_find(int *version, const char **why);
void gpu_pairs_destroy(epo_backend *be, bool broken);
void gpu_pairs_abort(epo_backend *be);
/* NCCL says that its communicator has failed on this rank, as `text` tells. */
bool gpu_pairs_failed(epo_backend *be, char *text, size_t size);
/* src[i]: where segment i lies contiguously; NULL for this rank's own. */
epo_status gpu_pairs_exchange(epo_queue *q, const epo_exchange *x, const char *const *src,
                              const epo_deps *deps);
epo_status gpu_allreduce(epo_backend *be, float *data, uint64_t count, epo_stream stream);

/* ---- staging.c ---- */
epo_status gpu_staging_open(epo_queue *q);
cudaStream_t gpu_staging_stream(const epo_queue *q); /* NULL: none yet */
/* Room for that many bytes before anything of this pass is under way. */
epo_status gpu_staging_reserve(epo_queue *q, uint64_t bytes);
/* The queue's second stream; after what the queue holds now, if `stale`. */
epo_status gpu_staging_join(epo_queue *q, bool stale, cudaStream_t *out);
/* Room that the second stream may write. */
epo_status gpu_staging_take(epo_queue *q, uint64_t bytes, char **out);
/* The queue goes on after what the second stream holds now. */
epo_status gpu_staging_packed(epo_queue *q, const char *phase);
/* The queue has read the room taken last. */
epo_status gpu_staging_copied(epo_queue *q, const char *phase);
/* The second stream moves own rows, which the queue does not wait for. */
void gpu_staging_ahead(epo_queue *q);
/* As packed, for own rows; nothing where none are on their way. */
epo_status gpu_staging_settle(epo_queue *q, const char *phase);
void gpu_staging_free(epo_queue *q);

/* ---- chain.c ---- */
/* What a chain of this queue needs, made before anything waits for anything. */
epo_status gpu_chain_open(epo_queue *q);
/* A product on gg->sms SMs, and on the others behind `until`. */
epo_status gpu_side_run(epo_queue *q, epo_gg *gg, epo_event *until, const char *phase);
bool gpu_chain_covers(epo_backend *be, const epo_chain *c);
epo_status gpu_chain_op(epo_queue *q, const epo_chain *c, const epo_deps *deps);
void gpu_chain_free(epo_queue *q);
void gpu_words_close(epo_backend *be);
/* The queue goes on after the event's last signal. */
epo_status gpu_event_wait(epo_queue *q, epo_event *event, const char *phase);
/* The event's word, if it has one, is another's now. */
void gpu_word_give(epo_backend *be, epo_event *event);

/* ---- gemm.c, blas.c, lt.c ---- */
/* Who multiplies, as EP_OVERLAP_CUDA_GEMM wishes; an error if that cannot be. */
epo_status gpu_gemm_choose(epo_backend *be);
/* "cuBLASLt 13.1", and what else than `auto` was chosen. */
void gpu_gemm_version(const epo_backend *be, char *text, size_t size);
/* The grouped GEMM of these experts; with the activation in its epilogue. */
epo_gg gpu_gemm_shape(const epo_gemm *g);
void gpu_gemm_act(epo_gg *gg, const epo_swiglu *act);
epo_status gpu_workspace_hold(epo_queue *q, uint64_t bytes);
epo_status gpu_gemm(epo_queue *q, const epo_gemm *g, const epo_deps *deps);
bool gpu_gemm_drops_h(epo_backend *be, const epo_gemm *g);
bool gpu_gemm_keeps(epo_backend *be, const epo_gemm *g);
void gpu_workspace_free(epo_queue *q);
/* first, count: the experts' rows, for the CPU. */
epo_status gpu_blas_gemm(epo_queue *q, const epo_gemm *g, const uint64_t *first,
                         const uint64_t *count, const char *phase);
void gpu_blas_destroy(gpu_blas *blas);
/* The library's version (1301); false: none that serves, `why` says so. */
bool gpu_blas_find(int *version, const char **why);
bool gpu_lt_find(int *version, const char **why);

/* ---- routing.c ---- */
epo_status gpu_route_count(epo_queue *q, const epo_routes *routes, epo_route_counts *out);
epo_status gpu_route_send(epo_queue *q, const epo_routes *routes, const uint64_t *expert_first,
                          const uint64_t *own_row, int32_t *token, int32_t *slot, int32_t *row,
                          const epo_deps *deps);
epo_status gpu_route_pad(epo_queue *q, const uint64_t *first, const uint64_t *count, int experts,
                         uint64_t rows, int32_t *index, const epo_deps *deps);
void gpu_routing_close(epo_backend *be);

/* ---- flex.c ---- */
/* The routing that routing.c is counting, `copy` what it keeps, by chunks; gpu_flex_counted
 * when the counts are there. */
epo_status gpu_flex_count_chunks(epo_queue *q, const epo_routes *r, int32_t *copy);
void gpu_flex_counted(const epo_backend *be, const epo_routes *r, uint32_t *chunk_rows);
epo_status gpu_flex_send_maps(epo_queue *q, const epo_routes *r, const epo_flex_send *out,
                              const epo_deps *deps);
epo_status gpu_flex_receive_maps(epo_queue *q, const epo_flex_receive *in, const epo_deps *deps);
void gpu_flex_close(epo_backend *be);

/* ---- replay.c ---- */
epo_status gpu_replay_open(epo_backend *be);
void gpu_replay_close(epo_backend *be);
epo_status gpu_replay_enter(epo_backend *be, epo_queue *const *queues, int count,
                            uint64_t *const *counters, int ncounters, epo_stream stream,
                            uint64_t *capture);
epo_status gpu_replay_leave(epo_backend *be, epo_stream stream);
uint64_t gpu_replay_scratch(const epo_routes *routes);
epo_status gpu_replay_route(epo_queue *q, const epo_routes *routes, const epo_replay_route *r,
                            const epo_deps *deps);
uint64_t gpu_replay_dropped(const epo_backend *be);
epo_status gpu_replay_flex_send(epo_queue *q, const epo_routes *routes, const epo_replay_flex *f,
                                const epo_deps *deps);
epo_status gpu_replay_flex_arrived(epo_queue *q, const epo_replay_arrived *a, const epo_deps *deps);
/* The stream waits by a kernel for `count` words. */
epo_status gpu_replay_wait(epo_queue *q, cudaStream_t stream, const uint64_t *words,
                           const epo_ready *ready);
/* What kernels told since: the error that breaks the backend, or EPO_OK. */
epo_status gpu_replay_scan(epo_backend *be, char *text, size_t size);

/* ---- record.c ---- */
epo_status gpu_record_start(epo_backend *be, uint64_t capacity);
epo_status gpu_record_stop(epo_backend *be, const epo_interval **out, uint64_t *count,
                           uint64_t *dropped);
void gpu_record_begin(epo_queue *q, const epo_deps *deps);
void gpu_record_end(epo_queue *q);
void gpu_record_destroy(epo_backend *be);

#endif
