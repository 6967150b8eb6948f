/* SPDX-License-Identifier: Apache-2.0
 *
 * The success criteria: configuration valid, run complete, throughput not lower,
 * loss consistent, memory under the gate, and the comparison itself sound.
 */
#include "report.h"

#include "core/status.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define CORRELATION_MIN 0.95 /* Bridge's own acceptance thresholds */
#define FINAL_LOSS_MAX 0.03

const char *report_criterion_name(report_criterion criterion) {
    static const char *const names[] = {"configuration valid",   "run complete",
                                        "throughput not lower",  "loss consistent",
                                        "memory under the gate", "comparison sound"};
    return names[criterion];
}

const char *report_answer_name(report_answer answer) {
    static const char *const names[] = {"yes", "no", "undecided"};
    return names[answer];
}

static void find(report_arm *arm, report_criterion criterion, report_answer answer,
                 const char *format, ...) __attribute__((format(printf, 4, 5)));
static void find(report_arm *arm, report_criterion criterion, report_answer answer,
                 const char *format, ...) {
    va_list args;
    va_start(args, format);
    arm->finding[criterion].answer = answer;
    vsnprintf(arm->finding[criterion].why, sizeof arm->finding[criterion].why, format, args);
    va_end(args);
}

static epo_status judge_configuration(report_arm *arm) {
    char ids[256] = "";
    size_t errors = 0, undecided = 0;
    if (epo_facts_count(arm->printed) == 0) {
        find(arm, REPORT_VALID, REPORT_UNDECIDED, "the log holds no configuration; see lint");
        return EPO_OK;
    }
    for (size_t i = 0; i < epo_rules_count(); i++) {
        const epo_rule *rule = epo_rules_at(i);
        epo_rule_verdict v;
        if (rule->scope == EPO_SCOPE_AB || rule->scope == EPO_SCOPE_PROFILE)
            continue;
        epo_status status = epo_rules_evaluate(rule, arm->facts, &v);
        if (status != EPO_OK)
            return status;
        undecided += v.outcome == EPO_RULE_UNDECIDED;
        if (v.outcome != EPO_RULE_VIOLATED || v.severity != EPO_SEVERITY_ERROR)
            continue;
        errors++;
        size_t used = strlen(ids);
        snprintf(ids + used, sizeof ids - used, " %s", rule->id);
    }
    if (errors > 0)
        find(arm, REPORT_VALID, REPORT_NO, "%zu rules violated:%s", errors, ids);
    else
        find(arm, REPORT_VALID, REPORT_YES, "no rule violated, %zu undecided", undecided);
    return EPO_OK;
}

static void judge_completeness(report_arm *arm) {
    const epo_log *log = arm->log;
    int64_t last = log->iteration[log->count - 1].number;
    int64_t planned = log->planned; /* NeMo counts from 0 and prints its last number */
    if (log->failure_line != 0)
        find(arm, REPORT_COMPLETE, REPORT_NO, "line %llu: %s",
             (unsigned long long)log->failure_line, log->failure);
    else if (planned == 0)
        find(arm, REPORT_COMPLETE, REPORT_UNDECIDED, "the log does not tell how many were planned");
    else if (last + log->interval <= planned)
        find(arm, REPORT_COMPLETE, REPORT_NO, "ends at iteration %lld of %lld", (long long)last,
             (long long)planned);
    else
        find(arm, REPORT_COMPLETE, REPORT_YES, "%lld of %lld iterations%s", (long long)last,
             (long long)planned, log->restarts > 0 ? ", restarted in between" : "");
}

static double standard_error(const epo_summary *s) {
    return s->count > 0 ? s->deviation / sqrt((double)s->count) / s->mean : NAN;
}

static void compare_times(const report_arm *base, report_arm *arm) {
    const epo_summary *a = &base->stats.time_ms, *b = &arm->stats.time_ms;
    arm->speedup = a->mean / b->mean;
    arm->time_change = b->mean / a->mean - 1;
    arm->throughput_change = NAN;
    if (base->stats.tflops.count > 0 && arm->stats.tflops.count > 0)
        arm->throughput_change = arm->stats.tflops.mean / base->stats.tflops.mean - 1;
    else if (base->stats.tokens.count > 0 && arm->stats.tokens.count > 0)
        arm->throughput_change = arm->stats.tokens.mean / base->stats.tokens.mean - 1;
    arm->noise = 2 * hypot(standard_error(a), standard_error(b));
}

