/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/node.h"

#include "core/version.h"
#include "rules/launch.h"
#include "rules/program.h"
#include "rules/settings.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static bool is_known(const epo_fact *fact) {
    return fact != NULL && fact->kind != EPO_FACT_UNKNOWN;
}

static bool is_false(const epo_facts *facts, const char *key) {
    const epo_fact *fact = epo_facts_find(facts, key);
    return fact != NULL && fact->kind == EPO_FACT_BOOL && fact->number == 0;
}

static epo_finding *add(epo_findings *findings, const char *id, epo_severity severity) {
    static const epo_finding empty;
    if (findings->count == EPO_FINDINGS_MAX) {
        findings->more++;
        return NULL;
    }
    epo_finding *finding = &findings->item[findings->count++];
    *finding = empty;
    snprintf(finding->id, sizeof finding->id, "%s", id);
    finding->severity = severity;
    finding->here = strncmp(id, "ARG-", 4) != 0;
    findings->errors += severity == EPO_SEVERITY_ERROR;
    findings->warnings += severity == EPO_SEVERITY_WARN;
    return finding;
}

static void say(epo_findings *findings, const char *id, epo_severity severity, const char *needed,
                const char *remedy, const char *found, ...) __attribute__((format(printf, 6, 7)));
static void say(epo_findings *findings, const char *id, epo_severity severity, const char *needed,
                const char *remedy, const char *found, ...) {
    epo_finding *finding = add(findings, id, severity);
    va_list args;
    if (finding == NULL)
        return;
    va_start(args, found);
    vsnprintf(finding->found, sizeof finding->found, found, args);
    va_end(args);
    snprintf(finding->needed, sizeof finding->needed, "%s", needed);
    snprintf(finding->remedy, sizeof finding->remedy, "%s", remedy);
}

/* --- the site's least versions ---------------------------------------------- */

static void say_unknown(const struct epo_checks *checks, epo_findings *findings, const char *id,
                        const char *key, const epo_fact *fact, const char *least) {
    char needed[192];
    epo_severity severity =
        checks->on_unknown == EPO_UNKNOWN_FAIL ? EPO_SEVERITY_ERROR : EPO_SEVERITY_WARN;
    if (checks->on_unknown == EPO_UNKNOWN_IGNORE)
        return;
    snprintf(needed, sizeof needed, "%s >= %.64s (checks.minimum)", key, least);
    say(findings, id, severity, needed, "look yourself, or see ep-overlap check",
        "%s is not known%s%.150s", key, fact != NULL ? ": " : "", fact != NULL ? fact->text : "");
}

static void check_least(const struct epo_checks *checks, const epo_facts *facts, const char *id,
                        const char *key, const char *least, const char *what,
                        epo_findings *findings) {
    const epo_fact *fact = epo_facts_find(facts, key);
    epo_pep440 have, need;
    char needed[192], remedy[128];
    if (least == NULL || (fact != NULL && fact->kind == EPO_FACT_NULL))
        return; /* the program has none: nothing to be too old */
    if (!is_known(fact) || epo_pep440_parse(fact->text, &have) != EPO_OK ||
        epo_pep440_parse(least, &need) != EPO_OK) {
        say_unknown(checks, findings, id, key, fact, least);
        return;
    }
    if (epo_pep440_compare(&have, &need) >= 0)
        return;
    snprintf(needed, sizeof needed, "%s >= %.64s (checks.minimum)", key, least);
    snprintf(remedy, sizeof remedy, "use a newer %s, or ask the site's administrators", what);
    say(findings, id, EPO_SEVERITY_ERROR, needed, remedy, "%s = %.64s (%.128s)", key, fact->text,
        fact->source);
}

