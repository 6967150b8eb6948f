/* SPDX-License-Identifier: Apache-2.0
 *
 * test_measure_gpu - lib/measure on GPUs, over tests/fake/cuda.c: the program starts
 * itself again with that as libcuda.so.1.
 */
#include "unit.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "measure/device.h"
#include "measure/gpu.h"

static int left(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    int (*count)(void) = NULL;
    *(void **)&count = dlsym(library, "fake_cuda_left");
    return count != NULL ? count() : -1;
}

static void memory_and_marks(void) {
    measure_device d;
    measure_mark from, to;
    void *memory = NULL;
    char text[4] = "abc", got[4] = "";
    double ms = -1;
    CU_ASSERT_EQUAL_FATAL(measure_device_open(EPO_ENGINE_CUDA, 3, &d), EPO_OK);
    CU_ASSERT_TRUE(d.gpu);
    CU_ASSERT_EQUAL(d.visible, 2);
    CU_ASSERT_EQUAL(d.number, 1); /* 3 modulo 2 */
    CU_ASSERT_EQUAL(d.sms, 7);
    CU_ASSERT_STRING_EQUAL(d.name, "FAKE GPU 1");
    CU_ASSERT_PTR_NOT_NULL(d.stream);
    CU_ASSERT_EQUAL_FATAL(measure_device_alloc(&d, 100, &memory), EPO_OK);
    CU_ASSERT_EQUAL(((char *)memory)[0], 0);
    CU_ASSERT_EQUAL(((char *)memory)[99], 0);
    CU_ASSERT_EQUAL(measure_device_put(&d, memory, text, 4), EPO_OK);
    CU_ASSERT_EQUAL(measure_device_get(&d, got, memory, 4), EPO_OK);
    CU_ASSERT_STRING_EQUAL(got, "abc");
    CU_ASSERT(measure_device_used_mb(&d) > 1);
    CU_ASSERT_EQUAL(measure_mark_create(&d, &from), EPO_OK);
    CU_ASSERT_EQUAL(measure_mark_create(&d, &to), EPO_OK);
    CU_ASSERT_EQUAL(measure_mark_set(&d, &from), EPO_OK);
    usleep(2000);
    CU_ASSERT_EQUAL(measure_mark_set(&d, &to), EPO_OK);
    CU_ASSERT_EQUAL(measure_mark_elapsed(&d, &from, &to, &ms), EPO_OK);
    CU_ASSERT(ms >= 2);
    measure_mark_destroy(&d, &from);
    measure_mark_destroy(&d, &to);
    measure_device_free(&d, memory);
    measure_device_close(&d);
    CU_ASSERT_EQUAL(left(), 0);
}

static void engine_decides(void) {
    measure_device d;
    CU_ASSERT_EQUAL_FATAL(measure_device_open(EPO_ENGINE_AUTO, -1, &d), EPO_OK);
    CU_ASSERT_TRUE(d.gpu);
    measure_device_settle(&d, "cuda");
    CU_ASSERT_TRUE(d.gpu);
    measure_device_settle(&d, "host"); /* the library took the other engine */
    CU_ASSERT_FALSE(d.gpu);
    CU_ASSERT_STRING_EQUAL(d.name, "host");
    CU_ASSERT_PTR_NULL(d.stream);
    CU_ASSERT_EQUAL(left(), 0);
    CU_ASSERT_EQUAL_FATAL(measure_device_open(EPO_ENGINE_HOST, 0, &d), EPO_OK);
    CU_ASSERT_FALSE(d.gpu);
    CU_ASSERT_EQUAL(d.tag, 0);
}

static void tags_tell_gpus_apart(void) {
    measure_device d[3];
    for (int i = 0; i < 3; i++)
        CU_ASSERT_EQUAL_FATAL(measure_device_open(EPO_ENGINE_CUDA, i, &d[i]), EPO_OK);
    CU_ASSERT(d[0].tag > 0 && d[0].tag < 1u << 24);
    CU_ASSERT(d[0].tag != d[1].tag);
    CU_ASSERT_EQUAL(d[0].tag, d[2].tag); /* of two GPUs the third is the first */
    for (int i = 0; i < 3; i++)
        measure_device_close(&d[i]);
    CU_ASSERT_EQUAL(left(), 0);
}

