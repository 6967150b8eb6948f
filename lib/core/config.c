/* SPDX-License-Identifier: Apache-2.0 */
#include "core/config.h"

#include "core/config_read.h"
#include "core/env_list.h"
#include "core/hostlist.h"
#include "core/version.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static epo_status read_version(const struct reader *reader, const config_setting_t *setting,
                               void *field) {
    (void)field;
    int version = 0;
    return config_read_int(reader, setting, 1, 1, &version);
}

static epo_status read_defaults(const struct reader *reader, const config_setting_t *setting,
                                void *field) {
    static const struct config_key keys[] = {
        {"overlap", config_read_overlap, EPO_OPT_OVERLAP * sizeof(int)},
        {"dispatcher", config_read_dispatcher, EPO_OPT_DISPATCHER * sizeof(int)},
        {"delay_wgrad", config_read_delay_wgrad, EPO_OPT_DELAY_WGRAD * sizeof(int)},
        {NULL, NULL, 0}};
    return config_read_group(reader, setting, keys, field);
}

static epo_status read_nodes(const struct reader *reader, const config_setting_t *setting,
                             void *field) {
    epo_status status = config_read_text(reader, setting, field);
    if (status == EPO_OK && !epo_hostlist_valid(*(char **)field))
        status = config_fail(reader, setting,
                             "\"%s\" is no list of nodes; allowed are names, commas and ranges as "
                             "in \"gpu[001-128,200],login1\"",
                             *(char **)field);
    /* slurm.conf's word for all nodes; here it would be the name of none */
    if (status == EPO_OK && strcasecmp(*(char **)field, "ALL") == 0)
        status = config_fail(reader, setting,
                             "\"%s\" is a name like others here; a rule without node is for all "
                             "nodes, and a class names its own",
                             *(char **)field);
    return status;
}

static epo_status read_match(const struct reader *reader, const config_setting_t *setting,
                             void *field) {
    static const struct config_key keys[] = {
        {"user", config_read_ids, offsetof(struct epo_policy_rule, user)},
        {"group", config_read_ids, offsetof(struct epo_policy_rule, group)},
        {"partition", config_read_words, offsetof(struct epo_policy_rule, partition)},
        {"account", config_read_words, offsetof(struct epo_policy_rule, account)},
        {"node", read_nodes, offsetof(struct epo_policy_rule, node)},
        {NULL, NULL, 0}};
    return config_read_group(reader, setting, keys, field);
}

static epo_status read_action(const struct reader *reader, const config_setting_t *setting,
                              void *field) {
    static const char *const words[] = {[EPO_POLICY_ALLOW] = "allow",
                                        [EPO_POLICY_DENY] = "deny",
                                        [EPO_POLICY_DEFAULT] = "default",
                                        [EPO_POLICY_LOCK] = "lock",
                                        NULL};
    return config_read_word(reader, setting, words, field);
}

static epo_status read_rule(const struct reader *reader, const config_setting_t *setting,
                            void *field) {
#define VALUE(id) offsetof(struct epo_policy_rule, values) + (id) * sizeof(int)
    static const struct config_key keys[] = {
        {"match", read_match, 0},
        {"action", read_action, offsetof(struct epo_policy_rule, action)},
        {"overlap", config_read_overlap, VALUE(EPO_OPT_OVERLAP)},
        {"dispatcher", config_read_dispatcher, VALUE(EPO_OPT_DISPATCHER)},
        {"delay_wgrad", config_read_delay_wgrad, VALUE(EPO_OPT_DELAY_WGRAD)},
        {"message", config_read_text, offsetof(struct epo_policy_rule, message)},
        {NULL, NULL, 0}};
#undef VALUE
    struct epo_policy_rule *rule = field;
    rule->line = (int)config_setting_source_line(setting);
    rule->action = EPO_UNSET;
    int given = 0;
    for (int i = 0; i < EPO_OPT_COUNT; i++)
        rule->values[i] = EPO_UNSET;
    epo_status status = config_read_group(reader, setting, keys, rule);
    if (status != EPO_OK)
        return status;
    for (int i = 0; i < EPO_OPT_COUNT; i++)
        given += rule->values[i] != EPO_UNSET;
    if (rule->action == EPO_UNSET)
        return config_fail(reader, setting,
                           "a policy rule without action; allowed allow, deny, default, lock");
    bool wants = rule->action == EPO_POLICY_DEFAULT || rule->action == EPO_POLICY_LOCK;
    if (wants && given == 0)
        return config_fail(reader, setting,
                           "a %s rule says which value: add overlap, dispatcher "
                           "or delay_wgrad",
                           rule->action == EPO_POLICY_LOCK ? "lock" : "default");
    if (!wants && given > 0)
        return config_fail(reader, setting, "%s rule has no values; use default or lock",
                           rule->action == EPO_POLICY_ALLOW ? "an allow" : "a deny");
    return EPO_OK;
}

