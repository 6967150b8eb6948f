/* SPDX-License-Identifier: Apache-2.0 */
#include "moe_device.h"
#include "backend/host/host.h"
#include "moe_reference.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

const epo_backend_ops *__real_epo_backend_get(void);
const epo_backend_ops *__wrap_epo_backend_get(void);

static moe_device can;
static epo_backend_ops table;
static const epo_backend_ops *host;
static _Atomic uint64_t chains, directs, spreads, held;

const moe_device *moe_device_is(void) { return &can; }
uint64_t moe_device_chains(void) { return chains; }
uint64_t moe_device_direct(void) { return directs; }
uint64_t moe_device_spreads(void) { return spreads; }
uint64_t moe_device_bytes(void) { return held; }

/* ---- room until the backend closes; one thread issues all of a group --------------------- */

typedef struct room {
    struct room *next;
    const epo_backend *be;
    max_align_t bytes[];
} room;
static _Thread_local room *rooms;

void *moe_device_room(const epo_backend *be, uint64_t bytes) {
    room *r = moe_calloc(1, sizeof *r + bytes);
    r->next = rooms;
    r->be = be;
    rooms = r;
    return r->bytes;
}

static void close_backend(epo_backend *be, bool broken) {
    host->close(be, broken);
    for (room **at = &rooms; *at != NULL;) {
        room *r = *at;
        if (r->be != be) {
            at = &r->next;
            continue;
        }
        *at = r->next;
        free(r);
    }
}

/* ---- counters: everything is issued at once, so what they are now is what they are then -- */

static epo_deps now(const epo_deps *deps) {
    epo_deps d = *deps;
    for (int i = 0; i < d.nwait; i++)
        if (d.wait[i].event == NULL && d.wait[i].counter != NULL) {
            d.wait[i].epoch += *d.wait[i].counter;
            d.wait[i].counter = NULL;
        }
    return d;
}

epo_status moe_device_run(epo_queue *q, void (*fn)(void *), const void *args, size_t bytes,
                          const epo_deps *deps) {
    void *copy = moe_device_room(q->be, bytes);
    const epo_deps d = now(deps);
    memcpy(copy, args, bytes);
    return host->call(q, fn, copy, &d);
}

#define THROUGH(op, type)                                                                          \
    static epo_status op_##op(epo_queue *q, const type *a, const epo_deps *deps) {                 \
        const epo_deps d = now(deps);                                                              \
        return host->op(q, a, &d);                                                                 \
    }
THROUGH(wire_pack, epo_wire_pack)
THROUGH(swiglu, epo_swiglu)

static epo_status op_zero(epo_queue *q, void *ptr, uint64_t bytes, const epo_deps *deps) {
    const epo_deps d = now(deps);
    return host->zero(q, ptr, bytes, &d);
}

static epo_status op_call(epo_queue *q, void (*fn)(void *), void *ctx, const epo_deps *deps) {
    const epo_deps d = now(deps);
    return host->call(q, fn, ctx, &d);
}

/* ---- memory: nothing is known of what lies in it ------------------------------------------ */

static epo_status alloc(epo_backend *be, uint64_t bytes, void **out) {
    const epo_status status = host->alloc(be, bytes, out);
    if (status == EPO_OK) {
        memset(*out, 0xa5, bytes);
        held += bytes;
    }
    return status;
}
static void release(epo_backend *be, void *ptr, uint64_t bytes) {
    held -= bytes;
    host->free(be, ptr, bytes);
}

static epo_status copy_now(epo_backend *be, void *dst, const void *src, uint64_t bytes) {
    (void)be;
    memcpy(dst, src, bytes);
    return EPO_OK;
}

typedef struct copying {
    void *dst;
    const void *src;
    uint64_t bytes;
} copying;
static void copy_run(void *args) {
    const copying *c = args;
    memcpy(c->dst, c->src, c->bytes);
}
static epo_status op_copy(epo_queue *q, void *dst, const void *src, uint64_t bytes,
                          const epo_deps *deps) {
    const copying c = {dst, src, bytes};
    return moe_device_run(q, copy_run, &c, sizeof c, deps);
}

static _Thread_local unsigned questions;
static _Thread_local bool rested; /* nothing was sent since this thread waited for all */

