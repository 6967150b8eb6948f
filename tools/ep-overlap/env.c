/* SPDX-License-Identifier: Apache-2.0 */
#include "tool.h"

#include "core/status.h"
#include "core/text.h"
#include "input.h"
#include "json.h"
#include "rules/launch.h"
#include "rules/rules.h"
#include "rules/settings.h"

#include <ctype.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

static const char help[] =
    "usage: ep-overlap env --dispatcher D --gpu GPU --ep N [OPTIONS]\n\n"
    "The environment and the framework's arguments for a run with overlapped expert\n"
    "parallelism, or for its baseline.  A value that you have set is kept.\n"
    "Combinations that a rule forbids are refused, with the rule.\n\n"
    "  --dispatcher D     alltoall, flex, flex:deepep, flex:hybridep, flex:ncclep\n"
    "  --gpu GPU          a100, h100, h200, gh200, b200, b300, gb200, gb300, ...\n"
    "  --ep N             expert-parallel ranks\n"
    "  --tp N, --cp N     tensor- and context-parallel ranks (1)\n"
    "  --delay-wgrad      delayed weight gradients on top of overlap\n"
    "  --baseline         the arm without overlap\n"
    "  --cuda-graphs IMPL local, transformer_engine, full_iteration (none)\n"
    "  --nccl-ub          with NCCL user buffers\n"
    "  --format F         shell (default), json, pyxis (a --container-env list),\n"
    "                     megatron-lm, bridge (the arguments alone)\n"
    "  --json             the same as --format json\n\n"
    "examples:\n"
    "  eval \"$(ep-overlap env --dispatcher alltoall --gpu h100 --ep 8)\"\n"
    "  srun $(ep-overlap env --dispatcher flex:hybridep --gpu gb200 --ep 64 \\\n"
    "      --format pyxis) ...\n"
    "  torchrun pretrain_gpt.py $ARGS $(ep-overlap env --dispatcher flex --gpu h100 \\\n"
    "      --ep 8 --delay-wgrad --format megatron-lm)\n\n"
    "exit status: 0 fine, 1 a rule forbids the combination, 2 usage\n";

typedef struct env_work {
    epo_facts *facts;
    const char *format, *dispatcher, *gpu, *ep;
    bool delayed, baseline;
    epo_launch_variable variable[EPO_LAUNCH_VARIABLES_MAX + 1];
    size_t count;
    char megatron_lm[512], bridge[512];
} env_work;

static int put_number(env_work *w, const char *key, const char *text) {
    char *end;
    long n = strtol(text, &end, 10);
    if (end == text || *end != '\0' || n < 1 || n > 1000000)
        return epo_tool_usage("env", "\"%s\" is no number of ranks", text);
    epo_status status = epo_facts_set(w->facts, key, text, "the command line");
    return status == EPO_OK ? EPO_EXIT_FINE : epo_tool_fail("env", status);
}

static epo_status put(env_work *w, const char *key, const char *value) {
    return epo_facts_set(w->facts, key, value, "the command line");
}

static int keep(env_work *w, const char *key, const char *value) {
    epo_status status = put(w, key, value);
    return status == EPO_OK ? EPO_EXIT_FINE : epo_tool_fail("env", status);
}

static int take_option(env_work *w, int c, const char *value) {
    switch (c) {
    case 'd': w->dispatcher = value; return EPO_EXIT_FINE;
    case 'g': w->gpu = value; return EPO_EXIT_FINE;
    case 'e': w->ep = value; return put_number(w, "expert_model_parallel_size", value);
    case 't': return put_number(w, "tensor_model_parallel_size", value);
    case 'c': return put_number(w, "context_parallel_size", value);
    case 'C': return keep(w, "cuda_graph_impl", value);
    case 'f': w->format = value; return EPO_EXIT_FINE;
    default: return EPO_EXIT_USAGE;
    }
}