static epo_status read_policy(const struct reader *reader, const config_setting_t *setting,
                              void *field) {
    struct epo_config *config = field;
    return config_read_list(reader, setting, sizeof *config->rules, read_rule,
                            (void **)&config->rules, &config->rule_count);
}

static epo_status read_class(const struct reader *reader, const config_setting_t *setting,
                             void *field) {
    static const struct config_key keys[] = {
        {"class", config_read_text, offsetof(struct epo_class, name)},
        {"nodes", read_nodes, offsetof(struct epo_class, node)},
        {"gres", config_read_text, offsetof(struct epo_class, gres)},
        {"overlap", config_read_switch, offsetof(struct epo_class, overlap)},
        {"dispatcher", config_read_dispatcher, offsetof(struct epo_class, dispatcher)},
        {"delay_wgrad", config_read_delay_wgrad, offsetof(struct epo_class, delay_wgrad)},
        {NULL, NULL, 0}};
    struct epo_class *class = field;
    class->line = (int)config_setting_source_line(setting);
    class->overlap = class->dispatcher = class->delay_wgrad = EPO_UNSET;
    epo_status status = config_read_group(reader, setting, keys, class);
    if (status == EPO_OK && class->name == NULL)
        status = config_fail(reader, setting, "a node class without a name: add class = \"h100\"");
    if (status == EPO_OK && (class->node == NULL) == (class->gres == NULL))
        status = config_fail(reader, setting,
                             "a node class is told by nodes or by gres, one of "
                             "the two");
    if (status == EPO_OK && class->overlap == EPO_UNSET)
        status =
            config_fail(reader, setting,
                        "a node class says what auto means there: overlap = \"on\" or \"off\"");
    return status;
}

static epo_status read_classes(const struct reader *reader, const config_setting_t *setting,
                               void *field) {
    struct epo_config *config = field;
    return config_read_list(reader, setting, sizeof *config->classes, read_class,
                            (void **)&config->classes, &config->class_count);
}

static epo_status read_timeout(const struct reader *reader, const config_setting_t *setting,
                               void *field) {
    return config_read_int(reader, setting, 100, 60000, field);
}

static epo_status read_unknown(const struct reader *reader, const config_setting_t *setting,
                               void *field) {
    static const char *const words[] = {[EPO_UNKNOWN_WARN] = "warn",
                                        [EPO_UNKNOWN_FAIL] = "fail",
                                        [EPO_UNKNOWN_IGNORE] = "ignore",
                                        NULL};
    return config_read_word(reader, setting, words, field);
}

static epo_status read_least(const struct reader *reader, const config_setting_t *setting,
                             void *field) {
    epo_pep440 version;
    epo_status status = config_read_text(reader, setting, field);
    if (status == EPO_OK && epo_pep440_parse(*(char **)field, &version) != EPO_OK)
        status = config_fail(reader, setting, "%s: found \"%s\", a version is expected (\"12.4\")",
                             config_setting_name(setting), *(char **)field);
    return status;
}

static epo_status read_minimum(const struct reader *reader, const config_setting_t *setting,
                               void *field) {
    static const struct config_key keys[] = {
        {"driver", read_least, offsetof(struct epo_checks, driver)},
        {"cuda", read_least, offsetof(struct epo_checks, cuda)},
        {"nccl", read_least, offsetof(struct epo_checks, nccl)},
        {"torch", read_least, offsetof(struct epo_checks, torch)},
        {"te", read_least, offsetof(struct epo_checks, te)},
        {NULL, NULL, 0}};
    return config_read_group(reader, setting, keys, field);
}

static epo_status read_path(const struct reader *reader, const config_setting_t *setting,
                            void *field) {
    epo_status status = config_read_text(reader, setting, field);
    if (status == EPO_OK && **(char **)field != '/')
        status = config_fail(reader, setting, "%s: found \"%s\", an absolute path is expected",
                             config_setting_name(setting), *(char **)field);
    return status;
}

static epo_status read_preload_path(const struct reader *reader, const config_setting_t *setting,
                                    void *field) {
    epo_status status = read_path(reader, setting, field);
    if (status == EPO_OK && !epo_env_list_can_hold(*(char **)field))
        status = config_fail(reader, setting,
                             "path: found \"%s\", which LD_PRELOAD cannot hold: no "
                             "blanks or colons",
                             *(char **)field);
    return status;
}

