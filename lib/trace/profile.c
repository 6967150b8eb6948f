/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/profile.h"

#include "core/status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STREAMS_MAX 32768
#define NAME_MAX_ 1024 /* bytes kept of a kernel's name; the class is told from all of it */

typedef struct unit {
    epo_profile_unit tell;
    epo_span_set *set[EPO_KERNEL_CLASSES];
    int64_t first, last;
} unit;

typedef struct stream {
    int64_t process, device, id;
    unit *unit;
    epo_span_set *local_copies; /* their class hangs on what else the stream does */
    bool has_ep_comm, has_send_recv;
} stream;

typedef struct name_entry {
    char *text;
    epo_kernel_class kind;
    bool send_recv, flex;
    uint64_t count;
} name_entry;

/* Where entries of a list stand, by hash: open addressing, at most half full. */
typedef struct place {
    uint32_t index, hash; /* index + 1; 0: free */
} place;

typedef struct table {
    place *place;
    size_t count, used; /* count: a power of two */
} table;

struct epo_profile {
    epo_profile_options options;
    epo_profile_facts facts;
    epo_span_pool *pool;
    unit **units; /* pointers stay when the list grows */
    size_t unit_room;
    stream *streams;
    size_t stream_count, stream_room;
    table stream_table;
    uint32_t last_stream; /* index + 1: kernels come in rows of one stream */
    name_entry *names;
    size_t name_count, name_room;
    table name_table;
};

static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 32;
}

static epo_status no_memory(void) { return epo_fail(EPO_E_NOMEM, "profile: no memory"); }

static place *table_begin(const table *t, uint64_t hash) {
    return &t->place[hash & (t->count - 1)];
}

static place *table_next(const table *t, const place *at) {
    return &t->place[(size_t)(at - t->place + 1) & (t->count - 1)];
}

static epo_status table_grow(table *t) {
    table larger = {.count = t->count == 0 ? 64 : t->count * 2, .used = t->used};
    larger.place = calloc(larger.count, sizeof *larger.place);
    if (larger.place == NULL)
        return no_memory();
    for (size_t i = 0; i < t->count; i++) {
        if (t->place[i].index == 0)
            continue;
        place *at = table_begin(&larger, t->place[i].hash);
        while (at->index != 0)
            at = table_next(&larger, at);
        *at = t->place[i];
    }
    free(t->place);
    *t = larger;
    return EPO_OK;
}

/* A new entry, at the free place that the search for it ended at. */
static epo_status table_add(table *t, place *at, uint64_t hash, size_t index) {
    *at = (place){.index = (uint32_t)index + 1, .hash = (uint32_t)hash};
    return ++t->used > t->count / 2 ? table_grow(t) : EPO_OK;
}

epo_status epo_profile_create(const epo_profile_options *options, epo_profile_kind kind,
                              epo_profile **out) {
    epo_profile *p = calloc(1, sizeof *p);
    if (p == NULL)
        return no_memory();
    p->options = *options;
    p->facts.kind = kind;
    epo_status status = table_grow(&p->stream_table);
    if (status == EPO_OK)
        status = table_grow(&p->name_table);
    if (status == EPO_OK)
        status = epo_span_pool_create(options->budget == 0 ? EPO_SPAN_BUDGET : options->budget,
                                      &p->pool);
    if (status != EPO_OK) {
        epo_profile_destroy(p);
        return status;
    }
    *out = p;
    return EPO_OK;
}

void epo_profile_destroy(epo_profile *p) {
    if (p == NULL)
        return;
    epo_span_pool_destroy(p->pool);
    for (size_t i = 0; i < p->facts.units; i++)
        free(p->units[i]);
    for (size_t i = 0; i < p->name_count; i++)
        free(p->names[i].text);
    free(p->units);
    free(p->streams);
    free(p->stream_table.place);
    free(p->names);
    free(p->name_table.place);
    free(p);
}

static bool grow(void **list, size_t *room, size_t count, size_t size) {
    if (count < *room)
        return true;
    size_t wanted = *room == 0 ? 64 : *room * 2;
    void *grown = reallocarray(*list, wanted, size);
    if (grown == NULL)
        return false;
    *list = grown;
    *room = wanted;
    return true;
}

