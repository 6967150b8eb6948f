/* SPDX-License-Identifier: Apache-2.0
 *
 * home_backend.c - the host backend with what sends flex's rows home one by one (see
 * epo_rows_home): both products in one operation that stores peers' rows at the peers', the sum
 * rank by rank, rows expanded beside their way.  Linked with -Wl,--wrap=epo_backend_get.
 * HOME_CASE: one of the cases below, else any of them.
 */
#include "backend/backend.h"
#include "backend/host/convert.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const epo_backend_ops *__real_epo_backend_get(void);
const epo_backend_ops *__wrap_epo_backend_get(void);

static const epo_backend_ops *host;
static atomic_long chains, sums;

enum {
    FAR,      /* own rows go through the window, too */
    NEAR,     /* ... from the caller's memory */
    MEASURED, /* what is measured decides, by times that mean nothing; else all go home singly */
    APART,    /* no chain: an exchange behind the products */
    TAILS,    /* sums go home, and whether behind a backward's weight gradients is measured */
    CASES
};
static int case_of(void) {
    const char *wish = getenv("HOME_CASE");
    return (int)(wish != NULL ? strtol(wish, NULL, 10) : (long)getpid()) % CASES;
}

static pid_t program;
__attribute__((constructor)) static void begin(void) { program = getpid(); }

/* What the case is there for has to have been done. */
__attribute__((destructor)) static void tell(void) {
    const int c = case_of();
    fprintf(stderr, "HOME_CASE=%d: %ld chains, %ld sums\n", c, chains, sums);
    if (getpid() == program &&
        ((chains > 0) != (c != APART && c != TAILS) || (sums > 0) != (c != TAILS))) {
        fprintf(stderr, "home_backend: not as the case has it\n");
        _exit(1);
    }
}

static void die(const char *what) {
    fprintf(stderr, "home_backend: %s\n", what);
    abort();
}

static const epo_backend_info *info(const epo_backend *be) {
    static _Thread_local epo_backend_info all;
    all = *host->info(be);
    all.home = all.nodes == 1 && case_of() != TAILS ? 1 : 0;
    all.few = case_of() == TAILS;
    all.home_asked = case_of() != MEASURED && case_of() != TAILS;
    all.near_bytes = case_of() == FAR ? 0 : 1;
    all.near_most = UINT64_MAX;
    return &all;
}

/* ---- spread ---- */

static void spread_run(void *ctx) {
    epo_rows_spread *s = ctx;
    char *dst = s->dst;
    for (int i = 0; i < s->runs; i++)
        for (uint64_t row = 0; row < s->run[i].rows; row++) {
            const epo_spread_run *r = &s->run[i];
            const uint64_t from = r->index != NULL ? (uint64_t)r->index[row] : row;
            for (int k = 0; k < s->width; k++) {
                const int32_t to = s->place[(r->first + row) * (uint64_t)s->width + (uint64_t)k];
                if (to >= 0)
                    memcpy(dst + (uint64_t)to * s->row_bytes,
                           (const char *)r->src + from * s->row_bytes, s->row_bytes);
            }
        }
    for (uint64_t i = 0; s->pad != NULL && i < s->dst_rows; i++)
        if (s->pad[i] < 0)
            memset(dst + i * s->row_bytes, 0, s->row_bytes);
    free(s);
}

static void *copy_of(const void *from, size_t bytes) {
    void *to = malloc(bytes);
    if (to == NULL)
        die("no memory");
    memcpy(to, from, bytes);
    return to;
}

static epo_status spread(epo_queue *q, const epo_rows_spread *s, const epo_deps *deps) {
    return host->call(q, spread_run, copy_of(s, sizeof *s), deps);
}

/* ---- the sum ---- */

typedef struct home_sum {
    epo_rows_reduce r;
    epo_rows_home home;
    int32_t first[64];
} home_sum;

static int rank_of(const home_sum *h, int32_t place) {
    int rank = h->home.ranks - 1;
    if (place < 0)
        return place == -1 ? -1 : h->home.rank;
    while (rank > 0 && h->first[rank] > place)
        rank--;
    return rank;
}

static void sum_row(const home_sum *h, uint64_t row, float *all, float *part, float *term) {
    const epo_rows_reduce *r = &h->r;
    const uint64_t n = (uint64_t)r->elements;
    int sums_of_row = 0;
    memset(all, 0, n * sizeof *all);
    for (int rank = 0; rank < h->home.ranks; rank++) {
        int terms = 0;
        for (int j = 0; j < r->width; j++) {
            const int32_t place = r->index[row * (uint64_t)r->width + (uint64_t)j];
            if (rank_of(h, place) != rank)
                continue;
            host_load(term, place >= 0 ? r->src : r->own,
                      (uint64_t)(place >= 0 ? place : -2 - place) * n, n, r->type);
            for (uint64_t e = 0; e < n; e++) /* the host's sums take the first as it is */
                part[e] = terms == 0 ? term[e] : part[e] + term[e];
            terms++;
        }
        if (terms == 0)
            continue;
        host_store(r->dst, row * n, part, n, r->type);
        host_load(part, r->dst, row * n, n, r->type);
        for (uint64_t e = 0; e < n; e++)
            all[e] = sums_of_row == 0 ? part[e] : all[e] + part[e];
        sums_of_row++;
    }
    host_store(r->dst, row * n, all, n, r->type);
}

