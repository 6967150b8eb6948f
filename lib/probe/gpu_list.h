/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu_list.h - the GPUs of a node as NVML shows them, and which of them a task
 * will see.
 */
#ifndef EPO_PROBE_GPU_LIST_H
#define EPO_PROBE_GPU_LIST_H

#include "probe/nvml.h"

#include <stdbool.h>
#include <stdint.h>

#define GPUS_MAX 64
#define SLICES_MAX 8 /* MIG devices of one GPU */

typedef struct gpu_slice {
    char uuid[NVML_TEXT];
    uint64_t memory_mib; /* 0: not told */
} gpu_slice;

typedef struct gpu {
    nvml_device device;
    unsigned index; /* NVML's */
    unsigned minor; /* of /dev/nvidiaN, as Slurm numbers them */
    char name[NVML_TEXT], uuid[NVML_TEXT];
    int major, small; /* compute capability */
    uint64_t memory_mib;
    bool mig;
    gpu_slice slice[SLICES_MAX];
    unsigned slices;
} gpu;

typedef struct gpu_list {
    gpu gpu[GPUS_MAX];
    unsigned count;  /* those that this process may open */
    unsigned hidden; /* those that it may not */
} gpu_list;

/* One GPU that a task sees, or a MIG device of it. */
typedef struct gpu_choice {
    unsigned gpu; /* place in the list */
    int slice;    /* -1: the whole GPU */
} gpu_choice;

typedef struct gpu_choices {
    gpu_choice item[GPUS_MAX];
    unsigned count;
    char problem[128]; /* what is wrong with the variable; "" if nothing is */
} gpu_choices;

/* False with the reason in `why`. */
bool gpu_list_read(const nvml *api, gpu_list *list, char *why, size_t room);

/* Reads CUDA_VISIBLE_DEVICES as CUDA does: numbers, GPU-..., MIG-...; the first word
 * that names nothing hides the rest.  `text` NULL: all. */
void gpu_choices_read(const gpu_list *list, const char *text, gpu_choices *choices);
/* The GPUs whose minor numbers stand in SLURM_STEP_GPUS ("0,2-3"). */
void gpu_choices_by_minor(const gpu_list *list, const char *text, gpu_choices *choices);

#endif
