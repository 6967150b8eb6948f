/* SPDX-License-Identifier: Apache-2.0
 *
 * lead.c - rank 0 gathers the processes of a group.
 */
#include "config.h"

#include "backend/host/join.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LEAD_PENDING 64 /* connections that have not said hello */
#define LEAD_LINGER_NS INT64_C(1000000000)
#define LEAD_NODES_NS INT64_C(1000000000)

typedef struct lead {
    const host_place *place;
    struct host_join *join;
    int listener;
    int pending[LEAD_PENDING], npending;
    int come;
    int64_t from_ns, until_ns, warn_ns;
    bool nodes_checked;
    host_hello hello[HOST_RANKS_MAX];
} lead;

static void lead_answer(int fd, epo_status status, int descriptor) {
    host_welcome w = {HOST_MAGIC, (int32_t)status, ""};
    if (status != EPO_OK)
        snprintf(w.text, sizeof w.text, "%s", epo_fail_text());
    host_socket_send(fd, &w, sizeof w, descriptor);
}

/* ---- what comes in -------------------------------------------------------------- */

static epo_status lead_duplicate(const lead *l, const host_hello *h) {
    char a[HOST_NODE_MAX + 48], b[HOST_NODE_MAX + 48];
    return epo_fail(EPO_E_PEER, "two processes are rank %d: %s and %s", (int)h->rank,
                    host_hello_name(&l->hello[h->rank], a, sizeof a),
                    host_hello_name(h, b, sizeof b));
}

/* A hello was read from `fd`, which is given over. */
static epo_status lead_hello(lead *l, int fd, const host_hello *h) {
    epo_status status = host_hello_check(&l->hello[0], h);
    if (status == EPO_OK && (h->rank == 0 || l->join->fd[h->rank] >= 0))
        status = lead_duplicate(l, h);
    if (status != EPO_OK) {
        lead_answer(fd, status, -1);
        close(fd);
        return status;
    }
    l->hello[h->rank] = *h;
    l->join->fd[h->rank] = fd;
    l->come++;
    const int64_t now = host_now_ns(); /* the shortest limit is everybody's */
    if (h->left_ns < l->until_ns - now)
        l->until_ns = now + (h->left_ns > 0 ? h->left_ns : 0);
    return EPO_OK;
}

static epo_status lead_read_pending(lead *l) {
    epo_status status = EPO_OK;
    for (int i = 0; i < l->npending && status == EPO_OK;) {
        host_hello h;
        int rc = host_socket_hello(l->pending[i], &h);
        if (rc == 0) {
            i++;
            continue;
        }
        int fd = l->pending[i];
        l->pending[i] = l->pending[--l->npending];
        if (rc > 0)
            status = lead_hello(l, fd, &h);
        else
            close(fd); /* a stranger, or one of a name's probes */
    }
    return status;
}

static epo_status lead_accept(lead *l) {
    while (l->npending < LEAD_PENDING) {
        int fd = host_socket_accept(l->listener);
        if (fd < 0)
            return host_socket_starved()
                       ? epo_fail(EPO_E_SYSTEM, "rank 0: a socket to a rank: %s", strerror(errno))
                       : EPO_OK;
        l->pending[l->npending++] = fd;
    }
    return EPO_OK;
}

/* Those that came must still be there. */
static epo_status lead_check_lives(const lead *l) {
    for (int r = 1; r < l->place->ranks; r++) {
        char c, name[HOST_NODE_MAX + 48];
        if (l->join->fd[r] >= 0 && host_socket_receive(l->join->fd[r], &c, 1, NULL) < 0)
            return epo_fail(EPO_E_PEER, "%s ended while the group was made",
                            host_hello_name(&l->hello[r], name, sizeof name));
    }
    return EPO_OK;
}

/* ---- who is missing ---------------------------------------------------------------- */

static void lead_missing(const lead *l, char *text, size_t size) {
    size_t used = 0;
    for (int r = 1; r < l->place->ranks && used + 16 < size; r++) {
        char node[HOST_NODE_MAX];
        if (l->join->fd[r] >= 0)
            continue;
        int n = snprintf(text + used, size - used, "%srank %d", used > 0 ? ", " : "", r);
        used += n > 0 ? (size_t)n : 0;
        if (used < size && host_node_of_rank(l->place, r, node, sizeof node)) {
            n = snprintf(text + used, size - used, " (on %s)", node);
            used += n > 0 ? (size_t)n : 0;
        }
    }
}

static epo_status lead_limits(lead *l) {
    int64_t now = host_now_ns(), waited = now - l->from_ns;
    epo_status status = EPO_OK;
    if (!l->nodes_checked && waited >= LEAD_NODES_NS) {
        l->nodes_checked = true;
        for (int r = 1; r < l->place->ranks && status == EPO_OK; r++)
            if (l->join->fd[r] < 0)
                status = host_node_check(l->place, r);
        if (status != EPO_OK)
            return status;
    }
    bool over = now >= l->until_ns, warn = waited >= l->warn_ns;
    if (!over && !warn)
        return EPO_OK;
    char missing[300] = "";
    lead_missing(l, missing, sizeof missing);
    if (over)
        return epo_fail(EPO_E_TIMEOUT, "rank 0: waited %.1f s for %s to make a group of %d",
                        (double)waited * 1e-9, missing, l->place->ranks);
    l->warn_ns = INT64_MAX;
    fprintf(stderr, "ep-overlap: rank 0: waiting for %s to make a group of %d since %.1f s\n",
            missing, l->place->ranks, (double)waited * 1e-9);
    return EPO_OK;
}

