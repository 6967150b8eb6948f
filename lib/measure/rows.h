/* SPDX-License-Identifier: Apache-2.0
 *
 * rows.h - the least that a routing must send: one row per token and other rank.
 */
#ifndef EPO_MEASURE_ROWS_H
#define EPO_MEASURE_ROWS_H

#include <stdint.h>

#include "ep_overlap.h"

/* rows[p] += tokens of `rank` that go to rank p != rank, each once; local: experts of
 * a rank; chosen[tokens][top_k], -1: not used. */
void measure_rows_to(const int64_t *chosen, int tokens, int top_k, int local, int rank,
                     float *rows);
/* The least time of one dispatch (its combine is the same turned round), ms: on an
 * emulated link the busiest pair, else the busiest rank's copies at `gbs`.
 * rows[ranks][ranks]: from, to.  0 where `gbs` is 0. */
double measure_rows_least_ms(const float *rows, int ranks, double row_bytes,
                             const epo_group_info *info, double gbs);

#endif
