/* SPDX-License-Identifier: Apache-2.0
 *
 * cupti.h - the libcupti of this process, never linked and never a second one.
 */
#ifndef EPO_RECORD_CUPTI_H
#define EPO_RECORD_CUPTI_H

#include <stdbool.h>

#include "preload/record/cupti_abi.h"

#define CUPTI_TEXT 512

typedef struct cupti {
#define CUPTI_MEMBER(member, symbol, parameters) cupti_result(*member) parameters;
    EPO_CUPTI_FUNCTIONS(CUPTI_MEMBER)
    EPO_CUPTI_NEWER(CUPTI_MEMBER)
#undef CUPTI_MEMBER
    uint32_t number;       /* cuptiGetVersion: 28, 130001 */
    char path[CUPTI_TEXT]; /* where it was found */
} cupti;

/* The one that is mapped; where none is and no profiler of the program's could bring its
 * own, the one beside the CUDA run-time library that is mapped, else the toolkit's.  NULL:
 * `why` (CUPTI_TEXT bytes) says what was looked for.  Looked for once it is there no more. */
const cupti *cupti_find(char *why);
/* Reads the variables by which tools enter a process: in one of the program's threads, which may
 * change the environment while ours would look. */
void cupti_read_environment(void);
/* A profiler or checker that was put into the process from outside (Nsight Systems and
 * Compute, compute-sanitizer), by its variable or its mapped file; false: none. */
bool cupti_tool_attached(char *what);
/* "CUPTI_ERROR_...", never NULL. */
const char *cupti_error(const cupti *c, cupti_result r);

#endif
