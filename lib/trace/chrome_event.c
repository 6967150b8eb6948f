/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/chrome_event.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

epo_chrome_key epo_chrome_key_find(bool in_args, const char *text, size_t length) {
    static const struct {
        const char *word;
        epo_chrome_key key;
    } keys[2][7] = {{{"ph", EPO_CHROME_PH},
                     {"cat", EPO_CHROME_CAT},
                     {"name", EPO_CHROME_NAME},
                     {"ts", EPO_CHROME_TS},
                     {"dur", EPO_CHROME_DUR},
                     {"pid", EPO_CHROME_PID},
                     {"args", EPO_CHROME_ARGS}},
                    {{"device", EPO_CHROME_DEVICE}, {"stream", EPO_CHROME_STREAM}}};
    for (size_t i = 0; i < 7 && keys[in_args][i].word != NULL; i++)
        if (strlen(keys[in_args][i].word) == length &&
            memcmp(text, keys[in_args][i].word, length) == 0)
            return keys[in_args][i].key;
    return EPO_CHROME_OTHER;
}

void epo_chrome_event_clear(epo_chrome_event *event) {
    const size_t from = offsetof(epo_chrome_event, complete);
    event->name[0] = event->cat[0] = '\0';
    memset((char *)event + from, 0, sizeof *event - from);
}

/* Microseconds with decimals to nanoseconds, exactly: 1.7e15 us do not fit a double. */
static bool parse_microseconds(const char *text, size_t length, int64_t *ns) {
    bool negative = length > 0 && text[0] == '-';
    size_t i = negative;
    int64_t whole = 0, fraction = 0;
    if (length == negative)
        return false;
    for (; i < length && isdigit((unsigned char)text[i]); i++)
        if (whole > (INT64_MAX / 1000 - 9) / 10)
            return false;
        else
            whole = whole * 10 + (text[i] - '0');
    if (i < length && text[i] == '.') {
        int64_t scale = 100;
        for (i++; i < length && isdigit((unsigned char)text[i]); i++, scale /= 10)
            fraction += (text[i] - '0') * scale;
    }
    if (i < length) { /* an exponent */
        char copy[64], *end;
        if (length >= sizeof copy)
            return false;
        memcpy(copy, text, length);
        copy[length] = '\0';
        double value = strtod(copy, &end) * 1000;
        if (*end != '\0' || !(fabs(value) < 9e18))
            return false;
        *ns = (int64_t)value;
        return true;
    }
    whole = whole * 1000 + fraction;
    *ns = negative ? -whole : whole;
    return true;
}

static bool parse_integer(const char *text, size_t length, int64_t *out) {
    bool negative = length > 0 && text[0] == '-';
    int64_t value = 0;
    if (length == negative)
        return false;
    for (size_t i = negative; i < length; i++)
        if (!isdigit((unsigned char)text[i]) || __builtin_mul_overflow(value, 10, &value) ||
            __builtin_sub_overflow(value, text[i] - '0', &value))
            return false;
    if (!negative && value == INT64_MIN)
        return false;
    *out = negative ? value : -value;
    return true;
}

void epo_chrome_event_number(epo_chrome_event *e, epo_chrome_key key, const char *text,
                             size_t length) {
    switch (key) {
    case EPO_CHROME_TS: e->has_start = parse_microseconds(text, length, &e->start); break;
    case EPO_CHROME_DUR: e->has_length = parse_microseconds(text, length, &e->length); break;
    case EPO_CHROME_PID: e->has_pid = parse_integer(text, length, &e->pid); break;
    case EPO_CHROME_DEVICE: e->has_device = parse_integer(text, length, &e->device); break;
    case EPO_CHROME_STREAM: e->has_stream = parse_integer(text, length, &e->stream); break;
    default: break;
    }
}

static void copy_text(char *to, size_t room, const char *text, size_t length) {
    size_t n = length < room - 1 ? length : room - 1;
    memcpy(to, text, n);
    to[n] = '\0';
}

void epo_chrome_event_string(epo_chrome_event *e, epo_chrome_key key, const char *text,
                             size_t length) {
    switch (key) {
    case EPO_CHROME_PH: e->complete = length == 1 && text[0] == 'X'; break;
    case EPO_CHROME_CAT: copy_text(e->cat, sizeof e->cat, text, length); break;
    case EPO_CHROME_NAME: copy_text(e->name, sizeof e->name, text, length); break;
    default:
        if (length < 64)
            epo_chrome_event_number(e, key, text, length); /* "ts": "12.5" */
    }
}

/* "Memcpy PtoP (Device -> Device)" */
static epo_copy_kind copy_kind(const char *name) {
    if (strstr(name, "PtoP") != NULL || strstr(name, "Peer") != NULL)
        return EPO_COPY_PEER;
    if (strstr(name, "DtoD") != NULL)
        return EPO_COPY_LOCAL;
    static const char *const host[] = {"HtoD", "DtoH", "HtoH", "HtoA", "AtoH", "Memset"};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++)
        if (strstr(name, host[i]) != NULL)
            return EPO_COPY_HOST;
    return EPO_COPY_UNKNOWN;
}

static epo_status add_kernel(const epo_chrome_event *e, epo_profile *profile, int64_t device) {
    uint32_t handle;
    epo_status status =
        epo_profile_intern(profile, e->name[0] == '\0' ? "(no name)" : e->name, &handle);
    return status != EPO_OK ? status
                            : epo_profile_kernel(profile, 0, device, e->stream, handle, e->start,
                                                 e->start + e->length);
}

static bool is_copy(const char *cat) {
    return strcmp(cat, "gpu_memcpy") == 0 || strcmp(cat, "gpu_memset") == 0 ||
           strcmp(cat, "Memcpy") == 0 || strcmp(cat, "Memset") == 0;
}

epo_status epo_chrome_event_end(const epo_chrome_event *e, epo_profile *profile) {
    epo_kernel_class kind = EPO_KERNEL_OTHER;
    if (!e->complete)
        return EPO_OK;
    bool kernel = strcmp(e->cat, "kernel") == 0 || strcmp(e->cat, "Kernel") == 0;
    bool own = !kernel && epo_kernel_class_find(e->cat, strlen(e->cat), &kind);
    if (!own && !kernel && !is_copy(e->cat))
        return EPO_OK;
    int64_t device = e->has_device ? e->device : own ? 0 : e->pid;
    int64_t process = own ? e->pid : 0;
    if (!e->has_start || !e->has_length || e->length < 0 || e->start > INT64_MAX - e->length)
        return epo_profile_copy(profile, process, device, 0, false, EPO_COPY_HOST, 1, 0);
    if (own)
        return epo_profile_interval(profile, process, device, e->stream, kind, e->name, e->start,
                                    e->start + e->length);
    if (kernel)
        return add_kernel(e, profile, device);
    return epo_profile_copy(profile, process, device, e->stream, e->has_stream, copy_kind(e->name),
                            e->start, e->start + e->length);
}
