/* SPDX-License-Identifier: Apache-2.0
 *
 * pairs.c - the exchange where ranks do not reach each other's memory: grouped
 * ncclSend and ncclRecv on a communicator of our own.
 */
#include "config.h"

#include "backend/cuda/gpu.h"
#include "backend/limited.h"

#ifdef HAVE_NCCL

#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NCCL_OLDEST 21800
/* What a rank sends to see what the fabric carries, and how often. */
#define TRIAL_BYTES ((size_t)16 << 20)
#define TRIALS 4
/* For ncclCommAbort's return. */
#define ABORT_S 2.0

typedef struct pairs_api {
    ncclResult_t (*version)(int *);
    ncclResult_t (*unique)(ncclUniqueId *);
    ncclResult_t (*init)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *);
    ncclResult_t (*destroy)(ncclComm_t);
    ncclResult_t (*abort)(ncclComm_t);
    ncclResult_t (*state)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*start)(void);
    ncclResult_t (*end)(void);
    ncclResult_t (*send)(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*recv)(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    const char *(*text)(ncclResult_t);
    int number;
} pairs_api;

static pairs_api api;
static const char *api_missing;

static void api_load(void) {
    static const char *const sonames[] = {"libnccl.so.2", NULL};
    char path[512];
    void *lib = gpu_library_find("libnccl", sonames, path, sizeof path);
    if (lib == NULL) {
        api_missing = "libnccl.so.2 was not found";
        return;
    }
    *(void **)&api.version = gpu_library_symbol(lib, "ncclGetVersion", &api_missing);
    *(void **)&api.unique = gpu_library_symbol(lib, "ncclGetUniqueId", &api_missing);
    *(void **)&api.init = gpu_library_symbol(lib, "ncclCommInitRankConfig", &api_missing);
    *(void **)&api.destroy = gpu_library_symbol(lib, "ncclCommDestroy", &api_missing);
    *(void **)&api.abort = gpu_library_symbol(lib, "ncclCommAbort", &api_missing);
    *(void **)&api.state = gpu_library_symbol(lib, "ncclCommGetAsyncError", &api_missing);
    *(void **)&api.start = gpu_library_symbol(lib, "ncclGroupStart", &api_missing);
    *(void **)&api.end = gpu_library_symbol(lib, "ncclGroupEnd", &api_missing);
    *(void **)&api.send = gpu_library_symbol(lib, "ncclSend", &api_missing);
    *(void **)&api.recv = gpu_library_symbol(lib, "ncclRecv", &api_missing);
    *(void **)&api.text = gpu_library_symbol(lib, "ncclGetErrorString", &api_missing);
    if (api_missing == NULL && api.version(&api.number) != ncclSuccess)
        api_missing = "ncclGetVersion failed";
    if (api_missing == NULL && api.number < NCCL_OLDEST)
        api_missing = "NCCL is older than 2.18";
}

bool gpu_pairs_find(int *version, const char **why) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, api_load);
    *version = api.number;
    *why = api_missing;
    return api_missing == NULL;
}

struct gpu_pairs {
    ncclComm_t comm;
    epo_peers members;    /* of the communicator, as ranks of the group */
    pthread_mutex_t lock; /* around `aborted`: nobody asks a communicator that is given up */
    bool aborted;
};

static epo_status pairs_fail(const epo_backend *be, const char *call, const char *phase,
                             ncclResult_t r) {
    return epo_fail(EPO_E_SYSTEM, "rank %d: %s (%s): %s", be->rank, call, phase, api.text(r));
}
#define PAIRS_TRY(be, phase, name, call)                                                           \
    do {                                                                                           \
        ncclResult_t r_ = (call);                                                                  \
        if (r_ != ncclSuccess)                                                                     \
            return pairs_fail((be), (name), (phase), r_);                                          \
    } while (0)

/* All ranks; where several nodes are played in one machine and ranks share a GPU, which NCCL
 * refuses, those that exchange across nodes. */
static epo_peers pairs_members(const epo_backend *be) {
    const bool links = be->info.nodes > 1 && be->any_shared;
    return epo_peers_of(links ? EPO_SCOPE_LINK : EPO_SCOPE_GROUP, be->rank, be->ranks,
                        be->info.nodes);
}

