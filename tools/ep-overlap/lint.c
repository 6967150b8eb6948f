/* SPDX-License-Identifier: Apache-2.0 */
#include "tool.h"

#include "core/status.h"
#include "input.h"
#include "lint_print.h"
#include "rules/settings.h"

#include <getopt.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: ep-overlap lint [OPTIONS] [FILE]... [-- COMMAND ARGS...]\n\n"
    "Checks a training configuration against the rules of Megatron-LM,\n"
    "Megatron-Bridge, TransformerEngine and DeepEP for overlapped expert parallelism,\n"
    "before it runs.\n\n"
    "FILE is a job script, YAML (Bridge's configuration, or a recipe with\n"
    "Megatron-LM's arguments), or a log that begins with the framework's\n"
    "configuration; \"-\" is standard input.  COMMAND is a Megatron-LM command line, or\n"
    "one with Bridge overrides (comm_overlap.delay_wgrad_compute=true); what it says\n"
    "wins over the files, and this environment's variables count for it.\n\n"
    "  --set KEY=VALUE    a fact that the input does not tell: te_version=2.7.0,\n"
    "                     gpu=h100, torch_version=2.8.0, num_nodes=2, world_size=16,\n"
    "                     env.NAME=VALUE\n"
    "  --strict           warnings count as violations\n"
    "  --all              list every rule, the passed and undecided ones too\n"
    "  --json             for programs\n"
    "  --environment      take this environment's variables for files as well\n"
    "  --no-environment   not even for COMMAND\n\n"
    "examples:\n"
    "  ep-overlap lint -- torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 \\\n"
    "      --num-experts 64 --expert-model-parallel-size 8 \\\n"
    "      --overlap-moe-expert-parallel-comm\n"
    "  ep-overlap lint train.sbatch --set te_version=2.9.0\n"
    "  ep-overlap lint run.yaml --strict -- \\\n"
    "      python run.py comm_overlap.delay_wgrad_compute=true\n"
    "  ep-overlap lint --json slurm-4711.out | jq '.errors'\n\n"
    "exit status: 0 nothing violated, 1 violated, 2 usage, 3 unreadable,\n"
    "  4 no settings found\n";

typedef struct lint_options {
    bool strict, all, json;
    int environment; /* 1 yes, 0 no, -1 for a command */
} lint_options;

/* KEY=VALUE, its key copied. */
static int split_set(const char *text, char *key, size_t size) {
    const char *equals = strchr(text, '=');
    if (equals == NULL || equals == text || (size_t)(equals - text) >= size)
        return epo_tool_usage("lint", "--set takes KEY=VALUE, not \"%s\"", text);
    snprintf(key, size, "%.*s", (int)(equals - text), text);
    const char *wanted = epo_keys_misfit(key, equals + 1);
    return wanted == NULL
               ? EPO_EXIT_FINE
               : epo_tool_usage("lint", "--set: %s takes %s, not \"%s\"", key, wanted, equals + 1);
}

static int set_fact(epo_facts *facts, const char *text) {
    const char *equals = strchr(text, '=');
    char key[256];
    if (split_set(text, key, sizeof key) != EPO_EXIT_FINE)
        return EPO_EXIT_USAGE;
    bool known = true;
    epo_status status = EPO_OK;
    if (strncmp(key, "env.", 4) == 0)
        status = epo_facts_set_text(facts, key, equals + 1, "--set");
    else if (epo_keys_find(key, strlen(key)) != NULL)
        status = epo_facts_set(facts, key, equals + 1, "--set");
    else
        status = epo_setting_put(facts, key, equals + 1, "--set", &known);
    if (!known)
        return epo_tool_usage("lint", "--set: no rule reads \"%s\"", key);
    return status == EPO_OK ? EPO_EXIT_FINE : epo_tool_fail("lint", status);
}

/* Options stand before "--"; --set is applied last, so it wins. */
static int parse_options(int argc, char **argv, lint_options *o, char **sets, int *set_count) {
    static const struct option longs[] = {
        {"set", required_argument, NULL, 's'},   {"strict", no_argument, NULL, 'S'},
        {"all", no_argument, NULL, 'a'},         {"json", no_argument, NULL, 'j'},
        {"environment", no_argument, NULL, 'e'}, {"no-environment", no_argument, NULL, 'n'},
        {"help", no_argument, NULL, 'h'},        {0}};
    optind = 0;
    opterr = 0;
    for (int c; (c = getopt_long(argc, argv, ":h", longs, NULL)) != -1;) {
        switch (c) {
        case 's': sets[(*set_count)++] = optarg; break;
        case 'S': o->strict = true; break;
        case 'a': o->all = true; break;
        case 'j': o->json = true; break;
        case 'e': o->environment = 1; break;
        case 'n': o->environment = 0; break;
        case 'h': fputs(help, stdout); return -1;
        case ':': return epo_tool_usage("lint", "%s needs a value", argv[optind - 1]);
        default: return epo_tool_usage("lint", "unknown option %s", argv[optind - 1]);
        }
    }
    return EPO_EXIT_FINE;
}

