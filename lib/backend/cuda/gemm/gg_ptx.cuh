/* SPDX-License-Identifier: Apache-2.0
 *
 * gg_ptx.cuh - the PTX instructions that the grouped GEMM is made of.
 */
#ifndef EPO_BACKEND_CUDA_GEMM_GG_PTX_CUH
#define EPO_BACKEND_CUDA_GEMM_GG_PTX_CUH

#include <cuda.h>
#include <stdint.h>

namespace gg {

__device__ __forceinline__ uint32_t smem_addr(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- mbarrier ---- */
__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbar_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* Is the phase of that parity over?  `try` may sleep for a while before it says no, `test` says
 * it at once. */
#define GG_MBAR_ASK(name, ask)                                                                     \
    __device__ __forceinline__ bool name(uint32_t bar, uint32_t parity) {                          \
        uint32_t done;                                                                             \
        asm volatile("{\n.reg .pred p;\n"                                                          \
                     "mbarrier." ask ".shared::cta.b64 p, [%1], %2;\n"                             \
                     "selp.u32 %0, 1, 0, p;\n}"                                                    \
                     : "=r"(done)                                                                  \
                     : "r"(bar), "r"(parity)                                                       \
                     : "memory");                                                                  \
        return done != 0;                                                                          \
    }
GG_MBAR_ASK(mbar_try, "try_wait.parity")
GG_MBAR_ASK(mbar_test, "test_wait.parity")
__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity) {
    while (!mbar_try(bar, parity)) {
    }
}
__device__ __forceinline__ void mbar_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

/* ---- clusters: the same place in another block's shared memory ---- */
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ uint32_t cluster_addr(uint32_t addr, uint32_t rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(addr), "r"(rank));
    return there;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
/* An arrival that gives something back; what the block wrote before need not be seen. */
__device__ __forceinline__ void cluster_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
/* An arrival that announces data: a memory barrier, so not one for inner loops. */
__device__ __forceinline__ void cluster_announce(uint32_t bar) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar)
                 : "memory");
}
GG_MBAR_ASK(cluster_try, "try_wait.parity.acquire.cluster")
GG_MBAR_ASK(cluster_test, "test_wait.parity.acquire.cluster")
__device__ __forceinline__ void cluster_wait(uint32_t bar, uint32_t parity) {
    while (!cluster_try(bar, parity)) {
    }
}
__device__ __forceinline__ void cluster_store16(uint32_t addr, uint4 v) {
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

/* ---- TMA ---- */
__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap *map, uint32_t bar, int x,
                                         int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
                 "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
/* A box from shared memory to the tensor; kAdd: added to what is there. */
template <bool kAdd>
__device__ __forceinline__ void tma_store(const CUtensorMap *map, uint32_t src, int x, int y,
                                          int z) {
    if (kAdd) {
        asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
                     "[%0, {%2, %3, %4}], [%1];" ::"l"(map),
                     "r"(src), "r"(x), "r"(y), "r"(z)
                     : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group "
                     "[%0, {%2, %3, %4}], [%1];" ::"l"(map),
                     "r"(src), "r"(x), "r"(y), "r"(z)
                     : "memory");
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Until all but kLeft of this thread's stores have read their shared memory. */
template <int kLeft> __device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
/* Until all of this thread's stores are done: others may be told of them. */
__device__ __forceinline__ void tma_store_done() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
/* To the same place of both blocks of a cluster, counted by the same barrier of each. */
__device__ __forceinline__ void tma_load_both(uint32_t dst, const CUtensorMap *map, uint32_t bar,
                                              int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
                 "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "h"((uint16_t)3)
                 : "memory");
}
__device__ __forceinline__ void l2_prefetch(const void *p, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

/* ---- proxies, asynchronous copies by threads ---- */
/* Of shared memory: cheap.  Without the state space it would be a memory barrier of
 * the whole GPU. */
__device__ __forceinline__ void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void fence_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
/* 16 bytes; zeros where !valid (src is not read then). */
__device__ __forceinline__ void cp_async16(uint32_t dst, const void *src, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void cp_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
/* The barrier counts one arrival when this thread's copies so far are done. */
__device__ __forceinline__ void cp_arrive(uint32_t bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

/* ---- wgmma ---- */
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
/* Keeps the compiler from moving uses of the accumulators across this point. */
template <int kCount> __device__ __forceinline__ void pin(float (&acc)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        asm volatile("" : "+f"(acc[i])::"memory");
    }
}
/* Shared-memory matrix descriptor, 128-byte swizzle; byte offsets. */
__device__ __forceinline__ uint64_t smem_desc(uint32_t addr, uint32_t leading, uint32_t stride) {
    return (uint64_t)((addr & 0x3ffff) >> 4) | ((uint64_t)(leading >> 4) << 16) |
           ((uint64_t)(stride >> 4) << 32) | ((uint64_t)1 << 62);
}

/* ---- registers, barriers of some warps ---- */
template <int kRegs> __device__ __forceinline__ void regs_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegs));
}
template <int kRegs> __device__ __forceinline__ void regs_less() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegs));
}
__device__ __forceinline__ void bar_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/* Wait for, and let begin, the neighbour kernel of a programmatic launch. */
__device__ __forceinline__ void grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- shared and global memory, 16 bytes ---- */
__device__ __forceinline__ void stmatrix4(uint32_t addr, uint32_t a, uint32_t b, uint32_t c,
                                          uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
__device__ __forceinline__ uint4 lds16(uint32_t addr) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(addr)
                 : "memory");
    return v;
}
__device__ __forceinline__ void sts16(uint32_t addr, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ void sts8(uint32_t addr, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(addr), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ uint64_t flag_load(const uint64_t *p) {
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void flag_store(uint64_t *p, uint64_t v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ uint32_t count_load(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void count_store(uint32_t *p, uint32_t v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
/* Tells of what this thread knows of, and learns what the others before told. */
__device__ __forceinline__ uint32_t count_add(uint32_t *p) {
    uint32_t v;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint64_t now_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

} /* namespace gg */
#endif
