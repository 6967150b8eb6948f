/* SPDX-License-Identifier: Apache-2.0
 *
 * preload.h - whether our library can be preloaded here, and into what.
 */
#ifndef EPO_SPANK_PRELOAD_H
#define EPO_SPANK_PRELOAD_H

#include "elf_file.h"

#include "core/trust.h"

#include <slurm/spank.h>

struct ep_plugin;

#define EP_PATH_MAX 4096

struct ep_preload {
    char path[EP_PATH_MAX]; /* what stands in LD_PRELOAD; "": nothing */
    struct ep_elf elf;
    dev_t device; /* which file it is, also seen from inside a container */
    ino_t inode;
};

/* Our library: there, trusted, a shared object.  A symbolic link beside its
 * target, as versioned libraries have it, is followed. */
epo_status ep_preload_find(const char *path, const struct epo_trust *trust,
                           struct ep_preload *preload);
/* The task, which may have entered a container by now, sees the same file. */
epo_status ep_preload_check_visible(const struct ep_preload *preload);
/* Why the program of this task would ignore or refuse the library; "" when
 * nothing speaks against it or the program cannot be read. */
void ep_preload_judge(struct ep_plugin *plugin, spank_t spank, const struct ep_preload *preload,
                      char *why, size_t room);
/* The same for a program that enters a container by itself. */
void ep_preload_judge_container(struct ep_plugin *plugin, spank_t spank, char *why, size_t room);
/* Does the loader take the interceptor?  Tried once per node. */
bool ep_preload_try_intercept(struct ep_plugin *plugin, spank_t spank, char *why, size_t room);
/* The same for the loader of this node or container, tried once per node. */
void ep_preload_try(struct ep_plugin *plugin, spank_t spank, char *why, size_t room);

#endif
