/* SPDX-License-Identifier: Apache-2.0
 *
 * spank_box.h - one srun and one node in a box, for tests of the hooks.
 */
#ifndef EPO_TESTS_SPANK_BOX_H
#define EPO_TESTS_SPANK_BOX_H

#include "fake_spank.h"
#include "unit.h"

extern struct ep_plugin plugin;
/* More of the configuration's "preload". */
extern const char *box_preload_keys;
extern char folder[256], conf[300], library[300], probe_program[300];

#define HAS(text, part) CU_ASSERT_PTR_NOT_NULL_FATAL(strstr((text), (part)))
#define HAS_NOT(text, part) CU_ASSERT_PTR_NULL(strstr((text), (part)))

/* Runs a suite in a folder of its own, with a library to preload. */
int box_run(const char *name, const CU_TestInfo *tests);
int lines(const char *text);
void write_file(const char *path, const char *text);
/* A configuration of these lines, the test's own library among them. */
void configure(const char *lines_of_it);
void make_library(void);
/* The first hook of a process in the box. */
void begin(spank_context_t context);
int callback(int value, const char *argument, int remote);
/* An option, as Slurm hands it over. */
int give(const char *name, const char *argument);
/* Of srun's environment only the record is new in the task's. */
void carry(void);
/* srun, sbatch or salloc up to the allocation; options may be NULL. */
int submit(void (*options)(void));
/* All of srun, which succeeds, and its record on the way. */
void srun(void (*options)(void));
/* slurmstepd on a node, up to the tasks. */
void node(const char *name, void (*options)(void));
/* srun and then one node, with what `options` give in both places. */
void srun_to_task(void (*options)(void));
void give_on(void);
void give_off(void);
void give_auto(void);
void give_all(void); /* on, flex:deepep, delayed wgrad */

#endif
