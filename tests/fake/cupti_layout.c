/* SPDX-License-Identifier: Apache-2.0
 *
 * cupti_layout.c - compiles where cupti_abi.h says what CUPTI's own headers say.
 */
#include <cuda.h>
#include <cupti.h>
#include <stddef.h>
#if CUPTI_API_VERSION >= 20
#include <cupti_activity_deprecated.h>
#endif

#include "preload/record/cupti_abi.h"

#define SAME(a, b) _Static_assert((int)(a) == (int)(b), #a)
#define KERNEL(type)                                                                               \
    SAME(offsetof(type, start), CUPTI_KERNEL_START);                                               \
    SAME(offsetof(type, end), CUPTI_KERNEL_END);                                                   \
    SAME(offsetof(type, deviceId), CUPTI_KERNEL_DEVICE);                                           \
    SAME(offsetof(type, streamId), CUPTI_KERNEL_STREAM);                                           \
    SAME(offsetof(type, name), CUPTI_KERNEL_NAME)
#define COPY(type)                                                                                 \
    SAME(offsetof(type, start), CUPTI_COPY_START);                                                 \
    SAME(offsetof(type, end), CUPTI_COPY_END);                                                     \
    SAME(offsetof(type, deviceId), CUPTI_COPY_DEVICE);                                             \
    SAME(offsetof(type, streamId), CUPTI_COPY_STREAM)

KERNEL(CUpti_ActivityKernel4);
KERNEL(CUpti_ActivityKernel5);
COPY(CUpti_ActivityMemcpy);
SAME(offsetof(CUpti_ActivityMemcpy, copyKind), CUPTI_COPY_KIND);
COPY(CUpti_ActivityMemset);
#if CUPTI_API_VERSION >= 15
KERNEL(CUpti_ActivityKernel6);
COPY(CUpti_ActivityMemcpy4);
COPY(CUpti_ActivityMemcpyPtoP3);
COPY(CUpti_ActivityMemset3);
#endif
#if CUPTI_API_VERSION >= 16
KERNEL(CUpti_ActivityKernel7);
COPY(CUpti_ActivityMemcpy5);
#endif
#if CUPTI_API_VERSION >= 18
KERNEL(CUpti_ActivityKernel8);
KERNEL(CUpti_ActivityKernel9);
COPY(CUpti_ActivityMemcpyPtoP4);
COPY(CUpti_ActivityMemset4);
#endif
#if CUPTI_API_VERSION >= 130000
KERNEL(CUpti_ActivityKernel10);
COPY(CUpti_ActivityMemcpy6);
#endif
SAME(CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_KIND_MEMCPY);
SAME(CUPTI_ACTIVITY_KIND_MEMSET, CUPTI_KIND_MEMSET);
SAME(CUPTI_ACTIVITY_KIND_KERNEL, CUPTI_KIND_KERNEL);
SAME(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_KIND_CONCURRENT_KERNEL);
SAME(CUPTI_ACTIVITY_KIND_MEMCPY2, CUPTI_KIND_MEMCPY_PEER);
_Static_assert(CUPTI_ACTIVITY_KIND_COUNT < CUPTI_KINDS, "kinds");
SAME(CUPTI_ACTIVITY_MEMCPY_KIND_DTOD, CUPTI_COPY_DEVICE_TO_DEVICE);
SAME(CUPTI_ACTIVITY_MEMCPY_KIND_PTOP, CUPTI_COPY_PEER);
SAME(CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED, CUPTI_BUSY);
SAME(CUPTI_ERROR_NOT_INITIALIZED, CUPTI_NOT_INITIALIZED);
SAME(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED, CUPTI_FLUSH_FORCED);

int main(void) { return 0; }
