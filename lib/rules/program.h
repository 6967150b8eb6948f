/* SPDX-License-Identifier: Apache-2.0
 *
 * program.h - which program a task really runs, seen through launchers, profilers
 * and shells, by exact names; and where its own arguments are.
 */
#ifndef EPO_RULES_PROGRAM_H
#define EPO_RULES_PROGRAM_H

#include "rules/command.h"
#include "rules/words.h"

typedef enum epo_program_kind {
    EPO_PROGRAM_OTHER, /* a program that takes none of a framework's arguments */
    EPO_PROGRAM_FRAMEWORK,
    EPO_PROGRAM_UNDECIDED /* it cannot be told without running something */
} epo_program_kind;

typedef struct epo_program {
    epo_program_kind kind;
    epo_framework framework; /* of a FRAMEWORK */
    char why[192];           /* UNDECIDED: what cannot be read */
    bool by_exec;            /* "ep-overlap exec" stands before it and completes it */
    epo_words words;         /* from the script on, the framework's arguments behind it */
    size_t text;             /* which argument is a shell's text that holds it; 0: none */
    size_t end;              /* in that text, the offset behind its last argument */
} epo_program;

/* Reads an argument vector.  Never runs, opens or looks up anything.  Fails for
 * memory, or a vector beyond all bounds; *program is to be freed either way. */
epo_status epo_program_read(char *const *arguments, int count, epo_program *program);
void epo_program_free(epo_program *program);

#endif
