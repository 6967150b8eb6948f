/* SPDX-License-Identifier: Apache-2.0
 *
 * real.c - the NCCL behind us.  It may be private to a library that a Python module
 * opened (RTLD_LOCAL), so RTLD_NEXT alone does not find it, and there may be two: each
 * caller gets the one that the dynamic linker would have given it.
 */
#include "config.h"

#include "preload/intercept/intercept.h"

#include <dlfcn.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>

#define REALS_MAX 8
#define SITES 1024 /* call sites remembered; what finds no place is looked up each time */
#define SITES_TRIED 16

typedef struct site {
    _Atomic(const void *) caller;
    _Atomic(const real_nccl *) real;
} site;

static struct {
    pthread_mutex_t lock;
    real_nccl reals[REALS_MAX];
    atomic_int count;
    site sites[SITES];
} context = {.lock = PTHREAD_MUTEX_INITIALIZER};

static const void *base_of(const void *address) {
    Dl_info info;
    return address != NULL && dladdr(address, &info) != 0 ? info.dli_fbase : NULL;
}

static bool is_ours(const void *function) {
    return base_of(function) == base_of((const void *)&context);
}

/* A handle stays open: a library that the program calls through us must not go away
 * between our looking it up and calling it. */
static void *open_mapped(const char *path) { return dlopen(path, RTLD_LAZY | RTLD_NOLOAD); }

static void *symbol_in(void *handle) {
    void *f = handle != NULL ? dlsym(handle, "ncclGroupStart") : NULL;
    return f != NULL && !is_ours(f) ? f : NULL;
}

/* What the caller's own object and its dependencies offer. */
static void *from_caller(const void *caller) {
    Dl_info info;
    struct link_map *map = NULL;
    if (dladdr1(caller, &info, (void **)&map, RTLD_DL_LINKMAP) == 0 || map == NULL ||
        map->l_name == NULL || map->l_name[0] == '\0')
        return NULL;
    void *handle = open_mapped(map->l_name);
    void *f = symbol_in(handle);
    if (f == NULL && handle != NULL)
        dlclose(handle);
    return f;
}

/* "libnccl.so.2", "libnccl-2.28.so": not our own files, whose names never have it. */
static int see_object(struct dl_phdr_info *info, size_t size, void *found) {
    (void)size;
    const char *name = info->dlpi_name, *slash = name != NULL ? strrchr(name, '/') : NULL;
    const char *base = slash != NULL ? slash + 1 : name;
    if (base == NULL || strncmp(base, "libnccl", 7) != 0 || (base[7] != '.' && base[7] != '-'))
        return 0;
    *(const char **)found = name;
    return 1;
}

static void *from_mapped(void) {
    const char *path = NULL;
    dl_iterate_phdr(see_object, &path);
    return path != NULL ? symbol_in(open_mapped(path)) : NULL;
}

/* All functions of the object that holds `function`; what it lacks stays NULL. */
static void fill(real_nccl *r, const void *function) {
    Dl_info info;
    memset(r, 0, sizeof *r);
    if (dladdr(function, &info) == 0)
        return;
    void *handle = open_mapped(info.dli_fname);
    if (handle == NULL) /* the program itself holds NCCL and exports it */
        handle = RTLD_NEXT;
    r->base = info.dli_fbase;
    r->path = info.dli_fname;
#define REAL_FIND(name, parameters)                                                                \
    {                                                                                              \
        void *f_ = dlsym(handle, "nccl" #name);                                                    \
        if (f_ != NULL && base_of(f_) == info.dli_fbase)                                           \
            memcpy(&r->name, &f_, sizeof f_);                                                      \
    }
    EPO_NCCL_FUNCTIONS(REAL_FIND)
    EPO_NCCL_HELPERS(REAL_FIND)
#undef REAL_FIND
    if (r->GetVersion != NULL && r->GetVersion(&r->version) != ncclSuccess)
        r->version = 0;
}

static const real_nccl *real_at_base(const void *function) {
    const void *base = base_of(function);
    const int count = atomic_load(&context.count);
    for (int i = 0; i < count; i++)
        if (context.reals[i].base == base)
            return &context.reals[i];
    if (count == REALS_MAX)
        return NULL;
    fill(&context.reals[count], function);
    atomic_store(&context.count, count + 1);
    return &context.reals[count];
}

static const real_nccl *look_up(const void *caller) {
    void *f = from_caller(caller);
    if (f == NULL) {
        f = dlsym(RTLD_NEXT, "ncclGroupStart");
        if (f != NULL && is_ours(f))
            f = NULL;
    }
    if (f == NULL)
        f = from_mapped();
    return f != NULL ? real_at_base(f) : NULL;
}

/* The site of `caller`, else the first free place for it; NULL: all are taken. */
static site *site_of(const void *caller) {
    const uintptr_t first = ((uintptr_t)caller >> 2) % SITES;
    for (uintptr_t i = 0; i < SITES_TRIED; i++) {
        site *s = &context.sites[(first + i) % SITES];
        const void *there = atomic_load_explicit(&s->caller, memory_order_acquire);
        if (there == caller || there == NULL)
            return s;
    }
    return NULL;
}

const real_nccl *real_of(const void *caller) {
    const site *known = site_of(caller);
    if (known != NULL && atomic_load_explicit(&known->caller, memory_order_acquire) == caller)
        return atomic_load_explicit(&known->real, memory_order_relaxed);
    pthread_mutex_lock(&context.lock);
    const real_nccl *r = look_up(caller);
    site *s = site_of(caller);
    if (r != NULL && s != NULL && atomic_load(&s->caller) == NULL) {
        atomic_store_explicit(&s->real, r, memory_order_relaxed);
        atomic_store_explicit(&s->caller, caller, memory_order_release);
    }
    pthread_mutex_unlock(&context.lock);
    return r;
}

int real_count(void) { return atomic_load(&context.count); }
