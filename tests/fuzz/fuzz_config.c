/* SPDX-License-Identifier: Apache-2.0
 *
 * The site's configuration, and what is decided by it.
 */
#include "fuzz.h"

#include "core/config.h"
#include "core/hostlist.h"

/* libconfig loses the beginning of a string that never ends. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) { return "leak:libconfig.so"; }

static void use(const struct epo_config *config) {
    for (int i = 0; i < config->rule_count; i++)
        if (config->rules[i].node != NULL) {
            if (!epo_hostlist_valid(config->rules[i].node))
                abort(); /* an expression that nobody can read must have been refused */
            (void)epo_hostlist_has(config->rules[i].node, "n12");
        }
    for (int id = 0; id < EPO_OPT_COUNT; id++)
        if (epo_option_word((epo_option_id)id, config->defaults[id])[0] == '-' &&
            config->defaults[id] != EPO_UNSET)
            abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *text = malloc(size + 1);
    struct epo_config *config = NULL;
    memcpy(text, data, size);
    text[size] = '\0';
    epo_status status = epo_config_parse(text, "fuzz", &config);
    if (status == EPO_OK)
        use(config);
    else if (config != NULL || (status == EPO_E_ARG && strncmp(epo_fail_text(), "fuzz", 4) != 0))
        abort(); /* the file is named, nothing is given out */
    epo_config_destroy(config);
    free(text);
    return 0;
}
