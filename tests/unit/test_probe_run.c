/* SPDX-License-Identifier: Apache-2.0
 *
 * test_probe_run.c - starting the probe: its limits, what it gets, how it fails, and
 * what it finds with a stand-in for NVML and made-up Python trees.
 */
#include "core/probe_record.h"
#include "core/probe_run.h"
#include "unit.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef EPO_PROBE_PROGRAM
#error "the Makefile says where the probe was built"
#endif

static char folder[] = "/tmp/test_probe.XXXXXX";
static epo_facts *facts;

/* The task's variables: NAME, VALUE, ..., NULL. */
static const char *const *variables;

static const char *variable(void *context, const char *name) {
    (void)context;
    for (const char *const *v = variables; v != NULL && v[0] != NULL; v += 2)
        if (strcmp(v[0], name) == 0)
            return v[1];
    return NULL;
}

static void path_of(char path[512], const char *format, ...) __attribute__((format(printf, 2, 3)));
static void path_of(char path[512], const char *format, ...) {
    char rest[256];
    va_list args;
    va_start(args, format);
    vsnprintf(rest, sizeof rest, format, args);
    va_end(args);
    snprintf(path, 512, "%s/%s", folder, rest);
}

/* A file and the folders above it, inside the test's folder. */
static void put(const char *name, const char *content, mode_t mode) {
    char path[512];
    path_of(path, "%s", name);
    for (char *slash = path + strlen(folder) + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = '\0';
        CU_ASSERT_TRUE(mkdir(path, 0755) == 0 || errno == EEXIST);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    fputs(content, file);
    fclose(file);
    chmod(path, mode);
}

static void copy(const char *from, const char *name) {
    char path[512], block[65536];
    path_of(path, "%s", name);
    FILE *in = fopen(from, "r"), *out = fopen(path, "w");
    if (in == NULL || out == NULL)
        abort();
    for (size_t n; (n = fread(block, 1, sizeof block, in)) > 0;)
        fwrite(block, 1, n, out);
    fclose(in);
    fclose(out);
    chmod(path, 0755);
}

static epo_status start(const char *program, bool nvml, int timeout_ms, char *const *arguments,
                        int count) {
    char library[512];
    path_of(library, "fake_nvml.so");
    epo_facts_destroy(facts);
    facts = epo_facts_create();
    int fd = open(program, O_RDONLY | O_CLOEXEC);
    CU_ASSERT_TRUE_FATAL(fd >= 0);
    struct epo_probe_request request = {.program = fd,
                                        .nvml_path = nvml ? library : NULL,
                                        .node = "n1",
                                        .variable = variable,
                                        .arguments = arguments,
                                        .argument_count = count,
                                        .timeout_ms = timeout_ms};
    epo_status status = epo_probe_run(&request, facts);
    close(fd);
    return status;
}

static const char *text_of(const char *key) {
    const epo_fact *fact = epo_facts_find(facts, key);
    return fact == NULL                     ? "(absent)"
           : fact->kind == EPO_FACT_UNKNOWN ? "(unknown)"
           : fact->kind == EPO_FACT_NULL    ? "(unset)"
                                            : fact->text;
}

static const char *why(const char *key) {
    const epo_fact *fact = epo_facts_find(facts, key);
    return fact == NULL ? "" : fact->kind == EPO_FACT_UNKNOWN ? fact->text : fact->source;
}

#define IS(key, text) CU_ASSERT_STRING_EQUAL(text_of(key), text)
#define HAS(text, part) CU_ASSERT_PTR_NOT_NULL(strstr(text, part))

static epo_status ask_gpus(const char *table, const char *visible, const char *held) {
    const char *all[] = {"PATH", "/nonexistent", "", "", "", "", NULL, NULL};
    int n = 2;
    if (visible != NULL) {
        all[n++] = "CUDA_VISIBLE_DEVICES";
        all[n++] = visible;
    }
    if (held != NULL) {
        all[n++] = "SLURM_STEP_GPUS";
        all[n++] = held;
    }
    all[n] = NULL;
    variables = all;
    put("nvml.table", table, 0644);
    epo_status status = start(EPO_PROBE_PROGRAM, true, 20000, NULL, 0);
    variables = NULL;
    return status;
}

static void every_gpu_is_told(void) {
    static const struct {
        const char *table, *name, *major, *capability, *p2p, *nvlink;
    } cases[] = {
        {"* a100 4", "NVIDIA A100-SXM4-80GB", "8", "8.0", "True", "True"},
        {"* h100 8", "NVIDIA H100 80GB HBM3", "9", "9.0", "True", "True"},
        {"* h200 8", "NVIDIA H200", "9", "9.0", "True", "True"},
        {"* b200 8", "NVIDIA B200", "10", "10.0", "True", "True"},
        {"* b300 8", "NVIDIA B300", "10", "10.3", "True", "True"},
        {"* gb200 4", "NVIDIA GB200", "10", "10.0", "True", "True"},
        {"* l40s 4", "NVIDIA L40S", "8", "8.9", "True", "False"},
        {"* l40s 4 nop2p", "NVIDIA L40S", "8", "8.9", "False", "False"},
        {"* v100 4", "Tesla V100-SXM2-32GB", "7", "7.0", "True", "True"},
        {"* rtx5090 2", "NVIDIA GeForce RTX 5090", "12", "12.0", "True", "False"},
        {"* h100 8 nonvlink", "NVIDIA H100 80GB HBM3", "9", "9.0", "True", "False"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CU_ASSERT_EQUAL(ask_gpus(cases[i].table, NULL, NULL), EPO_OK);
        IS("gpu_name", cases[i].name);
        IS("gpu_major", cases[i].major);
        IS("node.compute_capability", cases[i].capability);
        IS("node.all_gpus_p2p", cases[i].p2p);
        IS("node.all_gpus_nvlink", cases[i].nvlink);
        IS("node.driver_version", "570.86.15");
        IS("node.cuda_version", "12.8");
        IS("node.mig", "False");
        IS(EPO_PROBE_STOPPED, "(absent)");
    }
}

static void nodes_are_told_apart(void) {
    CU_ASSERT_EQUAL(ask_gpus("n2 l40s 4\nn1 gb200 4 fabric\n* v100 1\n", NULL, NULL), EPO_OK);
    IS("gpu_name", "NVIDIA GB200");
    IS("node.ranks_per_nvlink_domain", "(unknown)");
    IS("node.nvlink_clique", "0");
}

static void visible_devices_are_read_as_cuda_does(void) {
    static const struct {
        const char *visible, *count, *gpus;
    } cases[] = {
        {"0,1", "2", "0: NVIDIA H100 80GB HBM3; 1: NVIDIA H100 80GB HBM3"},
        {"3", "1", "3: NVIDIA H100 80GB HBM3"},
        {" 2 , 0 ", "2", "2: NVIDIA H100 80GB HBM3; 0: NVIDIA H100 80GB HBM3"},
        {"GPU-000000a1", "1", "1: NVIDIA H100 80GB HBM3"},
        {"GPU-000000a1-0000-0000-0000-000000000000,0", "2",
         "1: NVIDIA H100 80GB HBM3; 0: NVIDIA H100 80GB HBM3"},
        {"1,9,0", "1", "1: NVIDIA H100 80GB HBM3"}, /* 9 hides what follows */
        {"1,,0", "1", "1: NVIDIA H100 80GB HBM3"},
        {"GPU-0", "0", "(absent)"}, /* names several */
        {"", "0", "(absent)"},
        {"-1", "0", "(absent)"},
        {"NoDevFiles", "0", "(absent)"},
        {"99999999999999999999", "0", "(absent)"},
        {"0x1", "0", "(absent)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CU_ASSERT_EQUAL(ask_gpus("* h100 4", cases[i].visible, NULL), EPO_OK);
        IS("node.gpu_count", cases[i].count);
        IS("node.gpus", cases[i].gpus);
    }
    CU_ASSERT_EQUAL(ask_gpus("* h100 4", "0,0", NULL), EPO_OK);
    HAS(why("task.visible_gpus"), "named twice");
}

static void mig_devices_are_found(void) {
    CU_ASSERT_EQUAL(ask_gpus("* a100 2 mig", "MIG-000000a1-0000-0000-0000-000000000001", NULL),
                    EPO_OK);
    IS("node.mig", "True");
    IS("node.gpu_count", "1");
    IS("node.gpus", "1: NVIDIA A100-SXM4-80GB MIG-000000a1-0000-0000-0000-000000000001");
    IS("node.gpu_memory_mib", "40960");
    CU_ASSERT_EQUAL(ask_gpus("* a100 2 mig", "0,1", NULL), EPO_OK);
    IS("node.all_gpus_p2p", "False");
    HAS(why("node.all_gpus_p2p"), "MIG");
}

static void a_task_bound_to_one_gpu_is_seen(void) {
    CU_ASSERT_EQUAL(ask_gpus("* h100 4 nop2p", "2", "0-3"), EPO_OK);
    IS("task.sees_all_gpus", "False");
    IS("task.visible_gpus", "1");
    IS("node.gpu_count", "4");
    IS("node.all_gpus_p2p", "False");
    CU_ASSERT_EQUAL(ask_gpus("* h100 4", "0,1", "2,3"), EPO_OK); /* renumbered by a cgroup */
    IS("task.sees_all_gpus", "True");
}

/* Slurm 22.05 names to a bound task its own part only. */
static void a_bound_task_among_others_is_seen(void) {
    static const struct {
        const char *bind, *visible, *tasks, *sees;
    } cases[] = {
        {"gpu:per_task:1", "2", "4", "False"},        {"gpu:single:1", "0", "1,4", "False"},
        {"gpu:per_task:1", "2", "1(x2)", "(absent)"}, {"gpu:none", "2", "4", "(absent)"},
        {"gpu:closest", "0,1,2,3", "4", "True"},      {"mem:x", "0", "4", "(absent)"},
        {"gres/gpu:per_task:1", "2", "4", "False"},   {"gres/gpu:none", "2", "4", "(absent)"}};
    put("nvml.table", "* h100 4", 0644);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *vars[] = {"SLURMD_TRES_BIND",
                              cases[i].bind,
                              "SLURM_GPUS_ON_NODE",
                              "4",
                              "SLURM_STEP_TASKS_PER_NODE",
                              cases[i].tasks,
                              "CUDA_VISIBLE_DEVICES",
                              cases[i].visible,
                              NULL};
        variables = vars;
        CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 20000, NULL, 0), EPO_OK);
        IS("task.sees_all_gpus", cases[i].sees);
    }
    variables = NULL;
}

