/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "bench.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "measure/gpu.h"
#include "measure/launch.h"
#include "tool.h"

static const char help[] =
    "usage: ep-overlap bench [OPTIONS]\n"
    "       srun --ntasks-per-node=8 --gpus-per-node=8 ep-overlap bench [OPTIONS]\n\n"
    "Times the library's expert-parallel layer on this machine: serial, overlapped,\n"
    "overlapped with delayed weight gradients, over both dispatchers. All arms use\n"
    "the same weights, rows and routing and take their turns in every round, so that\n"
    "what slows the machine slows all of them. Outputs and gradients of an arm must\n"
    "have the serial one's bits.\n\n"
    "Ranks are processes, each on another GPU, or threads where there is no GPU;\n"
    "under srun, mpirun or torchrun they are the step's ranks.\n\n"
    "workload:\n"
    "  --workload q|d|mixtral|small\n"
    "                   Qwen3-30B-A3B, DeepSeek-V3, Mixtral-8x7B, small (q; small on\n"
    "                   the host engine); the next options change it\n"
    "  --tokens N       of each rank\n"
    "  --hidden N       elements of a token's row\n"
    "  --ffn N          intermediate size of an expert\n"
    "  --experts N      of all ranks, a multiple of their number\n"
    "  --top-k N        experts of a token\n"
    "  --type bf16|fp16|fp32\n"
    "                   of rows, weights and gradients\n\n"
    "arms:\n"
    "  --engine auto|host|cuda\n"
    "                   auto: CUDA if there are a GPU and the engine\n"
    "  --ranks N        how many (as many as GPUs; 2 on the host)\n"
    "  --launch threads|processes\n"
    "                   what they are (processes on GPUs, else threads)\n"
    "  --dispatcher alltoall|flex\n"
    "                   only this one\n"
    "  --chunks N,...   expert groups of an overlapped pass, up to 4 counts to\n"
    "                   compare (the engine's choice)\n"
    "  --sms N          SMs that the experts' GEMMs take on a GPU (all)\n"
    "  --repeat N       rounds (9)\n"
    "  --timeout N      seconds that a peer is waited for (60)\n"
    "  --json           for programs\n\n"
    "what the table says:\n"
    "  x           serial over this arm, the median of the rounds' ratios\n"
    "  exposed     this arm's time minus the experts' alone: communication that shows\n"
    "  efficiency  (serial - this) / (serial - floor): 1 is all that can be had\n"
    "  floor       max(FFN*, D*+C*): the experts' work at the best rate seen, the\n"
    "              least bytes at the rate of a copy; both measured in this run\n\n"
    "examples:\n"
    "  ep-overlap bench                            both dispatchers, on what is here\n"
    "  ep-overlap bench --workload d --chunks 2,4,8\n"
    "  EP_OVERLAP_HOST_LINK=0.5,20 ep-overlap bench --engine host --ranks 2\n"
    "                                              a slow network, emulated\n"
    "  srun -n4 --gpus-per-task=1 ep-overlap bench --json > bench.json\n\n"
    "exit status: 0 fine, 1 an arm's results are not the serial one's, 2 usage,\n"
    "  5 no such engine or GPU here, memory, or a rank failed\n";

static const struct workload {
    const char *name;
    int tokens, hidden, ffn, experts, top_k;
    epo_dtype type;
} workloads[] = {
    {"q", 4096, 2048, 768, 128, 8, EPO_BF16},
    {"d", 4096, 7168, 2048, 256, 8, EPO_BF16},
    {"mixtral", 4096, 4096, 14336, 8, 2, EPO_BF16},
    {"small", 512, 256, 512, 8, 2, EPO_F32},
};
#define WORKLOADS ((int)(sizeof workloads / sizeof workloads[0]))

static const char *const types[] = {"fp32", "bf16", "fp16", NULL};
static const char *const engines[] = {"auto", "host", "cuda", NULL};
static const char *const launches[] = {"auto", "threads", "processes", NULL};
static const char *const dispatchers[] = {"alltoall", "flex", NULL};

const char *bench_type_name(epo_dtype type) { return types[type]; }

/* ---- options ------------------------------------------------------------------ */

typedef struct number {
    const char *name;
    size_t offset;
    int least, most;
} number;
#define AT(field) offsetof(bench_options, field)
static const number numbers[] = {
    {"tokens", AT(tokens), 1, 1 << 20},
    {"hidden", AT(hidden), 1, 1 << 16},
    {"ffn", AT(ffn), 1, 1 << 18},
    {"experts", AT(experts), 1, 1 << 14},
    {"top-k", AT(top_k), 1, 32},
    {"ranks", AT(ranks), 1, BENCH_RANKS},
    {"repeat", AT(repeats), 1, BENCH_REPEATS},
    {"sms", AT(sms), 2, 1024},
};
#define NUMBERS ((int)(sizeof numbers / sizeof numbers[0]))
enum {
    FIRST_WORD = 256,
    WORKLOAD = FIRST_WORD,
    TYPE,
    ENGINE,
    DISPATCHER,
    CHUNKS,
    TIMEOUT,
    LAUNCH,
    JSON
};

