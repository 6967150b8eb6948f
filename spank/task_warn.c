/* SPDX-License-Identifier: Apache-2.0 */
#include "task.h"

#include "core/facts.h"
#include "rules/rules.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ENV "env."

/* What no framework's rule speaks of. */
static const struct {
    const char *name, *value, *harm;
} harmful[] = {
    {"NCCL_P2P_DISABLE", "1", "copies between GPUs go through host memory"},
    {"TORCH_NCCL_BLOCKING_WAIT", "1", "the host waits for every collective"},
    {"NCCL_BLOCKING_WAIT", "1", "the host waits for every collective"},
};

/* The next variable that a condition reads ("env.NAME", but not "script.env.NAME"), at or after
 * `*at`, which moves behind it. */
static bool next_variable(const char **at, char *key, size_t room) {
    const char *found = *at;
    while ((found = strstr(found, ENV)) != NULL) {
        const char *name = found + sizeof ENV - 1;
        size_t length =
            strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_0123456789");
        bool ours = found == *at || (found[-1] != '.' && found[-1] != '_');
        found = *at = name + length;
        if (ours && length > 0 && length + sizeof ENV <= room) {
            snprintf(key, room, ENV "%.*s", (int)length, name);
            return true;
        }
    }
    return false;
}

/* The variables that the rule reads, as the task has them. */
static epo_status gather(struct ep_plugin *plugin, spank_t spank, const epo_rule *rule,
                         epo_facts *facts) {
    epo_status status = EPO_OK;
    const char *at = rule->condition;
    char key[128];
    while (status == EPO_OK && next_variable(&at, key, sizeof key)) {
        char *value = plugin->api->task_getenv(spank, key + sizeof ENV - 1);
        status = value != NULL ? epo_facts_set_text(facts, key, value, "the environment")
                               : epo_facts_set(facts, key, NULL, "the environment");
        free(value);
    }
    return status;
}

/* Rules that need to know more than variables stay undecided, and unsaid. */
static void warn_by_rules(struct ep_plugin *plugin, spank_t spank, epo_facts *facts) {
    for (size_t i = 0; i < epo_rules_count(); i++) {
        epo_rule_verdict verdict;
        const epo_rule *rule = epo_rules_at(i);
        if (strstr(rule->condition, ENV) == NULL || strcmp(rule->needed, "-") == 0 ||
            gather(plugin, spank, rule, facts) != EPO_OK ||
            epo_rules_evaluate(rule, facts, &verdict) != EPO_OK)
            continue;
        if (verdict.outcome == EPO_RULE_VIOLATED && verdict.severity >= EPO_SEVERITY_WARN)
            wrap_format(plugin->api->task_say,
                        "ep-overlap: warning %s: your value is kept, but overlap needs %s: %s",
                        rule->id, rule->needed, rule->remedy);
    }
}

void ep_task_warn(struct ep_plugin *plugin, spank_t spank) {
    for (size_t i = 0; i < sizeof harmful / sizeof harmful[0]; i++) {
        char *value = plugin->api->task_getenv(spank, harmful[i].name);
        if (value != NULL && strcmp(value, harmful[i].value) == 0)
            wrap_format(plugin->api->task_say,
                        "ep-overlap: warning: your %s=%s is kept, but %s: unset it",
                        harmful[i].name, value, harmful[i].harm);
        free(value);
    }
    epo_facts *facts = ep_task_facts(plugin, spank);
    if (facts != NULL)
        warn_by_rules(plugin, spank, facts);
    epo_facts_destroy(facts);
}
