/* SPDX-License-Identifier: Apache-2.0
 *
 * Routings that become maps where they are: from the plain functions of route.h, so that what
 * lib/moe makes of a device's counts is held against what it makes of its own.
 */
#include "backend/host/host.h"
#include "backend/route.h"
#include "backend/route_flex_step.h"
#include "moe_device.h"
#include "moe_reference.h"

#include <stdlib.h>
#include <string.h>

static epo_route_shape shape_of(const epo_routes *r) {
    return (epo_route_shape){.ranks = r->ranks,
                             .experts = r->experts_all,
                             .top_k = r->top_k,
                             .chunks = r->chunks > 0 ? r->chunks : 1,
                             .align = 1};
}

/* experts[T][K] of a routing, -1 for what is another rank's or too much; NULL: `*bad` is the
 * first slot out of range.  To be freed. */
static int32_t *judge(const epo_routes *r, uint64_t *bad, uint64_t *dropped) {
    const epo_route_shape s = shape_of(r);
    const uint64_t slots = (uint64_t)r->tokens * (uint64_t)r->top_k;
    int32_t *experts = moe_calloc(slots, sizeof *experts);
    uint32_t *rows = moe_calloc((size_t)r->experts_all, sizeof *rows);
    epo_route_rival *rivals = moe_calloc(slots, sizeof *rivals);
    *dropped = 0;
    *bad = epo_route_check(&s, r->experts, r->tokens, experts);
    for (uint64_t i = 0; *bad == slots && r->shares > 1 && i < slots; i++)
        if ((int)(i / (uint64_t)r->top_k) % r->shares != r->share)
            experts[i] = -1;
    if (*bad == slots && r->capacity != EPO_ROUTE_UNLIMITED)
        *dropped = epo_route_drop(&s, experts, r->weights, r->tokens, r->capacity, r->by_weight,
                                  rows, rivals);
    free(rows);
    free(rivals);
    return experts;
}

/* Of the routing counted last on this thread. */
static _Thread_local int32_t *last;

static epo_status route_count(epo_queue *q, const epo_routes *r, epo_route_counts *out) {
    const epo_route_shape s = shape_of(r);
    const uint64_t slots = (uint64_t)r->tokens * (uint64_t)r->top_k;
    const size_t each = (size_t)r->ranks * (size_t)r->chunks;
    int32_t *experts = judge(r, &out->bad, &out->dropped);
    out->bad_value = out->bad < slots ? r->experts[out->bad] : 0;
    last = moe_device_room(q->be, slots * sizeof *last);
    if (out->bad == slots) {
        memcpy(last, experts, slots * sizeof *last);
        epo_route_count(&s, last, r->tokens, out->expert_rows, out->rank_rows);
        memset(out->chunk_rows, 0, 2 * each * sizeof *out->chunk_rows);
    }
    for (int t = 0; out->bad == slots && r->chunks > 0 && t < r->tokens; t++)
        for (int d = 0, from, to; d < r->ranks; d++)
            if (epo_flex_token_chunks(last + t * r->top_k, r->top_k, epo_route_local(&s), r->chunks,
                                      d, &from, &to)) {
                out->chunk_rows[d * r->chunks + from]++;
                out->chunk_rows[each + (size_t)(d * r->chunks + to)]++;
            }
    free(experts);
    return EPO_OK;
}

/* ---- alltoall ------------------------------------------------------------------------------ */

typedef struct send_args {
    epo_routes routes;
    const int32_t *experts; /* NULL: judged when it runs */
    const uint64_t *first, *own;
    int32_t *token, *slot, *row;
    uint64_t *cursor;
    epo_backend *be;
    bool overflow_is_error;
} send_args;

static void send_maps(const send_args *a, const int32_t *experts) {
    const epo_routes *r = &a->routes;
    const epo_route_shape s = shape_of(r);
    const uint64_t *own = a->own;
    memset(a->token, 0xff, r->fill * sizeof *a->token);
    memset(a->slot, 0xff, r->fill * sizeof *a->slot);
    epo_route_send(&s, experts, r->tokens, a->first, a->cursor, a->token, a->slot, a->row);
    for (int i = 0; own != NULL && i < r->tokens * r->top_k; i++) {
        const int32_t e = experts[i];
        if (e >= 0 && own[e] != UINT64_MAX)
            a->row[i] = -2 - (int32_t)(own[e] + (uint64_t)a->row[i] - a->first[e]);
    }
}

static void send_run(void *args) {
    const send_args *a = args;
    send_maps(a, a->experts);
}

static uint64_t *copy_of(const epo_backend *be, const uint64_t *v, int count) {
    uint64_t *copy = moe_device_room(be, (uint64_t)count * sizeof *copy);
    memcpy(copy, v, (size_t)count * sizeof *copy);
    return copy;
}

