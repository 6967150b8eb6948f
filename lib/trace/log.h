/* SPDX-License-Identifier: Apache-2.0
 *
 * log.h - training logs of Megatron-LM, Megatron-Bridge, NeMo, torchtitan and ep-train.
 *
 * An iteration line holds "iteration N/ M" and fields "name: value" between bars,
 * in any order, with or without what launchers put before it.  A field that is
 * absent is NAN here.  Frameworks leave the loss out when it is NaN: a line
 * without loss in a log that has losses is a NaN loss.
 */
#ifndef EPO_TRACE_LOG_H
#define EPO_TRACE_LOG_H

#include "trace/config_dump.h"
#include "trace/lines.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EPO_LOG_ITERATIONS_MAX 4000000 /* of one log: 400 MB */

typedef struct epo_iteration {
    int64_t number;
    uint64_t line;
    double time_ms; /* of this iteration (mean over log_interval of them) */
    double tflops;  /* model TFLOP/s per GPU */
    double tokens;  /* tokens/s per GPU */
    double loss, grad_norm;
    double batch; /* global batch size */
    double skipped, nans;
    uint32_t rank; /* of its prefix, "3: " or "[rank3]:"; 0: none */
    bool no_loss;  /* the line has none */
    bool restarts; /* the first one behind a restart: it starts up, and its time counts not */
} epo_iteration;

typedef enum epo_log_kind {
    EPO_LOG_UNKNOWN,
    EPO_LOG_MEGATRON_LM,
    EPO_LOG_BRIDGE,
    EPO_LOG_NEMO,
    EPO_LOG_EP_TRAIN,
    EPO_LOG_TORCHTITAN
} epo_log_kind;

/* Something that makes the iterations around it unlike the others. */
typedef enum epo_event_kind {
    EPO_EVENT_SAVE,
    EPO_EVENT_EVALUATION,
    EPO_EVENT_PROFILER
} epo_event_kind;

#define EPO_LOG_EVENTS_MAX 4096

typedef struct epo_log_event {
    epo_event_kind kind;
    int64_t after; /* the last iteration before it */
    uint64_t line;
} epo_log_event;

typedef struct epo_log {
    epo_log_kind kind;
    epo_iteration *iteration; /* ascending numbers */
    size_t count, room;
    int64_t planned;  /* M of "iteration N/ M"; 0: not told */
    int64_t interval; /* iterations from line to line; 0: one line */
    uint64_t lines, bytes;
    uint64_t restarts;   /* times the numbers went back; the later run counts */
    uint64_t duplicates; /* lines of an iteration that another rank had printed */
    bool has_loss;
    double peak_allocated, peak_reserved; /* bytes, of any rank; NAN: not told */
    uint64_t cut_lines;                   /* longer than EPO_LINE_MAX */
    uint64_t failure_line;                /* the first line of a crash; 0: none */
    char failure[160];
    char comma[24];                  /* a number with a comma for its point; "": none */
    double *step_time, *step_tflops; /* Bridge's "Step Time" lines, in order */
    size_t step_count, step_room;
    double clock; /* torchtitan: when the step before was printed, and which it was; 0: none */
    int64_t clock_step;
    epo_log_event event[EPO_LOG_EVENTS_MAX];
    size_t events;
    epo_dump dump; /* the configuration, if it was printed */
} epo_log;

/* Reads a whole log.  `setting` (may be NULL) gets each setting of the
 * configuration that the framework printed.  EPO_E_ARG: not text;
 * EPO_E_SYSTEM: cannot be read.  A log without iterations is no error. */
epo_status epo_log_read(const char *path, epo_progress *progress, void *progress_context,
                        epo_dump_setting *setting, void *context, epo_log **out);
void epo_log_destroy(epo_log *log);

const char *epo_log_kind_name(epo_log_kind kind);

/* ---- for the parts of the reader and its tests -------------------------- */

/* One line; `number` counts from 1. */
epo_status epo_log_feed(epo_log *log, const char *line, uint64_t number, epo_dump_setting *setting,
                        void *context);
/* What only the whole log tells: NaN losses, times printed by another rank. */
void epo_log_finish(epo_log *log);
epo_log *epo_log_create(void);
/* True if `line` is torchtitan's: fills `iteration`. */
bool epo_log_titan(const char *line, epo_iteration *iteration, epo_log *log);
/* Reads "name: value" between bars into `iteration`; true if a field was known. */
bool epo_log_field(const char *name, size_t length, const char *value, epo_iteration *iteration,
                   epo_log *log);

#endif
