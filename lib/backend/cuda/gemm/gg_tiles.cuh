/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_tiles.cuh - which tile is number i: the table that the prepare kernel makes
 * from the rows of each expert, and its use.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_TILES_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_TILES_CUH

#include "gg_params.h"
#include "gg_ptx.cuh"

namespace gg {

/* Blocks work in clusters of p.cluster, one or two, on tiles that have an operand in
 * common; each then loads half of it for both. */
enum { kShareNone = 0, kShareA = 1, kShareB = 2 };

/* One output tile.  Row kinds: `row` is its first row, `rows` how many of the
 * tile's rows are the expert's.  WGRAD: the expert's first row and row count. */
struct tile {
    int expert;
    int row, rows;
    int m, n;     /* tile indices within the expert */
    int row_tile; /* over all experts, for the arrival counters */
    int share;
    int live;        /* 0: no such tile, only its neighbour in the cluster has work */
    int stage, part; /* of a chain */
};

__device__ __forceinline__ int expert_row_tiles(const gg_params &p, int rows) {
    if (p.kind == EPO_GG_WGRAD) {
        return rows == 0 && p.accumulate ? 0 : (p.m + p.tile_m - 1) / p.tile_m;
    }
    return (rows + p.tile_m - 1) / p.tile_m;
}
/* What is taken at a time: a tile; with clusters, two row tiles of one column tile or,
 * of an odd last row tile, two column tiles. */
__device__ __forceinline__ int expert_units(const gg_params &p, int rows) {
    int tiles_m = expert_row_tiles(p, rows);
    if (p.cluster == 1) {
        return tiles_m * p.tiles_n;
    }
    return tiles_m / 2 * p.tiles_n + tiles_m % 2 * ((p.tiles_n + 1) / 2);
}

/* Unit `local` of an expert, for one block of the cluster: groups of group_m row
 * tiles, in a group column by column, so that the tiles in flight share their
 * columns of the weights. */
__device__ __forceinline__ void unit_split(const gg_params &p, int tiles_m, int local, int rank,
                                           tile &t) {
    int heights = tiles_m / p.cluster;
    int group_m = max(p.group_m / p.cluster, 1);
    int pairs = local - heights * p.tiles_n;
    t.live = 1;
    if (pairs >= 0) {
        t.share = kShareA;
        t.m = tiles_m - 1;
        t.n = 2 * pairs + rank;
        t.live = t.n < p.tiles_n;
        return;
    }
    int group = local / (group_m * p.tiles_n);
    int in_group = local - group * group_m * p.tiles_n;
    int height = min(group_m, heights - group * group_m);
    t.share = p.cluster == 1 ? kShareNone : kShareB;
    t.n = in_group / height;
    t.m = (group * group_m + in_group - t.n * height) * p.cluster + rank;
}
__device__ __forceinline__ tile tile_of(const gg_params &p, const gg_expert &e, int index,
                                        int rank) {
    tile t;
    unit_split(p, expert_row_tiles(p, e.rows), index - e.unit, rank, t);
    t.expert = e.expert;
    t.stage = e.stage;
    t.part = e.part;
    t.row_tile = e.row_tile + t.m;
    t.row = e.row;
    t.rows = e.rows;
    if (p.kind != EPO_GG_WGRAD) {
        t.row += t.m * p.tile_m;
        t.rows = min(p.tile_m, e.rows - t.m * p.tile_m);
    }
    return t;
}

/* A whole warp looks for the entry that unit `index` belongs to; `hint` is where the last
 * search ended, and then this one: indices that one block takes only grow. */
__device__ __forceinline__ void entry_find(const gg_params &p, int index, int &hint) {
    int lane = threadIdx.x & 31;
    while (true) {
        int i = hint + lane + 1; /* the entry behind the last is an end mark */
        bool behind = i > p.count || p.table[min(i, p.count)].unit > index;
        unsigned mask = __ballot_sync(0xffffffffu, behind);
        if (mask != 0) {
            hint += __ffs(mask) - 1;
            break;
        }
        hint += 32;
    }
}

/* A part of a chain, which has a word for it, is done. */
__device__ __forceinline__ void part_tell(const gg_chain &c, int part) {
    flag_store(c.part[part].done,
               c.part[part].done_value + (c.done_counter != nullptr ? *c.done_counter : 0));
}

/* All rows of a chain are stored: one thread tells every rank. */
__device__ __forceinline__ void direct_tell(const gg_direct &d) {
    const uint64_t value = d.value + (d.counter != nullptr ? *d.counter : 0);
    if (d.late != nullptr && *(const volatile uint32_t *)d.late != 0) {
        return;
    }
    for (int r = 0; r < d.ranks && d.words != nullptr; r++) {
        flag_store(d.words + r * d.step, value);
    }
}

/* One thread waits until the rows of `t` are there; returns the time it took. */
__device__ __forceinline__ uint64_t tile_ready(const gg_params &p, const tile &t) {
    if (p.ready.flag == nullptr || t.rows == 0) {
        return 0;
    }
    int64_t first = t.expert, last = t.expert;
    if (p.ready.block_rows > 0) {
        first = t.row / p.ready.block_rows;
        last = (t.row + t.rows - 1) / p.ready.block_rows;
    }
    const uint64_t *flag = p.ready.flag + first * p.ready.words;
    int64_t words = (last - first + 1) * p.ready.words;
    uint64_t start = 0;
    for (int64_t i = 0; i < words; i++) {
        while (flag_load(flag + i) < p.ready.epoch) {
            uint64_t now = now_ns();
            start = start == 0 ? now : start;
            if (p.ready.timeout_ns != 0 && now - start > p.ready.timeout_ns) {
                if (p.error != nullptr) {
                    atomicOr(p.error, EPO_GG_ERROR_TIMEOUT);
                }
                return now - start;
            }
            __nanosleep(100);
        }
    }
    return start == 0 ? 0 : now_ns() - start;
}

/* May this block take another tile?  *sm_limit lowers the number of blocks. */
__device__ __forceinline__ bool block_stays(const gg_params &p) {
    if (p.sm_limit == nullptr) {
        return true;
    }
    int limit = max(*p.sm_limit, p.cluster);
    int *active = &p.ws[GG_WS_ACTIVE];
    if (*(volatile int *)active <= limit) {
        return true;
    }
    if (atomicSub(active, p.cluster) > limit) {
        return false;
    }
    atomicAdd(active, p.cluster);
    return true;
}

/* One warp takes the next unit: lane r < p.cluster gets the tile of rank r, once its
 * rows are there; false: no more for this block. */
__device__ __forceinline__ bool tile_next(const gg_params &p, tile &t, int &hint, uint64_t &spin) {
    int lane = threadIdx.x & 31;
    int index = 0;
    if (lane == 0) {
        index = block_stays(p) ? atomicAdd(&p.ws[GG_WS_NEXT], 1) : 0x7fffffff;
    }
    index = __shfl_sync(0xffffffffu, index, 0);
    if (index >= p.ws[GG_WS_TOTAL]) {
        return false;
    }
    entry_find(p, index, hint);
    t = tile_of(p, p.table[hint], index, min(lane, p.cluster - 1));
    uint64_t mine = lane < p.cluster ? tile_ready(p, t) : 0;
    uint64_t other = __shfl_sync(0xffffffffu, mine, 1);
    spin += max(mine, other);
    return true;
}

} /* namespace gg */
#endif
