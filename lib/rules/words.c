/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/words.h"

#include "core/facts.h"
#include "core/status.h"
#include "core/text.h"

#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORD_MAX 65536 /* bytes of one word */
#define BLANKS " \t\n\r"
#define DEFAULTS_MAX 8      /* ${A:-${B:-...}} */
#define ARITHMETIC_MAX 4096 /* bytes of (( )), so that many of ( cost no more */

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
    bool starts;           /* the word is at the start of a command, or behind then, do, else */
    bool assigns, exports; /* behind NAME=value at that start, behind export */
    enum { SETS_NONE, SETS_ONE, SETS_ALL, SETS_V } sets; /* names: behind for, read, printf -v */
    int blocks, parentheses; /* if ... fi, case ... esac, while ... done around; of an array */
    uint64_t loops;          /* around, a bit each: 1 is while or until */
    bool tests, maybe;       /* behind [ or grep, and behind its && or behind || */
    char quote;
    int defaults;      /* ${NAME:-value} around */
    char document[64]; /* the word behind << whose lines come next; "": none */
    epo_status status;
} splitter;

static bool is_name(char c) { return isalnum((unsigned char)c) || c == '_'; }

static bool is_among(const char *text, const char *const *words, size_t count) {
    while (count > 0 && strcmp(text, words[count - 1]) != 0)
        count--;
    return count > 0;
}

#define IS_AMONG(text, words) is_among((text), (words), sizeof(words) / sizeof *(words))

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

/* What an if, a while, a case or a test decides only a shell can tell. */
static bool is_maybe(const splitter *s) { return s->blocks > 0 || s->maybe; }

/* if, case, while and until open a block; for runs what it holds. */
static void follow_block(splitter *s) {
    static const char *const opens[] = {"if", "case"}, *const closes[] = {"fi", "esac"};
    static const char *const loops[] = {"for", "select", "while", "until"};
    bool is_while = strcmp(s->buffer, "while") == 0 || strcmp(s->buffer, "until") == 0;
    if (IS_AMONG(s->buffer, opens)) {
        s->blocks++;
    } else if (IS_AMONG(s->buffer, closes)) {
        s->blocks -= s->blocks > 0;
    } else if (IS_AMONG(s->buffer, loops)) {
        s->blocks += is_while;
        s->loops = s->loops << 1 | is_while;
    } else if (strcmp(s->buffer, "done") == 0) {
        s->blocks -= (s->loops & 1) != 0 && s->blocks > 0;
        s->loops >>= 1;
    }
}

/* What the word that a command begins with makes of those behind it. */
static void follow_start(splitter *s) {
    static const char *const goes_on[] = {"then", "else", "elif",  "do",   "!",
                                          "{",    "if",   "while", "until"};
    static const char *const tests[] = {"[",     "[[",    "test",  "grep", "command", "type",
                                        "which", "pgrep", "false", "cmp",  "diff"};
    static const char *const exports[] = {"export",   "declare", "local",
                                          "readonly", "typeset", "eval"};
    static const char *const one[] = {"for", "select"};
    static const char *const all[] = {"read", "unset", "mapfile", "readarray", "getopts", "let"};
    follow_block(s);
    s->starts = IS_AMONG(s->buffer, goes_on);
    s->tests = s->tests || IS_AMONG(s->buffer, tests);
    s->exports = IS_AMONG(s->buffer, exports);
    s->sets = IS_AMONG(s->buffer, one)           ? SETS_ONE
              : IS_AMONG(s->buffer, all)         ? SETS_ALL
              : strcmp(s->buffer, "printf") == 0 ? SETS_V
                                                 : SETS_NONE;
}

/* What a variable holds, NULL if none of this name was assigned.  A $NAME in it is what only
 * a shell can tell. */
static const char *value_of(const splitter *s, const char *name, size_t length) {
    char key[128];
    if (length >= sizeof key)
        return NULL;
    memcpy(key, name, length);
    key[length] = '\0';
    const epo_fact *fact = epo_facts_find(s->variables, key);
    return fact == NULL ? NULL : fact->text;
}

