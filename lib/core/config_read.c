/* SPDX-License-Identifier: Apache-2.0 */
#include "core/config_read.h"

#include "core/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIST_MAX 4096

epo_status config_fail(const struct reader *reader, const config_setting_t *setting,
                       const char *format, ...) {
    char text[EPO_ERROR_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return epo_fail(EPO_E_ARG, "%s:%u: %s", reader->path,
                    (unsigned)config_setting_source_line(setting), text);
}

static const char *name_of(const config_setting_t *setting) {
    const char *name = config_setting_name(setting);
    while (name == NULL && (setting = config_setting_parent(setting)) != NULL)
        name = config_setting_name(setting);
    return name != NULL ? name : "the file";
}

static epo_status unknown_key(const struct reader *reader, const config_setting_t *setting,
                              const struct config_key *keys) {
    struct epo_text allowed = EPO_TEXT_INIT;
    for (int i = 0; keys[i].name != NULL; i++)
        epo_text_format(&allowed, "%s%s", i > 0 ? ", " : "", keys[i].name);
    epo_status status =
        config_fail(reader, setting, "unknown key \"%s\", allowed here: %s",
                    config_setting_name(setting), allowed.failed ? "-" : allowed.data);
    epo_text_free(&allowed);
    return status;
}

epo_status config_read_group(const struct reader *reader, const config_setting_t *group,
                             const struct config_key *keys, void *base) {
    if (!config_setting_is_group(group))
        return config_fail(reader, group, "%s: a group is expected: { key = value; ... }",
                           name_of(group));
    for (int i = 0; i < config_setting_length(group); i++) {
        const config_setting_t *setting = config_setting_get_elem(group, (unsigned)i);
        const struct config_key *key = keys;
        while (key->name != NULL && strcmp(key->name, config_setting_name(setting)) != 0)
            key++;
        if (key->name == NULL)
            return unknown_key(reader, setting, keys);
        epo_status status = key->parse(reader, setting, (char *)base + key->offset);
        if (status != EPO_OK)
            return status;
    }
    return EPO_OK;
}

epo_status config_read_list(const struct reader *reader, const config_setting_t *list, size_t size,
                            config_parser *parse, void **items, int *count) {
    if (!config_setting_is_list(list))
        return config_fail(reader, list, "%s: a list is expected: ( { ... }, { ... } )",
                           name_of(list));
    int length = config_setting_length(list);
    if (length > LIST_MAX)
        return config_fail(reader, list, "%s: %d entries, allowed at most %d", name_of(list),
                           length, LIST_MAX);
    *items = calloc((size_t)length + 1, size);
    if (*items == NULL)
        return epo_fail(EPO_E_NOMEM, "%s: no memory for %d entries", reader->path, length);
    for (int i = 0; i < length; i++) {
        *count = i + 1;
        epo_status status = parse(reader, config_setting_get_elem(list, (unsigned)i),
                                  (char *)*items + (size_t)i * size);
        if (status != EPO_OK)
            return status;
    }
    return EPO_OK;
}

epo_status config_read_text(const struct reader *reader, const config_setting_t *setting,
                            void *field) {
    const char *text = config_setting_get_string(setting);
    if (text == NULL || text[0] == '\0' || !epo_text_is_clean(text))
        return config_fail(reader, setting,
                           "%s: a non-empty string of printable ASCII is expected, in quotes",
                           name_of(setting));
    char **target = field;
    *target = strdup(text);
    return *target != NULL ? EPO_OK : epo_fail(EPO_E_NOMEM, "%s: no memory", reader->path);
}

epo_status config_read_bool(const struct reader *reader, const config_setting_t *setting,
                            void *field) {
    if (config_setting_type(setting) != CONFIG_TYPE_BOOL)
        return config_fail(reader, setting, "%s: allowed are true and false", name_of(setting));
    *(bool *)field = config_setting_get_bool(setting) != 0;
    return EPO_OK;
}

epo_status config_read_int(const struct reader *reader, const config_setting_t *setting, int least,
                           int most, int *value) {
    if (config_setting_type(setting) != CONFIG_TYPE_INT)
        return config_fail(reader, setting, "%s: a number is expected, allowed %d to %d",
                           name_of(setting), least, most);
    int got = config_setting_get_int(setting);
    if (got < least || got > most)
        return config_fail(reader, setting, "%s: found %d, allowed %d to %d", name_of(setting), got,
                           least, most);
    *value = got;
    return EPO_OK;
}

epo_status config_read_word(const struct reader *reader, const config_setting_t *setting,
                            const char *const *words, int *value) {
    const char *text = config_setting_get_string(setting);
    struct epo_text allowed = EPO_TEXT_INIT;
    for (int i = 0; words[i] != NULL; i++) {
        if (text != NULL && strcmp(words[i], text) == 0) {
            *value = i;
            epo_text_free(&allowed);
            return EPO_OK;
        }
        epo_text_format(&allowed, "%s\"%s\"", i > 0 ? ", " : "", words[i]);
    }
    epo_status status =
        config_fail(reader, setting, "%s: found %s%.64s%s, allowed %s", name_of(setting),
                    text != NULL ? "\"" : "", text != NULL ? text : "no string",
                    text != NULL ? "\"" : "", allowed.failed ? "-" : allowed.data);
    epo_text_free(&allowed);
    return status;
}

static epo_status read_option(const struct reader *reader, const config_setting_t *setting,
                              epo_option_id id, int *value) {
    return config_read_word(reader, setting, epo_options[id].values, value);
}

epo_status config_read_overlap(const struct reader *reader, const config_setting_t *setting,
                               void *field) {
    return read_option(reader, setting, EPO_OPT_OVERLAP, field);
}

epo_status config_read_dispatcher(const struct reader *reader, const config_setting_t *setting,
                                  void *field) {
    return read_option(reader, setting, EPO_OPT_DISPATCHER, field);
}

epo_status config_read_delay_wgrad(const struct reader *reader, const config_setting_t *setting,
                                   void *field) {
    bool delayed = false;
    epo_status status = config_read_bool(reader, setting, &delayed);
    if (status == EPO_OK)
        *(int *)field = delayed ? EPO_WGRAD_DELAYED : EPO_WGRAD_INLINE;
    return status;
}

/* "on" or "off". */
epo_status config_read_switch(const struct reader *reader, const config_setting_t *setting,
                              void *field) {
    static const char *const words[] = {"off", "on", NULL};
    return config_read_word(reader, setting, words, field);
}

/* A single value counts as a list of one. */
static int element_count(const config_setting_t *setting) {
    return config_setting_is_scalar(setting) ? 1 : config_setting_length(setting);
}

static const config_setting_t *element(const config_setting_t *setting, int i) {
    return config_setting_is_scalar(setting) ? setting
                                             : config_setting_get_elem(setting, (unsigned)i);
}

static epo_status check_length(const struct reader *reader, const config_setting_t *setting) {
    int count = config_setting_is_group(setting) ? 0 : element_count(setting);
    if (count >= 1 && count <= LIST_MAX)
        return EPO_OK;
    return config_fail(reader, setting, "%s: one value or a list of 1 to %d is expected",
                       name_of(setting), LIST_MAX);
}

epo_status config_read_words(const struct reader *reader, const config_setting_t *setting,
                             void *field) {
    struct epo_names *words = field;
    epo_status status = check_length(reader, setting);
    if (status != EPO_OK)
        return status;
    int count = element_count(setting);
    words->items = calloc((size_t)count, sizeof *words->items);
    if (words->items == NULL)
        return epo_fail(EPO_E_NOMEM, "%s: no memory", reader->path);
    for (int i = 0; i < count && status == EPO_OK; i++) {
        words->count = i + 1;
        status = config_read_text(reader, element(setting, i), &words->items[i]);
    }
    return status;
}

epo_status config_read_ids(const struct reader *reader, const config_setting_t *setting,
                           void *field) {
    struct epo_ids *ids = field;
    epo_status status = check_length(reader, setting);
    if (status != EPO_OK)
        return status;
    int count = element_count(setting);
    ids->items = calloc((size_t)count, sizeof *ids->items);
    if (ids->items == NULL)
        return epo_fail(EPO_E_NOMEM, "%s: no memory", reader->path);
    for (int i = 0; i < count; i++) {
        const config_setting_t *one = element(setting, i);
        int type = config_setting_type(one);
        long long id = type == CONFIG_TYPE_INT     ? config_setting_get_int(one)
                       : type == CONFIG_TYPE_INT64 ? config_setting_get_int64(one)
                                                   : -1;
        if (id < 0 || id > UINT32_MAX - 1LL)
            return config_fail(reader, one,
                               "%s: a numeric id is expected (the nodes look up no names); "
                               "\"id NAME\" or \"getent group NAME\" shows it",
                               name_of(setting));
        ids->items[i] = (uint32_t)id;
        ids->count = i + 1;
    }
    return EPO_OK;
}

void config_words_clear(struct epo_names *words) {
    for (int i = 0; i < words->count; i++)
        free(words->items[i]);
    free(words->items);
    *words = (struct epo_names){NULL, 0};
}
