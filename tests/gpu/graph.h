/* SPDX-License-Identifier: Apache-2.0
 *
 * graph.h - what the files of the test of CUDA graphs share: a case, a rank of it, and what
 * the ranks tell.
 */
#ifndef EPO_TESTS_GPU_GRAPH_H
#define EPO_TESTS_GPU_GRAPH_H

#include "fixture.h"

#include "backend/backend.h"

/* What goes wrong in the last replay. */
typedef enum fault {
    FAULT_NONE,
    FAULT_INDEX,
    FAULT_OVERFLOW,
    FAULT_LATE,  /* rank 1 does not come */
    FAULT_MARGIN /* it comes when the others' limit ends */
} fault;
#define MARGIN_LIMIT_S 0.8

typedef struct setup {
    ref_case c; /* capacity, overflow and pad as the buffer's */
    epo_switch overlap;
    epo_dispatcher dispatcher;
    epo_saved_mode saved;
    int chunks, replays;
    fault fault;
    double margin_s; /* FAULT_MARGIN: so long behind the limit */
    bool called;     /* ... to calls, not to a replay */
    bool timed;
    bool own;     /* dispatch and combine, between them a copy as the caller's experts */
    bool copying; /* a layer whose experts are that copy */
} setup;

typedef struct board {
    test_table table;
    struct {
        int status, differ; /* replays whose bits differ */
        int where[TEST_OUTPUTS];
        char text[256];
        double launch_us, eager_us, replay_ms, eager_ms; /* medians: CPU, and all of it */
        uint64_t dropped[2];
        float nan;                          /* of y after a fault: the part that is NaN */
        uint64_t wrong[TEST_OUTPUTS], nans; /* FAULT_MARGIN: neither right nor NaN; NaN */
    } rank[REF_RANKS];
    double _Atomic launched; /* when rank 0 launched the replay in which rank 1 is late */
} board;

typedef struct job {
    const epo_engine *engine;
    setup s;
    int rank, devices;
    epo_world *world;
    board *b;
    /* while it runs */
    cudaStream_t stream;
    epo_group *group;
    epo_buffer *plain, *graphs;
    epo_layer *layer[2]; /* of each way, with gradients of its own */
    test_arrays a[2];    /* of each way; all but gradients of weights is the same memory */
    test_copying copying[2];
    char *rows, *made; /* of `own` */
    float *row_weights;
    uint64_t row_bytes;
    char *memory; /* pinned */
    cudaGraphExec_t exec;
    epo_plan *plan; /* captured */
} job;

/* Inputs number i into the rank's arrays; `wrong`: with the case's fault. */
void graph_inputs_send(const job *j, int i, bool wrong);
/* The calls that are captured, or the same without a graph. */
epo_status graph_calls(job *j, epo_buffer *buffer, epo_layer *layer, epo_plan **plan);

/* graph_margin.c: a peer that comes when the limit ends. */
epo_status graph_margin_run(job *j);
bool graph_margin_judge(const job *j, char *text, size_t size);

#endif
