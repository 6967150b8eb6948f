/* SPDX-License-Identifier: Apache-2.0
 *
 * config.h - the site's configuration, ep_overlap.conf.
 */
#ifndef EPO_CORE_CONFIG_H
#define EPO_CORE_CONFIG_H

#include "core/options.h"
#include "core/status.h"
#include "core/trust.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EPO_CONFIG_BYTES_MAX ((size_t)1 << 20)

typedef enum epo_action {
    EPO_POLICY_ALLOW,
    EPO_POLICY_DENY,
    EPO_POLICY_DEFAULT,
    EPO_POLICY_LOCK
} epo_action;

struct epo_names {
    char **items;
    int count;
};
struct epo_ids {
    uint32_t *items;
    int count;
};

/* One entry of `policy`; an empty list matches everybody. */
struct epo_policy_rule {
    int line;
    struct epo_ids user, group;          /* numbers: binding */
    struct epo_names partition, account; /* names: advisory */
    char *node;                          /* hostlist expression or NULL */
    int action;
    int values[EPO_OPT_COUNT]; /* of default and lock; EPO_UNSET */
    char *message;             /* the administrator's, or NULL */
};

/* What `auto` means on a kind of node. */
struct epo_class {
    int line;
    char *name; /* "h100": the GPU class */
    char *node; /* hostlist expression or NULL */
    char *gres; /* "gpu:h100" or NULL */
    int overlap, dispatcher, delay_wgrad;
};

struct epo_site_env {
    int line;
    char *name, *value;
    int when; /* EPO_WHEN_* */
};
enum { EPO_WHEN_UNSET, EPO_WHEN_ALWAYS };
enum { EPO_UNKNOWN_WARN, EPO_UNKNOWN_FAIL, EPO_UNKNOWN_IGNORE };
enum { EPO_FAILED_FAIL, EPO_FAILED_WARN };

struct epo_checks {
    int timeout_ms;
    char *driver, *cuda, *nccl, *torch, *te; /* least versions or NULL */
    int on_unknown;
    bool require_gpu;
    char *nvml_path;
};

struct epo_config {
    char *path; /* where it was read; NULL: built in */
    int defaults[EPO_OPT_COUNT];
    struct epo_policy_rule *rules;
    int rule_count;
    struct epo_class *classes;
    int class_count;
    struct epo_checks checks;
    struct epo_site_env *environment;
    int environment_count;
    char *preload_path; /* NULL: compiled in */
    char *probe_path;   /* the same */
    bool interpose, record;
    bool step_line;
    int on_failed_request;
};

/* The configuration without a file. */
epo_status epo_config_builtin(struct epo_config **config);
/* Parses `text`, read from `path` (for messages).  EPO_E_ARG and
 * "PATH:LINE: ..." on the first thing that is not understood. */
epo_status epo_config_parse(const char *text, const char *path, struct epo_config **config);
/* Reads and parses a trusted file.  A file that does not exist gives the built-in
 * values, unless `required`. */
epo_status epo_config_load(const char *path, bool required, const struct epo_trust *trust,
                           struct epo_config **config);
void epo_config_destroy(struct epo_config *config);

#endif