static void what_is_no_gpu_is_told(void) {
    CU_ASSERT_EQUAL(ask_gpus("* none 0", NULL, NULL), EPO_OK);
    IS("node.gpu_count", "0");
    IS("gpu_name", "(unset)");
    CU_ASSERT_EQUAL(ask_gpus("* h100 4 closed", NULL, NULL), EPO_OK);
    IS("node.gpu_count", "3");
    IS("node.gpus_total", "4");
    CU_ASSERT_EQUAL(ask_gpus("* h100 4 mixed", NULL, NULL), EPO_OK);
    IS("gpu_name", "(unknown)");
    HAS(why("gpu_name"), "NVIDIA L40S");
    CU_ASSERT_EQUAL(ask_gpus("* broken 0", NULL, NULL), EPO_OK);
    IS("node.gpu_count", "(unknown)");
    HAS(why("gpu_name"), "Driver/library version mismatch");
    CU_ASSERT_EQUAL(ask_gpus("* hostile 1", NULL, NULL), EPO_OK);
    IS("gpu_name", "NVIDIA??[2J\"$(id)\\H100");
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* The limit is generous, the machine may be busy; a hang would take for ever. */
static void a_hang_and_a_crash_end_with_the_reason(void) {
    static const char *const vars[] = {"PATH", "/nonexistent", NULL};
    variables = vars;
    put("nvml.table", "* hang 0", 0644);
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 1500, NULL, 0), EPO_OK);
    IS(EPO_PROBE_STOPPED, "(unknown)");
    HAS(why(EPO_PROBE_STOPPED), "NVML");
    IS("gpu_name", "(unknown)");
    IS("in_container", text_of("in_container")); /* what was found before is there */
    CU_ASSERT_NOT_EQUAL(strcmp(text_of("in_container"), "(absent)"), 0);
    put("nvml.table", "* stuck 0", 0644);
    double begin = seconds();
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 1500, NULL, 0), EPO_E_TIMEOUT);
    CU_ASSERT_TRUE(seconds() - begin < 60);
    HAS(epo_fail_text(), "1500 ms");
    CU_ASSERT_EQUAL(epo_facts_count(facts), 0);
    put("nvml.table", "* crash 0", 0644);
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 20000, NULL, 0), EPO_OK);
    HAS(why(EPO_PROBE_STOPPED), "NVML");
    variables = NULL;
}

