/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/config_dump.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

static const char *skip_blanks(const char *at) {
    while (*at == ' ' || *at == '\t')
        at++;
    return at;
}

/* "12:" or "p4_perf/0" and a blank. */
static const char *skip_rank_prefix(const char *at) {
    const char *c = at;
    while (isdigit((unsigned char)*c))
        c++;
    if (c > at && *c == ':')
        return c + 1;
    for (c = at; isalnum((unsigned char)*c) || *c == '_' || *c == '-' || *c == '.';)
        c++;
    if (c > at && *c == '/' && isdigit((unsigned char)c[1])) {
        for (c++; isdigit((unsigned char)*c);)
            c++;
        if (*c == ' ' || *c == ':')
            return c + 1;
    }
    return at;
}

/* "[rank3]:", "[default0]:", "[2026-01-02 03:04:05]": a bracket with a digit, not a section. */
static const char *skip_bracket_prefix(const char *at) {
    const char *close = *at == '[' ? strchr(at, ']') : NULL;
    if (close == NULL || close - at > 48)
        return at;
    bool has_digit = false;
    for (const char *c = at; c < close; c++)
        has_digit = has_digit || isdigit((unsigned char)*c);
    if (!has_digit)
        return at;
    return close[1] == ':' ? close + 2 : close + 1;
}

const char *epo_line_payload(const char *line) {
    for (int rounds = 0; rounds < 4; rounds++) {
        const char *start = skip_blanks(line);
        const char *behind = skip_bracket_prefix(skip_rank_prefix(start));
        if (behind == start)
            return line;
        line = behind;
    }
    return line;
}

static bool is_rule(const char *at, char c) {
    at = skip_blanks(at);
    size_t n = 0;
    while (at[n] == c)
        n++;
    return n >= 20 && *skip_blanks(at + n) == '\0';
}

/* "  num_experts ............ 8": name, blanks, dots, blanks, value. */
static epo_status feed_argument(epo_dump *d, const char *at, uint64_t number,
                                epo_dump_setting *setting, void *context) {
    char name[128];
    size_t n = 0;
    at = skip_blanks(at);
    while (isalnum((unsigned char)at[n]) || at[n] == '_')
        n++;
    const char *dots = skip_blanks(at + n);
    if (n == 0 || n >= sizeof name || dots == at + n)
        return EPO_OK;
    size_t count = strspn(dots, ".");
    if (count == 0 && n < 40) /* a name of 48 letters has no dots */
        return EPO_OK;
    memcpy(name, at, n);
    name[n] = '\0';
    d->settings++;
    return setting(context, name, skip_blanks(dots + count), number);
}

static epo_status feed_megatron(epo_dump *d, const char *at, uint64_t number,
                                epo_dump_setting *setting, void *context) {
    if (strstr(at, "-- end of arguments --") != NULL) {
        d->inside = false;
        d->complete = true;
        return EPO_OK;
    }
    return feed_argument(d, at, number, setting, context);
}

/* "  field: value  (Mcore default: other)" */
static epo_status feed_field(epo_dump *d, const char *at, uint64_t number,
                             epo_dump_setting *setting, void *context) {
    char path[192], value[4096];
    size_t n = 0;
    at = skip_blanks(at);
    while (isalnum((unsigned char)at[n]) || at[n] == '_')
        n++;
    if (n == 0 || n > 100 || at[n] != ':' || d->section[0] == '\0')
        return EPO_OK;
    snprintf(path, sizeof path, "%s.%.*s", d->section, (int)n, at);
    const char *from = skip_blanks(at + n + 1);
    const char *note = strstr(from, "(Mcore default:");
    size_t length = note == NULL ? strlen(from) : (size_t)(note - from);
    while (length > 0 && isspace((unsigned char)from[length - 1]))
        length--;
    snprintf(value, sizeof value, "%.*s", (int)(length < sizeof value ? length : sizeof value - 1),
             from);
    d->settings++;
    return setting(context, path, value, number);
}

static epo_status feed_bridge(epo_dump *d, const char *at, uint64_t number,
                              epo_dump_setting *setting, void *context) {
    if (is_rule(at, '=')) {
        d->complete = ++d->rules_seen == 2;
        d->inside = !d->complete;
        return EPO_OK;
    }
    const char *head = skip_blanks(at);
    const char *close = *head == '[' ? strchr(head, ']') : NULL;
    if (close != NULL && (size_t)(close - head) < sizeof d->section) {
        snprintf(d->section, sizeof d->section, "%.*s", (int)(close - head) - 1, head + 1);
        return EPO_OK;
    }
    return feed_field(d, at, number, setting, context);
}

static void enter(epo_dump *d, epo_dump_kind kind) {
    *d = (epo_dump){.kind = kind, .inside = true, .settings = d->settings};
}

epo_status epo_dump_feed(epo_dump *d, const char *line, uint64_t number, epo_dump_setting *setting,
                         void *context) {
    if (!d->inside) {
        if (strstr(line, "--- arguments ---") != NULL)
            enter(d, EPO_DUMP_MEGATRON_LM);
        else if (strstr(line, "Configuration Summary (Non-Default Values") != NULL)
            enter(d, EPO_DUMP_BRIDGE);
        return EPO_OK;
    }
    const char *at = epo_line_payload(line);
    return d->kind == EPO_DUMP_MEGATRON_LM ? feed_megatron(d, at, number, setting, context)
                                           : feed_bridge(d, at, number, setting, context);
}
