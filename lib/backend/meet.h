/* SPDX-License-Identifier: Apache-2.0
 *
 * meet.h - processes of one machine come to share a block of memory, by the
 * caller's bootstrap or by what the launcher's environment tells.  For backends
 * whose ranks are processes; the host backend's own way of meeting.
 */
#ifndef EPO_BACKEND_MEET_H
#define EPO_BACKEND_MEET_H

#include "backend/backend.h"

/* How many nodes the ranks of a group are on, as EP_OVERLAP_NODES tells (the node of each
 * rank, for tests with several nodes in one machine); 1 without.  Refuses nodes that do not
 * have the same number of ranks, one behind the other. */
epo_status epo_nodes_read(const epo_backend_config *config, int *nodes);

typedef struct epo_meeting epo_meeting;

/* [collective]  The block is zeroed and holds `bytes` at least; every rank's error
 * names who is missing or disagrees. */
epo_status epo_meet(const epo_backend_config *config, uint64_t bytes, epo_meeting **out,
                    void **block);
/* This rank's place in the group. */
int epo_meeting_rank(const epo_meeting *meeting);
int epo_meeting_ranks(const epo_meeting *meeting);
void epo_meeting_end(epo_meeting *meeting); /* NULL is accepted */

#endif
