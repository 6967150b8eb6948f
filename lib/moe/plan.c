/* SPDX-License-Identifier: Apache-2.0
 *
 * plan.c - a routing becomes a plan.  Every rank tells every other its counts,
 * and whether its arguments were right, in one record; so all ranks return the
 * same error and none waits for rows that never come.
 */
#include "moe/link.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A rank's record: this head, then expert_rows[E], rank_rows[R], chunk_rows[2][R][n]. */
typedef struct record_head {
    int32_t status, tokens, top_k;
    moe_passes passes;               /* since the last plan */
    float seconds[MOE_TUNE_CHOICES]; /* of moe_tune_report */
    char text[160];
} record_head;

uint64_t moe_plan_record_bytes(int experts, int ranks, int chunks) {
    uint64_t rows = (uint64_t)experts + (uint64_t)ranks * (1 + 2 * (uint64_t)chunks);
    return sizeof(record_head) + rows * sizeof(uint32_t);
}

bool moe_plan_on_device(const epo_buffer *b) {
    const epo_backend_ops *ops = b->group->ops;
    int64_t ranks = b->peers.count, columns = b->experts + 2 * ranks * b->chunks;
    if (b->dispatcher == EPO_DISPATCH_ALLTOALL)
        return ops->route_count != NULL;
    return ops->flex_send != NULL && ranks <= EPO_FLEX_RANKS && columns <= EPO_FLEX_COLUMNS;
}

/* Numbers of a record that speak of chunks. */
static uint64_t chunk_numbers(const epo_buffer *b) {
    bool some = b->dispatcher == EPO_DISPATCH_FLEX && moe_plan_on_device(b);
    return some ? 2 * (uint64_t)b->peers.count * (uint64_t)b->chunks : 0;
}

/* ---- CPU arrays -------------------------------------------------------- */

void *moe_carve(moe_carver *c, uint64_t count, uint64_t size) {
    uint64_t at, bytes, end;
    if (!epo_size_align(c->used, 16, &at) || !epo_size_mul(count, size, &bytes) ||
        !epo_size_add(at, bytes, &end)) {
        c->failed = true;
        return NULL;
    }
    c->used = end;
    return c->base != NULL ? c->base + at : NULL;
}

void moe_lane_carve(moe_carver *c, moe_lane *lane, uint64_t pieces, int chunks) {
    lane->send = moe_carve(c, pieces, sizeof *lane->send);
    lane->recv = moe_carve(c, pieces, sizeof *lane->recv);
    lane->send_first = moe_carve(c, (uint64_t)chunks + 1, sizeof *lane->send_first);
    lane->recv_first = moe_carve(c, (uint64_t)chunks + 1, sizeof *lane->recv_first);
    lane->segments = moe_carve(c, 2 * pieces, sizeof *lane->segments);
    lane->arrivals = moe_carve(c, 2 * pieces, sizeof *lane->arrivals);
}

/* What lives as long as the plan, and what only its making needs. */
static void carve(moe_carver *c, epo_plan *p) {
    const epo_buffer *b = p->buffer;
    uint64_t local = (uint64_t)b->local;
    p->first = moe_carve(c, local, sizeof *p->first);
    p->count = moe_carve(c, local, sizeof *p->count);
    p->back_first = moe_carve(c, (uint64_t)p->chunks + 1, sizeof *p->back_first);
    p->home_first = moe_carve(c, (uint64_t)b->peers.count, sizeof *p->home_first);
    moe_lane_carve(c, &p->dispatch, (uint64_t)b->experts, p->chunks);
    moe_lane_carve(c, &p->combine, (uint64_t)b->experts, p->chunks);
    moe_lane_carve(c, &p->homeward, p->singly ? (uint64_t)b->experts : 0, 1);
}

typedef struct making_arrays {
    int32_t *experts;
    uint32_t *counts, *rank_rows, *chunk_rows;
    uint64_t *capacity;
    char *records;
    uint64_t dropped;
    moe_padding padding;
} making_arrays;