/* [least, most] at *text, up to `end` or the end; -1: it is none. */
static int parse(const char *text, char end, int least, int most, const char **rest) {
    char *stop;
    errno = 0;
    long value = strtol(text, &stop, 10);
    if (stop == text || errno != 0 || value < least || value > most ||
        (*stop != '\0' && *stop != end))
        return -1;
    *rest = *stop == '\0' ? stop : stop + 1;
    return (int)value;
}

static int wrong(const char *option, const char *allowed) {
    return epo_tool_usage("bench", "--%s: found \"%.64s\", allowed is %s", option, optarg, allowed);
}

static int read_number(const number *n, bench_options *o) {
    const char *rest;
    char allowed[48];
    int value = parse(optarg, '\0', n->least, n->most, &rest);
    snprintf(allowed, sizeof allowed, "%d to %d", n->least, n->most);
    if (value < 0)
        return wrong(n->name, allowed);
    *(int *)(void *)((char *)o + n->offset) = value;
    return EPO_EXIT_FINE;
}

static int read_word(const char *option, const char *const *words, const char *allowed, int *out) {
    for (int i = 0; words[i] != NULL; i++)
        if (strcmp(optarg, words[i]) == 0) {
            *out = i;
            return EPO_EXIT_FINE;
        }
    return wrong(option, allowed);
}

static int read_chunks(bench_options *o) {
    const char *text = optarg;
    o->chunk_counts = 0;
    do {
        int value = parse(text, ',', 1, 1024, &text);
        if (value < 0 || o->chunk_counts == BENCH_CHUNKS)
            return wrong("chunks", "1 to 4 numbers from 1 to 1024, separated by commas");
        o->chunks[o->chunk_counts++] = value;
    } while (*text != '\0');
    return EPO_EXIT_FINE;
}

static int read_option(int which, bench_options *o) {
    int value = 0, status = EPO_EXIT_FINE;
    const char *rest;
    switch (which) {
    case WORKLOAD: o->workload = optarg; break;
    case TYPE:
        status = read_word("type", types, "bf16, fp16 or fp32", &value);
        o->type = (epo_dtype)value;
        break;
    case ENGINE:
        status = read_word("engine", engines, "auto, host or cuda", &value);
        o->engine = (epo_engine_kind)value;
        break;
    case DISPATCHER:
        status = read_word("dispatcher", dispatchers, "alltoall or flex", &o->dispatcher);
        break;
    case CHUNKS: status = read_chunks(o); break;
    case TIMEOUT:
        value = parse(optarg, '\0', 1, 86400, &rest);
        o->timeout_s = value;
        if (value < 0)
            status = wrong("timeout", "1 to 86400 seconds");
        break;
    case LAUNCH: status = read_word("launch", launches, "threads or processes", &o->launch); break;
    case JSON: o->json = true; break;
    default: status = read_number(&numbers[which], o);
    }
    return status;
}

/* What was not given comes from the workload. */
static int complete(bench_options *o) {
    const struct workload *w = NULL;
    const char *name = o->workload != NULL                            ? o->workload
                       : o->engine == EPO_ENGINE_HOST || o->gpus == 0 ? "small"
                                                                      : "q";
    for (int i = 0; i < WORKLOADS; i++)
        if (strcmp(name, workloads[i].name) == 0)
            w = &workloads[i];
    if (w == NULL)
        return epo_tool_usage(
            "bench", "--workload: found \"%.64s\", allowed is q, d, mixtral or small", name);
    const int given[] = {o->tokens, o->hidden, o->ffn, o->experts, o->top_k, (int)o->type};
    o->workload = given[0] > 0 || given[1] > 0 || given[2] > 0 || given[3] > 0 || given[4] > 0 ||
                          given[5] >= 0
                      ? "custom"
                      : w->name;
    o->tokens = given[0] > 0 ? given[0] : w->tokens;
    o->hidden = given[1] > 0 ? given[1] : w->hidden;
    o->ffn = given[2] > 0 ? given[2] : w->ffn;
    o->experts = given[3] > 0 ? given[3] : w->experts;
    o->top_k = given[4] > 0 ? given[4] : w->top_k;
    o->type = given[5] >= 0 ? o->type : w->type;
    if (o->top_k > o->experts)
        return epo_tool_usage("bench", "--top-k: found %d, allowed is at most --experts (%d)",
                              o->top_k, o->experts);
    if (o->ranks > 0 && o->experts % o->ranks != 0)
        return epo_tool_usage("bench", "--experts: found %d, allowed is a multiple of --ranks (%d)",
                              o->experts, o->ranks);
    return EPO_EXIT_FINE;
}

