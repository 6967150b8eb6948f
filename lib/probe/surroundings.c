/* SPDX-License-Identifier: Apache-2.0 */
#include "probe/files.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void put_container(epo_probe_task *task, epo_facts *facts) {
    static const char *const variables[] = {"APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", NULL};
    static const char *const files[] = {"/.dockerenv", "/run/.containerenv", NULL};
    const epo_fact *program = epo_facts_find(facts, "task.program");
    if (program != NULL && strcmp(program->text, "container") == 0) {
        probe_put(facts, "in_container", "the task's words", "True");
        return;
    }
    for (const char *const *name = variables; *name != NULL; name++)
        if (epo_probe_variable(task, *name) != NULL) {
            probe_put(facts, "in_container", *name, "True");
            return;
        }
    for (const char *const *file = files; *file != NULL; file++)
        if (access(*file, F_OK) == 0) {
            probe_put(facts, "in_container", *file, "True");
            return;
        }
    probe_put(facts, "in_container", "neither variables nor files of one", "False");
}

/* HybridEP compiles its kernels when it starts. */
static void put_nvcc(epo_probe_task *task, epo_facts *facts) {
    char path[PROBE_PATH];
    const epo_fact *program = epo_facts_find(facts, "task.program");
    const char *home = epo_probe_variable(task, "CUDA_HOME");
    if (program != NULL && strcmp(program->text, "container") == 0) {
        probe_put_unknown(facts, "node.cuda_home_has_nvcc", "the task's words",
                          "the program runs in a container");
        return;
    }
    if (!probe_join(path, home != NULL ? home : "/usr/local/cuda", "bin/nvcc"))
        return;
    probe_put(facts, "node.cuda_home_has_nvcc", path, "%s",
              access(path, X_OK) == 0 ? "True" : "False");
}

void epo_probe_surroundings(epo_probe_task *task, epo_facts *facts) {
    put_container(task, facts);
    put_nvcc(task, facts);
}
