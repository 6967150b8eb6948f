/* SPDX-License-Identifier: Apache-2.0
 *
 * test_spank_preload.c - which library is taken, and which programs would ignore or refuse it.
 */
#include "spank_box.h"

#include "core/names.h"

#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char program[320];

/* A program of this kind of machine, by its head alone: `loader` NULL is a static one. */
static void write_program(Elf64_Half type, Elf64_Half machine, const char *loader) {
    struct {
        Elf64_Ehdr head;
        Elf64_Phdr part[2];
        char loader[64];
    } file;
    memset(&file, 0, sizeof file);
    memcpy(file.head.e_ident, ELFMAG, SELFMAG);
    file.head.e_ident[EI_CLASS] = ELFCLASS64;
    file.head.e_ident[EI_DATA] = ELFDATA2LSB;
    file.head.e_ident[EI_VERSION] = EV_CURRENT;
    file.head.e_type = type;
    file.head.e_machine = machine;
    file.head.e_version = EV_CURRENT;
    file.head.e_phoff = sizeof file.head;
    file.head.e_phentsize = sizeof file.part[0];
    file.head.e_phnum = 2;
    file.part[0].p_type = PT_LOAD;
    file.part[1].p_type = loader != NULL ? PT_INTERP : PT_NOTE;
    file.part[1].p_offset = (Elf64_Off)((char *)file.loader - (char *)&file);
    file.part[1].p_filesz = sizeof file.loader;
    snprintf(file.loader, sizeof file.loader, "%s", loader != NULL ? loader : "");
    unlink(program);
    int fd = open(program, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0755);
    CU_ASSERT_EQUAL_FATAL(write(fd, &file, sizeof file), (ssize_t)sizeof file);
    close(fd);
}

static void start(const char *name) {
    fake_begin(S_CTX_LOCAL);
    configure("");
    fake_put(&fake.task, "PATH", "/nonexistent::/proc/self/fd");
    if (strchr(name, '/') == NULL)
        fake_put(&fake.task, "PATH", folder);
    fake.arguments[0] = (char *)(uintptr_t)name;
    fake.argument_count = 1;
    srun_to_task(give_on);
    CU_ASSERT_EQUAL(ep_task_start(&plugin, NULL), 0);
    CU_ASSERT_STRING_EQUAL(fake_get(&fake.task, EPO_OUT_DECISION), "on");
}

#if defined(__x86_64__) || defined(__aarch64__)
#ifdef __x86_64__
#define OWN EM_X86_64
#define OTHER EM_AARCH64
#else
#define OWN EM_AARCH64
#define OTHER EM_X86_64
#endif

static void programs_by_their_heads(void) {
    static const struct {
        Elf64_Half type, machine;
        const char *loader, *told; /* NULL: it gets the library */
    } cases[] = {
        {ET_DYN, OWN, "/lib64/ld-linux-x86-64.so.2", NULL},
        {ET_EXEC, OWN, "/lib64/ld-linux-x86-64.so.2", NULL},
        {ET_EXEC, OWN, NULL, "not preloaded: the program is linked statically"},
        {ET_DYN, OWN, NULL, "not preloaded: the program is linked statically"}, /* static-pie */
        {ET_DYN, OWN, "/lib/ld-musl-x86_64.so.1", "musl's loader (/lib/ld-musl-x86_64.so.1)"},
        {ET_DYN, OTHER, "/lib/ld-linux.so.2", "built for another kind of machine (64-bit"},
    };
    snprintf(program, sizeof program, "%s/program", folder);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int by_path = 0; by_path < 2; by_path++) {
            write_program(cases[i].type, cases[i].machine, cases[i].loader);
            start(by_path ? "program" : program);
            CU_ASSERT_EQUAL(fake_get(&fake.task, "LD_PRELOAD") != NULL, cases[i].told == NULL);
            if (cases[i].told != NULL) {
                HAS(fake.said, cases[i].told);
            } else {
                HAS_NOT(fake.said, "not preloaded");
            }
            fake_end();
        }
    /* its loader ignores preloads then */
    write_program(ET_DYN, OWN, "/lib64/ld-linux-x86-64.so.2");
    CU_ASSERT_EQUAL(chmod(program, 04755), 0);
    start(program);
    HAS(fake.said, "not preloaded: the program is set-user-id");
    fake_end();
}
#else
static void programs_by_their_heads(void) { printf("left out: heads of this machine\n"); }
#endif

