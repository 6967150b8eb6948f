/* SPDX-License-Identifier: Apache-2.0
 *
 * world.c - ranks as threads of one process: where they meet to make a group.
 *
 * A meeting is one group in the making: threads that give the same member list
 * join the first meeting of that list that is not complete.  A rank waits in it
 * until all have come, so the ranks' n-th groups of a list meet one another.
 */
#include "config.h"

#include "backend/host/join.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef struct host_meeting {
    struct host_meeting *next;
    epo_world *world;
    int ranks, come, users; /* users: the world's list is one */
    epo_status failed;
    char text[HOST_TEXT_MAX];
    host_shared *shared;
    int members[HOST_RANKS_MAX];
    bool here[HOST_RANKS_MAX];
} host_meeting;

struct epo_world {
    epo_object object;
    int ranks;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    host_meeting *meetings; /* not complete, nor over: who has not come shall hear of a refusal */
    host_meeting *spare;    /* to refuse in, where there is no memory for another */
};

static void meeting_drop(host_meeting *m);

epo_status host_world_create(int ranks, epo_world **out) {
    if (ranks < 1 || ranks > HOST_RANKS_MAX)
        return epo_fail(EPO_E_ARG, "ranks of a world: found %d, allowed 1..%d", ranks,
                        HOST_RANKS_MAX);
    epo_world *w = calloc(1, sizeof *w);
    if (w == NULL)
        return epo_fail(EPO_E_NOMEM, "a world: need %zu bytes, have none", sizeof *w);
    w->spare = calloc(1, sizeof *w->spare);
    if (w->spare == NULL) {
        free(w);
        return epo_fail(EPO_E_NOMEM, "a world: need %zu bytes, have none", sizeof *w->spare);
    }
    w->ranks = ranks;
    pthread_mutex_init(&w->mutex, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&w->changed, &attr);
    pthread_condattr_destroy(&attr);
    *out = w;
    return EPO_OK;
}

void host_world_destroy(epo_world *world) {
    if (world == NULL)
        return;
    while (world->meetings != NULL) { /* refused, and not all have come */
        host_meeting *m = world->meetings;
        world->meetings = m->next;
        meeting_drop(m);
    }
    free(world->spare);
    pthread_cond_destroy(&world->changed);
    pthread_mutex_destroy(&world->mutex);
    free(world);
}

static int place_member(const host_place *place, int i) {
    return place->members != NULL ? place->members[i] : i;
}

static void meeting_drop(host_meeting *m) {
    if (--m->users > 0)
        return;
    if (m->shared != NULL)
        munmap(m->shared, host_shared_bytes(m->ranks));
    free(m);
}

/* By one of its users. */
static void meeting_unlist(host_meeting *meeting) {
    for (host_meeting **p = &meeting->world->meetings; *p != NULL; p = &(*p)->next) {
        if (*p == meeting) {
            *p = meeting->next;
            meeting->users--;
            return;
        }
    }
}

/* For all who are in it, and for those who will come. */
static void meeting_refuse(host_meeting *m, int rank, epo_status status, const char *why) {
    if (m->failed != EPO_OK)
        return;
    m->failed = status;
    snprintf(m->text, sizeof m->text, "rank %d made no group: %.*s", rank, HOST_TEXT_MAX - 40, why);
    pthread_cond_broadcast(&m->world->changed);
}

static host_meeting *meeting_find(epo_world *world, const host_place *place) {
    for (host_meeting *m = world->meetings; m != NULL; m = m->next) {
        bool same = m->ranks == place->ranks && !(m->failed != EPO_OK && m->here[place->rank]);
        for (int i = 0; same && i < m->ranks; i++)
            same = m->members[i] == place_member(place, i);
        if (same)
            return m;
    }
    return NULL;
}

