/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_sum.cu - experts' rows back to their tokens: a token's rows of one rank are
 * summed in fp32 and rounded once, sent to the owner, and summed there in the order of
 * ranks.  Rows for others go first; while they cross the link the own tokens' rows are
 * summed, each as soon as its others are there, and are never stored in between.
 */
#include <stdint.h>

#include "backend/cuda/flex_feed.cuh"

namespace {

using namespace flex;

using namespace flex::sums;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/* Pieces of peers' tokens, from the next rank on, then those of own ones. */
template <typename S> struct Pieces {
    const gpu_flex &f;
    Feeder<S> &feeder;
    const Cut &cut;
    const char *rows;
    char *y;
    char *const *peer;     /* shared */
    const int32_t *before; /* shared: rows before each peer's */
    uint32_t peers, home;  /* their pieces; the first of own tokens', a group's first */
    bool told, opened;     /* peers' rows are there, and theirs here */

    struct Back {
        int source;
        int64_t row;
    };
    __device__ __forceinline__ Back back_of(int64_t row) const {
        int n = 0;
#pragma unroll 1
        while (n + 2 < f.ranks && before[n + 1] <= row)
            n++;
        Back b = {f.rank + 1 + n, row - before[n]};
        b.source -= b.source >= f.ranks ? f.ranks : 0;
        return b;
    }
    __device__ __forceinline__ bool has(uint32_t i) const { return i < peers || i >= home; }
    __device__ __forceinline__ Piece piece(uint32_t i) const {
        return piece_of(cut, f.row_bytes, i >= home ? i - home : min(i, peers - 1));
    }
    __device__ __forceinline__ bool own(int32_t sum) const {
        return sum >= f.rank * f.max_tokens && sum < (f.rank + 1) * f.max_tokens;
    }
    __device__ __forceinline__ int32_t list(uint32_t i, uint32_t in) const {
        return i >= home && in < (uint32_t)f.width
                   ? __ldg(f.sum + (int64_t)piece(i).row * f.width + in)
                   : -1;
    }
    __device__ __forceinline__ int32_t fetch(uint32_t i, uint32_t in, int32_t sum) const {
        const uint32_t first = threadIdx.x % 32 - in, lanes = feeder.lanes;
        const unsigned has = __ballot_sync(kAll, own(sum) && i >= home);
        const unsigned here = has >> first & (lanes == 32 ? kAll : (1u << lanes) - 1);
        int64_t row = __shfl_sync(kAll, sum, here != 0 ? first + __ffs(here) - 1 : 0);
        if (i < home) {
            const Back b = back_of((int64_t)piece(i).row);
            row = (int64_t)b.source * f.max_tokens + b.row;
        } else if (here == 0) {
            return -1;
        }
        return in < (uint32_t)f.top_k ? __ldg(f.fan + row * f.top_k + in) : -1;
    }
    /* Behind the last of peers' pieces all ranks are told. */
    __device__ __forceinline__ void enter(uint32_t i) {
        if (i < home || told)
            return;
        feeder.say(kTell);
        told = true;
    }
    __device__ __forceinline__ bool open() {
        opened = __all_sync(kAll, wait_words(f, f.at.back_arrive, f.epoch, GPU_FLEX_LATE_BACK,
                                             threadIdx.x % 32, 32));
        bulk_acquire();
        return opened;
    }
    __device__ __forceinline__ Summand places(uint32_t i, const Piece &p, int32_t sum,
                                              int32_t row) const {
        const bool theirs = i >= home && sum >= 0 && !own(sum);
        const char *arrived = f.peer[f.rank] + f.at.back + p.at;
        return Summand{row >= 0 ? rows + (int64_t)row * f.row_bytes + p.at : nullptr,
                       theirs ? arrived + (int64_t)sum * f.row_bytes : nullptr,
                       sum < f.rank * f.max_tokens};
    }
    __device__ __forceinline__ char *dest(uint32_t i, const Piece &p) const {
        if (i >= home)
            return y + (int64_t)p.row * f.row_bytes + p.at;
        const Back b = back_of(p.row);
        return peer[b.source] + f.at.back + ((int64_t)f.rank * f.max_tokens + b.row) * f.row_bytes +
               p.at;
    }
};
#endif

template <typename T, typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    flex_combine(const __grid_constant__ gpu_flex f, const char *rows, char *y, Cut cut) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char shared[];
    __shared__ char *peer[GPU_FLEX_RANKS];
    __shared__ int32_t before[GPU_FLEX_RANKS + 1];
    __shared__ uint32_t done;
    Team<S> *teams = reinterpret_cast<Team<S> *>(shared);
    const int warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < f.ranks; i += blockDim.x)
        peer[i] = f.peer[i];
    if (threadIdx.x == 0) {
        done = 0;
        before[0] = 0;
#pragma unroll 1
        for (int i = 1; i < f.ranks; i++)
            before[i] = before[i - 1] + f.rows_of[(f.rank + i) % f.ranks];
    }
    team_open(teams);
    bool good = true;
    if (warp >= S::kTeams * S::kWarps) {
        const int team = warp - S::kTeams * S::kWarps;
        Feeder<S> feeder(&teams[team], cut.tile, f.top_k);
        const uint32_t peers = (uint32_t)before[f.ranks - 1] * cut.tiles;
        const uint32_t step = gridDim.x * S::kTeams, turn = step * (32 / feeder.lanes);
        const uint32_t home = (peers + turn - 1) / turn * turn;
        Pieces<S> pieces = {f, feeder, cut, rows, y, peer, before, peers, home, false, false};
        good = feed<S>(feeder, blockIdx.x + (uint32_t)team * gridDim.x, step,
                       home + (uint32_t)f.tokens * cut.tiles, pieces);
        if (good)
            pieces.enter(home);
        good = good && (pieces.opened || pieces.open());
        feeder.say(kEnd);
    } else {
        good = __all_sync(kAll, wait_words(f, f.at.back_credit, f.epoch - 1,
                                           GPU_FLEX_LATE_BACK_SLOT, threadIdx.x % 32, 32));
        add_up<T, S>(&teams[warp / S::kWarps], cut.tile, warp % S::kWarps, good, [&] {
            uint32_t before_me = 0;
            __threadfence_block(); /* the last warp's fence is for all */
            __syncwarp();
            if (threadIdx.x % 32 == 0)
                before_me = atomicAdd(&done, 1u);
            if (__shfl_sync(kAll, before_me, 0) + 1 != S::kTeams * S::kWarps)
                return;
#pragma unroll 1
            for (int i = threadIdx.x % 32; i < f.ranks; i += 32) {
                __threadfence_system();
                flag_store(flag_word(f.peer[i], f.at.back_arrive, f.rank, blockIdx.x), f.epoch);
            }
        });
    }
    if (__syncthreads_and(good))
        tell_all(f, f.at.back_credit);
