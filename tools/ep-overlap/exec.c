/* SPDX-License-Identifier: Apache-2.0 */
#include "json.h"
#include "tool.h"

#include "core/names.h"
#include "core/options.h"
#include "core/status.h"
#include "core/text.h"
#include "core/unserved.h"
#include "measure/launch.h"
#include "rules/complete.h"
#include "rules/launch.h"
#include "rules/node.h"

#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* As env, nohup and timeout have it. */
#define EXIT_NOT_RUN 126
#define EXIT_NOT_FOUND 127

static const char help[] =
    "usage: ep-overlap exec [--dry-run [--json]] [--] COMMAND [ARGUMENTS...]\n\n"
    "Runs COMMAND inside a task of srun and gives Megatron-LM or Megatron-Bridge the\n"
    "arguments that the step's decision (srun --ep-overlap=...) calls for.  Arguments\n"
    "that you gave stay; where they contradict the options, or a rule forbids the\n"
    "combination, nothing runs.  It looks through env, numactl, nsys, ncu, uv run,\n"
    "python -m, torchrun and bash -c.  Every other program runs as it is.  Rank 0\n"
    "prints what was done.\n\n"
    "  --dry-run          print the command instead of running it\n"
    "  --json             with --dry-run: for programs\n\n"
    "examples:\n"
    "  srun --ep-overlap=on --delay-wgrad \\\n"
    "      ep-overlap exec -- python pretrain_gpt.py $ARGS\n"
    "  srun --ep-overlap=on bash -c 'ep-overlap exec -- torchrun --nproc-per-node 8 \\\n"
    "      --nnodes $SLURM_NNODES --node-rank $SLURM_NODEID pretrain_gpt.py \"$@\"' \\\n"
    "      train $ARGS\n\n"
    "exit status: that of COMMAND; 1 arguments that contradict or that a rule\n"
    "  forbids, 2 usage, 126 COMMAND cannot be run, 127 it is not found\n";

typedef struct exec_work {
    char **argv;
    int argc;
    bool dry, json, first; /* first: rank 0, which speaks */
    bool told;             /* an error that is the whole answer */
    bool automatic;
    int dispatcher;
    char asked_dispatcher[64];
    epo_wish wish;
    epo_program program;
    epo_completion completion;
    char **vector; /* what is run; NULL: argv */
    char arguments[1024];
} exec_work;

