/* SPDX-License-Identifier: Apache-2.0
 *
 * test_spank_task.c - task_init through the seam: what a task gets, and how a step ends.
 */
#include "spank_box.h"

#include "core/names.h"
#include "core/policy.h"
#include "task.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void on_reaches_the_task(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    fake_put(&fake.task, "LD_PRELOAD", "libjemalloc.so ");
    srun_to_task(give_all);
    HAS(fake.log, "step 7.0: on, dispatcher flex:deepep, delayed wgrad (");
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    char want[512];
    snprintf(want, sizeof want, "libjemalloc.so:%s", library);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, "LD_PRELOAD"), want);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "on");
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DISPATCHER), "flex");
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_FLEX_BACKEND), "deepep");
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DELAY_WGRAD), "1");
    CU_ASSERT_PTR_NOT_NULL(fake_get(&fake.task, EPO_OUT_REASON));
    CU_ASSERT_PTR_NULL(fake_get(&fake.task, EPO_STEP_RECORD));
    CU_ASSERT_STRING_EQUAL(fake.said,
                           "ep-overlap: on, dispatcher flex:deepep, delayed wgrad "
                           "(--ep-overlap=on, the command line; no GPUs: host engine, with its own "
                           "flex instead of deepep)\n");
    fake_end();
}

static void only_the_first_task_tells(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    srun_to_task(give_on);
    fake.task_id = 1;
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake.said, "");
    fake_end();
}

static void without_option_nothing_is_set(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    fake_put(&fake.task, "LD_PRELOAD", "a.so::b.so ");
    srun_to_task(NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.task.count, 1);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, "LD_PRELOAD"), "a.so::b.so ");
    CU_ASSERT_STRING_EQUAL(fake.said, "");
    fake_end();
}

static void auto_says_why_it_is_off(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    srun_to_task(give_auto);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "off");
    HAS(fake_get(&fake.task, EPO_OUT_REASON), "auto: ");
    CU_ASSERT_PTR_NULL(fake_get(&fake.task, "LD_PRELOAD"));
    HAS(fake.said, "ep-overlap: off (auto: ");
    fake_end();
}

/* The task's environment as text. */
static char *snapshot(void) {
    static char text[2][FAKE_TEXT];
    static int turn;
    char *into = text[turn ^= 1];
    into[0] = '\0';
    for (int i = 0; i < fake.task.count; i++) {
        size_t used = strlen(into);
        snprintf(into + used, FAKE_TEXT - used, "%s=%s\n", fake.task.names[i], fake.task.values[i]);
    }
    return into;
}

static void nested_off_leaves_no_trace(void) {
    static const char *const preloads[] = {NULL, "", "libjemalloc.so", "a.so::b.so ", " "};
    for (size_t i = 0; i < sizeof preloads / sizeof preloads[0]; i++) {
        fake_begin(S_CTX_LOCAL);
        configure("environment = ( { name = \"X\"; value = \"1\"; } );");
        fake_put(&fake.task, "HOME", "/root");
        if (preloads[i] != NULL)
            fake_put(&fake.task, "LD_PRELOAD", preloads[i]);
        fake_put(&fake.task, EPO_OUT_DECISION, "the user's own");
        char *before = snapshot();
        srun_to_task(give_all);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
        CU_ASSERT_PTR_NOT_NULL(fake_get(&fake.task, EPO_OUT_SET));
        srun_to_task(give_off);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
        CU_ASSERT_STRING_EQUAL(snapshot(), before);
        fake_end();
    }
}

static void nested_on_has_the_library_once(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    fake_put(&fake.task, "LD_PRELOAD", "libjemalloc.so");
    for (int depth = 0; depth < 3; depth++) {
        srun_to_task(give_on);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    }
    char want[512];
    snprintf(want, sizeof want, "libjemalloc.so:%s", library);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, "LD_PRELOAD"), want);
    /* the user changed the list in between: only ours goes */
    snprintf(want, sizeof want, "new.so:libjemalloc.so:%s", library);
    fake_put(&fake.task, "LD_PRELOAD", want);
    srun_to_task(give_off);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, "LD_PRELOAD"), "new.so:libjemalloc.so");
    fake_end();
}

