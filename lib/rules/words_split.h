/* SPDX-License-Identifier: Apache-2.0
 *
 * words_split.h - the state of reading a script, shared by the files that read it: words.c
 * (words), words_variable.c (what variables hold), words_function.c (functions and
 * subshells), words_argument.c (what they are called with), words_document.c (here-documents).
 */
#ifndef EPO_RULES_WORDS_SPLIT_H
#define EPO_RULES_WORDS_SPLIT_H

#include "core/facts.h"
#include "rules/words.h"

#include <ctype.h>
#include <stdint.h>
#include <string.h>

#define EPO_SPLIT_WORD_MAX 65536        /* bytes of one word */
#define EPO_SPLIT_SPENT_MAX (16u << 20) /* bytes that calls read: bodies, arguments */
#define EPO_SPLIT_BLANKS " \t\n\r"
#define EPO_SPLIT_CALLS_MAX 16     /* functions that one command names */
#define EPO_SPLIT_SUBSHELLS_MAX 64 /* inside each other */

typedef struct epo_function {
    char name[64];
    const char *from, *to; /* its body */
    unsigned line, body_line;
    bool subshell; /* NAME() ( ... ) */
    bool maybe;    /* a condition defines it */
    bool active, called;
} epo_function;

/* What a variable held before a subshell set it, or that it is a function's local. */
typedef struct epo_undo {
    char *name, *old; /* old NULL: nothing was assigned */
    bool is_local;
} epo_undo;

/* What a function was called with; the call's words own the texts. */
typedef struct epo_arguments {
    epo_word *word, *all; /* those that shift left, and the list */
    size_t count;
    int blocks; /* around the body */
    bool lost;  /* only a shell can tell them */
} epo_arguments;

typedef enum epo_given { EPO_GIVEN_NO, EPO_GIVEN_YES, EPO_GIVEN_PERHAPS } epo_given;

typedef struct epo_scopes {
    epo_function *functions;
    size_t function_count, function_room;
    epo_undo *undo;
    size_t undo_count, undo_room, undo_bytes;
    size_t spent;                          /* bytes of bodies read by calls */
    bool open_ended;                       /* a body that nothing ends: no more are looked for */
    int depth;                             /* calls inside each other */
    int base;                              /* parentheses around the call */
    bool left;                             /* behind a return */
    int subshells;                         /* around; those of calls count */
    uint64_t kinds;                        /* of the ( around, a bit each: 1 is a subshell */
    size_t mark[EPO_SPLIT_SUBSHELLS_MAX];  /* where the undo of each begins */
    size_t known[EPO_SPLIT_SUBSHELLS_MAX]; /* functions */
    struct {
        size_t function, word; /* its name's place; SIZE_MAX: not the command's own */
        bool maybe;
    } calls[EPO_SPLIT_CALLS_MAX]; /* of this command */
    int call_count;
    size_t command;           /* the word that is the command */
    epo_arguments *arguments; /* of the body that is read; NULL: the script's own */
    bool mentions;            /* the command is one that calls what it names: export -f, trap */
    bool sources;             /* behind source */
    bool piped;               /* the command reads a pipe */
    bool locals;              /* behind local in a function */
    bool pattern;             /* a case's pattern comes: its ) closes nothing */
    bool is_case;             /* behind case: a pattern follows "in" */
    bool finding;             /* only looks for a body's end */
    int braces;               /* finding: around */
    const char *found;        /* finding: behind the body */
} epo_scopes;

