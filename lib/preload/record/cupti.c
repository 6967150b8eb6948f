/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "preload/record/cupti.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    pthread_mutex_t lock;
    bool found;
    cupti table;
    char tool[CUPTI_TEXT]; /* "NAME=value" of a tool's variable; "": none */
} context = {.lock = PTHREAD_MUTEX_INITIALIZER};

typedef struct objects {
    char cupti[CUPTI_TEXT], cudart[CUPTI_TEXT], torch[CUPTI_TEXT], tool[CUPTI_TEXT];
} objects;

/* Libraries by which NVIDIA's tools enter a process. */
static const char *const tools[] = {"libToolsInjection", "libcuda-injection", "libTreeLauncher",
                                    "libInterceptorInjection", "libsanitizer-"};

static void keep(char to[CUPTI_TEXT], const char *path) {
    if (to[0] == '\0')
        snprintf(to, CUPTI_TEXT, "%s", path);
}

static int see_object(struct dl_phdr_info *info, size_t size, void *argument) {
    objects *o = argument;
    const char *path = info->dlpi_name != NULL ? info->dlpi_name : "";
    const char *slash = strrchr(path, '/'), *base = slash != NULL ? slash + 1 : path;
    (void)size;
    if (strncmp(base, "libcupti.so", 11) == 0 || strncmp(base, "libcupti-", 9) == 0)
        keep(o->cupti, path);
    else if (strncmp(base, "libcudart.so", 12) == 0 || strncmp(base, "libcudart-", 10) == 0)
        keep(o->cudart, path);
    else if (strncmp(base, "libtorch_cpu.", 13) == 0 || strncmp(base, "libkineto", 9) == 0)
        keep(o->torch, path);
    for (size_t i = 0; i < sizeof tools / sizeof *tools; i++)
        if (strncmp(base, tools[i], strlen(tools[i])) == 0)
            keep(o->tool, path);
    return 0;
}

void cupti_read_environment(void) {
    static const char *const variables[] = {"CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID",
                                            "NV_COMPUTE_PROFILER_PERFWORKS_DIR"};
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        const char *value = getenv(variables[i]);
        if (value == NULL || *value == '\0')
            continue;
        snprintf(context.tool, sizeof context.tool, "%s=%.400s", variables[i], value);
        return;
    }
}

bool cupti_tool_attached(char *what) {
    objects o;
    memset(&o, 0, sizeof o);
    dl_iterate_phdr(see_object, &o);
    if (o.tool[0] != '\0' || context.tool[0] != '\0')
        snprintf(what, CUPTI_TEXT, "%s", o.tool[0] != '\0' ? o.tool : context.tool);
    return o.tool[0] != '\0' || context.tool[0] != '\0';
}

/* ---- finding ---- */

static bool fill(void *handle, cupti *c, const char *path, char *why) {
#define CUPTI_FIND(member, symbol, parameters)                                                     \
    {                                                                                              \
        void *f_ = dlsym(handle, symbol);                                                          \
        memcpy(&c->member, &f_, sizeof f_);                                                        \
        if (f_ == NULL && missing == NULL)                                                         \
            missing = symbol;                                                                      \
    }
    const char *missing = NULL;
    EPO_CUPTI_FUNCTIONS(CUPTI_FIND)
    const char *const lacks = missing;
    EPO_CUPTI_NEWER(CUPTI_FIND)
#undef CUPTI_FIND
    snprintf(c->path, sizeof c->path, "%s", path);
    if (lacks != NULL)
        snprintf(why, CUPTI_TEXT, "%.400s has no %s", path, lacks);
    else if (c->version(&c->number) != CUPTI_OK)
        snprintf(why, CUPTI_TEXT, "%.400s does not tell its version", path);
    else if (c->number < CUPTI_VERSION_LEAST)
        snprintf(why, CUPTI_TEXT, "%.400s is version %u, %d is the least (CUDA 11.2)", path,
                 c->number, CUPTI_VERSION_LEAST);
    else
        return true;
    return false;
}

/* "libcudart.so.13" -> 13; 0: it does not tell. */
static int major_of(const char *path) {
    const char *so = strstr(path, ".so.");
    int major = 0;
    for (const char *c = so != NULL ? so + 4 : ""; *c >= '0' && *c <= '9' && major < 1000; c++)
        major = major * 10 + (*c - '0');
    return major;
}

/* Beside `cudart` as wheels and toolkits have it; else what the loader's own search finds. */
static void *open_near(const char *cudart, char path[CUPTI_TEXT]) {
    static const char *const places[] = {"", "../../cuda_cupti/lib/", "../extras/CUPTI/lib64/",
                                         "../../../extras/CUPTI/lib64/"};
    const char *slash = strrchr(cudart, '/');
    const int major = major_of(cudart), folder = slash != NULL ? (int)(slash + 1 - cudart) : 0;
    void *handle = NULL;
    for (size_t i = 0; i < sizeof places / sizeof *places && folder > 0 && handle == NULL; i++) {
        const int n =
            snprintf(path, CUPTI_TEXT, "%.*s%slibcupti.so.%d", folder, cudart, places[i], major);
        handle = n > 0 && n < CUPTI_TEXT ? dlopen(path, RTLD_LAZY | RTLD_LOCAL) : NULL;
    }
    if (handle == NULL && major > 0) {
        snprintf(path, CUPTI_TEXT, "libcupti.so.%d", major);
        handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    }
    return handle;
}

static void *open_any(char path[CUPTI_TEXT], char *why) {
    objects o;
    memset(&o, 0, sizeof o);
    dl_iterate_phdr(see_object, &o);
    if (o.cupti[0] != '\0') {
        void *handle = dlopen(o.cupti, RTLD_LAZY | RTLD_NOLOAD);
        snprintf(path, CUPTI_TEXT, "%s", o.cupti);
        if (handle == NULL)
            snprintf(why, CUPTI_TEXT, "%.400s is mapped and cannot be opened", o.cupti);
        return handle;
    }
    if (o.torch[0] != '\0') { /* its profiler holds a CUPTI inside: two would disturb each other */
        snprintf(why, CUPTI_TEXT, "no libcupti is mapped, and %.400s may hold its own", o.torch);
        return NULL;
    }
    void *handle = open_near(o.cudart, path);
    if (handle == NULL)
        snprintf(why, CUPTI_TEXT, "no libcupti is mapped, and none stands beside %.300s",
                 o.cudart[0] != '\0' ? o.cudart : "a CUDA run-time library, as that is not mapped");
    return handle;
}

const cupti *cupti_find(char *why) {
    char path[CUPTI_TEXT] = "";
    pthread_mutex_lock(&context.lock);
    if (!context.found) {
        void *handle = open_any(path, why);
        if (handle != NULL)
            context.found = fill(handle, &context.table, path, why);
    }
    const cupti *c = context.found ? &context.table : NULL;
    pthread_mutex_unlock(&context.lock);
    return c;
}

const char *cupti_error(const cupti *c, cupti_result r) {
    const char *text = NULL;
    if (c->error_text(r, &text) != CUPTI_OK || text == NULL)
        return "unknown CUPTI error";
    return text;
}
