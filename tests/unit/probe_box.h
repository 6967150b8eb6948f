/* SPDX-License-Identifier: Apache-2.0
 *
 * probe_box.h - the probe started in a folder of its own, with made-up variables, files
 * and a stand-in for NVML.
 */
#ifndef EPO_TESTS_PROBE_BOX_H
#define EPO_TESTS_PROBE_BOX_H

#include "core/probe_record.h"
#include "core/probe_run.h"
#include "unit.h"

#include <sys/types.h>

extern char folder[];
extern epo_facts *facts;
/* The task's variables: NAME, VALUE, ..., NULL. */
extern const char *const *variables;

const char *variable(void *context, const char *name);
void path_of(char path[512], const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A file and the folders above it, inside the test's folder. */
void put(const char *name, const char *content, mode_t mode);
void copy(const char *from, const char *name);
/* Runs it; what it found is in `facts`. */
epo_status start(const char *program, bool nvml, int timeout_ms, char *const *arguments, int count);
/* A fact's value, and why it is not known or where it was found. */
const char *text_of(const char *key);
const char *why(const char *key);
/* A clock. */
double seconds(void);
/* Runs a suite in the folder, which holds the stand-in, and removes it. */
int probe_box_run(const char *name, const CU_TestInfo *tests);

#define IS(key, text) CU_ASSERT_STRING_EQUAL(text_of(key), text)
#define HAS(text, part) CU_ASSERT_PTR_NOT_NULL(strstr(text, part))

#endif
