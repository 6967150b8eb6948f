/* SPDX-License-Identifier: Apache-2.0
 *
 * config_read.h - reading a libconfig group by a table of its keys.  Only for
 * config.c.
 */
#ifndef EPO_CORE_CONFIG_READ_H
#define EPO_CORE_CONFIG_READ_H

#include "core/config.h"

#include <libconfig.h>

struct reader {
    const char *path;
};

/* Parses one setting into `*field`. */
typedef epo_status config_parser(const struct reader *reader, const config_setting_t *setting,
                                 void *field);
struct config_key {
    const char *name;
    config_parser *parse;
    size_t offset; /* of the field in the group's struct */
};

/* "PATH:LINE: ..." */
epo_status config_fail(const struct reader *reader, const config_setting_t *setting,
                       const char *format, ...) EPO_PRINTF(3, 4);
/* Reads the keys of a group into `base`; a key that the table lacks is an error. */
epo_status config_read_group(const struct reader *reader, const config_setting_t *group,
                             const struct config_key *keys, void *base);
/* The entries of a list of groups, `size` bytes each, zeroed, through `parse`. */
epo_status config_read_list(const struct reader *reader, const config_setting_t *list, size_t size,
                            config_parser *parse, void **items, int *count);

config_parser config_read_text, config_read_bool, config_read_words, config_read_ids,
    config_read_overlap, config_read_dispatcher, config_read_delay_wgrad, config_read_switch;
/* A word of a NULL-terminated list; its index. */
epo_status config_read_word(const struct reader *reader, const config_setting_t *setting,
                            const char *const *words, int *value);
epo_status config_read_int(const struct reader *reader, const config_setting_t *setting, int least,
                           int most, int *value);
void config_words_clear(struct epo_names *words);

#endif