/* Without memory it is one in which all are refused; false: not even that. */
static bool meeting_create(epo_world *world, const host_place *place, host_meeting **out) {
    host_meeting *m = calloc(1, sizeof *m);
    void *shared = NULL;
    epo_status status =
        m == NULL
            ? epo_fail(EPO_E_NOMEM, "a group of threads: need %zu bytes, have none", sizeof *m)
            : host_map_private(host_shared_bytes(place->ranks), "a group of threads", &shared);
    if (m == NULL) {
        m = world->spare;
        world->spare = NULL;
    }
    if (m == NULL)
        return false;
    m->world = world;
    m->ranks = place->ranks;
    m->users = 1;
    m->shared = shared;
    for (int i = 0; i < m->ranks; i++)
        m->members[i] = place_member(place, i);
    if (status == EPO_OK)
        host_shared_init(m->shared, m->ranks, true);
    else
        meeting_refuse(m, place->rank, status, epo_fail_text());
    host_meeting **last = &world->meetings; /* who comes joins the first that lacks him */
    while (*last != NULL)
        last = &(*last)->next;
    *last = m;
    *out = m;
    return true;
}

/* Ends it for all who are in it; they read the text. */
static void meeting_fail(host_meeting *m, double waited) {
    size_t used = 0;
    char missing[200] = "";
    for (int i = 0; i < m->ranks && used + 8 < sizeof missing; i++) {
        if (!m->here[i]) {
            int n =
                snprintf(missing + used, sizeof missing - used, "%s%d", used > 0 ? ", " : "", i);
            used += n > 0 ? (size_t)n : 0;
        }
    }
    snprintf(m->text, sizeof m->text, "waited %.1f s for rank %s of %d (threads) to make the group",
             waited, missing, m->ranks);
    m->failed = EPO_E_TIMEOUT;
    meeting_unlist(m);
    pthread_cond_broadcast(&m->world->changed);
}

static void meeting_wait(host_meeting *m, int64_t limit_ns) {
    int64_t from = host_now_ns(), until = from + limit_ns;
    struct timespec t = {until / 1000000000, until % 1000000000};
    while (m->come < m->ranks && m->failed == EPO_OK) {
        int rc = pthread_cond_timedwait(&m->world->changed, &m->world->mutex, &t);
        if (rc == ETIMEDOUT && m->come < m->ranks && m->failed == EPO_OK)
            meeting_fail(m, (double)(host_now_ns() - from) * 1e-9);
    }
}

epo_status host_world_join(epo_world *world, const host_place *place, host_meeting **meeting,
                           host_shared **shared) {
    if (place->world_rank < 0 || place->world_ranks != world->ranks)
        return epo_fail(EPO_E_ARG, "rank %d of %d in a world of %d threads", place->world_rank,
                        place->world_ranks, world->ranks);
    epo_status status = EPO_OK;
    pthread_mutex_lock(&world->mutex);
    host_meeting *m = meeting_find(world, place);
    if (m == NULL)
        status = meeting_create(world, place, &m) ? EPO_OK : EPO_E_NOMEM;
    else if (m->here[place->rank])
        status =
            epo_fail(EPO_E_PEER, "rank %d was given by two threads of this world", place->rank);
    if (status == EPO_OK) {
        m->here[place->rank] = true;
        m->users++;
        if (place->wrong != EPO_OK)
            meeting_refuse(m, place->rank, place->wrong, place->why);
        if (++m->come == m->ranks) {
            meeting_unlist(m);
            pthread_cond_broadcast(&world->changed);
        }
        meeting_wait(m, host_join_limit_ns(place));
        if (m->failed == EPO_E_TIMEOUT) {
            status = epo_fail(EPO_E_TIMEOUT, "rank %d: %s", place->rank, m->text);
            meeting_drop(m);
        } else if (m->failed != EPO_OK) {
            status = epo_fail(m->failed, "%s", m->text);
            meeting_drop(m);
        } else {
            *meeting = m;
            *shared = m->shared;
        }
    }
    pthread_mutex_unlock(&world->mutex);
    return status;
}

void host_world_leave(host_meeting *meeting) {
    epo_world *world = meeting->world;
    pthread_mutex_lock(&world->mutex);
    meeting_drop(meeting);
    pthread_mutex_unlock(&world->mutex);
}
