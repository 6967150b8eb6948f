/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "measure/gather.h"

#include <math.h>
#include <stdlib.h>

static epo_status passed(epo_status status) {
    return status == EPO_OK ? EPO_OK : epo_fail(status, "%s", epo_error());
}

/* In pieces of memory that was there before: a GPU that waits for this rank's part
 * could keep this rank from getting more. */
epo_status measure_sum(epo_group *group, measure_device *d, float *data, size_t count) {
    epo_status status = EPO_OK;
    if (!d->gpu)
        return passed(epo_group_allreduce(group, data, count, NULL));
    for (size_t done = 0; done < count && status == EPO_OK;) {
        const size_t room = MEASURE_STAGING / sizeof *data;
        const size_t some = count - done < room ? count - done : room;
        status = measure_device_put(d, d->staging, data + done, some * sizeof *data);
        if (status == EPO_OK)
            status = passed(epo_group_allreduce(group, d->staging, some, d->stream));
        if (status == EPO_OK)
            status = measure_device_get(d, data + done, d->staging, some * sizeof *data);
        done += some;
    }
    return status;
}

epo_status measure_largest(epo_group *group, measure_device *d, double *value, int count) {
    epo_group_info info = {.size = sizeof info};
    epo_status status = passed(epo_group_query(group, &info));
    if (status != EPO_OK)
        return status;
    const size_t all_count = (size_t)info.ranks * (size_t)count;
    float *all = calloc(all_count + 1, sizeof *all);
    if (all == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory for %d samples", count);
    for (int i = 0; i < count; i++)
        all[info.rank * count + i] = (float)value[i];
    status = measure_sum(group, d, all, all_count);
    for (int i = 0; status == EPO_OK && i < count; i++) {
        value[i] = 0;
        for (int r = 0; r < info.ranks; r++)
            value[i] = fmax(value[i], (double)all[r * count + i]);
    }
    free(all);
    return status;
}
