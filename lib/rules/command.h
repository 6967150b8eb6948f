/* SPDX-License-Identifier: Apache-2.0
 *
 * command.h - what a training command says: Megatron-LM's arguments, Bridge's
 * overrides and its performance scripts' flags, launchers and variables before it.
 */
#ifndef EPO_RULES_COMMAND_H
#define EPO_RULES_COMMAND_H

#include "core/facts.h"
#include "rules/words.h"

typedef enum epo_framework {
    EPO_FRAMEWORK_UNKNOWN,
    EPO_FRAMEWORK_MEGATRON_LM,
    EPO_FRAMEWORK_BRIDGE
} epo_framework;

typedef struct epo_command {
    epo_framework framework;
    size_t settings; /* that rules read */
    /* Behind the training script stands what only a shell can tell: $EXTRA, "$@". */
    bool open_arguments;
    unsigned open_line;
    /* A step asks for overlap (srun --ep-overlap=on), the arguments do not enable it, and
     * no `ep-overlap exec` adds it: it will be refused. */
    bool step_lacks;
} epo_command;

/* Reads words into facts.  `name` stands before the place of each fact ("run.sh"
 * gives "run.sh:12 --bf16"); NULL for an argument vector.  With `is_script`,
 * exported variables are noted as the script's too.  Looks into `bash -c TEXT`.  What
 * `ep-overlap exec` will add because of srun's options counts as given. */
epo_status epo_command_read(const epo_words *words, const char *name, bool is_script,
                            epo_facts *facts, epo_command *command);

/* "megatron-lm", "bridge", "unknown". */
const char *epo_framework_name(epo_framework framework);

#endif