static void special_steps_are_left_alone(void) {
    static const uint32_t steps[] = {0xfffffffb, 0xfffffffc, 0xfffffffa, 0xfffffff0};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        fake_begin(S_CTX_REMOTE);
        configure("");
        fake.step = steps[i];
        begin(S_CTX_REMOTE);
        give_all();
        ep_step_decide(&plugin, NULL);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
        CU_ASSERT_EQUAL(fake.task.count, 0);
        CU_ASSERT_STRING_EQUAL(fake.log, "");
        /* and srun's side writes no record for them */
        fake_put(&fake.own, EPO_STEP_RECORD, "old");
        begin(S_CTX_LOCAL);
        CU_ASSERT_EQUAL(ep_submit_record(&plugin, NULL), 0);
        CU_ASSERT_PTR_NULL(fake_get(&fake.own, EPO_STEP_RECORD));
        fake_end();
    }
}

static void a_batch_script_without_srun_is_told(void) {
    static const struct {
        const char *script;
        bool told;
    } cases[] = {{"#!/bin/sh\npython train.py\n", true},
                 {"#!/bin/sh\nsrun python train.py\n", false},
                 {"#!/bin/sh\n/usr/bin/srun -n4 x\n", false},
                 {"#!/bin/sh\n./mysrun.sh\n", true},
                 {"", true}};
    char script[320];
    snprintf(script, sizeof script, "%s/script", folder);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fake_begin(S_CTX_REMOTE);
        write_file(script, cases[i].script);
        fake.step = 0xfffffffb;
        fake.arguments[0] = script;
        fake.argument_count = 1;
        begin(S_CTX_REMOTE);
        give_on();
        ep_step_decide(&plugin, NULL);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
        CU_ASSERT_EQUAL(lines(fake.said), cases[i].told);
        if (cases[i].told)
            HAS(fake.said, "applies to srun's steps");
        fake_end();
    }
}

static void a_batch_script_that_a_step_submitted_is_as_without(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    fake_put(&fake.task, "LD_PRELOAD", "own.so");
    srun_to_task(give_all);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0); /* its environment goes with sbatch */
    CU_ASSERT(fake.task.count > 1);
    fake_next(S_CTX_REMOTE);
    fake.step = 0xfffffffb;
    begin(S_CTX_REMOTE);
    ep_step_decide(&plugin, NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.task.count, 1);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, "LD_PRELOAD"), "own.so");
    fake_end();
}

static void off_wins_over_a_decision_by_hand(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    fake_put(&fake.task, EPO_OUT_DECISION, "on");
    srun_to_task(NULL); /* no option: as without the plugin */
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.task.count, 1);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "on");
    fake_next(S_CTX_LOCAL);
    srun_to_task(give_off);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "off");
    HAS(fake_get(&fake.task, EPO_OUT_REASON), "--ep-overlap=off, the command line");
    ep_task_restore(&plugin, NULL); /* as a nested step does first */
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "on");
    CU_ASSERT_EQUAL(fake.task.count, 1);
    fake_end();
}

static void a_program_of_a_step_is_no_batch_script(void) {
    char script[320];
    snprintf(script, sizeof script, "%s/script", folder);
    fake_begin(S_CTX_REMOTE);
    write_file(script, "#!/bin/sh\npython train.py\n");
    fake.arguments[0] = script;
    fake.argument_count = 1;
    begin(S_CTX_REMOTE);
    give_on();
    ep_task_batch_note(&plugin, NULL);
    CU_ASSERT_STRING_EQUAL(fake.said, "");
    fake_end();
}

static void numbers_that_slurm_lacks_change_nothing(void) {
    fake_begin(S_CTX_REMOTE);
    configure("");
    fake.no_numbers = true;
    begin(S_CTX_REMOTE);
    ep_step_decide(&plugin, NULL);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.task.count, 0);
    fake_end();
}

