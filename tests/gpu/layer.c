/* SPDX-License-Identifier: Apache-2.0
 *
 * layer.c - the whole layer on GPUs: against the fp64 reference, and bit for bit
 * between serial, overlapped and delayed runs.
 *
 *   layer threads|processes RANKS CASES [SEED [ARMS [e4m3] [nodes=N]]]
 *
 * Ranks share the GPUs there are (rank r on GPU r modulo their number; with nodes, whose
 * ranks lie one behind the other, node n on GPU n modulo their number).
 */
#include "gpu_test.h"
#include "reference.h"

#include "backend/backend.h"
#include "backend/engine.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

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
enum { ARMS = sizeof arms / sizeof *arms };

/* What the ranks share with the program that judges: in a shared mapping. */
typedef struct board {
    _Atomic int arrived, round;
    char slot[REF_RANKS][8192];
    struct {
        int status;
        char text[256];
        double error[5]; /* y, dx, dweights, dw1, dw2 */
        uint64_t hash[ARMS][5];
    } rank[REF_RANKS];
} board;

typedef struct job {
    const epo_engine *engine;
    ref_case c;
    epo_dispatcher dispatcher;
    const arm *arm;
    int arm_number, rank, devices, nodes;
    epo_world *world;
    board *b;
    const ref_result *want; /* NULL: only the bits */
} job;

/* ---- a bootstrap for processes: the board ---- */

static int board_barrier(void *ctx) {
    job *j = ctx;
    const int round = atomic_load(&j->b->round);
    if (atomic_fetch_add(&j->b->arrived, 1) == j->c.ranks - 1) {
        atomic_store(&j->b->arrived, 0);
        atomic_store(&j->b->round, round + 1);
        return 0;
    }
    for (int i = 0; atomic_load(&j->b->round) == round; i++) {
        if (i > 200000)
            return -1; /* 20 s */
        usleep(100);
    }
    return 0;
}

static int board_allgather(void *ctx, const void *mine, size_t bytes, void *all) {
    job *j = ctx;
    if (bytes > sizeof j->b->slot[0])
        return -1;
    memcpy(j->b->slot[j->rank], mine, bytes);
    if (board_barrier(j) != 0)
        return -1;
    for (int r = 0; r < j->c.ranks; r++)
        memcpy((char *)all + (size_t)r * bytes, j->b->slot[r], bytes);
    return board_barrier(j);
}

/* ---- one rank ---- */

typedef struct state {
    cudaStream_t stream;
    epo_group *group;
    epo_buffer *buffer;
    epo_layer *layer;
    void *w1, *w2, *dw1, *dw2, *x, *dy, *y, *dx;
    float *weights, *dweights;
    int64_t *experts;
} state;

static void *upload_experts(const job *j, int second) {
    const ref_case *c = &j->c;
    const int local = c->experts / c->ranks;
    const uint64_t n = (uint64_t)c->ffn * (uint64_t)c->hidden * (second ? 1 : 2);
    char *host = malloc((uint64_t)local * n * test_size(c->type));
    for (int e = 0; e < local; e++)
        for (uint64_t i = 0; i < n; i++)
            test_store(host, (uint64_t)e * n + i, c->type,
                       second ? ref_w2(c, j->rank * local + e, i)
                              : ref_w1(c, j->rank * local + e, i));
    void *p = test_upload(host, (uint64_t)local * n * test_size(c->type));
    free(host);
    return p;
}

