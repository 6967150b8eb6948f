/* SPDX-License-Identifier: Apache-2.0
 *
 * settings.h - one setting as frameworks spell it, put under the name that rules read.
 */
#ifndef EPO_RULES_SETTINGS_H
#define EPO_RULES_SETTINGS_H

#include "core/facts.h"

/* `path` is a name (num_experts, of Megatron-LM's arguments or dump) or a path
 * (model.num_moe_experts, comm_overlap.delay_wgrad_compute, of Bridge).  What no
 * rule reads is passed over.  `value` NULL: the setting was mentioned and its
 * value cannot be told.  *known, if not NULL: whether some rule reads it. */
epo_status epo_setting_put(epo_facts *facts, const char *path, const char *value,
                           const char *source, bool *known);

typedef enum epo_defaults { EPO_DEFAULTS_MEGATRON_LM, EPO_DEFAULTS_MEGATRON_CORE } epo_defaults;

/* Fills in what nobody gave. */
epo_status epo_settings_default(epo_facts *facts, epo_defaults from);

/* Works out the names that follow from others (number of micro-batches, backend
 * in use, ...).  Call it once, when everything given is in. */
epo_status epo_settings_derive(epo_facts *facts);

#endif
