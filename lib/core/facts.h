/* SPDX-License-Identifier: Apache-2.0
 *
 * facts.h - what is known about a job, a node or a run: key -> value, each with
 * the place it came from.  Rules read facts, whoever gathered them: a command
 * line, a configuration, a log, the probe of a node.
 */
#ifndef EPO_CORE_FACTS_H
#define EPO_CORE_FACTS_H

#include "ep_overlap.h"

#include <stdbool.h>
#include <stddef.h>

#define EPO_FACTS_MAX 65536 /* facts of one table: a bound for hostile inputs */
#define EPO_FACT_TEXT_MAX 65536

typedef enum epo_fact_kind {
    EPO_FACT_UNKNOWN, /* nobody told, or what was told cannot be read */
    EPO_FACT_NULL,    /* known to be unset: None, null, an unset variable */
    EPO_FACT_BOOL,
    EPO_FACT_NUMBER,
    EPO_FACT_TEXT, /* versions too */
    EPO_FACT_LIST  /* text holds its words with commas between */
} epo_fact_kind;

typedef struct epo_fact {
    const char *key;
    epo_fact_kind kind;
    const char *text;   /* as people write it; "" for a NULL or UNKNOWN one */
    double number;      /* of a NUMBER; 0 or 1 of a BOOL */
    const char *source; /* "--bf16", "train.yaml:12", "Megatron-LM's default" */
    bool is_default;    /* nobody gave it: the framework's default */
} epo_fact;

typedef struct epo_facts epo_facts;

/* NULL when memory is short. */
epo_facts *epo_facts_create(void);
void epo_facts_destroy(epo_facts *facts);

/* Reads `text` as Python, YAML and argument lists write values (None, null, ~,
 * True, false, numbers, [a, b], ('a', 'b'), <Enum.word: 3>, words) and puts it
 * under `key`; a later call replaces the value.  `text` NULL: known to be unset.
 * EPO_E_OVERFLOW: more facts, or a longer text, than a table holds. */
epo_status epo_facts_set(epo_facts *facts, const char *key, const char *text, const char *source);
/* The same without reading: "1", "None" and "[x]" stay text.  For environment
 * variables. */
epo_status epo_facts_set_text(epo_facts *facts, const char *key, const char *text,
                              const char *source);
/* Somebody spoke of `key`, but its value cannot be told ($EP in a script): `text` says what. */
epo_status epo_facts_set_unknown(epo_facts *facts, const char *key, const char *text,
                                 const char *source);
/* As epo_facts_set, but only where nothing stands; marked as a default. */
epo_status epo_facts_set_default(epo_facts *facts, const char *key, const char *text,
                                 const char *source);

/* NULL: nobody spoke of `key`.  Valid until the table changes. */
const epo_fact *epo_facts_find(const epo_facts *facts, const char *key);
size_t epo_facts_count(const epo_facts *facts);
/* In the order of their first mention. */
const epo_fact *epo_facts_at(const epo_facts *facts, size_t index);

/* True if `fact` is known and a true value: true, a number but 0, text, a list with words. */
bool epo_fact_is_true(const epo_fact *fact);
/* True if `word` is the text or stands in the list. */
bool epo_fact_has_word(const epo_fact *fact, const char *word, size_t length);

#endif
