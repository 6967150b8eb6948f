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
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MEET_RANKS 256
#define MEET_SCRATCH 4096 /* per rank and half */
#define MEET_TEXT 512
#define MEET_NAME 48
#define MEET_SAID_MS 200 /* older than that, a rank may not have gone on */
#define MEET_SILENT_S 1.0

typedef struct meet_room {
    int ranks;
    _Atomic int users;       /* threads: the last one frees it */
    _Atomic uint32_t failed; /* 0 none, 1 being written, 2 written */
    int failed_status;
    char failed_text[MEET_TEXT];
    _Atomic uint64_t arrived[MEET_RANKS];
    _Atomic uint64_t waits[MEET_RANKS]; /* whom each waits for, see gpu_meet_waits */
    epo_turns turns[MEET_RANKS];
    char scratch[]; /* [2][ranks][MEET_SCRATCH] */
} meet_room;

/* A room that threads look for: same members, not yet full. */
typedef struct world_room {
    struct world_room *next;
    meet_room *room;
    int ranks, joined;
    int members[MEET_RANKS];
    bool here[MEET_RANKS];
} world_room;

struct epo_world {
    epo_object object;
    int ranks;
    pthread_mutex_t lock;
    world_room *rooms; /* being filled */
    world_room *spare; /* to refuse in, where there is no memory for another */
};

/* How a rank fares in a step that all take. */
typedef struct verdict {
    int32_t status;
    char text[252];
} verdict;

/* The others want to know whose failure it is. */
static void meet_named(int rank, const char *text, char *out, size_t size) {
    if (strncmp(text, "rank ", 5) == 0) /* it says so */
        snprintf(out, size, "%s", text);
    else
        snprintf(out, size, "rank %d: %s", rank, text);
}

/* The first error among verdicts so many bytes apart. */
static epo_status verdict_find(int ranks, const verdict *first, size_t apart) {
    char text[EPO_ERROR_MAX], why[sizeof first->text];
    for (int r = 0; r < ranks; r++) {
        const verdict *v = (const void *)((const char *)first + (size_t)r * apart);
        if (v->status == EPO_OK)
            continue;
        /* it may come from another machine */
        snprintf(why, sizeof why, "%.*s", (int)sizeof v->text - 1, v->text);
        meet_named(r, why, text, sizeof text);
        return epo_fail(EPO_E_PEER, "%s", text);
    }
    return EPO_OK;
}

struct gpu_meet {
    int rank, ranks;
    double timeout_s;
    epo_world *world; /* threads */
    meet_room *room;
    epo_meeting *meeting; /* processes */
    epo_far *far;         /* processes of several machines; the room is this node's then */
    int nodes, lead;      /* 0: not known; who makes what a node shares */
    uint64_t room_bytes;
    uint64_t barriers, gathers;
    struct { /* of each rank's life, in the barrier under way */
        uint64_t sign;
        double heard;
    } life[MEET_RANKS];
    _Atomic uint64_t turns; /* collective calls so far */
    _Atomic bool apart;     /* calls are not compared */
    verdict *verdicts;      /* [ranks], of gpu_meet_agree */
};

static uint64_t room_bytes(int ranks) {
    return sizeof(meet_room) + UINT64_C(2) * (uint64_t)ranks * MEET_SCRATCH;
}

/* ---- threads ---- */

static world_room *room_new(int ranks) {
    world_room *r = calloc(1, sizeof *r);
    if (r == NULL || (r->room = calloc(1, room_bytes(ranks))) == NULL) {
        free(r);
        return NULL;
    }
    return r;
}

epo_status gpu_world_create(int ranks, epo_world **out) {
    if (ranks < 1 || ranks > MEET_RANKS)
        return epo_fail(EPO_E_ARG, "epo_world_create: ranks: found %d, allowed 1..%d", ranks,
                        MEET_RANKS);
    epo_world *w = calloc(1, sizeof *w);
    if (w == NULL)
        return epo_fail(EPO_E_NOMEM, "epo_world_create: no memory");
    w->spare = room_new(ranks);
    if (w->spare == NULL) {
        free(w);
        return epo_fail(EPO_E_NOMEM, "epo_world_create: no memory");
    }
    w->ranks = ranks;
    pthread_mutex_init(&w->lock, NULL);
    *out = w;
    return EPO_OK;
}

static void room_leave(meet_room *room, int users) {
    if (atomic_fetch_sub(&room->users, users) == users)
        free(room);
}

