/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor.h"

#include "core/status.h"
#include "rules/rules.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void text(char *to, size_t size, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static void text(char *to, size_t size, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(to, size, format, args);
    va_end(args);
}

#define TEXT(finding, field, ...) text((finding)->field, sizeof(finding)->field, __VA_ARGS__)

static bool is_on(const doctor_file *file, const char *key) {
    return epo_fact_is_true(epo_facts_find(file->facts, key));
}

typedef struct values {
    const epo_facts *facts;
    char *text;
    size_t size;
} values;

static void add_value(const char *name, size_t length, void *context) {
    values *v = context;
    char key[256];
    snprintf(key, sizeof key, "%.*s", (int)length, name);
    const epo_fact *fact = epo_facts_find(v->facts, key);
    size_t used = strlen(v->text);
    if (fact == NULL || strstr(v->text, key) != NULL || used + 1 >= v->size)
        return;
    snprintf(v->text + used, v->size - used, "%s%.60s = %.60s (%.80s)", used > 0 ? ", " : "", key,
             fact->kind == EPO_FACT_NULL ? "unset" : fact->text, fact->source);
}

/* A rule that a symptom has named already is not said twice; it may weigh more. */
static bool is_named(doctor *d, const char *rule, epo_symptom_severity severity) {
    for (size_t i = 0; i < d->findings; i++)
        if (strcmp(d->finding[i].rule, rule) == 0) {
            if (d->finding[i].severity < severity)
                d->finding[i].severity = severity;
            return true;
        }
    return false;
}

static epo_status add_rules(doctor *d, const doctor_file *file) {
    for (size_t i = 0; i < epo_rules_count(); i++) {
        const epo_rule *rule = epo_rules_at(i);
        epo_rule_verdict v;
        epo_status status = epo_rules_evaluate(rule, file->facts, &v);
        if (status != EPO_OK)
            return status;
        epo_symptom_severity severity =
            v.severity == EPO_SEVERITY_ERROR ? EPO_SYMPTOM_PROBLEM : EPO_SYMPTOM_NOTE;
        if (v.outcome != EPO_RULE_VIOLATED || v.severity < EPO_SEVERITY_WARN ||
            is_named(d, rule->id, severity))
            continue;
        doctor_finding *f = doctor_add(d, rule->id, severity);
        if (f == NULL)
            return EPO_OK;
        values found = {file->facts, f->seen, sizeof f->seen};
        TEXT(f, title, "the configuration violates rule %s", rule->id);
        TEXT(f, where, "%.280s", file->path);
        epo_condition_names(rule->condition, add_value, &found);
        TEXT(f, cause, "needed: %s", rule->needed);
        TEXT(f, confirm, "ep-overlap explain %s", rule->id);
        TEXT(f, mend, "%s", rule->remedy);
        TEXT(f, rule, "%s", rule->id);
    }
    return EPO_OK;
}

static bool has_problem(const doctor *d, const doctor_file *file) {
    size_t length = strlen(file->path);
    for (size_t i = 0; i < d->findings; i++)
        if (d->finding[i].severity == EPO_SYMPTOM_PROBLEM &&
            strncmp(d->finding[i].where, file->path, length) == 0)
            return true;
    return false;
}

/* The log ends before the run does, and nothing in it says why. */
static void add_hang(doctor *d, const doctor_file *file) {
    const epo_log *log = file->log;
    const epo_iteration *last = &log->iteration[log->count - 1];
    if (log->planned == 0 || last->number + log->interval > log->planned || has_problem(d, file))
        return;
    doctor_finding *f = doctor_add(d, "ENDS-EARLY", EPO_SYMPTOM_PROBLEM);
    if (f == NULL)
        return;
    TEXT(f, title, "the log ends before the run, without an error");
    TEXT(f, where, "%.250s:%llu", file->path, (unsigned long long)last->line);
    TEXT(f, seen, "iteration %lld of %lld is the last", (long long)last->number,
         (long long)log->planned);
    TEXT(f, cause, "it still runs, it hangs, or it was killed from outside");
    TEXT(f, confirm,
         "sacct -j JOB -o State,ExitCode,Elapsed; py-spy dump on each rank while it hangs");
    TEXT(f, mend,
         "a hang under overlap: PyTorch >= 2.6.0, the same number of micro-batches and tokens "
         "on all ranks; else more time or memory");
}

