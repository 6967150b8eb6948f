/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels.cu - the passes over rows: gather, segments, reduce, SwiGLU, sum.
 *
 * All are bound by memory: 16 bytes per access, several in flight per thread, one
 * warp or block per row.  Sums run in a fixed order that depends on the shape
 * only, never on the launch, so results do not depend on chunks or timing.
 */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "backend/cuda/gemm/gg_act.cuh"
#include "backend/cuda/kernels.h"
#include "backend/cuda/load.h"

namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;

template <typename T> __device__ __forceinline__ float to_float(T v);
template <> __device__ __forceinline__ float to_float<float>(float v) { return v; }
template <> __device__ __forceinline__ float to_float<__half>(__half v) { return __half2float(v); }
template <> __device__ __forceinline__ float to_float<__nv_bfloat16>(__nv_bfloat16 v) {
    return __bfloat162float(v);
}
template <typename T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float<float>(float v) { return v; }
template <> __device__ __forceinline__ __half from_float<__half>(float v) {
    return __float2half_rn(v);
}
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
    return __float2bfloat16_rn(v);
}

/* N elements moved by one access: 16 bytes, or one element where rows are not a
 * multiple of 16 bytes. */
template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T e[N]; };

/* ---- copies ---- */

/* One warp copies one row in units of V, kFlight loads in flight per thread: a few SMs
 * move as much as a link takes only if each has much under way. */
template <typename V, int kFlight>
__device__ __forceinline__ void row_copy(char *dst, const char *src, uint32_t units, int lane) {
    V *d = reinterpret_cast<V *>(dst);
    const V *s = reinterpret_cast<const V *>(src);
    uint32_t u = lane;
    for (; u + (kFlight - 1) * kWarp < units; u += kFlight * kWarp) {
        V v[kFlight];
#pragma unroll
        for (int i = 0; i < kFlight; i++)
            v[i] = s[u + i * kWarp];
#pragma unroll
        for (int i = 0; i < kFlight; i++)
            d[u + i * kWarp] = v[i];
    }
    for (; u < units; u += kWarp)
        d[u] = s[u];
}

template <typename V> __device__ __forceinline__ V zero_of() {
    V v;
    memset(&v, 0, sizeof v);
    return v;
}

template <typename V>
__device__ __forceinline__ void row_zero(char *dst, uint32_t units, int lane) {
    for (uint32_t u = lane; u < units; u += kWarp)
        reinterpret_cast<V *>(dst)[u] = zero_of<V>();
}

/* Set before a broken backend's waits are released, so that whatever ran because of that
 * sees it. */
__device__ __forceinline__ bool is_late(const uint32_t *late) {
    return late != nullptr && *reinterpret_cast<const volatile uint32_t *>(late) != 0;
}

__global__ void fetch_late(const uint32_t *cpu, uint32_t *word) {
    if (is_late(cpu))
        *word = 1;
}

/* NaN in every type. */
__device__ void all_ones(void *ptr, uint64_t bytes) {
    const uint64_t at = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (uint64_t i = at; i < bytes; i += (uint64_t)gridDim.x * blockDim.x)
        static_cast<unsigned char *>(ptr)[i] = 0xff;
}

__global__ void __launch_bounds__(kThreads)
    poison_late(const uint32_t *late, void *ptr, uint64_t bytes, void *ptr2, uint64_t bytes2) {
    if (!is_late(late))
        return;
    all_ones(ptr, bytes);
    all_ones(ptr2, bytes2);
}

template <typename V>
__global__ void __launch_bounds__(kThreads)
    gather_rows(char *dst, const char *src, const char *own, const int32_t *index, uint64_t rows,
                uint32_t row_bytes, const uint32_t *late) {
    const int lane = threadIdx.x % kWarp;
    if (is_late(late)) {
        all_ones(dst, rows * row_bytes);
        return;
    }
    const uint32_t units = row_bytes / sizeof(V);
    uint64_t row = (uint64_t)blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
    const uint64_t step = (uint64_t)gridDim.x * (kThreads / kWarp);
    for (; row < rows; row += step) {
        const int64_t from = index ? index[row] : (int64_t)row;
        char *to = dst + row * row_bytes;
        if (from >= 0)
            row_copy<V, 4>(to, src + (uint64_t)from * row_bytes, units, lane);
        else if (from < -1)
            row_copy<V, 4>(to, own + (uint64_t)(-2 - from) * row_bytes, units, lane);
        else
            row_zero<V>(to, units, lane);
    }
}

