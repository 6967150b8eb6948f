/* SPDX-License-Identifier: Apache-2.0
 *
 * check.c - what this node and the task's arguments say against the decision.  The
 * first task of a node asks, the others read its answer.
 */
#include "task.h"

#include "core/probe_run.h"
#include "rules/node.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define VARIABLES_MAX 256

void ep_check_open(struct ep_plugin *plugin) {
    const struct epo_config *config = plugin->config;
    const char *path = config != NULL && config->probe_path != NULL ? config->probe_path : EP_PROBE;
    int nvml = -1;
    bool absent = false;
    plugin->probe = -1;
    /* As the node sees them: a container would hide owners and folders. */
    if (config != NULL && config->checks.nvml_path != NULL) {
        if (epo_trust_open(config->checks.nvml_path, &plugin->trust, &nvml, &absent) != EPO_OK) {
            snprintf(plugin->probe_error, sizeof plugin->probe_error, "checks.nvml_path: %.900s",
                     epo_fail_text());
            return;
        }
        close(nvml);
    }
    if (epo_trust_open(path, &plugin->trust, &plugin->probe, &absent) != EPO_OK)
        snprintf(plugin->probe_error, sizeof plugin->probe_error, "%s", epo_fail_text());
}

void ep_check_close(struct ep_plugin *plugin) {
    if (plugin->probe > 0) /* a context that never began is all 0 */
        close(plugin->probe);
    plugin->probe = -1;
}

/* What task_getenv gave, to be freed together. */
struct variables {
    struct ep_plugin *plugin;
    spank_t spank;
    char *got[VARIABLES_MAX];
    int count;
};

static const char *task_variable(void *context, const char *name) {
    struct variables *variables = context;
    if (variables->count == VARIABLES_MAX)
        return NULL;
    char *value = variables->plugin->api->task_getenv(variables->spank, name);
    if (value != NULL)
        variables->got[variables->count++] = value;
    return value;
}

static void probe(struct variables *variables, char *const *arguments, int count,
                  epo_facts *facts) {
    struct ep_plugin *plugin = variables->plugin;
    const struct epo_checks *checks = plugin->config != NULL ? &plugin->config->checks : NULL;
    const struct epo_probe_request request = {
        .program = plugin->probe,
        .nvml_path = checks != NULL ? checks->nvml_path : NULL,
        .node = plugin->api->own_getenv("SLURMD_NODENAME"),
        .variable = task_variable,
        .context = variables,
        .arguments = arguments,
        .argument_count = count,
        .timeout_ms = checks != NULL ? checks->timeout_ms : EP_CHECK_MS};
    if (plugin->probe >= 0 && plugin->api->probe(&request, facts) != EPO_OK)
        snprintf(plugin->probe_error, sizeof plugin->probe_error, "%s", epo_fail_text());
    if (plugin->probe_error[0] != '\0')
        (void)epo_facts_set_unknown(facts, EP_CHECK_STOPPED, plugin->probe_error, "the probe");
}

/* ep-overlap exec adds what is missing, and refuses what contradicts. */
static bool is_fixed(char *const *arguments, int count) {
    const char *slash = count > 1 ? strrchr(arguments[0], '/') : NULL;
    const char *base = count > 1 ? (slash != NULL ? slash + 1 : arguments[0]) : "";
    return strcmp(base, "ep-overlap") != 0 || strcmp(arguments[1], "exec") != 0;
}

static epo_status ask(struct variables *variables, bool gpus, epo_facts *facts,
                      epo_findings *findings) {
    struct ep_plugin *plugin = variables->plugin;
    const struct epo_decision *decision = &plugin->decision;
    const struct epo_choice *choice = decision->choice;
    char **arguments = NULL;
    int count = 0;
    if (plugin->api->get_arguments(variables->spank, &count, &arguments) != 0)
        count = 0;
    epo_node_question question = {.checks = plugin->config != NULL ? &plugin->config->checks : NULL,
                                  .gpu_class = decision->automatic ? plugin->gpu_class : NULL,
                                  .dispatcher = choice[EPO_OPT_DISPATCHER].value,
                                  .dispatcher_given =
                                      choice[EPO_OPT_DISPATCHER].source >= EPO_FROM_ENVIRONMENT,
                                  .delayed = choice[EPO_OPT_DELAY_WGRAD].value == EPO_WGRAD_DELAYED,
                                  .automatic = decision->automatic,
                                  .holds_gpus = gpus,
                                  .arguments_fixed = is_fixed(arguments, count)};
    epo_status status = epo_node_arguments(arguments, count, facts, &question.framework);
    if (status != EPO_OK || (!gpus && question.framework == EPO_FRAMEWORK_UNKNOWN))
        return status; /* the host engine, and nothing that rules speak of */
    probe(variables, arguments, count, facts);
    status = epo_node_environment(facts, task_variable, variables);
    return status == EPO_OK ? epo_node_judge(&question, facts, findings) : status;
}

/* Lines of one severity; those about the user's variables are task_warn.c's. */
static void write_lines(const epo_findings *findings, epo_severity severity, char *text,
                        size_t room) {
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < findings->count; i++) {
        char line[EPO_ERROR_MAX];
        const epo_finding *finding = &findings->item[i];
        const epo_rule *rule = epo_rules_find(finding->id);
        if (finding->severity != severity || (severity == EPO_SEVERITY_WARN && rule != NULL &&
                                              strstr(rule->condition, "env.") != NULL))
            continue;
        epo_finding_text(finding, line, sizeof line);
        epo_text_clean(line);
        int need = snprintf(text + used, room - used, "%s%s", used > 0 ? "\n" : "", line);
        if (need < 0 || (size_t)need >= room - used) {
            text[used] = '\0';
            return;
        }
        used += (size_t)need;
    }
}

static void make_verdict(struct ep_plugin *plugin, spank_t spank, bool gpus,
                         struct ep_verdict *verdict) {
    struct variables variables = {.plugin = plugin, .spank = spank};
    epo_facts *facts = epo_facts_create();
    epo_findings *findings = calloc(1, sizeof *findings);
    epo_status status = facts == NULL || findings == NULL
                            ? epo_fail(EPO_E_NOMEM, "no memory to check this node")
                            : ask(&variables, gpus, facts, findings);
    verdict->errors[0] = verdict->warnings[0] = '\0';
    verdict->here = false;
    if (status == EPO_OK) {
        write_lines(findings, EPO_SEVERITY_ERROR, verdict->errors, sizeof verdict->errors);
        write_lines(findings, EPO_SEVERITY_WARN, verdict->warnings, sizeof verdict->warnings);
        for (size_t i = 0; i < findings->count; i++)
            verdict->here |=
                findings->item[i].here && findings->item[i].severity == EPO_SEVERITY_ERROR;
    } else {
        snprintf(verdict->warnings, sizeof verdict->warnings, "not checked: %s", epo_fail_text());
    }
    for (int i = 0; i < variables.count; i++)
        free(variables.got[i]);
    free(findings);
    epo_facts_destroy(facts);
    verdict->made = true;
}

const struct ep_verdict *ep_check_node(struct ep_plugin *plugin, spank_t spank, bool gpus) {
    struct ep_shared *shared = plugin->shared;
    bool locked = shared != NULL && ep_shared_lock(shared);
    struct ep_verdict *verdict = locked ? &shared->verdict : &plugin->verdict;
    if (!verdict->made)
        make_verdict(plugin, spank, gpus, verdict);
    if (locked)
        ep_shared_unlock(shared);
    return verdict;
}
