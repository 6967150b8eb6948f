/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_rows.cu - token rows to their ranks, and from there to expert-major rows.
 */
#include <stdint.h>

#include "backend/cuda/flex_layout.cuh"
#include "backend/cuda/flex_ring.cuh"
#include "backend/route_flex_step.h"

namespace {

using namespace flex;

constexpr int kTile = 4096;
constexpr int kMostWarps = 16;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/* Where rows of this rank's tokens go. */
struct Targets {
    char *const *peer; /* in shared memory */
    uint64_t rows;
    int64_t before; /* rows of the sources before this one */
    int max_tokens;
    int64_t row_bytes;

    __device__ __forceinline__ char *at(int32_t sum) const {
        const int d = sum / max_tokens;
        return peer[d] + rows + (before + sum - d * max_tokens) * row_bytes;
    }
};

/* A piece of a row. */
struct Piece {
    int64_t row;
    int at, bytes;
};
__device__ __forceinline__ Piece piece_of(const Cut &cut, uint32_t row_bytes, int64_t i) {
    Piece p;
    p.row = cut.tiles == 1 ? i : i / cut.tiles;
    p.at = cut.tiles == 1 ? 0 : (int)(i - p.row * cut.tiles) * cut.bytes;
    const int left = (int)row_bytes - p.at;
    p.bytes = left < cut.bytes ? left : cut.bytes;
    return p;
}

__device__ __forceinline__ void share_peers(const gpu_flex &f, char **peer) {
    for (int i = threadIdx.x; i < f.ranks; i += blockDim.x)
        peer[i] = f.peer[i];
    __syncthreads();
}
__device__ __forceinline__ Targets targets_of(const gpu_flex &f, char *const *peer) {
    return Targets{peer, f.at.rows, (int64_t)f.rank * f.max_tokens, f.max_tokens, f.row_bytes};
}
#endif

__global__ void __launch_bounds__(kMostWarps * 32, 1)
    flex_push(const __grid_constant__ gpu_flex f, const char *x, Cut cut, bool own) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char shared[];
    __shared__ char *peer[GPU_FLEX_RANKS];
    share_peers(f, peer);
    Ring ring = ring_open(shared, cut);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Targets to = targets_of(f, peer);
    const int32_t own_first = f.rank * f.max_tokens, own_past = own_first + f.max_tokens;
    if (!wait_all(f, f.at.credit, f.epoch - 1, GPU_FLEX_LATE_SLOT))
        return;
    ring_run(
        ring, (int64_t)warp * gridDim.x + blockIdx.x, (int64_t)f.tokens * cut.tiles,
        (int64_t)gridDim.x * cut.warps,
        [&](int64_t i, int *bytes) {
            const Piece p = piece_of(cut, f.row_bytes, i);
            *bytes = p.bytes;
            return x + p.row * f.row_bytes + p.at;
        },
        [&](int64_t i) {
            const int64_t t = piece_of(cut, f.row_bytes, i).row;
            const int32_t v = lane < f.width ? __ldg(f.sum + t * f.width + lane) : -1;
            return !own && v >= own_first && v < own_past ? -1 : v;
        },
        [&](int32_t v, int64_t i, char *stage) {
            const Piece p = piece_of(cut, f.row_bytes, i);
            if (v >= 0)
                bulk_store(to.at(v) + p.at, stage, (uint32_t)p.bytes);
        });
    bulk_wait_all();
    tell_all(f, f.at.arrive);
#endif
}

__global__ void __launch_bounds__(kMostWarps * 32, 1)
    flex_expand(const __grid_constant__ gpu_flex f, const char *x, char *rows, Cut cut) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k = f.top_k;
    const int words = epo_flex_meta_words(k);
    Ring ring = ring_open(shared, cut);
    int32_t *maps = reinterpret_cast<int32_t *>(shared + cut.warps * kStages * (cut.bytes + 8));
    const Layout l = layout_in(f, maps);
    char *window = f.peer[f.rank];
    if (!wait_all(f, f.at.arrive, f.epoch, GPU_FLEX_LATE_ROWS))
        return;
    bulk_acquire();
    lay_out(f, l);
    if (blockIdx.x == 0)
        keep_layout(f, l);
    zero_padding(f, l.first, l.count, rows);
    struct Slot {
        int32_t row, window;
        float weight;
    };
    const int32_t *meta = reinterpret_cast<const int32_t *>(window + f.at.meta);
    auto window_row = [&](int64_t i) {
        const int s = source_of(l.before, f.ranks, i);
        return (int32_t)(s * f.max_tokens + i - l.before[s]);
    };
    ring_run(
        ring, (int64_t)warp * gridDim.x + blockIdx.x, (int64_t)l.before[f.ranks] * cut.tiles,
        (int64_t)gridDim.x * cut.warps,
        [&](int64_t i, int *bytes) {
            const Piece p = piece_of(cut, f.row_bytes, i);
            const int32_t at = window_row(p.row);
            *bytes = p.bytes;
            return (x != nullptr && at / f.max_tokens == f.rank
                        ? x + (int64_t)f.token[at] * f.row_bytes
                        : window + f.at.rows + (int64_t)at * f.row_bytes) +
                   p.at;
        },
        [&](int64_t i) {
            Slot v = {-1, window_row(piece_of(cut, f.row_bytes, i).row), 0.0f};
            if (lane < k) {
                const int32_t *m = meta + (int64_t)v.window * words + EPO_FLEX_META_HEAD + lane;
                const int32_t e = *(m), place = *(m + k);
                v.weight = __int_as_float(*(m + 2 * k));
                if ((uint32_t)e < (uint32_t)f.local)
                    v.row = l.target[v.window / f.max_tokens * f.local + e] + place;
            }
            return v;
        },
        [&](const Slot &v, int64_t i, char *stage) {
            const Piece p = piece_of(cut, f.row_bytes, i);
            const bool here = (uint32_t)v.row < (uint32_t)f.capacity;
            if (here)
                bulk_store(rows + (int64_t)v.row * f.row_bytes + p.at, stage, (uint32_t)p.bytes);
            if (p.at == 0 && lane < k) {
                f.fan[(int64_t)v.window * k + lane] = here ? v.row : -1;
                if (here)
                    f.weight[v.row] = v.weight;
            }
        });
    bulk_wait_all();
    tell_all(f, f.at.credit);
