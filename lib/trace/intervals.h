/* SPDX-License-Identifier: Apache-2.0
 *
 * intervals.h - exact measures of sets of time intervals, in nanoseconds.
 *
 * Durations of concurrent work may not be added; unions may.  With U(s) the union
 * of a set's intervals and |.| its length:
 *     overlapped communication = |U(comm) n U(compute)|
 *     exposed communication    = |U(comm u compute)| - |U(compute)|
 * which add up to |U(comm)|.
 *
 * An interval is [start, end): touching intervals neither overlap nor leave a gap,
 * an empty one (end == start) has no length.
 */
#ifndef EPO_TRACE_INTERVALS_H
#define EPO_TRACE_INTERVALS_H

#include <stddef.h>
#include <stdint.h>

#include "ep_overlap.h"

typedef struct epo_span {
    int64_t start, end;
} epo_span;

/* A growing list of spans, in any order, nested or not.  Zero-initialise. */
typedef struct epo_spans {
    epo_span *span;
    size_t count, room;
} epo_spans;

/* EPO_E_ARG if end < start, EPO_E_NOMEM; the set then stays as it was. */
epo_status epo_spans_add(epo_spans *set, int64_t start, int64_t end);
void epo_spans_free(epo_spans *set);

/* Sorts and merges in place: disjoint, ascending, without touching or empty
 * spans.  O(n log n), no memory. */
void epo_spans_merge(epo_spans *set);
/* Sums over merged sets; 2^64 ns (584 years) cannot be exceeded by 64-bit ends. */
uint64_t epo_spans_length(const epo_spans *merged);
uint64_t epo_spans_common(const epo_spans *merged_a, const epo_spans *merged_b);

/* Communication against computation of one process or device. */
typedef struct epo_overlap_times {
    uint64_t comm, compute, both; /* |U(comm)|, |U(compute)|, |U(comm u compute)| */
    uint64_t overlapped, exposed; /* of comm */
} epo_overlap_times;

/* Merges both sets. */
void epo_spans_compare(epo_spans *comm, epo_spans *compute, epo_overlap_times *out);

#endif