/* What cannot be read speaks against nothing: exec will say what it is. */
static void programs_that_cannot_be_read(void) {
    static const char *const names[] = {"/nonexistent/train", "nowhere-on-the-path", "/",
                                        "/dev/null"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        start(names[i]);
        CU_ASSERT_PTR_NOT_NULL(fake_get(&fake.task, "LD_PRELOAD"));
        fake_end();
    }
    snprintf(program, sizeof program, "%s/program", folder);
    write_file(program, "\177ELF");
    start(program);
    CU_ASSERT_PTR_NOT_NULL(fake_get(&fake.task, "LD_PRELOAD"));
    fake_end();
}

static epo_status find(const char *path, struct ep_preload *found) {
    const struct epo_trust trust = {.owners = {geteuid()}, .count = 1};
    memset(found, 0, sizeof *found);
    return ep_preload_find(path, &trust, found);
}

static void libraries_behind_links_beside_them(void) {
    struct ep_preload found;
    char link[400], other[400], path[EP_PATH_MAX + 8];
    snprintf(link, sizeof link, "%s/script", folder);
    unlink(link);
    CU_ASSERT_EQUAL(symlink("libep_overlap.so", link), 0);
    CU_ASSERT_EQUAL(find(link, &found), EPO_OK);
    CU_ASSERT_STRING_EQUAL(found.path, library); /* the task's loader opens no link */
    /* not one that leads to another folder, nor in a circle */
    unlink(link);
    snprintf(other, sizeof other, "../%s/libep_overlap.so", strrchr(folder, '/') + 1);
    CU_ASSERT_EQUAL(symlink(other, link), 0);
    CU_ASSERT_EQUAL(find(link, &found), EPO_E_STATE);
    HAS(epo_fail_text(), "symbolic link");
    unlink(link);
    CU_ASSERT_EQUAL(symlink("script", link), 0);
    CU_ASSERT_NOT_EQUAL(find(link, &found), EPO_OK);
    CU_ASSERT_STRING_EQUAL(found.path, ""); /* written on success alone */
    unlink(link);
    memset(path, 'x', sizeof path - 1);
    path[0] = '/';
    path[sizeof path - 1] = '\0';
    CU_ASSERT_EQUAL(find(path, &found), EPO_E_ARG);
    HAS(epo_fail_text(), "preload.path: more than");
}

static void what_is_no_library_is_refused(void) {
    struct ep_preload found;
    char path[400];
    snprintf(path, sizeof path, "%s/script", folder);
    write_file(path, "#!/bin/sh\n");
    CU_ASSERT_EQUAL(find(path, &found), EPO_E_STATE);
    HAS(epo_fail_text(), "is no shared library; install it again");
    write_file(path, "");
    CU_ASSERT_EQUAL(find(path, &found), EPO_E_STATE);
    chmod(path, 0666);
    CU_ASSERT_EQUAL(find(path, &found), EPO_E_STATE);
    HAS(epo_fail_text(), "writable by group or others");
    unlink(path);
}

int main(void) {
#define TEST(name)                                                                                 \
    { #name, name }
    const CU_TestInfo tests[] = {TEST(programs_by_their_heads), TEST(programs_that_cannot_be_read),
                                 TEST(libraries_behind_links_beside_them),
                                 TEST(what_is_no_library_is_refused), CU_TEST_INFO_NULL};
    return box_run("spank preload", tests);
}
