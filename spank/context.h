/* SPDX-License-Identifier: Apache-2.0
 *
 * context.h - the plugin's one context.
 */
#ifndef EPO_SPANK_CONTEXT_H
#define EPO_SPANK_CONTEXT_H

#include "preload.h"
#include "wrap_spank.h"

#include "core/config.h"
#include "core/policy.h"
#include "core/trust.h"

#include <pthread.h>
#include <stdbool.h>

#define EP_GROUPS_MAX 1024

/* What srun, sbatch and salloc register, in this order. */
enum ep_flag {
    EP_FLAG_OVERLAP,
    EP_FLAG_DISPATCHER,
    EP_FLAG_DELAY,
    EP_FLAG_NO_DELAY,
    EP_FLAG_COUNT
};

/* What speaks against the decision on a node, line by line. */
struct ep_verdict {
    bool made;
    bool lacks;          /* a framework's arguments do not enable overlap */
    char undecided[256]; /* "": every program could be read */
    bool other;          /* a program is neither a framework's nor ours: it may call NCCL */
    bool ours;           /* a program is ours: it calls the library */
    char errors[4096];   /* the node's own; "" when nothing does */
    char shared[4096];   /* what every node of the step finds, by the arguments alone */
    char warnings[2048]; /* for the user, once per step */
};

/* The first task of a node has tried to load a library. */
struct ep_tried {
    bool done;
    char why[256]; /* "": the loader takes it */
};

/* Shared by the tasks of one step on one node: made before they are forked. */
struct ep_shared {
    pthread_mutex_t lock; /* robust, between processes */
    struct ep_tried library, interceptor;
    bool ended;   /* one task has said why the step is not served here: */
    bool refused; /* it ends, or else runs as off */
    char ended_why[EPO_ERROR_MAX];
    bool told_off; /* the user knows */
    struct ep_verdict verdict;
};

struct ep_plugin {
    const struct wrap_spank *api;
    spank_context_t where;
    /* Configuration. */
    const char *config_path;
    bool config_required; /* named in plugstack.conf */
    struct epo_trust trust;
    struct epo_config *config; /* NULL: broken, config_error says why */
    char config_error[EPO_ERROR_MAX];
    /* Wishes. */
    bool flag_seen[EP_FLAG_COUNT]; /* in this round of callbacks */
    int rounds;                    /* ended; a heterogeneous job has one per component */
    bool components_differ;
    bool first_counts; /* of a heterogeneous job: to sbatch the first component's options */
    bool came_late[EP_FLAG_COUNT]; /* there, in a later one alone */
    int command[EPO_OPT_COUNT], inherited[EPO_OPT_COUNT];
    /* The step, on a node. */
    uint32_t job, step;
    bool srun_step; /* one of srun's own steps */
    struct epo_decision decision;
    char refusal[EPO_ERROR_MAX]; /* not empty: the step is refused in task_init */
    bool refusal_shared;         /* by srun, so on every node */
    struct ep_preload preload;
    bool cuda_engine;                    /* beside the library */
    char preload_error[EPO_ERROR_MAX];   /* not empty: why there is none */
    struct ep_preload intercept;         /* the interceptor; no path: */
    char intercept_error[EPO_ERROR_MAX]; /* why there is none */
    const char *gpu_class;               /* this node's, by the configuration; NULL: not told */
    int probe;                           /* the probe's program, checked and open; or -1 */
    char probe_error[EPO_ERROR_MAX];     /* not empty: why it is not, or gave no answer */
    struct ep_verdict verdict;           /* without shared memory */
    struct ep_shared *shared;            /* NULL: every task stands for itself */
};

/* options.c: registers the options; `callback` belongs to the caller, because
 * SPANK's callbacks carry no context. */
int ep_options_register(struct ep_plugin *plugin, spank_t spank, spank_opt_cb_f callback);
/* In sbatch and salloc: what the job that this one is submitted from had inherited is not
 * handed on to it, and not mixed with its own options. */
void ep_options_forget(struct ep_plugin *plugin);
/* What the callback calls: 0, or -1 after one line for a value that is not allowed. */
int ep_option_take(struct ep_plugin *plugin, int flag, const char *argument);
/* Of --delay-wgrad and --no-delay-wgrad hands only the last one on to the job. */
void ep_options_hand_on(struct ep_plugin *plugin, spank_t spank);
/* Slurm calls back for one component of a heterogeneous job after the other.  -1 after a
 * line for each option that nothing would come of. */
int ep_options_end_round(struct ep_plugin *plugin);

/* settings.c: plugstack.conf's arguments; the configuration; the environment. */
int ep_settings_arguments(struct ep_plugin *plugin, int count, char **arguments);
void ep_settings_load(struct ep_plugin *plugin);
/* The user's defaults by `get`; an EPO_E_ARG names a value that is not allowed. */
epo_status ep_settings_environment(const char *(*get)(void *from, const char *name), void *from,
                                   int values[EPO_OPT_COUNT]);

/* submit.c: srun, sbatch, salloc. */
int ep_submit_check(struct ep_plugin *plugin, spank_t spank);
int ep_submit_record(struct ep_plugin *plugin, spank_t spank);

/* step.c: slurmstepd, before the tasks exist.  Never fails. */
void ep_step_decide(struct ep_plugin *plugin, spank_t spank);
/* The node's name as slurmd gave it. */
const char *ep_node_name(const struct ep_plugin *plugin);

/* intercept.c: looks for the interceptor beside the library. */
void ep_intercept_find(struct ep_plugin *plugin, const char *library);

/* serve.c: what cannot be served.  `here`: another node may well serve it. */
bool ep_serve_must_refuse(const struct ep_plugin *plugin, spank_t spank, bool here);
/* The first line of `why` becomes the reason. */
void ep_serve_as_off(struct ep_plugin *plugin, const char *why);
/* For the end of the step; true for the first task of the node that gets here. */
bool ep_serve_note(struct ep_plugin *plugin, bool refused, const char *why);
/* What the tasks came to, if it is not what the step's line said. */
void ep_serve_log(const struct ep_plugin *plugin);

/* shared.c */
struct ep_shared *ep_shared_create(void);
void ep_shared_destroy(struct ep_shared *shared);
bool ep_shared_lock(struct ep_shared *shared);
void ep_shared_unlock(struct ep_shared *shared);

/* task.c: in the task, as the user, before exec. */
int ep_task_start(struct ep_plugin *plugin, spank_t spank);

/* check.c: opens the probe in slurmstepd, where the node's own folders are seen. */
void ep_check_open(struct ep_plugin *plugin);
void ep_check_close(struct ep_plugin *plugin);

/* The life of a context. */
void ep_plugin_begin(struct ep_plugin *plugin, const struct wrap_spank *api,
                     const char *config_path);
void ep_plugin_end(struct ep_plugin *plugin);

#endif
