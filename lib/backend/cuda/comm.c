/* SPDX-License-Identifier: Apache-2.0
 *
 * comm.c - a caller's ncclComm_t as the way to reach the other ranks while a group is
 * made: small allgathers over it, and nothing else.
 */
#include "config.h"

#include "backend/cuda/gpu.h"
#include "backend/limited.h"

#ifdef HAVE_NCCL

#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct comm_api {
    ncclResult_t (*rank)(const ncclComm_t, int *);
    ncclResult_t (*count)(const ncclComm_t, int *);
    ncclResult_t (*gather)(const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
    ncclResult_t (*state)(ncclComm_t, ncclResult_t *);
    const char *(*text)(ncclResult_t);
} comm_api;

struct gpu_comm {
    comm_api api;
    ncclComm_t comm;
    int rank, ranks;
    int device;
    double timeout_s;
    epo_status failed; /* the first failure, and its text */
    char failed_text[EPO_ERROR_MAX];
    epo_bootstrap bootstrap;
};

static epo_status comm_load(comm_api *api) {
    static const char *const sonames[] = {"libnccl.so.2", NULL};
    const char *why = NULL, *missing = NULL;
    char path[512];
    int version = 0;
    if (!gpu_pairs_find(&version, &why))
        return epo_fail(EPO_E_UNSUPPORTED, "nccl_comm: %s", why);
    void *lib = gpu_library_find("libnccl", sonames, path, sizeof path);
    *(void **)&api->rank = gpu_library_symbol(lib, "ncclCommUserRank", &missing);
    *(void **)&api->count = gpu_library_symbol(lib, "ncclCommCount", &missing);
    *(void **)&api->gather = gpu_library_symbol(lib, "ncclAllGather", &missing);
    *(void **)&api->state = gpu_library_symbol(lib, "ncclCommGetAsyncError", &missing);
    *(void **)&api->text = gpu_library_symbol(lib, "ncclGetErrorString", &missing);
    return missing == NULL ? EPO_OK
                           : epo_fail(EPO_E_UNSUPPORTED, "nccl_comm: %s lacks %s", path, missing);
}

/* One allgather, on a thread of its own: a rank that never comes must not hold this one for
 * ever, neither in NCCL's call nor behind it. */
typedef struct comm_call {
    comm_api api;
    ncclComm_t comm;
    int device;
    size_t bytes, sum;
    double until; /* for a communicator that does not block */
    cudaStream_t stream;
    char *memory;     /* device */
    const char *call; /* that failed; NULL: none */
    const char *why;
    char data[]; /* mine; then all */
} comm_call;

static bool call_failed(comm_call *c, const char *call, cudaError_t e) {
    if (e == cudaSuccess)
        return false;
    c->call = call;
    c->why = cudaGetErrorString(e);
    return true;
}

/* ncclInProgress: the call goes on behind the caller's back. */
static ncclResult_t call_settle(const comm_call *c, ncclResult_t r) {
    const struct timespec nap = {0, 100000};
    while (r == ncclInProgress && gpu_now() < c->until) {
        ncclResult_t asked = c->api.state(c->comm, &r);
        if (asked != ncclSuccess)
            return asked;
        if (r == ncclInProgress)
            nanosleep(&nap, NULL);
    }
    return r;
}

static void call_run(void *ctx) {
    comm_call *c = ctx;
    if (call_failed(c, "cudaSetDevice", cudaSetDevice(c->device)) ||
        call_failed(c, "cudaStreamCreateWithFlags",
                    cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking)) ||
        call_failed(c, "cudaMalloc", cudaMalloc((void **)&c->memory, c->bytes + c->sum)) ||
        call_failed(
            c, "cudaMemcpyAsync",
            cudaMemcpyAsync(c->memory, c->data, c->bytes, cudaMemcpyHostToDevice, c->stream)))
        return;
    const ncclResult_t r = call_settle(
        c, c->api.gather(c->memory, c->memory + c->bytes, c->bytes, ncclInt8, c->comm, c->stream));
    if (r != ncclSuccess) {
        c->call = "ncclAllGather";
        c->why = c->api.text(r);
        return;
    }
    (void)(call_failed(c, "cudaMemcpyAsync",
                       cudaMemcpyAsync(c->data, c->memory + c->bytes, c->sum,
                                       cudaMemcpyDeviceToHost, c->stream)) ||
           call_failed(c, "cudaStreamSynchronize", cudaStreamSynchronize(c->stream)));
}

/* cudaFree may wait for another group's work. */
static void call_free(void *ctx) {
    comm_call *c = ctx;
    if (c->memory != NULL)
        (void)cudaFree(c->memory);
    if (c->stream != NULL)
        (void)cudaStreamDestroy(c->stream);
    free(c);
}

