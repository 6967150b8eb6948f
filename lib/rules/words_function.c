/* SPDX-License-Identifier: Apache-2.0
 *
 * A function's body is read where the script calls it, not where it stands: one that nothing
 * calls says nothing.  What ( ) and "local" set is taken back behind them.
 */
#include "rules/words_split.h"

#include "core/status.h"

#include <stdio.h>
#include <stdlib.h>

#define FUNCTIONS_MAX 512
#define DEPTH_MAX 16               /* calls inside each other */
#define UNDO_BYTES_MAX (64u << 20) /* kept of what subshells and functions set */

/* Those behind the first `known`, which a subshell defined, say; one that nothing called is
 * told of. */
static void lose_functions(epo_splitter *s, size_t known) {
    const epo_function *functions = s->scopes.functions;
    for (size_t i = known; i < s->scopes.function_count && s->words->uncalled_line == 0; i++)
        if (!functions[i].called) {
            s->words->uncalled_line = functions[i].line;
            snprintf(s->words->uncalled, sizeof s->words->uncalled, "%s", functions[i].name);
        }
    s->scopes.function_count = known;
}

void epo_split_scopes_free(epo_splitter *s) {
    epo_scopes *scopes = &s->scopes;
    lose_functions(s, 0);
    for (size_t i = 0; i < scopes->undo_count; i++) {
        free(scopes->undo[i].name);
        free(scopes->undo[i].old);
    }
    free(scopes->undo);
    free(scopes->functions);
}

/* --- what is taken back --------------------------------------------------------- */

static epo_status room_for(void **list, size_t count, size_t *room, size_t size) {
    if (count < *room)
        return EPO_OK;
    size_t wanted = *room == 0 ? 16 : *room * 2;
    void *grown = reallocarray(*list, wanted, size);
    if (grown == NULL)
        return epo_fail(EPO_E_NOMEM, "words: no memory");
    *list = grown;
    *room = wanted;
    return EPO_OK;
}

void epo_split_note(epo_splitter *s, const char *name, bool is_local) {
    epo_scopes *scopes = &s->scopes;
    const char *old = is_local ? NULL : epo_split_value(s, name, strlen(name));
    size_t bytes = strlen(name) + (old == NULL ? 0 : strlen(old));
    void *list = scopes->undo;
    if (s->status == EPO_OK && scopes->undo_bytes + bytes > UNDO_BYTES_MAX)
        s->status = epo_fail(EPO_E_OVERFLOW,
                             "line %u: ( ) and functions set more than %u MiB; is this a script?",
                             s->line, UNDO_BYTES_MAX >> 20);
    if (s->status == EPO_OK)
        s->status = room_for(&list, scopes->undo_count, &scopes->undo_room, sizeof *scopes->undo);
    scopes->undo = list;
    if (s->status != EPO_OK)
        return;
    epo_undo made = {.name = strdup(name), .is_local = is_local};
    made.old = old == NULL ? NULL : strdup(old);
    if (made.name == NULL || (old != NULL && made.old == NULL)) {
        free(made.name);
        s->status = epo_fail(EPO_E_NOMEM, "words: no memory");
        return;
    }
    scopes->undo[scopes->undo_count++] = made;
    scopes->undo_bytes += bytes;
}

/* Takes an entry out: the variable is as it was; what was none, or was local, only a shell can
 * tell from then on. */
static void put_back(epo_splitter *s, epo_undo *undo) {
    char unknown[130];
    int subshells = s->scopes.subshells;
    snprintf(unknown, sizeof unknown, "$%.128s", undo->name);
    s->scopes.undo_bytes -= strlen(undo->name) + (undo->old == NULL ? 0 : strlen(undo->old));
    s->scopes.subshells = 0; /* nothing to note */
    epo_split_assign(s, undo->name, undo->old == NULL ? unknown : undo->old);
    s->scopes.subshells = subshells;
    free(undo->name);
    free(undo->old);
}

/* Behind a subshell. */
static void take_back(epo_splitter *s, size_t mark) {
    while (s->scopes.undo_count > mark)
        put_back(s, &s->scopes.undo[--s->scopes.undo_count]);
}

