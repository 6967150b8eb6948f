/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_driver.c - the driver beside the CUDA runtime of cuda_runtime.c: words that streams write
 * and wait for, maps for TMA; and counts of a thread's calls of both.
 */
#include "config.h"

#include "cuda_runtime.h"

#include "backend/cuda/gpu.h"

#include <stdio.h>
#include <string.h>

enum { NAMES = 64 };

static bool stream_ops;

/* Of this thread. */
static _Thread_local struct {
    bool on;
    int count;
    struct {
        const char *name;
        long calls;
    } of[NAMES];
} counts;

void fake_cuda_count(void) {
    memset(&counts, 0, sizeof counts);
    counts.on = true;
}

long fake_cuda_counted(const char *call) {
    long n = 0;
    for (int i = 0; i < counts.count; i++)
        n += call == NULL || strcmp(counts.of[i].name, call) == 0 ? counts.of[i].calls : 0;
    return n;
}

void fake_cuda_counts(char *text, size_t size) {
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < counts.count && used + 60 < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s %ld", i > 0 ? ", " : "",
                                 counts.of[i].name, counts.of[i].calls);
}

void fake_cuda_stream_ops(bool on) { stream_ops = on; }

void fake_cuda_note(const char *call) {
    int i = 0;
    while (i < counts.count && strcmp(counts.of[i].name, call) != 0)
        i++;
    if (!counts.on || i == NAMES)
        return;
    counts.of[i].name = call;
    counts.of[i].calls++;
    counts.count += i == counts.count;
}

/* ---- maps ---- */

static CUresult fake_map(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                         const cuuint64_t *size, const cuuint64_t *pitch, const cuuint32_t *box,
                         const cuuint32_t *step, CUtensorMapInterleave interleave,
                         CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                         CUtensorMapFloatOOBfill fill) {
    const cuuint64_t words[] = {(cuuint64_t)(uintptr_t)base,
                                size[0],
                                size[1],
                                size[2],
                                pitch[0],
                                pitch[1],
                                box[0],
                                box[1],
                                step[0],
                                (cuuint64_t)type,
                                rank,
                                (cuuint64_t)interleave,
                                (cuuint64_t)swizzle + (cuuint64_t)promotion + (cuuint64_t)fill};
    fake_cuda_note("cuTensorMapEncodeTiled");
    memset(map, 0, sizeof *map);
    memcpy(map, words, sizeof words);
    return ((uintptr_t)base & 15) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **fn, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    CUresult (*map)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                    const cuuint64_t *, const cuuint32_t *, const cuuint32_t *,
                    CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                    CUtensorMapFloatOOBfill) = fake_map;
    (void)version;
    (void)flags;
    if (stream_ops && strcmp(symbol, "cuTensorMapEncodeTiled") == 0) {
        memcpy(fn, &map, sizeof map);
        *result = cudaDriverEntryPointSuccess;
        return cudaSuccess;
    }
    *fn = NULL;
    *result = cudaDriverEntryPointSymbolNotFound;
    return cudaErrorNotSupported;
}

/* ---- the driver --------------------------------------------------------------------- */

static CUresult driver_attribute(int *value, CUdevice_attribute a, CUdevice device) {
    (void)a;
    (void)device;
    *value = stream_ops;
    return CUDA_SUCCESS;
}
static void word_reach(CUdeviceptr at, cuuint64_t value) {
    uint64_t *word = (uint64_t *)(uintptr_t)at;
    uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (seen < value && !__atomic_compare_exchange_n(word, &seen, value, false, __ATOMIC_RELEASE,
                                                        __ATOMIC_RELAXED))
        ;
}
static CUresult driver_word(CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned flags) {
    (void)stream;
    (void)flags;
    if (fake_cuda_turn("cuStreamWaitValue64 or cuStreamWriteValue64"))
        return CUDA_ERROR_UNKNOWN;
    word_reach(at, value);
    return CUDA_SUCCESS;
}
static CUresult driver_batch(CUstream stream, unsigned count, CUstreamBatchMemOpParams *ops,
                             unsigned flags) {
    (void)stream;
    (void)flags;
    if (fake_cuda_turn("cuStreamBatchMemOp"))
        return CUDA_ERROR_UNKNOWN;
    for (unsigned i = 0; i < count; i++)
        word_reach(ops[i].writeValue.address, ops[i].writeValue.value64);
    return CUDA_SUCCESS;
}
static CUresult driver_name(CUresult r, const char **name) {
    (void)r;
    *name = "failed";
    return CUDA_SUCCESS;
}
static const gpu_driver the_driver = {.wait64 = driver_word,
                                      .write64 = driver_word,
                                      .batch = driver_batch,
                                      .attribute = driver_attribute,
                                      .name = driver_name,
                                      .version = CUDART_VERSION};

/* The linker puts this in front of driver.c's (--wrap), as the next ones. */
const gpu_driver *__wrap_gpu_driver_get(const char **why);
const gpu_driver *__wrap_gpu_driver_get(const char **why) {
    (void)why;
    return &the_driver;
}
