/* SPDX-License-Identifier: Apache-2.0 */
#include "core/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_MAX ((size_t)64 << 20)

static bool reserve(struct epo_text *text, size_t more) {
    if (text->failed)
        return false;
    if (more > TEXT_MAX - text->length - 1) {
        text->failed = true;
        return false;
    }
    size_t need = text->length + more + 1;
    if (need <= text->room)
        return true;
    size_t room = text->room < 128 ? 128 : text->room;
    while (room < need)
        room *= 2;
    char *data = realloc(text->data, room);
    if (data == NULL) {
        text->failed = true;
        return false;
    }
    text->data = data;
    text->room = room;
    return true;
}

void epo_text_add(struct epo_text *text, const char *bytes, size_t length) {
    if (!reserve(text, length))
        return;
    memcpy(text->data + text->length, bytes, length);
    text->length += length;
    text->data[text->length] = '\0';
}

void epo_text_add_string(struct epo_text *text, const char *string) {
    epo_text_add(text, string, strlen(string));
}

void epo_text_format(struct epo_text *text, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int need = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (need < 0) {
        text->failed = true;
        return;
    }
    if (!reserve(text, (size_t)need))
        return;
    va_start(args, format);
    vsnprintf(text->data + text->length, (size_t)need + 1, format, args);
    va_end(args);
    text->length += (size_t)need;
}

char *epo_text_take(struct epo_text *text) {
    if (text->data == NULL)
        epo_text_add(text, "", 0);
    char *data = text->failed ? NULL : text->data;
    if (data == NULL)
        free(text->data);
    *text = (struct epo_text)EPO_TEXT_INIT;
    return data;
}

void epo_text_free(struct epo_text *text) {
    free(text->data);
    *text = (struct epo_text)EPO_TEXT_INIT;
}

static bool printable(char c) { return (unsigned char)c >= 0x20 && (unsigned char)c < 0x7f; }

void epo_text_clean(char *string) {
    for (; *string != '\0'; string++)
        if (!printable(*string))
            *string = '?';
}

bool epo_text_is_clean(const char *string) {
    while (printable(*string))
        string++;
    return *string == '\0';
}

const char *epo_text_gpu_bind(const char *tres_bind) {
    if (tres_bind == NULL)
        return NULL;
    if (strncmp(tres_bind, "gres/", 5) == 0)
        tres_bind += 5;
    return strncmp(tres_bind, "gpu:", 4) == 0 ? tres_bind + 4 : NULL;
}
