/* SPDX-License-Identifier: Apache-2.0
 *
 * moe_device.h - the host's backend with what a device's can do beside, each in plain loops
 * over ordinary memory, so that what lib/moe lays out for a GPU is compared with the reference
 * where there is none.  Programs are linked with --wrap=epo_backend_get.
 */
#ifndef EPO_TESTS_MOE_DEVICE_H
#define EPO_TESTS_MOE_DEVICE_H

#include "backend/backend.h"

/* What is there beside the host's; all false: the host's own table. */
typedef struct moe_device {
    bool apart;     /* the CPU reads and writes operation memory by calls */
    bool copies;    /* copy, and event_query: rows are read in place, two lanes */
    bool maps;      /* routings become maps where they are */
    bool own_rows;  /* ... and own rows stay */
    bool sums;      /* exchanges sum rows on their way */
    bool few;       /* ... by few */
    bool parts;     /* exchanges take several parts */
    bool spread;    /* rows are expanded by spread */
    bool near;      /* ... own ones beside the others' way, whatever they are */
    bool two_sided; /* moe_group_reaches says no */
    bool chain;     /* both products in one operation */
    bool fused;     /* gemm takes an activation */
    bool keeps;     /* gemm keeps rows on its way */
    bool replays;
    bool deaf;        /* calls are not compared as they begin */
    bool unleavable;  /* with replays: a capture that failed cannot be left well either */
    bool hesitates;   /* ... copies: five of six questions are too early, but after sync */
    uint64_t capture; /* of every call with replays; 0: none */
    epo_way way;      /* the only one; stores: not said */
} moe_device;
/* For groups that are opened from now on. */
void moe_device_be(const moe_device *can);
const moe_device *moe_device_is(void);
/* Calls of what only a device can do, since moe_device_be. */
uint64_t moe_device_chains(void), moe_device_direct(void), moe_device_spreads(void);
/* Where it is two-sided, since moe_device_be: ends of messages that found no other, or another one
 * (other bytes, another place), each pair of ranks' in the order of its exchanges. */
uint64_t moe_device_unmatched(void);
/* Bytes that are held in blocks of alloc, of all groups. */
uint64_t moe_device_bytes(void);

/* ---- between moe_device.c and moe_device_maps.c ---- */

/* fn(copy of args) in queue order; the copy lives until the backend closes. */
epo_status moe_device_run(epo_queue *q, void (*fn)(void *args), const void *args, size_t bytes,
                          const epo_deps *deps);
/* Room until the backend closes. */
void *moe_device_room(const epo_backend *be, uint64_t bytes);
void moe_device_maps(epo_backend_ops *ops);
void moe_device_replays(epo_backend_ops *ops, const epo_backend_ops *host);

#endif