static void sum_run(void *ctx) {
    home_sum *h = ctx;
    float *room = malloc(3 * (size_t)h->r.elements * sizeof *room);
    if (room == NULL)
        die("no memory");
    for (uint64_t row = 0; row < h->r.rows; row++)
        sum_row(h, row, room, room + h->r.elements, room + 2 * h->r.elements);
    free(room);
    free(h);
    sums++;
}

static epo_status reduce(epo_queue *q, const epo_rows_reduce *r, const epo_deps *deps) {
    if (r->home == NULL)
        return host->reduce(q, r, deps);
    home_sum h = {.r = *r, .home = *r->home};
    memcpy(h.first, r->home->first, (size_t)r->home->ranks * sizeof *h.first);
    return host->call(q, sum_run, copy_of(&h, sizeof h), deps);
}

/* ---- the chain ---- */

/* Exchanges want a queue for them: each thread issues for one rank, whose newest group it is. */
static _Thread_local struct {
    epo_backend *be;
    epo_queue *comm;
    epo_event *rows;
} rank;

static epo_status queue_create(epo_backend *be, epo_queue_kind kind, epo_queue **out) {
    epo_status status = host->queue_create(be, kind, out);
    if (status == EPO_OK && kind == EPO_QUEUE_COMM && rank.be != be) {
        rank.be = be;
        rank.comm = *out;
        rank.rows = NULL;
        status = host->event_create(be, &rank.rows);
    }
    return status;
}
static void backend_close(epo_backend *be, bool broken) {
    if (rank.be == be) {
        host->event_destroy(be, rank.rows);
        rank.be = NULL;
    }
    host->close(be, broken);
}

static bool chain_covers(epo_backend *be, const epo_chain *c) {
    (void)be;
    return case_of() != APART && c->parts == 1 && c->direct != NULL &&
           c->first.kind == EPO_GEMM_FORWARD;
}

static int segments_of(const epo_backend_info *in, const epo_chain *c, epo_segment *to) {
    const epo_chain_direct *d = c->direct;
    const uint64_t bytes = (uint64_t)c->second.n * (c->second.type == EPO_F32 ? 4 : 2);
    int n = 0;
    for (int e = 0; e < c->part[0].count; e++)
        for (int r = 0; r < in->ranks; r++) {
            const size_t at = (size_t)e * (size_t)in->ranks + (size_t)r;
            const uint64_t from = (uint64_t)d->first[at];
            const uint64_t end = r + 1 < in->ranks ? (uint64_t)d->first[at + 1]
                                                   : c->first.row_first[e] + c->first.row_count[e];
            if (r == in->rank || end == from)
                continue;
            to[n++] = (epo_segment){.peer = r,
                                    .src = (const char *)c->second.c + from * bytes,
                                    .dst_offset = d->rows + (uint64_t)d->to[at] * bytes,
                                    .rows = end - from,
                                    .row_bytes = (uint32_t)bytes};
        }
    return n;
}

static epo_status chain(epo_queue *q, const epo_chain *c, const epo_deps *deps) {
    epo_deps first = *deps, made, plain = {.name = "chain", .chunk = -1};
    epo_gemm one = c->first, two = c->second;
    epo_swiglu act = *one.act;
    const epo_backend_info *in = info(rank.be);
    epo_status status = EPO_OK;
    first.signal = NULL;
    made = plain;
    made.signal = rank.rows;
    chains++;
    if (c->part[0].ready != NULL)
        first.wait[first.nwait++] = *c->part[0].ready;
    one.act = NULL;
    one.first = two.first = c->part[0].first;
    one.count = two.count = c->part[0].count;
    if (status == EPO_OK)
        status = host->gemm(q, &one, &first);
    if (status == EPO_OK)
        status = host->swiglu(q, &act, &plain);
    if (status == EPO_OK)
        status = host->gemm(q, &two, &made);
    epo_segment *send = calloc((size_t)one.count * (size_t)in->ranks + 1, sizeof *send);
    if (send == NULL)
        die("no memory");
    const epo_exchange x = {.window = c->direct->window,
                            .send = send,
                            .nsend = segments_of(in, c, send),
                            .flag_offset = c->direct->flag_offset,
                            .epoch = c->direct->epoch};
    epo_deps go = plain, last = plain;
    go.wait[go.nwait++] = epo_ready_event(rank.rows);
    last.signal = deps->signal;
    if (status == EPO_OK)
        status = host->exchange(rank.comm, &x, &go);
    return status == EPO_OK ? host->call(rank.comm, free, send, &last) : status;
}

/* Any times: what is chosen by them has to be the same on all ranks, and right. */
static bool mark(epo_queue *queue, epo_event **event) {
    (void)queue;
    return *event != NULL || host->event_create(rank.be, event) == EPO_OK;
}
static bool between(epo_backend *be, epo_event *from, epo_event *to, double *seconds) {
    static _Thread_local unsigned last = 1;
    (void)be, (void)from, (void)to;
    last = last * 1103515245U + 12345U;
    *seconds = 1 + last / 4294967296.0 / 4;
    return true;
}

static epo_backend_ops ops;

static void open_ops(void) {
    const bool times = case_of() == MEASURED || case_of() == TAILS;
    host = __real_epo_backend_get();
    ops = *host;
    ops.info = info;
    ops.spread = spread;
    ops.reduce = reduce;
    ops.chain_covers = chain_covers;
    ops.chain = chain;
    ops.queue_create = queue_create;
    ops.close = backend_close;
    ops.mark = times ? mark : host->mark;
    ops.between = times ? between : host->between;
}

const epo_backend_ops *__wrap_epo_backend_get(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_ops);
    return &ops;
}
