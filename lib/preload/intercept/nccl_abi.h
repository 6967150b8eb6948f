/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl_abi.h - the part of NCCL's C interface that we stand in front of, as every
 * release since 2.18 has it: opaque handles, numbers, one struct by value.  Our own
 * words instead of nccl.h, because the job brings an NCCL that is older or newer than
 * any header of ours.
 */
#ifndef EPO_INTERCEPT_NCCL_ABI_H
#define EPO_INTERCEPT_NCCL_ABI_H

#include <stddef.h>

typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
typedef int ncclResult_t; /* an enum; newer numbers pass through */
typedef int ncclDataType_t;
typedef int ncclRedOp_t;
typedef struct CUstream_st *cudaStream_t;

enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclInProgress = 7,
};

/* How every ncclConfig_t begins; what follows is NCCL's and the program's alone. */
typedef struct ncclConfig_t {
    size_t size;
    unsigned int magic, version;
    int blocking;
} ncclConfig_t;

typedef struct ncclSimInfo_t ncclSimInfo_t;

/* X(name, parameters): every function that we export, and nothing else. */
#define EPO_NCCL_FUNCTIONS(X)                                                                      \
    X(GroupStart, (void))                                                                          \
    X(GroupEnd, (void))                                                                            \
    X(GroupSimulateEnd, (ncclSimInfo_t * info))                                                    \
    X(Send, (const void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,     \
             cudaStream_t stream))                                                                 \
    X(Recv, (void *buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,           \
             cudaStream_t stream))                                                                 \
    X(AlltoAll, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm, \
                 cudaStream_t stream))                                                             \
    X(AllReduce, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, \
                  ncclComm_t comm, cudaStream_t stream))                                           \
    X(AllGather, (const void *send, void *recv, size_t count, ncclDataType_t type,                 \
                  ncclComm_t comm, cudaStream_t stream))                                           \
    X(ReduceScatter, (const void *send, void *recv, size_t count, ncclDataType_t type,             \
                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream))                       \
    X(Broadcast, (const void *send, void *recv, size_t count, ncclDataType_t type, int root,       \
                  ncclComm_t comm, cudaStream_t stream))                                           \
    X(Reduce, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,    \
               int root, ncclComm_t comm, cudaStream_t stream))                                    \
    X(CommInitRank, (ncclComm_t * comm, int ranks, ncclUniqueId id, int rank))                     \
    X(CommInitRankConfig,                                                                          \
      (ncclComm_t * comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config))             \
    X(CommInitRankScalable,                                                                        \
      (ncclComm_t * comm, int ranks, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config))   \
    X(CommInitAll, (ncclComm_t * comms, int count, const int *devices))                            \
    X(CommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *config))     \
    X(CommShrink, (ncclComm_t comm, int *excluded, int count, ncclComm_t *out,                     \
                   ncclConfig_t *config, int flags))                                               \
    X(CommDestroy, (ncclComm_t comm))                                                              \
    X(CommAbort, (ncclComm_t comm))                                                                \
    X(CommRevoke, (ncclComm_t comm, int flags))

/* X(name, parameters): what we only call. */
#define EPO_NCCL_HELPERS(X)                                                                        \
    X(GetVersion, (int *version))                                                                  \
    X(CommCount, (ncclComm_t comm, int *count))                                                    \
    X(CommUserRank, (ncclComm_t comm, int *rank))                                                  \
    X(CommGetAsyncError, (ncclComm_t comm, ncclResult_t * error))

#define EPO_NCCL_DECLARE(name, parameters)                                                         \
    ncclResult_t nccl##name parameters __attribute__((visibility("default")));
EPO_NCCL_FUNCTIONS(EPO_NCCL_DECLARE)
#undef EPO_NCCL_DECLARE

/* Bytes of one element; 0: a type that we do not know. */
static inline size_t epo_nccl_type_bytes(ncclDataType_t type) {
    static const unsigned char bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && (size_t)type < sizeof bytes ? bytes[type] : 0;
}

#endif
