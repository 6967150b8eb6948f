/* SPDX-License-Identifier: Apache-2.0
 *
 * dense_gpu.cu - the dense parts on a GPU.  Plain kernels in fp32: every element is summed
 * by one thread, or by one block in a fixed order, so that a run has the same bits again.
 */
extern "C" {
#include "dense.h"
}

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

namespace {

constexpr int kThreads = 256;
constexpr double kEpsilon = 1e-5;

cudaStream_t stream_of(void *at) { return static_cast<cudaStream_t>(at); }
unsigned blocks_of(size_t count) {
    return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

/* ---- memory ---------------------------------------------------------------- */

void gpu_put(void *at, void *to, const void *from, size_t bytes) {
    if (bytes > 0 &&
        cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(at)) == cudaSuccess)
        (void)cudaStreamSynchronize(stream_of(at));
}
void *gpu_alloc(void *at, size_t bytes) {
    void *memory = nullptr;
    if (cudaMalloc(&memory, bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        return nullptr;
    }
    if (cudaMemsetAsync(memory, 0, bytes, stream_of(at)) != cudaSuccess ||
        cudaStreamSynchronize(stream_of(at)) != cudaSuccess) {
        (void)cudaFree(memory);
        return nullptr;
    }
    return memory;
}
void gpu_release(void *at, void *memory) {
    (void)at;
    (void)cudaFree(memory);
}
const char *gpu_wrong(void *at) {
    (void)at;
    const cudaError_t e = cudaGetLastError();
    return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}
void gpu_zero(void *at, real *x, size_t count) {
    if (count > 0)
        (void)cudaMemsetAsync(x, 0, count * sizeof *x, stream_of(at));
}
void gpu_copy(void *at, real *y, const real *x, size_t count) {
    if (count > 0)
        (void)cudaMemcpyAsync(y, x, count * sizeof *x, cudaMemcpyDeviceToDevice, stream_of(at));
}

__global__ void add_kernel(real *y, const real *x, size_t count) {
    const size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < count)
        y[i] += x[i];
}
void gpu_add(void *at, real *y, const real *x, size_t count) {
    if (count > 0)
        add_kernel<<<blocks_of(count), kThreads, 0, stream_of(at)>>>(y, x, count);
}

/* ---- embedding ------------------------------------------------------------- */

__global__ void embed_kernel(real *x, const real *w, const uint8_t *input, int width) {
    const size_t from = static_cast<size_t>(input[blockIdx.x]) * width;
    for (int i = threadIdx.x; i < width; i += kThreads)
        x[static_cast<size_t>(blockIdx.x) * width + i] = w[from + i];
}
void gpu_embed(void *at, real *x, const real *w, const uint8_t *input, int rows, int width) {
    if (rows > 0)
        embed_kernel<<<rows, kThreads, 0, stream_of(at)>>>(x, w, input, width);
}

/* A block for each byte there is. */
__global__ void embed_backward_kernel(real *g, const real *dx, const uint8_t *input, int rows,
                                      int width) {
    for (int i = threadIdx.x; i < width; i += kThreads) {
        real sum = g[static_cast<size_t>(blockIdx.x) * width + i];
        for (int t = 0; t < rows; t++)
            if (input[t] == blockIdx.x)
                sum += dx[static_cast<size_t>(t) * width + i];
        g[static_cast<size_t>(blockIdx.x) * width + i] = sum;
    }
}
void gpu_embed_backward(void *at, real *g, const real *dx, const uint8_t *input, int rows,
                        int width) {
    embed_backward_kernel<<<256, kThreads, 0, stream_of(at)>>>(g, dx, input, rows, width);
}

/* ---- products --------------------------------------------------------------- */

constexpr int kTile = 64, kDepth = 16, kEach = 4; /* elements of c, terms a step, of a thread */

/* c[m][n] += sum over k of a(m, k) b(k, n), the strides given. */
struct product {
    const real *a, *b;
    real *c;
    int m, n, k;
    size_t am, ak, bk, bn;
};

__global__ void __launch_bounds__(kThreads) product_kernel(product p) {
    __shared__ real a[kDepth][kTile + 1], b[kDepth][kTile + 1];
    const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
    const int ty = threadIdx.x / (kTile / kEach), tx = threadIdx.x % (kTile / kEach);
    real sum[kEach][kEach] = {};
    for (int k0 = 0; k0 < p.k; k0 += kDepth) {
        for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
            /* Neighbours in memory by neighbouring threads. */
            const int ak = p.ak == 1 ? i % kDepth : i / kTile;
            const int am = p.ak == 1 ? i / kDepth : i % kTile;
            const int bk = p.bk == 1 ? i % kDepth : i / kTile;
            const int bn = p.bk == 1 ? i / kDepth : i % kTile;
            a[ak][am] = row0 + am < p.m && k0 + ak < p.k
                            ? p.a[(row0 + am) * p.am + (k0 + ak) * p.ak]
                            : real(0);
            b[bk][bn] = col0 + bn < p.n && k0 + bk < p.k
                            ? p.b[(k0 + bk) * p.bk + (col0 + bn) * p.bn]
                            : real(0);
        }
        __syncthreads();
        for (int k = 0; k < kDepth; k++)
            for (int i = 0; i < kEach; i++)
                for (int j = 0; j < kEach; j++)
                    sum[i][j] += a[k][ty * kEach + i] * b[k][tx * kEach + j];
        __syncthreads();
    }
    for (int i = 0; i < kEach; i++)
        for (int j = 0; j < kEach; j++) {
            const int row = row0 + ty * kEach + i, col = col0 + tx * kEach + j;
            if (row < p.m && col < p.n)
                p.c[static_cast<size_t>(row) * p.n + col] += sum[i][j];
        }
}

