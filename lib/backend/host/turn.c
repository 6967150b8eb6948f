/* SPDX-License-Identifier: Apache-2.0
 *
 * turn.c - which collective call each rank is in, so that calls that do not belong
 * together are told instead of waited out, or taken for each other.
 */
#include "config.h"

#include "backend/host/host.h"

#include <stdio.h>

#define TURNS 4 /* kept of each rank; one that refuses may run ahead of the others */

static const char *const names[] = {
    [EPO_TURN_BUFFER] = "buffer_create", [EPO_TURN_BUFFER_END] = "buffer_destroy",
    [EPO_TURN_PLAN] = "plan_create",     [EPO_TURN_DISPATCH] = "dispatch",
    [EPO_TURN_COMBINE] = "combine",      [EPO_TURN_FORWARD] = "forward",
    [EPO_TURN_BACKWARD] = "backward",    [EPO_TURN_ALLREDUCE] = "allreduce",
    [EPO_TURN_BARRIER] = "barrier"};

/* One word, so that it is read whole: kind, plan, count of the call. */
static uint64_t turn_pack(const epo_turn *turn, uint64_t count) {
    return (uint64_t)turn->kind << 56 | (turn->plan & 0xffffff) << 32 | (count & 0xffffffff);
}

static const char *turn_name(uint64_t word, char *text, size_t size) {
    size_t kind = word >> 56;
    const char *name = kind < sizeof names / sizeof *names ? names[kind] : "?";
    unsigned plan = (unsigned)(word >> 32) & 0xffffff;
    if (plan > 0)
        snprintf(text, size, "%s of plan %u", name, plan);
    else
        snprintf(text, size, "%s", name);
    return text;
}

void host_turn_take(epo_backend *be, const epo_turn *turn, bool refused) {
    uint64_t count = atomic_load(&be->turns) + 1;
    if (host_forked(be))
        return;
    host_peer *me = &be->shared->peer[be->rank];
    atomic_store(&me->turn[count % TURNS], turn_pack(turn, count));
    if (refused)
        atomic_store(&me->refused, count);
    atomic_store(&be->turns, count);
}

bool host_turn_differs(epo_backend *be, int rank) {
    uint64_t at = atomic_load(&be->turns) % TURNS;
    uint64_t mine = atomic_load(&be->shared->peer[be->rank].turn[at]);
    uint64_t other = atomic_load(&be->shared->peer[rank].turn[at]);
    char a[48], b[48];
    if (other == mine || (uint32_t)other != (uint32_t)mine)
        return false;
    host_break(be, EPO_E_PEER,
               "the ranks disagree: rank %d is in %s, rank %d in %s; all ranks make the same calls "
               "in the same order",
               be->rank, turn_name(mine, a, sizeof a), rank, turn_name(other, b, sizeof b));
    return true;
}

epo_status host_turn_end(epo_backend *be) {
    for (int r = 0; r < be->ranks; r++)
        if (host_turn_differs(be, r))
            break;
    return host_status(be);
}
