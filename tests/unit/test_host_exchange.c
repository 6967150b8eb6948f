/* SPDX-License-Identifier: Apache-2.0
 *
 * Exchanges between ranks that are threads, against what the schedule says.
 */
#include "config.h"

#include "host_ranks.h"
#include "unit.h"

#include <string.h>

#define CHUNKS_MAX 4
#define ROUNDS 6

/* A random schedule that every rank derives from the seed alone: rows from rank s
 * to rank d in chunk c, where they go, and what they hold. */
typedef struct schedule {
    uint64_t seed;
    int chunks;
    uint32_t row_bytes;
    uint32_t rows[CHUNKS_MAX][16][16];
    uint64_t offset[CHUNKS_MAX][16][16]; /* in d's window */
    uint64_t flags, bytes;
} schedule;

static void schedule_make(schedule *s, uint64_t seed, int ranks) {
    memset(s, 0, sizeof *s);
    s->seed = seed;
    s->chunks = 1 + (int)rng_below(&seed, CHUNKS_MAX);
    s->row_bytes = 4 * (1 + rng_below(&seed, 40));
    for (int c = 0; c < s->chunks; c++)
        for (int a = 0; a < ranks; a++)
            for (int d = 0; d < ranks; d++)
                s->rows[c][a][d] = rng_below(&seed, 3) == 0 ? 0 : rng_below(&seed, 50);
    for (int d = 0; d < ranks; d++) {
        uint64_t at = 0;
        for (int c = 0; c < s->chunks; c++) {
            for (int a = 0; a < ranks; a++) {
                s->offset[c][a][d] = at;
                at += (uint64_t)s->rows[c][a][d] * s->row_bytes;
            }
        }
        if (at > s->flags)
            s->flags = at;
    }
    s->flags = (s->flags + 7) / 8 * 8;
    s->bytes = s->flags + (uint64_t)s->chunks * (uint64_t)ranks * 8;
}

static unsigned char row_byte(int round, int c, int from, int to, uint32_t row, uint32_t at) {
    return (unsigned char)(round * 7 + c * 31 + from * 57 + to * 101 + (int)(row * 13 + at * 3));
}

typedef struct sender {
    unsigned char *rows;
    int32_t *index;
    epo_segment seg[2 * 16];
    int nseg;
} sender;

/* What one rank sends in one chunk: rows lie backwards, an index puts them right;
 * peers of even number get theirs contiguous, in two segments. */
static void sender_fill(sender *s, const schedule *sc, int round, int c, int rank, int ranks) {
    uint32_t total = 0, at = 0;
    for (int d = 0; d < ranks; d++)
        total += sc->rows[c][rank][d];
    s->rows = malloc((size_t)total * sc->row_bytes + 1);
    s->index = malloc(((size_t)total + 1) * sizeof *s->index);
    s->nseg = 0;
    for (int d = 0; d < ranks; d++) {
        uint32_t n = sc->rows[c][rank][d];
        for (uint32_t i = 0; i < n; i++) {
            uint32_t place = at + (d % 2 == 1 ? n - 1 - i : i);
            s->index[at + i] = (int32_t)place;
            for (uint32_t b = 0; b < sc->row_bytes; b++)
                s->rows[(size_t)place * sc->row_bytes + b] = row_byte(round, c, rank, d, i, b);
        }
        uint64_t to = sc->offset[c][rank][d];
        if (d % 2 == 1) {
            s->seg[s->nseg++] = (epo_segment){.peer = d,
                                              .src = s->rows,
                                              .index = s->index + at,
                                              .dst_offset = to,
                                              .rows = n,
                                              .row_bytes = sc->row_bytes};
        } else {
            uint32_t half = n / 2;
            const unsigned char *from = s->rows + (size_t)at * sc->row_bytes;
            size_t skip = (size_t)half * sc->row_bytes;
            s->seg[s->nseg++] = (epo_segment){
                .peer = d, .src = from, .dst_offset = to, .rows = half, .row_bytes = sc->row_bytes};
            s->seg[s->nseg++] = (epo_segment){.peer = d,
                                              .src = from + skip,
                                              .dst_offset = to + skip,
                                              .rows = n - half,
                                              .row_bytes = sc->row_bytes};
        }
        at += n;
    }
}

typedef struct checker {
    rank_ctx *ctx;
    const schedule *sc;
    const unsigned char *window;
    int round, chunk;
} checker;

static void check_chunk(void *arg) {
    checker *k = arg;
    const schedule *sc = k->sc;
    int wrong = 0;
    for (int a = 0; a < k->ctx->ranks; a++) {
        const unsigned char *at = k->window + sc->offset[k->chunk][a][k->ctx->rank];
        for (uint32_t i = 0; i < sc->rows[k->chunk][a][k->ctx->rank]; i++)
            for (uint32_t b = 0; b < sc->row_bytes; b++)
                wrong += *at++ != row_byte(k->round, k->chunk, a, k->ctx->rank, i, b);
    }
    EXPECT(k->ctx, wrong == 0);
}

