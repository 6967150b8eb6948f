/* SPDX-License-Identifier: Apache-2.0
 *
 * bench.c - a layer's time, serial and overlapped, with what bounds it.
 *
 *   bench [OPTION...] RANKS TOKENS HIDDEN FFN EXPERTS TOP_K [REPEATS]
 *     -a ARM,...  alltoall:serial, alltoall:auto, flex:4, flex:4d (delayed), flex:4e (rows
 *                 by copy engines), flex:4s (by stores), ...; an arm is compared with the
 *                 serial one before it.  alltoall:8@NAME=VALUE@...: its group is made with
 *                 these in the environment
 *     -w fp32     weight gradients accumulate in fp32 [bf16]
 *     -n CALLS    in a row, of forward and of forward and backward [4]: the flush of what was
 *                 delayed is shared by as many
 *     -l LABEL    in the table and in JSON
 *     -t          prints a timeline of each arm's queues
 *     -f          each backward's weight gradients are fresh ones: written, not added
 *     -c          prints where the CPU time of each arm's calls goes
 *     -s          ranks share GPUs where there are too few: tells one way from another, nothing of
 *                 a link, and the table says so
 *
 * Rank r is a thread on GPU r (-s: modulo their number). All arms are measured in turns in one run,
 * in another order each; figures are medians of the slowest rank, a ratio that of the two in the
 * same turn. Forward: CALLS in a row, so the CPU runs ahead as far as it can. FFN is the experts'
 * GEMMs and activation alone on the same rows; the floor is max(FFN, D + C), D and C the least
 * bytes over the rate of a large peer copy. efficiency = (serial - arm) / (serial - floor).
 */
#include "bench.h"

#include <time.h>
#include <unistd.h>

bench_program bench = {.wgrad_type = EPO_BF16, .label = "Q", .calls = 4};

static const char default_arms[] = "alltoall:serial,alltoall:auto,alltoall:2,alltoall:4,"
                                   "alltoall:8,alltoall:4d,flex:serial,flex:auto,flex:2,flex:4d";

double bench_now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

bool bench_must(epo_status status, const char *what) {
    if (status == EPO_OK)
        return true;
    fprintf(stderr, "bench: %s: %s\n", what, bench.engine->error());
    bench.broken = 1;
    return false;
}

/* A million numbers, over and over. */
void *bench_random_bf16(uint64_t n, uint64_t seed, float scale) {
    const uint64_t period = n < 1000003 ? n : 1000003;
    uint16_t *p = malloc(period * 2 + 1);
    for (uint64_t i = 0; i < period; i++)
        test_store(p, i, EPO_BF16, scale * test_uniform(seed, i));
    char *d = test_device(n * 2, 0);
    TEST_CUDA(cudaMemcpy(d, p, period * 2, cudaMemcpyHostToDevice));
    for (uint64_t have = period; have > 0 && have < n; have *= 2)
        TEST_CUDA(cudaMemcpy(d + have * 2, d, (have < n - have ? have : n - have) * 2,
                             cudaMemcpyDeviceToDevice));
    TEST_CUDA(cudaStreamSynchronize(0));
    free(p);
    return d;
}

/* ---- one rank ---- */

/* Every token's experts are distinct. */
static void make_routing(bench_rank *b, uint64_t seed) {
    const uint64_t k = (uint64_t)bench.shape.top_k, slots = (uint64_t)bench.shape.tokens * k;
    int64_t *e = malloc(slots * sizeof *e);
    float *w = malloc(slots * sizeof *w);
    for (uint64_t at = 0; at < slots; at++) {
        bool again = true;
        for (uint64_t i = 0; again; i++) {
            e[at] = (int64_t)(test_random(seed, (at / k * 64 + at % k) * 64 + i) %
                              (uint64_t)bench.shape.experts);
            again = false;
            for (uint64_t j = at / k * k; j < at; j++)
                again = again || e[j] == e[at];
        }
        w[at] = 0.125F;
    }
    b->experts = test_upload(e, slots * sizeof *e);
    b->weights = test_upload(w, slots * sizeof *w);
    free(w);
    free(e);
}

