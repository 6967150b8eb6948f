/* SPDX-License-Identifier: Apache-2.0
 *
 * save.c - the final weights in one file, whichever rank holds them.
 */
#include "train.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "output.h"

static epo_status put(FILE *file, const char *path, const void *data, size_t bytes) {
    if (file == NULL || fwrite(data, 1, bytes, file) == bytes)
        return EPO_OK;
    return epo_fail(EPO_E_SYSTEM, "%s cannot be written: %s", path, strerror(errno));
}

/* One expert's matrix to every rank: its holder gives it, the others give zeros. */
static epo_status put_expert(train *t, FILE *file, const char *path, int holder, const float *w,
                             float *copy, size_t count) {
    if (t->world->info.rank == holder)
        memcpy(copy, w, count * sizeof *copy);
    else
        memset(copy, 0, count * sizeof *copy);
    epo_status status = moe_world_sum(t->world, copy, count);
    return status != EPO_OK ? status : put(file, path, copy, count * sizeof *copy);
}

/* Goes through all experts even if writing fails: the sums are collective. */
static epo_status put_experts(train *t, FILE *file, const char *path, float *copy) {
    const int local = t->world->local_experts;
    epo_status first = EPO_OK;
    for (int l = 0; l < t->opt->layers; l++)
        for (int e = 0; e < t->opt->experts; e++) {
            const moe_block *b = t->block[l];
            size_t n1 = b->count1 / (size_t)local, n2 = b->count2 / (size_t)local;
            size_t at = (size_t)(e % local);
            epo_status status = put_expert(t, file, path, e / local, b->w1 + at * n1, copy, n1);
            first = first != EPO_OK ? first : status;
            status = put_expert(t, file, path, e / local, b->w2 + at * n2, copy, n2);
            first = first != EPO_OK ? first : status;
        }
    return first;
}

epo_status train_save(train *t, const char *path) {
    const size_t each = 2 * (size_t)t->opt->ffn * (size_t)t->opt->hidden;
    output out = {NULL, NULL, NULL};
    epo_status status = EPO_OK;
    float *copy = malloc(each * sizeof *copy);
    if (copy == NULL)
        return epo_fail(EPO_E_NOMEM, "no memory to save the weights");
    if (t->world->info.rank == 0)
        status = output_open(path, &out);
    if (status == EPO_OK)
        status = put(out.file, path, "EPOW1\n", 6);
    if (status == EPO_OK)
        status = put(out.file, path, t->model->w, t->model->dense * sizeof(float));
    char text[EPO_ERROR_MAX];
    snprintf(text, sizeof text, "%s", epo_fail_text());
    epo_status also = put_experts(t, out.file, path, copy);
    status = status != EPO_OK ? epo_fail(status, "%s", text) : also;
    if (out.file != NULL)
        status = output_close(&out, status);
    free(copy);
    return status;
}
