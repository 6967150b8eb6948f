/* SPDX-License-Identifier: Apache-2.0
 *
 * record.c - what the queues did, and when.
 */
#include "config.h"

#include "backend/host/host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct host_record {
    pthread_mutex_t mutex;
    uint64_t capacity, count, dropped;
    epo_interval *intervals;
};

static uint64_t record_bytes(const host_record *r) { return r->capacity * sizeof(epo_interval); }

void host_record_add(epo_backend *be, const epo_deps *deps, int64_t start_ns, int64_t end_ns) {
    host_record *r = be->record;
    pthread_mutex_lock(&r->mutex);
    if (atomic_load(&be->recording) != 0) {
        if (r->count < r->capacity) {
            epo_interval *v = &r->intervals[r->count++];
            v->start_ns = start_ns;
            v->end_ns = end_ns;
            v->kind = deps->kind;
            v->chunk = deps->chunk;
            snprintf(v->name, sizeof v->name, "%s", deps->name != NULL ? deps->name : "");
        } else {
            r->dropped++;
        }
    }
    pthread_mutex_unlock(&r->mutex);
}

static void record_clear(epo_backend *be) {
    host_record *r = be->record;
    host_memory_count(be, -(int64_t)record_bytes(r));
    free(r->intervals);
    r->intervals = NULL;
    r->capacity = r->count = r->dropped = 0;
}

epo_status host_record_start(epo_backend *be, uint64_t capacity) {
    if (capacity > INT64_MAX / sizeof(epo_interval))
        return epo_fail(EPO_E_ARG, "intervals to record: found %llu, allowed %llu",
                        (unsigned long long)capacity,
                        (unsigned long long)(INT64_MAX / sizeof(epo_interval)));
    if (be->record == NULL) {
        host_record *r = calloc(1, sizeof *r);
        if (r == NULL)
            return epo_fail(EPO_E_NOMEM, "a recording: need %zu bytes, have none", sizeof *r);
        pthread_mutex_init(&r->mutex, NULL);
        be->record = r;
    }
    host_record *r = be->record;
    epo_status status = EPO_OK;
    pthread_mutex_lock(&r->mutex);
    atomic_store(&be->recording, 0);
    record_clear(be);
    void *intervals;
    status = host_alloc(be, capacity * sizeof(epo_interval), &intervals);
    if (status == EPO_OK) {
        r->intervals = intervals;
        r->capacity = capacity;
        atomic_store(&be->recording, 1);
    }
    pthread_mutex_unlock(&r->mutex);
    return status;
}

static int interval_before(const void *a, const void *b) {
    const epo_interval *x = a, *y = b;
    if (x->start_ns != y->start_ns)
        return x->start_ns < y->start_ns ? -1 : 1;
    return (x->end_ns > y->end_ns) - (x->end_ns < y->end_ns);
}

epo_status host_record_stop(epo_backend *be, const epo_interval **out, uint64_t *count,
                            uint64_t *dropped) {
    host_record *r = be->record;
    if (r == NULL || atomic_load(&be->recording) == 0)
        return epo_fail(EPO_E_STATE, "no recording was started");
    host_workers_settle(be);
    pthread_mutex_lock(&r->mutex);
    atomic_store(&be->recording, 0);
    qsort(r->intervals, r->count, sizeof *r->intervals, interval_before);
    *out = r->intervals;
    *count = r->count;
    if (dropped != NULL)
        *dropped = r->dropped;
    pthread_mutex_unlock(&r->mutex);
    return EPO_OK;
}

void host_record_destroy(epo_backend *be) {
    if (be->record == NULL)
        return;
    record_clear(be);
    pthread_mutex_destroy(&be->record->mutex);
    free(be->record);
    be->record = NULL;
}
