/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_spank.h - Slurm's side of the seam for unit tests: one srun or one
 * slurmstepd in a box, everything it was told written down.
 */
#ifndef EPO_TESTS_FAKE_SPANK_H
#define EPO_TESTS_FAKE_SPANK_H

#include "context.h"

#define FAKE_VARIABLES 64
#define FAKE_TEXT 16384

struct fake_env {
    char *names[FAKE_VARIABLES], *values[FAKE_VARIABLES];
    int count;
};

struct fake {
    spank_context_t context;
    struct fake_env task, own;
    uint32_t job, step, user, local_task, local_tasks, task_id, tasks, step_nodes, node;
    bool no_numbers; /* every get_number fails */
    bool fail_setenv;
    gid_t groups[8];
    int group_count;
    const char *own_program;
    uid_t own_user;
    char *arguments[8];
    int argument_count;
    char log[FAKE_TEXT];   /* what slurmd's log or the submitter saw, line by line */
    char said[FAKE_TEXT];  /* what the task's stderr got */
    char ran[FAKE_TEXT];   /* programs that were run */
    char unset[FAKE_TEXT]; /* control variables that were taken back */
    /* what the probe finds; NULL: nothing */
    epo_status (*probe)(const struct epo_probe_request *request, epo_facts *facts);
    int probes; /* how often it was asked */
    int run_status;
    int paused_ms;
    int tries; /* of the loader */
    const char *loader_says;
    int exit_submission, exit_task; /* -1: not called */
    const char *nodes[8], *gres[8]; /* the cluster's; none: the controller does not answer */
    int node_count, node_requests;
    struct spank_option options[EP_FLAG_COUNT];
    int option_count;
    bool refuse_options;
};

extern struct fake fake;
extern const struct wrap_spank wrap_spank_fake;

/* A fresh box. */
void fake_begin(spank_context_t context);
void fake_end(void);
void fake_put(struct fake_env *env, const char *name, const char *value);
const char *fake_get(const struct fake_env *env, const char *name);
/* A new process in the same box: what it was told is forgotten. */
void fake_next(spank_context_t context);

#endif
