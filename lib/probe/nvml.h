/* SPDX-License-Identifier: Apache-2.0
 *
 * nvml.h - the few functions of NVIDIA's management library that the probe asks,
 * by their documented C interface; its header need not be there.
 */
#ifndef EPO_PROBE_NVML_H
#define EPO_PROBE_NVML_H

#include <stddef.h>

#define NVML_OK 0
#define NVML_TEXT 96
#define NVML_P2P_READ 0
#define NVML_P2P_NVLINK 2

typedef struct nvml_device *nvml_device;

typedef struct nvml_memory {
    unsigned long long total, free, used;
} nvml_memory;

/* nvmlGpuFabricInfo_t */
typedef struct nvml_fabric {
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state; /* 3: completed */
} nvml_fabric;

typedef struct nvml {
    void *library;
    char path[256]; /* what was opened */
    const char *(*error_string)(int result);
    int (*init)(void);
    int (*shutdown)(void);
    int (*driver_version)(char *version, unsigned length);
    int (*cuda_version)(int *version); /* 12040 is 12.4 */
    int (*count)(unsigned *count);
    int (*by_index)(unsigned index, nvml_device *device);
    int (*name)(nvml_device device, char *name, unsigned length);
    int (*uuid)(nvml_device device, char *uuid, unsigned length);
    int (*minor_number)(nvml_device device, unsigned *minor);
    int (*capability)(nvml_device device, int *major, int *minor);
    int (*memory)(nvml_device device, nvml_memory *memory);
    /* The rest may be missing in an old driver: NULL. */
    int (*mig_mode)(nvml_device device, unsigned *current, unsigned *pending);
    int (*mig_count)(nvml_device device, unsigned *count);
    int (*mig_by_index)(nvml_device device, unsigned index, nvml_device *mig);
    int (*p2p)(nvml_device one, nvml_device other, int what, int *status); /* 0: works */
    int (*fabric)(nvml_device device, nvml_fabric *info);
} nvml;

/* Opens the library and finds its functions; false with the reason in `why`. */
int nvml_open(nvml *api, const char *path, char *why, size_t room);
void nvml_close(nvml *api);

#endif
