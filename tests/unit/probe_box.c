/* SPDX-License-Identifier: Apache-2.0 */
#include "probe_box.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

char folder[] = "/tmp/test_probe.XXXXXX";
epo_facts *facts;

/* The task's variables: NAME, VALUE, ..., NULL. */
const char *const *variables;

const char *variable(void *context, const char *name) {
    (void)context;
    for (const char *const *v = variables; v != NULL && v[0] != NULL; v += 2)
        if (strcmp(v[0], name) == 0)
            return v[1];
    return NULL;
}

void path_of(char path[512], const char *format, ...) {
    char rest[256];
    va_list args;
    va_start(args, format);
    vsnprintf(rest, sizeof rest, format, args);
    va_end(args);
    snprintf(path, 512, "%s/%s", folder, rest);
}

/* A file and the folders above it, inside the test's folder. */
void put(const char *name, const char *content, mode_t mode) {
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

void copy(const char *from, const char *name) {
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

epo_status start(const char *program, bool nvml, int timeout_ms, char *const *arguments,
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

const char *text_of(const char *key) {
    const epo_fact *fact = epo_facts_find(facts, key);
    return fact == NULL                     ? "(absent)"
           : fact->kind == EPO_FACT_UNKNOWN ? "(unknown)"
           : fact->kind == EPO_FACT_NULL    ? "(unset)"
                                            : fact->text;
}

const char *why(const char *key) {
    const epo_fact *fact = epo_facts_find(facts, key);
    return fact == NULL ? "" : fact->kind == EPO_FACT_UNKNOWN ? fact->text : fact->source;
}

double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void remove_folder(void) {
    pid_t child = fork();
    if (child == 0) {
        execl("/bin/rm", "rm", "-rf", folder, (char *)NULL);
        _exit(1);
    }
    waitpid(child, NULL, 0);
}

int probe_box_run(const char *name, const CU_TestInfo *tests) {
    if (mkdtemp(folder) == NULL)
        return 2;
    copy(EPO_FAKE_NVML, "fake_nvml.so");
    int status = unit_run(name, tests);
    epo_facts_destroy(facts);
    remove_folder();
    return status;
}
