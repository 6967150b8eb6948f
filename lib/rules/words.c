/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/words.h"

#include "core/status.h"
#include "rules/words_split.h"

#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULTS_MAX 8         /* ${A:-${B:-...}} */
#define LOOKED_MAX (16u << 20) /* bytes of $( ) looked at in vain */
#define ARITHMETIC_MAX 4096    /* bytes of (( )), so that many of ( cost no more */

epo_status epo_words_add(epo_words *words, const char *text, unsigned line, bool open,
                         bool begins) {
    if (words->count == EPO_WORDS_MAX)
        return epo_fail(EPO_E_OVERFLOW, "line %u: more than %d words; is this a script?", line,
                        EPO_WORDS_MAX);
    if (words->count == words->room) {
        size_t room = words->room == 0 ? 64 : words->room * 2;
        epo_word *grown = reallocarray(words->word, room, sizeof *grown);
        if (grown == NULL)
            return epo_fail(EPO_E_NOMEM, "words: no memory for %zu words", room);
        words->word = grown;
        words->room = room;
    }
    epo_word made = {.text = strdup(text), .line = line, .open = open, .begins = begins};
    if (made.text == NULL)
        return epo_fail(EPO_E_NOMEM, "words: no memory");
    words->word[words->count++] = made;
    return EPO_OK;
}

void epo_words_free(epo_words *words) {
    for (size_t i = 0; i < words->count; i++)
        free(words->word[i].text);
    free(words->word);
    *words = (epo_words){0};
}

void epo_split_push(epo_splitter *s, char c) {
    if (!s->in_word)
        s->word_line = s->line;
    s->in_word = true;
    if (s->length + 1 < EPO_SPLIT_WORD_MAX)
        s->buffer[s->length++] = c;
    else if (s->status == EPO_OK)
        s->status =
            epo_fail(EPO_E_OVERFLOW, "line %u: a word longer than %d bytes; is this a script?",
                     s->line, EPO_SPLIT_WORD_MAX);
}

/* What an if, a while, a case or a test decides only a shell can tell. */
bool epo_split_is_maybe(const epo_splitter *s) { return s->blocks > 0 || s->maybe; }

/* if, case, while and until open a block; for runs what it holds. */
static void follow_block(epo_splitter *s) {
    static const char *const opens[] = {"if", "case"}, *const closes[] = {"fi", "esac"};
    static const char *const loops[] = {"for", "select", "while", "until"};
    bool is_while = strcmp(s->buffer, "while") == 0 || strcmp(s->buffer, "until") == 0;
    if (EPO_SPLIT_IS_AMONG(s->buffer, opens)) {
        s->blocks++;
    } else if (EPO_SPLIT_IS_AMONG(s->buffer, closes)) {
        s->blocks -= s->blocks > 0;
    } else if (EPO_SPLIT_IS_AMONG(s->buffer, loops)) {
        s->blocks += is_while;
        s->loops = s->loops << 1 | is_while;
    } else if (strcmp(s->buffer, "done") == 0) {
        s->blocks -= (s->loops & 1) != 0 && s->blocks > 0;
        s->loops >>= 1;
    }
}

/* What the word that a command begins with makes of those behind it. */
static void follow_start(epo_splitter *s) {
    static const char *const goes_on[] = {"then",  "else",  "elif", "do",   "!",    "{", "if",
                                          "while", "until", "fi",   "done", "esac", "}"};
    static const char *const tests[] = {"[",     "[[",    "test",  "grep", "command", "type",
                                        "which", "pgrep", "false", "cmp",  "diff"};
    static const char *const exports[] = {"export",   "declare", "local",
                                          "readonly", "typeset", "eval"};
    static const char *const one[] = {"for", "select"};
    static const char *const all[] = {"read", "unset", "mapfile", "readarray", "getopts", "let"};
    follow_block(s);
    s->starts = EPO_SPLIT_IS_AMONG(s->buffer, goes_on);
    s->tests = s->tests || EPO_SPLIT_IS_AMONG(s->buffer, tests);
    s->exports = EPO_SPLIT_IS_AMONG(s->buffer, exports);
    s->sets = EPO_SPLIT_IS_AMONG(s->buffer, one)   ? SETS_ONE
              : EPO_SPLIT_IS_AMONG(s->buffer, all) ? SETS_ALL
              : strcmp(s->buffer, "printf") == 0   ? SETS_V
                                                   : SETS_NONE;
}

