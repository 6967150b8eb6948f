/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/condition_lex.h"

#include <ctype.h>
#include <string.h>

static size_t span(const char *at, const char *extra) {
    size_t n = 0;
    while (at[n] != '\0' && (isalnum((unsigned char)at[n]) || strchr(extra, at[n]) != NULL))
        n++;
    return n;
}

static size_t mark_length(const char *at) {
    static const char *const pairs[] = {"&&", "||", "==", "!=", "<=", ">=", NULL};
    for (size_t i = 0; pairs[i] != NULL; i++)
        if (strncmp(at, pairs[i], 2) == 0)
            return 2;
    return strchr("!<>(){},*%", *at) != NULL ? 1 : 0;
}

epo_token epo_token_take(const char *at, const char **next) {
    while (isspace((unsigned char)*at))
        at++;
    epo_token token = {.kind = EPO_TOKEN_END, .at = at};
    if (*at == '\0') {
        *next = at;
        return token;
    }
    if (*at == '\'') {
        const char *end = strchr(at + 1, '\'');
        token.kind = end == NULL ? EPO_TOKEN_BAD : EPO_TOKEN_TEXT;
        token.at = at + 1;
        token.length = end == NULL ? 0 : (size_t)(end - at) - 1;
        *next = end == NULL ? at : end + 1;
        return token;
    }
    if (isdigit((unsigned char)*at)) {
        token.kind = EPO_TOKEN_NUMBER;
        token.length = span(at, ".+!");
    } else if (isalpha((unsigned char)*at) || *at == '_') {
        token.kind = EPO_TOKEN_NAME;
        token.length = span(at, "._-");
    } else {
        token.length = mark_length(at);
        token.kind = token.length > 0 ? EPO_TOKEN_MARK : EPO_TOKEN_BAD;
    }
    *next = at + token.length;
    return token;
}

bool epo_token_is(const epo_token *token, const char *text) {
    return (token->kind == EPO_TOKEN_NAME || token->kind == EPO_TOKEN_MARK) &&
           strlen(text) == token->length && memcmp(token->at, text, token->length) == 0;
}
