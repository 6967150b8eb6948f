/* SPDX-License-Identifier: Apache-2.0
 *
 * endure.c - what takes long or ends badly: a process that is stopped in the middle of
 * its passes, one that never comes, the same pass again and again, a program that captures
 * a graph of its own while the watchdog waits.
 *
 *   endure [e4m3] stopped|repeats|churn [RANKS [TIMES [VARIANT]]]
 *   endure [e4m3] late|watched
 *
 * e4m3: everything by flex, with e4m3 on the wire.  Variants: alltoall and flex, in one
 * and in two chunks.  Rank r is on GPU r modulo their number.
 */
#include "features.h"

#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>

enum { LIMIT_S = 2, STOPPED = 1 };

static epo_status make_plan(rank_job *j) {
    epo_step *s = &j->step[0][0];
    const epo_routing r = test_routing(&j->c, j->rank, j->experts[0], j->weights[0]);
    s->x = j->x[0];
    epo_status status = j->engine->plan_create(j->buffer, &r, j->stream, &j->plan[0][0]);
    s->plan = j->plan[0][0];
    return status;
}

static epo_status pass(rank_job *j) {
    epo_step *s = &j->step[0][0];
    epo_status status = j->engine->forward(s->layer, s->plan, s->x, s->y, &s->saved, j->stream);
    if (status == EPO_OK)
        status = j->engine->backward(s->layer, s->saved, s->dy, s->dx, s->dweights, j->stream);
    s->saved = NULL;
    if (status == EPO_OK)
        status = j->engine->group_wgrad_flush(j->group, j->stream);
    return status;
}

/* ---- one rank stops ---- */

typedef struct board {
    _Atomic int passes[RANKS]; /* begun */
    _Atomic int over;          /* ranks that have ended */
    double waited[RANKS];
    char text[RANKS][256];
} board;

/* Passes until one fails, which is to name the stopped rank. */
static void go_on(rank_job *j, board *b) {
    epo_status status = EPO_OK;
    double begun = test_now();
    for (int i = 0; status == EPO_OK && i < 100000; i++) {
        begun = test_now();
        atomic_store(&b->passes[j->rank], i + 1);
        status = pass(j);
        if (status == EPO_OK)
            TEST_CUDA(cudaStreamSynchronize(j->stream));
        if (status == EPO_OK)
            status = j->engine->group_async_error(j->group);
    }
    b->waited[j->rank] = test_now() - begun;
    char name[16];
    snprintf(name, sizeof name, "rank %d", STOPPED);
    if (status != EPO_E_TIMEOUT || strstr(j->engine->error(), name) == NULL)
        snprintf(b->text[j->rank], sizeof b->text[0], "rank %d: status %d: %.200s", j->rank,
                 (int)status, j->engine->error());
}

static int stopped_process(board *b, int rank, int ranks, int variant, int devices) {
    test_apart(rank, ranks, devices);
    ref_case c = some_case(0x181, ranks, EPO_BF16);
    rank_job j = some_job(&c, rank, variant);
    j.device = rank % devices;
    j.config.rank = rank;
    j.config.ranks = ranks;
    j.config.timeout_s = LIMIT_S;
    epo_status status = open_rank(&j);
    if (status == EPO_OK)
        status = make_plan(&j);
    if (status == EPO_OK)
        go_on(&j, b);
    else
        snprintf(b->text[rank], sizeof b->text[0], "rank %d: opening: %.200s", rank,
                 j.engine->error());
    atomic_fetch_add(&b->over, 1);
    return 0;
}

/* Until `what` is reached, for `seconds` at most. */
static bool reached(_Atomic int *what, int value, double seconds) {
    for (double end = test_now() + seconds; test_now() < end; usleep(1000))
        if (atomic_load(what) >= value)
            return true;
    return false;
}

