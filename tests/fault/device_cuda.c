/* SPDX-License-Identifier: Apache-2.0
 *
 * device_cuda.c - a GPU's memory and stream: rank r has GPU r modulo their number.
 */
#include "config.h"

#include "fault.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

const char device_name[] = "cuda";

#define TRY(call)                                                                                  \
    do {                                                                                           \
        cudaError_t e_ = (call);                                                                   \
        if (e_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
            exit(3);                                                                               \
        }                                                                                          \
    } while (0)

bool device_is_host(void) { return false; }

static board *the_board;
static int the_rank;

/* NCCL takes ranks that name different hosts for ranks of different hosts, and then two of them
 * may have one GPU. */
static void share_gpu(int rank) {
    char name[32];
    snprintf(name, sizeof name, "fault-rank-%d", rank);
    setenv("NCCL_HOSTID", name, 0);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    setenv("NCCL_IB_DISABLE", "1", 0);
}

epo_stream device_open(board *b, int rank) {
    int count = 0;
    cudaStream_t stream = NULL;
    the_board = b;
    the_rank = rank;
    if (b->c.way == WAY_NCCL)
        setenv("EP_OVERLAP_CUDA_PEER", "0", 1);
    TRY(cudaGetDeviceCount(&count));
    if (count < b->c.ranks)
        share_gpu(rank);
    TRY(cudaSetDevice(rank % count));
    TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

/* ---- a communicator of the caller's ----------------------------------------- */

static void *nccl_symbol(const char *name) {
    void *lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    void *p = lib != NULL ? dlsym(lib, name) : NULL;
    if (p == NULL) {
        fprintf(stderr, "libnccl.so.2 is not here, or lacks %s\n", name);
        exit(3);
    }
    return p;
}

typedef struct nccl_id {
    char bytes[128];
} nccl_id;

void *device_comm_open(seat *s) {
    int (*unique)(nccl_id *), (*init)(void **, int, nccl_id, int);
    void *comm = NULL;
    nccl_id id;
    *(void **)&unique = nccl_symbol("ncclGetUniqueId");
    *(void **)&init = nccl_symbol("ncclCommInitRank");
    if (s->rank == 0 && unique(&id) != 0)
        exit(4);
    if (s->rank == 0) {
        memcpy(s->b->table[s->group].identity, &id, sizeof id);
        atomic_store(&s->b->table[s->group].identified, 1);
    }
    while (atomic_load(&s->b->table[s->group].identified) == 0) {
        const struct timespec nap = {0, 1000000};
        nanosleep(&nap, NULL);
    }
    memcpy(&id, s->b->table[s->group].identity, sizeof id);
    if (init(&comm, s->ranks, id, s->rank) != 0)
        exit(5);
    return comm;
}

void device_comm_close(void *comm, bool broken) {
    int (*end)(void *);
    if (comm == NULL)
        return;
    *(void **)&end = nccl_symbol(broken ? "ncclCommAbort" : "ncclCommDestroy");
    (void)end(comm);
}

/* ---- NCCL's making the engine's communicator --------------------------------- */

typedef int init_fn(void **comm, int ranks, nccl_id id, int rank, void *config);
static init_fn *real_init;

static int struck_init(void **comm, int ranks, nccl_id id, int rank, void *config) {
    strike_at(the_board, the_rank, PHASE_NCCL, 0);
    return real_init(comm, ranks, id, rank, config);
}

/* The linker puts this in front of the engine's (--wrap). */
void *__real_gpu_library_symbol(void *library, const char *name, const char **missing);
void *__wrap_gpu_library_symbol(void *library, const char *name, const char **missing);
void *__wrap_gpu_library_symbol(void *library, const char *name, const char **missing) {
    void *p = __real_gpu_library_symbol(library, name, missing);
    if (p == NULL || strcmp(name, "ncclCommInitRankConfig") != 0)
        return p;
    *(void **)&real_init = p;
    init_fn *mine = struck_init;
    memcpy(&p, &mine, sizeof p);
    return p;
}

/* ---- memory ------------------------------------------------------------------ */

void device_close(epo_stream stream) { (void)cudaStreamDestroy((cudaStream_t)stream); }

void *device_new(uint64_t bytes) {
    void *p = NULL;
    TRY(cudaMalloc(&p, bytes > 0 ? bytes : 16));
    TRY(cudaMemset(p, 0, bytes > 0 ? bytes : 16));
    TRY(cudaStreamSynchronize(0));
    return p;
}

void device_free(void *p) { (void)cudaFree(p); }

void device_put(void *to, const void *from, uint64_t bytes) {
    TRY(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
}

void device_take(void *to, const void *from, uint64_t bytes) {
    TRY(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

void device_copy(epo_stream stream, void *to, const void *from, uint64_t bytes) {
    TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, (cudaStream_t)stream));
}

void device_zero(epo_stream stream, void *to, uint64_t bytes) {
    TRY(cudaMemsetAsync(to, 0, bytes, (cudaStream_t)stream));
}

void device_call(epo_stream stream, void (*fn)(void *ctx), void *ctx) {
    TRY(cudaLaunchHostFunc((cudaStream_t)stream, fn, ctx));
}

bool device_wait(epo_stream stream) {
    return cudaStreamSynchronize((cudaStream_t)stream) == cudaSuccess;
}

void device_fill(void) {
    size_t have = 0, all = 0;
    void *p;
    TRY(cudaMemGetInfo(&have, &all));
    for (size_t some = have; some >= (size_t)1 << 20; some /= 2)
        while (cudaMalloc(&p, some) == cudaSuccess)
            ;
    (void)cudaGetLastError();
}
