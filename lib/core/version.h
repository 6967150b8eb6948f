/* SPDX-License-Identifier: Apache-2.0
 *
 * version.h - Python package versions, ordered as PEP 440 orders them:
 * 2.6.0.dev1 < 2.6.0a0 < 2.6.0rc1 < 2.6.0 < 2.6.0+cu124 < 2.6.0.post1 < 2.10
 */
#ifndef EPO_CORE_VERSION_H
#define EPO_CORE_VERSION_H

#include "ep_overlap.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EPO_VERSION_RELEASE_MAX 16

typedef struct epo_pep440 {
    uint64_t epoch;
    uint64_t release[EPO_VERSION_RELEASE_MAX]; /* 2.6.0 is 2, 6 (trailing zeros are dropped) */
    unsigned release_count;
    int pre_phase; /* 0 none, 1 a, 2 b, 3 rc */
    uint64_t pre;
    bool has_post, has_dev;
    uint64_t post, dev;
    const char *local; /* behind '+', in the text that was read; NULL without */
    size_t local_length;
} epo_pep440;

/* Reads `text` (blanks around it, a leading v and the spellings that PEP 440
 * normalises are accepted).  `out` points into `text` and is written only on
 * success.  EPO_E_ARG: not a version; the error line names the byte. */
epo_status epo_pep440_parse(const char *text, epo_pep440 *out);

/* Less than, equal to or greater than 0, as a is older than, the same as or newer than b. */
int epo_pep440_compare(const epo_pep440 *a, const epo_pep440 *b);

#endif
