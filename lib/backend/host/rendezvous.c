/* SPDX-License-Identifier: Apache-2.0
 *
 * rendezvous.c - processes of one machine meet and come to share a block of memory.
 *
 * Rank 0 of the group listens under a name that all its processes can work out (or
 * that the caller's bootstrap has told them), the others connect and introduce
 * themselves.  Rank 0 judges; everybody hears the same verdict.
 */
#include "config.h"

#include "backend/host/join.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define JOIN_LIMIT_NS INT64_C(60000000000)
#define JOIN_GRACE_NS INT64_C(3000000000) /* rank 0 speaks first: it knows who is missing */
#define JOIN_NODES_NS INT64_C(1000000000)
#define JOIN_NAP_NS INT64_C(50000000)

/* ---- a rank that is not 0 --------------------------------------------------------- */

static epo_status follow_connect(const host_place *place, const host_name *name, int64_t until,
                                 int *fd, int *pid) {
    int64_t from = host_now_ns(), nap = 1000000;
    bool nodes_checked = false, warned = false;
    while ((*fd = host_socket_connect(name, pid)) < 0) {
        if (host_socket_starved())
            return epo_fail(EPO_E_SYSTEM, "rank %d: a socket to meet rank 0: %s", place->rank,
                            strerror(errno));
        int64_t now = host_now_ns(), waited = now - from;
        char node[HOST_NODE_MAX], where[HOST_NODE_MAX + 8] = "";
        if (!nodes_checked && waited >= JOIN_NODES_NS) {
            nodes_checked = true;
            epo_status status = host_node_check(place, 0);
            if (status != EPO_OK)
                return status;
        }
        if (now >= until || (!warned && waited >= place->warn_ns)) {
            if (host_node_of_rank(place, 0, node, sizeof node))
                snprintf(where, sizeof where, " (on %s)", node);
            if (now >= until)
                return epo_fail(EPO_E_TIMEOUT,
                                "rank %d: waited %.1f s for rank 0%s to make a group of %d",
                                place->rank, (double)waited * 1e-9, where, place->ranks);
            warned = true;
            fprintf(stderr,
                    "ep-overlap: rank %d: waiting for rank 0%s to make a group since %.1f s\n",
                    place->rank, where, (double)waited * 1e-9);
        }
        struct timespec t = {0, nap};
        nanosleep(&t, NULL);
        nap = nap * 2 < JOIN_NAP_NS ? nap * 2 : JOIN_NAP_NS;
    }
    return EPO_OK;
}

static epo_status follow_welcome(const host_place *place, int fd, int pid, int64_t until,
                                 host_shared **shared) {
    host_welcome w;
    int memory = -1, rc;
    int64_t from = host_now_ns();
    while ((rc = host_socket_receive(fd, &w, sizeof w, &memory)) == 0) {
        if (host_now_ns() >= until)
            return epo_fail(EPO_E_TIMEOUT,
                            "rank %d: waited %.1f s for the answer of rank 0 (pid %d)", place->rank,
                            (double)(host_now_ns() - from) * 1e-9, pid);
        struct pollfd p = {fd, POLLIN, 0};
        poll(&p, 1, (int)(HOST_SLICE_NS / 1000000));
    }
    if (rc < 0 || w.magic != HOST_MAGIC)
        return epo_fail(EPO_E_PEER, "rank 0 (pid %d) ended while the group was made", pid);
    w.text[sizeof w.text - 1] = '\0';
    epo_status status = EPO_OK;
    void *at = NULL;
    if (w.status != EPO_OK)
        status = epo_fail((epo_status)w.status, "%s", w.text);
    else
        status = host_memfile_map(memory, host_shared_bytes(place->ranks), &at);
    if (memory >= 0)
        close(memory);
    if (status == EPO_OK)
        *shared = at;
    return status;
}

static epo_status join_follow(const host_place *place, host_hello *me, const host_name *name,
                              int64_t until, struct host_join *join, host_shared **shared) {
    int pid = 0;
    epo_status status = follow_connect(place, name, until, &join->fd[0], &pid);
    if (status != EPO_OK)
        return status;
    me->left_ns = until - host_now_ns();
    if (!host_socket_send(join->fd[0], me, sizeof *me, -1))
        return epo_fail(EPO_E_PEER, "rank 0 (pid %d) ended while the group was made", pid);
    return follow_welcome(place, join->fd[0], pid, until + JOIN_GRACE_NS, shared);
}