static void check_versions(const epo_node_question *q, const epo_facts *facts,
                           epo_findings *findings) {
    const struct epo_checks *c = q->checks;
    if (c == NULL)
        return;
    if (q->holds_gpus) {
        check_least(c, facts, "MIN-DRIVER", "node.driver_version", c->driver, "NVIDIA driver",
                    findings);
        check_least(c, facts, "MIN-CUDA", "node.cuda_version", c->cuda, "NVIDIA driver", findings);
        check_least(c, facts, "MIN-NCCL", "nccl_version", c->nccl, "NCCL", findings);
    }
    check_least(c, facts, "MIN-TORCH", "torch_version", c->torch, "PyTorch", findings);
    check_least(c, facts, "MIN-TE", "te_version", c->te, "TransformerEngine", findings);
}

/* --- the node's GPUs ---------------------------------------------------------- */

bool epo_node_gpu(const char *name, char *gpu, size_t room) {
    epo_facts *facts = epo_facts_create();
    bool known = facts != NULL && epo_facts_set_text(facts, "gpu_name", name, "") == EPO_OK &&
                 epo_settings_derive(facts) == EPO_OK;
    const epo_fact *fact = known ? epo_facts_find(facts, "gpu") : NULL;
    if (fact != NULL)
        snprintf(gpu, room, "%s", fact->text);
    epo_facts_destroy(facts);
    return fact != NULL;
}

const char *epo_node_flex_backend(const char *name) {
    char gpu[32];
    bool rack = name != NULL && epo_node_gpu(name, gpu, sizeof gpu) && strncmp(gpu, "gb", 2) == 0;
    return rack ? "hybridep" : "deepep";
}

static void check_class(const epo_node_question *q, const epo_facts *facts,
                        epo_findings *findings) {
    char want[32], have[32];
    const epo_fact *name = epo_facts_find(facts, "gpu_name");
    if (q->gpu_class == NULL || !is_known(name) || name->kind != EPO_FACT_TEXT ||
        !epo_node_gpu(q->gpu_class, want, sizeof want) ||
        !epo_node_gpu(name->text, have, sizeof have) || strcmp(want, have) == 0)
        return;
    say(findings, "NODE-CLASS", EPO_SEVERITY_ERROR, "the GPUs that node_classes says",
        "the site's node_classes and this node disagree: tell the administrators",
        "gpu_name = %.96s (%.64s), but the node's class is %.32s", name->text, name->source,
        q->gpu_class);
}

static void check_gpus(const epo_node_question *q, const epo_facts *facts, epo_findings *findings) {
    const epo_fact *stopped = epo_facts_find(facts, "probe.stopped");
    const epo_fact *pair = epo_facts_find(facts, "node.all_gpus_p2p");
    const epo_fact *sees = epo_facts_find(facts, "task.visible_gpus");
    const epo_fact *bound = epo_facts_find(facts, "task.sees_all_gpus");
    const epo_fact *held = epo_facts_find(facts, "task.gpus_on_node");
    if (held == NULL)
        held = epo_facts_find(facts, "node.gpu_count");
    bool flex = q->dispatcher != EPO_CHOICE_ALLTOALL;
    if (stopped != NULL)
        say(findings, "NODE-PROBE",
            q->checks != NULL && q->checks->on_unknown == EPO_UNKNOWN_FAIL ? EPO_SEVERITY_ERROR
                                                                           : EPO_SEVERITY_WARN,
            "a node that answers within checks.timeout_ms",
            "what was not found out is not checked; tell the administrators if it lasts",
            "the probe was stopped %.128s", stopped->text);
    if (flex && is_false(facts, "task.sees_all_gpus"))
        say(findings, "NODE-BIND", EPO_SEVERITY_ERROR,
            "tasks that see all GPUs of the step, so that peers can be opened",
            "add --gpu-bind=none, or use --ep-dispatcher=alltoall",
            "each task sees %.16s of %.16s GPUs (%.96s)", is_known(sees) ? sees->text : "some",
            is_known(held) ? held->text : "?", bound->source);
    else if (flex && is_false(facts, "node.all_gpus_p2p"))
        say(findings, "NODE-P2P", EPO_SEVERITY_ERROR, "GPUs that reach each other directly",
            "use --ep-dispatcher=alltoall", "node.all_gpus_p2p = False (%.128s)", pair->source);
}

/* --- what a framework's arguments say ------------------------------------------ */

