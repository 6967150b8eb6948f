/* SPDX-License-Identifier: Apache-2.0
 *
 * late_nccl.c - the NCCL that LATE_NCCL_REAL names, in which rank LATE_NCCL_RANK makes its
 * communicator LATE_NCCL_S seconds late: libnccl.so.2 for tests of what the others do.
 */
#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define FUNCTIONS(X)                                                                               \
    X(ncclGetVersion, (int *v), (v))                                                               \
    X(ncclGetUniqueId, (ncclUniqueId * id), (id))                                                  \
    X(ncclCommDestroy, (ncclComm_t c), (c))                                                        \
    X(ncclCommAbort, (ncclComm_t c), (c))                                                          \
    X(ncclCommGetAsyncError, (ncclComm_t c, ncclResult_t * r), (c, r))                             \
    X(ncclCommUserRank, (const ncclComm_t c, int *r), (c, r))                                      \
    X(ncclCommCount, (const ncclComm_t c, int *n), (c, n))                                         \
    X(ncclAllGather,                                                                               \
      (const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t q),          \
      (s, r, n, t, c, q))                                                                          \
    X(ncclGroupStart, (void), ())                                                                  \
    X(ncclGroupEnd, (void), ())                                                                    \
    X(ncclSend, (const void *b, size_t n, ncclDataType_t t, int p, ncclComm_t c, cudaStream_t q),  \
      (b, n, t, p, c, q))                                                                          \
    X(ncclRecv, (void *b, size_t n, ncclDataType_t t, int p, ncclComm_t c, cudaStream_t q),        \
      (b, n, t, p, c, q))

#define PASS(name, parameters, arguments)                                                          \
    static ncclResult_t(*real_##name) parameters;                                                  \
    ncclResult_t name parameters { return real_##name arguments; }
#define FIND(name, parameters, arguments) *(void **)&real_##name = dlsym(real, #name);
FUNCTIONS(PASS)

static const char *(*real_text)(ncclResult_t);
const char *ncclGetErrorString(ncclResult_t r) { return real_text(r); }

typedef ncclResult_t init_fn(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *);
static init_fn *real_init;

__attribute__((constructor)) static void find(void) {
    const char *path = getenv("LATE_NCCL_REAL");
    void *real = dlopen(path != NULL ? path : "", RTLD_NOW | RTLD_LOCAL);
    if (real == NULL) {
        fprintf(stderr, "late_nccl: LATE_NCCL_REAL: %s\n", dlerror());
        exit(2);
    }
    FUNCTIONS(FIND)
    *(void **)&real_text = dlsym(real, "ncclGetErrorString");
    *(void **)&real_init = dlsym(real, "ncclCommInitRankConfig");
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    const char *late = getenv("LATE_NCCL_RANK"), *seconds = getenv("LATE_NCCL_S");
    if (late != NULL && seconds != NULL && (int)strtol(late, NULL, 10) == rank)
        nanosleep(&(struct timespec){strtol(seconds, NULL, 10), 0}, NULL);
    return real_init(comm, ranks, id, rank, config);
}
