/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/intervals.h"

#include <inttypes.h>
#include <stdlib.h>

#include "core/status.h"

static epo_status reserve_one(epo_spans *set) {
    if (set->count < set->room)
        return EPO_OK;
    if (set->room > SIZE_MAX / 2 / sizeof(epo_span))
        return epo_fail(EPO_E_NOMEM, "intervals: more than %zu do not fit in memory", set->room);
    size_t room = set->room < 64 ? 64 : set->room * 2;
    epo_span *span = realloc(set->span, room * sizeof *span);
    if (span == NULL)
        return epo_fail(EPO_E_NOMEM, "intervals: no memory for %zu of %zu bytes", room,
                        sizeof *span);
    set->span = span;
    set->room = room;
    return EPO_OK;
}

epo_status epo_spans_add(epo_spans *set, int64_t start, int64_t end) {
    if (end < start)
        return epo_fail(EPO_E_ARG, "interval: end %" PRId64 " lies before start %" PRId64, end,
                        start);
    epo_status status = reserve_one(set);
    if (status == EPO_OK)
        set->span[set->count++] = (epo_span){start, end};
    return status;
}

void epo_spans_free(epo_spans *set) {
    free(set->span);
    *set = (epo_spans){NULL, 0, 0};
}

static int by_start(const void *a, const void *b) {
    int64_t x = ((const epo_span *)a)->start, y = ((const epo_span *)b)->start;
    return (x > y) - (x < y);
}

void epo_spans_merge(epo_spans *set) {
    size_t kept = 0;
    if (set->count > 1)
        qsort(set->span, set->count, sizeof *set->span, by_start);
    for (size_t i = 0; i < set->count; i++) {
        epo_span s = set->span[i];
        if (s.start == s.end)
            continue;
        if (kept > 0 && s.start <= set->span[kept - 1].end) {
            if (s.end > set->span[kept - 1].end)
                set->span[kept - 1].end = s.end;
        } else {
            set->span[kept++] = s;
        }
    }
    set->count = kept;
}

static uint64_t length_of(int64_t start, int64_t end) { return (uint64_t)end - (uint64_t)start; }

uint64_t epo_spans_length(const epo_spans *merged) {
    uint64_t sum = 0;
    for (size_t i = 0; i < merged->count; i++)
        sum += length_of(merged->span[i].start, merged->span[i].end);
    return sum;
}

uint64_t epo_spans_common(const epo_spans *a, const epo_spans *b) {
    uint64_t sum = 0;
    for (size_t i = 0, j = 0; i < a->count && j < b->count;) {
        const epo_span *x = &a->span[i], *y = &b->span[j];
        int64_t start = x->start > y->start ? x->start : y->start;
        int64_t end = x->end < y->end ? x->end : y->end;
        if (start < end)
            sum += length_of(start, end);
        if (x->end <= y->end)
            i++;
        else
            j++;
    }
    return sum;
}

void epo_spans_compare(epo_spans *comm, epo_spans *compute, epo_overlap_times *out) {
    epo_spans_merge(comm);
    epo_spans_merge(compute);
    out->comm = epo_spans_length(comm);
    out->compute = epo_spans_length(compute);
    out->overlapped = epo_spans_common(comm, compute);
    /* Inclusion and exclusion: |A u B| - |B| = |A| - |A n B|, exact in integers. */
    out->exposed = out->comm - out->overlapped;
    out->both = out->compute + out->exposed;
}
