/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_chain.cuh - the persistent kernel for two products that feed each other: the same
 * feeding, multiplying and storing as gg_sm90.cuh, over tiles of several stages.
 *
 * What one block stores another reads, in the same launch.  A tile of a later stage is
 * taken when all column tiles of its row tile in the stage before are stored; tiles are
 * taken in order and wait for tiles before them alone, so some block always goes on.
 *
 * Rows are waited for before a tile is taken, and with `patience` not for ever: a block
 * that leaves owes nothing, and a later launch takes what is left.  While a part's rows
 * are on their way, blocks take the tiles of later stages that come next.
 *
 * How stored rows become readable.  Rows leave by TMA stores (asynchronous proxy) or,
 * at an expert's end, by ordinary ones.  Each multiplying warp waits until its stores
 * are complete, not only read from shared memory, which makes them visible to the
 * thread that waited, and arrives on `stored` (release, block).  The telling warp waits
 * for that (acquire), fences at device scope and adds to the row tile's counter.  The
 * scheduling warp of the reading block sees the count (acquire, device), then a proxy
 * fence puts the asynchronous loads behind it, then it hands the tile over (release and
 * acquire, cluster) to the thread that loads.  Each step is cumulative, and the proxy
 * fence lies on the way, so the loads find the rows.  The warps that multiply never
 * fence and seldom wait: they arrive a few blocks of K into their next tile, when their
 * stores are long complete, or at once if there is no next tile yet.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_CHAIN_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_CHAIN_CUH

#include "gg_act.cuh"
#include "gg_direct.cuh"
#include "gg_feed.cuh"
#include "gg_kernels.h"
#include "gg_math.cuh"