static void judge_speed(report_arm *arm) {
    double change = arm->time_change;
    if (change <= 0)
        find(arm, REPORT_FASTER, REPORT_YES, "%.3fx, %.3f %% of the time saved%s", arm->speedup,
             100 * (0 - change), -change < arm->noise ? ": within the noise" : "");
    else if (change <= arm->noise)
        find(arm, REPORT_FASTER, REPORT_YES,
             "%.3fx: %.3f %% more time, within the noise of %.3f %%", arm->speedup, 100 * change,
             100 * arm->noise);
    else
        find(arm, REPORT_FASTER, REPORT_NO, "%.3fx: %.3f %% more time, noise %.3f %%", arm->speedup,
             100 * change, 100 * arm->noise);
}

static void judge_loss(report_arm *arm, bool identical_wanted) {
    const epo_loss_comparison *l = &arm->loss;
    double scale = fmax(fabs(l->final_a), fabs(l->final_b));
    double final = scale > 0 ? fabs(l->final_a - l->final_b) / scale : 0;
    bool correlated =
        isnan(l->correlation) ? l->largest <= FINAL_LOSS_MAX : l->correlation >= CORRELATION_MIN;
    if (l->lost > 0)
        find(arm, REPORT_LOSS, REPORT_NO, "NaN loss in %zu iterations", l->lost);
    else if (l->common == 0)
        find(arm, REPORT_LOSS, REPORT_UNDECIDED, "no iteration has a loss in both logs");
    else if (l->identical == l->common)
        find(arm, REPORT_LOSS, REPORT_YES, "identical as printed, %zu iterations", l->common);
    else if (identical_wanted)
        find(arm, REPORT_LOSS, REPORT_NO,
             "%zu of %zu iterations differ, by %.2e at most (iteration %lld)",
             l->common - l->identical, l->common, l->largest, (long long)l->largest_at);
    else
        find(arm, REPORT_LOSS, correlated && final <= FINAL_LOSS_MAX ? REPORT_YES : REPORT_NO,
             "correlation %.4f (at least %.2f), final differs by %.3f %% (at most %.0f %%), "
             "largest %.3f %% at iteration %lld",
             l->correlation, CORRELATION_MIN, 100 * final, 100 * FINAL_LOSS_MAX, 100 * l->largest,
             (long long)l->largest_at);
}

/* What the allocator holds counts; without it what was allocated. */
static double peak_of(const epo_log *log) {
    return isnan(log->peak_reserved) ? log->peak_allocated : log->peak_reserved;
}

static void judge_memory(report_arm *arm, double gate) {
    double peak = peak_of(arm->log);
    if (isnan(gate))
        find(arm, REPORT_MEMORY, REPORT_UNDECIDED, "no --memory-gate was given");
    else if (isnan(peak))
        find(arm, REPORT_MEMORY, REPORT_UNDECIDED, "the log tells no peak memory");
    else
        find(arm, REPORT_MEMORY, peak <= gate ? REPORT_YES : REPORT_NO,
             "%.3f GiB %s, gate %.3f GiB", peak / 1073741824.0,
             isnan(arm->log->peak_reserved) ? "allocated" : "reserved", gate / 1073741824.0);
}

static epo_status put_bool(epo_facts *f, const char *key, bool value) {
    return epo_facts_set(f, key, value ? "true" : "false", "the logs");
}

static epo_status put_number(epo_facts *f, const char *key, double value) {
    char text[32];
    if (!isfinite(value))
        return EPO_OK;
    snprintf(text, sizeof text, "%.9g", value);
    return epo_facts_set(f, key, text, "the logs");
}

static bool is_delayed(const report_arm *arm) {
    return epo_fact_is_true(epo_facts_find(arm->facts, "delay_wgrad_compute"));
}

/* The arm with overlap alone, that a delayed one is held against. */
static const report_arm *plain_overlap(const report *r) {
    for (size_t i = 1; i < r->arms; i++)
        if (!is_delayed(&r->arm[i]) &&
            epo_fact_is_true(epo_facts_find(r->arm[i].facts, "overlap_moe_expert_parallel_comm")))
            return &r->arm[i];
    return NULL;
}

