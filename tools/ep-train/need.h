/* SPDX-License-Identifier: Apache-2.0
 *
 * need.h - the memory that a run takes, known before any is taken.
 */
#ifndef EP_TRAIN_NEED_H
#define EP_TRAIN_NEED_H

#include "core/status.h"
#include "options.h"

/* Bytes of a rank's experts with gradients and optimizer; double: it cannot overflow. */
double need_experts(const options *o, int local_experts);
/* EPO_E_NOMEM with need and have if this machine lacks it; `dense` is the rest of a
 * rank's model, with what its optimizer keeps.  Says nothing where /proc does not. */
epo_status need_check(const options *o, int local_experts, int ranks, double dense,
                      const char *meminfo);

#endif