static bool event_query(epo_backend *be, epo_event *event) {
    (void)be;
    return (!can.hesitates || rested || questions++ % 6 == 5) && event->done >= event->issued;
}
static epo_status sync_all(epo_backend *be, epo_event *event) {
    rested = true;
    return host->sync(be, event);
}

/* ---- rows -------------------------------------------------------------------------------- */

static const char *row_of(const void *src, const void *own, int32_t index, uint64_t bytes) {
    return index < -1 ? (const char *)own + (uint64_t)(-2 - index) * bytes
                      : (const char *)src + (uint64_t)index * bytes;
}

static float value(const void *row, uint64_t i, epo_dtype type) {
    return type == EPO_F32 ? ((const float *)row)[i]
                           : moe_from_half(((const uint16_t *)row)[i], type);
}

/* As the host sums: the first as it is, the others in order, rounded once. */
static void sum_row(void *dst, const void *src, const void *own, const int32_t *index, int width,
                    uint64_t elements, epo_dtype type) {
    const uint64_t bytes = elements * (type == EPO_F32 ? 4 : 2);
    for (uint64_t i = 0; i < elements; i++) {
        float sum = 0;
        bool first = true;
        for (int j = 0; j < width; j++) {
            if (index[j] == -1 || (index[j] < 0 && own == NULL))
                continue;
            const float v = value(row_of(src, own, index[j], bytes), i, type);
            sum = first ? v : sum + v;
            first = false;
        }
        if (type == EPO_F32)
            ((float *)dst)[i] = sum;
        else
            ((uint16_t *)dst)[i] = moe_to_half(sum, type);
    }
}

static void gather_run(void *args) {
    const epo_rows_gather *g = args;
    for (uint64_t i = 0; i < g->rows; i++) {
        char *dst = (char *)g->dst + i * g->row_bytes;
        if (g->index[i] == -1)
            memset(dst, 0, g->row_bytes);
        else
            memcpy(dst, row_of(g->src, g->own, g->index[i], g->row_bytes), g->row_bytes);
    }
}
static epo_status op_gather(epo_queue *q, const epo_rows_gather *g, const epo_deps *deps) {
    const epo_deps d = now(deps);
    return g->own != NULL ? moe_device_run(q, gather_run, g, sizeof *g, deps)
                          : host->gather(q, g, &d);
}

static void reduce_run(void *args) {
    const epo_rows_reduce *r = args;
    const uint64_t bytes = (uint64_t)r->elements * (r->type == EPO_F32 ? 4 : 2);
    for (uint64_t i = 0; i < r->rows; i++)
        sum_row((char *)r->dst + i * bytes, r->src, r->own, r->index + i * (uint64_t)r->width,
                r->width, (uint64_t)r->elements, r->type);
}
static epo_status op_reduce(epo_queue *q, const epo_rows_reduce *r, const epo_deps *deps) {
    const epo_deps d = now(deps);
    return r->own != NULL ? moe_device_run(q, reduce_run, r, sizeof *r, deps)
                          : host->reduce(q, r, &d);
}

static void spread_run(void *args) {
    const epo_rows_spread *s = args;
    for (uint64_t i = 0; s->pad != NULL && i < s->dst_rows; i++)
        if (s->pad[i] < 0)
            memset((char *)s->dst + i * s->row_bytes, 0, s->row_bytes);
    for (int r = 0; r < s->runs; r++)
        for (uint64_t i = 0; i < s->run[r].rows; i++) {
            const int64_t from = s->run[r].index != NULL ? s->run[r].index[i] : (int64_t)i;
            const int32_t *place = s->place + (s->run[r].first + i) * (uint64_t)s->width;
            for (int k = 0; k < s->width; k++)
                if (place[k] >= 0)
                    memcpy((char *)s->dst + (uint64_t)place[k] * s->row_bytes,
                           (const char *)s->run[r].src + (uint64_t)from * s->row_bytes,
                           s->row_bytes);
        }
}
static epo_status op_spread(epo_queue *q, const epo_rows_spread *s, const epo_deps *deps) {
    spreads++;
    return moe_device_run(q, spread_run, s, sizeof *s, deps);
}

/* ---- exchanges: ranks are threads, so a peer's window is at hand ------------------------- */

