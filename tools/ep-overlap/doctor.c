/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor.h"

#include "core/status.h"
#include "json.h"
#include "tool.h"

#include <getopt.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: ep-overlap doctor [--json] FILE...\n"
    "       ep-overlap doctor [--json] --table\n\n"
    "What is wrong with this run?  Reads logs, job scripts, configurations and\n"
    "profiles, in any mixture, and names each trouble that it knows: what was seen\n"
    "and where, the likely cause, how to make sure, what to do.  Of several logs the\n"
    "first one is the baseline.  - is a log on standard input.\n\n"
    "  --table   print the troubleshooting table\n"
    "  --json    for programs\n\n"
    "examples:\n"
    "  ep-overlap doctor slurm-4711.out\n"
    "  ep-overlap doctor baseline.log overlap.log overlap.sqlite\n"
    "  ep-overlap doctor job.sbatch run.yaml\n"
    "  zcat old.log.gz | ep-overlap doctor -\n\n"
    "exit status: 0 nothing known was found (or notes only), 1 a problem, 2 usage,\n"
    "  3 a file cannot be read\n";

static void print_finding(const doctor_finding *f) {
    printf("\n%-8s %-20s %s\n", f->severity == EPO_SYMPTOM_PROBLEM ? "problem" : "note", f->id,
           f->title);
    printf("    seen     %s\n", f->where);
    if (f->seen[0] != '\0')
        printf("             %s\n", f->seen);
    if (f->count > 1)
        printf("             and %llu times more\n", (unsigned long long)f->count - 1);
    printf("    cause    %s\n    confirm  %s\n    mend     %s\n", f->cause, f->confirm, f->mend);
    if (f->rule[0] != '\0' && strcmp(f->rule, f->id) != 0)
        printf("    rule     %s (ep-overlap explain %s)\n", f->rule, f->rule);
}

/* "1 file", "2 files"; four of them in one line. */
static const char *counted(int which, unsigned long long count, const char *what) {
    static char text[4][48];
    snprintf(text[which], sizeof text[which], "%llu %s%s", count, what, count == 1 ? "" : "s");
    return text[which];
}

static unsigned long long count_lines(const doctor *d) {
    unsigned long long lines = 0;
    for (size_t i = 0; i < d->files; i++)
        lines += d->file[i].lines;
    return lines;
}

static void print_text(const doctor *d, size_t problems) {
    for (int severity = EPO_SYMPTOM_PROBLEM; severity >= EPO_SYMPTOM_NOTE; severity--)
        for (size_t i = 0; i < d->findings; i++)
            if ((int)d->finding[i].severity == severity)
                print_finding(&d->finding[i]);
    unsigned long long lines = count_lines(d);
    if (d->findings == 0)
        printf("nothing known was found in %s, %s\n", counted(0, d->files, "file"),
               counted(1, lines, "line"));
    else
        printf("\n%s, %s in %s, %s\n", counted(0, problems, "problem"),
               counted(1, d->findings - problems, "note"), counted(2, d->files, "file"),
               counted(3, lines, "line"));
    if (d->findings == DOCTOR_FINDINGS_MAX)
        printf("there may be more: only %d findings are listed\n", DOCTOR_FINDINGS_MAX);
}

static void print_json(const doctor *d, size_t problems) {
    epo_json json = {.out = stdout};
    epo_json_object(&json, NULL);
    epo_json_integer(&json, "problems", (int64_t)problems);
    epo_json_integer(&json, "notes", (int64_t)(d->findings - problems));
    epo_json_integer(&json, "files", (int64_t)d->files);
    epo_json_integer(&json, "lines", (int64_t)count_lines(d));
    epo_json_bool(&json, "may_be_more", d->findings == DOCTOR_FINDINGS_MAX);
    epo_json_array(&json, "findings");
    for (size_t i = 0; i < d->findings; i++) {
        const doctor_finding *f = &d->finding[i];
        epo_json_object(&json, NULL);
        epo_json_text(&json, "id", f->id);
        epo_json_text(&json, "severity", f->severity == EPO_SYMPTOM_PROBLEM ? "problem" : "note");
        epo_json_text(&json, "title", f->title);
        epo_json_text(&json, "where", f->where);
        epo_json_text(&json, "seen", f->seen);
        epo_json_integer(&json, "count", (int64_t)f->count);
        epo_json_text(&json, "cause", f->cause);
        epo_json_text(&json, "confirm", f->confirm);
        epo_json_text(&json, "mend", f->mend);
        epo_json_text(&json, "rule", f->rule[0] != '\0' ? f->rule : NULL);
        epo_json_end(&json, '}');
    }
    epo_json_end(&json, ']');
    epo_json_end(&json, '}');
}

