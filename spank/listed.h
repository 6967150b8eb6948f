/* SPDX-License-Identifier: Apache-2.0
 *
 * listed.h - plugstack.conf may list the plugin more than once, by hand and by the drop-in of
 * the package.  It works once, where and as the last line says, as with an option given twice.
 */
#ifndef EPO_SPANK_LISTED_H
#define EPO_SPANK_LISTED_H

#include "wrap_spank.h"

#include <stdbool.h>

enum ep_hook { EP_HOOK_POST_OPT, EP_HOOK_USER, EP_HOOK_TASK, EP_HOOK_EXIT, EP_HOOK_COUNT };

struct ep_listed {
    int lines; /* of plugstack.conf with this file: Slurm calls each hook as often */
    int files; /* of the plugin that are loaded beside this one, all of them before it */
    bool begun;
    int calls[EP_HOOK_COUNT];
};

/* slurm_spank_init: one more line.  False where another file of the plugin is listed behind
 * this one: then that works, and no turn of this one ever comes. */
bool ep_listed_line(struct ep_listed *listed);
/* Any other hook: is this the last line's call? */
bool ep_listed_turn(struct ep_listed *listed, enum ep_hook hook);
/* For slurmd's log, once a step: one line, where the plugin is listed more than once. */
void ep_listed_tell(const struct ep_listed *listed, const struct wrap_spank *api);

/* Objects of the process whose file has this name: loaded before the one that holds `own`, and
 * behind it. */
void ep_listed_files(const char *name, const void *own, int *before, int *behind);

#endif
