/* SPDX-License-Identifier: Apache-2.0 */
#include "tool.h"

#include "core/status.h"
#include "profile_view.h"

#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: ep-overlap profile [OPTIONS] FILE [FILE]\n\n"
    "How much of the expert communication ran beside computation, from a profiler's\n"
    "file: an SQLite export of Nsight Systems (nsys export --type sqlite), a Chrome\n"
    "trace of PyTorch's profiler, or a recording of ep-overlap.  Two files are an\n"
    "A/B.  Times are unions of intervals per process and device, never sums of\n"
    "durations.\n\n"
    "  --svg OUT             draw a timeline and the overlap\n"
    "  --device N            the one to draw, counted from 0 in the order of the text\n"
    "  --range A-B           only seconds A to B after the first record\n"
    "  --class GLOB=CLASS    kernels whose name matches are of CLASS: ep_comm,\n"
    "                        other_comm, gemm, attention, permute, other, copy; the\n"
    "                        first match wins\n"
    "  --pipeline-stream N   ncclDevKernel_SendRecv on this stream is pipeline\n"
    "                        traffic\n"
    "  --names               list kernels by class\n"
    "  --memory MIB          for intervals, before a temporary file is used (32)\n"
    "  --json                for programs\n\n"
    "examples:\n"
    "  ep-overlap profile baseline.sqlite overlap.sqlite --svg overlap.svg\n"
    "  ep-overlap profile trace.json --names --class '*my_dispatch*=ep_comm'\n"
    "  zcat trace.json.gz | ep-overlap profile - --range 1.5-2.0\n\n"
    "exit status: 0 fine, 2 usage, 3 unreadable, 4 the share cannot be told (graphs\n"
    "  recorded as blocks, copies of unknown kind)\n";

typedef struct profile_options {
    bool json, names;
    const char *svg;
    size_t device;
    bool has_range;
    double from, to; /* seconds */
    epo_kernel_patterns patterns;
    int64_t pipeline[32];
    size_t pipeline_count;
    size_t budget;
} profile_options;

static int take_class(profile_options *o, const char *text) {
    const char *equals = strrchr(text, '=');
    epo_kernel_class kind;
    if (equals == NULL || equals == text || (size_t)(equals - text) >= 128 ||
        !epo_kernel_class_find(equals + 1, strlen(equals + 1), &kind))
        return epo_tool_usage("profile", "--class takes GLOB=CLASS, not \"%s\"", text);
    if (o->patterns.count == EPO_KERNEL_PATTERNS_MAX)
        return epo_tool_usage("profile", "at most %d --class", EPO_KERNEL_PATTERNS_MAX);
    epo_kernel_pattern *p = &o->patterns.pattern[o->patterns.count++];
    snprintf(p->glob, sizeof p->glob, "%.*s", (int)(equals - text), text);
    p->kind = kind;
    return EPO_EXIT_FINE;
}

static int take_range(profile_options *o, const char *text) {
    int end = 0;
    o->has_range = sscanf(text, "%lf-%lf%n", &o->from, &o->to, &end) == 2 && text[end] == '\0' &&
                   o->from >= 0 && o->to > o->from && o->to < 1e9;
    return o->has_range
               ? EPO_EXIT_FINE
               : epo_tool_usage("profile", "--range takes A-B in seconds, not \"%s\"", text);
}

static bool parse_number(const char *text, long long least, long long most, long long *out) {
    char *end;
    *out = strtoll(text, &end, 10);
    return end != text && *end == '\0' && *out >= least && *out <= most;
}

static int take_number(profile_options *o, int c, const char *text) {
    long long n;
    long long least = c == 'M' ? 1 : 0, most = c == 'M' ? 1 << 20 : INT32_MAX;
    if (!parse_number(text, least, most, &n))
        return epo_tool_usage("profile", "%s takes a number of %lld to %lld, not \"%s\"",
                              c == 'M'   ? "--memory"
                              : c == 'd' ? "--device"
                                         : "--pipeline-stream",
                              least, most, text);
    if (c == 'd')
        o->device = (size_t)n;
    else if (c == 'M')
        o->budget = (size_t)n << 16; /* 16 bytes a span */
    else if (o->pipeline_count < sizeof o->pipeline / sizeof *o->pipeline)
        o->pipeline[o->pipeline_count++] = n;
    else
        return epo_tool_usage("profile", "too many --pipeline-stream");
    return EPO_EXIT_FINE;
}

static int parse_options(int argc, char **argv, profile_options *o) {
    static const struct option longs[] = {
        {"svg", required_argument, NULL, 's'},    {"device", required_argument, NULL, 'd'},
        {"range", required_argument, NULL, 'r'},  {"class", required_argument, NULL, 'c'},
        {"memory", required_argument, NULL, 'M'}, {"pipeline-stream", required_argument, NULL, 'p'},
        {"names", no_argument, NULL, 'n'},        {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},         {0}};
    int status = EPO_EXIT_FINE;
    optind = 0;
    opterr = 0;
    for (int c;
         status == EPO_EXIT_FINE && (c = getopt_long(argc, argv, ":h", longs, NULL)) != -1;) {
        switch (c) {
        case 's': o->svg = optarg; break;
        case 'r': status = take_range(o, optarg); break;
        case 'c': status = take_class(o, optarg); break;
        case 'd':
        case 'M':
        case 'p': status = take_number(o, c, optarg); break;
        case 'n': o->names = true; break;
        case 'j': o->json = true; break;
        case 'h': fputs(help, stdout); return -1;
        case ':': return epo_tool_usage("profile", "%s needs a value", argv[optind - 1]);
        default: return epo_tool_usage("profile", "unknown option %s", argv[optind - 1]);
        }
    }
    return status;
}

