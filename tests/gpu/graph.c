/* SPDX-License-Identifier: Apache-2.0
 *
 * graph.c - a layer's plan, forward and backward in a CUDA graph, replayed with other
 * inputs in the same arrays, against the same calls without a graph, bit for bit; what is
 * wrong in a replay, and a peer that does not come; the CPU's time of a replay.
 *
 *   graph threads|processes RANKS [REPLAYS [alltoall|flex|e4m3] [NAME...]]
 *
 * e4m3: flex, with e4m3 on the wire.
 * bits, own (dispatch and combine, a copy between them, and that as a layer's experts), errors,
 * margin (a peer that comes when the limit ends), time, large (of time, 4096 tokens); without a
 * name all but the last.
 */
#include "graph.h"

#include <signal.h>
#include <sys/mman.h>

/* PERIOD: of large arrays' numbers; no dimension divides it. */
enum { PERIOD = 65521 };

/* ---- one rank's objects ---- */

static void *random_weights(const job *j, uint64_t seed, uint64_t n, int fan) {
    const epo_dtype type = j->s.c.type;
    const size_t size = test_size(type);
    const float scale = (float)(1.7 / sqrt((double)fan));
    uint64_t made = n < PERIOD ? n : PERIOD;
    char *host = malloc(made * size), *p = test_device(n * size, 0);
    for (uint64_t i = 0; i < made; i++)
        test_store(host, i, type, test_uniform(seed, i) * scale);
    TEST_CUDA(cudaMemcpy(p, host, made * size, cudaMemcpyHostToDevice));
    for (uint64_t more; made < n; made += more) {
        more = made < n - made ? made : n - made;
        TEST_CUDA(cudaMemcpy(p + made * size, p, more * size, cudaMemcpyDeviceToDevice));
    }
    TEST_CUDA(cudaStreamSynchronize(0));
    free(host);
    return p;
}

static void memory_open(job *j) {
    const ref_case *c = &j->s.c;
    const uint64_t n = test_weights(c), wsize = test_size(c->wgrad_type);
    test_arrays_open(&j->a[0], c);
    j->a[0].w1 = random_weights(j, c->seed + (uint64_t)j->rank, 2 * n, c->hidden);
    j->a[0].w2 = random_weights(j, c->seed + 100 + (uint64_t)j->rank, n, c->ffn);
    j->a[1] = j->a[0];
    j->a[1].dw1 = test_device(2 * n * wsize, 0);
    j->a[1].dw2 = test_device(n * wsize, 0);
    TEST_CUDA(cudaHostAlloc((void **)&j->memory, test_stage_bytes(c), 0));
}

static epo_status objects_open(job *j) {
    const ref_case *c = &j->s.c;
    test_seat seat = {&j->b->table, j->rank, c->ranks};
    epo_bootstrap boot = {sizeof boot, &seat, test_allgather, test_barrier};
    epo_engine_group eg = test_group(j->rank, c->ranks,
                                     j->s.fault == FAULT_LATE     ? 2
                                     : j->s.fault == FAULT_MARGIN ? MARGIN_LIMIT_S
                                                                  : 20);
    eg.config.threads = j->world;
    eg.config.bootstrap = j->world == NULL ? &boot : NULL;
    eg.config.overlap = j->s.overlap;
    eg.config.delay_wgrad = EPO_OFF;
    eg.config.dispatcher = j->s.dispatcher;
    epo_buffer_config bc = test_buffer(c);
    bc.chunks = j->s.chunks;
    epo_status status = j->engine->group_create(&eg, &j->group);
    if (status == EPO_OK)
        status = j->engine->buffer_create(j->group, &bc, &j->plain);
    bc.graphs = 1;
    if (status == EPO_OK)
        status = j->engine->buffer_create(j->group, &bc, &j->graphs);
    for (int i = 0; i < 2 && status == EPO_OK; i++) {
        epo_layer_config lc =
            j->s.copying ? test_copying_layer(c, &j->copying[i]) : test_layer(c, &j->a[i]);
        lc.saved = j->s.copying ? EPO_SAVE_ROWS : j->s.saved;
        status = j->engine->layer_create(j->group, &lc, &j->layer[i]);
    }
    return status;
}

