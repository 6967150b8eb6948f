/* SPDX-License-Identifier: Apache-2.0
 *
 * far.h - ranks of several machines: small allgathers over TCP, by way of rank 0.
 */
#ifndef EPO_BACKEND_FAR_H
#define EPO_BACKEND_FAR_H

#include <stddef.h>

#include "ep_overlap.h"

typedef struct epo_far epo_far;

/* [collective]  Over the bootstrap, which is used this once. */
epo_status epo_far_open(const epo_bootstrap *bootstrap, int rank, int ranks, double timeout_s,
                        epo_far **out);
void epo_far_close(epo_far *far); /* NULL is accepted */
/* [collective]  bytes 0: a barrier.  One thread at a time. */
epo_status epo_far_allgather(epo_far *far, const void *mine, size_t bytes, void *all);
/* What the others get instead of this rank's part of the next exchange; from any thread. */
void epo_far_fail(epo_far *far, epo_status status, const char *text);

#endif