static int parse_options(int argc, char **argv, env_work *w) {
    static const struct option longs[] = {{"dispatcher", required_argument, NULL, 'd'},
                                          {"gpu", required_argument, NULL, 'g'},
                                          {"ep", required_argument, NULL, 'e'},
                                          {"tp", required_argument, NULL, 't'},
                                          {"cp", required_argument, NULL, 'c'},
                                          {"cuda-graphs", required_argument, NULL, 'C'},
                                          {"format", required_argument, NULL, 'f'},
                                          {"delay-wgrad", no_argument, NULL, 'w'},
                                          {"baseline", no_argument, NULL, 'b'},
                                          {"nccl-ub", no_argument, NULL, 'u'},
                                          {"json", no_argument, NULL, 'j'},
                                          {"help", no_argument, NULL, 'h'},
                                          {0}};
    int status = EPO_EXIT_FINE;
    optind = 0;
    opterr = 0;
    for (int c;
         status == EPO_EXIT_FINE && (c = getopt_long(argc, argv, ":h", longs, NULL)) != -1;) {
        switch (c) {
        case 'w': w->delayed = true; break;
        case 'b': w->baseline = true; break;
        case 'u': status = keep(w, "nccl_ub", "true"); break;
        case 'j': w->format = "json"; break;
        case 'h': fputs(help, stdout); return -1;
        case ':': return epo_tool_usage("env", "%s needs a value", argv[optind - 1]);
        case '?': return epo_tool_usage("env", "unknown option %s", argv[optind - 1]);
        default: status = take_option(w, c, optarg);
        }
    }
    if (status == EPO_EXIT_FINE && optind < argc)
        return epo_tool_usage("env", "what is \"%s\"?", argv[optind]);
    return status;
}

/* Text that a shell takes as it stands. */
static bool is_plain(const char *text, const char *also) {
    for (; *text != '\0'; text++)
        if (!isalnum((unsigned char)*text) && strchr(also, *text) == NULL)
            return false;
    return true;
}

#define KNOWN_GPUS "; known are a100, h100, h200, gh200, b200, b300, gb200, gb300 and their like"

static int check_choices(const env_work *w) {
    static const char *const dispatchers[] = {"alltoall",      "flex",        "flex:deepep",
                                              "flex:hybridep", "flex:ncclep", NULL};
    static const char *const formats[] = {"shell", "json", "pyxis", "megatron-lm", "bridge", NULL};
    const char *const *d = dispatchers, *const *f = formats;
    if (w->dispatcher == NULL || w->gpu == NULL || w->ep == NULL)
        return epo_tool_usage("env", "--dispatcher, --gpu and --ep are needed");
    if (!is_plain(w->gpu, "-_"))
        return epo_tool_usage("env", "unknown GPU \"%s\"" KNOWN_GPUS, w->gpu);
    while (*d != NULL && strcmp(*d, w->dispatcher) != 0)
        d++;
    if (*d == NULL)
        return epo_tool_usage("env",
                              "unknown dispatcher \"%s\"; they are alltoall, flex, flex:deepep, "
                              "flex:hybridep and flex:ncclep",
                              w->dispatcher);
    while (*f != NULL && strcmp(*f, w->format) != 0)
        f++;
    if (*f == NULL)
        return epo_tool_usage("env", "unknown format \"%s\"", w->format);
    if (w->baseline && w->delayed)
        return epo_tool_usage("env",
                              "delayed weight gradients need overlap; the baseline has none");
    return EPO_EXIT_FINE;
}

