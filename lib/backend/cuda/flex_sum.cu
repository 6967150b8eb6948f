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

template <typename T, typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    flex_combine(const __grid_constant__ gpu_flex f, const char *rows, char *y, Cut back,
                 Cut home) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    __shared__ char *peer[GPU_FLEX_RANKS];
    __shared__ int32_t before[GPU_FLEX_RANKS + 1];
    __shared__ uint32_t taken[2];
    const int lane = threadIdx.x % 32, k = f.top_k;
    const int64_t width = f.row_bytes;
    for (int i = threadIdx.x; i < f.ranks; i += blockDim.x)
        peer[i] = f.peer[i];
    if (threadIdx.x == 0) { /* peers' rows, from the next rank on */
        taken[0] = taken[1] = 0;
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
    auto back_of = [&](int64_t row) {
        int n = 0;
        while (n + 2 < f.ranks && before[n + 1] <= row)
            n++;
        Back b = {f.rank + 1 + n, row - before[n]};
        b.source -= b.source >= f.ranks ? f.ranks : 0;
        return b;
    };
    sums_run<T, S>(
        &taken[0], blockIdx.x, gridDim.x, back, (uint32_t)before[f.ranks - 1] * back.tiles,
        f.row_bytes,
        [&](uint32_t i) {
            const Back b = back_of(piece_of(back, f.row_bytes, i).row);
            return lane < k ? __ldg(f.fan + ((int64_t)b.source * f.max_tokens + b.row) * k + lane)
                            : -1;
        },
        [&](uint32_t, int32_t row) { return row; },
        [&](uint32_t, const Piece &p, int32_t row) {
            return Summand{row >= 0 ? rows + row * width + p.at : nullptr, nullptr, false};
        },
        [&](uint32_t, const Piece &p) {
            const Back b = back_of(p.row);
            return peer[b.source] + f.at.back + ((int64_t)f.rank * f.max_tokens + b.row) * width +
                   p.at;
        });
    tell_all(f, f.at.back_arrive);
    if (!wait_all(f, f.at.back_arrive, f.epoch, GPU_FLEX_LATE_BACK))
        return;
    struct Token {
        int32_t own, sum;
    };
    const char *arrived = f.peer[f.rank] + f.at.back;
    const int32_t own_first = f.rank * f.max_tokens, own_past = own_first + f.max_tokens;
    sums_run<T, S>(
        &taken[1], blockIdx.x, gridDim.x, home, (uint32_t)f.tokens * home.tiles, f.row_bytes,
        [&](uint32_t i) {
            const int64_t token = piece_of(home, f.row_bytes, i).row;
            return lane < f.width ? __ldg(f.sum + token * f.width + lane) : -1;
        },
        [&](uint32_t, int32_t sum) {
            Token t = {-1, sum};
            const bool own = sum >= own_first && sum < own_past;
            const unsigned has = __ballot_sync(kAll, own);
            if (has != 0) {
                const int32_t at = __shfl_sync(kAll, sum, __ffs(has) - 1);
                t.own = lane < k ? __ldg(f.fan + (int64_t)at * k + lane) : -1;
            }
            t.sum = own ? -1 : sum;
            return t;
        },
        [&](uint32_t, const Piece &p, const Token &t) {
            return Summand{t.own >= 0 ? rows + t.own * width + p.at : nullptr,
                           t.sum >= 0 ? arrived + t.sum * width + p.at : nullptr,
                           t.sum < own_first};
        },
        [&](uint32_t, const Piece &p) { return y + p.row * width + p.at; });
    tell_all(f, f.at.back_credit);
#endif
}

template <typename T, typename S>
cudaError_t launch_as(cudaStream_t stream, const gpu_flex *f, const void *rows, void *y) {
    /* Of peers' rows the device alone knows how many there are. */
    const Cut cut = cut_sums((uint64_t)f->tokens, f->blocks, S::kWarps, S::kSpan, f->row_bytes);
    flex_combine<T, S><<<f->blocks, S::kThreads, 0, stream>>>(*f, static_cast<const char *>(rows),
                                                              static_cast<char *>(y), cut, cut);
    return cudaGetLastError();
}

template <typename T>
cudaError_t launch(cudaStream_t stream, const gpu_flex *f, const void *rows, void *y) {
    switch (f->shape) {
    case 1: return launch_as<T, Shape<12, 4, 4>>(stream, f, rows, y);
    case 2: return launch_as<T, Shape<12, 4, 3>>(stream, f, rows, y);
    case 3: return launch_as<T, Shape<20, 2, 4>>(stream, f, rows, y);
    case 4: return launch_as<T, Shape<24, 2, 2>>(stream, f, rows, y);
    case 5: return launch_as<T, Shape<16, 2, 6>>(stream, f, rows, y);
    case 6: return launch_as<T, Shape<10, 4, 4>>(stream, f, rows, y);
    default: return launch_as<T, Shape<16, 4, 2>>(stream, f, rows, y);
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