/* What the arguments themselves said, before the question's answers replace it. */
struct given {
    bool known, on;
    char text[40], source[104];
};

static struct given read_given(const epo_facts *facts, const char *key) {
    const epo_fact *fact = epo_facts_find(facts, key);
    struct given given = {.known = is_known(fact), .on = epo_fact_is_true(fact)};
    if (given.known) {
        snprintf(given.text, sizeof given.text, "%.32s", fact->text);
        snprintf(given.source, sizeof given.source, "%.96s", fact->source);
    }
    return given;
}

/* Arguments that leave off what was asked for, where nothing adds them. */
static void check_enabled(const epo_node_question *q, const struct given *overlap,
                          const struct given *delayed, epo_facts *facts, epo_findings *findings) {
    char arguments[256], remedy[sizeof arguments + 64];
    bool lacks_overlap = overlap->known && !overlap->on;
    bool lacks_delayed = overlap->on && q->delayed && delayed->known && !delayed->on;
    if (q->framework == EPO_FRAMEWORK_UNKNOWN || !q->arguments_fixed ||
        (!lacks_overlap && !lacks_delayed))
        return;
    /* from here on as they will be: the rest is judged, too */
    (void)epo_facts_set(facts, "overlap_moe_expert_parallel_comm", "True", "the options");
    (void)epo_facts_set(facts, "delay_wgrad_compute", q->delayed ? "True" : "False", "the options");
    epo_launch_arguments(facts, q->framework, arguments, sizeof arguments);
    snprintf(remedy, sizeof remedy, "add %s (or start it by ep-overlap exec --)", arguments);
    if (lacks_overlap)
        say(findings, "ARG-OVERLAP", EPO_SEVERITY_ERROR,
            "arguments that enable expert-parallel overlap", remedy,
            "overlap_moe_expert_parallel_comm = %s (%s)", overlap->text, overlap->source);
    else
        say(findings, "ARG-WGRAD", EPO_SEVERITY_ERROR,
            "arguments that enable delayed weight gradients", remedy,
            "delay_wgrad_compute = %s (%s)", delayed->text, delayed->source);
}

static void check_dispatcher_given(const epo_node_question *q, const epo_facts *facts,
                                   epo_findings *findings) {
    const epo_fact *type = epo_facts_find(facts, "moe_token_dispatcher_type");
    if (q->framework == EPO_FRAMEWORK_UNKNOWN || !q->arguments_fixed || !q->dispatcher_given ||
        !is_known(type) || type->is_default ||
        strcmp(type->text, epo_dispatcher_kind(q->dispatcher)) == 0)
        return;
    say(findings, "ARG-DISPATCHER", EPO_SEVERITY_ERROR, "one dispatcher in options and arguments",
        "change --ep-dispatcher or the arguments",
        "moe_token_dispatcher_type = %.32s (%.96s), the options say %s", type->text, type->source,
        epo_dispatcher_kind(q->dispatcher));
}

/* What the rules are judged under: the run as it will be. */
static epo_status fill_in(const epo_node_question *q, epo_facts *facts) {
    const epo_fact *name = epo_facts_find(facts, "gpu_name");
    const epo_fact *given = epo_facts_find(facts, "moe_token_dispatcher_type");
    bool framework = q->framework != EPO_FRAMEWORK_UNKNOWN;
    bool own = given == NULL || given->is_default || given->kind == EPO_FACT_UNKNOWN;
    const char *backend = epo_dispatcher_backend(q->dispatcher);
    const char *said = name != NULL && name->kind == EPO_FACT_TEXT ? name->text : q->site_gpu;
    epo_status status = epo_facts_set(facts, "dispatcher_request",
                                      q->automatic ? "auto" : "explicit", "the options");
    if (status == EPO_OK)
        status = epo_facts_set(facts, "overlap_moe_expert_parallel_comm", "True", "the options");
    if (status == EPO_OK && (q->delayed || !framework))
        status = epo_facts_set(facts, "delay_wgrad_compute", q->delayed ? "True" : "False",
                               "the options");
    if (status == EPO_OK && own)
        status = epo_facts_set(facts, "moe_token_dispatcher_type",
                               epo_dispatcher_kind(q->dispatcher), "the options");
    if (status != EPO_OK || !own || q->dispatcher == EPO_CHOICE_ALLTOALL)
        return status;
    if (backend == NULL && framework)
        backend = epo_node_flex_backend(said);
    if (backend == NULL) /* our own flex needs no backend of theirs */
        return epo_facts_set(facts, "flex_backend", NULL, "ep-overlap's own flex");
    status = epo_facts_set(facts, "moe_flex_dispatcher_backend", backend, "the options");
    return status == EPO_OK ? epo_facts_set(facts, "flex_backend", backend, "the options") : status;
}

