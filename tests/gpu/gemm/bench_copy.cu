/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_copy.cu - a kernel that holds `blocks` SMs for a given time and copies
 * meanwhile, as a communication kernel would.
 */
#include <stdint.h>

namespace {

/* One block per SM: it asks for most of the SM's shared memory. */
__global__ void __launch_bounds__(1024)
    hold(uint4 *dst, const uint4 *src, uint64_t count, uint64_t ns, unsigned long long *copied) {
    uint64_t start, now, i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x, done = 0;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        for (int j = 0; j < 8; j++) {
            dst[i] = src[i];
            i += (uint64_t)gridDim.x * blockDim.x;
            i = i >= count ? i - count : i;
            done += 16;
        }
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < ns);
    atomicAdd(copied, (unsigned long long)done);
}

} /* namespace */

extern "C" __attribute__((visibility("default"))) int
bench_copy(void *dst, const void *src, uint64_t bytes, int blocks, uint64_t ns,
           unsigned long long *copied, void *stream) {
    const int smem = 200 * 1024;
    cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
    hold<<<blocks, 1024, smem, (cudaStream_t)stream>>>((uint4 *)dst, (const uint4 *)src, bytes / 16,
                                                       ns, copied);
    return (int)cudaGetLastError();
}