static void state_memory(const job *j, state *s) {
    const ref_case *c = &j->c;
    const uint64_t local = (uint64_t)(c->experts / c->ranks);
    const uint64_t n = (uint64_t)c->ffn * (uint64_t)c->hidden, wsize = test_size(c->wgrad_type);
    const uint64_t rows = (uint64_t)c->tokens * (uint64_t)c->hidden * test_size(c->type);
    s->w1 = upload_experts(j, 0);
    s->w2 = upload_experts(j, 1);
    s->dw1 = test_device(2 * local * n * wsize, 0);
    s->dw2 = test_device(local * n * wsize, 0);
    s->x = test_device(rows, 0xff);
    s->dy = test_device(rows, 0xff);
    s->y = test_device(rows, 0xff);
    s->dx = test_device(rows, 0xff);
    s->weights = test_device((uint64_t)c->tokens * (uint64_t)c->top_k * 4, 0xff);
    s->dweights = test_device((uint64_t)c->tokens * (uint64_t)c->top_k * 4, 0xff);
    s->experts = test_device((uint64_t)c->tokens * (uint64_t)c->top_k * 8, 0xff);
}

static void state_free(const job *j, state *s) {
    (void)j->engine->layer_destroy(s->layer);
    (void)j->engine->buffer_destroy(s->buffer);
    (void)j->engine->group_destroy(s->group);
    void *all[] = {s->w1, s->w2, s->dw1,     s->dw2,      s->x,      s->dy,
                   s->y,  s->dx, s->weights, s->dweights, s->experts};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        cudaFree(all[i]);
    cudaStreamDestroy(s->stream);
}

static epo_status state_open(job *j, state *s) {
    const ref_case *c = &j->c;
    epo_bootstrap boot = {sizeof boot, j, board_allgather, board_barrier};
    epo_engine_group eg = {sizeof eg, EPO_GROUP_CONFIG_INIT, "test"};
    eg.config.engine = EPO_ENGINE_CUDA;
    eg.config.rank = j->rank;
    eg.config.ranks = c->ranks;
    eg.config.threads = j->world;
    eg.config.bootstrap = j->world == NULL ? &boot : NULL;
    eg.config.overlap = j->arm->overlap;
    eg.config.delay_wgrad = j->arm->delay;
    eg.config.dispatcher = j->dispatcher;
    eg.config.chunks = j->arm->chunks;
    const char *limit = getenv("LAYER_TIMEOUT_S"); /* tools that make everything slow */
    eg.config.timeout_s = limit != NULL ? strtod(limit, NULL) : 20;
    eg.config.warn_s = eg.config.timeout_s / 2;
    epo_buffer_config bc = EPO_BUFFER_CONFIG_INIT;
    bc.experts = c->experts;
    bc.hidden = c->hidden;
    bc.top_k = c->top_k;
    bc.max_tokens = c->tokens;
    bc.type = c->type;
    bc.capacity = c->capacity;
    bc.overflow = c->overflow;
    bc.pad_to_capacity = c->pad;
    bc.wire = c->wire;
    epo_layer_config lc = EPO_LAYER_CONFIG_INIT;
    lc.experts = c->experts;
    lc.hidden = c->hidden;
    lc.ffn = c->ffn;
    lc.type = c->type;
    lc.wgrad_type = c->wgrad_type;
    lc.w1 = s->w1;
    lc.w2 = s->w2;
    lc.dw1 = s->dw1;
    lc.dw2 = s->dw2;
    epo_status status = j->engine->group_create(&eg, &s->group);
    if (status == EPO_OK)
        status = j->engine->buffer_create(s->group, &bc, &s->buffer);
    if (status == EPO_OK)
        status = j->engine->layer_create(s->group, &lc, &s->layer);
    return status;
}

