/* SPDX-License-Identifier: Apache-2.0 */
#include "core/policy.h"

#include "core/auto.h"
#include "core/hostlist.h"

#include <stdio.h>
#include <string.h>

const char *epo_source_text(epo_source source) {
    switch (source) {
    case EPO_FROM_BUILTIN: return "the built-in default";
    case EPO_FROM_SITE: return "the site's default";
    case EPO_FROM_RULE: return "the site's default by policy rule";
    case EPO_FROM_ENVIRONMENT: return "the user's environment";
    case EPO_FROM_INHERITED: return "inherited from sbatch or salloc";
    case EPO_FROM_COMMAND: return "the command line";
    case EPO_FROM_LOCK: return "the site's lock";
    }
    return "?";
}

static bool has_id(const struct epo_ids *ids, uint32_t id) {
    for (int i = 0; i < ids->count; i++)
        if (ids->items[i] == id)
            return true;
    return false;
}

static bool has_group(const struct epo_ids *ids, const struct epo_policy_input *input) {
    for (int i = 0; i < input->group_count; i++)
        if (has_id(ids, (uint32_t)input->groups[i]))
            return true;
    return false;
}

static bool has_word(const struct epo_names *words, const char *word) {
    for (int i = 0; word != NULL && i < words->count; i++)
        if (strcmp(words->items[i], word) == 0)
            return true;
    return false;
}

/* All parts that a rule names have to match; what is not known does not match. */
static bool rule_matches(const struct epo_policy_rule *rule, const struct epo_policy_input *input,
                         const char *node) {
    return (rule->user.count == 0 || has_id(&rule->user, (uint32_t)input->user)) &&
           (rule->group.count == 0 || has_group(&rule->group, input)) &&
           (rule->partition.count == 0 || has_word(&rule->partition, input->partition)) &&
           (rule->account.count == 0 || has_word(&rule->account, input->account)) &&
           (rule->node == NULL || (node != NULL && epo_hostlist_has(rule->node, node)));
}

static const struct epo_policy_rule *first_match(const struct epo_policy_input *input,
                                                 const char *node) {
    for (int i = 0; i < input->config->rule_count; i++)
        if (rule_matches(&input->config->rules[i], input, node))
            return &input->config->rules[i];
    return NULL;
}

struct strictest {
    const struct epo_policy_input *input;
    const struct epo_policy_rule *rule;
};

static int strictness(const struct epo_policy_rule *rule) {
    static const int order[] = {[EPO_POLICY_ALLOW] = 1,
                                [EPO_POLICY_DEFAULT] = 2,
                                [EPO_POLICY_LOCK] = 3,
                                [EPO_POLICY_DENY] = 4};
    return rule == NULL ? 0 : order[rule->action];
}

static bool visit_node(const char *node, void *context) {
    struct strictest *so_far = context;
    const struct epo_policy_rule *rule = first_match(so_far->input, node);
    if (strictness(rule) > strictness(so_far->rule))
        so_far->rule = rule;
    return strictness(so_far->rule) <
           strictness(&(struct epo_policy_rule){.action = EPO_POLICY_DENY});
}

static bool any_rule_names_nodes(const struct epo_config *config) {
    for (int i = 0; i < config->rule_count; i++)
        if (config->rules[i].node != NULL)
            return true;
    return false;
}

/* The rule for this step: the first that matches; where nodes differ, the
 * strictest of theirs, so that all nodes of a step do the same. */
static const struct epo_policy_rule *find_rule(const struct epo_policy_input *input) {
    if (input->nodes == NULL || !any_rule_names_nodes(input->config))
        return first_match(input, NULL);
    struct strictest so_far = {input, NULL};
    if (!epo_hostlist_each(input->nodes, visit_node, &so_far))
        return first_match(input, NULL);
    return so_far.rule;
}

static bool is_option(epo_source source) {
    return source == EPO_FROM_COMMAND || source == EPO_FROM_INHERITED;
}

/* The strongest wish, the lock aside. */
static struct epo_choice choose(const struct epo_policy_input *input,
                                const struct epo_policy_rule *rule, int id) {
    const struct epo_choice candidates[] = {
        {input->command[id], EPO_FROM_COMMAND},
        {input->inherited[id], EPO_FROM_INHERITED},
        {input->environment[id], EPO_FROM_ENVIRONMENT},
        {rule != NULL && rule->action == EPO_POLICY_DEFAULT ? rule->values[id] : EPO_UNSET,
         EPO_FROM_RULE},
        {input->config->defaults[id], EPO_FROM_SITE},
    };
    for (size_t i = 0; i < sizeof candidates / sizeof candidates[0]; i++)
        if (candidates[i].value != EPO_UNSET)
            return candidates[i];
    return (struct epo_choice){epo_options[id].preset, EPO_FROM_BUILTIN};
}

