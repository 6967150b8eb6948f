/* SPDX-License-Identifier: Apache-2.0
 *
 * entry.c - stands in front of the functions of CUPTI by which a profiler begins and ends,
 * so that the recorder can give way before it does.  A profiler that looks them up with
 * dlsym() on the library is not seen here.
 */
#include "config.h"

#include <dlfcn.h>
#include <link.h>
#include <string.h>

#include "preload/record/hold.h"
#include "preload/record/recorder.h"

static const void *base_of(const void *address) {
    Dl_info info;
    return address != NULL && dladdr(address, &info) != 0 ? info.dli_fbase : NULL;
}

static const char here; /* an address of our own */

static void *symbol_in(void *handle, const char *name) {
    void *f = handle != NULL ? dlsym(handle, name) : NULL;
    return f != NULL && base_of(f) != base_of(&here) ? f : NULL;
}

/* Whoever calls holds its library itself. */
static void *symbol_and_close(void *handle, const char *name) {
    void *f = symbol_in(handle, name);
    if (handle != NULL)
        (void)dlclose(handle);
    return f;
}

static int see_object(struct dl_phdr_info *info, size_t size, void *found) {
    (void)size;
    const char *path = info->dlpi_name != NULL ? info->dlpi_name : "";
    const char *slash = strrchr(path, '/'), *base = slash != NULL ? slash + 1 : path;
    if (strncmp(base, "libcupti.so", 11) != 0 && strncmp(base, "libcupti-", 9) != 0)
        return 0;
    *(const char **)found = info->dlpi_name;
    return 1;
}

/* The function that the code at `caller` would have called without us: its own object's and
 * that one's dependencies', else the next in the global order, else the one that is mapped. */
static void *real_of(const void *caller, const char *name) {
    Dl_info info;
    struct link_map *map = NULL;
    const char *path = NULL;
    void *handle = NULL;
    if (dladdr1(caller, &info, (void **)&map, RTLD_DL_LINKMAP) != 0 && map != NULL &&
        map->l_name != NULL && map->l_name[0] != '\0')
        handle = dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD);
    void *f = symbol_and_close(handle, name);
    if (f == NULL)
        f = symbol_in(RTLD_NEXT, name);
    if (f == NULL && dl_iterate_phdr(see_object, &path) != 0)
        f = symbol_and_close(dlopen(path, RTLD_LAZY | RTLD_NOLOAD), name);
    return f;
}

/* Whether a call is another's and anybody wants to know: CUPTI's calls of itself are not. */
static bool is_watched(const void *caller, const void *real) {
    return recorder_wanted() && base_of(caller) != base_of(real);
}

typedef cupti_result (*subscribing)(cupti_subscriber *, cupti_callback *, void *);
typedef cupti_result (*subscribing_v2)(cupti_subscriber *, cupti_callback *, void *, void *);
typedef cupti_result (*unsubscribing)(cupti_subscriber);
typedef cupti_result (*switching)(cupti_kind);
typedef cupti_result (*switching_context)(void *, cupti_kind);
typedef cupti_result (*registering)(cupti_buffer_requested *, cupti_buffer_completed *);
typedef cupti_result (*registering_clock)(cupti_clock *);
typedef cupti_result (*flushing)(uint32_t);
typedef cupti_result (*finalizing)(void);

/* What a call said, told after it. */
static cupti_result returned(bool watched, cupti_result r) {
    if (watched)
        hold_other_returned();
    return r;
}

/* Declares `real` and `watched`; tells before. */
#define REAL(what, type)                                                                           \
    const void *caller_ = __builtin_return_address(0);                                             \
    void *found_ = real_of(caller_, __func__);                                                     \
    if (found_ == NULL)                                                                            \
        return CUPTI_NOT_INITIALIZED;                                                              \
    type real;                                                                                     \
    memcpy(&real, &found_, sizeof found_);                                                         \
    const bool watched = is_watched(caller_, found_);                                              \
    if (watched)                                                                                   \
    hold_other_calls(what, __func__)

/* The call itself, and told after. */
#define DONE(what, kind, ...)                                                                      \
    const cupti_result r = returned(watched, real(__VA_ARGS__));                                   \
    if (watched && r == CUPTI_OK)                                                                  \
        hold_other_called(what, kind);                                                             \
    return r

