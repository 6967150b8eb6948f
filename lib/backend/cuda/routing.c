/* SPDX-License-Identifier: Apache-2.0
 *
 * routing.c - counting a routing on the device: the one place where the CPU waits
 * for the GPU in a layer call, for counts in mapped memory.
 */
#include "backend/cuda/gpu.h"
#include "backend/cuda/routes.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct gpu_routing {
    gpu_route_scratch scratch;
    void *memory; /* device, of scratch and expert_first */
    uint64_t bytes;
    uint64_t *first[2]; /* device, [GPU_ROUTE_EXPERTS] each: layout and send_first */
    void *first_memory;
    /* Mapped host memory: done word, bad slot, dropped slots, counts; then staging for
     * `first`. */
    uint64_t *host;
    uint64_t *host_dev;
    uint64_t counted;
};

#define HOST_COUNTS 3
#define HOST_WORDS (HOST_COUNTS + (GPU_ROUTE_EXPERTS + GPU_ROUTE_RANKS) / 2)
#define FIRST_BYTES (2 * GPU_ROUTE_EXPERTS * sizeof(uint64_t))
#define HOST_BYTES (HOST_WORDS * sizeof(uint64_t) + 2 * FIRST_BYTES)

static epo_status routing_open(epo_backend *be) {
    gpu_routing *g = calloc(1, sizeof *g);
    void *host = NULL, *device = NULL;
    if (g == NULL)
        return epo_fail(EPO_E_NOMEM, "rank %d: no memory for routing", be->rank);
    epo_status status = gpu_alloc(be, 2 * FIRST_BYTES, &g->first_memory);
    if (status == EPO_OK)
        status = gpu_host_map(be, HOST_BYTES, "routing", &host, &device);
    if (status != EPO_OK) { /* no half of it for the next plan */
        gpu_free(be, g->first_memory, 2 * FIRST_BYTES);
        free(g);
        return status;
    }
    g->first[0] = g->first_memory;
    g->first[1] = g->first[0] + 2 * GPU_ROUTE_EXPERTS;
    g->host = host;
    g->host_dev = device;
    be->routing = g;
    return EPO_OK;
}

void gpu_routing_close(epo_backend *be) {
    gpu_routing *g = be->routing;
    if (g == NULL)
        return;
    gpu_free(be, g->memory, g->bytes);
    gpu_free(be, g->first_memory, 2 * FIRST_BYTES);
    if (g->host != NULL)
        (void)cudaFreeHost(g->host);
    free(g);
    be->routing = NULL;
}

/* Room for a routing of this shape; met once per size. */
static epo_status routing_hold(epo_backend *be, const epo_routes *r) {
    gpu_routing *g = be->routing;
    const uint64_t blocks = ((uint64_t)r->tokens + GPU_ROUTE_TOKENS - 1) / GPU_ROUTE_TOKENS + 1;
    const uint64_t slots = ((uint64_t)r->tokens * (uint64_t)r->top_k + 63) / 64 * 64;
    const uint64_t base = blocks * (uint64_t)r->experts_all, ranks = blocks * (uint64_t)r->ranks;
    const uint64_t experts = (uint64_t)r->experts_all;
    const uint64_t capacity = r->capacity != UINT64_MAX ? slots + 2 * experts : 0;
    const uint64_t need = 64 + 4 * (slots + base + ranks + capacity);
    if (need > g->bytes) {
        gpu_free(be, g->memory, g->bytes);
        g->memory = NULL;
        g->bytes = 0;
        epo_status status = gpu_alloc(be, need, &g->memory);
        if (status != EPO_OK)
            return status;
        g->bytes = need;
    }
    char *at = g->memory;
    g->scratch.bad = (unsigned long long *)(void *)at;
    g->scratch.copy = (int32_t *)(void *)(at + 64);
    g->scratch.base = (uint32_t *)(void *)(at + 64 + 4 * slots);
    g->scratch.rank_rows = g->scratch.base + base;
    g->scratch.total = g->scratch.rank_rows + ranks;
    g->scratch.start = g->scratch.total + experts;
    g->scratch.list = (int32_t *)(g->scratch.start + experts);
    return EPO_OK;
}

/* The word follows the counts: the device writes it behind them. */
static epo_status routing_wait(epo_backend *be, epo_queue *q) {
    gpu_routing *g = be->routing;
    const double start = gpu_now();
    for (unsigned spins = 0; __atomic_load_n(&g->host[0], __ATOMIC_ACQUIRE) < g->counted; spins++) {
        if (atomic_load(&be->late) != EPO_OK)
            return gpu_late(be);
        if (spins % 4096 == 4095) {
            cudaError_t e = cudaStreamQuery(q->stream);
            if (e != cudaSuccess && e != cudaErrorNotReady)
                return gpu_fail(be, "cudaStreamQuery", "routing", e);
            if (gpu_now() - start > 2 * be->timeout_s + 5)
                return epo_fail(EPO_E_TIMEOUT,
                                "rank %d: counts of the routing did not come within %.0f s: what "
                                "the caller's stream holds before it hangs",
                                be->rank, 2 * be->timeout_s + 5);
        }
    }
    return EPO_OK;
}

