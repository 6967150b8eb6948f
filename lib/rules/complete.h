/* SPDX-License-Identifier: Apache-2.0
 *
 * complete.h - what a framework's arguments lack for a decision, and where they
 * contradict it.
 */
#ifndef EPO_RULES_COMPLETE_H
#define EPO_RULES_COMPLETE_H

#include "core/options.h"
#include "core/text.h"
#include "rules/program.h"

#define EPO_CONTRADICTIONS_MAX 8

typedef struct epo_wish {
    const char *arguments;               /* wanted, blanks between; NULL or "": none */
    bool given[EPO_OPT_COUNT];           /* somebody asked for the option: no default */
    const char *asked_by[EPO_OPT_COUNT]; /* how messages name it: "--ep-dispatcher=flex" */
    bool delayed;                        /* delayed weight gradients are wanted */
} epo_wish;

typedef struct epo_completion {
    epo_words added;
    char contradiction[EPO_CONTRADICTIONS_MAX][320]; /* one line each, both sides named */
    size_t contradictions;
} epo_completion;

/* Compares `program`, a FRAMEWORK, with the wish.  What the user gave stays; where
 * it differs from what an option asked for, that is a contradiction.  To be freed
 * either way. */
epo_status epo_complete(const epo_program *program, const epo_wish *wish,
                        epo_completion *completion);
/* The vector with what was added: behind its end, or inside the shell's text.  NULL
 * at the end; the caller frees the vector with epo_vector_free. */
epo_status epo_complete_vector(char *const *arguments, int count, const epo_program *program,
                               const epo_completion *completion, char ***vector);
void epo_vector_free(char **vector);
/* Adds `word` so that a shell reads it as one word. */
void epo_quote(struct epo_text *text, const char *word);
void epo_completion_free(epo_completion *completion);

#endif