static void say(const exec_work *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(const exec_work *w, const char *format, ...) {
    va_list args;
    if (!w->first)
        return;
    va_start(args, format);
    fputs("ep-overlap exec: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

static const char *variable(const char *name) {
    const char *value = getenv(name);
    return value == NULL || value[0] == '\0' ? NULL : value;
}

/* --- the decision ---------------------------------------------------------------- */

static bool is_given(const char *name) {
    const char *given = getenv(EPO_OUT_GIVEN);
    size_t length = strlen(name);
    if (given == NULL) /* decided by hand: all of it is meant */
        return strcmp(name, "auto") != 0;
    for (const char *at = given; (at = strstr(at, name)) != NULL; at += length)
        if ((at == given || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0'))
            return true;
    return false;
}

/* 0, or an exit status. */
static int read_dispatcher(exec_work *w) {
    const char *kind = variable(EPO_OUT_DISPATCHER), *backend = variable(EPO_OUT_FLEX_BACKEND);
    char text[48];
    if (kind == NULL)
        kind = "alltoall";
    snprintf(text, sizeof text, "%.20s%s%.20s", kind, backend != NULL ? ":" : "",
             backend != NULL ? backend : "");
    if (epo_option_parse(EPO_OPT_DISPATCHER, text, EPO_OUT_DISPATCHER, &w->dispatcher) != EPO_OK)
        return epo_tool_error("exec", EPO_EXIT_USAGE, "%s", epo_fail_text());
    snprintf(w->asked_dispatcher, sizeof w->asked_dispatcher, "--ep-dispatcher=%s", text);
    return EPO_EXIT_FINE;
}

static int read_wish(exec_work *w) {
    const char *delay = variable(EPO_OUT_DELAY_WGRAD);
    if (delay != NULL && strcmp(delay, "0") != 0 && strcmp(delay, "1") != 0)
        return epo_tool_usage("exec", EPO_OUT_DELAY_WGRAD " is \"%.64s\", allowed is 0 or 1",
                              delay);
    w->wish.delayed = delay != NULL && delay[0] == '1';
    w->automatic = is_given("auto");
    for (int id = 0; id < EPO_OPT_COUNT; id++)
        w->wish.given[id] = is_given(epo_options[id].key);
    w->wish.asked_by[EPO_OPT_OVERLAP] = "--ep-overlap=on";
    w->wish.asked_by[EPO_OPT_DISPATCHER] = w->asked_dispatcher;
    w->wish.asked_by[EPO_OPT_DELAY_WGRAD] = w->wish.delayed ? "--delay-wgrad" : "--no-delay-wgrad";
    return read_dispatcher(w);
}

/* What the plugin wrote for scripts, else the same from the decision. */
static epo_status wanted_arguments(exec_work *w) {
    bool bridge = w->program.framework == EPO_FRAMEWORK_BRIDGE;
    w->wish.arguments = variable(bridge ? EPO_OUT_BRIDGE_OVERRIDES : EPO_OUT_MEGATRON_ARGS);
    if (w->wish.arguments != NULL)
        return EPO_OK;
    bool flex = w->dispatcher != EPO_CHOICE_ALLTOALL;
    const char *backend = epo_dispatcher_backend(w->dispatcher);
    const char *const values[][2] = {{"overlap_moe_expert_parallel_comm", "true"},
                                     {"delay_wgrad_compute", w->wish.delayed ? "true" : "false"},
                                     {"moe_token_dispatcher_type", flex ? "flex" : "alltoall"},
                                     {"flex_backend", !flex             ? NULL
                                                      : backend != NULL ? backend
                                                                        : "deepep"}};
    epo_facts *facts = epo_facts_create();
    epo_status status = facts == NULL ? epo_fail(EPO_E_NOMEM, "no memory") : EPO_OK;
    for (size_t i = 0; i < sizeof values / sizeof *values && status == EPO_OK; i++)
        status = epo_facts_set(facts, values[i][0], values[i][1], "the decision");
    if (status == EPO_OK)
        epo_launch_arguments(facts, w->program.framework, w->arguments, sizeof w->arguments);
    w->wish.arguments = w->arguments;
    epo_facts_destroy(facts);
    return status;
}

/* --- the rules --------------------------------------------------------------------- */

static const char *get_variable(void *context, const char *name) {
    (void)context;
    return getenv(name);
}

/* What the plugin says of variables is not said twice. */
static bool is_worth_saying(const epo_finding *finding) {
    const epo_rule *rule = epo_rules_find(finding->id);
    return finding->severity == EPO_SEVERITY_ERROR ||
           (finding->severity == EPO_SEVERITY_WARN &&
            (rule == NULL || strstr(rule->condition, "env.") == NULL));
}

static void print_findings(const exec_work *w, const epo_findings *findings) {
    char text[1024];
    for (size_t i = 0; i < findings->count; i++) {
        const epo_finding *finding = &findings->item[i];
        if (!is_worth_saying(finding))
            continue;
        epo_finding_text(finding, text, sizeof text);
        epo_text_clean(text);
        say(w, "%s %s", epo_severity_name(finding->severity), text);
    }
}

/* The whole run as it will be; *errors: how many rules forbid it. */
static epo_status judge(const exec_work *w, char *const *vector, size_t *errors) {
    static epo_findings findings;
    epo_node_question question = {.dispatcher = w->dispatcher,
                                  .dispatcher_given = w->wish.given[EPO_OPT_DISPATCHER],
                                  .delayed = w->wish.delayed,
                                  .automatic = w->automatic};
    epo_facts *facts = epo_facts_create();
    int count = 0;
    while (vector[count] != NULL)
        count++;
    epo_status status = facts == NULL ? epo_fail(EPO_E_NOMEM, "no memory") : EPO_OK;
    if (status == EPO_OK)
        status = epo_node_arguments(vector, count, facts, &question.framework);
    if (status == EPO_OK)
        status = epo_node_environment(facts, get_variable, NULL);
    if (status == EPO_OK)
        status = epo_node_judge(&question, facts, &findings);
    if (status == EPO_OK) {
        print_findings(w, &findings);
        *errors = findings.errors;
    }
    epo_facts_destroy(facts);
    return status;
}

/* --- what is run -------------------------------------------------------------------- */

static void tell_command(const exec_work *w, const char *what, const epo_words *added) {
    struct epo_text line = EPO_TEXT_INIT;
    char *const *vector = w->vector != NULL ? w->vector : w->argv;
    for (size_t i = 0; added != NULL && i < added->count; i++) {
        epo_text_add_string(&line, i == 0 ? " (added " : " ");
        epo_quote(&line, added->word[i].text);
    }
    epo_text_add_string(&line, added != NULL && added->count > 0 ? "):" : ":");
    for (size_t i = 0; vector[i] != NULL; i++) {
        epo_text_add_string(&line, " ");
        epo_quote(&line, vector[i]);
    }
    char *text = epo_text_take(&line);
    if (text != NULL) {
        epo_text_clean(text);
        say(w, "%s%s", what, text);
    }
    free(text);
}

static int refuse(const exec_work *w, size_t reasons, const char *what) {
    if (!w->first)
        fprintf(stderr, "ep-overlap exec: %s (%zu; rank 0 lists them)\n", what, reasons);
    return EPO_EXIT_NO;
}

/* `auto` adds to arguments that enable overlap already, and never refuses. */
static bool enables_overlap(const exec_work *w) {
    for (size_t i = 0; i < w->completion.added.count; i++) {
        const char *word = w->completion.added.word[i].text;
        if (strcmp(word, "--overlap-moe-expert-parallel-comm") == 0 ||
            strncmp(word, "comm_overlap.overlap_moe_expert_parallel_comm=", 46) == 0)
            return false;
    }
    return w->completion.contradictions == 0;
}

static int complete(exec_work *w) {
    size_t errors = 0;
    epo_status status = wanted_arguments(w);
    if (status == EPO_OK)
        status = epo_complete(&w->program, &w->wish, &w->completion);
    if (status == EPO_OK && w->automatic && !enables_overlap(w)) {
        tell_command(w, "auto: the arguments do not enable overlap, nothing is added", NULL);
        return EPO_EXIT_FINE;
    }
    if (status == EPO_OK)
        status = epo_complete_vector(w->argv, w->argc, &w->program, &w->completion, &w->vector);
    for (size_t i = 0; status == EPO_OK && i < w->completion.contradictions; i++)
        say(w, "error: %s", w->completion.contradiction[i]);
    if (status == EPO_OK)
        status = judge(w, w->vector, &errors);
    if (status != EPO_OK)
        return epo_tool_fail("exec", status);
    errors += w->completion.contradictions;
    if (errors > 0 && !w->automatic)
        return refuse(w, errors, "refused, the arguments do not go with the options or the rules");
    if (errors > 0) {
        epo_vector_free(w->vector);
        w->vector = NULL;
        tell_command(w, "auto: rules forbid overlap, nothing is added", NULL);
        return EPO_EXIT_FINE;
    }
    const char *framework = epo_framework_name(w->program.framework);
    char what[64];
    snprintf(what, sizeof what, "on, %s%s", framework,
             w->completion.added.count == 0 ? ", nothing is missing" : "");
    tell_command(w, what, &w->completion.added);
    return EPO_EXIT_FINE;
}

static int prepare_on(exec_work *w) {
    int exit_status = read_wish(w);
    if (exit_status != EPO_EXIT_FINE)
        return exit_status;
    epo_status status = epo_program_read(w->argv, w->argc, &w->program);
    if (status != EPO_OK)
        return epo_tool_fail("exec", status);
    if (w->program.kind == EPO_PROGRAM_FRAMEWORK && !w->program.by_exec)
        return complete(w);
    if (w->program.kind == EPO_PROGRAM_UNDECIDED) {
        say(w, "undecided, nothing is added: %s; put ep-overlap exec straight before the program",
            w->program.why);
        return EPO_EXIT_FINE;
    }
    tell_command(w,
                 w->program.by_exec ? "on, the inner ep-overlap exec adds what is missing"
                                    : "on, not Megatron-LM or Bridge, nothing is added",
                 NULL);
    return EPO_EXIT_FINE;
}

static int prepare(exec_work *w) {
    const char *decision = variable(EPO_OUT_DECISION), *reason = variable(EPO_OUT_REASON);
    char node[128];
    if (epo_step_is_unserved(node, sizeof node)) {
        w->told = w->json;
        return epo_tool_error("exec", EPO_EXIT_NO,
                              "node %s has no ep-overlap plugin, but the step asks for overlap: "
                              "leave it out (--exclude=%s), or tell the site's administrators",
                              node, node);
    }
    if (decision != NULL && strcmp(decision, "on") == 0)
        return prepare_on(w);
    if (decision != NULL && strcmp(decision, "off") != 0)
        return epo_tool_usage("exec", EPO_OUT_DECISION " is \"%.64s\", allowed is on or off",
                              decision);
    char what[600];
    if (decision != NULL)
        snprintf(what, sizeof what, "off (%.500s), nothing is added",
                 reason != NULL ? reason : "no reason is given");
    else
        snprintf(what, sizeof what,
                 "overlap is not on in this step (srun --ep-overlap=on), nothing is added");
    tell_command(w, what, NULL);
    return EPO_EXIT_FINE;
}

static int run_command(const exec_work *w) {
    char *const *vector = w->vector != NULL ? w->vector : w->argv;
    if (w->dry) {
        struct epo_text line = EPO_TEXT_INIT;
        for (size_t i = 0; vector[i] != NULL; i++) {
            epo_text_add_string(&line, i == 0 ? "" : " ");
            epo_quote(&line, vector[i]);
        }
        char *text = epo_text_take(&line);
        puts(text != NULL ? text : "");
        free(text);
        return text != NULL ? EPO_EXIT_FINE : EPO_EXIT_SYSTEM;
    }
    fflush(NULL);
    execvp(vector[0], vector);
    int failed = errno;
    fprintf(stderr, "ep-overlap exec: %s: %s\n", vector[0], strerror(failed));
    return failed == ENOENT ? EXIT_NOT_FOUND : EXIT_NOT_RUN;
}

static void json_words(epo_json *json, const char *name, const epo_words *words) {
    epo_json_array(json, name);
    for (size_t i = 0; i < words->count; i++)
        epo_json_text(json, NULL, words->word[i].text);
    epo_json_end(json, ']');
}

/* What would be run, or why nothing would. */
static void print_json(const exec_work *w, int status) {
    epo_json json = {.out = stdout};
    char *const *vector = w->vector != NULL ? w->vector : w->argv;
    const char *decision = variable(EPO_OUT_DECISION);
    bool framework = w->program.kind == EPO_PROGRAM_FRAMEWORK;
    epo_json_object(&json, NULL);
    epo_json_text(&json, "decision", decision != NULL ? decision : "off");
    epo_json_text(&json, "framework", framework ? epo_framework_name(w->program.framework) : NULL);
    epo_json_bool(&json, "runs", status == EPO_EXIT_FINE);
    epo_json_array(&json, "contradictions");
    for (size_t i = 0; i < w->completion.contradictions; i++)
        epo_json_text(&json, NULL, w->completion.contradiction[i]);
    epo_json_end(&json, ']');
    json_words(&json, "added", &w->completion.added);
    epo_json_array(&json, "command");
    for (size_t i = 0; vector[i] != NULL; i++)
        epo_json_text(&json, NULL, vector[i]);
    epo_json_end(&json, ']');
    epo_json_end(&json, '}');
}

static int exec_run(int argc, char **argv) {
    static const struct option longs[] = {{"dry-run", no_argument, NULL, 'n'},
                                          {"json", no_argument, NULL, 'j'},
                                          {"help", no_argument, NULL, 'h'},
                                          {0}};
    exec_work w = {.first = !launch_is_other()};
    optind = 0;
    opterr = 0;
    for (int c; (c = getopt_long(argc, argv, "+:h", longs, NULL)) != -1;) {
        switch (c) {
        case 'n': w.dry = true; break;
        case 'j': w.json = true; break;
        case 'h': fputs(help, stdout); return EPO_EXIT_FINE;
        default: return epo_tool_usage("exec", "unknown option %s", argv[optind - 1]);
        }
    }
    w.argv = argv + optind;
    w.argc = argc - optind;
    if (w.argc < 1)
        return epo_tool_usage("exec", "which command?");
    if (w.json && !w.dry)
        return epo_tool_usage("exec", "--json goes with --dry-run");
    int status = prepare(&w);
    if (w.json && !w.told && (status == EPO_EXIT_FINE || status == EPO_EXIT_NO))
        print_json(&w, status);
    else if (status == EPO_EXIT_FINE)
        status = run_command(&w);
    epo_vector_free(w.vector);
    epo_completion_free(&w.completion);
    epo_program_free(&w.program);
    return status;
}

EPO_TOOL(35, exec, "run a program with the arguments that the decision calls for", exec_run)
