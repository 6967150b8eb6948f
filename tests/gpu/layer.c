/* SPDX-License-Identifier: Apache-2.0
 *
 * layer.c - the whole layer on GPUs: against the fp64 reference, and bit for bit
 * between serial, overlapped and delayed runs.
 *
 *   layer threads|processes RANKS CASES [SEED [ARMS [e4m3] [home] [budgets] [nodes=N] [from=N]]]
 *
 * home: flex, of sizes whose rows can go home one by one.
 * from: the cases before that number are left out, none is another for it.
 * budgets: every arm once more with the GEMMs on 100 and on 32 SMs, all with the same bits.
 * Ranks share the GPUs there are (rank r on GPU r modulo their number; with nodes, whose
 * ranks lie one behind the other, node n on GPU n modulo their number).
 */
#include "fixture.h"
#include "where.h"

#include "backend/backend.h"

#include <sys/mman.h>

typedef struct arm {
    const char *name;
    epo_switch overlap, delay;
    int chunks;
} arm;
static const arm arms[] = {
    {"serial", EPO_OFF, EPO_OFF, 1},    {"n=1", EPO_ON, EPO_OFF, 1},
    {"n=2", EPO_ON, EPO_OFF, 2},        {"n=4", EPO_ON, EPO_OFF, 4},
    {"n=8", EPO_ON, EPO_OFF, 8},        {"delayed n=1", EPO_ON, EPO_ON, 1},
    {"delayed n=2", EPO_ON, EPO_ON, 2}, {"delayed n=4", EPO_ON, EPO_ON, 4},
    {"delayed n=8", EPO_ON, EPO_ON, 8},
};
enum { ARMS = sizeof arms / sizeof *arms, BUDGETS = 3, RUNS = ARMS * BUDGETS };
static const char *const budgets[BUDGETS] = {"", "100", "32"}; /* SMs; "": all */

/* What the ranks share with the program that judges: in a shared mapping. */
typedef struct board {
    test_table table;
    struct {
        int status;
        char text[256];
        _Atomic int step;       /* counts what it has come through: see where.h */
        double error[5];        /* y, dx, dweights, dw1, dw2 */
        uint64_t hash[RUNS][5]; /* by budget, then by arm */
    } rank[REF_RANKS];
} board;

typedef struct job {
    const epo_engine *engine;
    ref_case c;
    epo_dispatcher dispatcher;
    const arm *arm;
    const char *sms; /* NULL: as the environment has it */
    int run, rank, devices, nodes;
    epo_world *world;
    board *b;
    const ref_result *want; /* NULL: only the bits */
} job;

/* ---- one rank ---- */

typedef struct state {
    cudaStream_t stream;
    epo_group *group;
    epo_buffer *buffer;
    epo_layer *layer;
    test_arrays a;
} state;

static void state_free(const job *j, state *s) {
    (void)j->engine->layer_destroy(s->layer);
    (void)j->engine->buffer_destroy(s->buffer);
    (void)j->engine->group_destroy(s->group);
    test_arrays_close(&s->a);
    cudaStreamDestroy(s->stream);
}

static epo_status state_open(job *j, state *s) {
    const ref_case *c = &j->c;
    const char *limit = getenv("LAYER_TIMEOUT_S"); /* tools that make everything slow */
    test_seat seat = {&j->b->table, j->rank, c->ranks};
    epo_bootstrap boot = {sizeof boot, &seat, test_allgather, test_barrier};
    epo_engine_group eg = test_group(j->rank, c->ranks, limit != NULL ? strtod(limit, NULL) : 20);
    eg.config.threads = j->world;
    eg.config.bootstrap = j->world == NULL ? &boot : NULL;
    eg.config.overlap = j->arm->overlap;
    eg.config.delay_wgrad = j->arm->delay;
    eg.config.dispatcher = j->dispatcher;
    eg.config.chunks = j->arm->chunks;
    const epo_buffer_config bc = test_buffer(c);
    const epo_layer_config lc = test_layer(c, &s->a);
    epo_status status = j->engine->group_create(&eg, &s->group);
    if (status == EPO_OK)
        status = j->engine->buffer_create(s->group, &bc, &s->buffer);
    if (status == EPO_OK)
        status = j->engine->layer_create(s->group, &lc, &s->layer);
    return status;
}

static epo_status microbatch(const job *j, state *s, int mb, char *memory) {
    const ref_case *c = &j->c;
    const test_stage stage = test_stage_at(c, j->rank, memory);
    const epo_routing r = test_routing(c, j->rank, s->a.experts, s->a.weights);
    epo_plan *plan = NULL;
    test_stage_fill(c, j->rank, mb, &stage);
    test_stage_send(c, j->rank, &stage, &s->a, s->stream);
    epo_status status = test_pass(j->engine, s->buffer, s->layer, &r, &s->a, s->stream, &plan);
    j->engine->plan_release(plan);
    atomic_fetch_add(&j->b->rank[j->rank].step, 1);
    return status;
}