/* ---- two-sided: what a rank sends is what the other takes --------------------------------- */

typedef struct message_end {
    struct message_end *next;
    uint64_t bytes, at;
    bool sent;
} message_end;
/* Between two ranks: ends that wait for their others, all of them sent or all to be taken. */
typedef struct message_line {
    message_end *first, *last;
} message_line;
static struct {
    pthread_mutex_t lock;
    message_line line[CASE_RANKS][CASE_RANKS];
    uint64_t wrong;
} messages = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void message_post(int from, int to, uint64_t bytes, uint64_t at, bool sent) {
    if (from == to || bytes == 0)
        return;
    pthread_mutex_lock(&messages.lock);
    message_line *l = &messages.line[from][to];
    message_end *e = l->first;
    if (e != NULL && e->sent != sent) {
        messages.wrong += e->bytes != bytes || e->at != at;
        l->first = e->next;
        l->last = l->first != NULL ? l->last : NULL;
        free(e);
    } else {
        e = moe_calloc(1, sizeof *e);
        *e = (message_end){NULL, bytes, at, sent};
        if (l->last != NULL)
            l->last->next = e;
        else
            l->first = e;
        l->last = e;
    }
    pthread_mutex_unlock(&messages.lock);
}

static void messages_post(const epo_backend *be, const epo_exchange *x) {
    for (int i = 0; i < x->nsend; i++)
        message_post(be->rank, x->send[i].peer, x->send[i].rows * x->send[i].row_bytes,
                     x->send[i].dst_offset, true);
    for (int i = 0; i < x->nrecv; i++)
        message_post(x->recv[i].peer, be->rank, x->recv[i].bytes, x->recv[i].offset, false);
}

/* Those that wait are wrong, too, and are forgotten. */
uint64_t moe_device_unmatched(void) {
    for (int i = 0; i < CASE_RANKS * CASE_RANKS; i++) {
        message_line *l = &messages.line[i / CASE_RANKS][i % CASE_RANKS];
        for (message_end *e = l->first, *next; e != NULL; e = next) {
            next = e->next;
            messages.wrong++;
            free(e);
        }
        *l = (message_line){NULL, NULL};
    }
    const uint64_t wrong = messages.wrong;
    messages.wrong = 0;
    return wrong;
}

static char *window_of(const epo_window *w, int rank) {
    return (char *)w->base + (uint64_t)rank * w->stride;
}

typedef struct sending {
    epo_backend *be;
    epo_exchange x;
    const epo_segment *send;
    int nsend;
} sending;

static void send_segment(const epo_window *window, const epo_segment *s) {
    for (uint64_t i = 0; i < s->rows; i++) {
        char *dst = window_of(window, s->peer) + s->dst_offset + i * s->row_bytes;
        const int64_t from = s->index != NULL && s->sum == 0 ? s->index[i] : (int64_t)i;
        if (s->sum > 0)
            sum_row(dst, s->src, NULL, s->index + i * (uint64_t)s->sum, s->sum,
                    s->row_bytes / (s->type == EPO_F32 ? 4 : 2), s->type);
        else if (from == -1)
            memset(dst, 0, s->row_bytes);
        else if (from >= 0) /* -2: what is there stays */
            memcpy(dst, (const char *)s->src + (uint64_t)from * s->row_bytes, s->row_bytes);
    }
}

/* Rows, then the word of each peer; on any queue. */
static void send_run(void *args) {
    const sending *a = args;
    const epo_exchange *x = &a->x;
    const epo_peers to = epo_peers_of(x->scope, a->be->rank, a->be->ranks, a->be->info.nodes);
    for (int i = 0; i < a->nsend; i++)
        send_segment(x->window, &a->send[i]);
    for (int i = 0; i < to.count; i++) {
        const int peer = to.first + i * to.step;
        uint64_t *words = (uint64_t *)(void *)(window_of(x->window, peer) + x->flag_offset);
        __atomic_store_n(&words[to.me], x->epoch, __ATOMIC_RELEASE);
        host_bell_ring(a->be->shared, peer, HOST_EAR_FLAGS);
    }
}