/* Without room for so long a value only a shell can tell it. */
static void assign(splitter *s, const char *name, const char *value) {
    char unknown[130];
    snprintf(unknown, sizeof unknown, "$%.128s", name);
    value = strlen(value) < WORD_MAX ? value : unknown;
    epo_status status = epo_facts_set_text(s->variables, name, value, "script");
    if (s->status == EPO_OK)
        s->status = status;
}

/* Arguments that a condition adds: each flag and override stays, its value only a shell can
 * tell; so does a word that belongs to what stands before. */
static char *doubted(const char *name, const char *value) {
    struct epo_text text = EPO_TEXT_INIT;
    bool behind_flag = false;
    for (const char *at = value + strspn(value, BLANKS); *at != '\0'; at += strspn(at, BLANKS)) {
        size_t length = strcspn(at, BLANKS), key = strcspn(at, "= \t\n\r");
        bool is_flag = at[0] == '-' && key > 1 && !isdigit((unsigned char)at[1]);
        bool has_value = at[0] != '$' && key < length;
        if (is_flag || has_value)
            epo_text_format(&text, " %.*s=$%s", (int)key, at, name);
        else if (!behind_flag || at[0] == '$')
            epo_text_format(&text, " $%s", name);
        behind_flag = (is_flag && !has_value) || (behind_flag && !is_flag && !has_value);
        at += length;
    }
    return epo_text_take(&text);
}

/* An assignment that a condition decides: what stood there before and stands in front of the
 * new value is there in any case. */
static void assign_maybe(splitter *s, const char *name, const char *old, const char *value) {
    char unknown[130];
    size_t length = strlen(old);
    snprintf(unknown, sizeof unknown, "$%.128s", name);
    bool stays = length > 0 && strncmp(value, old, length) == 0 &&
                 (value[length] == '\0' || strchr(BLANKS, value[length]) != NULL ||
                  strchr(BLANKS, old[length - 1]) != NULL);
    char *more = stays ? doubted(name, value + length) : NULL;
    struct epo_text whole = EPO_TEXT_INIT;
    epo_text_format(&whole, "%s%s", more != NULL ? old : "", more != NULL ? more : unknown);
    char *text = epo_text_take(&whole);
    assign(s, name, text != NULL ? text : unknown);
    free(text);
    free(more);
}

/* Variables that for, read or (( )) set: from then on only a shell can tell them. */
static void forget(splitter *s, const char *from, const char *to) {
    char name[128], unknown[130];
    while (from < to) {
        const char *start = from;
        while (from < to && is_name(*from))
            from++;
        size_t length = (size_t)(from - start);
        from += from < to;
        if (length == 0 || length >= sizeof name || isdigit((unsigned char)*start))
            continue;
        snprintf(name, sizeof name, "%.*s", (int)length, start);
        snprintf(unknown, sizeof unknown, "$%s", name);
        assign(s, name, unknown);
    }
}

/* NAME=value and NAME+=value are remembered; false: the word is none of them. */
static bool remember(splitter *s) {
    size_t n = 0;
    while (is_name(s->buffer[n]))
        n++;
    bool adds = n > 0 && strncmp(s->buffer + n, "+=", 2) == 0;
    if (n == 0 || n > 127 || isdigit((unsigned char)s->buffer[0]) || (s->buffer[n] != '=' && !adds))
        return false;
    char name[128], *old = NULL;
    const char *value = s->buffer + n + 1 + adds, *known = value_of(s, s->buffer, n);
    memcpy(name, s->buffer, n);
    name[n] = '\0';
    if (s->status != EPO_OK)
        return true;
    if (known != NULL && (old = strdup(known)) == NULL) {
        s->status = epo_fail(EPO_E_NOMEM, "words: no memory");
        return true;
    }
    const char *before = old != NULL ? old : "";
    struct epo_text whole = EPO_TEXT_INIT;
    epo_text_format(&whole, "%s%s", adds ? before : "", value);
    char *text = epo_text_take(&whole);
    if (text == NULL)
        s->status = epo_fail(EPO_E_NOMEM, "words: no memory");
    else if (!is_maybe(s))
        assign(s, name, text);
    else if (!adds || value[0] != '\0') /* else an array's words follow */
        assign_maybe(s, name, before, text);
    free(text);
    free(old);
    return true;
}