static void rank_memory(bench_rank *b) {
    const bench_shape *s = &bench.shape;
    const uint64_t local = (uint64_t)(s->experts / s->ranks), h = (uint64_t)s->hidden;
    const uint64_t n = (uint64_t)s->ffn * h, rows = (uint64_t)s->tokens * h;
    const uint64_t seed = 77 + (uint64_t)b->rank, wsize = test_size(bench.wgrad_type);
    b->w1 = bench_random_bf16(2 * local * n, seed, 0.03F);
    b->w2 = bench_random_bf16(local * n, seed + 100, 0.03F);
    b->dw1 = test_device(2 * local * n * wsize, 0);
    b->dw2 = test_device(local * n * wsize, 0);
    b->x = bench_random_bf16(rows, seed + 200, 1.0F);
    b->dy = bench_random_bf16(rows, seed + 300, 1.0F);
    b->y = test_device(rows * 2, 0xff);
    b->dx = test_device(rows * 2, 0xff);
    b->dweights = test_device((uint64_t)s->tokens * (uint64_t)s->top_k * 4, 0xff);
    make_routing(b, seed + 400);
}

static void rank_free(bench_rank *b) {
    void *all[] = {b->w1, b->w2, b->dw1,     b->dw2,      b->x,      b->dy,
                   b->y,  b->dx, b->weights, b->dweights, b->experts};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        cudaFree(all[i]);
}

/* The arm's own variables. */
static void arm_env(const bench_arm *arm, bool set) {
    char words[sizeof arm->env];
    snprintf(words, sizeof words, "%s", arm->env);
    for (char *at = words, *word; (word = strsep(&at, "@")) != NULL;) {
        char *value = strchr(word, '=');
        if (value == NULL)
            continue;
        *value++ = '\0';
        if (set)
            setenv(word, value, 1);
        else
            unsetenv(word);
    }
}

/* The environment's way is read when a group is made. */
static void arm_way(const bench_rank *b, const bench_arm *arm) {
    pthread_barrier_wait(&bench.together);
    if (b->rank == 0 && arm->way != NULL)
        setenv("EP_OVERLAP_CUDA_WAY", arm->way, 1);
    else if (b->rank == 0 && bench.way != NULL)
        setenv("EP_OVERLAP_CUDA_WAY", bench.way, 1);
    else if (b->rank == 0)
        unsetenv("EP_OVERLAP_CUDA_WAY");
    if (b->rank == 0)
        arm_env(arm, true);
    pthread_barrier_wait(&bench.together);
}

static bool arm_open(bench_rank *b, int a) {
    const bench_shape *s = &bench.shape;
    const bench_arm *arm = &bench.arm[a];
    bench_one *o = &b->arm[a];
    epo_engine_group eg = {sizeof eg, EPO_GROUP_CONFIG_INIT, "bench"};
    eg.config.engine = EPO_ENGINE_CUDA;
    eg.config.rank = b->rank;
    eg.config.ranks = s->ranks;
    eg.config.threads = bench.worlds[a];
    eg.config.overlap = arm->overlap;
    eg.config.delay_wgrad = arm->delay;
    eg.config.dispatcher = arm->dispatcher;
    eg.config.chunks = arm->chunks;
    eg.config.timeout_s = 20;
    eg.config.wgrad_limit_bytes = UINT64_C(8) << 30;
    epo_buffer_config bc = EPO_BUFFER_CONFIG_INIT;
    bc.experts = s->experts;
    bc.hidden = s->hidden;
    bc.top_k = s->top_k;
    bc.max_tokens = s->tokens;
    bc.type = EPO_BF16;
    epo_layer_config lc = EPO_LAYER_CONFIG_INIT;
    lc.experts = s->experts;
    lc.hidden = s->hidden;
    lc.ffn = s->ffn;
    lc.type = EPO_BF16;
    lc.wgrad_type = bench.wgrad_type;
    lc.w1 = b->w1;
    lc.w2 = b->w2;
    lc.dw1 = b->dw1;
    lc.dw2 = b->dw2;
    arm_way(b, arm);
    if (!bench_must(bench.engine->group_create(&eg, &o->group), "group") ||
        !bench_must(bench.engine->buffer_create(o->group, &bc, &o->buffer), "buffer") ||
        !bench_must(bench.engine->layer_create(o->group, &lc, &o->layer), "layer"))
        return false;
    pthread_barrier_wait(&bench.together);
    if (b->rank == 0)
        arm_env(arm, false);
    epo_group_info info = {.size = sizeof info};
    if (b->rank == 0 && a == 0 && bench.engine->group_query(o->group, &info) == EPO_OK)
        snprintf(bench.versions, sizeof bench.versions, "%s", info.versions);
    return true;
}