/* Results of this rank: errors, and a hash of every bit. */
static void judge(const job *j, state *s) {
    test_output out[TEST_OUTPUTS];
    test_outputs(&j->c, j->rank, &s->a, j->want, out);
    for (int i = 0; i < TEST_OUTPUTS; i++) {
        const uint64_t bytes = out[i].count * test_size(out[i].type);
        void *host = malloc(bytes + 1);
        TEST_CUDA(cudaMemcpy(host, out[i].device, bytes, cudaMemcpyDeviceToHost));
        j->b->rank[j->rank].hash[j->run][i] = test_hash(TEST_HASH, host, bytes);
        if (out[i].want != NULL)
            j->b->rank[j->rank].error[i] =
                test_error_of(host, out[i].want, out[i].count, out[i].type, j->want->square[i]);
        free(host);
    }
}

static void *rank_main(void *ctx) {
    job *j = ctx;
    state s;
    memset(&s, 0, sizeof s);
    TEST_CUDA(cudaSetDevice(j->nodes > 1 ? j->rank * j->nodes / j->c.ranks % j->devices
                                         : j->rank % j->devices));
    TEST_CUDA(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking));
    test_arrays_open(&s.a, &j->c);
    s.a.w1 = test_weights_upload(&j->c, j->rank, false);
    s.a.w2 = test_weights_upload(&j->c, j->rank, true);
    /* One pinned stage per micro-batch: copies are read when the GPU gets there. */
    const uint64_t stage_bytes = test_stage_bytes(&j->c);
    char *stage = NULL;
    TEST_CUDA(cudaHostAlloc((void **)&stage, stage_bytes * (uint64_t)j->c.microbatches, 0));
    epo_status status = state_open(j, &s);
    atomic_fetch_add(&j->b->rank[j->rank].step, 1);
    for (int mb = 0; mb < j->c.microbatches && status == EPO_OK; mb++)
        status = microbatch(j, &s, mb, stage + (uint64_t)mb * stage_bytes);
    if (status == EPO_OK)
        status = j->engine->group_wgrad_flush(s.group, s.stream);
    TEST_CUDA(cudaStreamSynchronize(s.stream));
    if (status == EPO_OK) /* what did not come in time is told by the next call */
        status = j->engine->group_wgrad_flush(s.group, s.stream);
    j->b->rank[j->rank].status = (int)status;
    if (status != EPO_OK)
        snprintf(j->b->rank[j->rank].text, sizeof j->b->rank[j->rank].text, "%s",
                 j->engine->error());
    atomic_fetch_add(&j->b->rank[j->rank].step, 1);
    if (status == EPO_OK)
        judge(j, &s);
    state_free(j, &s);
    atomic_fetch_add(&j->b->rank[j->rank].step, 1);
    cudaFreeHost(stage);
    return NULL;
}

/* ---- all ranks of one arm ---- */

/* While no thread makes a group. */
static void budget_set(const job *j) {
    if (j->sms != NULL && j->sms[0] != '\0')
        setenv("EP_OVERLAP_CUDA_SMS", j->sms, 1);
    else if (j->sms != NULL)
        unsetenv("EP_OVERLAP_CUDA_SMS");
}

static bool run_threads(job *j) {
    job each[REF_RANKS];
    if (j->engine->world_create(j->c.ranks, &j->world) != EPO_OK)
        return false;
    budget_set(j);
    for (int r = 0; r < j->c.ranks; r++) {
        each[r] = *j;
        each[r].rank = r;
        each[r].want = j->want != NULL ? &j->want[r] : NULL;
    }
    where_watch watch;
    where_watch_begin(&watch, j->c.ranks, &j->b->rank[0].step, sizeof j->b->rank[0] / sizeof(int));
    test_threads(j->c.ranks, rank_main, each, sizeof *each);
    where_watch_end(&watch);
    j->engine->world_destroy(j->world);
    j->world = NULL;
    return true;
}

/* The caller has not touched CUDA: its children may. */
static bool run_processes(job *j, const job *all, int count) {
    pid_t pid[REF_RANKS];
    for (int r = 0; r < j->c.ranks; r++) {
        pid[r] = fork();
        if (pid[r] == 0) {
            where_begin();
            test_apart(r, j->c.ranks, j->devices);
            for (int i = 0; i < count; i++) {
                job mine = all[i];
                mine.rank = r;
                mine.want = mine.want != NULL ? &all[i].want[r] : NULL;
                budget_set(&mine);
                rank_main(&mine);
                if (j->b->rank[r].status != EPO_OK)
                    _exit(1);
            }
            _exit(0);
        }
    }
    return where_wait(pid, j->c.ranks, &j->b->rank[0].step, sizeof j->b->rank[0] / sizeof(int));
}

