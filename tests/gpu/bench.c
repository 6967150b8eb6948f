/* SPDX-License-Identifier: Apache-2.0
 *
 * bench.c - a layer's time, serial and overlapped, with what bounds it.
 *
 *   bench RANKS TOKENS HIDDEN FFN EXPERTS TOP_K [REPEATS]
 *
 * Rank r is a thread on GPU r. All arms are measured in turns in one run; figures
 * are medians of the slowest rank. FFN is the experts' GEMMs and activation alone on
 * the same rows; the floor is max(FFN, D + C), D and C the least bytes over the rate
 * of a large peer copy. efficiency = (serial - arm) / (serial - floor).
 */
#include "gpu_test.h"

#include "backend/backend.h"
#include "backend/engine.h"
#include "core/status.h"

#include <pthread.h>
#include <time.h>

enum { RANKS = 8, REPEATS = 64, WARM = 2, MICROBATCHES = 4 };

typedef struct arm {
    const char *name;
    epo_dispatcher dispatcher;
    epo_switch overlap, delay;
    int chunks;
} arm;
static const arm arms[] = {
    {"alltoall serial", EPO_DISPATCH_ALLTOALL, EPO_OFF, EPO_OFF, 1},
    {"alltoall n=2", EPO_DISPATCH_ALLTOALL, EPO_ON, EPO_OFF, 2},
    {"alltoall n=4", EPO_DISPATCH_ALLTOALL, EPO_ON, EPO_OFF, 4},
    {"alltoall n=8", EPO_DISPATCH_ALLTOALL, EPO_ON, EPO_OFF, 8},
    {"alltoall n=4 delayed", EPO_DISPATCH_ALLTOALL, EPO_ON, EPO_ON, 4},
    {"flex serial", EPO_DISPATCH_FLEX, EPO_OFF, EPO_OFF, 1},
    {"flex n=2", EPO_DISPATCH_FLEX, EPO_ON, EPO_OFF, 2},
    {"flex n=4", EPO_DISPATCH_FLEX, EPO_ON, EPO_OFF, 4},
    {"flex n=4 delayed", EPO_DISPATCH_FLEX, EPO_ON, EPO_ON, 4},
};
enum { ARMS = sizeof arms / sizeof *arms };

typedef struct shape {
    int ranks, tokens, hidden, ffn, experts, top_k, repeats;
} shape;

static shape sh;
static const epo_engine *engine;
static pthread_barrier_t together;
static epo_world *worlds[ARMS];
/* Milliseconds: forward, forward + backward; microseconds on the host; per rank. */
static float fwd[RANKS][ARMS][REPEATS], both[RANKS][ARMS][REPEATS], host[RANKS][ARMS][REPEATS];
static float ffn_fwd[RANKS][REPEATS], ffn_both[RANKS][REPEATS], ffn_four[RANKS][REPEATS],
    plan_ms[RANKS][ARMS];
static uint64_t bytes_out[ARMS][2];
static int broken;
static char versions[256];

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

static bool must(epo_status status, const char *what) {
    if (status == EPO_OK)
        return true;
    fprintf(stderr, "bench: %s: %s\n", what, engine->error());
    broken = 1;
    return false;
}

typedef struct one {
    epo_group *group;
    epo_buffer *buffer;
    epo_layer *layer;
    epo_plan *plan;
} one;

typedef struct bench_rank {
    int rank;
    cudaStream_t stream;
    cudaEvent_t start, middle, end;
    void *w1, *w2, *dw1, *dw2, *x, *dy, *y, *dx;
    float *weights, *dweights;
    int64_t *experts;
    one arm[ARMS];
} bench_rank;

static void *random_bf16(uint64_t n, uint64_t seed, float scale) {
    uint16_t *p = malloc(n * 2);
    for (uint64_t i = 0; i < n; i++)
        test_store(p, i, EPO_BF16, scale * test_uniform(seed, i % 1000003));
    void *d = test_upload(p, n * 2);
    free(p);
    return d;
}

