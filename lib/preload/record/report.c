/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "preload/record/report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"

/* Before the end: kernels that ran when recording was switched off have no end. */
#define TAIL_NS 20000000

void report_cut(int64_t first, int64_t last, int64_t step, size_t most, int64_t *from, int64_t *to,
                size_t *steps) {
    const int64_t length = last > first ? last - first : 0;
    int64_t whole = step > 0 ? length / step : 0;
    if (whole > 1)
        whole--;
    if (most > 0 && (uint64_t)whole > most)
        whole = (int64_t)most;
    *steps = (size_t)whole;
    *to = last;
    *from = whole > 0 ? last - whole * step : first;
}

/* ---- measuring ---- */

static epo_copy_kind copy_of(const event *v) {
    if (v->kind == EVENT_SET)
        return EPO_COPY_HOST;
    return v->copy == CUPTI_COPY_PEER               ? EPO_COPY_PEER
           : v->copy == CUPTI_COPY_DEVICE_TO_DEVICE ? EPO_COPY_LOCAL
                                                    : EPO_COPY_HOST;
}

static epo_status add_event(epo_profile *p, const event *v, const char *name) {
    uint32_t handle;
    if (v->kind == EVENT_MARK)
        return EPO_OK;
    if (v->kind == EVENT_EXCHANGE)
        return epo_profile_interval(p, 0, v->device, v->stream, EPO_KERNEL_EP_COMM, REPORT_EXCHANGE,
                                    v->start, v->end);
    if (v->kind != EVENT_KERNEL)
        return epo_profile_copy(p, 0, v->device, v->stream, true, copy_of(v), v->start, v->end);
    epo_status status = epo_profile_intern(p, name, &handle);
    return status != EPO_OK
               ? status
               : epo_profile_kernel(p, 0, v->device, v->stream, handle, v->start, v->end);
}

static bool is_inside(const event *v, int64_t from, int64_t to) {
    return v->end > from && v->start < to;
}

static epo_status load(const events *e, int64_t from, int64_t to, epo_profile **out) {
    const epo_profile_options options = {.budget = 2 * events_count(e) + 4096}; /* never a file */
    epo_profile *p = NULL;
    epo_status status = epo_profile_create(&options, EPO_PROFILE_CHROME, &p);
    for (size_t i = 0; i < events_count(e) && status == EPO_OK; i++) {
        const event *v = events_at(e, i);
        if (is_inside(v, from, to))
            status = add_event(p, v, events_name(e, v->name));
    }
    if (status == EPO_OK)
        status = epo_profile_finish(p);
    if (status == EPO_OK)
        *out = p;
    else
        epo_profile_destroy(p);
    return status;
}

static void find_bounds(const events *e, int64_t opened, int64_t closed, int64_t *first,
                        int64_t *last) {
    int64_t begin = INT64_MAX, end = INT64_MIN;
    for (size_t i = 0; i < events_count(e); i++) {
        const event *v = events_at(e, i);
        begin = v->start < begin ? v->start : begin;
        end = v->end > end ? v->end : end;
    }
    *first = begin > opened ? begin : opened;
    *last = end < closed - TAIL_NS ? end : closed - TAIL_NS;
}

epo_status report_measure(report *r, const events *e, int64_t opened, int64_t closed) {
    epo_profile *p = NULL;
    int64_t first, last;
    if (events_count(e) == 0)
        return epo_fail(EPO_E_ARG, "no kernel and no copy ran while it was recording");
    find_bounds(e, opened, closed, &first, &last);
    if (first >= last)
        return epo_fail(EPO_E_ARG, "what ran ended before it was recorded for %d ms",
                        TAIL_NS / 1000000);
    report_cut(first, last, r->step, r->most, &r->from, &r->to, &r->steps);
    epo_status status = load(e, r->from, r->to, &p);
    const size_t units = status == EPO_OK ? epo_profile_tell(p).units : 0;
    r->devices = 0;
    for (size_t i = 0; i < units && i < REPORT_DEVICES && status == EPO_OK; i++) {
        const epo_profile_unit *u = epo_profile_unit_at(p, i);
        report_device *d = &r->device[r->devices++];
        *d = (report_device){.device = u->device, .kernels = u->kernels, .copies = u->copies};
        status = epo_profile_measure(p, i, r->from, r->to, &d->times, NULL);
    }
    epo_profile_destroy(p);
    return status;
}

/* ---- one line ---- */

/* The GPU that waits longest. */
static const report_device *worst_of(const report *r) {
    const report_device *worst = NULL;
    for (int i = 0; i < r->devices; i++)
        if (worst == NULL || r->device[i].times.exposed > worst->times.exposed ||
            (r->device[i].times.exposed == worst->times.exposed &&
             r->device[i].times.comm > worst->times.comm))
            worst = &r->device[i];
    return worst;
}

/* Three digits that count, as people read them: 819, 81.9, 8.19. */
static void put_ms(char *out, size_t room, double ns) {
    const double ms = ns * 1e-6;
    snprintf(out, room, "%.*f", ms >= 99.5 ? 0 : ms >= 9.95 ? 1 : 2, ms);
}

static void append(char line[REPORT_LINE], const char *text) {
    const size_t used = strlen(line);
    snprintf(line + used, REPORT_LINE - used, "%s", text);
}

static void append_doubts(const report *r, char line[REPORT_LINE]) {
    const uint64_t lost = r->dropped + r->lost.full + r->lost.strange;
    char text[CUPTI_TEXT + 64];
    if (r->by[0] != '\0') {
        snprintf(text, sizeof text, "; a profiler ended it (%s)", r->by);
        append(line, text);
    }
    if (r->full)
        append(line, "; memory ended it");
    if (lost > 0) {
        snprintf(text, sizeof text, "; %llu records were lost", (unsigned long long)lost);
        append(line, text);
    }
}

void report_line(const report *r, char line[REPORT_LINE]) {
    const report_device *d = worst_of(r);
    char exposed[32], whole[32], other[32];
    line[0] = '\0';
    if (r->why[0] != '\0' || d == NULL) {
        snprintf(line, REPORT_LINE, "communication was not recorded: %s",
                 r->why[0] != '\0' ? r->why : "nothing ran");
        return;
    }
    const double parts = r->steps > 0 ? (double)r->steps : 1;
    put_ms(exposed, sizeof exposed, (double)d->times.exposed / parts);
    put_ms(other, sizeof other, (double)d->times.of[EPO_KERNEL_OTHER_COMM] / parts);
    put_ms(whole, sizeof whole, (double)(r->to - r->from) / parts);
    const char *per = r->steps > 0 ? "/step" : "", *unit = r->steps > 0 ? "" : " ms";
    if (d->times.comm == 0)
        snprintf(line, REPORT_LINE, "no expert communication; other communication %s ms%s of %s%s",
                 other, per, whole, unit);
    else
        snprintf(line, REPORT_LINE, "exposed communication %s ms%s of %s%s, %.0f %% hidden",
                 exposed, per, whole, unit,
                 100 * (double)d->times.overlapped / (double)d->times.comm);
    char text[96];
    if (r->steps > 0)
        snprintf(text, sizeof text, " (%zu step%s of rank %d", r->steps, r->steps == 1 ? "" : "s",
                 r->rank);
    else
        snprintf(text, sizeof text, " (rank %d; its steps were not recognised", r->rank);
    append(line, text);
    if (r->devices > 1) {
        snprintf(text, sizeof text, ", GPU %lld of %d", (long long)d->device, r->devices);
        append(line, text);
    }
    append(line, ")");
    append_doubts(r, line);
}
