/* SPDX-License-Identifier: Apache-2.0
 *
 * flex_device.cuh - flags, bulk copies and 16-byte accesses for flex's kernels.
 */
#ifndef EPO_BACKEND_CUDA_FLEX_DEVICE_CUH
#define EPO_BACKEND_CUDA_FLEX_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "backend/cuda/flex.h"

namespace flex {

constexpr unsigned kAll = 0xffffffffu;

/* ---- flags ---- */

__device__ __forceinline__ uint64_t flag_load(const uint64_t *p) {
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void flag_store(uint64_t *p, uint64_t v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ uint64_t now_ns() {
    uint64_t v;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v));
    return v;
}

__device__ __forceinline__ uint64_t *flag_word(char *window, uint64_t at, int source, int block) {
    return reinterpret_cast<uint64_t *>(window + at) + (int64_t)source * GPU_FLEX_BLOCKS + block;
}

/* This thread of `threads`: its words of the flag have reached `epoch`, this rank's own
 * included.  False: the limit passed, *late tells. */
__device__ __forceinline__ bool wait_words(const gpu_flex &f, uint64_t at, uint64_t epoch,
                                           unsigned phase, int thread, int threads) {
#pragma unroll 1
    for (int i = thread; i < f.ranks * f.blocks; i += threads) {
        const int source = i / f.blocks;
        const uint64_t *word = flag_word(f.peer[f.rank], at, source, i % f.blocks);
        uint64_t begun = 0;
#pragma unroll 1
        for (unsigned spins = 0; flag_load(word) < epoch; spins++) {
            if (spins % 256 != 255)
                continue;
            const uint64_t now = now_ns();
            begun = begun == 0 ? now : begun;
            if (now - begun <= f.limit_ns && *(volatile unsigned *)f.late == 0)
                continue;
            if (*(volatile unsigned *)f.late == 0) {
                f.late[1] = phase;
                __threadfence_system();
                *(volatile unsigned *)f.late = 1u + (unsigned)source;
            }
            return false;
        }
    }
    return true;
}

/* All threads of a block. */
__device__ __forceinline__ bool wait_all(const gpu_flex &f, uint64_t at, uint64_t epoch,
                                         unsigned phase) {
    return __syncthreads_and(wait_words(f, at, epoch, phase, threadIdx.x, blockDim.x));
}

/* One thread per rank: this block's writes are there, this block has read. */
__device__ __forceinline__ void tell_all(const gpu_flex &f, uint64_t at) {
    __syncthreads();
    if ((int)threadIdx.x < f.ranks) {
        __threadfence_system();
        flag_store(flag_word(f.peer[threadIdx.x], at, f.rank, blockIdx.x), f.epoch);
    }
}

/* ---- bulk copies (sm_90) ---- */

__device__ __forceinline__ uint32_t shared_of(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void bar_init(uint64_t *bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_of(bar)), "r"(arrivals)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void bar_wait(uint64_t *bar, uint32_t parity) {
    asm volatile("{\n.reg .pred p;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra again;\n}" ::"r"(shared_of(bar)),
                 "r"(parity)
                 : "memory");
}
__device__ __forceinline__ void bar_arrive(uint64_t *bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_of(bar)) : "memory");
}
__device__ __forceinline__ void bar_expect(uint64_t *bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_of(bar)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_load(void *to, const void *from, uint32_t bytes,
                                          uint64_t *bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(shared_of(to)),
                 "l"(from), "r"(bytes), "r"(shared_of(bar))
                 : "memory");
}
__device__ __forceinline__ void bulk_store(void *to, const void *from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_of(from)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int N> __device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void bulk_wait_all() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
/* What other threads wrote to global memory is there for bulk copies of this one. */
__device__ __forceinline__ void bulk_acquire() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
#endif

/* ---- elements ---- */

/* 16 bytes of elements of T, as words: a struct of elements may be moved one by one. */
template <typename T> struct Unit { static constexpr int n = 16 / sizeof(T); };

template <typename T> __device__ __forceinline__ void unpack(float (&out)[Unit<T>::n], uint4 v);
template <> __device__ __forceinline__ void unpack<float>(float (&out)[4], uint4 v) {
    out[0] = __uint_as_float(v.x);
    out[1] = __uint_as_float(v.y);
    out[2] = __uint_as_float(v.z);
    out[3] = __uint_as_float(v.w);
}
template <> __device__ __forceinline__ void unpack<__nv_bfloat16>(float (&out)[8], uint4 v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = __uint_as_float(words[i] << 16);
        out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}
template <> __device__ __forceinline__ void unpack<__half>(float (&out)[8], uint4 v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        __half2 pair;
        memcpy(&pair, &words[i], sizeof pair);
        const float2 f = __half22float2(pair);
        out[2 * i] = f.x;
        out[2 * i + 1] = f.y;
    }
}

template <typename T> __device__ __forceinline__ uint4 pack(const float *in);
template <> __device__ __forceinline__ uint4 pack<float>(const float *in) {
    return make_uint4(__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]),
                      __float_as_uint(in[3]));
}
template <> __device__ __forceinline__ uint4 pack<__nv_bfloat16>(const float *in) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
        memcpy(&words[i], &pair, sizeof pair);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
template <> __device__ __forceinline__ uint4 pack<__half>(const float *in) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __half2 pair = __floats2half2_rn(in[2 * i], in[2 * i + 1]);
        memcpy(&words[i], &pair, sizeof pair);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

} // namespace flex

#endif
