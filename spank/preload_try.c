/* SPDX-License-Identifier: Apache-2.0
 *
 * preload_try.c - does the loader that the task will meet take our library?  A
 * missing dependency or an older libc would fail every exec, the task prolog's
 * too.  Tried once per node with a program that does nothing.
 */
#include "preload.h"

#include "context.h"

#include "core/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PROGRAM "/bin/true"
#define TIMEOUT_MS 5000

static char *variable(const char *name, const char *value) {
    struct epo_text text = EPO_TEXT_INIT;
    epo_text_format(&text, "%s=%s", name, value);
    return epo_text_take(&text);
}

static void try_once(struct ep_plugin *plugin, spank_t spank, const char *library, char *why,
                     size_t room) {
    char said[256] = "";
    char *search = plugin->api->task_getenv(spank, "LD_LIBRARY_PATH");
    char *preload = variable("LD_PRELOAD", library);
    char *path = search != NULL ? variable("LD_LIBRARY_PATH", search) : NULL;
    char *arguments[] = {(char *)(uintptr_t)PROGRAM, NULL};
    char *environment[] = {preload, path, NULL};
    if (preload != NULL && access(PROGRAM, X_OK) == 0) {
        int status = plugin->api->run(arguments, environment, TIMEOUT_MS, said, sizeof said);
        said[strcspn(said, "\n")] = '\0';
        if (status != 0 || said[0] != '\0')
            snprintf(why, room, "the loader does not take the library: %.200s",
                     said[0] != '\0' ? said : "no message");
    }
    free(search);
    free(preload);
    free(path);
}

/* One library's answer, kept for the node's other tasks. */
static void try_for_node(struct ep_plugin *plugin, spank_t spank, const char *library,
                         struct ep_tried *tried, char *why, size_t room) {
    struct ep_shared *shared = plugin->shared;
    why[0] = '\0';
    if (shared == NULL || !ep_shared_lock(shared)) {
        try_once(plugin, spank, library, why, room);
        return;
    }
    if (!tried->done) {
        try_once(plugin, spank, library, tried->why, sizeof tried->why);
        tried->done = true;
    }
    snprintf(why, room, "%s", tried->why);
    ep_shared_unlock(shared);
}

void ep_preload_try(struct ep_plugin *plugin, spank_t spank, char *why, size_t room) {
    struct ep_shared *shared = plugin->shared;
    try_for_node(plugin, spank, plugin->preload.path, shared != NULL ? &shared->library : NULL, why,
                 room);
}

bool ep_preload_try_intercept(struct ep_plugin *plugin, spank_t spank, char *why, size_t room) {
    struct ep_shared *shared = plugin->shared;
    try_for_node(plugin, spank, plugin->intercept.path,
                 shared != NULL ? &shared->interceptor : NULL, why, room);
    return why[0] == '\0';
}