/* The same for one CUDA context: the kind stays as it is for others. */
#define SWITCHED(cuda, kind, on)                                                                   \
    const cupti_result r = returned(watched, real(cuda, kind));                                    \
    if (watched && r == CUPTI_OK)                                                                  \
        hold_other_switched(cuda, kind, on);                                                       \
    return r

#pragma GCC visibility push(default)
cupti_result cuptiSubscribe(cupti_subscriber *out, cupti_callback *callback, void *user);
cupti_result cuptiSubscribe_v2(cupti_subscriber *out, cupti_callback *callback, void *user,
                               void *parameters);
cupti_result cuptiUnsubscribe(cupti_subscriber subscriber);
cupti_result cuptiActivityEnable(cupti_kind kind);
cupti_result cuptiActivityEnableAndDump(cupti_kind kind);
cupti_result cuptiActivityEnableContext(void *cuda, cupti_kind kind);
cupti_result cuptiActivityDisable(cupti_kind kind);
cupti_result cuptiActivityDisableContext(void *cuda, cupti_kind kind);
cupti_result cuptiActivityRegisterCallbacks(cupti_buffer_requested *requested,
                                            cupti_buffer_completed *completed);
cupti_result cuptiActivityRegisterTimestampCallback(cupti_clock *clock);
cupti_result cuptiActivityFlushAll(uint32_t flag);
cupti_result cuptiFinalize(void);
#pragma GCC visibility pop

cupti_result cuptiSubscribe(cupti_subscriber *out, cupti_callback *callback, void *user) {
    REAL(OTHER_SUBSCRIBES, subscribing);
    DONE(OTHER_SUBSCRIBES, 0, out, callback, user);
}

cupti_result cuptiSubscribe_v2(cupti_subscriber *out, cupti_callback *callback, void *user,
                               void *parameters) {
    REAL(OTHER_SUBSCRIBES, subscribing_v2);
    DONE(OTHER_SUBSCRIBES, 0, out, callback, user, parameters);
}

cupti_result cuptiUnsubscribe(cupti_subscriber subscriber) {
    REAL(OTHER_UNSUBSCRIBES, unsubscribing);
    DONE(OTHER_UNSUBSCRIBES, 0, subscriber);
}

cupti_result cuptiActivityEnable(cupti_kind kind) {
    REAL(OTHER_ENABLES, switching);
    DONE(OTHER_ENABLES, kind, kind);
}

cupti_result cuptiActivityEnableAndDump(cupti_kind kind) {
    REAL(OTHER_ENABLES, switching);
    DONE(OTHER_ENABLES, kind, kind);
}

cupti_result cuptiActivityEnableContext(void *cuda, cupti_kind kind) {
    REAL(OTHER_ENABLES, switching_context);
    SWITCHED(cuda, kind, true);
}

cupti_result cuptiActivityDisable(cupti_kind kind) {
    REAL(OTHER_DISABLES, switching);
    DONE(OTHER_DISABLES, kind, kind);
}

cupti_result cuptiActivityDisableContext(void *cuda, cupti_kind kind) {
    REAL(OTHER_DISABLES, switching_context);
    SWITCHED(cuda, kind, false);
}

cupti_result cuptiActivityRegisterCallbacks(cupti_buffer_requested *requested,
                                            cupti_buffer_completed *completed) {
    REAL(OTHER_REGISTERS, registering);
    const cupti_result r = returned(watched, real(requested, completed));
    if (watched && r == CUPTI_OK)
        hold_other_registered(requested, completed);
    return r;
}

cupti_result cuptiActivityRegisterTimestampCallback(cupti_clock *clock) {
    REAL(OTHER_REGISTERS, registering_clock);
    const cupti_result r = returned(watched, real(clock));
    if (watched && r == CUPTI_OK)
        hold_other_clock(clock);
    return r;
}

cupti_result cuptiActivityFlushAll(uint32_t flag) {
    REAL(OTHER_FLUSHES, flushing);
    DONE(OTHER_FLUSHES, 0, flag);
}

cupti_result cuptiFinalize(void) {
    REAL(OTHER_FINALIZES, finalizing);
    DONE(OTHER_FINALIZES, 0);
}
