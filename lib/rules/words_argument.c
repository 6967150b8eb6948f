/* SPDX-License-Identifier: Apache-2.0
 *
 * $1, "$@", shift: what a function was called with, while its body is read.  Those of the
 * script itself only a shell can tell.
 */
#include "rules/words_split.h"

#include "core/status.h"

#include <stdlib.h>

/* Whether a word is a redirection, and whether the file that it names is the next word. */
static bool is_redirection(const epo_word *word, bool *takes_next) {
    size_t length = strlen(word->text);
    *takes_next = word->redirects && length > 0 && strchr("<>", word->text[length - 1]) != NULL;
    return word->redirects;
}

void epo_split_arguments_take(epo_splitter *s, epo_arguments *made, size_t from, size_t to) {
    bool is_file = false;
    *made = (epo_arguments){.blocks = s->blocks};
    made->word = calloc(to - from + 1, sizeof *made->word);
    if (made->word == NULL) {
        s->status = epo_fail(EPO_E_NOMEM, "words: no memory");
        return;
    }
    for (size_t i = from; i < to; i++) {
        bool skipped = is_file;
        if (!is_redirection(&s->words->word[i], &is_file) && !skipped)
            made->word[made->count++] = s->words->word[i];
    }
    made->all = made->word;
}

/* Behind an argument that may be several, or none, no number is known. */
static bool is_numbered(const epo_arguments *arguments, size_t index) {
    for (size_t i = 0; i < arguments->count && i <= index; i++)
        if (arguments->word[i].many)
            return false;
    return true;
}

static bool is_assignment(const epo_splitter *s) {
    size_t n = 0;
    while (n < s->length && epo_split_is_name(s->buffer[n]))
        n++;
    n += n < s->length && s->buffer[n] == '+';
    return s->in_word && n > 0 && n < s->length && s->buffer[n] == '=' &&
           (s->starts || s->assigns || s->exports);
}

/* Its text as if it stood here, at the place of the call. */
static void insert(epo_splitter *s, const epo_word *argument) {
    bool is_new = s->length == 0;
    if (!epo_split_spend(s, strlen(argument->text) + 1))
        return;
    s->in_word = s->in_word || argument->text[0] != '\0' || s->quote != '\0';
    s->word_line = is_new ? argument->line : s->word_line;
    for (const char *c = argument->text; *c != '\0'; c++)
        epo_split_expand(s, *c);
    s->open = s->open || argument->open;
    s->many = s->many || argument->many;
}

/* "$@" is a word for each, "$*" one. */
static void insert_all(epo_splitter *s, size_t from, bool parts) {
    const epo_arguments *arguments = s->scopes.arguments;
    if (from >= arguments->count && s->length == 0 && parts)
        s->in_word = false;
    parts = (parts || s->quote == '\0') && !is_assignment(s);
    for (size_t i = from; i < arguments->count && s->status == EPO_OK; i++) {
        insert(s, &arguments->word[i]);
        if (i + 1 == arguments->count)
            break;
        if (parts)
            epo_split_end_word(s);
        else
            epo_split_push(s, ' ');
    }
}

/* The number that `name` is, below a million; 0: none. */
static size_t number_of(const char *name, size_t length) {
    size_t number = 0;
    for (size_t i = 0; i < length; i++) {
        if (!isdigit((unsigned char)name[i]) || number > 99999)
            return 0;
        number = number * 10 + (size_t)(name[i] - '0');
    }
    return number;
}

bool epo_split_argument(epo_splitter *s, const char *name, size_t length) {
    const epo_arguments *arguments = s->scopes.arguments;
    size_t number = number_of(name, length);
    bool is_all = length == 1 && (*name == '@' || *name == '*');
    if (arguments == NULL || arguments->lost)
        return false;
    if (is_all)
        insert_all(s, 0, *name == '@');
    else if (number == 0 || !is_numbered(arguments, number - 1))
        return false;
    else if (number <= arguments->count)
        insert(s, &arguments->word[number - 1]);
    return true;
}

epo_given epo_split_argument_given(const epo_splitter *s, const char *name, size_t length,
                                   bool not_empty) {
    const epo_arguments *arguments = s->scopes.arguments;
    size_t number = number_of(name, length);
    if (arguments == NULL)
        return EPO_GIVEN_NO; /* the script's own: its default is what it says */
    if (number == 0 || arguments->lost || !is_numbered(arguments, number - 1))
        return EPO_GIVEN_PERHAPS;
    if (number > arguments->count)
        return EPO_GIVEN_NO;
    const epo_word *word = &arguments->word[number - 1];
    if (word->open && not_empty && word->text[0] == '$')
        return EPO_GIVEN_PERHAPS;
    return not_empty && word->text[0] == '\0' ? EPO_GIVEN_NO : EPO_GIVEN_YES;
}

bool epo_split_arguments_from(epo_splitter *s, const char *name, const char *close) {
    epo_arguments *arguments = s->scopes.arguments;
    const char *digits = name + 2 + (close - name > 2 && name[2] == ' ');
    if (arguments == NULL || close - name < 3 || (*name != '@' && *name != '*') || name[1] != ':')
        return false;
    size_t number = close > digits ? number_of(digits, (size_t)(close - digits)) : 0;
    arguments->lost =
        arguments->lost || number == 0 || (number > 1 && !is_numbered(arguments, number - 2));
    if (arguments->lost)
        return false;
    insert_all(s, number - 1, *name == '@');
    return true;
}

/* shift, shift N; where a loop or a condition decides, only a shell can tell what is left. */
static void shift(const epo_splitter *s, epo_arguments *arguments, size_t first, size_t count) {
    const epo_word *word = s->words->word;
    size_t by = count == 1 ? 1 : number_of(word[first + 1].text, strlen(word[first + 1].text));
    if (count > 2 || by == 0 || s->maybe || s->blocks > arguments->blocks ||
        !is_numbered(arguments, by - 1)) {
        arguments->lost = true;
    } else if (by <= arguments->count) { /* else nothing is shifted */
        arguments->word += by;
        arguments->count -= by;
    }
}

void epo_split_arguments_command(epo_splitter *s) {
    epo_arguments *arguments = s->scopes.arguments;
    size_t first = s->scopes.command, count = s->words->count - first;
    if (arguments == NULL || first >= s->words->count || s->scopes.finding)
        return;
    const char *name = s->words->word[first].text;
    if (strcmp(name, "shift") == 0)
        shift(s, arguments, first, count);
    else if (strcmp(name, "getopts") == 0)
        arguments->lost = true;
    for (size_t i = first + 1; strcmp(name, "set") == 0 && i < s->words->count; i++)
        arguments->lost = arguments->lost || strcmp(s->words->word[i].text, "--") == 0;
}

/* A loop that shifts reads other arguments each time. */
bool epo_split_arguments_in_loop(const char *from, const char *to) {
    static const char *const words[] = {"shift", "done"};
    size_t found = 0;
    for (; from < to && found < 2; from++)
        if ((size_t)(to - from) >= strlen(words[found]) &&
            strncmp(from, words[found], strlen(words[found])) == 0)
            found++;
    return found == 2;
}

void epo_split_arguments_drop(epo_splitter *s, size_t from, size_t to) {
    epo_words *words = s->words;
    for (size_t i = from; i < to; i++)
        free(words->word[i].text);
    memmove(&words->word[from], &words->word[to], (words->count - to) * sizeof *words->word);
    words->count -= to - from;
}