static void test_stopped(int ranks, int devices, int variant) {
    char name[128], text[600] = "";
    pid_t pid[RANKS];
    board *b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b == MAP_FAILED)
        exit(3);
    for (int r = 0; r < ranks; r++)
        if ((pid[r] = fork()) == 0)
            _exit(stopped_process(b, r, ranks, variant, devices));
    bool ok = reached(&b->passes[STOPPED], 20, 30);
    kill(pid[STOPPED], SIGSTOP);
    if (!ok)
        snprintf(text, sizeof text, "20 passes were not reached in 30 s; ");
    if (!reached(&b->over, ranks - 1, 4 * LIMIT_S + 6)) {
        ok = false;
        snprintf(text + strlen(text), sizeof text - strlen(text), "the others did not end; ");
    }
    for (int r = 0; r < ranks; r++) {
        kill(pid[r], SIGKILL);
        waitpid(pid[r], NULL, 0);
        ok = ok && (r == STOPPED || b->text[r][0] == '\0');
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", r ? " " : "", b->text[r]);
    }
    snprintf(name, sizeof name, "rank %d of %d stopped, %s in %d chunks, MAX_CONNECTIONS %s",
             STOPPED, ranks, dispatcher_name(variant), variant / 2 > 0 ? 2 : 1,
             getenv("CUDA_DEVICE_MAX_CONNECTIONS") != NULL ? getenv("CUDA_DEVICE_MAX_CONNECTIONS")
                                                           : "not set");
    snprintf(text + strlen(text), sizeof text - strlen(text),
             "rank 0 ended %.1f s after its last pass began, limit %d", b->waited[0], LIMIT_S);
    test_result(name, ok, text);
    munmap(b, sizeof *b);
}

/* ---- again and again ---- */

static int times = 1000;

static uint64_t hash_pass(rank_job *j) {
    const ref_case *c = &j->c;
    const epo_step *s = &j->step[0][0];
    const uint64_t rows = row_count(j) * test_size(c->type);
    const uint64_t w = (uint64_t)(c->experts / c->ranks) * (uint64_t)(c->ffn * c->hidden);
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    hash = test_hash_device(hash, s->y, rows);
    hash = test_hash_device(hash, s->dx, rows);
    hash = test_hash_device(hash, s->dweights,
                            (uint64_t)ref_tokens(c, j->rank) * (uint64_t)c->top_k * 4);
    for (int i = 0; i < 2; i++)
        hash = test_hash_device(hash, j->memory[2 + i],
                                (uint64_t)(2 - i) * w * test_size(c->wgrad_type));
    return hash;
}

static void *repeat_main(void *ctx) {
    rank_job *j = ctx;
    const ref_case *c = &j->c;
    const uint64_t w = (uint64_t)(c->experts / c->ranks) * (uint64_t)(c->ffn * c->hidden);
    uint64_t first = 0;
    int differ = 0;
    j->status = open_rank(j);
    if (j->status == EPO_OK)
        j->status = make_plan(j);
    for (int i = 0; i < times && j->status == EPO_OK; i++) {
        for (int k = 0; k < 2; k++) /* gradients are added up */
            TEST_CUDA(cudaMemsetAsync(j->memory[2 + k], 0,
                                      (uint64_t)(2 - k) * w * test_size(c->wgrad_type), j->stream));
        j->status = pass(j);
        TEST_CUDA(cudaStreamSynchronize(j->stream));
        const uint64_t hash = j->status == EPO_OK ? hash_pass(j) : 0;
        first = i == 0 ? hash : first;
        differ += hash != first;
    }
    if (j->status == EPO_OK)
        j->status = j->engine->group_async_error(j->group);
    if (j->status != EPO_OK)
        snprintf(j->text, sizeof j->text, "%s", j->engine->error());
    j->hash = (uint64_t)differ;
    close_rank(j);
    return NULL;
}