/* What an output may be off: see the header for rows in e4m3. */
static double limit_of(const ref_case *c, int output) {
    if (c->wire != EPO_WIRE_ROWS)
        return 0.08;
    return output == 2 || c->wgrad_type == EPO_F32 ? test_limit(c->type) : test_limit(EPO_BF16);
}

static bool judge_case(const job *j, int narms, int count, char *text, size_t size) {
    static const char *const outputs[] = {"y", "dx", "dweights", "dw1", "dw2"};
    double worst[5] = {0};
    char differ[512] = "";
    size_t used = 0;
    bool ok = true;
    for (int r = 0; r < j->c.ranks; r++) {
        if (j->b->rank[r].status != EPO_OK) {
            snprintf(text, size, "%s", j->b->rank[r].text);
            return false;
        }
        for (int i = 0; i < 5; i++) {
            const double limit = limit_of(&j->c, i);
            const double e = j->b->rank[r].error[i];
            ok = ok && e < limit;
            worst[i] = e > worst[i] || e != e ? e : worst[i];
        }
        for (int a = 1; a < count; a++)
            for (int i = 0; i < 5; i++)
                if (j->b->rank[r].hash[a][i] != j->b->rank[r].hash[0][i] &&
                    used + 1 < sizeof differ)
                    used += (size_t)snprintf(differ + used, sizeof differ - used,
                                             "; rank %d, %s%s%s: %s differs in bits", r,
                                             arms[a % narms].name, a < narms ? "" : " on SMs: ",
                                             a < narms ? "" : budgets[a / narms], outputs[i]);
    }
    snprintf(text, size, "y %.1e dx %.1e dweights %.1e dw1 %.1e dw2 %.1e%s", worst[0], worst[1],
             worst[2], worst[3], worst[4], differ);
    return ok && differ[0] == '\0';
}

static void run_case(job *j, bool threads, int narms, int nbudgets) {
    ref_result want[REF_RANKS];
    job all[RUNS];
    const int runs = narms * nbudgets;
    char name[224], limit[64] = "", text[640] = "a rank ended early";
    bool ok = true;
    memset(j->b, 0, sizeof *j->b);
    for (int r = 0; r < j->c.ranks; r++)
        want[r] = ref_make(&j->c, r);
    for (int a = 0; a < runs; a++) {
        all[a] = *j;
        all[a].arm = &arms[a % narms];
        all[a].sms = nbudgets > 1 ? budgets[a / narms] : NULL;
        all[a].run = a;
        all[a].want = a == 0 ? want : NULL;
    }
    if (!threads)
        ok = run_processes(j, all, runs);
    for (int a = 0; a < runs && threads && ok; a++) {
        ok = run_threads(&all[a]);
        for (int r = 0; r < j->c.ranks; r++)
            ok = ok && j->b->rank[r].status == EPO_OK;
    }
    ok = judge_case(j, narms, runs, text, sizeof text) && ok;
    if (j->c.capacity >= 0)
        snprintf(limit, sizeof limit, ", capacity %d%s by %s", j->c.capacity,
                 j->c.pad ? " padded" : "",
                 j->c.overflow == EPO_OVERFLOW_DROP_WEIGHT ? "weight" : "position");
    if (j->nodes > 1)
        snprintf(limit, sizeof limit, ", %d nodes", j->nodes);
    snprintf(name, sizeof name, "layer %s%s %s x%d %s, %s, E%d H%d F%d K%d%s, %d arms%s",
             j->dispatcher == EPO_DISPATCH_FLEX ? "flex" : "alltoall",
             j->c.wire != EPO_WIRE_ROWS ? " e4m3" : "", threads ? "threads" : "processes",
             j->c.ranks, test_type(j->c.type), ref_routing_name[j->c.routing], j->c.experts,
             j->c.hidden, j->c.ffn, j->c.top_k, limit, narms,
             nbudgets > 1 ? " on all, 100 and 32 SMs" : "");
    test_result(name, ok, text);
    for (int r = 0; r < j->c.ranks; r++)
        ref_free(&want[r]);
}

