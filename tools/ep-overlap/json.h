/* SPDX-License-Identifier: Apache-2.0
 *
 * json.h - writes JSON as it goes.  Names NULL inside arrays.
 */
#ifndef EPO_TOOLS_JSON_H
#define EPO_TOOLS_JSON_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define EPO_JSON_DEPTH 16

typedef struct epo_json {
    FILE *out;
    int depth;
    bool filled[EPO_JSON_DEPTH]; /* a comma is due */
} epo_json;

void epo_json_object(epo_json *json, const char *name);
void epo_json_array(epo_json *json, const char *name);
void epo_json_end(epo_json *json, char bracket); /* '}' or ']' */
/* NULL is null; bytes that are not UTF-8 become U+FFFD. */
void epo_json_text(epo_json *json, const char *name, const char *text);
/* Not finite: null. */
void epo_json_number(epo_json *json, const char *name, double number);
void epo_json_integer(epo_json *json, const char *name, int64_t number);
void epo_json_bool(epo_json *json, const char *name, bool value);

#endif