static void carve_making(moe_carver *c, const epo_buffer *b, uint64_t slots, making_arrays *a) {
    uint64_t ranks = (uint64_t)b->peers.count, all = (uint64_t)b->group->ranks;
    a->experts = moe_carve(c, slots, sizeof *a->experts);
    a->counts = moe_carve(c, ranks * (uint64_t)b->experts, sizeof *a->counts);
    a->rank_rows = moe_carve(c, ranks * ranks, sizeof *a->rank_rows);
    a->chunk_rows = moe_carve(c, ranks * chunk_numbers(b), sizeof *a->chunk_rows);
    a->capacity = moe_carve(c, ranks, sizeof *a->capacity);
    a->records = moe_carve(c, all, b->counts_bytes);
}

/* ---- this rank's routing ------------------------------------------------ */

epo_status moe_plan_say(const epo_buffer *b, epo_status status, const char *format, ...) {
    char text[sizeof((record_head *)0)->text];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return epo_fail(status, "rank %d: %s", b->group->rank, text);
}

epo_status moe_plan_say_again(const epo_buffer *b, epo_status status) {
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    return moe_plan_say(b, status, "%s", text);
}

static epo_status check_routing(const epo_buffer *b, const epo_routing *r) {
    if (r->tokens < 0 || r->tokens > b->max_tokens)
        return moe_plan_say(b, EPO_E_ARG,
                            "tokens: found %d, allowed 0..%d (the buffer's max_tokens)", r->tokens,
                            b->max_tokens);
    if (r->top_k < 1 || r->top_k > b->top_k)
        return moe_plan_say(b, EPO_E_ARG, "top_k: found %d, allowed 1..%d (the buffer's top_k)",
                            r->top_k, b->top_k);
    if (r->tokens > 0 && r->experts == NULL)
        return moe_plan_say(b, EPO_E_ARG, "experts is NULL and tokens is %d", r->tokens);
    return EPO_OK;
}

/* Copies the caller's indices, checked. */
epo_status moe_plan_copy_experts(const epo_buffer *b, const epo_route_shape *s,
                                 const epo_routing *r, int32_t *copy) {
    epo_group *g = b->group;
    uint64_t slots = (uint64_t)r->tokens * (uint64_t)r->top_k;
    const int64_t *experts = r->experts;
    int64_t *fetched = NULL;
    if (g->ops->read != NULL && slots > 0) {
        fetched = malloc(slots * sizeof *fetched);
        if (fetched == NULL)
            return moe_plan_say(b, EPO_E_NOMEM, "memory: need %" PRIu64 " bytes for the routing",
                                slots * (uint64_t)sizeof *fetched);
        epo_status status = moe_group_read(g, fetched, experts, slots * sizeof *fetched);
        if (status != EPO_OK) {
            free(fetched);
            return status;
        }
        experts = fetched;
    }
    uint64_t bad = epo_route_check(s, experts, r->tokens, copy);
    epo_status status = EPO_OK;
    if (bad < slots)
        status = moe_plan_say(
            b, EPO_E_INDEX, "experts[%" PRIu64 "][%" PRIu64 "] = %" PRId64 ", allowed -1..%d",
            bad / (uint64_t)r->top_k, bad % (uint64_t)r->top_k, experts[bad], s->experts - 1);
    free(fetched);
    return status;
}

epo_routes moe_plan_routes(const epo_buffer *b, const epo_routing *r) {
    uint64_t capacity = moe_capacity_of(b, r->tokens, r->top_k);
    return (epo_routes){
        .experts = r->experts,
        .tokens = r->tokens,
        .top_k = r->top_k,
        .experts_all = b->experts,
        .ranks = b->peers.count,
        .shares = b->links ? 1 : b->group->tp, /* links: judged before */
        .share = b->group->rank % b->group->tp,
        .capacity = moe_capacity_drops(b) && !b->links ? capacity : EPO_ROUTE_UNLIMITED,
        .by_weight = b->overflow == EPO_OVERFLOW_DROP_WEIGHT,
        .weights = r->weights,
        .fill = b->pad ? (uint64_t)b->experts * capacity : 0,
        .chunks = chunk_numbers(b) > 0 ? b->chunks : 0,
    };
}