static void rank_memory(bench_rank *b) {
    const uint64_t local = (uint64_t)(sh.experts / sh.ranks), h = (uint64_t)sh.hidden;
    const uint64_t n = (uint64_t)sh.ffn * h, rows = (uint64_t)sh.tokens * h;
    const uint64_t slots = (uint64_t)sh.tokens * (uint64_t)sh.top_k, seed = 77 + (uint64_t)b->rank;
    b->w1 = random_bf16(2 * local * n, seed, 0.03F);
    b->w2 = random_bf16(local * n, seed + 100, 0.03F);
    b->dw1 = test_device(2 * local * n * 2, 0);
    b->dw2 = test_device(local * n * 2, 0);
    b->x = random_bf16(rows, seed + 200, 1.0F);
    b->dy = random_bf16(rows, seed + 300, 1.0F);
    b->y = test_device(rows * 2, 0xff);
    b->dx = test_device(rows * 2, 0xff);
    b->dweights = test_device(slots * 4, 0xff);
    int64_t *e = malloc(slots * sizeof *e);
    float *w = malloc(slots * sizeof *w);
    for (uint64_t t = 0; t < (uint64_t)sh.tokens; t++)
        for (int k = 0; k < sh.top_k; k++) {
            bool again = true;
            for (uint64_t i = 0; again; i++) { /* distinct experts */
                int64_t pick = (int64_t)(test_random(seed + 400, (t * 64 + (uint64_t)k) * 64 + i) %
                                         (uint64_t)sh.experts);
                again = false;
                for (int j = 0; j < k; j++)
                    again = again || e[t * (uint64_t)sh.top_k + (uint64_t)j] == pick;
                e[t * (uint64_t)sh.top_k + (uint64_t)k] = pick;
            }
            w[t * (uint64_t)sh.top_k + (uint64_t)k] = 0.125F;
        }
    b->experts = test_upload(e, slots * sizeof *e);
    b->weights = test_upload(w, slots * sizeof *w);
    free(w);
    free(e);
}

static bool arm_open(bench_rank *b, int a) {
    one *o = &b->arm[a];
    epo_engine_group eg = {sizeof eg, EPO_GROUP_CONFIG_INIT, "bench"};
    eg.config.engine = EPO_ENGINE_CUDA;
    eg.config.rank = b->rank;
    eg.config.ranks = sh.ranks;
    eg.config.threads = worlds[a];
    eg.config.overlap = arms[a].overlap;
    eg.config.delay_wgrad = arms[a].delay;
    eg.config.dispatcher = arms[a].dispatcher;
    eg.config.chunks = arms[a].chunks;
    eg.config.timeout_s = 20;
    eg.config.wgrad_limit_bytes = UINT64_C(4) << 30;
    epo_buffer_config bc = EPO_BUFFER_CONFIG_INIT;
    bc.experts = sh.experts;
    bc.hidden = sh.hidden;
    bc.top_k = sh.top_k;
    bc.max_tokens = sh.tokens;
    bc.type = EPO_BF16;
    epo_layer_config lc = EPO_LAYER_CONFIG_INIT;
    lc.experts = sh.experts;
    lc.hidden = sh.hidden;
    lc.ffn = sh.ffn;
    lc.type = lc.wgrad_type = EPO_BF16;
    lc.w1 = b->w1;
    lc.w2 = b->w2;
    lc.dw1 = b->dw1;
    lc.dw2 = b->dw2;
    if (!must(engine->group_create(&eg, &o->group), "group") ||
        !must(engine->buffer_create(o->group, &bc, &o->buffer), "buffer") ||
        !must(engine->layer_create(o->group, &lc, &o->layer), "layer"))
        return false;
    epo_routing r = EPO_ROUTING_INIT;
    r.tokens = sh.tokens;
    r.top_k = sh.top_k;
    r.experts = b->experts;
    r.weights = b->weights;
    for (int i = 0; i < 3; i++) { /* the last one counts, and stays */
        engine->plan_release(o->plan);
        o->plan = NULL;
        const double t = now_us();
        if (!must(engine->plan_create(o->buffer, &r, b->stream, &o->plan), "plan"))
            return false;
        plan_ms[b->rank][a] = (float)(1e-3 * (now_us() - t));
    }
    epo_group_info info = {.size = sizeof info};
    if (b->rank == 0 && a == 0 && engine->group_query(o->group, &info) == EPO_OK)
        snprintf(versions, sizeof versions, "%s", info.versions);
    return true;
}

