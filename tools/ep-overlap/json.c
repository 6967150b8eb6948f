/* SPDX-License-Identifier: Apache-2.0 */
#include "json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Length of the UTF-8 character at `s`, 0 if it is none (RFC 3629). */
static int utf8_length(const unsigned char *s) {
    if (s[0] < 0x80)
        return 1;
    if (s[0] >= 0xC2 && s[0] <= 0xDF)
        return (s[1] & 0xC0) == 0x80 ? 2 : 0;
    if ((s[0] & 0xF0) == 0xE0) {
        bool odd = (s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F);
        return !odd && (s[1] & 0xC0) == 0x80 && (s[2] & 0xC0) == 0x80 ? 3 : 0;
    }
    if (s[0] >= 0xF0 && s[0] <= 0xF4) {
        bool odd = (s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F);
        return !odd && (s[1] & 0xC0) == 0x80 && (s[2] & 0xC0) == 0x80 && (s[3] & 0xC0) == 0x80 ? 4
                                                                                               : 0;
    }
    return 0;
}

static void put_text(FILE *out, const char *text) {
    fputc('"', out);
    for (const unsigned char *s = (const unsigned char *)text; *s != '\0';) {
        int n = utf8_length(s);
        if (n == 0) {
            fputs("\\ufffd", out);
            s++;
        } else if (n > 1) {
            fwrite(s, 1, (size_t)n, out);
            s += n;
        } else {
            if (*s == '"' || *s == '\\')
                fprintf(out, "\\%c", *s);
            else if (*s < 0x20 || *s == 0x7f)
                fprintf(out, "\\u%04x", *s);
            else
                fputc(*s, out);
            s++;
        }
    }
    fputc('"', out);
}

static void begin(epo_json *j, const char *name) {
    if (j->filled[j->depth])
        fputc(',', j->out);
    if (j->depth > 0)
        fprintf(j->out, "\n%*s", 2 * j->depth, "");
    j->filled[j->depth] = true;
    if (name != NULL) {
        put_text(j->out, name);
        fputs(": ", j->out);
    }
}

static void open_bracket(epo_json *j, const char *name, char bracket) {
    begin(j, name);
    fputc(bracket, j->out);
    if (j->depth + 1 >= EPO_JSON_DEPTH)
        abort();
    j->filled[++j->depth] = false;
}

void epo_json_object(epo_json *j, const char *name) { open_bracket(j, name, '{'); }
void epo_json_array(epo_json *j, const char *name) { open_bracket(j, name, '['); }

void epo_json_end(epo_json *j, char bracket) {
    bool filled = j->filled[j->depth--];
    if (filled)
        fprintf(j->out, "\n%*s", 2 * j->depth, "");
    fputc(bracket, j->out);
    if (j->depth == 0)
        fputc('\n', j->out);
}

void epo_json_text(epo_json *j, const char *name, const char *text) {
    begin(j, name);
    if (text == NULL)
        fputs("null", j->out);
    else
        put_text(j->out, text);
}

void epo_json_number(epo_json *j, const char *name, double number) {
    begin(j, name);
    if (!isfinite(number))
        fputs("null", j->out);
    else
        fprintf(j->out, "%.10g", number);
}

void epo_json_integer(epo_json *j, const char *name, int64_t number) {
    begin(j, name);
    fprintf(j->out, "%lld", (long long)number);
}

void epo_json_bool(epo_json *j, const char *name, bool value) {
    begin(j, name);
    fputs(value ? "true" : "false", j->out);
}