static epo_status count_on_device(const epo_buffer *b, const epo_routing *r, uint32_t *rows,
                                  uint64_t *dropped) {
    epo_group *g = b->group;
    epo_routes routes = moe_plan_routes(b, r);
    epo_route_counts out = {.expert_rows = rows,
                            .rank_rows = rows + b->experts,
                            .chunk_rows = rows + b->experts + b->peers.count};
    epo_status status = g->ops->route_count(g->compute, &routes, &out);
    if (status != EPO_OK)
        return moe_plan_say_again(b, status);
    *dropped = out.dropped;
    uint64_t k = (uint64_t)r->top_k;
    return out.bad == (uint64_t)r->tokens * k
               ? EPO_OK
               : moe_plan_say(b, EPO_E_INDEX,
                              "experts[%" PRIu64 "][%" PRIu64 "] = %" PRId64 ", allowed -1..%d",
                              out.bad / k, out.bad % k, out.bad_value, b->experts - 1);
}

/* Tokens that another rank with the same ones carries. */
void moe_plan_drop_others(const epo_group *g, const epo_routing *r, int32_t *experts) {
    for (int t = 0; g->tp > 1 && t < r->tokens; t++)
        for (int k = 0; t % g->tp != g->rank % g->tp && k < r->top_k; k++)
            experts[(size_t)t * (size_t)r->top_k + (size_t)k] = -1;
}

/* expert_rows[E] and rank_rows[R] of this rank, of what its capacity leaves; on the CPU
 * also the experts. */
static epo_status count_routing(const epo_buffer *b, const epo_route_shape *s, const epo_routing *r,
                                making_arrays *a, uint32_t *rows) {
    epo_status status;
    if (b->replays) /* the device judges it whenever it runs */
        return EPO_OK;
    if (moe_plan_on_device(b)) {
        status = count_on_device(b, r, rows, &a->dropped);
    } else {
        status = moe_plan_copy_experts(b, s, r, a->experts);
        if (status == EPO_OK && !b->links)
            moe_plan_drop_others(b->group, r, a->experts);
        if (status == EPO_OK && moe_capacity_drops(b) && !b->links)
            status = moe_capacity_drop(b, r, a->experts, &a->dropped);
        if (status == EPO_OK)
            epo_route_count(s, a->experts, r->tokens, rows, rows + b->experts);
    }
    if (status != EPO_OK)
        return status;
    if (b->links) /* judged where the tokens are */
        return EPO_OK;
    status = moe_capacity_check(b, r, rows);
    return status == EPO_OK ? EPO_OK : moe_plan_say_again(b, status);
}

/* This rank's record, complete whatever is wrong. */
static void write_record(epo_buffer *b, const epo_route_shape *s, const epo_routing *r,
                         epo_status status, making_arrays *a, char *record) {
    uint32_t *rows = (uint32_t *)(void *)(record + sizeof(record_head));
    memset(record, 0, b->counts_bytes);
    if (status == EPO_OK)
        status = count_routing(b, s, r, a, rows);
    record_head head = {.status = (int32_t)status,
                        .tokens = r->tokens,
                        .top_k = r->top_k,
                        .passes = b->group->passes};
    b->group->passes = (moe_passes){0};
    if (status != EPO_OK)
        snprintf(head.text, sizeof head.text, "%s", epo_fail_text());
    else
        moe_tune_report(b, head.seconds);
    memcpy(record, &head, sizeof head);
}

/* ---- exchange of records ------------------------------------------------ */

/* Sends, and waits on the calling thread until all ranks have sent theirs.  When it
 * returns, failed or not, the exchange reads the caller's memory no more. */
