/* SPDX-License-Identifier: Apache-2.0
 *
 * Values, versions and conditions: the first line is a condition over the others.
 */
#include "fuzz.h"

#include "core/facts.h"
#include "core/version.h"
#include "rules/condition.h"
#include "trace/kernel_class.h"

static void compare(const char *a, const char *b) {
    epo_pep440 x, y;
    if (epo_pep440_parse(a, &x) != EPO_OK || epo_pep440_parse(b, &y) != EPO_OK)
        return;
    int there = epo_pep440_compare(&x, &y), back = epo_pep440_compare(&y, &x);
    if ((there > 0) != (back < 0) || (there == 0) != (back == 0) || epo_pep440_compare(&x, &x) != 0)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *text = malloc(size + 1), *rest = text;
    epo_facts *facts = epo_facts_create();
    epo_condition_result result;
    memcpy(text, data, size);
    text[size] = '\0';
    char *condition = strsep(&rest, "\n"), *before = condition;
    for (char *line; (line = strsep(&rest, "\n")) != NULL;) {
        char *equals = strchr(line, '=');
        compare(before, line);
        before = line;
        (void)epo_kernel_classify(NULL, line);
        if (equals != NULL) {
            *equals = '\0';
            (void)epo_facts_set(facts, line, equals + 1, "fuzz");
            compare(line, equals + 1);
        }
    }
    (void)epo_condition_evaluate(condition, facts, &result);
    epo_facts_destroy(facts);
    free(text);
    return 0;
}