/* Even repeats time one forward; odd ones MICROBATCHES of forward and backward and
 * the flush of what was delayed, so that a delayed gradient is paid for. */
static bool arm_run(bench_rank *b, int a, int rep) {
    one *o = &b->arm[a];
    const bool whole = rep % 2 != 0;
    double call = 0;
    float ms = 0;
    pthread_barrier_wait(&together);
    TEST_CUDA(cudaEventRecord(b->start, b->stream));
    for (int mb = 0; mb < (whole ? MICROBATCHES : 1); mb++) {
        epo_saved *saved = NULL;
        const double t = now_us();
        if (!must(engine->forward(o->layer, o->plan, b->x, b->y, &saved, b->stream), "forward"))
            return false;
        call = now_us() - t;
        if (!whole)
            TEST_CUDA(cudaEventRecord(b->end, b->stream));
        if (whole && !must(engine->backward(o->layer, saved, b->dy, b->dx, b->dweights, b->stream),
                           "backward"))
            return false;
        if (!whole)
            engine->saved_release(saved);
    }
    if (whole && !must(engine->group_wgrad_flush(o->group, b->stream), "flush"))
        return false;
    if (whole)
        TEST_CUDA(cudaEventRecord(b->end, b->stream));
    TEST_CUDA(cudaStreamSynchronize(b->stream));
    if (rep < 0)
        return true;
    TEST_CUDA(cudaEventElapsedTime(&ms, b->start, b->end));
    if (whole)
        both[b->rank][a][rep / 2] = ms / MICROBATCHES;
    else
        fwd[b->rank][a][rep / 2] = ms;
    if (!whole)
        host[b->rank][a][rep / 2] = (float)call;
    return true;
}

/* What the queues do in one forward and backward, for BENCH_TIMELINE. */
static bool arm_timeline(bench_rank *b, int a) {
    one *o = &b->arm[a];
    const epo_interval *list = NULL;
    uint64_t count = 0, dropped = 0;
    epo_saved *saved = NULL;
    if (!must(engine->record_start(o->group, 4096), "record"))
        return false;
    pthread_barrier_wait(&together);
    if (!must(engine->forward(o->layer, o->plan, b->x, b->y, &saved, b->stream), "forward") ||
        !must(engine->backward(o->layer, saved, b->dy, b->dx, b->dweights, b->stream),
              "backward") ||
        !must(engine->group_wgrad_flush(o->group, b->stream), "flush"))
        return false;
    TEST_CUDA(cudaStreamSynchronize(b->stream));
    if (!must(engine->record_stop(o->group, &list, &count, &dropped), "record"))
        return false;
    for (uint64_t i = 0; i < count && b->rank == 0; i++)
        printf("time\t%s\t%s\t%d\t%.1f\t%.1f\n", arms[a].name, list[i].name, list[i].chunk,
               1e-3 * (double)(list[i].start_ns - list[0].start_ns),
               1e-3 * (double)(list[i].end_ns - list[0].start_ns));
    return true;
}

/* ---- the experts alone ---- */

typedef struct ffn_alone {
    const epo_backend_ops *ops;
    epo_backend *be;
    epo_queue *q;
    uint64_t first[1024], count[1024], rows;
    void *x, *h, *a, *y, *op_first, *op_count;
    float *w, *dw;
} ffn_alone;

