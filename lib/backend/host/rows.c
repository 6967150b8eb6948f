/* SPDX-License-Identifier: Apache-2.0
 *
 * rows.c - passes over rows: gather, reduce, zero, and a caller's own.
 */
#include "config.h"

#include "backend/host/host.h"
#include "backend/host/convert.h"

#include <string.h>

#define ROWS_BLOCK 512 /* elements summed at a time: 2 KiB of the stack */

/* ---- wire rows ---- */

static void wire_pack_run(host_worker *w, host_op *op) {
    (void)w;
    const epo_wire_pack *p = &op->u.pack;
    const uint64_t n = (uint64_t)p->elements, bytes = epo_wire_bytes(n);
    unsigned char *dst = p->dst;
    for (uint64_t row = 0; row < p->rows; row++, dst += bytes)
        for (uint64_t at = 0; at < n; at += EPO_WIRE_GROUP) {
            float v[EPO_WIRE_GROUP], most = 0;
            host_load(v, p->src, row * n + at, EPO_WIRE_GROUP, p->type);
            for (int i = 0; i < EPO_WIRE_GROUP; i++) {
                float size = host_float(host_bits(v[i]) & 0x7fffffffu);
                most = size > most ? size : most;
            }
            const float fit = most / 448.0F, least = fit > EPO_WIRE_LEAST ? fit : EPO_WIRE_LEAST;
            const float scale = most > 0 ? least : 1.0F, inverse = 1.0F / scale;
            for (int i = 0; i < EPO_WIRE_GROUP; i++)
                dst[at + (uint64_t)i] = host_to_e4m3(v[i] * inverse);
            memcpy(dst + n + at / EPO_WIRE_GROUP * sizeof scale, &scale, sizeof scale);
        }
}

epo_status host_wire_pack(epo_queue *q, const epo_wire_pack *p, const epo_deps *deps) {
    host_op *op;
    epo_status status = host_op_create(q, deps, wire_pack_run, &op);
    if (status != EPO_OK)
        return status;
    op->u.pack = *p;
    return host_op_issue(q, op);
}

static void wire_unpack(const epo_rows_gather *g, uint64_t row, const unsigned char *from) {
    const uint64_t n = (uint64_t)g->wire;
    for (uint64_t at = 0; at < n; at += EPO_WIRE_GROUP) {
        float v[EPO_WIRE_GROUP], scale;
        memcpy(&scale, from + n + at / EPO_WIRE_GROUP * sizeof scale, sizeof scale);
        for (int i = 0; i < EPO_WIRE_GROUP; i++)
            v[i] = host_from_e4m3(from[at + (uint64_t)i]) * scale;
        host_store(g->dst, row * n + at, v, EPO_WIRE_GROUP, g->type);
    }
}

static void gather_run(host_worker *w, host_op *op) {
    (void)w;
    const epo_rows_gather *g = &op->u.gather;
    unsigned char *dst = g->dst;
    const unsigned char *src = g->src;
    const uint64_t bytes = g->wire > 0 ? epo_wire_bytes((uint64_t)g->wire) : g->row_bytes;
    for (uint64_t i = 0; i < g->rows; i++, dst += g->row_bytes) {
        int64_t from = g->index != NULL ? g->index[i] : (int64_t)i;
        if (from < 0)
            memset(dst, 0, g->row_bytes);
        else if (g->wire > 0)
            wire_unpack(g, i, src + (uint64_t)from * bytes);
        else
            memcpy(dst, src + (uint64_t)from * bytes, bytes);
    }
}

epo_status host_gather(epo_queue *q, const epo_rows_gather *g, const epo_deps *deps) {
    host_op *op;
    epo_status status = host_op_create(q, deps, gather_run, &op);
    if (status != EPO_OK)
        return status;
    op->u.gather = *g;
    return host_op_issue(q, op);
}

/* Adds n elements; fp32 as it lies there. */
HOST_INLINE void reduce_add(float *restrict sum, const epo_rows_reduce *r, uint64_t from,
                            uint64_t n) {
    float room[ROWS_BLOCK];
    const float *term = room;
    if (r->type == EPO_F32)
        term = (const float *)r->src + from;
    else
        host_load(room, r->src, from, n, r->type);
    for (uint64_t e = 0; e < n; e++)
        sum[e] += term[e];
}

/* One row's elements [at, at+n).  The first term is taken as it is, so that one
 * term alone, -0 too, passes unchanged. */
HOST_INLINE void reduce_block(const epo_rows_reduce *r, uint64_t row, uint64_t at, uint64_t n) {
    float sum[ROWS_BLOCK];
    const int32_t *index = r->index + row * (uint64_t)r->width;
    bool first = true;
    for (int j = 0; j < r->width; j++) {
        if (index[j] < 0)
            continue;
        uint64_t from = (uint64_t)index[j] * (uint64_t)r->elements + at;
        if (first)
            host_load(sum, r->src, from, n, r->type);
        else
            reduce_add(sum, r, from, n);
        first = false;
    }
    if (first)
        memset(sum, 0, n * sizeof *sum);
    host_store(r->dst, row * (uint64_t)r->elements + at, sum, n, r->type);
}

HOST_INLINE void reduce_rows(const epo_rows_reduce *r) {
    uint64_t elements = (uint64_t)r->elements;
    for (uint64_t row = 0; row < r->rows; row++) {
        for (uint64_t at = 0; at < elements; at += ROWS_BLOCK) {
            uint64_t n = elements - at < ROWS_BLOCK ? elements - at : ROWS_BLOCK;
            reduce_block(r, row, at, n);
        }
    }
}

HOST_WIDE static void reduce_wide(const epo_rows_reduce *r) { reduce_rows(r); }
static void reduce_any(const epo_rows_reduce *r) { reduce_rows(r); }

static void reduce_run(host_worker *w, host_op *op) {
    if (w->be->wide)
        reduce_wide(&op->u.reduce);
    else
        reduce_any(&op->u.reduce);
}

epo_status host_reduce(epo_queue *q, const epo_rows_reduce *r, const epo_deps *deps) {
    if (!host_type_known(r->type) || r->width < 0 || r->elements < 0)
        return epo_fail(EPO_E_ARG,
                        "reduce: found type %d, width %d, elements %d; allowed 0..2, 0.., 0..",
                        (int)r->type, r->width, r->elements);
    host_op *op;
    epo_status status = host_op_create(q, deps, reduce_run, &op);
    if (status != EPO_OK)
        return status;
    op->u.reduce = *r;
    return host_op_issue(q, op);
}

static void zero_run(host_worker *w, host_op *op) {
    (void)w;
    if (op->u.zero.bytes > 0)
        memset(op->u.zero.ptr, 0, op->u.zero.bytes);
}

epo_status host_zero(epo_queue *q, void *ptr, uint64_t bytes, const epo_deps *deps) {
    host_op *op;
    epo_status status = host_op_create(q, deps, zero_run, &op);
    if (status != EPO_OK)
        return status;
    op->u.zero.ptr = ptr;
    op->u.zero.bytes = bytes;
    return host_op_issue(q, op);
}

static void call_run(host_worker *w, host_op *op) {
    (void)w;
    op->u.call.fn(op->u.call.ctx);
}

epo_status host_call(epo_queue *q, void (*fn)(void *ctx), void *ctx, const epo_deps *deps) {
    host_op *op;
    epo_status status = host_op_create(q, deps, call_run, &op);
    if (status != EPO_OK)
        return status;
    op->u.call.fn = fn;
    op->u.call.ctx = ctx;
    return host_op_issue(q, op);
}
