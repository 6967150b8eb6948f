/* SPDX-License-Identifier: Apache-2.0
 *
 * backend.c - the host backend: opening, closing, and the table of its calls.
 */
#include "config.h"

#include "backend/host/convert.h"
#include "backend/host/join.h"
#include "backend/meet.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- opening and closing ---------------------------------------------------- */

static epo_status backend_meet(epo_backend *be, const epo_backend_config *c, const host_place *p) {
    if (c->threads != NULL)
        return host_world_join(c->threads, p, &be->meeting, &be->shared);
    if (p->ranks == 1) {
        void *shared;
        epo_status status = host_map_private(host_shared_bytes(1), "a group", &shared);
        if (status == EPO_OK) {
            be->shared = shared;
            host_shared_init(be->shared, 1, true);
        }
        return status;
    }
    return host_join_ranks(p, &be->join, &be->shared);
}

/* This rank makes no group, and those who wait for it hear of it. */
static epo_status backend_refuse(const epo_backend_config *c, const host_place *p) {
    struct host_meeting *meeting = NULL;
    struct host_join *join = NULL;
    host_shared *shared = NULL;
    char why[sizeof p->why];
    snprintf(why, sizeof why, "%s", p->why);
    if (c->threads != NULL)
        (void)host_world_join(c->threads, p, &meeting, &shared);
    else if (p->ranks > 1)
        (void)host_join_ranks(p, &join, &shared);
    return epo_fail(p->wrong, "%s", why);
}

static void backend_part(epo_backend *be) {
    if (be->meeting != NULL)
        host_world_leave(be->meeting);
    else if (be->shared != NULL)
        munmap(be->shared, host_shared_bytes(be->ranks));
    host_join_destroy(be->join);
}

static epo_backend *backend_new(const host_place *p) {
    epo_backend *be = calloc(1, sizeof *be);
    if (be == NULL)
        return NULL;
    be->pid = getpid();
    be->wide = HOST_HAS_WIDE;
    be->rank = p->rank;
    be->ranks = p->ranks;
    be->timeout_ns = p->timeout_ns;
    be->warn_ns = p->warn_ns;
    be->link = p->link;
    pthread_mutex_init(&be->mutex, NULL);
    pthread_mutex_init(&be->broken_mutex, NULL);
    be->info = (epo_backend_info){
        .engine = "host",
        .versions = be->versions,
        .rank = p->rank,
        .ranks = p->ranks,
        .nodes = 1,
        .link_gbs = p->link.gbs,
        .link_us = p->link.us,
        .default_chunks = 4,
        .window_page = HOST_PAGE,
        .one_sided = true,
        .types = 1u << EPO_F32 | 1u << EPO_BF16 | 1u << EPO_F16,
    };
    return be;
}

static void backend_free(epo_backend *be) {
    host_record_destroy(be);
    pthread_mutex_destroy(&be->broken_mutex);
    pthread_mutex_destroy(&be->mutex);
    free(be);
}

static epo_status host_open(const epo_backend_config *config, epo_backend **out) {
    host_place place;
    char text[EPO_ERROR_MAX];
    if (config->nccl_comm != NULL)
        return epo_fail(EPO_E_UNSUPPORTED, "the host engine cannot use an NCCL communicator");
    epo_status status = host_place_find(config, &place);
    if (status == EPO_OK)
        status = host_link_parse(getenv(EPO_ENV_HOST_LINK), &place.link);
    int nodes = 1;
    if (status == EPO_OK)
        status = epo_nodes_read(config, &nodes);
    if (status != EPO_OK)
        return status;
    epo_backend *be = backend_new(&place);
    if (be == NULL && place.wrong == EPO_OK)
        host_place_refuse(&place,
                          epo_fail(EPO_E_NOMEM, "a group: need %zu bytes, have none", sizeof *be));
    if (be == NULL || place.wrong != EPO_OK) {
        if (be != NULL)
            backend_free(be);
        return backend_refuse(config, &place);
    }
    be->info.nodes = nodes;
    status = backend_meet(be, config, &place);
    if (status != EPO_OK)
        goto free_backend;
    be->timeout_ns = host_join_limit_ns(&place);
    status = host_workers_start(be);
    if (status != EPO_OK)
        goto stop_workers;
    atomic_store(&be->shared->peer[be->rank].state, HOST_PEER_HERE);
    status = host_blas_setup(be);
    if (status != EPO_OK)
        goto stop_workers;
    be->timeout_ns = place.timeout_ns;
    *out = be;
    return EPO_OK;

stop_workers:
    snprintf(text, sizeof text, "%s", epo_fail_text());
    host_break(be, status, "%s", text); /* the others need not wait */
    host_workers_stop(be);
    epo_fail(status, "%s", text);
    backend_part(be);
free_backend:
    backend_free(be);
    return status;
}