static epo_status exchange_control(epo_buffer *b, const epo_exchange *x, const char *name) {
    epo_group *g = b->group;
    epo_deps deps = moe_deps(name, EPO_INTERVAL_COMM, -1);
    moe_stats_exchange(g, MOE_BYTES_CONTROL, x->send, 0, x->nsend);
    epo_status status = g->ops->exchange(g->comm, x, &deps);
    if (status != EPO_OK)
        return status;
    status = moe_group_wait(g, moe_buffer_flag(b, x->flag_offset, x->epoch, name, -1), name);
    epo_status drained = moe_group_drain(g);
    return status != EPO_OK ? status : drained;
}

/* Records of all ranks into records[R].  The slot alternates: a rank sends its
 * record of plan p+1 when it has read all of plan p, so p+2 finds p's slot free. */
static epo_status exchange_records(epo_buffer *b, const char *mine, char *records) {
    epo_group *g = b->group;
    /* The CPU has it and wants it: no way through the device, nor one to other nodes. */
    if (g->ops->read != NULL || b->links) {
        b->plans_made++;
        return g->ops->allgather(g->be, mine, b->counts_bytes, records);
    }
    moe_arena arena = {0, false, {NULL, 0}, NULL};
    moe_arena_add(&arena, 1, b->counts_bytes);
    epo_segment *send = calloc((size_t)g->ranks, sizeof *send);
    epo_arrival *recv = calloc((size_t)g->ranks, sizeof *recv);
    epo_status status = send == NULL || recv == NULL
                            ? epo_fail(EPO_E_NOMEM, "memory: need room for %d ranks", g->ranks)
                            : moe_arena_open(g, &arena);
    if (status != EPO_OK)
        goto out;
    memcpy(arena.cpu, mine, b->counts_bytes);
    status = moe_arena_publish(g, &arena, 0, b->counts_bytes);
    if (status != EPO_OK)
        goto out;
    uint64_t epoch = ++b->plans_made;
    uint64_t slot = b->counts + (epoch % 2) * (uint64_t)g->ranks * b->counts_bytes;
    for (int i = 0; i < g->ranks; i++) {
        int peer = (g->rank + 1 + i) % g->ranks;
        send[i] = (epo_segment){.peer = peer,
                                .src = arena.block.ptr,
                                .dst_offset = slot + (uint64_t)g->rank * b->counts_bytes,
                                .rows = 1,
                                .row_bytes = (uint32_t)b->counts_bytes};
        recv[i] = (epo_arrival){peer, slot + (uint64_t)peer * b->counts_bytes, b->counts_bytes};
    }
    epo_exchange x = {.window = b->window,
                      .send = send,
                      .nsend = g->ranks,
                      .recv = recv,
                      .nrecv = g->ranks,
                      .flag_offset = b->counts_arrive,
                      .epoch = epoch};
    status = exchange_control(b, &x, "counts");
    if (status == EPO_OK)
        status = moe_group_read(g, records, moe_buffer_at(b, slot),
                                (uint64_t)g->ranks * b->counts_bytes);
out:
    moe_arena_close(g, &arena);
    free(recv);
    free(send);
    return status;
}

static record_head head_of(const epo_buffer *b, const making_arrays *a, int rank) {
    record_head head;
    memcpy(&head, a->records + (uint64_t)rank * b->counts_bytes, sizeof head);
    head.text[sizeof head.text - 1] = '\0';
    return head;
}

/* What the records of the ranks from `first` on say of themselves. */
static void take_records(const epo_buffer *b, const epo_route_shape *s, making_arrays *a,
                         int first) {
    for (int i = 0; i < s->ranks; i++) {
        const char *record = a->records + (uint64_t)(first + i) * b->counts_bytes;
        const uint32_t *rows = (const uint32_t *)(const void *)(record + sizeof(record_head));
        const record_head head = head_of(b, a, first + i);
        memcpy(a->counts + (size_t)i * (size_t)s->experts, rows, (size_t)s->experts * sizeof *rows);
        memcpy(a->rank_rows + (size_t)i * (size_t)s->ranks, rows + s->experts,
               (size_t)s->ranks * sizeof *rows);
        memcpy(a->chunk_rows + (uint64_t)i * chunk_numbers(b), rows + s->experts + s->ranks,
               chunk_numbers(b) * sizeof *rows);
        a->capacity[i] = moe_capacity_of(b, head.tokens, head.top_k);
    }
    if (b->pad)
        a->padding = moe_capacity_pad(b, a->capacity, a->counts);
    if (!b->replays)
        return;
    a->padding = (moe_padding){0, 0, 0};          /* nobody knows how many of the rows are */
    for (int i = 0; i < s->ranks * s->ranks; i++) /* flex: room for every token */
        a->rank_rows[i] = (uint32_t)head_of(b, a, first + i / s->ranks).tokens;
}

