/* SPDX-License-Identifier: Apache-2.0
 *
 * copy.c - copies inside one GPU: by the kernel of copy.cu, which runs beside GEMMs, where it
 * lies beside this library and fits; else the driver's.
 */
#include "config.h"

#include "preload/intercept/channel.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define COPY_FILE "intercept_copy.fatbin"
#define COPY_MOST (1 << 20)  /* bytes of such a file */
#define COPY_LEAST (1 << 20) /* below, the driver's copy is there first */

/* The file's bytes, NULL: none. */
static void *file_read(const char *path) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    void *bytes = NULL;
    if (fd < 0)
        return NULL;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0 && st.st_size <= COPY_MOST)
        bytes = malloc((size_t)st.st_size);
    if (bytes != NULL && read(fd, bytes, (size_t)st.st_size) != st.st_size) {
        free(bytes);
        bytes = NULL;
    }
    close(fd);
    return bytes;
}

static void *file_beside_us(void) {
    Dl_info info;
    char path[4096];
    if (dladdr((void *)(uintptr_t)copy_open, &info) == 0 || info.dli_fname == NULL)
        return NULL;
    const char *slash = strrchr(info.dli_fname, '/');
    const int folder = slash != NULL ? (int)(slash - info.dli_fname) + 1 : 0;
    const int n = snprintf(path, sizeof path, "%.*s%s", folder, info.dli_fname, COPY_FILE);
    return n > 0 && (size_t)n < sizeof path ? file_read(path) : NULL;
}

static cu_result launch(const channel *ch, cu_pointer to, cu_pointer from, uint64_t bytes,
                        cu_stream stream) {
    unsigned long long count = bytes;
    void *arguments[] = {&to, &from, &count};
    return ch->cu->launch(ch->copy.kernel, (unsigned)ch->copy.blocks, 1, 1, 32, 1, 1, 0, stream,
                          arguments, NULL);
}

/* A first launch, of nothing: later ones find all of it loaded. */
void copy_open(channel *ch) {
    const cuda_driver *cu = ch->cu;
    int device = 0;
    if (cu->module_load == NULL || cu->module_function == NULL || cu->launch == NULL ||
        cu->device_get == NULL || cu->device_attribute == NULL)
        return;
    void *bytes = file_beside_us();
    if (bytes == NULL)
        return;
    if (cu->device_get(&device) != 0 ||
        cu->device_attribute(&ch->copy.blocks, CU_DEVICE_MULTIPROCESSORS, device) != 0 ||
        cu->module_load(&ch->copy.module, bytes) != 0)
        ch->copy.module = NULL;
    else if (cu->module_function(&ch->copy.kernel, ch->copy.module, "epo_copy") != 0 ||
             launch(ch, 0, 0, 0, ch->self) != 0)
        ch->copy.kernel = NULL;
    free(bytes);
}

void copy_close(channel *ch) {
    if (ch->copy.module != NULL)
        (void)ch->cu->module_unload(ch->copy.module);
    ch->copy.module = NULL;
    ch->copy.kernel = NULL;
}

cu_result copy_here(const channel *ch, cu_pointer to, cu_pointer from, uint64_t bytes,
                    cu_stream stream) {
    const uint64_t whole = bytes / 16 * 16;
    if (ch->copy.kernel == NULL || bytes < COPY_LEAST || to % 16 != 0 || from % 16 != 0)
        return ch->cu->copy(to, from, bytes, stream);
    const cu_result r = launch(ch, to, from, whole, stream);
    if (r != 0 || whole == bytes)
        return r;
    return ch->cu->copy(to + whole, from + whole, bytes - whole, stream);
}