namespace gg {

template <bool kBack_, class T_, int kTileN> struct chain_config {
    using T = T_;
    static constexpr bool kBack = kBack_;
    static constexpr int kLast = kBack ? 2 : 1; /* stage */
    static constexpr int kKind = kBack ? EPO_GG_DGRAD : EPO_GG_FORWARD;
    using First = config<kKind, kBack ? EPO_GG_PLAIN : EPO_GG_SWIGLU, T, kTileN>;
    using Second = config<kKind, EPO_GG_PLAIN, T, kTileN>;
};
template <class F> __device__ __forceinline__ bool is_act(const tile &t) {
    return F::kBack && t.stage == 1;
}

/* ---- taking tiles ---- */

enum { kUnseen = 0, kLooked = 1, kSeen = 2, kLeft = 3 };

__device__ __forceinline__ bool part_here(const gg_chain &c, int part) {
    return c.arrived || c.part[part].flag == nullptr || count_load(&c.seen[part]) == kSeen;
}

__device__ __forceinline__ uint64_t part_epoch(const gg_chain &c, int part) {
    return c.part[part].epoch + (c.counter != nullptr ? *c.counter : 0);
}

/* Looks at the part's words until they tell.  They may lie in the CPU's memory: more than
 * one thread looking would crowd the way that the rows take. */
__device__ __forceinline__ void part_look(const gg_chain &c, int part) {
    const gg_chain_part &of = c.part[part];
    const uint64_t epoch = part_epoch(c, part);
    uint64_t start = now_ns();
    for (int i = 0; i < of.words; i++) {
        while (flag_load(of.flag + i) < epoch) {
            uint64_t waited = now_ns() - start;
            if (c.patience_ns != 0 && waited > c.patience_ns) {
                count_store(&c.seen[part], kLeft);
                if (c.left != nullptr) {
                    flag_store(c.left, c.left_value);
                }
                return;
            }
            if (c.timeout_ns != 0 && waited > c.timeout_ns) {
                if (c.stage[0].error != nullptr) {
                    atomicOr(c.stage[0].error, EPO_GG_ERROR_TIMEOUT);
                }
                i = of.words;
                break;
            }
            __nanosleep(500);
        }
    }
    count_store(&c.seen[part], kSeen);
}
/* One look, unless another one looks. */
__device__ __forceinline__ bool part_glance(const gg_chain &c, int part) {
    const gg_chain_part &of = c.part[part];
    if (part_here(c, part)) {
        return true;
    }
    if (atomicCAS(&c.seen[part], (uint32_t)kUnseen, (uint32_t)kLooked) != kUnseen) {
        return false;
    }
    const uint64_t epoch = part_epoch(c, part);
    bool here = true;
    for (int i = 0; here && i < of.words; i++) {
        here = flag_load(of.flag + i) >= epoch;
    }
    count_store(&c.seen[part], here ? kSeen : kUnseen);
    return here;
}
/* One thread waits until the part's rows have arrived; false: they have not, and this
 * launch waits no more.  spin += the time it took. */
__device__ __forceinline__ bool part_wait(const gg_chain &c, int part, uint64_t &spin) {
    uint64_t start = now_ns();
    uint32_t seen = kUnseen;
    while (seen != kSeen && seen != kLeft) {
        if (atomicCAS(&c.seen[part], (uint32_t)kUnseen, (uint32_t)kLooked) == kUnseen) {
            part_look(c, part);
        }
        seen = count_load(&c.seen[part]);
        if (seen == kLooked) {
            __nanosleep(100);
        }
    }
    spin += now_ns() - start;
    return seen == kSeen;
}
/* ... until the stage before has stored the tile's rows. */
__device__ __forceinline__ uint64_t rows_wait(const gg_chain &c, const tile &t) {
    const uint32_t *count = &c.row_done[(t.stage - 1) * c.row_tiles + t.row_tile];
    uint32_t need = (uint32_t)c.stage[t.stage - 1].tiles_n;
    uint64_t start = 0;
    while (count_load(count) < need) {
        start = start == 0 ? now_ns() : start;
        __nanosleep(40);
    }
    return start == 0 ? 0 : now_ns() - start;
}

constexpr int kNoUnit = 0x7fffffff;

/* Where a block is in the table: the round, which of its shares are used up, and, share by
 * share, where the last search ended. */
struct progress {
    int round = 0, hint[2] = {0, 0};
    bool empty[2] = {false, false};
};

__device__ __forceinline__ int share_take(const gg_chain &c, progress &at, int which) {
    uint32_t first = c.share[2 * at.round + which], end = c.share[2 * at.round + which + 1];
    if (!at.empty[which] && first < end) {
        uint32_t unit = first + atomicAdd(&c.taken[2 * at.round + which], 1u);
        if (unit < end) {
            return (int)unit;
        }
    }
    at.empty[which] = true;
    return kNoUnit;
}

/* One thread takes the next unit: of the round's first share if its rows are here, else of
 * the other, which needs none; if only such are left that need rows, it waits for them.
 * With `hurry` the last step begins when those before it are all but done. */
__device__ __forceinline__ int unit_take(const gg_chain &c, progress &at, int &which,
                                         uint64_t &spin) {
    int rounds = c.steps + c.stages - 1;
    while (at.round < rounds && block_stays(c.stage[0])) {
        int part = at.round < c.steps ? c.step_part[at.round] : 0;
        bool first = !at.empty[0] && c.share[2 * at.round] < c.share[2 * at.round + 1];
        bool behind = c.hurry && at.round == c.steps - 1 && !at.empty[1];
        which = first && !behind && part_glance(c, part) ? 0 : 1;
        int unit = share_take(c, at, which);
        if (unit == kNoUnit && (which == 0 || (first && part_glance(c, part)))) {
            continue;
        }
        if (unit != kNoUnit) {
            return unit;
        }
        if (!first) {
            at.round++;
            at.empty[0] = at.empty[1] = false;
        } else if (!part_wait(c, part, spin)) {
            break;
        }
    }
    return kNoUnit;
}

/* As tile_next. */
__device__ __forceinline__ bool chain_next(const gg_chain &c, tile &t, progress &at,
                                           uint64_t &spin) {
    const gg_params &p = c.stage[0];
    int lane = threadIdx.x & 31;
    int index = kNoUnit, which = 0;
    if (lane == 0) {
        index = unit_take(c, at, which, spin);
    }
    index = __shfl_sync(0xffffffffu, index, 0);
    which = __shfl_sync(0xffffffffu, which, 0);
    if (index == kNoUnit) {
        return false;
    }
    int hint = which == 0 ? at.hint[0] : at.hint[1];
    entry_find(p, index, hint);
    at.hint[0] = which == 0 ? hint : at.hint[0];
    at.hint[1] = which == 0 ? at.hint[1] : hint;
    const gg_expert &e = p.table[hint];
    t = tile_of(c.stage[e.stage], e, index, min(lane, p.cluster - 1));
    uint64_t mine = 0;
    if (lane < p.cluster) {
        mine = t.stage == 0 ? 0 : rows_wait(c, t);
        if (t.stage > 0 || c.part[t.part].flag != nullptr) {
            fence_async_global(); /* others wrote them, by whatever way; TMA reads them */
        }
    }
    uint64_t other = __shfl_sync(0xffffffffu, mine, 1);
    spin += max(mine, other);
    return true;
}

/* ---- loading ---- */

/* Warp 0, one thread. */
template <class F, class C>
__device__ void chain_feed(const gg_chain &c, const shared<C> &s, const gg_chain_maps &maps) {
    ring<kSlots> at;
    ring<C::kStages> to;
    shared<C> first = shared_of(s, 0);
    shared<typename F::First> same = {s.base};
    int rank = (int)cluster_rank();
    while (true) {
        tile t = tile_wait(s, at);
        slot_back(first, at);
        at.next();
        if (t.expert < 0) {
            return;
        }
        if (t.stage == 0) {
            feed_tile(c.stage[0], same, maps.map[0], t, to, rank, [] {});
        } else if (t.stage == F::kLast) {
            feed_tile(c.stage[F::kLast], s, maps.map[1], t, to, rank, [] {});
        }
    }
}

/* ---- telling ---- */

/* A warp may be ahead of another by the tiles in the slots and the one it ends: with
 * fewer barriers it could arrive for a tile twice before the other has once. */
constexpr int kTold = 4;

/* What is stored may have gone to another GPU. */
__device__ __forceinline__ void stored_fence(const gg_chain &c) {
    if (c.direct.ranks > 0) {
        __threadfence_system();
    } else {
        __threadfence();
    }
}
/* A tile of the last stage is stored. */
__device__ __forceinline__ void tell_last(const gg_chain &c, int part) {
    if (count_add(&c.part_done[part]) + 1 == c.part_total[part] && c.part[part].done != nullptr) {
        part_tell(c, part);
    }
    if (c.direct.words != nullptr && count_add(&c.all_done[0]) + 1 == c.all_done[1]) {
        direct_tell(c.direct);
    }
}

/* Warp 2, one thread: what the block has stored, tile by tile. */
template <class F, class C> __device__ void chain_tell(const gg_chain &c, const shared<C> &s) {
    ring<kSlots> at;
    ring<kTold> told;
    shared<C> first = shared_of(s, 0);
    while (true) {
        tile t = tile_wait(s, at);
        slot_back(first, at);
        at.next();
        if (t.expert < 0) {
            return;
        }
        mbar_wait(s.stored(told.index), told.parity);
        told.next();
        if (!t.live) {
            continue;
        }
        if (F::kBack ? t.stage > 0 : t.stage == F::kLast) {
            stored_fence(c);
        } else {
            __threadfence();
        }
        if (t.stage < F::kLast) {
            atomicAdd(&c.row_done[t.stage * c.row_tiles + t.row_tile], 1u);
        } else {
            tell_last(c, t.part);
        }
    }
}

/* ---- multiplying ---- */

constexpr int kTellBlock = 2; /* of K, when the tile before is told */

/* A warp's tile whose stores it has not told of. */
struct untold {
    ring<kTold> at;
    bool open = false;
    template <class C> __device__ __forceinline__ void tell(const shared<C> &s) {
        if (open) {
            __syncwarp();
            if ((threadIdx.x & 31) == 0) {
                tma_store_done();
                mbar_arrive(s.stored(at.index));
            }
            at.next();
            open = false;
        }
    }
};

constexpr int kActRows = 4; /* in flight */

/* Eight columns of kActRows rows from `row` on, `left` of them there. */
template <class T> struct act_piece {
    uint4 gate[kActRows], up[kActRows], da[kActRows];
    __device__ __forceinline__ void load(const gg_act &a, int64_t row, int left, int unit) {
#pragma unroll
        for (int r = 0; r < kActRows; r++) {
            int64_t at = row + min(r, left - 1);
            const T *h = (const T *)a.h + at * 2 * a.ffn + unit * 8;
            gate[r] = __ldcg((const uint4 *)h);
            up[r] = __ldcg((const uint4 *)(h + a.ffn));
            da[r] = __ldcg((const uint4 *)((const T *)a.a + at * a.ffn + unit * 8));
        }
    }
    __device__ __forceinline__ void store(const gg_act &a, int64_t row, int left, int unit,
                                          float (&sum)[kActRows]) {
#pragma unroll
        for (int r = 0; r < kActRows; r++) {
            if (r < left) {
                float weight = a.weight[row + r], g[8], u[8], d[8];
                unpack8<T>(gate[r], g);
                unpack8<T>(up[r], u);
                unpack8<T>(da[r], d);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    sum[r] = __fadd_rn(sum[r], act_back<T>(weight, g[i], u[i], d[i]));
                }
                T *dh = (T *)a.dh + (row + r) * 2 * a.ffn + unit * 8;
                *(uint4 *)dh = pack8<T>(g);
                *(uint4 *)(dh + a.ffn) = pack8<T>(u);
                *(uint4 *)((T *)a.a + (row + r) * a.ffn + unit * 8) = pack8<T>(d);
            }
        }
    }
};

