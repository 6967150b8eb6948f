/* SPDX-License-Identifier: Apache-2.0
 *
 * Job scripts and commands, their settings, every rule over them.
 */
#include "fuzz.h"

#include "rules/command.h"
#include "rules/launch.h"
#include "rules/rules.h"
#include "rules/settings.h"

static void judge(epo_facts *facts) {
    epo_launch_variable variables[EPO_LAUNCH_VARIABLES_MAX];
    char arguments[256];
    size_t count;
    for (size_t i = 0; i < epo_rules_count(); i++) {
        epo_rule_verdict verdict;
        if (epo_rules_evaluate(epo_rules_at(i), facts, &verdict) != EPO_OK)
            abort(); /* the table has no mistakes, whatever the facts are */
    }
    if (epo_launch_environment(facts, variables, &count) != EPO_OK)
        abort();
    epo_launch_arguments(facts, EPO_FRAMEWORK_BRIDGE, arguments, sizeof arguments);
    epo_launch_arguments(facts, EPO_FRAMEWORK_MEGATRON_LM, arguments, sizeof arguments);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    epo_words words = {0};
    epo_command command;
    epo_facts *facts = epo_facts_create();
    if (epo_words_split(&words, (const char *)data, size) == EPO_OK &&
        epo_command_read(&words, "fuzz", true, facts, &command) == EPO_OK &&
        epo_settings_default(facts, EPO_DEFAULTS_MEGATRON_LM) == EPO_OK &&
        epo_settings_derive(facts) == EPO_OK)
        judge(facts);
    epo_words_free(&words);
    epo_facts_destroy(facts);
    return 0;
}
