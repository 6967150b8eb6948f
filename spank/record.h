/* SPDX-License-Identifier: Apache-2.0
 *
 * record.h - the decision on its way from srun to the nodes, in one variable of
 * the step's environment.  It is a user's variable, so the nodes hold it against
 * the site's policy again.
 */
#ifndef EPO_SPANK_RECORD_H
#define EPO_SPANK_RECORD_H

#include "context.h"

#define EP_RECORD_MAX (EPO_ERROR_MAX + 128)

/* "1 JOB STEP STATE EXPLICIT ANY AUTO VALUE*3 SOURCE*3 REASON": STATE 0 is off, 1
 * on, 2 refused (REASON is the refusal), 3 `auto` that waits for the nodes.  The
 * record of a heterogeneous job has job 0. */
void ep_record_write(const struct ep_plugin *plugin, char *text, size_t room);
/* False when the text is not a record of this job and step, or, where `shared`
 * says that this is a heterogeneous job, of all its components. */
bool ep_record_read(const char *text, bool shared, struct ep_plugin *plugin);

#endif