/* ---- by the caller's bootstrap ------------------------------------------------------ */

/* All see all, so that all refuse with the same words; the key is rank 0's. */
static epo_status join_bootstrap(const host_place *place, const host_hello *me, uint64_t *key) {
    host_hello all[HOST_RANKS_MAX]; /* no memory that could be lacking: the others wait */
    epo_status status = EPO_OK;
    int rc = place->bootstrap->allgather(place->bootstrap->ctx, me, sizeof *me, all);
    if (rc != 0)
        status = epo_fail(EPO_E_PEER, "the caller's bootstrap: allgather returned %d", rc);
    for (int r = 0; r < place->ranks && status == EPO_OK; r++) {
        char name[HOST_NODE_MAX + 48];
        if (all[r].magic != HOST_MAGIC)
            status = epo_fail(EPO_E_PEER, "the caller's bootstrap gave nothing of rank %d", r);
        else
            status = host_hello_check(&all[0], &all[r]);
        if (status == EPO_OK && all[r].rank != r)
            status = epo_fail(EPO_E_PEER, "the caller's bootstrap has %s in place %d",
                              host_hello_name(&all[r], name, sizeof name), r);
    }
    if (status == EPO_OK)
        *key = all[0].nonce;
    return status;
}

/* ---- both ------------------------------------------------------------------------------ */

int64_t host_join_limit_ns(const host_place *place) {
    return place->timeout_ns < JOIN_LIMIT_NS ? place->timeout_ns : JOIN_LIMIT_NS;
}

static void join_close(const struct host_join *join) {
    for (int r = 0; r < HOST_RANKS_MAX; r++)
        if (join->fd[r] >= 0)
            close(join->fd[r]);
}

static epo_status join_meet(const host_place *place, struct host_join *join, host_shared **shared) {
    join->rank = place->rank;
    join->ranks = place->ranks;
    for (int r = 0; r < HOST_RANKS_MAX; r++)
        join->fd[r] = -1;
    host_hello me;
    host_name name = {0, 0};
    epo_status status = EPO_OK;
    host_hello_make(place, &me);
    if (place->bootstrap != NULL)
        status = join_bootstrap(place, &me, &name.key);
    else
        name.key = host_hello_key(place);
    int64_t until = host_now_ns() + host_join_limit_ns(place);
    if (status == EPO_OK)
        status = place->rank == 0 ? host_join_lead(place, &me, &name, until, join, shared)
                                  : join_follow(place, &me, &name, until, join, shared);
    return status;
}

/* Who cannot make the group comes all the same, and says so. */
static epo_status join_refuse(host_place *place) {
    struct host_join here;
    host_shared *none = NULL;
    char why[sizeof place->why];
    snprintf(why, sizeof why, "%s", place->why);
    (void)join_meet(place, &here, &none);
    join_close(&here);
    return epo_fail(place->wrong, "%s", why);
}

epo_status host_join_ranks(const host_place *place, struct host_join **out, host_shared **shared) {
    host_place mine = *place;
    struct host_join *join = calloc(1, sizeof *join);
    if (join == NULL && mine.wrong == EPO_OK)
        host_place_refuse(
            &mine, epo_fail(EPO_E_NOMEM, "a group: need %zu bytes, have none", sizeof *join));
    if (join == NULL || mine.wrong != EPO_OK) {
        free(join);
        return join_refuse(&mine);
    }
    epo_status status = join_meet(place, join, shared);
    if (status != EPO_OK) {
        host_join_destroy(join);
        return status;
    }
    *out = join;
    return EPO_OK;
}

bool host_join_hung_up(const struct host_join *join, int rank) {
    int fd = join->rank == 0 ? join->fd[rank] : rank == 0 ? join->fd[0] : -1;
    struct pollfd p = {fd, 0, 0};
    return fd >= 0 && poll(&p, 1, 0) == 1 && (p.revents & POLLHUP) != 0;
}

void host_join_destroy(struct host_join *join) {
    if (join == NULL)
        return;
    join_close(join);
    free(join);
}
