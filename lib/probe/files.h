/* SPDX-License-Identifier: Apache-2.0
 *
 * files.h - reading within a task's budget.
 */
#ifndef EPO_PROBE_FILES_H
#define EPO_PROBE_FILES_H

#include "probe/probe.h"

#define PROBE_PATH 4096

/* Joins with one '/'; false when it does not fit. */
bool probe_join(char path[PROBE_PATH], const char *folder, const char *name);
bool probe_is_file(const char *path);
bool probe_is_folder(const char *path);

/* The first `limit` bytes of a regular file as a string (NUL bytes end it), to be
 * freed; NULL when there is none, or the budget is spent. */
char *probe_read(epo_probe_task *task, const char *path, size_t limit);

typedef enum probe_scan_end { PROBE_SCANNED, PROBE_NO_FOLDER, PROBE_SCAN_CUT } probe_scan_end;
/* Calls `visit` for every name in the folder but . and .. until it returns false. */
probe_scan_end probe_scan(epo_probe_task *task, const char *folder,
                          bool (*visit)(void *context, const char *name), void *context);

/* The last part of a path. */
const char *probe_base(const char *path);
/* Cuts the last part off; "/" stays. */
void probe_up(char *path);

/* epo_facts_set and its kin, with formatted values; what fails for memory is lost. */
void probe_put(epo_facts *facts, const char *key, const char *source, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void probe_put_text(epo_facts *facts, const char *key, const char *source, const char *text);
void probe_put_unknown(epo_facts *facts, const char *key, const char *source, const char *format,
                       ...) __attribute__((format(printf, 4, 5)));
void probe_put_unset(epo_facts *facts, const char *key, const char *source);

#endif
