/* SPDX-License-Identifier: Apache-2.0
 *
 * fact_value.h - reads one value as frameworks write it.
 */
#ifndef EPO_CORE_FACT_VALUE_H
#define EPO_CORE_FACT_VALUE_H

#include "core/facts.h"

typedef struct epo_fact_value {
    epo_fact_kind kind;
    char *text; /* owned by the caller */
    double number;
} epo_fact_value;

/* False when memory is short; `value` is written on success only. */
bool epo_fact_value_read(const char *text, epo_fact_value *value);

#endif
