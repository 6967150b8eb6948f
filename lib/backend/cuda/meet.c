/* SPDX-License-Identifier: Apache-2.0
 *
 * meet.c - the ranks on the host side.  One room per group, in memory that all its
 * ranks see: counters for barriers, two halves of scratch for allgathers (a rank
 * can be one collective ahead, never two), the first failure of any rank.
 */
#define _GNU_SOURCE
#include "backend/cuda/gpu.h"

#include "backend/engine.h"
#include "backend/far.h"
#include "backend/meet.h"
#include "core/names.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define MEET_RANKS 256
#define MEET_SCRATCH 4096 /* per rank and half */
#define MEET_TEXT 512
#define MEET_NAME 48
#define MEET_SAID_MS 200 /* older than that, a rank may not have gone on */

typedef struct meet_room {
    int ranks;
    _Atomic int users;       /* threads: the last one frees it */
    _Atomic uint32_t failed; /* 0 none, 1 being written, 2 written */
    int failed_status;
    char failed_text[MEET_TEXT];
    _Atomic uint64_t arrived[MEET_RANKS];
    _Atomic uint64_t waits[MEET_RANKS]; /* whom each waits for, see gpu_meet_waits */
    char scratch[];                     /* [2][ranks][MEET_SCRATCH] */
} meet_room;

/* A room that threads look for: same members, not yet full. */
typedef struct world_room {
    struct world_room *next;
    meet_room *room;
    int ranks, joined;
    int members[MEET_RANKS];
} world_room;

struct epo_world {
    epo_object object;
    int ranks;
    pthread_mutex_t lock;
    world_room *rooms; /* being filled */
};

struct gpu_meet {
    int rank, ranks;
    double timeout_s;
    bool threads;
    meet_room *room;
    epo_meeting *meeting; /* processes */
    epo_far *far;         /* processes of several machines; the room is this node's then */
    int nodes, lead;      /* 0: not known; who makes what a node shares */
    uint64_t room_bytes;
    uint64_t barriers, gathers;
};

static uint64_t room_bytes(int ranks) {
    return sizeof(meet_room) + UINT64_C(2) * (uint64_t)ranks * MEET_SCRATCH;
}

/* ---- threads ---- */

epo_status gpu_world_create(int ranks, epo_world **out) {
    if (ranks < 1 || ranks > MEET_RANKS)
        return epo_fail(EPO_E_ARG, "epo_world_create: ranks: found %d, allowed 1..%d", ranks,
                        MEET_RANKS);
    epo_world *w = calloc(1, sizeof *w);
    if (w == NULL)
        return epo_fail(EPO_E_NOMEM, "epo_world_create: no memory");
    w->ranks = ranks;
    pthread_mutex_init(&w->lock, NULL);
    *out = w;
    return EPO_OK;
}

void gpu_world_destroy(epo_world *w) {
    if (w == NULL)
        return;
    while (w->rooms != NULL) {
        world_room *r = w->rooms;
        w->rooms = r->next;
        free(r);
    }
    pthread_mutex_destroy(&w->lock);
    free(w);
}

static int config_member(const epo_backend_config *c, int i) {
    return c->members != NULL ? c->members[i] : i;
}

static bool room_fits(const world_room *r, const epo_backend_config *c, int ranks) {
    if (r->ranks != ranks)
        return false;
    for (int i = 0; i < ranks; i++)
        if (r->members[i] != config_member(c, i))
            return false;
    return true;
}

static world_room *room_add(epo_world *w, const epo_backend_config *c, int ranks) {
    world_room *r = calloc(1, sizeof *r);
    if (r == NULL)
        return NULL;
    r->room = calloc(1, room_bytes(ranks));
    if (r->room == NULL) {
        free(r);
        return NULL;
    }
    r->room->ranks = ranks;
    r->ranks = ranks;
    for (int i = 0; i < ranks; i++)
        r->members[i] = config_member(c, i);
    atomic_store(&r->room->users, ranks);
    r->next = w->rooms;
    w->rooms = r;
    return r;
}

static epo_status meet_threads(const epo_backend_config *c, gpu_meet *m) {
    epo_world *w = c->threads;
    pthread_mutex_lock(&w->lock);
    world_room **at = &w->rooms;
    while (*at != NULL && !room_fits(*at, c, m->ranks))
        at = &(*at)->next;
    world_room *r = *at;
    if (r == NULL) {
        r = room_add(w, c, m->ranks);
        at = &w->rooms;
    }
    if (r != NULL) {
        m->room = r->room;
        if (++r->joined == r->ranks) { /* full: the next group gets a new room */
            *at = r->next;
            free(r);
        }
    }
    pthread_mutex_unlock(&w->lock);
    return m->room != NULL
               ? EPO_OK
               : epo_fail(EPO_E_NOMEM, "rank %d: no memory to meet %d ranks", m->rank, m->ranks);
}

