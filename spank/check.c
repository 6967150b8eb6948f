/* SPDX-License-Identifier: Apache-2.0
 *
 * check.c - what this node and the task's arguments say against the decision.  The
 * first task of a node asks, the others read its answer.
 */
#include "task.h"

#include "core/probe_run.h"
#include "rules/node.h"
#include "rules/program.h"
#include "rules/settings.h"

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

enum place { EVERYWHERE, HERE, EITHER };

/* Lines of one severity, once each; those about the user's variables are
 * task_warn.c's. */
static void write_lines(const epo_findings *findings, epo_severity severity, enum place place,
                        char *text, size_t room) {
    size_t used = strlen(text);
    for (size_t i = 0; i < findings->count; i++) {
        char line[EPO_ERROR_MAX];
        const epo_finding *finding = &findings->item[i];
        const epo_rule *rule = epo_rules_find(finding->id);
        if (finding->severity != severity ||
            (place != EITHER && finding->here != (place == HERE)) ||
            (severity == EPO_SEVERITY_WARN && rule != NULL &&
             strstr(rule->condition, "env.") != NULL))
            continue;
        epo_finding_text(finding, line, sizeof line);
        epo_text_clean(line);
        if (strstr(text, line) != NULL) /* of another program of the step */
            continue;
        int need = snprintf(text + used, room - used, "%s%s", used > 0 ? "\n" : "", line);
        if (need < 0 || (size_t)need >= room - used) {
            text[used] = '\0';
            return;
        }
        used += (size_t)need;
    }
}

static void take_findings(const epo_findings *findings, struct ep_verdict *verdict) {
    write_lines(findings, EPO_SEVERITY_ERROR, HERE, verdict->errors, sizeof verdict->errors);
    write_lines(findings, EPO_SEVERITY_ERROR, EVERYWHERE, verdict->shared, sizeof verdict->shared);
    write_lines(findings, EPO_SEVERITY_WARN, EITHER, verdict->warnings, sizeof verdict->warnings);
}

/* What a framework's arguments say of overlap itself. */
static void note_overlap(const epo_facts *facts, const epo_program *program, bool automatic,
                         struct ep_verdict *verdict) {
    const epo_fact *overlap = epo_facts_find(facts, "overlap_moe_expert_parallel_comm");
    /* ep-overlap exec adds what is missing, except by `auto`, and refuses what contradicts */
    if ((program->by_exec && !automatic) || epo_fact_is_true(overlap))
        return;
    verdict->lacks = true;
    if (overlap == NULL || overlap->kind == EPO_FACT_UNKNOWN)
        snprintf(verdict->undecided, sizeof verdict->undecided,
                 "\"%.80s\" gets no arguments that say whether it overlaps",
                 program->words.word[0].text);
}

/* What the probe says of GPUs counts for steps that hold some. */
static epo_status forget_gpus(epo_facts *facts) {
    static const char *const keys[] = {"gpu", "gpu_name", "gpu_major", "node.all_gpus_p2p"};
    epo_status status = EPO_OK;
    for (size_t i = 0; i < sizeof keys / sizeof *keys && status == EPO_OK; i++)
        if (epo_facts_find(facts, keys[i]) != NULL)
            status = epo_facts_set_unknown(facts, keys[i], "no GPU is held", "the step");
    return status;
}

