/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include "core/status.h"
#include "input.h"
#include "rules/rules.h"
#include "tool.h"

#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: ep-overlap report [OPTIONS] [NAME=]LOG[@A-B]...\n\n"
    "Reads training logs of Megatron-LM, Bridge, NeMo, torchtitan and ep-train.  One\n"
    "log: its figures.  Several: an A/B, the first one is the baseline; time and\n"
    "throughput against it, losses compared, and an answer per success criterion.\n"
    "Arms that differ in more than the overlap settings are not compared; the\n"
    "differences are listed.\n\n"
    "  --window A-B        steady iterations (default: all but the first tenth);\n"
    "                      LOG@A-B gives one log its own\n"
    "  --memory-gate SIZE  peak memory allowed: 65GiB, 70GB, 66000MiB\n"
    "  --identical         losses must be identical as printed (dispatcher and\n"
    "                      overlap of ep-overlap claim that)\n"
    "  --allow NAME        a setting that is meant to differ\n"
    "  --set KEY=VALUE     a fact for the rules: te_version=2.9.0\n"
    "  --strict            criteria that stay undecided count as no\n"
    "  --json              for programs\n\n"
    "examples:\n"
    "  ep-overlap report slurm-4711.out\n"
    "  ep-overlap report base.log overlap.log overlap+wgrad.log --window 3-8\n"
    "  ep-overlap report base=b.out win=o.out again=o2.out@41-50 --window 5-20 \\\n"
    "      --memory-gate 65GiB\n\n"
    "exit status: 0 nothing against it, 1 the verdict on an arm is no, 2 usage,\n"
    "  3 unreadable, 4 the arms cannot be compared (or, --strict, not decided)\n";

static bool parse_size(const char *text, double *bytes) {
    static const struct {
        const char *unit;
        double bytes;
    } units[] = {{"GiB", 1073741824.0}, {"GB", 1e9}, {"MiB", 1048576.0}, {"MB", 1e6}, {"B", 1}};
    char *end;
    double value = strtod(text, &end);
    if (end == text || !isfinite(value) || value <= 0)
        return false;
    for (size_t i = 0; i < sizeof units / sizeof *units; i++)
        if (strcmp(end, units[i].unit) == 0) {
            *bytes = value * units[i].bytes;
            return true;
        }
    return false;
}

static bool parse_window(const char *text, epo_window *window) {
    long long first, last;
    int end = 0;
    if (sscanf(text, "%lld-%lld%n", &first, &last, &end) != 2 || text[end] != '\0' || first < 0 ||
        last < first)
        return false;
    *window = (epo_window){first, last};
    return true;
}

/* KEY=VALUE of a name that a rule reads. */
static int take_set(report_options *o, const char *text) {
    const char *equals = strchr(text, '=');
    char key[128];
    if (equals == NULL || equals == text || (size_t)(equals - text) >= sizeof key)
        return epo_tool_usage("report", "--set takes KEY=VALUE, not \"%s\"", text);
    if (o->sets == sizeof o->set / sizeof *o->set)
        return epo_tool_usage("report", "too many --set");
    snprintf(key, sizeof key, "%.*s", (int)(equals - text), text);
    const char *wanted = epo_keys_misfit(key, equals + 1);
    if (wanted != NULL)
        return epo_tool_usage("report", "--set: %s takes %s, not \"%s\"", key, wanted, equals + 1);
    if (strncmp(key, "env.", 4) != 0 && epo_keys_find(key, strlen(key)) == NULL)
        return epo_tool_usage("report", "--set: no rule reads \"%s\"", key);
    o->set[o->sets++] = text;
    return EPO_EXIT_FINE;
}

static int take_option(report_options *o, int c, const char *value) {
    switch (c) {
    case 'w':
        o->has_window = parse_window(value, &o->window);
        return o->has_window
                   ? EPO_EXIT_FINE
                   : epo_tool_usage("report", "--window takes A-B (3-8), not \"%s\"", value);
    case 'm':
        return parse_size(value, &o->gate)
                   ? EPO_EXIT_FINE
                   : epo_tool_usage("report",
                                    "--memory-gate takes a size with its unit (65GiB, 70GB), "
                                    "not \"%s\"",
                                    value);
    case 'a':
        if (o->allowed == sizeof o->allow / sizeof *o->allow)
            return epo_tool_usage("report", "too many --allow");
        o->allow[o->allowed++] = value;
        return EPO_EXIT_FINE;
    case 's': return take_set(o, value);
    default: return EPO_EXIT_USAGE;
    }
}

