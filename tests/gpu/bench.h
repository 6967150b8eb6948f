/* SPDX-License-Identifier: Apache-2.0
 *
 * bench.h - what the files of the layer's benchmark share.
 *
 *   bench.c         arguments, ranks, and the arms in turns
 *   bench_ffn.c     the experts alone on the same rows
 *   bench_cpu.c     where a call's CPU time goes
 *   bench_report.c  medians, the table, JSON
 */
#ifndef EPO_TESTS_GPU_BENCH_H
#define EPO_TESTS_GPU_BENCH_H

#include "gpu_test.h"

#include "backend/backend.h"
#include "backend/engine.h"
#include "core/status.h"

#include <pthread.h>

enum { BENCH_RANKS = 8, BENCH_ARMS = 24, BENCH_REPEATS = 64, BENCH_WARM = 2 };

typedef struct bench_arm {
    char name[160];
    epo_dispatcher dispatcher;
    epo_switch overlap, delay;
    int chunks;      /* 0: chosen by the engine */
    const char *way; /* of rows beside GEMMs; NULL: as the environment has it */
    char env[128];   /* NAME=VALUE@..., while the group is made */
} bench_arm;

typedef struct bench_shape {
    int ranks, tokens, hidden, ffn, experts, top_k, repeats;
} bench_shape;

/* Milliseconds of each rank, repeat by repeat. */
typedef float bench_times[BENCH_RANKS][BENCH_REPEATS];

typedef struct bench_program {
    bench_shape shape;
    bench_arm arm[BENCH_ARMS];
    int arms;
    epo_dtype wgrad_type;
    bool timeline, cpu;
    int devices; /* fewer than ranks: these share them */
    bool fresh;  /* each backward's weight gradients take the place of the last ones */
    int calls;   /* in a row, without a look at the GPU: as a model's layers come */
    const char *label, *way;
    const epo_engine *engine;
    epo_world *worlds[BENCH_ARMS];
    pthread_barrier_t together;
    /* Per arm: forward; forward + backward; CPU microseconds of a call. */
    bench_times forward[BENCH_ARMS], both[BENCH_ARMS], cpu_forward[BENCH_ARMS],
        cpu_backward[BENCH_ARMS], plan[BENCH_ARMS];
    bench_times ffn_forward, ffn_pieces, ffn_chain, ffn_both;
    uint64_t bytes_out[BENCH_ARMS][2];
    int chosen[BENCH_ARMS]; /* chunks of the last pass, as recorded */
    char versions[256];
    int broken;
} bench_program;
extern bench_program bench;

typedef struct bench_one {
    epo_group *group;
    epo_buffer *buffer;
    epo_layer *layer;
    epo_plan *plan;
} bench_one;

typedef struct bench_rank {
    int rank;
    cudaStream_t stream;
    cudaEvent_t start, middle, end;
    void *w1, *w2, *dw1, *dw2, *x, *dy, *y, *dx;
    float *weights, *dweights;
    int64_t *experts;
    bench_one arm[BENCH_ARMS];
} bench_rank;

double bench_now_us(void);
bool bench_must(epo_status status, const char *what);
void *bench_random_bf16(uint64_t n, uint64_t seed, float scale);

/* ---- bench_ffn.c ---- */
typedef struct bench_ffn {
    const epo_backend_ops *ops;
    epo_backend *be;
    epo_queue *q;
    epo_event *done;
    uint64_t first[1024], count[1024], rows;
    void *x, *h, *a, *y, *op_first, *op_count;
    float *w, *dw;
} bench_ffn;
bool bench_ffn_open(bench_rank *b, bench_ffn *f);
void bench_ffn_run(bench_rank *b, bench_ffn *f, int rep);
void bench_ffn_close(bench_ffn *f);

/* ---- bench_cpu.c ---- */
/* This thread's operations from here on, by name. */
void bench_cpu_start(void);
/* Prints microseconds and operations per call. */
void bench_cpu_print(const char *arm, const char *phase, int calls);

/* ---- bench_report.c ---- */
/* GB/s of one direction of a large peer copy while both are busy; 0: one rank. */
double bench_peer_rate(void);
void bench_report(double rate);

#endif