/* A word's part in what variables hold: only at the start of a command, and behind export and
 * the like, is NAME=value an assignment. */
static void follow_word(epo_splitter *s) {
    if (s->sets == SETS_V) {
        s->sets = strcmp(s->buffer, "-v") == 0 ? SETS_ONE : SETS_NONE;
    } else if (s->sets != SETS_NONE && s->buffer[0] != '-') {
        epo_split_forget(s, s->buffer, s->buffer + s->length);
        s->sets = s->sets == SETS_ALL ? SETS_ALL : SETS_NONE;
    }
    bool is_assignment = (s->starts || s->assigns || s->exports) && epo_split_remember(s);
    if (s->starts && !is_assignment)
        follow_start(s);
    else
        s->starts = false;
    s->assigns = is_assignment && !s->exports;
}

void epo_split_end_word(epo_splitter *s) {
    if (!s->in_word)
        return;
    s->buffer[s->length] = '\0';
    s->is_cut = s->is_cut || (s->begins && s->cut_line > 0 && s->word_line == s->cut_line);
    if (s->is_cut) { /* a shell finds no command of this name */
        s->cut_line = 0;
        s->length = 0;
        s->in_word = s->open = s->many = s->redirects = false;
        return;
    }
    epo_split_scopes_word(s, s->starts);
    follow_word(s);
    if (s->status == EPO_OK)
        s->status = epo_words_add(s->words, s->buffer, s->word_line, s->open, s->begins);
    if (s->status == EPO_OK) {
        epo_word *made = &s->words->word[s->words->count - 1];
        made->maybe = epo_split_is_maybe(s) || epo_split_is_lost(s);
        made->many = s->many;
        made->redirects = s->redirects;
        made->end = (size_t)(s->at - s->text);
    }
    s->length = 0;
    s->in_word = s->open = s->many = s->begins = s->redirects = false;
}

void epo_split_end_command(epo_splitter *s) {
    epo_split_end_word(s);
    if (s->status == EPO_OK)
        epo_split_call(s);
    s->begins = s->starts = true;
    s->assigns = s->exports = s->is_cut = false;
    s->sets = SETS_NONE;
}

/* A line, or a command of it, ends: && and || behind tests reach so far. */
static void follow_separator(epo_splitter *s, char c) {
    bool twice = s->at + 1 < s->end && s->at[1] == c;
    if (c == ')')
        epo_split_close(s);
    s->scopes.piped = c == '|' && !twice;
    s->scopes.pattern = s->scopes.pattern || (c == ';' && s->at + 1 < s->end && s->at[1] == ';');
    if (twice && (c == '|' || (c == '&' && s->tests)))
        s->maybe = true;
    else if (twice && c == '(')
        s->tests = true;
    else if ((c == '\n' || c == ';') && s->parentheses == s->scopes.base)
        s->maybe = s->tests = false;
}

void epo_split_expand(epo_splitter *s, char c) {
    if (s->quote == '\0' && isspace((unsigned char)c))
        epo_split_end_word(s);
    else
        epo_split_push(s, c);
    bool is_open = c == '$' || c == '`';
    s->open = s->open || is_open;
    s->many = s->many || (is_open && s->quote == '\0');
}

/* The $ of what only a shell can tell. */
static void push_unknown(epo_splitter *s) {
    epo_split_push(s, '$');
    s->open = true;
    s->many = s->many || s->quote == '\0';
}

/* Goes on at `to`; the lines since `from` count. */
void epo_split_leap(epo_splitter *s, const char *from, const char *to) {
    for (s->at = to; from < to; from++)
        s->line += *from == '\n';
}

/* Behind the bracket that `at` opens, or the end of the text. */
static const char *skip_bracket(const char *at, const char *end, char open, char close) {
    int depth = 0;
    for (; at < end; at++) {
        depth += (*at == open) - (*at == close);
        if (depth == 0)
            return at + 1;
    }
    return end;
}

/* The same past quotes, as a shell reads $( ) and ${ }; in quotes an apostrophe of ${ } is none.
 * One that reaches over a line is rather a here-document's or a comment's: without quotes then. */