/* Behind a function. */
static void take_back_locals(epo_splitter *s, size_t mark) {
    epo_scopes *scopes = &s->scopes;
    size_t kept = mark;
    for (size_t i = mark; i < scopes->undo_count; i++) {
        if (scopes->undo[i].is_local)
            put_back(s, &scopes->undo[i]);
        else
            scopes->undo[kept++] = scopes->undo[i];
    }
    scopes->undo_count = kept;
}

void epo_split_open(epo_splitter *s, bool is_subshell) {
    epo_scopes *scopes = &s->scopes;
    if (scopes->pattern)
        return;
    if (s->parentheses < EPO_SPLIT_SUBSHELLS_MAX) {
        uint64_t bit = (uint64_t)1 << s->parentheses;
        scopes->kinds = is_subshell ? scopes->kinds | bit : scopes->kinds & ~bit;
        scopes->mark[s->parentheses] = scopes->undo_count;
        scopes->known[s->parentheses] = scopes->function_count;
        scopes->subshells += is_subshell;
    }
    s->parentheses++;
}

void epo_split_close(epo_splitter *s) {
    epo_scopes *scopes = &s->scopes;
    if (scopes->pattern || s->parentheses == scopes->base) {
        scopes->pattern = false;
        return;
    }
    s->parentheses--;
    if (s->parentheses >= EPO_SPLIT_SUBSHELLS_MAX || (scopes->kinds >> s->parentheses & 1) == 0)
        return;
    scopes->subshells--;
    take_back(s, scopes->mark[s->parentheses]);
    lose_functions(s, scopes->known[s->parentheses]);
}

/* The words of an array that a subshell sets are not those of the one behind it. */
bool epo_split_is_lost(const epo_splitter *s) {
    int around = s->parentheses - 1;
    bool of_array = around >= s->scopes.base && around < EPO_SPLIT_SUBSHELLS_MAX &&
                    (s->scopes.kinds >> around & 1) == 0;
    return of_array && s->scopes.subshells > 0;
}

/* --- definitions ----------------------------------------------------------------- */

static const char *skip_blanks(const char *at, const char *end) {
    while (at < end && (isspace((unsigned char)*at) || *at == '#'))
        for (bool comment = *at == '#'; at < end; at++)
            if (!comment || *at == '\n') {
                at++;
                break;
            }
    return at;
}

/* Behind the body that `at` opens with { or (; NULL: nothing ends it. */
static const char *find_end(epo_splitter *s, const char *at) {
    epo_words words = {0};
    epo_splitter inner = {.text = s->text,
                          .at = at,
                          .end = s->end,
                          .line = 1,
                          .words = &words,
                          .variables = s->variables,
                          .buffer = s->buffer,
                          .begins = true,
                          .starts = true,
                          .scopes.finding = true};
    while (inner.status == EPO_OK && inner.at < inner.end && inner.scopes.found == NULL) {
        epo_split_step(&inner);
        if (*at == '(' && inner.parentheses == 0)
            inner.scopes.found = inner.at;
    }
    if (inner.status == EPO_OK && inner.scopes.found == NULL && inner.quote == '\0')
        epo_split_end_command(&inner);
    epo_words_free(&words);
    return inner.status == EPO_OK ? inner.scopes.found : NULL;
}

static bool keep(epo_splitter *s, const char *name, const char *from, const char *to) {
    epo_function made = {.from = from + 1, .to = to - 1, .subshell = *from == '('};
    void *list = s->scopes.functions;
    snprintf(made.name, sizeof made.name, "%s", name);
    made.maybe = epo_split_is_maybe(s);
    made.line = made.body_line = s->line;
    for (const char *c = s->at; c < from; c++)
        made.body_line += *c == '\n';
    if (s->scopes.function_count == FUNCTIONS_MAX)
        s->status = epo_fail(EPO_E_OVERFLOW, "line %u: more than %d functions; is this a script?",
                             s->line, FUNCTIONS_MAX);
    else
        s->status = room_for(&list, s->scopes.function_count, &s->scopes.function_room,
                             sizeof *s->scopes.functions);
    s->scopes.functions = list;
    if (s->status != EPO_OK)
        return false;
    s->scopes.functions[s->scopes.function_count++] = made;
    return true;
}

