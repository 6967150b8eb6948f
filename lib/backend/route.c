/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/route.h"

#include <stddef.h>
#include <string.h>

uint64_t epo_route_check(const epo_route_shape *s, const int64_t *experts, int tokens,
                         int32_t *copy) {
    uint64_t slots = (uint64_t)tokens * (uint64_t)s->top_k;
    for (uint64_t i = 0; i < slots; i++) {
        if (experts[i] < -1 || experts[i] >= s->experts)
            return i;
        copy[i] = (int32_t)experts[i];
    }
    return slots;
}

void epo_route_count(const epo_route_shape *s, const int32_t *experts, int tokens,
                     uint32_t *expert_rows, uint32_t *rank_rows) {
    int local = epo_route_local(s);
    memset(expert_rows, 0, (size_t)s->experts * sizeof *expert_rows);
    memset(rank_rows, 0, (size_t)s->ranks * sizeof *rank_rows);
    for (int t = 0; t < tokens; t++) {
        const int32_t *e = experts + (size_t)t * (size_t)s->top_k;
        for (int k = 0; k < s->top_k; k++) {
            if (e[k] < 0)
                continue;
            expert_rows[e[k]]++;
            int rank = e[k] / local, from = rank * local, seen = 0;
            for (int j = 0; j < k; j++)
                seen |= e[j] >= from && e[j] < from + local;
            rank_rows[rank] += !seen;
        }
    }
}

uint64_t epo_route_layout(const epo_route_shape *s, const uint32_t *counts, int rank,
                          uint64_t *first, uint64_t *count) {
    int local = epo_route_local(s);
    uint64_t align = (uint64_t)s->align, row = 0;
    for (int e = 0; e < local; e++) {
        uint64_t n = 0;
        for (int r = 0; r < s->ranks; r++)
            n += counts[(size_t)r * (size_t)s->experts + (size_t)(rank * local + e)];
        if (first != NULL)
            first[e] = row;
        if (count != NULL)
            count[e] = n;
        row += (n + align - 1) / align * align;
    }
    return row;
}

void epo_route_targets(const epo_route_shape *s, const uint32_t *counts, int source,
                       uint64_t *target) {
    for (int d = 0; d < s->ranks; d++)
        epo_route_layout(s, counts, d, target + (size_t)d * (size_t)epo_route_local(s), NULL);
    for (int r = 0; r < source; r++)
        for (int e = 0; e < s->experts; e++)
            target[e] += counts[(size_t)r * (size_t)s->experts + (size_t)e];
}

void epo_route_send_first(const epo_route_shape *s, const uint32_t *expert_rows,
                          uint64_t *expert_first) {
    uint64_t row = 0;
    for (int e = 0; e < s->experts; e++) {
        expert_first[e] = row;
        row += expert_rows[e];
    }
}

void epo_route_send(const epo_route_shape *s, const int32_t *experts, int tokens,
                    const uint64_t *expert_first, uint64_t *cursor, int32_t *token, int32_t *slot,
                    int32_t *row) {
    memcpy(cursor, expert_first, (size_t)s->experts * sizeof *cursor);
    for (int t = 0; t < tokens; t++) {
        for (int k = 0; k < s->top_k; k++) {
            size_t flat = (size_t)t * (size_t)s->top_k + (size_t)k;
            row[flat] = -1;
            if (experts[flat] < 0)
                continue;
            uint64_t at = cursor[experts[flat]]++;
            token[at] = t;
            slot[at] = (int32_t)flat;
            row[flat] = (int32_t)at;
        }
    }
}

void epo_route_returns(const epo_route_shape *s, const uint32_t *counts, int rank,
                       const uint64_t *expert_first, int32_t *first, int32_t *to) {
    const int local = epo_route_local(s);
    for (int r = 0; r < s->ranks; r++) {
        const uint32_t *of = counts + (size_t)r * (size_t)s->experts;
        uint64_t row = 0;
        for (int e = 0; e < rank * local; e++)
            row += of[e];
        for (int e = 0; e < local; e++) {
            const size_t at = (size_t)e * (size_t)s->ranks + (size_t)r;
            to[at] = (int32_t)row;
            row += of[rank * local + e];
            first[at] = r == 0 ? (int32_t)expert_first[e]
                               : first[at - 1] + (int32_t)(of - s->experts)[rank * local + e];
        }
    }
}

void epo_route_pad(const epo_route_shape *s, const uint64_t *first, const uint64_t *count,
                   uint64_t rows, int32_t *index) {
    int local = epo_route_local(s);
    for (int e = 0; e < local; e++) {
        uint64_t end = e + 1 < local ? first[e + 1] : rows;
        for (uint64_t i = first[e]; i < end; i++)
            index[i] = i < first[e] + count[e] ? (int32_t)i : -1;
    }
}