/* --- rules --------------------------------------------------------------------- */

struct found_text {
    const epo_facts *facts;
    bool here; /* one of the names is the node's */
    char *text;
    size_t room, used;
};

static void add_found(const char *name, size_t length, void *context) {
    struct found_text *found = context;
    char key[128];
    if (length >= sizeof key || found->used + 8 > found->room)
        return;
    snprintf(key, sizeof key, "%.*s", (int)length, name);
    const epo_fact *fact = epo_facts_find(found->facts, key);
    if (fact == NULL || fact->kind == EPO_FACT_UNKNOWN)
        return;
    static const char *const of_nodes[] = {"node.", "gpu",    "nvl72",  "torch_version",
                                           "te_",   "nccl_v", "triton", "deep_ep."};
    for (size_t i = 0; i < sizeof of_nodes / sizeof *of_nodes; i++)
        found->here |= strncmp(key, of_nodes[i], strlen(of_nodes[i])) == 0;
    char one[320];
    snprintf(one, sizeof one, "%s = %.80s (%.80s)", key,
             fact->kind == EPO_FACT_NULL ? "unset" : fact->text, fact->source);
    if (strstr(found->text, one) != NULL)
        return;
    int n = snprintf(found->text + found->used, found->room - found->used, "%s%s",
                     found->used > 0 ? ", " : "", one);
    found->used = n < 0                                    ? found->used
                  : (size_t)n >= found->room - found->used ? found->room - 1
                                                           : found->used + (size_t)n;
}

static void add_rule(const epo_rule_verdict *verdict, const epo_facts *facts,
                     epo_findings *findings) {
    const epo_rule *rule = verdict->rule;
    epo_severity severity = verdict->severity;
    /* a user's variable is kept and warned about, whatever it does */
    if (severity == EPO_SEVERITY_ERROR && strstr(rule->condition, "env.") != NULL)
        severity = EPO_SEVERITY_WARN;
    epo_finding *finding = add(findings, rule->id, severity);
    if (finding == NULL)
        return;
    struct found_text found = {facts, false, finding->found, sizeof finding->found, 0};
    epo_condition_names(rule->condition, add_found, &found);
    finding->here = found.here;
    snprintf(finding->needed, sizeof finding->needed, "%s", rule->needed);
    snprintf(finding->remedy, sizeof finding->remedy, "%s", rule->remedy);
}

static epo_status check_rules(const epo_facts *facts, epo_findings *findings) {
    epo_status status = EPO_OK;
    for (size_t i = 0; i < epo_rules_count() && status == EPO_OK; i++) {
        epo_rule_verdict verdict;
        const epo_rule *rule = epo_rules_at(i);
        if (rule->scope == EPO_SCOPE_AB || rule->scope == EPO_SCOPE_PROFILE)
            continue;
        status = epo_rules_evaluate(rule, facts, &verdict);
        if (status == EPO_OK && verdict.outcome == EPO_RULE_VIOLATED)
            add_rule(&verdict, facts, findings);
    }
    return status;
}