static epo_status find_unit(epo_profile *p, int64_t process, int64_t device, unit **out) {
    for (size_t i = p->facts.units; i-- > 0;)
        if (p->units[i]->tell.process == process && p->units[i]->tell.device == device) {
            *out = p->units[i];
            return EPO_OK;
        }
    if (p->facts.units == EPO_PROFILE_UNITS_MAX)
        return epo_fail(EPO_E_OVERFLOW, "profile: more than %d processes and devices",
                        EPO_PROFILE_UNITS_MAX);
    if (!grow((void **)&p->units, &p->unit_room, p->facts.units, sizeof(unit *)))
        return no_memory();
    unit *u = calloc(1, sizeof *u);
    if (u == NULL)
        return no_memory();
    u->tell.process = process;
    u->tell.device = device;
    u->first = INT64_MAX;
    u->last = INT64_MIN;
    p->units[p->facts.units++] = u;
    for (int c = 0; c < EPO_KERNEL_CLASSES; c++) {
        epo_status status = epo_span_set_create(p->pool, &u->set[c]);
        if (status != EPO_OK)
            return status;
    }
    *out = u;
    return EPO_OK;
}

static bool is_stream(const stream *s, int64_t process, int64_t device, int64_t id) {
    return s->id == id && s->device == device && s->process == process;
}

static epo_status find_stream(epo_profile *p, int64_t process, int64_t device, int64_t id,
                              stream **out) {
    if (p->last_stream != 0 && is_stream(&p->streams[p->last_stream - 1], process, device, id)) {
        *out = &p->streams[p->last_stream - 1];
        return EPO_OK;
    }
    uint64_t hash = mix(mix(mix(0, (uint64_t)process), (uint64_t)device), (uint64_t)id);
    place *at = table_begin(&p->stream_table, hash);
    while (at->index != 0) {
        if (is_stream(&p->streams[at->index - 1], process, device, id)) {
            p->last_stream = at->index;
            *out = &p->streams[p->last_stream - 1];
            return EPO_OK;
        }
        at = table_next(&p->stream_table, at);
    }
    if (p->stream_count == STREAMS_MAX)
        return epo_fail(EPO_E_OVERFLOW, "profile: more than %d streams", STREAMS_MAX);
    if (!grow((void **)&p->streams, &p->stream_room, p->stream_count, sizeof(stream)))
        return no_memory();
    unit *u = NULL;
    epo_status status = find_unit(p, process, device, &u);
    if (status != EPO_OK)
        return status;
    p->streams[p->stream_count++] =
        (stream){.process = process, .device = device, .id = id, .unit = u};
    p->last_stream = (uint32_t)p->stream_count;
    *out = &p->streams[p->stream_count - 1];
    return table_add(&p->stream_table, at, hash, p->stream_count - 1);
}

static uint64_t hash_of(const char *text, size_t length) {
    uint64_t hash = length, word;
    for (; length >= sizeof word; text += sizeof word, length -= sizeof word) {
        memcpy(&word, text, sizeof word);
        hash = mix(hash, word);
    }
    word = 0;
    memcpy(&word, text, length);
    return mix(hash, word);
}

epo_status epo_profile_intern(epo_profile *p, const char *name, uint32_t *handle) {
    size_t length = strlen(name);
    uint64_t hash = hash_of(name, length);
    place *at = table_begin(&p->name_table, hash);
    size_t kept = length < NAME_MAX_ ? length : NAME_MAX_;
    for (; at->index != 0; at = table_next(&p->name_table, at)) {
        const char *text = p->names[at->index - 1].text;
        if (strncmp(text, name, kept) == 0 && text[kept] == '\0') {
            *handle = at->index;
            return EPO_OK;
        }
    }
    if (p->name_count == EPO_PROFILE_NAMES_MAX)
        return epo_fail(EPO_E_OVERFLOW, "profile: more than %d names of kernels",
                        EPO_PROFILE_NAMES_MAX);
    if (!grow((void **)&p->names, &p->name_room, p->name_count, sizeof(name_entry)))
        return no_memory();
    name_entry made = {.text = strndup(name, NAME_MAX_),
                       .kind = epo_kernel_classify(p->options.patterns, name),
                       .send_recv = epo_kernel_is_send_recv(name),
                       .flex = epo_kernel_is_flex(name)};
    if (made.text == NULL)
        return no_memory();
    p->names[p->name_count++] = made;
    *handle = (uint32_t)p->name_count;
    return table_add(&p->name_table, at, hash, p->name_count - 1);
}

