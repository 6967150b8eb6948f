/* SPDX-License-Identifier: Apache-2.0
 *
 * mapped.h - the versions that this process really runs with, by what is mapped, not by
 * what a search path or a package list promises.
 */
#ifndef EPO_INTERCEPT_MAPPED_H
#define EPO_INTERCEPT_MAPPED_H

#include <stdbool.h>
#include <stddef.h>

#define MAPPED_TEXT 64
#define MAPPED_PATH 512

typedef struct mapped {
    int nccls; /* different files */
    char nccl[MAPPED_TEXT], nccl_path[MAPPED_PATH], other_nccl_path[MAPPED_PATH];
    char other_nccl[MAPPED_TEXT];
    char torch[MAPPED_TEXT], te[MAPPED_TEXT], cuda[MAPPED_TEXT], driver[MAPPED_TEXT];
} mapped;

/* "2.28.9" of 22809 and of 2809. */
void mapped_nccl_version(int number, char text[MAPPED_TEXT]);
/* What mapped_look() found; NULL before. */
const mapped *mapped_known(void);

#endif
