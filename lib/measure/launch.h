/* SPDX-License-Identifier: Apache-2.0
 *
 * launch.h - ranks on one machine without a scheduler.
 */
#ifndef EPO_MEASURE_LAUNCH_H
#define EPO_MEASURE_LAUNCH_H

/* Starts `ranks` processes with torchrun's variables (RANK, WORLD_SIZE,
 * LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), each running
 * body(ctx), whose result is its exit status.  When one fails the rest have a
 * moment to say what they see, then they are ended.  A signal to this process
 * reaches them; they do not outlive it.  Returns the status of the first that
 * failed (128 + signal if one killed it), else 0; 1 with epo_fail_text() if they
 * could not be started.  `who` begins the lines about ranks that a signal ended. */
int launch_ranks(const char *who, int ranks, int (*body)(void *ctx), void *ctx);

/* Is this process, by its launcher's variables, not the first rank?  For lines
 * that every rank would print alike. */
int launch_is_other(void);
/* Does an error line begin with one of those variables?  Then it is this rank's
 * alone. */
int launch_names_rank(const char *text);

#endif
