/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/words.h"

#include "core/facts.h"
#include "core/status.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORD_MAX 65536 /* bytes of one word */

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

typedef struct splitter {
    const char *text, *at, *end;
    unsigned line, word_line;
    epo_words *words;
    epo_facts *variables; /* assigned so far */
    char *buffer;         /* the word in the making */
    size_t length;
    bool in_word, open, begins, redirects;
    bool starts;             /* the word is at the start of a command, or behind then, do, else */
    int blocks, parentheses; /* if ... fi and case ... esac around; of an array */
    bool tests, maybe;       /* behind [, and behind its && or behind || */
    char quote;
    char document[64]; /* the word behind << whose lines come next; "": none */
    epo_status status;
} splitter;

static bool is_name(char c) { return isalnum((unsigned char)c) || c == '_'; }

static void push(splitter *s, char c) {
    if (!s->in_word)
        s->word_line = s->line;
    s->in_word = true;
    if (s->length + 1 < WORD_MAX)
        s->buffer[s->length++] = c;
    else if (s->status == EPO_OK)
        s->status =
            epo_fail(EPO_E_OVERFLOW, "line %u: a word longer than %d bytes; is this a script?",
                     s->line, WORD_MAX);
}

/* What an if, a case or a test decides only a shell can tell. */
static bool is_maybe(const splitter *s) { return s->blocks > 0 || s->maybe; }

/* if and case open a block, fi and esac close it. */
static void follow_block(splitter *s) {
    static const char *const opens[] = {"if", "case"}, *const closes[] = {"fi", "esac"};
    static const char *const goes_on[] = {"then", "else", "elif", "do", "!", "{", "if", "while"};
    static const char *const tests[] = {"[", "[[", "test"};
    bool at_start = s->starts;
    s->starts = false;
    for (size_t i = 0; at_start && i < 2; i++) {
        s->blocks += strcmp(s->buffer, opens[i]) == 0;
        s->blocks -= strcmp(s->buffer, closes[i]) == 0 && s->blocks > 0;
    }
    for (size_t i = 0; at_start && i < sizeof goes_on / sizeof *goes_on; i++)
        s->starts = s->starts || strcmp(s->buffer, goes_on[i]) == 0;
    for (size_t i = 0; at_start && i < sizeof tests / sizeof *tests; i++)
        s->tests = s->tests || strcmp(s->buffer, tests[i]) == 0;
}

/* NAME=value at the start of a command is remembered. */
static void remember(splitter *s) {
    size_t n = 0;
    while (is_name(s->buffer[n]))
        n++;
    if (n == 0 || isdigit((unsigned char)s->buffer[0]) || s->buffer[n] != '=')
        return;
    s->buffer[n] = '\0';
    epo_status status =
        s->open || is_maybe(s)
            ? epo_facts_set_unknown(s->variables, s->buffer, "?", "script")
            : epo_facts_set_text(s->variables, s->buffer, s->buffer + n + 1, "script");
    s->buffer[n] = '=';
    if (s->status == EPO_OK)
        s->status = status;
}

static void end_word(splitter *s) {
    if (!s->in_word)
        return;
    s->buffer[s->length] = '\0';
    remember(s);
    if (s->status == EPO_OK)
        s->status = epo_words_add(s->words, s->buffer, s->word_line, s->open, s->begins);
    if (s->status == EPO_OK) {
        s->words->word[s->words->count - 1].maybe = is_maybe(s);
        s->words->word[s->words->count - 1].redirects = s->redirects;
        s->words->word[s->words->count - 1].end = (size_t)(s->at - s->text);
    }
    follow_block(s);
    s->length = 0;
    s->in_word = s->open = s->begins = s->redirects = false;
}

static void end_command(splitter *s) {
    end_word(s);
    s->begins = s->starts = true;
}

