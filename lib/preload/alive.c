/* SPDX-License-Identifier: Apache-2.0
 *
 * alive.c - a table of the objects that exist: open addressing, at most half full.
 */
#include "config.h"

#include "preload/alive.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include "core/status.h"

typedef struct entry {
    const void *object; /* NULL: free */
    epo_kind kind;
    unsigned references;
} entry;

/* All of this library's own state beside the engines. */
static struct {
    pthread_mutex_t lock;
    pthread_once_t once;
    entry *entry;
    size_t count, room; /* room: a power of two, or 0 */
} table = {.lock = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};

/* A child's copy must not stay locked by a thread that the child does not have. */
static void before_fork(void) { pthread_mutex_lock(&table.lock); }
static void after_fork(void) { pthread_mutex_unlock(&table.lock); }
static void watch_forks(void) { (void)pthread_atfork(before_fork, after_fork, after_fork); }

static size_t place_of(const void *object) {
    return (size_t)((uintptr_t)object / 16 * UINT64_C(0x9E3779B97F4A7C15) >> 20);
}

/* Its entry, or the free one where it would be. */
static entry *find(entry *entries, size_t room, const void *object) {
    size_t at = place_of(object) & (room - 1);
    while (entries[at].object != NULL && entries[at].object != object)
        at = (at + 1) & (room - 1);
    return &entries[at];
}

static bool make_room(void) {
    if (2 * (table.count + 1) <= table.room)
        return true;
    size_t room = table.room > 0 ? 2 * table.room : 64;
    entry *more = calloc(room, sizeof *more);
    if (more == NULL)
        return false;
    for (size_t i = 0; i < table.room; i++)
        if (table.entry[i].object != NULL)
            *find(more, room, table.entry[i].object) = table.entry[i];
    free(table.entry);
    table.entry = more;
    table.room = room;
    return true;
}

/* Those behind it may have been pushed on by it: they are put in anew. */
static void remove_entry(entry *gone) {
    size_t at = (size_t)(gone - table.entry);
    *gone = (entry){NULL, EPO_KIND_WORLD, 0};
    table.count--;
    for (at = (at + 1) & (table.room - 1); table.entry[at].object != NULL;
         at = (at + 1) & (table.room - 1)) {
        entry moved = table.entry[at];
        table.entry[at].object = NULL;
        *find(table.entry, table.room, moved.object) = moved;
    }
}

bool epo_alive_add(epo_kind kind, const void *object) {
    (void)pthread_once(&table.once, watch_forks);
    pthread_mutex_lock(&table.lock);
    bool good = make_room();
    if (good) {
        entry *e = find(table.entry, table.room, object);
        table.count += e->object == NULL;
        *e = (entry){object, kind, 1}; /* an address may be given anew */
    }
    pthread_mutex_unlock(&table.lock);
    return good;
}

bool epo_alive_retain(epo_kind kind, const void *object) {
    pthread_mutex_lock(&table.lock);
    entry *e = table.room > 0 ? find(table.entry, table.room, object) : NULL;
    const bool known = e != NULL && e->object != NULL && e->kind == kind;
    if (known)
        e->references++;
    pthread_mutex_unlock(&table.lock);
    return known;
}

bool epo_alive_drop(epo_kind kind, const void *object) {
    pthread_mutex_lock(&table.lock);
    entry *e = table.room > 0 ? find(table.entry, table.room, object) : NULL;
    const bool known = e != NULL && e->object != NULL && e->kind == kind;
    if (known && --e->references == 0)
        remove_entry(e);
    pthread_mutex_unlock(&table.lock);
    return known;
}

epo_status epo_alive_check(epo_kind kind, const void *object, const char *function) {
    static const char *const names[] = {"",     "world", "group",     "buffer",
                                        "plan", "layer", "saved pass"};
    epo_kind found = 0;
    pthread_mutex_lock(&table.lock);
    const entry *e = table.room > 0 ? find(table.entry, table.room, object) : NULL;
    if (e != NULL && e->object != NULL)
        found = e->kind;
    pthread_mutex_unlock(&table.lock);
    if (found == kind)
        return EPO_OK;
    if (found != 0)
        return epo_fail(EPO_E_ARG, "%s: a %s was given for a %s", function, names[found],
                        names[kind]);
    return epo_fail(EPO_E_ARG, "%s: this %s does not exist: it was destroyed before, or never made",
                    function, names[kind]);
}
