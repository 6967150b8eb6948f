/* SPDX-License-Identifier: Apache-2.0
 *
 * collective.c - what the ranks do together on their callers' threads, through the
 * shared block's scratch.  It has two halves used in turn: who writes a half again
 * has passed a barrier that everybody reaches after reading it.
 */
#include "config.h"

#include "backend/host/host.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

static unsigned char *scratch_of(epo_backend *be, uint64_t step, int rank) {
    uint64_t slot = (step & 1) * (uint64_t)be->ranks + (uint64_t)rank;
    return be->shared->scratch + slot * HOST_SCRATCH;
}

/* The rank that refused a call which another did not refuse, and went on to its next
 * one; -1: none. */
static int turns_refuser(const host_turn *turns, int ranks) {
    int most = 0;
    bool alike = true;
    for (int r = 1; r < ranks; r++) {
        alike = alike && turns[r].refused == turns[0].refused;
        if (turns[r].refused > turns[most].refused)
            most = r;
    }
    return alike ? -1 : most;
}

/* Every rank compares all turns, so that every rank returns the same error. */
static epo_status turns_compare(epo_backend *be, const host_turn *turns) {
    char name[HOST_NODE_MAX + 48];
    for (int r = 1; r < be->ranks; r++) {
        if (memcmp(&turns[r], &turns[0], offsetof(host_turn, refused)) == 0)
            continue;
        int refuser = turns_refuser(turns, be->ranks);
        if (refuser >= 0)
            host_break(be, EPO_E_PEER,
                       "%s refused its arguments of a call that others are in, as its own error "
                       "tells",
                       host_peer_name(be->shared, refuser, name, sizeof name));
        else
            host_break(be, EPO_E_PEER,
                       "the ranks disagree: rank 0 is in %s of %llu (call %llu), rank %d in %s of "
                       "%llu (call %llu); all ranks make the same calls in the same order",
                       turns[0].what, (unsigned long long)turns[0].count,
                       (unsigned long long)turns[0].turn, r, turns[r].what,
                       (unsigned long long)turns[r].count, (unsigned long long)turns[r].turn);
        return host_status(be);
    }
    return EPO_OK;
}

/* Has every rank arrived?  Of several that arrive at once the last in the one order of
 * these loads and stores sees all the others. */
static bool all_arrived(const epo_backend *be, uint64_t epoch) {
    for (int r = 0; r < be->ranks; r++)
        if (__atomic_load_n(&be->shared->arrived[r], __ATOMIC_SEQ_CST) < epoch)
            return false;
    return true;
}

/* `count`: what has to be equal on all ranks, whatever it counts. */
static epo_status barrier_named(epo_backend *be, const char *what, uint64_t count) {
    epo_status status = host_status(be);
    if (status != EPO_OK)
        return status;
    host_shared *shared = be->shared;
    host_turn *turns = shared->turn[be->barriers & 1];
    host_turn mine = {"", count, atomic_load(&be->turns),
                      atomic_load(&shared->peer[be->rank].refused)};
    snprintf(mine.what, sizeof mine.what, "%s", what);
    turns[be->rank] = mine;
    uint64_t epoch = ++be->barriers;
    __atomic_store_n(&shared->arrived[be->rank], epoch, __ATOMIC_SEQ_CST);
    /* Who comes last wakes the others: woken by everybody, ranks would wake ranks x ranks
     * times. */
    const int wake = all_arrived(be, epoch) ? be->ranks : 0;
    for (int r = 0; r < wake; r++)
        if (r != be->rank)
            host_bell_ring(shared, r, HOST_EAR_FLAGS);
    const epo_ready all = {NULL, shared->arrived, epoch, be->ranks, -1, what, -1, 0, 0, NULL};
    status = host_ready_wait(be, &all);
    return status == EPO_OK ? turns_compare(be, turns) : status;
}

epo_status host_barrier(epo_backend *be) { return barrier_named(be, "barrier", 0); }

epo_status host_allgather(epo_backend *be, const void *mine, size_t bytes, void *all) {
    epo_status status = host_status(be);
    for (size_t at = 0; at < bytes && status == EPO_OK;) {
        size_t part = bytes - at < HOST_SCRATCH ? bytes - at : HOST_SCRATCH;
        uint64_t step = be->barriers;
        memcpy(scratch_of(be, step, be->rank), (const unsigned char *)mine + at, part);
        status = barrier_named(be, "allgather", bytes);
        if (status != EPO_OK)
            return status;
        for (int r = 0; r < be->ranks; r++)
            memcpy((unsigned char *)all + (size_t)r * bytes + at, scratch_of(be, step, r), part);
        at += part;
    }
    return status;
}

epo_status host_allreduce(epo_backend *be, float *data, uint64_t count, epo_stream stream) {
    if (stream != NULL)
        return epo_fail(EPO_E_ARG, "the host engine has no streams: pass NULL");
    epo_status status = host_status(be);
    const uint64_t most = HOST_SCRATCH / sizeof(float);
    for (uint64_t at = 0; at < count && status == EPO_OK;) {
        uint64_t part = count - at < most ? count - at : most;
        uint64_t step = be->barriers;
        memcpy(scratch_of(be, step, be->rank), data + at, part * sizeof(float));
        status = barrier_named(be, "allreduce", count);
        if (status != EPO_OK)
            return status;
        memcpy(data + at, scratch_of(be, step, 0), part * sizeof(float));
        for (int r = 1; r < be->ranks; r++) {
            const float *from = (const float *)scratch_of(be, step, r);
            for (uint64_t i = 0; i < part; i++)
                data[at + i] += from[i];
        }
        at += part;
    }
    return status;
}

epo_status host_agree(epo_backend *be, epo_status mine) {
    typedef struct verdict {
        int32_t status;
        char text[HOST_TEXT_MAX];
    } verdict;
    uint64_t step = be->barriers;
    verdict *own = (verdict *)scratch_of(be, step, be->rank);
    own->status = (int32_t)mine;
    strncpy(own->text, mine != EPO_OK ? epo_fail_text() : "", sizeof own->text - 1);
    own->text[sizeof own->text - 1] = '\0';
    epo_status status = barrier_named(be, "agreement", 0);
    for (int r = 0; r < be->ranks && status == EPO_OK; r++) {
        const verdict *v = (const verdict *)scratch_of(be, step, r);
        if (v->status != EPO_OK)
            status = epo_fail((epo_status)v->status, "rank %d: %s", r, v->text);
    }
    return status;
}