/* SwiGLU's backward of the warpgroup's 64 rows, the next rows' loads under way; `scratch`
 * is 2 * kActRows * 4 floats. */
template <class T>
__device__ void act_tile(const gg_act &a, const gg_direct &d, const tile &t, int group,
                         float *scratch) {
    int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
    int rows = min(64, t.rows - group * 64), units = a.ffn / 8;
    int turns = (units + kActThreads - 1) / kActThreads; /* to go over a row */
    int steps = (rows + kActRows - 1) / kActRows * turns;
    int64_t first = t.row + group * 64;
    float sum[kActRows] = {};
    act_piece<T> next;
    if (thread < units) {
        next.load(a, first, min(kActRows, rows), thread);
    }
    bar_sync(kBarGroup + group, 128); /* no store reads the scratch any more */
    for (int step = 0, at = 0, turn = 0; step < steps; step++) {
        act_piece<T> piece = next;
        int left = min(kActRows, rows - at), unit = thread + turn * kActThreads;
        int then = turn + 1 < turns ? at : at + kActRows;
        int unit_then = turn + 1 < turns ? unit + kActThreads : thread;
        if (step + 1 < steps && unit_then < units) {
            next.load(a, first + then, min(kActRows, rows - then), unit_then);
        }
        if (unit < units) {
            piece.store(a, first + at, left, unit, sum);
        }
        turn = turn + 1 < turns ? turn + 1 : 0;
        if (turn == 0) {
            float *part = scratch + at / kActRows % 2 * (kActRows * 4);
#pragma unroll
            for (int r = 0; r < kActRows; r++) {
                float all = act_warp_sum(sum[r]);
                sum[r] = 0.0f;
                if (lane == 0) {
                    part[r * 4 + warp] = all;
                }
            }
            bar_sync(kBarGroup + group, 128);
            if (thread < left && a.dweight != nullptr) {
                *direct_dweight(d, a.dweight, t, first + at + thread) =
                    act_row_sum(part + thread * 4);
            }
        }
        at = then;
    }
}

