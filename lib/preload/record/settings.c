/* SPDX-License-Identifier: Apache-2.0
 *
 * settings.c - EP_OVERLAP_RECORD_WINDOW and what it may say.
 */
#include "config.h"

#include "preload/record/recorder.h"

#include <stdio.h>
#include <string.h>

#include "preload/environment.h"

/* "12", "2.5s": the number and whether it is seconds. */
static bool parse_one(const char *text, size_t length, double *value, bool *seconds) {
    char copy[16];
    *seconds = length > 0 && text[length - 1] == 's';
    length -= *seconds;
    if (length == 0 || length >= sizeof copy)
        return false;
    snprintf(copy, sizeof copy, "%.*s", (int)length, text);
    return epo_text_seconds(copy, value);
}

bool record_window_parse(const char *text, record_window *out) {
    const char *dash = strchr(text, '-');
    double from, to;
    bool from_seconds, seconds;
    if (dash == NULL || !parse_one(text, (size_t)(dash - text), &from, &from_seconds) ||
        !parse_one(dash + 1, strlen(dash + 1), &to, &seconds) || (from_seconds && !seconds))
        return false;
    if (seconds ? to <= from || to - from > RECORD_SECONDS_MAX || to > 1e6
                : from < 1 || to < from || to > RECORD_STEPS_MAX ||
                      from != (double)(uint32_t)from || to != (double)(uint32_t)to)
        return false;
    const double scale = seconds ? 1000 : 1;
    *out = (record_window){seconds, (uint32_t)(from * scale), (uint32_t)(to * scale)};
    return true;
}
