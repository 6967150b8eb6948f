/* SPDX-License-Identifier: Apache-2.0
 *
 * chrome_event.h - what one event of a Chrome trace says, whoever parsed it.
 */
#ifndef EPO_TRACE_CHROME_EVENT_H
#define EPO_TRACE_CHROME_EVENT_H

#include "trace/profile.h"

#define EPO_CHROME_NAME_MAX 4096

/* Members that count; device and stream stand in "args". */
typedef enum epo_chrome_key {
    EPO_CHROME_OTHER,
    EPO_CHROME_PH,
    EPO_CHROME_CAT,
    EPO_CHROME_NAME,
    EPO_CHROME_TS,
    EPO_CHROME_DUR,
    EPO_CHROME_PID,
    EPO_CHROME_ARGS,
    EPO_CHROME_DEVICE,
    EPO_CHROME_STREAM
} epo_chrome_key;

typedef struct epo_chrome_event {
    char name[EPO_CHROME_NAME_MAX], cat[64];
    bool complete, has_start, has_length, has_device, has_stream, has_pid;
    int64_t start, length; /* ns */
    int64_t pid, device, stream;
} epo_chrome_event;

/* The key of a member's name: of an event's object, or of its "args". */
epo_chrome_key epo_chrome_key_find(bool in_args, const char *text, size_t length);

void epo_chrome_event_clear(epo_chrome_event *event);
/* The value of a member, as the file has it. */
void epo_chrome_event_number(epo_chrome_event *event, epo_chrome_key key, const char *text,
                             size_t length);
void epo_chrome_event_string(epo_chrome_event *event, epo_chrome_key key, const char *text,
                             size_t length);
/* Adds it to the profile, if it ran on a device. */
epo_status epo_chrome_event_end(const epo_chrome_event *event, epo_profile *profile);

#endif