static void all_close(job *j) {
    if (j->exec != NULL)
        cudaGraphExecDestroy(j->exec);
    j->engine->plan_release(j->plan);
    for (int i = 0; i < 2; i++)
        (void)j->engine->layer_destroy(j->layer[i]);
    (void)j->engine->buffer_destroy(j->graphs);
    (void)j->engine->buffer_destroy(j->plain);
    (void)j->engine->group_destroy(j->group);
    cudaFree(j->a[1].dw1);
    cudaFree(j->a[1].dw2);
    test_arrays_close(&j->a[0]);
    cudaFree(j->rows);
    cudaFree(j->made);
    cudaFree(j->row_weights);
    cudaFreeHost(j->memory);
    cudaStreamDestroy(j->stream);
}

/* ---- inputs, calls, results ---- */

/* Other ones for each i; `wrong`: with a fault. */
void graph_inputs_send(const job *j, int i, bool wrong) {
    const ref_case *c = &j->s.c;
    const uint64_t slots = test_slots(c, j->rank);
    const test_stage stage = test_stage_at(c, j->rank, j->memory);
    test_stage_fill(c, j->rank, i, &stage);
    if (wrong && j->s.fault == FAULT_INDEX && j->rank == 0)
        stage.experts[slots / 2] = c->experts + 3;
    for (uint64_t k = 0; wrong && j->s.fault == FAULT_OVERFLOW && j->rank == 0 && k < slots; k++)
        stage.experts[k] = 1;
    test_stage_send(c, j->rank, &stage, &j->a[0], j->stream);
    test_outputs_poison(c, j->rank, 0x5a, &j->a[0], j->stream);
    TEST_CUDA(cudaStreamSynchronize(j->stream));
}

/* The plan's rows to this rank and back, as they are. */
static epo_status own_calls(job *j, epo_plan *plan) {
    uint64_t rows = 0;
    epo_status status = j->engine->plan_rows(plan, &rows);
    if (status == EPO_OK && j->rows == NULL) { /* the first time is not captured */
        j->row_bytes = rows * (uint64_t)j->s.c.hidden * test_size(j->s.c.type);
        j->rows = test_device(j->row_bytes, 0xff);
        j->made = test_device(j->row_bytes, 0xff);
        j->row_weights = test_device(rows * sizeof *j->row_weights, 0xff);
    }
    if (status == EPO_OK)
        status = j->engine->dispatch(plan, j->a[0].x, j->rows, j->row_weights, j->stream);
    TEST_CUDA(cudaMemcpyAsync(j->made, j->rows, j->row_bytes, cudaMemcpyDeviceToDevice, j->stream));
    if (status == EPO_OK)
        status = j->engine->combine(plan, j->made, j->a[0].y, j->row_weights, j->a[0].dweights,
                                    j->stream);
    return status;
}

epo_status graph_calls(job *j, epo_buffer *buffer, epo_layer *layer, epo_plan **plan) {
    const epo_routing r = test_routing(&j->s.c, j->rank, j->a[0].experts, j->a[0].weights);
    if (!j->s.own)
        return test_pass(j->engine, buffer, layer, &r, &j->a[0], j->stream, plan);
    epo_status status = j->engine->plan_create(buffer, &r, j->stream, plan);
    return status == EPO_OK ? own_calls(j, *plan) : status;
}

