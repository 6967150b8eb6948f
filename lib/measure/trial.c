/* SPDX-License-Identifier: Apache-2.0 */
#include "config.h"

#include "measure/trial.h"

static epo_status passed(epo_status status) {
    return status == EPO_OK ? EPO_OK : epo_fail(status, "%s", epo_error());
}

epo_status measure_trial(const measure_device *d, const measure_pass *p) {
    epo_saved *saved = NULL;
    epo_status status =
        passed(epo_forward(p->layer, p->plan, p->x, p->y, d->gpu ? &saved : NULL, d->stream));
    if (status == EPO_OK && d->gpu)
        status = passed(epo_backward(p->layer, saved, p->dy, p->dx, p->dweights, d->stream));
    if (status == EPO_OK && d->gpu)
        status = passed(epo_group_wgrad_flush(p->group, d->stream));
    return status;
}