template <class F, class C>
__device__ __forceinline__ void chain_epilogue(const gg_chain &c, const shared<C> &s,
                                               const gg_chain_maps &maps, const tile &t, int group,
                                               float (&acc)[C::kAcc]) {
    bool last = t.stage == F::kLast;
    if (last) {
        epilogue_direct<C>(c.stage[F::kLast], c.direct, s, maps, t, group, acc);
    } else {
        shared<typename F::First> same = {s.base};
        epilogue<typename F::First>(c.stage[0], same, maps.map[0], t, group, acc);
    }
}

template <class F, class C>
__device__ void chain_math(const gg_chain &c, const shared<C> &s, const gg_chain_maps &maps,
                           int group, float *scratch) {
    ring<kSlots> at;
    ring<C::kStages> from;
    const gg_params &all = c.stage[0];
    untold before;
    int lane = threadIdx.x & 31;
    shared<C> first = shared_of(s, 0), there = shared_of(s, min(lane, all.cluster - 1));
    while (true) {
        if (!mbar_test(s.known(at.index), at.parity)) {
            before.tell(s); /* the next tile may wait for it */
        }
        tile t = tile_wait(s, at);
        if (t.expert < 0) {
            break;
        }
        bool mine = t.live && t.rows > group * 64;
        if (is_act<F>(t)) {
            before.tell(s);
            if constexpr (F::kBack) {
                if (mine) {
                    act_tile<typename F::T>(c.act, c.direct, t, group, scratch);
                }
            }
            mine = false;
        } else {
            int blocks = (c.stage[t.stage].k + kTileK - 1) / kTileK;
            int tell = min(kTellBlock, blocks - 1);
            float acc[C::kAcc];
            if (mine) {
                /* Without values of their own they would be kept from tile to tile. */
#pragma unroll
                for (int i = 0; i < C::kAcc; i++) {
                    acc[i] = 0.0f;
                }
                keeper<C> keep(c.stage[0], maps.map[0], t, group);
                multiply_tile(
                    all, s, there, from, t, blocks, group, acc, keep,
                    [&](int i) {
                        if (i == tell) {
                            before.tell(s);
                        }
                    },
                    [](int) {});
                __syncwarp();
                if (lane == 0) {
                    slot_back(first, at);
                }
                chain_epilogue<F>(c, s, maps, t, group, acc);
            } else {
                before.tell(s);
                pass_tile(all, s, there, from, blocks);
            }
        }
        if (!mine) {
            __syncwarp();
            if (lane == 0) {
                slot_back(first, at);
            }
        }
        before.open = true;
        at.next();
    }
    before.tell(s);
}