/* Rows of one word: a thread each. */
__global__ void __launch_bounds__(kThreads)
    gather_words(uint32_t *dst, const uint32_t *src, const uint32_t *own, const int32_t *index,
                 uint64_t rows, const uint32_t *late) {
    const bool broken = is_late(late);
    uint64_t row = (uint64_t)blockIdx.x * kThreads + threadIdx.x;
    for (; row < rows; row += (uint64_t)gridDim.x * kThreads) {
        const int64_t from = index ? index[row] : (int64_t)row;
        const uint32_t v = from >= 0 ? src[from] : from < -1 ? own[-2 - from] : 0;
        dst[row] = broken ? 0xffffffffu : v;
    }
}

/* One warp reads a row, kFlight units of a lane at a time, and stores it to all its places:
 * the lanes' rows of dst, -1: none. */
template <typename V, int kFlight>
__device__ __forceinline__ void row_fan(char *dst, const char *src, int32_t place, uint32_t units,
                                        uint32_t row_bytes, int lane) {
    const V *from = reinterpret_cast<const V *>(src);
    const unsigned to = __ballot_sync(0xffffffffu, place >= 0);
    for (uint32_t base = 0; base < units; base += kFlight * kWarp) {
        V v[kFlight];
#pragma unroll
        for (int i = 0; i < kFlight; i++)
            if (base + i * kWarp + lane < units)
                v[i] = from[base + i * kWarp + lane];
        for (unsigned left = to; left != 0; left &= left - 1) {
            const int32_t at = __shfl_sync(0xffffffffu, place, __ffs(left) - 1);
            V *there = reinterpret_cast<V *>(dst + (uint64_t)at * row_bytes);
#pragma unroll
            for (int i = 0; i < kFlight; i++)
                if (base + i * kWarp + lane < units)
                    there[base + i * kWarp + lane] = v[i];
        }
    }
}

template <typename V>
__global__ void __launch_bounds__(kThreads, 4)
    spread_rows(const __grid_constant__ epo_rows_spread s, const uint32_t *late) {
    const int lane = threadIdx.x % kWarp;
    char *dst = static_cast<char *>(s.dst);
    if (is_late(late)) {
        all_ones(dst, s.dst_rows * s.row_bytes);
        return;
    }
    const uint32_t units = s.row_bytes / sizeof(V);
    const uint64_t begin = (uint64_t)blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
    const uint64_t step = (uint64_t)gridDim.x * (kThreads / kWarp);
    uint64_t row = begin, before = 0;
    for (int i = 0; i < s.runs; before += s.run[i++].rows)
        for (; row < before + s.run[i].rows; row += step) {
            const epo_spread_run &r = s.run[i];
            const uint64_t in = row - before;
            const uint64_t from = r.index != nullptr ? (uint64_t)__ldg(r.index + in) : in;
            const int32_t place =
                lane < s.width ? __ldg(s.place + (r.first + in) * (uint64_t)s.width + lane) : -1;
            row_fan<V, 8>(dst, static_cast<const char *>(r.src) + from * s.row_bytes, place, units,
                          s.row_bytes, lane);
        }
    for (uint64_t first = begin * kWarp; s.pad != nullptr && first < s.dst_rows;
         first += step * kWarp) {
        const bool none = first + lane < s.dst_rows && __ldg(s.pad + first + lane) < 0;
        for (unsigned left = __ballot_sync(0xffffffffu, none); left != 0; left &= left - 1)
            row_zero<V>(dst + (first + __ffs(left) - 1) * s.row_bytes, units, lane);
    }
}

template <int N> struct Segments {
    gpu_raise raise;
    gpu_segment s[N];
    uint32_t before[N + 1]; /* rows of the segments before each */
    int count;
};

constexpr int kPushThreads = 1024;

/* This warp has stored its rows of the part.  The last one's fence stands behind all the
 * others', so whoever sees the words sees the rows. */
__device__ __forceinline__ void part_stored(const gpu_raise &r, int part, int lane) {
    __threadfence_system();
    __syncwarp();
    if (lane != 0)
        return;
    const uint32_t warps = gridDim.x * (blockDim.x / kWarp);
    if (atomicAdd(&r.stored[part], 1u) != warps - 1)
        return;
    r.stored[part] = 0;
    if (is_late(r.late))
        return;
    __threadfence_system();
    const uint64_t epoch = r.epoch + (r.counter != nullptr ? *r.counter : 0);
    for (int d = 0; d < r.ranks; d++)
        *(volatile uint64_t *)&r.words[d * r.rank_step + r.part[part].word] = epoch;
}

