/* SPDX-License-Identifier: Apache-2.0
 *
 * queue.c - queues, events and the two threads that serve them.
 */
#include "config.h"

#include "backend/host/host.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

/* ---- picking ------------------------------------------------------------- */

static bool op_events_done(const host_op *op) {
    for (int i = 0; i < op->deps.nwait; i++) {
        const epo_ready *r = &op->deps.wait[i];
        if (r->event != NULL &&
            atomic_load_explicit(&r->event->done, memory_order_acquire) < op->target[i])
            return false;
    }
    return true;
}

static const epo_ready *op_flag_missing(const host_op *op) {
    for (int i = 0; i < op->deps.nwait; i++) {
        const epo_ready *r = &op->deps.wait[i];
        if (r->event == NULL && !host_ready_reached(r))
            return r;
    }
    return NULL;
}

static bool worker_serves(const host_worker *w, const epo_queue *q) {
    return w->comm == (q->kind == EPO_QUEUE_COMM);
}

/* FILL runs where the caller waits anyway, so that it never delays a caller. */
static bool queue_may_run(const epo_backend *be, const epo_queue *q) {
    return q->kind != EPO_QUEUE_FILL || be->syncing > 0 || be->stop;
}

/* Is `a` before `b` (NULL: none yet)?  COMPUTE before FILL, then issue order. */
static bool queue_before(const epo_queue *a, const epo_queue *b) {
    if (b == NULL)
        return true;
    if ((a->kind == EPO_QUEUE_FILL) != (b->kind == EPO_QUEUE_FILL))
        return b->kind == EPO_QUEUE_FILL;
    return a->head->issued < b->head->issued;
}

/* Bells ring often; peers and limits are looked at once in a slice. */
static void op_wait_look(epo_backend *be, host_op *op, const epo_ready *missing) {
    int64_t now = host_now_ns();
    if (op->wait_from_ns == 0)
        op->wait_from_ns = now;
    else if (now >= op->look_ns)
        host_ready_check(be, missing, op->wait_from_ns, &op->warned);
    else
        return;
    op->look_ns = now + HOST_SLICE_NS / 2;
}

/* With be->mutex held: takes the next operation that may run.  *flags_wait tells
 * that a head waits for flags and nothing else, so that limits count. */
static host_op *worker_pick(host_worker *w, bool broken, bool *flags_wait) {
    epo_backend *be = w->be;
    epo_queue *best = NULL;
    *flags_wait = false;
    w->wants_event = false;
    for (epo_queue *q = be->queues; q != NULL; q = q->next) {
        if (q->head == NULL || !worker_serves(w, q))
            continue;
        if (!broken) {
            if (!queue_may_run(be, q))
                continue;
            if (!op_events_done(q->head)) {
                w->wants_event = true;
                continue;
            }
            const epo_ready *missing = op_flag_missing(q->head);
            if (missing != NULL) {
                op_wait_look(be, q->head, missing);
                *flags_wait = true;
                continue;
            }
        }
        if (queue_before(q, best))
            best = q;
    }
    if (best == NULL)
        return NULL;
    host_op *op = best->head;
    best->head = op->next;
    if (best->head == NULL)
        best->tail = NULL;
    w->running = true;
    return op;
}

/* ---- running ------------------------------------------------------------- */

static void op_finish(host_worker *w, host_op *op) {
    epo_backend *be = w->be;
    if (op->deps.signal != NULL) {
        _Atomic uint64_t *done = &op->deps.signal->done;
        uint64_t was = atomic_load(done);
        while (was < op->signal_number &&
               !atomic_compare_exchange_weak(done, &was, op->signal_number))
            ;
    }
    pthread_mutex_lock(&be->mutex);
    int ears = 0;
    w->running = false;
    if (--be->outstanding == 0 && be->stop)
        ears = HOST_EAR_ALL;
    if (be->worker[!w->comm].wants_event && op->deps.signal != NULL)
        ears |= w->comm ? HOST_EAR_COMPUTE : HOST_EAR_COMM;
    if (be->syncing > 0 && (be->sync_event == NULL || be->sync_event == op->deps.signal))
        ears |= HOST_EAR_SYNC;
    pthread_mutex_unlock(&be->mutex);
    if (ears != 0)
        host_bell_ring(be->shared, be->rank, ears);
    free(op);
}

static void op_run(host_worker *w, host_op *op) {
    epo_backend *be = w->be;
    if (atomic_load_explicit(&be->recording, memory_order_acquire) == 0) {
        op->run(w, op);
        return;
    }
    int64_t start = host_now_ns();
    op->run(w, op);
    host_record_add(be, &op->deps, start, host_now_ns());
}

static void worker_enter(host_worker *w) {
    epo_backend *be = w->be;
    pthread_setname_np(pthread_self(), w->comm ? "epo-comm" : "epo-compute");
    if (!w->comm)
        return;
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); /* the emulated link's times */
    int rc = be->shared->threads ? 0 : pthread_mutex_lock(&be->shared->peer[be->rank].alive);
    atomic_store(&be->comm_ready, rc == 0 ? 1 : -1);
    host_bell_ring(be->shared, be->rank, HOST_EAR_SYNC);
}

