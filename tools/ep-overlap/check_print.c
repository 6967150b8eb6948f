/* SPDX-License-Identifier: Apache-2.0 */
#ifdef HAVE_CONFIG_H
#include "config.h"
#endif
#include "check.h"
#include "json.h"
#include "tool.h"

#include "core/probe_record.h"

#include <string.h>

#ifndef PACKAGE_VERSION
#define PACKAGE_VERSION "unknown"
#endif

static const char *or_unknown(const char *text) { return text[0] != '\0' ? text : "not found"; }

static void print_fact(const check *c, const char *label, const char *key) {
    const epo_fact *fact = epo_facts_find(c->facts, key);
    if (fact == NULL)
        return;
    if (fact->kind == EPO_FACT_UNKNOWN)
        printf("  %-14s not known: %s (%s)\n", label, fact->text, fact->source);
    else if (fact->kind == EPO_FACT_NULL)
        printf("  %-14s none (%s)\n", label, fact->source);
    else
        printf("  %-14s %s (%s)\n", label, fact->text, fact->source);
}

static void print_findings(const epo_findings *findings, const char *before) {
    for (size_t i = 0; i < findings->count; i++) {
        const epo_finding *f = &findings->item[i];
        if (f->severity < EPO_SEVERITY_WARN)
            continue;
        printf("%s%s %s: %s\n%s    found  %s\n%s    needed %s\n", before,
               epo_severity_name(f->severity), f->id, f->remedy, before, f->found, before,
               f->needed);
    }
}

static void print_setup(const check *c) {
    const check_versions *v = &c->versions;
    printf("setup\n  ep-overlap     " PACKAGE_VERSION "\n");
    printf("  plugin         %s%s%s, built for Slurm %s\n", or_unknown(v->plugin),
           v->plugstack[0] != '\0' ? ", in " : ", in no plugstack.conf", v->plugstack,
           or_unknown(v->built_for));
    if (v->listed > 1)
        printf("    WARNING: listed %d times in plugstack.conf: the last line counts, take the "
               "others out\n",
               v->listed);
    else if (v->listed == 0 && v->plugin[0] != '\0' && v->slurm[0] != '\0')
        printf(
            "    WARNING: no plugstack.conf of this machine loads it, so srun has no --ep-overlap: "
            "see \"Install\" in admin.md\n");
    printf("  Slurm          %s%s\n", or_unknown(v->slurm),
           v->mismatch ? "  ERROR: another release than the plugin was built for" : "");
    printf("  engines        %s, in %s%s\n",
           v->host && v->cuda ? "host, cuda"
           : v->cuda          ? "cuda"
           : v->host          ? "host"
                              : "none",
           v->engines,
           v->cuda ? "" : " (none for GPUs: configure --with-cuda, or packages made with -g)");
    printf("  configuration  %s%s\n", c->config_path,
           c->config == NULL         ? ""
           : c->config->path == NULL ? " (not there: built-in values)"
                                     : "");
    if (c->config == NULL)
        printf("    ERROR: %s\n", c->config_error);
}