/* Inputs by stream order only: what a training step does. */
static void inputs_send(const job *j, state *s, int mb, char *stage) {
    const ref_case *c = &j->c;
    const int tokens = ref_tokens(c, j->rank);
    const uint64_t n = (uint64_t)tokens * (uint64_t)c->hidden,
                   slots = (uint64_t)(tokens * c->top_k);
    char *x = stage, *dy = x + n * 4;
    float *w = (float *)(void *)(dy + n * 4);
    int64_t *e = (int64_t *)(void *)((char *)w + (slots * 4 + 7) / 8 * 8);
    for (int t = 0; t < tokens; t++) {
        for (int h = 0; h < c->hidden; h++) {
            const uint64_t at = (uint64_t)(t * c->hidden + h);
            test_store(x, at, c->type, ref_row(c, 0, j->rank, mb, t, h));
            test_store(dy, at, c->type, ref_row(c, 1, j->rank, mb, t, h));
        }
        for (int k = 0; k < c->top_k; k++) {
            w[t * c->top_k + k] = ref_weight(c, j->rank, mb, t, k);
            e[t * c->top_k + k] = ref_expert(c, j->rank, mb, t, k);
        }
    }
    const uint64_t bytes = n * test_size(c->type);
    TEST_CUDA(cudaMemcpyAsync(s->x, x, bytes, cudaMemcpyHostToDevice, s->stream));
    TEST_CUDA(cudaMemcpyAsync(s->dy, dy, bytes, cudaMemcpyHostToDevice, s->stream));
    TEST_CUDA(cudaMemcpyAsync(s->weights, w, slots * 4, cudaMemcpyHostToDevice, s->stream));
    TEST_CUDA(cudaMemcpyAsync(s->experts, e, slots * 8, cudaMemcpyHostToDevice, s->stream));
}

static epo_status microbatch(const job *j, state *s, int mb, char *stage) {
    const ref_case *c = &j->c;
    epo_plan *plan = NULL;
    epo_saved *saved = NULL;
    inputs_send(j, s, mb, stage);
    epo_routing r = EPO_ROUTING_INIT;
    r.tokens = ref_tokens(c, j->rank);
    r.top_k = c->top_k;
    r.experts = s->experts;
    r.weights = s->weights;
    epo_status status = j->engine->plan_create(s->buffer, &r, s->stream, &plan);
    if (status == EPO_OK)
        status = j->engine->forward(s->layer, plan, s->x, s->y, &saved, s->stream);
    if (status == EPO_OK)
        status = j->engine->backward(s->layer, saved, s->dy, s->dx, s->dweights, s->stream);
    j->engine->plan_release(plan);
    return status;
}

