/* SPDX-License-Identifier: Apache-2.0
 *
 * input.h - configurations in every form that lint reads, as facts.
 */
#ifndef EPO_TOOLS_INPUT_H
#define EPO_TOOLS_INPUT_H

#include "core/facts.h"
#include "rules/words.h"

typedef enum epo_input_kind {
    EPO_INPUT_COMMAND,
    EPO_INPUT_SCRIPT,
    EPO_INPUT_YAML,
    EPO_INPUT_LOG_MEGATRON_LM,
    EPO_INPUT_LOG_BRIDGE
} epo_input_kind;

typedef struct epo_input {
    const char *name;
    epo_input_kind kind;
    size_t settings;       /* that rules read */
    bool megatron_lm;      /* a command or script for Megatron-LM */
    bool defaults_unknown; /* takes settings from elsewhere (--yaml-cfg, a cut dump, $EXTRA) */
    unsigned open_line;    /* of a script: where $EXTRA or the like stands; 0: nowhere */
    char uncalled[64];     /* of a script: a function that nothing calls; line 0: none */
    unsigned uncalled_line, source_line; /* source_line: where it reads another file */
    unsigned cut_line; /* of a script: options that no command goes on to; 0: none */
    bool step_lacks;   /* srun asks for overlap, and nothing enables it in the arguments */
} epo_input;

/* Reads a script, a YAML file or a log ("-": standard input) into facts; the
 * kind is told from name and content. */
epo_status epo_input_file(const char *path, epo_facts *facts, epo_input *input);
epo_status epo_input_command(int argc, char **argv, epo_facts *facts, epo_input *input);
/* Megatron-LM's arguments kept in YAML, as the words of a command. */
typedef struct epo_recipe {
    epo_words words; /* free with epo_words_free */
    bool has_arguments;
} epo_recipe;

/* A YAML file: Bridge's settings into facts, a recipe's arguments into `recipe`
 * (zero-initialised). */
epo_status epo_input_yaml(const char *path, const char *name, epo_facts *facts, size_t *settings,
                          epo_recipe *recipe);
/* *taken: whether `path` leads into a recipe's section. */
epo_status epo_recipe_put(epo_recipe *recipe, const char *path, const char *value, size_t line,
                          bool *taken);

/* Variables that rules read, from this process's environment; unset ones are
 * known to be unset.  What is there stays. */
epo_status epo_input_environment(epo_facts *facts);

const char *epo_input_kind_name(epo_input_kind kind);

#endif
