// SPDX-License-Identifier: Apache-2.0
//
// link_floor.cu - what the link between two GPUs carries: by copy engines that write or read, by
// stores and loads of SMs, and by both at once, in both directions. Bounds what an exchange can
// reach.
//
//   link_floor [MB ...]     bytes a direction; 16 32 64 256
//
// GB/s a direction, of ten in a row without a word between them; the slower GPU's.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        const cudaError_t e_ = (call);                                                             \
        if (e_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(e_));                            \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static const int REPEAT = 10, TRIES = 5;

// Eight 16-byte accesses of a thread under way.
__global__ void __launch_bounds__(1024) move(uint4 *to, const uint4 *from, size_t n) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * step < n; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int k = 0; k < 8; k++)
            v[k] = from[i + k * step];
#pragma unroll
        for (int k = 0; k < 8; k++)
            to[i + k * step] = v[k];
    }
    for (; i < n; i += step)
        to[i] = from[i];
}

// A part of the message: who moves it. An engine or SMs of this end (push) or of the other (pull).
struct part {
    bool engine, pull;
    int blocks;
    double share;
};
struct arm {
    const char *name;
    std::vector<part> parts;
};
struct gpu {
    char *from, *to;
    cudaStream_t stream[4];
    cudaEvent_t begin, end[4];
};

static gpu gpus[2];

static void enqueue(int me, const part &p, int stream, size_t first, size_t bytes) {
    const gpu &here = gpus[me], &other = gpus[1 - me];
    const char *from = (p.pull ? other.from : here.from) + first;
    char *to = (p.pull ? here.to : other.to) + first;
    if (p.engine)
        CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, here.stream[stream]));
    else
        move<<<p.blocks, 1024, 0, here.stream[stream]>>>((uint4 *)to, (const uint4 *)from,
                                                         bytes / 16);
}

// Milliseconds of REPEAT messages of both directions; joined: an event after each, as an exchange
// has it.
static float once(const arm &a, size_t bytes, bool joined) {
    float worst = 0;
    for (int g = 0; g < 2; g++) {
        CHECK(cudaSetDevice(g));
        CHECK(cudaDeviceSynchronize());
    }
    for (int g = 0; g < 2; g++) {
        CHECK(cudaSetDevice(g));
        CHECK(cudaEventRecord(gpus[g].begin, gpus[g].stream[0]));
        for (size_t k = 1; k < a.parts.size(); k++)
            CHECK(cudaStreamWaitEvent(gpus[g].stream[k], gpus[g].begin, 0));
    }
    for (int i = 0; i < REPEAT; i++)
        for (int g = 0; g < 2; g++) {
            size_t first = 0;
            CHECK(cudaSetDevice(g));
            for (size_t k = 0; k < a.parts.size(); k++) {
                const bool last = k + 1 == a.parts.size();
                const size_t n =
                    last ? bytes - first : (size_t)(a.parts[k].share * (double)bytes) / 4096 * 4096;
                enqueue(g, a.parts[k], (int)k, first, n);
                first += n;
                CHECK(cudaEventRecord(gpus[g].end[k], gpus[g].stream[k]));
            }
            for (size_t k = 1; joined && k < a.parts.size(); k++) {
                CHECK(cudaStreamWaitEvent(gpus[g].stream[0], gpus[g].end[k], 0));
                CHECK(cudaEventRecord(gpus[g].end[0], gpus[g].stream[0]));
            }
            for (size_t k = 1; joined && k < a.parts.size(); k++)
                CHECK(cudaStreamWaitEvent(gpus[g].stream[k], gpus[g].end[0], 0));
        }
    for (int g = 0; g < 2; g++) {
        CHECK(cudaSetDevice(g));
        CHECK(cudaDeviceSynchronize());
        for (size_t k = 0; k < a.parts.size(); k++) {
            float ms;
            CHECK(cudaEventElapsedTime(&ms, gpus[g].begin, gpus[g].end[k]));
            worst = std::max(worst, ms);
        }
    }
    return worst;
}

static double rate(const arm &a, size_t bytes, bool joined) {
    std::vector<float> ms;
    for (int i = 0; i < TRIES; i++)
        ms.push_back(once(a, bytes, joined));
    std::sort(ms.begin(), ms.end());
    return (double)bytes * REPEAT / (ms[TRIES / 2] * 1e6);
}