static epo_status read_checks(const struct reader *reader, const config_setting_t *setting,
                              void *field) {
    static const struct config_key keys[] = {
        {"timeout_ms", read_timeout, offsetof(struct epo_checks, timeout_ms)},
        {"minimum", read_minimum, 0},
        {"on_unknown", read_unknown, offsetof(struct epo_checks, on_unknown)},
        {"require_gpu", config_read_bool, offsetof(struct epo_checks, require_gpu)},
        {"nvml_path", read_path, offsetof(struct epo_checks, nvml_path)},
        {NULL, NULL, 0}};
    return config_read_group(reader, setting, keys, field);
}

/* What the loader and the shell live on stays the user's. */
static bool name_is_allowed(const char *name) {
    static const char *const never[] = {"LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PATH", NULL};
    for (int i = 0; never[i] != NULL; i++)
        if (strcmp(name, never[i]) == 0)
            return false;
    return strncmp(name, "EP_OVERLAP_", 11) != 0 && strncmp(name, "SLURM_", 6) != 0;
}

static bool name_is_well_formed(const char *name) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_";
    return strspn(name, letters) > 0 &&
           name[strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_0123456789")] ==
               '\0';
}

static epo_status read_when(const struct reader *reader, const config_setting_t *setting,
                            void *field) {
    static const char *const words[] = {
        [EPO_WHEN_UNSET] = "unset", [EPO_WHEN_ALWAYS] = "always", NULL};
    return config_read_word(reader, setting, words, field);
}

static epo_status read_variable(const struct reader *reader, const config_setting_t *setting,
                                void *field) {
    static const struct config_key keys[] = {
        {"name", config_read_text, offsetof(struct epo_site_env, name)},
        {"value", config_read_text, offsetof(struct epo_site_env, value)},
        {"when", read_when, offsetof(struct epo_site_env, when)},
        {NULL, NULL, 0}};
    struct epo_site_env *variable = field;
    variable->line = (int)config_setting_source_line(setting);
    epo_status status = config_read_group(reader, setting, keys, variable);
    if (status != EPO_OK)
        return status;
    if (variable->name == NULL || variable->value == NULL)
        return config_fail(reader, setting, "a variable needs name and value");
    if (!name_is_well_formed(variable->name))
        return config_fail(reader, setting, "name: \"%s\" is no name of a variable",
                           variable->name);
    if (!name_is_allowed(variable->name))
        return config_fail(reader, setting,
                           "name: %s is never set from here (nor LD_PRELOAD, LD_LIBRARY_PATH, "
                           "LD_AUDIT, PATH, EP_OVERLAP_*, SLURM_*)",
                           variable->name);
    return EPO_OK;
}

/* Every variable is written down in EP_OVERLAP_SET, beside our own. */
#define VARIABLES_MAX 32

static epo_status read_environment(const struct reader *reader, const config_setting_t *setting,
                                   void *field) {
    struct epo_config *config = field;
    epo_status status =
        config_read_list(reader, setting, sizeof *config->environment, read_variable,
                         (void **)&config->environment, &config->environment_count);
    if (status == EPO_OK && config->environment_count > VARIABLES_MAX)
        status = config_fail(reader, setting, "environment: %d variables, allowed at most %d",
                             config->environment_count, VARIABLES_MAX);
    return status;
}

static epo_status read_probe(const struct reader *reader, const config_setting_t *setting,
                             void *field) {
    static const struct config_key keys[] = {
        {"path", read_path, offsetof(struct epo_config, probe_path)}, {NULL, NULL, 0}};
    return config_read_group(reader, setting, keys, field);
}

static epo_status read_preload(const struct reader *reader, const config_setting_t *setting,
                               void *field) {
    static const struct config_key keys[] = {
        {"path", read_preload_path, offsetof(struct epo_config, preload_path)},
        {"interpose", config_read_bool, offsetof(struct epo_config, interpose)},
        {"record", config_read_bool, offsetof(struct epo_config, record)},
        {NULL, NULL, 0}};
    return config_read_group(reader, setting, keys, field);
}

static epo_status read_log(const struct reader *reader, const config_setting_t *setting,
                           void *field) {
    static const struct config_key keys[] = {
        {"step_line", config_read_bool, offsetof(struct epo_config, step_line)}, {NULL, NULL, 0}};
    return config_read_group(reader, setting, keys, field);
}

static epo_status read_on_failed(const struct reader *reader, const config_setting_t *setting,
                                 void *field) {
    static const char *const words[] = {
        [EPO_FAILED_FAIL] = "fail", [EPO_FAILED_WARN] = "warn", NULL};
    return config_read_word(reader, setting, words, field);
}