static bool is_pipeline_stream(const epo_profile *p, int64_t id) {
    for (size_t i = 0; i < p->options.pipeline_stream_count; i++)
        if (p->options.pipeline_streams[i] == id)
            return true;
    return false;
}

static void stretch(unit *u, int64_t start, int64_t end) {
    u->first = start < u->first ? start : u->first;
    u->last = end > u->last ? end : u->last;
}

epo_status epo_profile_kernel(epo_profile *p, int64_t process, int64_t device, int64_t id,
                              uint32_t name, int64_t start, int64_t end) {
    stream *s;
    if (end < start) {
        p->facts.skipped++;
        return EPO_OK;
    }
    epo_status status = find_stream(p, process, device, id, &s);
    if (status != EPO_OK)
        return status;
    name_entry *n = &p->names[name - 1];
    epo_kernel_class kind =
        n->send_recv && is_pipeline_stream(p, id) ? EPO_KERNEL_OTHER_COMM : n->kind;
    s->has_ep_comm = s->has_ep_comm || kind == EPO_KERNEL_EP_COMM;
    if (n->send_recv && kind == EPO_KERNEL_EP_COMM && !s->has_send_recv) {
        s->has_send_recv = true;
        s->unit->tell.send_recv_streams++;
    }
    n->count++;
    p->facts.kernels++;
    p->facts.flex_kernels += n->flex;
    s->unit->tell.kernels++;
    s->unit->tell.count[kind]++;
    stretch(s->unit, start, end);
    return epo_span_set_add(s->unit->set[kind], start, end);
}

epo_status epo_profile_interval(epo_profile *p, int64_t process, int64_t device, int64_t id,
                                epo_kernel_class kind, const char *name, int64_t start,
                                int64_t end) {
    uint32_t handle;
    epo_status status = epo_profile_intern(p, name, &handle);
    if (status != EPO_OK)
        return status;
    p->names[handle - 1].kind = kind;
    p->names[handle - 1].send_recv = false;
    return epo_profile_kernel(p, process, device, id, handle, start, end);
}

epo_status epo_profile_copy(epo_profile *p, int64_t process, int64_t device, int64_t id,
                            bool has_stream, epo_copy_kind kind, int64_t start, int64_t end) {
    stream *s;
    if (end < start) {
        p->facts.skipped++;
        return EPO_OK;
    }
    epo_status status = find_stream(p, process, device, id, &s);
    if (status != EPO_OK)
        return status;
    p->facts.copies++;
    s->unit->tell.copies++;
    stretch(s->unit, start, end);
    if (kind == EPO_COPY_UNKNOWN || (kind == EPO_COPY_LOCAL && !has_stream))
        p->facts.copies_unclassified = true;
    if (kind == EPO_COPY_LOCAL && has_stream) {
        if (s->local_copies == NULL)
            status = epo_span_set_create(p->pool, &s->local_copies);
        return status == EPO_OK ? epo_span_set_add(s->local_copies, start, end) : status;
    }
    epo_kernel_class as = kind == EPO_COPY_PEER ? EPO_KERNEL_EP_COMM : EPO_KERNEL_COPY;
    s->unit->tell.count[as]++;
    s->has_ep_comm = s->has_ep_comm || as == EPO_KERNEL_EP_COMM;
    return epo_span_set_add(s->unit->set[as], start, end);
}

void epo_profile_graph_launch(epo_profile *p) { p->facts.graph_launches++; }

void epo_profile_nameless(epo_profile *p) { p->facts.nameless++; }