static epo_status fill_facts(env_work *w) {
    bool flex = strncmp(w->dispatcher, "flex", 4) == 0;
    const char *backend = strchr(w->dispatcher, ':');
    bool rack = strncasecmp(w->gpu, "gb", 2) == 0;
    if (flex && backend == NULL)
        backend = rack ? ":hybridep" : ":deepep";
    epo_status status = put(w, "gpu", w->gpu);
    if (status == EPO_OK)
        status = put(w, "overlap_moe_expert_parallel_comm", w->baseline ? "false" : "true");
    if (status == EPO_OK)
        status = put(w, "delay_wgrad_compute", w->delayed ? "true" : "false");
    if (status == EPO_OK)
        status = put(w, "moe_token_dispatcher_type", flex ? "flex" : "alltoall");
    if (status == EPO_OK && flex)
        status = put(w, "moe_flex_dispatcher_backend", backend + 1);
    static const char *const defaults[][2] = {{"tensor_model_parallel_size", "1"},
                                              {"context_parallel_size", "1"},
                                              {"cuda_graph_impl", "none"},
                                              {"nccl_ub", "false"}};
    for (size_t i = 0; i < sizeof defaults / sizeof *defaults && status == EPO_OK; i++)
        status = epo_facts_set_default(w->facts, defaults[i][0], defaults[i][1], "not given");
    return status == EPO_OK ? epo_settings_derive(w->facts) : status;
}

/* HybridEP compiles kernels at run time; its default folder is the home directory. */
static void add_cache(env_work *w) {
    const char *top = getenv("TMPDIR");
    const epo_fact *backend = epo_facts_find(w->facts, "flex_backend");
    if (backend == NULL || strcmp(backend->text, "hybridep") != 0)
        return;
    epo_launch_variable *v = &w->variable[w->count++];
    v->name = "HYBRID_EP_CACHE_DIR";
    v->why = "compiled kernels, on a node-local disk";
    snprintf(v->value, sizeof v->value, "%.40s/hybrid_ep.%lu",
             top != NULL && top[0] == '/' && is_plain(top, "/._-") ? top : "/tmp",
             (unsigned long)geteuid());
}

static bool concerns_launch(const epo_rule *rule) {
    return rule->scope == EPO_SCOPE_OVERLAP || rule->scope == EPO_SCOPE_DELAY_WGRAD ||
           rule->scope == EPO_SCOPE_DISPATCHER || rule->scope == EPO_SCOPE_ENVIRONMENT ||
           rule->scope == EPO_SCOPE_CUDA_GRAPH;
}

/* The rules over the run as it would be: our variables where the environment has
 * none.  Errors refuse, warnings go to stderr. */
static int judge(env_work *w) {
    struct epo_text errors = EPO_TEXT_INIT;
    size_t forbidden = 0;
    epo_status status = EPO_OK;
    for (size_t i = 0; i < w->count && status == EPO_OK; i++) {
        char key[96];
        const char *own = getenv(w->variable[i].name);
        snprintf(key, sizeof key, "env.%s", w->variable[i].name);
        status = epo_facts_set_text(w->facts, key, own != NULL ? own : w->variable[i].value,
                                    own != NULL ? "your environment" : "ep-overlap env");
    }
    if (status == EPO_OK)
        status = epo_input_environment(w->facts);
    for (size_t i = 0; i < epo_rules_count() && status == EPO_OK; i++) {
        epo_rule_verdict v;
        if (!concerns_launch(epo_rules_at(i)))
            continue;
        status = epo_rules_evaluate(epo_rules_at(i), w->facts, &v);
        if (status != EPO_OK || v.outcome != EPO_RULE_VIOLATED || v.severity < EPO_SEVERITY_WARN)
            continue;
        if (v.severity != EPO_SEVERITY_ERROR) {
            fprintf(stderr, "ep-overlap env: %s %s: %s\n", epo_severity_name(v.severity),
                    v.rule->id, v.rule->remedy);
        } else {
            epo_text_format(&errors, "%serror %s: %s", forbidden++ == 0 ? "" : "; ", v.rule->id,
                            v.rule->remedy);
        }
    }
    char *text = epo_text_take(&errors);
    if (status == EPO_OK && forbidden > 0 && text == NULL)
        status = epo_fail(EPO_E_NOMEM, "no memory");
    int exit_status = status != EPO_OK ? epo_tool_fail("env", status)
                      : forbidden == 0 ? EPO_EXIT_FINE
                                       : epo_tool_error("env", EPO_EXIT_NO, "%s", text);
    free(text);
    return exit_status;
}

