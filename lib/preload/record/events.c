/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "preload/record/events.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "preload/record/recorder.h"

#define SLOTS (2 * EVENTS_NAMES_MAX) /* a power of two: at most half full */

typedef struct name_entry {
    char *mangled, *readable;
} name_entry;

struct events {
    event *list;
    size_t count, room, most;
    name_entry *names;
    size_t name_count;
    uint32_t *slots; /* index + 1 into names */
    const char *last_pointer;
    uint32_t last_name;
    events_lost lost;
};

epo_status events_create(size_t most, events **out) {
    events *e = calloc(1, sizeof *e);
    if (e != NULL) {
        e->most = most == 0 ? EVENTS_MAX : most;
        e->names = calloc(EVENTS_NAMES_MAX, sizeof *e->names);
        e->slots = calloc(SLOTS, sizeof *e->slots);
    }
    if (e == NULL || e->names == NULL || e->slots == NULL) {
        events_destroy(e);
        return epo_fail(EPO_E_NOMEM, "recorder: no memory");
    }
    *out = e;
    return EPO_OK;
}

void events_destroy(events *e) {
    if (e == NULL)
        return;
    for (size_t i = 0; i < e->name_count; i++) {
        free(e->names[i].mangled);
        free(e->names[i].readable);
    }
    free(e->names);
    free(e->slots);
    free(e->list);
    free(e);
}

void events_clear(events *e) {
    e->count = 0;
    memset(&e->lost, 0, sizeof e->lost);
}

/* ---- names ---- */

static uint32_t hash_of(const char *text) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (; *text != '\0'; text++)
        hash = (hash ^ (unsigned char)*text) * UINT64_C(0x100000001b3);
    return (uint32_t)(hash ^ hash >> 32);
}

static bool add_name(events *e, const char *mangled) {
    char readable[EVENTS_NAME_BYTES];
    events_readable(mangled, readable, sizeof readable);
    const name_entry n = {strdup(mangled), strdup(readable)};
    if (n.mangled == NULL || n.readable == NULL) {
        free(n.mangled);
        free(n.readable);
        return false;
    }
    e->names[e->name_count] = n;
    return true;
}

/* Index + 1; 0: neither room nor memory.  A name's bytes are compared, not where they stand:
 * that may be another's when a module was unloaded. */
static uint32_t name_of(events *e, const char *mangled) {
    if (mangled == NULL)
        return 0;
    if (mangled == e->last_pointer && strcmp(e->names[e->last_name - 1].mangled, mangled) == 0)
        return e->last_name;
    uint32_t at = hash_of(mangled) % SLOTS;
    while (e->slots[at] != 0 && strcmp(e->names[e->slots[at] - 1].mangled, mangled) != 0)
        at = (at + 1) % SLOTS;
    if (e->slots[at] == 0) {
        if (e->name_count == EVENTS_NAMES_MAX || !add_name(e, mangled))
            return 0;
        e->slots[at] = (uint32_t)++e->name_count;
    }
    e->last_pointer = mangled;
    e->last_name = e->slots[at];
    return e->last_name;
}

const char *events_name(const events *e, uint32_t name) {
    return name == 0 || name > e->name_count ? "(no name)" : e->names[name - 1].readable;
}

/* ---- records ---- */

static uint64_t field64(const cupti_record *r, size_t offset) {
    uint64_t value;
    memcpy(&value, (const char *)r + offset, sizeof value);
    return value;
}

static uint32_t field32(const cupti_record *r, size_t offset) {
    uint32_t value;
    memcpy(&value, (const char *)r + offset, sizeof value);
    return value;
}

static bool is_copy(cupti_kind kind) {
    return kind == CUPTI_KIND_MEMCPY || kind == CUPTI_KIND_MEMCPY_PEER;
}

