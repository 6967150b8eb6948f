/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include "core/status.h"
#include "rules/settings.h"
#include "tool.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static epo_status put_setting(void *context, const char *path, const char *value, uint64_t line) {
    report_arm *arm = context;
    char source[300];
    snprintf(source, sizeof source, "%.200s:%llu", arm->path, (unsigned long long)line);
    epo_status status = epo_facts_set(arm->printed, path, value, source);
    return status == EPO_OK ? epo_setting_put(arm->facts, path, value, source, NULL) : status;
}

/* "3-8" at the end of "train.log@3-8". */
static bool parse_window(const char *text, epo_window *window) {
    long long first, last;
    int end = 0;
    if (sscanf(text, "%lld-%lld%n", &first, &last, &end) != 2 || text[end] != '\0' || first < 0 ||
        last < first)
        return false;
    *window = (epo_window){first, last};
    return true;
}

static void name_from_path(report_arm *arm) {
    const char *slash = strrchr(arm->path, '/');
    const char *base = epo_tool_shown(slash == NULL ? arm->path : slash + 1);
    size_t length = strcspn(base, ".");
    snprintf(arm->name, sizeof arm->name, "%.*s", (int)(length > 0 ? length : strlen(base)), base);
}

/* Splits "[NAME=]FILE[@A-B]"; the path points into `copy`. */
static void split_arm(report_arm *arm, char *copy, epo_window *window) {
    char *at = strrchr(copy, '@');
    if (at != NULL && access(copy, F_OK) != 0 && parse_window(at + 1, window)) {
        *at = '\0';
        arm->has_window = true;
    }
    char *equals = strchr(copy, '=');
    arm->path = copy;
    if (equals != NULL && equals > copy && access(copy, F_OK) != 0) {
        *equals = '\0';
        snprintf(arm->name, sizeof arm->name, "%.60s", epo_tool_shown(copy));
        arm->path = equals + 1;
        arm->is_named = true;
    } else {
        name_from_path(arm);
    }
}

static epo_status apply_sets(report_arm *arm, const report_options *o) {
    epo_status status = EPO_OK;
    for (size_t i = 0; i < o->sets && status == EPO_OK; i++) {
        char key[128];
        size_t length = strcspn(o->set[i], "=");
        snprintf(key, sizeof key, "%.*s", (int)length, o->set[i]);
        status = epo_facts_set(arm->facts, key, o->set[i] + length + 1, "--set");
    }
    return status;
}

/* What the log does not print is the framework's default, if it prints differences only. */
static epo_status finish_facts(report_arm *arm) {
    epo_status status = EPO_OK;
    const char *framework = arm->log->kind == EPO_LOG_BRIDGE        ? "bridge"
                            : arm->log->kind == EPO_LOG_MEGATRON_LM ? "megatron-lm"
                            : arm->log->kind == EPO_LOG_EP_TRAIN    ? "ep-train"
                            : arm->log->kind == EPO_LOG_TORCHTITAN  ? "torchtitan"
                                                                    : "nemo";
    status = epo_facts_set(arm->facts, "framework", framework, arm->path);
    if (status == EPO_OK && arm->log->dump.kind == EPO_DUMP_BRIDGE && arm->log->dump.complete)
        status = epo_settings_default(arm->facts, EPO_DEFAULTS_MEGATRON_CORE);
    return status == EPO_OK ? epo_settings_derive(arm->facts) : status;
}

static epo_status measure(report_arm *arm, epo_window own, const report_options *o) {
    epo_window window = arm->has_window ? own
                        : o->has_window ? o->window
                                        : epo_log_steady_window(arm->log);
    if (arm->log->count == 0)
        return epo_fail(
            EPO_E_ARG,
            "%s: no iteration line in %llu lines; those of Megatron-LM, Bridge, NeMo, torchtitan "
            "and ep-train are read (\"iteration N/ M | ...\")",
            arm->path, (unsigned long long)arm->log->lines);
    epo_status status = epo_log_stats(arm->log, window, &arm->stats);
    if (status != EPO_OK) {
        char text[EPO_ERROR_MAX];
        snprintf(text, sizeof text, "%s", epo_fail_text());
        return epo_fail(status, "%s: %s", arm->path, text);
    }
    return EPO_OK;
}