void launch(void *at, const product &p) {
    const dim3 grid((p.n + kTile - 1) / kTile, (p.m + kTile - 1) / kTile);
    if (p.m > 0 && p.n > 0 && p.k > 0)
        product_kernel<<<grid, kThreads, 0, stream_of(at)>>>(p);
}

void gpu_linear_forward(void *at, real *y, const real *x, const real *w, int rows, int in,
                        int out) {
    launch(at, {x, w, y, rows, out, in, static_cast<size_t>(in), 1, static_cast<size_t>(out), 1});
}
void gpu_linear_backward(void *at, real *dx, real *dw, const real *x, const real *w, const real *dy,
                         int rows, int in, int out) {
    const size_t wide = static_cast<size_t>(out);
    if (dx != nullptr)
        launch(at, {dy, w, dx, rows, in, out, wide, 1, 1, wide});
    launch(at, {x, dy, dw, in, out, rows, 1, static_cast<size_t>(in), wide, 1});
}

/* ---- norm ------------------------------------------------------------------- */

/* The block's sum, the same for all its threads. */
__device__ double block_sum(double mine) {
    __shared__ double part[kThreads];
    __syncthreads();
    part[threadIdx.x] = mine;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < half)
            part[threadIdx.x] += part[threadIdx.x + half];
    }
    __syncthreads();
    return part[0];
}

__global__ void norm_kernel(real *n, real *scale, const real *x, const real *gain, int width) {
    const size_t row = static_cast<size_t>(blockIdx.x) * width;
    double square = 0;
    for (int i = threadIdx.x; i < width; i += kThreads)
        square += static_cast<double>(x[row + i]) * static_cast<double>(x[row + i]);
    const real s = static_cast<real>(1.0 / sqrt(block_sum(square) / width + kEpsilon));
    if (threadIdx.x == 0)
        scale[blockIdx.x] = s;
    for (int i = threadIdx.x; i < width; i += kThreads)
        n[row + i] = x[row + i] * s * gain[i];
}
void gpu_norm_forward(void *at, real *n, real *scale, const real *x, const real *gain, int rows,
                      int width) {
    if (rows > 0)
        norm_kernel<<<rows, kThreads, 0, stream_of(at)>>>(n, scale, x, gain, width);
}