static epo_status finish_facts(epo_facts *facts, const epo_input *inputs, int count) {
    epo_status status = EPO_OK;
    bool lm = false, bridge = false, unknown = false;
    for (int i = 0; i < count; i++) {
        lm = lm || inputs[i].megatron_lm;
        bridge = bridge || inputs[i].kind == EPO_INPUT_LOG_BRIDGE;
        unknown = unknown || inputs[i].defaults_unknown;
    }
    if (bridge && !unknown)
        status = epo_settings_default(facts, EPO_DEFAULTS_MEGATRON_CORE);
    else if (lm && !unknown)
        status = epo_settings_default(facts, EPO_DEFAULTS_MEGATRON_LM);
    static const char *const launch_only[] = {"harness.used", "harness.moe_a2a_overlap",
                                              "harness.recompute_num_layers",
                                              "script.env.CUDA_DEVICE_MAX_CONNECTIONS"};
    for (size_t i = 0; i < sizeof launch_only / sizeof *launch_only && status == EPO_OK; i++)
        status = epo_facts_set_default(facts, launch_only[i], NULL, "not given");
    return status == EPO_OK ? epo_settings_derive(facts) : status;
}

typedef struct lint_work {
    lint_options options;
    epo_facts *facts;
    epo_input inputs[32];
    int input_count;
    char **sets;
    int set_count;
} lint_work;

static epo_status read_inputs(lint_work *w, int files, char **file, int command_count,
                              char **command) {
    epo_status status = EPO_OK;
    for (int i = 0; i < files && status == EPO_OK; i++)
        status = epo_input_file(file[i], w->facts, &w->inputs[w->input_count++]);
    if (status == EPO_OK && command_count > 0)
        status = epo_input_command(command_count, command, w->facts, &w->inputs[w->input_count++]);
    bool environment =
        w->options.environment == 1 || (w->options.environment == -1 && command_count > 0);
    if (status == EPO_OK && environment)
        status = epo_input_environment(w->facts);
    return status;
}

static int nothing_found(const epo_input *input) {
    if (input->uncalled_line > 0)
        return epo_tool_error("lint", EPO_EXIT_UNDECIDED,
                              "%s: no setting that a rule reads was found (read as: %s, in which "
                              "nothing calls %s() of line %u)",
                              input->name, epo_input_kind_name(input->kind), input->uncalled,
                              input->uncalled_line);
    return epo_tool_error("lint", EPO_EXIT_UNDECIDED,
                          "%s: no setting that a rule reads was found (read as: %s)", input->name,
                          epo_input_kind_name(input->kind));
}

static int judge(lint_work *w) {
    epo_lint_result result = {.inputs = w->inputs,
                              .input_count = w->input_count,
                              .facts = w->facts,
                              .strict = w->options.strict};
    size_t settings = 0;
    for (int i = 0; i < w->input_count; i++)
        settings += w->inputs[i].settings;
    if (settings + (size_t)w->set_count == 0)
        return nothing_found(&w->inputs[0]);
    result.verdicts = calloc(epo_rules_count(), sizeof *result.verdicts);
    if (result.verdicts == NULL)
        return epo_tool_fail("lint", epo_fail(EPO_E_NOMEM, "no memory"));
    for (size_t i = 0; i < epo_rules_count(); i++) {
        epo_status status = epo_rules_evaluate(epo_rules_at(i), w->facts, &result.verdicts[i]);
        if (status != EPO_OK) {
            free(result.verdicts);
            return epo_tool_fail("lint", status);
        }
    }
    epo_lint_count(&result);
    if (w->options.json)
        epo_lint_print_json(&result);
    else
        epo_lint_print_text(&result, w->options.all);
    free(result.verdicts);
    bool failed = result.errors > 0 || (w->options.strict && result.warnings > 0);
    return failed ? EPO_EXIT_NO : EPO_EXIT_FINE;
}

static int run_inputs(lint_work *w, int files, char **file, int command_count, char **command) {
    if (files == 0 && command_count == 0 && w->set_count == 0)
        return epo_tool_usage("lint", "name a file, or a command behind --");
    for (int i = 0; i < files; i++)
        if (file[i][0] == '\0')
            return epo_tool_usage("lint", EPO_TOOL_NO_NAME);
    if (files > 30)
        return epo_tool_usage("lint", "at most 30 files at once, not %d", files);
    for (int i = 0; i < w->set_count; i++) {
        char key[256];
        if (split_set(w->sets[i], key, sizeof key) != EPO_EXIT_FINE)
            return EPO_EXIT_USAGE;
    }
    epo_status status = read_inputs(w, files, file, command_count, command);
    int exit_status = status == EPO_OK ? EPO_EXIT_FINE : epo_tool_fail("lint", status);
    for (int i = 0; i < w->set_count && exit_status == EPO_EXIT_FINE; i++)
        exit_status = set_fact(w->facts, w->sets[i]);
    if (exit_status != EPO_EXIT_FINE)
        return exit_status;
    status = finish_facts(w->facts, w->inputs, w->input_count);
    return status == EPO_OK ? judge(w) : epo_tool_fail("lint", status);
}

static int lint_run(int argc, char **argv) {
    int own = 1;
    while (own < argc && strcmp(argv[own], "--") != 0)
        own++;
    lint_work w = {.options = {.environment = -1}};
    w.sets = calloc((size_t)argc + 1, sizeof *w.sets);
    w.facts = epo_facts_create();
    int status = EPO_EXIT_SYSTEM;
    if (w.sets == NULL || w.facts == NULL) {
        status = epo_tool_fail("lint", epo_fail(EPO_E_NOMEM, "no memory"));
    } else {
        status = parse_options(own, argv, &w.options, w.sets, &w.set_count);
        int rest = own < argc ? argc - own - 1 : 0;
        if (status == EPO_EXIT_FINE)
            status = run_inputs(&w, own - optind, argv + optind, rest, argv + argc - rest);
        else if (status < 0)
            status = EPO_EXIT_FINE;
    }
    epo_facts_destroy(w.facts);
    free(w.sets);
    return status;
}

EPO_TOOL(20, lint, "check a configuration against the frameworks' rules", lint_run)
