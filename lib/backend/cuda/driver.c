/* SPDX-License-Identifier: Apache-2.0
 *
 * driver.c - libraries found at run time.  The module links the static CUDA
 * runtime only; libcuda, cuBLAS and NCCL are opened by name, and where the process
 * has mapped one already (a framework's own copy, often with local scope), that
 * copy is the one used.
 */
#define _GNU_SOURCE
#include "backend/cuda/gpu.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

struct find {
    const char *stem;
    char *path;
    size_t size;
};

static int library_match(struct dl_phdr_info *info, size_t size, void *ctx) {
    struct find *f = ctx;
    (void)size;
    const char *base = info->dlpi_name != NULL ? strrchr(info->dlpi_name, '/') : NULL;
    base = base != NULL ? base + 1 : info->dlpi_name;
    if (base == NULL || strncmp(base, f->stem, strlen(f->stem)) != 0)
        return 0;
    const char next = base[strlen(f->stem)]; /* "libcublas" is not "libcublasLt" */
    if (next != '.' && next != '-')
        return 0;
    int n = snprintf(f->path, f->size, "%s", info->dlpi_name);
    return n > 0 && (size_t)n < f->size;
}

void *gpu_library_find(const char *stem, const char *const *sonames, char *path, size_t size) {
    struct find f = {stem, path, size};
    if (dl_iterate_phdr(library_match, &f) != 0) {
        void *mapped = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
        if (mapped != NULL)
            return mapped;
    }
    for (; *sonames != NULL; sonames++) {
        void *opened = dlopen(*sonames, RTLD_NOW | RTLD_LOCAL);
        if (opened != NULL) {
            snprintf(path, size, "%s", *sonames);
            return opened;
        }
    }
    return NULL;
}

void *gpu_library_symbol(void *library, const char *name, const char **missing) {
    void *p = dlsym(library, name);
    if (p == NULL && *missing == NULL)
        *missing = name;
    return p;
}

static gpu_driver driver;
static const char *driver_missing;

static void driver_load(void) {
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (lib == NULL) {
        driver_missing = "libcuda.so.1, the NVIDIA driver's library";
        return;
    }
    CUresult (*version)(int *);
    *(void **)&version = gpu_library_symbol(lib, "cuDriverGetVersion", &driver_missing);
    *(void **)&driver.attribute = gpu_library_symbol(lib, "cuDeviceGetAttribute", &driver_missing);
    *(void **)&driver.name = gpu_library_symbol(lib, "cuGetErrorName", &driver_missing);
    *(void **)&driver.wait64 = gpu_library_symbol(lib, "cuStreamWaitValue64_v2", &driver_missing);
    *(void **)&driver.write64 = gpu_library_symbol(lib, "cuStreamWriteValue64_v2", &driver_missing);
    *(void **)&driver.batch = gpu_library_symbol(lib, "cuStreamBatchMemOp_v2", &driver_missing);
    /* From 12.5 on. */
    *(void **)&driver.kernel_library = dlsym(lib, "cuKernelGetLibrary");
    *(void **)&driver.library_count = dlsym(lib, "cuLibraryGetKernelCount");
    *(void **)&driver.library_kernels = dlsym(lib, "cuLibraryEnumerateKernels");
    *(void **)&driver.kernel_function = dlsym(lib, "cuKernelGetFunction");
    if (driver_missing == NULL && version(&driver.version) != CUDA_SUCCESS)
        driver_missing = "cuDriverGetVersion's answer";
}

const gpu_driver *gpu_driver_get(const char **why) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, driver_load);
    if (driver_missing != NULL) {
        if (why != NULL)
            *why = driver_missing;
        return NULL;
    }
    return &driver;
}
