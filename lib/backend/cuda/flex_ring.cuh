/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_ring.cuh - rows through shared memory by bulk copies: each warp keeps a ring of
 * stages, one load per stage in flight, and every row that has come is stored to as many
 * places as it has.  A row is read once, however many places it has.
 */
#ifndef EPO_BACKEND_CUDA_FLEX_RING_CUH
#define EPO_BACKEND_CUDA_FLEX_RING_CUH

#include "backend/cuda/flex_device.cuh"

namespace flex {

constexpr int kStages = 4;
constexpr int kRingBytes = 184 << 10; /* of the 227 KiB; maps take the rest */

/* How rows are cut: tiles of a row, their bytes, warps of a block. */
struct Cut {
    int tiles, bytes, warps;
};

inline Cut cut_rows(uint32_t row_bytes, int most_bytes, int most_warps) {
    Cut c;
    c.tiles = (int)((row_bytes + most_bytes - 1) / most_bytes);
    c.bytes = (int)((row_bytes / 16 + c.tiles - 1) / c.tiles * 16);
    c.warps = kRingBytes / (kStages * c.bytes);
    c.warps = c.warps < most_warps ? c.warps : most_warps;
    return c;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

struct Ring {
    char *stage;
    uint64_t *bar;
    int bytes;
    uint32_t issued, used;

    __device__ __forceinline__ char *at(uint32_t n) { return stage + (n % kStages) * bytes; }
};

/* shared: kStages * bytes for each warp, then the barriers. */
__device__ __forceinline__ Ring ring_open(char *shared, const Cut &cut) {
    const int warp = threadIdx.x / 32;
    Ring r;
    r.bytes = cut.bytes;
    r.stage = shared + (int64_t)warp * kStages * cut.bytes;
    r.bar = reinterpret_cast<uint64_t *>(shared + (int64_t)cut.warps * kStages * cut.bytes) +
            warp * kStages;
    r.issued = r.used = 0;
    if (threadIdx.x % 32 == 0)
        for (int i = 0; i < kStages; i++)
            bar_init(&r.bar[i], 1);
    __syncwarp();
    return r;
}

/* Items begin, begin + step, ... below `past`.  source(i, &bytes): where item i lies.
 * list(i): what a lane needs to know to store it, read one item ahead.
 * emit(list, i, stage, bytes): each lane issues its stores. */
template <typename Source, typename List, typename Emit>
__device__ __forceinline__ void ring_run(Ring &r, int64_t begin, int64_t past, int64_t step,
                                         Source source, List list, Emit emit) {
    const int lane = threadIdx.x % 32;
    auto issue = [&](int64_t i) {
        if (i >= past)
            return;
        if (lane == 0) {
            int bytes;
            const char *from = source(i, &bytes);
            bar_expect(&r.bar[r.issued % kStages], (uint32_t)bytes);
            bulk_load(r.at(r.issued), from, (uint32_t)bytes, &r.bar[r.issued % kStages]);
        }
        r.issued++;
    };
    bulk_wait_read<0>();
    __syncwarp();
    for (int q = 0; q < kStages - 1; q++)
        issue(begin + q * step);
    if (begin >= past)
        return;
    auto next = list(begin);
    for (int64_t i = begin; i < past; i += step) {
        const auto now = next;
        if (i + step < past)
            next = list(i + step);
        bar_wait(&r.bar[r.used % kStages], (r.used / kStages) & 1);
        emit(now, i, r.at(r.used));
        bulk_commit();
        bulk_wait_read<1>();
        __syncwarp();
        issue(i + (kStages - 1) * step);
        r.used++;
    }
}

#endif

} // namespace flex

#endif
