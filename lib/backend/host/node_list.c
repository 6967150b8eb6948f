/* SPDX-License-Identifier: Apache-2.0
 *
 * node_list.c - several nodes in one machine, for tests: which ranks share one.
 */
#include "backend/meet.h"
#include "core/names.h"
#include "core/status.h"

#include <stdlib.h>

#define NODES_MOST 1024

/* The job's ranks' nodes from "0,0,1,1"; false: it is something else. */
static bool list_read(const char *at, int ranks, int *node) {
    for (int r = 0; r < ranks; r++) {
        char *end;
        if (*at < '0' || *at > '9')
            return false;
        const long v = strtol(at, &end, 10);
        if (v >= NODES_MOST || *end != (r < ranks - 1 ? ',' : '\0'))
            return false;
        node[r] = (int)v;
        at = end + 1;
    }
    return true;
}

int epo_nodes_count(const int *node, const int *members, int ranks) {
    bool seen[NODES_MOST] = {false};
    int count = 0, first = 0, each = 0, last = -1;
    for (int r = 0; r <= ranks; r++) {
        const int here = r == ranks ? -1 : node[members != NULL ? members[r] : r];
        if (r > 0 && here == last)
            continue;
        if (r > 0 && each == 0)
            each = r - first;
        if ((r > 0 && r - first != each) || (here >= 0 && seen[here]))
            return 0;
        if (here >= 0) {
            seen[here] = true;
            count++;
        }
        first = r;
        last = here;
    }
    return count;
}

epo_status epo_nodes_read(const epo_backend_config *config, int *nodes) {
    const char *text = getenv(EPO_ENV_NODES);
    const int ranks = config->members != NULL ? config->nmembers : config->ranks;
    *nodes = 1;
    if (text == NULL || *text == '\0' || config->ranks == 1)
        return EPO_OK;
    int *node = calloc((size_t)config->ranks, sizeof *node);
    if (node == NULL)
        return epo_fail(EPO_E_NOMEM, "memory: need room for %d ranks", config->ranks);
    const bool read = list_read(text, config->ranks, node);
    if (read)
        *nodes = epo_nodes_count(node, config->members, ranks);
    free(node);
    if (!read)
        return epo_fail(EPO_E_ARG,
                        EPO_ENV_NODES
                        ": found \"%.80s\", allowed the node's number of each of %d ranks, as in "
                        "\"0,0,1,1\"",
                        text, config->ranks);
    if (*nodes == 0)
        return epo_fail(EPO_E_UNSUPPORTED,
                        "the nodes of a group must have the same number of ranks, one node behind "
                        "the other (" EPO_ENV_NODES ": \"%.80s\")",
                        text);
    return EPO_OK;
}
