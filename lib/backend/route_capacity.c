/* SPDX-License-Identifier: Apache-2.0
 *
 * route_capacity.c - what an expert cannot take is dropped where it comes from.
 */
#include "backend/route.h"

#include <stdlib.h>

/* Larger weights first, then earlier slots. */
static int compare_rivals(const void *a, const void *b) {
    const epo_route_rival *x = a, *y = b;
    if (x->key != y->key)
        return x->key > y->key ? -1 : 1;
    return x->flat < y->flat ? -1 : x->flat > y->flat;
}

static uint64_t drop_later(int32_t *experts, uint64_t slots, uint64_t capacity, uint32_t *rows) {
    uint64_t dropped = 0;
    for (uint64_t i = 0; i < slots; i++) {
        if (experts[i] < 0 || rows[experts[i]]++ < capacity)
            continue;
        experts[i] = -1;
        dropped++;
    }
    return dropped;
}

/* rows[e] are known: the expert's slots, the losers' experts become -1. */
static uint64_t drop_lighter(int32_t *experts, const float *weights, uint64_t slots, int32_t expert,
                             uint64_t capacity, epo_route_rival *rivals) {
    uint64_t n = 0;
    for (uint64_t i = 0; i < slots; i++)
        if (experts[i] == expert)
            rivals[n++] = (epo_route_rival){
                epo_route_weight_key(weights != NULL ? weights[i] : 1.0F), (int32_t)i};
    qsort(rivals, n, sizeof *rivals, compare_rivals);
    for (uint64_t i = capacity; i < n; i++)
        experts[rivals[i].flat] = -1;
    return n - capacity;
}

uint64_t epo_route_drop(const epo_route_shape *s, int32_t *experts, const float *weights,
                        int tokens, uint64_t capacity, bool by_weight, uint32_t *rows,
                        epo_route_rival *rivals) {
    uint64_t slots = (uint64_t)tokens * (uint64_t)s->top_k, dropped = 0;
    if (capacity >= slots)
        return 0;
    memset(rows, 0, (size_t)s->experts * sizeof *rows);
    if (!by_weight)
        return drop_later(experts, slots, capacity, rows);
    for (uint64_t i = 0; i < slots; i++)
        if (experts[i] >= 0)
            rows[experts[i]]++;
    for (int e = 0; e < s->experts; e++)
        if (rows[e] > capacity)
            dropped += drop_lighter(experts, weights, slots, e, capacity, rivals);
    return dropped;
}
