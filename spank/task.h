/* SPDX-License-Identifier: Apache-2.0
 *
 * task.h - parts of task_init.
 */
#ifndef EPO_SPANK_TASK_H
#define EPO_SPANK_TASK_H

#include "context.h"

#include "core/env_record.h"
#include "core/facts.h"
#include "core/text.h"

/* task_env.c: puts back what an outer step's plugin set. */
void ep_task_restore(struct ep_plugin *plugin, spank_t spank);
/* What is being set, and what will be told about it. */
struct ep_writer {
    struct ep_plugin *plugin;
    spank_t spank;
    struct epo_env_record record;
    struct epo_text told; /* " NAME=VALUE ..." */
    epo_status status;    /* the first failure; later calls do nothing */
};
void ep_writer_set(struct ep_writer *writer, const char *name, const char *value);
/* Only where the user has none. */
void ep_writer_preset(struct ep_writer *writer, const char *name, const char *value);
/* intercept.c: the interceptor beside our library, checked in slurmstepd. */
struct ep_intercept {
    const char *library; /* NULL: none */
    char mode[16];       /* observe | accelerate */
    bool record;
    char why[512]; /* not "": why the step gets none */
};
/* For a step with GPUs; `own_nccl`: a program of it may call NCCL to no plan of ours or a
 * framework's. */
void ep_intercept_judge(struct ep_plugin *plugin, spank_t spank, bool own_nccl,
                        struct ep_intercept *wanted);
/* Sets what the decision calls for, `preload` ("" for none) appended to the
 * user's LD_PRELOAD, and records it.  `*told` lists what was set beside our own
 * variables, to be freed by the caller. */
epo_status ep_task_set(struct ep_plugin *plugin, spank_t spank, const char *preload,
                       const struct ep_intercept *intercept, char **told);

/* task_vars.c: the site's variables and the table of an overlap run. */
void ep_task_variables(struct ep_writer *writer, epo_facts *facts,
                       const struct ep_intercept *intercept);
/* The arguments that frameworks need for the decision. */
void ep_task_arguments(struct ep_writer *writer, const epo_facts *facts);
/* True when Slurm gave the task GPUs. */
bool ep_task_has_gpus(struct ep_plugin *plugin, spank_t spank);

/* task_programs.c: the step's programs, the same list on every node. */
struct ep_vector {
    char **arguments;
    int count;
};
struct ep_programs {
    struct ep_vector *vectors;
    size_t count;
    bool listed; /* by --multi-prog; the vectors are copies */
    bool unread; /* some of the list cannot be read */
};
/* To be freed either way. */
epo_status ep_task_programs(struct ep_plugin *plugin, spank_t spank, struct ep_programs *programs);
void ep_task_programs_free(struct ep_programs *programs);
/* Somebody asked for it; it is no default. */
bool ep_choice_given(const struct ep_plugin *plugin, epo_option_id id);
/* Delayed weight gradients are wanted; `auto` never adds them by itself. */
bool ep_delay_wanted(const struct ep_plugin *plugin);

/* task_facts.c: the run as rules see it, to be destroyed by the caller; NULL when
 * memory is short or the task's arguments are beyond all bounds. */
epo_facts *ep_task_facts(struct ep_plugin *plugin, spank_t spank);

/* check.c: what this node, the program's arguments and the site's least versions say
 * against the decision; the first task of the node finds out. */
#define EP_CHECK_MS 5000 /* without a configuration */
#define EP_CHECK_STOPPED "probe.stopped"
const struct ep_verdict *ep_check_node(struct ep_plugin *plugin, spank_t spank, bool gpus);

/* task_warn.c: says which of the user's own variables hurt an overlap run. */
void ep_task_warn(struct ep_plugin *plugin, spank_t spank);

/* refuse.c: the reasons line by line, the end of the step, the end of the task.  `why` is
 * this node's own; `shared` is what every node of the step finds, and is said once.  Does
 * not return outside of tests. */
void ep_task_refuse(struct ep_plugin *plugin, spank_t spank, const char *why, const char *shared);

/* batch.c: says that the options apply to srun's steps, when a batch script has
 * none. */
void ep_task_batch_note(struct ep_plugin *plugin, spank_t spank);

#endif
