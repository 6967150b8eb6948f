/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/span_set.h"

#include "core/scratch.h"
#include "core/status.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RUNS_MAX 64      /* of one set, before they are made one */
#define BLOCK_SPANS 2048 /* read at once from a run */

typedef struct run {
    uint64_t offset; /* bytes */
    uint64_t count;
} run;

struct epo_span_set {
    epo_span_pool *pool;
    epo_spans spans; /* not yet written */
    run runs[RUNS_MAX];
    size_t run_count;
    uint64_t added;
};

struct epo_span_pool {
    epo_span_set **set;
    size_t set_count, set_room;
    size_t budget, held; /* spans in memory */
    size_t runs;
    uint64_t file_end;
    FILE *file; /* made when first needed */
};

/* One sorted source of a reader: a run, or what is in memory. */
typedef struct source {
    const epo_span *at, *end; /* of the block */
    epo_span *block;          /* NULL: memory */
    uint64_t offset, left;    /* of the run */
} source;

struct epo_span_reader {
    epo_span_set *set;
    source *sources;
    size_t count;
};

epo_status epo_span_pool_create(size_t budget, epo_span_pool **out) {
    epo_span_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return epo_fail(EPO_E_NOMEM, "intervals: no memory");
    pool->budget = budget < 64 ? 64 : budget;
    *out = pool;
    return EPO_OK;
}

void epo_span_pool_destroy(epo_span_pool *pool) {
    if (pool == NULL)
        return;
    for (size_t i = 0; i < pool->set_count; i++) {
        epo_spans_free(&pool->set[i]->spans);
        free(pool->set[i]);
    }
    free(pool->set);
    if (pool->file != NULL)
        fclose(pool->file);
    free(pool);
}

epo_status epo_span_set_create(epo_span_pool *pool, epo_span_set **out) {
    if (pool->set_count == EPO_SPAN_SETS_MAX)
        return epo_fail(EPO_E_OVERFLOW, "intervals: more than %d processes, devices and streams",
                        EPO_SPAN_SETS_MAX);
    if (pool->set_count == pool->set_room) {
        size_t room = pool->set_room == 0 ? 64 : pool->set_room * 2;
        epo_span_set **grown = reallocarray(pool->set, room, sizeof *grown);
        if (grown == NULL)
            return epo_fail(EPO_E_NOMEM, "intervals: no memory for %zu sets", room);
        pool->set = grown;
        pool->set_room = room;
    }
    epo_span_set *set = calloc(1, sizeof *set);
    if (set == NULL)
        return epo_fail(EPO_E_NOMEM, "intervals: no memory for another set");
    set->pool = pool;
    pool->set[pool->set_count++] = set;
    *out = set;
    return EPO_OK;
}

static epo_status file_failed(const char *what) {
    const char *folder = getenv("TMPDIR");
    return epo_fail(
        EPO_E_SYSTEM,
        "intervals: the temporary file in %s cannot be %s: %s; let TMPDIR name a folder "
        "with room, or give more --memory",
        folder != NULL && folder[0] != '\0' ? folder : "/tmp", what, strerror(errno));
}

static epo_status open_file(epo_span_pool *pool) {
    if (pool->file == NULL)
        pool->file = epo_scratch_open();
    return pool->file == NULL ? file_failed("made") : EPO_OK;
}

static epo_status write_spans(epo_span_pool *pool, const epo_span *span, size_t count) {
    const char *from = (const char *)span;
    size_t left = count * sizeof *span;
    while (left > 0) {
        ssize_t n = pwrite(fileno(pool->file), from, left, (off_t)pool->file_end);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return file_failed("written");
        from += n;
        left -= (size_t)n;
        pool->file_end += (uint64_t)n;
    }
    return EPO_OK;
}

