/* SPDX-License-Identifier: Apache-2.0
 *
 * probe.h - facts of this node and of one task, each with its source.  What cannot
 * be found out is put as unknown, with the reason; nothing here fails.
 *
 * Runs as the user and reads what the user may have put anywhere: every folder,
 * file and number is bounded by the task's budget.  A mount or driver that hangs is
 * the caller's to kill (core/probe_run.h).  Nothing foreign is executed, but NVML,
 * which has to be loaded to be asked.
 */
#ifndef EPO_PROBE_PROBE_H
#define EPO_PROBE_PROBE_H

#include "core/facts.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EPO_PROBE_ENTRIES 400000            /* directory entries in all */
#define EPO_PROBE_READ ((uint64_t)64 << 20) /* bytes in all */

typedef struct epo_probe_task {
    /* A variable of the task; NULL: not set. */
    const char *(*variable)(void *context, const char *name);
    void *context;
    const char *left_out; /* variables that did not reach us, "A:B", or NULL */
    char *const *arguments;
    int argument_count;    /* 0: no program is told, the PATH decides */
    const char *nvml_path; /* NULL: libnvidia-ml.so.1 by the loader's own search */
    bool whole_node;       /* all GPUs, not those of a step */
    /* Budget; the functions count it down. */
    uint64_t entries_left, bytes_left;
} epo_probe_task;

/* The task's Python, and with it torch, TransformerEngine, Triton, deep_ep. */
void epo_probe_python(epo_probe_task *task, epo_facts *facts);
/* The libnccl.so.2 that the task will map; after epo_probe_python. */
void epo_probe_nccl(epo_probe_task *task, epo_facts *facts);
/* Container, nvcc. */
void epo_probe_surroundings(epo_probe_task *task, epo_facts *facts);
/* The GPUs of the step by NVML. */
void epo_probe_gpus(epo_probe_task *task, epo_facts *facts);

/* What a task's words say about its program. */
typedef enum epo_probe_program {
    EPO_TASK_NOT_TOLD,  /* no arguments */
    EPO_TASK_PYTHON,    /* `word` names an interpreter or a script of one */
    EPO_TASK_SHELL,     /* a script or shell: may start anything */
    EPO_TASK_CONTAINER, /* enters a container: the host's folders say nothing */
    EPO_TASK_COMPILED   /* a compiled program */
} epo_probe_program;

/* Looks through env, numactl, nsys, nice, time and the like.  `*word` is the index
 * of the program's own word. */
epo_probe_program epo_probe_program_find(epo_probe_task *task, int *word);

/* The variable; NULL if unset or empty. */
const char *epo_probe_variable(const epo_probe_task *task, const char *name);

#endif