/* Nobody wrote to it: to say that nothing was found would sound like "fine". */
static void add_empty(doctor *d, const doctor_file *file) {
    doctor_finding *f = file->lines > 0 ? NULL : doctor_add(d, "LOG-EMPTY", EPO_SYMPTOM_PROBLEM);
    if (f == NULL)
        return;
    TEXT(f, title, "the file is empty");
    TEXT(f, where, "%.250s", file->path);
    TEXT(f, seen, "0 lines");
    TEXT(f, cause,
         "the program has not begun, its output went elsewhere (srun -o, --error), or the disk "
         "was full");
    TEXT(f, confirm, "scontrol show job JOB (StdOut, StdErr), df on that folder");
    TEXT(f, mend, "name the file that the ranks wrote to");
}

static void add_losses(doctor *d, const doctor_file *file) {
    const epo_log *log = file->log;
    uint64_t lost = 0, skipped = 0, first = 0;
    for (size_t i = 0; i < log->count; i++) {
        const epo_iteration *it = &log->iteration[i];
        bool nan_loss = log->has_loss && isnan(it->loss);
        bool counted = !isnan(it->nans) && it->nans > 0;
        lost += nan_loss || counted;
        skipped += !isnan(it->skipped) && it->skipped > 0;
        first = (nan_loss || counted) && first == 0 ? it->line : first;
    }
    doctor_finding *f = lost > 0 ? doctor_add(d, "NAN-LOSS", EPO_SYMPTOM_PROBLEM) : NULL;
    if (f != NULL) {
        TEXT(f, title, "the loss is NaN");
        TEXT(f, where, "%.250s:%llu", file->path, (unsigned long long)first);
        TEXT(f, seen, "%llu of %zu iterations (frameworks leave a NaN loss out of the line)",
             (unsigned long long)lost, log->count);
        TEXT(f, cause, "a learning rate too high, a bad batch, or wrong numbers from a dispatcher");
        TEXT(f, confirm,
             "the same steps without overlap and with alltoall: identical until there?");
        TEXT(f, mend,
             "if only flex or overlap shows it: report it with both logs; else the recipe");
        TEXT(f, rule, "ABP-004");
    }
    f = skipped > 0 ? doctor_add(d, "SKIPPED", EPO_SYMPTOM_NOTE) : NULL;
    if (f != NULL) {
        TEXT(f, title, "iterations were skipped");
        TEXT(f, where, "%.280s", file->path);
        TEXT(f, seen, "%llu lines with skipped iterations", (unsigned long long)skipped);
        TEXT(f, cause, "the loss scale is being found, or gradients overflow");
        TEXT(f, confirm, "loss scale on those lines");
        TEXT(f, mend, "leave them out of the steady window; bf16 needs no loss scale");
        TEXT(f, rule, "ABP-006");
    }
}

static bool usual_time(const doctor_file *file, double *time) {
    epo_window_stats stats;
    if (file->log == NULL || file->log->count < 2 ||
        epo_log_stats(file->log, epo_log_steady_window(file->log), &stats) != EPO_OK) {
        epo_fail_clear();
        return false;
    }
    *time = stats.time_ms.median; /* start-up iterations do not matter */
    return true;
}

/* The first log is the baseline. */
static void add_no_speedup(doctor *d) {
    const doctor_file *base = NULL;
    double base_time = 0, time;
    for (size_t i = 0; i < d->files; i++) {
        const doctor_file *file = &d->file[i];
        if (file->is_profile || !usual_time(file, &time))
            continue;
        if (base == NULL) {
            base = file;
            base_time = time;
            continue;
        }
        doctor_finding *f =
            time < 0.99 * base_time ? NULL : doctor_add(d, "NO-SPEED-UP", EPO_SYMPTOM_PROBLEM);
        if (f == NULL)
            continue;
        TEXT(f, title, "no speed-up over the baseline");
        TEXT(f, where, "%.280s", file->path);
        TEXT(f, seen, "%.1f ms an iteration, the baseline %.1f ms (%.3fx)", time, base_time,
             base_time / time);
        TEXT(f, cause, "%s",
             is_on(file, "overlap_moe_expert_parallel_comm")
                 ? "communication is a small share, is not hidden, or the kernels slow each other "
                   "down"
                 : "the configuration in this log does not say that overlap is on");
        TEXT(f, confirm, "ep-overlap profile BASELINE OVERLAP: exposed time and overlapped share");
        TEXT(f, mend,
             "CUDA_DEVICE_MAX_CONNECTIONS=32, two micro-batches or more, EP over 4, no profiler; "
             "the other findings here");
    }
}

