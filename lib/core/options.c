/* SPDX-License-Identifier: Apache-2.0 */
#include "core/options.h"

#include "core/names.h"
#include "core/text.h"

#include <stddef.h>
#include <string.h>

static const char *const overlap_values[] = {"off", "on", "auto", NULL};
static const char *const dispatcher_values[] = {"alltoall",      "flex",        "flex:deepep",
                                                "flex:hybridep", "flex:ncclep", NULL};
static const char *const wgrad_values[] = {"off", "on", NULL};
static const char *const wgrad_twins[] = {"0", "1", NULL};

const struct epo_option epo_options[EPO_OPT_COUNT] = {
    [EPO_OPT_OVERLAP] = {"ep-overlap", "overlap", EPO_IN_OVERLAP, EPO_OUT_DECISION, overlap_values,
                         NULL, EPO_OVERLAP_OFF, "on|off|auto",
                         "[ep] overlap expert-parallel communication"},
    [EPO_OPT_DISPATCHER] = {"ep-dispatcher", "dispatcher", EPO_IN_DISPATCHER, EPO_OUT_DISPATCHER,
                            dispatcher_values, NULL, EPO_CHOICE_ALLTOALL, "name",
                            "[ep] alltoall, flex or flex:BACKEND"},
    [EPO_OPT_DELAY_WGRAD] = {"delay-wgrad", "delay_wgrad", EPO_IN_DELAY_WGRAD, EPO_OUT_DELAY_WGRAD,
                             wgrad_values, wgrad_twins, EPO_WGRAD_INLINE, NULL,
                             "[ep] delay expert weight gradients"},
};

static int find_word(const char *const *words, const char *text) {
    for (int i = 0; words != NULL && words[i] != NULL; i++)
        if (strcmp(words[i], text) == 0)
            return i;
    return EPO_UNSET;
}

epo_status epo_option_parse(epo_option_id id, const char *text, const char *where, int *value) {
    const struct epo_option *option = &epo_options[id];
    int found = find_word(option->values, text);
    if (found == EPO_UNSET)
        found = find_word(option->twins, text);
    if (found != EPO_UNSET) {
        *value = found;
        return EPO_OK;
    }
    struct epo_text allowed = EPO_TEXT_INIT;
    for (int i = 0; option->values[i] != NULL; i++)
        epo_text_format(&allowed, "%s%s", i > 0 ? ", " : "", option->values[i]);
    epo_status status =
        epo_fail(EPO_E_ARG, "%s: found \"%.64s\"%s, allowed %s; use one of these", where, text,
                 strlen(text) > 64 ? "..." : "", allowed.failed ? "-" : allowed.data);
    epo_text_free(&allowed);
    return status;
}

const char *epo_option_word(epo_option_id id, int value) {
    for (int i = 0; epo_options[id].values[i] != NULL; i++)
        if (i == value)
            return epo_options[id].values[i];
    return "-";
}

const char *epo_dispatcher_kind(int choice) {
    return choice == EPO_CHOICE_ALLTOALL ? "alltoall" : "flex";
}

const char *epo_dispatcher_backend(int choice) {
    const char *colon = strchr(epo_option_word(EPO_OPT_DISPATCHER, choice), ':');
    return colon != NULL ? colon + 1 : NULL;
}
