/* SPDX-License-Identifier: Apache-2.0
 *
 * node.h - what a node's facts, a program's arguments and the site's least versions
 * say about a request: everything that speaks against it, together.
 */
#ifndef EPO_RULES_NODE_H
#define EPO_RULES_NODE_H

#include "core/config.h"
#include "core/facts.h"
#include "core/options.h"
#include "rules/command.h"
#include "rules/rules.h"

#define EPO_FINDINGS_MAX 64

typedef struct epo_finding {
    char id[16]; /* of the rule, or NODE-..., MIN-..., ARG-... */
    epo_severity severity;
    bool here; /* it hangs on this node: another one may say otherwise */
    char found[256], needed[192], remedy[320];
} epo_finding;

typedef struct epo_findings {
    epo_finding item[EPO_FINDINGS_MAX];
    size_t count;
    size_t errors, warnings;
    size_t more; /* that found no room */
} epo_findings;

typedef struct epo_node_question {
    const struct epo_checks *checks; /* NULL: none */
    const char *gpu_class;           /* that the site gave the node, or NULL: it must have it */
    const char *site_gpu;            /* the same, for where the node has told nothing yet */
    int dispatcher;                  /* EPO_CHOICE_... */
    bool dispatcher_given;           /* somebody asked for it, it is not a default */
    bool delayed;                    /* delayed weight gradients are asked for */
    bool automatic;                  /* what cannot be served falls back */
    bool holds_gpus;
    bool arguments_fixed;    /* nothing will append arguments (ep-overlap exec does) */
    epo_framework framework; /* `facts` hold its settings; UNKNOWN: another program */
} epo_node_question;

/* Reads a task's words.  The framework is UNKNOWN where they show none; then nothing
 * of them is taken for a setting. */
epo_status epo_node_arguments(char *const *arguments, int count, epo_facts *facts,
                              epo_framework *framework);

/* The variables that rules read and nobody spoke of, by `get` (NULL: not set). */
epo_status epo_node_environment(epo_facts *facts,
                                const char *(*get)(void *context, const char *name), void *context);

/* "h100" for "h100", "H100-80GB" and "NVIDIA H100 80GB HBM3"; false for no GPU's name. */
bool epo_node_gpu(const char *name, char *gpu, size_t room);

/* Megatron's backend of flex on GPUs of that name, or class; NULL: not known. */
const char *epo_node_flex_backend(const char *name);

/* Judges.  Puts into `facts` what follows from the question.  A user's variable that
 * harms is a warning.  Fails for memory only, or on a mistake in the rules' table. */
epo_status epo_node_judge(const epo_node_question *question, epo_facts *facts,
                          epo_findings *findings);

/* "DSP-016: found deep_ep.imports = False (...); needed ...; ..." */
void epo_finding_text(const epo_finding *finding, char *text, size_t room);

#endif
