/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu.h - the few calls of the NVIDIA driver that a program needs to give the CUDA
 * engine memory and a stream.  libcuda is opened at run time: tools that measure
 * need no CUDA to be built.
 */
#ifndef EPO_MEASURE_GPU_H
#define EPO_MEASURE_GPU_H

#include <stddef.h>

#include "core/status.h"

/* The driver's functions under their own names without "cu"; 0 is success. */
typedef struct measure_driver {
    int (*Init)(unsigned);
    int (*GetErrorName)(int, const char **);
    int (*DeviceGetCount)(int *);
    int (*DeviceGet)(int *, int);
    int (*DeviceGetName)(char *, int, int);
    int (*DeviceGetAttribute)(int *, int, int);
    int (*DeviceGetUuid)(unsigned char *, int); /* 16 bytes */
    int (*DeviceCanAccessPeer)(int *, int, int);
    int (*DevicePrimaryCtxRetain)(void **, int);
    int (*DevicePrimaryCtxRelease)(int);
    int (*CtxSetCurrent)(void *);
    int (*CtxEnablePeerAccess)(void *, unsigned);
    int (*MemAlloc)(unsigned long long *, size_t);
    int (*MemFree)(unsigned long long);
    int (*MemGetInfo)(size_t *, size_t *);
    int (*MemcpyAsync)(unsigned long long, unsigned long long, size_t, void *);
    int (*MemsetD8Async)(unsigned long long, unsigned char, size_t, void *);
    int (*StreamCreate)(void **, unsigned);
    int (*StreamDestroy)(void *);
    int (*StreamSynchronize)(void *);
    int (*EventCreate)(void **, unsigned);
    int (*EventDestroy)(void *);
    int (*EventRecord)(void *, void *);
    int (*EventSynchronize)(void *);
    int (*EventElapsedTime)(float *, void *, void *);
} measure_driver;

/* Opened and initialised at the first call.  NULL without a driver or a GPU; the
 * error line says why. */
const measure_driver *measure_driver_get(void);
/* GPUs that this process may use, asked in a process of its own: one that has begun with
 * the driver cannot fork ranks.  0: none, or no driver. */
int measure_gpu_count(void);
/* EPO_OK, or EPO_E_SYSTEM naming `call` and what the driver said. */
epo_status measure_driver_check(int result, const char *call);

#endif