/* The facts that rules of scope ab read, of one arm and the baseline. */
static epo_status ab_facts(const report *r, const report_arm *arm, epo_facts *f) {
    const epo_window_stats *a = &r->arm[0].stats, *b = &arm->stats;
    const report_arm *plain = plain_overlap(r);
    double gate = r->options.gate;
    epo_status status = put_bool(f, "ab.window_has_warmup",
                                 a->has_warmup || b->has_warmup || a->has_save || b->has_save ||
                                     a->has_evaluation || b->has_evaluation);
    if (status == EPO_OK)
        status = put_bool(f, "ab.profiler_active", a->has_profiler || b->has_profiler);
    if (status == EPO_OK)
        status = put_number(f, "ab.skipped_iterations", a->skipped + b->skipped);
    if (status == EPO_OK)
        status = put_number(f, "ab.nan_iterations",
                            a->nans + b->nans + (double)a->lossless + (double)b->lossless);
    if (status == EPO_OK)
        status = put_number(f, "ab.log_interval",
                            fmax((double)r->arm[0].log->interval, (double)arm->log->interval));
    if (status == EPO_OK && arm->finding[REPORT_LOSS].answer != REPORT_UNDECIDED)
        status = put_bool(f, "ab.loss_consistent", arm->finding[REPORT_LOSS].answer == REPORT_YES);
    if (status == EPO_OK && !isnan(gate))
        status = put_number(f, "ab.memory_gate_gib", gate / 1073741824.0);
    if (status == EPO_OK && !isnan(gate))
        status = put_number(f, "ab.peak_memory_gib", peak_of(arm->log) / 1073741824.0);
    if (status == EPO_OK && plain != NULL && is_delayed(arm)) {
        status =
            put_number(f, "ab.delay_gain", 1 - arm->stats.time_ms.mean / plain->stats.time_ms.mean);
        if (status == EPO_OK)
            status = put_number(f, "ab.noise",
                                2 * hypot(standard_error(&arm->stats.time_ms),
                                          standard_error(&plain->stats.time_ms)));
    }
    return status;
}

static epo_status judge_soundness(const report *r, report_arm *arm) {
    epo_facts *f = epo_facts_create();
    epo_status status = f == NULL ? epo_fail(EPO_E_NOMEM, "no memory") : ab_facts(r, arm, f);
    char ids[128] = "";
    bool failed = false;
    for (size_t i = 0; i < epo_rules_count() && status == EPO_OK; i++) {
        const epo_rule *rule = epo_rules_at(i);
        epo_rule_verdict v;
        bool concerns = rule->scope == EPO_SCOPE_AB || strcmp(rule->id, "DWG-018") == 0;
        if (!concerns || (status = epo_rules_evaluate(rule, f, &v)) != EPO_OK ||
            v.outcome != EPO_RULE_VIOLATED || arm->violations == 16)
            continue;
        arm->violated[arm->violations++] = v;
        /* loss and memory have criteria of their own */
        bool own = strcmp(rule->id, "ABP-004") != 0 && strcmp(rule->id, "ABP-008") != 0;
        if (own && v.severity >= EPO_SEVERITY_WARN) {
            size_t used = strlen(ids);
            snprintf(ids + used, sizeof ids - used, " %s", rule->id);
            /* a derived rule warns at most, but skipped and NaN iterations spoil a mean */
            failed = failed || v.severity == EPO_SEVERITY_ERROR || strcmp(rule->id, "ABP-006") == 0;
        }
    }
    if (ids[0] == '\0')
        find(arm, REPORT_SOUND, REPORT_YES, "settings, window and iterations are alike");
    else
        find(arm, REPORT_SOUND, failed ? REPORT_NO : REPORT_YES, "%s:%s",
             failed ? "not sound" : "with reservations", ids);
    if (epo_facts_count(r->arm[0].printed) == 0 || epo_facts_count(arm->printed) == 0)
        if (arm->finding[REPORT_SOUND].answer == REPORT_YES)
            find(arm, REPORT_SOUND, REPORT_UNDECIDED,
                 "a log without configuration: whether the arms differ in more is not known%s%s",
                 ids[0] != '\0' ? ";" : "", ids);
    epo_facts_destroy(f);
    return status;
}

static void conclude(report_arm *arm, size_t first) {
    arm->verdict = REPORT_YES;
    for (size_t c = first; c < REPORT_CRITERIA; c++) {
        if (arm->finding[c].answer == REPORT_NO)
            arm->verdict = REPORT_NO;
        else if (arm->finding[c].answer == REPORT_UNDECIDED && arm->verdict == REPORT_YES)
            arm->verdict = REPORT_UNDECIDED;
    }
}

epo_status report_judge(report *r) {
    for (size_t i = 0; i < r->arms; i++) {
        report_arm *arm = &r->arm[i];
        epo_status status = judge_configuration(arm);
        if (status != EPO_OK)
            return status;
        judge_completeness(arm);
        judge_memory(arm, r->options.gate);
        if (i == 0) {
            find(arm, REPORT_FASTER, REPORT_YES, "the baseline");
            find(arm, REPORT_SOUND, REPORT_YES, "the baseline");
            bool lost = arm->stats.lossless > 0;
            find(arm, REPORT_LOSS, lost ? REPORT_NO : REPORT_YES,
                 lost ? "NaN loss in %zu iterations" : "%zu NaN losses", arm->stats.lossless);
            conclude(arm, 0);
            continue;
        }
        compare_times(&r->arm[0], arm);
        judge_speed(arm);
        epo_log_compare_losses(r->arm[0].log, arm->log, &arm->loss);
        judge_loss(arm, r->options.identical);
        if ((status = judge_soundness(r, arm)) != EPO_OK)
            return status;
        conclude(arm, 0);
    }
    return EPO_OK;
}