/* Who did not come in time is expected no more: when he comes, it is for the next group, as the
 * others do.  This rank is in the room still. */
static void room_forget(epo_world *w, const meet_room *room) {
    pthread_mutex_lock(&w->lock);
    for (world_room **at = &w->rooms; *at != NULL; at = &(*at)->next) {
        world_room *r = *at;
        if (r->room != room)
            continue;
        *at = r->next;
        room_leave(r->room, r->ranks - r->joined);
        free(r);
        break;
    }
    pthread_mutex_unlock(&w->lock);
}

void gpu_world_destroy(epo_world *w) {
    if (w == NULL)
        return;
    while (w->rooms != NULL) {
        world_room *r = w->rooms;
        w->rooms = r->next;
        room_leave(r->room, r->ranks - r->joined); /* who never came */
        free(r);
    }
    if (w->spare != NULL)
        free(w->spare->room);
    free(w->spare);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

static int config_member(const epo_backend_config *c, int i) {
    return c->members != NULL ? c->members[i] : i;
}

static bool room_fits(const world_room *r, const epo_backend_config *c, int rank, int ranks) {
    if (r->ranks != ranks || r->here[rank])
        return false;
    for (int i = 0; i < ranks; i++)
        if (r->members[i] != config_member(c, i))
            return false;
    return true;
}

/* Without memory it is one in which all are refused. */
static world_room *room_add(epo_world *w, const epo_backend_config *c, int ranks, bool *refused) {
    world_room *r = room_new(ranks);
    if (r == NULL) {
        *refused = true;
        r = w->spare;
        w->spare = NULL;
    }
    if (r == NULL)
        return NULL;
    r->room->ranks = ranks;
    r->ranks = ranks;
    for (int i = 0; i < ranks; i++)
        r->members[i] = config_member(c, i);
    atomic_store(&r->room->users, ranks);
    world_room **last = &w->rooms; /* who comes joins the first that lacks him */
    while (*last != NULL)
        last = &(*last)->next;
    *last = r;
    return r;
}

static epo_status meet_threads(const epo_backend_config *c, gpu_meet *m, epo_status wrong) {
    epo_world *w = c->threads;
    bool refused = false;
    pthread_mutex_lock(&w->lock);
    world_room **at = &w->rooms;
    while (*at != NULL && !room_fits(*at, c, m->rank, m->ranks))
        at = &(*at)->next;
    world_room *r = *at;
    if (r == NULL)
        r = room_add(w, c, m->ranks, &refused); /* at *at: the end */
    if (r != NULL) {
        m->room = r->room;
        r->here[m->rank] = true;
        if (++r->joined == r->ranks) { /* full: the next group gets a new room */
            *at = r->next;
            free(r);
        }
    }
    pthread_mutex_unlock(&w->lock);
    if (wrong == EPO_OK && (refused || m->room == NULL))
        wrong = epo_fail(EPO_E_NOMEM, "rank %d: no memory to meet %d ranks", m->rank, m->ranks);
    if (wrong != EPO_OK && m->room != NULL) {
        gpu_meet_abort(m, wrong, epo_fail_text());
        room_leave(m->room, 1);
    }
    return wrong;
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
    struct stat st;
    if (fstat(fd, &st) != 0 || (uint64_t)st.st_size != bytes) {
        close(fd);
        return epo_fail(EPO_E_SYSTEM, "rank %d: the group's shared memory is not %" PRIu64 " bytes",
                        m->rank, bytes);
    }
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED)
        return epo_fail(EPO_E_SYSTEM, "rank %d: mmap: %s", m->rank, strerror(errno));
    *out = p;
    return EPO_OK;
}

/* Of who makes what a node shares, where it is. */
typedef struct meet_card {
    char name[MEET_NAME];
    void *address;
} meet_card;

static epo_status meet_processes(const epo_backend_config *c, gpu_meet *m, epo_status wrong) {
    epo_backend_config config = *c;
    void *block = NULL;
    config.wrong = wrong;
    epo_status status = epo_meet(&config, m->room_bytes, &m->meeting, &block);
    m->room = block;
    return status;
}

/* ---- processes of several machines ---- */

/* Which machine, and whether this rank makes a group. */
typedef struct place_card {
    char boot[40];
    verdict verdict;
} place_card;