static epo_status route_send(epo_queue *q, const epo_routes *r, const uint64_t *expert_first,
                             const uint64_t *own_row, int32_t *token, int32_t *slot, int32_t *row,
                             const epo_deps *deps) {
    const send_args a = {.routes = *r,
                         .experts = last,
                         .first = copy_of(q->be, expert_first, r->experts_all),
                         .own = own_row != NULL ? copy_of(q->be, own_row, r->experts_all) : NULL,
                         .token = token,
                         .slot = slot,
                         .row = row,
                         .cursor = copy_of(q->be, expert_first, r->experts_all)};
    return moe_device_run(q, send_run, &a, sizeof a, deps);
}

typedef struct pad_args {
    const uint64_t *first, *count;
    int experts;
    uint64_t rows;
    int32_t *index;
} pad_args;
static void pad_run(void *args) {
    const pad_args *a = args;
    const epo_route_shape s = {.ranks = 1, .experts = a->experts};
    epo_route_pad(&s, a->first, a->count, a->rows, a->index);
}
static epo_status route_pad(epo_queue *q, const uint64_t *first, const uint64_t *count, int experts,
                            uint64_t rows, int32_t *index, const epo_deps *deps) {
    const pad_args a = {copy_of(q->be, first, experts), copy_of(q->be, count, experts), experts,
                        rows, index};
    return moe_device_run(q, pad_run, &a, sizeof a, deps);
}

/* ---- flex ---------------------------------------------------------------------------------- */

typedef struct flex_args {
    epo_routes routes;
    epo_flex_send out;
    const int32_t *experts;
} flex_args;

static void block_starts(const epo_routes *r, const int32_t *experts, uint64_t *start) {
    int from, to;
    for (int d = 0; d < r->ranks; d++) {
        start[d + 1] = start[d];
        for (int t = 0; t < r->tokens; t++)
            start[d + 1] +=
                epo_flex_token_chunks(experts + t * r->top_k, r->top_k, r->experts_all / r->ranks,
                                      r->chunks, d, &from, &to);
    }
}

/* place[T][K]: among this rank's rows of the expert. */
static int32_t *places(const epo_routes *r, const int32_t *experts) {
    int32_t *place = moe_calloc((size_t)r->tokens * (size_t)r->top_k, sizeof *place);
    int32_t *next = moe_calloc((size_t)r->experts_all, sizeof *next);
    for (int i = 0; i < r->tokens * r->top_k; i++)
        place[i] = experts[i] >= 0 ? next[experts[i]]++ : 0;
    free(next);
    return place;
}

/* Rows of token t to rank d: the meta row lies where the row is sent, and says where it returns. */
static void flex_run(void *args) {
    const flex_args *a = args;
    const epo_routes *r = &a->routes;
    const int k = r->top_k, local = r->experts_all / r->ranks, n = r->chunks;
    const int words = epo_flex_meta_words(k);
    const size_t columns = (size_t)(r->ranks * n);
    uint64_t *start = moe_calloc((size_t)r->ranks + 1, sizeof *start);
    uint32_t *firsts = moe_calloc(2 * columns, sizeof *firsts), *lasts = firsts + columns;
    int32_t *place = places(r, a->experts);
    int first, last_chunk;
    block_starts(r, a->experts, start);
    for (int d = 0; d < r->ranks; d++) { /* where each chunk's rows begin */
        for (int t = 0; t < r->tokens; t++)
            if (epo_flex_token_chunks(a->experts + t * k, k, local, n, d, &first, &last_chunk))
                for (int c = 0; c < n; c++) {
                    firsts[d * n + c] += c > first;
                    lasts[d * n + c] += c > last_chunk;
                }
    }
    for (int t = 0; t < r->tokens; t++) {
        const int32_t *e = a->experts + t * k;
        int used = 0;
        for (int i = 0; i < k; i++)
            a->out.slot_weight[t * k + i] = -1;
        for (int d = 0; d < r->ranks; d++) {
            if (!epo_flex_token_chunks(e, k, local, n, d, &first, &last_chunk))
                continue;
            const int32_t sent = (int32_t)start[d] + (int32_t)firsts[d * n + first]++;
            const int32_t back = (int32_t)lasts[d * n + last_chunk]++;
            const int32_t row = (int32_t)start[d] + back;
            a->out.token[sent] = t;
            a->out.sum[t * a->out.width + used++] = row;
            for (int w = 0; w < words; w++)
                a->out.meta[sent * words + w] = (int32_t)epo_flex_meta_word(
                    w, e, place + t * k, r->weights != NULL ? r->weights + t * k : NULL, k, local,
                    d, back, last_chunk);
            for (int i = 0; i < k; i++)
                if (e[i] >= d * local && e[i] < (d + 1) * local)
                    a->out.slot_weight[t * k + i] = row * k + i;
        }
        while (used < a->out.width)
            a->out.sum[t * a->out.width + used++] = -1;
    }
    free(place);
    free(firsts);
    free(start);
}

