/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_sum.cu - experts' rows back to their tokens: a token's rows of one rank are
 * summed in fp32 and rounded once, sent to the owner, and summed there in the order of
 * ranks.  Rows for others go first; while they cross the link the own tokens' rows are
 * summed, each as soon as its others are there, and are never stored in between.
 */
#include <stdint.h>

#include "backend/cuda/flex_sums.cuh"

namespace {

using namespace flex;

using namespace flex::sums;

template <typename T, bool Loads>
__global__ void __launch_bounds__(kThreads<Loads>, 1)
    flex_combine(const __grid_constant__ gpu_flex f, const char *rows, char *y, Cut cut) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char shared[];
    __shared__ char *peer[GPU_FLEX_RANKS];
    __shared__ int32_t before[GPU_FLEX_RANKS + 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k = f.top_k;
    const int64_t width = f.row_bytes;
    Sums s = sums_open(shared, cut);
    for (int i = threadIdx.x; i < f.ranks; i += blockDim.x)
        peer[i] = f.peer[i];
    if (threadIdx.x == 0) { /* peers' rows, from the next rank on */
        before[0] = 0;
        for (int i = 1; i < f.ranks; i++)
            before[i] = before[i - 1] + f.rows_of[(f.rank + i) % f.ranks];
    }
    if (!wait_all(f, f.at.back_credit, f.epoch - 1, GPU_FLEX_LATE_BACK_SLOT))
        return;
    struct Back {
        int source;
        int64_t row;
    };
    auto back_of = [&](int64_t i) {
        int n = 0;
        while (n + 2 < f.ranks && before[n + 1] <= i)
            n++;
        Back b = {f.rank + 1 + n, i - before[n]};
        b.source -= b.source >= f.ranks ? f.ranks : 0;
        return b;
    };
    sums_run<T, Loads>(
        s, (int64_t)before[f.ranks - 1] * cut.tiles, f.row_bytes,
        [&](int64_t i) {
            const Back b = back_of(piece_of(cut, f.row_bytes, i).row);
            return lane < k ? __ldg(f.fan + ((int64_t)b.source * f.max_tokens + b.row) * k + lane)
                            : -1;
        },
        [&](int64_t i, int32_t row) {
            const Piece p = piece_of(cut, f.row_bytes, i);
            return Summand{row >= 0 ? rows + row * width + p.at : nullptr, nullptr, false};
        },
        [&](int64_t i) {
            const Piece p = piece_of(cut, f.row_bytes, i);
            const Back b = back_of(p.row);
            return peer[b.source] + f.at.back + ((int64_t)f.rank * f.max_tokens + b.row) * width +
                   p.at;
        });
    tell_all(f, f.at.back_arrive);
    if (!wait_all(f, f.at.back_arrive, f.epoch, GPU_FLEX_LATE_BACK))
        return;
    bulk_acquire();
    struct Token {
        int32_t own, sum;
    };
    const char *arrived = f.peer[f.rank] + f.at.back;
    const int32_t own_first = f.rank * f.max_tokens, own_past = own_first + f.max_tokens;
    /* The own rows hang on the list, so the list is read two pieces ahead. */
    const int64_t past = (int64_t)f.tokens * cut.tiles;
    const int64_t step = (int64_t)gridDim.x * (Loads ? cut.groups : 1);
    auto sum_of = [&](int64_t i) {
        return i < past && lane < f.width ? __ldg(f.sum + i / cut.tiles * f.width + lane) : -1;
    };
    int32_t following =
        sum_of(blockIdx.x + (Loads ? (int64_t)(warp / kGroupWarps) * gridDim.x : 0));
    sums_run<T, Loads>(
        s, past, f.row_bytes,
        [&](int64_t i) {
            Token t = {-1, following};
            following = sum_of(i + step);
            const bool own = t.sum >= own_first && t.sum < own_past;
            const unsigned has = __ballot_sync(kAll, own);
            if (has != 0) {
                const int32_t at = __shfl_sync(kAll, t.sum, __ffs(has) - 1);
                t.own = lane < k ? __ldg(f.fan + (int64_t)at * k + lane) : -1;
            }
            t.sum = own ? -1 : t.sum;
            return t;
        },
        [&](int64_t i, const Token &t) {
            const Piece p = piece_of(cut, f.row_bytes, i);
            return Summand{t.own >= 0 ? rows + t.own * width + p.at : nullptr,
                           t.sum >= 0 ? arrived + t.sum * width + p.at : nullptr,
                           t.sum < own_first};
        },
        [&](int64_t i) {
            const Piece p = piece_of(cut, f.row_bytes, i);
            return y + p.row * width + p.at;
        });
    tell_all(f, f.at.back_credit);
#endif
}

template <typename T, bool Loads>
cudaError_t launch(cudaStream_t stream, const gpu_flex *f, const void *rows, void *y,
                   const Cut &cut) {
    const size_t bytes = sum_bytes(cut);
    cudaError_t e = cudaFuncSetAttribute(flex_combine<T, Loads>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (e != cudaSuccess)
        return e;
    flex_combine<T, Loads><<<f->blocks, kThreads<Loads>, bytes, stream>>>(
        *f, static_cast<const char *>(rows), static_cast<char *>(y), cut);
    return cudaGetLastError();
}

template <typename T>
cudaError_t launch(cudaStream_t stream, const gpu_flex *f, const void *rows, void *y) {
    const Cut cut = cut_sums(f->top_k + f->width - 1, f->row_bytes, f->stage);
    return cut.loads ? launch<T, true>(stream, f, rows, y, cut)
                     : launch<T, false>(stream, f, rows, y, cut);
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