/* A new plan of the same routing; what it took. */
static bool arm_plan(bench_rank *b, int a, int rep) {
    bench_one *o = &b->arm[a];
    epo_routing r = EPO_ROUTING_INIT;
    r.tokens = bench.shape.tokens;
    r.top_k = bench.shape.top_k;
    r.experts = b->experts;
    r.weights = b->weights;
    bench.engine->plan_release(o->plan);
    o->plan = NULL;
    pthread_barrier_wait(&bench.together);
    const double t = bench_now_us();
    if (!bench_must(bench.engine->plan_create(o->buffer, &r, b->stream, &o->plan), "plan"))
        return false;
    if (rep >= 0)
        bench.plan[a][b->rank][rep] = (float)(1e-3 * (bench_now_us() - t));
    return true;
}

static bool backward_issue(bench_rank *b, bench_one *o, epo_saved *saved) {
    if (bench.fresh && !bench_must(bench.engine->layer_wgrad_begin(o->layer), "wgrad_begin"))
        return false;
    return bench_must(bench.engine->backward(o->layer, saved, b->dy, b->dx, b->dweights, b->stream),
                      "backward");
}

/* Calls of forward, or of forward and backward with the flush of what was
 * delayed, so that a delayed gradient is paid for. */
static bool arm_run(bench_rank *b, int a, int rep, bool backward) {
    bench_one *o = &b->arm[a];
    double cpu[2] = {0, 0};
    float ms = 0;
    TEST_CUDA(cudaStreamSynchronize(b->stream));
    pthread_barrier_wait(&bench.together);
    TEST_CUDA(cudaEventRecord(b->start, b->stream));
    for (int i = 0; i < bench.calls; i++) {
        epo_saved *saved = NULL;
        const double t = bench_now_us();
        if (!bench_must(bench.engine->forward(o->layer, o->plan, b->x, b->y, &saved, b->stream),
                        "forward"))
            return false;
        const double middle = bench_now_us();
        if (!backward)
            bench.engine->saved_release(saved);
        else if (!backward_issue(b, o, saved))
            return false;
        cpu[0] += middle - t;
        cpu[1] += bench_now_us() - middle;
    }
    if (backward && !bench_must(bench.engine->group_wgrad_flush(o->group, b->stream), "flush"))
        return false;
    TEST_CUDA(cudaEventRecord(b->end, b->stream));
    TEST_CUDA(cudaStreamSynchronize(b->stream));
    if (rep < 0)
        return true;
    TEST_CUDA(cudaEventElapsedTime(&ms, b->start, b->end));
    (backward ? bench.both : bench.forward)[a][b->rank][rep] = ms / (float)bench.calls;
    if (backward)
        bench.cpu_backward[a][b->rank][rep] = (float)(cpu[1] / (float)bench.calls);
    else
        bench.cpu_forward[a][b->rank][rep] = (float)(cpu[0] / (float)bench.calls);
    return true;
}