/* The same verdict on every rank: the lowest rank's error, then K, then passes, then rows. */
static epo_status judge(const epo_buffer *b, const epo_route_shape *s, making_arrays *a) {
    const int all = b->group->ranks, k = head_of(b, a, 0).top_k;
    for (int r = 0; r < all; r++) {
        record_head head = head_of(b, a, r);
        if (head.status != EPO_OK)
            return epo_fail((epo_status)head.status, "%s", head.text);
    }
    const moe_passes passes = head_of(b, a, 0).passes;
    for (int r = 1; r < all; r++) {
        const record_head head = head_of(b, a, r);
        if (head.top_k != k)
            return epo_fail(EPO_E_PEER,
                            "plan: top_k is %d on rank 0 and %d on rank %d; give all ranks the "
                            "same",
                            k, head.top_k, r);
        epo_status status = moe_passes_agree(&passes, &head.passes, r);
        if (status != EPO_OK)
            return status;
    }
    /* Those that exchange rows with each other, this rank's last: they stay. */
    for (int turn = 1; turn <= all / s->ranks; turn++) {
        const int first = (b->peers.first + turn * s->ranks) % all;
        take_records(b, s, a, first);
        for (int r = 0; r < s->ranks; r++) {
            uint64_t need = epo_route_layout(s, a->counts, r, NULL, NULL);
            if (need > b->max_rows[first + r])
                return epo_fail(EPO_E_OVERFLOW,
                                "rank %d needs %" PRIu64 " rows, the buffer has %" PRIu64
                                "; raise max_rows",
                                first + r, need, b->max_rows[first + r]);
        }
    }
    return EPO_OK;
}

/* ---- what the dispatchers use ------------------------------------------- */

epo_status moe_plan_exchange_meta(epo_plan *plan, const epo_segment *send, int nsend,
                                  const epo_arrival *recv, int nrecv, epo_event *after) {
    epo_buffer *b = plan->buffer;
    epo_group *g = b->group;
    /* No credit: a peer's counts of this plan came, so it has read the last meta.  Unless
     * a graph replays it. */
    epo_exchange x = {.window = b->window,
                      .send = send,
                      .nsend = nsend,
                      .recv = recv,
                      .nrecv = nrecv,
                      .flag_offset = b->meta_arrive,
                      .scope = b->scope,
                      .epoch = b->replays ? 0 : b->plans_made,
                      .counter = moe_buffer_counter(b, b->meta_arrive)};
    if (after == NULL)
        return exchange_control(b, &x, "routing");
    epo_deps deps = moe_deps("routing", EPO_INTERVAL_COMM, -1);
    moe_deps_wait(&deps, epo_ready_event(after));
    if (b->replays)
        moe_deps_wait(&deps, moe_buffer_flag(b, b->meta_credit, UINT64_MAX, "routing slot", -1));
    deps.signal = g->sent;
    moe_stats_exchange(g, MOE_BYTES_CONTROL, send, 0, nsend);
    return g->ops->exchange(g->comm, &x, &deps);
}

epo_status moe_plan_meta_credit(epo_buffer *b) {
    epo_exchange x = {.window = b->window,
                      .flag_offset = b->meta_credit,
                      .counter = moe_buffer_counter(b, b->meta_credit)};
    epo_deps deps = moe_deps("credit", EPO_INTERVAL_COMM, -1);
    return b->group->ops->exchange(b->group->compute, &x, &deps);
}

