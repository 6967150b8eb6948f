/* SPDX-License-Identifier: Apache-2.0 */
#include "core/facts.h"

#include "core/fact_value.h"
#include "core/status.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Entries in order of their first mention, and an open hash of their indices. */
struct epo_facts {
    epo_fact *entries;
    size_t count, capacity;
    uint32_t *slots; /* index + 1; 0 is free */
    size_t slot_count;
};

static uint64_t hash_text(const char *text) {
    uint64_t hash = 1469598103934665603u;
    for (const unsigned char *c = (const unsigned char *)text; *c != '\0'; c++)
        hash = (hash ^ *c) * 1099511628211u;
    return hash;
}

epo_facts *epo_facts_create(void) { return calloc(1, sizeof(epo_facts)); }

static void entry_clear(epo_fact *entry) {
    free((char *)entry->key);
    free((char *)entry->text);
    free((char *)entry->source);
}

void epo_facts_destroy(epo_facts *facts) {
    if (facts == NULL)
        return;
    for (size_t i = 0; i < facts->count; i++)
        entry_clear(&facts->entries[i]);
    free(facts->entries);
    free(facts->slots);
    free(facts);
}

/* The slot of `key`, or the free slot where it would stand. */
static size_t find_slot(const epo_facts *facts, const char *key) {
    size_t slot = hash_text(key) & (facts->slot_count - 1);
    while (facts->slots[slot] != 0 && strcmp(facts->entries[facts->slots[slot] - 1].key, key) != 0)
        slot = (slot + 1) & (facts->slot_count - 1);
    return slot;
}

static bool grow(epo_facts *facts) {
    size_t capacity = facts->capacity == 0 ? 64 : facts->capacity * 2;
    epo_fact *entries = reallocarray(facts->entries, capacity, sizeof *entries);
    if (entries == NULL)
        return false;
    facts->entries = entries;
    facts->capacity = capacity;
    uint32_t *slots = calloc(capacity * 2, sizeof *slots);
    if (slots == NULL)
        return false;
    free(facts->slots);
    facts->slots = slots;
    facts->slot_count = capacity * 2;
    for (size_t i = 0; i < facts->count; i++)
        slots[find_slot(facts, entries[i].key)] = (uint32_t)i + 1;
    return true;
}

static epo_status no_memory(void) {
    return epo_fail(EPO_E_NOMEM, "facts: no memory for another value");
}

/* Makes `entry` from copies of the strings; all or nothing. */
static epo_status entry_make(const char *key, epo_fact_value *value, const char *source,
                             epo_fact *entry) {
    epo_fact made = {.key = strdup(key),
                     .kind = value->kind,
                     .text = value->text,
                     .number = value->number,
                     .source = strdup(source)};
    if (made.key == NULL || made.source == NULL) {
        entry_clear(&made);
        return no_memory();
    }
    *entry = made;
    return EPO_OK;
}

/* Takes over value->text. */
static epo_status put(epo_facts *facts, const char *key, epo_fact_value *value, const char *source,
                      bool is_default) {
    epo_fact entry;
    epo_status status = entry_make(key, value, source, &entry);
    if (status != EPO_OK)
        return status;
    entry.is_default = is_default;
    if (facts->count >= facts->capacity / 2 + facts->capacity / 4 && !grow(facts)) {
        entry_clear(&entry);
        return no_memory();
    }
    size_t slot = find_slot(facts, key);
    if (facts->slots[slot] != 0) {
        epo_fact *old = &facts->entries[facts->slots[slot] - 1];
        entry_clear(old);
        *old = entry;
        return EPO_OK;
    }
    if (facts->count == EPO_FACTS_MAX) {
        entry_clear(&entry);
        return epo_fail(EPO_E_OVERFLOW, "%s: more than %d settings; is this a configuration?",
                        source, EPO_FACTS_MAX);
    }
    facts->entries[facts->count] = entry;
    facts->slots[slot] = (uint32_t)++facts->count;
    return EPO_OK;
}

static epo_status check_length(const char *key, const char *text, const char *source) {
    if (strlen(key) > EPO_FACT_TEXT_MAX || (text != NULL && strlen(text) > EPO_FACT_TEXT_MAX))
        return epo_fail(EPO_E_OVERFLOW, "%s: the value of %.64s is longer than %d bytes", source,
                        key, EPO_FACT_TEXT_MAX);
    return EPO_OK;
}

static epo_status set(epo_facts *facts, const char *key, const char *text, const char *source,
                      bool is_default) {
    epo_status status = check_length(key, text, source);
    if (status != EPO_OK)
        return status;
    epo_fact_value value;
    if (!epo_fact_value_read(text, &value))
        return no_memory();
    return put(facts, key, &value, source, is_default);
}

epo_status epo_facts_set(epo_facts *facts, const char *key, const char *text, const char *source) {
    return set(facts, key, text, source, false);
}

epo_status epo_facts_set_default(epo_facts *facts, const char *key, const char *text,
                                 const char *source) {
    return epo_facts_find(facts, key) != NULL ? EPO_OK : set(facts, key, text, source, true);
}

static epo_status set_plain(epo_facts *facts, const char *key, epo_fact_kind kind, const char *text,
                            const char *source) {
    epo_status status = check_length(key, text, source);
    if (status != EPO_OK)
        return status;
    epo_fact_value value = {.kind = kind, .text = strdup(text)};
    return value.text == NULL ? no_memory() : put(facts, key, &value, source, false);
}

epo_status epo_facts_set_text(epo_facts *facts, const char *key, const char *text,
                              const char *source) {
    return set_plain(facts, key, text == NULL ? EPO_FACT_NULL : EPO_FACT_TEXT,
                     text == NULL ? "" : text, source);
}

epo_status epo_facts_set_unknown(epo_facts *facts, const char *key, const char *text,
                                 const char *source) {
    return set_plain(facts, key, EPO_FACT_UNKNOWN, text, source);
}

const epo_fact *epo_facts_find(const epo_facts *facts, const char *key) {
    if (facts->slot_count == 0)
        return NULL;
    size_t slot = find_slot(facts, key);
    return facts->slots[slot] == 0 ? NULL : &facts->entries[facts->slots[slot] - 1];
}

size_t epo_facts_count(const epo_facts *facts) { return facts->count; }

const epo_fact *epo_facts_at(const epo_facts *facts, size_t index) {
    return index < facts->count ? &facts->entries[index] : NULL;
}

bool epo_fact_is_true(const epo_fact *fact) {
    if (fact == NULL || fact->kind == EPO_FACT_UNKNOWN || fact->kind == EPO_FACT_NULL)
        return false;
    if (fact->kind == EPO_FACT_BOOL || fact->kind == EPO_FACT_NUMBER)
        return fact->number != 0;
    return fact->text[0] != '\0';
}

bool epo_fact_has_word(const epo_fact *fact, const char *word, size_t length) {
    if (fact == NULL || fact->text == NULL)
        return false;
    for (const char *at = fact->text; *at != '\0';) {
        size_t n = strcspn(at, ",");
        if (n == length && memcmp(at, word, n) == 0)
            return true;
        at += n + (at[n] == ',');
    }
    return false;
}