__global__ void norm_dx_kernel(real *dx, const real *dn, const real *x, const real *scale,
                               const real *gain, int width) {
    const size_t row = static_cast<size_t>(blockIdx.x) * width;
    const real s = scale[blockIdx.x];
    double mine = 0; /* of the gradient, along x */
    for (int i = threadIdx.x; i < width; i += kThreads)
        mine += static_cast<double>(dn[row + i] * gain[i] * x[row + i]);
    const real along = static_cast<real>(block_sum(mine)) * s * s * s / static_cast<real>(width);
    for (int i = threadIdx.x; i < width; i += kThreads)
        dx[row + i] += dn[row + i] * gain[i] * s - x[row + i] * along;
}
__global__ void norm_dgain_kernel(real *dgain, const real *dn, const real *x, const real *scale,
                                  int rows, int width) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= width)
        return;
    real sum = dgain[i];
    for (int t = 0; t < rows; t++) {
        const size_t k = static_cast<size_t>(t) * width + i;
        sum += dn[k] * x[k] * scale[t];
    }
    dgain[i] = sum;
}
void gpu_norm_backward(void *at, real *dx, real *dgain, const real *dn, const real *x,
                       const real *scale, const real *gain, int rows, int width) {
    if (rows == 0)
        return;
    norm_dx_kernel<<<rows, kThreads, 0, stream_of(at)>>>(dx, dn, x, scale, gain, width);
    norm_dgain_kernel<<<blocks_of(width), kThreads, 0, stream_of(at)>>>(dgain, dn, x, scale, rows,
                                                                        width);
}

/* ---- router ----------------------------------------------------------------- */

__global__ void router_kernel(int64_t *chosen, real *weights, const real *logits, int rows,
                              int experts, int top_k) {
    const int t = blockIdx.x * kThreads + threadIdx.x;
    if (t >= rows)
        return;
    chosen += static_cast<size_t>(t) * top_k;
    weights += static_cast<size_t>(t) * top_k;
    logits += static_cast<size_t>(t) * experts;
    real sum = 0;
    for (int k = 0; k < top_k; k++) {
        int best = -1;
        for (int e = 0; e < experts; e++) {
            bool taken = false;
            for (int j = 0; j < k; j++)
                taken = taken || chosen[j] == e;
            if (!taken && (best < 0 || logits[e] > logits[best]))
                best = e;
        }
        chosen[k] = best;
    }
    for (int k = 0; k < top_k; k++) {
        weights[k] =
            static_cast<real>(exp(static_cast<double>(logits[chosen[k]] - logits[chosen[0]])));
        sum += weights[k];
    }
    for (int k = 0; k < top_k; k++)
        weights[k] /= sum;
}
void gpu_router_forward(void *at, int64_t *chosen, real *weights, const real *logits, int rows,
                        int experts, int top_k) {
    if (rows > 0)
        router_kernel<<<blocks_of(rows), kThreads, 0, stream_of(at)>>>(chosen, weights, logits,
                                                                       rows, experts, top_k);
}

__global__ void router_backward_kernel(real *dlogits, const real *dweights, const int64_t *chosen,
                                       const real *weights, int rows, int experts, int top_k) {
    const int t = blockIdx.x * kThreads + threadIdx.x;
    if (t >= rows)
        return;
    const size_t at = static_cast<size_t>(t) * top_k;
    real mean = 0;
    for (int k = 0; k < top_k; k++)
        mean += weights[at + k] * dweights[at + k];
    for (int k = 0; k < top_k; k++)
        dlogits[static_cast<size_t>(t) * experts + chosen[at + k]] =
            weights[at + k] * (dweights[at + k] - mean);
}
void gpu_router_backward(void *at, real *dlogits, const real *dweights, const int64_t *chosen,
                         const real *weights, int rows, int experts, int top_k) {
    gpu_zero(at, dlogits, static_cast<size_t>(rows) * experts);
    if (rows > 0)
        router_backward_kernel<<<blocks_of(rows), kThreads, 0, stream_of(at)>>>(
            dlogits, dweights, chosen, weights, rows, experts, top_k);
}

