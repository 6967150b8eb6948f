/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "preload/intercept/driver.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <string.h>

static struct {
    pthread_mutex_t lock;
    bool found;
    const char *missing;
    cuda_driver table;
} context = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int see_object(struct dl_phdr_info *info, size_t size, void *found) {
    (void)size;
    const char *slash = info->dlpi_name != NULL ? strrchr(info->dlpi_name, '/') : NULL;
    const char *base = slash != NULL ? slash + 1 : info->dlpi_name;
    if (base == NULL || strncmp(base, "libcuda.so", 10) != 0)
        return 0;
    *(const char **)found = info->dlpi_name;
    return 1;
}

static void find_all(void *handle) {
#define DRIVER_FIND(member, symbol, parameters)                                                    \
    {                                                                                              \
        void *f_ = dlsym(handle, symbol);                                                          \
        if (f_ == NULL && context.missing == NULL)                                                 \
            context.missing = symbol;                                                              \
        memcpy(&context.table.member, &f_, sizeof f_);                                             \
    }
    EPO_DRIVER_FUNCTIONS(DRIVER_FIND)
    const char *const missing = context.missing;
    EPO_DRIVER_PIECES(DRIVER_FIND)
    EPO_DRIVER_OPTIONAL(DRIVER_FIND)
    context.missing = missing;
#undef DRIVER_FIND
}

/* Looked for again while it is not there: a program may open CUDA late. */
const cuda_driver *driver_find(const char **missing) {
    pthread_mutex_lock(&context.lock);
    if (!context.found) {
        const char *path = NULL;
        dl_iterate_phdr(see_object, &path);
        void *handle = path != NULL ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
        if (handle != NULL) {
            find_all(handle);
            context.found = true;
        }
    }
    const cuda_driver *cu = context.found && context.missing == NULL ? &context.table : NULL;
    if (missing != NULL)
        *missing = context.found ? context.missing : "libcuda.so.1";
    pthread_mutex_unlock(&context.lock);
    return cu;
}

const char *driver_error(const cuda_driver *cu, cu_result r) {
    const char *name = NULL;
    if (cu->error_name(r, &name) != 0 || name == NULL)
        return "unknown CUDA error";
    return name;
}