static bool ffn_open(bench_rank *b, ffn_alone *f) {
    const int local = sh.experts / sh.ranks;
    f->ops = epo_backend_get();
    epo_backend_config c = {.rank = 0, .ranks = 1, .timeout_s = 20, .warn_s = 10};
    if (f->ops->open(&c, &f->be) != EPO_OK ||
        f->ops->queue_create(f->be, EPO_QUEUE_COMPUTE, &f->q) != EPO_OK ||
        engine->plan_rows(b->arm[0].plan, &f->rows) != EPO_OK ||
        engine->plan_experts(b->arm[0].plan, f->first, f->count) != EPO_OK)
        return false;
    const uint64_t r = f->rows + 1;
    f->x = random_bf16(r * (uint64_t)sh.hidden, 5, 1.0F);
    f->y = random_bf16(r * (uint64_t)sh.hidden, 6, 1.0F);
    f->h = test_device(r * 4 * (uint64_t)sh.ffn, 0);
    f->a = test_device(r * 2 * (uint64_t)sh.ffn, 0);
    f->dw = test_device(r * 4, 0);
    float *w = malloc(r * 4);
    for (uint64_t i = 0; i < r; i++)
        w[i] = 0.125F;
    f->w = test_upload(w, r * 4);
    free(w);
    f->op_first = test_upload(f->first, (uint64_t)local * 8);
    f->op_count = test_upload(f->count, (uint64_t)local * 8);
    return true;
}

static epo_status ffn_gemm(bench_rank *b, ffn_alone *f, epo_gemm_kind kind, const void *a,
                           const void *w, void *c, int n, int k, const epo_swiglu *act) {
    (void)b;
    epo_gemm g = {.kind = kind,
                  .a = a,
                  .b = w,
                  .c = c,
                  .type = EPO_BF16,
                  .c_type = EPO_BF16,
                  .n = n,
                  .k = k,
                  .row_first = f->op_first,
                  .row_count = f->op_count,
                  .count = sh.experts / sh.ranks,
                  .cpu_first = f->first,
                  .cpu_count = f->count,
                  .act = act};
    epo_deps deps = {.name = "gemm", .chunk = -1};
    return f->ops->gemm(f->q, &g, &deps);
}

/* In `pieces` of equal numbers of experts. */
static epo_status ffn_forward(bench_rank *b, ffn_alone *f, int pieces) {
    const int local = sh.experts / sh.ranks;
    epo_swiglu act = {
        .h = f->h, .w = f->w, .a = f->a, .rows = f->rows, .ffn = sh.ffn, .type = EPO_BF16};
    epo_deps deps = {.name = "gemm", .chunk = -1};
    epo_status st = EPO_OK;
    for (int i = 0; i < pieces && st == EPO_OK; i++) {
        epo_gemm g = {.kind = EPO_GEMM_FORWARD,
                      .a = f->x,
                      .b = b->w1,
                      .c = f->h,
                      .type = EPO_BF16,
                      .c_type = EPO_BF16,
                      .n = 2 * sh.ffn,
                      .k = sh.hidden,
                      .row_first = f->op_first,
                      .row_count = f->op_count,
                      .first = i * local / pieces,
                      .cpu_first = f->first,
                      .cpu_count = f->count,
                      .act = &act};
        g.count = (i + 1) * local / pieces - g.first;
        st = f->ops->gemm(f->q, &g, &deps);
        g.act = NULL;
        g.a = f->a;
        g.b = b->w2;
        g.c = f->y;
        g.n = sh.hidden;
        g.k = sh.ffn;
        st = st == EPO_OK ? f->ops->gemm(f->q, &g, &deps) : st;
    }
    return st;
}

