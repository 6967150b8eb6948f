/* SPDX-License-Identifier: Apache-2.0
 *
 * gather.h - numbers of all ranks on every rank, by the group's own sum.
 */
#ifndef EPO_MEASURE_GATHER_H
#define EPO_MEASURE_GATHER_H

#include "measure/device.h"

/* [collective]  epo_group_allreduce for ordinary memory, whatever the engine. */
epo_status measure_sum(epo_group *group, measure_device *d, float *data, size_t count);
/* [collective]  value[i] becomes the largest over the ranks (0 or more, fp32). */
epo_status measure_largest(epo_group *group, measure_device *d, double *value, int count);

#endif