static void worker_leave(host_worker *w) {
    host_shared *shared = w->be->shared;
    if (w->comm) {
        atomic_store(&shared->peer[w->be->rank].state, HOST_PEER_LEFT);
        if (!shared->threads && atomic_load(&w->be->comm_ready) == 1)
            pthread_mutex_unlock(&shared->peer[w->be->rank].alive);
    }
    free(w->scratch);
    host_memory_count(w->be, -(int64_t)w->scratch_bytes);
    w->scratch = NULL;
    w->scratch_bytes = 0;
}

static void *worker_main(void *arg) {
    host_worker *w = arg;
    epo_backend *be = w->be;
    worker_enter(w);
    for (;;) {
        uint32_t seen = host_bell_read(be);
        bool broken = host_broken(be), flags_wait;
        pthread_mutex_lock(&be->mutex);
        host_op *op = worker_pick(w, broken, &flags_wait);
        bool done = op == NULL && be->stop && be->outstanding == 0;
        pthread_mutex_unlock(&be->mutex);
        if (op != NULL) {
            if (!broken)
                op_run(w, op);
            op_finish(w, op);
        } else if (done) {
            break;
        } else {
            int ears = w->comm ? HOST_EAR_COMM : HOST_EAR_COMPUTE;
            if (flags_wait)
                host_bell_wait(be, ears | HOST_EAR_FLAGS, seen, host_now_ns() + HOST_SLICE_NS);
            else
                host_bell_wait(be, ears, seen, INT64_MAX);
        }
    }
    worker_leave(w);
    return NULL;
}

epo_status host_workers_start(epo_backend *be) {
    sigset_t all, before;
    sigfillset(&all); /* signals are the program's own threads' business */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = 0;
    for (int i = 0; i < 2 && rc == 0; i++) {
        host_worker *w = &be->worker[i];
        w->be = be;
        w->comm = i == 1;
        rc = pthread_create(&w->thread, NULL, worker_main, w);
        w->started = rc == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0)
        return epo_fail(EPO_E_SYSTEM, "a worker thread could not be started: %s", strerror(rc));
    while (atomic_load(&be->comm_ready) == 0) {
        uint32_t seen = host_bell_read(be);
        if (atomic_load(&be->comm_ready) == 0)
            host_bell_wait(be, HOST_EAR_SYNC, seen, host_now_ns() + HOST_SLICE_NS);
    }
    if (atomic_load(&be->comm_ready) < 0)
        return epo_fail(EPO_E_SYSTEM, "rank %d: the lock that tells that it is alive is not free",
                        be->rank);
    return EPO_OK;
}

void host_workers_stop(epo_backend *be) {
    pthread_mutex_lock(&be->mutex);
    be->stop = true;
    pthread_mutex_unlock(&be->mutex);
    host_bell_ring(be->shared, be->rank, HOST_EAR_ALL);
    for (int i = 0; i < 2; i++) {
        if (be->worker[i].started)
            pthread_join(be->worker[i].thread, NULL);
        be->worker[i].started = false;
    }
}

/* ---- the caller waits ----------------------------------------------------- */

/* FILL runs from now on; a ring is wanted when `event` is signalled (NULL: when any
 * operation ends). */
static void sync_begin(epo_backend *be, epo_event *event) {
    bool fill = false;
    pthread_mutex_lock(&be->mutex);
    be->syncing++;
    be->sync_event = event;
    for (epo_queue *q = be->queues; q != NULL; q = q->next)
        fill = fill || (q->kind == EPO_QUEUE_FILL && q->head != NULL);
    pthread_mutex_unlock(&be->mutex);
    if (fill)
        host_bell_ring(be->shared, be->rank, HOST_EAR_COMPUTE);
}

static void sync_end(epo_backend *be) {
    pthread_mutex_lock(&be->mutex);
    be->syncing--;
    pthread_mutex_unlock(&be->mutex);
}

epo_status host_sync(epo_backend *be, epo_event *event) {
    if (event == NULL || host_forked(be))
        return host_status(be);
    uint64_t target = event->issued;
    if (atomic_load_explicit(&event->done, memory_order_acquire) >= target)
        return host_status(be);
    sync_begin(be, event);
    for (;;) {
        uint32_t seen = host_bell_read(be);
        if (atomic_load_explicit(&event->done, memory_order_acquire) >= target)
            break;
        /* The workers watch limits and peers; this one only waits for them. */
        host_bell_wait(be, HOST_EAR_SYNC, seen, INT64_MAX);
    }
    sync_end(be);
    return host_status(be);
}

/* With the mutex: is there nothing in the queue and nothing running?  NULL: is
 * nothing running? */
static bool workers_quiet(const epo_backend *be, const epo_queue *queue) {
    return !be->worker[0].running && !be->worker[1].running &&
           (queue == NULL || queue->head == NULL);
}

