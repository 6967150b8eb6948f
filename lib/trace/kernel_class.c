/* SPDX-License-Identifier: Apache-2.0 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* FNM_CASEFOLD: fnmatch.h looks at this itself, after features.h */
#endif
#include "trace/kernel_class.h"

#include <fnmatch.h>
#include <string.h>

typedef struct builtin {
    const char *glob;
    epo_kernel_class kind;
    bool flex;
} builtin;

/* The first that matches.  Permutation stands before GEMM: its names hold both. */
static const builtin builtins[] = {
    {"*deep_ep::*dispatch*", EPO_KERNEL_EP_COMM, true},
    {"*deep_ep::*combine*", EPO_KERNEL_EP_COMM, true},
    {"*deep_ep::*notify*", EPO_KERNEL_EP_COMM, true},
    {"*deep_ep::*barrier*", EPO_KERNEL_EP_COMM, true},
    {"*deep_ep::*layout*", EPO_KERNEL_PERMUTE, true},
    {"*hybrid_ep::*permute*", EPO_KERNEL_PERMUTE, true},
    {"*hybrid_ep::*dispatch*", EPO_KERNEL_EP_COMM, true},
    {"*hybrid_ep::*combine*", EPO_KERNEL_EP_COMM, true},
    {"*hybrid_ep::*sync*", EPO_KERNEL_EP_COMM, true},
    {"*nccl_ep*dispatch*", EPO_KERNEL_EP_COMM, true},
    {"*nccl_ep*combine*", EPO_KERNEL_EP_COMM, true},
    {"*nccl*alltoall*", EPO_KERNEL_EP_COMM, false},
    {"*ncclDevKernel_SendRecv*", EPO_KERNEL_EP_COMM, false},
    {"*ncclKernel_SendRecv*", EPO_KERNEL_EP_COMM, false},
    {"*nvshmem*", EPO_KERNEL_EP_COMM, false},
    {"copy_segments*", EPO_KERNEL_EP_COMM, true}, /* ours, down to epo_copy */
    {"*flex_dispatch*", EPO_KERNEL_EP_COMM, true},
    {"*flex_combine*", EPO_KERNEL_EP_COMM, true},
    {"*flex_push*", EPO_KERNEL_EP_COMM, true},
    {"*flex_arrived*", EPO_KERNEL_EP_COMM, true}, /* spins */
    {"*flex_expand*", EPO_KERNEL_PERMUTE, true},
    {"epo_copy*", EPO_KERNEL_EP_COMM, false},
    {"*gather_rows*", EPO_KERNEL_PERMUTE, false},
    {"*reduce_rows*", EPO_KERNEL_PERMUTE, false},
    {"*gg::*", EPO_KERNEL_GEMM, false},
    {"*ncclDevKernel_*", EPO_KERNEL_OTHER_COMM, false},
    {"*ncclKernel_*", EPO_KERNEL_OTHER_COMM, false},
    {"*userbuffers*", EPO_KERNEL_OTHER_COMM, false},
    {"*permute*", EPO_KERNEL_PERMUTE, false},
    {"*sort_chunks*", EPO_KERNEL_PERMUTE, false},
    {"*moe_align*", EPO_KERNEL_PERMUTE, false},
    {"*flash_*", EPO_KERNEL_ATTENTION, false},
    {"*flash::*", EPO_KERNEL_ATTENTION, false},
    {"*fmha*", EPO_KERNEL_ATTENTION, false},
    {"*sdpa*", EPO_KERNEL_ATTENTION, false},
    {"*nvjet_*", EPO_KERNEL_GEMM, false},
    {"*gemm*", EPO_KERNEL_GEMM, false},
    {"*cublas*", EPO_KERNEL_GEMM, false},
    {"*cutlass*", EPO_KERNEL_GEMM, false},
    {"*xmma*", EPO_KERNEL_GEMM, false},
    {"*wgmma*", EPO_KERNEL_GEMM, false},
};

static const builtin *find_builtin(const char *name) {
    for (size_t i = 0; i < sizeof builtins / sizeof *builtins; i++)
        if (fnmatch(builtins[i].glob, name, FNM_CASEFOLD) == 0)
            return &builtins[i];
    return NULL;
}

epo_kernel_class epo_kernel_classify(const epo_kernel_patterns *patterns, const char *name) {
    for (size_t i = 0; patterns != NULL && i < patterns->count; i++)
        if (fnmatch(patterns->pattern[i].glob, name, FNM_CASEFOLD) == 0)
            return patterns->pattern[i].kind;
    const builtin *found = find_builtin(name);
    return found == NULL ? EPO_KERNEL_OTHER : found->kind;
}

bool epo_kernel_is_send_recv(const char *name) {
    return fnmatch("*nccl*Kernel_SendRecv*", name, FNM_CASEFOLD) == 0;
}

bool epo_kernel_is_flex(const char *name) {
    const builtin *found = find_builtin(name);
    return found != NULL && found->flex;
}

static const char *const names[EPO_KERNEL_CLASSES] = {"ep_comm", "other_comm", "gemm", "attention",
                                                      "permute", "other",      "copy"};

const char *epo_kernel_class_name(epo_kernel_class kind) {
    return (unsigned)kind < EPO_KERNEL_CLASSES ? names[kind] : "?";
}

bool epo_kernel_class_find(const char *name, size_t length, epo_kernel_class *kind) {
    for (int i = 0; i < EPO_KERNEL_CLASSES; i++)
        if (strlen(names[i]) == length && memcmp(names[i], name, length) == 0) {
            *kind = (epo_kernel_class)i;
            return true;
        }
    return false;
}
