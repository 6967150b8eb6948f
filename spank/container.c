/* SPDX-License-Identifier: Apache-2.0
 *
 * container.c - programs that enter a container by themselves, after us: a
 * library of the node is not there, and every exec would complain.
 */
#include "preload.h"

#include "context.h"

#include "rules/words.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_MAX ((size_t)65536)

static bool is_one_of(const char *word, const char *const *list) {
    for (; *list != NULL; list++)
        if (strcmp(word, *list) == 0)
            return true;
    return false;
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* A container program by its exact name, followed by what it is to do; options
 * may stand between. */
static const char *find_container(const char *const *words, size_t count) {
    static const char *const programs[] = {"apptainer", "singularity", NULL};
    static const char *const actions[] = {"exec", "run", "shell", NULL};
    for (size_t i = 0; i < count; i++)
        if (is_one_of(base_name(words[i]), programs))
            for (size_t j = i + 1; j < count && j < i + 16; j++)
                if (is_one_of(words[j], actions))
                    return base_name(words[i]);
    return NULL;
}

static const char *find_in_text(const char *text, char *name, size_t room) {
    epo_words words = {0};
    const char *found = NULL;
    if (epo_words_split(&words, text, strnlen(text, TEXT_MAX)) == EPO_OK && words.count > 0) {
        const char **list = calloc(words.count, sizeof *list);
        for (size_t i = 0; list != NULL && i < words.count; i++)
            list[i] = words.word[i].text;
        found = list != NULL ? find_container(list, words.count) : NULL;
        if (found != NULL) {
            snprintf(name, room, "%s", found);
            found = name;
        }
        free(list);
    }
    epo_words_free(&words);
    return found;
}

/* The text of "sh -c TEXT", "bash -lc TEXT"; NULL when it is none. */
static const char *shell_text(int count, char **arguments) {
    static const char *const shells[] = {"sh", "bash", "dash", "zsh", "ksh", NULL};
    if (count < 3 || !is_one_of(base_name(arguments[0]), shells))
        return NULL;
    for (int i = 1; i + 1 < count && arguments[i][0] == '-'; i++)
        if (arguments[i][1] != '-' && strchr(arguments[i], 'c') != NULL)
            return arguments[i + 1];
    return NULL;
}

void ep_preload_judge_container(struct ep_plugin *plugin, spank_t spank, char *why, size_t room) {
    char **arguments = NULL, name[32];
    int count = 0;
    why[0] = '\0';
    char *bundle = plugin->api->task_getenv(spank, "SLURM_CONTAINER");
    if (bundle != NULL)
        snprintf(why, room,
                 "the step runs in an OCI container (--container), which the library "
                 "does not reach");
    free(bundle);
    if (why[0] != '\0' || plugin->api->get_arguments(spank, &count, &arguments) != 0 || count < 1)
        return;
    const char *text = shell_text(count, arguments);
    const char *found = text != NULL
                            ? find_in_text(text, name, sizeof name)
                            : find_container((const char *const *)arguments, (size_t)count);
    if (found != NULL)
        snprintf(why, room,
                 "%s enters a container, where the node's library is not; inside, set "
                 "LD_PRELOAD for the program alone and bind the library's folder",
                 found);
}