static const doctor_file *flex_log(const doctor *d) {
    for (size_t i = 0; i < d->files; i++) {
        const doctor_file *file = &d->file[i];
        const epo_fact *type =
            file->facts == NULL ? NULL : epo_facts_find(file->facts, "moe_token_dispatcher_type");
        if (type != NULL && strcmp(type->text, "flex") == 0)
            return file;
    }
    return NULL;
}

static void add_profile_findings(doctor *d, const doctor_file *file) {
    epo_profile_facts facts = epo_profile_tell(file->profile);
    const doctor_file *flex = flex_log(d);
    doctor_finding *f = NULL;
    if (facts.graph_launches > 0 &&
        (f = doctor_add(d, "GRAPH-BLOCKS", EPO_SYMPTOM_PROBLEM)) != NULL) {
        TEXT(f, title, "CUDA graphs were profiled as one block each");
        TEXT(f, where, "%.280s", file->path);
        TEXT(f, seen, "%llu graph launches", (unsigned long long)facts.graph_launches);
        TEXT(f, cause, "nsys ran with --cuda-graph-trace=graph, its default");
        TEXT(f, confirm, "ep-overlap profile refuses the share");
        TEXT(f, mend, "nsys profile --cuda-graph-trace=node");
        TEXT(f, rule, "PRO-002");
    }
    if (flex != NULL && facts.kernels > 0 && facts.flex_kernels == 0 &&
        (f = doctor_add(d, "FLEX-UNSEEN", EPO_SYMPTOM_PROBLEM)) != NULL) {
        TEXT(f, title, "flex was configured, and no flex kernel ran");
        TEXT(f, where, "%.280s", file->path);
        TEXT(f, seen,
             "%llu kernels, none of deep_ep, hybrid_ep or ep-overlap; flex is set in %.150s",
             (unsigned long long)facts.kernels, flex->path);
        TEXT(f, cause, "a silent fallback to alltoall, or the profile of another arm");
        TEXT(f, confirm, "ep-overlap profile --names");
        TEXT(f, mend,
             "look for import errors and GPU gates in the log; name the backend explicitly");
        TEXT(f, rule, "ABP-009");
    }
}

/* Overlap is on in a log, and next to nothing is hidden in the profile. */
static void add_not_hidden(doctor *d, const doctor_file *file) {
    const doctor_file *on = NULL;
    for (size_t i = 0; i < d->files; i++)
        if (!d->file[i].is_profile && is_on(&d->file[i], "overlap_moe_expert_parallel_comm"))
            on = &d->file[i];
    for (size_t u = 0; on != NULL && u < epo_profile_tell(file->profile).units; u++) {
        epo_profile_times t;
        if (epo_profile_measure(file->profile, u, INT64_MIN, INT64_MAX, &t, NULL) != EPO_OK)
            return;
        if (t.comm == 0 || (double)t.overlapped >= 0.05 * (double)t.comm)
            continue;
        doctor_finding *f = doctor_add(d, "NOT-HIDDEN", EPO_SYMPTOM_PROBLEM);
        if (f == NULL)
            return;
        TEXT(f, title, "overlap is on, and communication is not hidden");
        TEXT(f, where, "%.280s", file->path);
        TEXT(f, seen,
             "%.2f %% of %.3f ms expert communication beside GEMM and attention; overlap is on "
             "in %.100s",
             100 * (double)t.overlapped / (double)t.comm, (double)t.comm * 1e-6, on->path);
        TEXT(f, cause,
             "one micro-batch, CUDA_DEVICE_MAX_CONNECTIONS=1, or kernels without free SMs");
        TEXT(f, confirm, "ep-overlap profile --svg: do the lanes ever run side by side?");
        TEXT(f, mend,
             "two micro-batches or more, CUDA_DEVICE_MAX_CONNECTIONS=32, SM margins "
             "(ep-overlap env)");
        return;
    }
}

epo_status doctor_conclude(doctor *d) {
    for (size_t i = 0; i < d->files; i++) {
        const doctor_file *file = &d->file[i];
        if (file->is_profile) {
            add_profile_findings(d, file);
            add_not_hidden(d, file);
            continue;
        }
        epo_status status = file->has_configuration ? add_rules(d, file) : EPO_OK;
        if (status != EPO_OK)
            return status;
        add_empty(d, file);
        if (file->log->count > 0) {
            add_hang(d, file);
            add_losses(d, file);
        }
    }
    add_no_speedup(d);
    return EPO_OK;
}
