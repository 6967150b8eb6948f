/* SPDX-License-Identifier: Apache-2.0
 *
 * task_programs.c - the programs of a step: one, or with --multi-prog all that its
 * file names, the same list on every node.
 */
#include "task.h"

#include "rules/words.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* Slurm hands the file's text over as the only argument of a program of the file's
 * name; each of its lines begins with ranks or is a comment. */
static bool is_program_list(int count, char **arguments) {
    bool any = false, goes_on = false;
    if (count != 2)
        return false;
    for (const char *line = arguments[1]; *line != '\0';) {
        line += strspn(line, " \t");
        bool ranks = isdigit((unsigned char)*line) || *line == '*';
        if (!goes_on && !ranks && *line != '#' && *line != '\n')
            return false;
        any = any || ranks;
        size_t length = strcspn(line, "\n");
        goes_on = length > 0 && line[length - 1] == '\\';
        line += length;
        line += *line == '\n';
    }
    return any && strchr(arguments[1], '\n') != NULL;
}

/* Of "0-3 python a.py" the words behind the ranks. */
static epo_status add_line(const epo_words *words, size_t at, size_t end,
                           struct ep_programs *programs) {
    struct ep_vector *grown =
        reallocarray(programs->vectors, programs->count + 1, sizeof *programs->vectors);
    if (grown == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for the step's programs");
    programs->vectors = grown;
    struct ep_vector *vector = &grown[programs->count];
    vector->count = 0;
    vector->arguments = calloc(end - at + 1, sizeof *vector->arguments);
    if (vector->arguments == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for the step's programs");
    programs->count++;
    for (; at < end; at++) {
        char *word = strdup(words->word[at].text);
        if (word == NULL)
            return epo_fail(EPO_E_NOMEM, "no memory for the step's programs");
        vector->arguments[vector->count++] = word;
    }
    return EPO_OK;
}

static epo_status read_list(const char *text, struct ep_programs *programs) {
    epo_words words = {0};
    epo_status status = epo_words_split(&words, text, strlen(text));
    for (size_t at = 0, end; at < words.count && status == EPO_OK; at = end) {
        for (end = at + 1; end < words.count && !words.word[end].begins; end++) {
        }
        char first = words.word[at].text[0];
        if (end > at + 1 && (isdigit((unsigned char)first) || first == '*'))
            status = add_line(&words, at + 1, end, programs);
    }
    epo_words_free(&words);
    return status;
}

epo_status ep_task_programs(struct ep_plugin *plugin, spank_t spank, struct ep_programs *programs) {
    char **arguments = NULL;
    int count = 0;
    memset(programs, 0, sizeof *programs);
    if (plugin->api->get_arguments(spank, &count, &arguments) != 0 || count < 1)
        return EPO_OK;
    programs->listed = is_program_list(count, arguments);
    if (programs->listed) {
        epo_status status = read_list(arguments[1], programs);
        programs->unread = status == EPO_E_ARG || status == EPO_E_OVERFLOW;
        return programs->unread ? EPO_OK : status;
    }
    programs->vectors = calloc(1, sizeof *programs->vectors);
    if (programs->vectors == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for the step's programs");
    programs->vectors[0] = (struct ep_vector){arguments, count};
    programs->count = 1;
    return EPO_OK;
}

void ep_task_programs_free(struct ep_programs *programs) {
    for (size_t i = 0; programs->listed && i < programs->count; i++) {
        for (int j = 0; j < programs->vectors[i].count; j++)
            free(programs->vectors[i].arguments[j]);
        free(programs->vectors[i].arguments);
    }
    free(programs->vectors);
    memset(programs, 0, sizeof *programs);
}