epo_status moe_plan_gather_weights(epo_plan *plan, const float *src, const int32_t *index) {
    epo_buffer *b = plan->buffer;
    epo_group *g = b->group;
    epo_rows_gather gather = {.dst = plan->weight,
                              .src = src,
                              .index = index,
                              .rows = plan->rows,
                              .row_bytes = sizeof(float)};
    epo_deps deps = moe_deps("weights", EPO_INTERVAL_LOCAL, -1);
    deps.signal = g->done;
    if (moe_plan_on_device(b)) {
        const uint64_t epoch = b->replays ? 0 : b->plans_made;
        moe_deps_wait(&deps, moe_buffer_flag(b, b->meta_arrive, epoch, "routing", -1));
        moe_deps_wait(&deps, epo_ready_event(g->sent));
    }
    epo_status status = g->ops->gather(g->compute, &gather, &deps);
    if (status == EPO_OK && b->replays)
        status = moe_plan_meta_credit(b);
    return status == EPO_OK && !moe_plan_on_device(b) ? g->ops->sync(g->be, g->done) : status;
}

/* Router weights in operation memory, 1.0 without. */
static epo_status stage_weights(epo_group *g, const epo_routing *r, moe_arena *arena) {
    uint64_t slots = (uint64_t)r->tokens * (uint64_t)r->top_k;
    moe_arena_add(arena, slots, sizeof(float));
    epo_status status = moe_arena_open(g, arena);
    if (status != EPO_OK)
        return status;
    float *weights = moe_arena_cpu(arena, 0);
    if (r->weights != NULL && slots > 0)
        status = moe_group_read(g, weights, r->weights, slots * sizeof *weights);
    else
        for (uint64_t i = 0; i < slots; i++)
            weights[i] = 1.0F;
    return status == EPO_OK ? moe_arena_publish(g, arena, 0, slots * sizeof *weights) : status;
}

/* ---- creation ----------------------------------------------------------- */

/* What all ranks know of the plan's size and of earlier ones' times. */
static void choose_chunks(epo_plan *p, const making_arrays *a) {
    epo_buffer *b = p->buffer;
    float slowest[MOE_TUNE_CHOICES] = {0};
    int tokens = 0;
    for (int r = 0; r < b->group->ranks; r++) {
        const record_head head = head_of(b, a, r);
        tokens = head.tokens > tokens ? head.tokens : tokens;
        for (int i = 0; i < MOE_TUNE_CHOICES; i++) {
            const bool none = head.seconds[i] <= 0 || (r > 0 && slowest[i] <= 0);
            slowest[i] = none ? 0 : head.seconds[i] > slowest[i] ? head.seconds[i] : slowest[i];
        }
    }
    moe_tune_learn(b, slowest);
    moe_tune_choose(p, tokens);
}

static epo_status alloc_plan(epo_buffer *b, const epo_routing *r, const making_arrays *a,
                             epo_plan **out) {
    epo_plan *p = calloc(1, sizeof *p);
    if (p == NULL)
        return epo_fail(EPO_E_NOMEM, "memory: need %zu bytes for a plan", sizeof *p);
    p->object.engine = &moe_engine;
    p->buffer = b;
    p->refs = 1;
    p->tokens = r->tokens;
    p->top_k = r->top_k;
    choose_chunks(p, a);
    p->number = b->plans_made;
    moe_carver count = {NULL, 0, false};
    carve(&count, p);
    p->memory = count.failed ? NULL : calloc(1, count.used);
    if (p->memory == NULL) {
        free(p);
        return epo_fail(EPO_E_NOMEM, "memory: need %" PRIu64 " bytes for a plan's lists",
                        count.used);
    }
    moe_carver real = {p->memory, 0, false};
    carve(&real, p);
    b->plans++;
    p->capture = b->group->replay.capture;
    b->group->replay.plans += p->capture != 0;
    *out = p;
    return EPO_OK;
}

