// SPDX-License-Identifier: Apache-2.0
//
// record_cost.cu - what CUPTI costs a launch of a kernel, by what of it is on. A process of its own
// for each variant, as CUPTI does not leave one.
//
//   record_cost [LIBCUPTI [variant ...]]
//
// us a launch before, with it, and after it was switched off: launches alone, and one each 50 us,
// as 20,000 a second are.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <sched.h>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <cuda_runtime.h>

typedef int result;
struct cupti {
    void *handle;
    result (*subscribe)(void **, void (*)(void *, int, uint32_t, const void *), void *);
    result (*unsubscribe)(void *);
    result (*callbacks)(void (*)(uint8_t **, size_t *, size_t *),
                        void (*)(void *, uint32_t, uint8_t *, size_t, size_t));
    result (*enable)(int);
    result (*disable)(int);
    result (*flush)(uint32_t);
    result (*attribute)(int, size_t *, void *);
    result (*latency)(uint8_t);
    result (*launch_attributes)(uint8_t);
    result (*device_graph)(uint8_t);
    result (*period)(uint32_t);
    result (*finalize)(void);
    result (*next)(uint8_t *, size_t, void **);
};

static size_t records;
static cupti c;
static std::vector<uint8_t *> spare;
static bool zeroed;
static size_t buffer_bytes = 1 << 20;

static void requested(uint8_t **buffer, size_t *size, size_t *most) {
    *size = buffer_bytes;
    *most = 0;
    if (spare.empty()) {
        *buffer = (uint8_t *)aligned_alloc(4096, buffer_bytes);
        if (zeroed)
            memset(*buffer, 0, buffer_bytes);
        return;
    }
    *buffer = spare.back();
    spare.pop_back();
}

static void completed(void *, uint32_t, uint8_t *buffer, size_t, size_t valid) {
    void *record = nullptr;
    while (c.next(buffer, valid, &record) == 0)
        records++;
    free(buffer);
}

static void on_call(void *, int, uint32_t, const void *) {}

template <typename T> static void find(T &f, const char *name) {
    void *p = dlsym(c.handle, name);
    memcpy(&f, &p, sizeof p);
}

static bool open_cupti(const char *path) {
    c.handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (c.handle == nullptr) {
        fprintf(stderr, "%s\n", dlerror());
        return false;
    }
    find(c.subscribe, "cuptiSubscribe");
    find(c.unsubscribe, "cuptiUnsubscribe");
    find(c.callbacks, "cuptiActivityRegisterCallbacks");
    find(c.enable, "cuptiActivityEnable");
    find(c.disable, "cuptiActivityDisable");
    find(c.flush, "cuptiActivityFlushAll");
    find(c.attribute, "cuptiActivitySetAttribute");
    find(c.latency, "cuptiActivityEnableLatencyTimestamps");
    find(c.launch_attributes, "cuptiActivityEnableLaunchAttributes");
    find(c.device_graph, "cuptiActivityEnableDeviceGraph");
    find(c.period, "cuptiActivityFlushPeriod");
    find(c.finalize, "cuptiFinalize");
    find(c.next, "cuptiActivityGetNextRecord");
    return true;
}

__global__ void small(int *p) {
    if (p != nullptr)
        *p = 1;
}

