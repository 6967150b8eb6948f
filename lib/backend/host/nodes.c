/* SPDX-License-Identifier: Apache-2.0
 *
 * nodes.c - where Slurm started a rank, so that an error can say where to look,
 * and so that a step on several machines is refused before the limit.
 */
#include "config.h"

#include "backend/host/hello.h"

#include <ctype.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- lists ------------------------------------------------------------------- */

/* The i-th number of "01-03,7", as text of its width; *i falls by those passed. */
static bool range_nth(const char *at, const char *end, int *i, char *text, size_t size) {
    while (at < end) {
        char *after;
        unsigned long lo = strtoul(at, &after, 10), hi = lo;
        int width = (int)(after - at);
        if (width < 1 || width > 9)
            return false;
        if (*after == '-')
            hi = strtoul(after + 1, &after, 10);
        if (after > end || (*after != ',' && *after != ']') || hi < lo)
            return false;
        if ((unsigned long)*i <= hi - lo) {
            snprintf(text, size, "%0*lu", width, lo + (unsigned long)*i);
            *i = -1;
            return true;
        }
        *i -= (int)(hi - lo + 1);
        at = after + 1;
    }
    return true;
}

bool host_node_nth(const char *list, int i, char *node, size_t size) {
    while (*list != '\0') {
        size_t prefix = strcspn(list, ",[");
        char number[16] = "";
        const char *next = list + prefix;
        if (*next == '[') {
            const char *end = strchr(next, ']');
            if (end == NULL || (end[1] != ',' && end[1] != '\0') ||
                !range_nth(next + 1, end, &i, number, sizeof number))
                return false;
            next = end + 1;
        } else {
            i--;
        }
        if (i < 0)
            return snprintf(node, size, "%.*s%s", (int)prefix, list, number) < (int)size;
        if (*next == '\0')
            return false;
        list = next + 1;
    }
    return false;
}

int host_tasks_nth(const char *list, int i) {
    while (isdigit((unsigned char)*list)) {
        char *at;
        long tasks = strtol(list, &at, 10), times = 1;
        if (strncmp(at, "(x", 2) == 0) {
            times = strtol(at + 2, &at, 10);
            if (*at != ')')
                return -1;
            at++;
        }
        if (i < times)
            return (int)tasks;
        i -= (int)times;
        if (*at != ',')
            return -1;
        list = at + 1;
    }
    return -1;
}

bool host_node_of_rank(const host_place *place, int rank, char *node, size_t size) {
    const char *nodes = getenv("SLURM_STEP_NODELIST"), *total = getenv("SLURM_STEP_NUM_TASKS");
    const char *tasks = getenv("SLURM_STEP_TASKS_PER_NODE"), *way = getenv("SLURM_DISTRIBUTION");
    if (nodes == NULL || tasks == NULL || total == NULL ||
        strtol(total, NULL, 10) != place->world_ranks ||
        (way != NULL && strncmp(way, "block", 5) != 0))
        return false;
    int world = place->members != NULL ? place->members[rank] : rank;
    for (int n = 0, first = 0;; n++) {
        int here = host_tasks_nth(tasks, n);
        if (here < 1)
            return false;
        if (world < first + here)
            return host_node_nth(nodes, n, node, size);
        first += here;
    }
}

/* ---- addresses ----------------------------------------------------------------- */

static bool address_same(const struct sockaddr *a, const struct sockaddr *b) {
    if (a->sa_family != b->sa_family)
        return false;
    if (a->sa_family == AF_INET)
        return memcmp(&((const struct sockaddr_in *)(const void *)a)->sin_addr,
                      &((const struct sockaddr_in *)(const void *)b)->sin_addr,
                      sizeof(struct in_addr)) == 0;
    return a->sa_family == AF_INET6 &&
           memcmp(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr,
                  &((const struct sockaddr_in6 *)(const void *)b)->sin6_addr,
                  sizeof(struct in6_addr)) == 0;
}

static bool address_loopback(const struct sockaddr *a) {
    if (a->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const void *)a;
        return (ntohl(in->sin_addr.s_addr) >> 24) == 127;
    }
    const struct sockaddr_in6 *in = (const void *)a;
    return a->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&in->sin6_addr);
}

/* Some address of `node` that is not this machine's, if none is; "" otherwise. */
static void node_elsewhere(const char *node, char *where, size_t size) {
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found = NULL;
    struct ifaddrs *mine = NULL;
    bool here = false;
    where[0] = '\0';
    if (getaddrinfo(node, NULL, &hints, &found) != 0)
        return;
    if (getifaddrs(&mine) != 0)
        goto free_found;
    for (struct addrinfo *f = found; f != NULL && !here; f = f->ai_next) {
        here = address_loopback(f->ai_addr);
        for (struct ifaddrs *m = mine; m != NULL && !here; m = m->ifa_next)
            here = m->ifa_addr != NULL && address_same(f->ai_addr, m->ifa_addr);
    }
    if (!here)
        getnameinfo(found->ai_addr, found->ai_addrlen, where, (socklen_t)size, NULL, 0,
                    NI_NUMERICHOST);
    freeifaddrs(mine);
free_found:
    freeaddrinfo(found);
}

epo_status host_node_check(const host_place *place, int rank) {
    char node[HOST_NODE_MAX], where[80];
    if (!host_node_of_rank(place, rank, node, sizeof node))
        return EPO_OK;
    const char *me = getenv("SLURMD_NODENAME");
    if (me != NULL && strcmp(me, node) == 0)
        return EPO_OK;
    node_elsewhere(node, where, sizeof where);
    if (where[0] == '\0')
        return EPO_OK;
    return epo_fail(EPO_E_UNSUPPORTED,
                    "rank %d is on node %s (%s), rank %d on %s: the ranks of a group must be on "
                    "one machine; make a group of each node's ranks (members), or, on GPUs, give a "
                    "bootstrap or a communicator",
                    rank, node, where, place->rank, me != NULL ? me : "this one");
}