static void what_speaks_against_a_preload_is_told(void) {
    static const char elf32[] = "\177ELF\001\001\001";
    char program[320], text[64] = "";
    snprintf(program, sizeof program, "%s/program", folder);
    fake_begin(S_CTX_LOCAL);
    configure("");
    FILE *file = fopen(program, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    memcpy(text, elf32, sizeof elf32);
    fwrite(text, 1, sizeof text, file);
    fclose(file);
    fake.arguments[0] = program;
    fake.argument_count = 1;
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_PTR_NULL(fake_get(&fake.task, "LD_PRELOAD"));
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "on");
    HAS(fake.said, "not preloaded: the program is built for another kind of machine (32-bit");
    /* a script leads to its interpreter, which is this machine's */
    write_file(program, "#! /bin/sh -e\n");
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_PTR_NOT_NULL(fake_get(&fake.task, "LD_PRELOAD"));
    /* a script whose interpreter is built for another machine */
    char self[440], other[420];
    snprintf(other, sizeof other, "%s.32", program);
    file = fopen(other, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    fwrite(text, 1, sizeof text, file);
    fclose(file);
    snprintf(self, sizeof self, "#!\t%s -e\n", other);
    write_file(program, self);
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_PTR_NULL(fake_get(&fake.task, "LD_PRELOAD"));
    unlink(other);
    /* a script that runs itself ends nowhere */
    snprintf(self, sizeof self, "#!%s\n", program);
    write_file(program, self);
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    fake_end();
}

static const char *task(const char *name) {
    const char *value = fake_get(&fake.task, name);
    return value != NULL ? value : "";
}

static void gpu_steps_get_the_variables_of_an_overlap_run(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    fake_put(&fake.task, "CUDA_VISIBLE_DEVICES", "0,1");
    fake_put(&fake.task, "TORCH_NCCL_HIGH_PRIORITY", "0");
    srun_to_task(give_all);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(task("CUDA_DEVICE_MAX_CONNECTIONS"), "32");
    CU_ASSERT_STRING_EQUAL(task("TORCH_NCCL_HIGH_PRIORITY"), "0"); /* the user's */
    CU_ASSERT_STRING_EQUAL(task("TORCH_NCCL_AVOID_RECORD_STREAMS"), "1");
    CU_ASSERT_STRING_EQUAL(task("NVTE_FWD_LAYERNORM_SM_MARGIN"), "20");
    CU_ASSERT_STRING_EQUAL(task("PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True");
    CU_ASSERT_STRING_EQUAL(task("NCCL_GRAPH_REGISTER"), "0");
    CU_ASSERT_STRING_EQUAL(task(EPO_OUT_MEGATRON_ARGS),
                           "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type flex "
                           "--moe-flex-dispatcher-backend deepep --moe-router-dtype fp32 "
                           "--delay-wgrad-compute");
    HAS(task(EPO_OUT_BRIDGE_OVERRIDES), "comm_overlap.delay_wgrad_compute=true");
    CU_ASSERT_EQUAL(lines(fake.said), 2);
    HAS(fake.said, "ep-overlap: set CUDA_DEVICE_MAX_CONNECTIONS=32 ");
    HAS_NOT(fake.said, "host engine");
    /* and a nested off takes every one of them back */
    srun_to_task(give_off);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(fake.task.count, 2);
    fake_end();
}

static void give_flex(void) {
    give_on();
    give("ep-dispatcher", "flex");
}

static void variables_follow_the_dispatcher(void) {
    fake_begin(S_CTX_LOCAL);
    configure(
        "node_classes = ( { class = \"gb200\"; nodes = \"n1\"; overlap = \"on\"; dispatcher = "
        "\"flex:hybridep\"; } );");
    fake_put(&fake.task, "SLURM_STEP_GPUS", "0");
    fake_put(&fake.task, "TMPDIR", folder);
    fake_put(&fake.own, "SLURM_NODELIST", "n1");
    static char arguments[][40] = {"python",
                                   "pretrain_gpt.py",
                                   "--bf16",
                                   "--expert-model-parallel-size=64",
                                   "--num-experts=64",
                                   "--use-nccl-ub",
                                   "--overlap-moe-expert-parallel-comm"};
    for (int i = 0; i < 7; i++)
        fake.arguments[i] = arguments[i];
    fake.argument_count = 7;
    srun_to_task(give_auto);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(task("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"), "64");
    CU_ASSERT_STRING_EQUAL(task("NVLINK_DOMAIN_SIZE"), "72");
    CU_ASSERT_STRING_EQUAL(task("USE_MNNVL"), "1");
    CU_ASSERT_STRING_EQUAL(task("NUM_OF_TOKENS_PER_CHUNK_COMBINE_API"), "64");
    CU_ASSERT_STRING_EQUAL(task("PYTORCH_CUDA_ALLOC_CONF"), ""); /* user buffers */
    CU_ASSERT_STRING_EQUAL(task("NCCL_GRAPH_REGISTER"), "");
    HAS(task("HYBRID_EP_CACHE_DIR"), folder);
    fake.arguments[0] = fake.arguments[1] = arguments[2]; /* another program's --use-nccl-ub */
    srun_to_task(give_all);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(task("NCCL_GRAPH_REGISTER"), "0");
    for (int i = 0; i < 2; i++)
        fake.arguments[i] = arguments[i];
    srun_to_task(give_auto);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    char cache[300];
    snprintf(cache, sizeof cache, "%s", task("HYBRID_EP_CACHE_DIR"));
    struct stat info;
    CU_ASSERT_EQUAL(stat(cache, &info), 0);
    CU_ASSERT_EQUAL(info.st_mode & 07777, 0700);
    CU_ASSERT_EQUAL(rmdir(cache), 0);
    /* a folder somebody else prepared is not used */
    CU_ASSERT_EQUAL(symlink("/tmp", cache), 0);
    srun_to_task(give_off);
    ep_task_start(&plugin, NULL);
    srun_to_task(give_auto);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(task("HYBRID_EP_CACHE_DIR"), "");
    unlink(cache);
    fake_end();
}

/* An explicit flex too, and however the site writes the class. */
static void a_rack_takes_hybridep(void) {
    static const char *const classes[][2] = {{"gb200", "hybridep"},
                                             {"NVIDIA GB300", "hybridep"},
                                             {"GH200", "deepep"},
                                             {"gbu", "deepep"}};
    static char arguments[][40] = {"python",
                                   "pretrain_gpt.py",
                                   "--bf16",
                                   "--num-experts=64",
                                   "--expert-model-parallel-size=64",
                                   "--overlap-moe-expert-parallel-comm"};
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++)
        for (int given = 0; given < 2; given++) {
            char text[200];
            fake_begin(S_CTX_LOCAL);
            snprintf(text, sizeof text,
                     "node_classes = ( { class = \"%s\"; nodes = \"n1\"; overlap = \"on\"; "
                     "dispatcher = \"flex\"; } );",
                     classes[i][0]);
            configure(text);
            fake_put(&fake.task, "SLURM_STEP_GPUS", "0");
            fake_put(&fake.own, "SLURM_NODELIST", "n1");
            for (int a = 0; a < 6; a++)
                fake.arguments[a] = arguments[a];
            fake.argument_count = 6;
            srun_to_task(given ? give_flex : give_auto);
            ep_task_start(&plugin, NULL);
            HAS(task("EP_OVERLAP_MEGATRON_ARGS"), classes[i][1]);
            fake_end();
        }
}

static void the_site_sets_variables(void) {
    fake_begin(S_CTX_LOCAL);
    configure("environment = ( { name = \"A\"; value = \"1\"; }, { name = \"B\"; value = \"2\"; "
              "when = \"always\"; }, { name = \"C\"; value = \"3\"; when = \"always\"; } );");
    fake_put(&fake.task, "A", "mine");
    fake_put(&fake.task, "B", "mine\n");
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(task("A"), "mine");
    CU_ASSERT_STRING_EQUAL(task("B"), "2");
    CU_ASSERT_STRING_EQUAL(task("C"), "3");
    HAS(fake.said, "ep-overlap: set B=2 (by the site, instead of \"mine?\") C=3\n");
    srun_to_task(give_off);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(task("B"), "mine\n");
    CU_ASSERT_EQUAL(fake.task.count, 2);
    fake_end();
}

static void harmful_values_are_kept_and_told(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    fake_put(&fake.task, "CUDA_VISIBLE_DEVICES", "0");
    fake_put(&fake.task, "CUDA_DEVICE_MAX_CONNECTIONS", "1");
    fake_put(&fake.task, "CUDA_LAUNCH_BLOCKING", "1");
    fake_put(&fake.task, "NCCL_P2P_DISABLE", "1");
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(task("CUDA_DEVICE_MAX_CONNECTIONS"), "1");
    HAS(fake.said, "warning: your NCCL_P2P_DISABLE=1 is kept");
    HAS(fake.said, "CUDA_LAUNCH_BLOCKING");
    HAS(fake.said, "needs CUDA_DEVICE_MAX_CONNECTIONS 32");
    fake_end();
    /* without GPUs none of them matters */
    fake_begin(S_CTX_LOCAL);
    fake_put(&fake.task, "CUDA_LAUNCH_BLOCKING", "1");
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_EQUAL(lines(fake.said), 1);
    fake_end();
}

static void a_loader_that_does_not_take_it(void) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    srun_to_task(give_on);
    fake.loader_says = "true: error while loading shared libraries: libgone.so.1\nmore";
    for (int i = 0; i < 3; i++) { /* tasks of one node */
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
        CU_ASSERT_STRING_EQUAL(task("LD_PRELOAD"), "");
        HAS(task(EPO_OUT_REASON),
            "not preloaded: the loader does not take the library: true: error "
            "while loading shared libraries: libgone.so.1");
    }
    CU_ASSERT_EQUAL(fake.tries, 1);
    fake_end();
}