/* The last segment that begins at or before the row. */
template <int N> __device__ __forceinline__ int segment_of(const Segments<N> &table, uint32_t row) {
    int low = 0, high = table.count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table.before[middle] <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* One warp per row.  A part's rows are taken from both ends in turns: remote ones lie
 * first and own ones last, and the link is busy all the time that way.  Few, large blocks:
 * rows may be on their way while GEMMs want the other SMs, and a few SMs fill a link. */
template <typename V, int N>
__global__ void __launch_bounds__(kPushThreads, 1)
    copy_segments(const __grid_constant__ Segments<N> table, uint32_t row_bytes) {
    const int lane = threadIdx.x % kWarp;
    const uint32_t units = row_bytes / sizeof(V), all = table.before[table.count];
    const uint32_t warps = blockDim.x / kWarp;
    uint32_t i = blockIdx.x * warps + threadIdx.x / kWarp, begin = 0;
    int part = 0;
    /* The wait before may have expired: the peers' slots are not free then. */
    if (table.raise.late != nullptr &&
        __syncthreads_or(threadIdx.x == 0 && is_late(table.raise.late)))
        i = all;
    for (; i < all; i += gridDim.x * warps) {
        for (; part < table.raise.parts && i >= table.raise.part[part].end; part++) {
            part_stored(table.raise, part, lane);
            begin = table.raise.part[part].end;
        }
        const uint32_t end = part < table.raise.parts ? table.raise.part[part].end : all;
        const uint32_t k = i - begin, row = k % 2 ? end - 1 - k / 2 : begin + k / 2;
        const int s = segment_of(table, row);
        const gpu_segment &seg = table.s[s];
        const uint64_t at = row - table.before[s];
        const int64_t from = seg.index ? seg.index[at] : (int64_t)at;
        if (from >= 0)
            row_copy<V, 8>(seg.dst + at * row_bytes, seg.src + (uint64_t)from * row_bytes, units,
                           lane);
        else if (from == -1)
            row_zero<V>(seg.dst + at * row_bytes, units, lane);
    }
    for (; part < table.raise.parts; part++)
        part_stored(table.raise, part, lane);
}

/* ---- reduce ---- */

constexpr int kSummands = 8; /* in flight */

/* 16 bytes as they were loaded: elements taken apart at once would want a register each. */
template <typename T> struct Held { uint4 raw; };
__device__ __forceinline__ void held_add(float (&sum)[4], const Held<float> &h) {
    const uint32_t w[4] = {h.raw.x, h.raw.y, h.raw.z, h.raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum[i] += __uint_as_float(w[i]);
}
__device__ __forceinline__ void held_add(float (&sum)[8], const Held<__nv_bfloat16> &h) {
    const uint32_t w[4] = {h.raw.x, h.raw.y, h.raw.z, h.raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] += __uint_as_float(w[i] << 16);
        sum[2 * i + 1] += __uint_as_float(w[i] & 0xffff0000u);
    }
}
__device__ __forceinline__ void held_add(float (&sum)[8], const Held<__half> &h) {
    const uint32_t w[4] = {h.raw.x, h.raw.y, h.raw.z, h.raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] += __half2float(__ushort_as_half((unsigned short)(w[i] & 0xffffu)));
        sum[2 * i + 1] += __half2float(__ushort_as_half((unsigned short)(w[i] >> 16)));
    }
}
template <typename T> struct Single { T v; };
template <typename T>
__device__ __forceinline__ void held_add(float (&sum)[1], const Single<T> &h) {
    sum[0] += to_float<T>(h.v);
}
template <typename T, int N> struct held_of { using type = Held<T>; };
template <typename T> struct held_of<T, 1> { using type = Single<T>; };

/* What a block will sum, so many of its turns at a time: a row's loads then wait for no other
 * load.  A turn's `each` rows lie together, turns `step` rows apart. */