static epo_status make_maps(epo_plan *p, const epo_routing *r, const epo_route_shape *s,
                            const making_arrays *a) {
    epo_group *g = p->buffer->group;
    moe_arena weights = {0, false, {NULL, 0}, NULL};
    bool flex = p->buffer->dispatcher == EPO_DISPATCH_FLEX;
    bool direct =
        moe_plan_on_device(p->buffer) && (r->weights != NULL || flex || p->buffer->replays);
    epo_status status = direct ? EPO_OK : stage_weights(g, r, &weights);
    if (status == EPO_OK) {
        moe_making m = {.plan = p,
                        .shape = moe_plan_shape(p),
                        .experts = a->experts,
                        .counts = a->counts,
                        .rank_rows = a->rank_rows,
                        .chunk_rows = a->chunk_rows,
                        .capacity = p->buffer->pad ? a->capacity : NULL,
                        .weights = direct ? r->weights : weights.block.ptr,
                        .routing = r};
        p->dropped = p->link != NULL ? p->link->dropped : a->dropped;
        p->padding = a->padding;
        g->stats.dropped_slots += p->dropped;
        p->rows = epo_route_layout(s, a->counts, p->buffer->peers.me, p->first, p->count);
        status = !flex                ? moe_alltoall_make(&m)
                 : p->buffer->replays ? moe_flex_make_replay(&m)
                                      : moe_flex_make(&m);
    }
    moe_arena_close(g, &weights);
    return status;
}

/* From here on peers may be waiting for this rank: what fails locally ends the
 * group's work, what all agreed on does not. */
static epo_status make(epo_buffer *b, const epo_routing *r, epo_status wrong, moe_link *link,
                       epo_plan **out) {
    epo_group *g = b->group;
    epo_route_shape s = moe_buffer_shape(b, wrong == EPO_OK ? r->top_k : 1);
    making_arrays a = {0};
    moe_carver count = {NULL, 0, false}, real = {NULL, 0, false};
    uint64_t slots = wrong == EPO_OK ? (uint64_t)r->tokens * (uint64_t)r->top_k : 0;
    epo_plan *p = NULL;
    carve_making(&count, b, slots, &a);
    char *mine = calloc(1, b->counts_bytes);
    real.base = count.failed ? NULL : calloc(1, count.used);
    if (real.base != NULL)
        carve_making(&real, b, slots, &a);
    epo_status status = mine == NULL || a.records == NULL
                            ? epo_fail(EPO_E_NOMEM, "memory: need %" PRIu64 " bytes to make a plan",
                                       count.used + b->counts_bytes)
                            : EPO_OK;
    if (status == EPO_OK) {
        write_record(b, &s, r, wrong, &a, mine);
        status = exchange_records(b, mine, a.records);
    }
    bool agreed = status == EPO_OK;
    if (agreed)
        status = judge(b, &s, &a);
    if (status == EPO_OK) {
        agreed = false;
        status = alloc_plan(b, r, &a, &p);
        if (status == EPO_OK) {
            p->link = link;
            link = NULL;
            status = make_maps(p, r, &s, &a);
        }
        if (status == EPO_OK && p->link != NULL)
            status = moe_link_finish(p);
    }
    free(real.base);
    free(mine);
    moe_link_free(b->group, link);
    if (status == EPO_OK) {
        *out = p;
        return EPO_OK;
    }
    if (!agreed)
        status = moe_group_break(g, status);
    moe_plan_release(p);
    return status;
}

static epo_status enter(epo_buffer *b, epo_stream stream) {
    epo_group *g = b->group;
    epo_queue *queues[] = {g->compute, g->comm};
    uint64_t *meta = moe_buffer_counter(b, b->meta_arrive);
    return b->replays ? g->ops->replay_enter(g->be, queues, 2, &meta, 1, stream, &g->replay.capture)
                      : g->ops->stream_enter(g->be, queues, 2, stream);
}