/* ---- loss -------------------------------------------------------------------- */

__device__ real block_max(real mine) {
    __shared__ real part[kThreads];
    __syncthreads();
    part[threadIdx.x] = mine;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < half)
            part[threadIdx.x] = fmaxf(part[threadIdx.x], part[threadIdx.x + half]);
    }
    __syncthreads();
    return part[0];
}

__global__ void loss_kernel(double *loss, real *logits, const uint8_t *target, int vocab,
                            double share) {
    real *row = logits + static_cast<size_t>(blockIdx.x) * vocab;
    const int wanted = target[blockIdx.x];
    const real of_target = row[wanted];
    real top = row[0];
    for (int v = threadIdx.x; v < vocab; v += kThreads)
        top = fmaxf(top, row[v]);
    top = block_max(top);
    double mine = 0;
    for (int v = threadIdx.x; v < vocab; v += kThreads) {
        row[v] = static_cast<real>(exp(static_cast<double>(row[v] - top)));
        mine += static_cast<double>(row[v]);
    }
    const double sum = block_sum(mine);
    if (threadIdx.x == 0)
        loss[blockIdx.x] = log(sum) - static_cast<double>(of_target - top);
    for (int v = threadIdx.x; v < vocab; v += kThreads)
        row[v] = static_cast<real>(static_cast<double>(row[v]) / sum * share) -
                 (v == wanted ? static_cast<real>(share) : real(0));
}
void gpu_softmax_loss(void *at, double *loss, real *logits, const uint8_t *target, int rows,
                      int vocab, double share) {
    if (rows > 0)
        loss_kernel<<<rows, kThreads, 0, stream_of(at)>>>(loss, logits, target, vocab, share);
}

/* ---- an engine's types -------------------------------------------------------- */

__global__ void narrow_kernel(void *to, const real *from, size_t count, bool bf16) {
    const size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < count && bf16)
        static_cast<__nv_bfloat16 *>(to)[i] = __float2bfloat16_rn(from[i]);
    else if (i < count)
        static_cast<__half *>(to)[i] = __float2half_rn(from[i]);
}
__global__ void widen_kernel(real *to, const void *from, size_t count) {
    const size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < count)
        to[i] = __bfloat162float(static_cast<const __nv_bfloat16 *>(from)[i]);
}
void gpu_narrow(void *at, void *to, const real *from, size_t count, epo_dtype type) {
    if (count > 0)
        narrow_kernel<<<blocks_of(count), kThreads, 0, stream_of(at)>>>(to, from, count,
                                                                        type == EPO_BF16);
}
void gpu_widen(void *at, real *to, const void *from, size_t count) {
    if (count > 0)
        widen_kernel<<<blocks_of(count), kThreads, 0, stream_of(at)>>>(to, from, count);
}

/* In the order of dense.h. */
const dense_ops table = {
    gpu_alloc,
    gpu_release,
    gpu_put,
    gpu_put,
    gpu_wrong,
    gpu_zero,
    gpu_copy,
    gpu_add,
    gpu_embed,
    gpu_embed_backward,
    gpu_linear_forward,
    gpu_linear_backward,
    gpu_norm_forward,
    gpu_norm_backward,
    gpu_router_forward,
    gpu_router_backward,
    gpu_softmax_loss,
    gpu_narrow,
    gpu_widen,
};

} // namespace

extern "C" const dense_ops *dense_gpu(void) { return &table; }