static bool pass_pair(bench_rank *b, int a) {
    bench_one *o = &b->arm[a];
    epo_saved *saved = NULL;
    return bench_must(bench.engine->forward(o->layer, o->plan, b->x, b->y, &saved, b->stream),
                      "forward") &&
           backward_issue(b, o, saved) &&
           bench_must(bench.engine->group_wgrad_flush(o->group, b->stream), "flush");
}

/* What the queues do in one forward and backward, and in how many chunks. */
static bool arm_record(bench_rank *b, int a) {
    const epo_interval *list = NULL;
    epo_plan_info info = {.size = sizeof info};
    uint64_t count = 0, dropped = 0;
    if (!bench_must(bench.engine->plan_query(b->arm[a].plan, &info), "plan"))
        return false;
    bench.chosen[a] = info.chunks;
    if (!bench_must(bench.engine->record_start(b->arm[a].group, 4096), "record"))
        return false;
    pthread_barrier_wait(&bench.together);
    if (!pass_pair(b, a))
        return false;
    TEST_CUDA(cudaStreamSynchronize(b->stream));
    if (!bench_must(bench.engine->record_stop(b->arm[a].group, &list, &count, &dropped), "record"))
        return false;
    for (uint64_t i = 0; i < count && b->rank == 0; i++) {
        if (bench.timeline)
            printf("time\t%s\t%s\t%d\t%.1f\t%.1f\n", bench.arm[a].name, list[i].name, list[i].chunk,
                   1e-3 * (double)(list[i].start_ns - list[0].start_ns),
                   1e-3 * (double)(list[i].end_ns - list[0].start_ns));
    }
    return true;
}

/* Where the CPU time goes, the GPU being slow enough not to matter. */
static bool arm_cpu(bench_rank *b, int a) {
    const int calls = 10;
    bench_one *o = &b->arm[a];
    pthread_barrier_wait(&bench.together);
    bench_cpu_start();
    for (int i = 0; i < calls; i++) {
        epo_saved *saved = NULL;
        if (!bench_must(bench.engine->forward(o->layer, o->plan, b->x, b->y, &saved, b->stream),
                        "forward"))
            return false;
        bench.engine->saved_release(saved);
    }
    if (b->rank == 0)
        bench_cpu_print(bench.arm[a].name, "forward", calls);
    TEST_CUDA(cudaStreamSynchronize(b->stream));
    return true;
}

static void arm_close(bench_rank *b, int a) {
    bench_one *o = &b->arm[a];
    epo_stats s = {.size = sizeof s};
    if (b->rank == 0 && bench.engine->group_stats(o->group, &s, 0) == EPO_OK &&
        s.forward_calls > 0) {
        const uint64_t passes = s.forward_calls + s.backward_calls;
        bench.bytes_out[a][0] = s.dispatch_bytes / passes;
        bench.bytes_out[a][1] = s.combine_bytes / passes;
    }
    bench_must(bench.engine->group_wgrad_flush(o->group, b->stream), "flush");
    bench.engine->plan_release(o->plan);
    bench_must(bench.engine->layer_destroy(o->layer), "layer");
    bench_must(bench.engine->buffer_destroy(o->buffer), "buffer");
    bench_must(bench.engine->group_destroy(o->group), "group");
}

/* Where the engine chooses by measuring, its first plans are the measurement: until it gives the
 * same answer again and again. */
static bool arm_settle(bench_rank *b, int a) {
    enum { SAME = 6, MOST = 150 };
    bench_one *o = &b->arm[a];
    /* No plan tells how flex's rows go home. */
    const bool untold = bench.arm[a].dispatcher == EPO_DISPATCH_FLEX && bench.arm[a].chunks <= 1;
    const int least = untold ? 110 : 0;
    epo_plan_info info = {.size = sizeof info};
    bool ok = arm_plan(b, a, -1);
    int answer = 0;
    for (int i = 0, same = 0;
         ok && bench.arm[a].overlap == EPO_ON && (i < least || same < SAME) && i < MOST; i++) {
        ok = pass_pair(b, a) && arm_plan(b, a, -1) &&
             bench_must(bench.engine->plan_query(o->plan, &info), "plan");
        same = answer == 2 * info.chunks + info.engines ? same + 1 : 0;
        answer = 2 * info.chunks + info.engines;
    }
    return ok;
}

