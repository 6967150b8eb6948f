/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_layout.cuh - a receiver's expert-major layout, made by every block for itself from
 * the counts that came beside the rows.
 */
#ifndef EPO_BACKEND_CUDA_FLEX_LAYOUT_CUH
#define EPO_BACKEND_CUDA_FLEX_LAYOUT_CUH

#include "backend/cuda/flex_device.cuh"

namespace flex {

/* The layout of this rank's expert-major rows from the sources' counts. */
struct Layout {
    int32_t *target; /* [R][El] */
    int32_t *first;  /* [El+1] */
    int32_t *count;  /* [El] */
    int32_t *before; /* [R+1] arrived rows of the sources before */
};

__device__ __forceinline__ void lay_out(const gpu_flex &f, const Layout &l) {
    const int words = f.local + 2;
    const uint32_t *counts = reinterpret_cast<const uint32_t *>(f.peer[f.rank] + f.at.counts);
    for (int e = threadIdx.x; e < f.local; e += blockDim.x) {
        int32_t sum = 0;
        for (int s = 0; s < f.ranks; s++) {
            l.target[s * f.local + e] = sum;
            sum += (int32_t) * (counts + s * words + e);
        }
        l.count[e] = sum;
    }
    if (threadIdx.x == 0) {
        int32_t rows = 0;
        for (int s = 0; s < f.ranks; s++) {
            l.before[s] = rows;
            rows += (int32_t) * (counts + s * words + f.local);
        }
        l.before[f.ranks] = rows;
    }
    __syncthreads();
    if (threadIdx.x < 32) { /* prefix over experts, 32 at a time */
        int32_t base = 0;
        for (int e0 = 0; e0 < f.local; e0 += 32) {
            const int e = e0 + threadIdx.x;
            const int32_t own = e < f.local ? (l.count[e] + f.align - 1) / f.align * f.align : 0;
            int32_t sum = own;
            for (int d = 1; d < 32; d *= 2) {
                const int32_t v = __shfl_up_sync(kAll, sum, d);
                sum += (int)threadIdx.x >= d ? v : 0;
            }
            if (e < f.local)
                l.first[e] = base + sum - own;
            base += __shfl_sync(kAll, sum, 31);
        }
        if (threadIdx.x == 0)
            l.first[f.local] = base;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < f.ranks * f.local; i += blockDim.x)
        l.target[i] += l.first[i % f.local];
    __syncthreads();
}

__device__ __forceinline__ void keep_layout(const gpu_flex &f, const Layout &l) {
    for (int e = threadIdx.x; e < f.local; e += blockDim.x) {
        f.first[e] = l.first[e];
        f.count[e] = l.count[e];
    }
    for (int s = threadIdx.x; s < f.ranks; s += blockDim.x)
        f.rows_of[s] = l.before[s + 1] - l.before[s];
    if (threadIdx.x == 0)
        f.first[f.local] = l.first[f.local];
}

__device__ __forceinline__ Layout layout_in(const gpu_flex &f, int32_t *maps) {
    const int all = f.ranks * f.local;
    return Layout{maps, maps + all, maps + all + f.local + 1, maps + all + 2 * f.local + 1};
}

/* Rows between one expert's last and the next one's first. */
__device__ __forceinline__ void zero_padding(const gpu_flex &f, const int32_t *first,
                                             const int32_t *count, char *rows) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int e = (int)blockIdx.x * warps + threadIdx.x / 32; e < f.local;
         e += (int)gridDim.x * warps)
        for (int32_t row = first[e] + count[e]; row < first[e + 1] && row < f.capacity; row++) {
            uint4 *to = reinterpret_cast<uint4 *>(rows + (int64_t)row * f.row_bytes);
            for (uint32_t u = lane; u < f.row_bytes / 16; u += 32)
                to[u] = make_uint4(0, 0, 0, 0);
            if (lane == 0)
                f.weight[row] = 0.0f;
        }
}

/* Source and place in its block of the i-th arrived row. */
__device__ __forceinline__ int source_of(const int32_t *before, int ranks, int64_t i) {
    int s = 0;
    while (s + 1 < ranks && before[s + 1] <= i)
        s++;
    return s;
}

inline size_t layout_bytes(const gpu_flex *f) {
    return (size_t)(f->ranks * f->local + 2 * f->local + f->ranks + 2) * sizeof(int32_t);
}

} // namespace flex

#endif
