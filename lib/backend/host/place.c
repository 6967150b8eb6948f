/* SPDX-License-Identifier: Apache-2.0
 *
 * place.c - where a rank stands in its group, from what the caller gave.
 */
#include "backend/host/host.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static epo_status place_group(const epo_backend_config *c, host_place *p) {
    p->rank = c->rank;
    p->ranks = c->ranks;
    p->members = c->members;
    if (c->members == NULL)
        return EPO_OK;
    p->rank = -1;
    p->ranks = c->nmembers;
    if (c->nmembers < 1 || c->nmembers > c->ranks)
        return epo_fail(EPO_E_ARG, "members of a group: found %d, allowed 1..%d", c->nmembers,
                        c->ranks);
    for (int i = 0; i < c->nmembers; i++) {
        if (c->members[i] < 0 || c->members[i] >= c->ranks)
            return epo_fail(EPO_E_ARG, "member %d of a group: found rank %d, allowed 0..%d", i,
                            c->members[i], c->ranks - 1);
        for (int j = 0; j < i; j++)
            if (c->members[j] == c->members[i])
                return epo_fail(EPO_E_ARG, "members of a group: rank %d is named twice",
                                c->members[i]);
        if (c->members[i] == c->rank)
            p->rank = i;
    }
    if (p->rank < 0)
        return epo_fail(EPO_E_ARG, "rank %d is not in the member list it gave", c->rank);
    return EPO_OK;
}

static int64_t limit_ns(double seconds, double otherwise) {
    double s = seconds > 0.0 ? seconds : otherwise;
    return s > 1e9 ? INT64_C(1000000000) * 1000000000 : (int64_t)(s * 1e9);
}

void host_place_refuse(host_place *place, epo_status wrong) {
    place->wrong = wrong;
    snprintf(place->why, sizeof place->why, "%.*s", (int)sizeof place->why - 1, epo_fail_text());
}

epo_status host_place_find(const epo_backend_config *c, host_place *p) {
    if (c->ranks < 1 || c->rank < 0 || c->rank >= c->ranks)
        return epo_fail(EPO_E_ARG, "rank %d of %d: allowed 0..ranks-1, at least one rank", c->rank,
                        c->ranks);
    if (isnan(c->timeout_s) || isnan(c->warn_s) || c->timeout_s < 0.0 || c->warn_s < 0.0)
        return epo_fail(EPO_E_ARG, "limits: found %g s and %g s, allowed 0 (default) or more",
                        c->timeout_s, c->warn_s);
    memset(p, 0, sizeof *p);
    if (c->wrong != EPO_OK)
        host_place_refuse(p, c->wrong);
    p->world_rank = c->rank;
    p->world_ranks = c->ranks;
    p->bootstrap = c->bootstrap;
    p->timeout_ns = limit_ns(c->timeout_s, 600.0);
    p->warn_ns = limit_ns(c->warn_s, 30.0);
    epo_status status = place_group(c, p);
    if (status == EPO_OK && p->ranks > HOST_RANKS_MAX)
        status = epo_fail(EPO_E_ARG, "ranks of a group on one machine: found %d, allowed 1..%d",
                          p->ranks, HOST_RANKS_MAX);
    return status;
}
