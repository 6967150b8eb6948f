/* SPDX-License-Identifier: Apache-2.0
 *
 * replay.cu - see replay.h.  A wait is one warp, which looks at words in the CPU's memory
 * and gives up at its limit: nobody else can end it, the graph being launched by the
 * caller.
 */
#include "backend/cuda/replay.h"

namespace {

__device__ __forceinline__ uint64_t load_word(const uint64_t *p) {
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_word(uint64_t *p, uint64_t v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ uint64_t now_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__device__ __forceinline__ bool is_late(const uint32_t *late) {
    return *reinterpret_cast<const volatile uint32_t *>(late) != 0;
}

/* The first one to find something wrong tells it. */
__device__ void tell(const gpu_told &to, const gpu_note &what) {
    if (atomicCAS(to.claim, 0u, 1u) == 0u) {
        gpu_note silent = what;
        silent.kind = GPU_BOARD_NONE;
        to.board->error = silent;
        __threadfence_system();
        *reinterpret_cast<volatile uint64_t *>(&to.board->error.kind) = what.kind;
    }
    *reinterpret_cast<volatile uint32_t *>(to.late) = 1;
    __threadfence_system();
}

/* Words below the target: the first of them and how many, of the whole warp. */
__device__ __forceinline__ void look(const gpu_wait &w, uint64_t target, int *first, int *missing) {
    int mine = 0, at = w.count;
    for (int i = threadIdx.x; i < w.count; i += 32)
        if (static_cast<int64_t>(load_word(w.words + i) - target) < 0) {
            mine++;
            at = i < at ? i : at;
        }
    *missing = __reduce_add_sync(0xffffffffu, mine);
    *first = __reduce_min_sync(0xffffffffu, at);
}

__global__ void __launch_bounds__(32) wait_words(gpu_wait w) {
    const uint64_t target = *w.counter + w.epoch, start = now_ns();
    bool warned = false;
    int first = 0, missing = 0;
    for (look(w, target, &first, &missing); missing > 0; look(w, target, &first, &missing)) {
        if (__any_sync(0xffffffffu, is_late(w.told.late)))
            return;
        const uint64_t age = __shfl_sync(0xffffffffu, now_ns() - start, 0);
        const gpu_note note = {
            GPU_BOARD_LATE, w.what, w.chunk, w.rank + first, missing, w.count, 0, age, 0};
        if (age > w.warn_ns && !warned && threadIdx.x == 0) {
            gpu_note silent = note;
            silent.kind = GPU_BOARD_NONE;
            w.told.board->warning = silent;
            __threadfence_system();
            *reinterpret_cast<volatile uint64_t *>(&w.told.board->warning.kind) = note.kind;
        }
        warned = warned || age > w.warn_ns;
        if (age > w.limit_ns) {
            if (threadIdx.x == 0)
                tell(w.told, note);
            return;
        }
        __nanosleep(100);
    }
}

__global__ void __launch_bounds__(32)
    tell_words(uint64_t *words, uint64_t rank_step, int ranks, const uint64_t *counter,
               uint64_t epoch, const uint32_t *late) {
    const uint64_t value = *counter + epoch;
    if (is_late(late))
        return;
    __threadfence_system();
    for (int d = threadIdx.x; d < ranks; d += 32)
        store_word(words + d * rank_step, value);
}

struct counters {
    uint64_t *of[GPU_COUNTERS];
};
__global__ void count_uses(counters c) {
    if (c.of[threadIdx.x] != nullptr)
        ++*c.of[threadIdx.x];
}

constexpr int kJudgeThreads = 256;

__global__ void __launch_bounds__(kJudgeThreads)
    judge_routing(epo_routes r, gpu_route_scratch s, bool overflow_is_error, gpu_told told) {
    __shared__ int worst;
    const uint64_t bad = s.bad[0], dropped = s.bad[1];
    const uint64_t slots = static_cast<uint64_t>(r.tokens) * r.top_k;
    if (threadIdx.x == 0)
        worst = r.experts_all;
    __syncthreads();
    for (int e = threadIdx.x; dropped > 0 && overflow_is_error && e < r.experts_all;
         e += kJudgeThreads)
        if (s.total[e] > r.capacity)
            atomicMin(&worst, e);
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    gpu_note note = {};
    if (bad < slots) {
        note.kind = GPU_BOARD_INDEX;
        note.slot = bad;
        note.limit = static_cast<uint64_t>(r.top_k);
        note.of = r.experts_all;
        note.value = r.experts[bad];
    } else if (worst < r.experts_all) {
        note.kind = GPU_BOARD_OVERFLOW;
        note.slot = static_cast<uint64_t>(worst);
        note.limit = r.capacity;
        note.value = s.total[worst];
    } else if (dropped > 0) {
        told.board->dropped += dropped;
    }
    if (note.kind != GPU_BOARD_NONE)
        tell(told, note);
}

/* ---- flex ---- */

constexpr int kMapThreads = 256;

/* What rank d gets of token t: its places there, and in which chunk it goes. */
__device__ void map_token(const epo_routes &r, const epo_replay_flex &f, int64_t t, int d) {
    const int k = r.top_k, local = r.experts_all / r.ranks;
    const int64_t row = static_cast<int64_t>(d) * r.tokens + t;
    int32_t *meta = f.meta + row * 2 * k;
    int first = f.chunks;
    for (int i = 0; i < k; i++) {
        const int32_t place = f.row[t * k + i];
        const int64_t e = place >= 0 ? r.experts[t * k + i] : -1;
        const bool there = e >= 0 && e / local == d;
        const float w = there && r.weights != nullptr ? r.weights[t * k + i] : 1.0f;
        meta[i] = there ? static_cast<int32_t>(f.target[e] + (place - f.expert_first[e])) : -1;
        meta[k + i] = __float_as_int(w);
        if (there)
            first = min(first, f.chunk[e % local]);
    }
    for (int c = 0; c < f.chunks; c++)
        f.token[static_cast<int64_t>(c) * r.ranks * r.tokens + row] =
            c == first ? static_cast<int32_t>(t) : -2;
}

/* Which rows of what comes back are summed, and where each slot's gradient is. */
__device__ void map_return(const epo_routes &r, const epo_replay_flex &f, int64_t t) {
    const int k = r.top_k, local = r.experts_all / r.ranks;
    uint64_t ranks = 0;
    for (int i = 0; i < k; i++) {
        const bool kept = f.row[t * k + i] >= 0;
        const int d = kept ? static_cast<int>(r.experts[t * k + i] / local) : 0;
        const int64_t row = static_cast<int64_t>(d) * r.tokens + t;
        f.slot_weight[t * k + i] = kept ? static_cast<int32_t>(row * k + i) : -1;
        if (kept)
            ranks |= 1ull << d;
    }
    for (int i = 0; i < f.width; i++, ranks &= ranks - 1)
        f.sum[t * f.width + i] =
            ranks != 0 ? static_cast<int32_t>((__ffsll(ranks) - 1) * r.tokens + t) : -1;
}

__global__ void __launch_bounds__(kMapThreads) map_flex(epo_routes r, epo_replay_flex f) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kMapThreads + threadIdx.x;
    const int64_t t = i / r.ranks;
    if (t >= r.tokens)
        return;
    map_token(r, f, t, static_cast<int>(i % r.ranks));
    if (i % r.ranks == 0)
        map_return(r, f, t);
}

__global__ void __launch_bounds__(kMapThreads) map_arrived(epo_replay_arrived a) {
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * kMapThreads + threadIdx.x;
    const uint64_t row = i / a.top_k, k = i % a.top_k;
    if (row >= a.received)
        return;
    const int32_t *meta = a.meta + row * 2 * a.top_k;
    const int32_t place = meta[k];
    const bool good = static_cast<uint32_t>(place) < a.rows;
    a.back[i] = good ? place : -1;
    if (!good)
        return;
    a.expand[place] = static_cast<int32_t>(row);
    a.weight[place] = __int_as_float(meta[a.top_k + k]);
}

} // namespace

extern "C" cudaError_t gpu_kernel_replay_flex(cudaStream_t stream, const epo_routes *r,
                                              const epo_replay_flex *f) {
    const uint64_t all = static_cast<uint64_t>(r->tokens) * r->ranks;
    if (all > 0)
        map_flex<<<(unsigned)((all + kMapThreads - 1) / kMapThreads), kMapThreads, 0, stream>>>(*r,
                                                                                                *f);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_replay_arrived(cudaStream_t stream, const epo_replay_arrived *a) {
    const uint64_t all = a->received * a->top_k;
    cudaError_t e = cudaSuccess;
    if (a->rows > 0)
        e = cudaMemsetAsync(a->expand, 0xff, a->rows * sizeof *a->expand, stream);
    if (a->rows > 0 && e == cudaSuccess)
        e = cudaMemsetAsync(a->weight, 0, a->rows * sizeof *a->weight, stream);
    if (all > 0 && e == cudaSuccess)
        map_arrived<<<(unsigned)((all + kMapThreads - 1) / kMapThreads), kMapThreads, 0, stream>>>(
            *a);
    return e == cudaSuccess ? cudaGetLastError() : e;
}

extern "C" cudaError_t gpu_kernel_wait(cudaStream_t stream, const gpu_wait *w) {
    wait_words<<<1, 32, 0, stream>>>(*w);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_tell(cudaStream_t stream, uint64_t *words, uint64_t rank_step,
                                       int ranks, const uint64_t *counter, uint64_t epoch,
                                       const uint32_t *late) {
    tell_words<<<1, 32, 0, stream>>>(words, rank_step, ranks, counter, epoch, late);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_count(cudaStream_t stream, uint64_t *const *counters, int count) {
    struct counters c = {};
    if (count > GPU_COUNTERS)
        return cudaErrorInvalidValue;
    for (int i = 0; i < count; i++)
        c.of[i] = counters[i];
    if (count > 0)
        count_uses<<<1, GPU_COUNTERS, 0, stream>>>(c);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_route_judge(cudaStream_t stream, const epo_routes *r,
                                              const gpu_route_scratch *s, bool overflow_is_error,
                                              const gpu_told *told) {
    judge_routing<<<1, kJudgeThreads, 0, stream>>>(*r, *s, overflow_is_error, *told);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_replay_load(void) {
    cudaFuncAttributes a;
    cudaError_t e = cudaFuncGetAttributes(&a, wait_words);
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&a, tell_words);
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&a, count_uses);
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&a, map_flex);
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&a, map_arrived);
    return e == cudaSuccess ? cudaFuncGetAttributes(&a, judge_routing) : e;
}
