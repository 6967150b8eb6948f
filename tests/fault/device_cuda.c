/* SPDX-License-Identifier: Apache-2.0
 *
 * device_cuda.c - a GPU's memory and stream: rank r has GPU r modulo their number.
 */
#include "config.h"

#include "fault.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

const char device_name[] = "cuda";

#define TRY(call)                                                                                  \
    do {                                                                                           \
        cudaError_t e_ = (call);                                                                   \
        if (e_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
            exit(3);                                                                               \
        }                                                                                          \
    } while (0)

bool device_is_host(void) { return false; }

epo_stream device_open(int rank) {
    int count = 0;
    cudaStream_t stream = NULL;
    TRY(cudaGetDeviceCount(&count));
    TRY(cudaSetDevice(rank % count));
    TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

void device_close(epo_stream stream) { (void)cudaStreamDestroy((cudaStream_t)stream); }

void *device_new(uint64_t bytes) {
    void *p = NULL;
    TRY(cudaMalloc(&p, bytes > 0 ? bytes : 16));
    TRY(cudaMemset(p, 0, bytes > 0 ? bytes : 16));
    TRY(cudaStreamSynchronize(0));
    return p;
}

void device_free(void *p) { (void)cudaFree(p); }

void device_put(void *to, const void *from, uint64_t bytes) {
    TRY(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
}

void device_take(void *to, const void *from, uint64_t bytes) {
    TRY(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

void device_copy(epo_stream stream, void *to, const void *from, uint64_t bytes) {
    TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, (cudaStream_t)stream));
}

void device_zero(epo_stream stream, void *to, uint64_t bytes) {
    TRY(cudaMemsetAsync(to, 0, bytes, (cudaStream_t)stream));
}

void device_call(epo_stream stream, void (*fn)(void *ctx), void *ctx) {
    TRY(cudaLaunchHostFunc((cudaStream_t)stream, fn, ctx));
}

bool device_wait(epo_stream stream) {
    return cudaStreamSynchronize((cudaStream_t)stream) == cudaSuccess;
}

void device_fill(void) {
    size_t have = 0, all = 0;
    void *p;
    TRY(cudaMemGetInfo(&have, &all));
    for (size_t some = have; some >= (size_t)1 << 20; some /= 2)
        while (cudaMalloc(&p, some) == cudaSuccess)
            ;
    (void)cudaGetLastError();
}