static void other_programs_are_no_probe(void) {
    char other[512];
    path_of(other, "other");
    copy("/bin/true", "other");
    CU_ASSERT_EQUAL(start(other, false, 20000, NULL, 0), EPO_E_ARG);
    HAS(epo_fail_text(), "0 bytes");
    copy("/bin/false", "other");
    CU_ASSERT_EQUAL(start(other, false, 20000, NULL, 0), EPO_E_SYSTEM);
    HAS(epo_fail_text(), "status 1");
    put("other", "not a program", 0755);
    CU_ASSERT_EQUAL(start(other, false, 20000, NULL, 0), EPO_E_SYSTEM);
    HAS(epo_fail_text(), "cannot be executed");
}

/* No descriptor, no zombie, no signal mask is left to the task. */
static void nothing_is_left_behind(void) {
    int before = dup(2);
    close(before);
    put("nvml.table", "* h100 2", 0644);
    for (int i = 0; i < 5; i++)
        CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 20000, NULL, 0), EPO_OK);
    int after = dup(2);
    close(after);
    CU_ASSERT_EQUAL(before, after);
}

/* --- Python ---------------------------------------------------------------- */

static void put_package(const char *site, const char *name, const char *version) {
    char path[256], text[256];
    snprintf(path, sizeof path, "%s/%s-%s.dist-info/METADATA", site, name, version);
    snprintf(text, sizeof text, "Metadata-Version: 2.1\nName: %s\nVersion: %s\n\nVersion: 9\n",
             name, version);
    put(path, text, 0644);
}