constexpr int kListed = 512;
__device__ __forceinline__ void list_fill(int32_t *list, int turns, const int32_t *index,
                                          uint64_t row, uint64_t step, uint64_t rows, int each,
                                          int width) {
    const uint64_t left = (rows - row + step - 1) / step;
    const int count = (left < turns ? (int)left : turns) * each * width;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const uint64_t turn = i / (each * width);
        const uint64_t at = (row + turn * step) * width + i % (each * width);
        list[i] = at < rows * width ? __ldg(index + at) : -1;
    }
    __syncthreads();
}

/* One block takes kSummands / kWide rows at a time, one unit of each per thread; all their
 * summands (kWide of a row at most, where it takes several) are loaded together and added in
 * ascending j. */
template <typename T, int N, int kWide>
__global__ void __launch_bounds__(kThreads, 4)
    reduce_rows(T *dst, const T *src, const T *own, const int32_t *index, uint64_t rows, int width,
                int elements, const uint32_t *late) {
    using P = Pack<T, N>;
    using H = typename held_of<T, N>::type;
    constexpr int kRows = kSummands / kWide;
    const int units = elements / N, turns = kRows == 1 ? (width + kWide - 1) / kWide : 1;
    const bool broken = __syncthreads_or(is_late(late)) != 0;
    __shared__ int32_t room[kListed];
    const uint64_t step = (uint64_t)gridDim.x * kRows;
    const int listed = kListed / (kRows * width); /* 0: a row is longer than the list */
    int taken = listed;
    for (uint64_t row = (uint64_t)blockIdx.x * kRows; row < rows && !broken; row += step) {
        const int32_t *list = index + row * (uint64_t)width;
        if (listed > 0 && taken == listed) {
            list_fill(room, listed, index, row, step, rows, kRows, width);
            taken = 0;
        }
        if (listed > 0)
            list = room + taken++ * kRows * width;
        const int left = rows - row < kRows ? (int)(rows - row) : kRows;
        for (int u = threadIdx.x; u < units; u += kThreads) {
            float sum[N];
            for (int turn = 0; turn < turns; turn++) {
                H v[kRows][kWide];
                int from[kRows][kWide];
#pragma unroll
                for (int r = 0; r < kRows; r++)
#pragma unroll
                    for (int k = 0; k < kWide; k++) {
                        const int j = turn * kWide + k;
                        from[r][k] = r < left && j < width ? list[r * width + j] : -1;
                    }
#pragma unroll
                for (int r = 0; r < kRows; r++)
#pragma unroll
                    for (int k = 0; k < kWide; k++) {
                        const int at = from[r][k];
                        const T *base = at >= 0 ? src : own;
                        const uint64_t there = (uint64_t)(at >= 0 ? at : -2 - at);
                        if (at != -1)
                            v[r][k] =
                                reinterpret_cast<const H *>(base + there * (uint64_t)elements)[u];
                    }
#pragma unroll
                for (int r = 0; r < kRows; r++) {
                    if (turn == 0)
#pragma unroll
                        for (int i = 0; i < N; i++)
                            sum[i] = 0.0f;
#pragma unroll
                    for (int k = 0; k < kWide; k++)
                        if (from[r][k] != -1)
                            held_add(sum, v[r][k]);
                    if (turn < turns - 1 || r >= left)
                        continue;
                    P out;
#pragma unroll
                    for (int i = 0; i < N; i++)
                        out.e[i] = from_float<T>(sum[i]);
                    reinterpret_cast<P *>(dst + (row + r) * (uint64_t)elements)[u] = out;
                }
            }
        }
    }
    if (broken)
        all_ones(dst, rows * (uint64_t)elements * sizeof(T));
}

/* ---- SwiGLU ---- */

using gg::kActThreads;

/* One block per row.  A weight of 0 gives zeros whatever h holds: alignment rows
 * are never written by a GEMM. */
template <typename T, int N>
__global__ void __launch_bounds__(kActThreads)
    swiglu_forward(const T *h, const float *weight, T *a, uint64_t first, int ffn) {
    using P = Pack<T, N>;
    const uint64_t row = first + blockIdx.x;
    const float w = weight[row];
    const P *gate = reinterpret_cast<const P *>(h + row * 2 * (uint64_t)ffn);
    const P *up = reinterpret_cast<const P *>(h + row * 2 * (uint64_t)ffn + ffn);
    P *out = reinterpret_cast<P *>(a + row * (uint64_t)ffn);
    for (int u = threadIdx.x; u < ffn / N; u += kActThreads) {
        P r = zero_of<P>();
        if (w != 0.0f) {
            const P g = gate[u], x = up[u];
#pragma unroll
            for (int i = 0; i < N; i++) {
                r.e[i] = from_float<T>(gg::act<T>(w, to_float<T>(g.e[i]), to_float<T>(x.e[i])));
            }
        }
        out[u] = r;
    }
}

