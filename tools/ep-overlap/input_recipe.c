/* SPDX-License-Identifier: Apache-2.0
 *
 * Megatron-LM's arguments kept in YAML: examples/moe_recipes has ARGS
 * (num_experts: 128), its functional tests and the model zoos around it MODEL_ARGS
 * (--num-experts: 128), both ENV_VARS.  They become the words of a command.
 */
#include "input.h"

#include "core/status.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#define VALUE_MAX_ 8192

/* The name behind "ARGS." or another section's head; NULL: elsewhere. */
static const char *behind(const char *path, const char *section) {
    size_t n = strlen(section);
    return strncmp(path, section, n) == 0 && path[n] == '.' ? path + n + 1 : NULL;
}

static bool is_one(const char *text, const char *const *words) {
    for (; *words != NULL; words++)
        if (strcmp(text, *words) == 0)
            return true;
    return false;
}

/* Whether `value` is several words, moe_act layernorm or [attn, moe_router]; `plain` gets
 * it without brackets, quotes and commas. */
static bool is_list(const char *value, char *plain) {
    bool begins = true, list = value[0] == '[';
    size_t n = 0;
    for (; *value != '\0' && n + 1 < VALUE_MAX_; value++) {
        char c = strchr("[]'\",", *value) != NULL ? ' ' : *value;
        if (c != ' ' &&
            !(isalpha((unsigned char)c) || c == '_' || (!begins && isdigit((unsigned char)c))))
            return false;
        list = list || (c == ' ' && n > 0);
        begins = c == ' ';
        plain[n++] = c;
    }
    plain[n] = '\0';
    return list;
}

static epo_status put_argument(epo_words *words, const char *name, const char *value,
                               unsigned line) {
    static const char *const on[] = {"true", "True", NULL};
    static const char *const left_out[] = {"false", "False", "null", "None", "~", "", NULL};
    char flag[256], plain[VALUE_MAX_], word[VALUE_MAX_ + 256];
    while (*name == '-')
        name++;
    int n = snprintf(flag, sizeof flag, "--%.200s", name);
    for (char *c = flag; *c != '\0'; c++)
        *c = *c == '_' ? '-' : *c;
    if (n < 3 || is_one(value, left_out))
        return EPO_OK;
    if (is_one(value, on))
        return epo_words_add(words, flag, line, false, false);
    if (!is_list(value, plain)) {
        snprintf(word, sizeof word, "%s=%.8000s", flag, value);
        return epo_words_add(words, word, line, strchr(value, '$') != NULL, false);
    }
    epo_status status = epo_words_add(words, flag, line, false, false);
    char *rest = plain;
    for (char *item; status == EPO_OK && (item = strsep(&rest, " ")) != NULL;)
        if (*item != '\0')
            status = epo_words_add(words, item, line, false, false);
    return status;
}

static epo_status put_variable(epo_recipe *recipe, const char *name, const char *value,
                               unsigned line) {
    char word[VALUE_MAX_];
    snprintf(word, sizeof word, "%.200s=%.7000s", name, value);
    return epo_words_add(&recipe->words, word, line, strchr(value, '$') != NULL, true);
}

epo_status epo_recipe_put(epo_recipe *recipe, const char *path, const char *value, size_t line,
                          bool *taken) {
    const char *name = behind(path, "ARGS");
    const char *variable = behind(path, "ENV_VARS");
    char text[VALUE_MAX_];
    if (name == NULL)
        name = behind(path, "MODEL_ARGS");
    *taken = name != NULL || variable != NULL;
    if (!*taken || value == NULL)
        return EPO_OK;
    size_t length = strlen(value);
    bool quoted = length >= 2 && value[0] == '"' && value[length - 1] == '"';
    snprintf(text, sizeof text, "%.*s", (int)(quoted ? length - 2 : length), value + quoted);
    if (variable != NULL)
        return put_variable(recipe, variable, text, (unsigned)line);
    epo_status status = EPO_OK;
    if (!recipe->has_arguments)
        status = epo_words_add(&recipe->words, "pretrain_gpt.py", (unsigned)line, false, true);
    recipe->has_arguments = true;
    return status == EPO_OK ? put_argument(&recipe->words, name, text, (unsigned)line) : status;
}
