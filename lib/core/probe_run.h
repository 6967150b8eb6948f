/* SPDX-License-Identifier: Apache-2.0
 *
 * probe_run.h - starts the probe and takes its record.  The probe asks a driver's
 * library and reads foreign folders, which may hang or crash: it is a process of
 * its own, with limits, and this side waits no longer than it was told to.
 */
#ifndef EPO_CORE_PROBE_RUN_H
#define EPO_CORE_PROBE_RUN_H

#include "core/facts.h"
#include "core/status.h"

#include <stdbool.h>

#define EPO_PROBE_ARGUMENTS_MAX 64         /* of the task's program; the rest is not shown */
#define EPO_PROBE_TEXT_MAX 32768           /* bytes of one variable or argument */
#define EPO_PROBE_PREFIX "TASK_"           /* a task's PATH reaches the probe as TASK_PATH */
#define EPO_PROBE_LEFT_OUT "TASK_LEFT_OUT" /* variables that were too long, "A:B" */

/* The variables of a task that the probe reads; NULL at the end. */
extern const char *const epo_probe_variables[];

struct epo_probe_request {
    /* The probe's program, opened for reading by who has checked that it is to be
     * trusted (core/trust.h); it stays open. */
    int program;
    const char *nvml_path; /* trusted too; NULL: the loader's own search */
    const char *node;      /* Slurm's name of this node, or NULL */
    const char *(*variable)(void *context, const char *name); /* of the task; NULL: not set */
    void *context;
    bool whole_node; /* ask for all GPUs, whatever the variables say */
    char *const *arguments;
    int argument_count; /* the task's program; 0: not told */
    int timeout_ms;
};

/* Runs the probe as the calling user, in a process group of its own, with nothing
 * but these facts in its environment and no descriptor but its pipe.  It ends
 * within timeout_ms, by itself or killed with all it started.  Puts its facts into
 * `facts`; where it stopped early, the fact EPO_PROBE_STOPPED says at what.
 * EPO_E_TIMEOUT, EPO_E_SYSTEM (a signal, an exit status), EPO_E_VERSION, EPO_E_ARG
 * (a record that is short or damaged): the error line says so, and no fact is put. */
epo_status epo_probe_run(const struct epo_probe_request *request, epo_facts *facts);

#endif