/* ---- processes ---- */

static epo_status shm_make(const gpu_meet *m, uint64_t bytes, char *name, void **out) {
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random)
        return epo_fail(EPO_E_SYSTEM, "rank %d: getrandom: %s", m->rank, strerror(errno));
    snprintf(name, MEET_NAME, "/ep_overlap-%016" PRIx64, random);
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return epo_fail(EPO_E_SYSTEM, "rank %d: shm_open: %s", m->rank, strerror(errno));
    int e = posix_fallocate(fd, 0, (off_t)bytes);
    void *p = MAP_FAILED;
    if (e == 0)
        p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED) {
        shm_unlink(name);
        return epo_fail(EPO_E_NOMEM,
                        "rank %d: shared memory in /dev/shm: need %" PRIu64 " bytes: %s", m->rank,
                        bytes, strerror(e != 0 ? e : errno));
    }
    *out = p;
    return EPO_OK;
}

static epo_status shm_join(const gpu_meet *m, uint64_t bytes, const char *name, void **out) {
    int fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0)
        return epo_fail(EPO_E_SYSTEM,
                        "rank %d: the group's shared memory is not there (%s): all ranks must run "
                        "on one machine and in one IPC namespace",
                        m->rank, strerror(errno));
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED)
        return epo_fail(EPO_E_SYSTEM, "rank %d: mmap: %s", m->rank, strerror(errno));
    *out = p;
    return EPO_OK;
}

/* What rank 0 tells the others, and each rank's success. */
typedef struct meet_card {
    char name[MEET_NAME];
    int ok;
} meet_card;

static epo_status meet_processes(const epo_backend_config *c, gpu_meet *m) {
    void *block = NULL;
    epo_status status = epo_meet(c, m->room_bytes, &m->meeting, &block);
    m->room = block;
    return status;
}

/* ---- processes of several machines ---- */

/* Which machine, and which node the tests play. */
typedef struct place_card {
    char boot[40];
    char ok;
} place_card;

static void place_fill(place_card *card) {
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    memset(card, 0, sizeof *card);
    card->ok = 1;
    if (f == NULL)
        return;
    if (fgets(card->boot, sizeof card->boot, f) == NULL)
        card->boot[0] = '\0';
    fclose(f);
}