static void programs_that_enter_a_container(void) {
    static const struct {
        const char *arguments[6];
        bool container;
    } cases[] = {{{"apptainer", "exec", "x.sif", "true"}, true},
                 {{"/opt/bin/singularity", "--quiet", "run", "x.sif"}, true},
                 {{"env", "A=1", "apptainer", "exec"}, true},
                 {{"bash", "-c", "cd /x && apptainer exec --nv x.sif python t.py"}, true},
                 {{"/bin/sh", "-ec", "exec singularity shell x"}, true},
                 {{"bash", "-c", "echo 'apptainer exec'"}, false},
                 {{"/home/apptainer/train", "exec"}, false},
                 {{"apptainer", "--version"}, false},
                 {{"python", "singularity.py", "run"}, false},
                 {{"bash", "apptainer.sh"}, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fake_begin(S_CTX_LOCAL);
        configure("");
        for (fake.argument_count = 0; cases[i].arguments[fake.argument_count] != NULL;)
            fake.argument_count++;
        for (int j = 0; j < fake.argument_count; j++)
            fake.arguments[j] = (char *)(uintptr_t)cases[i].arguments[j];
        srun_to_task(give_on);
        CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
        CU_ASSERT_EQUAL(strstr(fake.said, "enters a container") != NULL, cases[i].container);
        CU_ASSERT_EQUAL(task("LD_PRELOAD")[0] == '\0', cases[i].container);
        fake_end();
    }
    fake_begin(S_CTX_LOCAL);
    fake_put(&fake.task, "SLURM_CONTAINER", "/bundle");
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(task("LD_PRELOAD"), "");
    HAS(fake.said, "OCI container");
    fake_end();
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(on_reaches_the_task),
                                 TEST(only_the_first_task_tells),
                                 TEST(without_option_nothing_is_set),
                                 TEST(auto_says_why_it_is_off),
                                 TEST(nested_off_leaves_no_trace),
                                 TEST(nested_on_has_the_library_once),
                                 TEST(special_steps_are_left_alone),
                                 TEST(a_batch_script_without_srun_is_told),
                                 TEST(a_program_of_a_step_is_no_batch_script),
                                 TEST(a_batch_script_that_a_step_submitted_is_as_without),
                                 TEST(off_wins_over_a_decision_by_hand),
                                 TEST(numbers_that_slurm_lacks_change_nothing),
                                 TEST(what_speaks_against_a_preload_is_told),
                                 TEST(gpu_steps_get_the_variables_of_an_overlap_run),
                                 TEST(variables_follow_the_dispatcher),
                                 TEST(a_rack_takes_hybridep),
                                 TEST(the_site_sets_variables),
                                 TEST(harmful_values_are_kept_and_told),
                                 TEST(a_loader_that_does_not_take_it),
                                 TEST(programs_that_enter_a_container),
                                 CU_TEST_INFO_NULL};
    return box_run("spank task", tests);
}
