/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_rank.h - one rank of a benchmark: its memory and its arms.
 */
#ifndef EPO_TOOLS_BENCH_RANK_H
#define EPO_TOOLS_BENCH_RANK_H

#include "bench.h"
#include "core/status.h"

typedef struct bench_side {
    epo_group *group;
    epo_buffer *buffer;
    epo_layer *layer;
    epo_plan *plan;
    double plan_ms;
    uint64_t bits; /* of outputs and gradients */
} bench_side;

typedef struct bench_rank {
    const bench_options *o;
    const bench_arm *arm;
    int arms, rank, ranks, local; /* local: experts of a rank */
    epo_world **world;            /* [arms]; NULL: the step's ranks */
    measure_device device;
    int64_t *chosen; /* [tokens][top_k], ordinary memory */
    void *w1, *w2, *dw1, *dw2, *x, *dy, *y, *dx, *weights, *dweights, *experts;
    uint64_t w1_bytes, w2_bytes, row_bytes, weight_bytes;
    bench_side side[BENCH_ARMS];
    measure_mark start, end;
    double shown_ms;   /* when progress was told last */
    bench_result *out; /* rank 0 fills it */
} bench_rank;

/* Every step that fails here has its line in epo_fail_text(). */
epo_status bench_rank_open(bench_rank *b);
epo_status bench_rank_close(bench_rank *b);

/* The library's error line becomes this program's. */
static inline epo_status bench_passed(epo_status status) {
    return status == EPO_OK ? EPO_OK : epo_fail(status, "%s", epo_error());
}

/* [collective]  All samples, recordings and bytes; fills *b->out on rank 0. */
epo_status bench_rank_measure(bench_rank *b);

/* What is done, how far: a line on stderr, where that is no terminal one in
 * five seconds at most, so that a short run's log has none. */
void bench_progress(bench_rank *b, const char *what, int done, int of);

#endif
