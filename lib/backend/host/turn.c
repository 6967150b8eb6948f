/* SPDX-License-Identifier: Apache-2.0
 *
 * turn.c - which collective call each rank is in, so that calls that do not belong
 * together are told instead of waited out, or taken for each other.
 */
#include "config.h"

#include "backend/host/host.h"

#include <stdio.h>

#define REFUSED (UINT64_C(1) << 63)

static const char *const names[] = {
    [EPO_TURN_BUFFER] = "buffer_create", [EPO_TURN_BUFFER_END] = "buffer_destroy",
    [EPO_TURN_PLAN] = "plan_create",     [EPO_TURN_DISPATCH] = "dispatch",
    [EPO_TURN_COMBINE] = "combine",      [EPO_TURN_FORWARD] = "forward",
    [EPO_TURN_BACKWARD] = "backward",    [EPO_TURN_ALLREDUCE] = "allreduce",
    [EPO_TURN_BARRIER] = "barrier"};

/* One word, so that it is read whole: refused, kind, plan, count of the call. */
static uint64_t turn_pack(const epo_turn *turn, uint64_t count, bool refused) {
    return (refused ? REFUSED : 0) | (uint64_t)turn->kind << 56 | (turn->plan & 0xffffff) << 32 |
           (count & 0xffffffff);
}

static const char *turn_name(uint64_t word, char *text, size_t size) {
    size_t kind = word >> 56 & 0x7f;
    const char *name = kind < sizeof names / sizeof *names ? names[kind] : "?";
    unsigned plan = (unsigned)(word >> 32) & 0xffffff;
    if (plan > 0)
        snprintf(text, size, "%s of plan %u", name, plan);
    else
        snprintf(text, size, "%s", name);
    return text;
}

void host_turn_note(host_peer *me, uint64_t count, const epo_turn *turn, bool refused) {
    atomic_store(&me->turn[count % HOST_TURNS], turn_pack(turn, count, refused));
    if (refused)
        atomic_store(&me->refused, count);
}

void host_turn_take(epo_backend *be, const epo_turn *turn, bool refused) {
    uint64_t count = atomic_load(&be->turns) + 1;
    if (host_forked(be))
        return;
    host_turn_note(&be->shared->peer[be->rank], count, turn, refused);
    atomic_store(&be->turns, count);
}

bool host_turn_differs(epo_backend *be, int rank) {
    uint64_t at = atomic_load(&be->turns) % HOST_TURNS;
    uint64_t mine = atomic_load(&be->shared->peer[be->rank].turn[at]) & ~REFUSED;
    uint64_t other = atomic_load(&be->shared->peer[rank].turn[at]) & ~REFUSED;
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

bool host_turns_differ(const host_shared *shared, int rank, int peer, uint64_t last, char *text,
                       size_t size) {
    char a[48], b[48];
    /* The earliest first: what comes behind it only follows from it. */
    for (uint64_t at = last < HOST_TURNS ? 1 : last - HOST_TURNS + 1; at <= last; at++) {
        uint64_t mine = atomic_load(&shared->peer[rank].turn[at % HOST_TURNS]);
        uint64_t other = atomic_load(&shared->peer[peer].turn[at % HOST_TURNS]);
        if (other == mine || (uint32_t)other != (uint32_t)mine)
            continue; /* the same call, or the peer has not come so far, or is far ahead */
        if ((other & ~REFUSED) != (mine & ~REFUSED))
            snprintf(text, size,
                     "the ranks disagree: rank %d is in %s, rank %d in %s; all ranks make the same "
                     "calls in the same order",
                     rank, turn_name(mine, a, sizeof a), peer, turn_name(other, b, sizeof b));
        else
            snprintf(text, size, "rank %d refused its arguments of %s, as its own error tells",
                     (other & REFUSED) != 0 ? peer : rank, turn_name(mine, a, sizeof a));
        return true;
    }
    return false;
}
