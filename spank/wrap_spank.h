/* SPDX-License-Identifier: Apache-2.0
 *
 * wrap_spank.h - the seam between the plugin and Slurm.  Everything the plugin
 * asks of its host goes through this table, so that unit tests drive every hook
 * without Slurm.
 */
#ifndef EPO_SPANK_WRAP_SPANK_H
#define EPO_SPANK_WRAP_SPANK_H

#include "core/facts.h"
#include "core/probe_run.h"
#include "core/status.h"

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <slurm/spank.h>

/* Step ids from here on are batch scripts, extern and interactive steps. */
#define WRAP_STEP_SPECIAL 0xfffffff0u

struct wrap_spank {
    spank_context_t (*context)(void);
    spank_err_t (*option_register)(spank_t spank, struct spank_option *option);
    /* S_JOB_ID, S_JOB_STEPID, S_JOB_UID, S_TASK_ID, S_TASK_GLOBAL_ID, ...; 0 or -1. */
    int (*get_number)(spank_t spank, spank_item_t item, uint32_t *value);
    /* The user's groups, the primary one included: how many, at most `room`. */
    int (*get_groups)(spank_t spank, int room, gid_t *groups);
    int (*get_arguments)(spank_t spank, int *count, char ***arguments);
    /* The task's environment.  `get` gives a string to be freed, NULL when absent. */
    char *(*task_getenv)(spank_t spank, const char *name);
    int (*task_setenv)(spank_t spank, const char *name, const char *value);
    int (*task_unsetenv)(spank_t spank, const char *name);
    /* What sbatch and salloc hand on to the job. */
    void (*control_unsetenv)(spank_t spank, const char *name);
    /* This process: srun, sbatch, salloc or slurmstepd. */
    const char *(*own_getenv)(const char *name);
    int (*own_setenv)(const char *name, const char *value);
    int (*own_unsetenv)(const char *name);
    const char *(*own_program)(void); /* its name, without folders */
    uid_t (*own_user)(void);
    int (*own_groups)(int room, gid_t *groups);
    /* Every node of the cluster with its generic resources (may be NULL), by one
     * request to the controller; only for srun.  0, or -1. */
    int (*each_node)(void (*visit)(void *context, const char *node, const char *gres),
                     void *context);
    /* One line each; control characters are made harmless. */
    void (*log_info)(const char *line);
    void (*log_error)(const char *line);
    /* One line on the task's stderr. */
    void (*task_say)(const char *line);
    /* Runs a program with a time limit; its exit status, -1 when it has none.
     * `said` (may be NULL) receives the beginning of its stderr. */
    int (*run)(char *const arguments[], char *const environment[], int timeout_ms, char *said,
               size_t room);
    void (*pause)(int ms);
    /* epo_probe_run() */
    epo_status (*probe)(const struct epo_probe_request *request, epo_facts *facts);
    void (*exit_submission)(int status); /* of srun, sbatch, salloc, before anything is allocated */
    void (*exit_task)(int status);       /* without running anybody's exit handlers */
};

extern const struct wrap_spank wrap_spank_real;

/* Formats, cleans and passes on. */
void wrap_format(void (*to)(const char *line), const char *format, ...) EPO_PRINTF(2, 3);

#endif
