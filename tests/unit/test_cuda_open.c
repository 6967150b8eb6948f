/* SPDX-License-Identifier: Apache-2.0
 *
 * test_cuda_open.c - the CUDA engine where there is no GPU: it opens, serves its ABI
 * only, and says what is missing instead of failing to load.
 */
#include "unit.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/engine.h"

static const epo_engine *(*entry)(uint32_t);

static void test_abi(void) {
    CU_ASSERT_PTR_NULL(entry(EPO_ENGINE_ABI + 1));
    const epo_engine *engine = entry(EPO_ENGINE_ABI);
    CU_ASSERT_PTR_NOT_NULL_FATAL(engine);
    CU_ASSERT_EQUAL(engine->size, sizeof(epo_engine));
    CU_ASSERT_STRING_EQUAL(engine->name, "cuda");
}

static void test_without_gpu(void) {
    const epo_engine *engine = entry(EPO_ENGINE_ABI);
    epo_engine_group g = {sizeof g, EPO_GROUP_CONFIG_INIT, "test"};
    epo_group *group = NULL;
    g.config.engine = EPO_ENGINE_CUDA;
    g.config.rank = 0;
    g.config.ranks = 1;
    g.config.overlap = EPO_OFF;
    g.config.dispatcher = EPO_DISPATCH_ALLTOALL;
    g.config.delay_wgrad = EPO_OFF;
    epo_status status = engine->group_create(&g, &group);
    CU_ASSERT_EQUAL(status, EPO_E_UNSUPPORTED);
    CU_ASSERT_PTR_NULL(group);
    CU_ASSERT(strstr(engine->error(), "driver") != NULL || strstr(engine->error(), "GPU") != NULL);
}

int main(void) {
    static const CU_TestInfo tests[] = {
        {"one ABI", test_abi}, {"no GPU: said, not a crash", test_without_gpu}, CU_TEST_INFO_NULL};
    const char *build = getenv("EPO_BUILD_DIR");
    char path[1024];
    setenv("CUDA_VISIBLE_DEVICES", "", 1); /* also where there is one */
    snprintf(path, sizeof path, "%s/.libs/engine_cuda.so", build != NULL ? build : ".");
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (lib == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    *(void **)&entry = dlsym(lib, EPO_ENGINE_ENTRY);
    if (entry == NULL)
        return 1;
    int status = unit_run("cuda open", tests);
    dlclose(lib);
    return status;
}
