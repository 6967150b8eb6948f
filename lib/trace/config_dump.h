/* SPDX-License-Identifier: Apache-2.0
 *
 * config_dump.h - the configuration that a framework prints at the start of its
 * log: Megatron-LM's block of arguments, Bridge's summary of values that differ
 * from Megatron-Core's defaults.
 */
#ifndef EPO_TRACE_CONFIG_DUMP_H
#define EPO_TRACE_CONFIG_DUMP_H

#include "ep_overlap.h"

#include <stdbool.h>
#include <stdint.h>

/* One setting: "num_experts" or "model.num_moe_experts" and its value as printed. */
typedef epo_status epo_dump_setting(void *context, const char *path, const char *value,
                                    uint64_t line);

typedef enum epo_dump_kind { EPO_DUMP_NONE, EPO_DUMP_MEGATRON_LM, EPO_DUMP_BRIDGE } epo_dump_kind;

/* Zero-initialise. */
typedef struct epo_dump {
    epo_dump_kind kind; /* the last one seen */
    bool inside;
    bool complete;  /* its last line was seen */
    int rules_seen; /* lines of = in Bridge's */
    uint64_t settings;
    char section[64];
} epo_dump;

/* Feeds one line of a log.  Returns what `setting` returned. */
epo_status epo_dump_feed(epo_dump *dump, const char *line, uint64_t number,
                         epo_dump_setting *setting, void *context);

/* Behind what launchers put before a line: "12: ", "[rank3]:", "[2026-01-02 03:04:05] ". */
const char *epo_line_payload(const char *line);

#endif
