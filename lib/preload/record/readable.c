/* SPDX-License-Identifier: Apache-2.0
 *
 * readable.c - names of kernels as people write them, which is what their classes are told
 * from.  The C++ run-time library does it where the process has one.
 */
#include "config.h"

#include "preload/record/events.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef char *demangler(const char *mangled, char *room, size_t *size, int *status);

static struct {
    pthread_once_t once;
    demangler *demangle;
} context = {.once = PTHREAD_ONCE_INIT};

static int see_object(struct dl_phdr_info *info, size_t size, void *found) {
    (void)size;
    const char *path = info->dlpi_name != NULL ? info->dlpi_name : "";
    const char *slash = strrchr(path, '/'), *base = slash != NULL ? slash + 1 : path;
    if (strncmp(base, "libstdc++.so", 12) != 0 && strncmp(base, "libc++abi.so", 12) != 0)
        return 0;
    *(const char **)found = info->dlpi_name;
    return 1;
}

static void find_demangler(void) {
    const char *path = NULL;
    dl_iterate_phdr(see_object, &path);
    void *handle = path != NULL ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    void *f = handle != NULL ? dlsym(handle, "__cxa_demangle") : NULL;
    memcpy(&context.demangle, &f, sizeof f);
}

/* The names in "_ZN7deep_ep9intranode8dispatchI..." or "_Z6kernelPf", joined by "::"; an
 * anonymous namespace is left out.  The bytes written; 0: none was found. */
static size_t join_names(const char *mangled, char *out, size_t room) {
    const char *c = mangled + 2;
    size_t used = 0;
    if (*c == 'N')
        c++;
    while (*c == 'L' || *c == 'K' || *c == 'V' || *c == 'r')
        c++;
    while (*c >= '1' && *c <= '9') {
        size_t length = 0;
        for (; *c >= '0' && *c <= '9' && length < EVENTS_NAME_BYTES; c++)
            length = length * 10 + (size_t)(*c - '0');
        if (strnlen(c, length) < length || used + length + 3 > room)
            break;
        if (strncmp(c, "_GLOBAL__N_", 11) != 0) {
            used += (size_t)snprintf(out + used, room - used, "%s%.*s", used > 0 ? "::" : "",
                                     (int)length, c);
        }
        c += length;
    }
    return used;
}

void events_readable(const char *mangled, char *out, size_t room) {
    pthread_once(&context.once, find_demangler);
    if (strncmp(mangled, "_Z", 2) != 0) {
        snprintf(out, room, "%s", mangled);
        return;
    }
    int status = -1;
    char *text = context.demangle != NULL ? context.demangle(mangled, NULL, NULL, &status) : NULL;
    if (text != NULL && status == 0) {
        snprintf(out, room, "%s", text);
    } else {
        const size_t used = join_names(mangled, out, room);
        snprintf(out + used, room - used, "%s%s", used > 0 ? " " : "", mangled);
    }
    free(text);
}
