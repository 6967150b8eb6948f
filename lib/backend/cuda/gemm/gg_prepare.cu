/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_prepare.cu - one small block before the GEMM: reads the rows of each expert,
 * lays out the tiles, sets the counters back.
 */
#include "gg_kernels.h"
#include "gg_tiles.cuh"

namespace gg {

constexpr int kThreads = 256;

/* Rows of expert e, checked: what does not lie within the arrays counts as empty,
 * and the error word says so. */
__device__ int2 expert_rows(const gg_params &p, int e) {
    uint64_t first = p.row_first[e], count = p.row_count[e];
    if (count > (uint64_t)p.rows || first > (uint64_t)p.rows - count) {
        if (p.error != nullptr) {
            atomicOr(p.error, EPO_GG_ERROR_ROWS);
        }
        return make_int2(0, 0);
    }
    return make_int2((int)first, (int)count);
}

/* WGRAD's tiles cost what the expert has rows: the longest first, so that none is
 * left to the end.  Row kinds keep the experts' order, in which rows arrive. */
__device__ int place_of(const gg_params &p, const int2 *rows, int i) {
    if (p.kind != EPO_GG_WGRAD) {
        return i;
    }
    int place = 0, mine = rows[i].y;
#pragma unroll 8
    for (int j = 0; j < p.count; j++) {
        int other = rows[j].y;
        place += other > mine || (other == mine && j < i);
    }
    return place;
}

__device__ int sum_below(int mine) {
    int lane = threadIdx.x & 31;
    int sum = mine;
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(0xffffffffu, sum, d);
        sum += lane >= d ? other : 0;
    }
    return sum - mine;
}

/* Exclusive sums over the experts in their order, by one warp; writes the table. */
__device__ void table_write(const gg_params &p, const int2 *rows, const uint16_t *order) {
    int lane = threadIdx.x & 31;
    int units = 0, row_tiles = 0;
    for (int base = 0; base < p.count; base += 32) {
        int i = base + lane;
        int2 r = i < p.count ? rows[order[i]] : make_int2(0, 0);
        int my_tiles = i < p.count ? expert_row_tiles(p, r.y) : 0;
        int my_units = i < p.count ? expert_units(p, r.y) : 0;
        int tiles_below = sum_below(my_tiles), units_below = sum_below(my_units);
        if (i < p.count) {
            gg_expert *e = &p.table[i];
            e->unit = units + units_below;
            e->row_tile = row_tiles + tiles_below;
            e->expert = p.first + order[i];
            e->row = r.x;
            e->rows = r.y;
            e->stage = e->part = 0;
        }
        row_tiles += __shfl_sync(0xffffffffu, tiles_below + my_tiles, 31);
        units += __shfl_sync(0xffffffffu, units_below + my_units, 31);
    }
    if (lane == 0) {
        p.table[p.count].unit = 0x7fffffff;
        /* More row tiles than disjoint experts can have: the counters behind them
         * would not suffice. */
        bool sound = p.kind == EPO_GG_WGRAD || row_tiles <= p.rows / p.tile_m + p.count;
        if (!sound && p.error != nullptr) {
            atomicOr(p.error, EPO_GG_ERROR_ROWS);
        }
        p.ws[GG_WS_TOTAL] = sound ? units : 0;
        p.ws[GG_WS_NEXT] = 0;
        p.ws[GG_WS_ACTIVE] = 0;
    }
}

__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ gg_params p) {
    __shared__ int2 rows[GG_MAX_EXPERTS];
    __shared__ uint16_t order[GG_MAX_EXPERTS];
    grid_release();
    for (int i = threadIdx.x; i < p.count; i += kThreads) {
        rows[i] = expert_rows(p, p.first + i);
    }
    for (int i = threadIdx.x; i < p.arrived_words; i += kThreads) {
        p.arrived[i] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.count; i += kThreads) {
        order[place_of(p, rows, i)] = (uint16_t)i;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        table_write(p, rows, order);
    }
}

/* ---- chains ---- */

/* Row tiles before each expert, by one warp; returns how many there are. */
__device__ int row_tiles_write(const gg_chain &c, const int2 *rows, int *row_tile) {
    int lane = threadIdx.x & 31, all = 0;
    for (int base = 0; base < c.count; base += 32) {
        int i = base + lane;
        int mine = i < c.count ? expert_row_tiles(c.stage[0], rows[i].y) : 0;
        int below = sum_below(mine);
        if (i < c.count) {
            row_tile[i] = all + below;
        }
        all += __shfl_sync(0xffffffffu, below + mine, 31);
    }
    return all;
}