static void ffn_run(bench_rank *b, ffn_alone *f, int rep) {
    epo_deps deps = {.name = "end", .chunk = -1};
    epo_event *done = NULL;
    epo_swiglu d = {f->h, f->w, f->a, f->a, f->h, f->dw, 0, f->rows, sh.ffn, EPO_BF16};
    float chunked = 0;
    epo_status st = f->ops->event_create(f->be, &done);
    deps.signal = done;
    for (int pieces = 4; pieces >= 1; pieces -= 3) {
        pthread_barrier_wait(&together);
        TEST_CUDA(cudaEventRecord(b->start, b->stream));
        st = st != EPO_OK ? st : f->ops->stream_enter(f->be, f->q, b->stream);
        st = st != EPO_OK ? st : ffn_forward(b, f, pieces);
        st = st != EPO_OK ? st : f->ops->zero(f->q, NULL, 0, &deps);
        st = st != EPO_OK ? st : f->ops->stream_leave(f->be, done, b->stream);
        TEST_CUDA(cudaEventRecord(b->middle, b->stream));
        TEST_CUDA(cudaEventSynchronize(b->middle));
        if (pieces > 1)
            TEST_CUDA(cudaEventElapsedTime(&chunked, b->start, b->middle));
    }
    const int h = sh.hidden, n = sh.ffn;
    st = st != EPO_OK ? st : ffn_gemm(b, f, EPO_GEMM_DGRAD, f->y, b->w2, f->a, h, n, &d);
    st = st != EPO_OK ? st : ffn_gemm(b, f, EPO_GEMM_DGRAD, f->h, b->w1, f->x, 2 * n, h, NULL);
    st = st != EPO_OK ? st : ffn_gemm(b, f, EPO_GEMM_WGRAD, f->y, f->a, b->dw2, h, n, NULL);
    st = st != EPO_OK ? st : ffn_gemm(b, f, EPO_GEMM_WGRAD, f->h, f->x, b->dw1, 2 * n, h, NULL);
    st = st != EPO_OK ? st : f->ops->zero(f->q, NULL, 0, &deps);
    st = st != EPO_OK ? st : f->ops->stream_leave(f->be, done, b->stream);
    if (rep >= 0)
        ffn_four[b->rank][rep] = chunked;
    TEST_CUDA(cudaEventRecord(b->end, b->stream));
    TEST_CUDA(cudaStreamSynchronize(b->stream));
    f->ops->event_destroy(f->be, done);
    if (st != EPO_OK)
        must(st, "ffn alone");
    if (rep < 0)
        return;
    TEST_CUDA(cudaEventElapsedTime(&ffn_fwd[b->rank][rep], b->start, b->middle));
    TEST_CUDA(cudaEventElapsedTime(&ffn_both[b->rank][rep], b->start, b->end));
}

static void *rank_main(void *ctx) {
    bench_rank b = {.rank = *(int *)ctx};
    ffn_alone f;
    memset(&f, 0, sizeof f);
    TEST_CUDA(cudaSetDevice(b.rank));
    TEST_CUDA(cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking));
    TEST_CUDA(cudaEventCreate(&b.start));
    TEST_CUDA(cudaEventCreate(&b.middle));
    TEST_CUDA(cudaEventCreate(&b.end));
    rank_memory(&b);
    bool ok = true;
    for (int a = 0; a < ARMS && ok; a++)
        ok = arm_open(&b, a);
    ok = ok && ffn_open(&b, &f);
    if (!ok)
        exit(1); /* the other ranks wait in a barrier */
    for (int rep = -2 * WARM; rep < 2 * sh.repeats; rep++) {
        for (int a = 0; a < ARMS; a++)
            if (!arm_run(&b, a, rep))
                exit(1);
        if (rep % 2 == 0 || rep < 0)
            ffn_run(&b, &f, rep < 0 ? -1 : rep / 2);
    }
    for (int a = 0; a < ARMS && getenv("BENCH_TIMELINE") != NULL; a++)
        if (!arm_timeline(&b, a))
            exit(1);
    for (int a = 0; a < ARMS && b.rank == 0; a++) {
        epo_stats s = {.size = sizeof s};
        if (engine->group_stats(b.arm[a].group, &s, 0) == EPO_OK && s.forward_calls > 0) {
            const uint64_t passes = s.forward_calls + s.backward_calls;
            bytes_out[a][0] = s.dispatch_bytes / passes;
            bytes_out[a][1] = s.combine_bytes / passes;
        }
    }
    for (int a = 0; a < ARMS; a++) {
        must(engine->group_wgrad_flush(b.arm[a].group, b.stream), "flush");
        engine->plan_release(b.arm[a].plan);
        must(engine->layer_destroy(b.arm[a].layer), "layer");
        must(engine->buffer_destroy(b.arm[a].buffer), "buffer");
        must(engine->group_destroy(b.arm[a].group), "group");
    }
    return NULL;
}

