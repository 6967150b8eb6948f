/* SPDX-License-Identifier: Apache-2.0 */
#include "need.h"

#include <stdio.h>

#include "ep_overlap.h"
#include "optim.h"

double need_experts(const options *o, int local_experts) {
    double count = 3.0 * o->layers * local_experts * o->hidden * o->ffn;
    double each = 2 * sizeof(float); /* weight and gradient */
    if (o->optimizer == OPTIM_ADAMW)
        each += 2 * sizeof(float);
    if (o->dtype == EPO_BF16)
        each += 2;
    return count * each;
}

/* MB that can be had; negative: not known. */
static double available_mb(const char *meminfo) {
    FILE *f = fopen(meminfo, "re");
    char line[128];
    double kib = -1;
    while (f != NULL && kib < 0 && fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "MemAvailable: %lf kB", &kib) != 1)
            kib = -1;
    if (f != NULL)
        fclose(f);
    return kib < 0 ? -1 : kib * 1024e-6;
}

epo_status need_check(const options *o, int local_experts, int ranks, double dense,
                      const char *meminfo) {
    double have = available_mb(meminfo), mb = (need_experts(o, local_experts) + dense) * 1e-6;
    if (have < 0 || mb * ranks <= have)
        return EPO_OK;
    return epo_fail(EPO_E_NOMEM,
                    "memory: the model needs %.0f MB a rank, %.0f MB for %d on this machine, which "
                    "has %.0f MB; lower --layers, --hidden, --ffn, --experts, --batch or --seq",
                    mb, mb * ranks, ranks, have);
}