void epo_profile_lacks(epo_profile *p, const char *what) {
    size_t used = strlen(p->facts.missing);
    snprintf(p->facts.missing + used, sizeof p->facts.missing - used, "%s%s", used > 0 ? ", " : "",
             what);
}

/* One line of printable characters, whatever the file has. */
void epo_profile_line(epo_profile *p, const char *text, size_t length) {
    size_t n = length < sizeof p->facts.line ? length : sizeof p->facts.line - 1;
    for (size_t i = 0; i < n; i++)
        p->facts.line[i] = (unsigned char)text[i] < 0x20 || text[i] == 0x7f ? ' ' : text[i];
    p->facts.line[n] = '\0';
}

/* Copies inside a device are communication on a stream that communicates. */
static epo_status place_copies(stream *s) {
    epo_span_reader *reader = NULL;
    epo_span span;
    bool more = true;
    epo_kernel_class as = s->has_ep_comm ? EPO_KERNEL_EP_COMM : EPO_KERNEL_COPY;
    if (s->local_copies == NULL)
        return EPO_OK;
    s->unit->tell.count[as] += epo_span_set_count(s->local_copies);
    epo_status status = epo_span_reader_open(s->local_copies, &reader);
    while (status == EPO_OK) {
        status = epo_span_reader_next(reader, &span, &more);
        if (status != EPO_OK || !more)
            break;
        status = epo_span_set_add(s->unit->set[as], span.start, span.end);
    }
    epo_span_reader_close(reader);
    return status;
}

static int compare_units(const void *a, const void *b) {
    const epo_profile_unit *x = &(*(unit *const *)a)->tell, *y = &(*(unit *const *)b)->tell;
    if (x->process != y->process)
        return x->process < y->process ? -1 : 1;
    return (x->device > y->device) - (x->device < y->device);
}

epo_status epo_profile_finish(epo_profile *p) {
    epo_status status = EPO_OK;
    for (size_t i = 0; i < p->stream_count && status == EPO_OK; i++)
        status = place_copies(&p->streams[i]);
    if (p->facts.units > 1)
        qsort(p->units, p->facts.units, sizeof *p->units, compare_units);
    p->facts.runs = epo_span_pool_runs(p->pool);
    return status;
}

epo_profile_facts epo_profile_tell(const epo_profile *p) { return p->facts; }

const epo_profile_unit *epo_profile_unit_at(const epo_profile *p, size_t index) {
    return index < p->facts.units ? &p->units[index]->tell : NULL;
}

size_t epo_profile_name_count(const epo_profile *p) { return p->name_count; }

epo_profile_name epo_profile_name_at(const epo_profile *p, size_t index) {
    const name_entry *n = &p->names[index];
    return (epo_profile_name){.name = n->text, .kind = n->kind, .count = n->count};
}

bool epo_profile_extent(const epo_profile *p, int64_t *first, int64_t *last) {
    int64_t a = INT64_MAX, b = INT64_MIN;
    for (size_t i = 0; i < p->facts.units; i++) {
        a = p->units[i]->first < a ? p->units[i]->first : a;
        b = p->units[i]->last > b ? p->units[i]->last : b;
    }
    if (a > b)
        return false;
    *first = a;
    *last = b;
    return true;
}

/* ---- one sweep over the classes of a unit -------------------------------- */

typedef struct lane {
    epo_span_reader *reader;
    epo_span span;
    bool has, inside; /* a span is there; the sweep is inside it */
} lane;

typedef struct sweep {
    lane lanes[EPO_KERNEL_CLASSES];
    int64_t from, to;
    uint64_t length[1u << EPO_KERNEL_CLASSES]; /* by the set of classes that run */
    epo_profile_timeline *timeline;
} sweep;

/* The next span, cut to the window. */
static epo_status fetch(sweep *s, lane *l) {
    do {
        epo_status status = epo_span_reader_next(l->reader, &l->span, &l->has);
        if (status != EPO_OK || !l->has)
            return status;
        l->span.start = l->span.start < s->from ? s->from : l->span.start;
        l->span.end = l->span.end > s->to ? s->to : l->span.end;
    } while (l->span.end <= l->span.start);
    return EPO_OK;
}