static epo_status read_spans(const epo_span_pool *pool, epo_span *span, size_t count,
                             uint64_t offset) {
    char *to = (char *)span;
    size_t left = count * sizeof *span;
    while (left > 0) {
        ssize_t n = pread(fileno(pool->file), to, left, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return file_failed("read");
        to += n;
        left -= (size_t)n;
        offset += (uint64_t)n;
    }
    return EPO_OK;
}

/* Makes all runs of `set` and what it holds in memory one run. */
static epo_status compact(epo_span_set *set) {
    epo_span_pool *pool = set->pool;
    epo_span_reader *reader = NULL;
    epo_span block[512], span;
    size_t used = 0;
    bool more = true;
    run made = {.offset = pool->file_end};
    epo_status status = epo_span_reader_open(set, &reader);
    while (status == EPO_OK && more) {
        status = epo_span_reader_next(reader, &span, &more);
        if (status == EPO_OK && more)
            block[used++] = span;
        if (status == EPO_OK && (used == 512 || !more)) {
            status = write_spans(pool, block, used);
            made.count += used;
            used = 0;
        }
    }
    epo_span_reader_close(reader);
    if (status != EPO_OK)
        return status;
    pool->held -= set->spans.count;
    epo_spans_free(&set->spans);
    set->runs[0] = made;
    set->run_count = 1;
    return EPO_OK;
}

static epo_status spill(epo_span_set *set) {
    epo_span_pool *pool = set->pool;
    epo_status status = open_file(pool);
    if (status != EPO_OK)
        return status;
    pool->runs++;
    if (set->run_count == RUNS_MAX)
        return compact(set);
    run made = {.offset = pool->file_end, .count = set->spans.count};
    status = write_spans(pool, set->spans.span, set->spans.count);
    if (status != EPO_OK)
        return status;
    pool->held -= set->spans.count;
    epo_spans_free(&set->spans);
    set->runs[set->run_count++] = made;
    return EPO_OK;
}

static epo_span_set *largest(const epo_span_pool *pool) {
    epo_span_set *found = pool->set[0];
    for (size_t i = 1; i < pool->set_count; i++)
        if (pool->set[i]->spans.count > found->spans.count)
            found = pool->set[i];
    return found;
}

static void merge(epo_span_set *set) {
    size_t before = set->spans.count;
    epo_spans_merge(&set->spans);
    set->pool->held -= before - set->spans.count;
}

/* Merging the largest set may be enough; else it is written out. */
static epo_status make_room(epo_span_pool *pool) {
    epo_span_set *set = largest(pool);
    size_t before = set->spans.count;
    merge(set);
    return set->spans.count > before / 2 ? spill(set) : EPO_OK;
}

epo_status epo_span_set_add(epo_span_set *set, int64_t start, int64_t end) {
    epo_span_pool *pool = set->pool;
    epo_status status = pool->held >= pool->budget ? make_room(pool) : EPO_OK;
    if (status == EPO_OK)
        status = epo_spans_add(&set->spans, start, end);
    if (status != EPO_OK)
        return status;
    pool->held++;
    set->added++;
    return EPO_OK;
}

uint64_t epo_span_set_count(const epo_span_set *set) { return set->added; }
size_t epo_span_pool_runs(const epo_span_pool *pool) { return pool->runs; }

epo_status epo_span_reader_open(epo_span_set *set, epo_span_reader **out) {
    epo_span_reader *r = calloc(1, sizeof *r);
    if (r != NULL)
        r->sources = calloc(set->run_count + 1, sizeof *r->sources);
    if (r == NULL || r->sources == NULL) {
        free(r);
        return epo_fail(EPO_E_NOMEM, "intervals: no memory to read them");
    }
    r->set = set;
    merge(set);
    r->count = set->run_count + 1;
    if (set->spans.count > 0)
        r->sources[0] = (source){.at = set->spans.span, .end = set->spans.span + set->spans.count};
    for (size_t i = 0; i < set->run_count; i++) {
        source *s = &r->sources[i + 1];
        s->block = malloc(BLOCK_SPANS * sizeof *s->block);
        if (s->block == NULL) {
            epo_span_reader_close(r);
            return epo_fail(EPO_E_NOMEM, "intervals: no memory to read them");
        }
        s->at = s->end = s->block;
        s->offset = set->runs[i].offset;
        s->left = set->runs[i].count;
    }
    *out = r;
    return EPO_OK;
}

void epo_span_reader_close(epo_span_reader *reader) {
    if (reader == NULL)
        return;
    for (size_t i = 0; i < reader->count; i++)
        free(reader->sources[i].block);
    free(reader->sources);
    free(reader);
}

static epo_status refill(const epo_span_reader *r, source *s) {
    if (s->at < s->end || s->left == 0)
        return EPO_OK;
    size_t count = s->left < BLOCK_SPANS ? (size_t)s->left : BLOCK_SPANS;
    epo_status status = read_spans(r->set->pool, s->block, count, s->offset);
    if (status != EPO_OK)
        return status;
    s->at = s->block;
    s->end = s->block + count;
    s->offset += count * sizeof *s->block;
    s->left -= count;
    return EPO_OK;
}

/* The source whose next span starts first; NULL: all are at their end. */
static epo_status first_source(const epo_span_reader *r, source **out) {
    *out = NULL;
    for (size_t i = 0; i < r->count; i++) {
        source *s = &r->sources[i];
        epo_status status = refill(r, s);
        if (status != EPO_OK)
            return status;
        if (s->at < s->end && (*out == NULL || s->at->start < (*out)->at->start))
            *out = s;
    }
    return EPO_OK;
}

epo_status epo_span_reader_next(epo_span_reader *r, epo_span *span, bool *more) {
    source *s;
    epo_status status = first_source(r, &s);
    *more = false;
    if (status != EPO_OK || s == NULL)
        return status;
    epo_span found = *s->at++;
    if (r->count > 1) /* spans of other runs may touch it */
        for (;;) {
            status = first_source(r, &s);
            if (status != EPO_OK)
                return status;
            if (s == NULL || s->at->start > found.end)
                break;
            if (s->at->end > found.end)
                found.end = s->at->end;
            s->at++;
        }
    *span = found;
    *more = true;
    return EPO_OK;
}
