/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/route.h"

#include <string.h>

/* Does the token name one of the node's experts? */
static bool names_node(const int32_t *e, int top_k, int32_t first, int32_t each) {
    for (int k = 0; k < top_k; k++)
        if (e[k] >= first && e[k] < first + each)
            return true;
    return false;
}

void epo_route_node_count(const int32_t *experts, int tokens, int top_k, int each, int nodes,
                          uint32_t *rows) {
    memset(rows, 0, (size_t)nodes * sizeof *rows);
    for (int t = 0; t < tokens; t++)
        for (int n = 0; n < nodes; n++)
            rows[n] += names_node(experts + (size_t)t * (size_t)top_k, top_k, n * each, each);
}

uint64_t epo_route_node_take(const int32_t *experts, int tokens, int top_k, int each, int node,
                             int32_t *token, int64_t *expert) {
    const int32_t first = node * each;
    uint64_t rows = 0;
    for (int t = 0; t < tokens; t++) {
        const int32_t *e = experts + (size_t)t * (size_t)top_k;
        if (!names_node(e, top_k, first, each))
            continue;
        for (int k = 0; k < top_k; k++) {
            const bool here = e[k] >= first && e[k] < first + each;
            expert[rows * (uint64_t)top_k + (uint64_t)k] = here ? e[k] - first : -1;
        }
        token[rows++] = t;
    }
    return rows;
}

static void row_chunks(const epo_route_shape *s, const int64_t *e, int *first, int *last) {
    const int local = epo_route_local(s);
    *first = s->chunks - 1;
    *last = 0;
    for (int k = 0; k < s->top_k; k++) {
        if (e[k] < 0)
            continue;
        const int c = epo_route_chunk_of(s, (int)(e[k] % local));
        *first = c < *first ? c : *first;
        *last = c > *last ? c : *last;
    }
}

void epo_route_node_order(const epo_route_shape *s, const int64_t *expert, uint64_t rows,
                          uint32_t *first_of, uint32_t *last_of, int32_t *sent, int32_t *returned) {
    const uint64_t k = (uint64_t)s->top_k;
    const size_t n = (size_t)s->chunks;
    int first, last;
    memset(first_of, 0, (n + 1) * sizeof *first_of);
    memset(last_of, 0, (n + 1) * sizeof *last_of);
    for (uint64_t i = 0; i < rows; i++) {
        row_chunks(s, expert + i * k, &first, &last);
        first_of[first + 1]++;
        last_of[last + 1]++;
    }
    for (size_t c = 0; c < n; c++) {
        first_of[c + 1] += first_of[c];
        last_of[c + 1] += last_of[c];
    }
    for (uint64_t i = 0; i < rows; i++) { /* the prefix sums as cursors ... */
        row_chunks(s, expert + i * k, &first, &last);
        sent[i] = (int32_t)first_of[first]++;
        returned[i] = (int32_t)last_of[last]++;
    }
    for (size_t c = n; c > 0; c--) { /* ... and back */
        first_of[c] = first_of[c - 1];
        last_of[c] = last_of[c - 1];
    }
    first_of[0] = last_of[0] = 0;
}
