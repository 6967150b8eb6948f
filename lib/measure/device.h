/* SPDX-License-Identifier: Apache-2.0
 *
 * device.h - where an engine's rows lie: ordinary memory for the host engine, a GPU's
 * for the CUDA engine.  One per rank, used by that rank's thread.
 */
#ifndef EPO_MEASURE_DEVICE_H
#define EPO_MEASURE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

typedef struct measure_device {
    bool gpu;
    int number;        /* among the GPUs that this process sees */
    int visible;       /* how many it sees */
    int sms;           /* streaming multiprocessors; 0 on the host */
    uint32_t tag;      /* of this GPU, 1 to 2^24 - 1: the same for whoever has it; 0: host */
    char name[96];     /* "NVIDIA H200", "host" */
    epo_stream stream; /* for the library's calls; NULL on the host */
    void *context;
    void *staging; /* MEASURE_STAGING bytes of the GPU, for measure_sum; NULL on the host */
} measure_device;

#define MEASURE_STAGING ((size_t)1 << 20)

/* HOST: ordinary memory.  CUDA: GPU `index` modulo those visible, made current for
 * this thread before the group is.  AUTO: a GPU if there is one, which
 * measure_device_settle gives back when the library chose the host engine. */
epo_status measure_device_open(epo_engine_kind engine, int index, measure_device *out);
void measure_device_settle(measure_device *d, const char *engine);
void measure_device_close(measure_device *d);
/* AUTO in a step of Slurm that holds no GPU becomes HOST, also where GPUs can be seen:
 * they are others'.  Why, static, or NULL where *engine stays. */
const char *measure_engine(epo_engine_kind *engine);
/* Plans with a pass after which an engine that measures has chosen: chunks, and on a GPU ways and
 * a backward's end, too. */
int measure_device_trials(const measure_device *d);
/* This rank's number on its node, by its launcher's variables; -1: they do not say. */
int measure_local_rank(void);

/* Zeroed; the error line has need and have.  At least one byte.  Where ranks are threads
 * of one process, no GPU may wait for a peer meanwhile: the driver may hold this call
 * until that GPU is idle. */
epo_status measure_device_alloc(measure_device *d, uint64_t bytes, void **out);
void measure_device_free(measure_device *d, void *memory);
/* From and to ordinary memory; complete on return. */
epo_status measure_device_put(measure_device *d, void *to, const void *from, size_t bytes);
epo_status measure_device_get(measure_device *d, void *to, const void *from, size_t bytes);
epo_status measure_device_zero(measure_device *d, void *memory, size_t bytes);
/* In use on the whole GPU, by whomever, 1e6 bytes; 0 on the host. */
double measure_device_used_mb(measure_device *d);
/* All that the stream holds has run. */
epo_status measure_device_sync(measure_device *d);

/* A point in the stream's work; on the host a reading of the clock. */
typedef struct measure_mark {
    void *event;
    double ms;
} measure_mark;
epo_status measure_mark_create(measure_device *d, measure_mark *mark);
void measure_mark_destroy(measure_device *d, measure_mark *mark);
epo_status measure_mark_set(measure_device *d, measure_mark *mark);
/* Waits for both. */
epo_status measure_mark_elapsed(measure_device *d, const measure_mark *from, const measure_mark *to,
                                double *ms);

/* GB/s at which rows can reach another rank.  GPU: copies to GPU `peer` while as many
 * come back, 0 where this process sees no second GPU.  Host: a copy in memory. */
epo_status measure_copy_rate(measure_device *d, int peer, double *gbs);

#endif