/* A word's part in what variables hold: only at the start of a command, and behind export and
 * the like, is NAME=value an assignment. */
static void follow_word(splitter *s) {
    if (s->sets == SETS_V) {
        s->sets = strcmp(s->buffer, "-v") == 0 ? SETS_ONE : SETS_NONE;
    } else if (s->sets != SETS_NONE && s->buffer[0] != '-') {
        forget(s, s->buffer, s->buffer + s->length);
        s->sets = s->sets == SETS_ALL ? SETS_ALL : SETS_NONE;
    }
    bool is_assignment = (s->starts || s->assigns || s->exports) && remember(s);
    if (s->starts && !is_assignment)
        follow_start(s);
    else
        s->starts = false;
    s->assigns = is_assignment && !s->exports;
}

static void end_word(splitter *s) {
    if (!s->in_word)
        return;
    s->buffer[s->length] = '\0';
    follow_word(s);
    if (s->status == EPO_OK)
        s->status = epo_words_add(s->words, s->buffer, s->word_line, s->open, s->begins);
    if (s->status == EPO_OK) {
        s->words->word[s->words->count - 1].maybe = is_maybe(s);
        s->words->word[s->words->count - 1].redirects = s->redirects;
        s->words->word[s->words->count - 1].end = (size_t)(s->at - s->text);
    }
    s->length = 0;
    s->in_word = s->open = s->begins = s->redirects = false;
}