static const char *skip_expansion(epo_splitter *s, char open, char close) {
    int depth = 0;
    char quote = '\0';
    bool has_apostrophes = open == '(' || s->quote != '"';
    const char *at = s->at;
    for (; at < s->end && s->looked < LOOKED_MAX && !(quote != '\0' && *at == '\n'); at++) {
        if (*at == '\\' && quote != '\'')
            at++;
        else if (quote != '\0')
            quote = *at == quote ? '\0' : quote;
        else if (*at == '"' || (*at == '\'' && has_apostrophes))
            quote = *at;
        else
            depth += (*at == open) - (*at == close);
        if (depth == 0)
            return at + 1;
    }
    s->looked += (size_t)(at - s->at);
    return skip_bracket(s->at, s->end, open, close);
}

/* `command`: its words are none of this command's. */
static bool take_backquotes(epo_splitter *s) {
    const char *at = s->at + 1;
    while (at < s->end && *at != '`')
        at += 1 + (*at == '\\');
    if (at >= s->end)
        return false;
    push_unknown(s);
    epo_split_leap(s, s->at, at + 1);
    return true;
}

static void expand_named(epo_splitter *s, const char *name, size_t length) {
    const char *value = epo_split_value(s, name, length);
    if (value != NULL) {
        char *copy = strdup(value); /* a word that ends may be an assignment itself */
        for (const char *c = copy; c != NULL && *c != '\0'; c++)
            epo_split_expand(s, *c);
        free(copy);
        return;
    }
    push_unknown(s);
    for (size_t i = 0; i < length; i++)
        epo_split_push(s, name[i]);
}

static void take_dollar(epo_splitter *s);

/* The value in ${NAME:-value}, with variables of its own. */
static void expand_default(epo_splitter *s, const char *from, const char *to) {
    const char *end = s->end;
    unsigned line = s->line; /* take_braces counts */
    char quote = s->quote;
    if (s->defaults == DEFAULTS_MAX) {
        push_unknown(s);
        return;
    }
    s->defaults++;
    for (s->at = from, s->end = to; s->at < to;) {
        if (*s->at == '$' && s->quote != '\'') {
            take_dollar(s);
        } else if ((*s->at == '"' || (*s->at == '\'' && quote != '"')) &&
                   (s->quote == quote || s->quote == *s->at)) {
            s->quote = s->quote == quote ? *s->at : quote;
            s->at++;
        } else {
            epo_split_expand(s, *s->at++);
        }
    }
    s->quote = quote;
    s->end = end;
    s->line = line;
    s->defaults--;
}

/* ${NAME-value} and the like, `tail` at the sign: what it gives; = assigns it, too. */
static void take_default(epo_splitter *s, const char *name, size_t length, const char *tail,
                         const char *close) {
    const char *from = tail + 1 + (*tail == ':'), *to = close - 1;
    const char *value = epo_split_value(s, name, length);
    epo_given given = EPO_GIVEN_NO;
    if (isdigit((unsigned char)*name))
        given = epo_split_argument_given(s, name, length, *tail == ':');
    if (given == EPO_GIVEN_YES && epo_split_argument(s, name, length))
        return;
    if (given != EPO_GIVEN_NO || (value != NULL && (*tail != ':' || value[0] != '\0'))) {
        expand_named(s, name, length);
        return;
    }
    size_t before = s->in_word ? s->length : 0, words = s->words->count;
    expand_default(s, from, to);
    if (from[-1] != '=' || !s->in_word || length > 127 || s->words->count != words)
        return;
    char key[128];
    s->buffer[s->length] = '\0';
    snprintf(key, sizeof key, "%.*s", (int)length, name);
    epo_split_assign(s, key, epo_split_is_maybe(s) ? "$" : s->buffer + before);
}

/* ${1}, ${@}, ${@:2}, ${1?message} of a function. */
static bool take_argument(epo_splitter *s, const char *start, const char *close) {
    size_t length = 0;
    while (start + length < close && isdigit((unsigned char)start[length]))
        length++;
    if (length == 0 && start < close && (*start == '@' || *start == '*'))
        length = 1;
    const char *tail = start + length, *sign = tail + (tail < close && *tail == ':');
    if (length > 0 && tail < close && sign < close && (*tail == '}' || *sign == '?'))
        return epo_split_argument(s, start, length);
    return epo_split_arguments_from(s, start, close - 1);
}

