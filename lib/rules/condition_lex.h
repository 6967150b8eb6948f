/* SPDX-License-Identifier: Apache-2.0
 *
 * condition_lex.h - the words of a condition.
 */
#ifndef EPO_RULES_CONDITION_LEX_H
#define EPO_RULES_CONDITION_LEX_H

#include <stdbool.h>
#include <stddef.h>

typedef enum epo_token_kind {
    EPO_TOKEN_END,
    EPO_TOKEN_NAME,   /* a name or a keyword */
    EPO_TOKEN_NUMBER, /* a number or a version */
    EPO_TOKEN_TEXT,   /* 'text', without its quotes */
    EPO_TOKEN_MARK,   /* an operator or a bracket */
    EPO_TOKEN_BAD
} epo_token_kind;

typedef struct epo_token {
    epo_token_kind kind;
    const char *at;
    size_t length;
} epo_token;

/* The token at `at` (blanks are skipped); *next is where to go on. */
epo_token epo_token_take(const char *at, const char **next);
bool epo_token_is(const epo_token *token, const char *text);

#endif