static epo_status flex_send(epo_queue *q, const epo_routes *r, const epo_flex_send *out,
                            const epo_deps *deps) {
    const flex_args a = {*r, *out, last};
    return moe_device_run(q, flex_run, &a, sizeof a, deps);
}

typedef struct receive_args {
    epo_flex_receive in;
    epo_backend *be;
} receive_args;

static void receive_run(void *args) {
    const receive_args *a = args;
    const epo_flex_receive *in = &a->in;
    const epo_flex_arrived out = {in->expand, in->weight, in->back, NULL};
    const int words = epo_flex_meta_words(in->top_k);
    bool good = true;
    memset(in->expand, 0xff, in->rows * sizeof *in->expand);
    memset(in->weight, 0, in->rows * sizeof *in->weight);
    for (int r = 0; r < in->ranks; r++) {
        const int32_t past = r + 1 < in->ranks ? in->base[r + 1] : (int32_t)in->received;
        const epo_flex_source from = {in->meta + (int64_t)in->base[r] * words,
                                      in->target + r * in->local,
                                      in->returns + r * in->chunks,
                                      in->base[r],
                                      (int32_t)in->rows,
                                      (int32_t)in->received};
        for (int32_t i = 0; i < past - in->base[r]; i++)
            for (int k = 0; k < in->top_k; k++)
                good = epo_flex_arrive(&from, &out, i, k, in->top_k, in->local, in->chunks) && good;
    }
    if (!good)
        host_break(a->be, EPO_E_PEER, "impossible meta");
}

static int32_t *words_of(const epo_backend *be, const int32_t *v, int count) {
    int32_t *copy = moe_device_room(be, (uint64_t)count * sizeof *copy);
    memcpy(copy, v, (size_t)count * sizeof *copy);
    return copy;
}

static epo_status flex_receive(epo_queue *q, const epo_flex_receive *in, const epo_deps *deps) {
    receive_args a = {.in = *in, .be = q->be};
    a.in.base = words_of(q->be, in->base, in->ranks);
    a.in.target = words_of(q->be, in->target, in->ranks * in->local);
    a.in.returns = words_of(q->be, in->returns, in->ranks * in->chunks);
    return moe_device_run(q, receive_run, &a, sizeof a, deps);
}

void moe_device_maps(epo_backend_ops *ops) {
    ops->route_count = route_count;
    ops->route_send = route_send;
    ops->route_pad = route_pad;
    ops->flex_send = flex_send;
    ops->flex_receive = flex_receive;
}

/* ---- calls that a graph could hold --------------------------------------------------------- */

static const epo_backend_ops *host;
static _Atomic uint64_t replay_drops;

static epo_status replay_open(epo_backend *be) { return (void)be, EPO_OK; }

static epo_status replay_enter(epo_backend *be, epo_queue *const *queues, int count,
                               uint64_t *const *counters, int ncounters, epo_stream stream,
                               uint64_t *capture) {
    *capture = moe_device_is()->capture;
    for (int i = 0; i < ncounters; i++)
        ++*counters[i];
    return host->stream_enter(be, queues, count, stream);
}

/* All that the queues hold. */
static epo_status replay_leave(epo_backend *be, epo_stream stream) {
    epo_status status = host->status(be);
    for (epo_queue *q = be->queues; q != NULL; q = q->next) {
        epo_event *end = NULL;
        epo_deps deps = {.name = "leave", .chunk = -1};
        if (host->event_create(be, &end) != EPO_OK)
            abort();
        deps.signal = end;
        if (host->zero(q, NULL, 0, &deps) == EPO_OK)
            status = host->stream_leave(be, end, stream);
        host->event_destroy(be, end);
    }
    return moe_device_is()->unleavable
               ? epo_fail(EPO_E_SYSTEM, "the capture failed because of a call before")
               : status;
}

static epo_status replay_write(epo_backend *be, void *dst, const void *src, uint64_t bytes) {
    (void)be;
    memcpy(dst, src, bytes);
    return EPO_OK;
}

static uint64_t replay_scratch(const epo_routes *r) {
    return (uint64_t)r->experts_all * sizeof(uint64_t);
}
static uint64_t replay_dropped(const epo_backend *be) { return (void)be, replay_drops; }