/* Another order each turn, the same on all ranks: an arm behind one that warms the chip is up to
 * 5 % slower than behind one that does not. */
static void arms_shuffle(int rep, int order[BENCH_ARMS]) {
    uint64_t state = (uint64_t)(rep + BENCH_WARM) * UINT64_C(0x9E3779B97F4A7C15) + 1;
    for (int a = 0; a < bench.arms; a++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        const int at = (int)((state >> 33) % (uint64_t)(a + 1));
        order[a] = order[at];
        order[at] = a;
    }
}

static bool rank_measure(bench_rank *b) {
    bench_ffn f;
    bool ok = true;
    memset(&f, 0, sizeof f);
    for (int a = 0; a < bench.arms && ok; a++)
        ok = arm_open(b, a) && arm_settle(b, a);
    ok = ok && bench_ffn_open(b, &f);
    for (int rep = -BENCH_WARM; rep < bench.shape.repeats && ok; rep++) {
        int order[BENCH_ARMS];
        arms_shuffle(rep, order);
        for (int i = 0; i < bench.arms && ok; i++) {
            const int a = order[i];
            ok = (rep > 2 || arm_plan(b, a, rep)) && arm_run(b, a, rep, false) &&
                 arm_run(b, a, rep, true);
        }
        for (int a = 0; a < bench.arms && ok && rep > 2; a++)
            bench.plan[a][b->rank][rep] = bench.plan[a][b->rank][rep % 3];
        if (ok)
            bench_ffn_run(b, &f, rep);
    }
    for (int a = 0; a < bench.arms && ok; a++)
        ok = arm_record(b, a) && (!bench.cpu || arm_cpu(b, a));
    if (ok)
        bench_ffn_close(&f);
    return ok;
}

static void *rank_main(void *ctx) {
    bench_rank b = {.rank = *(int *)ctx};
    TEST_CUDA(cudaSetDevice(b.rank % bench.devices));
    TEST_CUDA(cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking));
    TEST_CUDA(cudaEventCreate(&b.start));
    TEST_CUDA(cudaEventCreate(&b.middle));
    TEST_CUDA(cudaEventCreate(&b.end));
    rank_memory(&b);
    if (!rank_measure(&b))
        exit(1); /* the other ranks wait in a barrier */
    for (int a = 0; a < bench.arms; a++)
        arm_close(&b, a);
    rank_free(&b);
    return NULL;
}

/* ---- arguments ---- */

static bool parse_arm(char *word, bench_arm *arm) {
    const char *what = strchr(word, ':');
    char *end = NULL, *env = strchr(word, '@');
    *arm = (bench_arm){.dispatcher = EPO_DISPATCH_ALLTOALL, .overlap = EPO_ON, .delay = EPO_OFF};
    if (what == NULL || strlen(word) >= sizeof arm->name ||
        (env != NULL && strlen(env) >= sizeof arm->env))
        return false;
    snprintf(arm->name, sizeof arm->name, "%s", word);
    if (env != NULL) {
        *env = '\0';
        snprintf(arm->env, sizeof arm->env, "%s", env + 1);
    }
    if (strncmp(word, "flex:", 5) == 0)
        arm->dispatcher = EPO_DISPATCH_FLEX;
    else if (strncmp(word, "alltoall:", 9) != 0)
        return false;
    what++;
    if (strcmp(what, "serial") == 0) {
        arm->overlap = EPO_OFF;
        arm->chunks = 1;
        return true;
    }
    if (strncmp(what, "auto", 4) == 0) {
        what += 4;
    } else {
        arm->chunks = (int)strtol(what, &end, 10);
        if (end == what || arm->chunks < 1)
            return false;
        what = end;
    }
    for (; *what != '\0'; what++)
        switch (*what) {
        case 'd': arm->delay = EPO_ON; break;
        case 'e': arm->way = "engines"; break;
        case 's': arm->way = "stores"; break;
        default: return false;
        }
    return true;
}

