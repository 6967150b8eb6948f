/* SPDX-License-Identifier: Apache-2.0
 *
 * flex.c - flex's maps by the device: what routing.c counted last, cut by chunks, and
 * the receiver's tables that the CPU made of everybody's counts.
 */
#include "backend/cuda/flex_plan.h"
#include "backend/cuda/gpu.h"
#include "backend/route_flex_step.h"

#include <stdlib.h>
#include <string.h>

struct gpu_flex_maps {
    gpu_flex_plan plan; /* of the routing counted last */
    void *memory;       /* device: its scratch */
    uint64_t bytes;
    uint32_t *host, *host_dev; /* mapped: the counts, then the receiver's tables */
    int32_t *tables;           /* device */
};

#define TABLES (GPU_FLEX_RANKS + 2 * GPU_FLEX_COLUMNS)
#define HOST_BYTES ((GPU_FLEX_COLUMNS + TABLES) * sizeof(uint32_t))

static epo_status maps_open(epo_backend *be) {
    gpu_flex_maps *m = calloc(1, sizeof *m);
    void *host = NULL, *device = NULL, *tables = NULL;
    if (m == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for flex", be->rank);
    epo_status status = gpu_alloc(be, TABLES * sizeof *m->tables, &tables);
    if (status == EPO_OK)
        status = gpu_host_map(be, HOST_BYTES, "routing", &host, &device);
    if (status != EPO_OK) { /* no half of it for the next plan */
        gpu_free(be, tables, TABLES * sizeof *m->tables);
        free(m);
        return status;
    }
    m->tables = tables;
    m->host = host;
    m->host_dev = device;
    be->flex = m;
    return EPO_OK;
}

void gpu_flex_close(epo_backend *be) {
    gpu_flex_maps *m = be->flex;
    if (m == NULL)
        return;
    gpu_free(be, m->memory, m->bytes);
    gpu_free(be, m->tables, TABLES * sizeof *m->tables);
    if (m->host != NULL)
        (void)cudaFreeHost(m->host);
    free(m);
    be->flex = NULL;
}

/* Scratch for a routing of this shape; met once per size. */
static epo_status maps_hold(epo_backend *be, const epo_routes *r) {
    gpu_flex_maps *m = be->flex;
    gpu_flex_plan *p = &m->plan;
    p->routes = *r;
    p->routes.experts = NULL;
    p->chunks = r->chunks;
    p->width = r->ranks < r->top_k ? r->ranks : r->top_k;
    p->block_tokens = gpu_flex_block_tokens(r->tokens);
    const uint64_t slots = (uint64_t)r->tokens * (uint64_t)r->top_k + 1;
    const uint64_t pairs = (uint64_t)r->tokens * (uint64_t)p->width + 1;
    const uint64_t blocks = (uint64_t)r->tokens / (uint64_t)p->block_tokens + 1;
    const uint64_t need = 64 + 4 * (slots + 2 * pairs + blocks * (uint64_t)gpu_flex_columns(p));
    if (need > m->bytes) {
        gpu_free(be, m->memory, m->bytes);
        m->memory = NULL;
        m->bytes = 0;
        epo_status status = gpu_alloc(be, need, &m->memory);
        if (status != EPO_OK)
            return status;
        m->bytes = need;
    }
    p->bad = m->memory;
    p->place = (int32_t *)m->memory + 16;
    p->to = p->place + slots;
    p->send = p->to + pairs;
    p->base = (uint32_t *)(p->send + pairs);
    return EPO_OK;
}

epo_status gpu_flex_count_chunks(epo_queue *q, const epo_routes *r, int32_t *copy) {
    epo_backend *be = q->be;
    const int columns = r->experts_all + 2 * r->ranks * r->chunks;
    epo_status status = EPO_OK;
    if (r->ranks > GPU_FLEX_RANKS || columns > GPU_FLEX_COLUMNS)
        return epo_fail(EPO_E_ARG,
                        "rank %d: %d ranks, %d experts in %d chunks are more than flex counts on "
                        "the device (%d ranks, %d columns)",
                        be->rank, r->ranks, r->experts_all, r->chunks, GPU_FLEX_RANKS,
                        GPU_FLEX_COLUMNS);
    if (be->flex == NULL)
        status = maps_open(be);
    if (status == EPO_OK)
        status = maps_hold(be, r);
    if (status != EPO_OK)
        return status;
    be->flex->plan.copy = copy;
    GPU_TRY(be, "routing", gpu_flex_count(q->stream, &be->flex->plan));
    GPU_TRY(be, "routing",
            gpu_flex_totals(q->stream, &be->flex->plan, r->experts_all, be->flex->host_dev));
    return EPO_OK;
}

void gpu_flex_counted(const epo_backend *be, const epo_routes *r, uint32_t *chunk_rows) {
    memcpy(chunk_rows, be->flex->host,
           2 * (size_t)r->ranks * (size_t)r->chunks * sizeof *chunk_rows);
}

epo_status gpu_flex_send_maps(epo_queue *q, const epo_routes *r, const epo_flex_send *out,
                              const epo_deps *deps) {
    epo_status status;
    if (!gpu_op_begin(q, deps, &status))
        return status;
    gpu_flex_plan *p = &q->be->flex->plan;
    p->weights = r->weights;
    p->rank = q->be->rank;
    p->token = out->token;
    p->sum = out->sum;
    p->slot_weight = out->slot_weight;
    p->meta = out->meta;
    GPU_TRY(q->be, deps->name, gpu_flex_place(q->stream, p));
    return gpu_op_end(q, deps);
}

/* The staging is free: a routing was counted, so what the queue held before has run. */
epo_status gpu_flex_receive_maps(epo_queue *q, const epo_flex_receive *in, const epo_deps *deps) {
    epo_status status;
    epo_flex_receive on = *in;
    const size_t ranks = (size_t)in->ranks, local = (size_t)in->local, n = (size_t)in->chunks;
    const size_t all = ranks * (1 + local + n);
    if (all > TABLES || in->received > INT32_MAX || in->rows > INT32_MAX)
        return epo_fail(EPO_E_ARG, "rank %d: %d ranks, %d experts, %d chunks: tables for %d words",
                        q->be->rank, in->ranks, in->local, in->chunks, TABLES);
    if (!gpu_op_begin(q, deps, &status))
        return status;
    gpu_flex_maps *m = q->be->flex;
    int32_t *stage = (int32_t *)(void *)m->host + GPU_FLEX_COLUMNS;
    memcpy(stage, in->base, ranks * sizeof *stage);
    memcpy(stage + ranks, in->target, ranks * local * sizeof *stage);
    memcpy(stage + ranks * (1 + local), in->returns, ranks * n * sizeof *stage);
    GPU_TRY(
        q->be, deps->name,
        cudaMemcpyAsync(m->tables, stage, all * sizeof *stage, cudaMemcpyHostToDevice, q->stream));
    on.base = m->tables;
    on.target = m->tables + ranks;
    on.returns = m->tables + ranks * (1 + local);
    if ((status = gpu_late_fetch(q, deps->name)) != EPO_OK)
        return status;
    GPU_TRY(q->be, deps->name, gpu_flex_receive(q->stream, &on, q->be->late_word));
    return gpu_op_end(q, deps);
}