/* A plan that the caller's stream does not wait for is none. */
static epo_status leave(epo_buffer *b, epo_stream stream, epo_status status, epo_plan **out) {
    epo_group *g = b->group;
    epo_status left = EPO_OK;
    if (b->replays)
        left = moe_group_replayed(g, stream, status);
    else if (status == EPO_OK && (moe_plan_on_device(b) || b->links))
        left = g->ops->stream_leave(g->be, g->done, stream);
    if (status == EPO_OK && left != EPO_OK) {
        status = moe_group_break(g, left);
        moe_plan_release(*out);
        *out = NULL;
    }
    return status;
}

epo_status moe_plan_create(epo_buffer *buffer, const epo_routing *routing, epo_stream stream,
                           epo_plan **out) {
    if (buffer == NULL)
        return epo_fail(EPO_E_ARG, "plan_create: buffer is NULL");
    epo_group *g = buffer->group;
    epo_status status = moe_buffer_turn(buffer, EPO_TURN_PLAN, moe_group_ok(g));
    if (status != EPO_OK)
        return status;
    epo_routing r = EPO_ROUTING_INIT;
    epo_status wrong = moe_input(&r, sizeof r, routing, sizeof r, "epo_routing");
    if (wrong != EPO_OK)
        wrong = moe_plan_say_again(buffer, wrong);
    else if (out == NULL)
        wrong = moe_plan_say(buffer, EPO_E_ARG, "plan_create: out is NULL");
    else
        wrong = check_routing(buffer, &r);
    status = enter(buffer, stream);
    /* The CPU reads the routing, and writes memory that an earlier pass gave back
     * when it was issued. */
    bool device = moe_plan_on_device(buffer);
    if (status == EPO_OK && (!device || buffer->links) &&
        (g->ops->read != NULL || g->ops->write != NULL))
        status = moe_group_drain(g);
    if (status != EPO_OK) {
        if (buffer->replays)
            status = moe_group_replayed(g, stream, status);
        return moe_group_break(g, status);
    }
    moe_link *link = NULL;
    if (buffer->links)
        wrong = moe_link_open(buffer, &r, wrong, &link);
    status = buffer->links && wrong != EPO_OK ? wrong : make(buffer, &r, wrong, link, out);
    /* The queues may still read the caller's routing. */
    return leave(buffer, stream, status, out);
}

void moe_plan_retain(epo_plan *plan) {
    if (plan != NULL)
        plan->refs++;
}

void moe_plan_release(epo_plan *plan) {
    if (plan == NULL || --plan->refs > 0)
        return;
    plan->buffer->plans--;
    moe_link_free(plan->buffer->group, plan->link);
    moe_arena_close(plan->buffer->group, &plan->arena);
    if (plan->capture != 0)
        moe_replay_release(plan->buffer->group);
    free(plan->memory);
    free(plan);
}

epo_status moe_plan_rows(const epo_plan *plan, uint64_t *rows) {
    if (plan == NULL || rows == NULL)
        return epo_fail(EPO_E_ARG, "plan_rows: plan or rows is NULL");
    *rows = plan->rows;
    return EPO_OK;
}

epo_status moe_plan_experts(const epo_plan *plan, uint64_t *first, uint64_t *count) {
    if (plan == NULL)
        return epo_fail(EPO_E_ARG, "plan_experts: plan is NULL");
    size_t bytes = (size_t)plan->buffer->local * sizeof *first;
    if (first != NULL)
        memcpy(first, plan->first, bytes);
    if (count != NULL)
        memcpy(count, plan->count, bytes);
    return EPO_OK;
}

epo_status moe_plan_query(const epo_plan *plan, epo_plan_info *info) {
    if (plan == NULL)
        return epo_fail(EPO_E_ARG, "plan_query: plan is NULL");
    epo_plan_info all = {
        .size = sizeof all,
        .tokens = plan->tokens,
        .top_k = plan->top_k,
        .rows = plan->rows,
        .capacity = moe_capacity_of(plan->buffer, plan->tokens, plan->top_k),
        .dropped = plan->dropped,
        .pad_rows = plan->padding.rows,
        .chunks = plan->chunks,
        .engines = plan->way == EPO_WAY_ENGINES,
    };
    return moe_output(info, &all, sizeof all, "epo_plan_info");
}
