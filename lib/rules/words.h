/* SPDX-License-Identifier: Apache-2.0
 *
 * words.h - the words of a command: an argument vector, or a shell script read
 * as far as one can without running it.
 */
#ifndef EPO_RULES_WORDS_H
#define EPO_RULES_WORDS_H

#include "ep_overlap.h"

#include <stdbool.h>
#include <stddef.h>

#define EPO_WORDS_MAX 262144

typedef struct epo_word {
    char *text;
    unsigned line;  /* 0: an argument vector */
    bool open;      /* holds something that only a shell can tell: $(date), $UNSET */
    bool many;      /* open, and may be any number of words: $UNSET, "$@" */
    bool begins;    /* first word of a command */
    bool maybe;     /* of a script: inside if, case, while, behind || or [ ... ] && */
    bool redirects; /* of a script: holds an unquoted < or > */
    size_t end;     /* of a script: the offset behind it */
} epo_word;

typedef struct epo_words {
    epo_word *word;
    size_t count, room;
    /* Of a script, for its reader: the first function that nothing in it calls, and the first
     * file that it sources; line 0: none. */
    char uncalled[64];
    unsigned uncalled_line, source_line;
    unsigned cut_line; /* the first that begins with --, and no command goes on to it */
} epo_words;

/* Zero-initialise; free with epo_words_free. */
epo_status epo_words_add(epo_words *words, const char *text, unsigned line, bool open, bool begins);
/* Splits `text` as a shell does: quotes, backslashes, comments, lines that go on,
 * variables assigned earlier in the same text.  A function's words stand where it is called.
 * Never runs anything. */
epo_status epo_words_split(epo_words *words, const char *text, size_t length);
void epo_words_free(epo_words *words);

#endif