static int parse_options(int argc, char **argv, report_options *o) {
    static const struct option longs[] = {{"window", required_argument, NULL, 'w'},
                                          {"memory-gate", required_argument, NULL, 'm'},
                                          {"allow", required_argument, NULL, 'a'},
                                          {"set", required_argument, NULL, 's'},
                                          {"identical", no_argument, NULL, 'i'},
                                          {"strict", no_argument, NULL, 'S'},
                                          {"json", no_argument, NULL, 'j'},
                                          {"help", no_argument, NULL, 'h'},
                                          {0}};
    optind = 0;
    opterr = 0;
    int status = EPO_EXIT_FINE;
    for (int c;
         status == EPO_EXIT_FINE && (c = getopt_long(argc, argv, ":h", longs, NULL)) != -1;) {
        switch (c) {
        case 'i': o->identical = true; break;
        case 'S': o->strict = true; break;
        case 'j': o->json = true; break;
        case 'h': fputs(help, stdout); return -1;
        case ':': return epo_tool_usage("report", "%s needs a value", argv[optind - 1]);
        case '?': return epo_tool_usage("report", "unknown option %s", argv[optind - 1]);
        default: status = take_option(o, c, optarg);
        }
    }
    return status;
}

static int exit_status(const report *r) {
    bool undecided = false;
    for (size_t i = r->arms > 1 ? 1 : 0; i < r->arms; i++) {
        if (r->arm[i].verdict == REPORT_NO)
            return EPO_EXIT_NO;
        undecided = undecided || r->arm[i].verdict == REPORT_UNDECIDED;
    }
    return undecided && r->options.strict ? EPO_EXIT_UNDECIDED : EPO_EXIT_FINE;
}

static int run(report *r, int count, char **path) {
    if (count == 0)
        return epo_tool_usage("report", "name a log");
    if (count > REPORT_ARMS_MAX)
        return epo_tool_usage("report", "at most %d logs at once, not %d", REPORT_ARMS_MAX, count);
    for (int i = 0; i < count; i++) {
        size_t length = strlen(path[i]);
        if (length == 0 || path[i][length - 1] == '=') /* NAME=LOG */
            return epo_tool_usage("report", EPO_TOOL_NO_NAME);
        epo_status status = report_arm_load(&r->arm[r->arms++], path[i], &r->options);
        if (status != EPO_OK)
            return epo_tool_fail("report", status);
    }
    const char *twice = report_arms_tell_apart(r);
    if (twice != NULL)
        return epo_tool_usage("report", "two logs are called %s: name them apart (a=LOG b=LOG)",
                              twice);
    report_compare_settings(r);
    if (r->forbidden > 0) {
        report_print_refusal(r);
        if (r->options.json)
            report_print_json(r);
        return EPO_EXIT_UNDECIDED;
    }
    epo_status status = report_judge(r);
    if (status != EPO_OK)
        return epo_tool_fail("report", status);
    if (r->options.json)
        report_print_json(r);
    else
        report_print_text(r);
    return exit_status(r);
}

static int report_run(int argc, char **argv) {
    report *r = calloc(1, sizeof *r);
    if (r == NULL)
        return epo_tool_fail("report", epo_fail(EPO_E_NOMEM, "no memory"));
    r->options.gate = NAN;
    int status = parse_options(argc, argv, &r->options);
    if (status == EPO_EXIT_FINE)
        status = run(r, argc - optind, argv + optind);
    for (size_t i = 0; i < r->arms; i++)
        report_arm_free(&r->arm[i]);
    free(r);
    return status < 0 ? EPO_EXIT_FINE : status;
}

EPO_TOOL(40, report, "read training logs: figures of a run, verdict of an A/B", report_run)
