/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_flex.c - flex's kernels: right first, then their time beside peer copies.
 *
 *   bench_flex check [SEED [CASES]]  random shapes against maps made on the CPU and sums
 *                             in fp64; 1,000 repeats; a rank that stopped
 *   bench_flex time           workloads D and Q and 128 tokens, two ranks (on one GPU, if
 *                             there is no other: peers' rows then cross no link)
 *   bench_flex time all       the combine with blocks of other shapes, in turns
 *
 * Ranks are threads; rank r uses GPU r, modulo their number. Each figure is the median
 * of 9 runs of a graph of 10 calls, the slowest rank; outputs are poisoned before the
 * checks.
 */
#include "flex_side.h"

enum { CALLS = 10, RUNS = 9 };

static const char *const step_name[STEPS] = {
    [PLAN_PUSH] = "plan+counts+push",      [PUSH] = "push, peers' rows",
    [PUSH_ALL] = "push, all rows",         [PUSH_EXPAND] = "push, expand (meta)",
    [FP8] = "push, expand in e4m3",        [EXPAND] = "expand alone",
    [DISPATCH] = "dispatch (cached)",      [COMBINE] = "combine",
    [FP8_PUSH] = "push in e4m3",           [COPY_STORES] = "peer copy by stores",
    [COPY_ENGINE] = "peer copy by engine", [STORES_ROWS] = "push by stores",
    [COPY_BULK] = "peer copy in bulk",     [SUMS] = "sums for peers",
};

/* ---- times ---- */

static float call_us[RANKS][RUNS];

static int ascending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

static double time_step(side *s, step what) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    float ms;
    static double result;
    prepare(s);
    TEST_CUDA(cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < CALLS; i++) {
        s->f.epoch = what == EXPAND ? 0 : (uint64_t)i + 1;
        issue(s, what);
    }
    TEST_CUDA(cudaStreamEndCapture(s->stream, &graph));
    TEST_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int run = -2; run < RUNS; run++) {
        flags_zero(s);
        TEST_CUDA(cudaEventRecord(s->start, s->stream));
        TEST_CUDA(cudaGraphLaunch(exec, s->stream));
        TEST_CUDA(cudaEventRecord(s->end, s->stream));
        TEST_CUDA(cudaStreamSynchronize(s->stream));
        TEST_CUDA(cudaEventElapsedTime(&ms, s->start, s->end));
        if (run >= 0)
            call_us[s->rank][run] = 1e3F * ms / CALLS;
    }
    TEST_CUDA(cudaGraphExecDestroy(exec));
    TEST_CUDA(cudaGraphDestroy(graph));
    pthread_barrier_wait(&together);
    if (s->rank == 0) {
        float v[RUNS];
        for (int run = 0; run < RUNS; run++) {
            v[run] = 0;
            for (int r = 0; r < s->sh->ranks; r++)
                v[run] = call_us[r][run] > v[run] ? call_us[r][run] : v[run];
        }
        qsort(v, RUNS, sizeof *v, ascending);
        result = (double)v[RUNS / 2];
        if (s->late[0] != 0)
            printf("LATE rank %d phase %u\n", (int)s->late[0] - 1, s->late[1]);
    }
    pthread_barrier_wait(&together);
    return result;
}

static const char *workload;

/* Workload Q on another pair of the same GPUs, whose engines copied 392 GB/s to a peer:
 * DeepEP 1.2.1 dispatch without its count of the layout (53 us), HybridEP (94a9f8f)
 * dispatch + permute with a cached plan, its combine + unpermute; microseconds. */
static const struct rival {
    int sms;
    double deepep, hybrid, hybrid_combine;
} rivals[] = {{16, 376, 425, 224}, {24, 286, 386, 228}};
static const double rival_copy = 392;

enum { BUDGETS = 5 };
static const int budget[BUDGETS] = {8, 16, 24, 32, 64};
static double figure[BUDGETS][STEPS];

