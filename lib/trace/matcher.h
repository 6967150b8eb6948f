/* SPDX-License-Identifier: Apache-2.0
 *
 * matcher.h - many words in a text, in one pass (Aho and Corasick, 1975).
 */
#ifndef EPO_TRACE_MATCHER_H
#define EPO_TRACE_MATCHER_H

#include "ep_overlap.h"

#include <stddef.h>

#define EPO_MATCHER_STATES 16384

typedef struct epo_matcher epo_matcher;

/* `word` of each of `count` words; empty ones are never found. */
epo_status epo_matcher_create(const char *const *word, size_t count, epo_matcher **out);
void epo_matcher_destroy(epo_matcher *matcher);

/* Calls `found` for every occurrence, with the word's index and where its end lies. */
typedef void epo_matcher_found(void *context, size_t word, size_t end);
void epo_matcher_scan(const epo_matcher *matcher, const char *text, size_t length,
                      epo_matcher_found *found, void *context);

#endif