static void print_shell(const env_work *w) {
    printf("# ep-overlap env: %s on %s, EP %s, %s\n", w->dispatcher, w->gpu, w->ep,
           w->baseline  ? "baseline without overlap"
           : w->delayed ? "overlap and delayed weight gradients"
                        : "overlap");
    for (size_t i = 0; i < w->count; i++)
        printf("export %s=\"${%s-%s}\" # %s\n", w->variable[i].name, w->variable[i].name,
               w->variable[i].value, w->variable[i].why);
    printf("export EP_OVERLAP_MEGATRON_ARGS=\"%s\"\n", w->megatron_lm);
    printf("export EP_OVERLAP_BRIDGE_OVERRIDES=\"%s\"\n", w->bridge);
}

static void print_json(const env_work *w) {
    epo_json json = {.out = stdout};
    epo_json_object(&json, NULL);
    epo_json_text(&json, "dispatcher", w->dispatcher);
    epo_json_text(&json, "gpu", w->gpu);
    epo_json_bool(&json, "overlap", !w->baseline);
    epo_json_bool(&json, "delay_wgrad", w->delayed);
    epo_json_object(&json, "environment");
    for (size_t i = 0; i < w->count; i++) {
        const char *own = getenv(w->variable[i].name);
        epo_json_text(&json, w->variable[i].name, own != NULL ? own : w->variable[i].value);
    }
    epo_json_end(&json, '}');
    epo_json_text(&json, "megatron_lm", w->megatron_lm);
    epo_json_text(&json, "bridge", w->bridge);
    epo_json_end(&json, '}');
}

static void print_pyxis(const env_work *w) {
    fputs("--container-env=", stdout);
    for (size_t i = 0; i < w->count; i++)
        printf("%s%s", i > 0 ? "," : "", w->variable[i].name);
    fputs(",EP_OVERLAP_MEGATRON_ARGS,EP_OVERLAP_BRIDGE_OVERRIDES\n", stdout);
}

static void print(const env_work *w) {
    if (strcmp(w->format, "json") == 0)
        print_json(w);
    else if (strcmp(w->format, "pyxis") == 0)
        print_pyxis(w);
    else if (strcmp(w->format, "megatron-lm") == 0)
        puts(w->megatron_lm);
    else if (strcmp(w->format, "bridge") == 0)
        puts(w->bridge);
    else
        print_shell(w);
}

static int run(env_work *w) {
    int status = check_choices(w);
    if (status != EPO_EXIT_FINE)
        return status;
    epo_status made = fill_facts(w);
    if (made == EPO_OK && epo_facts_find(w->facts, "gpu_major") == NULL)
        return epo_tool_usage("env", "unknown GPU \"%s\"" KNOWN_GPUS, w->gpu);
    if (made == EPO_OK)
        made = epo_launch_environment(w->facts, w->variable, &w->count);
    if (made != EPO_OK)
        return epo_tool_fail("env", made);
    add_cache(w);
    epo_launch_arguments(w->facts, EPO_FRAMEWORK_MEGATRON_LM, w->megatron_lm,
                         sizeof w->megatron_lm);
    epo_launch_arguments(w->facts, EPO_FRAMEWORK_BRIDGE, w->bridge, sizeof w->bridge);
    status = judge(w);
    if (status == EPO_EXIT_FINE)
        print(w);
    return status;
}

static int env_run(int argc, char **argv) {
    env_work w = {.facts = epo_facts_create(), .format = "shell"};
    if (w.facts == NULL)
        return epo_tool_fail("env", epo_fail(EPO_E_NOMEM, "no memory"));
    int status = parse_options(argc, argv, &w);
    if (status == EPO_EXIT_FINE)
        status = run(&w);
    epo_facts_destroy(w.facts);
    return status < 0 ? EPO_EXIT_FINE : status;
}

EPO_TOOL(30, env, "environment and arguments of a run, as shell, JSON, pyxis list", env_run)
