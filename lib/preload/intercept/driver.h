/* SPDX-License-Identifier: Apache-2.0
 *
 * driver.h - the few functions of libcuda that we use, found in the process that has
 * already opened it.  Our own words, as in nccl_abi.h: the driver is the node's.
 */
#ifndef EPO_INTERCEPT_DRIVER_H
#define EPO_INTERCEPT_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int cu_result; /* 0: success */
typedef struct CUctx_st *cu_context;
typedef struct CUstream_st *cu_stream;
typedef struct CUevent_st *cu_event;
typedef struct CUmod_st *cu_module;
typedef struct CUfunc_st *cu_function;
typedef uintptr_t cu_pointer;
typedef unsigned long long cu_memory; /* of cuMemCreate */
typedef struct {
    unsigned char byte[64];
} cu_ipc_handle;

enum {
    CU_NOT_READY = 600,
    CU_STREAM_NON_BLOCKING_ = 1,
    CU_EVENT_NO_TIMING = 2,
    CU_WAIT_AT_LEAST = 0,
    CU_CAPTURE_RELAXED = 2,
    CU_REGISTER_PORTABLE_MAPPED = 3,
    CU_IPC_LAZY_PEER = 1,
    CU_DEVICE_MULTIPROCESSORS = 16,
    CU_WORD_WAIT = 1, /* of a batch */
    CU_WORD_WRITE = 2,
    CU_ATTRIBUTE_BUFFER_ID = 7,
    CU_ATTRIBUTE_IPC_CAPABLE = 10,
    CU_ATTRIBUTE_RANGE_START = 11,
    CU_ATTRIBUTE_RANGE_SIZE = 12,
    CU_HANDLE_DESCRIPTOR = 1, /* of a piece of memory, for another process */
    CU_HANDLE_FABRIC = 8,
    CU_LOCATION_DEVICE = 1,
    CU_ACCESS_READ_WRITE = 3,
};

/* CUstreamBatchMemOpParams: waits and writes have the same members. */
typedef struct cu_word_operation {
    uint32_t what;
    cu_pointer word;
    uint64_t value;
    uint32_t flags;
    uint64_t rest[2];
} cu_word_operation;
_Static_assert(sizeof(cu_word_operation) == 48, "six words of 64 bits, as the driver has it");

typedef struct cu_location {
    int type, id;
} cu_location;

/* CUmemAllocationProp */
typedef struct cu_memory_kind {
    int type, handles;
    cu_location location;
    void *windows;
    unsigned char flags[8];
} cu_memory_kind;
_Static_assert(sizeof(cu_memory_kind) == 32, "as the driver has it");

/* CUmemAccessDesc */
typedef struct cu_access {
    cu_location location;
    int flags;
} cu_access;

/* X(member, symbol, parameters) */
#define EPO_DRIVER_FUNCTIONS(X)                                                                    \
    X(version, "cuDriverGetVersion", (int *))                                                      \
    X(error_name, "cuGetErrorName", (cu_result, const char **))                                    \
    X(context_get, "cuCtxGetCurrent", (cu_context *))                                              \
    X(context_push, "cuCtxPushCurrent_v2", (cu_context))                                           \
    X(context_pop, "cuCtxPopCurrent_v2", (cu_context *))                                           \
    X(priorities, "cuCtxGetStreamPriorityRange", (int *, int *))                                   \
    X(ipc_get, "cuIpcGetMemHandle", (cu_ipc_handle *, cu_pointer))                                 \
    X(ipc_open, "cuIpcOpenMemHandle_v2", (cu_pointer *, cu_ipc_handle, unsigned))                  \
    X(ipc_close, "cuIpcCloseMemHandle", (cu_pointer))                                              \
    X(attribute, "cuPointerGetAttribute", (void *, int, cu_pointer))                               \
    X(host_register, "cuMemHostRegister_v2", (void *, size_t, unsigned))                           \
    X(host_unregister, "cuMemHostUnregister", (void *))                                            \
    X(host_pointer, "cuMemHostGetDevicePointer_v2", (cu_pointer *, void *, unsigned))              \
    X(stream_create, "cuStreamCreateWithPriority", (cu_stream *, unsigned, int))                   \
    X(stream_destroy, "cuStreamDestroy_v2", (cu_stream))                                           \
    X(stream_wait, "cuStreamWaitEvent", (cu_stream, cu_event, unsigned))                           \
    X(wait_value, "cuStreamWaitValue32_v2", (cu_stream, cu_pointer, uint32_t, unsigned))           \
    X(write_value, "cuStreamWriteValue32_v2", (cu_stream, cu_pointer, uint32_t, unsigned))         \
    X(copy, "cuMemcpyAsync", (cu_pointer, cu_pointer, size_t, cu_stream))                          \
    X(event_create, "cuEventCreate", (cu_event *, unsigned))                                       \
    X(event_destroy, "cuEventDestroy_v2", (cu_event))                                              \
    X(event_query, "cuEventQuery", (cu_event))                                                     \
    X(event_record, "cuEventRecord", (cu_event, cu_stream))                                        \
    X(capturing, "cuStreamIsCapturing", (cu_stream, int *))                                        \
    X(stream_query, "cuStreamQuery", (cu_stream))                                                  \
    X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *))

