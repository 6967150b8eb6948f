/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include "json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static void memory_text(double bytes, char *text, size_t size) {
    if (isnan(bytes))
        snprintf(text, size, "-");
    else
        snprintf(text, size, "%.3f GB = %.3f GiB", bytes / 1e9, bytes / 1073741824.0);
}

static void print_arm(const report *r, size_t index) {
    const report_arm *arm = &r->arm[index];
    const epo_summary *t = &arm->stats.time_ms;
    char allocated[64], reserved[64];
    memory_text(arm->log->peak_allocated, allocated, sizeof allocated);
    memory_text(arm->log->peak_reserved, reserved, sizeof reserved);
    printf("\n%s%s: %s (%s)\n", arm->name, index == 0 && r->arms > 1 ? " (baseline)" : "",
           arm->path, epo_log_kind_name(arm->log->kind));
    printf("  %-14s %lld-%lld, %zu line%s\n", "window", (long long)arm->stats.window.first,
           (long long)arm->stats.window.last, arm->stats.iterations,
           arm->stats.iterations == 1 ? "" : "s");
    printf("  %-14s mean %.4f s, median %.4f s, %.4f .. %.4f, deviation %.2f %%\n", "iteration",
           t->mean / 1e3, t->median / 1e3, t->least / 1e3, t->most / 1e3,
           100 * t->deviation / t->mean);
    if (arm->stats.tflops.count > 0)
        printf("  %-14s %.3f TFLOP/s per GPU\n", "throughput", arm->stats.tflops.mean);
    if (arm->stats.tokens.count > 0)
        printf("  %-14s %.1f tokens/s per GPU\n", "tokens", arm->stats.tokens.mean);
    printf("  %-14s allocated %s, reserved %s\n", "peak memory", allocated, reserved);
    if (arm->stats.restarts > 0)
        printf("  %-14s the first iteration behind each restart: %zu\n", "not counted",
               arm->stats.restarts);
    if (arm->stats.skipped > 0 || arm->stats.nans > 0 || arm->stats.lossless > 0)
        printf("  %-14s %.0f skipped, %.0f NaN iterations, %zu NaN losses\n", "not counted",
               arm->stats.skipped, arm->stats.nans, arm->stats.lossless);
    if (arm->log->cut_lines > 0)
        printf("  %-14s lines cut at %d bytes: %llu\n", "log", EPO_LINE_MAX,
               (unsigned long long)arm->log->cut_lines);
}

static void print_table(const report *r) {
    printf("\n%-20s %12s %10s %12s %14s\n", "arm", "iteration", "speed-up", "time", "throughput");
    for (size_t i = 0; i < r->arms; i++) {
        const report_arm *arm = &r->arm[i];
        char throughput[32] = "-";
        if (i > 0 && !isnan(arm->throughput_change))
            snprintf(throughput, sizeof throughput, "%+.3f %%", 100 * arm->throughput_change);
        if (i == 0)
            printf("%-20s %10.4f s %9.3fx\n", arm->name, arm->stats.time_ms.mean / 1e3, 1.0);
        else
            printf("%-20s %10.4f s %9.3fx %+10.3f %% %14s\n", arm->name,
                   arm->stats.time_ms.mean / 1e3, arm->speedup, 100 * arm->time_change, throughput);
    }
}

static void print_differences(const report *r) {
    if (r->differences == 0)
        return;
    printf("\nsettings that differ from the baseline's\n");
    for (size_t i = 0; i < r->differences; i++)
        printf("  %-14s %-38s %s -> %s\n", r->difference[i].arm, r->difference[i].name,
               r->difference[i].value[0], r->difference[i].value[1]);
}

static void print_verdict(const report *r, const report_arm *arm, bool with_violations) {
    printf("\n%s: %s\n", arm->name,
           arm->verdict == REPORT_YES  ? "YES"
           : arm->verdict == REPORT_NO ? "NO"
                                       : "nothing against it, not everything decided");
    for (int c = 0; c < REPORT_CRITERIA; c++)
        if (r->arms > 1 || (c != REPORT_FASTER && c != REPORT_SOUND)) /* those compare */
            printf("  %-10s %-24s %s\n", report_answer_name(arm->finding[c].answer),
                   report_criterion_name((report_criterion)c), arm->finding[c].why);
    for (size_t i = 0; with_violations && i < arm->violations; i++)
        printf("  %-10s %-24s %s\n", epo_severity_name(arm->violated[i].severity),
               arm->violated[i].rule->id, arm->violated[i].rule->remedy);
}

void report_print_text(const report *r) {
    for (size_t i = 0; i < r->arms; i++)
        print_arm(r, i);
    if (r->arms > 1)
        print_table(r);
    print_differences(r);
    for (size_t i = r->arms > 1 ? 1 : 0; i < r->arms; i++)
        print_verdict(r, &r->arm[i], true);
}