static void end_command(splitter *s) {
    end_word(s);
    s->begins = s->starts = true;
    s->assigns = s->exports = false;
    s->sets = SETS_NONE;
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

/* A byte of a variable's value; outside quotes blanks part words. */
static void expand(splitter *s, char c) {
    if (s->quote == '\0' && isspace((unsigned char)c))
        end_word(s);
    else
        push(s, c);
    s->open = s->open || c == '$' || c == '`';
}

/* Goes on at `to`; the lines since `from` count. */
static void leap(splitter *s, const char *from, const char *to) {
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

static void expand_named(splitter *s, const char *name, size_t length) {
    const char *value = value_of(s, name, length);
    if (value != NULL) {
        char *copy = strdup(value); /* a word that ends may be an assignment itself */
        for (const char *c = copy; c != NULL && *c != '\0'; c++)
            expand(s, *c);
        free(copy);
        return;
    }
    push(s, '$');
    for (size_t i = 0; i < length; i++)
        push(s, name[i]);
    s->open = true;
}

static void take_dollar(splitter *s);

/* The value in ${NAME:-value}, with variables of its own. */
static void expand_default(splitter *s, const char *from, const char *to) {
    const char *end = s->end;
    unsigned line = s->line; /* take_braces counts */
    char quote = s->quote;
    if (s->defaults == DEFAULTS_MAX) {
        push(s, '$');
        s->open = true;
        return;
    }
    s->defaults++;
    for (s->at = from, s->end = to; s->at < to;) {
        if (*s->at == '$' && s->quote != '\'') {
            take_dollar(s);
        } else if ((*s->at == '"' || *s->at == '\'') && (s->quote == quote || s->quote == *s->at)) {
            s->quote = s->quote == quote ? *s->at : quote;
            s->at++;
        } else {
            expand(s, *s->at++);
        }
    }
    s->quote = quote;
    s->end = end;
    s->line = line;
    s->defaults--;
}

/* ${NAME-value} and the like, `tail` at the sign: what it gives; = assigns it, too. */
static void take_default(splitter *s, const char *name, size_t length, const char *tail,
                         const char *close) {
    const char *from = tail + 1 + (*tail == ':'), *to = close - 1;
    const char *value = value_of(s, name, length);
    if (value != NULL && (*tail != ':' || value[0] != '\0')) {
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
    assign(s, key, is_maybe(s) ? "$" : s->buffer + before);
}

/* ${NAME}, ${NAME:-value}, ${NAME=value}; anything else in braces stays open. */
static void take_braces(splitter *s) {
    const char *start = s->at + 1, *close = skip_bracket(s->at, s->end, '{', '}');
    size_t length = 0;
    while (start + length < close && is_name(start[length]))
        length++;
    const char *tail = start + length, *sign = tail + (tail < close && *tail == ':');
    if (tail < close && *tail == '}') {
        expand_named(s, start, length);
    } else if (length > 0 && sign + 1 < close && close[-1] == '}' &&
               (*sign == '-' || *sign == '=')) {
        take_default(s, start, length, tail, close);
    } else {
        s->open = true;
        push(s, '$');
        bool is_array = value_of(s, start, length) != NULL && *tail == '[';
        if (!is_array) /* whose words stand where it was assigned */
            push(s, '{');
    }
    leap(s, start, close);
}

static void take_dollar(splitter *s) {
    s->at++;
    if (s->at >= s->end) {
        push(s, '$');
    } else if (*s->at == '{') {
        take_braces(s);
    } else if (*s->at == '(') {
        leap(s, s->at, skip_bracket(s->at, s->end, '(', ')'));
        push(s, '$');
        push(s, '(');
        s->open = true;
    } else if (is_name(*s->at) && !isdigit((unsigned char)*s->at)) {
        const char *start = s->at;
        while (s->at < s->end && is_name(*s->at))
            s->at++;
        expand_named(s, start, (size_t)(s->at - start));
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

/* Whether the command that just ended takes its here-document for something else than a
 * script: python - <<END, : <<COMMENT, cat >conf.yaml <<END. */
static bool is_for_another(const splitter *s) {
    static const char *const kinds[] = {"yaml", "yml", "json", "py",  "toml",
                                        "ini",  "cfg", "conf", "txt", "md"};
    const epo_word *word = s->words->word;
    size_t first = s->words->count;
    while (first > 0 && !word[--first].begins)
        continue;
    if (first == s->words->count)
        return false;
    const char *slash = strrchr(word[first].text, '/');
    const char *base = slash == NULL ? word[first].text : slash + 1;
    if (strcmp(base, ":") == 0 || strncmp(base, "python", 6) == 0 || strcmp(base, "perl") == 0)
        return true;
    if (strcmp(base, "cat") != 0 && strcmp(base, "tee") != 0)
        return false;
    for (size_t i = first + 1; i < s->words->count; i++) {
        const char *dot = strrchr(word[i].text, '.');
        for (size_t k = 0; dot != NULL && k < sizeof kinds / sizeof *kinds; k++)
            if (strcmp(dot + 1, kinds[k]) == 0)
                return true;
    }
    return false;
}

/* A here-document that is prose (one apostrophe) or for another program is passed over; one
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
    if (line < s->end && (is_for_another(s) || apostrophes % 2 == 1 || quotes % 2 == 1)) {
        s->at = line;
        s->line += lines;
    }
    s->document[0] = '\0';
}

/* (( N = 8 )) */
static bool take_arithmetic(splitter *s) {
    const char *from = s->at,
               *end = s->end - from > ARITHMETIC_MAX ? from + ARITHMETIC_MAX : s->end;
    if (s->in_word || end - from < 4 || from[1] != '(')
        return false;
    const char *to = skip_bracket(from, end, '(', ')');
    if (to[-1] != ')' || to[-2] != ')')
        return false;
    end_command(s);
    forget(s, from, to);
    leap(s, from, to);
    s->tests = true;
    return true;
}

static void take_plain(splitter *s) {
    char c = *s->at;
    if (c == '<')
        note_document(s);
    if (c == '(' && take_arithmetic(s))
        return;
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