/* The entries of one stage of one step, behind `units` units; returns the units then. */
__device__ int step_write(const gg_chain &c, int stage, int step, const int2 *rows,
                          const int *row_tile, gg_expert *to, int units) {
    int lane = threadIdx.x & 31;
    int first = c.step_first[step], count = c.step_first[step + 1] - first;
    for (int base = 0; base < count; base += 32) {
        int i = base + lane, expert = first + i;
        int mine = i < count ? expert_units(c.stage[stage], rows[expert].y) : 0;
        int below = sum_below(mine);
        if (i < count) {
            gg_expert e = {units + below,     row_tile[expert],
                           c.first + expert,  rows[expert].x,
                           rows[expert].y,    stage,
                           c.step_part[step], 0};
            to[i] = e;
        }
        units += __shfl_sync(0xffffffffu, below + mine, 31);
    }
    return units;
}

/* The shares of one round; returns the units then. */
__device__ int round_write(const gg_chain &c, int round, const int2 *rows, const int *row_tile,
                           gg_expert *&to, int units) {
    for (int stage = 0; stage < c.stages; stage++) {
        int step = round - stage;
        if ((threadIdx.x & 31) == 0 && stage < 2) {
            c.share[2 * round + stage] = (uint32_t)units;
        }
        if (step >= 0 && step < c.steps) {
            units = step_write(c, stage, step, rows, row_tile, to, units);
            to += c.step_first[step + 1] - c.step_first[step];
        }
    }
    return units;
}

/* The table, round by round; false: more row tiles than counters. */
__device__ bool chain_table_write(const gg_chain &c, const int2 *rows, int *row_tile) {
    const gg_params &p = c.stage[0];
    int lane = threadIdx.x & 31, units = 0, rounds = c.steps + c.stages - 1;
    bool sound = row_tiles_write(c, rows, row_tile) <= c.row_tiles;
    gg_expert *to = p.table;
    __syncwarp();
    for (int round = 0; round < rounds; round++) {
        units = round_write(c, round, rows, row_tile, to, units);
    }
    if (lane == 0) {
        to->unit = 0x7fffffff;
        if (!sound && p.error != nullptr) {
            atomicOr(p.error, EPO_GG_ERROR_ROWS);
        }
        c.share[2 * rounds] = (uint32_t)units;
        for (int i = 0; i <= 2 * rounds && !sound; i++) {
            c.share[i] = 0;
        }
        p.ws[GG_WS_ACTIVE] = 0;
    }
    return sound;
}

/* How many tiles of the last stage a part has; one that has none is done. */
__device__ void part_totals_write(const gg_chain &c, const int2 *rows, bool sound) {
    const gg_params &last = c.stage[c.stages - 1];
    uint32_t all = 0;
    for (int part = threadIdx.x; part < c.parts; part += 32) {
        int total = 0;
        for (int step = 0; step < c.steps; step++) {
            if (c.step_part[step] == part) {
                for (int i = c.step_first[step]; i < c.step_first[step + 1]; i++) {
                    total += expert_row_tiles(last, rows[i].y) * last.tiles_n;
                }
            }
        }
        c.part_total[part] = (uint32_t)total;
        all += (uint32_t)total;
        if ((total == 0 || !sound) && c.part[part].done != nullptr) {
            part_tell(c, part);
        }
    }
    all = __reduce_add_sync(0xffffffffu, all);
    if (threadIdx.x == 0) {
        c.all_done[1] = all;
        if (all == 0 || !sound) {
            direct_tell(c.direct);
        }
    }
}

__global__ void __launch_bounds__(kThreads)
    chain_prepare_kernel(const __grid_constant__ gg_chain c) {
    __shared__ int2 rows[GG_MAX_EXPERTS];
    __shared__ int row_tile[GG_MAX_EXPERTS];
    grid_release();
    for (int i = threadIdx.x; i < c.count; i += kThreads) {
        rows[i] = expert_rows(c.stage[0], c.first + i);
    }
    for (int i = threadIdx.x; i < c.counter_words; i += kThreads) {
        c.counters[i] = 0;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        bool sound = chain_table_write(c, rows, row_tile);
        part_totals_write(c, rows, sound);
    }
}

} /* namespace gg */

extern "C" const void *gg_chain_prepare_kernel(void) {
    return (const void *)gg::chain_prepare_kernel;
}
extern "C" const void *gg_prepare_kernel(void) { return (const void *)gg::prepare_kernel; }
