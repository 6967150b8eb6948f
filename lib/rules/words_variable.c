/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/words_split.h"

#include "core/status.h"
#include "core/text.h"

#include <stdio.h>
#include <stdlib.h>

/* What a variable holds, NULL if none of this name was assigned.  A $NAME in it is what only
 * a shell can tell. */
const char *epo_split_value(const epo_splitter *s, const char *name, size_t length) {
    char key[128];
    if (length >= sizeof key)
        return NULL;
    memcpy(key, name, length);
    key[length] = '\0';
    const epo_fact *fact = epo_facts_find(s->variables, key);
    return fact == NULL ? NULL : fact->text;
}

/* Without room for so long a value only a shell can tell it. */
void epo_split_assign(epo_splitter *s, const char *name, const char *value) {
    char unknown[130];
    snprintf(unknown, sizeof unknown, "$%.128s", name);
    if (s->scopes.finding)
        return;
    if (s->scopes.subshells > 0)
        epo_split_note(s, name, false);
    value = strlen(value) < EPO_SPLIT_WORD_MAX ? value : unknown;
    epo_status status = epo_facts_set_text(s->variables, name, value, "script");
    if (s->status == EPO_OK)
        s->status = status;
}

/* Arguments that a condition adds: each flag and override stays, its value only a shell can
 * tell; so does a word that belongs to what stands before. */
static char *doubted(const char *name, const char *value) {
    struct epo_text text = EPO_TEXT_INIT;
    bool behind_flag = false;
    for (const char *at = value + strspn(value, EPO_SPLIT_BLANKS); *at != '\0';
         at += strspn(at, EPO_SPLIT_BLANKS)) {
        size_t length = strcspn(at, EPO_SPLIT_BLANKS), key = strcspn(at, "= \t\n\r");
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
static void assign_maybe(epo_splitter *s, const char *name, const char *old, const char *value) {
    char unknown[130];
    size_t length = strlen(old);
    snprintf(unknown, sizeof unknown, "$%.128s", name);
    bool stays = length > 0 && strncmp(value, old, length) == 0 &&
                 (value[length] == '\0' || strchr(EPO_SPLIT_BLANKS, value[length]) != NULL ||
                  strchr(EPO_SPLIT_BLANKS, old[length - 1]) != NULL);
    char *more = stays ? doubted(name, value + length) : NULL;
    struct epo_text whole = EPO_TEXT_INIT;
    epo_text_format(&whole, "%s%s", more != NULL ? old : "", more != NULL ? more : unknown);
    char *text = epo_text_take(&whole);
    epo_split_assign(s, name, text != NULL ? text : unknown);
    free(text);
    free(more);
}

/* Variables that for, read or (( )) set: from then on only a shell can tell them. */
void epo_split_forget(epo_splitter *s, const char *from, const char *to) {
    char name[128], unknown[130];
    while (from < to) {
        const char *start = from;
        while (from < to && epo_split_is_name(*from))
            from++;
        size_t length = (size_t)(from - start);
        from += from < to;
        if (length == 0 || length >= sizeof name || isdigit((unsigned char)*start))
            continue;
        snprintf(name, sizeof name, "%.*s", (int)length, start);
        snprintf(unknown, sizeof unknown, "$%s", name);
        epo_split_assign(s, name, unknown);
    }
}

/* NAME=value and NAME+=value are remembered; false: the word is none of them. */
bool epo_split_remember(epo_splitter *s) {
    size_t n = 0;
    while (epo_split_is_name(s->buffer[n]))
        n++;
    bool adds = n > 0 && strncmp(s->buffer + n, "+=", 2) == 0;
    if (n == 0 || n > 127 || isdigit((unsigned char)s->buffer[0]) || (s->buffer[n] != '=' && !adds))
        return false;
    char name[128], *old = NULL;
    const char *value = s->buffer + n + 1 + adds, *known = epo_split_value(s, s->buffer, n);
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
    else if (!epo_split_is_maybe(s))
        epo_split_assign(s, name, text);
    else if (!adds || value[0] != '\0') /* else an array's words follow */
        assign_maybe(s, name, before, text);
    free(text);
    free(old);
    return true;
}
