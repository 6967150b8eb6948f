/* SPDX-License-Identifier: Apache-2.0
 *
 * test_spank_intercept.c - which steps get the interceptor, in which mode, and why not.
 */
#include "spank_box.h"

#include "core/names.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static char interceptor[320];

static const char *task(const char *name) {
    const char *value = fake_get(&fake.task, name);
    return value != NULL ? value : "";
}

/* The interceptor is a copy of the library. */
static void install(void) {
    snprintf(interceptor, sizeof interceptor, "%s/libep_overlap_intercept.so", folder);
    unlink(interceptor);
    CU_ASSERT_EQUAL(link(library, interceptor), 0);
}

static void begin_step(const char *site, const char *program, const char *argument) {
    fake_begin(S_CTX_LOCAL);
    configure(site);
    fake_put(&fake.task, "SLURM_STEP_GPUS", "0,1");
    fake_put(&fake.own, "SLURM_NODELIST", "n1");
    fake.arguments[0] = (char *)(uintptr_t)program;
    fake.arguments[1] = (char *)(uintptr_t)argument;
    fake.argument_count = 2;
}

static void start(void (*options)(void)) {
    srun_to_task(options);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
}

#define CLASS "node_classes = ( { class = \"h100\"; nodes = \"n1\"; overlap = \"on\"; } );"
#define ON "defaults = { overlap = \"on\"; };"

static void the_mode_follows_decision_site_and_program(void) {
    static const struct {
        const char *site, *program, *argument;
        void (*options)(void);
        const char *interpose, *record;
    } cases[] = {
        {"", "python", "train.py", give_on, "accelerate", ""},
        {"", "bash", "run.sh", give_on, "accelerate", ""}, /* undecided */
        {"", "/opt/bin/ep-train", "-n", give_on, "", ""},
        {CLASS, "python", "train.py", give_auto, "", ""},
        {CLASS "SITE:interpose", "python", "train.py", give_auto, "observe", ""},
        {ON, "python", "train.py", NULL, "", ""},
        {ON "SITE:interpose", "python", "train.py", NULL, "accelerate", ""},
        {ON "SITE:record", "python", "train.py", NULL, "observe", "1"},
        {"SITE:record", "python", "train.py", give_on, "accelerate", "1"},
        {"SITE:record", "/opt/bin/ep-train", "-n", give_on, "observe", "1"},
        {"SITE:interpose", "/opt/bin/ep-train", "-n", give_on, "", ""},
        {"SITE:record", "python", "train.py", give_off, "", ""},
        {"SITE:interpose", "python", "train.py", give_off, "", ""},
    };
    install();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char site[400];
        const char *key = strstr(cases[i].site, "SITE:");
        snprintf(site, sizeof site, "%.*s", (int)(key != NULL ? key - cases[i].site : 399),
                 cases[i].site);
        box_preload_keys = key == NULL                       ? ""
                           : strcmp(key, "SITE:record") == 0 ? "record = true;"
                                                             : "interpose = true;";
        begin_step(site, cases[i].program, cases[i].argument);
        start(cases[i].options);
        CU_ASSERT_STRING_EQUAL(task(EPO_OUT_INTERPOSE), cases[i].interpose);
        CU_ASSERT_STRING_EQUAL(task(EPO_OUT_RECORD), cases[i].record);
        CU_ASSERT_EQUAL(strstr(task("LD_PRELOAD"), interceptor) != NULL,
                        cases[i].interpose[0] != '\0');
        fake_end();
    }
    box_preload_keys = "";
    unlink(interceptor);
}

/* Of a GPU that a task does not see no expandable segment is carried. */
static void the_allocator_stays_where_a_task_sees_its_own_gpu(void) {
    static const struct {
        const char *visible, *program, *interpose, *own;
        uint32_t tasks;
        const char *allocator, *registers;
    } cases[] = {
        {"0,1", "python", "", "", 2, "expandable_segments:True", "0"},
        {"1", "python", "", "", 2, "", ""},
        {"GPU-5d5ba0d6", "python", "", "", 8, "", ""},
        {"1", "python", "", "", 1, "expandable_segments:True", "0"},        /* no peer here */
        {"1", "python", "observe", "", 2, "expandable_segments:True", "0"}, /* carries nothing */
        {"1", "/opt/bin/ep-train", "", "", 2, "expandable_segments:True", "0"},
        {"1", "python", "", "expandable_segments:True", 2, "expandable_segments:True", "0"},
        {"", "python", "", "", 2, "expandable_segments:True", "0"}, /* all are seen */
    };
    install();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        begin_step("", cases[i].program, "train.py");
        fake.local_tasks = cases[i].tasks;
        fake_put(&fake.task, "CUDA_VISIBLE_DEVICES", cases[i].visible);
        if (cases[i].interpose[0] != '\0')
            fake_put(&fake.task, EPO_OUT_INTERPOSE, cases[i].interpose);
        if (cases[i].own[0] != '\0')
            fake_put(&fake.task, "PYTORCH_CUDA_ALLOC_CONF", cases[i].own);
        start(give_on);
        CU_ASSERT_STRING_EQUAL(task("PYTORCH_CUDA_ALLOC_CONF"), cases[i].allocator);
        CU_ASSERT_STRING_EQUAL(task("NCCL_GRAPH_REGISTER"), cases[i].registers);
        fake_end();
    }
    unlink(interceptor);
}