template <class F, class C>
__device__ __forceinline__ void chain_barriers(const gg_chain &c, const shared<C> &s) {
    int cluster = c.stage[0].cluster;
    for (int i = 0; i < C::kStages; i++) {
        mbar_init(s.full(i), 1);
        mbar_init(s.empty(i), 8 * cluster);
    }
    for (int i = 0; i < kSlots; i++) {
        mbar_init(s.known(i), 1);
        mbar_init(s.used(i), 10 * cluster);
    }
    for (int i = 0; i < kTold; i++) {
        mbar_init(s.stored(i), 8);
    }
    mbar_init_fence();
}

template <class F>
__global__ void __launch_bounds__(kThreads, 1)
    chain_kernel(const __grid_constant__ gg_chain c, const __grid_constant__ gg_chain_maps maps) {
    using C = typename F::Second;
    extern __shared__ __align__(1024) uint8_t raw[];
    shared<C> s = {(smem_addr(raw) + 1023) & ~1023u};
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            tma_prefetch_map(&maps.map[i].a);
            tma_prefetch_map(&maps.map[i].b);
            tma_prefetch_map(&maps.map[i].c);
        }
        chain_barriers<F>(c, s);
    }
    cluster_sync();
    grid_wait();
    if (warp < 4) {
        regs_less<kFeedRegs>();
        bool one = (threadIdx.x & 31) == 0;
        if (warp == 0 && one) {
            chain_feed<F>(c, s, maps);
        } else if (warp == 1 && cluster_rank() == 0) {
            progress taken;
            feed_tiles(c.stage[0], s, [&](tile &t, int &, uint64_t &spin) {
                return chain_next(c, t, taken, spin);
            });
        } else if (warp == 2 && one) {
            chain_tell<F>(c, s);
        }
    } else {
        regs_more<kMathRegs>();
        int group = (warp >> 2) - 1;
        float *scratch =
            (float *)(raw + (s.base - smem_addr(raw)) + C::kOffStaging + group * 4 * 4096);
        chain_math<F>(c, s, maps, group, scratch);
    }
    __syncwarp();
    cluster_sync(); /* the other block may still write to this one */
}

template <bool kBack, class T> gg_kernel chain_find(int tile_n) {
    using Wide = chain_config<kBack, T, 256>;
    using Narrow = chain_config<kBack, T, 192>;
    if (tile_n == 256) {
        return gg_kernel{(const void *)chain_kernel<Wide>, kThreads, Wide::Second::kSmem};
    }
    return gg_kernel{(const void *)chain_kernel<Narrow>, kThreads, Narrow::Second::kSmem};
}

} /* namespace gg */
#endif
