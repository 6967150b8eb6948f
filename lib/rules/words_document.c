/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/words_split.h"

#include <stdio.h>

/* <<WORD, <<-"WORD" */
void epo_split_note_document(epo_splitter *s) {
    const char *from = s->at + 2;
    size_t n = 0;
    if (s->end - s->at < 3 || strncmp(s->at, "<<", 2) != 0 || s->at[2] == '<' ||
        (s->at > s->text && s->at[-1] == '<'))
        return;
    while (from < s->end && *from != '\0' && strchr("- \t'\"\\", *from) != NULL)
        from++;
    while (from + n < s->end && epo_split_is_name(from[n]))
        n++;
    snprintf(s->document, sizeof s->document, "%.*s", n < sizeof s->document ? (int)n : 0, from);
}

/* Whether the command that just ended takes its here-document for something else than a
 * script: python - <<END, : <<COMMENT, cat >conf.yaml <<END. */
static bool is_for_another(const epo_splitter *s) {
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
void epo_split_pass_document(epo_splitter *s) {
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
