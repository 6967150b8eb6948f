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

__global__ void __launch_bounds__(32) tell_words(uint64_t *words, uint64_t rank_step, int ranks,
                                                 const uint64_t *counter, uint64_t epoch) {
    const uint64_t value = *counter + epoch;
    __threadfence_system();
    for (int d = threadIdx.x; d < ranks; d += 32)
        store_word(words + d * rank_step, value);
}

__global__ void count_uses(uint64_t *a, uint64_t *b) {
    if (a != nullptr)
        ++*a;
    if (b != nullptr)
        ++*b;
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

} // namespace

extern "C" cudaError_t gpu_kernel_wait(cudaStream_t stream, const gpu_wait *w) {
    wait_words<<<1, 32, 0, stream>>>(*w);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_tell(cudaStream_t stream, uint64_t *words, uint64_t rank_step,
                                       int ranks, const uint64_t *counter, uint64_t epoch) {
    tell_words<<<1, 32, 0, stream>>>(words, rank_step, ranks, counter, epoch);
    return cudaGetLastError();
}

extern "C" cudaError_t gpu_kernel_count(cudaStream_t stream, uint64_t *const *counters, int count) {
    if (count > 0)
        count_uses<<<1, 1, 0, stream>>>(counters[0], count > 1 ? counters[1] : nullptr);
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
    return e == cudaSuccess ? cudaFuncGetAttributes(&a, judge_routing) : e;
}