/* `at` behind the name, perhaps at (): takes a body that follows. */
static bool take_body(epo_splitter *s, const char *word, size_t length, const char *at,
                      bool has_keyword) {
    char name[sizeof s->scopes.functions->name];
    const char *open = skip_blanks(at, s->end);
    bool has_parentheses = false;
    if (open < s->end && *open == '(') {
        const char *close = skip_blanks(open + 1, s->end);
        has_parentheses = close < s->end && *close == ')';
        if (has_parentheses)
            open = skip_blanks(close + 1, s->end);
    }
    if (s->scopes.finding && has_keyword && open < s->end && (*open == '(' || *open == '{')) {
        epo_split_leap(s, s->at, open); /* whose braces count */
        return true;
    }
    if (s->scopes.finding || s->scopes.open_ended || length >= sizeof name ||
        !(has_parentheses || has_keyword) || open + 1 >= s->end ||
        !(*open == '(' || *open == '{') || open[1] == '(')
        return false;
    snprintf(name, sizeof name, "%.*s", (int)length, word); /* find_end writes words, too */
    const char *to = find_end(s, open);
    memcpy(s->buffer, name, length);
    s->scopes.open_ended = to == NULL;
    if (to == NULL || !keep(s, name, open, to))
        return false;
    epo_split_leap(s, s->at, to);
    s->length = 0;
    s->in_word = s->open = s->many = s->redirects = false;
    s->begins = true;
    s->starts = false;
    return true;
}

static bool is_name_of_function(const char *name, size_t length) {
    for (size_t i = 0; i < length; i++)
        if (strchr("$`\"'\\=<>{}[]*?~!#", name[i]) != NULL)
            return false;
    return length > 0;
}

bool epo_split_definition(epo_splitter *s) {
    epo_words *words = s->words;
    if (s->in_word)
        return s->starts && s->quote == '\0' && is_name_of_function(s->buffer, s->length) &&
               take_body(s, s->buffer, s->length, s->at, false);
    if (s->begins || words->count == 0 || !words->word[words->count - 1].begins)
        return false;
    char *name = words->word[words->count - 1].text;
    if (!is_name_of_function(name, strlen(name)) || !take_body(s, name, strlen(name), s->at, false))
        return false;
    s->scopes.call_count = 0; /* its name is no call */
    free(words->word[--words->count].text);
    return true;
}

bool epo_split_function_word(epo_splitter *s) {
    const char *name = s->at + 8;
    if (s->in_word || !s->starts || s->end - s->at < 10 || strncmp(s->at, "function", 8) != 0 ||
        (*name != ' ' && *name != '\t'))
        return false;
    while (name < s->end && (*name == ' ' || *name == '\t'))
        name++;
    size_t length = 0;
    while (name + length < s->end && strchr(" \t\r\n(){};&|", name[length]) == NULL)
        length++;
    return is_name_of_function(name, length) && take_body(s, name, length, name + length, true);
}

/* --- calls ----------------------------------------------------------------------- */

/* The word calls a function: the last of its name, or, where that one stands behind a condition,
 * perhaps one before.  `is_command`: the words behind it are its arguments. */
static bool note_call(epo_splitter *s, bool is_command) {
    epo_scopes *scopes = &s->scopes;
    bool is_one = false, maybe = !is_command;
    for (size_t i = scopes->function_count; i > 0; i--) {
        const epo_function *f = &scopes->functions[i - 1];
        if (strcmp(f->name, s->buffer) != 0)
            continue;
        maybe = maybe || f->maybe;
        is_one = true;
        if (scopes->call_count < EPO_SPLIT_CALLS_MAX) {
            scopes->calls[scopes->call_count].function = i - 1;
            scopes->calls[scopes->call_count].word = is_command ? s->words->count : SIZE_MAX;
            scopes->calls[scopes->call_count++].maybe = maybe;
        }
        if (!f->maybe)
            break;
    }
    return is_one;
}

