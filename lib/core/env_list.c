/* SPDX-License-Identifier: Apache-2.0 */
#include "core/env_list.h"

#include "core/text.h"

#include <string.h>

#define SEPARATORS ": "

struct part {
    const char *start;
    size_t length;
};

/* The next part at or after `*at`, which moves behind it; false at the end. */
static bool next_part(const char **at, struct part *part) {
    if (*at == NULL)
        return false;
    part->start = *at + strspn(*at, SEPARATORS);
    part->length = strcspn(part->start, SEPARATORS);
    *at = part->start + part->length;
    return part->length > 0;
}

static bool same(const struct part *part, const char *item, size_t length) {
    return part->length == length && memcmp(part->start, item, length) == 0;
}

static bool has(const char *list, const char *end, const char *item, size_t length) {
    struct part part;
    while (next_part(&list, &part))
        if ((end == NULL || part.start < end) && same(&part, item, length))
            return true;
    return false;
}

static void add(struct epo_text *text, const char *start, size_t length) {
    if (text->length > 0)
        epo_text_add(text, ":", 1);
    epo_text_add(text, start, length);
}

/* Copies the parts of `list` that differ from `item`, each once. */
static void copy_others(struct epo_text *text, const char *list, const char *item) {
    const char *at = list;
    struct part part;
    while (next_part(&at, &part))
        if (!same(&part, item, strlen(item)) && !has(list, part.start, part.start, part.length))
            add(text, part.start, part.length);
}

static epo_status take(struct epo_text *text, char **result) {
    char *list = epo_text_take(text);
    if (list == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for an environment list");
    *result = list;
    return EPO_OK;
}

epo_status epo_env_list_append(const char *list, const char *item, char **result) {
    if (!epo_env_list_can_hold(item))
        return epo_fail(EPO_E_ARG, "\"%s\" cannot stand in a list: no blanks or colons", item);
    struct epo_text text = EPO_TEXT_INIT;
    copy_others(&text, list, item);
    add(&text, item, strlen(item));
    return take(&text, result);
}

epo_status epo_env_list_remove(const char *list, const char *item, char **result) {
    struct epo_text text = EPO_TEXT_INIT;
    copy_others(&text, list, item);
    return take(&text, result);
}

bool epo_env_list_has(const char *list, const char *item) {
    return has(list, NULL, item, strlen(item));
}

bool epo_env_list_can_hold(const char *item) {
    return item[0] != '\0' && strpbrk(item, SEPARATORS) == NULL;
}