static void host_close(epo_backend *be, bool broken) {
    if (be == NULL)
        return;
    if (host_forked(be)) { /* what remains is the parent's, or goes with this process */
        if (be->meeting == NULL)
            backend_part(be);
        return;
    }
    if (broken && !host_broken(be))
        host_break(be, EPO_E_PEER, "rank %d gave the group up", be->rank);
    host_workers_stop(be);
    while (be->queues != NULL) {
        epo_queue *q = be->queues;
        be->queues = q->next;
        free(q);
    }
    backend_part(be);
    backend_free(be);
}

static const epo_backend_info *host_info(const epo_backend *be) { return &be->info; }

/* ---- small calls -------------------------------------------------------------- */

static void host_memory(epo_backend *be, uint64_t *now, uint64_t *peak) {
    if (now != NULL)
        *now = atomic_load(&be->memory);
    if (peak != NULL)
        *peak = atomic_load(&be->memory_peak);
}

static void host_abort(epo_backend *be, epo_status status, const char *text) {
    host_break(be, status, "%s", text);
}

static epo_status host_stream_enter(epo_backend *be, epo_queue *const *queues, int count,
                                    epo_stream stream) {
    (void)be;
    (void)queues;
    (void)count;
    if (stream != NULL)
        return epo_fail(EPO_E_ARG, "the host engine has no streams: pass NULL");
    return EPO_OK;
}

static epo_status host_stream_leave(epo_backend *be, epo_event *event, epo_stream stream) {
    if (stream != NULL)
        return epo_fail(EPO_E_ARG, "the host engine has no streams: pass NULL");
    return host_sync(be, event);
}

static const epo_backend_ops host_ops = {
    .size = sizeof(epo_backend_ops),
    .name = "host",
    .world_create = host_world_create,
    .world_destroy = host_world_destroy,
    .open = host_open,
    .close = host_close,
    .info = host_info,
    .status = host_status,
    .barrier = host_barrier,
    .allgather = host_allgather,
    .allreduce = host_allreduce,
    .alloc = host_alloc,
    .free = host_free,
    .read = NULL, /* ordinary memory */
    .write = NULL,
    .window_create = host_window_create,
    .window_destroy = host_window_destroy,
    .window_local = host_window_local,
    .queue_create = host_queue_create,
    .queue_destroy = host_queue_destroy,
    .event_create = host_event_create,
    .event_destroy = host_event_destroy,
    .stream_enter = host_stream_enter,
    .stream_leave = host_stream_leave,
    .sync = host_sync,
    .exchange = host_exchange,
    .gather = host_gather,
    .wire_pack = host_wire_pack,
    .reduce = host_reduce,
    .gemm = host_gemm,
    .swiglu = host_swiglu,
    .zero = host_zero,
    .call = host_call,
    .record_start = host_record_start,
    .record_stop = host_record_stop,
    .memory = host_memory,
    .abort = host_abort,
    .turn = host_turn_take,
    .turn_end = host_turn_end,
};

const epo_backend_ops *epo_backend_get(void) { return &host_ops; }