#endif
}

template <typename T, typename S>
cudaError_t launch_as(cudaStream_t stream, const gpu_flex *f, const void *rows, void *y) {
    const Cut cut = cut_feed(S::kSpan, S::kRing, f->top_k, f->row_bytes);
    cudaError_t e =
        cudaFuncSetAttribute(flex_combine<T, S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             (int)(S::kTeams * sizeof(Team<S>)));
    if (e != cudaSuccess)
        return e;
    flex_combine<T, S><<<f->blocks, S::kThreads, S::kTeams * sizeof(Team<S>), stream>>>(
        *f, static_cast<const char *>(rows), static_cast<char *>(y), cut);
    return cudaGetLastError();
}

template <typename T>
cudaError_t launch(cudaStream_t stream, const gpu_flex *f, const void *rows, void *y) {
    switch (f->shape) {
    case 1: return launch_as<T, Feed<6, 4, 2>>(stream, f, rows, y);
    case 2: return launch_as<T, Feed<3, 8, 1>>(stream, f, rows, y);
    default: return launch_as<T, Feed<4, 4, 2>>(stream, f, rows, y);
    }
}

} // namespace

extern "C" cudaError_t gpu_flex_combine(cudaStream_t stream, const gpu_flex *f, const void *rows,
                                        void *y) {
    if (!gpu_flex_served(f))
        return cudaErrorNotSupported;
    switch (f->type) {
    case EPO_F32: return launch<float>(stream, f, rows, y);
    case EPO_BF16: return launch<__nv_bfloat16>(stream, f, rows, y);
    case EPO_F16: return launch<__half>(stream, f, rows, y);
    default: return cudaErrorInvalidValue;
    }
}