epo_status gpu_route_count(epo_queue *q, const epo_routes *r, epo_route_counts *out) {
    epo_backend *be = q->be;
    epo_status status = gpu_late(be);
    if (r->experts_all > GPU_ROUTE_EXPERTS || r->ranks > GPU_ROUTE_RANKS)
        return epo_fail(EPO_E_ARG, "rank %d: %d experts, %d ranks: allowed at most %d and %d",
                        be->rank, r->experts_all, r->ranks, GPU_ROUTE_EXPERTS, GPU_ROUTE_RANKS);
    GPU_TRY(be, "routing", cudaSetDevice(be->device));
    if (status == EPO_OK && be->routing == NULL)
        status = routing_open(be);
    if (status == EPO_OK)
        status = routing_hold(be, r);
    if (status != EPO_OK)
        return status;
    gpu_routing *g = be->routing;
    uint32_t *rows = (uint32_t *)(void *)(g->host_dev + HOST_COUNTS);
    GPU_TRY(be, "routing",
            gpu_kernel_route_count(q->stream, r, &g->scratch, rows, rows + r->experts_all,
                                   (unsigned long long *)(void *)(g->host_dev + 1)));
    if (r->chunks > 0)
        status = gpu_flex_count_chunks(q, r, g->scratch.copy);
    if (status != EPO_OK)
        return status;
    g->counted++;
    status = gpu_word_write(q, (uint64_t)(uintptr_t)g->host_dev, g->host, g->counted, "routing");
    if (status == EPO_OK)
        status = routing_wait(be, q);
    if (status != EPO_OK)
        return status;
    const uint32_t *counted = (const uint32_t *)(const void *)(g->host + HOST_COUNTS);
    const uint64_t slots = (uint64_t)r->tokens * (uint64_t)r->top_k;
    memcpy(out->expert_rows, counted, (size_t)r->experts_all * sizeof *counted);
    memcpy(out->rank_rows, counted + r->experts_all, (size_t)r->ranks * sizeof *counted);
    if (r->chunks > 0)
        gpu_flex_counted(be, r, out->chunk_rows);
    out->bad = g->host[1] < slots ? g->host[1] : slots;
    out->bad_value = 0;
    out->dropped = g->host[2];
    if (out->bad < slots)
        status = gpu_read(be, &out->bad_value, r->experts + out->bad, sizeof out->bad_value);
    return status;
}

/* Small arrays to the device in queue order; half `which` of the staging. */
static epo_status routing_stage(epo_queue *q, int which, const uint64_t *a, const uint64_t *b,
                                int count, const char *phase) {
    gpu_routing *g = q->be->routing;
    uint64_t *stage = g->host + HOST_WORDS + (uint64_t)which * 2 * GPU_ROUTE_EXPERTS;
    memcpy(stage, a, (size_t)count * sizeof *a);
    if (b != NULL)
        memcpy(stage + count, b, (size_t)count * sizeof *b);
    GPU_TRY(q->be, phase,
            cudaMemcpyAsync(g->first[which], stage, (size_t)count * (b != NULL ? 2 : 1) * sizeof *a,
                            cudaMemcpyHostToDevice, q->stream));
    return EPO_OK;
}

epo_status gpu_route_send(epo_queue *q, const epo_routes *r, const uint64_t *expert_first,
                          const uint64_t *own_row, int32_t *token, int32_t *slot, int32_t *row,
                          const epo_deps *deps) {
    epo_status status;
    if (!gpu_op_begin(q, deps, &status))
        return status;
    status = routing_stage(q, 0, expert_first, own_row, r->experts_all, deps->name);
    if (status != EPO_OK)
        return status;
    const uint64_t *first = q->be->routing->first[0];
    GPU_TRY(q->be, deps->name,
            gpu_kernel_route_send(q->stream, r, &q->be->routing->scratch, first,
                                  own_row != NULL ? first + r->experts_all : NULL, token, slot,
                                  row));
    return gpu_op_end(q, deps);
}

epo_status gpu_route_pad(epo_queue *q, const uint64_t *first, const uint64_t *count, int experts,
                         uint64_t rows, int32_t *index, const epo_deps *deps) {
    epo_status status;
    if (experts > GPU_ROUTE_EXPERTS)
        return epo_fail(EPO_E_ARG, "rank %d: %d local experts, allowed at most %d", q->be->rank,
                        experts, GPU_ROUTE_EXPERTS);
    if (!gpu_op_begin(q, deps, &status))
        return status;
    status = routing_stage(q, 1, first, count, experts, deps->name);
    if (status != EPO_OK)
        return status;
    GPU_TRY(q->be, deps->name,
            gpu_kernel_route_pad(q->stream, q->be->routing->first[1],
                                 q->be->routing->first[1] + experts, experts, rows, index));
    return gpu_op_end(q, deps);
}