static void prepare(size_t most) {
    for (int g = 0; g < 2; g++) {
        CHECK(cudaSetDevice(g));
        CHECK(cudaDeviceEnablePeerAccess(1 - g, 0));
        CHECK(cudaMalloc(&gpus[g].from, most));
        CHECK(cudaMalloc(&gpus[g].to, most));
        CHECK(cudaMemset(gpus[g].from, 1 + g, most));
        CHECK(cudaEventCreate(&gpus[g].begin));
        for (int k = 0; k < 4; k++) {
            CHECK(cudaStreamCreateWithFlags(&gpus[g].stream[k], cudaStreamNonBlocking));
            CHECK(cudaEventCreate(&gpus[g].end[k]));
        }
    }
}

// Every byte has come: of the arm whose parts are moved by different units last.
static bool arrived(size_t bytes) {
    std::vector<char> host(bytes);
    for (int g = 0; g < 2; g++) {
        CHECK(cudaSetDevice(g));
        CHECK(cudaMemcpy(host.data(), gpus[g].to, bytes, cudaMemcpyDeviceToHost));
        if (std::count(host.begin(), host.end(), (char)(2 - g)) != (long)bytes)
            return false;
    }
    return true;
}

int main(int argc, char **argv) {
    std::vector<size_t> sizes;
    int count = 0;
    for (int i = 1; i < argc; i++)
        sizes.push_back(strtoull(argv[i], nullptr, 10) << 20);
    if (sizes.empty())
        sizes = {16u << 20, 32u << 20, 64u << 20, 256u << 20};
    CHECK(cudaGetDeviceCount(&count));
    if (count < 2) {
        printf("case\tlink_floor\tskip\tneeds 2 GPUs, %d here\n", count);
        return 0;
    }
    prepare(*std::max_element(sizes.begin(), sizes.end()));
    std::vector<arm> arms = {
        {"engine writes", {{true, false, 0, 1}}},
        {"engine reads", {{true, true, 0, 1}}},
        {"engines write, two halves", {{true, false, 0, .5}, {true, false, 0, .5}}},
        {"engines write half, read half", {{true, false, 0, .5}, {true, true, 0, .5}}},
        {"SMs store, 16 blocks", {{false, false, 16, 1}}},
        {"SMs store, 32 blocks", {{false, false, 32, 1}}},
        {"SMs store, 64 blocks", {{false, false, 64, 1}}},
        {"SMs store, 132 blocks", {{false, false, 132, 1}}},
        {"SMs load, 64 blocks", {{false, true, 64, 1}}},
        {"SMs store half, load half, 32 + 32", {{false, false, 32, .5}, {false, true, 32, .5}}},
        {"engine 0.90, 8 blocks store", {{true, false, 0, .90}, {false, false, 8, .10}}},
        {"engine 0.85, 8 blocks store", {{true, false, 0, .85}, {false, false, 8, .15}}},
        {"engine 0.75, 16 blocks store", {{true, false, 0, .75}, {false, false, 16, .25}}},
        {"engine 0.50, 32 blocks store", {{true, false, 0, .50}, {false, false, 32, .50}}},
        {"engine 0.85, 8 blocks load", {{true, false, 0, .85}, {false, true, 8, .15}}},
        {"engine 0.50, 32 blocks load", {{true, false, 0, .50}, {false, true, 32, .50}}},
        {"engine reads 0.85, 8 blocks store", {{true, true, 0, .85}, {false, false, 8, .15}}},
        {"engine writes .4, reads .4, 16 store .2",
         {{true, false, 0, .4}, {true, true, 0, .4}, {false, false, 16, .2}}},
    };
    printf("GB/s a direction, both busy%*s", 13, "");
    for (size_t s : sizes)
        printf(" %6zu MB", s >> 20);
    printf("   (then: joined after each)\n");
    bool right = true;
    for (const arm &a : arms) {
        CHECK(cudaSetDevice(0));
        CHECK(cudaMemset(gpus[0].to, 0, sizes[0]));
        CHECK(cudaSetDevice(1));
        CHECK(cudaMemset(gpus[1].to, 0, sizes[0]));
        once(a, sizes[0], false);
        right = right && arrived(sizes[0]);
        printf("%-40s", a.name);
        for (size_t s : sizes)
            printf(" %9.1f", rate(a, s, false));
        for (size_t s : sizes)
            printf(" %9.1f", rate(a, s, true));
        printf("\n");
        fflush(stdout);
    }
    printf("case\tlink_floor\t%s\tevery byte arrived in every arm\n", right ? "ok" : "FAIL");
    return right ? 0 : 1;
}
