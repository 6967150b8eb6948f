/* SPDX-License-Identifier: Apache-2.0
 *
 * launcher.h - programs that start another one: how many of their words are their
 * own.
 */
#ifndef EPO_RULES_LAUNCHER_H
#define EPO_RULES_LAUNCHER_H

#include <stdbool.h>
#include <stddef.h>

typedef enum epo_launcher_kind {
    EPO_LAUNCHER_NONE,    /* it starts nothing that is known of */
    EPO_LAUNCHER_COMMAND, /* a command follows */
    EPO_LAUNCHER_SCRIPT,  /* a Python script follows */
    EPO_LAUNCHER_MODULE,  /* a Python module's name follows */
    EPO_LAUNCHER_TEXT,    /* a shell's text follows */
    EPO_LAUNCHER_EXEC,    /* ours, a command follows */
    EPO_LAUNCHER_NOTHING, /* it runs no program here (--help, an interactive shell) */
    EPO_LAUNCHER_OPAQUE   /* what it starts cannot be told */
} epo_launcher_kind;

/* `words[0]` may be a launcher.  *taken: how many words are its own. */
epo_launcher_kind epo_launcher_read(const char *const *words, size_t count, size_t *taken);
/* What stands behind the last '/'. */
const char *epo_launcher_base(const char *path);

#endif