/* A line, or a command of it, ends: && and || behind tests reach so far. */
static void follow_separator(splitter *s, char c) {
    bool twice = s->at + 1 < s->end && s->at[1] == c;
    s->parentheses += (c == '(') - (c == ')' && s->parentheses > 0);
    if (twice && (c == '|' || (c == '&' && s->tests)))
        s->maybe = true;
    else if (twice && c == '(')
        s->tests = true;
    else if ((c == '\n' || c == ';') && s->parentheses == 0)
        s->maybe = s->tests = false;
}

/* Puts a variable's value in; outside quotes its blanks part words. */
static void expand(splitter *s, const char *value) {
    for (; *value != '\0'; value++) {
        if (s->quote == '\0' && isspace((unsigned char)*value))
            end_word(s);
        else
            push(s, *value);
    }
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

static void expand_named(splitter *s, const char *name, size_t length, const char *otherwise) {
    char key[128];
    const epo_fact *fact = NULL;
    if (length < sizeof key) {
        memcpy(key, name, length);
        key[length] = '\0';
        fact = epo_facts_find(s->variables, key);
    }
    if (fact != NULL && fact->kind != EPO_FACT_UNKNOWN) {
        char *copy = strdup(fact->text); /* a word that ends may be an assignment itself */
        if (copy != NULL)
            expand(s, copy);
        free(copy);
        return;
    }
    if (otherwise != NULL) {
        expand(s, otherwise);
        return;
    }
    push(s, '$');
    for (size_t i = 0; i < length; i++)
        push(s, name[i]);
    s->open = true;
}

static bool is_known(const splitter *s, const char *name, size_t length) {
    char key[128];
    snprintf(key, sizeof key, "%.*s", length < sizeof key ? (int)length : 0, name);
    return epo_facts_find(s->variables, key) != NULL;
}

/* ${NAME}, ${NAME:-value}; anything else in braces stays open. */
static void take_braces(splitter *s) {
    const char *start = s->at + 1, *close = skip_bracket(s->at, s->end, '{', '}');
    size_t length = 0;
    while (start + length < close && is_name(start[length]))
        length++;
    const char *tail = start + length;
    if (tail < close && *tail == '}') {
        expand_named(s, start, length, NULL);
    } else if (close - tail > 2 && tail[0] == ':' && (tail[1] == '-' || tail[1] == '=')) {
        char *value = strndup(tail + 2, (size_t)(close - tail) - 3);
        if (value != NULL && strchr(value, '$') == NULL)
            expand_named(s, start, length, value);
        else
            s->open = true, push(s, '$');
        free(value);
    } else {
        s->open = true;
        push(s, '$');
        if (!is_known(s, start, length)) /* the words of an array stand where it was assigned */
            push(s, '{');
    }
    s->at = close;
}

static void take_dollar(splitter *s) {
    s->at++;
    if (s->at >= s->end) {
        push(s, '$');
    } else if (*s->at == '{') {
        take_braces(s);
    } else if (*s->at == '(') {
        s->at = skip_bracket(s->at, s->end, '(', ')');
        push(s, '$');
        push(s, '(');
        s->open = true;
    } else if (is_name(*s->at) && !isdigit((unsigned char)*s->at)) {
        const char *start = s->at;
        while (s->at < s->end && is_name(*s->at))
            s->at++;
        expand_named(s, start, (size_t)(s->at - start), NULL);
    } else {
        push(s, '$');
        s->open = true;
        if (isdigit((unsigned char)*s->at) || strchr("@*#?!-$", *s->at) != NULL)
            push(s, *s->at++);
    }
}

static void take_quoted(splitter *s) {
    char c = *s->at;
    if (c == s->quote) {
        s->quote = '\0';
        s->at++;
    } else if (s->quote == '"' && c == '$') {
        take_dollar(s);
    } else if (s->quote == '"' && c == '\\' && s->at + 1 < s->end) {
        s->at++;
        if (*s->at != '\n')
            push(s, *s->at);
        s->line += *s->at == '\n';
        s->at++;
    } else {
        push(s, c);
        s->line += c == '\n';
        s->at++;
    }
}

/* "#SBATCH" at the start of a line: sbatch reads its options. */
static bool is_sbatch(const splitter *s) {
    return !s->in_word && s->end - s->at > 7 && strncmp(s->at, "#SBATCH", 7) == 0 &&
           isspace((unsigned char)s->at[7]) && (s->at == s->text || s->at[-1] == '\n');
}

/* <<WORD, <<-"WORD" */
static void note_document(splitter *s) {
    const char *from = s->at + 2;
    size_t n = 0;
    if (s->end - s->at < 3 || strncmp(s->at, "<<", 2) != 0 || s->at[2] == '<' ||
        (s->at > s->text && s->at[-1] == '<'))
        return;
    while (from < s->end && *from != '\0' && strchr("- \t'\"\\", *from) != NULL)
        from++;
    while (from + n < s->end && is_name(from[n]))
        n++;
    snprintf(s->document, sizeof s->document, "%.*s", n < sizeof s->document ? (int)n : 0, from);
}

/* A here-document that is prose (one apostrophe) or another language is passed over; one
 * that reads as a script is read, as sbatch <<EOF runs it. */
static void pass_document(splitter *s) {
    size_t length = strlen(s->document), apostrophes = 0, quotes = 0;
    unsigned lines = 0;
    const char *line = s->at;
    for (const char *next; line < s->end; line = next, lines++) {
        const char *newline = memchr(line, '\n', (size_t)(s->end - line));
        next = newline == NULL ? s->end : newline + 1;
        const char *word = line;
        while (word < next && *word == '\t')
            word++;
        if ((size_t)(next - word) == length + (newline != NULL) &&
            strncmp(word, s->document, length) == 0)
            break;
        for (const char *c = line; c < next; c++) {
            apostrophes += *c == '\'';
            quotes += *c == '"';
        }
    }
    if (line < s->end && (apostrophes % 2 == 1 || quotes % 2 == 1)) {
        s->at = line;
        s->line += lines;
    }
    s->document[0] = '\0';
}

static void take_plain(splitter *s) {
    char c = *s->at;
    if (c == '<')
        note_document(s);
    if (c == '\\' && s->at + 1 < s->end) {
        s->at++;
        if (*s->at == '\n')
            s->line++;
        else
            push(s, *s->at);
        s->at++;
    } else if (c == '\n' || strchr(";&|()", c) != NULL) {
        end_command(s);
        follow_separator(s, c);
        s->line += c == '\n';
        s->at++;
        if (c == '\n' && s->document[0] != '\0')
            pass_document(s);
    } else if (isspace((unsigned char)c)) {
        end_word(s);
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
        push(s, c);
        s->at++;
    } else {
        s->redirects = s->redirects || c == '<' || c == '>';
        push(s, c);
        s->at++;
    }
}

epo_status epo_words_split(epo_words *words, const char *text, size_t length) {
    splitter s = {.text = text,
                  .at = text,
                  .end = text + length,
                  .line = 1,
                  .words = words,
                  .variables = epo_facts_create(),
                  .buffer = malloc(WORD_MAX),
                  .begins = true,
                  .starts = true};
    if (s.variables == NULL || s.buffer == NULL)
        s.status = epo_fail(EPO_E_NOMEM, "words: no memory");
    while (s.status == EPO_OK && s.at < s.end) {
        if (*s.at == '\0')
            s.status = epo_fail(EPO_E_ARG, "line %u: a zero byte; this is not text", s.line);
        else if (s.quote != '\0')
            take_quoted(&s);
        else
            take_plain(&s);
    }
    if (s.status == EPO_OK && s.quote != '\0')
        s.status =
            epo_fail(EPO_E_ARG, "line %u: a quote (%c) is never closed", s.word_line, s.quote);
    if (s.status == EPO_OK)
        end_command(&s);
    free(s.buffer);
    epo_facts_destroy(s.variables);
    return s.status;
}