/* `node`: with all that is to be found out about this node. */
static epo_status judge(struct variables *variables, const struct ep_vector *vector,
                        const epo_program *program, bool node, bool gpus,
                        struct ep_verdict *verdict) {
    struct ep_plugin *plugin = variables->plugin;
    const struct epo_decision *decision = &plugin->decision;
    epo_node_question question = {.checks = node && plugin->config != NULL ? &plugin->config->checks
                                                                           : NULL,
                                  .gpu_class = decision->automatic ? plugin->gpu_class : NULL,
                                  .site_gpu = plugin->gpu_class,
                                  .dispatcher = decision->choice[EPO_OPT_DISPATCHER].value,
                                  .dispatcher_given = ep_choice_given(plugin, EPO_OPT_DISPATCHER),
                                  .delayed = ep_delay_wanted(plugin),
                                  .automatic = decision->automatic,
                                  .holds_gpus = node && gpus,
                                  .arguments_fixed = !program->by_exec};
    epo_facts *facts = epo_facts_create();
    epo_findings *findings = calloc(1, sizeof *findings);
    epo_status status =
        facts == NULL || findings == NULL
            ? epo_fail(EPO_E_NOMEM, "no memory to check this node")
            : epo_node_arguments(vector->arguments, vector->count, facts, &question.framework);
    if (status == EPO_OK)
        status = epo_settings_derive(facts);
    if (status == EPO_OK && program->kind == EPO_PROGRAM_FRAMEWORK)
        note_overlap(facts, program, decision->automatic, verdict);
    if (status == EPO_OK && node)
        probe(variables, vector->arguments, vector->count, facts);
    if (status == EPO_OK && node && !gpus)
        status = forget_gpus(facts);
    if (status == EPO_OK)
        status = epo_node_environment(facts, task_variable, variables);
    if (status == EPO_OK)
        status = epo_node_judge(&question, facts, findings);
    if (status == EPO_OK)
        take_findings(findings, verdict);
    free(findings);
    epo_facts_destroy(facts);
    return status;
}

/* Our own programs need no interceptor. */
static bool is_ours(const struct ep_vector *vector) {
    const char *name = vector->count > 0 ? vector->arguments[0] : "";
    const char *slash = strrchr(name, '/');
    name = slash != NULL ? slash + 1 : name;
    return strcmp(name, "ep-train") == 0 || strcmp(name, "ep-overlap") == 0;
}

/* The node is looked at for the first program that concerns it; without GPUs and
 * without a framework there is the host engine, and nothing that rules speak of. */
static epo_status ask(struct variables *variables, bool gpus, struct ep_verdict *verdict) {
    static const struct ep_vector none;
    struct ep_programs programs;
    bool looked = false;
    epo_status status = ep_task_programs(variables->plugin, variables->spank, &programs);
    if (status == EPO_OK && programs.unread)
        snprintf(verdict->undecided, sizeof verdict->undecided,
                 "the file of --multi-prog cannot be read to its end");
    for (size_t i = 0; i < programs.count && status == EPO_OK; i++) {
        epo_program program;
        const struct ep_vector *vector = &programs.vectors[i];
        status = epo_program_read(vector->arguments, vector->count, &program);
        if (status == EPO_OK && program.kind == EPO_PROGRAM_UNDECIDED)
            snprintf(verdict->undecided, sizeof verdict->undecided, "%s", program.why);
        verdict->ours |= status == EPO_OK && is_ours(vector);
        verdict->other |=
            status == EPO_OK && program.kind != EPO_PROGRAM_FRAMEWORK && !is_ours(vector);
        if (status == EPO_OK && program.kind == EPO_PROGRAM_FRAMEWORK) {
            status = judge(variables, vector, &program, !looked, gpus, verdict);
            looked = true;
        }
        epo_program_free(&program);
    }
    /* Slurm shows its runtime's command there instead */
    if (!looked && verdict->undecided[0] == '\0' &&
        task_variable(variables, "SLURM_CONTAINER") != NULL)
        snprintf(verdict->undecided, sizeof verdict->undecided,
                 "the program of an OCI container is not seen");
    if (status == EPO_OK && gpus && !looked) {
        static const epo_program other;
        status = judge(variables, programs.count == 1 ? &programs.vectors[0] : &none, &other, true,
                       true, verdict);
    }
    ep_task_programs_free(&programs);
    epo_text_clean(verdict->undecided);
    return status;
}

static void make_verdict(struct ep_plugin *plugin, spank_t spank, bool gpus,
                         struct ep_verdict *verdict) {
    struct variables variables = {.plugin = plugin, .spank = spank};
    memset(verdict, 0, sizeof *verdict);
    if (ask(&variables, gpus, verdict) != EPO_OK)
        snprintf(verdict->warnings, sizeof verdict->warnings, "not checked: %s", epo_fail_text());
    for (int i = 0; i < variables.count; i++)
        free(variables.got[i]);
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