/* The routing is judged when it runs: what is wrong breaks the group late. */
static void route_run(void *args) {
    send_args *a = args;
    uint64_t bad, dropped;
    int32_t *experts = judge(&a->routes, &bad, &dropped);
    if (bad < (uint64_t)a->routes.tokens * (uint64_t)a->routes.top_k)
        host_break(a->be, EPO_E_INDEX, "slot %llu", (unsigned long long)bad);
    else if (dropped > 0 && a->overflow_is_error)
        host_break(a->be, EPO_E_OVERFLOW, "%llu slots too many", (unsigned long long)dropped);
    else
        send_maps(a, experts);
    replay_drops += dropped;
    free(experts);
}

static epo_status replay_route(epo_queue *q, const epo_routes *routes, const epo_replay_route *r,
                               const epo_deps *deps) {
    const send_args a = {.routes = *routes,
                         .first = r->expert_first,
                         .own = r->own_row,
                         .token = r->token,
                         .slot = r->slot,
                         .row = r->row,
                         .cursor = r->scratch,
                         .be = q->be,
                         .overflow_is_error = r->overflow_is_error};
    return moe_device_run(q, route_run, &a, sizeof a, deps);
}

typedef struct replay_args {
    epo_routes r;
    epo_replay_flex f;
} replay_args;

/* What rank d gets of token t, and when. */
static void replay_token(const replay_args *a, int t, int d) {
    const epo_routes *r = &a->r;
    const epo_replay_flex *f = &a->f;
    const int k = r->top_k, local = r->experts_all / r->ranks, row = d * r->tokens + t;
    int32_t *meta = f->meta + row * 2 * k;
    int first = f->chunks;
    for (int i = 0; i < k; i++) {
        const int32_t place = f->row[t * k + i];
        const int64_t e = place >= 0 ? r->experts[t * k + i] : -1;
        const bool there = e >= 0 && e / local == d;
        const float w = there && r->weights != NULL ? r->weights[t * k + i] : 1.0F;
        meta[i] = there ? (int32_t)(f->target[e] + (uint64_t)place - f->expert_first[e]) : -1;
        memcpy(&meta[k + i], &w, sizeof w);
        if (there && f->chunk[e % local] < first)
            first = f->chunk[e % local];
        if (there)
            f->slot_weight[t * k + i] = row * k + i;
    }
    for (int c = 0; c < f->chunks; c++)
        f->token[c * r->ranks * r->tokens + row] = c == first ? t : -2;
    for (int i = 0; first < f->chunks && i < f->width; i++)
        if (f->sum[t * f->width + i] == -1) {
            f->sum[t * f->width + i] = row;
            break;
        }
}

static void replay_send_run(void *args) {
    const replay_args *a = args;
    const size_t tokens = (size_t)a->r.tokens;
    memset(a->f.sum, 0xff, tokens * (size_t)a->f.width * sizeof *a->f.sum);
    memset(a->f.slot_weight, 0xff, tokens * (size_t)a->r.top_k * sizeof *a->f.slot_weight);
    for (int d = 0; d < a->r.ranks; d++)
        for (int t = 0; t < a->r.tokens; t++)
            replay_token(a, t, d);
}

static epo_status replay_flex_send(epo_queue *q, const epo_routes *routes, const epo_replay_flex *f,
                                   const epo_deps *deps) {
    const replay_args a = {*routes, *f};
    return moe_device_run(q, replay_send_run, &a, sizeof a, deps);
}

static void replay_arrived_run(void *args) {
    const epo_replay_arrived *a = args;
    const int k = a->top_k;
    memset(a->expand, 0xff, a->rows * sizeof *a->expand);
    memset(a->weight, 0, a->rows * sizeof *a->weight);
    for (uint64_t row = 0; row < a->received; row++)
        for (int i = 0; i < k; i++) {
            const int32_t *meta = a->meta + row * 2 * (uint64_t)k;
            const int32_t place = meta[i];
            a->back[row * (uint64_t)k + (uint64_t)i] = place;
            if (place < 0 || (uint64_t)place >= a->rows)
                continue;
            a->expand[place] = (int32_t)row;
            memcpy(&a->weight[place], &meta[k + i], sizeof *a->weight);
        }
}
static epo_status replay_flex_arrived(epo_queue *q, const epo_replay_arrived *in,
                                      const epo_deps *deps) {
    return moe_device_run(q, replay_arrived_run, in, sizeof *in, deps);
}

void moe_device_replays(epo_backend_ops *ops, const epo_backend_ops *of) {
    host = of;
    ops->replay_open = replay_open;
    ops->replay_enter = replay_enter;
    ops->replay_leave = replay_leave;
    ops->replay_write = replay_write;
    ops->replay_scratch = replay_scratch;
    ops->replay_route = replay_route;
    ops->replay_dropped = replay_dropped;
    ops->replay_flex_send = replay_flex_send;
    ops->replay_flex_arrived = replay_flex_arrived;
}
