/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor.h"

#include "core/status.h"
#include "input.h"
#include "rules/settings.h"
#include "tool.h"
#include "trace/lines.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

doctor_finding *doctor_add(doctor *d, const char *id, epo_symptom_severity severity) {
    if (d->findings == DOCTOR_FINDINGS_MAX)
        return NULL;
    doctor_finding *f = &d->finding[d->findings++];
    *f = (doctor_finding){.severity = severity, .count = 1};
    snprintf(f->id, sizeof f->id, "%s", id);
    return f;
}

static epo_status put_setting(void *context, const char *path, const char *value, uint64_t line) {
    doctor_file *f = context;
    char source[300];
    f->has_configuration = true;
    snprintf(source, sizeof source, "%.200s:%llu", f->path, (unsigned long long)line);
    return epo_setting_put(f->facts, path, value, source, NULL);
}

static void add_symptoms(doctor *d, const doctor_file *file, const epo_symptom_scan *scan) {
    for (size_t i = 0; i < epo_symptoms_count(); i++) {
        const epo_symptom *s = epo_symptoms_at(i);
        const epo_symptom_seen *seen = epo_symptom_scan_seen(scan, i);
        doctor_finding *f = seen->count == 0 ? NULL : doctor_add(d, s->id, s->severity);
        if (f == NULL)
            continue;
        f->count = seen->count;
        snprintf(f->title, sizeof f->title, "%s", s->title);
        snprintf(f->where, sizeof f->where, "%.250s:%llu", file->path,
                 (unsigned long long)seen->line);
        snprintf(f->seen, sizeof f->seen, "%s", seen->text);
        snprintf(f->cause, sizeof f->cause, "%s", s->cause);
        snprintf(f->confirm, sizeof f->confirm, "%s", s->confirm);
        snprintf(f->mend, sizeof f->mend, "%s", s->mend);
        snprintf(f->rule, sizeof f->rule, "%s", s->rule);
    }
}

static void add_unknown(doctor *d, const doctor_file *file, const epo_symptom_scan *scan) {
    const epo_symptom_seen *seen = epo_symptom_scan_unknown(scan);
    doctor_finding *f = seen->count == 0 ? NULL : doctor_add(d, "REFUSED", EPO_SYMPTOM_PROBLEM);
    if (f == NULL)
        return;
    f->count = seen->count;
    snprintf(f->title, sizeof f->title, "an error that this table does not know");
    snprintf(f->where, sizeof f->where, "%.250s:%llu", file->path, (unsigned long long)seen->line);
    snprintf(f->seen, sizeof f->seen, "%s", seen->text);
    snprintf(f->cause, sizeof f->cause, "as the line says");
    snprintf(f->confirm, sizeof f->confirm, "the lines above it in the log");
    snprintf(f->mend, sizeof f->mend, "ep-overlap lint on the configuration may name the rule");
}

/* One pass: symptoms, iterations, configuration. */
static epo_status read_lines(const char *path, doctor_file *file, epo_symptom_scan *scan) {
    epo_lines *lines = NULL;
    size_t length;
    epo_status status =
        epo_lines_open(path, file->path, epo_tool_progress, (void *)file->path, &lines);
    for (const char *line; status == EPO_OK && (line = epo_lines_next(lines, &length)) != NULL;) {
        epo_symptom_scan_line(scan, line, length, epo_lines_number(lines));
        status = epo_log_feed(file->log, line, epo_lines_number(lines), put_setting, file);
    }
    if (status == EPO_OK)
        status = epo_lines_status(lines);
    if (status == EPO_OK)
        file->lines = epo_lines_number(lines);
    epo_tool_progress_end();
    epo_lines_close(lines);
    return epo_lines_fail(status, path);
}

static bool is_regular(const char *path) {
    struct stat s;
    return strcmp(path, "-") != 0 && stat(path, &s) == 0 && S_ISREG(s.st_mode);
}

/* A text without iterations and dump may be a job script or a YAML file. */
static void read_as_configuration(const char *path, doctor_file *file) {
    epo_input input;
    if (file->log->count > 0 || file->has_configuration || !is_regular(path))
        return; /* a pipe can be read once */
    if (epo_input_file(path, file->facts, &input) == EPO_OK && input.settings > 0) {
        file->has_configuration = true;
        if (input.megatron_lm && !input.defaults_unknown)
            (void)epo_settings_default(file->facts, EPO_DEFAULTS_MEGATRON_LM);
    }
    epo_fail_clear();
}

static epo_status read_text(doctor *d, const char *path, doctor_file *file) {
    epo_symptom_scan *scan = NULL;
    epo_status status = epo_symptom_scan_create(&scan);
    file->log = epo_log_create();
    file->facts = epo_facts_create();
    if (status == EPO_OK && (file->log == NULL || file->facts == NULL))
        status = epo_fail(EPO_E_NOMEM, "%s: no memory to read it", file->path);
    if (status == EPO_OK)
        status = read_lines(path, file, scan);
    if (status == EPO_OK) {
        epo_log_finish(file->log);
        add_symptoms(d, file, scan);
        add_unknown(d, file, scan);
        read_as_configuration(path, file);
        if (file->log->dump.kind == EPO_DUMP_BRIDGE && file->log->dump.complete)
            status = epo_settings_default(file->facts, EPO_DEFAULTS_MEGATRON_CORE);
    }
    if (status == EPO_OK)
        status = epo_settings_derive(file->facts);
    epo_symptom_scan_destroy(scan);
    return status;
}

/* A database, or JSON: an object, or an array of objects ("[rank0]: ..." is a log). */
static bool looks_like_profile(const char *path) {
    char head[64] = "";
    int fd = is_regular(path) ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    ssize_t n = fd < 0 ? 0 : read(fd, head, sizeof head - 1);
    if (fd >= 0)
        close(fd);
    const char *first = head + strspn(head, " \t\r\n"), *second = first;
    if (*first == '[')
        second += 1 + strspn(first + 1, " \t\r\n");
    return n > 0 && (strncmp(head, "SQLite format 3", 15) == 0 || *second == '{');
}

epo_status doctor_read(doctor *d, const char *path) {
    doctor_file *file = &d->file[d->files++];
    file->path = epo_tool_shown(epo_lines_name(path));
    file->is_profile = looks_like_profile(path);
    if (!file->is_profile)
        return read_text(d, path, file);
    epo_profile_options options = {.progress = epo_tool_progress, .progress_context = (void *)path};
    epo_status status = epo_profile_read(path, &options, &file->profile);
    epo_tool_progress_end();
    return status;
}
