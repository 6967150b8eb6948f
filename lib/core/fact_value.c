/* SPDX-License-Identifier: Apache-2.0 */
#include "core/fact_value.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A piece of text that is not terminated. */
typedef struct piece {
    const char *at;
    size_t length;
} piece;

static piece trim(piece p) {
    while (p.length > 0 && isspace((unsigned char)p.at[0]))
        p.at++, p.length--;
    while (p.length > 0 && isspace((unsigned char)p.at[p.length - 1]))
        p.length--;
    return p;
}

static bool is_quoted(piece p) {
    return p.length >= 2 && (p.at[0] == '"' || p.at[0] == '\'') && p.at[p.length - 1] == p.at[0];
}

static piece unquote(piece p) {
    if (is_quoted(p)) {
        p.at++;
        p.length -= 2;
    }
    return p;
}

/* <CudaGraphScope.attn: 2> and CudaGraphScope.attn are attn: an enumeration's
 * name begins with a capital, a module's (torch.float32) does not. */
static piece enum_word(piece p) {
    if (p.length > 2 && p.at[0] == '<' && p.at[p.length - 1] == '>') {
        p.at++;
        p.length -= 2;
        const char *colon = memchr(p.at, ':', p.length);
        if (colon != NULL)
            p.length = (size_t)(colon - p.at);
    }
    const char *dot = memchr(p.at, '.', p.length);
    if (dot == NULL || !isupper((unsigned char)p.at[0]))
        return p;
    for (size_t i = 0; i < p.length; i++)
        if (!isalnum((unsigned char)p.at[i]) && p.at[i] != '_' && p.at + i != dot)
            return p;
    size_t skip = (size_t)(dot - p.at) + 1;
    return (piece){p.at + skip, p.length - skip};
}

static bool is_word(piece p, const char *const *words) {
    for (; *words != NULL; words++)
        if (strlen(*words) == p.length && memcmp(*words, p.at, p.length) == 0)
            return true;
    return false;
}

/* Decimal numbers only: no hex, no nan, whatever the locale. */
static bool read_number(piece p, double *number) {
    char buffer[64];
    if (p.length == 0 || p.length >= sizeof buffer)
        return false;
    for (size_t i = 0; i < p.length; i++)
        if (!isdigit((unsigned char)p.at[i]) && strchr("+-.eE", p.at[i]) == NULL)
            return false;
    memcpy(buffer, p.at, p.length);
    buffer[p.length] = '\0';
    char *end;
    double value = strtod(buffer, &end);
    if (*end != '\0' || end == buffer || !isfinite(value))
        return false;
    *number = value;
    return true;
}

static bool is_list(piece p) {
    if (p.length < 2)
        return false;
    char open = p.at[0], close = p.at[p.length - 1];
    return (open == '[' && close == ']') || (open == '(' && close == ')');
}

/* "['a', <E.b: 1>]" -> "a,b"; commas inside quotes or brackets do not part. */
static void read_list(piece p, char *out) {
    size_t used = 0, depth = 0, start = 1;
    char quote = '\0';
    for (size_t i = 1; i < p.length; i++) {
        char c = p.at[i];
        if (quote != '\0') {
            quote = c == quote ? '\0' : quote;
        } else if (c == '"' || c == '\'') {
            quote = c;
        } else if (strchr("[(<{", c) != NULL) {
            depth++;
        } else if (depth > 0 && strchr("])>}", c) != NULL) {
            depth--;
            continue;
        }
        if ((c == ',' && depth == 0 && quote == '\0') || i == p.length - 1) {
            piece item = enum_word(unquote(trim((piece){p.at + start, i - start})));
            if (item.length > 0) {
                if (used > 0)
                    out[used++] = ',';
                memcpy(out + used, item.at, item.length);
                used += item.length;
            }
            start = i + 1;
        }
    }
    out[used] = '\0';
}

bool epo_fact_value_read(const char *text, epo_fact_value *value) {
    static const char *const nothing[] = {"None", "null", "~", "", NULL};
    static const char *const yes[] = {"True", "true", "TRUE", NULL};
    static const char *const no[] = {"False", "false", "FALSE", NULL};
    piece all = trim((piece){text == NULL ? "" : text, text == NULL ? 0 : strlen(text)});
    piece p = enum_word(unquote(all));
    epo_fact_value v = {.kind = EPO_FACT_TEXT};
    v.text = malloc(all.length + 1);
    if (v.text == NULL)
        return false;
    memcpy(v.text, p.at, p.length);
    v.text[p.length] = '\0';
    if (is_quoted(all)) {
        *value = v; /* '1.10' and "None" were meant as text */
        return true;
    }
    if (is_word(p, nothing)) {
        v.kind = EPO_FACT_NULL;
        v.text[0] = '\0';
    } else if (is_word(p, yes) || is_word(p, no)) {
        v.kind = EPO_FACT_BOOL;
        v.number = is_word(p, yes);
    } else if (read_number(p, &v.number)) {
        v.kind = EPO_FACT_NUMBER;
    } else if (is_list(p)) {
        v.kind = EPO_FACT_LIST;
        read_list(p, v.text);
    }
    *value = v;
    return true;
}
