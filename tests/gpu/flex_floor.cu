/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_floor.cu - what a few SMs can move: rows of 4 KB read, written, and both, by
 * 16-byte accesses and by bulk copies, in scattered order.  GB/s for each SM.
 *
 *   flex_floor [SMS...]     [16 24 132]
 */
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/cuda/flex_device.cuh"

namespace {

using namespace flex;

constexpr uint32_t kRow = 4096;
constexpr int64_t kBytes = INT64_C(128) << 20;
constexpr int64_t kRows = kBytes / kRow;

#define MUST(call)                                                                                 \
    do {                                                                                           \
        cudaError_t e_ = (call);                                                                   \
        if (e_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(e_));                            \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* In 32 bits: a division in 64 takes longer than a copy. */
__device__ __forceinline__ int64_t scattered(int64_t i, uint32_t pieces = kRows) {
    return (uint32_t)i * 20011u % pieces;
}

/* A warp reads 512 * Units bytes at a time. */
template <int Units> __global__ void read_rows(const char *src, uint4 *out) {
    const int lane = threadIdx.x % 32;
    const int64_t step = (int64_t)gridDim.x * (blockDim.x / 32);
    uint4 sum = make_uint4(0, 0, 0, 0);
    for (int64_t i = (int64_t)(threadIdx.x / 32) * gridDim.x + blockIdx.x; i < kRows; i += step) {
        const char *row = src + scattered(i) * kRow + lane * 16;
        for (uint32_t at = 0; at < kRow; at += Units * 512) {
            uint4 v[Units];
#pragma unroll
            for (int u = 0; u < Units; u++)
                asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(v[u].x), "=r"(v[u].y), "=r"(v[u].z), "=r"(v[u].w)
                             : "l"(row + at + u * 512));
#pragma unroll
            for (int u = 0; u < Units; u++) {
                sum.x ^= v[u].x;
                sum.y ^= v[u].y;
                sum.z ^= v[u].z;
                sum.w ^= v[u].w;
            }
        }
    }
    if (sum.x == 1 && sum.y == 2 && sum.z == 3)
        *out = sum;
}

__global__ void write_rows(char *dst) {
    const int lane = threadIdx.x % 32;
    const int64_t step = (int64_t)gridDim.x * (blockDim.x / 32);
    for (int64_t i = (int64_t)(threadIdx.x / 32) * gridDim.x + blockIdx.x; i < kRows; i += step) {
        char *row = dst + scattered(i) * kRow + lane * 16;
#pragma unroll
        for (uint32_t at = 0; at < kRow; at += 512)
            *reinterpret_cast<uint4 *>(row + at) = make_uint4(lane, 1, 2, 3);
    }
}

/* One of `fan` rows is read, all are written. */
template <int Units> __global__ void fan_rows(char *dst, const char *src, int fan) {
    const int lane = threadIdx.x % 32;
    const int64_t step = (int64_t)gridDim.x * (blockDim.x / 32);
    for (int64_t i = (int64_t)(threadIdx.x / 32) * gridDim.x + blockIdx.x; i < kRows / fan;
         i += step) {
        const char *row = src + scattered(i) * kRow + lane * 16;
        for (uint32_t at = 0; at < kRow; at += Units * 512) {
            uint4 v[Units];
#pragma unroll
            for (int u = 0; u < Units; u++)
                v[u] = *reinterpret_cast<const uint4 *>(row + at + u * 512);
            for (int k = 0; k < fan; k++)
#pragma unroll
                for (int u = 0; u < Units; u++)
                    *reinterpret_cast<uint4 *>(dst + scattered(i * fan + k) * kRow + lane * 16 +
                                               at + u * 512) = v[u];
        }
    }
}

/* One thread of each warp stores pieces out of shared memory. */
__global__ void write_bulk(char *dst, uint32_t piece) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char shared[];
    const uint32_t pieces = (uint32_t)(kBytes / piece);
    const int64_t step = (int64_t)gridDim.x * (blockDim.x / 32);
    if (threadIdx.x % 32 != 0)
        return;
    for (int64_t i = (int64_t)(threadIdx.x / 32) * gridDim.x + blockIdx.x; i < pieces; i += step) {
        bulk_store(dst + scattered(i, pieces) * piece, shared + threadIdx.x / 32 * 256, piece);
        bulk_commit();
        bulk_wait_read<3>();
    }
    bulk_wait_all();
#endif
}

__global__ void read_bulk(const char *src, uint32_t piece, int deep) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char shared[];
    __shared__ uint64_t bar[16][8];
    const int warp = threadIdx.x / 32;
    const uint32_t pieces = (uint32_t)(kBytes / piece);
    const int64_t step = (int64_t)gridDim.x * (blockDim.x / 32);
    if (threadIdx.x % 32 != 0)
        return;
    for (int i = 0; i < deep; i++)
        bar_init(&bar[warp][i], 1);
    int64_t i = (int64_t)warp * gridDim.x + blockIdx.x;
    uint32_t n = 0, used = 0;
    char *stage = shared + (int64_t)warp * deep * piece;
    for (; i < pieces; i += step) {
        if (n >= (uint32_t)deep) {
            bar_wait(&bar[warp][used % deep], used / deep & 1);
            used++;
        }
        bar_expect(&bar[warp][n % deep], piece);
        bulk_load(stage + n % deep * piece, src + scattered(i, pieces) * piece, piece,
                  &bar[warp][n % deep]);
        n++;
    }
    for (; used < n; used++)
        bar_wait(&bar[warp][used % deep], used / deep & 1);
