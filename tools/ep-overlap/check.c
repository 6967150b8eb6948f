/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "tool.h"

#include "core/auto.h"
#include "core/probe_record.h"
#include "core/probe_run.h"

#include <getopt.h>
#include <grp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GROUPS_MAX 1024
#define INHERITED "SLURM_SPANK__SLURM_SPANK_OPTION_ep_overlap_"

static const char help[] =
    "usage: ep-overlap check [--node] [--show] [--config FILE] [--json]\n\n"
    "What this node offers, which dispatchers it can serve and why not the others,\n"
    "which engines a step gets (host; cuda, without which steps with GPUs have none),\n"
    "and how the site is set up: the configuration, plugin and Slurm side by side.\n\n"
    "  --node         the node alone, for a prolog or health check: all its GPUs,\n"
    "                 nothing of this shell's environment, and of the least versions\n"
    "                 driver and CUDA\n"
    "  --show         each effective setting and where it comes from\n"
    "  --config FILE  another configuration than the one that plugstack.conf names\n"
    "  --json         for programs\n\n"
    "examples:\n"
    "  srun -N1 --gpus=8 ep-overlap check          what a step there would find\n"
    "  ep-overlap check --node || echo drain       in a health check\n"
    "  ep-overlap check --show                     why is overlap off for me?\n\n"
    "exit status: 0 fine, 1 the configuration, a version or the node is not as it\n"
    "  must be, 2 usage, 4 the node could not be looked at\n";

static int parse_options(int argc, char **argv, check *c) {
    static const struct option longs[] = {
        {"node", no_argument, NULL, 'n'},         {"show", no_argument, NULL, 's'},
        {"config", required_argument, NULL, 'c'}, {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},         {0}};
    optind = 0;
    opterr = 0;
    for (int o; (o = getopt_long(argc, argv, ":h", longs, NULL)) != -1;) {
        switch (o) {
        case 'n': c->node = true; break;
        case 's': c->show = true; break;
        case 'c': c->config_path = optarg; break;
        case 'j': c->json = true; break;
        case 'h': fputs(help, stdout); return -1;
        case ':': return epo_tool_usage("check", "%s needs a value", argv[optind - 1]);
        default: return epo_tool_usage("check", "unknown option %s", argv[optind - 1]);
        }
    }
    if (optind < argc)
        return epo_tool_usage("check", "\"%s\" is one word too many", argv[optind]);
    return EPO_EXIT_FINE;
}

static void load_config(check *c, const struct epo_trust *trust) {
    bool own_line = c->config_path == NULL; /* --config asks about a file */
    bool named = c->config_path != NULL || c->versions.config[0] != '\0';
    if (c->config_path == NULL)
        c->config_path = c->versions.config[0] != '\0' ? c->versions.config : EP_CONFIG;
    if (own_line && c->versions.argument[0] != '\0') /* as the plugin says it */
        snprintf(c->config_error, sizeof c->config_error,
                 "plugstack.conf: found \"%.128s\", allowed is conf=FILE", c->versions.argument);
    else if (epo_config_load(c->config_path, named, trust, &c->config) != EPO_OK)
        snprintf(c->config_error, sizeof c->config_error, "%s", epo_fail_text());
}

/* A job's srun inherits what sbatch or salloc was given. */
static void read_wishes(struct epo_policy_input *input) {
    static const char *const names[] = {"ep_overlap", "ep_dispatcher", "delay_wgrad"};
    for (int id = 0; id < EPO_OPT_COUNT; id++) {
        char name[128];
        const char *text = getenv(epo_options[id].input);
        input->command[id] = input->inherited[id] = input->environment[id] = EPO_UNSET;
        if (text != NULL && text[0] != '\0')
            (void)epo_option_parse((epo_option_id)id, text, epo_options[id].input,
                                   &input->environment[id]);
        snprintf(name, sizeof name, INHERITED "%s", names[id]);
        text = getenv(name);
        if (text != NULL && id == EPO_OPT_DELAY_WGRAD)
            input->inherited[id] = EPO_WGRAD_DELAYED;
        else if (text != NULL)
            (void)epo_option_parse((epo_option_id)id, text, name, &input->inherited[id]);
    }
    if (getenv(INHERITED "no_delay_wgrad") != NULL)
        input->inherited[EPO_OPT_DELAY_WGRAD] = EPO_WGRAD_INLINE;
}