static void hash_all(const job *j, int way, uint64_t hash[TEST_OUTPUTS]) {
    test_output out[TEST_OUTPUTS];
    test_outputs(&j->s.c, j->rank, &j->a[way], NULL, out);
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    for (int i = 0; i < TEST_OUTPUTS;
         i++) /* timed: large ones, of layers whose bits are seen elsewhere */
        hash[i] = j->s.timed && i > 2 ? 0
                                      : test_hash_device(TEST_HASH, out[i].device,
                                                         out[i].count * test_size(out[i].type));
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* ---- capture, replay, compare ---- */

static epo_status capture(job *j) {
    cudaGraph_t graph = NULL;
    /* Once without, as programs do: what is made at first use is made then. */
    epo_plan *plan = NULL;
    graph_inputs_send(j, 0, false);
    epo_status status = graph_calls(j, j->graphs, j->layer[1], &plan);
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    j->engine->plan_release(plan);
    if (status != EPO_OK)
        return status;
    TEST_CUDA(cudaStreamBeginCapture(j->stream, j->world != NULL ? cudaStreamCaptureModeThreadLocal
                                                                 : cudaStreamCaptureModeGlobal));
    status = graph_calls(j, j->graphs, j->layer[1], &j->plan);
    cudaError_t e = cudaStreamEndCapture(j->stream, &graph);
    if (status == EPO_OK && e != cudaSuccess) {
        fprintf(stderr, "rank %d: cudaStreamEndCapture: %s\n", j->rank, cudaGetErrorString(e));
        return EPO_E_SYSTEM;
    }
    if (status == EPO_OK)
        TEST_CUDA(cudaGraphInstantiate(&j->exec, graph, 0));
    if (graph != NULL)
        cudaGraphDestroy(graph);
    /* A thread that allocates may wait for the others' GPUs. */
    return status == EPO_OK ? j->engine->group_barrier(j->group) : status;
}

/* After the warm-up's gradients both start from zero. */
static void clear_gradients(job *j) {
    const ref_case *c = &j->s.c;
    const uint64_t n = test_weights(c), wsize = test_size(c->wgrad_type);
    for (int i = 0; i < 2; i++) {
        TEST_CUDA(cudaMemsetAsync(j->a[i].dw1, 0, 2 * n * wsize, j->stream));
        TEST_CUDA(cudaMemsetAsync(j->a[i].dw2, 0, n * wsize, j->stream));
    }
    TEST_CUDA(cudaStreamSynchronize(j->stream));
}

static epo_status compare(job *j) {
    epo_status status = EPO_OK;
    for (int i = 0; i < j->s.replays && status == EPO_OK; i++) {
        uint64_t want[TEST_OUTPUTS], got[TEST_OUTPUTS];
        epo_plan *plan = NULL;
        bool differs = false;
        graph_inputs_send(j, i, false);
        status = graph_calls(j, j->plain, j->layer[0], &plan);
        j->engine->plan_release(plan);
        hash_all(j, 0, want);
        graph_inputs_send(j, i, false);
        TEST_CUDA(cudaGraphLaunch(j->exec, j->stream));
        if (i % 10 == 3) { /* and a call without between two replays, on the graph's buffer */
            hash_all(j, 1, got);
            plan = NULL;
            if (status == EPO_OK)
                status = graph_calls(j, j->graphs, j->layer[0], &plan);
            j->engine->plan_release(plan);
            TEST_CUDA(cudaStreamSynchronize(j->stream));
            if (memcmp(got, want, sizeof got) != 0)
                differs = true;
            for (int a = 0; a < TEST_OUTPUTS; a++)
                j->b->rank[j->rank].where[a] += got[a] != want[a];
            if (test_hash_device(TEST_HASH, j->a[0].y, test_rows_bytes(&j->s.c, j->rank)) !=
                want[0])
                differs = true;
            TEST_CUDA(cudaGraphLaunch(j->exec, j->stream)); /* both added the same twice */
            TEST_CUDA(cudaStreamSynchronize(j->stream));
            j->b->rank[j->rank].differ += differs;
            continue;
        }
        hash_all(j, 1, got);
        for (int a = 0; a < TEST_OUTPUTS; a++) {
            j->b->rank[j->rank].where[a] += got[a] != want[a];
            differs = differs || got[a] != want[a];
        }
        j->b->rank[j->rank].differ += differs;
        if (status == EPO_OK)
            status = j->engine->group_async_error(j->group);
    }
    return status;
}

/* The replay that goes wrong, and what is told of it. */
static epo_status run_fault(job *j) {
    graph_inputs_send(j, 1, true);
    if (j->s.fault != FAULT_LATE || j->rank == 0)
        TEST_CUDA(cudaGraphLaunch(j->exec, j->stream));
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    epo_status status = EPO_OK;
    for (int i = 0; i < 5000 && status == EPO_OK; i++) { /* 5 s */
        status = j->engine->group_async_error(j->group);
        usleep(1000);
    }
    const uint64_t bytes = test_rows_bytes(&j->s.c, j->rank), n = bytes / test_size(j->s.c.type);
    char *host = malloc(bytes + 1);
    uint64_t nan = 0;
    TEST_CUDA(cudaMemcpy(host, j->a[0].y, bytes, cudaMemcpyDeviceToHost));
    for (uint64_t i = 0; i < n; i++)
        nan += isnan(test_load(host, i, j->s.c.type)) ? 1 : 0;
    free(host);
    j->b->rank[j->rank].nan = n > 0 ? (float)nan / (float)n : 1;
    return status;
}

static void run_timed(job *j) {
    enum { ROUNDS = 9, CALLS = 8 };
    double cpu[2][ROUNDS], all[2][ROUNDS];
    graph_inputs_send(j, 0, false);
    for (int i = 0; i < 2 * ROUNDS; i++) {
        const int way = i % 2;
        epo_plan *plan[CALLS] = {NULL};
        if (j->world != NULL)
            (void)j->engine->group_barrier(j->group);
        TEST_CUDA(cudaStreamSynchronize(j->stream));
        const double start = test_now();
        for (int k = 0; k < CALLS; k++)
            if (way == 0)
                (void)graph_calls(j, j->plain, j->layer[0], &plan[k]);
            else
                TEST_CUDA(cudaGraphLaunch(j->exec, j->stream));
        cpu[way][i / 2] = (test_now() - start) * 1e6 / CALLS;
        TEST_CUDA(cudaStreamSynchronize(j->stream));
        all[way][i / 2] = (test_now() - start) * 1e3 / CALLS;
        for (int k = 0; k < CALLS; k++)
            j->engine->plan_release(plan[k]);
    }
    for (int way = 0; way < 2; way++) {
        qsort(cpu[way], ROUNDS, sizeof(double), by_size);
        qsort(all[way], ROUNDS, sizeof(double), by_size);
    }
    j->b->rank[j->rank].eager_us = cpu[0][ROUNDS / 2];
    j->b->rank[j->rank].launch_us = cpu[1][ROUNDS / 2];
    j->b->rank[j->rank].eager_ms = all[0][ROUNDS / 2];
    j->b->rank[j->rank].replay_ms = all[1][ROUNDS / 2];
}

static void *rank_main(void *ctx) {
    job *j = ctx;
    epo_stats stats = {.size = sizeof stats};
    TEST_CUDA(cudaSetDevice(j->rank % j->devices));
    TEST_CUDA(cudaStreamCreateWithFlags(&j->stream, cudaStreamNonBlocking));
    memory_open(j);
    epo_status status = objects_open(j);
    if (status == EPO_OK)
        status = capture(j);
    clear_gradients(j);
    if (status == EPO_OK)
        status = compare(j);
    if (status == EPO_OK && j->s.timed)
        run_timed(j);
    if (status == EPO_OK)
        (void)j->engine->group_stats(j->group, &stats, 0);
    j->b->rank[j->rank].dropped[0] = stats.dropped_slots;
    if (status == EPO_OK && j->s.fault != FAULT_NONE)
        status = j->s.fault == FAULT_MARGIN ? graph_margin_run(j) : run_fault(j);
    j->b->rank[j->rank].status = (int)status;
    if (status != EPO_OK)
        snprintf(j->b->rank[j->rank].text, sizeof j->b->rank[j->rank].text, "%s",
                 j->engine->error());
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    all_close(j);
    return NULL;
}

/* ---- all ranks of one case ---- */

static bool run_threads(job *j) {
    job each[REF_RANKS];
    if (j->engine->world_create(j->s.c.ranks, &j->world) != EPO_OK)
        return false;
    for (int r = 0; r < j->s.c.ranks; r++) {
        each[r] = *j;
        each[r].rank = r;
    }
    test_threads(j->s.c.ranks, rank_main, each, sizeof *each);
    j->engine->world_destroy(j->world);
    j->world = NULL;
    return true;
}

/* Ranks that are processes live through all cases, as a CUDA context takes up to two seconds; one
 * that ended, and with it the others, is made again. */
typedef struct crew {
    setup s; /* of the case under way */
    _Atomic int turn, through[REF_RANKS];
} crew;
static crew *all_hands; /* shared; NULL: there are none */
static pid_t hand[REF_RANKS];
enum { CREW_LEAVES = -1 };

static void hand_main(const job *j, int rank) {
    for (int done = 0;; done++) {
        while (atomic_load(&all_hands->turn) == done)
            usleep(500);
        if (atomic_load(&all_hands->turn) == CREW_LEAVES)
            _exit(0);
        job mine = *j;
        mine.s = all_hands->s;
        mine.rank = rank;
        rank_main(&mine);
        atomic_store(&all_hands->through[rank], done + 1);
    }
}

static bool crew_make(const job *j) {
    if (all_hands == NULL)
        all_hands = mmap(NULL, sizeof *all_hands, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (all_hands == MAP_FAILED) {
        all_hands = NULL;
        return false;
    }
    memset(all_hands, 0, sizeof *all_hands);
    for (int r = 0; r < j->s.c.ranks; r++)
        if ((hand[r] = fork()) == 0)
            hand_main(j, r);
    return true;
}

/* False: one of them had not ended well. */
static bool crew_end(int ranks, bool kill_them) {
    bool ok = true;
    if (all_hands == NULL)
        return true;
    atomic_store(&all_hands->turn, CREW_LEAVES);
    for (int r = 0; r < ranks; r++) {
        int status = 0;
        if (hand[r] > 0 && kill_them)
            (void)kill(hand[r], SIGKILL);
        ok = hand[r] > 0 && waitpid(hand[r], &status, 0) >= 0 && status == 0 && ok;
        hand[r] = 0;
    }
    return ok;
}

static bool run_processes(const job *j) {
    const int ranks = j->s.c.ranks;
    if (hand[0] <= 0 && !crew_make(j))
        return false;
    const int turn = atomic_load(&all_hands->turn) + 1;
    int through = 0;
    all_hands->s = j->s;
    atomic_store(&all_hands->turn, turn);
    while (through < ranks) {
        siginfo_t gone = {.si_pid = 0};
        usleep(500);
        through = 0;
        for (int r = 0; r < ranks; r++)
            through += atomic_load(&all_hands->through[r]) == turn;
        if (through < ranks &&
            (waitid(P_ALL, 0, &gone, WEXITED | WNOHANG | WNOWAIT) != 0 || gone.si_pid != 0)) {
            (void)crew_end(ranks, true);
            return false;
        }
    }
    return true;
}

/* Every rank fails, the first with the fault's own error, and its y is NaN. */
static bool judge_fault(const job *j, char *text, size_t size) {
    static const int want[] = {0, EPO_E_INDEX, EPO_E_OVERFLOW, EPO_E_TIMEOUT};
    static const char *const words[] = {"", "allowed -1..", "its capacity is",
                                        "nothing from rank 1"};
    bool ok = true;
    snprintf(text, size, "%s", j->b->rank[0].text);
    ok = j->b->rank[0].status == want[j->s.fault] &&
         strstr(j->b->rank[0].text, words[j->s.fault]) != NULL && j->b->rank[0].nan == 1;
    for (int r = 1; r < j->s.c.ranks; r++)
        ok = ok && j->b->rank[r].status != EPO_OK;
    return ok;
}

static bool judge_bits(const job *j, char *text, size_t size) {
    bool ok = true;
    size_t used = (size_t)snprintf(text, size, "%d replays", j->s.replays);
    for (int r = 0; r < j->s.c.ranks; r++) {
        if (j->b->rank[r].status != EPO_OK) {
            snprintf(text, size, "%s", j->b->rank[r].text);
            return false;
        }
        const int *w = j->b->rank[r].where;
        if (j->b->rank[r].differ > 0 && used < size)
            used += (size_t)snprintf(
                text + used, size - used,
                "; rank %d: %d differ in bits (y %d dx %d dweights %d dw1 %d dw2 %d)", r,
                j->b->rank[r].differ, w[0], w[1], w[2], w[3], w[4]);
        ok = ok && j->b->rank[r].differ == 0;
    }
    if (used < size && j->s.timed)
        used +=
            (size_t)snprintf(text + used, size - used,
                             "; CPU %.1f us a replay, %.0f without graph; %.3f ms, %.3f without",
                             j->b->rank[0].launch_us, j->b->rank[0].eager_us,
                             j->b->rank[0].replay_ms, j->b->rank[0].eager_ms);
    if (used < size)
        snprintf(text + used, size - used, ", %llu slots dropped",
                 (unsigned long long)j->b->rank[0].dropped[0]);
    return ok;
}

static void run_case(job *j, bool threads, const char *what) {
    char name[224], text[640] = "";
    const ref_case *c = &j->s.c;
    memset(j->b, 0, sizeof *j->b);
    for (int r = 0; r < c->ranks; r++) /* a rank that ends early must not look well */
        j->b->rank[r].status = EPO_E_SYSTEM;
    const bool ran = threads ? run_threads(j) : run_processes(j);
    const bool ok = (j->s.fault == FAULT_MARGIN ? graph_margin_judge(j, text, sizeof text)
                     : j->s.fault != FAULT_NONE ? judge_fault(j, text, sizeof text)
                                                : judge_bits(j, text, sizeof text)) &&
                    ran;
    snprintf(name, sizeof name,
             "graph %s %s %s x%d %s %s, %d chunks, T%d E%d H%d F%d K%d capacity %d", what,
             c->wire != EPO_WIRE_ROWS               ? "e4m3"
             : j->s.dispatcher == EPO_DISPATCH_FLEX ? "flex"
                                                    : "alltoall",
             threads ? "threads" : "processes", c->ranks, test_type(c->type),
             j->s.overlap == EPO_ON ? "overlapped" : "serial", j->s.chunks, c->tokens, c->experts,
             c->hidden, c->ffn, c->top_k, c->capacity);
    test_result(name, ok, text);
}

/* Of every setup; named on the command line. */
static epo_dispatcher dispatcher = EPO_DISPATCH_ALLTOALL;
static epo_wire wire = EPO_WIRE_ROWS;

static setup some_setup(int ranks, int i, int replays) {
    static const epo_dtype types[] = {EPO_BF16, EPO_F32, EPO_F16};
    setup s = {.dispatcher = dispatcher,
               .overlap = i % 2 ? EPO_ON : EPO_OFF,
               .chunks = i % 2 ? 1 + i / 2 : 1};
    s.c = (ref_case){.seed = 0x77 + (uint64_t)i,
                     .ranks = ranks,
                     .experts = 8 * ranks,
                     .hidden = 64 + 16 * (i % 3),
                     .ffn = 48,
                     .top_k = 3,
                     .tokens = 90,
                     .type = types[i % 3],
                     .wgrad_type = EPO_F32,
                     .pad = true,
                     .routing = i % 4 == 3   ? REF_HOLES
                                : i % 4 == 2 ? REF_UNEVEN
                                             : REF_RANDOM,
                     .microbatches = 1};
    s.c.wire = wire;
    if (wire != EPO_WIRE_ROWS)
        s.c.hidden = EPO_WIRE_GROUP * (1 + i % 2);
    if (dispatcher == EPO_DISPATCH_FLEX && i % 4 == 2)
        s.saved = EPO_SAVE_TOKENS;
    s.c.capacity = i % 4 == 0 ? 90 : 12;
    s.c.overflow = i % 4 == 0   ? EPO_OVERFLOW_ERROR
                   : i % 4 == 1 ? EPO_OVERFLOW_DROP_POSITION
                                : EPO_OVERFLOW_DROP_WEIGHT;
    s.replays = replays;
    return s;
}

/* A rank without tokens, no capacity at all, 32 experts a token, one column. */
static setup edge_setup(int ranks, int i, int replays) {
    static const struct {
        int hidden, ffn, top_k, tokens, capacity;
        ref_routing routing;
    } edges[] = {{64, 48, 3, 40, 1, REF_EMPTY},
                 {9, 20, 32, 9, 2, REF_RANDOM},
                 {48, 16, 2, 30, 0, REF_RANDOM},
                 {1, 1, 3, 50, 5, REF_ONE}};
    setup s = some_setup(ranks, i, replays);
    if (wire == EPO_WIRE_ROWS)
        s.c.hidden = edges[i].hidden;
    s.c.ffn = edges[i].ffn;
    s.c.top_k = edges[i].top_k;
    s.c.tokens = edges[i].tokens;
    s.c.capacity = edges[i].capacity;
    s.c.overflow = i % 2 ? EPO_OVERFLOW_DROP_WEIGHT : EPO_OVERFLOW_DROP_POSITION;
    s.c.routing = edges[i].routing;
    return s;
}

static void run_bits(job *j, bool threads, int ranks, int replays) {
    for (int i = 0; i < 4; i++) {
        j->s = edge_setup(ranks, i, replays / 4 + 1);
        run_case(j, threads, "bits");
    }
    for (int i = 0; i < 12; i++) {
        j->s = some_setup(ranks, i, i < 4 ? replays : replays / 4 + 1);
        run_case(j, threads, "bits");
    }
}

static void run_own(job *j, bool threads, int ranks, int replays) {
    for (int i = 0; i < 4; i++) {
        j->s = some_setup(ranks, i, replays / 2 + 1);
        j->s.own = true;
        run_case(j, threads, "dispatch and combine");
    }
    for (int i = 0; i < 4; i++) {
        j->s = some_setup(ranks, i, replays / 2 + 1);
        j->s.copying = true;
        run_case(j, threads, "the caller's experts");
    }
}

static void run_errors(job *j, bool threads, int ranks) {
    static const char *const names[] = {"", "bad index", "overflow", "late peer"};
    for (int f = FAULT_INDEX; f <= FAULT_LATE; f++) {
        j->s = some_setup(ranks, f == FAULT_OVERFLOW ? 0 : f, 2);
        if (f == FAULT_OVERFLOW)
            j->s.c.capacity = 60;
        j->s.fault = (fault)f;
        if (f == FAULT_LATE && ranks < 2)
            continue;
        run_case(j, threads, names[f]);
    }
}

/* From before the limit's end until every rank has long been told. */
static void run_margins(job *j, bool threads, int ranks) {
    static const double ms[] = {1, 3, 0, -1, 12};
    for (int i = 0; i < 2 * (int)(sizeof ms / sizeof *ms) && ranks > 1; i++) {
        j->s = some_setup(ranks, i / 2 % 3 == 1 ? 9 : i / 2 % 3 ? 7 : 2, 2);
        j->s.fault = FAULT_MARGIN;
        j->s.margin_s = 1e-3 * ms[i / 2];
        j->s.called = i % 2;
        run_case(j, threads, j->s.called ? "(calls) a peer at the limit" : "a peer at the limit");
    }
}

/* Workload Q, and few tokens, with room for 1.5 times the average. */
static void run_times(job *j, bool threads, int ranks, int sizes) {
    static const int tokens[] = {4096, 64, 512}, chunks[] = {4, 8, 2, 1, 1};
    for (int i = 0; i < 5 * sizes; i++) {
        const int t = tokens[i / 5];
        j->s = some_setup(ranks, i % 5 < 4, 2);
        j->s.c.tokens = t;
        j->s.c.routing = REF_RANDOM;
        j->s.c.type = j->s.c.wgrad_type = EPO_BF16;
        j->s.c.experts = 128;
        j->s.c.hidden = 2048;
        j->s.c.ffn = 768;
        j->s.c.top_k = 8;
        j->s.c.capacity = t * 8 * 3 / 2 / 128;
        j->s.c.overflow = EPO_OVERFLOW_DROP_POSITION;
        j->s.chunks = chunks[i % 5];
        j->s.timed = true;
        run_case(j, threads, "time");
    }
}

static bool asked(int argc, char **argv, const char *name, int first) {
    bool any = argc <= first;
    for (int i = first; i < argc; i++)
        any = any || strcmp(argv[i], name) == 0;
    return any;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr,
                "usage: graph threads|processes RANKS [REPLAYS [alltoall|flex|e4m3] [NAME...]]\n");
        return 2;
    }
    const bool threads = strcmp(argv[1], "threads") == 0;
    const int ranks = (int)strtol(argv[2], NULL, 10);
    const int replays = argc > 3 ? (int)strtol(argv[3], NULL, 10) : 100;
    job j = {.engine = epo_engine_entry(EPO_ENGINE_ABI), .devices = test_devices()};
    if (j.devices == 0 || ranks < 1 || ranks > REF_RANKS || replays < 1) {
        fprintf(stderr, "graph: %d GPUs, %d ranks (1..%d), %d replays\n", j.devices, ranks,
                REF_RANKS, replays);
        return 2;
    }
    if (threads && ranks > j.devices) {
        test_skip("graph threads", "threads that share a GPU are refused: needs a GPU for each");
        return 0;
    }
    j.b = mmap(NULL, sizeof *j.b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (j.b == MAP_FAILED)
        return 2;
    int first = 4;
    if (argc > 4 && strcmp(argv[4], "e4m3") == 0)
        wire = EPO_WIRE_E4M3;
    if (argc > 4 && (wire != EPO_WIRE_ROWS || strcmp(argv[4], "flex") == 0))
        dispatcher = EPO_DISPATCH_FLEX;
    if (argc > 4 && (dispatcher == EPO_DISPATCH_FLEX || strcmp(argv[4], "alltoall") == 0))
        first++;
    if (asked(argc, argv, "bits", first))
        run_bits(&j, threads, ranks, replays);
    if (asked(argc, argv, "own", first))
        run_own(&j, threads, ranks, replays);
    if (asked(argc, argv, "errors", first))
        run_errors(&j, threads, ranks);
    if (asked(argc, argv, "margin", first))
        run_margins(&j, threads, ranks);
    if (asked(argc, argv, "time", first))
        run_times(&j, threads, ranks, 3);
    else if (argc > first && asked(argc, argv, "large", first))
        run_times(&j, threads, ranks, 1);
    return crew_end(ranks, false) ? test_failed : 1;
}
