/* SPDX-License-Identifier: Apache-2.0 */
#include "core/auto.h"

#include "core/hostlist.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* True when the comma-separated `have` ("gpu:h100:8(S:0-1),nic:2") names `want`
 * ("gpu:h100"). */
static bool has_gres(const char *have, const char *want) {
    size_t length = strlen(want);
    while (have != NULL) {
        if (strncmp(have, want, length) == 0 && strchr(":(,", have[length]) != NULL)
            return true;
        have = strchr(have, ',');
        have = have != NULL ? have + 1 : NULL;
    }
    return false;
}

const struct epo_class *epo_auto_class(const struct epo_policy_input *input, const char *node) {
    const struct epo_config *config = input->config;
    for (int i = 0; i < config->class_count; i++)
        if (config->classes[i].node != NULL && epo_hostlist_has(config->classes[i].node, node))
            return &config->classes[i];
    const char *gres = input->gres_of != NULL ? input->gres_of(input->gres_context, node) : NULL;
    for (int i = 0; gres != NULL && i < config->class_count; i++)
        if (config->classes[i].gres != NULL && has_gres(gres, config->classes[i].gres))
            return &config->classes[i];
    return NULL;
}

struct common {
    const struct epo_policy_input *input;
    const struct epo_class *class; /* of the nodes so far */
    char first[EPO_HOST_NAME_MAX], odd[EPO_HOST_NAME_MAX];
    bool unknown, mixed;
    const struct epo_class *other;
};

static bool visit(const char *node, void *context) {
    struct common *common = context;
    const struct epo_class *class = epo_auto_class(common->input, node);
    if (common->first[0] == '\0') {
        snprintf(common->first, sizeof common->first, "%s", node);
        common->class = class;
    }
    common->unknown = class == NULL;
    common->mixed = class != NULL && strcmp(class->name, common->class->name) != 0;
    common->other = class;
    snprintf(common->odd, sizeof common->odd, "%s", node);
    return !common->unknown && !common->mixed;
}

static void EPO_PRINTF(2, 3) off(struct epo_decision *decision, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int used = snprintf(decision->reason, sizeof decision->reason, "auto: ");
    vsnprintf(decision->reason + used, sizeof decision->reason - (size_t)used, format, args);
    va_end(args);
    decision->on = false;
}

/* A class presets what neither an option nor the environment nor a lock says. */
static void take_over(struct epo_choice *choice, int value) {
    if (value != EPO_UNSET && choice->source <= EPO_FROM_RULE)
        *choice = (struct epo_choice){value, EPO_FROM_SITE};
}

static void apply_class(const struct epo_policy_input *input, const struct epo_class *class,
                        struct epo_decision *decision) {
    if (class->overlap == EPO_OVERLAP_OFF) {
        off(decision, "class %s is off (%s:%d)", class->name, input->config->path, class->line);
        return;
    }
    decision->on = true;
    take_over(&decision->choice[EPO_OPT_DISPATCHER], class->dispatcher);
    take_over(&decision->choice[EPO_OPT_DELAY_WGRAD], class->delay_wgrad);
    snprintf(decision->reason, sizeof decision->reason, "auto: class %s, %s:%d", class->name,
             input->config->path, class->line);
}

void epo_auto_decide(const struct epo_policy_input *input, struct epo_decision *decision) {
    struct common common = {.input = input};
    decision->pending = false;
    if (input->config->class_count == 0) {
        off(decision, "the site's configuration has no node_classes");
    } else if (input->nodes == NULL) {
        off(decision, "decided when the nodes are known");
        decision->pending = true;
    } else if (!epo_hostlist_each(input->nodes, visit, &common)) {
        off(decision, "\"%.128s\" is no list of nodes", input->nodes);
    } else if (common.unknown) {
        off(decision, "node %s belongs to no class", common.odd);
    } else if (common.mixed) {
        off(decision, "nodes of different classes, %s (%s) and %s (%s)", common.first,
            common.class->name, common.odd, common.other->name);
    } else {
        apply_class(input, common.class, decision);
    }
}
