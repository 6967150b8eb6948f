/* SPDX-License-Identifier: Apache-2.0
 *
 * wait.c - bells, flags, limits, and how a group ends in error.
 */
#include "config.h"

#include "backend/host/join.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int64_t host_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

uint32_t host_bell_read(epo_backend *be) { return atomic_load(&be->shared->peer[be->rank].bell); }

/* One in the byte of each ear. */
static uint32_t ear_bytes(int ears) {
    uint32_t bytes = 0;
    for (int i = 0; i < 4; i++)
        bytes |= (uint32_t)(ears >> i & 1) << 8 * i;
    return bytes;
}

void host_bell_wait(epo_backend *be, int ears, uint32_t seen, int64_t until_ns) {
    host_peer *me = &be->shared->peer[be->rank];
    int64_t spin = atomic_load_explicit(&be->spin_ns, memory_order_relaxed);
    if (spin > 0) {
        int64_t stop = host_now_ns() + spin;
        do {
            if (atomic_load_explicit(&me->bell, memory_order_acquire) != seen)
                return;
        } while (host_now_ns() < stop);
    }
    struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
    /* Announced before the kernel compares the bell; the ringer changes the bell
     * before it looks for sleepers: one of the two sees the other. */
    uint32_t bytes = ear_bytes(ears);
    atomic_fetch_add(&me->sleepers, bytes);
    syscall(SYS_futex, &me->bell, FUTEX_WAIT_BITSET, seen, until_ns == INT64_MAX ? NULL : &until,
            NULL, ears);
    atomic_fetch_sub(&me->sleepers, bytes);
}

void host_bell_ring(host_shared *shared, int rank, int ears) {
    host_peer *peer = &shared->peer[rank];
    atomic_fetch_add(&peer->bell, 1);
    if ((atomic_load(&peer->sleepers) & ear_bytes(ears) * 255u) != 0)
        syscall(SYS_futex, &peer->bell, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, ears);
}

/* ---- the group's end in error -------------------------------------------- */

static void host_break_locally(epo_backend *be, epo_status status, const char *text) {
    pthread_mutex_lock(&be->broken_mutex);
    if (atomic_load(&be->broken) == EPO_OK) {
        snprintf(be->broken_text, sizeof be->broken_text, "%s", text);
        atomic_store(&be->broken, (int)status);
    }
    pthread_mutex_unlock(&be->broken_mutex);
}

bool host_forked(const epo_backend *be) { return be->pid != getpid(); }

void host_break(epo_backend *be, epo_status status, const char *format, ...) {
    char text[HOST_TEXT_MAX];
    va_list args;
    if (host_forked(be))
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    host_break_locally(be, status, text);
    host_shared *shared = be->shared;
    uint32_t none = 0;
    if (atomic_compare_exchange_strong(&shared->broken, &none, 1)) {
        shared->broken_rank = be->rank;
        shared->broken_status = (int32_t)status;
        memcpy(shared->broken_text, text, sizeof text);
        atomic_store(&shared->broken, 2);
    }
    for (int r = 0; r < be->ranks; r++)
        host_bell_ring(shared, r, HOST_EAR_ALL);
}

bool host_broken(epo_backend *be) {
    if (atomic_load(&be->broken) != EPO_OK)
        return true;
    host_shared *shared = be->shared;
    if (atomic_load_explicit(&shared->broken, memory_order_acquire) != 2)
        return false;
    char text[HOST_TEXT_MAX + 64];
    epo_status status = (epo_status)shared->broken_status;
    if (status == EPO_E_TIMEOUT || status == EPO_E_PEER) {
        snprintf(text, sizeof text, "%.*s", HOST_TEXT_MAX - 1, shared->broken_text);
    } else {
        snprintf(text, sizeof text, "rank %d ended the group: %.*s", (int)shared->broken_rank,
                 HOST_TEXT_MAX - 1, shared->broken_text);
        status = EPO_E_PEER;
    }
    host_break_locally(be, status, text);
    host_bell_ring(shared, be->rank, HOST_EAR_ALL);
    return true;
}