epo_status report_arm_load(report_arm *arm, const char *text, const report_options *o) {
    char *copy = strdup(text);
    epo_window own = {0, -1};
    if (copy == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory");
    split_arm(arm, copy, &own);
    char *path = strdup(arm->path);
    arm->path = path == NULL ? NULL : strdup(epo_tool_shown(epo_lines_name(path)));
    free(copy);
    arm->printed = epo_facts_create();
    arm->facts = epo_facts_create();
    epo_status status =
        arm->path == NULL || arm->printed == NULL || arm->facts == NULL
            ? epo_fail(EPO_E_NOMEM, "no memory")
            : epo_log_read(path, epo_tool_progress, (void *)arm->path, put_setting, arm, &arm->log);
    free(path);
    epo_tool_progress_end();
    if (status == EPO_OK)
        status = measure(arm, own, o);
    if (status == EPO_OK)
        status = finish_facts(arm);
    return status == EPO_OK ? apply_sets(arm, o) : status;
}

void report_arm_free(report_arm *arm) {
    epo_log_destroy(arm->log);
    epo_facts_destroy(arm->printed);
    epo_facts_destroy(arm->facts);
    free((char *)arm->path);
}

static bool is_one_of(const char *name, const char *const *names) {
    for (; *names != NULL; names++)
        if (strcmp(*names, name) == 0)
            return true;
    return false;
}

/* What an A/B of the overlap is about. */
static bool is_overlap_setting(const char *leaf) {
    static const char *const names[] = {"overlap_moe_expert_parallel_comm",
                                        "delay_wgrad_compute",
                                        "moe_shared_expert_overlap",
                                        "ep_overlap_early_attn_memory_release",
                                        "high_priority_a2a_comm_stream",
                                        "cuda_device_max_connections",
                                        NULL};
    return is_one_of(leaf, names);
}

/* Names of outputs and of the run itself: they never make arms different. */
static bool is_about_the_run(const char *leaf) {
    static const char *const names[] = {"save",
                                        "tensorboard_dir",
                                        "wandb_exp_name",
                                        "wandb_save_dir",
                                        "wandb_project",
                                        "wandb_entity",
                                        "wandb_exp_id",
                                        "log_dir",
                                        "config_logger_dir",
                                        "save_config_filepath",
                                        "rank",
                                        "local_rank",
                                        "one_logger_run_name",
                                        "one_logger_project",
                                        "exit_interval",
                                        "exit_duration_in_mins",
                                        "train_iters",
                                        "eval_interval",
                                        "eval_iters",
                                        "save_interval",
                                        "non_persistent_local_ckpt_dir",
                                        "async_save",
                                        "name",
                                        "run_name",
                                        "wandb_name",
                                        NULL};
    return is_one_of(leaf, names);
}

static bool is_allowed(const report *r, const char *path, const char *leaf) {
    for (size_t i = 0; i < r->options.allowed; i++)
        if (strcmp(r->options.allow[i], path) == 0 || strcmp(r->options.allow[i], leaf) == 0)
            return true;
    return false;
}

static void note(report *r, const report_arm *arm, const char *path, const char *a, const char *b) {
    const char *dot = strrchr(path, '.');
    const char *leaf = dot == NULL ? path : dot + 1;
    if (is_about_the_run(leaf))
        return;
    bool permitted = is_overlap_setting(leaf) || is_allowed(r, path, leaf);
    if (!permitted && r->forbidden++ == 0)
        snprintf(r->differing, sizeof r->differing, "%.40s", arm->name);
    if (r->differences == REPORT_DIFFERENCES_MAX)
        return;
    report_difference *d = &r->difference[r->differences++];
    d->arm = arm->name;
    d->permitted = permitted;
    snprintf(d->name, sizeof d->name, "%.90s", path);
    snprintf(d->value[0], sizeof d->value[0], "%.90s", a);
    snprintf(d->value[1], sizeof d->value[1], "%.90s", b);
}

static const char *text_of(const epo_fact *fact) {
    return fact == NULL ? "not printed" : fact->kind == EPO_FACT_NULL ? "None" : fact->text;
}

static bool same_value(const epo_fact *a, const epo_fact *b) {
    return a != NULL && b != NULL && a->kind == b->kind && strcmp(a->text, b->text) == 0;
}

static void compare_printed(report *r, const report_arm *base, const report_arm *arm) {
    if (epo_facts_count(base->printed) == 0 || epo_facts_count(arm->printed) == 0)
        return;
    for (size_t i = 0; i < epo_facts_count(base->printed); i++) {
        const epo_fact *a = epo_facts_at(base->printed, i);
        const epo_fact *b = epo_facts_find(arm->printed, a->key);
        if (!same_value(a, b))
            note(r, arm, a->key, text_of(a), text_of(b));
    }
    for (size_t i = 0; i < epo_facts_count(arm->printed); i++) {
        const epo_fact *b = epo_facts_at(arm->printed, i);
        if (epo_facts_find(base->printed, b->key) == NULL)
            note(r, arm, b->key, text_of(NULL), text_of(b));
    }
}

/* The batch stands on every iteration line, with or without a dump. */
static void compare_batches(report *r, const report_arm *base, const report_arm *arm) {
    double a = base->log->iteration[base->log->count - 1].batch;
    double b = arm->log->iteration[arm->log->count - 1].batch;
    char text[2][32];
    if (isnan(a) || isnan(b) || a == b)
        return;
    snprintf(text[0], sizeof text[0], "%.0f", a);
    snprintf(text[1], sizeof text[1], "%.0f", b);
    note(r, arm, "global batch size (iteration lines)", text[0], text[1]);
}

static report_arm *same_name(report *r, size_t arm) {
    for (size_t i = 0; i < arm; i++)
        if (strcmp(r->arm[i].name, r->arm[arm].name) == 0)
            return &r->arm[i];
    return NULL;
}

/* The path, or as much of its end as there is room for. */
static void name_by_path(report_arm *arm) {
    size_t length = strlen(arm->path), room = sizeof arm->name - 1;
    if (!arm->is_named)
        snprintf(arm->name, sizeof arm->name, "%s",
                 arm->path + (length > room ? length - room : 0));
}

const char *report_arms_tell_apart(report *r) {
    for (size_t i = 1; i < r->arms; i++) {
        report_arm *other = same_name(r, i);
        if (other != NULL && r->arm[i].is_named && other->is_named)
            return other->name;
        if (other != NULL) {
            name_by_path(&r->arm[i]);
            name_by_path(other);
        }
    }
    return NULL;
}

void report_compare_settings(report *r) {
    for (size_t i = 1; i < r->arms; i++) {
        compare_printed(r, &r->arm[0], &r->arm[i]);
        compare_batches(r, &r->arm[0], &r->arm[i]);
    }
}
