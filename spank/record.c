/* SPDX-License-Identifier: Apache-2.0 */
#include "record.h"

#include "core/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VERSION = 1, STATE_OFF = 0, STATE_ON, STATE_REFUSED, STATE_PENDING };
enum { AT_VERSION, AT_JOB, AT_STEP, AT_STATE, AT_EXPLICIT, AT_ANY, AT_AUTO, AT_VALUES };
#define AT_SOURCES (AT_VALUES + EPO_OPT_COUNT)
#define NUMBERS (AT_SOURCES + EPO_OPT_COUNT)

void ep_record_write(const struct ep_plugin *plugin, char *text, size_t room) {
    const struct epo_decision *decision = &plugin->decision;
    bool refused = plugin->refusal[0] != '\0';
    int state = refused             ? STATE_REFUSED
                : decision->pending ? STATE_PENDING
                : decision->on      ? STATE_ON
                                    : STATE_OFF;
    const struct epo_choice *choice = decision->choice;
    snprintf(text, room, "%d %lu %lu %d %d %d %d %d %d %d %d %d %d %s", VERSION,
             (unsigned long)plugin->job, (unsigned long)plugin->step, state, decision->explicit_on,
             decision->any_option, decision->automatic, choice[EPO_OPT_OVERLAP].value,
             choice[EPO_OPT_DISPATCHER].value, choice[EPO_OPT_DELAY_WGRAD].value,
             choice[EPO_OPT_OVERLAP].source, choice[EPO_OPT_DISPATCHER].source,
             choice[EPO_OPT_DELAY_WGRAD].source, refused ? plugin->refusal : decision->reason);
    epo_text_clean(text);
}

/* NUMBERS numbers and the rest of the line; NULL when there are fewer. */
static const char *read_numbers(const char *text, unsigned long numbers[NUMBERS]) {
    for (int i = 0; i < NUMBERS; i++) {
        if (*text < '0' || *text > '9')
            return NULL;
        char *end;
        numbers[i] = strtoul(text, &end, 10);
        if (*end != ' ')
            return NULL;
        text = end + 1;
    }
    return text;
}

static bool values_are_valid(const unsigned long numbers[NUMBERS]) {
    for (int id = 0; id < EPO_OPT_COUNT; id++)
        if (numbers[AT_SOURCES + id] > EPO_FROM_LOCK || numbers[AT_VALUES + id] > 8 ||
            strcmp(epo_option_word((epo_option_id)id, (int)numbers[AT_VALUES + id]), "-") == 0)
            return false;
    return numbers[AT_STATE] <= STATE_PENDING && numbers[AT_EXPLICIT] <= 1 &&
           numbers[AT_ANY] <= 1 && numbers[AT_AUTO] <= 1;
}

bool ep_record_read(const char *text, bool shared, struct ep_plugin *plugin) {
    unsigned long numbers[NUMBERS];
    const char *reason = read_numbers(text, numbers);
    if (reason == NULL || numbers[AT_VERSION] != VERSION || !values_are_valid(numbers))
        return false;
    bool ours = numbers[AT_JOB] == plugin->job && numbers[AT_STEP] == plugin->step;
    if (!ours && !(shared && numbers[AT_JOB] == 0))
        return false;
    struct epo_decision *decision = &plugin->decision;
    memset(decision, 0, sizeof *decision);
    decision->on = numbers[AT_STATE] == STATE_ON;
    decision->pending = numbers[AT_STATE] == STATE_PENDING;
    decision->explicit_on = numbers[AT_EXPLICIT] == 1;
    decision->any_option = numbers[AT_ANY] == 1;
    decision->automatic = numbers[AT_AUTO] == 1;
    for (int id = 0; id < EPO_OPT_COUNT; id++)
        decision->choice[id] =
            (struct epo_choice){(int)numbers[AT_VALUES + id], (epo_source)numbers[AT_SOURCES + id]};
    snprintf(decision->reason, sizeof decision->reason, "%s", reason);
    epo_text_clean(decision->reason);
    if (numbers[AT_STATE] == STATE_REFUSED) {
        snprintf(plugin->refusal, sizeof plugin->refusal, "%s", reason);
        epo_text_clean(plugin->refusal);
        plugin->refusal_shared = true;
    }
    return true;
}