static const char *said(const struct epo_policy_rule *rule) {
    return rule->message != NULL ? rule->message : "ask the administrator";
}

static epo_status forbidden(const struct epo_policy_input *input,
                            const struct epo_policy_rule *rule, int id, int value) {
    return epo_fail(EPO_E_STATE, "--%s=%s is %s by the site's policy (%s:%d): %s",
                    epo_options[id].name, epo_option_word((epo_option_id)id, value),
                    rule->action == EPO_POLICY_DENY ? "denied" : "locked to another value",
                    input->config->path, rule->line, said(rule));
}

/* A locked flex leaves the choice of its backend. */
static bool within_lock(int id, int value, int lock) {
    return value == lock ||
           (id == EPO_OPT_DISPATCHER && lock == EPO_CHOICE_FLEX && value != EPO_CHOICE_ALLTOALL);
}

static epo_status apply_lock(const struct epo_policy_input *input,
                             const struct epo_policy_rule *rule, int id,
                             struct epo_choice *choice) {
    int lock = rule->values[id];
    if (lock == EPO_UNSET)
        return EPO_OK;
    if (within_lock(id, choice->value, lock)) {
        if (!is_option(choice->source))
            choice->source = EPO_FROM_LOCK;
        return EPO_OK;
    }
    /* `auto` leaves it to the site, so no lock contradicts it. */
    bool asked =
        is_option(choice->source) && !(id == EPO_OPT_OVERLAP && choice->value == EPO_OVERLAP_AUTO);
    if (asked)
        return forbidden(input, rule, id, choice->value);
    *choice = (struct epo_choice){lock, EPO_FROM_LOCK};
    return EPO_OK;
}

/* What the user asked for beside the overlap itself. */
static bool is_companion(const struct epo_choice *choice, int id) {
    return is_option(choice->source) &&
           (id == EPO_OPT_DISPATCHER ||
            (id == EPO_OPT_DELAY_WGRAD && choice->value == EPO_WGRAD_DELAYED));
}

/* With overlap off a companion is an error that names where off came from;
 * only an `off` on the command line drops what was inherited. */
static epo_status check_companions(const struct epo_policy_input *input,
                                   const struct epo_decision *decision) {
    const struct epo_choice *overlap = &decision->choice[EPO_OPT_OVERLAP];
    for (int id = EPO_OPT_DISPATCHER; id <= EPO_OPT_DELAY_WGRAD && !input->lenient; id++) {
        const struct epo_choice *companion = &decision->choice[id];
        if (!is_companion(companion, id))
            continue;
        if (overlap->source == EPO_FROM_COMMAND && companion->source == EPO_FROM_INHERITED)
            continue;
        return epo_fail(EPO_E_ARG,
                        "--%s (%s) needs --ep-overlap=on or auto, but overlap is off (%s); add "
                        "--ep-overlap=on or leave --%s out",
                        epo_options[id].name, epo_source_text(companion->source), decision->reason,
                        epo_options[id].name);
    }
    return EPO_OK;
}

static void reason_of_choice(const struct epo_decision *decision,
                             const struct epo_policy_input *input,
                             const struct epo_policy_rule *rule, char *reason, size_t room) {
    const struct epo_choice *overlap = &decision->choice[EPO_OPT_OVERLAP];
    const char *word = epo_option_word(EPO_OPT_OVERLAP, overlap->value);
    if (is_option(overlap->source))
        snprintf(reason, room, "--ep-overlap=%s, %s", word, epo_source_text(overlap->source));
    else if (overlap->source == EPO_FROM_ENVIRONMENT)
        snprintf(reason, room, "%s=%s in the environment", epo_options[EPO_OPT_OVERLAP].input,
                 word);
    else if (overlap->source == EPO_FROM_RULE || overlap->source == EPO_FROM_LOCK)
        snprintf(reason, room, "%s, %s:%d%s%s", epo_source_text(overlap->source),
                 input->config->path, rule->line, rule->message != NULL ? ": " : "",
                 rule->message != NULL ? rule->message : "");
    else
        snprintf(reason, room, "%s", epo_source_text(overlap->source));
}