epo_status host_status(epo_backend *be) {
    if (host_forked(be))
        return epo_fail(EPO_E_STATE,
                        "the group was made by process %d, this is process %d, forked later; a "
                        "child process makes a group of its own",
                        (int)be->pid, (int)getpid());
    if (!host_broken(be))
        return EPO_OK;
    return epo_fail((epo_status)atomic_load(&be->broken), "%s", be->broken_text);
}

/* ---- peers --------------------------------------------------------------- */

/* HOST_PEER_DEAD is found here. */
static host_peer_state host_peer_look(host_shared *shared, int rank) {
    host_peer *peer = &shared->peer[rank];
    uint32_t state = atomic_load_explicit(&peer->state, memory_order_acquire);
    if (shared->threads || state != HOST_PEER_HERE)
        return (host_peer_state)state;
    int rc = pthread_mutex_trylock(&peer->alive);
    if (rc == EBUSY)
        return HOST_PEER_HERE;
    /* Free: it left between the two looks.  Else the kernel let go of it. */
    if (rc == 0) {
        pthread_mutex_unlock(&peer->alive);
        return (host_peer_state)atomic_load_explicit(&peer->state, memory_order_acquire);
    }
    atomic_store(&peer->state, HOST_PEER_DEAD);
    if (rc == EOWNERDEAD)
        pthread_mutex_unlock(&peer->alive); /* not made consistent: ENOTRECOVERABLE from now on */
    return HOST_PEER_DEAD;
}

const char *host_peer_why_lost(host_shared *shared, const struct host_join *join, int rank) {
    switch (host_peer_look(shared, rank)) {
    case HOST_PEER_DEAD: return "ended without closing the group";
    case HOST_PEER_LEFT: return "left the group";
    case HOST_PEER_COMING:
        if (join != NULL && host_join_hung_up(join, rank))
            return "ended while the group was made";
        break;
    case HOST_PEER_HERE: break;
    }
    return NULL;
}

const char *host_peer_name(const host_shared *shared, int rank, char *text, size_t size) {
    const host_peer *peer = &shared->peer[rank];
    if (shared->threads)
        snprintf(text, size, "rank %d", rank);
    else if (peer->node[0] == '\0')
        snprintf(text, size, "rank %d (pid %d)", rank, (int)peer->pid);
    else
        snprintf(text, size, "rank %d (pid %d on %.*s)", rank, (int)peer->pid, HOST_NODE_MAX - 1,
                 peer->node);
    return text;
}

/* ---- flags --------------------------------------------------------------- */

static uint64_t host_flag_load(const epo_ready *ready, int i) {
    return __atomic_load_n(&ready->flag[i], __ATOMIC_ACQUIRE);
}

bool host_ready_reached(const epo_ready *ready) {
    for (int i = 0; i < ready->count; i++)
        if (host_flag_load(ready, i) < ready->epoch)
            return false;
    return true;
}

/* "dispatch chunk 2"; "barrier". */
static void host_ready_what(const epo_ready *ready, char *text, size_t size) {
    const char *what = ready->what != NULL ? ready->what : "flag";
    if (ready->chunk < 0)
        snprintf(text, size, "%s", what);
    else if (strstr(what, "chunk") != NULL)
        snprintf(text, size, "%s %d", what, ready->chunk);
    else
        snprintf(text, size, "%s chunk %d", what, ready->chunk);
}

/* Names those that are late; the first one's flag is returned in *first. */
static void host_ready_late(epo_backend *be, const epo_ready *ready, char *text, size_t size,
                            int *first) {
    size_t used = 0;
    *first = -1;
    text[0] = '\0';
    for (int i = 0; i < ready->count; i++) {
        if (host_flag_load(ready, i) >= ready->epoch)
            continue;
        char name[HOST_NODE_MAX + 48];
        int writer = epo_ready_writer(ready, i);
        if (*first < 0)
            *first = i;
        else if (used + 8 >= size)
            return;
        int n = snprintf(text + used, size - used, "%s%s", used > 0 ? ", " : "",
                         host_peer_name(be->shared, writer, name, sizeof name));
        used += n > 0 ? (size_t)n : 0;
        if (used >= size)
            return;
    }
}