static uint64_t hash_of(const void *data, uint64_t bytes) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (uint64_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* Results of this rank: errors, and a hash of every bit. */
static void judge(const job *j, state *s) {
    const ref_case *c = &j->c;
    const uint64_t tokens = (uint64_t)ref_tokens(c, j->rank), n = (uint64_t)(c->ffn * c->hidden);
    const uint64_t local = (uint64_t)(c->experts / c->ranks);
    const struct {
        const void *device;
        uint64_t count;
        epo_dtype type;
        const double *want;
    } out[5] = {
        {s->y, tokens * (uint64_t)c->hidden, c->type, j->want ? j->want->y : NULL},
        {s->dx, tokens * (uint64_t)c->hidden, c->type, j->want ? j->want->dx : NULL},
        {s->dweights, tokens * (uint64_t)c->top_k, EPO_F32, j->want ? j->want->dweights : NULL},
        {s->dw1, 2 * n * local, c->wgrad_type, j->want ? j->want->dw1 : NULL},
        {s->dw2, n * local, c->wgrad_type, j->want ? j->want->dw2 : NULL},
    };
    for (int i = 0; i < 5; i++) {
        const uint64_t bytes = out[i].count * test_size(out[i].type);
        void *host = malloc(bytes + 1);
        TEST_CUDA(cudaMemcpy(host, out[i].device, bytes, cudaMemcpyDeviceToHost));
        j->b->rank[j->rank].hash[j->arm_number][i] = hash_of(host, bytes);
        if (out[i].want != NULL)
            j->b->rank[j->rank].error[i] = test_error(host, out[i].want, out[i].count, out[i].type);
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
    state_memory(j, &s);
    /* One pinned stage per micro-batch: copies are read when the GPU gets there. */
    const uint64_t stage_bytes =
        (uint64_t)j->c.tokens * ((uint64_t)j->c.hidden * 8 + (uint64_t)j->c.top_k * 12) + 64;
    char *stage = NULL;
    TEST_CUDA(cudaHostAlloc((void **)&stage, stage_bytes * (uint64_t)j->c.microbatches, 0));
    epo_status status = state_open(j, &s);
    for (int mb = 0; mb < j->c.microbatches && status == EPO_OK; mb++)
        status = microbatch(j, &s, mb, stage + (uint64_t)mb * stage_bytes);
    if (status == EPO_OK)
        status = j->engine->group_wgrad_flush(s.group, s.stream);
    j->b->rank[j->rank].status = (int)status;
    if (status != EPO_OK)
        snprintf(j->b->rank[j->rank].text, sizeof j->b->rank[j->rank].text, "%s",
                 j->engine->error());
    TEST_CUDA(cudaStreamSynchronize(s.stream));
    if (status == EPO_OK)
        judge(j, &s);
    state_free(j, &s);
    cudaFreeHost(stage);
    return NULL;
}

/* ---- all ranks of one arm ---- */

static bool run_threads(job *j) {
    pthread_t thread[REF_RANKS];
    job each[REF_RANKS];
    if (j->engine->world_create(j->c.ranks, &j->world) != EPO_OK)
        return false;
    for (int r = 0; r < j->c.ranks; r++) {
        each[r] = *j;
        each[r].rank = r;
        each[r].want = j->want != NULL ? &j->want[r] : NULL;
        pthread_create(&thread[r], NULL, rank_main, &each[r]);
    }
    for (int r = 0; r < j->c.ranks; r++)
        pthread_join(thread[r], NULL);
    j->engine->world_destroy(j->world);
    j->world = NULL;
    return true;
}

/* The caller has not touched CUDA: its children may. */
static bool run_processes(job *j, const job *all, int count) {
    pid_t pid[REF_RANKS];
    bool ok = true;
    for (int r = 0; r < j->c.ranks; r++) {
        pid[r] = fork();
        if (pid[r] == 0) {
            for (int i = 0; i < count; i++) {
                job mine = all[i];
                mine.rank = r;
                mine.want = mine.want != NULL ? &all[i].want[r] : NULL;
                rank_main(&mine);
                if (j->b->rank[r].status != EPO_OK)
                    _exit(1);
            }
            _exit(0);
        }
    }
    for (int r = 0; r < j->c.ranks; r++) {
        int status = 0;
        if (pid[r] < 0 || waitpid(pid[r], &status, 0) < 0 || status != 0)
            ok = false;
    }
    return ok;
}

/* What an output may be off: see the header for rows in e4m3. */
static double limit_of(const ref_case *c, int output) {
    if (c->wire != EPO_WIRE_ROWS)
        return 0.08;
    return output == 2 || c->wgrad_type == EPO_F32 ? test_limit(c->type) : test_limit(EPO_BF16);
}

static bool judge_case(const job *j, int first, int count, char *text, size_t size) {
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
        for (int a = first; a < first + count; a++)
            for (int i = 0; i < 5; i++)
                if (j->b->rank[r].hash[a][i] != j->b->rank[r].hash[first][i] &&
                    used + 1 < sizeof differ)
                    used += (size_t)snprintf(differ + used, sizeof differ - used,
                                             "; rank %d, %s: %s differs in bits", r, arms[a].name,
                                             outputs[i]);
    }
    snprintf(text, size, "y %.1e dx %.1e dweights %.1e dw1 %.1e dw2 %.1e%s", worst[0], worst[1],
             worst[2], worst[3], worst[4], differ);
    return ok && differ[0] == '\0';
}

static void run_case(job *j, bool threads, int narms) {
    ref_result want[REF_RANKS];
    job all[ARMS];
    char name[224], limit[64] = "", text[640] = "a rank ended early";
    bool ok = true;
    memset(j->b, 0, sizeof *j->b);
    for (int r = 0; r < j->c.ranks; r++)
        want[r] = ref_make(&j->c, r);
    for (int a = 0; a < narms; a++) {
        all[a] = *j;
        all[a].arm = &arms[a];
        all[a].arm_number = a;
        all[a].want = a == 0 ? want : NULL;
    }
    if (!threads)
        ok = run_processes(j, all, narms);
    for (int a = 0; a < narms && threads && ok; a++) {
        ok = run_threads(&all[a]);
        for (int r = 0; r < j->c.ranks; r++)
            ok = ok && j->b->rank[r].status == EPO_OK;
    }
    ok = judge_case(j, 0, narms, text, sizeof text) && ok;
    if (j->c.capacity >= 0)
        snprintf(limit, sizeof limit, ", capacity %d%s by %s", j->c.capacity,
                 j->c.pad ? " padded" : "",
                 j->c.overflow == EPO_OVERFLOW_DROP_WEIGHT ? "weight" : "position");
    if (j->nodes > 1)
        snprintf(limit, sizeof limit, ", %d nodes", j->nodes);
    snprintf(name, sizeof name, "layer %s%s %s x%d %s, %s, E%d H%d F%d K%d%s, %d arms",
             j->dispatcher == EPO_DISPATCH_FLEX ? "flex" : "alltoall",
             j->c.wire != EPO_WIRE_ROWS ? " e4m3" : "", threads ? "threads" : "processes",
             j->c.ranks, test_type(j->c.type), ref_routing_name[j->c.routing], j->c.experts,
             j->c.hidden, j->c.ffn, j->c.top_k, limit, narms);
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

static int devices_count(bool threads) {
    /* Processes: asked of a child, so that this one has not touched CUDA. */
    int n = 0, pipes[2];
    if (threads) {
        TEST_CUDA(cudaGetDeviceCount(&n));
        return n;
    }
    if (pipe(pipes) != 0)
        return 0;
    if (fork() == 0) {
        (void)cudaGetDeviceCount(&n);
        _exit(write(pipes[1], &n, sizeof n) == (ssize_t)sizeof n ? 0 : 1);
    }
    if (read(pipes[0], &n, sizeof n) != (ssize_t)sizeof n)
        n = 0;
    wait(NULL);
    return n;
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
        fprintf(stderr,
                "usage: layer threads|processes RANKS CASES [SEED [ARMS [e4m3] [nodes=N]]]\n");
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
    bool wire = false;
    int nodes = 1;
    for (int i = 6; i < argc; i++) {
        wire = wire || strcmp(argv[i], "e4m3") == 0;
        if (strncmp(argv[i], "nodes=", 6) == 0)
            nodes = (int)strtol(argv[i] + 6, NULL, 10);
    }
    play_nodes(ranks, nodes);
    printf("# seed 0x%llx\n", (unsigned long long)seed);
    job j = {.engine = epo_engine_entry(EPO_ENGINE_ABI),
             .devices = devices_count(threads),
             .nodes = nodes};
    if (j.devices == 0 || ranks < 1 || ranks > REF_RANKS) {
        fprintf(stderr, "layer: %d GPUs, %d ranks (1..%d)\n", j.devices, ranks, REF_RANKS);
        return 2;
    }
    j.b = mmap(NULL, sizeof *j.b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (j.b == MAP_FAILED)
        return 2;
    for (int i = 0; i < cases; i++) {
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
        j.dispatcher = wire || nodes > 1 || i / 2 % 2 ? EPO_DISPATCH_FLEX : EPO_DISPATCH_ALLTOALL;
        /* Rows by stores as their size has it, or all by copy engines. */
        if (i % 2)
            setenv("EP_OVERLAP_CUDA_SMALL", "0", 1);
        else
            unsetenv("EP_OVERLAP_CUDA_SMALL");
        /* Every arm for the first cases, three for the rest. */
        run_case(&j, threads, i < 6 || most < 3 ? most : 3);
    }
    return test_failed;
}