static epo_status call_look(void *asks) {
    const comm_call *c = asks;
    return gpu_now() < c->until ? EPO_OK : EPO_E_TIMEOUT;
}

/* The first failure is kept: the meeting only hears that there was one. */
static int comm_fail(gpu_comm *c, epo_status status, const char *what) {
    if (c->failed == EPO_OK) {
        c->failed = status;
        snprintf(c->failed_text, sizeof c->failed_text, "rank %d: nccl_comm: %s", c->rank, what);
    }
    return 1;
}

epo_status gpu_comm_explain(const gpu_comm *c, epo_status status) {
    return status != EPO_OK && c->failed != EPO_OK ? epo_fail(c->failed, "%s", c->failed_text)
                                                   : status;
}

static int comm_allgather(void *ctx, const void *mine, size_t bytes, void *all) {
    gpu_comm *c = ctx;
    const size_t sum = bytes * (size_t)c->ranks;
    char text[200];
    comm_call *call = calloc(1, sizeof *call + sum);
    if (call == NULL)
        return comm_fail(c, EPO_E_NOMEM, "no memory for an allgather");
    *call = (comm_call){.api = c->api,
                        .comm = c->comm,
                        .device = c->device,
                        .bytes = bytes,
                        .sum = sum,
                        .until = gpu_now() + c->timeout_s};
    memcpy(call->data, mine, bytes);
    epo_status status = epo_limited_call(call_run, call_free, call, call_look, call);
    if (status != EPO_OK) {
        snprintf(text, sizeof text,
                 status == EPO_E_TIMEOUT
                     ? "an allgather of it did not end within %.0f s: all its ranks must make the "
                       "group"
                     : "no thread for an allgather of it",
                 c->timeout_s);
        return comm_fail(c, status, text);
    }
    if (call->call != NULL)
        snprintf(text, sizeof text, "%s: %s", call->call, call->why);
    else
        memcpy(all, call->data, sum);
    const bool failed = call->call != NULL;
    (void)gpu_release_within(GPU_BESIDE_S, c->device, c->rank, "nccl_comm", true, call_free, call);
    return failed ? comm_fail(c, EPO_E_SYSTEM, text) : 0;
}

static int comm_barrier(void *ctx) {
    gpu_comm *c = ctx;
    char word = 1, *all = malloc((size_t)c->ranks);
    int rc = all != NULL ? comm_allgather(c, &word, 1, all) : 1;
    free(all);
    return rc;
}

epo_status gpu_comm_open(epo_backend_config *config, gpu_comm **out) {
    gpu_comm *c = calloc(1, sizeof *c);
    if (c == NULL)
        return epo_fail(EPO_E_NOMEM, "nccl_comm: no memory");
    epo_status status = comm_load(&c->api);
    c->comm = config->nccl_comm;
    c->timeout_s = config->timeout_s;
    if (status == EPO_OK) {
        ncclResult_t r = c->api.rank(c->comm, &c->rank);
        if (r == ncclSuccess)
            r = c->api.count(c->comm, &c->ranks);
        if (r != ncclSuccess)
            status = epo_fail(EPO_E_ARG, "nccl_comm: ncclCommUserRank or ncclCommCount: %s",
                              c->api.text(r));
    }
    if (status == EPO_OK) {
        cudaError_t e = cudaGetDevice(&c->device);
        if (e != cudaSuccess)
            status = epo_fail(EPO_E_SYSTEM, "rank %d: cudaGetDevice (nccl_comm): %s", c->rank,
                              cudaGetErrorString(e));
    }
    if (status != EPO_OK) {
        free(c);
        return status;
    }
    if (config->wrong == EPO_OK && config->rank >= 0 &&
        (config->rank != c->rank || config->ranks != c->ranks)) /* the others hear of it */
        config->wrong =
            epo_fail(EPO_E_ARG,
                     "nccl_comm: this is its rank %d of %d, but rank and ranks say %d of %d; "
                     "leave them -1",
                     c->rank, c->ranks, config->rank, config->ranks);
    c->bootstrap = (epo_bootstrap){sizeof c->bootstrap, c, comm_allgather, comm_barrier};
    config->rank = c->rank;
    config->ranks = c->ranks;
    config->bootstrap = &c->bootstrap;
    *out = c;
    return EPO_OK;
}

void gpu_comm_close(gpu_comm *c) { free(c); }

#else

epo_status gpu_comm_open(epo_backend_config *config, gpu_comm **out) {
    (void)config;
    (void)out;
    return epo_fail(EPO_E_UNSUPPORTED, "nccl_comm: this build was made without NCCL's header; "
                                       "build with --with-nccl, or give a bootstrap");
}

epo_status gpu_comm_explain(const gpu_comm *c, epo_status status) {
    (void)c;
    return status;
}

void gpu_comm_close(gpu_comm *c) { (void)c; }

#endif