/* Why a peer will not write a flag that is missing still; NULL: it may. */
static const char *host_peer_lost(epo_backend *be, int rank) {
    const char *why = host_peer_why_lost(be->shared, be->join, rank);
    uint64_t refused = atomic_load(&be->shared->peer[rank].refused);
    if (why == NULL && refused != 0 && refused >= atomic_load(&be->turns))
        why = "refused its arguments of the same call, as its own error tells";
    return why;
}

/* Finds one that is lost, or waits in another call. */
static bool host_ready_lost(epo_backend *be, const epo_ready *ready) {
    for (int i = 0; i < ready->count; i++) {
        if (host_flag_load(ready, i) >= ready->epoch)
            continue;
        int writer = epo_ready_writer(ready, i);
        const char *why = host_peer_lost(be, writer);
        if ((why == NULL && !host_turn_differs(be, writer)) ||
            host_flag_load(ready, i) >= ready->epoch)
            continue;
        if (why == NULL)
            return true;
        char name[HOST_NODE_MAX + 48], what[64];
        host_ready_what(ready, what, sizeof what);
        host_break(be, EPO_E_PEER, "%s %s; rank %d waited for it in %s",
                   host_peer_name(be->shared, writer, name, sizeof name), why, be->rank, what);
        return true;
    }
    return false;
}

/* Others may ask whom this rank waits for; if for itself, another of its waits tells. */
static void host_wait_tell(epo_backend *be, const epo_ready *ready) {
    host_peer *me = &be->shared->peer[be->rank];
    for (int i = 0; i < ready->count; i++)
        if (host_flag_load(ready, i) < ready->epoch) {
            const int writer = epo_ready_writer(ready, i);
            if (writer != be->rank) {
                atomic_store(&me->waits_for, writer);
                atomic_store(&me->waits_at, host_now_ns());
            }
            return;
        }
}

/* Where waiting for `rank` leads, which may itself wait for another. */
static int host_wait_end(epo_backend *be, int rank) {
    const int64_t now = host_now_ns();
    for (int hops = 0; hops < be->ranks; hops++) {
        const host_peer *peer = &be->shared->peer[rank];
        const int next = atomic_load(&peer->waits_for);
        if (now - atomic_load(&peer->waits_at) > 4 * HOST_SLICE_NS)
            break;
        rank = next;
    }
    return rank;
}

void host_ready_check(epo_backend *be, const epo_ready *ready, int64_t from, bool *warned) {
    if (host_ready_lost(be, ready))
        return;
    host_wait_tell(be, ready);
    int64_t waited = host_now_ns() - from;
    bool over = waited >= be->timeout_ns;
    if (!over && (*warned || waited < be->warn_ns))
        return;
    char late[320], what[64];
    int first;
    host_ready_what(ready, what, sizeof what);
    host_ready_late(be, ready, late, sizeof late, &first);
    if (first < 0)
        return;
    if (over) {
        const int writer = epo_ready_writer(ready, first), end = host_wait_end(be, writer);
        char behind[HOST_NODE_MAX + 80] = "", name[HOST_NODE_MAX + 48];
        if (end != writer)
            snprintf(behind, sizeof behind, ", behind whom all wait for %s",
                     host_peer_name(be->shared, end, name, sizeof name));
        host_break(be, EPO_E_TIMEOUT,
                   "rank %d: waited %.1f s for %s in %s (epoch %llu, has %llu)%s", be->rank,
                   (double)waited * 1e-9, late, what, (unsigned long long)ready->epoch,
                   (unsigned long long)host_flag_load(ready, first), behind);
        return;
    }
    *warned = true;
    fprintf(stderr, "ep-overlap: rank %d: waiting for %s in %s since %.1f s (limit %.1f s)\n",
            be->rank, late, what, (double)waited * 1e-9, (double)be->timeout_ns * 1e-9);
}

epo_status host_ready_wait(epo_backend *be, const epo_ready *ready) {
    int64_t from = host_now_ns();
    bool warned = false;
    for (;;) {
        uint32_t seen = host_bell_read(be);
        if (host_ready_reached(ready))
            return EPO_OK;
        if (host_broken(be))
            return host_status(be);
        host_ready_check(be, ready, from, &warned);
        if (!host_broken(be))
            host_bell_wait(be, HOST_EAR_FLAGS, seen, host_now_ns() + HOST_SLICE_NS);
    }
}