/* ---- the communicator ------------------------------------------------------ */

/* NCCL's calls for it know no limit, and those of a communicator that is made without blocking
 * cost a thread for each exchange later: so they have a thread of their own, which is left to
 * itself where they do not return. */
typedef struct pairs_make {
    int device, count, me;
    ncclUniqueId id;
    ncclConfig_t config;
    ncclComm_t comm;
    cudaStream_t stream;
    char *memory;
    double rate;      /* bytes a second of this rank's, all ranks sending to all; 0: nobody else */
    const char *call; /* the one under way, or that failed */
    ncclResult_t nccl;
    cudaError_t cuda;
} pairs_make;

#define MAKE_CUDA(m, expression)                                                                   \
    do {                                                                                           \
        (m)->call = #expression;                                                                   \
        if (((m)->cuda = (expression)) != cudaSuccess)                                             \
            return;                                                                                \
    } while (0)

/* To and from everybody, `bytes` each. */
static void make_exchange(pairs_make *m, size_t bytes) {
    m->call = "ncclSend and ncclRecv";
    m->nccl = api.start();
    for (int p = 0; p < m->count && m->nccl == ncclSuccess; p++) {
        char *to = m->memory + bytes * ((size_t)p + 1);
        if (p == m->me)
            continue;
        m->nccl = api.send(m->memory, bytes, ncclInt8, p, m->comm, m->stream);
        if (m->nccl == ncclSuccess)
            m->nccl = api.recv(to, bytes, ncclInt8, p, m->comm, m->stream);
    }
    const ncclResult_t end = api.end();
    m->nccl = m->nccl == ncclSuccess ? end : m->nccl;
    if (m->nccl == ncclSuccess)
        MAKE_CUDA(m, cudaStreamSynchronize(m->stream));
}

/* Connections, and NCCL's kernel, come about now, not in the middle of the first pass; and
 * what the fabric carries is seen. */
static void make_connect(pairs_make *m) {
    const size_t bytes = (TRIAL_BYTES / (size_t)m->count + 15) / 16 * 16;
    const double sent = (double)bytes * (double)(m->count - 1);
    MAKE_CUDA(m, cudaStreamCreateWithFlags(&m->stream, cudaStreamNonBlocking));
    MAKE_CUDA(m, cudaMalloc((void **)&m->memory, bytes * ((size_t)m->count + 1)));
    MAKE_CUDA(m, cudaMemsetAsync(m->memory, 0, bytes, m->stream));
    for (int i = 0; i < TRIALS && m->nccl == ncclSuccess && m->cuda == cudaSuccess; i++) {
        const double start = gpu_now();
        make_exchange(m, bytes);
        const double rate = sent / (gpu_now() - start);
        m->rate = i > 0 && rate > m->rate ? rate : m->rate; /* the first one connects */
    }
}

static void make_run(void *ctx) {
    pairs_make *m = ctx;
    MAKE_CUDA(m, cudaSetDevice(m->device));
    m->call = "ncclCommInitRankConfig";
    m->nccl = api.init(&m->comm, m->count, m->id, m->me, &m->config);
    if (m->nccl == ncclSuccess)
        make_connect(m);
}

/* The communicator too, unless it was taken. */
static void make_free(void *ctx) {
    pairs_make *m = ctx;
    if (m->comm != NULL)
        (void)api.abort(m->comm);
    if (m->memory != NULL)
        (void)cudaFree(m->memory);
    if (m->stream != NULL)
        (void)cudaStreamDestroy(m->stream);
    free(m);
}

enum { MAKE_RANKS = 256 };
#define MAKE_SILENT_S 1.0

typedef struct make_wait {
    epo_backend *be;
    const epo_peers *members;
    double since;
    bool warned;
    /* Of each member's life, heard here: the watchdog may be held up in CUDA by what NCCL does
     * meanwhile. */
    uint64_t sign[MAKE_RANKS];
    double heard[MAKE_RANKS];
} make_wait;

static int wait_member(const make_wait *w, int i) {
    return w->members->first + i * w->members->step;
}

