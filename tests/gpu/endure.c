/* SPDX-License-Identifier: Apache-2.0
 *
 * endure.c - what takes long or ends badly: a process that is stopped in the middle of
 * its passes, and the same pass again and again.
 *
 *   endure [e4m3] stopped|repeats [RANKS [TIMES [VARIANT]]]
 *
 * e4m3: everything by flex, with e4m3 on the wire.  Variants: alltoall and flex, in one
 * and in two chunks.  Rank r is on GPU r modulo their number.
 */
#include "features.h"

#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LIMIT_S = 2, STOPPED = 1 };

static epo_status make_plan(rank_job *j) {
    epo_step *s = &j->step[0][0];
    epo_routing r = EPO_ROUTING_INIT;
    r.tokens = ref_tokens(&j->c, j->rank);
    r.top_k = j->c.top_k;
    r.experts = j->experts[0];
    r.weights = j->weights[0];
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

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Passes until one fails, which is to name the stopped rank. */
static void go_on(rank_job *j, board *b) {
    epo_status status = EPO_OK;
    double begun = now();
    for (int i = 0; status == EPO_OK && i < 100000; i++) {
        begun = now();
        atomic_store(&b->passes[j->rank], i + 1);
        status = pass(j);
        if (status == EPO_OK)
            TEST_CUDA(cudaStreamSynchronize(j->stream));
        if (status == EPO_OK)
            status = j->engine->group_async_error(j->group);
    }
    b->waited[j->rank] = now() - begun;
    char name[16];
    snprintf(name, sizeof name, "rank %d", STOPPED);
    if (status != EPO_E_TIMEOUT || strstr(j->engine->error(), name) == NULL)
        snprintf(b->text[j->rank], sizeof b->text[0], "rank %d: status %d: %.200s", j->rank,
                 (int)status, j->engine->error());
}

static int stopped_process(board *b, int rank, int ranks, int variant, int devices) {
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

static int count_devices(void) {
    int n = 0, status = 0;
    const pid_t pid = fork();
    if (pid == 0) {
        (void)cudaGetDeviceCount(&n);
        _exit(n);
    }
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

/* Until `what` is reached, for `seconds` at most. */
static bool reached(_Atomic int *what, int value, double seconds) {
    for (double end = now() + seconds; now() < end; usleep(1000))
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
    hash = hash_device(hash, s->y, rows);
    hash = hash_device(hash, s->dx, rows);
    hash =
        hash_device(hash, s->dweights, (uint64_t)ref_tokens(c, j->rank) * (uint64_t)c->top_k * 4);
    for (int i = 0; i < 2; i++)
        hash =
            hash_device(hash, j->memory[2 + i], (uint64_t)(2 - i) * w * test_size(c->wgrad_type));
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

int main(int argc, char **argv) {
    int at = 1;
    if (argc > at && strcmp(argv[at], "e4m3") == 0) {
        wire = EPO_WIRE_E4M3;
        at++;
    }
    const bool stops = argc > at && strcmp(argv[at], "stopped") == 0;
    const int ranks = argc > at + 1 ? (int)strtol(argv[at + 1], NULL, 10) : 2;
    times = argc > at + 2 ? (int)strtol(argv[at + 2], NULL, 10) : times;
    const int only = argc > at + 3 ? (int)strtol(argv[at + 3], NULL, 10) : -1;
    if (argc <= at || (!stops && strcmp(argv[at], "repeats") != 0) || ranks < 2 || ranks > RANKS) {
        fprintf(stderr,
                "usage: endure [e4m3] stopped|repeats [RANKS 2..%d [TIMES [VARIANT 0..3]]]\n",
                RANKS);
        return 2;
    }
    if (stops) { /* before this process has touched CUDA */
        const int devices = count_devices();
        char port[16];
        snprintf(port, sizeof port, "%d", (int)getpid());
        setenv("MASTER_PORT", port, 1);
        for (int v = 0; v < 4 && devices > 0; v++)
            if ((wire == EPO_WIRE_ROWS || v % 2) && (only < 0 || only == v))
                test_stopped(ranks, devices, v);
        return devices > 0 ? test_failed : 3;
    }
    for (int v = 0; v < 4; v++)
        if ((wire == EPO_WIRE_ROWS || v % 2) && (only < 0 || only == v))
            test_repeats(ranks, v);
    return test_failed;
}