static void fill_bins(epo_profile_timeline *t, unsigned mask, int64_t from, int64_t to) {
    double width = ((double)t->last - (double)t->first) / EPO_PROFILE_BINS;
    double a = ((double)from - (double)t->first) / width,
           b = ((double)to - (double)t->first) / width;
    a = a < 0 ? 0 : a;
    b = b > EPO_PROFILE_BINS ? EPO_PROFILE_BINS : b;
    for (int bin = (int)a; bin < EPO_PROFILE_BINS && (double)bin < b; bin++) {
        double left = a > bin ? a : bin, right = b < bin + 1 ? b : bin + 1;
        for (int c = 0; right > left && c < EPO_KERNEL_CLASSES; c++)
            if (mask >> c & 1)
                t->covered[bin][c] += (float)(right - left);
    }
}

static epo_status run_sweep(sweep *s) {
    unsigned mask = 0;
    int64_t at = 0;
    for (;;) {
        int64_t next = INT64_MAX;
        bool any = false;
        for (int c = 0; c < EPO_KERNEL_CLASSES; c++) {
            const lane *l = &s->lanes[c];
            int64_t boundary = l->inside ? l->span.end : l->span.start;
            if (l->has && (!any || boundary < next)) {
                next = boundary;
                any = true;
            }
        }
        if (!any)
            return EPO_OK;
        if (mask != 0) {
            s->length[mask] += (uint64_t)next - (uint64_t)at;
            if (s->timeline != NULL)
                fill_bins(s->timeline, mask, at, next);
        }
        for (int c = 0; c < EPO_KERNEL_CLASSES; c++) {
            lane *l = &s->lanes[c];
            if (!l->has || (l->inside ? l->span.end : l->span.start) != next)
                continue;
            mask ^= 1u << c;
            l->inside = !l->inside;
            epo_status status = l->inside ? EPO_OK : fetch(s, l);
            if (status != EPO_OK)
                return status;
        }
        at = next;
    }
}

#define BIT(c) (1u << EPO_KERNEL_##c)

static epo_profile_times measure(const sweep *s) {
    const unsigned comm = BIT(EP_COMM), gemm_attention = BIT(GEMM) | BIT(ATTENTION);
    const unsigned compute = gemm_attention | BIT(PERMUTE) | BIT(OTHER);
    epo_profile_times t = {0};
    for (unsigned mask = 1; mask < 1u << EPO_KERNEL_CLASSES; mask++) {
        uint64_t n = s->length[mask];
        t.busy += n;
        for (int c = 0; c < EPO_KERNEL_CLASSES; c++)
            t.of[c] += mask >> c & 1 ? n : 0;
        t.comm += mask & comm ? n : 0;
        t.gemm_attention += mask & gemm_attention ? n : 0;
        t.compute += mask & compute ? n : 0;
        t.overlapped += mask & comm && mask & gemm_attention ? n : 0;
        t.overlapped_any += mask & comm && mask & compute ? n : 0;
    }
    t.exposed = t.comm - t.overlapped;
    return t;
}

epo_status epo_profile_measure(epo_profile *p, size_t index, int64_t from, int64_t to,
                               epo_profile_times *times, epo_profile_timeline *timeline) {
    if (index >= p->facts.units)
        return epo_fail(EPO_E_ARG, "profile: there is no unit %zu of %zu", index, p->facts.units);
    sweep *s = calloc(1, sizeof *s);
    if (s == NULL)
        return no_memory();
    s->from = from;
    s->to = to;
    s->timeline = timeline;
    epo_status status = EPO_OK;
    for (int c = 0; c < EPO_KERNEL_CLASSES && status == EPO_OK; c++) {
        status = epo_span_reader_open(p->units[index]->set[c], &s->lanes[c].reader);
        if (status == EPO_OK)
            status = fetch(s, &s->lanes[c]);
    }
    if (status == EPO_OK)
        status = run_sweep(s);
    if (status == EPO_OK)
        *times = measure(s);
    for (int c = 0; c < EPO_KERNEL_CLASSES; c++)
        epo_span_reader_close(s->lanes[c].reader);
    free(s);
    return status;
}