static void make_venv(void) {
    put("venv/pyvenv.cfg", "home = /nowhere/bin\nversion = 3.12.3\n", 0644);
    put("venv/bin/python", "\177ELF", 0755);
    put_package("venv/lib/python3.12/site-packages", "torch", "2.8.0+cu128");
    put_package("venv/lib/python3.12/site-packages", "Transformer_Engine", "2.7.0");
    put_package("venv/lib/python3.12/site-packages", "triton", "3.4.0");
    put_package("venv/lib/python3.12/site-packages", "torchvision", "0.1");
    put_package("venv/lib/python3.12/site-packages", "nvidia_nccl_cu12", "2.27.3");
    put("venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2", "x", 0644);
    put("venv/lib/python3.12/site-packages/deep_ep/__init__.py", "from .x import HybridEPBuffer",
        0644);
    put("venv/lib/python3.12/site-packages/deep_ep/utils.py", "class EventOverlap: pass", 0644);
}

static void a_venv_is_read(void) {
    char python[512], bin[512];
    path_of(python, "venv/bin/python");
    path_of(bin, "venv/bin");
    make_venv();
    const char *vars[] = {"PATH", bin, NULL};
    char *by_path[] = {python, (char *)"train.py"};
    char *by_name[] = {(char *)"env", (char *)"X=1",    (char *)"numactl", (char *)"-N",
                       (char *)"0",   (char *)"python", (char *)"-m",      (char *)"train"};
    variables = vars;
    for (int turn = 0; turn < 2; turn++) {
        CU_ASSERT_EQUAL(
            start(EPO_PROBE_PROGRAM, true, 20000, turn == 0 ? by_path : by_name, turn == 0 ? 2 : 8),
            EPO_OK);
        IS("task.program", "python");
        IS("python.version", "3.12");
        IS("torch_version", "2.8.0+cu128");
        IS("te_version", "2.7.0");
        IS("triton_version", "3.4.0");
        IS("deep_ep.imports", "True");
        IS("deep_ep.has_event_overlap", "True");
        IS("deep_ep.has_hybrid_buffer", "True");
        IS("deep_ep.has_fused_permute", "False");
        IS("nccl_version", "2.27.3");
        HAS(why("nccl_version"), "the Python environment");
    }
    variables = NULL;
}

static void a_script_of_a_venv_is_read(void) {
    char script[512], line[600], torchrun[512];
    make_venv();
    path_of(script, "venv/bin/torchrun");
    snprintf(line, sizeof line, "#!%s/venv/bin/python\nimport x\n", folder);
    put("venv/bin/torchrun", line, 0755);
    path_of(torchrun, "venv/bin/torchrun");
    char *words[] = {torchrun, (char *)"--nproc-per-node=4", (char *)"x.py"};
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 20000, words, 3), EPO_OK);
    IS("torch_version", "2.8.0+cu128");
}