static void round_run(rank_ctx *c, const schedule *sc, epo_window *w, epo_queue *q[2],
                      epo_event *done, int round) {
    sender send[CHUNKS_MAX];
    checker check[CHUNKS_MAX];
    unsigned char *mine = c->ops->window_local(w);
    for (int k = 0; k < sc->chunks; k++) {
        sender_fill(&send[k], sc, round, k, c->rank, c->ranks);
        uint64_t flags = sc->flags + (uint64_t)k * (uint64_t)c->ranks * 8;
        epo_exchange x = {.window = w,
                          .send = send[k].seg,
                          .nsend = send[k].nseg,
                          .flag_offset = flags,
                          .epoch = (uint64_t)round + 1};
        epo_deps deps = {.name = "dispatch", .kind = EPO_INTERVAL_COMM, .chunk = k};
        EXPECT(c, c->ops->exchange(q[0], &x, &deps) == EPO_OK);
        check[k] = (checker){c, sc, mine, round, k};
        epo_deps after = {.name = "check", .kind = EPO_INTERVAL_COMPUTE, .chunk = k, .nwait = 1};
        after.wait[0] = (epo_ready){NULL,
                                    (uint64_t *)(void *)(mine + flags),
                                    (uint64_t)round + 1,
                                    c->ranks,
                                    -1,
                                    "dispatch",
                                    k,
                                    0,
                                    0,
                                    NULL};
        after.signal = done;
        EXPECT(c, c->ops->call(q[1], check_chunk, &check[k], &after) == EPO_OK);
    }
    EXPECT(c, c->ops->sync(c->be, done) == EPO_OK);
    /* Nobody may write my window anew before I have read it. */
    EXPECT(c, c->ops->barrier(c->be) == EPO_OK);
    for (int k = 0; k < sc->chunks; k++) {
        free(send[k].rows);
        free(send[k].index);
    }
}

static void random_schedules(rank_ctx *c) {
    schedule *sc = malloc(sizeof *sc);
    epo_queue *q[2];
    epo_event *done;
    EXPECT(c, c->ops->queue_create(c->be, EPO_QUEUE_COMM, &q[0]) == EPO_OK);
    EXPECT(c, c->ops->queue_create(c->be, EPO_QUEUE_COMPUTE, &q[1]) == EPO_OK);
    EXPECT(c, c->ops->event_create(c->be, &done) == EPO_OK);
    for (uint64_t seed = *(uint64_t *)c->arg, n = 0; n < 5; n++) {
        schedule_make(sc, seed * 100 + n, c->ranks);
        epo_window *w = NULL;
        EXPECT(c, c->ops->window_create(c->be, sc->bytes, &w) == EPO_OK);
        if (w == NULL)
            break;
        for (int round = 0; round < ROUNDS; round++)
            round_run(c, sc, w, q, done, round);
        c->ops->window_destroy(c->be, w);
    }
    c->ops->event_destroy(c->be, done);
    c->ops->queue_destroy(c->be, q[1]);
    c->ops->queue_destroy(c->be, q[0]);
    uint64_t now = 1, peak = 0;
    c->ops->memory(c->be, &now, &peak);
    EXPECT(c, now == 0 && peak > 0);
    free(sc);
}

static void rows_arrive_as_scheduled(void) {
    const int ranks[] = {1, 2, 3, 4, 8};
    for (uint64_t i = 0; i < sizeof ranks / sizeof *ranks; i++)
        CU_ASSERT_EQUAL(ranks_run(ranks[i], random_schedules, &i), 0);
}

/* An index of -1 makes zeros, one of -2 leaves the row that lies there. */
static void left_out(rank_ctx *c) {
    const unsigned char src[2][3] = {{1, 2, 3}, {4, 5, 6}};
    const int32_t index[] = {1, -2, -1, 0};
    const unsigned char want[] = {4, 5, 6, 9, 9, 9, 0, 0, 0, 1, 2, 3};
    epo_window *w = NULL;
    epo_queue *q;
    epo_event *done;
    EXPECT(c, c->ops->queue_create(c->be, EPO_QUEUE_COMM, &q) == EPO_OK);
    EXPECT(c, c->ops->event_create(c->be, &done) == EPO_OK);
    EXPECT(c, c->ops->window_create(c->be, 256, &w) == EPO_OK);
    unsigned char *mine = c->ops->window_local(w);
    memset(mine, 9, sizeof want);
    const epo_segment seg = {.src = src, .index = index, .rows = 4, .row_bytes = 3};
    const epo_exchange x = {.window = w, .send = &seg, .nsend = 1, .flag_offset = 64, .epoch = 1};
    epo_deps deps = {.name = "dispatch", .kind = EPO_INTERVAL_COMM, .chunk = -1, .signal = done};
    EXPECT(c, c->ops->exchange(q, &x, &deps) == EPO_OK);
    EXPECT(c, c->ops->sync(c->be, done) == EPO_OK);
    EXPECT(c, memcmp(mine, want, sizeof want) == 0);
    c->ops->window_destroy(c->be, w);
    c->ops->event_destroy(c->be, done);
    c->ops->queue_destroy(c->be, q);
}