template <typename T, int N>
__global__ void __launch_bounds__(kActThreads)
    swiglu_backward(const T *h, const float *weight, const T *da, T *dh, T *a, float *dw,
                    uint64_t first, int ffn) {
    using P = Pack<T, N>;
    __shared__ float part[kActThreads / kWarp];
    const uint64_t row = first + blockIdx.x;
    const float w = weight[row];
    const T *h_row = h + row * 2 * (uint64_t)ffn;
    T *dh_row = dh + row * 2 * (uint64_t)ffn;
    float sum = 0.0f;
    for (int u = threadIdx.x; u < ffn / N; u += kActThreads) {
        const P g = reinterpret_cast<const P *>(h_row)[u];
        const P x = reinterpret_cast<const P *>(h_row + ffn)[u];
        const P d = reinterpret_cast<const P *>(da + row * (uint64_t)ffn)[u];
        P dg, dx, act;
#pragma unroll
        for (int i = 0; i < N; i++) {
            float gate = to_float<T>(g.e[i]), up = to_float<T>(x.e[i]), v = to_float<T>(d.e[i]);
            sum = __fadd_rn(sum, gg::act_back<T>(w, gate, up, v));
            dg.e[i] = from_float<T>(gate);
            dx.e[i] = from_float<T>(up);
            act.e[i] = from_float<T>(v);
        }
        reinterpret_cast<P *>(dh_row)[u] = dg;
        reinterpret_cast<P *>(dh_row + ffn)[u] = dx;
        if (a != nullptr)
            reinterpret_cast<P *>(a + row * (uint64_t)ffn)[u] = act;
    }
    sum = gg::act_warp_sum(sum);
    if (threadIdx.x % kWarp == 0)
        part[threadIdx.x / kWarp] = sum;
    __syncthreads();
    if (dw != nullptr && threadIdx.x == 0)
        dw[row] = gg::act_row_sum(part);
}

__global__ void sum_slots(float *dst, const float *slots, uint64_t stride, int count, uint64_t n,
                          const uint32_t *late) {
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const bool broken = is_late(late);
    for (; i < n; i += (uint64_t)gridDim.x * blockDim.x) {
        float sum = slots[i];
        for (int s = 1; s < count; s++)
            sum += slots[s * stride + i];
        dst[i] = broken ? __uint_as_float(0xffffffffu) : sum;
    }
}

/* ---- launch ---- */