/* Segments are read before the call returns. */
static epo_status op_exchange(epo_queue *q, const epo_exchange *x, const epo_deps *deps) {
    const int parts = x->parts > 1 ? x->parts : 1;
    epo_segment *send = moe_device_room(q->be, (uint64_t)x->nsend * sizeof *send);
    if (x->nsend > 0)
        memcpy(send, x->send, (size_t)x->nsend * sizeof *send);
    epo_deps d = *deps;
    epo_status status = EPO_OK;
    rested = false;
    if (can.two_sided)
        messages_post(q->be, x);
    for (int i = 0; i < parts && status == EPO_OK; i++) {
        const int from = parts > 1 ? x->part_first[i] - x->part_first[0] : 0;
        const int past = parts > 1 ? x->part_first[i + 1] - x->part_first[0] : x->nsend;
        sending a = {q->be, *x, send + from, past - from};
        a.x.flag_offset += (uint64_t)i * x->flag_step;
        a.x.epoch += x->counter != NULL ? *x->counter : 0;
        d.signal = i == parts - 1 ? deps->signal : NULL;
        status = moe_device_run(q, send_run, &a, sizeof a, &d);
    }
    return status;
}

/* ---- products ---------------------------------------------------------------------------- */

/* The rows of the product's experts, each at its place, and none beside. */
static void keep_run(void *args) {
    const epo_gemm *g = args;
    const uint64_t bytes =
        (uint64_t)(g->kind == EPO_GEMM_DGRAD ? g->n : g->k) * (g->type == EPO_F32 ? 4 : 2);
    for (int e = g->first; e < g->first + g->count; e++)
        for (uint64_t i = g->row_first[e]; i < g->row_first[e] + g->row_count[e]; i++)
            memcpy((char *)g->keep + i * bytes, (const char *)g->a + i * bytes, bytes);
}

/* The product, what it keeps, and its activation. */
static epo_status product(epo_queue *q, const epo_gemm *g, const epo_deps *deps) {
    epo_gemm plain = *g;
    epo_deps d = now(deps), then = d;
    const bool more = g->keep != NULL || g->act != NULL;
    plain.act = NULL;
    plain.keep = NULL;
    d.signal = more ? NULL : d.signal;
    then.nwait = 0;
    epo_status status = host->gemm(q, &plain, &d);
    if (status == EPO_OK && g->keep != NULL) {
        epo_deps kept = then;
        kept.signal = g->act != NULL ? NULL : then.signal;
        status = moe_device_run(q, keep_run, g, sizeof *g, &kept);
    }
    return status == EPO_OK && g->act != NULL ? host->swiglu(q, g->act, &then) : status;
}
static bool gemm_keeps(epo_backend *be, const epo_gemm *g) {
    (void)be;
    return g->kind != EPO_GEMM_WGRAD;
}

/* What the chain stores at its peers' is not in second.c, nor where it came from in act->dw. */
typedef struct direct_args {
    epo_chain_direct d;
    uint64_t row_bytes;
    char *c;
    float *dw;
    const uint64_t *first, *count;
    int experts, ranks, rank;
} direct_args;

static void direct_run(void *args) {
    const direct_args *a = args;
    for (int e = 0; e < a->experts; e++)
        for (int r = 0; r < a->ranks; r++) {
            const int at = e * a->ranks + r;
            const uint64_t past =
                r + 1 < a->ranks ? (uint64_t)a->d.first[at + 1] : a->first[e] + a->count[e];
            char *window = window_of(a->d.window, r);
            uint64_t to = (uint64_t)a->d.to[at];
            for (uint64_t i = (uint64_t)a->d.first[at]; r != a->rank && i < past; i++, to++) {
                memcpy(window + a->d.rows + to * a->row_bytes, a->c + i * a->row_bytes,
                       a->row_bytes);
                memset(a->c + i * a->row_bytes, 0xff, a->row_bytes);
                if (a->dw != NULL) {
                    memcpy(window + a->d.dweights + to * sizeof(float), a->dw + i, sizeof(float));
                    memset(a->dw + i, 0xff, sizeof(float));
                }
            }
        }
}