static void wait_listen(make_wait *w, double now) {
    for (int i = 0; i < w->members->count && i < MAKE_RANKS; i++) {
        const uint64_t sign = gpu_meet_sign(w->be->meet, wait_member(w, i));
        if (w->heard[i] > 0 && sign == w->sign[i])
            continue;
        w->sign[i] = sign;
        w->heard[i] = now;
    }
}

/* All ranks came here, as they had an allgather just before; what is amiss, NCCL knows, unless
 * one's process stands still. */
static void wait_describe(const make_wait *w, double age, char *text, size_t size) {
    char still[80] = "";
    for (int i = 0; i < w->members->count && i < MAKE_RANKS && still[0] == '\0'; i++) {
        const int r = wait_member(w, i);
        const double silence = gpu_now() - w->heard[i];
        /* (0: of another machine, where nothing of its life is seen) */
        if (r != w->be->rank && w->sign[i] != 0 && silence > MAKE_SILENT_S)
            snprintf(still, sizeof still, "no sign of life from rank %d for %.0f s; ", r, silence);
    }
    snprintf(text, size,
             "rank %d: NCCL's making a communicator of %d ranks: not complete after %.0f s, though "
             "all came to it: %sNCCL_DEBUG=INFO tells what NCCL waits for, NCCL_SOCKET_IFNAME "
             "chooses its network",
             w->be->rank, w->members->count, age, still);
}

/* May it go on?  A failure that a rank announced, a rank that is gone, the limit. */
static epo_status make_look(void *asks) {
    make_wait *w = asks;
    const epo_backend *be = w->be;
    const double now = gpu_now(), age = now - w->since;
    char text[512], who[200];
    epo_status status = gpu_meet_failed(be->meet, text, sizeof text);
    wait_listen(w, now);
    for (int i = 0; i < w->members->count && status == EPO_OK; i++) {
        const int r = wait_member(w, i);
        if (!gpu_meet_lost(be->meet, r, who, sizeof who))
            continue;
        snprintf(text, sizeof text, "%s; rank %d waited for it in NCCL's making a communicator",
                 who, be->rank);
        status = EPO_E_PEER;
    }
    if (status == EPO_OK && age > be->timeout_s) {
        wait_describe(w, be->timeout_s, text, sizeof text);
        status = EPO_E_TIMEOUT;
    } else if (status == EPO_OK && age > be->warn_s && !w->warned) {
        w->warned = true;
        wait_describe(w, age, text, sizeof text);
        fprintf(stderr, "ep-overlap: %s, still waiting\n", text);
    }
    return status == EPO_OK ? EPO_OK : epo_fail(status, "%s", text);
}

