/* SPDX-License-Identifier: Apache-2.0
 *
 * output.h - files that a run leaves: whole, or as they were before.
 */
#ifndef EP_TRAIN_OUTPUT_H
#define EP_TRAIN_OUTPUT_H

#include <stdio.h>

#include "core/status.h"

typedef struct output {
    FILE *file;
    const char *path;
    char *temporary; /* beside `path`, becomes it in the end; NULL: written in place */
} output;

/* A new or an ordinary file is written beside its place; devices, pipes and symbolic
 * links where they are.  A pipe that nobody reads is refused, not waited for. */
epo_status output_open(const char *path, output *out);
/* Puts the file into its place if `status` and all writes were good, else removes it.
 * Returns `status` or the first failure. */
epo_status output_close(output *out, epo_status status);
/* Could it be opened?  Leaves everything as it is. */
epo_status output_check(const char *path);
/* Standard streams that were closed: no file opened later takes their numbers. */
void output_standard(void);

#endif
