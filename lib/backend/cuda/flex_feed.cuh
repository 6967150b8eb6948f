/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_feed.cuh - sums of rows by teams: one warp of a team reads which rows a sum has and has
 * them copied in bulk into the team's ring, the others add up what has come, each thread the
 * same bytes of every row.  So as much is under way as the ring holds, whatever the adding
 * takes, and what is told of a sum is told once for all of its bytes.  In fp32 in a fixed
 * order, rounded between ranks.
 */
#ifndef EPO_BACKEND_CUDA_FLEX_FEED_CUH
#define EPO_BACKEND_CUDA_FLEX_FEED_CUH

#include "backend/cuda/flex_device.cuh"

namespace flex {
namespace sums {

/* How rows are cut into pieces. */
struct Cut {
    uint32_t tile; /* bytes of a row at a time */
    uint32_t tiles;
};

/* One piece of a row to sum: its rows in the ring, one behind the other. */
struct alignas(16) Job {
    char *to;
    uint16_t slot, units; /* the first row's; of 16 bytes, that the piece has */
    uint8_t own, low, high, kind;
};

enum JobKind {
    kSum,
    kTell, /* no rows: all before has been stored */
    kEnd,
};

constexpr int kJobs = 16; /* of a team */

template <int Teams, int Warps, int Units> struct Feed {
    static constexpr int kTeams = Teams, kWarps = Warps, kUnits = Units;
    static constexpr int kThreads = 32 * Teams * (Warps + 1);
    static constexpr int kSpan = Warps * Units * 512; /* most bytes of a row at a time */
    static constexpr int kRing = (216 << 10) / Teams / 1024 * 1024; /* bytes */
};

/* Pieces of a row, of even size: `most` of them, a sum's rows, fit into the ring. */
inline Cut cut_feed(int span, int ring, int most, uint32_t row_bytes) {
    const uint32_t fit = (uint32_t)(ring / most) / 16 * 16;
    const uint32_t least = fit < (uint32_t)span ? fit : (uint32_t)span;
    Cut c;
    c.tiles = (row_bytes + least - 1) / least;
    c.tile = (row_bytes / 16 + c.tiles - 1) / c.tiles * 16;
    return c;
}

template <typename S> struct Team {
    char ring[S::kRing];
    Job job[kJobs];
    uint64_t full[kJobs], empty[kJobs];
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

struct Piece {
    uint32_t row, at, bytes;
};
__device__ __forceinline__ Piece piece_of(const Cut &cut, uint32_t row_bytes, uint32_t i) {
    Piece p;
    p.row = cut.tiles == 1 ? i : i / cut.tiles;
    p.at = (i - p.row * cut.tiles) * cut.tile;
    p.bytes = row_bytes - p.at < cut.tile ? row_bytes - p.at : cut.tile;
    return p;
}

/* What a lane knows of a piece: its own summand and its arrived row (NULL: none); `low`: the
 * arrived one is of a lower rank. */
struct Summand {
    const char *own, *arrived;
    bool low;
};

template <typename T> __device__ __forceinline__ void add_unit(float (&acc)[Unit<T>::n], uint4 v) {
    float terms[Unit<T>::n];
    unpack<T>(terms, v);
#pragma unroll
    for (int j = 0; j < Unit<T>::n; j++)
        acc[j] += terms[j];
}

template <typename S> __device__ __forceinline__ void team_open(Team<S> *teams) {
    for (int i = threadIdx.x; i < S::kTeams * kJobs; i += blockDim.x) {
        bar_init(&teams[i / kJobs].full[i % kJobs], 1);
        bar_init(&teams[i / kJobs].empty[i % kJobs], S::kWarps);
    }
    __syncthreads();
}

/* The warp that feeds a team: `lanes` of it, a power of two, know of a sum's rows, so it looks
 * at several sums at once. */
template <typename S> struct Feeder {
    Team<S> *team;
    uint32_t tile, slots, lanes;
    uint32_t jobs, freed; /* given, and taken back */
    uint32_t head, room;  /* the slot that is next, free ones */

    __device__ __forceinline__ Feeder(Team<S> *t, uint32_t tile_bytes, int most)
        : team(t), tile(tile_bytes), slots(S::kRing / tile_bytes), lanes(8), jobs(0), freed(0),
          head(0), room(slots) {
        while (lanes < (uint32_t)most)
            lanes *= 2;
    }
    /* The oldest job's slots, when it is done. */
    __device__ __forceinline__ void take_back() {
        const uint32_t e = freed++ % kJobs;
        bar_wait(&team->empty[e], (freed - 1) / kJobs & 1);
        room += team->job[e].own + team->job[e].low + team->job[e].high;
    }
    __device__ __forceinline__ void say(JobKind kind) {
        if (jobs - freed == (uint32_t)kJobs)
            take_back();
        const uint32_t e = jobs++ % kJobs;
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            team->job[e] = Job{nullptr, 0, 0, 0, 0, 0, (uint8_t)kind};
            bar_arrive(&team->full[e]);
        }
    }
    /* A sum of each `lanes` lanes, where they have one: own rows in order, then arrived ones in
     * order.  way.open(): until arrived rows may be read, while own ones are on their way,
     * way.opened from then on.  False: give up. */
    template <typename Way>
    __device__ __forceinline__ bool give(bool has, const Summand &s, char *to, uint32_t bytes,
                                         Way &way) {
        const uint32_t lane = threadIdx.x % 32, first = lane & ~(lanes - 1);
        const unsigned group = (lanes == 32 ? kAll : (1u << lanes) - 1) << first;
        const unsigned mine = group & ((1u << lane) - 1), others = (1u << first) - 1;
        const bool own = has && s.own != nullptr, arrived = has && s.arrived != nullptr;
        const unsigned a = __ballot_sync(kAll, own), b = __ballot_sync(kAll, arrived);
        const unsigned l = __ballot_sync(kAll, arrived && s.low);
        const uint32_t sums = __popc(__ballot_sync(kAll, has && lane == first));
        const uint32_t all = __popc(a) + __popc(b),
                       before = __popc(a & others) + __popc(b & others);
        const uint32_t owns = __popc(a & group), theirs = __popc(b & group);
        const uint32_t own_n = before + __popc(a & mine),
                       arrived_n = before + owns + __popc(b & mine);
        const uint32_t e = (jobs + first / lanes) % kJobs;
        uint64_t *const full = &team->full[e];
        auto slot = [&](uint32_t n) { return (head + n) % slots; };
        char *const own_at = team->ring + slot(own_n) * tile;
        char *const arrived_at = team->ring + slot(arrived_n) * tile;
        /* What cannot be read yet is not given back before it is: all of it has to fit. */
        if (b != 0 && !way.opened && all > slots && !way.open())
            return false;
        const bool opened = way.opened;
#pragma unroll 1
        while (jobs - freed + sums > (uint32_t)kJobs)
            take_back();
        __syncwarp();
        if (has && lane == first) {
            const uint32_t low = __popc(l & group);
            team->job[e] = Job{to,
                               (uint16_t)slot(before),
                               (uint16_t)(bytes / 16),
                               (uint8_t)owns,
                               (uint8_t)low,
                               (uint8_t)(theirs - low),
                               kSum};
            bar_expect(full, (owns + theirs) * bytes);
        }
        jobs += sums;
        __syncwarp();
#pragma unroll 1
        for (uint32_t n = 0, some; n < all; n += some) {
            while (room == 0)
                take_back();
            some = room < all - n ? room : all - n;
            room -= some;
            if (own && own_n - n < some)
                bulk_load(own_at, s.own, bytes, full);
            if (arrived && arrived_n - n < some && opened)
                bulk_load(arrived_at, s.arrived, bytes, full);
        }
        head = slot(all);
        if (b == 0 || opened)
            return true;
        const bool good = way.open(); /* what was given is waited for in any case */
        if (arrived)
            bulk_load(arrived_at, s.arrived, bytes, full);
        return good;
    }
};

/* Pieces first, first + step, ... below past that way.has(i): piece(i), and dest(i, p), where its
 * sum goes.  list(i, in) reads for lane `in` of a sum's what fetch(i, in, listed) needs, two turns
 * ahead; fetch reads what places(i, p, listed, fetched) needs to name the lane's summands, one
 * ahead; enter(i): those from i on are next. */
template <typename S, typename Way>
__device__ __forceinline__ bool feed(Feeder<S> &f, uint32_t first, uint32_t step, uint32_t past,
                                     Way &way) {
    const uint32_t in = threadIdx.x % f.lanes, turn = step * (32 / f.lanes);
    uint32_t i = first + threadIdx.x % 32 / f.lanes * step;
    auto within = [&](uint32_t at) { return at < past ? at : past - 1; };
    if (first >= past)
        return true;
    int32_t listed = way.list(within(i), in);
    int32_t fetched = way.fetch(within(i), in, listed);
    int32_t listed_next = way.list(within(i + turn), in);
#pragma unroll 1
    for (uint32_t base = first; base < past; base += turn, i += turn) {
        const int32_t fetched_next = way.fetch(within(i + turn), in, listed_next);
        const int32_t listed_after = way.list(within(i + 2 * turn), in);
        const Piece p = way.piece(within(i));
        way.enter(base);
        if (!f.give(i < past && way.has(i), way.places(within(i), p, listed, fetched),
                    way.dest(within(i), p), p.bytes, way))
            return false;
        listed = listed_next;
        fetched = fetched_next;
        listed_next = listed_after;
    }
    return true;
}

template <typename T, typename S> struct Adder {
    uint32_t at; /* the thread's first unit */
    float acc[S::kUnits][Unit<T>::n];
    uint4 out[S::kUnits];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int c = 0; c < S::kUnits; c++)
#pragma unroll
            for (int i = 0; i < Unit<T>::n; i++)
                acc[c][i] = 0.0f;
    }
    __device__ __forceinline__ void round() {
#pragma unroll
        for (int c = 0; c < S::kUnits; c++)
            out[c] = pack<T>(acc[c]);
    }
    __device__ __forceinline__ void add(const uint4 (&v)[S::kUnits]) {
#pragma unroll
        for (int c = 0; c < S::kUnits; c++)
            add_unit<T>(acc[c], v[c]);
    }
    __device__ __forceinline__ uint32_t unit(int c) const { return at + c * (S::kWarps * 512); }
    /* The next `rows` in the ring. */
    __device__ __forceinline__ void add_rows(const char *ring, uint32_t tile, uint32_t slots,
                                             uint32_t &slot, int rows) {
        auto load = [&](uint4(&v)[S::kUnits]) {
#pragma unroll
            for (int c = 0; c < S::kUnits; c++)
                v[c] = *reinterpret_cast<const uint4 *>(ring + slot * tile +
                                                        (unit(c) < tile ? unit(c) : 0));
            slot = slot + 1 < slots ? slot + 1 : 0;
        };
        uint4 v[S::kUnits], w[S::kUnits];
#pragma unroll 1
        for (; rows > 1; rows -= 2) {
            load(v);
            load(w);
            add(v);
            add(w);
        }
        if (rows > 0) {
            load(v);
            add(v);
        }
    }
    __device__ __forceinline__ void store(char *to, uint32_t bytes) const {
#pragma unroll
        for (int c = 0; c < S::kUnits; c++)
            if (unit(c) < bytes)
                *reinterpret_cast<uint4 *>(to + unit(c)) = out[c];
    }
};