static epo_status pairs_make_comm(epo_backend *be, const epo_peers *members, const ncclUniqueId *id,
                                  ncclComm_t *out) {
    const ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    make_wait wait = {.be = be, .members = members, .since = gpu_now()};
    pairs_make *m = calloc(1, sizeof *m);
    if (m == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for the communicator", be->rank);
    *m = (pairs_make){.device = be->device,
                      .count = members->count,
                      .me = members->me,
                      .id = *id,
                      .config = config};
    epo_status status = epo_limited_call(make_run, make_free, m, make_look, &wait);
    if (status != EPO_OK)
        return status;
    if (m->nccl != ncclSuccess)
        status = pairs_fail(be, m->call, "group", m->nccl);
    else if (m->cuda != cudaSuccess)
        status = gpu_fail(be, m->call, "group", m->cuda);
    if (status == EPO_OK) {
        *out = m->comm;
        be->pairs_rate = m->rate;
        m->comm = NULL;
    }
    (void)gpu_release_within(GPU_BESIDE_S, be->device, be->rank,
                             "what the communicator was tried with", true, make_free, m);
    return status;
}

/* What a rank gives to the communicator: of its first member the name. */
static epo_status pairs_begin(const epo_backend *be, const epo_peers *members, ncclUniqueId *id) {
    const char *why = NULL;
    int version = 0;
    if (!gpu_pairs_find(&version, &why))
        return epo_fail(EPO_E_UNSUPPORTED,
                        "rank %d cannot use NCCL (%s), and %s; NCCL 2.18 or newer is needed",
                        be->rank, why,
                        be->info.nodes > 1 ? "the group is on several nodes"
                                           : "the ranks do not reach each other's memory");
    if (members->me == 0)
        PAIRS_TRY(be, "group", "ncclGetUniqueId", api.unique(id));
    return EPO_OK;
}

/* [collective]  Rank 0's of the members; an error if a rank has `mine`, or cannot use NCCL. */
static epo_status pairs_id(epo_backend *be, const epo_peers *members, epo_status mine,
                           ncclUniqueId *id) {
    ncclUniqueId all[MAKE_RANKS];
    memset(id, 0, sizeof *id);
    epo_status status =
        gpu_meet_agree(be->meet, mine == EPO_OK ? pairs_begin(be, members, id) : mine);
    if (status == EPO_OK)
        status = gpu_meet_allgather(be->meet, id, sizeof *id, all);
    if (status == EPO_OK)
        *id = all[members->first];
    return status;
}

/* [collective] */
epo_status gpu_pairs_create(epo_backend *be) {
    const epo_peers members = pairs_members(be);
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    gpu_pairs *pairs = calloc(1, sizeof *pairs);
    epo_status status =
        pairs != NULL ? EPO_OK
                      : epo_fail(EPO_E_NOMEM, "rank %d: no memory for the communicator", be->rank);
    status = pairs_id(be, &members, status, &id);
    if (status == EPO_OK)
        status = pairs_make_comm(be, &members, &id, &comm);
    if (status != EPO_OK) {
        free(pairs);
        return status;
    }
    pthread_mutex_init(&pairs->lock, NULL);
    pairs->members = members;
    pairs->comm = comm;
    __atomic_store_n(&be->pairs, pairs, __ATOMIC_RELEASE);
    if (atomic_load(&be->late) != EPO_OK) /* whoever broke the group did not see it */
        gpu_pairs_abort(be);
    return EPO_OK;
}

/* NCCL frees memory on its way. */
static void comm_abort(void *comm) { (void)api.abort(comm); }
static void comm_destroy(void *comm) { (void)api.destroy(comm); }

/* Once, by whichever thread is first: ends kernels that wait for a peer.  That is done when the
 * call begins; where it returns, NCCL has waited for the peers of this host, too, and one that
 * stands still holds it up.  That is no news of a group that broke, nor is the GPU busy then. */
void gpu_pairs_abort(epo_backend *be) {
    gpu_pairs *pairs = __atomic_load_n(&be->pairs, __ATOMIC_ACQUIRE);
    if (pairs == NULL)
        return;
    pthread_mutex_lock(&pairs->lock);
    const bool first = !pairs->aborted;
    pairs->aborted = true;
    pthread_mutex_unlock(&pairs->lock);
    if (first)
        (void)gpu_release_within(ABORT_S, be->device, be->rank, "an aborted communicator", false,
                                 comm_abort, pairs->comm);
}

void gpu_pairs_destroy(epo_backend *be, bool broken) {
    if (be->pairs == NULL)
        return;
    if (broken)
        gpu_pairs_abort(be);
    else if (!be->pairs->aborted) /* by the watchdog */
        (void)gpu_release(be, "a communicator", comm_destroy, be->pairs->comm);
    pthread_mutex_destroy(&be->pairs->lock);
    free(be->pairs);
    be->pairs = NULL;
}

bool gpu_pairs_failed(epo_backend *be, char *text, size_t size) {
    gpu_pairs *pairs = __atomic_load_n(&be->pairs, __ATOMIC_ACQUIRE);
    ncclResult_t r = ncclSuccess;
    if (pairs == NULL)
        return false;
    pthread_mutex_lock(&pairs->lock);
    if (!pairs->aborted && api.state(pairs->comm, &r) != ncclSuccess)
        r = ncclSuccess; /* it does not say */
    pthread_mutex_unlock(&pairs->lock);
    if (r == ncclSuccess || r == ncclInProgress)
        return false;
    snprintf(text, size, "rank %d: NCCL's communicator has failed here: %s", be->rank, api.text(r));
    return true;
}

/* The rank's number in the communicator. */
static int pairs_of(const epo_backend *be, int rank) {
    return (rank - be->pairs->members.first) / be->pairs->members.step;
}

static epo_status pairs_post(epo_queue *q, const epo_exchange *x, const char *const *src,
                             const char *phase) {
    epo_backend *be = q->be;
    ncclComm_t comm = be->pairs->comm;
    for (int i = 0; i < x->nsend; i++) {
        const epo_segment *s = &x->send[i];
        if (s->peer != be->rank && s->rows > 0)
            PAIRS_TRY(be, phase, "ncclSend",
                      api.send(src[i], s->rows * s->row_bytes, ncclInt8, pairs_of(be, s->peer),
                               comm, q->stream));
    }
    for (int i = 0; i < x->nrecv; i++) {
        const epo_arrival *a = &x->recv[i];
        if (a->peer != be->rank && a->bytes > 0)
            PAIRS_TRY(be, phase, "ncclRecv",
                      api.recv(x->window->base + a->offset, a->bytes, ncclInt8,
                               pairs_of(be, a->peer), comm, q->stream));
    }
    return EPO_OK;
}

/* Is there anything between this rank and another? */
static bool pairs_any(const epo_backend *be, const epo_exchange *x) {
    for (int i = 0; i < x->nsend; i++)
        if (x->send[i].peer != be->rank && x->send[i].rows > 0)
            return true;
    for (int i = 0; i < x->nrecv; i++)
        if (x->recv[i].peer != be->rank && x->recv[i].bytes > 0)
            return true;
    return false;
}

/* Nothing is sent where there are no bytes: what a rank's window holds changes by its own
 * ncclRecv alone, so neither credits nor empty parts need a word from anybody. */
epo_status gpu_pairs_exchange(epo_queue *q, const epo_exchange *x, const char *const *src,
                              const epo_deps *deps) {
    epo_backend *be = q->be;
    const epo_peers to = epo_peers_of(x->scope, be->rank, be->ranks, be->info.nodes);
    if (be->pairs->members.count < to.count || be->pairs->members.step > to.step)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "rank %d: %s: ranks of several nodes share a GPU, which NCCL refuses: only "
                        "flex is served then",
                        be->rank, deps->name);
    if (!pairs_any(be, x))
        return EPO_OK;
    PAIRS_TRY(be, deps->name, "ncclGroupStart", api.start());
    epo_status status = pairs_post(q, x, src, deps->name);
    ncclResult_t r = api.end();
    if (status == EPO_OK && r != ncclSuccess)
        status = pairs_fail(be, "ncclGroupEnd", deps->name, r);
    if (status != EPO_OK)
        return status;
    cudaEvent_t event;
    GPU_TRY(be, deps->name, gpu_watch_take(be, &event));
    const cudaError_t e = cudaEventRecord(event, q->stream);
    status = e == cudaSuccess ? gpu_watch_event(be, event, deps->name, deps->chunk, &to)
                              : gpu_fail(be, "cudaEventRecord", deps->name, e);
    if (status != EPO_OK)
        (void)cudaEventDestroy(event);
    return status;
}

#else

bool gpu_pairs_find(int *version, const char **why) {
    *version = 0;
    *why = "this build was made without NCCL's header";
    return false;
}

epo_status gpu_pairs_create(epo_backend *be) {
    return epo_fail(EPO_E_UNSUPPORTED,
                    "rank %d: the ranks do not reach each other's memory, and this build was made "
                    "without NCCL; build with --with-nccl",
                    be->rank);
}

void gpu_pairs_abort(epo_backend *be) { (void)be; }

bool gpu_pairs_failed(epo_backend *be, char *text, size_t size) {
    (void)be;
    (void)text;
    (void)size;
    return false;
}

void gpu_pairs_destroy(epo_backend *be, bool broken) {
    (void)be;
    (void)broken;
}

epo_status gpu_pairs_exchange(epo_queue *q, const epo_exchange *x, const char *const *src,
                              const epo_deps *deps) {
    (void)x;
    (void)src;
    (void)deps;
    return gpu_pairs_create(q->be);
}

#endif