/* Memory that is mapped in pieces: NULL where there is none. */
#define EPO_DRIVER_PIECES(X)                                                                       \
    X(piece_retain, "cuMemRetainAllocationHandle", (cu_memory *, void *))                          \
    X(piece_release, "cuMemRelease", (cu_memory))                                                  \
    X(piece_range, "cuMemGetAddressRange_v2", (cu_pointer *, size_t *, cu_pointer))                \
    X(piece_kind, "cuMemGetAllocationPropertiesFromHandle", (cu_memory_kind *, cu_memory))         \
    X(piece_export, "cuMemExportToShareableHandle", (void *, cu_memory, int, unsigned long long))  \
    X(piece_import, "cuMemImportFromShareableHandle", (cu_memory *, void *, int))                  \
    X(piece_map, "cuMemMap", (cu_pointer, size_t, size_t, cu_memory, unsigned long long))          \
    X(piece_unmap, "cuMemUnmap", (cu_pointer, size_t))                                             \
    X(piece_access, "cuMemSetAccess", (cu_pointer, size_t, const cu_access *, size_t))             \
    X(range_reserve, "cuMemAddressReserve",                                                        \
      (cu_pointer *, size_t, size_t, cu_pointer, unsigned long long))                              \
    X(range_free, "cuMemAddressFree", (cu_pointer, size_t))                                        \
    X(device_get, "cuCtxGetDevice", (int *))

/* For a kernel of ours, the recorder's marks, words in a row and to tell a stream from another that
 * had its handle: NULL where there is none. */
#define EPO_DRIVER_OPTIONAL(X)                                                                     \
    X(batch, "cuStreamBatchMemOp_v2", (cu_stream, unsigned, cu_word_operation *, unsigned))        \
    X(stream_id, "cuStreamGetId", (cu_stream, unsigned long long *))                               \
    X(set32, "cuMemsetD32Async", (cu_pointer, unsigned, size_t, cu_stream))                        \
    X(device_attribute, "cuDeviceGetAttribute", (int *, int, int))                                 \
    X(module_load, "cuModuleLoadData", (cu_module *, const void *))                                \
    X(module_unload, "cuModuleUnload", (cu_module))                                                \
    X(module_function, "cuModuleGetFunction", (cu_function *, cu_module, const char *))            \
    X(launch, "cuLaunchKernel",                                                                    \
      (cu_function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,          \
       cu_stream, void **, void **))

typedef struct cuda_driver {
#define EPO_DRIVER_MEMBER(member, symbol, parameters) cu_result(*member) parameters;
    EPO_DRIVER_FUNCTIONS(EPO_DRIVER_MEMBER)
    EPO_DRIVER_PIECES(EPO_DRIVER_MEMBER)
    EPO_DRIVER_OPTIONAL(EPO_DRIVER_MEMBER)
#undef EPO_DRIVER_MEMBER
} cuda_driver;

/* NULL: not mapped, or it lacks a function (whose name is in *missing). */
const cuda_driver *driver_find(const char **missing);
/* "CUDA_ERROR_OUT_OF_MEMORY"; never NULL. */
const char *driver_error(const cuda_driver *cu, cu_result r);

#endif
