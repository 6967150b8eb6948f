/* SPDX-License-Identifier: Apache-2.0
 *
 * bootstrap.c - a caller's bootstrap, in memory that the ranks of a group share.  It has a limit,
 * as a caller's would, and the victim can be struck in it.
 */
#include "config.h"

#include "fault.h"

#include <string.h>
#include <time.h>

static int seat_barrier(void *ctx) {
    const seat *s = ctx;
    const int64_t until = now_ns() + (int64_t)(s->b->c.limit_s * 1e9);
    const int round = atomic_load(&s->b->table[s->group].round);
    if (atomic_fetch_add(&s->b->table[s->group].arrived, 1) == s->ranks - 1) {
        atomic_store(&s->b->table[s->group].arrived, 0);
        atomic_store(&s->b->table[s->group].round, round + 1);
        return 0;
    }
    while (atomic_load(&s->b->table[s->group].round) == round) {
        if (now_ns() > until)
            return -1;
        const struct timespec nap = {0, 100000};
        nanosleep(&nap, NULL);
    }
    return 0;
}

static int seat_allgather(void *ctx, const void *mine, size_t bytes, void *all) {
    seat *s = ctx;
    if (bytes > SLOT)
        return -1;
    if (s->calls++ > 0)
        strike_at(s->b, s->number, PHASE_TOLD, 0);
    memcpy(s->b->table[s->group].slot[s->rank], mine, bytes);
    if (seat_barrier(ctx) != 0)
        return -1;
    for (int r = 0; r < s->ranks; r++)
        memcpy((char *)all + (size_t)r * bytes, s->b->table[s->group].slot[r], bytes);
    return seat_barrier(ctx);
}

epo_bootstrap seat_bootstrap(seat *s) {
    return (epo_bootstrap){sizeof(epo_bootstrap), s, seat_allgather, seat_barrier};
}