/* ${NAME}, ${NAME:-value}, ${NAME=value}; anything else in braces stays open. */
static void take_braces(epo_splitter *s) {
    const char *start = s->at + 1, *close = skip_expansion(s, '{', '}');
    size_t length = 0;
    while (start + length < close && epo_split_is_name(start[length]))
        length++;
    const char *tail = start + length, *sign = tail + (tail < close && *tail == ':');
    if (take_argument(s, start, close)) {
        epo_split_leap(s, start, close);
        return;
    }
    if (tail < close && *tail == '}') {
        expand_named(s, start, length);
    } else if (length > 0 && sign + 1 < close && close[-1] == '}' &&
               (*sign == '-' || *sign == '=')) {
        take_default(s, start, length, tail, close);
    } else {
        push_unknown(s);
        s->many = s->many || *tail == '[' || *start == '@';
        bool is_array = epo_split_value(s, start, length) != NULL && *tail == '[';
        if (!is_array) { /* whose words stand where it was assigned */
            epo_split_push(s, '{');
            epo_split_push(s, '}');
        }
    }
    epo_split_leap(s, start, close);
}

static void take_dollar(epo_splitter *s) {
    s->at++;
    if (s->at >= s->end) {
        epo_split_push(s, '$');
    } else if (*s->at == '{') {
        take_braces(s);
    } else if (*s->at == '(') {
        epo_split_leap(s, s->at, skip_expansion(s, '(', ')'));
        push_unknown(s);
        epo_split_push(s, '('); /* whole, as bash -c reads it again */
        epo_split_push(s, ')');
    } else if (epo_split_is_name(*s->at) && !isdigit((unsigned char)*s->at)) {
        const char *start = s->at;
        while (s->at < s->end && epo_split_is_name(*s->at))
            s->at++;
        expand_named(s, start, (size_t)(s->at - start));
    } else {
        bool is_one = isdigit((unsigned char)*s->at) || strchr("@*#?!-$", *s->at) != NULL;
        if (is_one && epo_split_argument(s, s->at, 1)) {
            s->at++;
            return;
        }
        push_unknown(s);
        s->many = s->many || *s->at == '@';
        if (is_one)
            epo_split_push(s, *s->at++);
    }
}

static void take_quoted(epo_splitter *s) {
    char c = *s->at;
    if (c == s->quote) {
        s->quote = '\0';
        s->at++;
    } else if (s->quote == '"' && c == '$') {
        take_dollar(s);
    } else if (s->quote == '"' && c == '`' && take_backquotes(s)) {
        return;
    } else if (s->quote == '"' && c == '\\' && s->at + 1 < s->end) {
        s->at++;
        if (strchr("$`\"\\\n", *s->at) == NULL)
            epo_split_push(s, '\\');
        if (*s->at != '\n')
            epo_split_push(s, *s->at);
        s->line += *s->at == '\n';
        s->at++;
    } else {
        epo_split_push(s, c);
        s->line += c == '\n';
        s->at++;
    }
}

/* "#SBATCH" at the start of a line: sbatch reads its options. */
static bool is_sbatch(const epo_splitter *s) {
    return !s->in_word && s->end - s->at > 7 && strncmp(s->at, "#SBATCH", 7) == 0 &&
           isspace((unsigned char)s->at[7]) && (s->at == s->text || s->at[-1] == '\n');
}

/* (( N = 8 )) */
static bool take_arithmetic(epo_splitter *s) {
    const char *from = s->at,
               *end = s->end - from > ARITHMETIC_MAX ? from + ARITHMETIC_MAX : s->end;
    if (s->in_word || end - from < 4 || from[1] != '(')
        return false;
    const char *to = skip_bracket(from, end, '(', ')');
    if (to[-1] != ')' || to[-2] != ')')
        return false;
    epo_split_end_command(s);
    epo_split_forget(s, from, to);
    epo_split_leap(s, from, to);
    s->tests = true;
    return true;
}