static bool parse_arms(const char *list) {
    char words[2048];
    snprintf(words, sizeof words, "%s", list);
    bench.arms = 0;
    for (char *at = words, *word; (word = strsep(&at, ",")) != NULL; bench.arms++)
        if (bench.arms == BENCH_ARMS || !parse_arm(word, &bench.arm[bench.arms])) {
            fprintf(stderr, "bench: -a: found '%s', allowed at most %d of DISPATCHER:CHUNKS\n",
                    word, BENCH_ARMS);
            return false;
        }
    return true;
}

static bool parse(int argc, char **argv) {
    bench_shape *s = &bench.shape;
    int *fields[] = {&s->ranks,   &s->tokens, &s->hidden, &s->ffn,
                     &s->experts, &s->top_k,  &s->repeats};
    bool share = false;
    s->repeats = 9;
    bool ok = parse_arms(default_arms);
    for (int c; ok && (c = getopt(argc, argv, "a:w:l:n:tcfs")) != -1;)
        switch (c) {
        case 'a': ok = parse_arms(optarg); break;
        case 'w':
            bench.wgrad_type = strcmp(optarg, "fp32") == 0 ? EPO_F32 : EPO_BF16;
            ok = bench.wgrad_type == EPO_F32 || strcmp(optarg, "bf16") == 0;
            break;
        case 'l': bench.label = optarg; break;
        case 'n':
            bench.calls = (int)strtol(optarg, NULL, 10);
            ok = bench.calls >= 1 && bench.calls <= 64;
            break;
        case 't': bench.timeline = true; break;
        case 'c': bench.cpu = true; break;
        case 'f': bench.fresh = true; break;
        case 's': share = true; break;
        default: ok = false;
        }
    if (!ok || argc - optind < 6) {
        fprintf(
            stderr,
            "usage: bench [-a ARM,...] [-w fp32|bf16] [-n CALLS] [-l LABEL] [-t] [-c] [-f] [-s] "
            "RANKS TOKENS HIDDEN FFN EXPERTS TOP_K [REPEATS]\n");
        return false;
    }
    for (int i = optind; i < argc && i - optind < 7; i++)
        *fields[i - optind] = (int)strtol(argv[i], NULL, 10);
    TEST_CUDA(cudaGetDeviceCount(&bench.devices));
    if (s->ranks < 1 || s->ranks > BENCH_RANKS || (s->ranks > bench.devices && !share) ||
        s->repeats < 1 || s->repeats > BENCH_REPEATS || s->experts % s->ranks != 0 ||
        s->experts / s->ranks > 1024) {
        fprintf(stderr,
                "bench: %d ranks need as many GPUs (%d here; -s: they share), repeats are 1..%d\n",
                s->ranks, bench.devices, BENCH_REPEATS);
        return false;
    }
    return true;
}

int main(int argc, char **argv) {
    pthread_t thread[BENCH_RANKS];
    int number[BENCH_RANKS];
    if (!parse(argc, argv))
        return 2;
    bench.engine = epo_engine_entry(EPO_ENGINE_ABI);
    bench.way =
        getenv("EP_OVERLAP_CUDA_WAY") != NULL ? strdup(getenv("EP_OVERLAP_CUDA_WAY")) : NULL;
    pthread_barrier_init(&bench.together, NULL, (unsigned)bench.shape.ranks);
    for (int a = 0; a < bench.arms; a++)
        if (!bench_must(bench.engine->world_create(bench.shape.ranks, &bench.worlds[a]), "world"))
            return 1;
    for (int r = 0; r < bench.shape.ranks; r++) {
        number[r] = r;
        pthread_create(&thread[r], NULL, rank_main, &number[r]);
    }
    for (int r = 0; r < bench.shape.ranks; r++)
        pthread_join(thread[r], NULL);
    bench_report(bench_peer_rate());
    return bench.broken;
}