static const char *node_name(void) {
    static char name[256];
    const char *given = getenv("SLURMD_NODENAME");
    if (given != NULL && given[0] != '\0')
        return given;
    if (gethostname(name, sizeof name - 1) != 0)
        return "this node";
    name[strcspn(name, ".")] = '\0';
    return name;
}

static void decide(check *c) {
    gid_t groups[GROUPS_MAX];
    int count = getgroups(GROUPS_MAX - 1, groups);
    struct epo_policy_input input = {.config = c->config,
                                     .config_error = c->config_error,
                                     .user = geteuid(),
                                     .groups = groups,
                                     .group_count = count > 0 ? count : 0,
                                     .partition = getenv("SLURM_JOB_PARTITION"),
                                     .account = getenv("SLURM_JOB_ACCOUNT"),
                                     .nodes = node_name(),
                                     .lenient = true};
    groups[input.group_count++] = getegid();
    read_wishes(&input);
    if (epo_policy_decide(&input, &c->decision) != EPO_OK)
        snprintf(c->decision_error, sizeof c->decision_error, "%s", epo_fail_text());
    const struct epo_class *class = c->config != NULL ? epo_auto_class(&input, node_name()) : NULL;
    c->gpu_class = class != NULL ? class->name : NULL;
}

static const char *own_variable(void *context, const char *name) {
    const check *c = context;
    /* a health check asks about the node, not about the shell it runs in */
    return c->node ? NULL : getenv(name);
}

static void run_probe(check *c, const struct epo_trust *trust) {
    char path[CHECK_PATH];
    int program = -1;
    bool absent;
    if (c->config != NULL && c->config->probe_path != NULL)
        snprintf(path, sizeof path, "%s", c->config->probe_path);
    else if (!check_own_file("libexec/ep-overlap/probe", EP_PROBE, path)) {
        snprintf(c->probe_error, sizeof c->probe_error, "%.900s is not installed", path);
        return;
    }
    if (epo_trust_open(path, trust, &program, &absent) != EPO_OK) {
        snprintf(c->probe_error, sizeof c->probe_error, "%s", epo_fail_text());
        return;
    }
    const struct epo_probe_request request = {
        .program = program,
        .nvml_path = c->config != NULL ? c->config->checks.nvml_path : NULL,
        .node = node_name(),
        .variable = own_variable,
        .context = c,
        .whole_node = c->node,
        .timeout_ms = c->config != NULL ? c->config->checks.timeout_ms : 5000};
    if (epo_probe_run(&request, c->facts) != EPO_OK)
        snprintf(c->probe_error, sizeof c->probe_error, "%s", epo_fail_text());
    close(program);
}

static epo_status copy_facts(const epo_facts *from, epo_facts *to) {
    epo_status status = EPO_OK;
    for (size_t i = 0; i < epo_facts_count(from) && status == EPO_OK; i++) {
        const epo_fact *f = epo_facts_at(from, i);
        status = f->kind == EPO_FACT_UNKNOWN ? epo_facts_set_unknown(to, f->key, f->text, f->source)
                 : f->kind == EPO_FACT_NULL  ? epo_facts_set(to, f->key, NULL, f->source)
                 : f->kind == EPO_FACT_TEXT  ? epo_facts_set_text(to, f->key, f->text, f->source)
                                             : epo_facts_set(to, f->key, f->text, f->source);
    }
    return status;
}

static bool holds_gpus(const check *c) {
    const epo_fact *count = epo_facts_find(c->facts, "node.gpu_count");
    return count == NULL || count->kind == EPO_FACT_UNKNOWN || count->number > 0;
}

