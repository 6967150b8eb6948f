/* SPDX-License-Identifier: Apache-2.0
 *
 * nccl_streams.h - a stand-in for NCCL between forked processes of one test: what a group has of a
 * communicator is one kernel, which stands on the group's streams and behind the communicator's
 * last one; messages go through shared memory, all of a kernel at once, in the order of their pair.
 * A handle that was ended is refused, by every call.
 */
#ifndef EPO_TESTS_FAKE_NCCL_STREAMS_H
#define EPO_TESTS_FAKE_NCCL_STREAMS_H

#include "preload/intercept/intercept.h"

#define FAKE_NCCL_RANKS 4

/* Before the fork: what the ranks share.  False: no memory. */
bool fake_nccl_open(void);
/* The id of communicator `number`, below 64; what is behind byte 64 is the test's. */
void fake_nccl_id(int number, ncclUniqueId *out);
extern const real_nccl fake_nccl;

/* Of intercept_around.c: the sizes and waits of communicators that this thread makes. */
typedef struct fake_settings_of {
    uint64_t least, wait_us;
} fake_settings_of;
extern _Thread_local fake_settings_of fake_settings;

#endif