static void a_users_word_wins(void) {
    install();
    begin_step("", "python", "train.py");
    fake_put(&fake.task, EPO_OUT_INTERPOSE, "off");
    start(give_on);
    CU_ASSERT_STRING_EQUAL(task(EPO_OUT_INTERPOSE), "off");
    CU_ASSERT_STRING_EQUAL(task("LD_PRELOAD"), library);
    HAS_NOT(fake.said, "; NCCL");
    fake_end();
    begin_step("", "python", "train.py");
    fake_put(&fake.task, EPO_OUT_INTERPOSE, "observe");
    fake_put(&fake.task, EPO_OUT_RECORD, "5-10");
    start(give_on);
    CU_ASSERT_STRING_EQUAL(task(EPO_OUT_INTERPOSE), "observe");
    CU_ASSERT_STRING_EQUAL(task(EPO_OUT_RECORD), "5-10");
    HAS(fake.said, "; NCCL observed)");
    fake_end();
    unlink(interceptor);
}

static void both_libraries_come_last_and_go_together(void) {
    char want[800];
    install();
    begin_step("", "python", "train.py");
    fake_put(&fake.task, "LD_PRELOAD", "libjemalloc.so ");
    start(give_on);
    snprintf(want, sizeof want, "libjemalloc.so:%s:%s", interceptor, library);
    CU_ASSERT_STRING_EQUAL(task("LD_PRELOAD"), want);
    HAS(fake.said, "; NCCL accelerated)");
    /* a nested step has them once */
    start(give_on);
    CU_ASSERT_STRING_EQUAL(task("LD_PRELOAD"), want);
    /* where the user added to the list, both go and the rest stays */
    snprintf(want, sizeof want, "new.so:libjemalloc.so:%s:%s", interceptor, library);
    fake_put(&fake.task, "LD_PRELOAD", want);
    start(give_off);
    CU_ASSERT_STRING_EQUAL(task("LD_PRELOAD"), "new.so:libjemalloc.so");
    CU_ASSERT_STRING_EQUAL(task(EPO_OUT_INTERPOSE), "");
    fake_end();
    unlink(interceptor);
}

static void why_there_is_none_is_told(void) {
    begin_step("", "python", "train.py");
    start(give_on);
    CU_ASSERT_STRING_EQUAL(task(EPO_OUT_INTERPOSE), "");
    HAS(fake.said, "NCCL is not intercepted: ");
    HAS(fake.said, "libep_overlap_intercept.so: No such file");
    fake_end();
    /* without GPUs there is no NCCL to speak of */
    install();
    fake_begin(S_CTX_LOCAL);
    configure("");
    start(give_on);
    HAS_NOT(fake.said, "; NCCL");
    CU_ASSERT_STRING_EQUAL(task(EPO_OUT_INTERPOSE), "");
    fake_end();
    /* a folder that others may write is not searched for it */
    begin_step("", "python", "train.py");
    CU_ASSERT_EQUAL(unlink(interceptor), 0);
    CU_ASSERT_EQUAL(symlink("/tmp/anybodys.so", interceptor), 0);
    start(give_on);
    HAS(fake.said, "NCCL is not intercepted: ");
    CU_ASSERT_STRING_EQUAL(task("LD_PRELOAD"), library);
    fake_end();
    unlink(interceptor);
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(the_mode_follows_decision_site_and_program),
                                 TEST(the_allocator_stays_where_a_task_sees_its_own_gpu),
                                 TEST(a_users_word_wins),
                                 TEST(both_libraries_come_last_and_go_together),
                                 TEST(why_there_is_none_is_told),
                                 CU_TEST_INFO_NULL};
    return box_run("spank intercept", tests);
}
