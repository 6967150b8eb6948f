/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "measure/machine.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "measure/gather.h"

epo_status measure_cores(epo_group *group, measure_device *d, int *cores) {
    cpu_set_t set;
    float any[CPU_SETSIZE];
    CPU_ZERO(&set);
    (void)sched_getaffinity(0, sizeof set, &set);
    for (int i = 0; i < CPU_SETSIZE; i++)
        any[i] = CPU_ISSET(i, &set) ? 1 : 0;
    epo_status status = measure_sum(group, d, any, CPU_SETSIZE);
    *cores = 0;
    for (int i = 0; i < CPU_SETSIZE; i++)
        *cores += any[i] > 0;
    return status;
}

epo_status measure_gpus(epo_group *group, measure_device *d, int *gpus) {
    epo_group_info info = {.size = sizeof info};
    if (epo_group_query(group, &info) != EPO_OK)
        return epo_fail(EPO_E_STATE, "%s", epo_error());
    float *tag = calloc((size_t)info.ranks, sizeof *tag);
    if (tag == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for %d ranks", info.ranks);
    tag[info.rank] = (float)d->tag;
    epo_status status = measure_sum(group, d, tag, (size_t)info.ranks);
    *gpus = 0;
    for (int r = 0; r < info.ranks; r++) {
        bool seen = tag[r] == 0;
        for (int q = 0; q < r; q++)
            seen = seen || tag[q] == tag[r];
        *gpus += !seen;
    }
    free(tag);
    return status;
}

double measure_process_mb(void) {
    char line[256];
    double kb = 0;
    FILE *file = fopen("/proc/self/status", "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "VmHWM: %lf kB", &kb) == 1)
            break;
    if (file != NULL)
        fclose(file);
    return kb * 1024e-6;
}