static void print_settings(const check *c) {
    char text[EPO_DECISION_REASON_MAX + 128];
    printf("settings of a step of yours that gives no option\n");
    if (c->decision_error[0] != '\0') {
        printf("  refused: %s\n", c->decision_error);
        return;
    }
    for (int id = 0; id < EPO_OPT_COUNT; id++)
        printf("  %-14s %s (%s)\n", epo_options[id].name,
               epo_option_word((epo_option_id)id, c->decision.choice[id].value),
               epo_source_text(c->decision.choice[id].source));
    epo_decision_text(&c->decision, text, sizeof text);
    printf("  so it runs     %s\n", text);
    if (c->config == NULL || !c->show)
        return;
    const struct epo_checks *k = &c->config->checks;
    const struct {
        const char *name, *value;
    } least[] = {{"driver", k->driver},
                 {"cuda", k->cuda},
                 {"nccl", k->nccl},
                 {"torch", k->torch},
                 {"te", k->te}};
    const char *from = c->config->path != NULL ? c->config->path : "built in";
    static const char *const unknown[] = {"warn", "fail", "ignore"};
    printf("settings of the site (%s)\n", from);
    printf("  checks.timeout_ms %d, on_unknown %s, require_gpu %s, nvml_path %s\n", k->timeout_ms,
           unknown[k->on_unknown], k->require_gpu ? "true" : "false",
           k->nvml_path != NULL ? k->nvml_path : "the loader's search");
    printf("  checks.minimum   ");
    for (size_t i = 0; i < sizeof least / sizeof *least; i++)
        printf(" %s %s%s", least[i].name, least[i].value != NULL ? least[i].value : "-",
               i + 1 < sizeof least / sizeof *least ? "," : "\n");
    printf("  policy            %d rules, %d node classes, %d variables\n", c->config->rule_count,
           c->config->class_count, c->config->environment_count);
    printf("  on_failed_request %s\n",
           c->config->on_failed_request == EPO_FAILED_WARN ? "warn" : "fail");
}

static void print_node(const check *c) {
    static const struct {
        const char *label, *key;
    } lines[] = {{"GPUs", "node.gpu_count"},
                 {"", "node.gpus"},
                 {"capability", "node.compute_capability"},
                 {"memory, MiB", "node.gpu_memory_mib"},
                 {"MIG", "node.mig"},
                 {"all P2P", "node.all_gpus_p2p"},
                 {"all NVLink", "node.all_gpus_nvlink"},
                 {"task sees", "task.visible_gpus"},
                 {"driver", "node.driver_version"},
                 {"CUDA", "node.cuda_version"},
                 {"nvcc", "node.cuda_home_has_nvcc"},
                 {"NCCL", "nccl_version"},
                 {"container", "in_container"}};
    static const struct {
        const char *label, *key;
    } python[] = {{"Python", "python.path"},
                  {"PyTorch", "torch_version"},
                  {"TransformerE.", "te_version"},
                  {"Triton", "triton_version"},
                  {"deep_ep", "deep_ep.imports"}};
    printf("node%s%s\n", c->gpu_class != NULL ? ", class " : "",
           c->gpu_class != NULL ? c->gpu_class : "");
    if (c->probe_error[0] != '\0')
        printf("  not looked at: %s\n", c->probe_error);
    print_fact(c, "probe stopped", EPO_PROBE_STOPPED);
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        print_fact(c, lines[i].label, lines[i].key);
    for (size_t i = 0; i < sizeof python / sizeof *python && !c->node; i++)
        print_fact(c, python[i].label, python[i].key);
    print_findings(&c->general, "  ");
}

/* Without GPUs our own dispatchers run on the host's engine; without an answer nobody
 * knows. */
static const char *served(const check *c, int dispatcher) {
    const epo_fact *count = epo_facts_find(c->facts, "node.gpu_count");
    if (c->dispatcher[dispatcher].errors > 0)
        return "no";
    if (dispatcher == EPO_CHOICE_ALLTOALL || (count != NULL && count->kind == EPO_FACT_NUMBER))
        return count != NULL && count->kind == EPO_FACT_NUMBER && count->number == 0
                   ? "yes, by the host engine"
                   : "yes";
    return "not known";
}

void check_print_text(const check *c) {
    int status;
    print_setup(c);
    print_settings(c);
    print_node(c);
    printf("dispatchers\n");
    for (int d = 0; d < CHECK_DISPATCHERS; d++) {
        printf("  %-14s %s\n", epo_option_word(EPO_OPT_DISPATCHER, d), served(c, d));
        print_findings(&c->dispatcher[d], "    ");
    }
    printf("%s\n", check_verdict(c, &status));
}

static void json_findings(epo_json *json, const epo_findings *findings) {
    epo_json_array(json, "findings");
    for (size_t i = 0; i < findings->count; i++) {
        const epo_finding *f = &findings->item[i];
        epo_json_object(json, NULL);
        epo_json_text(json, "id", f->id);
        epo_json_text(json, "severity", epo_severity_name(f->severity));
        epo_json_text(json, "found", f->found);
        epo_json_text(json, "needed", f->needed);
        epo_json_text(json, "remedy", f->remedy);
        epo_json_end(json, '}');
    }
    epo_json_end(json, ']');
}