/* The & of 2>&1, &>file. */
static bool is_redirection(const epo_splitter *s) {
    return *s->at == '&' &&
           ((s->in_word && s->length > 0 && strchr("<>", s->buffer[s->length - 1]) != NULL) ||
            (s->at + 1 < s->end && s->at[1] == '>'));
}

static const char *skip_blanks(const char *at, const char *end) {
    while (at < end && (*at == ' ' || *at == '\t'))
        at++;
    return at;
}

/* A \ ends this line.  With blanks behind it, or a comment or an empty line below, the command
 * ends all the same: options in the line behind are cut off. */
static void follow_backslash(epo_splitter *s) {
    const char *at = skip_blanks(s->at + 1, s->end);
    bool is_cut = at > s->at + 1;
    unsigned line = s->line;
    if (s->scopes.finding || s->parentheses != s->scopes.base || at == s->end || *at != '\n')
        return;
    for (line++, at = skip_blanks(at + 1, s->end); at < s->end && (*at == '#' || *at == '\n');
         line++, is_cut = true) {
        while (at < s->end && *at != '\n')
            at++;
        at = skip_blanks(at + (at < s->end), s->end);
    }
    if (!is_cut || s->end - at < 3 || strncmp(at, "--", 2) != 0)
        return;
    s->cut_line = line;
    s->words->cut_line = s->words->cut_line == 0 ? line : s->words->cut_line;
}

static void take_plain(epo_splitter *s) {
    char c = *s->at;
    if (c == '<')
        epo_split_note_document(s);
    if (c == '(' && (epo_split_definition(s) || take_arithmetic(s)))
        return;
    if ((c == 'f' && epo_split_function_word(s)) || (c == '`' && take_backquotes(s)))
        return;
    if (c == '\\' && s->at + 1 < s->end) {
        follow_backslash(s);
        s->at++;
        if (*s->at == '\n')
            s->line++;
        else
            epo_split_push(s, *s->at);
        s->at++;
    } else if (c == '\n' || (strchr(";&|()", c) != NULL && !is_redirection(s))) {
        bool is_subshell = !s->in_word && s->starts;
        epo_split_end_command(s);
        if (c == '(')
            epo_split_open(s, is_subshell);
        follow_separator(s, c);
        s->line += c == '\n';
        s->at++;
        if (c == '\n' && s->document[0] != '\0')
            epo_split_pass_document(s);
    } else if (isspace((unsigned char)c)) {
        epo_split_end_word(s);
        s->at++;
    } else if (is_sbatch(s)) {
        s->at += 7;
    } else if (c == '#' && !s->in_word) {
        while (s->at < s->end && *s->at != '\n')
            s->at++;
    } else if (c == '"' || c == '\'') {
        if (!s->in_word)
            s->word_line = s->line;
        s->in_word = true;
        s->quote = c;
        s->at++;
    } else if (c == '$') {
        take_dollar(s);
    } else if (c == '`') {
        s->open = true;
        epo_split_push(s, c);
        s->at++;
    } else {
        s->redirects = s->redirects || c == '<' || c == '>';
        epo_split_push(s, c);
        s->at++;
    }
}

void epo_split_step(epo_splitter *s) {
    if (*s->at == '\0')
        s->status = epo_fail(EPO_E_ARG, "line %u: a zero byte; this is not text", s->line);
    else if (s->quote != '\0')
        take_quoted(s);
    else
        take_plain(s);
}

epo_status epo_words_split(epo_words *words, const char *text, size_t length) {
    epo_splitter s = {.text = text,
                      .at = text,
                      .end = text + length,
                      .line = 1,
                      .words = words,
                      .variables = epo_facts_create(),
                      .buffer = malloc(EPO_SPLIT_WORD_MAX),
                      .begins = true,
                      .starts = true};
    if (s.variables == NULL || s.buffer == NULL)
        s.status = epo_fail(EPO_E_NOMEM, "words: no memory");
    while (s.status == EPO_OK && s.at < s.end)
        epo_split_step(&s);
    if (s.status == EPO_OK && s.quote != '\0')
        s.status =
            epo_fail(EPO_E_ARG, "line %u: a quote (%c) is never closed", s.word_line, s.quote);
    if (s.status == EPO_OK)
        epo_split_end_command(&s);
    epo_split_scopes_free(&s);
    free(s.buffer);
    epo_facts_destroy(s.variables);
    return s.status;
}
