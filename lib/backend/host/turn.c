/* SPDX-License-Identifier: Apache-2.0
 *
 * turn.c - which collective call each rank is in, and with what, so that calls that do not
 * belong together are told instead of waited out, or taken for each other.
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

/* ---- what a call is made with ------------------------------------------------ */

static const struct {
    const char *name;
    size_t at;
    int bits;
    bool some; /* 0 fits everything */
} fields[] = {
    {"the buffer's number among the group's", offsetof(epo_turn_with, buffer), 12, false},
    {"expert of the layer (1: given)", offsetof(epo_turn_with, own), 1, false},
    {"ffn of the layer", offsetof(epo_turn_with, ffn), 25, false},
    {"saved of the layer", offsetof(epo_turn_with, saved), 2, false},
    {"weight gradients of the layer, which saves nothing (1: given)",
     offsetof(epo_turn_with, again), 1, false},
    {"row_dweights and dweights (1: NULL, 2: given)", offsetof(epo_turn_with, extra), 2, true},
};
enum { FIELDS = sizeof fields / sizeof *fields };

static int *field_of(epo_turn_with *with, int i) {
    return (int *)(void *)((char *)with + fields[i].at);
}

static uint64_t with_pack(const epo_turn_with *given) {
    epo_turn_with with = *given;
    uint64_t word = 0;
    for (int i = 0; i < FIELDS; i++)
        word = word << fields[i].bits |
               ((uint64_t)*field_of(&with, i) & ((UINT64_C(1) << fields[i].bits) - 1));
    return word;
}

static epo_turn_with with_unpack(uint64_t word) {
    epo_turn_with with = {0};
    for (int i = FIELDS - 1; i >= 0; i--) {
        *field_of(&with, i) = (int)(word & ((UINT64_C(1) << fields[i].bits) - 1));
        word >>= fields[i].bits;
    }
    return with;
}

bool epo_turn_with_differs(const epo_turn_with *mine, const epo_turn_with *other, int rank,
                           int peer, char *text, size_t size) {
    epo_turn_with a = *mine, b = *other;
    for (int i = 0; i < FIELDS; i++) {
        const int first = *field_of(&a, i), second = *field_of(&b, i);
        if (first == second || (fields[i].some && (first == 0 || second == 0)))
            continue;
        snprintf(text, size, "%s is %d on rank %d and %d on rank %d", fields[i].name, first, rank,
                 second, peer);
        return true;
    }
    return false;
}

/* ---- calls ------------------------------------------------------------------- */

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

void epo_turns_note(epo_turns *mine, uint64_t count, const epo_turn *turn, bool refused) {
    const uint64_t at = count % EPO_TURNS;
    atomic_store(&mine->call[at], 0); /* who reads meanwhile sees that it changes */
    atomic_store(&mine->with[at], with_pack(&turn->with));
    atomic_store(&mine->call[at], turn_pack(turn, count, refused));
}

/* Call `count`; false: it has not come so far, or is far ahead. */
static bool turn_read(const epo_turns *turns, uint64_t count, uint64_t *call, uint64_t *with) {
    const uint64_t at = count % EPO_TURNS;
    *call = atomic_load(&turns->call[at]);
    *with = atomic_load(&turns->with[at]);
    return *call != 0 && (uint32_t)*call == (uint32_t)count &&
           atomic_load(&turns->call[at]) == *call;
}

/* Of the same call: is it made with something else? */
static bool with_differs(uint64_t call, const uint64_t with[2], int rank, int peer, char *text,
                         size_t size) {
    char name[48], what[160];
    if (with[0] == with[1] || (call & REFUSED) != 0)
        return false;
    const epo_turn_with mine = with_unpack(with[0]), other = with_unpack(with[1]);
    if (!epo_turn_with_differs(&mine, &other, rank, peer, what, sizeof what))
        return false;
    snprintf(text, size, "the ranks disagree in %s: %s; give all ranks the same",
             turn_name(call, name, sizeof name), what);
    return true;
}

bool epo_turn_differs(const epo_turns *mine, const epo_turns *other, int rank, int peer,
                      uint64_t count, char *text, size_t size) {
    uint64_t call[2], with[2];
    char a[48], b[48];
    if (!turn_read(mine, count, &call[0], &with[0]) || !turn_read(other, count, &call[1], &with[1]))
        return false;
    if (call[0] == call[1])
        return with_differs(call[0], with, rank, peer, text, size);
    if ((call[0] & ~REFUSED) != (call[1] & ~REFUSED))
        snprintf(text, size,
                 "the ranks disagree: rank %d is in %s, rank %d in %s; all ranks make the same "
                 "calls in the same order",
                 rank, turn_name(call[0], a, sizeof a), peer, turn_name(call[1], b, sizeof b));
    else
        snprintf(text, size, "rank %d refused its arguments of %s, as its own error tells",
                 (call[1] & REFUSED) != 0 ? peer : rank, turn_name(call[0], a, sizeof a));
    return true;
}

bool epo_turn_other(const epo_turn *mine, const epo_turn *other, int rank, int peer, char *text,
                    size_t size) {
    epo_turns a, b;
    epo_turns_note(&a, 1, mine, false);
    epo_turns_note(&b, 1, other, false);
    return epo_turn_differs(&a, &b, rank, peer, 1, text, size);
}

bool epo_turns_differ(const epo_turns *mine, const epo_turns *other, int rank, int peer,
                      uint64_t last, char *text, size_t size) {
    /* The earliest first: what comes behind it only follows from it. */
    for (uint64_t at = last < EPO_TURNS ? 1 : last - EPO_TURNS + 1; at <= last; at++)
        if (epo_turn_differs(mine, other, rank, peer, at, text, size))
            return true;
    return false;
}

/* ---- of the host engine's ranks ------------------------------------------------ */

epo_status host_turn_take(epo_backend *be, const epo_turn *turn, bool refused) {
    uint64_t count = atomic_load(&be->turns) + 1;
    host_peer *me = &be->shared->peer[be->rank];
    if (host_forked(be))
        return EPO_OK;
    epo_turns_note(&me->turns, count, turn, refused);
    if (refused)
        atomic_store(&me->refused, count);
    atomic_store(&be->turns, count);
    return EPO_OK; /* the call's end looks at all of them */
}

/* One that a rank alone refused is told by whoever waits for it. */
bool host_turn_differs(epo_backend *be, int rank) {
    const epo_turns *mine = &be->shared->peer[be->rank].turns;
    const epo_turns *other = &be->shared->peer[rank].turns;
    const uint64_t count = atomic_load(&be->turns), at = count % EPO_TURNS;
    char text[HOST_TEXT_MAX];
    if (((atomic_load(&mine->call[at]) ^ atomic_load(&other->call[at])) == REFUSED) ||
        !epo_turn_differs(mine, other, be->rank, rank, count, text, sizeof text))
        return false;
    host_break(be, EPO_E_PEER, "%s", text);
    return true;
}

epo_status host_turn_end(epo_backend *be) {
    for (int r = 0; r < be->ranks; r++)
        if (host_turn_differs(be, r))
            break;
    return host_status(be);
}