static void workers_quiet_wait(epo_backend *be, const epo_queue *queue) {
    sync_begin(be, NULL);
    for (;;) {
        uint32_t seen = host_bell_read(be);
        pthread_mutex_lock(&be->mutex);
        bool quiet = workers_quiet(be, queue);
        pthread_mutex_unlock(&be->mutex);
        if (quiet)
            break;
        host_bell_wait(be, HOST_EAR_SYNC, seen, INT64_MAX);
    }
    sync_end(be);
}

void host_workers_settle(epo_backend *be) {
    if (!host_forked(be))
        workers_quiet_wait(be, NULL);
}

/* ---- queues, events ------------------------------------------------------ */

epo_status host_queue_create(epo_backend *be, epo_queue_kind kind, epo_queue **out) {
    if (kind != EPO_QUEUE_COMPUTE && kind != EPO_QUEUE_COMM && kind != EPO_QUEUE_FILL)
        return epo_fail(EPO_E_ARG, "queue kind: found %d, allowed 0..2", (int)kind);
    epo_queue *q = calloc(1, sizeof *q);
    if (q == NULL)
        return epo_fail(EPO_E_NOMEM, "a queue: need %zu bytes, have none", sizeof *q);
    q->be = be;
    q->kind = kind;
    pthread_mutex_lock(&be->mutex);
    q->next = be->queues;
    be->queues = q;
    pthread_mutex_unlock(&be->mutex);
    *out = q;
    return EPO_OK;
}

void host_queue_destroy(epo_backend *be, epo_queue *queue) {
    if (queue == NULL || host_forked(be))
        return;
    workers_quiet_wait(be, queue);
    pthread_mutex_lock(&be->mutex);
    for (epo_queue **p = &be->queues; *p != NULL; p = &(*p)->next) {
        if (*p == queue) {
            *p = queue->next;
            break;
        }
    }
    pthread_mutex_unlock(&be->mutex);
    free(queue);
}

epo_status host_event_create(epo_backend *be, epo_event **out) {
    (void)be;
    epo_event *e = calloc(1, sizeof *e);
    if (e == NULL)
        return epo_fail(EPO_E_NOMEM, "an event: need %zu bytes, have none", sizeof *e);
    *out = e;
    return EPO_OK;
}

void host_event_destroy(epo_backend *be, epo_event *event) {
    if (event != NULL && !host_forked(be) && atomic_load(&event->done) < event->issued)
        host_sync(be, event);
    free(event);
}

/* ---- issue --------------------------------------------------------------- */

static epo_status deps_check(const epo_backend *be, const epo_deps *deps) {
    if (deps->nwait < 0 || deps->nwait > EPO_MAX_WAITS)
        return epo_fail(EPO_E_ARG, "waits of an operation: found %d, allowed 0..%d", deps->nwait,
                        EPO_MAX_WAITS);
    for (int i = 0; i < deps->nwait; i++) {
        const epo_ready *r = &deps->wait[i];
        if (r->event != NULL)
            continue;
        if (r->flag == NULL || r->count < 1 || r->count > be->ranks || r->peer < -1 ||
            r->peer >= be->ranks)
            return epo_fail(EPO_E_ARG,
                            "a wait for flags: found count %d, peer %d; allowed 1..%d words of a "
                            "peer -1..%d",
                            r->count, r->peer, be->ranks, be->ranks - 1);
    }
    return EPO_OK;
}

epo_status host_op_create(epo_queue *q, const epo_deps *deps,
                          void (*run)(host_worker *worker, host_op *op), host_op **out) {
    if (host_forked(q->be))
        return host_status(q->be);
    epo_status status = deps == NULL ? EPO_OK : deps_check(q->be, deps);
    if (status != EPO_OK)
        return status;
    host_op *op = calloc(1, sizeof *op);
    if (op == NULL)
        return epo_fail(EPO_E_NOMEM, "an operation: need %zu bytes, have none", sizeof *op);
    op->be = q->be;
    op->run = run;
    if (deps != NULL)
        op->deps = *deps;
    else
        op->deps.chunk = -1;
    *out = op;
    return EPO_OK;
}

/* Also in a broken backend: the workers pass over it, so that a caller frees what
 * an operation uses in one place only, after sync(). */
epo_status host_op_issue(epo_queue *q, host_op *op) {
    epo_backend *be = q->be;
    for (int i = 0; i < op->deps.nwait; i++)
        if (op->deps.wait[i].event != NULL)
            op->target[i] = op->deps.wait[i].event->issued;
    if (op->deps.signal != NULL)
        op->signal_number = ++op->deps.signal->issued;
    pthread_mutex_lock(&be->mutex);
    op->issued = ++be->issued;
    be->outstanding++;
    if (q->tail != NULL)
        q->tail->next = op;
    else
        q->head = op;
    q->tail = op;
    pthread_mutex_unlock(&be->mutex);
    host_bell_ring(be->shared, be->rank,
                   q->kind == EPO_QUEUE_COMM ? HOST_EAR_COMM : HOST_EAR_COMPUTE);
    return EPO_OK;
}
