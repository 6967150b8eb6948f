/* SPDX-License-Identifier: Apache-2.0 */
#include "task.h"

#include "core/env_list.h"
#include "core/env_record.h"
#include "core/names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PRELOAD "LD_PRELOAD"

static void put(struct ep_plugin *plugin, spank_t spank, const char *name, const char *value) {
    if (value != NULL)
        plugin->api->task_setenv(spank, name, value);
    else
        plugin->api->task_unsetenv(spank, name);
}

/* The user changed the list since we set it: only what we added goes. */
static void take_out_ours(struct ep_plugin *plugin, spank_t spank,
                          const struct epo_env_entry *entry, const char *now) {
    char *rest = strdup(now), *set = strdup(entry->value), *at = NULL;
    bool changed = false;
    for (char *part = set != NULL ? strtok_r(set, ":", &at) : NULL; part != NULL && rest != NULL;
         part = strtok_r(NULL, ":", &at)) {
        char *without = NULL;
        bool before = entry->before != NULL && epo_env_list_has(entry->before, part);
        if (before || !epo_env_list_has(rest, part) ||
            epo_env_list_remove(rest, part, &without) != EPO_OK)
            continue;
        free(rest);
        rest = without;
        changed = true;
    }
    if (changed)
        put(plugin, spank, PRELOAD, rest[0] != '\0' ? rest : NULL);
    free(rest);
    free(set);
}

static void restore_one(struct ep_plugin *plugin, spank_t spank,
                        const struct epo_env_entry *entry) {
    char *now = plugin->api->task_getenv(spank, entry->name);
    if (now != NULL && strcmp(now, entry->value) == 0)
        put(plugin, spank, entry->name, entry->before);
    else if (now != NULL && strcmp(entry->name, PRELOAD) == 0)
        take_out_ours(plugin, spank, entry, now);
    free(now);
}

void ep_task_restore(struct ep_plugin *plugin, spank_t spank) {
    struct epo_env_record record = EPO_ENV_RECORD_INIT;
    char *text = plugin->api->task_getenv(spank, EPO_OUT_SET);
    if (text != NULL && epo_env_record_read(text, &record) == EPO_OK) {
        for (int i = record.count - 1; i >= 0; i--)
            restore_one(plugin, spank, &record.entries[i]);
        plugin->api->task_unsetenv(spank, EPO_OUT_SET);
    }
    epo_env_record_clear(&record);
    free(text);
}

void ep_writer_set(struct ep_writer *writer, const char *name, const char *value) {
    if (writer->status != EPO_OK)
        return;
    const struct wrap_spank *api = writer->plugin->api;
    char *before = api->task_getenv(writer->spank, name);
    writer->status = epo_env_record_add(&writer->record, name, value, before);
    free(before);
    if (writer->status == EPO_OK && api->task_setenv(writer->spank, name, value) != 0)
        writer->status = epo_fail(EPO_E_SYSTEM, "%s cannot be set in the task's environment", name);
}

void ep_writer_preset(struct ep_writer *writer, const char *name, const char *value) {
    char *now = writer->plugin->api->task_getenv(writer->spank, name);
    if (now == NULL) {
        ep_writer_set(writer, name, value);
        epo_text_format(&writer->told, " %s=%s", name, value);
    }
    free(now);
}

/* The interceptor (NULL: none) stands before the library: both come after the user's. */
static void set_preload(struct ep_writer *writer, const char *interceptor, const char *library) {
    char *before = writer->plugin->api->task_getenv(writer->spank, PRELOAD);
    char *first = NULL, *list = NULL;
    if (writer->status == EPO_OK && interceptor != NULL)
        writer->status = epo_env_list_append(before, interceptor, &first);
    if (writer->status == EPO_OK)
        writer->status = epo_env_list_append(first != NULL ? first : before, library, &list);
    if (writer->status == EPO_OK)
        ep_writer_set(writer, PRELOAD, list);
    free(list);
    free(first);
    free(before);
}

/* Which of it somebody asked for. */
static void set_given(struct ep_writer *writer) {
    char text[128] = "";
    for (int id = 0; id < EPO_OPT_COUNT; id++)
        if (ep_choice_given(writer->plugin, (epo_option_id)id))
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s",
                     text[0] != '\0' ? " " : "", epo_options[id].key);
    if (writer->plugin->decision.automatic)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%sauto",
                 text[0] != '\0' ? " " : "");
    ep_writer_set(writer, EPO_OUT_GIVEN, text);
}

static void set_choices(struct ep_writer *writer, const struct ep_intercept *intercept) {
    const struct epo_decision *decision = &writer->plugin->decision;
    int dispatcher = decision->choice[EPO_OPT_DISPATCHER].value;
    bool delayed = decision->choice[EPO_OPT_DELAY_WGRAD].value == EPO_WGRAD_DELAYED;
    const char *backend = epo_dispatcher_backend(dispatcher);
    ep_writer_set(writer, EPO_OUT_DISPATCHER, epo_dispatcher_kind(dispatcher));
    if (backend != NULL)
        ep_writer_set(writer, EPO_OUT_FLEX_BACKEND, backend);
    ep_writer_set(writer, EPO_OUT_DELAY_WGRAD, delayed ? "1" : "0");
    set_given(writer);
    epo_facts *facts = ep_task_facts(writer->plugin, writer->spank);
    if (facts == NULL && writer->status == EPO_OK)
        writer->status = epo_fail(EPO_E_NOMEM, "the task's arguments cannot be read");
    if (facts != NULL) {
        ep_task_arguments(writer, facts);
        ep_task_variables(writer, facts, intercept);
    }
    epo_facts_destroy(facts);
}

static void set_libraries(struct ep_writer *writer, const char *preload,
                          const struct ep_intercept *intercept) {
    if (preload[0] == '\0')
        return;
    set_preload(writer, intercept->library, preload);
    if (intercept->library != NULL)
        ep_writer_preset(writer, EPO_OUT_INTERPOSE, intercept->mode);
    if (intercept->library != NULL && intercept->record)
        ep_writer_preset(writer, EPO_OUT_RECORD, "1");
}

epo_status ep_task_set(struct ep_plugin *plugin, spank_t spank, const char *preload,
                       const struct ep_intercept *intercept, char **told) {
    struct ep_writer writer = {plugin, spank, EPO_ENV_RECORD_INIT, EPO_TEXT_INIT, EPO_OK};
    char *text = NULL;
    ep_writer_set(&writer, EPO_OUT_DECISION, plugin->decision.on ? "on" : "off");
    ep_writer_set(&writer, EPO_OUT_REASON, plugin->decision.reason);
    if (plugin->decision.on)
        set_choices(&writer, intercept);
    set_libraries(&writer, preload, intercept);
    if (writer.status == EPO_OK)
        writer.status = epo_env_record_write(&writer.record, &text);
    if (writer.status == EPO_OK && plugin->api->task_setenv(spank, EPO_OUT_SET, text) != 0)
        writer.status = epo_fail(EPO_E_SYSTEM, EPO_OUT_SET " cannot be set in the environment");
    if (writer.status == EPO_OK)
        *told = epo_text_take(&writer.told);
    free(text);
    epo_text_free(&writer.told);
    epo_env_record_clear(&writer.record);
    return writer.status;
}