/* False: of a kind that was not asked for. */
static bool read_record(events *e, const cupti_record *r, event *out) {
    const bool kernel = r->kind == CUPTI_KIND_CONCURRENT_KERNEL || r->kind == CUPTI_KIND_KERNEL;
    if (!kernel && !is_copy(r->kind) && r->kind != CUPTI_KIND_MEMSET)
        return false;
    memset(out, 0, sizeof *out);
    out->kind = kernel ? EVENT_KERNEL : is_copy(r->kind) ? EVENT_COPY : EVENT_SET;
    out->start = (int64_t)field64(r, kernel ? CUPTI_KERNEL_START : CUPTI_COPY_START);
    out->end = (int64_t)field64(r, kernel ? CUPTI_KERNEL_END : CUPTI_COPY_END);
    out->device = (uint16_t)field32(r, kernel ? CUPTI_KERNEL_DEVICE : CUPTI_COPY_DEVICE);
    out->stream = field32(r, kernel ? CUPTI_KERNEL_STREAM : CUPTI_COPY_STREAM);
    if (kernel) {
        const char *name;
        memcpy(&name, (const char *)r + CUPTI_KERNEL_NAME, sizeof name);
        out->name = name_of(e, name);
    } else if (out->kind == EVENT_COPY) {
        out->copy = r->kind == CUPTI_KIND_MEMCPY_PEER ? CUPTI_COPY_PEER
                                                      : (uint8_t)((const char *)r)[CUPTI_COPY_KIND];
    } else {
        const uint32_t value = field32(r, CUPTI_SET_VALUE);
        if (value == RECORDER_MARK_BEGIN || value == RECORDER_MARK_END)
            out->kind = EVENT_MARK;
        out->copy = value == RECORDER_MARK_END;
    }
    return true;
}

static bool keep(events *e, const event *v) {
    if (e->count == e->room) {
        size_t room = e->room == 0 ? 4096 : 2 * e->room;
        room = room > e->most ? e->most : room;
        event *grown = e->count < room ? reallocarray(e->list, room, sizeof *grown) : NULL;
        if (grown == NULL) {
            e->lost.full++;
            return false;
        }
        e->list = grown;
        e->room = room;
    }
    e->list[e->count++] = *v;
    return true;
}

bool events_take(events *e, events_next *next, uint8_t *buffer, size_t valid) {
    cupti_record *record = NULL;
    event v;
    bool fits = true;
    while (next(buffer, valid, &record) == CUPTI_OK && record != NULL) {
        const bool known = read_record(e, record, &v);
        if (known && (v.end <= 0 || v.start <= 0))
            e->lost.unfinished++;
        else if (!known || v.end < v.start)
            e->lost.strange++;
        else
            fits = keep(e, &v) && fits;
    }
    return fits;
}

/* ---- exchanges ---- */

static bool same_stream(const event *a, const event *b) {
    return a->device == b->device && a->stream == b->stream;
}

static int compare_marks(const void *a, const void *b) {
    const event *x = a, *y = b;
    if (x->device != y->device)
        return x->device < y->device ? -1 : 1;
    if (x->stream != y->stream)
        return x->stream < y->stream ? -1 : 1;
    return (x->start > y->start) - (x->start < y->start);
}

epo_status events_pair_marks(events *e) {
    size_t count = 0, n = 0;
    for (size_t i = 0; i < e->count; i++)
        count += e->list[i].kind == EVENT_MARK;
    if (count == 0)
        return EPO_OK;
    event *marks = reallocarray(NULL, count, sizeof *marks); /* the list itself moves */
    if (marks == NULL)
        return epo_fail(EPO_E_NOMEM, "recorder: no memory");
    for (size_t i = 0; i < e->count; i++)
        if (e->list[i].kind == EVENT_MARK)
            marks[n++] = e->list[i];
    qsort(marks, n, sizeof *marks, compare_marks);
    for (size_t i = 0; i + 1 < n; i++) {
        if (marks[i].copy || !marks[i + 1].copy || !same_stream(&marks[i], &marks[i + 1]))
            continue;
        event exchange = marks[i];
        exchange.kind = EVENT_EXCHANGE;
        exchange.end = marks[i + 1].end;
        (void)keep(e, &exchange);
    }
    free(marks);
    return EPO_OK;
}

size_t events_count(const events *e) { return e->count; }
const event *events_at(const events *e, size_t i) { return &e->list[i]; }
bool events_full(const events *e) { return e->lost.full > 0; }
events_lost events_lost_of(const events *e) { return e->lost; }
