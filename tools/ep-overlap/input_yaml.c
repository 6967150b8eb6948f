/* SPDX-License-Identifier: Apache-2.0
 *
 * Bridge's YAML, or a recipe's: nested objects become paths (model.num_moe_experts).
 * Events, not a document: anchors are not expanded, so a small file stays small.
 */
#include "input.h"

#include "core/status.h"
#include "rules/settings.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#define DEPTH_MAX 32
#define PATH_MAX_ 512
#define LIST_MAX_ 8192

typedef struct level {
    size_t path_length; /* of the path that leads here */
    bool is_list, has_key;
} level;

typedef struct yaml_reader {
    const char *name;
    epo_facts *facts;
    epo_recipe *recipe;
    size_t settings;
    level levels[DEPTH_MAX];
    int depth; /* levels in use */
    char path[PATH_MAX_];
    char list[LIST_MAX_];
    size_t list_length;
} yaml_reader;

static epo_status put(yaml_reader *r, const char *value, size_t line) {
    char source[300];
    bool known;
    epo_status status = epo_recipe_put(r->recipe, r->path, value, line, &known);
    if (status != EPO_OK || known)
        return status;
    snprintf(source, sizeof source, "%.200s:%zu", r->name, line);
    status = epo_setting_put(r->facts, r->path, value, source, &known);
    r->settings += status == EPO_OK && known;
    return status;
}

/* As PyYAML reads plain words. */
static const char *plain_word(const char *text) {
    static const char *const pairs[][2] = {{"yes", "true"}, {"Yes", "true"}, {"no", "false"},
                                           {"No", "false"}, {"on", "true"},  {"off", "false"}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        if (strcmp(text, pairs[i][0]) == 0)
            return pairs[i][1];
    return text;
}

static void append_item(yaml_reader *r, const char *text) {
    size_t room = LIST_MAX_ - r->list_length;
    int n =
        snprintf(r->list + r->list_length, room, "%s'%s'", r->list_length > 1 ? ", " : "", text);
    if (n > 0 && (size_t)n + 2 < room)
        r->list_length += (size_t)n;
    else
        r->list[r->list_length] = '\0';
}

static void set_key(yaml_reader *r, level *at, const char *key) {
    size_t room = PATH_MAX_ - at->path_length;
    snprintf(r->path + at->path_length, room, "%s%s", at->path_length > 0 ? "." : "", key);
    at->has_key = true;
}

static epo_status take_scalar(yaml_reader *r, const yaml_event_t *event) {
    const char *text = (const char *)event->data.scalar.value;
    bool plain = event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    level *at = r->depth > 0 ? &r->levels[r->depth - 1] : NULL;
    if (at == NULL || strlen(text) != event->data.scalar.length)
        return EPO_OK;
    if (at->is_list) {
        append_item(r, text);
        return EPO_OK;
    }
    if (!at->has_key) {
        set_key(r, at, text);
        return EPO_OK;
    }
    at->has_key = false;
    if (plain)
        return put(r, plain_word(text), event->start_mark.line + 1);
    char quoted[4096];
    snprintf(quoted, sizeof quoted, "\"%.4000s\"", text);
    return put(r, quoted, event->start_mark.line + 1);
}

static epo_status open_level(yaml_reader *r, bool is_list, size_t line) {
    if (r->depth == DEPTH_MAX)
        return epo_fail(EPO_E_ARG, "%s:%zu: nested deeper than %d levels", r->name, line,
                        DEPTH_MAX);
    epo_status status = EPO_OK;
    if (!is_list && strcmp(r->path, "comm_overlap") == 0)
        status = put(r, "present", line);
    r->levels[r->depth++] = (level){.path_length = strlen(r->path), .is_list = is_list};
    if (is_list) {
        strncpy(r->list, "[", 2);
        r->list_length = 1;
    }
    return status;
}

/* The parent's key is used up once its value has ended. */
static epo_status close_level(yaml_reader *r, size_t line) {
    level closed = r->levels[--r->depth];
    epo_status status = EPO_OK;
    r->path[closed.path_length] = '\0';
    if (closed.is_list) {
        r->list[r->list_length++] = ']';
        r->list[r->list_length] = '\0';
        if (r->depth > 0 && !r->levels[r->depth - 1].is_list)
            status = put(r, r->list, line);
        r->list_length = 1;
    }
    if (r->depth > 0)
        r->levels[r->depth - 1].has_key = false;
    return status;
}

static epo_status take_alias(yaml_reader *r, size_t line) {
    level *at = r->depth > 0 ? &r->levels[r->depth - 1] : NULL;
    if (at == NULL || at->is_list || !at->has_key)
        return EPO_OK;
    at->has_key = false;
    return put(r, NULL, line);
}

static epo_status take_event(yaml_reader *r, const yaml_event_t *event) {
    size_t line = event->start_mark.line + 1;
    switch (event->type) {
    case YAML_SCALAR_EVENT: return take_scalar(r, event);
    case YAML_ALIAS_EVENT: return take_alias(r, line);
    case YAML_MAPPING_START_EVENT: return open_level(r, false, line);
    case YAML_SEQUENCE_START_EVENT: return open_level(r, true, line);
    case YAML_MAPPING_END_EVENT:
    case YAML_SEQUENCE_END_EVENT: return close_level(r, line);
    default: return EPO_OK;
    }
}

static epo_status parse_error(const yaml_reader *r, const yaml_parser_t *parser) {
    if (parser->error == YAML_MEMORY_ERROR)
        return epo_fail(EPO_E_NOMEM, "%s: no memory", r->name);
    return epo_fail(EPO_E_ARG, "%s:%zu: not YAML: %s (byte %zu)", r->name,
                    parser->problem_mark.line + 1, parser->problem ? parser->problem : "?",
                    parser->error == YAML_READER_ERROR ? parser->problem_offset
                                                       : parser->problem_mark.index);
}

epo_status epo_input_yaml(const char *path, const char *name, epo_facts *facts, size_t *settings,
                          epo_recipe *recipe) {
    yaml_parser_t parser;
    yaml_reader *r = calloc(1, sizeof *r);
    FILE *file = fopen(path, "re");
    epo_status status = EPO_OK;
    bool done = false, made = false;
    if (file == NULL)
        status = epo_fail(EPO_E_SYSTEM, "%s: cannot be opened: %s", name, strerror(errno));
    else if (r == NULL || !(made = yaml_parser_initialize(&parser)))
        status = epo_fail(EPO_E_NOMEM, "%s: no memory", name);
    if (status == EPO_OK) {
        *r = (yaml_reader){.name = name, .facts = facts, .recipe = recipe};
        yaml_parser_set_input_file(&parser, file);
    }
    while (status == EPO_OK && !done) {
        yaml_event_t event;
        if (!yaml_parser_parse(&parser, &event)) {
            status = parse_error(r, &parser);
            break;
        }
        done = event.type == YAML_STREAM_END_EVENT;
        status = take_event(r, &event);
        yaml_event_delete(&event);
    }
    if (status == EPO_OK)
        *settings = r->settings;
    if (made)
        yaml_parser_delete(&parser);
    if (file != NULL)
        fclose(file);
    free(r);
    return status;
}