/* -1: help was printed. */
static int parse_options(int argc, char **argv, bench_options *o) {
    static const struct option longs[] = {{"tokens", required_argument, NULL, 0},
                                          {"hidden", required_argument, NULL, 1},
                                          {"ffn", required_argument, NULL, 2},
                                          {"experts", required_argument, NULL, 3},
                                          {"top-k", required_argument, NULL, 4},
                                          {"ranks", required_argument, NULL, 5},
                                          {"repeat", required_argument, NULL, 6},
                                          {"sms", required_argument, NULL, 7},
                                          {"workload", required_argument, NULL, WORKLOAD},
                                          {"type", required_argument, NULL, TYPE},
                                          {"engine", required_argument, NULL, ENGINE},
                                          {"dispatcher", required_argument, NULL, DISPATCHER},
                                          {"chunks", required_argument, NULL, CHUNKS},
                                          {"timeout", required_argument, NULL, TIMEOUT},
                                          {"launch", required_argument, NULL, LAUNCH},
                                          {"json", no_argument, NULL, JSON},
                                          {"help", no_argument, NULL, 'h'},
                                          {0}};
    optind = 0;
    opterr = 0;
    for (int c, status; (c = getopt_long(argc, argv, ":h", longs, NULL)) != -1;) {
        if (c == 'h') {
            fputs(help, stdout);
            return -1;
        }
        if (c == ':')
            return epo_tool_usage("bench", "%s needs a value", argv[optind - 1]);
        if (c == '?')
            return epo_tool_usage("bench", "unknown option %s", argv[optind - 1]);
        if ((status = read_option(c, o)) != EPO_EXIT_FINE)
            return status;
    }
    if (optind < argc)
        return epo_tool_usage("bench", "\"%s\" is one word too many", argv[optind]);
    o->why_host = measure_engine(&o->engine);
    o->gpus = o->engine == EPO_ENGINE_HOST ? 0 : measure_gpu_count();
    return complete(o);
}

/* One process: all ranks as threads, or one rank of a step. */
static int bench_body(void *ctx) {
    bench_options *o = ctx;
    bench_arm arm[BENCH_ARMS];
    bool rank_zero = false;
    int status = EPO_EXIT_FINE;
    bench_result *r = calloc(1, sizeof *r);
    if (r == NULL)
        return epo_tool_fail("bench", epo_fail(EPO_E_NOMEM, "no memory"));
    const int arms = bench_arms(o, arm);
    epo_status measured = bench_measure(o, arm, arms, r, &rank_zero);
    if (measured != EPO_OK) {
        free(r);
        return epo_tool_error("bench", measured == EPO_E_ARG ? EPO_EXIT_USAGE : EPO_EXIT_SYSTEM,
                              "%s", epo_fail_text());
    }
    if (rank_zero && o->json)
        bench_print_json(o, arm, arms, r);
    else if (rank_zero)
        bench_print_text(o, arm, arms, r);
    for (int a = 0; rank_zero && a < arms; a++)
        status = r->arm[a].identical ? status : EPO_EXIT_NO;
    free(r);
    return epo_tool_finish("bench", status);
}

static int bench_run(int argc, char **argv) {
    bench_options o = {.dispatcher = -1, .type = (epo_dtype)-1, .repeats = 9, .timeout_s = 60};
    bool processes = false;
    char sms[16];
    int status = parse_options(argc, argv, &o);
    if (status != EPO_EXIT_FINE)
        return status < 0 ? EPO_EXIT_FINE : status;
    snprintf(sms, sizeof sms, "%d", o.sms);
    if (o.sms > 0)
        setenv("EP_OVERLAP_CUDA_SMS", sms, 1);
    if (bench_step_ranks() > 1)
        return bench_body(&o);
    const int ranks = bench_start(&o, o.gpus, &processes);
    o.ranks = processes ? 0 : ranks;
    if (!processes)
        return bench_body(&o);
    fflush(NULL); /* or each rank would print it again */
    status = launch_ranks("ep-overlap bench", ranks, bench_body, &o);
    if (epo_fail_text()[0] != '\0')
        return epo_tool_fail("bench", EPO_E_STATE);
    return status;
}

EPO_TOOL(70, bench, "what overlap brings on this machine, measured", bench_run)
