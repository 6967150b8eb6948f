/* SPDX-License-Identifier: Apache-2.0
 *
 * machine.h - what the ranks share, and what this process takes.
 */
#ifndef EPO_MEASURE_MACHINE_H
#define EPO_MEASURE_MACHINE_H

#include "measure/device.h"

/* [collective]  Cores that the ranks may use together: each may be bound to its own.
 * 0: not known. */
epo_status measure_cores(epo_group *group, measure_device *d, int *cores);
/* [collective]  GPUs that the ranks have together: fewer than ranks where some share.
 * 0 on the host. */
epo_status measure_gpus(epo_group *group, measure_device *d, int *gpus);
/* Peak resident memory of this process in 1e6 bytes; 0 if the kernel does not tell. */
double measure_process_mb(void);

#endif
