/* SPDX-License-Identifier: Apache-2.0
 *
 * bench.h - the A/B of the library on this machine.
 *
 * Every arm has its own group, windows and plan over the same weights, rows and
 * routing.  In each round all arms take their turn, so that a machine that slows down
 * slows all of them; figures are medians over the rounds of the slowest rank.
 */
#ifndef EPO_TOOLS_BENCH_H
#define EPO_TOOLS_BENCH_H

#include <stdbool.h>
#include <stdint.h>

#include "ep_overlap.h"
#include "measure/device.h"
#include "measure/spread.h"
#include "trace/intervals.h"

#define BENCH_ARMS 20
#define BENCH_CHUNKS 4 /* chunk counts that may be given */
#define BENCH_REPEATS 1000
#define BENCH_RANKS 64       /* threads of one process */
#define BENCH_MICROBATCHES 4 /* forward and backward, before the flush of one sample */

/* AUTO: processes on GPUs, threads on the host, where sanitizers see them all. */
typedef enum bench_launch { LAUNCH_AUTO, LAUNCH_THREADS, LAUNCH_PROCESSES } bench_launch;

typedef struct bench_options {
    const char *workload; /* "q", "custom" */
    int tokens, hidden, ffn, experts, top_k;
    epo_dtype type;
    epo_engine_kind engine;
    const char *why_host; /* the step holds no GPU; NULL: not so */
    int ranks;            /* threads; 0: the step's ranks, or as many as there are GPUs */
    int dispatcher;       /* epo_dispatcher; -1: both */
    int chunks[BENCH_CHUNKS], chunk_counts;
    int gpus;   /* that this process may use; 0 with the host engine */
    int launch; /* how ranks are made: bench_launch */
    int sms;    /* of the experts' GEMMs; 0: all */
    int repeats;
    double timeout_s;
    bool json;
} bench_options;

typedef struct bench_arm {
    char name[64]; /* "alltoall overlapped" */
    epo_dispatcher dispatcher;
    epo_switch overlap, delay;
    int chunks;
    int serial; /* the arm that this one is held against; its own number if serial */
} bench_arm;

/* Of one arm; milliseconds of the slowest rank, bytes of rank 0 and one pass. */
typedef struct bench_figures {
    spread forward, both;      /* both: one micro-batch's forward and backward, flush shared */
    spread faster_f, faster_b; /* serial over this arm, round by round */
    double call_us;            /* CPU time of a forward call */
    double plan_ms;
    double ffn_f, ffn_b; /* the experts alone, of the serial arm's recording */
    double exposed_f, exposed_b;
    double floor_f, floor_b;
    double efficiency_f, efficiency_b; /* NAN: serial is at its floor, or this arm is serial */
    epo_overlap_times unions;          /* one forward and backward of rank 0 */
    int chunks;                        /* that the passes were made of */
    epo_stats pass;                    /* one forward and backward */
    uint64_t bits;                     /* of rank 0's outputs and gradients, as one number */
    bool identical;                    /* outputs and gradients, to its serial arm's bits */
} bench_figures;

/* The middle round over the best one: above it a run is told to carry no figure.  On GPUs 1.01
 * to 1.07 was seen. */
#define BENCH_UNREST 1.3

typedef struct bench_result {
    epo_group_info info; /* of the first arm; texts copied below */
    char engine[16], versions[256], gpu[96], why_host[256]; /* why not the CUDA engine; "" */
    int sms, gpus, cores;                                   /* gpus: of all ranks together */
    bool threads, shared;                                   /* ranks share a GPU or a core */
    double share; /* ranks for each core, at least 1; host engine */
    double copy_gbs;
    const char *copy_of; /* "peer copy", "memory copy", "emulated link", "not measured" */
    double flop_f, flop_b, gflops_f, gflops_b; /* a rank's work, and the best rate seen */
    double ffn_best_f, ffn_best_b;             /* FFN* */
    double least_ms;                           /* D* = C*, one pass of one of them */
    double process_mb, gpu_used_mb;
    bench_figures arm[BENCH_ARMS];
} bench_result;

/* The arms that the options ask for; their number. */
int bench_arms(const bench_options *o, bench_arm *arm);
/* How many ranks the launcher started (1: none), how many this command is to start, and
 * whether as processes; `gpus`: that this process may use. */
int bench_step_ranks(void);
int bench_start(const bench_options *o, int gpus, bool *processes);
/* Runs the benchmark; `rank_zero` tells whether *out is filled here.  Never returns
 * where a rank failed beside others: one line, and the process ends. */
epo_status bench_measure(const bench_options *o, const bench_arm *arm, int arms, bench_result *out,
                         bool *rank_zero);

void bench_print_text(const bench_options *o, const bench_arm *arm, int arms,
                      const bench_result *r);
void bench_print_json(const bench_options *o, const bench_arm *arm, int arms,
                      const bench_result *r);
const char *bench_type_name(epo_dtype type);

#endif
