/* SPDX-License-Identifier: Apache-2.0
 *
 * write.c - a window as a Chrome trace, which ep-overlap profile and every trace viewer
 * read, with the report as one more member.
 */
#include "config.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "preload/record/file.h"
#include "preload/record/report.h"

#define NAME_SHOWN 240 /* bytes of a kernel's name, where its class is the same with them alone */

static void put_member(FILE *f, const char *name, const char *text) {
    fprintf(f, ", \"%s\": ", name);
    if (text[0] == '\0')
        fputs("null", f);
    else
        record_text_put(f, text, strlen(text));
}

/* ---- events ---- */

static size_t shown(const char *name) {
    char head[NAME_SHOWN + 1];
    const size_t length = strlen(name);
    if (length <= NAME_SHOWN)
        return length;
    snprintf(head, sizeof head, "%.*s", NAME_SHOWN, name);
    return epo_kernel_classify(NULL, head) == epo_kernel_classify(NULL, name) ? NAME_SHOWN : length;
}

static const char *copy_name(const event *v) {
    static const char *const names[] = {"Memcpy (kind unknown)",
                                        "Memcpy HtoD",
                                        "Memcpy DtoH",
                                        "Memcpy HtoA",
                                        "Memcpy AtoH",
                                        "Memcpy AtoA",
                                        "Memcpy AtoD",
                                        "Memcpy DtoA",
                                        "Memcpy DtoD (Device -> Device)",
                                        "Memcpy HtoH",
                                        "Memcpy PtoP (Device -> Device)"};
    return names[v->copy < sizeof names / sizeof *names ? v->copy : 0];
}

/* Microseconds with three decimals: nanoseconds, exactly. */
static void put_event(FILE *f, const events *e, const event *v, int64_t from, int64_t to) {
    const int64_t start = v->start > from ? v->start : from, end = v->end < to ? v->end : to;
    const char *name = v->kind == EVENT_KERNEL     ? events_name(e, v->name)
                       : v->kind == EVENT_COPY     ? copy_name(v)
                       : v->kind == EVENT_EXCHANGE ? REPORT_EXCHANGE
                                                   : "Memset (Device)";
    const char *cat = v->kind == EVENT_KERNEL     ? "kernel"
                      : v->kind == EVENT_COPY     ? "gpu_memcpy"
                      : v->kind == EVENT_EXCHANGE ? "ep_comm" /* a class: pid is the process then */
                                                  : "gpu_memset";
    fprintf(f, "{\"ph\": \"X\", \"cat\": \"%s\", \"name\": ", cat);
    record_text_put(f, name, v->kind == EVENT_KERNEL ? shown(name) : strlen(name));
    fprintf(f,
            ", \"ts\": %" PRId64 ".%03d, \"dur\": %" PRId64 ".%03d, \"pid\": %u, \"tid\": %u, "
            "\"args\": {\"device\": %u, \"stream\": %u}}",
            start / 1000, (int)(start % 1000), (end - start) / 1000, (int)((end - start) % 1000),
            v->kind == EVENT_EXCHANGE ? 0u : v->device, v->stream, v->device, v->stream);
}

static void put_events(FILE *f, const report *r, const events *e) {
    const char *before = "\n";
    for (size_t i = 0; i < events_count(e); i++) {
        const event *v = events_at(e, i);
        if (v->kind == EVENT_MARK || v->end <= r->from || v->start >= r->to)
            continue;
        fputs(before, f);
        put_event(f, e, v, r->from, r->to);
        before = ",\n";
    }
}

/* ---- the report ---- */

static void put_device(FILE *f, const report_device *d) {
    const epo_profile_times *t = &d->times;
    fprintf(f,
            "{\"device\": %" PRId64 ", \"kernels\": %" PRIu64 ", \"copies\": %" PRIu64
            ", \"busy\": %" PRIu64 ", \"overlapped\": %" PRIu64 ", \"exposed\": %" PRIu64
            ", \"overlapped_any\": %" PRIu64,
            d->device, d->kernels, d->copies, t->busy, t->overlapped, t->exposed,
            t->overlapped_any);
    for (int c = 0; c < EPO_KERNEL_CLASSES; c++)
        fprintf(f, ", \"%s\": %" PRIu64, epo_kernel_class_name((epo_kernel_class)c), t->of[c]);
    fputc('}', f);
}

static void put_report(FILE *f, const report *r) {
    char line[REPORT_LINE];
    report_line(r, line);
    fprintf(f, "\"ep_overlap\": {\"version\": 1, \"rank\": %d, \"ranks\": %d, \"pid\": %d", r->rank,
            r->ranks, (int)getpid());
    put_member(f, "line", line);
    put_member(f, "not_recorded", r->why);
    put_member(f, "ended_by", r->by);
    put_member(f, "cupti", r->cupti);
    fprintf(f,
            ", \"cupti_version\": %" PRIu32 ", \"steps\": %zu, \"step_ns\": %" PRId64
            ", \"calls_per_step\": %zu, \"measured_ns\": %" PRId64 ",\n \"interrupted\": %" PRIu64
            ", \"lost\": {\"dropped\": %" PRIu64 ", \"no_buffer\": %" PRIu64 ", \"full\": %" PRIu64
            ", \"unfinished\": %" PRIu64 ", \"strange\": %" PRIu64 "},\n \"nanoseconds\": [",
            r->cupti_version, r->steps, r->step, r->calls, r->to - r->from, r->interrupted,
            r->dropped, r->refused, r->lost.full, r->lost.unfinished, r->lost.strange);
    for (int i = 0; i < r->devices; i++) {
        fputs(i == 0 ? "" : ",\n  ", f);
        put_device(f, &r->device[i]);
    }
    fputs("]}", f);
}

static void put_all(FILE *f, const report *r, const events *e) {
    fputc('{', f);
    put_report(f, r);
    fputs(",\n\"traceEvents\": [", f);
    if (r->why[0] == '\0')
        put_events(f, r, e);
    fputs("\n]}\n", f);
}

typedef struct window { /* what record_file_write() gets */
    const report *report;
    const events *events;
} window;

static void put_window(FILE *f, const void *what) {
    const window *w = what;
    put_all(f, w->report, w->events);
}

epo_status report_write(const report *r, const events *e, const char *path) {
    const window w = {r, e};
    return record_file_write(path, put_window, &w);
}