/* Another random small layer each time. */
static ref_case random_case(uint64_t seed, int ranks, int i) {
    static const epo_dtype types[] = {EPO_F32, EPO_BF16, EPO_F16};
    const uint64_t r = test_random(seed, (uint64_t)i);
    ref_case c = {.seed = r, .ranks = ranks, .microbatches = 2, .capacity = -1};
    c.type = types[i % 3];
    c.wgrad_type = i / 3 % 2 ? c.type : EPO_F32;
    c.routing = (ref_routing)(i % REF_ROUTINGS);
    c.experts = ranks * (1 + (int)((r >> 8) % 9));
    c.hidden = i % 4 == 3 ? 20 + (int)((r >> 20) % 30) : 16 * (1 + (int)((r >> 20) % 6));
    c.ffn = i % 4 == 3 ? 10 + (int)((r >> 30) % 30) : 16 * (1 + (int)((r >> 30) % 4));
    c.top_k = 1 + (int)((r >> 40) % (uint64_t)(c.experts < 6 ? c.experts : 6));
    c.tokens = 1 + (int)((r >> 50) % 90);
    if (i % 5 == 1 || i % 5 == 3) { /* from nothing to more than there is */
        c.capacity = (int)((r >> 13) % (uint64_t)(2 * c.tokens * c.top_k / c.experts + 2));
        c.overflow = i % 2 ? EPO_OVERFLOW_DROP_WEIGHT : EPO_OVERFLOW_DROP_POSITION;
        c.pad = (r >> 12) % 2 != 0;
    }
    return c;
}

/* The engine is told that the ranks are on so many nodes. */
static void play_nodes(int ranks, int nodes) {
    char text[8 * REF_RANKS] = "";
    for (int r = 0; nodes > 1 && r < ranks; r++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%d", r > 0 ? "," : "",
                 r * nodes / ranks);
    if (nodes > 1)
        setenv("EP_OVERLAP_NODES", text, 1);
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: layer threads|processes RANKS CASES [SEED [ARMS [e4m3] [home] "
                        "[budgets] [nodes=N] [from=N]]]\n");
        return 2;
    }
    const bool threads = strcmp(argv[1], "threads") == 0;
    const int ranks = (int)strtol(argv[2], NULL, 10), cases = (int)strtol(argv[3], NULL, 10);
    uint64_t seed = argc > 4 ? strtoull(argv[4], NULL, 0) : 0;
    FILE *random = argc > 4 ? NULL : fopen("/dev/urandom", "r");
    if (random != NULL && fread(&seed, sizeof seed, 1, random) != 1)
        seed = 1;
    if (random != NULL)
        fclose(random);
    int most = argc > 5 ? (int)strtol(argv[5], NULL, 10) : ARMS;
    most = most < 1 || most > ARMS ? ARMS : most;
    bool wire = false, home = false;
    int nodes = 1, nbudgets = 1, from = 0;
    for (int i = 6; i < argc; i++) {
        wire = wire || strcmp(argv[i], "e4m3") == 0;
        home = home || strcmp(argv[i], "home") == 0;
        if (strcmp(argv[i], "budgets") == 0)
            nbudgets = BUDGETS;
        if (strncmp(argv[i], "from=", 5) == 0)
            from = (int)strtol(argv[i] + 5, NULL, 10);
        if (strncmp(argv[i], "nodes=", 6) == 0)
            nodes = (int)strtol(argv[i] + 6, NULL, 10);
    }
    play_nodes(ranks, nodes);
    printf("# seed 0x%llx\n", (unsigned long long)seed);
    job j = {.engine = epo_engine_entry(EPO_ENGINE_ABI), .devices = test_devices(), .nodes = nodes};
    if (j.devices == 0 || ranks < 1 || ranks > REF_RANKS) {
        fprintf(stderr, "layer: %d GPUs, %d ranks (1..%d)\n", j.devices, ranks, REF_RANKS);
        return 2;
    }
    j.b = mmap(NULL, sizeof *j.b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (j.b == MAP_FAILED)
        return 2;
    for (int i = from; i < cases; i++) {
        j.c = random_case(seed, ranks, i);
        if (wire) {
            j.c.wire = EPO_WIRE_E4M3;
            j.c.hidden = EPO_WIRE_GROUP * (1 + i % 2);
        }
        if (nodes > 1) { /* flex across nodes has none */
            j.c.capacity = -1;
            j.c.overflow = EPO_OVERFLOW_ERROR;
            j.c.pad = false;
        }
        if (home) { /* what the products' one operation covers */
            j.c.type = i % 2 ? EPO_BF16 : EPO_F16;
            j.c.wgrad_type = i / 2 % 2 ? j.c.type : EPO_F32;
            j.c.hidden = (j.c.hidden + 15) / 16 * 16;
            j.c.ffn = (j.c.ffn + 15) / 16 * 16;
            j.c.pad = false;
        }
        j.dispatcher =
            wire || home || nodes > 1 || i / 2 % 2 ? EPO_DISPATCH_FLEX : EPO_DISPATCH_ALLTOALL;
        /* Rows by stores as their size has it, or all by copy engines. */
        if (i % 2 && !home)
            setenv("EP_OVERLAP_CUDA_SMALL", "0", 1);
        else
            unsetenv("EP_OVERLAP_CUDA_SMALL");
        /* Every arm for the first cases, three for the rest. */
        run_case(&j, threads, i < 6 || most < 3 ? most : 3, nbudgets);
    }
    return test_failed;
}
