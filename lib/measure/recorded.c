/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "measure/recorded.h"

#include <math.h>
#include <string.h>

static void note_name(measure_recorded *r, const epo_interval *i) {
    int n = 0;
    while (n < r->names && strncmp(r->name[n], i->name, sizeof r->name[n]) != 0)
        n++;
    if (n == MEASURE_NAMES)
        n = MEASURE_NAMES - 1; /* never seen: the engines have fewer kinds */
    else if (n == r->names) {
        memcpy(r->name[n], i->name, sizeof r->name[n]);
        r->best_ms[n] = INFINITY;
        r->names++;
    }
    r->now_ms[n] += (double)(i->end_ns - i->start_ns) * 1e-6;
}

epo_status measure_recorded_add(measure_recorded *r, const epo_interval *interval, uint64_t count,
                                uint64_t dropped) {
    epo_spans comm = {NULL, 0, 0}, compute = {NULL, 0, 0};
    epo_status status = EPO_OK;
    memset(r->now_ms, 0, sizeof r->now_ms);
    for (uint64_t i = 0; status == EPO_OK && i < count; i++) {
        r->chunks = interval[i].chunk >= r->chunks ? interval[i].chunk + 1 : r->chunks;
        if (interval[i].kind == EPO_INTERVAL_COMM)
            status = epo_spans_add(&comm, interval[i].start_ns, interval[i].end_ns);
        if (interval[i].kind == EPO_INTERVAL_COMPUTE) {
            status = epo_spans_add(&compute, interval[i].start_ns, interval[i].end_ns);
            note_name(r, &interval[i]);
        }
    }
    if (status == EPO_OK) {
        epo_spans_compare(&comm, &compute, &r->unions);
        r->dropped += dropped;
        for (int n = 0; n < r->names; n++)
            r->best_ms[n] = fmin(r->best_ms[n], r->now_ms[n]);
        if (r->passes < MEASURE_PASSES)
            r->ffn_ms[r->passes++] = (double)r->unions.compute * 1e-6;
    }
    epo_spans_free(&comm);
    epo_spans_free(&compute);
    return status;
}

double measure_recorded_best(const measure_recorded *r) {
    double best = 0;
    for (int n = 0; n < r->names; n++)
        best += r->best_ms[n];
    return best;
}
