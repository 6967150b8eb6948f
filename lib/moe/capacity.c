/* SPDX-License-Identifier: Apache-2.0
 *
 * capacity.c - what an expert can take of each rank.  A rank judges its own tokens, so
 * nothing is exchanged: what it drops is, to the rest of the engine, a slot that was
 * never used, forward and backward alike.
 */
#include "moe/moe.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

epo_status moe_capacity_set(epo_buffer *b, const epo_buffer_config *c) {
    epo_status status = moe_check_range("overflow", (int64_t)c->overflow, EPO_OVERFLOW_ERROR,
                                        EPO_OVERFLOW_DROP_POSITION);
    if (status == EPO_OK)
        status = moe_check_range("capacity", c->capacity, -1, INT32_MAX);
    if (status != EPO_OK)
        return status;
    bool any = c->capacity >= 0 || c->capacity_factor > 0;
    if (!(c->capacity_factor >= 0) || !isfinite(c->capacity_factor))
        return epo_fail(EPO_E_ARG, "capacity_factor: found %g, allowed 0 (none) or more",
                        c->capacity_factor);
    if (!any && (c->overflow != EPO_OVERFLOW_ERROR || c->pad_to_capacity != 0))
        return epo_fail(EPO_E_ARG,
                        "%s needs a capacity: give capacity_factor above 0 or capacity 0 or more",
                        c->pad_to_capacity != 0 ? "pad_to_capacity" : "dropping");
    b->capacity_factor = c->capacity_factor;
    b->capacity = c->capacity;
    b->overflow = c->overflow;
    b->pad = c->pad_to_capacity != 0;
    return EPO_OK;
}

uint64_t moe_capacity_of(const epo_buffer *b, int tokens, int top_k) {
    if (b->capacity >= 0)
        return (uint64_t)b->capacity;
    if (!(b->capacity_factor > 0))
        return EPO_ROUTE_UNLIMITED;
    int tp = b->group->tp, carried = tokens / tp + (tokens % tp != 0);
    double rows = (double)carried * (double)top_k / (double)b->all_experts * b->capacity_factor;
    if (rows >= (double)INT32_MAX)
        return INT32_MAX;
    return (uint64_t)rows + ((double)(uint64_t)rows < rows); /* rounded up */
}

/* The router weights where the CPU reads them; *fetched is to be freed. */
static epo_status fetch_weights(const epo_buffer *b, const epo_routing *r, float **fetched) {
    epo_group *g = b->group;
    uint64_t bytes = (uint64_t)r->tokens * (uint64_t)r->top_k * sizeof **fetched;
    *fetched = NULL;
    if (r->weights == NULL || bytes == 0 || g->ops->read == NULL)
        return EPO_OK;
    *fetched = malloc(bytes);
    if (*fetched == NULL)
        return epo_fail(EPO_E_NOMEM, "memory: need %" PRIu64 " bytes for router weights", bytes);
    return moe_group_read(g, *fetched, r->weights, bytes);
}

epo_status moe_capacity_drop(const epo_buffer *b, const epo_routing *r, int32_t *experts,
                             uint64_t *dropped) {
    const epo_route_shape s = {
        .ranks = b->group->ranks, .experts = b->all_experts, .top_k = r->top_k};
    bool by_weight = b->overflow == EPO_OVERFLOW_DROP_WEIGHT;
    size_t slots = (size_t)r->tokens * (size_t)r->top_k;
    uint32_t *rows = calloc((size_t)b->all_experts, sizeof *rows);
    epo_route_rival *rivals = calloc(by_weight ? slots + 1 : 1, sizeof *rivals);
    float *fetched = NULL;
    epo_status status =
        rows == NULL || rivals == NULL
            ? epo_fail(EPO_E_NOMEM, "memory: need room to order %zu slots by weight", slots)
            : EPO_OK;
    if (status == EPO_OK && by_weight)
        status = fetch_weights(b, r, &fetched);
    if (status == EPO_OK)
        *dropped = epo_route_drop(&s, experts, fetched != NULL ? fetched : r->weights, r->tokens,
                                  moe_capacity_of(b, r->tokens, r->top_k), by_weight, rows, rivals);
    free(fetched);
    free(rivals);
    free(rows);
    return status;
}

epo_status moe_capacity_check(const epo_buffer *b, const epo_routing *r, const uint32_t *rows) {
    uint64_t capacity = moe_capacity_of(b, r->tokens, r->top_k);
    for (int e = 0; e < b->all_experts; e++)
        if (rows[e] > capacity)
            return epo_fail(EPO_E_OVERFLOW,
                            "expert %d needs %u rows, its capacity is %" PRIu64
                            "; raise it, or let overflow drop",
                            e, rows[e], capacity);
    return EPO_OK;
}

moe_padding moe_capacity_pad(const epo_buffer *b, const uint64_t *capacity, uint32_t *counts) {
    moe_padding p = {0, 0, 0};
    int rank = b->group->rank;
    for (int r = 0; r < b->group->ranks; r++)
        for (int e = 0; e < b->experts; e++) {
            uint32_t *count = &counts[(size_t)r * (size_t)b->experts + (size_t)e];
            uint64_t more = capacity[r] - *count;
            bool mine = e / b->local == rank;
            p.rows += mine ? more : 0;
            p.out += r == rank && !mine ? more : 0;
            p.back += r != rank && mine ? more : 0;
            *count = (uint32_t)capacity[r];
        }
    return p;
}
