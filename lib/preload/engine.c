/* SPDX-License-Identifier: Apache-2.0
 *
 * engine.c - engines are opened when a program first needs one, so that a preload
 * into a program that never does costs nothing and needs nothing but libc.
 */
#include "config.h"

#include "preload/engine.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/status.h"

#ifndef EPO_PKGLIBDIR
#define EPO_PKGLIBDIR "/usr/local/lib/ep-overlap"
#endif

/* The library's only state. */
static struct {
    pthread_mutex_t lock;
    const epo_engine *host, *cuda;
} context = {PTHREAD_MUTEX_INITIALIZER, NULL, NULL};

static const char *name_of(epo_engine_kind kind) {
    return kind == EPO_ENGINE_CUDA ? "cuda" : "host";
}

/* A table of another build is never called: its layout may differ. */
static epo_status check_table(const epo_engine *engine, epo_engine_kind kind, const char *file) {
    if (engine == NULL)
        return epo_fail(EPO_E_VERSION,
                        "%s does not serve engine ABI %u of libep_overlap %s; install both from "
                        "one build",
                        file, EPO_ENGINE_ABI, PACKAGE_VERSION);
    if (engine->size != sizeof *engine || engine->abi != EPO_ENGINE_ABI)
        return epo_fail(EPO_E_VERSION,
                        "%s has engine ABI %u with a table of %zu bytes, libep_overlap %s needs "
                        "ABI %u with %zu; install both from one build",
                        file, engine->abi, engine->size, PACKAGE_VERSION, EPO_ENGINE_ABI,
                        sizeof *engine);
    if (strcmp(engine->version, PACKAGE_VERSION) != 0)
        return epo_fail(EPO_E_VERSION,
                        "%s is version %.64s but libep_overlap is version %s; install both from "
                        "one build",
                        file, engine->version, PACKAGE_VERSION);
    if (strcmp(engine->name, name_of(kind)) != 0)
        return epo_fail(EPO_E_VERSION, "%s holds the %.32s engine, not the %s engine", file,
                        engine->name, name_of(kind));
    return EPO_OK;
}

#ifdef EPO_ENGINE_STATIC
/* Tests and sanitizers link one engine in. */
static epo_status load(epo_engine_kind kind, const epo_engine **out) {
    const epo_engine *engine = epo_engine_entry(EPO_ENGINE_ABI);
    epo_status status = check_table(engine, kind, "the engine linked in");
    if (status == EPO_OK)
        *out = engine;
    return status;
}
static bool installed(epo_engine_kind kind) { return kind == EPO_ENGINE_HOST; }
#else
static bool file_in(char *file, const char *folder, const char *sub, epo_engine_kind kind) {
    int n = snprintf(file, PATH_MAX, "%s%s/engine_%s.so", folder, sub, name_of(kind));
    return n > 0 && n < PATH_MAX && access(file, F_OK) == 0;
}

/* The folder that holds this library, symbolic links resolved; false if unknown. */
static bool own_folder(char *folder) {
    Dl_info info;
    if (dladdr((void *)&context, &info) == 0 || info.dli_fname == NULL ||
        realpath(info.dli_fname, folder) == NULL)
        return false;
    char *slash = strrchr(folder, '/');
    if (slash == NULL)
        return false;
    *slash = '\0';
    return true;
}

/* Beside this library first, so that a moved or staged tree stays whole (its own
 * folder serves build trees and bundles), then where it was configured to be. */
static bool find(epo_engine_kind kind, char *file) {
    char folder[PATH_MAX];
    if (own_folder(folder) &&
        (file_in(file, folder, "/ep-overlap", kind) || file_in(file, folder, "", kind)))
        return true;
    return file_in(file, EPO_PKGLIBDIR, "", kind);
}
static bool installed(epo_engine_kind kind) {
    char file[PATH_MAX];
    return find(kind, file);
}

static epo_status load(epo_engine_kind kind, const epo_engine **out) {
    char file[PATH_MAX], folder[PATH_MAX];
    if (!find(kind, file))
        return epo_fail(EPO_E_UNSUPPORTED,
                        "engine_%s.so was found neither in %s/ep-overlap nor in %s; install the "
                        "engine beside libep_overlap.so",
                        name_of(kind), own_folder(folder) ? folder : "(unknown)", EPO_PKGLIBDIR);
    void *handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL)
        return epo_fail(EPO_E_UNSUPPORTED, "%s does not load: %s", file, dlerror());
    const epo_engine *(*entry)(uint32_t) = NULL;
    *(void **)&entry = dlsym(handle, EPO_ENGINE_ENTRY);
    if (entry == NULL) {
        dlclose(handle);
        return epo_fail(EPO_E_VERSION, "%s has no %s; it is no engine of ep-overlap", file,
                        EPO_ENGINE_ENTRY);
    }
    const epo_engine *engine = entry(EPO_ENGINE_ABI);
    epo_status status = check_table(engine, kind, file);
    if (status != EPO_OK) {
        dlclose(handle);
        return status;
    }
    *out = engine;
    return EPO_OK;
}
#endif

/* Can this process open a GPU?  By the driver's device files, because loading the
 * driver only to ask would cost every host job a second. */
static bool gpu_usable(char *why) {
    static const char *const nodes[] = {"/dev/nvidiactl", "/dev/dxg"};
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    /* CUDA reads the list up to the first word that is no GPU; Slurm gives a step
     * without GPUs "NoDevFiles". */
    if (visible != NULL && !(*visible >= '0' && *visible <= '9') &&
        strncmp(visible, "GPU-", 4) != 0 && strncmp(visible, "MIG-", 4) != 0) {
        snprintf(why, EPO_ENGINE_WHY_MAX, "CUDA_VISIBLE_DEVICES is \"%.32s\"", visible);
        return false;
    }
    for (size_t i = 0; i < sizeof nodes / sizeof nodes[0]; i++)
        if (access(nodes[i], R_OK | W_OK) == 0)
            return true;
    snprintf(why, EPO_ENGINE_WHY_MAX, "no GPU to use (%s: %s)", nodes[0], strerror(errno));
    return false;
}

static epo_engine_kind choose(char *why) {
    if (!installed(EPO_ENGINE_CUDA)) {
        snprintf(why, EPO_ENGINE_WHY_MAX, "no CUDA engine installed");
        return EPO_ENGINE_HOST;
    }
    return gpu_usable(why) ? EPO_ENGINE_CUDA : EPO_ENGINE_HOST;
}

epo_status epo_engine_open(epo_engine_kind kind, const epo_engine **out, char *why) {
    char reason[EPO_ENGINE_WHY_MAX] = "";
    if (kind != EPO_ENGINE_AUTO && kind != EPO_ENGINE_HOST && kind != EPO_ENGINE_CUDA)
        return epo_fail(EPO_E_ARG,
                        "engine: found %d, allowed is EPO_ENGINE_AUTO, EPO_ENGINE_HOST or "
                        "EPO_ENGINE_CUDA",
                        (int)kind);
    if (kind == EPO_ENGINE_AUTO)
        kind = choose(reason);
    pthread_mutex_lock(&context.lock);
    const epo_engine **slot = kind == EPO_ENGINE_CUDA ? &context.cuda : &context.host;
    epo_status status = *slot != NULL ? EPO_OK : load(kind, slot);
    const epo_engine *engine = *slot;
    pthread_mutex_unlock(&context.lock);
    if (status != EPO_OK)
        return status;
    *out = engine;
    memcpy(why, reason, sizeof reason);
    return EPO_OK;
}