#endif
}

__global__ void __launch_bounds__(512, 1) flex_arrived(const __grid_constant__ gpu_flex f) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ int32_t map[];
    if (!wait_all(f, f.at.arrive, f.epoch, GPU_FLEX_LATE_ROWS))
        return;
    const Layout l = layout_in(f, map);
    lay_out(f, l);
    keep_layout(f, l);
    for (int i = threadIdx.x; i < f.ranks * f.blocks; i += blockDim.x)
        flag_store(flag_word(f.peer[i / f.blocks], f.at.credit, f.rank, i % f.blocks), f.epoch);
#endif
}

__global__ void __launch_bounds__(kMostWarps * 32, 1)
    flex_dispatch(const __grid_constant__ gpu_flex f, const char *x, char *rows, Cut cut) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char shared[];
    __shared__ char *peer[GPU_FLEX_RANKS];
    __shared__ int32_t before[GPU_FLEX_RANKS + 1];
    share_peers(f, peer);
    Ring ring = ring_open(shared, cut);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k = f.top_k;
    const int64_t begin = (int64_t)warp * gridDim.x + blockIdx.x;
    const int64_t step = (int64_t)gridDim.x * cut.warps;
    const Targets to = targets_of(f, peer);
    const int32_t own_first = f.rank * f.max_tokens, own_past = own_first + f.max_tokens;
    if (threadIdx.x == 0) { /* peers' rows alone */
        before[0] = 0;
        for (int s = 0; s < f.ranks; s++)
            before[s + 1] = before[s] + (s == f.rank ? 0 : f.rows_of[s]);
    }
    if (!wait_all(f, f.at.credit, f.epoch - 1, GPU_FLEX_LATE_SLOT))
        return;
    /* The own row's places hang on the list, so the list is read two items ahead. */
    auto sum_of = [&](int64_t i) {
        return i < (int64_t)f.tokens * cut.tiles && lane < f.width
                   ? __ldg(f.sum + piece_of(cut, f.row_bytes, i).row * f.width + lane)
                   : -1;
    };
    struct Places {
        int32_t sum, row;
    };
    int32_t following = sum_of(begin);
    ring_run(
        ring, begin, (int64_t)f.tokens * cut.tiles, step,
        [&](int64_t i, int *bytes) {
            const Piece p = piece_of(cut, f.row_bytes, i);
            *bytes = p.bytes;
            return x + p.row * f.row_bytes + p.at;
        },
        [&](int64_t i) {
            Places v = {following, -1};
            following = sum_of(i + step);
            const bool own = v.sum >= own_first && v.sum < own_past;
            const unsigned has = __ballot_sync(kAll, own);
            if (has != 0) {
                const int32_t at = __shfl_sync(kAll, v.sum, __ffs(has) - 1);
                v.row = lane < k ? __ldg(f.fan + (int64_t)at * k + lane) : -1;
            }
            v.sum = own ? -1 : v.sum;
            return v;
        },
        [&](const Places &v, int64_t i, char *stage) {
            const Piece p = piece_of(cut, f.row_bytes, i);
            if (v.sum >= 0)
                bulk_store(to.at(v.sum) + p.at, stage, (uint32_t)p.bytes);
            if (v.row >= 0)
                bulk_store(rows + (int64_t)v.row * f.row_bytes + p.at, stage, (uint32_t)p.bytes);
        });
    bulk_wait_all();
    tell_all(f, f.at.arrive);
    zero_padding(f, f.first, f.count, rows);
    if (!wait_all(f, f.at.arrive, f.epoch, GPU_FLEX_LATE_ROWS))
        return;
    bulk_acquire();
    auto window_row = [&](int64_t i) {
        const int s = source_of(before, f.ranks, i);
        return (int64_t)s * f.max_tokens + i - before[s];
    };
    const char *arrived = f.peer[f.rank] + f.at.rows;
    ring_run(
        ring, begin, (int64_t)before[f.ranks] * cut.tiles, step,
        [&](int64_t i, int *bytes) {
            const Piece p = piece_of(cut, f.row_bytes, i);
            *bytes = p.bytes;
            return arrived + window_row(p.row) * f.row_bytes + p.at;
        },
        [&](int64_t i) {
            const int64_t at = window_row(piece_of(cut, f.row_bytes, i).row);
            return lane < k ? __ldg(f.fan + at * k + lane) : -1;
        },
        [&](int32_t row, int64_t i, char *stage) {
            const Piece p = piece_of(cut, f.row_bytes, i);
            if (row >= 0)
                bulk_store(rows + (int64_t)row * f.row_bytes + p.at, stage, (uint32_t)p.bytes);
        });
    bulk_wait_all();
    tell_all(f, f.at.credit);
