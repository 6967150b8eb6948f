/* SPDX-License-Identifier: Apache-2.0
 *
 * cupti_abi.h - the part of CUPTI's C interface that the recorder uses, in our own words:
 * the job brings a libcupti that is older or newer than any header of ours.  Fields of
 * records stand where they have stood in every version of their struct (kernels: Kernel3
 * to Kernel10, CUDA 7 to 13); newer versions only append.
 */
#ifndef EPO_RECORD_CUPTI_ABI_H
#define EPO_RECORD_CUPTI_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int cupti_result; /* 0: success */
enum { CUPTI_OK = 0, CUPTI_NOT_INITIALIZED = 15, CUPTI_BUSY = 39 /* there is a subscriber */ };

typedef uint32_t cupti_kind;
enum {
    CUPTI_KIND_MEMCPY = 1,
    CUPTI_KIND_MEMSET = 2,
    CUPTI_KIND_KERNEL = 3, /* what runs one after another */
    CUPTI_KIND_CONCURRENT_KERNEL = 10,
    CUPTI_KIND_MEMCPY_PEER = 22,
    CUPTI_KINDS = 128 /* of any release so far, with room */
};

enum { CUPTI_COPY_DEVICE_TO_DEVICE = 8, CUPTI_COPY_PEER = 10 };
enum { CUPTI_FLUSH_FORCED = 1 };

/* How the data of a callback begins. */
enum { CUPTI_DOMAIN_RUNTIME = 2, CUPTI_SITE_EXIT = 1 };
typedef struct cupti_call {
    int site;
} cupti_call;

/* The first release that leaves a process in which graphs were launched (CUDA 12.6). */
#define CUPTI_VERSION_LEAVES 24
/* The first release whose buffers are handled by callbacks alone, as we do (CUDA 11.2). */
#define CUPTI_VERSION_LEAST 15

typedef struct cupti_record {
    cupti_kind kind;
} cupti_record;

/* Offsets; each record is longer. */
enum {
    CUPTI_KERNEL_START = 16,
    CUPTI_KERNEL_END = 24,
    CUPTI_KERNEL_DEVICE = 40,
    CUPTI_KERNEL_STREAM = 48,
    CUPTI_KERNEL_NAME = 104, /* const char *, mangled */
    CUPTI_COPY_KIND = 4,     /* one byte; MEMCPY and MEMCPY_PEER */
    CUPTI_SET_VALUE = 4,     /* MEMSET */
    CUPTI_COPY_START = 16,   /* these four of MEMSET, too */
    CUPTI_COPY_END = 24,
    CUPTI_COPY_DEVICE = 32,
    CUPTI_COPY_STREAM = 40,
};

typedef struct CUpti_Subscriber_st *cupti_subscriber;
typedef void cupti_callback(void *user, int domain, uint32_t id, const void *data);
typedef void cupti_buffer_requested(uint8_t **buffer, size_t *size, size_t *most_records);
typedef void cupti_buffer_completed(void *context, uint32_t stream, uint8_t *buffer, size_t size,
                                    size_t valid);
typedef uint64_t cupti_clock(void);

/* X(member, symbol, parameters): what the recorder calls. */
#define EPO_CUPTI_FUNCTIONS(X)                                                                     \
    X(version, "cuptiGetVersion", (uint32_t *))                                                    \
    X(error_text, "cuptiGetResultString", (cupti_result, const char **))                           \
    X(now, "cuptiGetTimestamp", (uint64_t *))                                                      \
    X(subscribe, "cuptiSubscribe", (cupti_subscriber *, cupti_callback *, void *))                 \
    X(unsubscribe, "cuptiUnsubscribe", (cupti_subscriber))                                         \
    X(callbacks, "cuptiActivityRegisterCallbacks",                                                 \
      (cupti_buffer_requested *, cupti_buffer_completed *))                                        \
    X(enable, "cuptiActivityEnable", (cupti_kind))                                                 \
    X(disable, "cuptiActivityDisable", (cupti_kind))                                               \
    X(flush, "cuptiActivityFlushAll", (uint32_t))                                                  \
    X(next, "cuptiActivityGetNextRecord", (uint8_t *, size_t, cupti_record **))                    \
    X(dropped, "cuptiActivityGetNumDroppedRecords", (void *, uint32_t, size_t *))

/* What older releases lack, or what can be done without: NULL there. */
#define EPO_CUPTI_NEWER(X)                                                                         \
    X(clock, "cuptiActivityRegisterTimestampCallback", (cupti_clock *))                            \
    X(domain, "cuptiEnableDomain", (uint32_t, cupti_subscriber, int))                              \
    X(finalize, "cuptiFinalize", (void))

#endif