static int64_t after(int64_t first, double seconds) {
    int64_t sum;
    return __builtin_add_overflow(first, (int64_t)(seconds * 1e9), &sum) ? INT64_MAX : sum;
}

/* Why a share of the communication would be wrong. */
static void refuse(profile_file *f) {
    if (f->facts.graph_launches > 0)
        snprintf(f->refused, sizeof f->refused,
                 "CUDA graphs were recorded as blocks; record with --cuda-graph-trace=node");
    else if (f->facts.nameless > 0)
        snprintf(f->refused, sizeof f->refused,
                 "%llu kernels have no name in the file; export it again (nsys export)",
                 (unsigned long long)f->facts.nameless);
    else if (f->facts.copies_unclassified)
        snprintf(f->refused, sizeof f->refused,
                 "copies may be communication, and the file does not tell their kind or stream");
}

/* Nothing that could be measured. */
static epo_status fail_empty(const profile_file *f) {
    if (f->facts.skipped > 0)
        return epo_fail(EPO_E_ARG,
                        "%s: all %llu records of kernels and copies are without a time, or end "
                        "before they start: record, or export, it again",
                        f->path, (unsigned long long)f->facts.skipped);
    return epo_fail(EPO_E_ARG,
                    "%s: no kernel and no copy was recorded: record CUDA activity too "
                    "(ProfilerActivity.CUDA, nsys profile -t cuda)",
                    f->path);
}

static epo_status load(profile_file *f, const char *path, const profile_options *o) {
    epo_profile_options options = {.patterns = &o->patterns,
                                   .pipeline_streams = o->pipeline,
                                   .pipeline_stream_count = o->pipeline_count,
                                   .budget = o->budget,
                                   .progress = epo_tool_progress,
                                   .progress_context = (void *)path};
    f->path = epo_tool_shown(path);
    epo_status status = epo_profile_read(path, &options, &f->profile);
    epo_tool_progress_end();
    if (status != EPO_OK)
        return status;
    f->facts = epo_profile_tell(f->profile);
    f->from = INT64_MIN;
    f->to = INT64_MAX;
    if (!epo_profile_extent(f->profile, &f->first, &f->last) && f->facts.graph_launches == 0)
        return fail_empty(f);
    if (o->has_range) {
        f->from = after(f->first, o->from);
        f->to = after(f->first, o->to);
        if (f->from >= f->last)
            return epo_fail(EPO_E_ARG,
                            "%s: --range begins behind the end: the record is %.3f s long", path,
                            (double)(f->last - f->first) / 1e9);
    }
    refuse(f);
    f->times = calloc(f->facts.units + 1, sizeof *f->times);
    if (f->times == NULL)
        return epo_fail(EPO_E_NOMEM, "%s: no memory", path);
    for (size_t i = 0; i < f->facts.units && status == EPO_OK; i++)
        status = epo_profile_measure(f->profile, i, f->from, f->to, &f->times[i], NULL);
    return status;
}

static int run(profile_view *v, const profile_options *o, int count, char **path) {
    if (count < 1 || count > 2)
        return epo_tool_usage("profile", "name one file, or two for an A/B");
    if (path[0][0] == '\0' || path[count - 1][0] == '\0')
        return epo_tool_usage("profile", EPO_TOOL_NO_NAME);
    for (int i = 0; i < count; i++) {
        epo_status status = load(&v->file[v->files++], path[i], o);
        if (status != EPO_OK)
            return epo_tool_fail("profile", status);
    }
    v->names = o->names;
    if (o->svg != NULL) {
        epo_status status = profile_draw_svg(v, o->device, o->svg);
        if (status != EPO_OK)
            return epo_tool_fail("profile", status);
    }
    if (o->json)
        profile_print_json(v);
    else
        profile_print_text(v);
    bool refused = v->file[0].refused[0] != '\0' || v->file[1].refused[0] != '\0';
    return refused ? EPO_EXIT_UNDECIDED : EPO_EXIT_FINE;
}

static int profile_run(int argc, char **argv) {
    profile_view view = {0};
    profile_options *options = calloc(1, sizeof *options);
    if (options == NULL)
        return epo_tool_fail("profile", epo_fail(EPO_E_NOMEM, "no memory"));
    int status = parse_options(argc, argv, options);
    if (status == EPO_EXIT_FINE)
        status = run(&view, options, argc - optind, argv + optind);
    for (size_t i = 0; i < view.files; i++) {
        epo_profile_destroy(view.file[i].profile);
        free(view.file[i].times);
    }
    free(options);
    return status < 0 ? EPO_EXIT_FINE : status;
}

EPO_TOOL(50, profile, "read profiles: how much communication was hidden", profile_run)
