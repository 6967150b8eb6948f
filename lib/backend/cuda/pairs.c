/* SPDX-License-Identifier: Apache-2.0
 *
 * pairs.c - the exchange where ranks do not reach each other's memory: grouped
 * ncclSend and ncclRecv on a communicator of our own.
 */
#include "config.h"

#include "backend/cuda/gpu.h"

#ifdef HAVE_NCCL

#include <nccl.h>
#include <stdlib.h>
#include <string.h>

#define NCCL_OLDEST 21800

typedef struct pairs_api {
    ncclResult_t (*version)(int *);
    ncclResult_t (*unique)(ncclUniqueId *);
    ncclResult_t (*init)(ncclComm_t *, int, ncclUniqueId, int);
    ncclResult_t (*destroy)(ncclComm_t);
    ncclResult_t (*abort)(ncclComm_t);
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
    *(void **)&api.init = gpu_library_symbol(lib, "ncclCommInitRank", &api_missing);
    *(void **)&api.destroy = gpu_library_symbol(lib, "ncclCommDestroy", &api_missing);
    *(void **)&api.abort = gpu_library_symbol(lib, "ncclCommAbort", &api_missing);
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
    epo_peers members; /* of the communicator, as ranks of the group */
    atomic_bool aborted;
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

/* [collective] */
epo_status gpu_pairs_create(epo_backend *be) {
    const epo_peers members = pairs_members(be);
    struct {
        ncclUniqueId id;
        int ok;
    } mine, *all = calloc((size_t)be->ranks, sizeof *all);
    const char *why = NULL;
    int version = 0;
    memset(&mine, 0, sizeof mine);
    if (all == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for %d ranks", be->rank, be->ranks);
    mine.ok = gpu_pairs_find(&version, &why);
    if (mine.ok && members.me == 0)
        mine.ok = api.unique(&mine.id) == ncclSuccess;
    epo_status status = gpu_meet_allgather(be->meet, &mine, sizeof mine, all);
    for (int r = 0; status == EPO_OK && r < be->ranks; r++)
        if (!all[r].ok)
            status = epo_fail(EPO_E_UNSUPPORTED,
                              "rank %d cannot use NCCL (%s), and %s; NCCL 2.18 or newer is needed",
                              r, r == be->rank && why != NULL ? why : "its own message says why",
                              be->info.nodes > 1 ? "the group is on several nodes"
                                                 : "the ranks do not reach each other's memory");
    ncclUniqueId id = all[members.first].id;
    free(all);
    if (status != EPO_OK)
        return status;
    be->pairs = calloc(1, sizeof *be->pairs);
    if (be->pairs == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for the communicator", be->rank);
    be->pairs->members = members;
    PAIRS_TRY(be, "group", "ncclCommInitRank",
              api.init(&be->pairs->comm, members.count, id, members.me));
    return EPO_OK;
}

/* Once, by whichever thread is first: ends kernels that wait for a peer. */
void gpu_pairs_abort(epo_backend *be) {
    if (be->pairs != NULL && be->pairs->comm != NULL && !atomic_exchange(&be->pairs->aborted, true))
        (void)api.abort(be->pairs->comm);
}

void gpu_pairs_destroy(epo_backend *be, bool broken) {
    if (be->pairs == NULL)
        return;
    if (broken)
        gpu_pairs_abort(be);
    else if (be->pairs->comm != NULL && !atomic_load(&be->pairs->aborted)) /* by the watchdog */
        (void)api.destroy(be->pairs->comm);
    free(be->pairs);
    be->pairs = NULL;
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

/* Arrivals of an exchange without bytes (credits) need a word from every peer too:
 * one byte each way, so that "all of this call's bytes" orders something. */
epo_status gpu_pairs_exchange(epo_queue *q, const epo_exchange *x, const char *const *src,
                              const epo_deps *deps) {
    epo_backend *be = q->be;
    const epo_peers to = epo_peers_of(x->scope, be->rank, be->ranks, be->info.nodes);
    if (be->pairs->members.count < to.count || be->pairs->members.step > to.step)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "rank %d: %s: ranks of several nodes share a GPU, which NCCL refuses: only "
                        "flex is served then",
                        be->rank, deps->name);
    PAIRS_TRY(be, deps->name, "ncclGroupStart", api.start());
    epo_status status = pairs_post(q, x, src, deps->name);
    for (int i = 0; i < to.count && status == EPO_OK; i++) {
        const int p = pairs_of(be, to.first + i * to.step);
        if (i == to.me)
            continue;
        ncclResult_t r = api.send(be->pairs_word, 1, ncclInt8, p, be->pairs->comm, q->stream);
        if (r == ncclSuccess)
            r = api.recv(be->pairs_word + 16 + 16 * p, 1, ncclInt8, p, be->pairs->comm, q->stream);
        if (r != ncclSuccess)
            status = pairs_fail(be, "ncclSend or ncclRecv", deps->name, r);
    }
    ncclResult_t r = api.end();
    if (status == EPO_OK && r != ncclSuccess)
        status = pairs_fail(be, "ncclGroupEnd", deps->name, r);
    if (status != EPO_OK)
        return status;
    cudaEvent_t event;
    GPU_TRY(be, deps->name, cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    GPU_TRY(be, deps->name, cudaEventRecord(event, q->stream));
    return gpu_watch_event(be, event, deps->name, deps->chunk, &to);
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