void report_print_refusal(const report *r) {
    fprintf(stderr,
            "ep-overlap report: %s and %s differ in %zu setting(s) besides the overlap; "
            "their times cannot be compared:\n",
            r->arm[0].name, r->differing, r->forbidden);
    for (size_t i = 0; i < r->differences; i++)
        if (!r->difference[i].permitted)
            fprintf(stderr, "  %-14s %-38s %s -> %s\n", r->difference[i].arm, r->difference[i].name,
                    r->difference[i].value[0], r->difference[i].value[1]);
    if (r->forbidden > REPORT_DIFFERENCES_MAX)
        fprintf(stderr, "  ...\n");
    fprintf(stderr, "make the arms alike, or name a difference that is meant: --allow NAME\n");
}

static void json_summary(epo_json *json, const char *name, const epo_summary *s, double scale) {
    if (s->count == 0) {
        epo_json_text(json, name, NULL);
        return;
    }
    epo_json_object(json, name);
    epo_json_integer(json, "count", (int64_t)s->count);
    epo_json_number(json, "mean", s->mean * scale);
    epo_json_number(json, "median", s->median * scale);
    epo_json_number(json, "least", s->least * scale);
    epo_json_number(json, "most", s->most * scale);
    epo_json_number(json, "deviation", s->deviation * scale);
    epo_json_end(json, '}');
}

static void json_loss(epo_json *json, const epo_loss_comparison *l) {
    epo_json_object(json, "loss");
    epo_json_integer(json, "common", (int64_t)l->common);
    epo_json_integer(json, "identical", (int64_t)l->identical);
    epo_json_integer(json, "lost", (int64_t)l->lost);
    epo_json_number(json, "correlation", l->correlation);
    epo_json_number(json, "largest_difference", l->largest);
    epo_json_integer(json, "largest_at", l->largest_at);
    epo_json_number(json, "final_baseline", l->final_a);
    epo_json_number(json, "final", l->final_b);
    epo_json_end(json, '}');
}

static void json_findings(epo_json *json, const report_arm *arm) {
    epo_json_array(json, "criteria");
    for (int c = 0; c < REPORT_CRITERIA; c++) {
        epo_json_object(json, NULL);
        epo_json_text(json, "name", report_criterion_name((report_criterion)c));
        epo_json_text(json, "answer", report_answer_name(arm->finding[c].answer));
        epo_json_text(json, "why", arm->finding[c].why);
        epo_json_end(json, '}');
    }
    epo_json_end(json, ']');
    epo_json_array(json, "violated");
    for (size_t i = 0; i < arm->violations; i++)
        epo_json_text(json, NULL, arm->violated[i].rule->id);
    epo_json_end(json, ']');
}

static void json_arm(epo_json *json, const report_arm *arm, bool is_baseline) {
    const epo_window_stats *s = &arm->stats;
    epo_json_object(json, NULL);
    epo_json_text(json, "name", arm->name);
    epo_json_text(json, "log", arm->path);
    epo_json_text(json, "framework", epo_log_kind_name(arm->log->kind));
    epo_json_integer(json, "first", s->window.first);
    epo_json_integer(json, "last", s->window.last);
    epo_json_integer(json, "planned", arm->log->planned);
    json_summary(json, "iteration_seconds", &s->time_ms, 1e-3);
    json_summary(json, "tflops_per_gpu", &s->tflops, 1);
    json_summary(json, "tokens_per_second_per_gpu", &s->tokens, 1);
    epo_json_number(json, "peak_allocated_bytes", arm->log->peak_allocated);
    epo_json_number(json, "peak_reserved_bytes", arm->log->peak_reserved);
    epo_json_integer(json, "restarts", (int64_t)arm->log->restarts);
    epo_json_number(json, "skipped_iterations", s->skipped);
    epo_json_number(json, "nan_iterations", s->nans);
    epo_json_integer(json, "nan_losses", (int64_t)s->lossless);
    if (!is_baseline) {
        epo_json_number(json, "speedup", arm->speedup);
        epo_json_number(json, "time_change", arm->time_change);
        epo_json_number(json, "throughput_change", arm->throughput_change);
        epo_json_number(json, "noise", arm->noise);
        json_loss(json, &arm->loss);
    }
    json_findings(json, arm);
    epo_json_text(json, "verdict", report_answer_name(arm->verdict));
    epo_json_end(json, '}');
}

void report_print_json(const report *r) {
    epo_json json = {.out = stdout};
    epo_json_object(&json, NULL);
    epo_json_bool(&json, "comparable", r->forbidden == 0);
    epo_json_array(&json, "arms");
    for (size_t i = 0; i < r->arms && r->forbidden == 0; i++)
        json_arm(&json, &r->arm[i], i == 0);
    epo_json_end(&json, ']');
    epo_json_array(&json, "differences");
    for (size_t i = 0; i < r->differences; i++) {
        epo_json_object(&json, NULL);
        epo_json_text(&json, "arm", r->difference[i].arm);
        epo_json_text(&json, "name", r->difference[i].name);
        epo_json_text(&json, "baseline", r->difference[i].value[0]);
        epo_json_text(&json, "other", r->difference[i].value[1]);
        epo_json_bool(&json, "permitted", r->difference[i].permitted);
        epo_json_end(&json, '}');
    }
    epo_json_end(&json, ']');
    epo_json_end(&json, '}');
}