static void follow_case(epo_splitter *s, bool starts) {
    epo_scopes *scopes = &s->scopes;
    if (starts)
        scopes->is_case = strcmp(s->buffer, "case") == 0;
    else if (scopes->is_case && strcmp(s->buffer, "in") == 0)
        scopes->pattern = true;
    if (scopes->pattern && strcmp(s->buffer, "esac") == 0)
        scopes->pattern = false;
}

static void follow_body(epo_splitter *s) {
    s->scopes.braces += (strcmp(s->buffer, "{") == 0) - (strcmp(s->buffer, "}") == 0);
    if (s->scopes.braces == 0 && strcmp(s->buffer, "}") == 0 && s->parentheses == 0)
        s->scopes.found = s->at;
}

/* return: the rest of the body is not read, or perhaps not. */
static void leave(epo_splitter *s) {
    if (epo_split_is_maybe(s))
        s->blocks++;
    else
        s->scopes.left = true;
}

/* "source FILE" and ". FILE": what a shell's or Python's set-up reads holds no arguments. */
static void follow_source(epo_splitter *s, bool starts) {
    static const char *const harmless[] = {"activate",   "conda.sh", "profile",   "bashrc",
                                           "modules.sh", "bash",     "setvars.sh"};
    epo_scopes *scopes = &s->scopes;
    const char *slash = strrchr(s->buffer, '/'), *base = slash == NULL ? s->buffer : slash + 1;
    base += base[0] == '.';
    if (scopes->sources && !EPO_SPLIT_IS_AMONG(base, harmless) && s->words->source_line == 0)
        s->words->source_line = s->word_line;
    scopes->sources = starts && (strcmp(s->buffer, "source") == 0 || strcmp(s->buffer, ".") == 0);
}

void epo_split_scopes_word(epo_splitter *s, bool starts) {
    static const char *const names[] = {"export", "declare", "typeset", "trap",
                                        "eval",   "time",    "xargs",   "parallel"};
    static const char *const locals[] = {"local", "declare", "typeset"};
    epo_scopes *scopes = &s->scopes;
    follow_case(s, starts);
    if (scopes->finding) {
        if (starts)
            follow_body(s);
        return;
    }
    if (scopes->locals && s->buffer[0] != '-') {
        char name[128];
        size_t length = 0;
        while (epo_split_is_name(s->buffer[length]))
            length++;
        snprintf(name, sizeof name, "%.*s", length < sizeof name ? (int)length : 0, s->buffer);
        if (name[0] != '\0')
            epo_split_note(s, name, true);
        if (s->buffer[length] == '\0') /* hides what it held */
            epo_split_forget(s, s->buffer, s->buffer + length);
    }
    follow_source(s, starts);
    bool is_command = starts || s->assigns; /* NAME=value before it */
    bool calls = !s->open && (is_command || scopes->mentions) && note_call(s, is_command);
    if (is_command)
        scopes->command = s->words->count;
    if (!is_command)
        return;
    scopes->mentions = calls || EPO_SPLIT_IS_AMONG(s->buffer, names);
    scopes->locals = scopes->depth > 0 && EPO_SPLIT_IS_AMONG(s->buffer, locals);
    if (scopes->depth > 0 && strcmp(s->buffer, "return") == 0)
        leave(s);
}

bool epo_split_spend(epo_splitter *s, size_t bytes) {
    s->scopes.spent += bytes;
    if (s->scopes.spent > EPO_SPLIT_SPENT_MAX && s->status == EPO_OK)
        s->status = epo_fail(EPO_E_OVERFLOW,
                             "line %u: functions that call each other are more than %u MiB; is "
                             "this a script?",
                             s->line, EPO_SPLIT_SPENT_MAX >> 20);
    return s->status == EPO_OK;
}