static void test_repeats(int ranks, int variant) {
    char name[128], text[256] = "";
    rank_job j[RANKS];
    ref_case c = some_case(0x191, ranks, EPO_BF16);
    uint64_t differ = 0;
    c.tokens = 300;
    c.hidden = 256;
    c.top_k = 4;
    for (int r = 0; r < ranks; r++) {
        j[r] = some_job(&c, r, variant);
        j[r].main = repeat_main;
    }
    bool ok = run_world(j, ranks, text, sizeof text);
    for (int r = 0; r < ranks; r++)
        differ += j[r].hash;
    snprintf(name, sizeof name, "%d repeats, %s in %d chunks, x%d", times, dispatcher_name(variant),
             variant / 2 > 0 ? 2 : 1, ranks);
    if (ok)
        snprintf(text, sizeof text, "%d differ", (int)differ);
    test_result(name, ok && differ == 0, text);
}

/* ---- made and destroyed again and again ---- */

typedef struct holdings {
    long files, threads, maps, device_mb;
} holdings;

static long entries(const char *path) {
    long n = 0;
    DIR *d = opendir(path);
    while (d != NULL && readdir(d) != NULL)
        n++;
    if (d != NULL)
        closedir(d);
    return n;
}

static holdings holdings_now(void) {
    holdings h = {.files = entries("/proc/self/fd"), .threads = entries("/proc/self/task")};
    size_t left = 0, all = 0;
    TEST_CUDA(cudaMemGetInfo(&left, &all));
    h.device_mb = (long)((all - left) >> 20);
    FILE *f = fopen("/proc/self/maps", "r");
    for (int c = 0; f != NULL && (c = fgetc(f)) != EOF;)
        h.maps += c == '\n';
    if (f != NULL)
        fclose(f);
    return h;
}

/* Groups, buffers, layers of all variants, and their passes: what a process holds afterwards is
 * what it held after the first of them. */
static void test_churn(int ranks) {
    enum { FIRST = 12 };
    char name[96], text[256] = "";
    holdings before = {0}, after = {0};
    bool ok = true;
    int made = 0;
    for (; made < times && ok; made++) {
        rank_job j[RANKS];
        ref_case c = some_case(0x1a1 + (uint64_t)made, ranks, made % 2 ? EPO_BF16 : EPO_F16);
        for (int r = 0; r < ranks; r++)
            j[r] = some_job(&c, r, made % 6);
        ok = run_world(j, ranks, text, sizeof text);
        if (made == FIRST)
            before = holdings_now();
    }
    after = holdings_now();
    if (ok)
        snprintf(text, sizeof text,
                 "files %ld then %ld, threads %ld then %ld, mappings %ld then %ld, MB of the GPU "
                 "%ld then %ld",
                 before.files, after.files, before.threads, after.threads, before.maps, after.maps,
                 before.device_mb, after.device_mb);
    ok = ok && made > 2 * FIRST && after.files == before.files && after.threads == before.threads &&
         after.maps <= before.maps + 16 && after.device_mb <= before.device_mb + 16;
    snprintf(name, sizeof name, "%d groups made and destroyed, x%d", made, ranks);
    test_result(name, ok, text);
}

/* ---- a peer that never comes ---- */

typedef struct late_board {
    _Atomic int over;
    char text[256];
} late_board;