#endif
}

cudaStream_t stream;

template <typename Launch> void time_it(const char *what, int sms, double bytes, Launch launch) {
    cudaEvent_t a, b;
    float best = 1e9f;
    MUST(cudaEventCreate(&a));
    MUST(cudaEventCreate(&b));
    for (int i = 0; i < 6; i++) {
        float ms;
        MUST(cudaEventRecord(a, stream));
        launch();
        MUST(cudaGetLastError());
        MUST(cudaEventRecord(b, stream));
        MUST(cudaStreamSynchronize(stream));
        MUST(cudaEventElapsedTime(&ms, a, b));
        best = ms < best ? ms : best;
    }
    printf("floor %3d SMs  %-34s %8.1f us %7.1f GB/s, %6.1f each\n", sms, what, 1e3 * best,
           1e-6 * bytes / best, 1e-6 * bytes / best / sms);
    MUST(cudaEventDestroy(a));
    MUST(cudaEventDestroy(b));
}

void run(int sms, char *src, char *dst, char *far) {
    const double all = (double)kBytes;
    uint4 *out = reinterpret_cast<uint4 *>(dst);
    time_it("read, 32 warps x 4 units", sms, all,
            [&] { read_rows<4><<<sms, 1024, 0, stream>>>(src, out); });
    time_it("read, 32 warps x 8 units", sms, all,
            [&] { read_rows<8><<<sms, 1024, 0, stream>>>(src, out); });
    time_it("read, 16 warps x 8 units", sms, all,
            [&] { read_rows<8><<<sms, 512, 0, stream>>>(src, out); });
    time_it("read, 64 warps x 4 units", 2 * sms / 2, all,
            [&] { read_rows<4><<<2 * sms, 1024, 0, stream>>>(src, out); });
    MUST(cudaFuncSetAttribute(write_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
    MUST(cudaFuncSetAttribute(read_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
    for (uint32_t piece = 1024; piece <= 16384; piece *= 2) {
        char name[64];
        const int warps = piece <= 8192 ? 8 : 4;
        snprintf(name, sizeof name, "read in bulk, %u B, %d x %d deep", piece, warps, 3);
        time_it(name, sms, all,
                [&] { read_bulk<<<sms, warps * 32, 200 << 10, stream>>>(src, piece, 3); });
    }
    time_it("read in bulk, 2048 B, 16 x 6 deep", sms, all,
            [&] { read_bulk<<<sms, 512, 200 << 10, stream>>>(src, 2048, 6); });
    time_it("read in bulk, 4096 B, 8 x 6 deep", sms, all,
            [&] { read_bulk<<<sms, 256, 200 << 10, stream>>>(src, 4096, 6); });
    time_it("write, 32 warps", sms, all, [&] { write_rows<<<sms, 1024, 0, stream>>>(dst); });
    time_it("write, 8 warps", sms, all, [&] { write_rows<<<sms, 256, 0, stream>>>(dst); });
    for (uint32_t piece = 1024; piece <= 16384; piece *= 2) {
        char name[64];
        snprintf(name, sizeof name, "write in bulk, %u B", piece);
        time_it(name, sms, all, [&] { write_bulk<<<sms, 256, 200 << 10, stream>>>(dst, piece); });
    }
    time_it("read 1 write 4, 32 warps x 8", sms, all,
            [&] { fan_rows<8><<<sms, 1024, 0, stream>>>(dst, src, 4); });
    time_it("read 1 write 4, 16 warps x 8", sms, all,
            [&] { fan_rows<8><<<sms, 512, 0, stream>>>(dst, src, 4); });
    time_it("read 1 write 1, 32 warps x 8", sms, all,
            [&] { fan_rows<8><<<sms, 1024, 0, stream>>>(dst, src, 1); });
    if (far != nullptr) {
        time_it("write to the peer, 32 warps", sms, all,
                [&] { write_rows<<<sms, 1024, 0, stream>>>(far); });
        time_it("write to the peer in bulk, 4096 B", sms, all,
                [&] { write_bulk<<<sms, 256, 200 << 10, stream>>>(far, 4096); });
    }
}

} // namespace

int main(int argc, char **argv) {
    int devices = 0;
    char *src, *dst, *far = nullptr;
    MUST(cudaGetDeviceCount(&devices));
    if (devices > 1) {
        MUST(cudaSetDevice(1));
        MUST(cudaMalloc(&far, kBytes));
        MUST(cudaSetDevice(0));
        MUST(cudaDeviceEnablePeerAccess(1, 0));
    } else {
        printf("skipped: writes to a peer (one GPU here)\n");
    }
    MUST(cudaSetDevice(0));
    MUST(cudaStreamCreate(&stream));
    MUST(cudaMalloc(&src, kBytes));
    MUST(cudaMalloc(&dst, kBytes));
    MUST(cudaMemset(src, 1, kBytes));
    MUST(cudaMemset(dst, 2, kBytes));
    const int usual[] = {16, 24, 132};
    for (int i = 0; i < (argc > 1 ? argc - 1 : 3); i++)
        run(argc > 1 ? (int)strtol(argv[i + 1], nullptr, 10) : usual[i], src, dst, far);
    return 0;
}
