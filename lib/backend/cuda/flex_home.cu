/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_home.cu - the owner's sum where every expert's row came home by itself: each rank's
 * rows in fp32 in order, rounded as that rank would have rounded its sum, then the ranks'
 * sums in rank order.
 *
 * A block takes a token at a time, a thread 16 bytes of it, all of whose summands are loaded
 * together; whose rows a token has is read and put in order for many tokens at once.
 */
#include <stdint.h>

#include "backend/cuda/flex_device.cuh"
#include "backend/cuda/kernels.h"
#include "backend/cuda/load.h"

namespace {

using namespace flex;

constexpr int kThreads = 256;
constexpr int kListed = 512; /* summands whose places a block reads at once */
constexpr int kFlight = 8;

struct Home {
    const char *src, *own;
    char *dst;
    const int32_t *index;
    uint32_t rows, row_bytes;
    int width, ranks, rank, whole; /* whole: dst takes 16 bytes at once */
    int32_t first[GPU_FLEX_RANKS];
};

/* A token's summand: where it lies; begins: it is its rank's first. */
struct Summand {
    const char *at;
    uint32_t begins;
};

/* The rank that a place speaks of; none: -1. */
__device__ __forceinline__ int rank_of(const Home &h, int32_t place) {
    if (place < 0)
        return place == -1 ? -1 : h.rank;
    int r = h.ranks - 1;
    while (r > 0 && h.first[r] > place)
        r--;
    return r;
}

/* The lists of the block's next `tokens` tokens, from `row` on and `step` apart: summands in the
 * order in which they are added, and how many they are.  Reads places[], ranks[] of all. */
__device__ void list_read(const Home &h, uint32_t row, uint32_t step, int tokens, int32_t *places,
                          int8_t *ranks, Summand *list, int *counts) {
    const int all = tokens * h.width;
    __syncthreads(); /* nobody reads the lists before any more */
    for (int i = threadIdx.x; i < all; i += kThreads) {
        const uint64_t at = row + (uint64_t)(i / h.width) * step;
        places[i] = at < h.rows ? __ldg(h.index + at * h.width + i % h.width) : -1;
        ranks[i] = (int8_t)rank_of(h, places[i]);
    }
    for (int i = threadIdx.x; i < tokens; i += kThreads)
        counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < all; i += kThreads) {
        const int token = i / h.width, base = token * h.width, mine = ranks[i];
        int before = 0;
        bool begins = true;
        for (int j = base; j < base + h.width; j++) {
            const bool same = ranks[j] == mine && j < i;
            before += ranks[j] >= 0 && (ranks[j] < mine || same);
            begins = begins && !same;
        }
        if (mine < 0)
            continue;
        const int32_t place = places[i];
        list[base + before] = Summand{place >= 0 ? h.src + (int64_t)place * h.row_bytes
                                                 : h.own + (int64_t)(-2 - place) * h.row_bytes,
                                      begins};
        atomicAdd(&counts[token], 1);
    }
    __syncthreads();
}

template <typename T> struct Total {
    float all[Unit<T>::n], part[Unit<T>::n];

    __device__ __forceinline__ void clear(float (&of)[Unit<T>::n]) {
#pragma unroll
        for (int i = 0; i < Unit<T>::n; i++)
            of[i] = 0.0f;
    }
    __device__ __forceinline__ void add(float (&to)[Unit<T>::n], uint4 v) {
        float terms[Unit<T>::n];
        unpack<T>(terms, v);
#pragma unroll
        for (int i = 0; i < Unit<T>::n; i++)
            to[i] += terms[i];
    }
    /* A rank's sum is complete. */
    __device__ __forceinline__ void close() {
        add(all, pack<T>(part));
        clear(part);
    }
};