static void rows_that_are_left_out(void) { CU_ASSERT_EQUAL(ranks_run(1, left_out, NULL), 0); }

static void sums(rank_ctx *c) {
    uint64_t count = 300001; /* more than one piece of the scratch */
    float *data = malloc(count * sizeof *data), *want = malloc(count * sizeof *want);
    for (int r = 0; r < c->ranks; r++) {
        uint64_t seed = 77 + (uint64_t)r;
        for (uint64_t i = 0; i < count; i++) {
            float v = rng_float(&seed);
            want[i] = r == 0 ? v : want[i] + v;
            if (r == c->rank)
                data[i] = v;
        }
    }
    EXPECT(c, c->ops->allreduce(c->be, data, count, NULL) == EPO_OK);
    EXPECT(c, memcmp(data, want, count * sizeof *data) == 0);
    EXPECT(c, c->ops->allreduce(c->be, data, 0, NULL) == EPO_OK);
    int32_t mine[3] = {c->rank, c->rank * 2, c->rank * 3}, all[16][3];
    EXPECT(c, c->ops->allgather(c->be, mine, sizeof mine, all) == EPO_OK);
    for (int r = 0; r < c->ranks; r++)
        EXPECT(c, all[r][0] == r && all[r][1] == 2 * r && all[r][2] == 3 * r);
    free(data);
    free(want);
}

static void sums_in_rank_order(void) {
    for (int ranks = 1; ranks <= 5; ranks += 2)
        CU_ASSERT_EQUAL(ranks_run(ranks, sums, NULL), 0);
}

static void bad_exchanges(rank_ctx *c) {
    epo_queue *comm, *compute;
    epo_window *w = NULL;
    unsigned char rows[64] = {0};
    EXPECT(c, c->ops->queue_create(c->be, EPO_QUEUE_COMM, &comm) == EPO_OK);
    EXPECT(c, c->ops->queue_create(c->be, EPO_QUEUE_COMPUTE, &compute) == EPO_OK);
    EXPECT(c, c->ops->window_create(c->be, 256, &w) == EPO_OK);
    epo_segment seg = {.peer = 1, .src = rows, .dst_offset = 200, .rows = 2, .row_bytes = 32};
    epo_exchange x = {.window = w, .send = &seg, .nsend = 1, .epoch = 1};
    EXPECT(c, c->ops->exchange(comm, &x, NULL) == EPO_E_ARG); /* 8 bytes too long */
    seg.dst_offset = UINT64_MAX - 8;
    EXPECT(c, c->ops->exchange(comm, &x, NULL) == EPO_E_ARG);
    seg.dst_offset = 192;
    seg.peer = 2;
    EXPECT(c, c->ops->exchange(comm, &x, NULL) == EPO_E_ARG);
    seg.peer = 1;
    x.flag_offset = 256 - 8;
    EXPECT(c, c->ops->exchange(comm, &x, NULL) == EPO_E_ARG); /* room for one of two flags */
    x.flag_offset = 4;
    EXPECT(c, c->ops->exchange(comm, &x, NULL) == EPO_E_ARG);
    x.flag_offset = 0;
    EXPECT(c, c->ops->exchange(compute, &x, NULL) == EPO_E_ARG);
    epo_window *other = NULL;
    EXPECT(c, c->ops->window_create(c->be, 256 + 8 * (uint64_t)c->rank, &other) == EPO_E_PEER);
    EXPECT(c, c->ops->window_create(c->be, UINT64_MAX / 2, &other) == EPO_E_NOMEM);
    EXPECT(c, other == NULL);
    c->ops->window_destroy(c->be, w);
}

static void what_does_not_fit_is_refused(void) {
    CU_ASSERT_EQUAL(ranks_run(2, bad_exchanges, NULL), 0);
}

int main(void) {
    const CU_TestInfo tests[] = {
        {"rows arrive as scheduled, 1 2 3 4 8 ranks", rows_arrive_as_scheduled},
        {"rows that an index leaves out", rows_that_are_left_out},
        {"sums are made in rank order", sums_in_rank_order},
        {"what does not fit is refused", what_does_not_fit_is_refused},
        CU_TEST_INFO_NULL,
    };
    return unit_run("host_exchange", tests);
}
