/* SPDX-License-Identifier: Apache-2.0
 *
 * task.h - parts of task_init.
 */
#ifndef EPO_SPANK_TASK_H
#define EPO_SPANK_TASK_H

#include "context.h"

/* task_env.c: puts back what an outer step's plugin set. */
void ep_task_restore(struct ep_plugin *plugin, spank_t spank);
/* Sets what the decision calls for, `preload` ("" for none) appended to the
 * user's LD_PRELOAD, and records it. */
epo_status ep_task_set(struct ep_plugin *plugin, spank_t spank, const char *preload);

/* refuse.c: one line, the end of the step, the end of the task.  Does not
 * return outside of tests. */
void ep_task_refuse(struct ep_plugin *plugin, spank_t spank, const char *why);

/* batch.c: says that the options apply to srun's steps, when a batch script has
 * none. */
void ep_task_batch_note(struct ep_plugin *plugin, spank_t spank);

#endif