static void compare(double engine) {
    const double scale = engine / rival_copy;
    for (int i = 0; i < BUDGETS; i++)
        for (size_t j = 0; j < sizeof rivals / sizeof *rivals; j++)
            if (rivals[j].sms == budget[i])
                printf(
                    "ratio\tQ %d SMs: plan+counts+push %.2f of DeepEP's dispatch; cached dispatch "
                    "%.2f of HybridEP's; combine %.2f of HybridEP's (copies %.3f of theirs)\n",
                    budget[i], figure[i][PLAN_PUSH] * scale / rivals[j].deepep,
                    figure[i][DISPATCH] * scale / rivals[j].hybrid,
                    figure[i][COMBINE] * scale / rivals[j].hybrid_combine, scale);
}

static void time_run(side *s) {
    const shape *sh = s->sh;
    double copy = 0, engine = 0;
    uint64_t remote = 0;
    prepare(s);
    for (int i = 0; i < BUDGETS; i++) {
        s->f.blocks = budget[i];
        for (step what = 0; what < STEPS; what++) {
            const bool peer = what >= COPY_STORES || what <= PUSH_ALL;
            if (sh->ranks == 1 && peer)
                continue;
            if (what == COPY_ENGINE && i > 0)
                continue;
            const double us = time_step(s, what);
            if (s->rank != 0)
                continue;
            figure[i][what] = us;
            printf("%-4s %3d SMs  %-22s %8.1f us", workload, budget[i], step_name[what], us);
            if (what == COPY_BULK)
                printf("  %6.1f GB/s", 1e-3 * COPY / us);
            if (what == COPY_STORES || what == COPY_ENGINE) {
                *(what == COPY_STORES ? &copy : &engine) = 1e-3 * COPY / us;
                printf("  %6.1f GB/s", 1e-3 * COPY / us);
            }
            if (what == PUSH || what == PUSH_ALL || what == STORES_ROWS || what == PLAN_PUSH) {
                int32_t *n = fetch(s->f.rows_of, (uint64_t)sh->ranks * 4);
                remote = 0;
                for (int r = 1; r < sh->ranks; r++)
                    remote += (uint64_t)n[r] * s->f.row_bytes;
                free(n);
                printf("  %6.1f GB/s of peers' rows", 1e-3 * (double)remote / us);
            }
            printf("\n");
            fflush(stdout);
        }
    }
    for (int i = 0; i < BUDGETS && s->rank == 0 && sh->ranks > 1; i++)
        printf("ratio\t%s %d SMs: push alone, peers' rows at %.2f of the copy by stores\n",
               workload, budget[i],
               (double)remote / figure[i][PUSH] / ((double)COPY / figure[i][COPY_STORES]));
    if (s->rank == 0 && devices > 1 && sh->tokens[0] == 4096 && sh->hidden == 2048)
        compare(engine);
    if (s->rank == 0 && sh->ranks > 1)
        printf("%-4s peers' rows %.1f MB, engine copy %.1f GB/s, stores %.1f GB/s\n", workload,
               1e-6 * (double)remote, engine, copy);
}

/* The same with blocks of other shapes, in turns. */
static void cut_run(side *s) {
    for (int round = 0; round < 2; round++)
        for (int b = 16; b <= 24; b += 8) {
            s->f.blocks = b;
            for (int i = 0; i <= 2; i++) {
                s->f.shape = i;
                const double us = time_step(s, COMBINE);
                if (s->rank == 0)
                    printf("%-4s %3d SMs  shape %3d    %-22s %8.1f us\n", workload, b, i,
                           step_name[COMBINE], us);
            }
            s->f.shape = 0;
        }
}

/* ---- programs ---- */

typedef enum program { CASE, REPEAT, LATE, TIME, CUT } program;
static program running;
static int number;
static shape current;

static void *rank_main(void *ctx) {
    const int rank = *(int *)ctx;
    side *s = &sides[rank];
    side_make(s, rank, &current);
    pthread_barrier_wait(&together);
    side_meet(s);
    pthread_barrier_wait(&together);
    switch (running) {
    case CASE: case_run(s, number); break;
    case REPEAT: repeat_run(s); break;
    case LATE: late_run(s); break;
    case TIME: time_run(s); break;
    case CUT: cut_run(s); break;
    }
    side_free(s);
    return NULL;
}