static epo_status apply_deny(const struct epo_policy_input *input,
                             const struct epo_policy_rule *rule, struct epo_decision *decision) {
    const struct epo_choice *overlap = &decision->choice[EPO_OPT_OVERLAP];
    if (overlap->value == EPO_OVERLAP_OFF)
        return EPO_OK;
    if (overlap->value == EPO_OVERLAP_ON && is_option(overlap->source))
        return forbidden(input, rule, EPO_OPT_OVERLAP, overlap->value);
    decision->on = decision->pending = false;
    snprintf(decision->reason, sizeof decision->reason, "denied by the site's policy (%s:%d): %s",
             input->config->path, rule->line, said(rule));
    return EPO_OK;
}

/* A broken configuration fails what an option asked for and leaves all else
 * alone. */
static epo_status decide_without_config(const struct epo_policy_input *input,
                                        struct epo_decision *decision) {
    static const struct epo_config empty = {.path = NULL,
                                            .defaults = {EPO_UNSET, EPO_UNSET, EPO_UNSET}};
    struct epo_policy_input bare = *input;
    bare.config = &empty;
    for (int id = 0; id < EPO_OPT_COUNT; id++) {
        bare.environment[id] = EPO_UNSET;
        decision->choice[id] = choose(&bare, NULL, id);
    }
    const struct epo_choice *overlap = &decision->choice[EPO_OPT_OVERLAP];
    decision->on = false;
    decision->automatic = overlap->value == EPO_OVERLAP_AUTO;
    decision->explicit_on = is_option(overlap->source) && overlap->value != EPO_OVERLAP_OFF;
    bool told_off = is_option(overlap->source) && overlap->value == EPO_OVERLAP_OFF;
    bool asked = decision->explicit_on;
    for (int id = EPO_OPT_DISPATCHER; id <= EPO_OPT_DELAY_WGRAD; id++)
        asked = asked || (!told_off && is_companion(&decision->choice[id], id));
    if (asked)
        return epo_fail(EPO_E_STATE, "the site's configuration is broken: %s", input->config_error);
    reason_of_choice(decision, &bare, NULL, decision->reason, sizeof decision->reason);
    if (told_off)
        return check_companions(&bare, decision);
    snprintf(decision->reason, sizeof decision->reason,
             "the site's configuration is broken: %.400s", input->config_error);
    return EPO_OK;
}

static epo_status decide_with_config(const struct epo_policy_input *input,
                                     struct epo_decision *decision) {
    const struct epo_policy_rule *rule = find_rule(input);
    for (int id = 0; id < EPO_OPT_COUNT; id++) {
        decision->choice[id] = choose(input, rule, id);
        if (rule != NULL && rule->action == EPO_POLICY_LOCK) {
            epo_status status = apply_lock(input, rule, id, &decision->choice[id]);
            if (status != EPO_OK)
                return status;
        }
    }
    const struct epo_choice *overlap = &decision->choice[EPO_OPT_OVERLAP];
    decision->on = overlap->value == EPO_OVERLAP_ON;
    decision->automatic = overlap->value == EPO_OVERLAP_AUTO;
    decision->explicit_on = decision->on && is_option(overlap->source);
    reason_of_choice(decision, input, rule, decision->reason, sizeof decision->reason);
    if (decision->automatic)
        epo_auto_decide(input, decision);
    if (rule != NULL && rule->action == EPO_POLICY_DENY) {
        epo_status status = apply_deny(input, rule, decision);
        if (status != EPO_OK)
            return status;
    }
    if (!decision->on && !decision->automatic)
        return check_companions(input, decision);
    return EPO_OK;
}

epo_status epo_policy_decide(const struct epo_policy_input *input, struct epo_decision *decision) {
    struct epo_decision made;
    memset(&made, 0, sizeof made);
    for (int id = 0; id < EPO_OPT_COUNT; id++)
        made.any_option =
            made.any_option || input->command[id] != EPO_UNSET || input->inherited[id] != EPO_UNSET;
    epo_status status = input->config != NULL ? decide_with_config(input, &made)
                                              : decide_without_config(input, &made);
    if (status == EPO_OK)
        *decision = made;
    return status;
}

void epo_decision_text(const struct epo_decision *decision, char *text, size_t room) {
    const struct epo_choice *choice = decision->choice;
    if (decision->on)
        snprintf(text, room, "on, dispatcher %s%s (%s)",
                 epo_option_word(EPO_OPT_DISPATCHER, choice[EPO_OPT_DISPATCHER].value),
                 choice[EPO_OPT_DELAY_WGRAD].value == EPO_WGRAD_DELAYED ? ", delayed wgrad" : "",
                 decision->reason);
    else
        snprintf(text, room, "off%s (%s)", decision->explicit_on ? " instead of on" : "",
                 decision->reason);
}
