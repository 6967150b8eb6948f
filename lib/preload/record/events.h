/* SPDX-License-Identifier: Apache-2.0
 *
 * events.h - what ran on the GPUs, kept in bounded memory while a window is open.
 */
#ifndef EPO_RECORD_EVENTS_H
#define EPO_RECORD_EVENTS_H

#include <stdbool.h>

#include "preload/record/cupti_abi.h"
#include "trace/profile.h"

#define EVENTS_MAX ((size_t)2 << 20)       /* 80 MB with their growth */
#define EVENTS_NAMES_MAX ((size_t)1 << 15) /* names of kernels; more are one name */
#define EVENTS_NAME_BYTES 4096

typedef enum event_kind {
    EVENT_KERNEL,
    EVENT_COPY,
    EVENT_SET,
    EVENT_MARK,    /* a memset to a value of recorder.h's: copy 1: the end of an exchange */
    EVENT_EXCHANGE /* of the interposer's: waits and copies, from its stream's point of view */
} event_kind;

typedef struct event {
    int64_t start, end; /* ns, CUPTI's clock */
    uint32_t stream, name;
    uint16_t device;
    uint8_t kind, copy; /* event_kind; CUPTI's copy kind */
} event;

typedef struct events events;

/* `most` events at most (0: EVENTS_MAX). */
epo_status events_create(size_t most, events **out);
void events_destroy(events *e);
void events_clear(events *e);

/* The records of one buffer, by cuptiActivityGetNextRecord.  Those that do not fit are
 * counted; false: there was one. */
typedef cupti_result events_next(uint8_t *buffer, size_t valid, cupti_record **record);
bool events_take(events *e, events_next *next, uint8_t *buffer, size_t valid);

size_t events_count(const events *e);
const event *events_at(const events *e, size_t i);
const char *events_name(const events *e, uint32_t name); /* readable, without its arguments */
bool events_full(const events *e);
/* Records that did not fit; that had no end (unfinished); that nobody understands. */
typedef struct events_lost {
    uint64_t full, unfinished, strange;
} events_lost;
events_lost events_lost_of(const events *e);

/* Each mark of a begin and the next of an end on its stream become an exchange.  Once, in the
 * end. */
epo_status events_pair_marks(events *e);

/* "_ZN7deep_ep9intranode8dispatchILi4EEEvPv" -> "void deep_ep::intranode::dispatch<4>(void*)"
 * where the process has a C++ run-time library, else "deep_ep::intranode::dispatch ..." with
 * the mangled name behind it; what is no C++ name as it is. */
void events_readable(const char *mangled, char *out, size_t room);

#endif