static bool all_nan(const void *device, uint64_t bytes) {
    unsigned char *host = malloc(bytes + 1);
    bool all = true;
    TEST_CUDA(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
    for (uint64_t i = 0; i < bytes; i++)
        all = all && host[i] == 0xff;
    free(host);
    return all;
}

static void clear(rank_job *j, void *device, uint64_t bytes) {
    TEST_CUDA(cudaMemsetAsync(device, 0, bytes, j->stream));
}

typedef enum late_call {
    LATE_FORWARD,
    LATE_BACKWARD,
    LATE_DISPATCH,
    LATE_ALLREDUCE,
    LATE_CALLS
} late_call;

/* What is wrong afterwards with the error, if anything is. */
static const char *late_error(rank_job *j, epo_status called) {
    if (called != EPO_OK)
        return "the call itself failed";
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    if (j->engine->group_async_error(j->group) != EPO_E_TIMEOUT)
        return "no EPO_E_TIMEOUT afterwards";
    return strstr(j->engine->error(), "rank 1") == NULL ? "the error does not name rank 1" : NULL;
}

static const char *dispatch_alone(rank_job *j) {
    uint64_t rows = 0;
    (void)j->engine->plan_rows(j->plan[0][0], &rows);
    void *out = device_array(j, rows * (uint64_t)j->c.hidden, j->c.type, 0);
    float *weights = device_array(j, rows, EPO_F32, 0);
    const char *wrong =
        late_error(j, j->engine->dispatch(j->plan[0][0], j->x[0], out, weights, j->stream));
    if (wrong != NULL || rows == 0)
        return wrong != NULL ? wrong : "a plan without rows";
    if (!all_nan(out, rows * (uint64_t)j->c.hidden * test_size(j->c.type)))
        return "rows are not NaN";
    return all_nan(weights, rows * 4) ? NULL : "row_weights are not NaN";
}

enum { LATE_FLOATS = 1000 };

static const char *allreduce_alone(rank_job *j, float *data) {
    clear(j, data, LATE_FLOATS * 4);
    const char *wrong =
        late_error(j, j->engine->group_allreduce(j->group, data, LATE_FLOATS, j->stream));
    if (wrong != NULL)
        return wrong;
    return all_nan(data, LATE_FLOATS * 4) ? NULL : "the sum is not NaN";
}

/* Rank 0 goes alone into forward (or backward): the call returns at once, its results
 * are NaN, and the error names rank 1. */
static const char *pass_alone(rank_job *j, bool backward) {
    const ref_case *c = &j->c;
    epo_step *s = &j->step[0][LAYERS - 1];
    const uint64_t rows = row_count(j) * test_size(c->type);
    const uint64_t n = (uint64_t)(c->experts / c->ranks) * (uint64_t)(c->ffn * c->hidden) *
                       test_size(c->wgrad_type);
    clear(j, s->y, rows);
    clear(j, s->dx, rows);
    clear(j, s->dweights, (uint64_t)ref_tokens(c, j->rank) * (uint64_t)c->top_k * 4);
    epo_status status =
        backward ? j->engine->backward(s->layer, s->saved, s->dy, s->dx, s->dweights, j->stream)
                 : j->engine->forward(s->layer, s->plan, s->x, s->y, &s->saved, j->stream);
    if (backward)
        s->saved = NULL;
    const char *wrong = late_error(j, status);
    if (wrong != NULL)
        return wrong;
    if (!backward)
        return all_nan(s->y, rows) ? NULL : "y is not NaN";
    if (!all_nan(s->dx, rows) ||
        !all_nan(s->dweights, (uint64_t)ref_tokens(c, j->rank) * (uint64_t)c->top_k * 4))
        return "dx or dweights is not NaN";
    (void)j->engine->group_wgrad_flush(j->group, j->stream);
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    void **dw = &j->memory[2 + 2 * (LAYERS - 1)];
    return all_nan(dw[0], 2 * n) && all_nan(dw[1], n) ? NULL : "dw is not NaN";
}

static int late_process(late_board *b, int rank, late_call call, int how, int devices) {
    test_apart(rank, 2, devices);
    ref_case c = some_case(0x81, 2, EPO_BF16);
    rank_job j = some_job(&c, rank, how);
    const char *wrong = "opening failed";
    j.device = rank % devices;
    j.config.rank = rank;
    j.config.ranks = 2;
    j.config.timeout_s = 2;
    epo_status status = open_rank(&j);
    const epo_routing routing = test_routing(&c, rank, j.experts[0], j.weights[0]);
    /* Once together: every kernel is loaded, which a waiting stream would hold up. */
    if (status == EPO_OK)
        status = run_plain(&j);
    if (status == EPO_OK)
        status = j.engine->group_wgrad_flush(j.group, j.stream);
    float *data = device_array(&j, LATE_FLOATS, EPO_F32, 0);
    if (status == EPO_OK) /* its window is made */
        status = j.engine->group_allreduce(j.group, data, LATE_FLOATS, j.stream);
    epo_step *s = &j.step[0][LAYERS - 1];
    if (status == EPO_OK)
        status = j.engine->plan_create(j.buffer, &routing, j.stream, &j.plan[0][0]);
    s->plan = j.plan[0][0];
    s->x = j.x[0];
    if (status == EPO_OK && call == LATE_BACKWARD)
        status = j.engine->forward(s->layer, s->plan, s->x, s->y, &s->saved, j.stream);
    TEST_CUDA(cudaStreamSynchronize(j.stream));
    if (status == EPO_OK && rank == 0)
        wrong = call == LATE_DISPATCH    ? dispatch_alone(&j)
                : call == LATE_ALLREDUCE ? allreduce_alone(&j, data)
                                         : pass_alone(&j, call == LATE_BACKWARD);
    else if (status != EPO_OK)
        snprintf(b->text, sizeof b->text, "rank %d: %s", rank, j.engine->error());
    if (rank == 0 && status == EPO_OK && wrong != NULL)
        snprintf(b->text, sizeof b->text, "%s [%s]", wrong, j.engine->error());
    atomic_fetch_add(&b->over, rank == 0);
    for (int i = 0; i < 15000 && atomic_load(&b->over) == 0; i++)
        usleep(1000);
    if (rank == 0) /* a broken group ends well, and what the watchdog ended is not ended again */
        close_rank(&j);
    return 0;
}

/* Before this process has touched CUDA. */
static void test_late(int devices) {
    static const char *const calls[] = {"forward", "backward", "dispatch", "allreduce"};
    for (int i = 0; i < 2 * LATE_CALLS; i++) {
        const int how = i / LATE_CALLS;
        char name[96];
        late_board *b =
            mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (b == MAP_FAILED)
            exit(3);
        for (int r = 0; r < 2; r++)
            if (fork() == 0)
                _exit(late_process(b, r, (late_call)(i % LATE_CALLS), 2 + how, devices));
        bool ok = true;
        for (int r = 0; r < 2; r++) {
            int status = 0;
            wait(&status);
            ok = ok && status == 0;
        }
        snprintf(name, sizeof name, "a peer never comes: NaN, %s %s", dispatcher_name(how),
                 calls[i % LATE_CALLS]);
        ok = ok && b->text[0] == '\0';
        test_result(name, ok, ok ? "and the error names it" : b->text);
        munmap(b, sizeof *b);
    }
}

/* ---- the program captures while the watchdog waits for NCCL ---- */

typedef struct capture_board {
    _Atomic int captured;
    char text[2][256];
} capture_board;

/* A graph of the program's own, for 200 ms, in the mode that other threads can spoil. */
static cudaError_t capture_slowly(float *word) {
    cudaGraph_t graph = NULL;
    cudaStream_t stream;
    TEST_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    TEST_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    cudaError_t e = cudaSuccess;
    for (int i = 0; i < 20 && e == cudaSuccess; i++, usleep(10000))
        e = cudaMemsetAsync(word, 0, sizeof *word, stream);
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    if (graph != NULL)
        cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    return e != cudaSuccess ? e : ended;
}

/* Rank 1 comes to the pass when rank 0 has captured. */
static void watched_pass(capture_board *b, rank_job *j) {
    epo_step *s = &j->step[0][0];
    float *word = device_array(j, 1, EPO_F32, 0);
    cudaError_t e = cudaSuccess;
    for (int i = 0; j->rank == 1 && i < 10000 && atomic_load(&b->captured) == 0; i++)
        usleep(1000);
    epo_status status = j->engine->forward(s->layer, s->plan, s->x, s->y, NULL, j->stream);
    if (j->rank == 0 && status == EPO_OK)
        e = capture_slowly(word);
    atomic_store(&b->captured, 1);
    TEST_CUDA(cudaStreamSynchronize(j->stream));
    if (status == EPO_OK)
        status = j->engine->group_async_error(j->group);
    if (status != EPO_OK || e != cudaSuccess)
        snprintf(b->text[j->rank], sizeof b->text[0], "rank %d: capture: %s; %.150s", j->rank,
                 cudaGetErrorString(e), status != EPO_OK ? j->engine->error() : "");
}

static int watched_process(capture_board *b, int rank, int devices) {
    test_apart(rank, 2, devices);
    ref_case c = some_case(0x191, 2, EPO_BF16);
    rank_job j = some_job(&c, rank, 2);
    j.device = rank % devices;
    j.config.rank = rank;
    j.config.ranks = 2;
    epo_status status = open_rank(&j);
    if (status == EPO_OK) /* once together: NCCL connects at first use */
        status = run_plain(&j);
    if (status == EPO_OK)
        status = j.engine->group_wgrad_flush(j.group, j.stream);
    TEST_CUDA(cudaStreamSynchronize(j.stream));
    if (status == EPO_OK)
        watched_pass(b, &j);
    else
        snprintf(b->text[rank], sizeof b->text[0], "rank %d: %.200s", rank, j.engine->error());
    close_rank(&j);
    return 0;
}

/* Before this process has touched CUDA. */
static void test_watched(int devices) {
    capture_board *b =
        mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b == MAP_FAILED)
        exit(3);
    for (int r = 0; r < 2; r++)
        if (fork() == 0) {
            setenv("EP_OVERLAP_CUDA_PEER", "0", 1);
            _exit(watched_process(b, r, devices));
        }
    bool ok = true;
    for (int r = 0, status = 0; r < 2; r++)
        ok = wait(&status) > 0 && status == 0 && ok;
    ok = ok && b->text[0][0] == '\0' && b->text[1][0] == '\0';
    test_result("a capture while the watchdog waits", ok,
                ok ? "neither disturbs the other" : b->text[b->text[0][0] == '\0']);
    munmap(b, sizeof *b);
}