static void what_cannot_be_known_is_unknown(void) {
    static const struct {
        const char *words[4];
        const char *kind, *torch, *deep_ep, *reason;
    } cases[] = {
        {{"bash", "run.sh"}, "shell", "(unknown)", "(unknown)", "any Python"},
        {{"/usr/bin/apptainer", "exec", "x.sif", "python"},
         "container",
         "(unknown)",
         "(unknown)",
         "container"},
        {{"env", "some-program"}, "shell", "(unknown)", "(unknown)", "any Python"},
        {{"no-such-program"}, "shell", "(unknown)", "(unknown)", "any Python"},
        {{"/bin/true"}, "compiled", "(unset)", "(unset)", "not Python"},
        {{"python3", "x.py"}, "python", "(unknown)", "(unknown)", "not found"},
    };
    static const char *const vars[] = {"PATH", "/nonexistent", NULL};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int count = 0;
        while (count < 4 && cases[i].words[count] != NULL)
            count++;
        variables = vars;
        CU_ASSERT_EQUAL(
            start(EPO_PROBE_PROGRAM, true, 20000, (char *const *)(uintptr_t)cases[i].words, count),
            EPO_OK);
        IS("task.program", cases[i].kind);
        IS("torch_version", cases[i].torch);
        IS("deep_ep.imports", cases[i].deep_ep);
        HAS(why("torch_version"), cases[i].reason);
    }
    variables = NULL;
}

/* 100,000 packages: read within the budget, and the one that counts is found. */
static void a_large_tree_is_read(void) {
    char path[512], python[512];
    make_venv();
    for (int i = 0; i < 100000; i++) {
        path_of(path, "venv/lib/python3.12/site-packages/package_%d", i);
        int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
        CU_ASSERT_TRUE_FATAL(fd >= 0);
        close(fd);
    }
    path_of(python, "venv/bin/python");
    char *words[] = {python};
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 30000, words, 1), EPO_OK);
    IS("torch_version", "2.8.0+cu128");
    IS("bridge_version", "(unset)");
    for (int i = 0; i < 100000; i++) {
        path_of(path, "venv/lib/python3.12/site-packages/package_%d", i);
        unlink(path);
    }
}

static void hostile_words_do_no_harm(void) {
    static char large[1 << 20];
    memset(large, 'x', sizeof large - 1);
    char *words[] = {(char *)"python\n\033[2J", large, (char *)"$(id)"};
    const char *vars[] = {"PATH",
                          large,
                          "LD_LIBRARY_PATH",
                          ":::/\n:..:",
                          "PYTHONPATH",
                          large,
                          "HOME",
                          "/\033[31m",
                          "CONDA_PREFIX",
                          "\n",
                          "CUDA_VISIBLE_DEVICES",
                          large,
                          "LD_PRELOAD",
                          ": ::",
                          NULL};
    variables = vars;
    put("nvml.table", "* h100 2", 0644);
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 20000, words, 3), EPO_OK);
    HAS(why("node.gpu_count"), "too long");
    char *venv_words[] = {(char *)"./venv/bin/python"};
    CU_ASSERT_EQUAL(chdir(folder), 0);
    make_venv();
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 20000, venv_words, 1), EPO_OK);
    IS("torch_version", "2.8.0+cu128");
    CU_ASSERT_EQUAL(chdir("/"), 0);
    variables = NULL;
}

/* A hook that runs code at import may add anything: absent is not known then. */
static void an_import_hook_leaves_it_open(void) {
    char python[512];
    put("hook/pyvenv.cfg", "home = /nowhere/bin\nversion_info = 3.11.2.final.0\n", 0644);
    put("hook/bin/python3", "\177ELF", 0755);
    put("hook/lib/python3.11/site-packages/a.pth", "import __editable__finder\n", 0644);
    put("more/torch/version.py", "__version__ = '2.5.1'\n", 0644);
    char line[600];
    snprintf(line, sizeof line, "# a comment\n%s/more\n", folder);
    put("hook/lib/python3.11/site-packages/b.pth", line, 0644);
    path_of(python, "hook/bin/python3");
    char *words[] = {python};
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 20000, words, 1), EPO_OK);
    IS("torch_version", "2.5.1");
    IS("te_version", "(unknown)");
    HAS(why("deep_ep.imports"), "a.pth");
}

