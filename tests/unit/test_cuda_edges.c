/* SPDX-License-Identifier: Apache-2.0
 *
 * What the CUDA engine's CPU side makes of layers at their edges: ranks without tokens, experts
 * without rows or with all, as many slots as experts, widths that nothing divides, capacities
 * that drop or fill up, many chunks, what a graph could hold.  Random layers over the runtime in
 * ordinary memory (tests/fake/cuda_runtime.c); sizes, places and bytes are compared with counts
 * made here.
 *
 *   test_cuda_edges [LAYERS [SEED]]    so many (300), from this one on (1)
 */
#include "config.h"

#include "backend/cuda/gpu.h"
#include "backend/engine.h"
#include "cuda_ranks.h"
#include "unit.h"

#include "../fake/cuda_runtime.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 4, TOKENS = 20, EXPERTS = 36, TOP_K = 32, WIDTH = 264, FAILURES = 40 };

static const epo_engine *engine;
static long layers = 300, seed = 1;

static uint64_t mix(uint64_t x) {
    x += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

typedef struct layer {
    int ranks, local, experts, top_k, hidden, ffn, chunks, capacity;
    bool chain, pairs, pad, graphs;
    epo_saved_mode saved;
    epo_dtype type;
    epo_dispatcher dispatcher;
    epo_switch overlap, delay;
    epo_overflow overflow;
    int tokens[RANKS];
    int64_t slot[RANKS][TOKENS * TOP_K];
    uint64_t kept[RANKS][EXPERTS]; /* slots that each rank has for each expert */
    uint64_t rows[RANKS][EXPERTS]; /* what it sends there, padding too */
} layer;

typedef struct draw {
    uint64_t state;
} draw;
static int pick(draw *d, int n) { return (int)(mix(d->state++) % (uint64_t)n); }
#define ONE_OF(d, list) ((list)[pick(d, (int)(sizeof(list) / sizeof *(list)))])

static int64_t slot_of(draw *d, const layer *l, int how, int k) {
    switch (how) {
    case 0: return 0;                                          /* one expert has all */
    case 1: return l->experts - 1;                             /* the last one */
    case 2: return k % l->experts;                             /* all of them */
    case 3: return pick(d, 3) == 0 ? -1 : pick(d, l->experts); /* some nowhere */
    case 4: return -1;                                         /* nobody has any */
    default: return pick(d, l->experts);                       /* also twice */
    }
}

static void count(layer *l) {
    for (int r = 0; r < l->ranks; r++)
        for (int i = 0; i < l->tokens[r] * l->top_k; i++) {
            const int64_t e = l->slot[r][i];
            if (e >= 0 && (l->capacity < 0 || l->kept[r][e] < (uint64_t)l->capacity))
                l->kept[r][e]++;
        }
    for (int r = 0; r < l->ranks; r++)
        for (int e = 0; e < l->experts; e++)
            l->rows[r][e] = l->pad ? (uint64_t)l->capacity : l->kept[r][e];
}

static void make(layer *l, uint64_t number) {
    static const int ranks[] = {1, 2, 2, 4}, locals[] = {1, 2, 3, 5, 9},
                     chunks[] = {1, 2, 3, 8, 16};
    static const int widths[] = {1, 3, 8, 24, 64, 250, WIDTH};
    static const epo_dtype types[] = {EPO_BF16, EPO_BF16, EPO_F16, EPO_F32};
    draw d = {mix(number)};
    memset(l, 0, sizeof *l);
    l->ranks = ONE_OF(&d, ranks);
    l->local = ONE_OF(&d, locals);
    l->experts = l->ranks * l->local;
    l->top_k = 1 + pick(&d, l->experts < TOP_K ? l->experts : TOP_K);
    if (pick(&d, 4) == 0)
        l->top_k = l->experts < TOP_K ? l->experts : TOP_K;
    l->hidden = ONE_OF(&d, widths);
    l->ffn = ONE_OF(&d, widths);
    l->chunks = ONE_OF(&d, chunks);
    l->chain = pick(&d, 4) != 0;
    l->type = ONE_OF(&d, types);
    l->dispatcher = pick(&d, 2) == 0 ? EPO_DISPATCH_ALLTOALL : EPO_DISPATCH_FLEX;
    l->overlap = pick(&d, 4) != 0 ? EPO_ON : EPO_OFF;
    l->delay = l->overlap == EPO_ON && pick(&d, 3) == 0 ? EPO_ON : EPO_OFF;
#ifdef HAVE_NCCL
    l->pairs = l->ranks == 2 && pick(&d, 3) == 0;
#endif
    l->capacity = pick(&d, 3) == 0 ? pick(&d, 4) : -1;
    l->overflow = l->capacity < 0 ? EPO_OVERFLOW_ERROR : EPO_OVERFLOW_DROP_POSITION;
    l->pad = l->capacity >= 0 && pick(&d, 2) == 0;
    l->graphs = l->pad && l->delay == EPO_OFF && !l->pairs && pick(&d, 2) == 0;
    l->saved = l->dispatcher == EPO_DISPATCH_FLEX && pick(&d, 3) == 0 ? EPO_SAVE_TOKENS
               : !l->graphs && pick(&d, 3) == 0                       ? EPO_SAVE_NOTHING
                                                                      : EPO_SAVE_ROWS;
    const int how = pick(&d, 7);
    for (int r = 0; r < l->ranks; r++) {
        l->tokens[r] = pick(&d, 3) == 0 ? 0 : pick(&d, TOKENS + 1);
        for (int i = 0; i < l->tokens[r] * l->top_k; i++)
            l->slot[r][i] = slot_of(&d, l, how, i % l->top_k);
    }
    count(l);
}

/* ---- one rank ---------------------------------------------------------------------- */

typedef struct member {
    int rank, wrong;
    const layer *l;
    epo_world *world;
    char text[300];
} member;

static void expect(member *m, bool right, const char *what, uint64_t found, uint64_t wanted) {
    if (!right && m->wrong++ == 0)
        snprintf(m->text, sizeof m->text, "%s: found %" PRIu64 ", wanted %" PRIu64 " [%s]", what,
                 found, wanted, engine->error());
}
static bool went(member *m, epo_status status, const char *what) {
    expect(m, status == EPO_OK, what, (uint64_t)status, 0);
    return status == EPO_OK;
}

static void check_plan(member *m, epo_plan *plan, epo_group *group) {
    const layer *l = m->l;
    uint64_t first[EXPERTS], have[EXPERTS], rows = 0, next = 0, kept = 0, slots = 0;
    epo_stats s = {.size = sizeof s};
    if (!went(m, engine->plan_experts(plan, first, have), "plan_experts") ||
        !went(m, engine->plan_rows(plan, &rows), "plan_rows") ||
        !went(m, engine->group_stats(group, &s, 1), "group_stats"))
        return;
    for (int e = 0; e < l->local; e++) {
        uint64_t sum = 0;
        for (int r = 0; r < l->ranks; r++)
            sum += l->rows[r][m->rank * l->local + e];
        expect(m, have[e] == sum, "an expert's rows", have[e], sum);
        expect(m, first[e] >= next && first[e] % 16 == 0, "an expert's first row", first[e], next);
        next = first[e] + have[e];
    }
    expect(m, rows >= next, "rows", rows, next);
    for (int i = 0; i < l->tokens[m->rank] * l->top_k; i++)
        slots += l->slot[m->rank][i] >= 0;
    for (int e = 0; e < l->experts; e++)
        kept += l->kept[m->rank][e];
    if (!l->graphs) /* else kernels count them */
        expect(m, s.dropped_slots == slots - kept, "dropped", s.dropped_slots, slots - kept);
}

static void check_bytes(member *m, epo_group *group, int passes) {
    const layer *l = m->l;
    const uint64_t row = (uint64_t)l->hidden * (l->type == EPO_F32 ? 4 : 2);
    uint64_t out = 0, in = 0;
    const uint64_t again = l->saved == EPO_SAVE_NOTHING ? 1 : 0; /* x is sent a second time */
    epo_stats s = {.size = sizeof s};
    if (l->dispatcher == EPO_DISPATCH_FLEX || !went(m, engine->group_stats(group, &s, 1), "stats"))
        return;
    for (int e = 0; e < l->experts; e++)
        for (int r = 0; r < l->ranks; r++) {
            out += r == m->rank && e / l->local != r ? l->rows[r][e] : 0;
            in += r != m->rank && e / l->local == m->rank ? l->rows[r][e] : 0;
        }
    out *= row * (uint64_t)passes * (2 + again) / 2;
    in *= row * (uint64_t)passes;
    expect(m, s.dispatch_bytes == out, "bytes of dispatch", s.dispatch_bytes, out);
    expect(m, s.combine_bytes == in, "bytes of combine", s.combine_bytes, in);
}

/* The caller's own experts, with the gradients of router weights; who has no rows or no tokens
 * gives no array for them. */
static void run_own(member *m, epo_plan *plan, const void *x, void *y, float *dw) {
    const layer *l = m->l;
    uint64_t rows = 0;
    if (!went(m, engine->plan_rows(plan, &rows), "plan_rows"))
        return;
    void *own = cuda_ranks_room((size_t)rows * (size_t)l->hidden * 4);
    float *weights = cuda_ranks_room((size_t)rows * sizeof *weights);
    (void)(went(m, engine->dispatch(plan, x, own, weights, NULL), "dispatch") &&
           went(m,
                engine->combine(plan, own, y, rows > 0 ? weights : NULL,
                                l->tokens[m->rank] > 0 ? dw : NULL, NULL),
                "combine"));
    free(weights);
    free(own);
}

static void run_layer(member *m, epo_group *group, epo_buffer *buffer, epo_layer *lay) {
    const layer *l = m->l;
    const int tokens = l->tokens[m->rank];
    const size_t bytes = (size_t)TOKENS * (size_t)l->hidden * 4;
    void *x = cuda_ranks_room(bytes), *y = cuda_ranks_room(bytes), *dy = cuda_ranks_room(bytes),
         *dx = cuda_ranks_room(bytes);
    float *weights = cuda_ranks_room(sizeof(float) * TOKENS * TOP_K),
          *dw = cuda_ranks_room(sizeof(float) * TOKENS * TOP_K);
    epo_routing r = EPO_ROUTING_INIT;
    epo_plan *plan = NULL;
    r.tokens = tokens;
    r.top_k = l->top_k;
    r.experts = l->slot[m->rank];
    r.weights = weights;
    if (went(m, engine->plan_create(buffer, &r, NULL, &plan), "plan")) {
        check_plan(m, plan, group);
        fake_cuda_count();
        for (int i = 0; i < 2; i++) {
            epo_saved *saved = NULL;
            if (went(m, engine->forward(lay, plan, x, y, &saved, NULL), "forward"))
                (void)went(m, engine->backward(lay, saved, dy, dx, dw, NULL), "backward");
        }
        /* In replays kernels alone store to peers: a copy would not know that a wait expired.  One
         * a forward keeps this rank's rows. */
        const long copies =
            fake_cuda_counted("cudaMemcpyAsync") + fake_cuda_counted("cudaMemcpy2DAsync");
        expect(m, !l->graphs || copies <= 2, "copies of a graph", (uint64_t)copies, 2);
        (void)went(m, engine->group_wgrad_flush(group, NULL), "flush");
        check_bytes(m, group, 4);
        if (!l->graphs)
            run_own(m, plan, x, y, dw);
    }
    engine->plan_release(plan);
    void *all[] = {x, y, dy, dx, weights, dw};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void *member_main(void *arg) {
    member *m = arg;
    const layer *l = m->l;
    const size_t w = (size_t)l->local * (size_t)l->ffn * (size_t)l->hidden * 4;
    epo_engine_group g = cuda_ranks_group(m->world, m->rank, l->ranks);
    epo_buffer_config b = EPO_BUFFER_CONFIG_INIT;
    epo_layer_config c = EPO_LAYER_CONFIG_INIT;
    epo_group *group = NULL;
    epo_buffer *buffer = NULL;
    epo_layer *lay = NULL;
    void *all[] = {cuda_ranks_room(2 * w), cuda_ranks_room(w), cuda_ranks_room(2 * w),
                   cuda_ranks_room(w)};
    cudaSetDevice(m->rank);
    g.config.overlap = l->overlap;
    g.config.delay_wgrad = l->delay;
    g.config.dispatcher = l->dispatcher;
    g.config.chunks = l->chunks;
    b.experts = c.experts = l->experts;
    b.hidden = c.hidden = l->hidden;
    b.top_k = l->top_k;
    b.max_tokens = TOKENS;
    b.type = c.type = c.wgrad_type = l->type;
    b.capacity = l->capacity;
    b.overflow = l->overflow;
    b.pad_to_capacity = l->pad;
    b.graphs = l->graphs;
    c.saved = l->saved;
    c.ffn = l->ffn;
    c.w1 = all[0];
    c.w2 = all[1];
    c.dw1 = all[2];
    c.dw2 = all[3];
    if (went(m, engine->group_create(&g, &group), "group") &&
        went(m, engine->buffer_create(group, &b, &buffer), "buffer") &&
        went(m, engine->layer_create(group, &c, &lay), "layer"))
        run_layer(m, group, buffer, lay);
    (void)went(m, engine->layer_destroy(lay), "layer_destroy");
    (void)went(m, engine->buffer_destroy(buffer), "buffer_destroy");
    (void)went(m, engine->group_destroy(group), "group_destroy");
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    return NULL;
}

/* Ranks that meet; m[r].wrong and .text say what went wrong. */
static void play(const layer *l, member *m) {
    setenv("EP_OVERLAP_CUDA_SMALL", l->graphs ? "0" : "", 1); /* whatever may be copied is */
    epo_world *world = cuda_ranks_world(engine, l->ranks, l->chain, l->pairs);
    for (int r = 0; r < l->ranks; r++) {
        m[r].rank = r;
        m[r].l = l;
        m[r].world = world;
    }
    cuda_ranks_run(engine, world, l->ranks, member_main, m, sizeof *m);
}

static void say(const layer *l, long number, int rank, const char *text) {
    printf("layer %ld: %d ranks, %d experts each, top_k %d, H %d, F %d, type %d, %d chunks, "
           "capacity %d%s, saves %d, %s%s%s; rank %d, %d tokens: %s\n",
           number, l->ranks, l->local, l->top_k, l->hidden, l->ffn, (int)l->type, l->chunks,
           l->capacity,
           l->graphs ? " for graphs"
           : l->pad  ? " filled"
                     : "",
           (int)l->saved, l->dispatcher == EPO_DISPATCH_FLEX ? "flex" : "alltoall",
           l->overlap == EPO_ON ? "" : ", serial", l->pairs ? ", NCCL" : "", rank, l->tokens[rank],
           text);
}

static void run(const layer *l, long number) {
    member m[RANKS] = {{0}};
    char left[200];
    play(l, m);
    for (int r = 0; r < l->ranks; r++) {
        if (m[r].wrong > 0)
            say(l, number, r, m[r].text);
        CU_ASSERT_EQUAL(m[r].wrong, 0);
    }
    const int n = fake_cuda_left(left, sizeof left), wrong = fake_cuda_wrong();
    if (n != 0 || wrong != 0)
        printf("layer %ld: left: %s; given back wrongly: %d\n", number, left, wrong);
    CU_ASSERT_EQUAL(n, 0);
    CU_ASSERT_EQUAL(wrong, 0);
    if (l->pairs && !fake_nccl_matched(left, sizeof left)) {
        say(l, number, 0, left);
        CU_FAIL("messages without their other ends");
    }
    fake_cuda_forget(false);
}

static void random_layers(void) {
    static layer l;
    long none = 0, full = 0, narrow = 0, filled = 0, graphs = 0, again = 0;
    for (long i = seed; i < seed + layers; i++) {
        make(&l, (uint64_t)i);
        none += l.tokens[0] == 0;
        full += l.top_k == l.experts;
        narrow += l.hidden % 8 != 0;
        filled += l.pad;
        graphs += l.graphs;
        again += l.saved != EPO_SAVE_ROWS;
        run(&l, i);
    }
    CU_ASSERT(layers < 100 ||
              (none > 0 && full > 0 && narrow > 0 && filled > 0 && graphs > 0 && again > 0));
}

#ifdef HAVE_NCCL
/* A rank whose experts get no rows at all has filled-up ones, and still receives what comes back:
 * over NCCL each message has two ends. */
static void filled_for_nobody(void) {
    static layer l;
    for (int i = 0; i < 16; i++) {
        memset(&l, 0, sizeof l);
        l = (layer){.ranks = 2,
                    .local = 6,
                    .experts = 12,
                    .top_k = 3,
                    .hidden = 21,
                    .ffn = 34,
                    .chunks = 1 << i % 4,
                    .capacity = 4,
                    .pairs = true,
                    .pad = true,
                    .type = i / 4 % 2 ? EPO_BF16 : EPO_F32,
                    .dispatcher = i / 8 ? EPO_DISPATCH_ALLTOALL : EPO_DISPATCH_FLEX,
                    .overlap = i % 4 ? EPO_ON : EPO_OFF,
                    .overflow = EPO_OVERFLOW_DROP_POSITION,
                    .saved = EPO_SAVE_ROWS,
                    .tokens = {20, 17}};
        for (int r = 0; r < l.ranks; r++)
            for (int k = 0; k < l.tokens[r] * l.top_k; k++)
                l.slot[r][k] = k % 4 == 0 ? -1 : k % 6; /* rank 0's */
        count(&l);
        run(&l, i);
    }
}
#endif

/* One of rank 1's calls fails, of a whole layer's: whoever comes to it says so, and nothing is
 * left, but what of a broken group's rows and flags stays where ranks are threads. */
static void calls_fail(void) {
    static layer l;
    long made = 0, survived = 0, at = 0;
    char left[200];
    for (long i = seed; made < FAILURES; i++) {
        make(&l, (uint64_t)i);
        if (l.ranks != 2 || l.pairs)
            continue;
        member m[RANKS] = {{0}};
        at = (at + 37) % 600;
        fake_cuda_fail(FAKE_CALLS, 1, at);
        play(&l, m);
        const bool failed = fake_cuda_failed()[0] != '\0';
        survived += failed && m[1].wrong == 0;
        made += failed;
        CU_ASSERT(failed || m[1].wrong == 0);
        fake_cuda_fail(FAKE_CALLS, 1, -1);
        if (m[0].wrong + m[1].wrong > 0)
            fake_cuda_forget(true);
        int n = 1;
        for (int k = 0; k < 500 && n > 0; k++) { /* threads that were left may still be at it */
            n = fake_cuda_left(left, sizeof left);
            nanosleep(&(struct timespec){0, n > 0 ? 10000000 : 0}, NULL);
        }
        const int wrong = fake_cuda_wrong();
        if (n != 0 || wrong != 0)
            printf("layer %ld, call %ld (%s): left: %s; given back wrongly: %d; rank 1: %s\n", i,
                   at, fake_cuda_failed(), left, wrong, m[1].text);
        CU_ASSERT_EQUAL(n, 0);
        CU_ASSERT_EQUAL(wrong, 0);
        fake_cuda_forget(false);
    }
    printf("%ld calls failed, %ld of them not needed ", made, survived);
    CU_ASSERT(survived < made / 2);
}

int main(int argc, char **argv) {
    static const CU_TestInfo tests[] = {
        {"random layers at the edges", random_layers},
#ifdef HAVE_NCCL
        {"experts filled up, and no rows for them", filled_for_nobody},
#endif
        {"a call of a layer fails", calls_fail},
        CU_TEST_INFO_NULL,
    };
    layers = argc > 1 ? strtol(argv[1], NULL, 10) : layers;
    seed = argc > 2 ? strtol(argv[2], NULL, 10) : seed;
    fake_cuda_stream_ops(true);
    engine = epo_engine_entry(EPO_ENGINE_ABI);
    alarm(200); /* what hangs, ends */
    return layers < 1 || engine == NULL ? 2 : unit_run("cuda edges", tests);
}
