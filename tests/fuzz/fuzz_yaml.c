/* SPDX-License-Identifier: Apache-2.0
 *
 * Bridge's YAML, and recipes.
 */
#include "fuzz.h"

#include "input.h"
#include "rules/command.h"
#include "rules/settings.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char path[64];
    int fd = fuzz_file(data, size, path, sizeof path);
    epo_facts *facts = epo_facts_create();
    epo_recipe recipe = {0};
    epo_command command;
    size_t settings;
    if (fd >= 0 && epo_input_yaml(path, "fuzz.yaml", facts, &settings, &recipe) == EPO_OK &&
        epo_command_read(&recipe.words, "fuzz.yaml", false, facts, &command) == EPO_OK)
        (void)epo_settings_derive(facts);
    epo_words_free(&recipe.words);
    epo_facts_destroy(facts);
    if (fd >= 0)
        close(fd);
    return 0;
}