static epo_status store_direct(epo_queue *q, const epo_chain *c, const epo_deps *deps) {
    const epo_gemm *g = &c->second;
    const int last = c->parts - 1;
    const direct_args a = {*c->direct,
                           (uint64_t)(g->kind == EPO_GEMM_DGRAD ? g->k : g->n) *
                               (g->type == EPO_F32 ? 4 : 2),
                           g->c,
                           c->first.act->dw,
                           g->row_first,
                           g->row_count,
                           c->part[last].first + c->part[last].count,
                           q->be->ranks,
                           q->be->rank};
    epo_deps none = *deps;
    none.nwait = 0;
    none.signal = NULL;
    const epo_exchange tell = {.window = c->direct->window,
                               .flag_offset = c->direct->flag_offset,
                               .epoch = c->direct->epoch,
                               .counter = c->direct->counter};
    directs++;
    const epo_status status = moe_device_run(q, direct_run, &a, sizeof a, &none);
    return status == EPO_OK ? op_exchange(q, &tell, &none) : status;
}

static bool chain_covers(epo_backend *be, const epo_chain *c) {
    (void)be;
    return c->parts > 1;
}

static epo_status op_chain(epo_queue *q, const epo_chain *c, const epo_deps *deps) {
    epo_status status = EPO_OK;
    chains++;
    for (int i = 0; i < c->parts && status == EPO_OK; i++) {
        const epo_chain_part *part = &c->part[i];
        epo_deps up = *deps, down = *deps;
        epo_gemm first = c->first, second = c->second;
        epo_swiglu act = *c->first.act;
        const uint64_t past = i + 1 < c->parts ? first.cpu_first[part[1].first] : act.rows;
        act.row = first.cpu_first[part->first];
        act.rows = past - act.row;
        first.first = second.first = part->first;
        first.count = second.count = part->count;
        first.act = &act;
        up.nwait = i == 0 ? up.nwait : 0;
        up.signal = NULL;
        if (part->ready != NULL)
            up.wait[up.nwait++] = *part->ready;
        down.nwait = 0;
        down.signal = part->done;
        status = product(q, &first, &up);
        if (status == EPO_OK)
            status = product(q, &second, &down);
    }
    if (status == EPO_OK && c->direct != NULL)
        status = store_direct(q, c, deps);
    epo_deps end = *deps;
    end.nwait = 0;
    return status == EPO_OK ? host->zero(q, NULL, 0, &end) : status;
}

/* ---- the table --------------------------------------------------------------------------- */

static epo_status open_backend(const epo_backend_config *config, epo_backend **out) {
    const epo_status status = host->open(config, out);
    if (status != EPO_OK)
        return status;
    epo_backend_info *info = &(*out)->info;
    info->own_rows = can.own_rows;
    info->sums = can.sums;
    info->few = can.few;
    info->parts = can.parts;
    info->fused = can.fused;
    info->one_sided = !can.two_sided;
    info->near_bytes = can.near ? 1 : 0;
    info->near_most = UINT64_MAX;
    info->ways = can.way == EPO_WAY_ENGINES ? 1U << EPO_WAY_ENGINES : 0;
    return EPO_OK;
}

void moe_device_be(const moe_device *what) {
    host = __real_epo_backend_get();
    can = *what;
    chains = directs = spreads = 0;
    (void)moe_device_unmatched();
    table = *host;
    table.open = open_backend;
    table.close = close_backend;
    table.alloc = alloc;
    table.free = release;
    table.zero = op_zero;
    table.call = op_call;
    table.wire_pack = op_wire_pack;
    table.swiglu = op_swiglu;
    table.gather = op_gather;
    table.reduce = op_reduce;
    table.exchange = op_exchange;
    table.gemm = product;
    table.read = table.write = can.apart ? copy_now : NULL;
    table.copy = can.copies ? op_copy : NULL;
    table.event_query = can.copies ? event_query : NULL;
    table.sync = sync_all;
    table.spread = can.spread ? op_spread : NULL;
    table.gemm_keeps = can.keeps ? gemm_keeps : NULL;
    table.chain_covers = can.chain ? chain_covers : NULL;
    table.chain = can.chain ? op_chain : NULL;
    if (can.deaf) {
        table.turn = NULL;
        table.turn_end = NULL;
    }
    if (can.maps)
        moe_device_maps(&table);
    if (can.replays)
        moe_device_replays(&table, host);
}

const epo_backend_ops *__wrap_epo_backend_get(void) {
    return host != NULL ? &table : __real_epo_backend_get();
}