/* Are the ranks on several machines?  Then *nodes is how many, and the same everywhere. */
static epo_status meet_places(const epo_backend_config *c, const gpu_meet *m, int *nodes) {
    const char *apart = getenv(EPO_ENV_NODES_APART);
    int node[MEET_RANKS], known = 0;
    place_card mine, *all = calloc((size_t)m->ranks, sizeof *all);
    *nodes = 1;
    if (all == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory to meet %d ranks", m->rank, m->ranks);
    place_fill(&mine);
    epo_status status =
        c->bootstrap->allgather(c->bootstrap->ctx, &mine, sizeof mine, all) == 0
            ? EPO_OK
            : epo_fail(EPO_E_PEER, "rank %d: the caller's bootstrap failed", m->rank);
    for (int r = 0; r < m->ranks && status == EPO_OK; r++) {
        node[r] = r;
        for (int q = 0; q < r && node[r] == r; q++)
            if (memcmp(all[q].boot, all[r].boot, sizeof mine.boot) == 0)
                node[r] = node[q];
        known += node[r] == r;
    }
    free(all);
    if (status == EPO_OK && known > 1) {
        *nodes = epo_nodes_count(node, NULL, m->ranks);
        if (*nodes == 0)
            status = epo_fail(EPO_E_UNSUPPORTED,
                              "the group's ranks are on %d machines, which must have the same "
                              "number of ranks, one machine behind the other",
                              known);
    } else if (status == EPO_OK && apart != NULL && strcmp(apart, "1") == 0) {
        status = epo_nodes_read(c, nodes);
    }
    return status;
}

static epo_status meet_far(const epo_backend_config *c, gpu_meet *m, int nodes) {
    void *room = NULL;
    epo_status status = epo_far_open(c->bootstrap, m->rank, m->ranks, m->timeout_s, &m->far);
    if (status != EPO_OK)
        return status;
    m->nodes = nodes;
    m->lead = epo_peers_of(EPO_SCOPE_NODE, m->rank, m->ranks, nodes).first;
    status = gpu_meet_shared(m, m->room_bytes, &room);
    m->room = room;
    return status;
}

/* With a bootstrap the ranks may be anywhere. */
static epo_status meet_anywhere(const epo_backend_config *c, gpu_meet *m) {
    int nodes = 1;
    epo_status status = c->bootstrap != NULL ? meet_places(c, m, &nodes) : EPO_OK;
    if (status != EPO_OK)
        return status;
    return nodes > 1 ? meet_far(c, m, nodes) : meet_processes(c, m);
}

epo_status gpu_meet_open(const epo_backend_config *c, gpu_meet **out) {
    gpu_meet *m = calloc(1, sizeof *m);
    if (m == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory to meet the ranks");
    m->ranks = c->members != NULL ? c->nmembers : c->ranks;
    m->rank = c->rank;
    for (int i = 0; c->members != NULL && i < c->nmembers; i++)
        if (c->members[i] == c->rank)
            m->rank = i;
    m->timeout_s = c->timeout_s;
    m->threads = c->threads != NULL;
    m->room_bytes = room_bytes(m->ranks);
    epo_status status = EPO_OK;
    if (m->ranks > MEET_RANKS)
        status = epo_fail(EPO_E_ARG, "ranks: found %d, allowed 1..%d", m->ranks, MEET_RANKS);
    else if (c->threads != NULL)
        status = meet_threads(c, m);
    else if (m->ranks > 1)
        status = meet_anywhere(c, m);
    else
        m->room = calloc(1, m->room_bytes);
    if (status == EPO_OK && m->room == NULL)
        status = epo_fail(EPO_E_NOMEM, "rank %d: no memory for a group", m->rank);
    if (status != EPO_OK) {
        epo_far_close(m->far);
        free(m);
        return status;
    }
    *out = m;
    return EPO_OK;
}

void gpu_meet_close(gpu_meet *m, bool broken) {
    (void)broken;
    if (m == NULL)
        return;
    if (m->meeting != NULL)
        epo_meeting_end(m->meeting);
    else if (m->far != NULL)
        munmap(m->room, m->room_bytes);
    else if (!m->threads || atomic_fetch_sub(&m->room->users, 1) == 1)
        free(m->room);
    epo_far_close(m->far);
    free(m);
}

int gpu_meet_nodes(const gpu_meet *m) { return m->nodes; }

int gpu_meet_rank(const gpu_meet *m) { return m->rank; }
int gpu_meet_ranks(const gpu_meet *m) { return m->ranks; }
bool gpu_meet_threads(const gpu_meet *m) { return m->threads; }

void gpu_meet_abort(gpu_meet *m, epo_status status, const char *text) {
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&m->room->failed, &none, 1))
        return;
    m->room->failed_status = (int)status;
    snprintf(m->room->failed_text, sizeof m->room->failed_text, "%s", text);
    atomic_store(&m->room->failed, 2);
    if (m->far != NULL) /* the other nodes' ranks, when they next meet this one */
        epo_far_fail(m->far, status, text);
}

epo_status gpu_meet_failed(gpu_meet *m, char *text, size_t size) {
    if (atomic_load(&m->room->failed) != 2)
        return EPO_OK;
    snprintf(text, size, "%s", m->room->failed_text);
    return (epo_status)m->room->failed_status;
}

/* Milliseconds above, the other rank's number plus one below. */
void gpu_meet_waits(gpu_meet *m, int rank) {
    const uint64_t now = (uint64_t)(gpu_now() * 1e3);
    atomic_store(&m->room->waits[m->rank], now << 16 | (uint64_t)(rank + 1));
}

int gpu_meet_waits_end(gpu_meet *m, int rank) {
    const uint64_t now = (uint64_t)(gpu_now() * 1e3);
    for (int hops = 0; hops < m->ranks; hops++) {
        const uint64_t said = atomic_load(&m->room->waits[rank]);
        if (now - (said >> 16) > MEET_SAID_MS || (said & 0xffff) == 0)
            break;
        rank = (int)(said & 0xffff) - 1;
    }
    return rank;
}

