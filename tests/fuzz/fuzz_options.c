/* SPDX-License-Identifier: Apache-2.0
 *
 * What users and outer steps leave in the environment, one word a line: values of the
 * options, lists for the loader, records of what was set, lists of nodes.
 */
#include "fuzz.h"

#include "core/env_list.h"
#include "core/env_record.h"
#include "core/hostlist.h"
#include "core/options.h"

static void parse_options(const char *word) {
    for (int id = 0; id < EPO_OPT_COUNT; id++) {
        int value = -7;
        epo_status status = epo_option_parse((epo_option_id)id, word, "--fuzz", &value);
        if ((status == EPO_OK) == (value == -7) ||
            (status == EPO_OK && epo_option_word((epo_option_id)id, value)[0] == '-'))
            abort();
    }
}

/* Put in and taken out again, it is not there; the others are. */
static void edit_list(const char *list, const char *item) {
    char *with = NULL, *without = NULL;
    if (!epo_env_list_can_hold(item))
        return;
    if (epo_env_list_append(list, item, &with) != EPO_OK || !epo_env_list_has(with, item) ||
        strstr(with, "::") != NULL || epo_env_list_remove(with, item, &without) != EPO_OK ||
        epo_env_list_has(without, item))
        abort();
    free(with);
    free(without);
}

/* What can be read is written and read again as the same. */
static void read_record(const char *word) {
    struct epo_env_record record = EPO_ENV_RECORD_INIT, again = EPO_ENV_RECORD_INIT;
    char *text = NULL;
    if (epo_env_record_read(word, &record) != EPO_OK) {
        if (record.count != 0)
            abort();
        return;
    }
    if (epo_env_record_write(&record, &text) != EPO_OK ||
        epo_env_record_read(text, &again) != EPO_OK || again.count != record.count)
        abort();
    for (int i = 0; i < record.count; i++)
        if (strcmp(record.entries[i].name, again.entries[i].name) != 0 ||
            strcmp(record.entries[i].value, again.entries[i].value) != 0)
            abort();
    free(text);
    epo_env_record_clear(&record);
    epo_env_record_clear(&again);
}

typedef struct visit {
    const char *list;
    int left;
} visit;

static bool must_have(const char *node, void *context) {
    visit *v = context;
    if (!epo_hostlist_has(v->list, node))
        abort();
    return --v->left > 0;
}

static void list_nodes(const char *word) {
    visit v = {word, 40};
    if (epo_hostlist_valid(word))
        (void)epo_hostlist_each(word, must_have, &v);
    else if (epo_hostlist_each(word, must_have, &v))
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *text = malloc(size + 1), *rest = text;
    const char *before = "";
    memcpy(text, data, size);
    text[size] = '\0';
    for (char *line; (line = strsep(&rest, "\n")) != NULL; before = line) {
        parse_options(line);
        edit_list(before, line);
        read_record(line);
        list_nodes(line);
    }
    free(text);
    return 0;
}
