/* SPDX-License-Identifier: Apache-2.0
 *
 * meet.h - processes of one machine come to share a block of memory, by the
 * caller's bootstrap or by what the launcher's environment tells.  For backends
 * whose ranks are processes; the host backend's own way of meeting.
 */
#ifndef EPO_BACKEND_MEET_H
#define EPO_BACKEND_MEET_H

#include <stdatomic.h>

#include "backend/backend.h"

/* How many nodes the ranks of a group are on, as EP_OVERLAP_NODES tells (the node of each
 * rank, for tests with several nodes in one machine); 1 without.  Refuses nodes that do not
 * have the same number of ranks, one behind the other. */
epo_status epo_nodes_read(const epo_backend_config *config, int *nodes);

/* Nodes of the ranks (of `members`, or all), by the node's number of each rank of the job,
 * below 1024: one behind the other, each with the same number of ranks; 0: they are not. */
int epo_nodes_count(const int *node, const int *members, int ranks);

typedef struct epo_meeting epo_meeting;

/* [collective]  The block is zeroed and holds `bytes` at least; every rank's error
 * names who is missing or disagrees. */
epo_status epo_meet(const epo_backend_config *config, uint64_t bytes, epo_meeting **out,
                    void **block);
/* This rank's place in the group. */
int epo_meeting_rank(const epo_meeting *meeting);
int epo_meeting_ranks(const epo_meeting *meeting);
void epo_meeting_end(epo_meeting *meeting); /* NULL is accepted */

/* More memory for all: rank 0 makes it (zeroed, without a name, so that nothing is left
 * however a process ends) and hands it out, the others take it after a collective call
 * behind that.  `number` tells one such memory from another.  munmap() returns it. */
epo_status epo_meeting_give(const epo_meeting *meeting, uint64_t bytes, uint64_t number,
                            void **out);
epo_status epo_meeting_take(const epo_meeting *meeting, uint64_t bytes, uint64_t number,
                            void **out);

/* A thread that lives as long as the group enters it, and leaves before it ends: so the
 * others see how this process ends, even by SIGKILL. */
void epo_meeting_enter(epo_meeting *meeting);
void epo_meeting_leave(epo_meeting *meeting);
/* "rank 1 (pid 71 on n2) ended without closing the group", in `text`: a rank that will do
 * no more of what it has not done yet.  False: it may. */
bool epo_meeting_lost(const epo_meeting *meeting, int rank, char *text, size_t size);

/* A rank's last collective calls, where the others of its machine read them. */
#define EPO_TURNS 16
typedef struct epo_turns {
    _Atomic uint64_t call[EPO_TURNS], with[EPO_TURNS];
} epo_turns;
/* Its call number `count`, from 1. */
void epo_turns_note(epo_turns *mine, uint64_t count, const epo_turn *turn, bool refused);
/* Both have made call `count`: did one not fit the other?  What, in `text`.  And of the last
 * calls up to `last`. */
bool epo_turn_differs(const epo_turns *mine, const epo_turns *other, int rank, int peer,
                      uint64_t count, char *text, size_t size);
bool epo_turns_differ(const epo_turns *mine, const epo_turns *other, int rank, int peer,
                      uint64_t last, char *text, size_t size);

#endif