static epo_status meet_missing(gpu_meet *m, double age) {
    char who[256] = "";
    size_t used = 0;
    for (int r = 0; r < m->ranks; r++)
        if (atomic_load(&m->room->arrived[r]) < m->barriers && used + 16 < sizeof who)
            used += (size_t)snprintf(who + used, sizeof who - used, "%s%d", used ? ", " : "", r);
    return epo_fail(EPO_E_TIMEOUT, "rank %d: barrier: rank %s did not come within %.0f s", m->rank,
                    who, age);
}

epo_status gpu_meet_barrier(gpu_meet *m) {
    const double start = gpu_now();
    char text[MEET_TEXT];
    if (m->far != NULL) {
        epo_status failed = gpu_meet_failed(m, text, sizeof text);
        return failed != EPO_OK ? epo_fail(failed, "%s", text)
                                : epo_far_allgather(m->far, NULL, 0, NULL);
    }
    atomic_store(&m->room->arrived[m->rank], ++m->barriers);
    for (int r = 0, spins = 0; r < m->ranks; spins++) {
        if (atomic_load(&m->room->arrived[r]) >= m->barriers) {
            r++;
            continue;
        }
        epo_status status = gpu_meet_failed(m, text, sizeof text);
        if (status != EPO_OK)
            return epo_fail(status, "%s", text);
        if (gpu_now() - start > m->timeout_s)
            return meet_missing(m, m->timeout_s);
        if (spins > 1000) {
            const struct timespec nap = {0, 20000};
            nanosleep(&nap, NULL);
        }
    }
    return EPO_OK;
}

epo_status gpu_meet_allgather(gpu_meet *m, const void *mine, size_t bytes, void *all) {
    epo_status status = EPO_OK;
    if (m->far != NULL)
        return epo_far_allgather(m->far, mine, bytes, all);
    for (size_t done = 0; (done < bytes || bytes == 0) && status == EPO_OK;) {
        const size_t some = bytes - done < MEET_SCRATCH ? bytes - done : MEET_SCRATCH;
        char *half = m->room->scratch + (m->gathers++ % 2) * (size_t)m->ranks * MEET_SCRATCH;
        memcpy(half + (size_t)m->rank * MEET_SCRATCH, (const char *)mine + done, some);
        status = gpu_meet_barrier(m);
        for (int r = 0; r < m->ranks && status == EPO_OK; r++)
            memcpy((char *)all + (size_t)r * bytes + done, half + (size_t)r * MEET_SCRATCH, some);
        done += some;
        if (bytes == 0)
            break;
    }
    return status;
}

epo_status gpu_meet_shared(gpu_meet *m, uint64_t bytes, void **out) {
    struct {
        meet_card card;
        void *address;
    } mine = {{"", 1}, NULL}, all[MEET_RANKS];
    epo_status status = EPO_OK;
    void *p = NULL;
    if (m->rank == 0 && m->threads) {
        p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED)
            status = epo_fail(EPO_E_NOMEM, "rank 0: memory for flags: %s", strerror(errno));
    } else if (m->rank == m->lead) {
        status = shm_make(m, bytes, mine.card.name, &p);
    }
    mine.card.ok = status == EPO_OK;
    mine.address = p;
    epo_status met = gpu_meet_allgather(m, &mine, sizeof mine, all);
    for (int r = 0; r < m->ranks && met == EPO_OK; r++)
        if (!all[r].card.ok)
            met = m->rank == r ? status : epo_fail(EPO_E_PEER, "rank %d has no memory to share", r);
    if (met != EPO_OK)
        return met;
    if (m->threads)
        p = all[0].address;
    else if (m->rank != m->lead)
        status = shm_join(m, bytes, all[m->lead].card.name, &p);
    mine.card.ok = status == EPO_OK;
    met = gpu_meet_allgather(m, &mine, sizeof mine, all);
    if (m->rank == m->lead && mine.card.name[0] != '\0')
        shm_unlink(mine.card.name);
    for (int r = 0; r < m->ranks && met == EPO_OK && status == EPO_OK; r++)
        if (!all[r].card.ok)
            status = epo_fail(EPO_E_PEER, "rank %d could not map the window's flags", r);
    if (met != EPO_OK || status != EPO_OK) {
        if (p != NULL && !m->threads)
            munmap(p, bytes);
        return met != EPO_OK ? met : status;
    }
    *out = p;
    return EPO_OK;
}

/* After a barrier: threads share one mapping, which rank 0 returns. */
void gpu_meet_unshare(gpu_meet *m, void *ptr, uint64_t bytes) {
    if (ptr == NULL)
        return;
    if (!m->threads || m->rank == 0)
        munmap(ptr, bytes);
}