static void print_table_json(void) {
    epo_json json = {.out = stdout};
    epo_json_object(&json, NULL);
    epo_json_array(&json, "symptoms");
    for (size_t i = 0; i < epo_symptoms_count(); i++) {
        const epo_symptom *s = epo_symptoms_at(i);
        epo_json_object(&json, NULL);
        epo_json_text(&json, "id", s->id);
        epo_json_text(&json, "title", s->title);
        epo_json_text(&json, "example", s->example);
        epo_json_text(&json, "cause", s->cause);
        epo_json_text(&json, "confirm", s->confirm);
        epo_json_text(&json, "mend", s->mend);
        epo_json_end(&json, '}');
    }
    epo_json_end(&json, ']');
    epo_json_end(&json, '}');
}

static void print_table(void) {
    for (size_t i = 0; i < epo_symptoms_count(); i++) {
        const epo_symptom *s = epo_symptoms_at(i);
        printf("%s  %s\n    like     %s\n    cause    %s\n    confirm  %s\n    mend     %s\n",
               s->id, s->title, s->example, s->cause, s->confirm, s->mend);
    }
}

static int diagnose(doctor *d, int count, char **path, bool json) {
    size_t problems = 0;
    epo_status status = EPO_OK;
    for (int i = 0; i < count && status == EPO_OK; i++)
        status = doctor_read(d, path[i]);
    if (status == EPO_OK)
        status = doctor_conclude(d);
    if (status != EPO_OK)
        return epo_tool_fail("doctor", status);
    for (size_t i = 0; i < d->findings; i++)
        problems += d->finding[i].severity == EPO_SYMPTOM_PROBLEM;
    if (json)
        print_json(d, problems);
    else
        print_text(d, problems);
    return problems > 0 ? EPO_EXIT_NO : EPO_EXIT_FINE;
}

static void clear(doctor *d) {
    for (size_t i = 0; i < d->files; i++) {
        epo_log_destroy(d->file[i].log);
        epo_facts_destroy(d->file[i].facts);
        epo_profile_destroy(d->file[i].profile);
    }
    free(d->finding);
}

static int doctor_run(int argc, char **argv) {
    static const struct option longs[] = {{"json", no_argument, NULL, 'j'},
                                          {"table", no_argument, NULL, 't'},
                                          {"help", no_argument, NULL, 'h'},
                                          {0}};
    bool json = false, table = false;
    optind = 0;
    opterr = 0;
    for (int c; (c = getopt_long(argc, argv, "h", longs, NULL)) != -1;) {
        switch (c) {
        case 'j': json = true; break;
        case 't': table = true; break;
        case 'h': fputs(help, stdout); return EPO_EXIT_FINE;
        default: return epo_tool_usage("doctor", "unknown option %s", argv[optind - 1]);
        }
    }
    if (table) {
        (json ? print_table_json : print_table)();
        return EPO_EXIT_FINE;
    }
    int files = argc - optind;
    if (files == 0 || files > DOCTOR_FILES_MAX)
        return epo_tool_usage("doctor", "name 1 to %d files, not %d", DOCTOR_FILES_MAX, files);
    for (int i = optind; i < argc; i++)
        if (argv[i][0] == '\0')
            return epo_tool_usage("doctor", EPO_TOOL_NO_NAME);
    doctor d = {.finding = calloc(DOCTOR_FINDINGS_MAX, sizeof *d.finding)};
    int status = d.finding == NULL ? epo_tool_fail("doctor", epo_fail(EPO_E_NOMEM, "no memory"))
                                   : diagnose(&d, files, argv + optind, json);
    clear(&d);
    return status;
}

EPO_TOOL(60, doctor, "what is wrong with a run, from its logs and profiles", doctor_run)