/* Reads a function's body as if it stood here, called with `arguments`. */
static void read_body(epo_splitter *s, size_t index, bool maybe, bool apart,
                      epo_arguments *arguments) {
    epo_scopes *scopes = &s->scopes;
    epo_function f = scopes->functions[index];
    size_t mark = scopes->undo_count, known = scopes->function_count;
    epo_splitter outer = *s;
    scopes->functions[index].called = true;
    bool calls_itself = f.active || scopes->depth == DEPTH_MAX;
    arguments->lost = arguments->lost || calls_itself || epo_split_arguments_in_loop(f.from, f.to);
    if (calls_itself || !epo_split_spend(s, (size_t)(f.to - f.from)))
        return;
    scopes->arguments = arguments;
    scopes->functions[index].active = true;
    scopes->depth++;
    scopes->subshells += apart || f.subshell;
    scopes->base = s->parentheses;
    s->blocks += maybe || epo_split_is_maybe(s);
    arguments->blocks = s->blocks;
    s->maybe = s->tests = scopes->piped = scopes->pattern = scopes->is_case = scopes->left = false;
    s->document[0] = '\0';
    s->begins = s->starts = true;
    s->assigns = s->exports = false;
    s->sets = SETS_NONE;
    s->at = f.from;
    s->end = f.to;
    s->line = f.body_line;
    while (s->status == EPO_OK && s->at < s->end && !scopes->left)
        epo_split_step(s);
    epo_split_end_command(s);
    while (s->parentheses > outer.parentheses) {
        scopes->pattern = false;
        epo_split_close(s);
    }
    scopes->subshells = outer.scopes.subshells;
    take_back_locals(s, mark);
    if (apart || f.subshell) {
        take_back(s, mark);
        lose_functions(s, known);
    }
    scopes->functions[index].active = false;
    scopes->depth--;
    scopes->base = outer.scopes.base;
    scopes->pattern = outer.scopes.pattern;
    scopes->is_case = outer.scopes.is_case;
    scopes->left = outer.scopes.left;
    scopes->arguments = outer.scopes.arguments;
    s->at = outer.at;
    s->end = outer.end;
    s->line = outer.line;
    s->blocks = outer.blocks;
    s->loops = outer.loops;
    s->maybe = outer.maybe;
    s->tests = outer.tests;
    s->quote = outer.quote;
    memcpy(s->document, outer.document, sizeof s->document);
}

/* What a command calls, and where its own words are. */
typedef struct calls {
    size_t function[EPO_SPLIT_CALLS_MAX], word[EPO_SPLIT_CALLS_MAX];
    bool maybe[EPO_SPLIT_CALLS_MAX];
    int count;
    size_t end; /* of its words */
} calls;

/* The function that the command names first, or those that it may be.  Its words count where its
 * body uses them; false: that cannot be told, and they count where they stand. */
static bool call_command(epo_splitter *s, const calls *c, bool apart) {
    int own = 0;
    while (own < c->count && c->word[own] != SIZE_MAX)
        own++;
    size_t from = own > 0 ? c->word[0] + 1 : c->end;
    bool is_told = own > 0 && !s->scopes.functions[c->function[own - 1]].maybe;
    for (int i = 0; i < own && s->status == EPO_OK; i++) {
        epo_arguments arguments;
        epo_split_arguments_take(s, &arguments, from, c->end);
        if (s->status == EPO_OK)
            read_body(s, c->function[i], c->maybe[i], apart, &arguments);
        is_told = is_told && !arguments.lost;
        free(arguments.all);
    }
    is_told = is_told && s->status == EPO_OK;
    if (is_told)
        epo_split_arguments_drop(s, from, c->end);
    return is_told;
}

void epo_split_call(epo_splitter *s) {
    epo_scopes *scopes = &s->scopes;
    calls c = {.count = scopes->call_count, .end = s->words->count};
    bool twice = s->at + 1 < s->end && s->at[1] == *s->at;
    bool apart = scopes->piped || (s->at < s->end && !twice && (*s->at == '|' || *s->at == '&'));
    for (int i = 0; i < c.count; i++) {
        c.function[i] = scopes->calls[i].function;
        c.word[i] = scopes->calls[i].word;
        c.maybe[i] = scopes->calls[i].maybe;
    }
    epo_split_arguments_command(s);
    scopes->call_count = 0;
    scopes->command = SIZE_MAX;
    scopes->mentions = scopes->locals = scopes->is_case = scopes->sources = false;
    bool is_told = call_command(s, &c, apart);
    for (int i = 0; i < c.count && s->status == EPO_OK; i++) {
        epo_arguments unknown = {.lost = true};
        if (c.word[i] == SIZE_MAX && !is_told)
            read_body(s, c.function[i], c.maybe[i], apart, &unknown);
    }
}
