/* SPDX-License-Identifier: Apache-2.0
 *
 * write.c - a window as a Chrome trace, which ep-overlap profile and every trace viewer
 * read, with the report as one more member.
 */
#include "config.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/status.h"
#include "preload/record/report.h"

#define NAME_SHOWN 240 /* bytes of a kernel's name, where its class is the same with them alone */

/* Bytes of the UTF-8 character at `c`, of `most`; 0: there is none (RFC 3629). */
static size_t character(const unsigned char *c, size_t most) {
    const size_t length = *c < 0x80 ? 1 : *c < 0xc2 ? 0 : *c < 0xe0 ? 2 : *c < 0xf0 ? 3 : 4;
    const unsigned char least = *c == 0xe0 ? 0xa0 : *c == 0xf0 ? 0x90 : 0x80;
    const unsigned char last = *c == 0xed ? 0x9f : *c == 0xf4 ? 0x8f : 0xbf;
    if (length > most || *c > 0xf4 || (length > 1 && (c[1] < least || c[1] > last)))
        return 0;
    for (size_t i = 2; i < length; i++)
        if (c[i] < 0x80 || c[i] > 0xbf)
            return 0;
    return length;
}

/* JSON is UTF-8; names and paths are any bytes. */
static void put_text(FILE *f, const char *text, size_t most) {
    const unsigned char *c = (const unsigned char *)text, *end = c + strnlen(text, most);
    fputc('"', f);
    while (c < end) {
        const size_t length = character(c, (size_t)(end - c));
        if (*c == '"' || *c == '\\')
            fputc('\\', f);
        if (length == 0 || *c < 0x20)
            fputc(length == 0 ? '?' : ' ', f);
        else
            fwrite(c, 1, length, f);
        c += length > 0 ? length : 1;
    }
    fputc('"', f);
}

static void put_member(FILE *f, const char *name, const char *text) {
    fprintf(f, ", \"%s\": ", name);
    if (text[0] == '\0')
        fputs("null", f);
    else
        put_text(f, text, strlen(text));
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
    put_text(f, name, v->kind == EVENT_KERNEL ? shown(name) : strlen(name));
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

/* 0, or what went wrong, as errno has it: also where only a part could be written. */
static int put_file(const report *r, const events *e, const char *path) {
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    FILE *f = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (f == NULL) {
        const int error = errno;
        if (fd >= 0)
            close(fd);
        return error;
    }
    put_all(f, r, e);
    const bool whole = fflush(f) == 0 && ferror(f) == 0;
    const int error = errno;
    if (fclose(f) != 0)
        return errno;
    return whole ? 0 : error != 0 ? error : EIO;
}

/* Under its own name only when it is whole: the process may end before. */
epo_status report_write(const report *r, const events *e, const char *path) {
    char part[4096 + 16];
    const int n = snprintf(part, sizeof part, "%s.%d", path, (int)getpid());
    if (n < 0 || (size_t)n >= sizeof part)
        return epo_fail(EPO_E_SYSTEM, "%s: %s", path, strerror(ENAMETOOLONG));
    int error = put_file(r, e, part);
    if (error == 0 && rename(part, path) != 0)
        error = errno;
    if (error == 0)
        return EPO_OK;
    (void)unlink(part);
    return epo_fail(EPO_E_SYSTEM, "%s: %s", path, strerror(error));
}
