/* SPDX-License-Identifier: Apache-2.0
 *
 * test_probe_python.c - what the probe finds of made-up Python trees and libraries.
 */
#include "probe_box.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef EPO_PROBE_PROGRAM
#error "the Makefile says where the probe was built"
#endif

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

/* Our own deep_ep, where somebody puts its folder into PYTHONPATH. */
static void the_drop_in_is_found_by_pythonpath(void) {
    char python[512];
    put("bare/pyvenv.cfg", "home = /nowhere/bin\nversion = 3.12.3\n", 0644);
    put("bare/bin/python", "\177ELF", 0755);
    put_package("bare/lib/python3.12/site-packages", "torch", "2.8.0");
    path_of(python, "bare/bin/python");
    char *words[] = {python, (char *)"train.py"};
    static const char *const vars[] = {"PATH", "/nonexistent", "PYTHONPATH", EPO_DROPIN, NULL};
    for (int with = 0; with < 2; with++) {
        const char *const without[] = {"PATH", "/nonexistent", NULL};
        variables = with ? vars : without;
        CU_ASSERT_EQUAL(start(EPO_PROBE_PROGRAM, true, 20000, words, 2), EPO_OK);
        IS("deep_ep.imports", with ? "True" : "False");
    }
    HAS(why("deep_ep.imports"), EPO_DROPIN);
    IS("deep_ep.has_event_overlap", "True");
    IS("deep_ep.has_hybrid_buffer", "True");
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

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(a_venv_is_read),
                                 TEST(the_drop_in_is_found_by_pythonpath),
                                 TEST(a_script_of_a_venv_is_read),
                                 TEST(what_cannot_be_known_is_unknown),
                                 TEST(a_large_tree_is_read),
                                 TEST(hostile_words_do_no_harm),
                                 TEST(an_import_hook_leaves_it_open),
                                 TEST(usual_hooks_leave_nothing_open),
                                 TEST(a_mount_that_does_not_answer_costs_the_limit),
                                 TEST(the_library_path_is_followed),
                                 CU_TEST_INFO_NULL};
    return probe_box_run("probe python", tests);
}