static double now_us() {
    return std::chrono::duration<double, std::micro>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Medians of blocks: us of a launch in a row of them, and of one each 50 us (the call alone).
struct cost {
    double row, paced;
};
static cost measure() {
    std::vector<double> rows, paced;
    for (int block = 0; block < 20; block++) {
        cudaDeviceSynchronize();
        const double start = now_us();
        for (int i = 0; i < 300; i++)
            small<<<1, 32>>>(nullptr);
        rows.push_back((now_us() - start) / 300);
    }
    for (int block = 0; block < 10; block++) {
        double sum = 0;
        cudaDeviceSynchronize();
        for (int i = 0; i < 200; i++) {
            const double start = now_us();
            small<<<1, 32>>>(nullptr);
            sum += now_us() - start;
            while (now_us() - start < 50)
                ;
        }
        paced.push_back(sum / 200);
    }
    cudaDeviceSynchronize();
    std::sort(rows.begin(), rows.end());
    std::sort(paced.begin(), paced.end());
    return {rows[rows.size() / 2], paced[paced.size() / 2]};
}

static const int KERNEL = 3, CONCURRENT = 10, COPY = 1, SET = 2, PEER = 22;

struct variant {
    const char *name, *what;
};
static const variant variants[] = {
    {"none", "nothing"},
    {"opened", "libcupti opened"},
    {"subscribed", "a subscriber without callbacks"},
    {"registered", "buffers registered, nothing on"},
    {"copies", "copies alone (no kernels)"},
    {"kernels", "CONCURRENT_KERNEL alone"},
    {"all", "kernels, copies, sets, a subscriber"},
    {"nosub", "the same without a subscriber"},
    {"probed", "without one, but for a look every 50 ms whether there is another: the recorder"},
    {"nosublat", "without one, latency timestamps and launch attributes explicitly off"},
    {"nosubpin", "without one, profiling data in pinned host memory"},
    {"nosubker", "without one, CONCURRENT_KERNEL alone"},
    {"serial", "KERNEL in place of CONCURRENT_KERNEL"},
    {"zeroed", "all, buffers zeroed by us beforehand"},
    {"oneset", "all, one buffer for all threads"},
    {"pinned", "all, profiling data in pinned host memory"},
    {"latency", "all, latency timestamps and launch attributes explicitly off"},
    {"nographs", "all, device graphs explicitly off"},
    {"large", "all, 8 MB buffers, device buffers of 32 MB"},
    {"early", "all, before CUDA is initialised (compare with none's)"},
    {"finalized", "all; after: cuptiFinalize"},
};

static int failed;
#define TRY(call)                                                                                  \
    do {                                                                                           \
        const result r_ = (call);                                                                  \
        if (r_ != 0) {                                                                             \
            failed = r_;                                                                           \
            fprintf(stderr, "  %s: %d\n", #call, r_);                                              \
        }                                                                                          \
    } while (0)

static void set_attribute(int which, uint8_t value) {
    size_t size = sizeof value;
    TRY(c.attribute(which, &size, &value));
}
static void set_size(int which, size_t value) {
    size_t size = sizeof value;
    TRY(c.attribute(which, &size, &value));
}

static void *subscriber;
static bool is(const std::string &name, std::initializer_list<const char *> of) {
    return std::find(of.begin(), of.end(), name) != of.end();
}

static void probe() {
    for (void *s = nullptr;; std::this_thread::sleep_for(std::chrono::milliseconds(50))) {
        TRY(c.subscribe(&s, on_call, nullptr));
        TRY(c.unsubscribe(s));
    }
}

static void switch_on(const std::string &v) {
    if (is(v, {"none", "opened"}))
        return;
    zeroed = v == "zeroed";
    if (zeroed)
        set_attribute(5, 1);
    if (v == "oneset")
        set_attribute(9, 0);
    if (is(v, {"pinned", "nosubpin"}))
        set_attribute(8, 1);
    if (v == "large") {
        buffer_bytes = 8 << 20;
        set_size(0, 32 << 20);
    }
    for (int i = 0; i < 16; i++) {
        uint8_t *b = (uint8_t *)aligned_alloc(4096, buffer_bytes);
        memset(b, 0, buffer_bytes);
        spare.push_back(b);
    }
    if (v == "probed")
        std::thread(probe).detach();
    else if (!is(v, {"registered", "nosub", "nosublat", "nosubpin", "nosubker"}))
        TRY(c.subscribe(&subscriber, on_call, nullptr));
    if (v == "subscribed")
        return;
    TRY(c.callbacks(requested, completed));
    if (v == "registered")
        return;
    if (is(v, {"latency", "nosublat"})) {
        TRY(c.latency(0));
        TRY(c.launch_attributes(0));
    }
    if (v == "nographs")
        TRY(c.device_graph(0));
    if (v != "copies")
        TRY(c.enable(v == "serial" ? KERNEL : CONCURRENT));
    if (!is(v, {"kernels", "nosubker"})) {
        TRY(c.enable(COPY));
        TRY(c.enable(PEER));
        TRY(c.enable(SET));
    }
}

static void switch_off(const std::string &v) {
    if (is(v, {"none", "opened", "subscribed", "registered"}))
        return;
    for (int kind : {KERNEL, CONCURRENT, COPY, PEER, SET})
        c.disable(kind);
    c.flush(0);
    if (subscriber != nullptr)
        TRY(c.unsubscribe(subscriber));
    if (v == "finalized")
        TRY(c.finalize());
}

static int child(const char *path, const std::string &v, int device) {
    const bool early = v == "early";
    if (v != "none" && !open_cupti(path))
        return 1;
    if (early)
        switch_on(v);
    if (cudaSetDevice(device) != cudaSuccess || cudaFree(nullptr) != cudaSuccess)
        return 1;
    cpu_set_t cores; // few, or the scheduler's choice is in the figures; CUPTI's thread has room
    CPU_ZERO(&cores);
    for (int i = 0; i < 4; i++)
        CPU_SET(2 + 6 * device + i, &cores);
    (void)sched_setaffinity(0, sizeof cores, &cores);
    measure();
    const cost before = measure();
    if (!early)
        switch_on(v);
    measure();
    const cost with = measure();
    switch_off(v);
    measure();
    const cost after = measure();
    for (const variant &x : variants)
        if (v == x.name)
            printf("%-11s row %5.2f %5.2f %5.2f (%+.2f %+.2f)  each 50 us %5.2f %5.2f %5.2f (%+.2f "
                   "%+.2f)  %zu records%s  %s\n",
                   x.name, before.row, with.row, after.row, with.row - before.row,
                   after.row - before.row, before.paced, with.paced, after.paced,
                   with.paced - before.paced, after.paced - before.paced, records,
                   failed != 0 ? " (a call failed)" : "", x.what);
    return 0;
}

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : "libcupti.so.13";
    if (argc > 4 && strcmp(argv[2], "--child") == 0)
        return child(path, argv[3], (int)strtol(argv[4], nullptr, 10));
    std::vector<std::string> wanted(argv + std::min(argc, 2), argv + argc);
    if (wanted.empty())
        for (const variant &v : variants)
            wanted.push_back(v.name);
    int failures = 0, devices = 1;
    const char *given = getenv("RECORD_COST_DEVICES");
    if (given != nullptr)
        devices = (int)strtol(given, nullptr, 10);
    for (size_t at = 0; at < wanted.size(); at += devices) { // one on each GPU at a time
        int started = 0;
        for (int d = 0; d < devices && at + d < wanted.size(); d++, started++)
            if (fork() == 0) {
                execl(argv[0], argv[0], path, "--child", wanted[at + d].c_str(),
                      std::to_string(d).c_str(), nullptr);
                _exit(127);
            }
        for (int d = 0; d < started; d++) {
            int status = 0;
            wait(&status);
            failures += status != 0;
        }
    }
    printf("case\trecord_cost\t%s\t%zu variants, %d failed\n", failures == 0 ? "ok" : "FAIL",
           wanted.size(), failures);
    return failures != 0;
}
