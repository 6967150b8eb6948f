/* SPDX-License-Identifier: Apache-2.0 */
#include "task.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SCRIPT_MAX ((size_t)1 << 20)
#define STEP_BATCH 0xfffffffbu

static bool is_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-';
}

static bool names_srun(const char *text) {
    const char *at = text;
    while ((at = strstr(at, "srun")) != NULL) {
        if ((at == text || !is_word(at[-1])) && !is_word(at[4]))
            return true;
        at += 4;
    }
    return false;
}

/* True also for a script that cannot be read: then nothing is said. */
static bool script_uses_srun(const char *path) {
    char *text = malloc(SCRIPT_MAX + 1);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    ssize_t got = text != NULL && fd >= 0 ? read(fd, text, SCRIPT_MAX) : -1;
    if (fd >= 0)
        close(fd);
    bool uses = true;
    if (got >= 0) {
        text[got] = '\0';
        uses = names_srun(text);
    }
    free(text);
    return uses;
}

void ep_task_batch_note(struct ep_plugin *plugin, spank_t spank) {
    uint32_t step = 0;
    int count = 0;
    char **arguments = NULL;
    int overlap = plugin->command[EPO_OPT_OVERLAP];
    if (overlap == EPO_UNSET || overlap == EPO_OVERLAP_OFF ||
        plugin->api->get_number(spank, S_JOB_STEPID, &step) != 0 || step != STEP_BATCH)
        return;
    if (plugin->api->get_arguments(spank, &count, &arguments) != 0 || count < 1 ||
        script_uses_srun(arguments[0]))
        return;
    wrap_format(plugin->api->task_say,
                "ep-overlap: --ep-overlap=%s applies to srun's steps, and this script calls no "
                "srun: start the program with srun",
                epo_option_word(EPO_OPT_OVERLAP, overlap));
}