static void copy_rates(void) {
    measure_device d;
    double gbs = -1;
    CU_ASSERT_EQUAL_FATAL(measure_device_open(EPO_ENGINE_CUDA, 0, &d), EPO_OK);
    CU_ASSERT_EQUAL(measure_copy_rate(&d, 2, &gbs), EPO_OK); /* itself: the next one instead */
    CU_ASSERT(gbs > 0);
    measure_device_close(&d);
    setenv("FAKE_CUDA_GPUS", "1", 1);
    CU_ASSERT_EQUAL_FATAL(measure_device_open(EPO_ENGINE_CUDA, 0, &d), EPO_OK);
    CU_ASSERT_EQUAL(measure_copy_rate(&d, 1, &gbs), EPO_OK);
    CU_ASSERT_EQUAL(gbs, 0);
    measure_device_close(&d);
    unsetenv("FAKE_CUDA_GPUS");
    CU_ASSERT_EQUAL(left(), 0);
}

static void what_fails(void) {
    static const char *const calls[] = {"cuDevicePrimaryCtxRetain", "cuStreamCreate",
                                        "cuMemAlloc_v2"};
    measure_device d, before;
    void *memory = NULL;
    memset(&d, 0x11, sizeof d);
    before = d;
    for (int i = 0; i < 3; i++) {
        setenv("FAKE_CUDA_FAIL", calls[i], 1);
        CU_ASSERT_EQUAL(measure_device_open(EPO_ENGINE_CUDA, 0, &d), EPO_E_SYSTEM);
        CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "CUDA_ERROR_UNKNOWN (999)"));
        CU_ASSERT_EQUAL(memcmp(&d, &before, sizeof d), 0);
        CU_ASSERT_EQUAL(left(), 0);
    }
    unsetenv("FAKE_CUDA_FAIL");
    setenv("FAKE_CUDA_BYTES", "2000000", 1);
    CU_ASSERT_EQUAL_FATAL(measure_device_open(EPO_ENGINE_CUDA, 0, &d), EPO_OK);
    CU_ASSERT_EQUAL(measure_device_alloc(&d, 1000000, &memory), EPO_E_NOMEM);
    CU_ASSERT_PTR_NULL(memory);
    CU_ASSERT_PTR_NOT_NULL(
        strstr(epo_fail_text(), "need 1000000 bytes more, have 951424 of 2000000"));
    unsetenv("FAKE_CUDA_BYTES");
    double gbs;
    setenv("FAKE_CUDA_FAIL", "cuMemcpyAsync", 1);
    CU_ASSERT_EQUAL(measure_copy_rate(&d, 1, &gbs), EPO_E_SYSTEM);
    CU_ASSERT_PTR_NOT_NULL(strstr(epo_fail_text(), "MemcpyAsync"));
    setenv("FAKE_CUDA_FAIL", "cuStreamSynchronize", 1);
    CU_ASSERT_EQUAL(measure_device_sync(&d), EPO_E_SYSTEM);
    unsetenv("FAKE_CUDA_FAIL");
    measure_device_close(&d);
    CU_ASSERT_EQUAL(left(), 0);
}

/* In a folder of its own, under the name that is opened. */
static int start_again(char **argv) {
    char folder[] = "/tmp/epo-fake-cuda.XXXXXX", file[PATH_MAX], link[64], path[PATH_MAX + 64];
    const char *build = getenv("EPO_BUILD_DIR"), *was = getenv("LD_LIBRARY_PATH");
    snprintf(file, sizeof file, "%s/tests/fake/.libs/fake_cuda.so", build != NULL ? build : ".");
    if (realpath(file, path) == NULL || mkdtemp(folder) == NULL) {
        fprintf(stderr, "%s is not there\n", file);
        return 99;
    }
    snprintf(link, sizeof link, "%s/libcuda.so.1", folder);
    if (symlink(path, link) != 0)
        return 99;
    snprintf(path, sizeof path, "%s:%s", folder, was != NULL ? was : "");
    setenv("LD_LIBRARY_PATH", path, 1);
    setenv("EPO_FAKE_CUDA", folder, 1);
    execv("/proc/self/exe", argv);
    return 99;
}

int main(int argc, char **argv) {
    const char *folder = getenv("EPO_FAKE_CUDA");
    char link[64];
    (void)argc;
    if (folder == NULL)
        return start_again(argv);
    if (measure_driver_get() == NULL)
        fprintf(stderr, "%s\n", epo_fail_text());
    snprintf(link, sizeof link, "%s/libcuda.so.1", folder);
    const CU_TestInfo tests[] = {
        {"memory, copies, marks", memory_and_marks},
        {"the library's engine decides", engine_decides},
        {"tags tell GPUs apart", tags_tell_gpus_apart},
        {"copy rates: a peer, none", copy_rates},
        {"what fails names the call and leaves nothing", what_fails},
        CU_TEST_INFO_NULL,
    };
    int failed = unit_run("measure gpu", tests);
    unlink(link);
    rmdir(folder);
    return failed;
}