static const struct config_key file_keys[] = {
    {"version", read_version, 0},
    {"defaults", read_defaults, offsetof(struct epo_config, defaults)},
    {"policy", read_policy, 0},
    {"node_classes", read_classes, 0},
    {"checks", read_checks, offsetof(struct epo_config, checks)},
    {"environment", read_environment, 0},
    {"preload", read_preload, 0},
    {"probe", read_probe, 0},
    {"log", read_log, 0},
    {"on_failed_request", read_on_failed, offsetof(struct epo_config, on_failed_request)},
    {NULL, NULL, 0}};

epo_status epo_config_builtin(struct epo_config **config) {
    struct epo_config *made = calloc(1, sizeof *made);
    if (made == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for the configuration");
    for (int i = 0; i < EPO_OPT_COUNT; i++)
        made->defaults[i] = EPO_UNSET;
    made->checks.timeout_ms = 5000;
    made->step_line = true;
    *config = made;
    return EPO_OK;
}

/* The line of an @include, 0 when there is none.  Included files would be opened
 * by libconfig, unchecked. */
static int line_of_include(const char *text) {
    for (int line = 1;; line++) {
        if (strncmp(text + strspn(text, " \t"), "@include", 8) == 0)
            return line;
        text = strchr(text, '\n');
        if (text == NULL)
            return 0;
        text++;
    }
}

static epo_status parse_into(const config_t *file, const struct reader *reader,
                             struct epo_config *config) {
    const config_setting_t *root = config_root_setting(file);
    if (config_setting_get_member(root, "version") == NULL)
        return epo_fail(EPO_E_ARG, "%s:1: the file does not say its version; add version = 1;",
                        reader->path);
    epo_status status = config_read_group(reader, root, file_keys, config);
    if (status == EPO_OK && (config->path = strdup(reader->path)) == NULL)
        status = epo_fail(EPO_E_NOMEM, "%s: no memory", reader->path);
    return status;
}

epo_status epo_config_parse(const char *text, const char *path, struct epo_config **config) {
    int line = line_of_include(text);
    if (line > 0)
        return epo_fail(EPO_E_ARG, "%s:%d: @include is not allowed; keep one file", path, line);
    struct epo_config *made = NULL;
    struct reader reader = {path};
    config_t file;
    config_init(&file);
    epo_status status = epo_config_builtin(&made);
    if (status == EPO_OK && config_read_string(&file, text) != CONFIG_TRUE)
        status = epo_fail(EPO_E_ARG,
                          "%s:%d: %s; see ep_overlap.conf(5): NAME = VALUE; and NAME = { ... };",
                          path, config_error_line(&file), config_error_text(&file));
    if (status == EPO_OK)
        status = parse_into(&file, &reader, made);
    config_destroy(&file);
    if (status == EPO_OK)
        *config = made;
    else
        epo_config_destroy(made);
    return status;
}

epo_status epo_config_load(const char *path, bool required, const struct epo_trust *trust,
                           struct epo_config **config) {
    char *text = NULL;
    bool absent = false;
    epo_status status = epo_trust_read(path, trust, EPO_CONFIG_BYTES_MAX, &text, &absent);
    if (status != EPO_OK && absent && !required)
        return epo_config_builtin(config);
    if (status == EPO_OK)
        status = epo_config_parse(text, path, config);
    free(text);
    return status;
}

static void destroy_rules(struct epo_config *config) {
    for (int i = 0; i < config->rule_count; i++) {
        struct epo_policy_rule *rule = &config->rules[i];
        free(rule->user.items);
        free(rule->group.items);
        config_words_clear(&rule->partition);
        config_words_clear(&rule->account);
        free(rule->node);
        free(rule->message);
    }
    free(config->rules);
}

static void destroy_classes(struct epo_config *config) {
    for (int i = 0; i < config->class_count; i++) {
        free(config->classes[i].name);
        free(config->classes[i].node);
        free(config->classes[i].gres);
    }
    free(config->classes);
    for (int i = 0; i < config->environment_count; i++) {
        free(config->environment[i].name);
        free(config->environment[i].value);
    }
    free(config->environment);
}

void epo_config_destroy(struct epo_config *config) {
    if (config == NULL)
        return;
    destroy_rules(config);
    destroy_classes(config);
    free(config->checks.driver);
    free(config->checks.cuda);
    free(config->checks.nccl);
    free(config->checks.torch);
    free(config->checks.te);
    free(config->checks.nvml_path);
    free(config->preload_path);
    free(config->probe_path);
    free(config->path);
    free(config);
}
