/* SPDX-License-Identifier: Apache-2.0
 *
 * policy.h - from everybody's wishes to one decision.  Pure: it reads its input
 * and nothing else.
 *
 * Precedence, strongest first: a site lock, the command line, what sbatch or
 * salloc handed on, the user's environment, a default by policy rule, the site's
 * default, the built-in one.
 */
#ifndef EPO_CORE_POLICY_H
#define EPO_CORE_POLICY_H

#include "core/config.h"
#include "core/options.h"
#include "core/status.h"

#include <stdbool.h>
#include <sys/types.h>

#define EPO_DECISION_REASON_MAX 512

typedef enum epo_source {
    EPO_FROM_BUILTIN,
    EPO_FROM_SITE,
    EPO_FROM_RULE,
    EPO_FROM_ENVIRONMENT,
    EPO_FROM_INHERITED,
    EPO_FROM_COMMAND,
    EPO_FROM_LOCK
} epo_source;

struct epo_policy_input {
    const struct epo_config *config; /* NULL: broken, and then */
    const char *config_error;        /* says why */
    /* Each value or EPO_UNSET. */
    int command[EPO_OPT_COUNT], inherited[EPO_OPT_COUNT], environment[EPO_OPT_COUNT];
    uid_t user;
    const gid_t *groups;
    int group_count;
    const char *partition, *account, *nodes; /* NULL: not known (yet) */
    /* A node's generic resources as Slurm writes them ("gpu:h100:8"), for classes
     * told by gres; NULL, or giving NULL: not known. */
    const char *(*gres_of)(void *context, const char *node);
    void *gres_context;
    /* On a node contradicting options are no error, `off` wins: whoever submitted
     * without the plugin's checks gets the careful reading. */
    bool lenient;
};

struct epo_choice {
    int value;
    epo_source source;
};

struct epo_decision {
    bool on;
    bool explicit_on; /* an option asked for it: what cannot be served is an error */
    bool any_option;  /* an option was given, whatever it says */
    bool automatic;   /* the wish was `auto` */
    bool pending;     /* `auto` waits for the nodes to be known; off until then */
    struct epo_choice choice[EPO_OPT_COUNT]; /* the wishes that won */
    char reason[EPO_DECISION_REASON_MAX];    /* one line: why it is on or off */
};

/* EPO_E_ARG: options that contradict each other; EPO_E_STATE: an option that the
 * site forbids, or a broken configuration under an explicit request.  The error
 * line is for the user. */
epo_status epo_policy_decide(const struct epo_policy_input *input, struct epo_decision *decision);

/* "the command line", ... */
const char *epo_source_text(epo_source source);
/* "on, dispatcher flex, delayed wgrad (REASON)"; at most EPO_DECISION_REASON_MAX + 128 bytes. */
void epo_decision_text(const struct epo_decision *decision, char *text, size_t room);

#endif
