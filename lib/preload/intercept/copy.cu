/* SPDX-License-Identifier: Apache-2.0
 *
 * copy.cu - a copy inside one GPU that runs beside GEMMs.  The driver's own copies are kernels
 * that wait for room on an SM, which a GEMM leaves when it ends. This one is a warp of few
 * registers and 16 KB of shared memory, and fits beside one. Loaded by copy.c.
 */
#define BYTES 8192 /* of one bulk copy; two under way in a block */

#if __CUDA_ARCH__ >= 900
static __device__ unsigned shared_at(const void *p) {
    return (unsigned)__cvta_generic_to_shared(p);
}

static __device__ void bar_init(unsigned bar) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar));
}

static __device__ void bar_wait(unsigned bar, unsigned phase) {
    unsigned done = 0;
    while (!done)
        asm volatile("{\n.reg .pred q;\nmbarrier.try_wait.parity.shared.b64 q, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, q;\n}"
                     : "=r"(done)
                     : "r"(bar), "r"(phase)
                     : "memory");
}

static __device__ void load(unsigned to, const char *from, unsigned bytes, unsigned bar) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(bar)
        : "memory");
}

static __device__ void store(char *to, unsigned from, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

static __device__ unsigned piece_bytes(unsigned long long at, unsigned long long count) {
    return count - at < BYTES ? (unsigned)(count - at) : BYTES;
}

/* One thread: a block's pieces are those at blockIdx.x, blockIdx.x + gridDim.x, ... */
static __device__ void copy_pieces(char *to, const char *from, unsigned long long count) {
    __shared__ __align__(128) char buffer[2][BYTES];
    __shared__ __align__(8) unsigned long long bars[2];
    const unsigned long long step = (unsigned long long)gridDim.x * BYTES;
    unsigned long long at = (unsigned long long)blockIdx.x * BYTES, ahead = at;
    const unsigned at_buffer[2] = {shared_at(buffer[0]), shared_at(buffer[1])};
    const unsigned bar[2] = {shared_at(&bars[0]), shared_at(&bars[1])};
    bar_init(bar[0]);
    bar_init(bar[1]);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = 0; i < 2 && ahead < count; i++, ahead += step)
        load(at_buffer[i], from + ahead, piece_bytes(ahead, count), bar[i]);
    for (unsigned turn = 0; at < count; turn++, at += step) {
        const unsigned i = turn & 1, n = piece_bytes(at, count);
        bar_wait(bar[i], turn >> 1 & 1);
        store(to + at, at_buffer[i], n);
        if (ahead < count) {
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            load(at_buffer[i], from + ahead, piece_bytes(ahead, count), bar[i]);
            ahead += step;
        }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif

/* Addresses and count are multiples of 16. */
extern "C" __global__ void __launch_bounds__(32)
    epo_copy(char *to, const char *from, unsigned long long count) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0)
        copy_pieces(to, from, count);
#else
    const unsigned long long n = count / 16, step = (unsigned long long)gridDim.x * 32;
    const uint4 *in = (const uint4 *)from;
    uint4 *out = (uint4 *)to;
    unsigned long long i = (unsigned long long)blockIdx.x * 32 + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        const uint4 a = in[i], b = in[i + step], c = in[i + 2 * step], d = in[i + 3 * step];
        out[i] = a;
        out[i + step] = b;
        out[i + 2 * step] = c;
        out[i + 3 * step] = d;
    }
    for (; i < n; i += step)
        out[i] = in[i];
#endif
}