static void usual_hooks_leave_nothing_open(void) {
    char python[512];
    put("usual/pyvenv.cfg", "home = /nowhere/bin\nversion = 3.11.2\n", 0644);
    put("usual/bin/python", "\177ELF", 0755);
    put("usual/lib/python3.11/site-packages/_virtualenv.pth", "import _virtualenv\n", 0644);
    put("usual/lib/python3.11/site-packages/google-nspkg.pth", "import sys, types\n", 0644);
    put("usual/lib/python3.11/site-packages/distutils-precedence.pth", "import os\n", 0644);
    path_of(python, "usual/bin/python");
    char *words[] = {python};
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 20000, words, 1), EPO_OK);
    IS("torch_version", "(unset)");
    IS("deep_ep.imports", "False");
    /* a site's own start-up code may add folders */
    put("usual/lib/python3.11/site-packages/sitecustomize.py", "", 0644);
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 20000, words, 1), EPO_OK);
    IS("torch_version", "(unknown)");
    HAS(why("deep_ep.imports"), "sitecustomize.py");
}

/* A file system of which nobody answers the questions, as a lost server's: -1 where
 * this machine does not let us mount one. */
static int mount_silence(const char *path) {
    char options[128];
    int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", fd);
    if (fd >= 0 && mount("silence", path, "fuse", MS_NOSUID | MS_NODEV, options) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static void a_mount_that_does_not_answer_costs_the_limit(void) {
    char python[512], path[512];
    make_venv();
    path_of(python, "venv/bin/python");
    path_of(path, "silence");
    CU_ASSERT_TRUE(mkdir(path, 0755) == 0 || errno == EEXIST);
    int fd = mount_silence(path);
    if (fd < 0) {
        printf("\n  left out: %s; mounting needs root and /dev/fuse\n  ", strerror(errno));
        return;
    }
    const char *vars[] = {"PYTHONPATH", path, NULL};
    char *words[] = {python};
    variables = vars;
    double begin = seconds();
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 1500, words, 1), EPO_E_TIMEOUT);
    CU_ASSERT_TRUE(seconds() - begin < 60);
    HAS(epo_fail_text(), "1500 ms");
    CU_ASSERT_PTR_NULL(strstr(epo_fail_text(), "lives on"));
    variables = NULL;
    CU_ASSERT_EQUAL(umount2(path, MNT_DETACH), 0);
    close(fd);
}

static void the_library_path_is_followed(void) {
    char lib[512];
    path_of(lib, "nccl");
    put("nccl/libnccl.so.2.19.4", "x", 0644);
    char link[512];
    path_of(link, "nccl/libnccl.so.2");
    CU_ASSERT_EQUAL(symlink("libnccl.so.2.19.4", link), 0);
    const char *vars[] = {"LD_LIBRARY_PATH", lib, NULL};
    char *words[] = {(char *)"/bin/true"};
    variables = vars;
    CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 20000, words, 1), EPO_OK);
    IS("nccl_version", "2.19.4");
    HAS(why("nccl_version"), "LD_LIBRARY_PATH");
    variables = NULL;
}

static void remove_folder(void) {
    pid_t child = fork();
    if (child == 0) {
        execl("/bin/rm", "rm", "-rf", folder, (char *)NULL);
        _exit(1);
    }
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(every_gpu_is_told),
                                 TEST(nodes_are_told_apart),
                                 TEST(visible_devices_are_read_as_cuda_does),
                                 TEST(mig_devices_are_found),
                                 TEST(a_task_bound_to_one_gpu_is_seen),
                                 TEST(a_bound_task_among_others_is_seen),
                                 TEST(what_is_no_gpu_is_told),
                                 TEST(a_hang_and_a_crash_end_with_the_reason),
                                 TEST(other_programs_are_no_probe),
                                 TEST(nothing_is_left_behind),
                                 TEST(a_venv_is_read),
                                 TEST(a_script_of_a_venv_is_read),
                                 TEST(what_cannot_be_known_is_unknown),
                                 TEST(a_large_tree_is_read),
                                 TEST(hostile_words_do_no_harm),
                                 TEST(an_import_hook_leaves_it_open),
                                 TEST(usual_hooks_leave_nothing_open),
                                 TEST(a_mount_that_does_not_answer_costs_the_limit),
                                 TEST(the_library_path_is_followed),
                                 CU_TEST_INFO_NULL};
    if (mkdtemp(folder) == NULL)
        return 2;
    copy(EPO_FAKE_NVML, "fake_nvml.so");
    int status = unit_run("probe", tests);
    epo_facts_destroy(facts);
    remove_folder();
    return status;
}
