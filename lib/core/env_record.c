/* SPDX-License-Identifier: Apache-2.0 */
#include "core/env_record.h"

#include "core/text.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static bool is_alnum(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

static bool is_plain(char c) { return is_alnum(c) || (c != '\0' && strchr("_-+./:,", c) != NULL); }

static void escape(struct epo_text *text, const char *value) {
    for (; *value != '\0'; value++)
        if (is_plain(*value))
            epo_text_add(text, value, 1);
        else
            epo_text_format(text, "%%%02X", (unsigned)(unsigned char)*value);
}

static int hex(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* The value written in `length` bytes at `at`; NULL when it is none. */
static char *unescape(const char *at, size_t length) {
    char *value = malloc(length + 1);
    size_t used = 0;
    for (size_t i = 0; value != NULL && i < length; i++) {
        char c = at[i];
        if (c == '%' && length - i > 2 && hex(at[i + 1]) >= 0 && hex(at[i + 2]) >= 0) {
            c = (char)(hex(at[i + 1]) * 16 + hex(at[i + 2]));
            i += 2;
        } else if (!is_plain(c)) {
            c = '\0';
        }
        if (c == '\0') {
            free(value);
            return NULL;
        }
        value[used++] = c;
    }
    if (value != NULL)
        value[used] = '\0';
    return value;
}

static bool is_name(const char *at, size_t length) {
    bool ok = length > 0 && !(at[0] >= '0' && at[0] <= '9');
    for (size_t i = 0; ok && i < length; i++)
        ok = is_alnum(at[i]) || at[i] == '_';
    return ok;
}

static void clear_entry(struct epo_env_entry *entry) {
    free(entry->name);
    free(entry->value);
    free(entry->before);
    *entry = (struct epo_env_entry){NULL, NULL, NULL};
}

epo_status epo_env_record_add(struct epo_env_record *record, const char *name, const char *value,
                              const char *before) {
    if (record->count == EPO_ENV_RECORD_MAX)
        return epo_fail(EPO_E_STATE,
                        "more than %d variables to set; set fewer in the configuration",
                        EPO_ENV_RECORD_MAX);
    struct epo_env_entry entry = {strdup(name), strdup(value),
                                  before != NULL ? strdup(before) : NULL};
    if (entry.name == NULL || entry.value == NULL || (before != NULL && entry.before == NULL)) {
        clear_entry(&entry);
        return epo_fail(EPO_E_NOMEM, "no memory for the value of %s", name);
    }
    record->entries[record->count++] = entry;
    return EPO_OK;
}

epo_status epo_env_record_write(const struct epo_env_record *record, char **text) {
    struct epo_text out = EPO_TEXT_INIT;
    for (int i = 0; i < record->count; i++) {
        const struct epo_env_entry *entry = &record->entries[i];
        epo_text_format(&out, "%s%s=", i > 0 ? ";" : "", entry->name);
        escape(&out, entry->value);
        if (entry->before != NULL) {
            epo_text_add(&out, "|", 1);
            escape(&out, entry->before);
        }
    }
    char *written = epo_text_take(&out);
    if (written == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for the record of the environment");
    *text = written;
    return EPO_OK;
}

/* One entry of `length` bytes. */
static bool read_entry(const char *at, size_t length, struct epo_env_entry *entry) {
    const char *equals = memchr(at, '=', length);
    if (equals == NULL || !is_name(at, (size_t)(equals - at)))
        return false;
    const char *value = equals + 1, *end = at + length;
    const char *bar = memchr(value, '|', (size_t)(end - value));
    entry->name = strndup(at, (size_t)(equals - at));
    entry->value = unescape(value, (size_t)((bar != NULL ? bar : end) - value));
    if (bar != NULL)
        entry->before = unescape(bar + 1, (size_t)(end - bar - 1));
    return entry->name != NULL && entry->value != NULL && (bar == NULL || entry->before != NULL);
}

epo_status epo_env_record_read(const char *text, struct epo_env_record *record) {
    struct epo_env_record got = EPO_ENV_RECORD_INIT;
    bool ok = true;
    while (ok && *text != '\0') {
        size_t length = strcspn(text, ";");
        struct epo_env_entry entry = {NULL, NULL, NULL};
        ok = got.count < EPO_ENV_RECORD_MAX && read_entry(text, length, &entry);
        if (ok)
            got.entries[got.count++] = entry;
        else
            clear_entry(&entry);
        text += length + (text[length] == ';');
    }
    if (!ok) {
        epo_env_record_clear(&got);
        *record = got;
        return epo_fail(EPO_E_ARG, "a record of the environment that the plugin did not write");
    }
    *record = got;
    return EPO_OK;
}

void epo_env_record_clear(struct epo_env_record *record) {
    for (int i = 0; i < record->count; i++)
        clear_entry(&record->entries[i]);
    record->count = 0;
}
