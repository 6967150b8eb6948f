/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_segments.cu - an exchange's segments by bulk copies: gathered rows, and rows that
 * are sums, straight to the peers' windows.
 */
#include <stdint.h>

#include "backend/cuda/flex_feed.cuh"
#include "backend/cuda/flex_ring.cuh"
#include "backend/cuda/load.h"

namespace {

using namespace flex;

struct Table {
    gpu_segment s[GPU_SEGMENTS];
    uint32_t before[GPU_SEGMENTS + 1]; /* rows of the segments before each */
    int count;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/* The last segment that begins at or before the row. */
__device__ __forceinline__ int segment_of(const Table &t, int64_t row) {
    int low = 0, high = t.count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (t.before[middle] <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Rows of all quarters in turns: while some cross a link the others use the memory. */
__device__ __forceinline__ int64_t in_turns(int64_t row, int64_t rows) {
#pragma unroll
    for (int i = 0; i < 2; i++)
        row = row % 2 == 0 ? row / 2 : (rows + 1) / 2 + row / 2;
    return row;
}
#endif

/* What a row that index leaves out is made of, a piece at a time. */
constexpr int kPiece = 4096;
[[maybe_unused]] __device__ uint4 nothing[kPiece / 16];

__global__ void __launch_bounds__(512, 1)
    copy_rows(const __grid_constant__ Table table, uint32_t row_bytes, Cut cut) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char shared[];
    Ring ring = ring_open(shared, cut);
    const int64_t begin = (int64_t)(threadIdx.x / 32) * gridDim.x + blockIdx.x;
    ring_run(
        ring, begin, (int64_t)table.before[table.count] * cut.tiles, (int64_t)gridDim.x * cut.warps,
        [&](int64_t i, int *bytes) {
            const int64_t row = i / cut.tiles;
            const int at = (int)(i - row * cut.tiles) * cut.bytes;
            const gpu_segment &s = table.s[segment_of(table, row)];
            const int64_t in = row - table.before[&s - table.s];
            *bytes = (int)row_bytes - at < cut.bytes ? (int)row_bytes - at : cut.bytes;
            const int64_t from = s.index ? (int64_t)__ldg(s.index + in) : in;
            return from >= 0 ? s.src + from * row_bytes + at
                             : reinterpret_cast<const char *>(nothing);
        },
        [&](int64_t) { return 0; },
        [&](int, int64_t i, char *stage) {
            if (threadIdx.x % 32 != 0)
                return;
            const int64_t row = i / cut.tiles;
            const int at = (int)(i - row * cut.tiles) * cut.bytes;
            const gpu_segment &s = table.s[segment_of(table, row)];
            const int64_t in = row - table.before[&s - table.s];
            const int bytes = (int)row_bytes - at < cut.bytes ? (int)row_bytes - at : cut.bytes;
            bulk_store(s.dst + in * row_bytes + at, stage, (uint32_t)bytes);
        });
    bulk_wait_all();
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/* A table's sums, piece by piece. */
struct Way {
    const Table &table;
    const sums::Cut &cut;
    uint32_t row_bytes, width;
    bool opened;

    __device__ __forceinline__ int64_t row_of(uint32_t i) const {
        return in_turns(sums::piece_of(cut, row_bytes, i).row, table.before[table.count]);
    }
    __device__ __forceinline__ bool has(uint32_t) const { return true; }
    __device__ __forceinline__ sums::Piece piece(uint32_t i) const {
        return sums::piece_of(cut, row_bytes, i);
    }
    __device__ __forceinline__ int32_t list(uint32_t, uint32_t) const { return -1; }
    __device__ __forceinline__ int32_t fetch(uint32_t i, uint32_t in, int32_t) const {
        const int64_t row = row_of(i);
        const int n = segment_of(table, row);
        return in < width ? __ldg(table.s[n].index + (row - table.before[n]) * width + in) : -1;
    }
    __device__ __forceinline__ sums::Summand places(uint32_t i, const sums::Piece &p, int32_t,
                                                    int32_t from) const {
        const char *src = table.s[segment_of(table, row_of(i))].src;
        return sums::Summand{from >= 0 ? src + (int64_t)from * row_bytes + p.at : nullptr, nullptr,
                             false};
    }
    __device__ __forceinline__ char *dest(uint32_t i, const sums::Piece &p) const {
        const int64_t row = row_of(i);
        const int n = segment_of(table, row);
        return table.s[n].dst + (row - table.before[n]) * row_bytes + p.at;
    }
    __device__ __forceinline__ void enter(uint32_t) const {}
    __device__ __forceinline__ bool open() const { return true; }
};
#endif

using SumTeams = sums::Feed<4, 4, 2>;

template <typename T>
__global__ void __launch_bounds__(SumTeams::kThreads, 1)
    sum_rows(const __grid_constant__ Table table, uint32_t row_bytes, int width, sums::Cut cut,
             const uint32_t *late) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char shared[];
    sums::Team<SumTeams> *teams = reinterpret_cast<sums::Team<SumTeams> *>(shared);
    const int warp = threadIdx.x / 32;
    sums::team_open(teams);
    if (warp < SumTeams::kTeams * SumTeams::kWarps) {
        sums::add_up<T, SumTeams>(&teams[warp / SumTeams::kWarps], cut.tile,
                                  warp % SumTeams::kWarps, true, [] {});
    } else {
        const int team = warp - SumTeams::kTeams * SumTeams::kWarps;
        sums::Feeder<SumTeams> feeder(&teams[team], cut.tile, width);
        Way way = {table, cut, row_bytes, (uint32_t)width, true};
        /* The wait before may have expired: the peers' slots are not free then. */
        const bool broken =
            late != nullptr && *reinterpret_cast<const volatile uint32_t *>(late) != 0;
        sums::feed<SumTeams>(feeder, blockIdx.x + (uint32_t)team * gridDim.x,
                             gridDim.x * SumTeams::kTeams,
                             broken ? 0 : table.before[table.count] * cut.tiles, way);
        feeder.say(sums::kEnd);
    }
#endif
}

/* Tables of all rows, GPU_SEGMENTS segments at a time. */
template <typename Launch>
cudaError_t by_table(const gpu_segment *segments, int count, Launch launch) {
    for (int first = 0; first < count; first += GPU_SEGMENTS) {
        Table table;
        table.count = count - first < GPU_SEGMENTS ? count - first : GPU_SEGMENTS;
        table.before[0] = 0;
        for (int i = 0; i < table.count; i++) {
            table.s[i] = segments[first + i];
            table.before[i + 1] = table.before[i] + (uint32_t)table.s[i].rows;
        }
        if (table.before[table.count] == 0)
            continue;
        cudaError_t e = launch(table);
        if (e != cudaSuccess)
            return e;
    }
    return cudaSuccess;
}

unsigned grid_of(const Table &t, int tiles, int warps, int blocks) {
    const uint64_t items = (uint64_t)t.before[t.count] * (uint64_t)tiles;
    const uint64_t need = (items + (uint64_t)warps - 1) / (uint64_t)warps;
    return (unsigned)(need < (uint64_t)blocks ? need : (uint64_t)blocks);
}

template <typename T>
cudaError_t sum_by_type(cudaStream_t stream, int blocks, const gpu_segment *segments, int count,
                        int width, uint32_t row_bytes, const uint32_t *late) {
    const size_t shared = SumTeams::kTeams * sizeof(sums::Team<SumTeams>);
    cudaError_t e =
        cudaFuncSetAttribute(sum_rows<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (e != cudaSuccess)
        return e;
    return by_table(segments, count, [&](const Table &table) {
        const sums::Cut cut = sums::cut_feed(SumTeams::kSpan, SumTeams::kRing, width, row_bytes);
        const unsigned grid = grid_of(table, (int)cut.tiles, SumTeams::kTeams, blocks);
        sum_rows<T>
            <<<grid, SumTeams::kThreads, shared, stream>>>(table, row_bytes, width, cut, late);
        return cudaGetLastError();
    });
}

} // namespace

extern "C" bool gpu_flex_bulk(void) {
    cudaFuncAttributes built;
    int device = 0, major = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        major < 9)
        return false;
    return cudaFuncGetAttributes(&built, copy_rows) == cudaSuccess && built.ptxVersion >= 90;
}

extern "C" cudaError_t gpu_flex_copy_segments(cudaStream_t stream, int blocks,
                                              const gpu_segment *segments, int count,
                                              uint32_t row_bytes) {
    const Cut cut = cut_rows(row_bytes, kPiece, 16);
    const size_t bytes = (size_t)cut.warps * kStages * ((size_t)cut.bytes + 8);
    cudaError_t e =
        cudaFuncSetAttribute(copy_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (e != cudaSuccess)
        return e;
    return by_table(segments, count, [&](const Table &table) {
        copy_rows<<<grid_of(table, cut.tiles, cut.warps, blocks), cut.warps * 32, bytes, stream>>>(
            table, row_bytes, cut);
        return cudaGetLastError();
    });
}

extern "C" cudaError_t gpu_flex_sum_segments(cudaStream_t stream, int blocks,
                                             const gpu_segment *segments, int count, int width,
                                             uint32_t row_bytes, epo_dtype type,
                                             const uint32_t *late) {
    switch (type) {
    case EPO_F32:
        return sum_by_type<float>(stream, blocks, segments, count, width, row_bytes, late);
    case EPO_BF16:
        return sum_by_type<__nv_bfloat16>(stream, blocks, segments, count, width, row_bytes, late);
    case EPO_F16:
        return sum_by_type<__half>(stream, blocks, segments, count, width, row_bytes, late);
    default: return cudaErrorInvalidValue;
    }
}

extern "C" const void *gpu_any_flex_segments(void) { return (const void *)copy_rows; }