bool aligned(const void *p, uint64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

unsigned row_blocks(uint64_t rows, int sms) {
    const uint64_t want = (rows + kThreads / kWarp - 1) / (kThreads / kWarp);
    const uint64_t most = (uint64_t)(sms > 0 ? sms : 1) * 8;
    return (unsigned)(want < most ? want : most);
}

template <typename V>
void gather_launch(cudaStream_t stream, int sms, const epo_rows_gather *g, const uint32_t *late) {
    gather_rows<V><<<row_blocks(g->rows, sms), kThreads, 0, stream>>>(
        static_cast<char *>(g->dst), static_cast<const char *>(g->src),
        static_cast<const char *>(g->own), g->index, g->rows, g->row_bytes, late);
}

template <typename T, int N, int kWide>
void reduce_run(cudaStream_t stream, int sms, const epo_rows_reduce *r, const uint32_t *late) {
    const uint64_t most = (uint64_t)(sms > 0 ? sms : 1) * 8;
    const uint64_t need = (r->rows + kSummands / kWide - 1) / (kSummands / kWide);
    const unsigned blocks = (unsigned)(need < most ? need : most);
    reduce_rows<T, N, kWide><<<blocks, kThreads, 0, stream>>>(
        static_cast<T *>(r->dst), static_cast<const T *>(r->src), static_cast<const T *>(r->own),
        r->index, r->rows, r->width, r->elements, late);
}

template <typename T>
void reduce_launch(cudaStream_t stream, int sms, const epo_rows_reduce *r, const uint32_t *late) {
    constexpr int n = 16 / sizeof(T);
    const bool wide =
        r->elements % n == 0 && aligned(r->dst, 16) && aligned(r->src, 16) && aligned(r->own, 16);
    if (wide && r->width <= 2)
        reduce_run<T, n, 2>(stream, sms, r, late);
    else if (wide && r->width <= 4)
        reduce_run<T, n, 4>(stream, sms, r, late);
    else if (wide)
        reduce_run<T, n, 8>(stream, sms, r, late);
    else
        reduce_run<T, 1, 8>(stream, sms, r, late);
}

template <typename T, int N> void swiglu_run(cudaStream_t stream, const epo_swiglu *s) {
    const T *h = static_cast<const T *>(s->h);
    T *a = static_cast<T *>(s->a);
    /* gridDim.x reaches 2^31 - 1; a window never has so many rows. */
    const unsigned blocks = (unsigned)s->rows;
    if (s->da == nullptr)
        swiglu_forward<T, N><<<blocks, kActThreads, 0, stream>>>(h, s->w, a, s->row, s->ffn);
    else
        swiglu_backward<T, N>
            <<<blocks, kActThreads, 0, stream>>>(h, s->w, static_cast<const T *>(s->da),
                                                 static_cast<T *>(s->dh), a, s->dw, s->row, s->ffn);
}

template <typename T> void swiglu_launch(cudaStream_t stream, const epo_swiglu *s) {
    constexpr int n = 16 / sizeof(T);
    const bool wide = s->ffn % n == 0 && aligned(s->h, 16) && aligned(s->a, 16) &&
                      aligned(s->da, 16) && aligned(s->dh, 16);
    if (wide)
        swiglu_run<T, n>(stream, s);
    else
        swiglu_run<T, 1>(stream, s);
}

template <int N>
cudaError_t segments_launch(cudaStream_t stream, int blocks, const gpu_segment *segments, int count,
                            uint32_t row_bytes, const gpu_raise *raise) {
    static_assert(sizeof(Segments<N>) < 32000, "a launch's arguments");
    Segments<N> table;
    bool by16 = row_bytes % 16 == 0, by4 = row_bytes % 4 == 0;
    table.raise.parts = 0;
    table.raise.late = nullptr;
    if (raise != nullptr)
        table.raise = *raise;
    table.count = count;
    table.before[0] = 0;
    for (int i = 0; i < count; i++) {
        const gpu_segment &s = segments[i];
        table.s[i] = s;
        table.before[i + 1] = table.before[i] + (uint32_t)s.rows;
        by16 = by16 && aligned(s.dst, 16) && aligned(s.src, 16);
        by4 = by4 && aligned(s.dst, 4) && aligned(s.src, 4);
    }
    const uint32_t rows = table.before[count];
    const uint32_t warps = kPushThreads / kWarp, need = (rows + warps - 1) / warps;
    unsigned grid = need < (uint32_t)blocks ? need : (unsigned)blocks;
    if ((rows == 0 || row_bytes == 0) && table.raise.parts == 0)
        return cudaSuccess;
    grid = grid > 0 ? grid : 1;
    if (by16)
        copy_segments<uint4, N><<<grid, kPushThreads, 0, stream>>>(table, row_bytes);
    else if (by4)
        copy_segments<uint32_t, N><<<grid, kPushThreads, 0, stream>>>(table, row_bytes);
    else
        copy_segments<uint8_t, N><<<grid, kPushThreads, 0, stream>>>(table, row_bytes);
    return cudaGetLastError();
}

} // namespace

extern "C" const void *gpu_any_kernels(void) { return (const void *)poison_late; }