typedef struct epo_splitter {
    const char *text, *at, *end;
    unsigned line, word_line;
    epo_words *words;
    epo_facts *variables; /* assigned so far */
    char *buffer;         /* the word in the making */
    size_t length;
    bool in_word, open, many, begins, redirects;
    bool starts;           /* the word is at the start of a command, or behind then, do, else */
    bool assigns, exports; /* behind NAME=value at that start, behind export */
    enum { SETS_NONE, SETS_ONE, SETS_ALL, SETS_V } sets; /* names: behind for, read, printf -v */
    int blocks, parentheses; /* if ... fi, case ... esac, while ... done around; of an array */
    uint64_t loops;          /* around, a bit each: 1 is while or until */
    bool tests, maybe;       /* behind [ or grep, and behind its && or behind || */
    char quote;
    unsigned cut_line; /* the last line that is cut off from the command above */
    bool is_cut;       /* the command is one */
    size_t looked;     /* bytes, for the end of $( ) past quotes, in vain */
    int defaults;      /* ${NAME:-value} around */
    char document[64]; /* the word behind << whose lines come next; "": none */
    epo_scopes scopes;
    epo_status status;
} epo_splitter;

static inline bool epo_split_is_name(char c) { return isalnum((unsigned char)c) || c == '_'; }

static inline bool epo_split_is_among(const char *text, const char *const *words, size_t count) {
    while (count > 0 && strcmp(text, words[count - 1]) != 0)
        count--;
    return count > 0;
}

#define EPO_SPLIT_IS_AMONG(text, words)                                                            \
    epo_split_is_among((text), (words), sizeof(words) / sizeof *(words))

/* words.c */
bool epo_split_is_maybe(const epo_splitter *s);
void epo_split_step(epo_splitter *s); /* the next character or construct */
void epo_split_push(epo_splitter *s, char c);
/* A byte of a value; outside quotes blanks part words. */
void epo_split_expand(epo_splitter *s, char c);
void epo_split_end_word(epo_splitter *s);
void epo_split_end_command(epo_splitter *s);
void epo_split_leap(epo_splitter *s, const char *from, const char *to);

/* words_variable.c */
const char *epo_split_value(const epo_splitter *s, const char *name, size_t length);
void epo_split_assign(epo_splitter *s, const char *name, const char *value);
void epo_split_forget(epo_splitter *s, const char *from, const char *to);
bool epo_split_remember(epo_splitter *s);

/* words_function.c */
void epo_split_scopes_free(epo_splitter *s);
/* NAME() { ... } with `s->at` at its (, "function NAME { ... }" at its f; false: neither. */
bool epo_split_definition(epo_splitter *s);
bool epo_split_function_word(epo_splitter *s);
/* A word ended, not added yet. */
void epo_split_scopes_word(epo_splitter *s, bool starts);
/* A command ended: what it calls is read where it stands. */
void epo_split_call(epo_splitter *s);
void epo_split_open(epo_splitter *s, bool is_subshell);
void epo_split_close(epo_splitter *s);
bool epo_split_is_lost(const epo_splitter *s);
/* `name` is about to change. */
void epo_split_note(epo_splitter *s, const char *name, bool is_local);
/* Calls cost `bytes` more; false: they are too many. */
bool epo_split_spend(epo_splitter *s, size_t bytes);

/* words_argument.c */
/* The words from `from` to before `to`; free `all`. */
void epo_split_arguments_take(epo_splitter *s, epo_arguments *made, size_t from, size_t to);
/* $1, ${12}, $@, $*; false: only a shell can tell. */
bool epo_split_argument(epo_splitter *s, const char *name, size_t length);
/* Whether $1 is there, for ${1:-value} (not empty, too) and ${1-value}. */
epo_given epo_split_argument_given(const epo_splitter *s, const char *name, size_t length,
                                   bool not_empty);
/* ${@:2}: `name` at the @, `close` at the }; false: only a shell can tell. */
bool epo_split_arguments_from(epo_splitter *s, const char *name, const char *close);
/* A command ended: shift and the like. */
void epo_split_arguments_command(epo_splitter *s);
bool epo_split_arguments_in_loop(const char *from, const char *to);
void epo_split_arguments_drop(epo_splitter *s, size_t from, size_t to);

/* words_document.c */
void epo_split_note_document(epo_splitter *s);
void epo_split_pass_document(epo_splitter *s);

#endif