/* ---- figures ---- */

static int ascending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

/* Median over repeats of the slowest rank; *spread: half the distance of quartiles. */
static double median(const float *first, size_t rank_stride, double *spread) {
    float v[REPEATS];
    for (int i = 0; i < sh.repeats; i++) {
        v[i] = 0;
        for (int r = 0; r < sh.ranks; r++) {
            const float t = first[(size_t)r * rank_stride + (size_t)i];
            v[i] = t > v[i] ? t : v[i];
        }
    }
    qsort(v, (size_t)sh.repeats, sizeof *v, ascending);
    if (spread != NULL)
        *spread = 0.5 * (double)(v[sh.repeats * 3 / 4] - v[sh.repeats / 4]);
    return (double)v[sh.repeats / 2];
}

/* GB/s of one direction while both are busy. */
static double peer_rate(void) {
    const size_t bytes = 256u << 20;
    char *p[2] = {NULL, NULL}, *q[2] = {NULL, NULL};
    cudaStream_t s[2];
    cudaEvent_t e[2];
    if (sh.ranks < 2)
        return 0;
    for (int i = 0; i < 2; i++) {
        TEST_CUDA(cudaSetDevice(i));
        TEST_CUDA(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking));
        TEST_CUDA(cudaMalloc((void **)&p[i], bytes));
        TEST_CUDA(cudaMalloc((void **)&q[i], bytes));
        TEST_CUDA(cudaEventCreate(&e[i]));
    }
    double best = 0;
    for (int rep = 0; rep < 4; rep++) {
        float ms = 0;
        TEST_CUDA(cudaSetDevice(0));
        TEST_CUDA(cudaEventRecord(e[0], s[0]));
        cudaEvent_t end;
        TEST_CUDA(cudaEventCreate(&end));
        for (int k = 0; k < 4; k++) {
            TEST_CUDA(cudaMemcpyAsync(q[1], p[0], bytes, cudaMemcpyDeviceToDevice, s[0]));
            TEST_CUDA(cudaMemcpyAsync(q[0], p[1], bytes, cudaMemcpyDeviceToDevice, s[1]));
        }
        TEST_CUDA(cudaEventRecord(end, s[0]));
        TEST_CUDA(cudaEventSynchronize(end));
        TEST_CUDA(cudaStreamSynchronize(s[1]));
        TEST_CUDA(cudaEventElapsedTime(&ms, e[0], end));
        const double rate = 4e-6 * (double)bytes / (double)ms;
        best = rate > best ? rate : best;
        cudaEventDestroy(end);
    }
    for (int i = 0; i < 2; i++) {
        cudaFree(p[i]);
        cudaFree(q[i]);
    }
    return best;
}