extern "C" cudaError_t gpu_kernel_poison(cudaStream_t stream, const uint32_t *late, void *ptr,
                                         uint64_t bytes, void *ptr2, uint64_t bytes2) {
    poison_late<<<64, kThreads, 0, stream>>>(late, ptr, bytes, ptr2, bytes2);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_gather(cudaStream_t stream, int sms, const epo_rows_gather *g,
                                         const uint32_t *late) {
    if (g->rows == 0 || g->row_bytes == 0)
        return cudaSuccess;
    const bool words = aligned(g->dst, 4) && aligned(g->src, 4) && aligned(g->own, 4);
    if (g->row_bytes == sizeof(uint32_t) && words) {
        const uint64_t want = (g->rows + kThreads - 1) / kThreads;
        const uint64_t most = (uint64_t)(sms > 0 ? sms : 1) * 8;
        const unsigned blocks = (unsigned)(want < most ? want : most);
        gather_words<<<blocks, kThreads, 0, stream>>>(
            static_cast<uint32_t *>(g->dst), static_cast<const uint32_t *>(g->src),
            static_cast<const uint32_t *>(g->own), g->index, g->rows, late);
        return cudaGetLastError();
    }
    if (g->row_bytes % 16 == 0 && aligned(g->dst, 16) && aligned(g->src, 16) && aligned(g->own, 16))
        gather_launch<uint4>(stream, sms, g, late);
    else if (g->row_bytes % 4 == 0 && words)
        gather_launch<uint32_t>(stream, sms, g, late);
    else
        gather_launch<uint8_t>(stream, sms, g, late);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_spread(cudaStream_t stream, int sms, const epo_rows_spread *s,
                                         const uint32_t *late) {
    if (s->dst_rows == 0 || s->row_bytes == 0)
        return cudaSuccess;
    if (s->width > kWarp)
        return cudaErrorInvalidValue;
    bool by16 = s->row_bytes % 16 == 0 && aligned(s->dst, 16);
    bool by4 = s->row_bytes % 4 == 0 && aligned(s->dst, 4);
    uint64_t rows = s->pad != NULL ? s->dst_rows / kWarp + 1 : 1;
    for (int i = 0; i < s->runs; i++) {
        by16 = by16 && aligned(s->run[i].src, 16);
        by4 = by4 && aligned(s->run[i].src, 4);
        rows += s->run[i].rows;
    }
    const unsigned blocks = row_blocks(rows, sms);
    if (by16)
        spread_rows<uint4><<<blocks, kThreads, 0, stream>>>(*s, late);
    else if (by4)
        spread_rows<uint32_t><<<blocks, kThreads, 0, stream>>>(*s, late);
    else
        spread_rows<uint8_t><<<blocks, kThreads, 0, stream>>>(*s, late);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_segments(cudaStream_t stream, int blocks,
                                           const gpu_segment *segments, int count,
                                           uint32_t row_bytes, const gpu_raise *raise) {
    if (raise != nullptr && raise->parts > 0 && count > GPU_SEGMENTS)
        return cudaErrorInvalidValue;
    if (count <= GPU_SEGMENTS_FEW)
        return segments_launch<GPU_SEGMENTS_FEW>(stream, blocks, segments, count, row_bytes, raise);
    if (count <= GPU_SEGMENTS_SOME)
        return segments_launch<GPU_SEGMENTS_SOME>(stream, blocks, segments, count, row_bytes,
                                                  raise);
    cudaError_t error = cudaSuccess;
    for (int first = 0; first < count && error == cudaSuccess; first += GPU_SEGMENTS) {
        const int more = count - first < GPU_SEGMENTS ? count - first : GPU_SEGMENTS;
        error =
            segments_launch<GPU_SEGMENTS>(stream, blocks, segments + first, more, row_bytes, raise);
    }
    return error;
}

extern "C" cudaError_t gpu_kernel_reduce(cudaStream_t stream, int sms, const epo_rows_reduce *r,
                                         const uint32_t *late) {
    if (r->rows == 0 || r->elements == 0)
        return cudaSuccess;
    switch (r->type) {
    case EPO_F32: reduce_launch<float>(stream, sms, r, late); break;
    case EPO_BF16: reduce_launch<__nv_bfloat16>(stream, sms, r, late); break;
    case EPO_F16: reduce_launch<__half>(stream, sms, r, late); break;
    default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_swiglu(cudaStream_t stream, const epo_swiglu *s) {
    if (s->rows == 0 || s->ffn == 0)
        return cudaSuccess;
    switch (s->type) {
    case EPO_F32: swiglu_launch<float>(stream, s); break;
    case EPO_BF16: swiglu_launch<__nv_bfloat16>(stream, s); break;
    case EPO_F16: swiglu_launch<__half>(stream, s); break;
    default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_late_fetch(cudaStream_t stream, const uint32_t *cpu,
                                             uint32_t *word) {
    fetch_late<<<1, 1, 0, stream>>>(cpu, word);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_sum(cudaStream_t stream, float *dst, const float *slots,
                                      uint64_t stride, int count, uint64_t n,
                                      const uint32_t *late) {
    if (n == 0)
        return cudaSuccess;
    const uint64_t want = (n + 255) / 256;
    sum_slots<<<(unsigned)(want < 1024 ? want : 1024), 256, 0, stream>>>(dst, slots, stride, count,
                                                                         n, late);
    return cudaGetLastError();
}