static void json_setup(epo_json *json, const check *c) {
    const check_versions *v = &c->versions;
    epo_json_object(json, "setup");
    epo_json_text(json, "version", PACKAGE_VERSION);
    epo_json_text(json, "plugin", v->plugin[0] != '\0' ? v->plugin : NULL);
    epo_json_text(json, "plugstack", v->plugstack[0] != '\0' ? v->plugstack : NULL);
    epo_json_integer(json, "plugstack_lines", v->listed);
    epo_json_text(json, "plugin_slurm", v->built_for[0] != '\0' ? v->built_for : NULL);
    epo_json_text(json, "slurm", v->slurm[0] != '\0' ? v->slurm : NULL);
    epo_json_bool(json, "slurm_matches", !v->mismatch);
    epo_json_text(json, "engines", v->engines);
    epo_json_bool(json, "engine_host", v->host);
    epo_json_bool(json, "engine_cuda", v->cuda);
    epo_json_text(json, "configuration", c->config_path);
    epo_json_text(json, "configuration_error", c->config == NULL ? c->config_error : NULL);
    epo_json_end(json, '}');
}

static void json_settings(epo_json *json, const check *c) {
    epo_json_object(json, "settings");
    for (int id = 0; id < EPO_OPT_COUNT && c->decision_error[0] == '\0'; id++) {
        epo_json_object(json, epo_options[id].name);
        epo_json_text(json, "value",
                      epo_option_word((epo_option_id)id, c->decision.choice[id].value));
        epo_json_text(json, "source", epo_source_text(c->decision.choice[id].source));
        epo_json_end(json, '}');
    }
    epo_json_bool(json, "on", c->decision.on);
    epo_json_text(json, "reason",
                  c->decision_error[0] != '\0' ? c->decision_error : c->decision.reason);
    epo_json_end(json, '}');
}

static void json_node(epo_json *json, const check *c) {
    epo_json_object(json, "node");
    epo_json_text(json, "class", c->gpu_class);
    epo_json_text(json, "probe_error", c->probe_error[0] != '\0' ? c->probe_error : NULL);
    epo_json_object(json, "facts");
    for (size_t i = 0; i < epo_facts_count(c->facts); i++) {
        const epo_fact *f = epo_facts_at(c->facts, i);
        epo_json_object(json, f->key);
        epo_json_bool(json, "known", f->kind != EPO_FACT_UNKNOWN);
        if (f->kind == EPO_FACT_BOOL)
            epo_json_bool(json, "value", f->number != 0);
        else if (f->kind == EPO_FACT_NUMBER)
            epo_json_number(json, "value", f->number);
        else
            epo_json_text(json, f->kind == EPO_FACT_UNKNOWN ? "why" : "value",
                          f->kind == EPO_FACT_NULL ? NULL : f->text);
        epo_json_text(json, "source", f->source);
        epo_json_end(json, '}');
    }
    epo_json_end(json, '}');
    json_findings(json, &c->general);
    epo_json_end(json, '}');
}

void check_print_json(const check *c) {
    int status;
    epo_json json = {.out = stdout};
    epo_json_object(&json, NULL);
    json_setup(&json, c);
    json_settings(&json, c);
    json_node(&json, c);
    epo_json_object(&json, "dispatchers");
    for (int d = 0; d < CHECK_DISPATCHERS; d++) {
        epo_json_object(&json, epo_option_word(EPO_OPT_DISPATCHER, d));
        epo_json_text(&json, "served", served(c, d));
        json_findings(&json, &c->dispatcher[d]);
        epo_json_end(&json, '}');
    }
    epo_json_end(&json, '}');
    epo_json_text(&json, "verdict", check_verdict(c, &status));
    epo_json_end(&json, '}');
    putchar('\n');
}
