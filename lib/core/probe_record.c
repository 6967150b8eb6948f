/* SPDX-License-Identifier: Apache-2.0 */
#include "core/probe_record.h"

#include "core/text.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

_Static_assert(sizeof(struct epo_probe_record) == EPO_PROBE_BYTES, "a record has no gaps");

int epo_probe_key_allowed(const char *key) {
    static const char *const names[] = {"gpu",
                                        "gpu_major",
                                        "gpu_name",
                                        "nvl72",
                                        "nccl_version",
                                        "te_version",
                                        "torch_version",
                                        "triton_version",
                                        "bridge_version",
                                        "in_container",
                                        "te_built_with_nccl_ep"};
    static const char *const families[] = {"node.", "deep_ep.", "python.", "probe.", "task."};
    size_t length = strlen(key);
    if (length == 0 || length >= EPO_PROBE_KEY_MAX)
        return false;
    for (size_t i = 0; i < length; i++)
        if (!islower((unsigned char)key[i]) && !isdigit((unsigned char)key[i]) && key[i] != '.' &&
            key[i] != '_')
            return false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(key, names[i]) == 0)
            return true;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (strncmp(key, families[i], strlen(families[i])) == 0)
            return true;
    return false;
}

static uint64_t hash(uint64_t sum, const void *bytes, size_t length) {
    const unsigned char *at = bytes;
    for (size_t i = 0; i < length; i++)
        sum = (sum ^ at[i]) * UINT64_C(1099511628211);
    return sum;
}

static uint64_t checksum(const struct epo_probe_record *record) {
    uint64_t sum = hash(UINT64_C(14695981039346656037), &record->count, sizeof record->count);
    sum = hash(sum, &record->used, sizeof record->used);
    return hash(sum, record->text, sizeof record->text);
}

struct entry {
    char kind;
    char key[EPO_PROBE_KEY_MAX];
    char value[EPO_PROBE_VALUE_MAX];
    char source[EPO_PROBE_SOURCE_MAX];
};

static void fill_entry(const epo_fact *fact, struct entry *entry) {
    const char *value = fact->text != NULL ? fact->text : "";
    entry->kind = fact->kind == EPO_FACT_UNKNOWN ? 'u'
                  : fact->kind == EPO_FACT_NULL  ? 'n'
                  : fact->kind == EPO_FACT_TEXT  ? 't'
                                                 : 'v';
    snprintf(entry->key, sizeof entry->key, "%s", fact->key);
    snprintf(entry->source, sizeof entry->source, "%s", fact->source);
    if (entry->kind != 'u' && strlen(value) >= sizeof entry->value) {
        entry->kind = 'u';
        snprintf(entry->value, sizeof entry->value, "longer than %d bytes",
                 EPO_PROBE_VALUE_MAX - 1);
    } else if (fact->kind == EPO_FACT_LIST) {
        snprintf(entry->value, sizeof entry->value, "[%.1000s]", value);
    } else {
        snprintf(entry->value, sizeof entry->value, "%s", value);
    }
    epo_text_clean(entry->value);
    epo_text_clean(entry->source);
}

static bool append(struct epo_probe_record *record, const void *bytes, size_t length) {
    if (length > sizeof record->text - record->used)
        return false;
    memcpy(record->text + record->used, bytes, length);
    record->used += (uint32_t)length;
    return true;
}

epo_status epo_probe_record_write(const epo_facts *facts, struct epo_probe_record *record) {
    size_t count = epo_facts_count(facts);
    memset(record, 0, sizeof *record);
    for (size_t i = 0; i < count; i++) {
        struct entry entry;
        fill_entry(epo_facts_at(facts, i), &entry);
        if (!epo_probe_key_allowed(entry.key))
            return epo_fail(EPO_E_ARG, "the probe has no fact of the name \"%s\"", entry.key);
        if (record->count == EPO_PROBE_FACTS_MAX || !append(record, &entry.kind, 1) ||
            !append(record, entry.key, strlen(entry.key) + 1) ||
            !append(record, entry.value, strlen(entry.value) + 1) ||
            !append(record, entry.source, strlen(entry.source) + 1))
            return epo_fail(EPO_E_OVERFLOW, "%zu facts are more than a probe's record holds",
                            count);
        record->count++;
    }
    record->magic = EPO_PROBE_MAGIC;
    record->version = EPO_PROBE_VERSION;
    record->size = EPO_PROBE_BYTES;
    record->checksum = checksum(record);
    return EPO_OK;
}

/* The next string, at most `room` bytes with its NUL, of printable characters. */
static bool take(const struct epo_probe_record *record, size_t *at, size_t room, char *into) {
    const char *string = record->text + *at;
    size_t left = record->used - *at;
    const char *end = memchr(string, '\0', left < room ? left : room);
    if (end == NULL || !epo_text_is_clean(string))
        return false;
    memcpy(into, string, (size_t)(end - string) + 1);
    *at += (size_t)(end - string) + 1;
    return true;
}

static bool next_entry(const struct epo_probe_record *record, size_t *at, struct entry *entry) {
    if (*at >= record->used)
        return false;
    entry->kind = record->text[(*at)++];
    return memchr("unvt", entry->kind, 4) != NULL &&
           take(record, at, sizeof entry->key, entry->key) &&
           take(record, at, sizeof entry->value, entry->value) &&
           take(record, at, sizeof entry->source, entry->source) &&
           epo_probe_key_allowed(entry->key);
}

static epo_status put(const struct entry *entry, epo_facts *facts) {
    switch (entry->kind) {
    case 'u': return epo_facts_set_unknown(facts, entry->key, entry->value, entry->source);
    case 'n': return epo_facts_set(facts, entry->key, NULL, entry->source);
    case 't': return epo_facts_set_text(facts, entry->key, entry->value, entry->source);
    default: return epo_facts_set(facts, entry->key, entry->value, entry->source);
    }
}

#define ANEW "; install ep-overlap anew on this node"

static epo_status check_head(const struct epo_probe_record *record) {
    if (record->magic != EPO_PROBE_MAGIC)
        return epo_fail(EPO_E_ARG, "the probe's answer is no record" ANEW);
    if (record->version != EPO_PROBE_VERSION || record->size != EPO_PROBE_BYTES)
        return epo_fail(EPO_E_VERSION,
                        "the probe's record is of version %u with %u bytes, this program reads "
                        "version %u with %u; install both from one release",
                        record->version, record->size, EPO_PROBE_VERSION, EPO_PROBE_BYTES);
    if (record->used > sizeof record->text || record->count > EPO_PROBE_FACTS_MAX ||
        record->checksum != checksum(record))
        return epo_fail(EPO_E_ARG, "the probe's record is damaged" ANEW);
    return EPO_OK;
}

epo_status epo_probe_record_read(const struct epo_probe_record *record, epo_facts *facts) {
    struct entry entry;
    size_t at = 0;
    epo_status status = check_head(record);
    for (uint32_t i = 0; i < record->count && status == EPO_OK; i++)
        if (!next_entry(record, &at, &entry))
            status = epo_fail(EPO_E_ARG, "the probe's record is damaged at its fact %u" ANEW, i);
    if (status == EPO_OK && at != record->used)
        status = epo_fail(EPO_E_ARG, "the probe's record has bytes behind its last fact" ANEW);
    at = 0;
    for (uint32_t i = 0; i < record->count && status == EPO_OK; i++)
        if (next_entry(record, &at, &entry))
            status = put(&entry, facts);
    return status;
}