static void report(double rate) {
    const double ffn = median(&ffn_fwd[0][0], REPEATS, NULL);
    const double ffn2 = median(&ffn_both[0][0], REPEATS, NULL);
    printf("# %s\n# %d ranks, T %d H %d F %d E %d K %d bf16; peer copy %.0f GB/s\n", versions,
           sh.ranks, sh.tokens, sh.hidden, sh.ffn, sh.experts, sh.top_k, rate);
    printf("# FFN alone: forward %.3f ms (in four pieces %.3f), forward + backward %.3f ms\n", ffn,
           median(&ffn_four[0][0], REPEATS, NULL), ffn2);
    printf("%-22s %8s %7s %8s %7s %6s %6s %6s %6s %8s %7s\n", "arm", "fwd ms", "+-", "f+b ms", "+-",
           "eff f", "eff fb", "x f", "x fb", "host us", "plan ms");
    int base = 0;
    for (int a = 0; a < ARMS; a++) {
        double sf = 0, sb = 0;
        const double f = median(&fwd[0][a][0], (size_t)ARMS * REPEATS, &sf);
        const double b = median(&both[0][a][0], (size_t)ARMS * REPEATS, &sb);
        const double h = median(&host[0][a][0], (size_t)ARMS * REPEATS, NULL);
        if (arms[a].overlap == EPO_OFF)
            base = a;
        const double f0 = median(&fwd[0][base][0], (size_t)ARMS * REPEATS, NULL);
        const double b0 = median(&both[0][base][0], (size_t)ARMS * REPEATS, NULL);
        const double wire =
            rate > 0 ? 1e-6 * (double)(bytes_out[a][0] + bytes_out[a][1]) / rate : 0;
        const double floor_f = ffn > wire ? ffn : wire, floor_b = ffn2 > 2 * wire ? ffn2 : 2 * wire;
        printf("%-22s %8.3f %7.3f %8.3f %7.3f %6.2f %6.2f %6.2f %6.2f %8.0f %7.2f\n", arms[a].name,
               f, sf, b, sb, (f0 - f) / (f0 - floor_f), (b0 - b) / (b0 - floor_b), f0 / f, b0 / b,
               h, (double)plan_ms[0][a]);
        printf(
            "json\t{\"arm\":\"%s\",\"tokens\":%d,\"forward_ms\":%.4f,\"forward_backward_ms\":%.4f,"
            "\"efficiency_forward\":%.3f,\"efficiency_both\":%.3f,\"ffn_ms\":%.4f,"
            "\"ffn_both_ms\":%.4f,\"dispatch_bytes\":%llu,\"combine_bytes\":%llu,\"host_us\":%.0f,"
            "\"plan_ms\":%.3f,\"peer_gbs\":%.1f}\n",
            arms[a].name, sh.tokens, f, b, (f0 - f) / (f0 - floor_f), (b0 - b) / (b0 - floor_b),
            ffn, ffn2, (unsigned long long)bytes_out[a][0], (unsigned long long)bytes_out[a][1], h,
            (double)plan_ms[0][a], rate);
    }
}

int main(int argc, char **argv) {
    int *fields[] = {&sh.ranks,   &sh.tokens, &sh.hidden, &sh.ffn,
                     &sh.experts, &sh.top_k,  &sh.repeats};
    int devices = 0, number[RANKS];
    pthread_t thread[RANKS];
    sh.repeats = 9;
    if (argc < 7) {
        fprintf(stderr, "usage: bench RANKS TOKENS HIDDEN FFN EXPERTS TOP_K [REPEATS]\n");
        return 2;
    }
    for (int i = 1; i < argc && i <= 7; i++)
        *fields[i - 1] = (int)strtol(argv[i], NULL, 10);
    TEST_CUDA(cudaGetDeviceCount(&devices));
    if (sh.ranks < 1 || sh.ranks > RANKS || sh.ranks > devices || sh.repeats > REPEATS ||
        sh.experts % sh.ranks != 0 || sh.experts / sh.ranks > 1024) {
        fprintf(stderr, "bench: %d ranks need as many GPUs (%d here), at most %d repeats\n",
                sh.ranks, devices, REPEATS);
        return 2;
    }
    engine = epo_engine_entry(EPO_ENGINE_ABI);
    pthread_barrier_init(&together, NULL, (unsigned)sh.ranks);
    for (int a = 0; a < ARMS; a++)
        if (!must(engine->world_create(sh.ranks, &worlds[a]), "world"))
            return 1;
    for (int r = 0; r < sh.ranks; r++) {
        number[r] = r;
        pthread_create(&thread[r], NULL, rank_main, &number[r]);
    }
    for (int r = 0; r < sh.ranks; r++)
        pthread_join(thread[r], NULL);
    report(peer_rate());
    return broken;
}