/* One token's 16 bytes at `at` of each row. */
template <typename T>
__device__ __forceinline__ uint4 sum_unit(const Summand *list, int count, uint32_t at) {
    Total<T> sum;
    sum.clear(sum.all);
    sum.clear(sum.part);
    for (int base = 0; base < count; base += kFlight) {
        uint4 v[kFlight];
#pragma unroll
        for (int k = 0; k < kFlight; k++)
            if (base + k < count)
                v[k] = *reinterpret_cast<const uint4 *>(list[base + k].at + at);
#pragma unroll
        for (int k = 0; k < kFlight; k++)
            if (base + k < count) {
                if (list[base + k].begins != 0 && base + k > 0)
                    sum.close();
                sum.add(sum.part, v[k]);
            }
    }
    if (count > 0)
        sum.close();
    return pack<T>(sum.all);
}

/* The caller's rows may begin anywhere. */
template <typename T> __device__ __forceinline__ void put_unit(const Home &h, char *to, uint4 v) {
    if (h.whole != 0) {
        *reinterpret_cast<uint4 *>(to) = v;
        return;
    }
#pragma unroll
    for (int i = 0; i < Unit<T>::n; i++)
        reinterpret_cast<T *>(to)[i] = reinterpret_cast<const T *>(&v)[i];
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 4)
    sum_home(const __grid_constant__ Home h, const uint32_t *late) {
    __shared__ int32_t places[kListed];
    __shared__ int8_t ranks[kListed];
    __shared__ Summand list[kListed];
    __shared__ int counts[kListed];
    const bool broken = late != nullptr && *reinterpret_cast<const volatile uint32_t *>(late) != 0;
    if (__syncthreads_or(broken)) {
        const uint64_t bytes = (uint64_t)h.rows * h.row_bytes;
        for (uint64_t i = ((uint64_t)blockIdx.x * kThreads + threadIdx.x) * 16; i < bytes;
             i += (uint64_t)gridDim.x * kThreads * 16)
            put_unit<T>(h, h.dst + i, make_uint4(kAll, kAll, kAll, kAll));
        return;
    }
    const int listed = kListed / h.width;
    int taken = listed;
    for (uint32_t row = blockIdx.x; row < h.rows; row += gridDim.x, taken++) {
        if (taken == listed) {
            list_read(h, row, gridDim.x, listed, places, ranks, list, counts);
            taken = 0;
        }
        for (uint32_t at = threadIdx.x * 16; at < h.row_bytes; at += kThreads * 16)
            put_unit<T>(h, h.dst + (uint64_t)row * h.row_bytes + at,
                        sum_unit<T>(list + taken * h.width, counts[taken], at));
    }
}

bool aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

} // namespace

extern "C" const void *gpu_any_flex_home(void) { return (const void *)sum_home<float>; }

extern "C" cudaError_t gpu_kernel_home(cudaStream_t stream, int sms, const epo_rows_reduce *r,
                                       const uint32_t *late) {
    const uint32_t size = r->type == EPO_F32 ? 4 : 2;
    Home h = {};
    if (r->rows == 0 || r->elements == 0)
        return cudaSuccess;
    h.src = static_cast<const char *>(r->src);
    h.own = static_cast<const char *>(r->own);
    h.dst = static_cast<char *>(r->dst);
    h.index = r->index;
    h.rows = (uint32_t)r->rows;
    h.row_bytes = (uint32_t)r->elements * size;
    h.width = r->width;
    h.ranks = r->home->ranks;
    h.rank = r->home->rank;
    h.whole = aligned(h.dst) ? 1 : 0;
    if (h.ranks > GPU_FLEX_RANKS || h.width > kListed || h.row_bytes % 16 != 0 ||
        r->rows > INT32_MAX || !aligned(h.src) || !aligned(h.own))
        return cudaErrorInvalidValue;
    for (int i = 0; i < h.ranks; i++)
        h.first[i] = r->home->first[i];
    const uint32_t most = (uint32_t)(sms > 0 ? sms : 1) * 8;
    const uint32_t blocks = h.rows < most ? h.rows : most;
    switch (r->type) {
    case EPO_F32: sum_home<float><<<blocks, kThreads, 0, stream>>>(h, late); break;
    case EPO_BF16: sum_home<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(h, late); break;
    case EPO_F16: sum_home<__half><<<blocks, kThreads, 0, stream>>>(h, late); break;
    default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}
