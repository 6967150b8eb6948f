/* SPDX-License-Identifier: Apache-2.0
 *
 * meet.c - meet.h over the host backend's rendezvous: the block is the scratch of
 * the memory that the ranks come to share.
 */
#include "backend/meet.h"
#include "backend/host/join.h"

#include <inttypes.h>
#include <stdlib.h>
#include <sys/mman.h>

struct epo_meeting {
    host_place place;
    struct host_join *join;
    host_shared *shared;
};

epo_status epo_meet(const epo_backend_config *config, uint64_t bytes, epo_meeting **out,
                    void **block) {
    epo_meeting *m = calloc(1, sizeof *m);
    if (m == NULL)
        return epo_fail(EPO_E_NOMEM, "a group: need %zu bytes, have none", sizeof *m);
    epo_status status = host_place_find(config, &m->place);
    if (status == EPO_OK) {
        uint64_t have = host_shared_bytes(m->place.ranks) - sizeof(host_shared);
        if (bytes > have)
            status = epo_fail(EPO_E_ARG, "a group's block: need %" PRIu64 " bytes, have %" PRIu64,
                              bytes, have);
    }
    if (status == EPO_OK)
        status = host_join_ranks(&m->place, &m->join, &m->shared);
    if (status != EPO_OK) {
        free(m);
        return status;
    }
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