static void lead_poll(const lead *l) {
    struct pollfd p[1 + LEAD_PENDING];
    p[0] = (struct pollfd){l->listener, POLLIN, 0};
    for (int i = 0; i < l->npending; i++)
        p[1 + i] = (struct pollfd){l->pending[i], POLLIN, 0};
    poll(p, 1 + (nfds_t)l->npending, (int)(HOST_SLICE_NS / 1000000));
}

static epo_status lead_gather(lead *l) {
    epo_status status = EPO_OK;
    while (status == EPO_OK && l->come < l->place->ranks) {
        lead_poll(l);
        status = lead_accept(l);
        if (status == EPO_OK)
            status = lead_read_pending(l);
        if (status == EPO_OK && l->come < l->place->ranks) {
            status = lead_check_lives(l);
            if (status == EPO_OK)
                status = lead_limits(l);
        }
    }
    return status;
}

/* ---- the end of it -------------------------------------------------------------------- */

/* Tells the error text to all that are here, and for a short while to those that
 * come: else they would wait for nobody. */
static void lead_refuse(lead *l, epo_status status) {
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    int told = 1;
    for (int r = 1; r < l->place->ranks; r++) {
        if (l->join->fd[r] >= 0) {
            lead_answer(l->join->fd[r], status, -1);
            told++;
        }
    }
    int64_t until = host_now_ns() + LEAD_LINGER_NS;
    while (status != EPO_E_TIMEOUT && told < l->place->ranks && host_now_ns() < until) {
        lead_poll(l);
        if (lead_accept(l) != EPO_OK)
            break;
        for (int i = 0; i < l->npending;) {
            host_hello h;
            int rc = host_socket_hello(l->pending[i], &h);
            if (rc == 0) {
                i++;
                continue;
            }
            if (rc > 0) {
                lead_answer(l->pending[i], status, -1);
                told++;
            }
            close(l->pending[i]);
            l->pending[i] = l->pending[--l->npending];
        }
    }
    epo_fail(status, "%s", text);
}

/* Late ones of a complete group: their rank is taken. */
static void lead_refuse_late(lead *l) {
    (void)lead_accept(l);
    for (int i = 0; i < l->npending; i++) {
        host_hello h;
        if (host_socket_hello(l->pending[i], &h) == 1) {
            epo_status status = host_hello_check(&l->hello[0], &h);
            lead_answer(l->pending[i], status != EPO_OK ? status : lead_duplicate(l, &h), -1);
        }
    }
}

static epo_status lead_memory(uint64_t bytes, int *fd, void **at) {
    epo_status status = host_memfile_create(bytes, false, fd);
    if (status == EPO_OK)
        status = host_memfile_map(*fd, bytes, at);
    if (status == EPO_OK)
        return EPO_OK;
    char text[EPO_ERROR_MAX - 16]; /* all ranks get it: whose memory it is */
    snprintf(text, sizeof text, "%s", epo_fail_text());
    return epo_fail(status, "rank 0: %s", text);
}

static epo_status lead_welcome(lead *l, host_shared **shared) {
    int fd = -1, ranks = l->place->ranks;
    void *at;
    epo_status status = lead_memory(host_shared_bytes(ranks), &fd, &at);
    if (status == EPO_OK) {
        host_shared *s = at;
        host_shared_init(s, ranks, false);
        for (int r = 0; r < ranks; r++) {
            s->peer[r].pid = l->hello[r].pid;
            memcpy(s->peer[r].node, l->hello[r].node, sizeof s->peer[r].node);
        }
        for (int r = 1; r < ranks; r++)
            lead_answer(l->join->fd[r], EPO_OK, fd); /* one that is gone is missed later */
        *shared = s;
    }
    if (fd >= 0)
        close(fd);
    return status;
}

/* Somebody of this user is rank 0 already: it will refuse us by name. */
static epo_status lead_second(const host_hello *me, const host_name *name, int holder) {
    host_welcome w = {0};
    int pid = holder, fd = host_socket_connect(name, &pid), rc = 0;
    if (fd >= 0 && host_socket_send(fd, me, sizeof *me, -1))
        for (int i = 0; i < 100 && rc == 0; i++) {
            struct pollfd p = {fd, POLLIN, 0};
            poll(&p, 1, (int)(HOST_SLICE_NS / 1000000));
            rc = host_socket_receive(fd, &w, sizeof w, NULL);
        }
    if (fd >= 0)
        close(fd);
    w.text[sizeof w.text - 1] = '\0';
    if (rc == 1 && w.magic == HOST_MAGIC && w.status != EPO_OK)
        return epo_fail((epo_status)w.status, "%s", w.text);
    return epo_fail(EPO_E_PEER, "two processes are rank 0: pid %d and pid %d", pid, (int)me->pid);
}

epo_status host_join_lead(const host_place *place, const host_hello *me, const host_name *name,
                          int64_t until_ns, struct host_join *join, host_shared **shared) {
    lead l;
    host_name mine = *name;
    int holder = 0;
    memset(&l, 0, sizeof l);
    l.place = place;
    l.join = join;
    l.from_ns = host_now_ns();
    l.until_ns = until_ns;
    l.warn_ns = place->warn_ns;
    l.hello[0] = *me;
    l.come = 1;
    epo_status status = host_socket_listen(&mine, &l.listener, &holder);
    if (status == EPO_E_STATE)
        return lead_second(me, name, holder);
    if (status != EPO_OK)
        return status;
    status = host_hello_check(me, me); /* it may make no group itself */
    if (status == EPO_OK)
        status = lead_gather(&l);
    if (status == EPO_OK)
        status = lead_welcome(&l, shared);
    if (status == EPO_OK)
        lead_refuse_late(&l);
    else
        lead_refuse(&l, status);
    for (int i = 0; i < l.npending; i++)
        close(l.pending[i]);
    close(l.listener);
    return status;
}
