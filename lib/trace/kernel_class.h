/* SPDX-License-Identifier: Apache-2.0
 *
 * kernel_class.h - what a kernel does, told from its name.
 */
#ifndef EPO_TRACE_KERNEL_CLASS_H
#define EPO_TRACE_KERNEL_CLASS_H

#include <stdbool.h>
#include <stddef.h>

typedef enum epo_kernel_class {
    EPO_KERNEL_EP_COMM,    /* dispatch, combine, all-to-all of experts */
    EPO_KERNEL_OTHER_COMM, /* gradients, parameters, pipeline */
    EPO_KERNEL_GEMM,
    EPO_KERNEL_ATTENTION,
    EPO_KERNEL_PERMUTE,
    EPO_KERNEL_OTHER, /* every other kernel */
    EPO_KERNEL_COPY,  /* copies that are no communication, and memset */
    EPO_KERNEL_CLASSES
} epo_kernel_class;

#define EPO_KERNEL_PATTERNS_MAX 64

/* A pattern of the user's: a glob over the name, in any case of letters. */
typedef struct epo_kernel_pattern {
    char glob[128];
    epo_kernel_class kind;
} epo_kernel_pattern;

typedef struct epo_kernel_patterns {
    epo_kernel_pattern pattern[EPO_KERNEL_PATTERNS_MAX];
    size_t count;
} epo_kernel_patterns;

/* The user's patterns first, in their order, then the built-in ones. */
epo_kernel_class epo_kernel_classify(const epo_kernel_patterns *patterns, const char *name);
/* ncclDevKernel_SendRecv: expert or pipeline traffic, which the name does not tell. */
bool epo_kernel_is_send_recv(const char *name);
/* DeepEP's, HybridEP's, NCCL EP's or ours. */
bool epo_kernel_is_flex(const char *name);

/* "ep_comm", "other_comm", "gemm", "attention", "permute", "other", "copy" */
const char *epo_kernel_class_name(epo_kernel_class kind);
bool epo_kernel_class_find(const char *name, size_t length, epo_kernel_class *kind);

#endif
