/* SPDX-License-Identifier: Apache-2.0
 *
 * meet.c - meet.h over the host backend's rendezvous: the block is the scratch of
 * the memory that the ranks come to share.
 */
#include "backend/meet.h"
#include "backend/host/join.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

struct epo_meeting {
    host_place place;
    struct host_join *join;
    host_shared *shared;
    bool entered;
};

epo_status epo_meet(const epo_backend_config *config, uint64_t bytes, epo_meeting **out,
                    void **block) {
    host_place place;
    struct host_join *join = NULL;
    host_shared *shared = NULL;
    epo_status status = host_place_find(config, &place);
    if (status != EPO_OK)
        return status;
    const uint64_t have = host_shared_bytes(place.ranks) - sizeof(host_shared);
    if (bytes > have)
        return epo_fail(EPO_E_ARG, "a group's block: need %" PRIu64 " bytes, have %" PRIu64, bytes,
                        have);
    epo_meeting *m = calloc(1, sizeof *m);
    if (m == NULL && place.wrong == EPO_OK)
        host_place_refuse(&place,
                          epo_fail(EPO_E_NOMEM, "a group: need %zu bytes, have none", sizeof *m));
    status = host_join_ranks(&place, &join, &shared);
    if (status != EPO_OK || m == NULL) {
        free(m);
        return status;
    }
    m->place = place;
    m->join = join;
    m->shared = shared;
    *out = m;
    *block = m->shared->scratch;
    return EPO_OK;
}

int epo_meeting_rank(const epo_meeting *meeting) { return meeting->place.rank; }
int epo_meeting_ranks(const epo_meeting *meeting) { return meeting->place.ranks; }

void epo_meeting_end(epo_meeting *meeting) {
    if (meeting == NULL)
        return;
    munmap(meeting->shared, host_shared_bytes(meeting->place.ranks));
    host_join_destroy(meeting->join);
    free(meeting);
}

static epo_status memory_map(epo_status status, int fd, uint64_t bytes, void **out) {
    if (status == EPO_OK)
        status = host_memfile_map(fd, bytes, out);
    if (fd >= 0)
        close(fd);
    return status;
}

epo_status epo_meeting_give(const epo_meeting *m, uint64_t bytes, uint64_t number, void **out) {
    int fd = -1;
    epo_status status = host_memfile_give(m->join, bytes, number, &fd);
    return memory_map(status, fd, bytes, out);
}

epo_status epo_meeting_take(const epo_meeting *m, uint64_t bytes, uint64_t number, void **out) {
    int fd = -1;
    epo_status status = host_memfile_take(m->join, number, &fd);
    return memory_map(status, fd, bytes, out);
}

void epo_meeting_enter(epo_meeting *m) {
    host_peer *me = &m->shared->peer[m->place.rank];
    m->entered = pthread_mutex_lock(&me->alive) == 0;
    if (m->entered)
        atomic_store(&me->state, HOST_PEER_HERE);
}

void epo_meeting_leave(epo_meeting *m) {
    host_peer *me = &m->shared->peer[m->place.rank];
    if (!m->entered)
        return;
    atomic_store(&me->state, HOST_PEER_LEFT);
    pthread_mutex_unlock(&me->alive);
    m->entered = false;
}

bool epo_meeting_lost(const epo_meeting *m, int rank, char *text, size_t size) {
    char name[HOST_NODE_MAX + 48];
    const char *why = host_peer_why_lost(m->shared, m->join, rank);
    if (why != NULL)
        snprintf(text, size, "%s %s", host_peer_name(m->shared, rank, name, sizeof name), why);
    return why != NULL;
}
