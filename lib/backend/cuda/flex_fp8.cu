/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_fp8.cu - rows on the wire in e4m3 with an fp32 scale for each 128 elements, half
 * the bytes of bf16; expand gives the row's type back.  Own rows take the same way, so
 * that a token's values do not depend on where its experts are.
 *
 * A wire row: H bytes, then H / 128 scales.
 */
#include <cuda_fp8.h>

#include "backend/cuda/flex_layout.cuh"
#include "backend/cuda/kernels.h"
#include "backend/cuda/load.h"
#include "backend/route_flex_step.h"

namespace {

using namespace flex;

constexpr int kThreads = 512;
constexpr int kEach = 16;              /* elements of a lane: 16 bytes on the wire */
constexpr int kGroup = EPO_WIRE_GROUP; /* elements of a scale: 8 lanes */
constexpr float kLargest = 448.0f;     /* of e4m3 */
constexpr float kLeast = EPO_WIRE_LEAST;

template <typename T> struct Elements {
    static constexpr int packs = kEach / Unit<T>::n;
    uint4 p[packs];
};

template <typename T> __device__ __forceinline__ Elements<T> elements_at(const T *from, bool live) {
    Elements<T> v;
#pragma unroll
    for (int i = 0; i < Elements<T>::packs; i++)
        v.p[i] = live ? reinterpret_cast<const uint4 *>(from)[i] : make_uint4(0, 0, 0, 0);
    return v;
}

/* This lane's elements, quantised with its group's scale. */
template <typename T>
__device__ __forceinline__ uint4 quantise(const Elements<T> &v, float *scale) {
    constexpr int n = Unit<T>::n;
    float f[kEach], most = 0.0f;
#pragma unroll
    for (int i = 0; i < Elements<T>::packs; i++) {
        float part[n];
        unpack<T>(part, v.p[i]);
#pragma unroll
        for (int j = 0; j < n; j++) {
            f[i * n + j] = part[j];
            most = fmaxf(most, fabsf(part[j]));
        }
    }
    for (int d = 1; d < kGroup / kEach; d *= 2)
        most = fmaxf(most, __shfl_xor_sync(kAll, most, d));
    *scale = most > 0.0f ? fmaxf(most / kLargest, kLeast) : 1.0f;
    const float inverse = 1.0f / *scale;
    uint32_t words[kEach / 4];
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
        const uint32_t low = __nv_cvt_float2_to_fp8x2(
            make_float2(f[i] * inverse, f[i + 1] * inverse), __NV_SATFINITE, __NV_E4M3);
        const uint32_t high = __nv_cvt_float2_to_fp8x2(
            make_float2(f[i + 2] * inverse, f[i + 3] * inverse), __NV_SATFINITE, __NV_E4M3);
        words[i / 4] = low | high << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T> __device__ __forceinline__ Elements<T> give_back(uint4 wire, float scale) {
    const uint32_t words[kEach / 4] = {wire.x, wire.y, wire.z, wire.w};
    float f[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
        const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(
            (__nv_fp8x2_storage_t)(words[i / 4] >> (i % 4 * 8) & 0xffffu), __NV_E4M3);
        const float2 two = __half22float2(__half2(pair));
        f[i] = two.x * scale;
        f[i + 1] = two.y * scale;
    }
    Elements<T> v;
#pragma unroll
    for (int i = 0; i < Elements<T>::packs; i++)
        v.p[i] = pack<T>(f + i * Unit<T>::n);
    return v;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    flex_push8(const __grid_constant__ gpu_flex f, const T *x, int hidden) {
    const int lane = threadIdx.x % 32, warps = kThreads / 32;
    const uint32_t wire = f.wire_bytes;
    if (!wait_all(f, f.at.credit, f.epoch - 1, GPU_FLEX_LATE_SLOT))
        return;
    for (int64_t t = (int64_t)(threadIdx.x / 32) * gridDim.x + blockIdx.x; t < f.tokens;
         t += (int64_t)gridDim.x * warps) {
        const int32_t mine = lane < f.width ? __ldg(f.sum + t * f.width + lane) : -1;
        const int count = __popc(__ballot_sync(kAll, mine >= 0)); /* the first of the list */
        for (int at = lane * kEach; at - lane * kEach < hidden; at += 32 * kEach) {
            const bool live = at < hidden;
            const Elements<T> v = elements_at<T>(x + t * hidden + at, live);
            float scale;
            const uint4 out = quantise<T>(v, &scale);
            for (int j = 0; j < count; j++) {
                const int32_t row = __shfl_sync(kAll, mine, j), d = row / f.max_tokens;
                char *to = f.peer[d] + f.at.rows +
                           ((int64_t)f.rank * f.max_tokens + row - d * f.max_tokens) * wire;
                if (live)
                    *reinterpret_cast<uint4 *>(to + at) = out;
                if (live && at % kGroup == 0)
                    *reinterpret_cast<float *>(to + hidden + at / kGroup * 4) = scale;
            }
        }
    }
    tell_all(f, f.at.arrive);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    flex_expand8(const __grid_constant__ gpu_flex f, T *rows, int hidden) {
    extern __shared__ int32_t maps[];
    const int lane = threadIdx.x % 32, warps = kThreads / 32, k = f.top_k;
    const int words = epo_flex_meta_words(k);
    const Layout l = layout_in(f, maps);
    const char *window = f.peer[f.rank];
    if (!wait_all(f, f.at.arrive, f.epoch, GPU_FLEX_LATE_ROWS))
        return;
    lay_out(f, l);
    if (blockIdx.x == 0)
        keep_layout(f, l);
    zero_padding(f, l.first, l.count, reinterpret_cast<char *>(rows));
    for (int64_t i = (int64_t)(threadIdx.x / 32) * gridDim.x + blockIdx.x; i < l.before[f.ranks];
         i += (int64_t)gridDim.x * warps) {
        const int s = source_of(l.before, f.ranks, i);
        const int64_t from = (int64_t)s * f.max_tokens + i - l.before[s];
        int32_t place = -1;
        if (lane < k) {
            const int32_t *m = reinterpret_cast<const int32_t *>(window + f.at.meta) +
                               from * words + EPO_FLEX_META_HEAD + lane;
            const int32_t e = *(m), row = *(m + k);
            if ((uint32_t)e < (uint32_t)f.local)
                place = l.target[s * f.local + e] + row;
            if ((uint32_t)place >= (uint32_t)f.capacity)
                place = -1;
            if (place >= 0)
                f.weight[place] = __int_as_float(*(m + 2 * k));
            f.fan[from * k + lane] = place;
        }
        const unsigned has = __ballot_sync(kAll, place >= 0);
        const char *wire = window + f.at.rows + from * f.wire_bytes;
        for (int at = lane * kEach; at - lane * kEach < hidden; at += 32 * kEach) {
            const bool live = at < hidden;
            uint4 in = make_uint4(0, 0, 0, 0);
            float scale = 0.0f;
            if (live) {
                in = *reinterpret_cast<const uint4 *>(wire + at);
                scale = *reinterpret_cast<const float *>(wire + hidden + at / kGroup * 4);
            }
            const Elements<T> v = give_back<T>(in, scale);
            for (unsigned left = has; left != 0; left &= left - 1) {
                const int64_t row = __shfl_sync(kAll, place, __ffs(left) - 1);
#pragma unroll
                for (int j = 0; j < Elements<T>::packs; j++)
                    if (live)
                        reinterpret_cast<uint4 *>(rows + row * hidden + at)[j] = v.p[j];
            }
        }
    }
    tell_all(f, f.at.credit);
}

/* ---- one pass each, for exchanges by others ---- */

/* A caller's rows may lie anywhere. */
__device__ __forceinline__ bool whole_units(const void *p) { return ((uintptr_t)p & 15) == 0; }
template <typename T>
__device__ __forceinline__ Elements<T> elements_anywhere(const T *from, bool live, bool whole) {
    Elements<T> v;
    if (whole)
        return elements_at<T>(from, live);
    memset(&v, 0, sizeof v);
    for (int i = 0; i < kEach && live; i++)
        reinterpret_cast<T *>(&v)[i] = from[i];
    return v;
}

template <typename T>
__global__ void __launch_bounds__(256)
    pack_rows(char *dst, const T *src, uint64_t rows, int hidden, uint32_t wire) {
    const int lane = threadIdx.x % 32;
    const bool whole = whole_units(src);
    uint64_t row = (uint64_t)blockIdx.x * 8 + threadIdx.x / 32;
    for (; row < rows; row += (uint64_t)gridDim.x * 8)
        for (int at = lane * kEach; at - lane * kEach < hidden; at += 32 * kEach) {
            const bool live = at < hidden;
            const Elements<T> v = elements_anywhere<T>(src + row * hidden + at, live, whole);
            float scale;
            const uint4 out = quantise<T>(v, &scale);
            char *to = dst + row * wire;
            if (live)
                *reinterpret_cast<uint4 *>(to + at) = out;
            if (live && at % kGroup == 0)
                *reinterpret_cast<float *>(to + hidden + at / kGroup * 4) = scale;
        }
}

/* As gather_rows of kernels.cu, from wire rows. */
template <typename T>
__global__ void __launch_bounds__(256)
    unpack_rows(const __grid_constant__ epo_rows_gather g, uint32_t wire) {
    const int lane = threadIdx.x % 32, hidden = g.wire;
    const bool whole = whole_units(g.dst);
    uint64_t row = (uint64_t)blockIdx.x * 8 + threadIdx.x / 32;
    for (; row < g.rows; row += (uint64_t)gridDim.x * 8) {
        const int64_t from = g.index[row];
        const void *base = from >= 0 ? g.src : g.own;
        const char *in = static_cast<const char *>(base) + (from >= 0 ? from : -2 - from) * wire;
        T *to = static_cast<T *>(g.dst) + row * hidden;
        for (int at = lane * kEach; at < hidden; at += 32 * kEach) {
            Elements<T> v;
            if (from != -1)
                v = give_back<T>(*reinterpret_cast<const uint4 *>(in + at),
                                 *reinterpret_cast<const float *>(in + hidden + at / kGroup * 4));
            else
                memset(&v, 0, sizeof v);
#pragma unroll
            for (int j = 0; j < Elements<T>::packs && whole; j++)
                reinterpret_cast<uint4 *>(to + at)[j] = v.p[j];
            for (int j = 0; j < kEach && !whole; j++)
                to[at + j] = reinterpret_cast<const T *>(&v)[j];
        }
    }
}

unsigned pass_blocks(uint64_t rows, int sms) {
    const uint64_t want = (rows + 7) / 8, most = (uint64_t)(sms > 0 ? sms : 1) * 8;
    return (unsigned)(want < most ? want : most);
}

template <typename T> cudaError_t pack_by(cudaStream_t stream, int sms, const epo_wire_pack *p) {
    pack_rows<T><<<pass_blocks(p->rows, sms), 256, 0, stream>>>(
        static_cast<char *>(p->dst), static_cast<const T *>(p->src), p->rows, p->elements,
        (uint32_t)epo_wire_bytes((uint64_t)p->elements));
    return cudaGetLastError();
}

template <typename T>
cudaError_t unpack_by(cudaStream_t stream, int sms, const epo_rows_gather *g) {
    unpack_rows<T><<<pass_blocks(g->rows, sms), 256, 0, stream>>>(
        *g, (uint32_t)epo_wire_bytes((uint64_t)g->wire));
    return cudaGetLastError();
}

template <typename T> cudaError_t push_by(cudaStream_t stream, const gpu_flex *f, const void *x) {
    flex_push8<T><<<f->blocks, kThreads, 0, stream>>>(*f, static_cast<const T *>(x),
                                                      (int)(f->row_bytes / sizeof(T)));
    return cudaGetLastError();
}

template <typename T> cudaError_t expand_by(cudaStream_t stream, const gpu_flex *f, void *rows) {
    flex_expand8<T><<<f->blocks, kThreads, layout_bytes(f), stream>>>(
        *f, static_cast<T *>(rows), (int)(f->row_bytes / sizeof(T)));
    return cudaGetLastError();
}

bool fits(const gpu_flex *f) {
    const uint32_t size = f->type == EPO_F32 ? 4 : 2, hidden = f->row_bytes / size;
    return gpu_flex_served(f) && hidden % kGroup == 0 && f->wire_bytes == gpu_flex_wire8(hidden);
}

} // namespace

extern "C" uint32_t gpu_flex_wire8(uint32_t hidden) { return (uint32_t)epo_wire_bytes(hidden); }

extern "C" cudaError_t gpu_kernel_wire_pack(cudaStream_t stream, int sms, const epo_wire_pack *p) {
    if (p->rows == 0)
        return cudaSuccess;
    switch (p->type) {
    case EPO_F32: return pack_by<float>(stream, sms, p);
    case EPO_BF16: return pack_by<__nv_bfloat16>(stream, sms, p);
    case EPO_F16: return pack_by<__half>(stream, sms, p);
    default: return cudaErrorInvalidValue;
    }
}

extern "C" cudaError_t gpu_kernel_wire_gather(cudaStream_t stream, int sms,
                                              const epo_rows_gather *g) {
    if (g->rows == 0)
        return cudaSuccess;
    switch (g->type) {
    case EPO_F32: return unpack_by<float>(stream, sms, g);
    case EPO_BF16: return unpack_by<__nv_bfloat16>(stream, sms, g);
    case EPO_F16: return unpack_by<__half>(stream, sms, g);
    default: return cudaErrorInvalidValue;
    }
}

extern "C" cudaError_t gpu_flex_push8(cudaStream_t stream, const gpu_flex *f, const void *x) {
    if (!fits(f))
        return cudaErrorNotSupported;
    switch (f->type) {
    case EPO_F32: return push_by<float>(stream, f, x);
    case EPO_BF16: return push_by<__nv_bfloat16>(stream, f, x);
    case EPO_F16: return push_by<__half>(stream, f, x);
    default: return cudaErrorInvalidValue;
    }
}

extern "C" cudaError_t gpu_flex_expand8(cudaStream_t stream, const gpu_flex *f, void *rows) {
    if (!fits(f))
        return cudaErrorNotSupported;
    switch (f->type) {
    case EPO_F32: return expand_by<float>(stream, f, rows);
    case EPO_BF16: return expand_by<__nv_bfloat16>(stream, f, rows);
    case EPO_F16: return expand_by<__half>(stream, f, rows);
    default: return cudaErrorInvalidValue;
    }
}

extern "C" const void *gpu_any_flex_fp8(void) { return (const void *)pack_rows<float>; }
