/* SPDX-License-Identifier: Apache-2.0
 *
 * rows.c - dispatch and combine as calls of their own, around experts of the caller's.
 */
#include "moe/pass.h"

static epo_status check_own(const char *name, const epo_plan *plan, const void *tokens,
                            const void *rows) {
    if ((tokens != NULL || plan->tokens == 0) && (rows != NULL || plan->rows == 0))
        return EPO_OK;
    return epo_fail(EPO_E_ARG, "%s is %s and rows is %s; %d tokens, %llu rows", name,
                    tokens == NULL ? "NULL" : "given", rows == NULL ? "NULL" : "given",
                    plan->tokens, (unsigned long long)plan->rows);
}

epo_status moe_dispatch(epo_plan *plan, const void *x, void *rows, float *row_weights,
                        epo_stream stream) {
    if (plan == NULL)
        return epo_fail(EPO_E_ARG, "dispatch: plan is NULL");
    epo_group *g = plan->buffer->group;
    epo_status status = check_own("dispatch: x", plan, x, rows);
    if (status == EPO_OK)
        status = moe_group_ok(g);
    status = moe_group_turn(g, EPO_TURN_DISPATCH, plan, status);
    if (status != EPO_OK)
        return status;
    moe_pass p;
    moe_pass_begin(&p, plan, 1, MOE_USES_DISPATCH, stream);
    moe_pass_dispatch(&p, x);
    moe_pass_expand(&p, 0, rows);
    if (p.status == EPO_OK) {
        /* Without weights it copies nothing, and tells that the rows are there and
         * that x is read no more. */
        epo_rows_gather gather = {.dst = row_weights,
                                  .src = plan->weight,
                                  .index = plan->pad,
                                  .rows = row_weights != NULL ? plan->rows : 0,
                                  .row_bytes = sizeof(float)};
        epo_deps deps = moe_deps("weights", EPO_INTERVAL_LOCAL, -1);
        moe_deps_wait(&deps, epo_ready_event(g->sent));
        deps.signal = g->done;
        deps.result = true;
        p.status = g->ops->gather(g->compute, &gather, &deps);
    }
    return moe_pass_end(&p);
}

/* Rows that are summed on their way are read in units of 16 bytes: a caller's that lie otherwise
 * are copied first. */
static const void *in_units(moe_pass *p, const void *rows) {
    epo_group *g = p->group;
    const epo_plan *plan = p->plan;
    if (!moe_plan_sums(plan) || plan->rows == 0 || ((uintptr_t)rows & 15) == 0)
        return rows;
    moe_pass_get(p, plan->rows, p->buffer->row_bytes, &p->back);
    epo_rows_gather gather = {.dst = p->back.ptr,
                              .src = rows,
                              .rows = plan->rows,
                              .row_bytes = (uint32_t)p->buffer->row_bytes};
    epo_deps deps = moe_deps("rows in units", EPO_INTERVAL_LOCAL, -1);
    deps.signal = g->rows;
    g->stats.local_bytes += 2 * plan->rows * p->buffer->row_bytes;
    if (p->status == EPO_OK)
        p->status = g->ops->gather(g->compute, &gather, &deps);
    return p->back.ptr;
}

epo_status moe_combine(epo_plan *plan, const void *rows, void *y, const float *row_dweights,
                       float *dweights, epo_stream stream) {
    if (plan == NULL)
        return epo_fail(EPO_E_ARG, "combine: plan is NULL");
    epo_group *g = plan->buffer->group;
    epo_status status = check_own("combine: y", plan, y, rows);
    if (status == EPO_OK && ((row_dweights == NULL && plan->rows > 0 && dweights != NULL) ||
                             (row_dweights != NULL && plan->tokens > 0 && dweights == NULL)))
        status =
            epo_fail(EPO_E_ARG, "combine: row_dweights and dweights are both NULL or both given");
    if (status == EPO_OK)
        status = moe_group_ok(g);
    /* A rank without rows and tokens has none to send or to get. */
    const int extra = plan->rows == 0 && plan->tokens == 0       ? 0
                      : row_dweights != NULL || dweights != NULL ? 2
                                                                 : 1;
    status = moe_combine_turn(g, plan, extra, status);
    if (status != EPO_OK)
        return status;
    moe_pass p;
    moe_pass_begin(&p, plan, 1, MOE_USES_COMBINE, stream);
    moe_return_memory(&p);
    rows = in_units(&p, rows);
    /* A rank without rows has no row_dweights and may still receive some. */
    moe_pass_return(&p, 0, rows,
                    row_dweights == NULL && dweights != NULL ? plan->weight : row_dweights);
    moe_pass_finish(&p, y, dweights);
    return moe_pass_end(&p);
}