static epo_status judge_one(check *c, int dispatcher, bool general, epo_findings *findings) {
    epo_facts *facts = epo_facts_create();
    struct epo_checks checks = {.on_unknown = EPO_UNKNOWN_WARN};
    if (c->config != NULL)
        checks = c->config->checks;
    if (c->node) /* what jobs bring along */
        checks.nccl = checks.torch = checks.te = NULL;
    epo_node_question question = {.gpu_class = general ? c->gpu_class : NULL,
                                  .checks = general ? &checks : NULL,
                                  .dispatcher = dispatcher,
                                  .dispatcher_given = true,
                                  .holds_gpus = holds_gpus(c)};
    epo_status status =
        facts == NULL ? epo_fail(EPO_E_NOMEM, "no memory") : copy_facts(c->facts, facts);
    if (status == EPO_OK)
        status = epo_node_environment(facts, own_variable, c);
    if (status == EPO_OK)
        status = epo_node_judge(&question, facts, findings);
    epo_facts_destroy(facts);
    return status;
}

/* Against a dispatcher stands what does not stand against all of them. */
static void subtract(epo_findings *of, const epo_findings *what) {
    size_t kept = 0;
    of->errors = of->warnings = 0;
    for (size_t i = 0; i < of->count; i++) {
        bool common = false;
        for (size_t k = 0; k < what->count && !common; k++)
            common = strcmp(of->item[i].id, what->item[k].id) == 0;
        if (common || of->item[i].severity < EPO_SEVERITY_WARN)
            continue;
        of->errors += of->item[i].severity == EPO_SEVERITY_ERROR;
        of->warnings += of->item[i].severity == EPO_SEVERITY_WARN;
        of->item[kept++] = of->item[i];
    }
    of->count = kept;
}

static epo_status judge(check *c) {
    epo_status status = judge_one(c, EPO_CHOICE_ALLTOALL, true, &c->general);
    for (int d = 0; d < CHECK_DISPATCHERS && status == EPO_OK; d++) {
        status = judge_one(c, d, false, &c->dispatcher[d]);
        if (status == EPO_OK)
            subtract(&c->dispatcher[d], &c->general);
    }
    return status;
}

const char *check_verdict(const check *c, int *status) {
    const epo_fact *stopped = epo_facts_find(c->facts, EPO_PROBE_STOPPED);
    *status = EPO_EXIT_NO;
    if (c->config == NULL)
        return "the configuration cannot be used: steps that ask for overlap fail";
    if (c->versions.mismatch)
        return "the plugin was built for another release of Slurm: build it again";
    if (c->general.errors > 0)
        return "this node is not as the site wants it";
    *status = EPO_EXIT_UNDECIDED;
    if (c->probe_error[0] != '\0' || stopped != NULL)
        return "this node could not be looked at to the end";
    *status = EPO_EXIT_FINE;
    return "fine";
}

static int check_run(int argc, char **argv) {
    check *c = calloc(1, sizeof *c);
    if (c == NULL || (c->facts = epo_facts_create()) == NULL) {
        free(c);
        return epo_tool_fail("check", epo_fail(EPO_E_NOMEM, "no memory"));
    }
    struct epo_trust trust = {.owners = {geteuid()}, .count = 1};
    int status = parse_options(argc, argv, c);
    if (status == EPO_EXIT_FINE) {
        check_versions_find(&c->versions);
        load_config(c, &trust);
        check_engines_find(&c->versions, c->config != NULL ? c->config->preload_path : NULL);
        decide(c);
        run_probe(c, &trust);
        epo_status judged = judge(c);
        if (judged != EPO_OK) {
            status = epo_tool_fail("check", judged);
        } else {
            (void)check_verdict(c, &status);
            if (c->json)
                check_print_json(c);
            else
                check_print_text(c);
        }
    } else if (status < 0) {
        status = EPO_EXIT_FINE;
    }
    epo_config_destroy(c->config);
    epo_facts_destroy(c->facts);
    free(c);
    return status;
}

EPO_TOOL(10, check, "what this node offers, and how the site is set up", check_run)
