/* SPDX-License-Identifier: Apache-2.0
 *
 * packages.h - programs and Python packages, by their files alone.
 */
#ifndef EPO_PROBE_PACKAGES_H
#define EPO_PROBE_PACKAGES_H

#include "probe/files.h"

/* program.c: "python", "python3", "python3.12". */
bool probe_is_python(const char *base);
/* As execvp() would find it, in the task's PATH. */
bool probe_find_in_path(const epo_probe_task *task, const char *name, char path[PROBE_PATH]);
/* True for a script; the interpreter behind #! and env. */
bool probe_read_shebang(epo_probe_task *task, const char *path, char *interpreter, size_t room);

#define SITE_FOLDERS_MAX 48

/* The folders that a Python searches for packages, in its order. */
typedef struct probe_sites {
    char *folder[SITE_FOLDERS_MAX];
    int count;
    bool open; /* there may be more than these: an import hook, a folder we could not read */
    char why_open[160];
} probe_sites;

/* Adds a folder that exists, once. */
void probe_sites_add(probe_sites *sites, const char *folder);
void probe_sites_free(probe_sites *sites);

/* packages.c: puts what the folders hold, .pth files included. */
void probe_packages(epo_probe_task *task, probe_sites *sites, epo_facts *facts);
/* All of it unknown, or unset, for one reason. */
void probe_packages_unknown(epo_facts *facts, const char *source, const char *why);
void probe_packages_unset(epo_facts *facts, const char *source);

#endif