static void run(program what, const shape *sh) {
    pthread_t thread[RANKS];
    int rank[RANKS];
    current = *sh;
    running = what;
    pthread_barrier_init(&together, NULL, (unsigned)sh->ranks);
    for (int r = 0; r < sh->ranks; r++) {
        rank[r] = r;
        pthread_create(&thread[r], NULL, rank_main, &rank[r]);
    }
    for (int r = 0; r < sh->ranks; r++)
        pthread_join(thread[r], NULL);
    pthread_barrier_destroy(&together);
}

static int pick(uint64_t seed, int i, const int *from, int n) {
    return from[test_random(seed, (uint64_t)i) % (uint64_t)n];
}

static shape random_shape(uint64_t seed) {
    static const int hidden[] = {8, 64, 136, 512, 1024, 2048, 5120, 7168},
                     ranks[] = {1, 2, 2, 3, 4};
    static const int top_k[] = {1, 2, 4, 6, 8, 8, 32}, per[] = {1, 2, 4, 16, 33},
                     align[] = {1, 16, 128};
    static const int tokens[] = {0, 1, 31, 128, 500, 1100, 4096}, blocks[] = {1, 2, 8, 16, 24};
    shape s;
    memset(&s, 0, sizeof s);
    s.seed = seed;
    s.ranks = pick(seed, 1, ranks, 5);
    s.hidden = pick(seed, 2, hidden, 8);
    s.experts = s.ranks * pick(seed, 3, per, 5);
    s.top_k = pick(seed, 4, top_k, 7);
    s.align = pick(seed, 5, align, 3);
    s.blocks = pick(seed, 6, blocks, 5);
    s.type = (epo_dtype)(test_random(seed, 7) % 3);
    s.most = 1;
    for (int r = 0; r < s.ranks; r++) {
        s.tokens[r] = pick(seed, 10 + r, tokens, s.hidden > 2048 ? 5 : 7);
        while ((uint64_t)s.tokens[r] * (uint64_t)(s.top_k * s.hidden) > (UINT64_C(1) << 24))
            s.tokens[r] /= 2;
        s.most = s.tokens[r] > s.most ? s.tokens[r] : s.most;
    }
    return s;
}

int main(int argc, char **argv) {
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    TEST_CUDA(cudaGetDeviceCount(&devices));
    const shape q = {2, {4096, 4096}, 4096, 2048, 128, 8, 16, 24, EPO_BF16, 2};
    if (argc > 1 && strcmp(argv[1], "time") == 0) {
        const shape d = {2, {4096, 4096}, 4096, 7168, 256, 8, 16, 24, EPO_BF16, 4};
        shape small = q;
        small.tokens[0] = small.tokens[1] = small.most = 128;
        if (devices < 2)
            printf("skipped: the link (one GPU here): both ranks are on it, so peers' rows stay "
                   "in its memory\n");
        workload = "Q";
        if (argc > 2) {
            run(CUT, &q);
            workload = "D";
            run(CUT, &d);
            workload = "Q128";
            run(CUT, &small);
            return 0;
        }
        run(TIME, &q);
        workload = "Q128";
        run(TIME, &small);
        workload = "D";
        run(TIME, &d);
        return 0;
    }
    if (argc < 2 || strcmp(argv[1], "check") != 0) {
        fprintf(stderr, "usage: bench_flex check [SEED [CASES]] | time [all]\n");
        return 2;
    }
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
    shape small = q, late = q;
    small.ranks = late.ranks = 2;
    small.experts = late.experts = 128;
    small.tokens[0] = small.most = 500;
    small.tokens[1] = 300;
    late.tokens[0] = late.tokens[1] = late.most = 64;
    run(CASE, &q);
    for (int i = 0; i < (argc > 3 ? (int)strtol(argv[3], NULL, 10) : 24); i++) {
        const shape s = random_shape(seed + (uint64_t)i);
        number = i + 1;
        run(CASE, &s);
    }
    run(REPEAT, &small);
    run(LATE, &late);
    return test_failed;
}