int main(int argc, char **argv) {
    int at = 1;
    if (argc > at && strcmp(argv[at], "e4m3") == 0) {
        wire = EPO_WIRE_E4M3;
        at++;
    }
    const char *what = argc > at ? argv[at] : "";
    const bool stops = strcmp(what, "stopped") == 0, late = strcmp(what, "late") == 0;
    const bool watched = strcmp(what, "watched") == 0;
    const int ranks = argc > at + 1 ? (int)strtol(argv[at + 1], NULL, 10) : 2;
    times = argc > at + 2 ? (int)strtol(argv[at + 2], NULL, 10) : times;
    const int only = argc > at + 3 ? (int)strtol(argv[at + 3], NULL, 10) : -1;
    const bool churns = strcmp(what, "churn") == 0;
    if ((!stops && !late && !watched && !churns && strcmp(what, "repeats") != 0) || ranks < 2 ||
        ranks > RANKS) {
        fprintf(
            stderr,
            "usage: endure [e4m3] stopped|repeats|churn|late|watched [RANKS 2..%d [TIMES [VARIANT "
            "0..3]]]\n",
            RANKS);
        return 2;
    }
    if (stops || late || watched) { /* before this process has touched CUDA */
        const int devices = test_devices();
        char port[16];
        snprintf(port, sizeof port, "%d", (int)getpid());
        setenv("MASTER_PORT", port, 1); /* what tells these ranks from others */
        if (late && devices > 0)
            test_late(devices);
        if (watched && devices > 0)
            test_watched(devices);
        for (int v = 0; v < 4 && devices > 0 && stops; v++)
            if ((wire == EPO_WIRE_ROWS || v % 2) && (only < 0 || only == v))
                test_stopped(ranks, devices, v);
        return devices > 0 ? test_failed : 3;
    }
    if (churns)
        test_churn(ranks);
    for (int v = 0; v < 4 && !churns; v++)
        if ((wire == EPO_WIRE_ROWS || v % 2) && (only < 0 || only == v))
            test_repeats(ranks, v);
    return test_failed;
}