static void place_fill(place_card *card, epo_status wrong) {
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    memset(card, 0, sizeof *card);
    card->verdict.status = (int32_t)wrong;
    if (wrong != EPO_OK)
        snprintf(card->verdict.text, sizeof card->verdict.text, "%.*s",
                 (int)sizeof card->verdict.text - 1, epo_fail_text());
    if (f == NULL)
        return;
    if (fgets(card->boot, sizeof card->boot, f) == NULL)
        card->boot[0] = '\0';
    fclose(f);
}

/* Are the ranks on several machines?  Then *nodes is how many, and the same everywhere. */
static epo_status meet_places(const epo_backend_config *c, const gpu_meet *m, epo_status wrong,
                              int *nodes) {
    const char *apart = getenv(EPO_ENV_NODES_APART);
    int node[MEET_RANKS], known = 0;
    place_card mine, all[MEET_RANKS]; /* no memory that could be lacking: the others wait */
    *nodes = 1;
    place_fill(&mine, wrong);
    epo_status status =
        c->bootstrap->allgather(c->bootstrap->ctx, &mine, sizeof mine, all) == 0
            ? EPO_OK
            : epo_fail(EPO_E_PEER, "rank %d: the caller's bootstrap failed", m->rank);
    if (wrong != EPO_OK)
        return epo_fail(wrong, "%.*s", (int)sizeof mine.verdict.text - 1, mine.verdict.text);
    if (status == EPO_OK)
        status = verdict_find(m->ranks, &all[0].verdict, sizeof all[0]);
    for (int r = 0; r < m->ranks && status == EPO_OK; r++) {
        node[r] = r;
        for (int q = 0; q < r && node[r] == r; q++)
            if (memcmp(all[q].boot, all[r].boot, sizeof mine.boot) == 0)
                node[r] = node[q];
        known += node[r] == r;
    }
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
static epo_status meet_anywhere(const epo_backend_config *c, gpu_meet *m, epo_status wrong) {
    int nodes = 1;
    epo_status status = c->bootstrap != NULL ? meet_places(c, m, wrong, &nodes) : EPO_OK;
    if (status != EPO_OK)
        return status;
    return nodes > 1 ? meet_far(c, m, nodes) : meet_processes(c, m, wrong);
}

static void meet_place(const epo_backend_config *c, gpu_meet *m) {
    memset(m, 0, sizeof *m);
    m->ranks = c->members != NULL ? c->nmembers : c->ranks;
    m->rank = c->rank;
    for (int i = 0; c->members != NULL && i < c->nmembers; i++)
        if (c->members[i] == c->rank)
            m->rank = i;
    m->timeout_s = c->timeout_s;
    m->world = c->threads;
    m->room_bytes = room_bytes(m->ranks);
}

static epo_status meet_ranks(const epo_backend_config *c, gpu_meet *m, epo_status wrong) {
    if (m->ranks > MEET_RANKS)
        return epo_fail(EPO_E_ARG, "ranks: found %d, allowed 1..%d", m->ranks, MEET_RANKS);
    if (m->rank < 0 || m->rank >= m->ranks)
        return epo_fail(EPO_E_ARG, "rank %d is not in the group of %d ranks", c->rank, m->ranks);
    if (c->threads != NULL)
        return meet_threads(c, m, wrong);
    if (m->ranks > 1)
        return meet_anywhere(c, m, wrong);
    if (wrong == EPO_OK && (m->room = calloc(1, m->room_bytes)) == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for a group", m->rank);
    return wrong;
}

epo_status gpu_meet_open(const epo_backend_config *c, gpu_meet **out) {
    gpu_meet here; /* who has no memory for more tells the others all the same */
    gpu_meet *made = calloc(1, sizeof *made), *m = made != NULL ? made : &here;
    epo_status wrong = c->wrong;
    meet_place(c, m);
    if (made != NULL && m->ranks > 0)
        m->verdicts = calloc((size_t)m->ranks, sizeof *m->verdicts);
    if (m->verdicts == NULL && wrong == EPO_OK)
        wrong = epo_fail(EPO_E_NOMEM, "rank %d: no memory to meet the ranks", c->rank);
    epo_status status = meet_ranks(c, m, wrong);
    if (status != EPO_OK || made == NULL) {
        epo_far_close(m->far);
        free(m->verdicts);
        free(made);
        return status;
    }
    *out = made;
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
    else if (m->world != NULL)
        room_leave(m->room, 1);
    else
        free(m->room);
    epo_far_close(m->far);
    free(m->verdicts);
    free(m);
}

int gpu_meet_nodes(const gpu_meet *m) { return m->nodes; }
int gpu_meet_rank(const gpu_meet *m) { return m->rank; }
int gpu_meet_ranks(const gpu_meet *m) { return m->ranks; }
bool gpu_meet_threads(const gpu_meet *m) { return m->world != NULL; }

void gpu_meet_abort(gpu_meet *m, epo_status status, const char *text) {
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&m->room->failed, &none, 1))
        return;
    m->room->failed_status = (int)status;
    meet_named(m->rank, text, m->room->failed_text, sizeof m->room->failed_text);
    atomic_store(&m->room->failed, 2);
    if (m->far != NULL) /* the other nodes' ranks, when they next meet this one */
        epo_far_fail(m->far, status, m->room->failed_text);
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

uint64_t gpu_meet_sign(const gpu_meet *m, int rank) { return atomic_load(&m->room->waits[rank]); }

void gpu_meet_watch(gpu_meet *m, bool begin) {
    if (m->meeting != NULL && begin)
        epo_meeting_enter(m->meeting);
    else if (m->meeting != NULL)
        epo_meeting_leave(m->meeting);
}

bool gpu_meet_lost(const gpu_meet *m, int rank, char *text, size_t size) {
    return m->meeting != NULL && rank != m->rank && epo_meeting_lost(m->meeting, rank, text, size);
}

bool gpu_meet_turn(gpu_meet *m, const epo_turn *turn, bool refused, char *text, size_t size) {
    epo_turns *all = m->room->turns;
    const uint64_t count = atomic_load(&m->turns) + 1;
    if (turn == NULL)
        atomic_store(&m->apart, true);
    else
        epo_turns_note(&all[m->rank], count, turn, refused);
    atomic_store(&m->turns, count);
    for (int r = 0; turn != NULL && !refused && r < m->ranks; r++)
        if (r != m->rank && epo_turn_differs(&all[m->rank], &all[r], m->rank, r, count, text, size))
            return false;
    return true;
}

bool gpu_meet_differs(const gpu_meet *m, char *text, size_t size) {
    const uint64_t last = atomic_load(&m->turns);
    for (int r = 0; !atomic_load(&m->apart) && r < m->ranks; r++)
        if (r != m->rank && epo_turns_differ(&m->room->turns[m->rank], &m->room->turns[r], m->rank,
                                             r, last, text, size))
            return true;
    return false;
}

static bool has_come(const gpu_meet *m, int rank) {
    return atomic_load(&m->room->arrived[rank]) >= m->barriers;
}

static void barrier_listen(gpu_meet *m, double now, bool begin) {
    for (int r = 0; r < m->ranks; r++) {
        const uint64_t sign = gpu_meet_sign(m, r);
        if (!begin && sign == m->life[r].sign)
            continue;
        m->life[r].sign = sign;
        m->life[r].heard = now;
    }
}

static epo_status meet_missing(gpu_meet *m, double age, double now) {
    char who[256] = "", still[64] = "";
    size_t used = 0;
    for (int r = 0; r < m->ranks; r++) {
        if (has_come(m, r) || used + 16 >= sizeof who)
            continue;
        used += (size_t)snprintf(who + used, sizeof who - used, "%s%d", used ? ", " : "", r);
        if (still[0] == '\0' && m->life[r].sign != 0 && now - m->life[r].heard > MEET_SILENT_S)
            snprintf(still, sizeof still, "; no sign of life from rank %d for %.0f s", r,
                     now - m->life[r].heard);
    }
    return epo_fail(EPO_E_TIMEOUT, "rank %d: barrier: rank %s did not come within %.0f s%s",
                    m->rank, who, age, still);
}

/* A failure that a peer announced, a peer that is gone, the limit. */
static epo_status barrier_look(gpu_meet *m, double age) {
    char text[MEET_TEXT];
    epo_status status = gpu_meet_failed(m, text, sizeof text);
    for (int r = 0; r < m->ranks && status == EPO_OK; r++) {
        char who[200];
        if (has_come(m, r) || !gpu_meet_lost(m, r, who, sizeof who) || has_come(m, r))
            continue;
        snprintf(text, sizeof text, "%s; rank %d waited for it in a barrier", who, m->rank);
        gpu_meet_abort(m, EPO_E_PEER, text);
        status = gpu_meet_failed(m, text, sizeof text); /* what it said before it went */
    }
    if (status == EPO_OK && gpu_meet_differs(m, text, sizeof text)) {
        gpu_meet_abort(m, EPO_E_PEER, text);
        status = EPO_E_PEER;
    }
    if (status != EPO_OK)
        return epo_fail(status, "%s", text);
    if (age <= m->timeout_s)
        return EPO_OK;
    int missing = 0;
    for (int r = 0; r < m->ranks; r++)
        missing += !has_come(m, r);
    if (missing == 0) /* just now */
        return EPO_OK;
    status = meet_missing(m, m->timeout_s, gpu_now());
    gpu_meet_abort(m, status, epo_fail_text());
    if (m->world != NULL)
        room_forget(m->world, m->room);
    return status;
}

epo_status gpu_meet_barrier(gpu_meet *m) {
    const double start = gpu_now();
    double looked = start;
    if (m->far != NULL) {
        char text[MEET_TEXT];
        epo_status failed = gpu_meet_failed(m, text, sizeof text);
        return failed != EPO_OK ? epo_fail(failed, "%s", text)
                                : epo_far_allgather(m->far, NULL, 0, NULL);
    }
    atomic_store(&m->room->arrived[m->rank], ++m->barriers);
    for (int r = 0, spins = 0; r < m->ranks; spins++) {
        if (has_come(m, r)) {
            r++;
            continue;
        }
        if (spins <= 1000)
            continue;
        const struct timespec nap = {0, 20000};
        nanosleep(&nap, NULL);
        if (gpu_now() - looked < GPU_LOOK_S)
            continue;
        looked = gpu_now();
        barrier_listen(m, looked, looked - start < 2 * GPU_LOOK_S);
        epo_status status = barrier_look(m, looked - start);
        if (status != EPO_OK)
            return status;
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

/* Of a meeting it has no name; of several machines it has one while they take it. */
static epo_status shared_make(gpu_meet *m, uint64_t bytes, uint64_t number, char *name,
                              void **out) {
    if (m->meeting != NULL)
        return epo_meeting_give(m->meeting, bytes, number, out);
    if (m->far != NULL)
        return shm_make(m, bytes, name, out);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return epo_fail(EPO_E_NOMEM, "rank 0: memory for flags: need %" PRIu64 " bytes: %s", bytes,
                        strerror(errno));
    *out = p;
    return EPO_OK;
}

epo_status gpu_meet_agree(gpu_meet *m, epo_status mine) {
    verdict own = {.status = (int32_t)mine};
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    if (mine != EPO_OK)
        snprintf(own.text, sizeof own.text, "%.*s", (int)sizeof own.text - 1, text);
    const epo_status met = gpu_meet_allgather(m, &own, sizeof own, m->verdicts);
    if (mine != EPO_OK)
        return epo_fail(mine, "%s", text);
    if (met != EPO_OK)
        return met;
    return verdict_find(m->ranks, m->verdicts, sizeof *m->verdicts);
}

epo_status gpu_meet_shared(gpu_meet *m, uint64_t bytes, void **out) {
    const uint64_t number = m->gathers; /* the same on all ranks */
    const bool makes = m->rank == m->lead;
    meet_card card = {"", NULL}, all[MEET_RANKS];
    epo_status status = EPO_OK;
    if (makes)
        status = shared_make(m, bytes, number, card.name, &card.address);
    void *p = card.address;
    status = gpu_meet_agree(m, status);
    if (status == EPO_OK)
        status = gpu_meet_allgather(m, &card, sizeof card, all);
    if (status == EPO_OK) {
        all[m->lead].name[MEET_NAME - 1] = '\0'; /* it may come from another machine */
        if (m->world != NULL)
            p = all[0].address;
        else if (!makes && m->meeting != NULL)
            status = epo_meeting_take(m->meeting, bytes, number, &p);
        else if (!makes)
            status = shm_join(m, bytes, all[m->lead].name, &p);
        status = gpu_meet_agree(m, status);
    }
    if (card.name[0] != '\0')
        shm_unlink(card.name);
    if (status != EPO_OK) {
        if (p != NULL && (m->world == NULL || makes))
            munmap(p, bytes);
        return status;
    }
    *out = p;
    return EPO_OK;
}

/* After a barrier: threads share one mapping, which rank 0 returns. */
void gpu_meet_unshare(gpu_meet *m, void *ptr, uint64_t bytes) {
    if (ptr == NULL)
        return;
    if (m->world == NULL || m->rank == 0)
        munmap(ptr, bytes);
}
