/* SPDX-License-Identifier: Apache-2.0
 *
 * Job scripts and commands, their settings, every rule over them.
 */
#include "fuzz.h"

#include "rules/command.h"
#include "rules/complete.h"
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

/* As a vector of one word a line, or one text of a shell. */
static void complete(char *const *vector, int count) {
    static const epo_wish wish = {.arguments = "--overlap-moe-expert-parallel-comm --a 'b c' d=e"};
    epo_program program;
    epo_completion completion;
    char **made = NULL;
    if (epo_program_read(vector, count, &program) == EPO_OK &&
        program.kind == EPO_PROGRAM_FRAMEWORK) {
        if (epo_complete(&program, &wish, &completion) != EPO_OK ||
            epo_complete_vector(vector, count, &program, &completion, &made) != EPO_OK)
            abort();
        epo_vector_free(made);
        epo_completion_free(&completion);
    }
    epo_program_free(&program);
}

static void start(const uint8_t *data, size_t size) {
    char *text = strndup((const char *)data, size), *lines = strndup((const char *)data, size);
    char *words[64], bash[] = "bash", c[] = "-c", *shell[] = {bash, c, text};
    int count = 0;
    for (char *line = lines, *rest; line != NULL && count < 64; line = rest) {
        rest = strchr(line, '\n');
        if (rest != NULL)
            *rest++ = '\0';
        words[count++] = line;
    }
    complete(words, count);
    complete(shell, 3);
    free(text);
    free(lines);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    epo_words words = {0};
    epo_command command;
    start(data, size);
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
