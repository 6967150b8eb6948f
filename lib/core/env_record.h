/* SPDX-License-Identifier: Apache-2.0
 *
 * env_record.h - EP_OVERLAP_SET: what we set in a task's environment and what
 * stood there before, so that a nested step can put everything back.
 *
 * Text: "NAME=VALUE" (nothing stood there before) or "NAME=VALUE|BEFORE", joined
 * by ';'.  In values every byte that is not a letter, a digit or one of
 * "_-+./:," is written %XX.
 */
#ifndef EPO_CORE_ENV_RECORD_H
#define EPO_CORE_ENV_RECORD_H

#include "core/status.h"

#define EPO_ENV_RECORD_MAX 64 /* entries */

struct epo_env_entry {
    char *name;
    char *value;  /* what we set */
    char *before; /* what stood there, NULL: nothing */
};

struct epo_env_record {
    struct epo_env_entry entries[EPO_ENV_RECORD_MAX];
    int count;
};
#define EPO_ENV_RECORD_INIT                                                                        \
    { {{NULL, NULL, NULL}}, 0 }

epo_status epo_env_record_add(struct epo_env_record *record, const char *name, const char *value,
                              const char *before);
/* The text, for the caller to free. */
epo_status epo_env_record_write(const struct epo_env_record *record, char **text);
/* Reads a text; a user may have put anything there.  EPO_E_ARG and an empty
 * record when it is not one of ours. */
epo_status epo_env_record_read(const char *text, struct epo_env_record *record);
void epo_env_record_clear(struct epo_env_record *record);

#endif