#endif
}

template <typename Kernel> cudaError_t room(Kernel *kernel, size_t bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}

size_t ring_bytes(const Cut &c) { return (size_t)c.warps * kStages * ((size_t)c.bytes + 8); }

} // namespace

extern "C" bool gpu_flex_served(const gpu_flex *f) {
    return gpu_flex_bulk() && f->row_bytes % 16 == 0 && f->row_bytes > 0 && f->blocks > 0 &&
           f->blocks <= GPU_FLEX_BLOCKS && f->ranks <= GPU_FLEX_RANKS &&
           f->ranks * f->local + 3 * f->local <= GPU_FLEX_COLUMNS;
}

extern "C" gpu_flex_window gpu_flex_lay_out(int ranks, int local, int top_k, int max_tokens,
                                            uint32_t row_bytes) {
    gpu_flex_window w;
    uint64_t at = 0;
    const uint64_t rows = (uint64_t)ranks * (uint64_t)max_tokens;
    auto place = [&at](uint64_t bytes) {
        const uint64_t here = at;
        at += (bytes + 127) / 128 * 128;
        return here;
    };
    const uint64_t flags = (uint64_t)ranks * GPU_FLEX_BLOCKS * sizeof(uint64_t);
    w.arrive = place(flags);
    w.credit = place(flags);
    w.back_arrive = place(flags);
    w.back_credit = place(flags);
    w.counts = place((uint64_t)ranks * (uint64_t)(local + 2) * sizeof(uint32_t));
    w.meta = place(rows * (uint64_t)epo_flex_meta_words(top_k) * sizeof(int32_t));
    w.rows = place(rows * row_bytes);
    w.back = place(rows * row_bytes);
    w.bytes = at;
    return w;
}

extern "C" cudaError_t gpu_flex_push(cudaStream_t stream, const gpu_flex *f, const void *x,
                                     bool own) {
    if (!gpu_flex_served(f))
        return cudaErrorNotSupported;
    const Cut cut = cut_rows(f->row_bytes, f->tile > 0 ? f->tile : kTile, kMostWarps);
    cudaError_t e = room(flex_push, ring_bytes(cut));
    if (e != cudaSuccess)
        return e;
    flex_push<<<f->blocks, cut.warps * 32, ring_bytes(cut), stream>>>(
        *f, static_cast<const char *>(x), cut, own);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_flex_arrived(cudaStream_t stream, const gpu_flex *f) {
    if (!gpu_flex_served(f))
        return cudaErrorNotSupported;
    flex_arrived<<<1, 512, layout_bytes(f), stream>>>(*f);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_flex_expand(cudaStream_t stream, const gpu_flex *f, const void *x,
                                       void *rows) {
    if (!gpu_flex_served(f))
        return cudaErrorNotSupported;
    const Cut cut = cut_rows(f->row_bytes, f->tile > 0 ? f->tile : kTile, kMostWarps);
    const size_t maps = layout_bytes(f);
    cudaError_t e = room(flex_expand, ring_bytes(cut) + maps);
    if (e != cudaSuccess)
        return e;
    flex_expand<<<f->blocks, cut.warps * 32, ring_bytes(cut) + maps, stream>>>(
        *f, static_cast<const char *>(x), static_cast<char *>(rows), cut);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_flex_dispatch(cudaStream_t stream, const gpu_flex *f, const void *x,
                                         void *rows) {
    if (!gpu_flex_served(f))
        return cudaErrorNotSupported;
    const Cut cut = cut_rows(f->row_bytes, f->tile > 0 ? f->tile : kTile, kMostWarps);
    cudaError_t e = room(flex_dispatch, ring_bytes(cut));
    if (e != cudaSuccess)
        return e;
    flex_dispatch<<<f->blocks, cut.warps * 32, ring_bytes(cut), stream>>>(
        *f, static_cast<const char *>(x), static_cast<char *>(rows), cut);
    return cudaGetLastError();
}