/* A warp that adds, number `warp` of its team, to the end, and, `stores`, puts sums where they
 * belong.  tell(): all that it was given before is there. */
template <typename T, typename S, typename Tell>
__device__ __forceinline__ void add_up(Team<S> *team, uint32_t tile, int warp, bool stores,
                                       Tell tell) {
    const uint32_t slots = S::kRing / tile;
    const char *ring = team->ring;
    Adder<T, S> sum;
    sum.at = (uint32_t)(warp * 32 + (int)(threadIdx.x % 32)) * 16;
    for (uint32_t n = 0;; n++) {
        const uint32_t e = n % kJobs;
        bar_wait(&team->full[e], (n / kJobs) & 1);
        const Job job = team->job[e];
        uint32_t slot = job.slot;
        if (job.kind == kEnd)
            return;
        sum.clear();
        sum.add_rows(ring, tile, slots, slot, job.own);
        sum.round();
        if (job.low + job.high != 0) {
            sum.clear();
            sum.add_rows(ring, tile, slots, slot, job.low);
            if (job.own != 0)
                sum.add(sum.out);
            sum.add_rows(ring, tile, slots, slot, job.high);
            sum.round();
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            bar_arrive(&team->empty[e]);
        if (stores)
            sum.store(job.to, job.units * 16u);
        if (job.kind == kTell && stores)
            tell();
    }
}
#endif

} // namespace sums
} // namespace flex

#endif
