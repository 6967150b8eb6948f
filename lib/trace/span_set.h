/* SPDX-License-Identifier: Apache-2.0
 *
 * span_set.h - unions of any number of intervals in bounded memory.
 *
 * Sets share a pool with a limit of spans in memory.  When it is reached, the
 * largest set is merged, and written as a sorted run to an unlinked temporary
 * file if merging alone does not make room.  Reading merges the runs on the fly.
 */
#ifndef EPO_TRACE_SPAN_SET_H
#define EPO_TRACE_SPAN_SET_H

#include "trace/intervals.h"

#include <stdbool.h>

#define EPO_SPAN_SETS_MAX 65536
#define EPO_SPAN_BUDGET ((size_t)2 << 20) /* spans: 32 MiB */

typedef struct epo_span_pool epo_span_pool;
typedef struct epo_span_set epo_span_set;
typedef struct epo_span_reader epo_span_reader;

/* `budget` spans in memory, of all sets together; at least 64. */
epo_status epo_span_pool_create(size_t budget, epo_span_pool **out);
/* Its sets go with it. */
void epo_span_pool_destroy(epo_span_pool *pool);
epo_status epo_span_set_create(epo_span_pool *pool, epo_span_set **out);

/* EPO_E_ARG if end < start, EPO_E_NOMEM, EPO_E_SYSTEM (temporary file). */
epo_status epo_span_set_add(epo_span_set *set, int64_t start, int64_t end);
uint64_t epo_span_set_count(const epo_span_set *set); /* spans added */
size_t epo_span_pool_runs(const epo_span_pool *pool); /* written to the file, so far */

/* Reads the union: disjoint, ascending, without touching or empty spans.  Spans
 * must not be added while a reader of the set is open. */
epo_status epo_span_reader_open(epo_span_set *set, epo_span_reader **out);
void epo_span_reader_close(epo_span_reader *reader);
/* *more false: the end.  Fails when the temporary file cannot be read. */
epo_status epo_span_reader_next(epo_span_reader *reader, epo_span *span, bool *more);

#endif
