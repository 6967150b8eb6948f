/* SPDX-License-Identifier: Apache-2.0
 *
 * comm.c - a caller's ncclComm_t as the way to reach the other ranks while a group is
 * made: small allgathers over it, and nothing else.
 */
#include "config.h"

#include "backend/cuda/gpu.h"

#ifdef HAVE_NCCL

#include <dlfcn.h>
#include <nccl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct comm_api {
    ncclResult_t (*rank)(const ncclComm_t, int *);
    ncclResult_t (*count)(const ncclComm_t, int *);
    ncclResult_t (*gather)(const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
    const char *(*text)(ncclResult_t);
} comm_api;

struct gpu_comm {
    comm_api api;
    ncclComm_t comm;
    int rank, ranks;
    double timeout_s;
    cudaStream_t stream;
    epo_bootstrap bootstrap;
};

static epo_status comm_load(comm_api *api) {
    static const char *const sonames[] = {"libnccl.so.2", NULL};
    const char *why = NULL;
    char path[512];
    int version = 0;
    if (!gpu_pairs_find(&version, &why))
        return epo_fail(EPO_E_UNSUPPORTED, "nccl_comm: %s", why);
    void *lib = gpu_library_find("libnccl", sonames, path, sizeof path);
    *(void **)&api->rank = dlsym(lib, "ncclCommUserRank");
    *(void **)&api->count = dlsym(lib, "ncclCommCount");
    *(void **)&api->gather = dlsym(lib, "ncclAllGather");
    *(void **)&api->text = dlsym(lib, "ncclGetErrorString");
    if (api->rank == NULL || api->count == NULL || api->gather == NULL || api->text == NULL)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "nccl_comm: %s lacks ncclCommUserRank, ncclCommCount, "
                        "ncclAllGather or ncclGetErrorString",
                        path);
    return EPO_OK;
}

/* Bounded: a rank that never comes must not hold this one for ever. */
static int comm_settle(const gpu_comm *c) {
    const double until = gpu_now() + c->timeout_s;
    for (;;) {
        cudaError_t e = cudaStreamQuery(c->stream);
        if (e != cudaErrorNotReady)
            return e == cudaSuccess ? 0 : (int)e;
        if (gpu_now() > until)
            return -1;
        const struct timespec nap = {0, 20000};
        nanosleep(&nap, NULL);
    }
}

static int comm_allgather(void *ctx, const void *mine, size_t bytes, void *all) {
    gpu_comm *c = ctx;
    const size_t sum = bytes * (size_t)c->ranks;
    char *device = NULL;
    cudaError_t e = cudaMalloc((void **)&device, bytes + sum);
    int rc = (int)e;
    if (e == cudaSuccess)
        rc = (int)cudaMemcpyAsync(device, mine, bytes, cudaMemcpyHostToDevice, c->stream);
    if (rc == 0) {
        ncclResult_t r = c->api.gather(device, device + bytes, bytes, ncclInt8, c->comm, c->stream);
        rc = r == ncclSuccess || r == ncclInProgress ? 0 : 1000 + (int)r;
    }
    if (rc == 0)
        rc = comm_settle(c);
    if (rc == 0)
        rc = (int)cudaMemcpy(all, device + bytes, sum, cudaMemcpyDeviceToHost);
    if (rc != -1) /* else NCCL's kernel still has it */
        (void)cudaFree(device);
    return rc;
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
    if (status == EPO_OK && config->rank >= 0 &&
        (config->rank != c->rank || config->ranks != c->ranks))
        status = epo_fail(EPO_E_ARG,
                          "nccl_comm: this is its rank %d of %d, but rank and ranks say %d of %d; "
                          "leave them -1",
                          c->rank, c->ranks, config->rank, config->ranks);
    if (status == EPO_OK) {
        cudaError_t e = cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking);
        if (e != cudaSuccess)
            status = epo_fail(EPO_E_SYSTEM, "rank %d: cudaStreamCreateWithFlags (nccl_comm): %s",
                              c->rank, cudaGetErrorString(e));
    }
    if (status != EPO_OK) {
        free(c);
        return status;
    }
    c->bootstrap = (epo_bootstrap){sizeof c->bootstrap, c, comm_allgather, comm_barrier};
    config->rank = c->rank;
    config->ranks = c->ranks;
    config->bootstrap = &c->bootstrap;
    *out = c;
    return EPO_OK;
}

void gpu_comm_close(gpu_comm *c) {
    if (c == NULL)
        return;
    (void)cudaStreamDestroy(c->stream);
    free(c);
}

#else

epo_status gpu_comm_open(epo_backend_config *config, gpu_comm **out) {
    (void)config;
    (void)out;
    return epo_fail(EPO_E_UNSUPPORTED, "nccl_comm: this build was made without NCCL's header; "
                                       "build with --with-nccl, or give a bootstrap");
}

void gpu_comm_close(gpu_comm *c) { (void)c; }

#endif