epo_status epo_node_judge(const epo_node_question *question, epo_facts *facts,
                          epo_findings *findings) {
    memset(findings, 0, sizeof *findings);
    check_versions(question, facts, findings);
    if (question->checks != NULL && question->checks->require_gpu && !question->holds_gpus)
        say(findings, "NODE-GPU", EPO_SEVERITY_ERROR, "a GPU (checks.require_gpu)",
            "ask for one with --gpus or --gres", "no GPU");
    if (question->holds_gpus) {
        check_class(question, facts, findings);
        check_gpus(question, facts, findings);
    }
    check_dispatcher_given(question, facts, findings);
    epo_status status = epo_settings_derive(facts);
    struct given overlap = read_given(facts, "overlap_moe_expert_parallel_comm");
    struct given delayed = read_given(facts, "delay_wgrad_compute");
    if (status == EPO_OK)
        status = fill_in(question, facts);
    if (status == EPO_OK)
        status = epo_settings_derive(facts);
    if (status == EPO_OK)
        check_enabled(question, &overlap, &delayed, facts, findings);
    return status == EPO_OK ? check_rules(facts, findings) : status;
}

/* --- reading a task -------------------------------------------------------------- */

static bool takes_more_from_files(const epo_words *words) {
    static const char *const flags[] = {"--yaml-cfg", "--use-checkpoint-args",
                                        "--use-mp-args-from-checkpoint-args", NULL};
    for (size_t i = 1; i < words->count; i++)
        for (const char *const *flag = flags; *flag != NULL; flag++)
            if (strncmp(words->word[i].text, *flag, strlen(*flag)) == 0)
                return true;
    return false;
}

static epo_status read_settings(char *const *arguments, int count, const epo_program *program,
                                epo_facts *facts) {
    epo_words words = {0};
    epo_command command;
    epo_status status = EPO_OK;
    for (int i = 0; i < count && status == EPO_OK; i++)
        status = epo_words_add(&words, arguments[i], 0, false, i == 0);
    if (status == EPO_OK)
        status = epo_command_read(&words, NULL, false, facts, &command);
    epo_words_free(&words);
    if (status == EPO_OK)
        status = epo_facts_set(facts, "framework", epo_framework_name(program->framework),
                               "the command");
    if (status == EPO_OK && program->framework == EPO_FRAMEWORK_MEGATRON_LM &&
        !takes_more_from_files(&program->words))
        status = epo_settings_default(facts, EPO_DEFAULTS_MEGATRON_LM);
    return status;
}

epo_status epo_node_arguments(char *const *arguments, int count, epo_facts *facts,
                              epo_framework *framework) {
    epo_program program;
    epo_status status = epo_program_read(arguments, count, &program);
    bool readable = program.kind == EPO_PROGRAM_FRAMEWORK;
    if (status == EPO_OK && readable)
        status = read_settings(arguments, count, &program, facts);
    if (status == EPO_OK)
        *framework = readable ? program.framework : EPO_FRAMEWORK_UNKNOWN;
    epo_program_free(&program);
    return status;
}

struct environment {
    epo_facts *facts;
    const char *(*get)(void *context, const char *name);
    void *context;
    epo_status status;
};

static void add_variable(const char *name, size_t length, void *context) {
    struct environment *e = context;
    char key[128];
    if (e->status != EPO_OK || length >= sizeof key || strncmp(name, "env.", 4) != 0)
        return;
    snprintf(key, sizeof key, "%.*s", (int)length, name);
    if (epo_facts_find(e->facts, key) != NULL)
        return;
    const char *value = e->get(e->context, key + 4);
    e->status = value != NULL ? epo_facts_set_text(e->facts, key, value, "the environment")
                              : epo_facts_set(e->facts, key, NULL, "the environment");
}

epo_status epo_node_environment(epo_facts *facts,
                                const char *(*get)(void *context, const char *name),
                                void *context) {
    struct environment e = {facts, get, context, EPO_OK};
    for (size_t i = 0; i < epo_rules_count(); i++)
        epo_condition_names(epo_rules_at(i)->condition, add_variable, &e);
    return e.status;
}

void epo_finding_text(const epo_finding *finding, char *text, size_t room) {
    snprintf(text, room, "%s: found %s; needed %s; %s", finding->id, finding->found,
             finding->needed, finding->remedy);
}
