/* SPDX-License-Identifier: Apache-2.0
 *
 * kept.h - descriptors that no child of a fork may keep: they hold GPU memory, and a child that
 * does not exec (a data loader's worker) lives long.  They are written down, and a child closes
 * them before its program goes on.
 *
 * Between kept_lock() and kept_unlock() nothing forks, so what is opened there is written down
 * before anybody does.  No signal comes to this thread meanwhile, whose handler might fork; and
 * what happens there is short and waits for nothing of this process's.
 */
#ifndef EPO_INTERCEPT_KEPT_H
#define EPO_INTERCEPT_KEPT_H

#include <signal.h>
#include <stdint.h>

typedef struct kept {
    struct kept *next;
    int *fd; /* `count` of them are open; a child has -1 in their places */
    uint32_t count;
} kept;

void kept_lock(sigset_t *before);
void kept_unlock(const sigset_t *before);
/* Locked: from now on those at fd are looked after. */
void kept_add(kept *k, int *fd, uint32_t count);
/* Not locked: none yet; k->count grows with them, locked. */
void kept_begin(kept *k, int *fd);
/* Not locked: closes them and forgets them. */
void kept_close(kept *k);

#endif
