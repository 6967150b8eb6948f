/* SPDX-License-Identifier: Apache-2.0
 *
 * ranks.c - rank and number of ranks from the launcher's environment; numbers in text.
 */
#include "preload/environment.h"

#include <limits.h>
#include <stdlib.h>

#include "core/status.h"

/* In this order: a launcher inside a task (torchrun under srun -n1) set its own
 * variables later than Slurm did, so the innermost launcher comes first.
 * `size2` and `size3` are other names of the size that some launchers use. */
static const struct source {
    const char *rank, *size, *size2, *size3;
} sources[] = {
    {"RANK", "WORLD_SIZE", NULL, NULL},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", NULL, NULL},
    /* PMIx has no variable for the size; srun --mpi=pmix leaves Slurm's. */
    {"PMIX_RANK", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
    {"PMI_RANK", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", NULL},
};
#define SOURCES ((int)(sizeof sources / sizeof sources[0]))
#define SLURM_SOURCE (SOURCES - 1)

bool epo_text_int(const char *text, int *out) {
    long long value = 0;
    if (*text == '\0')
        return false;
    for (const char *c = text; *c != '\0'; c++) {
        if (*c < '0' || *c > '9')
            return false;
        value = 10 * value + (*c - '0');
        if (value > INT_MAX)
            return false;
    }
    *out = (int)value;
    return true;
}

bool epo_text_seconds(const char *text, double *out) {
    double value = 0, unit = 1;
    int digits = 0;
    bool point = false;
    for (const char *c = text; *c != '\0'; c++) {
        if (*c == '.' && !point) {
            point = true;
        } else if (*c >= '0' && *c <= '9') {
            digits++;
            value = 10 * value + (*c - '0');
            unit *= point ? 10 : 1;
        } else {
            return false;
        }
    }
    if (digits == 0 || digits > 15)
        return false;
    *out = value / unit;
    return true;
}

/* A variable counts as set only if it is not empty: `export RANK=` is how scripts
 * drop one. */
static const char *variable(const char *name) {
    const char *value = name == NULL ? NULL : getenv(name);
    return value == NULL || *value == '\0' ? NULL : value;
}

static const char *size_name(const struct source *s) {
    if (variable(s->size) != NULL)
        return s->size;
    if (variable(s->size2) != NULL)
        return s->size2;
    if (variable(s->size3) != NULL)
        return s->size3;
    return NULL;
}

/* The script of a batch job, and a shell of salloc, have SLURM_PROCID and the
 * job's SLURM_NTASKS without being a task: a program that starts there is alone. */
static bool outside_step(const struct source *s) {
    return s == &sources[SLURM_SOURCE] && variable("SLURM_JOB_ID") != NULL &&
           variable("SLURM_STEP_NUM_TASKS") == NULL && variable("SLURM_STEP_ID") == NULL;
}

static epo_status read_pair(const struct source *s, const char *size_var, int *rank, int *ranks) {
    const char *r = variable(s->rank), *n = variable(size_var);
    int rank_value, size_value;
    if (!epo_text_int(n, &size_value) || size_value < 1)
        return epo_fail(EPO_E_ARG,
                        "%s: found \"%.64s\", allowed is a number from 1; correct it or unset both "
                        "%s and %s",
                        size_var, n, s->rank, size_var);
    if (!epo_text_int(r, &rank_value) || rank_value >= size_value)
        return epo_fail(EPO_E_ARG,
                        "%s: found \"%.64s\", allowed is 0..%d (%s is %d); correct it or unset "
                        "both",
                        s->rank, r, size_value - 1, size_var, size_value);
    *rank = rank_value;
    *ranks = size_value;
    return EPO_OK;
}

/* torchrun's own third variable: not needed, but a wrong one tells that the
 * environment was put together by hand and is not to be trusted. */
static epo_status check_local_rank(int ranks) {
    const char *text = variable("LOCAL_RANK");
    int value;
    if (text != NULL && (!epo_text_int(text, &value) || value >= ranks))
        return epo_fail(EPO_E_ARG, "LOCAL_RANK: found \"%.64s\", allowed is 0..%d", text,
                        ranks - 1);
    return EPO_OK;
}

/* RANK without WORLD_SIZE or the other way round.  Many batch scripts export
 * WORLD_SIZE for all tasks and let each task find its rank elsewhere: a half that
 * a later, complete source confirms is no error. */
static epo_status check_half(const struct source *half, const struct source *found, int rank,
                             int ranks) {
    const char *size_var = size_name(half);
    const char *have = variable(half->rank) != NULL ? half->rank : size_var;
    const char *miss = have == half->rank ? half->size : half->rank;
    int want = have == half->rank ? rank : ranks, value;
    if (found != NULL && epo_text_int(variable(have), &value) && value == want)
        return EPO_OK;
    return epo_fail(EPO_E_ARG,
                    "%s is \"%.64s\" but %s is not set%s%s; allowed is both or neither: export %s "
                    "or unset %s",
                    have, variable(have), miss, found != NULL ? " and it contradicts " : "",
                    found != NULL ? found->rank : "", miss, have);
}

epo_status epo_ranks_find(int *rank, int *ranks, const char **source) {
    const struct source *half = NULL, *found = NULL;
    int r = 0, n = 1;
    for (int i = 0; i < SOURCES && found == NULL; i++) {
        const struct source *s = &sources[i];
        const char *size_var = size_name(s);
        if (outside_step(s))
            continue;
        if (variable(s->rank) != NULL && size_var != NULL)
            found = s;
        else if (half == NULL &&
                 (variable(s->rank) != NULL || (i < 2 && variable(s->size) != NULL)))
            half = s;
    }
    if (found != NULL) {
        epo_status status = read_pair(found, size_name(found), &r, &n);
        if (status == EPO_OK && found == &sources[0])
            status = check_local_rank(n);
        if (status != EPO_OK)
            return status;
    }
    if (half != NULL) {
        epo_status status = check_half(half, found, r, n);
        if (status != EPO_OK)
            return status;
    }
    *rank = r;
    *ranks = n;
    *source = found != NULL ? found->rank : "default";
    return EPO_OK;
}
